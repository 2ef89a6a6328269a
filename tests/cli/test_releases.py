"""The line of releases on a contract's page: what its sources name, and what conformed on a GPU."""

from __future__ import annotations

import json
from collections import defaultdict

from oracle.cli import releases
from oracle.cli.page import page, releases_of
from oracle.routines import get, registered
from tests.support.paths import ROOT


def test_the_table_is_that_of_the_gallery() -> None:
    """Versions of packages whose kernels conformed; a package with failing kernels alone is not there."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in json.loads((ROOT / "fixtures" / "gallery" / "gallery.json").read_text("utf-8"))["rows"]:
        if row["verdict"] == "CONFORMS":
            found[row["contract"]] |= {f"{name} {version}" for name, version in row.get("versions", {}).items()}
    due = {contract: sorted(versions) for contract, versions in found.items() if versions}
    assert releases.conforming() == due and set(due) <= set(registered())


def test_what_is_named() -> None:
    text = "vLLM csrc/cache_kernels.cu @00eb0c8, since PR 51739; SGLang dequant.py (0.5.23); OCP formats 1.0"
    assert releases.stated([text]) == ["vLLM @00eb0c8", "vLLM PR 51739", "SGLang 0.5.23"]
    assert releases.stated(["csrc @00eb0c8", "vLLM fused_moe routers", "vLLM-like 1.2"]) == []


def test_another_project_of_the_same_file_is_left_out() -> None:
    texts = ("torchao mx_formats; DeepGEMM utils/math.py @54e2261",)
    assert releases.line("no such contract", "torchao to_mx", texts) == f"  releases: {releases.NONE}"
    assert releases.line("no such contract", "DeepGEMM cast", texts) == "  releases: DeepGEMM @54e2261"


def test_pages_have_the_line() -> None:
    line = releases_of(get("per_token_cast_to_fp4"))
    assert "DeepGEMM @54e2261, DeepGEMM @7f2a703" in line and "sgl-deep-gemm 0.1.4.post1 conformed" in line
    assert line in list(page(get("per_token_cast_to_fp4"), "quick"))
    silent = [name for name in registered() if releases.NONE in releases_of(get(name))]
    assert len(silent) <= len(list(registered())) // 2 and "cp_gather_cache" not in silent
