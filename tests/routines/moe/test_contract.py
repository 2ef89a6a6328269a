"""Mixture-of-experts layers: routing, boxes of codes, and verdicts that stay sound when a code flips."""

from __future__ import annotations

import math
from decimal import Context, Decimal
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.bounds.accumulator import of_schedule
from oracle.bounds.activation import curve_span
from oracle.bounds.boxed import Box, boxed_product, chain, chain_rank1
from oracle.bounds.chain import operand, residue
from oracle.bounds.code_boxes import code_boxes
from oracle.errors import InputError, NumericsError, OptionError, ShapeError
from oracle.numbers import recipes
from oracle.numbers.formats import BF16, E4M3FN, decode
from oracle.numbers.quantize import quantize
from oracle.routines import cases, profiles
from oracle.routines.base import get
from oracle.routines.moe import contract as contracts
from oracle.routines.moe.contract import QUANTISERS, WAYS
from oracle.routines.moe.moe_ranges import act_span
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth import layout, routing
from oracle.truth.activation import SILU_ARGMIN, SILU_MIN, SWIGLU
from oracle.truth.gemm import ScaledProduct
from oracle.truth.moe import Activation, Combine, Steps, activated
from oracle.truth.routing import Span
from oracle.verdict.compare import Status, Verdict
from tests.support.judging import judged

assert contracts  # imported for its registration
SM90 = of_schedule(get_schedule("sm90.promote128"))
E4M3 = torch.float8_e4m3fn
T, H, SIZE, E, K = 5, 128, 256, 3, 2
Inputs = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def e4m3(x: Tensor) -> Tensor:
    """Codes of the nearest values; clamped, for torch's cast saturates since 2.13 and gave NaN before."""
    return x.clamp(-448, 448).to(E4M3)


def point(codes: Tensor, scale: Tensor) -> Box:
    """The box of an operand that is known: codes ``[R, K]``, scale ``[R or 1, B]``."""
    value, s = decode(codes), decode(scale).expand(codes.shape[0], -1)
    return Box(value, value, s, s, E4M3FN)


def make(*, seed: int = 0, static: bool = False, blocks: bool = True, top_k: int = K) -> Inputs:
    g = generator(seed)
    x = torch.randn(T, H, generator=g).to(torch.bfloat16)
    w13, w2 = (e4m3(torch.randn(s, generator=g) * 100) for s in ((E, 2 * SIZE, H), (E, H, SIZE)))
    shape13, shape2 = ((E, 4, 1), (E, 1, 2)) if blocks else ((E,), (E,))
    inputs = {
        "w13": w13,
        "w13_scale": torch.rand(shape13, generator=g) * 1e-3 + 5e-4,
        "w2": w2,
        "w2_scale": torch.rand(shape2, generator=g) * 1e-3 + 5e-4,
        "topk_ids": torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(T)]).int(),
        "topk_weights": torch.rand(T, top_k, generator=g) + 0.1,
    }
    made = quantize(x, recipes.VLLM_GROUP) if blocks else quantize(x, recipes.VLLM_TENSOR)
    inputs |= {"a": made.codes, "a_scale": made.scale}
    return inputs | ({"a2_scale": torch.tensor([0.0021])} if static else {})


@cache
def third() -> Inputs:
    """Of which no test writes to a tensor."""
    return make(seed=3)


def judge(inputs: Inputs, out: Tensor, *, arch: str = "cpu", **options: object) -> Verdict:
    return judged("moe_fp8", inputs, out, arch=arch, **options)


def sharp_silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def kernel(
    inputs: Inputs,
    *,
    variant: int = 0,
    arch: str = "cpu",
    first: int = 0,
    limit: float | None = None,
    combine: Combine = Combine.STORED,
) -> Tensor:
    """A layer in float32 torch; the variant picks among right formulas for scale, code, exp and order."""
    out, slotted = torch.zeros(T, H), torch.zeros(inputs["topk_ids"].shape[1], T, H, dtype=torch.bfloat16)
    a_scale, ids, weights = inputs["a_scale"], inputs["topk_ids"].long() - first, inputs["topk_weights"]
    for expert in range(E):
        rows, slots = torch.nonzero(ids == expert, as_tuple=True)
        if not rows.numel():
            continue
        scale = a_scale.reshape(1, 1) if a_scale.numel() == 1 else a_scale[rows]
        a = inputs["a"].view(torch.uint8)[rows].view(E4M3)
        gate, up = product(a, scale, inputs, "w13", expert, arch).float().chunk(2, dim=1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        approximate = 1 + (2.0**-22 if variant == 2 else 0.0)
        silu = (gate / (1 + torch.exp(-gate) * approximate)).bfloat16().float()
        act = (silu * up).bfloat16().float()
        q, s = requantise(act, inputs.get("a2_scale"), variant)
        store = torch.bfloat16 if combine is Combine.STORED else torch.float32
        y = weights[rows, slots, None] * product(q, s, inputs, "w2", expert, arch, store).float()
        slotted[slots, rows] = y.bfloat16()
        out.index_add_(0, rows, y.bfloat16().float() if combine is Combine.WEIGHTED else y)
    if combine is Combine.RUNNING:
        running = torch.zeros_like(slotted[0])
        for terms in slotted:
            running += terms
        return running
    return out.bfloat16()


def requantise(act: Tensor, given: Tensor | None, variant: int) -> tuple[Tensor, Tensor]:
    if given is not None:
        v = act * (1 / given) if variant == 1 else act / given
        return e4m3(v), given.reshape(1, 1)
    groups = act.reshape(-1, 128)
    amax = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-10)
    top = torch.full_like(amax, 448.0)
    s = {0: amax / top, 1: amax * (1 / 448.0), 2: 1 / (top / amax)}[variant]
    v = {0: groups / s, 1: groups * (1 / s), 2: groups * (top / amax)}[variant]
    return e4m3(v).reshape(act.shape), s.reshape(act.shape[0], -1)


