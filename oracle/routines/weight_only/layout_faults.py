"""Faults of the order of weight-only weights, scales and zero points.

The right kernel is the reference; a fault changes what it reads (READ), its options (OPTIONS) or its output (WRITE).

Source: the threads and files that each declaration names (``seen``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.routines.base import Call
from oracle.routines.fault import CAST, INDEX, MOVEMENT, VALUE, Change, Faults, always, both, entry, need, ones, way
from oracle.routines.ideas import rolled
from oracle.routines.traits import of_class, takes
from oracle.routines.weight_only import layouts
from oracle.truth import weight_only as truth
from oracle.verdict.sets import bits_of

ORDERED = of_class(layouts.MarlinLayout, layouts.GptqShuffle, layouts.PackFp8ToInt32)
REPACK, ZEROS, SHUFFLE = of_class(layouts.Repack), of_class(layouts.ZeroPoints), of_class(layouts.GptqShuffle)
SCALES = of_class(layouts.MarlinPermuteScales, layouts.MarlinPermuteBias)
FAULTS = Faults(ORDERED)
fault = FAULTS.declare
MARLIN = "vLLM csrc/quantization/marlin"
MINE = "no public thread: "
EQUAL = "it changes nothing"


def flipped(name: str) -> Change:
    """OPTIONS: the opposite of an option."""
    return lambda call, options: options | {name: not options[name]}


def _permuted(call: Call) -> bool:
    return bool({"perm", "q_perm"} & set(call.inputs))


def _perm(change: Callable[[Tensor], Tensor]) -> Change:
    """READ: another permutation of the rows."""
    return lambda call, inputs: {k: change(x) if k in ("perm", "q_perm") else x for k, x in inputs.items()}


fault(
    "order of weights: {}",
    INDEX,
    on=takes("perm") & ORDERED | takes("q_perm") & ORDERED,
    needs=need(_permuted, "there is no permutation"),
    over=(
        way("permutation of the rows ignored", lambda p: p.sort().values, seen="vllm 7374"),
        way("inverse permutation of the rows", lambda p: p.argsort().to(p.dtype), seen="sglang 36822"),
    ),
    read=_perm,
    same_if=EQUAL,
)
fault(
    "order of weights: tiles of the other width of activations",
    MOVEMENT,
    seen=f"{MARLIN}/gptq_marlin_repack.cu",
    on=takes("is_a_8bit") & ORDERED,
    options=flipped("is_a_8bit"),
    needs=need(
        lambda call: _admits(call), "the extents are not whole tiles of both, or scales of groups have one order"
    ),
    same_if=EQUAL,
)


def _admits(call: Call) -> bool:
    if isinstance(call.contract, layouts.MarlinPermuteScales):
        return 0 < int(call.resolved["group_size"]) < int(call.resolved["size_k"])
    return not isinstance(call.contract, layouts.Repack) or call.truth["out"].shape[0] % 2 == 0


def _fields(change: Callable[[Tensor, int], Tensor]) -> Change:
    """WRITE: the fields of every word, ``[words, fields]``, changed."""

    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name, out = next(iter(outputs.items()))
        bits = int(call.resolved.get("num_bits", call.resolved.get("bit", 8)))
        each = truth.fields(out.reshape(1, -1), bits).t()
        return outputs | {name: truth.words(change(each, bits).t().contiguous(), bits).reshape(out.shape)}

    return write


def _turned(order: Callable[[int], list[int]]) -> Callable[[Tensor, int], Tensor]:
    return lambda each, bits: each[:, order(each.shape[1])]


not_three = need(lambda call: call.resolved.get("bit") != 3, "three words hold 32 codes")
reordered = need(
    lambda call: call.resolved.get("bit") != 8 and not call.resolved.get("is_a_8bit"), "no order is applied"
)
fault(
    "order of weights: {}",
    MOVEMENT,
    on=REPACK | SHUFFLE | ZEROS | of_class(layouts.PackFp8ToInt32),
    needs=not_three,
    over=(
        way("fields of a word in reverse", lambda n: list(range(n))[::-1], seen=MINE + "most significant field first"),
        way("even and odd codes not parted", lambda n: [i // 2 + i % 2 * (n // 2) for i in range(n)],
            seen="vLLM csrc/quantization/gptq/qdq_4.cuh",
            on=REPACK | SHUFFLE | ZEROS, needs=both(not_three, reordered)),
        way("odd codes first", lambda n: [*range(n // 2, n), *range(n // 2)],
            seen="vLLM csrc/quantization/gptq/qdq_4.cuh", on=REPACK | SHUFFLE | ZEROS,
            needs=both(not_three, reordered)),
    ),
    write=lambda order: _fields(_turned(order)),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line


def _bits_moved(call: Call, out: Tensor) -> Tensor:
    """Bits 15 and 31 of every word exchanged: of codes 30 and 31."""
    wide = out.to(torch.int64) & 0xFFFFFFFF
    kept = wide & ~(1 << 15 | 1 << 31)
    return truth.signed(kept | (wide >> 15 & 1) << 31 | (wide >> 31 & 1) << 15)


fault(
    "order of weights: bits of codes 30 and 31 of 3 bits exchanged",
    MOVEMENT,
    seen="vLLM csrc/quantization/gptq/qdq_3.cuh",
    on=SHUFFLE,
    write=entry("q_weight", _bits_moved),
    needs=need(lambda call: call.resolved["bit"] == 3, "codes have not 3 bits"),
    same_if=EQUAL,
)


def _words_of(order: Callable[[Tensor], Tensor]) -> Change:
    """WRITE: the words of the tiles, ``[tiles, 32, n]``, n of each thread, in another order."""
    return entry(
        "out",
        lambda call, out: order(out.reshape(-1, 32, int(call.resolved["num_bits"]))).reshape(out.shape).contiguous(),
    )


fault(
    "order of weights: {}",
    MOVEMENT,
    on=REPACK,
    over=(
        way("words of a warp one behind the other", lambda x: x.transpose(1, 2),
            seen=f"{MARLIN}/gptq_marlin_repack.cu"),
        way("words of the next thread", lambda x: x.roll(-1, 1), seen=MINE + "an offset of one thread"),
        way("tiles in reverse", lambda x: x.flip(0), seen=MINE + "tiles down the columns",
            needs=need(lambda call: call.truth["out"].numel() > 32 * int(call.resolved["num_bits"]),
                "there is one tile")),
    ),
    write=_words_of,
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line


fault(
    "order of scales: left out",
    INDEX,
    seen="AutoGPTQ/AutoGPTQ PR 514",
    on=SCALES,
    write=lambda call, outputs: {"out": call.inputs["s"].clone()},
    same_if=EQUAL,
)
fault(
    "order of scales: that of columns for groups, of groups for columns",
    INDEX,
    seen="vLLM marlin_utils.py",
    on=of_class(layouts.MarlinPermuteScales),
    options=lambda call, o: (
        o | ({"group_size": -1} if 0 < int(o["group_size"]) < int(o["size_k"]) else {"group_size": 16, "size_k": 32})
    ),
    needs=need(
        lambda call: not call.resolved["is_a_8bit"] and call.inputs["s"].shape[1] % 64 == 0,
        "tiles of activations of 8 bits have one order",
    ),
    same_if=EQUAL,
)
fault(
    "order of zero points: scales' order left out",
    INDEX,
    seen="ModelCloud/GPTQModel 2350",
    on=ZEROS,
    read=lambda call, inputs: {k: _unordered(x, call) for k, x in inputs.items()},
    same_if=EQUAL,
)


def _unordered(x: Tensor, call: Call) -> Tensor:
    """The input whose right order is that of the given one."""
    bits, order = int(call.resolved["num_bits"]), truth.inverse(truth.SCALES)
    if isinstance(call.contract, layouts.MarlinZeroPoints):
        return truth.reordered(x, order)
    return truth.awq_words(truth.reordered(truth.awq_fields(x, bits), order), bits)


MX = of_class(layouts.MxMarlinProcessScales)
four = need(lambda call: not call.resolved["is_a_8bit"], "columns stay where they are")
fault(
    "E8M0 scales of Marlin: {}",
    VALUE,
    on=MX,
    over=(
        way("columns 1 and 2 of four not exchanged", lambda q: truth.reordered(q, (0, 2, 1, 3)),
            seen=f"{MARLIN}/dequant.h", needs=four, family=INDEX),
        way("exponent bias of E4M3 left out", lambda q: q - 6, seen=f"{MARLIN}/dequant.h",
            needs=need(lambda call: call.resolved["is_a_8bit"], "no bias is applied")),
        way("half of them", lambda q: q - 1, seen="triton PR 11737"),
        way("scales of the next row", rolled(-1), seen="NVIDIA/cutlass 2087", family=INDEX,
            needs=need(lambda call: call.truth["out"].shape[0] > 1, "one row")),
    ),
    write=lambda change: entry("out", lambda call, out: change(bits_of(out)).to(torch.uint8).view(out.dtype)),
    same_if=EQUAL,
)  # fmt: skip  # a table, one row a line

# --- values -------------------------------------------------------------------------------------------------

NVFP4, FUSED = of_class(layouts.Nvfp4MarlinProcessScales), of_class(layouts.Fp8FusedExponentBias)


def _bytes(change: Callable[[Tensor], Tensor]) -> Change:
    return entry("out", lambda call, out: change(bits_of(out)).to(torch.uint8).view(out.dtype))


def _unlifted(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs | {"out": truth.nvfp4_marlin_scales(call.inputs["marlin_scales"], 1.0)}


lifted = need(lambda call: float(call.truth["factor"]) > 1, "the factor is 1")
for name, family, seen, change, needs in (
    ("scales not lifted", VALUE, "vllm PR 37502", _unlifted, lifted),
    ("factor not published", VALUE, "vllm PR 47315", entry("factor", ones), lifted),
    ("inverse factor published", VALUE, "vllm PR 36297", entry("factor", lambda f: 1 / f), lifted),
    ("columns 1 and 2 of four not exchanged", INDEX,
        f"{MARLIN}/dequant.h", _bytes(lambda q: truth.reordered(q, (0, 2, 1, 3))), always),
    ("bytes of E4M3 kept", CAST, "vllm PR 34577", _bytes(lambda q: (q.to(torch.int64) - 64 - 7 * 8).clamp(min=0)),
        always),
    ("least scales not flushed", CAST, "vllm PR 34577", _bytes(lambda q: torch.where(q == 0, 127, q.to(torch.int64))),
        need(lambda call: bool((bits_of(call.truth["out"]) == 0).any()), "no scale is flushed")),
):  # fmt: skip  # a table, one row a line
    fault(f"NVFP4 scales of Marlin: {name}", family, seen=seen, on=NVFP4, write=change, needs=needs, same_if=EQUAL)


def _scaled(exponent: Callable[[Tensor], int]) -> Callable[[Tensor], Tensor]:
    return lambda out: (out.double() * 2.0 ** exponent(out)).to(out.dtype)


fault(
    "exponent bias: {}",
    VALUE,
    on=FUSED,
    over=(
        way("left out", lambda out: -120 if out.dtype is torch.bfloat16 else -8, seen="unsloth PR 6978"),
        way("that of the other format", lambda out: -112 if out.dtype is torch.bfloat16 else 7, seen="sglang PR 33533"),
        way("one too many", lambda out: 1, seen=f"{MARLIN}/dequant.h"),
    ),
    write=lambda exponent: entry("out", _scaled(exponent)),
    same_if="every scale is 0, infinite or NaN",
)
fault(
    "order of weights: columns shifted by one",
    MOVEMENT,
    seen=MINE + "an offset of one column",
    on=ORDERED - of_class(layouts.MarlinPermuteBias),
    write=lambda call, outputs: {**outputs, (k := next(iter(outputs))): rolled(1, -1)(outputs[k])},
    same_if=EQUAL,
)
