"""The folder that a training run works in, its scale, and what all stages share."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

SEED = 20261201
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Work:
    """Where a run keeps its data and checkpoints, and whether it is only a smoke test."""

    root: Path
    smoke: bool = False

    def path(self, name: str) -> Path:
        """A file of this run; its folder is made."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def scale(self, full: int, smoke: int) -> int:
        """How many of something this run makes or does."""
        return min(full, smoke) if self.smoke else full

    def note(self, stage: str, **figures: float | int | str) -> None:
        """Add figures of a stage to `metrics.json`."""
        path = self.path("metrics.json")
        metrics = json.loads(path.read_text()) if path.exists() else {}
        metrics.setdefault(stage, {}).update(figures)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(metrics, indent=1, sort_keys=True))
        partial.rename(path)


def progress(items: Iterable[Item], label: str) -> Iterable[Item]:
    """A progress bar, at most one line a second; silent where CI runs."""
    bar: Iterable[Item] = tqdm(items, desc=label, mininterval=1.0, disable=bool(os.environ.get("CI")))
    return bar
