"""Kernels of other projects, a file each (:mod:`oracle.harness.gallery`): ``fp8-oracle gallery run --out DIR``."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2])
if TESTS not in sys.path:  # for `hardware.NAME`, in the worker's process too
    sys.path.append(TESTS)
