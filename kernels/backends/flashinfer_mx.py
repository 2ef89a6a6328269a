"""FlashInfer's block-scaled products on Blackwell: one backend for each family of kernels behind ``backend=``.

Each is named in the call, and is a backend of the plan with conditions of its own: the library's choice (``auto``) is
kept on the public function, where two threads with different shapes share it, and would take kernels whose order of
sums is not documented. An operand is passed as the verbs have it; nothing is converted here:

    codes      ``a [M, K]`` and the transpose of the weight ``[N, K]``, both dense on 16 bytes
    scales     flat in 128x4 tiles for ``mm_mxfp8``; for ``mm_fp4`` as a matrix of the padded extents, that of the
               weight transposed, since the library transposes it back and reads its address
    output     a buffer of this layer, which every one of these kernels writes into

A tactic is chosen by M where the caller tuned the library. Where a tuned tactic may have other bits (it cuts K, or its
instruction is another), the call is excluded from tuning (``skip_ops``) unless ``FP8_KERNELS_SPLIT_K`` allows it.

Not covered: TensorRT-LLM's kernels whose weights are stored in another order; scales in 8x4 tiles, whose padding rows
reach real ones in some releases (flashinfer-ai/flashinfer 2861). Has not run on hardware here.

NaN and infinity are as of the verbs.
Source: FlashInfer 0.6.18.post1 and 0.7.2.post1 (gemm/gemm_base.py, autotuner).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import current_config
from ..platform import current_machine
from ..records import Machine, Problem
from ..support import ALIGNED, BLOCK, BLOCKS, FEW_ROWS, GROUPED_MX, MX_LAYERS, OTHER_BITS, RUNS, TILE_ROWS, UNTUNED
from ..tiles import from_blocked, to_blocked
from ._flashinfer import ONE_CALL, library
from ._host import ALIGNMENT, dense, on_its_device
from .declaration import Backend, Gemm, Product, Scales

NAMES = {
    "flashinfer_cutlass": "cutlass",
    "flashinfer_b12x": "b12x",
    "flashinfer_cudnn": "cudnn",
    "flashinfer_cute_dsl": "cute-dsl",
    "flashinfer_trtllm": "trtllm",
}
"""What the library calls each backend."""
ROUTINES = {
    "mxfp8_product": "mm_mxfp8",
    "nvfp4_product": "mm_fp4",
    "mxfp4_product": "mm_fp4",
    "mxfp8_batched": "bmm_mxfp8",
    "mxfp8_mxfp4_grouped": "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "nvfp4_grouped": "group_gemm_nvfp4_nt_groupwise",
    BLOCKS: "gemm_fp8_nt_groupwise",
    RUNS: "group_gemm_fp8_nt_groupwise",
    **dict.fromkeys(ALIGNED, "group_gemm_fp8_nt_groupwise"),
    **dict.fromkeys(MX_LAYERS, "cutlass_fused_moe"),
}
"""The library's routine of each operation."""
OF_TWELVE = dict.fromkeys((RUNS, *ALIGNED), "moe_gemm_fp8_nt_groupwise")
"""The routine on sm120 and sm121, where it is another one."""
HOMES = {"cutlass_fused_moe": "fused_moe", "moe_gemm_fp8_nt_groupwise": "grouped_mm"}
"""The module of a routine that is not in ``flashinfer.gemm``."""
TUNED_AS = {"mm_mxfp8": "mxfp8_gemm", "mm_fp4": "fp4_gemm"}
"""What its tuner calls a routine."""
ROWS_OF_GROUPWISE = 4
"""Rows of ``gemm_fp8_nt_groupwise`` come in multiples of so many."""
NOTED: Mapping[tuple[str, str, int], tuple[str, ...]] = {
    # (backend, operation, family): what whoever runs the engine has to know
    ("flashinfer_cutlass", "nvfp4_product", 12): (
        "allocates 34 MiB at every call: capture it in a pool of its own (flashinfer-ai/flashinfer 4549)",
    ),
    ("flashinfer_cutlass", "nvfp4_grouped", 12): (
        "some of its tiles overflow shared memory and give garbage: judge it there before use "
        "(flashinfer-ai/flashinfer 2723)",
    ),
}
CHAINS = {"mxfp8_product": "chain_ue8m0", "nvfp4_product": "chain_nvf4", "mxfp4_product": "chain_mxf4"}
"""The schedule of one chain over K, by operation; its arch goes before it."""


