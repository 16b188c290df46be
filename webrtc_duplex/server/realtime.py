"""The session object of OpenAI's Realtime API, and the prompt that it stands for.

The API says `instructions`, we say prompt text. Besides OpenAI's own fields a session may name a `seed` and the
temperatures and top-k of the two samplers. Fields that mean nothing here are passed over, as clients send many.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from webrtc_duplex.audio import SAMPLE_RATE
from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import ModelCard, Prompt

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 10.0
MAX_TOP_K = 2**20
IDLE_MS = (5_000, 30_000)
"""What OpenAI takes for `idle_timeout_ms`."""


def read_session(session: Mapping[str, Json], base: Prompt, card: ModelCard) -> Prompt:
    """`base` with what the session object wishes otherwise.

    Raises RequestError that names the field: `unknown_voice`, `string_above_max_length`, `invalid_value`.
    """
    voice = _voice(session)
    return replace(
        base,
        voice=base.voice if voice is None or not card.voices else _known_voice(voice, card),
        text=_text(session.get("instructions"), base.text, card),
        seed=_seed(session, base.seed),
        text_temperature=_temperature(session, "text_temperature", base.text_temperature),
        text_top_k=_top_k(session, "text_top_k", base.text_top_k),
        audio_temperature=_temperature(session, "audio_temperature", base.audio_temperature),
        audio_top_k=_top_k(session, "audio_top_k", base.audio_top_k),
    )


def what_counts(session: Mapping[str, Json], card: ModelCard) -> dict[str, Json]:
    """The fields of a session, already read once, that make a difference here: all that is worth keeping of it."""
    names = {"seed", "text_temperature", "text_top_k", "audio_temperature", "audio_top_k"}
    if card.takes_text:
        names.add("instructions")
    fields = {name: value for name, value in session.items() if name in names}
    if card.voices:
        fields["voice"] = _voice(session)
    if (limit_ms := read_idle_timeout(session, None)) is not None:
        fields["audio"] = {"input": {"turn_detection": {"idle_timeout_ms": limit_ms}}}
    return fields


def read_idle_timeout(session: Mapping[str, Json], base: int | None) -> int | None:
    """`audio.input.turn_detection.idle_timeout_ms`: after how long a silence the client is to be told of it.

    It is all that counts of turn detection, as the model has no turns. Raises RequestError.
    """
    match session:
        case {"audio": {"input": {"turn_detection": None}}}:
            return None
        case {"audio": {"input": {"turn_detection": {"idle_timeout_ms": limit}}}} if limit is not None:
            if isinstance(limit, bool) or not isinstance(limit, int) or not IDLE_MS[0] <= limit <= IDLE_MS[1]:
                message = f"idle_timeout_ms must be a whole number from {IDLE_MS[0]} to {IDLE_MS[1]}, not {limit!r:.40}"
                raise _invalid(message, "audio.input.turn_detection.idle_timeout_ms")
            return limit
    return base


def session_object(call: str, prompt: Prompt, card: ModelCard, idle_timeout_ms: int | None = None) -> dict[str, Json]:
    """The session in force, as the API shows it."""
    pcm: Json = {"type": "audio/pcm", "rate": SAMPLE_RATE}
    turns: Json = None if idle_timeout_ms is None else {"type": "server_vad", "idle_timeout_ms": idle_timeout_ms}
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": f"sess_{call.removeprefix('rtc_')}",
        "model": card.name,
        "output_modalities": ["audio"],
        "instructions": prompt.text or "",
        "audio": {
            "input": {"format": pcm, "transcription": None, "noise_reduction": None, "turn_detection": turns},
            "output": {"format": pcm, "voice": prompt.voice or card.default_voice, "speed": 1.0},
        },
        "tools": [],
        "tool_choice": "none",
        "max_output_tokens": "inf",
        "tracing": None,
        "truncation": "auto",
        "prompt": None,
        "include": None,
        "seed": prompt.seed,
        "text_temperature": prompt.text_temperature,
        "text_top_k": prompt.text_top_k,
        "audio_temperature": prompt.audio_temperature,
        "audio_top_k": prompt.audio_top_k,
    }


def _voice(session: Mapping[str, Json]) -> Json:
    """`audio.output.voice`, or `voice` as older clients send it; OpenAI also takes `{"id": ...}`."""
    voice = session.get("voice")
    match session.get("audio"):
        case {"output": {"voice": named}}:
            voice = named
    match voice:
        case {"id": named}:
            return named
    return voice


def _known_voice(voice: Json, card: ModelCard) -> str:
    if isinstance(voice, str) and voice in card.voices:
        return voice
    known = ", ".join(card.voices)
    raise RequestError(
        f"no voice {voice!r}; there are: {known}", code="unknown_voice", param="session.audio.output.voice"
    )


def _text(text: Json, base: str | None, card: ModelCard) -> str | None:
    where = "session.instructions"
    if text is None:
        return base
    if not isinstance(text, str):
        raise RequestError(f"instructions must be a string, not {text!r:.40}", code="invalid_value", param=where)
    if not card.takes_text:  # clients of OpenAI's always send some
        return base
    if len(text) > card.max_text_chars:
        sentence = f"instructions may have {card.max_text_chars} characters, not {len(text)}"
        raise RequestError(sentence, code="string_above_max_length", param=where)
    return text


def _temperature(session: Mapping[str, Json], name: str, base: float | None) -> float | None:
    value = session.get(name)
    if value is None:
        return base
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TEMPERATURE:
        raise _invalid(f"{name} must be a number from 0 to {MAX_TEMPERATURE:g}, not {value!r:.40}", name)
    return float(value)


def _top_k(session: Mapping[str, Json], name: str, base: int | None) -> int | None:
    return base if session.get(name) is None else _whole(session, name, 1, MAX_TOP_K)


def _seed(session: Mapping[str, Json], base: int) -> int:
    return base if session.get("seed") is None else _whole(session, "seed", 0, MAX_SEED)


def _whole(session: Mapping[str, Json], name: str, low: int, high: int) -> int:
    value = session[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(f"{name} must be a whole number from {low} to {high}, not {value!r:.40}", name)
    return value


def _invalid(message: str, name: str) -> RequestError:
    return RequestError(message, code="invalid_value", param=f"session.{name}")
