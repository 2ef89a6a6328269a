"""Importing the layer imports no GPU library, and no verb imports a backend."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kernels
from kernels import moe_pipelines, mx_moe, routers
from kernels.plan import MODULES
from tests.support.docstrings import module_of

PACKAGE = Path(kernels.__file__).parent

LIBRARIES = ("deep_gemm", "flashinfer", "vllm", "triton", "sgl_kernel", "oracle")
SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import kernels, kernels.plan, kernels.subjects, kernels.moe_layer, kernels.nn
{extra}
print(json.dumps(sorted({{name.split(".")[0] for name in set(sys.modules) - before}})))
"""


def added(extra: str = "") -> set[str]:
    run = [sys.executable, "-c", SCRIPT.format(extra=extra)]
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


USES = "kernels.plan.markdown_table(); kernels.subjects.subjects(); kernels.platform.current_machine()"


@pytest.mark.turns(4)
def test_no_gpu_library_is_imported() -> None:
    """Nor when the layer is asked what it has; the last import is the negative test: a library is seen."""
    found = added(f"{USES}; import wave")
    assert "wave" in found and not found & set(LIBRARIES)


def backends_of(source: str, package: str) -> set[str]:
    """Backends that a module imports: files of ``kernels/backends`` that end with a declaration."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = module_of(node, package)
            if module.startswith("kernels.backends"):
                named |= {module.rpartition(".")[2], *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
            named |= {path.rpartition(".")[2] for path in paths if path.startswith("kernels.backends.")}
    return named & set(MODULES.values())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_no_module_imports_a_backend(path: Path) -> None:
    """They are reached through a plan alone, by name."""
    package = ".".join(["kernels", *path.relative_to(PACKAGE).parent.parts])
    assert backends_of(path.read_text(), package) == set()


def test_an_import_of_a_backend_is_seen() -> None:
    """The twin."""
    for line, package in (
        ("from .backends import eager", "kernels"),
        ("from ..backends import eager", "kernels.nn"),
        ("from . import eager", "kernels.backends"),
        ("import kernels.backends.cutlass as c", "kernels"),
        ("def f():\n    from .backends.deep_gemm import library", "kernels"),
    ):
        assert len(backends_of(line, package)) == 1


ROUTINES = (
    {
        "moe_fp8": ("moe_block_scaled", "moe_per_token"),
        "moe_routing": ("route_deepseek_v3", "route_llama4", "route_softmax"),
        "m_grouped_fp8_fp4_gemm_nt_psum": ("m_grouped_fp8_fp4_gemm_nt_contiguous",),
        "output padding": ("Fp8LinearOp",),
        "scaled_fp4_quant": ("nvfp4_quantize",),
        "BatchPrefillWithRaggedKVCacheWrapper": ("batch_prefill_with_ragged_kv_cache",),
        "BatchPrefillWithPagedKVCacheWrapper": ("batch_prefill_with_paged_kv_cache",),
    }
    | dict.fromkeys(moe_pipelines.PIPELINES, ("moe_experts",))
    | dict.fromkeys(mx_moe.LAYERS, ("moe_block_experts",))
    | dict.fromkeys(routers.SERVED_HERE, ("route_experts",))
    | {f"rms_norm_{kind}_quantize": ("rms_norm_block_scaled_quant",) for kind in ("mxfp8", "mxfp4", "nvfp4")}
    | {f"silu_and_mul_{kind}_quantize": ("silu_and_mul_block_scaled_quant",) for kind in ("mxfp8", "mxfp4")}
)
"""Contracts of several routines, or of a part of one."""


def missing(page: str, package: ModuleType) -> list[str]:
    """Routines that the table of coverage has as exposed, and that the package does not export."""
    exposed = re.findall(r"^\| `([^`]+)` \| yes \|", page, re.MULTILINE)
    assert len(exposed) > 60
    wanted = (name for routine in exposed for name in ROUTINES.get(routine, (routine,)))
    return [name for name in wanted if name not in package.__all__ or not callable(getattr(package, name, None))]


def test_what_the_table_has_is_exported(root: Path) -> None:
    page = (root / "docs" / "reference" / "coverage.md").read_text()
    assert not missing(page, kernels)
    assert missing(page.replace("| `silu_and_mul` |", "| `gelu_and_mul` |"), kernels) == ["gelu_and_mul"]
