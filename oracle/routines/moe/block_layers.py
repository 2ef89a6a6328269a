"""Layers of experts in NVFP4, MXFP4 and MXFP8 as rows, as :mod:`oracle.routines.moe.pipelines` has them in FP8.

A row says, beside what a :class:`Pipeline` has, in which format the weights are and whether a product has factors and
biases of its own::

    weights     codes of E2M1, two a byte, or of E4M3, and one scale byte for 16 (E4M3) or 32 columns (E8M0) of a row
    globals     each expert quantises the input and the intermediate under global scales of its own (NVFP4)
    factors     float32 alpha of each expert, by which the sum of a product is multiplied before it is stored
    biases      float32, added after the factor; gates: alpha, beta and limit of each expert's activation

The contract takes scales in rows, one a block: their 128x4 tiles, shuffles and swizzles are contracts of their own.
Permutation is no step. Each expert gathers its rows and quantises them, so that a token has as many codes as experts.

*Admissible outputs.* As of the other layers: intervals through every step, an E4M3 or E8M0 scale that may step being a
box of its own (:mod:`oracle.bounds.code_boxes`). A block-scaled instruction loses less than float32 additions in any
order (:mod:`oracle.bounds.boxed`), so both products are bounded by these.

NaN and infinity in a token: nothing is claimed of its output.
Sources: those of the rows. Not covered: float16, weights kept in bfloat16, routing inside the layer, DeepGEMM's mega
layer, padding of K, judging by bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.boxed import Box
from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, ShapeError
from oracle.numbers import mx_recipes, recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import Recipe
from oracle.routines.base import E4M3, F32, INTEGERS, Call, Inputs, Options, Out, Output, TensorSpec, register
from oracle.routines.moe.moe_ranges import input_boxes
from oracle.routines.moe.pipelines import (
    ONE,
    Parts,
    Pipeline,
    PipelineContract,
    Route,
    Sharing,
    described,
    options_of,
)
from oracle.routines.mx.contract import unpack
from oracle.routines.traits import Kind
from oracle.tensorcore.identify import Match
from oracle.truth.layout import swap_w13_to_w31
from oracle.truth.moe import Activation, Combine, Experts, Steps, Tokens, as_float32

BYTES = (torch.uint8,)
NVF4 = {"sm100": ("sm100.chain_nvf4",), "sm120": ("sm120.chain_nvf4",), "sm90": (IEEE32,), "cpu": (IEEE32,)}
MXF = {"sm100": ("sm100.chain_ue8m0",), "sm120": ("sm120.chain_ue8m0",), "sm90": (IEEE32,), "cpu": (IEEE32,)}
"""The arithmetic of Blackwell's block-scaled instructions; elsewhere codes are dequantised, in any order."""


@dataclass(frozen=True, kw_only=True)
class BlockPipeline(Pipeline):
    """One layer whose operands have a scale for each block of a row; see the module's text.

    Attributes
    ----------
    packed : codes of a weight are those of E2M1, two a byte; else E4M3.
    factored : products have factors and, for NVFP4, global scales.
    affine : biases and the parameters of an activation may be given for each expert.
    given : the input arrives as codes with scales, in the format of the recipe.
    """

    weights: Sharing = Sharing.GROUP
    packed: bool = True
    factored: bool = False
    affine: bool = False
    given: bool = False

    @property
    def recipe(self) -> Recipe:
        """The recipe of the input."""
        assert self.quantise is not None
        return self.quantise

    @property
    def width(self) -> int:
        """Columns that share a scale of a weight: those of a block of the input's recipe."""
        return self.recipe.block.columns or 0

    @property
    def leveled(self) -> bool:
        """Whether codes are under global scales."""
        return self.recipe.scaling.global_scale


_NVFP4, _MXFP8 = mx_recipes.FLASHINFER_NVFP4_EXACT, recipes.TE_MXFP8_1X32
_CUTLASS = "vLLM fused_moe/cutlass_moe.py"
_FI = "FlashInfer csrc/fused_moe/cutlass_backend cutlass_fused_moe_kernels.cuh"

