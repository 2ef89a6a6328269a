"""Modules of installed packages without the packages' ``__init__`` files, which import whole engines.

``validate hardware.alone:lmdeploy.pytorch.kernels.cuda.blocked_gemm_fp8.quant_fp8`` names what it calls by its own
path. Packages in ``BARE`` are imported as folders: their modules run, no ``__init__`` does. What a module imports from
a part of the engine that a kernel does not need is in ``STUBS``, an empty module with the few names that are read.
A package that is imported already stays as it is. Not covered: modules that need their ``__init__``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BARE = frozenset(
    {"sglang", "lmdeploy", "flag_gems", "fbgemm_gpu", "unsloth", "transformer_engine", "mx", "coat", "gemlite"}
)
OPENED: set[str] = set()
"""Those that :func:`module` was asked for: all others are imported as ever."""


def _no(*_: object, **__: object) -> bool:
    return False


def _yes() -> bool:
    return True


def _arch() -> SimpleNamespace:
    major, minor = torch.cuda.get_device_capability()
    return SimpleNamespace(major=major, minor=minor)


def _undecorated(*_: object, **__: object) -> Callable[[Any], Any]:
    return lambda function: function


class _Quiet:
    """A logger, or a set of switches, of which nothing is read: every call says nothing and returns False."""

    def __getattr__(self, name: str) -> Any:
        return _Quiet()

    def __call__(self, *_: object, **__: object) -> bool:
        return False


def _sm() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def _cores(*_: object) -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def _platform() -> SimpleNamespace:
    return SimpleNamespace(is_sm90=_sm() == (9, 0))


def _ceil_align(x: int, y: int) -> int:
    return -(-x // y) * y


def _empty(*names: str) -> dict[str, object]:
    """Classes of these names that keep nothing."""
    return {name: type(name, (), {"__init__": lambda self, **_: None}) for name in names}


STUBS: Mapping[str, Mapping[str, object]] = {
    "sglang.srt.layers": {"deep_gemm_wrapper": None},
    "sglang.srt.runtime_context": {"get_platform": _platform, "get_parallel": _no},
    "sglang.srt.environ": {"envs": _Quiet()},
    "sglang.srt.utils": {
        "is_cuda": _no, "is_hip": _no, "is_musa": _no, "is_xpu": _no, "is_gfx1250_supported": _no,
        "ceil_align": _ceil_align, "ceil_div": lambda x, y: -(-x // y), "get_device_core_count": _cores,
        "get_device_name": lambda *_: "unknown", "log_info_on_rank0": _no,
    },
    "sglang.srt.utils.custom_op": {"register_custom_op": _undecorated},
    "sglang.srt.utils.patch_torch": {"register_fake_if_exists": _undecorated},
    "sglang.kernels.jit.utils": {
        "is_arch_support_pdl": _no, "cache_once": lambda function: function, "get_jit_cuda_arch": _arch,
        "load_jit": _no, "make_cpp_args": _no, "is_hip_runtime": _no, "is_musa_runtime": _no,
        "get_activation_cuda_cflags": _no,
    },
    "lmdeploy.utils": {"get_logger": lambda *_: _Quiet()},
    "flag_gems": {"device": "cuda"},
    "flag_gems.runtime": {"torch_device_fn": torch.cuda},
    "flag_gems.utils": {"libentry": _undecorated, "libtuner": _undecorated},
    "flag_gems.utils.device_info": {"get_device_capability": _sm},
    "unsloth_zoo.utils": {"Version": str},
    "unsloth_zoo.log": {"logger": _Quiet()},
    "unsloth_zoo.temporary_patches.common": {"torch_compile": lambda function: function},
    "transformer_engine.pytorch.quantized_tensor": _empty("QuantizedTensorStorage", "Quantizer"),
    "transformer_engine.pytorch.tensor.utils": _empty("is_custom"),
}  # fmt: skip  # a table, one row a line


class _Folders(MetaPathFinder):
    """Finds packages of ``BARE`` as folders without an ``__init__``."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in OPENED:
            return None
        found = PathFinder.find_spec(name, path)
        if found is None or found.submodule_search_locations is None:
            return found
        folder = ModuleSpec(name, None, is_package=True)
        folder.submodule_search_locations = found.submodule_search_locations
        return folder


def module(name: str) -> ModuleType:
    """A module of a package in ``BARE``.

    Raises
    ------
    NotImplementedError
        The package is not installed, or the module or what it imports is not there: said with the import's own words.
    """
    top = name.partition(".")[0]
    if top not in sys.modules and top not in OPENED:
        if PathFinder.find_spec(top) is None:
            raise NotImplementedError(f"no package {top}")
        if not any(isinstance(finder, _Folders) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Folders())
        OPENED.add(top)
        for stub, names in STUBS.items():
            if stub.partition(".")[0].removesuffix("_zoo") == top:
                _put(stub, names)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"{name}: {error}") from error


def file(package: str, path: str) -> ModuleType:
    """One file of an installed package that imports nothing of it: the package stays for others to import whole."""
    root = PathFinder.find_spec(package)
    if root is None or root.submodule_search_locations is None:
        raise NotImplementedError(f"no package {package}")
    place = f"{root.submodule_search_locations[0]}/{path}.py"
    spec = spec_from_file_location(f"{package}_{path.replace('/', '_')}", place)
    assert spec is not None and spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _put(name: str, names: Mapping[str, object]) -> None:
    """A module with these names, in its parents; parents are folders where a folder is there, else empty."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        at = ".".join(parts[:depth])
        if at not in sys.modules:
            parent = sys.modules.get(at.rpartition(".")[0])
            found = PathFinder.find_spec(at, getattr(parent, "__path__", None) if parent else None)
            made = ModuleType(at)
            made.__path__ = list((found and found.submodule_search_locations) or [])
            sys.modules[at] = made
            if parent is not None:
                setattr(parent, parts[depth - 1], made)
    vars(sys.modules[name]).update(names)


class _Path:
    """A dotted path into a package: a module where one is there, else what the module holds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self._name}.{name}"
        here = module(self._name)
        folder = getattr(here, "__path__", None)
        return _Path(whole) if folder is not None and PathFinder.find_spec(whole, folder) else getattr(here, name)


def __getattr__(name: str) -> _Path:
    """``PACKAGE`` of ``hardware.alone:PACKAGE.MODULE.NAME``."""
    if name not in BARE:
        raise AttributeError(name)
    return _Path(name)
