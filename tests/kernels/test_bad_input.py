"""Bad input, each argument of each routine: a typed error, or a right answer; nothing else.

A right call is taken, one operand is spoilt in one of many ways, and the routine either raises one of the layer's
errors or returns what the unspoilt definition gives for the spoilt operand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels as k
from kernels import moe_layer
from kernels.backends import torch_ops
from kernels.config import Config
from kernels.errors import KernelError, LayoutError
from kernels.nn import Fp8Linear
from kernels.plan import Problem
from kernels.platform import current_machine

FP8 = torch.float8_e4m3fn
Call = tuple[Callable[..., Any], dict[str, Any]]
# what an older torch refuses for every operand is no right call of it; see test_linear.TestRowwiseOnTheCpu
ROWWISE_REFUSED = torch_ops.BACKEND.why_not(
    Problem("torch_linear", device="cpu", kernel="rowwise"), current_machine(), Config()
)


def codes(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(FP8)


def ones(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.5


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gemm(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, c: Any = None) -> Tensor:
    k.fp8_gemm_nt((a, a_scale), (b, b_scale), out, c=c)
    return out


def contiguous(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, m_indices: Any) -> Tensor:
    k.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, m_indices)
    return out


def masked(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, masked_m: Any, expected_m: Any) -> Tensor:
    k.fp8_m_grouped_gemm_nt_masked((a, a_scale), (b, b_scale), out, masked_m, expected_m)
    return out


def pairs(a: tuple[int, ...], b: tuple[int, ...], a_scale: tuple[int, ...], b_scale: tuple[int, ...]) -> Any:
    """Operands of these shapes."""
    return {"a": codes(*a), "a_scale": ones(*a_scale), "b": codes(*b), "b_scale": ones(*b_scale)}


def one_by_one(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, c: Any) -> Tensor:
    k.fp8_gemm_nt_1d1d((a, a_scale), (b, b_scale), out, c=c)
    return out


def k_grouped(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, ks: Any, ks_tensor: Any, c: Any) -> Tensor:
    k.k_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, ks, ks_tensor, c=c)
    return out


def skip(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, head_splits: Any) -> Tensor:
    k.fp8_gemm_nt_skip_head_mid((a, a_scale), (b, b_scale), out, head_splits)
    return out


def einsum(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any) -> Tensor:
    k.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (b, b_scale), out)
    return out


def mqa(q: Any, keys: Any, k_scale: Any, weights: Any, ks: Any, ke: Any) -> Tensor:
    return k.fp8_mqa_logits(q, (keys, k_scale), weights, ks, ke)


def fp8_linear(x: Any, weight: Any, weight_scale: Any, bias: Any) -> Tensor:
    return Fp8Linear(weight, weight_scale, bias)(x)


@cache
def calls() -> dict[str, Call]:
    """A right call of every routine that takes tensors; ``right_call`` gives a copy that may be spoilt."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    bf = x.bfloat16()
    table: list[Call] = [
        (k.scaled_fp8_quant, {"x": x, "scale": ones(1)}),
        (k.scaled_fp8_quant, {"x": x, "scale_ub": ones(1), "use_per_token_if_dynamic": True, "num_token_padding": 6}),
        (k.per_token_group_quant_fp8, {"x": x, "group_size": 128, "eps": 1e-10, "out": torch.empty(4, 256, dtype=FP8)}),
        (k.per_token_group_quant_fp8_packed, {"x": x, "group_size": 128}),
        (k.per_block_cast_to_fp8, {"x": x, "block_size": (128, 128)}),
        (k.per_token_cast_to_fp8, {"x": x, "group": 128}),
        (k.per_channel_cast_to_fp8, {"x": ones(128, 8)}),
        (k.flashinfer_quantize_1x128, {"x": x}),
        (k.flashinfer_quantize_128x128, {"w": x}),
        (k.per_tensor_dequantize, {"q": codes(3, 4), "inv_scale": ones(1)}),
        (k.requantize_with_max_scale, {"weight": codes(5, 8), "weight_scale": ones(2), "logical_widths": [2, 3]}),
        (k.convert_to_channelwise, {"weight_scale": ones(2), "logical_widths": [2, 3]}),
        (k.all_close_1d, {"x": ones(4)}),
        (k.ceil_to_ue8m0, {"x": ones(4)}),
        (k.get_col_major_tma_aligned_tensor, {"scale": ones(5, 3)}),
        (k.get_mn_major_tma_aligned_packed_ue8m0_tensor, {"scale": torch.full((5, 3), 0.5)}),
        (k.align_fp8_moe_weights_for_fi, {"w13": codes(2, 10, 8), "w2": codes(2, 4, 5), "is_act_and_mul": True}),
        (k.swap_w13_to_w31, {"x": codes(2, 6, 4)}),
        (k.reorder_rows_for_gated_act_gemm, {"w": codes(6, 4)}),
        (k.shuffle_matrix_a, {"w": codes(32, 4), "epilogue_tile_m": 128}),
        (
            gemm,
            {
                "a": codes(4, 256),
                "a_scale": ones(4, 2),
                "b": codes(128, 256),
                "b_scale": ones(1, 2),
                "out": torch.empty(4, 128),
                "c": ones(4, 128),
            },
        ),
        (
            k.fp8_blockscale_gemm_sm90,
            {
                "input": codes(4, 256),
                "weight": codes(64, 256),
                "input_scale": ones(4, 2),
                "weight_scale": ones(1, 2),
                "out": torch.empty(4, 64).bfloat16(),
            },
        ),
        (
            k.dynamic_flashinfer_deepgemm_blockscale_gemm,
            {"input": bf, "weight": codes(64, 256), "weight_scale": ones(1, 2), "group_size": 128},
        ),
        (
            k.cutlass_scaled_mm,
            {
                "a": codes(4, 256),
                "b": codes(48, 256).t(),
                "scale_a": ones(4, 1),
                "scale_b": ones(1, 48),
                "out_dtype": torch.float32,
                "bias": ones(48),
            },
        ),
        (
            k.cutlass_scaled_mm,
            {
                "a": codes(4, 256),
                "b": codes(48, 256).t(),
                "scale_a": ones(4, 2),
                "scale_b": ones(2, 1),
                "out_dtype": torch.float32,
            },
        ),
        *(
            (
                routine,
                {
                    "qinput": codes(4, 64),
                    "weight": codes(32, 64).t(),
                    "out_dtype": torch.float32,
                    "scale_a": a,
                    "scale_b": b,
                    "bias": ones(32),
                    "output_shape": [2, 2, 32],
                },
            )
            for routine, a, b in (
                (k.torch_per_tensor_w8a8_scaled_mm, ones(1), ones(1)),
                (k.torch_per_token_w8a8_scaled_mm, ones(4, 1), ones(32, 1)),
                (k.torch_channelwise_w8a8_scaled_mm, ones(4, 1), ones(32, 1)),
                (k.cutlass_w8a8_scaled_mm, ones(4, 1), ones(1, 32)),
            )
            if routine is not k.torch_per_token_w8a8_scaled_mm or ROWWISE_REFUSED is None
        ),
        (
            contiguous,
            {
                "a": codes(4, 128),
                "a_scale": ones(4, 1),
                "b": codes(2, 128, 128),
                "b_scale": ones(2, 1, 1),
                "out": torch.zeros(4, 128),
                "m_indices": ints(0, 0, 1, -1),
            },
        ),
        (
            masked,
            {
                "a": codes(2, 4, 128),
                "a_scale": ones(2, 4, 1),
                "b": codes(2, 128, 128),
                "b_scale": ones(2, 1, 1),
                "out": torch.zeros(2, 4, 128),
                "masked_m": ints(1, 4),
                "expected_m": 2,
            },
        ),
        (
            k.scaled_grouped_mm,
            {
                "a": codes(4, 64),
                "b": codes(2, 32, 64),
                "scale_a": ones(4, 1),
                "scale_b": ones(2, 32),
                "offsets": ints(1, 4),
                "out_dtype": torch.float32,
            },
        ),
        (
            mqa,
            {
                "q": codes(3, 2, 32),
                "keys": codes(5, 32),
                "k_scale": ones(5),
                "weights": ones(3, 2),
                "ks": ints(0, 0, 1),
                "ke": ints(5, 0, 3),
            },
        ),
        (
            k.fp8_paged_mqa_logits,
            {
                "q": codes(2, 1, 2, 32),
                "kv_cache": torch.zeros(3, 64, 1, 36, dtype=torch.uint8),
                "weights": ones(2, 2),
                "context_lens": ints(64, 3),
                "block_tables": ints(0, 1, 2, 0).view(2, 2),
                "schedule_metadata": torch.zeros(5, 2, dtype=torch.int32),
                "max_model_len": 128,
            },
        ),
        (k.get_paged_mqa_logits_metadata, {"context_lens": ints(3, 4), "block_size": 64, "num_sms": 4}),
        (
            moe_layer.route_deepseek_v3,
            {"logits": ones(3, 8), "bias": ones(8), "top_k": 2, "n_group": 2, "topk_group": 1},
        ),
        (
            moe_layer.moe_per_token,
            {
                "x": ones(3, 32).bfloat16(),
                "w13": codes(2, 32, 32),
                "w13_scale": ones(2, 32),
                "w2": codes(2, 32, 16),
                "w2_scale": ones(2, 32),
                "topk_weights": ones(3, 1),
                "topk_ids": ints(0, 1, 1).view(3, 1),
            },
        ),
        (k.silu_and_mul, {"x": ones(3, 32), "limit": 7.0}),
        (fp8_linear, {"x": x, "weight": codes(100, 256), "weight_scale": ones(1, 2), "bias": ones(100)}),
        (k.calc_diff, {"x": ones(4), "y": ones(4)}),
        (one_by_one, {**pairs((4, 256), (48, 256), (4, 2), (48, 2)), "out": torch.zeros(4, 48), "c": ones(4, 48)}),
        (
            k_grouped,
            {
                **pairs((4 * 384,), (8 * 384,), (4, 3), (8, 3)),
                "out": torch.zeros(3, 4, 8),
                "ks": [256, 0, 128],
                "ks_tensor": ints(256, 0, 128),
                "c": ones(3, 4, 8),
            },
        ),
        (skip, {**pairs((4, 256), (48, 256), (4, 2), (1, 2)), "out": torch.zeros(4, 64), "head_splits": (16, 8, 8)}),
        (einsum, {**pairs((4, 2, 256), (2, 48, 256), (4, 2, 2), (2, 1, 2)), "out": torch.zeros(4, 2, 48)}),
        (
            k.bmm_fp8,
            {
                "A": codes(2, 4, 64),
                "B": codes(2, 48, 64).mT,
                "A_scale": ones(1),
                "B_scale": ones(1),
                "dtype": torch.bfloat16,
            },
        ),
        (
            k.gemm_fp8_nt_groupwise,
            {**pairs((4, 256), (48, 256), (4, 2), (1, 2)), "out_dtype": torch.bfloat16},
        ),
        (
            k.group_gemm_fp8_nt_groupwise,
            {**pairs((4, 256), (2, 48, 256), (4, 2), (2, 1, 2)), "m_indptr": ints(0, 1, 3)},
        ),
        (
            k.cutlass_moe_mm,
            {
                "a": codes(4, 64),
                "b": codes(2, 48, 64),
                "scales_a": ones(4, 1),
                "scales_b": ones(2, 48),
                "expert_offsets": ints(0, 1),
                "problem_sizes": ints(1, 48, 64, 3, 48, 64).view(2, 3),
            },
        ),
        (
            k.cutlass_w4a8_mm,
            {
                "a": codes(4, 256),
                "b_q": ints(*range(-8, 8)).to(torch.int8).repeat(48, 16),
                "b_group_scales": ones(2, 48).to(FP8),
                "b_channel_scales": ones(48, 1),
                "a_token_scales": ones(4, 1),
            },
        ),
    ]
    return {f"{i:02} {function.__name__}": (function, arguments) for i, (function, arguments) in enumerate(table)}


