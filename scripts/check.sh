#!/usr/bin/env bash
# Everything that CI checks. Arguments go to pytest: scripts/check.sh tests/radix -x
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"

ensure_env demo dev
export PATH=$venv/bin:$PATH
say "ruff"
ruff check --quiet
ruff format --check --quiet
say "shellcheck"
shellcheck scripts/*.sh .ci/run
say "mypy"
mypy sglang_kv
say "demo model"
demo_model >/dev/null
say "pytest"
# Threads that have nothing to do must not keep the cores from the servers under test.
export OMP_WAIT_POLICY=PASSIVE
if (($#)); then
    python -m pytest -q -m "not slow and not gpu" "$@"
else
    python scripts/run_tests.py
fi
