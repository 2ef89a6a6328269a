"""The scripts that run on a GPU, as far as a machine without one can go through them."""

import itertools
import json
import statistics
import time
from pathlib import Path

import pytest
import torch
from hardware import libraries, measure, probes, timings
from hardware.notes import Notes

import oracle
from oracle.harness import subjects
from oracle.routines import cases, registered


def test_a_failure_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    notes = Notes(tmp_path, {"machine": "none"})
    with notes.attempt("bad"):
        raise RuntimeError("the library's own words")
    with notes.attempt("good"):
        notes.keep("one", {"x": torch.ones(3)})
    notes.write()
    record = json.loads((tmp_path / "measurements.json").read_text())
    assert "the library's own words" in record["attempts"]["bad"]["error"]
    assert record["attempts"]["good"]["status"] == "ok"


def test_a_host_that_drifts_moves_no_side_against_another() -> None:
    """It becomes slower with every burst, 0.2% a time, and stands still now and then."""
    bursts = itertools.count()

    def burst(cost: float) -> float:
        return cost * 1.002 ** (now := next(bursts)) + (500.0 if now % 17 == 0 else 0.0)

    found = timings.in_turns({"layer": 40.0, "bare": 40.0, "other": 80.0}, 100, burst)
    assert found["layer"] == pytest.approx(found["bare"], rel=0.005)
    assert found["other"] == pytest.approx(2 * found["bare"], rel=0.005)
    one_by_one = [statistics.median(burst(40.0) for _ in range(100)) for _ in range(2)]
    assert one_by_one[1] > 1.1 * one_by_one[0], "the twin"


def test_dry_run_on_the_cpu(tmp_path: Path) -> None:
    """What needs a GPU is recorded as failed; the rest gives its numbers."""
    assert (
        measure.main(
            ["--out", str(tmp_path), "--device", "cpu", "--only", "probes", "overhead", "bandwidth", "quantisers"]
        )
        == 0
    )
    record = json.loads((tmp_path / "measurements.json").read_text())
    assert record["attempts"]["bandwidth: bandwidth"]["status"] == "ok"
    assert record["checks"] and all(v is True for k, v in record["checks"].items() if k.startswith("own "))
    assert "layer TMA-aligned" in record["timings"]["device_us.quantiser 64x512"]
    with pytest.raises(SystemExit):
        measure.main(["--out", str(tmp_path), "--only", "nothing"])


def test_quotients_follow_the_significand() -> None:
    """IEEE division does; one entry an ulp off in one row does not."""
    exponents = (-10, 0, 12)
    table = torch.stack([448.0 / ((1 + torch.arange(128) / 128) * 2.0**e) for e in exponents])
    assert probes.follows_significand(table, exponents)
    table.view(torch.int32)[1, 5] += 1
    assert not probes.follows_significand(table, exponents)


class TestLibraries:
    """Bare calls as subjects: known contracts, refusals instead of nonsense, a missing library said."""

    def test_contracts_and_reasons(self) -> None:
        found = subjects.provider("hardware.libraries:subjects").subjects
        assert {s.contract for s in found} <= set(registered())
        if not torch.cuda.is_available():
            assert {s.why_not() for s in found} == {"no CUDA device"}
        assert sum(f".{libraries.WRONG}." in s.name for s in found) == 10

    @pytest.mark.parametrize("subject", libraries.subjects(), ids=lambda s: f"{s.name} {s.contract}")
    def test_without_the_library(self, subject: libraries.Library, rowwise_refused: str | None) -> None:
        """On CPU tensors every call but torch's ends in its own refusal, never in another error."""
        case = oracle_case(subject.contract)
        if subject.name == "torch.fast" and subject.contract == "torch_per_token_w8a8_scaled_mm" and rowwise_refused:
            with pytest.raises(RuntimeError, match="per-tensor scaling for CPU"):
                subject.run(case.inputs(), case.call_options())
        elif subject.name == "torch.fast":
            out = subject.run(case.inputs(), case.call_options())
            verdict = oracle.judge(case.contract, case.inputs(), out, arch="cpu", **case.call_options())
            assert verdict.status is oracle.Status.PASSED
        else:
            with pytest.raises(NotImplementedError):
                subject.run(case.inputs(), case.call_options())


def oracle_case(contract: str) -> cases.Case:
    """A case of the quick profile that a kernel would take."""
    from oracle.routines import profiles

    return profiles.cases(contract, "quick")[0]


@pytest.mark.parametrize("shared", [True, False])
def test_the_call_beside_threads(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """It gives the first wrong answer of a kernel whose threads share a workspace, the right one of any other."""
    workspace = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, _: None, scale: torch.Tensor) -> torch.Tensor:
        mine = [x.float().sum(dim=1, keepdim=True).expand(-1, weight.shape[0])]
        if shared:
            workspace[:] = mine
            time.sleep(0.001)
        return (workspace if shared else mine)[0].to(torch.bfloat16)

    monkeypatch.setattr(libraries, "_flashinfer", lambda: kernel)
    x = torch.arange(1.0, 5.0)[:, None].repeat(1, 128).bfloat16()
    inputs = {"input": x, "weight": torch.zeros(64, 128).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1, 1)}
    right = kernel(x, inputs["weight"], None, inputs["weight_scale"])
    made = libraries._flashinfer_threads(inputs, {"out_dtype": torch.bfloat16})
    assert torch.equal(made, right.flip(0) if shared else right)