ROWS = (
    BlockPipeline(
        name="cutlass_moe_fp4", summary="cutlass_fp4_moe_mm: each expert quantises its rows to NVFP4",
        source=f"{_CUTLASS} run_cutlass_moe_fp4", quantise=_NVFP4, ways=(Combine.SCALED,), numerics=NVF4,
        steps=Steps(activation=Activation.PRODUCT, recipe=_NVFP4), mapped=True, factored=True,
    ),
    BlockPipeline(
        name="cutlass_moe_mxfp4", summary="cutlass_mxfp4_moe_mm: rows in MXFP4 under scales of a rounded amax",
        source=f"{_CUTLASS} run_cutlass_moe_mxfp4", quantise=mx_recipes.VLLM_MXFP4_EXPERTS, ways=(Combine.SCALED,),
        steps=Steps(activation=Activation.PRODUCT, recipe=mx_recipes.VLLM_MXFP4_EXPERTS), numerics=MXF, mapped=True,
    ),
    BlockPipeline(
        name="cutlass_fused_moe_nvfp4", summary="cutlass_fused_moe in NVFP4: activation rounded, then quantised",
        source=_FI, quantise=_NVFP4, ways=(Combine.ATOMIC, Combine.STORED), numerics=NVF4, up_first=True, factored=True,
        steps=Steps(activation=Activation.PRODUCT, recipe=_NVFP4), affine=True,
    ),
    BlockPipeline(
        name="cutlass_fused_moe_mxfp8_mxfp4", summary="cutlass_fused_moe of MXFP8 rows and MXFP4 weights",
        source=_FI, quantise=_MXFP8, ways=(Combine.ATOMIC, Combine.STORED), numerics=MXF, up_first=True, factored=True,
        steps=Steps(activation=Activation.PRODUCT, recipe=_MXFP8), affine=True,
    ),
    BlockPipeline(
        name="cutlass_fused_moe_mxfp8", summary="cutlass_fused_moe of MXFP8 rows and weights",
        source=_FI, quantise=_MXFP8, ways=(Combine.ATOMIC, Combine.STORED), numerics=MXF, up_first=True, factored=True,
        steps=Steps(activation=Activation.PRODUCT, recipe=_MXFP8), packed=False, affine=True,
    ),
    BlockPipeline(
        name="cute_dsl_fused_moe_nvfp4", summary="CuTe DSL in NVFP4: the float32 activation is quantised itself",
        source="FlashInfer flashinfer/fused_moe/cute_dsl, w4a4", quantise=_NVFP4,
        ways=(Combine.ATOMIC, Combine.WEIGHTED),
        steps=Steps(first=torch.float32, activation=Activation.NONE, recipe=_NVFP4), numerics=NVF4, up_first=True,
        factored=True,
    ),
    BlockPipeline(
        name="cute_dsl_fused_moe_mxfp8_mxfp4", summary="CuTe DSL of MXFP8 rows and MXFP4 weights, float32 in between",
        source="FlashInfer flashinfer/fused_moe/cute_dsl", quantise=_MXFP8, ways=(Combine.ATOMIC, Combine.WEIGHTED),
        steps=Steps(first=torch.float32, activation=Activation.NONE, recipe=_MXFP8), numerics=MXF, up_first=True,
        factored=True,
    ),
    # TensorRT-LLM: the first product leaves its closed kernel as codes, of a float32 activation or of a rounded one.
    *(
        BlockPipeline(
            name=f"trtllm_fp4_block_scale_moe_{kind}", summary=f"TensorRT-LLM's experts of {words}; ids are given",
            source="FlashInfer csrc/trtllm_fused_moe_kernel_launcher.cu, trtllm_fp4_block_scale_routed_moe",
            quantise=recipe, numerics=numerics, up_first=True, factored=True, affine=True, given=True,
            steps=Steps(first=torch.float32, activation=Activation.NONE, recipe=recipe),
            activations=(Activation.PRODUCT,), dispatched=False,
        )
        for kind, words, recipe, numerics in (
            ("nvfp4", "NVFP4 codes and weights", _NVFP4, NVF4),
            ("mxfp8_mxfp4", "MXFP8 codes and MXFP4 weights", _MXFP8, MXF),
        )
    ),
    BlockPipeline(
        name="b12x_fused_moe", summary="CuTe DSL's layer of sm120 in NVFP4: activation and output are rounded",
        source="FlashInfer fused_moe/cute_dsl/blackwell_sm12x/moe_static_kernel.py (0.6.18.post1)", quantise=_NVFP4,
        ways=(Combine.SCATTERED,), numerics=NVF4, up_first=True, factored=True, dispatched=False,
        steps=Steps(first=torch.float32, activation=Activation.PRODUCT, recipe=_NVFP4),
    ),
    BlockPipeline(
        name="fp8_fp4_mega_moe", summary="DeepGEMM's kernel of a layer on sm100, one rank, codes and scales given",
        source="DeepGEMM sm100_fp8_fp4_mega_moe.cuh (sgl-deep-gemm 0.1.4.post1)", quantise=_MXFP8, numerics=MXF,
        steps=Steps(activation=Activation.NONE, recipe=recipes.DEEPGEMM_DEVICE_1X32_UE8M0, weighted=True), given=True,
        dispatched=False,
    ),
)  # fmt: skip  # a table, one row a line
"""Every layer in blocks, in the order of the libraries."""


