"""Whole-kernel schedules: an instruction, where its chain is interrupted, and what happens to the scales.

A schedule is built from few parts::

    chain      c_{i+1} = instruction(a, b, c_i) over `interval` products (the whole K when None), from c = 0
    promotion  how a finished chain joins the float32 sum (NONE: there is one chain and its result is the sum)
    epilogue   how scales that were not used in the promotion multiply the sum
    bias       fma(outer scale, inner, bias), or a separate addition
    store      float32 rounded to nearest even into the output dtype

Sources: outputs captured on an H200 (DeepGEMM, FlashInfer, vLLM CUTLASS, cuBLASLt and PyTorch's CUTLASS kernels), the
published sources of these kernels, and the instruction table. ``status`` says which were checked here.

    split      how K is cut into partial sums, each computed by the lines above from zero, then added in float32

``promoteN`` has chains of N products, whatever N: ``sm90.promote64.scale_after`` is ``sm90.promote128.scale_after``
with another interval. ``rescaled128`` promotes nothing: between blocks of 128 its one chain is multiplied by the ratio
of their scales, a ``div.full`` (:mod:`oracle.numbers.fast_math`).

A split schedule is named after the one that its parts follow: ``sm90.chain.split3`` (three parts, as even as tiles of
128 allow), ``sm90.chain.split3x64`` (tiles of 64), ``sm90.chain.interleaved2x64`` (tile ``t`` goes to part
``t mod 2``), ``sm90.chain.cut1024+5120`` (three parts, cut at these k, as stream-K leaves them). A kernel that swaps
a and b changes no sum: it changes the order of the scales, which the epilogues name.

Not covered: partial sums that are added in an order that the launch decides (atomics; ``<schedule>.split`` bounds
them), the float32 ``C`` operand of accumulating GEMMs, activation epilogues.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from oracle.errors import NumericsError, among
from oracle.extensions import added
from oracle.tensorcore.instructions import INSTRUCTIONS, Instruction, Status, arches, instruction

if TYPE_CHECKING:
    from oracle.truth.gemm import ScaledProduct


ANY, SPLIT = ".any", ".split"
"""Suffixes of classes: a schedule's products in any order; its K cut into partial sums, no matter where."""


class Promotion(Enum):
    """How a finished chain ``part`` joins the float32 ``sum``; ``sa``, ``sb`` are the block's scales."""

    NONE = "sum = part"
    ADD = "sum = fl(sum + part)"
    FMA = "sum = fma(fl(sa * sb), part, sum)"
    MUL_ADD = "sum = fl(sum + fl(fl(sa * sb) * part))"
    ROW_COL_ADD = "sum = fl(sum + fl(fl(part * sa) * sb))"
    ROW_COL_FMA = "sum = fma(fl(part * sa), sb, sum)"
    COL_ROW_FMA = "sum = fma(fl(part * sb), sa, sum)"
    RESCALE = "a chain starts from fl(sum * fl(s' / s)), and its result is the sum; s = fl(sa * sb), s' the one before"


class Epilogue(Enum):
    """How the scales multiply the finished sum ``acc``; every product is rounded to float32."""

    NONE = "acc"
    COL_THEN_ROW = "sa * (sb * acc)"
    ROW_THEN_COL = "(acc * sa) * sb"
    PRODUCT = "(sa * sb) * acc"


class Scales(Enum):
    """Where the scales are applied."""

    PROMOTION = "when a chain joins the sum"
    EPILOGUE = "once, after the whole K"
    OPERANDS = "inside the instruction, as exponents"


