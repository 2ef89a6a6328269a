"""The choice of a library for a problem on a machine: an ordered table and pure functions.

``plan(problem, machine, config)`` takes the first backend in the operation's row of :data:`TABLE` that supports the
problem (:mod:`kernels.support`). The answer includes why earlier backends were rejected; if none is left, the error
lists every reason. There is no other fallback in this package.

Not covered: choices inside a library (tile shapes, swapAB), which the libraries make themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from . import context
from .backends.declaration import Backend
from .config import current_config
from .errors import (
    ConfigError,
    Failed,
    MissingPackageError,
    NoBackendError,
    OptionError,
    Reason,
    SwitchedOff,
    Unavailable,
    shown,
)
from .platform import current_machine
from .records import ARCHES, Config, Machine, Plan, Problem
from .support import BLACKWELL, BLOCKS, DENSE, MIXED, MX_LAYERS, RUNS

__all__ = [
    "considered",
    "decisions",
    "explanation",
    "record_of",
    "summary",
    "MODULES",
    "ORDERS",
    "ROUTINES",
    "TABLE",
    "Plan",
    "Problem",
    "backend_of",
    "describe",
    "markdown_table",
    "order",
    "plan",
]

TABLE: Mapping[str, tuple[str, ...]] = {
    # operation: backends in order of preference
    "quant_tensor": ("triton", "cutlass", "sgl_kernel", "eager"),
    "quant_token": ("triton", "cutlass", "sgl_kernel", "eager"),
    "quant_group": ("triton", "cutlass", "sgl_kernel", "eager"),
    "quant_group_packed": ("triton", "cutlass", "sgl_kernel", "eager"),
    "quant_reciprocal": ("triton", "eager"),
    "quant_gated": ("triton", "eager"),
    "quant_norm": ("triton", "eager"),
    "quant_rope": ("triton", "eager"),
    "quant_cache": ("triton", "eager"),
    "quant_mxfp8": ("flashinfer_quant", "cutlass", "triton", "eager"),
    "quant_mxfp4": ("flashinfer_quant", "cutlass", "triton", "eager"),
    "quant_nvfp4": ("flashinfer_quant", "cutlass", "triton", "eager"),
    "cast": ("eager",),
    "layout": ("eager",),
    "linear": ("cutlass", "sgl_kernel", "torch", "eager"),
    "torch_linear": ("torch",),
    "block_linear": ("cutlass", "sgl_kernel", "torch", "triton_gemm", "eager"),
    DENSE: ("deep_gemm", "triton_gemm", "eager"),
    BLOCKS: ("deep_gemm", "cutlass", "flashinfer_cutlass", "flashinfer_trtllm", "triton_gemm", "eager"),
    "blockscale_sm90": ("flashinfer", "eager"),
    "few_rows": ("triton_linear", "eager"),
    "dynamic_blockscale": ("triton_linear", "flashinfer", "deep_gemm", "triton_gemm", "eager"),
    "grouped_contiguous": ("deep_gemm", "triton_gemm", "eager"),
    "grouped_masked": ("deep_gemm", "triton_gemm", "eager"),
    RUNS: ("deep_gemm", "flashinfer_cutlass", "triton_gemm", "eager"),
    "grouped_scaled": ("torch", "cutlass", "eager"),
    "gemm_1d1d": ("deep_gemm", "eager"),
    "k_grouped": ("deep_gemm", "eager"),
    "skip_head_mid": ("deep_gemm", "eager"),
    "einsum": ("deep_gemm", "eager"),
    "bmm": ("flashinfer", "eager"),
    "mx_product": ("triton_mx", "eager"),
    "mxfp8_product": (
        "flashinfer_b12x",
        "flashinfer_cutlass",
        "torch",
        "flashinfer_cute_dsl",
        "flashinfer_cudnn",
        "triton_mx",
        "eager",
    ),
    "nvfp4_product": (
        "flashinfer_b12x",
        "cutlass",
        "flashinfer_cutlass",
        "flashinfer_cudnn",
        "torch",
        "flashinfer_cute_dsl",
        "triton_mx",
        "eager",
    ),
    "mxfp4_product": (
        "flashinfer_b12x",
        "flashinfer_cute_dsl",
        "flashinfer_cudnn",
        "deep_gemm",
        "torch",
        "triton_mx",
        "eager",
    ),
    "mxfp8_batched": ("flashinfer_cutlass", "flashinfer_cudnn", "triton_mx", "eager"),
    "mxfp8_mxfp4_grouped": ("flashinfer_cutlass", "triton_mx", "eager"),
    "nvfp4_grouped": ("flashinfer_cutlass", "flashinfer_cudnn", "triton_mx", "eager"),
    "mxfp8_tight": ("torch", "triton_mx", "eager"),
    "nvfp4_tight": ("cutlass", "torch", "triton_mx", "eager"),
    "mxfp4_tight": ("cutlass", "triton_mx", "eager"),
    **{op: ("deep_gemm", "triton_mx", "eager") for op in MIXED},
    **{
        op: (
            "flashinfer_cutlass",
            "flashinfer_trtllm",
            "flashinfer_cute_dsl",
            "flashinfer_b12x",
            "triton_mx",
            "eager",
        )
        for op in MX_LAYERS
    },
    "moe_trtllm": ("flashinfer", "eager"),
    "moe_cutlass": ("flashinfer", "eager"),
    "mqa_logits": ("deep_gemm", "eager"),
    "paged_mqa_logits": ("deep_gemm", "eager"),
    "paged_metadata": ("deep_gemm", "eager"),
    "attention": ("vllm_fa3", "eager"),
    "attention_prefill": ("flashinfer", "eager"),
    "attention_ragged": ("flashinfer", "eager"),
    "attention_paged": ("flashinfer", "eager"),
    "attention_latent": ("flashmla", "eager"),
}
ORDERS: Mapping[tuple[str, str], tuple[str, ...]] = {
    # (operation, arch): another order of the same backends, or with those of the arch
    **{
        (op, f"sm{sm}"): ("deep_gemm", "flashinfer_cutlass", "triton_gemm", "eager")
        for op in ("grouped_contiguous", "grouped_masked")
        for sm in BLACKWELL
    },
    ("grouped_scaled", "sm100"): ("cutlass", "torch", "eager"),
    **{  # where CUTLASS has no batched product, and multiplies the matrices one by one
        ("mxfp8_batched", arch): ("flashinfer_cudnn", "flashinfer_cutlass", "triton_mx", "eager")
        for arch in ("sm100", "sm103")
    },
    ("nvfp4_product", "sm121"): (  # of a GB10 FlashInfer takes b12x only by name: the others are faster in most cases
        "cutlass",
        "flashinfer_cutlass",
        "flashinfer_cudnn",
        "flashinfer_b12x",
        "torch",
        "flashinfer_cute_dsl",
        "triton_mx",
        "eager",
    ),
}
NATIVE: Mapping[str, str] = {DENSE: BLOCKS}
"""Operations that are another one on Blackwell."""
MODULES: Mapping[str, str] = {
    # backend: its file in backends/
    "triton": "triton_quant",
    "triton_gemm": "triton_gemm",
    "triton_linear": "triton_linear",
    "triton_mx": "triton_mx",
    "cutlass": "cutlass",
    "sgl_kernel": "sgl_kernel",
    "torch": "torch_ops",
    "deep_gemm": "deep_gemm",
    "flashinfer": "flashinfer",
    "flashinfer_quant": "flashinfer_quant",
    "flashinfer_cutlass": "flashinfer_mx",
    "flashinfer_b12x": "flashinfer_mx",
    "flashinfer_cudnn": "flashinfer_mx",
    "flashinfer_cute_dsl": "flashinfer_mx",
    "flashinfer_trtllm": "flashinfer_mx",
    "vllm_fa3": "vllm_attention",
    "flashmla": "vllm_attention",
    "eager": "eager",
}
PACKED = {"a_dtype": "uint8", "b_dtype": "uint8"}
ROWS_BY_FOUR: Mapping[str, Any] = {"b_dtype": "uint8", "a_width": 128, "b_width": 32}
ROUTINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # public routine: (operation, a representative problem) for the table of the documentation
    "scaled_fp8_quant": ("quant_tensor", {}),
    "scaled_fp8_quant (per token)": ("quant_token", {}),
    "per_token_group_quant_fp8": ("quant_group", {"k": 4096}),
    "silu_and_mul_per_block_quant": ("quant_gated", {"k": 14336}),
    "rms_norm_per_block_quant": ("quant_norm", {"k": 7168}),
    "mla_rope_quantize_fp8": ("quant_rope", {"k": 64}),
    "reshape_and_cache_flash": ("quant_cache", {}),
    "per_block_cast_to_fp8": ("cast", {}),
    "flashinfer_quantize_1x128": ("cast", {}),
    "get_col_major_tma_aligned_tensor": ("layout", {}),
    "cutlass_scaled_mm (per tensor)": ("linear", {"n": 4096, "k": 4096}),
    "cutlass_scaled_mm (token, channel)": ("linear", {"n": 4096, "k": 4096, "a_scale": "token", "b_scale": "channel"}),
    "cutlass_scaled_mm (block)": ("block_linear", {"n": 4096, "k": 4096, "a_scale": "block", "b_scale": "block"}),
    "torch_per_tensor_w8a8_scaled_mm": ("torch_linear", {"n": 4096, "k": 4096}),
    "torch_per_token_w8a8_scaled_mm": (
        "torch_linear",
        {"n": 4096, "k": 4096, "a_scale": "token", "b_scale": "channel", "kernel": "rowwise"},
    ),
    DENSE: (DENSE, {"n": 4096, "k": 4096}),
    "fp8_blockscale_gemm_sm90": ("blockscale_sm90", {"n": 4096, "k": 4096}),
    "few_rows_blockscale_linear": ("few_rows", {"m": 31, "n": 4096, "k": 4096}),
    "dynamic_flashinfer_deepgemm_blockscale_gemm (M=31)": ("dynamic_blockscale", {"m": 31, "n": 4096, "k": 4096}),
    "dynamic_flashinfer_deepgemm_blockscale_gemm (M=32)": ("dynamic_blockscale", {"m": 32, "n": 4096, "k": 4096}),
    "m_grouped_fp8_gemm_nt_contiguous": ("grouped_contiguous", {"m": 1024, "n": 4096, "k": 4096, "groups": 8}),
    "fp8_m_grouped_gemm_nt_masked": ("grouped_masked", {"m": 128, "n": 4096, "k": 4096, "groups": 8}),
    "group_gemm_fp8_nt_groupwise": (
        RUNS,
        {"n": 4096, "k": 4096, "groups": 8, "row_alignment": 4, "scale_format": "float32"},
    ),
    "scaled_grouped_mm": (
        "grouped_scaled",
        {"n": 4096, "k": 4096, "groups": 8, "a_scale": "token", "b_scale": "channel"},
    ),
    "fp8_gemm_nt_1d1d": ("gemm_1d1d", {"n": 4096, "k": 4096, "out_dtype": "float32"}),
    "k_grouped_fp8_gemm_nt_contiguous": ("k_grouped", {"n": 4096, "groups": 8, "out_dtype": "float32"}),
    "fp8_gemm_nt_skip_head_mid": ("skip_head_mid", {"n": 4096, "k": 4096}),
    "fp8_einsum": ("einsum", {"n": 512, "k": 128, "groups": 16}),
    "bmm_fp8": ("bmm", {"n": 4096, "k": 4096, "groups": 8}),
    "mxfp8_quantize": ("quant_mxfp8", {"k": 4096, "a_dtype": "bfloat16", "tiles": "128x4"}),
    "mxfp4_quantize": ("quant_mxfp4", {"k": 4096, "a_dtype": "bfloat16", "tiles": "128x4"}),
    "nvfp4_quantize": ("quant_nvfp4", {"k": 4096, "a_dtype": "bfloat16", "tiles": "128x4"}),
    "mm_mxfp8": ("mxfp8_product", {"n": 4096, "k": 4096, "tiles": "128x4"}),
    "mm_fp4 (NVFP4)": ("nvfp4_product", {"n": 4096, "k": 4096, "tiles": "128x4", **PACKED}),
    "mm_fp4 (MXFP4)": ("mxfp4_product", {"n": 4096, "k": 4096, "tiles": "128x4", **PACKED}),
    "scaled_mm": ("mxfp8_product", {"n": 4096, "k": 4096, "tiles": "128x4", "out_dtype": "float32"}),
    "bmm_mxfp8": ("mxfp8_batched", {"m": 128, "n": 4096, "k": 4096, "groups": 8, "tiles": "128x4"}),
    "group_gemm_mxfp8_mxfp4_nt_groupwise": (
        "mxfp8_mxfp4_grouped",
        {"n": 4096, "k": 4096, "groups": 8, "tiles": "128x4", "b_dtype": "uint8", "row_alignment": 4},
    ),
    "group_gemm_nvfp4_nt_groupwise": (
        "nvfp4_grouped",
        {"n": 4096, "k": 4096, "groups": 8, "tiles": "128x4", "row_alignment": 4, **PACKED},
    ),
    "scaled_grouped_mm_mx (MXFP8)": ("mxfp8_tight", {"n": 4096, "k": 4096, "groups": 8, "tiles": "128x4"}),
    "scaled_grouped_mm_mx (NVFP4)": ("nvfp4_tight", {"n": 4096, "k": 4096, "groups": 8, "tiles": "128x4", **PACKED}),
    "scaled_grouped_mm_mx (MXFP4)": ("mxfp4_tight", {"n": 4096, "k": 4096, "groups": 8, "tiles": "128x4", **PACKED}),
    "fp8_fp4_gemm_nt": ("mixed_product", {"n": 4096, "k": 4096, **ROWS_BY_FOUR}),
    "m_grouped_fp8_fp4_gemm_nt_contiguous": ("mixed_contiguous", {"n": 4096, "k": 4096, "groups": 8, **ROWS_BY_FOUR}),
    "m_grouped_fp8_fp4_gemm_nt_masked": ("mixed_masked", {"n": 4096, "k": 4096, "groups": 8, **ROWS_BY_FOUR}),
    **{
        name: (op, {"n": 2048, "k": 4096, "a_dtype": "bfloat16", "b_dtype": "uint8"})
        for name, op in zip(
            ("cutlass_fused_moe (NVFP4)", "cutlass_fused_moe (MXFP8 x MXFP4)", "cutlass_fused_moe (MXFP8)"),
            MX_LAYERS,
            strict=True,
        )
    },
    "apply_fi_trtllm_fp8_per_tensor_moe": ("moe_trtllm", {"groups": 8}),
    "fp8_mqa_logits": ("mqa_logits", {"heads": 32, "head_dim": 128}),
    "fp8_paged_mqa_logits": ("paged_mqa_logits", {"heads": 32, "head_dim": 128, "block_size": 64}),
    "mha_fwd": ("attention", {"head_dim": 128, "n": 128}),
    "single_prefill_with_kv_cache": ("attention_prefill", {"head_dim": 128}),
    "BatchPrefillWithRaggedKVCacheWrapper": ("attention_ragged", {"head_dim": 128}),
    "BatchPrefillWithPagedKVCacheWrapper": ("attention_paged", {"head_dim": 128}),
    "flash_mla_with_kvcache": ("attention_latent", {"heads": 64, "k": 2048}),
}


SCALES = ("tensor", "token", "channel", "block")
"""Kinds of scales."""
WORDS: Mapping[str, tuple[object, ...]] = {
    "device": ("cuda", "cpu"),
    "a_scale": SCALES,
    "b_scale": SCALES,
    "kernel": (None, "tensorwise", "rowwise", "unfused"),
    "ue8m0": (False, True),
    "scale_format": (None, "ue8m0", "float32"),
    "tiles": (None, "128x4", "8x4", "linear"),
    "alpha": (None, "one", "row", "group"),
    "recipe": (None, "usual", "other"),
}
"""Admitted values of those fields of a problem that are neither extents nor dtypes."""
NO_BACKEND = "no backend"
"""The end of the first line of :func:`describe` where nothing serves a problem."""


def backend_of(name: str) -> Backend:
    """What a backend declares (importing its module loads no library)."""
    module = importlib.import_module(f".backends.{MODULES[name]}", __package__)
    declared: Backend = module.BACKENDS[name] if hasattr(module, "BACKENDS") else module.BACKEND
    return declared


def order(op: str, machine: Machine) -> tuple[str, ...]:
    """The backends of an operation in the order in which a machine asks them."""
    return ORDERS.get((op, machine.arch), TABLE[op])


def listed(op: str) -> frozenset[str]:
    """The backends of an operation on some machine; none of what is no operation."""
    return frozenset(TABLE.get(op, ())).union(*(names for (of, _), names in ORDERS.items() if of == op))


def plan(problem: Problem, machine: Machine | None = None, config: Config | None = None) -> Plan:
    """Choose a backend: the first of the row that serves the problem, or the one that the configuration forces.

    On the running machine the libraries of a candidate are loaded, to learn whether its routine is there. One that
    fails there, or failed in a warm-up (:mod:`kernels.warming`), is passed over, or is the end, as the configuration's
    ``fallback`` says.

    Raises
    ------
    MissingPackageError
        Nothing can serve the problem, and what is not installed is among the reasons.
    NoBackendError
        Nothing can serve the problem; ``reasons`` holds every backend's reason.
    OptionError, ConfigError
        The operation, or the backend that the configuration forces, is unknown.
    """
    machine, config = machine or current_machine(), config or current_config()
    if problem.op not in TABLE:
        raise OptionError(f"unknown operation {shown(problem.op)}; known: {', '.join(TABLE)}")
    forced = forced_backends(config.backend).get(problem.op)
    reasons: dict[str, Reason] = {}
    refusal: SwitchedOff | None = None
    for name in order(problem.op, machine):
        if refusal is not None or (forced is not None and name != forced):
            reasons[name] = refusal or SwitchedOff(f"only {forced} is asked for")
            continue
        backend = backend_of(name)
        why = backend.why_not(problem, machine, config)
        if why is None and machine.live:
            why = context.current().failures.get((problem, name)) or backend.lacks(problem, machine)
            if isinstance(why, Failed) and config.fallback == "refuse":
                refusal = SwitchedOff(f"{name} failed, and FP8_KERNELS_FALLBACK=refuse lets nothing take its place")
        if why is None:
            kernel, steps = backend.kernel(problem, machine), backend.steps(problem, machine)
            sums = backend.numerics(problem, machine)
            return Plan(problem, machine.arch, name, kernel, steps, tuple(reasons.items()), sums)
        reasons[name] = why
    absent = any(isinstance(why, Unavailable) for why in reasons.values())
    raise (MissingPackageError if absent else NoBackendError)(f"{problem} on {machine.arch}", reasons)


def forced_backends(text: str) -> dict[str, str]:
    """The backend of each operation that ``FP8_KERNELS_BACKEND`` names; without an operation, of all that list it.

    Raises ConfigError.
    """
    forced: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        op, name = part.split("=", 1) if "=" in part else ("", part)
        if name not in MODULES:
            raise ConfigError(f"unknown backend {name!r} in {text!r}; known: {', '.join(MODULES)}")
        if op and name not in listed(op):
            raise ConfigError(f"{part!r} in {text!r}: {name} is not listed for {op!r}; `plan` shows the operations")
        forced |= {row: name for row in TABLE if row == op or (not op and name in listed(row))}
    return forced


def describe(*, op: str, arch: str | None = None, **dims: object) -> str:
    """The decision as text for the command line: the choice, its steps, and every rejected backend.

    Parameters
    ----------
    op
        An operation of :data:`TABLE` or a routine of :data:`ROUTINES`.
    arch
        ``sm90``, ``gfx942``, ``cpu``; default: this machine.
    dims
        Fields of :class:`Problem` (``m``, ``n``, ``k``, ``out_dtype``...), and ``cuda``, ``rocm``, ``torch_version``
        of the described machine.

    Raises
    ------
    OptionError
        The operation, the architecture or a field is unknown, or a field does not admit a value.
    """
    machine = current_machine() if arch is None else _described(arch, dims)
    problem = _problem(op, machine, dims)
    try:
        chosen = plan(problem, machine)
    except NoBackendError as error:  # the answer to print: no backend, and the reason of each
        lines = [f"{problem} on {machine.arch}: {NO_BACKEND}"]
        return "\n".join(lines + [f"  rejected {name}: {why}" for name, why in error.reasons.items()])
    row = order(problem.op, machine)
    after = row[row.index(chosen.backend) + 1 :]
    return "\n".join([str(chosen), *(f"  not asked: {name}" for name in after if name not in dict(chosen.reasons))])


def _problem(op: str, machine: Machine, dims: Mapping[str, object]) -> Problem:
    """The problem of an operation, or the representative one of a routine, with the fields that are named."""
    if not isinstance(op, str):
        raise OptionError(f"op={shown(op)}; pass the name of an operation or of a routine")
    representative: Mapping[str, Any] = {}
    matches = [row for name, row in ROUTINES.items() if op in (name, name.split(" ")[0])]
    if matches and op in NATIVE or op not in TABLE:
        if not matches:
            raise OptionError(f"unknown operation {shown(op)}; known: {', '.join(dict.fromkeys([*TABLE, *ROUTINES]))}")
        op, representative = matches[0]
        op = NATIVE.get(op, op) if machine.sm in BLACKWELL else op
    names = {f.name for f in fields(Problem)} - {"op"}
    unknown = sorted(set(dims) - names)
    if unknown:
        raise OptionError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(names))}")
    extents: dict[str, Any] = {**representative, **{k: v for k, v in dims.items() if v is not None}}
    for name, value in extents.items():
        _check_field(name, value)
    return Problem(op, **{"device": machine.device, **extents})


def considered(problem: Problem, machine: Machine, config: Config) -> dict[str, Reason | None]:
    """Every backend of the operation in its order, and why it does not serve the problem: None where it does.

    Unlike :func:`plan` it does not end at the first that serves; no library is loaded.
    """
    return {name: backend_of(name).why_not(problem, machine, config) for name in order(problem.op, machine)}


def decisions(machine: Machine, config: Config | None = None) -> list[dict[str, object]]:
    """What a machine takes for each of :data:`ROUTINES`, as plain records: the routine and its problem; the backend
    (None: none), its kernel, steps and sums; and each backend of the operation with its reason, None where it serves.

    No library is loaded.
    """
    config = config or Config()
    rows: list[dict[str, object]] = []
    for routine in ROUTINES:
        problem = _problem(routine, machine, {})
        reasons = considered(problem, machine, config)
        name = next((backend for backend, why in reasons.items() if why is None), None)
        fields_set = {f.name: getattr(problem, f.name) for f in fields(Problem)}
        row: dict[str, object] = {
            "routine": routine,
            "problem": {key: value for key, value in fields_set.items() if value is not None},
            "backend": name,
            "backends": [{"name": backend, "why_not": why} for backend, why in reasons.items()],
        }
        if name is not None:
            chosen = backend_of(name)
            row |= {
                "kernel": chosen.kernel(problem, machine),
                "steps": list(chosen.steps(problem, machine)),
                "sums": chosen.numerics(problem, machine) or None,
            }
        rows.append(row)
    return rows


def record_of(machine: Machine, config: Config | None = None) -> dict[str, object]:
    """:func:`decisions` of a machine and the machine itself, as :meth:`Machine.from_record` reads it."""
    versions = {"cuda": machine.cuda, "rocm": machine.rocm, "torch": machine.torch}
    usable = [p for p in machine.packages if not p.why_not]
    packages = {p.name: f"{p.source}=={p.version}" if p.source else p.version for p in usable}
    described: dict[str, object] = {"arch": machine.arch, "sms": machine.sms, "packages": packages}
    described |= {name: ".".join(map(str, number)) for name, number in versions.items() if number is not None}
    return {"machine": described, "decisions": decisions(machine, config)}


def summary(machine: Machine, config: Config | None = None) -> list[tuple[str, str, str, str]]:
    """A line for each routine: its name, the backend and its kernel (``-`` where none serves), and how it sums."""
    lines = []
    for row in decisions(machine, config):
        lines.append((str(row["routine"]), *(str(row.get(key) or "-") for key in ("backend", "kernel", "sums"))))
    return [(a, b, c, d) for a, b, c, d in lines]


def explanation(op: str, machine: Machine, config: Config, **dims: object) -> str:
    """What serves an operation or a routine on a machine, and of every other backend why it does not, or that it would.

    ``dims`` are fields of :class:`Problem`.

    Raises
    ------
    OptionError
        The operation or a field is unknown, or a field does not admit a value.
    """
    problem = _problem(op, machine, dims)
    reasons = considered(problem, machine, config)
    name = next((backend for backend, why in reasons.items() if why is None), None)
    if name is None:
        return "\n".join(
            [f"{problem} on {machine.arch}: {NO_BACKEND}", *(f"  not {each}: {why}" for each, why in reasons.items())]
        )
    chosen = backend_of(name)
    lines = [f"{problem} on {machine.arch}: {name} -> {chosen.kernel(problem, machine)}"]
    lines += [f"  step: {step}" for step in chosen.steps(problem, machine)]
    sums = chosen.numerics(problem, machine)
    lines += [f"  sums: {sums}"] if sums else []
    for other, why in reasons.items():
        if other != name:
            lines.append(f"  not {other}: {why or 'it serves this too, and stands behind'}")
    return "\n".join(lines)


def _check_field(name: str, value: object) -> None:
    if name in WORDS:
        if not any(value is word or (isinstance(word, str) and value == word) for word in WORDS[name]):
            words = ", ".join(str(word).lower() for word in WORDS[name] if word is not None)
            raise OptionError(f"{name}={shown(value)}; it is one of {words}")
    elif name.endswith("dtype") or name in ("bias", "c"):
        if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
            raise OptionError(f"{name}={shown(value)} is no torch dtype; name one, as bfloat16")
    elif not isinstance(value, int) or value < (0 if name == "m" else 1):
        raise OptionError(
            f"{name}={shown(value)} is no extent; give a positive integer{', or 0' if name == 'm' else ''}"
        )


def markdown_table(arches: tuple[str, ...] = ARCHES) -> str:
    """Every routine on every architecture with all packages present, for the documentation.

    A cell names the backend; ``-`` means that none serves the routine there (:func:`describe` gives the reasons).
    """
    lines = ["| routine | " + " | ".join(arches) + " |", "|:--" * (len(arches) + 1) + "|"]
    default = Config()
    for name, (op, dims) in ROUTINES.items():
        cells = []
        for arch in arches:
            machine = Machine.described(arch)
            here = NATIVE.get(op, op) if machine.sm in BLACKWELL else op
            problem = Problem(here, **{"device": machine.device, **dims})
            try:
                cells.append(plan(problem, machine, default).backend)
            except NoBackendError:
                cells.append("-")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _described(arch: str, dims: dict[str, Any]) -> Machine:
    if arch not in ARCHES:
        raise OptionError(f"unknown architecture {shown(arch)}; known: {', '.join(ARCHES)}")
    named = ("cuda", "rocm", "torch_version")
    versions: dict[str, Any] = {key: str(dims.pop(key)) for key in named if dims.get(key) is not None}
    return Machine.described(arch, **versions)
