"""Layers of experts in blocks: a second derivation, kernels of their own, faults of each step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.bounds.accumulator import of_schedule
from oracle.bounds.boxed import Box, boxed_product
from oracle.bounds.code_boxes import code_boxes
from oracle.errors import InputError, NumericsError, ShapeError
from oracle.numbers import mx_recipes, recipes
from oracle.numbers.formats import BF16, E2M1, decode, of_dtype
from oracle.numbers.quantize import quantize
from oracle.routines import Call, cases, get
from oracle.routines.moe.block_layers import CONTRACTS
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.routing import Span
from oracle.verdict.compare import Status
from tests.routines.moe.test_activations import array
from tests.support.slow_oracle.block_layers import ROWS, layer
from tests.support.slow_oracle.numbers import same

NAMES = sorted(CONTRACTS)


def case_of(name: str, options: str = "", shape: str = "t=3,e=2,h=32,i=32,k=2") -> cases.Case:
    grammar = CONTRACTS[name].row
    element = "e2m1" if grammar.packed else "e4m3"
    scheme = f"1x{grammar.width}:1x{grammar.width}"
    rows = "bf16" if not grammar.given else "e2m1" if grammar.leveled else "e4m3"
    return cases.parse(f"{name}/{rows}x{element}-bf16/{scheme}/{shape}/{options}family=randn/seed=3")


def options_of(name: str) -> list[str]:
    row = CONTRACTS[name].row
    return ["", *(["map=1/"] if row.mapped else []), *(["bias=1,gates=1/"] if row.affine else [])]


class TestSecondDerivation:
    """Fractions, with no code of the first."""

    @pytest.mark.parametrize("name", NAMES)
    def test_equal_bits(self, name: str) -> None:
        assert set(ROWS) == set(CONTRACTS)
        for options in options_of(name):
            case = case_of(name, options)
            inputs, call = case.inputs(), case.call_options()
            due = get(name).reference(inputs, **call)
            found = layer(name, {key: array(x) for key, x in inputs.items()}, call)
            codes = array(due).codes
            assert all(same(f, w, "bfloat16") for f, w in zip(found, codes, strict=True)), str(case)
            rows = "a" if "a" in inputs else "x"
            other = array(get(name).reference({**inputs, rows: inputs[rows].roll(1, dims=1)}, **call)).codes  # type: ignore[arg-type]
            assert any(not same(f, w, "bfloat16") for f, w in zip(found, other, strict=True))


class TestVerdicts:
    """The reference passes on every arch; one step wrong fails."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", NAMES)
    def test_right_and_wrong(self, name: str) -> None:
        case = case_of(name, options_of(name)[-1], "t=4,e=3,h=64,i=64,k=2")
        inputs, call, contract = case.inputs(), case.call_options(), get(name)
        right = contract.reference(inputs, **call)
        assert isinstance(right, Tensor)
        for arch in ("cpu", "sm100"):
            assert contract.judge(inputs, right, arch=arch, **call).status is Status.PASSED
        wrong = {
            "scales": {"w13_scale": inputs["w13_scale"].roll(1, dims=2)},
            "halves": {"w13": torch.cat(inputs["w13"].chunk(2, dim=1)[::-1], dim=1)},
            "nibbles": {"w2": (inputs["w2"] >> 4) | (inputs["w2"] << 4)} if contract.row.packed else {},  # type: ignore[attr-defined]
            "experts": {"w2": inputs["w2"].roll(1, dims=0)},
        }
        for words, change in wrong.items():
            if change:
                out = contract.reference(inputs | change, **call)
                assert contract.judge(inputs, out, arch="cpu", **call).status is Status.FAILED, words

    def test_global_scales_belong_to_experts(self) -> None:
        case = case_of("cutlass_moe_fp4", "", "t=6,e=3,h=64,i=64,k=2")
        inputs = case.inputs()
        contract = get("cutlass_moe_fp4")
        for name in ("a1_gscale", "a2_gscale", "alpha1", "alpha2"):
            out = contract.reference(inputs | {name: inputs[name].roll(1)})
            assert contract.judge(inputs, out, arch="cpu").status is Status.FAILED, name


