"""What the command line says without loading the package: ``--version``, and ``list`` once it has been asked.

Loading torch and the contracts takes seconds. What ``list``, ``list contracts``, ``list cases`` and ``list numerics``
print follows from the files of this package alone, so it is kept under ``$XDG_CACHE_HOME/fp8-oracle`` (``~/.cache``),
under a name that is a digest of the question, of the name, size and time of every file of the package, and of what
else could change the answer: the interpreter and the ``pyproject.toml`` files above the current folder. A process that
has loaded torch answers afresh, and so does every one where another distribution adds families, formats or schedules.
Where the standard output was replaced, or the folder cannot be written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from oracle.errors import FixtureError

LISTED = ("contracts", "cases", "numerics")
GROUPS = ("fp8_oracle.families", "fp8_oracle.formats", "fp8_oracle.schedules")
KEPT = 8  # answers
PACKAGE = Path(__file__).resolve().parents[1]


def version_here() -> str:
    """The version of the installed distribution."""
    try:
        return version("fp8-oracle")
    except PackageNotFoundError:
        return "(not installed)"


def answer(words: Sequence[str]) -> str | None:
    """What a command prints, where it is known without loading anything; None for every other one."""
    if list(words) == ["--version"]:
        return f"fp8-oracle {version_here()}\n"
    if (path := _place(words)) is None or "torch" in sys.modules:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):  # nothing is kept, or not what was written: asked afresh
        return path.read_text(encoding="utf-8")
    return None


@contextlib.contextmanager
def kept(words: Sequence[str]) -> Iterator[None]:
    """What is printed inside is kept, where :func:`answer` can use it, if nothing is raised."""
    path = _place(words)
    if path is None or sys.stdout is not sys.__stdout__:
        yield
        return
    copy = _Copy()
    sys.stdout = copy
    try:
        yield
    finally:
        sys.stdout = copy.stream
    from oracle.fixtures.files import make_folder, write_bytes  # loaded by the command already

    with contextlib.suppress(OSError, FixtureError):  # a folder that cannot be written costs the next call its time
        make_folder(path.parent)
        for old in sorted(path.parent.glob("list-*.txt"), key=lambda p: p.stat().st_mtime)[: -KEPT + 1]:
            old.unlink(missing_ok=True)
        write_bytes(path, "".join(copy.lines).encode())


class _Copy:
    """The standard output, and a copy of what was written."""

    def __init__(self) -> None:
        self.stream, self.lines = sys.stdout, list[str]()

    def write(self, text: str) -> int:
        self.lines.append(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def _place(words: Sequence[str]) -> Path | None:
    """Where the answer to these words is kept; None where it may depend on more than the files of the package."""
    match list(words):
        case ["list"]:
            pass
        case ["list", what] if what in LISTED:
            pass
        case _:
            return None
    if any(entry_points(group=group) for group in GROUPS):
        return None
    digest = hashlib.sha256(repr((list(words), sys.version, str(PACKAGE))).encode())
    for folder, _, names in sorted(os.walk(PACKAGE)):
        for name in sorted(n for n in names if n.endswith(".py")):
            facts = os.stat(os.path.join(folder, name))
            digest.update(f"{folder}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    here = Path.cwd()
    for above in (here, *here.parents):
        with contextlib.suppress(OSError):  # most folders have none
            digest.update((above / "pyproject.toml").read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "fp8-oracle" / f"list-{digest.hexdigest()[:32]}.txt"
