"""Indexer logits against float64: windows, pages, both ranks of context lengths."""

import pytest
import torch

from kernels import logits, mx_logits
from kernels.errors import DtypeError, InputError, OptionError, ShapeError, ValueRangeError

H, D = 4, 32
INF = float("-inf")


def score(q, k, w) -> torch.Tensor:
    """``sum_h w[m,h] relu(<q[m,h], k[n]>)`` in float64."""
    return (torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu() * w.double().unsqueeze(-1)).sum(1)


class TestMqa:
    """A contiguous key sequence."""

    @staticmethod
    def parts(make, m: int = 5, n: int = 9):
        return make.codes(m, H, D), (make.codes(n, D, seed=1), make.scales(n)), torch.randn(m, H)

    def test_float64(self, make) -> None:
        q, kv, w = self.parts(make)
        ks = torch.tensor([0, 2, 0, 8, 4], dtype=torch.int32)
        ke = torch.tensor([9, 5, 0, 9, 4], dtype=torch.int32)
        out = logits.fp8_mqa_logits(q, kv, w, ks, ke)
        expected = score(q, kv[0], w) * kv[1].double()
        n = torch.arange(9)
        inside = (n >= ks.unsqueeze(1)) & (n < ke.unsqueeze(1))
        assert (out[~inside] == INF).all() and (~inside).any()
        assert make.error(out[inside], expected[inside]) < 1e-6

    def test_uncleaned_values_inside_agree(self, make) -> None:
        q, kv, w = self.parts(make)
        ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 4, dtype=torch.int32)
        raw = logits.fp8_mqa_logits(q, kv, w, ks, ke, False)
        assert torch.equal(raw[:, :4], logits.fp8_mqa_logits(q, kv, w, ks, ke)[:, :4])

    @pytest.mark.parametrize(("low", "high"), [(-1, 4), (0, 10)])
    def test_windows(self, make, low: int, high: int) -> None:
        q, kv, w = self.parts(make)
        with pytest.raises(ValueRangeError, match="N=9"):
            logits.fp8_mqa_logits(
                q, kv, w, torch.full((5,), low, dtype=torch.int32), torch.full((5,), high, dtype=torch.int32)
            )


