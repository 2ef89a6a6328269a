"""Further forms of MX and NVFP4: places of experts, what nobody owns, seeds, two scales, rows, recipes by name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.diagnosis.mutation import Fate, listed, mutate
from oracle.errors import InputError, NumericsError, OptionError, OracleError, ShapeError
from oracle.numbers.formats import E2M1, decode
from oracle.numbers.recipes import Candidates, PowerOfTwo
from oracle.numbers.scaling import ScaleFormat
from oracle.routines import cases, get, registered
from oracle.routines.base import by_name
from oracle.routines.catalogue import catalogue, faults_of, run
from oracle.routines.fault import Call
from oracle.routines.mx.columns import DIRECTIONS
from oracle.routines.mx.contract import unpack
from oracle.routines.mx.experts import PLACEMENTS, ContiguousQuantiser, ExpertQuantiser, starts
from oracle.routines.mx.more_cases import GRAMMARS
from oracle.truth.hadamard import transform_ends
from oracle.verdict.compare import Status
from tests.support.paths import ROOT

POISON = {"NaN": 0x7F, "NaN of E8M0": 0xFF, "the largest": 0x7E, "infinity of E5M2": 0x7C}
PLACED = [name for name, contract in registered().items() if isinstance(contract, ExpertQuantiser)]


def call_of(name: str, option: str = "", family: str = "randn") -> Call:
    grammar = cases.grammars()[name]
    rows = 150 if "experts" in name else 64 if name == "mxfp8_quantize_3d" else 9
    plain = "m=64,k=96" if name.startswith("mxfp8_quantize_") else "m=16,k=192"
    extents = {("m", "k"): plain, ("g", "m", "k"): f"g=3,m={rows},k=64"}[grammar.extents]
    case = cases.parse(f"{name}/{grammar.dtypes[0]}/{grammar.schemes[0]}/{extents}/{option}family={family}/seed=5")
    return Call(get(name), case.inputs(), case.call_options())


def judged(call: Call, output: object, numerics: str | None = None, **options: object):  # type: ignore[no-untyped-def]
    given = {**call.options, **options}
    return call.contract.judge(call.inputs, output, numerics=numerics, **given)  # type: ignore[arg-type]


class TestPlaces:
    """Each placement puts every byte once; they are not interchangeable."""

    def test_published_starts(self) -> None:
        """m_indptr 0 4 132 132 260: FlashInfer starts at 0 128 384 512 and ends at 768, tight ones at 0 128 256 256."""
        offsets = [0, 4, 132, 132, 260]
        assert starts(offsets, "flashinfer") == [0, 128, 384, 512, 768]
        assert starts(offsets, "tight") == [0, 128, 256, 256, 384]

    @pytest.mark.parametrize("counts", list(itertools.product((0, 1, 128, 129, 300), repeat=3))[::7])
    def test_tiles_of_experts_never_meet(self, counts: tuple[int, ...]) -> None:
        offsets = [0, *itertools.accumulate(counts)]
        for placement in PLACEMENTS:
            places = starts(offsets, placement)
            assert all(place % 128 == 0 for place in places)
            assert all(b - a >= count for a, b, count in zip(places, places[1:], counts, strict=False))
            assert places[-1] <= (offsets[-1] + 127 * len(counts)) // 128 * 128

    @pytest.mark.parametrize("name", PLACED)
    def test_there_and_back(self, name: str) -> None:
        call = call_of(name)
        contract = call.contract
        assert isinstance(contract, ExpertQuantiser)
        m, c = contract.shape_of_scales(call)
        scale = (torch.arange(m * c) % 255 + 1).to(torch.uint8).reshape(m, c)
        memory = contract.memory(scale, call)
        assert int((memory != 0).sum()) == m * c and torch.equal(contract.padding(call), memory == 0)
        assert torch.equal(contract.scales_of(memory, call), scale)

    @pytest.mark.parametrize("name", [n for n in PLACED if isinstance(get(n), ContiguousQuantiser)])
    def test_one_placement_is_refused_for_the_other(self, name: str) -> None:
        tight, flashinfer = call_of(name), call_of(name, "placement=flashinfer/")
        made = run(Call(tight.contract, tight.inputs, flashinfer.options))
        assert judged(tight, made).status is Status.FAILED
        assert judged(tight, made, placement="flashinfer").status is Status.PASSED


class TestWhatNobodyOwns:
    """Rows and bytes of no expert hold anything; those of an expert do not."""

    @pytest.mark.parametrize("name", PLACED)
    @pytest.mark.parametrize("poison", POISON.values(), ids=list(POISON))
    def test_padding_is_free(self, name: str, poison: int) -> None:
        call = call_of(name)
        contract, made = call.contract, by_name(run(call))
        assert isinstance(contract, ExpertQuantiser)
        due, dirty, spoiled = contract.outputs(call), {}, {}
        for output, tensor in made.items():
            owned, bits = due[output].specified, tensor.contiguous().view(torch.uint8)
            assert owned is not None and not bool(owned.all())
            owned = owned.expand_as(bits)
            dirty[output] = bits.masked_fill(~owned, poison).view(tensor.dtype)
            spoiled[output] = bits.masked_fill(owned, poison).view(tensor.dtype)
        assert judged(call, dirty).status is Status.PASSED
        for output in made:
            assert judged(call, made | {output: spoiled[output]}).status is Status.FAILED

    @pytest.mark.parametrize("name", PLACED)
    def test_rows_of_nobody_are_not_read(self, name: str) -> None:
        """The cases leave NaN, infinity and large values there; other values change nothing that is owned."""
        call = call_of(name)
        x = call.inputs["x"]
        other = {**call.inputs, "x": torch.where(torch.isfinite(x) & (x.abs() < 1e29), x, 1.0)}
        assert not torch.equal(other["x"].nan_to_num(7), x.nan_to_num(7))
        assert judged(call, run(Call(call.contract, other, call.options))).status is Status.PASSED


class TestRandomBits:
    """Any seed conforms; the declared one is exact when it is asked for by name."""

    def test_seeds(self) -> None:
        call = call_of("nvfp4_quantize_stochastic")
        mine, other = (get(call.contract.name).reference(call.inputs, seed=seed) for seed in (5_000_015, 9))
        assert not torch.equal(by_name(mine)["q"], by_name(other)["q"])
        for made in (mine, other):
            assert judged(call, made).status is Status.PASSED
        assert judged(call, mine, "nvfp4_seeded").status is Status.PASSED
        assert judged(call, other, "nvfp4_seeded").status is Status.FAILED

    def test_two_steps_fail(self) -> None:
        call = call_of("nvfp4_quantize_stochastic")
        made = by_name(run(call))
        codes = unpack(made["q"])
        codes = torch.where(codes & 7 < 5, codes + 3, codes - 3)
        assert judged(call, made | {"q": codes[:, ::2] | codes[:, 1::2] << 4}).status is Status.FAILED


class TestForms:
    """What one form alone promises."""

    def test_a_scale_of_sixteen_rows_stands_in_each(self) -> None:
        call = call_of("nvfp4_quantize_2d", "layout=linear/")
        made = by_name(run(call))
        assert bool((made["scale"] == made["scale"][0]).all()) and judged(call, made).status is Status.PASSED
        made["scale"][7, 3] ^= 1
        assert judged(call, made).status is Status.FAILED

    def test_a_weight_and_its_transpose_have_one_code(self) -> None:
        x = torch.randn(32, 48, generator=torch.Generator().manual_seed(8))
        contract, g = get("nvfp4_quantize_2d"), torch.tensor([400.0])
        one, two = (by_name(contract.reference({"x": t.contiguous(), "global_scale": g})) for t in (x, x.T))
        assert torch.equal(unpack(one["q"]), unpack(two["q"]).T)

    @pytest.mark.parametrize("error", [c.name.lower() for c in Candidates])
    def test_the_candidate_that_errs_less(self, error: str) -> None:
        """amax 6 and many 4.5: under 1.5 times the scale 6 is coded 4 and 4.5 is coded 3, both exactly."""
        x = torch.tensor([[6.0] + [4.5] * 15, [6.0] + [4.0] * 15])
        inputs = {"x": x, "global_scale": torch.ones(1)}
        made = by_name(get("nvfp4_quantize_4over6").reference(inputs, layout="linear", error=error))
        scale = decode(made["scale"].view(torch.float8_e4m3fn)).flatten().tolist()
        assert scale == [1.5, 1.0] and decode(unpack(made["q"]), E2M1)[0, :2].tolist() == [4.0, 3.0]

    def test_codes_follow_the_row_scale_that_was_published(self) -> None:
        call = call_of("nvfp4_quantize_per_token")
        made = by_name(run(call))
        beside = torch.nextafter(made["row_scale"], torch.tensor(1e9))
        assert judged(call, made | {"row_scale": beside}).status is Status.PASSED
        assert judged(call, made | {"row_scale": made["row_scale"] * 1.001}).status is Status.FAILED
        zero = made["row_scale"].clone()
        zero[1] = 2.0**-128
        assert judged(call, made | {"row_scale": zero}).status is Status.PASSED

    def test_values_between_two_ends_admit_both(self) -> None:
        """A transform beside a midpoint of bfloat16 has two values, and so two codes where a code lies between."""
        call = call_of("nvfp4_quantize_rht")
        middle, low, high = transform_ends(call.inputs["x"], torch.bfloat16)
        for x in (low, high):
            made = get("nvfp4_quantize").reference({"x": x, "global_scale": call.inputs["global_scale"]})
            assert judged(call, made).status is Status.PASSED
        far = get("nvfp4_quantize").reference({"x": middle * 1.2, "global_scale": call.inputs["global_scale"]})
        assert judged(call, far).status is Status.FAILED

    def test_a_relabelled_scale_changes_no_value(self) -> None:
        call = call_of("block_scales_to_mxfp8", "layout=linear/")
        made = by_name(run(call))["out"]
        back = get("mxfp8_dequantize").reference({"q": call.inputs["x"], "scale": made}, layout="linear")
        scale = decode(call.inputs["scale"]).repeat_interleave(128, dim=1)[:, : made.shape[1] * 32]
        assert isinstance(back, Tensor)
        assert torch.equal(back, (decode(call.inputs["x"]) * scale).float())


class TestByName:
    """A kernel that declares nothing is identified by its formula."""

    @pytest.mark.parametrize(
        ("name", "recipe"),
        [
            ("nvfp4_quantize", "trtllm_nvfp4"),
            ("nvfp4_quantize", "te_nvfp4"),
            ("nvfp4_quantize", "te_nvfp4_reference"),
            ("nvfp4_quantize", "flashinfer_nvfp4_4over6_mse"),
            ("nvfp4_quantize_4over6", "te_nvfp4"),
            ("nvfp4_quantize_stochastic", "nvfp4_seeded"),
            ("mxfp8_experts_quant", "flashinfer_cutile_mxfp8"),
            ("mxint8_quantize", "ocp_mxint8_floor"),
            ("mxfp6_quantize", "torchao_mxfp6_e3m2_rceil"),
            ("per_token_cast_to_fp4", "deepgemm_fp4"),
        ],
    )
    def test_identified(self, name: str, recipe: str) -> None:
        call = call_of(name, family="fp4ties" if recipe == "te_nvfp4_reference" else "randn")
        made = call.contract.predict(call.inputs, numerics=recipe, **call.options)
        found = call.contract.identify(call.inputs, made, arch=None, **call.options)
        assert recipe in {match.schedule for match in found if match.equal == 1.0}
        assert found[-1].equal < 1.0 or len(found) == 1


@pytest.mark.turns(4)
class TestFaults:
    """Every fault of the further quantisers is noticed, or argued."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", sorted(GRAMMARS))
    def test_all_are_killed(self, name: str) -> None:
        score = mutate(name, with_rules=False)
        assert score.ratio == 1.0 and score.count(score.mutants[0].fate.SURVIVED) == 0
        assert len(score.mutants) == len(faults_of(name)) >= 5

    ZERO_BLOCKS = catalogue()["NaN scale of a block of zeros under an infinite global scale"]

    @pytest.mark.parametrize("name", sorted(ZERO_BLOCKS.contracts))
    def test_an_infinite_global_scale_is_listed(self, name: str) -> None:
        """2688/0 of a tensor of zeros; under any other scale the fault cannot be put into the call."""
        case = next(case for case in listed(name, "quick") if case.option("global") == "inf")
        call = Call(get(name), case.inputs(), case.call_options())
        assert not judged(call, run(call)).status.is_failure
        assert judged(call, run(call, self.ZERO_BLOCKS)).status.is_failure
        assert self.ZERO_BLOCKS.applies(replace(call, inputs={**call.inputs, "global_scale": torch.ones(1)}))

    @pytest.mark.turns(4)
    def test_what_no_call_of_an_mx_weight_shows(self) -> None:
        """``mxfp8_to_fp8_block`` has one recipe, whose scales are no powers of two and stand for blocks of a tensor; a
        code times a power of two has four significant bits; blocks have whole 32s of columns, and no listed block is
        zeros. No other fault of it is untried."""
        untried = {m.fault for m in mutate("mxfp8_to_fp8_block", with_rules=False).mutants if m.fate is Fate.UNTRIED}
        assert untried == {
            "E8M0 byte 0 published as 0",
            "UE8M0 scale of amax/448 rounded down",
            "UE8M0 scale rounded to the nearest power of two",
            "UE8M0 scale that needs no rounding doubled",
            "amax of the first 8,192 elements of a tensor",
            "scale rounded down to a power of two",
            "quotient rounded to bfloat16 first",
            "reciprocal of the scale rounded to bfloat16",
            "amax floor missing, scale of zeros 0",
            "amax scan leaves out the columns behind the last whole 4",
            "amax scan leaves out the columns behind the last whole 16",
        }
        call = call_of("mxfp8_to_fp8_block")
        (recipe,) = call.contract.declared(call.inputs, call.resolved)
        assert recipe.scale_format is not ScaleFormat.UE8M0 and recipe.power_of_two is not PowerOfTwo.CEIL
        significand = torch.frexp(decode(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)))[0]
        finite = significand[torch.isfinite(significand)]
        assert bool((finite * 16 == torch.trunc(finite * 16)).all())
        assert not bool((finite * 8 == torch.trunc(finite * 8)).all())


