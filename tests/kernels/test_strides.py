"""What libraries assert, or assume, of strides and of the place of the first element: a legal call has it all."""

from __future__ import annotations

import pytest
import torch

from kernels.backends import deep_gemm, flashinfer, torch_ops
from kernels.backends import eager as plain
from kernels.backends._host import lane_major


class TestStridesThatLibrariesCheck:
    """DeepGEMM's own assertions on strides, to the letter of its layout.hpp: a legal call passes them all."""

    @staticmethod
    def asserting(a, b, out, *_, **__) -> None:
        """Operands K-major on 16 bytes, groups dense, weight scales dense; extents of 1 are no excuse."""
        (x, xs), (w, ws) = a, b
        for t in (x, w, out):
            assert t.stride(-1) == 1 and t.stride(-2) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
            assert t.stride(-2) >= t.shape[-1]
            assert t.dim() == 2 or t.stride(0) == t.shape[1] * t.shape[2]
        assert (ws.stride(-1), ws.stride(-2)) == (1, ws.shape[-1])
        assert ws.dim() == 2 or ws.stride(0) == ws.shape[1] * ws.shape[2]
        assert xs.data_ptr() % 16 == 0
        out.fill_(3.0)

    @staticmethod
    def awkward(x: torch.Tensor, how: str) -> torch.Tensor:
        """The same values: cut from wider rows, one row further, or every second column."""
        wide = torch.zeros(*x.shape[:-2], x.shape[-2] + 1, 2 * x.shape[-1] + 6, dtype=torch.float32).to(x.dtype)
        rows = wide[..., : x.shape[-2], :] if how != "shifted" else wide[..., 1:, :]
        view = {"sliced": rows[..., : x.shape[-1]], "shifted": rows[..., 1 : x.shape[-1] + 1]}.get(
            how, rows[..., : 2 * x.shape[-1] : 2]
        )
        return view.copy_(x)

    @pytest.mark.parametrize("how", ["sliced", "shifted", "strided"])
    @pytest.mark.parametrize("m", [1, 4])
    @pytest.mark.parametrize("which", range(5))
    def test_dense(self, library, make, how: str, m: int, which: int) -> None:
        """One operand of five at a time; the twin, the library called as it is, refuses (unless it may take it)."""
        library.fp8_gemm_nt = self.asserting
        out = torch.zeros(m, 64, dtype=torch.bfloat16)
        given = [make.codes(m, 256), make.scales(m, 2), make.codes(64, 256), make.scales(1, 2), out]
        given[which] = self.awkward(given[which], how)
        x, xs, w, ws, out = given
        deep_gemm.gemm_nt(x, xs, w, ws, out, None, True)
        assert (out == 3).all()
        if which != 1 or how == "shifted":
            with pytest.raises(AssertionError):
                self.asserting((x, xs), (w, ws), out)

    @pytest.mark.parametrize("routine", ["grouped_contiguous", "grouped_masked"])
    @pytest.mark.parametrize("groups", [1, 2])
    @pytest.mark.parametrize("which", range(5))
    def test_groups(self, library, make, routine: str, groups: int, which: int) -> None:
        library.m_grouped_fp8_gemm_nt_contiguous = library.fp8_m_grouped_gemm_nt_masked = self.asserting
        masked = routine == "grouped_masked"
        lead = (groups, 128) if masked else (128,)
        out = torch.zeros(*lead, 64, dtype=torch.bfloat16)
        given = [
            make.codes(*lead, 256),
            make.scales(*lead, 2),
            make.codes(groups, 64, 256),
            make.scales(groups, 1, 2),
            out,
        ]
        given[which] = self.awkward(given[which], "sliced")
        *operands, out = given
        rows = torch.zeros(groups if masked else 128, dtype=torch.int32)
        getattr(deep_gemm, routine)(*operands, out, rows, *([4] if masked else []), True)
        assert (out == 3).all()

    def test_packed_scales_are_left_as_they_are(self, library, make) -> None:
        """int32 and column-major, as sm100 wants them."""
        seen = []
        library.fp8_gemm_nt = lambda a, b, out, **_: seen.append(b[1])
        packed = plain.pack_ue8m0(torch.ones(64, 8))
        out = torch.zeros(4, 64, dtype=torch.bfloat16)
        deep_gemm.gemm_nt(make.codes(4, 1024), torch.ones(4, 8), make.codes(64, 1024), packed, out, None, False)
        assert seen[0] is packed

    def test_what_is_ready_is_not_copied(self, library, make) -> None:
        seen = []
        library.fp8_gemm_nt = lambda a, b, out, **_: seen.extend([*a, *b, out])
        a, b, out = make.codes(4, 256), make.codes(64, 256), torch.zeros(4, 64, dtype=torch.bfloat16)
        xs, ws = plain.column_major(make.scales(4, 2), 4), make.scales(1, 2)
        deep_gemm.gemm_nt(a, xs, b, ws, out, None, True)
        assert all(x is y for x, y in zip(seen, (a, xs, b, ws, out), strict=True))


