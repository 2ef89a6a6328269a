"""Checkpoints: three formats, slices over ranks, what is read, and what is refused.

A checkpoint of 3 layers and 2 experts (:mod:`checkpoints`) is loaded whole and over 2 ranks. What equals what:

* codes and scales: the slices of all ranks are the whole, in every bit;
* column-parallel outputs beside each other are the whole layer's, in every bit (the sum of one has no other row);
* row-parallel outputs are those of the whole layer for an input that is zero outside the rank's columns; their sum,
  rank 0 first, has the same bits where the float32 sums have (one block of K a rank, or exact sums); else it is the
  same sum in another order, which the contract admits, unless a block is cut: that block of the input has two scales;
* experts: as rows, for each expert one term.
"""

from __future__ import annotations

import copy
import json
import pickle
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints as cp
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import kernels
from kernels import nn
from kernels.errors import (
    CheckpointError,
    DtypeError,
    InputError,
    KernelError,
    OptionError,
    ShapeError,
    ValueRangeError,
)
from kernels.moe_pipelines import PIPELINES
from kernels.nn import shards
from oracle.routines import get
from oracle.routines.moe.pipelines import Sharing
from oracle.verdict.compare import Status, Verdict

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
O_PROJ, DOWN = "model.layers.1.self_attn.o_proj", "model.layers.0.mlp.down_proj"
QKV = ("model.layers.2.self_attn.q_a_proj", "model.layers.2.self_attn.kv_a_proj_with_mqa")
GATE_UP = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
MOE = "model.layers.2.mlp"
GOOD = (Status.PASSED, Status.MISTRUSTED)
Made = dict[str, Tensor]


