"""How cuBLASLt cuts K: ``torch._scaled_mm`` over a grid of shapes, every output bit compared with the models.

    python tests/hardware/split_k.py OUT

Needs a CUDA GPU of sm90. Writes ``OUT/split_k.json``: device, versions, and per call the shape, the accumulation mode,
the output dtype, the schedule that reproduces every bit (none: "") and the SHA-256 of the output's bytes. The
inputs are :func:`codes` of a stated key, so that the outputs can be computed again without a GPU.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oracle.numbers.formats import same_bits
from oracle.tensorcore.identify import find_split, subset
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Schedule, get
from oracle.truth.gemm import ScaledProduct

ROWS, COLUMNS = (16, 32, 64, 128, 256, 512), (256, 512, 1024, 2048, 4096)
LENGTHS = (512, 1024, 2048, 4096, 7168, 8192, 12288, 16384)
KINDS = ("all codes", "four binades")
SCALES = (0.37, 1.9)


def codes(key: int, rows: int, columns: int, kind: str) -> np.ndarray:
    """E4M3 codes ``[rows, columns]`` of the Philox stream of ``key``: all finite ones, or magnitudes of 2**-2 to 4."""
    raw = np.random.Philox(key=key).random_raw(rows * columns // 8).view(np.uint8).reshape(rows, columns)
    if kind == "all codes":
        return np.where(raw & 0x7F == 0x7F, raw ^ 1, raw)
    return (raw & 0x80) | (0x28 + (raw & 0x1F))


def operands(m: int, n: int, k: int, kind: str, device: str) -> ScaledProduct:
    """The operands of one call, per-tensor scales included."""
    a, b = (torch.from_numpy(codes(key, rows, k, kind)).to(device) for key, rows in ((m + k, m), (n + 7 * k, n)))
    sa, sb = (torch.tensor([[s]], dtype=torch.float32, device=device) for s in SCALES)
    return ScaledProduct(a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), sa, sb, k, n)


def call(p: ScaledProduct, *, fast: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch._scaled_mm(
        p.a, p.b.t(), scale_a=p.a_scale.reshape(()), scale_b=p.b_scale.reshape(()), out_dtype=dtype, use_fast_accum=fast
    )


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def identified(p: ScaledProduct, out: torch.Tensor, fast: bool) -> Schedule | None:
    """The schedule of every bit: unsplit first, in each order of the scales."""
    base = "sm90.chain" if fast else "sm90.promote128.scale_after"
    rows, columns = torch.arange(0, p.M, max(1, p.M // 16)), torch.arange(0, p.N, max(1, p.N // 128))
    part, wanted = subset(p, rows.to(out.device), columns.to(out.device)), out[rows][:, columns]
    for suffix in (".product", "", ".row_then_col"):
        plain = get(base + suffix)
        pairs = ((part, wanted), (p, out))
        if all(bool(same_bits(predict_product(x, plain, out_dtype=out.dtype), y).all()) for x, y in pairs):
            return plain
        if (found := find_split(p, out, plain, most=16)) is not None:
            return found
    return None


def packed(found: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The calls of a record: a row a shape, with numbers of schedules in ``order``, and their digests as one text."""
    order = {"kind": list(KINDS), "fast": [True, False], "dtype": ["float32", "bfloat16"]}
    schedules = sorted({call["schedule"] or "" for call in found})
    rows = []
    for shape, calls in groupby(found, key=lambda call: [call[name] for name in "mnk"]):
        each = list(calls)
        digests = b"".join(bytes.fromhex(call["sha256"]) for call in each)
        rows.append(
            [*shape, [schedules.index(call["schedule"] or "") for call in each], base64.b64encode(digests).decode()]
        )
    return {"schema": "fp8-oracle.splits/2", "order": order, "schedules": schedules, "calls": rows}


def main(out: Path) -> None:
    begun, found = time.monotonic(), []
    shapes = sorted(((m, n, k) for m in ROWS for n in COLUMNS for k in LENGTHS), key=lambda s: s[0] * s[1] * s[2])
    for m, n, k in shapes:
        for kind in KINDS:
            p = operands(m, n, k, kind, "cuda")
            for fast in (True, False):
                for dtype in (torch.float32, torch.bfloat16):
                    result = call(p, fast=fast, dtype=dtype)
                    name = identified(p, result, fast)
                    found.append(
                        {
                            "m": m,
                            "n": n,
                            "k": k,
                            "kind": kind,
                            "fast": fast,
                            "dtype": str(dtype).removeprefix("torch."),
                            "schedule": None if name is None else name.name,
                            "sha256": digest(result),
                        }
                    )
                    if name is None:
                        plain = get("sm90.chain.product" if fast else "sm90.promote128.scale_after.product")
                        equal = float(same_bits(predict_product(p, plain, out_dtype=dtype), result).double().mean())
                        print(f"UNIDENTIFIED {m} {n} {k} {kind} fast={fast} {dtype}: unsplit {equal:.6f}", flush=True)
        lt = ctypes.CDLL("libcublasLt.so.13")  # loaded already: by torch, at the first call
        lt.cublasLtGetVersion.restype = ctypes.c_size_t
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cublaslt": lt.cublasLtGetVersion(),
            "scales": SCALES,
        }
        (out / "split_k.json").write_text(json.dumps(record | packed(found), indent=0))
    names = [c["schedule"] or "" for c in found]
    split = sum("split" in name for name in names)
    print(f"{len(names)} calls, {sum(map(bool, names))} identified, {split} split, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
