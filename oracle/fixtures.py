"""Bytes on disk: safetensors and JSON, read with suspicion and written atomically.

A file is refused, with one :class:`~oracle.errors.FixtureError` that names it and the way out, when it is missing,
a pickle or another container, truncated, internally inconsistent (the header is checked by hand before any tensor
is built), or not the bytes that its manifest recorded (sha256). Writing goes to a temporary file in the same
folder, is flushed to disk and renamed over the target, so a killed process leaves the old file or the new one,
never half of one.

Source of the layout: the safetensors format (8-byte little-endian header length, JSON header, data).
Not covered: what the tensors mean (:mod:`oracle.captures`, :mod:`oracle.contracts`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

import safetensors.torch
from torch import Tensor

from oracle.errors import FixtureError

FOLDER_VARIABLE = "FP8_ORACLE_FIXTURES"
MAX_HEADER = 100_000_000
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_REFUSED_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".npy", ".npz")
_REFUSED_MAGIC: Mapping[bytes, str] = {
    b"PK\x03\x04": "a zip archive (torch.save or numpy.savez)",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x93NUMPY": "a numpy array file",
    b"\x1f\x8b": "a gzip file",
}
_CONVERT = "save the tensors with safetensors.torch.save_file(tensors, 'file.safetensors')"


def read_tensors(path: str | Path, *, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Parameters
    ----------
    path : the file.
    sha256 : hexadecimal digest that the file must have, or None where no manifest speaks of it.

    Raises
    ------
    FixtureError
        The file is missing, no safetensors file, truncated, inconsistent or not the recorded bytes.
    """
    path = Path(path)
    content = read_bytes(path)
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise FixtureError(
            f"{path}: sha256 is {found[:16]}..., the manifest says {sha256[:16]}...; the file was changed or "
            "damaged: restore it from version control, or record it again with `fp8-oracle fixtures import`"
        )
    _check_container(path, content)
    _check_header(path, content)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that this version maps to no torch one
        raise FixtureError(f"{path}: the safetensors library cannot load it ({error}); {_CONVERT}") from None
    return tensors


def read_metadata(path: str | Path) -> dict[str, str]:
    """The free-text metadata of a safetensors file (empty when it has none)."""
    path = Path(path)
    content = read_bytes(path)
    _check_container(path, content)
    header = _check_header(path, content)
    metadata = header.get("__metadata__", {})
    assert isinstance(metadata, dict)
    return {str(key): str(value) for key, value in metadata.items()}


