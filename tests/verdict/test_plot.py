"""Pictures: every element is counted once and in its category; what is drawn; files, and one error for what is not."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from oracle import api
from oracle.diagnosis.candidates import Explanation
from oracle.diagnosis.explain import Diagnosis, diagnose
from oracle.errors import OptionError
from oracle.routines import get
from oracle.verdict import plot
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.heatmap import COLOURS, FIRST_OUTSIDE, NO_NUMBER
from oracle.verdict.plot import Picture
from tests.support.answers import smallest

NAME = "fp8_gemm_nt"
GEMM = oracle.cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=24,n=160,k=512/family=randn/seed=1").inputs()
MASKED = "fp8_m_grouped_gemm_nt_masked"
GROUPS = oracle.cases.parse(f"{MASKED}/e4m3xe4m3-bf16/1x128:128x128/g=2,m=4,n=32,k=128/family=randn/seed=1").inputs()
POSITIVE = oracle.cases.parse("fp8_gemm_nt/e4m3xe4m3-f32/1x128:128x128/m=4,n=32,k=512/family=positive/seed=1")
QUANT = "per_token_group_quant_fp8"
LAYOUT = "swap_w13_to_w31"


def predicted(inputs: dict[str, Tensor] = GEMM, name: str = NAME) -> Tensor:
    out = oracle.predict(name, inputs)
    assert isinstance(out, Tensor)
    return out


def without_block(block: int) -> Tensor:
    """What a kernel gives that leaves out a K block."""
    codes = GEMM["a"].clone()
    codes.view(torch.uint8)[:, 128 * block : 128 * (block + 1)] = 0
    return predicted({**GEMM, "a": codes})


def seen(verdict: Verdict, output: str = "out") -> Picture:
    assert verdict.pictures is not None
    return verdict.pictures()[output]


class TestCounts:
    """What a picture says beside what the verdict says."""

    def test_a_right_output(self) -> None:
        picture = seen(oracle.judge(NAME, GEMM, predicted()))
        assert picture.failing == 0 and sum(picture.counts) == 24 * 160 and picture.levels.shape == (24, 160)
        assert picture.inside is not None and picture.outside is not None and picture.admitted is not None
        assert picture.inside.sum() == picture.admitted.sum() == 24 * 160 and not picture.outside.any()
        assert picture.inside[1:].any() and picture.admitted[1:].sum() >= picture.inside[1:].sum()

    def test_a_wrong_one(self) -> None:
        verdict = oracle.judge(NAME, GEMM, without_block(1), explain="off")
        picture = seen(verdict)
        assert picture.failing == verdict.outside > 3000
        assert (picture.levels >= FIRST_OUTSIDE).sum() == verdict.outside
        assert picture.outside is not None and picture.outside.sum() == verdict.outside

    def test_ulps(self) -> None:
        """Five codes from the right value, rounded: the bin up to 8 ulps, and no other."""
        right = oracle.reference(NAME, GEMM, out_dtype=torch.bfloat16)
        assert isinstance(right, Tensor)
        at = divmod(int(right.abs().argmax()), 160)
        right.view(torch.int16)[at] -= 5
        picture = seen(oracle.judge(NAME, GEMM, right, explain="off"))
        assert picture.outside is not None and picture.outside.tolist() == [0, 0, 0, 0, 1] + [0] * 22
        assert plot.ULPS[4] == 8.0 and picture.levels[at] >= FIRST_OUTSIDE

    def test_nan_and_infinity(self) -> None:
        out = predicted().clone()
        out[2:4, 5] = math.nan
        out[7, 7] = -math.inf
        picture = seen(oracle.judge(NAME, GEMM, out, explain="off"))
        assert picture.counts[1 + NO_NUMBER] == picture.failing == 3
        assert [picture.levels[at] for at in ((2, 5), (3, 5), (7, 7))] == [NO_NUMBER] * 3
        assert picture.outside is not None and not picture.outside.any()

    def test_what_is_unspecified(self) -> None:
        picture = seen(oracle.judge(MASKED, GROUPS, predicted(GROUPS, MASKED)))
        free = oracle.interval(MASKED, GROUPS)["out"].free
        assert 0 < picture.counts[0] == int(free.sum()) and picture.failing == 0
        assert np.array_equal(picture.levels == -1, free.reshape(8, 32).numpy())

    def test_a_class_that_is_not_declared(self) -> None:
        """What lies in the interval of the class that held it is not drawn as wrong; twin: declared, it is."""
        inputs = POSITIVE.inputs()
        right = oracle.reference(NAME, inputs, out_dtype=torch.float32)
        assert isinstance(right, Tensor)
        right.view(torch.int32).add_(4)  # farther from zero, where truncation never is
        verdict = oracle.judge(NAME, inputs, right)
        assert verdict and "not declared" in verdict.summary and not seen(verdict).failing
        declared = oracle.judge(NAME, inputs, right, numerics="sm90.promote128", explain="off")
        assert not declared and seen(declared).failing == declared.outside

    def test_bits_that_no_value_shows(self) -> None:
        """A layout is judged by its bits: a -0 for a 0 is drawn as wrong, too."""
        inputs, options = smallest(LAYOUT)
        out = oracle.reference(LAYOUT, inputs, **options)
        assert isinstance(out, Tensor)
        at = torch.nonzero(out.flatten().float() == 0)[0, 0]
        out.view(torch.uint8).flatten()[at] ^= 0x80
        out.view(torch.uint8).flatten()[-1] ^= 0x11
        verdict = oracle.judge(LAYOUT, inputs, out, explain="off", **options)
        assert seen(verdict).failing < verdict.outside == 2
        legend = verdict.plot().axes[0].get_legend()
        assert legend is not None and [t.get_text() for t in legend.get_texts()][-1] == "NaN, inf, other bits: 2"

    def test_large_outputs(self) -> None:
        """Cells have the level of their worst element; the last ones are cut."""
        value = torch.zeros((3, 1025), dtype=torch.float32)
        value[1, 1024] = 1.0
        due = torch.zeros_like(value)
        sets = plot.Range(due, due, torch.zeros(due.shape, dtype=torch.uint8))
        picture = plot.picture(value, sets, due, output="out")
        assert picture.cell == (1, 3) and picture.levels.shape == (3, 342)
        assert np.argwhere(picture.levels > 0).tolist() == [[1, 341]]

    def test_quantisers_and_integers(self) -> None:
        inputs, options = smallest(QUANT)
        made = oracle.reference(QUANT, inputs, **options)
        verdict = oracle.judge(QUANT, inputs, made, **options)
        assert verdict.pictures is not None and set(verdict.pictures()) == {"q", "scale"}
        inputs, options = smallest("get_num_sms")
        verdict = oracle.judge("get_num_sms", inputs, get("get_num_sms").reference(inputs, **options), **options)
        assert seen(verdict).inside is None and seen(verdict).failing == 0


class TestTensors:
    """Which tensors a verdict keeps."""

    def test_small_and_large_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert seen(oracle.judge(NAME, GEMM, predicted())).failing == 0  # nobody else holds that output
        monkeypatch.setattr(api, "KEPT", 100)
        out = predicted()
        kept, gone = oracle.judge(NAME, GEMM, out), oracle.judge(NAME, GEMM, predicted())
        assert seen(kept).failing == 0 and gone.pictures is not None and gone.pictures() == {}
        with pytest.raises(OptionError, match="nothing to draw"):
            gone.plot()
        out[0] = 0
        with pytest.raises(OptionError, match="nothing to draw"):
            kept.plot()  # it is not what was judged

    def test_a_failure_without_tensors(self) -> None:
        """It is drawn from its evidence, which has the same levels."""
        out = without_block(1)
        verdict = oracle.judge(NAME, GEMM, out, explain="off")
        assert verdict.evidence is not None
        whole, left = seen(verdict), plot.of_evidence(verdict.evidence)
        assert left.counts == whole.counts and left.inside is None and left.failing == verdict.outside
        assert replace(verdict, pictures=None).plot().axes

    @pytest.mark.parametrize("copied", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy], ids=["pickle", "copy"])
    def test_copies(self, copied) -> None:  # type: ignore[no-untyped-def]
        verdict = oracle.judge(NAME, GEMM, predicted())
        assert copied(verdict) == verdict and copied(verdict).pictures is None
        assert "pictures" not in verdict.to_json()


@pytest.mark.turns(4)
class TestDrawing:
    """Labels with units, colours, files; the same picture has the same bytes."""

    def test_a_verdict(self, tmp_path: Path) -> None:
        out = without_block(1)
        verdict = oracle.judge(NAME, GEMM, out, explain="off")
        figure = verdict.plot(tmp_path / "v.png")
        heat, bars = figure.axes
        assert (heat.get_xlabel(), heat.get_ylabel()) == ("column (element)", "row (element)")
        assert (bars.get_xlabel(), bars.get_ylabel()) == ("error in ulps of bfloat16, up to", "elements")
        assert figure.get_suptitle().startswith(f"FAILED: {verdict.outside} of 3840 elements outside")
        assert heat.images[0].get_array().shape == (24, 160)
        assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG")
        for name in ("1.svg", "2.svg"):
            verdict.plot(str(tmp_path / name), dark=True)
        text = (tmp_path / "1.svg").read_text()
        assert text == (tmp_path / "2.svg").read_text() == verdict.plot(dark=True)._repr_svg_()  # type: ignore[attr-defined]
        assert "error in ulps" in " ".join(ElementTree.fromstring(text).itertext()) and len(text) < 150_000
        assert plot.DARK_PAPER in text and plot.PAPER not in verdict.plot(dark=True)._repr_svg_()  # type: ignore[attr-defined]

    def test_one_element_is_ringed(self) -> None:
        out = predicted().clone()
        out[20, 100] += 50
        one, many = (oracle.judge(NAME, GEMM, x, explain="off").plot().axes[0] for x in (out, without_block(1)))
        assert [ring.get_offsets().tolist() for ring in one.collections] == [[[100.0, 20.0]]] * 2
        assert not many.collections

    def test_a_vector(self) -> None:
        vector = torch.arange(700, dtype=torch.float32)
        sets = plot.Range(vector, vector, torch.zeros(700, dtype=torch.uint8))
        figure = plot.draw([plot.picture(vector, sets, vector, output="s")], "said $x$", path=None, dark=False)
        heat = figure.axes[0]
        assert heat.get_xlim() == (-0.5, 699.5) and heat.get_xlabel() == "element" and not heat.get_yticks().size

    def test_a_diagnosis(self, tmp_path: Path) -> None:
        """Where it fails, which K block is lost, and the explanation; twin: a right output has neither."""
        found = diagnose(NAME, GEMM, without_block(1))
        assert found.blocks is not None and found.blocks.length == 128
        assert np.allclose(found.blocks.factor[:, 1], 0, atol=0.05)
        assert (found.blocks.factor[:, [0, 2, 3]] == 1).all()
        assert round(float(found.places[0].share.sum())) == found.failing
        verdict, weighed = oracle.judge(NAME, GEMM, without_block(1)), found.explanations[0].failing
        assert found.failing == verdict.outside == seen(verdict).failing > weighed
        assert found.where == verdict.pattern and f"weighed on {weighed} elements" in found.words[-1]
        figure = found.plot(tmp_path / "d.svg")
        text = " ".join(ElementTree.parse(tmp_path / "d.svg").getroot().itertext())
        said = ("K block (128 products)", "share of the elements that fails", "K block 1 lost", f"{found.failing} of")
        assert all(words in text for words in said)
        assert len(figure.axes) == 5  # two of them are colour bars
        right = diagnose(NAME, GEMM, predicted())
        assert not right.places and right.blocks is None and right.plot().axes

    def test_the_bar_of_an_explanation(self) -> None:
        """One of the failing elements alone is right everywhere else, which no count of contradictions says."""
        whole = Explanation("f", "sm90.promote128", explained=50, failing=50, known=3840, contradicted=3790)
        bars = [Diagnosis(50, 3840, "", (e,)).plot().axes[-1] for e in (replace(whole, local=True), whole)]
        assert [[text.get_text() for text in axes.texts] for axes in bars] == [
            ["all 50 failing elements, and the rest is right without it"],
            ["50 of 50 failing elements, 3790 contradicted"],
        ]

    def test_bad_paths(self, tmp_path: Path) -> None:
        verdict = oracle.judge(NAME, GEMM, predicted())
        (tmp_path / "d.png").mkdir()
        wrong = {"v.jpg": "neither .png nor .svg", "none/v.png": "does not exist", "d.png": "cannot be written"}
        for path, said in wrong.items():
            with pytest.raises(OptionError, match=said):
                verdict.plot(tmp_path / path)
        assert [p.name for p in tmp_path.iterdir()] == ["d.png"]

    def test_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(OptionError, match=r"needs matplotlib.*pip install 'fp8-oracle\[plot\]'"):
            oracle.judge(NAME, GEMM, predicted()).plot()

    def test_nothing_to_draw(self) -> None:
        """A choice of experts is no interval; a verdict that judge() did not make has no tensors."""
        inputs, options = smallest("moe_routing")
        passed = oracle.judge("moe_routing", inputs, oracle.reference("moe_routing", inputs, **options), **options)
        for verdict in (passed, Verdict(Status.PASSED, "said")):
            with pytest.raises(OptionError, match="nothing to draw"):
                verdict.plot()

    def test_colours(self) -> None:
        """Admissible is blue and inadmissible is not, whatever the colour vision: blue falls below red and green."""
        rgb = [tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in COLOURS[:NO_NUMBER]]
        inside, outside = rgb[:FIRST_OUTSIDE], rgb[FIRST_OUTSIDE:]
        assert all(blue > red for red, _, blue in inside) and all(red > blue for red, _, blue in outside)


def test_loading(root: Path) -> None:
    """Importing the package loads no matplotlib, and a picture no pyplot, which would choose a window system."""
    source = (root / "oracle" / "verdict" / "plot.py").read_text()
    at_the_top = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not any("matplotlib" in line for line in at_the_top) and "pyplot" not in source.replace("no pyplot", "")
    users = [p.name for p in (root / "oracle").rglob("*.py") if "import matplotlib" in p.read_text()]
    assert users == ["plot.py"]
