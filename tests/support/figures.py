"""Figures of the structure of ``oracle/``, read off the syntax trees; nothing is imported.

python tests/support/figures.py [ROOT]        ROOT: a checkout of any version (default: this one)

files, lines      Python files of oracle/ and their lines; files directly in it
rooms             folders with Python files and Python files directly in oracle/
circles           files of one room, or of ``kernels/``, that import each other on whichever way, counting every import
                  statement: those of a function and of a type checker too
arrows, back      pairs of rooms of which one imports the other; pairs that import each other, on whichever way
floors            rooms on the longest chain of imports (a cycle counts as one)
class checks      isinstance and issubclass with a contract class, outside the room that holds the contracts
names             files that name a routine, in each package
by name           declarations of faults that name the contracts they are for
contracts         those registered, with the lines of oracle/routines and of oracle/ for each; by family the lines of
                  its folder, cases and faults with them, for each of its contracts
gaps              admitted values that no default case of a contract draws (from the version on that can tell)
formatter         files that ``ruff format`` would change, and lines that switch it off
docstrings        public tensor functions whose docstring has all that tests/project/test_docstrings.py asks for
words             local names, parameters and attributes called found, made, given, said or kept
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support import docstrings  # after the path, so that this file runs as a program

# Left to right: a file may import from its own room and from every room before it.
ROOMS = (
    "errors",
    "loading",
    "cache",
    "extensions",
    "numbers",
    "truth",
    "tensorcore",
    "bounds",
    "verdict",
    "routines",
    "diagnosis",
    "bindings",
    "api",
    "fixtures",
    "report",
    "harness",
    "cli",
    "pytest_plugin",
)
ENTRANCES = ("__init__", "__main__")
"""Files that may import from every room, and that no room imports."""
RANK = {name: rank for rank, name in enumerate((*ROOMS, *ENTRANCES))}

NAMES = ("fp8_gemm_nt", "per_token_group_quant_fp8", "fp8_mqa_logits")
CONTRACT_ROOMS = ("contracts", "routines")
GAPS = """
from oracle.routines import cases, drawn, reached
each = [reached.gaps(name, drawn.default_cases(name, 0)) for name in cases.grammars()]
print(sum(map(len, each)), "of them exempted", len(reached.EXEMPT))
"""
WORDS = {"found", "made", "given", "said", "kept"}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once in a process; it must not be changed."""
    return ast.parse(path.read_text())


def sources(package: Path) -> dict[Path, ast.Module]:
    return {p.relative_to(package): parsed(p) for p in sorted(package.rglob("*.py"))}


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def arrows(trees: dict[Path, ast.Module]) -> set[tuple[str, str]]:
    """``(importing room, imported room)``."""
    rooms, found = {room(path) for path in trees}, set()
    for path, tree in trees.items():
        for module in imported(tree):
            target = module.split(".")[1] if module.startswith("oracle.") else ""
            if target in rooms and target != room(path):
                found.add((room(path), target))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from [f"{node.module}.{a.name}" for a in node.names] if node.module == "oracle" else [node.module]


def file_arrows(trees: dict[Path, ast.Module], package: str) -> set[tuple[str, str]]:
    """``(importing module, imported module)`` inside one package, for every import statement of its files."""
    modules = {".".join([package, *path.with_suffix("").parts]).removesuffix(".__init__"): path for path in trees}
    found = set()
    for name, path in modules.items():
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = docstrings.module_of(node, ".".join([package, *modules[name].parent.parts]))
                each = (f"{base}.{alias.name}" for alias in node.names)
                named = [full if full in modules else base for full in each]
            else:
                continue
            found |= {(name, other) for other in named if other in modules and other != name}
    return found


def circles(edges: set[tuple[str, str]]) -> set[frozenset[str]]:
    """The largest sets of modules of which each reaches every other one by imports."""
    reach = {name: {name} for edge in edges for name in edge}
    for _ in reach:
        before = sum(map(len, reach.values()))
        for a, b in edges:
            reach[a] |= reach[b]
        if sum(map(len, reach.values())) == before:
            break
    together = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach}
    return {names for names in together if len(names) > 1}


def circles_in_rooms(root: Path) -> set[frozenset[str]]:
    """The circles of the files of each room of ``oracle/``, and of those of ``kernels/``."""
    found = circles(file_arrows(sources(root / "kernels"), "kernels"))
    for path in sorted((root / "oracle").iterdir()):
        if path.is_dir():
            found |= circles(file_arrows(sources(path), f"oracle.{path.name}"))
    return found


