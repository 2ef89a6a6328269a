"""The steps of a release, as `.github/workflows/release.yml` calls them; RELEASING.md says who does what.

python -m tests.support.release version [--tag TAG]      the version; with a tag, refuse one that names another version
                                                         or that CHANGELOG.md has no dated section for
python -m tests.support.release notes                    that section, for the page of the release
python -m tests.support.release build DIR                both source distributions, and both wheels out of them
python -m tests.support.release check DIR [--python V]   in a bare environment, beside Hugging Face's `kernels` and
                                                         transformers: install, import, judge, uninstall again
python -m tests.support.release extras DIR [--python V] [--only NAME]
                                                         each optional extra in a bare environment of its own, and one
                                                         command of what it brings
python -m tests.support.release tools DIR                the lines of README.md for pipx and uvx, with these wheels

The version of both distributions stands in ``kernels/VERSION`` and nowhere else. What is built comes from the files of
the checkout, so that a release is built in a fresh clone. `check`, `extras` and `tools` need a package index, and make
environments by uv; ``UV_TORCH_BACKEND=cpu`` takes torch's CPU build, ``UV_CONSTRAINT=constraints.txt`` holds versions.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("oracle", "kernels", "fixtures", "pyproject.toml", "README.md", "LICENSE")
PROJECTS = {"fp8-oracle": (".", "oracle"), "fp8-oracle-kernels": ("kernels", "fp8_oracle_kernels")}
"""Distributions: their folder of the checkout, and what is imported."""
PLACED = (
    *("pyproject.toml", "kernels/pyproject.toml", "CITATION.cff", "docs/how-to/ci.md"),
    *(".github/CODEOWNERS", ".github/ISSUE_TEMPLATE/config.yml"),
)
"""Files that name the account of the repository."""
BESIDE = ("kernels>=0.17", "transformers>=5")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"
ON_A_GPU = "gpu"  # the extra that is only resolved: its libraries import on a GPU machine alone
WORKS = {
    "plot": ("python -c 'import matplotlib'", ""),
    "ray": ("python -c 'import ray'", ""),
    "dev": ("pytest --version --version", "fp8-oracle-"),
    "docs": ("mkdocs --version", "mkdocs, version"),
    "mutants": ("cosmic-ray --version", "."),
    "kernels": ("python -c 'import fp8_oracle_kernels'", ""),
    "oracle": ("python -c 'import oracle'", ""),
}
"""A command of what each extra brings, and what it says."""
TOOLS = (
    ("pipx install fp8-oracle", "installed package fp8-oracle"),
    ("pipx inject fp8-oracle fp8-oracle-kernels", "injected package fp8-oracle-kernels"),
    ("uvx --with fp8-oracle-kernels fp8-oracle doctor", "fp8_oracle_kernels"),
)
"""Lines of README.md, and what each says."""

ALONE = """
import importlib.util, oracle
assert importlib.util.find_spec("fp8_oracle_kernels") is None
"""
TOGETHER = """
import importlib.metadata, pathlib, sys
import kernels, transformers
import fp8_oracle_kernels, oracle
assert "kernels" in importlib.metadata.packages_distributions()["kernels"] and callable(kernels.get_kernel)
assert pathlib.Path(kernels.__file__).parent.name == "kernels" and not hasattr(kernels, "fp8_gemm_nt")
assert callable(fp8_oracle_kernels.fp8_gemm_nt) and callable(oracle.judge)
assert callable(transformers.AutoModel.from_pretrained)
"""
AFTER = """
import importlib.util, kernels, transformers
assert callable(kernels.get_kernel) and callable(transformers.AutoModel.from_pretrained)
assert importlib.util.find_spec("oracle") is None and importlib.util.find_spec("fp8_oracle_kernels") is None
"""


class ReleaseError(Exception):
    """A step whose condition does not hold."""


# --- version and notes --------------------------------------------------------------------------------------


def version(tag: str | None = None, root: Path = ROOT) -> str:
    """The version of the checkout.

    Raises ReleaseError: a tag of another version, no dated section of it, or a file that names no account.
    """
    stated = (root / "kernels" / "VERSION").read_text().strip()
    if tag is not None:
        if tag != f"v{stated}":
            raise ReleaseError(
                f"the tag {tag} is not v{stated}, the version in kernels/VERSION: write one or the other"
            )
        notes(root)
        if unnamed := [name for name in PLACED if "OWNER" in (root / name).read_text()]:
            raise ReleaseError(f"name the account of the repository, now OWNER, in {', '.join(unnamed)}: RELEASING.md")
    return stated


def notes(root: Path = ROOT) -> str:
    """The section of this version in CHANGELOG.md. Raises ReleaseError: there is none, or it says nothing."""
    wanted = version(root=root)
    text = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(wanted)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section `## [{wanted}] - YYYY-MM-DD` with an entry: write it")
    return found[1].strip() + "\n"


# --- build --------------------------------------------------------------------------------------------------


def build(out: Path, root: Path = ROOT) -> list[Path]:
    """Source distributions, and the wheels that follow from them alone, in a folder that has neither."""
    out = out.resolve()
    if out.is_dir() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty: name a new folder, so that nothing old is published")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        for part in PARTS:
            if part == "fixtures":  # read, never written
                (source / part).symlink_to(root / part)
            elif (root / part).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
                shutil.copytree(root / part, source / part, ignore=ignored)
            else:
                shutil.copy2(root / part, source)
        for project, (folder, _) in PROJECTS.items():
            _setuptools(source / folder, "sdist", out)
            (archive,) = out.glob(f"{project.replace('-', '_')}-[0-9]*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(Path(name) / project, filter="data")
            (unpacked,) = (Path(name) / project).iterdir()
            _setuptools(unpacked, "wheel", out)
    for archive in out.glob("*.whl"):
        _metadata(archive)
    return sorted(out.iterdir())


def _setuptools(folder: Path, what: str, out: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, what, str(out)], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{folder.name}: {what} failed\n{(done.stdout + done.stderr)[-3000:]}")


def _metadata(wheel: Path) -> None:
    """Refuse what a package index would refuse."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        text = packed.read(name)
    Metadata.from_email(text, validate=True)
    if Parser().parsestr(text.decode())["Description-Content-Type"] != "text/markdown":
        raise ReleaseError(f"{wheel.name}: its page is no Markdown")


