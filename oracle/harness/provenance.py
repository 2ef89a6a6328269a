"""The machine, and the versions of everything that a verdict depends on.

The versions of the oracle and of each provider hold a digest of their sources: an edited checkout is another version
under the same number. The sources of a provider are its own package, and all that loading it reached outside of the
interpreter and of installed distributions; those are known by their versions (:class:`Watch`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Self

import torch

from oracle.harness.subjects import Provider

# Distributions whose kernels or compilers a subject may use; absent ones are left out.
DISTRIBUTIONS = (
    *("torch", "numpy", "numba", "triton", "flashinfer-python", "sgl-deep-gemm", "vllm", "sglang", "sgl-kernel"),
    *("apache-tvm-ffi", "nvidia-cutlass-dsl", "nvidia-cublas", "aiter"),
)


def machine() -> dict[str, str]:
    """Facts of this machine, as reports print them."""
    facts = {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
    facts |= {package: _version(package) or "unknown" for package in ("torch", "numpy", "numba")}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
        facts["driver"] = _driver()
    return facts


def versions(providers: Iterable[Provider]) -> dict[str, str]:
    """What a verdict depends on beside its case: oracle, providers of subjects, libraries, python, processor, GPU."""
    texts = {"fp8-oracle": f"{_version('fp8-oracle') or '0'}+{_digest(_sources('oracle'))}"}
    for provider in providers:
        package = provider.target.partition(":")[0].partition(".")[0]
        texts[f"subjects {provider.name}"] = f"{package}+{provider.code or _digest(_sources(package))}"
    texts["python"] = platform.python_version()
    texts["machine"] = platform.machine()
    for name in DISTRIBUTIONS:
        if (version := _version(name)) is not None:
            texts[name] = version
    if torch.cuda.is_available():
        texts["gpu"] = torch.cuda.get_device_name()
        texts["cuda"] = str(torch.version.cuda)
    return texts


def _driver() -> str:
    """The version of the GPU driver, from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown: no nvidia-smi"
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return answer.stdout.strip() or f"unknown: {answer.stderr.strip()}"


def _version(name: str) -> str | None:
    if name == "torch":
        return str(torch.__version__)  # names the build (+cpu, +cu128), which its distribution may leave out
    try:
        return version(name)
    except PackageNotFoundError:  # not installed, or no distribution of that name
        return None


class Watch:
    """What loading providers reached in this process, which must be one of their own: the hook in it stays for good.

    A context manager around each loading; what an earlier one reached counts for the later ones too.
    """

    def __init__(self) -> None:
        self._before = set(sys.modules)
        self._files: set[str] = set()
        self._watching = False
        sys.addaudithook(self._seen)

    def __enter__(self) -> Self:
        self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        self._watching = False

    def code_of(self, target: str) -> str:
        """Digest of the sources of a provider ``MODULE:CALLABLE``: those of its package and of every package that was
        imported from elsewhere than an installed distribution, the libraries and data files read beside them, and the
        versions of the distributions that were imported."""
        modules = {name: m for name, m in list(sys.modules.items()) if name not in self._before}
        origins = {name: _origin(module) for name, module in modules.items()}
        ours = Path(__file__).resolve().parents[1]
        loose = {n: o for n, o in origins.items() if o and not _within(o, (*_installed(), ours))}
        files = set(loose.values())
        for package in {name.partition(".")[0] for name in (target.partition(":")[0], *loose)}:
            files.update(_sources(package))
        folders = {path.parent for path in files}
        read = {Path(name) for name in self._files}
        files |= {p for p in read if p.is_file() and p.suffix != ".pyc" and _within(p, folders)}
        tops = {name.partition(".")[0] for name, origin in origins.items() if origin and name not in loose}
        versions = {top: _version(top) for top in tops - sys.stdlib_module_names}
        if unknown := [top for top, result in versions.items() if result is None]:  # named otherwise than its package
            owners = packages_distributions()
            versions |= {owner: _version(owner) for top in unknown for owner in owners.get(top, ())}
        return _digest(files, (f"{name} {result}" for name, result in sorted(versions.items())))

    def _seen(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._watching and event in ("open", "ctypes.dlopen") and isinstance(arguments[0], str):
            self._files.add(os.path.abspath(arguments[0]))


def _origin(module: object) -> Path | None:
    """The file of a module."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return Path(file).resolve() if isinstance(file, str) else None


def _installed() -> tuple[Path, ...]:
    """The folders of the interpreter and of installed distributions."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names] + site.getsitepackages() + [site.getusersitepackages()]
    return tuple(Path(folder).resolve() for folder in folders)


def _within(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _sources(package: str) -> list[Path]:
    """The Python sources of an importable package or module, none where there is none."""
    try:
        # find_spec of a submodule would import its package; of a top-level name it runs no code.
        spec = find_spec(package)
    except (ValueError, ImportError):  # a module without a spec, as one that was made by hand
        return []
    if spec is None:
        return []
    files = [path for place in spec.submodule_search_locations or () for path in sorted(Path(place).rglob("*.py"))]
    if not files and spec.origin is not None and Path(spec.origin).is_file():
        files = [Path(spec.origin)]
    return files


def _digest(files: Iterable[Path], versions: Iterable[str] = ()) -> str:
    """Digest of the names and contents of files, and of versions; ``absent`` where there is no file."""
    digest = hashlib.sha256("\n".join(versions).encode())
    files = list(dict.fromkeys(sorted(files)))
    for path in files:
        digest.update(os.fsencode(path.name) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12] if files else "absent"
