"""`webrtc-duplex voices list|convert`: the voices of a checkpoint, and new ones for it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from webrtc_duplex.audio import FRAME_S

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_voices_command(commands: "Subparsers") -> None:
    """Add `voices` with its two subcommands."""
    voices = commands.add_parser("voices", help="list a checkpoint's voices, or make new ones of .pt and .wav files")
    verbs = voices.add_subparsers(required=True, metavar="COMMAND")
    show = verbs.add_parser("list", help="name, length and kind of every voice, and what is wrong with unfit ones")
    show.set_defaults(run=_list)
    convert = verbs.add_parser("convert", help="write voices as .safetensors, which need neither unpickling nor codec")
    convert.add_argument("sources", nargs="+", type=Path, metavar="FILE", help=".pt, .wav, .safetensors or an archive")
    convert.add_argument("--to", type=Path, help="folder to write to (default: the checkpoint's own voices/)")
    convert.set_defaults(run=_convert)
    for verb in (show, convert):
        verb.add_argument("--model", required=True, help="tiny, or a checkpoint's directory or hub id")


def _list(options: argparse.Namespace) -> int:
    from webrtc_duplex.model.checkpoint import open_checkpoint, voice_model
    from webrtc_duplex.model.hub import find_checkpoint
    from webrtc_duplex.model.voices import read_voices

    checkpoint = open_checkpoint(find_checkpoint(options.model))
    shelf = read_voices(checkpoint.directory, voice_model(checkpoint))
    if not shelf.voices and not shelf.faults:
        print(f"{checkpoint.name} has no voices to choose from")
    for name, voice in shelf.voices.items():
        kind = type(voice).__name__.removeprefix("Voice").lower()
        print(f"{name:16} {voice.frames:5} frames {voice.frames * FRAME_S:6.2f} s  {kind}")
    for name, fault in shelf.faults.items():
        print(f"{name:16} unfit: {fault.message}")
    return 1 if shelf.faults else 0


def _convert(options: argparse.Namespace) -> int:
    from webrtc_duplex.model.checkpoint import open_checkpoint, voice_model
    from webrtc_duplex.model.hub import find_checkpoint
    from webrtc_duplex.model.voices import FOLDER, convert_voices

    checkpoint = open_checkpoint(find_checkpoint(options.model))
    model = voice_model(checkpoint)
    for source in options.sources:
        for path in convert_voices(source, options.to or checkpoint.directory / FOLDER, model):
            print(path)
    return 0
