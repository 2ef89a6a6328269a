"""The gate for reach: a default case of ``validate`` has every admitted value, or an exemption names it.

A right kernel of every contract passes its drawn cases: one of each here, all of them with ``--full``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle import cache
from oracle.routines import cases, drawn, reached
from oracle.routines.case import Case
from oracle.routines.edges import valid
from oracle.verdict.compare import Status
from tests.support.legal import right_call

CONTRACTS = sorted(cases.grammars())
SIZED = CONTRACTS[::16]


def judged(case: Case) -> Status:
    """The verdict on what a right kernel makes of a case."""
    call = right_call(case)
    return call.contract.judge(call.inputs, call.contract.kernel(call), arch=call.arch, **call.options).status


@pytest.mark.turns(4)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_admitted_value_is_reached_by_calls_that_a_right_kernel_passes(
    contract: str, request: pytest.FixtureRequest
) -> None:
    """The drawn cases are looked at first; the profile and the edges where these leave something, and with ``--full``.
    One drawn case is judged, all of them and those at sizes of real models with ``--full``.
    """
    drawn_ones = drawn.drawn_cases(contract, 0)
    full = request.config.getoption("--full")
    found = reached.gaps(contract, drawn_ones)
    found = reached.gaps(contract, drawn.default_cases(contract, 0)) if found or full else found
    exempt = {gap for gap in reached.EXEMPT if gap.startswith(f"{contract}: ")}
    assert {f"{contract}: {gap}" for gap in found} == exempt
    assert not drawn.short(drawn_ones)
    changed = [case for case in drawn_ones if case.changes] or drawn_ones
    chosen = [*drawn_ones, *drawn.real_cases(contract, 0)] if full else [random.Random(contract).choice(changed)]
    assert not [str(case) for case in chosen if judged(case).is_failure]


def test_exemptions_are_of_contracts_and_say_why() -> None:
    assert all(key.partition(": ")[0] in CONTRACTS and reason for key, reason in reached.EXEMPT.items())


@pytest.mark.turns(4)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("contract", "without", "gap"),
    [
        ("scaled_fp8_quant", "scale_ub", "optional scale_ub=given"),
        ("concat_and_cache_mla", "slot_mapping:i32", "width slot_mapping=i32"),
        ("calc_diff", "x:e5m2fnuz", "dtype x=e5m2fnuz"),
        ("silu_and_mul_per_block_quant", "rounding:product", "option rounding=product"),
        ("per_token_group_quant_fp8", "eps:", "another value eps=not 1e-10"),
    ],
)
def test_a_value_that_the_draw_leaves_out_is_a_gap(contract: str, without: str, gap: str) -> None:
    kept = [case for case in drawn.default_cases(contract, 0) if without not in str(case)]
    assert gap in map(str, reached.gaps(contract, kept))


@pytest.mark.turns(4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("contract", "word", "gap"),
    [
        ("silu_and_mul_quant", "x:midpoints", "data x=midpoints"),
        ("per_tensor_dequantize", "inv_scale:ties", "data inv_scale=ties"),
        ("calc_diff", "x:powers", "data x=powers"),
        ("scaled_fp4_experts_quant", "expert_offsets:last_group", "data expert_offsets=last_group"),
    ],
)
def test_data_of_a_kind_that_no_case_has_are_a_gap(contract: str, word: str, gap: str) -> None:
    chosen = drawn.default_cases(contract, 0)
    assert not reached.gaps(contract, chosen)
    assert gap in map(str, reached.gaps(contract, [case for case in chosen if word not in str(case)]))


@pytest.mark.turns(4)
def test_a_word_that_the_smallest_case_of_its_kind_lacks_is_no_gap() -> None:
    """Of two cases that differ in their seed, one has whole tiles along K; without it none has."""
    chosen = drawn.default_cases("scaled_grouped_mm_mx_k_groups", 0)
    assert not reached.gaps("scaled_grouped_mm_mx_k_groups", chosen)
    kept = [case for case in chosen if not str(case).endswith("m=33,n=136,k=416,g=4/family=randn/seed=1")]
    gap, calls = reached.Gap("data", "offs", "whole"), reached.Calls()
    assert [reached.has_word(some, gap, calls) for some in (chosen, kept)] == [True, False]


@pytest.mark.turns(4)
def test_an_edge_that_no_case_lies_at_is_a_gap() -> None:
    kept = [case for case in drawn.default_cases("fp8_gemm_nt", 0) if case["k"] % 128 != 127]
    assert "edge k=128n-1" in map(str, reached.gaps("fp8_gemm_nt", kept))


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("contract", "name"), [("cp_gather_cache", "c"), ("fp8_mqa_logits", "n"), ("convert_fp8", "p")]
)
def test_an_extent_beyond_1024_that_no_case_has_is_short(contract: str, name: str) -> None:
    chosen = drawn.drawn_cases(contract, 0)
    assert not drawn.short(chosen)
    assert name in drawn.short([case for case in chosen if case[name] <= drawn.LOOPS])


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("contract", "words"),
    [
        ("per_token_group_quant_fp8", {"group_size:256"}),
        ("shuffle_matrix_a", {"epilogue_tile_m:64"}),
        ("get_paged_mqa_logits_metadata", {"block_size:32", "block_size:128", "context_lens:each"}),
        ("Fp8LinearOp", {"weight_scale:column", "input_scale:column", "use_per_token_if_dynamic:True"}),
        ("mxfp8_experts_quant", {"expert_offsets:whole"}),
        ("gather_and_maybe_dequant_cache", {"seq_starts:before"}),
    ],
)
def test_both_sides_of_an_option_and_other_shapes_are_drawn(contract: str, words: set[str]) -> None:
    drawn_words = {f"{name}:{value}" for case in drawn.drawn_cases(contract, 0) for name, value in case.changes}
    assert words <= drawn_words


@pytest.mark.turns(4)
class TestArray:
    @property
    def gemm(self) -> list[Case]:
        return drawn.drawn_cases("fp8_gemm_nt", 5)

    def test_it_is_the_same_for_a_seed(self) -> None:
        assert drawn.drawn_cases("fp8_gemm_nt", 5) == self.gemm
        assert {case.seed for case in self.gemm} == {5} and len(set(self.gemm)) == len(self.gemm)

    def test_each_pair_of_levels_stands_in_one_case(self) -> None:
        rows = [{("dtypes", c.dtypes), ("k", c["k"]), *c.changes} for c in self.gemm]
        levels = {
            name: {level for row in rows for level in row if level[0] == name} for name in ("dtypes", "k", "out_dtype")
        }
        assert len(levels["dtypes"]) == 6 and len(levels["k"]) >= 3 and levels["out_dtype"] == {("out_dtype", "None")}
        for first, second in (("dtypes", "k"), ("dtypes", "out_dtype"), ("k", "out_dtype")):
            for one in levels[first]:
                for other in levels[second]:
                    assert any({one, other} <= row for row in rows), (one, other)

    def test_ids_are_read_again_and_are_valid_calls(self) -> None:
        for name in ("fp8_gemm_nt", "cutlass_moe_fp8", "calc_diff", "swizzle_scale", "fused_add_rmsnorm_quant"):
            found = drawn.drawn_cases(name, 3)
            assert found and all(cases.parse(str(case)) == case and valid(case) for case in found)


@pytest.mark.turns(4)
def test_a_kernel_that_reads_past_the_pitch_fails_where_only_a_drawn_case_looks() -> None:
    """One that takes the rows of its keys as if they followed each other."""
    found = drawn.default_cases("reshape_and_cache_flash", 1)
    pitched = [case for case in found if "key" in case.pitches and case["t"] > 1]
    for case in (pitched[0], next(case for case in found if not case.pitches and case["t"] > 1)):
        call = right_call(case)
        key = call.inputs["key"]
        dense = key.as_strided(key.shape, torch.empty(key.shape).stride())
        output = call.contract.kernel(replace(call, inputs={**call.inputs, "key": dense}))
        verdict = call.contract.judge(call.inputs, output, arch=call.arch, **call.options)
        assert (verdict.status is Status.FAILED) == bool(case.pitches)


@pytest.mark.turns(4)
class TestSizesOfRealModels:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        ("contract", "name", "size"),
        [
            ("fp8_gemm_nt", "k", 7168),
            ("per_token_group_quant_fp8", "k", 7168),
            ("moe_fp8", "e", 256),
            ("moe_routing", "k", 8),
            ("moe_routing", "t", 65536),
            ("concat_and_cache_mla", "r", 512),
            ("reshape_and_cache_flash", "d", 256),
            ("append_paged_kv_cache", "b", 64),
        ],
    )
    def test_a_case_has_it(self, contract: str, name: str, size: int) -> None:
        assert size in {case[name] for case in drawn.real_cases(contract, 1)}

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        ("contract", "extents"),
        [
            ("fp8_gemm_nt", {"m": 64, "n": 256, "k": 7168}),
            ("per_token_group_quant_fp8", {"m": 4096, "k": 7168}),
            ("concat_and_cache_mla", {"t": 1024, "r": 512}),
        ],
    )
    def test_a_full_profile_has_several_extents_of_a_model_at_once(
        self, contract: str, extents: dict[str, int]
    ) -> None:
        full, quick = ({c for c in drawn.default_cases(contract, 1, p) if c.seed == 1} for p in ("full", "quick"))
        assert any(dict(case.extents).items() >= extents.items() for case in full)
        assert not any(dict(case.extents).items() >= extents.items() for case in quick)
        assert all(drawn.cost(case) <= drawn.FULL for case in drawn.real_cases(contract, 1, drawn.FULL))

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("contract", SIZED)
    def test_a_call_is_small_enough_to_be_judged(self, contract: str) -> None:
        found = drawn.real_cases(contract, 1)
        assert len(found) <= 4 and all(drawn.cost(case) <= drawn.REAL for case in found)


@pytest.mark.turns(2)
class TestKept:
    """The drawn cases of a contract of this package are kept between processes; those of another one are not."""

    NAME = "ceil_to_ue8m0"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        return tmp_path / "fp8-oracle"

    def test_what_is_kept_is_what_is_drawn(self, folder: Path) -> None:
        draws = iter([drawn._covering, None])

        def covering(contract: str) -> tuple[Case, ...]:
            return next(draws)(contract)  # type: ignore[misc]

        drawn.real_cases(self.NAME, 0)  # which the draw asks for, and keeps by themselves
        others = {*folder.glob("*")}
        first = drawn._kept(covering, self.NAME)
        assert drawn._kept(covering, self.NAME) == first == drawn._covering(self.NAME)
        (kept,) = {*folder.iterdir()} - others
        kept.write_text(f"{first[0]}\n")  # the negative test: what lies there is read
        assert drawn._kept(covering, self.NAME) == first[:1]

    def test_nothing_is_kept(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drawn, "BUILT_IN", ())
        assert drawn._kept(drawn._covering, self.NAME) and not folder.exists()
        monkeypatch.undo()
        monkeypatch.setenv("FP8_ORACLE_CACHE", "0")
        assert drawn._kept(drawn._covering, self.NAME) and cache.place("cases", self.NAME) is None


@pytest.mark.turns(4)
def test_two_long_extents_of_a_large_call_stand_in_two_calls() -> None:
    """1,100 tokens of 1,100 columns took longer to judge than all other calls of this routine together."""
    long = [dict(case.extents) for case in drawn.drawn_cases("concat_and_cache_mla", 0)]
    assert any(one["t"] > drawn.LOOPS for one in long) and any(one["r"] > drawn.LOOPS for one in long)
    assert not any(one["t"] > drawn.LOOPS and one["r"] > drawn.LOOPS for one in long)


@pytest.mark.turns(4)
def test_words_of_data_stand_in_no_call_of_256_experts() -> None:
    """Unless every element has them: there the largest call shows most."""
    many = [case for case in drawn.drawn_cases("fused_experts_block", 0) if case["e"] == 256]
    assert not any(reached.volume(case) > reached.ENOUGH for case in many)
