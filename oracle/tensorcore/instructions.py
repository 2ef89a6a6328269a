"""What each matrix instruction computes, as one sourced table of facts.

An :class:`Instruction` says how ``d = a.b + c`` is evaluated for ``k`` products: how the products are split
into fused groups, how wide the aligner is, and how the result is rounded. The arithmetic itself is in
:mod:`oracle.tensorcore.fused`; a whole kernel is a :class:`~oracle.tensorcore.schedules.Schedule`.

Symbols: ``t`` (``align_bits``) is the number of fraction bits kept below the largest exponent of a group; every addend,
``c`` included, is truncated toward zero to a multiple of ``2^(m-t)``. ``to`` (``out_bits``) is the number of fraction
bits of the result. Exponents of products are sums of the operands' exponents and are not normalised; subnormal operands
have the fixed exponent ``emin``; products with a zero operand do not take part.

Sources: MMA-Sim (Xie et al., arXiv 2511.10909; revisions c785138, 735c9b7) · KM (Khattak and Mikaitis, ACM TACO 2025,
10.1145/3830409, and their published hardware vectors) · outputs captured from an H200 · DeepSeek-V3 report, 3.3.2 ·
Fasi et al., PeerJ CS 7:e330. ``status`` says which of these could be checked here.

Not shown by any hardware: whether, in block-scaled FP4, a group whose products sum to 0 takes part in the alignment
(two revisions of MMA-Sim differ; :func:`oracle.tensorcore.fused.block_scaled`).
Not covered: sparse instructions, float64 and integer instructions, gfx950 (no model is published), FP6 operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from oracle.errors import NumericsError


class Status(Enum):
    """How far a fact has been checked."""

    SEEN_ON_HARDWARE = "reproduces outputs captured from hardware"
    PUBLIC_VECTORS = "reproduces published hardware vectors"
    LITERATURE = "literature only"


class Sum(Enum):
    """How the products of one group meet the accumulator."""

    FUSED = "products and c aligned together, truncated toward zero, added exactly, rounded once"
    FUSED_THEN_ADD = "fused groups chained from zero, then c added by one rounding to nearest"
    BLOCK_SCALED_GROUPS = "exact sums of 16 products times the scale significands, aligned together with c"
    EXACT = "products and c added exactly, rounded once to nearest"
    TREE_FLUSH = "pairwise float32 tree to nearest, then + c, subnormals flushed to zero everywhere"
    LATE_FLOOR = "products aligned and truncated, then floored together with c, rounded to nearest"
    LATE_FLOOR_ODD_EVEN = "as LATE_FLOOR, with even and odd products summed apart"


class Order(Enum):
    """Which products of an instruction form a group."""

    SEQUENTIAL = "consecutive k"
    INTERLEAVED = "k mod 4 in {0, 1} first, then k mod 4 in {2, 3}: always two groups of k / 2"


FP8 = ("float8_e4m3fn", "float8_e5m2")
FP8_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
FP4 = ("float4_e2m1fn",)
BF16 = ("bfloat16",)
FP16 = ("float16",)
TF32 = ("tfloat32",)

NAN_FLOAT32 = 0x7FFFFFFF
NAN_FLOAT16 = 0x7FFF


@dataclass(frozen=True)
class Instruction:
    """One matrix instruction.

    Attributes
    ----------
    name, arch : str, ``"sm90.wgmma.fp8"`` and ``"sm90"``.
    operands : tuple of str, formats that ``a`` and ``b`` may have, independently of each other.
    k : int, products of one instruction (per output element).
    group : int, products of one fused step; ``k / group`` steps are chained.
    align_bits : int or None, ``t``; None where nothing is aligned (trees and exact sums).
    out_bits : int, fraction bits of the float32 result: 23, or 13 (the e8m13 accumulator).
    float16_out : bool, whether a float16 accumulator and result exists (rounded to nearest even at every step).
    """

    name: str
    arch: str
    operands: tuple[str, ...]
    k: int
    group: int
    align_bits: int | None
    out_bits: int
    source: str
    status: Status
    sum: Sum = Sum.FUSED
    order: Order = Order.SEQUENTIAL
    round_toward_zero: bool = True
    float16_out: bool = False
    flush_subnormals: bool = False
    min_exponent: int = -126
    scale_block: int | None = None
    scale_format: str | None = None
    nan_float32: int = NAN_FLOAT32
    nan_float16: int = NAN_FLOAT16
    wide_out_bits: int | None = None

    @property
    def subnormals(self) -> str:
        """What happens to subnormal operands."""
        return "flushed to zero" if self.flush_subnormals else "used, with the fixed exponent emin"


_MMASIM = "MMA-Sim c785138"
_KM = "KM vectors"
_CDNA1 = "MMA-Sim 735c9b7 and KM's CDNA1 model (MMA-Sim c785138 had a pairwise tree)"
_PUB, _LIT, _HW = Status.PUBLIC_VECTORS, Status.LITERATURE, Status.SEEN_ON_HARDWARE


def _nvidia(
    name: str, operands: tuple[str, ...], k: int, group: int, t: int, to: int, source: str, status: Status,
    *, sum: Sum = Sum.FUSED, order: Order = Order.SEQUENTIAL, float16_out: bool = False,
    scale_block: int | None = None, scale_format: str | None = None,
) -> Instruction:  # fmt: skip
    return Instruction(
        name, name.split(".")[0], operands, k, group, t, to, source, status, sum=sum, order=order,
        float16_out=float16_out, scale_block=scale_block, scale_format=scale_format,
    )  # fmt: skip


def _emulated(name: str, source: str, status: Status) -> Instruction:
    return _nvidia(
        name, FP8, 32, 16, 25, 23, source, status,
        sum=Sum.FUSED_THEN_ADD, order=Order.INTERLEAVED, float16_out=True,
    )  # fmt: skip


def _blackwell(arch: str, unit: str, mma: str) -> list[Instruction]:
    """The families that tcgen05 and sm_120's mma share."""
    issue = "DeepGEMM issue 176 (25 bits), MMA-Sim"
    return [
        _nvidia(f"{arch}.{unit}.f8f6f4", FP8, 32, 32, 25, 23, issue, _LIT, float16_out=True),
        _nvidia(f"{arch}.{unit}.mxf8f6f4", FP8, 32, 32, 25, 23, _MMASIM, _LIT,
                scale_block=32, scale_format="float8_e8m0fnu"),
        _nvidia(f"{arch}.{unit}.mxf4", FP4, 64, 64, 35, 23, _MMASIM, _LIT,
                sum=Sum.BLOCK_SCALED_GROUPS, scale_block=32, scale_format="float8_e8m0fnu"),
        _nvidia(f"{arch}.{unit}.nvf4", FP4, 64, 64, 35, 23, f"{_MMASIM}; DeepGEMM issue 176", _LIT,
                sum=Sum.BLOCK_SCALED_GROUPS, scale_block=16, scale_format="float8_e4m3fn"),
        _nvidia(f"{arch}.{mma}.f16", FP16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (B200)", _PUB, float16_out=True),
        _nvidia(f"{arch}.{mma}.bf16", BF16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (B200)", _PUB),
        _nvidia(f"{arch}.{mma}.tf32", TF32, 8, 8, 25, 23, f"{_MMASIM}; {_KM} (B200)", _PUB),
    ]  # fmt: skip


def _ampere(arch: str, source: str) -> list[Instruction]:
    return [
        _nvidia(f"{arch}.mma.f16", FP16, 16, 8, 24, 23, source, _PUB, float16_out=True),
        _nvidia(f"{arch}.mma.bf16", BF16, 16, 8, 24, 23, source, _PUB),
        _nvidia(f"{arch}.mma.tf32", TF32, 8, 4, 24, 23, source, _PUB),
    ]


def _amd(name: str, operands: tuple[str, ...], k: int, group: int, kind: Sum, source: str,
         *, t: int | None = None, wide: int | None = None, flush: bool = False) -> Instruction:  # fmt: skip
    return Instruction(
        name, name.split(".")[0], operands, k, group, t, 23, source, Status.LITERATURE, sum=kind,
        round_toward_zero=False, flush_subnormals=flush, wide_out_bits=wide,
    )  # fmt: skip


_TABLE: tuple[Instruction, ...] = (
    _nvidia("sm70.mma.f16", FP16, 4, 4, 23, 23, f"{_KM} (V100); Fasi et al.", _PUB, float16_out=True),
    _nvidia("sm75.mma.f16", FP16, 8, 8, 24, 23, f"{_MMASIM}; Fasi et al. (T4)", _LIT, float16_out=True),
    *_ampere("sm80", f"{_MMASIM}; {_KM} (A100)"),
    *_ampere("sm86", f"{_MMASIM}; {_KM} (A2)"),
    *_ampere("sm89", f"{_MMASIM}; {_KM} (Ada RTX 1000, L40S)"),
    _nvidia("sm89.mma.fp8", FP8, 32, 16, 13, 13, f"{_MMASIM}; {_KM} (Ada RTX 1000, L40S)", _PUB, float16_out=True),
    _nvidia(
        "sm90.wgmma.fp8", FP8, 32, 32, 13, 13,
        f"H200 captures; {_KM} (H100, H200, from c = 0); DeepSeek-V3 3.3.2", _HW, float16_out=True,
    ),  # fmt: skip
    _nvidia("sm90.wgmma.f16", FP16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (H100, H200)", _PUB, float16_out=True),
    _nvidia("sm90.wgmma.bf16", BF16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (H100, H200)", _PUB),
    _nvidia("sm90.wgmma.tf32", TF32, 8, 8, 25, 23, f"{_MMASIM}; {_KM} (H100, H200)", _PUB),
    _emulated("sm90.mma.fp8", f"{_KM} (H100, H200; float16 output)", _PUB),
    *_blackwell("sm100", "tcgen05", "tcgen05"),
    _emulated("sm100.mma.fp8", f"{_KM} (B200; both outputs)", _PUB),
    *_blackwell("sm103", "tcgen05", "tcgen05"),
    _emulated("sm103.mma.fp8", "as sm100: ptxas lowers mma.sync FP8 to float16", _LIT),
    *_blackwell("sm120", "mma", "mma"),
    _amd("gfx908.mfma.f16", FP16, 16, 4, Sum.EXACT, _CDNA1),
    _amd("gfx908.mfma.bf16", BF16, 8, 2, Sum.EXACT, _CDNA1),
    _amd("gfx90a.mfma.f16", FP16, 16, 4, Sum.TREE_FLUSH, _MMASIM, flush=True),
    _amd("gfx90a.mfma.bf16", BF16, 8, 2, Sum.TREE_FLUSH, _MMASIM, flush=True),
    _amd("gfx90a.mfma.bf16_1k", BF16, 16, 4, Sum.TREE_FLUSH, _MMASIM, flush=True),
    _amd("gfx942.mfma.f16", FP16, 16, 8, Sum.LATE_FLOOR, _MMASIM, t=24, wide=31),
    _amd("gfx942.mfma.bf16", BF16, 16, 8, Sum.LATE_FLOOR, _MMASIM, t=24, wide=31),
    _amd("gfx942.mfma.xf32", TF32, 8, 4, Sum.LATE_FLOOR, _MMASIM, t=24, wide=31),
    _amd("gfx942.mfma.fp8", FP8_FNUZ, 32, 16, Sum.LATE_FLOOR_ODD_EVEN, _MMASIM, t=24, wide=31),
)

INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType({i.name: i for i in _TABLE})


def instruction(name: str) -> Instruction:
    """The instruction with this name.

    Raises NumericsError: there is none; the message lists those of the same architecture, or the architectures.
    """
    if name in INSTRUCTIONS:
        return INSTRUCTIONS[name]
    arch = name.split(".")[0]
    same = [n for n in INSTRUCTIONS if n.startswith(arch + ".")]
    known = ", ".join(same) if same else "architectures: " + ", ".join(arches())
    raise NumericsError(f"no instruction {name!r}; known: {known}")


def arches() -> tuple[str, ...]:
    """Architectures with at least one instruction in the table, in table order."""
    return tuple(dict.fromkeys(i.arch for i in _TABLE))
