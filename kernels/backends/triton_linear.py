"""The layer's own linear layer for few rows, in Triton: one launch quantises the input and multiplies.

NVIDIA GPUs from sm80; below 32 rows, any N, K a multiple of 128; bf16 and f16. A linear layer with few rows is one pass
over its weight; its time in an eager call is that of its launches. The codes and scales are those of FlashInfer's
formula with true division (:func:`kernels.formulas.flashinfer_blocks`), the sum is that of
:mod:`kernels.backends.triton_gemm`. Where the columns are too few for every multiprocessor, K is cut into equal shares,
and a second launch adds them in their order: on sm90 the bits are ``sm90.promote128``, with ``.split2`` or ``.split4``.

The cuts, :data:`CUTS`, are those that ``tests/hardware/linear.py`` compared; nothing is tuned at run time. Under
``TRITON_INTERPRET=1`` the kernel runs on the CPU, where tests judge it.

Not covered: UE8M0 scales, AMD GPUs, a bias.

Source: FlashInfer's quantiser and DeepGEMM's sums, as above.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import fast
from ..config import current_config
from ..context import Memo
from ..fast import modes
from ..platform import current_machine
from ..records import Machine, Problem
from ..support import BLOCK, E4M3_SM, shared_memory
from ._host import allocator, allocators, is_other_device
from ._launch import ALIGNMENT, HIP, Launch, Ready, bits, imported, loads
from .declaration import Allocate, Backend, WideLinear


class Cut(NamedTuple):
    """How a product is cut and compiled.

    Attributes
    ----------
    columns : int, of one program; at most 128, so that it has one row of weight scales.
    together : int, blocks of K that are quantised before they are multiplied; 1 where codes are made of integer bits.
    stages : int, so many times ``together`` blocks of K in flight.
    warps : int.
    """

    columns: int
    together: int
    stages: int
    warps: int


CUTS: Mapping[int, Cut] = {16: Cut(128, 1, 4, 8), 32: Cut(128, 1, 4, 4)}
"""By the most rows of the input. With 1, 16 and 31 rows the layers of DeepSeek-V3 take 0.90 to 1.09 of FlashInfer's
time on an H200, weights read from memory: 13.5, 13.8 and 15.3 us for N = 4096 and K = 7168."""
MOST_PARTS = 4
"""Sums into which K is cut at most."""
LEAST_BLOCKS = 8
"""Blocks of K of one sum at least."""
SUMMED = 1024
"""Elements of one program that adds sums."""


def kernel(p: Problem, machine: Machine) -> str:
    """The kernel that runs."""
    return "linear_kernel"


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """What happens inside the launch."""
    first = ("quantise the input 1x128 inside the product",)
    return (*first, "codes to float16 in registers") if machine.sm < E4M3_SM else first


@functools.cache
def library() -> tuple[ModuleType, bool]:
    """The kernel's module, and whether it runs natively (not under the interpreter)."""
    return imported("._triton_linear", "linear_kernel")


