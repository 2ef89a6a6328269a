"""What a kernel gives of pieces of 128 products alone: all at once where an engine can, with the bits of one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle.routines import mutants
from oracle.routines.mutants import Sum
from oracle.tensorcore.predict import predict_blocks
from oracle.tensorcore.schedules import Schedule, get
from tests.support.products import block_scaled


def schedule_of(name: str | None) -> Schedule | None:
    return None if name is None else get(name)


@pytest.mark.parametrize("name", ["sm90.promote128", "sm90.mma_sync.promote128", "sm90.chain", None])
def test_together_and_one_by_one(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    product, schedule = block_scaled("randn", 5, 70, 1100, seed=1), schedule_of(name)
    bias = replace(product, bias=torch.ones(70))
    pieces = list(Sum(product, schedule).pieces())
    assert len(pieces) == 9
    monkeypatch.setattr(mutants, "RESULT", 0)  # of larger ones none are kept
    for p, which in ((product, slice(None)), (bias, slice(None)), (product, slice(-1, None)), (product, slice(2, 4))):
        apart = list(Sum(p, schedule).pieces(which))
        assert len(apart) == len(pieces[which]) and all(map(torch.equal, apart, pieces[which]))
    moved = replace(product, a_scale=product.a_scale.roll(1, dims=1))
    assert not any(map(torch.equal, Sum(moved, schedule).pieces(), pieces))


def test_no_engine_gives_them_together() -> None:
    product, schedule = block_scaled("randn", 5, 70, 1100, seed=1), get("sm90.promote128")
    found = predict_blocks(product, schedule)
    assert found is not None and found.shape == (9, 5, 70)
    one = replace(product, a_scale=product.a_scale[:, :1], b_scale=product.b_scale[:, :1], block=1100)
    for p in (replace(product, bias=torch.ones(70)), one):
        assert predict_blocks(p, schedule) is None
