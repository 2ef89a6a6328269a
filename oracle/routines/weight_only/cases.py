"""Cases of weight-only products and layouts. ``exact`` ones have whole activations and scales that are powers of two:
no sum rounds in either dtype, and one value of each element is right. ``dead`` ones have scales near the least of their
format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from oracle.routines import data
from oracle.routines.case import Case, Grammar
from oracle.routines.mx.contract import pack
from oracle.routines.weight_only.kernels import E8M0, TYPES
from oracle.truth.weight_only import awq_words, words
from oracle.verdict.sets import bits_of

UNITS = {2: 16, 3: 32, 4: 8, 8: 4}
"""Codes of whole words, by their bits."""
ONE = ("1",)
FAMILIES = ("randn", "exact", "outlier", "nan", "dead")


def _integers(case: Case, name: str, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(case.stream(name).integers(low, high, shape)).to(torch.int64)


def _whole(extent: int, unit: int) -> int:
    """The multiple of ``unit`` at or above an extent: words hold whole ones."""
    return -(-extent // unit) * unit


def _activations(case: Case, dtype: torch.dtype) -> Tensor:
    m, k = case["m"], case["k"]
    if case.family == "exact":  # few terms, so that the sums stay below 2^8 in steps of 1
        small = _integers(case, "a", -1, 2, (m, k)) * (_integers(case, "few", 0, max(1, k // 4), (m, k)) < 3)
        return small.to(dtype)
    family = case.family if case.family in data.ACTIVATION_FAMILIES else "randn"
    return data.activations(case.label("a"), family, m, k, dtype=dtype)


def _scales(case: Case, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Positive, a different one for each group; ``dead``: near the least that the dtype holds."""
    if case.family == "exact":
        return torch.exp2(_integers(case, name, 0, 2, shape).double()).to(dtype)
    if dtype is E8M0:
        return (_integers(case, name, 120, 128, shape) - 60 * (case.family == "dead")).to(torch.uint8).view(dtype)
    scale = data.scales(case.label(name), "randn", shape)
    if dtype is torch.float8_e4m3fn:
        return (
            _integers(case, name, *((1, 24) if case.family == "dead" else (40, 100)), shape).to(torch.uint8).view(dtype)
        )
    return (scale * (2.0**-10 if case.family == "dead" else 4.0)).to(dtype)


