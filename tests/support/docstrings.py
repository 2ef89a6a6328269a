"""What docstrings of public tensor functions lack, read off the syntax trees; nothing is imported.

    python tests/support/docstrings.py [PREFIX ...]        such as oracle/numbers or kernels/layout.py

A tensor function is a public function, or a public method of a public class, one of whose parameters or whose result is
annotated with ``Tensor`` or ``ndarray``. Exempt are private modules, ``@overload``, ``@fault`` (whose record describes
it), and annotations by name (``Mapping[str, Tensor]``), whose shapes stand in the specification of a contract.

Five rules, for a docstring and what it refers to:

parameters   each tensor parameter stands in double backquotes in a sentence with a shape, or heads an entry of the
             section ``Parameters`` with one; the docstring names a dtype
returns      a shape and a dtype, in the section ``Returns``; without one, in the first sentence or one with "return" or
             "result"
raises       the name of each error class that the function raises, itself or through a check that it calls
non-finite   "NaN", "non-finite" or "infinit..."; not where values are only moved (and a verb says so: ``MOVED``), nor
             where the only dtypes are integers and bool
source       ``Source:``, "derived in" or "derived from", here or in the docstring of the class or the module

A shape is ``[M, K]`` in double backquotes, "any shape", "same shape", "scalar" and the like (``SHAPE``). A docstring of
one paragraph, or none, of a method is continued by that of the same method of a base class; "as of :func:`f`" by the
docstring of ``f``. A line of a class's or a module's docstring that begins with "NaN", and a paragraph that begins with
"Raises", is about all functions inside.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGES = ("oracle", "kernels")
RULES = ("parameters", "returns", "raises", "non-finite", "source")
TENSORS = {"Tensor", "ndarray", "NDArray"}
OPAQUE = {"Callable", "type", "dict", "Mapping", "MutableMapping"}
EXEMPT = {"overload", "fault"}
CHECK = re.compile(r"_?(check|require|refuse|validate)")
LITERAL = re.compile(r"``([^`]+)``")
BRACKETS = re.compile(r"(?<![\w\])])\[[^\]]*\]|^(\w+\.)*(\w+_)?shape$")
SHAPE = re.compile(
    r"(\b(any|same|one|their|its|that|whose|whatever|logical)|'s|s')\s+shapes?\b|\bshapes?\s+of\b"
    r"|\bany\s+rank\b|\bscalars?\b|\bbroadcast",
    re.IGNORECASE,
)
INTEGER = re.compile(r"\b(u?int(8|16|32|64)|integers?|bool|bytes?)\b", re.IGNORECASE)
FLOAT = re.compile(
    r"\b(float\w*|bfloat16|bf16|f16|f32|f64|fp\d+|dtypes?|\w+_dtype|\w*storage|\w*E\d+M\d\w*)\b", re.IGNORECASE
)
NUMBER = re.compile(r"\b(codes?|scales?|values?)\b", re.IGNORECASE)
NON_FINITE = re.compile(r"NaN|\bnon-finite\b|\binfinit", re.IGNORECASE)
MOVED = re.compile(r"\b(move[sd]?|cop(y|ies|ied)|views?|permute[sd]?|reorder(s|ed)?|no values? (is|are) read)\b", re.I)
SOURCE = re.compile(r"\bSources?(:|\n-+\n)|\bderived\s+(in|from)\b", re.IGNORECASE)
SHARED_SOURCE = re.compile(r"^Sources?:|\bderived\s+(in|from)\b", re.IGNORECASE | re.MULTILINE)
SHARED_ERRORS = re.compile(r"^Raises\b(?:.+\n?)+", re.MULTILINE)
SHARED_NON_FINITE = re.compile(r"^NaN\b", re.MULTILINE)
REFERENCE = re.compile(r"\bas\s+(?:of\s+|for\s+|in\s+|by\s+|with\s+)?:(?:func|meth|class):`~?([\w.]+)`")


def module_of(node: ast.ImportFrom, package: str) -> str:
    """The module that an import statement of a file of ``package`` takes names from, by its absolute name."""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Module:
    """A module's tree and what its top level defines."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @cached_property
    def defined(self) -> dict[str, ast.FunctionDef | ast.ClassDef]:
        """Functions and classes by name; methods as ``Class.method``."""
        names: dict[str, ast.FunctionDef | ast.ClassDef] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[node.name] = node
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{n.name}": n for n in node.body if isinstance(n, ast.FunctionDef)}
        return names

    @cached_property
    def imported(self) -> dict[str, str]:
        """Full names of what import statements bind, wherever they stand."""
        names = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                module = module_of(node, ".".join(self.path.parent.parts))
                names |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
        return names


