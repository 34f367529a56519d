#!/usr/bin/env bash
# Start a command of megatron-tree, or a script, on several ranks of this machine with the deepspeed launcher.
#
# usage: bash launch/deepspeed_local.sh [-n RANKS] [--port PORT] [--log-level LEVEL] COMMAND [ARGUMENT ...]
#
#   -n, --ranks RANKS   number of ranks (default: the number of GPUs, or 2 without one)
#   --port PORT         port of the rendezvous (default: a free one)
#   --log-level LEVEL   of the launcher: debug, info, warning, error (default)
#
# Without a GPU the ranks run on the CPU (DS_ACCELERATOR=cpu) and share the cores. They use the loopback interface.
# The script keeps these variables if you have set them: DS_ACCELERATOR, OMP_NUM_THREADS, GLOO_SOCKET_IFNAME,
# NCCL_SOCKET_IFNAME. Its exit status is that of the first rank that failed. Ctrl-C or SIGTERM ends all ranks; after
# STOP_SECONDS (default: 5) they are killed, so set it higher if a training run needs time to write a checkpoint.
# Example: bash launch/deepspeed_local.sh -n 4 generate --help

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/deepspeed_local.sh" >&2 && exit 2; }
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

ranks=""
port=""
level=error
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        -n | --ranks) needs_ranks "$@" && ranks="$2" && shift 2 ;;
        --port) needs_port "$@" && port="$2" && shift 2 ;;
        --log-level) needs_level "$@" && level="$2" && shift 2 ;;
        -*) mistake "unknown option $1: see bash launch/deepspeed_local.sh --help" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || mistake "no command given: see bash launch/deepspeed_local.sh --help"
find_program "$1"

use_environment
command -v deepspeed >/dev/null || die "no deepspeed in $VIRTUAL_ENV: run 'bash launch/setup.sh' first"

if [ -z "${DS_ACCELERATOR:-}" ] && ! has_gpu; then
    export DS_ACCELERATOR=cpu
fi
if [ "${DS_ACCELERATOR:-}" = cpu ]; then
    ranks="${ranks:-2}"
    threads=$(($(num_cores) / ranks))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}"
fi
loopback=lo
[ "$(uname -s)" != Darwin ] || loopback=lo0
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$loopback}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$loopback}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
if [ -z "$port" ]; then
    port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
fi

# deepspeed reads /job/hostfile by default, which would turn a local run into one on several nodes.
run_group deepspeed --hostfile /dev/null/none --master_port "$port" ${ranks:+--num_gpus "$ranks"} \
    --no_local_rank --log_level "$level" ${MODULE[@]+--module "${MODULE[@]}"} "$@"
