"""Fused quantisers: right kernels of several kinds pass, a wrong value, scale or row fails and is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.bounds.quantiser import identify, judge_recipe
from oracle.diagnosis.explain import diagnose
from oracle.diagnosis.mutation import Fate, mutate
from oracle.errors import DtypeError, LayoutError, NumericsError, OptionError, OracleError, ShapeError
from oracle.numbers import recipe_table
from oracle.numbers import recipes as R
from oracle.numbers.formats import decode
from oracle.numbers.quantize import prepare, quantize
from oracle.routines import cases, get
from oracle.routines.base import by_name
from oracle.routines.catalogue import catalogue, faults_of, run
from oracle.routines.fault import Call
from oracle.routines.fused import faults
from oracle.routines.fused.cases import GRAMMARS
from oracle.routines.fused.contract import FusedContract, Inner
from oracle.routines.fused.kernels import GroupContract, PersistentMaskedMSiluMulQuant
from oracle.verdict.compare import Status, Verdict

SMALL = {
    ("m", "i"): "m=3,i=256",
    ("e", "t", "i"): "e=3,t=4,i=256",
    ("m", "h"): "m=3,h=256",
    ("t", "h", "d"): "t=3,h=2,d=128",
    ("t", "h", "d", "n"): "t=3,h=2,d=16,n=32",
    ("e", "t", "k"): "e=3,t=4,k=256",
    ("m", "k"): "m=5,k=512",
}

WITH_INTERVAL = [
    name
    for name in GRAMMARS
    if "scale" in get(name).returns and not isinstance(get(name), GroupContract | PersistentMaskedMSiluMulQuant)
]
"""Contracts that compute their scale, in float32, of a value that is known up to an interval."""


def call_of(name: str, option: str = "", family: str = "randn", dtypes: str = "") -> Call:
    grammar = GRAMMARS[name]
    head = f"{name}/{dtypes or grammar.dtypes[0]}/{grammar.schemes[0]}/{SMALL[grammar.extents]}"
    case = cases.parse(f"{head}/{option}family={family}/seed=5")
    return Call(get(name), case.inputs(), case.call_options())


def judged(call: Call, output: dict[str, Tensor], **more: object) -> Verdict:
    return call.contract.judge(call.inputs, output, **call.options, **more)  # type: ignore[arg-type]


# --- right kernels of several kinds -------------------------------------------------------------------------


def by_exp(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def by_sigmoid(x: Tensor) -> Tensor:
    return x * (1 / (1 + torch.exp(-x)))


def by_exp2(x: Tensor) -> Tensor:
    """As ``ex2.approx`` does: the exponent is rounded to float32 before the power is taken."""
    return x / (1 + torch.exp2(x * torch.tensor(-1.4426950408889634)))


def high_end(x: Tensor) -> Tensor:
    """All of the error that a device's silu may have."""
    return (by_exp(x.double()) * (1 + 2.0**-21 + (-x.double()).clamp(0, 100) * 2.0**-23)).float()


