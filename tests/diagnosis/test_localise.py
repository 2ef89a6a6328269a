"""Faults whose place is found on the output: named with it, and nothing else is named so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.diagnosis import localise
from oracle.diagnosis.candidates import FailingOutput
from oracle.diagnosis.explain import diagnose
from oracle.diagnosis.localise import effects, groups_in_use, with_terms
from oracle.numbers.formats import codes_of
from oracle.routines import cases, get
from oracle.routines.catalogue import Call, run
from oracle.routines.mutants import products, write
from oracle.tensorcore.identify import subset
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct, exact

pytestmark = pytest.mark.turns(4)

GEMM = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=40,n=320,k=640/family=randn/seed=5"
PACKED = "fp8_fp4_gemm_nt/e4m3xe2m1-bf16/1x128:1x128/m=17,n=128,k=640/family=randn/seed=1"
TOKENS = "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=30,n=256,k=384/family=randn/seed=2"
CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=128,k=256,g=3/family=randn/seed=2"
MASKED = "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=17,n=256,k=512,g=4/family=randn/seed=5"
EACH = ((GEMM, "schedule"), (TOKENS, "exact sums"), (CONTIGUOUS, "schedule"), (MASKED, "exact sums"))
Scales = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Change = Callable[[int, ScaledProduct], ScaledProduct]


def setup(text: str, kernel: str = "schedule") -> tuple[Call, Tensor]:
    """A call, and its right output as rows and columns: by the bits of a schedule, or by exact sums."""
    case = cases.parse(text)
    contract, inputs = get(case.contract), case.inputs()
    call = Call(contract, inputs, case.call_options(), None, case.out_dtype)
    if kernel == "schedule":
        call = replace(call, schedule=get_schedule(contract.arithmetics(call)[0]))
    return call, write(call, products(call, ()), ())


def wrongly(call: Call, change: Change) -> Tensor:
    """The output of the kernel that computes other products."""
    made = [(replace(part, product=change(i, part.product)), s) for i, (part, s) in enumerate(products(call, ()))]
    return write(call, made, ())


def names(call: Call, output: Tensor, *, declared: bool = True) -> tuple[str, ...]:
    """What an output is explained by: with the numerics of the call's kernel declared, or asked of all."""
    numerics = call.schedule.name if declared and call.schedule is not None else None
    shaped = output.view(call.operands.shape)
    return diagnose(call.contract.name, call.inputs, shaped, numerics=numerics, **call.options).names


def specified(call: Call) -> list[int]:
    """Rows that the contract speaks of."""
    rows = [torch.arange(call.rows) if part.rows is None else part.rows for part in call.parts]
    return sorted(torch.cat(rows).tolist())


@pytest.mark.parametrize(("text", "kernel"), [*EACH, (GEMM, "exact sums")])
class TestMovedRows:
    """Right rows in wrong places, across groups too; rows that are nobody's have no name."""

    @pytest.mark.sampled(1)
    def test_swapped_and_duplicated(self, text: str, kernel: str) -> None:
        """Anywhere, with the rows."""
        call, right = setup(text, kernel)
        i, j = specified(call)[1], specified(call)[-2]
        swapped, doubled = right.clone(), right.clone()
        swapped[[i, j]] = swapped[[j, i]]
        doubled[j] = doubled[i]
        assert names(call, swapped, declared=False) == (f"two rows swapped (rows {i} and {j})",)
        assert names(call, doubled) == (f"one row duplicated (row {j} holds row {i})",)


@pytest.mark.repeats("TestMovedRows")
def test_half_a_row_is_no_duplicate() -> None:
    """A row that holds half of another."""
    call, right = setup(GEMM)
    right[30] = (right[3].double() / 2).to(right.dtype)
    assert names(call, right) == ()


