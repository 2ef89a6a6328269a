"""The linear layer in every combination, its dispatch table, and DeepGEMM's difference measure."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.numbers import recipes
from oracle.numbers.formats import decode
from oracle.numbers.quantize import quantize
from oracle.routines import get
from oracle.tensorcore.predict import predict_product
from oracle.truth.gemm import ScaledProduct, exact
from oracle.truth.linear import ROUTINES, calc_diff, dispatch_w8a8_scaled_mm, input_recipes
from oracle.verdict.compare import Status, Verdict

E4M3 = torch.float8_e4m3fn
K, N = 160, 48
Inputs = dict[str, Tensor]
EVERY = list(itertools.product(["static", "tensor", "token"], [False, True], [False, True], [(7,), (2, 3), ()]))


pytestmark = pytest.mark.usefixtures("one_thread")


def make(
    kind: str,
    *,
    channel: bool = False,
    bias: bool = False,
    lead: tuple[int, ...] = (7,),
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs of a layer and the options of its call."""
    g = torch.Generator().manual_seed(seed)
    inputs = {
        "input": torch.randn(*lead, K, generator=g).to(dtype),
        "weight": torch.randn(N, K, generator=g).mul(100).clamp(-448, 448).to(E4M3).t(),
        "weight_scale": torch.rand(N, 1, generator=g) * 1e-2 + 1e-3 if channel else torch.tensor([0.0037]),
    }
    if kind == "static":
        inputs["input_scale"] = torch.tensor(0.0091)
    if bias:
        inputs["bias"] = torch.randn(N, generator=g).to(torch.bfloat16)
    return inputs, {"use_per_token_if_dynamic": kind == "token"}


def layer(inputs: Inputs, *, kind: str, variant: int = 0, padding: int | None = None) -> Tensor:
    """A layer in float32 torch; the variant picks among right formulas, padding rows hold NaN codes."""
    x = inputs["input"].reshape(-1, K)
    q, s = quantised(x.float(), inputs, kind, variant)
    rows = max(len(q), padding or 0)
    bits = torch.cat([q.view(torch.uint8), torch.full((rows - len(q), K), 0x7F, dtype=torch.uint8)])
    w = inputs["weight"].float()
    acc = bits.view(E4M3).float() @ w
    scale = s if s.numel() == 1 else torch.cat([s, torch.full((rows - len(q), 1), math.nan)])
    y = (acc * scale) * inputs["weight_scale"].reshape(1, -1)
    if "bias" in inputs:
        y = y + inputs["bias"].float()
    return y[: len(q)].to(inputs["input"].dtype).reshape(*inputs["input"].shape[:-1], N)


def quantised(x: Tensor, inputs: Inputs, kind: str, variant: int) -> tuple[Tensor, Tensor]:
    if kind == "static":
        s = inputs["input_scale"].reshape(1, 1)
    else:
        amax = x.abs().amax(dim=1, keepdim=True) if kind == "token" else x.abs().amax().reshape(1, 1)
        if "input_scale_ub" in inputs:
            amax = amax.minimum(inputs["input_scale_ub"])
        top = torch.full_like(amax, 448.0)
        s = amax / top if variant == 0 else 1 / (top / amax)
        if kind == "token":
            s = s.clamp(min=1 / (448 * 512))
    v = x / s if variant == 0 else x * (1 / s)
    return v.clamp(-448, 448).to(E4M3), s


def judge(inputs: Inputs, out: Tensor, *, arch: str = "cpu", numerics: str | None = None, **options: object) -> Verdict:
    return get("Fp8LinearOp").judge(inputs, out, arch=arch, numerics=numerics, **options)


