"""Edge cases: every class of tails and every limit of a store, for any contract, and kernels that are wrong there."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from oracle.routines import cases, data, get, profiles
from oracle.routines.cases import Case
from oracle.routines.edges import RESIDUES, TWICE, domain_of, edge_cases, valid
from oracle.verdict.compare import Status
from tests.support.subjects import limited
from tests.support.subjects.right import gemm

GEMM = "fp8_gemm_nt"


@cache
def edges(contract: str, seed: int = 0) -> list[Case]:
    return edge_cases(contract, seed)


def status(kernel: limited.Gemm, case: Case) -> Status:
    """The verdict on what a kernel of ``fp8_gemm_nt`` makes of a case."""
    inputs, options = case.inputs(), case.call_options()
    return get(GEMM).judge(inputs, kernel(**inputs, **options), arch="cpu", **options).status


class TestTails:
    """Every class of residues, below a block and above it, in whatever steps the contract takes its extents."""

    @pytest.mark.parametrize("seed", [0, 12345])
    def test_classes(self, seed: int) -> None:
        found = edges(GEMM, seed)
        assert {case["k"] % 128 for case in found} >= {*RESIDUES, 72}
        for residue in TWICE:
            assert any(case["k"] == residue for case in found)
            assert any(case["k"] > 128 and case["k"] % 128 == residue for case in found)
        assert any(case["k"] == 200 for case in found)
        assert {1, 127, 64, 8} <= {case["n"] % 128 for case in found} and {1, 127, 33} <= {c["m"] % 128 for c in found}

    def test_drawn(self) -> None:
        """The same for the same seed; other shapes for another."""
        assert edge_cases(GEMM, 0) == edges(GEMM)
        assert not {c.extents for c in edges(GEMM)} >= {c.extents for c in edge_cases(GEMM, 7)}

    @pytest.mark.parametrize(
        ("contract", "domain"),
        [
            (GEMM, ""),
            ("per_token_group_quant_fp8", "k % 128 == 0"),
            ("m_grouped_fp8_gemm_nt_contiguous", "m % 128 == 0"),
            ("shuffle_matrix_a", "m % 32 == 0"),
            ("fp8_mqa_logits", ""),
            ("moe_routing", ""),
        ],
    )
    def test_valid_calls_within_the_contract(self, contract: str, domain: str) -> None:
        assert str(domain_of(contract)) == domain
        found = edges(contract)
        assert len(found) >= 12 and all(valid(case) and cases.parse(str(case)) == case for case in found)
        assert not {str(case) for case in found} & {str(case) for case in profiles.cases(contract, "full")}

    @pytest.mark.parametrize("residue", RESIDUES)
    def test_a_lost_tail_is_seen(self, residue: int) -> None:
        """A kernel that loses the last element of K at this residue alone."""
        wrong = limited.lost_tail(residue)
        assert Status.FAILED in {status(wrong, case) for case in edges(GEMM) if case["k"] % 128 == residue}

    @pytest.mark.parametrize("kernel", ["at_k200", "below_a_block", "small_tile", "n_tail_of_one", "n_tail_of_127"])
    def test_a_rare_shape_is_seen(self, kernel: str) -> None:
        assert any(status(getattr(limited, kernel), case) is Status.FAILED for case in edges(GEMM))


@pytest.mark.turns(4)
class TestLimits:
    """Overflowing and subnormal stores, scales near both ends of float32."""

    LIMITS = [case for case in edges(GEMM) if case.family in data.EDGE_FAMILIES]

    def test_families(self) -> None:
        """Every family on every dtype where it shows something."""
        found = {(case.family, case.dtypes.partition("-")[2]) for case in self.LIMITS}
        assert found == {(name, store) for name, family in data.EDGE_FAMILIES.items() for store in family.stores}

    def test_a_right_kernel_passes(self) -> None:
        assert {status(gemm, case) for case in self.LIMITS} <= {Status.PASSED, Status.MISTRUSTED}

    @pytest.mark.parametrize(
        ("kernel", "families"),
        [
            ("saturates", {("overflow", "bf16"), ("overflow", "f16")}),
            ("saturates_bf16", {("overflow", "bf16")}),
            ("flushes", {("underflow", "bf16"), ("underflow", "f32"), ("underflow16", "f16")}),
            ("dead_experts", {("small", "bf16"), ("small", "f32")}),
        ],
    )
    def test_a_wrong_one_fails(self, kernel: str, families: set[tuple[str, str]]) -> None:
        """Where it is wrong, and nowhere else."""
        failed = [case for case in self.LIMITS if status(getattr(limited, kernel), case) is Status.FAILED]
        assert {(case.family, case.dtypes.partition("-")[2]) for case in failed} >= families

    def test_results_lie_at_the_limit(self) -> None:
        """The store overflows where no float32 does; subnormal results are no zeros."""
        for case in self.LIMITS:
            inputs = case.inputs()
            exact = get(GEMM).reference(inputs)
            assert isinstance(exact, torch.Tensor)
            size = exact.abs()
            info = torch.finfo(case.out_dtype)
            if case.family == "overflow":
                assert bool((size > info.max).any()) and float(size.max()) < torch.finfo(torch.float32).max
            if case.family.startswith("underflow"):
                assert float(((size < info.tiny) & (size > info.tiny * info.eps)).double().mean()) > 0.5

    @pytest.mark.parametrize("contract", ["cutlass_scaled_mm", "scaled_grouped_mm", "fp8_mqa_logits"])
    def test_the_truth_passes_elsewhere(self, contract: str) -> None:
        for case in edges(contract):
            if case.family in data.EDGE_FAMILIES:
                inputs, options = case.inputs(), case.call_options()
                truth = get(contract).reference(inputs, **options)
                assert isinstance(truth, torch.Tensor)
                made = truth.float() if truth.dtype == torch.float64 else truth
                assert not get(contract).judge(inputs, made, arch="cpu", **options).status.is_failure, str(case)
