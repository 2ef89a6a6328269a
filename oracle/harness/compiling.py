"""The compiled CPU kernels of products, before a judgement needs them.

A kernel is compiled where it is first called and kept on disk by what it was compiled from
(:mod:`oracle.tensorcore.cpu_cache`). Those that a judgement of a product may need take fifteen seconds together, a
hundred times what the judgement of a small call takes with them. :func:`compile_kernels` calls each by judgements of
small calls; what is on disk already is only loaded.

Not covered: attention's kernel and that of figures of a quantisation, which are compiled where they are used; CUDA.
Source: which calls reach which kernel is read off the engines, and tested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle.bounds import of_schedule
from oracle.bounds.engines import any_order_bound, split_bound
from oracle.diagnosis.explain import explain_verdict
from oracle.errors import OracleError
from oracle.numbers.formats import decode
from oracle.routines import Contract, cases, get
from oracle.routines.products.contract import Fp8GemmNt
from oracle.tensorcore.cpu_cold import compiled_at_once
from oracle.tensorcore.schedules import get as schedule
from oracle.truth.gemm import ScaledProduct

CALL = f"{Fp8GemmNt.name}/e4m3xe4m3-bf16/1x128:128x128/m=8,n=128,k=384/family="
FAMILIES = ("randn/seed=1", "nan/seed=1")
NUMERICS, CHAIN = "sm90.promote128", "sm90.chain"


@dataclass(frozen=True)
class Compiled:
    """What :func:`compile_kernels` did: the names of the kernels it compiled and of those that were on disk, the
    ``folder`` that keeps them, and the ``seconds`` it took."""

    compiled: tuple[str, ...]
    loaded: tuple[str, ...]
    folder: str
    seconds: float


def kernels() -> Mapping[str, Any]:
    """The compiled kernels of products by name; imports numba.

    Raises ModuleNotFoundError: numba is not installed.
    """
    from oracle.bounds import cpu_kernels
    from oracle.tensorcore import cpu_elements, cpu_truncation, engine_cpu

    return {
        "exact_value": cpu_kernels.exact_value,
        "residue": cpu_kernels.residue,
        "any_order": cpu_kernels.any_order,
        "split": cpu_kernels.split,
        "narrow": engine_cpu.narrow,
        "wide": engine_cpu.wide,
        "truncating": cpu_truncation.truncating,
        "chains": cpu_elements.chains,
    }


def compile_kernels() -> Compiled:
    """Compile every kernel of :func:`kernels` that is not on disk, and keep it there.

    Raises
    ------
    OracleError
        No folder can be written in which kernels would be kept: set NUMBA_CACHE_DIR to one.
    ModuleNotFoundError
        numba is not installed.
    """
    every, start = kernels(), time.perf_counter()
    for name, kernel in every.items():
        if not getattr(kernel._cache, "cache_path", None):
            raise OracleError(f"no folder can be written that keeps the kernel {name}; set NUMBA_CACHE_DIR to one")
    with compiled_at_once():
        _call_each()
    compiled = tuple(name for name, kernel in every.items() if kernel.stats.cache_misses)
    loaded = tuple(name for name in every if name not in compiled)
    return Compiled(compiled, loaded, every["residue"]._cache.cache_path, time.perf_counter() - start)


def _call_each() -> None:
    """Judge small calls that need every kernel."""
    for family in FAMILIES:
        case = cases.parse(CALL + family)
        contract, inputs = get(case.contract), case.inputs()
        for output in _outputs(contract, inputs):
            call = contract.asked(inputs, output)
            explain_verdict(contract.judged(call, output), call, output, numerics=None)
        contract.identify(inputs, output, arch=None)
        codes, one = inputs["a"], torch.ones((1, 1), dtype=torch.float32, device="cpu")
        one_chain = ScaledProduct(codes, codes, one, one, block=codes.shape[1], b_rows=len(codes))
        split_bound(one_chain, of_schedule(schedule(CHAIN)))
        any_order_bound(one_chain, of_schedule(schedule(CHAIN)))


def _outputs(contract: Contract, inputs: dict[str, Tensor]) -> Iterator[Tensor]:
    """A right output, one of no known bits, and wrong ones of few and of many elements."""
    right = contract.predict(inputs, numerics=NUMERICS, out_dtype=torch.bfloat16)
    nearest = contract.reference(inputs, out_dtype=torch.bfloat16)
    assert isinstance(right, Tensor) and isinstance(nearest, Tensor)
    yield right
    yield nearest
    one = right.clone()
    one[3, 5] = 2 * decode(right[3, 5]) + 1
    yield one
    yield torch.zeros_like(right)
