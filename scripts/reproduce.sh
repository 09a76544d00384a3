#!/usr/bin/env bash
# The figures of README and docs again, on this machine, with the demo model or one of yours:
#
#     scripts/reproduce.sh                    # the headline figures: 90 minutes at most
#     scripts/reproduce.sh --quick            # every part, as small as it gets: 8 minutes
#     scripts/reproduce.sh --full             # everything, overnight
#     scripts/reproduce.sh --only needle,report --model PATH --list
#
# A part that is done is not done again (state and answers in $SGLANG_KV_CACHE_DIR/reproduce);
# one that was stopped goes on where it was. --fresh begins anew. Lines go to benchmarks/results/,
# those of --quick to the state's folder: they are too few to stand in a document.
#
# One-shot methods share a prompt's dense prefix in the quality parts, so that it is computed once;
# parts that measure time empty the cache between arms.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$root"

size=headline only='' model='' list='' fresh=''
while (($#)); do
    case $1 in
        --quick | --full) size=${1#--} ;;
        --list) list=1 ;;
        --fresh) fresh=1 ;;
        --only | --model)
            [[ -n ${2-} ]] || die "$1: give a value"
            if [[ $1 == --only ]]; then only=$2; else model=$2; fi
            shift
            ;;
        -h | --help)
            sed -n '2,/^set -/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '$d'
            exit
            ;;
        *) die "$1: unknown; see --help" ;;
    esac
    shift
done

# part SIZE: minutes it may take, and n. Budgets, not measurements: what a part took is printed.
#   part        quick            headline              full
table='
needle       1 n=1/cell       23 n=5/cell           120 n=16/cell
ruler        1 n=1/task       15 n=4/task           180 n=25/task
standins     1 n=1/task       5  n=10/task          60 n=50/task
fidelity     1 n=1/length     10 n=3/length         60 n=12/length
perplexity   1 n=1/length     10 n=2/length         40 n=8/length
speed        1 steps=8        12 steps=48           60 steps=96
shapes       1 steps=8        5  3-contexts         12 4-contexts
concurrency  1 3-arms         8  4-arms             90 all-arms
attention    0 -              1  one-text           1  one-text
report       0 -              1  -                  1  -
'
column() { # column PART FIELD
    awk -v part="$1" -v field="$2" '$1 == part { print $field }' <<<"$table"
}
case $size in quick) first=2 ;; headline) first=4 ;; full) first=6 ;; esac
mapfile -t known < <(awk 'NF { print $1 }' <<<"$table")
IFS=, read -r -a parts <<<"${only:-$(IFS=,; echo "${known[*]}")}"
for part in "${parts[@]}"; do
    [[ " ${known[*]} " == *" $part "* ]] || die "--only: $part: expected some of ${known[*]}"
done
if [[ -n $list ]]; then
    for part in "${parts[@]}"; do
        printf '%-12s %4s min  %s\n' "$part" "$(column "$part" "$first")" \
            "$(column "$part" $((first + 1)))"
    done
    exit
fi

if [[ $size == quick ]]; then ensure_env demo; else ensure_env demo bench; fi
python=$venv/bin/python
[[ -n $model ]] || model=$(demo_model | tail -n 1)
commit=$(git rev-parse --short HEAD)
state=${SGLANG_KV_CACHE_DIR:-$HOME/.cache/sglang_kv}/reproduce/$size-$commit
[[ -z $fresh ]] || rm -rf "$state"
mkdir -p "$state"
results=benchmarks/results/quality.jsonl
[[ $size != quick ]] || results=$state/quality.jsonl

# pick QUICK HEADLINE FULL: the one of this run's size.
pick() { case $size in quick) echo "$1" ;; headline) echo "$2" ;; full) echo "$3" ;; esac; }

arms=(
    --arm 'snapkv 0.25={"method": "snapkv", "keep_ratio": 0.25}'
    --arm 'streamingllm 4+1020={"method": "streamingllm"}'
)
if [[ $size != quick ]]; then
    copy='"method": "snapkv", "window": 16, "kernel_size": 31, "head_budgets": "gates"'
    copy+=', "head_floor": 0.2'
    arms+=(
        --arm 'snapkv 0.16={"method": "snapkv", "keep_ratio": 0.16}'
        --arm "copy 0.25={$copy, \"keep_ratio\": 0.25}"
        --arm "copy 0.16={$copy, \"keep_ratio\": 0.16}"
        --arm 'pyramidkv 0.25={"method": "pyramidkv", "keep_ratio": 0.25}'
        --arm 'h2o 0.25={"method": "h2o", "keep_ratio": 0.25}'
        --arm 'h2o 0.2={"method": "h2o", "keep_ratio": 0.2}'
        --arm 'duoattention 0.5={"method": "duoattention"}'
    )
