"""Black boxes are read back: every registered schedule, and sabotaged ones, by probing alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle.errors import NumericsError, ShapeError
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.tensorcore.fingerprint import Fingerprint, Kernel, fingerprint
from oracle.tensorcore.instructions import Instruction, Order, Sum
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.probes import Shape, diagonal, split
from oracle.tensorcore.schedules import Promotion, Scales, Schedule, get, schedules
from oracle.truth.gemm import ScaledProduct

pytestmark = [pytest.mark.emulated, pytest.mark.turns(4), pytest.mark.usefixtures("one_thread")]

DTYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tfloat32": torch.float32,
}


def distinct() -> list[Schedule]:
    """All of sm90's FP8 schedules; of every other instruction its plain chain and promotion, each arithmetic once."""
    kept: dict[tuple[object, ...], Schedule] = {}
    for s in schedules():
        i = s.instruction
        if s.scales is Scales.OPERANDS or i.operands[0] == "tfloat32":
            continue
        if i.name != "sm90.wgmma.fp8" and s.name.rpartition(".")[2] not in ("chain", "promote128"):
            continue
        facts = (i.operands, i.group, i.align_bits, i.out_bits, i.sum, i.order, s.interval, s.promotion, s.epilogue)
        kept.setdefault(facts, s)
    return list(kept.values())


SEEN_BF16 = ["sm90.promote128", "sm90.promote128.muladd", "sm90.chain", "sm90.chain.row_then_col", "sm89.chain"]


def shape_of(schedule: Schedule, k: int = 256) -> Shape:
    blockwise = schedule.scales is Scales.PROMOTION
    dtype = DTYPES[schedule.instruction.operands[0]]
    return Shape(dtype, k, 128 if blockwise else None, 128 if blockwise else 1, edge=64)


def black_box(schedule: Schedule, shape: Shape) -> Kernel:
    def kernel(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype) -> torch.Tensor:
        product = ScaledProduct(a, b, sa, sb, shape.block or shape.k, shape.b_rows)
        return predict_product(product, schedule, out_dtype=out)

    return kernel


def read(schedule: Schedule, *, out_dtype: torch.dtype = torch.float32, k: int = 256) -> Fingerprint:
    shape = shape_of(schedule, k)
    return fingerprint(black_box(schedule, shape), shape, out_dtype=out_dtype)


def first_partial_sum(inst: Instruction) -> int:
    """Size of the smallest sum of k = 0 with another: pairs in a tree and in exact sums, else the group."""
    return 2 if inst.sum in (Sum.TREE_FLUSH, Sum.EXACT) else inst.group


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", distinct(), ids=lambda s: s.name)
def test_every_schedule_is_read_back(schedule: Schedule) -> None:
    """Group, aligner, accumulator, promotion, epilogue, and the name itself."""
    found, inst = read(schedule), schedule.instruction
    assert found.group == first_partial_sum(inst)
    assert found.interleaved == (inst.order is Order.INTERLEAVED)
    if inst.sum is not Sum.TREE_FLUSH:
        assert found.interval == (None if schedule.promotion is Promotion.RESCALE else schedule.interval)
    if inst.sum in (Sum.FUSED, Sum.FUSED_THEN_ADD):
        assert (found.align_bits, found.align_direction) == (inst.align_bits, "toward zero")
        assert (found.accumulator_bits, found.accumulator_rounding) == (inst.out_bits, "toward zero")
    assert schedule.name in found.schedules
    assert schedule.promotion.name in found.promotion
    assert schedule.epilogue.name in found.epilogue
    # Names that remain are the same arithmetic on another architecture.
    for other in map(get, found.schedules):
        assert (other.interval, other.promotion, other.epilogue) == (
            schedule.interval,
            schedule.promotion,
            schedule.epilogue,
        )


@pytest.mark.parametrize("name", SEEN_BF16)
def test_bfloat16_outputs_are_enough(name: str) -> None:
    """As kernels that write only bfloat16: everything is still read, and the store's rounding too."""
    schedule = get(name)
    found = read(schedule, out_dtype=torch.bfloat16)
    assert found.schedules == (name,)
    assert (found.promotion, found.epilogue) == ((schedule.promotion.name,), (schedule.epilogue.name,))
    assert found.store_rounding == "nearest, ties to even"


