"""Libraries that quantise to MX, NVFP4 and FP8, or lay out scales, on any GPU (most on a CPU too), as subjects.

    fp8-oracle verify --provider hardware.mx_libraries:subjects --arch sm90 ...     (with tests/ on PYTHONPATH)
    fp8-oracle verify --provider hardware.mx_libraries:on_cpu ...                   (without a GPU)

Their kernels for Blackwell's instructions do not run elsewhere; what runs is torchao's ``to_mx``, ``to_dtype`` and
``nvfp4_quantize`` (torch operations) and its Triton kernels, TransformerEngine's reference of NVFP4, DeepGEMM's packing
and FlashInfer's interleaving of scales. TransformerEngine's package loads a compiled library at import, so the files
that are needed are loaded by themselves, as is DeepGEMM's file of casts. Written for torchao 0.18, transformer-engine
2.20, sgl-deep-gemm 0.1.4, flashinfer 0.6.18.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from hardware import alone
from hardware.libraries import FP8, Inputs, Library, Options, Outputs, _module, _only, named
from torch import Tensor

MX, MOE = "torchao.prototype.mx_formats", "torchao.prototype.moe_training.kernels.mxfp8.quant"
BLOCK, NVFP4_BLOCK = 32, 16
CASTS = ("per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8")


def subjects() -> list[Library]:
    """Every library on a GPU."""
    found = [
        *_everywhere(),
        Library("torchao.triton", "mxfp8_dequantize", _torchao_triton_back),
        Library("torchao.triton", "to_blocked", _torchao_blocked),
        Library("torchao.triton", "swizzle_scale", _torchao_blocked),
        Library("torchao.triton", "swizzle_scale_experts", _torchao_rows),
        Library("torchao.triton", "to_blocked_k_groups", _torchao_columns),
        Library("deep_gemm.bare", "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor", _deep_gemm_packed),
        Library("flashinfer.interleave", "to_blocked", _flashinfer_blocked),
        Library("flashinfer.interleave", "swizzle_scale", _flashinfer_blocked),
        Library("flashinfer.interleave", "shuffle_matrix_sf_a", _flashinfer_shuffled),
    ]
    return found


def __getattr__(name: str) -> object:
    """``NAMED``, as of :mod:`hardware.libraries`."""
    if name == "NAMED":
        return named(subjects())
    raise AttributeError(name)


class OnCpu(Library):
    """A library that needs no GPU."""

    @property
    def arch(self) -> str:
        return "cpu"

    def why_not(self) -> str | None:
        return None


def on_cpu() -> list[Library]:
    """What needs no GPU."""
    return [OnCpu(s.name, s.contract, s.call, s.numerics, "cpu") for s in _everywhere()]


def _everywhere() -> list[Library]:
    found = [
        Library("torchao", "mxfp8_quantize", functools.partial(_to_mx, "")),
        Library("torchao", "mxfp4_quantize", functools.partial(_to_mx, "e2m1")),
        Library("torchao", "mxfp6_quantize", functools.partial(_to_mx, "")),
        Library("torchao", "mxfp8_dequantize", _torchao_back),
        Library("torchao", "mxfp4_dequantize", _torchao_back),
        Library("torchao", "mxfp6_dequantize", _torchao_back),
        Library("torchao", "nvfp4_quantize", _torchao_nvfp4, "torchao_nvfp4"),
        Library("torchao", "nvfp4_dequantize", _torchao_nvfp4_back),
        Library("torchao", "from_blocked", _torchao_unblocked),
        Library("deep_gemm.math", "per_token_cast_to_fp4", _deep_gemm_fp4),
        Library("deep_gemm.math", "cast_back_from_fp4", _deep_gemm_fp4_back),
        *(Library("deep_gemm.math", name, functools.partial(_deep_gemm_cast, name)) for name in CASTS),
        Library("deep_gemm.math", "ceil_to_ue8m0", _deep_gemm_powers),
        Library("deep_gemm.math", "transpose_packed_fp4", _deep_gemm_transposed),
        Library("torchao.torch", "to_blocked", _torchao_plain_blocked),
        Library("torchao.torch", "pad_token_groups", _torchao_padded),
        Library("torchao.torch", "unpad_token_groups", _torchao_unpadded),
        Library("transformer_engine", "hadamard_transform", _te_transform),
        Library("transformer_engine", "nvfp4_quantize", functools.partial(_te, 1), "te_nvfp4_reference"),
        Library("transformer_engine", "nvfp4_quantize_2d", functools.partial(_te, NVFP4_BLOCK)),
        Library("transformer_engine", "nvfp4_quantize_4over6", functools.partial(_te, 1)),
        Library("transformer_engine", "nvfp4_quantize_rht", functools.partial(_te, 1, rht=True), "te_nvfp4_reference"),
    ]
    return found


# --- torchao ----------------------------------------------------------------------------------------------------------


def _scale(scale: Tensor, options: Options) -> Tensor:
    """Scale bytes ``[M, C]`` in the layout asked for."""
    scale = scale.view(torch.uint8)
    _only(options["layout"] != "8x4", "tiles of 128x4 or none")
    return scale if options["layout"] == "linear" else _module(f"{MX}.utils").to_blocked(scale)


def _element(options: Options, packed: bool) -> object:
    constants, name = _module(f"{MX}.constants"), "e2m1" if packed else str(options["element"])
    return {
        "e4m3": FP8,
        "e5m2": torch.float8_e5m2,
        "e2m1": torch.float4_e2m1fn_x2,
        "e3m2": constants.DTYPE_FP6_E3M2,
        "e2m3": constants.DTYPE_FP6_E2M3,
    }[name]


def _to_mx(element: str, inputs: Inputs, options: Options) -> Outputs:
    tensor, mode = _module(f"{MX}.mx_tensor"), _module(f"{MX}.config").ScaleCalculationMode
    _only(inputs["x"].dtype != torch.float16, "bfloat16 or float32")
    _only(inputs["x"].shape[1] % int(str(options.get("alignment", 32))) == 0, "no columns behind the values")
    due = _element(options, element == "e2m1")
    _only(due in (FP8, torch.float8_e5m2) or bool(torch.isfinite(inputs["x"]).all()), "no NaN or infinity below 8 bits")
    scale, q = tensor.to_mx(inputs["x"].contiguous(), due, BLOCK, mode(str(options["rounding"])))
    return {
        "q": q.view(torch.uint8) if q.element_size() == 1 and due not in (FP8, torch.float8_e5m2) else q,
        "scale": _scale(scale, options),
    }


def _linear(inputs: Inputs, options: Options, packed: bool) -> Tensor:
    scale, (m, k) = inputs["scale"], inputs["q"].shape
    _only(options["layout"] != "8x4", "tiles of 128x4 or none")
    if options["layout"] == "128x4":
        scale = _module(f"{MX}.utils").from_blocked(scale, m, k * (1 + packed) // BLOCK)
    return scale.contiguous().view(torch.float8_e8m0fnu)


def _torchao_back(inputs: Inputs, options: Options) -> Tensor:
    q, packed = inputs["q"], inputs["q"].dtype is torch.uint8 and "element" not in options
    due = q.dtype if q.dtype is not torch.uint8 else _element(options, packed)
    scale = _linear(inputs, options, packed)
    made: Tensor = _module(f"{MX}.mx_tensor").to_dtype(q.contiguous(), scale, due, BLOCK, torch.float32)
    return made


def _torchao_nvfp4(inputs: Inputs, options: Options) -> Outputs:
    """Its scale of the tensor is ``amax/2688``, which multiplies the codes."""
    _only(options["is_global_scale_inversed"] and inputs["x"].dtype != torch.float16, "an inverse scale, no float16")
    _only(bool(torch.isfinite(inputs["x"]).all()), "no NaN or infinity")
    quantise = _module(f"{MX}.nvfp4_tensor").nvfp4_quantize
    scale, q = quantise(inputs["x"].contiguous(), NVFP4_BLOCK, inputs["global_scale"])
    return {"q": q.view(torch.uint8), "scale": _scale(scale, options)}


def _torchao_nvfp4_back(inputs: Inputs, options: Options) -> Tensor:
    q, scale = inputs["q"].contiguous(), inputs["scale"].contiguous().view(FP8)
    _only(options["layout"] != "8x4", "tiles of 128x4 or none")
    tensor = _module(f"{MX}.nvfp4_tensor").NVFP4Tensor(
        q,
        scale,
        NVFP4_BLOCK,
        torch.float32,
        inputs["global_scale"].reshape(()),
        is_swizzled_scales=options["layout"] == "128x4",
    )
    made: Tensor = tensor.dequantize(torch.float32)
    return made


def _torchao_triton_back(inputs: Inputs, options: Options) -> Tensor:
    _only(inputs["q"].dtype == FP8, "E4M3")
    due: Tensor = _module(f"{MX}.kernels").triton_mxfp8_dequant_dim0(
        inputs["q"].contiguous(), _linear(inputs, options, False).view(torch.uint8), torch.float32, BLOCK
    )
    return due


def _bytes(inputs: Inputs) -> Tensor:
    return inputs["scale"].contiguous().view(torch.uint8)


def _torchao_blocked(inputs: Inputs, options: Options) -> Tensor:
    """A batch by the kernel for the scales of 3-D weights."""
    scale, kernels = _bytes(inputs), _module(f"{MX}.kernels")
    _only(options.get("tile", "128x4") == "128x4", "tiles of 128x4")
    made: Tensor = (
        kernels.triton_mx_block_rearrange(scale).flatten()
        if scale.dim() == 2
        else _module(MOE).triton_mx_block_rearrange_per_group_3d(scale).flatten(1)
    )
    return made.view(inputs["scale"].dtype)


def _torchao_plain_blocked(inputs: Inputs, options: Options) -> Tensor:
    scale = _bytes(inputs)
    _only(scale.dim() == 2, "one matrix")
    made: Tensor = _module(f"{MX}.utils").to_blocked(scale)
    return made.view(inputs["scale"].dtype)


def _torchao_unblocked(inputs: Inputs, options: Options) -> Tensor:
    memory = inputs["memory"]
    _only(memory.dim() == 1 and options["tile"] == "128x4", "one matrix, tiles of 128x4")
    made: Tensor = _module(f"{MX}.utils").from_blocked(memory.view(torch.uint8), options["rows"], options["columns"])
    return made.contiguous().view(memory.dtype)


def _torchao_rows(inputs: Inputs, options: Options) -> Tensor:
    """Groups one after another, by their last rows; its buffer is longer than the tiles."""
    first, rows = inputs["first"].tolist(), inputs["rows"].tolist()
    ends = [begin + count for begin, count in zip(first, rows, strict=True)]
    _only(options["placement"] == "tight" and first == [0, *ends[:-1]], "groups side by side, tiles side by side")
    scale = _bytes(inputs)
    made: Tensor = _module(MOE).triton_mx_block_rearrange_2d_M_groups(
        scale, torch.tensor(ends, dtype=torch.int32, device=scale.device)
    )
    used = (scale.shape[0] + 127 * len(rows)) // 128 * 128 * (-(-scale.shape[1] // 4) * 4)
    return made.flatten()[:used].view(inputs["scale"].dtype)


def _torchao_columns(inputs: Inputs, options: Options) -> Tensor:
    made: Tensor = _module(MOE).triton_mx_block_rearrange_2d_K_groups(_bytes(inputs), inputs["ends"].to(torch.int32))
    return made.flatten().view(inputs["scale"].dtype)


def _torchao_padded(inputs: Inputs, options: Options) -> Outputs:
    """Its plain function, which refuses rows of no group."""
    x, ends = inputs["x"], inputs["group_end_offsets"]
    _only(int(ends[-1]) == x.shape[0], "every row in a group")
    made = _module(MOE).torch_pad_token_groups(x, ends, int(str(options["alignment_size"])))
    return dict(zip(("out", "starts", "ends"), made, strict=True))


def _torchao_unpadded(inputs: Inputs, options: Options) -> Tensor:
    numbers = (int(str(options[name])) for name in ("num_tokens", "alignment_size"))
    made: Tensor = _module(MOE).torch_unpad_token_groups(
        inputs["padded"], inputs["group_end_offsets"], inputs["padded_group_start_offsets"], *numbers
    )
    return made


# --- DeepGEMM, FlashInfer ---------------------------------------------------------------------------------------------


def _deep_gemm_packed(inputs: Inputs, options: Options) -> Tensor:
    ks, scale = inputs["ks"], inputs["scale"]
    _only(scale.shape[1] % 4 == 0, "MN a multiple of 4")
    made: Tensor = _module("deep_gemm.utils.layout").get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        scale.contiguous(), ks.to(torch.int32), ks.tolist(), int(str(options["gran_k"]))
    )
    return made


def _flashinfer_blocked(inputs: Inputs, options: Options) -> Tensor:
    scale = _bytes(inputs)
    _only(options.get("tile", "128x4") == "128x4", "tiles of 128x4")
    made: Tensor = _module("flashinfer").block_scale_interleave(scale).view(torch.uint8)
    return made.reshape(-1 if scale.dim() == 2 else (scale.shape[0], -1)).view(inputs["scale"].dtype)


def _deep_gemm_fp4(inputs: Inputs, options: Options) -> Outputs:
    cast = alone.file("deep_gemm", "utils/math").per_token_cast_to_fp4
    wanted = {name: options[name] for name in ("use_ue8m0", "gran_k", "use_packed_ue8m0") if name in options}
    q, scale = cast(inputs["x"], **wanted)
    return {"q": q.view(torch.uint8), "scale": scale}


def _deep_gemm_fp4_back(inputs: Inputs, options: Options) -> Tensor:
    cast = alone.file("deep_gemm", "utils/math").cast_back_from_fp4
    made: Tensor = cast(inputs["q"].view(torch.int8), inputs["scale"], int(str(options["gran_k"])))
    return made


def _deep_gemm_cast(name: str, inputs: Inputs, options: Options) -> Outputs:
    _only(options.get("block_size", (128, 128)) == (128, 128), "blocks of 128x128")
    group = (options["group"],) if "group" in options else ()
    q, scale = getattr(alone.file("deep_gemm", "utils/math"), name)(inputs["x"], bool(options["use_ue8m0"]), *group)
    return {"q": q, "scale": scale}


def _deep_gemm_powers(inputs: Inputs, options: Options) -> Tensor:
    made: Tensor = alone.file("deep_gemm", "utils/math").ceil_to_ue8m0(inputs["x"])
    return made


def _deep_gemm_transposed(inputs: Inputs, options: Options) -> Tensor:
    made: Tensor = alone.file("deep_gemm", "utils/math").transpose_packed_fp4(inputs["q"])
    return made


def _flashinfer_shuffled(inputs: Inputs, options: Options) -> Tensor:
    tile = int(str(options.get("epilogue_tile_m", 128)))
    made: Tensor = _module("flashinfer").shuffle_matrix_sf_a(_bytes(inputs), tile).view(torch.uint8).flatten()
    return made.view(inputs["scale"].dtype)


# --- TransformerEngine: three of its files ----------------------------------------------------------------------------


@functools.cache
def _te_quantiser() -> ModuleType:
    return alone.module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")


def _te_transform(inputs: Inputs, options: Options) -> Tensor:
    _only(options.get("sign_mask", 55272) == 55272 and inputs["x"].dtype == torch.bfloat16, "its own signs")
    library = _te_quantiser()
    quantiser = library.NVFP4QuantizerRef(library.reference_utils.Fp4Formats.E2M1, with_rht=True)
    made: Tensor = quantiser._apply_rht(inputs["x"])
    return made


def _amax_of(scale: Tensor, top: float = 2688.0) -> Tensor:
    """The float32 amax whose ``top/amax`` is this scale; a scale that none gives is not offered."""
    near = (top / scale.double()).float()
    tried = torch.cat([near, torch.nextafter(near, near * 2), torch.nextafter(near, near * 0)])
    found = tried[torch.full_like(tried, top) / tried == scale]
    _only(found.numel(), f"a scale of {top:g}/amax")
    return found[:1]


def _te(rows: int, inputs: Inputs, options: Options, *, rht: bool = False) -> Outputs:
    _only(not options.get("is_global_scale_inversed"), "the scale that divides")
    _only(bool(torch.isfinite(inputs["x"]).all()), "no NaN or infinity")
    library, x = _te_quantiser(), inputs["x"].contiguous()
    quantiser = library.NVFP4QuantizerRef
    largest, more = int(str(options.get("e4m3_max", 448))), {}
    if "error" in options:
        error = str(options["error"]).upper()
        more = {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": error, "nvfp4_e4m3_max": largest}
    if rht:
        x = _te_transform(inputs, options)
    amax = _amax_of(inputs["global_scale"], 6.0 * largest)
    q, scale = quantiser._quantize_blockwise_reference(x, amax, NVFP4_BLOCK, rows, pow_2_scales=False, eps=0.0, **more)
    return {"q": q, "scale": _scale(scale, options)}