def _groups(case: Case) -> int:
    """Scales of a column; the scheme is the length of a group, or ``column``."""
    return 1 if case.scheme == "column" else max(1, case["k"] // int(case.scheme))


def _indexed(case: Case, rows: int) -> dict[str, Tensor]:
    if case.option("order") != "1":
        return {}
    each = torch.arange(case["k"], device="cpu") * rows // case["k"]
    order = torch.argsort(_integers(case, "order", 0, 1 << 30, (case["k"],)))
    return {"g_idx": each[order].to(torch.int32)}


def _awq(case: Case) -> dict[str, Tensor]:
    n, k, g, (dtype,) = _whole(case["n"], 8), case["k"], _groups(case), case.operand_dtypes
    inputs = {"qweight": awq_words(_integers(case, "q", 0, 16, (k, n))), "scales": _scales(case, "s", (g, n), dtype)}
    zeros = awq_words(_integers(case, "z", 0, 16, (g, n)))
    if case.contract == "awq_dequantize":
        return inputs | {"zeros": zeros}
    return {"input": _activations(case, dtype), **inputs, "qzeros": zeros}


def _gptq(case: Case) -> dict[str, Tensor]:
    g, bit = _groups(case), int(case.option("bit") or 4)
    n, k = (_whole(case[name], UNITS[bit]) for name in "nk")
    return {
        "a": _activations(case, torch.float16),
        "b_q_weight": words(_integers(case, "q", 0, 1 << bit, (k, n)), bit),
        "b_gptq_qzeros": words(_integers(case, "z", 0, 1 << bit, (n, g)), bit).t().contiguous(),
        "b_gptq_scales": _scales(case, "s", (g, n), torch.float16),
        **_indexed(case, g),
    }


def _typed(case: Case, default: str) -> tuple[str, Tensor]:
    name = case.option("type") or default
    bits, _, fmt = TYPES[name]
    q = _integers(case, "q", 0, 1 << bits, (case["k"], case["n"]))
    if fmt is not None and bits == 8:
        q = torch.where(q % 128 == 127, q - 1, q)  # no NaN
    if case.family == "exact" and bits == 8:  # values of one or two bits beside the middle
        q = 128 + q % 3 if fmt is None else q % 2 * 56 + q // 2 % 2 * 128
    return name, q.to(torch.uint8)


def _marlin(case: Case) -> dict[str, Tensor]:
    (dtype,), (name, q), n = case.operand_dtypes, _typed(case, "uint4b8"), case["n"]
    block = {"16": torch.float8_e4m3fn, "32": E8M0}.get(case.scheme, dtype)
    block = block if name == "float4_e2m1f" or (name == "float8_e4m3fn" and block is E8M0) else dtype
    inputs = {"a": _activations(case, dtype), "b_q": q, "b_scales": _scales(case, "s", (_groups(case), n), block)}
    if name in ("uint4", "uint8"):
        low, high = ((128, 131) if name == "uint8" else (6, 9)) if case.family == "exact" else (0, 1 << TYPES[name][0])
        zeros = _integers(case, "z", low, high, (_groups(case), n))
        inputs["b_zeros"] = zeros.to(dtype) if case.option("zeros") == "float" else zeros.to(torch.uint8)
    if block is torch.float8_e4m3fn:
        inputs["global_scale"] = torch.tensor(
            [0.5 if case.family == "exact" else 0.013], dtype=torch.float32, device="cpu"
        )
    if case.option("bias") == "1":
        inputs["b_bias"] = (
            _integers(case, "b", -4, 5, (n,)).to(dtype)
            if case.family == "exact"
            else data.normal(case.label("b"), (n,), dtype=dtype)
        )
    return inputs | _indexed(case, _groups(case))


def _machete(case: Case) -> dict[str, Tensor]:
    (dtype,), (name, q), m, n = case.operand_dtypes, _typed(case, "uint4b8"), case["m"], case["n"]
    inputs = {"a": _activations(case, dtype), "b_q": q, "b_group_scales": _scales(case, "s", (_groups(case), n), dtype)}
    if name in ("uint4", "uint8"):
        middle = 8 if name == "uint4" else 129
        zeros = _integers(case, "z", middle - 1, middle + 2, inputs["b_group_scales"].shape)
        inputs["b_group_zeros"] = (-inputs["b_group_scales"].float() * zeros).to(dtype)
    for key, size in (("b_channel_scales", n), ("a_token_scales", m)):
        if case.option("scales") == "1":
            inputs[key] = _scales(case, key, (size,), torch.float32)
    return inputs


def _nvfp4(case: Case) -> dict[str, Tensor]:
    n, k = case["n"], case["k"]
    inputs = {
        "a": _activations(case, torch.bfloat16),
        "b": pack(_integers(case, "q", 0, 16, (n, k + k % 2)).to(torch.uint8)),
        "b_descale": _scales(case, "s", (n, -(-k // 16)), torch.float8_e4m3fn),
    }
    if case.option("alpha") == "1":
        inputs["alpha"] = torch.tensor([2.0 if case.family == "exact" else 0.37], dtype=torch.float32, device="cpu")
    return inputs


def _svdquant(case: Case) -> dict[str, Tensor]:
    """Both sides of NVFP4, low-rank parts of ``r`` columns, and with ``bias=1`` a bias."""
    m, n, k, r, exact = *(case[name] for name in "mnkr"), case.family == "exact"
    inputs = {"alpha": torch.tensor([2.0 if exact else 0.37], dtype=torch.float32, device="cpu")}
    for name, rows in (("a", m), ("b", n)):
        inputs[name] = pack(_integers(case, f"codes of {name}", 0, 16, (rows, k + k % 2)).to(torch.uint8))
        inputs[f"{name}_sf"] = _scales(case, f"scales of {name}", (rows, -(-k // 16)), torch.float8_e4m3fn)
    for name, rows in (("d", m), ("l1", n)):
        small = data.small_integers(case.label(name), (rows, r), bound=2, dtype=torch.bfloat16)
        inputs[name] = small if exact else data.normal(case.label(name), (rows, r), dtype=torch.bfloat16)
    if case.option("bias") == "1":
        inputs["bias"] = data.normal(case.label("bias"), (n,), dtype=torch.bfloat16)
    return inputs


def _allspark(case: Case) -> dict[str, Tensor]:
    (dtype,), k, n = case.operand_dtypes, case["k"], case["n"]
    low, high = (127, 130) if case.family == "exact" else (0, 256)
    inputs = {
        "a": _activations(case, dtype),
        "b_qweight": _integers(case, "q", low, high, (k, n)).to(torch.uint8),
        "b_scales": _scales(case, "s", (1, n), dtype),
    }
    if case.option("zeros") == "1":
        inputs["b_qzeros"] = _integers(case, "z", *((-1, 2) if case.family == "exact" else (-60, 60)), (1, n)).to(dtype)
    return inputs


def _sequential(case: Case) -> dict[str, Tensor]:
    """Words of eight columns, the first in the low nibble."""
    (dtype,), k, n, g = case.operand_dtypes, case["k"], _whole(case["n"], 8), _groups(case)
    low, high = (6, 11) if case.family == "exact" else (0, 16)

    def along(name: str, rows: int) -> Tensor:
        return words(_integers(case, name, low, high, (n, rows)), 4).t().contiguous()

    inputs = {"a": _activations(case, dtype), "b_q": along("q", k), "scales": _scales(case, "s", (g, n), dtype)}
    return inputs | ({"qzeros": along("z", g)} if case.option("zeros") == "1" else {})


def _types(case: Case) -> dict[str, object]:
    return {"b_type": case.option("type") or "uint4b8"}


def _bits(case: Case) -> dict[str, object]:
    return {"bit": int(case.option("bit") or 4)}


def _dtypes(case: Case) -> dict[str, object]:
    return {}


def _grammar(
    build: Callable[[Case], dict[str, Tensor]],
    call: Callable[[Case], dict[str, object]],
    *,
    dtypes: tuple[str, ...] = ("bf16", "f16"),
    schemes: tuple[str, ...] = ("32", "column"),
    domain: str = "",
    options: Mapping[str, tuple[str, ...]] | None = None,
    shapes: tuple[str, ...] = ("m=5,n=32,k=64", "m=3,n=64,k=256"),
    extra: tuple[str, ...] = (),
    families: tuple[str, ...] = FAMILIES,
) -> Grammar:
    return Grammar(
        ("m", "n", "k"),
        dtypes,
        schemes,
        families,
        build,
        call,
        options or {},
        shapes=shapes,
        domain=domain,
        extra=extra,
    )


# --- experts ------------------------------------------------------------------------------------------------


def _routed(case: Case) -> dict[str, Tensor]:
    m, e = case["m"], case["g"]
    ids = torch.stack([(_integers(case, "first", 0, e, (m,)) + i) % e for i in range(min(2, e))], dim=1).to(torch.int32)
    if case.option("weights") != "1":
        return {"topk_ids": ids}
    weights = _scales(case, "w", tuple(ids.shape), torch.float32)
    return {"topk_ids": ids, "topk_weights": weights}


def _of_experts(case: Case) -> dict[str, Tensor]:
    """The inputs of ``marlin_gemm`` for each expert, stacked but for the activations."""
    each = [_marlin(replace(case, seed=1000 * case.seed + i)) for i in range(case["g"])]
    stacked = {
        name: torch.stack([bits_of(one[name]) for one in each]).view(each[0][name].dtype)
        for name in each[0]
        if name != "a"
    }
    if "global_scale" in stacked:
        stacked["global_scale"] = stacked["global_scale"][:, 0]
    return {"a": each[0]["a"], **stacked, **_routed(case)}


def _wna16(case: Case) -> dict[str, Tensor]:
    (dtype,), bit = case.operand_dtypes, int(case.option("bit") or 4)
    n, k, e, s = _whole(case["n"], 2), _whole(case["k"], 2), case["g"], _groups(case)
    middle = 8 if bit == 4 else 128
    low, high = (middle - 2, middle + 3) if case.family == "exact" else (0, 1 << bit)
    inputs = {
        "input": _activations(case, dtype),
        "b_qweight": _bytes(_integers(case, "q", low, high, (e, n, k)), bit),
        "b_scales": _scales(case, "s", (e, n, s), dtype),
        **_routed(case),
    }
    if case.option("zeros") == "1":
        inputs["b_qzeros"] = _bytes(_integers(case, "z", low, high, (e, s, n)), bit).transpose(1, 2).contiguous()
    return inputs


def _bytes(codes: Tensor, bit: int) -> Tensor:
    """The even of two codes in the low nibble."""
    return (codes if bit == 8 else codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


EXPERTS: Mapping[str, Grammar] = {
    "moe_wna16_marlin_gemm": Grammar(
        ("m", "n", "k", "g"), ("bf16", "f16"), ("32", "16", "column"), FAMILIES, _of_experts,
        lambda case: {"b_type": case.option("type") or "uint4b8"},
        {"type": tuple(name for name in TYPES if name != "uint4b8"), "bias": ONE, "weights": ONE},
        shapes=("m=5,n=16,k=64,g=4",), domain="k % 32 == 0",
    ),
    "moe_wna16_gemm": Grammar(
        ("m", "n", "k", "g"), ("bf16", "f16"), ("32", "column"), FAMILIES, _wna16, _bits,
        {"bit": ("8",), "zeros": ONE, "weights": ONE}, shapes=("m=5,n=16,k=64,g=4",), domain="k % 32 == 0, n % 2 == 0",
    ),
}  # fmt: skip  # a table, one row a line

# --- layouts ------------------------------------------------------------------------------------------------


def _order(case: Case, name: str, k: int) -> dict[str, Tensor]:
    order = torch.argsort(_integers(case, "order", 0, 1 << 30, (k,)))
    return {name: order.to(torch.int32)} if case.option("order") == "1" else {}


def _shuffle(case: Case) -> dict[str, Tensor]:
    n, bit = case["k"], int(case.option("bit") or 4)
    k = _whole(case["m"], UNITS[bit])
    return {"q_weight": words(_integers(case, "q", 0, 1 << bit, (k, n)), bit), **_order(case, "q_perm", k)}


def _repack(case: Case) -> dict[str, Tensor]:
    k, n, bits = _whole(case["m"], 16), _whole(case["k"], 64), int(case.option("bits") or 4)
    codes = _integers(case, "q", 0, 1 << bits, (k, n))
    if case.contract == "awq_marlin_repack":
        return {"b_q_weight": awq_words(codes, bits)}
    return {"b_q_weight": words(codes, bits), **_order(case, "perm", k)}


def _rows(case: Case) -> dict[str, Tensor]:
    m, n, bits = case["m"], case["k"], int(case.option("bits") or 4)
    n = _whole(n, 64) if "zero_points" in case.contract else n
    if case.contract == "pack_fp8_to_int32":
        return {"fp8_tensor": data.operand(case.label("q"), "codes", m, n, dtype=torch.float8_e4m3fn, side="b")}
    if "zero_points" in case.contract:
        zeros = _integers(case, "z", 0, 1 << bits, (m, n))
        return {"q_zp_packed": awq_words(zeros, bits)} if "awq" in case.contract else {"zp": zeros.to(torch.int32)}
    (dtype,) = case.operand_dtypes
    if case.contract == "marlin_permute_bias":
        return {"s": data.normal(case.label("b"), (n,), dtype=dtype)}
    name = {
        "marlin_permute_scales": "s",
    }.get(case.contract, "marlin_scales" if "process" in case.contract else "scales")
    of = {"nvfp4_marlin_process_scales": torch.float8_e4m3fn, "mxfp4_marlin_process_scales": E8M0}
    scale = _scales(case, name, (m, n), of.get(case.contract, dtype))
    return {name: scale.to(torch.float32).to(dtype)}


def _ordered(case: Case) -> dict[str, object]:
    options: dict[str, object] = {}
    if case.contract == "gptq_shuffle":
        return {"bit": int(case.option("bit") or 4)}
    if "repack" in case.contract or "zero_points" in case.contract:
        options["num_bits"] = int(case.option("bits") or 4)
    if case.option("eight") == "1":
        options["is_a_8bit"] = True
    if case.contract == "marlin_permute_scales" and case.scheme != "column":
        options["group_size"] = int(case.scheme)
    return options


def _layout(
    build: Callable[[Case], dict[str, Tensor]],
    domain: str,
    *,
    dtypes: tuple[str, ...] = ("i32",),
    schemes: tuple[str, ...] = ("-",),
    shapes: tuple[str, ...] = ("m=64,k=128",),
    families: tuple[str, ...] = ("randn",),
    **options: tuple[str, ...],
) -> Grammar:
    return Grammar(("m", "k"), dtypes, schemes, families, build, _ordered, options, shapes=shapes, domain=domain)


WORDS, TENS = {"bits": ("8",), "eight": ("1",)}, ("bf16", "f16")
LAYOUTS: Mapping[str, Grammar] = {
    "gptq_shuffle": _layout(_shuffle, "m % 32 == 0", bit=("2", "3", "8"), order=ONE),
    "gptq_marlin_repack": _layout(_repack, "m % 32 == 0, k % 64 == 0", **WORDS, order=ONE),
    "awq_marlin_repack": _layout(_repack, "m % 32 == 0, k % 64 == 0", **WORDS),
    "marlin_permute_scales": _layout(
        _rows, "k % 64 == 0", dtypes=TENS, schemes=("32", "column"), shapes=("m=4,k=128",), eight=ONE,
    ),
    "marlin_permute_bias": _layout(_rows, "k % 32 == 0, m == 1", dtypes=TENS, shapes=("m=1,k=96",)),
    "marlin_zero_points": _layout(_rows, "k % 64 == 0", shapes=("m=3,k=128",), **WORDS),
    "awq_to_marlin_zero_points": _layout(_rows, "k % 64 == 0", shapes=("m=3,k=128",), **WORDS),
    "nvfp4_marlin_process_scales": _layout(_rows,
        "k % 4 == 0", dtypes=TENS, shapes=("m=3,k=32",), families=("randn", "dead")),
    "mxfp4_marlin_process_scales": _layout(_rows, "k % 4 == 0", dtypes=TENS, shapes=("m=3,k=32",), eight=ONE),
    "fp8_fused_exponent_bias_into_scales": _layout(_rows,
        "", dtypes=TENS, shapes=("m=3,k=32",), families=("randn", "dead")),
    "pack_fp8_to_int32": _layout(_rows, "m % 4 == 0, k % 4 == 0", dtypes=("e4m3",), shapes=("m=8,k=12",)),
}  # fmt: skip  # a table, one row a line
NAMED = tuple(name for name in TYPES if name != "uint4b8")
PRODUCTS: Mapping[str, Grammar] = {
    "awq_dequantize": _grammar(
        _awq, _dtypes, dtypes=("f16", "bf16"), domain="n % 8 == 0, k % 32 == 0, m == 1", shapes=("m=1,n=32,k=64",),
    ),
    "awq_gemm": _grammar(_awq, _dtypes, dtypes=("f16", "bf16"), domain="n % 8 == 0, k % 32 == 0"),
    "gptq_gemm": _grammar(
        _gptq, _bits, dtypes=("f16",), domain="n % 32 == 0, k % 32 == 0",
        options={"bit": ("2", "3", "8"), "order": ("1",)},
    ),
    "marlin_gemm": _grammar(
        _marlin, _types, domain="k % 32 == 0",
        options={"type": NAMED, "zeros": ("float",), "bias": ("1",), "order": ("1",)},
        schemes=("32", "16", "column"),
    ),
    "allspark_w8a16_gemm": _grammar(_allspark, _dtypes, schemes=("column",), options={"zeros": ("1",)}),
    "triton_w4a16_gemm": _grammar(
        _sequential, lambda case: {"zp_bias": 7} if case.option("bias") == "7" else {},
        domain="n % 8 == 0, k % 32 == 0", options={"zeros": ("1",), "bias": ("7",)},
    ),
    "machete_mm": _grammar(
        _machete, _types, domain="k % 32 == 0",
        options={"type": ("uint4", "uint8", "uint8b128"), "scales": ("1",)},
        extra=("bf16/32/m=2,n=32,k=1088/family=randn/seed=1",),
    ),
    "mm_bf16_fp4": _grammar(
        _nvfp4, _dtypes, dtypes=("bf16",), schemes=("16",), domain="k % 16 == 0", options={"alpha": ("1",)},
        families=(*FAMILIES, "range"),
    ),
    "mm_nvfp4_svdquant": Grammar(
        ("m", "n", "k", "r"), ("bf16",), ("16",), FAMILIES, _svdquant, lambda case: {}, {"bias": ("1",)},
        shapes=("m=5,n=32,k=64,r=32", "m=3,n=64,k=256,r=64"),
        domain="n % 32 == 0, k % 32 == 0, r % 32 == 0",
    ),
}  # fmt: skip  # a table, one row a line
GRAMMARS: Mapping[str, Grammar] = {**PRODUCTS, **EXPERTS, **LAYOUTS}
