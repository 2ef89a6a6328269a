"""Diagnosis of kernels whose arithmetic is nobody's schedule or recipe: right ones, and wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle.diagnosis.candidates import FailingOutput
from oracle.diagnosis.explain import diagnose
from oracle.routines import cases, get
from oracle.routines.catalogue import Call, Stage, run
from oracle.routines.catalogue import get as get_fault
from oracle.routines.mx.contract import BlockQuantiser
from oracle.routines.quantisers.contract import QuantiserContract
from oracle.tensorcore.schedules import get as get_schedule
from tests.support.mutants import GEMM, ROW_MAJOR, mutant

pytestmark = pytest.mark.turns(4)


def terms(call: Call) -> list[torch.Tensor]:
    """The terms of the K blocks in float64, of a kernel that is nobody's schedule."""
    a, b, sa, sb = (call.inputs[name].double() for name in ("a", "b", "a_scale", "b_scale"))
    each = sb.repeat_interleave(128, dim=0)
    cut = [slice(128 * k, 128 * k + 128) for k in range(sa.shape[1])]
    return [a[:, at] @ b[:, at].T * sa[:, k, None] * each[:, k] for k, at in enumerate(cut)]


def once(blocks: list[torch.Tensor]) -> torch.Tensor:
    """The sum rounded once to float32 and once to bfloat16."""
    return torch.stack(blocks).sum(dim=0).float().bfloat16()


