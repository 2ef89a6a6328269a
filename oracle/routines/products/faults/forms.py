"""Faults of what surrounds a multiplication: a summand, groups of K, heads, batches, runs of rows, int4 weights.

What any product can have (scales, codes, stores, tiles) stands in the other files and applies to these contracts too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from oracle.numbers.formats import codes_of, decode
from oracle.numbers.rounding import Overflow, Rounding, to_dtype
from oracle.routines.base import Call
from oracle.routines.fault import (
    ARITHMETIC,
    CAST,
    INDEX,
    MOVEMENT,
    VALUE,
    Faults,
    WhyNot,
    always,
    both,
    entry,
    need,
    way,
)
from oracle.routines.ideas import itself
from oracle.routines.mutants import stale
from oracle.routines.products.mixed import (
    GROUP,
    EncodeAndReorderInt4,
    EncodeInt4,
    PackScale,
    encoded,
    nibbles,
    words,
)
from oracle.routines.products.roles import b_by_row, each, matrices, matrix, of_the_next, operand, rolled, several_rows
from oracle.routines.products.traits import (
    A_BY_BLOCK,
    B_BY_ROW,
    BATCHED,
    BY_ENDS,
    HEAD_GAP,
    HEADS,
    INT4,
    K_IN_GROUPS,
    PRODUCT,
    RUNS,
    SUMMED,
    TURNED,
)
from oracle.routines.traits import of_class
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.sets import rounded_to

# A fault is a row: what is wrong and where it was met; the change; when it shows.
FAULTS = Faults(PRODUCT)
fault = FAULTS.declare
EQUAL = "what is exchanged is equal"

several_parts = need(lambda call: len(call.parts) > 1, "there is one group")


# --- a summand ----------------------------------------------------------------------------------------------

summed = need(lambda call: call.parts[0].product.c is not None, "there is no summand")


def _summand(change: Callable[[Tensor], Tensor | None]) -> Callable[[ScaledProduct], ScaledProduct]:
    return lambda product: product if product.c is None else replace(product, c=change(product.c))


for name, seen, change, same_if in (
    ("c ignored", "cutlass PR 3149", lambda c: None, "c is zero"),
    ("c added twice", "cutlass PR 3149", lambda c: c + c, "c is zero"),
    ("c subtracted", "no public thread: the sign of beta", lambda c: -c, "c is zero"),
    ("c of the next row", "cutlass PR 3149", lambda c: torch.roll(c, -1, 0), "every row of c is equal"),
    ("c of the next column", "cutlass PR 3149", lambda c: torch.roll(c, -1, 1), "every column of c is equal"),
    (
        "c of eight rows on in every second group of eight rows",
        "NVIDIA/cutlass PR 3278",
        lambda c: c[(r := torch.arange(len(c), device=c.device)) + torch.where(r % 16 < 8, 0, 8) - len(c)],
        "every row of c is equal",
    ),
    (
        "c rounded to bfloat16",
        "DeepGEMM csrc/apis/gemm.hpp, where c has the output's dtype",
        lambda c: rounded_to(decode(c), torch.bfloat16).to(torch.float32),
        "every c is a bfloat16 value",
    ),
):
    fault(name, ARITHMETIC, seen=seen, on=SUMMED, product=_summand(change), needs=summed, same_if=same_if)
fault(
    "B scale per 128 rows instead of per row",
    INDEX,
    seen="DeepGEMM csrc/apis/gemm.hpp: recipe (1, 128, 128)",
    on=B_BY_ROW,
    read=each("b_scale", lambda scale: scale[torch.arange(len(scale), device=scale.device) // 128 * 128]),
    needs=both(b_by_row, several_rows("b_scale")),
    same_if=EQUAL,
)


# --- groups of K --------------------------------------------------------------------------------------------


def _groups(role: str, change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """All matrices of a role changed together."""

    def read(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = call.contract.roles[role]
        whole = inputs[name].clone()
        changed = [m.clone() for m in change(matrices(call, role, inputs[name]))]
        for place, m in zip(matrices(call, role, whole), changed, strict=True):
            place.copy_(m)
        return inputs | {name: whole}

    return read


def _last_block_of_next(parts: list[Tensor]) -> list[Tensor]:
    """The last load of a group goes through the descriptor that the next one has put in its place."""
    copies = [part.clone() for part in parts]
    for own, following in zip(copies, parts[1:], strict=False):
        own.view(torch.uint8)[:, -128:] = following.view(torch.uint8)[:, :128]
    return copies


def _first_pitch(parts: list[Tensor]) -> list[Tensor]:
    """Rows as far apart as those of the first group."""
    pitch, flat = parts[0].shape[1], torch.cat([codes_of(part).flatten() for part in parts])
    read, start = [], 0
    for part in parts:
        rows, columns = (torch.arange(size, device=part.device) for size in part.shape)
        rows, columns = rows[:, None], columns[None, :]
        read.append(flat[(start + rows * pitch + columns) % len(flat)].view(part.dtype))
        start += part.numel()
    return read


def _scales_from(first: Callable[[int], int]) -> Callable[[list[Tensor]], list[Tensor]]:
    """The scales of a group begin at block ``first(its right first block)``."""

    def change(parts: list[Tensor]) -> list[Tensor]:
        whole, views, start = torch.cat(parts, dim=1), [], 0
        for part in parts:
            at = first(start) + torch.arange(part.shape[1], device=part.device)
            views.append(whole[:, at % whole.shape[1]])
            start += part.shape[1]
        return views

    return change


several_k_groups = need(lambda call: int((call.inputs["ks"] > 0).sum()) > 1, "one group has steps")
unlike = need(lambda call: len({int(k) for k in call.inputs["ks"] if k}) > 1, "all groups have as many steps")
for role, what in (("a", "A"), ("b", "B")):
    fault(
        f"last block of a group of {what} loaded through the next group's descriptor",
        MOVEMENT,
        seen="DeepGEMM 365, PR 343",
        on=K_IN_GROUPS,
        read=_groups(role, _last_block_of_next),
        needs=several_k_groups,
        same_if="both blocks are equal",
        race=True,
    )
    fault(
        f"row pitch of the first group of {what} kept for all",
        MOVEMENT,
        seen="DeepGEMM PR 343",
        on=K_IN_GROUPS,
        read=_groups(role, _first_pitch),
        needs=unlike,
        same_if=EQUAL,
    )
    for name, seen, first in (
        ("begin at block 0", "DeepGEMM PR 375", lambda start: 0),
        ("begin at a multiple of four blocks", "DeepGEMM PR 375", lambda start: -(-start // 4) * 4),
    ):
        fault(
            f"{what} scales of every group {name}",
            INDEX,
            seen=seen,
            on=K_IN_GROUPS,
            read=_groups(f"{role}_scale", _scales_from(first)),
            needs=several_k_groups,
            same_if=EQUAL,
        )


@fault(
    "group without steps not copied from c",
    MOVEMENT,
    seen="DeepGEMM csrc/apis/gemm.hpp: early_return",
    on=K_IN_GROUPS,
    needs=need(lambda call: bool((call.inputs["ks"] == 0).any()), "every group has steps"),
    same_if="c is zero there",
)
def write_no_empty_group(call: Call, out: Tensor) -> Tensor:
    out, m = out.clone(), call.operands.shape[1]
    for g in torch.nonzero(call.inputs["ks"] == 0)[:, 0].tolist():
        out[g * m : (g + 1) * m] = 0
    return out


@fault(
    "group without steps has the sums of the group before",
    MOVEMENT,
    seen="NVIDIA/cutlass 2674",
    on=K_IN_GROUPS,
    needs=need(lambda call: bool((call.inputs["ks"][1:] == 0).any()), "every group behind the first has steps"),
    same_if="the sums of both are equal",
)
def write_sums_of_the_group_before(call: Call, out: Tensor) -> Tensor:
    out, m = out.clone(), call.operands.shape[1]
    for g in (torch.nonzero(call.inputs["ks"][1:] == 0)[:, 0] + 1).tolist():
        out[g * m : (g + 1) * m] = out[(g - 1) * m : g * m]
    return out


@fault(
    "padding of A scales added to the first rows of the next group",
    MOVEMENT,
    seen="no public thread: a tile of the last rows is added whole, its scales past M unwritten",
    on=K_IN_GROUPS,
    needs=both(several_k_groups, need(lambda c: c.operands.shape[1] % 4, "M is whole")),
)
def write_padding_added(call: Call, out: Tensor) -> Tensor:
    """Scales are read in columns of align(M, 4); a NaN there times a zero sum is added where the next group begins."""
    out, m = out.clone(), call.operands.shape[1]
    for g, k in enumerate(call.inputs["ks"].tolist()[:-1]):
        if k:
            out[(g + 1) * m : (g + 1) * m + min(m, -m % 4)] = torch.nan
    return out


# --- transposed operands ------------------------------------------------------------------------------------


def _square(role: str) -> WhyNot:
    return need(
        lambda call: matrix(call, role).shape[0] == matrix(call, role).shape[1] > 1,
        lambda call: f"{role} is {list(matrix(call, role).shape)}, not square",
    )


def _other_major(x: Tensor) -> Tensor:
    """Memory ``[N, K]`` read as ``[K, N]``."""
    return codes_of(x).contiguous().view(x.shape[1], x.shape[0]).t().contiguous().view(x.dtype)


for role in ("a", "b"):
    fault(
        f"{role.upper()} transposed where it is square",
        MOVEMENT,
        seen="flashinfer 2147",
        on=TURNED,
        read=each(role, lambda x: codes_of(x).t().contiguous().view(x.dtype)),
        needs=_square(role),
        same_if="the matrix is symmetric",
    )
fault(
    "row-major B read column by column",
    MOVEMENT,
    seen="flashinfer bmm_fp8, whose strides nothing checks",
    on=TURNED,
    read=each("b", _other_major),
    needs=several_rows("b"),
    same_if=EQUAL,
)


# --- heads and batches --------------------------------------------------------------------------------------


def _next_head(role: str) -> Callable[..., dict[str, Tensor]]:
    """Axis 1 of an operand ``[tokens, heads, ..]``."""

    def read(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        name = call.contract.roles[role]
        return inputs | {name: rolled(inputs[name], dim=1)}

    return read


def _first_group(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    name = call.contract.roles["b"]
    x = inputs[name]
    return inputs | {name: x.view(torch.uint8)[:1].expand(x.shape).contiguous().view(x.dtype)}


def _batch_major(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """``[H, B, R]`` in memory read as ``[B, H, R]``."""
    name = call.contract.roles["a"]
    x = inputs[name].view(torch.uint8)
    return inputs | {name: x.transpose(0, 1).contiguous().view(x.shape).view(inputs[name].dtype)}


fault(
    "{}",
    MOVEMENT,
    on=BATCHED,
    seen="flashinfer 3604",
    needs=several_parts,
    same_if=EQUAL,
    over=(
        way("weights of the next head or batch", of_the_next("b")),
        way("weights of the first head or batch throughout", _first_group),
    ),
    read=itself,
)

fault(
    "{}",
    MOVEMENT,
    on=HEADS,
    needs=several_parts,
    same_if=EQUAL,
    over=(
        way("activations of the next head", "a", seen="no public thread: heads counted from 1"),
        way("A scale of the next head", "a_scale", family=INDEX, seen="sglang 39193"),
    ),
    read=_next_head,
)
fault(
    "{}",
    INDEX,
    on=HEADS,
    seen="sglang 39193",
    same_if=EQUAL,
    over=(
        way("B scale of the next head", of_the_next("b_scale"), needs=several_parts),
        way(
            "activations stored head by head read token by token",
            _batch_major,
            family=MOVEMENT,
            needs=both(several_parts, several_rows("a")),
        ),
    ),
    read=itself,
)


@fault(
    "batches after the first not computed",
    MOVEMENT,
    seen="flashinfer 3604",
    on=BATCHED,
    needs=several_parts,
)
def write_first_batch(call: Call, out: Tensor) -> Tensor:
    out, old = out.clone(), stale(call, out)
    for part in call.parts[1:]:
        out[part.place] = old[part.place]
    return out


def _heads(place: Callable[[Tensor, int, int, int], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """The columns of a head ``[M, heads, left + right]`` in other places of ``[M, heads, left + mid + right]``."""

    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        left, mid, right = (int(str(call.resolved[name])) for name in ("left", "mid", "right"))
        out = outputs["out"]
        heads = out.view(out.shape[0], -1, left + mid + right)
        dense = torch.cat([heads[..., :left], heads[..., left + mid :]], dim=2)
        return {"out": place(dense, left, mid, right).reshape(out.shape[0], -1)[:, : out.shape[1]].contiguous()}

    return write


def _gap(dense: Tensor, at: int, mid: int) -> Tensor:
    gap = torch.zeros(*dense.shape[:2], mid, dtype=dense.dtype, device=dense.device)
    return torch.cat([dense[..., :at], gap, dense[..., at:]], dim=2)


two_heads = need(
    lambda c: c.inputs["b"].shape[0] > int(str(c.resolved["left"])) + int(str(c.resolved["right"])), "there is one head"
)
for name, place, needs in (
    ("gap behind the head", lambda x, left, mid, right: _gap(x, left + right, mid), always),
    ("gap before the head", lambda x, left, mid, right: _gap(x, 0, mid), always),
    ("gap of a head eight columns early", lambda x, left, mid, right: _gap(x, left - 8, mid), always),
    ("columns of the next head", lambda x, left, mid, right: _gap(x.roll(-1, 1), left, mid), two_heads),
    (
        "right part of a head from the next head",
        lambda x, left, mid, right: _gap(torch.cat([x[..., :left], x[..., left:].roll(-1, 1)], 2), left, mid),
        two_heads,
    ),
    (
        "last head not written",
        lambda x, left, mid, right: _gap(torch.cat([x[:, :-1], 0 * x[:, -1:]], 1), left, mid),
        two_heads,
    ),
):
    fault(
        name,
        MOVEMENT,
        seen="DeepGEMM csrc/apis/gemm.hpp: fp8_gemm_nt_skip_head_mid",
        on=HEAD_GAP,
        write=_heads(place),
        needs=needs,
        same_if="those columns are equal",
    )


# --- scales of 128 rows -------------------------------------------------------------------------------------

fault(
    "A scale of 128 rows read by row",
    INDEX,
    seen="pytorch/FBGEMM 6159",
    on=A_BY_BLOCK,
    read=each("a_scale", lambda s: s.roll(-1, 0)),
    needs=need(lambda c: 1 < operand(c, "a_scale").shape[0] < operand(c, "a").shape[0], "a scale serves one row"),
    same_if=EQUAL,
)


# --- runs of rows -------------------------------------------------------------------------------------------


def _weights_of_next(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The next expert's weight with all of its scales."""
    shifted: dict[str, Tensor] = of_the_next("b", "b_scale")(call, inputs)
    return shifted | {name: rolled(inputs[name]) for name in ("b_group_scales",) if name in inputs}


