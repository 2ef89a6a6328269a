"""Layers of experts as rows of steps: every right evaluation passes, every order of additions, no wrong step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds.code_boxes import code_boxes
from oracle.errors import InputError, OptionError, OracleError, ShapeError
from oracle.numbers.formats import BF16, decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import VLLM_SILU_MASKED
from oracle.routines import Call, cases, catalogue, get
from oracle.routines.moe import block_layers
from oracle.routines.moe.moe_ranges import MOST_TERMS, any_order, in_order
from oracle.routines.moe.pipeline_cases import METHODS, _head, _shape
from oracle.routines.moe.pipelines import CONTRACTS, PIPELINES, PipelineContract, Sharing
from oracle.routines.mutants import run
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth import routing
from oracle.truth.gemm import ScaledProduct
from oracle.truth.moe import Addition, Combine, running_sum
from oracle.truth.routing import Span
from oracle.verdict.compare import Status, Verdict

E4M3 = torch.float8_e4m3fn
NAMES = [row.name for row in PIPELINES]
Inputs = Mapping[str, Tensor]


def contract_of(name: str) -> PipelineContract:
    found = get(name)
    assert isinstance(found, PipelineContract)
    return found


def case_of(name: str, options: str = "", family: str = "randn", **shape: int) -> cases.Case:
    row, grammar = CONTRACTS[name].row, cases.grammars()[name]
    return cases.parse(f"{_head(name, grammar)}/{_shape(row, **shape)}/{options}family={family}/seed=11")


def judge(case: cases.Case, out: Tensor, inputs: Inputs | None = None, **options: object) -> Verdict:
    asked = case.call_options() | options
    return get(case.contract).judge(inputs or case.inputs(), out, arch="sm90", numerics=None, **asked)


# --- a layer in float32 torch, with formulas that any right kernel may have ---------------------------------------


def codes(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def in_halves(product: ScaledProduct) -> Tensor:
    """float32 ``[M, N]``: the sum of each 64 columns of K times its scales."""
    a, b = (torch.split(decode(x).float(), 64, dim=1) for x in (product.a, product.b))
    rows = product.b_scale.repeat_interleave(product.b_rows, dim=0)[: len(product.b)]
    pairs = enumerate(zip(a, b, strict=True))
    return sum((x @ w.T * product.a_scale[:, j, None] * rows[:, j] for j, (x, w) in pairs), torch.zeros(()))


def requantised(x: Tensor, name: str, given: Tensor | None, variant: int, columns: int = 128) -> tuple[Tensor, Tensor]:
    """By the recipe's floor, in one of three orders of operations."""
    if given is not None:
        return codes(x * (1 / given) if variant == 1 else x / given), given.reshape(1, 1)
    if name == "vllm_silu_masked":
        groups = x.bfloat16().reshape(x.shape[0], -1, 128)
        s = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-10) * torch.tensor(1 / 448).bfloat16()
        return codes((groups * (1 / s)).float()).reshape(x.shape), s.float().squeeze(2)
    width = x.shape[1] if name in ("vllm_token",) else columns
    groups = x.reshape(x.shape[0], -1, width)
    floor = {"deepep_1x128": 1e-4, "flashinfer_1x128": 0.0, "trtllm_gen_1x128": 0.0}.get(name, 1e-10)
    amax, top = groups.abs().amax(dim=2, keepdim=True), torch.tensor(448.0)
    amax = amax if name == "vllm_token" else amax.clamp(min=floor)
    if name.startswith("deepgemm_device"):
        s = torch.exp2(torch.ceil(torch.log2((amax * (1 / top)).double()))).float()
        return codes(groups / s).reshape(x.shape), s.squeeze(2)
    s = (amax / top, amax * (1 / top), 1 / (top / amax))[variant]
    if name == "vllm_token":
        s = s.clamp(min=1 / (448.0 * 512.0))
    v = (groups / s, groups * (1 / s), groups / s)[variant]
    return codes(v).reshape(x.shape), s.squeeze(2)


