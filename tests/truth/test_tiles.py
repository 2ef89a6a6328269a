"""Scales of several matrices in tiles: every place by its index, who owns the padding, and the production twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels.errors import KernelError
from oracle import judge
from oracle.errors import InputError, OptionError, ShapeError
from oracle.routines import cases, get, profiles
from oracle.routines.layouts.cases import POISON, poison
from oracle.truth import layout, tiles
from oracle.verdict.compare import Status

extents = st.sampled_from((0, 1, 127, 128, 129, 255, 256)) | st.integers(0, 300)
"""Half of them at an edge of a tile of 128 rows, so that lists of a few are aligned, not, and both."""
sizes = st.lists(extents, min_size=1, max_size=5).filter(any)


def places(out: Tensor, numbers: int) -> Tensor:
    """Where each number from 1 lies in an int64 memory made of three layouts of its digits, exactly once."""
    where = torch.nonzero(out).flatten()
    assert sorted(out[where].tolist()) == list(range(1, numbers + 1)), "no bijection"
    found = torch.empty(numbers, dtype=torch.int64)
    found[out[where] - 1] = where
    return found


def numbered(make: object, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The layout of the numbers of elements, one byte at a time: places of all, and the memory."""
    count = shape[0] * shape[1]
    numbers = torch.arange(1, count + 1).reshape(shape)
    digits = [make((numbers >> 8 * i & 0xFF).to(torch.uint8)).to(torch.int64) << 8 * i for i in range(3)]  # type: ignore[operator]
    memory = digits[0] | digits[1] | digits[2]
    return places(memory, count), memory


