#!/usr/bin/env bash
# Ask a running server one question about a 6,000-token story, twice: with the full KV cache and
# with the server's own policy. Prints the answers and what each one kept in memory.
#
#     scripts/ask_document.sh [URL]                     # http://127.0.0.1:30000
#     KV_COMPRESSION='{"method": "streamingllm", "budget": 512}' scripts/ask_document.sh
#
# KV_COMPRESSION replaces the server's policy in the second request.
set -euo pipefail

url=${1:-http://127.0.0.1:${PORT:-30000}}
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
python=$venv/bin/python
[[ -x $python ]] || python=python3
demo=$root/scripts/demo
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

ask() { # NAME POLICY: writes NAME.json, the server's answer
    "$python" "$demo/document.py" body "$demo/red_headed_league.txt" "$2" >"$work/body.json"
    printf 'asking with %s ...' "$3" >&2
    local started=$SECONDS
    if ! curl -sS --fail-with-body "$url/v1/chat/completions" -H 'Content-Type: application/json' \
        --data-binary "@$work/body.json" -o "$work/$1.json"; then
        printf '\n' >&2
        cat "$work/$1.json" >&2 2>/dev/null || true
        exit 1
    fi
    printf ' %s s\n' "$((SECONDS - started))" >&2
}

ask full '{"method": "none"}' 'the full cache'
ask policy "${KV_COMPRESSION:-}" "${KV_COMPRESSION:-the policy of the server}"
"$python" "$demo/document.py" table "$work/full.json" "$work/policy.json"
