"""Decisions about machines as tables, and the routines that choose a kernel by the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oracle import judge, reference
from oracle.errors import InputError
from oracle.routines import cases, get
from oracle.truth import decisions
from oracle.verdict.compare import Status


def table(**columns: int) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([value]) for name, value in columns.items()}


def test_products_have_numbers() -> None:
    """0 is no GPU, whatever a driver reports; the last product is the last."""
    last = len(decisions.GPUS)
    assert decisions.multiprocessors(0, 132) == 0 and decisions.multiprocessors(last, 7) == 7
    for product in (-1, last + 1):
        with pytest.raises(InputError, match=f"product={product}; products are numbered 1..{last}"):
            decisions.multiprocessors(product, 7)


class TestRules:
    """The published rules, one line each; limits on both sides."""

    @pytest.mark.parametrize(
        ("routine", "columns", "answer"),
        [
            ("cutlass_fp8_supported", {"arch": 89, "cuda_major": 12, "cuda_minor": 4}, 1),
            ("cutlass_fp8_supported", {"arch": 89, "cuda_major": 12, "cuda_minor": 3}, 0),
            ("cutlass_fp8_supported", {"arch": 89, "cuda_major": 12, "cuda_minor": 10}, 1),
            ("cutlass_fp8_supported", {"arch": 90, "cuda_major": 11, "cuda_minor": 8}, 0),
            ("cutlass_fp8_supported", {"arch": 0, "cuda_major": 13, "cuda_minor": 0}, 0),
            ("cutlass_block_fp8_supported", {"arch": 89, "cuda_major": 13, "cuda_minor": 0}, 0),
            ("cutlass_block_fp8_supported", {"arch": 100, "cuda_major": 12, "cuda_minor": 7}, 0),
            ("cutlass_group_gemm_supported", {"arch": 90, "cuda_major": 12, "cuda_minor": 3}, 1),
            ("cutlass_group_gemm_supported", {"arch": 90, "cuda_major": 12, "cuda_minor": 2}, 0),
            ("sparse_cutlass_supported", {"arch": 100, "cuda_major": 13, "cuda_minor": 0}, 0),
            ("sparse_cutlass_supported", {"arch": 90, "cuda_major": 12, "cuda_minor": 2}, 1),
            (
                "use_rowwise_torch_scaled_mm",
                {"rocm": 1, "capability_major": 9, "capability_minor": 4, "torch_major": 2, "torch_minor": 10},
                1,
            ),
            (
                "use_rowwise_torch_scaled_mm",
                {"rocm": 1, "capability_major": 9, "capability_minor": 0, "torch_major": 2, "torch_minor": 10},
                0,
            ),
            ("get_flashinfer_moe_backend", {"arch": 90, "choice": 0}, 1),
            ("get_flashinfer_moe_backend", {"arch": 100, "choice": 0}, 0),
            ("get_flashinfer_moe_backend", {"arch": 103, "choice": 2}, 2),
            ("get_flashinfer_moe_backend", {"arch": 90, "choice": 2}, 1),
            ("get_flashinfer_moe_backend", {"arch": 120, "choice": 3}, 3),
            (
                "is_deep_gemm_supported",
                {"arch": 90, "package": 1, "use_deep_gemm": 1, "use_flashinfer_moe_fp8": 0},
                1,
            ),
            ("is_flashinfer_supporting_global_sf", {"backend": 0}, 0),
            ("get_num_sms", {"product": 5, "reported": -1}, 132),
            ("get_num_sms", {"product": 6, "reported": -1}, 114),
            ("get_num_sms", {"product": 1, "reported": -1}, 108),
            ("get_num_sms", {"product": 8, "reported": -1}, 148),
            ("get_num_sms", {"product": 5, "reported": 16}, 16),
            ("get_num_sms", {"product": 5, "reported": 0}, 0),
            ("get_num_sms", {"product": 0, "reported": -1}, 0),
            ("get_num_sms", {"product": 0, "reported": 132}, 0),
        ],
    )
    def test_answer(self, routine: str, columns: dict[str, int], answer: int) -> None:
        found = reference(routine, table(**columns))
        assert isinstance(found, torch.Tensor)
        assert found.tolist() == [answer]

    def test_deep_gemm(self) -> None:
        on = {"package": 1, "use_deep_gemm": 1, "use_flashinfer_moe_fp8": 0}
        for arch, answer in ((90, 1), (100, 1), (89, 0), (103, 0), (0, 0)):
            assert reference("is_deep_gemm_supported", table(arch=arch, **on)).tolist() == [answer]  # type: ignore[union-attr]
        for switch in on:
            flipped = {**on, switch: 1 - on[switch]}
            assert reference("is_deep_gemm_supported", table(arch=90, **flipped)).tolist() == [0]  # type: ignore[union-attr]

    def test_ue8m0_has_a_switch_for_each_architecture(self) -> None:
        on = {"package": 1, "use_deep_gemm": 1, "use_flashinfer_moe_fp8": 0}
        for arch, blackwell, hopper, answer in ((100, 1, 0, 1), (100, 0, 1, 0), (90, 0, 1, 1), (90, 1, 0, 0)):
            switches = {"use_deep_gemm_e8m0": blackwell, "use_deep_gemm_e8m0_hopper": hopper}
            found = reference("is_deep_gemm_e8m0_used", table(arch=arch, **on, **switches))
            assert found.tolist() == [answer]  # type: ignore[union-attr]


class TestRecords:
    """One output for each field; a refusal is an answer."""

    CONFIG = {"in_dtype": 1, "dp_size": 4, "ep_rank": 2, "ep_size": 3, "tp_rank": 5, "tp_size": 8}

    def select(self, **columns: int) -> dict[str, list[int]]:
        given = {"config": 1, **self.CONFIG, "out_dtype": 0, "quant_config": 7, "use_deepseek_fp8_block_scale": 1}
        found = reference("select_cutlass_fp8_gemm_impl", table(**(given | columns)))
        assert isinstance(found, dict)
        return {name: column.tolist() for name, column in found.items()}

    def test_of_a_configuration(self) -> None:
        """Its input dtype, whatever the caller names; its ranks, each in its place."""
        wanted = {
            "accepted": 1,
            "out_dtype": 1,
            "quant_config": 7,
            "ep_rank": 2,
            "ep_size": 3,
            "tp_rank": 5,
            "tp_size": 8,
            "use_deepseek_fp8_block_scale": 1,
        }
        for named in (0, 2, 3):
            assert self.select(out_dtype=named) == {name: [value] for name, value in wanted.items()}

    def test_alone(self) -> None:
        """Rank 0 of 1, the caller's dtype; without one there is no record."""
        found = self.select(config=0, out_dtype=2)
        fields = ("out_dtype", "ep_rank", "ep_size", "tp_rank", "tp_size")
        assert [found[name] for name in fields] == [[2], [0], [1], [0], [1]]
        refused = self.select(config=0)
        assert refused.pop("accepted") == [0] and set(map(tuple, refused.values())) == {(-1,)}

    def test_prepare_finalize(self) -> None:
        name = "build_flashinfer_fp8_cutlass_moe_prepare_finalize"
        for config, dp_size, use_dp in ((1, 2, 1), (1, 1, 0), (0, 2, 0)):
            columns = {"config": config, "dp_size": dp_size, "ep_size": 4, "tp_size": 8}
            found = reference(name, table(**columns, use_deepseek_fp8_block_scale=1))
            assert isinstance(found, dict)
            assert (found["use_dp"].tolist(), found["use_deepseek_fp8_block_scale"].tolist()) == ([use_dp], [1])

    def test_numbers_that_mean_nothing_are_named(self) -> None:
        for column, value in (("in_dtype", 0), ("in_dtype", 4), ("out_dtype", -1)):
            with pytest.raises(InputError, match=f"{column}={value}"):
                self.select(**{column: value})
        with pytest.raises(InputError, match="product=99"):
            reference("get_num_sms", table(product=99, reported=-1))


