"""Grouped products: real rows against float64, padding untouched, values of the index tensors checked."""

import pytest
import torch

from kernels import grouped
from kernels.errors import OptionError, ShapeError, ValueRangeError

G, N, K = 3, 192, 256


def weights(make):
    return make.codes(G, N, K, seed=1), make.scales(G, 2, 2, seed=1)


class TestContiguous:
    """Rows sorted by expert, -1 padding."""

    INDICES = (0, 0, -1, 2, 2, 2, -1, -1)

    def test_float64(self, make) -> None:
        m = len(self.INDICES)
        a, sa, (b, sb) = make.codes(m, K), make.scales(m, 2), weights(make)
        indices = torch.tensor(self.INDICES, dtype=torch.int32)
        out = torch.full((m, N), 7.0, dtype=torch.float32)
        grouped.m_grouped_fp8_gemm_nt_contiguous((a, sa), (b, sb), out, indices)
        for row, group in enumerate(self.INDICES):
            if group < 0:
                assert (out[row] == 7.0).all()
            else:
                expected = make.product(a[row : row + 1], sa[row : row + 1], b[group], sb[group])
                assert make.error(out[row : row + 1], expected) < 1e-6

    def test_padding_never_reaches_a_real_row(self, make) -> None:
        m = len(self.INDICES)
        a, sa, (b, sb) = make.codes(m, K), make.scales(m, 2), weights(make)
        indices = torch.tensor(self.INDICES, dtype=torch.int32)
        plain, poisoned = torch.zeros(m, N), torch.zeros(m, N)
        grouped.m_grouped_fp8_gemm_nt_contiguous((a, sa), (b, sb), plain, indices)
        a = a.clone()
        a.view(torch.uint8)[indices < 0] = 0x7F
        sa[indices < 0] = float("nan")
        grouped.m_grouped_fp8_gemm_nt_contiguous((a, sa), (b, sb), poisoned, indices)
        assert torch.equal(plain, poisoned)

    @pytest.mark.parametrize("bad", [-2, G, 10**6])
    def test_values(self, make, bad: int) -> None:
        a, sa, (b, sb) = make.codes(2, K), make.scales(2, 2), weights(make)
        with pytest.raises(ValueRangeError, match=str(bad)):
            indices = torch.tensor([0, bad], dtype=torch.int32)
            grouped.m_grouped_fp8_gemm_nt_contiguous((a, sa), (b, sb), torch.zeros(2, N), indices)

    @pytest.mark.parametrize(
        ("tiles", "good"),
        [
            ([[0, 0, -1, -1], [1, 1, 1, 1]], True),
            ([[0, 0, 1, -1], [1, -1, -1, -1]], False),
            ([[-1, -1, -1, -1], [2, 2, 2, -1]], True),
            ([[-1, 0, 0, 0]], False),
        ],
    )
    def test_a_tile_holds_one_expert(self, tiles: list[list[int]], good: bool) -> None:
        indices = torch.tensor(tiles, dtype=torch.int32).flatten()
        if good:
            grouped._check_indices(True, indices, G, 4)
        else:
            with pytest.raises(ValueRangeError, match="two experts"):
                grouped._check_indices(True, indices, G, 4)

    def test_alignment(self) -> None:
        assert grouped.get_mk_alignment_for_contiguous_layout() == 128


class TestMasked:
    """A row count per group."""

    @pytest.mark.parametrize("counts", [[0, 5, 3], [5, 5, 5], [0, 0, 0]])
    def test_float64(self, make, counts: list[int]) -> None:
        a, sa, (b, sb) = make.codes(G, 5, K), make.scales(G, 5, 2), weights(make)
        out = torch.full((G, 5, N), 7.0)
        rows = torch.tensor(counts, dtype=torch.int32)
        grouped.fp8_m_grouped_gemm_nt_masked((a, sa), (b, sb), out, rows, 3)
        for g, count in enumerate(counts):
            assert (out[g, count:] == 7.0).all()
            if count:
                expected = make.product(a[g, :count], sa[g, :count], b[g], sb[g])
                assert make.error(out[g, :count], expected) < 1e-6

    def test_values(self, make) -> None:
        a, sa, (b, sb) = make.codes(G, 5, K), make.scales(G, 5, 2), weights(make)
        for counts in ([0, 6, 0], [-1, 0, 0]):
            with pytest.raises(ValueRangeError, match=r"\[0, 5\]"):
                rows = torch.tensor(counts, dtype=torch.int32)
                grouped.fp8_m_grouped_gemm_nt_masked((a, sa), (b, sb), torch.zeros(G, 5, N), rows, 3)
        with pytest.raises(OptionError, match="expected_m"):
            rows = torch.zeros(G, dtype=torch.int32)
            grouped.fp8_m_grouped_gemm_nt_masked((a, sa), (b, sb), torch.zeros(G, 5, N), rows, 0)


class TestScaledGrouped:
    """Scales per token and per channel, no alignment."""

    def test_float64(self, make) -> None:
        ends = [2, 2, 7]
        a, b = make.codes(8, K), make.codes(G, N, K, seed=1)
        sa, sb = make.scales(8, 1), make.scales(G, N, seed=1)
        out = grouped.scaled_grouped_mm(a, b, sa, sb, torch.tensor(ends, dtype=torch.int32), torch.float32)
        start = 0
        for g, end in enumerate(ends):
            expected = a[start:end].double() @ b[g].double().t() * sa[start:end].double() * sb[g].double()
            if end > start:
                assert make.error(out[start:end], expected) < 1e-6
            start = end

    @pytest.mark.parametrize("ends", [[3, 2, 8], [0, 4, 9], [-1, 4, 8]])
    def test_values(self, make, ends: list[int]) -> None:
        with pytest.raises(ValueRangeError, match="non-decreasing"):
            grouped.scaled_grouped_mm(
                make.codes(8, K),
                make.codes(G, N, K),
                make.scales(8, 1),
                make.scales(G, N),
                torch.tensor(ends, dtype=torch.int32),
            )

    def test_groups_must_agree(self, make) -> None:
        with pytest.raises(ShapeError):
            grouped.scaled_grouped_mm(
                make.codes(8, K),
                make.codes(G, N, 128),
                make.scales(8, 1),
                make.scales(G, N),
                torch.zeros(G, dtype=torch.int32),
            )
