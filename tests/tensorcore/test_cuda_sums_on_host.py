"""The fused sums in CUDA C++, run on the CPU thread by thread: the definition's bits, stored.

What a GPU alone can show, its instructions and its speed, is in ``tests/bounds/test_engines.py`` and the benchmarks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oracle.tensorcore import attention, cuda_sums, engine_cuda
from oracle.tensorcore.attention import pipeline, walks
from oracle.tensorcore.cuda_source import Source
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule, get
from oracle.truth.gemm import ScaledProduct
from tests.support.attention_evidence import problem
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


def decaying(product: ScaledProduct, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """The kernel's sums of chains, each added to what was before times its factor, and the definition's."""
    total, one = torch.zeros((product.M, product.N)), torch.ones_like(product.b_scale[:, :1])
    for number in range(product.B):
        ks = slice(64 * number, 64 * number + 64)
        a, b = product.a[:, ks], product.b[:, ks]
        part = replace(product, a=a, b=b, a_scale=one, b_scale=one, block=a.shape[1])
        chain = predict_product(part, schedule, out_dtype=torch.float32, engine="torch")
        total = total * product.a_scale[:, number, None] + chain
    sums = engine_cuda.decaying(product, schedule)
    assert sums is not None
    return sums, total


@pytest.fixture
def blocks_of_64() -> tuple[ScaledProduct, Schedule]:
    """A third of the factors is 0."""
    schedule = replace(get("sm90.promote128"), name="of 64", interval=64)
    product, g = product_of(schedule, 70, 9, 300, seed=8, data="finite"), torch.Generator().manual_seed(1)
    factors = torch.rand(70, 5, generator=g) * torch.randint(0, 3, (70, 5), generator=g).sign()
    return replace(product, a_scale=factors, b_scale=torch.ones(1, 5), block=64, b_rows=9), schedule


class TestTotalTimesAFactor:
    def test_equal(self, blocks_of_64: tuple[ScaledProduct, Schedule]) -> None:
        product, schedule = blocks_of_64
        assert torch.equal(*decaying(product, schedule))
        codes = product.a.clone()
        codes.view(torch.uint8)[3, 7] = 0x7F
        assert engine_cuda.decaying(replace(product, a=codes), schedule) is None

    def test_a_factor_of_the_chain_is_noticed(
        self, blocks_of_64: tuple[ScaledProduct, Schedule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, new = "__fadd_rn(__fmul_rn(total, sa), part)", "__fadd_rn(total, __fmul_rn(part, sa))"
        monkeypatch.setattr(Source, "launch", launcher(tmp_path, (old, new)))
        assert differing(*decaying(*blocks_of_64)) > 0

    @pytest.mark.parametrize("name", ["sm90.fa3.tile", "sm90.attention.forward.64.lift8.tile"])
    def test_of_a_walk(self, name: str) -> None:
        """The sums of P V of several tiles, of which one is short."""
        walk = next(walks(problem(3, 20, 330, 32), pipeline(name)))
        width = max(step.codes.shape[1] for step in walk.steps)
        sums = attention._rescaled(walk.steps, walk.problem.v, width)
        assert sums is not None and torch.equal(sums.double(), walk.sums)


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
