"""Some elements by many schedules at once equal the whole prediction; the engine's rescaled chains equal the
definition; ``identify`` by elimination names what made an output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mmaemu
import pytest
import torch
from hardware.split_k import operands
from support.products import block_scaled, operand

from oracle.errors import NumericsError
from oracle.numbers.formats import same_bits
from oracle.tensorcore import cpu_elements
from oracle.tensorcore.elements import Elements
from oracle.tensorcore.identify import Search, find_split, identify_product, told_apart
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Promotion, Split, get, schedules
from oracle.truth.gemm import ScaledProduct

COUNT = 24
SPLITS = (Split(2), Split(3, 64), Split(2, 128, True), Split(4, 32))


def rows_scaled(k: int = 608, **other: Any) -> ScaledProduct:
    """One scale for each row of both; K is no multiple of an instruction's."""
    g = torch.Generator().manual_seed(1)
    a, b = operand("codes", 6, k, seed=1), operand("codes", 20, k, seed=2)
    return ScaledProduct(a, b, *(torch.rand(rows, 1, generator=g) + 0.5 for rows in (6, 20)), k, 1, **other)


def some(product: ScaledProduct) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    rows, columns = (torch.randint(0, extent, (COUNT,), generator=g) for extent in (product.M, product.N))
    return rows, columns


