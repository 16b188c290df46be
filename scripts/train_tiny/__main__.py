"""`python -m scripts.train_tiny`: everything from packages to a checkpoint directory, in stages that can be resumed."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.train_tiny import base, codes, decoder, lm, semantic, voices, windows
from scripts.train_tiny.export import export
from scripts.train_tiny.work import Work

Stage = tuple[str, str, Callable[[Work], None]]

STAGES: tuple[Stage, ...] = (
    ("agent", "agent_heart.npz", voices.speak_agent),
    ("callers", "clips/done", voices.speak_all_callers),
    ("base", "codec_base.pt", base.train),
    ("windows", "windows/done", windows.make_windows),
    ("semantic", "codec_frozen.pt", semantic.train),
    ("tables", "tables.pt", codes.make_tables),
    ("unseen", "unseen.pt", codes.make_unseen_tracks),
    ("tracks", "tracks/done", codes.make_tracks),
    ("decoder", "decoder.done", decoder.train),
    ("lm", "lm.pt", lm.train),
)
"""Name, the file that says that it is done, and what does it. The last two do not need each other."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.train_tiny", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/tiny"), help="folder of the run (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="checkpoint directory to write (default: WORK/tiny)")
    parser.add_argument("--smoke", action="store_true", help="a few steps of each stage: a checkpoint that loads")
    parser.add_argument("--stage", choices=[name for name, _, _ in STAGES], help="only this stage")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    options = parser.parse_args()
    missing = voices.missing_packages(options.smoke)
    if missing:
        print(f"cannot train: not installed: {'; '.join(missing)} (see scripts/train_tiny/README.md)", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    work = Work(options.work, options.smoke)
    for name, result, stage in STAGES:
        if options.stage in (None, name) and not work.path(result).exists():
            print(f"stage {name}", flush=True)
            stage(work)
    if options.stage is None:
        out = options.out or work.path("tiny")
        export(work, out)
        print(f"written: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
