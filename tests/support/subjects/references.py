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


def cache_in_place(kv_cache: Tensor, **given: object) -> None:
    """The writer of index keys as libraries have it: into the cache that it is given."""
    outputs = __getattr__("indexer_k_quant_and_cache")(kv_cache=kv_cache, **given)
    assert isinstance(outputs, Mapping)
    kv_cache.copy_(outputs["kv_cache"])


def on_a_clone(kernel: Callable[..., None], inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Tensor:
    """An adapter of it: what a clone of the cache holds after the call."""
    cache = inputs["kv_cache"].clone()
    kernel(**{**inputs, "kv_cache": cache}, **options)
    return cache