def _later(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every run takes the first rows of the next, as many as make a step of the borders; starts and counts agree."""
    key, rows = str(call.contract.groups), operand(call, "a").shape[0]
    if "problem_sizes" not in inputs:
        borders = inputs[key].clone()
        borders[1:-1] = torch.minimum(borders[1:-1] + call.operands.row_unit, borders[-1])
        return inputs | {key: borders}
    sizes, starts = inputs["problem_sizes"].clone(), inputs[key].clone()
    ends = torch.minimum(starts + sizes[:, 0] + 1, torch.full_like(starts, rows))
    ends[-1] = starts[-1] + sizes[-1, 0]
    starts[1:] = ends[:-1]
    sizes[:, 0] = (ends - starts).clamp(min=0)
    return inputs | {"problem_sizes": sizes, key: starts}


fault(
    "weights of the next expert of a run",
    MOVEMENT,
    seen="DeepGEMM PR 343",
    on=RUNS - BY_ENDS,
    read=_weights_of_next,
    same_if=EQUAL,
    needs=need(lambda c: operand(c, "b").shape[0] > 1, "there is one expert"),
)
fault(
    "runs end one step late",
    MOVEMENT,
    seen="flashinfer 3547",
    on=RUNS - BY_ENDS,
    read=_later,
    needs=several_parts,
    same_if="the rows meet equal weights",
)


@fault(
    "rows and columns of a product exchanged",
    MOVEMENT,
    seen="vLLM get_cutlass_moe_mm_data: exchanged below 65 rows",
    on=RUNS,
    needs=need(lambda c: any(p.product.M != p.product.N for p in c.parts), "products are square"),
)
def write_exchanged_sizes(call: Call, out: Tensor) -> Tensor:
    """A product of M x N computed as N x M: columns past M are not written."""
    out, old = out.clone(), stale(call, out)
    for part in call.parts:
        assert part.rows is not None
        out[part.rows, part.product.M :] = old[part.rows, part.product.M :]
    return out


# --- int4 weights -------------------------------------------------------------------------------------------

W4A8 = "vLLM csrc/quantization/cutlass_w4a8"


def _each_scale(change: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """Group scales ``[..., K/128, N]`` as bytes."""
    return entry("b_group_scales", lambda s: change(s.view(torch.uint8)).contiguous().view(s.dtype))


def _int4(change: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    return entry("b_q", change)


def _decoded(values: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """Weights that a fault has decoded: from ``q`` and each one's scale, float64, to what the tensor core gets."""

    def read(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        q = inputs["b_q"].to(torch.float64)
        scale = decode(inputs["b_group_scales"]).mT.repeat_interleave(GROUP, dim=-1)[..., : q.shape[-1]]
        return inputs | {"b_q": values(q, scale)}

    return read


def _truncated(q: Tensor, scale: Tensor) -> Tensor:
    values = q * scale
    return to_dtype(values, torch.float8_e4m3fn, rounding=Rounding.TOWARD_ZERO, overflow=Overflow.SATURATE)


def _without_saturation(q: Tensor, scale: Tensor) -> Tensor:
    values = q * scale
    nan = torch.full_like(values, torch.nan)
    return to_dtype(
        torch.where(values.abs() > 464, nan, values),
        torch.float8_e4m3fn,
        rounding=Rounding.NEAREST_EVEN,
        overflow=Overflow.SATURATE,
    )


def _by_64(q: Tensor, scale: Tensor) -> Tensor:
    """Group scales advance every 64 steps of K."""
    at = (torch.arange(q.shape[-1], device=q.device) // 64 * GROUP).clamp(max=q.shape[-1] - 1)
    wrong = scale[..., at]
    return to_dtype(q * wrong, torch.float8_e4m3fn, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE)


def _reversed(q: Tensor, count: int) -> Tensor:
    """Whole groups of ``count`` weights along K in reverse order."""
    k = torch.arange(q.shape[-1], device=q.device)
    return q[..., torch.where(k < q.shape[-1] // count * count, k // count * count + (count - 1 - k % count), k)]


ONE = 0x38
several_groups = need(lambda c: c.inputs["b_group_scales"].shape[-2] > 1, "there is one group of 128")
for name, family, seen, change, needs, same_if in (
    (
        "group scales dropped",
        VALUE,
        "sglang PR 31529",
        _each_scale(lambda s: torch.full_like(s, ONE)),
        always,
        "every group scale is 1",
    ),
    (
        "group scale of the next group",
        INDEX,
        "sglang 38573",
        _each_scale(lambda s: s.roll(-1, -2)),
        several_groups,
        EQUAL,
    ),
    (
        "group scale of group 0 throughout",
        INDEX,
        "sglang 38573",
        _each_scale(lambda s: s[..., :1, :].expand(s.shape)),
        several_groups,
        EQUAL,
    ),
    (
        "group scale of the neighbouring row",
        INDEX,
        "sglang 38573",
        _each_scale(lambda s: s.roll(-1, -1)),
        always,
        EQUAL,
    ),
    (
        "group scales stored by row read by group",
        INDEX,
        "sglang 38573",
        _each_scale(lambda s: s.mT.contiguous().view(s.shape)),
        several_groups,
        EQUAL,
    ),
    ("group scale advances every 64 steps", INDEX, "sglang 38573, PR 38633", _decoded(_by_64), several_groups, EQUAL),
    (
        "mantissa of the group scale truncated",
        VALUE,
        "vllm PR 22399",
        _each_scale(lambda s: s & 0xF8),
        always,
        "every group scale is a power of two",
    ),
    (
        "int4 weights times their scale not rounded again",
        CAST,
        f"{W4A8}: the table holds E4M3",
        _decoded(lambda q, s: to_dtype(q * s, torch.float16, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.INF)),
        always,
        "every product of a weight and its scale is an E4M3 value",
    ),
    (
        "int4 weights times their scale truncated",
        CAST,
        W4A8,
        _decoded(_truncated),
        always,
        "every product of a weight and its scale is an E4M3 value",
    ),
    (
        "int4 weights times their scale not saturated",
        CAST,
        W4A8,
        _decoded(_without_saturation),
        always,
        "no product of a weight and its scale exceeds 464",
    ),
    ("int4 weights read as unsigned", CAST, W4A8, _int4(lambda q: q & 15), always, "no weight is negative"),
    (
        "positive int4 weights not encoded",
        CAST,
        f"{W4A8}: cutlass_encode_and_reorder_int4b",
        _int4(lambda q: torch.where(q > 0, 8 - q, q)),
        always,
        "no weight is positive",
    ),
    (
        "zero int4 weights looked up as -8",
        CAST,
        f"{W4A8}: cutlass_encode_and_reorder_int4b",
        _int4(lambda q: torch.where(q == 0, -8, q)),
        always,
        "no weight is zero",
    ),
    ("nibbles of a byte exchanged", MOVEMENT, W4A8, _int4(lambda q: _reversed(q, 2)), always, EQUAL),
    (
        "int4 weights of groups of eight reversed",
        MOVEMENT,
        f"{W4A8}: eight weights of an int32",
        _int4(lambda q: _reversed(q, 8)),
        always,
        EQUAL,
    ),
):
    fault(name, family, seen=seen, on=INT4, read=change, needs=needs, same_if=same_if)


def _nibbles(change: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """Both nibbles of every byte by another rule."""

    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        b = call.inputs["b"]
        return {"out": change(b >> 4) << 4 | change(b & 15)}

    return write


def _table(
    change: Callable[[Tensor], Tensor], rounding: Rounding = Rounding.NEAREST_EVEN
) -> Callable[..., dict[str, Tensor]]:
    """Eight values of every scale ``[n, 1]`` by another rule."""

    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        value = change(decode(call.inputs["scales"]).flatten()[:, None])
        out = to_dtype(value, torch.float8_e4m3fn, rounding=rounding, overflow=Overflow.SATURATE)
        return {"out": out.flatten()}

    return write


def _placed(
    *order: int, lengths: tuple[int, ...] = (2, 8, 2, 4, 4), encode: bool = True
) -> Callable[..., dict[str, Tensor]]:
    """Nibbles of tiles with other axes, in another order: row ``v1 t1`` and column ``v2 t0 v0``, or as ``lengths``."""

    def write(call: Call, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        each = nibbles(call.inputs["b"].t())
        each = encoded(each) if encode else each
        tiles = each.view(each.shape[0] // 16, *lengths[:2], each.shape[1] // 32, *lengths[2:])
        return {"out": words((tiles.permute(*order) if order else tiles).reshape(each.shape)).t()}

    return write


EIGHT = -torch.arange(8, 0, -1, dtype=torch.float64, device="cpu")
POSITIVE, SCALES = "no nibble is positive", "every scale is zero"
ENCODE, REORDER, PACK = of_class(EncodeInt4), of_class(EncodeAndReorderInt4), of_class(PackScale)
for on, name, seen, wrong, same_if in (
    (ENCODE, "positive nibbles kept", W4A8, _nibbles(lambda v: v), POSITIVE),
    (ENCODE, "nibble 0 encoded as 8", W4A8, _nibbles(lambda v: torch.where(v < 8, 8 - v, v)), "no nibble is zero"),
    (ENCODE, "negative nibbles encoded too", W4A8, _nibbles(lambda v: torch.where(v > 0, (8 - v) & 15, v)), POSITIVE),
    (ENCODE, "two nibbles of a byte exchanged", W4A8, entry("out", lambda out: out >> 4 | out << 4), EQUAL),
    (REORDER, "int4 weights reordered but not encoded", W4A8, _placed(3, 0, 2, 5, 4, 1, 6, encode=False), POSITIVE),
    (REORDER, "int4 weights encoded but not reordered", W4A8, _placed(), EQUAL),
    (REORDER, "tiles of int4 weights follow each other along the columns", W4A8, _placed(0, 3, 2, 5, 4, 1, 6), EQUAL),
    (REORDER, "halves of a thread's rows and columns exchanged", W4A8, _placed(3, 0, 2, 5, 1, 4, 6), EQUAL),
    (
        REORDER,
        "int4 weights in the order of 16-bit products",
        W4A8,
        _placed(3, 0, 2, 5, 4, 1, 6, lengths=(2, 8, 4, 4, 2)),
        EQUAL,
    ),
    (
        REORDER,
        "nibbles of reordered bytes exchanged",
        W4A8,
        entry("out", lambda out: words(_reversed(nibbles(out.t()), 2)).t()),
        EQUAL,
    ),
    (PACK, "table of a scale in ascending order", W4A8, _table(lambda s: s * EIGHT.flip(0)), SCALES),
    (PACK, "table of a scale without its sign", W4A8, _table(lambda s: s * -EIGHT), SCALES),
    (PACK, "table of a scale from -7 to 0", W4A8, _table(lambda s: s * (EIGHT + 1)), SCALES),
    (PACK, "table of a scale truncated", W4A8, _table(lambda s: s * EIGHT, Rounding.TOWARD_ZERO), "all are in E4M3"),
    (PACK, "table of the next scale", W4A8, _table(lambda s: s.roll(-1, 0) * EIGHT), EQUAL),
    (
        PACK,
        "tables of all scales by multiple",
        W4A8,
        _table(lambda s: (s * EIGHT).t().contiguous().view(s.shape[0], 8)),
        "there is one scale",
    ),
):
    fault(name, CAST if on is PACK else MOVEMENT, seen=seen, on=on, write=wrong, same_if=same_if)
