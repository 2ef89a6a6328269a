"""The machine as a frozen record, and the published support predicates, as pure functions of it.

:meth:`Machine.detect` imports no GPU library: packages are found by their specification and metadata.
:meth:`Machine.described` builds the record of any other machine, so that decisions for every architecture can be
tested on any host. The thresholds are rows of :mod:`kernels.support`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from kernels import checks, context
from kernels.config import Config, current_config
from kernels.errors import DeviceError, OptionError
from kernels.support import BLOCK, CUTLASS, DEEP_GEMM_SM, E4M3_GFX, E8M0_SWITCH, PACKAGES, ROWWISE_ROCM, built

ARCHES = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx90a", "gfx942", "gfx950", "cpu")
"""Architectures with a described machine."""
INSTALL = {
    "deep_gemm": "install `sgl-deep-gemm` or vLLM, which vendors it",
    "flashinfer": "install `flashinfer-python`",
    "flashinfer_cubin": "install `flashinfer-cubin` (without it FlashInfer would download kernels at first use)",
    "vllm_ops": "install vLLM, or set FP8_KERNELS_VLLM_OPS to its compiled operators",
    "sgl_kernel": "install `sgl-kernel`",
    "triton": "install `triton`",
}
"""What to do about each missing package."""
DISTRIBUTIONS = {
    "flashinfer": "flashinfer-python",
    "flashinfer_cubin": "flashinfer-cubin",
    "sgl_kernel": "sgl-kernel",
}
PRODUCTS: Mapping[str, tuple[str, int]] = {
    # product: (architecture, multiprocessors). NVIDIA's white papers of GA100, GA102, AD102, GH100 and RTX Blackwell;
    # H200 and B200 as their drivers report them.
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
}
"""Products whose number of multiprocessors is known; an architecture alone does not determine it."""


@dataclass(frozen=True)
class Package:
    """One library: its version, and why it is unusable (None when it is usable)."""

    name: str
    version: str | None = None
    why_not: str | None = None


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

        ``packages`` maps names to versions; default: every package the vendor's machines can have. ``sms`` are its
        multiprocessors; default: those of the first of :data:`PRODUCTS` of that architecture, 0 when there is none.
        """
        capability = capability_of(arch)
        vendor = "cpu" if capability is None else "amd" if arch.startswith("gfx") else "nvidia"
        if packages is None:
            have = PACKAGES if vendor == "nvidia" else ("triton",) if vendor == "amd" else ()
            packages = dict.fromkeys(have, "1.0")
        if sms is None:
            sms = next((count for known, count in PRODUCTS.values() if known == arch), 0)
        return cls(
            vendor=vendor,
            arch=arch,
            capability=capability,
            cuda=version(cuda) if vendor == "nvidia" else None,
            rocm=version(rocm) if vendor == "amd" else None,
            torch=version(torch_version),
            sms=0 if vendor == "cpu" else sms,
            packages=tuple(Package(n, v) for n, v in packages.items()),
        )

    @classmethod
    def of_product(cls, product: str, *, sms: int | None = None) -> Machine:
        """A machine with the given GPU; ``sms`` when a driver reports another count (a slice, a salvaged part).

        Raises
        ------
        OptionError
            The product is not one of :data:`PRODUCTS`.
        """
        if product not in PRODUCTS:
            raise OptionError(f"unknown product {product!r}; known: {', '.join(PRODUCTS)}; or describe its arch")
        arch, count = PRODUCTS[product]
        return cls.described(arch, sms=count if sms is None else sms)

    @classmethod
    def detect(cls, config: Config | None = None) -> Machine:
        """This machine, as torch and the package metadata describe it."""
        config = config or current_config()
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

    def with_package(self, name: str, why_not: str | None = None, version: str | None = "1.0") -> Machine:
        """The same machine with one package present, or absent for a reason."""
        rest = tuple(p for p in self.packages if p.name != name)
        return replace(self, packages=(*rest, Package(name, None if why_not else version, why_not)), live=False)


