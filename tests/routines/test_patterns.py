"""Data of a kind: a call that is given a pattern has it, ordinary data have not; a kernel that is wrong there fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.numbers.formats import E2M1, E4M3FN, decode, of_dtype
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines import cases, patterns, registered
from oracle.routines.base import Call
from oracle.routines.patterns import DATA, Input
from oracle.routines.traits import Kind, TensorSpec
from oracle.verdict.compare import Status
from tests.support.legal import right_call

STATIC = "scaled_fp8_quant/bf16-e4m3/tensor/m=5,k=64/static=1/{}family=randn/seed=1"
TOKEN = "scaled_fp8_quant/bf16-e4m3/token/m=5,k=64/{}family=randn/seed=1"
MX = "mxfp8_quantize/bf16-e4m3/1x32/m=5,k=64/{}family=randn/seed=1"
FP4 = "nvfp4_quantize/bf16/1x16/m=5,k=64/{}family=randn/seed=1"
DEQUANT = "per_tensor_dequantize/e4m3-f16/tensor/m=9,k=64/{}family=codes/seed=1"
CACHE = "reshape_and_cache_flash/bf16-e4m3/tensor/t=5,h=2,d=32,p=4/{}family=randn/seed=1"
LAYER = "cutlass_moe_fp8/bf16xe4m3-bf16/tensor:tensor/t=4,e=3,h=64,i=32,k=2/{}family=randn/seed=0"


def pair(text: str, changed: str) -> tuple[Call, Call]:
    """The call of an id without and with these changes."""
    plain, case = cases.parse(text.format("")), cases.parse(text.format(f"{changed}/"))
    return right_call(plain), right_call(case)


def alone(x: Tensor, kind: Kind) -> Input:
    """An input of a call of which nothing else is looked at."""
    contract = registered()["scaled_fp8_quant"]
    return Input(TensorSpec("x", kind, (x.dtype,), None, "this test"), Call(contract, {"x": x}))


@pytest.mark.parametrize(
    ("word", "given", "due"),
    [
        ("powers", [3.0, -0.75, 0.0], [2.0, -0.5, 0.0]),
        ("equal", [3.0, 1.0, 2.0], [3.0, 3.0, 3.0]),
        ("negative", [3.0, -1.0, 0.0], [-3.0, -1.0, -0.0]),
        ("one", [[1, 2], [-1, 4], [0, -1]], [[1, 2], [1, 2], [1, 2]]),
        ("one_group", [0, 3, 5, 9], [0, 9, 9, 9]),
        ("one_group", [3, 5, 9], [9, 9, 9]),
        ("last_group", [0, 3, 5, 9], [0, 0, 0, 9]),
        ("last_group", [3, 5, 9], [0, 0, 9]),
        ("unassigned", [4, 2, 0], [4, -1, -1]),
        ("below", [4, 2, 0], [4, 2, -2]),
        ("below", [4, 2, 0, 1], [4, -3, 0, -2]),
        ("duplicates", [4, -1, 2], [4, -1, 4]),
        ("duplicates", [[1, 2, -1], [3, -1, 4]], [[1, 2, -1], [1, -1, 4]]),
        ("empty", [4, 2, 0], [0, 0, 4]),
        ("ones", [4, 2, 0], [1, 1, 1]),
    ],
)
def test_data_of_a_kind(word: str, given: list[object], due: list[object]) -> None:
    """What the pattern makes, that it shows it, and that the data before did not."""
    x, kind = torch.tensor(given), next(iter(DATA[word].kinds))
    made = DATA[word].make(alone(x, kind))["x"]
    assert made.tolist() == due
    assert DATA[word].shows(alone(made, kind)) and not DATA[word].shows(alone(x, kind))


def test_every_second_group_of_a_row_is_zero() -> None:
    made = DATA["zeros"].make(alone(torch.ones(2, 300), Kind.VALUES))["x"]
    assert (made == 0).sum(dim=1).tolist() == [128 + 44, 128 + 44]
    assert DATA["zeros"].shows(alone(made, Kind.VALUES)) and not DATA["zeros"].shows(alone(made * 0, Kind.VALUES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_nan_of_every_format_that_has_one(dtype: torch.dtype) -> None:
    x = torch.ones(3, 5).to(dtype)
    made = DATA["nan"].make(alone(x, Kind.SCALES))["x"]
    assert torch.isnan(decode(made)).nonzero().tolist() == [[0, 2], [2, 4]] and not torch.isnan(decode(x)).any()
    assert DATA["nan"].shows(alone(made, Kind.SCALES)) and not DATA["nan"].shows(alone(x, Kind.SCALES))


@pytest.mark.parametrize(
    ("word", "dtype"), [("nan", torch.int32), ("inf", torch.float8_e4m3fn), ("powers", torch.int32)]
)
def test_what_a_dtype_cannot_hold_is_refused(word: str, dtype: torch.dtype) -> None:
    with pytest.raises(CaseError):
        DATA[word].make(alone(torch.ones(3, 5).to(dtype), Kind.VALUES))


def test_every_kind_has_a_pattern_or_a_reason() -> None:
    patterned = {kind for pattern in DATA.values() for kind in pattern.kinds}
    assert patterned | set(patterns.WITHOUT) == set(Kind) and not patterned & set(patterns.WITHOUT)
    assert all(patterns.WITHOUT.values())


class TestTies:
    """Half way between two codes, under the scale of the call."""

    def test_the_quotient_by_a_given_scale_that_is_no_power_of_two(self) -> None:
        plain, call = pair(STATIC, "x:midpoints")
        x, scale = decode(call.inputs["x"]), decode(call.inputs["scale"])
        assert scale.tolist() == [1.75] and len(patterns._midpoints(E4M3FN)) == 126
        quotient = (x / scale).abs()
        assert float(torch.isin(quotient, patterns._midpoints(E4M3FN)).double().mean()) > 0.7
        found = {word for name, word in patterns.shown(call) if name == "x"}
        assert {"midpoints", "ties", "halves"} & found == {"midpoints", "ties", "halves"}
        assert not {word for name, word in patterns.shown(plain)} & {"midpoints", "ties", "halves"}

    @pytest.mark.parametrize("text", [STATIC, TOKEN, FP4])
    def test_ties_and_halves_of_the_target(self, text: str) -> None:
        for word in ("ties", "halves"):
            plain, call = pair(text, f"x:{word}")
            assert ("x", word) in patterns.shown(call) and ("x", word) not in patterns.shown(plain)

    def test_a_call_whose_scales_are_powers_of_two_has_no_midpoints(self) -> None:
        with pytest.raises(CaseError, match="x has no (given )?scale of floats"):
            cases.parse(MX.format("x:midpoints/")).inputs()

    def test_target_formats(self) -> None:
        """Of a recipe, of the outputs, of the memory that a call writes."""
        for text, due in ((FP4, E2M1), (STATIC, E4M3FN), (CACHE, E4M3FN)):
            assert patterns.targets(right_call(cases.parse(text.format("")))) == (due,)

    @pytest.mark.parametrize("dtype", [torch.float16])
    def test_products_of_codes_and_a_scale(self, dtype: torch.dtype) -> None:
        """Codes with an odd significand of four bits times 257: twelve bits, one more than float16 has."""
        _, call = pair(DEQUANT, "inv_scale:ties")
        exact = decode(call.inputs["q"]) * decode(call.inputs["inv_scale"])
        ends = [
            to_dtype(exact, dtype, rounding=rounding, overflow=Overflow.INF)
            for rounding in (Rounding.UP, Rounding.DOWN)
        ]
        up, down = map(decode, ends)
        inside = torch.isfinite(exact) & (exact.abs() > of_dtype(dtype).min_normal)
        assert float(((up - exact) == (exact - down))[inside & (up != down)].double().mean()) == 1.0
        assert int((inside & (up != down)).sum()) > 50


def smallest_floor(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows below 1e-4 are lost."""
    x = inputs["x"]
    return {**inputs, "x": torch.where(x.abs().amax(dim=1, keepdim=True) < 1e-4, 0.0, x).to(x.dtype)}


