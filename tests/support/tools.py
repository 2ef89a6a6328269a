"""Programs and C++ headers of this machine that some tests need."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def found(name: str) -> str | None:
    """The path of a program, of this environment before the system's; of a header (``gtest/gtest.h``) its name, where
    g++ finds it. None where there is none."""
    if "/" not in name:
        return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if (compiler := found("g++")) is None:
        return None
    text = f"#if !__has_include(<{name}>)\n#error\n#endif\n"
    asked = subprocess.run([compiler, "-E", "-x", "c++", "-"], input=text, text=True, capture_output=True, check=False)
    return name if asked.returncode == 0 else None
