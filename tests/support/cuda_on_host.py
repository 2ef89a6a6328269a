"""Sources of CUDA C++ compiled by g++ and run on the CPU, a thread of a block after the other (``cuda_on_host.h``)."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from oracle.tensorcore.cuda_source import Source

HEADER = Path(__file__).with_name("cuda_on_host.h")
# fortified, longjmp ends the process where it enters another stack
FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIC", "-U_FORTIFY_SOURCE")


@cache
def precompiled() -> tempfile.TemporaryDirectory[str]:
    """A folder with the header as g++ reads it at once: the standard library takes most of the time of a source."""
    folder = tempfile.TemporaryDirectory()
    compiled = Path(folder.name) / f"{HEADER.name}.gch"
    subprocess.run(["g++", *FLAGS, "-x", "c++-header", "-o", compiled, HEADER], check=True)
    return folder


def launcher(folder: Path, *sabotage: tuple[str, str]) -> Callable[..., None]:
    """What stands for :meth:`Source.launch`, with tensors of the CPU; libraries are kept in ``folder``.

    ``sabotage``: texts of the source and what replaces them.
    """

    @cache
    def built(source: Source) -> ctypes.CDLL:
        text = source.path.read_text()
        for old, new in sabotage:
            assert old in text, old
            text = text.replace(old, new)
        entries = "".join(
            f'extern "C" void on_host_{name}(unsigned x, unsigned y, unsigned threads, void** arguments) '
            f"{{ run({name}, x, y, threads, arguments); }}\n"
            for name, _ in source.functions
        )
        name = f"{source.path.stem}_{abs(hash((source.definitions, sabotage)))}"
        (folder / f"{name}.cpp").write_text(f'#include "{HEADER.name}"\n{text}\n{entries}')
        flags = [*FLAGS, f"-I{precompiled().name}", *(f"-D{key}={value}" for key, value in source.definitions)]
        files = ["-shared", "-o", folder / f"{name}.so", folder / f"{name}.cpp"]
        subprocess.run(["g++", *flags, *files], check=True)
        return ctypes.CDLL(str(folder / f"{name}.so"))

    def launch(self: Source, name: str, grid: tuple[int, int], threads: int, *arguments: Any) -> None:
        assert dict(self.functions)[name] <= 1 << 18
        values = [_value(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        getattr(built(self), f"on_host_{name}")(*grid, threads, pointers)

    return launch


def _value(x: Any) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if x is None:
        return ctypes.c_void_p()
    return ctypes.c_int(x) if isinstance(x, int) else x
