"""The narrow fused sums in CUDA C++: compiles ``fused_sums.cu`` for the GPU at hand, packs operands, launches.

Used by :mod:`oracle.tensorcore.engine_cuda` where :func:`kernels` finds that the exponents of the operands and the bits
of the instruction fit (E4M3 by E4M3 on sm89 and sm90: 13 bits). The source says why its sums are exact.
:mod:`oracle.tensorcore.cuda_source` compiles it, once a kind of sum. Not covered: what the source lists.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from oracle.numbers.formats import Format, of_dtype
from oracle.tensorcore.cuda_source import Source, why_not
from oracle.tensorcore.fused import float32_scale
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.packing import code_table, scale_mode
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ScaledProduct

TILE, THREADS = (128, 64), 128  # rows and columns of a block, and its threads: as in the source
RESULT = 1 << 25  # elements of the float32 result of one launch: 128 MiB
POWERS = 8  # bits of an exponent in the powers that the tensor cores add: 256^e
BYTE = 128  # the bit that a byte of lowest exponents carries into


@dataclass(frozen=True)
class Sums:
    """The compiled sums of one kind of instruction, for operands of two formats."""

    formats: tuple[Format, Format]
    group: int
    align_bits: int
    out_bits: int
    mode: int

    def sums(
        self, product: ScaledProduct, source: Tensor, tiles: Tensor, length: int, chunk: int, chunk_result: int
    ) -> Iterator[tuple[slice, slice, ScaledProduct, Tensor]]:
        """As :func:`oracle.tensorcore.engine_cuda.sums`: rows, columns, the product of them, its promoted sums float32.

        ``source [Kp]`` and ``tiles [T, 2]`` as there, int32, in tiles of ``length``; ``chunk`` packed elements of one
        operand are held at once, and ``chunk_result`` elements of the result are given at once.
        """
        tall, wide = TILE
        longest = max(1, chunk // max(1, source.numel()))
        width = min(product.N, max(wide, longest // wide * wide))
        height = min(product.M, max(tall, min(longest, RESULT // width) // tall * tall))
        step = max(1, chunk_result // width)
        for j in range(0, product.N, width):
            columns = slice(j, min(j + width, product.N))
            right = product.columns(columns.start, columns.stop)
            b = self._packed(right.b, source, 1)
            sb = _padded(float32_scale(right.b_scale).t(), wide)
            for i in range(0, product.M, height):
                last = min(i + height, product.M)
                left = right.rows(i, last)
                a = self._packed(left.a, source, 0)
                sa = _padded(float32_scale(left.a_scale).expand(left.M, -1).t(), tall)
                acc = torch.zeros((sa.shape[1], sb.shape[1]), dtype=torch.float32, device=sa.device)
                grid = (acc.shape[1] // wide, acc.shape[0] // tall)
                arguments = (a, sa, b, sb, tiles, tiles.shape[0], length, *acc.shape, acc)
                self._source.launch("sums", grid, THREADS, *arguments)
                for first in range(i, last, step):
                    rows = slice(first, min(first + step, last))
                    part = left if (i, last) == (rows.start, rows.stop) else right.rows(rows.start, rows.stop)
                    yield rows, columns, part, acc[rows.start - i : rows.stop - i, : right.N]

    @property
    def _part(self) -> int:
        """Bytes of a row of a ``Part``: values, lowest exponents and signs of a group, and with 8 more its powers."""
        return 4 * self.group + 2 * self.group + 2 * (self.group + 8)

    def _packed(self, codes: Tensor, source: Tensor, side: int) -> Tensor:
        """``codes [R, K]`` in packed order as bytes ``[tiles of rows, groups, bytes of a part]``."""
        codes = codes if codes.stride(1) == 1 else codes.contiguous()
        tiles, groups = -(-codes.shape[0] // TILE[side]), source.numel() // self.group
        parts = torch.empty((tiles, groups, TILE[side] * self._part), dtype=torch.uint8, device=codes.device)
        tables, zero = self._tables(side, codes.device)
        grid = (tiles * TILE[side] // 32, -(-source.numel() // 16))
        stride = ctypes.c_longlong(codes.stride(0))
        arguments = (codes.view(torch.uint8), stride, source, *tables, zero, codes.shape[0], groups, parts)
        self._source.launch(("pack_a", "pack_b")[side], grid, THREADS, *arguments)
        return parts

    @lru_cache(maxsize=8)  # noqa: B019  # frozen, and a handful a process
    def _tables(self, side: int, device: torch.device) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """Of every code its value float32, its power as the bits of a bfloat16, its lowest exponent; and a zero."""
        fmt = self.formats[side]
        value, exponent = code_table(fmt, 0, special=False)
        whole = (value * 2.0 ** -least_bit(fmt)).to(torch.int64)
        lowest = torch.log2((whole & -whole).clamp(min=1).to(torch.float64))
        power = (POWERS * (exponent.to(torch.int32) - fmt.emin) - 59 + 127) << 7
        nonzero = value != 0
        found = (
            value.to(torch.float32), torch.where(nonzero, power, 0).to(torch.int16),
            torch.where(nonzero, lowest, self._zero).to(torch.uint8),
        )  # fmt: skip
        x, y, z = (table.to(device) for table in found)
        return (x, y, z), int((~nonzero).nonzero()[0])

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

    def fits(self, length: int) -> bool:
        """Whether the encodings of the source hold every exponent of a sum of ``length`` products."""
        span = sum(fmt.emax for fmt in self.formats) - self._least_product
        top = sum(fmt.emax for fmt in self.formats) + 2 + math.ceil(math.log2(max(length, 1)))
        bits = max(fmt.emax - least_bit(fmt) for fmt in self.formats)
        return (
            self.group in (16, 32)
            and (self.group + 1) << (self.align_bits + 2) <= 1 << 22
            and self.align_bits <= self.out_bits <= 23
            and POWERS * span + 9 + 5 < 246  # of 254: exponent field of a sum of powers
            and self._zero >= max(bits, top - self.align_bits - self._least_bit)
        )

    @property
    def _source(self) -> Source:
        names = {
            "GROUP": self.group, "ALIGN": self.align_bits, "OUT": self.out_bits, "MODE": self.mode,
            "LEAST_PRODUCT": self._least_product, "LEAST_BIT": self._least_bit,
        }  # fmt: skip
        functions = (("pack_a", 0), ("pack_b", 0), ("sums", self._part * sum(TILE)))
        return Source(Path(__file__).with_name("fused_sums.cu"), tuple(names.items()), functions)


def kernels(product: ScaledProduct, schedule: Schedule, group: int) -> Sums | None:
    """The sums of ``product`` by ``schedule`` in CUDA C++, or None where Triton must do them."""
    instruction = schedule.instruction
    if why_not(product.a.device) or instruction.sum is not Sum.FUSED or instruction.align_bits is None:
        return None
    formats = (of_dtype(product.a.dtype), of_dtype(product.b.dtype))
    found = Sums(formats, group, instruction.align_bits, instruction.out_bits, scale_mode(schedule))
    return found if found.fits(product.K) else None


def least_bit(fmt: Format) -> int:
    """The exponent of the lowest bit of the least number of ``fmt``."""
    return fmt.emin - fmt.fraction_bits


def _padded(scale: Tensor, multiple: int) -> Tensor:
    """``[B, R]`` with R padded to a multiple, contiguous."""
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % multiple)).contiguous()
