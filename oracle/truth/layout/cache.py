"""Paged key cache of DeepSeek's sparse indexer: codes of a block first, then its float32 scales.

    kv_cache [blocks, P, 1, D + 4] uint8; flat bytes of one block:
        [t D, (t + 1) D)              the E4M3 codes of token t
        [P D + 4 t, P D + 4 t + 4)    its float32 scale, little endian

``P`` tokens a block (64). The shape suggests that a token's scale follows its codes; it does not.
Source: DeepGEMM tests/test_attention.py; measured on an H200. Not covered: values without scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.errors import DtypeError, ShapeError

SCALE_BYTES = 4


def pack_kv_cache(k: Tensor, k_scale: Tensor) -> Tensor:
    """Codes ``[blocks, P, D]`` float8_e4m3fn and scales ``[blocks, P]`` float32 as ``[blocks, P, 1, D + 4]`` uint8.

    Raises
    ------
    DtypeError, ShapeError
    """
    if k.dtype is not torch.float8_e4m3fn or k_scale.dtype is not torch.float32:
        raise DtypeError(f"k is {k.dtype} and k_scale {k_scale.dtype}; pass float8_e4m3fn and float32")
    if k.dim() != 3 or tuple(k_scale.shape) != tuple(k.shape[:2]):
        raise ShapeError(f"k {list(k.shape)} and k_scale {list(k_scale.shape)}: pass [blocks, P, D] and [blocks, P]")
    blocks, tokens, d = k.shape
    codes = k.contiguous().view(torch.uint8).flatten(1)
    scales = k_scale.contiguous().view(torch.uint8).flatten(1)
    return torch.cat([codes, scales], dim=1).reshape(blocks, tokens, 1, d + SCALE_BYTES)


def unpack_kv_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse: codes ``[blocks, P, D]`` float8_e4m3fn and scales ``[blocks, P]`` float32.

    Raises
    ------
    DtypeError, ShapeError
    """
    if kv_cache.dtype is not torch.uint8:
        raise DtypeError(f"kv_cache is {kv_cache.dtype}; pass the uint8 bytes")
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1 or kv_cache.shape[3] <= SCALE_BYTES:
        raise ShapeError(f"kv_cache has shape {list(kv_cache.shape)}; pass [blocks, P, 1, D + 4]")
    blocks, tokens, _, width = kv_cache.shape
    d = width - SCALE_BYTES
    flat = kv_cache.reshape(blocks, tokens * width)
    codes = flat[:, : tokens * d].reshape(blocks, tokens, d).view(torch.float8_e4m3fn)
    scales = flat[:, tokens * d :].reshape(blocks, tokens, SCALE_BYTES).contiguous().view(torch.float32)
    return codes, scales.reshape(blocks, tokens)
