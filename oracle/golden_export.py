"""Goldens as a folder that needs neither Python nor JSON to be read, and the judgement of what comes back.

    README.md          what it is, the rules of judgement, how to answer
    INDEX.txt          every tensor: case, role, name, dtype, shape, offset, bytes (tab-separated)
    fp8_golden.h       the same layout as a C header, with a reader of INDEX.txt lines
    manifest.json      all of it as JSON, which schema.json describes
    data/CASE.bin      the tensors of one case, row-major, little-endian, each at a multiple of 64 bytes
    SHA256SUMS         digests of all files

An answer is a folder with ``CASE.out.bin`` (``CASE.out.q.bin``... where a routine has several outputs), or
``CASE.safetensors`` with tensors ``out`` (``out.q``...). It is judged by the contract, not by the table of intervals.
Not covered: strides of an answer; a file holds an output's elements in row-major order whatever its strides are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle import fixtures, golden, options, seal
from oracle.compare import Status, Verdict
from oracle.contracts import Contract, get
from oracle.diagnose import explain_verdict
from oracle.errors import FixtureError, NumericsError, OracleError
from oracle.golden_text import HEADER, README, SCHEMA_JSON

SCHEMA = "fp8-oracle.golden-export/1"
ALIGNMENT = 64
DATA = "data"


@dataclass(frozen=True)
class Answer:
    """One case of an exported folder with the verdict on what came back; ``verdict`` None when nothing did."""

    id: str
    slug: str
    verdict: Verdict | None


def export(
    goldens: Path, target: Path, *, everything: bool = False, contracts: Collection[str] | None = None
) -> list[str]:
    """Write the stored goldens (with ``everything`` the large ones too) of a folder to ``target``, new or empty.

    ``contracts`` are the routines wanted; None for all.

    Raises
    ------
    FixtureError
        ``target`` holds something already, or a golden is damaged.
    """
    manifest = golden.load(goldens)
    chosen = [e for e in manifest["cases"] if everything or e["file"]]
    if contracts is not None:
        if absent := sorted(set(contracts) - {e["contract"] for e in chosen}):
            why = "add --all for those that are kept as digests"
            raise FixtureError(f"{goldens}: no stored golden of {', '.join(absent)}; {why}")
        chosen = [e for e in chosen if e["contract"] in contracts]
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FixtureError(f"{target}: exists and is not an empty folder; name a new one")
    fixtures.make_folder(target / DATA)
    records, lines = [], []
    for entry in chosen:
        if entry["file"]:
            tensors = fixtures.read_tensors(goldens / entry["file"], sha256=entry["sha256"])
        else:
            tensors = golden.make(entry["id"]).tensors
        record = _write_case(target, entry, tensors)
        records.append(record)
        lines.append(f"{record['case']}: {entry['id']}")
    head = {"schema": SCHEMA, "generator": manifest["generator"], "alignment": ALIGNMENT}
    fixtures.write_json(target / "manifest.json", head | {"cases": records})
    fixtures.write_bytes(target / "schema.json", SCHEMA_JSON.encode())
    fixtures.write_bytes(target / "INDEX.txt", _index(records).encode())
    fixtures.write_bytes(target / "fp8_golden.h", HEADER.encode())
    fixtures.write_bytes(target / "README.md", README.format(cases=len(records)).encode())
    seal.write(target)
    return lines


def judge(folder: Path, theirs: Path, *, arch: str, numerics: str | None) -> list[Answer]:
    """Judge a folder of answers to an exported folder, in the order of its manifest.

    Raises
    ------
    FixtureError
        The exported folder was changed; an answer names no case or output, has the wrong size, or comes twice.
    """
    seal.check(folder)
    manifest = fixtures.read_json(folder / "manifest.json", schema=SCHEMA)
    records: list[dict[str, Any]] = manifest["cases"]  # type: ignore[assignment]  # sealed as written
    if not theirs.is_dir():
        raise FixtureError(f"{theirs}: no such folder of answers")
    _refuse_strangers(records, theirs)
    return [Answer(r["id"], r["case"], _judge_case(folder, theirs, r, arch, numerics)) for r in records]


# --- writing ------------------------------------------------------------------------------------------------


def _write_case(target: Path, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    name = golden.slug(entry["id"])
    content, found = bytearray(), []
    for tensor, (role, dtype, shape, strides, digest) in entry["tensors"].items():
        content += bytes(-len(content) % ALIGNMENT)
        raw = golden.raw_bytes(tensors[tensor])
        if hashlib.sha256(raw).hexdigest() != digest:
            raise FixtureError(f"{entry['id']}: tensor {tensor} does not have its recorded sha256; check the fixtures")
        facts = {"role": role, "dtype": dtype, "shape": shape, "strides": strides}
        found.append({"name": tensor, **facts, "offset": len(content), "bytes": len(raw), "sha256": digest})
        content += raw
    fixtures.write_bytes(target / DATA / f"{name}.bin", bytes(content))
    kept = {key: entry[key] for key in ("id", "contract", "seed", "options", "judged", "numerics")}
    return {"case": name, **kept, "file": f"{DATA}/{name}.bin", "tensors": found}


def _index(records: list[dict[str, Any]]) -> str:
    lines = ["# case\trole\tname\tdtype\tshape\toffset\tbytes"]
    for record in records:
        lines.append(f"# id\t{record['case']}\t{record['id']}")
        lines += [f"# option\t{record['case']}\t{name}\t{value}" for name, value in record["options"].items()]
        for t in record["tensors"]:
            shape = "x".join(map(str, t["shape"])) or "-"
            facts = (record["case"], t["role"], t["name"], t["dtype"], shape, str(t["offset"]), str(t["bytes"]))
            lines.append("\t".join(facts))
    return "\n".join(lines) + "\n"


# --- judging ------------------------------------------------------------------------------------------------


def _refuse_strangers(records: list[dict[str, Any]], theirs: Path) -> None:
    wanted = {f"{r['case']}.safetensors" for r in records}
    wanted |= {f"{r['case']}.{t['name']}.bin" for r in records for t in r["tensors"] if t["role"] == "expected"}
    for path in sorted(theirs.iterdir()):
        if path.name not in wanted:
            raise FixtureError(
                f"{path}: answers no case of the exported folder; files are CASE.out.bin (CASE.out.NAME.bin) or "
                "CASE.safetensors, with CASE as in INDEX.txt"
            )


def _judge_case(
    folder: Path, theirs: Path, record: Mapping[str, Any], arch: str, numerics: str | None
) -> Verdict | None:
    wanted = {t["name"]: t for t in record["tensors"] if t["role"] == "expected"}
    given = _answers(theirs, record["case"], wanted)
    if given is None:
        return None
    content = fixtures.read_bytes(folder / record["file"])
    inputs = {t["name"]: _tensor(content, t) for t in record["tensors"] if t["role"] == "input"}
    contract = get(record["contract"])
    names = {"out": "out"} if list(wanted) == ["out"] else {name: name.removeprefix("out.") for name in wanted}
    output = {names[name]: tensor for name, tensor in given.items()}
    return _verdict(contract, inputs, output, arch, numerics, options.parse(contract, record["options"]))


def _verdict(
    contract: Contract,
    inputs: dict[str, Tensor],
    given: dict[str, Tensor],
    arch: str,
    numerics: str | None,
    call: dict[str, Any],
) -> Verdict:
    output = given["out"] if list(given) == ["out"] else given
    try:
        found = contract.judge(inputs, output, arch=arch, numerics=numerics, **call)
    except NumericsError as error:
        return Verdict(Status.UNSUPPORTED, str(error), reason=str(error))
    except OracleError as error:
        return Verdict(Status.CRASHED, f"the output cannot be judged: {error}", reason=str(error))
    return explain_verdict(found, contract, inputs, output, arch=arch, numerics=numerics, **call)


def _answers(theirs: Path, case: str, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor] | None:
    """The outputs that came back for a case, None for none; FixtureError for some of several, or twice."""
    whole = theirs / f"{case}.safetensors"
    single = {name: theirs / f"{case}.{name}.bin" for name in wanted}
    raw = [name for name, path in single.items() if path.is_file()]
    if whole.is_file() and raw:
        raise FixtureError(f"{single[raw[0]]}: {whole.name} answers the same case; send one of them")
    if whole.is_file():
        held = fixtures.read_tensors(whole)
        if set(held) != set(wanted):
            raise FixtureError(f"{whole}: holds {', '.join(sorted(held))}; the outputs are {', '.join(wanted)}")
        return {name: _strided(tensor, wanted[name]) for name, tensor in held.items()}
    if not raw:
        return None
    if missing := [path.name for name, path in single.items() if name not in raw]:
        raise FixtureError(f"{theirs / missing[0]}: no such file, but {single[raw[0]].name} is there; send all outputs")
    made = {}
    for name, path in single.items():
        content = fixtures.read_bytes(path)
        if len(content) != wanted[name]["bytes"]:
            raise FixtureError(
                f"{path}: {len(content)} bytes; {wanted[name]['dtype']} {wanted[name]['shape']} takes "
                f"{wanted[name]['bytes']}"
            )
        made[name] = _strided(_tensor(content, {**wanted[name], "offset": 0}), wanted[name])
    return made


def _tensor(content: bytes, facts: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, facts["dtype"])
    shape = facts["shape"]
    raw = content[facts["offset"] : facts["offset"] + prod(shape) * dtype.itemsize]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _strided(tensor: Tensor, facts: Mapping[str, Any]) -> Tensor:
    """The same elements in the memory layout that the contract asks for, padding zero."""
    strides = facts["strides"]
    if strides is None or list(tensor.shape) != facts["shape"]:
        return tensor
    last = sum(s * (n - 1) for s, n in zip(strides, tensor.shape, strict=True))
    # the padding of the last line exists too
    memory = torch.zeros(last + 1 + ALIGNMENT, dtype=tensor.dtype, device="cpu")
    view = memory.as_strided(tensor.shape, strides)
    view.copy_(tensor)
    return view


def to_json(answers: list[Answer], *, arch: str, numerics: str | None) -> str:
    """The verdicts as indented JSON."""
    record = {
        "schema": "fp8-oracle.golden-judgement/1",
        "arch": arch,
        "numerics": numerics,
        "cases": {a.slug: {"id": a.id, "verdict": None if a.verdict is None else a.verdict.to_json()} for a in answers},
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"
