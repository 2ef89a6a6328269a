"""Custom operators: opcheck, and the M switch under torch.compile."""

import contextvars
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map

import kernels
from kernels import checks, context, quantize
from kernels.config import Config, use_config
from kernels.errors import OptionError
from tests.support.verb_calls import SWITCH, calls, operator_calls, operator_names, unserved

OPS = torch.ops.fp8_kernels
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
M, N, K, BLOCK = 6, 256, 256, 128
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No compiled graph outlives its test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def float8_is_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares operands before and after with ``torch.allclose``, which has no float8: compare their bits."""
    plain = torch.allclose

    def allclose(a: torch.Tensor, b: torch.Tensor, **options: object) -> bool:
        if a.is_floating_point() and a.itemsize == 1:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return plain(a, b, **options)

    monkeypatch.setattr(torch, "allclose", allclose)


NAMES = operator_names("cpu")


@pytest.fixture(autouse=True)
def served(request: pytest.FixtureRequest) -> None:
    """A verb that no backend serves here is skipped, so that every torch has the same tests."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if reason := unserved("cpu").get(name):
        pytest.skip(f"{name}: {reason}; this is {torch.__version__}")


def operator_of(name: str) -> torch._ops.OpOverload:
    return getattr(OPS, operator_calls("cpu")[name][0]).default


def placed(name: str, device: str = "cpu") -> tuple[Any, ...]:
    """The operands of one call of an operator, that a test may write into."""
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, operator_calls(device)[name][1])


@pytest.mark.turns(4)
@pytest.mark.whole("every operator of the layer")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: str) -> None:
    opcheck(operator_of(name), placed(name, device), test_utils=CHECKS)


@pytest.mark.turns(4)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_compiled(name: str, device: str) -> None:
    """What torch.compile traces, with symbolic extents: nine tenths of the time of opcheck."""
    opcheck(operator_of(name), placed(name, device), test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_vmap_are_refused(name: str) -> None:
    """With a sentence that names the operator; without a gradient, and without them enabled, it runs (the twins)."""
    op, operands = operator_of(name), placed(name)
    floats = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in operands]
    wanted = [t.clone().requires_grad_() if wide else t for t, wide in zip(operands, floats, strict=True)]
    if any(floats):
        with pytest.raises(OptionError, match=f"fp8_kernels::{operator_calls('cpu')[name][0]} has no gradient"):
            op(*wanted)
    with torch.no_grad():
        op(*wanted)
    op(*operands)
    first, *rest = operands
    with pytest.raises(OptionError, match="has no vmap"):
        torch.vmap(lambda x: op(x, *rest))(first.unsqueeze(0))