@pytest.mark.parametrize("silu", [by_exp, by_sigmoid, by_exp2, high_end])
@pytest.mark.parametrize("family", ["ties", "amax"])
def test_every_float32_silu_is_right(silu: Callable[[Tensor], Tensor], family: str) -> None:
    for name, rounding in (("silu_and_mul_per_block_quant", "none"), ("silu_and_mul_quant", "each")):
        call = call_of(name, family=family)
        gate, up = call.inputs["x"].float().chunk(2, dim=-1)
        value = silu(gate) * up if rounding == "none" else (silu(gate).bfloat16().float() * up).bfloat16().float()
        if name == "silu_and_mul_quant":
            output = {"q": (value / call.inputs["scale"]).clamp(-448, 448).to(torch.float8_e4m3fn)}
        else:
            groups = value.unflatten(-1, (-1, 128))
            scale = (groups.abs().amax(-1) / torch.tensor(448.0)).clamp(min=1 / (448 * 512))
            q = (groups / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
            output = {"q": q, "scale": scale}
        assert judged(call, output).status is Status.PASSED


def in_order(z: Tensor) -> Tensor:
    total = torch.zeros(z.shape[0], 1)
    for column in z.square().split(1, dim=1):
        total = total + column
    return total


def pairwise(z: Tensor) -> Tensor:
    return z.square().flip(1).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("total", [in_order, pairwise])
@pytest.mark.parametrize("family", ["randn", "outlier", "heavy"])
def test_every_order_of_a_sum_is_right(total: Callable[[Tensor], Tensor], family: str) -> None:
    call = call_of("rms_norm_dynamic_per_token_quant", "residual=1/", family)
    x, w, residual = (call.inputs[n] for n in ("x", "weight", "residual"))
    z = x.float() + residual.float()
    root = torch.rsqrt(total(z) / z.shape[1] + torch.tensor(call.options["epsilon"]))
    value = ((z * root).to(x.dtype).float() * w.float()).to(x.dtype).float()
    scale = (value.abs().amax(-1, keepdim=True) / torch.tensor(448.0)).clamp(min=1 / (448 * 512))
    q = (value / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert judged(call, {"q": q, "scale": scale, "residual": z.to(x.dtype)}).status is Status.PASSED


@pytest.mark.parametrize("name", WITH_INTERVAL)
def test_whatever_lies_in_the_interval_is_admitted(name: str) -> None:
    """Values drawn between the ends, at the ends and at random, quantised by each recipe: no right output is refused;
    beyond the ends some are (the negative test)."""
    call = call_of(name, family="ties")
    assert isinstance(call.contract, FusedContract)
    inner = call.contract.inner(call)
    assert isinstance(inner.contract, Inner) and inner.contract.between is not None
    between = inner.contract.between
    assert between.ends is not None
    low, high = between.ends.low, between.ends.high
    generator = torch.Generator().manual_seed(3)
    share = torch.rand(low.shape, generator=generator)
    for x in (low, high, torch.where(share < 0.5, low, high)):
        for recipe in inner.contract.admitted:
            made = quantize(x, recipe)
            assert judge_recipe(between, made.codes, made.scale, recipe).outside == 0
    far = torch.where(share < 0.5, low * 0.98, high * 1.02)
    made = quantize(far, inner.contract.admitted[0])
    assert judge_recipe(between, made.codes, made.scale, inner.contract.admitted[0]).outside > 0


# --- wrong ones ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "silu_and_mul_quant",
        "silu_and_mul_per_block_quant",
        "fused_add_rmsnorm_quant",
        "rope_quantize_fp8",
        "per_token_group_quant_fp8_masked",
    ],
)
def test_one_change_is_one_failure(name: str) -> None:
    call = call_of(name)
    made = by_name(run(call))
    assert judged(call, made).status is Status.PASSED
    first = next(iter(made))
    q = made[first].view(torch.uint8).clone()
    q.view(-1)[7] ^= 0x08
    verdict = judged(call, {**made, first: q.view(torch.float8_e4m3fn)})
    assert verdict.status is Status.FAILED and verdict.outside == 1
    if "scale" in made:
        scale = made["scale"].clone()
        scale.view(-1)[0] *= 1 + 2.0**-6
        verdict = judged(call, {**made, "scale": scale})
        assert verdict.status is Status.FAILED and verdict.worst is not None and verdict.worst.output == "scale"


def test_zeroed_codes_above_2_126_are_named_from_the_output_alone() -> None:
    """sglang-kernel's approximate 448/amax is 0 there: right scales, codes zero with the sign of the value."""
    name = "silu_and_mul_masked_post_quant"
    call = call_of(name, family="range")
    made = by_name(run(call))
    big = torch.isfinite(made["scale"]) & (decode(made["scale"]) * 448 > 2.0**126)
    rows = call.contract.rows(call.inputs)
    assert bool(big.any()) and (rows is None or bool(big.reshape(-1, big.shape[-1])[rows].any()))
    codes = made["q"].view(torch.uint8)
    lost = torch.where(big.repeat_interleave(128, dim=-1), codes & 0x80, codes)
    found = diagnose(name, call.inputs, {**made, "q": lost.view(made["q"].dtype)}, **call.options)
    assert found.explanations[0].name == "fused: 448/amax approximate: codes 0 where amax lies above 2^126"


