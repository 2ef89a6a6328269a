"""Which releases a contract describes: those that its sources and recipes name, and those whose kernels conformed.

Named are a version, a commit (``@00eb0c8``) or a pull request behind the name of a project, in the source of the
contract, in what its file says of the sources of these projects, and in its recipes. ``releases.json`` has the versions
of packages whose kernels conformed under the contract on a GPU: it is written from the gallery, and a test compares
both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files

PROJECTS = (
    "vLLM",
    "SGLang",
    "sglang-kernel",
    "FlashInfer",
    "DeepGEMM",
    "sgl-deep-gemm",
    "TensorRT-LLM",
    "TransformerEngine",
    "torchao",
    "Model-Optimizer",
    "microxcaling",
    "FBGEMM",
    "LMDeploy",
    "DeepEP",
    "DeepSeek-V3",
    "NVIDIA/cutlass",
)
_PROJECT = re.compile(rf"\b({'|'.join(map(re.escape, PROJECTS))})(?![\w-])")
_RELEASE = re.compile(r"@[0-9a-f]{7,40}\b|\bPR \d+|(?<![\w.])\d+\.\d+(?:\.\w+)*(?![\w.]*\w)")
NONE = "none is stated"


def stated(texts: Iterable[str]) -> list[str]:
    """``PROJECT RELEASE`` for each release behind the name of a project in the ``texts``, each once."""
    results: dict[str, None] = {}
    for text in texts:
        parts = _PROJECT.split(text)
        for project, rest in zip(parts[1::2], parts[2::2], strict=True):
            results |= dict.fromkeys(f"{project} {release}" for release in _RELEASE.findall(rest.partition(";")[0]))
    return list(results)


@lru_cache(maxsize=1)
def conforming() -> Mapping[str, list[str]]:
    """``PACKAGE VERSION`` of the kernels that conformed, by contract."""
    table: dict[str, list[str]] = json.loads((files("oracle.cli") / "releases.json").read_text("utf-8"))
    return table


def line(contract: str, source: str, texts: Iterable[str]) -> str:
    """What a page says of the releases of a contract: its ``source``, and other ``texts`` about the same projects."""
    projects = set(_PROJECT.findall(source))
    named = [one for one in stated((source, *texts)) if not projects or one.partition(" ")[0] in projects]
    ran = conforming().get(contract, [])
    parts = [", ".join(named)] if named else []
    parts += [f"kernels of {', '.join(ran)} conformed on a GPU"] if ran else []
    return f"  releases: {'; '.join(parts) or NONE}"
