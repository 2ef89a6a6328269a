"""Faults of layers of experts with weights of 4 or 8 bits.

A right kernel has the stages READ, OPTIONS, STORE (the rows of pairs, float64 ``[J, M, H]``) and WRITE.

Source: the threads that each declaration names (``seen``).
"""

from __future__ import annotations

import torch

from oracle.routines.fault import ARITHMETIC, INDEX, MOVEMENT, VALUE, Faults, entries, need, ones, way
from oracle.routines.ideas import halves_swapped, pairs_swapped, rolled
from oracle.routines.traits import of_class
from oracle.routines.weight_only.layers import FusedMarlinMoe, SixteenBitLayer, TritonFusedExperts, TrtllmMxint4Moe

LAYERS, MARLIN, OGS = of_class(SixteenBitLayer), of_class(FusedMarlinMoe), of_class(TritonFusedExperts)
MXINT4 = of_class(TrtllmMxint4Moe)
FAULTS = Faults(LAYERS)
fault = FAULTS.declare
MINE = "no public thread: "
EQUAL, CLOSE = "it changes nothing", "it lies within the bounds of the layer"
several = need(lambda call: call.inputs["w1"].shape[0] > 1, "there is one expert")
slots = need(lambda call: call.inputs["topk_ids"].shape[1] > 1, "a token has one expert")
biased = need(lambda call: "bias1" in call.inputs, "there are no biases")


fault(
    "experts of 16 bits: {}",
    INDEX,
    over=(
        way("weights of the next expert", entries(("w1", "w2"), rolled(-1)), seen="vllm 48895", needs=several),
        way("scales of the next expert", entries(("w1_scale", "w2_scale"), rolled(-1)), seen="NVIDIA/cutlass 2087",
            needs=several),
        way("scales of the next column", entries(("w1_scale", "w2_scale"), rolled(-1, 2)), seen="NVIDIA/cutlass 2087"),
        way("biases of the next expert", entries(("bias1", "bias2"), rolled(-1)), seen="vllm PR 43694", needs=biased),
        way("biases left out", entries(("bias1", "bias2"), torch.zeros_like), seen="vllm PR 43694", family=VALUE,
            needs=biased),
        way("gate and up exchanged", entries(("w1", "w1_scale", "bias1"), halves_swapped(-1)), seen="sglang PR 11081",
            on=MARLIN | MXINT4),
        way("neighbouring gate and up exchanged", entries(("w1", "w1_scale", "bias1"), pairs_swapped),
            seen="vllm PR 22951", on=OGS),
        way("codes of 4 bits without their sign", entries(("w1", "w2"), lambda q: q ^ 8), on=MXINT4, family=VALUE,
            seen="vllm flashinfer_trtllm_moe: prepare_static_weights_for_trtllm_mxint4_moe"),
        way("weights of the next slot", entries(("topk_weights",), rolled(-1, 1)), seen="flashinfer 3547", needs=slots),
        way("weights of the next token", entries(("topk_weights",), rolled(-1)), seen="vllm 48895"),
        way("routing weights left out", entries(("topk_weights",), ones), seen="triton 6527", family=VALUE),
        way("rows of the next token", entries(("hidden_states",), rolled(-1)), seen="flashinfer 3547"),
        way("experts of the next token", entries(("topk_ids",), rolled(-1)), seen="flashinfer 3547"),
        way("absent experts as the first", entries(("topk_ids",), lambda ids: ids.clamp(min=0)), seen="vllm 42118",
            needs=need(lambda call: bool((call.inputs["topk_ids"] < 0).any()), "every slot has an expert")),
    ),
    read=lambda change: change,
    same_if=EQUAL,
    admissible_if=CLOSE,
)  # fmt: skip  # a table, one row a line
fault(
    "experts of 16 bits: {}",
    MOVEMENT,
    needs=slots,
    over=(
        way("last slot left out", lambda rows: rows[:-1], seen="vllm 48895"),
        way("the mean of the slots", lambda rows: rows / len(rows), seen=MINE + "a reduction of another kind",
            family=ARITHMETIC),
        way("last slot counted twice", lambda rows: torch.cat([rows, rows[-1:]]), seen=MINE + "a tail read again"),
    ),
    store=lambda change: change,
    same_if=EQUAL,
    admissible_if=CLOSE,
)  # fmt: skip  # a table, one row a line
