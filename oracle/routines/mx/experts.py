"""Contracts of quantisers whose rows belong to experts: MXFP8 and NVFP4, rows by mask or one expert after another.

An expert has its rows of ``x``, its global scale (NVFP4), and its own tiles of scale bytes, 128 rows high. Where the
tiles of expert ``i`` start (rows of scale bytes; ``m`` the rows of experts, ``p`` where they start, ``M`` the rows of a
buffer)::

    masked      i align(M, 128)                   FlashInfer's masked experts, whose physical [G, rm, rk, 32, 4, 4] is
                                                  returned as [32, 4, rm, 4, rk, G]
    tight       sum of align(m_j, 128), j < i     vLLM's blockscale_offsets, torchao, PyTorch scaled_grouped_mm
    flashinfer  floor((p_i + 127 i) / 128) 128    FlashInfer's group_gemm_*_nt_groupwise

They differ as soon as an expert's rows are no multiple of 128. Tiles of an expert start at a multiple of 128 rows, so
the bytes are those of one tiled matrix with gaps. Nobody writes the gaps, the rows of padding, nor the rows of ``q``
beyond an expert's: the buffers are ``torch.empty``, so anything may lie there and a consumer masks.

Sources: FlashInfer fp4_quantization.py scaled_fp4_grouped_quant_sm100, fp8_quantization.py mxfp8_grouped_quantize,
quantization.cuh cvt_fp16_to_fp4_expert @fb28d7242; vLLM scaled_fp4_experts_quant; SGLang
es_sm100_mxfp8_blockscaled_grouped_quant. Not covered: activations before the quantiser, padding of K to 128.

NaN and infinities are as the recipe has them; bytes that are only moved keep them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.numbers import mx_recipes, recipes
from oracle.numbers.quantize import WIDE, Prepared, prepare
from oracle.numbers.recipes import Recipe
from oracle.routines.base import F32, Call, Inputs, Operands, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.mx.contract import FP8_CODES, BlockQuantiser, pack, unpack
from oracle.routines.traits import Kind
from oracle.truth.gemm import take_rows
from oracle.truth.layout import align, swizzle_scale, unswizzle_scale

HEIGHT, TILE = 128, "128x4"
PLACEMENTS = ("tight", "flashinfer")
PLACEMENT = OptionSpec("placement", PLACEMENTS[0], PLACEMENTS, "where the tiles of an expert start")
I32 = (torch.int32,)
MASK = TensorSpec("mask", Kind.COUNTS, I32, ("G",), "rows of each expert, from the first")
GLOBALS = TensorSpec("global_scale", Kind.SCALES, F32, ("G",), "2688/amax, one for each expert")


def starts(offsets: list[int], placement: str) -> list[int]:
    """The row of scale bytes at which each expert's tiles start, and where the last one's end; ``offsets``: the rows of
    experts ``[G + 1]``. A buffer of ``floor((M + 127 G) / 128) 128`` rows holds either placement."""
    if placement == "flashinfer":
        return [(p + (HEIGHT - 1) * i) // HEIGHT * HEIGHT for i, p in enumerate(offsets)]
    rows = [0]
    for first, last in zip(offsets, offsets[1:], strict=False):
        rows.append(rows[-1] + align(last - first, HEIGHT))
    return rows


class ExpertQuantiser(BlockQuantiser):
    """Rows that belong to experts; the scale bytes of each lie in tiles of ``128x4`` of its own, 128 rows high.

    This padding is not written, nor are the rows of ``q`` that belong to no expert and the gaps between experts: the
    buffers are ``torch.empty``, so anything may lie there. One expert at least has a row. The global scale of an expert
    is positive. Values are compared, not strides.
    """

    owns_padding = False
    gpu = False  # its libraries compile it for sm100 and later alone, and no capture is of one
    roles = {}

    @abstractmethod
    def experts(self, inputs: Inputs, options: Options) -> list[tuple[int, int, int]]:
        """For each expert its rows ``[first, last)`` of the flattened ``x``, and the row of its first scale bytes."""

    @abstractmethod
    def height(self, inputs: Inputs, options: Options) -> int:
        """Rows of scale bytes, padding included."""

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if "global_scale" in inputs and not bool((inputs["global_scale"] > 0).all()):
            raise InputError(f"global_scale is {inputs['global_scale'].tolist()}; every expert's must be positive")
        if not any(last > first for first, last, _ in self.experts(inputs, options)):
            raise InputError("no expert has a row; there is nothing to judge")

    def columns(self, inputs: Inputs) -> int:
        """Columns of what is quantised."""
        return inputs["x"].shape[-1]

    def operands(self, call: Call) -> Operands:
        shape = len(self.rows(call)[0]), self.columns(call.inputs)
        return Operands(self.roles, shape, recipes=self.declared(call.inputs, call.resolved))

    def rows(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the flattened ``x`` that experts own, the expert of each, and its row of scale bytes; int64
        ``[n]`` each."""
        return call.cached("rows", lambda: self._rows(call.inputs, call.resolved))

    def _rows(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        parts = [
            (
                torch.arange(first, last, device="cpu"),
                torch.full((last - first,), i, dtype=torch.int64, device="cpu"),
                place - first,
            )
            for i, (first, last, place) in enumerate(self.experts(inputs, options))
        ]
        row, expert = (torch.cat([part[axis] for part in parts]) for axis in (0, 1))  # type: ignore[misc]
        return row, expert, torch.cat([rows + shift for rows, _, shift in parts])

    def prepared_of(self, inputs: Inputs, options: Options) -> Prepared:
        row, expert, _ = self._rows(inputs, options)
        x = inputs["x"].flatten(0, -2)[row]
        scale = inputs.get("global_scale")
        return prepare(x, global_scale=None if scale is None else scale[expert])

    def shape_of_scales(self, call: Call) -> tuple[int, int]:
        return len(self.rows(call)[0]), self.columns(call.inputs) // self.width

    def memory(self, scale: Tensor, call: Call) -> Tensor:
        whole = torch.zeros(self.height(call.inputs, call.resolved), scale.shape[1], dtype=torch.uint8, device="cpu")
        whole[self.rows(call)[2]] = scale.cpu()
        return self.viewed(swizzle_scale(whole.to(scale.device), tile=TILE), call)

    def scales_of(self, memory: Tensor, call: Call) -> Tensor:
        flat, columns = self.flat(memory.view(torch.uint8), call), self.shape_of_scales(call)[1]
        whole = unswizzle_scale(flat, self.height(call.inputs, call.resolved), columns, tile=TILE)
        return whole[self.rows(call)[2]].contiguous()

    def padding(self, call: Call) -> Tensor:
        ones = torch.ones(self.shape_of_scales(call), dtype=torch.uint8, device="cpu")
        return self.memory(ones, call) == 0

    def viewed(self, memory: Tensor, call: Call) -> Tensor:
        """Flat scale bytes ``memory`` ``[bytes]``, uint8, in the shape that is returned: ``[bytes]``, or one with the
        expert last."""
        return memory

    def flat(self, memory: Tensor, call: Call) -> Tensor:
        """The inverse of :meth:`viewed`: uint8 ``[bytes]`` of ``memory`` ``[...]``."""
        return memory

    def codes(self, codes: Tensor, call: Call) -> Tensor:
        packed = pack(codes) if self.packed else codes
        shape = self.stored_shape(call)
        whole = torch.zeros(torch.Size(shape[:-1]).numel(), shape[-1], dtype=torch.uint8, device=packed.device)
        whole[self.rows(call)[0]] = packed.view(torch.uint8)
        return self.outward(whole.view(packed.dtype).reshape(shape))

    def codes_of(self, q: Tensor, call: Call) -> Tensor:
        shape = self.stored_shape(call)
        stored = take_rows(self.inward(q).reshape(torch.Size(shape[:-1]).numel(), shape[-1]), self.rows(call)[0])
        return unpack(stored) if self.packed else stored

    def stored_shape(self, call: Call) -> tuple[int, ...]:
        """The shape of ``q`` in memory."""
        rows, k = call.inputs["x"].shape[:-1], self.columns(call.inputs)
        return (*rows, k // 2 if self.packed else k)

    def outward(self, q: Tensor) -> Tensor:
        """Codes ``q`` ``[..., K]`` in memory, of any dtype, as they are returned: a view ``[...]`` of the same
        dtype."""
        return q

    def inward(self, q: Tensor) -> Tensor:
        """The inverse of :meth:`outward`: a view ``[..., K]`` of ``q`` ``[...]``, of the same dtype."""
        return q

    def shape_of_codes(self, call: Call) -> tuple[int, ...]:
        return tuple(self.outward(torch.empty(self.stored_shape(call), dtype=torch.uint8, device="meta")).shape)

    def outputs(self, call: Call) -> dict[str, Out]:
        """As of any quantiser; codes and scale bytes of no expert are unspecified."""
        due = super().outputs(call)
        owned = torch.zeros(self.stored_shape(call), dtype=torch.bool, device="cpu").flatten(0, -2)
        owned[self.rows(call)[0]] = True
        whole = self.outward(owned.reshape(self.stored_shape(call)))
        return {
            "q": Out(due["q"].shape, due["q"].dtypes, whole),
            "scale": Out(due["scale"].shape, due["scale"].dtypes, ~self.padding(call)),
        }


class MaskedQuantiser(ExpertQuantiser):
    """``x [G, M, K]`` of which expert ``g`` has its first ``mask[g]`` rows (0 to M); the others are not read.

    The tiles of expert ``g`` start at row ``g align(M, 128)`` of the scale bytes. ``q`` is the ``[G, M, K]`` (packed:
    ``[G, M, K/2]``) of the memory seen as ``[M, K, G]``; ``scale`` is the memory ``[G, rm, rk, 32, 4, 4]`` seen as
    ``[32, 4, rm, 4, rk, G]``, with ``rm = ceil(M/128)`` and ``rk = ceil(C/4)`` for C scales of a row:
    ``memory.permute(3, 4, 1, 5, 2, 0)``.
    """

    shapes = {"q": "[M, K, G], of codes of E2M1 [M, K/2, G]", "scale": "[32, 4, ceil(M/128), 4, ceil(C/4), G]"}

    def experts(self, inputs: Inputs, options: Options) -> list[tuple[int, int, int]]:
        _, m, _ = inputs["x"].shape
        counts = inputs["mask"].tolist()
        if not all(0 <= count <= m for count in counts):
            raise InputError(f"mask is {counts}; an expert has 0 to {m} rows")
        return [(i * m, i * m + count, i * align(m, HEIGHT)) for i, count in enumerate(counts)]

    def height(self, inputs: Inputs, options: Options) -> int:
        groups, m, _ = inputs["x"].shape
        return int(groups * align(m, HEIGHT))

    def viewed(self, memory: Tensor, call: Call) -> Tensor:
        (groups, m, _), k = call.inputs["x"].shape, self.columns(call.inputs)
        tiles = align(m, HEIGHT) // HEIGHT, align(k // self.width, 4) // 4
        return memory.reshape(groups, *tiles, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)

    def flat(self, memory: Tensor, call: Call) -> Tensor:
        return memory.permute(5, 2, 4, 0, 1, 3).reshape(-1)

    def outward(self, q: Tensor) -> Tensor:
        return q.permute(1, 2, 0)

    def inward(self, q: Tensor) -> Tensor:
        return q.permute(2, 0, 1)


class ContiguousQuantiser(ExpertQuantiser):
    """``x [M, K]`` whose rows are one expert's after another's: expert ``i`` has those from ``p_i = expert_offsets[i]``
    to ``p_(i+1)``, excluded; ``expert_offsets [G + 1]`` begins with 0, never falls, and ends at M or before.

    The scale bytes have ``floor((M + 127 G) / 128) * 128`` rows of ``align(C, 4)`` columns, for C scales of a row. The
    tiles of expert ``i`` start at row

        tight         sum of align(m_j, 128) over j < i, with m_j the rows of expert j    (vLLM, torchao, PyTorch)
        flashinfer    floor((p_i + 127 i) / 128) * 128                                    (group_gemm_*_nt_groupwise)
    """

    shapes = {
        "q": "[M, K], of codes of E2M1 [M, K/2]",
        "scale": "floor((M + 127 G) / 128) * 128 * align(C, 4) bytes, flat",
    }
    options: ClassVar[tuple[OptionSpec, ...]] = (PLACEMENT,)

    def experts(self, inputs: Inputs, options: Options) -> list[tuple[int, int, int]]:
        offsets = self._offsets(inputs)
        placed = starts(offsets, str(options["placement"]))
        return list(zip(offsets, offsets[1:], placed, strict=False))

    def height(self, inputs: Inputs, options: Options) -> int:
        m, experts = inputs["x"].shape[0], inputs["expert_offsets"].numel() - 1
        return (m + (HEIGHT - 1) * experts) // HEIGHT * HEIGHT

    def _offsets(self, inputs: Inputs) -> list[int]:
        m, offsets = inputs["x"].shape[0], [int(p) for p in inputs["expert_offsets"].tolist()]
        if offsets[0] != 0 or offsets[-1] > m or any(b < a for a, b in zip(offsets, offsets[1:], strict=False)):
            raise InputError(f"expert_offsets is {offsets}; it must rise from 0 to at most {m} rows")
        if "global_scale" in inputs and inputs["global_scale"].numel() != len(offsets) - 1:
            raise ShapeError(
                f"global_scale has {inputs['global_scale'].numel()} values; expert_offsets of {len(offsets)} make "
                f"{len(offsets) - 1} experts"
            )
        return offsets


OFFSETS = TensorSpec(
    "expert_offsets", Kind.OFFSETS, I32, ("P",), "the first row of each expert, and behind the last one's"
)


class _Nvfp4:
    """NVFP4 under 2688/amax of each expert."""

    width = 16
    packed = True
    scale_dtype = torch.float8_e4m3fn

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return mx_recipes.FLASHINFER_NVFP4_EXACT, mx_recipes.FLASHINFER_NVFP4, mx_recipes.VLLM_NVFP4


class _Mxfp4:
    """MXFP4 whose shared scale steps where amax, rounded to one fraction bit, is the next power of two."""

    packed = True

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return (mx_recipes.VLLM_MXFP4_EXPERTS,)


class _Mxfp8:
    """MXFP8 by NVIDIA's rounding of the shared scale."""

    traits = frozenset({FP8_CODES})

    def declared(self, inputs: Inputs, options: Options) -> tuple[Recipe, ...]:
        return recipes.TE_MXFP8_1X32, mx_recipes.FLASHINFER_CUTILE_MXFP8, recipes.FLASHINFER_MXFP8_1X32


@register
class ScaledFp4GroupedQuantize(_Nvfp4, MaskedQuantiser):
    name = "scaled_fp4_grouped_quantize"
    summary = "NVFP4 of the first rows of each expert, for masked grouped products"
    source = "FlashInfer scaled_fp4_grouped_quantize"
    inputs = (
        TensorSpec("x", Kind.VALUES, WIDE, ("G", "M", "K"), "a buffer for each expert, K a multiple of 16"),
        MASK,
        GLOBALS,
    )


@register
class ScaledFp4ExpertsQuant(_Nvfp4, ContiguousQuantiser):
    name = "scaled_fp4_experts_quant"
    summary = "NVFP4 of rows that lie expert by expert, each expert's scales in tiles of its own"
    source = "vLLM scaled_fp4_experts_quant; FlashInfer group_gemm_nvfp4_nt_groupwise for its placement"
    inputs = (
        TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "rows expert by expert, K a multiple of 16"),
        TensorSpec("global_scale", Kind.SCALES, F32, ("G",), "2688/amax, one for each expert"),
        OFFSETS,
    )


@register
class Mxfp4ExpertsQuant(_Mxfp4, ContiguousQuantiser):
    name = "mxfp4_experts_quant"
    summary = "MXFP4 of rows that lie expert by expert, each expert's scales in tiles of its own"
    source = "vLLM mxfp4_experts_quant"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "rows expert by expert, K a multiple of 32"), OFFSETS)


@register
class Mxfp8GroupedQuantize(_Mxfp8, MaskedQuantiser):
    name = "mxfp8_grouped_quantize"
    summary = "MXFP8 of the first rows of each expert, for masked grouped products"
    source = "FlashInfer mxfp8_grouped_quantize"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("G", "M", "K"), "a buffer for each expert, K a multiple of 32"), MASK)


@register
class Mxfp8ExpertsQuant(_Mxfp8, ContiguousQuantiser):
    name = "mxfp8_experts_quant"
    summary = "MXFP8 of rows that lie expert by expert, each expert's scales in tiles of its own"
    source = "SGLang es_sm100_mxfp8_blockscaled_grouped_quant; FlashInfer group_gemm_mxfp8_mxfp4_nt_groupwise"
    inputs = (TensorSpec("x", Kind.VALUES, WIDE, ("M", "K"), "rows expert by expert, K a multiple of 32"), OFFSETS)