def capability_of(arch: str) -> tuple[int, int] | None:
    """``sm90`` -> (9, 0), ``sm103`` -> (10, 3), ``gfx942`` -> (9, 4), ``gfx90a`` -> (9, 0), ``cpu`` -> None."""
    if arch == "cpu":
        return None
    if match := re.fullmatch(r"sm(\d{1,2})(\d)", arch):
        return int(match[1]), int(match[2])
    if match := re.fullmatch(r"gfx(\d{1,2})(\d)[0-9a-f]", arch):
        return int(match[1]), int(match[2])
    raise OptionError(f"unknown architecture {arch!r}; known: {', '.join(ARCHES)}")


def version(text: str) -> tuple[int, ...]:
    """Leading integers of a version: ``2.11.0+cu130`` -> (2, 11, 0). Compared as tuples, never as strings."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if match is None:
        raise OptionError(f"{text!r} is no version; expected integers separated by dots")
    return tuple(int(part) for part in match[0].split("."))


@context.constant
def current_machine() -> Machine:
    """This machine, detected at first use, or that of the block around the caller; a compiled graph keeps it."""
    once = context.current().machine
    return once.value or once.get(Machine.detect)


@contextmanager
def use_machine(machine: Machine | None) -> Iterator[None]:
    """Replace the current machine within the block (None: detect it again)."""
    with context.use(machine=context.Once(machine)):
        yield


# --- support predicates, under the names that engines use ------------------------------------------------------


@checks.verb
def is_deep_gemm_supported(machine: Machine | None = None, config: Config | None = None) -> bool:
    """sm90 or sm100, the package usable, ``VLLM_USE_DEEP_GEMM`` on and ``VLLM_USE_FLASHINFER_MOE_FP8`` off."""
    machine, config = machine or current_machine(), config or current_config()
    usable = machine.package("deep_gemm").why_not is None
    return machine.sm in DEEP_GEMM_SM and usable and config.use_deep_gemm and not config.use_flashinfer_moe_fp8


@checks.verb
def is_deep_gemm_e8m0_used(machine: Machine | None = None, config: Config | None = None) -> bool:
    """DeepGEMM supported, and ``VLLM_USE_DEEP_GEMM_E8M0`` on sm100 or ``VLLM_USE_DEEP_GEMM_E8M0_HOPPER`` on sm90."""
    machine, config = machine or current_machine(), config or current_config()
    return is_deep_gemm_supported(machine, config) and bool(getattr(config, E8M0_SWITCH[machine.sm]))


@checks.verb
def should_use_deepgemm_for_fp8_linear(
    output_dtype: torch.dtype,
    weight: torch.Tensor | tuple[int, int],
    machine: Machine | None = None,
    config: Config | None = None,
) -> bool:
    """DeepGEMM supported, bf16 out, and ``N`` and ``K`` of the weight ``[N, K]`` multiples of 128."""
    n, k = weight if isinstance(weight, tuple) else (weight.shape[0], weight.shape[1])
    whole = n % BLOCK == 0 and k % BLOCK == 0
    return is_deep_gemm_supported(machine, config) and output_dtype == torch.bfloat16 and whole


@checks.verb
def cutlass_fp8_supported(machine: Machine | None = None) -> bool:
    """sm89 with CUDA >= 12.4, sm90 and above with CUDA >= 12.0."""
    return _compiled("cutlass_fp8_supported", machine)


@checks.verb
def cutlass_block_fp8_supported(machine: Machine | None = None) -> bool:
    """sm90 with CUDA >= 12.0, sm100 and above with CUDA >= 12.8."""
    return _compiled("cutlass_block_fp8_supported", machine)


@checks.verb
def cutlass_group_gemm_supported(machine: Machine | None = None) -> bool:
    """sm90 with CUDA >= 12.3, sm100 and above with CUDA >= 12.8."""
    return _compiled("cutlass_group_gemm_supported", machine)


@checks.verb
def sparse_cutlass_supported(machine: Machine | None = None) -> bool:
    """sm90 (not above: the kernels are Hopper's) with CUDA >= 12.2."""
    return _compiled("sparse_cutlass_supported", machine)


@checks.verb
def use_rowwise_torch_scaled_mm(machine: Machine | None = None) -> bool:
    """ROCm with torch >= 2.7 and capability >= 9.4 (gfx942, gfx950); vLLM's ``USE_ROWWISE_TORCH_SCALED_MM``."""
    machine = machine or current_machine()
    modern = machine.torch >= ROWWISE_ROCM and (machine.capability or (0, 0)) >= E4M3_GFX
    return machine.vendor == "amd" and modern


@checks.verb
def get_num_sms(device: torch.device | int | None = None, *, machine: Machine | None = None) -> int:
    """Multiprocessors of a machine, from which a persistent kernel's grid and schedule follow.

    For a live CUDA device the driver's count of enabled multiprocessors, which an architecture does not determine (an
    H100 has 132 or 114, a slice of it fewer). For a described machine the count in its description.

    Parameters
    ----------
    device
        A CUDA device; default: the current one.
    machine
        A described machine, instead of any device.

    Raises
    ------
    DeviceError
        There is no CUDA device, or the machine has no multiprocessors or does not say how many.
    """
    if machine is None and torch.cuda.is_available():
        chosen = torch.cuda.current_device() if device is None else device
        count = int(torch.cuda.get_device_properties(chosen).multi_processor_count)
    else:
        count = (machine or current_machine()).sms
    if count < 1:
        raise DeviceError(
            f"get_num_sms needs a CUDA device with multiprocessors, found {count}; pass num_sms explicitly on a CPU, "
            "or sms= when describing a machine"
        )
    return count


def __getattr__(name: str) -> bool:
    """``USE_ROWWISE_TORCH_SCALED_MM``: the published constant, evaluated for this machine when asked for."""
    if name == "USE_ROWWISE_TORCH_SCALED_MM":
        return use_rowwise_torch_scaled_mm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _compiled(routine: str, machine: Machine | None) -> bool:
    machine = machine or current_machine()
    return built(CUTLASS[routine], machine.sm, machine.cuda)


def _find(name: str, config: Config) -> Package:
    missing = Package(name, None, f"package {name} is not installed; {INSTALL[name]}")
    if name == "vllm_ops":
        files = vllm_libraries(config)
        return Package(name, _metadata("vllm"), None) if files else missing
    if name == "deep_gemm":
        return _find_deep_gemm(missing)
    if importlib.util.find_spec(name) is None:
        return missing
    return Package(name, _metadata(DISTRIBUTIONS.get(name, name)))


def _find_deep_gemm(missing: Package) -> Package:
    if importlib.util.find_spec("deep_gemm") is not None:
        official = _metadata("sgl-deep-gemm") or _metadata("deep_gemm")
        if official == "1.0.0":
            return replace(missing, why_not="deep-gemm 1.0.0 is an unofficial upload; " + INSTALL["deep_gemm"])
        return Package("deep_gemm", official)
    if any((root / "third_party" / "deep_gemm").is_dir() for root in _vllm_roots()):
        return Package("deep_gemm", _metadata("vllm"))
    return missing


def vllm_libraries(config: Config) -> tuple[Path, ...]:
    """Paths of vLLM's compiled operators: the configured ones, else those beside the package, without importing it."""
    if config.vllm_ops_library:
        named = tuple(map(Path, config.vllm_ops_library.split(os.pathsep)))
        return named if any(path.is_file() for path in named) else ()
    names = ("_C_stable_libtorch.abi3.so", "_C.abi3.so")
    return tuple(root / name for root in _vllm_roots() for name in names if (root / name).is_file())


def _vllm_roots() -> tuple[Path, ...]:
    spec = importlib.util.find_spec("vllm")
    return () if spec is None else tuple(map(Path, spec.submodule_search_locations or ()))


def _metadata(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
