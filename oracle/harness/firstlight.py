"""The first hour of a machine with a GPU: what is asked of it, in order, each a command in a process of its own.

A step is a command of this tool with a limit of its own; all together end within a budget. Steps that only read or
compile run side by side; what is timed runs alone. What ended is in ``firstlight.json`` and is not run again in the
same folder, so that a run that was stopped goes on. Nothing of the machine is changed: kernels are called, settings are
read. What is known of an arch stands beside what this machine answers (:data:`KNOWN`).

Not covered: a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from oracle.errors import FixtureError
from oracle.fixtures import files as fixtures
from oracle.harness import finding_scripts, provenance, starting, subjects
from oracle.tensorcore.instructions import ALIKE, INSTRUCTIONS

RECORD, PAGE = "firstlight.json", "firstlight.md"
DONE, FAILED, LATE, LEFT = "done", "failed", "no end in time", "left"
SCALED = ("mxf8f6f4", "mxf4", "nvf4")
DOT_SCALED = "oracle.tensorcore.triton_scaled:dot_scaled"
CHAINS = (
    # contract, routine of a library: products whose accumulation is read from probes, where the library is installed
    ("torch_per_token_w8a8_scaled_mm", "torch:_scaled_mm"),
    ("cutlass_scaled_mm", "torch:ops._C.cutlass_scaled_mm"),
    ("fp8_gemm_nt", "deep_gemm:fp8_gemm_nt"),
)
TOOL = (sys.executable, "-m", "oracle")
CALL = 40
"""Seconds of one judged call: a routine that exceeds them once, compiling for longer, is given up and named."""
ASKED = 170
"""The most seconds of a step that stands beside the findings, whose compilations take its cores."""
SCRIPT, FINDINGS = 165, 180
"""Seconds of one finding, and of all. FlashInfer 0.6.18 compiles its FP8 block product for sm90 in 95 s on the 16 cores
of a machine with an H200, once for all findings that call it."""
JUDGED = 300
"""The most seconds of what judges many routines or kernels: these stand last, and take what is left."""
REST = "{rest}"
"""Among a step's arguments: the seconds that it has left, less :data:`ENDING`."""
ENDING = 30.0
"""Seconds in which a step whose time is up ends its processes, each with a context of the GPU, and writes."""
GRACE = 10.0
"""Seconds in which an interrupted step writes what it has, before it is killed."""
PAUSE = 0.05
"""Seconds between two looks at what runs."""
TAIL = 60
"""Lines of a step's output on the page."""
HOLDS, DIFFERS, UNASKED, ABSENT = "holds", "differs", "not asked", "not installed"
UNANSWERED = "did not run"
"""What a finding says whose library is not there."""


@dataclass(frozen=True)
class Fact:
    """Something known of an arch: ``pattern`` finds its line in the log of ``step``, whose group is ``expected``; it is
    asked where ``package`` is importable."""

    step: str
    package: str
    what: str
    pattern: str
    expected: str


def _chain(contract: str, package: str, what: str, **lines: str) -> tuple[Fact, ...]:
    """Lines of a fingerprint, by their first words."""
    words = {name: name.replace("_", " ") for name in lines}
    return tuple(
        Fact(f"chain-{contract}", package, f"{what}: {words[name]}", rf"^{words[name]}: (.*)$", expected)
        for name, expected in lines.items()
    )


