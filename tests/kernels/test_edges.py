"""At the edges: options of another type, gradients, transforms, pickling, export, autocast."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import checkpoints as cp
import pytest
import torch
from torch import Tensor

import kernels
from kernels import blockscaled, checks, context, nn
from kernels.errors import KernelError, MissingPackageError, NoBackendError, OptionError, Unsupported
from tests.support.verb_calls import arguments, fresh

X = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
W, S = cp.linear(128, 256, 1, "block")


# --- options by type --------------------------------------------------------------------------------------------------


def others(value: object) -> Iterator[object]:
    """Values that are equal to an option and of another type: a dictionary finds the one for the other."""
    if type(value) is bool:
        yield from (int(value), float(value))
    elif type(value) is int:
        yield float(value)
        if value in (0, 1):
            yield bool(value)
    elif isinstance(value, tuple) and value and all(type(x) is int for x in value):
        yield (float(value[0]), *value[1:])


def outcome(call: Callable[[], object]) -> str:
    """Anything else than an error of this layer is raised."""
    try:
        call()
    except KernelError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def differing(name: str, verb: Callable[..., object] | None = None) -> list[str]:
    """Options of another type with another outcome in a first call than after two right ones."""
    declared, operands = arguments("cpu")[name]
    verb = verb or declared
    defaults = {k: p.default for k, p in inspect.signature(declared).parameters.items() if p.default is not p.empty}
    found = []
    for key, value in {**defaults, **operands}.items():
        for other in others(value):
            with context.use():
                cold = outcome(lambda key=key, other=other: verb(**{**fresh(operands), key: other}))
            given = fresh(operands)
            with context.use():
                outcome(lambda given=given: verb(**given)), outcome(lambda given=given: verb(**given))
                warm = outcome(lambda given=given, key=key, other=other: verb(**{**given, key: other}))
            found += [f"{key}={other!r}: {cold}, then {warm}"] if cold != warm else []
    return found


@pytest.mark.parametrize("name", arguments("cpu"))
def test_an_option_of_another_type_is_refused_warm_as_cold(name: str) -> None:
    assert differing(name) == []


def test_a_fast_path_that_compares_values_alone_is_seen() -> None:
    """The negative test: a verb that looks its options up by their value."""
    met = set[object]()

    def careless(a: Any, b: Any, out: Tensor, c: Tensor | None = None, disable_ue8m0_cast: bool = True) -> None:
        if disable_ue8m0_cast not in met:
            kernels.fp8_gemm_nt(a, b, out, c=c, disable_ue8m0_cast=disable_ue8m0_cast)
            met.add(disable_ue8m0_cast)

    def forgetting(**operands: Any) -> None:
        if not len(context.current().weights):
            met.clear()
        careless(**operands)

    assert differing("fp8_gemm_nt", forgetting)


# --- gradients and transforms -----------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Tensor], object]] = {
    "verb": lambda x: kernels.deepgemm_blockscale_linear(x, W, S),
    "switch": lambda x: kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, W, S),
    "quantiser": lambda x: kernels.per_token_group_quant_fp8(x, 128),
    "fused": lambda x: kernels.silu_and_mul_per_block_quant(x, 128),
    "layer": nn.Fp8Linear(W, S),
    "layer with a bias": nn.Fp8Linear(W, S, torch.randn(128)),
    "kept plan": blockscaled.prepare_blockscale_linear(W, S),
    "linear op": lambda x: kernels.Fp8LinearOp().apply(x, W.t(), torch.ones(1)),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients_and_transforms_are_refused_in_one_sentence(call: str) -> None:
    """Cold and warm, in eager calls as in compiled ones; without gradients the same operand is taken."""
    run, wanting = CALLS[call], X.clone().requires_grad_()
    for _ in range(2):
        with pytest.raises(OptionError, match=r"has no gradient: call it under torch\.no_grad"):
            run(wanting)
        with torch.no_grad():
            run(wanting)
        with pytest.raises(OptionError, match="inside of torch.vmap or another transform"):
            torch.vmap(run)(X[None].repeat(3, 1, 1))
        run(X)
    with pytest.raises(OptionError, match="inside of torch.vmap or another transform"):
        torch.func.jvp(run, (X,), (X,))


def test_torch_s_own_operations_keep_their_gradients() -> None:
    """As compiled code keeps them: what is plain torch by its contract."""
    x = torch.randn(3, 8, requires_grad=True)
    kernels.silu_and_mul(x).sum().backward()
    assert x.grad is not None
    weights, _ = kernels.route_softmax(x, 2)
    assert weights.requires_grad


def test_a_verb_that_takes_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "without_gradient", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_gradients_and_transforms_are_refused_in_one_sentence("verb")


def test_a_layer_is_made_of_trained_parameters() -> None:
    bias = torch.nn.Parameter(torch.randn(128))
    assert not nn.Fp8Linear(W, S, bias)(X).requires_grad


# --- pickling ---------------------------------------------------------------------------------------------------------


def tied() -> torch.nn.Module:
    both = torch.nn.ModuleList([nn.Fp8Linear(W, S), nn.Fp8Linear(W, S)])
    both[1].weight = both[0].weight
    return both


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_layers_and_errors_are_pickled(copied: Callable[[Any], Any]) -> None:
    """``pickle`` has no tensors of one-byte floats, and makes errors of their message alone."""
    channel = nn.Fp8Linear(*cp.linear(48, 80, 2, "channel"), torch.randn(48), input_scale=torch.ones(1))
    for layer, x in ((nn.Fp8Linear(W, S), X), (nn.Fp8Linear(W, S, ue8m0=True), X), (channel, X[:, :80].contiguous())):
        made = copied(layer)
        assert torch.equal(made(x), layer(x)) and made.weight.dtype is layer.weight.dtype
        assert (
            made.weight.data_ptr() != layer.weight.data_ptr() and made.state_dict().keys() == layer.state_dict().keys()
        )
    for kind in (NoBackendError, MissingPackageError):
        error = copied(kind("a product", {"one": Unsupported("too small")}))
        assert type(error) is kind and error.reasons == {"one": "too small"} and str(error).count("too small") == 1


def test_a_deep_copy_keeps_what_is_shared() -> None:
    both = copy.deepcopy(tied())
    assert both[0].weight is both[1].weight


# --- export and autocast ----------------------------------------------------------------------------------------------


@pytest.mark.turns(4)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", ["block", "channel"])
def test_export_of_a_layer_with_a_bias(kind: str, strict: bool) -> None:
    """For any number of rows, of a weight that needs padding."""
    layer = nn.Fp8Linear(*cp.linear(100, 200, 3, kind), torch.randn(100), kind=kind)
    with torch.no_grad():
        x = X[:, :200].contiguous()
        made = torch.export.export(layer, (x,), dynamic_shapes={"input": {0: torch.export.Dim("m")}}, strict=strict)
        for rows in (x, x.repeat(9, 1)):
            assert torch.equal(made.module()(rows), layer(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """Where ``torch.nn.Linear`` gives the region's dtype: documented with the layer."""
    layer, x = nn.Fp8Linear(W, S, torch.randn(128)), X.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype is dtype and torch.equal(y, layer(x))
