#!/usr/bin/env bash
# The figures of README and docs again, on this machine, with the demo model or one of yours:
#
#     scripts/reproduce.sh                    # README's headline: 90 minutes at most
#     scripts/reproduce.sh --quick            # that and all quality suites, as small as it gets: 8 minutes
#     scripts/reproduce.sh --full             # what the documents show, overnight
#     scripts/reproduce.sh --full --text BOOK.txt --kvpress FOLDER --llama-cpp FOLDER
#     scripts/reproduce.sh --only needle,report --model PATH --list
#
# A part that is done is not done again (state and answers in $SGLANG_KV_CACHE_DIR/reproduce); one
# that was stopped goes on where it was; one that fails is named, and the next begins. --fresh begins
# anew. Lines go to benchmarks/results/, which the documents are made of. Those of --quick and of
# --model go to a folder of the state and are printed: the documents are left alone.
#
# --text: a book for the endless stream and for perplexity at 8,000 tokens; without it the one is
# left out and the other ends at 4,096. --kvpress, --llama-cpp: environments of their own
# (benchmarks/peers.py --install makes them); without them the part `peers` is left out.
#
# One-shot methods share a prompt's dense prefix in the quality parts, so that it is computed once;
# parts that measure time empty the cache between arms.
#
# Not here: LongBench (it needs its data: sglang-kv quality --suite longbench), what needs a GPU or
# its compiler (scripts/gpu_check.sh; benchmarks/gpu_*.py, triton_cubins.py, flashinfer_modules.py),
# the needles of calibrated gates (sglang-kv calibrate-report), 8-bit pages (sglang-kv quality
# --server-args '--kv-cache-dtype fp8_e4m3') and where a step's time goes (benchmarks/step_time.py).
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
from=$PWD
cd "$root"

