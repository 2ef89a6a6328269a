"""Verdicts on outputs as they are made: the bridge from recorded calls to the oracle's contracts.

Inputs are made again from their seeds on the CPU, so that what is judged is what a replay will judge.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hardware.seeded_inputs import Recipe, make, paged_cache, quantiser_matrix
from torch import Tensor

import oracle

RENAMED = {
    "flashinfer_quantize_128x128": {"w": "x"},
}
UNJUDGED = "no contract judges this call"


def judge(
    contract: str,
    records: Mapping[str, Recipe],
    options: Mapping[str, object],
    numerics: str | None,
    output: Tensor | Mapping[str, Tensor],
) -> str:
    """The verdict in words, or why there is none."""
    known = {c if isinstance(c, str) else c.name for c in oracle.contracts()}
    if contract not in known or not records:
        return UNJUDGED
    inputs = {name: quantiser_matrix(r) if r["kind"] == "quantiser_rows" else make(r) for name, r in records.items()}
    if contract == "fp8_paged_mqa_logits":
        inputs["kv_cache"] = paged_cache(inputs.pop("k"), inputs.pop("k_scale"))
    if contract.startswith("torch_"):
        inputs["weight"] = inputs["weight"].t()
        for name in ("scale_a", "scale_b"):
            inputs.setdefault(name, torch.ones(1))
    for new, old in RENAMED.get(contract, {}).items():
        inputs[old] = inputs.pop(new, inputs.get(old))  # type: ignore[assignment]  # one of the two is there
    host = output.cpu() if isinstance(output, Tensor) else {k: v.cpu() for k, v in output.items()}
    dtype = host.dtype if isinstance(host, Tensor) else None
    given = dict(options)
    if dtype is not None and contract.endswith(("mm", "nt", "sm90", "contiguous", "masked")):
        given["out_dtype"] = dtype
    arch = "sm90" if torch.cuda.is_available() else "cpu"
    declared = numerics if arch == "sm90" else ("ieee32.any" if numerics else None)
    verdict = oracle.judge(contract, inputs, host, arch=arch, numerics=declared, **given)
    return f"{verdict.status.name}: {verdict.summary}"
