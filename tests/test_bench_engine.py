"""`scripts/bench_engine.py` runs, and writes what it prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("moshi", reason="moshi, the other side of the comparison, is not installed")


@pytest.mark.slow
def test_the_bench_measures_both_sides_and_writes_every_line(tmp_path: Path) -> None:
    quick = ("--quick", "--sizes", "tiny", "--batches", "4", "--no-ticks", "--json", str(tmp_path / "out.json"))
    bench = [sys.executable, str(ROOT / "scripts" / "bench_engine.py"), *quick]
    done = subprocess.run(bench, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads((tmp_path / "out.json").read_text())
    assert line["what"] in done.stdout
    assert line["ours_ms"] > 0 and line["other_ms"] > 0
    assert line["ratio"] == pytest.approx(line["ours_ms"] / line["other_ms"])
