#!/usr/bin/env bash
# Everything that is to be seen on a GPU, in one go: verdicts and captures of every routine, libraries validated by
# name, measurements, the tests that need a device.
#
#     bash tests/hardware/run.sh OUT [ARCH] ["verify measure validate tests"]
#
# Leaves in OUT: captures.tar.gz (folders for `fp8-oracle fixtures adopt`), runs.tar.gz (records, reports, logs) and
# measurements.{json,safetensors}. Every step has a time limit and goes on to the next; an interrupted `verify` keeps
# what it has. Needs nothing installed but the runtime dependencies: subjects are named, not looked up.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
arch=${2:-sm90}
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
work=$(mktemp -d)
mkdir -p "$work/captures" "$work/runs"
python=${PYTHON:-python3}
oracle="$python -m oracle"

step() { # name, seconds, command...
    local name=$1 limit=$2 begun=$SECONDS
    shift 2
    timeout -s INT -k 20 "$limit" "$@" >"$work/runs/$name.log" 2>&1
    echo "== $name: exit $?, $((SECONDS - begun)) s"
    tail -n 3 "$work/runs/$name.log" | cut -c1-240
}

keep() { # subject, seconds, provider
    step "verify-$1" "$2" $oracle verify --arch "$arch" --profile compact --fixtures none --provider "$3" \
        --subject "$1" --keep "$work/captures/${arch}_${1//./_}" --record "$work/runs/$1.jsonl" --html "$work/runs/$1.html"
}

validate() { # name, kernel, contract, more...
    local name=$1 kernel=$2 contract=$3
    shift 3
    step "validate-$name" 75 $oracle validate "$kernel" --contract "$contract" --device cuda --arch "$arch" \
        --json "$work/runs/validate-$name.json" "$@"
}

pack() {
    tar -C "$work" -czf "$out/captures.tar.gz" captures
    tar -C "$work" -czf "$out/runs.tar.gz" runs
}

layer=kernels.subjects:subjects
bare=hardware.libraries:subjects

run_verify() {
    for subject in deep_gemm cutlass torch triton; do keep "$subject" 60 "$layer"; done
    keep flashinfer 170 "$layer"
    local names
    names=$("$python" -c 'from hardware import libraries; print(*sorted({s.name for s in libraries.subjects()}))')
    for subject in $names; do keep "$subject" 40 "$bare"; done
}

run_measure() {
    step measure 200 "$python" tests/hardware/measure.py --out "$out"
}

run_validate() {
    validate deep_gemm deep_gemm:fp8_gemm_nt fp8_gemm_nt --adapter hardware.adapters:deep_gemm
    validate cutlass kernels.backends.cutlass:operators cutlass_scaled_mm --adapter hardware.adapters:vllm_cutlass
    validate torch torch:_scaled_mm torch_per_token_w8a8_scaled_mm --adapter hardware.adapters:torch_scaled_mm \
        --numerics "$arch.promote128.scale_after"
    validate flashinfer flashinfer.gemm:fp8_blockscale_gemm_sm90 fp8_blockscale_gemm_sm90 \
        --adapter hardware.adapters:flashinfer_gemm
}

run_tests() {
    step pytest 120 "$python" -m pytest -q -p no:cacheprovider tests/test_engines.py \
        tests/benchmarks/test_bench_cuda.py tests/test_rounding.py tests/kernels/test_triton.py \
        -k "device or cuda or gpu or CUDA"
}

for part in ${3:-verify measure validate tests}; do
    "run_$part"
    tar -C "$work" -czf "$out/captures.tar.gz" captures
    tar -C "$work" -czf "$out/runs.tar.gz" runs
done
echo "$SECONDS s in all"
ls -l "$out"
