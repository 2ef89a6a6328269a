"""The judge of a kernel-evaluation suite: a solution is run on workloads, and the verdicts become its traces.

A solution runs as every kernel does (:mod:`oracle.harness.session`): in a worker process with a time limit, between
guard zones, ``untrusted`` in a sandbox. What it computes is judged by a contract and by nothing of the suite.

====================  ============================================================================================
status of the trace   what was found
====================  ============================================================================================
PASSED                the verdict is PASSED, or MISTRUSTED (these inputs could not have shown a fault; the log says so)
INCORRECT_NUMERICAL   the verdict is FAILED, on these data or on others, or the same call gave other bits
INCORRECT_SHAPE       an output has another shape than the contract's
INCORRECT_DTYPE       an output has another dtype than the definition's
RUNTIME_ERROR         it raised, crashed, refused the call, returned no tensors, or wrote where or when it must not
COMPILE_ERROR         it cannot be imported, or not in the time of a call
TIMEOUT               it did not return in time
====================  ============================================================================================

A workload that is right is called again as ``validate`` does (:mod:`oracle.harness.watches`): the same call, other data
of its shapes at the same addresses, data that begin like the first and end like others, memory with other contents; and
once more after all others, which are called in reverse order. Random inputs are drawn anew in each run, so no table of
answers holds theirs. Other data of stored inputs are their elements shifted by one; integers stay.

Not covered: what an untrusted solution does to the adapter in its own process, and a cache by the whole content.

``correctness`` has the largest errors against the float64 truth, and the verdict under ``extra``. Nothing is timed: the
figures of ``performance``, which the schema demands of a PASSED trace, are 0.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.diagnosis.explain import explain_verdict
from oracle.errors import FixtureError, OptionError, OracleError
from oracle.fixtures import files as fixtures
from oracle.fixtures import suite
from oracle.fixtures.suite import Definition, Solution, TensorOf, Workload
from oracle.harness import provenance, solution_entry, watches
from oracle.harness.process import Worker
from oracle.harness.report import LIMIT, Finding
from oracle.harness.session import Answer, Session, failed
from oracle.harness.validation import SEEDS, arch_of
from oracle.numbers.formats import decode, same_bits
from oracle.routines import Contract, data, get
from oracle.routines.base import Call
from oracle.verdict.compare import Status, Verdict

SAID = 4000  # characters of what the solution printed
LARGEST = 1 << 32
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AGAIN = "called after the other workloads"
SETTLED = 0.1  # seconds after which what a thread of the solution still writes is seen
NUMERICAL = (watches.RERUN, watches.STALE, watches.DIRTY, watches.MIXED, watches.OTHER, "every element written", AGAIN)


def evaluate(
    definition: Definition,
    workloads: Sequence[Workload],
    solution: Solution,
    contract: str,
    *,
    root: Path,
    renamed: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
    device: str = "cpu",
    arch: str | None = None,
    numerics: str | None = None,
    untrusted: bool = False,
    limit: float = LIMIT,
    seed: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The trace of each workload, as JSON, in their order; those with the same numbers as inputs come together.

    Parameters
    ----------
    definition, workloads, solution : as :mod:`oracle.fixtures.suite` reads them.
    contract : a name of :func:`oracle.contracts`; what judges the outputs.
    root : where paths of workloads begin.
    renamed : inputs of the definition by the contract's names, where those differ; ``X.T`` is the transpose of ``X``.
    options : of the contract. An input of the definition that is a number is passed to the solution, and taken as the
        option of its name where there is one; ``out_dtype`` is that of the definition's output.
    device, arch, numerics, untrusted : as for :func:`oracle.validate`.
    limit : seconds for one call, and for the import.
    seed : of random inputs, codes and values of variance 1 or 128^2, scales that are no powers of two; None draws one.
        ``correctness`` of a trace says it.

    Raises
    ------
    OracleError
        The question is wrong: a file, a name, or inputs that the contract refuses. Never for a wrong solution.
    """
    routine, renamed = get(contract), renamed or {}
    if untrusted and device != "cpu":
        raise OptionError(f"untrusted runs a solution on the CPU alone, not on {device}")
    if not 0 < limit < math.inf:
        raise OptionError(f"limit={limit:g} is no number of seconds; give a positive one")
    if seed is not None and seed < 0:
        raise OptionError(f"seed={seed} is negative; give 0 or more, or none")
    seed = secrets.randbelow(SEEDS) if seed is None else seed
    if unknown := [name for name in renamed if name not in {spec.name for spec in routine.inputs}]:
        raise OptionError(f"--input {unknown[0]}=...: {contract} has no such input")
    roles = _taken(routine, definition, renamed)
    outputs = _outputs(routine, definition)
    arch = arch or arch_of(device)
    for scalars, group in groupby(workloads, key=lambda w: _scalars(w, definition)):
        plan = {
            "file": solution.file,
            "function": solution.function,
            "destination": solution.destination,
            "axes": {name: extent for name, extent in definition.axes.items() if extent is not None},
            "inputs": [_planned(name, of, roles, dict(scalars)) for name, of in definition.inputs.items()],
            "outputs": [
                {"name": name, "as": outputs[name], "shape": list(of.shape or ()), "dtype": _name(of.dtype)}
                for name, of in definition.outputs.items()
            ],
        }
        call = _options(routine, definition, dict(scalars), options or {})
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            entry = _written(folder, solution, plan)
            worker = stack.enter_context(
                Worker(
                    f"{entry}:solution",
                    adapter=f"{entry}:call",
                    device=device,
                    limit=limit,
                    path=(str(folder),),
                    untrusted=untrusted,
                    loading=limit,
                )
            )
            session = Session(worker, routine, device=device, arch=arch, numerics=numerics)
            first = {}
            data = partial(_inputs, routine, definition, roles=roles, root=root, seed=seed)
            chosen = list(group)
            for workload in chosen:
                first[workload.uuid] = _first(session, workload, data, call, definition, outputs)
            for workload in reversed(chosen):
                if (result := first[workload.uuid]).status == "PASSED":
                    first[workload.uuid] = _last(session, workload, data, call, result)
            for workload in chosen:
                inputs = data(workload)
                yield {
                    "definition": definition.name,
                    "workload": dict(workload.record),
                    "solution": solution.name,
                    "evaluation": _evaluation(session, inputs, call, first[workload.uuid], seed),
                }


