"""What a measuring run writes down: attempts, checks, timings and small tensors, in one JSON and one safetensors file.

An attempt that fails is part of the result: its text is recorded and the run goes on.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SCHEMA = "fp8-oracle.measurements/1"


class Notes:
    """Collects in memory; :meth:`write` may be called again and again, so that a stop loses little."""

    def __init__(self, out: Path, environment: Mapping[str, str]) -> None:
        self.out = out
        self.environment = dict(environment)
        self.attempts: dict[str, dict[str, object]] = {}
        self.checks: dict[str, object] = {}
        self.timings: dict[str, object] = {}
        self.tensors: dict[str, Tensor] = {}

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Run a block; record success, or the failure's text, and go on."""
        started = time.perf_counter()
        entry: dict[str, object] = {"status": "ok"}
        try:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:  # recording every failure of a foreign library is this block's purpose
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = "".join(traceback.format_exception_only(error)).strip()
            entry = {"status": "failed", "error": said[:1500], "where": f"{Path(place.filename).name}:{place.lineno}"}
        entry["seconds"] = round(time.perf_counter() - started, 3)
        self.attempts[name] = entry
        print(f"{entry['status']:6} {entry['seconds']:8}s {name} {str(entry.get('error', ''))[:160]}", flush=True)

    def check(self, name: str, value: object) -> None:
        """A fact (true, false, a number) that a reader will look for."""
        self.checks[name] = value
        print(f"check  {name}: {value}", flush=True)

    def time(self, name: str, medians: Mapping[str, float]) -> None:
        """Medians of candidates that were measured side by side."""
        self.timings[name] = dict(medians)
        print(f"timing {name}: {dict(medians)}", flush=True)

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Small tensors, under ``name.key``."""
        self.tensors.update({f"{name}.{key}": t.detach().cpu().contiguous() for key, t in tensors.items()})

    def write(self) -> None:
        """Write ``measurements.json`` and ``measurements.safetensors``."""
        self.out.mkdir(parents=True, exist_ok=True)
        parts = {"attempts": self.attempts, "checks": self.checks, "timings": self.timings}
        record = {"schema": SCHEMA, "environment": self.environment, **parts}
        (self.out / "measurements.json").write_text(json.dumps(record, indent=1) + "\n")
        save_file(self.tensors, self.out / "measurements.safetensors", metadata=self.environment)
