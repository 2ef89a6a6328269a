"""Where the code of a kernel stands, as ``FILE:LINE``: what an annotation of a pull request and SARIF point at.

The file is relative to the nearest folder above it that holds ``.git``, as code hosts count; where there is none, to
the current folder if it lies below that, else absolute. "" stands for code without a Python file, as of an extension.

Not covered: the line at which an exception was raised; code that only another process can import.
"""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path

FOLLOWED = 5  # imports of a name from another module


def place(path: Path, line: int) -> str:
    """``FILE:LINE`` of a line of a file."""
    path = path.resolve()
    roots = [folder for folder in path.parents if (folder / ".git").exists()][:1] + [Path.cwd()]
    below = (path.relative_to(root) for root in roots if path.is_relative_to(root))
    return f"{next(below, path).as_posix()}:{line}"


def of(thing: object) -> str:
    """Where the function behind a callable begins: behind partials, bound methods and wrappers."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    code = getattr(inspect.unwrap(getattr(thing, "__func__", thing)), "__code__", None)  # type: ignore[arg-type]
    return "" if code is None else place(Path(code.co_filename), code.co_firstlineno)


def of_name(target: str) -> str:
    """Where ``MODULE:NAME`` is bound, read off the files: nothing of it is imported, which may crash.

    A name that a module takes from another one is followed there. The line is 1 where no statement binds the name, and
    that of the mistake where the file is no Python.
    """
    module, _, name = target.partition(":")
    name = name.partition(".")[0].removesuffix("()")
    result = ""
    for _ in range(FOLLOWED):
        path = _file_of(module)
        if path is None:
            break
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError as error:
            return place(path, error.lineno or 1)
        except (OSError, ValueError):  # not readable, or with null bytes
            return place(path, 1)
        line, module, name = next(_bindings(tree, module, path, name), (1, "", name))
        result = place(path, line)
        if not module:
            break
    return result


def _bindings(tree: ast.Module, module: str, path: Path, name: str) -> Iterator[tuple[int, str, str]]:
    """``(line, module, name)`` of each statement outside functions that binds a name; the module is "" where the thing
    is made here, else the one that it comes from."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                yield node.lineno, "", name
            continue
        if isinstance(node, ast.ImportFrom):
            package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
            home = package[: len(package) - node.level + 1] if node.level else []
            for alias in (a for a in node.names if (a.asname or a.name) == name):
                yield node.lineno, ".".join([*home, *filter(None, [node.module])]), alias.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            yield node.lineno, "", name
        left += ast.iter_child_nodes(node)


def _file_of(module: str) -> Path | None:
    """The Python file of a module, found as a worker finds it: in the current folder first."""
    places: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    origin = None
    for name in accumulate(module.split("."), "{}.{}".format):
        result = _found(name, places or ())
        for finder in sys.meta_path if result is None else ():  # as of an editable installation
            result = result or finder.find_spec(name, places if "." in name else None)
        if result is None:
            return None
        origin, places = result.origin, result.submodule_search_locations
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _found(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """What PathFinder finds; of folders without ``__init__`` that one asks their parents, and none is loaded here."""
    folders: list[str] = []
    for importer in filter(None, map(pkgutil.get_importer, places)):
        result = importer.find_spec(name)
        if result is not None and result.loader is not None:
            return result
        folders += (result and result.submodule_search_locations) or []
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = folders
    return spec if folders else None
