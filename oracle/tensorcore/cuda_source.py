"""CUDA C++ of this package, compiled by NVRTC for the GPU at hand, and its launches.

It needs an NVIDIA GPU of compute capability 8.0 and the package ``cuda-bindings``, which CUDA builds of torch install;
a source is compiled once a process, device and set of definitions, in about a second. :func:`why_not` says what is
missing. ``FP8_ORACLE_CUDA_SUMS=0`` in the environment does without: other engines give the same bits, slower.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.errors import NumericsError

SWITCH = "FP8_ORACLE_CUDA_SUMS"


@dataclass(frozen=True)
class Source:
    """A file of CUDA C++ with its definitions, and its functions with the bytes of dynamic shared memory of each."""

    path: Path
    definitions: tuple[tuple[str, int], ...]
    functions: tuple[tuple[str, int], ...]

    def launch(self, name: str, grid: tuple[int, int], threads: int, *arguments: Any) -> None:
        """Queue a function on the current stream: tensors of one device as pointers, None as a null pointer, int as
        ``int``, and objects of :mod:`ctypes` as what they are.

        Raises NumericsError: NVRTC or the driver refuses it; the message has its words.
        """
        from cuda.bindings import driver

        device = next(x.device for x in arguments if isinstance(x, Tensor))
        kinds, values = zip(*map(_passed, arguments), strict=True)
        with torch.cuda.device(device):
            function = _compiled(self, device.index or 0)[name]
            stream = torch.cuda.current_stream(device).cuda_stream
            memory = dict(self.functions)[name]
            checked(driver.cuLaunchKernel(function, *grid, 1, threads, 1, 1, memory, stream, (values, kinds), 0))


def why_not(device: torch.device) -> str | None:
    """Reason for which nothing can be compiled for this device, or None."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device} is no NVIDIA GPU"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the compute capability of {device} is below 8.0"
    return None


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA libraries returned beside its status.

    Raises NumericsError: the status is an error.
    """
    status, *values = result
    if int(status) != 0:
        raise NumericsError(f"CUDA says {status!r}; {SWITCH}=0 in the environment does without this source")
    return values[0] if values else None


def _passed(x: Any) -> tuple[Any, Any]:
    if isinstance(x, Tensor):
        return ctypes.c_void_p, x.data_ptr()
    if x is None:
        return ctypes.c_void_p, 0
    return (ctypes.c_int, x) if isinstance(x, int) else (type(x), x.value)


@lru_cache(maxsize=64)
def _compiled(source: Source, device: int) -> dict[str, Any]:
    from cuda.bindings import driver, nvrtc

    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--fmad=false"]
    name, words = source.path.name, [x.encode() for x in (*options, *(f"-D{k}=({v})" for k, v in source.definitions))]
    program = checked(nvrtc.nvrtcCreateProgram(source.path.read_bytes(), name.encode(), 0, [], []))
    if nvrtc.nvrtcCompileProgram(program, len(words), words)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise NumericsError(f"NVRTC does not compile {name}; {SWITCH}=0 does without: {log.decode()[:2000]}")
    binary = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, binary))
    module = checked(driver.cuModuleLoadData(binary))
    functions = {}
    for function, memory in source.functions:
        functions[function] = checked(driver.cuModuleGetFunction(module, function.encode()))
        largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if memory:
            checked(driver.cuFuncSetAttribute(functions[function], largest, memory))
    return functions
