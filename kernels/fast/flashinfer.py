"""The runner behind FlashInfer's SM90 block-scaled product, without the public function's checks.

Releases    ``flashinfer-python`` 0.6.18 and 0.6.18.post1.
Checked     The public function of both was read: it checks shapes and dtypes, which the layer does itself, gives the
            process's one runner a workspace and calls it. So was the runner: for E4M3 operands it asks that there be a
            workspace and never touches it (csrc/fp8_blockscale_gemm_sm90_binding.cu, ``runGemm``), so that one is
            given once, of any size. On the device every call of ``verify`` gives the bits of the public function; tests
            compare both by their operands. Its log and trace see the public function only: where they are on, it is
            called.
Public way  18 us a call more (``tests/hardware/measure.py``, family ``fast``, on an H200 machine).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

RELEASES = ("0.6.18", "0.6.18.post1")


Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""``(a, b, out, a_scale, b_scale)``, the operands E4M3."""
_workspace = torch.empty(256, dtype=torch.uint8, device="cpu")


def run(package: ModuleType, gemm_base: Callable[[], ModuleType]) -> Run | None:
    """The runner's call in a known release, else None; ``gemm_base`` imports the module that holds it."""
    if getattr(package, "__version__", None) not in RELEASES:
        return None
    runner = gemm_base().get_fp8_blockscale_gemm_runner_sm90()
    runner.configure_workspace(_workspace)
    run_gemm: Run = runner.run_gemm
    return run_gemm
