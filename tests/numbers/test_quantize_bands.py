"""Quantisers are judged some rows at a time: the same verdict whatever the bands are, and no float64 of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from oracle.numbers import quantize
from oracle.numbers.quantize import Prepared, Steps
from oracle.routines import cases, get, profiles
from oracle.verdict import heatmap
from oracle.verdict.compare import Status, Verdict

pytestmark = pytest.mark.turns(4)

# Every kind of block: groups and tokens of one row, tiles, columns, the whole tensor, a given scale.
CASES = {
    name: [c for c in profiles.cases(name, "quick") if c.family in ("randn", "nan")][:5]
    for name in ("per_token_group_quant_fp8", "per_block_cast_to_fp8", "per_channel_cast_to_fp8", "scaled_fp8_quant")
}
NAMED = [(name, str(case)) for name, found in CASES.items() for case in found]


def outputs(made: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The reference's output, with wrong codes, with scales a little off, and with scales far off."""
    wrong = made["q"].view(torch.uint8).clone()
    wrong.view(-1)[::37] ^= 1
    found = {"right": made, "codes": made | {"q": wrong.view(made["q"].dtype)}}
    for label, factor in (("near", 1 + 2.0**-22), ("far", 1.5)):
        scale = made["scale"].clone(memory_format=torch.preserve_format)
        found[label] = made | {"scale": scale.mul_(factor)}
    return found


def verdicts(text: str) -> dict[str, object]:
    case = cases.parse(text)
    inputs, options = case.inputs(), case.call_options()
    made = oracle.reference(case.contract, inputs, **options)
    assert isinstance(made, dict)
    found: dict[str, object] = {}
    for label, output in outputs(made).items():
        verdict = get(case.contract).judge(inputs, output, arch="sm90", numerics=None, **options)
        found[label] = verdict.to_json()
    found["bits"] = [made["q"].view(torch.uint8).tolist(), made["scale"].nan_to_num(-1).tolist()]
    found["identify"] = oracle.identify(case.contract, inputs, made, **options)  # type: ignore[arg-type]
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "text"), NAMED, ids=[text for _, text in NAMED])
def test_bands_change_nothing(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verdicts(text)
    monkeypatch.setattr(quantize, "BAND", 2500)
    monkeypatch.setattr(heatmap, "BAND", 3000)
    assert verdicts(text) == whole


def test_a_band_alone_has_another_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative test: without the whole tensor's amax every band gets a scale of its own."""
    monkeypatch.setattr(quantize, "BAND", 512)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    right = oracle.reference("scaled_fp8_quant", {"x": x})
    monkeypatch.setattr(Prepared, "steps", _of_the_band(Prepared.steps))
    wrong = oracle.reference("scaled_fp8_quant", {"x": x})
    assert isinstance(right, dict) and isinstance(wrong, dict)
    assert not torch.equal(right["q"].view(torch.uint8), wrong["q"].view(torch.uint8))


class Largest(TorchDispatchMode):
    """The most bytes that an operation gave to a tensor of elements wider than the input's, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and x.element_size() > 2 and not x._is_view():
                self.found = max(self.found, x.numel() * x.element_size())
        return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("label", ["right", "codes", "near", "far"])
@pytest.mark.parametrize("options", [{}, {"use_per_token_if_dynamic": True}], ids=["tensor", "token"])
def test_no_temporary_of_the_whole(label: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """64 x 4096 elements in bands of 2^14: 128 KiB for float64, where the whole would take 2 MiB."""
    monkeypatch.setattr(quantize, "BAND", 1 << 14)
    monkeypatch.setattr(heatmap, "BAND", 1 << 14)
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    made = oracle.reference("scaled_fp8_quant", {"x": x}, **options)
    assert isinstance(made, dict)
    output = outputs(made)[label]
    with Largest() as seen:
        verdict = judged(x, output, options)
    assert verdict.status is (Status.FAILED if label in ("codes", "far") else verdict.status)
    assert 1 << 16 < seen.found <= 1 << 18
    monkeypatch.setattr(quantize, "BAND", 1 << 30)
    with Largest() as seen:
        judged(x, output, options)
    assert seen.found >= x.numel() * 4


def judged(x: Tensor, output: dict[str, Tensor], options: dict[str, bool]) -> Verdict:
    """Without the diagnosis that :func:`oracle.judge` adds to a small failure."""
    return get("scaled_fp8_quant").judge({"x": x}, output, arch="sm90", numerics=None, **options)


def _of_the_band(steps: Any) -> Any:
    def alone(self: Prepared, recipe: Any) -> Steps:
        if self._whole is not None:
            self._whole, self._amax, self._steps = None, {}, {}
        return steps(self, recipe)  # type: ignore[no-any-return]

    return alone
