"""Importing the layer imports no GPU library."""

import json
import subprocess
import sys

import pytest

LIBRARIES = ("deep_gemm", "flashinfer", "vllm", "triton", "sgl_kernel", "oracle")
SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import kernels, kernels.plan, kernels.subjects, kernels.moe_layer
{extra}
print(json.dumps(sorted({{name.split(".")[0] for name in set(sys.modules) - before}})))
"""


def added(extra: str = "") -> set[str]:
    run = [sys.executable, "-c", SCRIPT.format(extra=extra)]
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "use",
    ["", "kernels.plan.markdown_table()", "kernels.subjects.subjects()", "kernels.platform.current_machine()"],
    ids=["import", "table", "subjects", "detect"],
)
def test_no_gpu_library_is_imported(use: str) -> None:
    assert not added(use) & set(LIBRARIES)


def test_the_check_sees_an_import() -> None:
    """Sabotaged twin: a library that is imported is found."""
    assert "json" not in LIBRARIES
    assert "wave" in added("import wave")