class TestBadCalls:
    """One typed error that names the value."""

    @pytest.mark.parametrize(
        ("name", "change", "options", "error", "said"),
        [
            ("mxfp6_quantize", {}, {"element": "e4m3"}, OptionError, "e4m3"),
            ("mxfp6_dequantize", {"q": torch.full((16, 192), 64, dtype=torch.uint8)}, {}, InputError, "64 is no code"),
            ("per_token_cast_to_fp4", {"x": torch.ones(2, 33)}, {}, ShapeError, "K=33 is odd"),
            ("cast_back_from_fp4", {"scale": torch.ones(16, 9)}, {}, ShapeError, "9 columns"),
            ("nvfp4_quantize_stochastic", {}, {"seed": -1}, OptionError, "seed=-1"),
            ("nvfp4_quantize_2d", {"x": torch.ones(8, 64)}, {}, ShapeError, "M=8 is not a multiple of 16"),
            ("hadamard_transform", {}, {"sign_mask": 1 << 16}, OptionError, "65536"),
            ("hadamard_transform", {"x": torch.full((1, 16), 1e38).bfloat16()}, {}, InputError, "overflow"),
            ("scaled_fp4_grouped_quantize", {"mask": torch.tensor([10, 0, 1]).int()}, {}, InputError, "0 to 9"),
            ("mxfp8_grouped_quantize", {"mask": torch.zeros(3).int()}, {}, InputError, "no expert has a row"),
            ("mxfp8_experts_quant", {"expert_offsets": torch.tensor([0, 5, 3]).int()}, {}, InputError, "rise"),
            ("scaled_fp4_experts_quant", {"global_scale": torch.ones(2)}, {}, ShapeError, "3 experts"),
            ("block_scales_to_mxfp8", {"scale": torch.full((16, 2), 3.0)}, {}, InputError, "holds 3.0"),
            ("fp8_block_to_mxfp8", {"block_scale": torch.ones(3, 2)}, {}, ShapeError, "1x128 or 128x128"),
            ("mxfp8_to_fp8_block", {"mx_scale": torch.zeros(5, dtype=torch.uint8)}, {}, ShapeError, "layout"),
        ],
    )
    def test_refused(
        self, name: str, change: dict[str, Tensor], options: dict[str, object], error: type[OracleError], said: str
    ) -> None:
        call = call_of(name)
        with pytest.raises(error, match=said):
            get(name).reference({**call.inputs, **change}, **{**call.options, **options})

    def test_a_recipe_of_other_blocks(self) -> None:
        call = call_of("nvfp4_quantize_2d")
        with pytest.raises(NumericsError, match="te_nvfp4_2d"):
            judged(call, run(call), "te_nvfp4")


