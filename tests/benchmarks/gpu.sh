#!/usr/bin/env bash
# Checks, profiles and measures training on a machine with CUDA, in nine minutes; what does not fit is left out and said.
#   tests/benchmarks/gpu.sh OUT_DIRECTORY [arguments of tests.benchmarks.training]
# Weights are made on the GPU and workers run without Ray, to save minutes. As jobs run, with loading from disk (20b: 13 GB):
#   python3 -m tests.benchmarks.training --out OUT/training.json
# 120b on one GPU:
#   tests/benchmarks/gpu.sh OUT_DIRECTORY --shape 120b --recipes "ours, full" "ours, selective" "ours, none" --rows 8
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1; shift; mkdir -p "$out"
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 DO_NOT_TRACK=1 TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/polythink-inductor}"
workers=$("$python" -c 'import xdist' 2>/dev/null && echo "-n 7")  # mostly compiling: 120 s instead of more than 200
timeout --kill-after=5 200 "$python" -m pytest -m gpu tests/gpu $workers -q -W default --disable-warnings --durations=10 2>&1 | tee "$out/tests.txt"
timeout --kill-after=5 330 "$python" -m tests.benchmarks.training --direct --no-disk --profile --limit-s 280 --out "$out/training.json" \
  --recipes "notebooks" "ours, none" "ours, full" "ours, selective" "ours, none, packed rows" "stock best" "ours, full, experts too" \
  "$@" 2>&1 | tee "$out/training.txt"
