"""An output may have any of the dtypes that its contract declares: ``validate`` takes what ``judge`` takes."""

from __future__ import annotations

import math
import re
from functools import cache

import pytest
import torch

from oracle.errors import DtypeError
from oracle.harness import validation
from oracle.harness.report import Report
from oracle.harness.validation import validate
from oracle.routines import Call, Case, get, profiles, registered
from oracle.verdict.compare import Status
from tests.support.subjects.stored import by_name, in_dtype

NARROW = (torch.int8, torch.float8_e8m0fnu, torch.float8_e4m3fn)  # dtypes of one byte that no contract names first
REFERENCES, STORED = "tests.support.subjects.references", "tests.support.subjects.stored"
pytestmark = [pytest.mark.usefixtures("in_process", "unexplained"), pytest.mark.turns(4)]


@cache
def smallest(contract: str) -> tuple[Case, ...]:
    """The quick cases of a contract on ordinary data, the smallest first."""
    ordinary = (case for case in profiles.cases(contract, "quick") if case.family == "randn")
    return tuple(sorted(ordinary, key=lambda case: math.prod(extent for _, extent in case.extents)))


@cache
def declared() -> tuple[tuple[str, str, torch.dtype], ...]:
    """Every contract, output and dtype where a call declares several dtypes for the output."""
    rows: list[tuple[str, str, torch.dtype]] = []
    for name in (name for name in registered() if smallest(name)):
        case = smallest(name)[0]
        call = Call(get(name), case.inputs(), case.call_options()).checked()
        several = {out: due.dtypes for out, due in get(name).outputs(call).items() if len(due.dtypes) > 1}
        rows += [(name, out, dtype) for out, dtypes in several.items() for dtype in dtypes]
    return tuple(rows)


def admitted(contract: str, output: str, dtype: torch.dtype) -> Case | None:
    """The first case whose reference conforms with an output stored in ``dtype``; None where every call refuses that
    dtype, which a recipe of the contract would have to ask for."""
    for case in smallest(contract):
        inputs, options = case.inputs(), case.call_options()
        outputs = by_name(get(contract).reference(inputs, **options))
        stored = in_dtype(outputs[output], dtype)
        if 1 < outputs[output].dtype.itemsize < stored.dtype.itemsize and stored.is_floating_point():
            continue  # a wider float has a rounding of its own
        exact = stored.dtype.itemsize == outputs[output].dtype.itemsize == 1 or torch.equal(
            stored.to(torch.float64), outputs[output].to(torch.float64)
        )
        try:
            verdict = get(contract).judge(inputs, {**outputs, output: stored}, **options)
        except DtypeError:
            continue
        if exact and verdict.status is not Status.MISTRUSTED:  # a case that proves little
            assert verdict.status is Status.PASSED, (contract, dtype, verdict.summary)
            return case
    return None


def run(case: Case, output: str, dtype: torch.dtype) -> Report:
    """The validation of the reference with ``output`` stored in ``dtype``, on one case."""
    kernel, name = f"{REFERENCES}:{case.contract}", str(dtype).removeprefix("torch.")
    adapter = f"{STORED}:{output}_as_{name}"
    return validate(kernel, case.contract, adapter=adapter, case=str(case), arch="sm90", limit=60)


def test_the_dtypes_that_contracts_declare() -> None:
    """Codes as int8, scales as E8M0, E4M3 and bfloat16, indices as int64."""
    wanted = {torch.int8, torch.int64, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.bfloat16}
    assert wanted <= {dtype for _, _, dtype in declared()} and len({contract for contract, _, _ in declared()}) >= 35


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the watches that call the kernel again."""
    monkeypatch.setattr(validation, "WATCHED", dict.fromkeys(validation.PROFILES, 0))


@pytest.mark.usefixtures("one_call")
def test_every_declared_dtype_conforms() -> None:
    """Of every contract, on a case that ``judge`` admits it for; with wrong numbers the same dtype fails."""
    tried, wrong, passed = set(), [], []
    for contract, output, dtype in declared():
        if (case := admitted(contract, output, dtype)) is None:
            continue
        tried.add((contract, dtype))
        report, damaged = run(case, output, dtype), run(case, f"{output}_off", dtype)
        wrong += [] if report.conforms else [(contract, dtype, [f.verdict.summary for f in report.failures])]
        passed += [(contract, dtype)] if damaged.conforms or "dtype" in damaged.failures[0].verdict.summary else []
    assert wrong == [] and passed == []
    assert {contract for contract, _ in tried} == {contract for contract, _, _ in declared()}
    assert len({contract for contract, dtype in tried if dtype in NARROW}) >= 29


@pytest.mark.usefixtures("one_call")
def test_another_dtype_is_refused() -> None:
    """One that no contract declares for the output; the message lists those that it does."""
    for contract, output, _ in declared():
        report = run(smallest(contract)[0], output, torch.float64)
        (failure,) = report.failures
        assert re.search(f"{output} has dtype torch.float64; expected torch", failure.verdict.summary), contract
        assert not report.conforms and report.judged == (failure.verdict.status is Status.FAILED)


@pytest.mark.parametrize(
    ("contract", "output", "dtype"),
    [
        ("per_token_cast_to_fp4", "q", torch.int8),
        ("mxfp8_quantize", "scale", torch.float8_e8m0fnu),
        ("nvfp4_quantize", "scale", torch.float8_e4m3fn),
    ],
)
def test_the_watches_take_it_too(contract: str, output: str, dtype: torch.dtype) -> None:
    """Reruns, stale state and memory that nobody wrote are compared in the dtype of the output."""
    case = admitted(contract, output, dtype)
    assert case is not None
    report = run(case, output, dtype)
    assert report.conforms and {"rerun determinism", "stale state", "uninitialised memory"} <= set(report.watches())
