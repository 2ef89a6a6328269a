"""The machine, and the versions of everything that a verdict depends on.

The versions of the oracle and of each provider hold a digest of their sources: an edited checkout is another version
under the same number.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

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
    found = {"fp8-oracle": f"{_version('fp8-oracle') or '0'}+{_digest('oracle')}"}
    for provider in providers:
        package = provider.target.partition(":")[0].partition(".")[0]
        found[f"subjects {provider.name}"] = f"{package}+{_digest(package)}"
    found["python"] = platform.python_version()
    found["machine"] = platform.machine()
    for name in DISTRIBUTIONS:
        if (known := _version(name)) is not None:
            found[name] = known
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return found


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
    except PackageNotFoundError:
        return None


def _digest(package: str) -> str:
    """Digest of the Python sources of an importable package or module, ``absent`` when there is none."""
    # find_spec of a submodule would import its package; of a top-level name it runs no code.
    spec = find_spec(package)
    if spec is None:
        return "absent"
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [path for root in roots for path in sorted(root.rglob("*.py"))]
    if not files and spec.origin is not None and Path(spec.origin).is_file():
        files = [Path(spec.origin)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(os.fsencode(path.name) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
