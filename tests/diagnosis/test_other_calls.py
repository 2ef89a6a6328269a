"""A failing output that is right for another call is named by what differs; each beside one that is right for none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.diagnosis import other_calls
from oracle.diagnosis.explain import explain_verdict
from oracle.diagnosis.other_calls import taken_otherwise
from oracle.routines import cases, get
from oracle.routines.base import Call, by_name

GROUPS = "scaled_grouped_mm/e4m3xe4m3-bf16/token:channel/m=70,n=16,k=64,g=4/family=randn/seed=12"
MASKED = "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=300,n=16,k=128,g=3/family=randn/seed=12"
WINDOWS = (
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=150,n=17,h=32,d=128/clean=1/cu_seqlen_ks:i64,cu_seqlen_ke:i64/"
    "family=positive/seed=11"
)
CACHE = "reshape_and_cache_flash/bf16-e4m3/tensor/t=11,h=3,d=64,p=16/family=randn/seed=12"
GATHER = "cp_gather_cache/e4m3-e4m3/tensor/b=5,p=16,c=48/starts=1/family=codes/seed=12"
ROUTES = "moe_routing/f32/-/t=40,e=32,k=4/bias=1/family=randn/seed=12"
OLD_NAN = 0x7FD5  # bits of a NaN that no arithmetic gives
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def call_of(case: str) -> Call:
    made = cases.parse(case)
    return Call(get(made.contract), made.inputs(), made.call_options(), arch="cpu")


def output_of(call: Call, change: Change) -> Mapping[str, Tensor]:
    """The reference of the call as the kernel takes it."""
    inputs, options = dict(call.inputs), dict(call.options)
    change(inputs, options)
    made = by_name(call.contract.reference(inputs, **options))
    return {name: x.float() if x.dtype is torch.float64 else x for name, x in made.items()}


def said_of(call: Call, output: Mapping[str, Tensor]) -> str | None:
    verdict = call.contract.judged(call, output)
    assert verdict.status.is_failure
    return taken_otherwise(call, output, verdict, None)


def absent(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    del inputs["seq_starts"]


def factor(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    options["routed_scaling_factor"] = 1.0


def first(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    inputs["scale_a"] = inputs["scale_a"][:1].expand_as(inputs["scale_a"]).contiguous()


def narrow(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    inputs["scale_b"] = inputs["scale_b"].bfloat16().float()


def words(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    own = inputs["cu_seqlen_ks"]
    inputs["cu_seqlen_ks"] = own.view(torch.int32)[: len(own)].to(torch.int64)


def other_format(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    inputs["a"] = inputs["a"].view(torch.float8_e5m2)


def late(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    inputs["scale_a"] = inputs["scale_a"].clone()
    inputs["scale_a"][32:64] = inputs["scale_a"][:32]


@pytest.mark.turns(4)
class TestNamed:
    @pytest.mark.parametrize(
        ("case", "change", "said"),
        [
            (GATHER, absent, "seq_starts taken as not given"),
            (GROUPS, first, "scale_a taken to be its first along axis 0"),
            (GROUPS, late, "scale_a from index 32 on taken from index 0 on along axis 0"),
            (GROUPS, narrow, "scale_b rounded to bfloat16"),
            (GROUPS, other_format, "a read as float8_e5m2"),
            (WINDOWS, words, "cu_seqlen_ks (64 bits) read as words of 32 bits"),
        ],
        ids=["absent", "first", "late", "narrow", "format", "words"],
    )
    def test_the_change_for_which_the_output_is_right(self, case, change, said):
        call = call_of(case)
        found = said_of(call, output_of(call, change))
        assert found is not None
        assert found.startswith(said.split(" along")[0])

    def test_an_option_taken_as_its_default(self):
        plain = call_of(ROUTES)
        call = Call(plain.contract, plain.inputs, {**plain.options, "routed_scaling_factor": 2.5}, arch="cpu")
        assert said_of(call, output_of(call, factor)) == "routed_scaling_factor taken as 1.0"

    @pytest.mark.parametrize(
        ("case", "name", "cut", "said"),
        [
            (MASKED, "masked_m", lambda x: x.clamp(max=64), "masked_m cut to 64"),
            (CACHE, "slot_mapping", lambda x: x.masked_fill(torch.arange(11) >= 8, -1), "slot_mapping from index 8 on"),
        ],
        ids=["rows", "tokens"],
    )
    def test_what_is_not_computed(self, case, name, cut, said):
        """The rest is 0 or old memory; where it holds other numbers, or a NaN as arithmetic gives it, nothing is."""
        call = call_of(case)
        fewer = {**call.inputs, name: cut(call.inputs[name])}
        output = {key: x.clone() for key, x in by_name(call.contract.reference(fewer, **call.options)).items()}
        output = {key: x.to(torch.bfloat16) if x.dtype is torch.float64 else x for key, x in output.items()}
        if name == "masked_m":
            lost = torch.isnan(output["out"])
            assert said_of(call, output) is None  # the NaN of the reference
            output["out"].view(torch.int16)[lost] = OLD_NAN
        found = said_of(call, output)
        assert found is not None
        assert found.startswith(said)
        if name == "masked_m":  # the negative test
            output["out"][lost] = torch.randn(int(lost.sum())).bfloat16()
            assert said_of(call, output) is None

    def test_the_verdict_says_it(self):
        call = call_of(GROUPS)
        output = output_of(call, first)
        verdict = call.contract.judged(call, output)
        said = explain_verdict(verdict, call.contract, call.inputs, output, arch="cpu", numerics=None, **call.options)
        assert said.explained_by


class TestNotNamed:
    def test_a_nan_that_only_the_change_has(self, monkeypatch):
        """Any choice is right under a NaN, so that it would explain all; the negative test takes the rule away."""
        call = call_of(ROUTES)
        output = {name: x.flip(0).contiguous() for name, x in output_of(call, lambda *_: None).items()}
        unknown = {**call.inputs, "bias": torch.full_like(call.inputs["bias"], torch.nan)}
        monkeypatch.setattr(other_calls, "_changes", lambda call: iter([("bias NaN", unknown, call.options)]))
        monkeypatch.setattr(other_calls, "_right", lambda held, verdict: True)
        assert said_of(call, output) is None
        monkeypatch.setattr(other_calls, "_brings_nan", lambda inputs, call: False)
        assert said_of(call, output) == "bias NaN"

    def test_an_output_with_one_element_more_that_is_wrong(self):
        call = call_of(GATHER)
        output = {name: x.clone() for name, x in output_of(call, absent).items()}
        (x,) = output.values()
        x.view(torch.uint8)[0, 0] ^= 1
        assert said_of(call, output) is None

    def test_an_output_of_one_value(self):
        call = call_of(GATHER)
        output = {name: torch.zeros_like(x) for name, x in output_of(call, absent).items()}
        assert said_of(call, output) is None

    def test_a_call_that_specifies_less(self, monkeypatch):
        """A call with fewer real rows is no reason, though the output is right for it."""
        call = call_of(GROUPS)
        output = {"out": call.truth["out"].bfloat16()}
        end = int(call.inputs["offsets"][-1])
        output["out"][end // 2 : end] = torch.randn(end - end // 2, 16).bfloat16()
        fewer = {**call.inputs, "offsets": call.inputs["offsets"].clamp(max=end // 2)}
        monkeypatch.setattr(other_calls, "_changes", lambda call: iter([("offsets cut", fewer, call.options)]))
        assert not call.contract.judged(Call(call.contract, fewer, call.options, arch="cpu"), output).status.is_failure
        assert said_of(call, output) is None
