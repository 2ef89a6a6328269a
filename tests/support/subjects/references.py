"""A contract's reference as a kernel, ``tests.support.subjects.references:CONTRACT``; right where a dtype is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from oracle.routines import get


def __getattr__(name: str) -> Callable[..., Tensor | Mapping[str, Tensor]]:
    if name.startswith("_"):
        raise AttributeError(name)
    contract = get(name)

    def kernel(**given: object) -> Tensor | Mapping[str, Tensor]:
        inputs = {s.name: given.pop(s.name) for s in contract.inputs if s.name in given}
        return contract.reference(inputs, **given)  # type: ignore[arg-type]  # the harness passes tensors

    return kernel