def inputs_of(row: BlockPipeline) -> tuple[TensorSpec, ...]:
    """What the layer of a row takes."""
    order = "up rows, then gate rows" if row.up_first else "gate, then up rows"
    columns = {"w13": "H", "w2": "I"}
    stored = {"H": "H/2", "I": "P"} if row.packed else {"H": "H", "I": "I"}
    codes = "codes of E2M1, two a byte" if row.packed else "codes of E4M3"
    dtypes = BYTES if row.packed else (torch.float8_e4m3fn,)
    form = "E4M3" if row.leveled else "E8M0"
    specs = [ONE]
    if row.given:
        two = row.leveled
        specs = [
            TensorSpec("a", Kind.CODES, BYTES if two else E4M3, ("T", "H/2" if two else "H"), "codes of the input"),
            TensorSpec("a_scale", Kind.SCALES, BYTES, ("T", f"H/{row.width}"), f"its {form} bytes"),
        ]
    for name, rows, doc in (("w13", "R", order), ("w2", "H", "down projection")):
        k = columns[name]
        specs.append(TensorSpec(name, Kind.CODES, dtypes, ("E", rows, stored[k]), f"{doc}: {codes}"))
        scale = ("E", rows, f"H/{row.width}" if k == "H" else "G")
        specs.append(
            TensorSpec(f"{name}_scale", Kind.SCALES, BYTES, scale, f"{form} bytes, one for {row.width} columns")
        )
    one = ("E",)
    if row.leveled:
        of = "encode scale of the {} (about 2688/amax) of each expert"
        places = {n: w for n, w in PLACES.items() if n == 2 or not row.given}
        specs += [TensorSpec(f"a{n}_gscale", Kind.SCALES, F32, one, of.format(w)) for n, w in places.items()]
    if row.factored:
        doc = "multiplies the sum of the {} product"
        specs += [TensorSpec(f"alpha{n}", Kind.ALPHA, F32, one, doc.format(w)) for n, w in ORDINALS.items()]
    specs += [
        TensorSpec("topk_ids", Kind.IDS, INTEGERS, ("T", "k"), "global experts of each token, -1 for none"),
        TensorSpec("topk_weights", Kind.WEIGHTS, F32, ("T", "k"), "their weights"),
    ]
    if row.mapped:
        doc = "local expert of each global one, or -1"
        specs.append(TensorSpec("expert_map", Kind.IDS, INTEGERS, ("X",), doc, optional=True))
    if row.affine:
        specs += [
            TensorSpec(
                "b1", Kind.BIAS, F32, ("E", "R"), "added to the first product, in the order of w13", optional=True
            ),
            TensorSpec(
                "b2", Kind.BIAS, F32, ("E", "H"), "added to the second product, before its weight", optional=True
            ),
            TensorSpec("gates", Kind.WEIGHTS, F32, ("E", "3"), "alpha, beta, limit of each expert", optional=True),
        ]
    return tuple(specs)


PLACES, ORDINALS = {1: "input", 2: "intermediate"}, {1: "first", 2: "second"}