WGMMA = {
    "group_size": "32",
    "alignment": "13 fraction bits, toward zero",
    "accumulator": "13 fraction bits, toward zero",
    "output_rounding": "nearest, ties to even",
}
"""Of sm90's FP8 instruction. Sources: captures of an H200, arXiv 2512.07004 (H100, H200), DeepSeek-V3 section 3.3.2."""
KNOWN: Mapping[str, tuple[Fact, ...]] = {
    "sm90": (
        *_chain(
            "fp8_gemm_nt",
            "deep_gemm",
            "DeepGEMM's dense product",
            **WGMMA,
            promotion_interval="promotion every 128; levels (32, 128)",
            promotion="FMA",
            schedules_that_reproduce_every_bit="sm90.promote128",
        ),
        *_chain(
            "torch_per_token_w8a8_scaled_mm",
            "torch",
            "torch._scaled_mm by rows, without fast accumulation",
            **WGMMA,
            promotion_interval="promotion every 128; levels (32, 128)",
        ),
        *_chain("cutlass_scaled_mm", "vllm", "vLLM's cutlass_scaled_mm", **WGMMA),
        *(
            Fact("findings", package, f"finding {name}", rf"^(there|healed|{UNANSWERED}) +{name}\b", "there")
            for package, name in (
                ("deep_gemm", "deep_gemm_masked_rows"),
                ("flashinfer", "flashinfer_bmm_row_major"),
                ("flashinfer", "flashinfer_sm90_fp4"),
                ("flashinfer", "flashinfer_sm90_mxfp8"),
                ("sgl_kernel", "sgl_kernel_flushed_outputs"),
                ("sgl_kernel", "sgl_kernel_infinity"),
                ("torch", "torch_strided_bias"),
                ("triton", "triton_autotuner_threads"),
                ("vllm", "vllm_attention_unused_slots"),
            )
        ),
    ),
}
"""Facts by arch, each shown by recorded outputs or a script of the repository on an H100 or H200, with the releases of
these; a finding that a later release heals differs."""


