"""The host side of a library call: operands that the library can address, the current device, memory, modes.

Operands    TMA and vector loads address 16 bytes. ``Tensor.is_contiguous`` ignores the stride of an axis of extent 1,
            which some libraries read: a slice of one row may carry the row pitch of the buffer that it was cut from.
Device      Compiled libraries launch on the current device. With operands on ``cuda:1`` and device 0 current, vLLM's
            ``cutlass_moe_mm`` reads memory of other tensors (seen on two H200). torch's operators and this package's
            Triton launches need no help.
Memory      A small ``torch.empty`` costs 2.2 us of host time on an H200 machine and a layer makes three a call; half
            of it is torch's dispatcher (:mod:`kernels.fast`).
Modes       Under ``torch.autocast("cpu")`` a float32 product is rounded to bfloat16, and with gradients on, a
            caller's output buffer would keep the autograd history of every call. Compiled libraries have neither.

Not covered: autocast of other devices (plain torch multiplies CPU tensors only).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import fast
from ..config import current_config
from .declaration import Allocate

P = ParamSpec("P")
R = TypeVar("R")
ALIGNMENT = 16
"""Bytes on which TMA and vector loads begin."""


def dense(x: Tensor) -> Tensor:
    """``x`` itself when it is contiguous on 16 bytes, else a copy: for libraries that ignore strides."""
    good = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    return x if good else x.clone(memory_format=torch.contiguous_format)


def packed(x: Tensor) -> bool:
    """Whether the strides of ``[M, N]`` or ``[G, M, N]`` are those of dense memory, axes of extent 1 included."""
    if not x.is_contiguous():
        return False
    shape = x.shape
    return 1 not in shape or x.stride() == (*((shape[1] * shape[2],) if len(shape) == 3 else ()), shape[-1], 1)


def is_dense(*tensors: Tensor) -> bool:
    """Whether each lies densely on 16 bytes, axes of extent 1 included."""
    return all(packed(x) and x.data_ptr() % ALIGNMENT == 0 for x in tensors)


def pitched(x: Tensor) -> Tensor:
    """A matrix of one-byte codes itself when it is dense or its row pitch is a multiple of 16; else a copy."""
    step, unit = x.stride()
    if unit == 1 and x.data_ptr() % ALIGNMENT == 0:
        width = x.shape[1]
        if step == width or (step > width and step % ALIGNMENT == 0):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def take(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """``x.index_select(dim, rows)`` for float8 too: torch before 2.10 has no ``index`` kernel for it on a CPU.

    One-byte elements are moved as bits, so that NaN codes and -0 stay; ``rows`` may lie on any device.
    """
    index = rows.to(x.device)
    if x.element_size() == 1:
        return x.view(torch.uint8).index_select(dim, index).view(x.dtype)
    return x.index_select(dim, index)


def column_major(scale: Tensor, align: int) -> Tensor:
    """The last two axes exchanged in memory, the leading stride a multiple of ``align``, pad lanes 0."""
    m = scale.shape[-2]
    lanes = scale.new_zeros(*scale.shape[:-2], scale.shape[-1], m + (-m % align))
    view = lanes[..., :m].transpose(-1, -2)
    view.copy_(scale)
    return view


def lane_major(scale: Tensor) -> Tensor:
    """A logical ``[M, K/128]`` scale as ``[K/128, align(M, 4)]`` contiguous, in its own memory where that is so."""
    m, blocks = scale.shape
    lead = m + (-m % 4)
    ends = scale.storage_offset() + blocks * lead
    owned = ends <= scale.untyped_storage().nbytes() // scale.element_size()
    if blocks > 0 and scale.stride() == (1, lead) and scale.data_ptr() % ALIGNMENT == 0 and owned:
        return scale.as_strided((blocks, lead), (lead, 1))
    ready = scale.new_zeros(blocks, lead)
    ready[:, :m] = scale.t()
    return ready


def is_other_device(device: torch.device) -> bool:
    """Whether the ``device`` of a tensor is a GPU that is not the current one.

    A GPU's tensors know its index, a CPU's have none: to ask for the type takes eight times as long (500 ns).
    """
    return device.index is not None and device.index != fast.DEVICE()


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with the device of its first tensor current.

    Calls whose host time counts use :func:`is_other_device` directly: this wrapper costs half as much again.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        if isinstance(first, tuple):  # a record of operands begins with a tensor
            first = first[0]
        if not isinstance(first, Tensor):
            first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if is_other_device(first.device):
            with torch.cuda.device(first.device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def no_autocast_no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` without CPU autocast and without gradients; no context is entered where both are off."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return run(*args, **kwargs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def allocator(device: torch.device) -> Allocate:
    """An allocator for one call on ``device``, which must be the current one where it is a GPU.

    That of :mod:`kernels.fast` while no torch mode is active, which may count, guard or fake tensors.
    """
    if (
        fast.EMPTY is not None
        and device.index is not None  # a GPU: see is_other_device
        and not (fast.FUNCTION_MODES() or fast.DISPATCH_MODES())
        and current_config().fast_paths
    ):
        return fast.EMPTY
    return _usual(device)


def allocators(device: torch.device) -> Callable[[], Allocate]:
    """:func:`allocator` of many calls, for the configuration of the moment."""
    short, usual, functions, others = fast.EMPTY, _usual(device), fast.FUNCTION_MODES, fast.DISPATCH_MODES
    if short is None or device.index is None or not current_config().fast_paths:
        return lambda: usual
    return lambda: usual if functions() or others() else short


def _usual(device: torch.device) -> Allocate:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
