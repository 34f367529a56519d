#!/usr/bin/env bash
# Start a command of megatron-tree, or a script, on the nodes of a Slurm job, one task per rank. Submit it from the
# folder of the repository:
#
# usage: sbatch SLURM_OPTIONS launch/slurm_train.sh [--help] [--port PORT] COMMAND [ARGUMENT ...]
# usage: bash launch/slurm_train.sh [--help] [--port PORT] COMMAND [ARGUMENT ...]        inside an allocation (salloc)
#
#   --port PORT   port of the rendezvous on the first node (default: 20000 + job id modulo 20000)
#
# Slurm starts the ranks (srun), so neither ssh nor a hostfile is needed. --ntasks-per-node is the number of ranks per
# node, one for each GPU. Request GPUs per node (--gpus-per-node): with --gpus-per-task a rank sees only its own GPU.
# Three minutes before the time limit Slurm sends SIGUSR1 to all ranks. megatron-tree train then finishes its step,
# writes a checkpoint and exits with 0. With --resume the next job continues from it. For a long training, submit
#
#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --job-name gpt --dependency singleton \
#       launch/slurm_train.sh train --config my.yaml --save /shared/gpt --save-interval 500 --resume
#
# several times: jobs with the same name run one after another. Every node needs the repository and its environment at
# the same path. If a node has several networks, set NCCL_SOCKET_IFNAME, or GLOO_SOCKET_IFNAME on CPU nodes. All
# environment variables are passed on (sbatch's default).

#SBATCH --signal=USR1@180
#SBATCH --output=%x-%j.out

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/slurm_train.sh" >&2 && exit 2; }
set -euo pipefail
# sbatch runs a copy of this script from another folder, but Slurm tells where it was submitted.
here="$(dirname "${BASH_SOURCE[0]}")"
[ -f "$here/env.sh" ] || here="${SLURM_SUBMIT_DIR:-.}/launch"
[ -f "$here/env.sh" ] || { echo "error: no launch/env.sh in ${SLURM_SUBMIT_DIR:-$PWD}: submit from the repository's folder" >&2 && exit 1; }
source "$here/env.sh"
STOP_SECONDS=150 # for the ranks to write a checkpoint when the job is cancelled; Slurm's KillWait may be shorter

port=""
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        --port) needs_port "$@" && port="$2" && shift 2 ;;
        -*) mistake "unknown option $1: see bash launch/slurm_train.sh --help" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || mistake "no command given: see bash launch/slurm_train.sh --help"
[ -n "${SLURM_JOB_ID:-}" ] || die "no Slurm job: submit this with sbatch, or allocate nodes with salloc first"
for program in srun scontrol; do
    command -v "$program" >/dev/null || die "no $program found: is Slurm on this node's PATH?"
done
cd "$REPO"
find_program "$1"
use_environment

mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
[ -n "${nodes[0]:-}" ] || die "scontrol names no node for SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}, which Slurm sets"
export MASTER_ADDR="${nodes[0]}" MASTER_PORT="${port:-$((20000 + SLURM_JOB_ID % 20000))}"
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun does not take it over
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
say "${SLURM_NTASKS:-?} ranks on ${SLURM_JOB_NODELIST}, rendezvous at $MASTER_ADDR:$MASTER_PORT"

# Every task becomes a rank. A rank that fails ends the others (--kill-on-bad-exit).
rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec python -u "$@"'
status=0
run_group srun --kill-on-bad-exit=1 bash -c "$rank" rank ${MODULE[@]+-m "${MODULE[@]}"} "$@" || status=$?
exit "$status"
