"""Without a declared numerics every arithmetic of the arch is right, and float32 in any order; a mixture is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds import Interval
from oracle.numbers.formats import decode
from oracle.routines import cases
from oracle.routines.catalogue import agree
from oracle.routines.products.contract import BLOCK_NUMERICS, ROW_NUMERICS
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.compare import Status
from oracle.verdict.products import COINCIDENCES, Part, accumulation_faults, interval_of, wider_classes
from tests.support.products import KINDS, block_scaled, judge_parts, row_scaled

pytestmark = pytest.mark.turns(4)

HARDWARE = ("sm90", "sm89", "sm100", "sm120")


def forward(a: Tensor, b: Tensor) -> Tensor:
    """One float32 addition after the other, as a loop over K does."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[None, :, k]
    return total


def by_block(p: ScaledProduct, dot: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    a, b, total = p.a.float(), p.b.float(), torch.zeros(p.M, p.N)
    columns = p.b_scale.repeat_interleave(p.b_rows, dim=0)[: p.N]
    for block in range(p.B):
        k = slice(block * p.block, (block + 1) * p.block)
        total = total + dot(a[:, k], b[:, k]) * (p.a_scale[:, block, None] * columns[None, :, block])
    return total if p.bias is None else total + p.bias.float()


def dequantised(p: ScaledProduct, dot: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    columns = p.b_scale.repeat_interleave(p.b_rows, dim=0)[: p.N]
    a = p.a.float() * p.a_scale.repeat_interleave(p.block, dim=1)[:, : p.K]
    b = p.b.float() * columns.repeat_interleave(p.block, dim=1)[:, : p.K]
    return dot(a, b) if p.bias is None else dot(a, b) + p.bias.float()


FLOAT32: dict[str, Callable[[ScaledProduct], Tensor]] = {
    "blocks": lambda p: by_block(p, lambda a, b: a @ b.T),
    "blocks, one by one": lambda p: by_block(p, forward),
    "dequantised, one by one": lambda p: dequantised(p, forward),
    "dequantised, backwards": lambda p: dequantised(p, lambda a, b: forward(a.flip(1), b.flip(1))),
}


OUTSIDE = "dequantised, one by one"  # on positive data it leaves the interval that truncation gives


def calls(seed: int, kind: str) -> Iterator[tuple[str, ScaledProduct]]:
    for m, n, k in ((4, 8, 96), (3, 20, 640)):
        yield "fp8_gemm_nt", block_scaled(kind, m, n, k, seed=seed)
        yield "cutlass_scaled_mm", row_scaled(kind, m, n, k, seed=seed)


def inputs_of(p: ScaledProduct) -> dict[str, Tensor]:
    found = {"a": p.a, "a_scale": p.a_scale, "b": p.b, "b_scale": p.b_scale}
    return found if p.bias is None else found | {"bias": p.bias}


class TestFloat32Kernels:
    """A kernel that errs less than the tensor core is not wrong for it."""

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("how", FLOAT32)
    @pytest.mark.parametrize("arch", HARDWARE)
    def test_pass_on_every_arch(self, arch: str, how: str) -> None:
        for kind in KINDS:
            for name, p in calls(3, kind):
                for dtype in (torch.float32, torch.bfloat16):
                    verdict = oracle.judge(name, inputs_of(p), FLOAT32[how](p).to(dtype), arch=arch)  # type: ignore[arg-type]
                    assert not verdict.status.is_failure, (kind, verdict.summary)

    @pytest.mark.usefixtures("unexplained")
    def test_the_declared_class_stays_tight_and_the_verdict_names_the_wider_one(self) -> None:
        p = block_scaled("positive", 16, 24, 512, seed=2)
        out = FLOAT32[OUTSIDE](p)
        verdict = oracle.judge("fp8_gemm_nt", inputs_of(p), out)  # type: ignore[arg-type]
        assert verdict.status is Status.PASSED and verdict.matches is None
        assert verdict.basis.startswith("any-order float32 bound; ") and "sm90.promote128" in verdict.basis
        assert verdict.basis in verdict.summary
        declared = oracle.judge("fp8_gemm_nt", inputs_of(p), out, numerics="sm90.promote128")  # type: ignore[arg-type]
        assert declared.status is Status.FAILED and "float32" not in declared.basis
        assert f"{declared.outside} elements leave the residue bound" in verdict.basis

    def test_attention_logits(self) -> None:
        g = torch.Generator().manual_seed(1)
        q = (torch.rand(4, 8, 128, generator=g) + 0.5).to(torch.float8_e4m3fn)
        k = (torch.rand(16, 128, generator=g) + 0.5).to(torch.float8_e4m3fn)
        scale, weights = torch.rand(16, generator=g) + 0.5, torch.rand(4, 8, generator=g) + 0.5
        inputs = {
            "q": q,
            "k": k,
            "k_scale": scale,
            "weights": weights,
            "cu_seqlen_ks": torch.zeros(4, dtype=torch.int32),
            "cu_seqlen_ke": torch.full((4,), 16, dtype=torch.int32),
        }
        dots = torch.stack([forward(q[:, h].float(), k.float()) for h in range(8)], dim=1)
        out = (dots.relu() * weights[:, :, None]).sum(dim=1) * scale
        assert oracle.judge("fp8_mqa_logits", inputs, out).status is Status.PASSED
        out = out * (1 + 32 * 2.0**-24)  # as 128 additions may err, and a chain that truncates may not
        verdict = oracle.judge("fp8_mqa_logits", inputs, out)
        assert verdict.status is Status.PASSED and "float32" in verdict.basis
        assert oracle.judge("fp8_mqa_logits", inputs, out, numerics="sm90.mqa_logits").status is Status.FAILED
        assert oracle.judge("fp8_mqa_logits", inputs, out * (1 + 2.0**-12)).status is Status.FAILED


class TestSabotage:
    """What no single class holds fails, and is reported against the usual one."""

    @pytest.mark.usefixtures("unexplained")
    def test_one_element_beyond_both(self) -> None:
        p = block_scaled("positive", 16, 24, 512, seed=2)
        out = FLOAT32[OUTSIDE](p)
        out[3, 5] *= 1 + 2.0**-13
        verdict = oracle.judge("fp8_gemm_nt", inputs_of(p), out)  # type: ignore[arg-type]
        assert verdict.status is Status.FAILED and verdict.basis == "residue bound of sm90.promote128"

    @pytest.mark.usefixtures("unexplained")
    def test_a_mixture_of_two_classes(self) -> None:
        """Every element lies in one of two classes, but the output as a whole in neither."""
        p = block_scaled("positive", 16, 24, 512, seed=2)
        float32, usual = (interval_of(p, name) for name in ("ieee32.any", "sm90.promote128"))
        hardware = predict_product(p, "sm90.promote128", out_dtype=torch.float32)
        mixed = torch.where(torch.arange(16)[:, None] < 8, hardware, FLOAT32[OUTSIDE](p))
        assert bool((usual.lo < float32.lo).any()), "the data must tell the classes apart"
        inputs = inputs_of(p)
        assert oracle.judge("fp8_gemm_nt", inputs, hardware).status is Status.PASSED  # type: ignore[arg-type]
        verdict = oracle.judge("fp8_gemm_nt", inputs, mixed)  # type: ignore[arg-type]
        assert verdict.status is Status.FAILED and verdict.outside < 8 * 24

    @pytest.mark.usefixtures("unexplained")
    def test_a_class_that_claims_nothing_excuses_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        p = block_scaled("positive", 16, 24, 512, seed=2)
        out = predict_product(p, "sm90.promote128", out_dtype=torch.float32)
        out[3, 5] *= 2
        monkeypatch.setattr("oracle.verdict.parts.ieee32_bound", _open)
        verdict = oracle.judge("fp8_gemm_nt", inputs_of(p), out)  # type: ignore[arg-type]
        assert verdict.status is Status.FAILED and verdict.outside == 1

    @pytest.mark.parametrize("fault", [0, 1], ids=["alignment to 12 bits", "products aligned to 12 bits"])
    def test_a_long_sum_does_not_hide_a_narrow_aligner(self, fault: int) -> None:
        """Float32 in any order over a long K may err as much as 12 bits do; the bits still give the fault away."""
        p = block_scaled("randn", 8, 32, 8192, seed=4)
        wrong = accumulation_faults(get("sm90.promote128"))[fault]
        out = predict_product(p, wrong, out_dtype=torch.bfloat16)
        right = predict_product(p, "sm90.promote128", out_dtype=torch.bfloat16)
        assert not bool(agree(out, right).all())
        verdict = oracle.judge("fp8_gemm_nt", inputs_of(p), out)  # type: ignore[arg-type]
        assert verdict.status is Status.FAILED and verdict.explained_by == (wrong.name,)
        unasked = judge_parts([Part(p)], out, numerics=["sm90.promote128"], wider=["ieee32.any"])
        assert unasked.status is Status.PASSED, "the intervals alone would not have told"


class TestCoincidence:
    """Few elements may have the bits of a fault by chance."""

    def test_the_correctly_rounded_value_is_never_a_fault(self) -> None:
        schedule, found = get("sm90.promote128"), 0
        for seed in range(300):
            p = block_scaled("randn", 1, 1, 256, seed=seed)
            out = oracle.reference("fp8_gemm_nt", inputs_of(p), out_dtype=torch.bfloat16)  # type: ignore[arg-type]
            assert isinstance(out, Tensor)
            bits = [predict_product(p, s, out_dtype=torch.bfloat16) for s in (schedule, *accumulation_faults(schedule))]
            if torch.equal(out, bits[0]) or not any(torch.equal(out, b) for b in bits[1:]):
                continue
            found += 1
            for numerics in (None, schedule.name):
                assert oracle.judge("fp8_gemm_nt", inputs_of(p), out, numerics=numerics).status is not Status.FAILED  # type: ignore[arg-type]
        assert found > 0

    def test_a_few_elements_refute_only_what_is_declared(self) -> None:
        """With 24 bits instead of 25 nearly every bfloat16 is still that of the exact value."""
        p = row_scaled("one large among tiny", 8, 16, 2048, seed=2)
        wrong = accumulation_faults(get("sm100.chain"))[0]
        call = inputs_of(p)
        out = predict_product(p, wrong, out_dtype=torch.bfloat16)
        truth = oracle.reference("cutlass_scaled_mm", call, out_dtype=torch.bfloat16)  # type: ignore[arg-type]
        assert isinstance(truth, Tensor) and 0 < int((truth != out).sum()) < COINCIDENCES
        assert oracle.judge("cutlass_scaled_mm", call, out, arch="sm100").status is Status.PASSED  # type: ignore[arg-type]
        declared = oracle.judge("cutlass_scaled_mm", call, out, arch="sm100", numerics="sm100.chain")  # type: ignore[arg-type]
        assert declared.status is Status.FAILED and declared.explained_by == (wrong.name,)
        wide = predict_product(p, wrong, out_dtype=torch.float32)
        verdict = oracle.judge("cutlass_scaled_mm", call, wide, arch="sm100")  # type: ignore[arg-type]
        assert verdict.status is Status.FAILED and verdict.explained_by == (wrong.name,)

    def test_a_float32_kernel_is_no_fault_of_two_elements(self) -> None:
        """Float32 sums of 16 products have the bits of a fault, and but in two elements those of its schedule; both
        round the product of the scales, so the exact value is another in many."""
        name = "fp8_gemm_nt_1d1d/e4m3xe5m2-f32/1x128:1x128/m=60,n=88,k=16/family=randn/seed=955747572"
        case = cases.parse(name)
        inputs, options = case.inputs(), case.call_options()
        a, b, sa, sb = (decode(inputs[x]) for x in ("a", "b", "a_scale", "b_scale"))
        out = ((a @ b.T).float() * (sa.float() * sb.float().T)).float()
        right = oracle.reference(case.contract, inputs, **options)
        assert isinstance(right, Tensor) and int((right != out).sum()) > COINCIDENCES
        verdict = oracle.judge(case.contract, inputs, out, arch="sm120", **options)
        assert verdict.status is Status.PASSED, verdict.summary


class TestClasses:
    """Which classes an undeclared kernel may belong to."""

    def test_one_name_for_each_accumulator(self) -> None:
        blocks = ["sm90.promote128", "sm90.mma_sync.promote128", "sm90.mma_f16.promote128"]
        splits = [f"{name}.split" for name in blocks]
        assert wider_classes(BLOCK_NUMERICS["sm90"]) == ("ieee32.any", *blocks[1:], *splits)
        accumulators = [
            "sm90.chain",
            "sm90.promote128.scale_after",
            "sm90.promote32.scale_after.product",
            "sm90.mma_sync.chain",
            "sm90.mma_f16.chain",
        ]
        splits = [f"{name}.split" for name in accumulators]
        assert wider_classes(ROW_NUMERICS["sm90"]) == ("ieee32.any", *accumulators[1:], *splits)
        # block scales of sm100 enter inside the instruction, whose chain is not split
        assert wider_classes(BLOCK_NUMERICS["sm100"]) == ("ieee32.any", "sm100.promote128", "sm100.promote128.split")
        assert wider_classes(ROW_NUMERICS["sm89"][:3]) == ("ieee32.any", "sm89.chain.split")
        assert wider_classes(BLOCK_NUMERICS["cpu"]) == ()


def _open(p: ScaledProduct) -> Interval:
    edge = torch.full((p.M, p.N), torch.inf, dtype=torch.float64)
    return Interval(-edge, edge, "nothing", True, torch.ones((p.M, p.N), dtype=torch.bool))
