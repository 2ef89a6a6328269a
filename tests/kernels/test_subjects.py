"""The routines as subjects of a conformance tool: plain records that run and mutate nothing."""

import dataclasses

import pytest
import torch

from kernels import layout
from kernels.plan import TABLE
from kernels.platform import Machine, use_machine
from kernels.subjects import NUMERICS, Subject, subjects
from kernels.verbs import SERVED

with use_machine(Machine.described("cpu")):
    CPU = subjects()


def find(contract: str, name: str | None = None) -> Subject:
    return next(s for s in CPU if s.contract == contract and name in (None, s.name))


class TestRecords:
    """Names, architectures, declared numerics."""

    def test_plain_and_frozen(self) -> None:
        assert all(dataclasses.is_dataclass(s) and s.why_not() is None and s.device == "cpu" for s in CPU)
        with pytest.raises(dataclasses.FrozenInstanceError):
            CPU[0].name = "other"  # type: ignore[misc]

    def test_every_contract_has_a_cpu_subject(self) -> None:
        assert {s.contract for s in CPU} == set(SERVED)

    def test_sums_declare_float32_and_quantisers_nothing(self) -> None:
        assert find("fp8_gemm_nt").numerics == "ieee32.any"
        assert find("per_token_group_quant_fp8").numerics is None

    def test_the_torch_kernels_are_subjects(self) -> None:
        """Real oneDNN products: per tensor and row-wise."""
        for contract in ("torch_per_tensor_w8a8_scaled_mm", "torch_per_token_w8a8_scaled_mm", "cutlass_scaled_mm"):
            assert find(contract, "torch").numerics == "ieee32.any"

    def test_an_old_torch_lists_what_it_lacks_with_the_reason(self) -> None:
        with use_machine(Machine.described("cpu", torch_version="2.11.0")):
            old = {s.contract: s for s in subjects() if s.name == "torch"}
        assert "torch 2.12" in str(old["torch_per_token_w8a8_scaled_mm"].why_not())
        assert old["torch_per_tensor_w8a8_scaled_mm"].why_not() is None

    def test_a_hopper_lists_its_libraries_with_reasons(self) -> None:
        with use_machine(Machine.described("sm90", packages={"deep_gemm": "2.5"})):
            on_gpu = {(s.contract, s.name): s for s in subjects() if s.device == "cuda"}
        assert on_gpu["fp8_gemm_nt", "deep_gemm"].why_not() is None
        assert on_gpu["fp8_gemm_nt", "deep_gemm"].numerics == "sm90.promote128"
        assert "flashinfer" in str(on_gpu["fp8_blockscale_gemm_sm90", "flashinfer"].why_not())
        assert "CPU" in str(on_gpu["fp8_gemm_nt", "eager"].why_not())

    def test_blackwell_lists_every_library_of_a_product_and_hopper_none_of_them(self) -> None:
        names = {}
        for arch in ("sm90", "sm100", "sm120"):
            with use_machine(Machine.described(arch)):
                here = [s for s in subjects() if s.contract == "mm_fp4" and s.device == "cuda" and s.why_not() is None]
            names[arch] = [s.name for s in here]
        assert names["sm90"] == ["triton_mx"]
        assert set(names["sm100"]) == {"cutlass", "flashinfer_cutlass", "flashinfer_cudnn", "torch", "triton_mx"} | {
            "flashinfer_cute_dsl",
            "deep_gemm",
        }
        assert {"flashinfer_b12x", "cutlass", "flashinfer_cutlass"} <= set(names["sm120"])
        assert "torch" not in names["sm120"] and len(names["sm120"]) == len(set(names["sm120"]))

    def test_declared_numerics_belong_to_the_tables(self) -> None:
        assert all(backend in TABLE[op] for backend, op in NUMERICS)


