"""``dequantize_rows``: ``out[m, k] = bf16(value(q[m, k]) * scale[m])``, in a family of its own. NaN gives NaN.

The product has 28 significant bits: float64 has it exactly. A kernel rounds it once, or to float32 first: both pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.numbers.formats import E4M3FN, decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines import (
    CAST,
    INDEX,
    Admissible,
    Call,
    Case,
    Contract,
    Elements,
    Faults,
    Grammar,
    Kind,
    Out,
    RoutineFamily,
    Sets,
    TensorSpec,
    data,
    entry,
    need,
    register,
)
from oracle.routines.traits import of_class
from oracle.tensorcore.schedules import get as schedule


def product(inputs: Mapping[str, Tensor]) -> Tensor:
    """The exact values ``[M, K]``, float64."""
    return decode(inputs["q"]) * decode(inputs["scale"])[:, None]


def rounded(values: Tensor, dtype: torch.dtype, rounding: Rounding = Rounding.NEAREST_EVEN) -> Tensor:
    return to_dtype(values, dtype, rounding=rounding, overflow=Overflow.INF)


@register
class DequantizeRows(Contract):
    name = "dequantize_rows"
    summary = "codes times the scale of their row, as bfloat16"
    source = "this example"
    section = "Dequantisation"
    inputs = (
        TensorSpec("q", Kind.CODES, (torch.float8_e4m3fn,), ("M", "K"), "codes"),
        TensorSpec("scale", Kind.SCALES, (torch.float32,), ("M",), "one scale for each row; it multiplies"),
    )

    def reference(self, inputs: Mapping[str, Tensor], **options: object) -> Tensor:
        self.check(inputs, options)
        return rounded(product(inputs), torch.bfloat16)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {"out": Out(tuple(call.inputs["q"].shape), (torch.bfloat16,))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        def ends() -> tuple[dict[str, Admissible], str]:
            once = decode(call.truth["out"])
            twice = decode(rounded(decode(rounded(product(call.inputs), torch.float32)), torch.bfloat16))
            sets = Admissible(torch.minimum(once, twice), torch.maximum(once, twice), once)
            return {"out": sets}, "bfloat16 of the exact or the float32 product"

        return [Elements(ends)]


def build(case: Case) -> dict[str, Tensor]:
    return {
        "q": data.operand(case.label("q"), case.family, case["m"], case["k"], dtype=torch.float8_e4m3fn, side="a"),
        "scale": data.scales(case.label("scale"), case.family, (case["m"],)),
    }


GRAMMAR = Grammar(
    extents=("m", "k"),
    dtypes=("e4m3-bf16",),
    schemes=("token",),
    families=("randn", "codes", "nan"),
    build=build,
    call=lambda case: {},
    shapes=("m=1,k=16", "m=7,k=130", "m=33,k=256"),
)
FAULTS = Faults(of_class(DequantizeRows))
fault = FAULTS.declare
several_rows = need(lambda call: call.inputs["q"].shape[0] > 1, "there is one row")

fault(
    "dequantised by the row above",
    INDEX,
    seen="this example",
    needs=several_rows,
    read=entry("scale", lambda scale: scale.roll(1)),
)
fault("row scale divides", INDEX, seen="this example", read=entry("scale", lambda scale: 1 / scale))


@fault("rows stored by truncation", CAST, seen="this example", same_if="every product is a bfloat16")
def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs | {"out": rounded(product(call.inputs), torch.bfloat16, Rounding.TOWARD_ZERO)}


FAMILY = RoutineFamily("foreign", grammars={"dequantize_rows": GRAMMAR}, faults=(FAULTS,))
FORMATS = (replace(E4M3FN, name="float8_foreign"),)
SCHEDULES = (replace(schedule("sm90.chain"), name="sm90.foreign", seen_in="this example"),)


def kernel(q: Tensor, scale: Tensor) -> Tensor:
    return (q.float() * scale[:, None]).to(torch.bfloat16)


@dataclass(frozen=True)
class InTorch:
    """The kernel as a subject of ``verify``."""

    contract: str = "dequantize_rows"
    name: str = "foreign torch"
    arch: str = "cpu"
    numerics: str | None = None
    device: str = "cpu"

    def why_not(self) -> str | None:
        return None

    def run(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Tensor:
        return kernel(**inputs)


def subjects() -> tuple[InTorch, ...]:
    return (InTorch(),)
