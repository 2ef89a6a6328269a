"""Nothing stale: a weight or scale that changes between two calls is followed, or the next call is refused.

Subjects are whatever keeps something between calls: kept plans, the fast path of the verbs, a layer. The truth is the
verb itself, with caching off.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import checkpoints as cp
import pytest
import torch
from torch import Tensor

from kernels import blockscaled, context, nn, repeated
from kernels.config import current_config, use_config
from kernels.errors import KernelError
from kernels.quantize import per_token_group_quant_fp8

N, K, ROWS = 128, 256, 3
X = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0)).bfloat16()
A = per_token_group_quant_fp8(X, 128)
OTHER = cp.linear(N, K, 2, "block")
TALL = cp.linear(2 * N, K, 3, "block")
Layer = nn.Fp8Linear
Subject = Callable[[Layer], Callable[[], Tensor]]
Way = Callable[[Layer], object]


# --- what may be stale ------------------------------------------------------------------------------------------------


def kept_linear(layer: Layer) -> Callable[[], Tensor]:
    run = blockscaled.prepare_blockscale_linear(layer.weight, layer.weight_scale)
    return lambda: run(X)


def kept_product(layer: Layer) -> Callable[[], Tensor]:
    run = blockscaled.prepare_fp8_gemm_nt((layer.weight, layer.weight_scale))

    def call() -> Tensor:
        out = torch.full((ROWS, N), torch.nan).bfloat16()
        run(A, out)
        return out

    return call


def verb(layer: Layer) -> Callable[[], Tensor]:
    return lambda: blockscaled.deepgemm_blockscale_linear(X, layer.weight, layer.weight_scale)


def operator(layer: Layer) -> Callable[[], Tensor]:
    op = torch.ops.fp8_kernels.deepgemm_blockscale_linear
    return lambda: op(X, layer.weight, layer.weight_scale, 128, False)


def module(layer: Layer) -> Callable[[], Tensor]:
    return lambda: layer(X)


KEPT, FOLLOWING = (kept_linear, kept_product), (verb, operator, module)


# --- ways to change a weight or its scale -----------------------------------------------------------------------------


def assign(layer: Layer) -> None:
    layer.load_state_dict({"weight": OTHER[0].clone(), "weight_scale": OTHER[1].clone()}, assign=True)


def load(layer: Layer) -> None:
    layer.load_state_dict({"weight": OTHER[0], "weight_scale": OTHER[1]})


def parameter(layer: Layer) -> None:
    layer.weight = torch.nn.Parameter(OTHER[0].clone(), requires_grad=False)


def data(layer: Layer) -> None:
    layer.weight.data = OTHER[0].clone()


def scale_data(layer: Layer) -> None:
    layer.weight_scale.data = OTHER[1].clone()


def scale_turned(layer: Layer) -> None:
    layer.weight_scale.data = OTHER[1].t().contiguous().t()


def set_storage(layer: Layer) -> None:
    layer.weight.set_(OTHER[0].clone())


def unaligned(layer: Layer) -> None:
    memory = torch.empty(N * K + 1, dtype=torch.uint8)
    layer.weight.data = memory[1:].view(OTHER[0].dtype).view(N, K).copy_(OTHER[0])


def strided(layer: Layer) -> None:
    layer.weight.data = OTHER[0].repeat(1, 2)[:, :K]


def in_place(layer: Layer) -> None:
    layer.weight.copy_(OTHER[0])


def in_place_unseen(layer: Layer) -> None:
    """Without a new version: ``.data`` counts versions of its own."""
    layer.weight.data.copy_(OTHER[0])


def scale_in_place(layer: Layer) -> None:
    layer.weight_scale.mul_(2)


def scale_in_place_unseen(layer: Layer) -> None:
    layer.weight_scale.data.mul_(2)


def swapped(layer: Layer) -> None:
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(OTHER[0].clone(), requires_grad=False))


def resized_and_back(layer: Layer) -> None:
    storage = layer.weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(N * K)
    layer.weight.data.copy_(OTHER[0])


def both_taller(layer: Layer) -> None:
    layer.weight.data, layer.weight_scale.data = (x.clone() for x in TALL)


def taller(layer: Layer) -> None:
    layer.weight.data = TALL[0].clone()


def e5m2(layer: Layer) -> None:
    layer.weight.data = OTHER[0].to(torch.float8_e5m2)


def bf16(layer: Layer) -> None:
    layer.weight.data = OTHER[0].to(torch.bfloat16)


def scale_bf16(layer: Layer) -> None:
    layer.weight_scale.data = OTHER[1].bfloat16()


def released(layer: Layer) -> None:
    layer.weight.untyped_storage().resize_(0)


def shortened(layer: Layer) -> None:
    layer.weight.untyped_storage().resize_(N * K // 2)


def to_meta(layer: Layer) -> None:
    layer.to("meta")


FOLLOWED: tuple[Way, ...] = (
    data, scale_data, scale_turned, set_storage, unaligned, strided, in_place, in_place_unseen, scale_in_place,
    scale_in_place_unseen, resized_and_back, load,
)  # fmt: skip  # a table
REPLACED: tuple[Way, ...] = (assign, parameter, swapped)
"""Another tensor object, which a kept plan cannot know: it refuses, or torch refuses to swap what a plan refers to."""
REFUSED: tuple[Way, ...] = (taller, e5m2, bf16, scale_bf16, released, shortened, to_meta)


def truth(subject: Subject, layer: Layer) -> Tensor:
    """What the subject gives with caching off, on fresh copies of the tensors."""
    with context.use(), use_config(replace(current_config(), fast_paths=False)):
        return subject(layer)()


def outcome(subject: Subject, change: Way) -> str:
    """What a change of the weight meets: followed, refused, or stale, where the old weight or anything else is read."""
    layer = Layer(*(x.clone() for x in cp.linear(N, K, 1, "block")))
    with context.use():
        call = subject(layer)
        before = call()
        assert torch.equal(call(), before) and torch.equal(call(), before)  # the fast path
        try:
            change(layer)
        except RuntimeError as error:
            assert "weakref" in str(error)
            return "refused"
        gc.collect()
        try:
            after = call()
        except KernelError:
            return "refused"
    return "followed" if torch.equal(after, truth(subject, layer)) and not torch.equal(after, before) else "stale"


@pytest.mark.whole("a table, 2 ms a line")
@pytest.mark.parametrize("change", [*FOLLOWED, *REPLACED, *REFUSED], ids=lambda f: f.__name__)
@pytest.mark.parametrize("subject", [*KEPT, *FOLLOWING], ids=lambda f: f.__name__)
def test_a_changed_weight(subject: Subject, change: Way) -> None:
    refused = change in REFUSED or (subject in KEPT and change in REPLACED)
    assert outcome(subject, change) == ("refused" if refused else "followed")


@pytest.mark.parametrize("subject", KEPT, ids=lambda f: f.__name__)
def test_a_taller_weight_and_scale(subject: Subject) -> None:
    """A layer of other extents: the product into an output of the old ones is refused, before anything is written."""
    layer = Layer(*(x.clone() for x in cp.linear(N, K, 1, "block")))
    call = subject(layer)
    call(), call()
    both_taller(layer)
    if subject is kept_product:
        with pytest.raises(KernelError, match="out must be"):
            call()
    else:
        assert call().shape == (ROWS, 2 * N) and torch.equal(call(), truth(subject, layer))


def keeps_the_tensors(layer: Layer) -> Callable[[], Tensor]:
    """The negative test: the objects of the preparation, checked once."""
    weight, scale = layer.weight, layer.weight_scale
    decoded = [weight.detach(), scale.detach()]
    return lambda: blockscaled.deepgemm_blockscale_linear(X, *decoded)


def keeps_the_values(layer: Layer) -> Callable[[], Tensor]:
    """The negative test: what was made of the weight and scale when the plan was."""
    decoded = layer.weight.detach().clone(), layer.weight_scale.detach().clone()
    return lambda: blockscaled.deepgemm_blockscale_linear(X, *decoded)


@pytest.mark.parametrize("change", [*FOLLOWED, *REPLACED], ids=lambda f: f.__name__)
def test_the_table_sees_a_stale_plan(change: Way) -> None:
    assert outcome(keeps_the_values, change) == "stale"
    if change in (data, scale_data, assign, parameter, set_storage):
        assert outcome(keeps_the_tensors, change) == "stale"


def test_ten_thousand_weights_at_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are freed and made again, in memory with other contents: nine calls of ten are answered by the entry
    of a weight that is gone, with the contents of the one at hand. The product is a stand-in that reads both."""

    def layer(input: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return (weight.view(torch.uint8)[0, 0] * scale[0, 0]).bfloat16()

    monkeypatch.setattr(blockscaled, "_quantise_then_gemm", lambda *_: layer)
    memory, scales = torch.zeros(64 * 128, dtype=torch.uint8), torch.zeros(1)
    x, hits, wrong = torch.zeros(1, 128).bfloat16(), 0, 0
    with context.use():
        for number in range(10_000):
            memory[0], scales[0] = code, scale = number % 120, 1 + number % 2
            weight, weight_scale = memory.view(torch.float8_e4m3fn).view(64, 128), scales.view(1, 1)
            entry = repeated.find(("deepgemm", False), weight, weight_scale)
            hits += entry is not None and entry.rows(weight, weight_scale, x) == 1
            wrong += blockscaled.deepgemm_blockscale_linear(x, weight, weight_scale).item() != code * scale
            del weight, weight_scale
    assert wrong == 0 and hits > 9_000