def terms_of(case: cases.Case, inputs: Inputs, combine: Combine, variant: int) -> Tensor:
    """Weighted outputs ``[k, T, H]`` of a right sm90 kernel, before they are added."""
    contract, options = contract_of(case.contract), case.call_options()
    call = Call(contract, inputs, options).checked()
    row, route = contract.row, contract.routes(inputs, call.resolved, contract.kept(call.resolved)[0])[0]
    parts = contract.parts(inputs, call.resolved, route)
    tokens, experts, steps = parts.tokens, parts.experts, row.steps
    schedule = get_schedule(row.numerics["sm90"][0])
    way, weights = combine.value, tokens.output_weights(steps).float()
    weights = weights.bfloat16().float() if way.weight else weights
    slots = torch.zeros((tokens.ids.shape[1], *case.inputs()["a" if "a" in inputs else "x"].shape))
    for expert, token, slot in tokens.slots(experts):
        product = experts.product("w13", expert, *tokens.rows(token))
        first = steps.first or steps.store
        h = (in_halves(product) if row.halved else predict_product(product, schedule, out_dtype=first)).float()
        if steps.hidden is not None:
            q, s = requantised(h, steps.hidden.name, None, variant)
            h = q.float() * s.repeat_interleave(128, dim=1)
        gate, up = h.chunk(2, dim=1)
        silu = gate * torch.sigmoid(gate) if variant else gate / (1 + torch.exp(-gate))
        if steps.activation.name == "EACH":
            silu = silu.bfloat16().float()
        act = silu * up
        act = act if steps.activation.name == "NONE" else act.bfloat16().float()
        if experts.multiplier is not None:
            act = act * experts.multiplier.float()
            act = act if steps.activation.name == "NONE" else act.bfloat16().float()
        act = act * tokens.weights[token, slot, None] if steps.weighted else act
        made = requantised(act, steps.recipe.name, experts.intermediate_scale, variant, 64 if row.halved else 128)
        stored = torch.bfloat16 if way.stored else torch.float32
        product = experts.product("w2", expert, *made)
        y = in_halves(product).to(stored) if row.halved else predict_product(product, schedule, out_dtype=stored)
        y = y.float()
        term = y * weights[token, slot, None]
        slots[slot, token] = term.bfloat16().float() if way.term else term
    return slots


def kernel(
    case: cases.Case, inputs: Inputs, combine: Combine, *, variant: int, order: list[int] | None = None
) -> Tensor:
    slots = terms_of(case, inputs, combine, variant)
    slots = slots if order is None else slots[order]
    if combine.value.addition is Addition.FLOAT32:
        return slots.sum(dim=0).bfloat16()
    total = torch.zeros_like(slots[0])
    for term in slots:
        total = (total + term).bfloat16().float()
    return total.bfloat16()


class TestRightKernels:
    """Schedules of sm90, formulas of scales and codes, exponentials, orders: all of them pass."""

    @pytest.mark.parametrize("name", NAMES)
    def test_passes(self, name: str) -> None:
        combine, variant = CONTRACTS[name].row.ways[-1], NAMES.index(name) % 3
        case = case_of(name)
        named = {"combine": combine.name} if len(CONTRACTS[name].row.ways) > 1 else {}
        found = judge(case, kernel(case, case.inputs(), combine, variant=variant), **named)
        assert found.status is Status.PASSED, found.summary

    @pytest.mark.parametrize("name", ["fused_experts_channel", "cutlass_fused_moe_tensor"])
    def test_a_fault_of_one_step_does_not(self, name: str) -> None:
        """The negative test: one weight in a hundred more."""
        case, combine = case_of(name), CONTRACTS[name].row.ways[0]
        inputs = case.inputs()
        wrong = dict(inputs) | {"topk_weights": inputs["topk_weights"] * 1.01}
        assert judge(case, kernel(case, wrong, combine, variant=0), inputs).status is Status.FAILED

    def test_256_experts_eight_for_each_token(self) -> None:
        case = case_of("cutlass_moe_fp8", k=8, e=256)
        out = kernel(case, case.inputs(), Combine.STORED, variant=1)
        assert judge(case, out).status is Status.PASSED

    def test_a_token_without_an_expert_here_is_zero(self) -> None:
        case = case_of("deep_gemm_moe", "first=2/")
        inputs = case.inputs()
        inputs["topk_ids"][-1] = -1
        out = get(case.contract).reference(inputs, **case.call_options())
        assert isinstance(out, Tensor) and not out[-1].any() and judge(case, out, inputs).status is Status.PASSED
        out[-1, 0] = 2.0**-40
        assert judge(case, out, inputs).status is Status.FAILED