def product(
    a: Tensor, a_scale: Tensor, inputs: Inputs, which: str, expert: int, arch: str, store: torch.dtype = torch.bfloat16
) -> Tensor:
    w, scale = inputs[which][expert], inputs[f"{which}_scale"][expert]
    blocks = scale.dim() == 2
    a_scale = a_scale.expand(-1, scale.shape[1]) if blocks and a_scale.shape[1] == 1 else a_scale
    made = ScaledProduct(
        a,
        w,
        a_scale,
        scale if blocks else scale.reshape(1, 1),
        block=128 if blocks else w.shape[1],
        b_rows=128 if blocks else w.shape[0],
    )
    if arch == "sm90":
        return predict_product(made, "sm90.promote128" if blocks else "sm90.chain", out_dtype=store)
    x = torch.zeros(a.shape[0], w.shape[0])
    for b in range(made.B):
        k = slice(b * made.block, (b + 1) * made.block)
        x = x + (a[:, k].float() @ w[:, k].float().T) * made.sigma(b).float()
    return x.to(store)


class TestBoxes:
    """Boxes of one point give B2; every choice inside a box stays inside its interval."""

    def codes(self, rows: int, k: int, seed: int) -> Tensor:
        return (torch.randn(rows, k, generator=generator(seed)) * 30).to(E4M3)

    def test_a_point_is_the_residue_bound(self) -> None:
        a, b = decode(self.codes(4, 128, 1)), decode(self.codes(6, 128, 2))
        x, low, high = residue(operand(a, E4M3FN), operand(b, E4M3FN), SM90)
        down, up = chain(a, a, b, SM90, E4M3FN, E4M3FN)
        assert torch.equal(down, x + low) and torch.equal(up, x + high)

    @pytest.mark.turns(2)
    @settings(max_examples=25)
    @given(seed=st.integers(0, 10**6), share=st.sampled_from([0.01, 0.2, 1.0]), unit=st.sampled_from([1.0, 2.0**-70]))
    def test_every_choice_is_inside(self, seed: int, share: float, unit: float) -> None:
        """Also where the product of two scales is a float32 subnormal."""
        g = generator(seed)
        a, b = self.codes(3, 160, seed), self.codes(5, 160, seed + 1)
        up = torch.where(torch.rand(3, 160, generator=g) < share, decode(a) * 1.125, decode(a)).clamp(-448, 448)
        other = up.float().to(E4M3)
        low, high = torch.minimum(decode(a), decode(other)), torch.maximum(decode(a), decode(other))
        pick = torch.rand(3, 160, generator=g) < 0.5
        chosen = torch.where(pick, a.view(torch.uint8), other.view(torch.uint8)).view(E4M3)
        s = (torch.rand(3, 2, generator=g) + 0.5) * unit
        bs = (torch.rand(1, 2, generator=g) + 0.5) * unit
        box = Box(low, high, s.double() * (1 - 2.0**-20), s.double() * (1 + 2.0**-20), E4M3FN)
        found = boxed_product([box], b, bs, block=128, b_rows=5, acc=SM90)
        product = ScaledProduct(chosen, b, s, bs, block=128, b_rows=5)
        out = predict_product(product, "sm90.promote128", out_dtype=torch.float32)
        assert bool(((found.low <= out) & (out <= found.high)).all())
        sequential = boxed_product([box], b, bs, block=128, b_rows=5, acc=None)
        exact = sum(
            (chosen[:, k].float() @ b[:, k].float().T) * s[:, i : i + 1] * bs[:, i]
            for i, k in enumerate((slice(0, 128), slice(128, 160)))
        )
        assert bool(((sequential.low <= exact) & (exact <= sequential.high)).all())

    def test_rank1_is_wider(self) -> None:
        a, b = decode(self.codes(4, 128, 1)), decode(self.codes(6, 128, 2))
        tight, loose = chain(a, a, b, SM90, E4M3FN, E4M3FN), chain_rank1(a, a, b, SM90, E4M3FN, E4M3FN)
        assert bool((loose[0] <= tight[0]).all()) and bool((tight[1] <= loose[1]).all())

    def test_rows_whose_codes_may_flip_beside_others(self) -> None:
        """Each row has the interval that it has alone, which is wider where a code may flip; no rows have none."""
        low, b = decode(self.codes(5, 128, 1)), decode(self.codes(6, 128, 2))
        high = low.clone()
        high[1, 3], high[4, 100] = high[1, 3].abs() + 32, high[4, 100].abs() + 32
        down, up = chain(low, high, b, SM90, E4M3FN, E4M3FN)
        known = chain(low, low, b, SM90, E4M3FN, E4M3FN)
        for row in range(5):
            alone = chain(low[row : row + 1], high[row : row + 1], b, SM90, E4M3FN, E4M3FN)
            assert torch.equal(alone[0][0], down[row]) and torch.equal(alone[1][0], up[row])
            assert torch.equal(up[row], known[1][row]) == (row not in (1, 4))
        assert [x.shape for x in chain(low[:0], low[:0], b, SM90, E4M3FN, E4M3FN)] == [(0, 6), (0, 6)]

    def test_alternatives_are_a_hull(self) -> None:
        a, b, one = self.codes(2, 128, 1), self.codes(3, 128, 2), torch.ones(1, 1)
        first, second = point(a, torch.full((2, 1), 0.5)), point(a, torch.full((2, 1), 0.75))
        both, single = (boxed_product(x, b, one, block=128, b_rows=3, acc=SM90) for x in ([first, second], [second]))
        assert bool((both.low <= single.low).all()) and bool((both.high >= single.high).all())

    def test_a_value_beyond_the_box_is_noticed(self) -> None:
        a, b, one = self.codes(2, 128, 1), self.codes(3, 128, 2), torch.ones(1, 1)
        found = boxed_product([point(a, torch.ones(2, 1))], b, one, block=128, b_rows=3, acc=SM90)
        flipped = a.view(torch.uint8).clone()
        flipped[:, 7] ^= 4
        product = ScaledProduct(flipped.view(E4M3), b, torch.ones(1, 1), one, block=128, b_rows=3)
        out = predict_product(product, "sm90.promote128", out_dtype=torch.float32)
        assert bool(((out < found.low) | (out > found.high)).any())

    def test_other_accumulators_are_refused(self) -> None:
        a, b, one = self.codes(2, 128, 1), self.codes(3, 128, 2), torch.ones(1, 1)
        with pytest.raises(NumericsError, match="flipped"):
            acc = of_schedule(get_schedule("sm90.mma_sync.promote128"))
            boxed_product([point(a, torch.ones(2, 1))], b, one, block=128, b_rows=3, acc=acc)


