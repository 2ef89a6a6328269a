"""The loss of a quantisation: the figures by a plain definition, and that no verdict depends on them."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from reports import every_status, read_outcome
from torch import Tensor

import oracle
from oracle.errors import InputError, OptionError
from oracle.numbers.formats import E2M1, E4M3FN, Format, decode
from oracle.report import files, html
from oracle.report.outcome import LOSS, Outcome, Report, losses
from oracle.routines import get, registered
from oracle.routines.quantisers import verdict as quantised
from oracle.verdict import loss
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.loss import Loss, Tally

INF = math.inf


def db(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise)


def plainly(x: Tensor, value: Tensor, scale: Tensor, fmt: Format) -> tuple[float, ...]:
    """The four figures, element by element."""
    signal = noise = relative = 0.0
    zeros = saturated = count = 0
    beyond = fmt.max_finite + 2.0 ** (fmt.emax - fmt.fraction_bits) / 2
    for a, v, s in zip(*(t.flatten().tolist() for t in (x, value, scale)), strict=True):
        if not math.isfinite(a):
            continue
        y, count = v * s, count + 1
        signal, noise = signal + a * a, noise + (y - a) ** 2
        zeros += a != 0 and y == 0
        saturated += abs(v) == fmt.max_finite and abs(a) > beyond * s
        if a and y:
            relative = max(relative, abs(y - a) / abs(a))
    ratio = INF if noise == 0 else -INF if not math.isfinite(noise) else db(signal, noise)
    return ratio, relative if math.isfinite(noise) else INF, saturated / count, zeros / count


def drawn(fmt: Format, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values of many sizes under scales that saturate some and lose others; codes of the format at random half the
    time."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.arange(1 << fmt.bits)
    grid = decode(codes, fmt)
    grid = grid[torch.isfinite(grid)]
    x = torch.randn(8, 64, generator=g, dtype=torch.float64) * 2.0 ** torch.randint(-12, 12, (8, 64), generator=g)
    scale = 2.0 ** torch.randint(-4, 3, (8, 1), generator=g).double().expand(8, 64)
    near = grid[(x[..., None] / scale[..., None] - grid).abs().argmin(-1)]
    other = grid[torch.randint(0, len(grid), (8, 64), generator=g)]
    return x, torch.where(torch.rand(8, 64, generator=g) < 0.5, near, other), scale


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1], ids=str)
@pytest.mark.parametrize("odd", ["", "scale 0", "x nan", "x inf", "x 0"])
def test_the_figures_are_those_of_the_definition(fmt: Format, odd: str) -> None:
    x, value, scale = drawn(fmt, 3)
    if odd == "scale 0":
        scale = torch.cat([torch.zeros(1, 64, dtype=torch.float64), scale[1:]])
    elif odd:
        x[0, :9] = {"x nan": math.nan, "x inf": INF, "x 0": 0.0}[odd]
    tally = Tally(fmt)
    tally.add(x[:5], value[:5], scale[:5])
    tally.add(x[5:], value[5:], scale[5:])
    found = tally.loss()
    assert found is not None
    figures = (found.sqnr, found.relative, found.saturated, found.zeros)
    assert figures == pytest.approx(plainly(x, value, scale, fmt), rel=1e-9, abs=6e-4)
    assert found.saturated > 0 and found.zeros > 0


@pytest.mark.turns(4)
@pytest.mark.parametrize("fmt", [E4M3FN, E2M1], ids=str)
def test_the_compiled_pass_gives_the_same(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at a time, in groups of 16 and 32, under scales that are no powers of two; with a NaN it adds nothing."""
    x, value, scale = drawn(fmt, 5)
    values = decode(torch.arange(1 << fmt.bits), fmt)
    codes = (value[..., None] == torch.nan_to_num(values, nan=1e9)).to(torch.uint8).argmax(-1).to(torch.uint8)
    plain, compiled = Tally(fmt), Tally(fmt)
    assert not compiled.add_rows(x.float(), codes, scale[:, :1], values)  # so few elements are not worth it
    monkeypatch.setattr(loss, "COMPILED", 1)
    for rows, width in ((slice(0, 5), 16), (slice(5, 8), 32)):
        part = x[rows].float()
        odd = (scale[rows, ::width] * 1.1).float().double()
        plain.add(part.double(), values[codes[rows].long()], odd.repeat_interleave(width, dim=1))
        assert compiled.add_rows(part, codes[rows], odd, values)
    assert vars(compiled.loss()) == pytest.approx(vars(plain.loss()), rel=1e-12, abs=1e-3)
    assert compiled.ulps == pytest.approx(plain.ulps, rel=1e-12) and compiled.zeros and compiled.saturated
    before = dict(vars(compiled))
    for wrong, across in ((torch.full_like(x, math.nan), 4), (torch.full_like(x, INF), 4), (x, 3), (x, 8)):
        assert not compiled.add_rows(wrong.float(), codes, torch.ones(8, across, dtype=torch.float64), values)
    assert not compiled.add_rows(x.float(), codes, torch.zeros(8, 4, dtype=torch.float64), values)
    assert vars(compiled) == before


