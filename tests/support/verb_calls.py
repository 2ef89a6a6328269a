"""One right call of every verb, from which the tests of operators, of hidden waits and of bad input take theirs.

:func:`calls` is the table. :func:`arguments` is what a verb is given there, by name; :func:`operator_calls` are the
calls of operators that these verbs make where ``torch.compile`` traces them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import kernels
from kernels.support import ROWWISE_CPU
from kernels.verbs import SERVED, VERBS
from tests.support.cache_calls import operands as cache_operands

FP8 = torch.float8_e4m3fn
M, N, K, HEADS = 40, 256, 256, 32
SHARED = ("torch_linear", "mx_product")
"""Operations whose verbs have one operator together."""
SWITCH = "dynamic_flashinfer_deepgemm_blockscale_gemm"
"""The verb of which ``torch.compile`` traces both roads; as an operator it takes the arguments of ``ROAD``."""
ROAD = "deepgemm_blockscale_linear"


def unserved(device: str) -> dict[str, str]:
    """Verbs that no backend serves here, with the reason."""
    if device == "cpu":
        old = tuple(map(int, torch.__version__.split(".")[:2])) < ROWWISE_CPU
        return {"torch_per_token_w8a8_scaled_mm": "row-wise scales on a CPU need torch 2.12"} if old else {}
    return {"apply_fi_trtllm_fp8_per_tensor_moe": "TensorRT-LLM's routine needs sm100"}


@functools.cache
def calls(device: str) -> dict[str, Callable[[], object]]:
    """Every verb on operands of a device that were made before; ``name`` or ``name how``.

    A call gives what the verb returns, or what it writes into, with the same bits each time.
    """

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def scales(*shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=device)

    firsts, counts_of, columns = integers(0, 10), integers(10, M - 10), integers(10, K)  # a copy to the device waits
    depths, ends = integers(0, K), integers(64, K)
    x, a, b, one = made(M, K), made(M, K, dtype=FP8), made(N, K, dtype=FP8, seed=1), scales(1)
    sa, sb, token, channel = scales(M, 2), scales(2, 2), scales(M, 1), scales(N, 1)
    out = torch.zeros(M, N, dtype=torch.bfloat16, device=device)
    three, threes = made(2, N, K, dtype=FP8), scales(2, 2, 2)
    tile = kernels.get_mk_alignment_for_contiguous_layout()
    rows = torch.arange(2 * tile, device=device, dtype=torch.int32) // tile
    tall, tall_scale, tall_out = made(2 * tile, K, dtype=FP8), scales(2 * tile, 2), out.new_zeros(2 * tile, N)
    cube, cube_out, counts = made(2, 128, K, dtype=FP8), out.new_zeros(2, 128, N), integers(3, 128)
    q, keys, key_scale = made(M, HEADS, 128, dtype=FP8), made(64, 128, dtype=FP8), scales(64)
    weights, low, high = scales(M, HEADS), integers(*[0] * M), integers(*[64] * M)
    cache = torch.zeros(3, 64, 1, 132, dtype=torch.uint8, device=device)
    lens, tables = integers(5, 70), torch.tensor([[0, 0], [1, 2]], dtype=torch.int32, device=device)
    schedule = kernels.get_paged_mqa_logits_metadata(lens, 64, 132)
    fp4_q, fp4_k = (
        (t.view(torch.uint8)[..., :64].contiguous(), torch.zeros(t.shape[:-1], dtype=torch.int32, device=device))
        for t in (q, keys)
    )
    heads, pages = made(2, 8, 4, 64, dtype=FP8), made(3, 64, 2, 64, dtype=FP8, seed=6)
    fours_of_two, sinks = [scales(2, 2)] * 3, made(4, seed=7)
    used_keys, pages_of = integers(20, 90), torch.tensor([[2, 0], [0, 1]], dtype=torch.int32, device=device)
    latent, picked = (
        made(1, 2, 64, 576, seed=8),
        torch.arange(128, dtype=torch.int32, device=device).view(1, 2, 64) // 2,
    )
    query_ends, key_ends, page_ends = integers(0, 3, 8), integers(0, 20, 64), integers(0, 1, 3)
    page_numbers, last_keys = integers(2, 0, 1), integers(50, 7)
    slots = torch.full((2, 64, 1, 656), 0x38, dtype=torch.uint8, device=device)
    layer, small = kernels.Fp8LinearOp(use_per_token_if_dynamic=True), made(16, K)
    ids, routed = torch.tensor([[0, 1]] * M, device=device), scales(M, 2)
    w13, w2 = made(2, 2 * N, K, dtype=FP8), made(2, K, N, dtype=FP8)
    kept = functools.cache(lambda: (kernels.prepare_blockscale_linear(b, sb), kernels.prepare_fp8_gemm_nt((b, sb))))
    wide, ends = made(N, K, seed=2), integers(10, M)
    first_sums = torch.ones(2, M, N, device=device)
    sums, headed, borders = torch.zeros(2, M, N, device=device), out.new_zeros(M, N + 64), integers(0, 8, M)
    sizes, int4 = torch.tensor([[8, N, K], [M - 8, N, K]], dtype=torch.int32, device=device), (b.view(torch.int8) % 8)
    int4_scale = scales(2, N).to(FP8)
    block_layer = kernels.FlashInferFp8DeepGEMMDynamicBlockScaledKernel(use_deep_gemm_e8m0=True)
    moe = torch.nn.Module()
    torch_linear = {"qinput": a, "weight": b.t(), "out_dtype": torch.bfloat16}
    named = {"w13_scale": scales(2), "w13_input_scale": one, "w2_scale": scales(2), "w2_input_scale": one}

    norm, query, angles = made(K, seed=3), made(M, 2, 64, seed=4), made(M, 64, dtype=torch.float32, seed=5)
    positions, used, nope = torch.arange(M, dtype=torch.int32, device=device), integers(M), x.view(M, 2, K // 2)

    fours = [torch.full((r, K // 2), 0x42, dtype=torch.uint8, device=device) for r in (M, N)]
    two = fours[1].expand(2, N, K // 2)
    fours[1] = fours[1].t()

    def tiles(rows: int, width: int = 32, whole: bool = False) -> Tensor:
        """Scale bytes of 1 in 128x4 tiles; ``whole`` tiles of rows alone."""
        high = rows // 128 if whole else -(-rows // 128)
        return torch.full((high * 128 * K // width,), 127 if width == 32 else 0x38, dtype=torch.uint8, device=device)

    def bytes_of(*shape: int) -> Tensor:
        """Scale bytes of 1, row by row."""
        return torch.full(shape, 127, dtype=torch.uint8, device=device)

    def into(verb: Callable[..., None], target: Tensor, *operands: object) -> Tensor:
        verb(*operands[:2], target, *operands[2:])
        return target

    def every_row(verb: Callable[[Tensor, Tensor], object]) -> object:
        """Rows that are not in use hold anything, which a comparison of two calls would see."""
        return verb(x[None], used)

    def loaded() -> Tensor:
        module = torch.nn.Module()
        module.weight, module.weight_scale_inv = (torch.nn.Parameter(t, requires_grad=False) for t in (b, sb * 0.3))
        block_layer.process_weights_after_loading(module)
        return module.weight.detach()

    def trtllm() -> Tensor:
        module = torch.nn.Module()
        first, second, _ = kernels.prepare_fp8_moe_layer_for_fi(module, w13, w2, **named, is_trtllm=True)
        for name, value in {"w13_weight": first, "w2_weight": second, "routing_method_type": 3}.items():
            setattr(module, name, value)
        return kernels.apply_fi_trtllm_fp8_per_tensor_moe(module, x, weights[:, :2], None, 1, None, None, 2, True)

    k = kernels
    return {
        "scaled_fp8_quant": lambda: k.scaled_fp8_quant(x, num_token_padding=50),
        "scaled_fp8_quant static": lambda: k.scaled_fp8_quant(x, one),
        "scaled_fp8_quant token": lambda: k.scaled_fp8_quant(x, scale_ub=one, use_per_token_if_dynamic=True),
        "per_token_group_quant_fp8": lambda: k.per_token_group_quant_fp8(x, 128),
        "per_token_group_quant_fp8 tma": lambda: k.per_token_group_quant_fp8(
            x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=True
        ),
        "per_token_group_quant_fp8_packed": lambda: k.per_token_group_quant_fp8_packed(x),
        "per_token_group_quant_fp8 columns": lambda: k.per_token_group_quant_fp8(
            x, 128, column_major_scales=True, use_ue8m0=True
        ),
        "per_block_cast_to_fp8": lambda: k.per_block_cast_to_fp8(x),
        "per_token_cast_to_fp8": lambda: k.per_token_cast_to_fp8(x, use_ue8m0=True),
        "per_channel_cast_to_fp8": lambda: k.per_channel_cast_to_fp8(tall_out),
        "flashinfer_quantize_1x128": lambda: k.flashinfer_quantize_1x128(x),
        "flashinfer_quantize_128x128": lambda: k.flashinfer_quantize_128x128(x),
        "ceil_to_ue8m0": lambda: k.ceil_to_ue8m0(sa),
        "per_tensor_dequantize": lambda: (k.per_tensor_dequantize(a, one), k.per_tensor_dequantize(a, 0.5)),
        "convert_to_channelwise": lambda: k.convert_to_channelwise(scales(2), [3, 5]),
        "requantize_with_max_scale": lambda: k.requantize_with_max_scale(b, scales(2), [100, N - 100]),
        "normalize_e4m3fn_to_e4m3fnuz": lambda: k.normalize_e4m3fn_to_e4m3fnuz(b, one, one)[1:],
        "calc_diff": lambda: k.calc_diff(x, x),
        "maybe_create_device_identity": lambda: k.maybe_create_device_identity(x.device),
        "cutlass_scaled_mm": lambda: k.cutlass_scaled_mm(a, b.t(), one, one, torch.bfloat16),
        "cutlass_scaled_mm token": lambda: k.cutlass_scaled_mm(a, b.t(), token, channel, torch.bfloat16),
        "cutlass_scaled_mm block": lambda: k.cutlass_scaled_mm(a, b.t(), sa, sb.t(), torch.bfloat16),
        "cutlass_w8a8_scaled_mm": lambda: k.cutlass_w8a8_scaled_mm(**torch_linear, scale_a=one, scale_b=one),
        "torch_per_tensor_w8a8_scaled_mm": lambda: k.torch_per_tensor_w8a8_scaled_mm(
            **torch_linear, scale_a=one, scale_b=one
        ),
        "rocm_per_tensor_w8a8_scaled_mm": lambda: k.rocm_per_tensor_w8a8_scaled_mm(
            **torch_linear, scale_a=one, scale_b=one
        ),
        "torch_per_token_w8a8_scaled_mm": lambda: k.torch_per_token_w8a8_scaled_mm(
            **torch_linear, scale_a=token, scale_b=channel
        ),
        "torch_channelwise_w8a8_scaled_mm": lambda: k.torch_channelwise_w8a8_scaled_mm(
            **torch_linear, scale_a=token, scale_b=channel
        ),
        "Fp8LinearOp apply": lambda: layer.apply(x, b.t(), channel),
        "fp8_gemm_nt": lambda: into(k.fp8_gemm_nt, out, (a, sa), (b, sb)),
        "prepare_fp8_gemm_nt run": lambda: into(lambda left, _, y: kept()[1](left, y), out, (a, sa), None),
        "prepare_fp8_gemm_nt": lambda: k.prepare_fp8_gemm_nt((b, sb)) and None,
        "fp8_blockscale_gemm_sm90": lambda: k.fp8_blockscale_gemm_sm90(x, b, None, sb),
        "fp8_blockscale_gemm_sm90 quantised": lambda: k.fp8_blockscale_gemm_sm90(a, b, sa, sb),
        "fp8_blockscale_gemm_sm90 wide": lambda: k.fp8_blockscale_gemm_sm90(x, wide),
        "fp8_blockscale_gemm_sm90 into": lambda: k.fp8_blockscale_gemm_sm90(a, b, sa, sb, out=headed[:, :N]),
        "flashinfer_fp8_blockscale_gemm": lambda: k.flashinfer_fp8_blockscale_gemm(x, b, sb),
        "deepgemm_blockscale_linear": lambda: k.deepgemm_blockscale_linear(x, b, sb),
        "few_rows_blockscale_linear": lambda: k.few_rows_blockscale_linear(small, b, sb),
        "few_rows_blockscale_linear float16": lambda: k.few_rows_blockscale_linear(small.half(), b, sb),
        "dynamic_flashinfer_deepgemm_blockscale_gemm": lambda: k.dynamic_flashinfer_deepgemm_blockscale_gemm(x, b, sb),
        "dynamic_flashinfer_deepgemm_blockscale_gemm few": lambda: k.dynamic_flashinfer_deepgemm_blockscale_gemm(
            small, b, sb
        ),
        "prepare_blockscale_linear run": lambda: (kept()[0](x), kept()[0](small)),
        "prepare_blockscale_linear": lambda: k.prepare_blockscale_linear(b, sb) and None,
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel load": loaded,
        "m_grouped_fp8_gemm_nt_contiguous": lambda: into(
            k.m_grouped_fp8_gemm_nt_contiguous, tall_out, (tall, tall_scale), (three, threes), rows
        ),
        "fp8_m_grouped_gemm_nt_masked": lambda: into(
            k.fp8_m_grouped_gemm_nt_masked, cube_out, (cube, scales(2, 128, 2)), (three, threes), counts, 64
        ),
        "scaled_grouped_mm": lambda: k.scaled_grouped_mm(a, three, token, scales(2, N), ends),
        "fp8_gemm_nn": lambda: into(k.fp8_gemm_nn, out, (a, sa), (b.mT, sb.mT)),
        "fp8_gemm_tn": lambda: into(k.fp8_gemm_tn, out, (a.mT, sa.mT), (b.mT, sb.mT)),
        "fp8_gemm_tt": lambda: into(k.fp8_gemm_tt, out, (a.mT, sa.mT), (b, sb)),
        "fp8_gemm_nt_1d1d": lambda: into(k.fp8_gemm_nt_1d1d, sums[0], (a, sa), (b, scales(N, 2))),
        "k_grouped_fp8_gemm_nt_contiguous": lambda: into(
            functools.partial(k.k_grouped_fp8_gemm_nt_contiguous, c=first_sums),
            sums,
            (a.flatten(), sa),
            (b.flatten(), scales(N, 2)),
            (0, K),
            depths,
        ),
        "m_grouped_fp8_gemm_nn_contiguous": lambda: into(
            k.m_grouped_fp8_gemm_nn_contiguous, tall_out, (tall, tall_scale), (three.mT, threes.mT), rows
        ),
        "fp8_gemm_nt_skip_head_mid": lambda: into(
            k.fp8_gemm_nt_skip_head_mid, headed, (a, sa), (b, sb), (128, 64, 128)
        ),
        "fp8_einsum": lambda: into(
            functools.partial(k.fp8_einsum, "bhr,hdr->bhd"),
            out[:, None],
            (a[:, None], sa[:, None]),
            (b[None], sb[None]),
        ),
        "bmm_fp8": lambda: k.bmm_fp8(cube, three.mT, one, one, torch.bfloat16),
        "gemm_fp8_nt_groupwise": lambda: k.gemm_fp8_nt_groupwise(a, b, sa, sb),
        "batch_deepgemm_fp8_nt_groupwise": lambda: k.batch_deepgemm_fp8_nt_groupwise(
            cube, three, scales(2, 128, 2), threes, counts, 64
        ),
        "group_gemm_fp8_nt_groupwise": lambda: k.group_gemm_fp8_nt_groupwise(a, three, sa, threes, borders),
        "cutlass_blockwise_scaled_grouped_mm": lambda: k.cutlass_blockwise_scaled_grouped_mm(
            a, three, sa, threes, borders[:2], sizes
        ),
        "cutlass_moe_mm": lambda: k.cutlass_moe_mm(a, three, token, scales(2, 1), borders[:2], sizes),
        "grouped_mm_fp8": lambda: k.grouped_mm_fp8(a, three, borders, one),
        "unified_encode_int4b": lambda: k.unified_encode_int4b(int4.view(torch.uint8)),
        "cutlass_encode_and_reorder_int4b": lambda: k.cutlass_encode_and_reorder_int4b(
            torch.zeros(16, 32, dtype=torch.int32, device=device).t()
        ),
        "cutlass_pack_scale_fp8": lambda: k.cutlass_pack_scale_fp8(int4_scale),
        "cutlass_w4a8_mm": lambda: k.cutlass_w4a8_mm(a, int4, int4_scale, channel, token),
        "cutlass_w4a8_moe_mm": lambda: k.cutlass_w4a8_moe_mm(
            a, int4.expand(2, N, K), int4_scale.expand(2, 2, N), scales(2, N), token, borders[:2], sizes
        ),
        "fp8_mqa_logits": lambda: k.fp8_mqa_logits(q, (keys, key_scale), weights, low, high),
        "fp8_paged_mqa_logits": lambda: k.fp8_paged_mqa_logits(
            q[:2].unsqueeze(1), cache, weights[:2], lens, tables, schedule, 128
        ),
        "fp8_fp4_mqa_logits": lambda: k.fp8_fp4_mqa_logits(fp4_q, fp4_k, weights, low, high),
        "fp8_fp4_paged_mqa_logits": lambda: k.fp8_fp4_paged_mqa_logits(
            tuple(t[:2].unsqueeze(1) for t in fp4_q),
            cache[..., :68].contiguous(),
            weights[:2],
            lens,
            tables,
            schedule,
            128,
        ),
        "mha_fwd": lambda: k.mha_fwd(heads, pages, pages, *fours_of_two, used_keys, pages_of, sinks, None, True),
        "mha_fwd packed": lambda: k.mha_fwd(heads, heads, heads, num_splits=2),
        "single_prefill_with_kv_cache": lambda: k.single_prefill_with_kv_cache(
            heads[0], pages[0], pages[0], scales(4), scales(2), scales(2), torch.float16, True
        ),
        "batch_prefill_with_ragged_kv_cache": lambda: k.batch_prefill_with_ragged_kv_cache(
            heads[0], pages[0], pages[0], query_ends, key_ends, scales(4), None, scales(2), torch.float16, True, None, 4
        ),
        "batch_prefill_with_paged_kv_cache": lambda: k.batch_prefill_with_paged_kv_cache(
            heads[0], pages, pages, query_ends, page_ends, page_numbers, last_keys, causal=True
        ),
        "flash_mla_with_kvcache": lambda: k.flash_mla_with_kvcache(latent, slots, picked, scales(64)),
        "get_paged_mqa_logits_metadata": lambda: k.get_paged_mqa_logits_metadata(lens, 64, 132),
        "get_col_major_tma_aligned_tensor": lambda: k.get_col_major_tma_aligned_tensor(sa),
        "get_mn_major_tma_aligned_packed_ue8m0_tensor": lambda: k.get_mn_major_tma_aligned_packed_ue8m0_tensor(sa),
        "transform_sf_into_required_layout": lambda: k.transform_sf_into_required_layout(
            sb, N, K, (1, 128, 128), is_sfa=False
        ),
        "align_fp8_moe_weights_for_fi": lambda: k.align_fp8_moe_weights_for_fi(
            w13[:, : 2 * 40], w2[:, :, :40].contiguous(), True
        )[:2],
        "swap_w13_to_w31": lambda: k.swap_w13_to_w31(w13),
        "reorder_rows_for_gated_act_gemm": lambda: k.reorder_rows_for_gated_act_gemm(b),
        "shuffle_matrix_a": lambda: k.shuffle_matrix_a(b, 128),
        "unshuffle_matrix_a": lambda: k.unshuffle_matrix_a(b),
        "restore_rows_of_gated_act_gemm": lambda: k.restore_rows_of_gated_act_gemm(b),
        "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe": lambda: k.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(
            w13, w2
        ),
        "unrotate_weights_of_fi_trtllm_fp8_per_tensor_moe": lambda: k.unrotate_weights_of_fi_trtllm_fp8_per_tensor_moe(
            w13, w2
        ),
        "mxfp8_quantize": lambda: k.mxfp8_quantize(x),
        "mxfp8_quantize linear": lambda: k.mxfp8_quantize(x, "linear", "even", "e5m2"),
        "mxfp4_quantize": lambda: k.mxfp4_quantize(x, rounding="even"),
        "nvfp4_quantize": lambda: k.nvfp4_quantize(x, one),
        "nvfp4_quantize rows": lambda: k.nvfp4_quantize(x, scales(M), "linear", True),
        "mxfp8_dequantize": lambda: k.mxfp8_dequantize(*k.mxfp8_quantize(x)),
        "mxfp4_dequantize": lambda: k.mxfp4_dequantize(*k.mxfp4_quantize(x)),
        "nvfp4_dequantize": lambda: k.nvfp4_dequantize(*k.nvfp4_quantize(x, one), one),
        "mxfp8_quantize_columnwise": lambda: k.mxfp8_quantize_columnwise(x[:32]),
        "mxfp8_quantize_columnwise compact": lambda: k.mxfp8_quantize_columnwise(x[:32], "compact", "floor", "e5m2"),
        "mxfp8_dequantize_columnwise": lambda: k.mxfp8_dequantize_columnwise(*k.mxfp8_quantize_columnwise(x[:32])),
        "mxfp8_quantize_2d": lambda: k.mxfp8_quantize_2d(x[:32], direction="columnwise"),
        "mxfp8_quantize_2d rows": lambda: k.mxfp8_quantize_2d(x[:32], "linear"),
        "mxfp8_quantize_3d": lambda: k.mxfp8_quantize_3d(x[:32][None]),
        "nvfp4_batched_quantize": lambda: k.nvfp4_batched_quantize(x[None], one),
        "nvfp4_quantize_shuffled": lambda: k.nvfp4_quantize_shuffled(x[:32], one),
        "silu_and_mul_nvfp4_quantize": lambda: k.silu_and_mul_nvfp4_quantize(x, one),
        "silu_and_mul_scaled_nvfp4_experts_quantize": lambda: k.silu_and_mul_scaled_nvfp4_experts_quantize(
            x[None], counts[:1], one
        ),
        "transpose_packed_fp4": lambda: k.transpose_packed_fp4(k.per_token_cast_to_fp4(x)[0]),
        "mxfp6_quantize": lambda: k.mxfp6_quantize(x),
        "mxfp6_dequantize": lambda: k.mxfp6_dequantize(*k.mxfp6_quantize(x)),
        "mxint8_quantize": lambda: k.mxint8_quantize(x),
        "mxint8_dequantize": lambda: k.mxint8_dequantize(*k.mxint8_quantize(x)),
        "per_token_cast_to_fp4": lambda: k.per_token_cast_to_fp4(x, True),
        "per_token_cast_to_fp4 packed": lambda: k.per_token_cast_to_fp4(x, True, 32, True),
        "cast_back_from_fp4": lambda: k.cast_back_from_fp4(*k.per_token_cast_to_fp4(x)),
        "nvfp4_quantize_stochastic": lambda: k.nvfp4_quantize_stochastic(x, one, seed=5),
        "nvfp4_quantize_2d": lambda: k.nvfp4_quantize_2d(x[:16], one),
        "nvfp4_quantize_4over6": lambda: k.nvfp4_quantize_4over6(x, one),
        "hadamard_transform": lambda: k.hadamard_transform(x),
        "nvfp4_quantize_rht": lambda: k.nvfp4_quantize_rht(x, one),
        "nvfp4_quantize_per_token": lambda: k.nvfp4_quantize_per_token(x, one),
        "nvfp4_quantize_of_fp8": lambda: k.nvfp4_quantize_of_fp8(a, one),
        "mxfp4_quantize_of_fp8": lambda: k.mxfp4_quantize_of_fp8(a),
        "block_scales_to_mxfp8": lambda: k.block_scales_to_mxfp8(a, k.ceil_to_ue8m0(sa.contiguous())),
        "fp8_block_to_mxfp8": lambda: k.fp8_block_to_mxfp8(a, sa),
        "mxfp8_to_fp8_block": lambda: k.mxfp8_to_fp8_block(*k.mxfp8_quantize(x)),
        "scaled_fp4_grouped_quantize": lambda: k.scaled_fp4_grouped_quantize(x[None], counts[:1], one),
        "mxfp8_grouped_quantize": lambda: k.mxfp8_grouped_quantize(x[None], counts[:1]),
        "scaled_fp4_experts_quant": lambda: k.scaled_fp4_experts_quant(x, one, ends[:2]),
        "mxfp4_experts_quant": lambda: k.mxfp4_experts_quant(x, ends[:2], "flashinfer"),
        "silu_and_mul_mxfp4_experts_quant": lambda: k.silu_and_mul_mxfp4_experts_quant(x, ends[:2]),
        "silu_and_mul_scaled_fp4_experts_quant": lambda: k.silu_and_mul_scaled_fp4_experts_quant(x, one, ends[:2]),
        "mxfp8_experts_quant": lambda: k.mxfp8_experts_quant(x, ends[:2], "flashinfer"),
        "swizzle_scale": lambda: k.swizzle_scale(b),
        "to_blocked": lambda: k.to_blocked(b),
        "shuffle_matrix_sf_a": lambda: k.shuffle_matrix_sf_a(b[:128]),
        "unshuffle_matrix_sf_a": lambda: k.unshuffle_matrix_sf_a(k.shuffle_matrix_sf_a(b[:128]), 128, b.shape[1]),
        "from_blocked": lambda: k.from_blocked(k.to_blocked(b), *b.shape),
        "swizzle_scale_experts": lambda: k.swizzle_scale_experts(a, firsts, counts_of),
        "pad_token_groups": lambda: k.pad_token_groups(x, ends[:2]),
        "unpad_token_groups": lambda: k.unpad_token_groups(x, ends[:2], ends[:2] - ends[0], 16),
        "to_blocked_k_groups": lambda: k.to_blocked_k_groups(b, columns),
        "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": lambda: (
            k.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scales(2, 8), [256], check=False)
        ),
        "mm_mxfp8": lambda: k.mm_mxfp8(a, b.t(), tiles(M), tiles(N)),
        "mm_fp4": lambda: k.mm_fp4(*fours, tiles(M, 16), tiles(N, 16), one),
        "scaled_mm": lambda: k.scaled_mm(
            *fours, tiles(M, 16).view(FP8), tiles(N, 16).view(FP8), one, one, sa.new_zeros(N)
        ),
        "bmm_mxfp8": lambda: k.bmm_mxfp8(cube, three.mT, tiles(256), tiles(2 * N)),
        "group_gemm_mxfp8_mxfp4_nt_groupwise": lambda: k.group_gemm_mxfp8_mxfp4_nt_groupwise(
            a, two, tiles(M + 254, whole=True), tiles(N).repeat(2), borders
        ),
        "group_gemm_nvfp4_nt_groupwise": lambda: k.group_gemm_nvfp4_nt_groupwise(
            fours[0], two, tiles(M + 254, 16, whole=True), tiles(N, 16).repeat(2), borders, scales(2)
        ),
        "scaled_grouped_mm_mx": lambda: k.scaled_grouped_mm_mx(
            a, three, *(t.view(torch.float8_e8m0fnu) for t in (tiles(M + 254), tiles(N).repeat(2))), borders[1:]
        ),
        "scaled_grouped_mm_mx_k_groups": lambda: k.scaled_grouped_mm_mx_k_groups(
            a, b, tiles(M).repeat(2), tiles(N).repeat(2), ends
        ),
        "fp8_fp4_gemm_nt": lambda: into(k.fp8_fp4_gemm_nt, out, (a, sa), (two[0], sa.new_ones(N, K // 32))),
        **{
            f"fp8_fp4_gemm_{form}": lambda form=form, left=left, right=right: into(
                getattr(k, f"fp8_fp4_gemm_{form}"), out, left, right
            )
            for form, left, right in (
                ("nn", (a, sa), (b.t(), sa.new_ones(K // 32, N))),
                ("tn", (a.t(), sa.t()), (b.t(), sa.new_ones(K // 32, N))),
                ("tt", (a.t(), sa.t()), (two[0], sa.new_ones(N, K // 32))),
            )
        },
        "m_grouped_fp8_fp4_gemm_nn_contiguous": lambda: into(
            k.m_grouped_fp8_fp4_gemm_nn_contiguous,
            tall_out,
            (tall, tall_scale),
            (three.mT, sa.new_ones(2, K // 32, N)),
            rows,
        ),
        "k_grouped_fp8_gemm_tn_contiguous": lambda: into(
            k.k_grouped_fp8_gemm_tn_contiguous,
            out.new_zeros(2, M, N, dtype=torch.float32),
            (a.t().contiguous(), scales(2, M)),
            (b.t().contiguous(), scales(2, N)),
            [128, 128],
        ),
        "m_grouped_fp8_fp4_gemm_nt_contiguous": lambda: into(
            k.m_grouped_fp8_fp4_gemm_nt_contiguous,
            tall_out,
            (tall, tall_scale),
            (two, sa.new_ones(2, N, K // 32)),
            rows,
        ),
        "m_grouped_fp8_fp4_gemm_nt_masked": lambda: into(
            k.m_grouped_fp8_fp4_gemm_nt_masked,
            cube_out,
            (cube, scales(2, 128, 2)),
            (two, sa.new_ones(2, N, K // 32)),
            counts,
        ),
        "make_fp8_moe_alpha_scales_for_fi": lambda: k.make_fp8_moe_alpha_scales_for_fi(**named),
        "register_scales_for_trtllm_fp8_per_tensor_moe": lambda: k.register_scales_for_trtllm_fp8_per_tensor_moe(
            moe, **named
        ),
        "prepare_fp8_moe_layer_for_fi": lambda: k.prepare_fp8_moe_layer_for_fi(moe, w13, w2, **named, is_trtllm=True),
        "apply_fi_trtllm_fp8_per_tensor_moe": trtllm,
        "silu_and_mul": lambda: k.silu_and_mul(x, 7.0),
        "moe_block_scaled": lambda: k.moe_block_scaled(x, w13, scales(2, 4, 2), w2, scales(2, 2, 2), routed, ids),
        "moe_per_token": lambda: k.moe_per_token(
            x, w13, scales(2, 2 * N), w2, scales(2, K), routed, ids, expert_offset=1, weight_on_input=True
        ),
        "moe_experts": lambda: k.moe_experts(
            x, w13, scales(2, 4, 2), w2, scales(2, 2, 2), routed, ids, "fused_experts_block"
        ),
        "moe_block_experts": lambda: k.moe_block_experts(
            x,
            two.new_full((2, 2 * N, K // 2), 0x42),
            tiles(2 * N).repeat(2, 1),
            two.new_full((2, K, N // 2), 0x42),
            tiles(K).repeat(2, 1),
            routed,
            ids,
            "cutlass_fused_moe_mxfp8_mxfp4",
        ),
        "route_by_method": lambda: k.route_by_method(sa, "Renormalize", 1),
        "route_experts": lambda: k.route_experts(sa, 1, scoring="softplus_sqrt", renormalize=True),
        "route_llama4": lambda: k.route_llama4(sa, 1),
        "route_softmax": lambda: k.route_softmax(sa, 1, renormalize=True),
        "route_deepseek_v3": lambda: k.route_deepseek_v3(weights, key_scale[:HEADS], 2, n_group=4, topk_group=2),
        "silu_and_mul_quant": lambda: k.silu_and_mul_quant(x, one),
        "silu_and_mul_per_block_quant": lambda: k.silu_and_mul_per_block_quant(x, scale_ub=one),
        "silu_and_mul_per_block_quant columns": lambda: k.silu_and_mul_per_block_quant(
            x, 64, is_scale_transposed=True, rounding="product"
        ),
        "silu_and_mul_masked_post_quant": lambda: every_row(k.silu_and_mul_masked_post_quant),
        "persistent_masked_m_silu_mul_quant": lambda: every_row(k.persistent_masked_m_silu_mul_quant),
        "per_token_group_quant_fp8_masked": lambda: every_row(k.per_token_group_quant_fp8_masked),
        "rms_norm_static_fp8_quant": lambda: k.rms_norm_static_fp8_quant(x, norm, one),
        "fused_add_rms_norm_static_fp8_quant": lambda: k.fused_add_rms_norm_static_fp8_quant(x, x, norm, one),
        "rmsnorm_quant": lambda: k.rmsnorm_quant(x, norm, one),
        "fused_add_rmsnorm_quant": lambda: k.fused_add_rmsnorm_quant(x, x, norm, one),
        "rms_norm_dynamic_per_token_quant": lambda: k.rms_norm_dynamic_per_token_quant(
            x, norm, scale_ub=one, residual=x
        ),
        "rms_norm_per_block_quant": lambda: k.rms_norm_per_block_quant(x, norm, residual=x),
        "rms_norm_block_scaled_quant": lambda: k.rms_norm_block_scaled_quant(x, norm, "mxfp8", residual=x),
        "rms_norm_block_scaled_quant nvfp4": lambda: k.rms_norm_block_scaled_quant(x, norm, "nvfp4", global_scale=one)[
            :2
        ],
        "silu_and_mul_block_scaled_quant": lambda: k.silu_and_mul_block_scaled_quant(x, "mxfp4"),
        "silu_and_mul_block_scaled_quant nvfp4": lambda: k.silu_and_mul_block_scaled_quant(
            x, "nvfp4", global_scale=one
        ),
        "rms_norm_per_block_quant columns": lambda: k.rms_norm_per_block_quant(x, norm, is_scale_transposed=True)[:2],
        "rope_quantize_fp8": lambda: k.rope_quantize_fp8(
            query, query[:, :1], nope, nope[:, :1], angles, positions, quant_scale_q=2.0
        ),
        "mla_rope_quantize_fp8": lambda: k.mla_rope_quantize_fp8(
            query, query[:, 0], nope, nope[:, 0], angles, positions, False
        ),
        **{name: functools.partial(written, name, operands) for name, operands in cache_operands(device).items()},
    }


def written(name: str, operands: tuple[object, ...]) -> object:
    """What a routine of a cache returns, or its operands, into which it writes."""
    made = getattr(kernels, name)(*operands)
    return [t for t in operands if isinstance(t, Tensor)] if made is None else made


class _Reached(Exception):
    """The call of an operator that was looked for, which is not made."""


class _Operators(TorchDispatchMode):
    """Raises at the operator that a verb stands for, or at one that several verbs share."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb
        self.found: tuple[str, tuple[Any, ...]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("fp8_kernels::").partition(".")[0]
        if func.namespace != "fp8_kernels":
            return func(*args, **(kwargs or {}))
        if name == self.verb or name not in VERBS:
            assert not kwargs, "a verb passes every argument of its operator by position"
            self.found = name, args
            raise _Reached
        with _compiling(False):
            return func(*args)


@contextmanager
def _compiling(flag: bool) -> Iterator[None]:
    with mock.patch.object(torch.compiler, "_is_compiling_flag", flag):
        yield


@functools.cache
def operator_names(device: str) -> list[str]:
    """The names of :func:`operator_calls`, of which none is called."""
    verbs = {name: name.partition(" ")[0] for name in calls(device)}
    own = [v for v, verb in VERBS.items() if verb.writes is not None or _operation(v) in SHARED]
    return [*(name for name, verb in verbs.items() if verb in own and verb != SWITCH), SWITCH]


@functools.cache
def operator_calls(device: str) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """By the name of the call the operator that it makes, and its operands."""
    found = dict[str, tuple[str, tuple[Any, ...]]]()
    every = calls(device)
    for name in operator_names(device)[:-1]:
        seen, call = _Operators(name.partition(" ")[0]), every[name]
        try:
            with _compiling(True), seen:
                call()
        except _Reached:
            assert seen.found is not None
            found[name] = seen.found
    return found | {SWITCH: (SWITCH, found[ROAD][1])}


def _operation(verb: str) -> str | None:
    return SERVED[verb].operation if verb in SERVED else None


class _Recorded(Exception):
    """The call of a verb whose arguments are known now, and which is not made."""


@functools.cache
def arguments(device: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By the name of the call the verb, and what it is given, by name; calls that reach a verb by another way left out.

    Tensors are those of :func:`calls`: a test that writes takes copies (:func:`fresh`).
    """
    recorded = dict[str, tuple[Callable[..., Any], dict[str, Any]]]()
    for name, call in calls(device).items():
        verb = name.partition(" ")[0]
        if verb not in VERBS or name in unserved(device):
            continue
        function = getattr(kernels, verb)
        parameters = inspect.signature(function)
        bound: list[dict[str, Any]] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            bound.append(dict(parameters.bind(*args, **kwargs).arguments))  # noqa: B023  # called in this turn
            raise _Recorded

        with mock.patch.object(kernels, verb, record), contextlib.suppress(_Recorded):
            call()
        recorded[name] = function, bound[0]
    return recorded


def fresh(value: Any) -> Any:
    """A copy of an argument: of every tensor in it, in storage order where its elements are its own."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) and 0 not in x.stride() else x, value)
