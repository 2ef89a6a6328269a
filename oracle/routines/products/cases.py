"""Cases of products: dense, scaled, grouped, attention logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oracle.errors import CaseError
from oracle.routines import data
from oracle.routines.case import BLOCK, DTYPES, Case, Grammar, no_options, out_dtype
from oracle.truth import layout


def _operands(case: Case, m: int, n: int, k: int) -> dict[str, Tensor]:
    a, b = case.operand_dtypes
    return {
        "a": data.operand(case.label("a"), case.family, m, k, dtype=a, side="a"),
        "b": data.operand(case.label("b"), case.family, n, k, dtype=b, side="b"),
    }


def _scale(case: Case, name: str, granularity: str, rows: int, k: int) -> Tensor:
    blocks = -(-k // BLOCK)
    shape = {
        "tensor": (1,),
        "token": (rows, 1),
        "channel": (1, rows),
        "1x128": (rows, blocks),  # of a; of b it is FlashInfer's per-token weight scale
        "128x128": (-(-rows // BLOCK), blocks),
    }[granularity]
    return data.scales(case.label(name), case.family, shape)


def _product(case: Case) -> dict[str, Tensor]:
    m, n, k = case["m"], case["n"], case["k"]
    of_a, of_b = case.granularity
    inputs = _operands(case, m, n, k)
    inputs["a_scale"] = _scale(case, "a_scale", of_a, m, k)
    inputs["b_scale"] = _scale(case, "b_scale", of_b, n, k)
    bias = case.option("bias")
    if bias is not None:
        inputs["bias"] = _vector(case, "bias", (n,), DTYPES[bias])
    return inputs


def _torch_product(case: Case) -> dict[str, Tensor]:
    """torch's names; ``weight`` is the column-major ``[K, N]`` view that its kernels want."""
    inputs = _product(case)
    renamed = {"qinput": inputs["a"], "weight": inputs["b"].t()}
    renamed |= {"scale_a": inputs["a_scale"], "scale_b": inputs["b_scale"]}
    return renamed | ({"bias": inputs["bias"]} if "bias" in inputs else {})


def _flashinfer_product(case: Case) -> dict[str, Tensor]:
    """A bfloat16 operand is quantised by the kernel and has no scale."""
    inputs = _product(case)
    names = {"a": "input", "b": "weight", "a_scale": "input_scale", "b_scale": "weight_scale"}
    wide = [side for side, dtype in zip("ab", case.operand_dtypes, strict=True) if dtype == torch.bfloat16]
    return {new: inputs[old] for old, new in names.items() if old.removesuffix("_scale") not in wide or old in wide}


