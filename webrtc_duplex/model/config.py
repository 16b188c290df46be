"""Sizes of the model, as the family's `config.json` files name them; the defaults are the released PersonaPlex-7B.

Two things are not sizes of the weights but of how they are run. `keys` is how many positions a query sees once its ring
is full: PersonaPlex's own code hides the oldest key (context - 1), Moshi's does not; before the wrap both are the same.
And of a file with 16 depformer steps only the first `STEPS` are run: the others predict the caller, unheard.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from webrtc_duplex.errors import CheckpointError

CODEBOOKS = 8
"""Codebooks of Mimi that the model hears and says, of the 32 in the released file."""

STEPS = CODEBOOKS
"""Depformer steps that are run: one for each codebook of the agent."""

Json = Mapping[str, object]

_RELEASED_SILENCE = (948, 243, 1178, 546, 1736, 1030, 1978, 2008)
_RELEASED_SINE = (430, 1268, 381, 1611, 1095, 1495, 56, 472)
_RELEASED_CARD = 2048


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What a call gets that asks for nothing else. A temperature of 0 is greedy; a top-k of 0 keeps every token."""

    text_temperature: float = 0.7
    text_top_k: int = 25
    audio_temperature: float = 0.8
    audio_top_k: int = 250

    @classmethod
    def from_json(cls, entry: Json) -> Self:
        default = cls()
        return cls(
            text_temperature=_number(entry, "text_temperature", default.text_temperature),
            text_top_k=_whole(entry, "text_top_k", default.text_top_k),
            audio_temperature=_number(entry, "audio_temperature", default.audio_temperature),
            audio_top_k=_whole(entry, "audio_top_k", default.audio_top_k),
        )


