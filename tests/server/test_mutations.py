"""A thousand broken requests, and as many messages: each is answered or refused, none is a fault of ours."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.server.peer import Peer, call, house, in_state
from tests.server.served import CALLS, CORPUS, Http, serving
from webrtc_duplex.server import orders
from webrtc_duplex.server.app import DESK
from webrtc_duplex.server.failures import ENGINE
from webrtc_duplex.server.session import SessionState

OFFERS = [path.read_bytes() for path in sorted((CORPUS / "good").glob("*.sdp"))]
BOUNDARY = b"----mutation"
MESSAGES: list[dict[str, object]] = [
    {
        "type": "session.update",
        "session": {"audio": {"output": {"voice": "bob"}}, "instructions": "Be kind.", "seed": 7},
    },
    {"type": "session.update", "session": {"tracing": "auto", "turn_detection": {"idle_timeout_ms": 6000}}},
    {"type": "response.create", "response": {"modalities": ["audio"]}},
    {"type": "response.cancel", "response_id": "resp_1"},
    {"type": "output_audio_buffer.clear"},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
    {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": []}},
]
STRANGE: list[object] = [None, True, -1, 1e308, "", "\ud83d", "x" * 2000, [], [[[[]]]], {}, {"type": {}}, float("nan")]


def mutate(body: bytes, chance: random.Random) -> bytes:
    """A body with a few lines dropped, doubled, cut, swapped, or a few bytes changed."""
    lines = body.split(b"\r\n")
    for _ in range(chance.randint(1, 4)):
        here, there = chance.randrange(len(lines)), chance.randrange(len(lines))
        match chance.choice(("drop", "double", "cut", "swap", "poke")):
            case "drop" if len(lines) > 1:
                del lines[here]
            case "double":
                lines.insert(there, lines[here])
            case "cut":
                lines[here] = lines[here][: chance.randint(0, len(lines[here]))]
            case "swap":
                lines[here], lines[there] = lines[there], lines[here]
            case "poke":
                at = chance.randint(0, len(lines[here]))
                lines[here] = lines[here][:at] + chance.randbytes(chance.randint(0, 3)) + lines[here][at + 1 :]
    return b"\r\n".join(lines)


def as_form(offer: bytes, session: bytes) -> bytes:
    parts = [(b"sdp", b"application/sdp", offer), (b"session", b"application/json", session)]
    lines = [
        b'--%s\r\nContent-Disposition: form-data; name="%s"\r\nContent-Type: %s\r\n\r\n%s'
        % (BOUNDARY, name, kind, value)
        for name, kind, value in parts
    ]
    return b"\r\n".join([*lines, b"--%s--" % BOUNDARY, b""])


def sdp_body(chance: random.Random) -> tuple[str, bytes]:
    return "application/sdp", mutate(chance.choice(OFFERS), chance)


def json_body(chance: random.Random) -> tuple[str, bytes]:
    whole = {"type": "offer", "sdp": chance.choice(OFFERS).decode(), "session": {"voice": "bob", "seed": 7}}
    return "application/json", mutate(json.dumps(whole, indent=1).replace("\n", "\r\n").encode(), chance)


def form_body(chance: random.Random) -> tuple[str, bytes]:
    body = mutate(as_form(chance.choice(OFFERS), b'{"voice": "bob"}'), chance)
    return f"multipart/form-data; boundary={BOUNDARY.decode()}", body


async def rows_all_free(http: Http) -> None:
    engine = http.app[ENGINE]
    async with asyncio.timeout(20):
        while engine.last_step is None or engine.last_step.free_rows != engine.rows:
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("make", [sdp_body, json_body, form_body])
async def test_a_mutated_request_is_answered_or_refused_and_leaves_nothing(tmp_path: Path, make: object) -> None:
    chance = random.Random(f"{make}")
    statuses: dict[int, int] = {}
    async with serving(tmp_path, rows=2) as http:
        for _ in range(340):
            kind, body = make(chance)  # type: ignore[operator]
            answer = await http.post(CALLS, data=body, headers={"Content-Type": kind})
            assert answer.status < 500, (answer.status, body, await answer.text())
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            if answer.status == 201:
                owner = {"Authorization": f"Bearer {answer.headers['X-Call-Secret']}"}
                await http.delete(answer.headers["Location"], headers=owner)
        assert {201, 400} <= set(statuses)
        await rows_all_free(http)
        assert len(http.app[DESK].calls) == 0
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert not {name for name in tasks if name.startswith("call ")}


def message(chance: random.Random) -> bytes:
    """A message of a client's in which a value was replaced, or whose bytes were spoilt."""
    whole = {"event_id": f"mine_{chance.randrange(9)}", **chance.choice(MESSAGES)}
    if chance.random() < 0.5:
        whole[chance.choice([*whole, "event_id"])] = chance.choice(STRANGE)
        return json.dumps(whole).encode()
    return mutate(json.dumps(whole, indent=1).replace("\n", "\r\n").encode(), chance)


@pytest.mark.slow
async def test_a_thousand_mutated_messages_are_each_answered_or_acted_on_and_the_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "MESSAGES_PER_S", 100_000)
    chance = random.Random("messages")
    async with house(tmp_path) as full, call(full, channel="oai-events") as (peer, session):
        await in_state(session, SessionState.LIVE)
        for number in range(1000):
            session.tell(message(chance))
            if number % 20 == 19:  # what was sent before has been acted on once this is answered
                peer.tell({"type": "mark", "event_id": f"mark_{number}"})
                await marked(peer, f"mark_{number}")
        heard = full.runner.heard[0]
        await full.frames_heard(int(heard) + 5)
        assert session.state is SessionState.LIVE
        errors = [event["error"] for event in peer.events if event["type"] == "error"]
    assert all(set(error) == {"type", "code", "message", "param", "event_id"} for error in errors)
    codes = {error["code"] for error in errors}
    assert {"invalid_json", "unknown_event", "unsupported", "invalid_value"} <= codes
    assert not codes & {"internal_error", "server_error", "rate_limit_exceeded"}


async def marked(peer: Peer, name: str) -> None:
    """Wait for the error that answers the message of this name."""
    while not any(event["type"] == "error" and event["error"]["event_id"] == name for event in peer.events):
        await asyncio.sleep(0.005)