class TestAnyOrder:
    """bfloat16 sums in any order: the least and the largest over all orders, no less and no more."""

    def terms(self, count: int) -> Tensor:
        g = torch.Generator().manual_seed(count)
        return (torch.randn(count, 64, generator=g) * torch.rand(count, 1, generator=g) * 8).bfloat16().double()

    def test_the_ends_are_those_of_every_order(self) -> None:
        terms = self.terms(5)
        every = torch.stack([running_sum(terms[list(order)], torch.bfloat16) for order in permutations(range(5))])
        found = any_order(Span(terms, terms), torch.bfloat16)
        assert torch.equal(found.low, every.amin(dim=0)) and torch.equal(found.high, every.amax(dim=0))
        assert bool((found.low < found.high).any())

    def test_the_slots_in_turn_do_not_hold_every_order(self) -> None:
        """The negative test: a bound of one order."""
        terms = self.terms(5)
        one = in_order(Span(terms, terms), torch.bfloat16)
        other = running_sum(terms.flip(0), torch.bfloat16)
        assert bool(((other < one.low) | (other > one.high)).any())

    def test_many_terms_have_a_wider_bound(self) -> None:
        terms = self.terms(MOST_TERMS + 3)
        found = any_order(Span(terms, terms), torch.bfloat16)
        for seed in range(40):
            order = torch.randperm(len(terms), generator=torch.Generator().manual_seed(seed))
            one = running_sum(terms[order], torch.bfloat16)
            assert bool(((found.low <= one) & (one <= found.high)).all())
        assert float((found.high - found.low).amax() / terms.abs().sum(dim=0).amax()) < 0.2

    def test_a_layer_that_adds_atomically(self) -> None:
        """Every order passes where atomic additions are declared or nothing is; an ordered float32 sum is refused."""
        case = case_of("cutlass_fused_moe_tensor", k=5, e=5)
        outs = [
            kernel(case, case.inputs(), Combine.ATOMIC, variant=0, order=order)
            for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1])
        ]
        assert not torch.equal(*outs)
        for out in outs:
            assert judge(case, out, combine="ATOMIC").status is Status.PASSED
            assert judge(case, out).status is Status.PASSED
        assert judge(case, outs[0], combine="STORED").status is Status.FAILED


class TestBfloat16Quantiser:
    """Boxes of a quantiser whose every operation is a bfloat16 one."""

    def test_what_it_makes_of_values_between_the_ends_is_in_a_box(self) -> None:
        g = torch.Generator().manual_seed(3)
        x = (torch.randn(6, 256, generator=g) * torch.tensor([1e-9, 1e-3, 1, 30, 1e4, 1e20])[:, None]).bfloat16()
        ends = [(x.double() * f).bfloat16().double() for f in (1 - 2**-7, 1 + 2**-7)]
        span = Span(torch.minimum(*ends), torch.maximum(*ends))
        boxes, flipped = code_boxes(span, VLLM_SILU_MASKED, BF16, None)
        assert flipped > 0
        for seed in range(8):
            pick = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
            made = quantize(torch.where(pick, *ends).bfloat16(), VLLM_SILU_MASKED)
            assert self.held(made.codes, made.scale, boxes)
            assert not self.held(made.codes, made.scale * (1 + 2.0**-6), boxes), "a scale of another bfloat16 value"

    def held(self, q: Tensor, scale: Tensor, boxes: list) -> bool:
        value, s, ok = decode(q), decode(scale), torch.zeros(scale.shape, dtype=torch.bool)
        for box in boxes:
            inside = ((box.low <= value) & (value <= box.high)).reshape(*scale.shape, -1).all(dim=2)
            ok |= inside & (box.scale_low <= s) & (s <= box.scale_high)
        return bool(ok.all())


