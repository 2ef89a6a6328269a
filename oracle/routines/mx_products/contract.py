"""Contracts of the products of MX and NVFP4: codes of 8 or 4 bits, a scale byte for each 16, 32 or 128 of them.

A call says where its scales lie by an index: ``at [R, C]`` is the place of the scale of row ``r`` and block ``c`` in
the flat memory of the scales (:class:`Side`); rows of all groups stand below one another. Every layout is such an
index, so the whole family has one way of reading, of poisoning what no scale lies in, and of reading wrongly. Truth,
prediction and judgement are those of every scaled product (:mod:`oracle.routines.products`).

Sources: FlashInfer flashinfer/gemm/gemm_base.py @fb28d7242, DeepGEMM 2.6.1 @54e2261, PyTorch
ScaledBlas.cpp @0174dfa and GroupedBlas.cpp @00d4eaf. Not covered: 6-bit operands.

NaN codes and scales stay NaN, and make NaN of every sum that they enter; placing them reads no value.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import DtypeError, InputError, LayoutError, OptionError, ShapeError
from oracle.routines.base import (
    E4M3,
    F32,
    FP8,
    INTEGERS,
    Call,
    Inputs,
    Operands,
    Options,
    OptionSpec,
    TensorSpec,
    register,
)
from oracle.routines.mx.contract import LINEAR, pack, unpack
from oracle.routines.products.contract import BIAS, ProductContract
from oracle.routines.products.grouped import RUN
from oracle.routines.traits import Kind, Trait
from oracle.tensorcore.schedules import schedules
from oracle.truth.gemm import ScaledProduct, take_rows
from oracle.truth.layout import HEIGHTS, WIDTH, inverse_order, row_order
from oracle.verdict.products import Part

UE8M0, UE4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
BYTES, WORDS = (torch.uint8,), (torch.int32,)
MX, NV = 32, 16
"""Codes that share a scale."""
TILE, FLAT = tuple(HEIGHTS)
TIGHT = Trait("has the scales of each group of rows in tiles of their own, one behind the other")
PACKED = "words"

EMULATED: Mapping[str, tuple[str, ...]] = {
    arch: (f"{arch}.bf16.dequantised",) for arch in ("sm90", "sm89", "sm86", "sm80")
}
_CPU = {"cpu": (IEEE32,)}


def _native(*kinds: str) -> Mapping[str, tuple[str, ...]]:
    """The schedules of Blackwell's block-scaled instructions in every reading, those of older GPUs, and the CPU's."""
    chains = {}
    for arch in ("sm100", "sm120"):
        known, bases = [schedule.name for schedule in schedules(arch)], [f"{arch}.chain_{kind}" for kind in kinds]
        readings = [name for base in bases for name in known if name.startswith(f"{base}.")]
        chains[arch] = (*bases, *readings)
    return {**EMULATED, **chains, **_CPU}


EIGHT = _native("ue8m0")
FOUR = _native("mxf4", "ue8m0")
TWO_LEVEL = _native("nvf4")
"""By the operands: an 8-bit one with E8M0 scales, two 4-bit ones with E8M0 scales (DeepGEMM unpacks them to 8 bits,
sgl-deep-gemm from 0.2.0 on does not: kIsMXF4 of its sm100_fp8_fp4_gemm_1d1d.cuh), two 4-bit ones with E4M3 scales."""

HALVES = (torch.bfloat16, torch.float16)
OUT_HALF = OptionSpec(
    "out_dtype", None, (None, *HALVES), "dtype of the output; None: any of those of the output below is right"
)
OUT_ANY = OptionSpec(
    "out_dtype",
    None,
    (None, *HALVES, torch.float32),
    "dtype of the output; None: any of those of the output below is right",
)
SMALL = OptionSpec("use_8x4_sf_layout", False, (False, True), "the scales of a lie in 8x4 tiles")
SHUFFLED = OptionSpec(
    "shuffled", False, (False, True), "rows of the weight and its scales in TensorRT-LLM's order, N a multiple of 32"
)


def places(rows: int, columns: int, tile: str) -> Tensor:
    """Where the scale of each row and column lies, int64 ``[rows, columns]``: in tiles, or as a matrix."""
    m, c = torch.arange(rows, device="cpu")[:, None], torch.arange(columns, device="cpu")[None, :]
    if tile == LINEAR:
        return m * columns + c
    height = HEIGHTS[tile]
    inside = m % 8 * 4 if height == 8 else m % 32 * 16 + m % 128 // 32 * 4
    return (m // height * -(-columns // WIDTH) + c // WIDTH) * height * WIDTH + inside + c % WIDTH


def size_of(rows: int, columns: int, tile: str) -> int:
    """Scales that the memory of ``rows x columns`` holds, padding included."""
    if tile == LINEAR:
        return rows * columns
    return -(-rows // HEIGHTS[tile]) * HEIGHTS[tile] * (-(-columns // WIDTH) * WIDTH)


@dataclass(frozen=True)
class Side:
    """One operand of a call.

    Attributes
    ----------
    codes, scale : names of the inputs.
    width : codes of a row that share a scale.
    dtype : of a scale.
    rows, columns : of the scales; ``tile``: how they lie.
    at : int64 ``[rows, columns]``, where each scale lies; ``size``: how many the memory holds.
    """

    codes: str
    scale: str
    width: int
    dtype: torch.dtype
    tile: str
    at: Tensor
    size: int

    @property
    def rows(self) -> int:
        return self.at.shape[0]

    @property
    def columns(self) -> int:
        return self.at.shape[1]

    def flat(self, memory: Tensor) -> Tensor:
        """``memory`` ``[...]`` as one element for each place, ``[size]``: float32, or uint8."""
        if memory.dtype in WORDS:  # clone: the stride of a single column may be any, and a view of bytes needs 1
            memory = memory.clone(memory_format=torch.contiguous_format)
        return memory.reshape(-1) if self.dtype is torch.float32 else memory.reshape(-1).view(torch.uint8)

    def read(self, memory: Tensor) -> Tensor:
        """The scales ``[rows, columns]`` of ``dtype`` out of their ``memory`` ``[...]``; padding is not read.

        Raises ShapeError: the memory holds another number of scales.
        """
        flat = self.flat(memory)
        if flat.numel() != self.size:
            raise ShapeError(
                f"{self.scale} holds {flat.numel()} scales; {self.rows} x {self.columns} of them take {self.size} "
                f"here ({self.tile})"
            )
        return flat[self.at].view(self.dtype)

    def padding(self) -> Tensor:
        """Bool ``[size]``: places where no scale lies."""
        pads = torch.ones(self.size, dtype=torch.bool, device="cpu")
        pads[self.at.flatten()] = False
        return pads


@dataclass(frozen=True)
class Run:
    """One product of a call: its rows of ``a`` (None: all) and of ``b``, and the number of its group."""

    rows: slice | Tensor | None
    columns: slice
    group: int = 0


WHOLE = (Run(None, slice(None)),)


class MxProduct(ProductContract):
    """Codes of 8 or 4 bits with a scale for each 16, 32 or 128 of them along K:

        y[m, n] = sum_k value(a[m, k]) sa[m, k // w] value(b[n, k]) sb[n, k // w]

    E2M1 codes lie two in a byte, the even column in the low nibble, along K. An E8M0 byte ``x`` is ``2^(x - 127)``, 255
    is NaN. ``alpha`` is finite. A row of the output that belongs to no group may hold anything.

    On sm100 and sm120 the scales enter the instruction and every factor multiplies the finished sum; older GPUs
    dequantise to bfloat16, which is exact from 2^-133 to 2^127, and multiply; a CPU computes in float32 in any order.

    Subclasses
    ----------
    A subclass says where scales lie (``sides``) and which rows meet which weight (``runs``);
    ``names`` are those of a, b and their scales.
    """

    gpu = False
    golden_arches: ClassVar[tuple[str, ...]] = ("cpu", "sm90", "sm100")
    roles = {}
    names: ClassVar[tuple[str, str, str, str]] = ("a", "b", "a_scale", "b_scale")
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **FOUR,
        "sm100": (*TWO_LEVEL["sm100"], *FOUR["sm100"]),
        "sm120": (*TWO_LEVEL["sm120"], *FOUR["sm120"]),
    }
    scale_tensor = BYTES

    # --- what a subclass says -------------------------------------------------------------------------------

    @abstractmethod
    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        """Where the scales of both operands lie."""

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        """The products of the call."""
        return WHOLE

    def factors(self, inputs: Inputs, run: Run) -> Tensor | None:
        """The alpha of one product: float32 ``[1]`` or ``[2]``, whose product it is; None without one."""
        return inputs.get("alpha")

    # --- what follows ---------------------------------------------------------------------------------------

    def matrix(self, inputs: Inputs, part: int) -> Tensor:
        """The codes ``[R, K]`` of a (0) or of b (1), one each, rows of all groups below one another: FP8, or uint8 of
        E2M1."""
        operand = inputs[self.names[part]]
        if part == 1 and self.b_columns:
            operand = operand.view(torch.uint8).mT.contiguous().view(operand.dtype)
        flat = operand.reshape(-1, operand.shape[-1])
        return flat if flat.is_floating_point() else unpack(flat.view(torch.uint8))

    def given(self, inputs: Inputs, part: int, codes: Tensor) -> Tensor:
        """The inverse of :meth:`matrix`: an operand ``[...]`` as the call gives it, of ``codes`` ``[R, K]`` (uint8, one
        each)."""
        operand = inputs[self.names[part]]
        packed = codes if operand.is_floating_point() else pack(codes)
        if part == 1 and self.b_columns:
            packed = packed.reshape(*operand.shape[:-2], operand.shape[-1], operand.shape[-2]).mT
        else:
            packed = packed.reshape(operand.shape)
        return packed.view(operand.dtype)

    def parts(self, inputs: Inputs, **options: object) -> list[Part]:
        left, right = self.sides(inputs, options)
        a, b = self.matrix(inputs, 0), self.matrix(inputs, 1)
        if options.get("shuffled"):  # row i of the memory is row order[i] of the weight, whose scales went along
            at = inverse_order(row_order(b.shape[0]))
            b, right = take_rows(b, at), replace(right, at=right.at[at])
        block = math.gcd(left.width, right.width)
        sa, sb = (
            _spread(side.read(inputs[side.scale]), side.width // block, a.shape[1], block) for side in (left, right)
        )
        products = []
        for run in self.runs(inputs, options):
            rows = torch.arange(a.shape[0], device=a.device) if run.rows is None else run.rows
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=a.device)
            product = ScaledProduct(
                take_rows(a, rows),
                b[run.columns],
                take_rows(sa, rows),
                sb[run.columns],
                block=block,
                b_rows=1,
                bias=inputs.get("bias"),
                c=inputs.get("c"),
                alpha=self.factors(inputs, run),
            )
            products.append(Part(product, None if run.rows is None else rows, run.group))
        return products

    def operands(self, call: Call) -> Operands:
        return Operands(
            roles={},
            shape=self.shape(call.inputs),
            parts=self.parts(call.inputs, **call.resolved),
            given=True,
            groups=self.groups,
            row_unit=self.row_unit,
        )

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        a, b = (inputs[name] for name in self.names[:2])
        return a.shape[0], b.shape[-1] if self.b_columns else b.shape[-2]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if self.b_columns:
            _check_columns(self.names[1], inputs[self.names[1]])
        a, b = (self._depth(inputs, part) for part in (0, 1))
        if a != b:
            raise ShapeError(f"{self.names[0]} has K={a}, {self.names[1]} has K={b} (codes of four bits count twice)")
        for side in self.sides(inputs, options):
            self.check_side(side, a)
            side.read(inputs[side.scale])
        alphas = [inputs[name] for name in ("alpha", "global_scale_a", "global_scale_b") if name in inputs]
        if bad := [float(x) for alpha in alphas for x in alpha if not math.isfinite(x)]:
            raise InputError(f"{self.name} has a global scale of {bad[0]}; pass a finite one")

    def check_side(self, side: Side, k: int) -> None:
        """Refuse a K that the scales of a side do not divide."""
        if k % side.width:
            raise ShapeError(f"K={k} is not a multiple of {side.width}, the codes that share a scale; pad K with zeros")

    def numerics_of(self, call: Call) -> Mapping[str, tuple[str, ...]]:
        left, _ = self.sides(call.inputs, call.resolved)
        if left.dtype is UE4M3:
            return TWO_LEVEL
        four = all(not call.inputs[name].is_floating_point() for name in self.names[:2])
        return FOUR if four else EIGHT

    def _depth(self, inputs: Inputs, part: int) -> int:
        """K, of which a byte of four-bit codes holds two."""
        operand = inputs[self.names[part]]
        k = operand.shape[-2 if part == 1 and self.b_columns else -1]
        return k if operand.is_floating_point() else 2 * k

    def tiled(self, part: int, rows: int, k: int, width: int, dtype: torch.dtype, tile: str) -> Side:
        """One matrix of scales in tiles."""
        return self.stacked(part, (rows,), k, width, dtype, tile)

    def stacked(
        self, part: int, counts: Sequence[int], k: int, width: int, dtype: torch.dtype, tile: str = TILE
    ) -> Side:
        """Matrices of scales in tiles of their own, one behind the other: of so many rows each."""
        columns = -(-k // width)
        at, start = [torch.empty(0, columns, dtype=torch.int64, device="cpu")], 0
        for count in counts:
            at.append(start + places(count, columns, tile))
            start += size_of(count, columns, tile)
        return Side(self.names[part], self.names[2 + part], width, dtype, tile, torch.cat(at), start)


def _check_columns(name: str, b: Tensor) -> None:
    """Refuse a square weight ``b [..., K, N]`` (any dtype) whose rows are contiguous. Its strides tell a forgotten
    transpose, which the shape hides; of another shape the extents tell it.

    Raises LayoutError. Source: FlashInfer and torch, which read b column by column.
    """
    down, across = b.stride()[-2:]
    if 0 < across < down and b.shape[-1] == b.shape[-2] > 1:
        raise LayoutError(
            f"{name} {list(b.shape)} is row-major (strides {tuple(b.stride())}), as a weight [..., N, K] that nobody "
            f"transposed; pass the transpose weight.mT of a contiguous weight (of a file: --input {name}=WEIGHT.T)"
        )


def _spread(scale: Tensor, times: int, k: int, block: int) -> Tensor:
    """Scales of ``times * block`` codes as those of ``block`` codes."""
    if times == 1:
        return scale
    raw = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    return raw.repeat_interleave(times, dim=1)[:, : -(-k // block)].contiguous().view(scale.dtype)


def scale_bytes(name: str, what: str, dtypes: tuple[torch.dtype, ...] = BYTES) -> TensorSpec:
    """Scales in their memory, of any shape."""
    return TensorSpec(name, Kind.SCALES, dtypes, None, f"scales of {what} in storage order", contiguous=True)


def check_recipe(inputs: Inputs, names: Sequence[str]) -> None:
    """Refuse dtypes that are no recipe of torch's."""
    a, b, sa, sb = (inputs[name] for name in names)
    if a.is_floating_point() != b.is_floating_point() or sa.dtype != sb.dtype:
        raise DtypeError(f"mat_a {a.dtype} with {sa.dtype}, mat_b {b.dtype} with {sb.dtype}: pass one recipe")
    if a.is_floating_point() and sa.dtype is UE4M3:
        raise DtypeError("E4M3 scales of 16 belong to codes of four bits; FP8 takes E8M0 scales of 32")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise DtypeError("both operands are float8_e5m2; one of them must be float8_e4m3fn")
    two = [name for name in ("global_scale_a", "global_scale_b") if name in inputs]
    if len(two) == 1 or two and sa.dtype is not UE4M3:
        raise InputError(f"{', '.join(two)} given: two-level scales take both, beside E4M3 scales of 16")


ALPHA = TensorSpec("alpha", Kind.ALPHA, F32, ("1",), "multiplies the sum", optional=True)


# --- dense --------------------------------------------------------------------------------------------------------


class InTiles(MxProduct):
    """The scales of a matrix of ``R`` rows and ``C = ceil(K/w)`` blocks lie in tiles, in memory of any shape: that of
    row ``r`` and block ``j`` at ``(r // 128 * ceil(C/4) + j // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + j % 4``, so
    that the memory has ``align(R, 128) * align(C, 4)`` of them. With ``use_8x4_sf_layout`` those of a lie at ``(r // 8
    * ceil(C/4) + j // 4) * 32 + r % 8 * 4 + j % 4``, ``align(R, 8) * align(C, 4)`` of them. Padding is never read,
    whatever it holds. No E4M3 scale has its sign bit set. With ``shuffled`` the rows of the weight W that is multiplied
    are stored in another order, ``W[order[i]] = stored[i]``, and so are the rows of its scales before they are put in
    tiles. In each 32 rows ``order`` is 0 4 .. 28 1 5 .. 29 2 6 .. 30 3 7 .. 31."""


@register
class MmMxfp8(InTiles):
    name = "mm_mxfp8"
    gpu = True
    summary = "MXFP8: E4M3 a [M, K] times b [K, N], E8M0 scales of 32 in tiles"
    source = "FlashInfer mm_mxfp8"
    numerics = EIGHT
    b_columns = True
    names = ("a", "b", "a_descale", "b_descale")
    inputs = (
        TensorSpec("a", Kind.CODES, E4M3, ("M", "K"), "activation codes"),
        TensorSpec("b", Kind.CODES, E4M3, ("K", "N"), "weight codes, column-major"),
        scale_bytes("a_descale", "a, in 128x4 or 8x4 tiles"),
        scale_bytes("b_descale", "b, in 128x4 tiles"),
    )
    options = (OUT_HALF, SMALL, SHUFFLED)

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        (m, k), n = inputs["a"].shape, inputs["b"].shape[1]
        tile = FLAT if options.get("use_8x4_sf_layout") else TILE
        return self.tiled(0, m, k, MX, UE8M0, tile), self.tiled(1, n, k, MX, UE8M0, TILE)


@register
class MmFp4(InTiles):
    """``use_nvfp4``: E4M3 scales of 16; else E8M0 scales of 32. ``block_size`` must say the same: 16, or 32."""

    name = "mm_fp4"
    gpu = True
    summary = "NVFP4 or MXFP4: E2M1 a [M, K] times b [K, N], scales of 16 (E4M3) or 32 (E8M0) in tiles, alpha"
    source = "FlashInfer mm_fp4"
    b_columns = True
    names = ("a", "b", "a_descale", "b_descale")
    inputs = (
        TensorSpec("a", Kind.CODES, BYTES, ("M", "K"), "activation codes, two a byte: [M, K/2]"),
        TensorSpec("b", Kind.CODES, BYTES, ("K", "N"), "weight codes, two a byte: [K/2, N], column-major"),
        scale_bytes("a_descale", "a, in 128x4 or 8x4 tiles"),
        scale_bytes("b_descale", "b, in 128x4 tiles"),
        ALPHA,
    )
    options = (
        OUT_HALF,
        OptionSpec("block_size", NV, (NV, MX), "codes that share a scale"),
        SMALL,
        OptionSpec("use_nvfp4", True, (True, False), "E4M3 scales, else E8M0"),
        SHUFFLED,
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        due = NV if options["use_nvfp4"] else MX
        if options["block_size"] != due:
            raise InputError(f"block_size={options['block_size']} with use_nvfp4={options['use_nvfp4']}; pass {due}")

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        m, k, n = inputs["a"].shape[0], self._depth(inputs, 0), inputs["b"].shape[1]
        width, dtype = (NV, UE4M3) if options.get("use_nvfp4", True) else (MX, UE8M0)
        tile = FLAT if options.get("use_8x4_sf_layout") else TILE
        return self.tiled(0, m, k, width, dtype, tile), self.tiled(1, n, k, width, dtype, TILE)


SWIZZLES = ("SWIZZLE_32_4_4", "NO_SWIZZLE")


@register
class ScaledMm(InTiles):
    """The recipe is read off the dtypes: FP8 with E8M0 scales (MXFP8), bytes with E8M0 (MXFP4) or E4M3 (NVFP4), whose
    two global scales come together or not at all: they are finite, are multiplied in float32 first, and multiply the
    sum. ``bias`` comes after them. ``SWIZZLE_32_4_4``: the scales of both lie in tiles of 128x4, ``NO_SWIZZLE``: both
    lie row-major, ``[R, C]`` without padding. The option is one string for both."""

    name = "scaled_mm"
    gpu = True
    summary = "MXFP8, MXFP4, NVFP4 with one or two levels: mat_a [M, K] times mat_b [K, N], bias"
    source = "torch.nn.functional.scaled_mm with BlockWise1x32, BlockWise1x16, TensorWise"
    b_columns = True
    names = ("mat_a", "mat_b", "scale_a", "scale_b")
    inputs = (
        TensorSpec(
            "mat_a",
            Kind.CODES,
            (*FP8, *BYTES),
            ("M", "K"),
            "codes; of four bits two a byte, as float4_e2m1fn_x2 has them",
        ),
        TensorSpec("mat_b", Kind.CODES, (*FP8, *BYTES), ("K", "N"), "codes, column-major"),
        scale_bytes("scale_a", "mat_a", (UE8M0, UE4M3)),
        scale_bytes("scale_b", "mat_b", (UE8M0, UE4M3)),
        TensorSpec("global_scale_a", Kind.SCALES, F32, ("1",), "the second scale of mat_a, TensorWise", optional=True),
        TensorSpec("global_scale_b", Kind.SCALES, F32, ("1",), "the second scale of mat_b, TensorWise", optional=True),
        BIAS,
    )
    options = (
        OUT_ANY,
        OptionSpec(
            "swizzle", SWIZZLES[0], SWIZZLES, "how the scales of both lie: in tiles of 128x4, or row-major [R, C]"
        ),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_recipe(inputs, self.names)

    def check_side(self, side: Side, k: int) -> None:
        if k % 16:
            raise ShapeError(f"K={k} is not a multiple of 16; pad K with zeros")

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        m, k, n = inputs["mat_a"].shape[0], self._depth(inputs, 0), inputs["mat_b"].shape[1]
        tile = TILE if options.get("swizzle", SWIZZLES[0]) == SWIZZLES[0] else LINEAR
        width = NV if inputs["scale_a"].dtype is UE4M3 else MX
        dtype = inputs["scale_a"].dtype
        return self.tiled(0, m, k, width, dtype, tile), self.tiled(1, n, k, width, dtype, tile)

    def factors(self, inputs: Inputs, run: Run) -> Tensor | None:
        if "global_scale_a" not in inputs:
            return None
        return torch.cat([inputs["global_scale_a"], inputs["global_scale_b"]])


# --- batched and grouped ------------------------------------------------------------------------------------------


PLACEMENTS = ("rows", "batch")


@register
class BmmMxfp8(InTiles):
    """``placement``: the rows of all matrices as one matrix of scales, as FlashInfer's quantiser writes them, or each
    matrix in tiles of its own, as its cuDNN graph reads them. Both are one where M (and N) is a multiple of 128. The
    memory has, with ``rows``, ``align(B M, 128) * align(C, 4)`` scales of a: row ``i M + m`` is row m of matrix i; of b
    ``align(B N, 128) * align(C, 4)``: row ``i N + n`` is column n of matrix i. With ``batch`` it has
    ``B align(M, 128) align(C, 4)`` and ``B align(N, 128) align(C, 4)``, one matrix after the other."""

    name = "bmm_mxfp8"
    gpu = True
    summary = "MXFP8, batched: a [B, M, K] times b [B, K, N], E8M0 scales of 32 in 128x4 tiles"
    source = "FlashInfer bmm_mxfp8"
    numerics = EIGHT
    b_columns = True
    inputs = (
        TensorSpec("a", Kind.CODES, FP8, ("B", "M", "K"), "activation codes"),
        TensorSpec("b", Kind.CODES, FP8, ("B", "K", "N"), "weight codes, each matrix column-major"),
        scale_bytes("a_scale", "a"),
        scale_bytes("b_scale", "b"),
    )
    options = (OUT_HALF, OptionSpec("placement", PLACEMENTS[0], PLACEMENTS, "how the scales of a batch follow"))

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        batch, m, k = inputs["a"].shape
        n = inputs["b"].shape[2]
        if options.get("placement", PLACEMENTS[0]) == "rows":
            return self.tiled(0, batch * m, k, MX, UE8M0, TILE), self.tiled(1, batch * n, k, MX, UE8M0, TILE)
        return self.stacked(0, [m] * batch, k, MX, UE8M0), self.stacked(1, [n] * batch, k, MX, UE8M0)

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        (batch, m, _), n = inputs["a"].shape, inputs["b"].shape[2]
        return [Run(slice(i * m, i * m + m), slice(i * n, i * n + n), i) for i in range(batch)]

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return inputs["a"].shape[0], inputs["a"].shape[1], inputs["b"].shape[2]


def group_starts(pointers: Sequence[int]) -> list[int]:
    """The row of the matrix of scales where each group begins in FlashInfer, and behind the last the rows in all."""
    return [(end + 127 * i) // 128 * 128 for i, end in enumerate(pointers)]


class GroupGemm(InTiles):
    """Rows of ``a`` from ``m_indptr[g]`` to ``m_indptr[g + 1]``, excluded, are multiplied by weight ``g``; ``m_indptr``
    rises from 0 to M in G + 1 entries, and a group may be empty.

    The scales of ``a`` are one tiled matrix, in which group ``g`` begins at row ``floor((m_indptr[g] + 127 g) / 128) *
    128``; its rows in all are ``floor((M + 127 G) / 128) * 128``. Rows between the groups are not read. The scales of
    each weight have tiles of their own, ``align(N, 128) * align(C, 4)`` of them."""

    section = "GEMM"
    groups = "m_indptr"
    kind: ClassVar[tuple[int, torch.dtype]] = (MX, UE8M0)
    options: ClassVar[tuple[OptionSpec, ...]] = (OUT_HALF,)

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        k, pointers = self._depth(inputs, 0), inputs["m_indptr"].tolist()
        groups, n = inputs["b"].shape[:2]
        starts, columns = group_starts(pointers), -(-k // self.kind[0])
        counts = [end - begin for begin, end in zip(pointers, pointers[1:], strict=False)]
        row = [start + i for start, count in zip(starts, counts, strict=False) for i in range(count)]
        every = places(max(starts[-1], 128), columns, TILE)
        size = size_of(starts[-1], columns, TILE)
        left = Side("a", "a_scale", *self.kind, TILE, every[torch.tensor(row, dtype=torch.int64, device="cpu")], size)
        return left, self.stacked(1, [n] * groups, k, *self.kind)

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        pointers, n = inputs["m_indptr"].tolist(), inputs["b"].shape[1]
        pairs = zip(pointers, pointers[1:], strict=False)
        return [Run(slice(i, j), slice(g * n, g * n + n), g) for g, (i, j) in enumerate(pairs) if j > i]

    def extents(self, inputs: Inputs) -> dict[str, int]:
        bound = super().extents(inputs)
        pointers = inputs["m_indptr"].tolist()
        ends = [pointers[0], pointers[-1]] == [0, bound["M"]]
        if len(pointers) != bound["G"] + 1 or pointers != sorted(pointers) or not ends:
            raise InputError(f"m_indptr is {pointers}; it rises from 0 to M={bound['M']} in {bound['G'] + 1} entries")
        return bound


POINTERS = TensorSpec(
    "m_indptr", Kind.OFFSETS, INTEGERS, None, "the first row of each expert, and behind the last the rows in all"
)


@register
class GroupGemmMxfp4(GroupGemm):
    name = "group_gemm_mxfp8_mxfp4_nt_groupwise"
    gpu = True
    summary = "rows sorted by expert: MXFP8 a [M, K] times MXFP4 b [G, N, K]"
    source = "FlashInfer group_gemm_mxfp8_mxfp4_nt_groupwise"
    golden_arches = ("cpu", "sm90")
    numerics = EIGHT
    inputs = (
        TensorSpec("a", Kind.CODES, FP8, ("M", "K"), "activation codes, rows sorted by expert"),
        TensorSpec("b", Kind.CODES, BYTES, ("G", "N", "K2"), "weight codes, two a byte: [G, N, K/2]"),
        scale_bytes("a_scale", "a, each group from its start"),
        scale_bytes("b_scale", "each weight"),
        POINTERS,
    )


@register
class GroupGemmNvfp4(GroupGemm):
    name = "group_gemm_nvfp4_nt_groupwise"
    gpu = True
    summary = "rows sorted by expert: NVFP4 a [M, K] times b [G, N, K], an alpha for each expert"
    source = "FlashInfer group_gemm_nvfp4_nt_groupwise"
    numerics = TWO_LEVEL
    kind = (NV, UE4M3)
    inputs = (
        TensorSpec("a", Kind.CODES, BYTES, ("M", "K"), "activation codes, two a byte: [M, K/2]"),
        TensorSpec("b", Kind.CODES, BYTES, ("G", "N", "K"), "weight codes, two a byte: [G, N, K/2]"),
        scale_bytes("a_scale", "a, each group from its start"),
        scale_bytes("b_scale", "each weight"),
        POINTERS,
        TensorSpec("alpha", Kind.ALPHA, F32, ("G",), "multiplies the sums of an expert", optional=True),
    )

    def factors(self, inputs: Inputs, run: Run) -> Tensor | None:
        return inputs["alpha"][run.group : run.group + 1] if "alpha" in inputs else None


@register
class ScaledGroupedMmMx(InTiles):
    """Group ``g`` has the rows from ``offs[g - 1]`` (0 for the first) to ``offs[g]``, excluded; rows past the last end
    may hold anything. Its scales lie in tiles of their own, from row ``sum of align(m_j, 128) over j < g`` on, ``m_j``
    the rows of group ``j``; the memory has ``sum of align(m_j, 128) * align(C, 4)`` of them or more. The scales of each
    weight have tiles of their own, ``align(N, 128) * align(C, 4)`` of them. The recipe is read off the dtypes: FP8 with
    E8M0 scales (MXFP8), bytes with E8M0 (MXFP4) or E4M3 (NVFP4), whose global scales, one for each group, come together
    or not at all, are finite, are multiplied in float32 first, and multiply the sum."""

    name = "scaled_grouped_mm_mx"
    traits = frozenset({TIGHT})
    gpu = True
    summary = "rows sorted by expert: MXFP8, MXFP4 or NVFP4 mat_a [M, K] times mat_b [G, N, K], tight tiles of scales"
    source = "torch.nn.functional.scaled_grouped_mm, 2-D by 3-D, with BlockWise1x32 or BlockWise1x16; torchao"
    groups = "offs"
    names = ("mat_a", "mat_b", "scale_a", "scale_b")
    inputs = (
        TensorSpec(
            "mat_a", Kind.CODES, (*E4M3, *BYTES), ("M", "K"), "codes, rows sorted by expert; of four bits two a byte"
        ),
        TensorSpec("mat_b", Kind.CODES, (*E4M3, *BYTES), ("G", "N", "K"), "weight codes"),
        scale_bytes("scale_a", "mat_a", (UE8M0, UE4M3)),
        scale_bytes("scale_b", "each weight", (UE8M0, UE4M3)),
        TensorSpec("offs", Kind.OFFSETS, INTEGERS, ("G",), "where the rows of each expert end"),
        TensorSpec("global_scale_a", Kind.SCALES, F32, ("G",), "the second scale of mat_a", optional=True),
        TensorSpec("global_scale_b", Kind.SCALES, F32, ("G",), "the second scale of mat_b", optional=True),
    )
    options = (
        OptionSpec(
            "out_dtype",
            None,
            (None, torch.bfloat16),
            "dtype of the output; None: any of those of the output below is right",
        ),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        check_recipe(inputs, self.names)

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        k, (groups, n), ends = self._depth(inputs, 0), inputs["mat_b"].shape[:2], inputs["offs"].tolist()
        width, dtype = NV if inputs["scale_a"].dtype is UE4M3 else MX, inputs["scale_a"].dtype
        counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        left = self.stacked(0, counts, k, width, dtype)
        room = replace(left, size=max(left.size, inputs["scale_a"].numel()))
        return room, self.stacked(1, [n] * groups, k, width, dtype)

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        ends, n = inputs["offs"].tolist(), inputs["mat_b"].shape[1]
        pairs = zip([0, *ends], ends, strict=False)
        return [Run(slice(i, j), slice(g * n, g * n + n), g) for g, (i, j) in enumerate(pairs) if j > i]

    def factors(self, inputs: Inputs, run: Run) -> Tensor | None:
        if "global_scale_a" not in inputs:
            return None
        return torch.stack([inputs[f"global_scale_{side}"][run.group] for side in "ab"])

    def extents(self, inputs: Inputs) -> dict[str, int]:
        bound, ends = super().extents(inputs), inputs["offs"].tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > bound["M"]:
            raise InputError(f"offs are {ends}; they run from 0 to at most {bound['M']} and never back")
        if ends[-1] == 0:
            raise InputError("offs are all zero: no row is real and there is nothing to judge")
        return bound


@register
class ScaledGroupedMmMxKGroups(InTiles):
    """``out[g]`` is the product over the K from ``offs[g - 1]`` (0 for the first) to ``offs[g]``, a multiple of 32, as
    the weight gradient of an expert. The blocks of each group lie in tiles of their own, group behind group, and the
    memory may be larger. Where a group has no K ``out[g]`` may hold anything."""

    name = "scaled_grouped_mm_mx_k_groups"
    gpu = True
    summary = "MXFP8: for every group of K mat_a [M, K_g] times mat_b [N, K_g] transposed, tiles of scales by group"
    source = "torch.nn.functional.scaled_grouped_mm, 2-D by 2-D, with BlockWise1x32; torchao's blocked K groups"
    golden_arches = ("cpu", "sm90")
    numerics = EIGHT
    groups = "offs"
    names = ("mat_a", "mat_b", "scale_a", "scale_b")
    inputs = (
        TensorSpec("mat_a", Kind.CODES, E4M3, ("M", "K"), "codes, K sorted by group"),
        TensorSpec("mat_b", Kind.CODES, E4M3, ("N", "K"), "codes, K sorted by group"),
        scale_bytes("scale_a", "mat_a, by groups of K", (UE8M0, *BYTES)),
        scale_bytes("scale_b", "mat_b, by groups of K", (UE8M0, *BYTES)),
        TensorSpec("offs", Kind.OFFSETS, INTEGERS, ("G",), "where the K of each group ends, multiples of 32"),
    )
    options = (
        OptionSpec(
            "out_dtype",
            None,
            (None, torch.bfloat16),
            "dtype of the output; None: any of those of the output below is right",
        ),
    )

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        both = []
        for part in (0, 1):
            rows, start, at = inputs[self.names[part]].shape[0], 0, []
            for begin, end in self._pairs(inputs):
                columns = (end - begin) // MX
                at.append(start + places(rows, columns, TILE))
                start += size_of(rows, columns, TILE)
            size = max(start, inputs[self.names[2 + part]].numel())
            both.append(Side(self.names[part], self.names[2 + part], MX, UE8M0, TILE, torch.cat(at, dim=1), size))
        return both[0], both[1]

    def parts(self, inputs: Inputs, **options: object) -> list[Part]:
        m, (left, right) = inputs["mat_a"].shape[0], self.sides(inputs, options)
        sa, sb = (side.read(inputs[side.scale]) for side in (left, right))
        products = []
        for g, (begin, end) in enumerate(self._pairs(inputs)):
            if end > begin:
                k, c = slice(begin, end), slice(begin // MX, end // MX)
                product = ScaledProduct(
                    inputs["mat_a"][:, k], inputs["mat_b"][:, k], sa[:, c], sb[:, c], block=MX, b_rows=1
                )
                products.append(Part(product, torch.arange(g * m, g * m + m, device=inputs["mat_a"].device), g))
        return products

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return inputs["offs"].shape[0], inputs["mat_a"].shape[0], inputs["mat_b"].shape[0]

    def extents(self, inputs: Inputs) -> dict[str, int]:
        bound, ends = super().extents(inputs), inputs["offs"].tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] > bound["K"] or any(end % MX for end in ends):
            raise InputError(f"offs are {ends}; multiples of {MX} from 0 to at most {bound['K']}, never back")
        if ends[-1] == 0:
            raise InputError("offs are all zero: no group has K and there is nothing to judge")
        return bound

    @staticmethod
    def _pairs(inputs: Inputs) -> list[tuple[int, int]]:
        ends = inputs["offs"].tolist()
        return list(zip([0, *ends], ends, strict=False))


# --- DeepGEMM -----------------------------------------------------------------------------------------------------


class Fp8Fp4(MxProduct):
    """Codes of eight bits, or two of four in a byte along the last axis, on either side; K is a multiple of 32. The
    scales are a matrix as the operand is: ``a_scale [M, ceil(K / gran_k_a)]`` and ``b_scale [ceil(N / gran_n), ceil(K /
    gran_k_b)]`` of float32 powers of two, or int32 ``[M, ceil(K / (4 gran_k_a))]``, ``[N, ceil(K / (4 gran_k_b))]`` of
    four E8M0 bytes each (then ``gran_n`` is 1), the first block in the lowest byte; bytes behind the last block are not
    255. Where an operand has a leading G its scales have it too. Strides are any: words may lie column-major. K counts
    codes, not bytes. One chain over K of kind mxf8f6f4, whatever the codes are. A ``c``, of the output's
    dtype, is added in memory to the sum as it is stored: ``RN(c + RN(sum))``."""

    numerics = EIGHT
    golden_arches = ("cpu", "sm90")
    options: ClassVar[tuple[OptionSpec, ...]] = (
        OptionSpec(
            "out_dtype",
            None,
            (None, torch.bfloat16, torch.float32),
            "dtype of the output; None: any of those of the output below is right",
        ),
        OptionSpec("gran_k_a", 128, (32, 128), "codes of a that share a scale"),
        OptionSpec("gran_k_b", 32, (32, 128), "codes of b that share a scale"),
        OptionSpec("gran_n", 1, (1, 128), "rows of b that share a scale"),
    )

    def sides(self, inputs: Inputs, options: Options) -> tuple[Side, Side]:
        k, both = MxProduct._depth(self, inputs, 0), []  # of operands as they are multiplied
        for name, (width, height) in zip("ab", _granularities(options), strict=True):
            scale, rows = f"{name}_scale", inputs[name].shape[-2]
            words = lanes_of(inputs[scale]) if scale in inputs else 1
            height = height if words == 1 else 1
            matrices, each, columns = inputs[name].shape[:-2].numel(), -(-rows // height), -(-k // width)
            pitch = -(-columns // words) * words
            row = torch.arange(matrices, device="cpu")[:, None] * each + torch.arange(rows, device="cpu") // height
            at = row.reshape(-1, 1) * pitch + torch.arange(columns, device="cpu")
            dtype, lies = (UE8M0, PACKED) if words > 1 else (torch.float32, LINEAR)
            both.append(Side(name, scale, width, dtype, lies, at, matrices * each * pitch))
        return both[0], both[1]

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["b_scale"].dtype in WORDS and options["gran_n"] != 1:
            raise OptionError(f"gran_n={options['gran_n']} with packed b_scale; words hold the exponents of one row")
        shapes = self.scale_shapes(inputs, options)
        for side, due in zip(self.sides(inputs, options), shapes, strict=True):
            check_powers(side, inputs[side.scale], due)
        if (c := inputs.get("c")) is not None:
            if options["out_dtype"] not in (None, c.dtype):
                raise DtypeError(f"c is {c.dtype}, out_dtype={options['out_dtype']}; they are the same")
            if tuple(c.shape) != self.shape(inputs):
                raise ShapeError(f"c has shape {list(c.shape)}; the product has {list(self.shape(inputs))}")

    def scale_shapes(self, inputs: Inputs, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of both scales."""
        k, shapes = inputs["a"].shape[-1] * (1 if inputs["a"].is_floating_point() else 2), list[tuple[int, ...]]()
        for name, (width, height) in zip("ab", _granularities(options), strict=True):
            *lead, rows, _ = inputs[name].shape
            words = lanes_of(inputs[f"{name}_scale"]) if f"{name}_scale" in inputs else 1
            shapes.append((*lead, -(-rows // (height if words == 1 else 1)), -(-k // (width * words))))
        return shapes[0], shapes[1]

    def check_side(self, side: Side, k: int) -> None:
        if k % 32:
            raise ShapeError(f"K={k} is not a multiple of 32; pad K with zeros")

    def numerics_of(self, call: Call) -> Mapping[str, tuple[str, ...]]:
        return EIGHT


def _granularities(options: Options) -> tuple[tuple[int, int], tuple[int, int]]:
    """Codes and rows that share a scale: of a, of b."""
    of_a, of_b, height = (
        int(str(options.get(name, value))) for name, value in (("gran_k_a", 128), ("gran_k_b", 32), ("gran_n", 1))
    )
    return (of_a, 1), (of_b, height)


def lanes_of(scale: Tensor) -> int:
    """Scales in an element of ``scale`` ``[...]``: 4 of int32, else 1."""
    return WIDTH if scale.dtype in WORDS else 1


def check_powers(side: Side, scale: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse ``scale`` ``[...]`` of another shape, float32 values of which the kernel would take the exponent alone,
    and words whose padding is NaN: a kernel multiplies it with the zeros behind K. Raises ShapeError, InputError."""
    if tuple(scale.shape) != shape:
        raise ShapeError(f"{side.scale} has shape {list(scale.shape)}; codes and options take {list(shape)}")
    if scale.dtype in WORDS:
        if bool((side.flat(scale)[side.padding()] == 0xFF).any()):
            raise InputError(f"{side.scale} holds the byte 255 behind its last block; fill the last word with zeros")
        return
    wide = scale.double()
    if not bool(((torch.frexp(wide)[0] == 0.5) & torch.isfinite(wide)).all()):
        raise InputError(f"{side.scale} holds a value that is no power of two; the kernel takes its exponent alone")


CODES = (*E4M3, *BYTES)
SUMMAND = "in the output's dtype; added by the memory to the sum as it is stored"
C = TensorSpec("c", Kind.STATE, (*F32, torch.bfloat16), None, f"[M, N], {SUMMAND}", optional=True)
POWERS = "float32 powers of two, or int32 of four exponents a word; shapes as above"


def fp8_fp4_inputs(a: tuple[str, ...], b: tuple[str, ...], *last: TensorSpec) -> tuple[TensorSpec, ...]:
    """The inputs of a form of the product, whose operands have these dims."""
    return (
        TensorSpec("a", Kind.CODES, CODES, a, "activation codes; of four bits two a byte"),
        TensorSpec("a_scale", Kind.SCALES, (*F32, *WORDS), None, POWERS),
        TensorSpec("b", Kind.CODES, CODES, b, "weight codes; of four bits two a byte"),
        TensorSpec("b_scale", Kind.SCALES, (*F32, *WORDS), None, POWERS),
        *last,
    )


@register
class Fp8Fp4GemmNt(Fp8Fp4):
    name = "fp8_fp4_gemm_nt"
    shapes = {"out": "[M, N]"}
    gpu = True
    summary = "a [M, K] times b [N, K] transposed, E4M3 or E2M1 codes, power-of-two scales of 32 or 128, plus c"
    source = "DeepGEMM 2.6.1 fp8_fp4_gemm_nt; epilogue/sm100_store_cd.cuh for c"
    inputs = fp8_fp4_inputs(("M", "K"), ("N", "K2"), C)


@register
class GroupedFp8Fp4Contiguous(Fp8Fp4):
    """Row ``r`` is multiplied by ``b[m_indices[r]]``; -1 marks a padding row, whose output may hold anything."""

    name = "m_grouped_fp8_fp4_gemm_nt_contiguous"
    shapes = {"out": "[M, N]"}
    gpu = True
    summary = "rows sorted by expert in one matrix, -1 for padding; E4M3 or E2M1 codes"
    source = "DeepGEMM 2.6.1 m_grouped_fp8_fp4_gemm_nt_contiguous"
    groups = "m_indices"
    row_unit = RUN
    inputs: ClassVar[tuple[TensorSpec, ...]] = fp8_fp4_inputs(
        ("M", "K"), ("G", "N", "K2"), TensorSpec("m_indices", Kind.IDS, INTEGERS, ("M",), "expert of a row, or -1")
    )

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        indices, n = inputs["m_indices"], inputs["b"].shape[1]
        groups = [g for g in torch.unique(indices).tolist() if g >= 0]
        return [Run(torch.nonzero(indices == g)[:, 0], slice(g * n, g * n + n), g) for g in groups]

    def extents(self, inputs: Inputs) -> dict[str, int]:
        bound = super().extents(inputs)
        low, high = int(inputs["m_indices"].min()), int(inputs["m_indices"].max())
        if low < -1 or high >= bound["G"] or high < 0:
            raise InputError(f"m_indices runs from {low} to {high}; experts are 0..{bound['G'] - 1}, padding is -1")
        return bound


@register
class GroupedFp8Fp4Masked(Fp8Fp4):
    """The first ``masked_m[g]`` rows of group ``g`` are real; rows past them hold anything, in and out."""

    name = "m_grouped_fp8_fp4_gemm_nt_masked"
    gpu = True
    summary = "one matrix for each expert, of which the first masked_m[g] rows are real; E4M3 or E2M1 codes"
    source = "DeepGEMM 2.6.1 m_grouped_fp8_fp4_gemm_nt_masked"
    groups = "masked_m"
    inputs = fp8_fp4_inputs(
        ("G", "M", "K"), ("G", "N", "K2"), TensorSpec("masked_m", Kind.COUNTS, INTEGERS, ("G",), "real rows of a group")
    )

    def runs(self, inputs: Inputs, options: Options) -> Sequence[Run]:
        m, n, counts = inputs["a"].shape[1], inputs["b"].shape[1], inputs["masked_m"].tolist()
        return [Run(slice(g * m, g * m + c), slice(g * n, g * n + n), g) for g, c in enumerate(counts) if c]

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        return *inputs["a"].shape[:2], inputs["b"].shape[1]

    def extents(self, inputs: Inputs) -> dict[str, int]:
        bound, counts = super().extents(inputs), inputs["masked_m"].tolist()
        if not any(counts) or not all(0 <= c <= bound["M"] for c in counts):
            raise InputError(f"masked_m is {counts}; a group has 0..{bound['M']} real rows, and one has some")
        return bound
