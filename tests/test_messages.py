"""Messages as they cross a socket."""

import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webrtc_duplex.errors import CapacityError, CheckpointError, DuplexError, RequestError
from webrtc_duplex.messages import (
    MESSAGE_LIMIT,
    Close,
    Event,
    Hold,
    Lease,
    Open,
    Output,
    Prompt,
    Refused,
    Request,
    Start,
    Stepped,
    Unpacker,
    load,
    pack,
)

MESSAGES: list[Request | Event] = [
    Open("a", Prompt(voice="ann", text="Be kind.", seed=7)),
    Start(Lease(3, 9)),
    Hold(Lease(3, 9)),
    Stepped(1.0, 0.03, 0.0, 0, 2, "overloaded", (Output(3, 9, 12, 5, True), Output(1, 2, 3, 0, False))),
    Close(Lease(3, 9)),
]


@given(cuts=st.lists(st.integers(0, 600), max_size=20))
def test_messages_survive_any_cutting_of_the_stream(cuts: list[int]) -> None:
    stream, unpacker, got = b"".join(map(pack, MESSAGES)), Unpacker(load), list[Request | Event]()
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        got += unpacker.feed(stream[start:end])
    assert got == MESSAGES


@pytest.mark.parametrize(
    "error", [CapacityError("full", retry_after_s=5), RequestError("which?", param="voice", code="unknown_voice")]
)
def test_a_refusal_is_its_error_again(error: DuplexError) -> None:
    refusal = Refused.because("a", error)
    assert type(refusal.exception()) is type(error)
    assert Refused.because("a", refusal.exception()) == refusal


def test_a_refusal_keeps_the_status_of_its_error() -> None:
    assert Refused.because("a", CheckpointError("not this voice", status=400)).exception().status == 400


def test_nothing_but_messages_is_unpickled() -> None:
    for strange in (print, pickle.Unpickler, RequestError):
        body = pickle.dumps(strange)
        with pytest.raises(ValueError, match="is no message"):
            Unpacker(load).feed(struct.pack("<I", len(body)) + body)


def test_a_message_longer_than_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        Unpacker(load).feed(struct.pack("<I", MESSAGE_LIMIT + 1))


def test_a_prompt_is_text_that_every_tokenizer_takes() -> None:
    assert Prompt(text="be \U0001f600 kind\0").text == "be \U0001f600 kind\0"
    with pytest.raises(RequestError, match="surrogate"):
        Prompt(text="be \ud83d")
