#!/usr/bin/env bash
# Patch the launch script of a Megatron-LM checkout, so that `pretrain_gpt.py --lynx-plan PLAN` works without the launcher.
#
#   scripts/apply_patches.sh CHECKOUT              apply (a second time changes nothing)
#   scripts/apply_patches.sh --reverse CHECKOUT    take back (a second time changes nothing)
#
# Exit status: 0 done, or nothing to do; 1 the files are not as that release has them, nothing was changed; 2 the request is wrong.
set -euo pipefail

fail() {
    echo "apply_patches.sh: $2" >&2
    exit "$1"
}

forward=() backward=(--reverse) done="patched already" verb="patched"
if [[ "${1:-}" == --reverse ]]; then
    forward=(--reverse) backward=() done="not patched" verb="taken back"
    shift
fi
[[ $# == 1 && "$1" != -* ]] || fail 2 "usage: scripts/apply_patches.sh [--reverse] CHECKOUT"
checkout=$1
facts=$checkout/megatron/core/package_info.py
[[ -f $checkout/pretrain_gpt.py && -f $facts ]] || fail 2 "$checkout: found no pretrain_gpt.py with megatron/core, needed a checkout of Megatron-LM"

number() { sed -n "s/^$1 = \([0-9]*\).*/\1/p" "$facts"; }
release=core_$(number MAJOR)_$(number MINOR)
patches=$(cd "$(dirname "$0")/../patches" && pwd)
if [[ ! -d $patches/$release ]]; then
    known=$(cd "$patches" && echo core_*)
    fail 2 "$checkout: found $release, needed one of: $known"
fi

try() { patch --directory="$checkout" --strip=1 --fuzz=0 --force --silent --reject-file=- --no-backup-if-mismatch "$@" > /dev/null 2>&1; }

for file in "$patches/$release"/*.patch; do # all of them fit, or none is touched
    try --dry-run "${forward[@]}" --input="$file" || try --dry-run "${backward[@]}" --input="$file" ||
        fail 1 "$checkout: $(basename "$file") does not fit; is it $release as published?"
done
for file in "$patches/$release"/*.patch; do
    if try --dry-run "${backward[@]}" --input="$file"; then
        echo "$checkout: $done ($release/$(basename "$file"))"
    else
        try "${forward[@]}" --input="$file"
        echo "$checkout: $verb ($release/$(basename "$file"))"
    fi
done
