"""Adapters that return the outputs in another form: as a dict, those of the call, or all with None for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from oracle.routines import get

Kernel = Callable[..., Mapping[str, Tensor]]


def as_dict(kernel: Kernel, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    return dict(kernel(**inputs, **options))


def as_tuple(kernel: Kernel, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return tuple(as_dict(kernel, inputs, options).values())


def with_none(kernel: Kernel, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
    outputs = as_dict(kernel, inputs, options)
    return tuple(outputs.get(name) for name in get("scaled_int8_quant").returns)


def one_less(kernel: Kernel, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return as_tuple(kernel, inputs, options)[:-1]
