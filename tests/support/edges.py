"""Edges of bounds for small calls, in float64 before any rounding into an output's dtype.

    python tests/support/edges.py        writes tests/bounds/edges.json anew; read the difference before it is committed

An output's dtype is coarse, so rounding outward hides the loss of a small term. Here each function is called with
values whose products and sums float64 holds, and tests/bounds/test_edges.py compares its float64 results with the file.
The file says what was derived once; tests/bounds/test_widths.py evaluates the published formulas apart from the code.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from oracle.bounds import boxed, chain, ieee32, steps
from oracle.bounds import product as whole
from oracle.bounds.accumulator import Accumulator
from oracle.bounds.boxed import Box, boxed_product
from oracle.bounds.chain import Operand, operand
from oracle.bounds.code_boxes import code_boxes
from oracle.bounds.ieee32 import ieee32_bound
from oracle.bounds.interval import Interval
from oracle.bounds.logits import logits_bound
from oracle.bounds.norm import reciprocal_norm
from oracle.bounds.outer import outer_bands
from oracle.bounds.quantiser import code_set, judge_recipe, scale_set
from oracle.bounds.rotary import rotated
from oracle.numbers import recipe_table, recipes
from oracle.numbers.formats import BF16, E4M3FN, FP32, Format, decode
from oracle.numbers.quantize import prepare, suits
from oracle.numbers.recipes import Recipe, ScaleFormula
from oracle.tensorcore.instructions import Order, Sum
from oracle.tensorcore.schedules import Split
from oracle.truth.gemm import Exact, ScaledProduct
from oracle.truth.logits import Logits
from oracle.truth.routing import Span

FILE = Path(__file__).resolve().parents[1] / "bounds/edges.json"
FP8 = torch.float8_e4m3fn
Results = Sequence[Tensor]
Calls = Iterator[tuple[str, Callable[[], Results]]]  # by name
Family = Callable[[], Calls]


def accumulator(**changes: Any) -> Accumulator:
    """Few alignment bits and short steps, so that every term of a bound is seen."""
    return replace(Accumulator("small", 4, 6, 7, None, length=8, wide=9), **changes)


def grid(seed: int, *shape: int, most: int = 40, unit: float = 0.125, zeros: float = 0.15) -> Tensor:
    """Multiples of ``unit`` up to ``most`` of them, of both signs, some of them 0: float64."""
    draw, count = random.Random(seed), torch.Size(shape).numel()
    some = [0 if draw.random() < zeros else draw.randint(-most, most) for _ in range(count)]
    return torch.tensor(some, dtype=torch.float64).mul(unit).reshape(shape)


def codes(seed: int, *shape: int, dtype: torch.dtype = FP8) -> Tensor:
    """Values of 1/8 up to 15/8 of both signs, times powers of two, in a float dtype."""
    draw = random.Random(seed)
    power = torch.tensor([draw.randint(-6, 4) for _ in range(torch.Size(shape).numel())], dtype=torch.float64)
    return (grid(seed + 1, *shape, most=15) * 2.0 ** power.reshape(shape)).to(dtype)


def scales(seed: int, *shape: int) -> Tensor:
    """Float32 from 1/2 to 3/2, no powers of two."""
    return 0.5 + (grid(seed, *shape, most=63, zeros=0.0).abs() / 8.0 + 2.0**-9).float()


def small(seed: int, *, m: int = 2, n: int = 3, k: int = 32, block: int = 16, **changes: Any) -> ScaledProduct:
    """A product with a scale for each row of both operands and each block."""
    blocks = -(-k // block)
    made = {"a": codes(seed, m, k), "b": codes(seed + 5, n, k), "a_scale": scales(seed, m, blocks)}
    rows = changes.pop("b_rows", 1)
    made["b_scale"] = scales(seed + 1, -(-n // rows), blocks)
    return ScaledProduct(**{**made, **changes}, block=block, b_rows=rows)


def ladder(limit: float) -> Tensor:
    """Float64 ``[15]`` around ``limit`` and around ``limit (1 - 2^-20)``, and fractions of it."""
    near = [1 + 2.0**-10, 1.0, *(1 - j * 2.0**-23 for j in (2, 5, 7, 9, 12, 15, 17, 22, 40)), 0.7, 0.55, 0.4, 0.3]
    return limit * torch.tensor(near, dtype=torch.float64)


def parts(x: Interval) -> Results:
    """What an interval holds."""
    return x.lo, x.hi, *([] if x.open is None else [x.open])


def pair(seed: int, k: int, fmt: Format = E4M3FN, unit: float = 0.125) -> tuple[Operand, Operand]:
    """Operands of a chain, ``[2, k]`` and ``[3, k]``."""
    spread = [2.0 ** random.Random(seed + i).choice((0, -1, -3, -6)) for i in range(k)]
    by = torch.tensor(spread, dtype=torch.float64)
    return operand(grid(seed, 2, k, unit=unit) * by, fmt), operand(grid(seed + 1, 3, k, unit=unit), fmt)


def bounded(bound: Callable[..., Interval], *given: Any) -> Results:
    """What the interval holds that a bound gives."""
    return parts(bound(*given))


def banded(product: ScaledProduct, acc: Accumulator) -> Results:
    """Values and widths of every band."""
    return [x for _, *both in outer_bands(product, acc) for x in both]


def unrounded(product: ScaledProduct, acc: Accumulator | None) -> Results:
    """The mask, or nothing."""
    mask = whole.unrounded(product, acc)
    return [] if mask is None else [mask]


def chained() -> Calls:
    """:mod:`oracle.bounds.chain`."""
    for seed in range(4):
        x, low, high = grid(seed, 4, 6, unit=0.25), -grid(seed + 9, 4, 6).abs() / 4, grid(seed + 7, 4, 6).abs() / 4
        slack = grid(seed + 3, 4, 6, most=8, unit=0.0625).abs()
        p = grid(seed + 5, 4, 6, 4, unit=0.0625, zeros=0.4)
        exponent = torch.where(p == 0, chain.NONE, torch.frexp(p)[1].to(torch.int64) - 1)
        top = exponent.amax(dim=-1)
        step = partial(chain.residue_step, x, low, high, slack, p, top, accumulator(align=3 + seed, out=4))
        yield f"chain.residue_step {seed}", step
        lower = torch.where(top > chain.NONE // 2, top - 1 - seed, chain.NONE)
        yield f"chain.residue_step least {seed}", partial(step, least=lower)
        merged = torch.unflatten(p, -1, (2, 2)).sum(dim=-1)
        yield f"chain.residue_step merged {seed}", partial(step, merged=merged)
    for scale in (2.0**126, 2.0**-126, 2.0**-133):
        x, low, high = (s * grid(i, 2, 6, most=8) * scale for i, s in ((1, 1), (2, 0.0), (3, 0.0)))
        p = grid(4, 2, 6, 3, most=9) * scale
        top = (torch.frexp(p)[1].to(torch.int64) - 1).amax(dim=-1)
        slack, acc = x.abs() / 64, accumulator(align=3, out=3)
        yield f"chain.residue_step at {scale:.3g}", partial(chain.residue_step, x, low, high, slack, p, top, acc)
    changes: tuple[dict[str, Any], ...] = (
        {}, {"exact": False}, {"promotion": 8}, {"align": 13, "out": 10, "exact": False}, {"order": Order.INTERLEAVED},
        {"order": Order.INTERLEAVED, "exact": False, "align": 3, "out": 3}, {"align": 2, "out": 2},
        {"align": 25, "out": 23, "exact": False},
    )  # fmt: skip  # a table
    for seed, change in enumerate(changes):
        for bound in (chain.residue, chain.any_order, chain.split):
            for k in (4, 10, 24):
                a, b = pair(seed, k)
                acc = accumulator(**change)
                yield f"chain.{bound.__name__} {seed} K={k}", partial(bound, a, b, acc)
    a, b = pair(3, 24)
    spans = [(0, 8), (8, 16), (16, 24)]
    several = a.together(spans), b.together(spans), accumulator(exact=False)
    for bound in (chain.residue, chain.any_order, chain.split):
        yield f"chain.{bound.__name__} together", partial(bound, *several)
    left, right = (replace(x, counted=torch.where(x.value == 0, 3, x.exponent)) for x in (a, b))
    yield "chain.residue zeros counted", partial(chain.residue, left, right, accumulator())
    cut = [(x.steps(k, k + 4), y.steps(k, k + 4)) for x, y in [pair(3, 24)] for k in range(0, 24, 4)]
    yield "chain.partial_sums", partial(chain.partial_sums, cut, 4, grid(1, 2, 3).abs())
    for unit in (2.0**60, 2.0**-70):
        far = pair(5, 12, FP32, unit)
        for bound in (chain.residue, chain.any_order, chain.split):
            yield f"chain.{bound.__name__} unit {unit:.3g}", partial(bound, *far, accumulator())


def stepped() -> Calls:
    """:mod:`oracle.bounds.steps`."""
    kinds = (Sum.FUSED_THEN_ADD, Sum.EXACT, Sum.TREE_FLUSH, Sum.LATE_FLOOR, Sum.LATE_FLOOR_ODD_EVEN)
    for kind in kinds:
        for exact, unit, k in ((True, 0.125, 12), (False, 0.125, 21), (False, 2.0**-70, 12), (False, 2.0**60, 12)):
            fmt = E4M3FN if unit == 0.125 else FP32
            operands, acc = pair(k, k, fmt, unit), accumulator(kind=kind, exact=exact, align=5)
            for bound in (steps.stepwise, steps.split):
                name = f"steps.{bound.__name__} {kind.name} {unit:.3g} K={k}"
                yield name, partial(bound, *operands, acc)
    yield "steps._tree", lambda: [steps._tree(grid(n, 5, n, unit=2.0**9)) for n in (1, 2, 3, 5, 7, 8)]
    yield "steps._tree tiny", lambda: [steps._tree(grid(n, 5, n, unit=2.0**-128)) for n in (3, 8)]
    for odd_even in (Sum.LATE_FLOOR, Sum.LATE_FLOOR_ODD_EVEN):
        for seed, unit in enumerate((1.0, 2.0**22, 2.0**25, 2.0**-3, 2.0**-26, 2.0**-28)):
            p = grid(seed, 4, 6, 5, unit=0.25)
            e = torch.where(p == 0, chain.NONE, torch.frexp(p)[1].to(torch.int64) - 1)
            start = grid(seed, 4, 6, unit=unit)
            held = start, start + grid(seed + 1, 4, 6, unit=unit / 64).abs()
            acc = accumulator(kind=odd_even, align=3, wide=4)
            yield f"steps._late_floor {odd_even.name} {seed}", partial(steps._late_floor, p, e, held, acc)
            one = (p[..., :1], e[..., :1], held, acc)
            yield f"steps._late_floor one {odd_even.name} {seed}", partial(steps._late_floor, *one)
    for fmt_name in ("float8_e8m0fnu", "float8_e4m3fn"):
        for k, length in ((96, 64), (144, 48)):
            a, b = pair(6, k)
            some = (2.0 ** grid(1, 2, k // 16, most=5, unit=1.0), 2.0 ** grid(2, 3, k // 16, most=5, unit=1.0))
            acc = accumulator(scale_format=fmt_name, length=length, kind=Sum.BLOCK_SCALED_GROUPS)
            name = f"steps.scaled_groups {fmt_name} {k}"
            yield name, partial(steps.scaled_groups, a, b, some, acc)


def promoted() -> Calls:
    """:mod:`oracle.bounds.product`."""
    for unit in (1.0, 2.0**-140, 2.0**124):
        for ordered in (True, False):
            for alpha in (None, 0.375, -2.5, 0.0):

                def run(unit: float = unit, ordered: bool = ordered, alpha: float | None = alpha) -> Results:
                    promotion = whole.Promotion(torch.zeros(3, 4, dtype=torch.float64), ordered=ordered)
                    for seed in (1, 2):
                        x, low, high = (grid(seed + i, 2, 3, 4, unit=unit) for i in (0, 10, 20))
                        x[:, 0, 0] = 0.0
                        low, high = -low.abs() / 64, high.abs() / 64
                        low[:, 0, 0] = high[:, 0, 0] = 0.0
                        sa, sb = scales(seed, 2, 3, 1).double(), -scales(seed, 2, 1, 4).double()
                        promotion.add(sa, sb, x, low, high)
                    summands = [(grid(7, 1, 4, unit=unit), whole.ETA), (grid(8, 3, 4, unit=unit), whole.FLUSHED)]
                    return parts(promotion.interval(*summands, name="", alpha=alpha))

                yield f"product.Promotion {unit:.3g} {ordered} {alpha}", run
    for unit in (1.0, 2.0**-129, 2.0**125):
        value = Exact(
            grid(1, 3, 4, unit=unit), grid(2, 3, 4, unit=unit * 2.0**-60), grid(3, 3, 4, unit=unit / 64).abs()
        )
        interval = Interval(-grid(4, 3, 4, unit=unit / 16).abs(), grid(5, 3, 4, unit=unit / 16).abs(), "given")
        opened = replace(interval, open=grid(6, 3, 4, zeros=0.5) != 0)
        c = grid(8, 3, 4, unit=unit).float()
        for after in (whole.with_summand, whole.stored_before):
            for of in (interval, opened):
                name = f"product.{after.__name__} {unit:.3g} {of is opened}"
                yield name, partial(bounded, after, value, of, c)
    products = {
        "plain": small(1),
        "bias": small(2, bias=scales(5, 3), c=scales(6, 2, 3), b_rows=2),
        "alpha": small(3, alpha=torch.tensor([0.3])),
        "one block": small(4, block=32, alpha=torch.tensor([0.7, 3.0])),
        "tall": small(5, a_scale=scales(2, 1, 2)),
    }
    for name, product in products.items():
        yield f"ieee32 {name}", partial(bounded, ieee32_bound, product)
        for promotion in (8, 16) if product.B > 1 else (8, 16, None):
            acc = accumulator(promotion=promotion, length=4)
            for bound in (whole.residue_bound, whole.any_order_bound, whole.split_bound):
                yield (
                    f"product.{bound.__name__} {name} {promotion}",
                    partial(bounded, bound, product, acc),
                )
            if product.bias is None and product.alpha is None:
                yield f"outer {name} {promotion}", partial(banded, product, acc)
        cut = accumulator(promotion=None if product.B == 1 else 8, split=Split(2, tile=16), length=4)
        yield f"product.residue_bound {name} cut", partial(bounded, whole.residue_bound, product, cut)
    row = ladder(whole.FLOAT32_MAX)[None, :]
    nothing = torch.zeros_like(row)
    for after in (whole.with_summand, whole.stored_before):
        for limit in (whole.FLOAT32_MAX, whole.BF16_MAX * (1 - 2.0**-8)):
            near = Exact(ladder(limit)[None, :], nothing, nothing)
            call = (after, near, Interval(nothing, nothing, ""), torch.zeros(row.shape))
            yield f"product.{after.__name__} at {limit}", partial(bounded, *call)

    def reached(ordered: bool, alpha: float | None, x: Tensor, only: bool = False) -> Results:
        promotion, one = whole.Promotion(nothing, ordered=ordered), torch.ones((1, 1, 1), dtype=torch.float64)
        if only:
            promotion.only(x, nothing, nothing)
        else:
            promotion.add(one, one, x[None], nothing[None], nothing[None])
        return parts(promotion.interval((nothing, 0.0), name="", alpha=alpha))

    yield "product.Promotion only", partial(reached, True, None, row, only=True)
    for alpha in (None, 0.5, 2.0):
        for ordered in (True, False):
            x = row / max(1.0, alpha or 1.0)
            yield f"product.Promotion at {ordered} {alpha}", partial(reached, ordered, alpha, x)
    one = torch.full((1, 32), 0.25).to(FP8)
    # 32 times 2^-4 in the sum; the last one is half of the limit, and twice that between the scales
    for name, power, part in (("a", -1, 1.0), ("a before b", -41, 1.0), ("b", 40, 1.0), ("half before b", -41, 0.5)):
        for back in (1.0, 2.0**-40):
            sa = (part * row.T * 2.0 ** -max(power, 0)).float().expand(-1, 2)
            sb = torch.full((1, 2), 2.0 ** (power if power < 0 else power - 1) * back)
            at = ScaledProduct(one.expand(15, -1), one, sa, sb, block=16, b_rows=1)
            yield f"ieee32 at {name} {back:.3g}", partial(bounded, ieee32_bound, at)
            yield (
                f"product.residue_bound at {name} {back:.3g}",
                partial(bounded, whole.residue_bound, at, accumulator(promotion=8, length=4)),
            )
            whole_k = replace(at, a_scale=sa[:, :1], b_scale=sb[:, :1], block=32)
            yield (
                f"product.residue_bound at {name} {back:.3g} whole K",
                partial(bounded, whole.residue_bound, whole_k, accumulator(promotion=8, length=4)),
            )
    heavy = replace(small(1), a_scale=torch.ones(2, 1), b_scale=torch.full((3, 1), 2.0**118), block=32)
    exactly = Interval(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64), "")

    def at_the_end() -> Results:
        sizes = [torch.full((2, 3), x * 2.0**-118, dtype=torch.float64) for x in ladder(whole.FLOAT32_MAX).tolist()]
        values = [Exact(0.75 * size, 0.0 * size, 0.25 * size) for size in sizes]
        acc = accumulator(promotion=8)
        made = [whole.scaled_at_the_end(heavy, acc, exactly, lambda _, x=x: (x, exactly)).open for x in values]  # type: ignore[misc]
        return [x[:1, 0] for x in made if x is not None]

    yield "product.scaled_at_the_end", at_the_end
    e5m2 = torch.float8_e5m2
    for largest, least in ((256.0, 2.0**-16), (320.0, 2.0**-16), (57344.0, 1.0), (1.0, 1.0)):
        row8 = torch.tensor([[largest, least, *[0.0] * 30]]).to(e5m2)
        fit = ScaledProduct(row8, row8, torch.ones(1, 1), torch.ones(1, 1), block=32, b_rows=1)
        yield f"product._sums_fit {largest}", lambda fit=fit: [torch.tensor(whole._sums_fit(fit))]  # type: ignore[misc]
    yield "product._scales", partial(whole._scales, small(1, k=304, block=16))
    for exponent in (58, 59, 60):
        shifted = replace(small(1, k=32, block=32), a_scale=torch.full((2, 1), 2.0**exponent), b_scale=torch.ones(3, 1))
        shifted = replace(shifted, alpha=torch.tensor([2.0**-50]))
        yield f"product.unrounded alpha {exponent}", partial(unrounded, shifted, None)
    ones, most = (torch.tensor([[x] * 32 for x in some]).to(FP8) for some in ((1.0, 16.0), (1.0, 8.0, 448.0)))
    far, alpha_only = torch.full((2, 1), 2.0**58), torch.tensor([2.0**-50])
    shifted = ScaledProduct(ones, most, far, torch.ones(3, 1), block=32, b_rows=1, alpha=alpha_only)
    yield "product.unrounded before alpha", partial(unrounded, shifted, None)
    infinite = torch.tensor([[torch.inf, 2.0**-16] * 4]).to(torch.float8_e5m2)
    plain = torch.ones_like(infinite, dtype=torch.float32).to(torch.float8_e5m2)
    for ea, eb in ((-75, -74), (-75, -75), (-133, 0), (-134, 0), (0, -133), (0, -134), (-10, 120)):
        for a, b in ((infinite, plain), (plain, infinite)):
            at = ScaledProduct(a, b, torch.full((1, 1), 2.0**ea), torch.full((1, 1), 2.0**eb), block=8, b_rows=1)
            yield f"ieee32 infinite {ea} {eb} {a is plain}", partial(bounded, ieee32_bound, at)
    for tile in (1, 64, 96):

        def tiled(tile: int = tile) -> Results:
            with mock.patch.object(ieee32, "TILE", tile):
                return parts(ieee32_bound(small(2, m=5, n=4, b_rows=2)))

        yield f"ieee32 tiles of {tile}", tiled
    yield "outer zeros", partial(banded, small(1, a=torch.zeros(2, 32).to(FP8)), accumulator(promotion=8))
    powers = replace(small(1), a_scale=torch.full((2, 2), 0.5), b_scale=torch.full((3, 2), 2.0))
    for narrow in (None, accumulator(promotion=8), accumulator(promotion=8, align=20, out=20)):
        yield f"product.unrounded {None if narrow is None else narrow.align}", partial(unrounded, powers, narrow)
    large = small(1, a_scale=scales(1, 2, 2) * 2.0**60, b_scale=scales(2, 3, 2) * 2.0**60)
    yield "ieee32 large", partial(bounded, ieee32_bound, large)
    tiny = small(1, a_scale=scales(1, 2, 2) * 2.0**-70, b_scale=scales(2, 3, 2) * 2.0**-70)
    yield "ieee32 tiny", partial(bounded, ieee32_bound, tiny)


def between() -> Calls:
    """:mod:`oracle.bounds.boxed` and :mod:`oracle.bounds.code_boxes`."""
    low = codes(1, 3, 32)
    moved = (decode(low) + 0.25 * grid(2, 3, 32, most=2, unit=1.0, zeros=0.6).abs()).to(FP8)
    first = Box(decode(low), decode(moved), scales(1, 3, 2).double(), scales(1, 3, 2).double() * 1.25, E4M3FN)
    second = replace(
        first, low=first.low / 2, high=first.high / 2, scale_low=2 * first.scale_low, scale_high=2 * first.scale_high
    )
    b, b_scale = codes(7, 4, 32), scales(8, 2, 2)
    ends = decode(b), decode((decode(b) + 0.25 * (grid(3, 4, 32, zeros=0.5) != 0)).to(FP8))
    for boxes in ([first], [first, second], [first, first, second]):
        for name, acc in (("ieee", None), ("small", accumulator(promotion=8)), ("block", accumulator(promotion=16))):
            for given in (None, ends):

                def run(boxes: list[Box] = boxes, acc: Accumulator | None = acc, given: Any = given) -> Results:
                    made = boxed_product(boxes, b, b_scale, block=16, b_rows=2, acc=acc, b_ends=given)
                    return made.low, made.high, made.open

                yield f"boxed {len(boxes)} {name} {given is None}", run
    whole_row = replace(first, scale_low=first.scale_low[:, :1], scale_high=first.scale_high[:, :1])
    huge = [
        replace(whole_row, scale_high=whole_row.scale_high * 2.0**e, scale_low=whole_row.scale_low * 2.0**e)
        for e in (120, 123)
    ]
    for box in huge:
        for name, acc in (("ieee", None), ("small", accumulator(promotion=8))):

            def run_huge(box: Box = box, acc: Accumulator | None = acc) -> Results:
                made = boxed_product([box], b, b_scale[:, :1], block=32, b_rows=2, acc=acc)
                return made.low, made.high, made.open

            yield f"boxed huge {float(box.scale_low[0, 0]):.3g} {name}", run_huge
    level = torch.full((1, 32), 0.125, dtype=torch.float64)
    for first_level, last_level, of in ((1, 2, 0.5), (2, 2, 4.0), (-2, -1, 0.5)):
        for acc in (None, accumulator(promotion=8, align=25, out=23)):

            def opened(one: float = first_level, two: float = last_level, of: float = of, acc: Any = acc) -> Results:
                found = []
                for share in ladder(whole.FLOAT32_MAX).tolist():
                    scale = torch.full((1, 1), share / 8 / max(1.0, of), dtype=torch.float64)
                    choices = [Box(one * level, x * level, scale, scale, E4M3FN) for x in (one, two)]
                    right = torch.ones(1, 32).to(FP8), torch.full((1, 1), of)
                    found.append(boxed_product(choices, *right, block=32, b_rows=1, acc=acc).open)
                return found

            yield f"boxed open {first_level} {last_level} {acc is None}", opened

    def beside_a_larger_scale() -> Results:
        values, right = torch.cat([2 * level, 0 * level]), torch.ones(1, 32).to(FP8)
        found = []
        for share in ladder(whole.FLOAT32_MAX).tolist():
            both = torch.tensor([[2.0**-20], [share / 32]], dtype=torch.float64)
            box = Box(values, values, both, both, E4M3FN)
            found.append(boxed_product([box], right, torch.full((1, 1), 4.0), block=32, b_rows=1, acc=None).open)
        return found

    yield "boxed open beside a larger scale", beside_a_larger_scale
    for seed in range(4):
        acc = accumulator(align=3 + seed, out=3)
        x1 = grid(seed, 4, 8, unit=0.5, most=10, zeros=0.3)
        x2 = x1 + grid(seed + 1, 4, 8, unit=0.5, most=2, zeros=0.6).abs()
        y1 = grid(seed + 2, 5, 8, unit=0.5, most=9, zeros=0.3)
        y2 = y1 + grid(seed + 3, 5, 8, unit=0.5, most=2, zeros=0.6).abs()
        for bound in (boxed.chain, boxed.chain_rank1):
            for high in (None, y2):
                name = f"boxed.{bound.__name__} {seed} {high is None}"
                yield name, partial(bound, x1, x2, y1, acc, E4M3FN, E4M3FN, high)
    span = Span(grid(1, 4, 256, unit=0.25, zeros=0.3), grid(1, 4, 256, unit=0.25, zeros=0.3))
    wide = Span(span.low - 0.25 * (grid(2, 4, 256) > 2), span.high + 0.25 * (grid(3, 4, 256) > 2))
    for low_row in (span, wide):
        low_row.low[3], low_row.high[3] = 0.0, 0.0
    some = (
        "VLLM_GROUP",
        "DEEPGEMM_1X128_UE8M0",
        "TORCH_TENSOR",
        "VLLM_TOKEN",
        "TORCH_STATIC",
        "DEEPGEMM_1X128",
        "TRTLLM_1X128",
    )
    for name in some:
        for x in (span, wide):
            for most in (None, torch.tensor(6.0)) if name == "VLLM_TOKEN" else (None,):

                def run_codes(x: Span = x, name: str = name, most: Tensor | None = most) -> Results:
                    made, uncertain = code_boxes(x, getattr(recipes, name), BF16, torch.tensor(0.03), most)
                    sums = [torch.stack([box.low.sum(), box.high.sum()]) for box in made]
                    return [
                        torch.tensor(float(uncertain)),
                        *sums,
                        *(t for b in made for t in (b.scale_low, b.scale_high)),
                    ]

                yield f"code_boxes {name} {x is wide} {most is not None}", run_codes


def beside() -> Calls:
    """:mod:`oracle.bounds.logits`, :mod:`oracle.bounds.norm`, :mod:`oracle.bounds.rotary`."""
    for dtype in (torch.float32, torch.bfloat16):
        for unit in (1.0, 2.0**-145, 2.0**122):
            weights = (grid(3, 3, 2) * min(unit, 1.0)).to(dtype)
            ends = torch.zeros(3, dtype=torch.int64), torch.full((3,), 4)
            problem = Logits(codes(1, 3, 2, 32), codes(2, 4, 32), scales(1, 4) * max(unit, 1.0), weights, *ends)

            def bound(product: ScaledProduct) -> Interval:
                like = product.M, product.N
                return Interval(-grid(5, *like).abs() / 8, grid(6, *like).abs() / 8, "given")

            yield f"logits {dtype} {unit:.3g}", partial(bounded, logits_bound, problem, bound)
    ends = torch.zeros(3, dtype=torch.int64), torch.full((3,), 4)
    plain = Logits(codes(1, 3, 2, 32), codes(2, 4, 32), scales(1, 4), grid(3, 3, 2).float(), *ends)

    def of_words() -> Results:
        words = Exact(grid(1, 3, 2, 4), grid(2, 3, 2, 4) / 64, grid(3, 3, 2, 4).abs() / 32)
        like = Interval(-grid(5, 6, 4).abs() / 8, grid(6, 6, 4).abs() / 8, "given")
        with mock.patch.object(Logits, "dots", words):
            return parts(logits_bound(plain, lambda _: like))

    yield "logits of two words", of_words
    turned = replace(plain, k_scale=plain.k_scale * torch.tensor([1.0, -1.0, -1.0, 1.0]))
    for sign in (-1, 1):

        def one_sided(sign: int = sign) -> Results:
            end, none = grid(6, 6, 4).abs() / 8, torch.zeros(6, 4, dtype=torch.float64)
            like = Interval(none if sign > 0 else -end, end if sign > 0 else none, "given")
            return parts(logits_bound(turned, lambda _: like))

        yield f"logits on one side {sign}", one_sided
    width = Interval(torch.zeros(1, 15, dtype=torch.float64), torch.zeros(1, 15, dtype=torch.float64), "")
    for dtype, limit in ((torch.float32, whole.FLOAT32_MAX), (torch.bfloat16, whole.BF16_MAX)):
        row = ladder(limit).float() / 2
        ends = torch.zeros(1, dtype=torch.int64), torch.full((1,), 15)
        eight = torch.full((1, 1, 1), 8.0).to(FP8)
        scaled = Logits(torch.zeros_like(eight), eight[0].expand(15, -1), row, torch.ones((1, 1), dtype=dtype), *ends)
        yield f"logits at {dtype}", partial(bounded, logits_bound, scaled, lambda _: width)
        weight = torch.tensor([[limit / 128]]).to(dtype)
        heavy = Logits(eight, eight[0].expand(15, -1), ladder(1.0).float(), weight, *ends)
        yield f"logits heavy {dtype}", partial(bounded, logits_bound, heavy, lambda _: width)
    sums = (2.0**127, 2.0**129)
    roots = torch.tensor([[s * (1 + j * 2.0**-40)] for s in sums for j in (-1, 1)], dtype=torch.float64).sqrt()
    both = torch.tensor([[2.0**63] * 2, [2.0**64] * 2], dtype=torch.float64)  # sums of 2^127 and 2^129
    yield "norm of two", lambda: [reciprocal_norm(both, 0.0).open, reciprocal_norm(both, 0.0).exact]
    yield "norm of many", lambda: [reciprocal_norm(torch.ones(1, 256, dtype=torch.float64), 0.0).low]
    yield "norm at its limits", lambda: [reciprocal_norm(roots, 0.0).open, reciprocal_norm(roots, 0.0).exact]
    yield (
        "norm of a half",
        lambda: [reciprocal_norm(torch.full((1, 1), 2.0**e, dtype=torch.float64), 0.0).open for e in (63.5, 64)],
    )
    for unit in (1.0, 2.0**-64, 2.0**58, 2.0**57.5, 0.0):
        z = grid(1, 4, 6, unit=unit, zeros=0.0)
        for epsilon in (0.0, 2.0**-20):

            def run(z: Tensor = z, epsilon: float = epsilon) -> Results:
                made = reciprocal_norm(z, epsilon)
                return made.low, made.high, made.exact, made.open

            yield f"norm {unit:.3g} {epsilon:.3g}", run
    for unit in (1.0, 2.0**-126, 2.0**-148, 2.0**122):
        x, y = grid(1, 4, 6, unit=unit), grid(2, 4, 6, unit=unit)
        cos, sin = grid(3, 4, 6, unit=2.0**-6), grid(4, 4, 6, unit=2.0**-6)
        for factor in (1.0, -0.75):
            yield f"rotary {unit:.3g} {factor}", partial(rotated, x, y, cos, sin, factor)


def quantised() -> Calls:
    """:mod:`oracle.bounds.quantiser`: one recipe of each kind of scale and code."""
    seen: set[object] = set()
    for name, recipe in recipe_table.recipes().items():
        kind = (
            recipe.formula,
            recipe.power_of_two,
            recipe.scale_format,
            recipe.candidates,
            recipe.code,
            recipe.element,
        )
        if kind in seen:
            continue
        seen.add(kind)
        x = grid(1, 2, 128, unit=2.0**-4, zeros=0.1) * 2.0 ** torch.arange(128).div(16, rounding_mode="floor")
        x = x.to(torch.bfloat16 if suits(recipe, torch.bfloat16) else torch.float16)
        for g in (0.0371, 0.125) if recipe.scaling.global_scale else (None,):

            def run(x: Tensor = x, recipe: Recipe = recipe, g: float | None = g) -> Results:
                scale = torch.tensor([0.031]) if recipe.formula is ScaleFormula.GIVEN else None
                every = None if g is None else torch.tensor([g])
                bits = torch.full(x.shape, 77, dtype=torch.uint8)
                given = prepare(x, scale=scale, global_scale=every, random=bits)
                sets = scale_set(given, recipe)
                some = [x for x in (sets.low, sets.high, sets.expected, *(sets.other or ())) if x.numel() < 64]
                codes = code_set(given, recipe, sets.low)
                counts = [t.double().sum(dim=-1).flatten()[:4] for t in (codes.low, codes.high, codes.nan, codes.free)]
                due = given.quantized(recipe)
                judged = []
                value = decode(due.scale)
                near = value * (1 + 2.0**-22) if due.scale.dtype is torch.float32 else value
                for published in (due.scale, (2 * value).to(due.scale.dtype), near.to(due.scale.dtype)):
                    one = judge_recipe(given, due.codes, published, recipe)
                    judged += [float(one.bad_scales.sum()), float(one.bad_codes.sum()), float(one.exact)]
                return [*some, *counts, torch.tensor(judged)]

            yield f"quantiser {name} {g}", run


FAMILIES = (chained, stepped, promoted, between, beside, quantised)


def numbers(results: Results) -> list[list[float] | str]:
    """What is compared: the elements of every result in their order; of a bool one a string of 0 and 1."""
    flat = [t.flatten().tolist() for t in results]
    return [
        "".join(str(int(x)) for x in row) if t.dtype is torch.bool else row
        for t, row in zip(results, flat, strict=True)
    ]


def main() -> None:
    """Write every result."""
    lines = [f"{json.dumps(name)}: {json.dumps(numbers(call()))}" for family in FAMILIES for name, call in family()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
