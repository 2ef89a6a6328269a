"""DeepGEMM's compiled dense product, without the public function that unpacks two pairs in Python.

Releases    ``sgl-deep-gemm`` 0.1.4.post1.
Checked     The public function of the release was read: it passes its arguments on in this order, with None and an
            empty text for those that the layer leaves out. On the device every call of ``verify`` gives the bits of the
            public function; a test compares both by their arguments.
Public way  0.9 us a call more (``tests/hardware/measure.py``, family ``fast``, on an H200 machine).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

RELEASES = ("0.1.4.post1",)


def compiled_gemm(module: ModuleType) -> Callable[..., None] | None:
    """``(a, a_scale, b, b_scale, out, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)`` or None."""
    if module.__name__ != "deep_gemm" or getattr(module, "__version__", None) not in RELEASES:
        return None
    function: Callable[..., None] = module._C.fp8_fp4_gemm_nt
    return function
