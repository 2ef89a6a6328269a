"""Weight-only products and layouts: a second derivation, kernels of their own, round trips, bad calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracle.errors import DtypeError, InputError, OptionError, OracleError, ShapeError
from oracle.routines import cases, get, profiles
from oracle.routines.options import word
from oracle.routines.weight_only.cases import LAYOUTS
from oracle.truth import weight_only as truth
from oracle.verdict.compare import Status
from tests.routines.moe.test_activations import array
from tests.support.slow_oracle.numbers import same
from tests.support.slow_oracle.routines import derive

PRODUCTS = (
    *(f"awq_dequantize/{d}/{g}/m=1,n=16,k=64/family={f}/seed=3"
      for d, g, f in (("f16", "32", "randn"), ("bf16", "column", "dead"))),
    *(f"awq_gemm/{d}/{g}/m=2,n=8,k=64/family={f}/seed=3"
      for d, g, f in (("f16", "32", "randn"), ("bf16", "column", "exact"))),
    *(f"gptq_gemm/f16/{g}/m=2,n=32,k=64/{o}family={f}/seed=3"
      for g, o, f in (("32", "", "randn"), ("column", "bit=2/", "randn"), ("32", "bit=3,order=1/", "randn"),
                      ("32", "bit=8/", "exact"))),
    *(f"marlin_gemm/{d}/{g}/m=2,n=8,k=64/{o}family={f}/seed=3"
      for d, g, o, f in (("bf16", "32", "bias=1,order=1/", "randn"), ("f16", "column", "bias=1/", "randn"),
                         ("bf16", "32", "type=uint4/", "exact"), ("f16", "column", "type=uint4/", "randn"),
                         ("bf16", "column", "type=uint8b128/", "randn"), ("f16", "32", "type=uint8/", "exact"),
                         ("bf16", "column", "type=float8_e4m3fn/", "randn"), ("bf16", "32", "type=float8_e4m3fn/",
                             "dead"),
                         ("f16", "16", "type=float4_e2m1f,bias=1/", "randn"), ("bf16", "32", "type=float4_e2m1f/",
                             "randn"))),
    *(f"machete_mm/{d}/{g}/m=2,n=8,k=64/{o}family={f}/seed=3"
      for d, g, o, f in (("bf16", "32", "", "randn"), ("f16", "32", "type=uint4/", "exact"),
                         ("bf16", "column", "type=uint8b128,scales=1/", "randn"))),
    *(f"mm_bf16_fp4/bf16/16/m=2,n=8,k=64/{o}family={f}/seed=3"
      for o, f in (("", "randn"), ("alpha=1/", "randn"))),
    *(f"moe_wna16_marlin_gemm/{d}/{g}/m=2,n=4,k=64,g=3/{o}family={f}/seed=3"
      for d, g, o, f in (("bf16", "32", "weights=1/", "randn"), ("f16", "column", "bias=1,weights=1/", "randn"),
                         ("bf16", "16", "type=float4_e2m1f/", "randn"))),
    *(f"moe_wna16_gemm/{d}/{g}/m=2,n=4,k=64,g=3/{o}family={f}/seed=3"
      for d, g, o, f in (("bf16", "32", "weights=1/", "randn"), ("f16", "column", "zeros=1,weights=1/", "exact"),
                         ("f16", "32", "bit=8,zeros=1/", "exact"))),
)  # fmt: skip  # a table, one row a line


def layout_ids() -> list[str]:
    return [str(case) for name in LAYOUTS for case in profiles.cases(name, "quick")]


def derived_equals(case: str) -> float:
    """The share of codes that the second derivation gives; AssertionError where one differs."""
    parsed = cases.parse(case)
    inputs, options = parsed.inputs(), parsed.call_options()
    due = get(parsed.contract).reference(inputs, **options)
    outputs = {"out": due} if isinstance(due, Tensor) else due
    words = {name: value if isinstance(value, bool) else word(value) for name, value in options.items()}
    derived = derive(parsed.contract, {name: array(x) for name, x in inputs.items()}, words)
    assert set(derived) == set(outputs)
    known = total = 0
    for name, codes in derived.items():
        stored = array(outputs[name])
        pairs = [(f, w) for f, w in zip(codes, stored.codes, strict=True) if f is not None]
        assert all(f == w if "int" in stored.dtype else same(f, w, stored.dtype) for f, w in pairs), name
        known, total = known + len(pairs), total + len(codes)
    return known / total


class TestSecondDerivation:
    """Fractions and integers, with no code of the first."""

    @pytest.mark.parametrize("case", PRODUCTS)
    def test_products(self, case: str) -> None:
        assert derived_equals(case) == 1

    def test_layouts(self) -> None:
        for case in layout_ids():
            assert derived_equals(case) == 1, case


class TestInverses:
    """What is packed comes back."""

    @pytest.mark.parametrize("bits", (2, 3, 4, 8))
    def test_words(self, bits: int) -> None:
        codes = torch.randint(0, 1 << bits, (64, 5), generator=torch.Generator().manual_seed(bits))
        assert torch.equal(truth.fields(truth.words(codes, bits), bits), codes)

    @pytest.mark.parametrize("eight", (False, True))
    @pytest.mark.parametrize("bits", (4, 8))
    def test_tiles(self, bits: int, eight: bool) -> None:
        codes = torch.randint(0, 1 << bits, (64, 128), generator=torch.Generator().manual_seed(bits))
        packed = truth.to_marlin(codes, bits, is_a_8bit=eight)
        assert packed.shape == (4, 128 * bits // 2)
        assert torch.equal(truth.from_marlin(packed, bits, is_a_8bit=eight), codes)
        assert torch.equal(truth.awq_fields(truth.awq_words(codes, bits), bits), codes)


def judged(case: str, out: Tensor | None = None) -> Status:
    """The verdict on ``out``, or on a float32 product of rounded weights."""
    parsed = cases.parse(case)
    inputs, options = parsed.inputs(), parsed.call_options()
    contract = get(parsed.contract)
    if out is None:
        plan = contract.plans(inputs, contract.check(inputs, options))[0]  # type: ignore[attr-defined]
        w = plan.weights.values(plan.form, plan.a.dtype).float()
        out = (plan.a.float() @ w).to(plan.a.dtype)
    return contract.judge(inputs, out, arch="cpu", **options).status


class TestArithmetics:
    """A kernel of another order passes, one of another zero point or rounding does not."""

    CASE = "gptq_gemm/f16/32/m=5,n=32,k=64/family=randn/seed=2"

    def test_half_precision_pieces(self) -> None:
        """Exllama's: exact weights, four products a lane in float16, scales in float32."""
        parsed = cases.parse(self.CASE)
        inputs = parsed.inputs()
        contract = get("gptq_gemm")
        w = contract.weights(inputs, contract.check(inputs, {}))  # type: ignore[attr-defined]
        q, s = (w.codes - w.zero[w.group]).half(), w.scale[w.group].float()
        a, total = inputs["a"], torch.zeros(5, 32)
        for k in range(0, 64, 8):
            for lane in (0, 1):
                part = torch.zeros(5, 32, dtype=torch.float16)
                for at in range(k + lane, k + 8, 2):
                    part = (part.double() + a[:, at, None].double() * q[at].double()).half()
                total += part.float() * s[k]
        assert judged(self.CASE, total.half()) is Status.PASSED
        assert judged(self.CASE, (total * 1.3).half()) is Status.FAILED

    def test_old_zero_points(self) -> None:
        parsed = cases.parse(self.CASE.replace("randn", "exact"))
        out = get("gptq_gemm").reference(parsed.inputs(), use_v2_format=True)
        assert judged(str(parsed)) is not Status.FAILED
        assert judged(str(parsed), out) is Status.FAILED

    @pytest.mark.parametrize(
        ("options", "status"),
        (({}, Status.FAILED), ({"use_fp32_reduce": False}, Status.PASSED), ({"use_atomic_add": True}, Status.PASSED)),
    )
    def test_partial_sums(self, options: dict[str, object], status: Status) -> None:
        """Sums of 64 rows through bfloat16 are right where the call says so."""
        parsed = cases.parse("marlin_gemm/bf16/32/m=3,n=64,k=256/family=randn/seed=2")
        inputs, contract = parsed.inputs(), get("marlin_gemm")
        plan = contract.plans(inputs, contract.check(inputs, {}))[0]  # type: ignore[attr-defined]
        w = plan.weights.values(plan.form, torch.bfloat16)
        out = torch.zeros(3, 64, dtype=torch.bfloat16)
        for k in range(0, 256, 64):
            out = (out.double() + (plan.a[:, k : k + 64].double() @ w[k : k + 64]).bfloat16().double()).bfloat16()
        assert contract.judge(inputs, out, arch="sm90", **options).status is status

    def test_overflow_before_the_global_scale(self) -> None:
        """Rounded to float16 first, a sum above 65504 is infinite (vllm PR 37135)."""
        parsed = cases.parse("marlin_gemm/f16/16/m=5,n=32,k=64/type=float4_e2m1f/family=randn/seed=2")
        inputs, contract = parsed.inputs(), get("marlin_gemm")
        inputs["a"] = (inputs["a"] * 0 + 40).half()
        inputs["b_q"] = torch.full_like(inputs["b_q"], 7)
        inputs["b_scales"] = torch.full_like(inputs["b_scales"].float(), 8.0).to(torch.float8_e4m3fn)
        right = contract.reference(inputs, **parsed.call_options())
        assert isinstance(right, Tensor) and bool(torch.isfinite(right).all())
        wrong = torch.full_like(right, torch.inf)
        assert contract.judge(inputs, wrong, arch="cpu", **parsed.call_options()).status is Status.FAILED


