"""One failing case as one small safetensors file: inputs, output, and in the metadata what was called.

    metadata   schema, contract, options (JSON, dtypes by name), arch, numerics, kernel, note, strides (JSON)
    tensors    the contract's inputs by name; the output as ``out``, or ``out.NAME`` for each of several

A file holds the logical elements; ``strides`` names those of every tensor that was not contiguous, a column-major
weight or scale, ``memory.NAME`` its memory where that has padding, and reading restores both. Reading goes through
:mod:`oracle.fixtures`, so a pickle or a torn file is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from oracle import fixtures, options
from oracle.contracts import get
from oracle.errors import FixtureError
from oracle.strides import padded_memory, restored

SCHEMA = "fp8-oracle.failing-case/1"
_AGAIN = "write it again with `validate --save`, or name the call with --contract"


@dataclass(frozen=True)
class FailingCase:
    """Everything that a verdict needs, and where it came from."""

    contract: str
    inputs: Mapping[str, Tensor]
    output: Tensor | dict[str, Tensor]
    options: Mapping[str, object]
    arch: str
    numerics: str | None
    kernel: str = ""
    note: str = ""


def write(path: str | Path, case: FailingCase) -> None:
    """Write the file atomically."""
    outputs = (
        {"out": case.output} if isinstance(case.output, Tensor) else {f"out.{n}": t for n, t in case.output.items()}
    )
    given = {**case.inputs, **outputs}
    tensors = {name: _plain(t) for name, t in given.items()}
    tensors |= {f"memory.{name}": _plain(m) for name, t in given.items() if (m := padded_memory(t)) is not None}
    words = {name: options.word(value) for name, value in case.options.items()}
    metadata = {
        "schema": SCHEMA,
        "contract": case.contract,
        "options": json.dumps(words),
        "arch": case.arch,
        "numerics": case.numerics or "",
        "kernel": case.kernel,
        "note": case.note,
        "strides": json.dumps({name: t.stride() for name, t in given.items() if not t.is_contiguous()}),
    }
    fixtures.write_bytes(path, safetensors.torch.save(tensors, metadata))


def read(path: str | Path) -> FailingCase:
    """Read the file.

    Raises
    ------
    FixtureError
        Missing, torn, no safetensors file, not of this schema, or without something that the schema has.
    """
    tensors, metadata = fixtures.read_tensors(path), fixtures.read_metadata(path)
    if metadata.get("schema") != SCHEMA:
        raise FixtureError(
            f"{path}: says nothing of the call that made it (schema {metadata.get('schema')!r}); "
            "name the call with --contract"
        )
    if missing := [key for key in ("contract", "options", "arch", "numerics") if key not in metadata]:
        raise FixtureError(f"{path}: its metadata lacks {', '.join(missing)}; {_AGAIN}")
    contract = get(metadata["contract"])
    for name, stride in _object(path, "strides", metadata.get("strides", "{}")).items():
        if name in tensors:
            steps = _steps(path, name, stride, tensors[name].dim())
            tensors[name] = restored(tensors[name], steps, tensors.get(f"memory.{name}"))
    inputs = {s.name: tensors[s.name] for s in contract.inputs if s.name in tensors}
    named = {"out": "out"} if contract.outputs == ("out",) else {f"out.{name}": name for name in contract.outputs}
    if missing := [tensor for tensor in named if tensor not in tensors]:
        raise FixtureError(f"{path}: has no tensor {missing[0]!r}, an output of {contract.name}; {_AGAIN}")
    outputs = {name: tensors[tensor] for tensor, name in named.items()}
    return FailingCase(
        contract.name,
        inputs,
        outputs["out"] if contract.outputs == ("out",) else outputs,
        options.parse(contract, _object(path, "options", metadata["options"])),
        metadata["arch"],
        metadata["numerics"] or None,
        metadata.get("kernel", ""),
        metadata.get("note", ""),
    )


def _object(path: str | Path, what: str, text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FixtureError(f"{path}: its {what} {text[:80]!r} are no JSON object; {_AGAIN}")
    return found


def _steps(path: str | Path, name: str, stride: object, axes: int) -> list[int]:
    if not isinstance(stride, list) or len(stride) != axes or not all(type(s) is int and s >= 0 for s in stride):
        raise FixtureError(f"{path}: {stride!r} are no strides of {name}, which has {axes} axes; {_AGAIN}")
    return stride


def _plain(x: Tensor) -> Tensor:
    """A copy in memory of its own, as the format asks: a kernel may have returned one of its inputs."""
    codes = x.detach().view(torch.uint8) if x.element_size() == 1 else x.detach()
    return codes.cpu().clone(memory_format=torch.contiguous_format).view(x.dtype)

