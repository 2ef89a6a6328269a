"""torchao: block-scaled FP8 in Triton, for inference and for training; casts to MX and NVFP4 and back; layouts of
scales; rows of groups.

An autotuned kernel chooses its tile by timing, so that two runs may differ in bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.bindings.binding import Binding, bind
from oracle.bindings.forms import FLAT, flat

RELEASE = "torchao 0.18.0"
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
OPERANDS = {"a": E4M3, "b": E4M3, "c": None}
ROWS = {"column_major_scales": False, "tma_aligned_scales": False, "use_ue8m0": False, "eps": 1e-10}
COLUMNS = ROWS | {"column_major_scales": True, "group_size": 128}
WHOLE, SQUARE = (
    "m % 128 == 0, k % 128 == 0",
    "block_size[0] == block_size[1] == 128 and x.shape[0] % 128 == 0 and x.shape[1] % 128 == 0",
)
CAST, GROUPS = "per_block_cast_to_fp8", "per_token_group_quant_fp8"
BLOCKS, TRAINING = "torchao.kernel.blockwise_quantization", "torchao.prototype.blockwise_fp8_training.kernels"
FORMATS, QUANT = "torchao.prototype.mx_formats", "torchao.prototype.moe_training.kernels.mxfp8.quant"
E8M0 = "scale.view(torch.float8_e8m0fnu)"
TO_MX = "(data_hp, elem_dtype, block_size, scaling_mode=ScaleCalculationMode.FLOOR, is_swizzled_scales=False)"
NO_NAN = {"data of nan": "its casts to fewer than 8 bits document that NaN and infinity are not supported"}
FINITE = "torch.isfinite(x).all()"


def _raw(codes: Tensor) -> Tensor:
    """Two codes a byte, as bytes."""
    return codes.view(torch.uint8)


def _values(tensor: Any) -> Tensor:
    """The numbers of one of its tensors of codes, in the dtype that it stands for."""
    return tensor.dequantize()  # type: ignore[no-any-return]


def _used(tiles: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """The bytes of the tiles that groups of these rows may have; its buffer is longer."""
    most = (scale.shape[0] + 127 * len(rows)) // 128 * 128 * (-(-scale.shape[1] // 4) * 4)
    return flat(tiles)[:most]


PACKED = {"raw": (_raw, _raw)}


def _plain(target: str, contract: str, pattern: str, signature: str, **stated: Any) -> Binding:
    return bind(target, contract, pattern, signature, dense=("*",), release=RELEASE, **stated)


def _tiles(
    target: str, contract: str, signature: str, more: str = "", cases: tuple[str, ...] = (), **takes: object
) -> Binding:
    """A function that lays scales out in tiles of 128x4."""
    taken = {"scale": torch.uint8} | takes
    where = "scale.dim() == 2"
    return _plain(
        target,
        contract,
        f"(scale{more}) -> flat(out)",
        signature,
        takes=taken,
        where=where,
        functions=FLAT,
        cases=cases,
    )


BINDINGS = (
    *(
        _plain(
            f"{FORMATS}.mx_tensor:to_mx",
            f"mxfp{bits}_quantize",
            f"(x, {element}, 32) -> {E8M0}, {q}",
            TO_MX,
            takes={"x": (BF16, torch.float32), "scale": torch.uint8, "layout": "linear", "rounding": "floor"} | named,
            where=FINITE if bits < 8 else "",
            functions=PACKED,
            exempt=NO_NAN if bits < 8 else {},
            cases=tuple(
                f"mxfp{bits}_quantize/{dtypes}/1x32/{shape}/layout=linear,rounding=floor/family={family}/seed=1"
                for shape in ("m=1,k=160", "m=17,k=192", "m=64,k=512")
                for family in ("randn", "fp4ties", "steps", "heavy", "range")
            ),
        )
        for bits, dtypes, element, q, named in (
            (8, "bf16-e4m3", "torch.float8_e4m3fn", "q", {"element": "e4m3", "alignment": 32}),
            (6, "bf16", "'fp6_e3m2'", "q", {"element": "e3m2"}),
            (4, "bf16", "torch.float4_e2m1fn_x2", "raw(q)", {}),
        )
    ),
    *(
        _plain(
            f"{FORMATS}.mx_tensor:to_dtype",
            f"mxfp{bits}_dequantize",
            f"(q, {E8M0}, {element}, 32, torch.float32)",
            "(data_lp, scale_e8m0, elem_dtype, block_size, target_dtype)",
            takes={"layout": "linear"} | named,
        )
        for bits, element, named in (
            (8, "torch.float8_e4m3fn", {"q": E4M3}),
            (6, "'fp6_e3m2'", {"element": "e3m2"}),
            (4, "torch.float4_e2m1fn_x2", {}),
        )
    ),
    _plain(
        f"{FORMATS}.kernels:triton_mxfp8_dequant_dim0",
        "mxfp8_dequantize",
        "(q, scale, torch.float32, 32)",
        "(e4m3_data, e8m0_scales, out_dtype, scale_block_size=32)",
        takes={"layout": "linear", "q": E4M3},
    ),
    _plain(
        f"{FORMATS}.utils:from_blocked",
        "from_blocked",
        "(memory, rows, columns)",
        "(blocked_tensor, original_rows, original_cols)",
        takes={"memory": torch.uint8, "tile": "128x4"},
        where="memory.dim() == 1",
        domain="g == 1",
    ),
    *(
        _tiles(f"{FORMATS}.kernels:triton_mx_block_rearrange", name, "(scale_tensor)")
        for name in ("to_blocked", "swizzle_scale")
    ),
    _tiles(
        f"{QUANT}:triton_mx_block_rearrange_2d_K_groups",
        "to_blocked_k_groups",
        "(scales_tensor, input_offsets)",
        ", ends",
        ends=torch.int32,
        cases=tuple(
            f"to_blocked_k_groups/u8/-/{shape}/ends:i32/family=randn/seed=1"
            for shape in ("m=1,c=1,g=1", "m=130,c=7,g=2", "m=256,c=24,g=3", "m=33,c=9,g=4")
        ),
    ),
    _plain(
        f"{QUANT}:triton_mx_block_rearrange_2d_M_groups",
        "swizzle_scale_experts",
        "(scale, ends(rows)) -> used(out, scale, rows)",
        "(scales_tensor, input_offsets)",
        takes={"scale": torch.uint8, "rows": torch.int64, "first": torch.int64, "placement": "tight", "capacity": 0},
        where="torch.equal(first, rows.cumsum(0) - rows)",  # groups one after another
        derived={"first": "rows.cumsum(0) - rows"},
        functions={
            "used": (_used, _used),
            "ends": (lambda rows: rows.cumsum(0).to(torch.int32), lambda ends: ends.diff(prepend=ends[:1] * 0).long()),
        },
    ),
    _plain(
        f"{QUANT}:torch_pad_token_groups",
        "pad_token_groups",
        "(x, group_end_offsets, alignment_size)",
        "(inputs, group_offsets, alignment_size)",
        where="group_end_offsets[-1].item() == x.shape[0]",  # it refuses rows of no group
    ),
    _plain(
        f"{QUANT}:torch_unpad_token_groups",
        "unpad_token_groups",
        "(padded, group_end_offsets, padded_group_start_offsets, num_tokens, alignment_size)",
        "(padded_inputs, group_offsets, padded_group_start_offsets, num_tokens, alignment_size)",
    ),
    bind(
        f"{BLOCKS}:blockwise_fp8_gemm",
        "fp8_gemm_nt",
        "(a, a_scale, b, b_scale)",
        "(a, a_s, b, b_s, block_size=128)",
        takes=OPERANDS | {"out_dtype": BF16},
        domain="n % 128 == 0, k % 128 == 0",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        f"{BLOCKS}:fp8_blockwise_act_quant",
        GROUPS,
        "(x, group_size)",
        "(x, block_size=128, dtype=torch.float8_e4m3fn)",
        takes=ROWS,
        numerics="deepseek_v3_1x128",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        f"{BLOCKS}:fp8_blockwise_weight_quant",
        CAST,
        "(x, 128)",
        "(x, block_size=128, dtype=torch.float8_e4m3fn)",
        takes={"use_ue8m0": False},
        where=SQUARE,
        domain=WHOLE,
        numerics="deepseek_v3_128x128",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        f"{TRAINING}:triton_fp8_gemm_1x128_128x128",
        "fp8_gemm_nt",
        "(a, b.t(), a_scale.t().contiguous().t(), b_scale.t(), 128, out_dtype)",
        "(a, b, a_s, b_s, block_size=128, out_dtype=torch.float32)",
        takes=OPERANDS,
        where="a.shape[0] > 1",  # strides of one row are not those of columns
        domain="n % 128 == 0, k % 128 == 0",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        f"{TRAINING}:triton_fp8_blockwise_act_quant_lhs",
        GROUPS,
        "(x, group_size)",
        "(x, block_size=128, dtype=e4m3_dtype)",
        takes=COLUMNS,
        where="x.dim() == 2",
        numerics="torchao_training_1x128",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        f"{TRAINING}:triton_fp8_blockwise_weight_quant_transposed_rhs",
        CAST,
        "(x, 128) -> q.t(), scale.t()",
        "(x, block_size=128, dtype=e4m3_dtype)",
        takes={"use_ue8m0": False},
        where=SQUARE,
        domain=WHOLE,
        numerics="torchao_training_128x128",
        dense=("*",),
        release=RELEASE,
    ),
    bind(
        f"{FORMATS}.nvfp4_tensor:nvfp4_quantize",
        "nvfp4_quantize",
        "(x, 16, global_scale) -> scale, q",
        "(data_hp, block_size=16, per_tensor_scale=None)",
        takes={"x": (BF16, torch.float32), "layout": "linear", "is_global_scale_inversed": True},
        numerics="torchao_nvfp4",
        dense=("*",),
        release=RELEASE,
    ),
    _plain(
        f"{FORMATS}.nvfp4_tensor:NVFP4Tensor",
        "nvfp4_dequantize",
        "(q, scale.view(torch.float8_e4m3fn), 16, torch.float32, global_scale.squeeze(0), "
        "is_swizzled_scales=tiled(layout)) -> values(out)",
        "(qdata, scale, block_size, orig_dtype, per_tensor_scale=None, act_per_tensor_scale=None, "
        "is_swizzled_scales=False, use_triton_kernel=False, act_quant_kwargs=None)",
        takes={"scale": torch.uint8, "layout": ("128x4", "linear")},
        functions={
            "tiled": (lambda layout: layout == "128x4", lambda tiled: "128x4" if tiled else "linear"),
            "values": (_values, _values),
        },
        ignores=("use_triton_kernel", "act_quant_kwargs"),
    ),
    bind(
        f"{FORMATS}.utils:to_blocked",
        "to_blocked",
        "(scale)",
        "(input_matrix, use_triton_kernel=False)",
        ignores=("use_triton_kernel",),
        where="scale.dim() == 2",
        domain="g == 1",
        dense=("*",),
        release=RELEASE,
    ),
)
