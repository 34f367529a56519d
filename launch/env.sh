# Functions shared by the scripts in this folder. Source it; it does nothing by itself.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s\n' "$*"; }

warn() { printf 'warning: %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# A mistake in what was typed: status 2, as of all commands. What is not there, or fails later, ends with 1.
mistake() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Ends unless an option has a value, and one of the right form. usage: needs RULE PATTERN OPTION [VALUE ...]
needs() {
    [ -n "${4:-}" ] || mistake "$3 needs a value: $1"
    [[ "$4" =~ ^($2)$ ]] || mistake "$3 $4: $1"
}

# The value of --port, --log-level, or of a number of ranks. usage: needs_port OPTION [VALUE ...], and so on
needs_port() {
    needs "must be a number from 1 to 65535" '[1-9][0-9]{0,4}' "$@"
    [ "$2" -le 65535 ] || mistake "$1 $2: must be a number from 1 to 65535"
}
needs_level() { needs "must be debug, info, warning, error or critical" 'debug|info|warning|error|critical' "$@"; }
needs_ranks() { needs "the number of ranks must be a whole number from 1 up" '[1-9][0-9]{0,8}' "$@"; }

# The comment block at the top of the calling script is its help text.
print_help() { sed -n '2,/^$/{/^#/!q;s/^# \{0,1\}//p}' "$1"; }

has_gpu() {
    { command -v nvidia-smi && nvidia-smi -L | grep -q GPU; } >/dev/null 2>&1 && return 0
    has_rocm
}

has_rocm() { [ -e /dev/kfd ] && { command -v rocm-smi || command -v amd-smi || [ -d /opt/rocm ]; } >/dev/null 2>&1; }

# Those that this process may use; nproc would also obey OMP_NUM_THREADS.
num_cores() { env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1; }

# pytest with the tests that are not slow, in one process for every two cores. usage: run_pytest [ARGUMENT ...]
run_pytest() {
    local cores workers
    # Half of the tests start 2 to 4 ranks. Two processes keep two cores busy; with more cores, one for every two is enough.
    cores="$(num_cores)"
    workers=$((cores < 2 ? 0 : cores < 4 ? 2 : cores > 16 ? 8 : cores / 2))
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / (workers ? workers : 1)))}" TOKENIZERS_PARALLELISM=false \
        python -m pytest -n "$workers" --dist loadgroup -m 'not slow' --durations=15 --durations-min=5 "$@"
}

# Put the programs of the active virtual environment, or else of .venv, first on PATH.
use_environment() {
    local venv="${VIRTUAL_ENV:-$REPO/.venv}"
    [ -x "$venv/bin/python" ] || die "no Python environment at $venv: run 'bash launch/setup.sh' first"
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
    unset PYTHONHOME
    unset PYTHONDONTWRITEBYTECODE # pip leaves bytecode to the first import: without it each process would compile torch anew
}

# What Python runs: a command of megatron-tree, or a script. Sets MODULE to the options that the first one needs.
# usage: find_program NAME
find_program() {
    MODULE=()
    case "$1" in
        train | generate | chat | serve | calibrate | bench) MODULE=(megatron_tree) ;;
        *) [ -f "$1" ] || mistake "no such command or script: $1; the commands are train, generate, chat, serve, calibrate, bench" ;;
    esac
}

# The processes with this mark in their environment (Linux), including those that have left the process group.
marked_processes() {
    grep -lzsxF "MEGATRON_TREE_RUN_$1=1" /proc/[0-9]*/environ 2>/dev/null | sed -E 's|/proc/([0-9]+)/environ|\1|'
}

# Run a command in its own process group, pass signals on to it, and leave no process behind however it ends.
# usage: run_group COMMAND [ARGUMENT ...]      returns the command's exit status
run_group() {
    local status=0
    RUN_MARK="$$_$RANDOM$RANDOM"
    trap 'stop_group; exit 130' INT
    trap 'stop_group; exit 143' TERM
    trap 'stop_group; exit 129' HUP
    trap 'stop_group' EXIT
    set -m # every background job becomes a process group
    env "MEGATRON_TREE_RUN_$RUN_MARK=1" "$@" </dev/null &
    RUN_PID=$!
    set +m
    wait "$RUN_PID" || status=$?
    stop_group
    trap - INT TERM HUP EXIT
    return "$status"
}

# Seconds from SIGTERM to SIGKILL. A script that runs another one needs a larger value than that one.
STOP_SECONDS="${STOP_SECONDS:-5}"

stop_group() {
    local tries
    trap '' INT TERM HUP # a second Ctrl-C must not interrupt the clean-up
    [ -n "${RUN_PID:-}" ] || return 0
    if kill -TERM -- "-$RUN_PID" 2>/dev/null; then
        for ((tries = 0; tries < 10 * STOP_SECONDS; tries++)); do
            kill -0 -- "-$RUN_PID" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$RUN_PID" 2>/dev/null || true
    fi
    marked_processes "$RUN_MARK" | xargs kill -KILL 2>/dev/null || true
    wait "$RUN_PID" 2>/dev/null || true
    RUN_PID=""
}
