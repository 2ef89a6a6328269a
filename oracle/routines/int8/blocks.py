"""Contracts of int8 products under scales of blocks, and of QServe's 4-bit weights under two scales.

``w8a8_block_int8_matmul``       one scale for 128 columns of a row of a, one for 128x128 of b
``qserve_w4a8_per_chn_gemm``     unsigned 4-bit weights; a zero point of each column is taken out behind the sum
``qserve_w4a8_per_group_gemm``   4-bit weights made int8 by an int8 scale and zero point of 128 rows

Sums of int8 products are exact in int32. What follows is float32, each operation rounded or fused with the next: the
output lies between the results of these orders.

NaN and infinities of scales: nothing is claimed of rows and columns that have them.
Source: vLLM 0.20.2 int8_utils.py; sglang-kernel 0.4.4 csrc/gemm/qserve_w4a8_per_chn_gemm.cu,
qserve_w4a8_per_group_gemm.cu. Not covered: sums beyond int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.product import ETA, U, may_overflow
from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode, of_dtype
from oracle.numbers.rounding import f32
from oracle.routines.base import F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, positive, register
from oracle.routines.int8.contract import INT8
from oracle.routines.traits import Kind
from oracle.truth.layout import ceil_div
from oracle.truth.moe import nearest
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Sets, mostly_zero, rounded_to

F16 = (torch.float16,)
GROUP, TILE = 128, 32
"""Rows of K that share a scale of QServe's groups; rows and columns of its tiles."""


