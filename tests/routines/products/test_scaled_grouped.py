"""The grouped product with scales per token and channel: runs of any length, every accumulator, what a failure says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oracle.diagnosis import explain, mutation
from oracle.diagnosis.minimise import minimise
from oracle.errors import InputError
from oracle.routines import cases, get
from oracle.routines.catalogue import Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct
from oracle.verdict.compare import Status, Verdict

SCALED = "scaled_grouped_mm"
Inputs = dict[str, Tensor]


def make(text: str = "m=40,n=48,k=128,g=4/family=randn/seed=1") -> Inputs:
    return cases.parse(f"{SCALED}/e4m3xe4m3-bf16/token:channel/{text}").inputs()


def judge(inputs: Inputs, out: Tensor, *, arch: str = "sm90", numerics: str | None = None) -> Verdict:
    return get(SCALED).judge(inputs, out, arch=arch, numerics=numerics)


def kernel(inputs: Inputs, numerics: str = "sm90.chain.row_then_col") -> Tensor:
    """Run by run, by the definition of one group; rows of nobody are NaN."""
    a, b = inputs["a"], inputs["b"]
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=torch.bfloat16)
    start = 0
    for g, end in enumerate(inputs["offsets"].tolist()):
        if end > start:
            scales = inputs["scale_a"][start:end].contiguous(), inputs["scale_b"][g][:, None].contiguous()
            product = ScaledProduct(a[start:end], b[g], *scales, block=a.shape[1], b_rows=1)
            out[start:end] = predict_product(product, numerics, out_dtype=torch.bfloat16)
        start = end
    return out


class TestProduct:
    """torch's and vLLM's kernels, by every arithmetic of theirs."""

    @pytest.mark.parametrize(
        "numerics", ["sm90.chain.row_then_col", "sm90.chain", "sm90.promote128.scale_after.row_then_col"]
    )
    def test_bits_of_a_schedule(self, numerics: str) -> None:
        inputs = make()
        verdict = judge(inputs, kernel(inputs, numerics))
        assert verdict.status is Status.PASSED and verdict.matches is not None, verdict.summary
        assert judge(inputs, kernel(inputs, numerics), numerics=numerics).matches == numerics

    def test_what_is_seen_on_hardware_comes_first(self) -> None:
        """torch._scaled_grouped_mm: one chain over K, the scale of the row before that of the column."""
        inputs = make()
        made = get(SCALED).predict(inputs, numerics=None)
        assert isinstance(made, Tensor)
        end = int(inputs["offsets"][-1])
        assert torch.equal(made[:end], kernel(inputs)[:end])

    def test_float32_in_any_order(self) -> None:
        inputs = make()
        wide, start = torch.zeros(40, 48), 0
        for g, end in enumerate(inputs["offsets"].tolist()):
            acc = inputs["a"][start:end].float().flip(1) @ inputs["b"][g].float().flip(1).T
            wide[start:end] = acc * inputs["scale_a"][start:end] * inputs["scale_b"][g]
            start = end
        assert judge(inputs, wide.bfloat16(), arch="cpu").status is Status.PASSED
        assert judge(inputs, (wide * 1.01).bfloat16(), arch="cpu").status is Status.FAILED

    @given(st.lists(st.integers(0, 12), min_size=4, max_size=4), st.integers(0, 10**6))
    def test_any_runs(self, lengths: list[int], seed: int) -> None:
        """Empty, of one row, unaligned; every row has the result of its expert alone."""
        inputs = make(f"m=48,n=16,k=32,g=4/family=codes/seed={seed}")
        inputs["offsets"] = torch.tensor(lengths).cumsum(0).int()
        if not sum(lengths):
            with pytest.raises(InputError, match="no row is real"):
                judge(inputs, torch.zeros(48, 16, dtype=torch.bfloat16))
            return
        assert not judge(inputs, kernel(inputs)).status.is_failure

    def test_a_row_of_the_next_run_is_noticed(self) -> None:
        inputs = make()
        later = {**inputs, "offsets": torch.minimum(inputs["offsets"] + 1, inputs["offsets"][-1]).int()}
        assert judge(inputs, kernel(later)).status is Status.FAILED

    def test_rows_of_nobody(self) -> None:
        """Whatever they hold, in and out, a real row does not depend on it and nothing is asked of it."""
        inputs = mutation.poisoned(Call(get(SCALED), make()))
        assert bool(torch.isnan(inputs["scale_a"][35:]).all()) and not bool(torch.isnan(inputs["scale_a"][:35]).any())
        out = kernel(inputs)
        assert bool(torch.isnan(out[35:]).all())
        assert judge(inputs, out).status is Status.PASSED

    @pytest.mark.parametrize("ends", [[3, 2, 8, 9], [0, 4, 9, 41], [-1, 4, 8, 9]])
    def test_bad_ends_are_named(self, ends: list[int]) -> None:
        inputs = make()
        with pytest.raises(InputError, match="never back"):
            judge({**inputs, "offsets": torch.tensor(ends)}, kernel(inputs))


@pytest.mark.turns(4)
class TestFailure:
    """A failure names the experts, the fault, and the smallest call that still fails."""

    def call(self, fault: str) -> tuple[Inputs, Tensor]:
        inputs = make("m=64,n=48,k=256,g=4/family=randn/seed=3")
        call = Call(get(SCALED), inputs, {}, get_schedule("sm90.chain.row_then_col"))
        out = run(call, get_fault(fault))
        assert isinstance(out, Tensor)
        return inputs, out

    def test_experts(self) -> None:
        inputs = make()
        out = kernel(inputs)
        start, end = inputs["offsets"][1:3].tolist()
        out[start:end] *= 1.5
        found = explain.diagnose(SCALED, inputs, out, arch="sm90", numerics="sm90.chain.row_then_col")
        assert "experts 2 only, of 3 in use" in found.findings

    @pytest.mark.parametrize(
        "fault",
        [
            "groups end one row late",
            "weights of the next group of a run",
            "B scale of the next group",
            "A scale of the previous row",
        ],
    )
    def test_explained(self, fault: str) -> None:
        inputs, out = self.call(fault)
        found = explain.diagnose(SCALED, inputs, out, arch="sm90")
        assert fault in found.names and found.explanations[0].complete

    def test_minimised(self) -> None:
        inputs, out = self.call("A scale of the first row throughout")
        assert judge(inputs, out).status is Status.FAILED

        def fails(given: Inputs) -> bool:
            call = Call(get(SCALED), given, {}, get_schedule("sm90.chain.row_then_col"))
            wrong = run(call, get_fault("A scale of the first row throughout"))
            assert isinstance(wrong, Tensor)
            return judge(given, wrong).status is Status.FAILED

        smallest = minimise(get(SCALED), inputs, fails)
        m, k = smallest.inputs["a"].shape
        assert (m, k) <= (4, 32) and smallest.inputs["scale_b"].shape == (4, smallest.inputs["b"].shape[1])