NAMED = (
    ("silu_and_mul_masked_post_quant", "scale of the first K group for every group of the row"),
    ("silu_and_mul_quant", "given scale multiplies the value"),
    ("rms_norm_static_fp8_quant", "weight taken as 1 + w"),
    ("fused_add_rms_norm_static_fp8_quant", "norm not rounded before its product with the weight"),
    ("rms_norm_per_block_quant", "norm of the previous row"),
    ("mla_rope_quantize_fp8", "rotation backwards"),
)


@pytest.mark.turns(4)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "fault"), NAMED)
def test_a_fault_is_named(name: str, fault: str) -> None:
    call = call_of(name)
    wrong = by_name(run(call, catalogue()[fault]))
    assert judged(call, wrong).status is Status.FAILED
    assert fault in [e.name for e in diagnose(name, call.inputs, wrong, **call.options).explanations[:3]]


def test_faults_of_the_rotation_are_killed() -> None:
    mine = [fault for fault in faults.ROTARY if "mla_rope_quantize_fp8" in fault.contracts]
    score = mutate("mla_rope_quantize_fp8", faults=mine[::6])
    assert score.ratio == 1.0 and score.count(Fate.KILLED) == len(score.mutants) == 3


def test_faults_of_the_quantisers_are_faults_here() -> None:
    names = {fault.name for fault in faults_of("silu_and_mul_masked_post_quant")}
    assert {f"fused: {fault.name}" for fault in faults_of("per_token_group_quant_fp8")} <= names


@pytest.mark.parametrize("name", [n for n in GRAMMARS if "masked_m" in {spec.name for spec in get(n).inputs}])
def test_rows_that_are_not_in_use_are_free_and_never_read(name: str) -> None:
    """They hold NaN in every case; whatever stands in their codes and scales passes; an amax over them does not."""
    call = call_of(name)
    made, used = by_name(run(call)), call.inputs["masked_m"]
    assert bool(torch.isnan(call.inputs["x"]).any())
    idle = torch.arange(4)[None, :] >= used[:, None]
    other = {
        "q": made["q"].view(torch.uint8).masked_fill(idle[..., None], 0x33).view(made["q"].dtype),
        "scale": made["scale"].masked_fill(idle[..., None], 7.0),
    }
    assert judged(call, other).status is Status.PASSED
    spread = {**made, "scale": made["scale"].amax(dim=1, keepdim=True).expand_as(made["scale"]).contiguous()}
    assert judged(call, spread).status is Status.FAILED


@pytest.mark.turns(4)
def test_packed_scales_are_bytes_in_lanes() -> None:
    """Every byte in its place; one more fails, and so do other strides and a byte past the last group, as padding."""
    call = call_of("per_token_group_quant_fp8_packed", "group=64/", "special")
    made = by_name(run(call))
    assert made["scale"].shape == (5, 2) and made["scale"].stride() == (1, 8)
    assert not judged(call, made).status.is_failure
    wrong = faults._lanes(made["scale"])
    wrong[2, 1] += 1 << 16
    verdict = judged(call, {**made, "scale": wrong})
    assert verdict.status is Status.FAILED and verdict.worst is not None and verdict.worst.index == (2, 6)
    few = call_of("per_token_group_quant_fp8_packed", "group=256/")
    made = by_name(run(few))
    spoilt = faults._lanes(made["scale"])
    spoilt[1, 0] |= 1 << 24
    verdict = judged(few, {**made, "scale": spoilt})
    assert verdict.status is Status.FAILED and verdict.outside == 1 and "codes" not in verdict.summary
    assert verdict.worst is not None and (verdict.worst.output, verdict.worst.actual) == ("padding of scale", 1)
    with pytest.raises(LayoutError, match="strides"):
        judged(call, {**by_name(run(call)), "scale": by_name(run(call))["scale"].contiguous()})


# --- recipes ------------------------------------------------------------------------------------------------

