#!/usr/bin/env bash
# What the step does on this machine's GPU, in at most 8 minutes and without the network: speed, correctness, joins.
#
#   scripts/gpu_check.sh [--json FILE] [--dry]
#
# Takes the interpreter in PYTHON, else .venv's, else python3 (wants torch >= 2.9 with its Triton, and numpy).
# --dry runs the same code on the CPU at tiny sizes, kernels under Triton's interpreter: it shows that the check works.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/webrtc-duplex-triton}
cd "$root"
exec "$python" -m scripts.gpu_check "$@"
