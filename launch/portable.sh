#!/usr/bin/env bash
# Run tests with the roundings of an older processor: SSE4 instead of wide vectors, 4 threads.
#
# usage: bash launch/portable.sh [--help] [pytest's arguments ...]
#
# torch (ATen), oneDNN, MKL and our C kernels are all held to SSE4; the tests and each of their ranks have 4 threads.
# Without arguments it runs the files of tests/numeric.txt, whose numbers depend on the order of sums. For x86 processors.

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/portable.sh" >&2 && exit 2; }
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
esac
[ "$(uname -m)" = x86_64 ] || die "this is no x86 processor"
[ $# -gt 0 ] || set -- @tests/numeric.txt

use_environment
cd "$REPO"
TEMPORARY="$(mktemp -d)"
trap 'rm -rf "$TEMPORARY"' EXIT

# Our C sources are compiled for x86-64, not for this processor; the libraries kept for this one are left alone.
for name in cc gcc clang; do # as megatron_tree/core/compiled.py
    compiler="$(command -v "$name")" || continue
    printf '#!/usr/bin/env bash\nexec %q "${@/#-march=native/-march=x86-64}"\n' "$compiler" >"$TEMPORARY/cc"
    chmod +x "$TEMPORARY/cc"
    break
done
export XDG_CACHE_HOME="$TEMPORARY/cache" PATH="$TEMPORARY:$PATH"
export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE
# torch itself starts no more threads than there are cores, whatever OMP_NUM_THREADS says
export OMP_NUM_THREADS=4 TREE_TEST_THREADS=4
export OMP_WAIT_POLICY=passive # threads of several ranks on a core must not spin while they wait for each other
run_pytest "$@"