class TestLayer:
    """Static, per tensor, per token x tensor, channel x bias x leading dimensions x padding."""

    @pytest.mark.parametrize(("kind", "channel", "bias", "lead"), EVERY)
    def test_right_layers_pass(self, kind: str, channel: bool, bias: bool, lead: tuple[int, ...]) -> None:
        inputs, options = make(kind, channel=channel, bias=bias, lead=lead)
        for variant, padding in ((0, None), (1, 17)):
            out = layer(inputs, kind=kind, variant=variant, padding=padding)
            verdict = judge(inputs, out, **options)
            assert verdict.status is Status.PASSED and verdict.unconstrained == 0, verdict.summary
            assert verdict.total == out.numel()

    @pytest.mark.parametrize(("kind", "channel", "bias", "lead"), EVERY[::2])
    def test_the_reference_is_the_middle(self, kind: str, channel: bool, bias: bool, lead: tuple[int, ...]) -> None:
        inputs, options = make(kind, channel=channel, bias=bias, lead=lead, seed=1)
        out = get("Fp8LinearOp").reference(inputs, out_dtype=torch.bfloat16, **options)
        assert isinstance(out, Tensor) and out.shape == (*lead, N)
        for arch in ("cpu", "sm90"):
            assert judge(inputs, out, arch=arch, **options).margin == 0

    @pytest.mark.parametrize("kind", ["static", "tensor", "token"])
    def test_reference_is_the_exact_product_of_the_codes(self, kind: str) -> None:
        inputs, options = make(kind, channel=True, bias=True)
        recipe = input_recipes(static=kind == "static", per_token=kind == "token")[0]
        made = quantize(inputs["input"], recipe, scale=inputs.get("input_scale"))
        weight = inputs["weight"].t().contiguous()
        scale = made.scale.reshape(-1, 1)
        product = ScaledProduct(made.codes, weight, scale, inputs["weight_scale"], K, 1, inputs["bias"])
        value = exact(product)
        out = get("Fp8LinearOp").reference(inputs, **options)
        assert isinstance(out, Tensor) and torch.equal(out, value.hi + value.lo)

    @pytest.mark.parametrize("recipe", [recipes.VLLM_TOKEN, recipes.TORCH_TOKEN], ids=lambda r: str(r.name))
    @pytest.mark.parametrize("schedule", ["sm90.chain", "sm90.promote128.scale_after"])
    def test_bits_are_recognised(self, schedule: str, recipe: recipes.Recipe) -> None:
        inputs, options = make("token", channel=True, bias=True, seed=2)
        made = quantize(inputs["input"], recipe)
        weight = inputs["weight"].t().contiguous()
        product = ScaledProduct(made.codes, weight, made.scale, inputs["weight_scale"], K, 1, inputs["bias"])
        out = predict_product(product, schedule, out_dtype=torch.bfloat16)
        verdict = judge(inputs, out, arch="sm90", **options)
        assert verdict.status is Status.PASSED and verdict.matches is not None

    @settings(max_examples=20)
    @given(seed=st.integers(0, 10**6), kind=st.sampled_from(["static", "tensor", "token"]))
    def test_hardware_bits_after_any_formula_are_inside(self, seed: int, kind: str) -> None:
        inputs, options = make(kind, channel=True, seed=seed)
        q, s = quantised(inputs["input"].float(), inputs, kind, 1)
        weight = inputs["weight"].t().contiguous()
        product = ScaledProduct(q, weight, s, inputs["weight_scale"], K, 1)
        out = predict_product(product, "sm90.chain", out_dtype=torch.bfloat16)
        assert judge(inputs, out, arch="sm90", numerics="sm90.chain", **options).status is Status.PASSED

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        inputs, options = make("token", channel=True, bias=True, dtype=dtype)
        assert judge(inputs, layer(inputs, kind="token"), **options).status is Status.PASSED

    def test_bounded_amax(self) -> None:
        inputs, options = make("token", channel=True)
        inputs["input_scale_ub"] = torch.tensor([1.5])
        assert judge(inputs, layer(inputs, kind="token"), **options).status is Status.PASSED
        unbounded = {k: v for k, v in inputs.items() if k != "input_scale_ub"}
        assert judge(inputs, layer(unbounded, kind="token"), **options).status is Status.FAILED

    @pytest.mark.parametrize("arch", ["cpu", "sm90"])
    @pytest.mark.parametrize(
        "fault",
        [
            "bias dropped",
            "bias twice",
            "weight scale of the next channel",
            "input scale of the next token",
            "inverse for the scale",
            "rows swapped",
            "weight scale dropped",
            "one scale for all tokens",
            "k tail dropped",
        ],
    )
    def test_faults_fail(self, fault: str, arch: str) -> None:
        inputs, options = make("token", channel=True, bias=True, seed=3)
        wrong, kind = dict(inputs), "token"
        if fault == "bias dropped":
            del wrong["bias"]
        elif fault == "bias twice":
            wrong["bias"] = inputs["bias"] * 2
        elif fault == "weight scale of the next channel":
            wrong["weight_scale"] = inputs["weight_scale"].roll(1, dims=0)
        elif fault == "weight scale dropped":
            wrong["weight_scale"] = torch.ones(N, 1)
        elif fault == "one scale for all tokens":
            kind = "tensor"
        elif fault == "k tail dropped":
            wrong["input"] = inputs["input"] * (torch.arange(K) < 128)
        out = layer(wrong, kind=kind)
        if fault == "rows swapped":
            out = out[[1, 0, 2, 3, 4, 5, 6]]
        elif fault == "input scale of the next token":
            s = quantised(inputs["input"].float(), inputs, "token", 0)[1]
            bias = inputs["bias"].float()
            out = ((out.float() - bias) / s * s.roll(1, dims=0) + bias).bfloat16()
        elif fault == "inverse for the scale":
            out = (out.float() / quantised(inputs["input"].float(), inputs, "token", 0)[1] ** 2).bfloat16()
        assert judge(inputs, layer(inputs, kind="token"), **options).status is Status.PASSED
        assert judge(inputs, out, arch=arch, **options).status is Status.FAILED

    def test_unquantised_input_is_noticed(self) -> None:
        """A layer that multiplies the bfloat16 input itself."""
        inputs, options = make("tensor", channel=True, seed=4)
        y = (inputs["input"].float() @ inputs["weight"].float()) * inputs["weight_scale"].reshape(1, -1)
        assert judge(inputs, y.bfloat16(), **options).status is Status.FAILED

    def test_fp8_input_is_a_product(self) -> None:
        inputs, _ = make("static", channel=True, bias=True)
        coded = {**inputs, "input": inputs["input"].float().mul(30).to(E4M3)}
        y = (coded["input"].float() @ inputs["weight"].float()) * inputs["input_scale"]
        y = y * inputs["weight_scale"].reshape(1, -1) + inputs["bias"].float()
        assert judge(coded, y.bfloat16()).status is Status.PASSED
        assert judge(coded, (y * 1.02).bfloat16()).status is Status.FAILED
        with pytest.raises(InputError, match="CUTLASS"):
            judge(coded, y.bfloat16(), cutlass_fp8_supported=True)
        with pytest.raises(InputError, match="input_scale"):
            judge({k: v for k, v in coded.items() if k != "input_scale"}, y.bfloat16())

    def test_nan_opens_its_token_only(self) -> None:
        inputs, options = make("token", channel=True)
        out = layer(inputs, kind="token")
        inputs["input"][3, 5], out[3] = torch.nan, torch.nan
        verdict = judge(inputs, out, **options)
        assert verdict.status is Status.PASSED and verdict.unconstrained == N

    @pytest.mark.parametrize("where", ["weight", "weight_scale", "bias"])
    def test_nan_in_a_channel_must_come_out(self, where: str) -> None:
        inputs, options = make("token", channel=True, bias=True)
        finite = layer(inputs, kind="token")
        if where == "weight":
            bits = inputs["weight"].t().contiguous().view(torch.uint8)
            bits[5, 9] = 0x7F
            inputs["weight"] = bits.view(E4M3).t()
        else:
            inputs[where] = inputs[where].clone()
            inputs[where][5] = torch.nan
        out = layer(inputs, kind="token")
        assert bool(torch.isnan(out[:, 5]).all())
        assert judge(inputs, out, **options).status is Status.PASSED
        assert judge(inputs, finite, **options).outside == len(out)

    def test_bad_calls_are_named(self) -> None:
        inputs, options = make("tensor")
        out = layer(inputs, kind="tensor")
        with pytest.raises(ShapeError, match="takes"):
            judge({**inputs, "input": inputs["input"][:, :-1]}, out, **options)
        with pytest.raises(OptionError, match="input_scale_ub"):
            judge({**inputs, "input_scale_ub": torch.ones(1)}, out, **options)
        with pytest.raises(NumericsError, match="known"):
            judge(inputs, out, arch="riscv", **options)
        with pytest.raises(NumericsError, match="flipped"):
            judge(inputs, out, arch="sm90", numerics="sm90.chain.any", **options)
        with pytest.raises(ShapeError, match="one value"):
            judge({**inputs, "input_scale": torch.ones(7, 1)}, out, **options)


