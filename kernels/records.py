"""What decisions depend on and what they are: :class:`Config`, :class:`Machine`, :class:`Problem` and :class:`Plan`.

Each is a frozen record. This file imports the errors of this package and nothing else of it, so that every other file
may know the records. ``os.environ`` is read here (:meth:`Config.from_environment`) and nowhere else in the package.

:meth:`Machine.detect` imports no GPU library: packages are found by their specification and metadata.
:meth:`Machine.described` builds the record of any other machine, so that decisions for every architecture can be tested
on any host.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from .errors import ConfigError, OptionError, Reason, shown

T = TypeVar("T")
FALLBACKS = ("next", "warn", "refuse")
"""What follows where a backend that should serve fails to load, to compile or to start: the next one of the row serves,
without a word or with one warning; or the call is refused."""
MOE_BACKENDS = ("throughput", "latency", "masked_gemm")
"""Values of ``VLLM_FLASHINFER_MOE_BACKEND``: CUTLASS, TensorRT-LLM, CUTEDSL."""
PACKAGES = (
    "deep_gemm",
    "flashinfer",
    "flashinfer_cubin",
    "vllm_ops",
    "vllm_fa3",
    "flashmla",
    "sgl_kernel",
    "triton",
    "cudnn",
    "cutlass_dsl",
)
"""Packages a row can ask for."""
ARCHES = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "gfx90a", "gfx942", "gfx950", "cpu")
"""Architectures with a described machine."""
INSTALL = {
    "deep_gemm": "install `sgl-deep-gemm` or vLLM, which vendors it",
    "flashinfer": "install `flashinfer-python`",
    "flashinfer_cubin": "install `flashinfer-cubin` (without it FlashInfer would download kernels at first use)",
    "vllm_ops": "install vLLM, or set FP8_KERNELS_VLLM_OPS to its compiled operators",
    "vllm_fa3": "install vLLM, or name _vllm_fa3_C.abi3.so in FP8_KERNELS_VLLM_OPS",
    "flashmla": "install vLLM, or name _flashmla_C.abi3.so in FP8_KERNELS_VLLM_OPS",
    "sgl_kernel": "install `sgl-kernel`",
    "triton": "install `triton`",
    "cudnn": "install `nvidia-cudnn-frontend` and the cuDNN library of this CUDA",
    "cutlass_dsl": "install `nvidia-cutlass-dsl`",
}
"""What to do about each missing package."""
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "flashinfer": ("flashinfer-python",),
    "flashinfer_cubin": ("flashinfer-cubin",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cutlass_dsl": ("nvidia-cutlass-dsl",),
}
"""Distributions whose release is that of the package, the first that is installed; its own name where none is listed.
Of cuDNN the library's, which is behind the frontend that is imported."""
COMPILED: Mapping[str, tuple[str, ...]] = {
    "vllm_ops": ("_C_stable_libtorch.abi3.so", "_C.abi3.so"),
    "vllm_fa3": ("vllm_flash_attn/_vllm_fa3_C.abi3.so",),
    "flashmla": ("_flashmla_C.abi3.so",),
}
"""Files in vLLM's package that hold compiled operators."""
MODULES_OF = {"cutlass_dsl": "cutlass"}
"""The module that a package is imported as, where its name is another."""
RELEASES: Mapping[str, str] = {
    "deep_gemm": "sgl-deep-gemm==0.2.3.post2",
    "flashinfer": "0.7.2.post1",
    "flashinfer_cubin": "0.7.2.post1",
    "vllm_ops": "0.33.0",
    "vllm_fa3": "0.20.2",
    "flashmla": "0.20.2",
    "sgl_kernel": "0.3.21",
    "triton": "3.6.0",
    "cudnn": "9.15.0",
    "cutlass_dsl": "4.6.0",
}
"""The release of each package on a described machine that names none."""
PRODUCTS: Mapping[str, tuple[str, int]] = {
    # product: (architecture, multiprocessors). NVIDIA's white papers of GA100, GA102, AD102, GH100 and RTX Blackwell;
    # H200 and B200 as their drivers report them; GB10: 6,144 cores, of which a multiprocessor of that family has 128.
    "A100 SXM4": ("sm80", 108),
    "A40": ("sm86", 84),
    "L40S": ("sm89", 142),
    "RTX 4090": ("sm89", 128),
    "H100 SXM5": ("sm90", 132),
    "H100 PCIe": ("sm90", 114),
    "H200": ("sm90", 132),
    "B200": ("sm100", 148),
    "RTX 5090": ("sm120", 170),
    "RTX PRO 6000 Blackwell": ("sm120", 188),
    "GB10": ("sm121", 48),
}
"""Products whose number of multiprocessors is known; an architecture alone does not determine it."""


