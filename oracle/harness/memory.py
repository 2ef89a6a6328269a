"""Guard zones around tensors, and poison in memory that is not yet written.

A guarded tensor lies in the middle of a larger byte buffer whose ends hold the poison: a write past an end changes it,
and a read past an end brings NaN into the result. The poison is a NaN in every float format of the suite;
there are two of them, and an element that holds the first after one run and the second after another was never
written. :class:`Poisoning` gives the same treatment to tensors that a kernel allocates through Python.

Not covered: allocations inside compiled code (on the CPU the worker's ``MALLOC_PERTURB_`` fills those with 0x7F bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GUARD = 1024  # bytes on either side
POISONS = ((0x7F, 0x7FD5), (0xFF, 0xFFB3))  # one byte, two bytes; wider types repeat the two bytes


@dataclass(frozen=True)
class Guarded:
    """A tensor in the middle of ``buffer``; ``before`` holds the guard zones as they were at first."""

    name: str
    tensor: Tensor
    buffer: Tensor
    before: Tensor

    def inside(self) -> Tensor:
        """The bytes between the guard zones, row padding included."""
        return self.buffer[GUARD:-GUARD]

    def damage(self) -> str | None:
        """Where the guard zones were written, or None."""
        bad = torch.nonzero(_ends(self.buffer) != self.before)[:, 0].tolist()
        left, right = [b - GUARD for b in bad if b < GUARD], [b - GUARD for b in bad if b >= GUARD]
        where = []
        if left:
            where.append(f"{len(left)} bytes before its start (from {min(left)})")
        if right:
            where.append(f"{len(right)} bytes behind its end (up to +{max(right)})")
        return f"{self.name}: {' and '.join(where)}" if where else None


def guarded(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    poison: int,
    stride: Sequence[int] | None = None,
) -> Guarded:
    """A poisoned tensor of this shape and stride (default: contiguous) between guard zones."""
    stride = _contiguous(shape) if stride is None else tuple(stride)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    size = dtype.itemsize
    length = -(-extent * size // 16) * 16
    buffer = torch.empty(2 * GUARD + length, dtype=torch.uint8, device=device)
    fill(buffer, size, poison)
    view = buffer[GUARD : GUARD + extent * size].view(dtype).as_strided(tuple(shape), stride, GUARD // size)
    buffer = buffer[: 2 * GUARD + extent * size]  # without what an odd extent is rounded up by
    return Guarded(name, view, buffer, _ends(buffer))


def placed(name: str, source: Tensor, device: torch.device | str, *, poison: int, lead: int = 0) -> Guarded:
    """A guarded copy of ``source``; ``lead`` extra elements at the end of every row, left poisoned."""
    shape, stride = tuple(source.shape), tuple(source.stride())
    dense = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) == source.numel()  # in any order of axes
    if source.dim() >= 2 and (lead or not dense):
        transposed = source.dim() == 2 and stride[0] == 1 and stride[1] != 1
        stride = (1, shape[0] + lead) if transposed else _contiguous((*shape[:-1], shape[-1] + lead))
    found = guarded(name, shape, source.dtype, device, poison=poison, stride=stride)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.dtype.itemsize]
    found.tensor.view(bits).copy_(source.view(bits))
    return found


def fill(buffer: Tensor, size: int, poison: int) -> None:
    """Poison a byte buffer for elements of ``size`` bytes."""
    one, two = POISONS[poison]
    if size == 1:
        buffer.fill_(one)
        return
    buffer[0::2], buffer[1::2] = two & 0xFF, two >> 8


def is_poison(x: Tensor, poison: int) -> Tensor:
    """Which elements of ``x`` hold the poison in all their bytes (bool, the shape of ``x``)."""
    one, two = POISONS[poison]
    size = x.dtype.itemsize
    bits = x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).reshape(*x.shape, size)
    pattern = [one] if size == 1 else [two & 0xFF, two >> 8] * (size // 2)
    return (bits == torch.tensor(pattern, dtype=torch.uint8, device=x.device)).all(dim=-1)


class Poisoning(TorchFunctionMode):
    """While active, tensors that Python code leaves uninitialised are poisoned and guarded."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self.poison = poison
        self.made: list[Guarded] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _EMPTY or not isinstance(made, Tensor) or made.device.type == "meta" or made.requires_grad:
            return made
        if made.layout != torch.strided or made.is_pinned() or made.numel() == 0:
            return made
        name = f"buffer {len(self.made)} {list(made.shape)}"
        found = guarded(name, made.shape, made.dtype, made.device, poison=self.poison, stride=made.stride())
        self.made.append(found)
        return found.tensor


_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


def _ends(buffer: Tensor) -> Tensor:
    return torch.cat([buffer[:GUARD], buffer[-GUARD:]])


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= extent
    return tuple(reversed(stride))
