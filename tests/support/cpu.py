"""``--cpu FILE``: what every test costs, in CPU seconds of its process and of the processes that it started.

One tab-separated line a test, the dearest first, and the dearest functions at the end of the run. Unlike a time on the
clock it depends little on what else the machine does; it is a report, and no test compares it with a limit.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

SHOWN = 20


def spent() -> float:
    """CPU seconds of this process and of its children that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


class Costs:
    """The plugin: tests are measured where they run, and listed by the process that reports."""

    def __init__(self, path: Path) -> None:
        if path.suffix == ".py":
            raise pytest.UsageError(f"--cpu {path} would write its report over a test: name a file, then the tests")
        self.path, self.begun, self.costs = path, 0.0, dict[str, float]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        self.begun = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            return (yield)
        finally:
            item.user_properties.append(("cpu", spent() - self.begun))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.costs[report.nodeid] = sum(float(str(v)) for name, v in report.user_properties if name == "cpu")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        dearest = sorted(self.costs.items(), key=lambda pair: -pair[1])
        self.path.write_text("".join(f"{cost:.3f}\t{name}\n" for name, cost in dearest))
        functions = Counter[str]()
        for name, cost in dearest:
            functions[name.partition("[")[0]] += cost  # type: ignore[assignment]
        terminalreporter.write_sep("=", f"{sum(self.costs.values()):.0f} CPU seconds in {len(dearest)} tests")
        for name, total in functions.most_common(SHOWN):
            terminalreporter.write_line(f"{total:7.1f} {name}")
