# A vendor with a kernel in Python: is it right, why not, repaired, kept right.

cat > mine.py <<'EOF'
import torch


def gemm(a, a_scale, b, b_scale, out_dtype=torch.bfloat16):
    n, k = b.shape
    x = a.double() * a_scale.double()[:, :1]
    w = b.double() * b_scale.double().repeat_interleave(128, 1)[:, :k].repeat_interleave(128, 0)[:n]
    return (x @ w.T).to(out_dtype)
EOF

fp8-oracle validate mine:gemm --contract fp8_gem_nt  #= 2
#> did you mean 'fp8_gemm_nt'

fp8-oracle validate mine:gemm --contract fp8_gemm_nt --seed 0 -x --save wrong.safetensors --record wrong.jsonl  #= 1
#> FAILED fp8_gemm_nt/
#> explained by: 
#> repro: fp8-oracle validate mine:gemm --contract fp8_gemm_nt
#> smallest failing case: wrong.safetensors; `fp8-oracle explain wrong.safetensors`
#> DOES NOT CONFORM

fp8-oracle judge wrong.safetensors  #= 1
#> FAILED out: 
#> explained by: 

fp8-oracle explain wrong.safetensors  #= 1
#> elements fail: 

fp8-oracle report wrong.safetensors  #= 2
#> is a saved call; `fp8-oracle judge` and `fp8-oracle explain` read it

cat > mine.py <<'EOF'
import torch


def gemm(a, a_scale, b, b_scale, out_dtype=torch.bfloat16):
    n, k = b.shape
    x = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :k]
    w = b.double() * b_scale.double().repeat_interleave(128, 1)[:, :k].repeat_interleave(128, 0)[:n]
    return (x @ w.T).to(out_dtype)
EOF

fp8-oracle validate mine:gemm --contract fp8_gemm_nt --seed 0 --record right.jsonl --html right.html --junit right.xml
#> cases judged on cpu, 1 worker

fp8-oracle compare wrong.jsonl right.jsonl --quiet
#> OK  1 healed

cat > test_mine.py <<'EOF'
import pytest
from mine import gemm


@pytest.mark.oracle_cases("fp8_gemm_nt", profile="compact")
def test_gemm(oracle_case, assert_conforms):
    assert_conforms(gemm(**oracle_case.inputs(), **oracle_case.call_options()), oracle_case, arch="cpu")
EOF

python -m pytest -q -k "family:randn" --oracle-report=tests.jsonl test_mine.py
#> passed; tests.jsonl
