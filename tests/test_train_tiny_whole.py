"""What is trained is what is run: whole sequences by the trainer's functions, frame by frame by the package."""

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.train_tiny import whole
from webrtc_duplex.model.checkpoint import load_lm, load_mimi, open_checkpoint
from webrtc_duplex.model.hub import TINY

CHECKPOINT = open_checkpoint(TINY)
CPU = torch.device("cpu")
FRAMES = 40
"""Longer than the codec's window of 25 positions, two a frame."""


def weights(name: str) -> dict[str, Tensor]:
    return {key: tensor.float() for key, tensor in load_file(TINY / name).items()}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_recording_encoded_at_once_has_the_codes_of_the_stream() -> None:
    pcm = 0.1 * noise(1, 1, FRAMES * 1920)

    at_once = whole.encode(weights("mimi.safetensors"), pcm, CHECKPOINT.mimi.keys)

    streamed = load_mimi(CHECKPOINT, CPU).encode_stream(pcm[0, 0])
    assert torch.equal(at_once[0], streamed)


@torch.no_grad()
def test_in_bfloat16_the_encoder_finds_the_same_features() -> None:
    """PyTorch's convolution 16 to 32 channels, kernel 8, stride 4, gives something else in bfloat16 on some CPUs."""
    pcm = 0.1 * noise(2, 1, FRAMES * 1920)
    exact = whole.seanet_encode(weights("mimi.safetensors"), pcm)

    with torch.autocast("cpu", torch.bfloat16):
        rounded = whole.seanet_encode(weights("mimi.safetensors"), pcm)

    assert (rounded - exact).std() < 0.03 * exact.std()


@torch.no_grad()
def test_codes_decoded_at_once_sound_as_the_stream() -> None:
    mimi = load_mimi(CHECKPOINT, CPU)
    codes = torch.randint(CHECKPOINT.lm.card, (1, 8, FRAMES), generator=torch.Generator().manual_seed(1))

    at_once = whole.decode(weights("mimi.safetensors"), codes, CHECKPOINT.mimi.keys)

    state, row = mimi.allocate(1), torch.zeros(1, dtype=torch.int64)
    streamed = torch.cat([mimi.decode(codes[:, :, frame], state, row) for frame in range(FRAMES)], 1)
    torch.testing.assert_close(at_once[0, 0], streamed[0], atol=1e-5, rtol=1e-4)


def columns(count: int) -> Tensor:
    lm = CHECKPOINT.lm
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(lm.card + 1, (1, count, 16), generator=generator)
    return torch.cat([torch.randint(lm.text_card + 1, (1, count, 1), generator=generator), codes], 2)


@torch.no_grad()
def test_columns_run_at_once_equal_columns_run_one_by_one_beyond_the_window() -> None:
    lm = load_lm(CHECKPOINT, CPU, torch.float32)
    some = columns(CHECKPOINT.lm.keys + 60)

    at_once = whole.temporal(weights("model.safetensors"), some, CHECKPOINT.lm.heads, CHECKPOINT.lm.keys)

    state, row = lm.allocate(1), torch.zeros(1, dtype=torch.int64)
    one_by_one = torch.stack([lm.temporal.step(some[:, p], state.temporal, row) for p in range(some.shape[1])], 1)
    torch.testing.assert_close(at_once, one_by_one, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_codebooks_foretold_at_once_equal_those_foretold_in_turn() -> None:
    lm = load_lm(CHECKPOINT, CPU, torch.float32)
    hidden, column = noise(3, CHECKPOINT.lm.width), columns(3)[0]

    at_once = whole.depformer(
        weights("model.safetensors"), hidden, column[:, 0], column[:, 1:9], CHECKPOINT.lm.depformer_heads
    )

    in_turn: list[Tensor] = []

    def choose(step: int, logits: Tensor) -> Tensor:
        in_turn.append(logits)
        return column[:, 1 + step]

    lm.depformer.run(hidden, column[:, 0], choose)
    torch.testing.assert_close(at_once, torch.stack(in_turn, 1), atol=1e-4, rtol=1e-4)