def read_bytes(path: Path) -> bytes:
    """The content of a file; FixtureError says in one line why there is none."""
    try:
        if path.is_char_device():
            raise FixtureError(f"{path}: is a device, not a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise FixtureError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise FixtureError(f"{path}: is a folder, not a file") from None
    except OSError as error:
        raise FixtureError(f"{path}: cannot be read ({error.strerror})") from None


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file atomically; returns its sha256. Equal tensors give equal bytes."""
    content = tensor_bytes(tensors)
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file."""
    content: bytes = safetensors.torch.save({name: t.detach().contiguous().cpu() for name, t in tensors.items()})
    return content


def digest(path: Path) -> str:
    """The sha256 of a file; FixtureError when it cannot be read."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def read_json(path: str | Path, *, schema: str | None = None) -> dict[str, object]:
    """A JSON object; with ``schema``, one whose ``"schema"`` entry is exactly that (``name/version``)."""
    path = Path(path)
    content = read_bytes(path)
    try:
        record = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FixtureError(f"{path}: not valid JSON ({error}); restore it from version control") from None
    if not isinstance(record, dict):
        raise FixtureError(f"{path}: holds a JSON {type(record).__name__}, not an object")
    if schema is not None and record.get("schema") != schema:
        raise FixtureError(
            f"{path}: schema is {record.get('schema')!r}, this version reads {schema!r}; "
            "use the fp8-oracle version that wrote it, or write it again"
        )
    return record


def write_json(path: str | Path, record: Mapping[str, object]) -> None:
    """Write a JSON object atomically, indented, non-finite numbers refused."""
    write_bytes(path, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file atomically: temporary file in the same folder, fsync, rename.

    A link is followed, so that it stays a link; a device or a pipe is written to as it is, never replaced.

    Raises
    ------
    FixtureError
        The folder does not exist, the path is a folder, or the system refuses (no permission, no space).
    """
    path = Path(path)
    try:
        if not path.parent.is_dir():
            raise FixtureError(f"{path}: the folder {path.parent} does not exist; create it first")
        if path.is_dir():
            raise FixtureError(f"{path}: is a folder; name a file in it")
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except BrokenPipeError:
        raise  # nobody reads a pipe any more: the command line has its own status for that
    except OSError as error:
        raise FixtureError(f"{path}: cannot be written ({error.strerror}); choose a writable folder") from None


def make_folder(path: Path) -> None:
    """Make a folder and those above it; FixtureError when the system refuses."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FixtureError(f"{path}: no folder can be made there ({error.strerror})") from None


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def folder(given: str | Path | None = None) -> Path:
    """The fixtures folder: ``given``, else ``$FP8_ORACLE_FIXTURES``, else ``fixtures`` in the current folder or
    one of its parents, else beside the imported package (a checkout).

    Raises
    ------
    FixtureError
        None exists, as with an installed wheel away from a checkout.
    """
    named = given if given is not None else os.environ.get(FOLDER_VARIABLE)
    if named:
        if not Path(named).is_dir():
            raise FixtureError(f"{named}: no such fixtures folder (from {'--fixtures' if given else FOLDER_VARIABLE})")
        return Path(named)
    here = Path.cwd()
    for parent in [here, *here.parents, Path(__file__).resolve().parent.parent]:
        if (parent / "fixtures" / "captures" / "manifest.json").is_file():
            return parent / "fixtures"
    raise FixtureError(
        "no fixtures folder found: an installed package carries none; run inside a checkout, set "
        f"{FOLDER_VARIABLE}=DIR or pass --fixtures DIR (or --fixtures none to judge live subjects only)"
    )


# --- checks -------------------------------------------------------------------------------------------------


def _check_container(path: Path, content: bytes) -> None:
    # A header of 0x480 bytes begins like a pickle of protocol 4; the brace after the length tells them apart.
    opened = content[8:9] == b"{" and 8 + int.from_bytes(content[:8], "little") <= len(content)
    for magic, what in () if opened else _REFUSED_MAGIC.items():
        if content.startswith(magic):
            raise FixtureError(f"{path}: is {what}, which can run code or hide types when loaded; {_CONVERT}")
    if path.suffix.lower() in _REFUSED_SUFFIXES:
        raise FixtureError(f"{path}: {path.suffix} files are not read; {_CONVERT}")


def _check_header(path: Path, content: bytes) -> dict[str, object]:
    def broken(what: str) -> FixtureError:
        return FixtureError(f"{path}: not a sound safetensors file: {what}; record or download it again")

    if len(content) < 8:
        raise broken(f"{len(content)} bytes, too short for a header")
    length = int.from_bytes(content[:8], "little")
    if length > MAX_HEADER or content[8:9] not in (b"{", b""):
        raise FixtureError(f"{path}: not a safetensors file (its first bytes are {content[:12]!r}); {_CONVERT}")
    if 8 + length > len(content):
        raise broken(f"truncated: the header claims {length} bytes, the file holds {len(content) - 8} after it")
    try:
        header = json.loads(content[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError):
        raise broken("the header is not JSON") from None
    if not isinstance(header, dict):
        raise broken("the header is not a JSON object")
    end = 0
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    spans = [_span(name, entry, broken) for name, entry in entries]
    for begin, stop, name in sorted(spans):
        if begin != end:
            raise broken(f"tensor {name!r} begins at byte {begin}, but the previous one ends at {end}")
        end = stop
    if 8 + length + end != len(content):
        held = len(content) - 8 - length
        what = "truncated" if held < end else "trailing bytes"
        raise broken(f"{what}: the tensors take {end} bytes, the file holds {held}")
    if not isinstance(header.get("__metadata__", {}), dict):
        raise broken("__metadata__ is not an object")
    return header


def _span(name: str, entry: object, broken: object) -> tuple[int, int, str]:
    assert callable(broken)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise broken(f"tensor {name!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPE_BYTES:
        raise broken(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise broken(f"tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    if offsets[1] - offsets[0] != prod(shape) * DTYPE_BYTES[dtype]:
        raise broken(f"tensor {name!r} is {dtype} {shape}, but spans {offsets[1] - offsets[0]} bytes")
    return offsets[0], offsets[1], name


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