def _vector(case: Case, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A bias or a weight vector that keeps an exact case exact."""
    if case.family in ("exact", "ties"):
        return data.small_integers(case.label(name), shape, bound=8, dtype=dtype)
    return data.normal(case.label(name), shape, dtype=dtype)


def _grouped(case: Case) -> dict[str, Tensor]:
    """Rows sorted by expert in runs aligned to 128; some experts empty, the tail of every run is padding."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    if m % BLOCK:
        raise CaseError(f"m={m} of {case.contract} is not a multiple of {BLOCK}, the alignment of an expert's run")
    inputs = _operands(case, m, g * n, k)
    inputs["b"] = inputs["b"].reshape(g, n, k)
    inputs["a_scale"] = _scale(case, "a_scale", "1x128", m, k)
    shape = (g, -(-n // BLOCK), -(-k // BLOCK))
    inputs["b_scale"] = data.scales(case.label("b_scale"), case.family, shape)
    stream = case.stream("m_indices")
    tiles = m // BLOCK
    owner = sorted(stream.integers(0, g, (tiles,)).tolist())
    used = stream.integers(1, BLOCK + 1, (tiles,)).tolist()
    indices = torch.full((m,), -1, dtype=torch.int32, device="cpu")
    for tile, expert in enumerate(owner):
        last = tile + 1 == tiles or owner[tile + 1] != expert
        indices[tile * BLOCK : tile * BLOCK + (used[tile] if last else BLOCK)] = expert
    inputs["m_indices"] = indices
    return inputs


def _masked(case: Case) -> dict[str, Tensor]:
    """G matrices of M rows, of which a few, none (group 0 when there are several) or all (the last) are real."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    inputs = _operands(case, g * m, g * n, k)
    shape_a, shape_b = (g, m, -(-k // BLOCK)), (g, -(-n // BLOCK), -(-k // BLOCK))
    real = case.stream("masked_m").integers(0, m + 1, (g,))
    real[0], real[-1] = 0, m
    return {
        "a": inputs["a"].reshape(g, m, k),
        "a_scale": data.scales(case.label("a_scale"), case.family, shape_a),
        "b": inputs["b"].reshape(g, n, k),
        "b_scale": data.scales(case.label("b_scale"), case.family, shape_b),
        "masked_m": torch.from_numpy(real).to(torch.int32),
    }


def _scaled_grouped(case: Case) -> dict[str, Tensor]:
    """Rows in runs of any length: of several experts the first has none and the second one row; the last eighth of the
    rows, where there are eight, belongs to nobody."""
    m, n, k, g = case["m"], case["n"], case["k"], case["g"]
    inputs = _operands(case, m, g * n, k)
    used = m - m // 8
    ends = case.stream("offsets").integers(min(1, used), used + 1, (g,))
    ends.sort()
    ends[-1] = used
    if g > 2:
        ends[:2] = 0, 1
    return {
        "a": inputs["a"],
        "b": inputs["b"].reshape(g, n, k),
        "scale_a": _scale(case, "scale_a", "token", m, k),
        "scale_b": data.scales(case.label("scale_b"), case.family, (g, n)),
        "offsets": torch.from_numpy(ends).to(torch.int32),
    }


def _mqa_logits(case: Case) -> dict[str, Tensor]:
    """Queries of H heads against N keys; windows [ks, ke) of every kind: empty, full, ragged."""
    m, n, h, d = case["m"], case["n"], case["h"], case["d"]
    of_q, of_k = case.operand_dtypes
    stream = case.stream("windows")
    ends = stream.integers(0, n + 1, (2, m))
    start, stop = ends.min(axis=0), ends.max(axis=0)
    start[0], stop[0] = 0, n
    return {
        "q": data.operand(case.label("q"), case.family, m * h, d, dtype=of_q, side="a").reshape(m, h, d),
        "k": data.operand(case.label("k"), case.family, n, d, dtype=of_k, side="b"),
        "k_scale": data.scales(case.label("k_scale"), case.family, (n,)),
        "weights": _vector(case, "weights", (m, h), torch.float32),
        "cu_seqlen_ks": torch.from_numpy(start).to(torch.int32),
        "cu_seqlen_ke": torch.from_numpy(stop).to(torch.int32),
    }


def _paged_logits(case: Case) -> dict[str, Tensor]:
    """B requests of T new tokens over pages in a shuffled order; contexts ragged, the first one full."""
    b, t, n, h, d = (case[name] for name in "btnhd")
    of_q, of_k = case.operand_dtypes
    pages = -(-n // PAGE)
    k = data.operand(case.label("k"), case.family, b * pages * PAGE, d, dtype=of_k, side="b")
    scale = data.scales(case.label("k_scale"), case.family, (b * pages, PAGE))
    return {
        "q": data.operand(case.label("q"), case.family, b * t * h, d, dtype=of_q, side="a").reshape(b, t, h, d),
        "kv_cache": layout.pack_kv_cache(k.reshape(b * pages, PAGE, d), scale),
        "weights": _vector(case, "weights", (b * t, h), torch.float32),
        "context_lens": _contexts(case, b, n, least=t),
        "block_tables": torch.from_numpy(case.stream("tables").order(b * pages)).to(torch.int32).reshape(b, pages),
    }


def _metadata(case: Case) -> dict[str, Tensor]:
    return {"context_lens": _contexts(case, case["b"], case["n"], least=0)}


def _contexts(case: Case, requests: int, longest: int, *, least: int) -> Tensor:
    lens = case.stream("context_lens").integers(min(least, longest), longest + 1, (requests,))
    lens[0] = longest
    return torch.from_numpy(lens).to(torch.int32)


def _clean(case: Case) -> dict[str, object]:
    return {"clean_logits": case.option("clean") == "1"}


PAGE = 64  # keys of a block of the paged cache
_FAMILIES = tuple(data.OPERAND_FAMILIES)
_FINITE = tuple(family for family in _FAMILIES if "nan" not in family)
_OUT = ("e4m3xe4m3-bf16", "e4m3xe4m3-f16", "e4m3xe4m3-f32")
_E5M2 = ("e5m2xe4m3-bf16", "e4m3xe5m2-bf16", "e5m2xe5m2-bf16")
_BIAS = {"bias": ("bf16", "f16", "f32")}
_CLEAN = {"clean": ("1",)}
_MNK = ("m", "n", "k")


def _scaled_mm(
    schemes: tuple[str, ...], build: Callable[[Case], dict[str, Tensor]], dtypes: tuple[str, ...] = _OUT
) -> Grammar:
    return Grammar(_MNK, dtypes, schemes, _FAMILIES, build, out_dtype, _BIAS)


GRAMMARS: Mapping[str, Grammar] = {
    "fp8_gemm_nt": Grammar(
        _MNK,
        ("e4m3xe4m3-bf16", "e4m3xe4m3-f32", "e4m3xe4m3-f16", *_E5M2),
        ("1x128:128x128",),
        _FAMILIES,
        _product,
        out_dtype,
    ),
    "fp8_blockscale_gemm_sm90": Grammar(
        _MNK,
        (*_OUT, "bf16xe4m3-bf16", "bf16xbf16-bf16"),
        ("1x128:128x128", "1x128:1x128"),
        _FAMILIES,
        _flashinfer_product,
        out_dtype,
    ),
    **{
        name: Grammar(_MNK, ("bf16xe4m3-bf16",), ("1x128:128x128",), _FINITE, _flashinfer_product, out_dtype)
        for name in (
            "flashinfer_fp8_blockscale_gemm",
            "dynamic_flashinfer_deepgemm_blockscale_gemm",
            "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        )
    },
    "cutlass_scaled_mm": _scaled_mm(
        ("tensor:tensor", "token:channel", "tensor:channel", "token:tensor", "1x128:128x128"),
        _product,
        (*_OUT, *_E5M2),
    ),
    "cutlass_w8a8_scaled_mm": _scaled_mm(
        ("tensor:tensor", "token:channel", "tensor:channel", "token:tensor"), _torch_product
    ),
    "rocm_per_tensor_w8a8_scaled_mm": _scaled_mm(("tensor:tensor",), _torch_product),
    "torch_per_tensor_w8a8_scaled_mm": _scaled_mm(("tensor:tensor",), _torch_product),
    "torch_per_token_w8a8_scaled_mm": _scaled_mm(("token:channel",), _torch_product),
    "torch_channelwise_w8a8_scaled_mm": _scaled_mm(("token:channel", "tensor:channel", "token:tensor"), _torch_product),
    "m_grouped_fp8_gemm_nt_contiguous": Grammar(
        ("m", "n", "k", "g"), (*_OUT, *_E5M2), ("1x128:128x128",), _FAMILIES, _grouped, out_dtype
    ),
    "fp8_m_grouped_gemm_nt_masked": Grammar(
        ("m", "n", "k", "g"), (*_OUT, *_E5M2), ("1x128:128x128",), _FAMILIES, _masked, out_dtype
    ),
    "scaled_grouped_mm": Grammar(
        ("m", "n", "k", "g"),
        _OUT,
        ("token:channel",),
        _FAMILIES,
        _scaled_grouped,
        out_dtype,
    ),
    "fp8_mqa_logits": Grammar(
        ("m", "n", "h", "d"), ("e4m3xe4m3-f32",), ("tensor:token",), _FAMILIES, _mqa_logits, _clean, _CLEAN
    ),
    "fp8_paged_mqa_logits": Grammar(
        ("b", "t", "n", "h", "d"), ("e4m3xe4m3-f32",), ("tensor:token",), _FAMILIES, _paged_logits, _clean, _CLEAN
    ),
    "get_paged_mqa_logits_metadata": Grammar(("b", "n"), ("i32",), ("-",), ("integers",), _metadata, no_options),
}
