"""Small questions to a GPU and its libraries.

Approximate division, one and two instruction steps, our quantisers' bits, the rows a masked product stores, whether a
product minds a pitch between the rows of its operands, and what it answers several threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from hardware.notes import Notes
from torch import Tensor

from kernels import blockscaled
from kernels.backends import cutlass, eager, flashinfer, triton_quant
from oracle.numbers import fast_math
from oracle.numbers.formats import same_bits
from oracle.routines import cases

TINY, HUGE = 2.0**-9, 448.0
"""The smallest and the largest magnitude of E4M3."""


def division_tables(notes: Notes, device: str) -> None:
    """``div.approx.ftz`` of 448 by every finite bf16 value that is not negative, ``rcp.approx.ftz`` of the result, and
    whether both are those of :mod:`oracle.numbers.fast_math`."""
    tables = importlib.import_module("hardware.approximate_division").tables
    amax = (torch.arange(255 * 128, dtype=torch.int32) << 16).view(torch.float32).view(255, 128)
    made = {name: table.cpu() for name, table in tables(amax.to(device)).items()}
    notes.keep("division", {"amax": amax, **made})
    exact = torch.full_like(amax, HUGE) / amax
    one = 127  # the row of 2^0
    notes.check("significands whose div.approx is not IEEE", int((~same_bits(made["quotient"], exact))[one].sum()))
    exponents = tuple(range(-116, 126))
    inner = made["quotient"][exponents[0] + one : exponents[-1] + one + 1]
    notes.check("div.approx depends on the significand alone", follows_significand(inner, exponents))
    for name, right in modelled(amax).items():
        notes.check(f"{name} as modelled, every bfloat16 value", bool(same_bits(made[name], right).all()))


def modelled(amax: Tensor) -> dict[str, Tensor]:
    """What :mod:`oracle.numbers.fast_math` makes of ``amax``, by the names of the tables, float32."""
    a = amax.to(torch.float64)
    q = fast_math.divide(torch.full_like(a, fast_math.DIVIDEND), a, flushed=True)
    scale = fast_math.divide(torch.ones_like(q), q, flushed=True)
    found = {"quotient": q, "scale": scale, "amax_times_quotient": fast_math.product(a, q)}
    found["zero_times_quotient"] = fast_math.product(torch.zeros_like(a), q)
    return {name: value.to(torch.float32) for name, value in found.items()}


def follows_significand(quotients: Tensor, exponents: tuple[int, ...]) -> bool:
    """Whether row i is row 0 times ``2**(exponents[0] - exponents[i])``, as exact quotients are."""
    scaled = torch.stack([quotients[0] * 2.0 ** (exponents[0] - e) for e in exponents])
    return bool(same_bits(quotients, scaled).all())


def instruction_probes(notes: Notes, device: str) -> None:
    """One, two and four steps of 32 products with specials, through torch's unpromoted kernel, float32 out."""
    rows = []
    for big in (HUGE, 1.0, TINY):
        for position in (0, 1, 3, 31):
            row = [TINY] * 32
            row[position] = big
            rows += [row, [-v for v in row], [0.0 if j % 2 else v for j, v in enumerate(row)]]
    rows += [[0.0] * 32, [-0.0] * 32, [HUGE] * 32, [HUGE, -HUGE] * 16, [float("nan")] + [1.0] * 31]
    rows += [[0.0] * 32] * (-len(rows) % 16)
    a = torch.tensor(rows).to(torch.float8_e4m3fn)
    b = cases.parse("fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=1,n=16,k=32/family=codes/seed=900").inputs()["b"]
    b = b.view(torch.uint8).clone()
    for i, value in enumerate((1.0, HUGE, TINY, -1.0, -0.0)):
        b[i] = torch.full((32,), value).to(torch.float8_e4m3fn).view(torch.uint8)
    one = torch.ones(1, device=device)
    for steps in (1, 2, 4):
        left = a.view(torch.uint8).repeat(1, steps).view(a.dtype).to(device)
        right = b.repeat(1, steps).view(a.dtype).to(device)
        y = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
        notes.keep(f"probe.k{32 * steps}", {"y": y, "a": left.view(torch.uint8), "b": right.view(torch.uint8)})


def own_quantisers(notes: Notes, device: str) -> None:
    """Our Triton kernels against plain torch on the CPU: every bit, every layout, on what rounds hardest."""
    backend = triton_quant if device == "cuda" else eager
    # twice: the second launch of a class of arguments does without Triton's dispatch
    for family in ("ties", "amax", "special", "nan") * 2:
        text = f"per_token_group_quant_fp8/bf16-e4m3/1x128/m=133,k=512/family={family}/seed=77"
        host = cases.parse(text).inputs()["x"]
        for scales in ("row", "col", "tma"):
            for ue8m0 in (False, True):
                with notes.attempt(f"own group quantiser {family} {scales} ue8m0={ue8m0}"):
                    ours = backend.quant_group(host.to(device), 128, 1e-10, ue8m0, scales)
                    right = eager.quant_group(host, 128, 1e-10, ue8m0, scales)
                    notes.check(f"own group quantiser = torch on cpu [{family} {scales} {ue8m0}]", _same(ours, right))
        with notes.attempt(f"own token and tensor quantisers {family}"):
            token = backend.quant_token(host.to(device), None), eager.quant_token(host, None)
            tensor = backend.quant_tensor(host.to(device)), eager.quant_tensor(host)
            notes.check(f"own token quantiser = torch on cpu [{family}]", _same(*token))
            notes.check(f"own tensor quantiser = torch on cpu [{family}]", _same(*tensor))


