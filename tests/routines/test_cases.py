"""Cases: one string is the whole case, and its data are the same everywhere."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.errors import CaseError, OracleError
from oracle.numbers.formats import E4M3FN, codes_of, decode, of_dtype, same_bits
from oracle.numbers.rounding import Overflow, Rounding, encode
from oracle.routines import cases, data, get, profiles, registered
from oracle.routines.base import Call, by_name
from oracle.routines.edges import valid
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as schedule
from oracle.tensorcore.schedules import schedules
from oracle.truth.gemm import exact, rounded
from oracle.verdict.sets import rounded_to

EXAMPLE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=7,n=512,k=2688/family=randn/seed=41"


@cache
def every() -> list[str]:
    """The ids of all profiles, made when a test asks for them: each worker imports this file."""
    return [str(case) for name in cases.grammars() for case in profiles.cases(name, "full")]


EVERY = st.deferred(lambda: st.sampled_from(every()))


class TestCaseId:
    """One case is one string; parsing and printing are inverse."""

    def test_the_example_of_the_documentation(self) -> None:
        case = cases.parse(EXAMPLE)
        assert (case["m"], case["n"], case["k"], case.seed, case.family) == (7, 512, 2688, 41, "randn")
        assert str(case) == EXAMPLE

    def test_family_may_be_left_out(self) -> None:
        assert str(cases.parse(EXAMPLE.replace("family=randn/", ""))) == EXAMPLE

    @given(EVERY)
    def test_round_trip(self, text: str) -> None:
        assert str(cases.parse(text)) == text
        assert cases.parse(str(cases.parse(text))) == cases.parse(text)

    @given(EVERY, st.integers(0, 10**9), st.data())
    def test_round_trip_of_other_extents(self, text: str, seed: int, draw: st.DataObject) -> None:
        case = cases.parse(text)
        extents = tuple((name, draw.draw(st.integers(1, 10**6))) for name, _ in case.extents)
        other = replace(case, extents=extents, seed=seed)
        assert cases.parse(str(other)) == other

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (("fp8_gemm_nt", "fp9_gemm"), "fp9_gemm"),
            (("e4m3xe4m3-bf16", "e4m3xe4m3-int8"), "e4m3xe4m3-int8"),
            (("1x128:128x128", "1x64:64x64"), "1x64:64x64"),
            (("m=7", "m=0"), "m=0"),
            (("m=7", "m=-7"), "-7"),
            (("m=7", "m=07"), "07"),
            (("m=7,", ""), "m="),
            (("m=7", "m=7,m=8"), "'m'"),
            (("k=2688", "k=2688,z=1"), "'z'"),
            (("m=7", "m"), "'m'"),
            (("family=randn", "family=gauss"), "gauss"),
            (("seed=41", "seed=x"), "seed='x'"),
            (("/seed=41", ""), "seed"),
            (("seed=41", "seed=4²"), "4²"),
        ],
    )
    def test_what_does_not_parse_is_named(self, change: tuple[str, str], named: str) -> None:
        with pytest.raises(CaseError) as caught:
            cases.parse(EXAMPLE.replace(*change))
        assert named in str(caught.value)

    @given(st.text("".join(map(chr, (*range(0x180), 0x202E, 0xD800, 0xFFFF, 0x1F600))), max_size=60))
    def test_any_other_text_is_a_case_error(self, text: str) -> None:
        with pytest.raises(CaseError):
            cases.parse(text)


# sha256 over the codes (or float bits) of 5 x 300 values under the label "pinned". They change only if the data of
# every published case id change; then the generator's promise is broken, not this table.
WORDS = ["0x689658c3999de2d5", "0x7644efb8993b42fa", "0x31e163eb4d50904c"]
OPERANDS = {
    "cancel": ["9d0dd6cdd132675c", "d2061ec3d5487e70", "967ee5c741f4c6af", "9fd41fae111082f2"],
    "codes": ["e61539084efe3212", "e61539084efe3212", "49a778b00151af44", "49a778b00151af44"],
    "exact": ["8224c63f048098d9", "8224c63f048098d9", "54e069338634ab7a", "54e069338634ab7a"],
    "heavy": ["d99142ac34cda562", "d99142ac34cda562", "b7af71b951493cae", "b7af71b951493cae"],
    "nan": ["1b5669849be92ae3", "1b5669849be92ae3", "43650a8c790a276a", "43650a8c790a276a"],
    "nanscale": ["eb718722911f4350", "eb718722911f4350", "1dd2288affa83712", "1dd2288affa83712"],
    "outlier": ["35d3aa216159cd18", "223b246c3093d028", "212009132a7bc89a", "65ff314600e161bb"],
    "positive": ["d91ec90e29c796e6", "d91ec90e29c796e6", "aac665bfca021dfe", "aac665bfca021dfe"],
    "randn": ["eb718722911f4350", "eb718722911f4350", "1dd2288affa83712", "1dd2288affa83712"],
    "spike": ["4672fa05f69868ce", "ebf72b48be991a4f", "f66cc8b12fe871a8", "1845a7a5b4003d18"],
    "subnormal": ["5ccf4dab190dc43f", "5ccf4dab190dc43f", "cfabc7d9bacf1692", "cfabc7d9bacf1692"],
    "ties": ["95bd7b43c67e388c", "26b6b516bceca524", "bb14ef7ce4779294", "731c139106178bfe"],
    "wide": ["eb718722911f4350", "eb718722911f4350", "1dd2288affa83712", "1dd2288affa83712"],
    # of EDGE_FAMILIES
    "large": ["eb718722911f4350", "eb718722911f4350", "1dd2288affa83712", "1dd2288affa83712"],
    "overflow": ["343766a57af93c02", "fca50c01f51ce8c2", "43580a8fbab0e115", "320b26494a2957be"],
    "small": ["eb718722911f4350", "eb718722911f4350", "1dd2288affa83712", "1dd2288affa83712"],
    "underflow": ["cfb981a63b7150bc", "cfb981a63b7150bc", "995654b4a7bd0ae2", "995654b4a7bd0ae2"],
    "underflow16": ["cfb981a63b7150bc", "cfb981a63b7150bc", "995654b4a7bd0ae2", "995654b4a7bd0ae2"],
    "zeros": ["53c23880ea86fa24", "b0bdc8762ad5ef6a", "fdd741022c0fb8a5", "5bf39f1c2cdd0aa5"],
}
ACTIVATIONS = {
    "amax": ["c8baa475c728ed2a", "d88002a04bcbbbb0", "5d3a57b1b53bbbf3"],
    "heavy": ["34e8371d0eebedfa", "2592af045edbf92f", "e301545dd8e0ea95"],
    "nan": ["cca71aec3cc41039", "c85fe5440c5d5248", "787bc9761d75c2fa"],
    "outlier": ["576cde6bd21b4b2a", "9ef86cc09625fd25", "9ffa29a38786965c"],
    "randn": ["f925c9007500d0aa", "353f6f9a0c4ad260", "0d3b078253018339"],
    "range": ["464b7232f4d92287", "2c97d79db94d1526", "7b5de210fb275b9d"],
    "special": ["5036ebc8969a07c3", "e027133766024fc3", "8035da4d3ed4cbf8"],
    "ties": ["228e02c83bfed3f4", "476530bb992aa4fe", "81727caf949185b2"],
}
BLOCKS = {
    "fp4ties": ["aa29a101b169f24b", "c7b590e0affe661f", "42e149e9d31f8fc5"],
    "steps": ["647edabafa7639df", "06fc9a5c74f4f3a3", "116b20b17571bd83"],
}
EDGES = {
    "large": ["d041509550d1c3a7", "47673a5de1e887bb", "eb9d113c52120228"],
    "overflow": ["b854bca646c8471f", "3f506b04d53f0254", "9e2cf72346710af0"],
    "small": ["c48ef5e39395773d", "a2e30246fc8fe13a", "f665cdc7207a1fdb"],
    "underflow": ["a095fdfa81d3e184", "70d42ed6a19e411e", "6a498b1858609207"],
    "underflow16": ["6c88c56e8c66c11e", "8e5721e2ca68ff9b", "d83096294d1d84a9"],
}
SCALES = {
    "exact": "dac077505e8549aa",
    "nanscale": "612fe6fa78ad06fe",
    "randn": "6470f229f53f3897",
    "ties": "dac077505e8549aa",
    "wide": "ed7bd9c42b929ff8",
}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class TestPrepared:
    """Inputs that were drawn to see whether a case is a call are those of its first call, and of no later one."""

    TEXT = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=9,n=136,k=200/seed=5"

    def test_once(self) -> None:
        case = cases.parse(self.TEXT)
        whole = cases.parse(
            "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=256,n=128,k=128,g=2/seed=5"
        )
        assert valid(case) and valid(whole) and not valid(replace(whole, extents=(("m", 129), *whole.extents[1:])))
        first, second = case.inputs(), case.inputs()
        fresh = cases.parse(self.TEXT).inputs()
        for name, x in fresh.items():
            assert same_bits(first[name], x).all() and same_bits(second[name], x).all()
            assert first[name].data_ptr() != second[name].data_ptr()

    def test_the_first_call_has_what_was_prepared(self) -> None:
        case, ready = cases.parse(self.TEXT), {"a": torch.zeros(3)}
        case.prepare(ready)
        assert case.inputs()["a"] is ready["a"] and case.inputs().keys() != ready.keys()

    def test_large_inputs_do_not_wait(self) -> None:
        case = cases.parse(self.TEXT)
        case.prepare({"a": torch.zeros((1 << 21) + 1, dtype=torch.uint8)})
        assert case.inputs()["a"].numel() == 9 * 200


class TestSameEverywhere:
    """Data come from a counter-based generator and exact arithmetic: the same bits on every machine."""

    def test_philox_words(self) -> None:
        """The first words of the stream, so that a change of the generator itself is told from one of a family."""
        assert [hex(int(word)) for word in data.Stream("pinned").words(3)] == WORDS

    @pytest.mark.parametrize("family", sorted([*data.OPERAND_FAMILIES, *data.EDGE_FAMILIES]))
    def test_operands(self, family: str) -> None:
        found = [
            digest(data.operand("pinned", family, 5, 300, dtype=dtype, side=side))
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            for side in "ab"
        ]
        assert found == OPERANDS[family]

    @pytest.mark.parametrize("family", sorted([*data.ACTIVATION_FAMILIES, *data.BLOCK_FAMILIES]))
    def test_activations(self, family: str) -> None:
        found = [
            digest(data.activations("pinned", family, 5, 300, dtype=dtype))
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ]
        assert found == {**ACTIVATIONS, **BLOCKS}[family]

    @pytest.mark.parametrize("family", sorted({"randn", *data.SCALE_RULES}))
    def test_scales(self, family: str) -> None:
        assert digest(data.scales("pinned", family, (5, 7))) == SCALES[family]

    @pytest.mark.parametrize("family", sorted(data.EDGE_FAMILIES))
    def test_scales_of_edges(self, family: str) -> None:
        assert [digest(data.scales("pinned", family, shape)) for shape in ((5, 7), (1, 9), (1,))] == EDGES[family]

    def test_two_cases_share_no_tensor(self) -> None:
        small = EXAMPLE.replace("k=2688", "k=256")
        one, other = cases.parse(small).inputs(), cases.parse(small.replace("seed=41", "seed=42")).inputs()
        assert all(digest(one[name]) != digest(other[name]) for name in one)


class TestFamilies:
    """Each family has the property it exists for."""

    def test_scales_are_distinct_and_no_power_of_two(self) -> None:
        values = data.scales("s", "randn", (64, 56)).double()
        assert values.unique().numel() == values.numel()
        assert bool((torch.frexp(values)[0] != 0.5).all())

    def test_neighbouring_blocks_differ_enough_to_be_told_apart(self) -> None:
        """A wrong scale index must change the result by more than the accumulator's error."""
        values = data.scales("s", "randn", (64, 56)).double()
        apart = (values[:, 1:] / values[:, :-1] - 1).abs()
        assert float((apart > 0.01).double().mean()) > 0.98

    def test_every_finite_code_occurs(self) -> None:
        codes = data.operand("c", "codes", 8, 64, dtype=torch.float8_e4m3fn, side="a").view(torch.uint8)
        assert set(codes.flatten().tolist()) == set(range(256)) - {0x7F, 0xFF}

    def test_nan_family_has_both_nan_codes(self) -> None:
        codes = data.operand("c", "nan", 64, 128, dtype=torch.float8_e4m3fn, side="a").view(torch.uint8)
        assert {0x7F, 0xFF} <= set(codes.flatten().tolist())

    @pytest.mark.parametrize("cols", [128, 640, 2688, 8192])
    def test_exact_family_fits_the_narrowest_accumulator(self, cols: int) -> None:
        a, b = (decode(data.operand(side, "exact", 4, cols, dtype=torch.float8_e4m3fn, side=side)) for side in "ab")
        assert float((a.abs() @ b.abs().T).max()) <= data.EXACT_BUDGET

    def test_zeros_family_has_zero_groups_and_negative_zero(self) -> None:
        codes = data.operand("z", "zeros", 16, 512, dtype=torch.float8_e4m3fn, side="a").view(torch.uint8)
        groups = decode(codes.view(torch.float8_e4m3fn)).reshape(16, 4, 128)
        assert bool((groups == 0).all(dim=2).any())
        assert bool((codes == 0x80).any())

    def test_spike_family_hides_the_small_terms(self) -> None:
        x = decode(data.operand("s", "spike", 4, 128, dtype=torch.float8_e4m3fn, side="a")).reshape(4, 4, 32).abs()
        assert bool(((x == 448).sum(dim=2) == 1).all())
        assert float(x[x < 448].max()) <= 7 / 512

    def test_outliers_sit_late_in_a_block(self) -> None:
        x = data.activations("o", "outlier", 256, 256, dtype=torch.float32).abs().reshape(2, 128, 256)
        assert float(x[:, :96].max()) < 7 < float(x[:, 96:].max())

    def test_amax_family_walks_through_all_significands(self) -> None:
        x = data.activations("o", "amax", 64, 256, dtype=torch.bfloat16).double().reshape(64, 2, 128)
        assert x.abs().amax(dim=2).unique().numel() == 128

    def test_ties_family_lies_on_midpoints(self) -> None:
        """Every value but the amax is half way between two codes of its row's scale."""
        x = data.activations("t", "ties", 16, 128, dtype=torch.bfloat16).double()
        codes = x / (x.abs().amax(dim=1, keepdim=True) / 448)
        grid = decode(torch.arange(127, dtype=torch.uint8), E4M3FN)
        middle = (grid[1:] + grid[:-1]) / 2
        assert bool(torch.isin(codes.abs(), torch.cat([middle, grid[-1:]])).all())

    def test_dtypes_of_small_integers(self) -> None:
        x = data.small_integers("i", (100,), bound=8, dtype=torch.bfloat16)
        assert x.dtype == torch.bfloat16
        assert set(x.tolist()) <= set(range(-8, 9))

    def test_integers_refuse_an_empty_range(self) -> None:
        with pytest.raises(ValueError, match="low < high|high - low"):
            data.Stream("x").integers(3, 3, (1,))

    def test_normals_have_the_stated_moments(self) -> None:
        x = data.Stream("n").normals((200_000,))
        assert abs(float(np.mean(x))) < 0.01
        assert abs(float(np.var(x)) - 1) < 0.02


