#!/usr/bin/env bash
# What only a GPU can tell, in under five minutes: ./benchmarks/gpu_check.sh [--dry-run] [--out DIR]
# Correctness of the operators, SALR against dense (cuBLAS) and 2:4, LoRA-FA against LoRA (time, memory), the compressors,
# and calibration rows (products, attention, streams). Leaves one table, DIR/gpu_check_<device>.csv; committed under
# validation/measured/ it is scored like any other. --dry-run takes every step on the CPU with small shapes: it shows
# that the script works and says nothing about any GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
limit=300
[[ " $* " == *" --dry-run "* ]] && limit=900
exec timeout "$limit" "$PYTHON" benchmarks/gpu_check.py "$@"