CALLS = list(calls())


def right_call(name: str) -> Call:
    """One call of the table, its tensors copied as they lie."""
    function, arguments = calls()[name]
    return function, {n: v.clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}


NUMBERS: list[Any] = [0, -1, 1, 3, 1000, True, 1.5, "8", None, float("nan"), float("inf")]
OTHERS: list[Any] = [None, 3, "text", [1.0], torch.float64, (1, 2)]
DTYPES = [
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float32,
    FP8,
]


def spoil(value: Any, draw: Callable[[Any], Any]) -> tuple[Any, bool]:
    """A spoilt value, and whether it means the same values in another memory layout."""
    if not isinstance(value, Tensor):
        return draw(st.sampled_from(NUMBERS + OTHERS)), False
    way = draw(
        st.sampled_from(["other", "dtype", "rank+", "rank-", "grow", "shrink", "empty", "meta", "sparse", "strides"])
    )
    axis = draw(st.integers(0, max(value.dim() - 1, 0)))
    raw = value.view(torch.uint8) if value.dtype == FP8 else value
    if way == "other":
        return draw(st.sampled_from(OTHERS)), False
    if way == "dtype":
        return value.to(torch.float32).to(draw(st.sampled_from(DTYPES))), False
    if way == "rank+":
        return value.unsqueeze(axis), False
    if way == "rank-":
        return value.flatten(), False
    if way == "grow":
        return torch.cat([raw, raw.narrow(axis, 0, 1)], axis).view(value.dtype), False
    if way in ("shrink", "empty"):
        return value.narrow(axis, 0, 0 if way == "empty" else max(value.shape[axis] - 1, 0)), False
    if way == "meta":
        return value.to("meta"), False
    if way == "sparse" and value.dtype == torch.float32:
        return value.to_sparse(), False
    wide = torch.zeros(*value.shape[:-1], value.shape[-1] * 2, dtype=raw.dtype)
    wide[..., ::2] = raw
    return wide.view(value.dtype)[..., ::2] if value.dtype != FP8 else wide[..., ::2].view(FP8), True


