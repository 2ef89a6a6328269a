"""What each matrix instruction computes, as one sourced table of facts.

An :class:`Instruction` says how ``d = a.b + c`` is evaluated for ``k`` products: how the products are split
into fused groups, how wide the aligner is, and how the result is rounded. The arithmetic itself is in
:mod:`oracle.tensorcore.fused`; a whole kernel is a :class:`~oracle.tensorcore.schedules.Schedule`.

Symbols: ``t`` (``align_bits``) is the number of fraction bits kept below the largest exponent of a group; every addend,
``c`` included, is truncated toward zero to a multiple of ``2^(m-t)``. ``to`` (``out_bits``) is the number of fraction
bits of the result. Exponents of products are sums of the operands' exponents and are not normalised; subnormal operands
have the fixed exponent ``emin``; products with a zero operand do not take part (block scales: see below).

Sources: MMA-Sim (Xie et al., arXiv 2511.10909; revisions c785138, 735c9b7 and release 2.1.1, which states its models
again for FP6 and for zeros) · KM (Khattak and Mikaitis, ACM TACO 2025,
10.1145/3830409, and their published hardware vectors) · outputs captured from an H200 · DeepSeek-V3 report, 3.3.2 ·
Fasi et al., PeerJ CS 7:e330. ``status`` says which of these could be checked here.

Block scales: three revisions of MMA-Sim differ in zeros (:class:`Zeros`) and of the least exponent of an
alignment, and users' probes of a B200 left ``t`` of FP4 open between 34 and 37 (DeepGEMM issue 176). Whether 16 or 32
products under one scale are summed before they are aligned, and what a sum beyond float32 becomes, is stated of no
hardware. No output of a block-scaled instruction is published. So every reading is an instruction with a name of its
own (``….counted``), and ``unshown`` names what no published output decides (``fp8-oracle fingerprint --block-scaled``
does, on a device).
Not covered: sparse instructions, float64 and integer instructions, gfx950 (no model is published).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from oracle.errors import NumericsError, among


class Status(Enum):
    """How far a fact has been checked."""

    SEEN_ON_HARDWARE = "reproduces outputs captured from hardware"
    PUBLIC_VECTORS = "reproduces published hardware vectors"
    LITERATURE = "literature only"


class Sum(Enum):
    """How the products of one group meet the accumulator."""

    FUSED = "products and c aligned together, truncated toward zero, added exactly, rounded once"
    FUSED_THEN_ADD = "fused groups chained from zero, then c added by one rounding to nearest"
    BLOCK_SCALED_GROUPS = "exact sums of 16 products (or 32) times the scale significands, aligned together with c"
    EXACT = "products and c added exactly, rounded once to nearest"
    TREE_FLUSH = "pairwise float32 tree to nearest, then + c, subnormals flushed to zero everywhere"
    LATE_FLOOR = "products aligned and truncated, then floored together with c, rounded to nearest"
    LATE_FLOOR_ODD_EVEN = "as LATE_FLOOR, with even and odd products summed apart"


class Zeros(Enum):
    """Which zeros take part in the alignment of a block-scaled instruction; an absent one has no exponent at all.

    Without block scales a product with a zero operand is absent (MMA-Sim and KM agree).
    """

    PRODUCTS = "a zero product is absent; a sum of 16 is absent where all its products are zero, or its scale is"
    SUMS = "a zero product is absent; a sum of 16 is absent where it is zero, also by cancellation"
    COUNTED = "none is absent: a zero operand and a zero c count with exponent -126, a sum with that of its scales"


class Order(Enum):
    """Which products of an instruction form a group."""

    SEQUENTIAL = "consecutive k"
    INTERLEAVED = "k mod 4 in {0, 1} first, then k mod 4 in {2, 3}: two halves, each in ascending groups"


FP8 = ("float8_e4m3fn", "float8_e5m2")
FP8_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
FP4 = ("float4_e2m1fn",)
FP6 = ("float6_e3m2fn", "float6_e2m3fn")
F8F6F4 = (*FP8, *FP6, *FP4)
"""Any two of these: PTX ISA, kinds f8f6f4 and mxf8f6f4."""
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
    min_exponent : int, least exponent of an alignment.
    zeros : Zeros, of block-scaled instructions.
    summed : int, products of one exact sum, 16 or 32 (BLOCK_SCALED_GROUPS).
    saturates : bool, whether a sum beyond float32 becomes its largest finite value, and not infinity.
    unshown : str, what no published output of hardware shows, or "".
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
    zeros: Zeros = Zeros.PRODUCTS
    summed: int = 16
    saturates: bool = False
    unshown: str = ""


_MMASIM = "MMA-Sim c785138"
_KM = "KM vectors"
_CDNA1 = "MMA-Sim 735c9b7 and KM's CDNA1 model (MMA-Sim c785138 had a pairwise tree)"
_PUB, _LIT, _HW = Status.PUBLIC_VECTORS, Status.LITERATURE, Status.SEEN_ON_HARDWARE


def _nvidia(
    name: str,
    operands: tuple[str, ...],
    k: int,
    group: int,
    t: int,
    to: int,
    source: str,
    status: Status,
    **other: Any,
) -> Instruction:
    return Instruction(name, name.split(".")[0], operands, k, group, t, to, source, status, **other)


def _emulated(name: str, source: str, status: Status) -> Instruction:
    return _nvidia(
        name,
        FP8,
        32,
        16,
        25,
        23,
        source,
        status,
        sum=Sum.FUSED_THEN_ADD,
        order=Order.INTERLEAVED,
        float16_out=True,
    )


FLOOR_FP8, FLOOR_FP4 = -133, -139
"""Least exponents of an alignment in MMA-Sim 2.1.1 (``e_zero``): of f8f6f4 kinds (KM has the same) and of FP4 kinds."""


def _block_scaled(base: Instruction) -> list[Instruction]:
    """A block-scaled instruction as MMA-Sim 2.1.1 has it, then the other readings of it, one difference each.

    An alignment of more than 36 bits is that of 36 where scales are E4M3: terms are multiples of 2**-20 and exponents
    at most 16, so nothing is lost from 36 on, and 37 has no name there.
    """
    fp4 = base.sum is Sum.BLOCK_SCALED_GROUPS
    widths = () if not fp4 else (34, 36) if base.scale_format == "float8_e4m3fn" else (34, 36, 37)
    readings = [
        base,
        replace(base, name=f"{base.name}.zero_sums", zeros=Zeros.SUMS, min_exponent=-126, source="MMA-Sim 735c9b7"),
        replace(base, name=f"{base.name}.counted", zeros=Zeros.COUNTED, min_exponent=-126, source=_MMASIM),
    ]
    if base.scale_format == "float8_e8m0fnu":
        if fp4:
            source = "PTX ISA scale_vec::2X, one scale for 32 products; MMA-Sim sums 16 whatever the block"
            readings.append(replace(base, name=f"{base.name}.sums32", summed=32, source=source))
        source = "IEEE 754 roundTowardZero, which never rounds to infinity; MMA-Sim and KM give infinity"
        readings.append(replace(base, name=f"{base.name}.saturates", saturates=True, source=source))
    issue = "DeepGEMM issue 176: 34 to 37 bits could not be told apart"
    return readings + [replace(base, name=f"{base.name}.align{t}", align_bits=t, source=issue) for t in widths]


def _blackwell(arch: str, unit: str, mma: str) -> list[Instruction]:
    """The families that tcgen05 and sm_120's mma share."""
    issue = "DeepGEMM issue 176 (25 bits), MMA-Sim"
    newest, ue8m0 = "MMA-Sim 2.1.1", {"scale_block": 32, "scale_format": "float8_e8m0fnu"}
    fp4 = {"min_exponent": FLOOR_FP4, "unshown": "zeros, least exponent, t (34 to 37), sums of 16, overflow"}
    scaled = (
        _nvidia(
            f"{arch}.{unit}.mxf8f6f4",
            F8F6F4,
            32,
            32,
            25,
            23,
            newest,
            _LIT,
            **ue8m0,
            min_exponent=FLOOR_FP8,
            unshown="zeros, least exponent, overflow, exponents of FP6 and FP4 subnormals",
        ),
        _nvidia(f"{arch}.{unit}.mxf4", FP4, 64, 64, 35, 23, newest, _LIT, sum=Sum.BLOCK_SCALED_GROUPS, **ue8m0, **fp4),
        _nvidia(
            f"{arch}.{unit}.nvf4",
            FP4,
            64,
            64,
            35,
            23,
            newest,
            _LIT,
            sum=Sum.BLOCK_SCALED_GROUPS,
            scale_block=16,
            scale_format="float8_e4m3fn",
            **fp4 | {"unshown": "zeros, t (34, 35, or 36 and more), sums of 16"},
        ),
    )
    return [
        _nvidia(
            f"{arch}.{unit}.f8f6f4",
            F8F6F4,
            32,
            32,
            25,
            23,
            issue,
            _LIT,
            float16_out=True,
            unshown="exponents of FP6 and FP4 subnormals",
        ),
        *(variant for base in scaled for variant in _block_scaled(base)),
        _nvidia(f"{arch}.{mma}.f16", FP16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (B200)", _PUB, float16_out=True),
        _nvidia(f"{arch}.{mma}.bf16", BF16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (B200)", _PUB),
        _nvidia(f"{arch}.{mma}.tf32", TF32, 8, 8, 25, 23, f"{_MMASIM}; {_KM} (B200)", _PUB),
    ]


def _deeper(base: Instruction) -> list[Instruction]:
    """An FP4 instruction of 96 products in one step, in every reading of that of 64."""
    source = f"CUTLASS mma_sm100_desc.hpp (bit 31 of the descriptor: K = 96, sm_103a); its readings as {base.source}"
    unshown = f"whether 96 products and c meet in one alignment; {base.unshown}"
    return _block_scaled(replace(base, name=f"{base.name}.k96", k=96, group=96, source=source, unshown=unshown))


def _ampere(arch: str, source: str) -> list[Instruction]:
    return [
        _nvidia(f"{arch}.mma.f16", FP16, 16, 8, 24, 23, source, _PUB, float16_out=True),
        _nvidia(f"{arch}.mma.bf16", BF16, 16, 8, 24, 23, source, _PUB),
        _nvidia(f"{arch}.mma.tf32", TF32, 8, 4, 24, 23, source, _PUB),
    ]


def _two_of_float16(arch: str, group: int, t: int, status: Status) -> Instruction:
    """FP8 codes that Triton makes float16 in place (``kWidth = 4`` in its layouts): a thread holds four consecutive k,
    of which each of two instructions takes two."""
    source = "two mma.m16n8k16 of float16 as Triton 3.6 fills their fragments; torchao's product on an H200"
    return _nvidia(f"{arch}.mma.f16x2", FP16, 32, group, t, 23, source, status, order=Order.INTERLEAVED)


def _amd(
    name: str,
    operands: tuple[str, ...],
    k: int,
    group: int,
    kind: Sum,
    source: str,
    *,
    t: int | None = None,
    wide: int | None = None,
    flush: bool = False,
) -> Instruction:
    return Instruction(
        name,
        name.split(".")[0],
        operands,
        k,
        group,
        t,
        23,
        source,
        Status.LITERATURE,
        sum=kind,
        round_toward_zero=False,
        flush_subnormals=flush,
        wide_out_bits=wide,
    )


_TABLE: tuple[Instruction, ...] = (
    _nvidia("sm70.mma.f16", FP16, 4, 4, 23, 23, f"{_KM} (V100); Fasi et al.", _PUB, float16_out=True),
    _nvidia("sm75.mma.f16", FP16, 8, 8, 24, 23, f"{_MMASIM}; Fasi et al. (T4)", _LIT, float16_out=True),
    *_ampere("sm80", f"{_MMASIM}; {_KM} (A100)"),
    _two_of_float16("sm80", 8, 24, _LIT),
    *_ampere("sm86", f"{_MMASIM}; {_KM} (A2)"),
    _two_of_float16("sm86", 8, 24, _LIT),
    *_ampere("sm89", f"{_MMASIM}; {_KM} (Ada RTX 1000, L40S)"),
    _nvidia("sm89.mma.fp8", FP8, 32, 16, 13, 13, f"{_MMASIM}; {_KM} (Ada RTX 1000, L40S)", _PUB, float16_out=True),
    _nvidia(
        "sm90.wgmma.fp8",
        FP8,
        32,
        32,
        13,
        13,
        f"H200 captures; {_KM} (H100, H200, from c = 0); DeepSeek-V3 3.3.2",
        _HW,
        float16_out=True,
    ),
    _nvidia("sm90.wgmma.f16", FP16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (H100, H200)", _PUB, float16_out=True),
    _nvidia("sm90.wgmma.bf16", BF16, 16, 16, 25, 23, f"{_MMASIM}; {_KM} (H100, H200)", _PUB),
    _nvidia("sm90.wgmma.tf32", TF32, 8, 8, 25, 23, f"{_MMASIM}; {_KM} (H100, H200)", _PUB),
    _emulated("sm90.mma.fp8", f"{_KM} (H100, H200; float16 output)", _PUB),
    _two_of_float16("sm90", 16, 25, _HW),
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

_DEEPER = [new for i in _TABLE if i.name in ("sm103.tcgen05.mxf4", "sm103.tcgen05.nvf4") for new in _deeper(i)]
INSTRUCTIONS: Mapping[str, Instruction] = MappingProxyType({i.name: i for i in (*_TABLE, *_DEEPER)})

ALIKE: Mapping[str, str] = MappingProxyType({"sm103": "sm100", "sm121": "sm120"})
"""Arches with the instructions of another, whose schedules every contract takes for them: one row an arch.

sm103 (B300): tcgen05 of sm100 for FP8 and MX, and for FP4 one of K = 96 beside that of 64, whose readings have names
of their own (``sm103.tcgen05.nvf4.k96``): a kernel says which it takes. sm121 (GB10): the mma.sync of sm120. From
CUTLASS's and PTX's targets; no published vector compares two of a pair."""


def instruction(name: str) -> Instruction:
    """The instruction with this name.

    Raises NumericsError: there is none; the message lists those of the same architecture, or the architectures.
    """
    if name in INSTRUCTIONS:
        return INSTRUCTIONS[name]
    arch = name.split(".")[0]
    same = [n for n in INSTRUCTIONS if n.startswith(arch + ".")]
    names = among(name, same) if same else f"no model for arch {arch!r}; {among(arch, arches())}"
    raise NumericsError(f"no instruction {name!r}; {names}")


def least_align_bits(i: Instruction) -> int | None:
    """The fewest alignment bits of any reading of an instruction, for the bound that holds the results of all of them;
    a reading with a name of its own (``….align36``) has its own."""
    return min(_readings(i.name, len(INSTRUCTIONS)), default=i.align_bits)


@lru_cache(maxsize=256)
def _readings(name: str, known: int) -> tuple[int, ...]:
    """The alignment bits of all readings of an instruction among the ``known`` ones."""
    same = (j for j in INSTRUCTIONS.values() if j.name == name or j.name.startswith(f"{name}.align"))
    return tuple(j.align_bits for j in same if j.align_bits is not None)


def arches() -> tuple[str, ...]:
    """Architectures with at least one instruction in the table, in table order."""
    return tuple(dict.fromkeys(i.arch for i in _TABLE))
