"""MX and NVFP4: published bytes, padding that somebody owns, recipes as wholes, one typed error for a bad call."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from oracle.diagnosis.mutation import mutate, right_variants
from oracle.errors import DtypeError, InputError, NumericsError, OptionError, OracleError, ShapeError
from oracle.numbers.formats import E2M1, decode
from oracle.numbers.quantize import quantize
from oracle.numbers.recipe_table import of_element
from oracle.routines import cases, get, profiles, registered
from oracle.routines.base import by_name
from oracle.routines.catalogue import faults_of, run
from oracle.routines.catalogue import get as get_fault
from oracle.routines.fault import Call
from oracle.routines.mx import contract as mx
from oracle.routines.mx.cases import POISON
from oracle.routines.traits import Kind
from oracle.truth.layout import HEIGHTS
from oracle.verdict.compare import Status

SIGN = "sign of the codes lost"
SHAPES = ((1, 1), (5, 3), (8, 4), (9, 5), (128, 4), (130, 9), (33, 16))
TILED = pytest.mark.parametrize("layout", tuple(HEIGHTS))
BASE = ("mxfp8_quantize", "mxfp4_quantize", "nvfp4_quantize", "scaled_fp4_quant")
BASE_BACK = ("mxfp8_dequantize", "mxfp4_dequantize", "nvfp4_dequantize")
EACH = pytest.mark.parametrize("name", BASE)  # the further forms have tests of their own


def call_of(name: str, option: str = "", family: str = "randn", m: int = 17, k: int = 192) -> Call:
    grammar = cases.grammars()[name]
    case = cases.parse(f"{name}/{grammar.dtypes[0]}/{grammar.schemes[0]}/m={m},k={k}/{option}family={family}/seed=5")
    return Call(get(name), case.inputs(), case.call_options())


def judged(call: Call, output: object, numerics: str | None = None):  # type: ignore[no-untyped-def]
    return call.contract.judge(call.inputs, output, numerics=numerics, **call.options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["128x4", "linear"])
def test_columns_behind_the_values(layout: str) -> None:
    """Codes and scale bytes of zeros, as of the values with zeros behind them; any other byte there is refused."""
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    contract, wide = get("mxfp8_quantize"), torch.nn.functional.pad(x, (0, 32))
    made = contract.reference({"x": x}, layout=layout, alignment=128)
    due = contract.reference({"x": wide}, layout=layout)
    assert isinstance(made, dict) and isinstance(due, dict)
    assert all(torch.equal(made[name].view(torch.uint8), due[name].view(torch.uint8)) for name in ("q", "scale"))
    made["q"].view(torch.uint8)[4, 127] = 1
    assert contract.judge({"x": x}, made, arch="cpu", layout=layout, alignment=128).status.is_failure
    with pytest.raises(OptionError, match="alignment=48"):
        contract.check({"x": x}, {"alignment": 48})


class TestPlaces:
    """Every byte of a layout is one scale or padding; offsets are those of cuBLAS and TensorRT-LLM."""

    @TILED
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_bijection(self, layout: str, shape: tuple[int, int]) -> None:
        m, c = shape
        height, across = HEIGHTS[layout], -(-c // 4)
        number = torch.arange(m * c).reshape(m, c)
        memory = sum(mx.stored((number >> shift & 0xFF).to(torch.uint8), layout).long() << shift for shift in (0, 8))
        assert isinstance(memory, Tensor)
        pads = mx.padding_of(shape, layout)
        assert pads is not None and int((~pads).sum()) == m * c
        for i, j in itertools.product(range(m), range(c)):
            inside = (i % 8) * 4 if height == 8 else (i % 32) * 16 + (i % 128 // 32) * 4
            at = ((i // height) * across + j // 4) * height * 4 + inside + j % 4
            assert int(memory[at]) == i * c + j and not bool(pads[at])

    @pytest.mark.parametrize("layout", mx.LAYOUTS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_there_and_back_beside_poison(self, layout: str, shape: tuple[int, int]) -> None:
        scale = torch.arange(shape[0] * shape[1]).reshape(shape).to(torch.uint8)
        memory, pads = mx.stored(scale, layout), mx.padding_of(shape, layout)
        for poison in POISON.tolist():
            if pads is not None:
                memory.masked_fill_(pads, poison)
            assert torch.equal(mx.loaded(memory, shape, layout), scale)

    def test_the_layouts_differ(self) -> None:
        """The negative test: one layout read as another."""
        scale = torch.arange(128 * 8).reshape(128, 8).to(torch.uint8)
        flat = [mx.stored(scale, layout).flatten() for layout in mx.LAYOUTS]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(flat, 2))

    def test_nibbles(self) -> None:
        codes = torch.arange(16, dtype=torch.uint8).reshape(1, 16)
        assert mx.pack(codes).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
        assert torch.equal(mx.unpack(mx.pack(codes)), codes)


class TestPadding:
    """A quantiser writes zeros into the padding; what a dequantiser finds there changes nothing."""

    @pytest.mark.parametrize("poison", POISON.tolist())
    def test_padding_that_nobody_writes_is_free(self, poison: int) -> None:
        call = call_of("scaled_fp4_quant")
        made, pads = by_name(run(call)), mx.padding_of((17, 12), "128x4")
        assert pads is not None
        left = made["scale"].masked_fill(pads, poison)
        assert judged(call, {**made, "scale": left}).status is Status.PASSED
        assert judged(call, {**made, "scale": made["scale"].masked_fill(~pads, poison)}).status is Status.FAILED

    @pytest.mark.parametrize("name", BASE[:3])
    @TILED
    @pytest.mark.parametrize("poison", POISON.tolist())
    def test_a_quantiser_owns_it(self, name: str, layout: str, poison: int) -> None:
        call = call_of(name, "" if layout == "128x4" else f"layout={layout}/")
        made = by_name(run(call))
        assert not judged(call, made).status.is_failure
        contract = get(name)
        assert isinstance(contract, mx.BlockQuantiser)
        pads = mx.padding_of(contract.shape_of_scales(call), layout)
        assert pads is not None and bool(pads.any())
        for at in pads.nonzero()[:, 0][[0, -1]].tolist():
            left = made["scale"].clone()
            left[at] = poison
            verdict = judged(call, {**made, "scale": left})
            assert verdict.status is Status.FAILED and verdict.outside == 1

    @pytest.mark.parametrize("name", BASE_BACK)
    @TILED
    @pytest.mark.parametrize("poison", POISON.tolist())
    def test_a_dequantiser_does_not_read_it(self, name: str, layout: str, poison: int) -> None:
        call = call_of(name, "" if layout == "128x4" else f"layout={layout}/")
        contract = get(name)
        assert isinstance(contract, mx.BlockDequantiser)
        pads = mx.padding_of(contract.shape_of_scales(call.inputs), layout)
        assert pads is not None and bool(pads.any())
        other = {**call.inputs, "scale": call.inputs["scale"].masked_fill(pads, poison)}
        right = contract.reference(call.inputs, **call.options)
        assert torch.equal(right, contract.reference(other, **call.options))
        spoiled = {**call.inputs, "scale": call.inputs["scale"].masked_fill(~pads, poison)}
        assert not torch.equal(right, contract.reference(spoiled, **call.options))


class TestVerdicts:
    """Own bits pass, a changed nibble, byte or code fails; what a library gives passes as a whole."""

    @EACH
    def test_one_change_is_one_failure(self, name: str) -> None:
        call = call_of(name)
        made = by_name(run(call))
        assert judged(call, made).status is Status.PASSED
        q = made["q"].view(torch.uint8).clone()
        q[3, 7] ^= 0x24 if name != "mxfp8_quantize" else 0x08
        verdict = judged(call, {**made, "q": q.view(made["q"].dtype)})
        assert verdict.status is Status.FAILED and 1 <= verdict.outside <= 2
        scale = made["scale"].clone()
        scale[0] ^= 2
        verdict = judged(call, {**made, "scale": scale})
        assert verdict.status is Status.FAILED and verdict.worst.output == "scale"

    @EACH
    def test_each_recipe_of_the_contract_passes_and_can_be_declared(self, name: str) -> None:
        variants = list(right_variants(24, seed=11, contracts=[name]))
        assert not [v for v in variants if v.false_alarm] and {v.declared for v in variants} > {None}

    def test_policies_are_not_mixed(self) -> None:
        """torchao makes a block NaN, TransformerEngine an element: codes of one beside scales of the other."""
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
        x[0, 5], x[1] = math.nan, x[1] * 8
        contract = get("mxfp8_quantize")
        te, torchao = (contract.predict({"x": x}, numerics=n) for n in ("te_mxfp8_1x32", "torchao_mx_rceil"))
        for made in (te, torchao):
            assert contract.judge({"x": x}, made).status is Status.PASSED
        mixed = {"q": te["q"], "scale": torchao["scale"]}
        assert contract.judge({"x": x}, mixed).status is Status.FAILED

    def test_a_worked_block_in_its_bytes(self) -> None:
        """amax 3, e = 896: codes 3D679224 F0806C36, two a byte, under the scale byte 7E."""
        values = [
            0.75,
            -1.5,
            2.25,
            3,
            -0.1875,
            0.375,
            0.5625,
            1.125,
            -2.625,
            0,
            -0.0,
            0.046875,
            1.875,
            -0.9375,
            0.65625,
            2,
        ]
        inputs = {"x": torch.tensor([values]), "global_scale": torch.tensor([896.0])}
        made = by_name(get("nvfp4_quantize").reference(inputs, layout="8x4"))
        assert made["q"].numpy().tobytes().hex() == "d3762942" + "0f08c663"
        assert made["scale"].shape == (32,) and int(made["scale"][0]) == 0x7E and not made["scale"][1:].any()
        back = get("nvfp4_dequantize").reference(
            {"q": made["q"], "scale": made["scale"], "global_scale": torch.tensor([1 / 896.0])}, layout="8x4"
        )
        due = decode(mx.unpack(made["q"]), E2M1)[0] * 448 / 896
        assert isinstance(back, Tensor) and back.shape == (1, 16) and torch.allclose(back[0].double(), due, rtol=2e-7)

    def test_ties_are_decided_where_every_formula_is_exact(self) -> None:
        """Under powers of two DeepGEMM's ties toward zero fail; under another global scale either code passes."""
        x = torch.tensor([[6.0, *([2.5, 0.75, -3.5] * 5)]])
        contract = get("nvfp4_quantize")
        for e, status in ((1.0, Status.FAILED), (3.0, Status.PASSED)):
            inputs = {"x": x, "global_scale": torch.tensor([e])}
            down = {"x": torch.where(x == 6.0, x, x * (1 - 2.0**-20)), "global_scale": torch.tensor([e])}
            made = contract.reference(down, layout="linear")
            assert contract.judge(inputs, made, layout="linear").status is status

    def test_two_orders_of_three_factors(self) -> None:
        """(value * scale) * g and value * (scale * g) are right; a product through bfloat16 is not."""
        call = call_of("nvfp4_dequantize", "layout=linear/")
        contract = get("nvfp4_dequantize")
        assert isinstance(contract, mx.BlockDequantiser)
        first, second = contract.alternatives(call.inputs, call.resolved)
        assert not torch.equal(first, second)
        for made in (first, second):
            assert judged(call, made.float()).status is Status.PASSED
        assert judged(call, first.bfloat16().float()).status is Status.FAILED


