"""A test that needs recorded data from outside the repository, or a tool, runs, or says loudly that it did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = """
import pytest

@pytest.mark.needs_shared("captures/x.safetensors")
@pytest.mark.whole("two of one file")
@pytest.mark.parametrize("n", [1, 2])
def test_recorded(n):
    assert n

@pytest.mark.needs_shared("vectors")
class TestVectors:
    def test_published(self):
        pass

@pytest.mark.needs_tools("no-such-tool", "no-such/header.h", "sh")
def test_built():
    pass

@pytest.mark.needs_tools("sh")
def test_of_the_repository():
    pass
"""
RUN = """
import sys
from pathlib import Path
import pytest
from tests import conftest
if len(sys.argv) > 2:
    conftest.SHARED = Path(sys.argv[2])
sys.exit(pytest.main(["-q", "--strict-markers", "-p", "no:cacheprovider", sys.argv[1]], plugins=[conftest]))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of five tests, and the recorded data of one of them."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "shared" / "vectors").mkdir(parents=True)
    return tmp_path / "test_some.py"


def run(suite: Path, *arguments: object, shared: object | None = None) -> tuple[int, str]:
    """Exit status and text of pytest with this repository's ``conftest.py``."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "FP8_ORACLE_SHARED"))}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
    if shared is not None:
        environment["FP8_ORACLE_SHARED"] = str(shared)
    command = [sys.executable, "-c", RUN, str(suite), *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=suite.parent, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_absent_data_are_counted(suite: Path) -> None:
    """Each test, each file and tool, and the way out; the tests of the repository itself run."""
    status, text = run(suite, suite.parent / "none")
    assert status == 0 and "1 passed, 4 skipped" in text
    assert "3 tests did not run: no recorded data" in text
    assert "none: captures/x.safetensors, vectors\n" in text and "set FP8_ORACLE_SHARED" in text
    assert "1 tests did not run: no no-such-tool, no-such/header.h !" in text and "libgtest-dev" in text


def test_data_beside_the_repository_are_used(suite: Path) -> None:
    """One of two files is there: only the tests of the other one are skipped."""
    status, text = run(suite, suite.parent / "shared")
    assert status == 0 and "2 passed, 3 skipped" in text and "2 tests did not run: no recorded data" in text


def test_a_named_folder_must_hold_them(suite: Path) -> None:
    """Whoever sets the variable wants these tests: what the folder lacks fails, and what it has runs."""
    shared = suite.parent / "shared"
    status, text = run(suite, shared=shared)
    assert status == 1 and "2 passed, 1 skipped, 2 errors" in text and "no captures/x.safetensors in" in text
    (shared / "captures").mkdir()
    (shared / "captures" / "x.safetensors").write_bytes(b"")
    status, text = run(suite, shared=shared)
    assert status == 0 and "4 passed" in text and "no recorded data" not in text
