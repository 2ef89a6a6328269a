"""Faults of the MQA logits: ``k_scale[n] sum_h weights[m, h] relu(<q[m, h], k[n]>)`` inside a window of keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.numbers.formats import decode
from oracle.routines.fault import Call, Change, Family, Fault, Stage, WhyNot, always

LOGITS = "fp8_mqa_logits"

CONTRACTS = frozenset({LOGITS})
UNSPECIFIED = "outside the window the contract leaves the content open unless the kernel cleans"


def _input(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return inputs | {name: change(inputs[name])}

    return apply


def _bits(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x.view(torch.uint8)).view(x.dtype)


def _half_of_head(codes: Tensor) -> Tensor:
    """The swizzle width is that of a head half as long: the second half repeats the first."""
    half = codes.shape[-1] // 2
    return torch.cat([codes[..., :half], codes[..., :half]], dim=-1)


def _page_first(codes: Tensor) -> Tensor:
    """Only token 0 of every page of 64 is read."""
    return codes[torch.arange(codes.shape[0], device=codes.device) // 64 * 64]


def _recomputed(relu: bool, weighted: bool) -> Change:
    def change(call: Call, out: Tensor) -> Tensor:
        q, k = decode(call.inputs["q"]), decode(call.inputs["k"])
        x = torch.einsum("mhd,nd->mhn", q, k)
        x = x.clamp(min=0) if relu else x
        w = call.inputs["weights"].to(torch.float64) if weighted else torch.ones_like(call.inputs["weights"]).double()
        y = (x * w[:, :, None]).sum(dim=1) * call.inputs["k_scale"].to(torch.float64)[None, :]
        return torch.where(torch.isneginf(out), out, y.to(torch.float32))

    return change


def _window(delta: int) -> Change:
    """A window that ends ``delta`` keys later: elements outside the right window carry numbers, or are cut."""

    def apply(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        end = inputs["cu_seqlen_ke"]
        return inputs | {"cu_seqlen_ke": (end + delta).clamp(min=0, max=inputs["k"].shape[0]).to(end.dtype)}

    return apply


def _fault(
    name: str,
    family: Family,
    met_in: str,
    stage: Stage,
    change: Change,
    why_not: WhyNot = always,
    equivalent: str = "",
    tolerated: str = "",
) -> Fault:
    return Fault(name, family, met_in, {stage: change}, CONTRACTS, why_not, equivalent, tolerated)


def faults() -> list[Fault]:
    """The faults of the logits kernels."""
    index, move, math = Family.SCALE_INDEX, Family.MOVEMENT, Family.ARITHMETIC
    return [
        _fault(
            "k_scale of the next key",
            index,
            "mlc-ai/TIRx-kernels PR 5",
            Stage.READ,
            _input("k_scale", lambda s: torch.roll(s, -1)),
        ),
        _fault("k_scale of the page's first key", index, "aiter PR 5591", Stage.READ, _input("k_scale", _page_first)),
        _fault(
            "weight of the next head",
            index,
            "DeepGEMM 433",
            Stage.READ,
            _input("weights", lambda w: torch.roll(w, -1, dims=1)),
        ),
        _fault(
            "weight of the previous token",
            index,
            "DeepGEMM 433",
            Stage.READ,
            _input("weights", lambda w: torch.roll(w, 1, dims=0)),
            lambda c: None if c.inputs["weights"].shape[0] > 1 else "there is one token",
        ),
        _fault("only token 0 of each page read", move, "aiter PR 5591", Stage.READ, _input("k", _bits(_page_first))),
        _fault(
            "shared-memory swizzle of half the head size",
            move,
            "DeepGEMM 433",
            Stage.READ,
            _input("k", _bits(_half_of_head)),
        ),
        _fault(
            "relu left out",
            math,
            "DeepGEMM 433",
            Stage.WRITE,
            _recomputed(relu=False, weighted=True),
            always,
            "no dot product is negative",
        ),
        _fault(
            "head weights left out",
            math,
            "TensorRT-LLM PR 14199",
            Stage.WRITE,
            _recomputed(relu=True, weighted=False),
            always,
            "every weight is 1",
        ),
        _fault("last key of the window missed", move, "DeepGEMM 433", Stage.READ, _window(-1)),
        _fault(
            "logits outside the window finite",
            move,
            "DeepGEMM 433",
            Stage.READ,
            _window(1 << 20),
            always,
            "",
            UNSPECIFIED,
        ),
        _fault(
            "masked logits filled with 0 instead of -inf",
            move,
            "flashinfer PR 4639",
            Stage.WRITE,
            lambda call, out: torch.where(torch.isneginf(out), torch.zeros_like(out), out),
            always,
            "",
            UNSPECIFIED,
        ),
    ]