def kernel(name: str, p: Problem, machine: Machine) -> str:
    """The library's routine, with its backend where it has several."""
    routine = routine_of("mxfp8_product" if one_by_one(name, p, machine) else p.op, machine)
    return routine if p.op in (*GROUPED_MX, *MX_LAYERS, *ALIGNED, RUNS) else f'{routine}(backend="{NAMES[name]}")'


def routine_of(op: str, machine: Machine) -> str:
    """The library's name of an operation on a machine."""
    return OF_TWELVE[op] if op in OF_TWELVE and machine.sm // 10 == 12 else ROUTINES[op]


def one_by_one(name: str, p: Problem, machine: Machine) -> bool:
    """Whether the matrices of a batch are multiplied each by itself: CUTLASS's batched product is that of sm120 and
    sm121, and reads the scales of several matrices in tiles of their own (flashinfer-ai/flashinfer 3604)."""
    if name != "flashinfer_cutlass" or p.op != "mxfp8_batched":
        return False
    whole = (p.m or 0) % TILE_ROWS == (p.n or 0) % TILE_ROWS == 0
    return machine.sm // 10 == 10 or not whole and p.groups != 1


def steps(name: str, p: Problem, machine: Machine) -> tuple[str, ...]:
    """How the operands are prepared."""
    if p.op in MX_LAYERS:
        words = ("scales of the weights in 128x4 tiles, four a word",)
        return words if p.op == "moe_nvfp4" else (*words, "the input quantised to MXFP8")
    if p.op == BLOCKS:
        return ("M to a multiple of 4 with zeros, cropped afterwards", "scales [K/128, M] and [K/128, N/128], dense")
    if p.op in ALIGNED:
        tiles = ("the rows of each expert to a multiple of 4 with zeros, cropped afterwards",)
        if p.op == "grouped_contiguous":
            tiles = (f"tiles of {TILE_ROWS} rows in the order of their experts, and back",)
        return (*tiles, *steps(name, replace(p, op=RUNS), machine))
    if p.op == RUNS:
        apart = "[K/128, M + 3 G], the columns of each expert at multiples of 4"
        return (f"scales {apart if machine.sm // 10 == 12 else '[K/128, M]'} and [G, K/128, N/128], dense",)
    done: tuple[str, ...] = ("weight [N, K] transposed, codes dense on 16 bytes",)
    if ROUTINES[p.op] == "mm_fp4":
        done += (f"scales as matrices of whole tiles of {TILE_ROWS} x 4, the weight's transposed",)
    alone = one_by_one(name, p, machine)
    done += ("every matrix by itself",) if alone else ()
    why = UNTUNED.get((name, "mxfp8_product" if alone else p.op), {}).get(machine.sm)
    if why is not None:
        done += (f"excluded from tuning: {why}",)
    return done + NOTED.get((name, p.op, machine.sm // 10), ())


def numerics(name: str, p: Problem, machine: Machine) -> str:
    """One chain over K where the sources show it for every tactic that can run; else that bounds alone hold."""
    base = "sm100" if machine.sm // 10 == 10 else "sm120"
    if one_by_one(name, p, machine):
        return f"{base}.{CHAINS['mxfp8_product']}"
    if name in ("flashinfer_cutlass", "flashinfer_b12x") and p.op in CHAINS:
        return f"{base}.{CHAINS[p.op]}"
    if name == "flashinfer_cute_dsl" and p.op != "mxfp8_product":
        return f"{base}.{CHAINS[p.op]}" if p.op == "mxfp4_product" or not may_cut(p) else "bounds only: it cuts K"
    if name == "flashinfer_cute_dsl":
        return "bounds only: up to 32 rows it cuts K, or multiplies in float16 without scales"
    return "bounds only: the order of its sums is not stated"


def may_cut(p: Problem) -> bool:
    """Whether so few rows may be multiplied by a kernel that cuts K."""
    return p.m is None or p.m <= FEW_ROWS


def _tuning(name: str, op: str, machine: Machine) -> contextlib.AbstractContextManager[Any]:
    """Excludes the call from tuning where :data:`kernels.support.UNTUNED` says so, and no switch allows other bits."""
    routine, why = ROUTINES[op], UNTUNED.get((name, op), {}).get(machine.sm)
    if why is None or why == OTHER_BITS and current_config().split_k:
        return contextlib.nullcontext()
    tuning: contextlib.AbstractContextManager[Any] = library("flashinfer.autotuner").autotune(
        False, skip_ops={TUNED_AS[routine]}
    )
    return tuning


def _run(name: str, op: str, arguments: Mapping[str, Any]) -> None:
    """One call of the library, which shares its scratch memory among all calls of a routine on a device."""
    machine = current_machine()
    routine = routine_of(op, machine)
    with ONE_CALL, _tuning(name, op, machine):
        getattr(library(f"flashinfer.{HOMES.get(routine, 'gemm')}"), routine)(**arguments)


def _matrix(scales: Scales, rows: int, columns: int) -> Tensor:
    """The memory of whole tiles as the matrix ``[align(rows, 128), align(columns, 4)]`` of bytes."""
    return scales.memory.view(torch.uint8).view(-(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // 4) * 4)


@on_its_device
def _product(p: Product, *, name: str, op: str) -> None:
    """One matrix by one weight.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, left, b, right, out, _, alpha, *_ = p
    weight = dense(b[0])
    operands: dict[str, Any] = {"a": dense(a), "b": weight.t(), "out": out, "out_dtype": out.dtype}
    if op == "mxfp8_product":
        operands["a_descale"] = dense(left.memory.view(torch.uint8))
        operands["b_descale"] = dense(right.memory.view(torch.uint8))
    else:
        columns = 2 * a.shape[1] // left.width
        operands["a_descale"] = dense(_matrix(left, a.shape[0], columns))
        operands["b_descale"] = dense(_matrix(right, weight.shape[0], columns)).t()
        factor = torch.ones(1, dtype=torch.float32, device=a.device) if alpha is None else alpha  # CUTLASS's reads one
        operands |= {"alpha": factor, "block_size": left.width, "use_nvfp4": op == "nvfp4_product"}
    _run(name, op, {**operands, "use_8x4_sf_layout": False, "backend": NAMES[name]})


def _of_each(scales: Scales, first: Tensor, count: int, k: int) -> list[Scales]:
    """The scales of each matrix of ``count`` rows in tiles of its own; its first row in the matrix of all scales is
    ``first[g]``."""
    columns = k // scales.width
    whole = scales.memory.view(torch.uint8)
    linear = from_blocked(whole, whole.numel() // (-(-columns // 4) * 4), columns)
    rows = first[:, None] + torch.arange(count, dtype=torch.int32, device=first.device)
    return [scales._replace(memory=to_blocked(linear.index_select(0, at)).reshape(-1)) for at in rows]


@on_its_device
def _batched(p: Product, *, name: str, op: str) -> None:
    """``G`` matrices of as many rows by a weight each.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, left, b, right, out, rows, *_ = p
    (groups, n, k), m = b.shape, a.shape[0] // b.shape[0]
    if one_by_one(name, Problem(op, m=m, n=n, groups=groups), current_machine()):
        assert rows is not None and rows.table is not None, "the operation is that of a table of rows"
        of_a = _of_each(left, rows.table[2], m, k)
        of_b = _of_each(right, rows.table[3], n, k)
        for g in range(groups):
            at = slice(g * m, (g + 1) * m)
            one = p._replace(a=a[at], left=of_a[g], b=b[g : g + 1], right=of_b[g], out=out[at])
            _product(one, name=name, op="mxfp8_product")
        return
    operands = {
        "A": dense(a).view(groups, m, k),
        "B": dense(b).mT,
        "A_scale": dense(left.memory.view(torch.uint8)),
        "B_scale": dense(right.memory.view(torch.uint8)),
        "out": out.view(groups, m, n),
    }
    _run(name, op, {**operands, "dtype": out.dtype, "backend": NAMES[name]})


@on_its_device
def _grouped(p: Product, *, name: str, op: str) -> None:
    """The rows of each expert by its weight; the rows of ``a`` begin and end at multiples of 4.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    a, left, b, right, out, rows, alpha, *_ = p
    assert rows is not None and rows.table is not None, "the operation is that of a table of rows"
    groups, n, _ = b.shape
    columns = a.shape[1] * (1 if a.is_floating_point() else 2) // left.width
    tall, wide = -(-n // TILE_ROWS) * TILE_ROWS, -(-columns // 4) * 4
    operands: dict[str, Any] = {
        "a": dense(a),
        "b": dense(b),
        "a_scale": dense(left.memory.view(torch.uint8)).view(-1, wide),
        "b_scale": dense(right.memory.view(torch.uint8)).view(groups, tall, wide),
        "m_indptr": torch.cat([rows.table[0], rows.table[1, -1:]]),
        "out": out,
        "out_dtype": out.dtype,
    }
    if op == "nvfp4_grouped":
        operands["alpha"] = alpha
    _run(name, op, operands)


@on_its_device
def block_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
) -> None:
    """``gemm_fp8_nt_groupwise`` of float32 scales, into ``out``.

    On sm120 and sm121 it writes nothing and says nothing where its kernel cannot take the operands: these lie densely
    on 16 bytes here, in extents of 128's multiples, with rows of 4's.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    m, n = a.shape[0], b.shape[0]
    lead = m + (-m % ROWS_OF_GROUPWISE)
    scale = a_scale.new_ones(a_scale.shape[1], lead)  # of rows that are zeros
    scale[:, :m] = a_scale.t()
    x = dense(a) if lead == m else torch.cat([dense(a), a.new_zeros(lead - m, a.shape[1])])
    ready = out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0 and lead == m
    target = out if ready else torch.empty(lead, n, dtype=out.dtype, device=out.device)
    operands = {"a": x, "b": dense(b), "a_scale": scale, "b_scale": b_scale.t().contiguous(), "out": target}
    options = {"scale_major_mode": "MN", "mma_sm": 1, "scale_granularity_mnk": (1, BLOCK, BLOCK)}
    _run("flashinfer_cutlass", BLOCKS, {**operands, **options, "backend": "cutlass"})
    if not ready:
        out.copy_(target[:m])


@on_its_device
def block_product_by_trtllm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, float_scales: bool
) -> None:
    """``gemm_fp8_nt_groupwise`` of TensorRT-LLM, which takes every output for bf16: the scales of the input lie column
    by column, those of the weight row by row.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    m = a.shape[0]
    lead = m + (-m % ROWS_OF_GROUPWISE)
    scale = a_scale.new_ones(a_scale.shape[1], lead)  # of rows that are zeros
    scale[:, :m] = a_scale.t()
    x = dense(a) if lead == m else torch.cat([dense(a), a.new_zeros(lead - m, a.shape[1])])
    target = torch.empty(lead, b.shape[0], dtype=out.dtype, device=out.device)
    operands = {"a": x, "b": dense(b), "a_scale": scale.t(), "b_scale": dense(b_scale), "out": target}
    _run("flashinfer_trtllm", BLOCKS, {**operands, "backend": "trtllm"})
    out.copy_(target[:m])


@on_its_device
def block_runs(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indptr: Tensor) -> None:
    """Rows ``m_indptr[g]`` to ``m_indptr[g + 1]`` by the weight of each expert, float32 scales, into ``out``.

    On sm100 and sm103 ``group_gemm_fp8_nt_groupwise``, whose borders are multiples of 4. On sm120 and sm121, where that
    is wrong for several experts, ``moe_gemm_fp8_nt_groupwise`` of rows that begin at 0: the scales of expert ``g``
    begin at column ``(m_indptr[g] + 3 g) // 4 * 4``, so that no two experts share four columns.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    (m, k), groups = a.shape, b.shape[0]
    twelve = current_machine().sm // 10 == 12
    lead = (m + 3 * groups) // 4 * 4 if twelve else m + (-m % ROWS_OF_GROUPWISE)
    if twelve:
        first = (m_indptr[:-1] + 3 * torch.arange(groups, dtype=torch.int32, device=a.device)) // 4 * 4
        column = torch.arange(lead, dtype=torch.int32, device=a.device)
        group = torch.searchsorted(first, column, right=True).sub_(1).clamp_(min=0)
        row = m_indptr[group] + column - first[group]
        scale = a_scale.t()[:, row.clamp_(0, m - 1)].contiguous()  # padding holds the scale of some row
    else:
        scale = a_scale.new_ones(k // BLOCK, lead)  # of rows that are not there
        scale[:, :m] = a_scale.t()
    ready = out.is_contiguous() and out.data_ptr() % ALIGNMENT == 0
    target = out if ready else torch.zeros(out.shape, dtype=out.dtype, device=out.device)
    operands = {"a": dense(a), "b": dense(b), "a_scale": scale, "b_scale": b_scale.mT.contiguous(), "out": target}
    options = {"scale_granularity_mnk": (1, BLOCK, BLOCK), "scale_major_mode": "MN"}
    _run("flashinfer_cutlass", RUNS, {**operands, **options, "m_indptr": m_indptr.contiguous()})
    if not ready:
        out.copy_(target)


@on_its_device
def grouped_contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indices: Tensor, float_scales: bool
) -> None:
    """Tiles of :data:`~kernels.support.TILE_ROWS` rows, each of the expert of its first row, as :func:`block_runs`:
    tiles of one expert are brought together, and those of none behind all.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    m, groups = a.shape[0], b.shape[0]
    first = m_indices[::TILE_ROWS]
    owner, order = torch.where(first < 0, groups, first).sort(stable=True)
    within = torch.arange(TILE_ROWS, dtype=torch.int64, device=a.device)
    rows = (order[:, None] * TILE_ROWS + within).reshape(-1)
    source = rows.clamp(max=m - 1)  # behind the last row: of a tile that is not full
    experts = torch.arange(groups + 1, dtype=owner.dtype, device=a.device)
    borders = torch.searchsorted(owner, experts, out_int32=True) * TILE_ROWS
    codes = a.view(torch.uint8).index_select(0, source).view(a.dtype)
    together = torch.zeros(len(rows), out.shape[1], dtype=out.dtype, device=out.device)
    block_runs(codes, a_scale.index_select(0, source), b, b_scale, together, borders)
    out.copy_(together.index_select(0, rows.argsort()[:m]))


@on_its_device
def grouped_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    float_scales: bool,
) -> None:
    """All rows of every expert as :func:`block_runs`, those past ``masked_m`` too, which may hold anything.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    groups, m, k = a.shape
    lead = m + (-m % ROWS_OF_GROUPWISE)
    codes = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, lead - m)).view(a.dtype)
    scale = torch.nn.functional.pad(a_scale, (0, 0, 0, lead - m), value=1.0)
    borders = torch.arange(groups + 1, dtype=torch.int32, device=a.device) * lead
    whole = torch.empty(groups * lead, out.shape[2], dtype=out.dtype, device=out.device)
    block_runs(codes.view(-1, k), scale.reshape(groups * lead, -1), b, b_scale, whole, borders)
    out.copy_(whole.view(groups, lead, -1)[:, :m])


@on_its_device
def moe_blocks(
    op: str,
    x: Tensor,
    x_scale: Tensor | None,
    weights: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    topk_weights: Tensor,
    local: Tensor,
    globals_: tuple[Tensor | None, Tensor | None],
    factors: tuple[Tensor | None, Tensor | None],
    gates: Tensor | None,
    combine: str,
) -> Tensor:
    """``cutlass_fused_moe``: the scales of a recipe are a list in an order of its own.

    NVFP4 quantises its input itself; the others take E4M3 codes with E8M0 scales in 128x4 tiles. Ids of other ranks are
    -1, which no expert is. Without ``atomic`` the outputs of a token's experts are added in the order of its slots.

    Operands and results as of :class:`~kernels.backends.declaration.Backend`.
    """
    experts, four = weights[0].shape[0], op != "moe_mxfp8"
    ones = torch.ones(experts, dtype=torch.float32, device=x.device)
    alphas = [ones if factor is None else factor.contiguous() for factor in factors]
    words = [
        dense(scale).view(experts, -(-w.shape[1] // TILE_ROWS) * TILE_ROWS, -1).view(torch.int32)
        for w, scale in zip(weights, scales, strict=True)
    ]
    arguments: dict[str, Any] = {"input": dense(x)}
    if op == "moe_nvfp4":
        assert globals_[0] is not None and globals_[1] is not None, "checked"
        order = [globals_[0].contiguous(), words[0], alphas[0], globals_[1].contiguous(), words[1], alphas[1]]
    else:
        arguments |= {"input_sf": x_scale, "use_mxfp8_act_scaling": True}
        order = [words[0], alphas[0], words[1], alphas[1]]
    if gates is not None:
        names = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
        arguments |= {name: column.contiguous() for name, column in zip(names, gates.unbind(1), strict=True)}
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    with ONE_CALL:
        library("flashinfer.fused_moe").cutlass_fused_moe(
            **arguments,
            token_selected_experts=local.to(torch.int32).contiguous(),
            token_final_scales=dense(topk_weights),
            fc1_expert_weights=dense(weights[0]).view(torch.int64) if four else dense(weights[0]),
            fc2_expert_weights=dense(weights[1]).view(torch.int64) if four else dense(weights[1]),
            output_dtype=out.dtype,
            quant_scales=order,
            output=out,
            use_fused_finalize=combine == "atomic",
        )
    return out


def missing(name: str, p: Problem, machine: Machine) -> str | None:
    """A release may lack a routine, or the machine what its kernels are generated with."""
    routine = routine_of(p.op, machine)
    found = hasattr(library(f"flashinfer.{HOMES.get(routine, 'gemm')}"), routine)
    return None if found else f"this release has no {routine}; install a newer one"


def _backend(
    name: str,
    blocks: Gemm | None = None,
    runs: Callable[..., None] | None = None,
    moe_blocks: Callable[..., Tensor] | None = None,
    aligned: tuple[Callable[..., None], Callable[..., None]] | None = None,
    **functions: Callable[..., None],
) -> Backend:
    bound: dict[str, Any] = {op: partial(run, name=name, op=op) for op, run in functions.items()}
    bound |= {} if blocks is None else {"block_product": blocks}
    bound |= {} if runs is None else {"block_runs": runs}
    bound |= {} if moe_blocks is None else {"moe_blocks": moe_blocks}
    bound |= {} if aligned is None else {**dict(zip(ALIGNED, aligned, strict=True)), "alignment": lambda: TILE_ROWS}
    parts: dict[str, Callable[..., Any]] = {"kernel": kernel, "steps": steps, "missing": missing, "numerics": numerics}
    bound |= {part: partial(of, name) for part, of in parts.items()}
    return Backend(name=name, **bound)


BACKENDS: Mapping[str, Backend] = {
    "flashinfer_cutlass": _backend(
        "flashinfer_cutlass",
        mxfp8_product=_product,
        nvfp4_product=_product,
        mxfp8_batched=_batched,
        mxfp8_mxfp4_grouped=_grouped,
        nvfp4_grouped=_grouped,
        blocks=block_product,
        runs=block_runs,
        moe_blocks=moe_blocks,
        aligned=(grouped_contiguous, grouped_masked),
    ),
    "flashinfer_trtllm": _backend("flashinfer_trtllm", blocks=block_product_by_trtllm),
    "flashinfer_b12x": _backend(
        "flashinfer_b12x", mxfp8_product=_product, nvfp4_product=_product, mxfp4_product=_product
    ),
    "flashinfer_cudnn": _backend(
        "flashinfer_cudnn",
        mxfp8_product=_product,
        nvfp4_product=_product,
        mxfp4_product=_product,
        mxfp8_batched=_batched,
    ),
    "flashinfer_cute_dsl": _backend(
        "flashinfer_cute_dsl", mxfp8_product=_product, nvfp4_product=_product, mxfp4_product=_product
    ),
}
