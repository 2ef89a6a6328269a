"""Peers' references in torch and numpy, each under a contract, put together from several of their functions: no binding
of one call states them. They need no GPU; ``tests/harness/test_peer_references.py`` validates them.

A peer that gives formats and casts alone (ml_dtypes, gfloat) is given the formula of its contract in numpy, and casts,
decodes and scales by its own functions. Written for nvidia-modelopt 0.47, compressed-tensors 0.20, ml_dtypes 0.6 and
gfloat 0.5.2. Not covered: what packs, moves or multiplies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracle.routines.mx.contract import pack, unpack

Reals = NDArray[Any]
Inputs, Options, Outputs = Mapping[str, Tensor], Mapping[str, object], Tensor | dict[str, Tensor]
FP8, BLOCK, NVFP4_BLOCK = torch.float8_e4m3fn, 32, 16
MX = "torchao.prototype.mx_formats"


@dataclass(frozen=True)
class Library:
    """A routine of a peer."""

    name: str
    contract: str
    run: Callable[[Inputs, Options], Outputs]
    numerics: str | None = None


def by_contract(kernel: Callable[..., Any], inputs: Inputs, options: Options) -> Any:
    """The adapter: they take inputs and options by the contract's names."""
    return kernel(inputs, options)


def _only(wanted: bool, why: str) -> None:
    """A case that says nothing about the call is not offered."""
    if not wanted:
        raise NotImplementedError(why)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"{name}: {error}") from error


def _scale(scale: Tensor, options: Options) -> Tensor:
    """Scale bytes ``[M, C]`` in the layout asked for."""
    scale = scale.view(torch.uint8)
    _only(options["layout"] != "8x4", "tiles of 128x4 or none")
    return scale if options["layout"] == "linear" else _module(f"{MX}.utils").to_blocked(scale)


