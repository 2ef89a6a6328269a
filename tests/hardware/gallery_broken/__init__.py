"""A gallery whose kernels are wrong on purpose, one fault each: a run must find and name all three.

The adapters are those of ``tests/hardware/gallery``, wrapped; what they call is in :mod:`._products`, so that a CPU
will do. ``fp8-oracle gallery run --folder tests/hardware/gallery_broken --device cpu --out DIR`` ends with 1.
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2])
if TESTS not in sys.path:  # for `hardware.gallery`, in the worker's process too
    sys.path.append(TESTS)
