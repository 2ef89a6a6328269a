"""Fused quantisers and mixed products of other libraries, as subjects: vLLM's, sglang-kernel's, FlashInfer's.

    fp8-oracle verify --provider hardware.fused_libraries:subjects --subject vllm ...     (with tests/ on PYTHONPATH)

``vllm``: the operators of the libraries that ``FP8_KERNELS_VLLM_C`` (``_C.abi3.so``: activations and norms) and
``FP8_KERNELS_VLLM_STABLE`` (``_C_stable_libtorch.abi3.so``: packed groups, W4A8, grouped CUTLASS) name. ``sgl``:
``FP8_KERNELS_SGL_OPS``. ``flashinfer``: the package. A call that a library does not document is not offered.
Not covered: what vLLM and sglang choose between these (their Python), measured by nobody here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from hardware.libraries import Library, named
from torch import Tensor

Inputs, Options = Mapping[str, Tensor], Mapping[str, Any]
FP8 = torch.float8_e4m3fn
MAX = 448.0


def offered(holds: object, what: str) -> None:
    """Nothing, or the error that makes a call UNSUPPORTED."""
    if not holds:
        raise NotImplementedError(what)


def _empty(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _lanes(*shape: int) -> Tensor:
    """int32 ``[..., M, W]`` in columns of whole words of 4 rows, zeros past M."""
    *batch, rows, words = shape
    found = torch.zeros(*batch, words, rows + -rows % 4, dtype=torch.int32, device="cuda")
    return found[..., :rows].mT


# --- vLLM -----------------------------------------------------------------------------------------------------------


def vllm(contract: str, inputs: Inputs, options: Options) -> Any:
    if contract in MIXED:
        return MIXED[contract](getattr(torch.ops._C, contract), inputs, options)
    x = inputs["x"]
    offered(x.dtype != torch.float32, "bf16 or f16")
    offered(x.is_contiguous(), "dense rows: some of these check it, the others read no pitch")
    if contract == "per_token_group_quant_fp8_packed":
        q, scale = _empty(*x.shape), _lanes(x.shape[0], -(-x.shape[1] // options["group_size"] // 4))
        torch.ops._C.per_token_group_fp8_quant_packed(x, q, scale, options["group_size"], options["eps"], -MAX, MAX)
        return {"q": q, "scale": scale}
    op = getattr(torch.ops._C, contract)
    if contract == "silu_and_mul_quant":
        offered(options.get("rounding", "each") == "each", "two roundings")
        q = _empty(x.shape[0], x.shape[1] // 2)
        op(q, x, inputs["scale"])
        return {"q": q}
    if contract == "silu_and_mul_per_block_quant":
        offered(options.get("rounding", "none") == "none", "float32 throughout")
        q, columns = _empty(x.shape[0], x.shape[1] // 2), options["is_scale_transposed"]
        scale = _scales(x.shape[0], q.shape[1] // options["group_size"], columns)
        op(q, x, scale, options["group_size"], inputs.get("scale_ub"), columns)
        return {"q": q, "scale": scale}
    if contract == "persistent_masked_m_silu_mul_quant":
        q = _empty(*x.shape[:2], x.shape[2] // 2)
        scale = _empty(*x.shape[:2], q.shape[2] // 128, dtype=torch.float32)
        op(x, inputs["masked_m"], q, scale, False)
        return {"q": q, "scale": scale}
    return _vllm_norm(op, contract, inputs, options)


def _vllm_norm(op: Any, contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    x, weight, epsilon = inputs["x"], inputs["weight"], options["epsilon"]
    q, residual = _empty(*x.shape), _residual(inputs, options)
    beside = {"residual": x.clone() if residual is None else residual}  # an output of its own
    if "static" in contract:  # 0.20.2 rounds the product alone
        offered(options.get("in_place") or options.get("rounding") == "product", "one rounding, of the product")
        if residual is None:
            op(q, x, weight, inputs["scale"], epsilon)
            return {"q": q}
        op(q, x, residual, weight, inputs["scale"], epsilon)
        return {"q": q, **beside}
    if contract == "rms_norm_dynamic_per_token_quant":
        scale = _empty(x.shape[0], 1, dtype=torch.float32)
        op(q, x, weight, scale, epsilon, inputs.get("scale_ub"), residual)
        return {"q": q, "scale": scale, **beside}
    columns = options["is_scale_transposed"]
    scale = _scales(x.shape[0], x.shape[1] // options["group_size"], columns)
    op(q, x, weight, scale, epsilon, inputs.get("scale_ub"), residual, options["group_size"], columns)
    return {"q": q, "scale": scale, **beside}


def _residual(inputs: Inputs, options: Options) -> Tensor | None:
    """What a library writes its sum to: the input itself with ``in_place``, as callers do, else a copy."""
    residual = inputs.get("residual")
    return residual if residual is None or options.get("in_place") else residual.clone()


def _scales(rows: int, groups: int, columns: bool) -> Tensor:
    return _empty(groups, rows, dtype=torch.float32).t() if columns else _empty(rows, groups, dtype=torch.float32)


def _words(b_q: Tensor) -> Tensor:
    """int32 ``[..., K/8]`` of int4 weights ``[..., K]``, the first in the lowest bits."""
    pairs = (b_q & 15).to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 1] << 4 | pairs[..., 0]).contiguous().view(torch.int32)


def dense(inputs: Inputs) -> None:
    """Every operand of two axes without a pitch: the operators get pointers, and strides of their own making."""
    offered(all(x.dim() != 2 or x.is_contiguous() or x.t().is_contiguous() for x in inputs.values()), "dense operands")


@contextmanager
def prepared() -> Iterator[None]:
    """Weights are prepared when a model is loaded, and some of it runs on the legacy default stream, which torch's
    streams do not wait for (docs/findings.md): the caller's stream is done before it, and it is done after it."""
    torch.cuda.current_stream().synchronize()
    yield
    torch.cuda.default_stream().synchronize()


