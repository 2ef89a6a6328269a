"""Faults of arithmetic in scaled products: the right operands, added or scaled wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always
from oracle.routines.mutants import Sum
from oracle.routines.products.roles import BLOCKS, PRODUCTS, WITH_BIAS
from oracle.tensorcore.predict import store
from oracle.tensorcore.schedules import Promotion, Schedule
from oracle.truth.gemm import ScaledProduct

NARROW = "no product lies below the narrower alignment"
NO_THREAD = "no public thread: an accumulator not zeroed before the next K block"
NO_SPLIT_THREAD = "no public thread: two splits of K that overlap in one block"
ONE_CHAIN = "no partial sum exceeds the accumulator"


def _aligned(call: Call) -> str | None:
    s = call.schedule
    return None if s is not None and s.instruction.align_bits is not None else "the arithmetic aligns nothing"


def _promoted(call: Call) -> str | None:
    s = call.schedule
    if s is None or s.interval is None:
        return "the arithmetic promotes nothing"
    return None if s.interval < call.parts[0].product.K else "one interval covers K"


def _promoted_after(call: Call) -> str | None:
    reason = _promoted(call)
    if reason is None and call.schedule is not None and call.schedule.promotion is not Promotion.ADD:
        return "every block has scales of its own and must be promoted"
    return reason


def _narrower(bits: int) -> Change:
    def change(call: Call, schedule: Schedule) -> Schedule:
        i = schedule.instruction
        assert i.align_bits is not None
        width = i.align_bits - bits
        narrow = replace(i, align_bits=width, out_bits=min(i.out_bits, width))
        return replace(schedule, name=f"{schedule.name} aligned to {width} bits", instruction=narrow)

    return change


def _chain(call: Call, schedule: Schedule) -> Schedule:
    return replace(schedule, name=f"{schedule.name} without promotion", interval=None, promotion=Promotion.NONE)


def _twice(call: Call, schedule: Schedule) -> Schedule:
    assert schedule.interval is not None
    return replace(schedule, name=f"{schedule.name} at twice the interval", interval=2 * schedule.interval)


def _second_scale_for_two(call: Call, product: ScaledProduct) -> ScaledProduct:
    """Two blocks share one chain and the scales of the second (of the first where there is no second)."""
    last = torch.arange(1, product.B + 1, 2, device=product.a.device).clamp(max=product.B - 1)
    return replace(product, block=2 * product.block, a_scale=product.a_scale[:, last], b_scale=product.b_scale[:, last])


def _running(dtype: torch.dtype) -> Change:
    """The sum over blocks of 128 kept in ``dtype``."""

    def change(call: Call, total: Sum) -> Tensor:
        product = total.product
        acc = torch.zeros((product.M, product.N), dtype=torch.float32, device=product.a.device)
        for piece in _pieces(product):
            acc = store(acc + total.right(piece), dtype).to(torch.float32)
        if product.bias is not None:
            acc = acc + decode(product.bias).to(torch.float32)[None, :]
        return acc

    return change


def _pieces(product: ScaledProduct) -> list[ScaledProduct]:
    """The product cut along K at every 128, without bias."""
    found = []
    for start in range(0, product.K, 128):
        k = slice(start, min(start + 128, product.K))
        at = slice(start // product.block, start // product.block + 1)
        found.append(
            replace(
                product,
                a=product.a[:, k].contiguous(),
                b=product.b[:, k].contiguous(),
                block=k.stop - k.start,
                a_scale=product.a_scale[:, at],
                b_scale=product.b_scale[:, at],
                bias=None,
            )
        )
    return found


def _not_cleared(call: Call, total: Sum) -> Tensor:
    """The second N tile starts from the first one's result."""
    acc = total.right()
    width = max(0, min(128, acc.shape[1] - 128))
    acc[:, 128 : 128 + width] += acc[:, :width]
    return acc


def _two_tiles(call: Call) -> str | None:
    return None if call.parts[0].product.N > 128 else "there is one tile along N"


def _bias(change: Callable[[ScaledProduct], ScaledProduct]) -> Change:
    def apply(call: Call, product: ScaledProduct) -> ScaledProduct:
        return change(product)

    return apply


def _bias_scaled(call: Call, total: Sum) -> Tensor:
    """The bias added before the scales are applied."""
    product = total.product
    assert product.bias is not None
    bare = replace(product, a_scale=torch.ones_like(product.a_scale), b_scale=torch.ones_like(product.b_scale))
    each = product.b_scale.repeat_interleave(product.b_rows, dim=0)[: product.N, 0]
    return total.right(bare) * product.a_scale * each[None, :]


def _has_bias(call: Call) -> str | None:
    return None if "bias" in call.inputs else "there is no bias"


def _several_intervals(call: Call) -> str | None:
    return None if call.parts[0].product.K > 128 else "K is one block"


def _several_blocks(call: Call) -> str | None:
    return None if call.parts[0].product.B > 1 else "there is one K block"


def _all_but(first: bool) -> Change:
    """One split of K is missing from the sum."""

    def change(call: Call, total: Sum) -> Tensor:
        pieces = _pieces(total.product)
        half = len(pieces) // 2
        acc = torch.zeros((total.product.M, total.product.N), dtype=torch.float32, device=total.product.a.device)
        for piece in pieces[half:] if first else pieces[:half]:
            acc = acc + total.right(piece)
        if total.product.bias is not None:
            acc = acc + decode(total.product.bias).to(torch.float32)[None, :]
        return acc

    return change


