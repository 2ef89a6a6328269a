"""The scripts that run on a GPU, as far as a machine without one can go through them."""

import itertools
import json
import statistics
from pathlib import Path

import pytest
import torch
from hardware import measure, probes, timings
from hardware.notes import Notes


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


def test_beside_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    """What is above the record's time by more than 2% and 1 us is said; the rest is not."""
    record = {"host_us.product": {"layer": 40.0, "bare": 36.0}, "host_us.gone": {"layer": 1.0}}
    assert measure.compared({"host_us.product": {"layer": 40.9, "bare": 36.0, "new": 9.0}}, record) == []
    assert measure.compared({"host_us.product": {"layer": 41.1, "bare": 36.0}}, record) == ["host_us.product layer"]
    assert "WORSE" in capsys.readouterr().out


def test_quotients_follow_the_significand() -> None:
    """IEEE division does; one entry an ulp off in one row does not."""
    exponents = (-10, 0, 12)
    table = torch.stack([448.0 / ((1 + torch.arange(128) / 128) * 2.0**e) for e in exponents])
    assert probes.follows_significand(table, exponents)
    table.view(torch.int32)[1, 5] += 1
    assert not probes.follows_significand(table, exponents)
