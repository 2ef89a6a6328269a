"""Faults of what inputs of one kind have in common, in every routine that takes one: width and range.

An index is read as another width, a loop over groups ends early. Each is a change of stage READ of all inputs of some
kinds (:class:`oracle.routines.traits.Kind`), and applies only where what is read is a call too: other indices would lie
outside the memory. Not covered: reads and writes out of bounds.

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.errors import OracleError
from oracle.routines.base import Inputs
from oracle.routines.fault import INDEX, MOVEMENT, Call, Faults, Way, WhyNot, way
from oracle.routines.layouts.contract import LayoutContract
from oracle.routines.traits import INDICES, Kind, TensorSpec, Trait, of_class
from oracle.verdict.sets import bits_of

Read = Callable[[Call, Tensor], Tensor]
Holds = Callable[[TensorSpec], bool]
LAYOUTS = of_class(LayoutContract)
TILE = 64  # rows
OUTSIDE = "what is read lies outside the memory"


def _take(words: str, holds: Holds) -> Trait:
    """Contracts with an input of some specification; not layouts, which refuse what they cannot pack."""
    return Trait(words, lambda contract: any(map(holds, contract.inputs))) - LAYOUTS


def _wide(spec: TensorSpec) -> bool:
    return spec.kind in INDICES - {Kind.PARAMETERS} and torch.int64 in spec.dtypes


def _for_each_group(spec: TensorSpec) -> bool:
    return spec.kind is Kind.COUNTS and spec.dims == ("G",)


def _of_rows(spec: TensorSpec) -> bool:
    """Not an optional map of experts."""
    return spec.kind is Kind.IDS and not spec.optional


def _of_experts(spec: TensorSpec) -> bool:
    return spec.kind is Kind.CODES and len(spec.dims or ()) == 3


INDEXED = _take("takes indices of 64 bits", _wide)
COUNTED = _take("takes a number of rows for each group", _for_each_group) & _take(
    "a matrix for each", lambda spec: spec.kind is Kind.CODES and (spec.dims or ())[:2] == ("G", "M")
)
ROUTED = _take("takes numbers of experts", _of_rows) & _take("their weights", _of_experts)
FAULTS = Faults(INDEXED)
fault = FAULTS.declare


def _changed(call: Call, inputs: Inputs, holds: Holds, change: Read) -> dict[str, Tensor]:
    """The inputs with those of some specification changed."""
    names = [spec.name for spec in call.contract.inputs if spec.name in inputs and holds(spec)]
    return dict(inputs) | {name: change(call, inputs[name]) for name in names}


def reading(words: str, holds: Holds, change: Read, otherwise: str, seen: str, **own: object) -> Way:
    """A way in which inputs of some specification are read; ``otherwise``: the reason where that is right."""

    def why_not(call: Call) -> str | None:
        inputs = _changed(call, call.inputs, holds, change)
        other = [name for name, x in inputs.items() if x is not call.inputs[name]]
        if all(torch.equal(bits_of(inputs[name]), bits_of(call.inputs[name])) for name in other):
            return otherwise
        tables = [inputs[spec.name] for spec in call.contract.inputs if spec.kind is Kind.PAGES and spec.name in other]
        if any(bool((table < 0).any()) for table in tables):
            return OUTSIDE
        try:
            call.contract.check(inputs, call.options)
        except OracleError:
            return OUTSIDE
        return None

    needs: WhyNot = why_not
    return way(words, lambda call, inputs: _changed(call, inputs, holds, change), seen=seen, needs=needs, **own)


# --- width and range ------------------------------------------------------------------------------------------


def _words(call: Call, x: Tensor) -> Tensor:
    """The 32-bit words of 64-bit integers, as many as there are integers."""
    if x.dtype != torch.int64:
        return x
    words = x.clone(memory_format=torch.contiguous_format).view(torch.int32).flatten()
    return words[: x.numel()].reshape(x.shape).to(torch.int64)


def _without(gone: Callable[[Call, Tensor], Tensor]) -> Read:
    """Rows of some experts belong to none."""
    return lambda call, x: x.masked_fill(gone(call, x) & (x >= 0), -1)


def _behind_a_power(call: Call, x: Tensor) -> Tensor:
    """Which rows have an expert behind the largest power of two of experts."""
    count = next(call.inputs[spec.name].shape[0] for spec in call.contract.inputs if _of_experts(spec))
    return x >= 1 << (count.bit_length() - 1)


def _among_busy(call: Call, x: Tensor) -> Tensor:
    """The rank of each expert among those that have rows."""
    busy = torch.unique(x[x >= 0])
    return torch.where(x >= 0, torch.searchsorted(busy, x.clamp(min=0)).to(x.dtype), x)


def _behind_sentinels(call: Call, x: Tensor) -> Tensor:
    """Sorted rows begin with those of no expert, which are not skipped: each has the expert that many places on."""
    return x.flatten().roll(-int((x < 0).sum())).reshape(x.shape)


fault(
    "{}",
    INDEX,
    over=(
        reading(
            "indices of 64 bits read as words of 32",
            _wide,
            _words,
            "no index has 64 bits, or all are 0",
            "vllm-ascend PR 16775, flashinfer PR 1129",
        ),
        *(
            reading(
                f"rows of experts from {first} on left out",
                _of_rows,
                _without(lambda call, x, first=first: x >= first),  # type: ignore[misc]
                f"no expert from {first} on has rows",
                seen,
                on=ROUTED,
                family=MOVEMENT,
            )
            for first, seen in (
                (64, "ROCm/vllm PR 303: 64 threads, one for each expert"),
                (128, "ROCm/composable_kernel PR 1840"),
            )
        ),
        reading(
            "rows of experts behind the largest power of two left out",
            _of_rows,
            _without(_behind_a_power),
            "as many experts as a power of two, or no rows of those behind",
            "NVIDIA/TileGym PR 24",
            on=ROUTED,
            family=MOVEMENT,
        ),
        reading(
            "experts without rows not counted",
            _of_rows,
            _among_busy,
            "every expert before the last busy one has rows",
            "TransformerEngine PR 3037: groups without rows filtered",
            on=ROUTED,
        ),
        reading(
            "rows behind the first left out",
            _of_rows,
            lambda call, x: x.masked_fill((torch.arange(x.numel(), device=x.device) > 0).reshape(x.shape), -1),
            "there is one row, or no other has an expert",
            "vllm-xpu-kernels 453: a scatter of index 0 alone",
            on=ROUTED,
            family=MOVEMENT,
        ),
        reading(
            "rows shifted by the number of those without an expert",
            _of_rows,
            _behind_sentinels,
            "every row has an expert, or all the same",
            "TransformerEngine PR 2907",
            on=ROUTED,
        ),
        reading(
            "last partial tile of every group left out",
            _for_each_group,
            lambda call, x: x // TILE * TILE,
            "every group fills its tiles",
            "NVIDIA/cutlass 3497",
            on=COUNTED,
            family=MOVEMENT,
        ),
    ),
    read=lambda change: change,
)
