"""Faults of padded NVFP4 weights: halves, rows and scales in another place, padding that is not zero.

The right kernel is the reference; a fault changes what it reads (READ) or its output (WRITE).

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oracle.routines.base import Call
from oracle.routines.fault import INDEX, MOVEMENT, VALUE, Faults, need, way
from oracle.routines.ideas import OfTensor, halves_swapped, nibbles_swapped, rolled
from oracle.routines.layouts import padded
from oracle.routines.traits import of_class, returns, takes
from oracle.verdict.sets import bits_of

PADDED, EXPERTS = of_class(padded.Padded), of_class(padded.PaddedExperts)
FAULTS = Faults(PADDED)
fault = FAULTS.declare
MINE = "no public thread: "
EQUAL = "it changes nothing"
Tensors = dict[str, Tensor]


def _each(names: tuple[str, ...], change: OfTensor) -> Callable[[Call, Tensors], Tensors]:
    """Tensors of these names changed; of no names the first."""
    return lambda call, tensors: (
        tensors
        | {name: change(tensors[name]).contiguous() for name in (names or tuple(tensors)[:1]) if name in tensors}
    )


def _as_given(names: Sequence[str]) -> Callable[[Call, Tensors], Tensors]:
    """Tensors of these names as they were given, from the first row and column on, zeros behind."""

    def changed(call: Call, outputs: Tensors) -> Tensors:
        result = dict(outputs)
        for name in names:
            x, out = bits_of(call.inputs[name]), torch.zeros_like(bits_of(outputs[name]))
            out[:, : x.shape[1], : x.shape[2]] = x
            result[name] = out.view(outputs[name].dtype)
        return result

    return changed


fault(
    "padded weights: {}",
    MOVEMENT,
    over=(
        way("gate and up rows as one run", _as_given(("w13", "w13_scale")), seen="vLLM flashinfer_utils.py: one slice",
            on=of_class(padded.AlignFp4Experts), same_if="there is no gate, or nothing is padded"),
        way("rows of the next", _each((), rolled(-1, -2)), seen=MINE + "a row too far", same_if="there is one row"),
        way("codes of a byte exchanged", _each((), nibbles_swapped), seen="vllm PR 22951"),
        way("the first byte behind the last", _each((), rolled(-1, -1)), seen=MINE + "a shifted copy", same_if=EQUAL),
    ),
    write=lambda change: change,
)  # fmt: skip  # a table, one row a line
fault(
    "padded weights: {}",
    VALUE,
    over=(
        way("padding of ones", lambda x: torch.where(x == 0, 1, x), seen=MINE + "torch.empty for zeros"),
        way("last row of padding as the last row", lambda x: _repeated(x), seen=MINE + "another mode of padding"),
    ),
    write=lambda change: _each((), lambda x: change(bits_of(x)).view(x.dtype)),
    same_if="nothing is padded",
    on=PADDED - of_class(padded.PrepareNvfp4ForCutlass, padded.PrepareNvfp4ForCuteDsl),
)


def _repeated(x: Tensor) -> Tensor:
    """Bytes of 0 replaced by their neighbour's."""
    return torch.where(x == 0, x.roll(1, -1), x)


fault(
    "padded weights: {}",
    INDEX,
    on=EXPERTS,
    over=(
        way("scales of the previous expert", _each(("w13_scale", "w2_scale"), rolled(1)), seen="vllm 48895",
            needs=need(lambda call: len(call.inputs["w13"]) > 1, "there is one expert")),
        way("scales of the next row", _each(("w13_scale", "w2_scale"), rolled(-1, 1)), seen="vllm 48895"),
        way("gate and up exchanged, or not", _each(("w13",), halves_swapped(1)), seen="sglang PR 11081"),
        way("scales of gate and up exchanged, or not", _each(("w13_scale",), halves_swapped(1)),
            seen="sglang PR 11081"),
    ),
    read=lambda change: change,
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "padded weights: {}",
    VALUE,
    on=EXPERTS & takes("a13_scale"),
    over=(
        way("input scale of the gate alone", _each(("a13_scale",), lambda s: s[:, :1]), seen="vllm 45212",
            same_if="it is the largest"),
        way("input scales of the first expert", _each(("a13_scale", "a2_scale"), lambda s: s[:1].expand(s.shape)),
            seen="vllm 45212", same_if="it has the largest, or is alone"),
        way("least input scales", _each(("a13_scale", "a2_scale"), lambda s: s.amin(0, True).expand(s.shape)),
            seen=MINE + "another reduction", same_if=EQUAL),
    ),
    read=lambda change: change,
)  # fmt: skip  # a table, one row a line
fault(
    "padded weights: scales as they lie, without tiles",
    INDEX,
    seen="vllm 42118",
    on=EXPERTS & takes("a13_scale"),
    write=_as_given(("w13_scale", "w2_scale")),
    same_if=EQUAL,
)


fault(
    "padded weights: bytes of padding counted in columns",
    VALUE,
    seen=MINE + "two columns in a byte",
    on=PADDED & returns("padding_bytes"),
    write=_each(("padding_bytes",), lambda n: 2 * n),
    same_if="there are none",
)
