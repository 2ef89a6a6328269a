"""Memory that the oracle and a worker share: guard zones around tensors, and poison where nothing is written yet.

A guarded tensor lies in the middle of a larger byte buffer whose ends hold the poison: a write past an end changes it,
and a read past an end brings NaN into the result. The poison is a NaN in every float format of the suite;
there are two of them, and an element that holds the first after one run and the second after another was never
written. Inputs and outputs lie in :class:`Shared` memory, which the parent owns: it puts the poison there, and after a
call it reads guard zones, inputs and outputs by itself, so that nothing of this rests on code in the kernel's process.
:class:`Poisoning` gives the same treatment to tensors that a kernel allocates through Python; those lie in the worker's
own memory, and what is said of them is the worker's word.

Not covered: allocations inside compiled code (on the CPU the worker's ``mallopt`` fills those with 0x7F bytes).
Tensors for a GPU lie there and are shared as CUDA IPC handles, where the driver offers that; else the worker copies
them to the GPU and back after the call, guard zones included.

Sources: Linux manual page memfd_create(2); torch.multiprocessing, "Sharing CUDA tensors". The poisons are derived from
the encodings of NaN in IEEE 754-2019 and in the OCP specification of FP8.

Needs nothing but torch: it is part of the worker, which runs where the rest of the oracle cannot be imported.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        """A view of the bytes between the guard zones, row padding included: uint8 ``[L]``."""
        return self.buffer[GUARD:-GUARD]

    def snapshot(self) -> Tensor:
        """A copy of the bytes between the guard zones, uint8 ``[L]``, for :meth:`changed`."""
        return self.inside().clone()

    def changed(self, before: Tensor) -> bool:
        """Whether a byte between the guard zones is another one than in ``before``, the uint8 ``[L]`` of a snapshot."""
        return not torch.equal(self.inside(), before)

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
    """A poisoned tensor of this shape and stride (default: contiguous) between guard zones, in memory of its own."""
    stride = _contiguous(shape) if stride is None else tuple(stride)
    buffer = torch.empty(_size(shape, stride, dtype), dtype=torch.uint8, device=device)
    fill(buffer, dtype.itemsize, poison)
    return _between(name, buffer, shape, stride, dtype)


@dataclass(frozen=True)
class Wanted:
    """A tensor to be laid out: a copy of ``source``, or one that is not yet written.

    What lies between the elements of a strided one is left poisoned.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    source: Tensor | None = None

    @classmethod
    def copy(cls, name: str, source: Tensor, *, lead: int = 0, step: int = 1) -> Wanted:
        """A tensor that will hold a copy of ``source`` (any shape, any dtype) with ``lead`` extra elements a row, each
        element ``step`` of them behind the last; dense layouts keep their order of axes."""
        shape, stride = tuple(source.shape), tuple(source.stride())
        dense = _extent(shape, stride) == source.numel()  # in any order of axes
        if source.dim() >= 2 and (lead or not dense):
            transposed = source.dim() == 2 and stride[0] == 1 and stride[1] != 1
            stride = (1, shape[0] + lead) if transposed else _contiguous((*shape[:-1], shape[-1] + lead))
        return cls(name, shape, tuple(step * s for s in stride), source.dtype, source)

    @classmethod
    def fresh(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> Wanted:
        return cls(name, tuple(shape), _contiguous(shape), dtype)

    @property
    def size(self) -> int:
        """Bytes with guard zones, to a multiple of what an allocator aligns to."""
        return -(-_size(self.shape, self.stride, self.dtype) // ALIGNED) * ALIGNED

    def put(self, buffer: Tensor, poison: int) -> Guarded:
        """The tensor in the first bytes of ``buffer`` (uint8 ``[L]``, at least :attr:`size` bytes), which are poisoned
        before the source is copied there."""
        buffer = buffer[: _size(self.shape, self.stride, self.dtype)]
        fill(buffer, self.dtype.itemsize, poison)
        guarded_tensor = _between(self.name, buffer, self.shape, self.stride, self.dtype)
        if self.source is not None:
            bits = _BITS[self.dtype.itemsize]
            guarded_tensor.tensor.view(bits).copy_(self.source.view(bits))
        return guarded_tensor


def placed(name: str, source: Tensor, device: torch.device | str, *, poison: int, lead: int = 0) -> Guarded:
    """A guarded copy of ``source`` (any shape, any dtype) in memory of its own; ``lead`` extra elements behind every
    row stay poisoned."""
    wanted = Wanted.copy(name, source, lead=lead)
    return wanted.put(torch.empty(wanted.size, dtype=torch.uint8, device=device), poison)


class Shared:
    """Memory of this process that another one maps as well: guarded tensors, and behind them room for results.

    Neither side can change its size, so that reading it never fails. It takes no more pages than are written. Where
    ``ipc`` works each tensor for a GPU is an allocation there of its own, and the memory here is the room alone.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.map = mmap.mmap(self.descriptor, self.size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.room = 0

    def close(self) -> None:
        """Give the memory back as soon as no tensor lies in it any more."""
        os.close(self.descriptor)

    def lay_out(
        self, wanted: Sequence[Wanted], poison: int, device: str = "cpu"
    ) -> list[tuple[Guarded, dict[str, object]]]:
        """Every tensor, and where the other process finds it; what an earlier call left in the room is gone.

        ``device`` is one whose memory both processes can open.
        """
        placed_tensors: list[tuple[Guarded, dict[str, object]]] = []
        at = 0 if device != "cpu" else sum(one.size for one in wanted)
        self.room, at = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, 0
        self.map.madvise(mmap.MADV_REMOVE, self.room, self.size - self.room)
        for one in wanted:
            facts = {"shape": list(one.shape), "stride": list(one.stride), "dtype": str(one.dtype)}
            if device == "cpu":
                placed_tensors.append((one.put(self.bytes[at : at + one.size], poison), {**facts, "offset": at}))
                at += one.size
            else:
                buffer = torch.empty(one.size, dtype=torch.uint8, device=device)
                placed_tensors.append((one.put(buffer, poison), {**facts, "handle": exported(buffer)}))
        settle(device)
        return placed_tensors


def settle(device: str) -> None:
    """Wait for what this process has enqueued: another one reads and writes the same memory on streams of its own."""
    if device != "cpu":
        torch.cuda.synchronize()


def opened(name: str, spec: Mapping[str, Any], shared: mmap.mmap) -> Guarded:
    """A tensor that another process has laid out; its storage ends with its guard zone."""
    shape, stride, dtype = spec["shape"], spec["stride"], getattr(torch, spec["dtype"].removeprefix("torch."))
    if "handle" in spec:
        buffer = imported(spec["handle"])[: _size(shape, stride, dtype)]
    else:
        buffer = torch.frombuffer(shared, dtype=torch.uint8, count=_size(shape, stride, dtype), offset=spec["offset"])
    return _between(name, buffer, shape, stride, dtype)


def carried(buffer: Guarded, device: str) -> Guarded:
    """The same bytes on a GPU, guard zones included."""
    shape, stride = tuple(buffer.tensor.shape), buffer.tensor.stride()
    return _between(buffer.name, buffer.buffer.to(device), shape, stride, buffer.tensor.dtype)


def exported(buffer: Tensor) -> list[object]:
    """The CUDA IPC handle of ``buffer`` (uint8 ``[L]``), which owns its storage on a GPU, as JSON, for a
    view in another process: :func:`imported` opens it."""
    shared = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in shared]


def imported(handle: Sequence[Any]) -> Tensor:
    """A view of the buffer of another process behind a handle, over the same memory of the GPU: uint8 ``[L]``."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # opening a handle without a context ends the process
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def fill(buffer: Tensor, size: int, poison: int) -> None:
    """Poison ``buffer`` (uint8 ``[L]``) for elements of ``size`` bytes: every element is then a NaN where its dtype has
    one."""
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
        result = func(*args, **(kwargs or {}))
        if func not in _EMPTY or not isinstance(result, Tensor) or result.device.type == "meta" or result.requires_grad:
            return result
        if result.layout != torch.strided or result.is_pinned() or result.numel() == 0:
            return result
        name = f"buffer {len(self.made)} {list(result.shape)}"
        poisoned = guarded(name, result.shape, result.dtype, result.device, poison=self.poison, stride=result.stride())
        self.made.append(poisoned)
        return poisoned.tensor


ALIGNED = 512
"""Bytes to which torch's allocator on CUDA aligns; that on the CPU aligns to 64."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


def _size(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a guarded tensor, the inside rounded up to what :func:`fill` takes."""
    return 2 * GUARD + -(-_extent(shape, stride) * dtype.itemsize // 16) * 16


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0


def _between(name: str, buffer: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Guarded:
    """The tensor between the guard zones of a buffer."""
    length = _extent(shape, stride) * dtype.itemsize
    view = buffer[GUARD : GUARD + length].view(dtype)
    buffer = buffer[: 2 * GUARD + length]  # without what an odd extent is rounded up by
    return Guarded(name, view.as_strided(tuple(shape), tuple(stride)), buffer, _ends(buffer))


def _ends(buffer: Tensor) -> Tensor:
    return torch.cat([buffer[:GUARD], buffer[-GUARD:]])


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= extent
    return tuple(reversed(stride))
