"""DeepGEMM: block-scaled dense and grouped products and indexer logits on sm90 and sm100.

The library is imported at the first call, under any of its import names, and its drift across releases is absorbed
here: symbol renames, alignment getters, one- or two-dimensional context lengths, the ``disable_ue8m0_cast`` option.
DeepGEMM itself brings activation scales into its own layout (MN-major, TMA-aligned) and does nothing when they
already have it; operands that TMA cannot address are copied first.

Not covered: FP4 operands, k-grouped products, scales per channel of the weight.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.backends import _needs
from kernels.backends._dense import ALIGNMENT, packed
from kernels.backends._device import elsewhere, on_its_device
from kernels.config import Config, current_config
from kernels.errors import MissingPackageError

if TYPE_CHECKING:
    from kernels.plan import Problem
    from kernels.platform import Machine

IMPORT_NAMES = ("deep_gemm", "vllm.third_party.deep_gemm")
SYMBOLS = {
    # our name: the library's names, newest first
    "fp8_gemm_nt": ("fp8_gemm_nt", "gemm_fp8_fp8_bf16_nt"),
    "grouped_contiguous": ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"),
    "grouped_masked": (
        "fp8_m_grouped_gemm_nt_masked",
        "m_grouped_fp8_gemm_nt_masked",
        "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    ),
    "mqa_logits": ("fp8_mqa_logits",),
    "paged_mqa_logits": ("fp8_paged_mqa_logits",),
    "paged_metadata": ("get_paged_mqa_logits_metadata",),
    "alignment": ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"),
}
LEGACY = frozenset(
    {"gemm_fp8_fp8_bf16_nt", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_masked"}
)
"""Names of the first release, whose kernels take ready TMA-aligned scales and no UE8M0 option."""
COMPILED = ("0.1.4.post1",)
"""Releases of sgl-deep-gemm whose compiled functions are known by their parameters."""
MASKED_TILE = 128
"""Rows to which each group of a masked product is brought: the kernel stores whole tiles of up to 128 rows, and what
is over lands in the next group (seen on an H200: with 17 rows a group, group g overwrites rows of group g + 1)."""
GEMMS = ("fp8_gemm_nt", "dynamic_blockscale", "grouped_contiguous", "grouped_masked")


def why_not(p: Problem, machine: Machine, config: Config) -> str | None:
    """Reasons against DeepGEMM; see :mod:`kernels.plan`."""
    reason = _needs.first(
        _needs.gpu(p, machine, None),
        None if machine.sm in (90, 100) else f"needs sm90 or sm100; this is {machine.arch}",
        None if config.use_deep_gemm else "switched off by VLLM_USE_DEEP_GEMM=0",
        "switched off by VLLM_USE_FLASHINFER_MOE_FP8=1" if config.use_flashinfer_moe_fp8 else None,
        machine.package("deep_gemm").why_not,
    )
    if reason is not None:
        return reason
    if p.op in GEMMS:
        return _needs.first(
            _needs.dtypes(p, "out_dtype", "bfloat16"),
            None if p.c is None else "c needs weights with one scale per channel, which this contract does not have",
            _needs.multiples(p, k=128, n=64),
        )
    if p.op in ("mqa_logits", "paged_mqa_logits"):
        heads = None if p.heads in (None, 32, 64) else f"heads={p.heads}; it takes 32 or 64"
        dim = None if p.head_dim in (None, 32, 64, 128) else f"head_dim={p.head_dim}; it takes 32, 64 or 128"
        block = None if p.block_size in (None, 64) else f"block_size={p.block_size}; it takes 64"
        return _needs.first(heads, dim, block)
    return None


def kernel(p: Problem, machine: Machine) -> str:
    """The library's routine."""
    name = {"dynamic_blockscale": "fp8_gemm_nt"}.get(p.op, p.op)
    return SYMBOLS[name][0]


def steps(p: Problem, machine: Machine) -> tuple[str, ...]:
    """What happens to the operands first."""
    if p.op not in GEMMS:
        return ("clean the logits outside the window",) if p.op.endswith("logits") else ()
    scale = (
        "a_scale to packed UE8M0 int32, MN-major, TMA-aligned"
        if machine.sm == 100
        else "a_scale to float32 MN-major, TMA-aligned"
    )
    first = {
        "dynamic_blockscale": ("quantise the input 1x128",),
        "grouped_masked": (f"pad the rows of each group to a multiple of {MASKED_TILE}, cropped afterwards",),
    }.get(p.op, ())
    return (*first, f"{scale} (by the library; nothing when it already is)")


