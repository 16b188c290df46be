#!/usr/bin/env bash
# Tests of the Ray cluster, in an environment of their own: Ray and what it brings is half a gigabyte.
#
#   scripts/test_cluster.sh [options of pytest]
#
# CLUSTER_VENV: where that environment is (default: .venv-cluster). It sees the packages of the main one.
set -euo pipefail
source "$(dirname "$0")/environment.sh"

make_environment test,check
cluster=${CLUSTER_VENV:-$root/.venv-cluster}
if [ ! -x "$cluster/bin/python" ]; then
    "$python" -m venv "$cluster"
    packages() { "$1" -c "import sysconfig; print(sysconfig.get_path('purelib'))"; }
    packages "$python" > "$(packages "$cluster/bin/python")/main.pth"
fi
"$cluster/bin/python" -c "import ray" 2>/dev/null || "$cluster/bin/python" -m pip install "ray[serve]==2.60.*"
cd "$root"
exec "$cluster/bin/python" -m pytest tests/cluster "$@"
