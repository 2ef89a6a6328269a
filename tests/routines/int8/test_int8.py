"""Int8 quantisers and the product with a zero point: a second derivation, right kernels, wrong ones, bad calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle.errors import InputError, OptionError, ShapeError
from oracle.routines import cases, get
from oracle.routines.base import Call
from oracle.routines.catalogue import faults_of, run
from oracle.routines.options import word
from oracle.verdict.compare import Status
from tests.routines.moe.test_activations import array
from tests.support.slow_oracle.numbers import same
from tests.support.slow_oracle.routines import derive

IDS = (
    *(f"scaled_int8_quant/{d}/-/m=3,k=17/{o}family={f}/seed=3"
      for d in ("bf16", "f32") for o in ("", "mode=static/", "mode=azp/", "mode=row/")
      for f in ("randn", "ties", "special")),
    *(f"per_token_quant_int8/bf16/-/m=3,k=16/family={f}/seed=3" for f in ("randn", "ties", "nan")),
    *(f"per_token_group_quant_int8/bf16/-/m=2,k=128/group=64/family={f}/seed=3" for f in ("randn", "ties", "nan")),
    *(f"cutlass_scaled_mm_azp/i8xi8-{d}/{s}/m=3,n=4,k={k}/{o}family={f}/seed=3"
      for d, s, k, o, f in (("bf16", "token:channel", 8, "azp=token,bias=1/", "randn"),
                            ("f16", "tensor:tensor", 8, "", "randn"),
                            ("bf16", "token:channel", 2048, "azp=token/", "large"))),
)  # fmt: skip  # a table, one row a line


class TestSecondDerivation:
    """Fractions and integers, with no code of the first."""

    @pytest.mark.parametrize("case", IDS)
    def test_equal_bits(self, case: str) -> None:
        parsed = cases.parse(case)
        inputs, options = parsed.inputs(), parsed.call_options()
        due = get(parsed.contract).reference(inputs, **options)
        outputs = {"out": due} if isinstance(due, Tensor) else due
        words = {name: word(value) for name, value in options.items()}
        derived = derive(parsed.contract, {name: array(x) for name, x in inputs.items()}, words)
        assert set(derived) == set(outputs)
        for name, codes in derived.items():
            stored = array(outputs[name])
            pairs = [(f, w) for f, w in zip(codes, stored.codes, strict=True) if f is not None]
            assert all(f == w if stored.dtype.startswith("int") else same(f, w, stored.dtype) for f, w in pairs), name
            assert "family=randn" not in case or len(pairs) > len(codes) * 0.9


def kernel(x: Tensor, rule: Callable[[Tensor], Tensor], floor: float) -> dict[str, Tensor]:
    """A kernel of its own: one scale for each row, by a product with 127 / amax."""
    amax = x.float().abs().amax(dim=1, keepdim=True).clamp(min=floor)
    return {"q": rule(x.float() * (127 / amax)).clamp(-128, 127).to(torch.int8), "scale": amax / 127}


def away(x: Tensor) -> Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


class TestRules:
    """Three quantisers, three rules: each passes by its own and fails by the others."""

    RULES = {"scaled_int8_quant": torch.round, "per_token_quant_int8": away, "per_token_group_quant_int8": torch.trunc}

    @pytest.mark.parametrize("name", sorted(RULES))
    def test_own_and_others(self, name: str) -> None:
        x = torch.arange(-254, 256, 2).reshape(1, -1).float()[:, :128] / 2 + 0.5
        x = torch.cat([x, x.flip(1)])
        x[:, 0] = 127.0  # the scale is 1
        options = {"group_size": 128} if "group" in name else {}
        for other, rule in self.RULES.items():
            verdict = get(name).judge({"x": x}, kernel(x, rule, 1e-10), arch="cpu", **options)
            assert verdict.status.is_failure is (other != name), (name, other, verdict.summary)

    def test_nan_and_infinity(self) -> None:
        x = torch.tensor([[1.0, float("nan"), -2.0, 0.5], [float("inf"), 1.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        contract = get("scaled_int8_quant")
        due = contract.reference({"x": x})
        assert isinstance(due, dict)
        assert due["q"].tolist() == [[64, 0, -127, 32], [0, 0, 0, 0], [0, 0, 0, 0]]
        assert due["scale"].flatten().tolist()[1:] == [float("inf"), 0.0]
        wrong = due | {"q": due["q"].clone().index_fill(1, torch.tensor([1]), 1)}
        assert contract.judge({"x": x}, due, arch="cpu").status is not Status.FAILED
        assert contract.judge({"x": x}, wrong, arch="cpu").status is Status.FAILED

    def test_zero_points(self) -> None:
        x = torch.tensor([[0.0, 1.0, 2.55, 0.5], [3.0, 3.0, 3.0, 3.0]])
        contract, options = get("scaled_int8_quant"), {"symmetric": False}
        due = contract.reference({"x": x}, **options)
        assert (
            isinstance(due, dict)
            and due["azp"].flatten().tolist()[0] == -128
            and due["q"][0].tolist() == [-128, -28, 127, -78]
        )
        for name, change in (("azp", due["azp"] + 1), ("scale", due["scale"] * 1.01), ("q", due["q"] + 1)):
            wrong = {**due, name: change.to(due[name].dtype)}
            assert contract.judge({"x": x}, wrong, arch="cpu", **options).status is Status.FAILED, name
        free = {**due, "scale": due["scale"].clone().index_fill(0, torch.tensor([1]), 7.0)}
        assert contract.judge({"x": x}, free, arch="cpu", **options).status is not Status.FAILED


class TestFaults:
    """A fault of an output acts on calls that return it: a given scale is none."""

    @pytest.mark.parametrize("case", [case for case in IDS if case.startswith("scaled_int8_quant")])
    def test_each_that_applies_runs(self, case: str) -> None:
        parsed = cases.parse(case)
        call = Call(get(parsed.contract), parsed.inputs(), parsed.call_options())
        names = set()
        for fault in (fault for fault in faults_of(parsed.contract) if fault.applies(call) is None):
            assert set(run(call, fault)) == set(run(call))
            names.add(fault.name)
        assert ("int8: scale of the previous row" in names) == ("scale" not in call.inputs)


class TestProduct:
    """Exact integers; the zero point is taken out before anything is rounded."""

    def test_above_2_24(self) -> None:
        case = cases.parse(
            "cutlass_scaled_mm_azp/i8xi8-bf16/token:channel/m=3,n=16,k=2048/azp=token/family=large/seed=1"
        )
        inputs, options = case.inputs(), case.call_options()
        total = inputs["a"].long() @ inputs["b"].long() - inputs["azp"].long()[:, None] * inputs["azp_adj"].long()
        out = (total.float() * inputs["scale_b"] * inputs["scale_a"]).bfloat16()
        contract = get(case.contract)
        assert not contract.judge(inputs, out, arch="cpu", **options).status.is_failure
        for wrong in (out * 1.01, out.roll(1, dims=1), out.roll(1, dims=0)):
            assert contract.judge(inputs, wrong, arch="cpu", **options).status is Status.FAILED


class TestCalls:
    """Bad calls are named."""

    def test_named(self) -> None:
        x, one = torch.ones(2, 64), torch.ones(1)
        azp = torch.zeros(1, dtype=torch.int32)
        for name, inputs, options, error, match in (
            ("scaled_int8_quant", {"x": x, "azp": azp}, {"symmetric": False}, OptionError, "azp"),
            ("scaled_int8_quant", {"x": x, "scale": one}, {"symmetric": False}, OptionError, "azp"),
            ("scaled_int8_quant", {"x": x, "scale": -one}, {}, InputError, "positive"),
            (
                "scaled_int8_quant",
                {"x": x, "scale": one, "azp": azp + (1 << 21)},
                {"symmetric": False},
                InputError,
                "2\\^20",
            ),
            ("per_token_group_quant_int8", {"x": x}, {"group_size": 48}, ShapeError, "48"),
        ):
            with pytest.raises(error, match=match):
                get(name).reference(inputs, **options)
        inputs = cases.parse(
            "cutlass_scaled_mm_azp/i8xi8-bf16/tensor:tensor/m=2,n=3,k=8/bias=1/family=randn/seed=1"
        ).inputs()
        with pytest.raises(OptionError, match="bias"):
            get("cutlass_scaled_mm_azp").reference(inputs, out_dtype=torch.float16)
