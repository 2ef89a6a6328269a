"""What each library supports, as rows of data: architecture, CUDA, torch, package, switch, dtype, alignment, M.

A row of :data:`NEEDS` is one condition on a field of the problem, the machine or the configuration, with the reason
that is given where it fails. :func:`why_not` reads the rows of a backend in order and returns the first such reason.
Every threshold is written once, here: the rows, the published predicates (:mod:`kernels.platform`,
:mod:`kernels.moe`) and the code that runs share these constants.

Sources: vLLM csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu and utils/deep_gemm.py; torch's ScaledBlas.cpp; the
sources of sgl-kernel 0.3.21 and FlashInfer; DeepGEMM, and the Python, schemas and assertions of sgl-deep-gemm
0.1.4.post1, 0.1.7, 0.2.0, 0.2.1, 0.2.3.post2 and 0.2.5. Not covered: shapes that no row of a library mentions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from .errors import Reason, SwitchedOff, Unavailable, Unsupported
from .records import PACKAGES, Config, Machine, Problem

Version = tuple[int, ...]
Build = tuple[int, int | None, Version]
"""Capabilities ``low <= sm < high`` (None: no upper limit), and the least CUDA that compiles a kernel for them."""

E4M3_SM = 89
"""The first capability that converts to E4M3 and multiplies it."""
E4M3_GFX = (9, 4)
"""The same for AMD: gfx942."""
F16_SM = 80
"""The first capability with asynchronous copies, and float16 tensor cores that sum in float32."""
DEEP_GEMM_SM = (90, 100)
"""Capabilities of the published predicate ``is_deep_gemm_supported``, as its contract has it. Plans do not ask it: they
take what the library dispatches, :data:`DEEP_GEMM_FAMILIES`."""
DEEP_GEMM_FAMILIES = (9, 10, 12)
"""Families that DeepGEMM dispatches (``arch_major``), 12 in some distributions only."""
UE8M0_FAMILIES = (10, 12)
"""Families whose DeepGEMM kernels read packed UE8M0 scales of every row, and no float32 ones."""
E8M0_SWITCH: Mapping[int, str] = {90: "use_deep_gemm_e8m0_hopper", 100: "use_deep_gemm_e8m0"}
"""The switch that gives DeepGEMM UE8M0 scales, by capability."""
BLOCK = 128
"""Elements of K (and rows of a weight) to one block scale."""
SWITCH_M = 32
"""Rows from which DeepGEMM replaces FlashInfer's swapAB kernel."""
CUTLASS: Mapping[str, tuple[Build, ...]] = {
    "cutlass_fp8_supported": ((89, 90, (12, 4)), (90, None, (12, 0))),
    "cutlass_block_fp8_supported": ((90, 100, (12, 0)), (100, None, (12, 8))),
    "cutlass_group_gemm_supported": ((90, 100, (12, 3)), (100, None, (12, 8))),
    "sparse_cutlass_supported": ((90, 100, (12, 2)),),
}
MOE_FAMILIES: tuple[tuple[str | None, range | None, str], ...] = (
    # VLLM_FLASHINFER_MOE_BACKEND, capabilities (None: any), kernel family; the first row that fits
    ("masked_gemm", None, "CUTEDSL"),
    ("latency", range(100, 110), "TensorRT-LLM"),
    ("latency", None, "CUTLASS"),
    ("throughput", None, "CUTLASS"),
    (None, range(90, 91), "CUTLASS"),
)
ROWWISE_ROCM = (2, 7)
"""The first torch with a row-wise product on ROCm."""
ROWWISE_CPU = (2, 12)
"""The first torch whose ``_scaled_mm`` takes row-wise scales on a CPU: 2.11.0 refused them, 2.12.0 took them."""
ROWWISE_CUBLAS = (12, 9)
"""The first CUDA whose cuBLASLt has row-wise and block scales, on sm90 only; elsewhere torch takes CUTLASS's row-wise
kernel, which writes bf16 (torch's ScaledBlas.cpp; the newest writes f16 too)."""
SGL_SM: Mapping[str, tuple[int, ...]] = {"linear": (89, 90, 100), "block_linear": (90, 100)}
"""Capabilities whose kernels sgl-kernel's sources dispatch to. On 103 and 120 it loads the library of 100, whose
kernels were never run on these: they stay refused."""
SGL_WORD = 4
"""Groups to one packed scale of sgl-kernel: K is a multiple of four groups."""
LEAST_1D1D = 33
"""Rows from which DeepGEMM chooses tiles of 64. Its sm90_fp8_gemm_1d1d.cuh asserts ``BLOCK_M % 64 == 0``, and for fewer
rows its heuristics choose 16 or 32 (on an H200 with 0.1.4.post1 the compilation fails at M of 1, 5 and 17)."""
MX_LAYERS = ("moe_nvfp4", "moe_mxfp8_mxfp4", "moe_mxfp8")
"""Layers of experts of MX and NVFP4 that a library has in one call."""
PREFILLS = ("attention_prefill", "attention_ragged", "attention_paged")
"""Prefills of FP8 queries: of one sequence, of several, and over pages."""
BLOCK_QUANTISERS = ("quant_mxfp8", "quant_mxfp4", "quant_nvfp4")
"""Quantisers whose blocks share a scale byte."""
PLAIN_TORCH_ON_GPU = (
    "quant_tensor",
    "quant_token",
    "quant_group",
    "quant_group_packed",
    "quant_reciprocal",
    "quant_gated",
    "quant_norm",
    "quant_rope",
    "quant_cache",
    *BLOCK_QUANTISERS,
    "cast",
    "layout",
)
"""Operations that plain torch serves on every device."""
DENSE = "fp8_gemm_nt"
"""The dense product of codes with block scales."""
BLOCKS = "fp8_block_product"
"""The product of FP8 codes with scales of blocks on Blackwell, where other libraries serve it than before."""
RUNS = "fp8_block_runs"
"""The product of rows in runs, one after another, with scales of blocks: where no library takes runs as they lie, they
are copied to aligned places."""
ALIGNED = ("grouped_contiguous", "grouped_masked")
"""Products of the rows of each expert with scales of blocks: tiles that name their expert; matrices whose first rows
are real."""
GEMMS = (DENSE, BLOCKS, RUNS, "dynamic_blockscale", "grouped_contiguous", "grouped_masked")
"""DeepGEMM's products."""