@functools.cache
def library() -> ModuleType:
    """The imported library.

    Raises
    ------
    MissingPackageError
        No import name works; every failure is listed.
    """
    current_config().export_jit_cache()
    reasons: dict[str, str] = {}
    for name in IMPORT_NAMES:
        try:
            return importlib.import_module(name)
        except Exception as error:  # whatever a foreign library raises while it loads is the reason given below
            reasons[name] = f"{type(error).__name__}: {error}"
    raise MissingPackageError("DeepGEMM; install `sgl-deep-gemm` or vLLM, which vendors it", reasons)


@functools.cache
def symbol(name: str) -> tuple[Callable[..., Any], str]:
    """The library's function for one of :data:`SYMBOLS`, with the name it was found under."""
    module = library()
    for candidate in SYMBOLS[name]:
        found = getattr(module, candidate, None)
        if found is not None:
            return found, candidate
    missing = " or ".join(SYMBOLS[name])
    raise MissingPackageError("DeepGEMM", {module.__name__: f"this release has no {missing}; install a newer one"})


def alignment() -> int:
    """Rows to which each expert's run is aligned in the contiguous layout."""
    return int(symbol("alignment")[0]())


def fp8_gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, disable_ue8m0_cast: bool
) -> None:
    """Dense product into ``out``."""
    if elsewhere(a.device):
        with torch.cuda.device(a.device):
            return fp8_gemm_nt(a, a_scale, b, b_scale, out, c, disable_ue8m0_cast)
    target = writable(out)
    fresh_gemm_nt(addressable(a), _row_scale(a_scale), b, b_scale, target, c, disable_ue8m0_cast)
    if target is not out:
        out.copy_(target)


def fresh_gemm_nt(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, c: Tensor | None, disable_ue8m0_cast: bool
) -> None:
    """:func:`fp8_gemm_nt` where all but the weight was made for it, dense and on 16 bytes."""
    if not (b.is_contiguous() and b.data_ptr() % ALIGNMENT == 0):  # no extent of a weight is 1
        b = addressable(b)
    if b_scale.stride() != (b_scale.shape[1], 1):
        b_scale = _weight_scale(b_scale)
    direct = compiled_gemm()
    if direct is not None:
        direct(a, a_scale, b, b_scale, out, None, None, None, None, "", disable_ue8m0_cast)
        return
    function, name = symbol("fp8_gemm_nt")
    if name in LEGACY:
        function((a, _legacy_scale(a_scale)), (b, b_scale), out)
    else:
        function((a, a_scale), (b, b_scale), out, disable_ue8m0_cast=disable_ue8m0_cast)


@functools.cache
def compiled_gemm() -> Callable[..., None] | None:
    """The compiled function behind ``fp8_gemm_nt`` where its parameters are known, else None.

    ``(a, a_scale, b, b_scale, out, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)``: the defaults of
    the public function are None and an empty text. Calling it saves what unpacking two pairs in Python costs.
    """
    module = library()
    if module.__name__ != "deep_gemm" or getattr(module, "__version__", None) not in COMPILED:
        return None
    return module._C.fp8_fp4_gemm_nt  # type: ignore[no-any-return]  # an untyped library


@on_its_device
def grouped_contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, m_indices: Tensor, disable_ue8m0_cast: bool
) -> None:
    """Grouped product over rows sorted by expert, into ``out``."""
    function, name = symbol("grouped_contiguous")
    target = writable(out)
    weight = addressable(b), _weight_scale(b_scale)
    if name in LEGACY:
        function((addressable(a), _legacy_scale(a_scale)), weight, target, m_indices)
    else:
        left = addressable(a), _row_scale(a_scale)
        function(left, weight, target, m_indices, disable_ue8m0_cast=disable_ue8m0_cast)
    if target is not out:
        out.copy_(target)


