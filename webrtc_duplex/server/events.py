"""What a call says of itself, and what its client may tell it: the event names of OpenAI's Realtime API.

`Feed` carries events to whoever listens: the data channel, a stream over HTTP. `Responses` cuts what the agent says
into responses, by what the model really says. `read_command` makes a message from the client one of the commands.
All of it is bookkeeping: time is an argument, nothing waits.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from aiortc import RTCDataChannel

from webrtc_duplex.audio import FRAME_SAMPLES, SAMPLE_RATE, Pcm
from webrtc_duplex.errors import DuplexError, RequestError
from webrtc_duplex.media.vad import SpeechStarted, SpeechStopped, VoiceDetector
from webrtc_duplex.server.realtime import Json

Event = dict[str, Json]
Listener = Callable[[Event | None], None]
"""Is told every event, and at last None."""

MAX_MESSAGE_BYTES = 65_536
MAX_EVENT_ID = 512
"""Characters, as with OpenAI."""
MESSAGES_PER_S = 50

QUIET_S = 0.6
"""So long without a word and without a voice, and the agent has finished what it said."""
VOICED_RMS = 100.0
"""A frame louder than this is voice: -50 dB of full scale."""

STATISTICS = frozenset({"ext.stats"})
"""What is dropped first when a listener is slow; there will be another in a second."""


# ---- out


class Feed:
    """The events of a call, in order and numbered, for all who listen."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._numbers = itertools.count(1)
        self._ended = False

    def add(self, listener: Listener) -> None:
        """Who comes after the end is told so at once."""
        if self._ended:
            listener(None)
        else:
            self._listeners.append(listener)

    def remove(self, listener: Listener | None) -> None:
        """A no-op for one that does not listen, or for none."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def emit(self, kind: str, **fields: Json) -> None:
        """Tell all of them."""
        event = self.event(kind, **fields)
        for listener in list(self._listeners):
            listener(event)

    def error(self, error: DuplexError, event_id: str | None = None) -> None:
        """Say that a message of the client's, named by its own `event_id`, was not acted on."""
        self.emit("error", error=error_object(error, event_id))

    def end(self) -> None:
        """There will be no more."""
        self._ended = True
        for listener in list(self._listeners):
            listener(None)
        self._listeners.clear()

    def event(self, kind: str, **fields: Json) -> Event:
        """An event that only one listener is to be told."""
        return {"type": kind, "event_id": f"event_{next(self._numbers)}", **fields}


def error_object(error: DuplexError, event_id: str | None = None) -> Json:
    return {
        "type": error.kind,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "event_id": event_id,
    }


class ChannelListener:
    """Sends events by a data channel.

    What waits in the channel is bounded: beyond `SLOW_BYTES` statistics are dropped, beyond `STUCK_BYTES` the client is
    taken for gone, which `on_stuck` is told once.
    """

    SLOW_BYTES = 65_536
    STUCK_BYTES = 1_048_576

    def __init__(self, channel: RTCDataChannel, on_stuck: Callable[[], None]) -> None:
        self._channel = channel
        self._on_stuck = on_stuck
        self.dropped = 0

    def __call__(self, event: Event | None) -> None:
        if event is None or self._channel.readyState != "open":
            return
        waiting = self._channel.bufferedAmount
        if waiting > self.STUCK_BYTES:
            self._on_stuck()
        elif waiting > self.SLOW_BYTES and event["type"] in STATISTICS:
            self.dropped += 1
        else:
            self._send(json.dumps(event))

    def _send(self, text: str) -> None:
        try:
            self._channel.send(text)
        except ValueError:  # more bytes than the client said it takes
            self.dropped += 1


class QueueListener:
    """Keeps events for a reader that comes for them: a stream over HTTP, a sideband.

    Holds `DEPTH` events. When it is full statistics are dropped; a reader who does not come for the rest is cut off.
    """

    DEPTH = 256

    def __init__(self) -> None:
        self._events = asyncio.Queue[Event | None](self.DEPTH + 1)  # the end has a place of its own
        self._ended = False
        self.dropped = 0

    def __call__(self, event: Event | None) -> None:
        if self._ended:
            return
        full = self._events.qsize() >= self.DEPTH
        if full and event is not None and event["type"] in STATISTICS:
            self.dropped += 1
            return
        self._ended = full or event is None
        self._events.put_nowait(None if self._ended else event)

    def __aiter__(self) -> "QueueListener":
        return self

    async def __anext__(self) -> Event:
        event = await self._events.get()
        if event is None:
            self._events.put_nowait(None)
            raise StopAsyncIteration
        return event


# ---- what the agent says