class Scaled(Contract):
    """An exact sum, then operations of float32, rounded once to the output's dtype, infinite beyond its range."""

    section = "GEMM"
    dispatched = False
    shapes: ClassVar[Mapping[str, str]] = {"out": "[M, N]"}

    def store(self, inputs: Inputs, options: Options) -> torch.dtype:
        """The dtype of the output."""
        return torch.float16

    def ends(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        """The usual float32 result, the least and the largest: float64 ``[M, N]`` each."""
        raise NotImplementedError

    def reference(self, inputs: Inputs, **options: object) -> Tensor:
        """The usual order of the operations, rounded once."""
        resolved = self.check(inputs, options)
        return rounded_to(self.ends(inputs, resolved)[0], self.store(inputs, resolved))

    def outputs(self, call: Call) -> dict[str, Out]:
        shape = tuple(self.ends(call.inputs, call.resolved)[0].shape)
        return {"out": Out(shape, (self.store(call.inputs, call.resolved),))}

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        def make() -> tuple[dict[str, Admissible], str]:
            usual, low, high = self.ends(call.inputs, call.resolved)
            fmt = of_dtype(self.store(call.inputs, call.resolved))
            open_ = ~torch.isfinite(usual) | may_overflow(torch.maximum(low.abs(), high.abs()))
            low, high, due = (nearest(torch.nan_to_num(x, 0.0, 0.0, 0.0), fmt) for x in (low, high, usual))
            return {"out": Admissible(low, high, due, open=open_)}, "exact sums of int8, then float32"

        return [Elements(make, mistrust=lambda outputs: mostly_zero(decode(outputs["out"])))]


@register
class BlockInt8Matmul(Scaled):
    """``out = sum over blocks g of K of (sum over k in g of a b) a_scale[m, g] b_scale[n // B, g]``, B and the blocks
    the ``block_size``: each block's sum exact, its products with the scales and the sum over blocks in float32. A block
    may be cut into pieces of 32 columns or more."""

    name = "w8a8_block_int8_matmul"
    summary = "int8 product with scales of blocks of both operands"
    source = "vLLM 0.20.2 quantization/utils/int8_utils.py w8a8_block_int8_matmul"
    inputs = (
        TensorSpec("A", Kind.CODES, INT8, ("M", "K"), "codes"),
        TensorSpec("B", Kind.CODES, INT8, ("N", "K"), "codes of the weight"),
        TensorSpec("As", Kind.SCALES, F32, None, "[M, ceil(K / block_k)]"),
        TensorSpec("Bs", Kind.SCALES, F32, None, "[ceil(N / block_n), ceil(K / block_k)]"),
    )
    options = (
        OptionSpec("block_n", GROUP, None, "rows of B that share a scale"),
        OptionSpec("block_k", GROUP, None, "columns that share a scale"),
        OptionSpec("output_dtype", torch.float16, (torch.float16, torch.bfloat16, torch.float32), "dtype of out"),
    )

    def store(self, inputs: Inputs, options: Options) -> torch.dtype:
        """As the option says."""
        dtype: torch.dtype = options["output_dtype"]
        return dtype

    def refuse(self, inputs: Inputs, options: Options) -> None:
        (m, k), n = inputs["A"].shape, inputs["B"].shape[0]
        rows, columns = positive(options, "block_n"), positive(options, "block_k")
        for name, due in (("As", (m, ceil_div(k, columns))), ("Bs", (ceil_div(n, rows), ceil_div(k, columns)))):
            if tuple(inputs[name].shape) != due:
                raise ShapeError(f"{name} has shape {list(inputs[name].shape)}; pass {list(due)}")
        if columns % TILE:
            raise OptionError(f"block_k={columns}; pass a multiple of {TILE}")

    def ends(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        """The exact sum, less and plus ``n u`` of the magnitudes of its pieces, ``n`` their number and 3. Raises
        OptionError."""
        block, rows = positive(options, "block_k"), positive(options, "block_n")
        a, b = inputs["A"].to(torch.float64), inputs["B"].to(torch.float64)
        a_scale = decode(inputs["As"])
        b_scale = decode(inputs["Bs"]).repeat_interleave(rows, 0)[: b.shape[0]]
        total = a.new_zeros(a.shape[0], b.shape[0])
        size, pieces = torch.zeros_like(total), ceil_div(a.shape[1], TILE)
        for start in range(0, a.shape[1], TILE):
            part = a[:, start : start + TILE] @ b[:, start : start + TILE].t()
            part = part * a_scale[:, start // block, None] * b_scale[None, :, start // block]
            total, size = total + part, size + part.abs()
        n = pieces + 3
        slack = n * U / (1 - n * U) * (1 + 2.0**-20) * size + n * ETA
        return f32(total), total - slack, total + slack


def of_packed(kernel: Tensor) -> Tensor:
    """Codes, float64 ``[N, K]``, of QServe's bytes ``kernel`` ``[N, K / 2]``, int8. Byte ``[r, p, h, b, q]`` of a tile
    of 32 rows and 32 columns has the codes of rows ``8 b + r`` (low nibble) and ``16 + 8 b + r`` of column ``16 h +
    4 p + q``."""
    n, k = kernel.shape[0], 2 * kernel.shape[1]
    raw = kernel.view(torch.uint8).reshape(n // TILE, k // TILE, 8, 4, 2, 2, 4)
    nibbles = torch.stack([raw & 15, raw >> 4])  # [half, N', K', r, p, h, b, q]
    return nibbles.permute(1, 0, 6, 3, 2, 5, 4, 7).reshape(n, k).to(torch.float64)


def of_threads(x: Tensor) -> Tensor:
    """``x`` ``[G, N]``, int8, by column: column ``8 s + r`` of every 32 lies at ``4 r + s``; float64 ``[G, N]``."""
    return x.reshape(x.shape[0], -1, 8, 4).transpose(2, 3).reshape(x.shape).to(torch.float64)


class Qserve(Scaled):
    """Weights are bytes of two codes in tiles of 32x32; see :func:`of_packed`."""

    def refuse(self, inputs: Inputs, options: Options) -> None:
        (n, half), k = inputs["kernel"].shape, inputs["in_feats"].shape[1]
        if 2 * half != k or k % TILE or n % TILE:
            raise ShapeError(f"kernel is [{n}, {half}], in_feats has K={k}: half of it, both multiples of {TILE}")

    def orders(self, total: Tensor, inputs: Inputs) -> list[Tensor]:
        """The float32 results ``[M, N]`` of the operations on ``total`` ``[M, N]`` in the orders of a compiler, the
        usual one first."""
        raise NotImplementedError

    def weight(self, inputs: Inputs) -> Tensor:
        """Int8 weights, float64 ``[N, K]``."""
        return of_packed(inputs["kernel"])

    def ends(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        """The ends of all orders."""
        total = f32(inputs["in_feats"].to(torch.float64) @ self.weight(inputs).t())
        all_of = torch.stack(self.orders(total, inputs))
        return all_of[0], all_of.amin(dim=0), all_of.amax(dim=0)


FEATURES = TensorSpec("in_feats", Kind.CODES, INT8, ("M", "K"), "codes")
KERNEL = TensorSpec("kernel", Kind.CODES, INT8, ("N", "P"), "two 4-bit codes a byte, P = K / 2")
OF_ROWS = TensorSpec("ascales", Kind.SCALES, F16, ("M",), "of rows")
OF_COLUMNS = TensorSpec("wscales", Kind.SCALES, F16, ("N",), "of columns")


@register
class QservePerChannel(Qserve):
    """``out = sum * wscales[n] * ascales[m] - w_szs[n] * a_ssums[m]`` in float32, codes 0 to 15; the last product
    may be fused with the subtraction."""

    name = "qserve_w4a8_per_chn_gemm"
    summary = "int8 activations times unsigned 4-bit weights, scales and a zero point of each column"
    source = "sglang-kernel 0.4.4 csrc/gemm/qserve_w4a8_per_chn_gemm.cu"
    inputs = (
        FEATURES, KERNEL, OF_COLUMNS, OF_ROWS,
        TensorSpec("w_szs", Kind.SCALES, F16, ("N",), "zero point of a column times its scale"),
        TensorSpec("a_ssums", Kind.WEIGHTS, F16, ("M",), "sum of a row before it was quantised"),
    )  # fmt: skip  # inputs that have a name

    def orders(self, total: Tensor, inputs: Inputs) -> list[Tensor]:
        """Results ``[M, N]``, float32, of ``total`` ``[M, N]``: two; products of float16 are exact in float32."""
        column, row, zero, mean = (decode(inputs[n]) for n in ("wscales", "ascales", "w_szs", "a_ssums"))
        part, taken = f32(total * column[None, :]), zero[None, :] * mean[:, None]
        return [f32(f32(part * row[:, None]) - taken), f32(part * row[:, None] - taken)]


@register
class QservePerGroup(Qserve):
    """The weight is ``code * scales_i8[k // 128, n] + zeros[k // 128, n]``, which int8 holds; ``out = f32(sum *
    f32(wscales[n] * ascales[m]))``. Columns of ``scales_i8`` and ``zeros`` are in the order of :func:`of_threads`."""

    name = "qserve_w4a8_per_group_gemm"
    summary = "int8 activations times 4-bit weights that an int8 scale and zero point of 128 rows make int8"
    source = "sglang-kernel 0.4.4 csrc/gemm/qserve_w4a8_per_group_gemm.cu"
    inputs = (
        FEATURES, KERNEL,
        TensorSpec("zeros", Kind.CODES, INT8, ("G", "N"), "are added to the scaled codes"),
        TensorSpec("scales_i8", Kind.SCALES, INT8, ("G", "N"), "multiply the codes"),
        OF_COLUMNS, OF_ROWS,
    )  # fmt: skip  # inputs that have a name

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["in_feats"].shape[1] != GROUP * (g := inputs["zeros"].shape[0]):
            raise ShapeError(f"zeros has {g} rows for K={inputs['in_feats'].shape[1]}; a group has {GROUP} rows of K")
        weight = self.weight(inputs)
        if bool((weight < -128).any()) or bool((weight > 127).any()):
            raise InputError(f"weights reach from {int(weight.min())} to {int(weight.max())}; int8 must hold them")

    def weight(self, inputs: Inputs) -> Tensor:
        """Codes times their scale plus their zero point."""
        scale, zero = (of_threads(inputs[n]).t().repeat_interleave(GROUP, 1) for n in ("scales_i8", "zeros"))
        return of_packed(inputs["kernel"]) * scale + zero

    def orders(self, total: Tensor, inputs: Inputs) -> list[Tensor]:
        """One ``[M, N]``, float32, of ``total`` ``[M, N]``: a product of two float16 scales is exact in float32."""
        return [f32(total * (decode(inputs["wscales"])[None, :] * decode(inputs["ascales"])[:, None]))]
