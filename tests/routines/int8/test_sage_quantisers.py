"""SageAttention's quantisers: codes and scales by another path, what either division admits, what is refused."""

from __future__ import annotations

import pytest
import torch

import oracle
from oracle.errors import InputError, OptionError
from oracle.routines import cases
from oracle.verdict.compare import Status

pytestmark = pytest.mark.usefixtures("one_thread", "unexplained")

WARP = "quant_per_warp_int8_cuda/bf16/-/b=2,s=150,h=3,d=64/family=randn/seed=3"
MEAN = "quant_per_block_int8_fuse_sub_mean_cuda/bf16/-/b=2,s=150,h=3,d=64/family=randn/seed=3"
CHANNEL = "per_channel_fp8/bf16/-/b=2,s=150,g=3,d=64/family=randn/seed=3"


def test_scales_of_rows_that_do_not_exist() -> None:
    """A block of 64 queries has four scales, also where it has 22 queries; the others are of amax 1e-7."""
    case = cases.parse(WARP)
    out = oracle.reference(case.contract, case.inputs(), **case.call_options())
    assert out["scale"].shape == (2, 3, 12)
    assert bool((out["scale"][:, :, 10:] == torch.tensor(1e-7) / 127).all())
    assert bool((out["scale"][:, :, :10] > 1e-3).all())


def test_a_scale_by_a_rounded_inverse_is_right() -> None:
    """``amax / 127`` and ``amax fl(1 / 127)``, and nothing beside them."""
    case = cases.parse(MEAN)
    inputs, options = case.inputs(), case.call_options()
    out = oracle.reference(case.contract, inputs, **options)
    for times, due in ((127 * (torch.tensor(1.0) / 127), Status.PASSED), (1 + 2.0**-21, Status.FAILED)):
        verdict = oracle.judge(case.contract, inputs, out | {"scale": out["scale"] * times}, **options)
        assert verdict.status is due


def test_dequantised_keys_are_the_smoothed_ones() -> None:
    case = cases.parse(MEAN)
    inputs = case.inputs()
    out = oracle.reference(case.contract, inputs, **case.call_options())
    y = inputs["x"].double() - inputs["mean"].double()[:, None]
    scale = out["scale"].double().repeat_interleave(64, dim=2)[:, :, :150].transpose(1, 2)[..., None]
    assert bool(((out["q"].double() * scale - y).abs() <= 0.51 * scale).all())


def test_values_are_those_that_the_product_reads() -> None:
    """The product's contract reads them back in their order, and a channel of zeros has no NaN."""
    case = cases.parse(f"{CHANNEL.partition('/family')[0]}/edge=zero/family=randn/seed=3")
    v = case.inputs()["v"]
    out = oracle.reference(case.contract, {"v": v}, **case.call_options())
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    codes = out["v_fp8"].double().unflatten(3, (-1, 16))
    back = torch.zeros_like(codes)
    back[..., order] = codes
    values = back.flatten(3)[..., :150].permute(0, 3, 2, 1) * out["v_scale"].double()[:, None]
    assert torch.allclose(values, v.double(), rtol=2.0**-4, atol=1e-3)
    assert bool((codes.flatten(3)[:, 0] == 0).all()) and bool((out["v_fp8"][..., 160:].double() == 0).all())


@pytest.mark.parametrize(
    ("text", "change", "options", "error"),
    [
        (MEAN, {"mean": torch.float16}, {}, InputError),
        (WARP, {}, {"warp_block_size": 8}, OptionError),
        (CHANNEL, {}, {"scale_max": 500.0}, OptionError),
        ("quant_per_block_int8_cuda/bf16/-/b=1,s=2,h=2,d=8/family=randn/seed=7", {}, {"sm_scale": 0.0}, OptionError),
    ],
)
def test_refused(text: str, change: dict[str, torch.dtype], options: dict[str, object], error: type[Exception]) -> None:
    case = cases.parse(text)
    inputs = {name: x.to(change.get(name, x.dtype)) for name, x in case.inputs().items()}
    with pytest.raises(error):
        oracle.reference(case.contract, inputs, **{**case.call_options(), **options})
