"""The hardware script: seeds give the same bits everywhere, failures are recorded, sizes stay small."""

import json
from pathlib import Path

import pytest
import torch
from hardware import run_h200, seeded_inputs
from hardware.recorder import Recorder
from safetensors import safe_open


class TestSeeds:
    """Inputs made again from their records; digests as first recorded."""

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("e4m3.codes", "CODES"),
            ("e4m3.bell", "BELL"),
            ("bf16.bell", "WIDE"),
            ("f32.scale", "SCALE"),
            ("f32.power", "POWER"),
            ("f32.bell", "F32"),
        ],
    )
    def test_bits(self, kind: str, expected: str) -> None:
        record = seeded_inputs.recipe(kind, (17, 130), 5, 2)
        first = seeded_inputs.make(record)
        assert seeded_inputs.digest(first) == DIGESTS[expected]
        assert seeded_inputs.digest(seeded_inputs.make(json.loads(json.dumps(record)))) == DIGESTS[expected]
        other = seeded_inputs.make({**record, "stream": 3})
        assert seeded_inputs.digest(other) != DIGESTS[expected]

    def test_codes_are_finite_and_scales_no_powers(self) -> None:
        codes = seeded_inputs.make(seeded_inputs.recipe("e4m3.codes", (64, 64), 1, 0)).float()
        assert codes.isfinite().all() and len(codes.unique()) > 240
        scale = seeded_inputs.make(seeded_inputs.recipe("f32.scale", (64,), 1, 0))
        assert (scale.view(torch.int32) & 0x7FFFFF != 0).all() and (scale > 0).all()
        power = seeded_inputs.make(seeded_inputs.recipe("f32.power", (64,), 1, 0))
        assert (power.view(torch.int32) & 0x7FFFFF == 0).all()

    def test_quantiser_rows_hold_every_significand(self) -> None:
        x = seeded_inputs.quantiser_matrix(seeded_inputs.quantiser_rows()).float()
        amax = x[6:].unflatten(1, (-1, 128)).abs().amax(2)
        assert torch.equal(amax[:, 0], 1 + torch.arange(128) / 128) and (amax == amax[:, :1]).all()
        assert x[3].isnan().any() and x[4].isinf().any() and (x[5] == 0).all()


DIGESTS: dict[str, str] = {
    "CODES": "764584487f202aae",
    "BELL": "62a1fd51343ae785",
    "WIDE": "958ff209463b365b",
    "SCALE": "4081d4a5166dd6bd",
    "POWER": "1073be30992bb6df",
    "F32": "fad77416cfaa1c1f",
}


def test_a_failure_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "test")
    with recorder.attempt("good"):
        recorder.keep("family", "one", torch.ones(3), contract="c", inputs={}, options={"out_dtype": torch.bfloat16})
    with recorder.attempt("bad"):
        raise RuntimeError("the library's own words")
    assert recorder.failures == ["bad"]
    recorder.write()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "the library's own words" in summary["routines"]["bad"]["error"]
    assert summary["calls"]["out.one"]["options"] == {"out_dtype": "bfloat16"}
    with safe_open(tmp_path / "family.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("out.one"), torch.ones(3))
        assert json.loads(file.metadata()["calls"])["out.one"]["contract"] == "c"


def test_too_much_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "test")
    recorder.keep("family", "big", torch.zeros(9 * 2**20, dtype=torch.uint8), contract="c", inputs={})
    with pytest.raises(RuntimeError, match="the limit is"):
        recorder.write()


def test_dry_run_on_the_cpu(tmp_path: Path) -> None:
    """Layer routines run on their CPU paths; what needs a GPU is recorded as failed."""
    assert run_h200.main(["--out", str(tmp_path), "--device", "cpu", "--only", "dense", "grouped", "logits"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    routines = summary["routines"]
    assert all(entry["status"] == "ok" for name, entry in routines.items() if name.startswith("layer."))
    assert routines["deep_gemm.fp8_gemm_nt 7x128x384"]["status"] == "failed"
    files = list(tmp_path.iterdir())
    assert len(files) <= 8 and sum(f.stat().st_size for f in files) < 8 * 2**20
    for call in summary["calls"].values():
        remade = seeded_inputs.make_all(call["inputs"])
        assert all(isinstance(t, torch.Tensor) for t in remade.values())
