#!/usr/bin/env bash
# One command to a running server that compresses its KV cache, from a fresh clone:
#
#     scripts/serve.sh                                   # the demo model, on GPU or CPU
#     scripts/serve.sh --model-path Qwen/Qwen3-0.6B      # a model of yours
#     PORT=8000 scripts/serve.sh --kv-compression none # arguments go to `sglang serve`, and win
#
# PORT is the port (30000). SGLANG_KV_VENV, SGLANG_KV_PYTHON and SGLANG_KV_CACHE_DIR move the
# environment, the Python it is made with, and the demo model.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# given OPTION ARGUMENT...: the value that the arguments give to an option, the last one counting.
given() {
    local option=$1 value='' found=1
    shift
    while (($#)); do
        case $1 in
            "$option") value=${2-} found=0 ;;
            "$option"=*) value=${1#*=} found=0 ;;
        esac
        shift
    done
    printf '%s' "$value"
    return "$found"
}

port=$(given --port "$@" || printf '%s' "${PORT:-30000}")
model=$(given --model-path "$@" || given --model "$@" || true)

gpu=''
if [[ $(given --device "$@" || true) == cpu || ${SGLANG_USE_CPU_ENGINE:-} == 1 ]]; then
    :
elif command -v nvidia-smi >/dev/null; then
    gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)
fi

problems=0
row() { printf '  %-10s %s\n' "$1" "$2" >&2; }
bad() {
    row "$1" "$2  <-- $3"
    problems=$((problems + 1))
}

preflight() {
    local python free available fresh=0 where
    env_ready demo || fresh=1
    printf 'sglang-kv: before anything is downloaded\n' >&2

    if ((!fresh)); then
        row python "$("$venv/bin/python" -V 2>&1) in $venv"
    elif python=$(find_python); then
        row python "$("$python" -V 2>&1) ($python)"
    else
        bad python "no Python 3.11" "install it, or set SGLANG_KV_PYTHON"
    fi

    if [[ -n ${CXX:-} ]] || command -v g++ >/dev/null || command -v clang++ >/dev/null; then
        row compiler "$("${CXX:-$(command -v g++ || command -v clang++)}" --version | head -n 1)"
    else
        bad compiler "none" "install g++: the CPU kernels are compiled at first use"
    fi

    if command -v lscpu >/dev/null; then
        row lscpu "found"
    else
        bad lscpu "not found" "install util-linux: SGLang reads the CPU's layout with it"
    fi

    available=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
    if ((available >= 6)); then
        row memory "$available GB available"
    else
        bad memory "$available GB available" "the demo needs 6 GB"
    fi

    where=$(dirname "$venv")
    free=$(df -Pk "$where" | awk 'NR == 2 {print int($4 / 1048576)}')
    if ((fresh && free < 15)); then
        bad disk "$free GB free in $where" "the environment needs 15 GB; SGLANG_KV_VENV moves it"
    else
        row disk "$free GB free in $where"
    fi

    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        bad port "$port is in use" "choose another: PORT=30001 $0"
    else
        row port "$port is free"
    fi

    if [[ -n $gpu ]]; then
        row device "$gpu"
    else
        row device "CPU (no CUDA device in use)"
    fi

    if ((fresh)); then
        row download "SGLang and its packages from the package index: about 4 minutes, 11 GB"
    else
        row download "nothing: the environment is ready"
    fi
    if [[ -n $model ]]; then
        row model "$model (yours)"
    elif demo_model_built; then
        row model "SmolLM2-135M-Instruct, already built"
    else
        row model "SmolLM2-135M-Instruct, built once from a package (88 MB, about 20 s)"
    fi
    ((problems == 0)) || die "$problems problem(s) above"
}

preflight
ensure_env demo

defaults=(--port "$port" --kv-compression streamingllm --max-running-requests 32 --enable-metrics)
if [[ -z $model ]]; then
    model=$(demo_model)
    defaults+=(--model-path "$model" --context-length 8192)
fi
if [[ -z $gpu ]]; then
    export SGLANG_USE_CPU_ENGINE=1
    defaults+=(--device cpu --max-total-tokens 65536)
fi
# SGLang and FlashInfer start tools of the environment (ninja) by name.
export PATH=$venv/bin:$PATH

cat >&2 <<TEXT

When the server says "The server is fired up and ready to roll!", try in another terminal:

  a short question
    curl -s http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' -d '{
      "messages": [{"role": "user", "content": "What is the capital of France?"}],
      "temperature": 0, "max_tokens": 32}'

  a question about a 6,000-token document, with the full KV cache and with the server's policy
    $root/scripts/ask_document.sh http://127.0.0.1:$port

TEXT
say "starting: sglang serve ${defaults[*]} $*"
exec "$venv/bin/sglang" serve "${defaults[@]}" "$@"
