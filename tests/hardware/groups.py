"""Questions about grouped and batched products that only a GPU answers: ``python tests/hardware/groups.py [NAME ...]``.

Without one the questions that need no library are asked of the CPU, small, to try the script.

    race        DeepGEMM's k-grouped product, experts of 0, 1, 127, 128 and 129 tokens (padded to blocks of 128 with
                zeros), ``RUNS`` calls each into a poisoned output, every bit compared with the prediction
    summand     subnormal sums and summands: are they flushed where memory adds them?
    padding     NaN in the padding of the scales, M no multiple of 4: does a number of the next group change?
    heads       ``fp8_einsum`` with a summand on one head: is it added?
    batches     ``bmm_fp8`` at several shapes, each identified among the schedules, splits of K included
    row_major   ``bmm_fp8`` with B row by row, which nothing refuses

Ends with status 1 where bits differ that must not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import kernels
import oracle
from kernels.backends import deep_gemm
from oracle.routines import cases, get

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = 2000 if DEVICE == "cuda" else 2
TOKENS = (0, 1, 127, 128, 129)
LARGE = 1024 if DEVICE == "cuda" else 16
"""Rows and columns: tiles of all groups outnumber the multiprocessors, so that one of them meets several groups."""
POISON = 0x7FC0BEEF
K_GROUPED, BMM = "k_grouped_fp8_gemm_nt_contiguous", "bmm_fp8"
Inputs = dict[str, Tensor]


def on_device(inputs: Inputs) -> Inputs:
    """The same tensors, strides kept, on the device."""
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def experts(tokens: int, m: int = LARGE, n: int = LARGE) -> Inputs:
    """Eight groups, four of them of ``tokens`` steps; steps beyond the tokens are zero codes."""
    used = [tokens, 384, tokens, tokens, 640, 128, tokens, 256]
    ks = [-(-t // 128) * 128 for t in used]
    g = torch.Generator().manual_seed(tokens + 1)
    found: Inputs = {}
    for side, rows in (("a", m), ("b", n)):
        parts = []
        for k, t in zip(ks, used, strict=True):
            x = (torch.randn(rows, k, generator=g) * 16).to(torch.float8_e4m3fn)
            x.view(torch.uint8)[:, t:] = 0
            parts.append(x.view(torch.uint8).flatten())
        found[side] = torch.cat(parts).view(torch.float8_e4m3fn)
        found[f"{side}_scale"] = torch.rand(rows, sum(ks) // 128, generator=g) + 0.5
    c = torch.randn(len(ks), m, n, generator=g)
    return on_device({**found, "ks": torch.tensor(ks, dtype=torch.int32), "c": c})


def k_grouped(inputs: Inputs, out: Tensor) -> None:
    """The layer's call."""
    left, right = ((inputs[side], inputs[f"{side}_scale"]) for side in "ab")
    kernels.k_grouped_fp8_gemm_nt_contiguous(left, right, out, inputs["steps"], inputs["ks"], c=inputs["c"])


def differing(call: Callable[[Tensor], None], right: Tensor, runs: int) -> tuple[int, int]:
    """Runs, and elements of all runs, whose bits are not those of ``right``; the output is poisoned before each."""
    out, bits = torch.empty_like(right), right.view(torch.int32)
    elements = torch.zeros((), dtype=torch.int64, device=right.device)
    wrong = elements.clone()
    for _ in range(runs):
        out.view(torch.int32).fill_(POISON)
        call(out)
        bad = (out.view(torch.int32) != bits).sum()
        elements += bad
        wrong += bad > 0
    return int(wrong), int(elements)


def race() -> Iterator[str]:
    for tokens in TOKENS:
        inputs = experts(tokens)
        steps = inputs["ks"].tolist()
        right = oracle.predict(K_GROUPED, inputs, numerics="sm90.promote128")
        assert isinstance(right, Tensor)
        inputs["steps"] = steps  # type: ignore[assignment]
        wrong, elements = differing(lambda out, given=inputs: k_grouped(given, out), right, RUNS)
        yield f"experts of {tokens} tokens: {wrong} of {RUNS} runs differ, in {elements} elements"
        twisted = right.clone()
        twisted.view(torch.int32)[0, 0, 0] ^= 1
        if differing(lambda out, given=inputs: k_grouped(given, out), twisted, 2) == (0, 0):
            yield "FAIL: the comparison sees no difference of one bit"
        if wrong:
            yield "FAIL: the bits differ"


def one_sum(scale: float, c: float) -> float:
    """``c`` plus one product of ones, 1 * scale * 1, by the 1x1 recipe; through the layer."""
    a = torch.zeros(128, 128, device=DEVICE).to(torch.float8_e4m3fn)
    a.view(torch.uint8)[:, 0] = 0x38
    s, t = torch.full((128, 1), scale, device=DEVICE), torch.full((128, 1), 1.0, device=DEVICE)
    out = torch.zeros(128, 128, device=DEVICE)
    kernels.fp8_gemm_nt_1d1d((a, s), (a, t), out, c=torch.full_like(out, c))
    return float(out[3, 5])


