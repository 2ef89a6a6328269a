"""The contract of SageAttention's product: INT8 queries and keys, E4M3 values, on Hopper.

Dot products of INT8 are exact, so that nothing is left open in a score but the scales that multiply it. P is lifted by
2^8.807 and rounded to E4M3, in tiles of 128 keys from the first to the last, each of which is summed from zero.

Source: SageAttention 2.2 ``csrc/qattn/qk_int_sv_f8_cuda_sm90.cu`` and, for how values lie, ``csrc/fused/fused.cu``;
read, not run. Not covered: scales for each thread (``qk_quant_gran=3``), the log-sum-exp, the layout HND, the forms of
sm80 and sm89.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import InputError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines.attention.contract import AttentionContract, Place, positive_or_none
from oracle.routines.base import E4M3, F32, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.traits import Kind
from oracle.truth.attention import Attention

INT8 = (torch.int8,)
BLOCK, WARP, TILE, SWAPPED = 64, 16, 128, 16
"""Rows of a block and of a scale of the queries; keys of a tile, which share a scale; keys that change places."""


def slots(keys: int, device: torch.device) -> Tensor:
    """Where the values of each key lie, int64 ``[keys]``: of every 16, keys 0, 1, 8, 9, 2, 3, 10, 11 and so on, as the
    tensor cores of FP8 take P from registers. No NaN: they are places."""
    key = torch.arange(keys, device=device)
    own = key % SWAPPED
    return key - own + own // 8 * 2 + own // 2 % 4 * 4 + own % 2


@register
class QkInt8SvF8(AttentionContract):
    """Keys lie as ``[B, N, G, D]``, values as ``[B, D, G, P]`` with P the next multiple of 128 from N on: of every 16
    keys the values lie in the order 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15. Those behind the last key are
    finite.

    ``query_scale`` is one for every 16 rows of a query head, of blocks of 64 rows four; ``key_scale`` one for every 128
    keys of a KV head; ``value_scale`` one for every element of a value. With ``is_causal`` query ``s`` sees the keys 0
    to ``s``: the mask begins at the top left. ``sm_scale`` is D^-0.5 where it is None."""

    name = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"
    dispatched = False
    summary = "SageAttention's attention of INT8 queries and keys and E4M3 values, for Hopper"
    source = "SageAttention 2.2 sageattention._qattn_sm90, qk_quant_gran=2 and tensor_layout=0"
    shapes: ClassVar[Mapping[str, str]] = {"out": "[B, S, H, D]"}
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"sm90": ("sm90.sage",), "cpu": (IEEE32,)}
    scales: ClassVar[Mapping[str, str]] = {"queries": "query_scale", "keys": "key_scale", "values": "value_scale"}
    inputs = (
        TensorSpec("query", Kind.CODES, INT8, ("B", "S", "H", "D"), "query codes"),
        TensorSpec("key", Kind.CODES, INT8, ("B", "N", "G", "D"), "key codes of the G KV heads"),
        TensorSpec("value", Kind.CODES, E4M3, ("B", "D", "G", "P"), "value codes, keys last and swapped"),
        TensorSpec("query_scale", Kind.SCALES, F32, ("B", "H", "W"), "scale of every 16 queries"),
        TensorSpec("key_scale", Kind.SCALES, F32, ("B", "G", "T"), "scale of every 128 keys"),
        TensorSpec("value_scale", Kind.SCALES, F32, ("B", "G", "D"), "scale of every element of a value"),
    )
    options = (
        OptionSpec("out_dtype", torch.bfloat16, (torch.bfloat16, torch.float16), "dtype of the output"),
        OptionSpec("is_causal", False, (False, True), "query s sees the keys 0 to s"),
        OptionSpec("sm_scale", None, None, "what multiplies a score; None: D^-0.5"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        bound = self.extents(inputs)
        if bound["H"] % bound["G"]:
            raise ShapeError(f"{self.name}: {bound['H']} query heads are no multiple of {bound['G']} KV heads")
        if bound["D"] not in (64, 128):
            raise ShapeError(f"{self.name}: query has head dim {bound['D']}; it takes 64 or 128")
        due = {"W": -(-bound["S"] // BLOCK) * (BLOCK // WARP), "T": -(-bound["N"] // TILE)}
        due["P"] = due["T"] * TILE
        for (name, axis), extent in zip(
            (("query_scale", "W"), ("key_scale", "T"), ("value", "P")), due.values(), strict=True
        ):
            if bound[axis] != extent:
                raise ShapeError(f"{self.name}: {name} has a last axis of {bound[axis]}; it takes {extent}")
        positive_or_none(self.name, options, "sm_scale")
        if not bool(torch.isfinite(decode(inputs["value"])).all()):
            raise InputError(f"{self.name}: value holds NaN; its codes are finite")

    def masked(self, options: Options) -> bool:
        return bool(options["is_causal"])

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, k, v = (inputs[name] for name in ("query", "key", "value"))
        (batch, queries, heads, depth), (_, keys, of_keys, _) = q.shape, k.shape
        group, at = heads // of_keys, slots(keys, q.device)
        scale, one = float(options["sm_scale"] or depth**-0.5), torch.ones((), dtype=torch.float32, device=q.device)
        row = torch.arange(queries, device=q.device)
        of_row = inputs["query_scale"][:, :, row // WARP].transpose(1, 2)
        of_key = inputs["key_scale"][:, :, torch.arange(keys, device=q.device) // TILE].to(torch.float64)
        start = torch.zeros(queries * group, dtype=torch.int64, device=q.device)
        stop = (
            (row + 1).clamp(max=keys).repeat_interleave(group) if options["is_causal"] else torch.full_like(start, keys)
        )
        for b in range(batch):
            for g in range(of_keys):
                own = slice(g * group, (g + 1) * group)
                rows = q[b, :, own].reshape(queries * group, depth).to(torch.float64)
                wide = k[b, :, g].to(torch.float64) * of_key[b, g][:, None]  # 32 bits of 53
                values = v[b, :, g].view(torch.uint8).t()[at].contiguous().view(v.dtype)
                of_q, of_v = of_row[b, :, own].reshape(-1), inputs["value_scale"][b, g]
                problem = Attention(rows, wide, values, scale, of_q, one, of_v, start, stop)
                yield Place(problem, b, slice(b * queries, (b + 1) * queries), own)

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        batch, queries, heads, depth = inputs["query"].shape
        return batch * queries, heads, depth

    def laid(self, name: str, x: Tensor, inputs: Inputs) -> Tensor:
        return x.reshape(*inputs["query"].shape[:2], *x.shape[1:])

    def dtype(self, inputs: Inputs, options: Options) -> torch.dtype:
        dtype = options["out_dtype"]
        assert isinstance(dtype, torch.dtype)
        return dtype
