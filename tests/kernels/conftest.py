"""Tests of the GPU's kernels on a CPU. Those in `interpreted` need a process of their own (`test_interpreted.py`)."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
