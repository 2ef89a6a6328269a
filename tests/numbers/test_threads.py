"""On how many threads an operation runs, inside and outside of the scopes that choose it."""

from __future__ import annotations

import pytest
import torch

from oracle.numbers.threads import all_threads, one_thread, threads


@pytest.fixture(autouse=True)
def three() -> object:
    """The user gave torch three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_and_all_again() -> None:
    with one_thread():
        assert (torch.get_num_threads(), threads()) == (1, 3)
        with all_threads():
            assert (torch.get_num_threads(), threads()) == (3, 3)
        with one_thread():
            assert (torch.get_num_threads(), threads()) == (1, 3)
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), threads()) == (3, 3)


@pytest.mark.parametrize("scope", [one_thread, all_threads])
def test_an_error_leaves_what_the_user_gave(scope: type) -> None:
    with pytest.raises(KeyError), scope():
        raise KeyError
    assert torch.get_num_threads() == 3


def test_without_a_scope_the_number_is_the_users() -> None:
    torch.set_num_threads(2)
    assert (torch.get_num_threads(), threads()) == (2, 2)