NEW = (
    "vllm_block", "vllm_silu_masked", "torch_block", "torch_silu_masked", "deepseek_v3_128x128", "flaggems_group",
    "tile_kernels_1x128", "tile_kernels_1x128_ue8m0", "deepep_1x128", "unsloth_1x128", "transformers_128x128",
    "fbgemm_row", "fbgemm_group", "fbgemm_block", "sglang_act_quant", "lmdeploy_1x128", "torchao_1x128",
    "sglang_group_v2", "sglang_triton_ue8m0", "deepep_1x128_ue8m0", "torchao_training_1x128",
)  # fmt: skip  # a table, one row a line
ALIKE = (
    # the same formula (or one that differs with a bound alone), whose bits tell no name apart
    {"vllm_block", "vllm_silu_block"},
    {"torch_block", "torch_silu_block"},
    {"vllm_group", "sglang_triton_column", "flaggems_group"},
    {"sglang_triton_ue8m0", "vllm_inverse_rope"},
    {"tile_kernels_1x128_ue8m0", "deepep_1x128_ue8m0"},
    {"torchao_training_1x128", "fbgemm_group"},
    {"torchao_training_128x128", "fbgemm_block"},
)


@pytest.mark.parametrize("name", NEW)
def test_an_undeclared_quantiser_is_identified_by_name(name: str) -> None:
    """From its bits on values that separate formulas: ties, an amax of every significand, floors, zeros, NaN."""
    recipe = recipe_table.get(name)
    rows = [
        cases.parse(f"per_token_group_quant_fp8/bf16-e4m3/1x128/m=128,k=384/family={f}/seed=3").inputs()["x"]
        for f in ("amax", "range", "special", "nan", "ties")
    ]
    x = torch.cat([*rows, torch.zeros(128, 384, dtype=torch.bfloat16)])
    made = quantize(x, recipe)
    found = identify(prepare(x), made.codes, made.scale)
    assert set(found) == next((names for names in ALIKE if name in names), {name})


def test_an_exponent_beyond_its_range_is_named() -> None:
    """sglang-kernel's power of two of an infinite amax: an infinite scale, and codes by minus infinity."""
    call = call_of("per_token_group_quant_fp8_packed", family="nan")
    x = call.inputs["x"].clone()
    x[1, 3] = torch.inf
    call = replace(call, inputs={"x": x})
    made = quantize(x, R.SGLANG_GROUP_V2_UE8M0_WRAPPED)
    assert torch.isinf(made.scale[1, 0]) and float(decode(made.codes)[1, :3].abs().max()) == 448
    words = call.contract.publish(made.scale, {})  # type: ignore[attr-defined]
    verdict = judged(call, {"q": made.codes, "scale": words})
    assert verdict.status is Status.FAILED and verdict.explained_by == ("sglang_group_v2_ue8m0_wrapped",)


def test_a_bound_of_the_scale_is_no_bound_of_amax() -> None:
    x, ub = torch.full((1, 128), 3.0), torch.tensor([0.1])
    by_scale, by_amax = (quantize(x * 100, r, scale_ub=ub) for r in (R.VLLM_SILU_BLOCK, R.VLLM_BLOCK))
    assert float(by_scale.scale) == float(ub) and float(by_amax.scale) == float(torch.tensor(0.1) / 448)


# --- bad calls ----------------------------------------------------------------------------------------------


BAD: tuple[tuple[str, dict[str, object], dict[str, object], type[OracleError]], ...] = (
    ("silu_and_mul_quant", {"x": torch.zeros(2, 5)}, {}, ShapeError),
    ("silu_and_mul_quant", {"scale": torch.ones(2)}, {}, ShapeError),
    ("silu_and_mul_quant", {}, {"rounding": "twice"}, OptionError),
    ("silu_and_mul_per_block_quant", {}, {"group_size": 96}, ShapeError),
    ("silu_and_mul_masked_post_quant", {"masked_m": torch.tensor([1, 2, 5], dtype=torch.int32)}, {}, OptionError),
    ("silu_and_mul_masked_post_quant", {"masked_m": torch.zeros(3, dtype=torch.int32)}, {}, ShapeError),
    ("persistent_masked_m_silu_mul_quant", {"x": torch.zeros(3, 4, 512)}, {}, DtypeError),
    ("rms_norm_static_fp8_quant", {"weight": torch.zeros(256)}, {}, DtypeError),
    ("rms_norm_static_fp8_quant", {}, {"rounding": "none"}, OptionError),
    ("rms_norm_per_block_quant", {}, {"group_size": 96}, ShapeError),
    ("rms_norm_dynamic_per_token_quant", {}, {"epsilon": 0}, OptionError),
    ("rope_quantize_fp8", {"pos_ids": torch.tensor([0, 1, 99])}, {}, OptionError),
    ("rope_quantize_fp8", {}, {"quant_scale_q": -1.0}, OptionError),
)


