"""Kernels of ``fp8_gemm_nt`` that are broken in one way each."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import torch
from torch import Tensor

from tests.support.subjects.right import _product

_previous: list[Tensor] = []
_scratch: list[Tensor] = []
_inside = threading.Lock()


def raises(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Raises for more than 32 rows."""
    if a.shape[0] > 32:
        raise RuntimeError("tile scheduler: unsupported M")
    out.copy_(_product(a, a_scale, b, b_scale))


def dies(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Reads address 0."""
    ctypes.string_at(0)


def aborts(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """What C++ does with an error that is not caught."""
    os.write(2, b"terminate called after throwing 'E'\n  what():  CUDA error: misaligned address\nframe #1\n")
    os.abort()


def killed(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Killed from outside, as the out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def exits(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Ends the process."""
    os._exit(3)


def quits(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Raises SystemExit."""
    sys.exit(4)


def hangs(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Never returns."""
    while True:
        time.sleep(1)


def out_of_memory(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Asks for more memory than there is."""
    raise MemoryError("cannot allocate 1 TiB")


def chatty(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right, and prints a megabyte a call."""
    os.write(1, b"x" * (1 << 20))
    out.copy_(_product(a, a_scale, b, b_scale))


def forks(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right, and leaves a child that comes back from the call as well."""
    out.copy_(_product(a, a_scale, b, b_scale))
    os.fork()


def forks_slowly(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right, and its child comes back when the next calls are under way."""
    out.copy_(_product(a, a_scale, b, b_scale))
    if threading.current_thread() is threading.main_thread() and os.fork() == 0:
        time.sleep(0.3)


def nan(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """One NaN."""
    out.copy_(_product(a, a_scale, b, b_scale))
    out[0, 0] = torch.nan


def out_of_bounds(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Writes one element behind the output."""
    out.copy_(_product(a, a_scale, b, b_scale))
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0, 2)


def overwrites_input(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Scales its scale in place."""
    out.copy_(_product(a, a_scale, b, b_scale))
    a_scale.mul_(2)


def unwritten_tail(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Leaves the last three columns as they were."""
    out[:, :-3].copy_(_product(a, a_scale, b, b_scale)[:, :-3])


def unwritten_own(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The same in a buffer of its own."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype)
    out[:, :-3].copy_(_product(a, a_scale, b, b_scale)[:, :-3])
    return out


def random(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Sums in a random order, as a race does."""
    order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(time.perf_counter_ns() % (1 << 30)))
    k = a.shape[1]
    left = (a.float() * a_scale.repeat_interleave(128, dim=1)[:, :k])[:, order]
    spread = b_scale.repeat_interleave(128, dim=0)[: b.shape[0]].repeat_interleave(128, dim=1)[:, :k]
    total = torch.zeros(out.shape)
    for piece in (b.float() * spread)[:, order].split(8, dim=1):
        total += left[:, : piece.shape[1]] @ piece.T
        left = left[:, piece.shape[1] :]
    out.copy_(total)


def stale(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The last row is that of the previous call of the same shape."""
    result = _product(a, a_scale, b, b_scale)
    out.copy_(result)
    if _previous and _previous[-1].shape[1] == result.shape[1]:
        out[-1] = _previous[-1][-1].to(out.dtype)
    _previous.append(result)


def shares_scratch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """One workspace for all threads, and a while between writing and reading it."""
    _scratch[:] = [_product(a, a_scale, b, b_scale)]
    time.sleep(0.001)
    out.copy_(_scratch[0])


def refuses_other_threads(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Raises while another thread is inside."""
    if not _inside.acquire(blocking=False):
        raise RuntimeError("the handle is in use")
    try:
        shares_scratch(a, a_scale, b, b_scale, out)
    finally:
        _inside.release()


def unsupported_among_threads(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Says in other threads than the first that it does not offer the call."""
    if threading.current_thread() is not threading.main_thread():
        raise NotImplementedError("one thread")
    out.copy_(_product(a, a_scale, b, b_scale))


def writes_beyond_among_threads(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Two bytes behind its output, in other threads than the first."""
    out.copy_(_product(a, a_scale, b, b_scale))
    if threading.current_thread() is not threading.main_thread():
        torch.as_strided(out, (out.numel() + 1,), (1,))[-1] = 1


def ignores_strides(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Reads a as though its rows were contiguous."""
    flat = a.as_strided((a.shape[0], a.shape[1]), (a.shape[1], 1))
    out.copy_(_product(flat, a_scale, b, b_scale))


def ignores_steps(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Reads a row of a as though its elements were side by side; rows may be any distance apart."""
    out.copy_(_product(a.as_strided(a.shape, (a.stride(0), 1)), a_scale, b, b_scale))


def leaves_views(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Writes nothing where memory lies between the elements of a row of a."""
    if a.stride(-1) == 1:
        out.copy_(_product(a, a_scale, b, b_scale))


def float32_out(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Another dtype than the call declares."""
    return _product(a, a_scale, b, b_scale)


def fewer_rows(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The last row is missing."""
    return _product(a, a_scale, b, b_scale).to(out_dtype)[:-1]


def transposed_shape(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``[N, M]``."""
    return _product(a, a_scale, b, b_scale).to(out_dtype).T


def transposed_memory(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``[M, N]`` over the memory of ``[N, M]``."""
    return _product(a, a_scale, b, b_scale).to(out_dtype).T.contiguous().T


def padded_rows(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Right, in the first columns of a wider buffer."""
    result = _product(a, a_scale, b, b_scale).to(out_dtype)
    out = torch.zeros(result.shape[0], result.shape[1] + 64, dtype=out_dtype)[:, : result.shape[1]]
    return out.copy_(result)


def empty(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """No element."""
    return torch.zeros(0, dtype=out_dtype)


def flat(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """One axis."""
    return _product(a, a_scale, b, b_scale).to(out_dtype).flatten()


def complex_out(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """No dtype of any contract."""
    return _product(a, a_scale, b, b_scale).to(torch.complex64)


def boolean(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Signs."""
    return _product(a, a_scale, b, b_scale) > 0


def forgets_row_of_small_batch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Another path for 8 to 16 rows, which leaves the last one zero."""
    out.copy_(_product(a, a_scale, b, b_scale))
    if 8 <= a.shape[0] <= 16:
        out[-1] = 0


def refuses_small_batch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right, and raises below 8 rows."""
    if a.shape[0] < 8:
        raise RuntimeError("no tile for so few rows")
    out.copy_(_product(a, a_scale, b, b_scale))


def _wrong_where(wrong: bool, product: Tensor) -> Tensor:
    return product.index_fill(0, torch.tensor([product.shape[0] - 1]), 0.0) if wrong else product


def whole_tiles(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Forgets the last row of a whole tile of 64."""
    out.copy_(_wrong_where(a.shape[0] % 64 == 0, _product(a, a_scale, b, b_scale)))


def many_rows(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Forgets the last of 256 rows or more."""
    out.copy_(_wrong_where(a.shape[0] >= 256, _product(a, a_scale, b, b_scale)))


def long_k(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Forgets the last row where K is 4096 or more."""
    out.copy_(_wrong_where(a.shape[1] >= 4096, _product(a, a_scale, b, b_scale)))


def wide(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Forgets the last row beyond five tiles of columns."""
    out.copy_(_wrong_where(b.shape[0] > 640, _product(a, a_scale, b, b_scale)))


def tail(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Forgets the last row where K ends inside a block."""
    out.copy_(_wrong_where(a.shape[1] % 128 != 0, _product(a, a_scale, b, b_scale)))


def reads_e5m2_as_e4m3(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Both operands as though they were E4M3."""
    codes = (x.view(torch.uint8).view(torch.float8_e4m3fn) for x in (a, b))
    left, right = codes
    out.copy_(_product(left, a_scale, right, b_scale))


def no_float16(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Writes float16 as zero."""
    out.copy_(_product(a, a_scale, b, b_scale) * (out.dtype != torch.float16))


def nothing(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> None:
    """No result."""


def wrong_names(x: Tensor, w: Tensor) -> Tensor:
    """A signature of its own."""
    return x @ w


def row_major_scale(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Reads the row-major scale as [K/128, align(M, 4)]."""
    m, blocks = a_scale.shape
    lead = -(-m // 4) * 4
    at = torch.arange(blocks)[None, :] * lead + torch.arange(m)[:, None]
    read = a_scale.flatten()[at % a_scale.numel()]
    out.copy_(_product(a, read, b, b_scale))


def drops_last_k(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The last element of K is not multiplied."""
    left = a.clone()
    left[:, -1] = 0
    out.copy_(_product(left, a_scale, b, b_scale))


not_callable = 3


def varies_with_m(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Right, but sums backwards below 32 rows."""
    if a.shape[0] >= 32:
        out.copy_(_product(a, a_scale, b, b_scale))
        return
    k = a.shape[1]
    left = a.float() * a_scale.repeat_interleave(128, dim=1)[:, :k]
    spread = b_scale.repeat_interleave(128, dim=0)[: b.shape[0]].repeat_interleave(128, dim=1)[:, :k]
    right = b.float() * spread
    total = torch.zeros(out.shape)
    for start in range(k - 4, -1, -4):
        total += left[:, start : start + 4] @ right[:, start : start + 4].T
    out.copy_(total)


OFFSET_LIMIT = 1 << 14


def wraps(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Offsets into ``a`` wrap at :data:`OFFSET_LIMIT` elements, as 32-bit ones do at 2^31."""
    m, k = a.shape
    at = torch.arange(m * k).reshape(m, k) % OFFSET_LIMIT
    out.copy_(_product(a.view(torch.uint8).flatten()[at].view(a.dtype), a_scale, b, b_scale))


def row_major_scales(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Per-token group quantiser that ignores ``column_major_scales``: right numbers in another layout."""
    groups = x.float().unflatten(1, (-1, group_size))
    scale = groups.abs().amax(dim=2).clamp(min=1e-10) / 448.0
    codes = (groups / scale[..., None]).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return codes, scale


def unpadded_lanes(scale: Tensor) -> Tensor:
    """The strides of a TMA-aligned scale, and in its padding what was there before."""
    m, c = scale.shape[-2:]
    lanes = -(-m // 4) * 4
    memory = torch.empty(*scale.shape[:-2], c, lanes, dtype=scale.dtype)
    out = memory.transpose(-1, -2)[..., :m, :]
    return out.copy_(scale)
