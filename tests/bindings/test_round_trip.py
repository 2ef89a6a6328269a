"""Every binding in both directions: contract inputs, the call of the library, and contract inputs again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.bindings.binding import Binding, UnboundError, bind
from oracle.bindings.known import bindings
from oracle.errors import OptionError, OracleError
from oracle.routines import Call, cases, drawn, profiles
from oracle.verdict.sets import bits_of

MOST = 4  # calls of a binding


def calls(binding: Binding, most: int = MOST) -> list[Call]:
    """Calls that the binding names, published calls of the contract that it takes, or drawn ones where it takes none of
    those."""
    taken: list[Call] = []
    for listed in (
        lambda: map(cases.parse, binding.cases),
        lambda: profiles.cases(binding.contract, "quick"),
        lambda: drawn.default_cases(binding.contract, 0),
    ):
        for case in sorted(listed(), key=lambda case: (len(str(case)), str(case))):
            call = Call(binding.routine, case.inputs(), case.call_options()).checked()
            if binding.dense and ":pitch" in str(case):
                continue
            if binding.refuses(call.inputs, call.resolved) is None:
                taken.append(call)
            if len(taken) == most:
                return taken
        if taken:
            return taken
    return taken


def kernel(binding: Binding, seen: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Callable[..., None]:
    """A function with the library's parameters that keeps its arguments."""

    def called(*positional: Any, **named: Any) -> None:
        binding.parameters.bind(*positional, **named)
        seen.append((positional, named))

    return called


def equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(bits_of(one), bits_of(other))
    return type(one) is type(other) and one == other


@pytest.mark.turns(4)
@pytest.mark.whole("each is the call of another routine")
@pytest.mark.parametrize("binding", bindings(), ids=lambda binding: binding.name)
def test_round_trip(binding: Binding) -> None:
    """By the pattern, by position as far as the parameters allow, and by keyword alone."""
    chosen = calls(binding)
    assert chosen, "no case of the contract is one that the binding takes"
    for call in chosen:
        positional, named, _ = binding.arguments(call.inputs, call.resolved)
        bound = binding.parameters.bind(*positional, **named)
        everything = bound.arguments
        bound.apply_defaults()
        for args, kwargs in ((positional, named), (bound.args, bound.kwargs), ((), everything)):
            again = binding.read(args, kwargs)
            filled = {name for name in binding.absent if {**call.inputs, **call.resolved}.get(name) is None}
            assert again.inputs.keys() - filled == call.inputs.keys()
            assert all(equal(again.inputs[name], x) for name, x in call.inputs.items())
            kept = again.options.keys() - filled - {"out_dtype"}
            assert all(equal(again.options[name], call.resolved[name]) for name in kept)


@pytest.mark.parametrize("binding", bindings(), ids=lambda binding: binding.name)
def test_another_argument_does_not_bind(binding: Binding) -> None:
    """A parameter that the pattern does not have, with a value that is not its default."""
    (call, *_) = calls(binding, 1)
    positional, named, _ = binding.arguments(call.inputs, call.resolved)
    with pytest.raises(UnboundError, match="no such call"):
        binding.read(positional, {**named, "another": 1})
    held = binding.parameters.bind(*positional, **named).arguments
    free = [p.name for p in binding.parameters.parameters.values() if p.name not in {*held, *binding.ignores}]
    for name in free:
        assert binding.parameters.parameters[name].default is not inspect.Parameter.empty
        with pytest.raises(UnboundError, match=f"^{name} is "):
            binding.read((), {**held, name: "something else"})


GEMM = "((a, a_scale), (b, b_scale), out, fast=False)"
PARAMETERS = "(a, b, d, c=None, fast=True)"