@pytest.mark.parametrize(
    "name",
    [
        "fp8_gemm_nt",
        "deepgemm_blockscale_linear",
        "dynamic_flashinfer_deepgemm_blockscale_gemm",
    ],
)
def test_a_call_like_an_earlier_one_refuses_gradients_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Wherever the earlier one was made; the tensors are the same objects. Calls like it are not checked again."""
    op, operands, seen = operator_of(name), placed(name), []
    matrix = checks.matrix
    monkeypatch.setattr(checks, "matrix", lambda *given: seen.append(given) or matrix(*given))
    floats = [t for t in operands if isinstance(t, torch.Tensor)]
    with context.use():
        for wanted in (False, True):
            with torch.set_grad_enabled(not wanted):
                for t in floats:
                    t.requires_grad_(wanted)
                op(*operands)
                seen.clear()
                op(*operands)
                assert not seen
        for t in floats:
            t.requires_grad_(False)
        for t in floats:
            op(*operands)
            t.requires_grad_()
            with pytest.raises(OptionError, match="has no gradient"):
                op(*operands)
            t.requires_grad_(False)


def test_a_compiled_layer_refuses_gradients(make) -> None:
    weight, scale = make.codes(N, K), make.scales(2, 2)
    compiled = torch.compile(lambda x: kernels.deepgemm_blockscale_linear(x, weight, scale), backend="aot_eager")
    x = torch.randn(M, K).bfloat16()
    with pytest.raises(Exception, match="has no gradient"):
        compiled(x.clone().requires_grad_())
    assert torch.equal(compiled(x), kernels.deepgemm_blockscale_linear(x, weight, scale))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_no_bit(name: str, device: str) -> None:
    def run() -> object:
        operands = placed(name, device)
        made = operator_of(name)(*operands)
        return [t for t in operands if isinstance(t, torch.Tensor)] if made is None else made  # what it writes into

    expected = tree_map(lambda t: t.clone(), run())
    with torch.autocast(device, torch.bfloat16):
        found = run()
    for y, z in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert y.dtype is z.dtype and torch.equal(y.flatten().view(torch.uint8), z.flatten().view(torch.uint8))


def test_every_operator_is_checked() -> None:
    registered = {s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("fp8_kernels::")}
    assert registered == {operator for operator, _ in operator_calls("cpu").values()}


@pytest.mark.turns(4)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_compiled_switch_keeps_both_branches(make, backend: str) -> None:
    """dynamic=True, fullgraph=True, one graph for rows on both sides of 32, bits of the eager call."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler; there is no g++ here")
    weight, scale = make.codes(N, K), make.scales(2, 2)
    switch = kernels.dynamic_flashinfer_deepgemm_blockscale_gemm
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: switch(x, weight, scale), dynamic=True, fullgraph=True, backend=backend)
    traced = torch.compile(lambda x: switch(x, weight, scale), dynamic=True, fullgraph=True, backend=keep)
    for m in (31, 32, 5, 40):
        x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), switch(x, weight, scale))
        assert torch.equal(traced(x), switch(x, weight, scale))
    assert len(graphs) == 1, "no recompilation at 32"
    code = "".join(m.code for m in graphs[0].modules() if isinstance(m, torch.fx.GraphModule))
    few = "fp8_kernels.dynamic_flashinfer_deepgemm_blockscale_gemm"
    assert few in code and "fp8_kernels.deepgemm_blockscale_linear" in code and "cond" in code


def test_compiled_batch_invariant_has_one_branch(make) -> None:
    weight, scale = make.codes(N, K), make.scales(2, 2)
    with use_config(Config(batch_invariant=True)):
        compiled = torch.compile(
            lambda x: kernels.dynamic_flashinfer_deepgemm_blockscale_gemm(x, weight, scale),
            fullgraph=True,
            backend="eager",
        )
        x = torch.randn(8, K).bfloat16()
        assert torch.equal(compiled(x), kernels.deepgemm_blockscale_linear(x, weight, scale))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("per_token", [True, False])
def test_compiled_linear_layer(make, per_token: bool) -> None:
    layer = kernels.Fp8LinearOp(use_per_token_if_dynamic=per_token, pad_output=False)
    weight, scale = kernels.scaled_fp8_quant(torch.randn(32, 64), use_per_token_if_dynamic=per_token)
    compiled = torch.compile(
        lambda x: layer.apply(x, weight.t(), scale), dynamic=True, fullgraph=True, backend="aot_eager"
    )
    for m in (3, 19):
        x = torch.randn(m, 64)
        assert torch.equal(compiled(x), layer.apply(x, weight.t(), scale))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in NAMES if name != SWITCH])
def test_no_verb_decides_inside_a_graph(name: str) -> None:
    """One opaque call in one graph, though nothing was decided before; the bits are those of the plain call.

    The graph of the switch holds its two roads (above).
    """
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    call = calls("cpu")[name]
    expected = tree_map(lambda t: t.clone(), call())
    context.current().decisions.clear()
    found = torch.compile(call, fullgraph=True, backend=keep)()
    for y, z in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert y.dtype is z.dtype and torch.equal(y.flatten().view(torch.uint8), z.flatten().view(torch.uint8))
    assert len(graphs) == 1 and f"torch.ops.fp8_kernels.{operator_calls('cpu')[name][0]}(" in graphs[0]


