"""Kernels of ``fp8_gemm_nt`` that take some calls only, and kernels that are wrong at an edge only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.routines import get
from tests.support.subjects.right import _product, gemm

Gemm = Callable[..., Tensor]
BF16 = torch.bfloat16


def taking(admits: Callable[[Tensor, Tensor, torch.dtype], bool]) -> Gemm:
    """A right kernel that refuses all other calls; ``admits`` is asked with ``a``, ``b`` and the output dtype."""

    def kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
        if not admits(a, b, out_dtype):
            raise NotImplementedError("another shape, dtype or data")
        return gemm(a, a_scale, b, b_scale, out_dtype)

    return kernel


cutlass = taking(lambda a, b, dtype: a.shape[0] % 4 == 0 and b.shape[0] % 128 == 0 and dtype != torch.float32)
"""The block-scaled kernel of vLLM's CUTLASS: M % 4, N % 128, no float32."""
only_m33 = taking(lambda a, b, dtype: a.shape[0] == 33)
only_one_shape = taking(lambda a, b, dtype: (a.shape[0], b.shape[0], a.shape[1]) == (33, 256, 384))
three_shapes = taking(
    lambda a, b, dtype: (a.shape[0], b.shape[0], a.shape[1]) in ((33, 256, 384), (7, 512, 2688), (31, 192, 256))
)
nothing = taking(lambda a, b, dtype: False)
bf16_only = taking(lambda a, b, dtype: dtype == torch.bfloat16)
short = taking(lambda a, b, dtype: a.shape[0] <= 64 and a.shape[1] >= 128)
small = taking(lambda a, b, dtype: a.numel() + b.numel() <= 1 << 16)
"""A condition on two extents together, which cannot be learned extent by extent."""
without_nan = taking(lambda a, b, dtype: not bool(torch.isnan(a.float()).any()))


def raises_for_m(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
    """An error, no refusal, unless M % 4 == 0."""
    if a.shape[0] % 4:
        raise RuntimeError("misaligned address")
    return gemm(a, a_scale, b, b_scale, out_dtype)


def casts_for_m(x: Tensor, use_ue8m0: bool = False, group: int = 128) -> dict[str, Tensor]:
    """A cast of each row that raises unless M % 4 == 0."""
    if x.shape[0] % 4:
        raise RuntimeError("misaligned address")
    return dict(get("per_token_cast_to_fp8").reference({"x": x}, use_ue8m0=use_ue8m0, group=group))


def wrong_where(wrong: Callable[[Tensor, Tensor], bool]) -> Gemm:
    """A kernel that loses the last element of K where ``wrong`` says so, asked with ``a`` and ``b``."""

    def kernel(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
        if wrong(a, b):
            a = a.clone()
            a[:, -1] = 0
        return gemm(a, a_scale, b, b_scale, out_dtype)

    return kernel


def lost_tail(residue: int) -> Gemm:
    """Loses the last element of K where K % 128 is the residue."""
    return wrong_where(lambda a, b: a.shape[1] % 128 == residue)


at_k200 = wrong_where(lambda a, b: a.shape[1] == 200)
below_a_block = wrong_where(lambda a, b: a.shape[1] < 128)
lost_vectors = wrong_where(lambda a, b: a.shape[1] % 16 != 0)
small_tile = wrong_where(lambda a, b: b.shape[0] < 16)
n_tail_of_one = wrong_where(lambda a, b: b.shape[0] % 128 == 1)
n_tail_of_127 = wrong_where(lambda a, b: b.shape[0] % 128 == 127)


def saturates(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
    """Clamps to the largest value of the output dtype."""
    most = torch.finfo(out_dtype).max
    return _product(a, a_scale, b, b_scale).clamp(-most, most).to(out_dtype)


def saturates_bf16(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
    """The same for bfloat16 alone."""
    return (saturates if out_dtype == torch.bfloat16 else gemm)(a, a_scale, b, b_scale, out_dtype)


def flushes(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
    """Subnormal results become 0."""
    out = gemm(a, a_scale, b, b_scale, out_dtype)
    return torch.where(out.abs().double() < torch.finfo(out_dtype).tiny, torch.zeros_like(out), out)


def flushes_bf16(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
    """The same for bfloat16 alone."""
    return (flushes if out_dtype == torch.bfloat16 else gemm)(a, a_scale, b, b_scale, out_dtype)


def dead_experts(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype = BF16) -> Tensor:
    """Scales below 1e-20 are read as 0."""
    a_scale, b_scale = (torch.where(scale < 1e-20, torch.zeros_like(scale), scale) for scale in (a_scale, b_scale))
    return gemm(a, a_scale, b, b_scale, out_dtype)


TAILS = {f"k{residue}": lost_tail(residue) for residue in range(1, 128)}


def __getattr__(name: str) -> Gemm:
    """``lost_k17`` is :func:`lost_tail` of 17."""
    if name.startswith("lost_k"):
        return TAILS[name.removeprefix("lost_")]
    raise AttributeError(name)
