"""Runs a right kernel with faults put into it: :func:`run`.

With no fault the result is what a right kernel gives: the bits of the call's schedule or, without one, of exact
sums in float32; a quantiser's declared recipe; the captured order of MQA logits. Everything else is a mutant.

NaN stands for what nothing specifies: rows of no product, and what a mutant leaves unwritten under ``Beyond.UNKNOWN``.

Source: derived in this file from the stages of a right kernel (:mod:`oracle.routines.fault`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from oracle.bounds.engines import exact
from oracle.errors import NumericsError
from oracle.routines.base import Beyond
from oracle.routines.fault import Call, Fault, Stage, fold, touches
from oracle.tensorcore.predict import predict_blocks, predict_product, store
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ALL, RESULT, ScaledProduct, rounded
from oracle.verdict.products import Part

PIECE = 128  # products that are summed before a kernel may have to add the sums


def run(call: Call, *faults: Fault) -> Tensor | dict[str, Tensor]:
    """The output of a right kernel into which ``faults`` were put, in its shape and dtype as the contract returns it.

    Rows that the contract leaves unspecified hold NaN unless a fault writes there.

    Raises NumericsError: a fault does not apply to this call (its reason is the message), or the contract has no model.
    """
    for fault in faults:
        if (reason := fault.applies(call)) is not None:
            raise NumericsError(f"{fault.name} cannot be put into this call: {reason}")
    outputs = call.contract.kernel(call, faults)
    return outputs["out"] if tuple(outputs) == ("out",) else outputs


def products(call: Call, faults: tuple[Fault, ...]) -> list[tuple[Part, Schedule | None]]:
    """The products that the mutant computes, each with its arithmetic."""
    schedule = fold(call, faults, Stage.SCHEDULE, call.schedule)
    return [(part, fitting(part.product, schedule)) for part in mutated_parts(call, faults)]


def mutated_parts(call: Call, faults: tuple[Fault, ...]) -> list[Part]:
    """The products that the mutant computes; they do not depend on the call's schedule."""
    right = parts = call.parts
    if touches(faults, Stage.READ):
        parts = replace(call, inputs=fold(call, faults, Stage.READ, dict(call.inputs))).parts
    changed = [replace(part, product=fold(call, faults, Stage.PRODUCT, part.product)) for part in parts]
    for part, own in zip(changed, right, strict=False):
        part.product.learn(own.product)
    return changed


def tensor(call: Call, product: ScaledProduct, schedule: Schedule | None, faults: tuple[Fault, ...]) -> Tensor:
    """One product ``[M, N]``, stored in the output dtype."""
    if not touches(faults, Stage.SUM, Stage.STORE):
        return _plain(product, schedule, call.out_dtype)
    return stored(call, accumulated(call, product, schedule, faults), faults)


def accumulated(call: Call, product: ScaledProduct, schedule: Schedule | None, faults: tuple[Fault, ...]) -> Tensor:
    """The float32 result ``[M, N]`` of one product before the store."""
    total = fold(call, faults, Stage.SUM, Sum(product, schedule))
    assert isinstance(total, Tensor | Sum)
    return total if isinstance(total, Tensor) else total.right()


def stored(call: Call, acc: Tensor, faults: tuple[Fault, ...]) -> Tensor:
    """Float32 sums ``acc`` ``[M, N]`` in the output dtype, same shape: to nearest even, or as a fault says."""
    if not touches(faults, Stage.STORE):
        return store(acc, call.out_dtype)
    out = fold(call, faults, Stage.STORE, acc)
    assert isinstance(out, Tensor) and out.dtype == call.out_dtype, "a store fault must give the output dtype"
    return out


class Sum:
    """What a change of stage SUM gets: the product and its arithmetic; it returns a float32 tensor ``[M, N]``."""

    def __init__(self, product: ScaledProduct, schedule: Schedule | None) -> None:
        self.product, self.schedule = product, schedule

    def right(self, product: ScaledProduct | None = None) -> Tensor:
        """The float32 sum ``[M, N]`` of ``product`` (or of the whole) by the schedule."""
        chosen = self.product if product is None else product
        return _plain(chosen, fitting(chosen, self.schedule), torch.float32)

    def pieces(self, which: slice = ALL, *, product: ScaledProduct | None = None) -> Iterator[Tensor]:
        """What a right kernel gives of each of these pieces of 128 products alone, float32 ``[M, N]`` without bias and
        summand; do not write to it. ``product``: another one than the whole."""
        chosen = self.product if product is None else product
        if chosen.bias is not None or chosen.c is not None:
            chosen = replace(chosen, bias=None, c=None)
        schedule, together = fitting(chosen, self.schedule), None
        if schedule is not None and chosen.block == PIECE and chosen.M * chosen.N <= RESULT:
            together = chosen.cached(("pieces", schedule), lambda: predict_blocks(chosen, schedule))
        if together is not None:
            yield from together[which]
            return
        for start in range(0, chosen.K, PIECE)[which]:
            k = slice(start, min(start + PIECE, chosen.K))
            at = slice(start // chosen.block, start // chosen.block + 1)
            a, b = (x[:, k].contiguous() for x in (chosen.a, chosen.b))
            sa, sb = chosen.a_scale[:, at], chosen.b_scale[:, at]
            yield self.right(replace(chosen, a=a, b=b, a_scale=sa, b_scale=sb, block=k.stop - k.start))


def write(call: Call, computed: list[tuple[Part, Schedule | None]], faults: tuple[Fault, ...]) -> Tensor:
    """The parts gathered into the output ``[R, N]`` in the output dtype, then the changes of the last stage."""
    first = computed[0][0].product
    out = torch.full((call.rows, first.N), torch.nan, dtype=call.out_dtype, device=first.a.device)
    for part, schedule in computed:
        result = tensor(call, part.product, schedule, faults)
        if part.rows is None:
            out.copy_(result)
        else:
            out[part.rows] = result
    written = fold(call, faults, Stage.WRITE, out)
    assert isinstance(written, Tensor)
    return written


def stale(call: Call, like: Tensor) -> Tensor:
    """The values of memory that a mutant leaves unwritten, in the shape and dtype of ``like`` (any shape): others of
    it, or NaN under ``Beyond.UNKNOWN``."""
    if call.beyond is Beyond.UNKNOWN:
        return torch.full_like(like, torch.nan)
    return torch.roll(like.flatten(), 1).reshape(like.shape)


def _plain(product: ScaledProduct, schedule: Schedule | None, dtype: torch.dtype) -> Tensor:
    if schedule is not None:
        return product.cached((schedule, dtype), lambda: predict_product(product, schedule, out_dtype=dtype)).clone()
    acc = product.cached("float32", lambda: rounded(product, exact(product), torch.float32))
    return acc.clone() if dtype == torch.float32 else store(acc, dtype)


def fitting(product: ScaledProduct, schedule: Schedule | None) -> Schedule | None:
    """The schedule, or exact sums where a mutated operand is no operand of the instruction."""
    if schedule is None or schedule.why_not(product, out_dtype=torch.float32) is not None:
        return None
    return schedule
