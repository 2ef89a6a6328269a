"""A worker of the harness without a process: for kernels that neither crash nor hang, at a tenth of the time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from oracle.harness.memory import Shared
from oracle.harness.protocol import NONCE, Reply, pack, unpack
from oracle.harness.worker import Server


class InProcess:
    """What :class:`oracle.harness.process.Worker` offers, by a server in this process."""

    output, place = "", "cpu"

    def __init__(
        self,
        kernel: str,
        *,
        adapter: str | None,
        device: str,
        limit: float,
        path: tuple[str, ...] = (),
        untrusted: bool = False,
        loading: float | None = None,
    ) -> None:
        assert not untrusted
        self.limit, self.starts, self._server, self._shared = limit, 1, Server(), Shared(1)
        self._loaded = self._server.answer(
            {
                "op": "load",
                "kernel": kernel,
                "adapter": adapter,
                "device": device,
                "first": [],
                "path": list(path),
                "hidden": [],
                "absent": "",
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.close()

    def stop(self) -> None:
        """There is no process to end: the kernel remembers what it did, unless a test makes it forget."""

    def memory(self, size: int) -> Shared:
        if self._shared.size < size:
            self._shared.close()
            self._shared = Shared(size)
        return self._shared

    def ask(self, request: Mapping[str, Any]) -> Reply:
        """The reply after the way there and back, as a process would take it."""
        if not self._loaded.ok:
            return replace(self._loaded, kind="load")
        nonce = bytes(NONCE)
        begun = time.monotonic()
        reply = self._server.answer(json.loads(json.dumps(request)), os.dup(self._shared.descriptor))
        return replace(unpack(pack(nonce, reply), nonce), seconds=time.monotonic() - begun)
