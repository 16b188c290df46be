"""Warnings and limits of a call, without one."""

from typing import Any

import pytest

from webrtc_duplex.messages import Stepped
from webrtc_duplex.server.events import Feed
from webrtc_duplex.server.vigil import Vigil
from webrtc_duplex.settings import ServerSettings

PUNCTUAL = Stepped(tick_at=0.0, step_s=0.03, late_s=0.0, skipped=0, free_rows=0)
LATE = Stepped(tick_at=0.0, step_s=0.03, late_s=0.05, skipped=0, free_rows=0)


class Watched:
    """A vigil with a clock in the test's hand, and what it has told."""

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self.now = 100.0
        self.events: list[Any] = []
        feed = Feed()
        feed.add(self.events.append)
        self.vigil = Vigil(feed, settings or ServerSettings(), lambda: self.now)

    def warn(self, step: Stepped | None = PUNCTUAL, echo: bool = False, drift_ppm: float | None = None) -> list[str]:
        """What is warned of now."""
        known = len(self.events)
        self.vigil.warn(step, echo, drift_ppm)
        return [event["code"] for event in self.events[known:]]


@pytest.mark.parametrize(
    ("signs", "code"),
    [
        ({"step": LATE}, "gpu_late"),
        ({"echo": True}, "echo_suspected"),
        ({"drift_ppm": 900.0}, "clock_drift"),
        ({"drift_ppm": -900.0}, "clock_drift"),
    ],
)
def test_a_trouble_is_told_once_until_it_has_stopped(signs: dict[str, Any], code: str) -> None:
    watched = Watched()
    assert watched.warn() == []
    assert watched.warn(**signs) == [code]
    assert watched.warn(**signs) == []
    assert watched.warn() == []
    assert watched.warn(**signs) == [code]


def test_the_clock_of_an_ordinary_sound_card_is_no_trouble() -> None:
    assert Watched().warn(drift_ppm=120.0) == []


def test_a_user_who_is_never_heard_is_warned_of() -> None:
    watched = Watched()
    watched.now += 16
    assert watched.warn() == ["input_silent"]
    watched.vigil.voices(user=True, agent=False, live=True)
    assert watched.warn() == []


def test_a_call_that_is_held_does_not_miss_its_user() -> None:
    watched = Watched()
    watched.now += 16
    watched.vigil.voices(user=False, agent=False, live=False)
    assert watched.warn() == []


def test_the_end_of_a_long_call_is_known_half_a_minute_before() -> None:
    watched = Watched(ServerSettings(max_duration_s=600))
    watched.now += 569
    told = [(watched.vigil.left_s, watched.vigil.over_because)]
    for passed_s in (2, 30):
        watched.now += passed_s
        told.append((watched.vigil.left_s, watched.vigil.over_because))
    assert told == [(None, None), (29, None), (0, "max_duration")]


def test_a_silence_is_warned_of_before_it_ends_the_call() -> None:
    watched = Watched(ServerSettings(idle_timeout_s=14))
    watched.now += 8
    assert watched.warn() == ["idle_timeout"] and watched.vigil.over_because is None
    watched.vigil.voices(user=False, agent=True, live=True)
    assert watched.warn() == []
    watched.now += 14.5
    assert watched.vigil.over_because == "idle_timeout"