@dataclass(frozen=True)
class Function:
    """A public tensor function: its name with the class, and its syntax tree."""

    module: Module
    name: str
    node: ast.FunctionDef

    def __str__(self) -> str:
        return f"{self.module.path.as_posix()}:{self.node.lineno}: {self.name}"


class Project:
    """The modules of the packages below ``root``, and what names in them mean."""

    def __init__(self, root: Path) -> None:
        paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        parsed = [Module(path.relative_to(root), ast.parse(path.read_text())) for path in paths]
        self.modules = {module.name: module for module in parsed}

    def functions(self) -> Iterator[Function]:
        """Every public tensor function."""
        for module in self.modules.values():
            if any(part.startswith("_") and part != "__init__.py" for part in module.path.parts):
                continue
            for name, node in module.defined.items():
                public = not any(part.startswith("_") for part in name.split("."))
                if not isinstance(node, ast.FunctionDef) or not public or EXEMPT & set(decorators(node)):
                    continue
                if tensor_parameters(node) or is_tensor(node.returns):
                    yield Function(module, name, node)

    def resolve(self, module: Module, name: str) -> tuple[Module, str] | None:
        """The module and the name there of a function, class or method that ``module`` names so."""
        if name in module.defined:
            return module, name
        head, _, rest = name.partition(".")
        full = f"{module.imported.get(head, head)}.{rest}".rstrip(".")
        for cut in range(full.count("."), 0, -1):
            parts = full.split(".")
            owner, inside = self.modules.get(".".join(parts[:cut])), ".".join(parts[cut:])
            if owner and inside in owner.defined:
                return owner, inside
            if owner and inside.split(".")[0] in owner.imported:
                return self.resolve(owner, inside)
        return None

    def bases(self, module: Module, name: str) -> Iterator[tuple[Module, str]]:
        """The base classes of a class, nearest first, as far as they stand in the packages."""
        node = module.defined[name]
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            of = base.value if isinstance(base, ast.Subscript) else base
            if found := self.resolve(module, ast.unparse(of)):
                yield found
                yield from self.bases(*found)

    def texts(self, module: Module, name: str, seen: frozenset[str] = frozenset()) -> list[str]:
        """A docstring and those that continue it: a base class's where it is one paragraph, and what "as of" names."""
        key = f"{module.name}.{name}"
        if key in seen:
            return []
        text, seen = ast.get_docstring(module.defined[name]) or "", seen | {key}
        owner, _, method = name.rpartition(".")
        texts = [text]
        if owner and "\n\n" not in text:
            inherited = ((m, f"{n}.{method}") for m, n in self.bases(module, owner) if f"{n}.{method}" in m.defined)
            texts += [more for base in list(inherited)[:1] for more in self.texts(*base, seen)]
        for reference in REFERENCE.findall(text):
            of_class = f"{owner}.{reference}"
            found = self.resolve(module, of_class if of_class in module.defined else reference)
            texts += self.texts(*found, seen) if found else []
        return texts

    @cache  # noqa: B019 - one project a run
    def raised(self, module: Module, name: str) -> frozenset[str]:
        """Error classes that a function raises, itself or through the checks that it calls."""
        node, errors = module.defined[name], set()
        for inner in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
            if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
                errors.add(ast.unparse(inner.exc.func).split(".")[-1])
            elif isinstance(inner, ast.Call):
                callee = self.callee(module, name, inner)
                errors |= self.raised(*callee) if callee and callee != (module, name) else set()
        return frozenset(error for error in errors if error[:1].isupper())

    def callee(self, module: Module, name: str, call: ast.Call) -> tuple[Module, str] | None:
        """The check that a call calls: a function so named, or one of a module ``checks``."""
        called, owner = ast.unparse(call.func), name.rpartition(".")[0]
        if not re.fullmatch(r"[\w.]+", called):
            return None
        called = called.replace("self.", f"{owner}.", 1) if called.startswith("self.") else called
        found = self.resolve(module, called)
        if found and (CHECK.match(found[1].split(".")[-1]) or found[0].path.name == "checks.py"):
            return found
        return None

    def lacking(self, function: Function) -> list[str]:
        """What a docstring lacks, ``rule: detail``."""
        node, module = function.node, function.module
        texts = self.texts(module, function.name)
        text = "\n\n".join(texts)
        around = [ast.get_docstring(module.tree) or ""]
        if owner := function.name.rpartition(".")[0]:
            around.append(ast.get_docstring(module.defined[owner]) or "")
        missing = [f"parameters: no shape of {x}" for x in tensor_parameters(node) if not has_shape(texts, x)]
        if not names_dtype(text):
            missing.append("parameters: no dtype")
        if is_tensor(node.returns):
            said = returned(texts)
            missing += [] if names_shape(said) else ["returns: no shape of the result"]
            missing += [] if names_dtype(said) else ["returns: no dtype of the result"]
        errors, stated = sorted(self.raised(module, function.name)), " ".join([text, *map(shared_errors, around)])
        missing += [f"raises: {error}" for error in errors if not re.search(rf"\b{error}\b", stated)]
        if not answers_non_finite(text) and not any(map(SHARED_NON_FINITE.search, around)):
            missing.append("non-finite: nothing about NaN")
        if not SOURCE.search(text) and not any(map(SHARED_SOURCE.search, around)):
            missing.append("source: none here, nor a line `Source:` of the class or the module")
        return missing


