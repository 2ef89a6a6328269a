"""Runs under ``TRITON_INTERPRET=1``: the linear layer of few rows judged by the oracle; prints ``{check: good}``.

The variable must be set before Triton is imported, so this is a program of its own (see ``test_triton_linear.py``). A
sabotaged kernel is the module's text with one expression replaced. Outputs are float32: the interpreter cuts digits off
where the GPU rounds to bfloat16.
"""

from __future__ import annotations

import json
import warnings
from types import ModuleType

import torch
from interpreted_gemm import LEFT, sabotaged
from torch import Tensor

from kernels.backends import triton_linear
from kernels.backends.triton_linear import Cut
from kernels.platform import Machine, use_machine
from kernels.quantize import flashinfer_quantize_1x128
from oracle.numbers.quantize import quantize
from oracle.numbers.recipes import FLASHINFER_1X128
from oracle.routines import data, get
from tests.support.interpreter import repair

warnings.simplefilter("ignore")  # the interpreter divides by zero in numpy
FAULTS = {
    "a lost block": ("steps = k // (128 * TOGETHER * PARTS)", "steps = k // (128 * TOGETHER * PARTS) - 1"),
    "the weight scale of the next block": ("sb_at + block * sb_block", "sb_at + (block ^ 1) * sb_block"),
    "the weight scale of the next rows": ("col0 // 128 * sb_row", "(col0 // 128 ^ 1) * sb_row"),
    "the scale of the activation forgotten": ("scale * tl.load(sb_at", "scale * 0.0 + tl.load(sb_at"),
    "the block of the other half": ("(first + each) * 128)", "(first + (TOGETHER - 1 - each)) * 128)"),
    "the last sum left out": ("tl.static_range(1, PARTS)", "tl.static_range(1, PARTS - 1)"),
    "a row too many": ("keep = row < m", "keep = row < m + 1"),
    "an infinite inverse": (
        "tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax), limit)",
        "tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax), amax / 0.0)",
    ),
    "the amax of signed values": ("tl.max(tl.abs(wide), axis=1)", "tl.max(wide, axis=1)"),
}
SEEN_BY = {
    "a lost block": "tails", "the weight scale of the next block": "tails",
    "the weight scale of the next rows": "pitch", "the scale of the activation forgotten": "tails",
    "the block of the other half": "together",
    "the last sum left out": "parts", "a row too many": "tails", "an infinite inverse": "codes of float16",
    "the amax of signed values": "codes of bfloat16",
}  # fmt: skip  # a table, one row a line
CUTS = {"tails": Cut(64, 1, 2, 4), "together": Cut(32, 2, 2, 4), "pitch": Cut(128, 1, 2, 4), "parts": Cut(64, 4, 2, 4)}
EXTENTS = {"tails": (5, 40, 256), "together": (17, 70, 512), "pitch": (16, 192, 128), "parts": (31, 64, 3072)}
"""M, N and K: of both numbers of rows, with columns past N."""


def linear(kernels: ModuleType, cut: Cut, x: Tensor, w: Tensor, w_scale: Tensor) -> tuple[Tensor, bool]:
    """The float32 output of the kernel, and whether what lies behind it is as it was."""
    made: list[Tensor] = []

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(torch.full((shape[0] * strides[0] + shape[-1],), LEFT))
        return made[-1].as_strided(shape, strides)

    vars(triton_linear).update(
        library=lambda: (kernels, False), allocator=lambda _: allocate, CUTS={16: cut, 32: cut}, MOST_PARTS=4
    )
    triton_linear._prepared.cache_clear()
    triton_linear._sum.cache_clear()
    with use_machine(Machine.described("sm90", sms=4)):
        y = triton_linear.few_rows(x.dtype, *w.shape)(x, w, w_scale)
    return y, all(bool((memory[-w.shape[0] :] == LEFT).all()) for memory in made)


def judged(name: str, kernels: ModuleType) -> bool:
    """Whether the oracle passes the product of what the recipe makes of the input, any order of the sums admitted."""
    m, n, k = EXTENTS[name]
    wide = data.activations(f"few rows/{name}", "outlier", m, k + 16, dtype=torch.bfloat16)
    x = wide[:, :k] if name == "pitch" else wide[:, :k].contiguous()
    w = data.activations(f"few rows/{name}/w", "randn", n, k, dtype=torch.float32).to(torch.float8_e4m3fn)
    w_scale = torch.rand(-(-n // 128), k // 128, generator=torch.Generator().manual_seed(1)) + 0.5
    y, alone = linear(kernels, CUTS[name], x, w, w_scale)
    made = quantize(x, FLASHINFER_1X128)
    given = {"a": made.codes, "b": w, "a_scale": made.scale, "b_scale": w_scale}
    return alone and bool(get("fp8_gemm_nt").judge(given, y, arch="cpu", numerics="ieee32.any"))


def coded(dtype: torch.dtype, kernels: ModuleType) -> bool:
    """Whether products with single ones are those of the quantiser that the kernel replaces, in every bit."""
    families = ("randn", "ties", "special", "range") if dtype == torch.float16 else ("randn", "ties")
    rows = [data.activations(f"few rows/{f}", f, 4, 128, dtype=dtype) for f in families]
    nan = torch.full((1, 128), float("nan"), dtype=dtype)
    mixed = torch.randn(1, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    mixed[0, 7] = float("nan")
    tiny = torch.zeros(1, 128, dtype=dtype)
    tiny[0, 3] = torch.finfo(dtype).tiny * 2.0**-6 if dtype == torch.float16 else 2.0**-120
    x = torch.cat([*rows, nan, mixed, tiny, torch.zeros(1, 128, dtype=dtype)])
    w = torch.eye(128).to(torch.float8_e4m3fn)
    y, alone = linear(kernels, Cut(128, 1, 2, 4), x, w, torch.ones(1, 1))
    codes, scale = flashinfer_quantize_1x128(x)
    wanted = (codes.float() @ w.float()) * scale[:, : x.shape[0]].t()
    return alone and bool(((wanted == y) | (wanted.isnan() & y.isnan())).all())


def good(name: str, kernels: ModuleType) -> bool:
    dtypes = {"codes of bfloat16": torch.bfloat16, "codes of float16": torch.float16}
    return coded(dtypes[name], kernels) if name in dtypes else judged(name, kernels)


def checks() -> dict[str, bool]:
    kernels, native = triton_linear.library()
    assert not native, "run with TRITON_INTERPRET=1"
    repair()
    found = {name: good(name, kernels) for name in (*CUTS, "codes of bfloat16", "codes of float16")}
    path = str(kernels.__file__)
    broken = {fault: sabotaged(path, *FAULTS[fault]) for fault in FAULTS}
    return found | {f"sabotaged: {fault}": good(name, broken[fault]) for fault, name in SEEN_BY.items()}


if __name__ == "__main__":
    print(json.dumps(checks()))
