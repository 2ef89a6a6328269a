"""Peers' references in torch and numpy, which wheels bring, are validated by default and found right; where one is
wrong, what fails is named. ``docs/findings.md`` has the table. They run with ``--full``, where the peer is installed:

    pip install --no-deps torchao transformer-engine nvidia-modelopt compressed-tensors   (ml_dtypes, gfloat: extra dev)
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

import oracle
from oracle.routines import cases, get
from tests.support import peer_references

WRONG = {
    "modelopt mxfp8_dequantize": "actual -inf, admissible [nan, nan]",
    "modelopt mxfp4_dequantize": "actual inf, admissible [nan, nan]",
    "compressed_tensors mxfp4_dequantize": "actual inf, admissible [nan, nan]",
}
"""What fails: an E8M0 byte of 255 is NaN (OCP Microscaling Formats 1.0, 5.4.1), and these raise two to 128."""
NO_NAN = ("modelopt", "compressed_tensors", "gfloat")  # whose quantisers document no rule for NaN and infinity
REFERENCES = {f"{one.name} {one.contract}": one for one in peer_references.subjects()}


@pytest.mark.repeats("test_every_wrong_one_is_a_reference")
@pytest.mark.parametrize("key", REFERENCES)
def test_a_reference_of_a_peer(key: str) -> None:
    one = REFERENCES[key]
    if importlib.util.find_spec(one.name) is None:
        pytest.skip(f"{one.name} is not installed; see the head of this file")
    refused = one.name in NO_NAN and one.contract.endswith(("_quantize", "_quant"))
    report = oracle.validate(
        f"tests.support.peer_references:NAMED.{one.name}.{one.contract}",
        one.contract,
        adapter="tests.support.peer_references:by_contract",
        numerics=one.numerics,
        exempt={"data of nan": "its pages document no rule for either"} if refused else {},
    )
    first = next((f.verdict.reason or f.verdict.summary for f in report.failures), "")
    assert report.conforms == (key not in WRONG), first
    assert report.conforms or WRONG[key] in first


def test_every_wrong_one_is_a_reference() -> None:
    """A key that no reference has would never be looked at."""
    assert set(WRONG) <= REFERENCES.keys() and {one.name for one in REFERENCES.values()} >= {"ml_dtypes", *NO_NAN}


def test_a_wrong_reference_fails() -> None:
    """The negative test: a cast that goes past the largest value, as ml_dtypes' own does without a clamp."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed; it comes with the extra dev")
    case = cases.parse("convert_fp8/bf16-e4m3/tensor/s=3,p=4,d=72/family=randn/seed=1")
    inputs, options = case.inputs(), case.call_options()
    x = (inputs["src"].float() * 100).clamp(-3e38, 3e38)
    bare = (x.numpy() / np.float32(options["scale"])).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    out = torch.from_numpy(bare).view(torch.float8_e4m3fn)
    verdict = get("convert_fp8").judge({**inputs, "src": x}, out, arch="cpu", **options)
    assert verdict.status.is_failure
