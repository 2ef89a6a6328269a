"""The digest of every file of a fixtures folder in one list, as ``sha256sum -c`` reads it.

``SHA256SUMS`` holds ``<sha256>  <path>`` for every file below the folder but itself, sorted by path. With it one
flipped bit anywhere is found, also in the files that people edit (a manifest, the ledger): those are sealed again
with ``fp8-oracle fixtures seal``. Not covered: who may change a file; a seal is no signature.
"""

from __future__ import annotations

from pathlib import Path

from oracle import fixtures
from oracle.errors import FixtureError

FILE = "SHA256SUMS"
_AGAIN = "restore it from version control or, if the change is meant, run `fp8-oracle fixtures seal`"


def write(folder: Path) -> bool:
    """Seal a folder; True when the list changed."""
    content = _listed(folder)
    path = folder / FILE
    if path.is_file() and path.read_bytes() == content:
        return False
    fixtures.write_bytes(path, content)
    return True


def check(folder: Path) -> str:
    """One line; FixtureError names the first file that is missing, not sealed or changed."""
    path = folder / FILE
    content = fixtures.read_bytes(path)
    sealed: dict[str, str] = {}
    for line in content.decode("utf-8", "replace").splitlines():
        digest, gap, name = line.partition("  ")
        if len(digest) != 64 or not gap or not name or name in sealed:
            raise FixtureError(f"{path}: {line[:80]!r} is not '<sha256>  <path>'; {_AGAIN}")
        sealed[name] = digest
    present = {str(file.relative_to(folder)) for file in _files(folder)}
    if missing := sorted(set(sealed) - present):
        raise FixtureError(f"{folder / missing[0]}: no such file, but {FILE} names it; {_AGAIN}")
    if extra := sorted(present - set(sealed)):
        raise FixtureError(f"{folder / extra[0]}: not in {FILE}; remove it or, if it belongs, seal the folder again")
    for name, digest in sealed.items():
        if (found := fixtures.digest(folder / name)) != digest:
            raise FixtureError(f"{folder / name}: sha256 is {found[:16]}..., sealed as {digest[:16]}...; {_AGAIN}")
    if content != _listed(folder):
        raise FixtureError(f"{path}: is not spelled as it was written; {_AGAIN}")
    return f"{FILE}: {len(sealed)} files as sealed"


def _listed(folder: Path) -> bytes:
    lines = [f"{fixtures.digest(file)}  {file.relative_to(folder)}\n" for file in _files(folder)]
    return "".join(lines).encode()


def _files(folder: Path) -> list[Path]:
    found = [p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".partial")]
    return sorted(p for p in found if p.relative_to(folder) != Path(FILE))
