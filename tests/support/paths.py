"""Where the tests find the repository, its fixtures, and the recorded data of others that lie beside it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
SHARED = Path(os.environ.get("FP8_ORACLE_SHARED", str(ROOT.parent / "shared")))
"""The folder that holds ``captures/`` and ``vectors/``; it is not part of the repository."""