@pytest.mark.parametrize(("name", "inputs", "options", "error"), BAD)
def test_a_bad_call_is_refused(
    name: str, inputs: dict[str, Tensor], options: dict[str, object], error: type[OracleError]
) -> None:
    call = call_of(name)
    bad = replace(call, inputs={**call.inputs, **inputs}, options={**call.options, **options})
    with pytest.raises(error):
        bad.checked()


def test_numerics_are_recipes() -> None:
    call = call_of("silu_and_mul_per_block_quant", family="nan")
    assert isinstance(call.contract, FusedContract)
    made = call.contract.predict(call.inputs, numerics="vllm_silu_block", **call.options)
    assert judged(call, made, numerics="vllm_silu_block").matches == "vllm_silu_block"
    assert judged(call, made, numerics="torch_silu_block").status is Status.FAILED
    with pytest.raises(NumericsError, match="sglang_group_row_major_ue8m0"):
        judged(call, made, numerics="sglang_group_row_major_ue8m0")
    best = call.contract.identify(call.inputs, made, arch=None, **call.options)[0]
    assert best.schedule in ("vllm_block", "vllm_silu_block") and best.equal == 1.0  # without a bound the same


def test_a_known_kernels_bits_have_its_name() -> None:
    """The value is CUDA's, not the rounded one; another bit passes and has no name."""
    call = call_of("silu_and_mul_per_block_quant")
    assert isinstance(call.contract, FusedContract)
    (name, value), _ = call.contract.modelled(call.inputs, call.resolved).items()
    made = quantize(value, R.VLLM_SILU_BLOCK)
    output = {"q": made.codes, "scale": made.scale}
    verdict = judged(call, output)
    assert verdict.status is Status.PASSED and verdict.matches == f"torch_silu_block of {name}"
    assert name == "a SiLU by CUDA's expf"
    moved = output | {"scale": torch.nextafter(made.scale, torch.tensor(torch.inf))}
    verdict = judged(call, moved)
    assert verdict.status is Status.PASSED and verdict.matches is None


@pytest.mark.parametrize(
    ("name", "family", "at", "code"),
    [
        ("rms_norm_static_fp8_quant", "special", (29, 168), 224),
        ("fused_add_rms_norm_static_fp8_quant", "ties", (6, 109), 73),
    ],
)
def test_a_norm_as_vllm_computes_it(name: str, family: str, at: tuple[int, int], code: int) -> None:
    """The one code of 21,120 where an H200 and the rounded norm differ; the model has the device's."""
    case = cases.parse(f"{name}/bf16-e4m3/tensor/m=33,h=640/rounding=product/family={family}/seed=1")
    call = Call(get(name), case.inputs(), case.call_options())
    assert isinstance(call.contract, FusedContract)
    ((_, value),) = call.contract.modelled(call.inputs, call.resolved).items()
    made = [
        int(quantize(x, R.TORCH_STATIC, scale=call.inputs["scale"]).codes.view(torch.uint8)[at])
        for x in (value, call.contract.value(call.inputs, call.resolved).expected)
    ]
    assert made[0] == code != made[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_operands_are_known_without_the_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their shape is that of the quantiser's part, whose value is computed when an output is judged."""
    contract = get(name)
    case = cases.parse(next(iter(GRAMMARS[name].ids(name, "quick"))))
    call = Call(contract, case.inputs(), case.call_options()).checked()
    assert isinstance(contract, FusedContract)
    shape = tuple(contract.inner(call).inputs["x"].shape)
    monkeypatch.setattr(type(contract), "value", lambda *_: pytest.fail("the value was computed"))
    bare = Call(contract, call.inputs, call.options).checked()
    assert bare.operands.shape == shape and bare.operands.recipes