@pytest.mark.parametrize(
    ("x", "value", "scale", "wanted"),
    [
        ([0.0, 0.0], [0.0, -0.0], [1.0, 0.0], Loss(INF, 0.0, 0.0, 0.0)),
        ([1.0, 2.0], [1.0, 2.0], [1.0, 1.0], Loss(INF, 0.0, 0.0, 0.0)),
        ([1.0, 2.0], [1.0, math.nan], [1.0, 1.0], Loss(-INF, INF, 0.0, 0.0)),
        ([1.0, 2.0], [1.0, 1.0], [1.0, math.nan], Loss(-INF, INF, 0.0, 0.0)),
        ([1.0, math.nan], [1.0, math.nan], [1.0, 1.0], Loss(INF, 0.0, 0.0, 0.0)),
        ([1.0, INF], [1.0, 448.0], [1.0, 1.0], Loss(INF, 0.0, 0.0, 0.0)),
        ([4.0, 0.0], [0.0, 0.0], [1.0, 1.0], Loss(0.0, 0.0, 0.0, 0.5)),
        ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], Loss(-INF, 0.0, 0.0, 0.0)),
        (
            [448.0, 465.0],
            [448.0, 448.0],
            [1.0, 1.0],
            Loss(db(448**2 + 465**2, 17**2), 17 / 465, 0.5, 0.0),
        ),
        (
            [448.0, 464.0],
            [448.0, 448.0],
            [1.0, 1.0],
            Loss(db(448**2 + 464**2, 16**2), 16 / 464, 0.0, 0.0),
        ),
    ],
)
def test_edges(x: list[float], value: list[float], scale: list[float], wanted: Loss) -> None:
    """Zeros, NaN and infinities; 464 is the tie between 448 and what would be 480, and no code saturates there."""
    tally = Tally(E4M3FN)
    tally.add(*(torch.tensor(t, dtype=torch.float64) for t in (x, value, scale)))
    found = tally.loss()
    assert found is not None
    assert vars(found) == pytest.approx(vars(wanted), abs=5e-4)


def test_nothing_finite_has_no_loss() -> None:
    tally = Tally(E4M3FN)
    nan = torch.full((3,), math.nan, dtype=torch.float64)
    tally.add(nan, nan, nan)
    assert tally.loss() is None and tally.error() is None
    assert oracle.loss("per_token_cast_to_fp8", {"x": torch.full((2, 128), math.nan)}) is None


QUANTISERS = [name for name, contract in registered().items() if contract.loses]