class TestAKernelThatIsNoSchedule:
    """Float64 sums rounded once: right, but the bits of few schedules."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("arch", ["cpu", "sm90"])
    def test_right_is_not_accused(self, arch: str) -> None:
        """Nothing fails; with one element doubled one element does, and no fault has it."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        output = once(terms(call))
        found = diagnose("fp8_gemm_nt", call.inputs, output, arch=arch)
        assert (found.failing, found.names) == (0, ())
        output[3, 5] *= 2
        found = diagnose("fp8_gemm_nt", call.inputs, output, arch=arch)
        assert (found.failing, found.names) == (1, ())

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("arch", ["sm90", "cpu"])
    def test_a_store_that_truncates(self, arch: str) -> None:
        """One bfloat16 step in some elements, named by interval on cpu; rounded to nearest nothing is."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        total = torch.stack(terms(call)).sum(dim=0).float()
        output = (total.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
        found = diagnose("fp8_gemm_nt", call.inputs, output, arch=arch)
        assert found.failing > 1000 and found.names == ("store truncates",)
        assert diagnose("fp8_gemm_nt", call.inputs, total.bfloat16(), arch=arch).names == ()

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("columns", [(128, 256), (0, 64)])
    def test_a_block_lost_in_some_columns(self, columns: tuple[int, int]) -> None:
        """K block 2 is found in just these; where only one element lost it, nothing is said of blocks; and what holds
        wrong numbers is not called unwritten."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        blocks, one = terms(call), terms(call)
        blocks[2][:, slice(*columns)] = 0
        one[2][20, 200] = 0
        found = diagnose("fp8_gemm_nt", call.inputs, once(blocks), arch="cpu")
        assert found.first_block == 2
        assert found.names == (f"K block 2 lost (columns {columns[0]}..{columns[1] - 1})",)
        assert f"blocks 2 of rows 0..39 and failing columns {columns[0]} to {columns[1] - 1} enter" in found.findings[0]
        assert diagnose("fp8_gemm_nt", call.inputs, once(one), arch="cpu").first_block is None

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("arch", ["cpu", "sm90"])
    def test_a_fault_in_a_few_rows(self, arch: str) -> None:
        """Row 17 by the scale of row 16: the fault is named for what fails; with a scale of nobody it is not."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        for row, names in ((16, 1), (29, 0)):
            scale = call.inputs["a_scale"].clone()
            scale[17] = scale[row]
            output = once(terms(Call(call.contract, {**call.inputs, "a_scale": scale})))
            found = diagnose("fp8_gemm_nt", call.inputs, output, arch=arch).names
            assert sum(name.startswith("A scale of the previous row (in the failing") for name in found) == names
            assert names or found == ()

    @pytest.mark.repeats("TestAKernel")
    def test_a_row_of_zeros_has_no_explanation(self) -> None:
        """Faults that make a scale zero predict it, as they would any constant; a row of numbers is another matter."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        output = once(terms(call))
        output[1] = 0
        found = diagnose("fp8_gemm_nt", call.inputs, output, arch="cpu")
        assert found.failing > 200 and not any(e.local for e in found.explanations)
        output[1] = once(terms(call))[0]
        assert any("row 0" in f for f in diagnose("fp8_gemm_nt", call.inputs, output, arch="cpu").findings)

    def test_unwritten_by_place_only_without_information(self) -> None:
        """A tile of one value may be unwritten; the same tile with a part of the sum was written."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        blocks = terms(call)
        output = once(blocks)
        output[:, 128:] = 3.0
        tile = "one output tile unwritten"
        assert any(name.startswith(tile) for name in diagnose("fp8_gemm_nt", call.inputs, output, arch="cpu").names)
        blocks[1][:, 128:] *= -1
        found = diagnose("fp8_gemm_nt", call.inputs, once(blocks), arch="cpu")
        assert found.failing > 4000 and not any(name.startswith(tile) for name in found.names)

    def test_what_was_computed_is_not_called_unwritten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tile whose columns have scales of their own, far from the right ones. The negative test does not ask
        whether it is a sum of the K blocks."""
        call, _ = mutant(GEMM, ROW_MAJOR)
        blocks, tile = terms(call), "one output tile unwritten"
        columns = blocks[0].shape[1] - 128
        powers = torch.randint(-8, 9, (len(blocks), columns), generator=torch.Generator().manual_seed(2))
        signs = 1 - 2 * (torch.arange(columns) % 2)
        for block, power in zip(blocks, powers, strict=True):
            block[:, 128:] *= signs * 2.0**power
        found = diagnose("fp8_gemm_nt", call.inputs, once(blocks), arch="cpu")
        assert found.failing > 1000 and not any(name.startswith(tile) for name in found.names)
        monkeypatch.setattr(FailingOutput, "computed", False)
        found = diagnose("fp8_gemm_nt", call.inputs, once(blocks), arch="cpu")
        assert any(name.startswith(tile) for name in found.names)

    @pytest.mark.repeats("TestAKernel")
    def test_another_experts_weights(self) -> None:
        """The last expert by the codes of the first: said, and its rows are not called unwritten; by its own, nothing
        is."""
        text = "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=512,n=192,k=256,g=3/family=randn/seed=2"
        case = cases.parse(text)
        call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule("sm90.promote128"))
        b = call.inputs["b"].view(torch.uint8).clone()
        b[2] = b[0]
        wrong = {**call.inputs, "b": b.view(torch.float8_e4m3fn)}
        output = run(Call(call.contract, wrong, call.options, call.schedule))
        found = diagnose(case.contract, call.inputs, output)
        assert any("expert 2 follows a product with the weight codes of expert 0" in f for f in found.findings)
        assert not any("unwritten" in name for name in found.names)
        assert diagnose(case.contract, call.inputs, run(call)).findings == ()


GROUPS = "per_token_group_quant_fp8/bf16-e4m3/1x128/m=130,k=384/family=randn/seed=1"


