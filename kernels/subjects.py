"""The layer's routines as subjects for a conformance tool, which finds them through an entry point.

:func:`subjects` lists one record per contract, backend and device, with the accumulation that it declares. Nothing is
imported from the tool; inputs and options carry the contracts' names.
The adapters to calls are in :mod:`kernels.calls`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from kernels import (
    batched,
    blockscaled,
    calc,
    calls,
    fused,
    kv_cache,
    layout,
    linear,
    moe,
    moe_layer,
    moe_pipelines,
    mx,
    mx_columns,
    mx_experts,
    mx_forms,
    mx_products,
    platform,
    quantize,
    routes,
    tiles,
)
from kernels.calls import Inputs, Options, Outputs, Runner
from kernels.config import current_config
from kernels.decisions import DECISIONS, RECORDS
from kernels.errors import DtypeError, OptionError
from kernels.plan import TABLE, backend_of
from kernels.records import Problem

NUMERICS = {
    # (backend, operation) on sm90: how the kernel accumulates
    ("cutlass", "linear"): "sm90.chain",
    ("cutlass", "block_linear"): "sm90.promote128",
    ("torch", "linear"): "sm90.promote128.scale_after",
    ("torch", "torch_linear"): "sm90.promote128.scale_after",
    ("torch", "block_linear"): "sm90.promote128",
    ("deep_gemm", "fp8_gemm_nt"): "sm90.promote128",
    ("deep_gemm", "grouped_contiguous"): "sm90.promote128",
    ("deep_gemm", "grouped_masked"): "sm90.promote128",
    ("deep_gemm", "mqa_logits"): "sm90.mqa_logits",
    ("triton_gemm", "fp8_gemm_nt"): "sm90.promote128",
    ("triton_linear", "few_rows"): "sm90.promote128",
    ("triton_linear", "dynamic_blockscale"): "sm90.promote128",
    ("triton_gemm", "grouped_contiguous"): "sm90.promote128",
    ("triton_gemm", "grouped_masked"): "sm90.promote128",
    **{("deep_gemm", op): "sm90.promote128" for op in ("gemm_1d1d", "k_grouped", "skip_head_mid", "einsum")},
    ("flashinfer", "bmm"): "sm90.chain.product",
    ("flashinfer", "blockscale_sm90"): "sm90.promote128",
    ("triton_mx", "mx_product"): "sm90.bf16.dequantised",
}
WIDENED = {f"sm{sm}": f"sm{sm}.f16.promote128" for sm in (80, 86)}
"""How the layer's Triton products accumulate where they turn codes into float16."""
SUMS = frozenset(op for _, op in NUMERICS) | {"paged_mqa_logits", "grouped_scaled", "dynamic_blockscale", "moe_trtllm"}
"""Operations that accumulate: on a CPU in float32, any order."""

SEVERAL = frozenset({"cutlass_scaled_mm", "Fp8LinearOp"})
"""Contracts whose scales choose the kernel, each with its own accumulation: none is declared."""


@dataclass(frozen=True)
class Subject:
    """One routine on one backend.

    Attributes
    ----------
    name
        The backend.
    contract
        The routine's public name.
    arch
        ``cpu``, or ``sm90`` and the like.
    numerics
        Declared accumulation (``ieee32.any``: float32 in any order), or None where no sum is taken or none is known.
    device
        Where the inputs must lie.
    """

    name: str
    contract: str
    arch: str
    numerics: str | None
    device: str
    runner: Runner
    reason: str | None = None

    def why_not(self) -> str | None:
        """Why this subject cannot run on this machine; None when it can."""
        return self.reason

    @property
    def source(self) -> Runner:
        """The function whose file and line a report of a failure names."""
        return self.runner

    def run(self, inputs: Inputs, options: Options) -> Outputs:
        """Run the routine on fresh outputs; inputs are never written to.

        Raises
        ------
        NotImplementedError
            The backend does not offer this call (a dtype or an option outside its contract).
        """
        with routes.only(self.name):
            try:
                return self.runner(inputs, {k: v for k, v in options.items() if v is not None})
            except (DtypeError, OptionError) as error:
                raise NotImplementedError(str(error)) from error


