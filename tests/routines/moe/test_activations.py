"""Activations as rows: a second derivation, right kernels of every form, wrong ones, and the bounds of every curve."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle.bounds.activation import curve_span
from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines import Call, cases, get
from oracle.routines.moe.activations import CONTRACTS
from oracle.truth.activation import Curve, Formula
from oracle.truth.routing import Span
from oracle.verdict.compare import Status
from tests.support.slow_oracle.activations import ROWS, activation
from tests.support.slow_oracle.numbers import Array, same
from tests.support.slow_oracle.routines import derive

RAW = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
SIZES = {torch.uint8: 1 << 8, torch.int16: 1 << 16, torch.int32: 1 << 32}
NAMES = sorted(CONTRACTS)


def array(x: Tensor) -> Array:
    """A tensor as the second derivation reads it."""
    name = str(x.dtype).removeprefix("torch.")
    if not x.is_floating_point():
        return Array(name, tuple(x.shape), [int(v) for v in x.flatten().tolist()])
    raw = RAW[x.dtype]
    return Array(name, tuple(x.shape), [int(v) % SIZES[raw] for v in x.contiguous().view(raw).flatten().tolist()])


def silu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x / (1 + torch.exp(-x * alpha))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    return gate, up


def clamped(x: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    gate, up = halves(x)
    gate = gate.clamp(max=limit).to(x.dtype).float()
    return silu(gate, alpha).to(x.dtype).float() * (up.clamp(-limit, limit) + beta)


def pairs(x: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = x.float()[..., ::2].clamp(max=limit), x.float()[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate / (1 + torch.exp(-gate * alpha))


def stepped(x: Tensor, limit: float) -> Tensor:
    gate, up = halves(x)
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def smooth(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = halves(x)
    up = linear_beta * torch.tanh(up / linear_beta) if linear_beta > 0 else up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def limited(x: Tensor, swiglu_limit: float) -> Tensor:
    gate, up = halves(x)
    if swiglu_limit:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return silu(gate) * up


def twice(function: Callable[[Tensor], Tensor], order: int = 1) -> Callable[..., Tensor]:
    return lambda x: function(halves(x)[::order][0]).to(x.dtype).float() * halves(x)[::order][1]


def tanh_form(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


KERNELS: dict[str, Callable[..., Tensor]] = {
    "silu_and_mul_with_clamp": clamped,
    "swigluoai_and_mul": pairs,
    "swiglu_limit_func": limited,
    "swiglustep_and_mul": stepped,
    "situ_and_mul": smooth,
    "mul_and_silu": twice(silu, -1),
    "gelu_and_mul": twice(torch.nn.functional.gelu),
    "gelu_tanh_and_mul": twice(tanh_form),
    "silu_no_mul": lambda x: silu(x.float()),
    "gelu_no_mul": lambda x: torch.nn.functional.gelu(x.float()),
    "gelu_tanh_no_mul": lambda x: tanh_form(x.float()),
    "relu2_no_mul": lambda x: x.float().clamp(min=0).square(),
}
"""Kernels of their own, in float32; the result is rounded to the dtype of ``x``."""


def computed(case: cases.Case) -> tuple[dict[str, Tensor], dict[str, object], Tensor]:
    """The inputs of a case, every option, and what the kernel gives."""
    inputs, contract = case.inputs(), CONTRACTS[case.contract]
    options = {spec.name: spec.default for spec in contract.options} | case.call_options()
    return inputs, options, KERNELS[case.contract](inputs["x"], **options).to(inputs["x"].dtype)


def drawn(name: str, families: tuple[str, ...], m: int = 2, i: int = 5) -> list[cases.Case]:
    grammar = CONTRACTS[name].row.options
    words = {"limit": "7.03", "alpha": "1.702", "beta": "-0.3", "linear": "1.5"}
    options = ",".join(f"{option}={words[of]}" for option, (of, _) in grammar.items())
    parts = [f"{options}/" if options else "", ""]
    return [
        cases.parse(f"{name}/{dtype}/-/m={m},i={i}/{option}family={family}/seed=3")
        for dtype in ("bf16", "f16", "f32")
        for option in parts[: 2 if options else 1]
        for family in families
    ]


class TestSecondDerivation:
    """Fractions, with no code of the first."""

    @pytest.mark.parametrize("name", NAMES)
    def test_equal_bits(self, name: str) -> None:
        assert set(ROWS) == set(CONTRACTS) == set(KERNELS)
        for case in drawn(name, ("randn", "heavy", "special")):
            inputs, options = case.inputs(), case.call_options()
            due = array(get(name).reference(inputs, **options))  # type: ignore[arg-type]
            found = activation(name, {key: array(x) for key, x in inputs.items()}, options)
            wrong = [
                i
                for i, (f, w) in enumerate(zip(found, due.codes, strict=True))
                if f is not None and not same(f, w, due.dtype)
            ]
            assert not wrong and sum(f is not None for f in found) > len(found) // 3, (str(case), wrong)
            if case.family != "randn":
                continue
            changed = array(get(name).reference({**inputs, "x": inputs["x"].roll(1, dims=-1)}, **options))  # type: ignore[arg-type]
            assert any(f is not None and not same(f, w, due.dtype) for f, w in zip(found, changed.codes, strict=True))


def test_with_a_quantiser_behind_it() -> None:
    """SGLang's masked quantiser with gemm1_alpha: scales and codes of fractions, and those of another alpha."""
    for word in ("1.702", "free"):
        case = cases.parse(
            f"silu_and_mul_masked_post_quant/bf16-e4m3/1x128/e=1,t=2,i=128/alpha={word}/family=randn/seed=3"
        )
        inputs, options = case.inputs(), case.call_options()
        due = get(case.contract).reference(inputs, **options)
        assert isinstance(due, dict)
        found = derive(case.contract, {name: array(x) for name, x in inputs.items()}, options)
        other = derive(case.contract, {name: array(x) for name, x in inputs.items()}, options | {"gemm1_alpha": 1.0})
        for name, codes in found.items():
            stored = array(due[name])
            equal = [f is None or same(f, w, stored.dtype) for f, w in zip(codes, stored.codes, strict=True)]
            assert all(equal) and codes != other[name], (word, name)


