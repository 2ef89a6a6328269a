"""Verbs of KV caches: strides that engines have, calls without a token, and every bad call in one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from kernels.backends import triton_cache
from kernels.backends.declaration import Part
from kernels.errors import DtypeError, KernelError, LayoutError, OptionError, ShapeError, ValueRangeError
from oracle.routines import get, profiles
from oracle.routines.kv_cache.cases import GRAMMARS
from tests.support.cache_calls import operands

FP8 = torch.float8_e4m3fn


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", sorted(name for name in GRAMMARS if get(name).dispatched))
def test_right_in_every_last_shape(name: str) -> None:
    """The verb itself, by position and in place, on the case of the profile with the most tokens."""
    case = next(c for c in reversed(list(profiles.cases(name, "quick"))) if c.dtypes == GRAMMARS[name].dtypes[0])
    inputs, options = case.inputs(), case.call_options()
    own = {n: x.clone() for n, x in inputs.items()}
    made = getattr(kernels, name)(**own, **options)
    contract = get(name)
    found = {"out": made} if made is not None else {n: own[n] for n in contract.returns}
    assert not contract.judge(inputs, found, **options).status.is_failure
    for n in set(own) - set(contract.returns):
        assert torch.equal(raw(own[n]), raw(inputs[n]))


def joint(made: tuple[object, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A cache whose pages hold keys, then values; and both as views of it."""
    key_cache = made[2]
    assert isinstance(key_cache, Tensor)
    pages = torch.stack([key_cache.view(torch.uint8)] * 2, dim=1).view(FP8)
    return pages, pages[:, 0], pages[:, 1]


def test_pages_with_keys_and_values_side_by_side() -> None:
    """The page stride is twice that of a page; nothing else is written."""
    made = operands()["reshape_and_cache_flash"]
    kernels.reshape_and_cache_flash(*made)  # type: ignore[arg-type]
    fresh = operands()["reshape_and_cache_flash"]
    pages, keys, values = joint(fresh)
    kernels.reshape_and_cache_flash(*fresh[:2], keys, values, *fresh[4:])  # type: ignore[arg-type]
    assert torch.equal(raw(keys), raw(made[2])) and torch.equal(raw(values), raw(made[3]))  # type: ignore[arg-type]
    assert pages.stride(0) == 2 * keys[0].numel()


def test_heads_before_slots_are_the_same_cache() -> None:
    made, other = operands()["reshape_and_cache_flash"], list(operands()["reshape_and_cache_flash"])
    kernels.reshape_and_cache_flash(*made)  # type: ignore[arg-type]
    for i in (2, 3):
        other[i] = other[i].view(torch.uint8).transpose(1, 2).contiguous().view(FP8)  # type: ignore[attr-defined]
    kernels.reshape_and_cache_flash(*other[:-1], "HND")  # type: ignore[arg-type]
    for i in (2, 3):
        assert torch.equal(raw(other[i].transpose(1, 2)), raw(made[i]))  # type: ignore[attr-defined, arg-type]


def test_nobody_has_a_slot() -> None:
    """Nothing is written where every slot is negative, or there is no token."""
    names = ("reshape_and_cache_flash", "concat_and_cache_ds_mla", NVFP4)
    for slots, more in ((torch.full((5,), -1), ("indexer_k_quant_and_cache",)), (torch.zeros(0).long(), ())):
        for name in (*names, *more):
            made = [slots if isinstance(t, Tensor) and t.dtype == torch.int64 else t for t in operands()[name]]
            before = [t.clone() for t in made if isinstance(t, Tensor)]
            getattr(kernels, name)(*made)
            after = [t for t in made if isinstance(t, Tensor)]
            assert all(torch.equal(raw(x), raw(y)) for x, y in zip(before, after, strict=True))


def test_written_and_read_again() -> None:
    """What the writers leave, the readers bring back within half a step of a code: 2^-4 of the value or of the tile."""
    made = operands()["concat_and_cache_ds_mla"]
    kernels.concat_and_cache_ds_mla(*made)  # type: ignore[arg-type]
    cache = made[2]
    assert isinstance(cache, Tensor)
    rows = kernels.dequantize_k_cache(cache.unsqueeze(2)).reshape(-1, 576).float()
    for token, slot in ((0, 3), (2, 0), (3, 11), (4, 6)):
        wanted = torch.cat([made[0][token], made[1][token]]).float()  # type: ignore[index]
        tile = wanted[:512].reshape(4, 128).abs().amax(1).repeat_interleave(128)
        assert bool(((rows[slot, :512] - wanted[:512]).abs() <= wanted[:512].abs() / 16 + tile * 2.0**-9 / 448).all())
        assert torch.equal(rows[slot, 512:], wanted[512:])


