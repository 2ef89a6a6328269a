"""Cases of KV caches: pages out of order, tokens without a slot, requests that end within a page, memory that is full.

Every byte of a cache holds something before the call, so that a byte that should have stayed shows. Slots are drawn
without repetition; from three tokens on one has none. Requests of a reader are ragged: one has no token, one fills its
pages, the others end within one.

NaN stands among codes and bytes, in the row that the mapping of slots leaves out, and where data of a family have it
(:mod:`oracle.routines.data`), as infinity does. Inputs of float32 scales and wide destinations are finite.

Source: derived in :mod:`oracle.routines.data`; the bytes of a row of 656 as :mod:`oracle.routines.kv_cache.writers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.numbers.formats import E4M3FN, from_codes
from oracle.routines import data
from oracle.routines.case import Case, Grammar, given_scale, no_options, seeds
from oracle.routines.kv_cache.writers import RANK, ROPE, ROPE_AT, ROW, SCALES_AT, TILE

WIDE = ("bf16-e4m3", "f16-e4m3", "f32-e4m3")
FAMILIES = tuple(data.ACTIVATION_FAMILIES)
DIVIDED = (*FAMILIES, "midpoints")


# --- memory, slots, requests --------------------------------------------------------------------------------------


def full(case: Case, name: str, *shape: int) -> Tensor:
    """Bytes ``[*shape]``, uint8, of all 256 values."""
    return torch.from_numpy(case.stream(name).integers(0, 256, shape)).to(torch.uint8)


def codes(case: Case, name: str, *shape: int) -> Tensor:
    """Codes ``[*shape]`` of any kind, float8_e4m3fn, NaN among them."""
    return from_codes(full(case, name, *shape), E4M3FN)


def blocks(case: Case, tokens: int) -> int:
    """Pages of a cache: room for more than the tokens, in no even number."""
    return -(-tokens // case["p"]) + 2


def slots(case: Case, tokens: int) -> Tensor:
    """Slots ``[T]`` of the tokens, int64, distinct and out of order; from three tokens on the second has none (-1)."""
    room = blocks(case, tokens) * case["p"]
    drawn = torch.from_numpy(case.stream("slots").order(room))[:tokens].clone()
    if tokens > 2:
        drawn[1] = -1
    return drawn


MIDPOINT_SCALE = 1.75
"""Times a power of two: ``x = 1.75 m`` is exact in bfloat16 for every code and midpoint ``m`` of E4M3, and
``x * fl(1/1.75)`` rounds away from some midpoints, where ``x / 1.75`` is ``m``."""


def midpoints(case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    """``[*shape]`` in the dtype of the case, finite: codes and midpoints of two codes times :data:`MIDPOINT_SCALE`.

    Some lie half way beyond 448 times that scale.
    """
    (dtype,) = case.operand_dtypes
    stream = case.stream(name)
    m = torch.from_numpy(stream.integers(16, 32, shape)).double() / 16
    power = torch.from_numpy(stream.integers(-6, 9, shape)).double().exp2()
    signs = torch.from_numpy(stream.signs(shape)).double()
    return (m * power * signs * MIDPOINT_SCALE).to(dtype)


def values(case: Case, name: str, *shape: int) -> Tensor:
    """Values of the case's family, ``[*shape]``, in the dtype of the case."""
    (dtype,) = case.operand_dtypes
    if case.family == "midpoints":
        return midpoints(case, name, shape)
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return data.activations(case.label(name), case.family, rows, shape[-1], dtype=dtype).reshape(shape)


def padded(x: Tensor) -> Tensor:
    """``x`` ``[T, ...]``, any float dtype, with one token more, ``[T + 1, ...]`` in the same dtype.

    The last token is NaN and has no entry in the mapping of slots.
    """
    return torch.cat([x, torch.full_like(x[:1], torch.nan)])