@dataclass(frozen=True, slots=True)
class LMConfig:
    """The temporal transformer and the depformer."""

    width: int = 4096
    heads: int = 32
    layers: int = 32
    hidden: int = 11264
    keys: int = 2999
    max_period: float = 10_000.0
    text_card: int = 32_000
    """Text tokens that can be said; token `text_card` is the initial one, input only."""
    card: int = _RELEASED_CARD
    """Codes that can be said; code `card` is the initial one, input only."""
    text_padding: int = 3
    depformer_width: int = 1024
    depformer_heads: int = 16
    depformer_layers: int = 6
    depformer_hidden: int = 2816
    file_steps: int = 16
    """Depformer steps in the file, 16 or 8; `STEPS` of them are loaded."""
    silence_codes: tuple[int, ...] = _RELEASED_SILENCE
    """What the agent says while a prompt is run, [8]; empty where the codec's are not known."""
    sine_codes: tuple[int, ...] = _RELEASED_SINE
    """What the caller says while a prompt is run, [8]: 440 Hz."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        _divides(self.heads, self.width, "num_heads", "dim")
        _divides(self.depformer_heads, self.depformer_width, "depformer_num_heads", "depformer_dim")
        if self.file_steps < STEPS:
            raise CheckpointError(f"the depformer needs at least {STEPS} steps; this one has {self.file_steps}")
        if self.keys < 1:
            raise CheckpointError(f"the attention window needs at least 1 key, not {self.keys}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def depformer_head_width(self) -> int:
        return self.depformer_width // self.depformer_heads

    @classmethod
    def from_json(cls, entry: Json) -> Self:
        """Read the LM's `config.json`; `keys`, codes and `sampling` are our additions to the family's names.

        Raises CheckpointError where an entry has the wrong type or is a variant that this model is not.
        """
        default = cls()
        width = _whole(entry, "dim", default.width)
        depformer_width = _whole(entry, "depformer_dim", default.depformer_width)
        feedforward = int(_number(entry, "hidden_scale", 4.125) * width)
        depformer_feedforward = _whole(entry, "depformer_dim_feedforward", int(4.125 * depformer_width))
        card = _whole(entry, "card", default.card)
        released = card == _RELEASED_CARD
        _demand(entry, "n_q", 2 * CODEBOOKS)
        _demand(entry, "existing_text_padding_id", 3)
        return cls(
            width=width,
            heads=_whole(entry, "num_heads", default.heads),
            layers=_whole(entry, "num_layers", default.layers),
            hidden=_gated_hidden(width, feedforward),
            keys=_whole(entry, "keys", _whole(entry, "context", default.keys)),
            max_period=_number(entry, "max_period", default.max_period),
            text_card=_whole(entry, "text_card", default.text_card),
            card=card,
            depformer_width=depformer_width,
            depformer_heads=_whole(entry, "depformer_num_heads", default.depformer_heads),
            depformer_layers=_whole(entry, "depformer_num_layers", default.depformer_layers),
            depformer_hidden=_gated_hidden(depformer_width, depformer_feedforward),
            file_steps=_whole(entry, "dep_q", CODEBOOKS),
            silence_codes=_codes(entry, "silence_codes", _RELEASED_SILENCE if released else ()),
            sine_codes=_codes(entry, "sine_codes", _RELEASED_SINE if released else ()),
            sampling=SamplingConfig.from_json(_section(entry, "sampling")),
        )


@dataclass(frozen=True, slots=True)
class MimiConfig:
    """The codec: SEANet down to 25 Hz, a transformer, down to 12.5 Hz, 8 codebooks; and the same way back."""

    filters: int = 64
    strides: tuple[int, ...] = (4, 5, 6, 8)
    """Of the encoder, in its order; 960 samples a latent in all."""
    first_kernel: int = 7
    last_kernel: int = 3
    residual_kernel: int = 3
    compress: int = 2
    width: int = 512
    heads: int = 8
    layers: int = 8
    hidden: int = 2048
    keys: int = 249
    max_period: float = 10_000.0
    codebook_width: int = 256
    codebook_size: int = 2048
    file_codebooks: int = 32
    """Codebooks in the file; `CODEBOOKS` of them are loaded."""

    def __post_init__(self) -> None:
        _divides(self.heads, self.width, "num_heads", "d_model")
        if self.file_codebooks < CODEBOOKS:
            raise CheckpointError(f"the codec needs at least {CODEBOOKS} codebooks; this one has {self.file_codebooks}")
        if self.keys < 2:
            raise CheckpointError(f"the codec's attention window needs at least 2 keys, not {self.keys}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @classmethod
    def from_json(cls, entry: Json) -> Self:
        """Read the codec's `config.json` (sections `seanet`, `transformer`, `quantizer`); `keys` is our addition."""
        default = cls()
        seanet, transformer, quantizer = (_section(entry, name) for name in ("seanet", "transformer", "quantizer"))
        width = _whole(seanet, "dimension", default.width)
        _demand(transformer, "d_model", width)
        _demand(seanet, "n_residual_layers", 1)
        _demand(entry, "sample_rate", 24_000)
        return cls(
            filters=_whole(seanet, "n_filters", default.filters),
            strides=tuple(reversed(_wholes(seanet, "ratios", tuple(reversed(default.strides))))),
            first_kernel=_whole(seanet, "kernel_size", default.first_kernel),
            last_kernel=_whole(seanet, "last_kernel_size", default.last_kernel),
            residual_kernel=_whole(seanet, "residual_kernel_size", default.residual_kernel),
            compress=_whole(seanet, "compress", default.compress),
            width=width,
            heads=_whole(transformer, "num_heads", default.heads),
            layers=_whole(transformer, "num_layers", default.layers),
            hidden=_whole(transformer, "dim_feedforward", default.hidden),
            keys=_whole(entry, "keys", _whole(transformer, "context", default.keys)),
            max_period=_number(transformer, "max_period", default.max_period),
            codebook_width=_whole(quantizer, "dimension", default.codebook_width),
            codebook_size=_whole(quantizer, "bins", default.codebook_size),
            file_codebooks=_whole(quantizer, "n_q", default.file_codebooks),
        )


def _gated_hidden(width: int, feedforward: int) -> int:
    """Hidden width of the family's gated feed-forward, whose three matrices hold as much as two of `feedforward`."""
    return 21 * width // 8 if feedforward == 4 * width else 2 * feedforward // 3


def _section(entry: Json, name: str) -> Json:
    value = entry.get(name, {})
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config entry {name!r} must be a table, not {value!r}", param=name)
    return value


def _whole(entry: Json, name: str, default: int) -> int:
    value = entry.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config entry {name!r} must be a whole number, not {value!r}", param=name)
    return value


def _number(entry: Json, name: str, default: float) -> float:
    value = entry.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config entry {name!r} must be a number, not {value!r}", param=name)
    return float(value)


def _wholes(entry: Json, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = entry.get(name, default)
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
        raise CheckpointError(f"config entry {name!r} must be a list of whole numbers, not {value!r}", param=name)
    return tuple(value)


def _codes(entry: Json, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    codes = _wholes(entry, name, default)
    if codes and len(codes) != CODEBOOKS:
        raise CheckpointError(f"config entry {name!r} must hold {CODEBOOKS} codes, not {len(codes)}", param=name)
    return codes


def _demand(entry: Json, name: str, wanted: int) -> None:
    if _whole(entry, name, wanted) != wanted:
        raise CheckpointError(f"config entry {name!r} must be {wanted}, not {entry[name]!r}", param=name)


def _divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    if part < 1 or whole % part:
        raise CheckpointError(f"{part_name} ({part}) must divide {whole_name} ({whole})")
