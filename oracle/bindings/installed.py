"""The routines that an installed library offers, read off its files: nothing of it is imported, loaded or run.

    Python files    functions of a module that take a tensor, and other names that it gives them; classes with a ``run``
                    that takes one; names that are taken from a compiled module, of which no parameters are known
    schemas         ``name(Tensor x, ...) -> ...`` of ``torch.ops``, in the Python files and in the read-only data of
                    compiled libraries
    operators       functions below ``custom_op("library::name")`` and its like, under the operator's name

A parameter takes a tensor where its annotation, or its type in a schema, says so; in a function that annotates none of
its parameters, each may take one whose default is no number, word or flag. Source: the files.
Not covered: functions that are made when a module is imported; device code, which is called by the functions here; a
compiled library that keeps no schemas and that no Python file of its wheel imports.
"""

from __future__ import annotations

import ast
import importlib.util
import mmap
import re
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

SCHEMA = re.compile(r"\s*(?:(\w+)::)?(\w+)(?:\.\w+)?\((.*)\)\s*->\s*\S.*", re.DOTALL)
DEVICE_CODE = re.compile(r"(^|\.)(jit|kernel|dsl_user_op)\b")  # @triton.jit, @cute.kernel
OPERATOR = re.compile(r"custom_op$|register_fake$|library\.impl$")
LEFT_OUT = re.compile(r"_?tests?$|testing$|test_|conftest$|_?bench|example|data$|third_party$")
"""Parts of a module's name: what tries or shows the library, and the sources of other projects that it carries."""
COMPILED = re.compile(r"_?C$|_C_|_cext$|common_ops$")
SCHEMAS_IN = re.compile(rb"\.define\(|Library\(|custom_op")
RODATA = ".rodata"
ELF = b"\x7fELF\x02\x01"


@dataclass(frozen=True)
class Routine:
    """One routine of a library.

    Attributes
    ----------
    name : without its module; of an operator without library and overload.
    where : the module, ``torch.ops.LIBRARY``, or the file of a compiled library.
    tensors : names of the parameters that take tensors; empty where none are known.
    words : everything else that its declaration says: other parameters, types and what it returns.
    """

    name: str
    where: str
    tensors: tuple[str, ...] = ()
    words: str = ""

    @property
    def target(self) -> str:
        """``WHERE:NAME``, which an exemption names."""
        return f"{self.where}:{self.name}"


def folder(package: str, root: Path | None = None) -> Path | None:
    """The folder of a package, below ``root`` or where Python would import it from; None where there is none."""
    if root is not None:
        return root / package if (root / package).is_dir() else None
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def routines(package: Path) -> tuple[list[Routine], list[str]]:
    """Every routine that the files of a package declare, once for each place, and the files that cannot be read.

    The folder's name is the package's. A Python file of a later version than this Python is one that cannot be read.
    """
    declared: list[Routine] = []
    unread: list[str] = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package.parent).with_suffix("").parts
        if not any(LEFT_OUT.match(part) for part in module[1:]):
            try:
                declared += python(path.read_bytes(), ".".join(module).removesuffix(".__init__"))
            except SyntaxError:
                unread.append(str(path.relative_to(package.parent)))
    for path in sorted(package.rglob("*.so*")):
        if not LEFT_OUT.match(path.parent.name):
            declared += compiled(path, str(path.relative_to(package.parent)))
    return declared, unread


# --- Python files -------------------------------------------------------------------------------------------


