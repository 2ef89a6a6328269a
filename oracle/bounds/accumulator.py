"""What a bound needs to know of an accumulator.

One fused step of ``group`` products on the accumulator ``c``: every addend is truncated toward zero to a multiple
of ``2**(m - align)``, ``m`` the largest exponent among ``c`` and the non-zero products; the sum is exact and is
truncated toward zero to ``out`` fraction bits. ``promotion`` is the number of products after which the accumulator
is added, scaled, to a float32 sum (None: one chain over a whole scale block). Block-scaled FP4 adds not products but
sums of 16 of them, times their scales.

Source: :mod:`oracle.tensorcore`, from whose tables :func:`of_schedule` reads the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from oracle.errors import NumericsError
from oracle.tensorcore.instructions import Order, Sum, least_align_bits
from oracle.tensorcore.schedules import Schedule, Split
from oracle.truth.gemm import ScaledProduct


@dataclass(frozen=True)
class Accumulator:
    """Parameters of the bounds of :mod:`oracle.bounds.chain`; see the module's text.

    ``kind`` and ``order`` say how a step adds, ``length`` is the number of products of one instruction, ``wide`` the
    fraction bits of the second alignment that CDNA3 has. ``flushes`` and ``truncates`` say what the instruction makes
    of its operands: subnormals to zero, float32 to TF32. ``scale_format`` is that of scales inside the instruction.
    ``exact`` says that float64 holds every prefix of the sums at hand, as it does for 8-bit operands. ``split`` says
    how K is cut into partial sums. ``dequantised`` is the dtype into which codes and scales are multiplied before.
    """

    name: str
    group: int
    align: int
    out: int
    promotion: int | None
    scales_inside: bool = False
    kind: Sum = Sum.FUSED
    order: Order = Order.SEQUENTIAL
    length: int = 32
    wide: int = 0
    flushes: bool = False
    truncates: bool = False
    scale_format: str = "float8_e8m0fnu"
    exact: bool = True
    split: Split | None = None
    dequantised: torch.dtype | None = None
    widened: torch.dtype | None = None

    def lowered(self, product: ScaledProduct) -> tuple[ScaledProduct, Accumulator]:
        """What is summed, and how: dequantised or widened operands where that is what the kernel multiplies.

        Raises NumericsError: they are not exact.
        """
        dtype = self.dequantised or self.widened
        if dtype is None:
            return product, self
        lower = product.dequantised if self.dequantised else product.widened
        seen = product.cached(("lowered", dtype, bool(self.dequantised)), lambda: lower(dtype))
        if seen is None:
            done = "dequantises" if self.dequantised else "widens codes"
            raise NumericsError(f"{self.name} {done} to {dtype}, which does not hold every operand")
        return seen, replace(self, dequantised=None, widened=None)


def of_schedule(schedule: Schedule) -> Accumulator:
    """The accumulator of a schedule; that of a block-scaled instruction aligns as coarsely as any of its readings."""
    i = schedule.instruction
    return Accumulator(
        schedule.name,
        i.group,
        least_align_bits(i) or 0,
        i.out_bits,
        schedule.interval,
        schedule.scales_inside,
        i.sum,
        i.order,
        i.k,
        i.wide_out_bits or 0,
        i.flush_subnormals,
        "tfloat32" in i.operands,
        i.scale_format or "float8_e8m0fnu",
        split=schedule.split,
        dequantised=getattr(torch, i.operands[0]) if schedule.dequantises else None,
        widened=getattr(torch, i.operands[0]) if schedule.widens else None,
    )


def chains(product: ScaledProduct, promotion: int | None) -> Iterator[tuple[int, int, int]]:
    """``(scale block, first k, end k)`` of every chain, ascending: no chain crosses a block."""
    for block, k in product.blocks():
        length = promotion or k.stop - k.start
        for start in range(k.start, k.stop, length):
            yield block, start, min(k.stop, start + length)
