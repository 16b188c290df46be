"""Calls that are over are known for a while, and not for ever."""

from webrtc_duplex.server.ended import KEPT_S, MOST_KEPT, Ended


def test_a_call_that_has_ended_is_known_for_a_minute() -> None:
    now = 100.0
    ended = Ended[str](lambda: now)
    ended.add("a", "the call")
    now += KEPT_S - 1
    ended.add("b", "another")
    assert ended.find("a") == "the call"
    now += 2
    assert ended.find("a") is None
    assert ended.find("b") == "another"


def test_of_too_many_the_oldest_is_forgotten() -> None:
    ended = Ended[int](lambda: 0.0)
    for number in range(MOST_KEPT + 1):
        ended.add(str(number), number)
    assert ended.find("0") is None
    assert ended.find("1") == 1
