"""gemlite 0.6: quantisers of activations in Triton; its products take weights that it packs, which no contract has."""

from __future__ import annotations

from collections.abc import Callable

from hardware import alone

from oracle.harness.gallery import Kernel, Project

from ._products import FP8, Inputs, Options, Pair, groups, offered, one_config

FILE = "gemlite.quant_utils"
FIRST = "the first configuration of its list"


def by_groups(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, dtype)`` with groups of 128 and a floor of its own, which its recipe has."""
    x = groups(inputs, options, floor=1e-10, group=128)
    one_config(vars(alone.module(FILE)), "scale_activations_per_block_triton_v2_kernel")
    return kernel(x, FP8)


def by_rows(kernel: Callable[..., Pair], inputs: Inputs, options: Options) -> Pair:
    """``(x, dtype)``, a scale for each row."""
    x = inputs["x"]
    offered(options.get("use_per_token_if_dynamic") and not {"scale", "scale_ub"} & set(inputs), "rows, no bound")
    offered(x.is_contiguous() and not options.get("num_token_padding"), "dense, not padded")
    one_config(vars(alone.module(FILE)), "scale_activations_per_token_triton_v3_kernel")
    return kernel(x, FP8)


PROJECT = Project(
    name="gemlite",
    distributions=("gemlite",),
    carried="a wheel of its source (pip wheel --no-deps gemlite)",
    kernels=(
        Kernel(
            "per_token_group_quant_fp8",
            f"hardware.alone:{FILE}.scale_activations_per_block",
            by_groups,
            "scale_activations_per_block",
            "gemlite_1x128",
            pinned=FIRST,
        ),
        Kernel(
            "scaled_fp8_quant",
            f"hardware.alone:{FILE}.scale_activations_per_token",
            by_rows,
            "scale_activations_per_token",
            "gemlite_token",
            pinned=FIRST,
        ),
    ),
)
