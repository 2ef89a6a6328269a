"""When a kernel of the CPU is worth its compilation, which takes seconds where it is neither loaded nor on disk.

A kernel and its definition in plain torch give the same bits. The definition computes until it has computed as many
products as it would in the time that the compilation takes (:data:`LIMITS`); the next call compiles the kernel. Both
together cost at most twice what the cheaper of them costs. The numbers are kept between processes
(:mod:`oracle.cache`).

What is on disk is looked for by the names that numba gives its files, without importing numba: one that is out of date
is compiled anew, as always. Not covered: kernels of attention and of a quantiser's figures, which are compiled at once.
Source: measured on one core. Compilation takes 2.6 s for ``truncating``, 3.1 s for ``residue``, 2.1 s for
``any_order``, 0.9 s for ``exact_value``; their definitions take 0.75 s, 1.6 s, less than 1.6 s and 0.013 s at
64x256x2048. One element of K = 2,048 takes a definition about as long as 512 do.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from oracle.cache import place, read, write

LIMITS = {
    **dict.fromkeys(("truncating", "wide"), 1 << 27),
    **dict.fromkeys(("residue", "any_order", "split"), 1 << 26),
    "exact_value": 1 << 31,
}
"""Products that a definition computes, of each kernel, before the kernel is compiled."""
EACH = 1 << 9  # elements that a definition computes in the time of one: it calls torch as often for either
PACKAGE = Path(os.path.abspath(__file__)).parents[1]
FILES = {
    "truncating": ("tensorcore/cpu_truncation.py", "tensorcore/engine_cpu.py"),
    "wide": ("tensorcore/engine_cpu.py",),
    "residue": ("bounds/cpu_kernels.py",),
    "any_order": ("bounds/cpu_kernels.py",),
    "split": ("bounds/cpu_kernels.py",),
    "exact_value": ("bounds/cpu_kernels.py",),
}
_at_once = [False]


def waits(kernel: str, m: int, n: int, k: int) -> bool:
    """Whether the definition computes this product ``[m, k] [k, n]`` instead of the ``kernel``, which then stays
    uncompiled; the product counts."""
    if _at_once[0] or on_disk(kernel):
        return False
    before, products = computed(), max(m * n, EACH) * k
    if before[kernel] + products > LIMITS[kernel]:
        before[kernel] = LIMITS[kernel]  # from now on
        return False
    before[kernel] += products
    return True


@cache
def computed() -> Counter[str]:
    """The products of each kernel that definitions have computed instead, here and in earlier processes."""
    path, most = place("cold", "products"), len(LIMITS)
    kept = [line.partition(" ") for line in (read(path) or "").splitlines()]
    counts = Counter({kernel: int(count) for kernel, _, count in kept if kernel in LIMITS and count.isdigit()})
    atexit.register(lambda: write(path, "".join(f"{kernel} {count}\n" for kernel, count in counts.items()), most))
    return counts


@contextmanager
def compiled_at_once() -> Iterator[None]:
    """Within it every kernel is compiled at its first call."""
    before, _at_once[0] = _at_once[0], True
    try:
        yield
    finally:
        _at_once[0] = before


@cache
def on_disk(kernel: str) -> bool:
    """Whether a folder in which numba keeps kernels has this one, of any version of its source."""
    version = "".join(map(str, sys.version_info[:2]))
    for file in FILES[kernel]:
        source = PACKAGE / file
        names = (kernel, "narrow") if kernel == "truncating" else (kernel,)
        patterns = [f"{source.stem}.{name}-*.py{version}*.nbi" for name in names]
        if any(any(folder.glob(pattern)) for folder in _folders(source) for pattern in patterns):
            return True
    return False


def _folders(source: Path) -> Iterator[Path]:
    """Where numba may keep the kernels of a source: what NUMBA_CACHE_DIR says, beside it, the user's cache."""
    own = f"{source.parent.name}_{hashlib.sha1(str(source.parent).encode(), usedforsecurity=False).hexdigest()}"
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen) / own
        return
    yield source.parent / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba" / own
