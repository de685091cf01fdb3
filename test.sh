#!/usr/bin/env bash
# Makes or reuses .venv, installs what the tests need and runs them: ./test.sh [PYTEST ARGUMENTS].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. .ci/env.sh
simkit_env "test,kernels"
if may_apt && ! command -v chromium >/dev/null 2>&1 && ! command -v google-chrome >/dev/null 2>&1; then
    say "installing chromium with apt"
    apt_install chromium || say "no chromium: the browser tests will be skipped"
fi
PATH="$(cd "$VENV/bin" && pwd):$PATH"
export PATH
[ $# -gt 0 ] || set -- -q -n 2
exec python -m pytest "$@"
