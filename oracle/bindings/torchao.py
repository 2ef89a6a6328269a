"""torchao: block-scaled FP8 in Triton, for inference and for training; NVFP4's quantiser; the layout of scales.

An autotuned kernel chooses its tile by timing, so that two runs may differ in bits.
"""

from __future__ import annotations

import torch

from oracle.bindings.binding import bind

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
FORMATS = "torchao.prototype.mx_formats"

BINDINGS = (
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