class Responses:
    """Opens a response when the agent begins to speak, and closes it when it has been quiet for a while.

    The model has no turns: a response is a stretch of words or voice, ended by `QUIET_S` of neither. Every response
    that is opened is closed, as clients wait for it.
    """

    def __init__(self, feed: Feed, frame_s: float) -> None:
        self._feed = feed
        self._frames_of_quiet = round(QUIET_S / frame_s)
        self._numbers = itertools.count(1)
        self._open: _Response | None = None
        self._quiet = 0
        self._yields = False  # the user has spoken into what is being said, and still does
        self.hushed = False
        """The client has silenced the agent, who has not paused since: it is not to be heard."""

    @property
    def speaking(self) -> bool:
        return self._open is not None

    def overlap(self, user_speaks: bool) -> None:
        """The user speaks while the agent does, or has stopped to."""
        self._yields = user_speaks and self._open is not None

    def said(self, text: str, pcm: Pcm) -> None:
        """A frame [1920] of the agent's leaves now, and the piece of text that belongs to it ('' for none)."""
        voiced = is_voiced(pcm)
        if not text and not voiced:
            self._rest()
            return
        self._quiet = 0
        if self.hushed:
            return
        response = self._open or self._begin()
        if voiced:
            response.sound(self._feed)
        if text:
            response.word(self._feed, text)

    def hush(self) -> None:
        """Cancel what is being said, and let nothing of it be heard until the agent next pauses."""
        if self._open is not None:
            self._open.cancel(self._feed)
            self.finish("cancelled", "client_cancelled")
            self.hushed = True

    def create(self) -> None:
        """Answer a client that asks for a response, though there are no turns: an empty one, unless one is open."""
        if self._open is None:
            self._begin()
            self.finish()

    def finish(self, status: str = "completed", reason: str | None = None) -> None:
        """Close the response that is open, if one is."""
        if self._open is not None:
            self._open.close(self._feed, status, reason)
            self._open = None
        self._yields = False
        self._quiet = 0

    def _begin(self) -> "_Response":
        self._open = _Response(next(self._numbers))
        self._open.open(self._feed)
        return self._open

    def _rest(self) -> None:
        self._quiet += 1
        if self._quiet >= self._frames_of_quiet:
            self.hushed = False
            if self._yields and self._open is not None:
                self._open.cancel(self._feed)
                self.finish("cancelled", "turn_detected")
            self.finish()


