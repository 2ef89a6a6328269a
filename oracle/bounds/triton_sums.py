"""The exact value of a scaled product on a GPU: float64 products of K blocks, joined in one pass over them.

Every block sum ``x`` is a float64 matrix product that is exact (:func:`why_not` tests that), one of a batch. One
Triton kernel then reads the ``x`` of these blocks once and keeps the pair and the slack of each element in registers:

    p = sigma x,  e = sigma x - p exactly;   (hi, lo, slack) += p + e       (:func:`oracle.truth.gemm.accumulate`)

with the operations of the definition in its order, so the bits are those of :func:`oracle.truth.gemm.exact`. Nothing
may be contracted: the kernel is compiled without fusion of products and sums.

Memory beyond operands and result: ``HELD`` for the block sums, and float64 copies of the K blocks at hand.
Not covered (:func:`why_not`): operands of more than 16 bits, alpha, NaN and infinity among operands and scales. With
``TRITON_INTERPRET=1`` in the environment the kernel runs on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from oracle.errors import ExactnessError
from oracle.numbers.formats import decode
from oracle.numbers.rounding import fast_two_sum
from oracle.truth import gemm
from oracle.truth.gemm import Decoded, Exact, ScaledProduct

HELD = 1 << 31  # bytes of block sums held at once
BLOCK = 1024  # elements of a program
FEW = 64  # rows and columns of the first block that are summed again


def why_not(product: ScaledProduct) -> str | None:
    """Reason for which a GPU cannot take this product here, or None."""
    if not runs_on(product.a.device):
        return f"the operands are on {product.a.device}, or triton is not installed"
    left, right = product.left, product.right
    if product.alpha is not None or max(product.a.element_size(), product.b.element_size()) > 2:
        return "an alpha multiplies the sum, or an operand is wider than 16 bits"
    if product.bias is not None and not bool(torch.isfinite(decode(product.bias)).all()):
        return "the bias is no number"
    if not (left.finite and right.finite and all(bool(torch.isfinite(x.scales).all()) for x in (left, right))):
        return "an operand or a scale is no number"
    room = 2.0**53 * left.fmt.min_subnormal * right.fmt.min_subnormal
    length = min(product.block, product.K)
    if length * left.fmt.max_finite * right.fmt.max_finite <= room:
        return None  # whatever the codes are
    a, b = left.facts, right.facts
    if length * a.largest * b.largest > 2.0**53 * a.quantum * b.quantum:
        return "a sum of one block may leave float64"
    return None


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and its kernels take tensors of this device."""
    return device.type == ("cpu" if _interpreted() else "cuda") and importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    """Whether the kernel runs in Triton's interpreter, which is chosen when it is imported."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return False
    from triton import JITFunction

    from oracle.bounds.triton_join import join

    return not isinstance(join, JITFunction)


def exact(product: ScaledProduct) -> Exact:
    """:func:`oracle.truth.gemm.exact` of a product that :func:`why_not` admits, without its ``c``.

    Raises ExactnessError: the device's float64 matrix product is not exact where it must be.
    """
    from oracle.bounds.triton_join import join  # triton is optional

    rows, columns, device = product.M, product.N, product.a.device
    hi, lo, slack = (torch.zeros((rows, columns), dtype=torch.float64, device=device) for _ in range(3))
    sa = product.left.scales.expand(rows, -1).contiguous()
    sb = product.right.scales.contiguous()
    together = max(1, min(product.B, HELD // (8 * max(1, rows * columns))))
    for first in range(0, product.B, together):
        a, b = (_blocks(side, product, first, together) for side in (product.left, product.right))
        sums = torch.bmm(a, b.mT)
        if first == 0:
            _check(sums[0], a[0], b[0])
        grid = (-(-columns // BLOCK), rows)
        join[grid](
            sums,
            sa,
            sb,
            hi,
            lo,
            slack,
            rows,
            columns,
            product.B,
            first,
            len(sums),
            product.b_rows,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    if product.bias is not None:
        bias = decode(product.bias)[None, :].expand(rows, columns)
        hi, lo, slack = gemm.accumulate(hi, lo, slack, bias, torch.zeros_like(bias))
    return Exact(*fast_two_sum(hi, lo), slack)


def _blocks(side: Decoded, product: ScaledProduct, first: int, most: int) -> Tensor:
    """``[count, R, block]``: some K blocks of an operand in float64; the last one is filled with zeros."""
    k = slice(first * product.block, min(product.K, (first + most) * product.block))
    value = decode(side.codes[:, k], side.fmt)
    value = torch.nn.functional.pad(value, (0, -value.shape[1] % product.block))
    return value.view(len(value), -1, product.block).transpose(0, 1)


def _check(x: Tensor, a: Tensor, b: Tensor) -> None:
    """Some elements of a block, summed without a matrix product: each sum is exact in any order, so they are equal
    unless a library emulates float64."""
    a, b = a[:FEW], b[:FEW]
    if not torch.equal((a[:, None, :] * b[None, :, :]).sum(dim=2), x[:FEW, :FEW]):
        raise ExactnessError(
            f"the float64 matrix product on {x.device} is not exact (a library may be emulating it); run the "
            "reference on the CPU or force the native float64 path"
        )