def subjects() -> list[Subject]:
    """Every subject of this machine: CPU paths, and on a GPU its libraries, with reasons where they cannot run."""
    machine = platform.current_machine()
    devices = ["cpu"] if machine.vendor == "cpu" else ["cpu", "cuda"]
    found = []
    for contract, (op, runner) in CONTRACTS.items():
        for device in devices:
            for backend in TABLE[op]:
                why = backend_of(backend).why_not(_typical(op, contract, device), machine, current_config())
                if device == "cpu" and why is not None and len(TABLE[op]) > 1:
                    continue  # GPU libraries are no candidates for CPU tensors
                arch = "cpu" if device == "cpu" else machine.arch
                declared = None if contract in SEVERAL and arch != "cpu" else _numerics(backend, op, arch)
                found.append(Subject(backend, contract, arch, declared, device, runner, why))
    return found


def _typical(op: str, contract: str, device: str) -> Problem:
    kind = {"torch_per_token_w8a8_scaled_mm": "rowwise", "torch_channelwise_w8a8_scaled_mm": "unfused"}.get(contract)
    scales = ("token", "channel") if op == "grouped_scaled" else ("tensor", "tensor")
    return Problem(op, device=device, kernel=kind, a_scale=scales[0], b_scale=scales[1])


def _numerics(backend: str, op: str, arch: str) -> str | None:
    if op not in SUMS:
        return None
    if backend in ("triton_gemm", "triton_linear") and arch in WIDENED:
        return WIDENED[arch]
    return "ieee32.any" if arch == "cpu" else NUMERICS.get((backend, op)) if arch == "sm90" else None


