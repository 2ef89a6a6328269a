"""What the layer's routers do not offer is refused, not computed as another mode."""

from __future__ import annotations

import pytest
import torch

from kernels.subjects import BY_CONTRACT
from oracle.routines import get

LOGITS = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("router", ["llama4", "softmax"])
def test_groups_of_experts_are_refused(router: str) -> None:
    """They served every call as one group; one group of all experts is served."""
    common = {"logits": LOGITS, "router": router, "top_k": 2}
    with pytest.raises(NotImplementedError, match="no groups of experts"):
        BY_CONTRACT.moe_routing(**common, num_expert_group=2, topk_group=1)
    made = BY_CONTRACT.moe_routing(**common)
    verdict = get("moe_routing").judge({"logits": LOGITS}, made, router=router, top_k=2)
    assert not verdict.status.is_failure, verdict.summary
    grouped = get("moe_routing").judge(
        {"logits": LOGITS}, made, router=router, top_k=2, num_expert_group=2, topk_group=1
    )
    assert grouped.status.is_failure


def test_llama4_renormalisation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="no renormalisation"):
        BY_CONTRACT.moe_routing(logits=LOGITS, router="llama4", top_k=2, renormalize=True)