@pytest.fixture(scope="module", params=[torch.bfloat16, E8M0], ids=["bf16", "e8m0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Checkpoint, Made]:
    """The checkpoint with block scales in a short dtype, and what was written; ``source`` has float32."""
    folder = tmp_path_factory.mktemp("model")
    made = cp.deepseek(folder, request.param)
    return nn.Checkpoint(folder), made


def values(made: Made, name: str) -> Tensor:
    """A layer's weight in float32, from what was written and by the formats' definition."""
    codes, scale = made[f"{name}.weight"], made[f"{name}.weight_scale_inv"].float()
    wide = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.float() * wide


def data(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ranks(source: Any, *names: str, parallel: str, **options: Any) -> list[nn.Fp8Linear]:
    return [nn.from_checkpoint(source, *names, parallel=parallel, rank=r, world=2, **options) for r in range(2)]


def verdict(x: Tensor, made: Made, name: str, y: Tensor) -> Verdict:
    a, a_scale = kernels.per_token_group_quant_fp8(x, 128)
    given = {"a": a, "a_scale": a_scale, "b": made[f"{name}.weight"]}
    given["b_scale"] = made[f"{name}.weight_scale_inv"].float()
    return get("fp8_gemm_nt").judge(given, y, arch="cpu", numerics="ieee32.any")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Checkpoint, Made]:
    """The checkpoint with float32 block scales alone."""
    folder = tmp_path_factory.mktemp("moe")
    made = cp.deepseek(folder)
    return nn.Checkpoint(folder), made


class TestTwoRanks:
    """The same bits over 2 ranks as over 1."""

    def test_every_layer_has_the_bits_of_the_files(self, model: tuple[nn.Checkpoint, Made]) -> None:
        """Whole, by columns and by rows: codes and scales of all parts are what was written."""
        source, made = model
        for name, (n, k) in cp.projections().items():
            codes, scale = made[f"{name}.weight"].view(torch.uint8), made[f"{name}.weight_scale_inv"].float()
            for parallel, axis in ((None, 0), ("column", 0), ("row", 1)):
                parts = (
                    [nn.from_checkpoint(source, name)] if parallel is None else ranks(source, name, parallel=parallel)
                )
                pieces = []
                for rank, part in enumerate(parts):
                    (start, stop), lay = part.layout.pieces[0], part.layout
                    pieces.append(part.weight.view(torch.uint8)[start:stop, lay.lead : lay.lead + lay.columns])
                    first = (rank * (n, k)[axis] // len(parts)) // 128
                    blocks = scale.narrow(axis, first, part.weight_scale.shape[axis])
                    assert torch.equal(part.weight_scale, blocks), (name, parallel, rank)
                    assert not part.weight.view(torch.uint8)[:start].any()
                assert torch.equal(torch.cat(pieces, axis), codes), (name, parallel)
                assert torch.equal(torch.cat([p.dequantised() for p in parts], axis), values(made, name))

    @pytest.mark.parametrize("names", [(O_PROJ,), QKV, GATE_UP, (DOWN,)], ids=lambda n: n[-1].rpartition(".")[2])
    def test_columns(self, model: tuple[nn.Checkpoint, Made], names: tuple[str, ...]) -> None:
        """Fused shards, too: each is sliced by itself, so the whole is put together shard by shard."""
        source, made = model
        whole = nn.from_checkpoint(source, *names)
        x = data(5, whole.in_features)
        y, sizes = whole(x), [made[f"{name}.weight"].shape[0] for name in names]
        parts = [part(x).split([size // 2 for size in sizes], 1) for part in ranks(source, *names, parallel="column")]
        assert torch.equal(torch.cat([torch.cat(pair, 1) for pair in zip(*parts, strict=True)], 1), y)
        for name, own in zip(names, y.split(sizes, 1), strict=True):
            assert verdict(x, made, name, own.contiguous()).status in GOOD

    @pytest.mark.parametrize("name", [DOWN, f"{MOE}.experts.0.down_proj"])
    def test_rows_that_cut_a_block(self, model: tuple[nn.Checkpoint, Made], name: str) -> None:
        """Each part is the whole layer's product for an input that is zero elsewhere, in every bit, and is judged."""
        source, made = model
        whole = nn.from_checkpoint(source, name, out_dtype=torch.float32)
        x, k = data(5, whole.in_features), whole.in_features
        for rank, part in enumerate(ranks(source, name, parallel="row", out_dtype=torch.float32)):
            mine = slice(rank * k // 2, (rank + 1) * k // 2)
            masked = torch.zeros_like(x)
            masked[:, mine] = x[:, mine]
            y = part(x[:, mine])
            assert torch.equal(y, whole(masked)) and k // 2 % 128
            padded = kernels.layout.pad_k(masked)
            a, a_scale = kernels.per_token_group_quant_fp8(padded, 128)
            given = {"a": a[:, :k].contiguous(), "a_scale": a_scale, "b": made[f"{name}.weight"]}
            given["b_scale"] = made[f"{name}.weight_scale_inv"].float()
            assert get("fp8_gemm_nt").judge(given, y, arch="cpu", numerics="ieee32.any").status in GOOD

    def test_rows_with_one_block_each(self, model: tuple[nn.Checkpoint, Made]) -> None:
        """K = 256 over 2 ranks: two float32 terms, whose sum has no other order."""
        source, made = model
        whole = nn.from_checkpoint(source, QKV[0], out_dtype=torch.float32)
        x = data(5, 256)
        parts = [
            part(x[:, 128 * r : 128 * r + 128])
            for r, part in enumerate(ranks(source, QKV[0], parallel="row", out_dtype=torch.float32))
        ]
        assert torch.equal(nn.sum_ranks(parts), whole(x))
        assert torch.equal(nn.sum_ranks(parts, torch.bfloat16), nn.from_checkpoint(source, QKV[0])(x))
        rounded = nn.sum_ranks([part.bfloat16() for part in parts])
        assert not torch.equal(rounded, whole(x).bfloat16()), "parts that are rounded first have other bits"

    def test_rows_in_another_order(self, tmp_path: Path) -> None:
        """K = 512: the sum of the ranks is the same sum in another order, which the contract admits."""
        codes, scale = cp.linear(64, 512, 1, "block")
        made = {"w.weight": codes, "w.weight_scale_inv": scale}
        cp.write(tmp_path, cp.FP8_BLOCK, made)
        x = data(5, 512)
        parts = ranks(tmp_path, "w", parallel="row", out_dtype=torch.float32)
        y = nn.sum_ranks([part(x[:, 256 * r : 256 * r + 256]) for r, part in enumerate(parts)])
        assert verdict(x, made, "w", y).status in GOOD
        assert verdict(x, made, "w", y + y.abs() * 2**-12).status is Status.FAILED

    def test_exact_sums_over_a_cut_block(self, tmp_path: Path) -> None:
        """Integers, and 448 in each part of each group: every scale is 1, every order gives the same bits."""
        g = torch.Generator().manual_seed(5)
        codes = torch.randint(-2, 3, (192, 384), generator=g).to(FP8)
        scale = torch.ldexp(torch.ones(2, 3), torch.randint(-3, 3, (2, 3), generator=g))
        x = torch.randint(-4, 5, (5, 384), generator=g).bfloat16()
        x[:, ::64] = 448
        cp.write(tmp_path, cp.FP8_BLOCK, {"w.weight": codes, "w.weight_scale_inv": scale})
        whole = nn.from_checkpoint(tmp_path, "w", out_dtype=torch.float32)(x)
        parts = ranks(tmp_path, "w", parallel="row", out_dtype=torch.float32)
        assert torch.equal(nn.sum_ranks([part(x[:, 192 * r : 192 * r + 192]) for r, part in enumerate(parts)]), whole)

    def test_the_bias_is_added_once(self, tmp_path: Path) -> None:
        codes, scale = cp.linear(64, 256, 1, "block")
        cp.write(tmp_path, cp.FP8_BLOCK, {"w.weight": codes, "w.weight_scale_inv": scale, "w.bias": data(64)})
        parts, x = ranks(tmp_path, "w", parallel="row", out_dtype=torch.float32), data(5, 256)
        whole = nn.from_checkpoint(tmp_path, "w", out_dtype=torch.float32)
        assert parts[0].bias is not None and parts[1].bias is None
        assert torch.equal(ranks(tmp_path, "w", parallel="column")[1].bias, whole.bias[32:])
        y = nn.sum_ranks([part(x[:, 128 * r : 128 * r + 128]) for r, part in enumerate(parts)])
        assert torch.allclose(y, whole(x), rtol=2**-22, atol=2**-20 * float(whole(x).abs().max()))

    def test_a_slice_off_by_one_block(self, model: tuple[nn.Checkpoint, Made], monkeypatch: pytest.MonkeyPatch) -> None:
        """Twins: scales of the next block; a slice without the zeros before it."""
        source, made = model
        x, y = data(5, 384), values(made, DOWN)
        right = ranks(source, DOWN, parallel="column")
        plain = shards.read_scale
        monkeypatch.setattr(shards, "read_scale", lambda shard, kind: plain(shard, kind).roll(1, 1))
        wrong = ranks(source, DOWN, parallel="column")
        assert torch.equal(right[0].dequantised(), y[:128]) and not torch.equal(wrong[0].dequantised(), y[:128])
        assert verdict(x, made, DOWN, torch.cat([part(x) for part in right], 1)).status in GOOD
        assert verdict(x, made, DOWN, torch.cat([part(x) for part in wrong], 1)).status is Status.FAILED

    def test_a_slice_from_the_block_before(self, model: tuple[nn.Checkpoint, Made]) -> None:
        """Rows [96, 192) put at the top of a block get the scales of block 0 for all of them."""
        source, made = model
        name = QKV[0]
        part = ranks(source, name, parallel="column")[1]
        shifted = part.weight.view(torch.uint8)[96:192].contiguous().view(FP8)
        wrong = nn.Fp8Linear(shifted, part.weight_scale[:1].detach(), kind="block")
        assert torch.equal(part.dequantised(), values(made, name)[96:])
        assert not torch.equal(wrong.dequantised(), values(made, name)[96:])

    def test_what_does_not_divide(self, model: tuple[nn.Checkpoint, Made]) -> None:
        source, _ = model
        with pytest.raises(ShapeError, match=f"the 384 columns of {O_PROJ} do not divide by world=5; choose a divisor"):
            nn.from_checkpoint(source, O_PROJ, parallel="row", world=5)
        with pytest.raises(OptionError, match="rank=2 of world=2"):
            nn.from_checkpoint(source, O_PROJ, parallel="row", rank=2, world=2)
        with pytest.raises(OptionError, match="without parallel="):
            nn.from_checkpoint(source, O_PROJ, rank=1, world=2)
        with pytest.raises(OptionError, match="parallel='columns'"):
            nn.from_checkpoint(source, O_PROJ, parallel="columns", world=2)
        with pytest.raises(OptionError, match="name at least one layer"):
            nn.from_checkpoint(source)
        with pytest.raises(ShapeError, match="fuse equal ones"):
            nn.from_checkpoint(source, QKV[0], O_PROJ)


@pytest.mark.turns(4)
class TestExperts:
    """A MoE layer of the checkpoint, whole and over 2 ranks."""

    @staticmethod
    def stacked(made: Made) -> Made:
        """The experts' tensors as the contract names them, gate above up; I = 192 padded to whole blocks."""

        def of(key: str, name: str) -> Tensor:
            found = [made[f"{MOE}.experts.{e}.{key}_proj.{name}"] for e in range(cp.EXPERTS)]
            return torch.stack([t.view(torch.uint8) if t.dtype == FP8 else t for t in found])

        pad = torch.nn.functional.pad
        up = [pad(of(key, "weight"), (0, 0, 0, 64)) for key in ("gate", "up")]
        return {
            "w13": torch.cat(up, 1).view(FP8),
            "w2": pad(of("down", "weight"), (0, 64)).view(FP8),
            "w13_scale": torch.cat([of(key, "weight_scale_inv") for key in ("gate", "up")], 1),
            "w2_scale": of("down", "weight_scale_inv"),
        }

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_judged(self, source: tuple[nn.Checkpoint, Made], dtype: torch.dtype) -> None:
        checkpoint, made = source
        layer = nn.Fp8Moe.from_checkpoint(checkpoint, MOE)
        x = data(2, 3, 256).to(dtype)
        logits = torch.nn.functional.linear(x.float(), made[f"{MOE}.gate.weight"].float()).view(6, 2)
        routed = dict(zip(("topk_weights", "topk_ids"), layer.router(logits), strict=True))
        options = {"router": "deepseek_v3", "top_k": 2, "renormalize": True, "routed_scaling_factor": 2.5}
        bias = made[f"{MOE}.gate.e_score_correction_bias"]
        assert get("moe_routing").judge({"logits": logits, "bias": bias}, routed, arch="cpu", **options).status in GOOD
        y = layer.experts(x, routed["topk_weights"].view(2, 3, 2), routed["topk_ids"].view(2, 3, 2))
        assert y.shape == x.shape and y.dtype == dtype
        given = {"x": x.view(6, 256), **self.stacked(made), **routed}
        judged = get("moe_fp8").judge(
            given, y.view(6, 256), arch="cpu", numerics="ieee32.any", activation_rounding="PRODUCT"
        )
        assert judged.status in GOOD, judged.summary
        swapped = {**given, "w13_scale": given["w13_scale"].roll(2, 1)}
        wrong = get("moe_fp8").judge(
            swapped, y.view(6, 256), arch="cpu", numerics="ieee32.any", activation_rounding="PRODUCT"
        )
        assert wrong.status is Status.FAILED
        shared = nn.Fp8Mlp.from_checkpoint(checkpoint, f"{MOE}.shared_experts")
        assert torch.equal(layer(x), y + shared(x))
        with torch.autocast("cpu"):
            assert torch.equal(layer(x), y + shared(x))

    def test_whole_experts_on_each_rank(self, source: tuple[nn.Checkpoint, Made]) -> None:
        """One expert a rank: two float32 terms, the same bits; the other rank's expert contributes nothing."""
        checkpoint, _ = source
        x = data(6, 256)
        whole, *parts = (
            nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 2, rank=r, world=w, out_dtype=torch.float32)
            for r, w in ((0, 1), (0, 2), (1, 2))
        )
        weights, ids = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 1]] * 6)
        assert [part.first_expert for part in parts] == [0, 1] and parts[1].w13.shape[0] == 1
        assert torch.equal(nn.sum_ranks([part(x, weights, ids) for part in parts]), whole(x, weights, ids))

    def test_a_part_of_each_expert(self, source: tuple[nn.Checkpoint, Made]) -> None:
        """I = 192 over 2 ranks cuts a block: rank 1 has 32 columns of zeros before its 96. The codes are the files'."""
        checkpoint, made = source
        given = self.stacked(made)
        parts = [
            nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 2, parallel="tensor", rank=r, world=2)
            for r in range(2)
        ]
        assert parts[1].w13.shape == (2, 512, 256) and parts[1].w2.shape == (2, 256, 256)
        for part, lead, start in zip(parts, (0, 96), (0, 96), strict=True):
            codes = part.w2.view(torch.uint8)[:, :, lead : lead + 96]
            assert torch.equal(codes, given["w2"].view(torch.uint8)[:, :, start : start + 96])
            half = part.w13.shape[1] // 2
            for first in (0, 1):
                codes = part.w13.view(torch.uint8)[:, first * half + lead : first * half + lead + 96]
                at = first * 256 + start
                assert torch.equal(codes, given["w13"].view(torch.uint8)[:, at : at + 96])

    def test_parts_are_judged(self, source: tuple[nn.Checkpoint, Made]) -> None:
        """A rank's output is that of experts whose other rows and columns are zero, which the contract judges."""
        checkpoint, made = source
        x, ids = data(6, 256), torch.tensor([[0, 1]] * 6)
        weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
        for rank in range(2):
            part = nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 2, parallel="tensor", rank=rank, world=2)
            given = self.stacked(made)
            w13, w2 = given["w13"].view(torch.uint8), given["w2"].view(torch.uint8)
            other = slice(96, 256) if rank == 0 else slice(0, 96)
            w13.view(2, 2, 256, 256)[:, :, other] = 0
            w2[:, :, other] = 0
            given = {**given, "x": x, "topk_weights": weights, "topk_ids": ids}
            judged = get("moe_fp8").judge(
                given, part(x, weights, ids), arch="cpu", numerics="ieee32.any", activation_rounding="PRODUCT"
            )
            assert judged.status in GOOD, judged.summary

    @staticmethod
    def written(folder: Path, pipeline: str) -> Made:
        """A checkpoint that fits a pipeline."""
        kind, config = {
            "block": ("block", cp.FP8_BLOCK),
            "channel": ("channel", cp.compressed("channel")),
            "expert": ("tensor", cp.modelopt("FP8")),
            "group": ("block", cp.FP8_BLOCK),
        }[PIPELINES[pipeline].weights]
        scale = "weight_scale_inv" if kind == "block" else "weight_scale"
        made = cp.tensors(kind, scale, static=kind == "tensor")
        cp.write(folder, config, made)
        return made

    @staticmethod
    def contracted(made: Made, pipeline: str, x: Tensor, experts: range) -> Made:
        """The inputs of a pipeline's contract from what was written, by the formats' definition and the oracle."""
        row = get(pipeline).row
        order = ("up", "gate") if row.up_first else ("gate", "up")

        def of(key: str, name: str) -> list[Tensor]:
            return [made[f"{MOE}.experts.{e}.{key}_proj.{name}"].float() for e in experts]

        codes = {key: torch.stack([w.to(FP8).view(torch.uint8) for w in of(key, "weight")]) for key in (*order, "down")}
        if row.weights is Sharing.BLOCK:
            pad = torch.nn.functional.pad
            rows = [pad(codes[key], (0, 0, 0, 64)) for key in order]
            scales = {key: torch.stack(of(key, "weight_scale_inv")) for key in codes}
            found = {
                "w13": torch.cat(rows, 1).view(FP8),
                "w2": pad(codes["down"], (0, 64)).view(FP8),
                "w13_scale": torch.cat([scales[key] for key in order], 1),
                "w2_scale": scales["down"],
            }
        else:
            both = torch.cat([codes[key] for key in order], 1).view(FP8)
            scales = {key: torch.stack(of(key, "weight_scale")).view(len(experts), -1) for key in codes}
            found = {"w2": codes["down"].view(FP8)}
            if row.weights is Sharing.CHANNEL:
                found |= {"w13": both, "w13_scale": torch.cat([scales[key] for key in order], 1)}
                found["w2_scale"] = scales["down"]
            else:
                pairs = torch.cat([scales[key] for key in order], 1)
                merged = [  # the public routine, which its own contract judges elsewhere
                    kernels.requantize_with_max_scale(w, pair, [cp.EXPERT] * 2)[1].view(torch.uint8)
                    for w, pair in zip(both, pairs, strict=True)
                ]
                found["w13"] = torch.stack(merged).view(FP8)
                found |= {"w13_scale": pairs.amax(1), "w2_scale": scales["down"][:, 0]}
        a1, a2 = (
            max(made[f"{MOE}.experts.{e}.{key}_proj.input_scale"] for e in range(cp.EXPERTS) for key in keys).view(1)
            if row.weights is Sharing.EXPERT
            else torch.ones(1)
            for keys in (("gate", "up"), ("down",))
        )
        if row.quantise is not None:
            return found | {"x": x} | ({"a1_scale": a1, "a2_scale": a2} if row.static else {})
        if row.weights is Sharing.BLOCK:
            a, scale = kernels.per_token_group_quant_fp8(x, 128)
            return found | {"a": a, "a_scale": scale}
        found |= {"a": kernels.scaled_fp8_quant(x, a1)[0], "w2_scale": found["w2_scale"] * a2}
        found["w13_scale"] = found["w13_scale"] * a1
        return found | ({"up_scale": found["w13_scale"] / a2} if row.apart else {"fc2_act_scale": 1 / a2})

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("pipeline", sorted(set(PIPELINES) - {"cutlass_fused_moe_w4"}))
    def test_as_a_library_computes_it(self, tmp_path: Path, pipeline: str) -> None:
        """A rank's experts by the contract of each pipeline; the twins: gate and up exchanged, another static scale."""
        row = get(pipeline).row
        made = self.written(tmp_path, pipeline)
        rank = list(PIPELINES).index(pipeline) % 2
        layer = nn.Fp8Moe.from_checkpoint(tmp_path, MOE, pipeline=pipeline, rank=rank, world=2).experts
        x, logits = data(4, 256), data(4, 2, seed=2).float()
        weights, ids = kernels.route_by_method(logits, "DeepSeekV3", 2)
        given = self.contracted(made, pipeline, x, range(rank, rank + 1))
        given |= {"logits": logits} if row.routed else {"topk_weights": weights, "topk_ids": ids}
        options = {"first_expert": rank, **({"top_k": 2} if row.routed else {})}

        def status() -> Status:
            y = layer(x.view(2, 2, 256), weights.view(2, 2, 2), ids.view(2, 2, 2)).view(4, 256)
            return get(pipeline).judge(given, y, arch="cpu", numerics="ieee32.any", **options).status

        assert status() in GOOD
        with torch.no_grad():
            rows = layer.w13.view(torch.uint8).clone().chunk(2, 1)
            layer.w13.view(torch.uint8).copy_(torch.cat(rows[::-1], 1))
            assert status() is Status.FAILED
            layer.w13.view(torch.uint8).copy_(torch.cat(rows, 1))
            if row.weights is Sharing.EXPERT:
                layer.w2_input_scale.mul_(1.25)
                assert status() is Status.FAILED

    @pytest.mark.parametrize("pipeline", ["cutlass_fused_moe_block", "cutlass_moe_fp8"])
    def test_parts_as_a_library_computes_them(self, tmp_path: Path, pipeline: str) -> None:
        """A part of each expert is the expert whose other rows and columns are zero, which the contract judges."""
        made, x, ids = self.written(tmp_path, pipeline), data(4, 256), torch.tensor([[0, 1]] * 4)
        weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(1))
        part = nn.Fp8Experts.from_checkpoint(
            tmp_path, f"{MOE}.experts", 2, pipeline=pipeline, parallel="tensor", rank=1, world=2
        )
        y, verdicts = part(x, weights, ids), []
        for other in (slice(0, 96), slice(96, 192)):
            given = self.contracted(made, pipeline, x, range(2)) | {"topk_weights": weights, "topk_ids": ids}
            given["w13"].view(torch.uint8).view(2, 2, -1, 256)[:, :, other] = 0
            given["w2"].view(torch.uint8)[:, :, other] = 0
            verdicts.append(get(pipeline).judge(given, y, arch="cpu", numerics="ieee32.any").status)
        assert verdicts[0] in GOOD and verdicts[1] is Status.FAILED

    def test_a_pipeline_compiled(self, tmp_path: Path) -> None:
        """One graph with the same bits; saved and loaded; not into a layer whose rows have the other order."""
        pipeline = "trtllm_fp8_per_tensor_scale_moe"
        self.written(tmp_path, pipeline)
        layer = nn.Fp8Experts.from_checkpoint(tmp_path, f"{MOE}.experts", 2, pipeline=pipeline)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
        for tokens in (2, 5):
            given = data(tokens, 256), torch.ones(tokens, 2), torch.tensor([[0, 1]] * tokens)
            assert torch.equal(compiled(*given), layer(*given))
        torch._dynamo.reset()
        assert layer(*(t[:0] for t in given)).shape == (0, 256)
        state, again = layer.state_dict(), copy.deepcopy(layer)
        with torch.no_grad():
            again.w13_scale.fill_(1.0)
            again.w2_input_scale.fill_(1.0)
        again.load_state_dict(state)
        assert torch.equal(again(*given), layer(*given))
        with pytest.raises(ShapeError, match="another slice"):
            again.load_state_dict({**state, "layout": state["layout"] ^ torch.tensor([0, 0, 0, 1])})

    def test_a_pipeline_that_does_not_fit(self, source: tuple[nn.Checkpoint, Made], tmp_path: Path) -> None:
        checkpoint, _ = source
        fp8 = "cutlass_moe_fp8"
        self.written(tmp_path, fp8)

        def load(folder: Any, pipeline: str | None, **options: Any) -> nn.Fp8Experts:
            return nn.Fp8Experts.from_checkpoint(folder, f"{MOE}.experts", 2, pipeline=pipeline, **options)

        def made(pipeline: str | None, e: int = 1, **options: Any) -> nn.Fp8Experts:
            codes = torch.zeros(e, 32, 16).to(FP8), torch.zeros(e, 16, 16).to(FP8)
            return nn.Fp8Experts(codes[0], torch.ones(e), codes[1], torch.ones(e), pipeline=pipeline, **options)

        static = {"w13_input_scale": torch.ones(1), "w2_input_scale": torch.ones(1)}
        calls: list[tuple[type[Exception], str, Any]] = [
            (OptionError, "there are fused_experts_tensor, ", lambda: load(checkpoint, "fused_moe")),
            (OptionError, "int4 ones: call kernels.moe_experts", lambda: load(checkpoint, "cutlass_fused_moe_w4")),
            (
                CheckpointError,
                "experts.0 has weights per block; of pipelines these take it: fused_experts_block, deep",
                lambda: load(checkpoint, fp8),
            ),
            (
                CheckpointError,
                "static input_scale and one scale.*: fused_experts_tensor, cutlass_moe_fp8, ",
                lambda: load(tmp_path, "deep_gemm_moe"),
            ),
            (OptionError, "this pipeline has stored", lambda: load(checkpoint, "deep_gemm_moe", combine="scaled")),
            (OptionError, "combine='scaled' is of a pipeline", lambda: load(checkpoint, None, combine="scaled")),
            (OptionError, "limit=7.0 of", lambda: load(checkpoint, "deep_gemm_moe", limit=7.0)),
            (OptionError, "writes bfloat16", lambda: load(checkpoint, "deep_gemm_moe", out_dtype=torch.float32)),
            (
                InputError,
                "deep_gemm_moe has no static scales; leave out w13_input_scale",
                lambda: load(checkpoint, "deep_gemm_moe", **static),
            ),
            (InputError, "quantises by static scales; pass w13_input_scale", lambda: made(fp8)),
            (ShapeError, "per channel", lambda: made("cutlass_moe_fp8_channel")),
            (ValueRangeError, "w2_input_scale", lambda: made(fp8, **static | {"w2_input_scale": -torch.ones(1)})),
            (
                DtypeError,
                r"\(deep_gemm_moe\)",
                lambda: load(checkpoint, "deep_gemm_moe")(
                    torch.zeros(2, 256), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
                ),
            ),
            (
                OptionError,
                "2 experts for each token",
                lambda: load(checkpoint, "deep_gemm_moe", weight_on_input=True)(
                    data(2, 256), torch.ones(2, 2), torch.tensor([[0, 1]] * 2)
                ),
            ),
        ]
        for error, said, call in calls:
            with pytest.raises(error, match=said):
                call()
        assert made(fp8, **static).w2_input_scale is not None

    @pytest.mark.parametrize("shape", [(0, 256), (256,), (1, 2, 3, 256), (2, 0, 256)])
    @pytest.mark.parametrize("kind", ["block", "channel"])
    def test_axes(self, tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
        cp.write(tmp_path, cp.compressed(kind), cp.tensors(kind, "weight_scale"))
        layer = nn.Fp8Moe.from_checkpoint(tmp_path, MOE)
        assert layer(data(*shape)).shape == shape
        for wrong, error in ((data(3, 128), ShapeError), (torch.zeros(3, 256).double(), DtypeError)):
            with pytest.raises(error, match="the input of model.layers.2.mlp.experts"):
                layer(wrong)

    @pytest.mark.parametrize("strategy", ["channel", "tensor"])
    def test_scales_per_channel(self, tmp_path: Path, strategy: str) -> None:
        """Experts per channel or per tensor: each channel of a tensor-scaled expert gets its scale."""
        made = cp.tensors(strategy, "weight_scale")
        cp.write(tmp_path, cp.compressed(strategy), made)
        parts = [
            nn.Fp8Experts.from_checkpoint(
                tmp_path, f"{MOE}.experts", 2, parallel="tensor", rank=r, world=2, out_dtype=torch.float32
            )
            for r in range(2)
        ]
        whole = nn.Fp8Experts.from_checkpoint(tmp_path, f"{MOE}.experts", 2, out_dtype=torch.float32)
        expected = torch.stack(
            [made[f"{MOE}.experts.{e}.down_proj.weight_scale"].expand(256, 1)[:, 0] for e in range(2)]
        )
        assert torch.equal(whole.w2_scale, expected) and all(torch.equal(part.w2_scale, expected) for part in parts)
        weights, ids, x = torch.ones(6, 2), torch.tensor([[0, 1]] * 6), data(6, 256)
        y, total = whole(x, weights, ids), nn.sum_ranks([part(x, weights, ids) for part in parts])
        # a part of each token's intermediate has its own scale: two quantisations to 3 bits of mantissa, in rms
        assert float((y - total).norm() / y.norm()) < 2 * 2**-4

    def test_refused(self, source: tuple[nn.Checkpoint, Made], tmp_path: Path) -> None:
        checkpoint, _ = source
        experts = nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 2)
        weights, ids = torch.ones(6, 2), torch.zeros(6, 2, dtype=torch.int64)
        with pytest.raises(ShapeError, match=r"it is \[..., H\] with H=256"):
            experts(data(6, 128), weights, ids)
        with pytest.raises(OptionError, match="split by expert or by tensor"):
            nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 2, parallel="data")
        with pytest.raises(ShapeError, match="the 2 experts of .* do not divide by world=3"):
            nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 2, world=3)
        with pytest.raises(CheckpointError, match="experts.2.* no tensor begins with"):
            nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 3)
        with pytest.raises(ShapeError, match="I of Fp8Experts=192 is not a multiple of 128"):
            nn.Fp8Experts(
                torch.zeros(1, 384, 256).to(FP8),
                torch.ones(1, 3, 2),
                torch.zeros(1, 256, 192).to(FP8),
                torch.ones(1, 2, 2),
            )
        cp.write(tmp_path, cp.modelopt("FP8"), cp.tensors("tensor", "weight_scale", static=True))
        with pytest.raises(CheckpointError, match="static input_scale"):
            nn.Fp8Experts.from_checkpoint(tmp_path, f"{MOE}.experts", 2)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"scoring_func": "sqrtsoftplus"}, "scoring_func='sqrtsoftplus'"),
            ({"num_experts_per_tok": None}, None),
            ({"scoring_func": "softmax", "topk_method": "group_limited_greedy"}, "pass router="),
        ],
    )
    def test_routers_that_are_not_here(self, tmp_path: Path, change: dict[str, Any], said: str | None) -> None:
        cp.write(tmp_path, cp.FP8_BLOCK, cp.tensors("block", "weight_scale_inv"), **change)
        if said is None:
            config = json.loads((tmp_path / "config.json").read_text())
            del config["num_experts_per_tok"]
            (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=said or "no num_experts_per_tok; pass router="):
            nn.Fp8Moe.from_checkpoint(tmp_path, MOE)
        layer = nn.Fp8Moe.from_checkpoint(tmp_path, MOE, router=lambda logits: kernels.route_softmax(logits, 1))
        assert layer(data(2, 256)).shape == (2, 256)

    def test_softmax_router(self, tmp_path: Path) -> None:
        """As Qwen3-MoE: no groups, no bias."""
        made = cp.tensors("block", "weight_scale_inv")
        made = {name: t for name, t in made.items() if "e_score" not in name and "shared" not in name}
        cp.write(tmp_path, cp.FP8_BLOCK, made, scoring_func="softmax", topk_method="greedy", routed_scaling_factor=None)
        layer, logits = nn.Fp8Moe.from_checkpoint(tmp_path, MOE), torch.tensor([[1.0, 3.0]])
        assert layer.shared is None
        weights, ids = layer.router(logits)
        assert ids.tolist() == [[1, 0]] and torch.allclose(weights, logits.softmax(1).flip(1))

    def test_surroundings(self, source: tuple[nn.Checkpoint, Made]) -> None:
        """What a default device or dtype says changes nothing, when a layer is loaded and when it is called."""
        checkpoint, _ = source
        x, before = data(5, 256), torch.get_default_dtype()
        layer = nn.Fp8Moe.from_checkpoint(checkpoint, MOE, rank=1, world=2)
        y, state = layer(x), layer.state_dict()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                again = nn.Fp8Moe.from_checkpoint(nn.Checkpoint(checkpoint.folder), MOE, rank=1, world=2)
                again.load_state_dict(state)
                assert torch.equal(again(x), y) and torch.equal(layer(x), y)
        finally:
            torch.set_default_dtype(before)

    def test_state(self, source: tuple[nn.Checkpoint, Made]) -> None:
        """Saved and loaded; not into the other rank, and not from other dtypes."""
        checkpoint, _ = source
        first, again, second = (
            nn.Fp8Experts.from_checkpoint(checkpoint, f"{MOE}.experts", 2, rank=rank, world=2) for rank in (0, 0, 1)
        )
        with torch.no_grad():
            again.w13_scale.fill_(1.0)
        again.load_state_dict(first.state_dict())
        assert torch.equal(again.w13_scale, first.w13_scale)
        with pytest.raises(ShapeError, match="another slice"):
            second.load_state_dict(first.state_dict())
        with pytest.raises(DtypeError, match="w2 of the state of"):
            again.load_state_dict({**first.state_dict(), "w2": first.w2.float()})

    def test_a_cast_keeps_codes_and_scales(self, source: tuple[nn.Checkpoint, Made]) -> None:
        checkpoint, _ = source
        layer = nn.Fp8Moe.from_checkpoint(checkpoint, MOE).half()
        kinds = {name: value.dtype for name, value in layer.state_dict().items()}
        assert kinds["experts.w13"] == kinds["shared.down.weight"] == FP8 and kinds["gate"] == torch.float16
        assert kinds["experts.w13_scale"] == kinds["shared.down.weight_scale"] == torch.float32


