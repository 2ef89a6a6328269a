"""The domain of a kernel: conditions are parsed and never evaluated, shapes move into it, refusals teach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from oracle.errors import OptionError
from oracle.routines.cases import grammars
from oracle.routines.domain import EVERYTHING, LONGEST, learned, parse

MNK = ("m", "n", "k")
Extents = Mapping[str, int]


def test_what_contracts_document() -> None:
    """Comparisons of the extents that their ids have."""
    documented = [grammar for grammar in grammars().values() if grammar.domain]
    assert len(documented) > 50
    for grammar in documented:
        assert str(parse(grammar.domain, grammar.extents)) != str(EVERYTHING)


class TestParse:
    """Comparisons of integer expressions over extents; anything else is refused by name."""

    @pytest.mark.parametrize(
        ("text", "inside", "outside"),
        [
            ("m % 4 == 0, n % 128 == 0", {"m": 4, "n": 128, "k": 1}, {"m": 4, "n": 64, "k": 1}),
            ("1 <= m <= 64", {"m": 64, "n": 1, "k": 1}, {"m": 65, "n": 1, "k": 1}),
            ("m * k < 2**12", {"m": 1, "n": 1, "k": 4095}, {"m": 2, "n": 1, "k": 2048}),
            ("k // 128 > 1,", {"m": 1, "n": 1, "k": 256}, {"m": 1, "n": 1, "k": 255}),
            ("m in (1, 2 * 8, n)", {"m": 16, "n": 1, "k": 1}, {"m": 3, "n": 1, "k": 1}),
            ("m != n", {"m": 1, "n": 2, "k": 1}, {"m": 2, "n": 2, "k": 1}),
        ],
    )
    def test_what_it_says(self, text: str, inside: Extents, outside: Extents) -> None:
        domain = parse(text, MNK)
        assert domain.holds(inside) and not domain.holds(outside)
        assert parse(str(domain), MNK).holds(inside)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("", "no list of comparisons"),
            ("m", "'m' is no comparison"),
            ("g % 4 == 0", "'g' is no extent"),
            ("m.real == 0", "'m.real' is no integer expression"),
            ("__import__('os').system('true') == 0", "'__import__' is no extent"),
            ("m == (lambda: 0)()", "is no integer expression"),
            ("m in n", "is no comparison"),
            ("m in (1, n < 2)", "'n < 2' is no integer expression"),
            ("1 < m in (1, 2)", "is no comparison"),
            ("m not in (1, 2)", "is no comparison"),
            ("m % 4.0 == 0", "'4.0' is no integer expression"),
            ("m == True", "'True' is no integer expression"),
            ("m ** 99999 == 0", "'m ** 99999' is no integer expression"),
            ("m == 9**9**9", "is no integer expression"),
            ("m == 0 or n == 1", "is no comparison"),
            ("(" * 120 + "m" + ")" * 120 + " == 0 \\0", "no list of comparisons"),
            ("m % 4 == 0), (n", "is no comparison"),
            ("m == 0 " + "," * LONGEST, f"at most {LONGEST}"),
            ("m == 1; n == 2", "no list of comparisons"),
        ],
    )
    def test_what_it_refuses(self, text: str, named: str) -> None:
        with pytest.raises(OptionError) as caught:
            parse(text, MNK)
        assert named in str(caught.value)

    def test_a_division_by_zero_holds_nowhere(self) -> None:
        assert not parse("m % (n - n) == 0", MNK).holds({"m": 1, "n": 1, "k": 1})


class TestNearest:
    """The nearest admitted shape, up or down."""

    @pytest.mark.parametrize(
        ("text", "given", "wanted"),
        [
            ("m % 4 == 0, n % 128 == 0", (33, 192, 130), (32, 256, 130)),
            ("m == 1", (257, 64, 130), (1, 64, 130)),
            ("m >= 64", (1, 64, 130), (64, 64, 130)),
            ("m % 4 == 0", (32, 7, 9), (32, 7, 9)),
            ("k == 512", (3, 64, 7168), (3, 64, 512)),
        ],
    )
    def test_it(self, text: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        found = parse(text, MNK).nearest(dict(zip(MNK, given, strict=True)), MNK)
        assert found is not None and tuple(found.values()) == wanted

    def test_a_condition_on_several_extents(self) -> None:
        domain = parse("m * k <= 4096, k % 128 == 0", MNK)
        found = domain.nearest({"m": 64, "n": 5, "k": 384}, MNK)
        assert found is not None and domain.holds(found) and found["n"] == 5

    def test_there_is_none(self) -> None:
        assert parse("m < 0", MNK).nearest({"m": 1, "n": 1, "k": 1}, MNK) is None
        assert parse("n == 5", MNK).nearest({"m": 1, "n": 1, "k": 1}, ("m", "k")) is None, "n is not free"


class TestLearned:
    """Steps and limits of each extent, from yes and no alone."""

    BASE = {"m": 128, "n": 128, "k": 256}
    LARGEST = {"m": 300, "n": 700, "k": 4096}

    def ask(self, admits: Callable[[Extents], bool]) -> tuple[str, list[str], int]:
        asked = []

        def answer(extents: Extents) -> bool:
            asked.append(extents)
            return admits(extents)

        domain, fixed = learned(answer, self.BASE, MNK, self.LARGEST)
        return str(domain), fixed, len(asked)

    @pytest.mark.parametrize(
        "text", ["m % 4 == 0, n % 128 == 0", "m <= 130", "m >= 5", "k % 16 == 0, k >= 48", "n % 64 == 0, n <= 640"]
    )
    def test_the_conditions_come_back(self, text: str) -> None:
        found, fixed, count = self.ask(parse(text, MNK).holds)
        assert found == text and not fixed and count < 60

    def test_everything(self) -> None:
        """Three questions an extent where nothing is refused."""
        assert self.ask(lambda extents: True) == ("", [], 9) and str(EVERYTHING) == ""

    def test_one_shape(self) -> None:
        """Each extent is fixed: no step leads to a neighbour."""
        found, fixed, _ = self.ask(lambda extents: extents == self.BASE)
        assert found == "m == 128, n == 128, k == 256" and fixed == list(MNK)
