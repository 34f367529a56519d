#!/usr/bin/env bash
# Run the fast tests with the roundings of other machines: fewer vector instructions, other numbers of threads, one core.
#
# usage: bash launch/portable.sh [--numeric] [--on LEVEL/THREADS[/core] ...] [--help] [pytest's arguments ...]
#
#   --numeric                  only the files that compare numbers (tests/numeric.txt)
#   --on LEVEL/THREADS[/core]  only this environment; may be repeated. "/core": on one core, else on all
#
# LEVEL      torch (ATen)   oneDNN    MKL                    our C kernels
# default    default        SSE4.1    SSE4.2, "compatible"   x86-64
# avx2       avx2           AVX2      AVX2                   x86-64-v3
# none       of the processor
#
# THREADS is the number of torch's threads in the tests and in each of their ranks. All fast tests run on default/4,
# avx2/1/core and none/2, so that each level, number of threads and set of cores is used once: three times as long as
# launch/test.sh. With --numeric: every level with 1, 2 and 4 threads, and with one core.
#
# It ends with one line for each environment. The exit status is not 0 if tests have failed in one of them.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

numeric=0
environments=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        --numeric) numeric=1 ;;
        --on) environments+=("${2:?"--on needs LEVEL/THREADS or LEVEL/THREADS/core"}") && shift ;;
        *) break ;;
    esac
    shift
done
if [ ${#environments[@]} = 0 ]; then
    environments=(default/4 avx2/1/core none/2)
    [ "$numeric" = 0 ] || environments=({default,avx2,none}/{1,2,4} {default,avx2,none}/1/core)
fi
for name in "${environments[@]}"; do
    [[ "$name" =~ ^(default|avx2|none)/[1-9][0-9]*(/core)?$ ]] ||
        die "--on $name: expected LEVEL/THREADS or LEVEL/THREADS/core, where LEVEL is default, avx2 or none"
    [ "${name%%/*}" = none ] || [ "$(uname -m)" = x86_64 ] || die "--on $name: the levels are those of x86 processors"
    [ "${name%%/*}" != avx2 ] || grep -qw avx2 /proc/cpuinfo || die "--on $name: this processor has no AVX2"
done
[ "$numeric" = 0 ] || set -- @tests/numeric.txt "$@"

use_environment
cd "$REPO"
TEMPORARY="$(mktemp -d)"
trap 'rm -rf "$TEMPORARY"' EXIT
trap 'exit 130' INT # pytest handles it, too: do not go on with the next environment

# Compile our C sources for ARCH, not for this processor. What is kept for this one is left alone. usage: compile_for ARCH
compile_for() {
    local compiler name folder="$TEMPORARY/$1"
    export XDG_CACHE_HOME="$folder/cache" PATH="$folder:$PATH"
    mkdir -p "$folder"
    for name in cc gcc clang; do # as megatron_tree/compiled.py
        compiler="$(PATH="${PATH#*:}" command -v "$name")" || continue
        printf '#!/usr/bin/env bash\nexec %q "${@/#-march=native/-march=%s}"\n' "$compiler" "$1" >"$folder/cc"
        chmod +x "$folder/cc"
        return
    done
}

# usage: run_on LEVEL/THREADS[/core] [pytest's arguments ...]
run_on() {
    local level threads core
    IFS=/ read -r level threads core <<<"$1"
    shift
    case "$level" in
        default)
            export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE
            compile_for x86-64
            ;;
        avx2)
            export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2
            compile_for x86-64-v3
            ;;
        none) unset ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA MKL_ENABLE_INSTRUCTIONS MKL_CBWR ;;
    esac
    # torch itself starts no more threads than there are cores, whatever OMP_NUM_THREADS says
    export OMP_NUM_THREADS="$threads" TREE_TEST_THREADS="$threads"
    export OMP_WAIT_POLICY=passive # threads of several ranks on a core must not spin while they wait for each other
    if [ -n "$core" ]; then
        core="$(taskset -cp "$BASHPID" | sed -E 's/.*: *([0-9]+).*/\1/')" # the first that it may use
        taskset -cp "$core" "$BASHPID" >/dev/null || die "can't run on one core: taskset failed"
    fi
    run_pytest "$@"
}

failed=0 summary=()
for name in "${environments[@]}"; do
    printf '\nportable: %s\n' "$name"
    outcome=passed log="$TEMPORARY/log"
    (run_on "$name" "$@") 2>&1 | tee "$log" || { outcome=FAILED failed=1; }
    summary+=("$(printf '%-14s %s  %s' "$name" "$outcome" "$(grep . "$log" | tail -n 1 | tr -d =)")")
done
printf '\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