class TestFormats:
    """fp8, compressed-tensors, modelopt: the same layer from each."""

    @pytest.mark.parametrize(
        ("config", "kind", "scale", "more"),
        [
            (cp.FP8_BLOCK, "block", "weight_scale_inv", {}),
            ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "tensor", "weight_scale", {}),
            ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "weight_scale", {"static": True}),
            (cp.compressed("block"), "block", "weight_scale", {}),
            (cp.compressed("channel"), "channel", "weight_scale", {"scale_dtype": torch.bfloat16}),
            (cp.compressed("tensor", dynamic=False), "tensor", "weight_scale", {"static": True}),
            (cp.modelopt("FP8"), "tensor", "weight_scale", {"static": True}),
            (cp.modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "channel", "weight_scale", {}),
            (cp.modelopt("fp8_pb_wo"), "block", "weight_scale", {"four": True}),
        ],
        ids=lambda v: None if not isinstance(v, dict) else v.get("quant_algo") or v.get("quant_method"),
    )
    def test_layers(self, tmp_path: Path, config: dict[str, Any], kind: str, scale: str, more: dict[str, Any]) -> None:
        made = cp.tensors(kind, scale, **more)
        cp.write(tmp_path, config, made)
        layer = nn.from_checkpoint(tmp_path, O_PROJ)
        stored, given = made[f"{O_PROJ}.{scale}"], None
        if more.get("four"):
            stored = stored[:, 0, :, 0]
        if more.get("static"):
            given = made[f"{O_PROJ}.input_scale"].reshape(1)
        same = nn.Fp8Linear(made[f"{O_PROJ}.weight"], stored, input_scale=given)
        x = data(5, 384)
        assert torch.equal(layer(x), same(x)) and layer.layout.kind == kind
        assert (layer.input_scale is not None) == bool(more.get("static"))

    def test_fused_shards_keep_their_scales(self, tmp_path: Path) -> None:
        """Per tensor: one scale a shard, which becomes one a channel; the input's scale is the larger one."""
        made = cp.tensors("tensor", "weight_scale", static=True)
        cp.write(tmp_path, cp.modelopt("FP8"), made)
        layer = nn.from_checkpoint(tmp_path, *QKV)
        parts = [made[f"{name}.weight"].float() * made[f"{name}.weight_scale"] for name in QKV]
        assert torch.equal(layer.dequantised(), torch.cat(parts))
        assert layer.input_scale.item() == max(made[f"{name}.input_scale"].item() for name in QKV)
        swapped = torch.cat([parts[0] * 2, parts[1]])
        assert not torch.equal(layer.dequantised(), swapped)

    def test_groups_of_compressed_tensors(self, tmp_path: Path) -> None:
        """A pattern before a class; a layer that no group names; one that is ignored."""
        config = cp.compressed("channel", ignore=["lm_head", r"re:.*\.gate$", f"{MOE}.shared_experts.up_proj"])
        block = cp.compressed("block")["config_groups"]["g"]
        config["config_groups"]["attention"] = {**block, "targets": [r"re:.*self_attn\.(q_a|o)_proj$"]}
        made = cp.tensors("channel", "weight_scale") | {
            name: t for name, t in cp.tensors("block", "weight_scale").items() if "o_proj" in name
        }
        cp.write(tmp_path, config, made)
        source = nn.Checkpoint(tmp_path)
        assert nn.from_checkpoint(source, O_PROJ).layout.kind == "block"
        assert nn.from_checkpoint(source, DOWN).layout.kind == "channel"
        for name in ("lm_head", f"{MOE}.gate", f"{MOE}.shared_experts.up_proj"):
            with pytest.raises(CheckpointError, match=f"{name} is not quantised .*torch.nn.Linear"):
                nn.from_checkpoint(source, name)
        with pytest.raises(CheckpointError, match="quantised differently"):
            nn.from_checkpoint(source, O_PROJ, DOWN)
        config["config_groups"]["g"]["targets"] = ["re:.*mlp.*"]
        cp.write(tmp_path, config, made)
        with pytest.raises(CheckpointError, match="no group of config_groups .* targets .*kv_a_proj_with_mqa"):
            nn.from_checkpoint(tmp_path, QKV[1])

    def test_the_older_file_of_modelopt(self, tmp_path: Path) -> None:
        made = cp.tensors("tensor", "weight_scale", static=True)
        cp.write(tmp_path, {}, made)
        (tmp_path / "config.json").write_text("{}")
        older = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["*.gate"]}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(older))
        assert nn.from_checkpoint(tmp_path, O_PROJ).input_scale is not None
        with pytest.raises(CheckpointError, match="excludes it"):
            nn.from_checkpoint(tmp_path, f"{MOE}.gate")

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"quant_method": "gptq"}, "quant_method='gptq' .* not one of fp8, compressed-tensors, modelopt"),
            ({**cp.FP8_BLOCK, "fmt": "e5m2"}, "fmt='e5m2'"),
            ({**cp.FP8_BLOCK, "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]; .* requantise"),
            ({**cp.FP8_BLOCK, "activation_scheme": "static"}, "block scales are of dynamic inputs"),
            ({**cp.FP8_BLOCK, "activation_scheme": "none"}, "activation_scheme='none'"),
            ({**cp.FP8_BLOCK, "modules_to_not_convert": ["self_attn"]}, "is not quantised"),
            (cp.modelopt("NVFP4"), "nvfp4 is read by MxLinear"),
            (cp.modelopt("W4A8_AWQ"), "quant_algo='W4A8_AWQ'"),
            (cp.compressed("group"), "per group"),
            ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
            (
                {"quant_method": "compressed-tensors", "config_groups": {"g": {**cp.GROUP, "input_activations": None}}},
                "weight only|weight\\b.*only",
            ),
            ({"quant_method": "compressed-tensors", "ignore": ["re:("], "config_groups": {}}, "no regular expression"),
            ({"quant_method": "compressed-tensors", "config_groups": {"g": [1]}}, "config_groups .* of objects"),
            ({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": 3}}}, "targets=3"),
            ({**cp.FP8_BLOCK, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head'; .* a list"),
            ({"quant_method": ["fp8"]}, "quant_method="),
        ],
    )
    def test_unknown(self, tmp_path: Path, config: dict[str, Any], said: str) -> None:
        cp.write(tmp_path, config, {})
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        with pytest.raises(CheckpointError, match=said):
            nn.from_checkpoint(tmp_path, O_PROJ)


class TestFiles:
    """Only what is needed is read; nothing is run; what is missing is named."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        cp.deepseek(tmp_path)
        yield tmp_path

    def test_other_files_are_not_opened(self, folder: Path) -> None:
        """Layer 2 is in the second file: the first may be absent."""
        (folder / "model-00001-of-00002.safetensors").unlink()
        assert nn.Fp8Moe.from_checkpoint(folder, MOE)(data(2, 256)).shape == (2, 256)
        with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors cannot be read"):
            nn.from_checkpoint(folder, DOWN)

    def test_only_the_slice_is_read(self, tmp_path: Path) -> None:
        """A weight of 4 GiB, most of it a hole in the file: one rank of 512 maps its 8 MiB."""
        n, k = 65536, 65536
        tensors = {"w.weight": ("F8_E4M3", [n, k], n * k), "w.weight_scale_inv": ("F32", [512, 512], 512 * 512 * 4)}
        header, at = {}, 0
        for name, (dtype, shape, size) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        head = json.dumps(header).encode()
        with open(tmp_path / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            file.truncate(8 + len(head) + at)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": cp.FP8_BLOCK}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        layer = nn.from_checkpoint(tmp_path, "w", parallel="column", rank=3, world=512)
        assert layer.weight.shape == (128, k) and not layer.weight_scale.any()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB; the file has 4 GiB

    def test_one_file_without_an_index(self, tmp_path: Path) -> None:
        codes, scale = cp.linear(64, 256, 1, "block")
        save_file({"w.weight": codes, "w.weight_scale_inv": scale}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": cp.FP8_BLOCK}))
        assert torch.equal(nn.from_checkpoint(str(tmp_path), "w").weight_scale, scale)

    def test_a_pickle_is_not_loaded(self, tmp_path: Path) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[Any, ...]:
                return (Path.touch, (tmp_path / "ran",))

        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": cp.FP8_BLOCK}))
        with pytest.raises(CheckpointError, match="pytorch_model.bin is pickled and can run code; convert it"):
            nn.from_checkpoint(tmp_path, "w")
        assert not (tmp_path / "ran").exists()

    def index(self, folder: Path, **changes: str | None) -> None:
        path = folder / "model.safetensors.index.json"
        found = json.loads(path.read_text())
        for name, file in changes.items():
            found["weight_map"].pop(name) if file is None else found["weight_map"].update({name: file})
        path.write_text(json.dumps(found))

    @pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "model.bin"])
    def test_files_elsewhere_are_not_read(self, folder: Path, file: str) -> None:
        self.index(folder, **{f"{DOWN}.weight": file})
        with pytest.raises(CheckpointError, match="which is no safetensors file of the folder"):
            nn.Checkpoint(folder)

    def test_a_missing_tensor(self, folder: Path) -> None:
        with pytest.raises(
            CheckpointError, match="no tensor model.layers.9.mlp.down_proj.weight; no tensor begins with"
        ):
            nn.from_checkpoint(folder, "model.layers.9.mlp.down_proj")
        self.index(folder, **{f"{DOWN}.weight_scale_inv": None})
        with pytest.raises(CheckpointError, match=rf"{DOWN}.weight_scale_inv; {DOWN} has {DOWN}.weight$"):
            nn.from_checkpoint(folder, DOWN)
        self.index(folder, **{f"{DOWN}.weight_scale_inv": "model-00002-of-00002.safetensors"})
        with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors lacks .* the index places there"):
            nn.from_checkpoint(folder, DOWN)

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("config.json", "{", "cannot be read as JSON"),
            ("config.json", "[]", "holds a list"),
            ("config.json", "{}", "not quantised"),
            ("model.safetensors.index.json", "{}", "no weight_map"),
            ("model-00001-of-00002.safetensors", "torn", "cannot be read as safetensors"),
            ("config.json", None, "config.json cannot be read"),
        ],
    )
    def test_spoilt_files(self, folder: Path, name: str, text: str | None, said: str) -> None:
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=said):
            nn.from_checkpoint(folder, DOWN)

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="is no folder"):
            nn.Checkpoint(tmp_path / "absent")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": cp.FP8_BLOCK}))
        with pytest.raises(CheckpointError, match="has neither .* nor model.safetensors; download them"):
            nn.Checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("key", "change", "kind", "said"),
        [
            ("weight", lambda t: t.bfloat16(), DtypeError, "bfloat16, not float8_e4m3fn"),
            ("weight", lambda t: t.view(torch.uint8), DtypeError, "uint8"),
            ("weight", lambda t: t[:, :255].contiguous(), ShapeError, r"per block of \[256, 255\] it is \[2, 2\]"),
            ("weight_scale_inv", lambda t: t.t().contiguous(), ShapeError, "it is transposed"),
            ("weight_scale_inv", lambda t: t.view(torch.int32), DtypeError, "int32"),
            ("weight_scale_inv", lambda t: t * torch.inf, KernelError, "read it with the dtype it was stored in"),
            ("weight_scale_inv", lambda t: t.to(torch.complex64), CheckpointError, "is stored as C64"),
        ],
    )
    def test_tensors_that_do_not_fit(
        self, tmp_path: Path, key: str, change: Any, kind: type[Exception], said: str
    ) -> None:
        codes, scale = cp.linear(256, 384, 1, "block")
        made = {"w.weight": codes, "w.weight_scale_inv": scale}
        made[f"w.{key}"] = change(made[f"w.{key}"])
        cp.write(tmp_path, cp.FP8_BLOCK, made)
        with pytest.raises(kind, match=said):
            nn.from_checkpoint(tmp_path, "w")

    def test_a_bias_of_one_shard_only(self, folder: Path) -> None:
        (a, a_scale), (b, b_scale) = cp.linear(64, 256, 1, "block"), cp.linear(64, 256, 2, "block")
        made = {"a.weight": a, "a.weight_scale_inv": a_scale, "b.weight": b, "b.weight_scale_inv": b_scale}
        cp.write(folder, cp.FP8_BLOCK, {**made, "a.bias": data(64)})
        with pytest.raises(CheckpointError, match="only a of 2 fused layers has a bias"):
            nn.from_checkpoint(folder, "a", "b")
        cp.write(folder, cp.FP8_BLOCK, {**made, "a.bias": data(64), "b.bias": data(64, seed=8)})
        assert torch.equal(nn.from_checkpoint(folder, "a", "b").bias, torch.cat([data(64), data(64, seed=8)]))
