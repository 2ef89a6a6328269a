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
DEQUANTISE = "nvfp4_dequantize/e2m1/1x16/m=130,k=160/family=codes/seed=12"
SMALL_TILES = "nvfp4_dequantize/e2m1/1x16/m=130,k=160/layout=8x4/family=randn/seed=12"
TILES = "mm_mxfp8/e4m3xe4m3-bf16/1x32/m=130,n=136,k=160/family=randn/seed=12"
INT4 = "cutlass_w4a8_mm/e4m3xi4-bf16/token:channel/m=17,n=128,k=256/family=randn/seed=12"
WIDE_OFFSETS = (
    "scaled_grouped_mm/e4m3xe4m3-f16/token:channel/m=15,n=16,k=129,g=4/a:pitch,offsets:i64/family=randn/seed=11"
)
WIDE_COUNTS = (
    "fp8_m_grouped_gemm_nt_masked/e4m3xe5m2-bf16/1x128:128x128/m=16,n=129,k=127,g=4/a:pitch,masked_m:i64/family=randn/"
    "seed=11"
)
STATIC = "cutlass_moe_fp8/bf16xe4m3-bf16/tensor:tensor/t=4,e=3,h=64,i=32,k=2/family=randn/seed=12"
SIGNS = "hadamard_transform/bf16/1x16/m=17,k=192/family=randn/seed=12"
WITH_C = "fp8_gemm_nt_1d1d/e4m3xe4m3-f32/1x128:1x128/m=9,n=136,k=200/c=f32/family=randn/seed=12"
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


