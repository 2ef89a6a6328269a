#!/usr/bin/env bash
# Everything that is to be seen on a GPU, in one go: verdicts and captures of every routine, libraries validated by
# name, measurements, the tests that need a device.
#
#     bash tests/hardware/run.sh OUT [ARCH] ["verify measure validate tests"]
#
# Leaves in OUT: captures.tar.gz (folders for `fp8-oracle fixtures adopt`), runs.tar.gz (records, reports, logs),
# validations.tar.gz and measurements.{json,safetensors}. Every step has a time limit and goes on to the next; an
# interrupted `verify` keeps what it has. Needs nothing installed but the runtime dependencies: subjects are named, not looked up.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
arch=${2:-sm90}
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
work=$(mktemp -d)
mkdir -p "$work/captures" "$work/runs" "$work/validations"
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

validate() { # name, seconds, kernel, contract, more...
    local name=$1 limit=$2 kernel=$3 contract=$4
    shift 4
    step "validate-$name" "$limit" $oracle validate "$kernel" --contract "$contract" --device cuda --arch "$arch" \
        --json "$work/validations/${arch}_$name.json" "$@"
}

layer=kernels.subjects:subjects

compile_flashinfer() { # its first call compiles for a minute and a half; meanwhile others run
    timeout 240 "$python" -c '
import torch
from flashinfer.gemm import fp8_blockscale_gemm_sm90 as product
x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
product(x, x.repeat(8, 1).to(torch.float8_e4m3fn), None, torch.ones(1, 4, device="cuda"))
' >"$work/runs/compile-flashinfer.log" 2>&1
}

run_verify() {
    compile_flashinfer &
    keep deep_gemm 240 "$layer"
    for subject in cutlass torch triton triton_gemm triton_linear; do keep "$subject" 90 "$layer"; done
    wait
    keep flashinfer 170 "$layer"
    step gallery 400 $oracle gallery run --device cuda --jobs 8 --seconds 380 --out "$work/runs/gallery"
}

run_measure() {
    step measure 200 "$python" tests/hardware/measure.py --out "$out"
    step products 120 "$python" tests/hardware/products.py --out "$out/products"
}

run_validate() {
    compile_flashinfer &
    export DG_JIT_CACHE_DIR="$work/jit" # compiled anew: its time is part of the validation's
    validate deep_gemm 75 deep_gemm:fp8_gemm_nt fp8_gemm_nt --require threads
    validate deep_gemm_masked 75 deep_gemm:fp8_m_grouped_gemm_nt_masked fp8_m_grouped_gemm_nt_masked --require threads
    validate cutlass 75 torch:ops._C.cutlass_scaled_mm cutlass_scaled_mm \
        --require threads
    validate torch 75 torch:_scaled_mm torch_per_token_w8a8_scaled_mm \
        --require threads
    validate quantiser 75 kernels.subjects:BY_CONTRACT.per_token_group_quant_fp8 per_token_group_quant_fp8 \
        --require threads
    wait
    validate flashinfer 120 flashinfer.gemm:fp8_blockscale_gemm_sm90 fp8_blockscale_gemm_sm90
    local inside=fp8_blockscale_gemm_sm90/bf16xe4m3-bf16/1x128:128x128/m=31,n=256,k=256/family=randn/seed=2
    validate flashinfer_threads 60 flashinfer.gemm:fp8_blockscale_gemm_sm90 fp8_blockscale_gemm_sm90 --require threads --case $inside # fails: see docs/findings.md
    validate layer_threads 60 kernels.subjects:BY_CONTRACT.fp8_blockscale_gemm_sm90 fp8_blockscale_gemm_sm90 \
        --require threads --case $inside
    validate large_quantiser 150 kernels.subjects:BY_CONTRACT.per_token_group_quant_fp8 per_token_group_quant_fp8 \
        --require "large offsets" --case per_token_group_quant_fp8/bf16-e4m3/1x128/m=31,k=256/family=randn/seed=1
    validate large_torch 150 torch:_scaled_mm torch_per_tensor_w8a8_scaled_mm --require "large offsets" \
        --case torch_per_tensor_w8a8_scaled_mm/e4m3xe4m3-bf16/tensor:tensor/m=33,n=256,k=384/family=randn/seed=1
    validate large_deep_gemm 150 deep_gemm:fp8_gemm_nt fp8_gemm_nt \
        --require "large offsets" --case fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=33,n=256,k=384/family=randn/seed=1
}

run_tests() {
    step pytest 300 "$python" -m pytest -q -p no:cacheprovider tests/bounds/test_engines.py \
        tests/harness/test_launches_device.py \
        tests/benchmarks/test_bench_cuda.py tests/numbers/test_rounding.py tests/kernels/test_triton.py \
        tests/kernels/test_nn_device.py -k "device or cuda or gpu or CUDA"
    step no-sync 200 "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_no_sync.py tests/kernels/test_ops.py
}

for part in ${3:-verify measure validate tests}; do
    "run_$part"
    tar -C "$work" -czf "$out/captures.tar.gz" captures
    tar -C "$work" -czf "$out/runs.tar.gz" runs
    tar -C "$work" -czf "$out/validations.tar.gz" validations
done
echo "$SECONDS s in all"
ls -l "$out"
