"""Quantisers, layout changes and logits of every library; approximate division tables; equality of our kernels."""

from __future__ import annotations

import importlib

import torch
from hardware.recorder import Recorder
from hardware.routines_gemm import to
from hardware.seeded_inputs import make_all, paged_cache, quantiser_matrix, quantiser_rows, recipe
from torch import Tensor

from kernels import layout, logits, quantize
from kernels.backends import cutlass, eager, flashinfer, triton_quant

FP8 = torch.float8_e4m3fn


def same(x: Tensor, y: Tensor) -> bool:
    """Equal bits, any NaN equal to any NaN."""
    a, b = x.cpu().contiguous(), y.cpu().contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = (a.float().isnan() & b.float().isnan()) if a.is_floating_point() else torch.zeros(a.shape, dtype=torch.bool)
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(size) == b.view(size)) | nan).all())


def own_quantisers(r: Recorder, device: str) -> None:
    """Our Triton kernels against plain torch on the GPU and on the CPU: every bit, every layout."""
    host = quantiser_matrix(quantiser_rows())
    x = host.to(device)
    backend = triton_quant if device == "cuda" else eager
    calm = torch.nan_to_num(host, nan=1.0, posinf=2.0, neginf=-2.0)
    ub = torch.tensor([1.25])
    for name, matrix in (("hostile", host), ("float32", calm.float() * 1.1), ("ragged", calm[:133, :384])):
        given = matrix.to(device)
        with r.attempt(f"own quantisers {name}"):
            for scales in ("row", "col", "tma"):
                for ue8m0 in (False, True):
                    ours = backend.quant_group(given, 128, 1e-10, ue8m0, scales)
                    for where, expected in (
                        ("cpu", eager.quant_group(matrix, 128, 1e-10, ue8m0, scales)),
                        (device, eager.quant_group(given, 128, 1e-10, ue8m0, scales)),
                    ):
                        good = all(same(o, e) for o, e in zip(ours, expected, strict=True))
                        r.check(f"own group quantiser = torch on {where} [{name} {scales} ue8m0={ue8m0}]", good)
            pairs = {
                "token": (backend.quant_token(given, None), eager.quant_token(matrix, None)),
                "token bounded": (backend.quant_token(given, ub.to(device)), eager.quant_token(matrix, ub)),
                "tensor": (backend.quant_tensor(given), eager.quant_tensor(matrix)),
                "static": ((backend.quant_static(given, ub.to(device)),), (eager.quant_static(matrix, ub),)),
            }
            if name != "hostile":
                pairs["packed"] = (
                    backend.quant_group_packed(given, 128, 1e-10),
                    eager.quant_group_packed(matrix, 128, 1e-10),
                )
            for kind, (ours_, expected_) in pairs.items():
                good = all(same(o, e) for o, e in zip(ours_, expected_, strict=True))
                r.check(f"own {kind} quantiser = torch on cpu [{name}]", good)
    record = {"x": quantiser_rows()}
    with r.attempt("layer.per_token_group_quant_fp8"):
        q, s = quantize.per_token_group_quant_fp8(x, 128)
        r.keep(
            "quantise",
            "layer.group",
            {"q": q, "scale": s},
            contract="per_token_group_quant_fp8",
            inputs=record,
            options={"group_size": 128},
        )


def vllm_quantisers(r: Recorder, device: str) -> None:
    """vLLM's operators: group with and without UE8M0, packed; static, dynamic, per token where ``_C`` loads."""
    x = quantiser_matrix(quantiser_rows()).to(device)
    record, m = {"x": quantiser_rows()}, x.shape[0]
    for ue8m0 in (False, True):
        for scales in ("row", "col", "tma"):
            with r.attempt(f"vllm.per_token_group_fp8_quant ue8m0={ue8m0} {scales}"):
                q, s = cutlass.quant_group(x, 128, 1e-10, ue8m0, scales)
                r.keep(
                    "quantise",
                    f"vllm.group.ue8m0_{ue8m0}.{scales}",
                    {"q": q, "scale": s},
                    contract="per_token_group_quant_fp8",
                    inputs=record,
                    options={"group_size": 128, "use_ue8m0": ue8m0},
                )
    with r.attempt("vllm.per_token_group_fp8_quant_packed"):
        calm = torch.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0)
        q, packed = cutlass.quant_group_packed(calm, 128, 1e-10)
        r.keep(
            "quantise",
            "vllm.group.packed",
            {"q": q, "scale": packed},
            contract="per_token_group_quant_fp8_packed",
            inputs=record,
            passed="NaN replaced by 1, infinities by +-2",
        )
        ours = quantize.per_token_group_quant_fp8_packed(calm, 128)
        r.check("vllm packed scales = ours", same(packed, ours[1]))
        r.check("vllm packed codes = ours", same(q, ours[0]))
    operators = ("static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant")
    for name in operators:
        for rows in ("hostile", "calm"):
            with r.attempt(f"vllm.{name} {rows}"):
                given = x if rows == "hostile" else torch.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0)
                q = torch.empty(given.shape, dtype=FP8, device=device)
                s = torch.full((m, 1) if "token" in name else (1,), 0.01, device=device)
                extra = [None] if "token" in name else []
                getattr(cutlass.operators(), name)(q, given, s, *extra)
                r.keep(
                    "quantise",
                    f"vllm.{name}.{rows}",
                    {"q": q, "scale": s},
                    contract="scaled_fp8_quant",
                    inputs=record,
                    options={"use_per_token_if_dynamic": "token" in name},
                    passed="static scale 0.01" if name.startswith("static") else f"{rows} rows",
                )