class TestNan:
    """NaN and infinity of a token open its own row, not those of the others of its experts."""

    def test_the_others_are_judged(self) -> None:
        case = case_of("deep_gemm_moe", family="nan")
        inputs = case.inputs()
        inputs["topk_ids"] = torch.tensor([[0, 1]] * 4, dtype=torch.int32)
        out = get(case.contract).reference(inputs)
        assert isinstance(out, Tensor)
        hurt = ~torch.isfinite(inputs["x"]).all(dim=1)
        assert 0 < int(hurt.sum()) < 4
        assert not judge(case, out, inputs).status.is_failure
        spread = out.clone()
        spread[~hurt] = torch.nan
        found = judge(case, spread, inputs)
        assert found.status is Status.FAILED and found.outside == int((~hurt).sum()) * out.shape[1]


class TestRouting:
    """FlashInfer's methods, beside the published formulas in torch."""

    def formula(self, method: str, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = {
            "Default": x.softmax(1),
            "RenormalizeNaive": x.softmax(1),
            "Renormalize": x,
            "TopK": x,
            "Llama4": x,
            "TopKSigmoid": x,
        }.get(method, x.sigmoid())
        w, ids = scores.topk(k, dim=1)
        if method == "Renormalize":
            w = w.softmax(1)
        elif method in ("RenormalizeNaive", "SigmoidRenorm", "MiniMax2", "DeepSeekV3"):
            w = w / w.sum(1, keepdim=True)
        elif method in ("Llama4", "TopKSigmoid"):
            w = w.sigmoid()
        return w, ids

    @pytest.mark.parametrize("method", [*METHODS, "DeepSeekV3"])
    def test_weights(self, method: str) -> None:
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(5)).double()
        k = 1 if method == "Llama4" else 3
        router = routing.Router(top_k=k, **routing.METHODS[method])
        weights, ids = routing.route(x.float(), router)
        w, expected = self.formula(method, x.float().double(), k)
        assert torch.equal(ids, expected) and torch.allclose(weights, w, rtol=1e-12, atol=0)
        span = routing.weight_span(routing.scores(x.float(), router), ids, router)
        kept = self.formula(method, x.float(), k)[0].double()
        assert bool(((span.low <= kept) & (kept <= span.high)).all()), "the same in float32"
        assert bool((span.high < w.abs() * 1.001 + 1e-30).all()) or method == "TopK"

    @pytest.mark.parametrize("name", ["trtllm_fp8_per_tensor_scale_moe"])
    def test_either_of_equal_experts_is_right_and_no_other(self, name: str) -> None:
        case = case_of(name, "method=Renormalize,logits=ties/")
        inputs = case.inputs()
        logits = torch.tensor([[2.0, 1.0, 1.0]] * 4)
        logits[3] = torch.tensor([0.0, 2.0, 1.0])
        inputs["logits"] = logits
        for second, status in ((1, Status.PASSED), (2, Status.PASSED), (0, Status.FAILED)):
            chosen = logits.clone()
            chosen[:3, second] += 2.0**-20  # decides, and changes no weight beyond its interval
            if second == 0:
                chosen[:3] = torch.tensor([0.0, 2.0, 1.0])
            out = get(name).reference(inputs | {"logits": chosen}, **case.call_options())
            assert isinstance(out, Tensor) and judge(case, out, inputs).status is status

    def test_choices_that_could_be_any_are_open(self) -> None:
        logits = torch.zeros(2, 32)
        logits[1, :3] = torch.tensor([3.0, 2.0, 1.0])
        router = routing.Router(top_k=3, **routing.METHODS["Renormalize"])
        found = routing.scores(logits, router)
        ways, lost = routing.alternatives(found, router, routing.route(logits, router)[1], biased=False)
        assert lost.tolist() == [True, False] and len(ways) == 1


