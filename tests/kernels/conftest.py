"""Tests of the GPU's kernels on a CPU. Those in `interpreted` need a process of their own (`test_interpreted.py`)."""

import os
from importlib.util import find_spec

if find_spec("triton") is None:  # an extra
    collect_ignore = ["interpreted", "test_compile.py"]
else:
    collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
