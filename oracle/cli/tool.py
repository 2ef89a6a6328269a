"""Commands about the installation: ``doctor``, ``list`` and ``plan``.

``doctor`` imports each GPU library in a separate process with a time limit, because one may crash or hang while it
loads; with ``--compile`` it compiles the CPU kernels of products. ``plan`` prints the decision of the production layer,
which is imported by name only. Nothing is downloaded, and nothing else compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from oracle.bindings.known import bindings
from oracle.bindings.missing import PROJECTS, Project, Survey, project, survey
from oracle.cli.common import Commands, add_command, add_json, console, pairs, repeated, say, write_json
from oracle.cli.examples import GEMM
from oracle.cli.page import page, releases_of
from oracle.errors import DeviceError, FixtureError, OptionError, OracleError, SubjectError, counted
from oracle.fixtures import captures
from oracle.fixtures import files as fixtures
from oracle.harness import compiling, coverage, subjects, timings
from oracle.report import ledger
from oracle.routines import Contract, cases, drawn, get, profiles, reached, registered
from oracle.routines.catalogue import catalogue, faults_of
from oracle.routines.options import word
from oracle.tensorcore.schedules import schedules

WHAT = ("contracts", "cases", "faults", "subjects", "captures", "numerics", "bindings")
# Import names and what they are for; each is optional.
OPTIONAL = {
    "triton": "our own quantisation kernels",
    "deep_gemm": "install sgl-deep-gemm; PyPI's deep-gemm 1.0.0 is an unofficial upload",
    "flashinfer": "install flashinfer-python",
    "vllm": "vLLM's compiled operators",
}
IMPORT_SECONDS = 60
LAYER_WANTED = "`pip install fp8-oracle-kernels`, or in a checkout `pip install -e .`, brings the production layer"


def add_doctor(commands: Commands) -> None:
    command = add_command(commands, "doctor", _doctor, "what is importable and usable here, and why not")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")
    text = "compile the CPU kernels of products first and keep them on disk; otherwise the first calls compile them"
    command.add_argument("--compile", action="store_true", help=text)


def add_list(commands: Commands) -> None:
    command = add_command(
        commands, "list", _list, "list contracts, cases, faults, subjects, captures, numerics or bindings"
    )
    command.add_argument("what", nargs="?", choices=WHAT, default="contracts")
    command.add_argument("--contract", metavar="NAME", help="of this routine only; of contracts the whole page")
    command.add_argument("--profile", choices=profiles.PROFILES, default="quick")
    command.add_argument("--fixtures", metavar="DIR", help="the fixtures folder")
    command.add_argument("--coverage", action="store_true", help="the legs of every routine: P, R, D, G and H by arch")
    command.add_argument("--markdown", action="store_true", help="with --coverage: as Markdown, CPU subjects only")
    text = "what a contract admits and no default case of validate has, or all of them"
    command.add_argument("--reach", action="store_true", help=text)
    text = (
        "low-precision routines of installed libraries that have neither a binding nor a contract; nothing is imported"
    )
    command.add_argument("--missing", action="store_true", help=text)
    repeated(command, "--project", "NAME", f"with --missing: of this library alone ({', '.join(PROJECTS)})")
    text = "with --missing: a folder of unpacked wheels instead of what is installed"
    command.add_argument("--from", dest="root", type=Path, metavar="DIR", help=text)
    text = "with --coverage: write it between the markers of a Markdown file"
    command.add_argument("--update", type=Path, metavar="FILE", help=text)


def add_plan(commands: Commands) -> None:
    command = add_command(
        commands,
        "plan",
        _plan,
        "which backend the production layer chooses, and why not the others",
        "Print the decision for one problem and every reason, or without --op a line for every routine. Exit 1 when no "
        "backend serves the problem.",
    )
    command.add_argument("--op", help=f"operation or routine, as {GEMM}; default: every routine")
    command.add_argument("--arch", help="sm90, gfx942, cpu...; default: this machine")
    for dim in ("m", "n", "k"):
        command.add_argument(f"--{dim}", type=int)
    repeated(command, "--option", "NAME=VALUE", "any other field of the problem")
    text = "the machine instead of --arch: JSON with arch or product, cuda, torch, sms, packages (name to version)"
    command.add_argument("--machine", metavar="FILE", help=text)
    add_json(command, "every routine's decision, with the reason of each backend,")
    text = (
        "time the backends of dense products on this GPU into FILE, a line of JSON each; goes on where it was stopped"
    )
    command.add_argument("--timings", metavar="FILE", help=text)
    text = "with --timings: no new one is begun after S seconds (default: %(default)g)"
    command.add_argument("--seconds", type=float, default=60.0, metavar="S", help=text)
    text = "the layer's subjects, instead of the installed ones: of a source tree kernels.subjects:subjects"
    command.add_argument("--provider", metavar="MODULE:CALLABLE", help=text)


# --- doctor -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One row of the table; ``absent`` is a fact and no problem."""

    what: str
    state: Literal["ok", "absent", "problem"]
    said: str