class TestRanks:
    """Experts of other ranks are dropped, and what the ranks give adds up to the whole layer."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", NAMES)
    def test_parts_add_up(self, name: str) -> None:
        inputs, contract = case_of(name, "", "t=5,e=4,h=32,i=32,k=1").inputs(), get(name)
        whole = contract.reference(inputs)
        parts = []
        for first in (0, 2):
            own = {key: x[first : first + 2] if x.shape[0] == 4 else x for key, x in inputs.items()}
            parts.append(contract.reference(own, first_expert=first))
        assert isinstance(whole, Tensor) and torch.equal(sum(parts), whole)  # type: ignore[arg-type]
        assert any(not torch.equal(part, whole) for part in parts)  # type: ignore[arg-type]


class TestBoxes:
    """What a quantiser gives of any value inside an interval lies in one of its boxes."""

    @pytest.mark.parametrize(
        ("recipe", "given"),
        [
            (mx_recipes.FLASHINFER_NVFP4_EXACT, 2688 / 3.7),
            (mx_recipes.FLASHINFER_NVFP4, 2688 / 3.7),
            (mx_recipes.VLLM_NVFP4, 11.0),
            (mx_recipes.VLLM_MXFP4_EXPERTS, None),
            (recipes.TE_MXFP8_1X32, None),
        ],
        ids=lambda x: getattr(x, "name", ""),
    )
    def test_codes_are_in_a_box(self, recipe: recipes.Recipe, given: float | None) -> None:
        scale = None if given is None else torch.tensor([given])
        for seed in range(12):
            g = torch.Generator().manual_seed(seed)
            x = (torch.randn(3, 64, generator=g) * 2.0 ** (seed % 5 - 3)).bfloat16()
            x[2] = 0.0
            steps = torch.randint(0, 3, x.shape, generator=g).to(torch.int16)
            high = torch.where(x > 0, (x.view(torch.int16) + steps).view(torch.bfloat16), x)
            boxes, _ = code_boxes(Span(decode(x), decode(high)), recipe, BF16, None, global_scale=scale)
            for inside in (x, high, torch.where(steps % 2 == 0, x, high)):
                made = quantize(inside, recipe, global_scale=scale)
                codes = decode(made.codes, E2M1) if recipe.element is E2M1 else decode(made.codes)
                s, width = decode(made.scale), recipe.block.columns or 0
                held = torch.zeros(3, 64 // width, dtype=torch.bool)
                for box in boxes:
                    within = (box.low <= codes) & (codes <= box.high)
                    zero = s == 0
                    of = (box.scale_low <= s) & (s <= box.scale_high)
                    held |= of & (within.reshape(3, -1, width).all(dim=2) | zero)
                assert bool(held.all()), (recipe.name, seed)

    def test_a_block_scaled_step_loses_less_than_float32(self) -> None:
        """The condition under which the any-order bound holds, and an accumulator that is coarser."""
        x = torch.ones(2, 64, dtype=torch.float64)
        box = Box(x, x, torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64), E2M1)
        b, scale = torch.full((3, 64), 2, dtype=torch.uint8), torch.ones(3, 4)
        for name in ("sm100.chain_nvf4", "sm100.chain_ue8m0", "sm120.chain_nvf4"):
            acc = of_schedule(get_schedule(name))
            found = boxed_product([box], b, scale, block=16, b_rows=1, acc=acc)
            assert bool((found.low <= 64).all() & (found.high >= 64).all())
            with pytest.raises(NumericsError, match="fused truncating"):
                boxed_product([box], b, scale, block=16, b_rows=1, acc=replace(acc, align=12))


class TestCalls:
    """Bad calls are named."""

    def test_named(self) -> None:
        inputs = case_of("cutlass_fused_moe_nvfp4", "bias=1,gates=1/").inputs()
        contract, out = get("cutlass_fused_moe_nvfp4"), torch.zeros(3, 32, dtype=torch.bfloat16)
        scale = inputs["w2_scale"].clone()
        scale[0, 0, 0] = 0x7F
        for change, error, match in (
            ({"w2_scale": scale}, InputError, "NaN byte"),
            ({"a1_gscale": torch.zeros(2)}, InputError, "a1_gscale"),
            ({"b1": torch.full((2, 64), torch.nan)}, InputError, "b1"),
            ({"gates": torch.zeros(2, 3)}, InputError, "gates"),
            ({"w2_scale": scale[:, :, :1].contiguous()}, ShapeError, "w2_scale"),
            ({"w13": inputs["w13"][:, :32].contiguous(), "b1": torch.zeros(2, 32)}, ShapeError, "w13"),
        ):
            with pytest.raises(error, match=match):
                Call(contract, inputs | change).checked()
        assert of_dtype(torch.bfloat16) is BF16 and contract.outputs(Call(contract, inputs))["out"].shape == out.shape