BLACKWELL = (100, 103, 120, 121)
"""Capabilities with block-scaled instructions that a library's product is planned for."""
DENSE_MX = ("mxfp8_product", "nvfp4_product", "mxfp4_product")
"""Products of one matrix by one weight whose scales enter the instruction."""
GROUPED_MX = ("mxfp8_mxfp4_grouped", "nvfp4_grouped")
"""Products of the rows of each expert by its weight, in FlashInfer's placement."""
TIGHT_MX = ("mxfp8_tight", "nvfp4_tight", "mxfp4_tight")
"""The same where the scales of each expert's rows lie in tiles right behind those of the expert before it."""
MIXED = ("mixed_product", "mixed_contiguous", "mixed_masked", "mixed_psum")
"""DeepGEMM's products of codes of eight or four bits with powers of two for 32 or 128 of a row, in rows and columns."""
MX_OPERATIONS = (*DENSE_MX, "mxfp8_batched", *GROUPED_MX, *TIGHT_MX, *MIXED)
TILE_ROWS = 128
"""Rows of a tile of scales as Blackwell's instructions read it."""
FEW_ROWS = 32
"""Up to so many rows FlashInfer's CuTe DSL kernels cut K without being tuned."""
OTHER_BITS, NO_START = "a tuned kernel has other bits", "some tuned kernels do not start"
UNTUNED: Mapping[tuple[str, str], Mapping[int, str]] = {
    # (backend, operation): capability, and why its calls are excluded from tuning
    ("flashinfer_cutlass", "nvfp4_product"): {103: OTHER_BITS, 120: OTHER_BITS, 121: OTHER_BITS},  # K = 96; stream-K
    ("flashinfer_cutlass", "mxfp8_product"): {121: NO_START},
    ("flashinfer_cute_dsl", "mxfp8_product"): {100: OTHER_BITS, 103: OTHER_BITS},
    ("flashinfer_cute_dsl", "nvfp4_product"): {100: OTHER_BITS, 103: OTHER_BITS},
}
"""Sources: FlashInfer 0.7.2.post1, fp4_gemm_cutlass_template_sm103.h and _sm120.h, gemm_base.py (split-K tactics);
flashinfer-ai/flashinfer 3568 (GB10)."""


RANK, ROPE, TILE = 512, 64, 128
"""Multi-head latent attention: elements of a value, rotated elements of a key behind them, codes that share a scale."""
SCALES_AT, ROPE_AT, ROW = 512, 528, 656
"""Bytes of a row of fp8_ds_mla: where its four float32 scales and its 64 rotated columns begin, and its length."""
SPARE = 4096
"""Bytes of shared memory that a Triton product leaves for the scales in flight."""


