"""An explanation of one small failure that most other failures of the kernel do not share is no name of its fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oracle.harness.agreement import agreed, apart
from oracle.report.findings import NUMBERS, Finding
from oracle.verdict.compare import Status, Tried, Verdict

TAIL, HALF, LEFT = "K tail dropped", "second half of a split K missing", "b from index {} on left out along axis 0"


def failing(outside: int, *names: str, tried: Sequence[Tried] = ()) -> Finding:
    observed = () if names else ("every failing element is 0",)
    verdict = Verdict(Status.FAILED, "", outside, 100, explained_by=names, observed=observed, tried=tuple(tried))
    case = f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m={outside},n=128,k=128/family=randn/seed=1"
    return Finding(case, NUMBERS, verdict)


@pytest.mark.parametrize(
    ("findings", "names"),
    [
        ([failing(9, TAIL, HALF), failing(20, TAIL)], [(TAIL,), (TAIL,)]),
        (
            [failing(9, LEFT.format(8)), failing(20, LEFT.format(64)), failing(90, HALF)],
            [(LEFT.format(8),), (LEFT.format(64),), ()],
        ),
        ([failing(9, TAIL), failing(20, HALF)], [(), ()]),  # no two have one
        ([failing(9, TAIL), failing(20, TAIL), failing(30, HALF)], [(TAIL,), (TAIL,), ()]),
        ([failing(9, TAIL), failing(20)], [(), ()]),  # as many failures without a name
        ([failing(9, TAIL), failing(20, TAIL), failing(30)], [(TAIL,), (TAIL,), ()]),
        ([failing(9, TAIL)], [(TAIL,)]),
        ([], []),
    ],
)
def test_what_most_failures_share(findings: list[Finding], names: list[tuple[str, ...]]) -> None:
    """Alternatives that one case has alone are left out; names that no two cases share refute each other; numbers of
    the call are no part of a mechanism; failures for which no fault was found refute a name that no more have."""
    assert [finding.verdict.explained_by for finding in agreed(findings)] == names


def test_recipes_are_all_tried_on_every_failure() -> None:
    """Two failures that have the bits of no recipe outweigh one that has those of some. Negative: one does not."""
    recipe = Tried("torchao_mx_ceil", 50, 100, 1, 1, 3, 50)
    other = [failing(n, tried=[recipe]) for n in (20, 30)]
    withdrawn, *_ = agreed([failing(9, "torchao_mx_ceil", tried=[recipe]), *other])
    assert not withdrawn.verdict.explained_by
    assert "fewer of the failing cases" in withdrawn.verdict.observed[0]
    kept, _ = agreed([failing(9, "torchao_mx_ceil", tried=[recipe]), other[0]])
    assert kept.verdict.explained_by == ("torchao_mx_ceil",)


def judged(number: int, changed: str, status: Status, *names: str) -> Finding:
    case = f"relu2_no_mul/bf16/-/m={number + 2},i=40{changed}/family=randn/seed=1"
    return Finding(case, NUMBERS, Verdict(status, "", 9, 100, explained_by=names, reason="IndexError"))


def run(views: Sequence[Status], others: Sequence[Status], *names: str) -> list[Finding]:
    """One finding for each status: on inputs whose rows lie apart, and on others."""
    return [judged(i, "/x:pitch", status, *names) for i, status in enumerate(views)] + [
        judged(i, "", status) for i, status in enumerate(others)
    ]


class TestApart:
    """Where only calls fail whose rows lie apart in memory, that is the name; a view shows nothing on one row."""

    RIGHT, WRONG, CRASHED = Status.PASSED, Status.FAILED, Status.CRASHED

    def test_only_views_fail(self) -> None:
        findings = apart(run([self.WRONG] * 4 + [self.CRASHED, self.RIGHT], [self.RIGHT] * 30))
        said = {f.verdict.explained_by for f in findings if f.verdict.status is not self.RIGHT}
        assert said == {("strides of x not followed: only calls with rows apart in memory fail",)}
        assert not any(f.verdict.explained_by for f in findings if f.verdict.status is self.RIGHT)

    @pytest.mark.parametrize(
        "findings",
        [
            run([Status.FAILED] * 4, [Status.FAILED] + [Status.PASSED] * 30),  # another call fails too
            run([Status.FAILED] * 2, [Status.PASSED] * 3),  # by chance
            run([Status.FAILED] * 9, [Status.PASSED] * 2),  # nearly all calls have views
            run([Status.FAILED] * 4, [Status.PASSED] * 30, "relu left out"),  # explained
            run([Status.PASSED] * 4, [Status.PASSED] * 30),
        ],
    )
    def test_negative(self, findings: list[Finding]) -> None:
        assert apart(findings) == tuple(findings)