EXACT = (
    "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=33,n=64,k=384/bias=bf16",
    "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=33,n=64,k=384",
)


def modelled(text: str) -> list[str]:
    """The schedules of every arch that a case admits."""
    case = cases.parse(text)
    call = Call(get(case.contract), case.inputs(), case.call_options()).checked()
    admitted = {name for names in call.contract.numerics_of(call).values() for name in names}
    return [known.name for known in schedules() if known.name in admitted]


class TestExactTier:
    """First exact, then close: on the exact family every accumulator gives the same bits."""

    def run(self, text: str, family: str, name: str) -> bool:
        case = cases.parse(f"{text}/family={family}/seed=3")
        (part,) = get(case.contract).parts(case.inputs())  # type: ignore[attr-defined]  # both are product contracts
        right = rounded(part.product, exact(part.product), torch.bfloat16)
        return bool(same_bits(predict_product(part.product, schedule(name), out_dtype=torch.bfloat16), right).all())

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("family", ["exact", "ties"])
    @pytest.mark.parametrize(
        ("text", "name"), [(text, name) for text in EXACT for name in modelled(f"{text}/family=exact/seed=3")]
    )
    def test_every_schedule_gives_the_exact_bits(self, text: str, family: str, name: str) -> None:
        assert self.run(text, family, name)

    def test_other_data_do_tell_schedules_apart(self) -> None:
        """The negative test: the check fails on data that no schedule sums exactly."""
        assert not self.run(EXACT[0], "positive", "sm90.chain")


