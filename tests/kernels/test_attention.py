"""Attention of the layer: what its libraries are passed, read back by the binding of each; plans, and values that are
refused. That the numbers of plain torch are right is `fp8-oracle verify`'s to say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import attention
from kernels.backends import flashinfer, vllm_attention
from kernels.errors import (
    DtypeError,
    MissingPackageError,
    NoBackendError,
    OptionError,
    ShapeError,
    ValueRangeError,
)
from kernels.plan import backend_of, plan
from kernels.records import Machine, Problem
from oracle.bindings.binding import UnboundError
from oracle.bindings.known import find
from oracle.routines import cases, profiles
from oracle.verdict.sets import bits_of

LIBRARIES = {
    # contract: (backend, binding, where the backend looks for the library, cases)
    "mha_fwd": (
        "vllm_fa3",
        "torch:ops._vllm_fa3_C.fwd",
        (vllm_attention, "operator"),
        (
            "mha_fwd/e4m3xe4m3-bf16/head/b=2,s=3,n=20,h=2,g=2,d=32,v=32/sink=1/family=randn/seed=7",
            "mha_fwd/e4m3xe4m3-bf16/head/b=1,s=4,n=24,h=2,g=1,d=32,v=32/causal=1/family=randn/seed=7",
        ),
    ),
    "single_prefill_with_kv_cache": (
        "flashinfer",
        "flashinfer.prefill:single_prefill_with_kv_cache",
        (flashinfer, "library"),
        ("single_prefill_with_kv_cache/e4m3xe4m3-f16/head/m=4,n=20,h=2,g=1,d=64/causal=1/family=randn/seed=7",),
    ),
    "flash_mla_with_kvcache": (
        "flashmla",
        "torch:ops._flashmla_C.sparse_decode_fwd",
        (vllm_attention, "operator"),
        (
            "flash_mla_with_kvcache/bf16xe4m3-bf16/1x128/b=1,s=2,h=64,t=64,n=100/sink=1/family=randn/seed=7",
            "flash_mla_with_kvcache/bf16xe4m3-bf16/1x128/b=1,s=1,h=128,t=64,n=64/absent=all/family=randn/seed=7",
        ),
    ),
}
CALLS = [(contract, case) for contract, (*_, listed) in LIBRARIES.items() for case in listed]


def through(contract: str, text: str, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """The arguments with which the backend calls its library are those of the binding, bit for bit."""
    backend, target, (module, name), _ = LIBRARIES[contract]
    case, seen, bound = cases.parse(text), list[tuple[Any, Any]](), find(target)
    assert bound is not None
    inputs, options = case.inputs(), case.call_options()
    due = bound.routine.reference(inputs, **options)

    def called(*positional: Any, **named: Any) -> tuple[Tensor, ...]:
        seen.append(change(positional, named))
        return tuple(due.values())

    library = SimpleNamespace(single_prefill_with_kv_cache=called)
    monkeypatch.setattr(module, name, lambda _: library if module is flashinfer else called)
    monkeypatch.setattr(attention, "route", lambda *_: backend_of(backend))
    outputs = getattr(attention, contract)(**inputs, **options)
    assert all(x is y for x, y in zip(outputs, due.values(), strict=True))
    ((positional, named),) = seen
    again = bound.read(positional, named)
    for given, x in inputs.items():
        assert torch.equal(bits_of(again.inputs[given]), bits_of(x)), given
    for given, value in options.items():
        assert value is None or again.options[given] == value, given


@pytest.mark.parametrize(("contract", "text"), CALLS)
def test_what_a_library_is_passed(contract: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    through(contract, text, monkeypatch, lambda *call: call)


@pytest.mark.parametrize(("contract", "text"), CALLS)
def test_two_arguments_that_change_places_are_noticed(
    contract: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative test: keys for queries, or the cache for its indices."""
    with pytest.raises((AssertionError, UnboundError)):
        through(contract, text, monkeypatch, lambda args, named: ((args[1], args[0], *args[2:]), named))


