"""``fp8-oracle fixtures``: check the stored files, make them again, export them, judge outputs computed for them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.text import Text

from oracle.cli.common import Bar, Commands, add_command, add_jobs, console, repeated, say, verdict_line
from oracle.errors import FixtureError, counted
from oracle.fixtures import captures, checksums, golden, golden_export
from oracle.fixtures import files as fixtures
from oracle.harness import recording
from oracle.harness.jobs import Lost, divided, in_order
from oracle.numbers.threads import one_thread
from oracle.report import ledger
from oracle.report.files import to_junit
from oracle.report.outcome import Outcome, Report
from oracle.verdict.compare import Status, Verdict


def add(commands: Commands) -> None:
    command = commands.add_parser("fixtures", help="check, generate, list, export or judge the stored fixtures")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "read every file, compare it with its manifest, and compute every golden again"
    add_jobs(add_command(actions, "check", _check, text))
    actions.add_parser("list", help="list the golden fixtures").set_defaults(run=_list)
    generate = add_command(
        actions,
        "generate",
        _rewrite,
        "write the golden fixtures",
        "Compute every golden of the manifest again and write what changed; contracts that have none get "
        "some, chosen from the quick profile.",
    )
    repeated(generate, "--add", "ID", "a case to add")
    export = add_command(
        actions,
        "export",
        _export,
        "write a folder that can be read without Python",
        "Write cases as raw little-endian files with a plain-text index, a judge in C and C++, a CMake package with "
        "examples, a JSON manifest and its schema. Without --case, --profile and --shape: the stored goldens, and for "
        "each routine the small cases on which faults show that live in shapes (tails, last blocks, second tiles).",
    )
    export.add_argument("target", type=Path, metavar="DIR", help="a new or empty folder")
    export.add_argument("--contract", action="append", metavar="NAME", help="only this routine; may be repeated")
    repeated(export, "--case", "ID", "this case, computed now; may be repeated")
    export.add_argument("--profile", metavar="NAME", help="the cases of a profile of --contract, computed now")
    text = "as m,n,k: a case of this shape on ordinary data of --contract, computed now; may be repeated"
    repeated(export, "--shape", "SIZES", text)
    export.add_argument("--all", action="store_true", help="also the goldens that are kept as digests, computed now")
    judging = add_command(
        actions,
        "judge",
        _judge,
        "judge the outputs that somebody computed for an exported folder",
        "Exit 0 when every output that came back is admissible; 1 when one is not, a file cannot be read as an "
        "answer, or none came; 2 when one could not be judged, as for an arch that has no model.",
    )
    judging.add_argument("folder", type=Path, metavar="DIR", help="the exported folder")
    text = "folder of CASE.out.bin or CASE.safetensors"
    judging.add_argument("--outputs", required=True, type=Path, metavar="THEIRS", help=text)
    text = "whose arithmetic is admitted (default: cpu, float32 in any order)"
    judging.add_argument("--arch", default="cpu", help=text)
    judging.add_argument("--numerics", metavar="NAME", help="the declared schedule, as sm90.promote128")
    judging.add_argument("--whole", action="store_true", help="a case that did not come back is a failure")
    judging.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as JSON")
    judging.add_argument("--junit", type=Path, metavar="FILE", help="write the verdicts as JUnit XML")
    rebuild = add_command(
        actions,
        "import",
        _rewrite,
        "make the captures again from recorded files",
        "Make fixtures/captures again from a folder of recorded safetensors files, as the manifest's "
        "`source` entries say: tensors are renamed, unit scales added, digests and provenance renewed.",
    )
    adoption = add_command(
        actions,
        "adopt",
        _rewrite,
        "take the captures of a folder that `verify --keep` wrote",
        "Check the folder against its manifest, copy its files into fixtures/captures, enter them there.",
    )
    for taking in (rebuild, adoption):
        taking.add_argument("recorded", type=Path, metavar="DIR")
    text = "write SHA256SUMS again after a file was changed on purpose"
    actions.add_parser("seal", help=text).set_defaults(run=_seal)
    for action in actions.choices.values():
        if action is not actions.choices["judge"]:
            action.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")


def _check(arguments: argparse.Namespace) -> int:
    folder = fixtures.folder(arguments.fixtures)
    with one_thread():  # here and below: every case is some short operations
        for line in captures.check(folder / "captures"):
            say(line)
    print(f"{ledger.FILE}: {len(ledger.load(folder / ledger.FILE))} known failures")
    golden.check_files(folder / golden.FOLDER)
    print(checksums.check(folder))
    goldens = folder / golden.FOLDER
    cases = golden.load(goldens)["cases"]
    with Bar(console(), len(cases)) as bar, ExitStack() as stack, one_thread():

        def started(number: int) -> None:
            bar.runs(cases[number]["id"])

        make, threads = partial(_checking, goldens), divided(arguments.jobs, None)
        done = in_order(make, range(len(cases)), jobs=arguments.jobs, threads=threads, started=started)
        for entry, result in zip(cases, stack.enter_context(closing(done)), strict=True):
            if isinstance(result, Lost):
                raise FixtureError(f"{entry['id']}: cannot be made again: {result.cause}")
            bar.advance()
    for line in golden.summary(goldens):
        say(line)
    return 0


@contextmanager
def _checking(goldens: Path) -> Iterator[Callable[[int], None]]:
    """Regenerates the golden of a number."""
    cases = golden.load(goldens)["cases"]
    yield lambda number: golden.check_case(goldens, cases[number])


def _list(arguments: argparse.Namespace) -> int:
    folder = fixtures.folder(arguments.fixtures) / golden.FOLDER
    for entry in golden.load(folder)["cases"]:
        say(f"{entry['id']}\t{entry['judged']}\t{entry['file'] or 'digests'}")
    return 0


def _rewrite(arguments: argparse.Namespace) -> int:
    """``generate``, ``import`` and ``adopt``: write files, print a line for each, renew SHA256SUMS."""
    folder = fixtures.folder(arguments.fixtures, own=True)
    if arguments.action == "generate":
        lines = golden.generate(folder / golden.FOLDER, add=arguments.add)
    else:
        take = captures.rebuild if arguments.action == "import" else recording.adopt
        lines = take(folder / "captures", arguments.recorded)
    for line in lines:
        say(line)
    checksums.write(folder)
    return 0


def _seal(arguments: argparse.Namespace) -> int:
    folder = fixtures.folder(arguments.fixtures, own=True)
    print(f"{checksums.FILE}: {'written' if checksums.write(folder) else 'as it was'}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    goldens = fixtures.folder(arguments.fixtures) / golden.FOLDER
    asked = {"named": arguments.case, "profile": arguments.profile, "shapes": arguments.shape}
    lines = golden_export.export(
        goldens, arguments.target, everything=arguments.all, contracts=arguments.contract, **asked
    )
    for line in lines:
        say(line)
    return 0


def _judge(arguments: argparse.Namespace) -> int:
    declared = {"arch": arguments.arch, "numerics": arguments.numerics}
    answers = golden_export.judge(arguments.folder, arguments.outputs, **declared)
    screen = console()
    for answer in answers:
        if answer.verdict is not None:
            screen.print(verdict_line(answer.verdict, f"{answer.slug}: {answer.verdict.summary}"), soft_wrap=True)
        elif arguments.whole:
            missing_case = f" {answer.slug}: nothing came back for {answer.id}"
            screen.print(Text.assemble(("UNTESTED", "bold red"), missing_case), soft_wrap=True)
    if arguments.json is not None:
        fixtures.write_json(arguments.json, golden_export.to_json(answers, **declared))
    if arguments.junit is not None:
        outcomes = tuple(_outcome(answer, arguments.arch, whole=arguments.whole) for answer in answers)
        fixtures.write_bytes(arguments.junit, to_junit(Report(outcomes)).encode())
    came = [answer.verdict for answer in answers if answer.verdict is not None and answer.id is not None]
    strays = sum(answer.id is None for answer in answers)
    failed = sum(verdict.status.is_failure for verdict in came)
    unjudged = sum(verdict.status is Status.UNSUPPORTED for verdict in came)
    missing = len(answers) - strays - len(came)
    bad = not came or failed or strays or (missing and arguments.whole)
    due = counted(len(came) + missing, "case")
    words = f"{len(came)} of {due} came back, {failed} not admissible, {unjudged} not judged"
    words += f", {counted(strays, 'file')} that {'answers' if strays == 1 else 'answer'} no case" if strays else ""
    print(f"{'NOT OK' if bad else 'NOT JUDGED' if unjudged else 'OK'}  {words}")
    return 1 if bad else 2 if unjudged else 0


def _outcome(answer: golden_export.Answer, arch: str, *, whole: bool) -> Outcome:
    """What a report says of an answer: a case that did not come back is skipped, with ``whole`` a failure."""
    verdict = answer.verdict
    if verdict is None:
        missing = Status.UNTESTED if whole else Status.SKIPPED
        verdict = Verdict(missing, "nothing came back", reason="nothing came back")
    summary = verdict.summary if answer.id is None else f"{verdict.summary}; case {answer.id}"
    summary = "; ".join((summary, *verdict.because))
    contract = "answers" if answer.id is None else answer.id.partition("/")[0]
    return Outcome(answer.slug, contract, "answers", arch, replace(verdict, summary=summary))