class TestQuantisersOfOthers:
    """A quantiser that divides otherwise than the reference: codes beside a tie differ, and contradict nothing."""

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            (GROUPS.replace("k=384", "k=384/ue8m0=1"), "UE8M0 scale of amax/448 rounded down"),
            (GROUPS.replace("randn", "ties"), "-0 coded as +0"),
            (GROUPS.replace("randn", "special"), "quotients below the smallest normal flushed to zero before the cast"),
            (GROUPS, "amax scan leaves out the last column of the group"),
            (GROUPS, "published scale of the previous K group"),
        ],
    )
    def test_named(self, text: str, fault: str) -> None:
        """By another admitted recipe, as the output of a fault; without the fault nothing fails."""
        case = cases.parse(text)
        call = Call(get(case.contract), case.inputs(), case.call_options())
        assert isinstance(call.contract, QuantiserContract)
        other = call.contract.declared(call.inputs, call.resolved)[-1]
        base = replace(get_fault(fault), name="base", changes={Stage.RECIPE: lambda call, recipe: other})
        assert fault in diagnose(case.contract, call.inputs, run(call, base, get_fault(fault)), **call.options).names
        assert diagnose(case.contract, call.inputs, run(call, base), **call.options).names == ()


class TestLayersOfOthers:
    """A layer of experts whose sums are rounded otherwise: a fault is named where most of what fails has its bits and
    the rest lies as near as right results do."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("by", [1, 40])
    def test_a_step_beside_the_fault(self, by: int) -> None:
        """Every fifth element ``by`` units in the last place away."""
        case = cases.parse("deep_gemm_moe/bf16xe4m3-bf16/1x128:128x128/t=4,e=3,h=128,i=128,k=2/family=randn/seed=1")
        call = Call(get(case.contract), case.inputs(), case.call_options())
        fault = "experts: weights of the next slot"
        output = run(call, get_fault(fault))
        assert isinstance(output, torch.Tensor)
        output.view(torch.int16).flatten()[::5] += by
        found = diagnose(case.contract, call.inputs, output, **call.options).names
        assert (fault in found) == (by == 1)


class TestPlaces:
    """What is said of whole outputs: by rows and columns, and of what is copied."""

    def test_scales_are_seen_as_a_matrix(self) -> None:
        """Rows from 64 on have the scale of the row before, in memory that lies in tiles."""
        case = cases.parse("mxint8_quantize/bf16/1x32/m=127,k=32/family=randn/seed=11")
        call = Call(get(case.contract), case.inputs(), case.call_options())
        assert isinstance(call.contract, BlockQuantiser)
        output = {name: x.clone() for name, x in call.contract.expected(call).items()}
        scale = call.contract.scales_of(output["scale"], call)
        scale[64:] = scale[63:-1].clone()
        output["scale"] = call.contract.memory(scale, call).view(output["scale"].dtype)
        said = diagnose(case.contract, call.inputs, output, **call.options).observed
        assert "scale: from index 64 on taken from the index before along axis 0" in said

    def test_memory_that_is_not_written(self) -> None:
        """Columns of a cache that hold what it held, in pages in any order; with one other element it is not said."""
        case = cases.parse("concat_and_cache_mla/bf16-e4m3/tensor/t=11,r=128,e=64,p=16/family=randn/seed=12")
        call = Call(get(case.contract), case.inputs(), case.call_options())
        output = call.contract.expected(call)["kv_cache"].clone()
        output[..., 128:] = call.inputs["kv_cache"][..., 128:]
        said = "the failing elements are not written: they hold what kv_cache held"
        shown = diagnose(case.contract, call.inputs, {"kv_cache": output}, **call.options).observed
        assert said in shown and "columns from 128 on" in shown and not any("axis 0" in one for one in shown)
        output.view(torch.uint8)[..., 3] ^= 4
        assert said not in diagnose(case.contract, call.inputs, {"kv_cache": output}, **call.options).observed

    def test_rows_that_are_copied(self) -> None:
        """The last row is that of the input; with one other element it is not said."""
        case = cases.parse("hadamard_transform/bf16/1x16/m=17,k=192/family=randn/seed=12")
        call = Call(get(case.contract), case.inputs(), case.call_options())
        output = call.contract.expected(call)["out"].clone()
        output[16] = call.inputs["x"][16]
        said = "every failing element is that of x, as it is"
        assert said in diagnose(case.contract, call.inputs, output, **call.options).observed
        output[3, 5] += 100
        assert said not in diagnose(case.contract, call.inputs, output, **call.options).observed
