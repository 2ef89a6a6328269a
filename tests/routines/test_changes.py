"""What a case id may change of a call: spelled and read again, made by the suite's own rounding, refused by name."""

from __future__ import annotations

import pytest
import torch

from oracle.errors import CaseError
from oracle.numbers.formats import decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines import cases, changes, get
from oracle.routines.cases import Case
from oracle.routines.edges import valid

SLOTS = "reshape_and_cache_flash/bf16-e4m3/tensor/t=3,h=1,d=16,p=4/{}/family=randn/seed=1"
GEMM = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=24,k=200/{}/family=randn/seed=1"
BOUND = "scaled_fp8_quant/bf16-e4m3/token/m=5,k=64/{}/family=randn/seed=1"


def pair(text: str, changed: str) -> tuple[Case, Case]:
    """The case of an id, and the one with these changes."""
    return cases.parse(text.replace("{}/", "")), cases.parse(text.format(changed))


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (SLOTS, "key:pitch,slot_mapping:i32"),
        (GEMM, "a:e5m2,a:pitch,out_dtype:None"),
        (GEMM, "out_dtype:float32"),
        (BOUND, "scale_ub:f32"),
    ],
)
def test_an_id_says_it_and_is_read_again(text: str, changed: str) -> None:
    case = cases.parse(text.format(changed))
    assert str(case) == text.format(changed) and cases.parse(str(case)) == case and valid(case)


def test_the_order_of_an_id_is_that_of_the_contract() -> None:
    assert str(cases.parse(GEMM.format("out_dtype:None,b:pitch,a:e5m2"))) == GEMM.format(
        "a:e5m2,b:pitch,out_dtype:None"
    )


def test_other_shapes_of_the_same_elements() -> None:
    linear = "Fp8LinearOp/bf16xe4m3-bf16/tensor:channel/m=16,n=16,k=32/{}/family=randn/seed=1"
    plain, case = pair(linear, "input:axes,weight_scale:column")
    before, after = plain.inputs(), case.inputs()
    assert valid(case) and cases.parse(str(case)) == case
    assert after["input"].shape == (1, 16, 32) and torch.equal(after["input"][0], before["input"])
    assert after["weight_scale"].shape == (16, 1) and torch.equal(after["weight_scale"][:, 0], before["weight_scale"])
    with pytest.raises(CaseError, match="weight"):
        cases.parse(linear.format("weight:axes"))  # its dims are named


def test_other_inputs_are_those_of_the_case_without_changes() -> None:
    plain, case = pair(SLOTS, "slot_mapping:i32,value:f16")
    before, after = plain.inputs(), case.inputs()
    assert list(before) == list(after) and after["slot_mapping"].dtype == torch.int32
    assert torch.equal(before["slot_mapping"], after["slot_mapping"].long())
    assert all(
        torch.equal(before[name].view(torch.uint8), x.view(torch.uint8))
        for name, x in after.items()
        if name not in ("slot_mapping", "value")
    )
    due = to_dtype(decode(before["value"]), torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)
    assert torch.equal(after["value"].view(torch.int16), due.view(torch.int16))


def test_codes_of_another_format_are_rounded_and_saturate() -> None:
    plain, case = pair(GEMM, "a:e5m2")
    before, after = plain.inputs()["a"], case.inputs()["a"]
    due = to_dtype(decode(before), torch.float8_e5m2, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)
    assert torch.equal(after.view(torch.uint8), due.view(torch.uint8))
    assert not torch.equal(decode(after), decode(before))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 7)])
def test_a_pitched_view_has_the_values_and_poison_behind_its_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    view = changes.pitch(x)
    assert (
        torch.equal(view.float(), x.float()) and not view.is_contiguous() and view.untyped_storage().nbytes() > x.nbytes
    )
    whole = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    assert int((whole == 255).sum()) >= view.untyped_storage().nbytes() - x.nbytes


def test_columns_of_a_transposed_matrix_are_pitched() -> None:
    x = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    assert changes.pitch(x).stride() == (1, 4 + changes.BEHIND)


def test_a_new_input_is_made_of_its_kind() -> None:
    ids = "cutlass_moe_fp8/bf16xe4m3-bf16/tensor:tensor/t=4,e=3,h=64,i=32,k=2/expert_map:i64/family=randn/seed=1"
    made = cases.parse(ids).inputs()["expert_map"]
    assert made.dtype == torch.int64 and sorted(made.tolist())[0] == -1 and made.unique().numel() == 3
    bound = cases.parse(BOUND.format("scale_ub:f32")).inputs()["scale_ub"]
    assert bound.numel() == 1 and 0.1 < float(bound) < 10


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("c:pitch", "no input or option 'c'"),
        ("a:f16", "is no change of input a"),
        ("a:none", "is no change of input a"),
        ("a_scale:pitch", "is no change of input a_scale"),
        ("out_dtype:float64", "not admitted"),
        ("a:e4m3,a:e5m2", "changed twice"),
        ("a:", "not of the form name:value"),
    ],
)
def test_what_the_contract_does_not_admit_is_refused_by_name(changed: str, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        cases.parse(GEMM.format(changed))


def test_every_dtype_and_option_value_has_a_word_of_its_own() -> None:
    from oracle.routines import registered

    for name, contract in registered().items():
        assert all(changes.word_of(dtype) for spec in contract.inputs for dtype in spec.dtypes)
        for option in contract.options:
            words = [changes.option_word(value) for value in option.choices or ()]
            assert len(set(map(str.lower, words))) == len(words), f"{name} {option.name}: {words}"
            assert not any(set(word) & set("/,:=") for word in words), f"{name} {option.name}: {words}"
            for word, value in zip(words, option.choices or (), strict=True):
                given = changes.changed_options(get(name), {}, ((option.name, word),))
                assert given.get(option.name, option.default) == value
