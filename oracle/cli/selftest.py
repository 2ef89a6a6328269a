"""Commands that test the oracle itself: ``mutate`` by known faults, ``conformance`` by published hardware vectors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oracle.cli.common import Bar, Commands, add_command, add_jobs, add_json, console, whole, write_json
from oracle.diagnosis import mutation
from oracle.diagnosis.baselines import rules
from oracle.errors import OptionError, among, counted
from oracle.harness.jobs import Lost, divided, in_order
from oracle.routines import get, profiles
from oracle.routines.catalogue import Fault, catalogue, faults_of
from oracle.tensorcore.vectors import conformance


def add_mutate(commands: Commands) -> None:
    command = add_command(
        commands,
        "mutate",
        _mutate,
        "measure which known faults the oracle notices",
        "Put every fault of the catalogue into a right kernel and judge it over the cases of a profile. "
        "Exit 0 when no mutant survives and no legal variant fails, 1 otherwise.",
    )
    command.add_argument("--contract", metavar="NAME", help="only this routine (default: all with cases)")
    command.add_argument("--fault", metavar="PATTERN", help="only faults whose name matches, as 'A scale*'")
    command.add_argument("--profile", choices=profiles.PROFILES, default="quick")
    command.add_argument("--rules", action="store_true", help="also ask other projects' rules, on the same data")
    command.add_argument("--own-data", action="store_true", help="ask them on each project's own data as well")
    command.add_argument("--legal", type=whole(0), default=0, metavar="N", help="also judge N random legal variants")
    command.add_argument("--seed", type=whole(0), default=1, help="seed of the legal variants (default: 1)")
    command.add_argument("--list", action="store_true", help="print the catalogue, and stop")
    add_jobs(command)
    add_json(command, "the scores")


def add_conformance(commands: Commands) -> None:
    text = "compare the instruction models with published hardware vectors"
    command = add_command(commands, "conformance", _conformance, text)
    text = "folder of a_*.txt, b_*, c_*, d_* sets"
    command.add_argument("--vectors", required=True, type=Path, metavar="DIR", help=text)


def _mutate(arguments: argparse.Namespace) -> int:
    if arguments.contract is not None:
        get(arguments.contract)
    if arguments.list:
        for fault in catalogue().values():
            if _wanted(fault, arguments):
                print(f"{fault.name}\t{fault.family}\t{fault.seen}\t{','.join(sorted(fault.contracts))}")
        return 0
    screen = console(stderr=arguments.json == "-")
    scores, variants, lost = _measured(arguments, screen)
    if not scores:
        names = (fault.name for fault in catalogue().values() if arguments.contract in (None, *fault.contracts))
        meant = among(arguments.fault, names, see="fp8-oracle list faults")
        raise OptionError(f"no fault matches {arguments.fault!r}; {meant}")
    screen.print(_table(scores, with_rules=arguments.rules))
    for score in scores:
        for mutant in score.mutants:
            if mutant.fate in (mutation.Fate.SURVIVED, mutation.Fate.EQUIVALENT, mutation.Fate.TOLERATED):
                style = "bold red" if mutant.fate is mutation.Fate.SURVIVED else "dim"
                result = f" {mutant.contract}: {mutant.fault}: {mutant.why}"
                screen.print(Text.assemble((str(mutant.fate), style), result), soft_wrap=True)
    own_data = {rule.name: mutation.mutate_own_data(rule) for rule in rules()} if arguments.own_data else {}
    for name, found_in in own_data.items():
        tried = [noticed for noticed in (found_in or {}).values() if noticed is not None]
        noticed_of = f"notices {sum(tried)} of {counted(len(tried), 'fault')}"
        measured = noticed_of if found_in is not None else "rejects a right result"
        screen.print(f"{name} on its own data {measured}", soft_wrap=True)
    alarms = [
        f"FALSE ALARM {v.case} by {v.computed_by}, declaring {v.declared or 'nothing'}: {v.verdict.summary}"
        for v in variants
        if v.false_alarm
    ]
    for alarm in alarms:
        screen.print(alarm, soft_wrap=True)
    if variants:
        over = f"{counted(len(alarms), 'false alarm')} over {counted(len(variants), 'legal variant')}"
        screen.print(f"{over} (seed {arguments.seed})")
    scored = [
        {
            "contract": s.contract,
            "cases": s.cases,
            "score": s.ratio,
            "rules_reject_right": dict(s.alarms),
            "mutants": [m.to_json() for m in s.mutants],
        }
        for s in scores
    ]
    record = {
        "schema": "fp8-oracle.mutation/1",
        "scores": scored,
        "own_data": own_data,
        "legal": {"variants": len(variants), "false_alarms": alarms},
    }
    write_json(arguments.json, record)
    survived = sum(score.count(mutation.Fate.SURVIVED) for score in scores)
    return 1 if survived or alarms or lost else 0


TOGETHER = 8  # faults of one contract that a process tries at a time


_Measured = tuple[list[mutation.Score], list[mutation.Variant], int]


def _measured(arguments: argparse.Namespace, screen: Console) -> _Measured:
    """The scores by contract, the legal variants, and how many tasks were lost with their process."""
    tasks: list[_Task] = [("", (), arguments)] if arguments.legal else []  # first, since it takes longest
    for contract in [arguments.contract] if arguments.contract else mutation.contracts_with_cases():
        chosen = [fault.name for fault in faults_of(contract) if _wanted(fault, arguments)]
        together = len(chosen) if arguments.jobs == 1 or arguments.rules else TOGETHER  # rules run every case anyway
        starts = range(0, len(chosen), max(1, together))
        tasks += [(contract, tuple(chosen[i : i + together]), arguments) for i in starts]
    with Bar(screen, len(tasks)) as bar, ExitStack() as stack:

        def started(number: int) -> None:
            bar.runs(tasks[number][0] or "legal variants")

        make, threads = partial(_carrying_out, tasks), divided(arguments.jobs, None)
        done = in_order(make, range(len(tasks)), jobs=arguments.jobs, threads=threads, started=started)
        stack.enter_context(closing(done))
        pieces, variants, lost = dict[str, list[mutation.Score]](), list[mutation.Variant](), 0
        for (contract, names, _), result in zip(tasks, done, strict=True):
            bar.advance()
            lost += isinstance(result, Lost)
            if isinstance(result, Lost):
                screen.print(f"LOST {contract or 'legal variants'} {', '.join(names)}: {result.cause}", soft_wrap=True)
                untried = ((catalogue()[name], result.cause) for name in names)
                fate = mutation.Fate.UNTRIED
                mutants = [mutation.Mutant(f.name, str(f.family), contract, fate, why=why) for f, why in untried]
                result = mutation.Score(contract, tuple(mutants), 0, {}) if contract else []
            if isinstance(result, mutation.Score):
                pieces.setdefault(contract, []).append(result)
            else:
                variants = result
    return [mutation.joined(some) for some in pieces.values()], variants, lost


_Task = tuple[str, tuple[str, ...], argparse.Namespace]
"""A contract and the names of faults to try there; without a contract, the legal variants."""


def _carry_out(task: _Task) -> mutation.Score | list[mutation.Variant]:
    contract, names, arguments = task
    if not contract:
        return list(mutation.right_variants(arguments.legal, seed=arguments.seed))
    chosen = [catalogue()[name] for name in names]
    return mutation.mutate(contract, profile=arguments.profile, faults=chosen, with_rules=arguments.rules)


@contextmanager
def _carrying_out(tasks: Sequence[_Task]) -> Iterator[Callable[[int], mutation.Score | list[mutation.Variant]]]:
    yield lambda number: _carry_out(tasks[number])


def _wanted(fault: Fault, arguments: argparse.Namespace) -> bool:
    if arguments.contract is not None and arguments.contract not in fault.contracts:
        return False
    return arguments.fault is None or fnmatchcase(fault.name.lower(), arguments.fault.lower())


def _table(scores: list[mutation.Score], *, with_rules: bool) -> Table:
    table = Table(title="mutation score", title_justify="left", header_style="bold")
    table.add_column("routine", overflow="fold")
    for fate in mutation.Fate:
        table.add_column(fate.lower(), justify="right")
    table.add_column("score", justify="right")
    for rule in rules() if with_rules else ():
        table.add_column(rule.name, justify="right", overflow="fold")
    for score in scores:
        counts = [str(score.count(fate)) for fate in mutation.Fate]
        cells = [f"{score.noticed(r.name)} ({score.alarms[r.name]})" if score.alarms else "" for r in rules()]
        table.add_row(score.contract, *counts, f"{100 * score.ratio:.1f}%", *(cells if with_rules else ()))
    if with_rules:
        table.caption = "rules: killed mutants that they notice too (cases whose right output they reject)"
    return table


def _conformance(arguments: argparse.Namespace) -> int:
    rows = conformance(arguments.vectors)
    table = Table("gpu", "format", "output", "instruction", title="mismatches", title_justify="left")
    table.add_column("vectors", justify="right")
    table.add_column("mismatches", justify="right")
    table.add_column("first mismatch, note", overflow="fold")
    for row in rows:
        message = "; ".join(text for text in (row.first, row.note) if text)
        cells = (row.gpu, row.format, row.output, row.instruction, str(row.vectors), str(row.mismatches), message)
        table.add_row(*cells, style="bold red" if row.mismatches else None)
    console().print(table)
    return 1 if any(row.mismatches for row in rows) else 0
