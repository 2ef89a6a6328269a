"""Calls that tell a kernel from a table of its earlier answers, and outputs that are written when nobody expects it.

    mixed      the last half of every operand from another case of the same shapes: the first rows, the shapes and the
               pointers are those of earlier calls, the answer is not
    late       an output that has changed after its call was answered

Not covered: a cache by the whole content of the operands, whose answers are right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oracle.errors import OracleError
from oracle.harness.report import Finding
from oracle.harness.session import Session, failed
from oracle.harness.watches import Calls, Inputs, Note, Options

MIXED = "operands changed behind their first rows"


def mixed(calls: Calls, inputs: Inputs, options: Options, other: Inputs) -> Iterator[Finding | Note]:
    """The numbers of a call whose operands begin like ``inputs`` and end like ``other``.

    Integers (offsets, sizes, indices) stay as they are. A note says where the contract does not take the mixture.
    """
    second = {name: _mixture(x, other[name]) for name, x in inputs.items()}
    try:
        calls.session.contract.check(second, options)
    except OracleError as error:
        yield Note(calls.case, MIXED, f"not tried, the mixture is no valid call: {error}")
        return
    _, verdict = calls.ask(MIXED, "the last half of every operand replaced", second, options, taken=True)
    if not verdict.status.is_failure:
        yield Finding(calls.case, MIXED, verdict)


def late(session: Session) -> Iterator[Finding]:
    """A failure when an output was written after its call had returned."""
    session.look_back()
    if session.late:
        names = ", ".join(dict.fromkeys(session.late))
        yield Finding("-", "late writes", failed(f"written after the call had returned: {names}"))


def _mixture(x: Tensor, y: Tensor) -> Tensor:
    """The first half of ``x`` and the last half of ``y``, by rows, by elements of a vector; a scalar as it is."""
    if x.shape != y.shape or x.dtype != y.dtype or not x.dtype.is_floating_point or x.dim() == 0 or x.shape[0] < 2:
        return x
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    made = x.clone()
    made.view(bits)[x.shape[0] // 2 :] = y.view(bits)[x.shape[0] // 2 :]
    return made