PRODUCTS = {
    "blocks": lambda: block_scaled("codes", 5, 130, 384, seed=1),
    "powers of two": lambda: block_scaled("one large among tiny", 5, 130, 384, seed=1, powers=True),
    "rows": rows_scaled,
    "bias and alpha": lambda: rows_scaled(bias=torch.linspace(-9, 9, 20), alpha=torch.tensor([1.3])),
    "c": lambda: rows_scaled(c=torch.linspace(-99, 99, 120).reshape(6, 20)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_elements_have_the_bits_of_the_whole(name: str) -> None:
    """Every arithmetic that fits, in float32 and bfloat16; splits of every base that can be split."""
    product = PRODUCTS[name]()
    rows, columns = some(product)
    elements, seen = Elements.where(product, rows, columns), set()
    for schedule in schedules():
        dtype = torch.float32 if schedule.name.startswith("sm90") else torch.bfloat16
        i = schedule.instruction
        key = (i.group, i.align_bits, i.order, i.sum, i.k, schedule.interval, schedule.promotion, schedule.epilogue)
        if key in seen or schedule.why_not(product, out_dtype=dtype):
            continue
        seen.add(key)
        whole = predict_product(product, schedule, out_dtype=dtype)[rows, columns]
        assert bool(same_bits(elements.bits(schedule, dtype), whole).all()), schedule.name
        if schedule.scales_inside or schedule.promotion is Promotion.RESCALE:
            continue
        fitting = [s for s in SPLITS if schedule.into(s).why_not(product, out_dtype=dtype) is None]
        for split, bits in zip(fitting, elements.of_splits(schedule, fitting, dtype) if fitting else (), strict=True):
            whole = predict_product(product, schedule.into(split), out_dtype=dtype)[rows, columns]
            assert bool(same_bits(bits, whole).all()), (schedule.name, split)
    assert len(seen) > 10


def test_the_kernel_has_the_bits_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinite codes too; a kernel that adds one product less is caught."""
    a, b = (torch.arange(256, dtype=torch.uint8).roll(s).repeat(4, 1).view(torch.float8_e5m2) for s in (0, 77))
    one = torch.ones((1, 1))
    product = ScaledProduct(a, b, one, one, 256, 4)
    at = torch.arange(4)
    names = ("sm90.chain", "sm90.mma_sync.chain", "sm80.f16.chain", "sm100.chain")
    compiled = {n: Elements.where(product, at, at).bits(get(n), torch.float32) for n in names[:2] + names[3:]}
    monkeypatch.setattr("oracle.tensorcore.elements.supported", lambda product, schedule: False)
    for name, bits in compiled.items():
        assert bool(same_bits(bits, Elements.where(product, at, at).bits(get(name), torch.float32)).all())
    monkeypatch.undo()
    ones = torch.ones(4, 256).to(torch.float8_e4m3fn)
    finite = replace(product, a=ones, b=ones)
    right = Elements.where(finite, at, at).bits(get("sm90.chain"), torch.float32)
    run = cpu_elements.chains
    monkeypatch.setattr(cpu_elements, "chains", lambda av, *rest: run(av * (av.cumsum(0) > 1), *rest))
    assert not torch.equal(Elements.where(finite, at, at).bits(get("sm90.chain"), torch.float32), right)


@pytest.mark.parametrize("scale", [1.0, -1e-18])
def test_rescaled_chains_of_the_engine(scale: float) -> None:
    """A chain that continues from a rescaled sum, scales of NaN, 0, infinity and beyond the range among them."""
    p = block_scaled("codes", 9, 150, 384, seed=1)
    p.a_scale.mul_(scale)
    p.a_scale[3, 1], p.a_scale[4, 1], p.a_scale[5, 2], p.a_scale[6] = torch.nan, 0, torch.inf, 1e38
    for name in ("sm90.rescaled128", "sm90.mma_sync.rescaled128", "sm90.mma_f16.rescaled128"):
        bits = {e: predict_product(p, name, out_dtype=torch.float32, engine=e) for e in ("cpu", "torch")}  # type: ignore[arg-type]
        assert bool(same_bits(bits["cpu"], bits["torch"]).all())
    promoted = predict_product(p, "sm90.promote128", out_dtype=torch.float32)
    assert not bool(same_bits(promoted, predict_product(p, "sm90.rescaled128", out_dtype=torch.float32)).all())


HALVES = ("sm90.chain", "sm89.promote128.scale_after", "sm90.mma_sync.chain", "sm89.chain")


@pytest.mark.parametrize("fmt", ["float8_e4m3fn", "float8_e5m2"])
def test_float16_accumulators_of_the_engine(fmt: str) -> None:
    """Rounded to nearest even at every group; overflows, of which the first stays, and subnormal sums."""
    a, b = (operand("codes", rows, 160, seed=rows, fmt=fmt) for rows in (6, 20))
    product = ScaledProduct(a, b, torch.full((6, 1), 0.7), torch.full((20, 1), 1.3), 160, 1)
    at = torch.arange(20)
    for name in HALVES:
        schedule = replace(get(name), name=f"{name} by halves", accumulator=torch.float16)
        due = predict_product(product, schedule, out_dtype=torch.float32, engine="torch")
        assert bool(torch.isinf(due).any()) and bool(torch.isfinite(due).any() or fmt == "float8_e5m2")
        assert bool(same_bits(predict_product(product, schedule, out_dtype=torch.float32, engine="cpu"), due).all())
        few = Elements.where(product, at % 6, at).bits(schedule, torch.float32)
        assert bool(same_bits(few, due[at % 6, at]).all())
        assert not bool(same_bits(predict_product(product, name, out_dtype=torch.float32), due).all())
    infinite = replace(product, a=torch.full((6, 160), torch.inf).to(torch.float8_e5m2))
    with pytest.raises(NumericsError, match="does not support"):
        predict_product(infinite, schedule, out_dtype=torch.float32, engine="cpu")


class TestIdentify:
    """Elements reject most schedules, and never the one that made the output."""

    @pytest.mark.parametrize(
        "name", ["sm90.rescaled128", "sm90.mma_f16.promote128.row_then_col.fma", "sm89.promote128"]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_made_it_comes_first(self, name: str, dtype: torch.dtype) -> None:
        product = block_scaled("codes", 40, 130, 512, seed=3)
        found = identify_product(product, predict_product(product, name, out_dtype=dtype))
        best = [m.schedule for m in found if m.equal == 1.0]
        assert name in best and found[0].equal == 1.0 and found[0].compared == 40 * 130
        assert found[-1].compared < 40 * 130

    def test_a_corrupted_output_keeps_its_schedule(self) -> None:
        """A wrong row is no reason to name another arithmetic; garbage is nobody's."""
        product = block_scaled("codes", 40, 130, 512, seed=3)
        out = predict_product(product, "sm90.promote128", out_dtype=torch.bfloat16)
        out[7] = out[8]
        best = identify_product(product, out)[0]
        assert best.schedule.startswith("sm90.promote128") and 0.9 < best.equal < 1.0
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        assert identify_product(product, noise)[0].equal < 0.1

    @pytest.mark.parametrize("fast", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_another_emulator_is_identified(self, fast: bool, dtype: torch.dtype) -> None:
        """``mmaemu`` in three parts; every bit of the whole is that of what is named."""
        p = operands(16, 32, 896, "all codes", "cpu")
        scales = (x.reshape(()) for x in (p.a_scale, p.b_scale))
        made = mmaemu.scaled_mm(
            p.a,
            p.b.t(),
            *scales,
            out_dtype=dtype,
            use_fast_accum=fast,
            profile="hopper",
            splitk=(3, "contiguous"),
            backend="reference",
        )
        first = [s.name for s in schedules("sm90")]
        best = identify_product(p, made, first=first)[0]
        assert best.equal == 1.0
        assert torch.equal(predict_product(p, best.schedule, out_dtype=dtype), made)
        assert best.schedule.endswith(".split3") or not fast

    def test_a_refused_cut_asks_its_elements_of_the_next(self) -> None:
        """One element that no cut gives refuses all of them."""
        p = operands(16, 64, 1024, "all codes", "cpu")
        out = predict_product(p, "sm90.chain.product.split4", out_dtype=torch.float32)
        assert find_split(p, out, get("sm90.chain.product")) == get("sm90.chain.product.split4")
        out[11, 13] += 1
        search = Search(p, out)
        assert search.split(get("sm90.chain.product")) is None


def test_ties_say_what_would_tell_them_apart() -> None:
    assert "powers of two" in told_apart(["sm90.chain", "sm90.chain.product"])
    assert "one arithmetic" in told_apart(["sm80.f16.promote128", "sm86.f16.promote128"])
    assert "far exponents" in told_apart(["sm90.chain", "sm89.chain"])
    assert "longer K" in told_apart(["sm90.chain.split2", "sm90.chain.split3"])
