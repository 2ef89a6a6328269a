"""The narrow fused sums in CUDA C++: compiles ``fused_sums.cu`` for the GPU at hand, packs operands, launches.

Used by :mod:`oracle.tensorcore.engine_cuda` where :func:`kernels` finds that the exponents of the operands and the bits
of the instruction fit (E4M3 by E4M3 on sm89 and sm90: 13 bits). The source says why its sums are exact. It needs an
NVIDIA GPU of compute capability 8.0 and the package ``cuda-bindings``, which CUDA builds of torch install; it is
compiled by NVRTC once a process and kind of sum, in about a second. Not covered: what the source lists.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.errors import NumericsError
from oracle.numbers.formats import Format, of_dtype
from oracle.tensorcore.fused import float32_scale
from oracle.tensorcore.instructions import Sum
from oracle.tensorcore.packing import code_table, scale_mode
from oracle.tensorcore.schedules import Schedule
from oracle.truth.gemm import ScaledProduct

SWITCH = "FP8_ORACLE_CUDA_SUMS"
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
                self._launch("sums", grid, arguments, self._part * sum(TILE))
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
        arguments = (codes.view(torch.uint8), codes.stride(0), source, *tables, zero, codes.shape[0], groups, parts)
        self._launch(("pack_a", "pack_b")[side], grid, arguments, 0)
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

    def _launch(self, name: str, grid: tuple[int, int], arguments: tuple[Any, ...], memory: int) -> None:
        import ctypes

        from cuda.bindings import driver

        device = next(x.device for x in arguments if isinstance(x, Tensor))
        wide = set() if name == "sums" else {1}  # a stride
        kinds = [
            ctypes.c_void_p if isinstance(x, Tensor) else ctypes.c_longlong if i in wide else ctypes.c_int
            for i, x in enumerate(arguments)
        ]
        values = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
        with torch.cuda.device(device):
            function = _compiled(self, device.index or 0)[name]
            stream = torch.cuda.current_stream(device).cuda_stream
            packed = (values, tuple(kinds))
            _checked(driver.cuLaunchKernel(function, *grid, 1, THREADS, 1, 1, memory, stream, packed, 0))


def kernels(product: ScaledProduct, schedule: Schedule, group: int) -> Sums | None:
    """The sums of ``product`` by ``schedule`` in CUDA C++, or None where Triton must do them."""
    instruction, device = schedule.instruction, product.a.device
    if (
        os.environ.get(SWITCH) == "0"
        or device.type != "cuda"
        or torch.version.hip is not None
        or importlib.util.find_spec("cuda") is None
        or importlib.util.find_spec("cuda.bindings") is None
        or torch.cuda.get_device_capability(device) < (8, 0)
        or instruction.sum is not Sum.FUSED
        or instruction.align_bits is None
    ):
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


@lru_cache(maxsize=16)
def _compiled(sums: Sums, device: int) -> dict[str, Any]:
    """The functions of the source on one device.

    Raises NumericsError: NVRTC or the driver refuses it; the message has its words.
    """
    from cuda.bindings import driver, nvrtc

    source = Path(__file__).with_name("fused_sums.cu").read_bytes()
    major, minor = torch.cuda.get_device_capability(device)
    names = {
        "GROUP": sums.group, "ALIGN": sums.align_bits, "OUT": sums.out_bits, "MODE": sums.mode,
        "LEAST_PRODUCT": sums._least_product, "LEAST_BIT": sums._least_bit,
    }  # fmt: skip
    options = [f"--gpu-architecture=sm_{major}{minor}", "--fmad=false", *(f"-D{k}=({v})" for k, v in names.items())]
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"fused_sums.cu", 0, [], []))
    words = [option.encode() for option in options]
    if nvrtc.nvrtcCompileProgram(program, len(words), words)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        said = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, said))
        raise NumericsError(f"NVRTC does not compile fused_sums.cu; {SWITCH}=0 uses Triton: {said.decode()[:2000]}")
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    module = _checked(driver.cuModuleLoadData(binary))
    found = {name: _checked(driver.cuModuleGetFunction(module, name.encode())) for name in ("pack_a", "pack_b", "sums")}
    largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(found["sums"], largest, sums._part * sum(TILE)))
    return found


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA libraries returned beside its status.

    Raises NumericsError: the status is an error.
    """
    status, *found = result
    if int(status) != 0:
        raise NumericsError(f"CUDA says {status!r}; {SWITCH}=0 in the environment uses Triton instead")
    return found[0] if found else None