def flashinfer_quantiser(r: Recorder, device: str) -> None:
    """FlashInfer's internal 1x128 quantiser by itself, and ours with IEEE division on the same data."""
    x = quantiser_matrix(quantiser_rows()).to(device)
    m, k = x.shape
    lead = m + (-m % 4)
    record = {"x": quantiser_rows()}
    with r.attempt("flashinfer internal 1x128 quantiser"):
        base = importlib.import_module("flashinfer.gemm.gemm_base")
        runner = base.get_fp8_blockscale_gemm_runner_sm90()
        q = torch.empty(m, k, dtype=FP8, device=device)
        s = torch.zeros(k // 128, lead, device=device)
        runner.fp8_quantize_1x128(x, q, s, False)
        r.keep(
            "quantise",
            "flashinfer.quantize_1x128",
            {"q": q, "scale": s},
            contract="flashinfer_quantize_1x128",
            inputs=record,
        )
    with r.attempt("layer.flashinfer_quantize_1x128"):
        ours = quantize.flashinfer_quantize_1x128(x)
        host = quantize.flashinfer_quantize_1x128(x.cpu())
        r.check("flashinfer_quantize_1x128: GPU bits = CPU bits", same(ours[0], host[0]) and same(ours[1], host[1]))


def division_tables(r: Recorder, device: str) -> None:
    """``div.approx.ftz`` of 448 by each bf16 significand and ``rcp.approx.ftz`` of the result, at several exponents."""
    with r.attempt("division tables"):
        kernels = importlib.import_module("hardware.approximate_division")
        exponents = (-10, 0, 1, 12)
        amax = torch.stack([(1 + torch.arange(128) / 128) * 2.0**e for e in exponents]).to(device)
        table = kernels.tables(amax)
        r.keep(
            "quantise",
            "division",
            {"amax": amax, **table},
            contract="division_table",
            inputs={},
            passed=f"rows: exponents {exponents}; columns: 128 bf16 significands",
        )
        exact = torch.full_like(amax, 448.0).cpu() / amax.cpu()
        differs = int((table["div_approx"].cpu().view(torch.int32) != exact.view(torch.int32)).sum())
        r.check("div.approx entries that differ from IEEE division", differs)


def layouts(r: Recorder, device: str) -> None:
    """DeepGEMM's scale transforms against ours."""
    scale = make_all({"s": recipe("f32.scale", (31, 7), 600, 0)})["s"].to(device)
    power = make_all({"s": recipe("f32.power", (31, 7), 600, 1)})["s"].to(device)
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        with r.attempt(f"{name} scale layouts"):
            library = importlib.import_module(name)
            utils = importlib.import_module(f"{name}.utils")
            theirs = getattr(library, "get_mn_major_tma_aligned_tensor", None) or utils.get_mn_major_tma_aligned_tensor
            ours = layout.get_col_major_tma_aligned_tensor(scale)
            made = theirs(scale)
            r.check(f"{name} MN-major layout = ours", same(made, ours) and made.stride() == ours.stride())
            pack = utils.get_mn_major_tma_aligned_packed_ue8m0_tensor
            packed, mine = pack(power), layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(power)
            r.check(f"{name} packed UE8M0 layout = ours", same(packed, mine) and packed.stride() == mine.stride())
            r.keep(
                "quantise",
                f"{name}.layout",
                {"mn_major": made, "packed": packed},
                contract="layout",
                inputs={"scale": recipe("f32.scale", (31, 7), 600, 0), "power": recipe("f32.power", (31, 7), 600, 1)},
            )


def mqa(r: Recorder, device: str) -> None:
    """Indexer logits, cleaned and not; paged, with one- and two-dimensional context lengths."""
    for i, (m, heads, depth, n) in enumerate(((64, 32, 128, 256), (33, 64, 64, 300))):
        starts = [max(0, j * 3 - 40) for j in range(m)]
        ends = [min(n, s + 5 + 4 * j) for j, s in enumerate(starts)]
        records = {
            "q": recipe("e4m3.bell", (m, heads, depth), 700 + i, 0, shift=12),
            "k": recipe("e4m3.bell", (n, depth), 700 + i, 1, shift=12),
            "k_scale": recipe("f32.scale", (n,), 700 + i, 2),
            "weights": recipe("f32.bell", (m, heads), 700 + i, 3),
            "cu_seqlen_ks": recipe("values", (m,), 0, 0, values=starts, dtype="int32"),
            "cu_seqlen_ke": recipe("values", (m,), 0, 0, values=ends, dtype="int32"),
        }
        t = to(make_all(records), device)
        for clean in (True, False):
            with r.attempt(f"layer.fp8_mqa_logits clean={clean} {m}x{n}"):
                y = logits.fp8_mqa_logits(
                    t["q"], (t["k"], t["k_scale"]), t["weights"], t["cu_seqlen_ks"], t["cu_seqlen_ke"], clean
                )
                r.keep(
                    "logits",
                    f"layer.mqa.clean_{clean}.{m}x{n}",
                    y,
                    contract="fp8_mqa_logits",
                    inputs=records,
                    options={"clean_logits": clean},
                    numerics="sm90.mqa_logits",
                )
                if not clean:
                    position = torch.arange(n, device=device)
                    outside = (position < t["cu_seqlen_ks"].unsqueeze(1)) | (position >= t["cu_seqlen_ke"].unsqueeze(1))
                    r.check(
                        f"uncleaned logits outside the window are finite {m}x{n}", bool(y[outside].isfinite().any())
                    )
    _paged(r, device)


def _paged(r: Recorder, device: str) -> None:
    heads, depth, blocks = 32, 128, 12
    for next_n, lens in ((1, (70, 200, 1)), (2, (130, 65, 256))):
        batch = len(lens)
        records = {
            "q": recipe("e4m3.bell", (batch, next_n, heads, depth), 710, next_n, shift=12),
            "k": recipe("e4m3.bell", (blocks, 64 * depth), 710, 10, shift=12),
            "k_scale": recipe("f32.scale", (blocks, 64), 710, 11),
            "weights": recipe("f32.bell", (batch * next_n, heads), 710, 12 + next_n),
            "context_lens": recipe("values", (batch,), 0, 0, values=list(lens), dtype="int32"),
            "block_tables": recipe(
                "values",
                (batch, 4),
                0,
                0,
                dtype="int32",
                values=[(b * 4 + j) * 5 % blocks for b in range(batch) for j in range(4)],
            ),
        }
        t = make_all(records)
        t = to({**t, "kv_cache": paged_cache(t["k"], t["k_scale"])}, device)
        with r.attempt(f"layer.fp8_paged_mqa_logits next_n={next_n}"):
            sms = 132 if device == "cpu" else None
            steps = torch.arange(1 - next_n, 1, dtype=torch.int32, device=device)
            two = t["context_lens"].unsqueeze(1) + steps
            schedule = logits.get_paged_mqa_logits_metadata(two, 64, sms)
            common = (t["q"], t["kv_cache"], t["weights"])
            y = logits.fp8_paged_mqa_logits(*common, t["context_lens"], t["block_tables"], schedule, 256)
            again = logits.fp8_paged_mqa_logits(*common, two, t["block_tables"], schedule, 256)
            r.check(f"paged logits: 1-D and 2-D context_lens agree next_n={next_n}", same(y, again))
            r.keep(
                "logits",
                f"layer.paged.next_n{next_n}",
                y,
                contract="fp8_paged_mqa_logits",
                inputs=records,
                options={"max_model_len": 256},
                passed="kv_cache: per block the codes, then the scales",
            )
            r.keep(
                "logits",
                f"layer.paged_metadata.next_n{next_n}",
                schedule,
                contract="get_paged_mqa_logits_metadata",
                inputs={"context_lens": records["context_lens"]},
            )
            mine = eager.paged_metadata(two.cpu(), 64, schedule.shape[0] - 1)
            r.check(f"paged metadata = ours next_n={next_n}", same(schedule.cpu(), mine))


def flashinfer_helpers(r: Recorder, device: str) -> None:
    """Row orders of FlashInfer's helpers against ours, index for index."""
    with r.attempt("flashinfer row orders"):
        library = flashinfer.library("flashinfer")
        for n in (32, 96, 256):
            w = torch.arange(n, dtype=torch.int32).unsqueeze(1).expand(-1, 16).contiguous().view(torch.uint8)
            reorder = library.reorder_rows_for_gated_act_gemm(w)
            r.check(f"reorder_rows {n}", torch.equal(reorder, layout.reorder_rows_for_gated_act_gemm(w)))
            for tile in (64, 128):
                r.check(
                    f"shuffle_matrix_a {n} {tile}",
                    torch.equal(library.shuffle_matrix_a(w, tile), layout.shuffle_matrix_a(w, tile)),
                )
