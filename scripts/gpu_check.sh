#!/usr/bin/env bash
# Everything that only a GPU can settle, in under eight minutes: see scripts/gpu_check.py.
#
#   scripts/gpu_check.sh [--out FOLDER] [--seconds 440] [--dry]
#
# PYTHON: an interpreter with torch and triton, and flashinfer and sglang if they are to be checked.
# WHEELS: a folder of wheels to install first, into a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [[ -n ${WHEELS:-} ]]; then
    venv=$(mktemp -d)/venv
    "$python" -m venv --system-site-packages "$venv"
    python=$venv/bin/python
    "$python" -m pip install --quiet --no-index --find-links "$WHEELS" --no-deps "$WHEELS"/*.whl
fi
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec timeout 475 "$python" scripts/gpu_check.py "$@"
