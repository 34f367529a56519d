#!/usr/bin/env bash
# Set up the environment, lint, and run the tests.
#
# usage: bash launch/test.sh [--lint-only | --format | --help] [pytest's arguments ...]
#
#   --lint-only   ruff check and ruff format --check, no tests
#   --format      let ruff fix and format the sources, no tests
#
# Without -m among pytest's arguments the tests marked slow are left out: bash launch/test.sh -m slow runs those,
# bash launch/test.sh -m '' all. Example: bash launch/test.sh tests/core/test_decode.py -k ring -x

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
    ruff check . || die "ruff found the above: 'make format' repairs most of it"
    ruff format --check . || die "the files above are not formatted: run 'make format'"
fi
[ "$tests" = 1 ] || exit 0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(num_cores)}" TOKENIZERS_PARALLELISM=false
exec python -m pytest -m 'not slow' --durations=15 --durations-min=5 "$@"