def test_plans() -> None:
    """On sm90 each has its library; elsewhere, and for what the library does not take, the reason is named."""
    sm90 = Machine.described("sm90")
    for op, backend, fields in (
        ("attention", "vllm_fa3", {"head_dim": 128, "n": 128}),
        ("attention_prefill", "flashinfer", {"head_dim": 128}),
        ("attention_ragged", "flashinfer", {"head_dim": 128}),
        ("attention_paged", "flashinfer", {"head_dim": 128}),
        ("attention_latent", "flashmla", {"heads": 64, "k": 2048}),
    ):
        assert plan(Problem(op, **fields), sm90).backend == backend
        for arch in ("sm89", "sm100", "sm120"):
            with pytest.raises(NoBackendError, match=f"this is {arch}"):
                plan(Problem(op, **fields), Machine.described(arch))
        absent = sm90.with_package(backend, f"package {backend} is not installed")
        with pytest.raises(MissingPackageError, match="is not installed"):
            plan(Problem(op, **fields), absent)
        assert plan(Problem(op, device="cpu", **fields), Machine.described("cpu")).backend == "eager"
    for problem, reason in (
        (Problem("attention", head_dim=192, n=128), "a value has 128 elements and a key 192"),
        (Problem("attention_prefill", head_dim=96), "head_dim=96; it takes 64, 128 or 256"),
        (Problem("attention_latent", heads=16, k=64), "heads=16; it takes 64 or 128"),
        (Problem("attention_latent", heads=64, k=100), "100 slots to a token"),
    ):
        with pytest.raises(NoBackendError, match=reason):
            plan(problem, sm90)


