"""Routers of libraries: kernels in float32 and in their own dtypes pass; what their threads report fails."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oracle
from oracle.errors import InputError, OptionError
from oracle.routines import get
from oracle.routines.moe.routers import ROWS
from oracle.truth import routing
from oracle.verdict.compare import Status, Verdict

NAMES = [row.name for row in ROWS]
UNGROUPED = ["topk_softmax", "topk_sigmoid", "topk_softplus_sqrt"]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def judge(name: str, inputs: dict[str, Tensor], weights: Tensor, ids: Tensor, **options: object) -> Verdict:
    return get(name).judge(inputs, {"topk_weights": weights, "topk_ids": ids}, arch="cpu", **options)


def score_of(name: str, x: Tensor) -> Tensor:
    """The score in float32, without the replacement of NaN."""
    if name == "topk_softmax":
        return x.float().softmax(dim=1)
    if name == "topk_softplus_sqrt":
        return torch.where(x.float() > 20, x.float(), torch.log1p(x.float().exp())).sqrt()
    if name == "topk_sigmoid":
        return x.float().sigmoid()
    return 0.5 * torch.tanh(0.5 * x.float()) + 0.5


def renormalised(s: Tensor, ids: Tensor, factor: float, epsilon: float = 0.0) -> Tensor:
    w = s.gather(1, ids)
    total = w.sum(dim=1, keepdim=True) + epsilon
    return w * (factor / torch.where(total > 0, total, 1.0))


class TestUngrouped:
    """vLLM's and sglang-kernel's: choice by score and bias, weights divided by their sum where it is not 0."""

    @pytest.mark.parametrize("name", UNGROUPED)
    @pytest.mark.parametrize(("experts", "k", "dtype"), [(512, 22, torch.bfloat16), (160, 8, torch.float32)])
    @pytest.mark.whole("a few rows")
    def test_a_kernel_in_float32(self, name: str, experts: int, k: int, dtype: torch.dtype) -> None:
        x, bias = (normal(9, experts) * 6).to(dtype), normal(experts, seed=2) - 3.0
        s = score_of(name, x)
        ids = (s + bias).topk(k, dim=1)[1]
        inputs, options = {"logits": x, "bias": bias}, {"top_k": k, "renormalize": True, "routed_scaling_factor": 2.5}
        weights = renormalised(s, ids, 2.5)
        assert judge(name, inputs, weights, ids, **options).status is Status.PASSED
        assert judge(name, inputs, weights, ids.int().flip(1), **options).status is Status.FAILED
        assert judge(name, inputs, weights * 1.001, ids, **options).status is Status.FAILED
        unbiased = s.topk(k, dim=1)[1]
        assert judge(name, inputs, renormalised(s, unbiased, 2.5), unbiased, **options).status is Status.FAILED

    @pytest.mark.parametrize("name", UNGROUPED)
    def test_nan_is_zero(self, name: str) -> None:
        """A NaN logit is chosen last, a row of them weighs nothing; kept, it is chosen first."""
        x = normal(2, 8)
        x[0, 3], x[1] = math.nan, math.nan
        s = score_of(name, x).nan_to_num(nan=0.0)
        if name == "topk_softmax":
            s[0] = 0.0  # a softmax with a NaN is NaN
        ids = torch.stack([s[0].topk(2)[1], torch.tensor([6, 1])])
        weights, options = renormalised(s, ids, 1.0), {"top_k": 2, "renormalize": True}
        assert judge(name, {"logits": x}, weights, ids, **options).status is Status.PASSED
        kept = torch.tensor([[3, 0], [0, 1]])
        bad = renormalised(score_of(name, x), kept, 1.0)
        assert judge(name, {"logits": x}, bad, kept, **options).status is Status.FAILED

    @pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid"])
    def test_infinite_rows(self, name: str) -> None:
        x = torch.full((1, 8), -math.inf)
        ids, zero = torch.tensor([[0, 1]]), torch.zeros(1, 2)
        options = {"top_k": 2, "renormalize": True}
        assert judge(name, {"logits": x}, zero, ids, **options).status is Status.PASSED
        assert judge(name, {"logits": x}, zero + 0.5, ids, **options).status is Status.FAILED

    def test_wrong_experts_are_said_beside_right_ones(self) -> None:
        """Ids are no numbers between two ends: the first wrong row is said, and a choice that is right."""
        inputs = {"logits": torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])}
        right = oracle.reference("topk_softmax", inputs, top_k=2)
        wrong = right | {"topk_ids": torch.tensor([[0, 1], [3, 0]], dtype=torch.int32)}
        assert oracle.judge("topk_softmax", inputs, right, arch="sm90", top_k=2)
        summary = oracle.judge("topk_softmax", inputs, wrong, arch="sm90", top_k=2).summary
        assert "1 of 2 rows have wrong experts" in summary and "topk_ids[1] is 3, 0; 3, 2 are right" in summary
        assert "nan" not in summary

    def test_padding(self) -> None:
        """Rows of padding have no expert; nothing is said of their weights."""
        x, padding = normal(2, 8), torch.tensor([0, 1], dtype=torch.uint8)
        s = x.sigmoid()
        ids = s.topk(2, dim=1)[1]
        inputs, weights = {"logits": x, "is_padding": padding}, s.gather(1, ids)
        without = torch.where(padding[:, None] != 0, -1, ids)
        weights[1] = math.nan
        assert judge("topk_sigmoid", inputs, weights, without, top_k=2).status is Status.PASSED
        assert judge("topk_sigmoid", inputs, weights, ids, top_k=2).status is Status.FAILED
        nowhere = torch.full_like(ids, -1)
        assert judge("topk_sigmoid", inputs, weights, nowhere, top_k=2).status is Status.FAILED

    def test_ties_go_either_way(self) -> None:
        x = torch.zeros(1, 8)
        for ids in ([[0, 1]], [[7, 3]]):
            weights = torch.full((1, 2), 0.125)
            assert judge("topk_softmax", {"logits": x}, weights, torch.tensor(ids), top_k=2).status is Status.PASSED
        same = torch.tensor([[1, 1]])
        assert judge("topk_softmax", {"logits": x}, weights, same, top_k=2).status is Status.FAILED


class TestGrouped:
    """DeepSeek-V3's router by a tanh, whose error is absolute."""

    V3 = {"top_k": 4, "num_expert_group": 4, "topk_group": 2}

    def route(self, s: Tensor, bias: Tensor) -> Tensor:
        c = s + bias
        best = c.view(len(c), 4, -1).topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1)[1]
        keep = torch.zeros(len(c), 4).scatter_(1, best, 1).repeat_interleave(c.shape[1] // 4, dim=1)
        return c.masked_fill(keep == 0, -math.inf).topk(4, dim=-1)[1]

    @pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
    def test_scores_are_kept_in_float32_or_in_the_dtype_of_the_logits(self, kept: torch.dtype) -> None:
        """Of two rows one in each dtype is neither."""
        x, bias = normal(64, 32).bfloat16(), normal(32, seed=3).bfloat16()
        inputs, options = {"logits": x, "bias": bias}, {**self.V3, "renormalize": True}
        made = {}
        for dtype in (torch.float32, torch.bfloat16):
            s = score_of("grouped_topk", x).to(dtype)
            ids = self.route(s, bias.to(dtype))
            made[dtype] = renormalised(s.float(), ids, 1.0, 1e-20), ids
        assert judge("grouped_topk", inputs, *made[kept], **options).status is Status.PASSED
        mixed = [torch.cat([made[torch.float32][i][:32], made[torch.bfloat16][i][32:]]) for i in (0, 1)]
        assert judge("grouped_topk", inputs, *mixed, **options).status is Status.FAILED
        assert (
            judge(
                "fused_topk_deepseek", inputs, made[torch.bfloat16][0].bfloat16(), made[torch.bfloat16][1], **self.V3
            ).status
            is Status.FAILED
        )

    def test_scores_of_zero(self) -> None:
        """All logits below -17.5: 0 over 1e-20 by a tanh, the formula by an exponential; NaN is neither."""
        x, bias = torch.full((1, 32), -30.0), torch.zeros(32)
        ids, inputs = torch.tensor([[0, 1, 8, 9]]), {"logits": x, "bias": bias}
        for weight, status in ((0.0, Status.PASSED), (0.25, Status.PASSED), (math.nan, Status.FAILED)):
            weights = torch.full((1, 4), weight)
            assert judge("fused_topk_deepseek", inputs, weights, ids, **self.V3).status is status
        assert judge("fused_topk_deepseek", inputs, torch.full((1, 4), 1.5), ids, **self.V3).status is Status.FAILED

    @pytest.mark.parametrize(("error", "statuses"), [
        (0.0, (Status.PASSED, Status.PASSED)), (2.0**-12, (Status.PASSED, Status.FAILED)),
        (2.0**-8, (Status.FAILED, Status.FAILED)),
    ])  # fmt: skip  # a table
    def test_a_fast_tanh(self, error: float, statuses: tuple[Status, Status]) -> None:
        """FlashInfer builds with ``-use_fast_math``, whose tanh errs by 2^-11; vLLM does not."""
        x, bias = normal(32, 32, seed=5), torch.zeros(32)
        tanh = torch.tanh(0.5 * x.double())
        s = (0.5 * tanh * (1 + error * torch.sign(normal(32, 32, seed=6))) + 0.5).float()
        ids = self.route(s, bias)
        weights = renormalised(s, ids, 1.0, 1e-20)
        found = [
            judge(name, {"logits": x, "bias": bias}, weights, ids, **self.V3, **more).status
            for name, more in (("fused_topk_deepseek", {}), ("grouped_topk", {"renormalize": True}))
        ]
        assert tuple(found) == statuses


class TestMethods:
    """The ten methods of FlashInfer's layers, weights in bfloat16."""

    @pytest.mark.parametrize("method", list(routing.METHODS))
    @pytest.mark.whole("a few rows")
    def test_each_is_another(self, method: str) -> None:
        """What one gives fails under another, unless their mathematics are the same on these data."""
        x = normal(16, 32)
        router = routing.Router(top_k=4, **routing.METHODS[method])
        weights, ids = routing.route(x, router)
        made = weights.float().bfloat16(), ids
        same = {
            name
            for name in routing.METHODS
            if judge("trtllm_moe_routing", {"logits": x}, *made, top_k=4, routing_method=name).status is Status.PASSED
        }
        alike = [{"Renormalize", "RenormalizeNaive"}, {"DeepSeekV3", "MiniMax2", "SigmoidRenorm"}]
        alike += [{"Llama4", "Sigmoid", "TopKSigmoid"}]
        assert same == next((names for names in alike if method in names), {method})

    def test_the_bias_of_groups_is_bfloat16(self) -> None:
        """Of two experts whose biases are one value of bfloat16 either may be chosen, without groups the larger."""
        x, bias = torch.zeros(1, 8), torch.zeros(8)
        bias[2], bias[3] = 1.0, 1.0 + 2.0**-12
        ids, weight = torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.bfloat16)
        inputs = {"logits": x, "bias": bias}
        grouped = {"num_expert_group": 2, "topk_group": 1}
        assert judge("trtllm_moe_routing", inputs, weight, ids, top_k=1, **grouped).status is Status.PASSED
        assert judge("trtllm_moe_routing", inputs, weight, ids, top_k=1).status is Status.FAILED

    def test_what_a_method_does_not_take(self) -> None:
        inputs, contract = {"logits": normal(1, 8)}, get("trtllm_moe_routing")
        with pytest.raises(InputError, match="takes no bias"):
            contract.reference({**inputs, "bias": torch.zeros(8)}, top_k=2, routing_method="Default")
        with pytest.raises(OptionError, match="no groups"):
            contract.reference(inputs, top_k=2, routing_method="TopK", num_expert_group=2)
        with pytest.raises(OptionError, match="no factor"):
            contract.reference(inputs, top_k=2, routing_method="TopK", routed_scaling_factor=2.0)
        with pytest.raises(OptionError, match="pass a number"):
            contract.reference(inputs, top_k=2, routed_scaling_factor="much")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_widths_of_ids(name: str, dtype: torch.dtype) -> None:
    contract, inputs = get(name), {"logits": normal(4, 8), "bias": normal(8, seed=5)}
    made = contract.reference(inputs, top_k=2)
    assert isinstance(made, dict)
    made["topk_ids"] = made["topk_ids"].to(dtype)
    assert contract.judge(inputs, made, top_k=2).status is Status.PASSED


