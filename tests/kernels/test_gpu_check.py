"""The GPU check runs from end to end without a GPU, at tiny sizes; what it says of speed then means nothing."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(1800)
def test_dry_run_finds_every_part_working_and_every_rule_kept(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = tmp_path / "found.json"
    command = [str(ROOT / "scripts" / "gpu_check.sh"), "--dry", "--json", str(found)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    report = json.loads(found.read_text())
    assert report["dry"]
    assert all(isinstance(rows, list) for rows in report["parts"].values())
    speeds = [bar for bar in report["bars"] if " < " in bar["name"]]
    rules = [bar for bar in report["bars"] if " < " not in bar["name"]]
    assert len(speeds) == 7 and all(bar["passed"] is None for bar in speeds), "a dry run judges no speed"
    assert len(rules) == 8 and all(bar["passed"] for bar in rules)
