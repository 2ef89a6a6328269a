"""Faults of the few operations of torch: another scale, another range, a rounding more or less, groups read otherwise.

The right kernel is the reference; a fault changes what it reads (READ) or its output (WRITE).

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.base import Call
from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Faults, entry, need, ones, way
from oracle.routines.ideas import inverted, rolled
from oracle.routines.quantisers import torch_forms
from oracle.routines.traits import of_class
from oracle.verdict.sets import rounded_to

FORMS, QUANTISED = of_class(torch_forms.TorchForm), of_class(torch_forms.ByMaximum)
READ, CONVERTED = of_class(torch_forms.Dequantised), of_class(torch_forms.Bf16ScalesToFp8)
FAULTS = Faults(FORMS)
fault = FAULTS.declare
MINE = "no public thread: "
EQUAL = "it changes nothing"
E4M3 = torch.float8_e4m3fn


def _codes(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Another value of each code."""
    return lambda q: rounded_to(change(decode(q)), q.dtype)


fault(
    "torch quantiser: {}",
    VALUE,
    on=QUANTISED,
    over=(
        way("scale published as its inverse", ("scale", inverted), seen="vllm PR 36297"),
        way("scale of 240", ("scale", lambda s: s * 448 / 240), seen="vllm PR 7233: the range of fnuz"),
        way("codes of the next row", ("q", rolled(-1)), seen="NVIDIA/cutlass 2087", family=INDEX,
            needs=need(lambda call: call.inputs["x"].shape[0] > 1, "one row")),
        way("codes of magnitudes", ("q", _codes(torch.Tensor.abs)), seen=MINE + "lost signs"),
        way("subnormal codes flushed", ("q", _codes(lambda v: torch.where(v.abs() < 2.0**-6, 0.0, v))),
            seen="triton 4434", family=CAST),
        way("codes cut toward zero", ("q", lambda q: (q.view(torch.uint8) - (q.view(torch.uint8) % 128 > 8).to(
            torch.uint8)).view(q.dtype)), seen="aiter PR 4637", family=CAST),
    ),
    write=lambda change: entry(change[0], lambda x: change[1](x)),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "torch quantiser: scale of the previous group",
    INDEX,
    seen="mlc-ai/TIRx-kernels PR 5",
    on=of_class(torch_forms.ScaledQuantize),
    write=entry("scale", rolled(1, 1)),
    needs=need(lambda call: call.truth["scale"].shape[1] > 1, "one group of a row"),
    same_if=EQUAL,
)
fault(
    "torch quantiser: signed maximum for a magnitude",
    VALUE,
    seen=MINE + "amax without its sign",
    on=QUANTISED,
    write=lambda call, outputs: _again(call, lambda x: x.clamp(min=0)),
    same_if="every group's largest magnitude is positive",
)


def _again(call: Call, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The outputs for other values."""
    outputs = call.contract.reference({**call.inputs, "x": change(call.inputs["x"])}, **call.options)
    assert isinstance(outputs, dict)
    return outputs


fault(
    "scales as codes: {}",
    VALUE,
    on=CONVERTED,
    over=(
        way("codes not an eighth", ("fp8_scales", _codes(lambda v: v * 8)), seen="vllm w4a8: scales beyond 56"),
        way("scale not eightfold", ("chan_scales", lambda s: s / 8), seen="vllm w4a8: scales beyond 56"),
        way("scale of the next row", ("chan_scales", rolled(-1)), seen="NVIDIA/cutlass 2087", family=INDEX,
            needs=need(lambda call: call.inputs["scales"].shape[0] > 1, "one row")),
        way("codes of the next column", ("fp8_scales", rolled(-1, 1)), seen="flashinfer 3547", family=INDEX),
        way("scale published as its inverse", ("chan_scales", inverted), seen="vllm PR 36297"),
    ),
    write=lambda change: entry(change[0], lambda x: change[1](x)),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line
fault(
    "dequantised: {}",
    INDEX,
    on=READ,
    over=(
        way("scale of the next row of groups", rolled(-1), seen="NVIDIA/cutlass 2087"),
        way("scale of the next column of groups", rolled(-1, 1), seen="mlc-ai/TIRx-kernels PR 5"),
        way("scale dropped", ones, seen="TensorRT-LLM PR 14199", family=VALUE),
        way("divided by the scale", inverted, seen="vllm PR 36297", family=VALUE),
        way("scale in bfloat16", lambda s: s.to(torch.bfloat16).to(s.dtype), seen="flashinfer 2330", family=CAST),
    ),
    read=lambda change: entry("x_s", lambda s: change(s)),
    same_if=EQUAL,
    admissible_if="it lies within the rounding of the output",
)  # fmt: skip  # a table, one row a line
fault(
    "dequantised: {}",
    ARITHMETIC,
    on=READ,
    over=(
        way(
            "product in bfloat16",
            lambda call, out: rounded_to(decode(rounded_to(decode(out), torch.bfloat16)), out.dtype),
            seen="vllm PR 12293",
            needs=need(lambda call: call.resolved.get("out_dtype") is not torch.bfloat16, "it is bfloat16"),
        ),
        way("rows of the next code", lambda call, out: rolled(-1)(out), seen=MINE + "a row too far", family=MOVEMENT),
        way("magnitudes", lambda call, out: out.abs(), seen=MINE + "lost signs", family=VALUE),
    ),
    write=lambda change: entry("out", change),
    same_if=EQUAL,
)
