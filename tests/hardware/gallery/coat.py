"""COAT 1.0.11: quantisers of activations in groups and of weights in blocks, in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hardware import alone

from oracle.harness.gallery import Kernel, Project

from ._products import Inputs, Options, Pair, groups, offered, weight_quant

PLACE = "coat.activation.real_quantization"


def by_groups(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, group, "E4M3", scale_dtype)``; its kernel masks neither loads nor stores, so that rows come in tiles."""
    x, group = groups(inputs, options, floor=1e-10), options.get("group_size", 128)
    tuned = alone.module(f"{PLACE}._quantize")._fp8_quantize_kernel_tuned
    offered(group in tuned and x.shape[0] % group == 0, "groups of 16 to 128, rows in multiples of the group")
    tuned[group].configs = tuned[group].configs[:1]
    return kernel(x, group, "E4M3", scale_dtype=torch.float32)


def by_blocks(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, 128, "E4M3", scale_dtype)``, whole blocks."""
    return weight_quant(lambda x, block: kernel(x, block, "E4M3", scale_dtype=torch.float32), inputs, options)


PROJECT = Project(
    name="coat",
    distributions=("fp8-coat",),
    carried="its wheel (pip download --no-deps fp8-coat)",
    kernels=(
        Kernel(
            "per_token_group_quant_fp8",
            f"hardware.alone:{PLACE}._quantize.fp8_quantize",
            by_groups,
            "fp8_quantize",
            "coat_1x128",
            "m % 128 == 0",
            pinned="tiles of one group by as many rows",
        ),
        Kernel(
            "per_block_cast_to_fp8",
            f"hardware.alone:{PLACE}._quantize_perblock.fp8_quantize_perblock",
            by_blocks,
            "fp8_quantize_perblock",
            "coat_128x128",
            "m % 128 == 0, k % 128 == 0",
        ),
    ),
)