def _reorder(op: Any, inputs: Inputs, options: Options) -> Tensor:
    offered(inputs["b"].shape[0] * 8 % 256 == 0, "K in multiples of 256: others write out of bounds")
    made: Tensor = op(inputs["b"])
    return made


def _pack(op: Any, inputs: Inputs, options: Options) -> Tensor:
    made: Tensor = op(inputs["scales"].contiguous())
    return made.flatten()


def _w4a8(op: Any, inputs: Inputs, options: Options) -> Tensor:
    b, scales = inputs["b_q"], inputs["b_group_scales"]
    offered(options["out_dtype"] == torch.bfloat16, "bfloat16 output")
    offered(b.shape[0] % 16 == 0 and b.shape[1] % 256 == 0, "N in multiples of 16, K of 256")
    dense(inputs)
    words, packed = _words(b), torch.ops._C.cutlass_pack_scale_fp8(scales)
    with prepared():
        encoded = torch.ops._C.cutlass_encode_and_reorder_int4b(words.t())
    beside = inputs["b_channel_scales"], inputs["a_token_scales"]
    made: Tensor = op(inputs["a"], encoded, packed, 128, *beside, torch.bfloat16, None)
    return made


def _starts(inputs: Inputs, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Strides of the rows of every expert's operands and output, int64."""
    experts = inputs["expert_offsets"].numel()
    lead, out = (torch.full((experts,), extent, dtype=torch.int64, device="cuda") for extent in (k, n))
    return inputs["expert_offsets"].long(), lead, out


def exchanged(sizes: Tensor) -> Tensor:
    """Problem sizes ``[G, 3]`` with rows and columns exchanged; an index of Python numbers would come from the CPU,
    which no CUDA graph takes."""
    return torch.stack([sizes[:, 1], sizes[:, 0], sizes[:, 2]], dim=1)


def _moe(op: Any, inputs: Inputs, options: Options) -> Tensor:
    """As vLLM calls it: dense operands, rows of 16 bytes as CUTLASS aligns them."""
    a, b, sizes = inputs["a"], inputs["b"], inputs["problem_sizes"].int().contiguous()
    rows, columns = inputs["scales_a"].numel() == a.shape[0], inputs["scales_b"].shape[1] > 1
    offered(options["out_dtype"] in (torch.bfloat16, torch.float16), "bf16 or f16 output")
    offered(b.shape[1] % 8 == 0 and b.shape[2] % 16 == 0, "N in multiples of 8, K of 16")
    dense(inputs)
    out = torch.zeros(a.shape[0], b.shape[1], dtype=options["out_dtype"], device="cuda")
    starts, lead, of_out = _starts(inputs, b.shape[1], b.shape[2])
    sizes = exchanged(sizes) if a.shape[0] <= 64 else sizes  # exchanged operands up to 64 rows
    op(out, a, b.mT, inputs["scales_a"], inputs["scales_b"], starts, sizes, lead, lead, of_out, rows, columns)
    return out


def _w4a8_moe(op: Any, inputs: Inputs, options: Options) -> Tensor:
    a, b = inputs["a"], inputs["b_q"]
    experts, n, k = b.shape
    offered(options["out_dtype"] == torch.bfloat16, "bfloat16 output")
    offered(a.is_contiguous(), "dense rows: their pitch is passed apart, and is K")
    offered(n % 16 == 0 and k % 256 == 0, "N in multiples of 16, K of 256")
    dense(inputs)
    words, packed = _words(b), torch.ops._C.cutlass_pack_scale_fp8(inputs["b_group_scales"])
    with prepared():
        encoded, layouts = torch.ops._C.cutlass_encode_and_reorder_int4b_grouped(words)
    out = torch.zeros(a.shape[0], n, dtype=torch.bfloat16, device="cuda")
    starts, lead, of_out = _starts(inputs, n, k)
    of_scales = torch.zeros(experts, 2, dtype=torch.int64, device="cuda")
    of_scales[:, 0] = n
    sizes = exchanged(inputs["problem_sizes"].int())
    op(
        out,
        a,
        encoded,
        inputs["a_token_scales"],
        inputs["b_channel_scales"],
        packed,
        128,
        starts,
        sizes,
        lead,
        layouts,
        of_out,
        of_scales,
        None,
    )
    return out


MIXED: Mapping[str, Callable[[Any, Inputs, Options], Any]] = {
    "cutlass_encode_and_reorder_int4b": _reorder,
    "cutlass_pack_scale_fp8": _pack,
    "cutlass_w4a8_mm": _w4a8,
    "cutlass_moe_mm": _moe,
    "cutlass_w4a8_moe_mm": _w4a8_moe,
}


# --- SGLang ---------------------------------------------------------------------------------------------------------


def sgl(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """v2 of the group quantiser: plain rows with float32 or packed scales; fused and masked with packed ones only."""
    x, op, group = inputs["x"], torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2, options["group_size"]
    offered(x.dtype != torch.float32 and x.is_contiguous(), "dense bf16 or f16")
    offered(group in (16, 32, 64, 128) and options.get("eps", 1e-10) == 1e-10, "groups of 16 to 128, floor 1e-10")
    if contract == "per_token_group_quant_fp8":
        offered(not options["use_ue8m0"] and not options.get("column_major_scales"), "row-major float32 scales")
        q, scale = _empty(*x.shape), _empty(x.shape[0], x.shape[1] // group, dtype=torch.float32)
        op(x, q, scale, group, 1e-10, -MAX, MAX, False, False, None)
        return {"q": q, "scale": scale}
    gated, masked = contract == "silu_and_mul_masked_post_quant", inputs.get("masked_m")
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    groups = width // group
    offered(options.get("use_ue8m0", True) and options.get("rounding", "each") == "each", "powers of two")
    offered(groups % 4 == 0 and (masked is None or groups % 16 == 0), "whole words; masked, 16 groups of a row")
    q, packed = _empty(*x.shape[:-1], width), _lanes(*x.shape[:-1], groups // 4)
    op(x, q, packed, group, 1e-10, -MAX, MAX, True, gated, masked)
    if masked is None:
        return {"q": q, "scale": packed}
    byte = packed.contiguous().view(torch.uint8).reshape(*x.shape[:-1], groups)
    return {"q": q, "scale": (byte.int() << 23).view(torch.float32)}


# --- FlashInfer -----------------------------------------------------------------------------------------------------


def flashinfer(contract: str, inputs: Inputs, options: Options) -> dict[str, Tensor]:
    if contract in ROTARY:
        from flashinfer import rope

        names = ("q_rope", "k_rope", "q_nope", "k_nope")
        offered(inputs["cos_sin_cache"].is_contiguous(), "a dense table of angles")
        offered(inputs["q_rope"].shape[-1] % 32 == 0, "rotated columns in multiples of 32: others are answered wrongly")
        operands = *(inputs[n] for n in names), inputs["cos_sin_cache"], inputs["pos_ids"]
        made = getattr(rope, contract)(*operands, **options)
        return dict(zip(names, made, strict=True))
    from flashinfer import norm

    x = inputs["x"]
    offered(x.dtype != torch.float32, "bf16 or f16")
    q = _empty(*x.shape)
    if contract == "rmsnorm_quant":
        norm.rmsnorm_quant(q, x, inputs["weight"], inputs["scale"], options["epsilon"])
        return {"q": q}
    residual = _residual(inputs, options)
    assert residual is not None
    norm.fused_add_rmsnorm_quant(q, x, residual, inputs["weight"], inputs["scale"], options["epsilon"])
    return {"q": q, "residual": residual}


NORMS = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
)
GATED = ("silu_and_mul_quant", "silu_and_mul_per_block_quant", "persistent_masked_m_silu_mul_quant")
ROTARY = ("rope_quantize_fp8", "mla_rope_quantize_fp8")
LIBRARIES: Mapping[str, tuple[Callable[[str, Inputs, Options], Any], tuple[str, ...]]] = {
    "vllm": (vllm, (*GATED, *NORMS, "per_token_group_quant_fp8_packed", *MIXED)),
    # rows in use are honoured with the activation alone: without it v2 quantises every row, with the wrong strides
    "sgl": (sgl, ("per_token_group_quant_fp8", "per_token_group_quant_fp8_packed", "silu_and_mul_masked_post_quant")),
    "flashinfer": (flashinfer, ("rmsnorm_quant", "fused_add_rmsnorm_quant", *ROTARY)),
}


@functools.cache
def load() -> None:
    """The compiled operators that the environment names."""
    for variable in ("FP8_KERNELS_VLLM_C", "FP8_KERNELS_VLLM_STABLE", "FP8_KERNELS_SGL_OPS"):
        if path := os.environ.get(variable):
            torch.ops.load_library(path)


def sgl_operators() -> Any:
    """``torch.ops.sgl_kernel``, loaded."""
    load()
    return torch.ops.sgl_kernel


def subjects() -> list[Library]:
    """Every routine of every library."""
    load()
    return [
        Library(name, contract, functools.partial(call, contract))
        for name, (call, contracts) in LIBRARIES.items()
        for contract in contracts
    ]


def __getattr__(name: str) -> object:
    """``NAMED``, as of :mod:`hardware.libraries`."""
    if name == "NAMED":
        return named(subjects())
    raise AttributeError(name)
