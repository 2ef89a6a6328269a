"""Recipes of 16x16 weights, random bits and DeepGEMM's FP4 against the published formulas in numpy; Philox; Hadamard.

The witness shares no code with the oracle: float32 operations of numpy, comparisons with midpoints, integers for
Philox.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mx_witnesses import Reals, cast, every_amax, nvfp4_witness
from numpy.typing import NDArray
from torch import Tensor

from oracle.bounds.quantiser import code_set, judge_recipe
from oracle.numbers import mx_recipes as M
from oracle.numbers.formats import E2M1, decode
from oracle.numbers.quantize import prepare
from oracle.numbers.recipes import Recipe
from oracle.numbers.scaling import Block
from oracle.truth import hadamard

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def stepped(seed: int = 1) -> Tensor:
    """Blocks of every bfloat16 amax, in whole 16x16 tiles of neighbours."""
    x = every_amax(E2M1, 16, seed=seed)
    return x[: len(x) // 16 * 16]


def philox_words(counter: NDArray[np.uint64], seed: int) -> NDArray[np.uint32]:
    """Philox4x32-10 in 64-bit products."""
    low = np.uint64(0xFFFFFFFF)
    c = [counter & low, counter >> np.uint64(32), counter * np.uint64(0), counter * np.uint64(0)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]),
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=-1).astype(np.uint32)


def quotients(x: Reals, g: np.float32) -> tuple[NDArray[np.uint8], Reals]:
    """TransformerEngine's scale bytes and what it rounds."""
    with np.errstate(all="ignore"):
        scale, _ = nvfp4_witness(x, M.TE_NVFP4, g)
        one = np.float32(1)
        stored = decode(torch.from_numpy(scale).view(torch.float8_e4m3fn)).float().numpy()[:, None]
        return scale, x * np.minimum(one / (stored * (one / g)), np.finfo(np.float32).max)