class TestTiles:
    """A rectangle that holds another one's right results."""

    @pytest.mark.parametrize("text", [GEMM, MASKED])
    def test_moved_and_swapped(self, text: str) -> None:
        """Along both axes; the same numbers with one more wrong beside them are not that."""
        call, right = setup(text)
        first = int(next(part.rows[0] if part.rows is not None else 0 for part in call.parts if part.product.M > 7))
        here, there = (slice(first + 4, first + 8), slice(64, 192)), (slice(first, first + 4), slice(0, 128))
        moved = right.clone()
        moved[here] = right[there]
        said = f"rows {first + 4}..{first + 7} of columns 64..191 hold rows {first}..{first + 3} of columns 0..127"
        assert names(call, moved) == (f"one output tile stored at another tile's place ({said})",)
        moved[first + 1, 210] = 1000.0
        assert not any("tile" in name for name in names(call, moved))

    def test_swapped(self) -> None:
        """Two tiles of the same rows."""
        call, right = setup(GEMM)
        right[:20, :128], right[:20, 128:256] = right[:20, 128:256].clone(), right[:20, :128].clone()
        (name,) = names(call, right)
        assert name == "two output tiles swapped (rows 0..19 of columns 0..127 and rows 0..19 of columns 128..255)"

    def test_part_of_two_rows(self) -> None:
        """Rows exchanged in one N tile only."""
        call, right = setup(GEMM)
        right[[3, 30], :128] = right[[30, 3], :128]
        assert names(call, right) == ("two rows swapped (rows 3 and 30, columns 0..127)",)


def block_of(change: Callable[[Tensor], Tensor]) -> Change:
    """A change of the codes of ``a`` in K block 1."""

    def apply(_: int, p: ScaledProduct) -> ScaledProduct:
        codes = codes_of(p.a).clone()
        codes[:, 128:256] = change(codes[:, 128:256])
        return replace(p, a=codes.view(p.a.dtype))

    return apply