class TestPatterns:
    def test_a_call_of_the_contract_that_is_not_taken(self) -> None:
        binding = bind("m:f", "fp8_gemm_nt", GEMM, PARAMETERS, takes={"out_dtype": torch.float16})
        (case, *_) = profiles.cases("fp8_gemm_nt", "quick")
        with pytest.raises(NotImplementedError, match="m:f takes out_dtype as torch.float16, not torch.bfloat16"):
            binding.arguments(case.inputs(), {"out_dtype": torch.bfloat16})

    def test_a_constant_is_compared(self) -> None:
        """A call with another constant, and by its default another one, are not read."""
        binding = bind("m:f", "fp8_gemm_nt", GEMM, PARAMETERS)
        (case, *_) = profiles.cases("fp8_gemm_nt", "quick")
        positional, named, _ = binding.arguments(case.inputs(), case.call_options())
        assert binding.read(positional, named).inputs.keys() == case.inputs().keys()
        for fast in ({}, {"fast": True}, {"fast": 0}):
            with pytest.raises(UnboundError, match="the binding is of calls with False"):
                binding.read(positional, fast)

    def test_an_expression_is_compared(self) -> None:
        binding = bind("m:f", "fp8_gemm_nt", "((a, a_scale), (b, b_scale), out, a.shape[0])", "(a, b, d, m)")
        (case, *_) = profiles.cases("fp8_gemm_nt", "quick")
        (left, right, out, m), named, _ = binding.arguments(case.inputs(), case.call_options())
        assert m == case.inputs()["a"].shape[0] and not named
        with pytest.raises(UnboundError, match=r"a.shape\[0\] is \d+, and the call has 1000"):
            binding.read((left, right, out, 1000))

    def test_an_inverse_scale(self) -> None:
        """Powers of two have an inverse with the same bits; of other scales none is read back."""
        binding = bind("m:f", "scaled_fp8_quant", "(x, scale.reciprocal()) -> q, scale", "(x, s)")
        x = torch.randn(2, 16, dtype=torch.bfloat16)
        positional, *_ = binding.arguments({"x": x, "scale": torch.tensor([0.25])}, {})
        assert float(positional[1]) == 4.0
        assert float(binding.read(positional).inputs["scale"]) == 0.25
        with pytest.raises(UnboundError, match="no power of two"):
            binding.read((x, torch.tensor([3.0])))

    def test_what_is_given_for_an_absent_input(self) -> None:
        """Read back, it is an input like any other; what a routine returns beyond ``...`` is left."""
        (binding,) = (one for one in bindings() if one.contract == "mha_fwd")
        (call,) = calls(binding, 1)
        inputs = {name: x for name, x in call.inputs.items() if name != "seqused_k"}
        positional, named, _ = binding.arguments(inputs, {})
        again = binding.read(positional, named)
        assert again.inputs["seqused_k"].tolist() == [inputs["k"].shape[1]] * len(inputs["k"])
        assert again.options["softmax_scale"] == inputs["q"].shape[3] ** -0.5
        assert binding(lambda *_: [inputs["q"], inputs["k"], None, None], inputs, {}).keys() == {"out", "softmax_lse"}

    @pytest.mark.parametrize("contract", ["fp8_gemm_nn", "fp8_gemm_tt", "bmm_fp8"])
    def test_memory_in_the_order_of_the_library(self, contract: str) -> None:
        """Operands whose rows lie without gaps are called and read with the same numbers, K without gaps."""
        binding = next(one for one in bindings() if one.contract == contract)
        (call,) = calls(binding, 1)
        name = {"fp8_gemm_nn": "b", "fp8_gemm_tt": "a", "bmm_fp8": "B"}[contract]
        inputs = call.inputs | {name: call.inputs[name].contiguous()}
        assert inputs[name].stride(-2) > 1, "K lies with gaps"
        positional, named, _ = binding.arguments(inputs, call.resolved)
        held = {"fp8_gemm_nn": 1, "fp8_gemm_tt": 0, "bmm_fp8": 1}[contract]
        given = positional[held][0] if isinstance(positional[held], tuple) else positional[held]
        assert given.stride(-2) == 1
        assert equal(binding.read(positional, named).inputs[name], inputs[name])

    def test_in_place(self) -> None:
        """The caller's cache stays as it was; what the kernel wrote is the output."""
        binding = next(one for one in bindings() if one.contract == "concat_and_cache_mla")
        (call,) = calls(binding, 1)
        before = call.inputs["kv_cache"].clone()

        def written(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, *_: object) -> None:
            kv_cache.view(torch.uint8).fill_(7)

        outputs = binding(written, call.inputs, call.resolved)
        assert torch.equal(bits_of(call.inputs["kv_cache"]), bits_of(before))
        assert bool((outputs["kv_cache"].view(torch.uint8) == 7).all())

    @pytest.mark.parametrize(
        ("pattern", "words"),
        [
            ("(a, nonsense)", "'nonsense' of .* is no input, option or output of fp8_gemm_nt"),
            ("(a, b", "is no call"),
            ("(*a)", "nonsense|no call|is no"),
            ("(a.view(torch.uint8), a_scale, b, b_scale)", "say with takes which dtype of a is viewed"),
        ],
    )
    def test_a_pattern_that_says_nothing(self, pattern: str, words: str) -> None:
        binding = bind("m:f", "fp8_gemm_nt", pattern, "(a, b, c, d)")
        with pytest.raises(OptionError, match=words):
            _ = binding._words

    def test_what_is_returned_must_be_what_the_pattern_says(self) -> None:
        (case, *_) = profiles.cases("ceil_div", "quick")
        (binding,) = (one for one in bindings() if one.contract == "ceil_div")
        assert binding(lambda x, y: (x + y - 1) // y, case.inputs(), case.call_options())["out"].shape
        with pytest.raises(OracleError, match="is not"):
            bind("m:f", "scaled_fp8_quant", "(x)", "(x)", takes={"scale": None, "scale_ub": None})(
                lambda x: x, {"x": torch.randn(2, 16, dtype=torch.bfloat16)}, {}
            )
