"""Golden fixtures: calls with their expected bits and admissible intervals, stored or regenerable bit for bit.

A golden is a case id (:mod:`oracle.cases`), from which its inputs follow on any machine. Small ones are stored, one
safetensors file for each case: inputs under the contract's names, expected outputs as ``out`` (or ``out.q``,
``out.scale``), and for each arch whose arithmetic differs ``low.ARCH.OUTPUT``, ``high.ARCH.OUTPUT``,
``free.ARCH.OUTPUT`` (:mod:`oracle.intervals`; arch ``bits`` is every machine). ``fp8-oracle judge`` reads such a file
as it is. Of large ones only the sha256 of every tensor is kept. ``manifest.json`` (``fp8-oracle.golden/N``) names
everything, one case a line:

    cases[].id, contract, seed, options, numerics    how the call is made, and whose arithmetic the intervals hold
    cases[].judged    ``bits``: these and no others; ``interval``; ``contract``: other answers may be right too
    cases[].file, sha256                             the stored file and its digest, or null
    cases[].tensors.NAME = [role, dtype, shape, strides, sha256]    strides null for row-major; the digest is over
                                                     the row-major little-endian bytes
    tables.FILE = sha256                             other files of the folder

Not covered: what a vendor is handed (:mod:`oracle.golden_export`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle import cases, fixtures, profiles
from oracle.contracts import get, registered
from oracle.errors import FixtureError, OracleError
from oracle.golden_cases import GOLDENS
from oracle.intervals import expected, intervals
from oracle.options import word

NAME, VERSION = "fp8-oracle.golden", 1
SCHEMA = f"{NAME}/{VERSION}"
GENERATOR = "fp8-oracle goldens 1"  # another number when ids give other bits
MANIFEST = "manifest.json"
FOLDER = "golden"
STORED_BYTES = 48_000  # a case that takes more is kept as digests
STORED, CHOSEN_BYTES = 4, 20_000  # cases of a contract that are chosen by themselves, and what each may take
ROLES = ("input", "expected", "low", "high", "free")


@dataclass(frozen=True)
class Made:
    """A golden computed afresh: its record (without file) and its tensors, row-major."""

    record: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def size(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def make(case_id: str) -> Made:
    """Compute one golden from its case id: the same record and bits on every machine.

    Raises
    ------
    CaseError
        The id does not parse.
    """
    case = cases.parse(case_id)
    contract, inputs, options = get(case.contract), case.inputs(), case.call_options()
    outputs = expected(contract, inputs, **options)
    ranges = intervals(contract, inputs, outputs, **options)
    tensors = {name: ("input", t) for name, t in inputs.items()}
    tensors |= {output_name(contract.outputs, name): ("expected", t) for name, t in outputs.items()}
    for arch, found in ranges.items():
        for output, r in found.outputs.items():
            if r.low is outputs[output] and r.high is outputs[output] and not bool(r.free.any()):
                continue  # these bits and no others: an interval would say it twice more
            for role in ("low", "high", "free"):
                tensors[f"{role}.{arch}.{output}"] = (role, getattr(r, role))
    roles = {role for role, _ in tensors.values()}
    record = {
        "id": str(case),
        "contract": case.contract,
        "seed": case.seed,
        "options": {name: word(value) for name, value in options.items()},
        "judged": "interval" if "low" in roles else "bits" if ranges else "contract",
        "numerics": {arch: found.numerics for arch, found in ranges.items()},
        "tensors": {name: [role, *described(t)] for name, (role, t) in tensors.items()},
    }
    return Made(record, {name: row_major(t) for name, (_, t) in tensors.items()})


def output_name(outputs: tuple[str, ...], name: str) -> str:
    """The tensor name of an expected output: ``out``, or ``out.NAME`` where a contract has several."""
    return "out" if outputs == ("out",) else f"out.{name}"


def described(tensor: Tensor) -> list[Any]:
    """``[dtype, shape, strides or null, sha256 of the row-major bytes]``."""
    strides = None if tensor.is_contiguous() else list(tensor.stride())
    digest = hashlib.sha256(raw_bytes(tensor)).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), strides, digest]


def raw_bytes(tensor: Tensor) -> bytes:
    """The row-major little-endian bytes of a CPU tensor."""
    return row_major(tensor).reshape(-1).view(torch.uint8).numpy().tobytes()


def row_major(tensor: Tensor) -> Tensor:
    """A copy with the strides of its shape, also along axes of one element."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def slug(case_id: str) -> str:
    """The name under which a case's files go: its contract and eight digits of the id's digest."""
    return f"{case_id.partition('/')[0]}-{hashlib.sha256(case_id.encode()).hexdigest()[:8]}"