class TestKernels:
    """Right kernels of another form pass; the same with one step wrong fail."""

    @pytest.mark.parametrize("name", NAMES)
    def test_right(self, name: str) -> None:
        for case in drawn(name, ("randn", "heavy"), m=7, i=64):
            inputs, options, out = computed(case)
            verdict = get(name).judge(inputs, out, arch="cpu", **options)
            assert not verdict.status.is_failure, (str(case), verdict.summary)

    @pytest.mark.parametrize("name", NAMES)
    def test_wrong(self, name: str) -> None:
        for case in drawn(name, ("randn",), m=7, i=64):
            inputs, options, out = computed(case)
            for wrong in (out * 1.02, out.roll(1, dims=-1), torch.zeros_like(out)):
                assert get(name).judge(inputs, wrong, arch="cpu", **options).status is Status.FAILED, str(case)

    def test_a_clamp_may_be_rounded_or_not(self) -> None:
        """vLLM's scalar path rounds the clamped up to the dtype, its vectors do not."""
        x = torch.full((1, 16), 9.0, dtype=torch.bfloat16)
        left = decode((silu(torch.tensor(7.03).bfloat16().float())).bfloat16())
        for up in (7.03, float(torch.tensor(7.03).bfloat16())):
            out = (left * up).to(torch.bfloat16).expand(1, 8).contiguous()
            assert not get("silu_and_mul_with_clamp").judge({"x": x}, out, arch="cpu", limit=7.03).status.is_failure
        assert get("silu_and_mul_with_clamp").judge({"x": x}, out * 1.01, arch="cpu", limit=7.03).status.is_failure

    def test_a_product_with_a_limit_is_rounded_twice(self) -> None:
        """150/2^14 times 7.03 lies halfway between two float16 values once it is rounded to float32."""
        case = cases.parse(
            "silu_and_mul_with_clamp/f16/-/m=17,i=127/limit=7.03,alpha=1.702/x:pitch/family=randn/seed=1"
        )
        inputs, options = case.inputs(), case.call_options()
        gate, up = inputs["x"].float().chunk(2, dim=-1)
        gate = gate.clamp(max=7.03).half().float()
        y = (gate / (1 + torch.exp(-1.702 * gate))).half()
        out = (y.float() * up.clamp(-7.03, 7.03)).half()
        assert float(y[0, 97]) == -150 / 2**14 and float(up[0, 97]) < -7.03
        judged = get("silu_and_mul_with_clamp").judge(inputs, out, arch="cpu", **options)
        assert judged.status is Status.PASSED
        ends = get("silu_and_mul_with_clamp").judge(inputs, out * 1.002, arch="cpu", **options)
        assert ends.status is Status.FAILED

    def test_rows_of_no_expert_here_are_free(self) -> None:
        contract, x = get("swiglu_limit_func"), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
        inputs = {"x": x, "topk_ids": torch.tensor([0, -1, 1]), "expert_map": torch.tensor([0, -1])}
        out = limited(x, 0.0)
        for row, failed in ((0, True), (1, False), (2, False)):
            spoiled = out.clone()
            spoiled[row] = math.nan
            assert contract.judge(inputs, spoiled, arch="cpu").status.is_failure is failed
        with pytest.raises(InputError, match="topk_ids"):
            contract.judge(inputs | {"topk_ids": torch.tensor([0, 2, 1])}, out, arch="cpu")


