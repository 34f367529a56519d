#!/usr/bin/env bash
# Set up the environment, lint, and run the tests.
#
# usage: bash launch/test.sh [--lint-only | --format | --help] [pytest's arguments ...]
#
#   --lint-only   ruff check and ruff format --check, no tests
#   --format      ruff fixes and formats the sources, no tests
#
# By default the tests marked slow do not run: "bash launch/test.sh -m slow" runs only those, "bash launch/test.sh -m ''"
# runs all. Example: bash launch/test.sh tests/core/test_decode.py -k ring -x
#
# Without pytest's arguments, the files of tests/numeric.txt run a second time afterwards as on an older processor: see
# launch/portable.sh.
#
# The tests run in parallel, in one process for every two cores, at least two, at most 8: "-n 4" sets another number, and
# "-n 0" runs them one by one, for a debugger. A machine with one core runs them one by one.

[ -n "${BASH_VERSION:-}" ] || { echo "error: start it with bash: bash launch/test.sh" >&2 && exit 2; }
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

lint=1
tests=1
case "${1:-}" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
    --lint-only) tests=0 ;;
    --format) lint=0 tests=0 ;;
esac

bash "$REPO/launch/setup.sh"
use_environment
cd "$REPO"

if [ "${1:-}" = --format ]; then
    ruff check --fix .
    ruff format .
    exit
fi
if [ "$lint" = 1 ]; then
    ruff check . || die "ruff check failed: 'make format' fixes most of the findings above"
    ruff format --check . || die "the files above are not formatted: run 'make format'"
fi
[ "$tests" = 1 ] || exit 0
if [ $# -gt 0 ]; then
    run_pytest "$@"
    exit
fi
trap 'exit 130' INT # pytest handles it, too: do not go on with the second run
status=0
run_pytest || status=$?
# The numeric files once more, with other roundings.
if [ "$(uname -m)" = x86_64 ]; then
    bash launch/portable.sh || status=$?
fi
exit "$status"
