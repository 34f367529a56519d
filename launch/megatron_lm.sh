#!/usr/bin/env bash
# Run a script of an unmodified Megatron-LM checkout with tree attention, on this machine.
#
# usage: bash launch/megatron_lm.sh [--help] [-n RANKS] [--port PORT] [--log-level LEVEL] MEGATRON_LM SCRIPT [OPTION ...]
#
#   MEGATRON_LM         folder of the checkout; its sources are not changed. Tested with 0.16.1; 0.18 needs Python 3.12
#   SCRIPT              a script in it that trains: pretrain_gpt.py, pretrain_t5.py ...; pretrain_mamba.py needs a GPU
#   OPTION ...          Megatron-LM's own options; tree attention takes the layers of --cp-comm-type tree (or a2a+tree).
#                       --dispatch-documents is ours: packed batches of all data ranks over all ranks (docs/megatron.md)
#   -n, --ranks RANKS   number of ranks (default: the number of GPUs, or 2 without one)
#   --port PORT         port of the rendezvous (default: a free one)
#   --log-level LEVEL   of the launcher: debug, info, warning, error (default)
#
# Without a GPU the ranks run on the CPU with gloo, to try things out; the options that this needs are added and printed.
# On several nodes: bash launch/deepspeed_hostfile.sh ... launch/megatron_lm.py MEGATRON_LM/SCRIPT [OPTION ...],
# or the same with launch/slurm_train.sh.
# Example: bash launch/megatron_lm.sh -n 8 ~/Megatron-LM pretrain_gpt.py --context-parallel-size 8 --cp-comm-type tree \
#     --attention-dropout 0.0 ...

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/megatron_lm.sh" >&2 && exit 2; }
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

launcher=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        -n | --ranks) needs_ranks "$@" && launcher+=("$1" "$2") && shift 2 ;;
        --port) needs_port "$@" && launcher+=("$1" "$2") && shift 2 ;;
        --log-level) needs_level "$@" && launcher+=("$1" "$2") && shift 2 ;;
        -*) mistake "unknown option $1: see bash launch/megatron_lm.sh --help" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || mistake "no Megatron-LM folder given: see bash launch/megatron_lm.sh --help"
folder="$1"
[ -d "$folder" ] || mistake "no such folder: $folder; name the folder of a Megatron-LM checkout"
for part in core training; do
    [ -d "$folder/megatron/$part" ] || mistake "$folder holds no megatron/$part: name the folder of a Megatron-LM checkout"
done
[ $# -gt 1 ] || mistake "no script given: name one of $folder, for instance pretrain_gpt.py"
[ -f "$folder/$2" ] || mistake "no such script: $folder/$2"
script="$folder/$2"
shift 2
case " $* " in
    *" --cp-comm-type"[\ =]*) ;;
    *) warn "no --cp-comm-type among the options: all layers keep Megatron's own attention; add" \
        "--context-parallel-size RANKS --cp-comm-type tree" ;;
esac

exec bash "$REPO/launch/deepspeed_local.sh" ${launcher[@]+"${launcher[@]}"} "$REPO/launch/megatron_lm.py" "$script" "$@"
