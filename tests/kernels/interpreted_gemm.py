"""Runs under ``TRITON_INTERPRET=1``: the Triton product judged by the oracle; prints ``{check: good}`` as JSON.

The variable must be set before Triton is imported, so this is a program of its own (see ``test_triton_gemm.py``). A
sabotaged kernel is the module's text with one expression replaced.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kernels.backends import triton_gemm
from kernels.backends.triton_gemm import CONTIGUOUS, DENSE, MASKED, Tile
from oracle.routines import cases, get
from tests.support.interpreter import repair

warnings.simplefilter("ignore")  # the interpreter overflows in numpy
DENSE_CASE = "fp8_gemm_nt/e4m3xe4m3-{}/1x128:128x128/m={},n={},k={}/family={}/seed=1"
GROUPED_CASE = "{}/e4m3xe4m3-f16/1x128:128x128/m={},n={},k={},g={}/family=randn/seed=1"
CONTRACTS = {CONTIGUOUS: "m_grouped_fp8_gemm_nt_contiguous", MASKED: "fp8_m_grouped_gemm_nt_masked"}
LEFT = 7.0
"""What stands in the output before the call, and in the rows that are left alone after it."""
FAULTS = {
    "a lost K tail": ("blocks = tl.cdiv(k, 128)", "blocks = k // 128"),
    "the weight scale of the next block": ("sb_at + block * sb_block", "sb_at + (block + 1) % blocks * sb_block"),
    "the weight scale of the next rows": ("col0 // 128 * sb_row", "(col0 // 128 + 1) % tl.cdiv(n, 128) * sb_row"),
    "the activation scale of the row above": ("sa + x_row * sa_row", "sa + tl.maximum(x_row - 1, 0) * sa_row"),
    "the exponents' bias forgotten": ("* 256.0", "* 128.0"),
    "the lower tile taken twice": ("y_row = tl.minimum(row + BM, m - 1)", "y_row = x_row"),
    "rows of no group written": (
        "keep = keep & (group >= 0) & (tl.load(rows + row, mask=keep, other=-1) == group)",
        "pass",
    ),
    "a tile of no group written": ("keep & (group >= 0) & (tl", "keep & (tl"),
    "rows past the count written": ("end = tl.load(rows + group)", "end = m"),
}


def sabotaged(path: str, before: str, after: str) -> ModuleType:
    """The module of a kernel with one expression replaced."""
    text = Path(path).read_text()
    assert before in text, before
    name = f"{triton_gemm.__package__}.sabotaged"  # its relative imports are those of the module
    spec = importlib.util.spec_from_file_location(name, Path(tempfile.mkdtemp()) / "sabotaged.py")
    assert spec is not None and spec.loader is not None and spec.origin is not None
    Path(spec.origin).write_text(text.replace(before, after))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def right(mode: int, text: str, tile: Tile, kernels: ModuleType, pitch: int = 0, empty: int = 0) -> bool:
    """Whether the oracle passes the output, and every row that belongs to nobody is as it was; the first ``empty`` rows
    are made such."""
    case = cases.parse(text)
    t = case.inputs()
    if empty:
        t["m_indices"][:empty] = -1
    a = torch.nn.functional.pad(t["a"].view(torch.uint8), (0, pitch)).view(t["a"].dtype)[..., : t["a"].shape[-1]]
    b, b_scale = (x if mode != DENSE else x[None] for x in (t["b"], t["b_scale"]))
    dtype = case.call_options()["out_dtype"]
    assert isinstance(dtype, torch.dtype)
    out = torch.full((*a.shape[:-1], b.shape[-2]), LEFT, dtype=dtype)
    rows = next((t[name].to(torch.int32) for name in ("m_indices", "masked_m") if name in t), out)
    triton_gemm._prepared.cache_clear()
    triton_gemm.library = lambda: (kernels, False)  # type: ignore[assignment]  # a cached function
    triton_gemm.product(mode, a, t["a_scale"], b, b_scale, out, rows, tile)
    nobody = torch.zeros(out.shape[:-1], dtype=torch.bool)
    if mode == CONTIGUOUS:
        nobody = rows < 0
    elif mode == MASKED:
        nobody = torch.arange(out.shape[1]) >= rows[:, None]
    alone = bool((out[nobody] == LEFT).all())
    out[nobody] = 0.0
    return alone and bool(get(case.contract).judge(t, out, arch="cpu", numerics="ieee32.any"))


def sites() -> Iterator[tuple[str, int, str, Tile, int]]:
    """Name, mode, case, tile, codes between two rows: tails of every extent, every tile, what codes can be.

    No bf16 output: the interpreter cuts digits off where the GPU rounds.
    """
    small, wide, pair = Tile(32, 2), Tile(128, 3, width=2), Tile(64, 3, pair=True)
    yield "tails", DENSE, DENSE_CASE.format("f32", 5, 37, 131, "randn"), small, 0
    yield "row pitch", DENSE, DENSE_CASE.format("f32", 5, 40, 144, "randn"), small, 16
    yield "codes", DENSE, DENSE_CASE.format("f32", 7, 64, 256, "codes"), small, 0
    yield "NaN", DENSE, DENSE_CASE.format("f16", 5, 64, 256, "nan"), small, 0
    yield "order of tiles", DENSE, DENSE_CASE.format("f16", 70, 400, 128, "randn"), wide, 0
    yield "pair", DENSE, DENSE_CASE.format("f32", 140, 100, 256, "randn"), pair, 0
    yield "contiguous", CONTIGUOUS, GROUPED_CASE.format(CONTRACTS[CONTIGUOUS], 256, 40, 136, 2), pair, 0
    yield "masked", MASKED, GROUPED_CASE.format(CONTRACTS[MASKED], 70, 40, 256, 3), small, 0


EMPTY = "a tile of no group"
SEEN_BY = {
    "a lost K tail": "tails", "the weight scale of the next block": "codes",
    "the weight scale of the next rows": "order of tiles", "the activation scale of the row above": "tails",
    "the exponents' bias forgotten": "codes", "the lower tile taken twice": "pair",
    "rows of no group written": "contiguous", "a tile of no group written": EMPTY,
    "rows past the count written": "masked",
}  # fmt: skip  # a table, one row a line


def checks() -> dict[str, bool]:
    kernels, native = triton_gemm.library()
    assert not native, "run with TRITON_INTERPRET=1"
    repair()
    every: dict[str, list[Any]] = {name: [*rest, 0] for name, *rest in sites()}
    every[EMPTY] = [*every["contiguous"][:-1], 128]  # the whole of the first tile
    found = {name: right(mode, text, tile, kernels, *rest) for name, (mode, text, tile, *rest) in every.items()}
    for fault, name in SEEN_BY.items():
        mode, text, tile, *rest = every[name]
        broken = sabotaged(str(kernels.__file__), *FAULTS[fault])
        found[f"sabotaged: {fault}"] = right(mode, text, tile, broken, *rest)
    return found


if __name__ == "__main__":
    print(json.dumps(checks()))
