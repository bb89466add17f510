#!/usr/bin/env bash
# Checks and measures training on a machine with CUDA, in nine minutes; what does not fit is left out and said.
#   tests/benchmarks/gpu.sh OUT_DIRECTORY [arguments of tests.benchmarks.training]
# 120b on one GPU: tests/benchmarks/gpu.sh OUT_DIRECTORY --shape 120b --rows 8 --recipes "ours, full" "ours, none"
# Weights are made on the GPU and workers run without Ray, to save minutes. As jobs run, with loading from disk (20b: 13 GB; more
# than two minutes in all): python3 -m tests.benchmarks.training --recipes "ours, full" --out OUT/training.json
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1; shift; mkdir -p "$out"
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 DO_NOT_TRACK=1 TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/polythink-inductor}"
recipes=("notebooks" "ours, none" "ours, full" "ours, selective" "ours, none, packed rows" "ours, none, bf16 experts" "ours, full, experts too" "stock best")
bench=("$python" -m tests.benchmarks.training --direct --no-disk)

# Compiling takes most of both, and only CPUs: two layers of each recipe fill the compile cache while the tests run.
warm=("${recipes[@]:1:4}")
[[ " $* " == *" --recipes "* ]] && warm=("${recipes[1]}")  # they follow in "$@", and replace it
for recipe in "${warm[@]}"; do
  timeout 150 "${bench[@]}" --layers 2 --steps 2 --warm-up 1 --recipes "$recipe" "$@" > /dev/null 2>&1 &
done
workers=$("$python" -c 'import xdist' 2> /dev/null && echo "-n 7")
# test_distributed.py starts a Ray cluster, and takes two minutes more: run it by itself
timeout --kill-after=5 200 "$python" -m pytest -m gpu tests/gpu --ignore tests/gpu/test_distributed.py $workers -q -W default --disable-warnings --durations=10 2>&1 | tee "$out/tests.txt"
wait
timeout --kill-after=5 330 "${bench[@]}" --profile --limit-s 280 --out "$out/training.json" --recipes "${recipes[@]}" "$@" 2>&1 | tee "$out/training.txt"
