"""`serve --model DIR` with a checkpoint in PersonaPlex's own layout: voices and text prompts, end to end."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from tests.checkpoints import VOICES, personaplex_directory
from tests.serving import serving
from webrtc_duplex.client.call import Call, connect
from webrtc_duplex.errors import RequestError

HEARD_PACKETS = 50


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("served")
    directory = personaplex_directory(folder / "personaplex")
    async with serving(str(directory), rows=2, log=folder / "log") as url:
        yield url


async def loudness(call: Call) -> float:
    """Root mean square of a second of what the agent says."""
    heard = []
    async for sound in call.sound():
        heard.append(sound.pcm)
        if len(heard) == HEARD_PACKETS:
            break
    return float(np.sqrt(np.mean(np.concatenate(heard).astype(np.float64) ** 2)))


async def session(call: Call) -> dict[str, object]:
    async for event in call.events():
        if event.type == "session.created":
            return dict(event.body["session"])
    raise AssertionError("no session.created")


async def test_the_server_names_the_checkpoints_voices(url: str) -> None:
    async with aiohttp.ClientSession(url) as http, http.get("/v1/voices") as answer:
        told = await answer.text()
    assert all(voice in told for voice in VOICES)


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"voice": "Nobody"}, "Nobody"),
        ({"instructions": "word " * 100}, r"is \d+ tokens long, and may be 99"),
    ],
)
async def test_a_prompt_that_cannot_be_is_refused_with_a_sentence(
    url: str, wish: dict[str, str], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        async with connect(url, voice=wish.get("voice"), instructions=wish.get("instructions")):
            pass


async def test_two_callers_talk_at_once_each_with_a_voice_and_a_persona_of_its_own(url: str) -> None:
    async with (
        connect(url, voice=VOICES[0], instructions="you are a teacher", seed=1) as one,
        connect(url, voice=VOICES[1], instructions="answer questions", seed=2) as other,
    ):
        async with asyncio.timeout(60):
            sessions = await asyncio.gather(session(one), session(other))
            levels = await asyncio.gather(loudness(one), loudness(other))
    assert [told["audio"]["output"]["voice"] for told in sessions] == list(VOICES)  # type: ignore[index]
    assert [told["instructions"] for told in sessions] == ["you are a teacher", "answer questions"]
    assert min(levels) > 10
