# shellcheck shell=bash
# Sourced by the other scripts: the virtual environment and the demo model, each made once.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SGLANG_KV_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$root/$venv ;; esac

say() { printf '[%s] %s\n' "$(basename "$0" .sh)" "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# The Python that the environment is made with; SGLANG_KV_PYTHON names another one.
find_python() {
    local candidate
    for candidate in ${SGLANG_KV_PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# What an environment was made from. Keyed by content, so that a new pin reinstalls.
stamp=$venv/.sglang_kv_stamp
stamp_key() { printf '%s %s' "$(sha256sum "$root/pyproject.toml" | cut -d' ' -f1)" "$root"; }

# env_ready EXTRA...: whether the environment is current and has these extras.
env_ready() {
    [[ -x $venv/bin/python && -f $stamp ]] || return 1
    local key extras extra
    { read -r key && read -r extras; } <"$stamp" || return 1
    [[ $key == "$(stamp_key)" ]] || return 1
    for extra in "$@"; do
        [[ ",$extras," == *",$extra,"* ]] || return 1
    done
}

# ensure_env EXTRA...: make or update the environment; instant when nothing changed.
ensure_env() {
    env_ready "$@" && return
    local python had='' extras
    if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        python=$(find_python) || die "no Python 3.11 found (set SGLANG_KV_PYTHON)"
        say "creating $venv"
        "$python" -m venv "$venv" || die "could not create $venv (is python3.11-venv installed?)"
    fi
    [[ -f $stamp ]] && had=$(sed -n 2p "$stamp" | tr , '\n')
    extras=$(printf '%s\n' "$@" "$had" | sed '/^$/d' | sort -u | paste -sd,)
    rm -f "$stamp"
    say "installing sglang-kv[$extras] (first time: about 4 minutes, 11 GB)"
    with_heartbeat "$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
        --editable "${root}[$extras]"
    printf '%s\n%s\n' "$(stamp_key)" "$extras" >"$stamp"
}

# with_heartbeat COMMAND...: run it, with a line every 15 seconds that says it is alive.
with_heartbeat() {
    local log pid started=$SECONDS next=15
    log=$(mktemp)
    "$@" >"$log" 2>&1 &
    pid=$!
    # An interrupted script must not leave the installer running behind it.
    trap 'kill "$pid" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if ((SECONDS - started >= next)); then
            say "  ... $((SECONDS - started)) s, environment holds $(du -sh "$venv" | cut -f1)"
            next=$((SECONDS - started + 15))
        fi
    done
    trap - INT TERM
    if ! wait "$pid"; then
        tail -n 30 "$log" >&2
        rm -f "$log"
        die "failed: $*"
    fi
    rm -f "$log"
    say "  done after $((SECONDS - started)) s"
}

demo_model_built() {
    [[ -f ${SGLANG_KV_CACHE_DIR:-$HOME/.cache/sglang_kv}/models/SmolLM2-135M-Instruct/config.json ]]
}

# Prints the folder of the demo model, built if need be.
demo_model() { "$venv/bin/python" "$root/scripts/demo_model.py"; }
