"""What a run shares between items of one call, and what it does not explain again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_subjects import right, zero_row

from oracle.diagnosis.level import explaining
from oracle.harness import runner
from oracle.routines import cases
from oracle.routines.base import Call
from oracle.routines.case import Case
from oracle.verdict.compare import Status, Verdict
from tests.support.commandline import CASE

ROW_MAJOR = "captures/h200_dense_m16_n128_k512/out.flashinfer.w8a8_rowmajor_scale"
OTHER = CASE.replace("seed=7", "seed=8")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the cases whose inputs are made, in their order."""
    ids, inputs = [], Case.inputs

    def counted(case: Case) -> dict[str, torch.Tensor]:
        ids.append(str(case))
        return inputs(case)

    monkeypatch.setattr(Case, "inputs", counted)
    monkeypatch.setattr(runner, "_last", {})
    return ids


class TestShared:
    """Inputs, operands and truth of a call are made once for the items that come one after the other."""

    def test_two_subjects_of_one_case(self, made: list[str]) -> None:
        """The verdicts are those of each alone; another case between them makes the inputs anew (the negative test)."""
        items = {(i.subject, i.id): i for i in self.items(CASE, OTHER)}
        together = [items[name, CASE].judge() for name in ("right", "zero_row")]
        assert made == [CASE] and [v.status for v in together] == [Status.PASSED, Status.FAILED]
        apart = [items[name, case].judge() for name, case in (("right", OTHER), ("right", CASE), ("zero_row", OTHER))]
        assert made == [CASE, OTHER, CASE, OTHER]
        assert apart[1].to_json() == together[0].to_json() and apart[2].status is Status.FAILED

    def test_a_call_of_another_arch_has_the_operands(self) -> None:
        """Of another dtype of the output it has its own: what is rounded to that differs."""
        case = cases.parse(CASE)
        asked = runner._asked("x", runner.get(case.contract), case)
        out = torch.zeros(5, 256, dtype=torch.bfloat16)
        calls: list[Call] = [asked._call(out, "sm90"), asked._call(out, "sm90")]
        assert calls[0] is calls[1] and calls[0].operands is asked._call(out, "sm100").operands
        assert asked._call(out.float(), "sm90") is not calls[0]

    def items(self, *ids: str) -> list[runner.Item]:
        chosen = [cases.parse(text) for text in ids]
        return runner.live([*right(), *zero_row()], profile="quick", cases=chosen)


class TestDocumented:
    """A known failure that is exactly as wrong as documented is judged, and not explained again."""

    @pytest.mark.parametrize(
        ("documented", "level", "explained"), [(True, "quick", 0), (False, "quick", 1), (True, "full", 1)]
    )
    def test_a_capture(self, fixtures_folder: Path, documented: bool, level: str, explained: int) -> None:
        def known(identity: str, verdict: Verdict) -> bool:
            return documented and identity == ROW_MAJOR and verdict.outside == 2022

        (item,) = [i for i in runner.replay(fixtures_folder / "captures", known) if i.id == ROW_MAJOR]
        with explaining(level):
            verdict = item.judge()
        assert (verdict.status, verdict.outside, len(verdict.explained_by)) == (Status.FAILED, 2022, explained)
