"""Kernels that cut K into partial sums are right; those that lose, repeat or round a partial sum are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hardware.split_k import operands
from torch import Tensor

import oracle
from oracle.bounds import Interval, any_order_bound, of_schedule, residue_bound, split_bound
from oracle.bounds.engines import exact
from oracle.routines import get as get_contract
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule, get, schedules
from oracle.truth.gemm import ScaledProduct
from oracle.verdict import products
from oracle.verdict.compare import Comparison, Status, Verdict
from oracle.verdict.products import Part, ProductSets, wider_classes
from tests.support.products import block_scaled

pytestmark = pytest.mark.turns(4)

K = 512
BASES = [f"{arch}.{kind}" for arch in ("sm89", "sm90", "gfx942") for kind in ("chain", "promote128.scale_after")]


def product(arch: str, m: int = 64, n: int = 512, k: int = K) -> ScaledProduct:
    generator = torch.Generator().manual_seed(11)
    fmt = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    a, b = (torch.randn(rows, k, generator=generator).to(fmt) for rows in (m, n))
    scales = [torch.rand(rows, 1, generator=generator) + 0.5 for rows in (m, n)]
    return ScaledProduct(a, b, *scales, k, 1)


def judged(p: ScaledProduct, base: str, out: Tensor) -> Verdict:
    """By every schedule of the arch that fits, ``base`` first, none declared."""
    arch = base.partition(".")[0]
    same = [s.name for s in schedules(arch) if s.instruction == get(base).instruction and s.fault is None]
    names = [base, *(name for name in same if name != base and not get(name).why_not(p, out_dtype=out.dtype))]
    return ProductSets([Part(p)], names, wider_classes(names)).judge({"out": out})


def by_tile(p: ScaledProduct, base: str, cuts: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Stream-K: every 64 columns are cut at another k."""
    columns = [p.columns(j, j + 64) for j in range(0, p.N, 64)]
    named = [f"{base}.cut{cuts[i % len(cuts)]}" for i in range(len(columns))]
    return torch.cat([predict_product(x, n, out_dtype=dtype) for x, n in zip(columns, named, strict=True)], dim=1)


def permuted(p: ScaledProduct, base: str) -> Tensor:
    """Products in random order."""
    order = torch.randperm(p.K, generator=torch.Generator().manual_seed(3))
    a, b = (x.view(torch.uint8)[:, order].view(x.dtype) for x in (p.a, p.b))
    return predict_product(ScaledProduct(a, b, p.a_scale, p.b_scale, p.K, 1), base, out_dtype=torch.float32)


def test_two_partial_chains_leave_the_interval_of_one_and_conform() -> None:
    """64x512x512: 0.3% of the elements lie outside the interval of the unsplit chain, all nearer to the exact value."""
    p = product("sm90")
    out = predict_product(p, "sm90.chain.split2", out_dtype=torch.float32)
    declared = ProductSets([Part(p)], ["sm90.chain"]).judge({"out": out})
    assert declared.status is Status.FAILED
    assert 0 < declared.outside < out.numel() / 100
    found = judged(p, "sm90.chain", out)
    assert found.status is Status.PASSED
    assert found.matches == "sm90.chain.split2"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("base", BASES)
def test_every_partition_conforms(base: str) -> None:
    """Contiguous and interleaved parts, another cut for every tile: inside the bound over splits, and passed."""
    p = product(base.partition(".")[0], m=2, n=128)
    bound = split_bound(p, of_schedule(get(base)))
    plain = exact(p).hi
    names = (".split2", ".interleaved3x64" if base.endswith("chain") else ".interleaved3", ".cut128+256")
    outs = [predict_product(p, base + name, out_dtype=torch.float32) for name in names]
    for out in (*outs, by_tile(p, base, [128, 384])):
        error = out.double() - plain
        assert bool(((bound.lo <= error) & (error <= bound.hi)).all())
        assert judged(p, base, out).status is Status.PASSED


@pytest.mark.parametrize("base", ["sm90.chain", "sm100.chain"])
def test_products_in_any_order_conform(base: str) -> None:
    p = product(base.partition(".")[0], m=16, n=256)
    assert judged(p, base, permuted(p, base)).status is Status.PASSED


def test_the_bound_over_splits_is_sharper_than_that_of_any_order() -> None:
    p = product("sm90", m=8, n=64, k=2048)
    acc = of_schedule(get("sm90.chain"))
    bounds = (bound(p, acc) for bound in (residue_bound, split_bound, any_order_bound))
    one, splits, orders = (float((b.hi - b.lo).mean()) for b in bounds)
    assert one < splits < 8 * one
    assert 4 * splits < orders