@pytest.mark.turns(4)
class TestFaults:
    """Every fault is noticed on the cases of the quick profile."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("name", ["mxfp8_quantize", "mxfp4_dequantize"])
    def test_all_are_killed(self, name: str) -> None:
        score = mutate(name, with_rules=False)
        assert score.ratio == 1.0 and score.count(score.mutants[0].fate.SURVIVED) == 0
        assert len(score.mutants) == len(faults_of(name)) > 12

    def test_every_quantiser_and_dequantiser_has_those_of_the_family(self) -> None:
        for kind, fault in ((mx.BlockQuantiser, SIGN), (mx.BlockDequantiser, f"{SIGN} in reading")):
            having = {name for name, contract in registered().items() if isinstance(contract, kind)}
            assert get_fault(fault).contracts == having


class TestStrides:
    """Packed codes in any strides are the same codes."""

    NAMES = tuple(
        name
        for name, contract in registered().items()
        if any(spec.kind is Kind.CODES and torch.uint8 in spec.dtypes for spec in contract.inputs)
    )

    @pytest.mark.parametrize("name", NAMES)
    def test_column_major_codes(self, name: str) -> None:
        """The same bits."""
        case = next(iter(profiles.cases(name, "quick")))
        inputs, options = case.inputs(), case.call_options()
        due = by_name(get(name).reference(inputs, **options))
        packed = {n: x for n, x in inputs.items() if x.dtype in (torch.uint8, torch.int8) and x.dim() >= 2}
        for changed, x in packed.items():
            turned = {**inputs, changed: x.transpose(-1, -2).contiguous().transpose(-1, -2)}
            actual = by_name(get(name).reference(turned, **options))
            assert all(torch.equal(raw(actual[n]), raw(due[n])) for n in due), changed

    def test_pack_and_unpack(self) -> None:
        codes = torch.randint(0, 16, (6, 8), dtype=torch.uint8)
        packed = mx.pack(codes)
        assert torch.equal(mx.unpack(packed.t().contiguous().t()), codes)
        assert not torch.equal(mx.unpack((packed ^ 1).t().contiguous().t()), codes)


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class TestBadCalls:
    """One typed error that names the value."""

    @pytest.mark.parametrize(
        ("name", "change", "options", "error", "said"),
        [
            ("mxfp8_quantize", {"x": torch.ones(2, 48)}, {}, ShapeError, "K=48 is not a multiple of 32"),
            ("nvfp4_quantize", {"x": torch.ones(2, 24)}, {}, ShapeError, "K=24 is not a multiple of 16"),
            ("mxfp8_quantize", {"x": torch.ones(2, 64).double()}, {}, DtypeError, "float64"),
            ("mxfp4_quantize", {}, {"layout": "4x4"}, OptionError, "4x4"),
            ("mxfp4_quantize", {}, {"rounding": "nearest"}, OptionError, "nearest"),
            ("mxfp8_quantize", {}, {"element": "e2m1"}, OptionError, "e2m1"),
            ("nvfp4_quantize", {"global_scale": torch.zeros(1)}, {}, InputError, "global_scale is 0.0"),
            ("nvfp4_quantize", {"global_scale": torch.tensor([math.nan])}, {}, InputError, "global_scale is nan"),
            ("mxfp4_dequantize", {"scale": torch.zeros(7, dtype=torch.uint8)}, {}, ShapeError, "the 128x4 layout"),
            ("mxfp4_dequantize", {}, {"layout": "linear"}, ShapeError, "linear layout of these values"),
            ("mxfp4_dequantize", {"q": torch.zeros(2, 24, dtype=torch.uint8)}, {}, ShapeError, "K=48 codes a row"),
        ],
    )
    def test_refused(
        self, name: str, change: dict[str, Tensor], options: dict[str, object], error: type[OracleError], said: str
    ) -> None:
        call = call_of(name)
        with pytest.raises(error, match=said):
            get(name).reference({**call.inputs, **change}, **{**call.options, **options})

    @pytest.mark.parametrize("numerics", ["vllm_group", "torchao_mxfp6_e3m2_floor", "te_nvfp4", "deepgemm_1x128"])
    def test_recipes_of_something_else(self, numerics: str) -> None:
        call = call_of("mxfp4_quantize")
        with pytest.raises(NumericsError, match=r"flashinfer_mxfp4|blocks of 1x32"):
            judged(call, run(call), numerics)

    def test_scales_of_the_other_direction(self) -> None:
        call = call_of("nvfp4_quantize")
        with pytest.raises(NumericsError, match="publishes other scales"):
            judged(call, run(call), "torchao_nvfp4")
        assert judged(call, run(call), "te_nvfp4").status is Status.PASSED

    def test_identified_among_its_element(self) -> None:
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
        made = quantize(x, of_element(E2M1)[0])
        assert made.codes.dtype is torch.uint8
        call = call_of("mxfp4_quantize")
        best = get("mxfp4_quantize").identify(call.inputs, run(call), arch=None, **call.options)[0]
        assert best.schedule in {recipe.name for recipe in of_element(E2M1)} and best.equal == 1.0
