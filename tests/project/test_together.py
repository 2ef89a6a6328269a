"""``tests/support/together.py``: what CI runs side by side fails as a whole when one command fails."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.support import together


def command(text: str, status: int = 0) -> list[str]:
    """Prints a text and ends with a status."""
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({status})"]


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_the_status_is_that_of_all(failing: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    """Each of three fails once; the others run all the same, and the first ones print first."""
    one, two, three = (command(f"number {i}", int(i == failing)) for i in range(3))
    assert together.main([shlex.join(three), "--", *one, together.THEN, *two]) == int(failing is not None)
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("number")]
    assert printed == ["number 0", "number 1", "number 2"]


@pytest.mark.parametrize("status", [0, 1])
def test_what_says_more_of_a_failure(status: int, capfd: pytest.CaptureFixture[str]) -> None:
    """It runs after a failure alone, and its own success makes none good."""
    one, two, three = command("number 0", status), command("number 1"), command("number 2")
    assert together.main(["--", *one, together.ELSE, *two, together.THEN, *three]) == status
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("number")]
    assert printed == (["number 0", "number 1", "number 2"] if status else ["number 0", "number 2"])
