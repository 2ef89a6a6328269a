"""Subjects for the tests of the command line: a right one and one for every way to go wrong.

Found the way real ones are: through entry points named ``example_subjects:<function>``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import oracle

Inputs = Mapping[str, Tensor]
Options = Mapping[str, object]


@dataclass(frozen=True)
class Example:
    """A subject; ``numerics`` is None, so the contract's own for the arch apply."""

    name: str
    work: Callable[[Inputs, Options], object]
    reason: str | None = None
    contract: str = "fp8_gemm_nt"
    arch: str = "sm90"
    numerics: str | None = "sm90.promote128"
    device: str = "cpu"

    def why_not(self) -> str | None:
        return self.reason

    def run(self, inputs: Inputs, options: Options) -> object:
        return self.work(inputs, options)


def _right(inputs: Inputs, options: Options) -> Tensor:
    out = oracle.predict("fp8_gemm_nt", inputs, numerics="sm90.promote128", **options)
    assert isinstance(out, Tensor)
    return out


def _zero_row(inputs: Inputs, options: Options) -> Tensor:
    out = _right(inputs, options)
    out[0] = 0
    return out


def _raises(inputs: Inputs, options: Options) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access\nwith a second line")


def _refuses(inputs: Inputs, options: Options) -> Tensor:
    raise NotImplementedError("only K=256 here")


def _wrong_shape(inputs: Inputs, options: Options) -> Tensor:
    return torch.zeros(1, 1, dtype=torch.bfloat16)


def _writes_its_inputs(inputs: Inputs, options: Options) -> Tensor:
    out = _right(inputs, options)
    inputs["a_scale"].zero_()
    return out


def right() -> list[Example]:
    return [Example("right", _right)]


def zero_row() -> list[Example]:
    return [Example("zero_row", _zero_row)]


def raises() -> list[Example]:
    return [Example("raises", _raises)]


def refuses() -> list[Example]:
    return [Example("right", _right), Example("refuses", _refuses)]


def wrong_shape() -> list[Example]:
    return [Example("wrong_shape", _wrong_shape)]


def writes_its_inputs() -> list[Example]:
    return [Example("writes_its_inputs", _writes_its_inputs)]


def absent() -> list[Example]:
    return [Example("right", _right), Example("absent", _raises, reason="no such GPU here")]


def unknown_contract() -> list[Example]:
    return [Example("right", _right), Example("strange", _raises, contract="fp9_gemm")]


def broken() -> list[Example]:
    raise ImportError("this package is half installed")


def promoting(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A kernel to probe: Hopper's promotion every 128."""
    inputs = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    return _right(inputs, {"out_dtype": out_dtype})


def throws(**_: object) -> Tensor:
    raise RuntimeError("out of order")


def returns_none(**_: object) -> None:
    return None


def by_name_only(*, b_scale: Tensor, b: Tensor, a_scale: Tensor, a: Tensor) -> Tensor:
    """The same in another order of parameters, always to bfloat16."""
    return promoting(a, b, a_scale, b_scale, torch.bfloat16)


def other_names(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    """Names of its own."""
    return promoting(x, w, sx, sw, torch.bfloat16)


def constant(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Zero, whatever it is given."""
    out.zero_()


def transposed_answer(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Multiplies every row of ``a`` with the next row of ``b``."""
    return promoting(a, b.view(torch.uint8).roll(1, 0).view(b.dtype), a_scale, b_scale, torch.bfloat16)
