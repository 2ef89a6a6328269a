"""Faults of layers of experts in blocks: whose scale a byte is, whose factor, which formula.

Beside those of every layer (:mod:`oracle.routines.moe.pipeline_faults`), with the same stages.

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oracle.numbers import mx_recipes
from oracle.routines.base import Call
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Change,
    Faults,
    WhyNot,
    both,
    entry,
    need,
    ones,
    way,
)
from oracle.routines.ideas import fields, first_for_all, halves_swapped, itself, rolled
from oracle.routines.moe.block_layers import BlockLayerContract, BlockPipeline
from oracle.routines.moe.pipeline_faults import several, two_slots
from oracle.routines.traits import Trait, of_class, takes
from oracle.truth.moe import Activation

LAYERS = of_class(BlockLayerContract)
FAULTS = Faults(LAYERS)
fault = FAULTS.declare


def of_rows(kind: str, holds: Callable[[BlockPipeline], object]) -> Trait:
    """Layers in blocks whose row is of a kind."""
    return Trait(kind, lambda contract: isinstance(contract, BlockLayerContract) and bool(holds(contract.row)))


PACKED = of_rows("has weights of two codes a byte", lambda row: row.packed)
POWERS = of_rows("has power-of-two scales", lambda row: not row.leveled)
NARROW = of_rows("stores its activation before it is quantised", lambda row: row.steps.first is None)
WIDE = of_rows("quantises its activation in float32", lambda row: row.steps.first is not None and not row.activations)
ROUNDED = of_rows("has scales of a rounded amax", lambda row: row.recipe is mx_recipes.VLLM_MXFP4_EXPERTS)
FLIP = "the rounding moves no code beyond its neighbours"
ONE_EXPERT = "the experts have equal values"


def _several_blocks(which: str) -> WhyNot:
    return need(lambda call: call.inputs[f"{which}_scale"].shape[2] > 1, "one block of a row")


def _given(name: str) -> WhyNot:
    return need(lambda call: name in call.inputs, "it is not given")


def _other(byte: Tensor) -> Tensor:
    return (byte >> 4) | (byte << 4)


for which in ("w13", "w2"):
    fault(
        "{}",
        INDEX,
        over=(
            way(f"blocks: {which} scales of the previous row", rolled(1, 1), seen="NVIDIA/cutlass 2087"),
            way(
                f"blocks: {which} scales of the next block of K",
                rolled(-1, 2),
                seen="mlc-ai/TIRx-kernels PR 5",
                needs=_several_blocks(which),
            ),
            way(f"blocks: {which} scales of the first row for all", first_for_all(1), seen="NVIDIA/cutlass 2154"),
        ),
        read=partial(entry, f"{which}_scale"),
    )
    fault(
        f"blocks: nibbles of {which} exchanged",
        MOVEMENT,
        seen="flashinfer 2569",
        on=PACKED,
        read=entry(which, _other),
        same_if="the nibbles of every byte are equal",
    )
    fault(
        f"blocks: {which} scales one power of two too high",
        VALUE,
        seen="sglang PR 25733",
        on=POWERS,
        read=entry(f"{which}_scale", lambda byte: (byte + 1).clamp(max=254)),
    )


def _named(names: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> Change:
    """READ: a change of these inputs where they are given."""
    return lambda call, inputs: inputs | {n: change(inputs[n]) for n in names if n in inputs}


for name, words in (
    ("a1_gscale", "encode scale of the input"),
    ("a2_gscale", "encode scale of the intermediate"),
    ("alpha1", "factor of the first product"),
    ("alpha2", "factor of the second product"),
    ("b1", "bias of the first product"),
    ("b2", "bias of the second product"),
    ("gates", "parameters of the activation"),
):
    fault(
        f"blocks: {words} of the next expert",
        INDEX,
        seen="flashinfer 3547, vllm 45212",
        on=LAYERS & takes(name),
        needs=both(_given(name), several),
        read=_named((name,), rolled(-1)),
        same_if=ONE_EXPERT,
        admissible_if=FLIP if "gscale" in name else "",
    )
fault(
    "{}",
    VALUE,
    over=(
        way("blocks: factor of the first product dropped", ("alpha1",), seen="TensorRT-LLM PR 14199"),
        way("blocks: factor of the second product dropped", ("alpha2",), seen="TensorRT-LLM PR 14199"),
    ),
    on=LAYERS & takes("alpha1"),
    read=lambda names: _named(names, ones),
    same_if="it is 1",
)
fault(
    "blocks: factors of 0",
    VALUE,
    seen="vllm 54189: a missing scale gives alphas of 0",
    on=LAYERS & takes("alpha1"),
    read=entry("alpha2", lambda alpha: torch.zeros_like(alpha)),
    same_if="every output is 0",
)
fault(
    "blocks: scale of the input given as amax over 2688",
    VALUE,
    seen="vllm 45212: 1 / input_scale",
    on=LAYERS & takes("a1_gscale"),
    read=entry("a1_gscale", lambda scale: 1 / scale),
    same_if="it is 1",
)
GIVEN = of_rows("is given codes of its input", lambda row: row.given)
fault(
    "blocks: scales of the input of the next token",
    INDEX,
    seen="flashinfer 2569",
    on=GIVEN,
    needs=need(lambda call: call.inputs["a_scale"].shape[0] > 1, "one token"),
    read=entry("a_scale", rolled(-1)),
    same_if="the scales of all tokens are equal",
)
fault(
    "blocks: scales of the input of the next block of K",
    INDEX,
    seen="mlc-ai/TIRx-kernels PR 5",
    on=GIVEN,
    needs=need(lambda call: call.inputs["a_scale"].shape[1] > 1, "one block of a row"),
    read=entry("a_scale", rolled(-1, 1)),
    same_if="the scales of a row are equal",
)
biased = _given("b1")
BIASED = LAYERS & takes("b1")
fault(
    "{}",
    ARITHMETIC,
    on=BIASED,
    needs=biased,
    over=(
        way("blocks: bias of the first product left out", _named(("b1",), torch.zeros_like), seen="triton 6527"),
        way("blocks: bias of the second product left out", _named(("b2",), torch.zeros_like), seen="triton 6527"),
        way(
            "blocks: halves of the first bias exchanged",
            _named(("b1",), halves_swapped(-1)),
            seen="sglang PR 11081",
            family=MOVEMENT,
        ),
    ),
    read=itself,
    same_if="every bias is 0",
)
gated = _given("gates")
fault(
    "{}",
    ARITHMETIC,
    on=LAYERS & takes("gates"),
    needs=gated,
    over=(
        way("blocks: alpha of the activation ignored", (0, 1.0), seen="vllm PR 45738, sglang PR 39939"),
        way("blocks: nothing added to up", (1, 0.0), seen="vllm PR 45738, sglang PR 39920"),
        way(
            "blocks: limit of the activation ignored",
            (2, torch.inf),
            seen="TensorRT-LLM PR 13767, transformers PR 40197",
        ),
    ),
    read=lambda change: entry("gates", lambda gates: _column(gates, *change)),
    same_if="it changes nothing",
)


def _column(gates: Tensor, column: int, value: float | Tensor) -> Tensor:
    changed = gates.clone()
    changed[:, column] = value
    return changed


fault(
    "blocks: limit of the activation on the raw sum",
    VALUE,
    seen="vLLM trtllm_nvfp4_moe: its callers fold the factor into the limit",
    on=LAYERS & takes("gates"),
    needs=gated,
    read=lambda call, inputs: (
        inputs
        | {"gates": torch.cat([inputs["gates"][:, :2], inputs["gates"][:, 2:] * inputs["alpha1"][:, None]], dim=1)}
    ),
    same_if="no operand reaches either limit",
)

# --- roundings between --------------------------------------------------------------------------------------

fault(
    "blocks: activation quantised before it is rounded",
    CAST,
    seen="FlashInfer cute_dsl beside cutlass",
    on=NARROW,
    recipe=fields(activation=Activation.NONE),
    same_if="every activation is a bfloat16 value",
    admissible_if=FLIP,
)
fault(
    "blocks: activation rounded before it is quantised",
    CAST,
    seen="FlashInfer cutlass beside cute_dsl",
    on=WIDE,
    recipe=fields(activation=Activation.PRODUCT),
    same_if="every activation is a bfloat16 value",
    admissible_if=FLIP,
)
fault(
    "blocks: shared scale rounded up where it steps at a rounded amax",
    VALUE,
    seen="vLLM mxfp4_experts_quant beside FlashInfer mxfp4_quantize",
    on=ROUNDED,
    recipe=fields(recipe=mx_recipes.FLASHINFER_MXFP4),
    same_if="no amax lies between 1.5 and 1.75 powers of two",
    admissible_if=FLIP,
)
fault(
    "blocks: weight of the first slot for every expert",
    INDEX,
    seen="vllm 48895",
    needs=two_slots,
    product=lambda tokens: replace(tokens, weights=tokens.weights[:, :1].expand_as(tokens.weights).contiguous()),
    same_if="all weights of a token are equal",
)


def _tail(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scales of the last block along K as those of bytes behind the end, which are 0."""
    scale = inputs["w2_scale"].clone()
    scale[..., -1] = 0
    return inputs | {"w2_scale": scale}


fault(
    "blocks: scales of the last block along K lost",
    MOVEMENT,
    seen="triton 10772, vllm 47303: a tail of K loaded without its mask",
    needs=_several_blocks("w2"),
    read=_tail,
    same_if="the last block of every row is 0",
)