class TestPaged:
    """Pages of 64 tokens: the codes first, then the scales."""

    @staticmethod
    def parts(make, next_n: int, lens: tuple[int, ...]):
        blocks = 8
        k, scale = make.codes(blocks, 64, D, seed=1), make.scales(blocks, 64)
        flat = [k.view(torch.uint8).reshape(blocks, -1), scale.view(torch.uint8)]
        cache = torch.cat(flat, dim=1).view(blocks, 64, 1, D + 4)
        tables = torch.tensor([[5, 0, 3], [1, 7, 2]], dtype=torch.int32)[: len(lens)]
        q, w = make.codes(len(lens), next_n, H, D), torch.randn(len(lens) * next_n, H)
        return q, cache, w, torch.tensor(lens, dtype=torch.int32), tables, k, scale

    @pytest.mark.parametrize("next_n", [1, 2])
    def test_float64(self, make, next_n: int) -> None:
        lens = (130, 64)
        q, cache, w, context, tables, k, scale = self.parts(make, next_n, lens)
        schedule = logits.get_paged_mqa_logits_metadata(context, 64, 4)
        out = logits.fp8_paged_mqa_logits(q, cache, w, context, tables, schedule, 192)
        assert out.shape == (2 * next_n, 192)
        for b, length in enumerate(lens):
            keys = k.double()[tables[b].long()].reshape(-1, D)
            scales = scale[tables[b].long()].reshape(-1).double()
            for t in range(next_n):
                seen, at = length - next_n + t + 1, b * next_n + t
                expected = (score(q[b, t : t + 1], keys, w[at : at + 1]) * scales)[0, :seen]
                assert make.error(out[at, :seen], expected) < 1e-6
                assert (out[at, seen:] == INF).all()

    def test_both_ranks_of_lengths(self, make) -> None:
        q, cache, w, context, tables, _, _ = self.parts(make, 2, (130, 64))
        two = context.unsqueeze(1) + torch.tensor([-1, 0], dtype=torch.int32)
        schedule = logits.get_paged_mqa_logits_metadata(two, 64, 4)
        assert torch.equal(schedule, logits.get_paged_mqa_logits_metadata(context, 64, 4))
        one = logits.fp8_paged_mqa_logits(q, cache, w, context, tables, schedule, 192)
        assert torch.equal(one, logits.fp8_paged_mqa_logits(q, cache, w, two, tables, schedule, 192))

    @pytest.mark.parametrize(
        ("lens", "longest", "page"),
        [((200, 1), 192, 0), ((64, 1), 32, 0), ((64, -1), 192, 0), ((64, 64), 192, 8), ((64, 64), 192, -1)],
    )
    def test_values(self, make, lens: tuple[int, ...], longest: int, page: int) -> None:
        q, cache, w, context, tables, _, _ = self.parts(make, 1, lens)
        tables = tables.clone()
        tables[0, 0] = page
        schedule = torch.zeros(5, 2, dtype=torch.int32)
        with pytest.raises(ValueRangeError):
            logits.fp8_paged_mqa_logits(q, cache, w, context, tables, schedule, longest)

    def test_a_cache_of_another_width(self, make) -> None:
        q, cache, w, context, tables, _, _ = self.parts(make, 1, (64, 64))
        with pytest.raises(ShapeError, match="D \\+ 4"):
            logits.fp8_paged_mqa_logits(
                q, cache[..., :-1], w, context, tables, torch.zeros(5, 2, dtype=torch.int32), 192
            )

    @pytest.mark.parametrize("sms", [1, 4, 132])
    @pytest.mark.parametrize("lens", [(1,), (256, 257, 5000, 1), (300,) * 40])
    def test_schedule_covers_the_work(self, sms: int, lens: tuple[int, ...]) -> None:
        """Starts are ordered, cover every 256-token piece once, and end at the end."""
        schedule = logits.get_paged_mqa_logits_metadata(torch.tensor(lens, dtype=torch.int32), 64, sms)
        assert schedule.shape == (sms + 1, 2) and schedule.dtype == torch.int32
        pieces = [-(-n // 256) for n in lens]
        before = [sum(pieces[:i]) for i in range(len(lens) + 1)]
        starts = [before[b] + j for b, j in schedule.tolist()]
        assert starts[0] == 0 and starts[-1] == sum(pieces)
        sizes = [y - x for x, y in zip(starts, starts[1:], strict=False)]
        assert max(sizes) - min(sizes) <= 1


class TestFp4:
    """E2M1 codes with words of E8M0 scales: the paged form is the plain one; without a scale of q it is FP8's."""

    @staticmethod
    def parts(m: int = 4, n: int = 128, heads: int = H):
        g = torch.Generator().manual_seed(5)
        q, k = (torch.randint(0, 256, shape, generator=g, dtype=torch.uint8) for shape in ((m, heads, 32), (n, 32)))
        words = (torch.randint(120, 134, (*x.shape[:-1], 4), generator=g, dtype=torch.uint8) for x in (q, k))
        q_sf, k_sf = (x.view(torch.int32)[..., 0] for x in words)
        ks, ke = (torch.full((m,), x, dtype=torch.int32) for x in (3, 100))
        return (q, q_sf), (k, k_sf), torch.randn(m, heads, generator=g), ks, ke

    def test_pages(self) -> None:
        q, (k, k_sf), w, ks, ke = self.parts()
        plain = mx_logits.fp8_fp4_mqa_logits(q, (k.view(torch.int8), k_sf), w, ks * 0, ke)
        compact = mx_logits.fp8_fp4_mqa_logits(q, (k, k_sf), w, ks, ke, False, 97)
        assert torch.equal(compact, plain[:, 3:100])
        flat = torch.cat([x.contiguous().view(torch.uint8).reshape(2, -1) for x in (k, k_sf)], dim=1)
        cache, pages = flat.reshape(2, 64, 1, 36)[[1, 0]], torch.tensor([[1, 0]] * 4, dtype=torch.int32)
        asked = tuple(x.unsqueeze(1) for x in q)
        out = mx_logits.fp8_fp4_paged_mqa_logits(asked, cache.contiguous(), w, ke, pages, pages, 128)
        assert torch.equal(out, plain) and bool((plain[:, 100:] == INF).all())
        swapped = mx_logits.fp8_fp4_paged_mqa_logits(asked, cache.contiguous(), w, ke, pages.flip(1), pages, 128)
        assert not torch.equal(swapped, plain)

    def test_fp8(self, make) -> None:
        q, kv, w = TestMqa.parts(make)
        ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 4, dtype=torch.int32)
        out = mx_logits.fp8_fp4_mqa_logits((q, None), kv, w, ks, ke)
        assert torch.equal(out, logits.fp8_mqa_logits(q, kv, w, ks, ke))

    def test_bad_calls(self) -> None:
        q, k, w, ks, ke = self.parts()
        for error, message, call in (
            (InputError, "q must be a tuple", (q[:1], k, w, ks, ke)),
            (DtypeError, "q_sf", ((q[0], q[1].float()), k, w, ks, ke)),
            (ShapeError, "D=40", ((q[0][..., :20], q[1]), k, w, ks, ke)),
            (OptionError, "max_seqlen_k=5", (q, k, w, ks, ke, True, 5)),
            (OptionError, "weights are bfloat16", (q, k, w.bfloat16(), ks, ke)),
            (ValueRangeError, "N=128", (q, k, w, ks, ke + 29)),
        ):
            with pytest.raises(error, match=message):
                mx_logits.fp8_fp4_mqa_logits(*call)
