"""What a bound needs to know of an accumulator.

One fused step of ``group`` products on the accumulator ``c``: every addend is truncated toward zero to a multiple
of ``2**(m - align)``, ``m`` the largest exponent among ``c`` and the non-zero products; the sum is exact and is
truncated toward zero to ``out`` fraction bits. ``promotion`` is the number of products after which the accumulator
is added, scaled, to a float32 sum (None: one chain over a whole scale block).

The numbers are not kept here: :func:`of_schedule` reads them from :mod:`oracle.tensorcore`, whose tables carry the
sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from oracle.errors import NumericsError
from oracle.tensorcore.instructions import Order, Sum
from oracle.tensorcore.schedules import Schedule


@dataclass(frozen=True)
class Accumulator:
    """Parameters of the bounds of :mod:`oracle.bounds.chain`; see the module's text.

    ``kind`` and ``order`` say how a step adds, ``length`` is the number of products of one instruction, ``wide`` the
    fraction bits of the second alignment that CDNA3 has.
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


def of_schedule(schedule: Schedule) -> Accumulator:
    """The accumulator of a schedule.

    Raises
    ------
    NumericsError
        For the block-scaled FP4 instructions, for which no bound is derived.
    """
    i = schedule.instruction
    if i.sum is Sum.BLOCK_SCALED_GROUPS:
        raise NumericsError(f"no bound is derived for {schedule.name}; compare with predict(numerics=...)")
    return Accumulator(
        schedule.name,
        i.group,
        i.align_bits or 0,
        i.out_bits,
        schedule.interval,
        schedule.scales_inside,
        i.sum,
        i.order,
        i.k,
        i.wide_out_bits or 0,
    )
