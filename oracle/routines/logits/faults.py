"""Faults of the MQA logits: ``k_scale[n] sum_h weights[m, h] relu(<q[m, h], k[n]>)`` inside a window of keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.fault import ARITHMETIC, INDEX, MOVEMENT, Call, Change, Faults, entry, need

# A fault is a row: what is wrong and where it was met; the change; when it shows.
# fmt: off
FAULTS = Faults({"fp8_mqa_logits"})
fault = FAULTS.declare

UNSPECIFIED = "outside the window the contract leaves the content open unless the kernel cleans"


def _page_first(x: Tensor) -> Tensor:
    """Only token 0 of every page of 64 is read."""
    return x[torch.arange(x.shape[0], device=x.device) // 64 * 64]


def _half_of_head(codes: Tensor) -> Tensor:
    """The swizzle width is that of a head half as long: the second half repeats the first."""
    half = codes.shape[-1] // 2
    return torch.cat([codes[..., :half], codes[..., :half]], dim=-1)


def _codes(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x.view(torch.uint8)).view(x.dtype)


def _recomputed(*, relu: bool, weighted: bool) -> Change:
    def change(call: Call, out: Tensor) -> Tensor:
        q, k = decode(call.inputs["q"]), decode(call.inputs["k"])
        x = torch.einsum("mhd,nd->mhn", q, k)
        x = x.clamp(min=0) if relu else x
        w = call.inputs["weights"].to(torch.float64) if weighted else torch.ones_like(call.inputs["weights"]).double()
        y = (x * w[:, :, None]).sum(dim=1) * call.inputs["k_scale"].to(torch.float64)[None, :]
        return torch.where(torch.isneginf(out), out, y.to(torch.float32))

    return change


def _window(delta: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A window that ends ``delta`` keys later: elements outside the right window carry numbers, or are cut."""

    def change(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        end = inputs["cu_seqlen_ke"]
        return inputs | {"cu_seqlen_ke": (end + delta).clamp(min=0, max=inputs["k"].shape[0]).to(end.dtype)}

    return change


fault("k_scale of the next key", INDEX, seen="mlc-ai/TIRx-kernels PR 5",
      read=entry("k_scale", lambda scale: torch.roll(scale, -1)))
fault("k_scale of the page's first key", INDEX, seen="aiter PR 5591", read=entry("k_scale", _page_first))
fault("weight of the next head", INDEX, seen="DeepGEMM 433", read=entry("weights", lambda w: torch.roll(w, -1, dims=1)))
fault("weight of the previous token", INDEX, seen="DeepGEMM 433",
      read=entry("weights", lambda w: torch.roll(w, 1, dims=0)),
      needs=need(lambda call: call.inputs["weights"].shape[0] > 1, "there is one token"))
fault("only token 0 of each page read", MOVEMENT, seen="aiter PR 5591", read=entry("k", _codes(_page_first)))
fault("shared-memory swizzle of half the head size", MOVEMENT, seen="DeepGEMM 433",
      read=entry("k", _codes(_half_of_head)))
fault("relu left out", ARITHMETIC, seen="DeepGEMM 433",
      write=_recomputed(relu=False, weighted=True), same_if="no dot product is negative")
fault("head weights left out", ARITHMETIC, seen="TensorRT-LLM PR 14199",
      write=_recomputed(relu=True, weighted=False), same_if="every weight is 1")
fault("last key of the window missed", MOVEMENT, seen="DeepGEMM 433", read=_window(-1))
fault("logits outside the window finite", MOVEMENT, seen="DeepGEMM 433",
      read=_window(1 << 20), admissible_if=UNSPECIFIED)
fault("masked logits filled with 0 instead of -inf", MOVEMENT, seen="flashinfer PR 4639",
      write=lambda out: torch.where(torch.isneginf(out), torch.zeros_like(out), out), admissible_if=UNSPECIFIED)
