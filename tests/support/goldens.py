"""Each golden computed again, as a test of its own.

``fixtures check`` computes all of them in one command, and CI runs that; pytest collects this file only where it is
named. The mutation run names it, so that a mutant is tried on the goldens whose computation calls it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracle.fixtures import golden

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / golden.FOLDER


@pytest.mark.whole("each is another case")
@pytest.mark.parametrize("entry", golden.load(FOLDER)["cases"], ids=lambda entry: entry["id"])
def test_regenerated(entry: dict[str, Any]) -> None:
    """The same bits, and the same edges of every interval."""
    golden.check_case(FOLDER, entry)