class TestOneBlock:
    """One K block of some rows and columns."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(("text", "kernel"), [pair for pair in EACH if pair[0] != CONTIGUOUS])
    def test_lost(self, text: str, kernel: str) -> None:
        """In an odd strip of columns."""
        call, right = setup(text, kernel)
        right[:, 40:90] = wrongly(call, block_of(torch.zeros_like))[:, 40:90]
        assert names(call, right, declared=False) == ("K block 1 lost (columns 40..89)",)

    @pytest.mark.repeats("TestOneBlock::test_scales")
    def test_with_the_wrong_sign(self) -> None:
        """Nobody's fault."""
        call, right = setup(GEMM)
        right[:, 40:90] = wrongly(call, block_of(lambda codes: codes ^ 0x80))[:, 40:90]
        assert names(call, right) == ()

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("text", [GEMM, MASKED])
    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("K block 2 counted twice", lambda a, b: (a.index_copy(1, torch.tensor([2]), 2 * a[:, 2:3]), b)),
            ("A scale of the next K block", lambda a, b: (a.index_copy(1, torch.tensor([2]), a[:, 3:4]), b)),
            ("B scale of the previous K block", lambda a, b: (a, b.index_copy(1, torch.tensor([2]), b[:, 1:2]))),
            (None, lambda a, b: (a.index_copy(1, torch.tensor([2]), 1.3 * a[:, 2:3]), b)),
        ],
    )
    def test_scales(self, text: str, name: str | None, change: Scales) -> None:
        """Block 2 in one N tile by other scales, those of nobody among them."""
        call, right = setup(text)

        def other(_: int, p: ScaledProduct) -> ScaledProduct:
            a, b = change(p.a_scale, p.b_scale)
            return replace(p, a_scale=a, b_scale=b)

        right[:, 128:256] = wrongly(call, other)[:, 128:256]
        found = names(call, right)
        assert len(found) == (name is not None)
        assert name is None or found[0].startswith(name) and "columns 128..255" in found[0]
        assert name is None or "K block 2" in found[0]

    def test_several_lost(self) -> None:
        """Blocks 1 to 3, everywhere: no place but the blocks."""
        call, right = setup(GEMM)

        def without(_: int, p: ScaledProduct) -> ScaledProduct:
            codes = codes_of(p.a).clone()
            codes[:, 128:512] = 0
            return replace(p, a=codes.view(p.a.dtype))

        assert names(call, wrongly(call, without)) == ("K blocks 1..3 lost",)

    @pytest.mark.parametrize("text", [GEMM, TOKENS, PACKED])
    def test_the_effects(self, text: str) -> None:
        """No effect is the right product; each other one is linear in the terms it says."""
        (part,) = setup(text)[0].parts
        product = subset(part.product, torch.arange(9), torch.arange(20))
        assert torch.equal(exact(with_terms(product, {}, 128)).hi, exact(product).hi)
        count, scaled = -(-product.K // 128), product.B > 1
        for name, blocks in effects(count, scaled=scaled):
            if name.endswith(("lost", "counted twice")):
                others = {b: () for b in range(count) if b not in blocks}
                alone = exact(with_terms(product, others, 128)).hi
                sign = -1.0 if name.endswith("lost") else 1.0
                wrong = exact(with_terms(product, blocks, 128)).hi
                torch.testing.assert_close(wrong, exact(product).hi + sign * alone, rtol=2.0**-40, atol=2.0**-40)


class TestAnotherGroup:
    """One expert by the weights of another, in use or not."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(("text", "kernel"), EACH[2:])
    @pytest.mark.parametrize("what", ["B codes", "B scale", "weights"])
    def test_named(self, text: str, kernel: str, what: str) -> None:
        """With both experts."""
        call, _ = setup(text, kernel)
        b, scale = call.inputs["b"].view(torch.uint8).clone(), call.inputs["b_scale"].clone()
        groups = len(b)
        bad = groups_in_use(call)[-1]
        other = (bad - 1) % groups  # neither the next nor, by half of them, an expert-parallel one
        for values in (b, scale):
            if what == "weights" or (what == "B codes") == (values is b):
                values[bad] = values[other]
        wrong = {**call.inputs, "b": b.view(torch.float8_e4m3fn), "b_scale": scale}
        output = run(Call(call.contract, wrong, call.options, call.schedule))
        assert isinstance(output, Tensor)
        assert f"{what} of another group (expert {bad} by those of expert {other})" in names(call, output)

    def test_the_nearest(self) -> None:
        """Expert 1 of two blocks by the scales of expert 3, which those of an expert between resemble."""
        call, _ = setup(MASKED.replace("n=256,k=512", "n=128,k=256").replace("seed=5", "seed=26"))
        assert groups_in_use(call) == [1, 3]
        scale = call.parts[1].product.b_scale
        output = wrongly(call, lambda i, p: replace(p, b_scale=scale) if i == 0 else p)
        assert names(call, output) == ("B scale of another group (expert 1 by those of expert 3)",)

    @pytest.mark.repeats("TestAnotherGroup::test_named")
    def test_nobodys(self) -> None:
        """Codes moved by one along K are those of no expert."""
        call, _ = setup(CONTIGUOUS)
        rolled = torch.roll(call.inputs["b"].view(torch.uint8), 1, dims=2).view(torch.float8_e4m3fn)
        output = run(Call(call.contract, {**call.inputs, "b": rolled}, call.options, call.schedule))
        assert isinstance(output, Tensor) and names(call, output) == ()


@pytest.mark.parametrize("text", [GEMM, TOKENS, MASKED])
def test_garbage_has_no_place(text: str) -> None:
    """Numbers of the right size in a rectangle are nobody's."""
    call, right = setup(text)
    rows, seed = torch.tensor(specified(call)[3:12]), 1
    noise = torch.randn(len(rows), 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    right[rows, 64:128] = (noise * right[rows].double().std()).to(right.dtype)
    assert names(call, right) == ()


def test_a_sample_without_a_failing_number_is_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row and a column that fail miss the sample of failing rows and columns: no effect is close to nothing."""
    call, right = setup(GEMM)
    right[7] = right[8]
    right[:, 3] = 0
    tried = list[object]()
    monkeypatch.setattr(FailingOutput, "attempt_placement", lambda self, placement, numerics: tried.append(placement))
    monkeypatch.setattr(localise, "GUESS", (2, 2))
    assert names(call, right) == () and tried == []
    monkeypatch.setattr(localise, "_close", lambda product, y, inside, length, known, near: known)
    monkeypatch.setattr(localise, "GUESS", (64, 512))
    assert names(call, right) == () and len(tried) > 20
