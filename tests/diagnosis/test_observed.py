"""What is said of a failure that no known fault explains; each sentence beside an output that it is not said of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.diagnosis.least_squares import Factors
from oracle.diagnosis.observed import made_nan, observed, tail_of_k
from oracle.errors import NonconformanceError
from oracle.report import schema
from oracle.report.record import _verdict
from oracle.routines import cases, get
from oracle.routines.base import by_name

pytestmark = pytest.mark.turns(4)

RIGHT = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
OTHER = torch.randn(2048, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def of(change: Callable[[Tensor], object]) -> list[str]:
    """What is said of a changed output whose differing elements fail."""
    output = RIGHT.clone()
    change(output)
    return observed(output, RIGHT, output.view(torch.int16) != RIGHT.view(torch.int16))


def fill(value: float) -> Callable[[Tensor], object]:
    return lambda x: x[5:9].fill_(value)


def steps(most: int) -> Callable[[Tensor], object]:
    """Each element moved by 1 to ``most`` units in the last place, up and down."""

    def change(x: Tensor) -> None:
        by = torch.arange(x.numel()).reshape(x.shape) % most + 1
        x.view(torch.int16).add_((by * (1 - 2 * (torch.arange(x.shape[1]) % 2))).to(torch.int16))

    return change


def rows_from(start: int, *, but: int | None = None) -> Callable[[Tensor], object]:
    def change(x: Tensor) -> None:
        x[start:] = OTHER[start:]
        if but is not None:
            x[but] = RIGHT[but]

    return change


def columns(at: list[int]) -> Callable[[Tensor], object]:
    return lambda x: x.index_copy_(1, torch.tensor(at), OTHER[:, at])


def times(low: float, high: float) -> Callable[[Tensor], object]:
    def change(x: Tensor) -> None:
        x[:64] = (x[:64].float() * torch.linspace(low, high, 64)[:, None]).bfloat16()

    return change


def nudged(by: int, where: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
    """The magnitude of the elements whose codes are chosen moved by ``by`` units in the last place."""
    return lambda x: x.view(torch.int16).add_((where(x.view(torch.int16)) * by).to(torch.int16))


def taken(rows: list[int], source: list[int]) -> Callable[[Tensor], object]:
    return lambda x: x.index_copy_(0, torch.tensor(rows), RIGHT[source])


def taken_columns(at: list[int], source: list[int]) -> Callable[[Tensor], object]:
    return lambda x: x.index_copy_(1, torch.tensor(at), RIGHT[:, source])


def rows(at: list[int]) -> Callable[[Tensor], object]:
    return lambda x: x.index_copy_(0, torch.tensor(at), OTHER[at])


def some(codes: Tensor) -> Tensor:
    """Every third element."""
    return torch.arange(codes.numel()).reshape(codes.shape) % 3 == 0


ODD_BLOCKS = [*range(16, 32), *range(48, 64)]
ROWS = [
    (fill(torch.nan), "every failing element is NaN"),
    (fill(torch.inf), "every failing element is infinite"),
    (fill(0.0), "every failing element is 0"),
    (fill(-7.5), "every failing element is -7.5"),
    (steps(1), "every failing element is one unit in the last place off"),
    (times(1.375, 1.375), "every failing element is 1.375 times the right result"),
    (times(-1.0, -1.0), "every failing element is -1 times the right result"),
    (rows_from(1024), "rows from 1,024 on"),
    (rows_from(1024), "the failing elements do not correlate with the right results: other operands, or old memory"),
    (columns([*range(40, 64)]), "columns from 40 on"),
    (columns(ODD_BLOCKS), "every second block of 16 columns, the first at column 16"),
    (columns([*range(0, 64, 2)]), "every second column, the first at column 0"),
    (times(0.5, 0.5), "every failing element is 0.5 times the right result (2^-1)"),
    (times(-4.0, -4.0), "every failing element is -4 times the right result (2^2)"),
    (nudged(-1, some), "every failing element is nearer to zero than the right result"),
    (nudged(1, some), "every failing element is farther from zero than the right result"),
    (
        nudged(1, lambda codes: some(codes) & (codes % 2 == 0)),
        "every failing element is farther from zero than the right result; where each right result is even, as at ties",
    ),
    (columns([*range(3, 64, 8)]), "every 8th column, the first at column 3"),
    (rows([*range(0, 2048, 3)]), "every third row, the first at row 0"),
    (
        columns([x for start in (4, 20, 36, 52) for x in range(start, start + 4)]),
        "every fourth block of 4 columns, the first at column 4",
    ),
    (taken([7, 8, 9, 10], [3, 4, 5, 6]), "every failing row is the right one of another row, 4 before it"),
    (taken([7, 8, 9], [9, 7, 8]), "every failing row is the right one of another row"),
    (taken_columns([*range(64)], [*range(1, 64), 0]), "every failing column is the right one of another column"),
    (taken_columns([0, 1, 2], [1, 2, 3]), "every failing column is the right one of another column, 1 behind it"),
]


def test_indices_taken_from_the_one_before() -> None:
    """From some index on; and one value at several places says it only where the right output has it nowhere else."""
    right = torch.randn(2, 100, generator=torch.Generator().manual_seed(3))
    output = right.clone()
    output[:, 64:] = right[:, 63:99]
    assert "from index 64 on taken from the index before along axis 1" in observed(output, right, output != right)
    one = right[:1].clone()
    one[:, 64:] = right[0, 63]
    said = "from index 64 on taken to be the last before along axis 1"
    assert said in observed(one, right[:1], one != right[:1])
    twice = right[:1].clone()
    twice[0, 5] = twice[0, 63]
    assert said not in observed(one, twice, one != twice)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_nan_that_was_made(dtype: torch.dtype) -> None:
    """Of arithmetic and conversions, not poison or old memory."""
    inf = torch.tensor([torch.inf], dtype=dtype)
    assert bool(made_nan(torch.cat([inf - inf, inf * 0, (inf.float() * 0).to(dtype)])).all())
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    other = (inf.view(bits) + 5).view(dtype)
    assert bool(torch.isnan(other).all())
    assert not bool(made_nan(torch.cat([other, inf, torch.ones(1, dtype=dtype)])).any())


@pytest.mark.parametrize(("change", "said"), ROWS, ids=[said for _, said in ROWS])
def test_said(change: Callable[[Tensor], object], said: str) -> None:
    assert said in of(change)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (steps(2), "one unit in the last place"),
        (times(1.3, 1.4), "times the right result"),
        (times(1.3, 1.4), "do not correlate"),
        (rows_from(1024, but=2000), "rows from"),
        (columns([*ODD_BLOCKS, 0]), "every second"),
        (columns([3]), "every second"),
        (times(1.375, 1.375), "(2^"),
        (times(1.0, 3.0), "(2^"),
        (steps(1), "zero"),
        (nudged(1, some), "even"),
        (nudged(1, lambda codes: torch.arange(codes.numel()).reshape(codes.shape) < 20), "zero"),
        (nudged(2, some), "zero"),
        (columns([*range(3, 56, 8)]), "every 8th"),
        (columns([11, 19, 27]), "every 8th"),
        (columns([*range(0, 64, 8), 5]), "every"),
        (rows([*range(0, 2048, 8)]), "block"),
        (taken([7, 8, 9], [3, 4, 5]), "column"),
        (taken([7], [3]), "another row"),
        (taken([7, 8, 9], [3, 4, 6]), "before it"),
        (lambda x: (taken([7, 8, 9], [3, 4, 5])(x), x[40].mul_(3)), "another row"),
        (lambda x: (taken([7, 8], [3, 4])(x), x[7, :1].mul_(3)), "another row"),
    ],
)
def test_not_said(change: Callable[[Tensor], object], kept: str) -> None:
    assert not any(kept in said for said in of(change))


@pytest.mark.parametrize("rows", [2, 5])
def test_a_place_of_few_elements(rows: int) -> None:
    """Two of 25 that lie in the last two rows and in every second column do so by chance; ten that fill rows, one time
    in 10,000."""
    right, bad = torch.ones(5 if rows == 2 else 16, 5), torch.zeros(5 if rows == 2 else 16, 5, dtype=torch.bool)
    if rows == 2:
        bad[3, 1] = bad[4, 3] = True
    else:
        bad[-2:] = True
    said = observed(torch.where(bad, 0.25 + torch.rand(right.shape), right), right, bad)
    assert any("rows from" in one for one in said) == (rows != 2) and not any("every second" in one for one in said)


def test_pages_have_no_order() -> None:
    """Slots of the last pages, whose order is chance; the columns of a slot have one, and so have rows elsewhere."""
    right = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1))
    output = right.clone()
    output[4:, :, 8:] *= 1 + torch.rand(4, 4, 8)
    said = [observed(output, right, output != right, paged=paged) for paged in (True, False)]
    assert all("columns from 8 on" in some for some in said)
    assert [("from index 4 on along axis 0" in some, "rows from 16 on" in some) for some in said] == [
        (False, False),
        (True, True),
    ]


WIDE = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
FLOAT32 = [
    (lambda x: x.bfloat16().float(), "every failing element is the right result rounded to bfloat16"),
    (lambda x: x.half().float(), "every failing element is the right result rounded to float16"),
    (lambda x: (x * 1.3).bfloat16().float(), "every failing element is a value of bfloat16"),
]


@pytest.mark.parametrize(("change", "said"), FLOAT32, ids=[said for _, said in FLOAT32])
def test_16_bits_in_float32(change: Callable[[Tensor], Tensor], said: str) -> None:
    """Not where one element has more bits, where the right results have no more, or where there are few."""
    output = change(WIDE)
    bad = output != WIDE
    assert said in observed(output, WIDE, bad)
    more = output.clone()
    more[tuple(torch.nonzero(bad)[0])] *= 1 + 2.0**-20
    few = bad & (torch.arange(64)[:, None] == 3) & (torch.arange(32) < 20)
    narrow = WIDE.bfloat16().float()
    for made, due, where in ((more, WIDE, bad), (output, WIDE, few), (narrow * 2, narrow, narrow != 0)):
        assert not any("float16" in each for each in observed(made, due, where))


def test_rows_alike_are_of_no_other_row() -> None:
    """Two right rows have the bits of the failing ones: which is meant is not known."""
    right = RIGHT.clone()
    right[3] = right[4]
    output = right.clone()
    output[[7, 8]] = right[[3, 5]]
    bad = output.view(torch.int16) != right.view(torch.int16)
    assert not any("another" in each for each in observed(output, right, bad))


def test_one_number_among_nan_is_not_all_nan() -> None:
    output = torch.full_like(RIGHT, torch.nan)
    output[0, 0] = 3.0
    said = observed(output, RIGHT, torch.ones_like(RIGHT, dtype=torch.bool))
    assert not any("every failing element" in each for each in said)


def test_near_results_prove_no_unit_in_the_last_place() -> None:
    output = RIGHT.clone()
    steps(1)(output)
    bad = torch.ones_like(RIGHT, dtype=torch.bool)
    assert observed(output, RIGHT, bad) and not observed(output, RIGHT, bad, near=True)


def test_a_verdict_says_it_where_nothing_explains_it() -> None:
    """A constant ratio of some rows; of the whole output it is a name. An output that a known fault explains says
    nothing more."""
    case = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=8,n=128,k=512/family=randn/seed=1")
    inputs = case.inputs()
    options: dict[str, Any] = case.call_options()
    right = by_name(get("fp8_gemm_nt").predict(inputs, numerics="sm90.promote128", **options))["out"]
    whole = oracle.judge("fp8_gemm_nt", inputs, right * 1.375, **options)
    assert whole.explained_by == ("every failing element is 1.375 times the right result",) and whole.observed == ()
    wrong = torch.cat([right[:3] * 1.375, right[3:]])
    verdict = oracle.judge("fp8_gemm_nt", inputs, wrong, **options)
    assert verdict.explained_by == () and "every failing element is 1.375 times the right result" in verdict.observed
    with pytest.raises(NonconformanceError, match="no known fault explains it: every failing element is 1.375"):
        verdict.raise_for_status()
    record = json.loads(json.dumps(verdict.to_json()))
    assert schema.problem(record, "verdict") is None and _verdict(record).observed == verdict.observed
    tail = {**inputs, "a": inputs["a"].clone()}
    tail["a"].view(torch.uint8)[:, 384:] = 0
    lost = oracle.judge("fp8_gemm_nt", inputs, by_name(get("fp8_gemm_nt").reference(tail, **options))["out"].bfloat16())
    assert lost.explained_by and lost.observed == () and "observed" not in lost.to_json()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([6, 7], ["only the tail of K is wrong, from k = 768 on"]),
        ([4, 5, 6, 7], ["only the tail of K is wrong, from k = 512 on"]),
        ([3, 4, 5, 6, 7], []),  # more than half
        ([5, 7], []),
        ([6], []),
        ([], []),
    ],
)
def test_the_tail_of_k(wrong: list[int], said: list[str]) -> None:
    """Blocks of 128 of which these enter with half their weight, in one of two tiles of columns."""
    right = Factors(torch.ones(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64), 128)
    factor = right.factor.clone()
    factor[1, wrong] = 0.5
    assert tail_of_k([right, Factors(factor, right.error, 128)]) == said
    assert tail_of_k([]) == []