class TestSeeded:
    """Codes of declared bits, a million of them; the bits are Random123's."""

    @pytest.mark.parametrize(
        ("counter", "seed", "words"),
        [
            (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            (0x85A308D3243F6A88, 0x299F31D0A4093822, None),
        ],
    )
    def test_words(self, counter: int, seed: int, words: tuple[int, ...] | None) -> None:
        """The first row is a known answer of Random123 (kat_vectors)."""
        signed = counter - (1 << 64) if counter >> 63 else counter
        made = hadamard.philox(torch.tensor([signed]), seed)[0].tolist()
        assert made == philox_words(np.array([counter], dtype=np.uint64), seed)[0].tolist()
        assert words is None or tuple(made) == words

    @pytest.mark.parametrize(("step", "seeds"), [(41, (7,)), (1, (7, 8))])
    def test_codes(self, step: int, seeds: tuple[int, ...]) -> None:
        for seed in seeds:
            x, g = stepped(seed)[::step], np.float32(2688 / 6.5)
            scale, v = quotients(x.float().numpy(), g)
            bits = philox_words(np.arange(x.numel() // 16, dtype=np.uint64), seed)
            u = bits.view(np.uint8).reshape(x.shape).astype(np.float32) / np.float32(256)
            a = np.abs(v)
            t = a + u * np.where(a >= 4, 2, np.where(a >= 2, 1, 0.5)).astype(np.float32)
            codes = (t[..., None] >= FP4[1:]).sum(axis=-1).astype(np.uint8) | np.signbit(v).astype(np.uint8) << 3
            given = prepare(x, global_scale=torch.tensor([g]), random=hadamard.random_bytes(x.shape, seed))
            made = given.quantized(M.NVFP4_SEEDED)
            live = scale != 0
            assert int((made.codes.numpy()[live] != codes[live]).sum()) == 0

    def test_any_bits_conform_and_no_others(self) -> None:
        """Truncated, rounded up, any mixture: right. Two steps away, or off a value of the grid: wrong."""
        x, g = every_amax(E2M1, 16)[0x3F00:0x4100:3].float(), torch.tensor([448.0])
        x[::2] = torch.where(x[::2].abs() > 0, x[::2], 0.25)
        given = prepare(x, global_scale=g, random=torch.zeros(x.shape, dtype=torch.uint8))
        scale = given.scale(M.TE_NVFP4_STOCHASTIC).reshape(len(x), 1).float()
        for bits in (0, 255, 17):
            p = prepare(x, global_scale=g, random=torch.full(x.shape, bits, dtype=torch.uint8))
            q = p.codes(M.TE_NVFP4_STOCHASTIC)
            assert judge_recipe(p, q, scale, M.TE_NVFP4_STOCHASTIC).outside == 0
            rank = q.to(torch.int16) & 7
            beyond = torch.where(rank < 5, rank + 3, rank - 3).to(torch.uint8) | q & 8
            assert judge_recipe(p, beyond, scale, M.TE_NVFP4_STOCHASTIC).outside > 0

    def test_a_value_of_the_grid_is_itself(self) -> None:
        x = decode(torch.arange(16), E2M1).reshape(1, 16).float()
        given = prepare(x, global_scale=torch.tensor([1.0]), random=torch.full((1, 16), 255, dtype=torch.uint8))
        sets = code_set(given, M.TE_NVFP4_STOCHASTIC, torch.tensor([[1.0]], dtype=torch.float64))
        assert torch.equal(sets.low, sets.high)
        assert given.codes(M.TE_NVFP4_STOCHASTIC)[0].tolist() == list(range(16))
        beside = prepare(x * 1.01, global_scale=torch.tensor([1.0]), random=given.random)
        sets = code_set(beside, M.TE_NVFP4_STOCHASTIC, torch.tensor([[1.0]], dtype=torch.float64))
        assert int((sets.high - sets.low).sum()) == 12  # all but the zeros and what lies above 6


class TestSquare:
    """One scale for 16x16, half a million values a seed."""

    @pytest.mark.parametrize(("step", "seeds"), [(40, (1,)), (1, (1, 2))])
    def test_codes(self, step: int, seeds: tuple[int, ...]) -> None:
        for seed in seeds:
            x = stepped(seed)
            x = x.reshape(-1, 256)[::step].reshape(-1, 16)
            wide, g = x.float().numpy(), np.float32(2688 / 3.0e4)
            top = np.abs(wide.reshape(-1, 256)).max(axis=1)
            same = np.concatenate([top[:, None], np.zeros((len(top), 15), dtype=np.float32)], axis=1)
            scale, _ = quotients(same, g)
            stored = decode(torch.from_numpy(scale).view(torch.float8_e4m3fn)).float().numpy().repeat(16)[:, None]
            with np.errstate(all="ignore"):
                one = np.float32(1)
                v = wide * np.minimum(one / (stored * (one / g)), np.finfo(np.float32).max)
            made = prepare(x, global_scale=torch.tensor([g])).quantized(M.TE_NVFP4_2D)
            assert made.scale.to(torch.float8_e4m3fn).view(torch.uint8).flatten().tolist() == scale.tolist()
            live = scale.repeat(16) != 0
            codes = cast(np.nan_to_num(v, nan=6.0).astype(np.float32), E2M1)
            assert int((made.codes.numpy()[live] != codes[live]).sum()) == 0


class TestDeepGemm:
    """FP4 under float32 scales and powers of two: ties toward zero, no -0."""

    @pytest.mark.parametrize("recipe", [M.DEEPGEMM_FP4, M.DEEPGEMM_FP4_UE8M0], ids=lambda r: r.name)
    @pytest.mark.parametrize("step", [31, 1])
    def test_codes(self, recipe: Recipe, step: int) -> None:
        x = every_amax(E2M1, 32)[::step]
        scale, codes = self.witness(x.float().numpy(), powers=recipe.power_of_two is not None)
        made = prepare(x).quantized(recipe.with_block(Block(1, 32)))
        assert int((made.scale.numpy()[:, 0] != scale).sum()) == 0
        assert int((made.codes.numpy() != codes).sum()) == 0
        even = prepare(x).quantized(M.FLASHINFER_MXFP4).codes  # the negative test: ties to even
        assert not torch.equal(even, made.codes)

    def witness(self, x: Reals, *, powers: bool) -> tuple[Reals, NDArray[np.uint8]]:
        s = np.maximum(np.abs(x).max(axis=1), np.float32(1e-4)) / np.float32(6)
        if powers:
            bits = s.view(np.int32)
            s = (np.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254).astype(np.int32) << 23).view(np.float32)
        v = x * (np.float32(1) / s)[:, None]
        codes = (np.abs(v)[..., None] > (FP4[1:] + FP4[:-1]) / 2).sum(axis=-1).astype(np.uint8)
        return s, codes | (((v < 0) & (codes > 0)).astype(np.uint8) << 3)

    def test_worked(self) -> None:
        """6 -5 3.5 2.5 1.75 1.25 .75 .25 -.75 -.25 0 -0 .1 4 3 1.5 under the scale 1."""
        x = torch.tensor([[6, -5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.75, -0.25, 0, -0.0, 0.1, 4, 3, 1.5]])
        made = prepare(x).quantized(M.DEEPGEMM_FP4)
        assert "".join(f"{code:X}" for code in made.codes[0].tolist()) == "7E54321090000653"


class TestHadamard:
    """The matrix is Sylvester's under TransformerEngine's signs; a float32 kernel lies between the ends."""

    SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

    def by_doubling(self) -> NDArray[np.float64]:
        h = np.ones((1, 1))
        while len(h) < 16:
            h = np.block([[h, h], [h, -h]])
        return np.diag(self.SIGNS) @ h / 4

    def test_matrix(self) -> None:
        assert np.array_equal(hadamard.matrix().numpy(), self.by_doubling())
        plain = self.by_doubling() * 4 * np.array(self.SIGNS)[:, None]
        assert np.array_equal(hadamard.matrix(0).numpy() * 4, plain)

    @pytest.mark.parametrize("rows", [64, 4096])
    def test_orders_of_the_sum(self, rows: int) -> None:
        """One after another, from the other end, and in a tree; a transform without signs lies outside."""
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
        x[::3] *= torch.exp2(torch.randint(-30, 30, (len(x[::3]), 256), generator=torch.Generator().manual_seed(4)))
        exact, low, high = (y.double() for y in hadamard.transform_ends(x, torch.bfloat16))
        terms = (x.float().unflatten(1, (-1, 16))[..., None] * hadamard.matrix().float()).numpy()
        forward = np.add.accumulate(terms, axis=-2, dtype=np.float32)[..., -1, :]
        backward = np.add.accumulate(terms[..., ::-1, :], axis=-2, dtype=np.float32)[..., -1, :]
        tree = terms
        while tree.shape[-2] > 1:
            tree = tree[..., ::2, :] + tree[..., 1::2, :]
        for made in (forward, backward, tree[..., 0, :]):
            y = torch.from_numpy(np.ascontiguousarray(made)).flatten(1).bfloat16().double()
            assert bool(((low <= y) & (y <= high)).all())
        plain = hadamard.transform_ends(x, torch.bfloat16, 0)[0].double()
        assert float(((low <= plain) & (plain <= high)).float().mean()) < 0.7
        assert float((low == high)[1::3].float().mean()) > 0.99
