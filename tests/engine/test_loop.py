"""The engine as a whole: inbox, ring, scheduler and a model that echoes, on a clock that the test turns."""

import numpy as np
import pytest

from tests.engine_doubles import EchoDouble, FakeClock, ScriptedInbox, tone
from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES, Pcm, SoundRing
from webrtc_duplex.engine.loop import run_engine
from webrtc_duplex.engine.scheduler import Joined
from webrtc_duplex.messages import (
    Close,
    Ended,
    Event,
    Hello,
    Hold,
    Lease,
    Leased,
    Live,
    Open,
    Output,
    Prompt,
    Refused,
    Start,
    Stepped,
)


class Stage:
    """An engine with callers that behave: each starts when it is leased, and speaks a tone at every position."""

    def __init__(self, rows: int, seconds: float, step_s: float = 0.01) -> None:
        self.clock = FakeClock()
        self.begin = self.clock.now
        self.runner = EchoDouble(rows, self.clock, step_s)
        self.ring = SoundRing.private(rows)
        self.inbox = ScriptedInbox(self.clock, self.begin + seconds)
        self.inbox.answer = self.on_event
        self.inbox.at(self.begin, 1, Joined())
        self.leases: dict[str, Lease] = {}
        self.said: dict[Lease, list[tuple[Output, Pcm]]] = {}
        self.mute: set[Lease] = set()

    def call(self, call: str, after_s: float = 0.0, prompt: Prompt | None = None) -> None:
        self.inbox.at(self.begin + after_s, 1, Open(call, prompt or Prompt()))

    def play(self) -> None:
        run_engine(self.inbox, self.ring, self.runner, self.clock)

    def on_event(self, connection: int, event: Event) -> None:
        match event:
            case Leased(call, lease):
                self.leases[call] = lease
                self.inbox.at(self.clock.now, connection, Start(lease))
            case Live(lease, position, tick_at):
                self.inbox.at(tick_at - 0.01, connection, lambda: self.speak(lease, position, tick_at))
            case Stepped(outputs=outputs):
                for output in outputs:
                    self.listen(output)

    def speak(self, lease: Lease, position: int, tick_at: float) -> None:
        if lease not in self.mute:
            self.ring.heard.write(lease.row, lease.epoch, position, voice(lease, position))
        later = tick_at + FRAME_S
        self.inbox.at(later - 0.01, 1, lambda: self.speak(lease, position + 1, later))

    def listen(self, output: Output) -> None:
        pcm = np.empty(FRAME_SAMPLES, np.int16)
        assert self.ring.said.read(output.row, output.epoch, output.position, pcm)
        self.said.setdefault(Lease(output.row, output.epoch), []).append((output, pcm))

    def events(self, kind: type[Event]) -> list[Event]:
        return [event for _, _, event in self.inbox.sent if isinstance(event, kind)]


def voice(lease: Lease, position: int) -> Pcm:
    """What this caller says at this position, and nobody else ever."""
    return np.full(FRAME_SAMPLES, 1 + lease.row * 1000 + lease.epoch * 100 + position % 100, np.int16)


def test_a_connection_is_greeted_with_the_model_and_the_ring() -> None:
    stage = Stage(2, 0.1)
    stage.play()
    _, connection, hello = stage.inbox.sent[0]
    assert connection == 1 and hello == Hello(stage.runner.card, 2, "")


def test_every_caller_hears_the_answer_to_every_frame_in_order() -> None:
    stage = Stage(4, 10.0)
    for call in "abcd":
        stage.call(call)
    stage.play()
    assert len(stage.said) == 4
    for lease, frames in stage.said.items():
        assert [output.position for output, _ in frames] == list(range(len(frames))) and len(frames) > 120
        assert all(output.heard and np.array_equal(pcm, voice(lease, output.position)) for output, pcm in frames)


def test_all_rows_with_a_frame_at_a_tick_are_served_by_one_step() -> None:
    stage = Stage(4, 5.0)
    for call in "abcd":
        stage.call(call)
    stage.play()
    assert all(sorted(batch) == [0, 1, 2, 3] for batch in stage.runner.batches)


def test_a_frame_that_is_not_there_is_silence_and_counted_and_the_model_is_stepped_all_the_same() -> None:
    stage = Stage(1, 5.0)
    stage.call("a")
    stage.inbox.at(stage.begin + 1.0, 1, lambda: stage.mute.add(stage.leases["a"]))
    stage.inbox.at(stage.begin + 2.0, 1, stage.mute.clear)
    stage.play()
    frames = stage.said[stage.leases["a"]]
    silent = [pcm for output, pcm in frames if not output.heard]
    assert 12 <= len(silent) <= 13 and not any(pcm.any() for pcm in silent)
    assert [output.position for output, _ in frames] == list(range(len(frames)))


def test_a_frame_written_twice_advances_the_model_once() -> None:
    stage = Stage(1, 2.0)
    stage.call("a")
    stage.inbox.at(stage.begin + 0.5, 1, lambda: stage.ring.heard.write(0, 1, 20, tone()))
    stage.inbox.at(stage.begin + 0.6, 1, lambda: stage.ring.heard.write(0, 1, 20, tone(220)))
    stage.play()
    frames = stage.said[stage.leases["a"]]
    assert [output.text for output, _ in frames] == list(range(1, len(frames) + 1))