class TestDispatch:
    """The published table, every combination of its conditions."""

    FLAGS = (
        "cutlass_fp8_supported",
        "per_tensor_weights",
        "per_tensor_activations",
        "use_per_token_if_dynamic",
        "rocm",
        "rowwise",
    )

    @pytest.mark.parametrize(
        ("flags", "routine"),
        [
            ("111111", "cutlass"),
            ("100000", "cutlass"),
            ("011000", "torch_per_tensor"),
            ("011010", "rocm_per_tensor"),
            ("011101", "torch_per_tensor"),
            ("000101", "torch_per_token"),
            ("000111", "torch_per_token"),
            ("000100", "torch_channelwise"),
            ("000001", "torch_channelwise"),
            ("001101", "torch_channelwise"),
            ("010101", "torch_channelwise"),
            ("000010", "torch_channelwise"),
            ("001010", "torch_channelwise"),
        ],
    )
    def test_rows(self, flags: str, routine: str) -> None:
        f = [flag == "1" for flag in flags]
        assert dispatch_w8a8_scaled_mm(*f[:4], rocm=f[4], rowwise=f[5]) == f"{routine}_w8a8_scaled_mm"

    def test_table_and_twin(self) -> None:
        rows = torch.tensor(list(itertools.product([0, 1], repeat=6)))
        inputs = {name: rows[:, i] for i, name in enumerate(self.FLAGS)}
        contract = get("dispatch_w8a8_scaled_mm")
        right = contract.reference(inputs)
        assert isinstance(right, Tensor) and right.bincount().tolist() == [32, 4, 4, 2, 22]
        assert all(ROUTINES[i] in get(ROUTINES[i]).name for i in right.tolist())
        assert contract.judge(inputs, right, arch="cpu", numerics=None).status is Status.PASSED
        for row in range(64):
            wrong = right.clone()
            wrong[row] = (wrong[row] + 1) % 5
            verdict = contract.judge(inputs, wrong, arch="cpu", numerics=None)
            assert verdict.status is Status.FAILED and str(row) in verdict.pattern