def floors(edges: set[tuple[str, str]]) -> int:
    """Rooms on the longest chain; rooms that import each other on whichever way stand on one floor."""
    reach = {name: {name} for edge in edges for name in edge}
    for _ in reach:
        for a, b in edges:
            reach[a] |= reach[b]
    group = {a: frozenset(b for b in reach[a] if a in reach[b]) for a in reach}
    below = {(group[a], group[b]) for a, b in edges if group[a] != group[b]}

    @cache
    def height(name: frozenset[str]) -> int:
        return 1 + max((height(b) for a, b in below if a == name), default=0)

    return max(height(name) for name in group.values())


def cycles(edges: set[tuple[str, str]]) -> int:
    return sum((b, a) in edges for a, b in edges) // 2


def contract_classes(trees: dict[Path, ast.Module]) -> set[str]:
    bases = {
        node.name: {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
        for path, tree in trees.items()
        if room(path) in CONTRACT_ROOMS
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Contract"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def class_checks(trees: dict[Path, ast.Module]) -> int:
    classes, count = contract_classes(trees), 0
    for path, tree in trees.items():
        if room(path) in CONTRACT_ROOMS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                asked = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node.args[1])}
                count += bool(asked & classes)
    return count


def named(root: Path, package: str, name: str) -> int:
    files = [p for p in (root / package).rglob("*") if p.suffix in (".py", ".md", ".sh") and p.is_file()]
    return sum(bool(re.search(rf"\b{name}\b", p.read_text())) for p in files)


def by_name(trees: dict[Path, ast.Module]) -> int:
    """Calls with the keyword ``contracts``, and calls of ``named``, in the files of faults of a family."""
    files = [tree for path, tree in trees.items() if len(path.parts) > 2 and "faults" in "/".join(path.parts)]
    calls = [node for tree in files for node in ast.walk(tree) if isinstance(node, ast.Call)]
    keywords = sum(any(keyword.arg == "contracts" for keyword in node.keywords) for node in calls)
    return keywords + sum(getattr(node.func, "id", "") == "named" for node in calls)


def words(trees: dict[Path, ast.Module]) -> int:
    """Names of that kind where they are bound."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    bound = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return sum(name in WORDS for name in bound)


FAMILIES = (
    "from oracle.routines.family import families; "
    "print(*(f'{one.name}={len(one.grammars)}' for one in families() if one.grammars))"
)
"""A program that prints each family, and how many contracts it has."""


def printed(root: Path, code: str) -> str:
    """What a program prints that imports this checkout's packages; ``-`` where they lack what it imports.

    Raises CalledProcessError: it fails in another way.
    """
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode and "ImportError" in ran.stderr.rstrip().splitlines()[-1]:
        return "-"
    ran.check_returncode()
    return ran.stdout.strip()


def unformatted(root: Path) -> tuple[int, int]:
    """Files that the formatter would change, and pragmas."""
    command = [sys.executable, "-m", "ruff", "format", "--check", "."]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    files = [path for package in ("oracle", "kernels", "tests") for path in (root / package).rglob("*.py")]
    return ran.stdout.count("Would reformat"), sum(path.read_text().count("# fmt: ") for path in files)


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    package = root / "oracle"
    trees, edges = sources(package), arrows(sources(package))
    lines = sum(len((package / path).read_text().splitlines()) for path in trees)
    print(f"files {len(trees)}, lines {lines}, at the root {sum(len(path.parts) == 1 for path in trees)}")
    print(f"rooms {len({room(p) for p in trees})}, arrows {len(edges)}, back {cycles(edges)}, floors {floors(edges)}")
    apart = circles_in_rooms(root)
    print(f"circles of files {len(apart)}: {', '.join(str(len(names)) for names in apart) or 'none'} files")
    print(f"class checks on contracts outside their room {class_checks(trees)}")
    for name in NAMES:
        files = ", ".join(f"{package} {named(root, package, name)}" for package in ("oracle", "kernels", "tests"))
        print(f"files that name {name}: {files}")
    registered = printed(root, "from oracle.routines import registered; print(len(registered()))")
    if registered.isdigit():
        inside = sum(len((package / path).read_text().splitlines()) for path in trees if room(path) in CONTRACT_ROOMS)
        each = f"lines of oracle/routines each {inside / int(registered):.0f}, of oracle/ {lines / int(registered):.0f}"
        print(f"contracts {registered}, {each}")
        for family, count in (pair.split("=") for pair in printed(root, FAMILIES).split()):
            own = sum(len(path.read_text().splitlines()) for path in (package / "routines" / family).glob("*.py"))
            print(f"contracts of {family} {count}, lines each {own / int(count):.0f}")
    print(f"faults by name of a contract {by_name(trees)}")
    print(f"gaps {printed(root, GAPS)}")
    print("formatter: {} files, {} pragmas".format(*unformatted(root)))
    for package, (whole, every) in docstrings.counts(root).items():
        print(f"docstrings of {package}: {whole} of {every} public tensor functions")
    print(f"words {words(trees)} in oracle, {words(sources(root / 'kernels'))} in kernels")


if __name__ == "__main__":
    main()
