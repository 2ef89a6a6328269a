"""Where a layout computes values any NaN is NaN; copies keep their bits."""

from __future__ import annotations

import pytest
import torch

from oracle.verdict.compare import Status
from oracle.verdict.sets import judge_bits

RIGHT = torch.tensor([0x7F, 0x38, 0x80], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("place", "byte", "computed"), [(0, 0xFF, True), (0, 0xFF, False), (0, 0x7E, True), (2, 0, True)]
)
def test_nan(place: int, byte: int, computed: bool) -> None:
    out = RIGHT.clone()
    out[place] = byte
    as_e4m3 = (x.view(torch.float8_e4m3fn) for x in (out, RIGHT))
    failed = judge_bits(*as_e4m3, output="out", computed=computed).status is Status.FAILED
    assert failed is not (computed and byte == 0xFF)
