"""Approximate division on sm90, against what an H200 gave; and what FlashInfer's quantisers make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hardware.probes import modelled
from torch import Tensor

import oracle
from oracle.bounds.quantiser import scale_set
from oracle.diagnosis.explain import diagnose
from oracle.fixtures import files as fixtures
from oracle.numbers import fast_math, mufu
from oracle.numbers import recipes as R
from oracle.numbers.formats import decode, same_bits
from oracle.numbers.quantize import prepare, quantize
from oracle.numbers.rounding import f32
from oracle.routines.catalogue import Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.schedules import get as get_schedule
from oracle.verdict.compare import Status

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "division"
FILE = "h200_fast_math.safetensors"
ONE = 12  # the row of 2^0

RECIPROCAL_448 = float.fromhex("0x1.24924ap-9")  # 1/448 rounded to float32


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    """Rows of 128: 0 and the subnormals, then the significands at the exponents beside the limits and between."""
    entry = fixtures.read_json(FOLDER / "manifest.json", schema="fp8-oracle.division/1")["files"][FILE]
    found = fixtures.read_tensors(FOLDER / FILE, sha256=entry["sha256"])
    assert bool((found["amax"][ONE] == 1 + torch.arange(128) / 128).all()) and len(entry["rows"]) == len(found["amax"])
    return found


def group(amax: float, rows: int = 1) -> Tensor:
    """Groups of this amax: it, a quarter of it, zeros."""
    x = torch.zeros(rows, 128)
    x[:, 3], x[:, 7] = amax, -amax / 4
    return x.to(torch.bfloat16)


class TestTables:
    """Every recorded bit, and an entry moved by one float32 step is noticed."""

    def test_every_entry_is_predicted(self, recorded: dict[str, Tensor]) -> None:
        made = modelled(recorded["amax"])
        assert set(made) == set(recorded) - {"amax"}
        for name, right in made.items():
            assert bool(same_bits(recorded[name], right).all()), name

    @pytest.mark.parametrize("row", [0, 5, 38, 127])
    def test_a_wrong_row_is_found(self, recorded: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, row: int) -> None:
        """The constant of one row of 128, by the least that moves a value."""
        rows = mufu._rows(mufu.RECIPROCAL).clone()
        rows[0, row] += 4
        monkeypatch.setattr(mufu, "_rows", lambda table: rows)
        made = modelled(recorded["amax"])
        assert any(not bool(same_bits(recorded[name], made[name]).all()) for name in ("quotient", "scale"))

    def test_how_far_off(self, recorded: dict[str, Tensor]) -> None:
        """37 of 128 quotients are one float32 step off, and 9 reciprocals of them."""
        top = torch.full((128,), 448.0)
        off = (recorded["quotient"][ONE].view(torch.int32) - (top / recorded["amax"][ONE]).view(torch.int32)).abs()
        assert int((off != 0).sum()) == 37 and int(off.max()) == 1
        right = torch.ones(128) / recorded["quotient"][ONE]
        off = (recorded["scale"][ONE].view(torch.int32) - right.view(torch.int32)).abs()
        assert int((off != 0).sum()) == 9 and int(off.max()) == 1

    def test_limits(self, recorded: dict[str, Tensor]) -> None:
        """The recorded values change their kind exactly where the model says."""
        a, q, s = (decode(recorded[name]) for name in ("amax", "quotient", "scale"))
        assert bool((torch.isinf(q) == (a <= 448.0 * 2.0**-128)).all())
        assert bool(((q == 0) == (a > fast_math.HIGH)).all()) and bool((torch.isinf(s) == (q == 0)).all())
        assert bool(((s == 0) == (a < fast_math.LOW)).all())
        zero = decode(recorded["zero_times_quotient"])
        assert bool((torch.isnan(zero) == torch.isinf(q)).all())


class TestFullRange:
    """``div.full`` scales where ``div.approx`` flushes; in between both are one product by the reciprocal."""

    @pytest.mark.parametrize(
        ("x", "y", "full", "flushed"),
        [
            (2.0**127, 2.0**127, 1.0, 0.0),
            (448.0, 2.0**-130, torch.inf, torch.inf),
            (2.0**-130, 2.0**-130, 1.0, torch.nan),
            (2.0**-126, 2.0, 2.0**-127, 0.0),
            (7.0, 4.0, 1.75, 1.75),
        ],
    )
    def test_ends(self, x: float, y: float, full: float, flushed: float) -> None:
        for expected, ftz in ((full, False), (flushed, True)):
            made = fast_math.divide(*(torch.tensor([v], dtype=torch.float64) for v in (x, y)), flushed=ftz)
            assert bool(same_bits(made.to(torch.float32), torch.tensor([expected])).all()), (x, y, float(made))

    def test_recorded_quotients(self, recorded: dict[str, Tensor]) -> None:
        """In range ``div.full(448, a)`` is the recorded ``div.approx``, which IEEE's is not in 37 of 128."""
        a = decode(recorded["amax"][ONE])
        made = fast_math.divide(torch.full_like(a, 448.0), a, flushed=False)
        assert bool((made == decode(recorded["quotient"][ONE])).all())
        assert int((made != f32(torch.full_like(a, 448.0) / a)).sum()) == 37


