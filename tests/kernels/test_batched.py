"""Runs of rows moved to aligned places, summands in place, and values that no kernel may see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import batched, grouped
from kernels.backends import deep_gemm
from kernels.errors import DtypeError, LayoutError, OptionError, ShapeError, ValueRangeError

CODES = torch.float8_e4m3fn


class TestAlignedRuns:
    """Every run begins at a multiple; every row of a run is found again; nobody else's place is taken."""

    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=5), st.sampled_from([1, 4, 8])
    )
    def test_there_and_back(self, spans: list[tuple[int, int]], unit: int) -> None:
        """Spans as (gap before, rows)."""
        starts, ends, at = [], [], 0
        for gap, rows in spans:
            starts.append(at + gap)
            at = starts[-1] + rows
            ends.append(at)
        m = at + 2
        pair = (torch.tensor(x, dtype=torch.int32) for x in (starts, ends))
        source, index, place = batched.aligned_runs(*pair, m, unit)
        owner = torch.full((m,), -1, dtype=torch.int32)
        for g, (start, end) in enumerate(zip(starts, ends, strict=True)):
            owner[start:end] = g
        real = owner >= 0
        assert torch.equal(index[place[real]], owner[real]) and torch.equal(source[place[real]], torch.arange(m)[real])
        assert int((index >= 0).sum()) == int(real.sum()) and bool((place[~real] == len(index)).all())
        grouped._check_indices(True, index, len(spans), unit)

    def test_runs_that_overlap_are_refused(self) -> None:
        a, b = torch.zeros(4, 128).to(CODES), torch.zeros(2, 8, 128).to(CODES)
        for borders in ([0, 3, 2], [0, 2, 5], [-1, 2, 4]):
            with pytest.raises(ValueRangeError, match="must ascend from 0 to at most M=4"):
                given = a, b, torch.ones(4, 1), torch.ones(2, 1, 1), torch.tensor(borders, dtype=torch.int32)
                kernels.group_gemm_fp8_nt_groupwise(*given)


class TestSummand:
    """``c`` may be the output, which is then accumulated into."""

    def test_in_place(self) -> None:
        a, one = torch.ones(3, 128).to(CODES), torch.ones(3, 1)
        out = torch.full((3, 3), 2.0)
        kernels.fp8_gemm_nt_1d1d((a, one), (a, one), out, c=out)
        assert bool((out == 130).all())
        kernels.fp8_gemm_nt_1d1d((a, one), (a, one), out)
        assert bool((out == 128).all())

    def test_groups_accumulate_without_a_summand(self) -> None:
        a, one = torch.ones(3 * 128).to(CODES), torch.ones(3, 1)
        out = torch.full((2, 3, 3), 2.0)
        steps = torch.tensor([0, 128], dtype=torch.int32)
        kernels.k_grouped_fp8_gemm_nt_contiguous((a, one), (a, one), out, (0, 128), steps)
        assert bool((out[0] == 2).all()) and bool((out[1] == 130).all())

    def test_steps_that_are_no_block_are_refused(self) -> None:
        a, one = torch.ones(3 * 128).to(CODES), torch.ones(3, 1)
        with pytest.raises(OptionError, match="ks holds 100"):
            kernels.k_grouped_fp8_gemm_nt_contiguous(
                (a, one), (a, one), torch.zeros(2, 3, 3), (28, 100)[::-1], torch.tensor([28, 100], dtype=torch.int32)
            )


class TestDeepGemm:
    """What is done to the operands of the library."""

    def test_padding_of_scales_is_zero(self) -> None:
        """Rows behind the last are read by whole tiles."""
        ready = deep_gemm.lanes(torch.full((5, 3), 7.0))
        assert ready.stride() == (1, 8) and torch.equal(ready, torch.full((5, 3), 7.0))
        assert bool((ready.as_strided((3, 8), (8, 1))[:, 5:] == 0).all())

    def test_splits_that_it_cannot_store_are_refused(self) -> None:
        x = torch.zeros(1, 128)
        with pytest.raises(OptionError, match="DeepGEMM takes multiples of 64"):
            deep_gemm.skip_head_mid(x, x, x, x, x, (64, 32, 64), True)


class TestEquation:
    """One product of heads exists on sm90."""

    def test_others_are_refused(self) -> None:
        x = torch.zeros(1, 1, 128).to(CODES), torch.ones(1, 1, 1)
        with pytest.raises(OptionError, match="'bhd,hdr->bhr'; the FP8 product of heads"):
            kernels.fp8_einsum("bhd,hdr->bhr", x, x, torch.zeros(1, 1, 1))


@pytest.mark.parametrize(
    ("b", "error"),
    [
        (torch.zeros(4, 16, dtype=torch.int32), LayoutError),
        (torch.zeros(8, 4, dtype=torch.int32).t(), ShapeError),
        (torch.zeros(16, 3, dtype=torch.int32).t(), ShapeError),
        (torch.zeros(16, 4).t(), DtypeError),
    ],
)
def test_words_of_weights_that_cannot_be_reordered_are_refused(b: torch.Tensor, error: type[Exception]) -> None:
    right = torch.arange(64, dtype=torch.int32).view(16, 4).t()
    assert kernels.cutlass_encode_and_reorder_int4b(right).stride() == right.stride()
    with pytest.raises(error):
        kernels.cutlass_encode_and_reorder_int4b(b)
