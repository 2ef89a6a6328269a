"""What follows from the files of this package alone, kept between processes.

It lies under ``$XDG_CACHE_HOME/fp8-oracle`` (``~/.cache``), in files whose names are a digest of the question, of the
name, size and time of every file of the package, and of the interpreter: another release, or a changed file, asks
afresh. A process keeps and reads nothing where a file changed since it began: what it has loaded may be older. A folder
that cannot be read or written costs the next process its time. ``FP8_ORACLE_CACHE=0`` keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BEGUN = time.time_ns()


@cache
def files() -> str | None:
    """A digest of the name, size and time of every file of the package, and of the interpreter; None where one of them
    changed since this process began."""
    digest = hashlib.sha256(repr((sys.version, str(PACKAGE))).encode())
    for folder, _, names in sorted(os.walk(PACKAGE)):
        for name in sorted(n for n in names if n.endswith(".py")):
            facts = os.stat(os.path.join(folder, name))
            if facts.st_mtime_ns > BEGUN:
                return None
            digest.update(f"{folder}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def place(kind: str, *question: object) -> Path | None:
    """Where the answer to a question is kept; None where nothing is."""
    if os.environ.get("FP8_ORACLE_CACHE") == "0" or (package := files()) is None:
        return None
    digest = hashlib.sha256(repr((package, *question)).encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "fp8-oracle" / f"{kind}-{digest}.txt"


def read(path: Path | None) -> str | None:
    """The answer that is kept there; None without one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):  # nothing is kept, or not what was written: asked afresh
        return None if path is None else path.read_text(encoding="utf-8")
    return None


def write(path: Path | None, answer: str, most: int) -> None:
    """Keep an answer there, whole or not at all, and the last ``most - 1`` others of its kind."""
    if path is None:
        return
    kind = path.name.split("-")[0]
    with contextlib.suppress(OSError):  # a folder that cannot be written: the next process asks afresh
        path.parent.mkdir(parents=True, exist_ok=True)
        others = sorted(path.parent.glob(f"{kind}-*.txt"), key=lambda p: p.stat().st_mtime)
        for old in others[: max(0, len(others) - most + 1)]:
            old.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(answer)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
