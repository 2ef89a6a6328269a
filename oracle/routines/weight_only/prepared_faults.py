"""Faults of weights after loading: another expert's, another order, a factor that is lost.

The right kernel is the reference; a fault changes what it reads (READ), its options (OPTIONS) or its output (WRITE).

Source: the threads and files that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.routines.base import Call
from oracle.routines.fault import CAST, INDEX, MOVEMENT, VALUE, Change, Faults, entry, need, way
from oracle.routines.ideas import OfTensor, halves_swapped, nibbles_swapped, rolled
from oracle.routines.traits import of_class, takes
from oracle.routines.weight_only import prepared
from oracle.truth import weight_only as truth
from oracle.verdict.sets import bits_of

PREPARED, EXPERTS = of_class(prepared.Prepared), of_class(prepared.MarlinExperts)
WORDS, FP8 = of_class(prepared.Words), of_class(prepared.PrepareFp8ForMarlin)
ALLSPARK, SHARES = of_class(prepared.AllsparkRepackWeight), of_class(prepared.ActInt8Scales)
NVFP4 = of_class(prepared.PrepareNvfp4ForMarlin)
FAULTS = Faults(PREPARED)
fault = FAULTS.declare
MINE = "no public thread: "
EQUAL = "it changes nothing"
several = need(lambda call: len(call.inputs["w13"]) > 1, "there is one expert")


def _of(names: tuple[str, ...], change: OfTensor) -> Change:
    """Tensors of these names changed."""
    return lambda call, tensors: tensors | {n: change(tensors[n]).contiguous() for n in names if n in tensors}


WEIGHTS, SCALES, GLOBALS = ("w13", "w2"), ("w13_scale", "w2_scale"), ("w13_scale_2", "w2_scale_2")
fault(
    "prepared experts: {} of the previous expert",
    INDEX,
    on=EXPERTS,
    needs=several,
    over=(
        way("weights", WEIGHTS, seen="vllm 48895"),
        way("scales", SCALES, seen="NVIDIA/cutlass 2087"),
        way("global scales", GLOBALS, seen="vllm 45212", on=NVFP4),
    ),
    read=lambda names: _of(names, rolled(1)),
    same_if=EQUAL,
)
fault(
    "prepared experts: {}",
    MOVEMENT,
    on=EXPERTS,
    over=(
        way("gate and up exchanged", _of(("w13",), halves_swapped(1)), seen="sglang PR 11081"),
        way(
            "scales of gate and up exchanged",
            _of(("w13_scale",), lambda s: halves_swapped(1)(s) if s.dim() > 1 else s),
            seen="sglang PR 11081",
            needs=need(lambda call: call.inputs["w13_scale"].dim() > 1, "one scale an expert"),
        ),
        way(
            "scales of the next row",
            _of(SCALES, lambda s: rolled(-1, 1)(s) if s.dim() > 1 else s),
            seen="vllm 48895",
            needs=need(lambda call: call.inputs["w13_scale"].dim() > 1, "one scale an expert"),
        ),
    ),
    read=lambda change: change,
    same_if=EQUAL,
)
fault(
    "prepared experts: {}",
    MOVEMENT,
    on=EXPERTS,
    over=(
        way(
            "scales not in the order of threads",
            _of(SCALES, lambda s: _straight(s, truth.SINGLE)),
            seen="vLLM marlin_utils.py: scales of columns for those of groups",
        ),
        way(
            "words of a weight row by row",
            _of(WEIGHTS, lambda w: w.transpose(1, 2).reshape(w.shape)),
            seen=MINE + "the order of columns",
        ),
        way("tiles of the next rows", _of(WEIGHTS, rolled(-1, 1)), seen=MINE + "a tile too far"),
        way("scales as they lie in halves", _of(SCALES, halves_swapped(-1)), seen=MINE + "two runs exchanged"),
    ),
    write=lambda change: change,
    same_if=EQUAL,
)


def _straight(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Columns put back out of an order."""
    bits = bits_of(x)
    back = truth.reordered(bits.reshape(-1, bits.shape[-1]), truth.inverse(order))
    return back.reshape(bits.shape).view(x.dtype)


fault(
    "prepared experts: codes of a byte exchanged",
    INDEX,
    seen="vllm PR 22951",
    on=of_class(prepared.PrepareMxfp4ForMarlin, prepared.PrepareNvfp4ForMarlin),
    read=_of(WEIGHTS, nibbles_swapped),
)
fault(
    "prepared experts: exponent bias not in the scales",
    VALUE,
    seen="vllm PR 37135",
    on=FP8,
    write=lambda call, outputs: (
        outputs
        | {
            name: (outputs[name].double() * 2.0 ** (-120 if outputs[name].dtype is torch.bfloat16 else -8)).to(
                outputs[name].dtype
            )
            for name in SCALES
        }
    ),
    same_if=EQUAL,
)
fault(
    "prepared experts: {}",
    VALUE,
    on=NVFP4,
    over=(
        way("factor of the scales left in the global scale", lambda call, x, f: x * f, seen="vllm PR 34577"),
        way(
            "global scale without its exponent",
            lambda call, x, f: x * 2.0 ** (-7 if call.resolved["params_dtype"] is torch.float16 else -119),
            seen="vllm PR 37502",
        ),
    ),
    write=lambda change: (
        lambda call, outputs: outputs | {name: change(call, outputs[name], _factor(call, name)) for name in GLOBALS}
    ),
    same_if="the factor is 1",
)


