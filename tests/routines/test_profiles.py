"""Profiles: which cases each lists, and what of ``quick`` the chosen part shows."""

from __future__ import annotations

import pytest

from oracle.routines import profiles, registered


class TestBrief:
    """One case of each class: all classes of quick, by few of its cases, the same ones each time."""

    def test_every_class_of_every_contract(self) -> None:
        fewer = 0
        for contract in registered():
            quick, brief = profiles.cases(contract, "quick"), profiles.cases(contract, "brief")
            assert [case for case in quick if case in set(brief)] == brief, contract
            ends = profiles.extremes(quick)
            assert shown(brief, ends) == shown(quick, ends), contract
            fewer += len(quick) - len(brief)
            assert profiles.count(contract, "quick") == len(quick)
        assert fewer > sum(len(profiles.cases(name, "brief")) for name in registered())

    def test_a_case_that_is_left_out_is_missed(self) -> None:
        """The negative test: without some of the cases, each alone, a class is not shown."""
        brief = profiles.cases("fp8_gemm_nt", "brief")
        without = [[other for other in brief if other is not case] for case in brief]
        ends = profiles.extremes(brief)
        assert len([rest for rest in without if shown(rest, ends) < shown(brief, ends)]) > len(brief) // 2

    @pytest.mark.parametrize("reverse", [False, True])
    def test_of_equal_cases_the_first(self, reverse: bool) -> None:
        """Seeds are no class: of two cases that differ in it alone the one that is listed first is taken."""
        quick = profiles.cases("fp8_gemm_nt", "quick")
        two = [case for case in quick if str(case).split("/seed=")[0] == str(quick[0]).split("/seed=")[0]]
        listed = two[::-1] if reverse else two
        assert profiles._covering([*listed, *listed]) and profiles._covering(listed) == listed[:1]


def shown(cases: list[profiles.Case], ends: dict[str, tuple[int, int]]) -> set[profiles.Class]:
    return {one for case in cases for one in profiles.classes(case, ends)}