@pytest.mark.turns(4)
class TestFaults:
    """A fault is named from the output alone, where everything is asked."""

    @pytest.mark.parametrize(
        ("name", "fault"),
        [
            ("cutlass_moe_fp8_channel", "experts: routing weight before the activation"),
            ("cutlass_fused_moe_tensor", "experts: intermediate's multiplier inverted"),
        ],
    )
    def test_named(self, name: str, fault: str) -> None:
        case = case_of(name)
        inputs, options = case.inputs(), case.call_options()
        out = run(Call(get(name), inputs, options, arch="sm90").checked(), catalogue.get(fault))
        found = oracle.judge(name, inputs, out, arch="sm90", explain="full", **options)
        assert found.status is Status.FAILED and fault in found.explained_by


BAD = {
    "scales of another kind": ("deep_gemm_moe", lambda i, o: i.update(w13_scale=torch.ones(3)), ShapeError, "takes"),
    "an odd half": ("deep_gemm_moe", lambda i, o: i.update(w13=i["w13"][:, :-2]), ShapeError, "gate and up rows"),
    "a scale of 0": ("cutlass_moe_fp8", lambda i, o: i.update(a1_scale=torch.zeros(1)), InputError, "positive"),
    "an expert beyond the map": (
        "deep_gemm_moe", lambda i, o: i.update(expert_map=torch.tensor([0, 1])), InputError, "there are 2"),
    "a map beyond the experts": (
        "deep_gemm_moe", lambda i, o: i.update(expert_map=torch.tensor([0, 1, 9])), InputError, "there are 3"),
    "both map and offset": (
        "deep_gemm_moe", lambda i, o: (i.update(expert_map=torch.arange(3)), o.update(first_expert=1)), OptionError,
        "one of them"),
    "an offset below 0": ("deep_gemm_moe", lambda i, o: o.update(first_expert=-1), OptionError, "first_expert=-1"),
    "two experts with weights on the input": (
        "deep_gemm_moe", lambda i, o: o.update(apply_router_weight_on_input=True), InputError, "one expert"),
    "a weight of five bits": (
        "cutlass_fused_moe_w4", lambda i, o: i.update(w2=i["w2"] + 9), InputError, "-8..7"),
    "a block of gate and up": (
        "cutlass_fused_moe_block", lambda i, o: i.update(
            w13=i["w13"][:, :128], w13_scale=i["w13_scale"][:, :1], w2=i["w2"][:, :, :64]), ShapeError, "gate rows"),
    "groups of another method": (
        "trtllm_fp8_per_tensor_scale_moe", lambda i, o: o.update(routing_method="TopK"), OptionError, "neither groups"),
    "a bias of another method": (
        "trtllm_fp8_per_tensor_scale_moe", lambda i, o: (
            i.update(bias=torch.ones(3)), o.update(routing_method="TopK", routed_scaling_factor=1.0)), InputError,
        "takes no bias"),
    "two experts for Llama-4": (
        "trtllm_fp8_per_tensor_scale_moe", lambda i, o: o.update(routing_method="Llama4", routed_scaling_factor=1.0),
        OptionError, "top_k=2"),
}  # fmt: skip  # a table, one row a line


@pytest.mark.parametrize("what", BAD)
def test_a_bad_call_is_refused(what: str) -> None:
    name, change, error, said = BAD[what]
    case = case_of(name)
    inputs, options = case.inputs(), case.call_options()
    get(name).check(inputs, options)
    change(inputs, options)
    with pytest.raises(error, match=said):
        get(name).check(inputs, options)


def test_a_row_costs_few_lines() -> None:
    """Every kind of scale and every way to combine is some row's; nothing is declared for no one."""
    assert {row.weights for row in PIPELINES} == set(Sharing)
    used = {way for row in (*PIPELINES, *block_layers.ROWS) for way in row.ways}
    assert set(Combine) == used
    with pytest.raises(OracleError, match="combine"):
        get("deep_gemm_moe").check(case_of("deep_gemm_moe").inputs(), {"combine": "ATOMIC"})
