"""The codec's parts beside plain convolutions over the whole signal."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.small_model import MIMI_CONFIG, small_model, speech
from webrtc_duplex.errors import CheckpointError
from webrtc_duplex.model.config import MimiConfig
from webrtc_duplex.model.mimi import LONG, CausalConv, CausalUpConv, Mimi, Taps, elu
from webrtc_duplex.model.streaming import Hints

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_gradient() -> Iterator[None]:
    with torch.inference_mode():
        yield


def stream(x: Tensor, piece: int, taps: Tensor, run: Callable[[Taps, Tensor], Tensor]) -> Tensor:
    """Run x [B, T, C] through in pieces, with what is remembered between them."""
    return torch.cat([run(Taps(taps), part) for part in torch.split(x, piece, dim=1)], dim=1)


@pytest.mark.parametrize("piece", [2 * 6, 6 * 2 * LONG])
@pytest.mark.parametrize(("kernel", "stride"), [(7, 1), (3, 1), (1, 1), (12, 6), (4, 2)])
@pytest.mark.parametrize("narrow", [1, 5])
def test_convolution_in_pieces_equals_the_whole_signal_behind_zeros(
    narrow: int, kernel: int, stride: int, piece: int
) -> None:
    torch.manual_seed(0)
    conv = CausalConv(narrow, 3, kernel, stride, CPU)
    weight, bias = torch.randn(3, narrow, kernel), torch.randn(3)
    fill(conv, weight, bias)
    x = torch.randn(2, 3 * piece, narrow)
    taps = torch.zeros(2, conv.taps)
    ours = stream(x, piece, taps, lambda taps, part: conv.run(taps.pad(part, conv.past, activate=False)))
    padded = functional.pad(x.transpose(1, 2), (kernel - stride, 0))
    whole = functional.conv1d(padded, weight, bias, stride=stride).transpose(1, 2)
    torch.testing.assert_close(ours, whole)


@pytest.mark.parametrize("piece", [2, 2 * LONG])
def test_transposed_convolution_in_pieces_equals_the_whole_signal(piece: int) -> None:
    torch.manual_seed(0)
    stride, narrow, wide = 4, 5, 3
    conv = CausalUpConv(narrow, wide, stride, CPU)
    weight, bias = torch.randn(narrow, wide, 2 * stride), torch.randn(wide)
    fill(conv, weight, bias)
    x = torch.randn(2, 3 * piece, narrow)
    ours = stream(x, piece, torch.zeros(2, conv.taps), lambda taps, part: conv.run(taps.pad(part, 1, activate=False)))
    whole = functional.conv_transpose1d(x.transpose(1, 2), weight, bias, stride=stride).transpose(1, 2)
    torch.testing.assert_close(ours, whole[:, : ours.shape[1]])


def fill(conv: CausalConv | CausalUpConv, weight: Tensor, bias: Tensor) -> None:
    of_weight, of_bias = conv.pieces("key")
    conv.weight.copy_(of_weight.make(weight))
    conv.bias.copy_(of_bias.make(bias))


def test_elu_is_elu_also_in_place_and_for_large_numbers() -> None:
    x = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 1e-6, -1e-6, 200.0, -200.0])])
    out = torch.empty_like(x)
    elu(x, out=out)
    torch.testing.assert_close(out, functional.elu(x), atol=2e-7, rtol=1e-6)
    elu(x, out=x)
    assert torch.equal(x, out)


def test_a_recording_is_a_stream_of_its_own_with_its_last_frame_filled_up() -> None:
    mimi = small_model().mimi
    pcm = torch.from_numpy(speech(4, seed=1).flatten()).float()[:-100] / 32768
    codes = mimi.encode_stream(pcm)
    assert codes.shape == (8, 4)
    assert torch.equal(mimi.encode_stream(pcm), codes), "nothing is remembered from one to the next"
    assert torch.equal(mimi.encode_stream(pcm[:1920])[:, 0], codes[:, 0])


@pytest.mark.parametrize("served", [1, 2, 3, 4])
def test_lanes_that_serve_no_row_are_spared_and_no_bit_of_the_others_differs(served: int) -> None:
    mimi = small_model().mimi
    pcm = torch.from_numpy(speech(12, seed=2)).view(3, 4, 1920) / 32768.0

    def run(lanes: int | None) -> Tensor:
        state, rows = mimi.allocate(4), torch.tensor([0, 1, 2, 3])
        rows[served:] = 4
        hints = Hints(lanes=lanes)
        latents = [mimi.encoder.run(frame, state.encoder, rows, hints) for frame in pcm]
        sound = [mimi.decoder.run(latent, state.decoder, rows, hints) for latent in latents]
        return torch.cat([*latents, *sound], dim=1)[:served]

    assert torch.equal(run(served), run(None))


def test_encoder_and_decoder_advance_apart() -> None:
    mimi = small_model().mimi
    state, rows = mimi.allocate(2), torch.tensor([0, 2, 2, 2])
    codes = mimi.encode(torch.randn(4, 1920), state, rows)
    assert state.encoder.position.tolist()[:2] == [2, 0]
    assert not state.decoder.position[:2].any() and not state.decoder.taps[:2].any()
    mimi.decode(codes, state, rows)
    mimi.decode(codes, state, rows)
    assert state.decoder.position.tolist()[:2] == [4, 0]


def test_codebooks_of_the_released_size_are_read_and_the_rest_of_the_file_is_not() -> None:
    pieces = Mimi(MimiConfig(), torch.device("meta")).pieces()
    keys = {key for piece in pieces for key, _ in piece.sources}
    assert "quantizer.rvq_rest.vq.layers.6._codebook.embedding_sum" in keys
    assert "quantizer.rvq_rest.vq.layers.7._codebook.embedding_sum" not in keys
    assert "upsample.convtr.convtr.convtr.weight" in keys
    assert len(keys) == 318 - 3 * 24 - 8, "24 codebooks of three tensors and eight flags are left"


def test_remembered_columns_are_as_many_as_the_reference_keeps() -> None:
    mimi = Mimi(MimiConfig(), torch.device("meta"))
    encoder_bytes = 4 * mimi.encoder.taps
    assert encoder_bytes == 42_008 + 4_096, "convolutions and downsampling of the released codec, a row"
    assert mimi.decoder.taps * 4 <= 46_592 + 4_096, "inputs of the transposed convolutions instead of their overlaps"


def test_a_codec_of_too_few_codebooks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="at least 8 codebooks"):
        MimiConfig(file_codebooks=4)
    assert MIMI_CONFIG.file_codebooks == 8
