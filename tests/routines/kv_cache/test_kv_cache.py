"""KV caches: right kernels written otherwise pass, a wrong slot, scale, code or byte fails and is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oracle.diagnosis.explain import diagnose
from oracle.diagnosis.mutation import Fate, mutate
from oracle.errors import ContractError, DtypeError, NumericsError, OptionError, OracleError, ShapeError
from oracle.numbers import kv_recipes
from oracle.numbers.formats import codes_of, decode
from oracle.routines import cases, get, profiles
from oracle.routines.base import by_name
from oracle.routines.catalogue import catalogue, faults_of, run
from oracle.routines.drawn import default_cases
from oracle.routines.fault import Call
from oracle.routines.kv_cache.cases import GRAMMARS
from oracle.routines.kv_cache.contract import CacheContract, Coded, Products, Quantised
from oracle.truth.layout import unpack_kv_cache
from oracle.verdict.compare import Status, Verdict
from oracle.verdict.sets import rounded_to

SMALL = {
    "thdp": "t=5,h=2,d=16,p=2",
    "trep": "t=5,r=16,e=8,p=2",
    "tre": "t=5,r=16,e=8",
    "spd": "s=2,p=2,d=16",
    "bhdp": "b=3,h=2,d=32,p=2",
    "brep": "b=3,r=16,e=8,p=2",
    "tp": "t=5,p=2",
    "tdp": "t=5,d=256,p=2",
    "sp": "s=2,p=2",
    "bpc": "b=4,p=2,c=16",
    "bp": "b=4,p=2",
    "bpd": "b=4,p=2,d=256",
}


IN_PIECES = [name for name in GRAMMARS if isinstance(get(name), CacheContract)]
"""Contracts whose outputs are memory that pieces are written into; another one's are judged by its parts."""


def call_of(name: str, option: str = "", family: str = "", dtypes: str = "") -> Call:
    grammar = GRAMMARS[name]
    head = f"{name}/{dtypes or grammar.dtypes[0]}/{grammar.schemes[0]}/{SMALL[''.join(grammar.extents)]}"
    case = cases.parse(f"{head}/{option}family={family or grammar.families[0]}/seed=5")
    return Call(get(name), case.inputs(), case.call_options())


def judged(call: Call, output: dict[str, Tensor], **more: object) -> Verdict:
    return call.contract.judge(call.inputs, output, **call.options, **more)  # type: ignore[arg-type]


def flipped(x: Tensor, at: int, bit: int = 1) -> Tensor:
    raw = codes_of(x).clone() if x.is_floating_point() else x.clone()
    raw.view(-1)[at] ^= bit
    return raw.view(x.dtype)


# --- every byte ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_PIECES)
def test_every_element_is_judged(name: str) -> None:
    """One of each kind: of what no token owns, of copies, codes, scales and products; the right output passes."""
    call = call_of(name)
    assert isinstance(call.contract, CacheContract)
    made = by_name(run(call))
    assert judged(call, made).status is Status.PASSED
    pieces = call.contract.work(call)
    for output, x in made.items():
        owned = torch.zeros(x.numel(), dtype=torch.bool)
        for piece in pieces:
            if piece.name == output:
                owned[piece.at] = True
                at, bit = int(piece.at.flatten()[-3]), 0x40 if isinstance(piece, Products) else 4
                assert judged(call, {**made, output: flipped(x, at, bit)}).status is Status.FAILED
            if isinstance(piece, Quantised) and piece.scales == output:
                owned[piece.scale_at] = True
                last = int(piece.scale_at.flatten()[-1])
                bit = 8 if any(recipe.approximate for recipe in piece.recipes) else 1
                assert judged(call, {**made, output: flipped(x, last, bit)}).status is Status.FAILED
        if output in (unwritten := call.contract.unwritten(call)):  # what the routine leaves as it was allocated
            owned |= unwritten[output].flatten()
        for at in torch.nonzero(~owned).flatten()[[0, -1]].tolist() if not bool(owned.all()) else ():
            verdict = judged(call, {**made, output: flipped(x, at)})
            assert verdict.status is Status.FAILED and verdict.outside == 1 and verdict.worst is not None
            assert verdict.worst.output == output


