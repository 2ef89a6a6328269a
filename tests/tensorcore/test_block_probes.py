"""Probes of block-scaled instructions: every named reading is named by its bits, and what is none of them is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.errors import NumericsError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.tensorcore import block_probes, fused
from oracle.tensorcore.block_probes import (
    EDGE,
    Kernel,
    Kind,
    fingerprint_block_scaled,
    inputs,
    pairs,
    predicted,
    probes,
)
from oracle.tensorcore.fused import Operand, exponent, scaled_addends
from oracle.tensorcore.instructions import Instruction
from oracle.tensorcore.schedules import Schedule

KINDS = (
    Kind.of("nvf4"),
    Kind.of("mxf4"),
    Kind.of("mxf8f6f4"),
    Kind.of("mxf8f6f4", "float6_e3m2fn", "float6_e2m3fn"),
    Kind.of("mxf8f6f4", "float8_e5m2", "float4_e2m1fn"),
)
READINGS = [(kind, s) for kind in KINDS for s in kind.candidates if s.instruction.arch == "sm100"]


def answering(rows: Tensor) -> Kernel:
    """A kernel whose diagonal holds these answers."""

    def kernel(*_: object) -> Tensor:
        out = torch.zeros(EDGE, EDGE)
        out[range(len(rows)), range(len(rows))] = rows
        return out

    return kernel


def seen(kind: Kind, instruction: Instruction) -> block_probes.BlockFingerprint:
    return fingerprint_block_scaled(answering(predicted(kind, instruction)), kind)


@pytest.mark.parametrize(("kind", "schedule"), READINGS, ids=lambda x: x.name if isinstance(x, Schedule) else None)
def test_every_reading_is_named(kind: Kind, schedule: Schedule) -> None:
    """And its twin of sm120, the same function; no other."""
    found = seen(kind, schedule.instruction)
    assert found.schedules == (schedule.name, schedule.name.replace("sm100", "sm120"))
    t = schedule.instruction.align_bits
    assert found.readings["alignment"].removesuffix(" or more") == f"{t} fraction bits"


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_steps_of_96_are_named_alone(kind: Kind) -> None:
    """Every reading of sm103's deeper instruction, by one row that a step of 64 answers otherwise."""
    of_64 = next(s for s in kind.candidates if s.instruction.k == 64)
    assert seen(kind, of_64.instruction).readings["depth"] == "64 products meet in one step"
    deeper = [s for s in kind.candidates if s.instruction.k == 96]
    assert {s.instruction.arch for s in deeper} == {"sm103"} and len(deeper) > 4
    for schedule in deeper:
        found = seen(kind, schedule.instruction)
        assert found.schedules == (schedule.name,) and found.readings["depth"].startswith("96 products")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_pair_is_told_apart(kind: Kind) -> None:
    """By construction: at least one probe of each pair has other bits."""
    table = pairs(kind)
    n = len([s for s in kind.candidates if s.instruction.arch == "sm100"])
    assert len(table) == n * (n - 1) // 2 and all(table.values()), [p for p, names in table.items() if not names]


def test_what_e4m3_scales_cannot_show() -> None:
    """Alignments of 36 bits and more are one function under E4M3 scales, so that no name is given to 37."""
    kind = Kind.of("nvf4")
    i = next(s.instruction for s in kind.candidates if s.name.endswith("align36"))
    for t in (37, 40):
        assert torch.equal(predicted(kind, replace(i, align_bits=t)), predicted(kind, i))
    assert seen(kind, i).readings["alignment"] == "36 fraction bits or more"


def sums_of_32(a: Operand, b: Operand, sa: Tensor, sb: Tensor, inst: Instruction) -> tuple[Tensor, Tensor]:
    addends, e = scaled_addends(a, b, sa, sb, inst)
    return addends.unflatten(-1, (-1, 2)).sum(-1), e.unflatten(-1, (-1, 2)).amax(-1)


def normalised(a: Operand, b: Operand, sa: Tensor, sb: Tensor, inst: Instruction) -> tuple[Tensor, Tensor]:
    """Subnormal operands with exponents of their own."""
    return scaled_addends(*(Operand(x.values, exponent(x.values, emin=-60)) for x in (a, b)), sa, sb, inst)


