"""Dense and grouped products of every library, right calls and the documented wrong ones."""

from __future__ import annotations

import importlib

import torch
from hardware.recorder import Recorder
from hardware.seeded_inputs import Recipe, make_all, recipe
from torch import Tensor

from kernels import blockscaled, grouped, linear, routes
from kernels.backends import cutlass, flashinfer

SHAPES = (
    (7, 128, 384),
    (16, 256, 512),
    (31, 192, 640),
    (32, 128, 128),
    (33, 256, 1024),
    (64, 576, 2048),
    (130, 256, 512),
)
SCHEDULE = "sm90.promote128"
GROUPS = ((4, 256, 512, (128, 0, 77, 128)), (3, 128, 384, (1, 128, 200)), (3, 192, 256, (5, 0, 31)))
"""Experts, N, K and the rows of each expert."""


def dense_inputs(m: int, n: int, k: int, seed: int) -> dict[str, Recipe]:
    """Codes and scales of one block-scaled product."""
    kb, nb = -(-k // 128), -(-n // 128)
    return {
        "a": recipe("e4m3.bell", (m, k), seed, 0, shift=10),
        "a_scale": recipe("f32.scale", (m, kb), seed, 1),
        "b": recipe("e4m3.codes", (n, k), seed, 2),
        "b_scale": recipe("f32.scale", (nb, kb), seed, 3),
    }


def to(tensors: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """All tensors on the device."""
    return {name: t.to(device) for name, t in tensors.items()}


def deep_gemm_dense(r: Recorder, device: str) -> None:
    """The layer's fp8_gemm_nt, and the library bare under each of its import names."""
    for i, (m, n, k) in enumerate(SHAPES):
        records = dense_inputs(m, n, k, 100 + i)
        t = to(make_all(records), device)
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
        with r.attempt(f"layer.fp8_gemm_nt {m}x{n}x{k}"):
            blockscaled.fp8_gemm_nt((t["a"], t["a_scale"]), (t["b"], t["b_scale"]), out)
            r.keep(
                "dense",
                f"layer.fp8_gemm_nt.{m}x{n}x{k}",
                out,
                contract="fp8_gemm_nt",
                inputs=records,
                numerics=SCHEDULE,
            )
        for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
            with r.attempt(f"{name}.fp8_gemm_nt {m}x{n}x{k}"):
                bare = torch.full_like(out, float("nan"))
                function = importlib.import_module(name).fp8_gemm_nt
                function((t["a"], t["a_scale"]), (t["b"], t["b_scale"]), bare, disable_ue8m0_cast=True)
                r.check(f"{name} equals the layer {m}x{n}x{k}", torch.equal(bare, out))


def flashinfer_dense(r: Recorder, device: str) -> None:
    """All three dtype pairs through the layer, and the documented wrong calls on the bare library."""
    for i, (m, n, k) in enumerate(SHAPES):
        records = dense_inputs(m, n, k, 100 + i)
        named = {
            "input": records["a"],
            "weight": records["b"],
            "input_scale": records["a_scale"],
            "weight_scale": records["b_scale"],
        }
        t = to(make_all(named), device)
        tag = f"{m}x{n}x{k}"
        with r.attempt(f"layer.fp8_blockscale_gemm_sm90 {tag}"):
            y = blockscaled.fp8_blockscale_gemm_sm90(**t)
            r.keep(
                "flashinfer",
                f"layer.w8a8.{tag}",
                y,
                contract="fp8_blockscale_gemm_sm90",
                inputs=named,
                numerics=SCHEDULE,
            )
            ready = t["input_scale"].t().contiguous().t()
            r.check(
                f"flashinfer column-major scale gives the same bits {tag}",
                torch.equal(y, blockscaled.fp8_blockscale_gemm_sm90(t["input"], t["weight"], ready, t["weight_scale"])),
            )
        wide = {
            "input": recipe("bf16.bell", (m, k), 200 + i, 0),
            "weight": records["b"],
            "weight_scale": records["b_scale"],
        }
        x = to(make_all(wide), device)
        with r.attempt(f"layer.fp8_blockscale_gemm_sm90 bf16+fp8 {tag}"):
            y = blockscaled.fp8_blockscale_gemm_sm90(x["input"], x["weight"], None, x["weight_scale"])
            r.keep("flashinfer", f"layer.bf16_fp8.{tag}", y, contract="flashinfer_fp8_blockscale_gemm", inputs=wide)
        both = {"input": wide["input"], "weight": recipe("bf16.bell", (n, k), 300 + i, 0, outliers=False)}
        w = to(make_all(both), device)
        with r.attempt(f"layer.fp8_blockscale_gemm_sm90 bf16+bf16 {tag}"):
            y = blockscaled.fp8_blockscale_gemm_sm90(w["input"], w["weight"])
            r.keep("flashinfer", f"layer.bf16_bf16.{tag}", y, contract="fp8_blockscale_gemm_sm90_bf16", inputs=both)
        if device == "cuda" and (m, n, k) in ((7, 128, 384), (33, 256, 1024)):
            _flashinfer_wrong(r, tag, t, w, named, both)


def _flashinfer_wrong(
    r: Recorder, tag: str, t: dict[str, Tensor], w: dict[str, Tensor], named: dict[str, Recipe], both: dict[str, Recipe]
) -> None:
    function = flashinfer.library("flashinfer.gemm").fp8_blockscale_gemm_sm90
    x, b, s, bs = t["input"], t["weight"], t["input_scale"], t["weight_scale"]
    per_token = bs.repeat_interleave(128, 0)[: b.shape[0]].contiguous()
    wrong = {
        "row_major_scale": lambda: function(x, b, s, bs),
        "unpadded_scale": lambda: function(x, b, s.t().contiguous(), bs),
        "fp16_out": lambda: function(x, b, flashinfer.kernel_scale(s), bs, out_dtype=torch.float16),
        "per_token_weight_scale": lambda: function(w["input"], b, None, per_token),
        "bf16_weight_amax": lambda: function(w["input"], w["weight"]),
    }
    for fault, call in wrong.items():
        with r.attempt(f"flashinfer (documented wrong) {fault} {tag}"):
            records = both if fault == "bf16_weight_amax" else named
            if fault == "per_token_weight_scale":
                records = {"input": both["input"], "weight": named["weight"], "weight_scale": named["weight_scale"]}
            r.keep(
                "flashinfer",
                f"flashinfer.wrong.{fault}.{tag}",
                call(),
                contract="fp8_blockscale_gemm_sm90",
                inputs=records,
                fault=fault,
                passed="scale handed over as the fault says",
            )


def torch_dense(r: Recorder, device: str) -> None:
    """Per tensor and row-wise, fast and precise, float32 and bf16; unfused; block-scaled."""
    for i, (m, n, k) in enumerate(SHAPES):
        base = dense_inputs(m, n, k, 100 + i)
        records = {
            "qinput": base["a"],
            "weight": base["b"],
            "scale_a": recipe("f32.scale", (m, 1), 400 + i, 0),
            "scale_b": recipe("f32.scale", (1, n), 400 + i, 1),
        }
        t = to(make_all(records), device)
        a, b = t["qinput"], t["weight"].t()
        tag = f"{m}x{n}x{k}"
        for dtype in (torch.float32, torch.bfloat16):
            word = str(dtype).removeprefix("torch.")
            for fast in (True, False):
                one = torch.ones(1, device=device)
                speed = "fast" if fast else "precise"
                with r.attempt(f"torch._scaled_mm tensorwise {speed} {word} {tag}"):
                    y = torch._scaled_mm(a, b, one, one, out_dtype=dtype, use_fast_accum=fast)
                    r.keep(
                        "torch",
                        f"torch.tensorwise_unit.{speed}.{word}.{tag}",
                        y,
                        contract="torch_per_tensor_w8a8_scaled_mm",
                        inputs={n_: records[n_] for n_ in ("qinput", "weight")},
                        options={"out_dtype": dtype},
                        numerics="sm90.chain" if fast else "sm90.promote128.scale_after",
                        passed="unit scales",
                    )
                if dtype == torch.bfloat16:
                    with r.attempt(f"torch._scaled_mm rowwise {speed} {word} {tag}"):
                        y = torch._scaled_mm(a, b, t["scale_a"], t["scale_b"], out_dtype=dtype, use_fast_accum=fast)
                        r.keep(
                            "torch",
                            f"torch.rowwise.{speed}.{word}.{tag}",
                            y,
                            contract="torch_per_token_w8a8_scaled_mm",
                            inputs=records,
                            options={"out_dtype": dtype},
                            numerics="sm90.chain.row_then_col" if fast else "sm90.promote128.scale_after",
                        )
        with r.attempt(f"layer.torch_channelwise {tag}"):
            y = linear.torch_channelwise_w8a8_scaled_mm(
                qinput=a, weight=b, out_dtype=torch.bfloat16, scale_a=t["scale_a"], scale_b=t["scale_b"]
            )
            r.keep("torch", f"layer.channelwise.{tag}", y, contract="torch_channelwise_w8a8_scaled_mm", inputs=records)
        if k == 128:
            continue  # one block along K: the same shapes mean a scale per token
        with r.attempt(f"torch.nn.functional.scaled_mm block {tag}"), routes.only("torch"):
            s = to(make_all({n_: base[n_] for n_ in ("a_scale", "b_scale")}), device)
            y = linear.cutlass_scaled_mm(a, b, s["a_scale"], s["b_scale"].t(), torch.bfloat16)
            r.keep("torch", f"torch.block.{tag}", y, contract="fp8_gemm_nt", inputs=base, numerics=SCHEDULE)


def cutlass_dense(r: Recorder, device: str) -> None:
    """vLLM's operator: per tensor, token, channel, bias, block; and the wrong row-major block scale."""
    backend = "cutlass" if device == "cuda" else "eager"
    for i, (m, n, k) in enumerate(SHAPES):
        base = dense_inputs(m, n, k, 100 + i)
        token, channel = recipe("f32.scale", (m, 1), 400 + i, 0), recipe("f32.scale", (1, n), 400 + i, 1)
        one, other = recipe("f32.scale", (1,), 400 + i, 2), recipe("f32.scale", (1,), 400 + i, 3)
        bias = recipe("bf16.bell", (n,), 400 + i, 4, outliers=False)
        tag = f"{m}x{n}x{k}"
        kinds: dict[str, dict[str, Recipe]] = {
            "tensor": {"a_scale": one, "b_scale": other},
            "token_channel": {"a_scale": token, "b_scale": channel},
            "tensor_channel_bias": {"a_scale": one, "b_scale": channel, "bias": bias},
            "token_tensor_bias": {"a_scale": token, "b_scale": other, "bias": bias},
            "block": {"a_scale": base["a_scale"], "b_scale": base["b_scale"]},
        }
        if k == 128:
            del kinds["block"]  # one block along K: the same shapes mean a scale per token
        for kind, scales in kinds.items():
            records = {"a": base["a"], "b": base["b"], **scales}
            t = to(make_all(records), device)
            right = t["b_scale"].t() if kind == "block" else t["b_scale"]
            with r.attempt(f"layer.cutlass_scaled_mm {kind} {tag}"), routes.only(backend):
                y = linear.cutlass_scaled_mm(t["a"], t["b"].t(), t["a_scale"], right, torch.bfloat16, t.get("bias"))
                r.keep(
                    "cutlass",
                    f"layer.cutlass.{kind}.{tag}",
                    y,
                    contract="cutlass_scaled_mm",
                    inputs=records,
                    numerics=SCHEDULE if kind == "block" else "sm90.chain",
                )
        if device == "cuda" and m % 4 == 0 and n % 128 == 0:
            with r.attempt(f"vllm (documented wrong) row-major block scale {tag}"):
                t = to(make_all(base), device)
                out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
                scale_b = t["b_scale"].t().contiguous().t()
                cutlass.operators().cutlass_scaled_mm(out, t["a"], t["b"].t(), t["a_scale"], scale_b, None)
                r.keep(
                    "cutlass",
                    f"vllm.wrong.row_major_scale.{tag}",
                    out,
                    contract="cutlass_scaled_mm",
                    inputs=base,
                    fault="row_major_scale",
                    passed="a_scale row-major",
                )


def grouped_products(r: Recorder, device: str) -> None:
    """Contiguous and masked (DeepGEMM), per token and channel (torch and CUTLASS)."""
    for i, (groups, n, k, rows) in enumerate(GROUPS):
        seed, kb, nb = 500 + i, k // 128, -(-n // 128)
        runs = [(g, count, -(-count // 128) * 128) for g, count in enumerate(rows)]
        indices = [v for g, count, run in runs for v in [g] * count + [-1] * (run - count)]
        m = len(indices)
        records = {
            "a": recipe("e4m3.bell", (m, k), seed, 0, shift=10),
            "a_scale": recipe("f32.scale", (m, kb), seed, 1),
            "b": recipe("e4m3.bell", (groups, n, k), seed, 2, shift=10),
            "b_scale": recipe("f32.scale", (groups, nb, kb), seed, 3),
            "m_indices": recipe("values", (m,), 0, 0, values=indices, dtype="int32"),
        }
        t = to(make_all(records), device)
        tag = f"g{groups}n{n}k{k}"
        with r.attempt(f"layer.m_grouped_fp8_gemm_nt_contiguous {tag}"):
            out = torch.zeros(m, n, dtype=torch.bfloat16, device=device)
            grouped.m_grouped_fp8_gemm_nt_contiguous(
                (t["a"], t["a_scale"]), (t["b"], t["b_scale"]), out, t["m_indices"]
            )
            out[t["m_indices"] < 0] = 0  # unspecified rows would only cost bytes
            r.keep(
                "grouped",
                f"layer.contiguous.{tag}",
                out,
                contract="m_grouped_fp8_gemm_nt_contiguous",
                inputs=records,
                numerics=SCHEDULE,
            )
        _masked(r, device, tag, groups, n, k, rows, seed)
        _per_token(r, device, tag, groups, n, k, rows, seed)


def _masked(r: Recorder, device: str, tag: str, groups: int, n: int, k: int, rows: tuple[int, ...], seed: int) -> None:
    m = max(rows)
    records = {
        "a": recipe("e4m3.bell", (groups, m, k), seed, 4, shift=10),
        "a_scale": recipe("f32.scale", (groups, m, k // 128), seed, 5),
        "b": recipe("e4m3.bell", (groups, n, k), seed, 2, shift=10),
        "b_scale": recipe("f32.scale", (groups, -(-n // 128), k // 128), seed, 3),
        "masked_m": recipe("values", (groups,), 0, 0, values=list(rows), dtype="int32"),
    }
    t = to(make_all(records), device)
    with r.attempt(f"layer.fp8_m_grouped_gemm_nt_masked {tag}"):
        out = torch.zeros(groups, m, n, dtype=torch.bfloat16, device=device)
        left, right = (t["a"], t["a_scale"]), (t["b"], t["b_scale"])
        grouped.fp8_m_grouped_gemm_nt_masked(left, right, out, t["masked_m"], 64)
        for g, count in enumerate(rows):
            out[g, count:] = 0
        r.keep(
            "grouped",
            f"layer.masked.{tag}",
            out,
            contract="fp8_m_grouped_gemm_nt_masked",
            inputs=records,
            numerics=SCHEDULE,
        )


def _per_token(
    r: Recorder, device: str, tag: str, groups: int, n: int, k: int, rows: tuple[int, ...], seed: int
) -> None:
    total = sum(rows)
    ends = [sum(rows[: g + 1]) for g in range(groups)]
    records = {
        "a": recipe("e4m3.bell", (total, k), seed, 6, shift=10),
        "b": recipe("e4m3.bell", (groups, n, k), seed, 2, shift=10),
        "scale_a": recipe("f32.scale", (total, 1), seed, 7),
        "scale_b": recipe("f32.scale", (groups, n), seed, 8),
        "offsets": recipe("values", (groups,), 0, 0, values=ends, dtype="int32"),
    }
    t = to(make_all(records), device)
    for backend in ("torch", "cutlass", "eager"):
        if (backend == "eager") == (device == "cpu"):
            with r.attempt(f"layer.scaled_grouped_mm [{backend}] {tag}"), routes.only(backend):
                y = grouped.scaled_grouped_mm(**t)
                r.keep("grouped", f"{backend}.scaled_grouped_mm.{tag}", y, contract="scaled_grouped_mm", inputs=records)


def probes(r: Recorder, device: str) -> None:
    """One and two instruction steps of 32 products with specials, through torch's unpromoted kernel, float32 out."""
    max_, tiny = 448.0, 2.0**-9
    rows = []
    for big in (max_, 1.0, tiny):
        for position in (0, 1, 3, 31):
            row = [tiny] * 32
            row[position] = big
            rows += [row, [-v for v in row], [0.0 if j % 2 else v for j, v in enumerate(row)]]
    rows += [[0.0] * 32, [-0.0] * 32, [max_] * 32, [max_, -max_] * 16, [float("nan")] + [1.0] * 31]
    a = torch.tensor(rows).to(torch.float8_e4m3fn)
    a = torch.nn.functional.pad(a.view(torch.uint8), (0, 0, 0, -len(rows) % 16)).view(torch.float8_e4m3fn).to(device)
    codes = recipe("e4m3.codes", (16, 32), 900, 0)
    b = make_all({"b": codes})["b"]
    b[0], b[1], b[2], b[3] = (torch.full((32,), v).to(torch.float8_e4m3fn) for v in (1.0, 448.0, 2.0**-9, -1.0))
    one = torch.ones(1, device=device)
    for repeat in (1, 2, 4):
        with r.attempt(f"probe K={32 * repeat}"):
            left = torch.cat([a] * repeat, dim=1).contiguous()
            right = torch.cat([b.to(device)] * repeat, dim=1).contiguous()
            y = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
            r.keep(
                "torch",
                f"probe.k{32 * repeat}",
                {"y": y, "a": left.view(torch.uint8), "b": right.view(torch.uint8)},
                contract="torch_per_tensor_w8a8_scaled_mm",
                inputs={},
                numerics="sm90.chain",
                passed="operands stored as codes beside the output; unit scales",
            )