def parts_of(n: int, k: int, columns: int, multiprocessors: int) -> int:
    """Into how many sums K is cut: the most that give every multiprocessor one program at most; it depends on no M."""
    tiles, blocks, parts = -(-n // columns), k // BLOCK, 1
    while (
        2 * parts <= MOST_PARTS
        and tiles * 2 * parts <= multiprocessors
        and blocks % (2 * parts) == 0
        and blocks // (2 * parts) >= LEAST_BLOCKS
    ):
        parts *= 2
    return parts


@functools.lru_cache(maxsize=256)
def _prepared(rows: int, cut: Cut, blocks: int, parts: int, dtype: torch.dtype, sm: int, native: bool) -> Launch:
    decode = sm < E4M3_SM or not native  # the interpreter loads no E4M3
    together = 1 if sm < E4M3_SM else math.gcd(blocks // parts, cut.together)
    room = shared_memory(sm) // (BLOCK * together * (cut.columns + rows * dtype.itemsize)) - 1
    constants = {
        "ROWS": rows,
        "COLUMNS": cut.columns,
        "PARTS": parts,
        "TOGETHER": together,
        "STAGES": max(2, min(cut.stages * cut.together // together, room)),
        "LIMIT": bits(torch.finfo(dtype).max),
        "NATIVE": native,
        "DECODE": decode,
    }
    return Launch(library()[0].linear_kernel, constants, num_warps=cut.warps)


@functools.lru_cache(maxsize=16)
def _sum(parts: int, native: bool) -> Launch:
    return Launch(library()[0].sum_kernel, {"PARTS": parts, "BLOCK": SUMMED})


def few_rows(dtype: torch.dtype, n: int, k: int) -> WideLinear:
    """The layer of a class of weights, prepared for every number of rows below 32 and for the current machine."""
    machine, native = current_machine(), library()[1]
    ways = {}
    for rows, cut in CUTS.items():
        parts = parts_of(n, k, cut.columns, machine.sms)
        start = _prepared(rows, cut, k // BLOCK, parts, dtype, machine.sm, native)
        ways[rows] = start, -(-n // cut.columns) * parts, parts
    few, many = ways[16], ways[32]
    decode = few[0].constants["DECODE"]

    def linear(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        if is_other_device(x.device):
            with torch.cuda.device(x.device):
                return linear(x, w, w_scale)
        m, allocate = x.shape[0], allocator(x.device)
        (start, programs, parts) = few if m <= 16 else many
        (x_row, unit), (w_row, w_unit) = x.stride(), w.stride()
        if unit != 1:
            x, x_row = x.contiguous(), k
        if w_unit != 1:
            w, w_row = w.contiguous(), k
        out = allocate((m, n), (n, 1), dtype)
        if m:
            sums = out if parts == 1 else allocate((parts, m, n), (m * n, n, 1), torch.float32)
            codes = w.view(torch.uint8) if decode else w
            start.here(programs, (x, codes, w_scale), (m, n, k, x_row, w_row, *w_scale.stride()), (sums,))
            if parts > 1:
                _sum(parts, native).here(-(-m * n // SUMMED), (sums, out), (m * n,))
        return out

    if HIP or decode or not current_config().fast_paths:
        return linear
    launches: Memo[tuple[object, ...], tuple[Callable[[], Allocate], int, Ready, Ready | None]] = Memo()

    def again(x: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        """As above, in half of its host time for extents and strides of an earlier call."""
        m, index, strides = x.shape[0], x.device.index, (x.stride(), w.stride(), w_scale.stride())
        key = index, modes(), m, strides
        launch, at = launches.get(key), (x.data_ptr(), w.data_ptr(), w_scale.data_ptr())
        if launch is None or fast.DEVICE() != index or (at[0] | at[1] | at[2]) % ALIGNMENT:
            out = linear(x, w, w_scale)
            (start, programs, parts), (x_strides, w_strides, scale_strides) = few if m <= 16 else many, strides
            integers = m, n, k, x_strides[0], w_strides[0], *scale_strides
            ready = start.ready(*key[:2], programs, integers, dtype, w.dtype, torch.float32)
            added = _sum(parts, native).ready(*key[:2], -(-m * n // SUMMED), (m * n,), torch.float32, dtype)
            if ready is not None and x_strides[1] == w_strides[1] == 1 and (parts == 1 or added is not None):
                launches.keep(key, (allocators(x.device), parts, ready, None if parts == 1 else added))
            return out
        allocator_now, parts, ready, added = launch
        allocate, stream = allocator_now(), fast.STREAM(index)
        out = allocate((m, n), (n, 1), dtype)
        if added is None:
            ready.begin(stream, *ready.fixed, *at, out.data_ptr(), *ready.after)
            return out
        sums = allocate((parts, m, n), (m * n, n, 1), torch.float32)
        ready.begin(stream, *ready.fixed, *at, sums.data_ptr(), *ready.after)
        added.begin(stream, *added.fixed, sums.data_ptr(), out.data_ptr(), *added.after)
        return out

    return again


BACKEND = Backend(name="triton_linear", kernel=kernel, steps=steps, missing=loads(library), few_rows=few_rows)