def subnormal(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    flat = inputs["scale"].view(torch.uint8)
    inputs["scale"] = flat.masked_fill((flat & 0x7F) <= 7, 0).view(inputs["scale"].dtype)


def one_tile_less(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    """Three tiles of 8x4 in a row, counted as two."""
    flat = inputs["scale"].view(torch.uint8).reshape(-1, 32)
    at = torch.arange(len(flat))
    inputs["scale"] = flat[at - at // 3].reshape(inputs["scale"].shape).view(inputs["scale"].dtype)


def quarters(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    flat = inputs["a_descale"].view(torch.uint8).reshape(-1, 32, 4, 4)
    made = flat[:, :, :1].expand(-1, -1, 4, -1).contiguous()
    inputs["a_descale"] = made.reshape(inputs["a_descale"].shape).view(inputs["a_descale"].dtype)


def minus_7(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    inputs["b_q"] = inputs["b_q"].clamp(min=-7)


def in_group(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    ends = inputs["offsets"].tolist()
    at = [row - max([0, *(end for end in ends if end <= row)]) for row in range(len(inputs["scale_a"]))]
    inputs["scale_a"] = inputs["scale_a"][at]


def one_scale(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    inputs["a2_scale"] = inputs["a1_scale"]


def short_mask(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    options["sign_mask"] = 55272 & 0xFF  # of the default


def some_of_c(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    inputs["c"] = inputs["c"].clone()
    inputs["c"][:, 128:] = 0


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
            (DEQUANTISE, subnormal, "scale of 1 to 7 (subnormal numbers of E4M3) taken as 0"),
            (SMALL_TILES, one_tile_less, "scale with 8x4 tiles in a row counted one too few"),
            (TILES, quarters, "a_descale of the rows of a 128x4 tile taken to be those of its first 32"),
            (INT4, minus_7, "b_q of -8 taken as -7"),
            (GROUPS, in_group, "scale_a taken by the place in the group of offsets"),
            (STATIC, one_scale, "a2_scale taken as a1_scale"),
            (SIGNS, short_mask, "sign_mask kept in 8 bits"),
            (WITH_C, some_of_c, "c from index 128 on left out"),
        ],
        ids=["absent", "first", "late", "narrow", "format", "words", "subnormal", "tiles", "quarters"]
        + ["int4", "group", "other", "8 bits", "c"],
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

    def test_offsets_of_64_bits_as_words(self):
        """Words are no rising offsets: each row has the last group that holds it. Of the first group alone it is not
        said."""
        call = call_of(WIDE_OFFSETS)
        right, ends = by_name(call.contract.reference(call.inputs, **call.options))["out"], call.inputs["offsets"]
        words, begin = ends.view(torch.int32)[: len(ends)].tolist(), 0
        output = torch.zeros_like(right, dtype=torch.float16)
        for group, end in enumerate(words):
            if end > begin:
                taken = torch.full_like(ends, end).masked_fill(torch.arange(len(ends)) < group, 0)
                made = by_name(call.contract.reference({**call.inputs, "offsets": taken}, **call.options))["out"]
                output[begin:end] = made[begin:end].half()
            begin = end
        assert said_of(call, {"out": output}) == "offsets (64 bits) read as words of 32 bits"
        output[0] = right[0].half()
        assert said_of(call, {"out": output}) is None

    def test_counts_of_64_bits_by_which_nobody_has_rows(self):
        """Nothing is computed then; where something is, or an index has 32 bits, it is not said."""
        call = call_of(WIDE_COUNTS)
        right = by_name(call.contract.reference(call.inputs, **call.options))["out"].bfloat16()
        nothing = {"out": torch.zeros_like(right)}
        assert said_of(call, nothing) == "masked_m (64 bits) read as words of 32 bits, by which no group has rows"
        narrow = {**call.inputs, "masked_m": call.inputs["masked_m"].int()}
        assert said_of(Call(call.contract, narrow, call.options, arch="cpu"), nothing) is None
        some = right.clone()
        some[:, 1:] = 0
        assert said_of(call, {"out": some}) is None

    def test_the_verdict_says_it(self):
        call = call_of(GROUPS)
        output = output_of(call, first)
        verdict = call.contract.judged(call, output)
        said = explain_verdict(verdict, call, output, numerics=None)
        assert said.explained_by


class TestNotNamed:
    def test_a_nan_that_only_the_change_has(self, monkeypatch):
        """Any choice is right under a NaN, so that it would explain all; the negative test takes the rule away."""
        call = call_of(ROUTES)
        output = {name: x.flip(0).contiguous() for name, x in output_of(call, lambda *_: None).items()}
        unknown = {**call.inputs, "bias": torch.full_like(call.inputs["bias"], torch.nan)}
        monkeypatch.setattr(other_calls, "_changes", lambda call: iter([("bias NaN", unknown, call.options)]))
        monkeypatch.setattr(other_calls, "_right", lambda *_: True)
        monkeypatch.setattr(other_calls, "_refuses_right", lambda *_: True)
        assert said_of(call, output) is None
        monkeypatch.setattr(other_calls, "_brings_nan", lambda inputs, call: False)
        assert said_of(call, output) == "bias NaN"

    def test_a_change_that_takes_the_right_result_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logits a unit in the last place away admit it; the negative test takes the rule away."""
        call = call_of(ROUTES)
        output = {name: x.flip(0).contiguous() for name, x in output_of(call, lambda *_: None).items()}
        logits = call.inputs["logits"]
        near = {**call.inputs, "logits": torch.nextafter(logits, torch.full_like(logits, torch.inf))}
        monkeypatch.setattr(other_calls, "_changes", lambda call: iter([("logits near", near, call.options)]))
        monkeypatch.setattr(other_calls, "_right", lambda *_: True)
        assert said_of(call, output) is None
        monkeypatch.setattr(other_calls, "_refuses_right", lambda *_: True)
        assert said_of(call, output) == "logits near"

    def test_what_is_missing_may_lie_elsewhere(self):
        """Rows that a call does not have hold numbers: the groups behind may be computed there."""
        call = call_of(MASKED)
        fewer = {**call.inputs, "masked_m": call.inputs["masked_m"].clamp(max=64)}
        made = by_name(call.contract.reference(fewer, **call.options))["out"]
        output = {"out": made.bfloat16().masked_fill(torch.isnan(made), 0)}
        found = said_of(call, output)
        assert found is not None
        assert found.startswith("masked_m cut to 64")
        free = torch.isnan(call.truth["out"])
        output["out"][free] = torch.randn(int(free.sum())).bfloat16()
        assert said_of(call, output) is None
        output["out"][free] = torch.nan
        assert said_of(call, output) is None
        output["out"][free] = 3.0  # what was there before
        assert said_of(call, output) is not None

    def test_a_change_that_lies_no_nearer_is_not_judged(self, monkeypatch):
        """The negative test judges every one of them."""
        call, asked = call_of(GROUPS), []
        output = {"out": call.truth["out"].bfloat16()}
        output["out"][20:40] = torch.randn(20, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        verdict, judged = call.contract.judged(call, output), type(call.contract).judged
        count = lambda self, *given: asked.append(1) or judged(self, *given)  # noqa: E731
        monkeypatch.setattr(type(call.contract), "judged", count)
        monkeypatch.setattr(other_calls, "_may_hold", lambda *given: True)  # which refuses most of these sooner
        assert taken_otherwise(call, output, verdict, None) is None
        few = len(asked)
        monkeypatch.setattr(other_calls, "_nearer", lambda changed, call, output: True)
        assert taken_otherwise(call, output, verdict, None) is None
        assert 4 * few < len(asked) - few

    def test_a_change_that_a_few_elements_refuse_is_not_compared(self, monkeypatch):
        """What the few refuse the whole output refuses; the negative tests ask them nothing, or let them refuse all."""
        call, asked = call_of(GROUPS), []
        output = {"out": torch.randn(call.truth["out"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()}
        monkeypatch.setattr(other_calls, "TRIED", 4)
        verdict, nearer, may_hold = call.contract.judged(call, output), other_calls._nearer, other_calls._may_hold
        monkeypatch.setattr(other_calls, "_nearer", lambda *given: asked.append(1) or nearer(*given))
        assert taken_otherwise(call, output, verdict, None) is None
        few = len(asked)
        monkeypatch.setattr(other_calls, "_may_hold", lambda *given: True)
        assert taken_otherwise(call, output, verdict, None) is None
        assert 8 * few < len(asked) - few
        monkeypatch.setattr(other_calls, "TRIED", 96)
        monkeypatch.setattr(other_calls, "_may_hold", may_hold)
        made = output_of(call, first)
        assert said_of(call, made) is not None
        monkeypatch.setattr(other_calls, "LISTED", 1.0)
        assert said_of(call, made) is None

    def test_a_few_elements_are_asked_by_their_bounds(self, monkeypatch):
        """Twice the right result is refused where the first look refuses nothing, and the right one is not; without
        elements to ask nothing is refused."""
        call = call_of(GROUPS)
        monkeypatch.setattr(other_calls, "LISTED", -1.0)
        right = {"out": call.truth["out"].bfloat16()}
        everywhere = {"out": torch.ones_like(right["out"], dtype=torch.bool)}
        double = {"out": right["out"] * 2}
        assert other_calls._may_hold(call, call, right, everywhere, None)
        assert not other_calls._may_hold(call, call, double, everywhere, None)
        assert other_calls._may_hold(call, call, double, {"out": ~everywhere["out"]}, None)

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