def changed(name: str, at: int, change: Callable[[object], object]) -> tuple[object, ...]:
    made = list(operands()[name])
    made[at] = change(made[at])
    return tuple(made)


NVFP4 = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
BAD = (
    ("reshape_and_cache_flash", 2, lambda x: x[..., ::2], LayoutError, "dense"),
    ("reshape_and_cache_flash", 4, lambda x: x.repeat(2), ShapeError, "10 slots"),
    ("convert_fp8", 2, lambda x: torch.float32, DtypeError, "one of them"),
    ("indexer_k_quant_and_cache", 3, lambda x: 64, OptionError, "128"),
    ("indexer_k_quant_and_cache", 1, lambda x: x[:, ::2], LayoutError, "dense"),
    ("indexer_k_quant_and_cache", 1, lambda x: x[:0], ShapeError, "empty dimension 0"),
    ("indexer_k_quant_and_cache", 1, lambda x: x[:, :0], ShapeError, "empty dimension 1"),
    ("indexer_k_quant_and_cache", 0, lambda x: x[:, :0], ShapeError, "D/128"),
)


@pytest.mark.parametrize(("name", "at", "change", "error", "said"), BAD)
def test_bad_calls_of_layouts_and_combinations(
    name: str, at: int, change: Callable[[object], object], error: type[KernelError], said: str
) -> None:
    with pytest.raises(error, match=said):
        getattr(kernels, name)(*changed(name, at, change))


@pytest.mark.parametrize(
    ("table", "start", "words"),
    [
        ([[0, 2], [1, 0]], -8, "index -2 is outside of the 2 pages of a request in block_table"),
        ([[0, -1], [1, 0]], 0, "index -1 is outside of the 3 pages of the cache"),
        ([[0, 3], [1, 0]], 0, "index 3 is outside of the 3 pages of the cache"),
    ],
)
def test_pages_that_do_not_exist(table: list[list[int]], start: int, words: str) -> None:
    """Also before the first one, which torch would take for the last one."""
    cache, out, _, ends, *_ = operands()["cp_gather_cache"]
    with pytest.raises(ValueRangeError, match=words):
        kernels.cp_gather_cache(cache, out, torch.tensor(table).int(), ends, torch.tensor([start, 0]).int())  # type: ignore[arg-type]


class TestWords:
    """What the Triton kernel copies a row as: the widest integers that fit, heads side by side as one."""

    def half(self, x: Tensor, memory: Tensor) -> tuple[object, ...]:
        part = triton_cache._class_of(Part(x, memory))
        made = triton_cache._half(part, 0, False, True)
        assert made.source == made.target
        return made.source, made.numbers

    def test_rows(self) -> None:
        x, memory = torch.zeros(3, 8, 128).bfloat16(), torch.zeros(2, 4, 8, 128).bfloat16()
        assert self.half(x, memory) == (torch.int64, (1, 256, 256, 0, 1024, 256, 0, 1))
        of_heads = torch.zeros(2, 8, 4, 128).bfloat16().transpose(1, 2)  # HND
        assert self.half(x, of_heads) == (torch.int64, (8, 32, 256, 32, 1024, 32, 128, 1))
        narrow = torch.zeros(3, 8, 6).bfloat16(), torch.zeros(2, 4, 8, 6).bfloat16()
        assert self.half(*narrow) == (torch.int32, (1, 24, 24, 0, 96, 24, 0, 1))

    @pytest.mark.parametrize(("elements", "dtype"), [(1, torch.int16), (2, torch.int32), (4, torch.int64)])
    def test_an_address_that_is_no_multiple(self, elements: int, dtype: torch.dtype) -> None:
        memory = torch.zeros(2, 4, 8, 128).bfloat16()
        x = torch.zeros(3 * 1024 + elements).bfloat16()[elements:].view(3, 8, 128)
        assert self.half(x, memory)[0] == dtype
        wide = torch.zeros(3, 8, 128 + elements).bfloat16()[..., :128]  # strides
        assert self.half(wide, memory)[0] == dtype

    def test_columns_apart_are_copied_one_by_one(self) -> None:
        x, memory = torch.zeros(3, 8, 128).bfloat16(), torch.zeros(2, 4, 8, 256).bfloat16()[..., ::2]
        assert self.half(x, memory) == (torch.int16, (8, 128, 1024, 128, 8192, 2048, 256, 2))