@dataclass(frozen=True)
class Step:
    """One command of the tool.

    Attributes
    ----------
    name : its file in the folder, without suffix.
    arguments : of ``fp8-oracle``.
    seconds : the most that it may take.
    asks : what it answers, for the page.
    ends : exit statuses of a step that answered; another one, and no end in time, is no answer.
    fresh : a folder that the command wants new: removed before the step runs again.
    beside : it may run beside the steps of its kind that stand next to it.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    asks: str
    ends: tuple[int, ...] = (0, 1)
    fresh: Path | None = None
    beside: bool = True

    def asked(self, seconds: float) -> list[str]:
        """The arguments where so many seconds are left."""
        rest = str(max(1, int(seconds - ENDING)))
        return [rest if word == REST else word for word in self.arguments]


@dataclass(frozen=True)
class Ran:
    """What became of a step: ``status`` is DONE, FAILED, LATE or LEFT, ``code`` its exit status or -1, ``said`` its
    last line."""

    name: str
    status: str
    code: int
    seconds: float
    said: str


def steps(arch: str, folder: Path) -> tuple[Step, ...]:
    """What is asked of a GPU of an arch (``sm90``); files go into ``folder``. In a source tree whose layer no
    distribution registered, the commands that ask the layer name it."""
    from oracle.bindings.known import adapter_of, find

    readings: list[Step] = []
    if any(i.arch == ALIKE.get(arch, arch) and i.scale_block for i in INSTRUCTIONS.values()):
        for kind in SCALED:
            given: tuple[str, ...] = ("fingerprint", DOT_SCALED, "--block-scaled", kind, "--device", "cuda")
            readings.append(
                Step(f"reading-{kind}", given, ASKED, f"which reading of the {kind} instruction holds", (0,))
            )
    for contract, target in CHAINS:
        bound = find(target, contract)
        assert bound is not None, f"{target} has no binding under {contract}"
        if find_spec(bound.package) is None:
            continue
        given = ("fingerprint", target, "--contract", contract, "--adapter", adapter_of(bound), "--device", "cuda")
        readings.append(Step(f"chain-{contract}", given, ASKED, f"how {target} accumulates as {contract}", (0,)))
    cores = max(4, os.cpu_count() or 4)
    tree, gallery = subjects.layer_of_the_tree(), str(folder / "gallery")
    layer = () if tree is None else ("--provider", tree)
    judged = ("verify", "--arch", arch, "--fixtures", "none", *layer)
    return (
        Step("doctor", ("doctor",), ASKED, "what is installed and usable"),
        Step(
            "plan", ("plan", "--json", str(folder / "plan.json"), *layer), ASKED, "what the layer chooses here, and why"
        ),
        *readings,
        Step(
            "captures",  # apart from verify: outputs are kept by one process, which judges from the beginning
            (*judged, "--contract", "fp8_gemm_nt", "--limit", str(CALL), "--keep", str(folder / "captures")),
            ASKED,
            "outputs of the dense block product, for `fixtures adopt`",
            fresh=folder / "captures",
        ),
        Step(  # compiles beside the others what the steps behind it call
            "findings",
            ("findings", "--jobs", str(cores), "--seconds", str(SCRIPT), "--out", str(folder), *_known_first(arch)),
            FINDINGS,
            "known faults of releases",
        ),
        Step(
            "timings",
            ("plan", "--timings", str(folder / "timings.jsonl"), "--seconds", "30", *layer),
            60,
            "how long the backends of dense products take",
            beside=False,
        ),
        Step(
            "verify",
            (
                *(*judged, "--limit", str(CALL), "--hangs", "1", "--jobs", str(cores - cores // 4), "--seconds", REST),
                *("--record", str(folder / "verify.jsonl"), "--resume"),
                *("--json", str(folder / "verify.json"), "--html", str(folder / "verify.html")),
            ),
            JUDGED,
            "every routine that the layer plans here, judged, one case of each first",
            ends=(0, 1, 130),
        ),
        Step(
            "gallery",
            (
                *("gallery", "run", "--out", gallery, "--device", "cuda", "--jobs", str(max(2, cores // 4))),
                *("--seconds", REST, "--resume"),
            ),
            JUDGED,
            "which installed kernels conform, with poisoned outputs",
        ),
    )


def _known_first(arch: str) -> tuple[str, ...]:
    """What has ``findings`` begin with those that are known of an arch; nothing where there are no scripts."""
    every = sorted(path.stem for path in finding_scripts.FOLDER.glob("*.py"))
    known = {fact.what.split()[-1] for fact in KNOWN.get(arch, ()) if fact.step == "findings"}
    ordered = sorted(every, key=lambda name: name not in known)
    return tuple(word for name in ordered for word in ("--only", name))


def run(chosen: Sequence[Step], folder: Path, *, arch: str, seconds: float) -> Iterator[Ran]:
    """What became of each step, as they end; those that ended in an earlier run of the folder come from its record.

    Raises FixtureError: the folder is of another machine.
    """
    fixtures.make_folder(folder)
    machine, known = {"arch": arch, **provenance.machine()}, dict[str, Any]()
    if (folder / RECORD).is_file():
        known = json.loads((folder / RECORD).read_text())
        if known["machine"] != machine:
            raise FixtureError(f"{folder}: holds the answers of another machine; pass another --out")
    ends = time.monotonic() + seconds
    ran = {one["name"]: Ran(**one) for one in known.get("steps", ())}
    for _, group in groupby(enumerate(chosen), lambda at: (at[1].beside, at[1].beside or at[0])):
        asked = [step for _, step in group]
        yield from (ran[step.name] for step in asked if _answered(step, ran))
        for one in _together([step for step in asked if not _answered(step, ran)], folder, ends):
            ran[one.name] = one
            fixtures.write_json(folder / RECORD, {"machine": machine, "steps": [asdict(one) for one in ran.values()]})
            yield one


def _answered(step: Step, ran: Mapping[str, Ran]) -> bool:
    return step.name in ran and ran[step.name].status == DONE


@dataclass
class _Running:
    """The process of a step; ``ends`` is when it is interrupted, then when it is killed."""

    step: Step
    log: Path
    process: subprocess.Popen[bytes]
    began: float
    ends: float
    late: bool = False

    def over(self) -> bool:
        """Whether it has ended; one whose time is up is interrupted, and killed where it goes on all the same."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() < self.ends:
            return False
        if self.late:
            self.kill()
            return True
        self.process.send_signal(signal.SIGINT)
        self.late, self.ends = True, time.monotonic() + GRACE
        return False

    def kill(self) -> None:
        """End the process and those that it began."""
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ran(self) -> Ran:
        code = -1 if self.late else self.process.returncode
        status = LATE if self.late else DONE if code in self.step.ends else FAILED
        text = self.log.read_text(errors="replace")
        lines = [line.strip(" │") for line in text.splitlines() if re.search(r"\w", line)]
        said = lines[-1] if lines else "it said nothing"
        return Ran(self.step.name, status, code, round(time.monotonic() - self.began, 1), said)