def chosen(contract: str) -> tuple[list[str], list[str]]:
    """Ids for a contract that has no stored golden: small ones unlike each other, and the largest of the quick profile.

    Of the cases alike in dtypes, scheme and options, or in family, the largest is taken that stays within
    ``CHOSEN_BYTES``, else the smallest; at most ``STORED`` in all.
    """
    listed = sorted(profiles.cases(contract, "quick"), key=lambda case: -_volume(case))
    alike: dict[tuple[object, ...], list[cases.Case]] = {}
    for case in listed:
        alike.setdefault((case.dtypes, case.scheme, case.options), []).append(case)
    for case in listed:
        alike.setdefault((case.family,), []).append(case)
    small: list[str] = []
    for group in alike.values():
        if len(small) < STORED:
            fitting = (str(case) for case in group if make(str(case)).size <= CHOSEN_BYTES)
            small.append(next(fitting, str(group[-1])))
    return list(dict.fromkeys(small)), [str(listed[0])] if listed else []


def _volume(case: cases.Case) -> int:
    volume = 1
    for _, extent in case.extents:
        volume *= extent
    return volume


def generate(folder: Path, *, add: Iterable[str] = ()) -> list[str]:
    """Write every golden of a folder again, with ``add`` and with choices for contracts that have none stored.

    Returns one line for each file that changed. The new manifest is written last.
    """
    fixtures.make_folder(folder)
    old = load(folder)["cases"] if (folder / MANIFEST).is_file() else None
    ids = list(dict.fromkeys([*(c["id"] for c in old or ()), *(GOLDENS if old is None else ()), *map(str, add)]))
    records, lines = {}, []
    for case_id in ids:
        record, line = _write(folder, make(case_id))
        records[record["id"]] = record
        lines += line
    for contract in registered():
        lines += _fill(folder, contract, records)
    ordered = sorted(records.values(), key=lambda r: (r["contract"], r["id"]))
    kept = {record["file"] for record in ordered if record["file"]}
    for stale in sorted(p for p in folder.glob("*.safetensors") if p.name not in kept):
        stale.unlink()
        lines.append(f"{stale.name}: no case names it any more; removed")
    others = sorted(p for p in folder.rglob("*.json") if p.parent != folder)
    tables = {str(p.relative_to(folder)): fixtures.digest(p) for p in others}
    content = dumped({"schema": SCHEMA, "generator": GENERATOR, "tables": tables, "cases": ordered})
    if not (folder / MANIFEST).is_file() or (folder / MANIFEST).read_bytes() != content:
        fixtures.write_bytes(folder / MANIFEST, content)
        lines.append(f"{MANIFEST}: {len(ordered)} cases of {len({r['contract'] for r in ordered})} contracts")
    return lines


def _fill(folder: Path, contract: str, records: dict[str, dict[str, Any]]) -> list[str]:
    """Choose goldens for a contract that has no stored one."""
    if any(r["contract"] == contract and r["file"] for r in records.values()):
        return []
    lines = []
    small, large = chosen(contract)
    for case_id in dict.fromkeys([*small, *large]):
        record, line = _write(folder, make(case_id))
        records[record["id"]] = record
        lines += line
    return lines


def _write(folder: Path, made: Made) -> tuple[dict[str, Any], list[str]]:
    if made.size > STORED_BYTES:
        return made.record | {"file": None, "sha256": None}, []
    name = f"{slug(made.record['id'])}.safetensors"
    content = fixtures.tensor_bytes(made.tensors)
    lines = []
    if not (folder / name).is_file() or (folder / name).read_bytes() != content:
        fixtures.write_bytes(folder / name, content)
        lines.append(f"{name}: {made.record['id']}")
    return made.record | {"file": name, "sha256": hashlib.sha256(content).hexdigest()}, lines


def dumped(manifest: Mapping[str, Any]) -> bytes:
    """A manifest's only spelling: sorted by nothing, one case a line."""
    head = {key: value for key, value in manifest.items() if key != "cases"}
    lines = [json.dumps(case, allow_nan=False) for case in manifest["cases"]]
    opening = json.dumps(head, indent=1, allow_nan=False)[:-2]
    return (opening + ',\n "cases": [\n' + ",\n".join(lines) + "\n ]\n}\n").encode("utf-8")


def load(folder: Path) -> dict[str, Any]:
    """The manifest of a goldens folder.

    Raises
    ------
    FixtureError
        Missing, not JSON, of another schema or a newer version, incomplete, or not spelled as it was written.
    """
    path = folder / MANIFEST
    content = fixtures.read_bytes(path)
    manifest = fixtures.read_json(path)
    refuse_schema(path, manifest.get("schema"))
    found = manifest.get("cases")
    if not isinstance(found, list) or not isinstance(manifest.get("tables"), dict):
        raise FixtureError(f"{path}: has no list of cases or no tables; restore it from version control")
    for entry in found:
        wanted = {"id", "contract", "seed", "options", "judged", "numerics", "tensors", "file", "sha256"}
        if not isinstance(entry, dict) or set(entry) != wanted:
            have = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
            raise FixtureError(f"{path}: a case holds {have}; it must hold {', '.join(sorted(wanted))}")
    if dumped(manifest) != content:
        raise FixtureError(f"{path}: is not spelled as `fp8-oracle fixtures generate` writes it; it was edited by hand")
    return manifest