class TestProfiles:
    """The lists contain what kernels are known to break on, and every listed case is a valid call."""

    @pytest.mark.parametrize("contract", registered())
    def test_every_quick_case_is_a_valid_call(self, contract: str) -> None:
        small = [case for case in profiles.cases(contract, "quick") if dict(case.extents).get("k", 0) <= 640]
        for case in small:
            get(contract).check(case.inputs(), case.call_options())
        assert small

    @pytest.mark.parametrize("contract", registered())
    def test_the_truth_passes_its_own_judgement(self, contract: str) -> None:
        """A case on which even the reference is refused or fails would be no test of a kernel."""
        listed = profiles.cases(contract, "quick")
        for case in listed[:: max(1, len(listed) // 6)]:
            inputs, call, found = case.inputs(), case.call_options(), get(contract)
            truth = found.reference(inputs, **call)
            due = found.outputs(Call(found, inputs, call))
            truth = {
                name: x if x.dtype in due[name].dtypes else rounded_to(x, due[name].dtypes[0])
                for name, x in by_name(truth).items()
            }
            verdict = found.judge(inputs, truth, arch="cpu", numerics=None, **call)
            assert not verdict.status.is_failure, f"{case}: {verdict.summary}"

    def test_every_contract_has_cases(self) -> None:
        assert not [name for name in registered() if not profiles.cases(name, "quick")]

    def test_block_shapes_are_hostile(self) -> None:
        listed = profiles.cases("fp8_gemm_nt", "quick")
        assert {31, 32, 33} <= {case["m"] for case in listed}
        assert {1, 2, 3, 5} <= {case["k"] // 128 for case in listed}
        assert any(case["m"] == case["k"] // 128 for case in listed), "a_scale is square somewhere"
        assert any(-(-case["n"] // 128) == case["k"] // 128 > 1 for case in listed), "b_scale is square somewhere"
        assert {case.family for case in listed} == set(data.OPERAND_FAMILIES)

    @pytest.mark.parametrize(
        "contract",
        ["fp8_gemm_nt", "cutlass_scaled_mm", "m_grouped_fp8_gemm_nt_contiguous", "fp8_m_grouped_gemm_nt_masked"],
    )
    def test_every_dtype_that_is_accepted_has_a_case(self, contract: str) -> None:
        """Operands, outputs, biases: what the contract's own inputs and options admit, and nothing less."""
        found = get(contract)
        codes = {spec.name: set(spec.dtypes) for spec in found.inputs if spec.name in ("a", "b", "bias")}
        listed = profiles.cases(contract, "quick")
        made: dict[str, set[object]] = {name: set() for name in codes}
        for dtypes, bias in {(c.dtypes, c.option("bias")): c for c in listed}:
            inputs = next(c for c in listed if (c.dtypes, c.option("bias")) == (dtypes, bias)).inputs()
            for name in set(codes) & set(inputs):
                made[name].add(inputs[name].dtype)
        assert made == codes
        assert {case.out_dtype for case in listed} == {torch.bfloat16, torch.float16, torch.float32}

    def test_full_contains_quick(self) -> None:
        for name in cases.grammars():
            assert set(profiles.cases(name, "quick")) <= set(profiles.cases(name, "full"))

    def test_no_case_is_listed_twice(self) -> None:
        assert len(every()) == len(set(every()))

    def test_unknown_profile(self) -> None:
        with pytest.raises(CaseError, match="quick, full"):
            profiles.cases("fp8_gemm_nt", "huge")

    def test_an_impossible_case_is_refused_by_name(self) -> None:
        with pytest.raises(OracleError, match="130"):
            cases.parse(
                "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=130,n=64,k=128,g=2/seed=1"
            ).inputs()


def test_what_is_drawn_at_once() -> None:
    """Many normals are rounded by a table, and few entries of a permutation taken without the others: the same data."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        fmt = of_dtype(dtype)
        for shape in ((3, 5), (300, 700)):
            drawn = data.operand("table", "randn", *shape, dtype=dtype, side="a")
            due = encode(
                torch.from_numpy(data.Stream("table").normals(shape) * data.SIGMA),
                fmt,
                rounding=Rounding.NEAREST_EVEN,
                overflow=Overflow.SATURATE,
            )
            assert drawn.shape == shape and torch.equal(codes_of(drawn).view(torch.uint8), due)
    for count, first in ((1, 1), (7, 3), (5000, 254), (254, 254), (10, 20)):
        assert (data.Stream("order").order(count, first) == data.Stream("order").order(count)[:first]).all()
