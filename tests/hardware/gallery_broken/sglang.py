"""The scale of the neighbouring block of K."""

from __future__ import annotations

from collections.abc import Callable

from hardware.gallery._products import Inputs, Options
from hardware.gallery.sglang import plain
from torch import Tensor

from oracle.harness.gallery import Kernel, Project

from ._products import CASES


def neighbour(kernel: Callable[..., Tensor], inputs: Inputs, options: Options) -> Tensor:
    before = inputs["a_scale"].roll(1, 1)
    before[:, 0] = inputs["a_scale"][:, 0]
    return plain(kernel, {**inputs, "a_scale": before}, options)


PROJECT = Project(
    "sglang",
    ("torch",),
    "in this repository",
    (Kernel("fp8_gemm_nt", "gallery_broken._products:product", neighbour, "neighbouring scale", case=CASES),),
    ("cpu", "cuda"),
)
