"""The recorded calls of ``torch._scaled_mm`` and how cuBLASLt cut K in each (``fixtures/splits``)."""

from __future__ import annotations

import base64
import itertools
from typing import Any, cast

from oracle.fixtures import files as fixtures
from tests.support.paths import FIXTURES


def calls(name: str) -> list[dict[str, Any]]:
    """Every recorded call; a row has those of one shape: numbers of schedules, and all digests as one base64 text."""
    record = fixtures.read_json(FIXTURES / "splits" / f"{name}.json", schema="fp8-oracle.splits/2")
    order, schedules, rows = (cast(Any, record[key]) for key in ("order", "schedules", "calls"))
    found = []
    for m, n, k, numbers, text in rows:
        digests = base64.b64decode(text)
        for i, values in enumerate(itertools.product(*order.values())):
            made = dict(zip(order, values, strict=True))
            sha256 = digests[32 * i : 32 * i + 32].hex()
            found.append({"m": m, "n": n, "k": k, **made, "schedule": schedules[numbers[i]], "sha256": sha256})
    return found
