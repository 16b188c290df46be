"""What is to be looked at first when real weights are at hand - do they say what we assumed?

1. the depformer's steps; 2. every voice; 3. whether the codec says the silence and the tone of a prompt as the model
was taught them; 4. a greedy run, to be compared with one of a reference.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from webrtc_duplex.audio import FRAME_SAMPLES, SAMPLE_RATE
from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.checkpoint import (
    LM_UNREAD,
    MIMI_UNREAD,
    Checkpoint,
    initial_embedding,
    load_mimi,
    voice_model,
)
from webrtc_duplex.model.config import CODEBOOKS, STEPS
from webrtc_duplex.model.memory import plan_memory
from webrtc_duplex.model.mimi import Mimi
from webrtc_duplex.model.personaplex import LM
from webrtc_duplex.model.prompts import CACHE_COLUMNS, Voice, VoiceCodes, VoiceEmbeddings
from webrtc_duplex.model.tensor_file import check
from webrtc_duplex.model.voices import first_embedding_distance, read_voices

_META, _CPU, _CUDA = torch.device("meta"), torch.device("cpu"), torch.device("cuda")

TONE_HZ = 440.0
TONE_LEVEL = 0.5
"""What the caller says while a prompt is run."""

_SETTLED_FRAMES = 25
"""Frames at the end of a steady sound that are compared; before them the codec's window has filled."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: is it as assumed?"""

    good: bool
    text: str


def inspect(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Look at a checkpoint, cheapest things first. Of the language model only a few rows are read."""
    yield from _sizes(checkpoint)
    weights = list(_weights(checkpoint))
    yield from weights
    if all(finding.good for finding in weights):
        yield from _voices(checkpoint)
        yield from _steady_sounds(checkpoint)
    yield from _memory(checkpoint)


def _sizes(checkpoint: Checkpoint) -> Iterator[Finding]:
    lm, mimi = checkpoint.lm, checkpoint.mimi
    start = "voice and persona" if checkpoint.system_prompt else "the bare initial column"
    yield Finding(
        True,
        f"language model: {lm.layers} layers of {lm.width}, {lm.heads} heads, a window of {lm.keys} keys; "
        f"depformer {lm.depformer_layers} layers of {lm.depformer_width}; {lm.text_card} text tokens; "
        f"a call starts on {start}",
    )
    yield Finding(True, f"codec: {mimi.layers} layers of {mimi.width}, a window of {mimi.keys} keys")


def _weights(checkpoint: Checkpoint) -> Iterator[Finding]:
    projection = checkpoint.lm_file.entries["depformer.layers.0.self_attn.in_proj_weight"]
    steps = f"{checkpoint.lm.file_steps} depformer steps, {STEPS} of them are run"
    yield Finding(True, f"depformer.layers.0.self_attn.in_proj_weight is {list(projection.shape)}: {steps}")
    language, codec = LM(checkpoint.lm, _META, torch.bfloat16), Mimi(checkpoint.mimi, _META)
    for file, pieces, unread in (
        (checkpoint.lm_file, language.pieces(), LM_UNREAD),
        (checkpoint.mimi_file, codec.pieces(), MIMI_UNREAD),
    ):
        try:
            check(pieces, file, unread)
        except CheckpointError as error:
            yield Finding(False, error.message)
            continue
        used = {key for piece in pieces for key, _ in piece.sources}
        dtypes = ", ".join(sorted({file.entries[key].dtype for key in used}))
        yield Finding(True, f"{file.path.name}: {len(used)} of {len(file.entries)} tensors are used, in {dtypes}")


def _voices(checkpoint: Checkpoint) -> Iterator[Finding]:
    shelf = read_voices(checkpoint.directory, voice_model(checkpoint))
    initial = initial_embedding(checkpoint)
    for name, voice in shelf.voices.items():
        yield _voice(name, voice, checkpoint, initial)
    for name, fault in shelf.faults.items():
        yield Finding(False, f"voice {name}: {fault.message}")
    if not shelf.voices and not shelf.faults:
        yield Finding(True, "no voices")


def _voice(name: str, voice: Voice, checkpoint: Checkpoint, initial: Tensor) -> Finding:
    match voice:
        case VoiceCodes(codes):
            return Finding(True, f"voice {name}: {codes.shape[1]} frames of codes")
        case VoiceEmbeddings(embeddings, cache):
            distance = first_embedding_distance(embeddings, initial)
            text = int(cache[0, len(embeddings) % CACHE_COLUMNS])
            return Finding(
                text == checkpoint.lm.text_padding,
                f"voice {name}: {len(embeddings)} embeddings in {str(embeddings.dtype).removeprefix('torch.')}, the "
                f"first {distance:.4f} of its length from the initial column's; codes in range; text token {text} in "
                f"its last column, wanted {checkpoint.lm.text_padding}",
            )


def _steady_sounds(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Silence and tone by our encoder, against the codes that prompts are made of."""
    if not checkpoint.lm.silence_codes:
        yield Finding(True, "silence and tone: this checkpoint names no codes of theirs, and needs none")
        return
    mimi = load_mimi(checkpoint, _CPU)
    frames = checkpoint.mimi.keys // 2 + 1 + _SETTLED_FRAMES
    turns = torch.arange(frames * FRAME_SAMPLES, dtype=torch.float64) * (TONE_HZ / SAMPLE_RATE)
    tone = (TONE_LEVEL * torch.sin(2 * math.pi * turns)).float()
    yield _steady_sound("silence", torch.zeros_like(tone), mimi, checkpoint.lm.silence_codes)
    yield _steady_sound(f"a tone of {TONE_HZ:.0f} Hz", tone, mimi, checkpoint.lm.sine_codes)


@torch.no_grad()
def _steady_sound(name: str, sound: Tensor, mimi: Mimi, wanted: Sequence[int]) -> Finding:
    """A tone's phase turns from frame to frame and its codes with it, so that one frame like the taught one is good."""
    codes = mimi.encode_stream(sound)[:, -_SETTLED_FRAMES:]  # [8, 25]
    equal = codes == torch.tensor(wanted)[:, None]
    nearest = int(equal.sum(0).argmax())
    return Finding(
        bool(equal[0].any()),
        f"{name}: the nearest of {_SETTLED_FRAMES} frames has {int(equal[:, nearest].sum())} of {CODEBOOKS} codes as "
        f"the model was taught, of all codes {equal.float().mean():.0%} are; "
        f"here {codes[:, nearest].tolist()}, taught {list(wanted)}",
    )


def _memory(checkpoint: Checkpoint) -> Iterator[Finding]:
    for name, device, dtype, kv_dtype in (
        ("a GPU, bfloat16", _CUDA, torch.bfloat16, None),
        ("a GPU, bfloat16 with keys of int8", _CUDA, torch.bfloat16, torch.int8),
        ("the CPU, float32", _CPU, torch.float32, None),
    ):
        yield Finding(True, f"memory on {name}: {plan_memory(checkpoint.lm, checkpoint.mimi, device, dtype, kv_dtype)}")