class BlockLayerContract(PipelineContract):
    """For each token and each of its local experts ``e``, as the steps below say:

        xq   = the input's codes and scales, as expert e quantises it
        h    = alpha1[e] * (xq @ w13[e].T) + b1[e]      its gate and up columns; sums in float32
        act  = activation(gate, up)
        q, s = the recipe's codes and scales of act
        y    = alpha2[e] * ((q, s) @ w2[e].T) + b2[e]
        out  = the sum over its experts of weight * y, rounded as ``combine`` says, bfloat16

    Factors, global scales and biases are those of the inputs; what is no input is left out. The activation is
    ``silu(gate) * up``; with ``gates`` it is ``g / (1 + exp(-alpha g)) * (u + beta)`` with ``g = min(gate, limit)`` and
    ``u = min(max(up, -limit), limit)``, an infinite limit clamps nothing. The low nibble of a byte is the even column.
    A scale byte of E8M0 is ``2^(byte - 127)``, one of E4M3 its value.

    Ids of experts are global: expert ``id - first_expert`` is the local one, or ``expert_map[id]`` where a map is
    given. An id of -1 and the experts of other ranks add nothing, and a token without a local expert gives zeros.
    Global scales, alpha and limit are positive, factors and biases finite, and no scale byte is NaN. Of tokens with NaN
    or infinity, or whose intermediate may overflow, nothing is claimed; the others of their experts are judged. Rows of
    experts may be in any order: no value depends on it."""

    production = "mx_moe.moe_block_experts"
    row: ClassVar[BlockPipeline]
    golden_arches = ("cpu",)
    gpu = False  # its libraries compile it for sm100 and later alone

    def _check_scales(self, inputs: Inputs, e: int, r: int, h: int) -> None:
        row, i = self.row, inputs["w2"].shape[2] * (2 if self.row.packed else 1)
        if r != 2 * i:
            raise ShapeError(f"w13 has {r} rows for {i} columns of w2; it holds gate and up rows, [E, 2 I, H]")
        h = inputs["w2"].shape[1]
        if h % row.width or i % row.width:
            raise ShapeError(f"H={h} and I={i} must be multiples of {row.width}, the block of a scale")
        if (g := inputs["w2_scale"].shape[2]) != i // row.width:
            raise ShapeError(
                f"w2_scale has {g} columns; I={i} takes {i // row.width}, one for {row.width} columns of w2"
            )
        for name in {"a_scale", "w13_scale", "w2_scale"} & {*inputs}:
            values = decode(inputs[name].view(self._scale_dtype))
            if not bool(torch.isfinite(values).all()):
                raise InputError(f"{name} holds a NaN byte; every scale is a number")
        for name in ("a1_gscale", "a2_gscale"):
            if name in inputs and not bool((inputs[name] > 0).all() & torch.isfinite(inputs[name]).all()):
                raise InputError(f"{name} is {inputs[name].tolist()}; a global scale is positive and finite")
        for name in ("alpha1", "alpha2", "b1", "b2"):
            if name in inputs and not bool(torch.isfinite(inputs[name]).all()):
                raise InputError(f"{name} holds NaN or infinity; pass finite numbers")
        if (gates := inputs.get("gates")) is not None:
            alpha, beta, limit = gates.unbind(dim=1)
            if not bool(
                (alpha > 2.0**-10).all() & (alpha < 2.0**10).all() & (beta.abs() < 2.0**10).all() & (limit > 0).all()
            ):
                raise InputError("gates are alpha within 2^-10 and 2^10, beta within 2^10 and a positive limit")

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.row.leveled else torch.float8_e8m0fnu

    def outputs(self, call: Call) -> dict[str, Out]:
        known = call.inputs
        return {"out": Out((known["topk_ids"].shape[0], known["w2"].shape[1]), (torch.bfloat16,))}

    def parts(self, inputs: Inputs, options: Options, route: Route) -> Parts:
        row, experts = self.row, self.experts(inputs, options)
        if row.given:
            codes = unpack(inputs["a"]) if row.leveled else inputs["a"]
            scale = as_float32(inputs["a_scale"].view(self._scale_dtype))
            values = decode(codes, row.recipe.element)
            lost = ~torch.isfinite(values).all(dim=1)
            known = values.masked_fill(lost[:, None], 0.0)
            units = decode(scale).masked_fill(lost[:, None], 1.0)
            box = Box(known, known, units, units, row.recipe.element)
            return Parts(Tokens(codes, scale, route.ids, route.weights), experts, lambda expert: [box], lost)
        x = inputs["x"]
        given = [inputs["a1_gscale"][e] if row.leveled else None for e in range(len(inputs["w13"]))]
        each, boxes, unknown = [], [], None
        for level in given if row.leveled else given[:1]:
            quantised = quantize(x, row.recipe, global_scale=level)
            each.append((quantised.codes, as_float32(quantised.scale)))
            own, unknown = input_boxes(x, row.recipe, None, level)
            boxes.append(own)
        several = tuple(each[min(e, len(each) - 1)] for e in range(len(given)))
        tokens = Tokens(*each[0], route.ids, route.weights, bool(options.get("apply_router_weight_on_input")), several)
        return Parts(tokens, experts, lambda expert: boxes[min(expert, len(boxes) - 1)], unknown)

    def experts(self, inputs: Inputs, options: Options) -> Experts:
        row = self.row
        w13, w2 = (_unpacked(inputs[name]) if row.packed else inputs[name] for name in ("w13", "w2"))
        s13, s2 = (as_float32(inputs[f"{name}_scale"].view(self._scale_dtype)) for name in ("w13", "w2"))
        b1 = inputs.get("b1", torch.zeros(w13.shape[:2], dtype=torch.float32, device=w13.device))
        if row.up_first:
            w13, s13 = swap_w13_to_w31(w13), swap_w13_to_w31(s13)
            b1 = torch.cat(b1.chunk(2, dim=1)[::-1], dim=1)
        b2 = inputs.get("b2", torch.zeros(w2.shape[:2], dtype=torch.float32, device=w2.device))
        return Experts(
            w13,
            s13,
            w2,
            s2,
            first=options["first_expert"],
            width=row.width,
            factors=(inputs["alpha1"], inputs["alpha2"]) if row.factored else None,
            globals=(inputs.get("a1_gscale", inputs["a2_gscale"]), inputs["a2_gscale"]) if row.leveled else None,
            biases=(b1, b2) if {"b1", "b2"} & set(inputs) else None,
            gates=inputs.get("gates"),
        )

    def identify(self, inputs: Inputs, output: Output, *, arch: str | None, **options: object) -> list[Match]:
        """The row's ways to combine by the fraction of elements that equal the reference with them, best first."""
        return super().identify(inputs, output, arch=None, **options)