@dataclass(frozen=True)
class _Found:
    """What is known of a workload: the first answer and its verdict, what further calls showed, the status."""

    answer: Answer
    verdict: Verdict
    status: str
    beyond: tuple[Finding, ...] = ()


def _first(
    session: Session,
    workload: Workload,
    data: Callable[..., dict[str, Tensor]],
    options: dict[str, object],
    definition: Definition,
    outputs: Mapping[str, str],
) -> _Found:
    """The first call of a workload and, where it is right, those that tell a kernel from its earlier answers."""
    inputs, contract = data(workload), session.contract
    contract.check(inputs, options)
    answer = session.call(inputs, options)
    finding = session.numbers(workload.uuid, inputs, options, answer)
    dtypes = {outputs[name]: of.dtype for name, of in definition.outputs.items()}
    beyond = [f for f in watches.memory(session, workload.uuid, answer) if isinstance(f, Finding) and f.fails]
    status = _status(Call(contract, inputs, options), answer, finding.verdict, dtypes, beyond)
    if status != "PASSED":
        return _Found(answer, finding.verdict, status, tuple(beyond))
    calls = watches.Calls(session, workload.uuid)
    calls.know(inputs, options, answer, finding.verdict)
    other = data(workload, other=True)
    try:
        contract.check(other, options)
    except OracleError:
        other = inputs  # stored data that the contract takes in this order alone
    for watch in (
        watches.repeats(calls, inputs, options, (other, options)),
        watches.mixed(calls, inputs, options, other),
    ):
        results = [*watch, *calls.findings()]
        beyond += [f for f in results if isinstance(f, Finding) and f.fails]
        if beyond or calls.hung:
            break
    return _Found(answer, finding.verdict, _further(beyond, calls.hung), tuple(beyond))


def _last(
    session: Session,
    workload: Workload,
    data: Callable[..., dict[str, Tensor]],
    options: dict[str, object],
    first: _Found,
) -> _Found:
    """The call of a workload after all others: an answer of other bits fails, right or wrong."""
    inputs = data(workload)
    time.sleep(SETTLED)
    answer = session.call(inputs, options)
    beyond = [f for f in watches.memory(session, workload.uuid, answer) if isinstance(f, Finding) and f.fails]
    if answer.problem is not None:
        beyond.append(Finding(workload.uuid, AGAIN, answer.problem))
    elif not all(bool(same_bits(x, answer.outputs[name]).all()) for name, x in first.answer.outputs.items()):
        verdict = session.judge(inputs, options, answer)
        text = f"other bits than the first call of this workload; {verdict.summary}"
        beyond.append(Finding(workload.uuid, AGAIN, replace(failed(text), total=verdict.total)))
    return replace(first, status=_further(beyond, answer.hung), beyond=tuple(beyond))


def _further(beyond: Sequence[Finding], hung: bool) -> str:
    """The status that follows from what the further calls of a right workload showed."""
    if hung:
        return "TIMEOUT"
    if any(f.verdict.status is Status.FAILED and f.watch in NUMERICAL for f in beyond):
        return "INCORRECT_NUMERICAL"
    return "RUNTIME_ERROR" if beyond else "PASSED"


