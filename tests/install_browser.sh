#!/usr/bin/env bash
# Installs Debian's chromium for the browser tests where that is possible; otherwise says why not and lets the tests
# skip themselves (they fail instead if LCS_REQUIRE_BROWSER is set).
set -u
if [ -x /usr/bin/chromium ] || [ -n "${LCS_CHROMIUM:-}" ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "no chromium and no apt-get: install chromium yourself to run the browser tests" >&2
elif [ "$(id -u)" != 0 ]; then
    echo "no chromium and not root: run 'apt-get install chromium' to run the browser tests" >&2
else
    echo "installing chromium for the browser tests" >&2
    export DEBIAN_FRONTEND=noninteractive
    timeout 300 apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 ||
        { timeout 120 apt-get update -qq >/dev/null 2>&1 &&
          timeout 300 apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; } ||
        echo "chromium could not be installed: the browser tests will be skipped" >&2
fi
exit 0
