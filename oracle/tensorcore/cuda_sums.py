"""The fused sums in CUDA C++: compiles ``fused_sums.cu`` for the GPU at hand, packs operands, launches.

Used by :mod:`oracle.tensorcore.engine_cuda` where :func:`kernels` finds that the exponents of the operands fit (E4M3 by
E4M3). Instructions that keep few bits (sm89 and sm90: 13) are summed in float32, others (sm100 and sm120: 25) in
float64. The source says why its sums are exact. :mod:`oracle.tensorcore.cuda_source` compiles it, once a kind of sum.
NaN and infinities among the operands are not covered: :mod:`oracle.tensorcore.engine_cuda` leaves their rows and
columns to the definition. Nor is what the CUDA source lists.
Source: derived from :mod:`oracle.tensorcore.fused`, whose bits it gives.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from oracle.numbers.formats import Format, of_dtype
from oracle.tensorcore.cuda_source import Source, why_not
from oracle.tensorcore.fused import float32_scale
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.packing import code_table, scale_mode
from oracle.tensorcore.schedules import Epilogue, Schedule
from oracle.truth.gemm import ScaledProduct

OPERAND = 288 << 20  # bytes of a packed operand held at once
RESULT = 1 << 25  # results of one launch, where several promotions keep float32 ones between them: 128 MiB
POWERS = 8  # bits of an exponent in the powers that the tensor cores add: 256^e
BYTE = 128  # the bit that a byte of lowest exponents carries into
TABLE = 256 * 8  # bytes of a table of codes
RUNS = 4  # of 16 positions that a thread packs
_EPILOGUES = {Epilogue.NONE: 0, Epilogue.COL_THEN_ROW: 1, Epilogue.ROW_THEN_COL: 2, Epilogue.PRODUCT: 3}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Sums:
    """The compiled sums of one kind of instruction, for operands of two formats."""

    formats: tuple[Format, Format]
    group: int
    align_bits: int
    out_bits: int
    mode: int
    folds: bool

    def store(
        self,
        product: ScaledProduct,
        schedule: Schedule,
        source: Tensor,
        tiles: Tensor,
        length: int,
        promotions: int,
        out: Tensor,
    ) -> None:
        """Write the prediction of ``product`` by ``schedule`` into ``out [M, N]``, float32, bfloat16 or float16.

        ``source [Kp]`` and ``tiles [T, 2]`` as :mod:`oracle.tensorcore.engine_cuda` has them, int32, in tiles of
        ``length``, of which ``promotions`` promote.
        """
        tall, wide = self._tile
        longest = OPERAND * self.group // max(1, source.numel() * self._part)
        width = min(product.N, max(wide, longest // wide * wide))
        height = min(product.M, max(tall, min(longest, RESULT // width) // tall * tall))
        alpha = None if product.alpha is None else product.alpha.to(torch.float32).prod()
        after = (_EPILOGUES[schedule.epilogue], int(schedule.fused_bias), int(schedule.flushes), _KINDS[out.dtype])
        for j in range(0, product.N, width):
            right = product if width == product.N else product.columns(j, min(j + width, product.N))
            b, sb = self._packed(right.b, source, 1), float32_scale(right.b_scale).contiguous()
            bias = None if right.bias is None else right.bias.to(torch.float32).contiguous()
            for i in range(0, product.M, height):
                left = right.rows(i, min(i + height, product.M))
                a, sa = self._packed(left.a, source, 0), float32_scale(left.a_scale).contiguous()
                grid = (-(-right.N // wide), -(-left.M // tall))
                size = grid[0] * wide * grid[1] * tall if promotions > 1 else 0
                totals = torch.empty(size, dtype=torch.float32, device=out.device)
                to = out[i : i + left.M, j : j + right.N]
                self._source.launch(
                    "sums",
                    grid,
                    tall,
                    a,
                    b,
                    sa,
                    sa.shape[0],
                    sb,
                    right.b_rows,
                    sa.shape[1],
                    tiles,
                    tiles.shape[0],
                    length,
                    totals,
                    bias,
                    alpha,
                    *after,
                    left.M,
                    right.N,
                    ctypes.c_longlong(out.stride(0)),
                    to,
                )

    @cached_property
    def _wide(self) -> bool:
        """Whether float32 does not hold the sums of a group, but float64 must."""
        return not (self._bits < 23 and self.align_bits <= self.out_bits)

    @property
    def _bits(self) -> int:
        """Bits of the largest sum of a group, in units of its grid."""
        return math.ceil(math.log2(self.group + 1)) + self.align_bits + 2

    @cached_property
    def _tile(self) -> tuple[int, int]:
        """Rows and columns of a block, which has a thread for each of its rows: as in the source."""
        return (128, 32) if self._wide else (64, 64)

    @cached_property
    def _part(self) -> int:
        """Bytes of a row of a ``Part``: values, lowest exponents and signs of a group, and with 8 more its powers."""
        return (8 if self._wide else 4) * self.group + 2 * self.group + 2 * (self.group + 8)

    def _packed(self, codes: Tensor, source: Tensor, side: int) -> Tensor:
        """``codes [R, K]`` in packed order as bytes ``[tiles of rows, groups, bytes of a part]``."""
        codes = codes if codes.stride(1) == 1 else codes.contiguous()
        size, threads = self._tile[side], self._tile[0]
        tiles, groups = -(-codes.shape[0] // size), source.numel() // self.group
        parts = torch.empty((tiles, groups, size * self._part), dtype=torch.uint8, device=codes.device)
        table, zero = self._table(side, codes.device)
        runs = 16 * (threads // 32) * RUNS
        grid = (tiles * size // 32, -(-source.numel() // runs))
        stride = ctypes.c_longlong(codes.stride(0))
        arguments = (codes.view(torch.uint8), stride, source, table, zero, codes.shape[0], groups, parts)
        self._source.launch(("pack_a", "pack_b")[side], grid, threads, *arguments)
        return parts

    @lru_cache(maxsize=64)  # noqa: B019  # frozen, and few a process
    def _table(self, side: int, device: torch.device) -> tuple[Tensor, int]:
        """Int32 ``[256, 2]``: of every code its value and the rest, as the source has them; and a code of zero."""
        value, power, lowest = self._facts(side)
        rest = (power.to(torch.int32) & 0xFFFF) | lowest.to(torch.int32) << 16 | torch.where(value < 0, -1 << 31, 0)
        table = torch.stack([value.view(torch.int32), rest.to(torch.int32)], dim=1)
        return table.to(device), int((value == 0).nonzero()[0])

    def _facts(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of every code its value float32, its power as the bits of a bfloat16, and its lowest exponent."""
        fmt = self.formats[side]
        value, exponent = code_table(fmt, 0, special=False)
        whole = (value * 2.0 ** -least_bit(fmt)).to(torch.int64)
        lowest = torch.log2((whole & -whole).clamp(min=1).to(torch.float64))
        power = (POWERS * (exponent.to(torch.int32) - fmt.emin) - 59 + 127) << 7
        nonzero = value != 0
        return (
            value.to(torch.float32),
            torch.where(nonzero, power, 0).to(torch.int16),
            torch.where(nonzero, lowest, self._zero).to(torch.uint8),
        )

    @property
    def _zero(self) -> int:
        """The byte of a zero operand: with any other byte it carries, and two of them stay below 256."""
        return (255 - (BYTE + self.align_bits + self._least_bit - self._least_product)) // 2

    @property
    def _least_product(self) -> int:
        return sum(fmt.emin for fmt in self.formats)

    @property
    def _least_bit(self) -> int:
        return sum(least_bit(fmt) for fmt in self.formats)

    @lru_cache(maxsize=64)  # noqa: B019  # as above
    def fits(self, length: int) -> bool:
        """Whether the encodings of the source hold every exponent of a sum of ``length`` products."""
        span = sum(fmt.emax for fmt in self.formats) - self._least_product
        top = sum(fmt.emax for fmt in self.formats) + 2 + math.ceil(math.log2(max(length, 1)))
        bits = max(fmt.emax - least_bit(fmt) for fmt in self.formats)
        return (
            self.group in (16, 32)
            and self._bits < 52
            and self.out_bits <= 23
            and POWERS * span + 9 + 5 < 246  # of 254: exponent field of a sum of powers
            and self._zero >= max(bits, top - self.align_bits - self._least_bit)
        )

    @cached_property
    def _source(self) -> Source:
        names = {
            "GROUP": self.group,
            "ALIGN": self.align_bits,
            "OUT": self.out_bits,
            "MODE": self.mode,
            "LEAST_PRODUCT": self._least_product,
            "LEAST_BIT": self._least_bit,
            "WIDE": int(self._wide),
            "FOLDS": int(self.folds),
        }
        tall, wide = self._tile
        memory = max(self._part * (tall + wide) + 4 * wide, 4 * tall * (wide + 1))  # operands, then results
        functions = (("pack_a", TABLE), ("pack_b", TABLE), ("sums", memory))
        return Source(Path(__file__).with_name("fused_sums.cu"), tuple(names.items()), functions)


def kernels(product: ScaledProduct, schedule: Schedule, group: int, mode: int | None = None) -> Sums | None:
    """The sums of ``product`` by ``schedule`` in CUDA C++, or None where Triton must do them; ``mode``: how the scales
    enter, where not as the schedule says."""
    instruction = schedule.instruction
    if why_not(product.a.device) or instruction.align_bits is None:
        return None
    formats = (of_dtype(product.a.dtype), of_dtype(product.b.dtype))
    folds = instruction.sum is Sum.FUSED_THEN_ADD
    sums = _sums(
        formats,
        group,
        instruction.align_bits,
        instruction.out_bits,
        scale_mode(schedule) if mode is None else mode,
        folds,
    )
    return sums if sums.fits(product.K) else None


_sums = lru_cache(maxsize=64)(Sums)


def least_bit(fmt: Format) -> int:
    """The exponent of the lowest bit of the least number of ``fmt``."""
    return fmt.emin - fmt.fraction_bits