def flat(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [p.float() if p.is_floating_point() else p for p in parts if isinstance(p, Tensor)]


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=25)
@given(data=st.data())
def test_typed_error_or_right_answer(name: str, data: st.DataObject) -> None:
    function, arguments = right_call(name)
    victim = data.draw(st.sampled_from(sorted(arguments)))
    spoilt, same_values = spoil(arguments[victim], data.draw)
    try:
        result = function(**{**arguments, victim: spoilt})
    except KernelError as error:
        assert len(str(error)) > 15
        assert not same_values or isinstance(error, LayoutError), f"strides of {victim} alone: {error}"
        return
    right = right_call(name)
    if same_values:
        expected = right[0](**right[1])
    elif isinstance(spoilt, Tensor) and spoilt.device.type == "meta":
        tensors = [n for n, v in arguments.items() if isinstance(v, Tensor)]
        assert tensors == [victim], f"{victim} on another device was accepted"
        return
    else:
        expected = _definition(function, {**right[1], victim: spoilt})
    for got, wanted in zip(flat(result), flat(expected), strict=True):
        assert got.shape == wanted.shape
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


def _definition(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The same call on fresh, contiguous copies: accepted operands must not depend on anything but their values."""
    fresh = {
        n: v.contiguous().clone() if isinstance(v, Tensor) and v.layout == torch.strided else v
        for n, v in arguments.items()
    }
    return function(**fresh)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_written_to_an_operand(name: str) -> None:
    """Except outputs named ``out``, every operand keeps its bits."""
    function, arguments = right_call(name)
    before = {n: v.clone() for n, v in arguments.items() if isinstance(v, Tensor) and n != "out"}
    function(**arguments)
    for n, old in before.items():
        new = arguments[n]
        view = (lambda t: t.contiguous().view(torch.uint8)) if old.dtype == FP8 else (lambda t: t)
        assert torch.equal(view(new), view(old)), n


def test_the_property_can_fail() -> None:
    """Negative test: a routine that reads the wrong row-major scale is caught by the strides case."""

    def careless(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale.as_strided(scale.shape, (scale.shape[1], 1))

    scale = ones(4, 4)
    wide = torch.zeros(4, 8)
    wide[..., ::2] = scale
    assert not torch.equal(careless(ones(4, 4), scale), careless(ones(4, 4), wide[..., ::2]))
