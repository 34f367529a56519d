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
# The tests run in parallel, in one process for every two cores, at least two, at most 8: "-n 4" sets another number, and
# "-n 0" runs them one by one, for a debugger. A machine with one core runs them one by one.

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
# Half of the tests start 2 to 4 ranks. Two processes keep two cores busy; with more cores, one for every two is enough.
cores="$(num_cores)"
workers=$((cores < 2 ? 0 : cores < 4 ? 2 : cores > 16 ? 8 : cores / 2))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / (workers ? workers : 1)))}" TOKENIZERS_PARALLELISM=false
exec python -m pytest -n "$workers" --dist loadgroup -m 'not slow' --durations=15 --durations-min=5 "$@"
