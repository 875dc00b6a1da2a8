#!/usr/bin/env bash
# Everything that only a GPU can show, in under 8 minutes on an H200: kernel values and row bits on the
# device, parity of graph and eager at depths 0..4 and through the whole program, speed of a synthetic Flash
# at 1k and 32k context by verify width, the share of the memory bandwidth, and a kernel profile.
# Usage: tools/gpu_check.sh [OUTPUT-FOLDER]
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu-check}
python=${PYTHON:-python3}
mkdir -p "$out"
unset TRITON_INTERPRET
failed=0

step() { # step NAME SECONDS COMMAND...: its output goes to the screen and to OUT/NAME.txt
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    local status=${PIPESTATUS[0]}
    if [ "$status" -ne 0 ]; then
        echo "== $name FAILED ($status; 124 means it ran past $limit s)"
        failed=1
    fi
}

step machine 20 "$python" tools/gpu_check.py machine
step kernels 150 "$python" -m pytest -q -p no:cacheprovider -n 0 -m "gpu and not slow" --durations=5 \
    tests/kernels/triton_values.py
step parity 110 "$python" tools/gpu_check.py parity
# the whole program: the captured graph and its eager twin beside plain greedy decoding
step run-graph 25 "$python" -m ds4flow run runtime=cuda pipeline=graph-parity mtp.draft=2 -n 64
step run-eager 25 "$python" -m ds4flow run runtime=cuda pipeline=graph-parity mtp.draft=2 -n 64 \
    runtime.eager=true
step speed 110 "$python" -m ds4flow bench synth-flash --kernels gpu --contexts 1024,32768 --widths 1-5 \
    --tokens 20 --repeats 3 --json "$out/speed.json"
step profile 40 "$python" tools/gpu_check.py profile --layers 6
echo "== done; results in $out; failed: $failed"
exit "$failed"