def _last_twice(call: Call, total: Sum) -> Tensor:
    """The last K block is in two splits."""
    return total.right() + total.right(_pieces(total.product)[-1])


def _kept(from_: Callable[[int], int], to: Callable[[int], int]) -> Change:
    """Blocks ``from_(B)`` to before ``to(B)`` start from the sum of the one before, and so enter by its scales too."""

    def change(call: Call, total: Sum) -> Tensor:
        product, acc = total.product, total.right()
        bare = replace(product, bias=None)
        for b in range(from_(product.B), to(product.B)):
            start, stop = (b - 1) * product.block, b * product.block
            old = replace(
                bare,
                a=product.a[:, start:stop].contiguous(),
                b=product.b[:, start:stop].contiguous(),
                a_scale=product.a_scale[:, b : b + 1],
                b_scale=product.b_scale[:, b : b + 1],
            )
            acc = acc + total.right(old)
        return acc

    return change


def _middle(blocks: int) -> int:
    return (blocks + 1) // 2


def _fault(
    name: str,
    met_in: str,
    changes: dict[Stage, Change],
    why_not: WhyNot = always,
    equivalent: str = "",
    contracts: frozenset[str] = PRODUCTS,
) -> Fault:
    return Fault(name, Family.ARITHMETIC, met_in, changes, contracts, why_not, equivalent)


def faults() -> list[Fault]:
    """The faults of this family, in the order of the facts."""
    zero_bias, pair = "the bias is zero", "the scales of both blocks are equal and no partial sum is long"
    return [
        _fault("no promotion: one chain over K", "DeepGEMM 37", {Stage.SCHEDULE: _chain}, _promoted_after, ONE_CHAIN),
        _fault("promotion at twice the interval", "DeepGEMM 37", {Stage.SCHEDULE: _twice}, _promoted_after, ONE_CHAIN),
        _fault(
            "two K blocks share one chain and the second's scales",
            "DeepGEMM 37",
            {Stage.PRODUCT: _second_scale_for_two, Stage.SCHEDULE: _twice},
            lambda c: _several_blocks(c) or _promoted(c),
            pair,
            BLOCKS,
        ),
        _fault("products aligned to one bit less", "H200 mutants", {Stage.SCHEDULE: _narrower(1)}, _aligned, NARROW),
        _fault("products aligned to two bits less", "H200 mutants", {Stage.SCHEDULE: _narrower(2)}, _aligned, NARROW),
        _fault(
            "running sum kept in bfloat16",
            "H200 mutants",
            {Stage.SUM: _running(torch.bfloat16)},
            _several_intervals,
            "every partial sum is a bfloat16 value",
        ),
        _fault(
            "running sum kept in float16",
            "cutlass PR 3149",
            {Stage.SUM: _running(torch.float16)},
            _several_intervals,
            "every partial sum is a float16 value",
        ),
        _fault("accumulator not cleared between tiles", "cutlass PR 3149", {Stage.SUM: _not_cleared}, _two_tiles),
        _fault(
            "accumulator not cleared before the middle K block",
            NO_THREAD,
            {Stage.SUM: _kept(_middle, lambda n: _middle(n) + 1)},
            _several_blocks,
            contracts=BLOCKS,
        ),
        _fault(
            "accumulator keeps the K block before in every K block",
            NO_THREAD,
            {Stage.SUM: _kept(lambda n: 1, lambda n: n)},
            _several_blocks,
            contracts=BLOCKS,
        ),
        _fault("last K block added twice", NO_SPLIT_THREAD, {Stage.SUM: _last_twice}, _several_intervals),
        _fault(
            "first half of a split K missing", "DeepGEMM 392", {Stage.SUM: _all_but(first=True)}, _several_intervals
        ),
        _fault(
            "second half of a split K missing", "DeepGEMM 392", {Stage.SUM: _all_but(first=False)}, _several_intervals
        ),
        _fault(
            "bias ignored",
            "cutlass PR 3149",
            {Stage.PRODUCT: _bias(lambda p: replace(p, bias=None))},
            _has_bias,
            zero_bias,
            WITH_BIAS,
        ),
        _fault(
            "bias added twice",
            "cutlass PR 3149",
            {Stage.PRODUCT: _bias(lambda p: replace(p, bias=None if p.bias is None else p.bias * 2))},
            _has_bias,
            zero_bias,
            WITH_BIAS,
        ),
        _fault(
            "bias of the next column",
            "cutlass PR 3149",
            {Stage.PRODUCT: _bias(lambda p: replace(p, bias=None if p.bias is None else torch.roll(p.bias, -1)))},
            _has_bias,
            "every bias is equal",
            WITH_BIAS,
        ),
        _fault(
            "bias added before the scales",
            "H200 mutants",
            {Stage.SUM: _bias_scaled},
            lambda c: _has_bias(c) or (None if c.parts[0].product.B == 1 else "block scales take no bias"),
            zero_bias,
            WITH_BIAS,
        ),
    ]