def test_sound_written_under_an_old_epoch_is_not_heard() -> None:
    stage = Stage(1, 3.0)
    stage.call("a")
    stage.inbox.at(stage.begin + 1.0, 1, lambda: stage.inbox.at(stage.clock.now, 1, Close(stage.leases["a"])))
    stage.call("b", after_s=1.1)  # the caller of `a` speaks on
    stage.play()
    heir = stage.leases["b"]
    assert heir == Lease(0, 2)
    heard = [pcm[0] for output, pcm in stage.said[heir] if output.heard]
    assert all(100 * heir.epoch < sample < 100 * heir.epoch + 101 for sample in heard)


def test_a_recycled_row_is_begun_afresh_with_positions_from_0() -> None:
    stage = Stage(1, 4.0)
    stage.call("a", prompt=Prompt(voice="ann"))
    stage.inbox.at(stage.begin + 1.0, 1, lambda: stage.inbox.at(stage.clock.now, 1, Close(stage.leases["a"])))
    stage.call("b", after_s=1.5, prompt=Prompt(voice="bob"))
    stage.play()
    output, _ = stage.said[stage.leases["b"]][0]
    assert (output.position, output.text) == (0, 1)
    assert [prompt.voice for _, prompt in stage.runner.began] == ["ann", "bob"]


def test_a_held_row_is_untouched_while_others_are_stepped() -> None:
    stage = Stage(2, 4.0)
    stage.call("a")
    stage.call("b")
    heard: list[list[int]] = []
    stage.inbox.at(stage.begin + 1.0, 1, lambda: stage.inbox.at(stage.clock.now, 1, Hold(stage.leases["a"])))
    for moment in (1.2, 3.8):
        stage.inbox.at(stage.begin + moment, 1, lambda: heard.append(stage.runner.heard.tolist()))
    stage.play()
    row, other = stage.leases["a"].row, stage.leases["b"].row
    assert heard[0][row] == heard[1][row] and heard[0][other] < heard[1][other]


def test_a_row_given_back_serves_who_asks_in_the_same_moment_whichever_stood_first() -> None:
    stage = Stage(1, 2.0)
    stage.call("a")
    stage.call("b", after_s=1.0)
    stage.inbox.at(stage.begin + 1.0, 1, Close(Lease(0, 1)))
    stage.play()
    assert not stage.events(Refused) and stage.leases["b"] == Lease(0, 2)


def test_a_refused_voice_touches_nobody() -> None:
    stage = Stage(2, 2.0)
    stage.call("a")
    stage.call("b", after_s=1.0, prompt=Prompt(voice="nobody"))
    stage.play()
    assert len(stage.events(Refused)) == 1
    assert len(stage.runner.began) == 1
    assert [output.text for output, _ in stage.said[stage.leases["a"]]] == list(range(1, len(stage.runner.batches) + 1))


def test_a_row_at_fault_is_reset_and_the_others_sound_is_as_without_it() -> None:
    with_fault, without = Stage(2, 3.0), Stage(2, 3.0)
    for stage in (with_fault, without):
        stage.call("a")
        stage.call("b")
    with_fault.inbox.at(with_fault.begin + 1.0, 1, lambda: with_fault.runner.faulty.add(0))
    with_fault.play()
    without.play()
    (ended,) = with_fault.events(Ended)
    assert isinstance(ended, Ended) and ended.lease == Lease(0, 1) and ended.reason == "server_error"
    assert with_fault.runner.resets[-1] == 0
    other = with_fault.leases["b"]
    assert [(output, pcm.tobytes()) for output, pcm in with_fault.said[other]] == [
        (output, pcm.tobytes()) for output, pcm in without.said[other]
    ]


def test_a_failure_of_the_model_is_the_engines_end_after_one_attempt() -> None:
    stage = Stage(2, 5.0)
    stage.call("a")
    stage.call("b")
    attempts = 0

    def fail(rows: object, pcm: object) -> None:
        nonlocal attempts
        attempts += 1
        raise MemoryError("the device is full")

    stage.runner.step = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(MemoryError):
        stage.play()
    assert attempts == 1


def test_two_callers_at_once_are_each_served_as_if_alone() -> None:
    together, alone = Stage(2, 5.0), Stage(2, 5.0)
    together.call("a")
    together.call("b", after_s=0.7)
    alone.call("a")
    together.play()
    alone.play()
    lease = together.leases["a"]
    assert [(output, pcm.tobytes()) for output, pcm in together.said[lease]] == [
        (output, pcm.tobytes()) for output, pcm in alone.said[lease]
    ]


def test_ten_minutes_of_two_callers_pass_without_a_tick_lost() -> None:
    stage = Stage(2, 600.0)
    stage.call("a")
    stage.call("b")
    stage.play()
    assert {len(frames) for frames in stage.said.values()} == {7499}, "7500 ticks, the first one before they were live"
    steps = [event for event in stage.events(Stepped) if isinstance(event, Stepped)]
    assert sum(step.skipped for step in steps) == 0 and max(step.late_s for step in steps) < 1e-5
