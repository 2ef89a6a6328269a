"""Right kernels of 20 contracts in plain torch, written from the contracts' pages; a function has its contract's name.

They import torch alone, so that ``validate`` of another checkout runs them too
(:mod:`tests.benchmarks.test_bench_validate`). Numbers are float32 where the page leaves the order of a sum open.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

F8, BF16 = torch.float8_e4m3fn, torch.bfloat16
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cpu")
BLOCK = 128


def silu_and_mul(x: Tensor, limit: float | None = None, round_silu: bool = False) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu = gate / (1 + torch.exp(-gate))
    return ((silu.to(x.dtype).float() if round_silu else silu) * up).to(x.dtype)


def silu_and_mul_quant(x: Tensor, scale: Tensor, rounding: str = "each") -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    silu = gate / (1 + torch.exp(-gate))
    product = (silu.to(x.dtype).float() if rounding == "each" else silu) * up
    return _e4m3((product if rounding == "none" else product.to(x.dtype).float()) / scale)


def rmsnorm_quant(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float = 1e-6) -> Tensor:
    z = x.float()
    inverse = torch.rsqrt(z.square().mean(-1, keepdim=True) + epsilon)
    return _e4m3(z * inverse * weight.float() / scale)


def mxfp4_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    codes = q.contiguous().view(torch.uint8).long()
    values = torch.stack([FP4[codes & 15], FP4[codes >> 4]], dim=-1).flatten(-2)
    return _scaled(values, scale, layout)


def mxfp8_dequantize(q: Tensor, scale: Tensor, layout: str = "128x4") -> Tensor:
    return _scaled(q.float(), scale, layout)


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int = BLOCK,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, group_size))
    amax = torch.maximum(groups.abs().amax(-1, keepdim=True), torch.tensor(eps, device="cpu"))
    scale = _power_of_two(amax / 448) if use_ue8m0 else amax / 448
    codes, scale = _e4m3(groups / scale).flatten(-2), scale[..., 0]
    if column_major_scales:
        rows = scale.shape[-2]
        pitch = -(-rows // 4) * 4 if tma_aligned_scales else rows
        turned = torch.zeros(*scale.shape[:-2], scale.shape[-1], pitch, device="cpu")
        turned[..., :rows] = scale.transpose(-1, -2)
        scale = turned[..., :rows].transpose(-1, -2)
    return codes, scale


def per_token_cast_to_fp8(x: Tensor, use_ue8m0: bool = False, group: int = BLOCK) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    blocks = -(-k // group)
    groups = torch.nn.functional.pad(x.float(), (0, blocks * group - k)).reshape(m, blocks, group)
    scale = torch.maximum(groups.abs().amax(-1, keepdim=True), torch.tensor(1e-4, device="cpu")) / 448
    scale = _power_of_two(scale) if use_ue8m0 else scale
    return _e4m3(groups * (1 / scale)).reshape(m, -1)[:, :k], scale[..., 0]


def to_blocked(scale: Tensor) -> Tensor:
    codes = scale.contiguous().view(torch.uint8)
    batch = codes if codes.dim() == 3 else codes[None]
    count, rows, columns = batch.shape
    out = torch.zeros(count, -(-rows // 128) * 128 * -(-columns // 4) * 4, dtype=torch.uint8, device="cpu")
    out[:, _tiled(rows, columns).reshape(-1)] = batch.reshape(count, -1)
    return (out if codes.dim() == 3 else out[0]).view(scale.dtype)


def fp8_gemm_nt(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return _product(a, a_scale, b, b_scale).to(out_dtype or BF16)


def gemm_fp8_nt_groupwise(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    rows = a_scale if a_scale.shape[0] == a.shape[0] else _by_block(a_scale, a.shape[0])
    return _product(a, rows, b, b_scale).to(out_dtype or BF16)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, m_indices: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    out = torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype or BF16, device="cpu")
    for group in range(b.shape[0]):
        rows = torch.nonzero(m_indices == group)[:, 0]
        if len(rows):
            chosen = a.view(torch.uint8)[rows].view(a.dtype)
            out[rows] = _product(chosen, a_scale[rows], b[group], b_scale[group]).to(out.dtype)
    return out


def bmm_fp8(A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return (A.float() @ B.float() * (A_scale * B_scale)).to(out_dtype or BF16)


def torch_per_token_w8a8_scaled_mm(
    qinput: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    y = qinput.float() @ weight.float() * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return (y if bias is None else y + bias.float()).to(out_dtype or BF16)


def fp8_mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool = False,
) -> Tensor:
    scores = torch.einsum("mhd,nd->mhn", q.float(), k.float()).relu()
    logits = (scores * weights[..., None]).sum(1) * k_scale[None]
    keys = torch.arange(k.shape[0], device="cpu")[None]
    inside = (keys >= cu_seqlen_ks[:, None]) & (keys < cu_seqlen_ke[:, None])
    return torch.where(inside, logits, -math.inf if clean_logits else 0.0)


def moe_routing(
    logits: Tensor,
    bias: Tensor | None = None,
    router: str = "deepseek_v3",
    top_k: int = 8,
    num_expert_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    x = logits.float()
    score = x.softmax(-1) if router == "softmax" else x.sigmoid()
    choice = x if router == "llama4" else score if bias is None else score + bias.float()
    if num_expert_group > 1:
        groups = choice.unflatten(1, (num_expert_group, -1))
        pairs = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        best = (groups.amax(-1) if bias is None else pairs).topk(topk_group, dim=-1).indices
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device="cpu").scatter(1, best, True)
        choice = torch.where(kept.repeat_interleave(groups.shape[2], dim=1), choice, -math.inf)
    ids = choice.topk(top_k, dim=-1).indices
    weights = score.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids.int()


def cutlass_moe_fp8(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor,
    a2_scale: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None = None,
    first_expert: int = 0,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    ids = topk_ids.long()
    local = ids - first_expert if expert_map is None else expert_map.long()[ids.clamp(min=0)]
    local = torch.where(ids < 0, -1, local)
    total = torch.zeros(x.shape, dtype=torch.float32, device="cpu")
    for choice in range(local.shape[1]):
        for expert in range(w13.shape[0]):
            rows = torch.nonzero(local[:, choice] == expert)[:, 0]
            if not len(rows):
                continue
            chosen, weight = x[rows], topk_weights[rows, choice, None]
            if apply_router_weight_on_input:
                chosen, weight = chosen * weight.to(x.dtype), torch.ones_like(weight)
            first = _layer(chosen, w13[expert], a1_scale, w13_scale[expert])
            gate, up = first.float().chunk(2, dim=-1)
            active = ((gate / (1 + torch.exp(-gate))).to(BF16).float() * up).to(BF16)
            total[rows] += weight * _layer(active, w2[expert], a2_scale, w2_scale[expert])
    return total.to(BF16)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    keys, values = (cache.view(torch.uint8).clone() for cache in (key_cache, value_cache))
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    pages, at = slots // keys.shape[3], slots % keys.shape[3]
    codes = _e4m3(key.float() / k_scale).view(torch.uint8)[: len(kept)][kept]
    keys[pages, :, :, at] = codes.unflatten(-1, (keys.shape[2], keys.shape[4]))
    values[pages, :, :, at] = _e4m3(value.float() / v_scale).view(torch.uint8)[: len(kept)][kept]
    return keys.view(F8), values.view(F8)


def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor) -> Tensor:
    tokens = slot_mapping.shape[0]
    codes = _e4m3(torch.cat([kv_c[:tokens].float(), k_pe[:tokens].float()], dim=1) / scale).view(torch.uint8)
    out = kv_cache.view(torch.uint8).clone()
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    out[slots // out.shape[1], slots % out.shape[1]] = codes[kept]
    return out.view(F8)


def cp_gather_cache(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, seq_starts: Tensor | None = None
) -> Tensor:
    out, page, ends = dst.clone(), src_cache.shape[1], cu_seq_lens.tolist()
    for request in range(block_table.shape[0]):
        start = 0 if seq_starts is None else int(seq_starts[request])
        at = start + torch.arange(ends[request + 1] - ends[request], device="cpu")
        pages = block_table[request].long()[at // page]
        out[ends[request] : ends[request + 1]] = src_cache[pages, at % page]
    return out


def pad_token_groups(x: Tensor, group_end_offsets: Tensor, alignment_size: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0] + group_end_offsets.shape[0] * alignment_size
    rows = -(-rows // alignment_size) * alignment_size
    out = torch.zeros(rows, x.shape[1], dtype=x.dtype, device="cpu")
    starts, ends, at, first = list[int](), list[int](), 0, 0
    for last in group_end_offsets.tolist():
        out[at : at + last - first] = x[first:last]
        starts.append(at)
        at += -(-(last - first) // alignment_size) * alignment_size
        ends.append(at)
        first = last
    return out, *(torch.tensor(edge, dtype=torch.int32, device="cpu") for edge in (starts, ends))


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(F8)


def _power_of_two(scale: Tensor) -> Tensor:
    """The least power of two that is not below."""
    bits = scale.contiguous().view(torch.int32)
    return torch.where(torch.isfinite(scale), (bits + 0x7FFFFF & ~0x7FFFFF).view(torch.float32), scale)


def _tiled(rows: int, columns: int) -> Tensor:
    """Where the scale of a row and a block of columns lies in tiles of 128x4."""
    row, column = torch.arange(rows, device="cpu")[:, None], torch.arange(columns, device="cpu")[None]
    tile = row // 128 * -(-columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def _scaled(values: Tensor, scale: Tensor, layout: str) -> Tensor:
    """Values times the E8M0 scale of their 32 columns."""
    rows, blocks = values.shape[0], -(-values.shape[1] // 32)
    codes = scale.contiguous().view(torch.uint8)
    if layout == "linear":
        codes = codes.reshape(rows, blocks)
    elif layout == "8x4":
        row, column = torch.arange(rows, device="cpu")[:, None], torch.arange(blocks, device="cpu")[None]
        codes = codes.reshape(-1)[(row // 8 * -(-blocks // 4) + column // 4) * 32 + row % 8 * 4 + column % 4]
    else:
        codes = codes.reshape(-1)[_tiled(rows, blocks)]
    powers = torch.exp2((codes.long() - 127).double()).float()
    factors = torch.where(codes == 255, math.nan, powers)
    return values * factors.repeat_interleave(32, dim=1)[:, : values.shape[1]]


def _by_block(scale: Tensor, count: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, dim=0)[:count]


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """One block of K after the other, scaled as it joins the sum; a scale for each row of ``a``, each 128 of ``b``."""
    total = torch.zeros(a.shape[0], b.shape[0], device="cpu")
    for block in range(-(-a.shape[1] // BLOCK)):
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        columns = _by_block(b_scale[:, block], b.shape[0])
        total = total + a[:, at].float() @ b[:, at].float().T * (a_scale[:, block, None] * columns[None])
    return total


def _layer(x: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor) -> Tensor:
    """Rows quantised with a given scale, times a weight of FP8, in bfloat16."""
    codes = _e4m3(x.float() * (1 / scale))
    return (codes.float() @ weight.float().T * (scale * weight_scale)).to(BF16)