def tiled(m: int, c: int, columns: int) -> int:
    """The published formula of one 128x4 matrix (cuBLAS)."""
    return (m // 128 * -(-columns // 4) + c // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + c % 4


def experts(rows: list[int], placement: str) -> tuple[Tensor, Tensor, int]:
    """First rows, sizes, and the capacity, masked experts of equal room."""
    if placement == "masked":
        capacity = max(rows)
        return torch.arange(len(rows)) * capacity, torch.tensor(rows), capacity
    ends = torch.cumsum(torch.tensor(rows), 0)
    return ends - torch.tensor(rows), torch.tensor(rows), 0


class TestExperts:
    """``floor((R + 127 G) / 128) 128`` rows; tiles start as each library has them."""

    @given(sizes, st.integers(1, 9), st.sampled_from(tiles.PLACEMENTS))
    @example([128, 256, 1], 3, "flashinfer")
    @example([127, 129, 128], 5, "flashinfer")
    def test_every_place_by_its_index(self, rows: list[int], columns: int, placement: str) -> None:
        first, counts, capacity = experts(rows, placement)
        total = capacity * len(rows) if placement == "masked" else sum(rows)
        owned = torch.zeros(total, dtype=torch.bool)
        for p, m in zip(first.tolist(), rows, strict=True):
            owned[p : p + m] = True
        numbers = torch.zeros(total, columns, dtype=torch.int64)
        numbers[owned] = torch.arange(1, int(owned.sum()) * columns + 1).reshape(-1, columns)
        memory = torch.zeros((), dtype=torch.int64)
        for i in range(3):
            digit = (numbers >> 8 * i & 0xFF).to(torch.uint8)
            made = tiles.swizzle_scale_experts(digit, first, counts, placement, capacity)
            memory = memory | made.to(torch.int64) << 8 * i
        found = places(memory, int(owned.sum()) * columns).tolist()
        behind, n = 0, 0
        for i, (p, m) in enumerate(zip(first.tolist(), rows, strict=True)):
            room = -(-capacity // 128) * 128
            start = {"tight": behind, "flashinfer": (p + 127 * i) // 128 * 128, "masked": i * room}[placement]
            behind += -(-m // 128) * 128
            for r in range(m):
                for c in range(columns):
                    assert found[n] == tiled(start + r, c, columns)
                    n += 1

    def test_the_published_starts(self) -> None:
        """m_indptr 0 4 132 132 260: FlashInfer 0 128 384 512 of 768 rows, torchao 0 128 256 256."""
        first, rows = [0, 4, 132, 132], [4, 128, 0, 128]
        assert tiles.expert_starts(first, rows, "flashinfer") == [0, 128, 384, 512]
        assert tiles.expert_starts(first, rows, "tight") == [0, 128, 256, 256]
        assert tiles.expert_starts(first, rows, "masked", 130) == [0, 256, 512, 768]
        scale = torch.ones(260, 4, dtype=torch.uint8)
        made = tiles.swizzle_scale_experts(scale, torch.tensor(first), torch.tensor(rows))
        assert made.numel() == 768 * 4

    @pytest.mark.parametrize("placement", tiles.PLACEMENTS)
    @given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def test_experts_of_whole_tiles(self, placement: str, heights: list[int]) -> None:
        """Each is where its rows are, and no row more; FlashInfer's from the third on a tile further each."""
        rows = [128 * (max(heights) if placement == "masked" else h) for h in heights]
        first, counts, capacity = experts(rows, placement)
        later = [128 * max(i - 1, 0) if placement == "flashinfer" else 0 for i in range(len(rows))]
        starts = tiles.expert_starts(first.tolist(), rows, placement, capacity)
        assert starts == [p + more for p, more in zip(first.tolist(), later, strict=True)]
        made = tiles.swizzle_scale_experts(
            torch.ones(sum(rows), 4, dtype=torch.uint8), first, counts, placement, capacity
        )
        assert made.numel() == 4 * (sum(rows) + (0 if placement == "masked" else 128 * (len(rows) - 1)))
        assert int(made.sum()) == 4 * sum(rows)

    @pytest.mark.parametrize("placement", ["tight", "flashinfer"])
    @given(sizes)
    def test_experts_have_tiles_of_their_own_within_the_memory(self, placement: str, rows: list[int]) -> None:
        """Each starts at a tile, behind the tiles of the one before, and the last ends in what is allocated."""
        first, counts, _ = experts(rows, placement)
        starts = tiles.expert_starts(first.tolist(), rows, placement)
        ends = [at + -(-m // 128) * 128 for at, m in zip(starts, rows, strict=True)]
        assert all(at % 128 == 0 for at in starts) and starts[0] == 0
        assert all(end <= at for end, at, m in zip(ends, starts[1:], rows[1:], strict=False) if m)
        height = tiles.swizzle_scale_experts(torch.zeros(sum(rows), 1, dtype=torch.uint8), first, counts, placement)
        assert max(end for end, m in zip(ends, rows, strict=True) if m) * 4 <= height.numel()

    @pytest.mark.parametrize("placement", tiles.PLACEMENTS)
    def test_padding_is_nobodys(self, placement: str) -> None:
        """It may hold NaN, infinity and large bytes; a scale in its place may not be one of them instead."""
        case = cases.parse(
            f"swizzle_scale_experts/u8/-/m=130,c=7,g=3/placement={placement}/family=randn/seed=1"
            if placement != "tight"
            else "swizzle_scale_experts/u8/-/m=130,c=7,g=3/family=randn/seed=1"
        )
        inputs, options = case.inputs(), case.call_options()
        contract = get("swizzle_scale_experts")
        right = contract.reference(inputs, **options)
        assert isinstance(right, Tensor)
        scale, first, rows = (inputs[n] for n in ("scale", "first", "rows"))
        source, offsets, size = tiles.expert_offsets(scale, first, rows, placement, int(str(options["capacity"])))
        out = poison(size).clone()
        out[offsets] = inputs["scale"][source]
        assert contract.judge(inputs, out, **options).status is Status.PASSED
        out[offsets[-1, -1]] ^= 0xFF
        assert contract.judge(inputs, out, **options).status is Status.FAILED

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"first": torch.tensor([0, 3])}, InputError),
            ({"rows": torch.tensor([4, 7])}, InputError),
            ({"rows": torch.tensor([-1, 6])}, InputError),
            ({"first": torch.tensor([-1, 4])}, InputError),
            ({"rows": torch.tensor([4])}, ShapeError),
            ({"placement": "loose"}, OptionError),
            ({"placement": "masked", "capacity": 3}, InputError),
            ({"placement": "masked", "capacity": 4}, InputError),
            ({"placement": "masked", "capacity": 6}, InputError),
            ({"placement": "masked", "rows": torch.tensor([1, 1]), "first": torch.tensor([0, 1])}, InputError),
            ({"scale": torch.zeros(10, dtype=torch.uint8)}, ShapeError),
            ({"first": torch.zeros(0, dtype=torch.int64), "rows": torch.zeros(0, dtype=torch.int64)}, ShapeError),
            ({"scale": torch.zeros(10, 2)}, ShapeError),
        ],
    )
    def test_wrong_calls(self, change: dict[str, object], error: type[Exception]) -> None:
        scale = torch.zeros(10, 2, dtype=torch.uint8)
        call = {"scale": scale, "first": torch.tensor([0, 4]), "rows": torch.tensor([4, 6])}
        for place in (tiles.swizzle_scale_experts, tiles.expert_offsets):
            with pytest.raises(error):
                place(**({"placement": "tight"} | call | change))  # type: ignore[arg-type]


class TestBlocked:
    """torch's form: zeros in the padding, which the inverse does not read."""

    @given(extents.filter(bool), st.integers(1, 9))
    @example(128, 4)
    @example(129, 5)
    def test_every_place_by_its_index(self, m: int, c: int) -> None:
        found, memory = numbered(tiles.to_blocked, (m, c))
        assert found.tolist() == [tiled(i // c, i % c, c) for i in range(m * c)]
        assert memory.numel() == -(-m // 128) * 128 * -(-c // 4) * 4

    @pytest.mark.parametrize("tile", list(layout.HEIGHTS))
    @pytest.mark.parametrize("byte", POISON.tolist())
    def test_padding_is_not_read(self, tile: str, byte: int) -> None:
        x = torch.arange(2 * 130 * 5).remainder(251).to(torch.uint8).reshape(2, 130, 5)
        memory = layout.swizzle_scale(x, tile=tile, fill=byte)
        assert torch.equal(tiles.from_blocked(memory, 130, 5, tile), x)
        assert torch.equal(kernels.from_blocked(memory, 130, 5, tile), x)

    @pytest.mark.parametrize("name", ["to_blocked", "to_blocked_k_groups"])
    def test_padding_that_is_owned_is_zero(self, name: str) -> None:
        """A right layout with one byte of padding left as it was is refused."""
        x = {"scale": torch.full((5, 6), 7, dtype=torch.uint8)}
        x["scale"][0, 0] = 1
        if name == "to_blocked_k_groups":
            x["ends"] = torch.tensor([2, 6])
        right = get(name).reference(x)
        assert isinstance(right, Tensor)
        for byte in POISON.tolist():
            wrong = right.clone()
            wrong[int(torch.nonzero(right == 0).flatten()[-1])] = byte
            assert judge(name, x, wrong).status is Status.FAILED
        assert judge(name, x, right).status is Status.PASSED


class TestGroupsAlongK:
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), extents.filter(bool))
    @example([4, 0, 8, 1], 128)
    @example([3, 5], 129)
    def test_every_place_by_its_index(self, widths: list[int], m: int) -> None:
        ends = torch.cumsum(torch.tensor(widths), 0)
        c = int(ends[-1])
        found, memory = numbered(lambda x: tiles.to_blocked_k_groups(x, ends), (m, c))
        height = -(-m // 128) * 128
        expected, base, first = {}, 0, 0
        for width in widths:
            for i in range(m):
                for j in range(width):
                    expected[i * c + first + j] = base + tiled(i, j, width)
            base, first = base + height * -(-width // 4) * 4, first + width
        assert found.tolist() == [expected[i] for i in range(m * c)]
        assert memory.numel() == height * (c + 4 * len(widths))

    @given(st.lists(st.integers(0, 700), min_size=1, max_size=5), st.sampled_from(tiles.GRANULARITIES))
    @example([512, 128, 0], 128)
    @example([513, 127, 129], 128)
    def test_packed_words(self, ks: list[int], gran: int) -> None:
        """Byte ``i`` of word ``w`` is block ``4 w + i`` of its group; bytes behind the last are 0."""
        counts = [-(-k // gran) for k in ks]
        exponents = torch.arange(sum(counts) * 4).remainder(250).add(1).reshape(-1, 4)
        scale = torch.exp2((exponents - 127).double()).float()
        made = tiles.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scale, torch.tensor(ks), gran)
        again = kernels.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scale, ks, gran)
        assert torch.equal(made, again) and made.shape[0] == sum(-(-n // 4) for n in counts)
        word, first = 0, 0
        for count in counts:
            for start in range(0, count, 4):
                for column in range(4):
                    found = [int(made[word, column]) >> 8 * i & 0xFF for i in range(4)]
                    due = [int(exponents[first + start + i, column]) if start + i < count else 0 for i in range(4)]
                    assert found == due
                word += 1
            first += count

    @pytest.mark.parametrize(
        ("shape", "dtype", "ends", "error"),
        [
            ((5, 6), torch.float32, [6], ShapeError),
            ((6,), torch.uint8, [6], ShapeError),
            ((5, 6), torch.uint8, [4, 2, 6], InputError),
            ((5, 6), torch.uint8, [2, 5], InputError),
            ((5, 6), torch.uint8, [2, 7], InputError),
        ],
    )
    def test_wrong_calls(self, shape: tuple[int, ...], dtype: torch.dtype, ends: list[int], error: type) -> None:
        with pytest.raises(error):
            tiles.to_blocked_k_groups(torch.zeros(shape, dtype=dtype), torch.tensor(ends))

    @pytest.mark.parametrize("shape", [(5, 4), (4, 6), (4,), (1, 4, 4)])
    def test_scales_that_are_not_those_of_the_groups(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ShapeError):
            tiles.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(shape), torch.tensor([512]))

    def test_no_power_of_two(self) -> None:
        scale = torch.full((4, 4), 3.0)
        with pytest.raises(InputError):
            tiles.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scale, torch.tensor([512]))
        with pytest.raises(KernelError):
            kernels.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(scale, [512])


class TestShuffled:
    """FlashInfer's shuffle_matrix_sf_a: the rows as those of the weight, then tiles."""

    @pytest.mark.parametrize("tile", [128, 64])
    @pytest.mark.parametrize(("m", "c"), [(128, 4), (256, 7)])
    def test_rows_go_with_those_of_the_weight(self, m: int, c: int, tile: int) -> None:
        scale = torch.arange(m * c).remainder(251).to(torch.uint8).reshape(m, c)
        weight = layout.shuffle_matrix_a(scale, tile)
        assert torch.equal(tiles.shuffle_matrix_sf_a(scale, tile), tiles.to_blocked(weight))
        if tile == 128:
            assert torch.equal(tiles.shuffle_matrix_sf_a(scale), tiles.to_blocked(weight))

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [((127, 4), torch.uint8), ((160, 4), torch.uint8), ((128,), torch.uint8), ((128, 4), torch.int16)],
    )
    def test_wrong_calls(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        with pytest.raises(ShapeError):
            tiles.shuffle_matrix_sf_a(torch.zeros(shape, dtype=dtype))


TWINS = ("to_blocked", "from_blocked", "swizzle_scale_experts", "to_blocked_k_groups")


@pytest.mark.parametrize("name", TWINS)
def test_the_twins_conform(name: str) -> None:
    """On every quick case; where nobody owns the padding the twin writes zeros."""
    for case in map(cases.parse, map(str, profiles.cases(name, "quick"))):
        inputs, options = case.inputs(), case.call_options()
        out = getattr(kernels, name)(**inputs, **options)
        assert judge(name, inputs, out, **options).status in (Status.PASSED, Status.MISTRUSTED)
        right = get(name).reference(inputs, **options)
        assert isinstance(right, Tensor) and torch.equal(out, right)


@given(sizes, st.integers(1, 9), st.sampled_from(tiles.PLACEMENTS))
@example([128, 256, 1], 4, "flashinfer")
def test_twins_of_experts(rows: list[int], columns: int, placement: str) -> None:
    first, counts, capacity = experts(rows, placement)
    total = capacity * len(rows) if placement == "masked" else sum(rows)
    scale = torch.randint(0, 256, (total, columns), dtype=torch.uint8)
    given = (scale, first, counts, placement, capacity)
    assert torch.equal(kernels.swizzle_scale_experts(*given), tiles.swizzle_scale_experts(*given))