class Turns:
    """Says when the user speaks. Advice for the client: the model hears everything, and decides for itself."""

    def __init__(self, feed: Feed, responses: Responses, idle_timeout_ms: int | None = None) -> None:
        self.idle_timeout_ms = idle_timeout_ms
        """After so long a silence of both the client is told of it, once; None: never."""
        self._feed = feed
        self._responses = responses
        self._detector = VoiceDetector()
        self._items = 0
        self._frames = 0
        self._silent_from = 0
        """The frame after the last in which either spoke."""
        self._told_of_silence = False

    def heard(self, frame: Pcm) -> None:
        """A frame [1920] of the user's, on its way to the model."""
        self._notice_speech(frame)
        self._frames += 1
        if self.speaking or self._responses.speaking:
            self._silent_from, self._told_of_silence = self._frames, False
        elif self.idle_timeout_ms is not None and not self._told_of_silence:
            self._notice_silence(self.idle_timeout_ms)

    def _notice_silence(self, limit_ms: int) -> None:
        start_ms, now_ms = (1000 * frame * FRAME_SAMPLES // SAMPLE_RATE for frame in (self._silent_from, self._frames))
        if now_ms - start_ms >= limit_ms:
            self._told_of_silence = True
            self._items += 1
            self._feed.emit(
                "input_audio_buffer.timeout_triggered",
                audio_start_ms=start_ms,
                audio_end_ms=now_ms,
                item_id=self.item_id,
            )

    def _notice_speech(self, frame: Pcm) -> None:
        for change in self._detector.hear(frame):
            match change:
                case SpeechStarted(sample):
                    self._items += 1
                    self._tell("speech_started", "audio_start_ms", sample)
                    if self._responses.speaking:
                        self._feed.emit("ext.overlap", item_id=self.item_id)
                    self._responses.overlap(True)
                case SpeechStopped(sample):
                    self._tell("speech_stopped", "audio_end_ms", sample)
                    self._responses.overlap(False)

    @property
    def speaking(self) -> bool:
        return self._detector.speaking

    @property
    def item_id(self) -> str:
        """The name of what the user said last, or is saying."""
        return f"item_user_{self._items}"

    def _tell(self, what: str, when: str, sample: int) -> None:
        self._feed.emit(f"input_audio_buffer.{what}", **{when: sample * 1000 // SAMPLE_RATE}, item_id=self.item_id)


class _Response:
    """One response with its one item, which has one part: sound with its transcript."""

    def __init__(self, number: int) -> None:
        self.id = f"resp_{number}"
        self.item_id = f"item_{number}"
        self._pieces: list[str] = []
        self._sounding = False

    def open(self, feed: Feed) -> None:
        feed.emit("response.created", response=self._response("in_progress"))
        feed.emit("response.output_item.added", **self._in_output, item=self._item("in_progress"))
        feed.emit("conversation.item.added", previous_item_id=None, item=self._item("in_progress"))
        feed.emit("response.content_part.added", **self._in_content, part={"type": "audio", "transcript": ""})

    def sound(self, feed: Feed) -> None:
        if not self._sounding:
            self._sounding = True
            feed.emit("output_audio_buffer.started", response_id=self.id)

    def word(self, feed: Feed, text: str) -> None:
        """A piece of the transcript; the first one's leading space is not said."""
        piece = text if self._pieces else text.lstrip()
        self._pieces.append(piece)
        feed.emit("response.output_audio_transcript.delta", **self._in_content, delta=piece)

    def cancel(self, feed: Feed) -> None:
        """What was on its way out is dropped."""
        if self._sounding:
            self._sounding = False
            feed.emit("output_audio_buffer.cleared", response_id=self.id)

    def close(self, feed: Feed, status: str, reason: str | None) -> None:
        transcript = "".join(self._pieces)
        part: Json = {"type": "audio", "transcript": transcript}
        item = self._item("completed" if status == "completed" else "incomplete")
        feed.emit("response.output_audio.done", **self._in_content)
        feed.emit("response.output_audio_transcript.done", **self._in_content, transcript=transcript)
        feed.emit("response.content_part.done", **self._in_content, part=part)
        feed.emit("response.output_item.done", **self._in_output, item=item)
        feed.emit("conversation.item.done", previous_item_id=None, item=item)
        feed.emit("response.done", response=self._response(status, reason))
        if self._sounding:
            feed.emit("output_audio_buffer.stopped", response_id=self.id)

    @property
    def _in_output(self) -> dict[str, Json]:
        return {"response_id": self.id, "output_index": 0}

    @property
    def _in_content(self) -> dict[str, Json]:
        return {"response_id": self.id, "item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str) -> Json:
        transcript = "".join(self._pieces)
        content: Json = [{"type": "output_audio", "transcript": transcript}] if status != "in_progress" else []
        return {
            "id": self.item_id,
            "object": "realtime.item",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, status: str, reason: str | None = None) -> Json:
        done = status != "in_progress"
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": {"type": status, "reason": reason} if reason else None,
            "output": [self._item("completed" if status == "completed" else "incomplete")] if done else [],
            "conversation_id": None,
            "output_modalities": ["audio"],
            "max_output_tokens": "inf",
            "usage": None,
            "metadata": None,
        }


def is_voiced(pcm: Pcm) -> bool:
    samples = pcm.astype(np.float32)
    return bool(samples @ samples > VOICED_RMS**2 * len(samples))


# ---- in


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """`session.update`."""

    session: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Silence:
    """`response.cancel`, `output_audio_buffer.clear`: not to be heard until the agent next pauses."""


@dataclass(frozen=True, slots=True)
class CreateResponse:
    """`response.create`: full duplex has no turns, so it is acknowledged and nothing more."""


@dataclass(frozen=True, slots=True)
class InputBuffer:
    """`input_audio_buffer.clear` or `.commit`: acknowledged; the model hears as it goes."""

    commits: bool


Command = UpdateSession | Silence | CreateResponse | InputBuffer


@dataclass(frozen=True, slots=True)
class Message:
    """What a client sent: its command, or what was wrong with it; `event_id` is the client's own."""

    event_id: str | None
    command: Command | RequestError


def read_message(text: str | bytes) -> Message:
    """Read one message; never raises."""
    event_id: str | None = None
    try:
        fields = _object(text)
        event_id = _event_id(fields)
        return Message(event_id, _command(fields))
    except RequestError as error:
        return Message(event_id, error)


def _event_id(fields: Mapping[str, Json]) -> str | None:
    """The client's name for its event, which is sent back; only a short text is one, and NaN is no JSON."""
    name = fields.get("event_id")
    return name if isinstance(name, str) and len(name) <= MAX_EVENT_ID else None


def _object(text: str | bytes) -> Mapping[str, Json]:
    if len(text) > MAX_MESSAGE_BYTES:
        sentence = f"a message may have {MAX_MESSAGE_BYTES} bytes, not {len(text)}"
        raise RequestError(sentence, code="message_too_large")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"a message must be JSON: {exc}", code="invalid_json") from exc
    if not isinstance(fields, dict):
        raise RequestError("a message must be a JSON object with a `type`", code="invalid_json")
    return fields


def _command(fields: Mapping[str, Json]) -> Command:
    match fields:
        case {"type": "session.update", "session": dict(session)}:
            return UpdateSession(session)
        case {"type": "session.update"}:
            raise RequestError("session.update wants a `session` object", code="invalid_value", param="session")
        case {"type": "response.cancel" | "output_audio_buffer.clear"}:
            return Silence()
        case {"type": "response.create"}:
            return CreateResponse()
        case {"type": "input_audio_buffer.clear"}:
            return InputBuffer(commits=False)
        case {"type": "input_audio_buffer.commit"}:
            return InputBuffer(commits=True)
        case {"type": str(kind)} if kind.startswith("conversation.item.") or kind == "input_audio_buffer.append":
            raise RequestError(f"{kind} is not supported: the model hears and speaks sound only", code="unsupported")
        case {"type": str(kind)}:
            raise RequestError(f"no event is called {kind!r:.60}", code="unknown_event", param="type")
    raise RequestError("a message must have a `type`", code="invalid_json", param="type")