def _as_text(major: torch.Tensor, minor: torch.Tensor, least: str) -> torch.Tensor:
    """The published mistake: versions compared as strings, so that 2.10 is below 2.7."""
    rows = zip(major.tolist(), minor.tolist(), strict=True)
    return torch.tensor([int(f"{a}.{b}" >= least) for a, b in rows])


class TestWrongDecisions:
    """Negative tests: each of these is a mistake that somebody made or could make."""

    @pytest.mark.parametrize(
        ("case", "wrong"),
        [
            (
                "use_rowwise_torch_scaled_mm/i64/-/r=500/family=integers/seed=1",
                lambda i: (
                    _as_text(i["torch_major"], i["torch_minor"], "2.7")
                    * i["rocm"]
                    * (10 * i["capability_major"] + i["capability_minor"] >= 94)
                ),
            ),
            (
                "cutlass_fp8_supported/i64/-/r=500/family=integers/seed=1",
                lambda i: (i["arch"] >= 89).long() * (i["cuda_major"] >= 12),
            ),
            (
                "sparse_cutlass_supported/i64/-/r=500/family=integers/seed=1",
                lambda i: (i["arch"] >= 90).long() * (100 * i["cuda_major"] + i["cuda_minor"] >= 1202),
            ),
            ("get_flashinfer_moe_backend/i64/-/r=500/family=integers/seed=1", lambda i: i["choice"].clamp(min=1)),
            ("get_num_sms/i64/-/r=500/family=integers/seed=1", lambda i: torch.full_like(i["product"], 132)),
            ("get_num_sms/i64/-/r=500/family=integers/seed=1", lambda i: i["reported"].clamp(min=0)),
        ],
    )
    def test_found(self, case: str, wrong: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> None:
        parsed = cases.parse(case)
        inputs = parsed.inputs()
        right = reference(parsed.contract, inputs)
        assert judge(parsed.contract, inputs, right, arch="cpu").status is Status.PASSED
        assert judge(parsed.contract, inputs, wrong(inputs).to(torch.int64), arch="cpu").status is Status.FAILED


@pytest.mark.turns(4)
class TestWideInput:
    """A bfloat16 input: any admissible quantisation passes, another scale or row does not."""

    NAME = "dynamic_flashinfer_deepgemm_blockscale_gemm"

    @pytest.mark.parametrize("m", [5, 33])
    def test_truth_and_twins(self, m: int) -> None:
        case = cases.parse(f"{self.NAME}/bf16xe4m3-bf16/1x128:128x128/m={m},n=128,k=256/family=randn/seed=3")
        inputs, call = case.inputs(), case.call_options()
        right = reference(self.NAME, inputs, **call)
        assert isinstance(right, torch.Tensor)
        assert judge(self.NAME, inputs, right, arch="cpu", **call).status is Status.PASSED
        group = reference("per_token_group_quant_fp8", {"x": inputs["input"]})
        assert isinstance(group, dict)
        operands = {"a": group["q"], "a_scale": group["scale"]}
        operands |= {"b": inputs["weight"], "b_scale": inputs["weight_scale"]}
        other = reference("fp8_gemm_nt", operands, out_dtype=torch.bfloat16)
        assert isinstance(other, torch.Tensor)
        assert judge(self.NAME, inputs, other, arch="cpu", **call).status is Status.PASSED
        for wrong in (right.roll(1, dims=0), other.roll(1, dims=1), (right.float() * 1.25).to(torch.bfloat16)):
            assert judge(self.NAME, inputs, wrong, arch="cpu", **call).status is Status.FAILED

    def test_it_takes_no_scale_of_the_input(self) -> None:
        assert [spec.name for spec in get(self.NAME).inputs] == ["input", "weight", "weight_scale"]