class TestRoutines:
    """The two routines that only the dispatch table names."""

    @pytest.mark.parametrize("name", ["cutlass_w8a8_scaled_mm", "rocm_per_tensor_w8a8_scaled_mm"])
    def test_scaled_products(self, name: str) -> None:
        inputs, _ = make("static")
        q = inputs["input"].float().mul(30).to(E4M3)
        call = {"qinput": q, "weight": inputs["weight"]}
        call |= {"scale_a": torch.tensor([0.5]), "scale_b": torch.tensor([0.25])}
        y = (q.float() @ inputs["weight"].float()) * 0.125
        judged = [get(name).judge(call, out.bfloat16(), arch="cpu", numerics=None) for out in (y, y * 0.5)]
        assert [v.status for v in judged] == [Status.PASSED, Status.FAILED]

    def test_fnuz_codes(self) -> None:
        bits = (torch.arange(64 * 48) % 127).to(torch.uint8)
        q = bits.reshape(48, 64).view(torch.float8_e4m3fnuz)
        weight = bits.flip(0).reshape(64, 48).view(torch.float8_e4m3fnuz)
        call = {"qinput": q, "weight": weight, "scale_a": torch.ones(1), "scale_b": torch.ones(1)}
        out = get("rocm_per_tensor_w8a8_scaled_mm").reference(call)
        assert isinstance(out, Tensor) and torch.equal(out, decode(q) @ decode(weight))


class TestCalcDiff:
    """1 - 2 <x, y> / (<x, x> + <y, y>), exactly, then as float64 sums."""

    @given(st.integers(0, 10**6))
    def test_against_rationals(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(40, generator=g), torch.randn(40, generator=g)
        a, b = ([Fraction(v) for v in t.tolist()] for t in (x, y))
        own = sum((v * v for v in (*a, *b)), Fraction(0))
        right = 1 - 2 * sum((u * v for u, v in zip(a, b, strict=True)), Fraction(0)) / own
        assert abs(Fraction(calc_diff(x, y)) - right) <= Fraction(1, 2**51)

    def test_zeros_nan_and_shapes(self) -> None:
        zero = torch.zeros(3)
        assert calc_diff(zero, zero) == 0.0 and calc_diff(zero, torch.ones(3)) == 1.0
        assert math.isnan(calc_diff(zero, torch.tensor([0.0, math.nan, 0.0])))
        with pytest.raises(ShapeError, match="equal shapes"):
            calc_diff(zero, torch.zeros(4))

    def test_contract_and_twins(self) -> None:
        g = torch.Generator().manual_seed(0)
        x = torch.randn(1000, generator=g)
        inputs = {"x": x, "y": (x * (1 + 1e-3 * torch.randn(1000, generator=g))).bfloat16()}
        a, b = inputs["x"].double(), inputs["y"].double()
        right = 1 - 2 * (a * b).sum() / (a * a + b * b).sum()
        f, h = inputs["x"], inputs["y"].float()
        wrong = [1 - 2 * (f * h).sum() / (f * f + h * h).sum(), 1 - (a * b).sum() / (a * a + b * b).sum()]
        statuses = [
            get("calc_diff").judge(inputs, out.double(), arch="cpu", numerics=None).status for out in (right, *wrong)
        ]
        assert statuses == [Status.PASSED, Status.FAILED, Status.FAILED]