@pytest.mark.parametrize(
    ("taken", "why"), [(None, "was not found"), (36, "takes 36 arguments; 37 of 0.20.2 are known"), (37, None)]
)
def test_another_release_is_refused(taken: int | None, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator, one with other arguments, and the one that was read."""
    schema = SimpleNamespace(arguments=[None] * (taken or 0))
    operators = (
        SimpleNamespace()
        if taken is None
        else SimpleNamespace(fwd=SimpleNamespace(default=SimpleNamespace(_schema=schema)))
    )
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", operators, raising=False)
    monkeypatch.setattr(vllm_attention, "vllm_libraries", lambda *_: ())
    vllm_attention.operator.cache_clear()
    try:
        if why is None:
            assert vllm_attention.missing(Problem("attention"), Machine.described("sm90")) is None
        else:
            with pytest.raises(MissingPackageError, match=why):
                vllm_attention.missing(Problem("attention"), Machine.described("sm90"))
    finally:
        vllm_attention.operator.cache_clear()


@pytest.mark.parametrize("form", ["Ragged", "Paged"])
def test_what_a_wrapper_is_planned_with_and_runs(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's wrappers are objects, of which no binding states a call: what each is passed, by its own names."""
    contract, paged = f"BatchPrefillWith{form}KVCacheWrapper", form == "Paged"
    case = next(one for one in profiles.cases(contract, "quick") if "scale_q" in one.inputs())
    inputs, options, calls = case.inputs(), case.call_options(), list[Any]()

    class Wrapper:
        def __init__(self, space: Tensor, layout: str, *, backend: str) -> None:
            calls.append((layout, backend))

        def plan(self, *positional: Any, **named: Any) -> None:
            calls.append((positional, named))

        def run(self, *positional: Any, return_lse: bool) -> tuple[Tensor, Tensor]:
            calls.append(positional)
            return positional[0], positional[0]

    monkeypatch.setattr(flashinfer, "library", lambda _: SimpleNamespace(**{contract: Wrapper}))
    monkeypatch.setattr(flashinfer, "WORKSPACE", 8)
    flashinfer._workspace.cache_clear()
    monkeypatch.setattr(attention, "route", lambda *_: backend_of("flashinfer"))
    verb = getattr(attention, f"batch_prefill_with_{form.lower()}_kv_cache")
    verb(**inputs, **options)
    flashinfer._workspace.cache_clear()
    (made, (planned, named), (q, *passed)) = calls
    keys = inputs["k_cache" if paged else "k"]
    heads = [inputs["q"].shape[1], keys.shape[-2], inputs["q"].shape[2]]
    offsets = [
        "qo_indptr",
        *(["paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"] if paged else ["kv_indptr"]),
    ]
    assert made == ("NHD", "fa3") and list(planned[len(offsets) :]) == heads + ([keys.shape[1]] if paged else [])
    assert all(given is inputs[name] for given, name in zip(planned, offsets, strict=False))
    assert named["o_data_type"] is options.get("o_dtype", torch.bfloat16) and named["causal"] is options.get(
        "causal", False
    )
    assert named["window_left"] == options.get("window_left", -1) and named["kv_data_type"] is torch.float8_e4m3fn
    assert torch.equal(bits_of(q), bits_of(inputs["q"]))
    k, v, *scales = (*passed[0], *passed[1:]) if paged else passed
    names = ("k_cache", "v_cache") if paged else ("k", "v")
    assert all(torch.equal(bits_of(x), bits_of(inputs[name])) for x, name in zip((k, v), names, strict=True))
    for x, name in zip(scales, ("scale_q", "scale_k", "scale_v"), strict=True):
        assert torch.equal(x, inputs.get(name, torch.ones_like(x)))


def codes(*shape: int) -> Tensor:
    return torch.ones(shape, device="cpu").to(torch.float8_e4m3fn)


Q, KV, TABLE = codes(2, 3, 4, 32), codes(3, 8, 2, 32), torch.tensor([[0, 1], [2, 9]], dtype=torch.int32)
USED = torch.tensor([3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ({"q": codes(2, 3, 3, 32)}, ShapeError, "q has 3 heads, no multiple of the 2 KV heads"),
        ({"q": codes(2, 3, 4, 24), "k": codes(3, 8, 2, 24)}, ShapeError, "q has head dim 24"),
        ({"page_table": None}, ShapeError, "k has 3 sequences and q 2; pass page_table"),
        ({"page_table": TABLE[:1]}, ShapeError, "page_table has 1 rows for 2 sequences"),
        ({"page_table": TABLE.long()}, DtypeError, "page_table must be int32"),
        ({"q_descale": torch.ones(2, 4)}, ShapeError, "q_descale must be"),
        ({"num_splits": 0}, OptionError, "num_splits=0; pass 1 to 256"),
        ({"window_size_left": -2}, OptionError, "window_size_left=-2"),
        ({"softmax_scale": 0.0}, OptionError, "softmax_scale must be a positive finite number"),
        ({"seqused_k": USED + 9}, ValueRangeError, "seqused_k runs from 12 to 17"),
        ({"seqused_k": None}, ValueRangeError, "page_table names page 9 of a cache with 3 pages"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refusals(named: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each names the argument; a page behind the last key is not read, and may name anything."""
    right: dict[str, Any] = {"q": Q, "k": KV, "v": KV, "page_table": TABLE, "seqused_k": USED}
    out, lse = attention.mha_fwd(**right)
    assert torch.equal(out.float(), torch.ones(2, 3, 4, 32)) and bool(torch.isfinite(lse[1]).all())
    with pytest.raises(error, match=message):
        attention.mha_fwd(**right | named)


def test_slots_outside_of_the_cache_are_refused() -> None:
    q = torch.ones(1, 1, 64, 576, dtype=torch.bfloat16)
    cache = torch.zeros(2, 4, 1, 656, dtype=torch.uint8)
    indices = torch.tensor([[[-1, 7]]], dtype=torch.int32)
    assert not bool(attention.flash_mla_with_kvcache(q, cache, indices)[0].any())
    with pytest.raises(ValueRangeError, match=r"indices runs from -1 to 8; it must stay within \[-1, 7\]"):
        attention.flash_mla_with_kvcache(q, cache, indices + torch.tensor([0, 1], dtype=torch.int32))


@pytest.mark.parametrize("queries, keys", [(0, 4), (2, 0)])
def test_empty_calls(queries: int, keys: int) -> None:
    """No query, or no key: zeros and -inf."""
    out, lse = attention.mha_fwd(codes(2, queries, 2, 16), codes(2, keys, 1, 16), codes(2, keys, 1, 16))
    assert out.shape == (2, queries, 2, 16) and not bool(out.any()) and bool(torch.isneginf(lse).all())
    out, lse = attention.single_prefill_with_kv_cache(codes(queries, 2, 16), codes(keys, 1, 16), codes(keys, 1, 16))
    assert out.shape == (queries, 2, 16) and lse.shape == (queries, 2)
