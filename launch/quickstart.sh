#!/usr/bin/env bash
# Set up the environment, train a small GPT with tree context parallelism, then let SmolLM2-135M-Instruct answer a
# question about a long text with its KV cache sharded over the ranks.
#
# usage: bash launch/quickstart.sh [--train-only | --generate-only] [--ranks N] [--help]
#
#   --train-only      skip the generation
#   --generate-only   skip the training
#   --ranks N         ranks for both (default: 4, with fewer than 4 cores 2; with GPUs the largest power of two that is
#                     not above their number)
#
# All results go to runs/quickstart: train.jsonl, loss.png, checkpoints/, generate.json and, if the output is not a
# terminal, the logs. It takes under 10 minutes on two cores, plus the downloads.
# The two jobs are megatron-tree train with configs/train/quickstart.yaml and megatron-tree generate with
# configs/generate/cpu.yaml, started with launch/deepspeed_local.sh.

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/quickstart.sh" >&2 && exit 2; }
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
STOP_SECONDS=20
out=runs/quickstart

train=1
generate=1
ranks=""
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        --train-only) generate=0 && shift ;;
        --generate-only) train=0 && shift ;;
        --ranks) needs "must be a whole number from 1 up" '[1-9][0-9]{0,8}' "$@" && ranks="$2" && shift 2 ;;
        *) mistake "unknown option $1: see bash launch/quickstart.sh --help" ;;
    esac
done
[ "$((train + generate))" -gt 0 ] || mistake "--train-only and --generate-only exclude each other"
cd "$REPO"

failed() {
    printf '\nquickstart failed in the step "%s" (exit status %d)' "$1" "$2"
    if [ -n "${3:-}" ]; then
        printf '; the last lines of %s:\n' "$3"
        tr '\r' '\n' <"$3" | tail -n 25 | sed 's/^/    /'
    else
        printf ': see the messages above\n'
    fi
} >&2

# usage: job NAME SCRIPT [ARGUMENT ...]    runs it on all ranks; unless the output is a terminal, it also goes to a log
job() {
    local name="$1" log="" status=0 start=$SECONDS
    shift
    printf '\n== %s on %s ranks: %s\n' "$name" "$ranks" "$*"
    if [ -t 1 ]; then
        run_group bash launch/deepspeed_local.sh -n "$ranks" "$@" || status=$?
    else
        log="$out/$name.log"
        local pipe="$out/.$name.pipe" tee_pid
        rm -f "$pipe"
        mkfifo "$pipe"
        tee "$log" <"$pipe" &
        tee_pid=$!
        run_group bash launch/deepspeed_local.sh -n "$ranks" "$@" >"$pipe" 2>&1 || status=$?
        wait "$tee_pid"
        rm -f "$pipe"
    fi
    [ "$status" = 0 ] || { failed "$name" "$status" "$log" && exit "$status"; }
    summary+="  $name: $((SECONDS - start)) s"$'\n'
}

# usage: made NAME FILE ...    fails unless the step has written these files
made() {
    local name="$1" file
    shift
    for file in "$@"; do
        [ -s "$file" ] || { printf '%s was not written\n' "$file" >&2 && failed "$name" 1 && exit 1; }
        [ "$file" -nt "$out/.started" ] || { printf '%s is from an earlier run\n' "$file" >&2 && failed "$name" 1 && exit 1; }
    done
}

summary=""
run_group bash launch/setup.sh || { status=$? && failed set-up "$status" && exit "$status"; }
use_environment
mkdir -p "$out"
start=$SECONDS
: >"$out/.started"

if [ -z "$ranks" ]; then
    ranks=$(($(num_cores) < 4 ? 2 : 4))
    if has_gpu; then
        ranks="$(python -c 'import torch; print(1 << max(1, torch.cuda.device_count()).bit_length() - 1)')"
    fi
fi

if [ "$train" = 1 ]; then
    job training train --config configs/train/quickstart.yaml --context-parallel-size "$ranks"
    made training "$out/train.jsonl" "$out/loss.png"
fi
if [ "$generate" = 1 ]; then
    job generation generate --config configs/generate/cpu.yaml --check --json "$out/generate.json"
    made generation "$out/generate.json"
fi

printf '\n== done in %d s without the set-up\n%s\nin %s:\n' $((SECONDS - start)) "$summary" "$out"
rm -f "$out/.started"
(cd "$out" && du -sh -- * | sed 's/^/  /')
