"""Attention whose queries and keys have a scale for every 32 or 16 columns, with values of 16 bits.

Source: FlashInfer 0.6.18.post1 attention/cute_dsl/fmha_blockscaled.py. Not covered: values of E4M3, whose weights are
rounded to E4M3 too; the log-sum-exp; windows; tiles whose softmax is left out below a threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.bounds.ieee32 import NAME as IEEE32
from oracle.errors import DtypeError, ShapeError
from oracle.numbers.formats import E2M1, E8M0, decode
from oracle.routines.attention.contract import Place, group_of, positive_or_none, windows
from oracle.routines.attention.wide import HALVES, WideAttention
from oracle.routines.base import E4M3, Inputs, Options, OptionSpec, TensorSpec, register
from oracle.routines.mx.contract import unpack
from oracle.routines.traits import Kind
from oracle.truth.attention import Attention

CODES, BYTES = (*E4M3, torch.uint8), (torch.uint8, *E4M3)


@register
class CuteDslFmhaBlockscaledPrefill(WideAttention):
    """MXFP8: codes of E4M3, a byte of E8M0 for 32 columns; NVFP4: two codes of E2M1 a byte, a scale of E4M3 for 16.
    Scales lie in rows here, in the kernel's memory in tiles of 128x4. Products of codes and scales are exact, and
    ``scale_q * scale_k * sm_scale`` multiplies a score, ``scale_v / scale_o`` the output. The last query stands at the
    last key, and with ``is_causal`` a query sees no key behind its place; every query sees one."""

    name = "cute_dsl_fmha_blockscaled_prefill"
    summary = "prefill of MXFP8 or NVFP4 queries and keys and 16-bit values"
    source = "FlashInfer flashinfer.attention.cute_dsl.fmha_blockscaled cute_dsl_fmha_blockscaled_prefill"
    returns = ("out",)
    dispatched = False
    shapes: ClassVar[Mapping[str, str]] = {"out": "[B, S, H, V], of the dtype of v"}
    numerics: ClassVar[Mapping[str, tuple[str, ...]]] = {"sm90": (IEEE32,), "cpu": (IEEE32,)}
    plain: ClassVar[tuple[str, ...]] = (IEEE32,)
    inputs = (
        TensorSpec("q", Kind.CODES, CODES, ("B", "S", "H", "D"), "query codes"),
        TensorSpec("k", Kind.CODES, CODES, ("B", "N", "G", "D"), "key codes of the G KV heads"),
        TensorSpec("q_sf", Kind.SCALES, BYTES, ("B", "S", "H", "X"), "scales of the queries, logical"),
        TensorSpec("k_sf", Kind.SCALES, BYTES, ("B", "N", "G", "X"), "scales of the keys, logical"),
        TensorSpec("v", Kind.VALUES, HALVES, ("B", "N", "G", "V"), "values"),
    )
    options = (
        OptionSpec("is_causal", False, (False, True), "no key behind the place of a query"),
        OptionSpec("sm_scale", None, None, "what multiplies a score; None: the columns^-0.5"),
        *(OptionSpec(f"scale_{name}", None, None, "of the whole tensor; None: 1") for name in "qkvo"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        super().refuse(inputs, options)
        bound = self.extents(inputs)
        group_of(inputs, self.name)
        if options["is_causal"] and bound["S"] > bound["N"]:
            raise ShapeError(f"{self.name}: is_causal, {bound['S']} queries, {bound['N']} keys; pass a key for each")
        packed, scaled = inputs["q"].dtype is torch.uint8, inputs["q_sf"].dtype is not torch.uint8
        if packed != scaled or any(inputs[f"k{x}"].dtype != inputs[f"q{x}"].dtype for x in ("", "_sf")):
            raise DtypeError(f"{self.name}: pass E4M3 codes with bytes of E8M0, or bytes of E2M1 with scales of E4M3")
        columns, block = (2 * bound["D"], 16) if packed else (bound["D"], 32)
        if columns != bound["X"] * block:
            raise ShapeError(f"{self.name}: {columns} columns have {bound['X']} scales; pass one for every {block}")
        for name in ("sm_scale", "scale_q", "scale_k", "scale_v", "scale_o"):
            positive_or_none(self.name, options, name)

    def masked(self, options: Options) -> bool:
        return bool(options["is_causal"])

    def narrow(self, inputs: Inputs) -> torch.dtype | None:
        return inputs["v"].dtype

    def shape(self, inputs: Inputs) -> tuple[int, int, int]:
        batch, queries, heads, _ = inputs["q"].shape
        return batch * queries, heads, inputs["v"].shape[3]

    def laid(self, name: str, x: Tensor, inputs: Inputs) -> Tensor:
        return x.reshape(*inputs["q"].shape[:2], *x.shape[1:])

    @staticmethod
    def values(codes: Tensor, scales: Tensor) -> Tensor:
        """``codes`` ``[B, S, H, D]`` times their ``scales`` ``[B, S, H, X]``, float64 ``[B, S, H, D]``, of two codes a
        byte ``[B, S, H, 2 D]``; NaN codes and NaN scales give NaN. Source: as of the module."""
        if codes.dtype is torch.uint8:
            wide = decode(unpack(codes.flatten(0, -2)), E2M1).reshape(*codes.shape[:-1], -1)
            return wide * decode(scales).repeat_interleave(16, dim=-1)
        return decode(codes) * decode(scales, E8M0).repeat_interleave(32, dim=-1)

    def places(self, inputs: Inputs, options: Options, numerics: str = IEEE32) -> Iterator[Place]:
        q, k = (self.values(inputs[name], inputs[f"{name}_sf"]) for name in "qk")
        (batch, queries, _, depth), (_, keys, of_keys, _) = q.shape, k.shape
        group, given = group_of(inputs, self.name), {x: float(options[f"scale_{x}"] or 1.0) for x in "qkvo"}
        one = torch.ones((), dtype=torch.float32, device=q.device)
        scale = float(options["sm_scale"] or depth**-0.5) * given["q"] * given["k"]
        start, stop = windows(queries, keys, group, -1, 0 if options["is_causal"] else -1, q.device)
        for b in range(batch):
            for g in range(of_keys):
                own = slice(g * group, (g + 1) * group)
                rows = q[b, :, own].reshape(queries * group, depth)
                factor = one * (given["v"] / given["o"])
                values = decode(inputs["v"][b, :, g])
                problem = Attention(rows, k[b, :, g], values, scale, one.expand(len(rows)), one, factor, start, stop)
                yield Place(problem, b, slice(b * queries, (b + 1) * queries), own)
