"""The contract of the activation between the two products of an expert, by itself.

    out = RN_T(silu(gate) * up)                   gate = x[..., :I], up = x[..., I:], T the dtype of x
    out = RN_T(RN_T(silu(gate)) * up)             with ``round_silu``
    silu(x) = x / (1 + exp(-x))                   with ``limit``: gate <= limit, -limit <= up <= limit, first

A kernel's silu may err as :func:`oracle.routines.moe.moe_ranges.silu_span` says (an exponential and a reciprocal of the
device); every rounding after it is monotone, so the interval of silu gives one of the output. Special values as IEEE
arithmetic gives them: NaN in, NaN out (with a limit nothing is claimed: a device minimum drops NaN); +inf as gate gives
an infinity of the sign of ``up``, -inf as gate NaN or 0 (nothing is claimed), an infinite ``up`` an infinity of the
sign of silu where that cannot be flushed to 0.

Source: vLLM csrc/activation_kernels.cu (silu_and_mul, with its rounding of silu), SGLang's clamped variant.
Not covered: GELU, interleaved halves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.quantize import WIDE
from oracle.routines.base import Call, Contract, OptionSpec, Out, TensorSpec, register
from oracle.routines.moe.moe_ranges import act_span, silu_span
from oracle.truth.moe import Activation, Steps, activated, nearest
from oracle.truth.routing import Span, sigmoid
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Sets, mostly_zero, rounded_to


@register
class SiluAndMul(Contract):
    name = "silu_and_mul"
    production = "moe_layer.silu_and_mul"
    section = "MoE"
    summary = "silu(gate) * up, optionally clamped first, rounded once or also after silu"
    source = "vLLM csrc/activation_kernels.cu silu_and_mul"
    inputs = (TensorSpec("x", WIDE, None, "[..., 2 I]: gate, then up"),)
    options = (
        OptionSpec("limit", None, None, "clamp of gate (above) and up (both sides)"),
        OptionSpec("round_silu", False, (False, True), "silu is rounded to the dtype of x before it is multiplied"),
    )

    def check(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> dict[str, object]:
        resolved = super().check(inputs, options)
        x, limit = inputs["x"], resolved["limit"]
        if x.dim() == 0 or x.shape[-1] % 2:
            raise ShapeError(f"x has shape {list(x.shape)}; its last axis holds gate and up, [..., 2 I]")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise OptionError(f"limit={limit!r}; pass a positive number, or None")
        return resolved

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        """The correctly rounded result in the dtype of ``x``."""
        x, steps = inputs["x"], _steps(inputs["x"], self.check(inputs, options))
        made = activated(decode(x).reshape(-1, x.shape[-1]), steps).reshape(*x.shape[:-1], -1)
        return rounded_to(made, x.dtype)

    def outputs(self, call: Call) -> dict[str, Out]:
        x = call.inputs["x"]
        return {"out": Out((*x.shape[:-1], x.shape[-1] // 2), (x.dtype,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        basis = "silu within a device's error, then its roundings"
        mistrust = lambda found: mostly_zero(decode(found["out"]))  # noqa: E731
        return [Elements(lambda: ({"out": self._set(call)}, basis), mistrust=mistrust)]

    def _set(self, call: Call) -> Admissible:
        x, steps = call.inputs["x"], _steps(call.inputs["x"], call.resolved)
        h = decode(x).reshape(-1, x.shape[-1])
        finite = torch.nan_to_num(h, 0.0, 0.0, 0.0)
        gate, up = h.chunk(2, dim=1)
        if steps.limit is not None:
            gate, up = gate.clamp(max=steps.limit), up.clamp(-steps.limit, steps.limit)
        special = ~torch.isfinite(gate) | ~torch.isfinite(up)
        open_ = _undetermined(gate, up, steps)
        # clamped here already: a clamped infinity is an ordinary value and must not be replaced by 0
        span = act_span(Span(*(torch.where(_twice(special), finite, torch.cat([gate, up], dim=1)),) * 2), steps)
        ieee = gate * sigmoid(gate) * up
        due = nearest(torch.where(special, ieee, activated(h, steps)), of_dtype(x.dtype))
        low, high = (torch.where(special, due, edge) for edge in (span.low, span.high))
        shape = (*x.shape[:-1], x.shape[-1] // 2)
        low, high, due, open_ = (t.reshape(shape) for t in (low, high, due, open_))
        return Admissible(low, high, due, open=open_)


def _undetermined(gate: Tensor, up: Tensor, steps: Steps) -> Tensor:
    """Elements whose special value depends on how a kernel computes."""
    s = silu_span(Span(*(torch.nan_to_num(gate, 0.0, 0.0, 0.0),) * 2))
    if steps.activation is Activation.EACH:
        s = Span(nearest(s.low, of_dtype(steps.store)), nearest(s.high, of_dtype(steps.store)))
    perhaps_zero = (s.low <= 0) & (s.high >= 0) & (gate != 0) & torch.isfinite(gate)
    nan = torch.isnan(gate) | torch.isnan(up)
    open_ = torch.isneginf(gate) | (torch.isinf(up) & perhaps_zero)
    return torch.where(nan, torch.full_like(nan, steps.limit is not None), open_)


def _twice(mask: Tensor) -> Tensor:
    return torch.cat([mask, mask], dim=1)


def _steps(x: Tensor, options: Mapping[str, object]) -> Steps:
    limit = options["limit"]
    assert limit is None or isinstance(limit, int | float)
    rounding = Activation.EACH if options["round_silu"] else Activation.PRODUCT
    return Steps(store=x.dtype, activation=rounding, limit=None if limit is None else float(limit))
