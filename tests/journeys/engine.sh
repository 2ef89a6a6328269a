# An engine developer whose backend is upgraded: what broke, where, and whose fault it is.

cat > backend.py <<'EOF'
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Backend:
    name: str = "ours"
    contract: str = "fp8_gemm_nt"
    arch: str = "cpu"
    numerics: str = None
    device: str = "cpu"
    upgraded: bool = False

    def why_not(self):
        return None

    def run(self, inputs, options):
        if inputs["a"].dtype != torch.float8_e4m3fn or inputs["b"].dtype != torch.float8_e4m3fn:
            raise NotImplementedError("E4M3 alone")
        a, b, (n, k) = inputs["a"].double(), inputs["b"].double(), inputs["b"].shape
        rows = inputs["a_scale"].double()
        if self.upgraded and len(rows) > 5:
            rows = rows.roll(1, 0)
        columns = inputs["b_scale"].double().repeat_interleave(128, 0)[:n]
        x, w = (s.repeat_interleave(128, 1)[:, :k] for s in (rows, columns))
        return ((a * x) @ (b * w).T).to(options["out_dtype"])


def old():
    return [Backend()]


def new():
    return [Backend(upgraded=True)]
EOF

fp8-oracle verify --provider backend:old --contract fp8_gemm_nt --subject ours --profile compact --shard 1/8 --fixtures none --record before.jsonl
#> OK  

fp8-oracle verify --provider backend:new --contract fp8_gemm_nt --subject ours --profile compact --shard 1/8 --fixtures none --record after.jsonl --markdown after.md --quiet  #= 1
#> A scale of the previous row
#> repro: fp8-oracle verify --case 
#> --provider backend:new

fp8-oracle compare before.jsonl after.jsonl  #= 1
#> broke (
#> explained by: A scale of the previous row

fp8-oracle report after.jsonl --failures --quiet --html after.html  #= 1
#> NOT OK

cat > test_backend.py <<'EOF'
import pytest
from backend import Backend

from oracle import cases


@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("backend", [Backend(), Backend("next", upgraded=True)], ids=lambda b: b.name)
def test_backend(backend, m, assert_conforms):
    case = cases.parse(f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m={m},n=64,k=256/seed=1")
    assert_conforms(backend.run(case.inputs(), case.call_options()), case, arch="cpu")
EOF

python -m pytest -q --oracle-report=tests.jsonl --oracle-explain=off test_backend.py  #= 1
#> 4 verdicts: 1 failed, 3 passed; tests.jsonl

fp8-oracle compare tests.jsonl tests.jsonl --pair 'test_backend.py::test_backend[ours-7]=test_backend.py::test_backend[next-7]'  #= 1
#> broke (1)
