"""Modules that numba or triton compiles, where these are not installed."""

from __future__ import annotations

import sys

import pytest
import torch

from oracle import loading
from oracle.errors import NumericsError
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct

ENGINE = "oracle.tensorcore.engine_cpu"


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for numba, and the definition computes; another missing module is no reason for that."""
    monkeypatch.delitem(sys.modules, ENGINE, raising=False)
    monkeypatch.delitem(sys.modules, "oracle.tensorcore.cpu_jit", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert loading.compiled(ENGINE) is None
    codes, one = torch.ones(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 1)
    product, schedule = ScaledProduct(codes, codes, one, one, 64, 1), get("sm90.promote128")
    assert predict_product(product, schedule, out_dtype=torch.float32).tolist() == [[64.0, 64.0]] * 2
    with pytest.raises(NumericsError, match="needs numba; use engine='torch'"):
        predict_product(product, schedule, out_dtype=torch.float32, engine="cpu")
    with pytest.raises(ModuleNotFoundError, match="engine_of_nobody"):
        loading.compiled("oracle.tensorcore.engine_of_nobody")
