"""Rows padded by groups: numpy's version, padding that nobody reads, every fault refused, bad calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels
from oracle.errors import InputError, OptionError, OracleError, ShapeError
from oracle.routines import cases, get
from oracle.routines.base import by_name
from oracle.routines.catalogue import faults_of, run
from oracle.routines.fault import Call

PAD, UNPAD = "pad_token_groups", "unpad_token_groups"


def call_of(name: str, text: str) -> Call:
    case = cases.parse(f"{name}/{text}/family=randn/seed=3")
    return Call(get(name), case.inputs(), case.call_options())


def in_numpy(x: np.ndarray[Any, Any], sizes: list[int], size: int) -> np.ndarray[Any, Any]:
    """Each group with zeros up to a multiple, then zeros up to the bound."""
    parts = np.split(x[: sum(sizes)], np.cumsum(sizes)[:-1])
    whole = np.concatenate([np.pad(part, ((0, -len(part) % size), (0, 0))) for part in parts])
    bound = -(-(len(x) + len(sizes) * size) // size) * size
    return np.pad(whole, ((0, bound - len(whole)), (0, 0)))


@pytest.mark.parametrize("size", [1, 16, 32])
def test_in_numpy(size: int) -> None:
    """Groups of 5, none, 32 and 7 rows, and two rows of nobody."""
    sizes, x = [5, 0, 32, 7], np.arange(46 * 3, dtype=np.float32).reshape(46, 3) + 1
    ends = torch.from_numpy(np.cumsum(sizes).astype(np.int32))
    due = in_numpy(x, sizes, size)
    starts = np.cumsum([0, *(-(-n // size) * size for n in sizes)])
    given = {"x": torch.from_numpy(x), "group_end_offsets": ends}
    made = get(PAD).reference(given, alignment_size=size)
    assert isinstance(made, dict)
    for found in (made, dict(zip(made, kernels.pad_token_groups(*given.values(), size), strict=True))):
        np.testing.assert_array_equal(found["out"].numpy(), due)
        assert found["starts"].tolist() == starts[:-1].tolist() and found["ends"].tolist() == starts[1:].tolist()
    padded = torch.from_numpy(np.where(due == 0, np.float32(np.nan), due))
    options = {"num_tokens": 44, "alignment_size": size}
    back = get(UNPAD).reference(
        {"padded": padded, "group_end_offsets": ends, "padded_group_start_offsets": made["starts"]}, **options
    )
    assert isinstance(back, Tensor)
    np.testing.assert_array_equal(back.numpy(), x[:44])
    np.testing.assert_array_equal(kernels.unpad_token_groups(padded, ends, made["starts"], **options).numpy(), x[:44])


@pytest.mark.parametrize(
    ("name", "text"),
    [(PAD, "bf16/-/m=60,k=5,g=4/tail=1"), (PAD, "f32/-/m=60,k=4,g=4"), (UNPAD, "f32/-/m=60,k=4,g=4")],
)
def test_faults(name: str, text: str) -> None:
    call = call_of(name, text)
    assert not call.contract.judge(call.inputs, by_name(run(call)), arch="cpu", **call.options).status.is_failure
    shown = [fault for fault in faults_of(name) if fault.applies(call) is None]
    for fault in shown:
        verdict = call.contract.judge(call.inputs, by_name(run(call, fault)), arch="cpu", **call.options)
        assert verdict.status.is_failure, fault.name
    assert len(shown) >= (3 if name == UNPAD else 9)


BAD = (
    (PAD, {"group_end_offsets": torch.tensor([9, 3], dtype=torch.int32)}, {}, InputError, "never back"),
    (PAD, {"group_end_offsets": torch.tensor([9, 300], dtype=torch.int32)}, {}, InputError, "at most 37"),
    (PAD, {}, {"alignment_size": 0}, OptionError, "alignment_size"),
    (UNPAD, {}, {"num_tokens": 36}, OracleError, "37"),
    (UNPAD, {"padded_group_start_offsets": torch.tensor([0, 900], dtype=torch.int32)}, {}, InputError, "900"),
    (UNPAD, {"group_end_offsets": torch.tensor([4, 30], dtype=torch.int32)}, {}, ShapeError, "num_tokens=37"),
)


@pytest.mark.parametrize(("name", "inputs", "options", "error", "message"), BAD)
def test_a_bad_call_is_one_typed_error(
    name: str, inputs: dict[str, Tensor], options: dict[str, object], error: type[OracleError], message: str
) -> None:
    call = call_of(name, "bf16/-/m=37,k=8,g=2")
    with pytest.raises(error, match=message):
        call.contract.check({**call.inputs, **inputs}, {**call.options, **options})
    call.contract.check(call.inputs, call.options)