def shared_memory(sm: int) -> int:
    """Bytes of shared memory that one block can have (CUDA programming guide, compute capabilities)."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(sm, 99) * 1024


def built(builds: tuple[Build, ...], sm: int, cuda: Version | None) -> bool:
    """Whether a kernel is compiled for a capability with this CUDA."""
    return any(low <= sm and (high is None or sm < high) and (cuda or (0,)) >= least for low, high, least in builds)


class Need(NamedTuple):
    """One condition: ``field relation bound``, looked at for the operations ``ops`` and where ``when`` holds.

    A field that is None passes every relation: an extent that the caller leaves open, a bias that is not there.
    """

    field: str
    relation: str
    bound: Any
    reason: str
    ops: tuple[str, ...]
    when: Mapping[str, object]


RELATIONS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    # relation: (whether value and bound satisfy it, the reason where a row gives none)
    "in": (lambda value, admitted: value in admitted, "{field}={value}; it takes {choices}"),
    ">=": (operator.ge, ""),
    "<": (operator.lt, ""),
    "multiple of": (lambda value, factor: value % factor == 0, "{FIELD}={value} is not a multiple of {bound}"),
    "built": (lambda sm_cuda, builds: built(builds, *sm_cuda), ""),
    "none": (lambda value, _: False, "{value}"),
}


def _need(field: str, relation: str, bound: object = None, reason: str = "", *ops: str, **when: object) -> Need:
    return Need(field, relation, bound, reason or RELATIONS[relation][1], ops, when)


def _multiples(*ops: str, **factors: int) -> tuple[Need, ...]:
    return tuple(_need(name, "multiple of", factor, "", *ops) for name, factor in factors.items())


def _compiled(routine: str, *ops: str) -> Need:
    parts = [
        f"sm{low}{'+' if high is None else ''} with CUDA >= {'.'.join(map(str, least))}"
        for low, high, least in CUTLASS[routine]
    ]
    reason = f"needs {' or '.join(parts)}; this is {{arch}}, CUDA {{cuda_text}}"
    return _need("sm_cuda", "built", CUTLASS[routine], reason, *ops)


GPU = _need("on", "in", ("gpu",), "needs a GPU; the operands are on the CPU")
NVIDIA = (GPU, _need("vendor", "in", ("nvidia",), "needs an NVIDIA GPU; this is {arch}"))
E4M3 = f"needs sm{E4M3_SM} or newer; this is {{arch}}"
NO_ROCM = (
    "its schedule is NVIDIA's, and no library multiplies block scales on {arch} here; quantise the weight per channel "
    "(Fp8Linear with kind=channel), which torch multiplies there"
)
OUT_16 = ("bfloat16", "float16")
OWN_BIAS = "bias={bias}; it takes the output dtype {out_dtype}"
NO_BLOCK_BIAS = "block scales take no bias"
SGL_NEEDS = {
    op: f"needs {', '.join(f'sm{sm}' for sm in have)}, and CUDA 12.0 (sm89 12.4, block scales on sm100 12.8); "
    "this is {arch}, CUDA {cuda_text}"
    for op, have in SGL_SM.items()
}

TILED = "the scales lie {value}; it reads tiles of 128x4"
ORDER = "batch-invariant mode keeps one order of sums for every M; {backend} states none"
DSL = "nvidia-cutlass-dsl {value} before 4.5.1 compiles garbage (NVIDIA/cutlass 3227); install a newer one"
OTHER_RECIPE = "it has the usual recipe: scales rounded up, codes of E4M3 or E2M1, one global scale for the tensor"
OWN_FORMULA = (
    "it quantises by its own formula, whose codes at ties may be neighbours; FP8_KERNELS_LIBRARY_QUANTISERS=1 allows it"
)
BY_FOUR = "the rows of an expert begin at multiples of {value}; it takes those of 4: pad them and pass row_alignment=4"
ONE_ALPHA = (
    "its grouped product has one alpha, and reads the scales of all rows as one matrix in tiles, where an expert's "
    "begin inside a tile; here each expert has a factor and tiles of its own"
)
OTHER_WEIGHTS = (
    "{backend} weights lie in another order than those of cutlass_fused_moe, which this layer takes: {order}; no call "
    "moves a weight"
)
LACKING_OF_025: Mapping[str, str] = {
    "skip_head_mid": "has this routine no more",
    "mqa_logits": "has fp8_fp4_mqa_logits alone, which writes a row from its query's first key on and names no dtype",
    "paged_mqa_logits": "has fp8_fp4_paged_mqa_logits alone, which on sm100 takes one token a row and an index of each "
    "and names no dtype",
}
"""What sgl-deep-gemm 0.2.5 has in the place of a routine."""
CUTS_K = "for few rows it cuts K, so that a sum depends on M; FP8_KERNELS_SPLIT_K=1 allows it"


def _e4m3(*ops: str) -> tuple[Need, ...]:
    codes = ("a_dtype", "b_dtype")
    return tuple(_need(field, "in", ("float8_e4m3fn",), "{field}={value}; it takes E4M3", *ops) for field in codes)


def _flashinfer(*sms: int, loops: bool = False, alphas: tuple[str, ...] = ("one",)) -> tuple[Need, ...]:
    """What every block-scaled product of FlashInfer needs; ``sms``: the capabilities that the backend claims.

    ``loops``: whether it multiplies the matrices of a batch one by one where no batched product takes them. ``alphas``:
    what may have an alpha of its own.
    """
    names = ", ".join(f"sm{sm}" for sm in sms)
    return (
        *NVIDIA,
        _need("sm", "in", sms, f"needs {names}; this is {{arch}}"),
        _need("flashinfer", "none"),
        _need("flashinfer_release", ">=", (0, 6, 18), "release {value} is older than any that was read: 0.6.18 to 0.7 "
              "(0.6.12 leaves zeros on sm120, flashinfer-ai/flashinfer 3398)"),
        _need("flashinfer_release", "<", (0, 8), "release {value} is newer than any that was read: 0.6.18 to 0.7"),
        _need("cuda", ">=", (12, 8), "needs CUDA 12.8; this is {cuda_text}"),
        *(_need("cuda", ">=", (12, 9), "needs CUDA 12.9 on {arch}; this is {cuda_text}", sm=sm) for sm in (103, 121)),
        _need("bias", "none", None, "it adds no bias"),
        _need("c", "none", None, "it has no further summand"),
        _need("out_dtype", "in", OUT_16),
        _need("tiles", "in", ("128x4",), TILED),
        *(_need(extent, ">=", TILE_ROWS, "{FIELD}={value}: below 128 results may hold NaN",
                "mxfp8_product", "mxfp8_batched")
          for extent in ("n", "k")),
        *_e4m3("mxfp8_product"),
        _need("alpha", "none", None, "it has no alpha", "mxfp8_product", "mxfp8_batched", "mxfp8_mxfp4_grouped"),
        _need("alpha", "in", alphas, "alpha for each {value}; it has one", "nvfp4_product", "mxfp4_product"),
        *(_need(extent, "multiple of", TILE_ROWS,
                "{FIELD}={value} is no multiple of 128: it reads the scales of every matrix in tiles of their own "
                "(flashinfer-ai/flashinfer 3604); multiply the matrices one by one", "mxfp8_batched", several=True)
          for extent in ("m", "n") if not loops),
    )  # fmt: skip  # a table, one row a line


NEEDS: Mapping[str, tuple[Need, ...]] = {
    # backend: (field, relation, bound, reason, operations (none named: all), field=value for rows of some problems)
    "triton": (
        *NVIDIA,
        _need("triton", "none"),
        _need("sm", ">=", E4M3_SM, f"E4M3 conversion {E4M3}"),
        _need("group_size", "in", range(4097), "group_size={value} is beyond one tile of 4096"),
    ),
    "triton_gemm": (
        GPU,
        _need("vendor", "in", ("nvidia",), NO_ROCM),
        _need("triton", "none"),
        _need("sm", ">=", F16_SM, f"needs sm{F16_SM} or newer; this is {{arch}}"),
        _need("out_dtype", "in", (*OUT_16, "float32")),
        _need("bias", "none", None, NO_BLOCK_BIAS),
        _need("c", "none", None, "it has no further summand"),
    ),
    "triton_linear": (
        *NVIDIA,
        _need("triton", "none"),
        _need("sm", ">=", F16_SM, f"needs sm{F16_SM} or newer; this is {{arch}}"),
        _need("blockscale_gemm_flashinfer", "in", (True,),
              "it quantises by FlashInfer's formula; switched off by VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0",
              "dynamic_blockscale"),
        _need("batch_invariant", "in", (False,), "batch-invariant mode keeps one kernel for every M",
              "dynamic_blockscale"),
        _need("m", "<", SWITCH_M, "M={value}: every program quantises all rows; it takes less than {bound}"),
        _need("ue8m0", "in", (False,), "its scales are float32"),
        *_multiples("dynamic_blockscale", "few_rows", k=BLOCK),
        _need("a_dtype", "in", (*OUT_16, "float8_e4m3fn"), "a_dtype={value}; it takes bfloat16 or float16", "few_rows"),
    ),
    "triton_mx": (
        *NVIDIA,
        _need("triton", "none"),
        _need("sm", ">=", F16_SM, f"needs sm{F16_SM} or newer; this is {{arch}}"),
    ),
    "cutlass": (
        *NVIDIA,
        _need("vllm_ops", "none"),
        _need("sm", ">=", E4M3_SM, f"E4M3 {E4M3}", "quant_tensor", "quant_token", "quant_group"),
        _need("op", "none", None, "its static operator multiplies by the reciprocal; this contract divides",
              "quant_tensor"),
        _need("op", "none", None,
              "its packed operator has a second floor, 1e-10 on the scale, and an infinite scale for an infinity",
              "quant_group_packed"),
        _need("group_size", "in", (64, 128), "", "quant_group"),
        _compiled("cutlass_fp8_supported", "linear"),
        _compiled("cutlass_block_fp8_supported", "block_linear"),
        _compiled("cutlass_group_gemm_supported", "grouped_scaled"),
        _need("sm", "in", range(90, 110), "its grouped product has kernels for sm90 to sm109; this is {arch}",
              "grouped_scaled"),
        _need("bias", "none", None, NO_BLOCK_BIAS, "block_linear"),
        *_multiples("block_linear", k=BLOCK, n=BLOCK),
        *_multiples("linear", "grouped_scaled", k=16, n=16),
        _compiled("cutlass_block_fp8_supported", BLOCKS),
        _need("c", "none", None, "it has no further summand", BLOCKS),
        *_multiples(BLOCKS, k=BLOCK, n=BLOCK),
        _need("out_dtype", "in", OUT_16, "", "linear", "block_linear", "grouped_scaled", "nvfp4_product", BLOCKS),
        _need("other_bias", "none", None, OWN_BIAS, "linear", "grouped_scaled"),
        _need("sm", "in", BLACKWELL, "its FP4 product is Blackwell's; this is {arch}", "nvfp4_product"),
        _need("cuda", ">=", (12, 8), "needs CUDA 12.8; this is {cuda_text}", "nvfp4_product"),
        *_multiples("nvfp4_product", k=32, n=32),
        _need("tiles", "in", ("128x4",), TILED, "nvfp4_product"),
        _need("bias", "none", None, "it adds no bias", "nvfp4_product"),
        _need("c", "none", None, "it has no further summand", "nvfp4_product"),
        _need("alpha", "in", ("one",), "alpha for each {value}; it has one", "nvfp4_product"),
        _need("sm", "in", BLACKWELL, "its grouped FP4 product is Blackwell's; this is {arch}", "nvfp4_tight"),
        _need("sm", "in", (100, 103), "its grouped MXFP4 product is planned for sm100 and sm103; this is {arch}",
              "mxfp4_tight"),
        _need("cuda", ">=", (12, 8), "needs CUDA 12.8; this is {cuda_text}", "nvfp4_tight"),
        _need("cuda", ">=", (12, 9), "needs CUDA 12.9; this is {cuda_text}", "mxfp4_tight"),
        _need("op", "none", None, "its quantiser of blocks is NVFP4's", "quant_mxfp8", "quant_mxfp4"),
        _need("sm", "in", BLACKWELL, "its FP4 quantiser is Blackwell's; this is {arch}", "quant_nvfp4"),
        _need("cuda", ">=", (12, 8), "needs CUDA 12.8; this is {cuda_text}", "quant_nvfp4"),
        _need("library_quantisers", "in", (True,), OWN_FORMULA, "quant_nvfp4"),
        _need("a_dtype", "in", OUT_16, "a_dtype={value}; it takes bfloat16 or float16", "quant_nvfp4"),
        _need("recipe", "in", ("usual",), OTHER_RECIPE, "quant_nvfp4"),
        _need("tiles", "in", ("128x4", "linear"), "the scales lie {value}; it writes tiles of 128x4, or none",
              "quant_nvfp4"),
        *_multiples("nvfp4_tight", "mxfp4_tight", k=32, n=8),
        _need("out_dtype", "in", ("bfloat16",), "", "nvfp4_tight", "mxfp4_tight"),
    ),
    "sgl_kernel": (
        *NVIDIA,
        _need("sgl_kernel", "none"),
        _need("op", "none", None, "its per-tensor operator multiplies by the reciprocal; this contract divides",
              "quant_tensor"),
        _need("op", "none", None,
              "its per-token operator has no floor on the scale, and codes a zero row of a small batch as NaN",
              "quant_token"),
        _need("sm", ">=", E4M3_SM, f"E4M3 {E4M3}", "quant_group", "quant_group_packed"),
        _need("group_size", "in", (BLOCK,), "", "quant_group", "quant_group_packed"),
        _need("a_dtype", "in", ("float8_e4m3fn", *OUT_16), "a_dtype={value}; it takes bfloat16 or float16",
              "quant_group", "quant_group_packed"),
        _need("ue8m0", "in", (False,), "its UE8M0 scales are packed, or rounded after the payload was quantised",
              "quant_group", "quant_group_packed"),
        _need("k", "multiple of", BLOCK * SGL_WORD, "K={value} ends inside a word of four groups",
              "quant_group_packed"),
        _need("sm", "in", SGL_SM["linear"], SGL_NEEDS["linear"], "linear"),
        _need("sm_cuda", "built", CUTLASS["cutlass_fp8_supported"], SGL_NEEDS["linear"], "linear"),
        _need("sm", "in", SGL_SM["block_linear"], SGL_NEEDS["block_linear"], "block_linear"),
        _need("sm_cuda", "built", CUTLASS["cutlass_block_fp8_supported"], SGL_NEEDS["block_linear"], "block_linear"),
        _need("sgl_kernel_release", "<", (0, 4, 10), "release {value} has no block-scaled product any more",
              "block_linear"),
        _need("bias", "none", None, NO_BLOCK_BIAS, "block_linear"),
        _need("other_bias", "none", None, OWN_BIAS, "linear"),
        *_multiples("block_linear", k=BLOCK, n=BLOCK),
        *_multiples("linear", k=16, n=16),
        _need("out_dtype", "in", OUT_16, "", "linear", "block_linear"),
    ),
    "torch": (
        _need("torch", ">=", (2, 6), "torch._scaled_mm on a CPU needs torch 2.6", "linear", "torch_linear", on="cpu"),
        _need("torch", ">=", ROWWISE_CPU,
              "row-wise scales on a CPU need torch 2.12; use torch_channelwise_w8a8_scaled_mm",
              "torch_linear", on="cpu", kernel="rowwise"),
        _need("capability", ">=", E4M3_GFX, "FP8 needs gfx942 or newer; this is {arch}",
              "linear", "torch_linear", on="gpu", vendor="amd"),
        _need("sm", ">=", E4M3_SM, f"FP8 {E4M3}", "linear", "torch_linear", on="gpu", vendor="nvidia"),
        *(_need(extent, "multiple of", 16, "", "linear", "torch_linear", on="gpu") for extent in ("k", "n")),
        _need("torch", ">=", ROWWISE_ROCM,
              "row-wise scaling needs sm89 or newer, or ROCm with torch 2.7 on gfx942 or newer",
              "torch_linear", on="gpu", vendor="amd", kernel="rowwise"),
        _need("out_dtype", "in", ("bfloat16",),
              "out_dtype={value}: row-wise products write bfloat16, others only on Hopper with CUDA 12.9; use "
              "torch_channelwise_w8a8_scaled_mm",
              "torch_linear", on="gpu", kernel="rowwise", rowwise_cublas=False),
        _need("bias", "none", None, "a fused bias needs bf16 or f16 output; use torch_channelwise_w8a8_scaled_mm",
              "torch_linear", on="gpu", out_dtype="float32"),
        _need("other_bias", "none", None, OWN_BIAS, "torch_linear", on="gpu"),
        *(need._replace(ops=("block_linear", "grouped_scaled")) for need in NVIDIA),
        _need("family", "in", (9,), "the kernel is Hopper's; this is {arch}", "block_linear"),
        _need("sm", "in", (90, 100), "its grouped product has kernels for sm90 and sm100, and is reported to trap on "
              "sm103 (pytorch/pytorch 187095); this is {arch}", "grouped_scaled"),
        _need("torch", ">=", (2, 10), "torch.nn.functional.scaled_mm needs torch 2.10", "block_linear"),
        _need("cuda", ">=", ROWWISE_CUBLAS, "block-scaled cuBLASLt needs CUDA 12.9", "block_linear"),
        _need("bias", "none", None, "block scales take no bias here", "block_linear"),
        *_multiples("block_linear", k=BLOCK, n=BLOCK),
        _need("out_dtype", "in", ("bfloat16", "float32"), "", "block_linear"),
        _need("torch", ">=", (2, 8), "torch._scaled_grouped_mm needs torch 2.8", "grouped_scaled"),
        *_multiples("grouped_scaled", k=16, n=16),
        _need("out_dtype", "in", ("bfloat16",), "", "grouped_scaled"),
        _need("scales", "in", (("token", "channel"),), "it takes scales per token and per channel", "grouped_scaled"),
        *(need._replace(ops=DENSE_MX) for need in NVIDIA),
        _need("sm", "in", BLACKWELL, "block scales are Blackwell's; this is {arch}", "mxfp8_product"),
        _need("sm", "in", (100, 103), "cuBLASLt's FP4 product is planned for sm100 and sm103; this is {arch}",
              "nvfp4_product"),
        _need("torch", ">=", (2, 10), "torch.nn.functional.scaled_mm needs torch 2.10",
              "mxfp8_product", "nvfp4_product"),
        _need("cuda", ">=", (12, 8), "needs CUDA 12.8; this is {cuda_text}", "mxfp8_product", "nvfp4_product"),
        _need("batch_invariant", "in", (False,), ORDER.format(backend="cuBLASLt"), "mxfp8_product", "nvfp4_product"),
        *_multiples("mxfp8_product", "nvfp4_product", k=32, n=16),
        _need("tiles", "in", ("128x4",), TILED, "mxfp8_product", "nvfp4_product"),
        _need("c", "none", None, "it has no further summand", "mxfp8_product", "nvfp4_product"),
        _need("other_bias", "none", None, OWN_BIAS, "mxfp8_product", "nvfp4_product"),
        _need("bias", "none", None, "a fused bias needs bf16 or f16 output", "mxfp8_product", "nvfp4_product",
              out_dtype="float32"),
        _need("alpha", "none", None, "it has no alpha", "mxfp8_product"),
        _need("alpha", "in", ("one",), "alpha for each {value}; it has one", "nvfp4_product"),
        *(need._replace(ops=TIGHT_MX) for need in NVIDIA),
        _need("sm", "in", (100,), "its grouped product of block scales (MSLK's) is planned for sm100; this is {arch}",
              *TIGHT_MX),
        _need("torch", ">=", (2, 10), "torch.nn.functional.scaled_grouped_mm needs torch 2.10", *TIGHT_MX),
        _need("cuda", ">=", (12, 8), "needs CUDA 12.8; this is {cuda_text}", *TIGHT_MX),
        _need("batch_invariant", "in", (False,), ORDER.format(backend="MSLK"), *TIGHT_MX),
        *_multiples(*TIGHT_MX, k=32, n=16),
        _need("alpha", "none", None, "it has no alpha for each expert", *TIGHT_MX),
        _need("op", "none", None, "its MXFP4 product (MSLK's) drops the bias and the output dtype, and torch's fake "
              "function counts the scales of packed codes by half", "mxfp4_product"),
    ),
    "deep_gemm": (
        *NVIDIA,
        _need("family", "in", DEEP_GEMM_FAMILIES, "needs sm90, sm100, sm103 or sm120; this is {arch}"),
        _need("sm", "in", (90, 100, 103, 120),
              "needs sm90, sm100, sm103 or sm120; on a GB10 its block-scaled product faults (vllm-project/vllm 54125)"),
        _need("use_deep_gemm", "in", (True,), "switched off by VLLM_USE_DEEP_GEMM=0"),
        _need("use_flashinfer_moe_fp8", "in", (False,), "switched off by VLLM_USE_FLASHINFER_MOE_FP8=1"),
        _need("deep_gemm", "none"),
        _need("deep_gemm_source", "in", ("sgl-deep-gemm", "vllm"),
              "its kernels for sm120 are known of sgl-deep-gemm and vLLM; this is {value}'s", family=12),
        _need("deep_gemm_release", ">=", (0, 1, 7), "sgl-deep-gemm {value} has no kernels for sm120; install 0.1.7",
              family=12, deep_gemm_source="sgl-deep-gemm"),
        _need("deep_gemm_release", ">=", (0, 33), "vLLM {value} vendors no kernels for sm120; install 0.33",
              family=12, deep_gemm_source="vllm"),
        *(_need("deep_gemm_release", "<", (0, 2, 5), f"sgl-deep-gemm {{value}} {lacks}; install 0.2.3.post2", op,
                deep_gemm_source="sgl-deep-gemm")
          for op, lacks in LACKING_OF_025.items()),
        *(_need("scale_format", "in", ("ue8m0",), "on {arch} it reads UE8M0 scales only; quantise with use_ue8m0=True "
                "and pass disable_ue8m0_cast=False", *GEMMS, "skip_head_mid", family=family)
          for family in UE8M0_FAMILIES),
        _need("sm", "in", (90, 100, 103), "it has no such product for {arch}", "skip_head_mid"),
        _need("sm", "in", (100, 103, 120), "FP4 and scales of 32 are Blackwell's; this is {arch}", *MIXED,
              "mxfp4_product"),
        *_multiples(*MIXED, "mxfp4_product", k=BLOCK, n=64),
        _need("tiles", "in", ("128x4",), TILED, "mxfp4_product"),
        *(_need(field, "none", None, f"it has no {field}", "mxfp4_product") for field in ("alpha", "bias", "c")),
        _need("out_dtype", "in", ("bfloat16",), "", "mxfp4_product"),
        _need("batch_invariant", "in", (False,), ORDER.format(backend="its product of two operands of four bits"),
              "mxfp4_product"),
        _need("out_dtype", "in", ("bfloat16", "float32"), "", *MIXED),
        _need("bias", "none", None, "it adds no bias", *MIXED),
        *(_need(width, "in", (32,), "two operands of four bits with one scale for {value} codes; its kernel of kind "
                "mxf4 takes 32", *MIXED, a_dtype="uint8", b_dtype="uint8")
          for width in ("a_width", "b_width")),
        _need("out_dtype", "in", ("bfloat16",), "", *GEMMS),
        _need("c", "none", None, "c needs weights with one scale per channel, which this contract does not have",
              *GEMMS),
        *_multiples(*GEMMS, "skip_head_mid", "einsum", k=BLOCK, n=64),
        _need("out_dtype", "in", ("bfloat16",), "", "skip_head_mid", "einsum"),
        _need("sm", "in", (90,), "float32 scales for every row of both operands are sm90's; this is {arch}",
              "gemm_1d1d", "k_grouped", "einsum"),
        _need("m", ">=", LEAST_1D1D, "its kernel of at most 32 rows does not compile (it multiplies tiles of 64 rows)",
              "gemm_1d1d", "k_grouped"),
        *_multiples("gemm_1d1d", k=16, n=8),
        *_multiples("k_grouped", n=8),
        _need("heads", "in", (32, 64), "", "mqa_logits", "paged_mqa_logits"),
        _need("head_dim", "in", (32, 64, 128), "", "mqa_logits", "paged_mqa_logits"),
        _need("block_size", "in", (64,), "", "mqa_logits", "paged_mqa_logits"),
    ),
    "vllm_fa3": (
        *NVIDIA,
        _need("sm", "in", (90,), "FlashAttention-3 is sm90's; this is {arch}"),
        _need("vllm_fa3", "none"),
        _need("value_as_wide", "in", (True,), "a value has {n} elements and a key {head_dim}; it takes like ones"),
    ),
    "flashmla": (
        *NVIDIA,
        _need("sm", "in", (90,), "its sparse decode is planned for sm90; this is {arch}"),
        _need("flashmla", "none"),
        _need("heads", "in", (64, 128)),
        _need("k", "multiple of", 64, "{value} slots to a token; it takes multiples of 64: fill them with -1"),
    ),
    "flashinfer": (
        *NVIDIA,
        _need("sm", "in", (90,), "its prefill of FP8 queries is sm90's; this is {arch}", *PREFILLS),
        _need("head_dim", "in", (64, 128, 256), "", *PREFILLS),
        _need("family", "in", (10,), "the TensorRT-LLM kernel needs the sm100 family; this is {arch}", "moe_trtllm"),
        _need("family", "in", (9, 10, 12), "needs sm90 or newer; this is {arch}", "moe_cutlass"),
        _need("sm", "in", (90,), "fp8_blockscale_gemm_sm90 needs sm90; this is {arch}",
              "blockscale_sm90", "dynamic_blockscale"),
        _need("sm", ">=", E4M3_SM, f"bmm_fp8 {E4M3}", "bmm"),
        _need("a_dtype", "in", ("float8_e4m3fn",), "two E5M2 operands are no product of cuBLAS",
              "bmm", b_dtype="float8_e5m2"),
        *_multiples("bmm", k=16, n=16),
        _need("cuda", ">=", (12, 8), "needs CUDA >= 12.8; this is {cuda_tuple}",
              "blockscale_sm90", "dynamic_blockscale"),
        _need("blockscale_gemm_flashinfer", "in", (True,), "switched off by VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0",
              "blockscale_sm90", "dynamic_blockscale"),
        _need("batch_invariant", "in", (False,), "batch-invariant mode keeps one kernel for every M",
              "dynamic_blockscale"),
        _need("m", "<", SWITCH_M, "M={value} >= {bound} goes to DeepGEMM", "dynamic_blockscale"),
        _need("flashinfer", "none"),
        _need("flashinfer_cubin", "none", None, "", "moe_trtllm"),
        *_multiples("blockscale_sm90", "dynamic_blockscale", k=BLOCK, n=64),
        _need("out_dtype", "in", ("bfloat16",),
              "out_dtype={value}: the kernel writes bf16 bits whatever it is told; ask for bfloat16 and cast",
              "blockscale_sm90", "dynamic_blockscale"),
    ),
    "flashinfer_quant": (
        *NVIDIA,
        _need("sm", "in", BLACKWELL, "below sm100 its kernels are empty; this is {arch}"),
        _need("library_quantisers", "in", (True,), OWN_FORMULA),
        _need("flashinfer", "none"),
        _need("flashinfer_release", ">=", (0, 6, 18), "release {value} is older than any that was read: 0.6.18 to 0.7"),
        _need("flashinfer_release", ">=", (0, 7), "release {value} reads FLASHINFER_NVFP4_4OVER6 whatever the call "
              "says; install 0.7", "quant_nvfp4"),
        _need("flashinfer_release", "<", (0, 8), "release {value} is newer than any that was read: 0.6.18 to 0.7"),
        _need("cuda", ">=", (12, 8), "needs CUDA 12.8; this is {cuda_text}"),
        *(_need("cuda", ">=", (12, 9), "needs CUDA 12.9 on {arch}; this is {cuda_text}", sm=sm) for sm in (103, 121)),
        _need("a_dtype", "in", OUT_16, "a_dtype={value}; it takes bfloat16 or float16"),
        _need("recipe", "in", ("usual",), OTHER_RECIPE),
    ),
    "flashinfer_cutlass": (
        *_flashinfer(*BLACKWELL, loops=True),
        _need("sm", "in", (120, 121), "it has this product for sm120 and sm121; this is {arch}", "nvfp4_grouped"),
        *_e4m3("mxfp8_batched"),
        *_multiples("mxfp8_product", "nvfp4_product", "mxfp8_batched", k=32, n=32),
        *_multiples(*GROUPED_MX, k=128, n=8),
        *_multiples(BLOCKS, k=BLOCK, n=BLOCK),
        _need("batch_invariant", "in", (False,), "batch-invariant mode keeps one kernel for every M; up to 32 rows it "
              "takes another one", BLOCKS, family=10),
        *_multiples(*MX_LAYERS, k=BLOCK, n=BLOCK),
        _need("batch_invariant", "in", (False,), ORDER.format(backend="the fused layer"), *MX_LAYERS),
        _need("row_alignment", "multiple of", 4, BY_FOUR, *GROUPED_MX),
        _need("row_alignment", "multiple of", 4, BY_FOUR, RUNS, family=10),
        *_multiples(RUNS, *ALIGNED, k=BLOCK, n=BLOCK),
        _need("out_dtype", "in", ("bfloat16",), "", RUNS, *ALIGNED, family=12),
        _need("batch_invariant", "in", (False,), ORDER.format(backend="its grouped product"), RUNS, *ALIGNED),
    ),
    "flashinfer_trtllm": (
        *_flashinfer(100, 103),
        _need("op", "none", None, OTHER_WEIGHTS.format(backend="TensorRT-LLM's", order="shuffle_matrix_a"), *MX_LAYERS),
        *_multiples(BLOCKS, k=BLOCK, n=BLOCK),
        _need("k", ">=", 256, "K={value}; its kernels take 256 and more", BLOCKS),
        _need("out_dtype", "in", ("bfloat16",), "out_dtype={value}: it is told to write bf16 whatever is asked for",
              BLOCKS),
        _need("batch_invariant", "in", (False,), ORDER.format(backend="TensorRT-LLM's kernel"), BLOCKS),
    ),
    "flashinfer_b12x": (
        *_flashinfer(120, 121),
        _need("op", "none", None, "its layer adds the outputs of a token's experts in bf16 by atomics: another sum "
              "from run to run, rounded for each expert", *MX_LAYERS),
        _need("cuda", ">=", (13, 0), "needs CUDA 13; this is {cuda_text}", "mxfp8_product", "mxfp4_product"),
        _need("cuda", ">=", (12, 9), "needs CUDA 12.9; this is {cuda_text}", "nvfp4_product"),
        _need("cutlass_dsl", "none"),
        _need("cutlass_dsl_release", ">=", (4, 6), "its MXFP8 kernel needs nvidia-cutlass-dsl 4.6; this is {value}",
              "mxfp8_product"),
        _need("cutlass_dsl_release", ">=", (4, 5, 1), DSL),
        *_multiples("mxfp8_product", k=128),
        *_multiples("nvfp4_product", "mxfp4_product", k=32),
        *_multiples(*DENSE_MX, n=8),
    ),
    "flashinfer_cudnn": (
        *_flashinfer(*BLACKWELL),
        _need("flashinfer_release", ">=", (0, 7), "release {value} replaces scratch memory that captured graphs hold "
              "(flashinfer-ai/flashinfer 4398); install 0.7"),
        _need("cudnn", "none"),
        _need("op", "none", None, ONE_ALPHA, "nvfp4_grouped"),
        _need("cudnn_release", ">=", (9, 15), "its NVFP4 product is taken from cuDNN 9.15 on; this is {value}",
              "nvfp4_product"),
        _need("cuda", ">=", (13, 0), "its NVFP4 product is taken from CUDA 13 on; this is {cuda_text}",
              "nvfp4_product"),
        *(_need("cudnn_release", ">=", (9, 14), "MXFP4 on {arch} needs cuDNN 9.14; this is {value}", "mxfp4_product",
                sm=sm) for sm in (120, 121)),
        _need("batch_invariant", "in", (False,), ORDER.format(backend="cuDNN")),
        *_multiples("mxfp8_product", "mxfp8_batched", k=32, n=16),
        *_multiples("nvfp4_product", "mxfp4_product", k=32, n=16),
    ),
    "flashinfer_cute_dsl": (
        *_flashinfer(100, 103, alphas=("one", "row")),
        _need("op", "none", None, OTHER_WEIGHTS.format(backend="CuTe DSL's", order="up and gate by turns of 64 rows"),
              *MX_LAYERS),
        _need("cutlass_dsl", "none"),
        _need("cutlass_dsl_release", ">=", (4, 5, 1), DSL),
        *_multiples("nvfp4_product", "mxfp4_product", n=8, k=32),
        *_multiples("mxfp8_product", k=32, n=16),
        _need("few_rows", "in", (True,), "M > 32: it is taken for few rows", "mxfp8_product"),
        _need("batch_invariant", "in", (False,), "batch-invariant mode keeps one order of sums for every M; this one "
              "cuts K for few rows", "mxfp8_product", "nvfp4_product"),
        _need("split_k", "in", (True,), CUTS_K, "mxfp8_product"),
        _need("split_k", "in", (True,), CUTS_K, "nvfp4_product", few_rows=True),
    ),
    "eager": (
        _need("on", "in", ("cpu",), "plain torch serves CPU tensors only; on a GPU it would hide a missing library",
              any_device=False),
    ),
}  # fmt: skip  # a table, one row a line


SWITCHES = frozenset(f.name for f in fields(Config))
"""Fields of a row that are switches."""


def why_not(backend: str, p: Problem, machine: Machine, config: Config) -> Reason | None:
    """The reason of the first row of a backend that fails, None when every row holds.

    Its class follows from the field: a package is unavailable, a switch is off, anything else is unsupported.
    """
    values = _values(p, machine, config)
    for need in NEEDS[backend]:
        if need.ops and p.op not in need.ops or any(values[name] != value for name, value in need.when.items()):
            continue
        value = values[need.field]
        if value is None or RELATIONS[need.relation][0](value, need.bound):
            continue
        *others, last = need.bound if isinstance(need.bound, tuple) else ("",)
        choices = f"{', '.join(map(str, others))} or {last}" if others else last
        shown = ".".join(map(str, value)) if need.field in RELEASED and isinstance(value, tuple) else value
        described = {"field": need.field, "FIELD": need.field.upper(), "value": shown, "bound": need.bound}
        kind = Unavailable if need.field in RELEASED else SwitchedOff if need.field in SWITCHES else Unsupported
        return kind(need.reason.format(**{**values, **described, "choices": choices}))
    return None


def _values(p: Problem, machine: Machine, config: Config) -> dict[str, Any]:
    """What a row can name: fields of the three records, why a package is unusable, and what follows from these."""
    cuda = machine.cuda or (0,)
    return {
        **vars(config),
        **vars(p),
        **_packages(machine),
        "vendor": machine.vendor,
        "arch": machine.arch,
        "capability": machine.capability,
        "torch": machine.torch,
        "on": "cpu" if machine.vendor == "cpu" or p.device == "cpu" else "gpu",
        "sm": machine.sm,
        "family": machine.sm // 10,
        "sm_cuda": (machine.sm, machine.cuda),
        "cuda": cuda,
        "cuda_tuple": machine.cuda,
        "cuda_text": ".".join(map(str, machine.cuda or ())),
        "scales": (p.a_scale, p.b_scale),
        "other_bias": None if p.bias == p.out_dtype else p.bias,
        "any_device": p.op in PLAIN_TORCH_ON_GPU,
        "rowwise_cublas": rowwise_cublas(machine),
        "value_as_wide": p.n is None or p.n == p.head_dim,
        "few_rows": p.m is None or p.m <= FEW_ROWS,
        "several": p.groups is not None and p.groups > 1,
    }


def _packages(machine: Machine) -> dict[str, Any]:
    """Why each package is unusable, ``NAME_release`` as integers, and ``NAME_source``, the distribution it is from."""
    values: dict[str, Any] = {}
    for package in map(machine.package, PACKAGES):
        name = package.name
        values |= {name: package.why_not, f"{name}_release": package.release, f"{name}_source": package.source}
    return values


RELEASED = frozenset(f"{name}_{what}" for name in PACKAGES for what in ("release", "source")) | frozenset(PACKAGES)
"""Fields that say something of an installed package."""


def rowwise_cublas(machine: Machine) -> bool:
    """Whether torch's row-wise product is cuBLASLt's, the only one that writes more than bf16."""
    return machine.sm // 10 == 9 and (machine.cuda or (0,)) >= ROWWISE_CUBLAS
