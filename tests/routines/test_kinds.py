"""Every input of every contract says what its numbers stand for, and its dtypes can hold that."""

from __future__ import annotations

import pytest
import torch

from oracle.routines import registered
from oracle.routines.base import F32, INTEGERS, TensorSpec
from oracle.routines.traits import Kind

ANY = (Kind.SCALES, Kind.STATE, Kind.MASK, Kind.RANDOM)  # integers may hold their bits
WIDE = (torch.bfloat16, torch.float16, torch.float32)


def why_not(spec: TensorSpec) -> str | None:
    """The reason for which these dtypes cannot hold this kind, or None."""
    if not isinstance(spec.kind, Kind):
        return "it states no kind"
    if spec.kind.is_integer:
        return None if set(spec.dtypes) <= set(INTEGERS) else f"{spec.kind} are int32 or int64"
    if spec.kind in ANY:
        return None
    if spec.kind in (Kind.LOGITS, Kind.WEIGHTS, Kind.BIAS, Kind.ALPHA, Kind.BOUND):
        return None if set(spec.dtypes) <= set(WIDE) else f"{spec.kind} are wide floats"
    if spec.kind is Kind.VALUES:
        return None if all(dtype.is_floating_point for dtype in spec.dtypes) else "values are floats"
    assert spec.kind is Kind.CODES, f"no rule for {spec.kind}"
    return None if set(spec.dtypes) - set(WIDE) else "codes are of 8 bits, or integers that hold them"


def test_every_input_states_a_kind_that_its_dtypes_can_hold() -> None:
    inputs = [(name, spec) for name, contract in registered().items() for spec in contract.inputs]
    wrong = [f"{name} {spec.name}: {reason}" for name, spec in inputs if (reason := why_not(spec)) is not None]
    assert len(inputs) > 700 and not wrong


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        (Kind.IDS, F32),
        (Kind.LOGITS, INTEGERS),
        (Kind.VALUES, INTEGERS),
        (Kind.CODES, F32),
        (Kind.SLOTS, (torch.int8,)),
    ],
)
def test_dtypes_of_another_kind_do_not_fit(kind: Kind, dtypes: tuple[torch.dtype, ...]) -> None:
    assert why_not(TensorSpec("x", kind, dtypes, None, "negative test")) is not None


def test_every_kind_but_one_is_had_by_an_input() -> None:
    """Nothing in the suite takes random bits as a tensor yet; a contract from outside may."""
    assert set(Kind) - {spec.kind for c in registered().values() for spec in c.inputs} == {Kind.RANDOM}
