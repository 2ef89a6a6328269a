"""The products that the candidates of one explanation compute, each computed once.

A fault of the stages READ and PRODUCT (:mod:`oracle.routines.fault`) gives other operands, and all that follows is
computed from these: by every arithmetic that the output is compared with, on a few rows and columns first and then on
more. So one record of a call, :class:`Mutated`, is shared by all of them; it keeps

    mutated products   by the faults that change an operand; faults of later stages have the right ones
    what they change   one operand, both, or something else, and whether the rows of the output are grouped as before
    their arithmetic   the schedule that fits them, or none
    what is near       on how many elements of a sample they give about the value of the output, by any arithmetic

Not covered: what is computed from the products (:mod:`oracle.diagnosis.candidates`). The stages before SCHEDULE do not
depend on the call's schedule.

NaN codes and scales stay NaN; no value is read here.
Source: derived in this file from the stages of a right kernel (:mod:`oracle.routines.mutants`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oracle.routines.catalogue import Call, Fault, Stage
from oracle.routines.fault import touches
from oracle.routines.mutants import fitting, mutated_parts
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import KEPT as DECODES
from oracle.truth.gemm import RESULT, Decoded, ScaledProduct
from oracle.verdict.products import Part

KEPT, KEPT_ON_DEVICE = 1 << 28, 1 << 31
"""Bytes of mutated products that are kept; more are computed again where they are asked for."""
DECODED = 24  # bytes of a code at most that is decoded once (:data:`oracle.truth.gemm.KEPT`): its float64 value, its
# int64 exponent, a float64 scale; the right ones' are decoded before, for all
PREDICTED = 32  # bytes of an element of a result at most that a product caches: float32 by each of a few arithmetics


@dataclass(frozen=True)
class Products:
    """The products of a mutant: ``parts``, which ``regrouped`` the rows of the output or have the right ones' rows."""

    parts: Sequence[Part]
    regrouped: bool
    arithmetic: dict[tuple[int, Schedule], Schedule | None] = field(default_factory=dict)

    def fitting(self, i: int, schedule: Schedule | None) -> Schedule | None:
        """The schedule for part ``i``, or exact sums where its operands are none of the instruction."""
        if schedule is None:
            return None
        if (i, schedule) not in self.arithmetic:
            self.arithmetic[i, schedule] = fitting(self.parts[i].product, schedule)
        return self.arithmetic[i, schedule]


class Mutated:
    """The mutated products of one call; ``call`` has any arithmetic, which does not matter here."""

    def __init__(self, call: Call) -> None:
        self.call, self.own = call, call.parts
        self.right = Products(self.own, regrouped=False)
        self.room = KEPT_ON_DEVICE if self.own and self.own[0].product.a.is_cuda else KEPT
        self.near = dict[tuple[object, ...], dict[str, tuple[int, int] | None]]()  # of samples, by what they hold
        self.rounding = dict[str, bool]()  # which faults of the store give about the value
        self.far = dict[tuple[object, ...], bool]()  # by a fault and a sample: whether what is known is far
        self.beyond = dict[tuple[str, bytes], bool]()  # by a fault and rows: whether these are sums beyond a buffer
        self._unknown = dict[str, bool]()
        self._found = dict[tuple[str, ...], Products]()
        self._operands = dict[str, tuple[bool, Decoded] | None]()

    def products(self, faults: tuple[Fault, ...]) -> Products:
        """The products that the kernel with these faults computes."""
        early = tuple(f for f in faults if Stage.READ in f.changes or Stage.PRODUCT in f.changes)
        if not early:
            return self.right
        names = tuple(fault.name for fault in early)
        if names in self._found:
            return self._found[names]
        for part in self.own:
            part.product.decode_once()
        parts = mutated_parts(self.call, early)
        alike = len(parts) == len(self.own) and all(map(same_place, parts, self.own))
        result = Products(parts, regrouped=not alike)
        known = {id(side.codes) for part in self.own for side in (part.product.left, part.product.right)}
        sides = (side.codes for part in parts for side in (part.product.left, part.product.right))
        size = sum(held(codes.numel(), DECODED, DECODES) for codes in sides if id(codes) not in known)
        size += sum(held(part.product.M * part.product.N, PREDICTED, RESULT) for part in parts)
        if size <= self.room:
            self.room -= size
            self._found[names] = result
        return result

    def computed(self, call: Call, faults: tuple[Fault, ...]) -> list[tuple[Part, Schedule | None]]:
        """The products of the kernel with these faults, each with its arithmetic in this call."""
        result, schedule = self.products(faults), call.schedule
        for fault in faults:
            if Stage.SCHEDULE in fault.changes:
                schedule = fault.changes[Stage.SCHEDULE](call, schedule)
        return [(part, result.fitting(i, schedule)) for i, part in enumerate(result.parts)]

    def operand(self, fault: Fault) -> tuple[bool, Decoded] | None:
        """The one operand that a fault changes in a call of one product, and whether it is the left one; None where it
        changes more or less than that."""
        if fault.name not in self._operands:
            result, (own,) = self.products((fault,)), self.own
            changed = None
            if len(result.parts) == 1:
                product = result.parts[0].product
                sides = own.product.operands_changed(product)
                if sides is not None and sum(sides) == 1:
                    changed = sides[0], product.left if sides[0] else product.right
            if (fault.name,) not in self._found:
                return changed
            self._operands[fault.name] = changed
        return self._operands[fault.name]

    def unknown_scales(self, fault: Fault) -> bool:
        """Whether a fault leaves the one product of a call its rows, and scales of its left operand unknown."""
        if not touches((fault,), Stage.READ, Stage.PRODUCT):
            return False
        if fault.name not in self._unknown:
            product = self.products((fault,)).parts[0].product
            alike = product.M == self.own[0].product.M
            self._unknown[fault.name] = alike and bool(torch.isnan(product.left.scales).any())
        return self._unknown[fault.name]

    def alone(self, fault: Fault) -> ScaledProduct | None:
        """The one product of a fault that :meth:`operand` knows none of, if it fills the same elements."""
        result = self.products((fault,))
        return None if result.regrouped or len(result.parts) != 1 else result.parts[0].product


def held(elements: int, each: int, most: int) -> int:
    """Bytes of so many codes or results where up to ``most`` of them are kept as ``each`` so many, else as they are."""
    return elements * each if elements <= most else elements


def same_place(part: Part, own: Part) -> bool:
    """Whether both fill the same elements of the output."""
    if (part.product.M, part.product.N) != (own.product.M, own.product.N):
        return False
    if part.rows is None or own.rows is None:
        return part.rows is own.rows
    return torch.equal(part.rows, own.rows)
