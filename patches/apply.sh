#!/usr/bin/env bash
# Patch Megatron so that its option `--cp-comm-type tree` works, or revert the patch.
#
# usage: bash patches/apply.sh --megatron PATH [--revert] [--check] [--help]
#
#   --megatron PATH   a checkout of Megatron-LM, or the folder in which megatron-core is installed: the one that contains
#                     megatron/core
#   --revert          remove the patch
#   --check           change nothing; exit with 0 if the patch is applied (with --revert: if it is not)
#
# The script reads the release from megatron/core/package_info.py and has a patch for each of 0.16 to 0.19. It does nothing
# if the patch is already applied. patches/README.md describes the changes.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/env.sh"

megatron= revert=0 check=0
while [ $# -gt 0 ]; do
    case "$1" in
        --megatron)
            [ $# -ge 2 ] || die "--megatron needs a path: see bash patches/apply.sh --help"
            megatron="$2"
            shift
            ;;
        --revert) revert=1 ;;
        --check) check=1 ;;
        -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
        *) die "unknown option $1: see bash patches/apply.sh --help" ;;
    esac
    shift
done
[ -n "$megatron" ] || die "name the sources with --megatron PATH: see bash patches/apply.sh --help"
info="$megatron/megatron/core/package_info.py"
[ -f "$info" ] || die "$megatron holds no megatron/core/package_info.py: name the folder above megatron/core"
command -v git >/dev/null || die "git is needed to apply a patch (Debian, Ubuntu: apt-get install git)"

number() { sed -nE "s/^$1 *= *([0-9]+).*/\1/p" "$info"; }
version="$(number MAJOR).$(number MINOR)"
patch="$REPO/patches/megatron-lm/$version.patch"
if [ ! -f "$patch" ]; then
    known="$(cd "$REPO/patches/megatron-lm" && ls -- *.patch | sed 's/\.patch$//' | sort -V | tr '\n' ' ')"
    die "$megatron is Megatron-core $version.$(number PATCH): there are patches for ${known% }." \
        "megatron_tree's install() or --spec need none (docs/megatron-lm.md)"
fi

cd "$megatron"
# Paths in the patch count from here, also where this folder lies inside a git repository of another project.
export GIT_CEILING_DIRECTORIES="$(dirname "$(pwd -P)")"
applies() { git apply --check "$@" "$patch" 2>/dev/null; }

if applies --reverse; then is_in=1; else is_in=0; fi
if [ "$is_in" = 0 ] && ! applies; then
    git apply --check "$patch" 2>&1 | sed 's/^/    /' >&2 || true
    die "the sources in $megatron are not those of release $version (see above): change the places that" \
        "$patch shows by hand, or use install() or --spec, which need no patch (docs/megatron-lm.md)"
fi
wanted=$((1 - revert))
state=("is not in" "is in")
if [ "$check" = 1 ]; then
    say "Megatron-core $version in $megatron: the patch ${state[$is_in]}"
    [ "$is_in" = "$wanted" ]
    exit
fi
if [ "$is_in" = "$wanted" ]; then
    say "nothing to do: the patch ${state[$is_in]} Megatron-core $version in $megatron"
elif [ "$wanted" = 1 ]; then
    git apply "$patch"
    say "patched Megatron-core $version in $megatron: --cp-comm-type tree works wherever megatron_tree is installed"
else
    git apply --reverse "$patch"
    say "took the patch out of Megatron-core $version in $megatron"
fi