def python(source: bytes, module: str) -> Iterator[Routine]:
    """The routines of one Python file. Raises SyntaxError: it is none that this Python reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # escapes in the texts of others
        tree = ast.parse(source)
    libraries = {alias for node in tree.body for alias in _compiled_names(node)}
    functions: dict[str, Routine] = {}
    for node in tree.body:
        for routine in _declared(node, module, libraries, functions):
            functions.setdefault(routine.name, routine)
            yield routine
    if b"->" in source and SCHEMAS_IN.search(source):
        for inner in ast.walk(tree):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and "->" in inner.value:
                yield from schema(inner.value, module)


def _declared(node: ast.stmt, module: str, libraries: set[str], known: Mapping[str, Routine]) -> Iterator[Routine]:
    if isinstance(node, ast.Try | ast.If):
        for inner in (*node.body, *node.orelse):
            yield from _declared(inner, module, libraries, known)
    elif isinstance(node, ast.FunctionDef):
        decorators = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
        if any(DEVICE_CODE.search(ast.unparse(one)) for one in decorators):
            return
        for name in [] if node.name.startswith("_") else [node.name]:
            yield from _function(name, module, node)
        for one, of in zip(node.decorator_list, decorators, strict=True):
            if isinstance(one, ast.Call) and OPERATOR.search(ast.unparse(of)):
                named = [a.value for a in one.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                for library, _, name in [text.partition("::") for text in named if "::" in text]:
                    yield from _function(name, f"torch.ops.{library}", node)
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "run":
                yield from _function(node.name, module, method)
    elif isinstance(node, ast.Assign):
        names = [to.id for to in node.targets if isinstance(to, ast.Name) and not to.id.startswith("_")]
        if isinstance(node.value, ast.Attribute) and ast.unparse(node.value.value) in libraries:
            yield from (Routine(name, module) for name in names)
        elif isinstance(node.value, ast.Name) and (same := known.get(node.value.id)):
            yield from (replace(same, name=name) for name in names)
    elif isinstance(node, ast.ImportFrom) and COMPILED.match((node.module or "").rpartition(".")[2]):
        yield from (Routine(alias.name, module) for alias in node.names if not alias.name.startswith("_"))


def _compiled_names(node: ast.AST) -> Iterator[str]:
    """Names that a compiled module has in a file."""
    if isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names if COMPILED.match(alias.name))
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        yield from (to.id for to in targets if isinstance(to, ast.Name) and COMPILED.match(to.id))


def _function(name: str, module: str, node: ast.FunctionDef) -> Iterator[Routine]:
    positional = [*node.args.posonlyargs, *node.args.args]
    arguments = [*positional, *node.args.kwonlyargs]
    defaults = dict(zip([a.arg for a in positional[::-1]], node.args.defaults[::-1], strict=False))
    defaults |= {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d}
    silent = not any(a.annotation for a in arguments)
    if tensors := tuple(a.arg for a in arguments if _is_tensor(a, defaults.get(a.arg), silent)):
        others = " ".join(ast.unparse(a) for a in arguments if a.arg not in tensors)
        yield Routine(name, module, tensors, others)


def _is_tensor(argument: ast.arg, default: ast.expr | None, silent: bool) -> bool:
    if argument.annotation is not None:
        return "Tensor" in ast.unparse(argument.annotation)
    return silent and argument.arg != "self" and (default is None or ast.unparse(default) == "None")


# --- schemas ------------------------------------------------------------------------------------------------


def schema(text: str, where: str) -> Iterator[Routine]:
    """The routine of an operator's schema that takes a tensor; nothing for any other text."""
    if (match := SCHEMA.fullmatch(text)) and "Tensor" in match[3] and "\n\n" not in text:
        parameters = [part.split("=")[0].split() for part in match[3].split(",")]
        tensors = tuple(words[-1] for words in parameters if len(words) > 1 and "Tensor" in " ".join(words[:-1]))
        if tensors:
            yield Routine(match[2], f"torch.ops.{match[1]}" if match[1] else where, tensors, " ".join(match[3].split()))


def compiled(path: Path, where: str) -> Iterator[Routine]:
    """The schemas in the read-only data of a compiled library; nothing for a file that is none."""
    for text in set(_read_only(path).split(b"\0")):
        if b"->" in text and b"Tensor" in text:
            yield from schema(text.decode(errors="replace"), where)


def _read_only(path: Path) -> bytes:
    """The sections ``.rodata`` of a 64-bit ELF file: device code, a thousand times as large, is not read."""
    if path.stat().st_size < 64:
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != ELF:
            return b""
        start, (size, count, names) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HHH", data, 58)
        sections = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
        remaining = []
        for name, _, _, _, offset, length in sections:
            at = sections[names][4] + name
            if data[at : data.find(b"\0", at)].decode().startswith(RODATA):
                remaining.append(data[offset : offset + length])
        return b"\0".join(remaining)
