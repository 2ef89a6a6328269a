"""A rotary embedding in E4M3 whose keys and values go into the pages of a cache.

What is quantised is that of :mod:`oracle.routines.fused.kernels`; where it goes is that of
:mod:`oracle.routines.kv_cache.writers`. Not covered: MLA's compressed rows, E5M2.

NaN values are coded as NaN; bits that are not written stay.
Source: FlashInfer include/flashinfer/pos_enc.cuh RopeQuantizeAppendPagedKVCacheKernel (0.6.18.post1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import OptionError, ShapeError
from oracle.routines.base import E4M3, Call, Inputs, Options, Out, TensorSpec, register
from oracle.routines.fused.kernels import NAMES, NARROW, RopeQuantizeFp8
from oracle.routines.kv_cache.contract import flat
from oracle.routines.kv_cache.writers import LAYOUT, PAGES, paged, slots_of_requests
from oracle.routines.traits import Kind
from oracle.verdict.sets import Found

TABLES = (*(replace(spec, dims=("T",)) for spec in PAGES[:2]), *PAGES[2:4])
CACHES = ("k_cache", "v_cache")


@register
class RopeQuantizeFp8AppendPagedKvCache(RopeQuantizeFp8):
    """Keys, rotated columns first, and values times ``quant_scale_kv`` are coded into pages: token ``i`` goes to page
    ``kv_indices[kv_indptr[b] + p // P]`` at ``p mod P``, ``b = batch_indices[i]``, ``p = positions[i]``. What no token
    writes holds what it held; two tokens do not share a slot."""

    name = "rope_quantize_fp8_append_paged_kv_cache"
    section = "KV cache"
    summary = "rotary embedding of query and key in E4M3, keys and values into the pages of their requests"
    source = "FlashInfer flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache"
    dispatched = False
    interval = False
    beside = "what no token writes"
    parts: ClassVar[tuple[str, ...]] = (*NAMES, "v")
    returns = ("q_rope", "q_nope", *CACHES)
    inputs = (
        *RopeQuantizeFp8.inputs[:4],
        TensorSpec("v", Kind.VALUES, NARROW, ("T", "G", "C"), "values, C = D + N"),
        *RopeQuantizeFp8.inputs[4:],
        *(TensorSpec(name, Kind.STATE, E4M3, None, "pages before the call") for name in CACHES),
        *TABLES,
    )
    options = (*RopeQuantizeFp8.options, LAYOUT)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        (_, heads, depth), shape = inputs["v"].shape, tuple(inputs["k_cache"].shape)
        if depth != inputs["k_rope"].shape[2] + inputs["k_nope"].shape[2]:
            raise ShapeError(f"v has {depth} columns; the key has as many, rotated ones and others")
        if len(shape) != 4 or tuple(inputs["v_cache"].shape) != shape:
            raise ShapeError(f"k_cache has shape {list(shape)}, v_cache {list(inputs['v_cache'].shape)}; pass pages")
        page = shape[1] if options["kv_layout"] == "NHD" else shape[2]
        due = (shape[0], page, heads, depth) if options["kv_layout"] == "NHD" else (shape[0], heads, page, depth)
        if shape != due:
            raise ShapeError(f"k_cache has shape {list(shape)}; these heads take {list(due)}")
        indptr, batch = inputs["kv_indptr"].long(), inputs["batch_indices"].long()
        if int(indptr[0]) or bool((indptr.diff() < 0).any()) or int(indptr[-1]) > len(inputs["kv_indices"]):
            raise OptionError(f"kv_indptr {indptr.tolist()} does not rise from 0 to {len(inputs['kv_indices'])}")
        position = inputs["positions"].long()
        known = bool((batch >= 0).all()) and bool((batch < len(indptr) - 1).all()) and bool((position >= 0).all())
        if not known or bool((position >= indptr.diff()[batch] * page).any()):
            raise OptionError(f"positions {position.tolist()} of requests {batch.tolist()} leave their pages")
        slot = slots_of_requests(inputs, page)
        if bool((slot < 0).any()) or bool((slot >= shape[0] * page).any()) or len(set(slot.tolist())) < len(slot):
            raise OptionError(f"tokens go to slots {slot.tolist()} of {shape[0] * page}; each has one of its own")

    def _part(
        self, name: str, inputs: Inputs, options: Options, *, flushed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        if name == "v":
            return super()._part("k_nope", {**inputs, "k_nope": inputs["v"]}, options, flushed=flushed)
        return super()._part(name, inputs, options, flushed=flushed)

    def outputs(self, call: Call) -> dict[str, Out]:
        return {name: Out(tuple(call.inputs[name].shape), E4M3) for name in self.returns}

    def places(self, inputs: Inputs, layout: str) -> Tensor:
        """Places ``[T, G, C]``, int64, of the tokens in a cache. NaN is no place. Source: as of the module."""
        shape = tuple(inputs["k_cache"].shape)
        return paged(slots_of_requests(inputs, shape[1] if layout == "NHD" else shape[2]), shape, layout)

    def split(self, outputs: Found, call: Call) -> dict[str, Tensor]:
        at, width = self.places(call.inputs, str(call.resolved["kv_layout"])), call.inputs["k_rope"].shape[2]
        keys, values = (flat(outputs[name]).view(torch.uint8)[at] for name in CACHES)
        tensors = {
            "q_rope": outputs["q_rope"], "k_rope": keys[..., :width], "q_nope": outputs["q_nope"],
            "k_nope": keys[..., width:], "v": values,
        }  # fmt: skip  # in the order of the parts
        row = torch.cat([tensors[name].reshape(-1).view(torch.uint8) for name in self.parts])
        return {"q": row[None].view(torch.float8_e4m3fn), "scale": self.given(call.inputs)["scale"]}

    def placed(self, row: Tensor, call: Call, inputs: Inputs, *, kept: bool) -> dict[str, Tensor]:
        """The four outputs in their shapes, uint8, of one ``row`` ``[1, n]``, uint8; elsewhere the pages before the
        call where they are ``kept``, zeros else."""
        pieces = torch.split(row.flatten(), [inputs[name].numel() for name in self.parts])
        parts = {name: p.reshape(inputs[name].shape) for name, p in zip(self.parts, pieces, strict=True)}
        at = self.places(inputs, str(call.resolved["kv_layout"])).flatten()
        found = {name: parts[name].contiguous() for name in ("q_rope", "q_nope")}
        for name, values in zip(
            CACHES, (torch.cat([parts["k_rope"], parts["k_nope"]], dim=-1), parts["v"]), strict=True
        ):
            before = call.inputs[name].contiguous().view(torch.uint8)
            memory = (before.clone() if kept else torch.zeros_like(before)).flatten()
            memory[at] = values.flatten()
            found[name] = memory.reshape(before.shape)
        return found

    def published(self, outputs: Found, inputs: Inputs, call: Call) -> dict[str, Tensor]:
        made = self.placed(outputs["q"].view(torch.uint8), call, inputs, kept=True)
        return {name: x.view(outputs["q"].dtype) for name, x in made.items()}

    def changed(self, outputs: Found, call: Call) -> dict[str, Tensor]:
        """Which bits of the caches, uint8 in their shapes, differ from those before the call where no token goes."""
        ones = torch.ones(self.shape(call.inputs), dtype=torch.uint8, device=call.inputs["v"].device)
        written = self.placed(ones, call, call.inputs, kept=False)
        pairs = {name: (outputs[name].view(torch.uint8), call.inputs[name].view(torch.uint8)) for name in CACHES}
        return {name: (after ^ before).masked_fill(written[name] != 0, 0) for name, (after, before) in pairs.items()}

    def zeros(self, outputs: Found, call: Call) -> Tensor:
        return torch.cat([changed.flatten() for changed in self.changed(outputs, call).values()])

    def refused(self, call: Call, outputs: Found, right: Found) -> dict[str, Tensor] | None:
        inner = self.inner(call)
        bad = inner.contract.refused(inner, self.split(outputs, call), self.split(right, call))
        assert bad is not None
        masks = self.placed(bad["q"].to(torch.uint8), call, call.inputs, kept=False)
        changed = self.changed(outputs, call)
        return {name: (mask | changed.get(name, torch.zeros_like(mask))) != 0 for name, mask in masks.items()}
