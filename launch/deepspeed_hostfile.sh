#!/usr/bin/env bash
# Start a command of megatron-tree, or a script, on the nodes of a hostfile with the deepspeed launcher.
#
# usage: bash launch/deepspeed_hostfile.sh --hostfile FILE [OPTION ...] COMMAND [ARGUMENT ...]
#
#   --hostfile FILE        lines "HOST slots=RANKS", see configs/hostfile.example
#   --master-addr ADDRESS  address of the first host as the others see it (default: found with ssh)
#   --port PORT            port of the rendezvous on the first host (default: 29500)
#   --launcher NAME        pdsh (default), openmpi, mpich, impi, mvapich or slurm; the program must be installed here
#   --node-rank N          do not use ssh: you (or a scheduler) start this command on every node; N counts from 0
#                          in the hostfile's order; needs --master-addr
#   --export NAME          also pass this variable to the nodes (can be repeated)
#   --log-level LEVEL      of the launcher: debug, info, warning, error (default)
#
# Every node needs the repository and its environment at the same path (a shared file system, or a copy). This machine
# needs ssh to every host without a password (ssh-keygen, then ssh-copy-id HOST; test with "ssh HOST true").
# These variables are passed to the nodes if they are set: OMP_NUM_THREADS, DS_ACCELERATOR, TORCH_DISTRIBUTED_DEBUG, and
# all that start with NCCL_, GLOO_, UCX_, CUDA_DEVICE_, MEGATRON_TREE_. If a node has several networks, name the
# interface: NCCL_SOCKET_IFNAME, or GLOO_SOCKET_IFNAME on CPU nodes.
# Example: GLOO_SOCKET_IFNAME=eth0 bash launch/deepspeed_hostfile.sh --hostfile hosts train --help

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/deepspeed_hostfile.sh" >&2 && exit 2; }
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

hostfile=""
address=""
port=29500
launcher=pdsh
node_rank=""
level=error
exports=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        --hostfile) needs "the path of a hostfile" .+ "$@" && hostfile="$2" && shift 2 ;;
        --master-addr) needs "the first host's address" .+ "$@" && address="$2" && shift 2 ;;
        --port) needs_port "$@" && port="$2" && shift 2 ;;
        --launcher)
            needs "must be pdsh, openmpi, mpich, impi, mvapich or slurm" 'pdsh|openmpi|mpich|impi|mvapich|slurm' "$@"
            launcher="$2" && shift 2 ;;
        --node-rank) needs "this node's number, from 0" .+ "$@" && node_rank="$2" && shift 2 ;;
        --export) needs "must be the name of a variable" '[A-Za-z_][A-Za-z0-9_]*' "$@" && exports+=("$2") && shift 2 ;;
        --log-level) needs_level "$@" && level="$2" && shift 2 ;;
        -*) mistake "unknown option $1: see bash launch/deepspeed_hostfile.sh --help" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || mistake "no command given: see bash launch/deepspeed_hostfile.sh --help"
[[ "${node_rank:-0}" =~ ^[0-9]{1,9}$ ]] || mistake "--node-rank $node_rank is not a number: the first host is 0"
[ -z "$node_rank" ] || [ -n "$address" ] || mistake "--node-rank needs --master-addr, the first host's address"
for name in ${exports[@]+"${exports[@]}"}; do
    [ -n "${!name+set}" ] || mistake "--export $name: the variable is not set"
    [[ "${!name}" != *$'\n'* ]] || mistake "--export $name: the value has several lines, which deepspeed can't pass on"
done
find_program "$1"
[ -n "$hostfile" ] || mistake "no hostfile given: --hostfile FILE; configs/hostfile.example shows the format"
[ -f "$hostfile" ] || mistake "no such hostfile: $hostfile; configs/hostfile.example shows the format"
[ "$(tr -dc '\0' <"$hostfile" | wc -c)" -eq 0 ] || die "$hostfile has NUL characters: a line reads 'HOST slots=RANKS'"
names="$(sed -E 's/#.*//; s/[[:space:]]+$//' "$hostfile" | grep -anv '^$')" || names=""
[ -n "$names" ] || die "$hostfile names no host: a line reads 'HOST slots=RANKS', see configs/hostfile.example"
hosts="$(grep -c . <<<"$names")"
bad="$(grep -avE "^[0-9]+:[A-Za-z0-9_[][][A-Za-z0-9_.:@%-]*[[:space:]]+slots=[1-9][0-9]{0,4}$" <<<"$names" | head -n 1)" || true
[ -z "$bad" ] || die "$hostfile, line ${bad%%:*}: '${bad#*:}' is not 'HOST slots=RANKS', see configs/hostfile.example"
twice="$(sed -E 's/^[0-9]+:([^[:space:]]+).*/\1/' <<<"$names" | sort | uniq -d | head -n 1)"
[ -z "$twice" ] || die "$hostfile lists the host $twice more than once: use one line per host, with the total of its ranks"
[ "${node_rank:-0}" -lt "$hosts" ] || mistake "--node-rank $node_rank: $hostfile names $hosts hosts, ranks 0 to $((hosts - 1))"

use_environment
command -v deepspeed >/dev/null || die "no deepspeed in $VIRTUAL_ENV: run 'bash launch/setup.sh' first"

options=(--hostfile "$hostfile" --master_port "$port" --no_local_rank --log_level "$level")
[ -z "$address" ] || options+=(--master_addr "$address")
if [ -n "$node_rank" ]; then
    options+=(--no_ssh --node_rank "$node_rank")
else
    command -v ssh >/dev/null || die "no ssh found: install it, or start the command on every node yourself (--node-rank)"
    [ "$launcher" != pdsh ] || command -v pdsh >/dev/null ||
        die "no pdsh found: install it, choose another --launcher, or start the command on every node yourself (--node-rank)"
    options+=(--launcher "$launcher" --force_multi)
fi
if [ -z "${DS_ACCELERATOR:-}" ] && ! has_gpu; then
    warn "no GPU on this machine: DS_ACCELERATOR=cpu is set for all nodes; set DS_ACCELERATOR=cuda if the nodes have GPUs"
    export DS_ACCELERATOR=cpu
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

pattern='^(OMP_NUM_THREADS|DS_ACCELERATOR|TORCH_DISTRIBUTED_DEBUG|(NCCL|GLOO|UCX|CUDA_DEVICE|MEGATRON_TREE)_[A-Z0-9_]+)$'

# deepspeed reads the variables for the other nodes from the file DS_ENV_FILE, and puts double quotes around values that
# need them. Escape what is special inside double quotes.
DS_ENV_FILE="$(mktemp)"
export DS_ENV_FILE
for name in $(compgen -e | grep -E "$pattern" || true) ${exports[@]+"${exports[@]}"}; do
    printf '%s=%s\n' "$name" "$(printf '%s' "${!name}" | sed 's/[\\"$`]/\\&/g')"
done >"$DS_ENV_FILE"

status=0
run_group deepspeed "${options[@]}" ${MODULE[@]+--module "${MODULE[@]}"} "$@" || status=$?
rm -f "$DS_ENV_FILE"
exit "$status"