@pytest.mark.parametrize("name", IN_PIECES)
def test_a_contract_states_the_kinds_of_its_pieces(name: str) -> None:
    """Each kind is one of a quick case; a piece of another kind is refused."""
    contract = get(name)
    assert isinstance(contract, CacheContract)
    calls = [Call(contract, case.inputs(), case.call_options()) for case in profiles.cases(name, "quick")]
    assert {type(piece) for call in calls for piece in contract.work(call)} == set(contract.kinds)
    silent = object.__new__(type("Silent", (type(contract),), {"kinds": ()}))
    with pytest.raises(ContractError, match=f"{name} has a {contract.kinds[0].__name__} piece; state it"):
        silent.work(Call(silent, calls[0].inputs, calls[0].options))


@pytest.mark.parametrize("name", [n for n in GRAMMARS if "slot_mapping" in {spec.name for spec in get(n).inputs}])
def test_a_token_without_a_slot_is_not_written(name: str) -> None:
    """Whatever it holds, the output is the same; a slot of its own changes it."""
    call = call_of(name)
    assert int(call.inputs["slot_mapping"][1]) == -1
    first = next(iter(call.inputs))
    other = {**call.inputs, first: call.inputs[first].clone()}
    other[first][1] = 3.0
    assert judged(call, by_name(run(Call(call.contract, other, call.options)))).status is Status.PASSED
    free = [s for s in range(4) if s not in call.inputs["slot_mapping"].tolist()][0]
    moved = {**call.inputs, "slot_mapping": call.inputs["slot_mapping"].clone()}
    moved["slot_mapping"][1] = free
    assert judged(call, by_name(run(Call(call.contract, moved, call.options)))).status is Status.FAILED


# --- what is admitted beside the reference ------------------------------------------------------------------


def test_any_nan_code_stands_for_nan_and_any_zero_for_zero() -> None:
    call = call_of("reshape_and_cache_flash", family="nan")
    made = by_name(run(call))
    codes = made["key_cache"].view(torch.uint8)
    (piece,) = (p for p in call.contract.work(call) if p.name == "key_cache")
    assert isinstance(piece, Coded)
    own = torch.zeros(codes.numel(), dtype=torch.bool)
    own[piece.at] = True
    special = own.reshape(codes.shape) & ((codes & 0x7F == 0x7F) | (codes & 0x7F == 0))
    assert int((special & (codes & 0x7F == 0x7F)).sum()) > 0
    other = torch.where(special, codes ^ 0x80, codes).view(torch.float8_e4m3fn)
    assert judged(call, {**made, "key_cache": other}).status is Status.PASSED
    stays = ~own.reshape(codes.shape) & (codes & 0x7F == 0)
    assert bool(stays.any())
    wrong = torch.where(stays, codes ^ 0x80, codes).view(torch.float8_e4m3fn)
    assert judged(call, {**made, "key_cache": wrong}).status is Status.FAILED


@pytest.mark.parametrize("name", ["gather_and_maybe_dequant_cache", "cp_gather_and_upconvert_fp8_kv_cache"])
def test_one_rounding_or_two(name: str) -> None:
    """The product rounded once is admitted too; a neighbour of both is not."""
    call = call_of(name)
    made = by_name(run(call))
    piece = next(p for p in call.contract.work(call) if isinstance(p, Products))
    once = rounded_to(decode(piece.codes) * piece.scale, torch.bfloat16)
    out = codes_of(made["dst"]).clone().view(-1)
    out[piece.at] = codes_of(once)
    assert judged(call, {"dst": out.view(torch.bfloat16).reshape(made["dst"].shape)}).status is Status.PASSED
    out[piece.at] += 1
    assert judged(call, {"dst": out.view(torch.bfloat16).reshape(made["dst"].shape)}).status is Status.FAILED


def test_sglang_by_approximate_divisions() -> None:
    """Its scale an ulp or two off, and any code under a scale of 0; a scale 2^-18 off is refused."""
    call = call_of("quantize_k_cache", family="randn")
    out = by_name(run(call))["out"]
    for factor, right in ((1 + 2.0**-23, True), (1 + 2.0**-18, False)):
        rows = out.clone()
        scales = rows[..., 512:528].contiguous().view(torch.float32) * factor
        rows[..., 512:528] = scales.view(torch.uint8)
        assert (judged(call, {"out": rows}).status is Status.PASSED) is right
    zero = out[..., 512:528].contiguous().view(torch.float32) == 0
    assert bool(zero.any())
    rows = out.clone()
    rows[..., :512][zero.repeat_interleave(128, dim=-1)] = 0x7E
    assert judged(call, {"out": rows}).status is Status.PASSED