@dataclass(frozen=True)
class Split:
    """How K is cut into partial sums; they are added in float32, in the order of their parts.

    Attributes
    ----------
    parts : int, at least 1. K has ``T = ceil(K / tile)`` tiles. Part ``s`` takes the tiles ``[s q, (s + 1) q)`` with
        ``q = ceil(T / parts)``, or, interleaved, the tiles ``t`` with ``t mod parts == s``. A part without tiles is +0.
    tile : int, products of one tile.
    cuts : where K is cut, ascending, instead of the above; a cut at or beyond K leaves an empty part.

    Source: equal to every float32 bit of cuBLASLt on an H100 and an H200 (contiguous tiles of 128, added in sequence);
    interleaved tiles are those of Triton kernels with SPLIT_K.
    """

    parts: int
    tile: int = 128
    interleaved: bool = False
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ascending = all(x < y for x, y in zip((0, *self.cuts), self.cuts, strict=False))
        if self.parts < 1 or self.tile < 1 or not ascending or (self.cuts and self.parts != len(self.cuts) + 1):
            raise NumericsError(f"{self}: parts and tile must be positive, cuts positive and ascending, one per border")

    @property
    def suffix(self) -> str:
        """What a schedule of this split adds to the name of the one that its parts follow."""
        if self.cuts:
            return ".cut" + "+".join(str(k) for k in self.cuts)
        if self.interleaved:
            return f".interleaved{self.parts}x{self.tile}"
        return f".split{self.parts}" + ("" if self.tile == 128 else f"x{self.tile}")

    @classmethod
    def named(cls, name: str) -> tuple[str, Split] | None:
        """The plain name in ``name`` and its split; None where it names none."""
        match = re.fullmatch(r"(.+)\.(split|interleaved)(\d{1,6})(?:x(\d{1,6}))?", name)
        if match:
            tile = int(match[4] or 128)
            return match[1], cls(int(match[3]), tile, match[2] == "interleaved")
        match = re.fullmatch(r"(.+)\.cut(\d{1,9}(?:\+\d{1,9})*)", name)
        if match:
            cuts = tuple(int(k) for k in match[2].split("+"))
            return match[1], cls(len(cuts) + 1, cuts=cuts)
        return None

    def pieces(self, k: int) -> list[list[tuple[int, int]]]:
        """Per part, its ranges ``(first k, end k)`` of a sum of ``k`` products, ascending."""
        if self.cuts:
            borders = [min(cut, k) for cut in (0, *self.cuts, k)]
            return [[(i, j)] if i < j else [] for i, j in zip(borders, borders[1:], strict=False)]
        tiles = -(-k // self.tile)
        if self.interleaved:
            owned = [range(s, tiles, self.parts) for s in range(self.parts)]
            return [[(t * self.tile, min(k, (t + 1) * self.tile)) for t in indices] for indices in owned]
        width = -(-tiles // self.parts) * self.tile
        edges = [(s * width, min(k, (s + 1) * width)) for s in range(self.parts)]
        return [[(i, j)] if i < j else [] for i, j in edges]


@dataclass(frozen=True)
class Schedule:
    """How a kernel computes a :class:`~oracle.truth.gemm.ScaledProduct`.

    Attributes
    ----------
    name : str, ``"sm90.promote128"``.
    interval : int or None, products of one chain; None is the whole K.
    seen_in : str, kernels known to compute so, or the source.
    fused_bias : bool, bias by one fused multiply-add with the outer scale, else by a separate addition.
    split : Split or None, how K is cut into partial sums.
    accumulator : torch.dtype, float32, or float16 where the instruction has such a result; promotions are float32.
    dequantises : bool, the kernel multiplies codes and scales first, into operands of the instruction's format.
    widens : bool, the kernel converts codes into operands of the instruction's format; scales are applied as named.
    bias_after_cast : bool, the bias is added to the stored output, and the sum rounded into its dtype again.
    flushes : bool, the epilogue's products flush subnormals, read and made, to zeros of their sign.
    """

    name: str
    instruction: Instruction
    interval: int | None
    promotion: Promotion
    epilogue: Epilogue
    seen_in: str
    status: Status
    fused_bias: bool = True
    scales_inside: bool = False
    split: Split | None = None
    accumulator: torch.dtype = torch.float32
    dequantises: bool = False
    widens: bool = False
    bias_after_cast: bool = False
    flushes: bool = False

    def __hash__(self) -> int:
        return hash(self.name)  # every launch looks something up by its schedule

    def lowered(self, product: ScaledProduct) -> ScaledProduct | None:
        """What the instruction multiplies: ``product``, or its dequantised or widened operands; None: not exactly."""
        dtype: torch.dtype | None = getattr(torch, self.instruction.operands[0], None)
        if not (self.dequantises or self.widens) or dtype is None:
            return product
        return product.dequantised(dtype) if self.dequantises else product.widened(dtype)

    def into(self, split: Split) -> Schedule:
        """This schedule with K cut by ``split``.

        Raises NumericsError: the schedule is split already, or its scales enter inside the instruction.
        """
        if self.split is not None or self.scales is Scales.OPERANDS:
            raise NumericsError(f"{self.name} cannot be split: name an unsplit schedule whose scales are outside")
        return replace(self, name=self.name + split.suffix, split=split, status=Status.LITERATURE)

    @property
    def scales(self) -> Scales:
        """Where the scales are applied."""
        if self.scales_inside:
            return Scales.OPERANDS
        after = self.promotion in (Promotion.NONE, Promotion.ADD)
        return Scales.EPILOGUE if after else Scales.PROMOTION

    @property
    def fault(self) -> str | None:
        """What a kernel of this schedule has wrong, by the catalogue's name; such a schedule has no interval."""
        if self.promotion is Promotion.RESCALE:
            return "accumulator rescaled between K blocks, never promoted"
        if self.bias_after_cast:
            return "bias added after the cast"
        return "subnormals flushed to zero" if self.flushes else None

    def why_not(self, product: ScaledProduct, *, out_dtype: torch.dtype) -> str | None:
        """Reason for which this schedule cannot compute the product, or None."""
        if out_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{self.name} stores float32, bfloat16 or float16, not {out_dtype}"
        if self.bias_after_cast and product.bias is None:
            return f"{self.name} adds a bias to the stored output, and there is none"
        dtype = getattr(torch, self.instruction.operands[0], None)
        held = self.widens and dtype is not None and product.widens(dtype)  # so that no operand need be widened here
        if (self.dequantises or self.widens) and not held:
            seen = self.lowered(product)
            if seen is None:
                done = "dequantises" if self.dequantises else "widens codes"
                return f"{self.name} {done} to {self.instruction.operands[0]}, which does not hold every operand"
            product = seen
        for side, x in (("a", product.a), ("b", product.b)):
            name = _format_name(x, self.instruction)
            if not held and name not in self.instruction.operands:
                admitted = ", ".join(self.instruction.operands)
                return f"{self.name} takes {side} in {admitted}, not {name}; schedules() lists the others"
        k, block = int(product.a.shape[1]), product.block
        blocks = int(product.a_scale.shape[1])
        if self.scales is Scales.EPILOGUE and blocks != 1:
            return (
                f"{self.name} applies the scales once after the whole K={k}, and the product has {blocks} scale "
                f"blocks of {block}; use a promoting schedule"
            )
        if self.scales is Scales.PROMOTION and self.interval is not None and blocks > 1 and block % self.interval:
            return f"{self.name} promotes every {self.interval}; scale blocks of {block} are no multiple of it"
        if self.split is not None and blocks > 1:
            borders = {k for part in self.split.pieces(k) for ends in part for k in ends if k < product.K}
            if odd := sorted(border for border in borders if border % block):
                return f"{self.name} cuts K={k} at {odd[0]}, inside a scale block of {block}"
        if self.scales is Scales.OPERANDS:
            unit = self.instruction.scale_block or 1
            if blocks > 1 and block % unit:
                return f"{self.name} has one scale for {unit} products; blocks of {block} are no multiple of it"
            if self.instruction.scale_format == "float8_e8m0fnu" and not (
                _powers_of_two(product.a_scale) and _powers_of_two(product.b_scale)
            ):
                return f"{self.name} takes UE8M0 scales: every scale must be a power of two"
        return None

    def check(self, product: ScaledProduct, *, out_dtype: torch.dtype) -> None:
        """Raise NumericsError with the reason of :meth:`why_not`, if there is one."""
        reason = self.why_not(product, out_dtype=out_dtype)
        if reason is not None:
            raise NumericsError(reason)


def get(name: str) -> Schedule:
    """The registered schedule of this name, or a split of one (:class:`Split`).

    Raises NumericsError: unknown name: the message lists the schedules of the same architecture, or the architectures.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    split = Split.named(name)
    if split is not None:
        return get(split[0]).into(split[1])
    arch, by_name = name.split(".")[0], {schedule.name: schedule for schedule in schedules()}
    if name in by_name:
        return by_name[name]
    if (at := _INTERVAL.fullmatch(name)) is not None and f"{at[1]}128{at[3]}" in by_name:
        return _every(by_name[f"{at[1]}128{at[3]}"], int(at[2]))
    same = [n for n in by_name if n.split(".")[0] == arch]
    if same:
        raise NumericsError(f"no schedule {name!r} of {arch}; {among(name, same, see='fp8-oracle list numerics')}")
    names = among(arch, dict.fromkeys(n.split(".")[0] for n in by_name))
    raise NumericsError(f"no schedule {name!r}: no model for arch {arch!r}; {names}")


def is_class(name: str) -> bool:
    """Whether ``name`` is that of a class: a schedule in any order, or split anywhere, or float32 in any order."""
    return name.endswith((ANY, SPLIT))


def of_class(name: str) -> Schedule:
    """The schedule that a name declares, or that of the class ``<schedule>.any`` or ``<schedule>.split``.

    Raises NumericsError: unknown schedule, or one that is a known fault.
    """
    schedule = get(name.removesuffix(ANY).removesuffix(SPLIT))
    if schedule.fault is not None:
        raise NumericsError(f"{name} is a known fault ({schedule.fault}); it can be identified, not declared")
    return schedule


def schedules(arch: str | None = None) -> tuple[Schedule, ...]:
    """All registered schedules, or those of one architecture.

    Raises NumericsError: ``arch`` has no model; the message lists those that have.
    """
    every = (*_REGISTRY.values(), *_foreign())
    if arch is None:
        return every
    of_arch = tuple(s for s in every if s.instruction.arch == arch)
    if not of_arch:
        raise NumericsError(f"no model for arch {arch!r}; {among(arch, arches())}")
    return of_arch


@lru_cache(maxsize=1)
def _foreign() -> tuple[Schedule, ...]:
    """Schedules that other distributions add (:mod:`oracle.extensions`)."""
    return added("fp8_oracle.schedules", Schedule, known=_REGISTRY, many=True)


def _format_name(x: torch.Tensor, inst: Instruction) -> str:
    if x.dtype == torch.float32 and "tfloat32" in inst.operands:
        return "tfloat32"
    if x.dtype in (torch.uint8, torch.int8) and "float4_e2m1fn" in inst.operands:
        return "float4_e2m1fn"
    return str(x.dtype).removeprefix("torch.")


def _powers_of_two(scale: torch.Tensor) -> bool:
    if scale.dtype == torch.float8_e8m0fnu:
        return True
    bits = scale.to(torch.float32).contiguous().view(torch.int32)
    normal = ((bits & 0x7FFFFF) == 0) & (bits > 0)
    return bool((normal | (bits == 0x400000)).all())


def _family(
    arch: str,
    mma: str,
    *,
    promoting: bool,
    seen: Mapping[str, str] | None = None,
    prefix: str = "",
    widens: bool = False,
) -> list[Schedule]:
    """The chain and promotion schedules of one instruction."""
    inst = instruction(f"{arch}.{mma}")
    seen = seen or {}
    base = Schedule(
        f"{arch}{prefix}.chain", inst, None, Promotion.NONE, Epilogue.COL_THEN_ROW, "", inst.status, widens=widens
    )
    family = [
        base,
        replace(base, name=f"{base.name}.row_then_col", epilogue=Epilogue.ROW_THEN_COL),
        replace(base, name=f"{base.name}.product", epilogue=Epilogue.PRODUCT),
    ]
    if promoting:
        name = f"{arch}{prefix}.promote128"
        promote = replace(base, name=name, interval=128, promotion=Promotion.FMA, epilogue=Epilogue.NONE)
        after = replace(promote, promotion=Promotion.ADD, epilogue=Epilogue.COL_THEN_ROW)
        family += [
            promote,
            replace(promote, name=f"{promote.name}.muladd", promotion=Promotion.MUL_ADD),
            replace(promote, name=f"{promote.name}.row_then_col", promotion=Promotion.ROW_COL_ADD),
            replace(promote, name=f"{promote.name}.row_then_col.fma", promotion=Promotion.ROW_COL_FMA),
            replace(promote, name=f"{promote.name}.col_then_row.fma", promotion=Promotion.COL_ROW_FMA),
            replace(promote, name=f"{arch}{prefix}.rescaled128", promotion=Promotion.RESCALE),
            replace(after, name=f"{promote.name}.scale_after"),
            replace(after, name=f"{promote.name}.scale_after.row_then_col", epilogue=Epilogue.ROW_THEN_COL),
            replace(after, name=f"{promote.name}.scale_after.product", epilogue=Epilogue.PRODUCT),
        ]
    return [_with_source(s, seen) for s in family]


def _every(schedule: Schedule, interval: int, seen_in: str = "") -> Schedule:
    """A ``promote128`` schedule with another interval."""
    name = schedule.name.replace("promote128", f"promote{interval}")
    status = Status.SEEN_ON_HARDWARE if seen_in else Status.LITERATURE
    return replace(schedule, name=name, interval=interval, seen_in=seen_in or schedule.seen_in, status=status)


def _with_source(schedule: Schedule, seen: Mapping[str, str]) -> Schedule:
    """Attach the kernels; a schedule that no capture shows is literature, whatever its instruction is."""
    if schedule.name in seen:
        return replace(schedule, seen_in=seen[schedule.name], status=Status.SEEN_ON_HARDWARE)
    return replace(schedule, seen_in="composed from the instruction table", status=Status.LITERATURE)


def _dequantised(arch: str, inst: str) -> Schedule:
    seen = "this project's Triton product of MX and NVFP4; kernels that dequantise to bfloat16 in registers"
    return Schedule(
        f"{arch}.bf16.dequantised",
        instruction(f"{arch}.{inst}"),
        None,
        Promotion.NONE,
        Epilogue.NONE,
        seen,
        Status.LITERATURE,
        dequantises=True,
    )


def _widened(arch: str, mma: str) -> Schedule:
    """FP8 codes as float16, promoted every 128."""
    seen = (
        "this project's Triton products before sm89, which turn codes into float16: in the PTX that Triton 3.6 makes "
        "for this capability a chain of 8 mma.m16n8k16 from zero for each block of 128, then one fma"
    )
    return Schedule(
        f"{arch}.f16.promote128",
        instruction(f"{arch}.{mma}"),
        128,
        Promotion.FMA,
        Epilogue.NONE,
        seen,
        Status.LITERATURE,
        widens=True,
    )


def _widened_blocks(arch: str, f16: str) -> Schedule:
    """MXFP8 as float16: two instructions for each block of 32, whose scales meet the partial sum."""
    seen = (
        "FlashInfer's mm_mxfp8 by CuTe DSL up to 16 rows and K = 5120 (dense_mxfp8_gemm_warp_splitk.py): a warp has a "
        "quarter of each tile of 512 (`.interleaved4x128`), of 256 where K is at most 1024 or no multiple of 512 "
        "(`.interleaved4x64`)"
    )
    base = _widened(arch, f16)
    return replace(base, name=f"{arch}.f16.promote32", interval=32, seen_in=seen)


def _inside(name: str, inst: str, seen_in: str) -> list[Schedule]:
    """One chain with the scales inside, by every reading of the instruction."""
    family = []
    for other in INSTRUCTIONS.values():
        if other.name == inst or (other.name.startswith(f"{inst}.") and other.scale_block is not None):
            suffix, source = other.name.removeprefix(inst), seen_in if other.name == inst else other.source
            base = Schedule(name + suffix, other, None, Promotion.NONE, Epilogue.NONE, source, Status.LITERATURE)
            family.append(replace(base, scales_inside=True))
    return family


_INTERVAL = re.compile(r"([^.]+(?:\.[^.]+)?\.promote)([1-9]\d{0,5})(|\..+)")
_TRITON = "PTX of Triton 3.6 for sm90"
_SEEN_SM90 = {
    "sm90.promote128.row_then_col.fma": "Triton kernels that write `sum += dot(a, b) * sa * sb`, whose last product "
    f"and sum become one fma ({_TRITON}): torchao, SGLang, FlagGems on an H200; with SPLIT_K = 2 `.split2`",
    "sm90.promote128.col_then_row.fma": "SGLang _w8a8_block_fp8_matmul_hopper with SWAP_AB, on an H200: the weight's "
    "scale is the row's there",
    "sm90.rescaled128": "LMDeploy blocked_gemm_fp8 (_gemm_fp8_tma_kernel) and FBGEMM matmul_fp8_block on an H200",
    "sm90.mma_f16.promote128.row_then_col.fma": "torchao blockwise_fp8_gemm with tiles of fewer than 64 rows, on an "
    f"H200: {_TRITON} converts codes to float16 for mma.m16n8k16 where wgmma does not fit",
    "sm90.promote128": "DeepGEMM's dense, contiguous and masked products; FlashInfer "
    "fp8_blockscale_gemm_sm90; vLLM cutlass_scaled_mm with block scales; torch F.scaled_mm 1x128 x 128x128; this "
    "project's Triton product (tl.dot over 128, then tl.fma)",
    "sm90.promote128.scale_after": "torch._scaled_mm with use_fast_accum=False, row-wise "
    "(captured with unit scales: the order of the scales is not shown)",
    "sm90.promote128.scale_after.product": "torch._scaled_mm with use_fast_accum=False, per tensor: 960 calls on an "
    "H200, from K = 7168 with float32 output also split in 2 to 6 parts",
    "sm90.chain": "torch._scaled_mm with use_fast_accum=True, row-wise (captured with unit "
    "scales: the order is not shown); reported for vLLM cutlass_scaled_mm per tensor, token, channel",
    "sm90.chain.product": "torch._scaled_mm with use_fast_accum=True, per tensor: 960 calls on an H200, from K = 7168 "
    "also split in 2 to 6 parts",
    "sm90.chain.row_then_col": "vLLM cutlass_scaled_mm per token and channel with bias, captured at M = 16 "
    "(its small-M kernels exchange the operands, so the row scale comes first); torch._scaled_grouped_mm",
}

_TABLE: tuple[Schedule, ...] = (
    *_family("sm90", "wgmma.fp8", promoting=True, seen=_SEEN_SM90),
    *_family("sm90", "mma.fp8", promoting=True, prefix=".mma_sync"),
    *_family("sm90", "mma.f16x2", promoting=True, prefix=".mma_f16", seen=_SEEN_SM90, widens=True),
    *_family("sm90", "wgmma.bf16", promoting=False, prefix=".bf16"),
    _dequantised("sm90", "wgmma.bf16"),
    *_family("sm90", "wgmma.f16", promoting=False, prefix=".f16"),
    *_family("sm90", "wgmma.tf32", promoting=False, prefix=".tf32"),
    *_family("sm70", "mma.f16", promoting=False, prefix=".f16"),
    *_family("sm75", "mma.f16", promoting=False, prefix=".f16"),
    *_family("sm80", "mma.bf16", promoting=False, prefix=".bf16"),
    _dequantised("sm80", "mma.bf16"),
    *_family("sm80", "mma.f16", promoting=False, prefix=".f16"),
    _widened("sm80", "mma.f16x2"),
    *_family("sm80", "mma.tf32", promoting=False, prefix=".tf32"),
    *_family("sm86", "mma.bf16", promoting=False, prefix=".bf16"),
    _dequantised("sm86", "mma.bf16"),
    *_family("sm86", "mma.f16", promoting=False, prefix=".f16"),
    _widened("sm86", "mma.f16x2"),
    *_family("sm89", "mma.fp8", promoting=True),
    *_family("sm89", "mma.bf16", promoting=False, prefix=".bf16"),
    _dequantised("sm89", "mma.bf16"),
    *_family("sm89", "mma.f16", promoting=False, prefix=".f16"),
    *_family("sm100", "tcgen05.f8f6f4", promoting=True),
    *_inside("sm100.chain_ue8m0", "sm100.tcgen05.mxf8f6f4", "DeepGEMM sm100 1D1D: accumulator in TMEM over all of K"),
    *_inside("sm100.chain_mxf4", "sm100.tcgen05.mxf4", "tcgen05 block-scaled FP4"),
    *_inside("sm100.chain_nvf4", "sm100.tcgen05.nvf4", "tcgen05 block-scaled FP4 with UE4M3 scales of 16"),
    *_family("sm100", "mma.fp8", promoting=True, prefix=".mma_sync"),
    _widened_blocks("sm100", "tcgen05.f16"),
    *_family("sm100", "tcgen05.bf16", promoting=False, prefix=".bf16"),
    *_family("sm120", "mma.f8f6f4", promoting=True),
    *_inside("sm120.chain_ue8m0", "sm120.mma.mxf8f6f4", "mma.sync block-scaled FP8"),
    *_inside("sm120.chain_mxf4", "sm120.mma.mxf4", "mma.sync block-scaled FP4"),
    *_inside("sm120.chain_nvf4", "sm120.mma.nvf4", "mma.sync block-scaled FP4 with UE4M3 scales of 16"),
    *_inside("sm103.chain_mxf4.k96", "sm103.tcgen05.mxf4.k96", "tcgen05 block-scaled FP4, 96 products a step"),
    *_inside(
        "sm103.chain_nvf4.k96",
        "sm103.tcgen05.nvf4.k96",
        "FlashInfer mm_fp4 by CUTLASS on sm103, tuned tactics with tiles 768 deep, where the output lies on 32 bytes",
    ),
    *_family("gfx942", "mfma.fp8", promoting=True),
    *_family("gfx942", "mfma.bf16", promoting=False, prefix=".bf16"),
    *_family("gfx942", "mfma.f16", promoting=False, prefix=".f16"),
    *_family("gfx90a", "mfma.bf16_1k", promoting=False, prefix=".bf16"),
    *_family("gfx90a", "mfma.f16", promoting=False, prefix=".f16"),
    *_family("gfx908", "mfma.bf16", promoting=False, prefix=".bf16"),
    *_family("gfx908", "mfma.f16", promoting=False, prefix=".f16"),
)

_BY_NAME = {s.name: s for s in _TABLE}
_FURTHER: tuple[Schedule, ...] = (
    _every(
        _BY_NAME["sm90.promote128.scale_after.product"],
        32,
        "FBGEMM _kernel_matmul_fp8_row_no_fast_acc with BLOCK_K = 32, `sum += dot(a, b)`, on an H200",
    ),
    replace(
        _BY_NAME["sm90.chain.row_then_col"],
        name="sm90.chain.row_then_col.bias_after_cast",
        bias_after_cast=True,
        seen_in="SGLang scaled_mm_kernel and FlagGems _pertensor_or_pertoken_smm_kernel, on an H200",
        status=Status.SEEN_ON_HARDWARE,
    ),
    replace(
        _BY_NAME["sm90.chain"],
        name="sm90.chain.flushed",
        flushes=True,
        seen_in="sglang-kernel fp8_scaled_mm, on an H200: its epilogue is compiled with --use_fast_math",
        status=Status.SEEN_ON_HARDWARE,
    ),
)
"""Schedules of one kernel each."""

_REGISTRY: Mapping[str, Schedule] = MappingProxyType(_BY_NAME | {s.name: s for s in _FURTHER})
