"""Faults of the MQA logits: ``k_scale[n] sum_h weights[m, h] relu(<q[m, h], k[n]>)`` inside a window of keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.routines.fault import ARITHMETIC, CAST, INDEX, MOVEMENT, VALUE, Call, Change, Faults, entry, need, way
from oracle.routines.logits.contract import LogitsContract, Paged
from oracle.routines.traits import of_class, takes

# A fault is a row: what is wrong and where it was met; the change; when it shows.
LOGITS = of_class(LogitsContract)
KEYS, WINDOW, CACHED = (LOGITS & takes(name) for name in ("k", "cu_seqlen_ke", "kv_cache"))
FAULTS = Faults(LOGITS)
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
        contract = call.contract
        assert isinstance(contract, LogitsContract)
        rows = []
        for problem in contract.problems(call.inputs, call.resolved):
            x = problem.dots.hi
            x = x.clamp(min=0) if relu else x
            w = problem.weights.to(torch.float64)
            y = (x * (w if weighted else torch.ones_like(w))[:, :, None]).sum(dim=1)
            rows.append(contract.laid(problem, y * problem.k_scale.to(torch.float64), out.shape[1], -torch.inf))
        return torch.where(torch.isneginf(out), out, torch.cat(rows).to(out.dtype))

    return change


def _window(delta: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A window that ends ``delta`` keys later: elements outside the right window carry numbers, or are cut."""

    def change(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        end = inputs["cu_seqlen_ke"]
        return inputs | {"cu_seqlen_ke": (end + delta).clamp(min=0, max=inputs["k"].shape[0]).to(end.dtype)}

    return change


fault(
    "{}",
    INDEX,
    on=LOGITS & takes("k_scale"),
    over=(
        way("k_scale of the next key", lambda scale: torch.roll(scale, -1), seen="mlc-ai/TIRx-kernels PR 5"),
        way("k_scale of the page's first key", _page_first, seen="aiter PR 5591"),
    ),
    read=lambda change: entry("k_scale", change),
)

fault("weight of the next head", INDEX, seen="DeepGEMM 433", read=entry("weights", lambda w: torch.roll(w, -1, dims=1)))
fault(
    "weight of the previous token",
    INDEX,
    seen="DeepGEMM 433",
    read=entry("weights", lambda w: torch.roll(w, 1, dims=0)),
    needs=need(lambda call: call.inputs["weights"].shape[0] > 1, "there is one token"),
)

fault("only token 0 of each page read", MOVEMENT, seen="aiter PR 5591", on=KEYS, read=entry("k", _codes(_page_first)))
fault(
    "shared-memory swizzle of half the head size",
    MOVEMENT,
    seen="DeepGEMM 433",
    on=KEYS,
    read=entry("k", _codes(_half_of_head)),
)

fault(
    "relu left out",
    ARITHMETIC,
    seen="DeepGEMM 433",
    write=_recomputed(relu=False, weighted=True),
    same_if="no dot product is negative",
)
fault(
    "head weights left out",
    ARITHMETIC,
    seen="TensorRT-LLM PR 14199",
    write=_recomputed(relu=True, weighted=False),
    same_if="every weight is 1",
)


def _union(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The window of every four rows: from the first start to the last end."""
    start, end = inputs["cu_seqlen_ks"], inputs["cu_seqlen_ke"]
    group = torch.arange(len(start), device=start.device) // 4
    first = [start[group == g].amin() for g in group.tolist()]
    last = [end[group == g].amax() for g in group.tolist()]
    return inputs | {"cu_seqlen_ks": torch.stack(first), "cu_seqlen_ke": torch.stack(last)}


fault(
    "logits in the windows of a whole tile of rows",
    MOVEMENT,
    seen="tile-ai/tilelang PR 2774",
    on=WINDOW & takes("cu_seqlen_ks"),
    read=_union,
    needs=need(lambda call: len(call.inputs["cu_seqlen_ks"]) > 1, "there is one row"),
    same_if="all rows of a tile have one window",
    admissible_if=UNSPECIFIED,
)
fault("last key of the window missed", MOVEMENT, seen="DeepGEMM 433", on=WINDOW, read=_window(-1))
fault(
    "logits outside the window finite",
    MOVEMENT,
    seen="DeepGEMM 433",
    on=WINDOW,
    read=_window(1 << 20),
    admissible_if=UNSPECIFIED,
)

fault(
    "masked logits filled with 0 instead of -inf",
    MOVEMENT,
    seen="flashinfer PR 4639",
    write=lambda out: torch.where(torch.isneginf(out), torch.zeros_like(out), out),
    admissible_if=UNSPECIFIED,
)


# --- FP4: words of scales, nibbles ----------------------------------------------------------------------------------


def _bytes(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Words of scales through a change of their bytes ``[.., 4]``."""
    return lambda x: change(x.contiguous().view(torch.uint8).reshape(*x.shape, 4)).contiguous().view(x.dtype)[..., 0]


def _used(bytes_: Tensor, change: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """The bytes of real blocks changed among themselves."""
    return torch.cat([change(bytes_[..., :count]), bytes_[..., count:]], dim=-1)


def _blocks(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def read(call: Call, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        count = inputs["q"].shape[-1] // 16
        return inputs | {name: _bytes(lambda x: _used(x, change, count))(inputs[name])}

    return read


MINE = "no public thread: "
EQUAL = "neighbours have equal scales"
for letter in "qk":
    blocks = LOGITS & takes(f"{letter}_sf")
    for what, words, seen in (
        ("next block", _blocks(f"{letter}_sf", lambda x: x.roll(-1, dims=-1)), "mlc-ai/TIRx-kernels PR 5"),
        (
            "first block for all",
            _blocks(f"{letter}_sf", lambda x: x[..., :1].expand(x.shape)),
            MINE + "one instruction's scale id for every step over K",
        ),
        ("blocks in reverse", _blocks(f"{letter}_sf", lambda x: x.flip(-1)), MINE + "a word read from its high byte"),
    ):
        fault(f"{letter} of FP4 logits: scale of the {what}", INDEX, seen=seen, on=blocks, read=words, same_if=EQUAL)
    fault(
        f"{letter} of FP4 logits: nibbles of a byte exchanged",
        MOVEMENT,
        seen="pith-train PR 74",
        on=blocks,
        read=entry(letter, lambda x: (x << 4) | (x >> 4)),
        same_if="the two codes of every byte are equal",
    )
    fault(
        f"{letter} of FP4 logits: scales ignored",
        VALUE,
        seen=MINE + "the kernel without block scales (f8f6f4)",
        on=blocks,
        read=entry(f"{letter}_sf", lambda x: torch.full_like(x, 0x7F7F7F7F)),
    )
    fault(
        f"{letter} of FP4 logits: signs lost",
        CAST,
        seen="flashinfer PR 3932",
        on=blocks,
        read=entry(letter, lambda x: x & 0x77),
        same_if="no product of codes is negative",
    )
fault(
    "{}",
    INDEX,
    on=LOGITS & takes("q_sf"),
    seen="DeepGEMM 433",
    same_if=EQUAL,
    over=(
        way("q of FP4 logits: scale of the next head", lambda x: x.roll(-1, dims=-1)),
        way(
            "q of FP4 logits: scales of the next token",
            lambda x: x.roll(-1, dims=0),
            needs=need(lambda call: call.inputs["weights"].shape[0] > 1, "there is one token"),
        ),
    ),
    read=lambda change: entry("q_sf", change),
)

fault(
    "k of FP4 logits: scale of the next key",
    INDEX,
    seen="mlc-ai/TIRx-kernels PR 5",
    on=LOGITS & takes("k_sf"),
    read=entry("k_sf", lambda x: x.roll(-1, dims=0)),
    same_if=EQUAL,
)


# --- pages ----------------------------------------------------------------------------------------------------------


def _scales_of_cache(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The four bytes of a key ``[blocks, P, 4]`` behind the codes of every block."""

    def read(cache: Tensor) -> Tensor:
        blocks, page, _, width = cache.shape
        flat, codes = cache.reshape(blocks, -1), page * (width - 4)
        scale = change(flat[:, codes:].reshape(blocks, page, 4)).reshape(blocks, -1)
        return torch.cat([flat[:, :codes], scale], dim=1).reshape(cache.shape)

    return read


fault(
    "cache: scale of the next key",
    INDEX,
    seen="mlc-ai/TIRx-kernels PR 5",
    on=CACHED,
    read=entry("kv_cache", _scales_of_cache(lambda x: x.roll(-1, dims=1))),
    same_if=EQUAL,
)
fault(
    "cache: scale of the page's first key",
    INDEX,
    seen="aiter PR 5591",
    on=CACHED,
    read=entry("kv_cache", _scales_of_cache(lambda x: x[:, :1].expand(x.shape))),
    same_if=EQUAL,
)

fault(
    "cache: bytes of a key's scale reversed",
    INDEX,
    seen=MINE + "a word read from its high byte",
    on=CACHED & takes("q_sf"),
    read=entry("kv_cache", _scales_of_cache(lambda x: x.flip(-1))),
    same_if=EQUAL,
)
fault(
    "cache: page of the next entry",
    INDEX,
    seen="aiter PR 5591",
    on=CACHED,
    needs=need(lambda call: call.inputs["block_tables"].shape[1] > 1, "a request has one page"),
    read=entry("block_tables", lambda x: x.roll(-1, dims=1)),
)
fault(
    "cache: pages of the next request",
    INDEX,
    seen="aiter PR 5591",
    on=CACHED,
    needs=need(lambda call: call.inputs["block_tables"].shape[0] > 1, "there is one request"),
    read=entry("block_tables", lambda x: x.roll(-1, dims=0)),
)
several_pages = need(lambda call: call.inputs["kv_cache"].shape[0] > 1, "the cache has one page")
fault(
    "cache: pages of the second half read from the first",
    INDEX,
    seen="aiter PR 5614: page times stride beyond 32 bits",
    on=CACHED,
    needs=several_pages,
    read=lambda inputs: inputs | {"block_tables": inputs["block_tables"] % -(-inputs["kv_cache"].shape[0] // 2)},
    same_if="no request has such a page",
)
fault(
    "cache: logits of pages of the second half 0",
    MOVEMENT,
    seen="aiter PR 4774: loads beyond 2 GiB give 0",
    on=CACHED,
    needs=several_pages,
    read=entry("kv_cache", lambda x: torch.where(_in_second_half(x), torch.zeros_like(x), x)),
    same_if="no request has such a page",
)


def _in_second_half(cache: Tensor) -> Tensor:
    """Bool ``[pages, 1, 1, 1]``."""
    page = torch.arange(len(cache), device=cache.device)
    return (page >= -(-len(cache) // 2)).reshape(-1, *(1,) * (cache.dim() - 1))


fault(
    "cache: last key of a context missed",
    MOVEMENT,
    seen="DeepGEMM 433",
    on=CACHED,
    needs=need(lambda call: int(call.inputs["context_lens"].max()) > 1, "no context has two keys"),
    read=entry("context_lens", lambda x: (x - 1).clamp(min=1)),
)


# --- several new tokens of a request ------------------------------------------------------------------------------


def _lengths(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
    """Lengths ``[B, T]`` of new tokens, from those that are right and the number of each token, in ``[1, columns]``."""

    def read(call: Call, lens: Tensor) -> Tensor:
        contract, count = call.contract, call.inputs["q"].shape[1]
        assert isinstance(contract, Paged)
        token = torch.arange(count, device=lens.device)
        right = lens if lens.dim() == 2 else lens[:, None] - count + 1 + token
        return change(right, token).clamp(min=1, max=contract.columns(call.inputs, call.resolved)).to(lens.dtype)

    return read


several_tokens = need(lambda call: call.inputs["q"].shape[1] > 1, "one new token for each request")
fault(
    "cache: {}",
    INDEX,
    on=CACHED,
    needs=several_tokens,
    over=(
        way(
            "windows of new tokens in the opposite order",
            _lengths(lambda right, token: right.flip(1)),
            seen="aiter 4290",
            same_if="the windows are equal",
        ),
        way(
            "window of the last new token for all of a request",
            _lengths(lambda right, token: right[:, -1:].expand_as(right)),
            seen="aiter 4290, query 0 sees the keys of all",
            same_if="the windows are equal",
            admissible_if=UNSPECIFIED,
        ),
    ),
    read=lambda change: entry("context_lens", change),
)
