#!/usr/bin/env bash
# Chromium for the tests of the report's page, where it may be installed: root, apt-get, a network. Never fails, and takes
# LIMIT_S seconds at most for each step; without a browser these tests are skipped, and say so.
set -uo pipefail

LIMIT_S=${LIMIT_S:-240}

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no browser, and none is installed without root and apt-get: tests in a browser are skipped"
    exit 0
fi
within() { DEBIAN_FRONTEND=noninteractive timeout --kill-after=10 "$LIMIT_S" apt-get -qq -o DPkg::Lock::Timeout=30 "$@" >/dev/null 2>&1; }
if ! { within update; within install --yes --no-install-recommends chromium; } || ! command -v chromium >/dev/null; then
    echo "no browser, and apt-get could not install one within $LIMIT_S s: tests in a browser are skipped"
fi
exit 0
