"""Scales read beyond their buffer: named by what is known of such an output, and nothing else is named so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from oracle.diagnosis.explain import diagnose
from oracle.numbers.formats import decode
from oracle.routines import cases
from oracle.routines.catalogue import Beyond, Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule

pytestmark = pytest.mark.turns(4)

UNPADDED = "unpadded A scale read with leading dimension align(M, 4)"
ROW_MAJOR = "row-major A scale read as [K/128, align(M, 4)]"
DECLARED = "sm90.promote128"
SAID = "(every failing row is such a sum, with scales from beyond the buffer)"
FEW_ROWS = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=5,n=192,k=640/family=randn/seed=3"
LONG = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=7,n=192,k=2688/family=randn/seed=3"


def mutant(text: str, fault: str, garbage: float, *, seed: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """The output of a kernel with this fault that finds numbers of this size behind the buffer."""
    case = cases.parse(text)
    inputs = case.inputs()
    call = Call(oracle.contracts()[case.contract], inputs, {}, get_schedule(DECLARED), beyond=Beyond.UNKNOWN)
    wrong = get_fault(fault).changes
    read = next(iter(wrong.values()))(call, dict(inputs))["a_scale"]
    found = torch.randn(read.shape, generator=torch.Generator().manual_seed(seed)) * garbage
    scale = torch.where(torch.isnan(read), found, read)
    product = replace(call.parts[0].product, a_scale=scale)
    assert bool(torch.isnan(decode(read)).any(dim=1).all()), "every row reads beyond the buffer"
    return inputs, predict_product(product, DECLARED, out_dtype=torch.bfloat16)


class TestNamed:
    """No bit can be predicted, but every row is a sum of the right terms with the scales that the fault predicts."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("garbage", [0.0, 2.0**-8, 1.0])
    def test_while_the_known_scales_show(self, garbage: float) -> None:
        inputs, out = mutant(FEW_ROWS, UNPADDED, garbage)
        assert diagnose("fp8_gemm_nt", inputs, out).names == (f"{UNPADDED} {SAID}",)
        inputs, out = mutant(FEW_ROWS, ROW_MAJOR, garbage)
        assert diagnose("fp8_gemm_nt", inputs, out, numerics=DECLARED).names == (f"{ROW_MAJOR} {SAID}",)

    @pytest.mark.repeats("TestNamed::test_while_the_known")
    def test_where_garbage_hides_them(self) -> None:
        """Both faults read the same places beyond the buffer; what would tell them apart is rounded away."""
        inputs, out = mutant(LONG, UNPADDED, 2.0**110)
        assert set(diagnose("fp8_gemm_nt", inputs, out).names) == {f"{ROW_MAJOR} {SAID}", f"{UNPADDED} {SAID}"}


class TestNothingElse:
    """Negative tests: other wrong scales, and outputs that are no sums at all."""

    @pytest.mark.parametrize("size", [1.0, 2.0**100])
    def test_scales_wrong_elsewhere(self, size: float) -> None:
        inputs, _ = mutant(LONG, UNPADDED, 1.0)
        call = Call(oracle.contracts()["fp8_gemm_nt"], inputs, {}, get_schedule(DECLARED))
        product = call.parts[0].product
        noise = torch.rand(product.a_scale.shape, generator=torch.Generator().manual_seed(9)) * size
        out = predict_product(replace(product, a_scale=noise), DECLARED, out_dtype=torch.bfloat16)
        assert not any(SAID in name for name in diagnose("fp8_gemm_nt", inputs, out, numerics=DECLARED).names)

    def test_one_row_that_is_no_such_sum(self) -> None:
        inputs, out = mutant(FEW_ROWS, UNPADDED, 1.0)
        out[2] = out[2].roll(1)
        assert not any(SAID in name for name in diagnose("fp8_gemm_nt", inputs, out, numerics=DECLARED).names)

    def test_a_right_output_needs_no_name(self) -> None:
        inputs, _ = mutant(FEW_ROWS, UNPADDED, 1.0)
        call = Call(oracle.contracts()["fp8_gemm_nt"], inputs, {}, get_schedule(DECLARED))
        out = run(call)
        assert isinstance(out, Tensor) and diagnose("fp8_gemm_nt", inputs, out).names == ()
