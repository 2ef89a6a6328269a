"""Commands about a kernel by name, run in a worker process: ``validate`` judges it, ``fingerprint`` probes it."""

from __future__ import annotations

import argparse
import secrets
import shlex
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oracle.cli.common import (
    Commands,
    add_command,
    add_explain_level,
    add_jobs,
    add_json,
    add_recipe,
    console,
    declared,
    repeated,
    say,
    verdict_line,
    whole,
    write_json,
)
from oracle.errors import OptionError
from oracle.harness import provenance, recording
from oracle.harness.endurance import seed_of, soak
from oracle.harness.probing import probe, probe_block_scaled
from oracle.harness.report import Report
from oracle.harness.validation import LIMIT, PROFILES, SEEDS, SOAK, validate
from oracle.routines.domain import EXAMPLE
from oracle.tensorcore.block_probes import KINDS, BlockFingerprint, Kind
from oracle.tensorcore.fingerprint import Fingerprint
from oracle.tensorcore.instructions import F8F6F4 as FORMATS

SHOWN = 12  # failures printed in full
# What `validate` and the verb of that name call alike.
ASKED = ("adapter", "device", "arch", "numerics", "profile", "seed", "case", "calls", "require", "limit", "seconds",
         "domain", "untrusted", "explain", "jobs")  # fmt: skip
OUT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ADAPTER: dict[str, Any] = {"metavar": "MODULE:CALLABLE", "help": "called as adapter(kernel, inputs, options)"}
_DEVICE: dict[str, Any] = {"default": "cpu", "help": "cpu (default) or cuda"}
_LIMIT: dict[str, Any] = {
    "type": float, "default": LIMIT, "metavar": "S", "help": f"seconds for one call (default: {LIMIT:g})"
}  # fmt: skip


def add_validate(commands: Commands) -> None:
    command = add_command(
        commands, "validate", _validate,
        "judge a kernel by name, in a worker process, and watch what it does to memory",
        "Run MODULE:CALLABLE over the cases of a contract, with data and some shapes drawn for this run. Calls that "
        "it refuses with NotImplementedError are moved to calls that it takes. Exit 0 when it conforms, 1 when not "
        "or when too little could be tried (UNTESTED), 2 when it could not be judged.",
    )  # fmt: skip
    command.add_argument("kernel", metavar="MODULE:CALLABLE")
    command.add_argument("--contract", required=True, metavar="NAME", help="see `fp8-oracle list`")
    command.add_argument("--adapter", **_ADAPTER)
    command.add_argument("--device", **_DEVICE)
    command.add_argument("--arch", help="whose arithmetic is admitted (default: that of the device)")
    command.add_argument("--numerics", metavar="NAME", help="the declared schedule, as sm90.promote128")
    add_recipe(command)
    add_explain_level(command)
    command.add_argument("--profile", choices=PROFILES, default="quick")
    command.add_argument("--seed", type=whole(0), help="repeat a run: fixes what it draws; 0 has the published cases")
    example = EXAMPLE.replace("%", "%%")
    command.add_argument("--domain", metavar="CONDITIONS", help=f"extents that the kernel takes, as '{example}'")
    command.add_argument("--case", action="append", metavar="ID", help="only this case; may be repeated")
    said = "only the calls in these files, as `cases from-checkpoint`, oracle.sample and --save write them"
    command.add_argument("--cases", dest="calls", type=Path, metavar="FILE|DIR", help=said)
    repeated(
        command, "--require", "WATCH",
        "'batch invariance' must hold; 'threads': right numbers while other threads call it; 'large offsets' "
        "makes a call beyond 2^31 elements (as a soak of five minutes does)",
    )  # fmt: skip
    command.add_argument("--limit", **_LIMIT)
    command.add_argument("--seconds", type=float, metavar="S", help="length of a soak (default: 600)")
    command.add_argument(
        "--untrusted", action="store_true",
        help="run the kernel in a sandbox without the oracle, network or files to write, on data of a fresh seed; "
        "exit 2 where this machine makes no sandbox",
    )  # fmt: skip
    add_jobs(command)
    said = "with --profile soak: append what every stretch found to this file"
    command.add_argument("--record", type=Path, metavar="FILE.jsonl", help=said)
    said = "continue --record until --seconds are over in all"
    command.add_argument("--resume", action="store_true", help=said)
    said = "with --profile soak: stretches with a failure after which it ends (default: %(default)d)"
    command.add_argument("--stop-after", type=whole(1), default=3, metavar="N", help=said)
    command.add_argument("--save", metavar="FILE", help="minimise the first failing case into this safetensors file")
    add_json(command, "the report")