def zeros_for_the_least(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A scale of 2^-127 is taken for 2^127, as a zero by its reciprocal."""
    byte = inputs["a_scale"].view(torch.uint8)
    return {**inputs, "a_scale": torch.where(byte == 0, 254, byte).to(torch.uint8).view(inputs["a_scale"].dtype)}


def clamped_sum(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two exponents whose sum is below -127 count as -127."""
    raised = inputs["b_scale"].view(torch.uint8).clamp(min=75)
    low = inputs["a_scale"].view(torch.uint8)
    return {**inputs, "b_scale": torch.where(low.min() < 60, raised, inputs["b_scale"].view(torch.uint8))}


def skipped_zeros(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A block whose scale is 0 is not read."""
    a = torch.where(
        inputs["a_scale"].repeat_interleave(128, dim=1)[:, : inputs["a"].shape[1]] == 0, 0.0, decode(inputs["a"])
    )
    return {**inputs, "a": a.to(inputs["a"].dtype)}


def rounded_weights(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a router in bfloat16."""
    return {**inputs, "topk_weights": inputs["topk_weights"].bfloat16().float()}


def only_minus_one(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Negative places other than -1 are counted from the end."""
    slots, size = inputs["slot_mapping"], inputs["key_cache"].shape[0] * inputs["key_cache"].shape[1]
    return {**inputs, "slot_mapping": torch.where(slots < -1, slots + size, slots)}


def first_count(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every group has as many rows as the first one."""
    return {**inputs, "masked_m": inputs["masked_m"][:1].expand(inputs["masked_m"].shape).clone()}


TINY = "per_token_group_quant_fp8/bf16-e4m3/1x128/m=5,k=128/{}family=randn/seed=1"
PRODUCT = "fp8_gemm_nt_1d1d/e4m3xe4m3-f32/1x128:1x128/m=5,n=16,k=256/{}family=randn/seed=1"
LOW = "bmm_mxfp8/e4m3xe4m3-bf16/1x32/m=5,n=16,k=64,g=2/{}family=randn/seed=1"
MASKED = "per_token_group_quant_fp8_masked/bf16-e4m3/1x128/e=3,t=5,k=128/{}family=randn/seed=1"
EXPERTS = "fused_experts_block/bf16xe4m3-bf16/1x128:128x128/t=4,e=3,h=128,i=128,k=2/{}family=randn/seed=1"


@pytest.mark.parametrize(
    ("text", "changed", "misread"),
    [
        (TINY, "x:small", smallest_floor),
        (PRODUCT, "a:nan_at_zero", skipped_zeros),
        (LOW, "a_scale:least", zeros_for_the_least),
        (LOW, "a_scale:low", clamped_sum),
        (CACHE, "slot_mapping:below", only_minus_one),
        (MASKED, "masked_m:turned", first_count),
        (EXPERTS, "topk_weights:fine", rounded_weights),
    ],
)
def test_a_kernel_that_misreads_an_input_fails_where_it_has_these_data(
    text: str, changed: str, misread: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """The right kernel of the misread inputs passes on ordinary data; that of the inputs themselves passes on both."""
    for call, fails in zip(pair(text, changed), (False, True), strict=True):
        for inputs, wrong in ((misread(dict(call.inputs)), fails), (call.inputs, False)):
            output = call.contract.kernel(replace(call, inputs=inputs))
            verdict = call.contract.judge(call.inputs, output, arch=call.arch, **call.options)
            assert (verdict.status is Status.FAILED) == wrong, verdict.summary


def away(inputs: dict[str, Tensor], contract: str) -> Tensor:
    """Ties of the store away from zero."""
    exact = decode(inputs["q"]) * decode(inputs["inv_scale"])
    return to_dtype(exact, torch.float16, rounding=Rounding.NEAREST_AWAY, overflow=Overflow.INF)


def test_a_layer_claims_nothing_where_zero_meets_a_weight_that_is_nan() -> None:
    """A dead expert's zeros times NaN: the truth is NaN there, and a right kernel passes."""
    _, call = pair(LAYER.replace("k=2/", "k=2/dead=1,map=1,combine=SCALED/"), "w2:nan")
    output = call.contract.kernel(call)
    assert bool(torch.isnan(output["out"]).any())
    judged = call.contract.judge(call.inputs, output, arch=call.arch, **call.options)
    assert not judged.status.is_failure
    wrong = {"out": torch.where(torch.isnan(output["out"]), output["out"], 1.0)}
    assert call.contract.judge(call.inputs, wrong, arch=call.arch, **call.options).status is Status.FAILED


@pytest.mark.parametrize(("text", "changed", "kernel"), [(DEQUANT, "inv_scale:ties", away)])
def test_a_kernel_that_is_wrong_at_ties_alone_fails_there(
    text: str, changed: str, kernel: Callable[[dict[str, Tensor], str], Tensor]
) -> None:
    """On ordinary data it passes."""
    for call, fails in zip(pair(text, changed), (False, True), strict=True):
        output = kernel(dict(call.inputs), call.contract.name)
        verdict = call.contract.judge(call.inputs, output, arch=call.arch, **call.options)
        assert (verdict.status is Status.FAILED) == fails
        right = call.contract.kernel(replace(call, out_dtype=torch.float16))
        assert not call.contract.judge(call.inputs, right, arch=call.arch, **call.options).status.is_failure