def test_the_page_of_findings_names_entries_of_the_catalogue() -> None:
    """Each candidate of the table has at least one fault, and no other text stands in its column."""
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    table = text.split("| in the source | catalogue | run |\n|---|---|---|\n")[1].split("\n\n")[0]
    named = [row.split("|")[2].strip().split("; ") for row in table.splitlines()]
    assert len(named) == 18 and not {name for names in named for name in names} - set(catalogue())


class TestTransposes:
    """Columns are the rows of the transpose; squares are those of either."""

    @pytest.mark.parametrize("layout", ["128x4", "compact"])
    def test_weights_of_experts(self, layout: str) -> None:
        """Each weight is the matrix of its columns."""
        x = call_of("mxfp8_quantize_3d").inputs["x"]
        whole = by_name(get("mxfp8_quantize_3d").reference({"x": x}, layout=layout))
        for e, weight in enumerate(x):
            one = by_name(get("mxfp8_quantize_columnwise").reference({"x": weight.contiguous()}, layout=layout))
            assert torch.equal(whole["q"][e].view(torch.uint8), one["q"].view(torch.uint8))
            assert torch.equal(whole["scale"][e], one["scale"])
        assert len(x) > 1

    @pytest.mark.parametrize("layout", ["128x4", "8x4", "linear"])
    def test_columns(self, layout: str) -> None:
        x = call_of("mxfp8_quantize_columnwise").inputs["x"]
        down = by_name(get("mxfp8_quantize_columnwise").reference({"x": x}, layout=layout))
        across = by_name(get("mxfp8_quantize").reference({"x": x.t().contiguous()}, layout=layout))
        assert torch.equal(down["q"].view(torch.uint8).t(), across["q"].view(torch.uint8))
        assert torch.equal(down["scale"], across["scale"])
        compact = by_name(get("mxfp8_quantize_columnwise").reference({"x": x}, layout="compact"))["scale"]
        linear = by_name(get("mxfp8_quantize_columnwise").reference({"x": x}, layout="linear"))["scale"]
        assert torch.equal(compact.t(), linear)
        back = get("mxfp8_dequantize_columnwise").reference(down, layout=layout)
        assert torch.equal(back, get("mxfp8_dequantize").reference(across, layout=layout).t())  # type: ignore[union-attr]

    def test_squares(self) -> None:
        call = call_of("mxfp8_quantize_2d")
        contract, x = call.contract, call.inputs["x"]
        rows, columns = (by_name(contract.reference({"x": x}, layout="linear", direction=d)) for d in DIRECTIONS)
        turned = by_name(contract.reference({"x": x.t().contiguous()}, layout="linear"))
        assert torch.equal(rows["q"].view(torch.uint8).t(), turned["q"].view(torch.uint8))
        assert torch.equal(columns["scale"], turned["scale"]) and not torch.equal(rows["scale"].t(), columns["scale"])
        back = [
            get(name).reference(made, layout="linear")
            for name, made in (("mxfp8_dequantize", rows), ("mxfp8_dequantize_columnwise", columns))
        ]
        assert torch.equal(*back)
        assert judged(call, rows, layout="linear", direction="rowwise").status is Status.PASSED
        assert judged(call, rows | {"q": columns["q"].flip(0)}, layout="linear").status is Status.FAILED

    def test_a_recipe_of_rows_can_be_declared(self) -> None:
        call = call_of("mxfp8_quantize_columnwise", "rounding=floor/")
        made = call.contract.predict(call.inputs, numerics="microxcaling_mxfp8_e4m3_floor", **call.options)
        assert judged(call, made, "microxcaling_mxfp8_e4m3_floor").status is Status.PASSED
        assert judged(call, made).status is Status.FAILED  # truncated codes