def examine(fixtures_folder: str | None = None) -> list[Finding]:
    """Every finding, in the order in which a reader needs them."""
    return [*_versions(), *_devices(), our_kernels(), *_optional(), *_subjects(), *_fixtures(fixtures_folder)]


def our_kernels(search: list[str] | None = None) -> Finding:
    """Whether the production layer can be imported, in ``search`` or in ``sys.path``, and is ours."""
    names = subjects.layers()
    if not names:
        return Finding("layer", "absent", f"no subject of ours is judged live; {LAYER_WANTED}")
    if len(names) > 1:
        text = f"{' and '.join(names)} are both installed and register the same operators: uninstall fp8-oracle-kernels"
        return Finding("layer", "problem", text)
    (name,) = names
    ours = Path(__file__).resolve().parents[2] / name
    spec = importlib.util.find_spec(name)
    if search is not None:
        spec = importlib.machinery.PathFinder.find_spec(name, search)
    if spec is None or not spec.origin:
        return Finding("layer", "problem", f"{name} is registered and not importable; {LAYER_WANTED}")
    folder = Path(spec.origin).resolve().parent
    if ours.is_dir() and folder != ours:
        owner = ", ".join(packages_distributions().get(name, [])) or "no known distribution"
        text = (
            f"another package named {name} is imported instead of ours: {folder} (of {owner}); Hugging Face's "
            "`kernels` on PyPI has the name that ours has in a checkout: uninstall it, or use a virtual environment "
            "without it, or install the wheels fp8-oracle and fp8-oracle-kernels, which do without that name"
        )
        return Finding("layer", "problem", text)
    return Finding("layer", "ok", f"{name}, {folder}")


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", sys.version.split()[0])
    try:
        yield Finding("fp8-oracle", "ok", version("fp8-oracle"))
    except PackageNotFoundError:
        yield Finding("fp8-oracle", "problem", "not installed, so no subject is registered: pip install -e .")
    for package in ("torch", "numpy", "numba", "safetensors", "rich"):
        yield Finding(package, "ok", version(package))