def masked_stores(notes: Notes, device: str) -> None:
    """How many rows DeepGEMM's masked product stores for one real row of group 0, the other groups being empty.

    More than M: rows of the next group are overwritten while, with work of its own, that group stores them.
    """
    call = importlib.import_module("deep_gemm").fp8_m_grouped_gemm_nt_masked
    found = {}
    k, groups = 256, 4
    for n in (64, 128, 4096):
        for m in (17, 33, 64, 100, 128, 192, 257, 384, 512):
            for expected in sorted({1, m}):
                for first in sorted({1, m}):
                    a = torch.ones(groups, m, k, device=device).to(torch.float8_e4m3fn)
                    b = torch.ones(groups, n, k, device=device).to(torch.float8_e4m3fn)
                    a_scale = torch.ones(groups, m, k // 128, device=device)
                    b_scale = torch.ones(groups, -(-n // 128), k // 128, device=device)
                    out = torch.full((groups, m, n), -1.0, dtype=torch.bfloat16, device=device)
                    rows = torch.tensor([first, 0, 0, 0], dtype=torch.int32, device=device)
                    call((a, a_scale), (b, b_scale), out, rows, expected, disable_ue8m0_cast=True)
                    written = (out.view(groups * m, n) != -1.0).any(dim=1).nonzero()
                    found[f"n={n},m={m},expected={expected},rows={first}"] = int(written.max()) + 1
    notes.check("rows stored by the masked product", found)


def row_pitch(notes: Notes, device: str) -> None:
    """vLLM's CUTLASS product of operands whose rows lie 16 elements further apart than they are long."""
    ops = cutlass.operators()
    one = torch.ones(1, device=device)
    for m, n, k in ((33, 64, 128), (128, 256, 256), (512, 512, 512)):
        a, b = (torch.randn(r, k, device=device).to(torch.float8_e4m3fn) for r in (m, n))
        wide = [torch.cat([x.view(torch.uint8), torch.zeros_like(x.view(torch.uint8))[:, :16]], 1) for x in (a, b)]
        pitched = [w.view(torch.float8_e4m3fn)[:, :k] for w in wide]
        right, out = (torch.empty(m, n, dtype=torch.bfloat16, device=device) for _ in range(2))
        ops.cutlass_scaled_mm(right, a, b.t(), one, one, None)
        for name, left, weight in (("a", pitched[0], b), ("b", a, pitched[1])):
            with notes.attempt(f"row pitch of {name}, {m}x{n}x{k}"):
                ops.cutlass_scaled_mm(out, left, weight.t(), one, one, None)
                notes.check(f"row pitch of {name}, {m}x{n}x{k}: wrong elements", int((out != right).sum()))


def _same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Equal bits, any NaN equal to any NaN."""
    return all(bool(same_bits(x.cpu(), y).all()) for x, y in zip(found, right, strict=True))


def threads(notes: Notes, device: str) -> None:
    """Wrong answers when four threads multiply different rows, each on its own stream: FlashInfer and the layer."""
    n, k = 4096, 7168
    made = cases.parse(f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=1,n={n},k={k}/family=randn/seed=1").inputs()
    weight, scale = made["b"].to(device), made["b_scale"].to(device)
    bare = flashinfer.library("flashinfer.gemm").fp8_blockscale_gemm_sm90
    layer = blockscaled.dynamic_flashinfer_deepgemm_blockscale_gemm
    subjects: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
        "FlashInfer": (lambda x: bare(x, weight, None, scale), (3, 17, 30, 9)),
        "layer below 32 rows": (lambda x: layer(x, weight, scale), (3, 17, 30, 9)),
        "layer from 32 rows": (lambda x: layer(x, weight, scale), (33, 64, 100, 40)),
    }
    for name, (call, rows) in subjects.items():
        with notes.attempt(f"threads: {name}"):
            inputs = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for m in rows]
            notes.check(f"threads: wrong answers of {len(rows) * ANSWERS}, {name}", sum(_answers(call, inputs)))


ANSWERS = 2000
"""Calls of one thread."""


def _answers(call: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> list[int]:
    """Answers with other bits than alone, per thread, of :data:`ANSWERS` each."""
    alone = [call(x).clone() for x in inputs]
    torch.cuda.synchronize()

    def body(i: int) -> int:
        wrong = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(ANSWERS // 50):
                answers = [call(inputs[i]) for _ in range(50)]
                torch.cuda.current_stream().synchronize()
                wrong += sum(not bool(same_bits(y, alone[i]).all()) for y in answers)
        return wrong

    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(body, range(len(inputs))))
