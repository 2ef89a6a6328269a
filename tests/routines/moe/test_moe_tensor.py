"""TensorRT-LLM's per-tensor layer: verdicts that hold for every right kernel, and for no wrong routing or scale."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.diagnosis.explain import diagnose
from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines import cases, get
from oracle.routines.catalogue import Call, faults_of, run
from oracle.routines.moe.contract import choices
from oracle.tensorcore.predict import predict_product
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.compare import Status, Verdict
from tests.support.judging import judged

NAME = "apply_fi_trtllm_fp8_per_tensor_moe"
E4M3 = torch.float8_e4m3fn
Inputs = dict[str, Tensor]


def make(text: str = "t=17,g=6,e=3,h=64,i=40/", family: str = "randn", seed: int = 1) -> Inputs:
    return cases.parse(f"{NAME}/bf16xe4m3-bf16/tensor:tensor/{text}family={family}/seed={seed}").inputs()


@cache
def second_rank() -> Inputs:
    """Of which no test writes to a tensor."""
    return make("t=17,g=6,e=3,h=64,i=40/rank=1/")


def judge(inputs: Inputs, out: Tensor, *, arch: str = "cpu", **options: object) -> Verdict:
    return judged(NAME, inputs, out, arch=arch, **options)


def codes(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def kernel(
    inputs: Inputs,
    *,
    variant: int = 0,
    arch: str = "cpu",
    kept: torch.dtype = torch.float32,
    rank: int = 0,
    last: bool = False,
) -> Tensor:
    """A kernel of its own, in float32 torch: the variant picks among right orders of the scales and right exponentials.

    ``last`` takes the last of equal logits.
    """
    x, logits = inputs["hidden_states"].float(), inputs["router_logits"].float()
    s1, s2 = inputs["w13_input_scale"], inputs["w2_input_scale"]
    own = logits.flip(1).max(dim=1) if last else logits.max(dim=1)
    expert = logits.shape[1] - 1 - own.indices if last else own.indices
    weight = own.values.sigmoid().to(kept).float()
    q = codes(x * (1 / s1) if variant == 1 else x / s1)
    out = torch.zeros(x.shape)
    local = inputs["w13"].shape[0]
    for e in range(local):
        rows = torch.nonzero(expert == e + rank * local)[:, 0]
        if not rows.numel():
            continue
        g1 = inputs["w13_scale"][e] * s1
        acc, w = product(q.view(torch.uint8)[rows].view(E4M3), inputs["w13"][e], arch), weight[rows, None]
        gate, up = acc.chunk(2, dim=1)
        if variant == 2:  # weight and scale first, one product
            gate, up = gate * (w * g1), up * (w * (g1 / s2))
            silu = gate / (1 + torch.exp(-gate) * (1 + 2.0**-22))
        elif variant == 1:  # scaled back to values, divided at the quantiser
            gate, up = gate * g1 * w, up * g1 * w / s2
            silu = gate * torch.sigmoid(gate)
        else:
            gate, up = gate * w * g1, up * w * (g1 / s2)
            silu = torch.nn.functional.silu(gate)
        y = product(codes(silu * up), inputs["w2"][e], arch)
        out[rows] = y * (inputs["w2_scale"][e] * s2)
    return out.bfloat16()


def product(a: Tensor, b: Tensor, arch: str) -> Tensor:
    """The accumulator of ``a @ b.T``: float32 in some order, or the bits of a chain."""
    if arch == "cpu":
        return a.float() @ b.float().T
    one = torch.ones(1, 1)
    made = ScaledProduct(a, b, one, one, block=a.shape[1], b_rows=b.shape[0])
    return predict_product(made, f"{arch}.chain", out_dtype=torch.float32)


class TestRightKernels:
    """Every legal order of scales, every rounding of the weight and every accumulator passes."""

    @pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
    @pytest.mark.parametrize("variant", [0, 1, 2])
    @pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
    def test_pass(self, variant: int, arch: str, kept: torch.dtype) -> None:
        inputs = make(seed=variant + 2)
        out = kernel(inputs, variant=variant, arch=arch, kept=kept)
        for options in ({}, {"weight_dtype": kept}):
            verdict = judge(inputs, out, arch=arch, **options)
            assert verdict.status is Status.PASSED and verdict.unconstrained == 0, verdict.summary

    @settings(max_examples=30)
    @given(seed=st.integers(0, 10**6), variant=st.integers(0, 2), family=st.sampled_from(["randn", "codes", "outlier"]))
    def test_never_a_false_alarm(self, seed: int, variant: int, family: str) -> None:
        inputs = make("t=9,g=4,e=2,h=32,i=16/rank=1,logits=bf16/", family, seed)
        verdict = judge(inputs, kernel(inputs, variant=variant, rank=1), ep_rank=1)
        assert not verdict.status.is_failure, verdict.summary

    @pytest.mark.parametrize("family", ["randn", "codes", "outlier", "amax", "ties", "special", "nan"])
    def test_the_reference_passes(self, family: str) -> None:
        inputs = make(family=family)
        out = get(NAME).reference(inputs)
        assert isinstance(out, Tensor) and out.dtype == torch.bfloat16
        for arch in ("cpu", "sm90", "sm100"):
            assert not judge(inputs, out, arch=arch).status.is_failure

    def test_the_interval_is_narrow(self) -> None:
        """One ulp of bfloat16 away is outside for nearly every element, and two for all of them."""
        inputs = make()
        out = get(NAME).reference(inputs)
        assert isinstance(out, Tensor)
        call = Call(get(NAME), inputs, {"weight_dtype": torch.float32}, arch="sm100")
        ranges = get(NAME).admissible(call, None)[0].ranges({"out": out})
        assert ranges is not None
        busy = out != 0
        assert float((ranges["out"].high > ranges["out"].low)[busy].double().mean()) < 0.02
        beyond = (out.view(torch.int16) + 1).view(torch.bfloat16)
        assert judge(inputs, torch.where(busy, beyond, out), arch="sm100").outside > 0.98 * int(busy.sum())


class TestRouting:
    """One expert for each token; of equal logits either; a rank without it writes zeros."""

    def test_either_of_equal_logits(self) -> None:
        inputs = make("t=33,g=9,e=9,h=64,i=32/logits=ties/")
        first, last = kernel(inputs), kernel(inputs, last=True)
        assert not torch.equal(first, last) and len(choices(inputs["router_logits"])) > 2
        mixed = torch.where(torch.arange(33)[:, None] % 2 == 0, first, last)
        for out in (first, last, mixed):
            assert judge(inputs, out).status is Status.PASSED

    def test_an_expert_that_is_not_in_front_is_refused(self) -> None:
        inputs = make("t=33,g=9,e=9,h=64,i=32/logits=ties/")
        out = kernel({**inputs, "router_logits": -inputs["router_logits"]})
        assert judge(inputs, out).status is Status.FAILED

    def test_rank(self) -> None:
        inputs = make("t=17,g=6,e=3,h=64,i=40/rank=1/")
        out = kernel(inputs, rank=1)
        assert judge(inputs, out, ep_rank=1).status is Status.PASSED
        assert judge(inputs, out, ep_rank=0).status is Status.FAILED
        elsewhere = inputs["router_logits"].argmax(dim=1) < 3
        assert bool(elsewhere.any()) and not bool(out[elsewhere].any())
        stale = out.clone()
        stale[torch.nonzero(elsewhere)[0, 0]] = 1.0
        assert judge(inputs, stale, ep_rank=1).outside == out.shape[1]

    def test_one_dtype_of_the_weight_explains_all_of_an_output(self) -> None:
        """A kernel rounds its weights or does not; rows of both kinds in one output are of no kernel."""
        inputs = make("t=17,g=3,e=3,h=64,i=40/")
        single, half = (kernel(inputs, kept=kept) for kept in (torch.float32, torch.bfloat16))
        rows = torch.arange(17)[:, None] % 2 == 0
        assert judge(inputs, half, weight_dtype=torch.float32).status is Status.FAILED
        assert judge(inputs, single, weight_dtype=torch.bfloat16).status is Status.FAILED
        assert judge(inputs, torch.where(rows, single, half)).status is Status.FAILED
        assert judge(inputs, half).basis.endswith("bfloat16")

    def test_far_logits(self) -> None:
        """Weights of 1, of 2^-60 and of 0."""
        inputs = make("t=17,g=3,e=3,h=64,i=32/logits=far/")
        inputs["router_logits"][0], inputs["router_logits"][1] = -1e4, torch.tensor([-1e4, 90.0, 3.0])
        out = kernel(inputs)
        assert not bool(out[0].any()) and bool(out[1].any())
        assert not judge(inputs, out).status.is_failure
        assert judge(inputs, torch.where(out == 0, torch.full_like(out, 2.0**-20), out)).status is Status.FAILED

    def test_nothing_is_claimed_of_a_nan(self) -> None:
        """A NaN logit opens its own token, a NaN weight code the tokens of its expert, a NaN input its own row."""
        inputs = make("t=17,g=3,e=3,h=64,i=32/")
        out = kernel(inputs)
        inputs["router_logits"][4, 1] = torch.nan
        inputs["hidden_states"][5, 9] = torch.nan
        out[4:6] = 7.0
        verdict = judge(inputs, out)
        assert verdict.status is Status.PASSED and verdict.unconstrained == 2 * 64
        inputs["w2"].view(torch.uint8)[2, 3, 4] = 0x7F
        of_expert = int((inputs["router_logits"].argmax(dim=1) == 2)[6:].sum()) + 2
        verdict = judge(inputs, out)
        assert not verdict.status.is_failure and verdict.unconstrained >= of_expert * 64


@pytest.mark.turns(4)
class TestFaults:
    """Everything of the catalogue fails, wherever it can be put."""

    @pytest.mark.parametrize("fault", faults_of(NAME), ids=lambda f: f.name)
    @pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
    def test_fails(self, fault: object, arch: str) -> None:
        inputs = second_rank()
        call = Call(get(NAME), inputs, {"ep_rank": 1})
        assert fault.applies(call) is None  # type: ignore[attr-defined]
        wrong = run(call, fault)  # type: ignore[arg-type]
        assert isinstance(wrong, Tensor)
        assert judge(inputs, wrong, arch=arch, ep_rank=1).status is Status.FAILED
        assert judge(inputs, get(NAME).reference(inputs, ep_rank=1), arch=arch, ep_rank=1).status is Status.PASSED

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("fault", faults_of(NAME), ids=lambda f: f.name)
    def test_is_named(self, fault: object) -> None:
        """The output alone says which one it was."""
        inputs = make("t=17,g=6,e=3,h=64,i=40/rank=1/")
        wrong = run(Call(get(NAME), inputs, {"ep_rank": 1}), fault)  # type: ignore[arg-type]
        assert diagnose(NAME, inputs, wrong, ep_rank=1).names == (fault.name,)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("scale", ["w13_input_scale", "w2_input_scale"])
    def test_a_static_scale_of_the_other_input(self, scale: str) -> None:
        inputs = make()
        other = {"w13_input_scale": "w2_input_scale", "w2_input_scale": "w13_input_scale"}[scale]
        assert judge(inputs, kernel({**inputs, scale: inputs[other]})).status is Status.FAILED

    def test_a_weight_off_by_one_percent(self) -> None:
        inputs = make()
        logits = inputs["router_logits"] + 0.04
        assert judge(inputs, kernel({**inputs, "router_logits": logits})).status is Status.FAILED


class TestCalls:
    """Bad calls are named."""

    def test_named(self) -> None:
        inputs = make()
        out = kernel(inputs)
        with pytest.raises(OptionError, match="ep_rank=2"):
            judge(inputs, out, ep_rank=2)
        with pytest.raises(ShapeError, match="static"):
            judge({**inputs, "w2_input_scale": torch.ones(3)}, out)
        for value in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InputError, match="positive"):
                judge({**inputs, "w13_input_scale": torch.tensor([value])}, out)
        with pytest.raises(ShapeError, match="w13"):
            judge({**inputs, "w13": inputs["w13"][:, :-2].contiguous()}, out)
        with pytest.raises(NumericsError, match="gfx942"):
            judge(inputs, out, arch="gfx942")
        with pytest.raises(OptionError, match="weight_dtype"):
            judge(inputs, out, weight_dtype=torch.float16)

    def test_equal_scales_prove_little(self) -> None:
        inputs = make()
        equal = {**inputs, "w2_scale": torch.full_like(inputs["w2_scale"], 0.01)}
        assert "w2_scale" in str(judge(equal, kernel(equal)).reason)

    def test_a_rank_without_tokens(self) -> None:
        inputs = make()
        inputs["router_logits"][:, :3] = -9.0
        out = torch.zeros(decode(inputs["hidden_states"]).shape, dtype=torch.bfloat16)
        assert "no token" in str(judge(inputs, out).reason)
