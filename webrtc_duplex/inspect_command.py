"""`webrtc-duplex inspect DIR`: does a checkpoint say what we assume of it?"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from webrtc_duplex.audio import FRAME_S
from webrtc_duplex.errors import DuplexError, RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.offline import Conversation, Job, converse, load_talker, words

if TYPE_CHECKING:
    from webrtc_duplex.model.inspection import Finding

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_inspect_command(commands: "Subparsers") -> None:
    """Add `inspect`."""
    inspect = commands.add_parser("inspect", help="what to look at first in a checkpoint: steps, voices, codec, memory")
    inspect.add_argument("model", help="tiny, or a checkpoint's directory or hub id")
    inspect.add_argument("--run", dest="recording", type=Path, metavar="WAV", help="let it answer this too, greedily")
    inspect.add_argument("--voice", help="voice of that run")
    inspect.add_argument("--prompt", help="text prompt of that run")
    inspect.add_argument("--device", default="cpu", help="torch device of that run (default: %(default)s)")
    inspect.add_argument(
        "--reference",
        type=Path,
        metavar="SAFETENSORS",
        help="what NVIDIA's code said in that run, to compare with: `outputs` [calls, 9] as in the golden packs",
    )
    inspect.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    bad = 0
    for finding in _findings(options):
        print("good " if finding.good else "WRONG", finding.text)
        bad += not finding.good
    return 1 if bad else 0


def _findings(options: argparse.Namespace) -> "Iterator[Finding]":
    from webrtc_duplex.model.checkpoint import open_checkpoint
    from webrtc_duplex.model.hub import find_checkpoint
    from webrtc_duplex.model.inspection import inspect

    directory = find_checkpoint(options.model)
    yield from inspect(open_checkpoint(directory))
    if options.recording is not None:
        prompt = Prompt(voice=options.voice, text=options.prompt, text_temperature=0.0, audio_temperature=0.0)
        yield from _greedy_run(
            str(directory), options.device, Job(options.recording, None, None, prompt), options.reference
        )


def _greedy_run(model: str, device: str, job: Job, reference: Path | None) -> "Iterator[Finding]":
    """The fourth thing to look at: what the model says when nothing is left to chance."""
    from webrtc_duplex.model.inspection import Finding

    talker = load_talker(model, rows=1, device=device)
    ((_, call),) = converse([job], talker)
    if isinstance(call, DuplexError):
        yield Finding(False, f"greedy run: {call.message}")
        return
    said = said_frames(call)
    text = " ".join(word.text for word in words(call.tokens, talker.card.pieces))
    digest = hashlib.sha256(said.tobytes()).hexdigest()[:16]
    yield Finding(
        True, f"greedy run of {len(said) * FRAME_S:.1f} s: tokens and codes have SHA-256 {digest}...; {text!r}"
    )
    if reference is not None:
        yield compare(said, _read_reference(reference))


def said_frames(call: Conversation) -> NDArray[np.int64]:
    """Text token and codes of every frame, [F, 9]."""
    return np.column_stack([call.tokens, call.codes])


def compare(said: NDArray[np.int64], reference: NDArray[np.int64]) -> "Finding":
    """Hold a run [F, 9] against the reference's [calls, 9], whose call i returns frame i - 1: it is one call late.

    That holds after a system prompt; without one the reference also drops the caller's first frame.
    """
    from webrtc_duplex.model.inspection import Finding

    expected = reference[1:]
    frames = min(len(said), len(expected))
    equal = (said[:frames] == expected[:frames]).all(axis=1)
    if equal.all():
        return Finding(frames > 0, f"reference: all {frames} frames are equal")
    first = int(equal.argmin())
    return Finding(
        False,
        f"reference: {int(equal.sum())} of {frames} frames are equal, frame {first} ({first * FRAME_S:.2f} s) is the "
        f"first that is not: {said[first].tolist()} here, {expected[first].tolist()} there",
    )


def _read_reference(path: Path) -> NDArray[np.int64]:
    try:
        outputs = load_file(path)["outputs"]
    except (OSError, KeyError, SafetensorError) as error:
        raise RequestError(f"{path} is no safetensors file with `outputs`: {error}", param="reference") from error
    if outputs.ndim != 2 or outputs.shape[1] != 9:
        raise RequestError(f"{path}: outputs must be [calls, 9], not {list(outputs.shape)}", param="reference")
    return outputs.astype(np.int64)