def _devices() -> Iterator[Finding]:
    yield Finding("cpu", "ok", f"{torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else " (this torch is built for the CPU)"
        yield Finding("gpu", "absent", f"torch sees no device{built}; captures are replayed, nothing runs live on one")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding(f"gpu {index}", "ok", f"{torch.cuda.get_device_name(index)}, sm{major}{minor}")


def _optional() -> Iterator[Finding]:
    for name, purpose in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, "absent", f"not installed ({purpose})")
            continue
        asked = [sys.executable, "-c", f"import {name}; print(getattr({name}, '__version__', 'version unknown'))"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            yield Finding(name, "problem", f"import takes longer than {IMPORT_SECONDS} s")
            continue
        if done.returncode == 0:
            yield Finding(name, "ok", next(iter(done.stdout.splitlines()[-1:]), "version unknown"))
        else:
            last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit status {done.returncode}")
            yield Finding(name, "problem", f"installed, but import fails: {last}")


def _subjects() -> Iterator[Finding]:
    providers = subjects.providers()
    if not providers:
        yield Finding(
            "subjects", "absent", f"no entry point in group {subjects.GROUP}; `validate` judges a kernel of yours"
        )
    for provider in providers:
        if provider.problem is not None:
            yield Finding("subjects", "problem", provider.problem)
        for subject in provider.subjects:
            reason = subject.why_not()
            what = f"{subject.contract} [{subject.name}, {subject.arch}]"
            yield Finding(what, "ok" if reason is None else "absent", reason or f"declares {subject.numerics}")


def _fixtures(given: str | None) -> Iterator[Finding]:
    try:
        folder = fixtures.folder(given)
        count = len(captures.load(folder / "captures"))
        failures = len(ledger.load(folder / ledger.FILE))
    except FixtureError as error:
        yield Finding("fixtures", "problem", str(error))
    else:
        yield Finding("fixtures", "ok", f"{folder}: {count} captures, {failures} known failures")


def _doctor(arguments: argparse.Namespace) -> int:
    findings = [*([_kernels()] if arguments.compile else []), *examine(arguments.fixtures)]
    table = Table("what", "state", title="doctor", title_justify="left")
    table.add_column("found, or why not", overflow="fold")
    styles = {"ok": "green", "absent": "dim", "problem": "bold red"}
    for finding in findings:
        table.add_row(finding.what, finding.state, finding.said, style=styles[finding.state])
    console().print(table)
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def _kernels() -> Finding:
    """What compiling the CPU's kernels gave."""
    try:
        done = compiling.compile_kernels()
    except ModuleNotFoundError as missing:
        return Finding("compiled kernels", "absent", f"{missing.name} is not installed; plain torch computes the same")
    except OracleError as error:
        return Finding("compiled kernels", "problem", str(error))
    number, kept = len(done.compiled), len(done.loaded)
    said = f"{number} compiled in {done.seconds:.0f} s, {kept} loaded; kept in {done.folder}"
    return Finding("compiled kernels", "ok", said)


# --- list ---------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    if arguments.missing:
        if arguments.coverage or arguments.reach or arguments.contract is not None:
            raise OptionError("--missing is a table of libraries; leave out --coverage, --reach and --contract")
        return _missing(arguments.project or list(PROJECTS), arguments.root)
    if arguments.project or arguments.root is not None:
        raise OptionError("--project and --from choose the libraries of --missing; add it")
    if arguments.reach:
        if arguments.coverage:
            raise OptionError("--reach and --coverage are two tables; ask for one")
        return _reach(arguments.contract)
    if arguments.coverage:
        if arguments.contract is not None:
            raise OptionError("--coverage is a table of all routines; leave out --contract")
        return _coverage(arguments)
    if arguments.markdown or arguments.update is not None:
        raise OptionError("--markdown and --update print the coverage table; add --coverage")
    if arguments.contract is not None and arguments.what == "numerics":
        raise OptionError("numerics belong to no contract; leave out --contract")
    for line in _lines(arguments):
        say(line)
    return 0


def _lines(arguments: argparse.Namespace) -> Iterator[str]:
    only = arguments.contract
    chosen = registered() if only is None else {only: get(only)}
    if arguments.what == "contracts":
        for contract in chosen.values():
            yield from (_describe if only is None else page)(contract, arguments.profile)
    elif arguments.what == "cases":
        for name in chosen:
            yield from map(str, profiles.cases(name, arguments.profile))
    elif arguments.what == "faults":
        for fault in catalogue().values() if only is None else faults_of(only):
            applies = ",".join(sorted(fault.contracts))
            yield f"{fault.name}\t{fault.family}\tseen: {fault.seen}\ton: {fault.on.name}\t{applies}"
    elif arguments.what == "subjects":
        for provider in subjects.providers():
            if provider.problem is not None:
                yield provider.problem
            for subject in provider.subjects:
                reason = subject.why_not()
                state = f"declares {subject.numerics}" if reason is None else f"not here: {reason}"
                if only in (None, subject.contract):
                    yield f"{subject.contract} [{subject.name}, {subject.arch}] {state}"
    elif arguments.what == "captures":
        for c in captures.load(fixtures.folder(arguments.fixtures) / "captures"):
            if only in (None, c.contract):
                yield f"{c.id}\t{c.contract}\t{c.recording.arch}"
    elif arguments.what == "bindings":
        for one in bindings():
            if only in (None, one.contract):
                yield f"{one.target}\t{one.contract}\t{one.pattern}\t{one.domain or 'any extents'}\t{one.release}"
    else:
        for schedule in schedules():
            unshown = schedule.instruction.unshown
            text = f"\tno hardware has shown: {unshown}" if unshown else ""
            yield f"{schedule.name}\t{schedule.status.value}\t{schedule.seen_in}{text}"


def _reach(only: str | None) -> int:
    """What the default cases of each contract do not have; exit 1 where no exemption names it."""
    result, exempt = 0, 0
    for name in sorted(cases.grammars()) if only is None else [get(only).name]:
        for gap in reached.gaps(name, drawn.default_cases(name, 0)):
            reason = reached.EXEMPT.get(f"{name}: {gap}")
            result, exempt = result + 1, exempt + (reason is not None)
            say(f"{name}: {gap}{'' if reason is None else f' (exempt: {reason})'}")
    say(f"{counted(result, 'gap')}, {exempt} of them exempt")
    return 1 if result > exempt else 0


def _missing(names: Sequence[str], root: Path | None) -> int:
    """What the libraries offer and nothing here describes; exit 1 where there is some, or no library could be read."""
    if root is not None and not root.is_dir():
        raise OptionError(f"{root} is no folder; unpack the wheels into one")
    read = [result for name in names if (result := _surveyed(project(name), root)) is not None]
    table = Table("project", title="routines of libraries", title_justify="left")
    for column in ("public", "counted", "bound", "contract", "exempt", "missing"):
        table.add_column(column, justify="right")
    for one in read:
        parts = (one.seen, len(one.kinds), len(one.bound), len(one.contract), len(one.exempt), len(one.missing))
        table.add_row(one.project.name, *map(str, parts))
    if read:
        console().print(table)
    return 1 if not read or any(one.missing for one in read) else 0


def _surveyed(of: Project, root: Path | None) -> Survey | None:
    """The survey of one library, after a line for each routine of it that is missing and each reason of exemptions."""
    result = survey(of, root)
    if result is None:
        say(f"{of.name}: UNSUPPORTED: not {'installed' if root is None else f'in {root}'}; {of.install}")
        return None
    for name in result.missing:
        first = result.places[name][0]
        say(f"{of.name}: {result.kinds[name]}: {first.target}({', '.join(first.tensors) or '...'})")
    for reason in dict.fromkeys(result.exempt.values()):
        names = sorted(name for name, why in result.exempt.items() if why == reason)
        say(f"{of.name}: {len(names)} exempt, {reason}: {', '.join(names)}")
    for what, those in (
        ("exemption or alias names nothing", result.unused),
        ("file is not read by this Python", result.unread),
    ):
        for one in those:
            say(f"{of.name}: {what}: {one}")
    return result


def _coverage(arguments: argparse.Namespace) -> int:
    """The coverage table; a file gets the CPU subjects only, so that every machine writes the same."""
    portable = arguments.markdown or arguments.update is not None
    providers = subjects.providers()
    live = [s for provider in providers for s in provider.subjects if not portable or s.device == "cpu"]
    packages = sorted({provider.target.partition(":")[0].partition(".")[0] for provider in providers})
    rows = coverage.rows(live, fixtures.folder(arguments.fixtures), lambda name: _exposed(packages, name))
    if arguments.update is not None:
        changed = coverage.place(arguments.update, coverage.markdown(rows))
        print(f"{arguments.update}: {'written' if changed else 'as it was'}")
    elif arguments.markdown:
        print(coverage.markdown(rows), end="")
    else:
        columns = ("section", "routine", *coverage.LEGS, "missing")
        table = Table(*columns, title="coverage", title_justify="left", caption=coverage.LEGEND, caption_justify="left")
        for row in rows:
            style = "yellow" if row.missing else None
            table.add_row(row.routine.section, row.routine.name, *row.cells(), row.missing, style=style)
        console().print(table)
    return 0


def _exposed(packages: Sequence[str], attribute: str) -> bool:
    """Whether a package of the subjects has this (dotted) attribute."""
    for package in packages:
        module: object = import_module(package)
        for name in attribute.split("."):
            module = getattr(module, name, None)
        if module is not None:
            return True
    return False


def _describe(contract: Contract, profile: str) -> list[str]:
    """A few lines of a contract; :func:`oracle.cli.page.page` has all."""
    shapes = ["" if spec.dims is None else f" [{', '.join(spec.dims)}]" for spec in contract.inputs]
    named = zip(contract.inputs, shapes, strict=True)
    inputs = ", ".join(f"{spec.name}{shape or f' ({spec.doc})'}" for spec, shape in named)
    lines = [contract.name, f"  {contract.summary}"]
    lines.append(releases_of(contract))
    lines.append(f"  inputs: {inputs}; outputs: {', '.join(contract.returns)}")
    for option in contract.options:
        choices = "" if option.choices is None else f" (of {', '.join(str(word(c)) for c in option.choices)})"
        lines.append(f"  option {option.name}={word(option.default)}{choices}")
    if contract.numerics:
        lines.append(f"  numerics: {'; '.join(f'{arch}: {names[0]}' for arch, names in contract.numerics.items())}")
    lines.append(f"  cases: {len(profiles.cases(contract.name, profile))} in profile {profile}")
    return lines


# --- plan and completion ------------------------------------------------------------------------------------


def _plans(arguments: argparse.Namespace, plan: Any, errors: Any, fields: Mapping[str, object]) -> int:
    """Every routine's decision on a machine, or with ``--op`` one problem's, and of each backend the reason."""
    try:
        machine = _machine(arguments, plan, fields if arguments.op is None else {})
        if arguments.op is not None and arguments.json is None:
            text = plan.explanation(arguments.op, machine, plan.Config(), **fields)
            print(text)
            return 1 if text.splitlines()[0].endswith(plan.NO_BACKEND) else 0
        if arguments.op is not None:
            raise OptionError("--json writes every routine's decision; leave --op out")
        record, lines = plan.record_of(machine), plan.summary(machine)
    except errors.KernelError as error:  # the layer's typed errors, as this command's
        raise OptionError(str(error)) from None
    write_json(arguments.json, {"schema": "fp8-oracle.plan/1", **record})
    if arguments.json != "-":
        shown = Table("routine", "backend", "kernel", "sums", title=f"plan on {machine.arch}")
        for line in lines:
            shown.add_row(*line)
        console().print(shown)
    return 0


def _machine(arguments: argparse.Namespace, plan: Any, fields: Mapping[str, object]) -> Any:
    if fields:
        raise OptionError(f"{', '.join(fields)}: fields of one problem; name it with --op")
    if arguments.machine is not None:
        path = Path(arguments.machine)
        try:
            return plan.Machine.from_record(json.loads(path.read_text()))
        except (OSError, ValueError) as error:  # no file, no JSON, or no record of a machine: one typed error
            raise OptionError(f"--machine {path}: {error}") from None
    return plan.current_machine() if arguments.arch is None else plan.Machine.from_record({"arch": arguments.arch})


def _timings(path: Path, seconds: float, target: str | None) -> int:
    if not torch.cuda.is_available():
        raise DeviceError("there is no GPU that torch can see: --timings times kernels of a GPU")
    registered_ones = [p for p in subjects.providers() if p.name == subjects.LAYER]
    ours = [s for p in (registered_ones if target is None else [subjects.provider(target)]) for s in p.subjects]
    count = 0
    for one in timings.timed([s for s in ours if s.device == "cuda" and s.why_not() is None], path, seconds):
        count += "microseconds" in one
        print(f"{one.get('microseconds', one.get('why'))}  {one['backend']}  {one['case']}")
    print(f"{counted(count, 'timing')} in {path}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    target: str | None = arguments.provider
    layer = subjects.layers() if target is None else [subjects.provider(target).target.partition(":")[0].split(".")[0]]
    if not layer:
        tree = subjects.layer_of_the_tree()
        wanted = LAYER_WANTED if tree is None else f"{LAYER_WANTED}; `--provider {tree}` takes the one of this tree"
        raise SubjectError(f"no production layer is installed: {wanted}")
    try:
        plan, errors = import_module(f"{layer[0]}.plan"), import_module(f"{layer[0]}.errors")
    except ImportError as error:
        raise SubjectError(f"the production layer cannot be imported ({error}); see `fp8-oracle doctor`") from None
    if arguments.timings is not None:
        return _timings(Path(arguments.timings), arguments.seconds, target)
    values = {
        name: int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)
        for name, text in pairs(arguments.option, "--option").items()
    }
    dims = {dim: getattr(arguments, dim) for dim in "mnk" if getattr(arguments, dim) is not None}
    if twice := sorted({"op", "arch", *dims} & set(values)):
        raise OptionError(f"--option {twice[0]}=...: {twice[0]} has a flag of its own, --{twice[0]}")
    if arguments.machine is not None and arguments.arch is not None:
        raise OptionError("--machine FILE names the architecture; leave --arch out")
    if arguments.op is None or arguments.machine is not None or arguments.json is not None:
        return _plans(arguments, plan, errors, {**values, **dims})
    try:
        text = plan.describe(op=arguments.op, arch=arguments.arch, **{**values, **dims})
    except errors.KernelError as error:
        raise OptionError(str(error)) from None
    print(text)
    return 1 if text.splitlines()[0].endswith(plan.NO_BACKEND) else 0