def _together(steps: Sequence[Step], folder: Path, ends: float) -> Iterator[Ran]:
    """What becomes of steps that run side by side, as they end."""
    running: list[_Running] = []
    try:
        for step in steps:
            seconds = min(step.seconds, ends - time.monotonic())
            if seconds <= 0:
                yield Ran(step.name, LEFT, -1, 0.0, "the budget was spent; run the command again")
            else:
                running.append(_begun(step, folder, seconds))
        while running:
            for one in [one for one in running if one.over()]:
                running.remove(one)
                one.kill()
                yield one.ran()
            time.sleep(PAUSE)
    finally:
        for one in running:
            one.kill()


def _begun(step: Step, folder: Path, seconds: float) -> _Running:
    if step.fresh is not None and step.fresh.exists():
        shutil.rmtree(step.fresh)
    log, began = folder / f"{step.name}.log", time.monotonic()
    with log.open("w") as file, starting.process(f"the step {step.name}"):
        process = subprocess.Popen([*TOOL, *step.asked(seconds)], stdout=file, stderr=file, start_new_session=True)
    return _Running(step, log, process, began, began + seconds)


def answered(folder: Path, arch: str) -> list[tuple[Fact, str, str]]:
    """Each fact that is known of the arch, the answer of this machine, and HOLDS, DIFFERS, UNASKED or ABSENT; the logs
    of the folder have the answers, and a question without a log or without its line has none. A question whose script
    did not run answers what it said."""
    results = []
    for fact in KNOWN.get(arch, ()):
        path = folder / f"{fact.step}.log"
        text = path.read_text(errors="replace") if path.is_file() else ""
        line = re.search(fact.pattern, text, re.MULTILINE)
        if line is not None and line[1] != UNANSWERED:
            results.append((fact, line[1], HOLDS if line[1] == fact.expected else DIFFERS))
        elif find_spec(fact.package) is None:
            results.append((fact, f"{fact.package} is not installed", ABSENT))
        else:
            results.append((fact, "-" if line is None else line.string[line.start() :].partition("\n")[0], UNASKED))
    return results


def counts(known: Sequence[tuple[Fact, str, str]], arch: str) -> str:
    """How many facts hold, of those that were asked, and why the others were not."""
    of = Counter(status for _, _, status in known)
    lacking = sorted({fact.package for fact, _, status in known if status == ABSENT})
    text = f"{of[HOLDS]} of {of[HOLDS] + of[DIFFERS]} known facts of {arch} hold"
    text += f"; {of[UNASKED]} were not asked" if of[UNASKED] else ""
    return text + (f"; {of[ABSENT]} need {', '.join(lacking)}, not installed here" if lacking else "")


def page(chosen: Sequence[Step], ran: Mapping[str, Ran], folder: Path, arch: str) -> str:
    """The answers as Markdown: a line for each step, what is known of the arch beside this machine's answers, then the
    end of what each step printed."""
    facts = ", ".join(f"{name} {value}" for name, value in provenance.machine().items())
    lines = [f"# First light of {arch}", "", facts, "", "| question | answer | seconds |", "|:--|:--|--:|"]
    for step in chosen:
        one = ran[step.name]
        answer = one.said if one.status == DONE else f"**{one.status}**: {one.said}"
        cell = answer.replace("|", "\\|")
        lines.append(f"| {step.asks} | {cell} | {one.seconds:g} |")
    if facts_of_arch := answered(folder, arch):
        lines += [
            "",
            f"## What is known of {arch}",
            "",
            f"{counts(facts_of_arch, arch)}.",
            "",
            "| fact | expected | answer | |",
            "|:--|:--|:--|---|",
        ]
        lines += [
            f"| {fact.what} | {fact.expected} | {answer} | {f'**{DIFFERS}**' if status == DIFFERS else status} |"
            for fact, answer, status in facts_of_arch
        ]
    for step in chosen:
        lines += ["", f"## {step.asks}", "", f"`fp8-oracle {' '.join(step.asked(step.seconds))}`", ""]
        path = folder / f"{step.name}.log"
        if path.is_file():
            lines += ["```text", *path.read_text(errors="replace").splitlines()[-TAIL:], "```"]
    return "\n".join(lines) + "\n"
