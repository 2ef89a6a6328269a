"""``oracle.watch`` over vLLM's CUDA operators in a stack of layers, two of which have a fault.

    python tests/hardware/watched_vllm.py [--layers 12] [--out DIR]

Each layer normalises and quantises (``rms_norm_dynamic_per_token_quant``), multiplies (``cutlass_scaled_mm``),
quantises each token (``dynamic_per_token_scaled_fp8_quant``) and multiplies again. In layer ``SLICED`` the activations
of the second product are a slice of a wider buffer, which the operator of vLLM 0.20.2 reads as if it were packed: a
fault of the kernel. In layer ``SWAPPED`` a wrong kernel exchanges two rows of the first product. Ends with 1 unless the
watch names these two calls and no other, and the outputs are those without a watch. Not covered: attention, graphs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import oracle
from oracle.bindings.binding import bind

SLICED, SWAPPED = 7, 3
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
E4M3_MAX = 448.0


def swapped_mm(out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> None:
    """The operator, with rows 1 and 2 of the output exchanged."""
    torch.ops._C.cutlass_scaled_mm(out, a, b, a_scale, b_scale, bias)
    out[[1, 2]] = out[[2, 1]]


SWAPPED_MM = bind(
    f"{__name__}:swapped_mm",
    "cutlass_scaled_mm",
    "(out, a, b.t(), a_scale, b_scale, bias)",
    "(out, a, b, a_scale, b_scale, bias)",
)


class Linear(nn.Module):
    """One product with a scale for each token and each channel."""

    def __init__(self, size: int, *, sliced: bool = False, swapped: bool = False) -> None:
        super().__init__()
        weight = torch.randn(size, size) * size**-0.5
        scale = weight.abs().amax(1, keepdim=True) / E4M3_MAX
        self.register_buffer("weight", (weight / scale).to(FP8))
        self.register_buffer("scale", scale)
        self.sliced, self.swapped = sliced, swapped

    def forward(self, q: Tensor, scale: Tensor) -> Tensor:
        if self.sliced:  # as a view of a buffer that several layers share
            wide = torch.zeros(q.shape[0], q.shape[1] + 16, dtype=torch.uint8, device=q.device)
            wide[:, : q.shape[1]] = q.view(torch.uint8)
            q = wide[:, : q.shape[1]].view(FP8)
        out = torch.empty(q.shape[0], self.weight.shape[0], dtype=BF16, device=q.device)
        call = swapped_mm if self.swapped else torch.ops._C.cutlass_scaled_mm
        call(out, q, self.weight.t(), scale, self.scale.view(1, -1), None)
        return out


class Layer(nn.Module):
    def __init__(self, size: int, number: int) -> None:
        super().__init__()
        self.register_buffer("norm", torch.ones(size, dtype=BF16))
        self.up_proj = Linear(size, swapped=number == SWAPPED)
        self.down_proj = Linear(size, sliced=number == SLICED)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.empty(x.shape, dtype=FP8, device=x.device)
        scale = torch.empty(x.shape[0], 1, device=x.device)
        torch.ops._C.rms_norm_dynamic_per_token_quant(q, x, self.norm, scale, 1e-6, None, None)
        hidden = torch.nn.functional.silu(self.up_proj(q, scale))
        q, scale = torch.empty_like(q), torch.empty_like(scale)
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, hidden, scale, None)
        return x + self.down_proj(q, scale)


class Model(nn.Module):
    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer(size, number) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main(arguments: list[str] | None = None, device: str = "cuda") -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="gets the report of the watch")
    asked = parser.parse_args(arguments)
    for name in ("vllm._C", "vllm._C_stable_libtorch") if device == "cuda" else ():
        importlib.import_module(name)
    model = Model(asked.layers, asked.size).to(device)
    x = torch.randn(asked.tokens, asked.size, generator=torch.Generator().manual_seed(2)).to(device, BF16)
    plain = model(x)
    begun = time.perf_counter()
    with oracle.watch(every=1, budget="8 GiB, 300 s", bindings=[SWAPPED_MM]) as seen:
        out = model(x)
    seen.print()
    wrong = sorted((row.layer, row.kernel, row.verdict) for row in seen.report.rows if row.verdict != "PASSED")
    first = seen.report.first
    print(f"{len(seen.report.rows)} rows in {time.perf_counter() - begun:.1f} s; inadmissible: {wrong}")
    if first is not None:
        print(f"first: {first.layer}: {first.outcome.verdict.summary}; {', '.join(first.outcome.verdict.explained_by)}")
    if asked.out is not None:
        seen.write(asked.out)
    same = torch.equal(plain.view(torch.uint8), out.view(torch.uint8))
    print(f"outputs {'equal' if same else 'DIFFER FROM'} those without a watch")
    due = {f"layers.{SWAPPED}.up_proj", f"layers.{SLICED}.down_proj"}
    return int({layer for layer, _, _ in wrong} != due or not same)


if __name__ == "__main__":
    sys.exit(main())