class TestActivation:
    """silu over an interval, its minimum, exp against decimal arithmetic, and the codes of an interval."""

    def test_exp_is_as_accurate_as_stated(self) -> None:
        context = Context(prec=40)
        x = torch.rand(400, generator=generator(0), dtype=torch.float64) * 160 - 80
        for value, got in zip(x.tolist(), routing.sigmoid(x).tolist(), strict=True):
            e = context.exp(context.minus(Decimal(value)))
            right = context.divide(Decimal(1), context.add(1, e))
            assert abs(Decimal(got) - right) <= right * Decimal(routing.EXP_ERROR)

    def test_minimum(self) -> None:
        x = torch.linspace(SILU_ARGMIN - 1e-3, SILU_ARGMIN + 1e-3, 2001, dtype=torch.float64)
        assert abs(float(sharp_silu(x).min()) - SILU_MIN) < 1e-15
        assert math.isclose(SILU_MIN, SILU_ARGMIN + 1, rel_tol=1e-15)  # where x sigmoid'(x) + sigmoid(x) = 0

    @given(st.floats(-30, 30), st.floats(0, 4))
    def test_every_point_is_inside(self, start: float, width: float) -> None:
        x = torch.linspace(start, start + width, 33, dtype=torch.float32)
        span = curve_span(Span(x[:1].double(), x[-1:].double()), SWIGLU)
        for y in (x / (1 + torch.exp(-x)), x / (1 + torch.exp(-x) * (1 + 2.0**-22)), x * torch.sigmoid(x)):
            assert bool(((span.low <= y) & (y <= span.high)).all())

    @pytest.mark.parametrize("activation", list(Activation))
    @pytest.mark.parametrize("limit", [None, 2.0])
    def test_a_point_holds_the_definition(self, activation: Activation, limit: float | None) -> None:
        h = torch.randn(4, 64, generator=generator(1)).bfloat16().double() * 3
        steps = Steps(activation=activation, limit=limit)
        span, right = act_span(Span(h, h), steps), activated(h, steps)
        assert bool(((span.low <= right) & (right <= span.high)).all())
        unclamped = activated(h, Steps(activation=activation))
        assert torch.equal(unclamped, right) == (limit is None)

    @pytest.mark.parametrize(
        "recipe",
        [recipes.VLLM_GROUP, recipes.TORCH_GROUP, recipes.VLLM_GROUP_UE8M0_BITS, recipes.SGLANG_GROUP],
        ids=lambda recipe: recipe.name,
    )
    @settings(max_examples=25)
    @given(seed=st.integers(0, 10**6))
    def test_quantised_choices_are_in_a_box(self, recipe: recipes.Recipe, seed: int) -> None:
        """Any values inside the intervals, quantised: each group lies in one of its boxes."""
        g = generator(seed)
        x = torch.randn(2, 200, generator=g).bfloat16()
        steps = torch.randint(0, 3, (2, 200), generator=g).to(torch.int16)
        wider = (x.view(torch.int16) + torch.randint(0, 3, (2, 200), generator=g).to(torch.int16)).view(torch.bfloat16)
        low, high = torch.minimum(x, wider).double(), torch.maximum(x, wider).double()
        chosen = torch.where(steps == 0, x, wider)
        boxes, _ = code_boxes(Span(low, high), recipe, BF16, None)
        made = quantize(chosen, recipe)
        q, s = decode(made.codes), decode(made.scale)
        inside = []
        for box in boxes:
            codes = torch.nn.functional.pad((box.low <= q) & (q <= box.high), (0, 56), value=True)
            inside.append(codes.reshape(2, 2, 128).all(dim=2) & (box.scale_low <= s) & (s <= box.scale_high))
        assert bool(torch.stack(inside).any(dim=0).all())

    def test_formulas_flip_codes(self) -> None:
        """The twin: on the same values the formulas differ in some code, so a single set of codes would refuse them."""
        act = torch.randn(512, 256, generator=generator(5)).bfloat16()
        right = quantize(act, recipes.VLLM_GROUP).codes.view(torch.uint8)
        flips = [int((requantise(act.float(), None, v)[0].view(torch.uint8) != right).sum()) for v in (0, 1, 2)]
        assert flips[0] == 0 < flips[2] < 2000, flips

    def test_uncovered_recipes_are_refused(self) -> None:
        for recipe in (recipes.DEEPGEMM_128X128, recipes.FLASHINFER_128X128_AMAX_FAULT, recipes.TORCHAO_MX_FLOOR):
            with pytest.raises(NumericsError):
                code_boxes(Span(torch.ones(1, 128).double(), torch.ones(1, 128).double()), recipe, BF16, None)


