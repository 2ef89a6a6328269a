"""Cases of FP8 attention: data whose softmax shows what a pipeline does to P."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar, seeds

NATS = 16.0
"""From the first key of a ramp to the last: P passes every underflow of E4M3, with a lift and without."""
LN2 = 0.6931472
"""With it as the softmax scale of unit scales ``c`` is 1 in float32: of integer scores P is a power of two."""
UNIT_SCORES = 2.0**7.5
"""Brings the product of two scales of :func:`oracle.routines.data.scales` to about 2."""
HOT = 7.5
"""What one key of family ``hot`` has above the others, in nats: P = 2^-10.8 of these, which only a lift keeps."""


def _operands(case: Case, queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]) -> list[Tensor]:
    """``q`` ``[.., H, D]``, ``k`` and ``v`` ``[.., N, G, ..]``, codes of E4M3; a ramp rises for the first KV head and
    falls for the next, ``fall`` the other way round."""
    q, k, v = (case.stream(name).normals(shape) for name, shape in zip("qkv", (queries, keys, values), strict=True))
    (*_, n, of_keys, depth), family = keys, case.family
    along = np.where(case.stream("direction").integers(0, 2, (depth,)) == 1, 1.0, -1.0) / depth**0.5
    level = np.zeros((n, of_keys))
    if family in ("ramp", "fall"):
        level = np.linspace(0.0, NATS, n)[:, None].repeat(of_keys, axis=1)
        falling = slice(1, None, 2) if family == "ramp" else slice(0, None, 2)
        level[:, falling] = level[::-1, falling]
    if family == "hot":
        level[case.stream("hot").integers(0, n, (of_keys,)), np.arange(of_keys)] = HOT
    if family in ("ramp", "fall", "hot"):
        k, q = 0.25 * k + level[..., None] * along, 0.05 * q + along * depth**0.5
    if family == "exact":
        q, k, v = (np.clip(np.rint(x), -2, 2) for x in (q, k, v))
        q[..., 16:] = 0.0
    if family in ("randn", "codes", "nan"):
        q = 1.5 * q
    if family == "ones":
        q, v = 2.0 * q, np.ones_like(v)
    codes = [data.encoded(x, torch.float8_e4m3fn) for x in (q, k, v)]
    if family == "codes":
        rows = codes[2].numel() // values[-1]
        drawn = data.operand(case.label("v"), "codes", rows, values[-1], dtype=torch.float8_e4m3fn, side="b")
        codes[2] = drawn.reshape(values)
    if family == "nan":
        for name, x in zip("qkv", codes, strict=True):
            at = int(case.stream(f"nan of {name}").integers(0, x.numel(), (1,))[0])
            x.view(torch.uint8).view(-1)[at] = 0x7F
    return codes


def _scales(case: Case, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    if case.option("scales") == "none" or case.family == "exact":
        return {}
    return {name: data.scales(case.label(name), "randn", shape) * UNIT_SCORES}


def _mha(case: Case) -> dict[str, Tensor]:
    b, s, n, h, g, d, v = (case[name] for name in "bsnhgdv")
    q, k, values = _operands(case, (b, s, h, d), (b, n, g, d), (b, n, g, v))
    inputs = {"q": q, "k": k, "v": values}
    for name in ("q_descale", "k_descale", "v_descale"):
        inputs |= _scales(case, name, (b, g))
    if case.option("used"):
        used = case.stream("used").integers(0, n + 1, (b,))
        used[0] = max(1, n - n // 3)
        inputs["seqused_k"] = torch.from_numpy(used).to(torch.int32)
        for row, keys in enumerate(used.tolist()):  # NaN in slots that nothing uses
            for x in (k, values):
                x.view(torch.uint8)[row, keys:] = 0x7F
    if case.option("sink"):
        sink = np.linspace(-2.0, 6.0, h) + 0.1 * case.stream("sink").normals((h,))
        inputs["s_aux"] = torch.from_numpy(sink).to(torch.bfloat16)
    return inputs


def _mha_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"is_causal": True} if case.option("causal") else {}
    if case.option("window"):
        left, _, right = str(case.option("window")).partition("_")
        options |= {"window_size_left": int(left), "window_size_right": int(right)}
    return options | ({"softmax_scale": LN2} if case.family == "exact" else {})


def _prefill(case: Case) -> dict[str, Tensor]:
    m, n, h, g, d = (case[name] for name in "mnhgd")
    q, k, v = _operands(case, (m, h, d), (n, g, d), (n, g, d))
    scales = {"scale_q": (h,), "scale_k": (g,), "scale_v": (g,)}
    inputs = {"q": q, "k": k, "v": v}
    for name, shape in scales.items():
        inputs |= _scales(case, name, shape)
    return inputs


def _prefill_options(case: Case) -> dict[str, object]:
    options: dict[str, object] = {"o_dtype": case.out_dtype}
    options |= {"causal": True} if case.option("causal") else {}
    return options | ({"sm_scale": LN2} if case.family == "exact" else {})


def _ids(contract: str, grammar: Grammar, profile: str) -> Iterable[str]:
    head = f"{contract}/{grammar.dtypes[0]}/{grammar.schemes[0]}"
    first, *others = grammar.shapes
    for shape in others:
        yield f"{head}/{shape}/family=randn/seed=1"
    for key, values in grammar.options.items():
        for value in values:
            yield f"{head}/{first}/{key}={value}/family=randn/seed=1"
            yield f"{head}/{first}/{key}={value}/family=ramp/seed=1"
    for dtypes in grammar.dtypes[1:]:
        yield f"{contract}/{dtypes}/{grammar.schemes[0]}/{first}/family=randn/seed=1"
    for family in grammar.families:
        for seed in seeds(profile):
            yield f"{head}/{first}/family={family}/seed={seed}"


FAMILIES = ("randn", "ramp", "fall", "hot", "ones", "exact", "codes", "nan")

GRAMMARS = {
    "mha_fwd": Grammar(
        ("b", "s", "n", "h", "g", "d", "v"), ("e4m3xe4m3-bf16",), ("head",), FAMILIES, _mha, _mha_options,
        {"causal": ("1",), "window": ("40_0", "9_30"), "sink": ("1",), "used": ("1",), "scales": ("none",)},
        listed=_ids,
        shapes=(
            "b=2,s=12,n=150,h=6,g=2,d=64,v=64", "b=1,s=1,n=300,h=8,g=2,d=128,v=128",
            "b=1,s=70,n=400,h=2,g=1,d=128,v=128", "b=1,s=33,n=130,h=3,g=3,d=96,v=96",
            "b=1,s=70,n=100,h=2,g=2,d=192,v=128", "b=1,s=65,n=129,h=1,g=1,d=256,v=256",
        ),
    ),
    "single_prefill_with_kv_cache": Grammar(
        ("m", "n", "h", "g", "d"), ("e4m3xe4m3-bf16", "e4m3xe4m3-f16"), ("head",), FAMILIES, _prefill, _prefill_options,
        {"causal": ("1",), "scales": ("none",)},
        listed=_ids,
        shapes=("m=40,n=150,h=4,g=2,d=64", "m=20,n=200,h=2,g=1,d=128", "m=17,n=140,h=1,g=1,d=256"),
    ),
}  # fmt: skip  # a table, one row a line

GOLDENS = (
    "mha_fwd/e4m3xe4m3-bf16/head/b=1,s=4,n=24,h=2,g=1,d=32,v=32/family=ramp/seed=7",
    "mha_fwd/e4m3xe4m3-bf16/head/b=1,s=4,n=24,h=2,g=1,d=32,v=32/causal=1/family=randn/seed=7",
    "mha_fwd/e4m3xe4m3-bf16/head/b=2,s=3,n=20,h=2,g=2,d=32,v=16/sink=1/family=randn/seed=7",
    "single_prefill_with_kv_cache/e4m3xe4m3-bf16/head/m=4,n=20,h=2,g=1,d=64/causal=1/family=randn/seed=7",
)
