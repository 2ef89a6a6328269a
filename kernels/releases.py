"""Which releases each backend accepts, as tables for the documentation: read off the rows of :mod:`kernels.support`.

A release that no row mentions is accepted; whether its operators are there is asked when a plan first takes it
(:meth:`~kernels.backends.declaration.Backend.lacks`).

NaN and infinity: no value is read.
Source: the rows and records of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import fast
from .plan import decisions
from .records import DISTRIBUTIONS, INSTALL, PACKAGES, RELEASES, Config, Machine
from .support import CUTLASS, NEEDS, Need

VERSIONED: Mapping[str, str] = {
    "torch": "torch",
    "cuda": "CUDA",
    **{f"{name}_release": name for name in PACKAGES},
    **{f"{name}_source": f"{name}, distribution" for name in PACKAGES},
}
"""Fields of a row that say something of a release, and of what."""

READ: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.9.1", "2.11.0", "2.13.0", "2.15.0"),
    "triton": ("3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"),
    "vllm_ops": ("0.20.2", "0.33.0"),
    "deep_gemm": tuple(f"sgl-deep-gemm=={each}" for each in ("0.1.4.post1", "0.1.7", "0.2.3.post2", "0.2.5"))
    + ("vllm==0.33.0",),
    "flashinfer": ("0.6.18.post1", "0.7.2.post1"),
    "sgl_kernel": ("0.3.21", "0.4.10"),
    "cutlass_dsl": ("4.5.0", "4.5.1", "4.6.0"),
    "cudnn": ("9.13.0", "9.14.0", "9.15.0"),
}
"""Releases whose files were read, or on both sides of a bound that a row has."""
SHOWN = ("sm89", "sm90", "sm100", "sm120")
"""Architectures of the matrix."""


def markdown_matrix() -> str:
    """For each release and architecture, how many routines of the plan the backends of the package serve, everything
    else as described."""
    lines = ["| package | release | " + " | ".join(SHOWN) + " |", "|:--" * (2 + len(SHOWN)) + "|"]
    for package, releases in READ.items():
        for release in releases:
            served = [str(len(_served(package, release, arch))) for arch in SHOWN]
            lines.append(f"| `{package}` | {release} | " + " | ".join(served) + " |")
    return "\n".join(lines) + "\n"


def _served(package: str, release: str, arch: str) -> list[str]:
    if package == "torch":
        machine = Machine.described(arch, torch_version=release)
    else:
        machine = Machine.described(arch).with_package(package, version=release)
    of_package = {name for name, needs in NEEDS.items() if package in (name, *(need.field for need in needs))}
    served = []
    for row in decisions(machine, Config(library_quantisers=True, split_k=True)):
        reasons = {each["name"]: each["why_not"] for each in row["backends"]}  # type: ignore[attr-defined]  # a list
        if any(name in of_package and why is None for name, why in reasons.items()):
            served.append(str(row["routine"]))
    return served


def markdown_backends() -> str:
    """Every row about a release: the backend, what it is of, which releases, and for which operations and machines.

    Rows of one backend that differ in their operations only are one line.
    """
    lines = ["| backend | of | accepts | for |", "|:--|:--|:--|---|"]
    for backend, needs in NEEDS.items():
        rows: dict[tuple[str, str], list[str]] = {}
        for of, accepts, where in _rows(needs):
            rows.setdefault((of, accepts), []).append(where)
        lines += [
            f"| `{backend}` | {of} | {what} | {'; '.join(dict.fromkeys(at))} |" for (of, what), at in rows.items()
        ]
    return "\n".join(lines) + "\n"


def markdown_packages() -> str:
    """Every package: the distributions that bring it, the release of a described machine, and the releases whose
    routines are started past their public functions (elsewhere they are called by these)."""
    lines = ["| package | brought by | described | started directly |", "|:--|:--|:--|---|"]
    for name in ("torch", *PACKAGES):
        brought = ", ".join(f"`{each}`" for each in DISTRIBUTIONS.get(name, ())) or INSTALL.get(name, "`torch`")
        known = ", ".join(release.rstrip(".") for release in fast.RELEASES.get(name, ())) or "-"
        lines.append(f"| `{name}` | {brought} | {RELEASES.get(name, '-')} | {known} |")
    return "\n".join(lines) + "\n"


def _rows(needs: tuple[Need, ...]) -> Iterator[tuple[str, str, str]]:
    for need in needs:
        if need.field in PACKAGES:
            yield need.field, "any", _where(need)
        elif need.field in VERSIONED:
            yield VERSIONED[need.field], _accepted(need), _where(need)
        elif need.field == "sm_cuda":
            yield (
                "CUDA",
                "by architecture (" + next(k for k, v in CUTLASS.items() if v == need.bound) + ")",
                _where(need),
            )


def _accepted(need: Need) -> str:
    if need.relation == "in":
        return " or ".join(f"`{each}`" for each in need.bound)
    return f"{need.relation} {'.'.join(map(str, need.bound))}"


def _where(need: Need) -> str:
    conditions = [f"{name}={_shown(value)}" for name, value in need.when.items()]
    operations = ", ".join(f"`{op}`" for op in need.ops) or "every operation"
    return operations + (f" with {', '.join(conditions)}" if conditions else "")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