class TestSabotage:
    """An altered kernel is reported as what it is, and matches no registered schedule."""

    @pytest.mark.parametrize(
        ("change", "attribute", "value"),
        [
            ({"align_bits": 12}, "align_bits", 12),
            ({"align_bits": 14}, "align_bits", 14),
            ({"group": 16, "k": 16}, "group", 16),
            ({"out_bits": 12}, "accumulator_bits", 12),
            ({"round_toward_zero": False}, "accumulator_rounding", "nearest"),
            ({"order": Order.INTERLEAVED, "group": 16}, "interleaved", True),
        ],
        ids=str,
    )
    def test_instruction(self, change: dict[str, object], attribute: str, value: object) -> None:
        base = get("sm90.promote128")
        wrong = replace(base, instruction=replace(base.instruction, **change))  # type: ignore[arg-type]
        found = read(wrong)
        assert getattr(found, attribute) == value
        assert "sm90.promote128" not in found.schedules

    def test_promotion_every_256(self) -> None:
        wrong = replace(get("sm90.promote128.scale_after"), interval=256)
        found = read(wrong, k=512)
        assert (found.interval, found.levels, found.schedules) == (256, (32, 256), ())
        assert found.promotion == (Promotion.ADD.name,)

    def test_missing_promotion(self) -> None:
        """Block scales of one value: a chain over K shows as such."""
        base = get("sm90.chain")
        found = read(base)
        assert found.interval is None and not any("promote" in name for name in found.schedules)

    @pytest.mark.parametrize(
        ("rounding", "name"),
        [
            (Rounding.TOWARD_ZERO, "toward zero"),
            (Rounding.NEAREST_AWAY, "nearest, ties away"),
            (Rounding.UP, "up"),
            (Rounding.DOWN, "down"),
        ],
    )
    def test_store(self, rounding: Rounding, name: str) -> None:
        schedule = get("sm90.promote128")
        shape = shape_of(schedule)
        inner = black_box(schedule, shape)

        def kernel(
            a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype
        ) -> torch.Tensor:
            exact = inner(a, b, sa, sb, torch.float32)
            return to_dtype(exact.double(), out, rounding=rounding, overflow=Overflow.INF)

        found = fingerprint(kernel, shape, out_dtype=torch.bfloat16)
        assert found.store_rounding == name
        assert found.schedules == ()

    def test_a_float32_loop(self) -> None:
        """An ordinary float32 sum, one product after the other: groups of 1, nothing registered."""
        shape = Shape(torch.float8_e4m3fn, 256, None, 1)

        def kernel(
            a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype
        ) -> torch.Tensor:
            total = torch.zeros(a.shape[0], b.shape[0])
            left, right = a.float(), b.float()
            for k in range(a.shape[1]):
                total += left[:, k, None] * right[None, :, k]
            return total * sa * sb.T

        found = fingerprint(kernel, shape, out_dtype=torch.float32)
        assert (found.levels, found.interval, found.schedules) == ((1, 2), None, ()) or found.group <= 2
        assert not found.exact and found.lines()[0].endswith("added one by one or in pairs, each sum rounded")
        assert "none registered" in found.lines()[-1]

    def test_an_exact_sum(self) -> None:
        """In float64: it says so, and nothing of levels, promotions or epilogues."""
        shape = Shape(torch.float8_e4m3fn, 256, None, 1, edge=64)

        def kernel(
            a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, out: torch.dtype
        ) -> torch.Tensor:
            return ((a.double() * sa) @ (b.double() * sb).T).to(out)

        first, *others = fingerprint(kernel, shape, out_dtype=torch.bfloat16).lines()
        assert first == (
            "group size: the probes saw no fused sum: products are added exactly: none is lost beside a larger one"
        )
        assert others == [
            "output rounding: nearest, ties to even",
            "schedules that reproduce every bit: none registered",
        ]

    @pytest.mark.parametrize("infinite", [False, True])
    def test_sums_in_float16(self, infinite: bool) -> None:
        """Their overflow is named as a cause, where the answer is NaN and where it is infinite."""
        shape = Shape(torch.float8_e4m3fn, 256, None, 1, edge=64)

        def kernel(a: torch.Tensor, b: torch.Tensor, *_: object) -> torch.Tensor:
            out = torch.zeros(64, 64, dtype=torch.float16)
            for left, right in zip(a.half().T, b.half().T, strict=True):
                out += left[:, None] * right
            return out.float().nan_to_num(nan=torch.inf, posinf=torch.inf) if infinite else out.float()

        with pytest.raises(NumericsError, match="a partial sum overflows, as those of float16 do beyond 65504, or the"):
            fingerprint(kernel, shape, out_dtype=torch.float32)


def test_the_report_reads_as_sentences() -> None:
    found = read(get("sm90.promote128"))
    lines = found.lines()
    assert lines[0] == "group size: 32"
    assert replace(found, group=2).lines()[0].startswith("group size: the probes saw no fused sum")
    assert "alignment: 13 fraction bits, toward zero" in lines
    assert "promotion interval: promotion every 128; levels (32, 128)" in lines


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_constant_answers_nothing(value: float) -> None:
    """Instead of one group over all of K, which is what the masks alone would read."""
    overflows = "a partial sum overflows.* or " if value != value else ""
    with pytest.raises(NumericsError, match=f"probes do not answer: .*; {overflows}the kernel is no scaled product"):
        fingerprint(
            lambda a, b, *_: torch.full((64, 64), value), shape_of(get("sm90.promote128")), out_dtype=torch.float32
        )


class TestProbes:
    """Products are placed where they are asked for."""

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
    def test_split(self, dtype: torch.dtype) -> None:
        for value in (1.0, -1.75, 2.0**-12, 1.5 * 2.0**-10, 2.0**16):
            x, y = split(value, dtype)
            assert x * y == value
            for factor in (x, y):
                held = torch.tensor([factor], dtype=torch.float64)
                assert (
                    to_dtype(held, dtype, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.NAN).double().item()
                    == factor
                )

    def test_refusals(self) -> None:
        with pytest.raises(NumericsError, match="have the product"):
            split(2.0**40, torch.float8_e4m3fn)
        with pytest.raises(NumericsError, match="129 cases"):
            diagonal([{0: 1.0}] * 129, Shape(torch.float8_e4m3fn))
        shape = Shape(torch.float8_e4m3fn)
        with pytest.raises(ShapeError, match=r"returned \[1\]"):
            fingerprint(lambda *_: torch.zeros(1), shape, out_dtype=torch.float32)
