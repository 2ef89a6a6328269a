"""vLLM's compiled attention: FlashAttention-3 (``torch.ops._vllm_fa3_C``) and FlashMLA (``torch.ops._flashmla_C``).

No part of vLLM's Python is imported: its libraries are loaded by path, which registers their operators for the process.
FlashAttention-3's build takes sequences of several lengths alone, so that a call without lengths gets them.

Source: vLLM 0.20.2 ``vllm_flash_attn/flash_attn_interface.py`` and ``v1/attention/ops/flashmla.py``; both ran on an
H100 with that release.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..config import current_config
from ..errors import MissingPackageError
from ..records import Machine, Problem, vllm_libraries
from ..support import RANK
from ._host import ALIGNMENT, dense, on_its_device
from .declaration import Attended, Backend

FA3, FLASHMLA = "_vllm_fa3_C.fwd", "_flashmla_C.sparse_decode_fwd"
PACKAGE = {FA3: "vllm_fa3", FLASHMLA: "flashmla"}
ARGUMENTS = {FA3: 37, FLASHMLA: 13}
"""Of each operator as vLLM 0.20.2 declares it."""


def kernel(p: Problem, machine: Machine) -> str:
    """The operator's name."""
    return FLASHMLA if p.op == "attention_latent" else FA3


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op == "attention_latent":
        return ()
    return ("the lengths of sequences, where there are none", "values in unused slots must not be NaN")


@functools.cache
def operator(name: str) -> Any:
    """An operator by its name, of the library, which is loaded at first use.

    Raises
    ------
    MissingPackageError
        The library is not there, does not load, or has another operator than the one that was read.
    """
    space, routine = name.split(".")
    if not hasattr(getattr(torch.ops, space), routine):
        paths = vllm_libraries(current_config(), PACKAGE[name])
        load: Any = torch.ops.load_library  # torch is untyped here
        for path in paths:
            try:
                load(str(path))
            except (OSError, RuntimeError) as error:
                why = {str(path): str(error).splitlines()[0]}
                raise MissingPackageError(f"vLLM's {name}; install vLLM for this torch", why) from error
    if not hasattr(getattr(torch.ops, space), routine):
        raise MissingPackageError(f"vLLM's {name}", {"vllm": "its compiled attention was not found"})
    found = getattr(getattr(torch.ops, space), routine)
    taken = len(found.default._schema.arguments)
    if taken != ARGUMENTS[name]:
        why = {"vllm": f"its operator takes {taken} arguments; {ARGUMENTS[name]} of 0.20.2 are known"}
        raise MissingPackageError(f"vLLM's {name}", why)
    return found


def missing(p: Problem, machine: Machine) -> str | None:
    """A release may lack the operator, or have another one: :class:`MissingPackageError` says so."""
    operator(kernel(p, machine))
    return None


def _strided(x: Tensor) -> Tensor:
    """``x`` itself where FlashAttention-3 can address it by its strides, else a copy: a whole cache is no copy to make
    on each call."""
    pitches = all(step % ALIGNMENT == 0 for step, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)
    good = x.stride(-1) == 1 and pitches and x.data_ptr() % ALIGNMENT == 0
    return x if good else x.clone(memory_format=torch.contiguous_format)


@on_its_device
def attention(p: Attended) -> tuple[Tensor, Tensor]:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`."""
    q, k, v, scales, used, pages, sink, scale, window, causal, splits, cap = p
    if used is None:
        keys = k.shape[1] * (1 if pages is None else pages.shape[1])
        used = torch.full((q.shape[0],), keys, dtype=torch.int32, device=q.device)
    ready = [None if x is None else dense(x) for x in (*scales, used, pages, sink)]
    of_q, of_k, of_v, used, pages, sink = ready
    out, lse, *_ = operator(FA3)(
        _strided(q), _strided(k), _strided(v), None, None, None, None, None, None, None, None, used, None, None, pages,
        None, None, None, None, None, of_q, of_k, of_v, scale, causal, *window, cap, True, None, splits, None, 0, sink,
        1, 0, None,
    )  # fmt: skip  # the operator's 37 parameters
    return out, lse


@on_its_device
def latent(q: Tensor, cache: Tensor, indices: Tensor, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Operands and results as of :class:`~kernels.backends.declaration.Backend`."""
    out, lse, *_ = operator(FLASHMLA)(
        dense(q), dense(cache), dense(indices), None, None if sink is None else dense(sink), None, None, None, None,
        None, RANK, scale, None,
    )  # fmt: skip  # the operator's 13 parameters
    return out, lse


BACKENDS = {
    "vllm_fa3": Backend(name="vllm_fa3", kernel=kernel, steps=steps, missing=missing, attention=attention),
    "flashmla": Backend(name="flashmla", kernel=kernel, steps=steps, missing=missing, attention_latent=latent),
}
