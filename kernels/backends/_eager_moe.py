"""The TensorRT-LLM per-tensor MoE in plain torch, on weights as that kernel takes them.

The row permutations of the weights are undone, products are taken in float32, the intermediate is quantised to E4M3
in the scale of the second input, as the kernel does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backends._ambient import as_written
from kernels.backends._eager_quant import saturate
from kernels.backends._rows import take


@as_written
def moe_trtllm(
    *,
    routing_logits: Tensor,
    hidden_states: Tensor,
    gemm1_weights: Tensor,
    output1_scales_scalar: Tensor,
    output1_scales_gate_scalar: Tensor,
    gemm2_weights: Tensor,
    output2_scales_scalar: Tensor,
    top_k: int,
    local_expert_offset: int,
    local_num_experts: int,
    **_: object,
) -> Tensor:
    """``[T, H]`` bf16 with Llama-4 routing; arguments as published by FlashInfer."""
    n1, n2 = gemm1_weights.shape[1], gemm2_weights.shape[1]
    rows1 = torch.argsort(_interleaved(n1)[_shuffled(n1)])
    rows2 = torch.argsort(_shuffled(n2))
    logits, expert = routing_logits.to(torch.float32).max(dim=-1)
    weight = logits.sigmoid()
    out = torch.zeros(hidden_states.shape[0], n2, dtype=torch.float32, device=hidden_states.device)
    for local in range(local_num_experts):
        tokens = (expert == local + local_expert_offset).nonzero().squeeze(1)
        if len(tokens) == 0:
            continue
        w31 = gemm1_weights[local].to(torch.float32)[rows1]
        acc = (take(hidden_states, tokens).to(torch.float32) @ w31.t()) * weight[tokens].unsqueeze(1)
        up, gate = acc.chunk(2, dim=-1)
        gate = torch.nn.functional.silu(gate * output1_scales_gate_scalar[local])
        codes = saturate(gate * (up * output1_scales_scalar[local]))
        w2 = gemm2_weights[local].to(torch.float32)[rows2]
        out[tokens] = (codes.to(torch.float32) @ w2.t()) * output2_scales_scalar[local]
    return out.to(torch.bfloat16)


def _interleaved(n: int) -> Tensor:
    return torch.arange(n, device="cpu").view(2, n // 2).t().flatten()


def _shuffled(n: int) -> Tensor:
    return torch.arange(n, device="cpu").view(-1, 8, 4).transpose(1, 2).flatten()
