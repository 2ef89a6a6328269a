"""Peers' references in torch and numpy, which wheels bring, are validated by default and found right; where one is
wrong, what fails is named. ``docs/findings.md`` has the table. They run with ``--full``, where the peer is installed:

    pip install --no-deps torchao transformer-engine nvidia-modelopt compressed-tensors   (ml_dtypes, gfloat: extra dev)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from oracle.harness import gallery
from oracle.routines import cases, get

FOLDER = Path(__file__).resolve().parents[1] / "hardware" / "gallery"
PEERS = ("compressed_tensors", "gfloat", "ml_dtypes", "modelopt")
WRONG = {
    "modelopt.mxfp8_dequantize/mxfp8_dequantize": "actual -inf, admissible [nan, nan]",
    "modelopt.mxfp4_dequantize/mxfp4_dequantize": "actual inf, admissible [nan, nan]",
    "compressed_tensors.mxfp4_dequantize/mxfp4_dequantize": "actual inf, admissible [nan, nan]",
}
"""What fails: an E8M0 byte of 255 is NaN (OCP Microscaling Formats 1.0, 5.4.1), and these raise two to 128."""


def keys() -> list[str]:
    """Every row of the peers that needs no GPU."""
    return [gallery.key_of(*pair) for pair in gallery.chosen(gallery.load(FOLDER), PEERS)]


@pytest.mark.repeats("test_every_row_is_one_of_the_gallery")
@pytest.mark.parametrize("key", keys())
def test_a_reference_of_a_peer(key: str) -> None:
    ((row, _),) = gallery.run(gallery.Asked(FOLDER, device="cpu"), [key])
    if row.verdict == "UNSUPPORTED":
        pytest.skip(row.why)  # names the distribution that is not installed
    assert (row.verdict == "FAILED") == (key in WRONG), row.why
    assert row.verdict == "CONFORMS" or WRONG[key] in row.why


def test_every_row_is_one_of_the_gallery() -> None:
    """A key that no row has would never be looked at."""
    assert set(WRONG) <= set(keys()) and all(any(key.startswith(peer) for key in keys()) for peer in PEERS)


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