def _evaluation(
    session: Session, inputs: Mapping[str, Tensor], options: dict[str, object], result: _Found, seed: int
) -> dict[str, Any]:
    """The evaluation of one workload, as the schema has it."""
    contract, answer, verdict, status, beyond = (
        session.contract,
        result.answer,
        result.verdict,
        result.status,
        result.beyond,
    )
    call = Call(contract, inputs, options)
    if verdict.status is Status.FAILED and status == "INCORRECT_NUMERICAL" and answer.problem is None:
        asked = contract.asked(inputs, answer.output, arch=session.arch, **options)
        verdict = explain_verdict(verdict, asked, answer.output, numerics=session.numerics)
    again = [f"{f.watch}: {f.verdict.summary}" for f in beyond]
    lines = [*again, verdict.summary] if not verdict.status.is_failure else [verdict.summary, *again]
    if status == "INCORRECT_NUMERICAL" and not verdict.status.is_failure:
        verdict = replace(verdict, status=Status.FAILED, summary=again[0], reason=again[0])
    lines += verdict.because
    numbers = status in ("PASSED", "INCORRECT_NUMERICAL")
    nothing = {"latency_ms": 0.0, "reference_latency_ms": 0.0, "speedup_factor": 0.0}
    libraries = provenance.versions(())
    return {
        "status": status,
        "log": "\n".join([*lines, session.worker.output[-SAID:]]).strip(),
        "correctness": _correctness(call, answer, verdict, seed) if numbers else None,
        "performance": nothing if status == "PASSED" else None,
        "environment": {"hardware": libraries.get("gpu") or f"CPU {libraries['machine']}", "libs": libraries},
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _status(
    call: Call, answer: Answer, verdict: Verdict, dtypes: Mapping[str, torch.dtype], beyond: Sequence[Finding]
) -> str:
    if answer.hopeless:
        return "COMPILE_ERROR"
    if answer.hung:
        return "TIMEOUT"
    for name, due in call.contract.outputs(call).items() if answer.facts else ():
        fact = answer.facts[name]
        if due.shape is not None and fact["shape"] != list(due.shape):
            return "INCORRECT_SHAPE"
        if fact["dtype"] != str(dtypes[name]):
            return "INCORRECT_DTYPE"
    if verdict.status in (Status.CRASHED, Status.UNSUPPORTED, Status.UNTESTED, Status.SKIPPED) or beyond:
        return "RUNTIME_ERROR"
    return "INCORRECT_NUMERICAL" if verdict.status is Status.FAILED else "PASSED"


def _correctness(call: Call, answer: Answer, verdict: Verdict, seed: int) -> dict[str, object]:
    """The largest errors over the specified elements; the relative one over those whose truth is not 0."""
    absolute = relative = 0.0
    for name, due in call.truth.items():
        truth, seen = (decode(x) if x.is_floating_point() else x.to(torch.float64) for x in (due, answer.outputs[name]))
        specified = ~truth.isnan()
        off = (seen - truth).abs()[specified].nan_to_num(math.inf, math.inf)
        off[seen[specified] == truth[specified]] = 0.0  # infinities
        size = truth.abs()[specified]
        if off.numel():
            absolute = max(absolute, float(off.max()))
        if bool((size > 0).any()):
            ratios = off[size > 0] / size[size > 0]
            relative = max(relative, float(ratios.nan_to_num(math.inf, math.inf).max()))
    facts = {name: getattr(verdict, name) for name in ("summary", "outside", "total", "matches", "basis")}
    extra = {
        "judge": "fp8-oracle",
        "contract": call.contract.name,
        "verdict": str(verdict.status),
        "seed": seed,
        **facts,
    }
    extra["explained_by"] = list(verdict.explained_by)
    errors = {"max_relative_error": relative, "max_absolute_error": absolute}
    return {**{name: x if math.isfinite(x) else "Infinity" for name, x in errors.items()}, "extra": extra}


# --- names and data -----------------------------------------------------------------------------------------


def _taken(contract: Contract, definition: Definition, renamed: Mapping[str, str]) -> dict[str, tuple[str, bool]]:
    """By inputs of the definition: the contract's name, and whether it takes the transpose."""
    roles: dict[str, tuple[str, bool]] = {}
    for spec in contract.inputs:
        name = renamed.get(spec.name, spec.name)
        base = name if name in definition.inputs else name.removesuffix(".T")
        if base in definition.inputs:
            roles[base] = (spec.name, base != name)
        elif not spec.optional or spec.name in renamed:
            input_names = ", ".join(definition.inputs)
            raise OptionError(
                f"{definition.name} has no input {name!r}, which {contract.name} needs; it has {input_names}; name the "
                f"right one with --input {spec.name}=INPUT"
            )
    for name, of in definition.inputs.items():
        if name in roles and roles[name][1] and len(of.shape or ()) != 2:
            raise OptionError(f"{name}.T: {name} of {definition.name} has rank {len(of.shape or ())}; a matrix has 2")
        if of.shape is not None and name not in roles:
            raise OptionError(f"{name!r} of {definition.name} is no input of {contract.name}; use --input NAME={name}")
    return roles


def _outputs(contract: Contract, definition: Definition) -> dict[str, str]:
    """The contract's names of the definition's outputs: the same, or those in the same place."""
    names = tuple(definition.outputs)
    if len(names) != len(contract.returns):
        due = ", ".join(contract.returns)
        raise OptionError(f"{definition.name} has the outputs {', '.join(names)}; {contract.name} has {due}")
    same = set(names) == set(contract.returns)
    return {name: name if same else contract.returns[i] for i, name in enumerate(names)}


def _planned(
    name: str, of: TensorOf, taken: Mapping[str, tuple[str, bool]], scalars: Mapping[str, object]
) -> dict[str, object]:
    if of.shape is None and name in scalars:
        return {"value": scalars[name]}
    return {"from": taken[name][0], "transposed": taken[name][1], "shape": list(of.shape or ())}


def _scalars(workload: Workload, definition: Definition) -> tuple[tuple[str, object], ...]:
    """The inputs of a workload that are numbers."""
    scalars = []
    for name, of in definition.inputs.items():
        source = workload.inputs[name]
        if of.shape is None or source["type"] == "scalar":
            value = source.get("value")
            if of.shape is not None or not isinstance(value, bool | int | float):
                raise FixtureError(f"workload {workload.uuid}: {name} is {source!r:.80}; only a number is a scalar")
            scalars.append((name, value))
    return tuple(scalars)


def _options(
    contract: Contract, definition: Definition, scalars: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, object]:
    option_names = {spec.name for spec in contract.options}
    values = {name: value for name, value in scalars.items() if name in option_names}
    if "out_dtype" in option_names:
        values["out_dtype"] = next(iter(definition.outputs.values())).dtype
    return {**values, **given}


def _inputs(
    contract: Contract,
    definition: Definition,
    workload: Workload,
    *,
    roles: Mapping[str, tuple[str, bool]],
    root: Path,
    seed: int,
    other: bool = False,
) -> dict[str, Tensor]:
    """The inputs of the contract: loaded, or drawn; with ``other`` other data of these shapes."""
    axes = {**definition.axes, **workload.axes}
    inputs = {}
    for name, (ours, transposed) in roles.items():
        of, source = definition.inputs[name], workload.inputs[name]
        shape = tuple(int(axes[axis] or 0) for axis in of.shape or ())
        label = f"{definition.name} {workload.uuid} {name} seed={seed}" + " other" * other
        tensor = _drawn(label, ours, shape, of.dtype) if source["type"] == "random" else suite.tensor_of(source, root)
        if tuple(tensor.shape) != shape or tensor.dtype != of.dtype:
            what = f"{_name(tensor.dtype)} {list(tensor.shape)}"
            raise FixtureError(
                f"workload {workload.uuid}: {name} is {what}; {definition.name} says {_name(of.dtype)} {list(shape)}"
            )
        if other and source["type"] != "random" and tensor.is_floating_point():
            bits = tensor.contiguous().view(BITS[tensor.dtype.itemsize])
            tensor = bits.flatten().roll(1).view(bits.shape).view(tensor.dtype)
        inputs[ours] = tensor.t() if transposed else tensor
    return {spec.name: inputs[spec.name] for spec in contract.inputs if spec.name in inputs}


def _drawn(label: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if math.prod(shape) > LARGEST:
        raise FixtureError(f"{name} has the shape {list(shape)}; at most {LARGEST} random elements are drawn")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        return data.operand(label, "randn", rows, columns, dtype=dtype, side="b").view(shape)
    if not dtype.is_floating_point:
        raise OptionError(f"{name} is random {_name(dtype)}, which may be no sound value; store it in a file")
    if "scale" in name and dtype == torch.float32:
        return data.scales(label, "randn", shape).view(shape)
    return data.normal(label, shape, dtype=dtype).view(shape)


def _written(folder: Path, solution: Solution, plan: Mapping[str, object]) -> str:
    """Write the sources, the plan and the entry into a folder; the name of the module to import."""
    for path, content in solution.sources.items():
        place = folder / "sources" / path
        fixtures.make_folder(place.parent)
        place.write_text(content, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    name = f"solution_{secrets.token_hex(8)}"
    shutil.copyfile(str(solution_entry.__file__), folder / f"{name}.py")
    return name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