@pytest.mark.turns(4)
class TestLayer:
    """Right kernels with other roundings pass; each fault fails."""

    @pytest.mark.parametrize("arch", ["cpu", "sm90"])
    @pytest.mark.parametrize("variant", [0, 1, 2])
    @pytest.mark.parametrize("static", [False, True])
    def test_right_kernels_pass(self, variant: int, static: bool, arch: str) -> None:
        inputs = make(seed=variant, static=static)
        verdict = judge(inputs, kernel(inputs, variant=variant, arch=arch), arch=arch)
        assert verdict.status is Status.PASSED and verdict.unconstrained == 0, verdict.summary

    def test_per_tensor_scales(self) -> None:
        inputs = make(seed=4, static=True, blocks=False)
        for arch in ("cpu", "sm90"):
            verdict = judge(inputs, kernel(inputs, arch=arch, variant=1), arch=arch)
            assert verdict.status is Status.PASSED, verdict.summary

    @pytest.mark.parametrize("static", [False, True])
    def test_the_reference_passes(self, static: bool) -> None:
        inputs = make(seed=7, static=static)
        out = get("moe_fp8").reference(inputs, out_dtype=torch.bfloat16)
        assert isinstance(out, Tensor)
        for arch in ("cpu", "sm90"):
            assert judge(inputs, out, arch=arch).margin == 0

    def test_the_interval_is_narrow(self) -> None:
        """A code that flips moves an output by far less than any fault: a wrong weight of one expert is seen."""
        inputs = make(seed=2)
        out = kernel(inputs)
        wrong = {**inputs, "topk_weights": inputs["topk_weights"] * 1.02}
        assert judge(inputs, kernel(wrong)).status is Status.FAILED
        assert judge(inputs, out).status is Status.PASSED

    @pytest.mark.parametrize(
        "fault",
        [
            "gate and up swapped",
            "scale of the next block",
            "scales of gate and up swapped",
            "weights dropped",
            "expert off by one",
            "second expert ignored",
            "tokens swapped",
            "limit where there is none",
            "input scale of the next token",
        ],
    )
    def test_faults_fail(self, fault: str) -> None:
        inputs = third()
        wrong = dict(inputs)
        if fault == "gate and up swapped":
            wrong["w13"] = layout.swap_w13_to_w31(inputs["w13"])
        elif fault == "scale of the next block":
            wrong["w2_scale"] = inputs["w2_scale"].roll(1, dims=2)
        elif fault == "scales of gate and up swapped":
            wrong["w13_scale"] = layout.swap_w13_to_w31(inputs["w13_scale"])
        elif fault == "weights dropped":
            wrong["topk_weights"] = torch.ones(T, K)
        elif fault == "expert off by one":
            wrong["topk_ids"] = (inputs["topk_ids"] + 1) % E
        elif fault == "second expert ignored":
            wrong["topk_ids"] = torch.where(torch.arange(K) == 1, -1, inputs["topk_ids"])
        elif fault == "tokens swapped":
            wrong["a"] = inputs["a"].view(torch.uint8)[[1, 0, 2, 3, 4]].view(E4M3)
        elif fault == "input scale of the next token":
            wrong["a_scale"] = inputs["a_scale"].roll(1, dims=0)
        out = kernel(wrong, limit=0.01 if fault == "limit where there is none" else None)
        assert judge(inputs, out).status is Status.FAILED
        assert judge(inputs, kernel(inputs)).status is Status.PASSED

    def test_limit(self) -> None:
        inputs = make(seed=5)
        assert judge(inputs, kernel(inputs, limit=0.5), limit=0.5).status is Status.PASSED
        assert judge(inputs, kernel(inputs), limit=0.5).status is Status.FAILED

    def test_expert_parallel_offset(self) -> None:
        inputs = make(seed=6)
        inputs["topk_ids"] += 4
        inputs["topk_ids"][0, 0], inputs["topk_ids"][1] = 1, torch.tensor([-1, 99])
        out = kernel(inputs, first=4)
        assert not bool(out[1].any())
        assert judge(inputs, out, first_expert=4).status is Status.PASSED
        assert judge(inputs, kernel(inputs, first=3), first_expert=4).status is Status.FAILED
        assert "no token" in str(judge(inputs, torch.zeros_like(out), first_expert=50).reason)

    def test_from_the_high_precision_input(self) -> None:
        inputs = make(seed=8)
        x = torch.randn(T, H, generator=generator(8)).to(torch.bfloat16)
        for variant in (0, 1, 2):
            codes, scale = requantise(x.float(), None, variant)
            inputs |= {"a": codes, "a_scale": scale}
            out = kernel(inputs, variant=variant)
            given = {k: v for k, v in inputs.items() if k not in ("a", "a_scale")} | {"x": x}
            assert judge(given, out).status is Status.PASSED
            stale = {**given, "x": x.roll(1, dims=0)}
            assert judge(stale, out).status is Status.FAILED

    def test_llama4_weights_multiply_the_input(self) -> None:
        inputs = make(seed=9, top_k=1)
        x = torch.randn(T, H, generator=generator(9)).to(torch.bfloat16)
        scaled = x * inputs["topk_weights"].bfloat16()
        made = quantize(scaled, recipes.VLLM_GROUP)
        ones = {**inputs, "a": made.codes, "a_scale": made.scale, "topk_weights": torch.ones(T, 1)}
        given = {k: v for k, v in inputs.items() if k not in ("a", "a_scale")} | {"x": x}
        assert judge(given, kernel(ones), apply_router_weight_on_input=True).status is Status.PASSED
        assert judge(given, kernel(ones)).status is Status.FAILED

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**100])
    def test_what_is_not_known_of_a_wide_input_opens_its_token_only(self, value: float) -> None:
        """NaN, infinity, an intermediate beyond bfloat16: the other tokens are judged as if it were not there."""
        inputs = make(seed=8, top_k=E)  # every expert has every token
        x = torch.randn(T, H, generator=generator(8)).to(torch.bfloat16)
        codes, scale = requantise(x.float(), None, 0)
        out = kernel(inputs | {"a": codes, "a_scale": scale})
        given = {k: v for k, v in inputs.items() if k not in ("a", "a_scale")} | {"x": x.clone()}
        given["x"][2, 3], out[2] = value, torch.nan
        for arch in ("cpu", "sm90"):
            verdict = judge(given, out if arch == "cpu" else self.reference(given), arch=arch)
            assert verdict.status is Status.PASSED and verdict.unconstrained == H, verdict.summary
        assert judge(given, out * 1.1).status is Status.FAILED

    def reference(self, inputs: Inputs) -> Tensor:
        out = get("moe_fp8").reference(inputs, out_dtype=torch.bfloat16)
        assert isinstance(out, Tensor)
        return out

    def test_nan_opens_its_token_only(self) -> None:
        inputs = make(seed=1)
        out = kernel(inputs)
        bits = inputs["a"].view(torch.uint8).clone()
        bits[2, 3] = 0x7F
        out[2] = torch.nan
        verdict = judge({**inputs, "a": bits.view(E4M3)}, out)
        assert verdict.status is Status.PASSED and verdict.unconstrained == H

    def test_poisoned_experts_without_tokens_are_not_read(self) -> None:
        inputs = make(seed=1)
        inputs["topk_ids"] = torch.where(inputs["topk_ids"] == 1, -1, inputs["topk_ids"])
        out = kernel(inputs)
        poisoned = {**inputs, "w2": inputs["w2"].view(torch.uint8).index_fill(0, torch.tensor([1]), 0x7F).view(E4M3)}
        assert judge(poisoned, out).status is Status.PASSED

    def test_a_clamp_of_the_scales_of_dead_experts_fails(self) -> None:
        """Only the case with dead experts sees it: the twin without them passes."""
        seen = {}
        for option in ("dead", "on_input"):
            case = cases.parse(
                f"moe_fp8/bf16xe4m3-bf16/1x128:128x128/t=9,e=3,h=256,i=128,k=1/{option}=1/family=randn/seed=1"
            )
            inputs, options = case.inputs(), {**case.call_options(), "out_dtype": torch.bfloat16}
            clamped = {**inputs, "w2_scale": inputs["w2_scale"].clamp(min=1e-12)}
            out = get("moe_fp8").reference(clamped, **options)
            seen[option] = judge(inputs, out, **options).status
        assert seen == {"dead": Status.FAILED, "on_input": Status.PASSED}

    def test_padded_intermediate_is_neutral_in_place_and_not_as_published(self) -> None:
        """w13 -> silu and mul -> w2, 250 padded to 256: the right placement is judged equal, the published is not."""
        g = generator(4)
        inputs = make(seed=4, static=True, blocks=False)
        inputs["w13"] = e4m3(torch.randn(E, 500, H, generator=g) * 100)
        inputs["w2"] = e4m3(torch.randn(E, H, 250, generator=g) * 100)
        right = layout.align_fp8_moe_weights_for_fi(inputs["w13"], inputs["w2"], True)
        published = layout.align_fp8_moe_weights_for_fi_published(inputs["w13"], inputs["w2"], True)
        for (w13, w2, padded), status in ((right, Status.PASSED), (published, Status.FAILED)):
            assert padded == SIZE
            out = kernel({**inputs, "w13": w13, "w2": w2})
            assert judge(inputs, out).status is status

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("combine", list(WAYS), ids=lambda c: c.name)
    def test_every_combine_is_judged_and_named(self, combine: Combine) -> None:
        """Right by its own declaration and without one; every other declaration refuses it."""
        static = combine in (Combine.FLOAT32, Combine.RUNNING)
        inputs = make(seed=6, static=static, top_k=3)
        out = kernel(inputs, combine=combine, arch="sm90")
        own = judge(inputs, out, arch="sm90", combine=combine.name)
        assert own.status is Status.PASSED, own.summary
        found = judge(inputs, out, arch="sm90")
        assert found.status is Status.PASSED and (combine.name in found.basis) == (combine is not Combine.STORED)
        others = [judge(inputs, out, arch="sm90", combine=c.name) for c in WAYS if c is not combine]
        assert all(v.status is Status.FAILED for v in others), [v.summary for v in others]
        matches = get("moe_fp8").identify(inputs, kernel(inputs, combine=combine), arch=None)
        assert matches[0].schedule == combine.name and matches[0].equal > matches[1].equal + 0.05

    @pytest.mark.parametrize(("due", "made"), [("RUNNING", "WEIGHTED"), ("WEIGHTED", "RUNNING")])
    def test_a_listed_case_tells_a_running_sum_from_one_of_float32(self, due: str, made: str) -> None:
        """A token of one expert has one slot, where the two are the same."""
        contract, declared = get("moe_fp8"), f"combine:{due}"
        [case] = [case for case in profiles.cases("moe_fp8", "quick") if declared in str(case)]
        inputs, options = case.inputs(), case.call_options()
        one = {**inputs, **{name: inputs[name][:, :1] for name in ("topk_ids", "topk_weights")}}
        for call, status in ((inputs, Status.FAILED), (one, Status.PASSED)):
            right = contract.reference(call, **options)
            other = contract.reference(call, **{**options, "combine": made})
            assert judge(call, right, **options).status is Status.PASSED
            assert judge(call, other, **options).status is status

    @pytest.mark.parametrize("name", ["torchao_mxfp4_floor", "vllm_token", "flashinfer_nvfp4"])
    def test_a_recipe_of_other_blocks_or_codes_is_refused(self, name: str) -> None:
        inputs = make()
        with pytest.raises(NumericsError, match=f"recipe {name} gives float.* in blocks of"):
            get("moe_fp8").check(inputs, {"recipe": name})
        assert name not in QUANTISERS
        get("moe_fp8").check(inputs, {"recipe": "sglang_group"})

    @pytest.mark.parametrize("combine", list(WAYS), ids=lambda c: c.name)
    def test_the_reference_of_every_combine_lies_in_its_interval(self, combine: Combine) -> None:
        inputs = make(seed=7, top_k=3)
        out = get("moe_fp8").reference(inputs, combine=combine.name, out_dtype=torch.bfloat16)
        assert isinstance(out, Tensor)
        assert judge(inputs, out, combine=combine.name).status is Status.PASSED
        wrong = out.view(torch.int16) + (torch.arange(T * H).reshape(T, H) == 77).to(torch.int16) * 64
        assert judge(inputs, wrong.view(torch.bfloat16), combine=combine.name).outside == 1
        assert judge(inputs, wrong.view(torch.bfloat16)).status is Status.FAILED

    @pytest.mark.parametrize("value", [-0.0021, 0.0, math.inf, math.nan])
    def test_a_static_scale_that_divides_nothing_is_refused(self, value: float) -> None:
        inputs = make(static=True, blocks=False)
        bad = {**inputs, "a2_scale": torch.tensor([value])}
        with pytest.raises(InputError, match="a2_scale is .* positive and finite"):
            judge(bad, kernel(inputs))
        wide = {k: v for k, v in bad.items() if k != "a"} | {"x": torch.ones(T, H).bfloat16()}
        wide |= {"a2_scale": torch.ones(1), "a_scale": torch.tensor([value])}
        with pytest.raises(InputError, match="a_scale is .* positive and finite"):
            judge(wide, kernel(inputs))
        with pytest.raises(ShapeError, match="static scale is one value"):
            judge({**inputs, "a2_scale": torch.ones(2)}, kernel(inputs))

    def test_bad_calls_are_named(self) -> None:
        inputs = make()
        out = kernel(inputs)
        with pytest.raises(InputError, match="one of them"):
            judge({**inputs, "x": torch.zeros(T, H).bfloat16()}, out)
        with pytest.raises(InputError, match="a2_scale"):
            judge({**inputs, "a2_scale": torch.ones(1)}, out, recipe="vllm_group")
        with pytest.raises(InputError, match="a comes with a_scale"):
            judge({k: v for k, v in inputs.items() if k != "a_scale"}, out)
        with pytest.raises(NumericsError, match="one scale for all rows"):
            judge(inputs, out, recipe="vllm_tensor")
        wide = {k: v for k, v in inputs.items() if k != "a"} | {"x": torch.ones(T, H).bfloat16()}
        with pytest.raises(ShapeError, match="its one given scale"):
            judge(wide, out)
        wide["a_scale"] = torch.ones(1)
        with pytest.raises(InputError, match="both or neither"):
            judge(wide, out)
        del wide["a_scale"]
        with pytest.raises(InputError, match="one expert for each token, not 2"):
            judge(wide, out, apply_router_weight_on_input=True)
        with pytest.raises(ShapeError, match="w13"):
            judge({**inputs, "w13": inputs["w13"][:, :-2]}, out)
        for name in ("a_scale", "w13_scale", "w2_scale"):
            column = torch.ones(inputs[name].numel() + 1, 1)
            with pytest.raises(ShapeError, match=f"{name} has shape"):
                get("moe_fp8").check({**inputs, name: column}, {})
        with pytest.raises(OptionError, match="limit"):
            judge(inputs, out, limit=-1.0)
        with pytest.raises(NumericsError, match="cpu"):
            judge(inputs, out, arch="gfx942")