def scale_of(case: Case, name: str, heads: int) -> Tensor:
    """One scale, float32 ``[1]``, or one for each head, ``[heads]``; powers of two times 1.75 for ``midpoints``."""
    if case.family == "midpoints":
        first = -1 if name == "v_scale" else 0
        count = heads if case.option("scales") == "head" else 1
        return MIDPOINT_SCALE * torch.arange(first, first - count, -1, device="cpu").float().exp2()
    if case.option("scales") == "head":
        return data.scales(case.label(name), "randn", (heads,)) * 16.0
    return given_scale(case, name)


def counts(case: Case, requests: int) -> list[int]:
    """Tokens of each request: some number, a whole number of pages, none, then any."""
    drawn: list[int] = case.stream("lengths").integers(1, 2 * case["p"] + 2, (requests,)).tolist()
    for at, count in ((1, 2 * case["p"]), (2, 0)):
        if at < requests:
            drawn[at] = count
    return drawn


def requests(case: Case) -> dict[str, Tensor]:
    """The table of pages (unused entries out of range), and the ends of the rows of each request."""
    lengths = counts(case, case["b"])
    start = _starts(case)
    ends_at = [first + count for first, count in zip(start.tolist(), lengths, strict=True)]
    pages = [-(-end // case["p"]) for end in ends_at]
    widest = max(pages) + 1
    order = torch.from_numpy(case.stream("pages").order(case["b"] * widest)).to(torch.int32)
    table = order.reshape(case["b"], widest).clone()
    for b, used in enumerate(pages):
        table[b, used:] = -1
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0).to(torch.int32)
    inputs = {"block_table": table, "cu_seq_lens": ends}
    return inputs if case.option("starts") is None else inputs | {"seq_starts": start.to(torch.int32)}


def _starts(case: Case) -> Tensor:
    """The first token of each request, int64 ``[b]``: 0; of every second one the first of a page, or one within it."""
    second = torch.arange(case["b"], device="cpu") % 2
    return second * {None: 0, "1": case["p"], "in": case["p"] + case["p"] // 2}[case.option("starts")]


def pages_of(case: Case) -> int:
    """Pages of a cache that requests read."""
    return int(requests(case)["block_table"].numel())


def room(case: Case, more: int = 2) -> int:
    """Rows of a destination: two more than the requests fill."""
    return int(requests(case)["cu_seq_lens"][-1]) + more


# --- writers ------------------------------------------------------------------------------------------------------


def pages(
    case: Case, name: str, heads: int, depth: int, *, make: Callable[..., Tensor] = codes, count: int | None = None
) -> Tensor:
    """Pages in the layout of the case: ``[B, P, heads, depth]`` or ``[B, heads, P, depth]``, of the dtype of ``make``.

    ``make`` is :func:`codes` (float8_e4m3fn) or :func:`full` (uint8); there are ``count``, or those of the tokens.
    """
    shape = (case["p"], heads) if case.option("layout") != "HND" else (heads, case["p"])
    return make(case, name, blocks(case, case["t"]) if count is None else count, *shape, depth)


def _flash(case: Case) -> dict[str, Tensor]:
    t, h, d = case["t"], case["h"], case["d"]
    return {
        "key": padded(values(case, "key", t, h, d)),
        "value": padded(values(case, "value", t, h, d)),
        "key_cache": pages(case, "key_cache", h, d),
        "value_cache": pages(case, "value_cache", h, d),
        "slot_mapping": slots(case, t),
        **{name: scale_of(case, name, h) for name in ("k_scale", "v_scale")},
    }


def _packed(case: Case) -> dict[str, Tensor]:
    t, h, d, p = case["t"], case["h"], case["d"], case["p"]
    inputs = {name: x for name, x in _flash(case).items() if not name.endswith("_cache")}
    pages = blocks(case, t)
    return {
        **inputs,
        "key_cache": codes(case, "key_cache", pages, h, d // 16, p, 16),
        "value_cache": codes(case, "value_cache", pages, h, d, p),
    }


def _mla(case: Case) -> dict[str, Tensor]:
    t, r, e = case["t"], case["r"], case["e"]
    return {
        "kv_c": padded(values(case, "kv_c", t, r)),
        "k_pe": padded(values(case, "k_pe", t, e)),
        "kv_cache": codes(case, "kv_cache", blocks(case, t), case["p"], r + e),
        "slot_mapping": slots(case, t),
        "scale": scale_of(case, "scale", 1),
    }


def tiles(case: Case, name: str, *shape: int) -> Tensor:
    """Values of the family, ``[*shape]``, in the dtype of the case; the last tile of every third row is zero.

    Of ``randn`` and ``ties`` other rows have a last tile so small that a floor decides.
    """
    x = values(case, name, *shape)
    matrix = x.reshape(-1, shape[-1])
    matrix[2::3, -TILE:] = 0.0
    if case.family in ("randn", "ties"):
        matrix[4::3, -TILE:] *= 2.0**-20
    return x


def _ds_mla(case: Case) -> dict[str, Tensor]:
    t = case["t"]
    return {
        "kv_c": padded(tiles(case, "kv_c", t, RANK)),
        "k_pe": padded(values(case, "k_pe", t, ROPE)),
        "kv_cache": full(case, "kv_cache", blocks(case, t), case["p"], ROW),
        "slot_mapping": slots(case, t),
    }


def _indexer(case: Case) -> dict[str, Tensor]:
    t, d = case["t"], case["d"]
    return {
        "k": tiles(case, "k", t, d),
        "kv_cache": full(case, "kv_cache", blocks(case, t), case["p"], d + d // 32),
        "slot_mapping": slots(case, t),
    }


def _nvfp4_pages(case: Case, count: int) -> dict[str, Tensor]:
    """``count`` pages of codes and of scales before the call, and the scales of keys and values."""
    h, d, inputs = case["h"], case["d"], dict[str, Tensor]()
    for x in "kv":
        inputs[f"{x}_cache"] = pages(case, f"{x}_cache", h, d // 2, make=full, count=count)
        inputs[f"{x}_scale_cache"] = pages(case, f"{x}_scale_cache", h, d // 16, count=count)
        inputs[f"{x}_scale"] = data.scales(case.label(f"{x}_scale"), "randn", (1,))
    return inputs


def _nvfp4(case: Case) -> dict[str, Tensor]:
    t, h, d = case["t"], case["h"], case["d"]
    inputs = {
        "append_key": padded(values(case, "key", t, h, d)),
        "append_value": padded(values(case, "value", t, h, d)),
    }
    return inputs | _nvfp4_pages(case, blocks(case, t)) | {"slot_mapping": slots(case, t)}


def _whole(case: Case) -> dict[str, Tensor]:
    rows = case["s"] * case["p"]
    x = torch.cat([tiles(case, "nope", rows, RANK), values(case, "rope", rows, ROPE)], dim=1)
    return {"cache_k": x.reshape(case["s"], case["p"], 1, RANK + ROPE)}


def _set(case: Case) -> dict[str, Tensor]:
    t, r, e = case["t"], case["r"], case["e"]
    total = t + 3
    loc = 1 + torch.from_numpy(case.stream("loc").order(total - 1))[:t]
    if t > 2:
        loc[1] = 0
    return {
        "kv_buffer": codes(case, "kv_buffer", total, 1, r + e),
        "loc": loc,
        "cache_k_nope": values(case, "nope", t, 1, r),
        "cache_k_rope": values(case, "rope", t, 1, e),
    }


def _convert(case: Case) -> dict[str, Tensor]:
    shape = (case["s"], case["p"], case["d"])
    if case.dtypes.startswith("e4m3"):
        return {"src": codes(case, "src", *shape)}
    return {"src": values(case, "src", *shape)}


def _appended(case: Case) -> tuple[dict[str, Tensor], int]:
    """Tables of pages, one page over; the last tokens of every request are appended, out of order."""
    lengths, page = [count or 1 for count in counts(case, case["b"])], case["p"]
    used = [-(-count // page) for count in lengths]
    total = sum(used) + 1
    tokens = [(b, i) for b, count in enumerate(lengths) for i in range(max(0, count - page - 1), count)]
    order = case.stream("tokens").order(len(tokens)).tolist()
    batch, position = zip(*(tokens[i] for i in order), strict=True)

    def int32(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32, device="cpu")

    table = torch.from_numpy(case.stream("pages").order(total))[: sum(used)]
    inputs = {
        "batch_indices": int32(batch),
        "positions": int32(position),
        "kv_indices": table.to(torch.int32),
        "kv_indptr": int32([0, *itertools.accumulate(used)]),
        "kv_last_page_len": int32((count - 1) % page + 1 for count in lengths),
    }
    return inputs, total


def _bits_like(case: Case, name: str, *shape: int) -> Tensor:
    """Codes of any kind, or values of a wider dtype."""
    (dtype,) = case.operand_dtypes
    return codes(case, name, *shape) if dtype.itemsize == 1 else data.normal(case.label(name), shape, dtype=dtype)


def _append(case: Case) -> dict[str, Tensor]:
    tables, total = _appended(case)
    h, d, p = case["h"], case["d"], case["p"]
    tokens = len(tables["positions"])
    shape = (total, h, p, d) if case.option("layout") == "HND" else (total, p, h, d)
    return {
        **{f"append_{x}": _bits_like(case, x, tokens, h, d) for x in ("key", "value")},
        **{f"{x}_cache": _bits_like(case, f"{x}_cache", *shape) for x in "kv"},
        **tables,
    }


def _append_nvfp4(case: Case) -> dict[str, Tensor]:
    tables, total = _appended(case)
    tokens, h, d = len(tables["positions"]), case["h"], case["d"]
    inputs = {f"append_{name}": values(case, name, tokens, h, d) for name in ("key", "value")}
    return inputs | _nvfp4_pages(case, total) | tables


def _rotated(case: Case) -> dict[str, Tensor]:
    """Tokens that are appended, a quarter of their heads rotated; angles on a grid of 2^-12."""
    tables, total = _appended(case)
    t, h, d, p = len(tables["positions"]), case["h"], case["d"], case["p"]
    wide = 2 * max(1, d // 8)
    if d <= wide:
        raise CaseError(f"d={d}: {wide} columns are rotated and others are not; use d=4 or more")
    shape = (total, h, p, d) if case.option("layout") == "HND" else (total, p, h, d)
    angles = torch.outer(
        torch.arange(t + 3, dtype=torch.float64, device="cpu"),
        0.37 / (1 + torch.arange(wide // 2, dtype=torch.float64, device="cpu")),
    )
    cache = (torch.cat([angles.cos(), angles.sin()], dim=1) * 4096).round() / 4096
    del tables["kv_last_page_len"]
    return {
        "q_rope": values(case, "q_rope", t, 2 * h, wide),
        "k_rope": values(case, "k_rope", t, h, wide),
        "q_nope": values(case, "q_nope", t, 2 * h, d - wide),
        "k_nope": values(case, "k_nope", t, h, d - wide),
        "v": values(case, "v", t, h, d),
        "cos_sin_cache": cache.float(),
        "pos_ids": torch.from_numpy(case.stream("pos_ids").integers(0, t + 3, (t,))).to(torch.int32),
        **{f"{x}_cache": codes(case, f"{x}_cache", *shape) for x in "kv"},
        **tables,
    }


def _rotated_options(case: Case) -> dict[str, object]:
    scaled = {} if case.option("scaled") == "0" else {"quant_scale_q": 37.25, "quant_scale_kv": 5.3}
    return {**_layout(case), "is_neox": case.option("neox") != "0", **scaled}


def _append_mla(case: Case) -> dict[str, Tensor]:
    tables, total = _appended(case)
    widths = {"ckv": case["r"], "kpe": case["e"]}
    return {
        **{f"append_{x}": _bits_like(case, x, len(tables["positions"]), n) for x, n in widths.items()},
        **{f"{x}_cache": _bits_like(case, f"{x}_cache", total, case["p"], n) for x, n in widths.items()},
        **tables,
    }


# --- readers ------------------------------------------------------------------------------------------------------


def stale(case: Case, dtype: torch.dtype, *shape: int) -> Tensor:
    """A destination ``[*shape]`` of that dtype that holds finite values."""
    return data.normal(case.label("dst"), shape, dtype=dtype)


def _dequantised_pages(case: Case) -> dict[str, Tensor]:
    """Requests of any length, one of none where there are several; pages out of order."""
    lengths, page, h, d = [count or 1 for count in counts(case, case["b"])], case["p"], case["h"], case["d"]
    if len(lengths) > 2:
        lengths[1] = 0
    wide, room = max(-(-n // page) for n in lengths), max(lengths) + 2
    order = torch.from_numpy(case.stream("pages").order(len(lengths) * wide))
    (_, dtype) = case.operand_dtypes if len(case.operand_dtypes) > 1 else (None, case.operand_dtypes[0])
    return {
        **_nvfp4_pages(case, len(lengths) * wide),
        "block_table": order.reshape(len(lengths), wide).to(torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cpu"),
        **{f"output_{x}": stale(case, dtype, len(lengths), room, h, d) for x in "kv"},
    }


def _gather(case: Case) -> dict[str, Tensor]:
    c = case["c"]
    return {
        "src_cache": codes(case, "src_cache", pages_of(case), case["p"], c),
        "dst": stale(case, case.out_dtype, room(case), c),
        "scale": given_scale(case, "scale"),
        **requests(case),
    }


def _copy(case: Case) -> dict[str, Tensor]:
    c = case["c"]
    return {
        "src_cache": _bits_like(case, "src_cache", pages_of(case), case["p"], c),
        "dst": _bits_like(case, "dst", room(case), c),
        **requests(case),
    }


def rows_of_tiles(case: Case, name: str, count: int) -> Tensor:
    """Rows ``[count, 656]``, uint8: codes of any kind, four float32 scales that differ, rotated bfloat16 columns."""
    memory = full(case, name, count, ROW)
    scales = data.scales(case.label(f"{name} scales"), "randn", (count, 4))
    memory[:, SCALES_AT:ROPE_AT] = scales.view(torch.uint8)
    memory[:, ROPE_AT:] = data.normal(case.label(f"{name} rope"), (count, ROPE), dtype=torch.bfloat16).view(torch.uint8)
    return memory


def _upconvert(case: Case) -> dict[str, Tensor]:
    tables = requests(case)
    ends = tables["cu_seq_lens"]
    memory = rows_of_tiles(case, "src_cache", pages_of(case) * case["p"]).reshape(-1, case["p"], ROW)
    return {
        "src_cache": memory,
        "dst": stale(case, torch.bfloat16, room(case, 0), RANK + ROPE),
        "block_table": tables["block_table"],
        "seq_lens": ends.diff(),
        "workspace_starts": ends[:-1].clone(),
    }


def _dequantize(case: Case) -> dict[str, Tensor]:
    memory = rows_of_tiles(case, "quant_k_cache", case["s"] * case["p"])
    return {"quant_k_cache": memory.reshape(case["s"], case["p"], 1, ROW)}


def _index_keys(case: Case) -> dict[str, Tensor]:
    d, tables = case["d"], requests(case)
    return {
        "kv_cache": full(case, "kv_cache", pages_of(case), case["p"], d + d // 32),
        "dst_k": full(case, "dst_k", room(case), d),
        "dst_scale": full(case, "dst_scale", room(case), d // 32),
        "block_table": tables["block_table"],
        "cu_seq_lens": tables["cu_seq_lens"],
    }


# --- vLLM's newer caches ------------------------------------------------------------------------------------------


def _v4_page(case: Case) -> int:
    """Bytes of a page of DeepSeek-V4, with some behind its scales."""
    return case["p"] * 584 + 40


def _v4(case: Case) -> dict[str, Tensor]:
    t = case["t"]
    x = values(case, "k", t, 512)
    x[2::3, 64:128] = 0.0
    return {
        "k": padded(x),
        "k_cache": full(case, "k_cache", blocks(case, t), _v4_page(case)),
        "slot_mapping": slots(case, t),
    }


def _v4_read(case: Case) -> dict[str, Tensor]:
    """Scales of 2^-27 to 2^23; with ``lens=1`` requests are read from their middle on."""
    tables, p = requests(case), case["p"]
    memory = full(case, "k_cache", pages_of(case), _v4_page(case))
    memory[:, p * 576 :] = memory[:, p * 576 :] % 50 + 100
    lengths = tables["cu_seq_lens"].diff()
    inputs = {
        "gathered": stale(case, torch.bfloat16, case["b"], int(lengths.max()) + 3, 512),
        "k_cache": memory,
        "seq_lens": lengths,
        "block_table": tables["block_table"],
    }
    return inputs | ({"gather_lens": lengths // 2 + lengths % 2} if case.option("lens") == "1" else {})


def _v4_call(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"block_size": case["p"]}
    return options | ({"offset": 2} if case.option("offset") == "1" else {})


def _token_heads(case: Case) -> dict[str, Tensor]:
    t, h, d, p = (case[name] for name in "thdp")
    inputs = {"key": padded(tiles(case, "key", t, h, d)), "value": padded(values(case, "value", t, h, d + 8))}
    for x, width in (("key", d), ("value", d + 8)):
        inputs[f"{x}_cache"] = codes(case, f"{x}_cache", blocks(case, t), p, h, width)
    for x in "kv":
        inputs[f"{x}_scale_cache"] = data.scales(case.label(f"{x}_scale_cache"), "randn", (blocks(case, t), p, h))
    return inputs | {"slot_mapping": slots(case, t)}


def _rotated_mla(case: Case) -> dict[str, Tensor]:
    """Sines and cosines float32 with ``angles=f32``, else of the dtype of the case."""
    t, r, e = case["t"], case["r"], case["e"]
    (dtype,) = case.operand_dtypes
    angle = torch.from_numpy(case.stream("angles").integers(0, 6283, (20, e // 2))).double() / 1000
    # on a grid of 2^-12: library functions differ in last bits between platforms
    table = (torch.cat([angle.cos(), angle.sin()], dim=1) * 4096).round() / 4096
    return {
        "positions": torch.from_numpy(case.stream("positions").integers(0, 20, (t + 1,))),
        "q_pe": padded(values(case, "q_pe", t, 3, e)),
        "k_pe": padded(values(case, "k_pe", t, e)),
        "kv_c": padded(values(case, "kv_c", t, r)),
        "cos_sin_cache": table.to(torch.float32 if case.option("angles") == "f32" else dtype),
        "slot_mapping": slots(case, t),
        "kv_cache": codes(case, "kv_cache", blocks(case, t), case["p"], r + e),
        "scale": given_scale(case, "scale"),
    }


def _prefill(case: Case) -> dict[str, Tensor]:
    pages = torch.from_numpy(case.stream("table").integers(1, 11, (case["b"], 3))).to(torch.int32)
    pages[0, 0], pages[-1, 2] = 4, -1
    scales = {f"{x}_scale": data.scales(case.label(f"{x}_scale"), "randn", (1,)) for x in "kv"}
    memory = codes(case, "kv_cache", 11, 2, case["h"], case["p"], case["d"])
    return {"kv_cache": memory, "block_tables_prefill": pages, **scales}


# --- ids ----------------------------------------------------------------------------------------------------------


def _layout(case: Case) -> dict[str, object]:
    return {"kv_layout": case.option("layout") or "NHD"}


def listed(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    """Every shape on ordinary data; every family on the last one; every option on a few; the other dtypes likewise."""
    head, shape = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}", grammar.shapes[-1]
    first, *others = grammar.families
    for each in grammar.shapes[:-1]:
        yield f"{head}/{each}/family={first}/seed=1"
    for family in (first, *others):
        for seed in seeds(profile):
            yield f"{head}/{shape}/family={family}/seed={seed}"
    few = [family for family in ("randn", "ties", "special", first) if family in grammar.families][:2]
    for key, chosen in grammar.options.items():
        for value in chosen:
            for family in few if profile == "quick" else grammar.families:
                yield f"{head}/{shape}/{key}={value}/family={family}/seed=1"
    for dtypes in grammar.dtypes[1:]:
        for family in dict.fromkeys((*few, *(f for f in ("special", "range") if f in grammar.families))):
            yield f"{contract}/{dtypes}/{grammar.schemes[0]}/{shape}/family={family}/seed=1"


def grammar(
    extents: str,
    build: Callable[[Case], dict[str, Tensor]],
    call: Callable[[Case], dict[str, object]] = no_options,
    *shapes: str,
    dtypes: tuple[str, ...] = WIDE,
    scheme: str = "tensor",
    families: tuple[str, ...] = FAMILIES,
    options: Mapping[str, tuple[str, ...]] | None = None,
) -> Grammar:
    """The grammar of one routine; extents are letters."""
    return Grammar(
        tuple(extents),
        dtypes,
        (scheme,),
        families,
        build,
        call,
        options or {},
        listed=listed,
        shapes=shapes,
        fixed=True,
    )


CODES, TILED = ("codes",), ("bf16-u8", "f16-u8")
_LAYOUTS = {"layout": ("HND",)}
_REQUESTS = ("b=1,p=4", "b=5,p=16")

GRAMMARS: Mapping[str, Grammar] = {
    "reshape_and_cache_flash": grammar(
        "thdp", _flash, _layout, "t=1,h=1,d=16,p=4", "t=3,h=2,d=8,p=1", "t=11,h=3,d=64,p=16",
        options=_LAYOUTS | {"scales": ("head",)}, families=DIVIDED,
    ),
    "reshape_and_cache": grammar(
        "thdp", _packed, no_options, "t=1,h=1,d=16,p=4", "t=3,h=2,d=48,p=1", "t=11,h=3,d=64,p=8", families=DIVIDED,
    ),
    "concat_and_cache_mla": grammar(
        "trep", _mla, no_options, "t=1,r=16,e=8,p=4", "t=3,r=32,e=16,p=1", "t=11,r=128,e=64,p=16", families=DIVIDED,
    ),
    "set_mla_kv_buffer": grammar(
        "tre", _set, lambda case: {"reserved_skip_index": 0}, "t=1,r=16,e=8",
        "t=3,r=32,e=16", "t=11,r=128,e=64", dtypes=WIDE[:2], families=DIVIDED,
    ),
    "convert_fp8": grammar(
        "spd", _convert, lambda case: {"scale": float(scale_of(case, "scale", 1)), "out_dtype": case.out_dtype},
        "s=1,p=1,d=16", "s=3,p=4,d=72",
        dtypes=(*WIDE, "e4m3-bf16", "e4m3-f16", "e4m3-f32"), families=DIVIDED,
    ),
    "append_paged_kv_cache": grammar(
        "bhdp", _append, _layout, "b=1,h=1,d=64,p=4", "b=5,h=3,d=64,p=16", dtypes=("e4m3-e4m3", "bf16-bf16", "f16-f16"),
        families=CODES, options=_LAYOUTS,
    ),
    "append_paged_mla_kv_cache": grammar(
        "brep", _append_mla, no_options, "b=1,r=512,e=64,p=4", "b=5,r=512,e=64,p=16",
        dtypes=("e4m3-e4m3", "bf16-bf16", "f16-f16"), families=CODES,
    ),
    "concat_and_cache_ds_mla": grammar(
        "tp", _ds_mla, lambda case: {"ue8m0": case.option("ue8m0") == "1"}, "t=1,p=4", "t=3,p=1", "t=11,p=16",
        dtypes=TILED, scheme="1x128", options={"ue8m0": ("1",)},
    ),
    "indexer_k_quant_and_cache": grammar(
        "tdp", _indexer, lambda case: {"scale_fmt": case.option("scale") or ""}, "t=1,d=128,p=4", "t=3,d=256,p=1",
        "t=11,d=128,p=64", dtypes=TILED, scheme="1x128", options={"scale": ("ue8m0",)},
    ),
    "quantize_k_cache": grammar("sp", _whole, no_options, "s=1,p=2", "s=3,p=4", dtypes=TILED[:1], scheme="1x128"),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": grammar(
        "thdp", _nvfp4, _layout, "t=1,h=1,d=64,p=4", "t=11,h=3,d=64,p=16", dtypes=TILED, scheme="1x16",
        options=_LAYOUTS,
    ),
    "nvfp4_quantize_append_paged_kv_cache": grammar(
        "bhdp", _append_nvfp4, _layout, "b=1,h=1,d=64,p=4", "b=5,h=3,d=64,p=16", dtypes=TILED, scheme="1x16",
        options=_LAYOUTS,
    ),
    "rope_quantize_fp8_append_paged_kv_cache": grammar(
        "bhdp", _rotated, _rotated_options, "b=1,h=1,d=64,p=4", "b=5,h=3,d=64,p=16", dtypes=("bf16", "f16"),
        options=_LAYOUTS | {"neox": ("0",), "scaled": ("0",)},
    ),
    "nvfp4_kv_dequantize_paged": grammar(
        "bhdp", _dequantised_pages, _layout, "b=1,h=1,d=64,p=4", "b=5,h=3,d=64,p=16", dtypes=("bf16", "f16"),
        scheme="1x16", families=CODES, options=_LAYOUTS,
    ),
    "gather_and_maybe_dequant_cache": grammar(
        "bpc", _gather, no_options, "b=1,p=4,c=320", "b=5,p=16,c=320", dtypes=("e4m3-bf16", "e4m3-f16", "e4m3-f32"),
        families=CODES, options={"starts": ("1", "in")},
    ),
    "cp_gather_cache": grammar(
        "bpc", _copy, no_options, "b=1,p=4,c=48", "b=5,p=16,c=48",
        dtypes=("e4m3-e4m3", "bf16-bf16", "f16-f16", "f32-f32"), families=CODES, options={"starts": ("1", "in")},
    ),
    "cp_gather_and_upconvert_fp8_kv_cache": grammar(
        "bp", _upconvert, no_options, *_REQUESTS, dtypes=("u8-bf16",), scheme="1x128", families=CODES
    ),
    "dequantize_k_cache": grammar(
        "sp", _dequantize, no_options, "s=1,p=2", "s=3,p=4", dtypes=("u8-bf16",), scheme="1x128", families=CODES
    ),
    "quantize_and_insert_k_cache": grammar(
        "tp", _v4, _v4_call, "t=1,p=4", "t=3,p=1", "t=11,p=64", dtypes=("bf16-u8",), scheme="1x64"
    ),
    "dequantize_and_gather_k_cache": grammar(
        "bp", _v4_read, _v4_call, *_REQUESTS, dtypes=("u8-bf16",), scheme="1x64", families=CODES,
        options={"lens": ("1",), "offset": ("1",)},
    ),
    "triton_reshape_and_cache_flash_per_token_head_quant": grammar(
        "thdp", _token_heads, no_options, "t=1,h=1,d=128,p=4", "t=3,h=2,d=136,p=1", "t=11,h=3,d=128,p=16",
        scheme="head",
    ),
    "concat_and_cache_mla_rope_fused": grammar(
        "trep", _rotated_mla, lambda case: {"is_neox": case.option("neox") == "1"}, "t=1,r=16,e=8,p=4",
        "t=3,r=32,e=16,p=1", "t=11,r=128,e=64,p=16", dtypes=WIDE[:2], families=DIVIDED,
        options={"neox": ("1",), "angles": ("f32",)},
    ),
    "trtllm_prefill_attn_kvfp8_dequant": grammar(
        "bhdp", _prefill, lambda case: {"dequant_dtype": case.out_dtype}, "b=1,h=1,d=64,p=4", "b=3,h=2,d=64,p=16",
        dtypes=("e4m3-bf16", "e4m3-f16"), families=CODES,
    ),
    "cp_gather_indexer_k_quant_cache": grammar(
        "bpd", _index_keys, no_options, "b=1,p=4,d=128", "b=5,p=16,d=256", dtypes=("u8-u8",), scheme="1x128",
        families=CODES,
    ),
}  # fmt: skip  # a table, one row a line