def values(made: object, operands: tuple[Any, ...]) -> list[torch.Tensor]:
    """The bits of what an operator gives and of what it may have written into."""
    return [t.flatten().view(torch.uint8) for t in tree_leaves((made, operands)) if isinstance(t, torch.Tensor)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_other_bits_are_seen() -> None:
    """The negative test of the two below: a bit, a tensor that is missing, and -0."""
    x = torch.tensor([0.0, 1.0])
    right = values((x,), (x,))
    assert same(right, values((x.clone(),), (x,)))
    assert not same(right, values((x,), ())) and not same(right, values((torch.tensor([-0.0, 1.0]),), (x,)))


class Exported(torch.nn.Module):
    """An operator with its options, for operands that are tensors."""

    def __init__(self, op: Any, operands: tuple[Any, ...]) -> None:
        super().__init__()
        self.op, self.operands = op, [None if isinstance(x, torch.Tensor) else x for x in operands]
        self.tensors = [i for i, x in enumerate(operands) if isinstance(x, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> object:
        whole = list(self.operands)
        for i, x in zip(self.tensors, tensors, strict=True):
            whole[i] = x
        return self.op(*whole)


@pytest.mark.turns(4)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", NAMES)
def test_export(name: str) -> None:
    """One operator in the exported program, which has the bits of the call, also of what is written into."""
    op, operands = operator_of(name), placed(name)
    layer = Exported(op, operands)
    flat = tuple(x for x in operands if isinstance(x, torch.Tensor))
    program = torch.export.export(layer, flat, strict=False)
    assert [n for n in program.graph.nodes if str(op) in (str(n.target), *map(str, n.args))]
    right, exported = placed(name), placed(name)
    expected = op(*right)
    found = program.module()(*(x for x in exported if isinstance(x, torch.Tensor)))
    assert same(values(found, exported), values(expected, right))


@pytest.mark.turns(4)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph of CUDA needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_graph(name: str) -> None:
    """A replay writes every output and every operand that the call writes, with the bits of the call."""
    op, right, captured = operator_of(name), placed(name, "cuda"), placed(name, "cuda")
    expected = values(op(*right), right)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(*placed(name, "cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = op(*captured)
    given = {id(t) for t in captured}
    with torch.no_grad():
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and id(t) not in given:
                t.zero_()
        for now, before in zip(captured, placed(name, "cuda"), strict=True):
            if isinstance(now, torch.Tensor):
                now.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    assert same(values(made, captured), expected)


@pytest.mark.turns(4)
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", NAMES)
def test_threads(name: str) -> None:
    """Several threads make the first calls of a process at once, each on operands of its own: the bits of one call."""
    op, right = operator_of(name), placed(name)
    expected = values(op(*right), right)
    gate, made = threading.Barrier(4), list[list[torch.Tensor]]()

    def call(*rounds: tuple[Any, ...]) -> None:
        gate.wait()
        made.extend(values(op(*operands), operands) for operands in rounds)

    with context.use():
        inside = [contextvars.copy_context() for _ in range(4)]
        threads = [threading.Thread(target=each.run, args=(call, placed(name), placed(name))) for each in inside]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 8 and all(same(found, expected) for found in made)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("columns", [True, False])
def test_compiled_group_quantiser_with_its_defaults(columns: bool) -> None:
    """Called as engines call it: no option names a float that would be traced."""
    x = torch.randn(33, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def quantised(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize.per_token_group_quant_fp8(z, 128, column_major_scales=columns)

    made = torch.compile(quantised, dynamic=True, fullgraph=True, backend="aot_eager")
    for m in (33, 5, 1):
        (q, scale), (right, right_scale) = made(x[:m]), quantised(x[:m])
        assert torch.equal(q.view(torch.uint8), right.view(torch.uint8)) and torch.equal(scale, right_scale)