def summand() -> Iterator[str]:
    tiny = 2.0**-130
    for scale, c in ((0.0, tiny), (tiny, 0.0), (tiny, tiny), (2.0**-126, -(2.0**-127)), (1.0, tiny)):
        yield f"sum {scale:g} + c {c:g} = {one_sum(scale, c):g}"


def padding() -> Iterator[str]:
    inputs = experts(128, m=130, n=256)
    steps = inputs["ks"].tolist()
    right = oracle.predict(K_GROUPED, inputs, numerics="sm90.promote128")
    assert isinstance(right, Tensor)
    for word, value in (("zero", 0.0), ("NaN", torch.nan)):
        scales = []
        for side in "ab":
            scale = inputs[f"{side}_scale"]
            whole = torch.full((scale.shape[1], -(-scale.shape[0] // 4) * 4), value, device=DEVICE)
            scales.append(whole[:, : scale.shape[0]].t().copy_(scale))
        out = inputs["c"].clone()
        pairs = (inputs["a"], scales[0]), (inputs["b"], scales[1])
        deep_gemm.symbol("k_grouped")[0](*pairs, out, steps, inputs["ks"], out, (1, 1, 128))
        rows = (out.view(torch.int32) != right.view(torch.int32)).any(dim=2).nonzero().tolist()
        yield f"scales padded with {word}, M=130: {len(rows)} rows differ, first {rows[:4]} (group, row)"


def heads() -> Iterator[str]:
    case = cases.parse("fp8_einsum/e4m3xe4m3-bf16/1x128:128x128/m=17,n=128,k=256,g=1/family=randn/seed=1")
    inputs = on_device(case.inputs())
    right = oracle.predict("fp8_einsum", inputs, numerics="sm90.promote128", out_dtype=torch.bfloat16)
    out, c = torch.empty_like(right), torch.full_like(right, 64.0)  # type: ignore[arg-type]
    pairs = (inputs["a"], inputs["a_scale"]), (inputs["b"], inputs["b_scale"])
    try:
        deep_gemm.symbol("einsum")[0]("bhr,hdr->bhd", *pairs, out, c)
        yield f"with c = 64: equal to the bare product in {float((out == right).double().mean()):.4f} of the elements"
    except RuntimeError as error:
        yield f"with c: refused ({str(error).splitlines()[0]:.120})"


def batches() -> Iterator[str]:
    contract = get(BMM)
    for m, n, k, g in ((16, 256, 512, 3), (128, 512, 2048, 2), (17, 128, 8192, 2), (512, 1024, 1024, 4)):
        for store in ("bf16", "f16"):
            text = f"{BMM}/e4m3xe4m3-{store}/tensor:tensor/m={m},n={n},k={k},g={g}/family=randn/seed=1"
            inputs, options = on_device(cases.parse(text).inputs()), cases.parse(text).call_options()
            dtype = options["out_dtype"]
            assert isinstance(dtype, torch.dtype)
            out = kernels.bmm_fp8(*(inputs[name] for name in ("A", "B", "A_scale", "B_scale")), dtype)
            verdict = contract.judge(inputs, out, arch="sm90", **options)
            best = contract.identify(inputs, out, arch="sm90", **options)[0]
            said = f"{best.schedule} in {100 * best.equal:.4f}%"
            yield f"{'FAIL: ' if verdict.status.is_failure else ''}{text}: {verdict.status}, {said}; {verdict.basis}"


def row_major() -> Iterator[str]:
    import flashinfer.gemm

    case = cases.parse(f"{BMM}/e4m3xe4m3-bf16/tensor:tensor/m=16,n=256,k=512,g=2/family=randn/seed=2")
    inputs = on_device(case.inputs())
    inputs["B"] = inputs["B"].view(torch.uint8).contiguous().view(torch.float8_e4m3fn)
    try:
        out = flashinfer.gemm.bmm_fp8(*(inputs[n] for n in ("A", "B", "A_scale", "B_scale")), torch.bfloat16)
        yield f"accepted: {oracle.judge(BMM, inputs, out, arch='sm90').summary:.200}"
    except (RuntimeError, ValueError) as error:
        yield f"refused: {str(error).splitlines()[0]:.160}"


QUESTIONS = {f.__name__: f for f in (race, summand, padding, heads, batches, row_major)}


def main(wanted: list[str]) -> int:
    failed = 0
    for name in wanted or list(QUESTIONS):
        for line in QUESTIONS[name]():
            print(f"{name}: {line}", flush=True)
            failed += line.startswith("FAIL")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