# there PATH: as it was meant where the script was started; a model's name stays as it is.
there() { if [[ $1 != /* && -e $from/$1 ]]; then echo "$from/$1"; else echo "$1"; fi; }

size=headline only='' model='' list='' fresh='' text='' kvpress='' llama=''
while (($#)); do
    case $1 in
        --quick | --full) size=${1#--} ;;
        --list) list=1 ;;
        --fresh) fresh=1 ;;
        --only | --model | --text | --kvpress | --llama-cpp)
            [[ -n ${2-} ]] || die "$1: give a value"
            case $1 in
                --only) only=$2 ;;
                --model) model=$(there "$2") ;;
                --text) text=$(there "$2") ;;
                --kvpress) kvpress=$(there "$2") ;;
                --llama-cpp) llama=$(there "$2") ;;
            esac
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
[[ -z $text || -f $text ]] || die "--text: $text: no such file"

# part SIZE: minutes it may take, and n; `-`: not of this size. Budgets, not measurements: what a
# part took is printed. They come from the dates of recorded lines where a part has such (speed,
# concurrency, pressure, endless, replay, calibration, kernels), else from recorded tokens per second.
#   part        quick            headline              full
table='
quality      3 n=1/suite      -  -                  -   -
needle       -  -             18 n=2/cell           110 n=16/cell
kinds        -  -             -  -                  40  n=1/cell
ruler        -  -             -  -                  35  n=1/task
standins     -  -             -  -                  20  n=10/task
fidelity     -  -             -  -                  35  n=3/length
perplexity   -  -             -  -                  25  n=4/length
speed        1 steps=8        13 steps=48           20  steps=96
shapes       1 steps=8        -  -                  10  4-contexts
concurrency  1 2-arms         55 README-arms        95  all-arms
attention    1 256-tokens     -  -                  2   one-text
pressure     -  -             -  -                  15  24-requests
endless      -  -             -  -                  115 200,000-tokens
replay       -  -             -  -                  30  600-requests
orders       -  -             -  -                  25  60-requests
gates        -  -             -  -                  30  100-requests
tree         -  -             -  -                  5   31-repeats
calibration  -  -             -  -                  20  2-methods
bench        -  -             -  -                  20  8-requests
kernels      -  -             -  -                  2   2-batches
peers        -  -             -  -                  150 55-prompts
report       1 -              1  -                  1   -
'
column() { # column PART FIELD
    awk -v part="$1" -v field="$2" '$1 == part { print $field }' <<<"$table"
}
case $size in quick) first=2 ;; headline) first=4 ;; full) first=6 ;; esac
mapfile -t known < <(awk -v minutes="$first" 'NF && $minutes != "-" { print $1 }' <<<"$table")
IFS=, read -r -a parts <<<"${only:-$(IFS=,; echo "${known[*]}")}"
for part in "${parts[@]}"; do
    [[ " ${known[*]} " == *" $part "* ]] || die "--only: $part: expected some of ${known[*]}"
done
# left_out PART: why a part has nothing to run, if it has not.
left_out() {
    case $1 in
        endless) [[ -n $text ]] || echo "needs --text" ;;
        peers) [[ -n $kvpress$llama ]] || echo "needs --kvpress or --llama-cpp" ;;
        gates) [[ -z ${gated-yes} ]] && echo "the model has no gates" ;;
    esac
    return 0
}
if [[ -n $list ]]; then
    for part in "${parts[@]}"; do
        why=$(left_out "$part")
        if [[ -n $why ]]; then
            printf '%-12s %4s min  left out: %s\n' "$part" 0 "$why"
            continue
        fi
        printf '%-12s %4s min  %s\n' "$part" "$(column "$part" "$first")" \
            "$(column "$part" $((first + 1)))"
    done
    exit
fi

if [[ $size == quick ]]; then ensure_env demo; else ensure_env demo bench; fi
python=$venv/bin/python
commit=$(git rev-parse --short HEAD)
state=${SGLANG_KV_CACHE_DIR:-$HOME/.cache/sglang_kv}/reproduce/$size-$commit
[[ -z $model ]] || state+=-$(basename "$model")
apart=''
[[ $size != quick && -z $model ]] || apart=$state/results
[[ -n $model ]] || model=$(demo_model | tail -n 1)
[[ -z $fresh ]] || rm -rf "$state"
mkdir -p "$state"
# Every benchmark writes there.
[[ -z $apart ]] || export SGLANG_KV_RESULTS=$apart
gated=$("$python" -c 'import sys
from sglang_kv.compression.gates import has_gates
print("yes" if has_gates(sys.argv[1]) else "")' "$model")

# pick QUICK HEADLINE FULL: the one of this run's size.
pick() { case $size in quick) echo "$1" ;; headline) echo "$2" ;; full) echo "$3" ;; esac; }

# arm NAME POLICY: one more of the quality parts.
arms=()
arm() { arms+=(--arm "$1={\"method\": $2}"); }
copy='"snapkv", "window": 16, "kernel_size": 31, "head_budgets": "gates", "head_floor": 0.2'
arm 'snapkv 0.25' '"snapkv", "keep_ratio": 0.25'
arm 'streamingllm 4+1020' '"streamingllm"'
if [[ $size != quick ]]; then
    arm 'pyramidkv 0.25' '"pyramidkv", "keep_ratio": 0.25'
    arm 'h2o 0.25' '"h2o", "keep_ratio": 0.25'
    if [[ -n $gated ]]; then
        arm 'duoattention 0.5' '"duoattention"'
        arm 'copy 0.25' "$copy, \"keep_ratio\": 0.25"
    fi
fi
if [[ $size == full ]]; then
    arm 'snapkv 0.16' '"snapkv", "keep_ratio": 0.16'
    arm 'h2o 0.2' '"h2o", "keep_ratio": 0.2'
    for share in ${gated:+0.16 0.1}; do arm "copy $share" "$copy, \"keep_ratio\": $share"; done
fi
# README's arms of the speed benchmarks: those that go by gates need such a model.
readme='stock,none,snapkv 1/4,pyramidkv 1/4,h2o 1/4,streamingllm 1/4'
readme+=${gated:+,duoattention 0.5,copy 1/4}
rest='streamingllm 1/2,h2o 1/2,snapkv 1/2,snapkv pages 1/2,pyramidkv 1/2,snapkv pages 1/4'
rest+=',streamingllm 1/8,h2o 1/8,snapkv 1/8,snapkv pages 1/8,pyramidkv 1/8'
rest+=${gated:+,copy 1/2,copy 1/8,duoattention 0.75}

bench() { # bench BENCHMARK FLAG...
    "$python" -m "sglang_kv.benchmarks.$1" "${@:2}"
}
quality() { # quality SUITES FLAG...
    bench quality --model "$model" --suite "$1" "${arms[@]}" --work "$state/answers" "${@:2}"
}
# README names the window's needles by the share that it is of 4,096 tokens.
window=(--arm 'streamingllm 0.25={"method": "streamingllm", "budget": 1024}')
book=(${text:+--text "$text"})

run() {
    case $1 in
        quality) quality needle,ruler,standins,fidelity,perplexity --lengths 1024 --samples 1 \
            --kinds number --depths 0.5 --tasks niah_single_1,qa_1 --answer-tokens 8 ;;
        needle) # with the question seen
            local is='={' seen='@aware={'
            bench quality --model "$model" --suite needle "${arms[@]/"$is"/"$seen"}" \
                "${window[@]/"$is"/"$seen"}" --work "$state/answers" \
                --kinds number --depths 0.1,0.3,0.5,0.7,0.9 \
                --lengths "$(pick - 1024,2048,4096 2048,4096)" --samples "$(pick - 2 16)" ;;
        kinds) quality needle "${window[@]}" --lengths 2048,4096 --depths 0.1,0.5,0.9 --samples 1 \
            --kinds number,word,long,multikey,multivalue,multiquery ;;
        ruler) quality ruler --lengths 2048 --samples 1 --questions 3 ;;
        standins) quality standins --lengths 2048 --samples 10 ;;
        fidelity) quality fidelity --lengths 1024,2048,4096,7500 --samples 3 --answer-tokens 64 ;;
        perplexity) quality perplexity --lengths "2048,4096${text:+,8000}" --samples 4 \
            ${book[@]+"${book[@]}"} \
            --arm 'streamingllm 0+1024={"method": "streamingllm", "sinks": 0, "recent": 1024}' ;;
        speed) timed decode_speed --context "$(pick 500 4000 4000)" --steps "$(pick 8 48 96)" \
            --batch "$(pick 2 8 8)" --arms "$(pick 'none,snapkv 1/4' "$readme" \
                "$readme,snapkv pages 1/4${gated:+,duoattention 0.75}")" ;;
        shapes) timed decode_shapes --contexts "$(pick 250,500 - 1000,2000,4000,8000)" \
            --cut "$(pick 500 - 4000)" --steps "$(pick 8 - 48)" ;;
        concurrency)
            timed concurrency --context "$(pick 500 4000 4000)" --pool "$(pick 4000 34000 34000)" \
                --arms "$(pick 'none,snapkv 1/4' "$readme" "$readme")" || return
            [[ $size != full ]] || timed concurrency --shape-only --arms "$rest" ;;
        attention) timed attention_mass --context "$(pick 256 - 2048)" ;;
        pressure) timed pressure ;;
        endless) timed endless_stream --text "$text" --tokens 200000 --decode 20000 &&
            timed endless_stream --text "$text" --tokens 200000 --perplexity \
                --without-sinks 30000 ;;
        replay) bench prefix_replay ;;
        orders) timed prefix_orders && timed prefix_orders --orders stock importance \
            --traffic tenants agents --pool 40000 ;;
        gates) timed prefix_gates ;;
        tree) bench radix_tree ;;
        calibration)
            local method
            for method in training-free trained; do
                bench calibration time "$model" --method "$method" \
                    --out "$state/$method.json" || return
            done ;;
        bench) timed throughput --workload document:context=4000,requests=8 --budgets 4 --one-server ;;
        kernels) bench decode_kernel ;;
        peers)
            peers --part speed || return
            [[ -z $kvpress ]] || peers --part quality --engines sglang-kv,kvpress --dtype float32 \
                --keep-ratio 0.16 --lengths 2048,4096 --samples 7,2 --words 1,1 --limit 55 ;;
        report) report ;;
    esac
}
timed() { # timed BENCHMARK FLAG...
    bench "$1" --model "$model" "${@:2}"
}
peers() {
    timed peers ${kvpress:+--kvpress "$kvpress"} ${llama:+--llama-cpp "$llama"} \
        --work "$state/peers" "$@"
}
report() {
    if [[ -n $apart ]]; then # too few, or of another model, for the documents
        bench summary "$apart"
        return
    fi
    bench report --write --plots &&
        bench quality --report --heat-maps docs/heat-maps >"$state/quality.md"
}

started=$SECONDS failed=()
for part in "${parts[@]}"; do
    why=$(left_out "$part")
    if [[ -n $why ]]; then
        say "$part: left out: $why"
        continue
    fi
    if [[ -f $state/$part.done ]]; then
        say "$part: done before, in $(cat "$state/$part.done") s"
        continue
    fi
    say "$part: at most $(column "$part" "$first") minutes, $(column "$part" $((first + 1)))"
    begun=$SECONDS
    if ! run "$part"; then
        say "$part: FAILED after $((SECONDS - begun)) s"
        failed+=("$part")
        continue
    fi
    took=$((SECONDS - begun))
    [[ $part == report ]] || printf '%s\n' "$took" >"$state/$part.done"
    budget=$((60 * $(column "$part" "$first")))
    ((took <= budget)) || say "$part: took $took s, more than its $budget"
    say "$part: $took s"
done
say "all of it: $((SECONDS - started)) s"
((${#failed[@]} == 0)) || die "failed: ${failed[*]}; the same command goes on with them"