def lost(p: ScaledProduct, out: Tensor) -> Tensor:
    part = predict_product(p.over([(0, 384)]), "sm90.chain", out_dtype=torch.float32)
    out[:, 64:128] = part[:, 64:128]
    return out


def twice(p: ScaledProduct, out: Tensor) -> Tensor:
    part = predict_product(p.over([(384, 512)]), "sm90.chain", out_dtype=torch.float32)
    out[8:16] += part[8:16]
    return out


def rounded(p: ScaledProduct, out: Tensor) -> Tensor:
    halves = [p.over([k]) for k in ((0, 256), (256, 512))]
    first, second = (predict_product(half, "sm90.chain", out_dtype=torch.bfloat16) for half in halves)
    return first.float() + second.float()


def one_element(p: ScaledProduct, out: Tensor) -> Tensor:
    out[3, 7] += 0.6
    return out


@pytest.mark.parametrize("wrong", [lost, twice, rounded, one_element])
def test_a_wrong_split_fails(wrong: Callable[[ScaledProduct, Tensor], Tensor]) -> None:
    p = product("sm90", m=32, n=256)
    out = predict_product(p, "sm90.chain.split2", out_dtype=torch.float32)
    found = judged(p, "sm90.chain", wrong(p, out))
    assert found.status is Status.FAILED
    assert ("declare" in found.summary) == (wrong in (rounded, one_element))  # the wide bound of any order holds these


def test_a_declared_split_is_judged_as_declared() -> None:
    p = product("sm90", m=16, n=128)
    out = predict_product(p, "sm90.chain.split2", out_dtype=torch.float32)
    sets = ProductSets([Part(p)], ["sm90.chain.split2"])
    assert sets.judge({"out": out}).matches == "sm90.chain.split2"
    out[0, 0] += 1e-4
    assert sets.judge({"out": out}).status is Status.PASSED  # within the bound of the split
    assert ProductSets([Part(p)], ["sm90.chain.split"]).judge({"out": out}).status is Status.PASSED
    out[0, 0] += 1
    assert sets.judge({"out": out}).status is Status.FAILED


def test_a_split_is_looked_for_only_where_its_class_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated stores of long sums: float32 in any order may end there, and no partition of the accumulator."""
    p, base = block_scaled("randn", 4, 64, 6144, seed=1), "sm90.promote128"
    sums = predict_product(p, base, out_dtype=torch.float32)
    out = (sums.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)

    def sought(*_: object) -> None:
        raise AssertionError("a split is looked for")

    monkeypatch.setattr(products.Search, "split", sought)
    found = judged(p, base, out)
    assert found.status is Status.PASSED and found.basis.startswith("any-order float32 bound")
    monkeypatch.setattr(products, "held_by", lambda known, output, outside, name: (compared(known, output), name))
    with pytest.raises(AssertionError, match="a split is looked for"):
        judged(p, base, out)


def compared(known: Sequence[products.ExactPart], output: Tensor) -> Comparison:
    """With intervals that hold everything."""
    ends = [torch.full_like(k.value.hi, torch.inf) for k in known]
    return products.compared(known, [Interval(-end, end, "") for end in ends], output)


def test_a_faulty_schedule_names_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Schedule]()
    monkeypatch.setattr(products.Search, "split", lambda self, schedule: tried.append(schedule))
    p = block_scaled("randn", 2, 4, 512, seed=1)
    out = predict_product(p, "sm90.promote128.split2", out_dtype=torch.float32)
    assert products._split_of([Part(p)], out, "sm90.promote128.split") is None
    assert tried and all(schedule.fault is None for schedule in tried)
    assert any(s.fault for s in schedules("sm90") if (s.instruction, s.interval) == (tried[0].instruction, 128))


def test_a_contract_whose_kernels_cut_k_proves_the_bits() -> None:
    """Every bit of a chain in three parts; another bit in one element proves no partition."""
    name, chain = "torch_per_tensor_w8a8_scaled_mm", "sm90.chain.product.split3"
    p = operands(16, 64, 896, "all codes", "cpu")
    inputs = {"qinput": p.a, "weight": p.b.t(), "scale_a": p.a_scale.reshape(()), "scale_b": p.b_scale.reshape(())}
    out = predict_product(p, chain, out_dtype=torch.float32)
    verdict = oracle.judge(name, inputs, out, arch="sm90")
    assert (verdict.status, verdict.matches, verdict.basis) == (Status.PASSED, chain, f"bits of {chain}")
    out.view(torch.int32)[3, 5] += 1
    assert oracle.judge(name, inputs, out, arch="sm90").matches is None
    assert not get_contract("cutlass_scaled_mm").cuts_k
