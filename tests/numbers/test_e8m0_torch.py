"""torch's cast to E8M0 is a witness, no definition: it differs from nearest-even at ties, ends and signs, and only
there. ``Float8_e8m0fnu.h`` rounds by the first fraction bit; the implicit bit counts as the least significant one."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.numbers.formats import E8M0
from oracle.numbers.rounding import Overflow, Rounding, encode

FLOAT32 = torch.arange(1 << 20, dtype=torch.int32) * 2039 + 1  # positive bits of every exponent, no tie among them


def ours(x: Tensor) -> Tensor:
    return encode(x.double(), E8M0, rounding=Rounding.NEAREST_EVEN, overflow=Overflow.SATURATE).to(torch.int64)


def cast(x: Tensor) -> Tensor:
    return x.to(torch.float8_e8m0fnu).view(torch.uint8).to(torch.int64)


def test_ties_go_to_the_even_byte_here_and_up_in_torch() -> None:
    """Of ``1.5 * 2^k`` between the bytes ``b`` and ``b + 1``."""
    low = torch.arange(1, 254)
    ties = ((low << 23) + (1 << 22)).to(torch.int32).view(torch.float32)
    assert torch.equal(ours(ties), low + low % 2)
    assert torch.equal(cast(ties), low + 1)


def test_beside_ties_both_agree() -> None:
    """From 2^-126 to below ``1.5 * 2^127``."""
    x = FLOAT32.view(torch.float32)
    x = x[(x >= 2.0**-126) & (x < 1.5 * 2.0**127)]
    assert len(x) > 1 << 19 and not bool(((x.view(torch.int32) & 0x7FFFFF) == 1 << 22).any())
    assert torch.equal(ours(x), cast(x))


def test_between_the_two_least_values() -> None:
    """The middle of 2^-127 and 2^-126 is ``1.5 * 2^-127``; torch goes up from 2^-127 on."""
    bits = torch.tensor([0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001], dtype=torch.int32).view(torch.float32)
    assert ours(bits).tolist() == [0, 0, 0, 0, 1]
    assert cast(bits).tolist() == [0, 1, 1, 1, 1]


def test_the_end_and_signs() -> None:
    assert ours(torch.tensor([1.5 * 2.0**127])).tolist() == [254] and cast(torch.tensor([1.5 * 2.0**127])).tolist() == [
        255
    ]
    assert ours(torch.tensor([-1.0])).tolist() == [255] and cast(torch.tensor([-1.0])).tolist() == [127]
    assert ours(torch.tensor([0.0, torch.inf, torch.nan])).tolist()[::2] == [0, 255]
