"""The page of releases says what plans do: a row that changes changes it, and a plan refuses what it excludes."""

from __future__ import annotations

import pytest

from kernels import releases, support
from kernels.backends.declaration import Backend
from kernels.config import Config
from kernels.errors import Unavailable
from kernels.plan import backend_of
from kernels.platform import Machine
from kernels.records import PACKAGES, Problem


def test_every_row_about_a_release_is_there() -> None:
    page = releases.markdown_backends()
    for backend, needs in support.NEEDS.items():
        bounds = {need.bound for need in needs if need.field in releases.VERSIONED and need.relation != "in"}
        lines = [line for line in page.splitlines() if line.startswith(f"| `{backend}` |")]
        for bound in bounds:
            assert any(f" {'.'.join(map(str, bound))} |" in line for line in lines), (backend, bound)
    assert all(f"| `{name}` |" in releases.markdown_packages() for name in ("torch", *PACKAGES))


def test_another_row_makes_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = releases.markdown_backends()
    rows = tuple(
        need._replace(bound=(0, 9)) if need.field == "flashinfer_release" and need.relation == "<" else need
        for need in support.NEEDS["flashinfer_quant"]
    )
    monkeypatch.setitem(support.NEEDS, "flashinfer_quant", rows)  # type: ignore[arg-type]  # a dict, read-only by type
    changed = set(releases.markdown_backends().splitlines()) - set(before.splitlines())
    assert changed == {"| `flashinfer_quant` | flashinfer | < 0.9 | every operation |"}


@pytest.mark.parametrize(
    ("backend", "op", "package", "accepted", "refused"),
    [
        ("flashinfer_quant", "quant_mxfp8", "flashinfer", ("0.6.18", "0.7.9"), ("0.6.17", "0.8.0")),
        ("sgl_kernel", "block_linear", "sgl_kernel", ("0.3.21", "0.4.9"), ("0.4.10",)),
        ("deep_gemm", "mqa_logits", "deep_gemm", ("sgl-deep-gemm==0.2.3",), ("sgl-deep-gemm==0.2.5",)),
    ],
)
def test_plans_follow_the_page(
    backend: str, op: str, package: str, accepted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    declared: Backend = backend_of(backend)
    arch = "sm100" if backend == "flashinfer_quant" else "sm90"
    problem = Problem(
        op, n=128, k=128, heads=64, head_dim=128, out_dtype="bfloat16", recipe="usual", a_dtype="bfloat16"
    )
    for releases_of, served in ((accepted, True), (refused, False)):
        for release in releases_of:
            machine = Machine.described(arch).with_package(package, version=release)
            why = declared.why_not(problem, machine, Config(library_quantisers=True))
            assert why is None if served else isinstance(why, Unavailable), (release, why)


def test_the_matrix_counts_what_a_release_serves() -> None:
    """A release before a bound serves less, one that nothing excludes as much as its neighbour."""
    old, new = (releases._served("flashinfer", release, "sm100") for release in ("0.5.0", "0.7.2.post1"))
    assert set(old) < set(new) and "mm_mxfp8" in set(new) - set(old)
    assert releases._served("triton", "3.6.0", "sm90") == releases._served("triton", "3.9.0", "sm90") != []
    cells = f"| {len(new)} |"
    assert any("| 0.7.2.post1 |" in line and cells in line for line in releases.markdown_matrix().splitlines())