MASKED, IGNORED = "masked expert groups compete with 0, not -inf", "wrong number of expert groups"


@pytest.mark.parametrize("below", [0.0, 4.0])
def test_groups_masked_with_0_are_not_groups_ignored(below: float) -> None:
    """Both choose experts of other groups; a mask of 0 does where the choices that remain lie below it, and takes the
    first expert of those. Each output has its own name alone."""
    x, bias = normal(40, 32), normal(32, seed=2) - below
    s = x.sigmoid()
    choice = s + bias
    pairs = choice.reshape(40, 4, 8).topk(2, dim=2).values.sum(dim=2)
    kept = torch.zeros(40, 4).scatter(1, pairs.topk(2, dim=1).indices, 1.0).repeat_interleave(8, dim=1)
    options = {"top_k": 4, "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

    def names(ids: Tensor) -> tuple[str, ...]:
        out = {"topk_weights": renormalised(s, ids, 2.5, 1e-20), "topk_ids": ids.int()}
        return oracle.judge("fused_topk_deepseek", {"logits": x, "bias": bias}, out, arch="cpu", **options).explained_by

    assert names(choice.topk(4, dim=1).indices) == (IGNORED,)
    masked = torch.where(kept > 0, choice, 0.0).sort(dim=1, descending=True, stable=True).indices[:, :4]
    assert names(masked) == ((MASKED,) if below else ())
