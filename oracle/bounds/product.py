"""B1, B2 and B3 of a whole scaled product: chains of :mod:`oracle.bounds.chain`, promoted block by block.

A chain runs over ``min(promotion, scale block)`` products. Scales that enter as exponents inside the instruction
(UE8M0 on tcgen05) are multiplied into the operands first, which is exact, and the chain runs over all of K. Where the
operands' range may exceed what float64 sums exactly (16-bit formats, scales inside), the float64 rounding of the
recursion, at most ``2**-52`` of ``sum |p|`` for each product, is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from oracle.bounds.accumulator import Accumulator
from oracle.bounds.chain import Operand, any_order, operand, rank1, residue
from oracle.bounds.interval import Interval
from oracle.bounds.promote import Promotion
from oracle.bounds.steps import stepwise
from oracle.errors import NumericsError
from oracle.formats import decode, of_dtype
from oracle.gemm import ScaledProduct
from oracle.tensorcore.instructions import Sum

Chain = Callable[[Operand, Operand, Accumulator], tuple[Tensor, Tensor, Tensor]]
CUBE = 1 << 22  # products of one step held at a time by the definition


def rank1_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """B1 of ``product``: known grouping, exponents of whole rows; within about 2 to 40 times of B2."""
    if acc.kind is not Sum.FUSED:
        raise NumericsError(f"{acc.name} does not add by fused truncating steps; no rank-1 bound is derived for it")
    return _bound(product, acc, rank1, 1, f"rank-1 bound of {acc.name}", weak=False)


def residue_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """B2 of ``product``: known grouping, every product's residue; attained, so it cannot be improved.

    Accumulators that do not add by fused truncating steps take the bound of :mod:`oracle.bounds.steps` instead.
    """
    chain = residue if acc.kind is Sum.FUSED else stepwise
    return _bound(product, acc, chain, acc.length, f"residue bound of {acc.name}", weak=False)


def any_order_bound(product: ScaledProduct, acc: Accumulator) -> Interval:
    """B3 of ``product``: order and grouping inside a promotion interval unknown; weak."""
    if acc.kind is not Sum.FUSED:
        raise NumericsError(f"{acc.name} does not add by fused truncating steps; no any-order bound is derived for it")
    depth = acc.promotion or product.block
    return _bound(product, acc, any_order, depth, f"any-order bound of {acc.name} (weak)", weak=True)


def check_fit(product: ScaledProduct, acc: Accumulator) -> None:
    """Refuse an accumulator that cannot compute this product at all."""
    if acc.scales_inside:
        for name, scale in (("a_scale", product.a_scale), ("b_scale", product.b_scale)):
            value = decode(scale)
            if not bool((torch.frexp(value)[0] == 0.5).all()):
                raise NumericsError(f"{acc.name} takes UE8M0 scales; {name} holds a value that is no power of two")
    elif acc.promotion is None and product.B > 1:
        raise NumericsError(
            f"{acc.name} is one chain over K and cannot apply {product.B} block scales; declare a promoted schedule"
        )
    elif acc.promotion is not None and product.B > 1 and product.block % acc.promotion:
        raise NumericsError(f"{acc.name} promotes every {acc.promotion}, no divisor of blocks of {product.block}")


def _bound(
    product: ScaledProduct, acc: Accumulator, chain: Chain, depth: int, name: str, *, weak: bool
) -> Interval:
    check_fit(product, acc)
    inner = _scales_into_operands(product) if acc.scales_inside else None
    step = max(1, CUBE // (product.N * depth))
    parts: list[Interval] = []
    for start in range(0, product.M, step):
        stop = min(product.M, start + step)
        tile = product.rows(start, stop)
        a, b = inner if inner is not None else (_operand(product.a), _operand(product.b))
        rows = Operand(a.value[start:stop], a.exponent[start:stop])
        parts.append(_tile(tile, rows, b, acc, chain, name, weak))
    return _concatenate(parts)


def _tile(
    tile: ScaledProduct, a: Operand, b: Operand, acc: Accumulator, chain: Chain, name: str, weak: bool
) -> Interval:
    like = torch.zeros((tile.M, tile.N), dtype=torch.float64, device=tile.a.device)
    promotion = Promotion(like)
    one = torch.ones((1, 1), dtype=torch.float64, device=like.device)
    exact = not acc.scales_inside and of_dtype(tile.a.dtype).bits == of_dtype(tile.b.dtype).bits == 8
    for block, start, stop in _chains(tile, acc):
        sa, sb = a.steps(start, stop), b.steps(start, stop)
        x, low, high = chain(sa, sb, acc)
        if not exact:
            drift = (stop - start) * 2.0**-51 * (sa.value.abs() @ sb.value.abs().T)
            low, high = low - drift, high + drift
        if acc.scales_inside:
            promotion.add(one, one.expand(1, tile.N), x, low, high)
            continue
        columns = _scale(tile.b_scale[:, block]).repeat_interleave(tile.b_rows)[: tile.N]
        promotion.add(_scale(tile.a_scale[:, block])[:, None], columns[None, :], x, low, high)
    bias = None if tile.bias is None else decode(tile.bias)[None, :]
    return promotion.interval(bias, name=name, weak=weak)


def _chains(product: ScaledProduct, acc: Accumulator) -> Iterator[tuple[int, int, int]]:
    """(scale block, first k, end k) of every chain, ascending."""
    if acc.scales_inside:
        yield 0, 0, product.K
        return
    for block in range(product.B):
        first, end = block * product.block, min(product.K, (block + 1) * product.block)
        length = acc.promotion or (end - first)
        for start in range(first, end, length):
            yield block, start, min(end, start + length)


def _scale(scale: Tensor) -> Tensor:
    """Scales for the bound: NaN as 0, since its results must be NaN and are judged as such; infinities stay (open)."""
    return torch.nan_to_num(decode(scale), nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _operand(codes: Tensor) -> Operand:
    value = torch.nan_to_num(decode(codes), 0.0, 0.0, 0.0)  # the comparison overlays NaN and infinity
    return operand(value, of_dtype(codes.dtype))


def _scales_into_operands(product: ScaledProduct) -> tuple[Operand, Operand]:
    def scaled(codes: Tensor, scale: Tensor, rows: int) -> Operand:
        plain = _operand(codes)
        factor = decode(scale).repeat_interleave(rows, dim=0)[: codes.shape[0]]
        factor = factor.expand(codes.shape[0], -1).repeat_interleave(product.block, dim=1)[:, : product.K]
        shift = torch.frexp(factor)[1].to(torch.int64) - 1
        return replace(plain, value=plain.value * factor, exponent=plain.exponent + shift)

    return scaled(product.a, product.a_scale, 1), scaled(product.b, product.b_scale, product.b_rows)


def _concatenate(parts: list[Interval]) -> Interval:
    first = parts[0]
    return Interval(
        torch.cat([p.lo for p in parts]),
        torch.cat([p.hi for p in parts]),
        first.name,
        first.weak,
        torch.cat([p.open for p in parts if p.open is not None]),
    )
