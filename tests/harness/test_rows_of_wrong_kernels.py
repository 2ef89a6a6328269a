"""Each class of faults that shipped kernels have has default cases that refuse it (:mod:`tests.support.subjects.rows`).

Of the default cases of seed 0 the first is taken whose output is not that of the right kernel: the contract refuses it,
and takes the right one. ``fp8-oracle validate tests.support.subjects.rows:NAME --contract CONTRACT`` is the whole run.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracle.routines import get
from oracle.routines.base import Call
from oracle.routines.cases import Case
from oracle.routines.drawn import default_cases
from tests.support.subjects.rows import KERNELS, Wrong, bits

Made = dict[str, Tensor]


def answer(kernel: Wrong, case: Case) -> Made | None:
    """Its outputs by name; None where it raises."""
    inputs, options = case.inputs(), case.call_options()
    try:
        outputs = kernel(**inputs, **options)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    if isinstance(outputs, Tensor):
        return {"out": outputs}
    if isinstance(outputs, dict):
        return outputs
    return dict(zip(get(kernel.contract).outputs(Call(get(kernel.contract), inputs, options)), outputs, strict=False))


def same(x: Made | None, y: Made) -> bool:
    return x is not None and all(
        x[name].shape == y[name].shape and torch.equal(bits(x[name]), bits(y[name])) for name in y
    )


def told_apart(name: str) -> Case | None:
    """The first default case on which the right kernel answers and the wrong one does not give its bits."""
    wrong = KERNELS[name]
    for case in default_cases(wrong.contract, 0):
        right = answer(Wrong(wrong.contract, wrong.right), case)
        if right is not None and not same(answer(wrong, case), right):
            return case
    return None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KERNELS)
def test_a_default_case_refuses_it(name: str) -> None:
    case, wrong = told_apart(name), KERNELS[name]
    assert case is not None, f"no default case of {wrong.contract} differs"
    inputs, options, contract = case.inputs(), case.call_options(), get(wrong.contract)
    right, made = answer(Wrong(wrong.contract, wrong.right), case), answer(wrong, case)
    assert right is not None and not contract.judge(inputs, single(right), arch="cpu", **options).status.is_failure
    assert made is None or contract.judge(inputs, single(made), arch="cpu", **options).status.is_failure, str(case)


def single(made: Made) -> Tensor | Made:
    return made["out"] if list(made) == ["out"] else made
