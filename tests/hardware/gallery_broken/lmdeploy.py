"""The last block of K lost."""

from __future__ import annotations

from collections.abc import Callable

from hardware.gallery._products import Inputs, Options
from hardware.gallery.lmdeploy import gluon
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._products import CASES


def short(kernel: Callable[..., None], inputs: Inputs, options: Options) -> Tensor:
    k = inputs["a"].shape[1] - 128
    cut = {name: inputs[name][:, :k].contiguous() for name in "ab"}
    scales = {name: inputs[name][:, : k // 128].contiguous() for name in ("a_scale", "b_scale")}
    return gluon(kernel, {**cut, **scales}, options)


PROJECT = Project(
    "lmdeploy",
    ("torch",),
    "in this repository",
    (Kernel("fp8_gemm_nt", "gallery_broken._products:into", short, "K tail", case=CASES),),
    ("cpu", "cuda"),
)
