"""Records what live subjects return for cases as a captures folder: run once on the hardware, judged again anywhere.

The folder is one of :mod:`oracle.fixtures.captures` with one safetensors file. Inputs are not stored: the case makes
them again, and their digest says whether they are the same. Outputs are stored with their strides and the padding
between their elements, equal ones once.

Source: the format of :mod:`oracle.fixtures.captures`. Not covered: judging, choosing what to run.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from oracle.errors import FixtureError, OptionError
from oracle.fixtures import captures
from oracle.fixtures import files as fixtures
from oracle.fixtures import strides as memory
from oracle.fixtures.golden import raw_bytes, row_major, slug
from oracle.harness.subjects import Subject
from oracle.routines.cases import Case


@dataclass
class CaptureWriter:
    """The outputs of one arch, collected in memory by :meth:`add` until :meth:`write`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, dict[str, object]] = field(default_factory=dict)
    arches: set[str] = field(default_factory=set)
    _stored: dict[str, str] = field(default_factory=dict)

    def add(
        self, subject: Subject, case: Case, inputs: Mapping[str, Tensor], output: Tensor | Mapping[str, Tensor]
    ) -> None:
        """Add a copy of ``output`` (any shape, any dtype; or several by name) of ``subject`` for ``case``, with strides
        and padding; ``inputs`` are those that it was called with."""
        label = f"out.{subject.name}.{slug(str(case))}"
        named = {"out": output} if isinstance(output, Tensor) else output
        self.arches.add(subject.arch)
        self.calls[label] = {
            "contract": case.contract,
            "case": str(case),
            "inputs_sha256": captures.digest_of(inputs),
            "subject": subject.name,
            "numerics": subject.numerics,
            "tensors": {
                name: self._store(f"{label}.{name}" if len(named) > 1 else label, memory.on_host(t))
                for name, t in named.items()
            },
        }

    def write(self, folder: Path, *, provenance: Mapping[str, str]) -> list[str]:
        """Write ``<folder name>.safetensors`` and the manifest into a new or empty folder; a line for each.

        Raises FixtureError: no output was added, or outputs of more than one arch. OptionError: the folder holds
        something already.
        """
        require_empty(folder)
        if len(self.arches) != 1:
            arches = ", ".join(sorted(self.arches)) or "nothing was judged"
            raise FixtureError(f"{folder}: a captures folder holds the outputs of one arch, not of: {arches}")
        fixtures.make_folder(folder)
        name = f"{folder.resolve().name}.safetensors"
        entry = {
            "sha256": fixtures.write_tensors(folder / name, self.tensors),
            "arch": next(iter(self.arches)),
            "provenance": dict(provenance),
            "outputs": self.calls,
        }
        fixtures.write_json(folder / captures.MANIFEST, {"schema": captures.SCHEMA, "files": {name: entry}})
        size = (folder / name).stat().st_size
        return [f"{folder / name}: {len(self.calls)} outputs, {len(self.tensors)} tensors, {size} bytes"]

    def _store(self, name: str, x: Tensor) -> dict[str, object]:
        run = memory.run_of(x.detach())
        plain = x.is_contiguous() and run.numel() == x.numel()
        entry = {} if plain else {"shape": list(x.shape), "strides": list(x.stride())}
        stored = row_major(x.detach() if plain else run)
        key = f"{stored.dtype} {list(stored.shape)} {hashlib.sha256(raw_bytes(stored)).hexdigest()}"
        if key not in self._stored:
            self._stored[key] = name
            self.tensors[name] = stored
        return {"tensor": self._stored[key], **entry}


def require_empty(folder: Path) -> None:
    """OptionError unless the folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder}: exists and is not an empty folder; name a new one")


def provenance_of(machine: Mapping[str, str], versions: Mapping[str, str], command: str) -> dict[str, str]:
    """Where outputs come from: device, driver, library versions, the command, the day."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"captured": today, "command": command, **machine, **versions}


def adopt(folder: Path, recorded: Path) -> list[str]:
    """Copy the files of one captures folder into another and enter them in its manifest; a line for each file.

    Raises FixtureError: the recorded folder does not agree with its own manifest, or a file of that name is there
    already.
    """
    lines = captures.check(recorded)
    manifest = fixtures.read_json(folder / captures.MANIFEST, schema=captures.SCHEMA)
    theirs = fixtures.read_json(recorded / captures.MANIFEST, schema=captures.SCHEMA)
    files, new = manifest["files"], theirs["files"]
    assert isinstance(files, dict) and isinstance(new, dict)  # captures.check has read them
    for name in new:
        if name in files or (folder / name).exists():
            raise FixtureError(f"{folder / name}: is there already; remove it and its entry, or rename the new one")
    for name, entry in new.items():
        fixtures.write_bytes(folder / name, fixtures.read_bytes(recorded / name))
        files[name] = entry
    fixtures.write_json(folder / captures.MANIFEST, manifest)
    return lines
