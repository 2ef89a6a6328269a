"""Blackwell's libraries on a CPU: FlashInfer's, vLLM's and torch's signatures, behind which the oracle multiplies.

A fake reads its operands as the library does, by address: matrices as dense memory, scales from the places that the
library's layout gives them, whatever the shapes say. It refuses what the library's own checks refuse, and what its
kernels cannot do although no check says so is refused here as well, so that a plan which admits it is seen.

:func:`simulated` puts them in the place of the libraries, under a described machine: the production layer plans for the
machine, prepares the operands, and calls the fake.

Sources: FlashInfer 0.7.2.post1 (gemm/gemm_base.py, csrc), vLLM (csrc/libtorch_stable/quantization/fp4), torch 2.13.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from kernels import routes
from kernels.backends import cutlass, deep_gemm, eager, flashinfer, triton_mx, triton_quant
from kernels.config import Config, use_config
from kernels.platform import Machine, use_machine
from kernels.records import Problem
from kernels.support import ALIGNED, MIXED, RUNS
from oracle.tensorcore.instructions import ALIKE
from oracle.truth.layout import swizzle_scale, unrotate_weights, unswizzle_scale

E4M3, E5M2, UE8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
HALVES = (torch.bfloat16, torch.float16)
NAN_BYTE = 0x7F
WRITTEN = ("out", "d", "output", "out_tensors")
"""Arguments that a library writes into."""
TEN, TWELVE = (100, 103), (120, 121)
CLAIMS: Mapping[tuple[str, str], tuple[int, ...]] = {
    # (routine, backend): capabilities that its requirement function claims
    ("mm_mxfp8", "cutlass"): (*TEN, *TWELVE),
    ("mm_mxfp8", "cute-dsl"): TEN,
    ("mm_mxfp8", "cudnn"): (*TEN, *TWELVE),
    ("mm_mxfp8", "trtllm"): TEN,
    ("mm_mxfp8", "b12x"): TWELVE,
    ("mm_fp4", "cutlass"): (*TEN, *TWELVE),
    ("mm_fp4", "cute-dsl"): (*TEN, *TWELVE),
    ("mm_fp4", "cudnn"): (*TEN, *TWELVE),
    ("mm_fp4", "trtllm"): TEN,
    ("mm_fp4", "b12x"): TWELVE,
    ("bmm_fp8", "cublas"): (*TEN, *TWELVE),
    ("bmm_fp8", "cudnn"): (*TEN, *TWELVE),
    ("bmm_mxfp8", "cutlass"): TWELVE,
    ("bmm_mxfp8", "cudnn"): (*TEN, *TWELVE),
    ("group_gemm_mxfp8_mxfp4_nt_groupwise", ""): (*TEN, *TWELVE),
    ("group_gemm_nvfp4_nt_groupwise", ""): TWELVE,
    ("gemm_fp8_nt_groupwise", "cutlass"): (*TEN, *TWELVE),
    ("gemm_fp8_nt_groupwise", "trtllm"): TEN,
    ("group_gemm_fp8_nt_groupwise", ""): (*TEN, *TWELVE),
    ("moe_gemm_fp8_nt_groupwise", "cute"): TWELVE,
}
ONE_CHAIN = ("cutlass", "b12x")
"""Backends whose kernels take K in one chain; of the others the sum is exact, which any order of sums may give."""


class SfLayout(enum.IntEnum):
    """FlashInfer's words for how scales lie."""

    layout_128x4, layout_8x4, layout_linear = range(3)


class LibraryError(Exception):
    """What a library raises."""


def need(holds: bool, why: str) -> None:
    if not holds:
        raise LibraryError(why)


@dataclass
class Made:
    """One call that reached a fake: by every parameter of the routine."""

    routine: Callable[..., Tensor | None]
    name: str
    arguments: dict[str, Any]
    excluded: frozenset[str] = frozenset()

    def again(self, **changed: Any) -> Tensor:
        """The output of the call with other arguments, written into fresh memory full of NaN."""
        arguments = {**self.arguments, **changed}
        written = next((name for name in WRITTEN if arguments.get(name) is not None), None)
        if written:
            arguments[written] = torch.full_like(arguments[written], float("nan"))
        libraries: Libraries = self.routine.__self__  # type: ignore[attr-defined]
        libraries.rounded = True
        made = self.routine(**arguments)
        out: Tensor = arguments[written] if written else made
        return out


def dense(name: str, x: Tensor) -> Tensor:
    """An operand that the library takes for dense memory on 16 bytes."""
    need(x.is_contiguous() and x.data_ptr() % 16 == 0, f"{name} must be contiguous")
    return x


def flat(scale: Tensor, size: int) -> Tensor:
    """``size`` bytes from the address of the scales: NaN where the memory ends before."""
    held = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    held = held.as_strided((held.numel(),), (1,))
    ready = torch.full((size,), NAN_BYTE, dtype=torch.uint8)
    ready[: min(size, held.numel())] = held[:size]
    return ready


