"""Merging records: order-free, idempotent, and refused where they describe no run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from reports import outcome

from oracle.errors import FixtureError, OptionError
from oracle.harness.runner import Shard
from oracle.report import merge, record
from oracle.report.outcome import Outcome
from oracle.report.record import Run
from oracle.verdict.compare import Status
from tests.support.commandline import Cli

NAMES = [f"c/case{i}/seed=1" for i in range(40)]


def write(
    path: Path, outcomes: list[Outcome], *, ended: bool = True, planned: int | None = None, **facts: object
) -> Path:
    run = Run(
        **{
            "started": "2026-01-02",
            "machine": {"cpu": "A"},
            "versions": {"a": "1"},
            "selection": {},
            "planned": len(outcomes) if planned is None else planned,
            **facts,
        }
    )  # type: ignore[arg-type]
    recorder = record.start(path, run, resume=False)
    for one in outcomes:
        recorder.append(record.key_of(one.id, one.subject, one.arch, "", run), one)
    if ended:
        recorder.end((), 1.0, run.planned - len(outcomes))
    recorder.stream.close()
    return path


def shards(folder: Path, total: int, names: list[str] = NAMES) -> list[Path]:
    """Records of every shard of these cases."""
    found = []
    for number in range(1, total + 1):
        shard = Shard(number, total)
        own = [o for o in map(outcome, names) if shard.holds(o)]  # type: ignore[arg-type]
        facts = {"selection": {"contract": "c", "shard": str(shard)}, "machine": {"cpu": "AB"[number % 2]}}
        found.append(write(folder / f"{number}-{total}.jsonl", own, **facts))
    return found


class TestMerge:
    def test_shards_make_the_serial_record_in_any_order(self, tmp_path: Path) -> None:
        parts = shards(tmp_path, 3)
        serial = write(tmp_path / "serial.jsonl", [*map(outcome, NAMES)], selection={"contract": "c"})
        whole = merge.merged(parts)
        assert whole.run.selection == {"contract": "c"} and whole.run.machine == {"cpu": "A | B"} and whole.report().ok
        assert dict(whole.outcomes) == dict(merge.merged([serial]).outcomes)
        made = merge.to_bytes(whole)
        assert {merge.to_bytes(merge.merged(order)) for order in itertools.permutations(parts)} == {made}
        again = tmp_path / "again.jsonl"
        again.write_bytes(made)
        assert merge.to_bytes(merge.merged([again])) == made == merge.to_bytes(merge.merged([again, parts[0], again]))

    def test_a_missing_shard_is_a_complaint_until_it_comes(self, tmp_path: Path) -> None:
        parts = shards(tmp_path, 3)
        partial = merge.merged(parts[:2])
        assert partial.report().complaints == ("shard 3/3 is missing",) and not partial.report().ok
        kept = tmp_path / "partial.jsonl"
        kept.write_bytes(merge.to_bytes(partial))
        assert partial.run.selection["shard"] == "1/3, 2/3"
        assert merge.merged([kept, parts[0]]).report().complaints == partial.report().complaints

    def test_a_killed_shard_is_a_complaint(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", [outcome()], ended=False, planned=4)
        assert merge.merged([path]).report().complaints == ("3 cases of the run of 2026-01-02 were not judged",)

    def test_different_results_of_one_case(self, tmp_path: Path) -> None:
        """The worse one counts, whichever file came first; equal ones but for the time are one."""
        paths = [write(tmp_path / f"{s}.jsonl", [outcome(NAMES[0], s)]) for s in (Status.PASSED, Status.FAILED)]
        for order in (paths, paths[::-1]):
            report = merge.merged(order).report()
            assert [o.status for o in report.outcomes] == [Status.FAILED]
            assert "judged more than once, with different results (FAILED, PASSED)" in report.complaints[0]
        same = [write(tmp_path / f"same{s}.jsonl", [replace(outcome(), seconds=s)]) for s in (1.0, 2.0)]
        assert merge.merged(same).report().complaints == ()

    @pytest.mark.parametrize(
        ("facts", "said"),
        [({"versions": {"a": "2"}}, "version of a is 2, that of"), ({"selection": {"contract": "d"}}, "selection of")],
    )
    def test_mixed_records_are_refused(self, tmp_path: Path, facts: dict[str, object], said: str) -> None:
        paths = [write(tmp_path / "a.jsonl", [outcome()]), write(tmp_path / "b.jsonl", [outcome()], **facts)]
        with pytest.raises(FixtureError, match=said):
            merge.merged(paths)

    def test_shards_of_two_counts_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FixtureError, match="shards of 2 and of 3"):
            merge.merged([shards(tmp_path, 2)[0], shards(tmp_path, 3)[0]])

    def test_the_command(self, cli: Cli, tmp_path: Path) -> None:
        parts, target = shards(tmp_path, 2), tmp_path / "whole.jsonl"
        assert cli("merge", *parts, "--record", target).status == 0
        assert target.read_bytes() == merge.to_bytes(merge.merged(parts))
        assert cli("merge", parts[0]).status == 1
        ran = cli("merge", parts[0], "--record", target)
        assert ran.status == 2 and "exists; name another file" in ran.err


class TestShard:
    def test_shards_are_disjoint_and_together_everything(self) -> None:
        items = [SimpleNamespace(id=name, subject="s", arch="cpu") for name in NAMES]
        held = [[n for n in range(1, 5) if Shard(n, 4).holds(item)] for item in items]  # type: ignore[arg-type]
        assert all(len(one) == 1 for one in held) and len({one[0] for one in held}) == 4

    @pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "1/3/5", "-1/3"])
    def test_refused(self, text: str) -> None:
        with pytest.raises(OptionError, match="is not i/n"):
            Shard.parse(text)
