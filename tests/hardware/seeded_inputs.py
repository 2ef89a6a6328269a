"""Inputs of recorded runs, made again from seeds on any machine, bit for bit.

Every tensor is a small record (kind, shape, seed, stream, parameters) over the raw 64-bit words of numpy's Philox
generator, which no library version changes; everything after that is integer arithmetic or exact float arithmetic.
``bell`` is the sum of the four 16-bit halves of a word, centred: bell-shaped, 18 bits, exact in float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Recipe = dict[str, object]
OUTLIER = 32.0
"""Factor of every 64th column in ``bf16.bell``: a power of two, so it is exact."""


def recipe(kind: str, shape: Sequence[int], seed: int, stream: int, **parameters: object) -> Recipe:
    """A record that :func:`make` turns into a tensor."""
    return {"kind": kind, "shape": list(shape), "seed": seed, "stream": stream, **parameters}


def make(record: Mapping[str, object]) -> Tensor:
    """The tensor of a record, on the CPU."""
    shape = [int(v) for v in record["shape"]]  # type: ignore[union-attr]
    kind = str(record["kind"])
    if kind == "values":
        dtype = getattr(torch, str(record["dtype"]))
        return torch.tensor(record["values"], dtype=dtype).reshape(shape)
    words = _words(int(record["seed"]), int(record["stream"]), math.prod(shape))  # type: ignore[call-overload]
    if kind == "e4m3.codes":
        codes = (words & np.uint64(0xFF)).astype(np.uint8)
        codes = np.where(codes & 0x7F == 0x7F, codes & 0xFE, codes)  # NaN becomes 448 of its sign
        return torch.from_numpy(codes).view(torch.float8_e4m3fn).reshape(shape)
    if kind == "f32.scale":
        low, high = int(record.get("low", -9)), int(record.get("high", -3))  # type: ignore[call-overload]
        exponent = low + (words >> np.uint64(32)).astype(np.int64) % (high - low)
        bits = ((exponent + 127) << 23) | (words & np.uint64(0x7FFFFF)).astype(np.int64) | 1
        return torch.from_numpy(bits.astype(np.int32)).view(torch.float32).reshape(shape)
    if kind == "f32.power":
        low, high = int(record.get("low", -9)), int(record.get("high", -3))  # type: ignore[call-overload]
        exponent = low + (words >> np.uint64(32)).astype(np.int64) % (high - low)
        return torch.from_numpy(((exponent + 127) << 23).astype(np.int32)).view(torch.float32).reshape(shape)
    bell = _bell(words, int(record.get("shift", 15))).reshape(shape)  # type: ignore[call-overload]
    if kind == "f32.bell":
        return bell
    if kind == "e4m3.bell":
        return bell.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    if kind == "bf16.bell":
        if record.get("outliers", True):
            bell[..., ::64] *= OUTLIER
        return bell.to(torch.bfloat16)
    raise ValueError(f"unknown kind {kind!r}")


def make_all(records: Mapping[str, Mapping[str, object]]) -> dict[str, Tensor]:
    """The tensors of several records."""
    return {name: make(record) for name, record in records.items()}


def paged_cache(k: Tensor, k_scale: Tensor) -> Tensor:
    """``[blocks, 64, 1, D + 4]`` uint8: per block the codes ``[blocks, 64 * D]``, then the scales ``[blocks, 64]``."""
    blocks, tokens = k_scale.shape
    flat = torch.cat([k.view(torch.uint8), k_scale.view(torch.uint8)], dim=1)
    return flat.view(blocks, tokens, 1, k.shape[1] // tokens + 4)


def digest(tensor: Tensor) -> str:
    """Short sha256 of a tensor's bits in logical row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def quantiser_rows(k: int = 512) -> Recipe:
    """bf16 rows that quantisers disagree on: zeros, tiny, huge, NaN, infinity, -0, and every significand as the amax.

    Row 6 + i has amax ``1 + i/128`` (once, in every group) among values of half that size.
    """
    return {"kind": "quantiser_rows", "shape": [134, k], "seed": 77, "stream": 0}


def quantiser_matrix(record: Mapping[str, object]) -> Tensor:
    """The matrix of :func:`quantiser_rows`."""
    rows, k = (int(v) for v in record["shape"])  # type: ignore[union-attr]
    x = make(recipe("f32.bell", (rows, k), int(record["seed"]), 0, shift=18))  # type: ignore[call-overload]
    x = x.clamp(-0.5, 0.5)
    significand = 1.0 + torch.arange(128, dtype=torch.float32) / 128
    x[6:, ::128] = significand.unsqueeze(1)
    x[0], x[1], x[2], x[5] = 0.0, x[1] * 2.0**-40, x[2] * 2.0**100, -0.0
    x[3, 5], x[4, 200] = float("nan"), float("inf")
    return x.to(torch.bfloat16)


def _words(seed: int, stream: int, count: int) -> np.ndarray:
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(max(count, 1))[:count]


def _bell(words: np.ndarray, shift: int) -> Tensor:
    total = sum(((words >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    return torch.from_numpy((total - 131070).astype(np.float32) / np.float32(1 << shift))