# --- check --------------------------------------------------------------------------------------------------


class Environment:
    """A bare virtual environment, and commands in it, away from the checkout."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"
        folder.mkdir(parents=True, exist_ok=True)
        self.uv("venv", "--python", python, str(folder / "venv"))
        (self.site,) = (folder / "venv" / "lib").glob("python*/site-packages")

    def uv(self, *words: str) -> str:
        return self._run([sys.executable, "-m", "uv", *words])

    def install(self, *wanted: str | Path, flags: Sequence[str] = ()) -> str:
        return self.uv("pip", "install", "--python", str(self.python), *flags, *map(str, wanted))

    def uninstall(self, *names: str) -> None:
        self.uv("pip", "uninstall", "--python", str(self.python), *names)

    def runs(self, code: str) -> str:
        return self._run([str(self.python), "-c", code])

    def oracle(self, line: str, says: str, status: int = 0) -> None:
        """One command line of the wheel's program."""
        self.program(f"fp8-oracle {line}", says, status)

    def program(self, line: str, says: str, status: int = 0) -> None:
        """One command line of a program of the environment."""
        name, *words = shlex.split(line)
        _says(line, self._run([str(self.folder / "venv" / "bin" / name), *words], status), says)

    def files(self) -> set[str]:
        """Every file of the environment's packages, without what Python compiles of them."""
        paths = (path.relative_to(self.site) for path in self.site.rglob("*") if path.is_file())
        return {str(path) for path in paths if "__pycache__" not in path.parts}

    def _run(self, command: list[str], status: int = 0) -> str:
        return _run(command, self.folder, status=status)