def _factor(call: Call, name: str) -> float:
    half = call.resolved["params_dtype"] is torch.float16
    return 1.0 if half else truth.lift_of(call.inputs[name.removesuffix("_2")])


fault(
    "prepared weights: {}",
    INDEX,
    on=ALLSPARK,
    over=(
        way(
            "rows of a tile in their order",
            ("qweight", lambda q: q.reshape(-1, 8, 8).transpose(1, 2).reshape(q.shape)),
            seen=MINE + "a transposed tile",
        ),
        way(
            "pairs of rows exchanged",
            ("qweight", lambda q: q.reshape(-1, 2).flip(1).reshape(q.shape)),
            seen=MINE + "the order of a pair",
        ),
        way(
            "scales in their order",
            ("scale", lambda s: s.reshape(-1, 8, 4).transpose(1, 2).reshape(s.shape)),
            seen=MINE + "weights reordered alone",
        ),
        way(
            "zero points in their order",
            ("zero_point", lambda s: s.reshape(-1, 8, 4).transpose(1, 2).reshape(s.shape)),
            seen=MINE + "weights reordered alone",
            needs=need(lambda call: "zero_point" in call.inputs, "there is none"),
        ),
    ),
    write=lambda change: entry(change[0], lambda x: change[1](x).contiguous()),
    same_if=EQUAL,
)


def _fields(change: Callable[[Tensor, int], Tensor]) -> Change:
    """READ: the words' fields changed, as words of ``bits``."""

    def read(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name, x = next(iter(inputs.items()))
        bits = int(call.resolved.get("num_bits", 4))
        each = truth.fields(x.reshape(1, -1), bits).t()
        return {name: truth.words(change(each, bits).t().contiguous(), bits).reshape(x.shape)}

    return read


fault(
    "prepared weights: {}",
    INDEX,
    on=WORDS,
    over=(
        way(
            "fields from the high bits down",
            _fields(lambda f, bits: f.flip(1)),
            seen=MINE + "the other order of bits",
            on=WORDS - takes("w_q") | of_class(prepared.UnpackQuantizedValues),
        ),
        way("words of the next row", _of(("w_q", "t"), rolled(-1)), seen=MINE + "a row too far"),
        way(
            "integers not reduced to their bits", _of(("w_q", "t"), lambda x: x >> 1), seen=MINE + "a shift of one bit"
        ),
    ),
    read=lambda change: change,
    same_if=EQUAL,
)
fault(
    "prepared weights: fields along the other axis",
    MOVEMENT,
    seen=MINE + "an axis mistaken",
    on=WORDS & takes("w_q"),
    write=entry("out", lambda x: x.t().reshape(x.shape).contiguous()),
    same_if="it has one row or column, or equal ones",
)
fault(
    "prepared weights: {}",
    VALUE,
    on=of_class(prepared.SignedInt4),
    over=(
        way("8 not taken off", lambda call, out: call.inputs["t"].clone(), seen="flashinfer mxint4: unsigned codes"),
        way("the low field alone", lambda call, out: call.inputs["t"] ^ 8, seen=MINE + "a loop of one step"),
    ),
    write=lambda change: entry("t", change),
)
fault(
    "prepared scales: {}",
    VALUE,
    on=SHARES,
    over=(
        way(
            "shares of 2048", lambda call, out: (out.view(torch.int16) // 2).view(out.dtype), seen=MINE + "one bit less"
        ),
        way(
            "shares cut",
            lambda call, out: (
                (call.inputs["s"] / call.inputs["s"].float().max() * 4096).to(torch.int16).view(out.dtype)
            ),
            seen=MINE + "a cast for a rounding",
            family=CAST,
            same_if="no share is cut",
        ),
        way(
            "numbers in place of their bits",
            lambda call, out: out.view(torch.int16).to(out.dtype),
            seen=MINE + "a cast for a view",
            family=CAST,
        ),
    ),
    write=lambda change: entry("out", change),
    same_if=EQUAL,
)
fault(
    "prepared scales: {}",
    VALUE,
    on=SHARES,
    over=(
        way(
            "factor of the first scale",
            lambda call, x: call.inputs["s"].flatten()[0].float() / 4096,
            seen=MINE + "no maximum",
        ),
        way("factor without its 4096th", lambda call, x: x * 4096, seen=MINE + "a constant lost"),
    ),
    write=lambda change: entry("factor", change),
    same_if="the first scale is the largest",
)
