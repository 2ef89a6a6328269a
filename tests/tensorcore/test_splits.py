"""K cut into partial sums: the schedules, what cuBLASLt did on an H200, a second emulator, finding the cut again."""

from __future__ import annotations

from typing import Any

import mmaemu
import pytest
import torch
from hardware.split_k import call, digest, operands, packed
from support.paths import FIXTURES
from support.splits import calls

from oracle.errors import NumericsError, ShapeError
from oracle.fixtures import files as fixtures
from oracle.tensorcore.identify import find_split
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import Split, get
from oracle.truth.gemm import ScaledProduct

CALLS = calls("h200")
SMALL = [c for c in CALLS if c["m"] == 16 and c["n"] == 256 and c["kind"] == "all codes" and "split" in c["schedule"]]


def same_as_recorded(made: dict[str, Any], schedule: str) -> bool:
    product = operands(made["m"], made["n"], made["k"], made["kind"], "cpu")
    return digest(predict_product(product, schedule, out_dtype=getattr(torch, made["dtype"]))) == made["sha256"]


def test_a_record_is_what_the_script_writes() -> None:
    record = fixtures.read_json(FIXTURES / "splits" / "h200.json")
    assert packed(CALLS).items() <= record.items()


def test_every_recorded_call_is_identified() -> None:
    """6 x 5 x 8 shapes, two data sets, two modes, two output dtypes."""
    assert len(CALLS) == 6 * 5 * 8 * 2 * 2 * 2
    assert all(c["schedule"] for c in CALLS)
    assert {c["schedule"].rpartition(".")[2] for c in CALLS if "split" in c["schedule"]} == {
        "split2",
        "split3",
        "split4",
        "split6",
    }


def test_another_gpu_splits_otherwise() -> None:
    """An H100 with the same library: all of its 1,288 calls identified, 14 shapes of one mode with fewer parts."""
    others = calls("h100")
    assert len(others) == 1288
    assert all(c["schedule"] for c in others)
    key = ("m", "n", "k", "kind", "fast", "dtype")
    there = {tuple(c[k] for k in key): c for c in CALLS}
    pairs = [(c, there[tuple(c[k] for k in key)]) for c in others]
    assert all(a["sha256"] == b["sha256"] for a, b in pairs if a["schedule"] == b["schedule"])
    moved = {a["schedule"].rpartition(".")[2] for a, b in pairs if a["schedule"] != b["schedule"]}
    assert moved == {"split2", "split5"}


def test_the_bits_of_an_h100_split_in_five() -> None:
    (made,) = (
        c
        for c in calls("h100")
        if c["schedule"] == "sm90.chain.product.split5"
        and c["m"] == 16
        and c["dtype"] == "float32"
        and c["kind"] == "all codes"
    )
    assert same_as_recorded(made, made["schedule"])
    assert not same_as_recorded(made, "sm90.chain.product.split6")


@pytest.mark.parametrize("made", SMALL, ids=lambda c: f"{c['k']}-{c['dtype']}-{'fast' if c['fast'] else 'promoted'}")
def test_the_bits_of_split_calls_on_an_h200(made: dict[str, Any]) -> None:
    """The digest of the output's bytes on the device, from the model on the CPU; another partition has another."""
    assert same_as_recorded(made, made["schedule"])
    if made["dtype"] == "float32" and made["fast"]:
        base, _, parts = made["schedule"].rpartition(".split")
        assert not same_as_recorded(made, f"{base}.split{int(parts) + 1}")
        assert not same_as_recorded(made, base)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_second_emulator_has_the_same_bits(fast: bool, parts: int) -> None:
    """``mmaemu`` (Apache-2.0), written elsewhere, fitted on an H100 PCIe: 7 tiles in up to 3 parts."""
    p = operands(16, 32, 896, "all codes", "cpu")
    theirs = mmaemu.scaled_mm(
        p.a,
        p.b.t(),
        p.a_scale.reshape(()),
        p.b_scale.reshape(()),
        out_dtype=torch.float32,
        use_fast_accum=fast,
        profile="hopper",
        splitk=1 if parts == 1 else (parts, "contiguous"),
        backend="reference",
    )
    base = "sm90.chain.product" if fast else "sm90.promote128.scale_after.product"
    ours = predict_product(p, base if parts == 1 else f"{base}.split{parts}", out_dtype=torch.float32)
    assert torch.equal(ours, theirs)
    if fast:
        assert not torch.equal(predict_product(p, f"{base}.split{parts + 1}", out_dtype=torch.float32), theirs)


UNEVEN = ["sm90.chain.cut128", "sm90.chain.product.cut128+512"]  # as stream-K leaves the parts of an output tile
SPLITS = ["sm90.chain.split3", "sm89.chain.interleaved2x64", "sm90.chain.product.split2x64", *UNEVEN]


@pytest.mark.parametrize("name", [*SPLITS, "sm120.chain.interleaved3x32"])
def test_a_split_is_found_from_the_output(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(n, 640, generator=generator).to(torch.float8_e4m3fn) for n in (24, 40))
    scales = [torch.rand(n, 1, generator=generator) + 0.5 for n in (24, 40)]
    product = ScaledProduct(a, b, *scales, 640, 1)
    out = predict_product(product, name, out_dtype=torch.float32)
    base = get(name.rpartition(".")[0])
    found = find_split(product, out, base)
    assert found is not None
    assert torch.equal(predict_product(product, found, out_dtype=torch.float32), out)
    assert found.name == name or name.startswith("sm120")  # whose 25 bits leave few splits apart
    out[3, 5] += 1
    assert find_split(product, out, base) is None


def test_block_scales_split_between_blocks_only() -> None:
    product = ScaledProduct(
        *(torch.ones(n, 512).to(torch.float8_e4m3fn) for n in (4, 8)), torch.ones(4, 4), torch.ones(8, 4), 128, 1
    )
    out = predict_product(product, "sm90.promote128.split2", out_dtype=torch.bfloat16)
    assert torch.equal(out, torch.full((4, 8), 512, dtype=torch.bfloat16))
    with pytest.raises(NumericsError, match="cuts K=512 at 192, inside a scale block of 128"):
        predict_product(product, "sm90.promote128.cut192", out_dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="cut scale blocks of 128"):
        product.over([(64, 192)])


@pytest.mark.parametrize("tile", [32, 128])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_product_is_in_one_part(tile: int, interleaved: bool) -> None:
    for k in (1, 127, 128, 1000, 4096):
        for parts in (1, 2, 3, 7):
            pieces = Split(parts, tile, interleaved).pieces(k)
            assert len(pieces) == parts
            assert sorted(i for part in pieces for ends in part for i in range(*ends)) == list(range(k))


@pytest.mark.parametrize(
    "name", ["sm90.chain.split0", "sm90.chain.cut512+256", "sm100.chain_mxf4.split2", "sm90.chain.split2.split2"]
)
def test_a_split_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(NumericsError):
        get(name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_recorded_bits_are_those_of_this_gpu() -> None:
    """Of one H200 and library version; on another the partition may differ, the identification must not fail."""
    for made in SMALL[:4]:
        product = operands(made["m"], made["n"], made["k"], made["kind"], "cuda")
        dtype = getattr(torch, made["dtype"])
        out = call(product, fast=made["fast"], dtype=dtype)
        base = "sm90.chain.product" if made["fast"] else "sm90.promote128.scale_after.product"
        plain = torch.equal(predict_product(product, base, out_dtype=dtype), out)
        assert plain or find_split(product, out, get(base)) is not None