def _run(command: Sequence[str], folder: Path, *, status: int = 0, **variables: str) -> str:
    """What a command writes that is run in this folder, without this checkout's variables."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("FP8_", "PYTHON"))}
    done = subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True, text=True, check=False)
    if done.returncode != status:
        raise ReleaseError(f"{' '.join(command)}: {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def _says(line: str, said: str, wanted: str) -> None:
    if wanted not in said:
        raise ReleaseError(f"{line} does not say {wanted!r}:\n{said[-2000:]}")


def wheels(out: Path) -> tuple[Path, Path]:
    """The wheels of a folder: the oracle's and the layer's."""
    (oracle,), (layer,) = (
        list(out.resolve().glob(f"{name}-[0-9]*.whl")) for name in ("fp8_oracle", "fp8_oracle_kernels")
    )
    return oracle, layer


def check(out: Path, python: str) -> None:
    """Both wheels in a bare environment that has `kernels` and transformers, from the first install to the last."""
    oracle, layer = wheels(out)
    with tempfile.TemporaryDirectory() as name:
        bare = Environment(Path(name), python)
        bare.install(*BESIDE, "torch>=2.9")
        before = bare.files()
        bare.install(oracle)
        bare.runs(ALONE)
        bare.oracle("doctor", "layer")
        bare.oracle("fixtures check", "regenerated")
        bare.oracle(
            "plan --op fp8_gemm_nt --arch sm90 --m 1 --n 128 --k 128", "pip install fp8-oracle-kernels", status=2
        )
        bare.install(layer)
        bare.runs(TOGETHER)
        bare.oracle("plan --op fp8_gemm_nt --arch sm90 --m 31 --n 4096 --k 4096", "deep_gemm")
        bare.oracle("verify --contract ceil_div", "passed")
        bare.uv("pip", "check", "--python", str(bare.python))
        needed = bare.files() - before
        ours = {file for file in needed if file.startswith(("oracle/", "fp8_oracle"))}
        bare.uninstall(*PROJECTS)
        if left := {file for file in bare.files() & ours} | (before - bare.files()):
            raise ReleaseError(f"uninstalling leaves or takes {sorted(left)[:5]}")
        bare.runs(AFTER)
    print(f"{oracle.name} and {layer.name}: whole beside {' and '.join(BESIDE)} on Python {python}")


def extras(out: Path, python: str, only: Sequence[str] = ()) -> None:
    """Each optional extra of each wheel, or these."""
    for wheel in wheels(out):
        with zipfile.ZipFile(wheel) as packed:
            (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
            about = Parser().parsestr(packed.read(name).decode())
        for extra in about.get_all("Provides-Extra"):
            if only and extra not in only:
                continue
            with tempfile.TemporaryDirectory() as folder:
                bare, wanted = Environment(Path(folder), python), f"{about['Name']}[{extra}] @ {wheel.as_uri()}"
                local = ("--find-links", str(out.resolve()))
                if extra == ON_A_GPU:
                    bare.install(wanted, flags=("--dry-run", *local))
                else:
                    bare.install(wanted, flags=local)
                    bare.program(*WORKS[extra])
            print(f"{about['Name']}[{extra}]: {'resolves' if extra == ON_A_GPU else 'installs, works'}", flush=True)


def tools(out: Path) -> None:
    """The tool routes of README.md, with the wheels of this folder in the place of the published ones."""
    linked = ",".join(filter(None, (str(out.resolve()), os.environ.get("UV_FIND_LINKS"))))
    with tempfile.TemporaryDirectory() as name:
        places = {"PIPX_HOME": f"{name}/home", "PIPX_BIN_DIR": f"{name}/bin", "PIPX_MAN_DIR": f"{name}/man"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where uv is, which pipx calls
        places |= {"PIPX_DEFAULT_BACKEND": "uv", "UV_FIND_LINKS": linked, "PATH": path}
        for line, wanted in TOOLS:
            words = line.split() if line.startswith("uvx ") else ["uvx", *line.split()]  # pipx is a tool, too
            _says(line, _run(words, Path(name), **places), wanted)
            print(f"{line}: works", flush=True)
        said = _run([f"{name}/bin/fp8-oracle", "doctor"], Path(name))
        _says("fp8-oracle doctor, of pipx", said, "fp8_oracle_kernels")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("version").add_argument("--tag")
    steps.add_parser("notes")
    steps.add_parser("build").add_argument("folder", type=Path)
    for name in ("check", "extras"):
        step = steps.add_parser(name)
        step.add_argument("folder", type=Path)
        step.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
        if name == "extras":
            step.add_argument("--only", nargs="+", metavar="NAME", choices=[*WORKS, ON_A_GPU], default=())
    steps.add_parser("tools").add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        match given.step:
            case "version":
                print(version(given.tag))
            case "notes":
                print(notes(), end="")
            case "build":
                print(*build(given.folder), sep="\n")
            case "check":
                check(given.folder, given.python)
            case "extras":
                extras(given.folder, given.python, given.only)
            case "tools":
                tools(given.folder)
    except ReleaseError as error:
        print(f"release: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
