"""Ideas of faults that several families share: another place, another number, another cast.

A place and a number are changes of one tensor, of any dtype. A cast is a way of a declaration (:func:`way`) with its
stages: QUOTIENT gets a record with ``quotient``, ``rounding`` and ``overflow``, CODES the uint8 codes of E4M3.

    fault("published scale of the {}", INDEX, over=(way("previous row", rolled(1, 0), seen=...), ...), scale=itself)

Not covered: what one family alone has; that stands in its folder.

NaN is moved like any other value where only places change.

Sources: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle.numbers.formats import BF16, E4M3FN
from oracle.numbers.rounding import Overflow, Rounding, round_to
from oracle.routines.fault import way
from oracle.truth.layout import HEIGHTS, WIDTH, align, ceil_div, swizzle_offsets
from oracle.verdict.sets import bits_of

OfTensor = Callable[[Tensor], Tensor]
CUTLASS, TIRX = "NVIDIA/cutlass 2087", "mlc-ai/TIRx-kernels PR 5"
"""A scale of a neighbouring row, and of a neighbouring block of K."""


def itself(change: OfTensor) -> OfTensor:
    """A stage whose value is what the way changes."""
    return change


def fields(**values: Any) -> Callable[[Any], Any]:
    """A record (a recipe, steps) with these fields replaced."""
    return lambda record: replace(record, **values)


def option(**values: object) -> Callable[[dict[str, object]], dict[str, object]]:
    """An OPTIONS change: the kernel computes with these values."""
    return lambda options: options | values


# --- another place ------------------------------------------------------------------------------------------


def rolled(steps: int, dim: int = 0) -> OfTensor:
    """Every entry along ``dim`` replaced by its neighbour, around the end: 1 the previous one, -1 the next."""
    return lambda x: bits_of(x).roll(steps, dims=dim).view(x.dtype)


def tiles_too_close(scale: Tensor, tile: str) -> Tensor:
    """Memory ``[bytes]``, uint8, of ``scale`` bytes ``[M, C]``, uint8, with rows of tiles ``C // 4`` tiles apart.

    One tile at least, where ``ceil(C / 4)`` is right; a byte that two have is that of the later row, and the rest is 0.

    Source: derived in :func:`oracle.truth.layout.swizzle_offsets`."""
    rows, columns = scale.shape
    offsets, height = swizzle_offsets(rows, columns, tile=tile), HEIGHTS[tile]
    down = torch.arange(rows, device="cpu") // height * height * WIDTH
    offsets = offsets - (down * (ceil_div(columns, WIDTH) - max(1, columns // WIDTH)))[:, None]
    memory = torch.zeros(align(rows, height) * align(columns, WIDTH), dtype=torch.uint8, device="cpu")
    for at, row in zip(offsets, scale.cpu(), strict=True):
        memory[at] = row
    return memory.to(scale.device)


def first_for_all(dim: int = 0) -> OfTensor:
    """Every entry along ``dim`` replaced by the first one."""
    return lambda x: bits_of(x).narrow(dim, 0, 1).expand(x.shape).contiguous().view(x.dtype)


def halves_swapped(dim: int = -1) -> OfTensor:
    """The two halves along ``dim`` exchanged, bit for bit: gate and up."""
    return lambda x: torch.cat(bits_of(x).chunk(2, dim=dim)[::-1], dim=dim).contiguous().view(x.dtype)


def nibbles_swapped(x: Tensor) -> Tensor:
    """The two codes of every byte of ``x`` exchanged: any shape, a dtype of one byte; the result has both of ``x``."""
    return (x.view(torch.uint8) << 4 | x.view(torch.uint8) >> 4).view(x.dtype)


def pairs_swapped(x: Tensor) -> Tensor:
    """Neighbours along the last axis of ``x`` exchanged: any shape, any dtype; the same shape and dtype. The last of an
    odd number stays."""
    bits = bits_of(x)
    even = bits[..., : bits.shape[-1] // 2 * 2]
    swapped = even.reshape(*even.shape[:-1], -1, 2).flip(-1).reshape(even.shape)
    return torch.cat([swapped, bits[..., even.shape[-1] :]], dim=-1).view(x.dtype)


# --- another number -----------------------------------------------------------------------------------------


def inverted(x: Tensor) -> Tensor:
    """``1 / x`` in the shape and float dtype of ``x``, any shape; infinity for 0, NaN for NaN."""
    return torch.ones_like(x) / x


def squared(x: Tensor) -> Tensor:
    """``x`` applied twice: ``x * x`` in the shape and float dtype of ``x``, any shape; NaN for NaN."""
    return x * x


def through_bf16(x: Tensor) -> Tensor:
    """Values ``x`` of any shape rounded to bfloat16, in float32 of the same shape; NaN stays NaN."""
    return x.to(torch.bfloat16).to(torch.float32)


# --- another cast -------------------------------------------------------------------------------------------


def cast_by(rounding: Rounding, overflow: Overflow = Overflow.SATURATE) -> Callable[[Any], Any]:
    """QUOTIENT: codes rounded another way."""
    return lambda values: replace(values, rounding=rounding, overflow=overflow)


def of_quotient(change: OfTensor) -> Callable[[Any], Any]:
    """QUOTIENT: another quotient, rounded as the right one is."""
    return lambda values: replace(values, quotient=change(values.quotient))


def bf16_of(x: Tensor) -> Tensor:
    """Values ``x`` of any shape, float64, rounded to those of bfloat16, in float64 of the same shape.

    Beyond the range infinity; NaN for NaN.
    """
    return round_to(x, BF16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)


def without_subnormals(codes: Tensor, element: Any = E4M3FN) -> Tensor:
    """Subnormal ``codes``, integers of any shape, replaced by zero of their sign; same shape and dtype. NaN stays."""
    small = (codes & element.magnitude_mask) < (1 << element.fraction_bits)
    return torch.where(small, codes & element.sign_mask, codes)


SATURATED = tuple(
    way(
        f"codes saturate at {top:.0f}",
        seen=seen,
        same_if=f"no quotient exceeds {top:.0f}",
        quotient=of_quotient(lambda quotient, top=top: quotient.clamp(-top, top)),  # type: ignore[misc]
    )
    for top, seen in ((256.0, "sglang PR 40581"), (240.0, "vllm PR 12134"))
)
HALF_AWAY = way(
    "codes rounded half away from zero",
    seen="flashinfer 5128",
    same_if="no quotient is a tie",
    quotient=cast_by(Rounding.NEAREST_AWAY),
)
TRUNCATED = way(
    "codes rounded toward zero",
    seen="flashinfer 5128",
    same_if="every quotient is a code",
    quotient=cast_by(Rounding.TOWARD_ZERO),
)
THROUGH_BF16 = way(
    "quotient rounded to bfloat16 first",
    seen="TensorRT-LLM PR 14464",
    same_if="every quotient is a bfloat16 value",
    quotient=of_quotient(bf16_of),
)
OVERFLOW_NAN = way(
    "overflow coded as NaN",
    seen="ml_dtypes 400",
    same_if="no quotient exceeds 448",
    quotient=cast_by(Rounding.NEAREST_EVEN, Overflow.NAN),
)
NAN_AS_MAXIMUM = way(
    "NaN coded as 448",
    seen="Model-Optimizer PR 1397",
    same_if="no value is NaN",
    codes=lambda codes: torch.where((codes & 0x7F) == 0x7F, torch.full_like(codes, 0x7E), codes),
)
FLUSHED = way(
    "subnormal codes flushed to zero",
    seen="flashinfer PR 3932",
    same_if="no code is subnormal",
    codes=lambda codes: without_subnormals(codes),
)
UNSIGNED = way("sign lost", seen="flashinfer PR 3932", codes=lambda codes: codes & 0x7F)