# --- the switches ----------------------------------------------------------------------------------------------------


def _integer(name: str, text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not an integer; set 0 or 1") from None


def _moe(name: str, text: str) -> str:
    if text not in MOE_BACKENDS:
        raise ConfigError(f"{name}={text!r}; choose one of {', '.join(MOE_BACKENDS)}")
    return text


def _fallback(name: str, text: str) -> str:
    if text not in FALLBACKS:
        raise ConfigError(f"{name}={text!r}; choose one of {', '.join(FALLBACKS)}")
    return text


def _text(name: str, text: str) -> str:
    return text


def _nonzero(name: str, text: str) -> bool:
    return text != "0"


def _variable(default: T, read: Callable[[str, str], T], meaning: str, *names: str) -> T:
    """A field with its variables (any of several), how a text that is not empty is read, and what it means."""
    variable: T = field(default=default, metadata={"names": names, "read": read, "meaning": meaning})
    return variable


@dataclass(frozen=True)
class Config:
    """One field for each switch."""

    use_deep_gemm: bool = _variable(True, _integer, "DeepGEMM may be chosen", "VLLM_USE_DEEP_GEMM")
    use_deep_gemm_e8m0: bool = _variable(
        True, _integer, "DeepGEMM takes UE8M0 scales on sm100", "VLLM_USE_DEEP_GEMM_E8M0"
    )
    use_deep_gemm_e8m0_hopper: bool = _variable(
        False, _integer, "DeepGEMM takes UE8M0 scales on sm90", "VLLM_USE_DEEP_GEMM_E8M0_HOPPER"
    )
    deep_gemm_tma_aligned_scales: bool = _variable(
        True, _integer, "an engine's quantisers write TMA-aligned scales", "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES"
    )
    use_flashinfer_moe_fp8: bool = _variable(
        False, _integer, "FlashInfer's experts replace DeepGEMM", "VLLM_USE_FLASHINFER_MOE_FP8"
    )
    flashinfer_moe_backend: str | None = _variable(
        None, _moe, f"FlashInfer's kernel family for experts: {', '.join(MOE_BACKENDS)}", "VLLM_FLASHINFER_MOE_BACKEND"
    )
    blockscale_gemm_flashinfer: bool = _variable(
        True, _integer, "FlashInfer's block-scaled product may be chosen", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"
    )
    batch_invariant: bool = _variable(False, _integer, "one kernel for every number of rows", "VLLM_BATCH_INVARIANT")
    vllm_ops_library: str | None = _variable(
        None,
        _text,
        "paths of vLLM's compiled operators, separated as in `PATH`, where the package cannot be found by name",
        "FP8_KERNELS_VLLM_OPS",
    )
    flashinfer_observed: bool = _variable(
        False,
        _nonzero,
        "FlashInfer logs or traces its calls: they are made through its public function",
        "FLASHINFER_LOGLEVEL",
        "FLASHINFER_TRACE_DUMP",
    )
    backend: str = _variable(
        "",
        _text,
        "the backend to take or none: a name (`torch`) for every operation that lists it, or "
        "`operation=name`, several separated by commas",
        "FP8_KERNELS_BACKEND",
    )
    log_decisions: bool = _variable(
        False, _integer, "log each new decision once, with the reason of every refused backend", "FP8_KERNELS_LOG"
    )
    check_values: bool = _variable(
        False,
        _integer,
        "calls check values on a GPU too, without waiting: a wrong one fails the next synchronisation",
        "FP8_KERNELS_CHECK",
    )
    fast_paths: bool = _variable(
        True, _integer, "known releases of libraries are started past their public functions", "FP8_KERNELS_FAST_PATHS"
    )
    split_k: bool = _variable(
        False,
        _integer,
        "kernels may cut K for few rows: faster, and a sum depends on the number of rows",
        "FP8_KERNELS_SPLIT_K",
    )
    library_quantisers: bool = _variable(
        False,
        _integer,
        "MX and NVFP4 are quantised by a library's kernel where there is one: faster, and a code at a tie may be its "
        "neighbour",
        "FP8_KERNELS_LIBRARY_QUANTISERS",
    )
    fallback: str = _variable(
        "warn",
        _fallback,
        "where a backend that should serve fails to load, to compile or to start: take the next one (`next`), and warn "
        "once (`warn`), or refuse the call (`refuse`)",
        "FP8_KERNELS_FALLBACK",
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read every switch; an unset or empty one takes its default.

        Raises
        ------
        ConfigError
            A boolean switch holds something other than an integer, or the MoE backend is unknown.
        """
        env = os.environ if environment is None else environment
        switches: dict[str, Any] = {}
        for f in fields(cls):
            texts = [(name, env[name]) for name in f.metadata["names"] if env.get(name)]
            if texts:
                read = [f.metadata["read"](*text) for text in texts]
                switches[f.name] = next(filter(None, read), read[0])
        return cls(**switches)


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """One library: its version, and why it is unusable (None when it is usable).

    ``source``: the distribution that brings it, where several do, each with versions of its own.
    """

    name: str
    version: str | None = None
    why_not: str | None = None
    source: str | None = None

    @cached_property
    def release(self) -> tuple[int, ...] | None:
        """The version as integers, None where it is unknown."""
        return None if self.version is None or not self.version[:1].isdigit() else version(self.version)


@dataclass(frozen=True)
class Machine:
    """What decisions depend on.

    Attributes
    ----------
    vendor
        ``nvidia``, ``amd`` or ``cpu``.
    arch
        ``sm90``, ``gfx942``, ``cpu``.
    capability
        ``(major, minor)`` as torch reports it (gfx942 is ``(9, 4)``); None on a CPU.
    cuda, rocm, torch
        Versions as integer tuples; None when absent.
    sms
        Multiprocessors; 0 on a CPU, and where a described machine does not say.
    packages
        One record for each of :data:`PACKAGES`.
    live
        Whether this is the running machine, whose libraries a plan may load to ask what they lack.
    """

    vendor: str
    arch: str
    capability: tuple[int, int] | None
    cuda: tuple[int, ...] | None
    rocm: tuple[int, ...] | None
    torch: tuple[int, ...]
    sms: int = 0
    packages: tuple[Package, ...] = field(default_factory=tuple)
    live: bool = False

    @cached_property
    def sm(self) -> int:
        """Compute capability of an NVIDIA machine as one integer (90, 100); -1 elsewhere."""
        return self.capability[0] * 10 + self.capability[1] if self.vendor == "nvidia" and self.capability else -1

    @property
    def device(self) -> str:
        """The torch device type of the accelerator, ``cpu`` without one."""
        return "cpu" if self.vendor == "cpu" else "cuda"

    def package(self, name: str) -> Package:
        """The record of a package; an absent one when the machine does not list it."""
        for p in self.packages:
            if p.name == name:
                return p
        return Package(name, None, f"package {name} is not installed; {INSTALL.get(name, 'install it')}")

    @classmethod
    def described(
        cls,
        arch: str,
        *,
        cuda: str = "13.0",
        rocm: str = "6.4",
        torch_version: str = "2.13.0",
        packages: Mapping[str, str] | None = None,
        sms: int | None = None,
    ) -> Machine:
        """A machine of architecture ``arch`` with the given versions.

        ``packages`` maps names to versions, or to ``distribution==version`` where several bring it; default: every
        package the vendor's machines can have, of :data:`RELEASES`. ``sms`` are its multiprocessors; default: those of
        the first of :data:`PRODUCTS` of that architecture, 0 when there is none.
        """
        capability = capability_of(arch)
        vendor = "cpu" if capability is None else "amd" if arch.startswith("gfx") else "nvidia"
        if packages is None:
            have = PACKAGES if vendor == "nvidia" else ("triton",) if vendor == "amd" else ()
            packages = {name: RELEASES[name] for name in have}
        if sms is None:
            sms = next((count for listed, count in PRODUCTS.values() if listed == arch), 0)
        return cls(
            vendor=vendor,
            arch=arch,
            capability=capability,
            cuda=version(cuda) if vendor == "nvidia" else None,
            rocm=version(rocm) if vendor == "amd" else None,
            torch=version(torch_version),
            sms=0 if vendor == "cpu" else sms,
            packages=tuple(_released(n, v) for n, v in packages.items()),
        )

    @classmethod
    def from_record(cls, record: object) -> Machine:
        """A machine as a file describes it: ``{"arch": "sm100", "cuda": "13.0", "torch": "2.13.0", "sms": 148,
        "packages": {"flashinfer": "0.7.2.post1", "deep_gemm": "vllm==0.33.0"}}``.

        ``arch``, or ``product`` of :data:`PRODUCTS` instead; the rest is as of :meth:`described`, where a package that
        is not listed is not installed.

        Raises
        ------
        OptionError
            It is no such record; the message names the key and what it may be.
        """
        known = ("arch", "product", "cuda", "rocm", "torch", "sms", "packages")
        of_these = isinstance(record, dict) and record.keys() <= set(known)
        if not isinstance(record, dict) or not of_these or ("arch" in record) == ("product" in record):
            raise OptionError(
                f"a machine is an object with arch or product, and of {', '.join(known[2:])}: {shown(record)}"
            )
        packages = record.get("packages")
        if packages is not None:
            if not isinstance(packages, dict) or not all(isinstance(v, str) for v in packages.values()):
                raise OptionError(f"packages={shown(packages)}; it maps names to versions")
            if unknown := sorted(packages.keys() - set(PACKAGES)):
                raise OptionError(f"unknown package {unknown[0]!r}; known: {', '.join(PACKAGES)}")
        sms = record.get("sms")
        if sms is not None and (not isinstance(sms, int) or isinstance(sms, bool) or sms < 1):
            raise OptionError(f"sms={shown(sms)} is no number of multiprocessors")
        arch = record.get("arch")
        if arch is None:
            product = cls.of_product(str(record["product"]))
            arch, sms = product.arch, product.sms if sms is None else sms
        if arch not in ARCHES:
            raise OptionError(f"unknown architecture {shown(arch)}; known: {', '.join(ARCHES)}")
        versions = {"cuda": "cuda", "rocm": "rocm", "torch_version": "torch"}
        given: dict[str, Any] = {name: str(record[key]) for name, key in versions.items() if key in record}
        return cls.described(arch, packages=packages, sms=sms, **given)

    @classmethod
    def of_product(cls, product: str, *, sms: int | None = None) -> Machine:
        """A machine with the given GPU; ``sms`` when a driver reports another count (a slice, a salvaged part).

        Raises
        ------
        OptionError
            The product is not one of :data:`PRODUCTS`.
        """
        if product not in PRODUCTS:
            raise OptionError(f"unknown product {shown(product)}; known: {', '.join(PRODUCTS)}; or describe its arch")
        arch, count = PRODUCTS[product]
        return cls.described(arch, sms=count if sms is None else sms)

    @classmethod
    def detect(cls, config: Config) -> Machine:
        """This machine, as torch and the package metadata describe it."""
        installed = tuple(_find(name, config) for name in PACKAGES)
        versions = {
            "cuda": version(torch.version.cuda) if torch.version.cuda else None,
            "rocm": version(torch.version.hip) if torch.version.hip else None,
        }
        if not torch.cuda.is_available():
            return cls("cpu", "cpu", None, None, None, version(torch.__version__), 0, installed, True)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = (properties.major, properties.minor)
        if torch.version.hip:
            arch, vendor = properties.gcnArchName.split(":")[0], "amd"
        else:
            arch, vendor = f"sm{capability[0]}{capability[1]}", "nvidia"
        sms = int(properties.multi_processor_count)
        return cls(
            vendor,
            arch,
            capability,
            versions["cuda"],
            versions["rocm"],
            version(torch.__version__),
            sms,
            installed,
            live=True,
        )

    def with_package(self, name: str, why_not: str | None = None, version: str | None = None) -> Machine:
        """The same machine with one package present (``version`` as of :meth:`described`), or absent for a reason."""
        rest = tuple(p for p in self.packages if p.name != name)
        package = Package(name, None, why_not) if why_not else _released(name, version or RELEASES.get(name))
        return replace(self, packages=(*rest, package), live=False)


def capability_of(arch: str) -> tuple[int, int] | None:
    """``sm90`` -> (9, 0), ``sm103`` -> (10, 3), ``gfx942`` -> (9, 4), ``gfx90a`` -> (9, 0), ``cpu`` -> None."""
    if arch == "cpu":
        return None
    if match := re.fullmatch(r"sm(\d{1,2})(\d)", arch):
        return int(match[1]), int(match[2])
    if match := re.fullmatch(r"gfx(\d{1,2})(\d)[0-9a-f]", arch):
        return int(match[1]), int(match[2])
    raise OptionError(f"unknown architecture {shown(arch)}; known: {', '.join(ARCHES)}")


def version(text: str) -> tuple[int, ...]:
    """Leading integers of a version: ``2.11.0+cu130`` -> (2, 11, 0). Compared as tuples, never as strings."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        raise OptionError(f"{text!r} is no version; expected integers separated by dots")
    return tuple(int(part) for part in match[0].split("."))


def _released(name: str, text: str | None) -> Package:
    """A package of a described machine: ``0.7.2``, or ``distribution==0.7.2``."""
    source, _, number = (text or "").rpartition("==")
    return Package(name, number or None, None, source or None)


def _find(name: str, config: Config) -> Package:
    missing = Package(name, None, f"package {name} is not installed; {INSTALL[name]}")
    if name in COMPILED:
        files = vllm_libraries(config, name)
        return Package(name, _metadata("vllm"), None) if files else missing
    if name == "deep_gemm":
        return _find_deep_gemm(missing)
    if importlib.util.find_spec(MODULES_OF.get(name, name)) is None:
        return missing
    return Package(name, next(filter(None, map(_metadata, DISTRIBUTIONS.get(name, (name,)))), None))


def _find_deep_gemm(missing: Package) -> Package:
    if importlib.util.find_spec("deep_gemm") is not None:
        for source in ("sgl-deep-gemm", "deep_gemm"):
            found = _metadata(source)
            if found == "1.0.0":
                return replace(missing, why_not="deep-gemm 1.0.0 is an unofficial upload; " + INSTALL["deep_gemm"])
            if found is not None:
                return Package("deep_gemm", found, None, source)
        return Package("deep_gemm")
    if any((root / "third_party" / "deep_gemm").is_dir() for root in _vllm_roots()):
        return Package("deep_gemm", _metadata("vllm"), None, "vllm")
    return missing


def vllm_libraries(config: Config, package: str = "vllm_ops") -> tuple[Path, ...]:
    """Paths of vLLM's compiled operators: the configured ones, else those beside the package, without importing it.

    A configured file belongs to the package of :data:`COMPILED` that has one of its name, else to ``vllm_ops``."""
    names = COMPILED[package]
    if config.vllm_ops_library:
        owners = {Path(file).name: name for name, files in COMPILED.items() for file in files}
        paths = map(Path, config.vllm_ops_library.split(os.pathsep))
        named = tuple(path for path in paths if owners.get(path.name, "vllm_ops") == package)
        if named:
            return named if any(path.is_file() for path in named) else ()
        if package == "vllm_ops":
            return ()
    return tuple(root / name for root in _vllm_roots() for name in names if (root / name).is_file())


def _vllm_roots() -> tuple[Path, ...]:
    spec = importlib.util.find_spec("vllm")
    return () if spec is None else tuple(map(Path, spec.submodule_search_locations or ()))


def _metadata(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # not installed: no version
        return None


# --- the problem and the decision ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What a decision depends on; extents that a table does not look at stay None.

    Dtypes are torch names without the prefix; scale kinds are ``tensor``, ``token``, ``channel`` or ``block``.
    ``scale_format`` is what block scales may hold: ``ue8m0``, powers of two alone, or ``float32``. ``tiles`` is how
    scale bytes of codes lie, ``128x4``, ``8x4`` or ``linear``; ``alpha`` for what there is a factor, ``one`` for the
    product or one for each ``group``; the rows of every group begin at multiples of ``row_alignment``; ``a_width`` and
    ``b_width`` are how many codes of a row share a scale; ``recipe`` of a quantiser of blocks is ``usual`` where its
    scales are rounded up, its codes E4M3 or E2M1 and its global scale one, or ``other``.
    """

    op: str
    device: str = "cuda"
    m: int | None = None
    n: int | None = None
    k: int | None = None
    groups: int | None = None
    a_dtype: str = "float8_e4m3fn"
    b_dtype: str = "float8_e4m3fn"
    a_scale: str = "tensor"
    b_scale: str = "tensor"
    out_dtype: str = "bfloat16"
    bias: str | None = None
    c: str | None = None
    kernel: str | None = None
    heads: int | None = None
    head_dim: int | None = None
    block_size: int | None = None
    group_size: int = 128
    ue8m0: bool = False
    scale_format: str | None = None
    tiles: str | None = None
    alpha: str | None = None
    row_alignment: int | None = None
    a_width: int | None = None
    b_width: int | None = None
    recipe: str | None = None

    def __str__(self) -> str:
        """The fields that differ from their defaults, in one line."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(changed[1:] and [self.op, *changed[1:]] or [self.op])


@dataclass(frozen=True)
class Plan:
    """The decision: backend, kernel, preparation of the operands, how it sums (a schedule, or that bounds alone hold;
    empty where nothing is said), and why earlier backends were rejected."""

    problem: Problem
    arch: str
    backend: str
    kernel: str
    steps: tuple[str, ...]
    reasons: tuple[tuple[str, Reason], ...]
    numerics: str = ""

    def __str__(self) -> str:
        """The choice, its steps, how it sums, and every rejected backend, a line each."""
        lines = [f"{self.problem} on {self.arch}: {self.backend} -> {self.kernel}"]
        lines += [f"  step: {step}" for step in self.steps]
        lines += [f"  sums: {self.numerics}"] if self.numerics else []
        return "\n".join(lines + [f"  rejected {name}: {why}" for name, why in self.reasons])