class TestCalls:
    """Bad calls are named."""

    def test_named(self) -> None:
        marlin = cases.parse("marlin_gemm/bf16/32/m=2,n=8,k=64/family=randn/seed=1").inputs()
        gptq = cases.parse("gptq_gemm/f16/32/m=2,n=32,k=64/order=1/family=randn/seed=1").inputs()
        fp4 = cases.parse("mm_bf16_fp4/bf16/16/m=2,n=8,k=64/family=randn/seed=1").inputs()
        perm = torch.zeros(64, dtype=torch.int32)
        shuffle = {"q_weight": torch.zeros(8, 4, dtype=torch.int32), "q_perm": perm}
        rows: tuple[tuple[str, dict[str, Tensor], dict[str, object], type[OracleError], str], ...] = (
            ("marlin_gemm", marlin, {"b_type": "uint4"}, OptionError, "b_zeros"),
            ("marlin_gemm", marlin, {"b_type": "float4_e2m1f"}, DtypeError, "E4M3"),
            ("marlin_gemm", marlin | {"b_q": marlin["b_q"] + 16}, {}, InputError, "4 bits"),
            ("marlin_gemm", marlin | {"global_scale": torch.ones(1)}, {}, OptionError, "global_scale"),
            ("gptq_gemm", gptq | {"g_idx": gptq["g_idx"] - 1}, {}, InputError, "-1"),
            ("gptq_gemm", gptq, {"bit": 8}, ShapeError, "16"),
            ("mm_bf16_fp4", fp4 | {"b_descale": (-fp4["b_descale"].float()).to(torch.float8_e4m3fn)}, {}, InputError,
                "sign"),
            ("gptq_shuffle", shuffle, {}, InputError, "permutation"),
            ("marlin_permute_bias", {"s": torch.ones(40).half()}, {}, ShapeError, "32"),
        )  # fmt: skip  # a table, one row a line
        for name, inputs, options, error, match in rows:
            with pytest.raises(error, match=match):
                get(name).reference(inputs, **options)