@pytest.mark.parametrize("name", ["per_token_cast_to_fp8", "mxfp8_quantize", "mxfp4_quantize"])
def test_of_a_recipe_before_there_is_a_kernel(name: str) -> None:
    """And of an output: the dequantised bits give the same ratio by numpy."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    inputs = {"x": x.float() if name.startswith("per") else x}
    found = oracle.loss(name, inputs)
    made = oracle.predict(name, inputs)
    assert isinstance(made, dict) and found is not None
    assert oracle.judge(name, inputs, made).loss == found
    if name == "per_token_cast_to_fp8":
        y = decode(made["q"]).numpy() * decode(made["scale"]).repeat_interleave(128, dim=1).numpy()
        wide = inputs["x"].double().numpy()
        assert found.sqnr == pytest.approx(10 * np.log10((wide**2).sum() / ((wide - y) ** 2).sum()), abs=6e-4)


def test_a_right_kernel_may_have_a_bad_recipe() -> None:
    """The floor of the scale saturates what the ceiling keeps: both pass, and the figures differ."""
    x = torch.full((2, 64), 0.001, dtype=torch.bfloat16)
    x[:, ::32] = 7.5
    found = {}
    for rounding in ("floor", "rceil"):
        made = oracle.predict("mxfp4_quantize", {"x": x}, rounding=rounding)
        verdict = oracle.judge("mxfp4_quantize", {"x": x}, made, rounding=rounding)
        assert verdict.status in (Status.PASSED, Status.MISTRUSTED) and verdict.loss is not None
        found[rounding] = verdict.loss
    assert found["floor"].saturated == 2 / 64 > found["rceil"].saturated == 0
    assert found["floor"].sqnr < found["rceil"].sqnr


def test_a_wrong_kernel_may_lose_little() -> None:
    """One code a step off: FAILED, at nearly the same loss (the negative test: loss decides nothing)."""
    x = {"x": torch.randn(4, 256, generator=torch.Generator().manual_seed(2))}
    made = oracle.predict("per_token_cast_to_fp8", x)
    assert isinstance(made, dict)
    spoilt = {**made, "q": made["q"].clone()}
    spoilt["q"].view(torch.uint8)[0, 0] ^= 1
    right, wrong = (get("per_token_cast_to_fp8").judge(x, out) for out in (made, spoilt))
    assert right.status is Status.PASSED and wrong.status is Status.FAILED
    assert right.loss is not None and wrong.loss is not None
    assert 0 < right.loss.sqnr - wrong.loss.sqnr < 2


def test_what_is_no_quantiser_has_none() -> None:
    with pytest.raises(OptionError, match="no quantiser whose loss is measured"):
        oracle.loss("fp8_gemm_nt", {})
    assert all(get(name).loses for name in QUANTISERS) and "mxfp8_quantize" in QUANTISERS


class TestWhenItIsAskedFor:
    """Judging computes no figure; reading one computes both, of what was judged."""

    def judged(self) -> tuple[dict[str, Tensor], Verdict]:
        x = {"x": torch.randn(4, 256, generator=torch.Generator().manual_seed(2))}
        made = get("per_token_cast_to_fp8").reference(x)
        assert isinstance(made, dict)
        return made, get("per_token_cast_to_fp8").judge(x, made)

    def test_computed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, own = [], quantised.measured
        monkeypatch.setattr(quantised, "measured", lambda *given: calls.append(1) or own(*given))
        _, verdict = self.judged()
        assert not calls
        assert verdict.loss is not None and verdict.error is not None and verdict.loss is verdict.loss
        assert calls == [1]

    def test_copies_hold_the_figures(self) -> None:
        _, verdict = self.judged()
        copy = deepcopy(verdict)
        assert copy == verdict and copy.loss == verdict.loss and copy.error == verdict.error
        assert replace(verdict, summary="other").loss == verdict.loss

    def test_another_tensor_is_not_measured(self) -> None:
        """The negative test: a figure of codes that nobody judged is refused, and one that was read before stays."""
        made, verdict = self.judged()
        _, kept = made["scale"].mul_(2), verdict
        with pytest.raises(InputError, match="scale was changed after it was judged"):
            _ = kept.loss
        made, verdict = self.judged()
        before = verdict.settled().loss
        made["scale"].mul_(2)
        assert verdict.loss == before


def judged(case: str, verdict: Verdict) -> Outcome:
    return Outcome(case, "c", "s", "cpu", verdict)


class TestReports:
    """JSON, record, text, HTML and Markdown."""

    LOST = Loss(-INF, INF, 0.25, 0.0)

    def test_there_and_back(self) -> None:
        given = Verdict(Status.PASSED, "right", total=4, loss=self.LOST)
        written = json.loads(json.dumps(given.to_json(), allow_nan=False))
        assert written["loss"] == {"sqnr": "-inf", "relative": "inf", "saturated": 0.25, "zeros": 0.0}
        whole = judged("c/x", given)
        assert read_outcome(json.loads(json.dumps(whole.to_json()))).verdict.loss == self.LOST

    def test_older_records_lack_it(self) -> None:
        record = judged("c/x", Verdict(Status.PASSED, "right")).to_json()
        del record["verdict"]["loss"]  # type: ignore[attr-defined]
        assert read_outcome(record).verdict.loss is None

    def test_a_share_above_one_is_refused(self) -> None:
        record = judged("c/x", Verdict(Status.PASSED, "right", loss=replace(self.LOST, zeros=1.5))).to_json()
        with pytest.raises(ValueError, match="zeros"):
            read_outcome(record)

    def test_every_report_says_that_it_changes_nothing(self) -> None:
        lossy = [
            judged(f"c/{i}", Verdict(Status.PASSED, "right", total=4, loss=loss))
            for i, loss in enumerate((Loss(31.5, 0.0625, 0.0, 0.001), Loss(30.0, 0.5, 0.0, 0.002), self.LOST))
        ]
        report = Report(tuple(lossy))
        assert [row[3:] for row in losses(report)] == [
            ("3", "30.0 (-inf)", "0.5 (inf)", "0% (25%)", "0.1% (0.2%)"),
        ]
        for text in (files.to_markdown(report), html.to_html(report)):
            assert "no verdict depends on it" in text and "30.0 (-inf)" in text
        assert not any(LOSS in text for text in (files.to_markdown(every_status()), html.to_html(every_status())))
        assert "changes no verdict" in str(self.LOST)
