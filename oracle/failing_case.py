"""One failing case as one small safetensors file: inputs, output, and in the metadata what was called.

    metadata   schema, contract, options (JSON, dtypes by name), arch, numerics, kernel, note
    tensors    the contract's inputs by name; the output as ``out``, or ``out.NAME`` for each of several

Reading goes through :mod:`oracle.fixtures`, so a pickle or a torn file is refused. Not covered: strides (a recorded
tensor is contiguous, a column-major weight is stored transposed and named in ``transposed``).
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

SCHEMA = "fp8-oracle.failing-case/1"


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
    transposed = [name for name, t in case.inputs.items() if t.dim() == 2 and t.stride(0) == 1 and t.stride(1) != 1]
    tensors = {name: _plain(t.t() if name in transposed else t) for name, t in case.inputs.items()}
    outputs = (
        {"out": case.output} if isinstance(case.output, Tensor) else {f"out.{n}": t for n, t in case.output.items()}
    )
    tensors |= {name: _plain(t) for name, t in outputs.items()}
    words = {name: options.word(value) for name, value in case.options.items()}
    metadata = {
        "schema": SCHEMA,
        "contract": case.contract,
        "options": json.dumps(words),
        "arch": case.arch,
        "numerics": case.numerics or "",
        "kernel": case.kernel,
        "note": case.note,
        "transposed": ",".join(transposed),
    }
    fixtures.write_bytes(path, safetensors.torch.save(tensors, metadata))


def read(path: str | Path) -> FailingCase:
    """Read the file.

    Raises
    ------
    FixtureError
        Missing, torn, no safetensors file, or not of this schema.
    """
    tensors, metadata = fixtures.read_tensors(path), fixtures.read_metadata(path)
    if metadata.get("schema") != SCHEMA:
        raise FixtureError(
            f"{path}: says nothing of the call that made it (schema {metadata.get('schema')!r}); "
            "name the call with --contract"
        )
    contract = get(metadata["contract"])
    flipped = [name for name in metadata.get("transposed", "").split(",") if name]
    inputs = {s.name: tensors[s.name] for s in contract.inputs if s.name in tensors}
    inputs |= {name: _transposed(inputs[name]) for name in flipped if name in inputs}
    output = (
        tensors["out"] if contract.outputs == ("out",) else {name: tensors[f"out.{name}"] for name in contract.outputs}
    )
    return FailingCase(
        contract.name,
        inputs,
        output,
        options.parse(contract, json.loads(metadata["options"])),
        metadata["arch"],
        metadata["numerics"] or None,
        metadata.get("kernel", ""),
        metadata.get("note", ""),
    )


def _plain(x: Tensor) -> Tensor:
    if x.element_size() == 1 and not x.is_contiguous():
        return x.view(torch.uint8).contiguous().view(x.dtype).cpu()
    return x.detach().contiguous().cpu()


def _transposed(x: Tensor) -> Tensor:
    return x.view(torch.uint8).t().view(x.dtype) if x.element_size() == 1 else x.t()
