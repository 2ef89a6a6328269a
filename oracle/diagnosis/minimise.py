"""The smallest call that still fails: fewer K blocks, columns and rows, then fewer non-zero products.

Greedy halving along each axis (first half, second half, all but the last unit, all but the first), repeated until
nothing can go; then ranges of K are set to zero in ``a`` as long as the failure stays. A cut respects the scales:
columns go in groups that share a scale row, K in scale blocks, grouped rows in runs. Whether a smaller call fails is
decided by a function, usually by running the kernel again.

Source: delta debugging (Zeller and Hildebrandt, IEEE TSE 28(2), 2002). Not covered: several failures at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.errors import OracleError
from oracle.routines.base import Call, Contract, Operands
from oracle.truth.gemm import ScaledProduct

Inputs = Mapping[str, Tensor]
Fails = Callable[[Inputs], bool]
UNIT = 128


@dataclass(frozen=True)
class Smallest:
    """The inputs that were found, the extents on the way, and how often ``fails`` was asked."""

    inputs: Inputs
    steps: tuple[str, ...]
    asked: int


def minimise(contract: Contract, inputs: Inputs, fails: Fails, *, budget: int = 200, seconds: float = 60.0) -> Smallest:
    """Shrink ``inputs`` while ``fails(inputs)`` holds.

    Parameters
    ----------
    fails : True when the call still shows the failure; raised OracleErrors mean that the call is not admitted.
    budget, seconds : how often, and how long, to ask.
    """
    end, asked, steps = time.monotonic() + seconds, 0, list[str]()
    current, moved = dict(inputs), True
    while moved:
        moved = False
        for axis in _axes(contract, inputs):
            for candidate, what in _cuts(contract, current, axis):
                if asked >= budget or time.monotonic() > end:
                    return Smallest(current, tuple(steps), asked)
                asked += 1
                if _holds(contract, candidate, fails):
                    current, moved = candidate, True
                    steps.append(what)
                    break
    if "a" in contract.roles and _axes(contract, inputs):
        current, more = _zeroed(contract, current, fails, budget - asked, end)
        asked += more
    return Smallest(current, tuple(steps), asked)


def extents(contract: Contract, inputs: Inputs) -> str:
    """``M=3, N=128, K=256`` in words; the inputs' own shapes where the contract has no such axes."""
    if not (axes := _axes(contract, inputs)):
        return ", ".join(f"{name} {'x'.join(map(str, tensor.shape))}" for name, tensor in inputs.items())
    operands = Call(contract, inputs).operands
    return ", ".join(f"{axis}={_extent(operands, inputs, axis)}" for axis in axes)


def _holds(contract: Contract, inputs: Inputs, fails: Fails) -> bool:
    try:
        contract.check(inputs, {})
        return fails(inputs)
    except OracleError:  # no call of the contract, or one that cannot be judged: not smaller
        return False


def _axes(contract: Contract, inputs: Inputs) -> tuple[str, ...]:
    """What can be cut; nothing of a pipeline or a cache, which is no single product or quantiser."""
    if contract.laid_out or Call(contract, inputs).optional_operands is None:
        return ()
    if "a" in contract.roles:
        return "K", "N", "M"
    return ("K", "M") if "x" in contract.roles else ()


def _extent(operands: Operands, inputs: Inputs, axis: str) -> int:
    if axis == "N":
        return operands.shape[-1]
    rows = inputs[operands.roles["a" if operands.parts else "x"]]
    return rows.shape[-1 if axis == "K" else -2]


