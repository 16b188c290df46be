"""A call's recording, as its caller switches it on and off."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

from webrtc_duplex.audio import Pcm
from webrtc_duplex.errors import EngineError, RequestError
from webrtc_duplex.server.events import Event, Feed, Listener
from webrtc_duplex.server.recording import Recording, Shelf


class Tape:
    """Records a call while its block lasts and for as long as is wanted; each time into a recording of its own.

    Owned by the `Session`. `greet` lets a listener hear the call's events, from `session.created` on.
    """

    def __init__(
        self, call_id: str, shelf: Shelf | None, wanted: bool, feed: Feed, greet: Callable[[Listener], None]
    ) -> None:
        self.wanted = wanted
        """What the session object says: whether the call is recorded, or will be once it has a row."""
        self._call_id = call_id
        self._shelf = shelf
        self._feed = feed
        self._greet = greet
        self._recording: Recording | None = None
        self._open = ExitStack()
        """What `_recording` has open."""

    def __enter__(self) -> Self:
        self.switch(self.wanted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def switch(self, wanted: bool) -> None:
        """Write the call down from now on, or no longer.

        Raises RequestError on a server that records none, EngineError where its disk does not take any.
        """
        if wanted is (self._recording is not None):
            return
        self._open.close()
        self.wanted = False
        if wanted:
            self._begin()

    def hear(self, position: int, frame: Pcm) -> None:
        """The caller's frame [1920] of this position."""
        if self._recording is not None:
            self._recording.hear(position, frame)

    def say(self, position: int, frame: Pcm) -> None:
        """The agent's frame [1920] of this position."""
        if self._recording is not None:
            self._recording.say(position, frame)

    def _begin(self) -> None:
        if self._shelf is None:
            raise no_recordings()
        try:
            self._recording = self._open.enter_context(self._shelf.recording(self._call_id))
        except OSError as error:
            raise EngineError(f"the call cannot be recorded: {error.strerror}", code="recording_failed") from error
        self.wanted = True
        note = partial(_note, self._recording)
        self._greet(note)
        self._open.callback(self._end, note)

    def _end(self, note: Listener) -> None:
        self._feed.remove(note)
        self._recording = None


def no_recordings() -> RequestError:
    """What is said to who wants a recording where there is no place for any."""
    return RequestError("this server records no calls", code="recording_disabled", param="session.recording")


def _note(recording: Recording, event: Event | None) -> None:
    if event is not None:
        recording.event(event)
