"""The page of a contract: everything that a kernel of it needs stands there, and what is computed for it is right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
import torch

from oracle.cli.page import _axis, page, recipe_lines
from oracle.numbers import mx_recipes, recipes
from oracle.routines import get, registered
from oracle.routines.options import word
from oracle.truth import layout


class TestPage:
    """A page has every input, option and output, the rules of the family, and the recipes that are admitted."""

    @pytest.mark.sampled(12)
    @pytest.mark.parametrize("name", sorted(registered()))
    def test_names_everything_that_a_call_takes_and_gives(self, name: str) -> None:
        contract, lines = get(name), list(page(get(name), "quick"))
        for what, names in (
            ("input", [spec.name for spec in contract.inputs]),
            ("option", [option.name for option in contract.options]),
        ):
            assert all(any(line.startswith(f"  {what} {one}") for line in lines) for one in names), what
        assert all(any(line.startswith(f"  output {one} ") for line in lines) for one in contract.returns)
        assert not any("Subclasses" in line or ":class:" in line or "``" in line for line in lines)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("fp8_gemm_nt", "  output out [M, N], bfloat16|float16|float32"),
            ("nvfp4_quantize", "an infinite one scale 0, code 0x00"),
            ("mxfp8_experts_quant", "floor((M + 127 G) / 128) * 128 rows"),
            ("group_gemm_nvfp4_nt_groupwise", "floor((m_indptr[g] + 127 g) / 128) * 128"),
            ("cutlass_w4a8_mm", "a scale of 1.125 and a weight of 7 give 8"),
            ("fp8_paged_mqa_logits", "n < context_lens[b] - T + 1 + t"),
            (
                "fp8_fp4_mqa_logits",
                "  output out bfloat16|float32; some elements are unspecified: [M, N]; with max_seqlen_k",
            ),
            ("fp8_fp4_mqa_logits", "The window of row m is cu_seqlen_ks[m] <= n < cu_seqlen_ke[m]"),
            ("fp8_gemm_nt", "called as f(**inputs, **options)"),
            ("gemm_fp8_nt_groupwise", "ceil(K/128)"),
            ("moe_fp8", "option recipe=None (of deepgemm_1x128, "),
            ("nvfp4_quantize", "the published scale is e4m3(t), to nearest even, saturated at 448"),
            ("nvfp4_quantize", "a block of zeros: scale 0, code 0x00 or any other, which stands for 0"),
            ("concat_and_cache_ds_mla", "clone the input, call the kernel on the clone"),
            ("indexer_k_quant_and_cache", "Byte i of a page is its element [i // C, i % C]"),
            ("moe_routing", "its largest choice where none is"),
            ("nvfp4_quantize", "writes zeros into that padding"),
            ("fp8_gemm_nt_skip_head_mid", "[M, N / (left + right) * (left + mid + right)]"),
            ("mxfp8_quantize_2d", "linear and compact [M, K/32]"),
            ("fused_experts_block", "RUNNING for 2 to 4 experts"),
            ("trtllm_fp8_block_scale_moe", "one expert, whose weight multiplies the second product"),
            ("trtllm_fp8_per_tensor_scale_moe", "multiplies the first product before the activation"),
            ("transform_sf_into_required_layout", "sm90 gran_mn 128 float32, the same elements, contiguous"),
            ("Fp8LinearOp", "vllm_token: vLLM csrc"),
            ("scaled_fp4_quant", "The padding of the scales may hold anything"),
            ("to_blocked_k_groups", "output out the dtype of scale: flat"),
            ("extend_attention_fwd", "output out the dtype of q: [M, H, V]"),
            ("unified_attention", "output out the dtype of q, bfloat16 for one of 8 bits: [M, H, D]"),
            ("shuffle_matrix_a", (layout.shuffle_matrix_a.__doc__ or "").partition("\n")[0].replace("``", "")),
        ],
    )
    def test_says_what_a_kernel_must_do(self, name: str, said: str) -> None:
        text = "\n".join(page(get(name), "quick"))
        assert said and (said in text or said in " ".join(text.split()))


def explained(text: str, value: object) -> bool:
    """Whether a value of an option stands in the page outside of the list of choices."""
    without = re.sub(r"\(of [^)]*\)", "", text)
    return re.search(rf"(?<![\w]){re.escape(str(word(value)))}(?![\w])", without) is not None


def unknown_letters(lines: Sequence[str]) -> list[str]:
    """The lines that code by a letter that they do not define."""
    codes = [line for line in lines if line.strip().startswith("code = ")]
    return [line for line in codes if re.search(r"\* q\b", line) and "q = " not in line]


@pytest.mark.turns(4)
class TestRules:
    """What a kernel cannot be written without stands on every page."""

    @pytest.mark.sampled(8)
    @pytest.mark.parametrize("name", sorted(registered()))
    def test_every_page_answers(self, name: str) -> None:
        contract, lines = get(name), list(page(get(name), "quick"))
        text = "\n".join(lines)
        for option in contract.options:
            line = next(line for line in lines if line.startswith(f"  option {option.name}="))
            assert len(option.doc) > 5 and f": {option.doc}" in line
            for value in option.choices or ():
                named = isinstance(value, str) and value and not hasattr(torch, value)  # a dtype says what it is
                assert not named or explained(text, value), (option.name, value)
        for output in (line for line in lines if line.startswith("  output ")):
            assert "[" in output or ": " in output or "of the shape of" in output, output
            assert re.search(r"\] for \w+ \[\d", output) is None, output
        assert not unknown_letters(lines)
        recipes_ = sum(re.search(r"\(max .*\) in blocks of ", line) is not None for line in lines)
        for what in ("a block of zeros: ", "+inf beside ones: ", "NaN beside ones: ", "-0 beside ones: "):
            assert sum(line.strip().startswith(what) for line in lines) == recipes_

    def test_a_page_that_does_not_answer_is_refused(self) -> None:
        """The twins: an option value that is listed alone, a letter without a meaning."""
        assert not explained("option layout=128x4 (of 128x4, 8x4): how bytes lie", "8x4")
        assert unknown_letters(["code = float8_e4m3fn of x * q, nearest"])

    def test_sentences_about_what_other_contracts_take_are_left_out(self) -> None:
        masked, packed = ("\n".join(page(get(n), "quick")) for n in ("silu_and_mul_masked_post_quant", "rmsnorm_quant"))
        assert "masked_m[e]" in masked and "masked_m" not in packed

    def test_rules_of_padding_and_of_given_scales_stand_where_they_apply(self) -> None:
        given, own, sized = (
            "\n".join(page(get(n), "quick"))
            for n in ("concat_and_cache_mla", "concat_and_cache_ds_mla", "indexer_k_quant_and_cache")
        )
        assert "vllm_static" in given and "vllm_static" not in own + sized
        assert all("are padding" in text for text in (given, own)) and "are padding" not in sized
        assert "clone the input" not in "\n".join(page(get("fp8_gemm_nt"), "quick"))


class TestRecipes:
    """What a recipe gives for special values is computed by it."""

    def test_nan_of_amax_and_its_code_differ(self) -> None:
        ignored, propagated = ("\n".join(recipe_lines(r)) for r in (recipes.VLLM_GROUP, recipes.TORCH_GROUP))
        assert "NaN left out" in ignored and "NaN if one is" in propagated
        assert "NaN beside ones: scale nan" in propagated and "NaN beside ones: scale nan" not in ignored

    def test_a_field_that_is_not_usual_is_explained(self) -> None:
        lines = "\n".join(recipe_lines(mx_recipes.FLASHINFER_NVFP4_EXACT))
        assert "zero_blocks=True: a block of zeros has the scale 0" in lines


_TILED = "align(M, 128) * align(K/32, 4)"


class TestShapes:
    """A formula is printed when it is the only short one that holds in every call; else there is none."""

    @pytest.mark.parametrize(
        ("known", "extents", "formula"),
        [
            ([{"M": 3, "K": 8}, {"M": 5, "K": 8}], [3, 5], "M"),
            ([{"M": 3, "K": 8}, {"M": 5, "K": 6}, {"M": 5, "K": 2}], [4, 3, 1], "K/2"),
            ([{"M": 3, "K": 64}, {"M": 129, "K": 32}, {"M": 300, "K": 160}], [512, 1024, 3072], _TILED),
            ([{"M": 3, "K": 3}, {"M": 5, "K": 5}], [3, 5], None),
            ([{"M": 3, "K": 8}, {"M": 5, "K": 8}], [7, 7], None),
            ([{"M": 3, "K": 8}, {"M": 5, "K": 8}], [576, 576], "576"),
        ],
    )
    def test_axis(self, known: Sequence[Mapping[str, int]], extents: Sequence[int], formula: str | None) -> None:
        assert _axis(known, extents, {576}) == formula

    def test_a_shape_of_another_dtype_is_no_surprise(self) -> None:
        """The dtypes are those that a judgement takes, not those of the cases."""
        assert "  output out [M, N], bfloat16|float16" in list(page(get("gemm_fp8_nt_groupwise"), "quick"))
        assert torch.float32 not in get("gemm_fp8_nt_groupwise").out_dtypes  # type: ignore[attr-defined]