def add_fingerprint(commands: Commands) -> None:
    command = add_command(
        commands, "fingerprint", _fingerprint, "find out how a kernel computes by probing it",
        "Probe MODULE:CALLABLE with products of [128, K] by [K, 128], and print what the answers give "
        "away. It is called as `fp8-oracle validate` calls it: in a worker process, with the contract's inputs by "
        "name, and out_dtype and out if it takes them. With --block-scaled it is one that applies block scales inside "
        "the instruction: one call tells which of the named readings it follows. Exit 2 when it raises, crashes, hangs "
        "or is no scaled product.",
    )  # fmt: skip
    command.add_argument("kernel", metavar="MODULE:CALLABLE")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--contract", metavar="NAME", help="a product; see `fp8-oracle list`")
    said = "called with a, b [128, 256], a_scale, b_scale [128, 256 / block] (not swizzled) and out_dtype"
    what.add_argument("--block-scaled", choices=KINDS, help=said)
    for side in ("a", "b"):
        said = f"with --block-scaled mxf8f6f4: of {side} (default: {FORMATS[0]}); FP6 is one code a byte, FP4 packed"
        command.add_argument(f"--{side}-format", choices=FORMATS, help=said)
    command.add_argument("--adapter", **_ADAPTER)
    command.add_argument("--k", type=int, default=512, help="with --contract: a multiple of 128 (default: 512)")
    said = "(default: bfloat16; with --block-scaled float32)"
    command.add_argument("--out-dtype", choices=sorted(OUT_DTYPES), help=said)
    command.add_argument("--device", **_DEVICE)
    command.add_argument("--seed", type=whole(0), default=0)
    command.add_argument("--limit", **_LIMIT)


def _validate(arguments: argparse.Namespace) -> int:
    arguments.numerics = declared(arguments)
    asked = {name: getattr(arguments, name) for name in ASKED}
    save = None if arguments.save is None else Path(arguments.save)
    several = arguments.device == "cuda" and torch.cuda.device_count() > 1
    drawn = arguments.profile == "soak" and not arguments.case and arguments.calls is None
    if drawn and (several or arguments.jobs > 1 or arguments.record):
        return _soak(arguments)
    if arguments.record is not None or arguments.resume:
        raise OptionError("--record and --resume belong to --profile soak")
    report = validate(arguments.kernel, arguments.contract, save=save, **asked)
    screen = console(stderr=arguments.json == "-")
    print_report(report, screen)
    if arguments.json is not None:
        command = command_of(arguments, report.seed)
        made = recording.provenance_of(provenance.machine(), provenance.versions(()), command)
        write_json(arguments.json, report.to_json() | {"provenance": made})
    return report.exit_code


def _soak(arguments: argparse.Namespace) -> int:
    """A soak on every device, in stretches."""
    if arguments.save is not None:
        raise OptionError("--save: repeat the stretch that failed with its --seed and --save")
    if arguments.resume and arguments.record is None:
        raise OptionError("--resume continues a record; name it with --record FILE.jsonl")
    seed = secrets.randbelow(SEEDS) if arguments.seed is None else arguments.seed
    if arguments.resume and arguments.seed is None:
        seed = seed_of(arguments.record, seed)
    passed = ("adapter", "arch", "numerics", "require", "limit", "domain", "untrusted", "explain")
    screen = console(stderr=arguments.json == "-")
    terminal = screen.is_terminal
    found = soak(
        arguments.kernel, arguments.contract, seconds=arguments.seconds or SOAK, seed=seed, device=arguments.device,
        lanes=None if arguments.jobs == 1 else arguments.jobs, most=arguments.stop_after, record=arguments.record,
        resume=arguments.resume, said=lambda line: screen.print(line, soft_wrap=True) if terminal else None,
        **{name: getattr(arguments, name) for name in passed},
    )  # fmt: skip
    for line in found.lines():
        screen.print(line, soft_wrap=True)
    screen.print(f"seed {seed}; --seed {seed} repeats this run", soft_wrap=True)
    write_json(arguments.json, {**found.about, "ended": found.ended, "stretches": found.stretches})
    return found.exit_code