def _linear(inputs: Inputs, options: Options, packed: bool) -> Tensor:
    scale, (m, k) = inputs["scale"], inputs["q"].shape
    _only(options["layout"] != "8x4", "tiles of 128x4 or none")
    if options["layout"] == "128x4":
        scale = _module(f"{MX}.utils").from_blocked(scale, m, k * (1 + packed) // BLOCK)
    return scale.contiguous().view(torch.float8_e8m0fnu)


def subjects() -> list[Library]:
    """Every peer's routine."""
    found = [
        Library("modelopt", "mxfp8_quantize", _modelopt_eight, "modelopt_mxfp8"),
        Library("modelopt", "mxfp4_quantize", _modelopt_four, "modelopt_mxfp4"),
        Library("modelopt", "nvfp4_quantize", _modelopt_two, "modelopt_0_47_nvfp4"),
        Library("modelopt", "mxfp8_dequantize", _modelopt_eight_back),
        Library("modelopt", "mxfp4_dequantize", _modelopt_four_back),
        Library("modelopt", "nvfp4_dequantize", _modelopt_two_back),
        Library("compressed_tensors", "mxfp4_quantize", _compressed_four, "compressed_tensors_mxfp4"),
        Library("compressed_tensors", "mxfp4_dequantize", _compressed_four_back),
        Library("compressed_tensors", "scaled_fp8_quant", _compressed_static, "torch_static"),
        Library("ml_dtypes", "convert_fp8", _ml_converted),
        *(Library("ml_dtypes", f"mxfp{bits}_dequantize", _ml_back) for bits in (8, 6, 4)),
        Library("ml_dtypes", "nvfp4_dequantize", _ml_two_levels),
        *(Library("gfloat", f"mxfp{bits}_quantize", _gfloat) for bits in (8, 6, 4)),
        *(Library("gfloat", f"mxfp{bits}_dequantize", _gfloat_back) for bits in (8, 6, 4)),
    ]
    return found


def __getattr__(name: str) -> object:
    """``NAMED``, which ``validate tests.support.peer_references:NAMED.gfloat.mxfp8_quantize`` reads."""
    if name != "NAMED":
        raise AttributeError(name)
    calls: dict[str, dict[str, object]] = {}
    for one in subjects():
        calls.setdefault(one.name, {})[one.contract] = one.run
    return SimpleNamespace(**{peer: SimpleNamespace(**own) for peer, own in calls.items()})


# --- Model-Optimizer --------------------------------------------------------------------------------------------------


def _tensors() -> Any:
    return _module("modelopt.torch.quantization.qtensor")


def _finite(x: Tensor) -> Tensor:
    _only(bool(torch.isfinite(x).all()), "no NaN or infinity, of which it documents nothing")
    return x.contiguous()


def _unpadded(inputs: Inputs, options: Options) -> Tensor:
    _only(inputs["x"].shape[1] % int(str(options.get("alignment", 32))) == 0, "no columns behind the values")
    return _finite(inputs["x"])


def _modelopt_eight(inputs: Inputs, options: Options) -> Outputs:
    _only(options["element"] == "e4m3" and options["rounding"] == "rceil", "E4M3, scales rounded up")
    made, scale = _tensors().MXFP8QTensor.quantize(_unpadded(inputs, options))
    return {"q": made._quantized_data, "scale": _scale(scale, options)}


def _modelopt_four(inputs: Inputs, options: Options) -> Outputs:
    _only(options["rounding"] == "rceil", "scales rounded up")
    x = _unpadded(inputs, options)
    made, scale = _tensors().MXFP4QTensor.quantize(x, BLOCK)
    return {"q": made._quantized_data, "scale": _scale(scale.reshape(len(x), -1), options)}


def _modelopt_two(inputs: Inputs, options: Options) -> Outputs:
    _only(bool(options["is_global_scale_inversed"]) and inputs["global_scale"].numel() == 1, "one scale, inverse")
    x, cast = _finite(inputs["x"]), _tensors().NVFP4QTensor
    made, scale, _ = cast.quantize(x, NVFP4_BLOCK, weights_scaling_factor_2=inputs["global_scale"].reshape(()))
    return {"q": made._quantized_data, "scale": _scale(scale, options)}


def _modelopt_eight_back(inputs: Inputs, options: Options) -> Tensor:
    _only(inputs["q"].dtype == FP8, "E4M3")
    q, scale = inputs["q"].contiguous(), _linear(inputs, options, False).view(torch.uint8)
    made: Tensor = _tensors().MXFP8QTensor(q.shape, torch.float32, q).dequantize(torch.float32, scale=scale)
    return made


def _modelopt_four_back(inputs: Inputs, options: Options) -> Tensor:
    q, scale = inputs["q"].contiguous(), _linear(inputs, options, True).view(torch.uint8)
    shape, how = torch.Size((len(q), 2 * q.shape[1])), {"scale": scale, "block_sizes": {-1: BLOCK}}
    made: Tensor = _tensors().MXFP4QTensor(shape, torch.float32, q).dequantize(torch.float32, **how)
    return made


def _modelopt_two_back(inputs: Inputs, options: Options) -> Tensor:
    _only(options["layout"] == "linear", "linear scales")
    q, scale = inputs["q"].contiguous(), inputs["scale"].contiguous().view(FP8)
    shape, how = torch.Size((len(q), 2 * q.shape[1])), {"scale": scale, "block_sizes": {-1: NVFP4_BLOCK}}
    tensor = _tensors().NVFP4QTensor(shape, torch.float32, q)
    made: Tensor = tensor.dequantize(torch.float32, double_scale=inputs["global_scale"], **how)
    return made


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _compressed() -> Any:
    return _module("compressed_tensors.quantization")


def _arguments(bits: int, **more: object) -> Any:
    return _compressed().QuantizationArgs(num_bits=bits, type="float", symmetric=True, **more)


def _compressed_four(inputs: Inputs, options: Options) -> Outputs:
    _only(options["rounding"] == "even" and inputs["x"].dtype != torch.float16, "scales of the rounded amax")
    x, utils = _unpadded(inputs, options), _module("compressed_tensors.quantization.utils")
    given = _arguments(4, strategy="group", group_size=BLOCK, scale_dtype=torch.uint8, zp_dtype=torch.uint8)
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale, zero = utils.calculate_qparams(blocks.amin(dim=-1), blocks.amax(dim=-1), given)
    q = _module("compressed_tensors.quantization.lifecycle.forward").quantize(x, scale, zero, given)
    byte = _module("compressed_tensors.compressors.mx_utils").compress_mx_scale(scale, torch.uint8)
    codes = _module("compressed_tensors.compressors.nvfp4.helpers").pack_fp4_to_uint8(q)
    return {"q": codes, "scale": _scale(byte, options)}


def _compressed_four_back(inputs: Inputs, options: Options) -> Tensor:
    q, scale = inputs["q"].contiguous(), _linear(inputs, options, True).view(torch.uint8)
    given = _arguments(4, strategy="group", group_size=BLOCK, scale_dtype=torch.uint8)
    unpacked = _module("compressed_tensors.compressors.nvfp4.helpers").unpack_fp4_from_uint8
    values = unpacked(q, len(q), 2 * q.shape[1], dtype=torch.float32)
    factor = _module("compressed_tensors.compressors.mx_utils").decompress_mx_scale(scale).float()
    back = _module("compressed_tensors.quantization.lifecycle.forward").dequantize
    made: Tensor = back(values, factor, args=given, dtype=torch.float32)
    return made


def _compressed_static(inputs: Inputs, options: Options) -> Outputs:
    _only("scale" in inputs and not options.get("num_token_padding"), "a given scale, no more rows")
    _only(inputs["x"].dtype == torch.float32, "float32: other values are divided in their own dtype")
    given = _arguments(8, strategy="tensor")
    cast = _module("compressed_tensors.quantization.lifecycle.forward").quantize
    scale = inputs["scale"].reshape(1)
    return {"q": cast(_finite(inputs["x"]), scale, None, given, dtype=FP8), "scale": inputs["scale"]}


# --- ml_dtypes --------------------------------------------------------------------------------------------------------


def _values(raw: Tensor, dtype: str) -> Reals:
    """Float32 values of bytes of one code each."""
    made: Reals = raw.view(torch.uint8).numpy().view(getattr(_module("ml_dtypes"), dtype)).astype(np.float32)
    return made


def _ml_converted(inputs: Inputs, options: Options) -> Tensor:
    src, scale = inputs["src"].contiguous(), np.float32(options["scale"])
    if src.dtype == FP8:
        back = torch.from_numpy(_values(src, "float8_e4m3fn") * scale)
        return back.to(options["out_dtype"])  # type: ignore[call-overload, no-any-return]
    with np.errstate(over="ignore"):
        quotient = np.clip(src.float().numpy() / scale, np.float32(-448), np.float32(448))
    return torch.from_numpy(quotient.astype(_module("ml_dtypes").float8_e4m3fn).view(np.uint8)).view(FP8)


NAMES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn"}


def _element(inputs: Inputs, options: Options) -> tuple[str, Tensor]:
    """The element format, as OCP names it, and one code a byte."""
    q = inputs["q"].contiguous()
    if q.dtype != torch.uint8:
        return ("e4m3" if q.dtype == FP8 else "e5m2"), q
    return (str(options["element"]), q) if "element" in options else ("e2m1", unpack(q))


def _scaled(values: Callable[[Tensor, str], Reals], inputs: Inputs, options: Options) -> Tensor:
    """Each code times the power of two of its block, rounded to float32 once."""
    name, codes = _element(inputs, options)
    scale = values(_linear(inputs, options, name == "e2m1"), "e8m0").astype(np.float64)
    wide = values(codes, name).astype(np.float64) * scale.repeat(BLOCK, axis=1)[:, : codes.shape[1]]
    with np.errstate(over="ignore"):
        return torch.from_numpy(wide.astype(np.float32))


def _ml_back(inputs: Inputs, options: Options) -> Tensor:
    names = {**NAMES, "e2m1": "float4_e2m1fn", "e8m0": "float8_e8m0fnu"}
    return _scaled(lambda raw, name: _values(raw, names[name]), inputs, options)


def _ml_two_levels(inputs: Inputs, options: Options) -> Tensor:
    _only(options["layout"] == "linear", "linear scales")
    scale = _values(inputs["scale"].contiguous(), "float8_e4m3fn") * inputs["global_scale"].numpy()
    values = _values(unpack(inputs["q"].contiguous()), "float4_e2m1fn")
    return torch.from_numpy(values * scale.repeat(NVFP4_BLOCK, axis=1))


# --- gfloat -----------------------------------------------------------------------------------------------------------


def _format(name: str) -> Any:
    return getattr(_module("gfloat.formats"), f"format_info_ocp_{name}")


def _gfloat(inputs: Inputs, options: Options) -> Outputs:
    """The scale of :func:`gfloat.compute_scale_amax` of each block, and codes of the quotients."""
    _only(options["rounding"] == "floor", "scales of the OCP formula")
    x, library = _unpadded(inputs, options), _module("gfloat")
    info = _format(str(options.get("element", "e2m1")))
    blocks = x.double().numpy().reshape(len(x), -1, BLOCK)
    flat = blocks.reshape(-1, BLOCK)
    scale = np.array([library.compute_scale_amax(info.emax, block) for block in flat]).reshape(blocks.shape[:2])
    quotient = blocks / scale[..., None]
    rounded = library.round_ndarray(info, quotient, library.RoundMode.TiesToEven, sat=True)
    codes = torch.from_numpy(np.asarray(library.encode_ndarray(info, rounded), dtype=np.uint8)).reshape(x.shape)
    byte = torch.from_numpy(np.asarray(library.encode_ndarray(_format("e8m0"), scale), dtype=np.uint8))
    element = {"e4m3": FP8, "e5m2": torch.float8_e5m2}.get(str(options.get("element")), torch.uint8)
    q = codes.view(element) if "element" in options else pack(codes)
    return {"q": q, "scale": _scale(byte, options)}


def _gfloat_back(inputs: Inputs, options: Options) -> Tensor:
    decoded = _module("gfloat").decode_ndarray
    return _scaled(lambda raw, name: decoded(_format(name), raw.view(torch.uint8).numpy()), inputs, options)
