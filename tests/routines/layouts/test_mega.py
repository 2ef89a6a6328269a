"""The layouts of DeepGEMM's fused layer of experts, against reshaped views and Python's own integers."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from oracle.errors import InputError, ShapeError
from oracle.routines import get
from oracle.verdict.compare import Status


def numbered(g: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 120, (g, rows, columns), generator=torch.Generator().manual_seed(rows)).to(dtype)


def in_turn(x: Tensor) -> Tensor:
    """Eight rows of the first half, then eight of the second."""
    gate, up = x.chunk(2, dim=1)
    rows = [half[:, at : at + 8] for at in range(0, gate.shape[1], 8) for half in (gate, up)]
    return torch.cat(rows, dim=1)


def for_utccp(x: Tensor) -> Tensor:
    """Of 128 rows the first of each run of 32, then the second of each."""
    rows = [x[:, start + run * 32 + at] for start in range(0, x.shape[1], 128) for at in range(32) for run in range(4)]
    return torch.stack(rows, dim=1)


def weights(dtype: torch.dtype, rows: int = 256) -> dict[str, Tensor]:
    return {
        "l1": numbered(2, rows, 16, torch.uint8).view(torch.float8_e4m3fn),
        "l1_sf": numbered(2, rows, 3, dtype),
        "l2": numbered(2, 128, 8, torch.uint8).view(torch.float8_e4m3fn),
        "l2_sf": numbered(2, 128, 2, dtype),
    }


class TestWeights:
    def test_of_sm100(self) -> None:
        x = weights(torch.int32)
        made = get("transform_weights_for_mega_moe").reference(x)
        assert torch.equal(made["l1"].view(torch.uint8), in_turn(x["l1"].view(torch.uint8)))
        assert torch.equal(made["l1_sf"], for_utccp(in_turn(x["l1_sf"])))
        assert torch.equal(made["l2"].view(torch.uint8), x["l2"].view(torch.uint8))
        assert torch.equal(made["l2_sf"], for_utccp(x["l2_sf"]))

    def test_of_sm90(self) -> None:
        x = weights(torch.float32)
        made = get("transform_weights_for_mega_moe_sm90").reference(x)
        assert torch.equal(made["l1"].view(torch.uint8), in_turn(x["l1"].view(torch.uint8)))
        assert all(torch.equal(made[name], x[name]) for name in ("l1_sf", "l2_sf"))

    @pytest.mark.parametrize("spoilt", ["l1", "l1_sf", "l2", "l2_sf"])
    def test_one_row_elsewhere_fails(self, spoilt: str) -> None:
        x = weights(torch.int32)
        made = get("transform_weights_for_mega_moe").reference(x)
        raw = made[spoilt].view(torch.uint8) if spoilt in ("l1", "l2") else made[spoilt]
        moved = raw[:, [1, 0, *range(2, raw.shape[1])]].contiguous().view(made[spoilt].dtype)
        judged = get("transform_weights_for_mega_moe").judge
        assert judged(x, made).status is Status.PASSED
        assert judged(x, {**made, spoilt: moved}).status is Status.FAILED

    def test_rows_that_do_not_fit(self) -> None:
        x = weights(torch.int32, rows=192)
        with pytest.raises(ShapeError, match="l1_sf has 192 rows"):
            get("transform_weights_for_mega_moe").reference(x)
        with pytest.raises(ShapeError, match="l1 has 24 rows"):
            get("transform_weights_for_mega_moe_sm90").reference(weights(torch.float32, rows=24))


class TestWords:
    def test_packed_and_back(self) -> None:
        """Every exponent, by Python's own floats; an infinity is byte 255 and zero byte 0."""
        exponents = torch.arange(256).to(torch.int32)[torch.randperm(256, generator=torch.Generator().manual_seed(1))]
        x = (exponents << 23).view(torch.float32).reshape(16, 16)
        packed = get("pack_ue8m0_to_int").reference({"x": x})
        for row, words in zip(x.tolist(), packed.tolist(), strict=True):
            due = [struct.unpack("<I", struct.pack("<f", value))[0] >> 23 for value in row]
            assert [byte for word in words for byte in struct.pack("<i", word)] == due
        back = get("unpack_ue8m0_from_int").reference({"packed_sf": packed})
        assert torch.equal(back.view(torch.int32), x.view(torch.int32))

    def test_one_column_of_words(self) -> None:
        """Torch calls a column whose rows follow one another contiguous, whatever its second stride."""
        packed = torch.arange(5, dtype=torch.int32)[:, None]
        by_columns = torch.empty_strided((5, 1), (1, 8), dtype=torch.int32).copy_(packed)
        unpack = get("unpack_ue8m0_from_int").reference
        assert torch.equal(unpack({"packed_sf": by_columns}), unpack({"packed_sf": packed}))

    @pytest.mark.parametrize("bad", [3.0, -1.0, float("nan")])
    def test_what_is_no_power_of_two(self, bad: float) -> None:
        x = torch.ones(1, 4)
        x[0, 2] = bad
        with pytest.raises(InputError, match=r"x\[0, 2\]"):
            get("pack_ue8m0_to_int").reference({"x": x})
        with pytest.raises(ShapeError, match="5 columns"):
            get("pack_ue8m0_to_int").reference({"x": torch.ones(1, 5)})
