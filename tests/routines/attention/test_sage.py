"""SageAttention's product: the truth by another path, its interval, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds.attention import Scores, codes_bound
from oracle.errors import InputError, ShapeError
from oracle.routines import cases, get
from oracle.routines.attention.sage import slots
from oracle.routines.base import Call
from oracle.tensorcore.attention import pipeline
from oracle.verdict.compare import Status

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"
CASE = f"{NAME}/i8xe4m3-bf16/warp/b=2,s=20,n=150,h=4,g=2,d=64"
SWAPPED = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def directly(inputs: dict[str, Tensor], causal: bool) -> Tensor:
    """Softmax and both products of dequantised operands, float64."""
    q, k, v = (inputs[name].double() for name in ("query", "key", "value"))
    (_, queries, heads, depth), (_, keys, of_keys, _) = q.shape, k.shape
    of_q = inputs["query_scale"].double().repeat_interleave(16, dim=2)[:, :, :queries]
    of_k = inputs["key_scale"].double().repeat_interleave(128, dim=2)[:, :, :keys]
    ordered = torch.zeros_like(v)
    ordered[..., [at - at % 16 + SWAPPED[at % 16] for at in range(v.shape[3])]] = v
    values = ordered[..., :keys].permute(0, 2, 3, 1) * inputs["value_scale"].double()[:, :, None]
    q, k = q.transpose(1, 2) * of_q[..., None], k.transpose(1, 2) * of_k[..., None]
    k, values = (x.repeat_interleave(heads // of_keys, dim=1) for x in (k, values))
    scores = q @ k.mT * depth**-0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf)
    return (torch.softmax(scores, dim=3) @ values).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_truth(causal: bool) -> None:
    case = cases.parse(f"{CASE}{'/causal=1' if causal else ''}/family=randn/seed=3")
    inputs, options = case.inputs(), case.call_options()
    out = oracle.reference(NAME, inputs, **options)["out"]
    assert torch.allclose(out, directly(inputs, causal), rtol=1e-12, atol=1e-12)


def test_slots_are_a_permutation_of_every_16() -> None:
    at = slots(48, torch.device("cpu"))
    assert at[:16].tolist() == [SWAPPED.index(key) for key in range(16)]
    assert torch.equal(at.sort().values, torch.arange(48)) and torch.equal(at // 16, torch.arange(48) // 16)


def test_a_rounded_p_passes_by_its_codes_and_without_a_lift_fails() -> None:
    case = cases.parse(f"{CASE}/family=hot/seed=1")
    inputs, options = case.inputs(), case.call_options()
    out = oracle.predict(NAME, inputs, numerics="sm90.sage", **options)
    verdict = oracle.judge(NAME, inputs, out, arch="sm90", explain="off", **options)
    assert verdict.status is Status.PASSED and str(verdict.basis).startswith("codes of P as in sm90.sage from exact")
    assert oracle.judge(NAME, inputs, out, arch="cpu", explain="off", **options).status is Status.FAILED
    swapped = inputs | {"value": inputs["value"].view(torch.uint8).roll(1, dims=3).view(torch.float8_e4m3fn)}
    assert oracle.judge(NAME, swapped, out, arch="sm90", explain="off", **options).status is Status.FAILED


@pytest.mark.parametrize(
    ("name", "error"), [("query_scale", ShapeError), ("key_scale", ShapeError), ("value", InputError)]
)
def test_refused(name: str, error: type[Exception]) -> None:
    case = cases.parse(f"{CASE}/family=randn/seed=1")
    inputs = case.inputs()
    if name == "value":
        inputs[name].view(torch.uint8)[0, 0, 0, 0] = 0x7F
    else:
        inputs[name] = inputs[name][:, :, :-1].contiguous()
    with pytest.raises(error, match=name):
        oracle.reference(NAME, inputs, **case.call_options())


def test_the_pipeline_is_identified() -> None:
    """From the first columns of V, each with its own scale; the scales of the next columns have other bits."""
    case = cases.parse(f"{CASE}/family=hot/seed=1")
    inputs, options = case.inputs(), case.call_options()
    out = oracle.predict(NAME, inputs, numerics="sm90.sage", **options)
    best = oracle.identify(NAME, inputs, out, **options)[0]
    assert (best.schedule, best.equal) == ("sm90.sage", 1.0)
    moved = inputs | {"value_scale": inputs["value_scale"].roll(1, dims=2)}
    assert oracle.identify(NAME, moved, out, **options)[0].equal < 1.0


def test_a_bound_of_one_column_has_its_scale() -> None:
    """It holds that of the column among all, and no more of another's scale."""
    case = cases.parse(f"{CASE}/family=randn/seed=1")
    contract = get(NAME)
    place = next(iter(contract.places(case.inputs(), Call(contract, case.inputs(), case.call_options()).resolved)))
    problem, known = place.problem, Scores.of(place.problem, torch.tensor([11]))
    whole, alone = (
        codes_bound(problem, pipeline("sm90.sage"), predicted=False, known=known, column=one) for one in (None, 7)
    )
    low, high = whole.low[:, 7:8], whole.high[:, 7:8]
    assert alone.low.shape == alone.high.shape == (1, 1)
    assert bool((alone.low <= low).all() and (alone.high >= high).all())
    assert bool((alone.high - alone.low <= (high - low) * (1 + 2.0**-20)).all())