def decorators(node: ast.FunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        yield ast.unparse(call).split(".")[-1]


def is_tensor(annotation: ast.expr | None) -> bool:
    """Whether an annotation names a tensor outside the types that are opaque."""
    if annotation is None:
        return False
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return is_tensor(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).split(".")[-1] in OPAQUE:
        return False
    if isinstance(annotation, ast.Name | ast.Attribute) and ast.unparse(annotation).split(".")[-1] in TENSORS:
        return True
    return any(is_tensor(inner) for inner in ast.iter_child_nodes(annotation) if isinstance(inner, ast.expr))


def tensor_parameters(node: ast.FunctionDef) -> list[str]:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [argument.arg for argument in every if argument and is_tensor(argument.annotation)]


def sections(text: str) -> dict[str, str]:
    """The text of a docstring before its sections (``""``), and of each section."""
    parts = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.MULTILINE)
    found = {"": parts[0]}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        found[name] = f"{found.get(name, '')}\n\n{body}"
    return found


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.)\s+|\n\n+", text)


def names_shape(text: str) -> bool:
    return bool(SHAPE.search(text)) or any(map(BRACKETS.search, LITERAL.findall(text)))


def names_dtype(text: str) -> bool:
    return bool(INTEGER.search(text) or FLOAT.search(text))


def answers_non_finite(text: str) -> bool:
    only_integers = INTEGER.search(text) and not FLOAT.search(text) and not NUMBER.search(text)
    return bool(NON_FINITE.search(text) or MOVED.search(text) or only_integers)


def shared_errors(text: str) -> str:
    return " ".join(SHARED_ERRORS.findall(text))


def entries(section: str) -> Iterator[tuple[set[str], str]]:
    """The entries of a section ``Parameters`` or ``Attributes``: names and text."""
    for entry in re.split(r"\n(?=[\w*])", section.strip()):
        head = re.split(r":|\n", entry)[0]
        yield {name.strip("* ") for name in head.split(",")}, entry


def has_shape(texts: list[str], name: str) -> bool:
    """Whether a parameter's sentence, or its entry, states a shape."""
    word, stated = re.compile(rf"(?<![\w.]){name}\b"), []
    for parts in map(sections, texts):
        stated += [entry for names, entry in entries(parts.get("Parameters", "")) if name in names]
        every = [sentence for body in parts.values() for sentence in sentences(body)]
        stated += [sentence for sentence in every if any(map(word.search, LITERAL.findall(sentence)))]
    return any(map(names_shape, stated))


def returned(texts: list[str]) -> str:
    """What docstrings say of the result: their sections, or the sentences that can be about it."""
    said = []
    for parts in map(sections, texts):
        first, *more = [sentence for body in parts.values() for sentence in sentences(body)]
        of_result = (s for s in more if re.search(r"\b(returns?|returned|results?)\b", s, re.IGNORECASE))
        section = parts.get("Returns", "") + parts.get("Yields", "")
        said += [section] if section else [first, *of_result]
    return " ".join(said)


def violations(project: Project, prefix: str = "") -> dict[str, list[str]]:
    """Functions of the files whose paths begin with ``prefix``, ``file:line: name``, and what they lack."""
    below = (f for f in project.functions() if f.module.path.as_posix().startswith(prefix))
    return {str(function): missing for function in below if (missing := project.lacking(function))}


def counts(root: Path) -> dict[str, tuple[int, int]]:
    """Of each package: public tensor functions whose docstrings lack nothing, and all."""
    project, whole, every = Project(root), Counter[str](), Counter[str]()
    for function in project.functions():
        package = function.module.path.parts[0]
        every[package] += 1
        whole[package] += not project.lacking(function)
    return {package: (whole[package], every[package]) for package in every}


def main(prefixes: Sequence[str]) -> int:
    """Print what is lacking below each prefix; 1 where there is any."""
    project = Project(Path(__file__).resolve().parents[2])
    lacking = {name: what for prefix in prefixes or [""] for name, what in violations(project, prefix).items()}
    for name, what in lacking.items():
        print(name, *what, sep="\n    ")
    print(f"{len(lacking)} functions lack something")
    return bool(lacking)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