def address(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """A dense matrix of this shape from the address of ``x``: NaN where its memory ends before."""
    need(x.dtype is torch.float32, "scales must be float32")
    held = x.as_strided((min(x.numel(), shape[0] * shape[1]),), (1,))
    ready = torch.full((shape[0] * shape[1],), float("nan"))
    ready[: held.numel()] = held
    return ready.view(shape)


def stored_as(contract: str, out: Tensor) -> dict[str, torch.dtype]:
    """The output's dtype as an option, where the contract has one."""
    named = any(option.name == "out_dtype" for option in oracle.contracts()[contract].options)
    return {"out_dtype": out.dtype} if named else {}


def tiles(rows: int, columns: int, height: int = 128) -> int:
    return -(-rows // height) * height * (-(-columns // 4) * 4)


class Libraries:
    """FlashInfer, vLLM's operators and torch's product, for one machine; ``calls``: what reached them."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.calls = machine, list[Made]()
        self.base = ALIKE.get(machine.arch, machine.arch)
        self.excluded: frozenset[str] = frozenset()
        self.rounded = False
        """Whether sums are exact and rounded once, instead of those of the chain: for calls that bounds judge."""

    # --- what they compute ------------------------------------------------------------------------------------------

    def multiply(
        self, contract: str, inputs: Mapping[str, Tensor], out: Tensor, chain: str, backend: str, **options: Any
    ) -> Tensor:
        """The contract's product of these operands into ``out``."""
        if backend in ONE_CHAIN and not self.rounded:
            names = {**stored_as(contract, out), **options}
            made = oracle.predict(contract, inputs, numerics=f"{self.base}.{chain}", **names)
        else:
            made = oracle.reference(contract, inputs, **stored_as(contract, out), **options)
        assert isinstance(made, Tensor)
        return out.copy_(torch.where(made.isnan() & out.isnan(), out, made))

    def claims(self, routine: str, backend: str = "") -> None:
        need(backend != "auto", "the list of auto belongs to the process")
        need((routine, backend) in CLAIMS, f"{routine} has no backend {backend}")
        need(self.machine.sm in CLAIMS[routine, backend], f"{routine} {backend} does not support {self.machine.arch}")

    # --- FlashInfer -------------------------------------------------------------------------------------------------

    def mm_mxfp8(
        self,
        a: Tensor,
        b: Tensor,
        a_descale: Tensor,
        b_descale: Tensor,
        out: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        use_8x4_sf_layout: bool = False,
        backend: str = "auto",
    ) -> Tensor:
        """``a [M, K]`` times the column-major ``b [K, N]``, E4M3, scales flat in tiles."""
        self.claims("mm_mxfp8", backend)
        need(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], "K dimension mismatch")
        (m, k), n = a.shape, b.shape[1]
        need(n >= 128 and k >= 128, "MXFP8 requires n >= 128 and k >= 128")
        need(a.dtype is b.dtype is E4M3, "a and b must be float8_e4m3fn")
        need(a_descale.dtype is b_descale.dtype is torch.uint8, "scales must be uint8")
        need(a_descale.dim() == b_descale.dim() == 1, "scales must be 1-D")
        height = 8 if use_8x4_sf_layout else 128
        need(a_descale.numel() == tiles(m, k // 32, height), "a_descale shape mismatch")
        need(b_descale.numel() == tiles(n, k // 32, height), "b_descale shape mismatch")
        need(out_dtype in HALVES, "unsupported output dtype")
        out = torch.empty(m, n, dtype=out_dtype) if out is None else out
        need(out.shape == (m, n) and out.dtype is out_dtype, "output mismatch")
        need(not use_8x4_sf_layout, "the provided scale layout is not supported")
        need(k % (128 if backend == "b12x" else 32) == 0, "K")
        need(backend != "cutlass" or n % 32 == 0, "N must be divisible by 32")
        operands = {"a": dense("a", a), "b": dense("b", b.t()).t(), "a_descale": dense("a_descale", a_descale)}
        operands["b_descale"] = dense("b_descale", b_descale)
        return self.multiply("mm_mxfp8", operands, dense("out", out), "chain_ue8m0", backend)

    def mm_fp4(
        self,
        a: Tensor,
        b: Tensor,
        a_descale: Tensor,
        b_descale: Tensor,
        alpha: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        out: Tensor | None = None,
        block_size: int = 16,
        use_8x4_sf_layout: bool = False,
        backend: str = "auto",
        use_nvfp4: bool = True,
        enable_pdl: bool = True,
    ) -> Tensor:
        """``a [M, K/2]`` times the column-major ``b [K/2, N]``; the transposed ``b_descale``; no size is checked."""
        self.claims("mm_fp4", backend)
        need(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], "K dimension mismatch")
        need(a.dtype is b.dtype is torch.uint8, "a and b must be packed into uint8")
        need({a_descale.dtype, b_descale.dtype} <= {torch.uint8, E4M3}, "scales")
        need(alpha is None or alpha.dtype is torch.float32, "alpha must be float32")
        need(alpha is None or alpha.numel() == 1 or alpha.numel() == a.shape[0], "alpha must be a scalar")
        need(alpha is None or alpha.numel() == 1 or backend == "cute-dsl", "per-token alpha is the CuTe DSL's")
        need(out_dtype in HALVES, "unsupported output dtype")
        need(block_size == (16 if use_nvfp4 else 32), "block_size")
        need(not use_8x4_sf_layout, "only TRTLLM supports 8x4")
        need(use_nvfp4 or backend not in ("cutlass", "trtllm"), "only cudnn supports mxfp4")
        need(backend != "cute-dsl" or self.machine.sm in TEN and b.shape[1] % 8 == 0, "N % 8")
        need(backend != "cutlass" or alpha is not None, "globalScale must be a tensor")
        (m, half), n = a.shape, b.shape[1]
        out = torch.empty(m, n, dtype=out_dtype) if out is None else out
        need(out.shape == (m, n) and out.dtype is out_dtype, "output mismatch")
        need(2 * half % 32 == 0 and (backend != "cutlass" or n % 32 == 0), "K and N must be divisible by 32")
        columns = 2 * half // block_size
        operands = {"a": dense("a", a), "b": dense("b", b.t()).t()}
        operands["a_descale"] = flat(dense("a_descale", a_descale), tiles(m, columns))
        operands["b_descale"] = flat(dense("b_descale", b_descale.t()), tiles(n, columns))
        chain = "chain_nvf4" if use_nvfp4 else "chain_mxf4"
        options = {"block_size": block_size, "use_nvfp4": use_nvfp4}
        one = "cutlass" if backend == "cute-dsl" and not use_nvfp4 else backend  # its MXFP4 kernels never cut K
        dense("out", out)
        for factor in (None,) if alpha is None else alpha.unique():  # the product of each, of which rows are taken
            mine = operands if factor is None else {**operands, "alpha": factor.reshape(1)}
            made = self.multiply("mm_fp4", mine, torch.empty_like(out), chain, one, **options)
            rows = slice(None) if alpha is None else (alpha == factor).expand(m)
            out[rows] = made[rows]
        return out

    def bmm_mxfp8(
        self,
        A: Tensor,
        B: Tensor,
        A_scale: Tensor,
        B_scale: Tensor,
        dtype: torch.dtype,
        out: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Lengths are those of all rows as one matrix; each matrix is read in tiles of its own."""
        self.claims("bmm_mxfp8", backend)
        need(A.dim() == B.dim() == 3 and A.shape[2] == B.shape[1], "K dimension mismatch")
        (batch, m, k), n = A.shape, B.shape[2]
        need(n >= 128 and k >= 128, "MXFP8 requires n >= 128 and k >= 128")
        need(A_scale.dim() == B_scale.dim() == 1, "scales must be 1-D")
        need(A_scale.dtype is B_scale.dtype is torch.uint8, "scales must be uint8")
        need(A_scale.numel() == tiles(batch * m, k // 32) and B_scale.numel() == tiles(batch * n, k // 32), "scales")
        need(dtype in HALVES, "unsupported output dtype")
        out = torch.empty(batch, m, n, dtype=dtype) if out is None else out
        need(out.shape == (batch, m, n) and out.dtype is dtype, "output mismatch")
        need(backend != "cutlass" or A.dtype is B.dtype is E4M3 and k % 32 == n % 32 == 0, "cutlass takes E4M3")
        operands = {"a": dense("A", A), "b": dense("B", B.mT).mT}
        operands["a_scale"] = flat(dense("A_scale", A_scale), batch * tiles(m, k // 32))
        operands["b_scale"] = flat(dense("B_scale", B_scale), batch * tiles(n, k // 32))
        return self.multiply("bmm_mxfp8", operands, dense("out", out), "chain_ue8m0", backend, placement="batch")

    def group_gemm_mxfp8_mxfp4_nt_groupwise(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        m_indptr: Tensor,
        mma_sm: int = 1,
        tile_m: int = 128,
        tile_n: int = 128,
        tile_k: int = 128,
        swap_ab: bool = True,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        need(a.dtype in (E4M3, E5M2) and b.dtype is torch.uint8, "a and b")
        need(mma_sm in (1,) if self.machine.sm in TWELVE else mma_sm in (1, 2), "mma_sm")
        need(tile_m == 128 and tile_k in ((128,) if self.machine.sm in TWELVE else (128, 256)), "tile")
        need(tile_n in ((32, 64, 128) if self.machine.sm in TWELVE else (64, 128, 192, 256)), "tile_n")
        return self._groups(
            "group_gemm_mxfp8_mxfp4_nt_groupwise", a, b, a_scale, b_scale, m_indptr, None, out, out_dtype
        )

    def group_gemm_nvfp4_nt_groupwise(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        m_indptr: Tensor,
        alpha: Tensor | None = None,
        tile_m: int = 128,
        tile_n: int = 128,
        tile_k: int = 128,
        swap_ab: bool = True,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        need(a.dtype is b.dtype is torch.uint8, "a and b")
        need(tile_m == 128 and tile_n in (32, 64, 128) and tile_k in (128, 256), "tile")
        return self._groups("group_gemm_nvfp4_nt_groupwise", a, b, a_scale, b_scale, m_indptr, alpha, out, out_dtype)

    def _groups(
        self,
        name: str,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        m_indptr: Tensor,
        alpha: Tensor | None,
        out: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        self.claims(name)
        need(a_scale.dtype is b_scale.dtype is torch.uint8 and m_indptr.dtype is torch.int32, "dtypes")
        groups, n, half = b.shape
        k, width = 2 * half, 32 if a.is_floating_point() else 16
        need(m_indptr.numel() == groups + 1 and a.shape[1] * (1 if a.is_floating_point() else 2) == k, "shapes")
        need(n % 8 == 0 and k % 128 == 0, "N % 8 and K % 128")
        out_dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)
        need(out_dtype in HALVES, "unsupported output dtype")
        out = torch.empty(a.shape[0], n, dtype=out_dtype) if out is None else out
        need(out.shape == (a.shape[0], n) and out.dtype is out_dtype, "output mismatch")
        need(bool((m_indptr % 4 == 0).all()), "the kernels read runs of rows that begin elsewhere wrongly")
        need(alpha is None or alpha.dtype is torch.float32 and alpha.shape == (groups,), "alpha")
        real = int(m_indptr[-1])  # no group reads a row behind its last, nor writes one
        rows = (real + 127 * groups) // 128 * 128
        operands = {"a": dense("a", a)[:real], "b": dense("b", b), "m_indptr": dense("m_indptr", m_indptr)}
        operands["a_scale"] = flat(dense("a_scale", a_scale), tiles(rows, k // width))
        operands["b_scale"] = flat(dense("b_scale", b_scale), groups * tiles(n, k // width))
        if alpha is not None:
            operands["alpha"] = alpha
        chain = "chain_ue8m0" if a.is_floating_point() else "chain_nvf4"
        self.multiply(name, operands, dense("out", out)[:real], chain, "cutlass")
        return out

    def gemm_fp8_nt_groupwise(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        scale_major_mode: str | None = None,
        mma_sm: int = 1,
        scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        backend: str = "cutlass",
    ) -> Tensor:
        """``a [M, K]`` by ``b [N, K]`` with float32 scales, whose shapes nobody checks; on sm120 a kernel that cannot
        take the operands writes nothing."""
        self.claims("gemm_fp8_nt_groupwise", backend)
        trtllm = backend == "trtllm"
        need(trtllm or scale_major_mode in ("MN", "K"), "scale_major_mode is required in CUTLASS")
        need(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1], "Shape mismatch")
        need(scale_granularity_mnk == (1, 128, 128), "granularity")
        (m, k), n = a.shape, b.shape[0]
        out_dtype = out_dtype or torch.bfloat16 if out is None else out.dtype
        need(out_dtype in HALVES, "unsupported output dtype")
        out = torch.empty(m, n, dtype=out_dtype) if out is None else out
        need(not trtllm or k >= 256 and out.dtype is torch.bfloat16, "TensorRT-LLM writes bf16 of K from 256")
        if k % 16 or n % 8 or m % 4 or a.data_ptr() % 16 or b.data_ptr() % 16:
            need(self.machine.sm in TWELVE, "can_implement failed")
            return out
        shapes = (
            ((k // 128, m), (k // 128, n // 128)) if scale_major_mode == "MN" else ((m, k // 128), (n // 128, k // 128))
        )
        shapes = ((k // 128, m), (n // 128, k // 128)) if trtllm else shapes
        memory = [address(x, shape) for x, shape in zip((a_scale, b_scale), shapes, strict=True)]
        turned = (True, False) if trtllm else (scale_major_mode == "MN",) * 2
        left, right = (x.t() if turn else x for x, turn in zip(memory, turned, strict=True))
        operands = {"a": dense("a", a), "b": dense("b", b), "a_scale": left.contiguous(), "b_scale": right.contiguous()}
        return self.multiply("fp8_gemm_nt", operands, dense("out", out), "", "exact")

    def quantised(
        self, contract: str, inputs: Mapping[str, Tensor], numerics: str, **options: Any
    ) -> tuple[Tensor, ...]:
        """Codes and scale bytes by a recipe of the library."""
        need(self.machine.sm in (*TEN, *TWELVE), "empty below sm100")
        need(inputs["x"].dtype in HALVES and inputs["x"].is_contiguous(), "fp16 or bf16")
        made = oracle.predict(contract, inputs, numerics=numerics, **options)
        assert isinstance(made, dict)
        return made["q"], made["scale"]

    def mxfp8_quantize(
        self,
        input: Tensor,
        is_sf_swizzled_layout: bool = True,
        alignment: int = 32,
        enable_pdl: bool | None = None,
        backend: str = "cuda",
        sf_swizzle_layout: Any = None,
    ) -> tuple[Tensor, ...]:
        """``sf_swizzle_layout`` goes before the flag where both are there."""
        need(backend == "cuda" and alignment % 32 == 0, "backend")
        flagged = SfLayout.layout_128x4 if is_sf_swizzled_layout else SfLayout.layout_linear
        layout = flagged if sf_swizzle_layout is None else sf_swizzle_layout
        options = {"layout": layout.name[7:], "alignment": alignment}
        q, scale = self.quantised("mxfp8_quantize", {"x": input}, "flashinfer_mxfp8_1x32", **options)
        return q, scale.reshape(-1)

    def mxfp4_quantize(
        self,
        a: Tensor,
        backend: str = "cuda",
        enable_pdl: bool | None = None,
        sfLayout: Any = None,
    ) -> tuple[Tensor, ...]:
        need(backend == "cuda", "backend")
        return self.quantised("mxfp4_quantize", {"x": a}, "flashinfer_mxfp4", layout=sfLayout.name[7:])

    def nvfp4_quantize(
        self,
        a: Tensor,
        a_global_sf: Tensor,
        sfLayout: Any = None,
        do_shuffle: bool = False,
        sf_vec_size: int = 16,
        enable_pdl: bool | None = None,
        backend: str = "cuda",
        per_token_activation: bool = False,
        expanded_idx_to_permuted_idx: Any = None,
        out_scale: Any = None,
        nvfp4_4over6: Any = "of the environment",
    ) -> tuple[Tensor, ...]:
        """Scales as a matrix of whole tiles, or ``[M, K / 16]``."""
        need(backend == "cuda" and sf_vec_size == 16 and not do_shuffle and not per_token_activation, "options")
        need(nvfp4_4over6 is None, "the environment may choose other scales")
        need(a_global_sf.dtype is torch.float32 and a_global_sf.shape == (1,), "global scale")
        inputs = {"x": a, "global_scale": a_global_sf}
        q, scale = self.quantised("nvfp4_quantize", inputs, "flashinfer_nvfp4", layout=sfLayout.name[7:])
        return q, scale.view(-1, -(-(a.shape[1] // 16) // 4) * 4) if sfLayout is not SfLayout.layout_linear else scale

    def trtllm_fp8_per_tensor_scale_moe(
        self,
        routing_logits: Tensor,
        routing_bias: Tensor | None,
        hidden_states: Tensor,
        gemm1_weights: Tensor,
        output1_scales_scalar: Tensor,
        output1_scales_gate_scalar: Tensor,
        gemm2_weights: Tensor,
        output2_scales_scalar: Tensor,
        num_experts: int,
        top_k: int,
        n_group: int | None,
        topk_group: int | None,
        intermediate_size: int,
        local_expert_offset: int,
        local_num_experts: int,
        routed_scaling_factor: float | None,
        use_routing_scales_on_input: bool,
        routing_method_type: int = 0,
        do_finalize: bool = True,
        enable_pdl: bool | None = None,
        tune_max_num_tokens: int = 8192,
        activation_type: int = 3,
        norm_topk_prob: bool = True,
        routing_replay_out: Tensor | None = None,
        output: Tensor | None = None,
        gemm1_clamp_limit: Tensor | None = None,
    ) -> Tensor:
        """Weights as its kernel reads them: rows of up before those of gate, interleaved, shuffled for tiles of 128. It
        multiplies codes; scales of powers of two are told apart without a rounding."""
        need(self.machine.sm in TEN, "kernel not found")  # its launcher takes major 12 too, without cubins
        need(routing_bias is None and top_k == 1 and routing_method_type == 3, "routing of Llama-4")
        need(use_routing_scales_on_input and routed_scaling_factor is None, "routing of Llama-4")
        need((n_group, topk_group) in ((None, None), (0, 0)), "no groups of experts")
        need(do_finalize and activation_type == 3 and norm_topk_prob and gemm1_clamp_limit is None, "options")
        need(routing_replay_out is None and output is None, "options")
        experts, hidden, inner = gemm2_weights.shape
        need(hidden_states.dtype is gemm1_weights.dtype is gemm2_weights.dtype is E4M3, "codes")
        need(tuple(gemm1_weights.shape) == (experts, 2 * inner, hidden) and inner == intermediate_size, "extents")
        need(local_num_experts == experts and routing_logits.shape[1] == num_experts, "experts")
        need(local_expert_offset % experts == 0 and local_expert_offset + experts <= num_experts, "experts")
        scales = {"1": output1_scales_scalar, "gate": output1_scales_gate_scalar, "2": output2_scales_scalar}
        need(all(s.dtype is torch.float32 and s.shape == (experts,) for s in scales.values()), "scales")
        w31, w2 = unrotate_weights(dense("w1", gemm1_weights), dense("w2", gemm2_weights))
        stored = scales["gate"] / scales["1"]  # the static scale of what lies between both products
        need(bool((stored == stored[0]).all()), "one scale of the intermediate")
        operands = {
            "hidden_states": dense("x", hidden_states).float(),
            "router_logits": dense("logits", routing_logits),
            "w13": torch.cat([w31[:, inner:], w31[:, :inner]], dim=1),
            "w13_scale": scales["gate"],
            "w13_input_scale": torch.ones(1),
            "w2": w2,
            "w2_scale": scales["2"] / stored[0],
            "w2_input_scale": stored[:1],
        }
        rank, out = local_expert_offset // experts, torch.empty(hidden_states.shape, dtype=torch.bfloat16)
        options = {"ep_rank": rank, "weight_dtype": torch.float32}
        return self.multiply("apply_fi_trtllm_fp8_per_tensor_moe", operands, out, "", "", **options)

    def group_gemm_fp8_nt_groupwise(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        m_indptr: Tensor,
        scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
        scale_major_mode: str = "MN",
        mma_sm: int = 1,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        backend: str = "trtllm",
        segment_alignment: int = 1,
    ) -> Tensor:
        """``a [M, K]`` by ``b [G, N, K]`` with float32 scales, read by address; a block of K has as many as
        ``a_scale`` has columns."""
        self.claims("group_gemm_fp8_nt_groupwise", "" if backend == "trtllm" else backend)
        need(self.machine.sm in TEN or len(b) == 1, "correctness issues for num_groups > 1 on SM120/121")
        need(mma_sm in (1, 2) and segment_alignment == 1, "options")
        need(out_dtype is None or out is None or out.dtype is out_dtype, "dtype mismatch")
        out_dtype = out_dtype or torch.bfloat16 if out is None else out.dtype
        need(out_dtype in HALVES, "unsupported output dtype")
        need(bool((m_indptr % 4 == 0).all()), "each value in m_indptr should be padded to a multiple of 4")
        need(a_scale.dim() == 2 and a_scale.shape[1] % 4 == 0, "copies of 16 bytes")
        ends = m_indptr.tolist()
        columns = [ends[0] + row for row in range(ends[-1] - ends[0])]
        return self._block_groups(
            a, b, a_scale, b_scale, m_indptr, scale_granularity_mnk, scale_major_mode, out, out_dtype,
            columns, a_scale.shape[1],
        )  # fmt: skip  # the operands of the library, and the columns of scales

    def moe_gemm_fp8_nt_groupwise(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        m_indptr: Tensor,
        scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
        scale_major_mode: str = "MN",
        backend: str = "cute",
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """The same of rows in runs of any length; the columns of an expert's scales begin at multiples of 4."""
        self.claims("moe_gemm_fp8_nt_groupwise", backend)
        need(not is_gated, "fused SwiGLU")
        out_dtype = out_dtype or torch.bfloat16 if out is None else out.dtype if out_dtype is None else out_dtype
        need(out_dtype is torch.bfloat16, "only out_dtype=torch.bfloat16 is supported")
        ends = m_indptr.tolist()
        need(ends[0] == 0, "m_indptr[0] = 0")
        columns = [
            (begin + 3 * g) // 4 * 4 + row
            for g, (begin, end) in enumerate(itertools.pairwise(ends))
            for row in range(end - begin)
        ]
        return self._block_groups(
            a, b, a_scale, b_scale, m_indptr, scale_granularity_mnk, scale_major_mode, out, out_dtype,
            columns, (a.shape[0] + 3 * len(b)) // 4 * 4,
        )  # fmt: skip  # the operands of the library, and the columns of scales

    def _block_groups(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        m_indptr: Tensor,
        granularity: tuple[int, int, int],
        mode: str,
        out: Tensor | None,
        out_dtype: torch.dtype,
        columns: list[int],
        lead: int,
    ) -> Tensor:
        """``columns``: where the scale of each row lies in a block of K, of ``lead`` columns."""
        need(mode == "MN" and granularity == (1, 128, 128), "scales")
        need(a.dtype is b.dtype is E4M3 and m_indptr.dtype is torch.int32, "dtypes")
        groups, n, k = b.shape
        need(a.dim() == 2 and a.shape[1] == k and m_indptr.shape == (groups + 1,), "Shape mismatch")
        need(n % 128 == k % 128 == 0, "n and k")
        out = torch.empty(a.shape[0], n, dtype=out_dtype) if out is None else out
        need(out.shape == (a.shape[0], n) and out.dtype is out_dtype, "output mismatch")
        begin, end = int(m_indptr[0]), int(m_indptr[-1])  # no row outside is read, nor written
        need(0 <= begin <= end <= a.shape[0] and bool((m_indptr.diff() >= 0).all()), "rows outside of the memory")
        left = address(dense("a_scale", a_scale), (k // 128, lead))[:, columns].t()
        right = address(dense("b_scale", b_scale), (groups * (k // 128), n // 128)).view(groups, k // 128, n // 128)
        operands = {"a": dense("a", a)[begin:end], "a_scale": left.contiguous(), "b": dense("b", b)}
        operands |= {"b_scale": right.mT.contiguous()}
        starts, sizes = m_indptr[:-1] - begin, m_indptr.diff()
        operands["expert_offsets"] = starts
        operands["problem_sizes"] = torch.stack([sizes, torch.full_like(sizes, n), torch.full_like(sizes, k)], dim=1)
        operands |= {f"scales_{side}": operands.pop(f"{side}_scale") for side in "ab"}
        self.multiply("cutlass_blockwise_scaled_grouped_mm", operands, dense("out", out)[begin:end], "", "exact")
        return out

    def cutlass_fused_moe(
        self,
        input: Tensor,
        token_selected_experts: Tensor,
        token_final_scales: Tensor,
        fc1_expert_weights: Tensor,
        fc2_expert_weights: Tensor,
        output_dtype: torch.dtype,
        quant_scales: Any,
        fc1_expert_biases: Tensor | None = None,
        fc2_expert_biases: Tensor | None = None,
        input_sf: Tensor | None = None,
        swiglu_alpha: Tensor | None = None,
        swiglu_beta: Tensor | None = None,
        swiglu_limit: Tensor | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        cluster_size: int = 1,
        cluster_rank: int = 0,
        output: Tensor | None = None,
        enable_alltoall: bool = False,
        use_deepseek_fp8_block_scale: bool = False,
        use_w4_group_scaling: bool = False,
        use_mxfp8_act_scaling: bool = False,
        min_latency_mode: bool = False,
        use_packed_weights: bool = False,
        use_wfp4afp8_humming: bool = False,
        tune_max_num_tokens: int = 8192,
        enable_pdl: bool | None = None,
        activation_type: int = 3,
        swizzled_input_sf: bool = True,
        use_fused_finalize: bool = True,
        profile_ids: Any = None,
        workspace_buffer: Any = None,
        *,
        clamped_relu2_limit: Any = None,
        situ_beta: Any = None,
        situ_linear_beta: Any = None,
        backend: str = "cutlass",
    ) -> Tensor:
        """Its recipe follows from dtypes, flags and the number of scales; weights of E2M1 are words of 16 codes, their
        scales words of four."""
        need(self.machine.sm in (*TEN, *TWELVE) and backend == "cutlass" and activation_type == 3, "options")
        flags = (use_deepseek_fp8_block_scale, use_w4_group_scaling, min_latency_mode, use_packed_weights)
        need(not any(flags) and not use_wfp4afp8_humming and not enable_alltoall, "not on Blackwell, or another recipe")
        need((tp_size, tp_rank, ep_size, ep_rank, cluster_size, cluster_rank) == (1, 0, 1, 0, 1, 0), "parallel ranks")
        four = fc1_expert_weights.dtype is torch.int64
        need(fc1_expert_weights.dtype is fc2_expert_weights.dtype and (four or fc1_expert_weights.dtype is E4M3), "w")
        wide = input.dtype is torch.bfloat16
        need(wide or input.dtype is E4M3 and use_mxfp8_act_scaling and input_sf is not None, "input")
        need(not wide or four and not use_mxfp8_act_scaling and input_sf is None, "input of NVFP4")
        need(output_dtype is torch.bfloat16 and fc1_expert_biases is None and fc2_expert_biases is None, "types")
        need(token_selected_experts.dtype is torch.int32 and token_final_scales.dtype is torch.float32, "routing")
        need(token_selected_experts.shape == token_final_scales.shape and len(input) == len(token_final_scales), "T")
        need(len(quant_scales) == (6 if wide else 4), "number of quant scales")
        name = "nvfp4" if wide else "mxfp8_mxfp4" if four else "mxfp8"
        weights = [dense("w", w).view(torch.uint8 if four else E4M3) for w in (fc1_expert_weights, fc2_expert_weights)]
        experts, rows, stored = weights[0].shape
        hidden, inner = weights[1].shape[1], weights[1].shape[2] * (1 + four)
        need(stored * (1 + four) == hidden == input.shape[1] and rows == 2 * inner, "extents")
        need(hidden % 128 == inner % 128 == 0 and len(weights[1]) == experts, "hidden_size % 128, inter_size % 128")
        words, width = (
            (quant_scales[1], quant_scales[4]) if wide else (quant_scales[0], quant_scales[2]),
            16 if wide else 32,
        )
        inputs = {"x": input, "w13": weights[0], "w2": weights[1]}
        for key, word, (n, k) in zip(("w13", "w2"), words, ((rows, hidden), (hidden, inner)), strict=True):
            need(word.dtype is torch.int32 and tuple(word.shape) == (experts, n, k // width // 4), "weight block size")
            memory = dense(key, word).view(torch.uint8).view(experts, -1)
            inputs[f"{key}_scale"] = torch.stack([unswizzle_scale(part, n, k // width) for part in memory])
        places = {"a1_gscale": 0, "alpha1": 2, "a2_gscale": 3, "alpha2": 5} if wide else {"alpha1": 1, "alpha2": 3}
        for key, at in places.items():
            need(quant_scales[at].dtype is torch.float32 and tuple(quant_scales[at].shape) == (experts,), key)
            inputs[key] = quant_scales[at]
        if not wide:
            assert input_sf is not None
            need(swizzled_input_sf and input_sf.dtype is torch.uint8, "input_sf")
            need(input_sf.numel() >= tiles(len(input), hidden // 32), "reads behind the memory of input_sf")
            memory = flat(dense("input_sf", input_sf), tiles(len(input), hidden // 32))
            scale = torch.exp2(unswizzle_scale(memory, len(input), hidden // 32).float() - 127)
            inputs["x"] = (input.float() * scale.repeat_interleave(32, 1)).to(torch.bfloat16)
        parts = (swiglu_alpha, swiglu_beta, swiglu_limit)
        if any(part is not None for part in parts):
            usual = (torch.ones(experts), torch.zeros(experts), torch.full((experts,), float("inf")))
            inputs["gates"] = torch.stack([u if p is None else p for p, u in zip(parts, usual, strict=True)], dim=1)
        inputs |= {"topk_ids": token_selected_experts, "topk_weights": token_final_scales}
        out = torch.empty(input.shape, dtype=output_dtype) if output is None else output
        need(tuple(out.shape) == tuple(input.shape) and out.dtype is output_dtype, "output")
        combine = "ATOMIC" if use_fused_finalize else "STORED"
        return self.multiply(f"cutlass_fused_moe_{name}", inputs, dense("output", out), "", "", combine=combine)

    # --- vLLM -------------------------------------------------------------------------------------------------------

    def scaled_fp4_quant(
        self, input: Tensor, input_scale: Tensor, is_sf_swizzled_layout: bool, output: Tensor, output_scale: Tensor
    ) -> None:
        """Into ``output`` and, four a word where they lie in tiles, ``output_scale``, whose padding is not written."""
        m, k = input.shape
        need(input_scale.dtype is torch.float32 and input_scale.numel() == 1 and k % 16 == 0, "input_scale")
        shape = (-(-m // 128) * 128, -(-(k // 16) // 4)) if is_sf_swizzled_layout else (m, k // 16)
        need(tuple(output_scale.shape) == shape and tuple(output.shape) == (m, k // 2), "outputs")
        need(output_scale.dtype is (torch.int32 if is_sf_swizzled_layout else torch.uint8), "output_scale")
        inputs = {"x": input, "global_scale": input_scale.reshape(1)}
        layout = "128x4" if is_sf_swizzled_layout else "linear"
        q, scale = self.quantised("nvfp4_quantize", inputs, "flashinfer_cute_nvfp4", layout=layout)
        padding = swizzle_scale(torch.zeros(m, k // 16, dtype=torch.uint8), fill=1) if is_sf_swizzled_layout else None
        memory = output_scale.view(torch.uint8).view(-1)
        written = scale.reshape(-1)
        memory.copy_(written if padding is None else torch.where(padding.bool(), memory, written))
        output.copy_(q)

    def cutlass_scaled_fp4_mm(
        self, out: Tensor, a: Tensor, b: Tensor, block_scale_a: Tensor, block_scale_b: Tensor, alpha: Tensor
    ) -> None:
        """``a [M, K/2]`` by ``b [N, K/2]``; ``out`` is taken for dense memory."""
        need(self.machine.sm in (*TEN, *TWELVE), "no compiled nvfp4 mm")
        need(a.dtype is b.dtype is torch.uint8, "Inconsistency of Tensor type")
        need(block_scale_a.dtype is block_scale_b.dtype is E4M3 and alpha.dtype is torch.float32, "Inconsistency")
        need(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1], "a and b shapes cannot be multiplied")
        (m, half), n = a.shape, b.shape[0]
        k = 2 * half
        need(k % 32 == n % 32 == 0, "Expected k and n to be divisible by 32")
        wide = -(-(k // 16) // 4) * 4
        need(block_scale_a.shape == (-(-m // 128) * 128, wide), "scale_a must be padded and swizzled")
        need(block_scale_b.shape == (-(-n // 128) * 128, wide), "scale_b must be padded and swizzled")
        need(out.dtype in HALVES and out.shape == (m, n), "unsupported output data type")
        operands = {"a": dense("a", a), "b": dense("b", b).t(), "alpha": dense("alpha", alpha).reshape(1)}
        operands["a_descale"] = flat(dense("scale_a", block_scale_a), tiles(m, k // 16))
        operands["b_descale"] = flat(dense("scale_b", block_scale_b), tiles(n, k // 16))
        self.multiply("mm_fp4", operands, dense("out", out), "chain_nvf4", "cutlass")

    def cutlass_scaled_mm(
        self, out: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None
    ) -> None:
        """``a [M, K]`` by the column-major ``b [K, N]``: a scale each or one of a row and of a column, as their
        numbers say; else block scales, M-major and K-major, read by address."""
        need(a.stride(1) == out.stride(1) == b.stride(0) == 1, "strides")
        need(out.stride(0) % 16 == 0 and b.stride(1) % 16 == 0, "16 byte alignment")
        (m, k), n = a.shape, b.shape[1]
        if scale_a.numel() in (1, m) and scale_b.numel() in (1, n):
            need(scale_a.dtype is scale_b.dtype is torch.float32, "scales must be float32")
            need(scale_a.is_contiguous() and scale_b.is_contiguous() and out.dtype in HALVES, "scales")
            need(bias is None or bias.numel() == n and bias.is_contiguous() and bias.dtype is out.dtype, "bias")
            plain = {"a": dense("a", a), "b": dense("b", b.t()), "a_scale": scale_a, "b_scale": scale_b}
            plain |= {} if bias is None else {"bias": bias}
            self.multiply("cutlass_scaled_mm", plain, out, "", "exact")
            return
        need(bias is None, "bias")
        need(m % 4 == 0 and k % 128 == n % 128 == 0 and out.dtype in HALVES, "shapes")
        need(tuple(scale_a.shape) == (m, k // 128) and tuple(scale_b.shape) == (k // 128, n // 128), "scales")
        left, right = address(scale_a, (k // 128, m)).t(), address(scale_b, (n // 128, k // 128))
        operands = {
            "a": dense("a", a),
            "b": dense("b", b.t()),
            "a_scale": left.contiguous(),
            "b_scale": right.contiguous(),
        }
        self.multiply("fp8_gemm_nt", operands, out, "", "exact")

    def bmm_fp8(
        self, A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype, out: Tensor | None = None,
        backend: str = "cublas",
    ) -> Tensor:  # fmt: skip  # the parameters of the library
        """``A [G, M, K]`` by ``B [G, K, N]``, which is read column by column whatever its strides are."""
        self.claims("bmm_fp8", backend)
        need(A.dim() == B.dim() == 3 and A.shape[2] == B.shape[1], "K dimension mismatch")
        need(A_scale.dtype is B_scale.dtype is torch.float32 and A_scale.numel() == B_scale.numel() == 1, "scales")
        need(dtype in HALVES, "unsupported output dtype")
        shape = (A.shape[0], A.shape[1], B.shape[2])
        out = torch.empty(shape, dtype=dtype) if out is None else out
        need(out.shape == shape and out.dtype is dtype, "output mismatch")
        operands = {"A": dense("A", A), "B": dense("B", B.mT).mT, "A_scale": A_scale, "B_scale": B_scale}
        return self.multiply("bmm_fp8", operands, dense("out", out), "", "exact")

    def cutlass_moe_mm(
        self, out_tensors: Tensor, a_tensors: Tensor, b_tensors: Tensor, a_scales: Tensor, b_scales: Tensor,
        expert_offsets: Tensor, problem_sizes: Tensor, a_strides: Tensor, b_strides: Tensor, c_strides: Tensor,
        per_act_token: bool, per_out_ch: bool,
    ) -> None:  # fmt: skip  # the parameters of the library
        """Rows of each expert by its start and size; of at most 64 rows in all the first two sizes are exchanged."""
        need(self.machine.sm in TEN, "cutlass_moe_mm has kernels of sm90 and sm100")
        (m, k), (groups, n, _) = a_tensors.shape, b_tensors.shape
        need(expert_offsets.dtype is torch.int64 and problem_sizes.dtype is torch.int32, "dtypes")
        for strides, due in ((a_strides, k), (b_strides, k), (c_strides, n)):
            need(strides.dtype is torch.int64 and strides.tolist() == [due] * groups, "strides")
        need(a_scales.dtype is b_scales.dtype is torch.float32, "scales must be float32")
        need(a_scales.is_contiguous() and b_scales.is_contiguous(), "scales must be dense")
        need(per_act_token == (a_scales.numel() == m) and per_out_ch == (b_scales.numel() == groups * n), "scales")
        first = int(m <= 64)
        sizes = problem_sizes.tolist()
        need(all(size[1 - first] == n and size[2] == k for size in sizes), "problem sizes")
        a, b = dense("a_tensors", a_tensors), dense("b_tensors", b_tensors)
        for g, (start, size) in enumerate(zip(expert_offsets.tolist(), sizes, strict=True)):
            rows = slice(start, start + size[first])
            need(0 <= rows.start <= rows.stop <= m, "rows outside of the memory")
            if size[first]:
                mine = {"a": a[rows], "b": b[g : g + 1], "scale_a": a_scales[rows], "scale_b": b_scales[g : g + 1]}
                mine["offsets"] = torch.tensor([size[first]], dtype=torch.int32)
                self.multiply("scaled_grouped_mm", mine, out_tensors[rows], "", "exact")

    def cutlass_fp4_group_mm(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_blockscale: Tensor,
        b_blockscales: Tensor,
        alphas: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        sf_offsets: Tensor,
    ) -> None:
        """Each expert's product begins at its first row of ``a``, and its scales at their first row."""
        need(self.machine.sm in (*TEN, *TWELVE), "no compiled cutlass_fp4_group_mm kernel")
        need(a_blockscale.dtype is b_blockscales.dtype is E4M3 and alphas.dtype is torch.float32, "Inconsistency")
        need(alphas.shape == (len(b),), "alphas")
        need(self.machine.sm in TEN or out.dtype is torch.bfloat16, "SM120 NVFP4 MOE only supports bfloat16 output")
        scales = {"global_scale_a": alphas, "global_scale_b": torch.ones_like(alphas)}
        self._tight(out, a, b, a_blockscale, b_blockscales, problem_sizes, expert_offsets, sf_offsets, scales)

    def cutlass_mxfp4_group_mm(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        a_blockscale: Tensor,
        b_blockscales: Tensor,
        problem_sizes: Tensor,
        expert_offsets: Tensor,
        sf_offsets: Tensor,
    ) -> None:
        need(self.machine.sm in TEN, "no compiled cutlass_mxfp4_group_mm kernel")
        need(a_blockscale.dtype is b_blockscales.dtype is torch.uint8, "Inconsistency of Tensor type")
        self._tight(out, a, b, a_blockscale, b_blockscales, problem_sizes, expert_offsets, sf_offsets, {})

    def _tight(
        self,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        left: Tensor,
        right: Tensor,
        sizes: Tensor,
        starts: Tensor,
        first: Tensor,
        scales: Mapping[str, Tensor],
    ) -> None:
        """Rows ``starts[g]`` to ``starts[g] + sizes[g, 0]`` of each expert, by its weight."""
        need(a.dtype is b.dtype is torch.uint8 and left.dim() == 2 and right.dim() == 3, "types and ranks")
        groups, n, half = b.shape
        need(sizes.dtype is starts.dtype is first.dtype is torch.int32, "int32")
        need(sizes.shape == (groups, 3) and starts.shape == first.shape == (groups,), "number of experts")
        need(half % 16 == 0 and n % 8 == 0 and out.dtype in HALVES and out.shape == (a.shape[0], n), "alignment")
        width, four = (16, E4M3) if left.dtype is E4M3 else (32, UE8M0)
        columns = -(-(2 * half // width) // 4) * 4
        for g, (m, wide, k) in enumerate(sizes.tolist()):
            need(wide == n and k == 2 * half, "the strides are those of the weight")
            begin, at = int(starts[g]), int(first[g]) * columns
            need(0 <= begin <= begin + m <= a.shape[0], "reads out of bounds")
            if m == 0:
                continue
            operands = {"mat_a": dense("a", a)[begin : begin + m].contiguous(), "mat_b": dense("b", b)[g : g + 1]}
            memory = flat(dense("a_blockscale", left), at + tiles(m, 2 * half // width))[at:]
            weight = flat(dense("b_blockscales", right), groups * tiles(n, 2 * half // width))
            operands |= {"scale_a": memory.view(four), "scale_b": weight.view(groups, -1)[g].contiguous().view(four)}
            operands |= {"offs": torch.tensor([m], dtype=torch.int32)}
            operands |= {name: scale[g : g + 1] for name, scale in scales.items()}
            part = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
            chain = "chain_nvf4" if four is E4M3 else "chain_mxf4"
            out[begin : begin + m] = self.multiply("scaled_grouped_mm_mx", operands, part, chain, "cutlass")

    # --- DeepGEMM ---------------------------------------------------------------------------------------------------

    def fp8_fp4_gemm_nt(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        c: Tensor | None = None,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "",
        disable_ue8m0_cast: bool = False,
        alpha: float | None = None,
        epilogue: Any = None,
    ) -> None:
        """Packed words of every row, MN-major; what lies in ``c`` is added in memory."""
        need(alpha is None and epilogue is None, "options")
        summand = {} if c is None else {"c": c.clone()}
        self._mixed("fp8_fp4_gemm_nt", a, b, d, recipe, (recipe_a, recipe_b), disable_ue8m0_cast, **summand)

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        grouped_layout: Tensor,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False,
        ensure_zero_padding: bool = True,
        expected_m_for_psum_layout: Any = None,
        epilogue: Any = None,
    ) -> None:
        """The expert of each row, or where the rows of each expert end."""
        need(grouped_layout.dtype is torch.int32 and grouped_layout.is_contiguous(), "grouped_layout")
        need(len(grouped_layout) == (len(b[0]) if use_psum_layout else len(a[0])), "grouped_layout")
        name, last = ("psum", "ends") if use_psum_layout else ("contiguous", "m_indices")
        layout = {last: grouped_layout}
        contract = f"m_grouped_fp8_fp4_gemm_nt_{name}"
        self._mixed(contract, a, b, d, recipe, (recipe_a, recipe_b), disable_ue8m0_cast, **layout)

    def m_grouped_fp8_fp4_gemm_nt_masked(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        masked_m: Tensor,
        expected_m: int,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
        epilogue: Any = None,
    ) -> None:
        need(masked_m.dtype is torch.int32 and masked_m.is_contiguous() and expected_m > 0, "masked_m")
        need(a[0].shape[1] % 128 == 0 or len(a[0]) == 1, "it stores whole tiles of 128 rows")
        name = "m_grouped_fp8_fp4_gemm_nt_masked"
        self._mixed(name, a, b, d, recipe, (recipe_a, recipe_b), disable_ue8m0_cast, masked_m=masked_m)

    # the same functions under their older names
    fp8_gemm_nt = fp8_fp4_gemm_nt
    m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
    fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked

    def fp8_gemm_nt_skip_head_mid(
        self,
        a: Any,
        b: Any,
        d: Tensor,
        head_splits: tuple[int, int, int],
        recipe: Any = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
    ) -> None:
        """The columns of each head's two parts, between which ``d`` stays as it was; upstream's, as vLLM brings it."""
        left, mid, right = head_splits
        need(recipe == (1, 128, 128) and d.dtype is torch.bfloat16 and d.is_contiguous(), "recipe and d")
        need(all(part % 64 == 0 for part in head_splits) and self.machine.sm in TEN, "stores of 64 columns")
        heads = d.view(d.shape[0], -1, left + mid + right)
        parts = torch.cat([heads[..., :left], heads[..., left + mid :]], dim=2).flatten(1)
        self._mixed("fp8_fp4_gemm_nt", a, b, parts, None, (None, None), disable_ue8m0_cast)
        made = parts.view(*heads.shape[:2], left + right)
        heads[..., :left], heads[..., left + mid :] = made[..., :left], made[..., left:]

    def _mixed(
        self, contract: str, a: Any, b: Any, d: Tensor, recipe: Any, recipes: Any, cast: bool, **more: Tensor
    ) -> None:
        need(self.machine.sm in (*TEN, 120), "unsupported architecture")
        recipes = [
            (1, 128) if r is None and pair[1].dtype is torch.int32 else r
            for r, pair in zip(recipes, (a, b), strict=True)
        ]
        need(recipe is None and all(r in ((1, 32), (1, 128)) for r in recipes) and not cast, "recipes")
        operands: dict[str, Tensor] = dict(more)
        k = a[0].shape[-1] * (1 if a[0].is_floating_point() else 2)
        for name, (codes, words), (_, gran) in zip("ab", (a, b), recipes, strict=True):
            need(codes.dtype in (E4M3, torch.int8) and words.dtype is torch.int32, "types of codes and scales")
            need(codes.shape[-1] * (1 if codes.is_floating_point() else 2) == k and k % 128 == 0, "K")
            rows, due = codes.shape[-2], (*codes.shape[:-1], -(-k // (4 * gran)))
            need(tuple(words.shape) == due and (words.stride(-2) == 1 or rows == 1), "sf shape, MN-major")
            need(words.shape[-1] == 1 or words.stride(-1) == -(-rows // 4) * 4, "sf.stride(-1), TMA-aligned")
            operands[name] = dense(name, codes).view(torch.uint8 if codes.dtype is torch.int8 else E4M3)
            operands[f"{name}_scale"] = words.contiguous()
        both = a[0].dtype is b[0].dtype is torch.int8
        need(not both or [r[1] for r in recipes] == [32, 32], "MXF4 only supports kGranK=32")
        need(
            d.dtype in (torch.bfloat16, torch.float32) and d.shape[-1] == b[0].shape[-2] and d.shape[-1] % 64 == 0, "d"
        )
        one = "exact" if both or self.machine.sm in TWELVE else "cutlass"
        options = {"gran_k_a": recipes[0][1], "gran_k_b": recipes[1][1]}
        self.multiply(contract, operands, dense("d", d), "chain_ue8m0", one, **options)

    def fp8_mqa_logits(
        self,
        q: Tensor,
        kv: Any,
        weights: Tensor,
        ks: Tensor,
        ke: Tensor,
        clean_logits: bool = False,
        max_seqlen_k: int = 0,
    ) -> Tensor:
        """Logits ``[M, N]`` of ``q [M, H, D]``; what lies outside of a window is written where that is asked for."""
        k, k_scale = kv
        self._indexer(q, weights, q.shape[:1])
        need(k.dtype is E4M3 and k_scale.dtype is torch.float32 and k_scale.is_contiguous(), "kv")
        need(k.dim() == 2 and k_scale.shape == k.shape[:1] and k.shape[1] == q.shape[2], "kv")
        need(ks.dtype is ke.dtype is torch.int32 and ks.shape == ke.shape == q.shape[:1], "windows")
        need(max_seqlen_k == 0, "compressed logits")
        operands = {"q": dense("q", q), "k": dense("k", k), "k_scale": k_scale, "weights": dense("weights", weights)}
        operands |= {"cu_seqlen_ks": dense("ks", ks), "cu_seqlen_ke": dense("ke", ke)}
        out = torch.full((len(q), len(k)), float("nan"))
        return self.multiply("fp8_mqa_logits", operands, out, *self._of_heads(), clean_logits=clean_logits)

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        schedule_meta: Tensor,
        max_context_len: int,
        clean_logits: bool = False,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[B next_n, max_context_len]`` of ``q [B, next_n, H, D]``; nothing is written behind a context."""
        self._indexer(q, weights, (q.shape[0] * q.shape[1],))
        need(kv_cache.dtype is torch.uint8 and kv_cache.is_contiguous(), "kv_cache")
        need(tuple(kv_cache.shape[1:]) == (64, 1, q.shape[3] + 4), "block_kv == 64")
        need(context_lens.dtype is block_table.dtype is schedule_meta.dtype is torch.int32, "int32")
        need(context_lens.shape == q.shape[:2] and context_lens.is_contiguous(), "context_lens.dim() == 2")
        need(not clean_logits and indices is None and len(block_table) == len(q), "not clean_logits")
        due = self.get_paged_mqa_logits_metadata(context_lens, 64, len(schedule_meta) - 1)
        need(torch.equal(due, schedule_meta), "blocks of no multiprocessor are not multiplied")
        operands = {"q": dense("q", q), "kv_cache": kv_cache, "weights": dense("weights", weights)}
        operands |= {"context_lens": context_lens, "block_tables": dense("block_table", block_table)}
        out = torch.full((q.shape[0] * q.shape[1], max_context_len), float("nan"))
        options = {"clean_logits": False, "max_model_len": max_context_len}
        return self.multiply("fp8_paged_mqa_logits", operands, out, *self._of_heads(), **options)

    def get_paged_mqa_logits_metadata(
        self, context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
    ) -> Tensor:
        need(context_lens.dtype is torch.int32 and context_lens.dim() == 2 and indices is None, "context_lens")
        lens = {"context_lens": context_lens}
        made = oracle.reference("get_paged_mqa_logits_metadata", lens, block_size=block_kv, num_sms=num_sms)
        assert isinstance(made, Tensor)
        return made

    def _of_heads(self) -> tuple[str, str]:
        """The schedule that is known of an arch, and a name that follows it."""
        return ("mqa_logits", "cutlass") if self.machine.sm in TEN else ("", "exact")

    def _indexer(self, q: Tensor, weights: Tensor, rows: Any) -> None:
        """What both products of an indexer demand."""
        need(self.machine.sm in (*TEN, 120), "unsupported architecture")
        need(q.dtype is E4M3 and weights.dtype is torch.float32, "dtypes")
        need(q.shape[-2] in (32, 64) and q.shape[-1] in (32, 64, 128), "num_heads and head_dim")
        need(tuple(weights.shape) == (*rows, q.shape[-2]), "weights")

    # --- torch ------------------------------------------------------------------------------------------------------

    def _scaled_mm(
        self,
        mat1: Tensor,
        mat2: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        """``mat1 [M, K]`` by the column-major ``mat2 [K, N]``: one scale each, or of every row and column. It is asked
        for float32 here, which the layer casts, since its operands lie on the CPU."""
        need(mat1.stride(1) == mat2.stride(0) == 1 and mat1.stride(0) % 16 == mat2.stride(1) % 16 == 0, "strides")
        need(mat1.dtype is mat2.dtype is E4M3 and mat1.shape[1] == mat2.shape[0], "mat1 and mat2")
        need(scale_result is None and not use_fast_accum and out_dtype is torch.float32, "options")
        (m, k), n = mat1.shape, mat2.shape[1]
        need(k % 16 == n % 16 == 0, "trailing dimensions are no multiples of 16")
        need(scale_a.dtype is scale_b.dtype is torch.float32, "scales")
        single = scale_a.numel() == scale_b.numel() == 1
        by_row = tuple(scale_a.shape) == (m, 1) and tuple(scale_b.shape) == (1, n)
        need(single or by_row and scale_a.is_contiguous() and scale_b.is_contiguous(), "scales")
        operands = {"qinput": mat1, "weight": mat2, "scale_a": scale_a, "scale_b": scale_b}
        operands |= {} if bias is None else {"bias": bias}
        contract = f"torch_per_{'tensor' if single else 'token'}_w8a8_scaled_mm"
        return self.multiply(contract, operands, torch.empty(m, n), "", "exact")

    def _scaled_grouped_mm(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        """``mat_a [M, K]`` by ``mat_b [G, K, N]``, column-major matrices; a scale of every row and column."""
        need(self.machine.sm == 100, "kernels for sm90 and sm100")
        need(mat_a.dtype is mat_b.dtype is E4M3 and mat_a.shape[1] == mat_b.shape[1], "mat_a and mat_b")
        need(bias is None and scale_result is None and not use_fast_accum and out_dtype is torch.bfloat16, "options")
        (m, k), (groups, _, n) = mat_a.shape, mat_b.shape
        need(k % 16 == n % 16 == 0 and offs is not None and offs.dtype is torch.int32 and len(offs) == groups, "offs")
        need(scale_a.dtype is scale_b.dtype is torch.float32, "scales")
        need(tuple(scale_a.shape) == (m,) and tuple(scale_b.shape) == (groups, n), "scales")
        need(scale_a.is_contiguous() and scale_b.is_contiguous(), "scales must be dense")
        operands = {"a": dense("mat_a", mat_a), "b": dense("mat_b", mat_b.mT), "scale_a": scale_a[:, None]}
        operands |= {"scale_b": scale_b, "offsets": offs}
        out = torch.full((m, n), float("nan"), dtype=out_dtype)
        return self.multiply("scaled_grouped_mm", operands, out, "", "exact")

    def scaled_grouped_mm(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Any,
        scale_recipe_a: Any,
        scale_b: Any,
        scale_recipe_b: Any,
        swizzle_a: Any = None,
        swizzle_b: Any = None,
        bias: Tensor | None = None,
        offs: Tensor | None = None,
        output_dtype: torch.dtype | None = torch.bfloat16,
        contraction_dim: Any = (),
        use_fast_accum: bool = False,
    ) -> Tensor:
        """``mat_a [M, K]`` by ``mat_b [G, K, N]``, K-major; of the scales of ``mat_a`` only the rank is checked."""
        need(self.machine.sm == 100, "MSLK")
        listed = (scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b)
        need(all(isinstance(x, list) and len(x) == 1 for x in listed), "lists of one")
        kinds, orders = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
        four = mat_a.dtype is torch.float4_e2m1fn_x2
        kind = kinds.BlockWise1x16 if four else kinds.BlockWise1x32
        need(scale_recipe_a == scale_recipe_b == [kind] and swizzle_a == swizzle_b == [orders.SWIZZLE_32_4_4], "kinds")
        need(bias is None and offs is not None and offs.dtype is torch.int32 and output_dtype is torch.bfloat16, "offs")
        need(not use_fast_accum and not contraction_dim and mat_a.dtype is mat_b.dtype, "options")
        dtype = E4M3 if four else UE8M0
        need(scale_a[0].dtype is scale_b[0].dtype is dtype and scale_a[0].dim() == 2, "scale must be 2-D")
        groups, packed, n = mat_b.shape
        width, k = (16, 2 * packed) if four else (32, packed)
        need(tuple(scale_b[0].shape) == (groups, tiles(n, k // width)) and len(offs) == groups, "scale shape")
        codes = torch.uint8 if four else E4M3
        operands = {"mat_a": dense("mat_a", mat_a).view(codes), "mat_b": dense("mat_b", mat_b.mT).view(codes)}
        ends = offs.tolist()
        rows = sum(-(-(end - begin) // 128) * 128 for begin, end in zip([0, *ends], ends, strict=False))
        need(ends == sorted(ends), "offs")
        operands["scale_a"] = flat(dense("scale_a", scale_a[0]), tiles(rows, k // width)).view(dtype)
        operands |= {"scale_b": dense("scale_b", scale_b[0]), "offs": offs}
        out = torch.full((mat_a.shape[0], n), float("nan"), dtype=output_dtype)
        return self.multiply("scaled_grouped_mm_mx", operands, out, "", "torch")

    def scaled_mm(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Any,
        scale_recipe_a: Any,
        scale_b: Any,
        scale_recipe_b: Any,
        swizzle_a: Any = None,
        swizzle_b: Any = None,
        bias: Tensor | None = None,
        output_dtype: torch.dtype | None = torch.bfloat16,
        contraction_dim: Any = (),
        use_fast_accum: bool = False,
    ) -> Tensor:
        """torch's own checks on tensors without memory, then the product."""
        listed = (scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b)
        need(all(isinstance(x, list) for x in listed), "lists")
        try:
            REAL(
                empty(mat_a), empty(mat_b), [empty(x) for x in scale_a], scale_recipe_a, [empty(x) for x in scale_b],
                scale_recipe_b, swizzle_a, swizzle_b, None if bias is None else empty(bias), output_dtype,
                contraction_dim, use_fast_accum,
            )  # fmt: skip  # the parameters of torch
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            NotImplementedError,
        ) as error:  # torch's refusals, raised again
            raise LibraryError(str(error)) from error
        need(not use_fast_accum and not contraction_dim, "options")
        kinds, orders = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
        four = mat_a.dtype is torch.float4_e2m1fn_x2
        due = [kinds.BlockWise1x16 if four else kinds.BlockWise1x32, kinds.TensorWise][: len(scale_a)]
        need(scale_recipe_a == scale_recipe_b == due and len(scale_a) == len(scale_b), "recipes")
        need(swizzle_a == swizzle_b == [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE][: len(scale_a)], "swizzles")
        need(bias is None or bias.dtype is output_dtype is not torch.float32, "bias")
        need(mat_a.stride(1) == 1 and mat_b.stride(0) == 1, "TN only")
        codes = torch.uint8 if four else mat_a.dtype
        operands = {"mat_a": mat_a.view(codes), "mat_b": mat_b.t().view(codes if four else mat_b.dtype).t()}
        operands |= {"scale_a": scale_a[0].reshape(-1), "scale_b": scale_b[0].reshape(-1)}
        if len(scale_a) == 2:
            operands |= {"global_scale_a": scale_a[1].reshape(1), "global_scale_b": scale_b[1].reshape(1)}
        if bias is not None:
            operands["bias"] = bias
        out = torch.empty(mat_a.shape[0], mat_b.shape[1], dtype=output_dtype)
        return self.multiply("scaled_mm", operands, out, "chain_nvf4" if four else "chain_ue8m0", "torch")

    def recorded(self, name: str) -> Callable[..., Any]:
        """A routine that notes every call by all of its parameters."""
        routine = getattr(self, name)
        signature = inspect.signature(routine)

        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            if given.get("c") is not None:  # which the call writes over
                given["c"] = given["c"].clone()
            self.calls.append(Made(routine, name, given, self.excluded))
            return routine(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def autotune(self, tune_mode: bool = True, cache: str | None = None, *, skip_ops: Any = None) -> Iterator[None]:
        """Calls inside are excluded from tuning by ``skip_ops``."""
        assert not tune_mode and cache is None
        before, self.excluded = self.excluded, self.excluded | frozenset(skip_ops)
        yield
        self.excluded = before


REAL: Any = getattr(torch.nn.functional, "scaled_mm", None)  # torch 2.9 has none
FLASHINFER = tuple(dict.fromkeys(name for name, _ in CLAIMS))
OF_VLLM = (
    "cutlass_scaled_fp4_mm", "cutlass_scaled_mm", "cutlass_fp4_group_mm", "cutlass_mxfp4_group_mm", "cutlass_moe_mm",
)  # fmt: skip
LAYERS = ("cutlass_fused_moe", "trtllm_fp8_per_tensor_scale_moe")
QUANTISERS = ("mxfp8_quantize", "mxfp4_quantize", "nvfp4_quantize")
OF_DEEP_GEMM = ("fp8_fp4_gemm_nt", "m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_masked")

INDEXERS = ("fp8_mqa_logits", "fp8_paged_mqa_logits")
"""Of the older line of sgl-deep-gemm."""
OLDER_NAMES = (
    "fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "fp8_m_grouped_gemm_nt_masked", "fp8_gemm_nt_skip_head_mid",
)  # fmt: skip


def empty(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@contextlib.contextmanager
def simulated(machine: Machine, config: Config | None = None, *, own: Collection[str] = ()) -> Iterator[Libraries]:
    """Within the block the layer runs on this machine, with these libraries, and takes CPU tensors for a GPU's. The
    operations ``own`` are those of the DeepGEMM that is imported."""
    machine = machine.with_package("triton", "a Triton kernel does not run on a CPU")
    fakes, patch = Libraries(machine), pytest.MonkeyPatch()
    package = types.ModuleType("flashinfer")
    for part in ("gemm", "autotuner", "fused_moe", "grouped_mm"):
        patch.setitem(sys.modules, f"flashinfer.{part}", types.ModuleType(f"flashinfer.{part}"))
    patch.setitem(sys.modules, "flashinfer", package)
    patch.setitem(sys.modules, "flashinfer.tllm_enums", types.SimpleNamespace(SfLayout=SfLayout))
    for name in QUANTISERS:
        setattr(package, name, fakes.recorded(name))
    for name in FLASHINFER:
        home = "grouped_mm" if name.startswith("moe_gemm") else "gemm"
        setattr(sys.modules[f"flashinfer.{home}"], name, fakes.recorded(name))
    setattr(sys.modules["flashinfer.autotuner"], "autotune", fakes.autotune)  # noqa: B010  # a module made here
    for name in LAYERS:
        setattr(sys.modules["flashinfer.fused_moe"], name, fakes.recorded(name))
    of_vllm = {name: fakes.recorded(name) for name in OF_VLLM}
    of_vllm["scaled_fp4_quant"] = types.SimpleNamespace(out=fakes.recorded("scaled_fp4_quant"))
    deep = types.SimpleNamespace(**{name: fakes.recorded(name) for name in (*OF_DEEP_GEMM, *OLDER_NAMES, *INDEXERS)})
    deep.get_paged_mqa_logits_metadata = fakes.get_paged_mqa_logits_metadata
    known = deep_gemm.symbol
    served = (*MIXED, "fp8_gemm_nt", "grouped_contiguous", "grouped_masked", "skip_head_mid", "mqa_logits")
    served += ("paged_mqa_logits", "paged_metadata")
    ours = {name: (getattr(deep, deep_gemm.SYMBOLS[name][0]), name) for name in served}
    ours["alignment"] = (lambda: 128), "get_mk_alignment_for_contiguous_layout"
    patch.setattr(deep_gemm, "symbol", lambda name: ours[name] if name in ours and name not in own else known(name))
    patch.setattr(deep_gemm, "takes_2d_lens", lambda: True)
    operators = types.SimpleNamespace(**of_vllm)
    patch.setattr(cutlass, "operators", lambda: operators)
    for name in ("scaled_mm", "scaled_grouped_mm"):
        patch.setattr(torch.nn.functional, name, fakes.recorded(name), raising=False)
    for name in ("_scaled_mm", "_scaled_grouped_mm"):
        patch.setattr(torch, name, fakes.recorded(name))
    decide, gpu = routes._decide, torch.device("cuda")
    patch.setattr(routes, "_decide", lambda op, device, *key: decide(op, gpu, *key))
    flashinfer.library.cache_clear()
    try:
        with use_machine(machine), use_config(config or Config()):
            yield fakes
    finally:
        patch.undo()
        flashinfer.library.cache_clear()


@contextlib.contextmanager
def described(arch: str, packages: Mapping[str, str]) -> Iterator[Libraries]:
    """:func:`simulated` on a described machine with Triton, in the place of which plain torch computes."""
    machine = Machine.described(arch, packages=packages)
    with pytest.MonkeyPatch.context() as patch, simulated(machine) as libraries:
        for module, function in ((triton_mx, "mx_product"), (triton_quant, "quant_blocks")):
            stand_in = dataclasses.replace(module.BACKEND, **{function: getattr(eager.BACKEND, function)})
            patch.setattr(module, "BACKEND", stand_in)
        with use_machine(machine.with_package("triton")):
            yield libraries


def grid(op: str) -> list[Problem]:
    """Problems of an operation around its limits."""
    eight = ("mxfp8_product", "mxfp8_batched", "mxfp8_tight", RUNS, *ALIGNED)
    packed: dict[str, Any] = {} if op in eight else {"b_dtype": "uint8"}
    packed |= {"a_dtype": "uint8"} if op.startswith(("nvfp4", "mxfp4")) else {}
    packed |= {"a_width": 128, "b_width": 32} if op in MIXED else {}
    extents = itertools.product((1, 33, 128), (128, 136, 144, 160, 4096), (128, 160, 4096), ("bfloat16", "float32"))
    return [
        Problem(op, m=m, n=n, k=k, out_dtype=out, groups=g, tiles="128x4", row_alignment=4, **packed)
        for (m, n, k, out), g in itertools.product(extents, (1, 3))
    ]
