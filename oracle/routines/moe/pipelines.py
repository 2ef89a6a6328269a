"""Whole layers of experts as lists of steps: one row for each library's pipeline.

A row says in which order a layer quantises, multiplies, activates, requantises, weights and adds, and where it rounds:

    quantise   recipe of the input; None: it arrives as codes with scales
    weights    what shares a scale of a weight: an expert, an output channel, a 128x128 block, 128 columns of a row
    steps      roundings between the products (:class:`oracle.truth.moe.Steps`): the stored dtype, the activation,
               the recipe of the intermediate
    ways       how the experts' outputs become a token's (:class:`oracle.truth.moe.Combine`), the usual one first; a
               library that chooses by itself has several

What a row cannot say does not exist for :mod:`oracle.routines.moe.pipeline_contract`, which reads nothing else.
Permutation is no step: rows of an expert are those that chose it, in any order, and no value depends on the order.

Sources are named in the rows, at the commits of 2025 and 2026 that are in public. The first products of TensorRT-LLM's
block-scaled kernel leave as codes, by a formula inside its binary: every float32 formula is admitted. Not covered:
biases, other activations than silu-and-mul, float16, latency modes, the exchange between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.numbers import recipes
from oracle.numbers.recipes import Recipe
from oracle.truth.moe import Activation, Combine, Steps


class Sharing(StrEnum):
    """What shares a scale of a weight ``[E, N, K]``, and so the shape of its scales."""

    EXPERT = "an expert: [E]"
    CHANNEL = "an output channel: [E, N]"
    BLOCK = "a block: [E, ceil(N / 128), ceil(K / 128)]"
    GROUP = "128 columns of a row: [E, N, ceil(K / 128)]"


PROMOTED = {"sm90": ("sm90.promote128",), "sm89": ("sm89.promote128",), "cpu": (IEEE32,)}
CHAINED = {"sm90": ("sm90.chain",), "sm89": ("sm89.chain",), "cpu": (IEEE32,)}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One layer; see the module's text.

    Attributes
    ----------
    up_first : the rows of ``w13`` are up, then gate.
    mapped : an expert map says which local expert a global one is.
    on_input : the weights may multiply the input instead (one expert for each token).
    multiplied : the intermediate is multiplied by a given value before it is cast; so is the input of int4 layers.
    routed : the layer gets logits and routes by itself.
    apart : gate and up rows have scales of their own for each expert, and the activation leaves in units of the second
        input's scale.
    """

    name: str
    summary: str
    source: str
    weights: Sharing
    steps: Steps
    quantise: Recipe | None = None
    ways: tuple[Combine, ...] = (Combine.STORED,)
    numerics: Mapping[str, tuple[str, ...]]
    up_first: bool = False
    mapped: bool = False
    on_input: bool = False
    multiplied: bool = False
    routed: bool = False
    apart: bool = False

    @property
    def static(self) -> bool:
        """Whether the scales of the input and of the intermediate are given."""
        return self.quantise is not None and self.quantise.formula is recipes.ScaleFormula.GIVEN


_GROUP, _TOKEN, _GIVEN = recipes.VLLM_GROUP, recipes.VLLM_TOKEN, recipes.VLLM_STATIC
_TRITON = "vLLM fused_moe/fused_moe.py fused_experts_impl"
_TRITON_WAYS = (Combine.WEIGHTED, Combine.RUNNING)
_CUTLASS = "vLLM fused_moe/cutlass_moe.py run_cutlass_moe_fp8"
_FUSED = "FlashInfer csrc/fused_moe/cutlass_backend cutlass_fused_moe_kernels.cuh"
_FINALIZE = (Combine.ATOMIC, Combine.STORED)
_TRTLLM = "FlashInfer csrc/trtllm_fused_moe_kernel_launcher.cu"
_SM100 = {"sm100": ("sm100.promote128",), **PROMOTED}

