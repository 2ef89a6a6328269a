"""Recorded outputs of real kernels: what was recorded, where, under which contract each output falls.

A captures folder holds safetensors files and one ``manifest.json`` (schema ``fp8-oracle.captures/1``)::

    files.<name>.sha256       digest of the file
    files.<name>.arch         "sm90"
    files.<name>.provenance   device, driver, library versions, note
    files.<name>.source       how the file was made: the recorded file, tensors renamed, unit tensors added
    files.<name>.outputs.<tensor or group>  contract, inputs (contract name -> tensor, ``x.T`` transposed), options,
                                            numerics, or ``unsupported``: why no contract can judge it yet

    files.<name>.outputs.<...>.also         further calls that give this output: contract, inputs, options, numerics

An output group of a contract with several outputs is named ``out.<label>`` and covers ``out.<label>.<output>``. An
output of a case (:mod:`oracle.keeping`) has, instead of inputs and options,

    case, inputs_sha256   the case that makes the inputs again, and the digest of what it made then
    subject               what ran
    tensors.<output>      the tensor of the file, or with ``shape`` and ``strides`` the memory it is laid out over

Not covered: judging (:mod:`oracle.runner`), known failures (:mod:`oracle.ledger`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle import cases, fixtures, memory, options
from oracle.contracts.base import get
from oracle.errors import CaseError, FixtureError
from oracle.golden import raw_bytes

SCHEMA = "fp8-oracle.captures/1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recording:
    """One safetensors file of a captures folder, read once and only when needed."""

    path: Path
    sha256: str
    arch: str
    provenance: Mapping[str, str]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return fixtures.read_tensors(self.path, sha256=self.sha256)


@dataclass(frozen=True)
class Capture:
    """One recorded output (or group of outputs) with the call that made it."""

    recording: Recording
    output: str
    contract: str
    inputs_from: Mapping[str, str]
    option_words: Mapping[str, object]
    numerics: str | None
    unsupported: str | None
    case: str | None = None
    inputs_sha256: str = ""
    ran: str = ""
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    again: bool = False

    @property
    def id(self) -> str:
        """``captures/<file stem>/<output>``, with ``/<contract>`` where it is judged again; unique in its folder."""
        return f"captures/{self.recording.path.stem}/{self.output}" + (f"/{self.contract}" if self.again else "")

    @property
    def subject(self) -> str:
        """The library and call, as in ``deep_gemm.fp8_gemm_nt``, or the subject of the case."""
        return self.ran or self.output.removeprefix("out.")

    def inputs(self) -> dict[str, Tensor]:
        """The contract's inputs; FixtureError when the file lacks one, or its case makes others now."""
        if self.case is not None:
            return _of_case(self.case, self.inputs_sha256)
        return {
            name: pick(self.recording.tensors, tensor, self.recording.path) for name, tensor in self.inputs_from.items()
        }

    def call(self) -> dict[str, object]:
        """The options of the call."""
        if self.case is not None:
            return cases.parse(self.case).call_options()
        return options.parse(get(self.contract), self.option_words)

    def outputs(self, names: tuple[str, ...]) -> Tensor | dict[str, Tensor]:
        """The recorded output; a dict for a contract with several outputs."""
        if self.tensors:
            found = {name: self._laid_out(entry) for name, entry in self.tensors.items()}
            return found if tuple(found) != ("out",) else found["out"]
        if self.output in self.recording.tensors:
            return pick(self.recording.tensors, self.output, self.recording.path)
        return {name: pick(self.recording.tensors, f"{self.output}.{name}", self.recording.path) for name in names}


    def _laid_out(self, entry: Mapping[str, Any]) -> Tensor:
        stored = pick(self.recording.tensors, _text(entry, "tensor", self.id), self.recording.path)
        return memory.laid_out(stored, entry["shape"], entry["strides"]) if "strides" in entry else stored


def _of_case(text: str, sha256: str) -> dict[str, Tensor]:
    try:
        made = cases.parse(text).inputs()
    except CaseError as error:
        raise FixtureError(f"the case {text} of a capture cannot be made: {error}") from error
    if digest_of(made) != sha256:
        raise FixtureError(f"the case {text} makes other inputs than those of the capture; record it again")
    return made


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """One sha256 over the names, dtypes, shapes and row-major bits of tensors."""
    total = hashlib.sha256()
    for name, t in sorted(tensors.items()):
        total.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        total.update(raw_bytes(t.detach().cpu()))
    return total.hexdigest()


