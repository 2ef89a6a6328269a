"""The runner behind FlashInfer's SM90 block-scaled product, without the public function's checks.

Releases    ``flashinfer-python`` 0.6.18 and 0.6.18.post1.
Checked     The public function of both was read: it checks shapes and dtypes, which the layer does itself, asks the
            process's one runner for a workspace and calls it. On the device every call of ``verify`` gives the bits of
            the public function; tests compare both by their operands. Its log and trace see the public function only:
            where they are on, it is called.
Public way  21 us a call more (``tests/hardware/measure.py``, family ``fast``, on an H200 machine).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

RELEASES = ("0.6.18", "0.6.18.post1")


class Runner(NamedTuple):
    """The runner's three calls, in the order in which they are made."""

    workspace: Callable[[int, int, int], int]
    configure: Callable[[Tensor], None]
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]


def runner(package: ModuleType, gemm_base: Callable[[], ModuleType]) -> Runner | None:
    """The runner of a known release, else None; ``gemm_base`` imports the module that holds it."""
    if getattr(package, "__version__", None) not in RELEASES:
        return None
    found = gemm_base().get_fp8_blockscale_gemm_runner_sm90()
    return Runner(found.get_workspace_size, found.configure_workspace, found.run_gemm)