class TestRouting:
    """Llama-4, DeepSeek-V3 and softmax; near ties either way; each fault fails."""

    V3 = {"router": "deepseek_v3", "top_k": 4, "num_expert_group": 4, "topk_group": 2, "renormalize": True}

    def case(self, seed: int = 0) -> Inputs:
        g = generator(seed)
        return {"logits": torch.randn(64, 32, generator=g), "bias": torch.randn(32, generator=g) * 0.2}

    def judge(self, inputs: Inputs, weights: Tensor, ids: Tensor, **options: object) -> Verdict:
        out = {"topk_weights": weights.float(), "topk_ids": ids.int()}
        return get("moe_routing").judge(inputs, out, arch="cpu", numerics=None, **options)

    def v3(
        self, x: Tensor, bias: Tensor, *, scaling: float = 1.0, fill: float = -math.inf, best: int = 2
    ) -> tuple[Tensor, Tensor]:
        """The published formula in float32 torch."""
        s = x.sigmoid()
        c = s + bias
        grouped = c.view(len(c), 4, -1).topk(2, dim=-1)[0].sum(dim=-1)
        keep = torch.zeros_like(grouped).scatter_(1, grouped.topk(best, dim=-1)[1], 1).repeat_interleave(8, dim=1)
        ids = c.masked_fill(keep == 0, fill).topk(4, dim=-1)[1]
        w = s.gather(1, ids)
        return w / w.sum(dim=1, keepdim=True) * scaling, ids

    @pytest.mark.parametrize("router", ["llama4", "deepseek_v3", "softmax"])
    def test_experts_that_are_masked_by_infinities(self, router: str) -> None:
        """Those of -inf are not chosen where others are left; where they are their weight is 0."""
        logits = torch.full((2, 8), -math.inf)
        logits[0, 2:6], logits[1, 5] = torch.tensor([1.0, 3.0, 2.0, 0.0]), 1.0
        s = torch.softmax(logits, dim=1) if router == "softmax" else logits.sigmoid()
        for ids, status in (([[3, 4], [5, 0]], Status.PASSED), ([[3, 7], [5, 0]], Status.FAILED)):
            chosen = torch.tensor(ids)
            weights = s.gather(1, chosen)
            assert self.judge({"logits": logits}, weights, chosen, router=router, top_k=2).status is status
        assert self.judge({"logits": logits}, weights + 1e-3, chosen, router=router, top_k=2).status is Status.FAILED

    def test_weights_of_scores_that_may_all_be_flushed(self) -> None:
        """0 over 0 in float32; one score that is none decides the row."""
        logits, ids = torch.full((2, 8), -200.0), torch.tensor([[0, 1], [0, 1]])
        logits[1, 0], options = -60.0, {**self.V3, "num_expert_group": 1, "topk_group": 1, "top_k": 2}
        s = logits.sigmoid().gather(1, ids)
        float32 = s / s.sum(dim=1, keepdim=True)
        assert float32[0].isnan().all()
        assert self.judge({"logits": logits}, float32, ids, **options).status is Status.PASSED
        assert self.judge({"logits": logits}, float32 * 0 + 0.5, ids, **options).status is Status.FAILED

    @given(st.integers(0, 1000))
    def test_deepseek_v3(self, seed: int) -> None:
        inputs = self.case(seed)
        w, ids = self.v3(inputs["logits"], inputs["bias"], scaling=2.5)
        options = {**self.V3, "routed_scaling_factor": 2.5}
        assert self.judge(inputs, w, ids, **options).status is Status.PASSED
        order = torch.randperm(4, generator=generator(seed))
        assert self.judge(inputs, w[:, order], ids[:, order], **options).status is Status.PASSED

    def test_references_agree(self) -> None:
        inputs = self.case()
        w, ids = self.v3(inputs["logits"], inputs["bias"])
        made = get("moe_routing").reference(inputs, **self.V3)
        assert isinstance(made, dict) and torch.equal(made["topk_ids"].long(), ids)
        assert torch.allclose(made["topk_weights"], w, rtol=1e-6)

    @pytest.mark.parametrize(
        "fault",
        [
            "masked with 0",
            "one group more",
            "bias in the weight",
            "no bias",
            "not renormalised",
            "scaling dropped",
            "softmax for sigmoid",
            "weights in another order",
            "one expert twice",
            "second best",
        ],
    )
    def test_faults_fail(self, fault: str) -> None:
        inputs = self.case(3)
        x, bias = inputs["logits"], inputs["bias"] - 1.0  # choices below 0: a mask of 0 wins over them
        inputs["bias"] = bias
        w, ids = self.v3(x, bias, scaling=2.5)
        assert self.judge(inputs, w, ids, **self.V3, routed_scaling_factor=2.5).status is Status.PASSED
        if fault == "masked with 0":
            w, ids = self.v3(x, bias, scaling=2.5, fill=0.0)
        elif fault == "one group more":
            w, ids = self.v3(x, bias, scaling=2.5, best=3)
        elif fault == "bias in the weight":
            s = (x.sigmoid() + bias).gather(1, ids)
            w = s / s.sum(dim=1, keepdim=True) * 2.5
        elif fault == "no bias":
            w, ids = self.v3(x, torch.zeros(32), scaling=2.5)
        elif fault == "not renormalised":
            w = x.sigmoid().gather(1, ids) * 2.5
        elif fault == "scaling dropped":
            w = w / 2.5
        elif fault == "softmax for sigmoid":
            s = x.softmax(dim=1).gather(1, ids)
            w = s / s.sum(dim=1, keepdim=True) * 2.5
        elif fault == "weights in another order":
            w = w.flip(1)
        elif fault == "one expert twice":
            ids = torch.cat([ids[:, :3], ids[:, :1]], dim=1)
        else:
            ids = (x.sigmoid() + bias).topk(5, dim=1)[1][:, 1:]
            s = x.sigmoid().gather(1, ids)
            w = s / s.sum(dim=1, keepdim=True) * 2.5
        assert self.judge(inputs, w, ids, **self.V3, routed_scaling_factor=2.5).status is Status.FAILED

    @pytest.mark.parametrize("router", ["llama4", "softmax"])
    def test_other_routers(self, router: str) -> None:
        x = torch.randn(64, 16, generator=generator(1)).bfloat16()
        inputs, options = {"logits": x}, {"router": router, "top_k": 2}
        top, ids = x.float().topk(2, dim=1)
        s = top.sigmoid() if router == "llama4" else x.float().softmax(dim=1).gather(1, ids)
        assert self.judge(inputs, s, ids, **options).status is Status.PASSED
        assert self.judge(inputs, s, ids.roll(1, dims=0), **options).status is Status.FAILED
        other = x.float().softmax(dim=1).gather(1, ids) if router == "llama4" else top.sigmoid()
        assert self.judge(inputs, other, ids, **options).status is Status.FAILED

    def test_near_ties_go_either_way(self) -> None:
        """Two scores that differ by less than their float32 errors."""
        x = torch.zeros(1, 8)
        x[0, 3], x[0, 5] = 1.0, 1.0 + 2.0**-23
        inputs, options = {"logits": x}, {"router": "softmax", "top_k": 1}
        for expert in (3, 5):
            w = x.softmax(dim=1)[:, expert : expert + 1]
            assert self.judge(inputs, w, torch.tensor([[expert]]), **options).status is Status.PASSED
        w = x.softmax(dim=1)[:, :1]
        assert self.judge(inputs, w, torch.tensor([[0]]), **options).status is Status.FAILED

    def test_options_must_fit(self) -> None:
        with pytest.raises(OptionError, match="hold no"):
            get("moe_routing").reference(self.case(), router="deepseek_v3", top_k=9, num_expert_group=4, topk_group=1)
        with pytest.raises(OptionError, match="does not fit"):
            get("moe_routing").reference(self.case(), router="deepseek_v3", top_k=4, num_expert_group=5)
