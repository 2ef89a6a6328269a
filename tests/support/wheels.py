"""Wheels of libraries that tests read, unpacked side by side, several releases of one too.

    python -m tests.support.wheels DIR        installs the pins into DIR, each into a folder of its own

``FP8_ORACLE_WHEELS`` names that folder. A test whose wheel is not there is left out, and says the command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FLASHINFER = ("flashinfer-python==0.7.2.post1", "flashinfer-python==0.6.18.post1")
DEEP_GEMM = ("sgl-deep-gemm==0.2.5", "sgl-deep-gemm==0.2.3.post2")
VLLM = "vllm==0.20.2"
PINS = (*FLASHINFER, *DEEP_GEMM, VLLM)
RUNTIME = (
    "apache-tvm-ffi",
    "certifi",
    "charset-normalizer",
    "click",
    "einops",
    "idna",
    "ninja",
    "nvidia-cudnn-frontend",
    "nvidia-ml-py",
    "packaging",
    "requests",
    "tabulate",
    "tqdm",
    "urllib3",
)
"""What FlashInfer imports beside torch and numpy, where it launches nothing."""
COMMAND = "tox run -e releases"


def installed(pin: str) -> Path:
    """The folder of a pinned wheel; the test is left out where it is not there."""
    root = os.environ.get("FP8_ORACLE_WHEELS")
    path = Path(root or "") / pin
    if root is None or not path.is_dir():
        pytest.skip(f"UNSUPPORTED: {pin} is not in FP8_ORACLE_WHEELS; {COMMAND}")
    return path


def search_path(pin: str) -> str:
    """``PYTHONPATH`` of a process that imports a pinned wheel with what it needs."""
    path = installed(pin)
    return os.pathsep.join((str(path), str(path.parent / "runtime"), *sys.path[:1]))


def install(root: Path) -> None:
    """Every pin into ``root``, without what it depends on, and the runtime."""
    uv = shutil.which("uv") or "uv"
    for name, packages in (*((pin, (pin,)) for pin in PINS), ("runtime", RUNTIME)):
        if not (root / name).is_dir():
            command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(root / name), *packages]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