class TestNeither:
    """A model that has no name is reported as none of them, with what is different."""

    @pytest.mark.parametrize(
        ("kind", "change", "probe", "said"),
        [
            ("nvf4", {"align_bits": 33}, "alignment", "33 fraction bits"),
            ("mxf4", {"align_bits": 38}, "alignment", "38 fraction bits"),
            ("mxf8f6f4", {"align_bits": 24}, "alignment", "24 fraction bits"),
            ("nvf4", {"round_toward_zero": False}, "rounding", "nearest"),
            ("mxf8f6f4", {"round_toward_zero": False}, "rounding", "nearest"),
            ("mxf4", {"min_exponent": -130}, "floor", "terms down to 2^-162 "),
            ("mxf8f6f4", {"min_exponent": -130}, "floor", "terms down to 2^-153 "),
        ],
    )
    def test_facts(self, kind: str, change: dict[str, object], probe: str, said: str) -> None:
        asked = Kind.of(kind)
        found = seen(asked, replace(asked.instruction, **change))  # type: ignore[arg-type]
        assert found.schedules == () and found.readings[probe].startswith(said)
        assert probe in found.closest[1] and "none of the named readings" in found.lines()[-1]

    @pytest.mark.parametrize(
        ("kind", "sabotage", "probe", "said"),
        [
            (Kind.of("mxf8f6f4"), normalised, "subnormals", "c survives down to 31 binades"),
            (KINDS[3], normalised, "subnormals", "c survives down to 30 binades"),
        ],
    )
    def test_addends(
        self, kind: Kind, sabotage: Callable[..., object], probe: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        block_probes._predicted(kind)  # of the named readings, by the arithmetic as it is
        monkeypatch.setattr("oracle.tensorcore.predict.scaled_addends", sabotage)
        out = predicted(kind, kind.instruction)
        found = fingerprint_block_scaled(answering(out), kind)
        assert found.schedules == () and found.readings[probe].startswith(said)

    @pytest.mark.parametrize("kind", ["mxf4", "mxf8f6f4"])
    def test_an_overflow_to_half_the_range(self, kind: str) -> None:
        asked = Kind.of(kind)
        out = predicted(asked, asked.instruction)
        found = fingerprint_block_scaled(answering(out.clamp(max=2.0**127)), asked)
        assert found.schedules == () and found.closest[1] == ("overflow",)
        assert found.readings["overflow"].startswith("a sum beyond float32 is 1.70141e+38")

    def test_a_scale_with_a_sign(self) -> None:
        asked = Kind.of("nvf4")
        out = predicted(asked, asked.instruction)
        found = fingerprint_block_scaled(answering(torch.cat([out[:-1], -out[-1:]])), asked)
        assert found.schedules == () and found.readings["scale_sign"] == "gives -1"


class TestReadingsComputedAnotherWay:
    """What a reading says, put into the usual model by other means, is named as that reading."""

    def test_sums_of_32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = Kind.of("mxf4")
        monkeypatch.setattr("oracle.tensorcore.predict.scaled_addends", sums_of_32)
        out = predicted(kind, replace(kind.instruction, k=32))  # so that a step is two addends, of as many products
        monkeypatch.undo()
        found = fingerprint_block_scaled(answering(out), kind)
        assert found.schedules == ("sm100.chain_mxf4.sums32", "sm120.chain_mxf4.sums32")
        assert found.readings["sums"].startswith("32 products are summed")

    @pytest.mark.parametrize(("kind", "chain"), [("mxf4", "chain_mxf4"), ("mxf8f6f4", "chain_ue8m0")])
    def test_an_overflow_that_stays_finite(self, kind: str, chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Truncation that stops at the largest float32, at every step."""
        asked, own, top = Kind.of(kind), fused.round_accumulator, torch.finfo(torch.float32).max
        monkeypatch.setattr(fused, "round_accumulator", lambda *given, **more: own(*given, **more).clamp(-top, top))
        out = predicted(asked, asked.instruction)
        monkeypatch.undo()
        found = fingerprint_block_scaled(answering(out), asked)
        assert found.schedules == (f"sm100.{chain}.saturates", f"sm120.{chain}.saturates")
        assert found.readings["overflow"].startswith("a sum beyond float32 is 3.40282e+38")


def test_the_rows_are_what_kernels_take() -> None:
    """Packed FP4, lower nibble first; scales linear; the product of decoded operands is that of the model."""
    given = inputs(Kind.of("nvf4"))
    assert (given.a.shape, given.a.dtype, given.a_scale.shape) == ((EDGE, 128), torch.uint8, (EDGE, 16))
    assert given.a_scale.dtype == torch.float8_e4m3fn
    row = probes(Kind.of("nvf4"))[0].rows[0]
    assert (float(decode(given.a_scale)[0, 0]), int(given.a[0, 0])) == (row.scales[0][0], 2)
    mixed = inputs(KINDS[4])
    assert (mixed.a.dtype, mixed.b.shape, mixed.b_scale.dtype) == (
        torch.float8_e5m2,
        (EDGE, 128),
        torch.float8_e8m0fnu,
    )
    assert inputs(KINDS[3]).a.shape == (EDGE, 256)


@pytest.mark.parametrize(
    ("kernel", "error", "said"),
    [
        (lambda *_: torch.zeros(4, 4), ShapeError, "returned"),
        (lambda *_: torch.zeros(EDGE, EDGE), NumericsError, "no product of these operands"),
        (lambda *_: torch.full((EDGE, EDGE), torch.nan), NumericsError, "is nan where"),
    ],
)
def test_what_is_no_product_is_refused(kernel: Kernel, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fingerprint_block_scaled(kernel, Kind.of("nvf4"))


@pytest.mark.parametrize("asked", [("nvf5",), ("nvf4", "float8_e4m3fn"), ("mxf8f6f4", "bfloat16")])
def test_a_kind_that_there_is_not(asked: tuple[str, ...]) -> None:
    with pytest.raises(OptionError):
        Kind.of(*asked)
