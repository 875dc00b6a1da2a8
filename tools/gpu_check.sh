#!/usr/bin/env bash
# Everything that only a GPU can show, in under 8 minutes on an H200: kernel values and row bits on the
# device, parity of graph and eager at depths 0..4 and through the whole program, graphs kept over a set of
# prompts, a run and the speed of a synthetic Flash at 1k and 32k context by verify width, the share of the
# memory bandwidth, and a kernel profile.
# Usage: tools/gpu_check.sh [OUTPUT-FOLDER]: a text file a step, speed.json, and summary.txt with how each ended.
set -u
cd "$(dirname "$0")/.."
out=${1:-docs/gpu-check}
python=${PYTHON:-python3}
mkdir -p "$out"
: >"$out/summary.txt"
unset TRITON_INTERPRET
failed=0

step() { # step NAME SECONDS COMMAND...: its output goes to the screen and to OUT/NAME.txt
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    local status=${PIPESTATUS[0]}
    local said=passed
    if [ "$status" -ne 0 ]; then
        said="FAILED ($status; 124 means it ran past $limit s)"
        failed=1
    fi
    echo "== $name $said in $((SECONDS - began)) s" | tee -a "$out/summary.txt"
}

step machine 15 "$python" tools/gpu_check.py machine
step kernels 120 "$python" -m pytest -q -p no:cacheprovider -n 0 -m "gpu and not slow" --durations=5 \
    tests/kernels/triton_values.py
step parity 90 "$python" tools/gpu_check.py parity
# the whole program: the captured graph and its eager twin beside plain greedy decoding, then what auto takes
step run-graph 20 "$python" -m ds4flow run runtime=cuda pipeline=graph-parity mtp.draft=2 -n 64
step run-eager 20 "$python" -m ds4flow run runtime=cuda pipeline=graph-parity mtp.draft=2 -n 64 \
    runtime.eager=true
step prompts 20 "$python" tools/gpu_check.py prompts
step run-flash 50 "$python" -m ds4flow run runtime=cuda model=synth-flash mtp.draft=2 -n 64 \
    commit.ignore_eos=true
step speed 105 "$python" -m ds4flow bench synth-flash --kernels gpu --contexts 1024,32768 --widths 1-5 \
    --tokens 20 --repeats 3 --json "$out/speed.json"
step profile 40 "$python" tools/gpu_check.py profile --layers 6
echo "== done; results in $out; failed: $failed" | tee -a "$out/summary.txt"
exit "$failed"
