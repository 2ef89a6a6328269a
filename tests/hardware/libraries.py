"""GPU libraries called without the dispatch layer, as subjects: calls it never makes, and wrong ones they accept.

    fp8-oracle verify --provider hardware.libraries:subjects --arch sm90 ...        (with tests/ on PYTHONPATH)

The layer's own backends are subjects already. Here are: the layer on DeepGEMM's second distribution (the one inside
vLLM), both distributions bare with their layout helpers, torch's unpromoted accumulation, FlashInfer's quantiser and
row orders by themselves, and, as ``LIBRARY.wrong.FAULT``, calls that a library takes and answers with wrong numbers.
Not covered: whether a library is there (a missing one is UNSUPPORTED with its own words).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels import subjects as layer
from kernels.backends import cutlass, deep_gemm, flashinfer
from kernels.backends._host import lane_major
from oracle.harness.concurrency import Made, run_concurrently

Inputs = Mapping[str, Tensor]
Options = Mapping[str, object]
Outputs = Tensor | dict[str, Tensor]
FP8 = torch.float8_e4m3fn
WRONG = "wrong"
SECOND = deep_gemm.IMPORT_NAMES[1]


@dataclass(frozen=True)
class Library:
    """One bare call; see ``oracle.harness.subjects.Subject``."""

    name: str
    contract: str
    call: Callable[[Inputs, Options], Outputs]
    numerics: str | None = None
    device: str = "cuda"

    @property
    def arch(self) -> str:
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        return f"sm{major}{minor}" if major else "cuda"

    def why_not(self) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device"

    def run(self, inputs: Inputs, options: Options) -> Outputs:
        return self.call(inputs, options)


def subjects() -> list[Library]:
    """Every bare call."""
    promoted, chain = "sm90.promote128", "sm90.chain"
    found = [
        Library("torch.fast", "torch_per_tensor_w8a8_scaled_mm", _torch_fast, chain),
        Library("torch.fast", "torch_per_token_w8a8_scaled_mm", _torch_fast, f"{chain}.row_then_col"),
        Library("flashinfer.internal", "flashinfer_quantize_1x128", _flashinfer_quantiser),
        Library("flashinfer.helpers", "reorder_rows_for_gated_act_gemm", _rows("reorder_rows_for_gated_act_gemm")),
        Library("flashinfer.helpers", "shuffle_matrix_a", _rows("shuffle_matrix_a")),
        Library("vllm.ops", "scaled_fp8_quant", _vllm_quantiser),
        Library(f"vllm.{WRONG}.row_major_scale", "cutlass_scaled_mm", _vllm_row_major, promoted),
        Library(f"vllm.{WRONG}.row_pitch", "cutlass_scaled_mm", _vllm_pitch, chain),
        Library("deep_gemm.bare", "transform_sf_into_required_layout", _transformed),
        Library(f"deep_gemm.{WRONG}.unaligned_rows", "fp8_m_grouped_gemm_nt_masked", _deep_gemm_masked, promoted),
    ]
    for name in deep_gemm.IMPORT_NAMES:
        bare = functools.partial(_deep_gemm, name)
        layouts = "get_col_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor"
        found += [Library(f"{name}.bare", "fp8_gemm_nt", bare, promoted)]
        found += [Library(f"{name}.bare", contract, functools.partial(_layout, name, contract)) for contract in layouts]
    found += [
        Library(SECOND, s.contract, functools.partial(_second, s), s.numerics)
        for s in layer.subjects()
        if s.name == "deep_gemm" and s.device == "cuda"
    ]
    faults = {
        "row_major_scale": _flashinfer_row_major,
        "unpadded_scale": _flashinfer_unpadded,
        "fp16_out": _flashinfer_fp16,
        "per_token_weight_scale": _flashinfer_weight_scale,
        "bf16_weight_amax": _flashinfer_bf16,
        "row_pitch": _flashinfer_pitch,
        "threads": _flashinfer_threads,
    }
    found += [
        Library(f"flashinfer.{WRONG}.{fault}", "fp8_blockscale_gemm_sm90", call, promoted)
        for fault, call in faults.items()
    ]
    return found


def named(found: Iterable[Library | layer.Subject]) -> SimpleNamespace:
    """``NAME.CONTRACT`` of subjects as functions of inputs and options; a point in a name becomes ``_``."""
    made: dict[str, dict[str, object]] = {}
    for one in found:
        made.setdefault(one.name.replace(".", "_"), {})[one.contract] = one.run
    return SimpleNamespace(**{name: SimpleNamespace(**calls) for name, calls in made.items()})


def __getattr__(name: str) -> object:
    """``NAMED``, which ``validate hardware.libraries:NAMED.deep_gemm_bare.fp8_gemm_nt`` reads; ``LAYER``: the layer's
    own, each held to the backend that names it."""
    if name == "NAMED":
        return named(subjects())
    if name == "LAYER":
        return named(layer.subjects())
    raise AttributeError(name)


def _only(wanted: bool, why: str) -> None:
    """A case that says nothing about the call is not offered."""
    if not wanted:
        raise NotImplementedError(why)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"{name}: {error}") from error


# --- right calls ------------------------------------------------------------------------------------------------------


def _second(subject: layer.Subject, inputs: Inputs, options: Options) -> layer.Outputs:
    """A routine of the layer on the second distribution: other releases name and shape some arguments otherwise."""
    _module(SECOND)
    caches = (deep_gemm.library, deep_gemm.symbol, deep_gemm.takes_2d_lens)
    names, deep_gemm.IMPORT_NAMES = deep_gemm.IMPORT_NAMES, (SECOND,)
    for cache in caches:
        cache.cache_clear()
    try:
        return subject.run(inputs, options)
    finally:
        deep_gemm.IMPORT_NAMES = names
        for cache in caches:
            cache.cache_clear()


def _deep_gemm(name: str, inputs: Inputs, options: Options) -> Tensor:
    a, b = inputs["a"], inputs["b"]
    whole = a.shape[1] % 128 == 0 and b.shape[0] % 64 == 0 and "c" not in inputs
    _only(options.get("out_dtype") == torch.bfloat16 and whole, "bf16 out, K % 128 == 0, N % 64 == 0, no c")
    _only(a.dtype == b.dtype == FP8, "E4M3 operands")
    out = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=torch.bfloat16, device=a.device)
    call = _module(name).fp8_gemm_nt
    call((a, inputs["a_scale"]), (b, inputs["b_scale"]), out, disable_ue8m0_cast=True)
    return out


def _layout(name: str, contract: str, inputs: Inputs, options: Options) -> Tensor:
    library, utils = _module(name), _module(f"{name}.utils")
    names = {
        "get_col_major_tma_aligned_tensor": ("get_mn_major_tma_aligned_tensor", contract),
        "get_mn_major_tma_aligned_packed_ue8m0_tensor": (contract,),
    }[contract]
    found = [f for n in names for place in (library, utils) if (f := getattr(place, n, None)) is not None]
    _only(bool(found), f"this release has no {' or '.join(names)}")
    made: Tensor = found[0](inputs["scale"])
    return made


def _transformed(inputs: Inputs, options: Options) -> Tensor:
    """The two recipes of sm90."""
    wanted = {name: options[name] for name in ("mn", "k", "gran_mn", "gran_k", "target")}
    _only((wanted.pop("target"), wanted.pop("gran_k")) == ("sm90", 128), "sm90's layouts of scales of 128 columns")
    scale, of_rows = inputs["scale"], wanted.pop("gran_mn") == 1
    groups = scale.shape[0] if scale.dim() == 3 else None
    call = _module("deep_gemm").transform_sf_into_required_layout
    made: Tensor = call(scale, recipe=(1, 128, 128), num_groups=groups, is_sfa=of_rows, **wanted)
    return made


def _torch_fast(inputs: Inputs, options: Options) -> Tensor:
    _only(inputs.get("bias") is None, "the products without a bias")
    a, b = inputs["qinput"], inputs["weight"]
    _only(a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, "K and N in multiples of 16")
    scale_b = inputs["scale_b"].reshape(1, -1) if inputs["scale_b"].numel() > 1 else inputs["scale_b"]
    columns = b if b.stride(0) == 1 else b.t().contiguous().t()
    dtype = options["out_dtype"]
    assert isinstance(dtype, torch.dtype)
    return torch._scaled_mm(a, columns, inputs["scale_a"], scale_b, out_dtype=dtype, use_fast_accum=True)


def _flashinfer_quantiser(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    x = inputs["x"]
    m, k = x.shape
    _only(x.dtype == torch.bfloat16 and k % 128 == 0 and x.is_contiguous(), "dense bf16, K % 128 == 0")
    runner: Any = _module("flashinfer.gemm.gemm_base").get_fp8_blockscale_gemm_runner_sm90()
    lead = m + (-m % 4)
    q, scale = torch.empty(m, k, dtype=FP8, device=x.device), torch.zeros(k // 128, lead, device=x.device)
    runner.fp8_quantize_1x128(x, q, scale, False)
    return {"q": q, "scale": scale}


def _rows(name: str) -> Callable[[Inputs, Options], Tensor]:
    def run(inputs: Inputs, options: Options) -> Tensor:
        (x,) = inputs.values()
        _only(x.dim() == 2, "one matrix")
        tile = (128,) if name == "shuffle_matrix_a" else ()  # the tile that TensorRT-LLM's MoE kernels have
        made: Tensor = getattr(_module("flashinfer"), name)(x.view(torch.uint8), *tile)
        return made.view(x.dtype)

    return run


def _vllm_quantiser(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    ops, x = _vllm(), inputs["x"]
    token, scale_ub = bool(options.get("use_per_token_if_dynamic")), inputs.get("scale_ub")
    q = torch.empty(x.shape, dtype=FP8, device=x.device)
    names = {"static": "static_scaled_fp8_quant", "tensor": "dynamic_scaled_fp8_quant"}
    kind = "static" if "scale" in inputs else "token" if token else "tensor"
    name = names.get(kind, "dynamic_per_token_scaled_fp8_quant")
    _only(hasattr(ops, name), f"{name} is not in the loaded libraries")
    scale = inputs["scale"] if kind == "static" else torch.empty((x.shape[0], 1) if token else (1,), device=x.device)
    getattr(ops, name)(q, x, scale, *([scale_ub] if kind == "token" else []))
    return {"q": q, "scale": scale}


def _vllm() -> Any:
    try:
        return cutlass.operators()
    except ImportError as error:
        raise NotImplementedError(str(error)) from error


# --- calls that are taken and answered wrongly --------------------------------------------------------------------


def _vllm_row_major(inputs: Inputs, options: Options) -> Tensor:
    a, b, a_scale, b_scale = (inputs[n] for n in ("a", "b", "a_scale", "b_scale"))
    m, k = a.shape
    blocks = tuple(a_scale.shape) == (m, -(-k // 128)) and a_scale.shape[1] > 1 and m > 1
    _only(blocks and k % 128 == 0 and b.shape[0] % 128 == 0, "block scales of several rows, N and K % 128 == 0")
    _only(options.get("out_dtype") == torch.bfloat16 and inputs.get("bias") is None, "bf16 out, no bias")
    _only(a.dtype == b.dtype == FP8, "E4M3 operands")
    lead = m + (-m % 4)
    left, scale = a.new_zeros(lead, k), a_scale.new_ones(lead, a_scale.shape[1])
    left[:m], scale[:m] = a, a_scale
    out = torch.empty(lead, b.shape[0], dtype=torch.bfloat16, device=a.device)
    _vllm().cutlass_scaled_mm(out, left, b.contiguous().t(), scale, b_scale.contiguous().t(), None)
    return out[:m]


def _vllm_pitch(inputs: Inputs, options: Options) -> Tensor:
    a, b, a_scale, b_scale = (inputs[n] for n in ("a", "b", "a_scale", "b_scale"))
    _only(a_scale.numel() == b_scale.numel() == 1 and a.shape[0] > 1, "one scale each, several rows")
    _only(options.get("out_dtype") == torch.bfloat16 and inputs.get("bias") is None, "bf16 out, no bias")
    _only(a.dtype == b.dtype == FP8 and a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0, "E4M3, K and N % 16 == 0")
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    _vllm().cutlass_scaled_mm(out, _pitched(a), b.contiguous().t(), a_scale, b_scale, None)
    return out


def _deep_gemm_masked(inputs: Inputs, options: Options) -> Tensor:
    a, b, rows = inputs["a"], inputs["b"], inputs["masked_m"]
    _only(a.dtype == b.dtype == FP8 and a.shape[0] > 1 and a.shape[1] % 64 != 0, "E4M3, several groups, M % 64 != 0")
    _only(options.get("out_dtype") == torch.bfloat16, "bf16 out")
    out = torch.zeros(a.shape[0], a.shape[1], b.shape[1], dtype=torch.bfloat16, device=a.device)
    call = _module("deep_gemm").fp8_m_grouped_gemm_nt_masked
    call((a, inputs["a_scale"]), (b, inputs["b_scale"]), out, rows.to(torch.int32), a.shape[1], disable_ue8m0_cast=True)
    return out


def _flashinfer() -> Callable[..., Tensor]:
    _module("flashinfer")
    call: Callable[..., Tensor] = flashinfer.library("flashinfer.gemm").fp8_blockscale_gemm_sm90
    return call


def _both_fp8(inputs: Inputs, options: Options, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    _only(options.get("out_dtype") == dtype, f"{dtype} out")
    _only("input_scale" in inputs and inputs["weight"].shape[0] % 64 == 0, "fp8 and fp8, N % 64 == 0")
    n, k = inputs["weight"].shape
    _only(k % 128 == 0 and inputs["weight_scale"].shape[0] == -(-n // 128), "weight scales of blocks, K % 128 == 0")
    return tuple(inputs[name] for name in ("input", "weight", "input_scale", "weight_scale"))


def _flashinfer_row_major(inputs: Inputs, options: Options) -> Tensor:
    x, weight, scale, weight_scale = _both_fp8(inputs, options)
    _only(x.shape[0] % 4 == 0 and min(scale.shape) > 1, "M % 4 == 0, more than one scale along each axis")
    return _flashinfer()(x, weight, scale.contiguous(), weight_scale)


def _flashinfer_unpadded(inputs: Inputs, options: Options) -> Tensor:
    x, weight, scale, weight_scale = _both_fp8(inputs, options)
    _only(x.shape[0] % 4 != 0 and scale.shape[1] > 1, "M % 4 != 0, several K blocks")
    return _flashinfer()(x, weight, scale.t().contiguous(), weight_scale)


def _flashinfer_pitch(inputs: Inputs, options: Options) -> Tensor:
    x, weight, scale, weight_scale = _both_fp8(inputs, options)
    _only(x.shape[0] > 1, "several rows")
    return _flashinfer()(_pitched(x), weight, lane_major(scale), weight_scale)


def _flashinfer_threads(inputs: Inputs, options: Options) -> Tensor:
    """Beside threads that multiply the same rows in reverse: all calls share the runner, and the runner a workspace."""
    x, weight, weight_scale = inputs["input"], inputs["weight"], inputs.get("weight_scale")
    blocks = weight_scale is not None and weight_scale.shape[0] == -(-weight.shape[0] // 128)
    _only(x.dtype == torch.bfloat16 and blocks and weight.shape[0] % 64 == 0, "bf16 and fp8, scales of blocks")
    _only(options.get("out_dtype") == torch.bfloat16 and x.shape[0] > 1, "bf16 out, several rows")
    call, turned = _flashinfer(), x.flip(0)
    mine, other = (lambda x=x: Made({"out": call(x, weight, None, weight_scale)}) for x in (x, turned))
    outputs, _, turned_one = run_concurrently(mine, other, x.device.type)
    return outputs["out"].flip(0) if turned_one else outputs["out"]


def _pitched(x: Tensor) -> Tensor:
    """``x`` with 16 zeros behind every row."""
    wide = x.new_zeros(x.shape[0], x.shape[1] + 16)[:, : x.shape[1]]
    return wide.copy_(x)


def _flashinfer_fp16(inputs: Inputs, options: Options) -> Tensor:
    x, weight, scale, weight_scale = _both_fp8(inputs, options, torch.float16)
    return _flashinfer()(x, weight, lane_major(scale), weight_scale, out_dtype=torch.float16)


def _flashinfer_weight_scale(inputs: Inputs, options: Options) -> Tensor:
    x, weight, weight_scale = inputs["input"], inputs["weight"], inputs.get("weight_scale")
    rows = weight_scale is not None and weight_scale.shape[0] == weight.shape[0] > 1
    _only(rows and weight.shape[0] % 64 == 0 and options.get("out_dtype") == torch.bfloat16, "a scale per weight row")
    scale = lane_major(inputs["input_scale"]) if "input_scale" in inputs else None
    return _flashinfer()(x, weight, scale, weight_scale)


def _flashinfer_bf16(inputs: Inputs, options: Options) -> Tensor:
    x, weight = inputs["input"], inputs["weight"]
    _only(weight.dtype == torch.bfloat16 and weight.shape[0] % 64 == 0, "bf16 and bf16, N % 64 == 0")
    return _flashinfer()(x, weight)
