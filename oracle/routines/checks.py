"""Checks of single tensors and options: each refuses with a typed error that names the value and the way out.

NaN and infinity are not looked at: a check reads shapes, dtypes, strides, devices and memory, never values.

Raises InputError (no tensor, no memory), DtypeError, ShapeError, LayoutError (strides, sparse, meta) and DeviceError.

Source: derived in this file from what torch lets a tensor be.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oracle.errors import DeviceError, DtypeError, InputError, LayoutError, OptionError, ShapeError
from oracle.routines.traits import TensorSpec


def check_output(
    output: Tensor, *, name: str, shape: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse an output that cannot be judged at all: of another class, dtype, shape (any for None) or device.

    ``output`` may have any shape and dtype. Raises InputError, DtypeError, ShapeError, LayoutError, DeviceError.
    """
    _check_memory(name, output)
    if output.dtype not in dtypes:
        raise DtypeError(f"{name} has dtype {output.dtype}; expected {' or '.join(map(str, dtypes))}")
    if shape is not None and tuple(output.shape) != shape:
        raise ShapeError(f"{name} has shape {list(output.shape)}; these inputs give {list(shape)}")
    if output.device != device:
        raise DeviceError(f"{name} lies on {output.device}, the inputs on {device}; move one with .to(device)")


def positive(options: Mapping[str, object], name: str) -> int:
    """The value of an option that must be a positive integer; OptionError else."""
    value = options[name]
    if not is_positive(value):
        raise OptionError(f"{name}={quoted(value)} is not a positive integer")
    assert isinstance(value, int)
    return value


def quoted(value: object) -> str:
    """A value in a message; of anything but numbers, texts and lists of them its class: it may hold freed memory."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    plain = all(isinstance(part, (int, float, str, torch.dtype, type(None))) for part in parts)
    return f"{value!r:.80}" if plain else f"a {type(value).__name__}"


def is_positive(value: object) -> bool:
    """Whether a value is an integer above 0 (``True`` is none)."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def plain(tensor: Tensor, name: str) -> Tensor:
    """The same values as a plain tensor: no gradient, no subclass, no negation or conjugation that is still pending.

    ``tensor`` may have any shape and dtype; the result has the same shape and dtype.

    Raises InputError: the tensor is of a subclass without memory of its own (a fake or a distributed one), or its
    memory is gone. DtypeError: it is one of torch's quantised tensors. LayoutError: codes yet to be negated.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise InputError(f"{name} is a {type(tensor).__name__}, which has no values of its own; pass a plain tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        return tensor  # refused by the contract, under its name there
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.device.type != "meta":
            _check_storage(name, tensor)
        if tensor.is_neg() and tensor.element_size() == 1:
            raise LayoutError(f"{name} is {tensor.dtype} yet to be negated, which torch cannot do; pass its own codes")
        return tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()


def _check_storage(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose memory was freed or cut, which torch would read all the same."""
    if tensor.is_quantized:
        raise DtypeError(f"{name} is quantised by torch ({tensor.dtype}); pass its codes and its scale")
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needs, has = (last + 1) * tensor.element_size() if tensor.numel() else 0, tensor.untyped_storage().nbytes()
    if has < needs:
        raise InputError(f"{name} needs {needs} bytes of memory and its storage has {has}; it was freed or resized")


def _check_memory(name: str, tensor: Tensor) -> None:
    """Refuse what has no bits to look at as they stand."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise LayoutError(f"{name} is {'nested' if tensor.is_nested else tensor.layout}; pass a dense tensor")
    if tensor.is_neg() or tensor.is_conj():
        raise LayoutError(f"{name} is a view that is yet to be negated or conjugated; pass {name}.resolve_neg()")


def check_tensor(spec: TensorSpec, tensor: Tensor) -> None:
    """Refuse an input ``tensor`` (any shape and dtype) that is not as its specification says.

    Raises InputError, LayoutError, DtypeError, ShapeError.
    """
    _check_memory(spec.name, tensor)
    if tensor.device.type == "meta":
        raise LayoutError(f"{spec.name} is on {tensor.device}; pass a dense tensor with data")
    if tensor.dtype not in spec.dtypes:
        raise DtypeError(f"{spec.name} has dtype {tensor.dtype}; expected {' or '.join(map(str, spec.dtypes))}")
    if spec.dims is not None and tensor.dim() != len(spec.dims):
        raise ShapeError(
            f"{spec.name} has rank {tensor.dim()} (shape {list(tensor.shape)}); expected [{', '.join(spec.dims)}]"
        )
    if tensor.numel() == 0:
        raise ShapeError(f"{spec.name} is empty (shape {list(tensor.shape)}); there is nothing to judge")
    if spec.contiguous and not tensor.is_contiguous():
        raise LayoutError(
            f"{spec.name} is not contiguous (strides {tensor.stride()}); the oracle takes logical values, "
            f"pass {spec.name}.contiguous()"
        )
