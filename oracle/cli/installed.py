"""What the command line says without loading the package: ``--version``, and ``list`` once it has been asked.

Loading torch and the contracts takes seconds. What ``list``, ``list contracts``, ``list cases`` and ``list numerics``
print follows from the files of this package alone, so it is kept (:mod:`oracle.cache`), for each content of the
``pyproject.toml`` files above the current folder, which could change it. A process that has loaded torch answers
afresh, and so does every one where another distribution adds families, formats or schedules. Where the standard output
was replaced, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from oracle import cache

LISTED = ("contracts", "cases", "numerics")
GROUPS = ("fp8_oracle.families", "fp8_oracle.formats", "fp8_oracle.schedules")
KEPT = 8  # answers


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
    return cache.read(path)


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
    cache.write(path, "".join(copy.lines), KEPT)


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
    above = hashlib.sha256()
    here = Path.cwd()
    for folder in (here, *here.parents):
        with contextlib.suppress(OSError):  # most folders have none
            above.update((folder / "pyproject.toml").read_bytes())
    return cache.place("list", list(words), above.hexdigest())