CONTRACTS: dict[str, tuple[str, Runner]] = {
    # contract: (operation of the plan, how inputs and options become a call)
    "cutlass_scaled_mm": ("linear", calls.cutlass_scaled_mm),
    "torch_per_tensor_w8a8_scaled_mm": ("torch_linear", calls.with_out_dtype(linear.torch_per_tensor_w8a8_scaled_mm)),
    "torch_per_token_w8a8_scaled_mm": ("torch_linear", calls.with_out_dtype(linear.torch_per_token_w8a8_scaled_mm)),
    "torch_channelwise_w8a8_scaled_mm": ("torch_linear", calls.with_out_dtype(linear.torch_channelwise_w8a8_scaled_mm)),
    "fp8_gemm_nt": ("fp8_gemm_nt", calls.gemm),
    "fp8_blockscale_gemm_sm90": ("blockscale_sm90", calls.blockscale_sm90),
    "flashinfer_fp8_blockscale_gemm": ("blockscale_sm90", calls.wide_input(blockscaled.flashinfer_fp8_blockscale_gemm)),
    "dynamic_flashinfer_deepgemm_blockscale_gemm": (
        "dynamic_blockscale",
        calls.wide_input(blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm),
    ),
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": ("dynamic_blockscale", calls.wide_input(calls.block_scaled_layer)),
    "m_grouped_fp8_gemm_nt_contiguous": ("grouped_contiguous", calls.contiguous),
    "fp8_m_grouped_gemm_nt_masked": ("grouped_masked", calls.masked),
    "scaled_grouped_mm": ("grouped_scaled", calls.grouped_scaled),
    **{
        f"fp8_gemm_{name}": ("fp8_gemm_nt", calls.paired(verb, calls.extents(("a", m), ("b", n))))
        for name, verb, m, n in (
            ("nn", batched.fp8_gemm_nn, 0, 1),
            ("tn", batched.fp8_gemm_tn, 1, 1),
            ("tt", batched.fp8_gemm_tt, 1, 0),
        )
    },
    "fp8_gemm_nt_1d1d": (
        "gemm_1d1d",
        calls.paired(batched.fp8_gemm_nt_1d1d, calls.extents(("a", 0), ("b", 0)), "c"),
    ),
    "k_grouped_fp8_gemm_nt_contiguous": ("k_grouped", calls.k_grouped),
    "m_grouped_fp8_gemm_nn_contiguous": (
        "grouped_contiguous",
        calls.paired(batched.m_grouped_fp8_gemm_nn_contiguous, calls.extents(("a", 0), ("b", 2)), "m_indices"),
    ),
    "fp8_gemm_nt_skip_head_mid": ("skip_head_mid", calls.skip_head_mid),
    "fp8_einsum": (
        "einsum",
        calls.paired(partial(batched.fp8_einsum, "bhr,hdr->bhd"), calls.extents(("a", 0), ("a", 1), ("b", 1))),
    ),
    "bmm_fp8": ("bmm", calls.bmm),
    "gemm_fp8_nt_groupwise": ("fp8_gemm_nt", calls.runs(batched.gemm_fp8_nt_groupwise)),
    "batch_deepgemm_fp8_nt_groupwise": ("grouped_masked", calls.batched_masked),
    **{
        name: ("grouped_contiguous", calls.runs(getattr(batched, name)))
        for name in ("group_gemm_fp8_nt_groupwise", "cutlass_blockwise_scaled_grouped_mm")
    },
    **{
        name: ("grouped_scaled", calls.runs(getattr(batched, name)))
        for name in ("grouped_mm_fp8", "cutlass_moe_mm", "cutlass_w4a8_moe_mm")
    },
    "cutlass_w4a8_mm": ("linear", calls.runs(batched.cutlass_w4a8_mm)),
    "unified_encode_int4b": ("layout", calls.tensor(batched.unified_encode_int4b)),
    "cutlass_encode_and_reorder_int4b": ("layout", calls.tensor(batched.cutlass_encode_and_reorder_int4b)),
    "cutlass_pack_scale_fp8": ("layout", calls.tensor(batched.cutlass_pack_scale_fp8)),
    "fp8_mqa_logits": ("mqa_logits", calls.mqa_logits),
    "fp8_paged_mqa_logits": ("paged_mqa_logits", calls.paged_logits),
    "scaled_fp8_quant": ("quant_tensor", calls.codes_and_scale(quantize.scaled_fp8_quant)),
    "per_token_group_quant_fp8": ("quant_group", calls.codes_and_scale(quantize.per_token_group_quant_fp8)),
    "per_token_group_quant_fp8_packed": (
        "quant_group_packed",
        calls.codes_and_scale(quantize.per_token_group_quant_fp8_packed),
    ),
    "per_block_cast_to_fp8": ("cast", calls.codes_and_scale(quantize.per_block_cast_to_fp8)),
    "per_token_cast_to_fp8": ("cast", calls.codes_and_scale(quantize.per_token_cast_to_fp8)),
    "per_channel_cast_to_fp8": ("cast", calls.codes_and_scale(quantize.per_channel_cast_to_fp8)),
    "flashinfer_quantize_1x128": ("cast", calls.codes_and_scale(quantize.flashinfer_quantize_1x128)),
    "flashinfer_quantize_128x128": ("cast", calls.codes_and_scale(quantize.flashinfer_quantize_128x128, "w")),
    **{
        name: ("cast", calls.codes_and_scale(getattr(mx, name)))
        for name in ("mxfp8_quantize", "mxfp4_quantize", "nvfp4_quantize")
    },
    "scaled_fp4_quant": ("cast", calls.codes_and_scale(mx.nvfp4_quantize)),
    **{
        name: ("cast", calls.named(getattr(module, name), "q", "scale", *more))
        for module, name, *more in (
            (mx_columns, "mxfp8_quantize_columnwise"),
            (mx_columns, "mxfp8_quantize_2d"),
            (mx_columns, "mxfp8_quantize_3d"),
            (mx_forms, "mxfp6_quantize"),
            (mx_forms, "mxint8_quantize"),
            (mx_forms, "per_token_cast_to_fp4"),
            (mx_forms, "nvfp4_batched_quantize"),
            (mx_forms, "nvfp4_quantize_shuffled"),
            (mx_forms, "silu_and_mul_nvfp4_quantize"),
            (mx_experts, "silu_and_mul_scaled_nvfp4_experts_quantize"),
            (mx_forms, "nvfp4_quantize_stochastic"),
            (mx_forms, "nvfp4_quantize_2d"),
            (mx_forms, "nvfp4_quantize_4over6"),
            (mx_forms, "nvfp4_quantize_rht"),
            (mx_forms, "nvfp4_quantize_per_token", "row_scale"),
            (mx_forms, "nvfp4_quantize_of_fp8"),
            (mx_forms, "mxfp4_quantize_of_fp8"),
            (mx_forms, "fp8_block_to_mxfp8"),
            (mx_forms, "mxfp8_to_fp8_block"),
            (mx_experts, "scaled_fp4_grouped_quantize"),
            (mx_experts, "mxfp8_grouped_quantize"),
            (mx_experts, "scaled_fp4_experts_quant"),
            (mx_experts, "mxfp8_experts_quant"),
        )
    },
    **{
        name: ("cast", calls.tensor(getattr(mx_forms, name)))
        for name in (
            "mxfp6_dequantize",
            "mxint8_dequantize",
            "cast_back_from_fp4",
            "hadamard_transform",
            "block_scales_to_mxfp8",
            "transpose_packed_fp4",
        )
    },
    "mxfp8_dequantize_columnwise": ("cast", calls.tensor(mx_columns.mxfp8_dequantize_columnwise)),
    **{
        name: ("cast", calls.tensor(getattr(mx, name)))
        for name in ("mxfp8_dequantize", "mxfp4_dequantize", "nvfp4_dequantize")
    },
    **{
        name: ("mx_product", calls.tensor(getattr(mx_products, name)))
        for name in (
            "mm_mxfp8",
            "mm_fp4",
            "scaled_mm",
            "bmm_mxfp8",
            "group_gemm_mxfp8_mxfp4_nt_groupwise",
            "group_gemm_nvfp4_nt_groupwise",
            "scaled_grouped_mm_mx",
            "scaled_grouped_mm_mx_k_groups",
        )
    },
    "fp8_fp4_gemm_nt": ("mx_product", calls.fp8_fp4(mx_products.fp8_fp4_gemm_nt)),
    **{
        f"fp8_fp4_gemm_{form}": (
            "mx_product",
            calls.fp8_fp4(getattr(mx_products, f"fp8_fp4_gemm_{form}"), turned=turned),
        )
        for form, turned in (("nn", "b"), ("tn", "ab"), ("tt", "a"))
    },
    "m_grouped_fp8_fp4_gemm_nn_contiguous": (
        "mx_product",
        calls.fp8_fp4(mx_products.m_grouped_fp8_fp4_gemm_nn_contiguous, "m_indices", "b"),
    ),
    "m_grouped_fp8_fp4_gemm_nt_psum": (
        "mx_product",
        calls.fp8_fp4(partial(mx_products.m_grouped_fp8_fp4_gemm_nt_contiguous, use_psum_layout=True), "ends"),
    ),
    "k_grouped_fp8_gemm_tn_contiguous": ("mx_product", calls.k_groups_of_powers),
    "m_grouped_fp8_fp4_gemm_nt_contiguous": (
        "mx_product",
        calls.fp8_fp4(mx_products.m_grouped_fp8_fp4_gemm_nt_contiguous, "m_indices"),
    ),
    "m_grouped_fp8_fp4_gemm_nt_masked": (
        "mx_product",
        calls.fp8_fp4(mx_products.m_grouped_fp8_fp4_gemm_nt_masked, "masked_m"),
    ),
    "fp8_fp4_mqa_logits": ("mx_product", calls.fp4_logits),
    "fp8_fp4_paged_mqa_logits": ("mx_product", calls.fp4_paged_logits),
    "ceil_to_ue8m0": ("cast", calls.tensor(quantize.ceil_to_ue8m0)),
    "per_tensor_dequantize": ("cast", calls.tensor(quantize.per_tensor_dequantize)),
    "get_col_major_tma_aligned_tensor": ("layout", calls.tensor(layout.get_col_major_tma_aligned_tensor)),
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": (
        "layout",
        calls.tensor(layout.get_mn_major_tma_aligned_packed_ue8m0_tensor),
    ),
    "swap_w13_to_w31": ("layout", calls.tensor(layout.swap_w13_to_w31)),
    "reorder_rows_for_gated_act_gemm": ("layout", calls.tensor(layout.reorder_rows_for_gated_act_gemm)),
    "shuffle_matrix_a": ("layout", calls.tensor(layout.shuffle_matrix_a)),
    "Fp8LinearOp": ("linear", calls.linear_op),
    "cutlass_w8a8_scaled_mm": ("linear", calls.w8a8),
    "rocm_per_tensor_w8a8_scaled_mm": ("torch_linear", calls.with_out_dtype(linear.rocm_per_tensor_w8a8_scaled_mm)),
    "get_paged_mqa_logits_metadata": ("paged_metadata", calls.paged_metadata),
    "align": ("layout", calls.by_row(layout.align)),
    **{name: ("layout", calls.by_row(verb)) for name, verb in DECISIONS.items()},
    **{name: ("layout", calls.by_row_named(verb, *fields)) for name, (verb, fields) in RECORDS.items()},
    "swizzle_scale": ("layout", calls.tensor(layout.swizzle_scale)),
    "pad_token_groups": ("layout", calls.named(layout.pad_token_groups, "out", "starts", "ends")),
    "unpad_token_groups": ("layout", calls.tensor(layout.unpad_token_groups)),
    **{
        name: ("layout", calls.tensor(getattr(tiles, name)))
        for name in (
            "to_blocked",
            "from_blocked",
            "shuffle_matrix_sf_a",
            "swizzle_scale_experts",
            "to_blocked_k_groups",
        )
    },
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": ("layout", calls.packed_groups),
    "prepare_fp8_moe_layer_for_fi": ("layout", calls.prepared_layer),
    "ceil_div": ("layout", calls.by_row(layout.ceil_div)),
    "calculate_tile_tokens_dim": ("layout", calls.by_row(layout.calculate_tile_tokens_dim)),
    "align_fp8_moe_weights_for_fi": ("layout", calls.padded_weights),
    "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe": ("layout", calls.rotated_weights),
    "transform_sf_into_required_layout": ("layout", calls.required_layout),
    "convert_to_channelwise": ("cast", calls.tensor(calls.with_widths(quantize.convert_to_channelwise))),
    "requantize_with_max_scale": (
        "cast",
        calls.named(calls.with_widths(quantize.requantize_with_max_scale), "max_scale", "weight"),
    ),
    "normalize_e4m3fn_to_e4m3fnuz": (
        "cast",
        calls.named(quantize.normalize_e4m3fn_to_e4m3fnuz, "weight", "weight_scale", "input_scale"),
    ),
    "all_close_1d": (
        "cast",
        lambda inputs, options: torch.tensor(quantize.all_close_1d(**inputs), dtype=torch.bool, device="cpu"),
    ),
    "calc_diff": ("cast", calls.tensor(calc.calc_diff)),
    "make_fp8_moe_alpha_scales_for_fi": (
        "cast",
        calls.named(moe.make_fp8_moe_alpha_scales_for_fi, "g1_alphas", "g2_alphas"),
    ),
    "register_scales_for_trtllm_fp8_per_tensor_moe": ("cast", calls.registered_scales),
    "moe_routing": ("cast", calls.routing),
    "maybe_create_device_identity": ("layout", calls.device_identity),
    "apply_fi_trtllm_fp8_per_tensor_moe": ("moe_trtllm", calls.trtllm_layer),
    "moe_fp8": ("grouped_contiguous", calls.moe_layer_of),
    **{name: (row.operation, calls.experts(name)) for name, row in moe_pipelines.PIPELINES.items()},
    "silu_and_mul": ("cast", calls.tensor(moe_layer.silu_and_mul)),
    **{name: ("quant_gated", calls.fused(getattr(fused, name))) for name in calls.GATED},
    **{name: ("quant_norm", calls.fused(getattr(fused, name))) for name in calls.NORMS},
    **{
        name: ("quant_rope", calls.named(getattr(fused, name), "q_rope", "k_rope", "q_nope", "k_nope"))
        for name in calls.ROTARY
    },
    **{
        name: ("quant_cache", calls.in_place(getattr(kv_cache, name), *written))
        for name, written in calls.CACHES.items()
    },
    **{
        name: ("quant_cache", calls.tensor(getattr(kv_cache, name)))
        for name in ("quantize_k_cache", "dequantize_k_cache")
    },
    "convert_fp8": ("quant_tensor", calls.tensor(kv_cache.convert_fp8)),
}


def _called(runner: Runner, **arguments: object) -> Outputs:
    inputs = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    options = {name: value for name, value in arguments.items() if name not in inputs and value is not None}
    try:
        return runner(inputs, options)
    except (DtypeError, OptionError) as error:
        raise NotImplementedError(str(error)) from error


BY_CONTRACT = SimpleNamespace(**{name: partial(_called, runner) for name, (_, runner) in CONTRACTS.items()})
"""Each routine as a function of its contract's inputs and options by name, on the backend that the plan chooses.

For tools that take ``MODULE:CALLABLE``: ``kernels.subjects:BY_CONTRACT.silu_and_mul``.
"""