def pick(tensors: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    """The tensor of this name; ``x.T`` is the transposed view of ``x`` where no tensor is called so.

    Raises
    ------
    FixtureError
        There is none; the message lists what the file holds.
    """
    base = name.removesuffix(".T")
    if name not in tensors and base not in tensors:
        raise FixtureError(f"{path}: has no tensor {name!r}; it holds {', '.join(sorted(tensors))}")
    return tensors[name] if name in tensors else tensors[base].t()


def load(folder: Path) -> list[Capture]:
    """Every capture of a folder in manifest order.

    Raises
    ------
    FixtureError
        The manifest is missing or of another schema, names a file that is not there, or leaves out one that is.
    """
    files = _files(folder)
    named, present = set(files), {p.name for p in folder.iterdir() if p.name != MANIFEST and p.is_file()}
    if missing := sorted(named - present):
        raise FixtureError(f"{folder / missing[0]}: no such file, but {MANIFEST} names it; restore it or import again")
    if extra := sorted(name for name in present - named if not name.endswith(".partial")):
        raise FixtureError(f"{folder / extra[0]}: not in {MANIFEST}; add an entry for it, or remove the file")
    captures: list[Capture] = []
    for name, entry in files.items():
        recording = Recording(folder / name, _text(entry, "sha256", name), _text(entry, "arch", name),
                              entry.get("provenance", {}))  # fmt: skip
        for output, call in _mapping(entry, "outputs", name).items():
            captures.append(_capture(recording, output, call, f"{name}: {output}"))
            for other in call.get("also", ()):
                captures.append(replace(_capture(recording, output, other, f"{name}: {output}: also"), again=True))
    return captures


def _capture(recording: Recording, output: str, call: Mapping[str, Any], where: str) -> Capture:
    made = "case" in call
    return Capture(
        recording=recording,
        output=output,
        contract=_text(call, "contract", where),
        inputs_from={} if made else _mapping(call, "inputs", where),
        option_words=call.get("options", {}),
        numerics=call.get("numerics"),
        unsupported=call.get("unsupported"),
        case=_text(call, "case", where) if made else None,
        inputs_sha256=_text(call, "inputs_sha256", where) if made else "",
        ran=_text(call, "subject", where) if made else "",
        tensors=_mapping(call, "tensors", where) if made else {},
    )


def check(folder: Path) -> list[str]:
    """Read every file of a folder against its manifest; one line per file, FixtureError at the first fault.

    An output tensor that the manifest does not list is a fault too: nothing is dropped silently.
    """
    lines = []
    captures = load(folder)
    for recording in {id(c.recording): c.recording for c in captures}.values():
        count = len(recording.tensors)
        mine = [c for c in captures if c.recording is recording]
        listed = tuple(c.output for c in mine)
        for capture in mine:
            if capture.case is not None:
                capture.inputs(), capture.outputs(())
        for tensor in recording.tensors:
            if tensor.startswith("out") and not any(tensor == o or tensor.startswith(f"{o}.") for o in listed):
                raise FixtureError(f"{recording.path}: output {tensor!r} is not in {MANIFEST}; say what judges it")
        lines.append(f"{recording.path.name}: {count} tensors, sha256 {recording.sha256[:16]}... as recorded")
    return lines


def rebuild(folder: Path, recorded: Path) -> list[str]:
    """Make every file of a captures folder again from the recorded files, as the manifest's ``source`` says.

    Tensors are renamed to the contracts' input names and unit scales are added; bits are never changed. The
    manifest gets the new digests and the recorded metadata as provenance. One line per file written.
    """
    manifest = fixtures.read_json(folder / MANIFEST, schema=SCHEMA)
    lines = []
    for name, entry in _mapping(manifest, "files", MANIFEST).items():
        if "source" not in entry:
            continue  # kept by a run of this program (oracle.keeping): there is nothing to make it from
        source = _mapping(entry, "source", name)
        origin = recorded / _text(source, "file", name)
        tensors = fixtures.read_tensors(origin)
        rename: Mapping[str, str] = source.get("rename", {})
        if unknown := sorted(set(rename) - set(tensors)):
            raise FixtureError(f"{origin}: has no tensor {unknown[0]!r}, which the manifest renames")
        kept = {rename.get(tensor, tensor): value for tensor, value in tensors.items()}
        for unit, shape in source.get("ones", {}).items():
            kept[unit] = torch.ones(shape, dtype=torch.float32, device="cpu")
        entry["sha256"] = fixtures.write_tensors(folder / name, kept)
        provenance = {**entry.get("provenance", {}), **fixtures.read_metadata(origin)}
        entry["provenance"] = dict(sorted(provenance.items()))
        lines.append(f"{name}: {len(kept)} tensors from {origin.name}")
    fixtures.write_json(folder / MANIFEST, manifest)
    return lines


def _files(folder: Path) -> dict[str, Any]:
    manifest = fixtures.read_json(folder / MANIFEST, schema=SCHEMA)
    return _mapping(manifest, "files", MANIFEST)


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise FixtureError(f"{MANIFEST}: {where} has no {key!r}; every entry needs one")
    return value


def _mapping(record: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = record.get(key)
    if not isinstance(value, dict):
        raise FixtureError(f"{MANIFEST}: {where} has no {key!r} object; every entry needs one")
    return value
