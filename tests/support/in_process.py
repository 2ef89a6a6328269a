"""A worker of the harness without a process: for kernels that neither crash nor hang, at a tenth of the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from oracle.harness.worker import Reply, Server


class InProcess:
    """What :class:`oracle.harness.process.Worker` offers, by a server in this process."""

    output = ""

    def __init__(self, kernel: str, *, adapter: str | None, device: str, limit: float) -> None:
        self.limit, self.starts, self._server = limit, 1, Server()
        loaded = self._server.answer({"op": "load", "kernel": kernel, "adapter": adapter, "device": device, "path": []})
        assert loaded["ok"], loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: Mapping[str, Any]) -> Reply:
        return self._server.answer(request)
