"""A real browser for tests of pages: Chromium through playwright, where both are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def chromium() -> str | None:
    """The first of ``NAMES`` on the PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def needs_chromium() -> pytest.MarkDecorator:
    """Skips where there is no browser, and says what is missing."""
    if find_spec("playwright") is None:
        return pytest.mark.skipif(True, reason="playwright is not installed")
    return pytest.mark.skipif(chromium() is None, reason=f"none of {', '.join(NAMES)} is on the PATH")


@contextmanager
def launched() -> Iterator[object]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        yield started
        started.close()
