"""The worker and its launcher as a program that names nobody: a folder of compiled files, written for each worker.

A kernel that asks its command line, its environment, the modules of its process, its stack or its parent's command line
whether a judge is there finds the words of this folder only: the files of the worker as a package ``kernel_host``, its
first lines and the launcher, without docstrings and sources.

Not covered: constants in the code of the worker, which a search of the whole memory reads.
"""

from __future__ import annotations

import ast
import functools
import marshal
import os
import sys
from collections.abc import Mapping
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

PACKAGE = Path(__file__).resolve().parents[1]
FILES = (
    "errors.py",
    "fixtures/strides.py",
    "harness/concurrency.py",
    "harness/launches.py",
    "harness/memory.py",
    "harness/protocol.py",
    "harness/worker.py",
)
"""The files of the worker, which need torch and each other."""
NAME = "kernel_host"
LAUNCHER = "start.pyc"
SEARCH = "search"  # the folders of the path, where the environment has none
FIRST_LINES = f"""
import ctypes, os, socket, sys
folder = sys.path[0]
if os.path.exists(folder + "/{SEARCH}"):
    with open(folder + "/{SEARCH}") as file:
        sys.path[1:1] = [entry for entry in file.read().split("\\0") if entry]
ctypes.CDLL(None).mallopt(-6, 128)
from {NAME}.harness.worker import main
sys.path.remove(folder)
for name in [name for name in sys.modules if name.partition(".")[0] == "{NAME}"]:
    del sys.modules[name]
main(socket.socket(fileno=int(sys.argv[1])))
"""
"""``mallopt(M_PERTURB, 128)``: what is allocated in C holds 0x7F until it is written (glibc)."""
OWN = ("FP8_ORACLE", "PYTEST_")
"""How variables of the environment begin that are the judge's."""


def write(folder: Path, search: tuple[str, ...] = ()) -> None:
    """Write the program into a folder: ``python -P FOLDER CHANNEL`` is the worker, ``FOLDER/start.pyc`` the launcher.

    ``search`` are folders in which modules are looked for, torch too, before those of the interpreter.
    """
    for path, data in _compiled().items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    if search:
        (folder / SEARCH).write_text("\0".join(search))


def worker(folder: str, channel: int) -> list[str]:
    """The command of the worker whose program lies in ``folder``."""
    return [sys.executable, "-P", folder, str(channel)]


def launcher(folder: str) -> list[str]:
    """The command of the launcher."""
    return [sys.executable, "-I", "-S", os.path.join(folder, LAUNCHER)]


def environment() -> dict[str, str]:
    """The variables of this process without the judge's own."""
    shell = "_"  # the path of the command, as shells leave it
    return {name: value for name, value in os.environ.items() if not name.startswith(OWN) and name != shell}


def names_of_the_judge() -> tuple[str, ...]:
    """Modules of this process, and entries of its path, that bear the judge's name: another process may have them as it
    starts, where the package is installed to be edited."""
    edited = [name for name in (*sys.modules, *sys.path) if name.startswith("__editable__") and "fp8_oracle" in name]
    return (*edited, *(name for name in sys.modules if name.partition(".")[0] == PACKAGE.name))


@functools.cache
def _compiled() -> Mapping[str, bytes]:
    """The files of the program by their paths."""
    sources = {f"{NAME}/{path}": _renamed((PACKAGE / path).read_text()) for path in FILES}
    packages = {str(parent) for path in sources for parent in Path(path).parents if parent.name}
    sources |= {f"{parent}/__init__.py": ast.parse("") for parent in packages}
    sources |= {"__main__.py": ast.parse(FIRST_LINES)}
    sources |= {LAUNCHER: ast.parse((PACKAGE / "harness/launcher.py").read_text())}
    return {f"{path.removesuffix('.pyc').removesuffix('.py')}.pyc": _pyc(tree, path) for path, tree in sources.items()}


def _renamed(source: str) -> ast.Module:
    """The file as one of the package ``NAME``."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            top, dot, rest = node.module.partition(".")
            node.module = f"{NAME}{dot}{rest}" if top == PACKAGE.name else node.module
    return tree


def _pyc(tree: ast.Module, path: str) -> bytes:
    code: CodeType = compile(tree, f"/{path}", "exec", optimize=2)
    return MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