def test_scales_are_versions_of_their_own() -> None:
    """A row with powers of two is no row without them, and says which recipe it is."""
    plain, powers = call_of("concat_and_cache_ds_mla"), call_of("concat_and_cache_ds_mla", "ue8m0=1/")
    made = by_name(run(Call(powers.contract, plain.inputs, powers.options)))
    verdict = judged(plain, made)
    assert verdict.status is Status.FAILED and "vllm_ds_mla_ue8m0" in verdict.summary
    assert judged(plain, made, numerics="vllm_ds_mla_ue8m0").status is Status.PASSED
    found = plain.contract.predict(plain.inputs, numerics="vllm_ds_mla_ue8m0")
    assert isinstance(found, dict) and torch.equal(found["kv_cache"], made["kv_cache"])
    best = plain.contract.identify(plain.inputs, made, arch=None)[0]
    assert best.equal == 1.0 and "ue8m0" in best.schedule
    with pytest.raises(NumericsError):
        judged(call_of("reshape_and_cache"), by_name(run(call_of("reshape_and_cache"))), numerics="vllm_ds_mla")


def test_recipes_are_the_formulas() -> None:
    """The floors by hand: a row of zeros has the scale 2^-126, a zero index key 1e-4/448."""
    call = call_of("concat_and_cache_ds_mla")
    call.inputs["kv_c"].zero_()
    rows = by_name(run(call))["kv_cache"].reshape(-1, 656)[call.inputs["slot_mapping"][0]]
    assert rows[512:528].view(torch.float32).tolist() == [kv_recipes.FLT_MIN] * 4 and not bool(rows[:512].any())
    call = call_of("indexer_k_quant_and_cache")
    call.inputs["k"].zero_()
    page = by_name(run(call))["kv_cache"][int(call.inputs["slot_mapping"][0]) // 2].flatten()
    offset = 2 * 256 + int(call.inputs["slot_mapping"][0]) % 2 * 8
    due = torch.tensor(1e-4) / torch.tensor(448.0)
    assert page[offset : offset + 4].view(torch.float32).item() == due.item()


# --- wrong ones ---------------------------------------------------------------------------------------------

NAMED = (
    ("reshape_and_cache_flash", "scale of the cache silently 1"),
    ("reshape_and_cache_flash", "k scale of the cache used for v"),
    ("reshape_and_cache_flash", "heads and slots of a page exchanged"),
    ("reshape_and_cache_flash", "page stride of two pages"),
    ("reshape_and_cache", "multiplied by the scale where it divides"),
    ("concat_and_cache_mla", "rotated columns not divided by the scale"),
    ("concat_and_cache_mla", "slot -1 written: the last slot of the cache"),
    ("concat_and_cache_ds_mla", "rotated columns quantised too"),
    ("concat_and_cache_ds_mla", "scales one word too far"),
    ("indexer_k_quant_and_cache", "scales beside the codes of their row"),
    ("gather_and_maybe_dequant_cache", "divided by the scale where it multiplies"),
    ("cp_gather_and_upconvert_fp8_kv_cache", "scale of the first tile"),
    ("append_paged_kv_cache", "last partial page of every request lost"),
    ("nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "nibbles of the cache exchanged"),
)


@pytest.mark.parametrize(("name", "fault"), NAMED)
def test_a_fault_is_named(name: str, fault: str) -> None:
    call = call_of(name)
    wrong = by_name(run(call, catalogue()[fault]))
    assert judged(call, wrong).status is Status.FAILED
    assert fault in [e.name for e in diagnose(name, call.inputs, wrong, **call.options).explanations[:3]]


def test_the_reciprocal_shows_at_midpoints_alone() -> None:
    """Ordinary data hide it: their codes are the same; those of family ``midpoints`` are not."""
    fault = catalogue()["multiplied by the rounded reciprocal of the scale"]
    for family, seen in (("randn", False), ("midpoints", True)):
        call = call_of("reshape_and_cache", family=family)
        assert judged(call, by_name(run(call, fault))).status is (Status.FAILED if seen else Status.PASSED)


@pytest.mark.parametrize("name", ["set_mla_kv_buffer", "cp_gather_and_upconvert_fp8_kv_cache"])
def test_every_fault_is_killed(name: str) -> None:
    score = mutate(name)
    assert score.ratio == 1.0 and score.count(Fate.KILLED) == len(score.mutants) > 10


def test_equal_scales_prove_little() -> None:
    call = call_of("reshape_and_cache")
    same = {**call.inputs, "v_scale": call.inputs["k_scale"]}
    call = Call(call.contract, same, call.options)
    assert judged(call, by_name(run(call))).status is Status.MISTRUSTED


# --- bad calls ----------------------------------------------------------------------------------------------

BAD = (
    ("reshape_and_cache_flash", {"slot_mapping": lambda x: x * 0}, OptionError, "names a slot twice"),
    ("reshape_and_cache_flash", {"slot_mapping": lambda x: x + 1000}, OptionError, "the cache has"),
    ("reshape_and_cache_flash", {"slot_mapping": lambda x: x * 0 - 1}, ShapeError, "names no slot"),
    ("reshape_and_cache_flash", {"slot_mapping": lambda x: x.repeat(2)}, ShapeError, "slots for"),
    ("reshape_and_cache_flash", {"k_scale": lambda x: x * 0}, OptionError, "positive and finite"),
    ("reshape_and_cache_flash", {"k_scale": lambda x: x.repeat(3)}, ShapeError, "k_scale"),
    ("reshape_and_cache_flash", {"value": lambda x: x.float()}, DtypeError, "one dtype"),
    ("reshape_and_cache_flash", {"key_cache": lambda x: x[..., :8]}, ShapeError, "no pages"),
    ("reshape_and_cache", {"key_cache": lambda x: x[:, :, :, :, :8].contiguous()}, ShapeError, "columns"),
    ("concat_and_cache_mla", {"kv_cache": lambda x: x[..., :8].contiguous()}, ShapeError, "columns"),
    ("indexer_k_quant_and_cache", {"kv_cache": lambda x: x[..., :8].contiguous()}, ShapeError, "whole groups"),
    ("append_paged_kv_cache", {"append_key": lambda x: x.float().bfloat16()}, DtypeError, "nothing is converted"),
    ("append_paged_kv_cache", {"positions": lambda x: x + 100}, OptionError, "leave the lengths"),
    ("append_paged_kv_cache", {"batch_indices": lambda x: x - 1}, OptionError, "batch_indices"),
    ("gather_and_maybe_dequant_cache", {"block_table": lambda x: x * 0 - 1}, OptionError, "needs pages"),
    ("gather_and_maybe_dequant_cache", {"cu_seq_lens": lambda x: x * 50}, OptionError, "one after the other"),
    ("cp_gather_cache", {"dst": lambda x: x.view(torch.uint8)}, DtypeError, "pass one"),
    ("cp_gather_indexer_k_quant_cache", {"dst_scale": lambda x: x[:, :4]}, ShapeError, "groups of 128"),
)


@pytest.mark.parametrize(("name", "change", "error", "said"), BAD)
def test_bad_calls_are_refused(name: str, change: dict, error: type[OracleError], said: str) -> None:
    call = call_of(name)
    wrong = {n: change[n](x) if n in change else x for n, x in call.inputs.items()}
    with pytest.raises(error, match=said):
        call.contract.judge(wrong, {}, **call.options)


def test_pieces_cover_what_they_say() -> None:
    """No place of one piece is another's, in every routine: nothing is written twice."""
    for name in IN_PIECES:
        call = call_of(name)
        assert isinstance(call.contract, CacheContract)
        seen: dict[str, Tensor] = {}
        for piece in call.contract.work(call):
            ats = [(piece.name, piece.at)]
            if isinstance(piece, Quantised):
                ats.append((piece.scales, piece.scale_at))
            for output, at in ats:
                before = seen.setdefault(output, torch.empty(0, dtype=torch.int64))
                seen[output] = torch.cat([before, at.flatten()])
        assert all(x.unique().numel() == x.numel() for x in seen.values()), name


def test_pages_of_index_keys_are_those_of_the_paged_logits() -> None:
    """DeepGEMM's reader finds every code and scale of the writer where it looks for them."""
    case = cases.parse("indexer_k_quant_and_cache/bf16-u8/1x128/t=5,d=128,p=4/family=randn/seed=5")
    call = Call(get(case.contract), case.inputs(), case.call_options())
    codes, scales = unpack_kv_cache(by_name(run(call))["kv_cache"].unsqueeze(2))
    slots = call.inputs["slot_mapping"]
    kept = slots >= 0
    due = get("per_token_cast_to_fp8").predict({"x": call.inputs["k"]}, numerics="deepgemm_1x128", group=128)
    assert isinstance(due, dict)
    assert torch.equal(scales.flatten()[slots[kept]], due["scale"].flatten()[kept])
    found = decode(codes).flatten(0, 1)[slots[kept]]
    near = (found - decode(due["q"])[kept]).abs() <= found.abs() / 8  # DeepGEMM multiplies by the reciprocal
    assert bool(near.all()) and float((found == decode(due["q"])[kept]).double().mean()) > 0.99


def test_bits_of_float16_in_an_amax_are_named() -> None:
    """vLLM 0.20.2's kernel is compiled for uint16: scales of 118 where 0.058 is due."""
    fault = "amax of the bits of float16 values"
    call = call_of("concat_and_cache_ds_mla", dtypes="f16-u8")
    wrong = by_name(run(call, catalogue()[fault]))
    scales = wrong["kv_cache"].reshape(-1, 656)[call.inputs["slot_mapping"][0], 512:528].view(torch.float32)
    assert bool((scales > 100).all())
    found = diagnose(call.contract.name, call.inputs, wrong, **call.options)
    assert fault in [e.name for e in found.explanations[:3]]


def test_a_reciprocal_is_declared() -> None:
    """As FlagGems 5.0 on an H200: under the scale 1.75 codes of midpoints are those of products by RN(1/scale)."""
    call = call_of("concat_and_cache_mla", family="midpoints")
    scale = torch.full((1,), 1.75)
    call = Call(call.contract, {**call.inputs, "scale": scale}, call.options)
    x = torch.cat([call.inputs["kv_c"], call.inputs["k_pe"]], dim=1).float()
    cache, slots = call.inputs["kv_cache"], call.inputs["slot_mapping"]
    made = {}
    for how, quotient in (("divided", x / scale), ("multiplied", x * (1 / scale))):
        rows = cache.clone().view(torch.uint8).reshape(-1, x.shape[1])
        kept = (slots >= 0).nonzero().flatten()
        rows[slots[kept]] = quotient[kept].clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        made[how] = {"kv_cache": rows.view(cache.dtype).reshape(cache.shape)}
    assert not torch.equal(*(codes_of(output["kv_cache"]) for output in made.values()))
    for how, numerics in (("divided", None), ("divided", "torch_static"), ("multiplied", "vllm_static")):
        assert judged(call, made[how], numerics=numerics).status is Status.PASSED
    assert judged(call, made["divided"], numerics="vllm_static").status is Status.FAILED
    assert judged(call, made["multiplied"]).status is Status.FAILED
    with pytest.raises(NumericsError, match="a given scale"):
        judged(call, made["divided"], numerics="vllm_group")


@pytest.mark.parametrize("name", ["cp_gather_cache", "gather_and_maybe_dequant_cache"])
def test_a_default_case_shows_a_start_that_loses_its_place_in_the_page(name: str) -> None:
    """Of every seed, whatever is drawn: releases of vLLM before PR 51739 round starts down to a page."""
    rounded = next(f for f in faults_of(name) if f.name.startswith("starts of the requests rounded down"))
    for seed in (0, 1, 2):
        calls = (Call(get(name), case.inputs(), case.call_options()) for case in default_cases(name, seed))
        shown = (call for call in calls if rounded.applies(call) is None)
        assert any(judged(call, by_name(run(call, rounded))).status is Status.FAILED for call in shown)