class TestAdmissible:
    """The interval of scales holds every recorded entry of a group that survives, and none moved by 11 float32 steps
    (2^-21 is 4 to 8 of them)."""

    def kept(self, recorded: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        a, s = recorded["amax"].flatten(), recorded["scale"].flatten()
        alive = (decode(a) > 0) & ~fast_math.outside(decode(a))
        return a[alive], s[alive]

    def admits(self, amax: Tensor, scale: Tensor) -> Tensor:
        x = torch.zeros(len(amax), 128, dtype=torch.bfloat16)
        x[:, 0] = amax
        return scale_set(prepare(x), R.FLASHINFER_1X128).admits(decode(scale).reshape(-1, 1)).flatten()

    def test_recorded_scales(self, recorded: dict[str, Tensor]) -> None:
        amax, scale = self.kept(recorded)
        assert len(amax) > 900 and bool(self.admits(amax, scale).all())

    @pytest.mark.parametrize("steps", [-11, 11])
    def test_sabotaged_scales(self, recorded: dict[str, Tensor], steps: int) -> None:
        amax, scale = self.kept(recorded)
        normal = decode(amax) > 2.0**-115  # below, what flushing may lose widens the interval
        moved = (scale.view(torch.int32) + steps).view(torch.float32)
        assert not bool(self.admits(amax, moved)[normal].any())


class TestRecipe:
    """scale_1x128_kernel as shipped: what it makes of groups at both ends of the range."""

    @pytest.mark.parametrize(
        ("amax", "scale", "codes"),
        [
            (1.0, RECIPROCAL_448, (0x7E, 0xEE, 0x00)),
            (2.0**-127, 0.0, (0x7F, 0x7F, 0x7F)),
            (2.0**-124, 0.0, (0x7E, 0xFE, 0x7F)),
            (2.0**-118, 0.0, (0x7E, 0xEE, 0x00)),
            (2.0**126, 2.0**126 * RECIPROCAL_448, (0x7E, 0xEE, 0x00)),
            (2.0**127, torch.inf, (0x00, 0x80, 0x00)),
            (torch.inf, torch.inf, (0x7F, 0x7F, 0x00)),
            (0.0, 1.0, (0x00, 0x80, 0x00)),
        ],
    )
    def test_by_amax(self, amax: float, scale: float, codes: tuple[int, ...]) -> None:
        made = quantize(group(amax), R.FLASHINFER_1X128_FAST_MATH)
        assert tuple(made.codes.view(torch.uint8)[0, [3, 7, 0]].tolist()) == codes
        assert float(made.scale) == scale

    def test_finite_values_stay_finite_in_the_contract(self) -> None:
        for amax in (2.0**-133, 2.0**-127, 2.0**-124, 2.0**-118, 2.0**127):
            x = group(amax)
            made = oracle.reference("flashinfer_quantize_1x128", {"x": x})
            assert isinstance(made, dict) and not bool(torch.isnan(made["q"].to(torch.float32)).any())
            assert oracle.judge("flashinfer_quantize_1x128", {"x": x}, made).status is not Status.FAILED
            value = decode(made["q"]) * float(made["scale"][0, 0])
            assert float((value - decode(x)).abs().max()) <= amax / 16

    def test_what_is_not_known_is_refused(self) -> None:
        with pytest.raises(ValueError, match="approximate division is known"):
            replace(R.VLLM_GROUP, arithmetic=R.Arithmetic.FAST_MATH)


QUANTISER = "448/amax approximate and flushed: NaN beyond [2^-119, 2^126], 0 below 2^-117"
PRODUCT = "activations quantised inside with 448/amax approximate and flushed: NaN beyond [2^-119, 2^126]"
SCAN = "weight quantised inside by an amax scan that leaves rows out"


@pytest.mark.turns(4)
class TestFaults:
    """Named from the output alone, in the quantiser and in the products around it; refused where nothing shows."""

    @pytest.mark.parametrize("amax", [2.0**-128, 2.0**-122, 2.0**127])
    def test_quantiser(self, amax: float) -> None:
        x = torch.cat([group(1.5, 3), group(amax)] * 8)  # one wrong scale of a few is too little evidence for a name
        made = quantize(x, R.FLASHINFER_1X128_FAST_MATH)
        out = {"q": made.codes, "scale": torch.nn.functional.pad(made.scale.t(), (0, 0)).contiguous()}
        verdict = oracle.judge("flashinfer_quantize_1x128", {"x": x}, out)
        assert verdict.status is Status.FAILED and verdict.explained_by == ("flashinfer_1x128_fast_math",)
        assert diagnose("flashinfer_quantize_1x128", {"x": x}, out).names == (QUANTISER,)

    def test_in_range_it_passes_and_is_recognised(self) -> None:
        x = (1 + torch.arange(128) / 128).to(torch.bfloat16)[:, None] * torch.ones(1, 128, dtype=torch.bfloat16)
        x[:, 1:] /= 3
        made = quantize(x, R.FLASHINFER_1X128_FAST_MATH)
        out = {"q": made.codes, "scale": made.scale.t().contiguous()}
        verdict = oracle.judge("flashinfer_quantize_1x128", {"x": x}, out)
        assert verdict.status is Status.PASSED and verdict.matches == "flashinfer_1x128_fast_math"
        call = Call(oracle.contracts()["flashinfer_quantize_1x128"], {"x": x})
        assert "within" in str(get_fault(QUANTISER).applies(call))

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        "name",
        ["flashinfer_fp8_blockscale_gemm", "dynamic_flashinfer_deepgemm_blockscale_gemm", "fp8_blockscale_gemm_sm90"],
    )
    def test_products(self, name: str) -> None:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(6, 256, generator=generator).to(torch.bfloat16)
        x[2, 128:] = group(2.0**127)
        weight = torch.randn(192, 256, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(2, 2, generator=generator) * 2.0**-20 + 2.0**-30
        inputs = {"input": x, "weight": weight, "weight_scale": scale}
        call = Call(oracle.contracts()[name], inputs, {}, get_schedule("sm90.promote128"))
        out = run(call, get_fault(PRODUCT))
        assert isinstance(out, Tensor) and bool(torch.isnan(out[2]).all()) and not bool(torch.isnan(out[:2]).any())
        verdict = oracle.judge(name, inputs, out, arch="sm90")
        assert verdict.status is Status.FAILED and verdict.explained_by == ("flashinfer_1x128_fast_math",)
        assert "row 2" in verdict.pattern
        assert PRODUCT in diagnose(name, inputs, out).names
        out[4] = 0
        assert all("failing elements" in said for said in oracle.judge(name, inputs, out, arch="sm90").explained_by)
        other = run(call)
        assert isinstance(other, Tensor)
        other[4, 5] = 0
        assert oracle.judge(name, inputs, other, arch="sm90").explained_by == ()

    def test_weight_scan(self) -> None:
        generator = torch.Generator().manual_seed(6)
        sizes = {"input": 5, "weight": 192}
        inputs = {n: torch.randn(rows, 256, generator=generator).to(torch.bfloat16) for n, rows in sizes.items()}
        inputs["weight"][100, 130] = 90.0  # in a row that the scan leaves out
        call = Call(oracle.contracts()["fp8_blockscale_gemm_sm90"], inputs, {}, get_schedule("sm90.promote128"))
        out = run(call, get_fault(SCAN))
        verdict = oracle.judge("fp8_blockscale_gemm_sm90", inputs, out)
        assert verdict.status is Status.FAILED and verdict.explained_by == ("flashinfer_128x128_amax_fault",)
        assert diagnose("fp8_blockscale_gemm_sm90", inputs, out).names == (SCAN,)
        assert "is not quantised inside" in str(get_fault(SCAN).applies(replace(call, given={"weight": torch.ones(1)})))
