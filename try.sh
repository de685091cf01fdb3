#!/usr/bin/env bash
# Makes or reuses .venv, installs simkit and runs it: ./try.sh [SIMKIT ARGUMENTS], without any `predict --cluster 50x3080`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. .ci/env.sh
simkit_env ""
[ $# -gt 0 ] || set -- predict --cluster 50x3080
exec "$VENV/bin/simkit" "$@"
