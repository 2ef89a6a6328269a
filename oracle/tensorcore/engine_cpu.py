"""The CPU engine of :func:`oracle.tensorcore.predict.predict_product`: compiled, threaded, the same bits.

Rows of ``a`` are unpacked in chunks, columns of ``b`` inside the kernel; every thread takes panels of
``cpu_fused.LANES`` columns and rows of a chunk. Memory beyond operands and result stays below 256 MiB for any shape.

Needs numba (no compiler on the user's machine). Not covered, and answered by :func:`supports`: TF32 and FP4 operands,
float16 accumulators, AMD's instructions; the plain definition computes those.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.numbers.formats import Format, decode, of_dtype
from oracle.tensorcore import cpu_fused
from oracle.tensorcore.cpu_jit import codes_array, run_tasks, task_pieces
from oracle.tensorcore.engine_parts import Plan, finish, narrow_lanes, plan, supported
from oracle.tensorcore.fused import float32_scale
from oracle.tensorcore.predict import store
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ScaledProduct

CHUNK_BYTES = 1 << 26  # of unpacked rows of a
CHUNK_RESULT = 1 << 23  # elements of one float32 chunk of the result
CHUNK_EPILOGUE = 1 << 20  # elements that the epilogue holds in float64 at once


def supports(product: ScaledProduct, schedule: Schedule) -> bool:
    """Whether this engine computes ``product`` by ``schedule``."""
    return product.a.device.type == "cpu" and supported(product, schedule)


def predict(product: ScaledProduct, schedule: Schedule, *, out_dtype: torch.dtype) -> Tensor:
    """The bits of :func:`~oracle.tensorcore.predict.predict_product`, ``[M, N]`` of ``out_dtype``."""
    out = torch.empty((product.M, product.N), dtype=out_dtype, device="cpu")
    step = max(1, CHUNK_EPILOGUE // max(1, product.N))
    for start, acc in sums(product, schedule):
        for first in range(0, acc.shape[0], step):
            part = acc[first : first + step]
            rows = slice(start + first, start + first + part.shape[0])
            out[rows] = store(finish(part, product.rows(rows.start, rows.stop), schedule), out_dtype)
    return out


def sums(product: ScaledProduct, schedule: Schedule) -> Iterator[tuple[int, Tensor]]:
    """``(first row, float32 [rows, N])``: the promoted sums before the epilogue, in chunks of rows."""
    order = plan(product, schedule)
    narrow = narrow_lanes(schedule.instruction)
    kernel = cpu_fused.narrow if narrow else cpu_fused.wide
    a_values, a_exponents = _tables(of_dtype(product.a.dtype), narrow)
    b_values, b_exponents = _tables(of_dtype(product.b.dtype), narrow)
    b = codes_array(product.b)
    a_scale = float32_scale(product.a_scale).expand(product.M, -1)
    b_scale = np.ascontiguousarray(float32_scale(product.b_scale).numpy())
    source, tiles = order.source.numpy(), order.tiles.numpy()
    t, to = schedule.instruction.align_bits or 0, schedule.instruction.out_bits
    width = a_values.itemsize + a_exponents.itemsize
    step = max(1, min(CHUNK_BYTES // (width * max(1, len(source))), CHUNK_RESULT // max(1, product.N)))
    for start in range(0, product.M, step):
        stop = min(product.M, start + step)
        codes = _packed(codes_array(product.a[start:stop]), order)
        values, exponents = np.take(a_values, codes), np.take(a_exponents, codes)
        values[:, source < 0] = 0
        exponents[:, source < 0] = cpu_fused.ZERO_EXPONENT if narrow else cpu_fused.WIDE_ZERO_EXPONENT
        scale = np.ascontiguousarray(a_scale[start:stop].numpy())
        out = np.empty((stop - start, product.N), np.float32)

        def task(
            row0: int, row1: int, panel0: int, panel1: int,
            values: NDArray[Any] = values, exponents: NDArray[Any] = exponents,
            scale: NDArray[np.float32] = scale, out: NDArray[np.float32] = out,
        ) -> None:  # fmt: skip
            kernel(
                values, exponents, scale, b, b_values, b_exponents, b_scale, product.b_rows,
                source, tiles, order.group, t, to, order.mode, out, row0, row1, panel0, panel1,
            )  # fmt: skip

        run_tasks(task, task_pieces(stop - start, product.N, lanes=cpu_fused.LANES))
        yield start, torch.from_numpy(out)


def _packed(codes: NDArray[np.unsignedinteger], order: Plan) -> NDArray[np.unsignedinteger]:
    """Columns in packed order; padding repeats the last column, and the caller overwrites it."""
    return np.take(codes, order.source.numpy(), axis=1) if order.ragged else codes


@lru_cache(maxsize=16)
def _tables(fmt: Format, narrow: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Value and exponent of every code, in the lane types; exponents of NaN and infinity are any."""
    value = decode(torch.arange(1 << fmt.bits, device="cpu"), fmt)
    exponent = (torch.frexp(torch.nan_to_num(value, 1.0, 1.0, 1.0))[1].to(torch.int16) - 1).clamp(min=fmt.emin)
    exponent[value == 0] = cpu_fused.ZERO_EXPONENT if narrow else cpu_fused.WIDE_ZERO_EXPONENT
    if narrow:
        return value.to(torch.float32).numpy(), exponent.to(torch.int8).numpy()
    return value.numpy(), exponent.numpy()
