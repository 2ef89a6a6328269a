"""Decisions about a machine, written out a second time as the published rules read."""

from __future__ import annotations


def deep_gemm(arch: int, package: int, wanted: int, flashinfer_moe: int) -> int:
    return int(arch in {90, 100} and package == 1 and wanted == 1 and flashinfer_moe == 0)


def deep_gemm_e8m0(arch: int, package: int, wanted: int, flashinfer_moe: int, e8m0: int, hopper: int) -> int:
    return deep_gemm(arch, package, wanted, flashinfer_moe) * {100: e8m0, 90: hopper}.get(arch, 0)


def deep_gemm_linear(
    arch: int, package: int, wanted: int, flashinfer_moe: int, bfloat16_out: int, n: int, k: int
) -> int:
    return deep_gemm(arch, package, wanted, flashinfer_moe) * bfloat16_out * (n % 128 == 0) * (k % 128 == 0)


def cutlass(arch: int, major: int, minor: int) -> int:
    version = 100 * major + minor
    return int(arch == 89 and version >= 1204 or arch >= 90 and version >= 1200)


def cutlass_block(arch: int, major: int, minor: int) -> int:
    return int(100 * major + minor >= (1208 if arch >= 100 else 1200) and arch >= 90)


def cutlass_group(arch: int, major: int, minor: int) -> int:
    return int(100 * major + minor >= (1208 if arch >= 100 else 1203) and arch >= 90)


def sparse(arch: int, major: int, minor: int) -> int:
    return int(arch // 10 == 9 and 100 * major + minor >= 1202)


def rowwise(rocm: int, major: int, minor: int, torch_major: int, torch_minor: int) -> int:
    return rocm * (100 * torch_major + torch_minor >= 207) * (100 * major + minor >= 904)


def moe_backend(arch: int, choice: int) -> int:
    """0 refused, 1 CUTLASS, 2 TensorRT-LLM, 3 CUTEDSL."""
    return {0: int(arch == 90), 1: 1, 2: 2 if arch // 10 == 10 else 1, 3: 3}[choice]


def global_scale(backend: int) -> int:
    return min(backend, 1)


def num_sms(product: int, reported: int) -> int:
    """Texture processing clusters of each product, two multiprocessors in each; a driver's count stands above."""
    clusters = {1: 54, 2: 42, 3: 71, 4: 64, 5: 66, 6: 57, 7: 66, 8: 74, 9: 85, 10: 94}
    if product not in clusters:
        return 0
    return 2 * clusters[product] if reported == -1 else reported


def experts_record(
    config: int,
    in_dtype: int,
    dp_size: int,
    ep_rank: int,
    ep_size: int,
    tp_rank: int,
    tp_size: int,
    out_dtype: int,
    quant_config: int,
    block: int,
) -> dict[str, int]:
    """The fields by name."""
    dtype, known = {1: (in_dtype, 1), 0: (out_dtype, int(out_dtype > 0))}[config]
    fields = {
        "accepted": 1,
        "out_dtype": dtype,
        "quant_config": quant_config,
        "ep_rank": config * ep_rank,
        "ep_size": ep_size if config else 1,
        "tp_rank": config * tp_rank,
        "tp_size": tp_size if config else 1,
        "use_deepseek_fp8_block_scale": block,
    }
    return fields if known else {name: -(name != "accepted") for name in fields}


def prepare_finalize(config: int, dp_size: int, ep_size: int, tp_size: int, block: int) -> dict[str, int]:
    """The fields by name."""
    return {"use_dp": int(config * dp_size > 1), "use_deepseek_fp8_block_scale": block}