fi
[[ $size != full ]] || arms+=(--arm "copy 0.1={$copy, \"keep_ratio\": 0.1}")

quality() { # quality SUITE FLAG...
    "$python" -m sglang_kv.benchmarks.quality --model "$model" --suite "$1" "${arms[@]}" \
        --work "$state/answers" --results "$results" "${@:2}"
}
run() {
    case $1 in
        needle) quality needle --lengths "$(pick 512 2048,4096 1024,2048,4096,7000)" \
            --kinds "$(pick number number,word,long "number,word,long,multikey,multivalue,multiquery")" \
            --depths "$(pick 0.5 0.1,0.5,0.9 0.1,0.3,0.5,0.7,0.9)" --samples "$(pick 1 5 16)" ;;
        ruler) quality ruler --lengths "$(pick 1024 2048 2048,4096)" --samples "$(pick 1 4 25)" \
            --questions "$(pick 1 3 3)" --tasks "$(pick niah_single_1,qa_1 "$all_ruler" "$all_ruler")" ;;
        standins) quality standins --lengths "$(pick 512 2048 2048,4096)" --samples "$(pick 1 10 50)" ;;
        fidelity) quality fidelity --lengths "$(pick 512 2048,4096 1024,2048,4096,7500)" \
            --samples "$(pick 1 3 12)" --answer-tokens "$(pick 8 64 64)" ;;
        perplexity) quality perplexity --lengths "$(pick 512 4096 2048,4096,8000)" --samples "$(pick 1 2 8)" \
            --arm 'streamingllm 0+1024={"method": "streamingllm", "sinks": 0, "recent": 1024}' ;;
        speed) timed decode_speed --context "$(pick 500 4000 4000)" --steps "$(pick 8 48 96)" \
            --batch "$(pick 2 8 8)" ;;
        shapes) "$python" -m sglang_kv.benchmarks.decode_shapes --model "$model" \
            --contexts "$(pick 250,500 1000,4000,8000 1000,2000,4000,8000)" \
            --cut "$(pick 500 4000 4000)" --steps "$(pick 8 48 48)" \
            --out "$(pick "$state" benchmarks/results benchmarks/results)/decode_shapes.jsonl" ;;
        concurrency) timed concurrency --context "$(pick 500 4000 4000)" --pool "$(pick 4000 34000 34000)" \
            ${at_once[@]+"${at_once[@]}"} ;;
        attention) [[ $size == quick ]] ||
            "$python" -m sglang_kv.benchmarks.attention_mass --model "$model" ;;
        report) # quick: only print
            if [[ $size == quick ]]; then set --; else set -- --write --plots; fi
            "$python" -m sglang_kv.benchmarks.report "$@" ;;
    esac
}
timed() { # timed BENCHMARK FLAG...
    "$python" -m "sglang_kv.benchmarks.$1" --model "$model" "${@:2}" \
        ${quick_arms[@]+"${quick_arms[@]}"}
}
quick_arms=() at_once=()
[[ $size != headline ]] ||
    at_once=(--arms 'none,snapkv 1/4,streamingllm 1/4,duoattention 0.5')
if [[ $size == quick ]]; then
    quick_arms=(--arms 'none,snapkv 1/4,streamingllm 1/4')
    # These two write where the documents read: what they measured here is too little for that.
    saved=$(mktemp -d)
    cp benchmarks/results/{decode_speed,concurrency}.jsonl "$saved"
    trap 'cp "$saved"/*.jsonl benchmarks/results/; rm -rf "$saved"' EXIT
fi
all_ruler=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2
all_ruler+=,niah_multikey_3,niah_multivalue,niah_multiquery,vt,cwe,fwe,qa_1,qa_2

started=$SECONDS
for part in "${parts[@]}"; do
    if [[ -f $state/$part.done ]]; then
        say "$part: done before, in $(cat "$state/$part.done") s"
        continue
    fi
    say "$part: at most $(column "$part" "$first") minutes, $(column "$part" $((first + 1)))"
    begun=$SECONDS
    run "$part"
    took=$((SECONDS - begun))
    [[ $part == report ]] || printf '%s\n' "$took" >"$state/$part.done"
    budget=$((60 * $(column "$part" "$first")))
    ((took <= budget || budget == 0)) || say "$part: took $took s, more than its $budget"
    say "$part: $took s"
done
say "all of it: $((SECONDS - started)) s"
