"""Adapters that store one output in another dtype: ``tests.support.subjects.stored:scale_as_float8_e8m0fnu``.

``scale_off_as_...`` changes the first element too, so that the output is wrong in that dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def __getattr__(name: str) -> Callable[..., Mapping[str, Tensor]]:
    output, joint, dtype = name.partition("_as_")
    if not joint:
        raise AttributeError(name)

    def adapter(
        kernel: Callable[..., Tensor | Mapping[str, Tensor]], inputs: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        outputs, place = by_name(kernel(**inputs, **options)), output.removesuffix("_off")
        outputs[place] = in_dtype(outputs[place], getattr(torch, dtype))
        return outputs if place == output else {**outputs, place: off(outputs[place])}

    return adapter


def by_name(outputs: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs (any shapes and dtypes) by name; a single one is ``out``."""
    return {"out": outputs} if isinstance(outputs, Tensor) else dict(outputs)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes where they are codes (any shape, dtype ``uint8``), else the same values, rounded to ``dtype``."""
    return x.view(dtype) if x.dtype == torch.uint8 and dtype.itemsize == 1 else x.to(dtype)


def off(x: Tensor) -> Tensor:
    """``x`` (any shape, at least one element) with the highest bits of its first element flipped: far off."""
    bits = x.contiguous().view(torch.uint8).clone()
    bits.view(-1)[x.element_size() - 1] ^= 0x70
    return bits.view(x.dtype).view(x.shape)