def _unpacked(packed: Tensor) -> Tensor:
    """Codes ``[E, N, K]``, a byte each, of ``packed`` ``[E, N, K/2]``."""
    return unpack(packed.flatten(0, 1)).reshape(*packed.shape[:2], -1)


def _text(row: BlockPipeline) -> str:
    """The steps of a row, with what the weights are."""
    form, scale = "E2M1, two a byte" if row.packed else "E4M3", "E4M3" if row.leveled else "E8M0"
    codes = f"{form}; {scale} scales of {row.width} columns"
    lines = described(replace(row, weights=Sharing.CHANNEL)).splitlines()
    return "\n".join(
        f"    scales of the weights: {codes}" if "scales of the weights" in line else line for line in lines
    )


def _registered(row: BlockPipeline) -> type[BlockLayerContract]:
    """The contract of one row."""
    contract: type[BlockLayerContract] = type(
        row.name,
        (BlockLayerContract,),
        {
            "__module__": __name__,
            "__doc__": _text(row),
            "row": row,
            "name": row.name,
            "summary": row.summary,
            "source": row.source,
            "inputs": inputs_of(row),
            "options": tuple(o for o in options_of(row) if o.name != "apply_router_weight_on_input"),
            "numerics": row.numerics,
            "dispatched": row.dispatched,
            "production": BlockLayerContract.production if row.dispatched else "",
        },
    )
    register(contract)
    return contract


CONTRACTS: Mapping[str, type[BlockLayerContract]] = {row.name: _registered(row) for row in ROWS}
"""Every contract of this file by name."""
