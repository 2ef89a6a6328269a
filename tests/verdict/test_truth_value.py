"""A verdict is true when it is PASSED and then only; the measured error beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import oracle
from oracle.cli import main
from oracle.errors import NonconformanceError
from oracle.numbers.formats import BF16, decode
from oracle.report.record import _verdict
from oracle.routines import cases, get
from oracle.verdict.compare import Error, Status, Verdict, measured, sqnr
from oracle.verdict.sets import worst_of

GEMM = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=9,n=64,k=256/family=randn/seed=1")
QUANT = cases.parse("per_token_group_quant_fp8/bf16-e4m3/1x128/m=3,k=384/family=randn/seed=1")


def right() -> Tensor:
    out = oracle.predict("fp8_gemm_nt", GEMM.inputs(), numerics="sm90.promote128", **GEMM.call_options())
    assert isinstance(out, Tensor)
    return out


@pytest.mark.turns(4)
class TestTruth:
    """``assert oracle.judge(...)`` fails for everything but a proof."""

    @pytest.mark.parametrize("status", list(Status))
    def test_every_status(self, status: Status) -> None:
        verdict = Verdict(status, "said", reason="why" if status.needs_reason else None)
        assert bool(verdict) is (status is Status.PASSED)
        if verdict:
            verdict.raise_for_status()
            return
        with pytest.raises(NonconformanceError, match=f"{status}: said") as caught:
            verdict.raise_for_status()
        assert caught.value.verdict is verdict and isinstance(caught.value, AssertionError)

    def test_assert_conforms(self) -> None:
        out, inputs, options = right(), GEMM.inputs(), GEMM.call_options()
        assert oracle.assert_conforms("fp8_gemm_nt", inputs, out, **options).status is Status.PASSED
        swapped = out[torch.tensor([1, 0, *range(2, 9)])]
        assert not oracle.judge("fp8_gemm_nt", inputs, swapped, **options)
        with pytest.raises(oracle.NonconformanceError, match=r"FAILED.*outside the bound.*\n  explained by: two rows"):
            oracle.assert_conforms("fp8_gemm_nt", inputs, swapped, **options)
        equal = {**inputs, "a_scale": torch.ones_like(inputs["a_scale"])}
        equal_out = oracle.predict("fp8_gemm_nt", equal, numerics="sm90.promote128", **options)
        with pytest.raises(oracle.NonconformanceError, match="MISTRUSTED.*all values of a_scale are equal"):
            oracle.assert_conforms("fp8_gemm_nt", equal, equal_out, **options)

    def test_repro(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """The lines of the message, carried out, give the same summary again; and the twin, of the right output."""
        inputs, output = GEMM.inputs(), right().flip(0)
        with pytest.raises(AssertionError) as caught:
            oracle.assert_conforms("fp8_gemm_nt", inputs, output, out_dtype=torch.bfloat16, explain="off")
        said, _, repro = str(caught.value).partition("\nrepro: ")
        *program, command = repro.replace("\n       ", "\n").split("\n")
        monkeypatch.chdir(tmp_path)
        for given, status in ((output, 1), (right(), 0)):
            exec("\n".join(program), {"inputs": inputs, "output": given, "torch": torch})
            assert main(command.removeprefix("$ fp8-oracle ").split()) == status
            assert (said.split("; ")[0] in capsys.readouterr().out.replace("FAILED ", "FAILED: ")) is bool(status)

    def test_a_failure_of_one_output_is_the_verdict_of_all(self) -> None:
        """What is false must not be taken for what is absent."""
        failed, doubted = Verdict(Status.FAILED, "wrong"), Verdict(Status.MISTRUSTED, "doubted", reason="why")
        assert worst_of([doubted, Verdict(Status.PASSED, "right"), failed]).status is Status.FAILED
        assert worst_of([Verdict(Status.PASSED, "right"), doubted]).status is Status.MISTRUSTED


@pytest.mark.turns(4)
class TestError:
    """The largest error in ulps of the output and the ratio of energies, by hand and in a verdict."""

    def test_by_hand(self) -> None:
        due = torch.tensor([1.0, 2.0, -4.0, math.nan], dtype=torch.float64)
        assert measured(due, due, BF16) == Error(0.0, math.inf)
        moved = torch.tensor([1.0 + 3 * 2.0**-7, 2.0, -4.0, math.nan], dtype=torch.float64)
        error = measured(moved, due, BF16)
        assert error is not None and error.ulps == 3.0
        assert math.isclose(error.sqnr, 10 * math.log10(21 / (3 * 2.0**-7) ** 2), abs_tol=5e-4)
        assert measured(due[:3] * math.inf, due[:3], BF16) == Error(math.inf, -math.inf)
        assert measured(due[:0], due[:0], BF16) is None
        tiny = torch.tensor([2.0**-133], dtype=torch.float64)  # the ulp of 0 and of subnormals
        assert measured(2 * tiny, torch.zeros_like(tiny), BF16) == Error(2.0, -math.inf)
        assert (sqnr(0.0, 0.0), sqnr(0.0, 1.0), sqnr(100.0, 1.0)) == (math.inf, -math.inf, 20.0)

    def test_of_products(self) -> None:
        out, inputs, options = right(), GEMM.inputs(), GEMM.call_options()
        passed = oracle.judge("fp8_gemm_nt", inputs, out, **options)
        exact = oracle.reference("fp8_gemm_nt", inputs, **{**options, "out_dtype": torch.bfloat16})
        assert isinstance(exact, Tensor) and passed.matches == "sm90.promote128"
        assert passed.error == measured(decode(out).flatten(), decode(exact).flatten(), BF16)
        wrong = exact.clone()
        wrong.view(torch.int16)[3, 4] += 5
        failed = get("fp8_gemm_nt").judge(inputs, wrong, **options)  # without an explanation
        assert failed.error is not None and failed.error.ulps == 5.0 and 20 < failed.error.sqnr < math.inf
        record = json.loads(json.dumps(failed.to_json()))
        assert record["error"] == {"ulps": 5.0, "sqnr": failed.error.sqnr} and _verdict(record).error == failed.error
        assert str(failed.error).startswith("largest error 5 ulps, SQNR ")

    def test_of_quantisers(self) -> None:
        """Half a code at most where everything is right; a wrong scale shows in both figures."""
        x = QUANT.inputs()["x"]
        made = oracle.reference("per_token_group_quant_fp8", {"x": x})
        assert isinstance(made, dict)
        passed = oracle.judge("per_token_group_quant_fp8", {"x": x}, made)
        value = decode(made["q"]) * decode(made["scale"]).repeat_interleave(128, dim=1)
        noise = (decode(x) - value).square().sum()
        assert passed and passed.error is not None and 0.25 < passed.error.ulps <= 0.5 + 2.0**-20
        assert math.isclose(passed.error.sqnr, sqnr(float(decode(x).square().sum()), float(noise)))
        wrong = {"q": made["q"], "scale": made["scale"] * 2}
        failed = oracle.judge("per_token_group_quant_fp8", {"x": x}, wrong)
        assert not failed and failed.error is not None and failed.error.ulps > 4 and failed.error.sqnr < 1
        nan = {"q": made["q"].view(torch.uint8).index_fill(0, torch.tensor([1]), 0x7F).view(made["q"].dtype)}
        lost = oracle.judge("per_token_group_quant_fp8", {"x": x}, made | nan)
        assert lost.error == Error(math.inf, -math.inf)
