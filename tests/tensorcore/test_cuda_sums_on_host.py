"""The fused sums in CUDA C++, run on the CPU thread by thread: the definition's bits, stored.

What a GPU alone can show, its instructions and its speed, is in ``tests/bounds/test_engines.py`` and the benchmarks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oracle.tensorcore import cuda_sums, engine_cuda
from oracle.tensorcore.cuda_source import Source
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct
from tests.support.cuda_on_host import launcher
from tests.support.schedule_products import differing, product_of

pytestmark = [pytest.mark.needs_tools("g++"), pytest.mark.turns(4)]


@pytest.fixture(autouse=True)
def on_host(cuda_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sums, "why_not", lambda device: None)


def stored(product: ScaledProduct, name: str, out_dtype: torch.dtype = torch.float32) -> Tensor:
    return engine_cuda.predict(product, get(name), out_dtype=out_dtype)


def check(product: ScaledProduct, name: str, out_dtype: torch.dtype = torch.float32) -> None:
    due = predict_product(product, name, out_dtype=out_dtype, engine="torch")
    assert differing(stored(product, name, out_dtype), due) == 0


def with_ties(name: str) -> ScaledProduct:
    """Scales are powers of two: many sums of 13 bits lie between two bfloat16."""
    product = product_of(get(name), 9, 40, 254, seed=7, data="finite")
    a_scale, b_scale = (x.log2().round().exp2() for x in (product.a_scale, product.b_scale))
    return replace(product, a_scale=a_scale, b_scale=b_scale)


def test_ties() -> None:
    check(with_ties("sm90.chain"), "sm90.chain", torch.bfloat16)


CASES = [
    ("sm90.chain", torch.float32),
    ("sm90.chain.product", torch.float16),
    ("sm90.chain.flushed", torch.float32),
    ("sm90.promote128", torch.bfloat16),
    ("sm90.promote128.row_then_col.fma", torch.float32),
    ("sm90.promote128.scale_after.row_then_col", torch.float16),
    ("sm89.chain", torch.bfloat16),
    ("sm100.promote128", torch.float32),
    ("sm90.mma_sync.promote128", torch.float32),
]


@pytest.mark.parametrize(("name", "out_dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_equal(name: str, out_dtype: torch.dtype) -> None:
    """Ragged tiles; NaN and infinities, subnormals and zeros; biased or not."""
    check(product_of(get(name), 3, 70, 300, seed=3, data="special", bias=True), name, out_dtype)
    check(product_of(get(name), 130, 5, 70, seed=4, data="finite"), name, out_dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_factor_of_the_sum(bias: bool) -> None:
    product = product_of(get("sm90.chain"), 3, 9, 64, seed=5, bias=bias)
    check(replace(product, alpha=torch.tensor([0.3, 1.7])), "sm90.chain")


def test_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows and of columns, of an operand whose rows are not contiguous."""
    monkeypatch.setattr(cuda_sums, "OPERAND", 1 << 16)
    product = product_of(get("sm90.promote128"), 130, 70, 256, seed=6, bias=True)
    rows = torch.zeros((130, 263), dtype=torch.uint8).view(product.a.dtype)[:, 3:259]
    rows.view(torch.uint8).copy_(product.a.view(torch.uint8))
    check(replace(product, a=rows), "sm90.promote128", torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("sm90.chain", "(u32)(278 + LEAST_BIT)", "(u32)(277 + LEAST_BIT)"),
        ("sm90.chain", "c < 0.f ? up : down", "down"),
        ("sm90.chain", "f.epilogue == 1 ? __fmul_rn(sb, x)", "f.epilogue == 1 ? __fmul_rn(sa, x)"),
        ("sm90.chain", "+ 0x7fffu) >> 16", "+ 0x8000u) >> 16"),
        ("sm100.chain", "((52u - OUT) << 20)", "((51u - OUT) << 20)"),
        ("sm90.mma_sync.chain", "__fadd_rn(folded", "__fadd_rz(folded"),
    ],
)
def test_notices(name: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "launch", launcher(tmp_path, (old, new)))
    out_dtype = torch.bfloat16 if name == "sm90.chain" else torch.float32
    due = predict_product(with_ties(name), name, out_dtype=out_dtype, engine="torch")
    assert differing(stored(with_ties(name), name, out_dtype), due) > 0