class TestRuns:
    """A subject takes the contract's names and gives its outputs."""

    def test_block_scaled(self, make) -> None:
        a, sa, b, sb = make.codes(5, 384), make.scales(5, 3), make.codes(192, 384, seed=1), make.scales(2, 3, seed=1)
        expected = make.product(a, sa, b, sb)
        inputs = {"a": a, "a_scale": sa, "b": b, "b_scale": sb}
        for contract in ("fp8_gemm_nt", "cutlass_scaled_mm"):
            y = find(contract, "eager").run(inputs, {"out_dtype": torch.float32})
            assert isinstance(y, torch.Tensor) and make.error(y, expected) < 1e-6
        assert find("fp8_gemm_nt").run(inputs, {"out_dtype": None}).dtype == torch.bfloat16  # type: ignore[union-attr]

    @pytest.mark.parametrize(("n", "k"), [(8, 1024), (300, 128), (192, 384), (100, 100)])
    def test_stored_block_scales_are_recognised(self, make, n: int, k: int) -> None:
        """``b_scale [N/128, K/128]`` as stored, also where its shape could be a scale per channel."""
        kb, nb = -(-k // 128), -(-n // 128)
        a, sa, b, sb = make.codes(4, k), make.scales(4, kb), make.codes(n, k, seed=1), make.scales(nb, kb, seed=1)
        y = find("cutlass_scaled_mm", "eager").run(
            {"a": a, "a_scale": sa, "b": b, "b_scale": sb}, {"out_dtype": torch.float32}
        )
        assert make.error(y, make.product(a, sa, b, sb)) < 1e-6

    def test_quantiser(self) -> None:
        out = find("per_token_group_quant_fp8").run({"x": torch.randn(3, 256)}, {"group_size": 128, "use_ue8m0": True})
        assert isinstance(out, dict) and set(out) == {"q", "scale"}

    def test_grouped_and_logits(self, make) -> None:
        a, b = make.codes(4, 128), make.codes(2, 128, 128, seed=1)
        inputs = {
            "a": a,
            "a_scale": make.scales(4, 1),
            "b": b,
            "b_scale": make.scales(2, 1, 1),
            "m_indices": torch.tensor([0, 1, -1, 1]),
        }
        assert find("m_grouped_fp8_gemm_nt_contiguous").run(inputs, {}).shape == (4, 128)  # type: ignore[union-attr]
        q, k = make.codes(3, 2, 32), make.codes(5, 32)
        inputs = {
            "q": q,
            "k": k,
            "k_scale": make.scales(5),
            "weights": torch.randn(3, 2),
            "cu_seqlen_ks": torch.zeros(3, dtype=torch.int64),
            "cu_seqlen_ke": torch.full((3,), 4),
        }
        assert find("fp8_mqa_logits").run(inputs, {}).shape == (3, 5)  # type: ignore[union-attr]

    @pytest.mark.parametrize("options", [{"out_dtype": torch.float64}, {"out_dtype": "bfloat16"}])
    def test_what_is_not_offered_is_not_implemented(self, make, options: dict[str, object]) -> None:
        inputs = {
            "a": make.codes(4, 128),
            "a_scale": make.scales(4, 1),
            "b": make.codes(128, 128),
            "b_scale": make.scales(1, 1),
        }
        with pytest.raises(NotImplementedError, match="out"):
            find("fp8_gemm_nt").run(inputs, options)
        with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
            find("fp8_gemm_nt").run({**inputs, "a": inputs["a"].to(torch.float8_e5m2)}, {})

    def test_a_subject_is_one_backend(self, make) -> None:
        """The CPU's torch subject does not answer for block scales, which only plain torch serves there."""
        inputs = {
            "a": make.codes(4, 256),
            "a_scale": make.scales(4, 2),
            "b": make.codes(128, 256),
            "b_scale": make.scales(1, 2),
        }
        with pytest.raises(NotImplementedError, match="only torch|CPU"):
            find("cutlass_scaled_mm", "torch").run(inputs, {})

    def test_layout(self) -> None:
        scale = torch.rand(5, 3)
        out = find("get_col_major_tma_aligned_tensor").run({"scale": scale}, {})
        assert torch.equal(out, layout.get_col_major_tma_aligned_tensor(scale))