@on_its_device
def grouped_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    masked_m: Tensor,
    expected_m: int,
    disable_ue8m0_cast: bool,
) -> None:
    """Grouped product over ``[G, M, K]`` with a row count per group, into ``out``."""
    function, name = symbol("grouped_masked")
    m = a.shape[1]
    if m % MASKED_TILE and a.shape[0] > 1:
        lead = m + (-m % MASKED_TILE)
        a, a_scale = _longer(a, lead), _longer(a_scale, lead)
        target = torch.empty(out.shape[0], lead, out.shape[2], dtype=out.dtype, device=out.device)
    else:
        target = writable(out)
    left, right = (addressable(a), _row_scale(a_scale)), (addressable(b), _weight_scale(b_scale))
    if name in LEGACY:
        function((left[0], _legacy_scale(a_scale)), right, target, masked_m, expected_m)
    else:
        function(left, right, target, masked_m, expected_m, disable_ue8m0_cast=disable_ue8m0_cast)
    if target is not out:
        out.copy_(target[:, :m])


def _longer(x: Tensor, lead: int) -> Tensor:
    """``[G, M, ...]`` with ``lead`` rows a group; the added ones hold 0."""
    ready = x.new_zeros(x.shape[0], lead, x.shape[2])
    ready[:, : x.shape[1]] = x
    return ready


@on_its_device
def mqa_logits(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor, ks: Tensor, ke: Tensor, clean: bool) -> Tensor:
    """Indexer logits ``[M, N]``; ``clean`` writes -inf outside the window."""
    function, _ = symbol("mqa_logits")
    logits: Tensor = function(
        q.contiguous(), (k.contiguous(), k_scale), weights.contiguous(), ks, ke, clean_logits=clean
    )
    return logits


@on_its_device
def paged_mqa_logits(
    q: Tensor, cache: Tensor, weights: Tensor, lens: Tensor, tables: Tensor, schedule: Tensor, longest: int, clean: bool
) -> Tensor:
    """Indexer logits ``[B * next_n, longest]`` over a paged cache; ``lens`` is ``[B, next_n]``, per query token."""
    function, _ = symbol("paged_mqa_logits")
    logits: Tensor = function(
        q.contiguous(), cache, weights.contiguous(), context_lens(lens), tables, schedule, longest, clean_logits=False
    )
    if clean:
        outside = torch.arange(longest, device=q.device) >= lens.reshape(-1, 1)
        logits.masked_fill_(outside, float("-inf"))
    return logits


@on_its_device
def paged_metadata(lens: Tensor, block_size: int, num_sms: int) -> Tensor:
    """``[num_sms + 1, 2]`` int32; ``lens`` is ``[B, next_n]``."""
    schedule: Tensor = symbol("paged_metadata")[0](context_lens(lens), block_size, num_sms)
    return schedule


def context_lens(lens: Tensor) -> Tensor:
    """``[B, next_n]`` as it is for a release that takes it, the last column ``[B]`` for one that does not."""
    return lens.contiguous() if takes_2d_lens() else lens[:, -1].contiguous()


@functools.cache
def takes_2d_lens() -> bool:
    """Whether this release takes context lengths per query token: those that know ``indices`` do."""
    function, _ = symbol("paged_metadata")
    if "indices" in (function.__doc__ or ""):
        return True
    try:
        return "indices" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a compiled function without a signature: the first releases
        return False


def addressable(x: Tensor) -> Tensor:
    """E4M3 ``x`` itself when TMA can address it (K-major, rows and base on 16 bytes), else a contiguous copy."""
    strides = x.stride()
    if strides[-1] == 1 and strides[-2] % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0:
        if len(strides) == 3 and packed(x):
            return x
        if len(strides) == 2 and (x.is_contiguous() or strides[0] >= x.shape[1]):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def writable(out: Tensor) -> Tensor:
    """``out`` itself when the kernel can write it, else an empty contiguous stand-in to copy from."""
    if packed(out) and out.data_ptr() % ALIGNMENT == 0:
        return out
    return torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _row_scale(scale: Tensor) -> Tensor:
    """What the library brings into its layout, or takes as it is where it lies so already: then on 16 bytes."""
    return scale if scale.data_ptr() % ALIGNMENT == 0 else scale.clone(memory_format=torch.contiguous_format)


def _weight_scale(scale: Tensor) -> Tensor:
    """Float32 scales dense, which the library asks for; packed UE8M0 ones as they were made."""
    if packed(scale) or scale.dtype is not torch.float32:
        return scale
    return scale.clone(memory_format=torch.contiguous_format)


def _legacy_scale(scale: Tensor) -> Tensor:
    ready: Tensor = library().get_col_major_tma_aligned_tensor(scale)
    return ready