def refuse_schema(path: Path, schema: object) -> None:
    """Raise FixtureError unless ``schema`` is this version's; a newer one is named as such."""
    if schema == SCHEMA:
        return
    name, _, number = str(schema).partition("/")
    if name == NAME and number.isdigit() and int(number) > VERSION:
        raise FixtureError(
            f"{path}: schema is {schema!r}, a newer version than {SCHEMA!r}; update fp8-oracle to read these goldens"
        )
    raise FixtureError(f"{path}: schema is {schema!r}, this version reads {SCHEMA!r}; generate the goldens again")


def check_files(folder: Path) -> None:
    """Compare the files of a folder with their digests, without computing anything.

    Raises
    ------
    FixtureError
        A file is missing, not recorded or changed; the manifest is unsound; a contract has no stored golden.
    """
    manifest = load(folder)
    if manifest["generator"] != GENERATOR:
        raise FixtureError(f"{folder / MANIFEST}: generator is {manifest['generator']!r}, this is {GENERATOR!r}")
    stored = {entry["contract"] for entry in manifest["cases"] if entry["file"]}
    if bare := ", ".join(name for name in registered() if name not in stored):
        raise FixtureError(f"{folder / MANIFEST}: no stored golden of {bare}; run `fp8-oracle fixtures generate`")
    _check_files(folder, manifest)


def check(folder: Path) -> list[str]:
    """Regenerate every golden of a folder and compare it; one line for each contract.

    Raises
    ------
    FixtureError
        At the first fault: those of :func:`check_files`; a tensor whose regenerated bits differ.
    """
    check_files(folder)
    manifest = load(folder)
    counts: dict[str, list[int]] = {}
    for entry in manifest["cases"]:
        _check_case(folder, entry)
        counts.setdefault(entry["contract"], [0, 0])[0 if entry["file"] else 1] += 1
    return [f"{name}: {stored} stored, {large} as digests, regenerated" for name, (stored, large) in counts.items()]


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    named = {e["file"] for e in manifest["cases"] if e["file"]} | set(manifest["tables"]) | {MANIFEST}
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".partial"}
    if missing := sorted(named - present):
        raise FixtureError(f"{folder / missing[0]}: no such file, but {MANIFEST} names it; restore or generate it")
    if extra := sorted(present - named):
        raise FixtureError(f"{folder / extra[0]}: not in {MANIFEST}; remove it, or run `fp8-oracle fixtures generate`")
    digests = {e["file"]: e["sha256"] for e in manifest["cases"] if e["file"]} | manifest["tables"]
    for name, recorded in digests.items():
        if fixtures.digest(folder / name) != recorded:
            raise FixtureError(
                f"{folder / name}: sha256 is not the recorded {recorded[:16]}...; the file was changed or damaged: "
                "restore it from version control"
            )


def _check_case(folder: Path, entry: Mapping[str, Any]) -> None:
    where = entry["file"] or entry["id"]
    try:
        made = make(entry["id"])
    except OracleError as error:
        raise FixtureError(f"{folder / MANIFEST}: {entry['id']} cannot be made again: {error}") from error
    for key, value in made.record.items():
        if key != "tensors" and entry[key] != value:
            raise FixtureError(f"{where}: {key} is {entry[key]!r} in {MANIFEST}, regenerated {value!r}")
    if set(entry["tensors"]) != set(made.record["tensors"]):
        odd = sorted(set(entry["tensors"]) ^ set(made.record["tensors"]))
        raise FixtureError(f"{where}: {MANIFEST} and the regenerated case differ in the tensors {', '.join(odd)}")
    for name, facts in made.record["tensors"].items():
        if entry["tensors"][name] != facts:
            raise FixtureError(f"{where}: tensor {name} is {entry['tensors'][name]} in {MANIFEST}, regenerated {facts}")
    if entry["file"]:
        stored = fixtures.read_tensors(folder / entry["file"], sha256=entry["sha256"])
        if set(stored) != set(made.tensors):
            raise FixtureError(f"{folder / where}: holds {', '.join(sorted(stored))}; {MANIFEST} names other tensors")
        for name, tensor in stored.items():
            if raw_bytes(tensor) != raw_bytes(made.tensors[name]):
                raise FixtureError(f"{folder / where}: tensor {name} does not have the regenerated bits")