class TestBounds:
    """Every float32 value of a curve lies in the interval of the curve, over points and over ranges."""

    FORMS = (
        (Formula(alpha=1.702), lambda x: silu(x, 1.702)),
        (Formula(alpha=0.25), lambda x: x * torch.sigmoid(x * 0.25)),
        (Formula(curve=Curve.GELU), torch.nn.functional.gelu),
        (Formula(curve=Curve.GELU), lambda x: x * 0.5 * (1 + torch.erf(x * 0.70710678))),
        (Formula(curve=Curve.GELU_TANH), tanh_form),
        (Formula(curve=Curve.SITU, alpha=4.0), lambda x: 4 * torch.tanh(x / 4) * (1 + torch.tanh(x / 2)) / 2),
        (Formula(curve=Curve.RELU2), lambda x: x.relu().square()),
    )

    @pytest.mark.parametrize(("formula", "kernel"), FORMS)
    def test_points_and_ranges(self, formula: Formula, kernel: Callable[[Tensor], Tensor]) -> None:
        x = torch.cat([torch.linspace(-30, 30, 20001), torch.tensor([-1e30, -200.0, -0.0, 1e-40, 200.0, 1e18])]).sort()[
            0
        ]
        y, points = decode(kernel(x)), curve_span(Span(decode(x), decode(x)), formula)
        square = formula.curve is Curve.RELU2
        rounding = square * 2.0**-24 * y
        assert bool(((points.low - rounding <= y) & (y <= points.high + rounding)).all())
        ends = decode(x[::50]), decode(x[49::50])
        span = curve_span(Span(ends[0][: len(ends[1])], ends[1]), formula)
        inside = y[: 50 * len(ends[1])].reshape(-1, 50)
        assert bool((span.low[:, None] * (1 - square * 2.0**-24) <= inside).all())
        narrow = (points.high - points.low) <= 2.0**-18 * (1 + decode(x).abs())
        assert bool(narrow.all())
        assert not bool(((points.low <= y * 1.001) & (y * 1.001 <= points.high))[(y.abs() > 1e-2)].any())


class TestCalls:
    """Bad calls are named."""

    def test_named(self) -> None:
        x = torch.ones(2, 6)
        for name, options, match in (
            ("silu_and_mul_with_clamp", {"limit": 0}, "positive"),
            ("silu_and_mul_with_clamp", {"beta": math.inf}, "finite"),
            ("swigluoai_and_mul", {"alpha": 0.0}, "0.00097"),
            ("situ_and_mul", {"linear_beta": 1e9}, "1024"),
            ("situ_and_mul", {"beta": True}, "finite"),
        ):
            with pytest.raises(OptionError, match=match):
                get(name).judge({"x": x}, x, arch="cpu", **options)
        with pytest.raises(ShapeError, match="gate and up"):
            get("gelu_and_mul").judge({"x": x[:, :5].contiguous()}, x, arch="cpu")
        call = Call(get("gelu_no_mul"), {"x": torch.ones(2, 3)})
        assert get("gelu_no_mul").outputs(call)["out"].shape == (2, 3)
