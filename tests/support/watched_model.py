"""A transformer of 24 layers of FP8 products on a CPU: attention, ``torch._scaled_mm``, and a block-scaled product
whose configuration may differ from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tests.support import watched_kernels

LAYERS, DIM, WIDE = 24, 128, 256
LARGEST = 448.0


class ScaledLinear(nn.Module):
    """``torch._scaled_mm`` with a scale for each tensor."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        self.register_buffer("scale", weight.abs().amax() / LARGEST)
        self.register_buffer("weight", (weight / self.scale).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.float().abs().amax() / LARGEST
        codes = (x.float() / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(codes, self.weight.t(), scale, self.scale, out_dtype=torch.bfloat16)


class BlockLinear(nn.Module):
    """A quantiser and a product of the library."""

    def __init__(self, inputs: int, outputs: int, config: str) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        scale = weight.view(outputs // 128, 128, inputs // 128, 128).abs().amax((1, 3)) / LARGEST
        whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / whole).to(torch.float8_e4m3fn))
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = watched_kernels.per_token_cast(x)
        out = watched_kernels.block_gemm(codes, scale, self.weight, self.scale, config=self.config)
        return out.to(torch.bfloat16)


class Mlp(nn.Module):
    def __init__(self, config: str) -> None:
        super().__init__()
        self.up_proj, self.down_proj = ScaledLinear(DIM, WIDE), BlockLinear(WIDE, DIM, config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.up_proj(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = ScaledLinear(DIM, 3 * DIM), ScaledLinear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(-1, 2, DIM // 2).transpose(0, 1) for part in self.qkv_proj(x).chunk(3, 1))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(0, 1).reshape(-1, DIM))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: str) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.norm = Attention(), Mlp(config), nn.RMSNorm(DIM, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm(x))
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, configs: Mapping[int, str], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(configs.get(number, "plain")) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """As engines nest it: ``model.layers.17.mlp.down_proj``."""

    def __init__(self, configs: Mapping[int, str] | None = None, *, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Transformer(configs or {}, layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def prompt(tokens: int = 16) -> Tensor:
    """Embedded tokens ``[tokens, 128]`` in bfloat16."""
    return torch.randn(tokens, DIM, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
