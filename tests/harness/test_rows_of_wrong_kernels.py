"""Each class of faults that shipped kernels have has default cases that refuse it (:mod:`tests.support.subjects.rows`).

Of the default cases of seed 0 the first is taken whose output is not that of the right kernel: the contract refuses it,
and takes the right one. ``fp8-oracle validate tests.support.subjects.rows:NAME --contract CONTRACT`` is the whole run.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.errors import KernelError
from oracle.harness import validation
from oracle.harness.validation import validate
from oracle.routines import get
from oracle.routines.base import Call
from oracle.routines.cases import Case
from oracle.routines.drawn import default_cases
from tests.support.subjects.rows import KERNELS, Wrong, bits

pytestmark = pytest.mark.usefixtures("unexplained", "in_process")

ROWS = "tests.support.subjects.rows:"
Made = dict[str, Tensor]


def answer(kernel: Wrong, case: Case) -> Made | None:
    """Its outputs by name; None where the layer does not offer the call, none where it refuses what it was given."""
    inputs, options = case.inputs(), case.call_options()
    try:
        outputs = kernel(**inputs, **options)
    except NotImplementedError:
        return None
    except KernelError:
        return {}
    if isinstance(outputs, Tensor):
        return {"out": outputs}
    if isinstance(outputs, dict):
        return outputs
    return dict(zip(get(kernel.contract).outputs(Call(get(kernel.contract), inputs, options)), outputs, strict=False))


def same(x: Made, y: Made) -> bool:
    return x.keys() == y.keys() and all(
        x[name].shape == y[name].shape and torch.equal(bits(x[name]), bits(y[name])) for name in y
    )


def told_apart(name: str) -> Case | None:
    """The first default case on which the right kernel answers, and the wrong one otherwise."""
    wrong = KERNELS[name]
    for case in default_cases(wrong.contract, 0):
        right, made = answer(Wrong(wrong.contract, wrong.right), case), answer(wrong, case)
        if right and made is not None and not same(made, right):
            return case
    return None


@pytest.mark.turns(4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KERNELS)
def test_a_default_case_refuses_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its numbers: nothing is watched."""
    monkeypatch.setattr(validation, "WATCHED", {"quick": 0})
    case, contract = told_apart(name), KERNELS[name].contract
    assert case is not None, f"no default case of {contract} differs"
    wrong, right = (validate(ROWS + kernel, contract, case=str(case), limit=60) for kernel in (name, f"right_{name}"))
    assert (wrong.conforms, right.conforms) == (False, True), str(case)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("norm_by_batch", "rms_norm_dynamic_per_token_quant/bf16-e4m3/token/m=21,h=384/family=randn/seed=1"),
        (
            "groups_by_batch",
            "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-f16/1x128:128x128/m=17,n=512,k=1024,g=2/family=randn/seed=1",
        ),
    ],
)
def test_bits_that_depend_on_the_batch(wrong: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in a note, and a failure where it is required; the right kernel has the same bits in every batch."""
    monkeypatch.setattr(validation, "WATCHED", {"quick": 1})
    contract = text.partition("/")[0]
    kernel, right = f"{ROWS}{wrong}", f"kernels.subjects:BY_CONTRACT.{contract}"
    report = validate(kernel, contract, case=text, limit=60)
    assert report.conforms and any("other bits in batches of" in note for note in report.notes)
    assert not validate(kernel, contract, case=text, limit=60, require=["batch invariance"]).conforms
    assert validate(right, contract, case=text, limit=60, require=["batch invariance"]).conforms