def _cuts(contract: Contract, inputs: Inputs, axis: str) -> Iterator[tuple[dict[str, Tensor], str]]:
    operands = Call(contract, inputs).operands
    size, unit = _extent(operands, inputs, axis), _unit(operands, axis)
    units = -(-size // unit)
    for first, last in dict.fromkeys([(0, units // 2), (units // 2, units), (0, units - 1), (1, units)]):
        start, stop = first * unit, min(size, last * unit)
        if units > 1 and stop > start:
            yield _cut(operands, inputs, axis, start, stop), f"{axis} {size} -> {stop - start}"


def _unit(operands: Operands, axis: str) -> int:
    if not operands.parts:
        block = operands.recipes[0].block
        return 1 if axis == "M" and block.rows == 1 else UNIT
    product = operands.parts[0].product
    if axis == "K":
        return product.block if product.B > 1 else UNIT
    if axis == "N":
        return product.b_rows if product.b_rows < product.N else (1 if product.b_rows == 1 else 16)
    return operands.row_unit


def _cut(operands: Operands, inputs: Inputs, axis: str, first: int, last: int) -> dict[str, Tensor]:
    cut = dict(inputs)
    if not operands.parts:
        return cut | {"x": _narrow(inputs["x"], 0 if axis == "M" else 1, first, last)}
    names, product, by_column = operands.roles, operands.parts[0].product, operands.b_columns
    if axis == "M":
        a_scale = inputs[names["a_scale"]]
        per_row = a_scale.dim() >= 2 and a_scale.shape[-2] == inputs[names["a"]].shape[-2] and a_scale.numel() > 1
        cut[names["a"]] = _narrow(inputs[names["a"]], -2, first, last)
        if per_row:
            cut[names["a_scale"]] = _narrow(a_scale, -2, first, last)
        if operands.groups is not None:
            groups = inputs[operands.groups]
            counted = (groups - first).clamp(0, last - first).to(groups.dtype)
            cut[operands.groups] = groups[first:last].clone() if operands.group_of_row else counted
    elif axis == "N":
        cut[names["b"]] = _narrow(inputs[names["b"]], 1 if by_column else -2, first, last, keep=by_column)
        scale = inputs[names["b_scale"]]
        if product.b_rows < product.N:
            rows = first // product.b_rows, -(-last // product.b_rows)
            cut[names["b_scale"]] = _narrow(scale, _channels(scale, product), *rows)
        if "bias" in cut:
            cut["bias"] = inputs["bias"][first:last].clone()
    else:
        cut[names["a"]] = _narrow(inputs[names["a"]], -1, first, last)
        cut[names["b"]] = _narrow(inputs[names["b"]], 0 if by_column else -1, first, last, keep=by_column)
        if product.B > 1:
            blocks = first // product.block, -(-last // product.block)
            for key in ("a_scale", "b_scale"):
                cut[names[key]] = _narrow(inputs[names[key]], -1, *blocks)
    return cut


def _channels(scale: Tensor, product: ScaledProduct) -> int:
    """The axis of ``b_scale`` that runs along N."""
    if product.B > 1 or scale.dim() == 3:
        return scale.dim() - 2
    rows = -(-product.N // product.b_rows)
    return max(axis for axis, extent in enumerate(scale.shape) if extent == rows)


def _narrow(x: Tensor, axis: int, first: int, last: int, *, keep: bool = False) -> Tensor:
    """A window of one axis; ``keep`` leaves a transposed matrix transposed."""
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    part = raw.narrow(axis, first, last - first)
    return (part.t().contiguous().t() if keep else part.contiguous()).view(x.dtype)


def _zeroed(
    contract: Contract, inputs: dict[str, Tensor], fails: Fails, budget: int, end: float
) -> tuple[dict[str, Tensor], int]:
    """Ranges of K set to zero in ``a`` while the failure stays, from halves down to eighths."""
    name, asked = contract.roles["a"], 0
    k = inputs[name].shape[-1]
    for parts in (2, 4, 8):
        width = max(1, k // parts)
        for first in range(0, k, width):
            if asked >= budget or time.monotonic() > end:
                return inputs, asked
            codes = inputs[name].view(torch.uint8).clone()
            codes[..., first : first + width] = 0
            if not bool((codes & 0x7F).any()):
                continue
            candidate = inputs | {name: codes.view(inputs[name].dtype)}
            asked += 1
            if _holds(contract, candidate, fails):
                inputs = candidate
    return inputs, asked
