"""What a type checker sees of the package in the project of a user: the verbs' results, and wrong calls refused.

CI checks this file with the packages themselves. An ignore that nothing needs is an error there (mypy's strict mode),
so that a wrong call which is no longer refused is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, assert_type

import torch
from torch import Tensor

import oracle
from oracle.diagnosis.explain import Diagnosis, diagnose
from oracle.routines import Contract
from oracle.tensorcore.identify import Match
from oracle.verdict.classes import Class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "fp8_gemm_nt"


def use(inputs: dict[str, Tensor], out: Tensor, folder: Path) -> oracle.Verdict:
    """Every verb once, on a call of ``NAME``."""
    verdict = assert_type(oracle.judge(NAME, inputs, out, arch="sm90", numerics=None), oracle.Verdict)
    assert_type(verdict.status, oracle.Status)
    assert_type(bool(verdict), bool)
    assert_type(verdict.explained_by, tuple[str, ...])
    assert_type(oracle.assert_conforms(NAME, inputs, out), oracle.Verdict)
    assert_type(oracle.contracts(), Mapping[str, Contract])
    assert_type(oracle.reference(NAME, inputs, out_dtype=torch.bfloat16), Tensor | dict[str, Tensor])
    assert_type(oracle.predict(NAME, inputs), Tensor | dict[str, Tensor])
    assert_type(oracle.interval(NAME, inputs)["out"].low, Tensor)
    assert_type(oracle.identify(NAME, inputs, out), list[Match])
    assert_type(oracle.classify(NAME, inputs, out), Class)
    assert_type(oracle.compare_close(out, out), oracle.Closeness)
    assert_type(oracle.compare_close(out, out).rows[0].figure, float)
    figure = verdict.plot(folder / "verdict.png", dark=True)
    diagnosis = assert_type(diagnose(NAME, inputs, out), Diagnosis)
    if TYPE_CHECKING:
        assert_type(figure, Figure)
        assert_type(diagnosis.plot(), Figure)
        assert_type(oracle.sample(use, every=0, to=folder, contract=NAME)(inputs, out, folder), oracle.Verdict)
        assert_type(oracle.gate(NAME).prepared(inputs)(out), bool)
        with oracle.watch(every=2, budget="1 GiB, 10 s") as seen:
            assert_type(seen.report.rows[0].sqnr, float | None)
        assert_type(oracle.loss("per_token_group_quant_fp8", inputs), oracle.Loss | None)
    return verdict


def misuse(inputs: dict[str, Tensor], out: Tensor) -> None:
    """Calls that a type checker must refuse; they are not run."""
    oracle.jugde(NAME, inputs, out)  # type: ignore[attr-defined]
    oracle.judge(NAME, out, inputs)  # type: ignore[arg-type]
    oracle.judge(NAME, inputs, out, "sm90")  # type: ignore[call-arg]
    oracle.judge(NAME, inputs, out, arch=90)  # type: ignore[arg-type]
    oracle.judge(NAME, inputs, out).plot(dpi=300)  # type: ignore[call-arg]
    oracle.interval(NAME, inputs)["out"].lower  # type: ignore[attr-defined]  # noqa: B018
    oracle.compare_close(out, out, rtol="1e-3")  # type: ignore[arg-type]