def command_of(arguments: argparse.Namespace, seed: int | None) -> str:
    """The command as it was given, with the seed that the run drew and without where its results went, safe to paste
    into a shell."""
    words = ["fp8-oracle", "validate", arguments.kernel]
    for name in ("contract", "adapter", "device", "arch", "numerics", "profile", "seed", "seconds", "domain"):
        value = seed if name == "seed" else getattr(arguments, name)
        words += [] if value is None else [f"--{name}", str(value)]
    words += ["--untrusted"] if arguments.untrusted else []
    words += [word for case in arguments.case or [] for word in ("--case", case)]
    words += [] if arguments.calls is None else ["--cases", str(arguments.calls)]
    return shlex.join([*words, *(word for watch in arguments.require for word in ("--require", watch))])


def print_report(report: Report, screen: Console) -> None:
    """The table of watches, the failures with their commands, the notes, one closing line."""
    screen.print(f"{report.kernel} as {report.contract}", style="italic", soft_wrap=True)  # a title wraps inside names
    table = Table(header_style="bold")
    table.add_column("watch")
    table.add_column("findings", justify="right")
    table.add_column("failed", justify="right")
    for name, (count, bad) in report.watches().items():
        table.add_row(name, str(count), Text(str(bad), style="bold red" if bad else "green"))
    screen.print(table)
    for finding in report.failures[:SHOWN]:
        line = verdict_line(finding.verdict, f"{finding.watch}: {finding.case}\n  {finding.verdict.summary}")
        screen.print(line.append(f"\n  repro: {report.command(finding)}"), soft_wrap=True)
    if len(report.failures) > SHOWN:
        screen.print(f"... and {len(report.failures) - SHOWN} more failures")
    for note in report.notes:
        screen.print(Text.assemble(("note ", "yellow"), note), soft_wrap=True)
    if report.saved is not None:
        command = f"fp8-oracle explain {shlex.quote(report.saved)}"
        screen.print(f"smallest failing case: {report.saved}; `{command}`", soft_wrap=True)
    if report.coverage is not None and (report.profile is not None or report.coverage.refused):
        for said in report.coverage.lines():
            screen.print(said, soft_wrap=True)
    if report.seed is not None:
        screen.print(f"seed {report.seed}; --seed {report.seed} repeats this run", soft_wrap=True)
    words = (("CONFORMS", "bold green"), ("DOES NOT CONFORM", "bold red"), ("NOT JUDGED", "bold red"))
    word = ("UNTESTED", "bold red") if report.untested else words[report.exit_code]
    where = f"  {report.judged} cases judged on {report.device} ({report.arch}), "
    closing = f"{where}{report.workers} workers, {report.seconds:.1f} s"
    screen.print(Text.assemble(word, closing), soft_wrap=True)


def _fingerprint(arguments: argparse.Namespace) -> int:
    asked = {name: getattr(arguments, name) for name in ("adapter", "device", "limit")}
    if arguments.block_scaled is None:
        if arguments.a_format or arguments.b_format:
            raise OptionError("--a-format and --b-format belong to --block-scaled mxf8f6f4")
        asked |= {"k": arguments.k, "seed": arguments.seed, "out_dtype": OUT_DTYPES[arguments.out_dtype or "bfloat16"]}
        found: Fingerprint | BlockFingerprint = probe(arguments.kernel, arguments.contract, **asked)
    else:
        kind = Kind.of(arguments.block_scaled, arguments.a_format, arguments.b_format)
        out_dtype = OUT_DTYPES[arguments.out_dtype or "float32"]
        found = probe_block_scaled(arguments.kernel, kind, out_dtype=out_dtype, **asked)
    for line in found.lines():
        say(line)
    return 0