PIPELINES = (
    # vLLM's Triton kernel, and SGLang's copy: weighted in the epilogue of the second product. moe_sum adds 2 to 4
    # slots in bfloat16 (vLLM issue 15045), other numbers of slots go to at::sum_out.
    Pipeline(
        name="fused_experts_tensor", summary="Triton experts, static scales", source=_TRITON,
        weights=Sharing.EXPERT, quantise=_GIVEN, steps=Steps(recipe=_GIVEN), ways=_TRITON_WAYS,
        numerics=CHAINED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="fused_experts_channel", summary="Triton experts, a scale for each token and output channel",
        source=_TRITON, weights=Sharing.CHANNEL, quantise=_TOKEN, steps=Steps(recipe=_TOKEN), ways=_TRITON_WAYS,
        numerics=CHAINED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="fused_experts_block", summary="Triton experts, 1x128 and 128x128 blocks", source=_TRITON,
        weights=Sharing.BLOCK, quantise=_GROUP, steps=Steps(recipe=_GROUP), ways=_TRITON_WAYS,
        numerics=PROMOTED, mapped=True, on_input=True,
    ),
    # DeepGEMM: products stored, gathered in float32; first releases weighted in place and added by moe_sum.
    Pipeline(
        name="deep_gemm_moe", summary="DeepGEMM's contiguous products, blocks", weights=Sharing.BLOCK,
        source="vLLM fused_moe/deep_gemm_moe.py, deep_gemm_utils.py ep_gather", quantise=_GROUP,
        steps=Steps(recipe=_GROUP), numerics=PROMOTED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="batched_deep_gemm_moe", summary="DeepGEMM's masked products; intermediate quantised in bfloat16 steps",
        source="vLLM fused_moe/batched_deep_gemm_moe.py, csrc persistent_masked_m_silu_mul_quant",
        weights=Sharing.BLOCK, quantise=_GROUP, steps=Steps(recipe=recipes.VLLM_SILU_MASKED), numerics=PROMOTED,
    ),
    # CUTLASS: moe_unpermute weights in float32, the first release in the stored dtype.
    Pipeline(
        name="cutlass_moe_fp8", summary="cutlass_moe_mm, static scales", source=_CUTLASS, weights=Sharing.EXPERT,
        quantise=_GIVEN, steps=Steps(recipe=_GIVEN), ways=(Combine.STORED, Combine.SCALED), numerics=CHAINED,
        mapped=True, on_input=True,
    ),
    Pipeline(
        name="cutlass_moe_fp8_channel", summary="cutlass_moe_mm, a scale for each token and output channel",
        source=_CUTLASS, weights=Sharing.CHANNEL, quantise=_TOKEN, steps=Steps(recipe=_TOKEN),
        ways=(Combine.STORED, Combine.SCALED), numerics=CHAINED, mapped=True, on_input=True,
    ),
    Pipeline(
        name="cutlass_fused_experts_fp8", summary="fp8_blockwise_scaled_grouped_mm, 1x128 and 128x128 blocks",
        source="SGLang layers/moe/cutlass_moe.py cutlass_fused_experts_fp8", weights=Sharing.BLOCK,
        quantise=recipes.SGLANG_GROUP, steps=Steps(recipe=recipes.SGLANG_GROUP), numerics=PROMOTED,
    ),
    # SGLang's masked products: after DeepEP's dispatch, which combines by itself, or after its own permutation.
    Pipeline(
        name="deepep_moe_masked", summary="masked products of tokens that DeepEP quantised and dispatched",
        source="SGLang layers/moe/ep_moe/layer.py forward_deepgemm_masked; DeepEP internode_ll.cu combine",
        weights=Sharing.BLOCK, quantise=recipes.DEEPEP_1X128, steps=Steps(recipe=recipes.SGLANG_TRITON_COLUMN),
        numerics=PROMOTED,
    ),
    Pipeline(
        name="ep_moe_masked", summary="masked products, weighted and added in bfloat16 slot by slot",
        source="SGLang layers/moe/ep_moe/kernels.py moe_ep_deepgemm_preprocess, post_reorder_triton_kernel",
        weights=Sharing.BLOCK, quantise=recipes.SGLANG_GROUP, steps=Steps(recipe=recipes.SGLANG_TRITON_COLUMN),
        ways=(Combine.REORDERED, Combine.FUSED), numerics=PROMOTED,
    ),
    # FlashInfer: fused finalize adds bfloat16 atomically, the other one float32; the tuner picks unless it is told.
    Pipeline(
        name="cutlass_fused_moe_tensor", summary="cutlass_fused_moe of FP8 inputs, a scale for each expert",
        source=_FUSED, weights=Sharing.EXPERT, steps=Steps(activation=Activation.NONE, recipe=recipes.TORCH_STATIC),
        ways=_FINALIZE, numerics=CHAINED, up_first=True, multiplied=True,
    ),
    Pipeline(
        name="cutlass_fused_moe_block", summary="cutlass_fused_moe with use_deepseek_fp8_block_scale",
        source=_FUSED, weights=Sharing.BLOCK, quantise=recipes.FLASHINFER_1X128,
        steps=Steps(activation=Activation.PRODUCT, recipe=recipes.FLASHINFER_1X128), numerics=PROMOTED, up_first=True,
    ),
    Pipeline(
        name="cutlass_fused_moe_w4", summary="cutlass_fused_moe of int4 weights in groups of 128, E4M3 inputs",
        source=f"{_FUSED}; TensorRT-LLM preQuantScaleKernel.cu, sm90 mixed-input mainloop (groups scale accumulators)",
        weights=Sharing.GROUP, quantise=recipes.TORCH_STATIC,
        steps=Steps(activation=Activation.PRODUCT, recipe=recipes.TORCH_STATIC), ways=_FINALIZE, numerics=PROMOTED,
        up_first=True, multiplied=True,
    ),
    Pipeline(
        name="trtllm_fp8_block_scale_moe", summary="routing and experts; the first product leaves as codes",
        source=f"{_TRTLLM}; csrc/trtllm_fused_moe_dev_kernel.cu activationDeepSeekKernel, finalizeKernel",
        weights=Sharing.BLOCK, numerics=_SM100, up_first=True, routed=True,
        steps=Steps(first=torch.float32, activation=Activation.NONE, hidden=recipes.TRTLLM_GEN_1X128,
                    recipe=recipes.TRTLLM_GEN_1X128),
    ),
    Pipeline(
        name="trtllm_fp8_per_tensor_scale_moe", summary="routing and experts, static scales; nothing stored between",
        source=_TRTLLM, weights=Sharing.EXPERT, numerics={"sm100": ("sm100.chain",), **CHAINED},
        steps=Steps(first=torch.float32, activation=Activation.NONE, recipe=recipes.TORCH_STATIC),
        up_first=True, routed=True, apart=True,
    ),
)  # fmt: skip
"""Every pipeline, in the order of the libraries."""


def steps_by(pipeline: Pipeline, combine: Combine) -> Steps:
    """The pipeline's steps with one of its ways to combine."""
    return replace(pipeline.steps, combine=combine)
