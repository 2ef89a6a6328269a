"""Outputs of real kernels, captured on an H200, predicted in every bit; and the same check failing when sabotaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from oracle.errors import NumericsError, ShapeError
from oracle.numbers.formats import same_bits
from oracle.tensorcore.identify import identify_product
from oracle.tensorcore.logits import predict_logits
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Promotion, Schedule, get
from oracle.truth.gemm import ScaledProduct
from tests.support.paths import SHARED

CAPTURES = SHARED / "captures"
DENSE = ("h200_dense_m16_n128_k512", "h200_dense_m40_n256_k1024")

pytestmark = [pytest.mark.needs_shared("captures"), pytest.mark.replay_sm90, pytest.mark.usefixtures("one_thread")]


BLOCKWISE = "sm90.promote128"
UNIT = {
    "out.torch.scaled_mm_unit_fast_fp32": "sm90.chain",
    "out.torch.scaled_mm_unit_fast_bf16": "sm90.chain",
    "out.torch.scaled_mm_rowwise_unit_fast_bf16": "sm90.chain",
    "out.torch.scaled_mm_unit_precise_fp32": "sm90.promote128.scale_after",
    "out.torch.scaled_mm_unit_precise_bf16": "sm90.promote128.scale_after",
    "out.torch.scaled_mm_rowwise_unit_precise_bf16": "sm90.promote128.scale_after",
}
SCALED = {"out.deep_gemm.fp8_gemm_nt": BLOCKWISE, "out.flashinfer.w8a8_colmajor_scale": BLOCKWISE}


def capture(name: str) -> dict[str, torch.Tensor]:
    return load_file(CAPTURES / f"{name}.safetensors")


def cases() -> Iterator[tuple[str, str, str]]:
    for name in DENSE:
        yield from ((name, key, schedule) for key, schedule in (SCALED | UNIT).items())


def dense(name: str, key: str) -> tuple[ScaledProduct, torch.Tensor]:
    t = capture(name)
    a, b = t["a_fp8"], t["b_fp8"]
    if key in SCALED:
        return ScaledProduct(a, b, t["a_scale"], t["b_scale"], 128, 128), t[key]
    one = torch.ones((1, 1))
    return ScaledProduct(a, b, one, one, a.shape[1], b.shape[0]), t[key]


def experts(t: dict[str, torch.Tensor]) -> Iterator[tuple[ScaledProduct, torch.Tensor]]:
    for expert in sorted(set(t["m_indices"].tolist())):
        if expert < 0:
            continue
        rows = (t["m_indices"] == expert).nonzero()[:, 0]
        a = t["a_fp8"].view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        b = t["b_fp8"].view(torch.uint8)[expert].view(torch.float8_e4m3fn)
        product = ScaledProduct(a, b, t["a_scale"][rows], t["b_scale"][expert], 128, 128)
        yield product, t["out.deep_gemm.m_grouped_fp8_gemm_nt_contiguous"][rows]


def cutlass(name: str) -> tuple[ScaledProduct, torch.Tensor]:
    t = capture(name)
    out = t["out.vllm.cutlass_scaled_mm"]
    if "bias" not in t:
        return ScaledProduct(t["a_fp8"], t["b_fp8"], t["a_scale"], t["b_scale"], 128, 128), out
    columns = t["b_scale"].reshape(-1, 1).contiguous()
    return ScaledProduct(t["a_fp8"], t["b_fp8"], t["a_scale"], columns, 512, 1, t["bias"]), out


def wrong_bits(product: ScaledProduct, schedule: Schedule | str, out: torch.Tensor) -> int:
    got = predict_product(product, schedule, out_dtype=out.dtype, engine="torch")
    return int((~same_bits(got, out)).sum())


@pytest.mark.parametrize(("name", "key", "schedule"), list(cases()))
def test_dense(name: str, key: str, schedule: str) -> None:
    """DeepGEMM, FlashInfer with column-major scales, and torch fast and precise: no bit differs."""
    product, out = dense(name, key)
    assert wrong_bits(product, schedule, out) == 0


def test_grouped_contiguous() -> None:
    """Every expert's rows of DeepGEMM's grouped GEMM."""
    pairs = list(experts(capture("h200_grouped_contiguous")))
    assert len(pairs) >= 3
    assert [wrong_bits(product, BLOCKWISE, out) for product, out in pairs] == [0] * len(pairs)


def test_cutlass_block_scales() -> None:
    assert wrong_bits(*_with(cutlass("h200_vllm_cutlass_block_m16"), BLOCKWISE)) == 0


def test_cutlass_token_channel_bias() -> None:
    """At M = 16 the row scale is the inner one; one of 2048 outputs shows it, and no other order gives all bits."""
    pair = cutlass("h200_vllm_cutlass_token_channel_bias_m16")
    assert wrong_bits(*_with(pair, "sm90.chain.row_then_col")) == 0
    assert wrong_bits(*_with(pair, "sm90.chain")) == 1
    assert wrong_bits(*_with(pair, "sm90.chain.product")) == 1


def test_mqa_logits() -> None:
    """All 14,368 logits inside [ks, ke), and 12,431 of them when the other product is fused."""
    t = capture("h200_mqa_logits")
    out = t["out.deep_gemm.fp8_mqa_logits"]
    n = torch.arange(out.shape[1])
    inside = (n >= t["cu_seqlen_ks"][:, None]) & (n < t["cu_seqlen_ke"][:, None])
    assert int(inside.sum()) == 14_368
    equal = {}
    for schedule in ("sm90.mqa_logits", "sm90.mqa_logits.second_fused"):
        got = predict_logits(t["q_fp8"], t["k_fp8"], t["k_scale"], t["weights"], schedule=schedule)
        equal[schedule] = int((same_bits(got, out) & inside).sum())
    assert equal == {"sm90.mqa_logits": 14_368, "sm90.mqa_logits.second_fused": 12_431}


INSTRUCTION_CHANGES = [
    {"align_bits": 12},
    {"align_bits": 14},
    {"group": 16, "k": 32},
    {"round_toward_zero": False},
    {"out_bits": 12},
]
SCHEDULE_CHANGES = [
    {"interval": None, "promotion": Promotion.FMA},
    {"interval": 64},
    {"promotion": Promotion.MUL_ADD},
    {"promotion": Promotion.ROW_COL_ADD},
]


@pytest.mark.parametrize("change", INSTRUCTION_CHANGES, ids=str)
def test_a_sabotaged_instruction_is_caught(change: dict[str, int]) -> None:
    """The check of test_dense fails for every altered instruction."""
    product, out = dense(DENSE[1], "out.deep_gemm.fp8_gemm_nt")
    schedule = get(BLOCKWISE)
    wrong = replace(schedule, instruction=replace(schedule.instruction, **change))  # type: ignore[arg-type]
    assert wrong_bits(product, wrong, out) > 0


@pytest.mark.parametrize("change", SCHEDULE_CHANGES, ids=lambda c: "-".join(map(str, c.values())))
def test_a_sabotaged_schedule_is_caught(change: dict[str, object]) -> None:
    """Missing promotion, promotion every 64, and two roundings instead of one."""
    product, out = dense(DENSE[1], "out.deep_gemm.fp8_gemm_nt")
    wrong = replace(get(BLOCKWISE), **change)  # type: ignore[arg-type]
    if change.get("interval", 128) is None:
        product = replace(product, a_scale=product.a_scale[:, :1], b_scale=product.b_scale[:, :1], block=1024)
    assert wrong_bits(product, wrong, out) > 0


@pytest.mark.turns(4)
class TestIdentify:
    """The schedule of a captured output is found among all registered ones."""

    def test_deep_gemm(self) -> None:
        """Scales joined as ``fma(d * row, col, sum)`` give the same 10240 bfloat16 outputs, other float32 ones."""
        product, out = dense(DENSE[1], "out.deep_gemm.fp8_gemm_nt")
        first, second, third, *_ = identify_product(product, out)
        assert (first.schedule, first.equal, first.compared) == (BLOCKWISE, 1.0, out.numel())
        assert (second.schedule, second.equal) == (f"{BLOCKWISE}.row_then_col.fma", 1.0)
        assert third.equal < 1.0
        exact = predict_product(product, BLOCKWISE, out_dtype=torch.float32)
        found = identify_product(product, exact, "sm90")
        assert [m.schedule for m in found if m.equal == 1.0] == [BLOCKWISE] and found[1].equal < 0.9

    def test_fast_and_precise(self) -> None:
        for key, schedule in (("unit_fast_fp32", "sm90.chain"), ("unit_precise_fp32", "sm90.promote128.scale_after")):
            product, out = dense(DENSE[0], f"out.torch.scaled_mm_{key}")
            found = identify_product(product, out, "sm90")
            best = [m.schedule for m in found if m.equal == 1.0]
            assert schedule in best
            # Unit scales cannot tell epilogues apart, but they do tell promotion from none.
            assert all(name.startswith("sm90.promote128") == ("precise" in key) for name in best)

    def test_a_sample_of_a_larger_output(self) -> None:
        product, out = dense(DENSE[1], "out.deep_gemm.fp8_gemm_nt")
        best = identify_product(product, out, "sm90", sample=900)[0]
        assert best.schedule.startswith(BLOCKWISE) and best.equal == 1.0 and best.compared <= 900

    def test_refusals(self) -> None:
        product, out = dense(DENSE[0], "out.deep_gemm.fp8_gemm_nt")
        with pytest.raises(NumericsError, match="no model for arch 'sm61'; did you mean .* There are: sm70"):
            identify_product(product, out, "sm61")
        with pytest.raises(NumericsError, match="no schedule can compute this product"):
            identify_product(product, out, "sm70")
        with pytest.raises(ShapeError, match="must be"):
            identify_product(product, out[:3])


def _with(pair: tuple[ScaledProduct, torch.Tensor], schedule: str) -> tuple[ScaledProduct, str, torch.Tensor]:
    return pair[0], schedule, pair[1]