def test_deep_gemm_gets_a_weight_on_16_bytes(library, make) -> None:
    """Contiguous, but from an odd place on."""
    seen = []
    library.fp8_gemm_nt = lambda a, b, out, **_: seen.append(b[0])
    room = torch.zeros(64 * 256 + 1).to(torch.float8_e4m3fn)
    weight = room[1:].view(64, 256).copy_(make.codes(64, 256))
    assert weight.is_contiguous() and weight.data_ptr() % 16
    out = torch.zeros(4, 64, dtype=torch.bfloat16)
    deep_gemm.gemm_nt(make.codes(4, 256), make.scales(4, 2), weight, make.scales(1, 2), out, None, True)
    assert seen[0].data_ptr() % 16 == 0 and torch.equal(seen[0].float(), weight.float())


@pytest.mark.parametrize("release", ["0.6.18.post1", "9.9.9"])
def test_flashinfer_gets_operands_on_16_bytes(flashinfer_calls, make, release: str) -> None:
    """Rows of a buffer from an odd place on are contiguous, and still not what the kernel can load or store."""
    seen = flashinfer_calls(release)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(x.numel() + 1, dtype=torch.float32).to(x.dtype)
        return room[1:].view(x.t().shape).t().copy_(x) if x.stride(0) == 1 else room[1:].view(x.shape).copy_(x)

    a, b, ws = make.codes(4, 256), make.codes(64, 256), make.scales(1, 2)
    xs, out = plain.column_major(make.scales(4, 2), 4), torch.zeros(4, 64, dtype=torch.bfloat16)
    given = [shifted(x) for x in (a, xs, b, ws, out)]
    assert all(t.data_ptr() % 16 for t in given)
    operands = given[0], lane_major(given[1]), *given[2:]  # as the verb passes them
    assert flashinfer.blockscale_sm90(*operands) is given[4] and (given[4] == 2).all(), "copied into"
    x, _, out_given, scale, _ = seen[0]
    assert all(t.data_ptr() % 16 == 0 for t in (x, seen[0][1], scale, out_given))
    assert torch.equal(scale, xs.t()) and torch.equal(x.float(), a.float())
    flashinfer.blockscale_sm90(a, lane_major(xs), b, ws, out)
    assert all(seen[1][i] is x for i, x in ((0, a), (1, b), (2, out), (4, ws)))


@pytest.mark.parametrize(
    ("columns", "start", "copied"), [(64, 0, False), (80, 0, False), (80, 16, False), (72, 0, True), (80, 8, True)]
)
def test_torch_takes_pitches_in_sixteens(monkeypatch: pytest.MonkeyPatch, make, columns, start, copied) -> None:
    """cuBLASLt has no kernel for other pitches or places; a bias is read as dense memory."""
    seen = []

    def fake(a, b, *, out_dtype, scale_a, scale_b, bias):
        seen.extend([a, b, bias])
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", fake)
    a, b = (make.codes(n, columns)[:, start : start + 64] for n in (16, 32))
    bias, one = torch.arange(64, dtype=torch.bfloat16)[::2], torch.ones(1)
    torch_ops.scaled_mm(a, b.t(), one, one, bias, torch.bfloat16)
    left, right, added = seen
    assert torch.equal(left.float(), a.float()) and torch.equal(right.float(), b.t().float())
    assert (left is not a) == copied and (right.data_ptr() != b.data_ptr()) == copied
    assert added.is_contiguous() and torch.equal(added, bias)
