"""Keeps what a hardware run produced: outputs with the call that made them, checks, timings, failures.

A routine that fails is part of the result: its text is recorded and the run goes on. Nothing is judged here.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from hardware.seeded_inputs import Recipe, digest
from safetensors.torch import save_file
from torch import Tensor

LIMIT = 8 * 2**20
Judge = Callable[[str, Mapping[str, Recipe], Mapping[str, object], str | None, "Tensor | Mapping[str, Tensor]"], str]
"""Verdict in words on (contract, inputs, options, numerics, output)."""
PACKAGES = ("torch", "triton", "flashinfer-python", "sgl-deep-gemm", "vllm", "apache-tvm-ffi", "numpy", "safetensors")


class Recorder:
    """Collects results in memory and writes them at the end (and after every family, so that a stop loses little)."""

    def __init__(self, out: Path, command: str) -> None:
        self.out = out
        self.families: dict[str, dict[str, Tensor]] = {}
        self.calls: dict[str, dict[str, object]] = {}
        self.routines: dict[str, dict[str, object]] = {}
        self.checks: dict[str, object] = {}
        self.timings: dict[str, object] = {}
        self.environment = environment(command)
        self.judge: Judge | None = None
        out.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Run a block; record success, or the failure's text, and go on."""
        started = time.perf_counter()
        try:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            entry: dict[str, object] = {"status": "ok"}
        except Exception as error:  # recording every failure of a foreign library is this block's purpose
            lines = traceback.format_exception_only(error)
            place = traceback.extract_tb(error.__traceback__)[-1]
            entry = {
                "status": "failed",
                "error": "".join(lines)[:1500],
                "where": f"{Path(place.filename).name}:{place.lineno}",
            }
        entry["seconds"] = round(time.perf_counter() - started, 3)
        self.routines[name] = entry
        print(
            f"{entry['status']:6} {entry['seconds']:8.2f}s {name} {str(entry.get('error', '')).strip()[:160]}",
            flush=True,
        )

    def keep(
        self,
        family: str,
        name: str,
        output: Tensor | Mapping[str, Tensor],
        *,
        contract: str,
        inputs: Mapping[str, Recipe],
        options: Mapping[str, object] | None = None,
        numerics: str | None = None,
        fault: str | None = None,
        passed: str = "",
    ) -> None:
        """Store one output under ``out.<name>`` with everything needed to make the call again.

        ``fault`` names a known wrong answer of the library; ``passed`` says how operands were handed over where that
        matters.
        """
        tensors = (
            {f"out.{name}": output} if isinstance(output, Tensor) else {f"out.{name}.{k}": v for k, v in output.items()}
        )
        kept = self.families.setdefault(family, {})
        for key, t in tensors.items():
            kept[key] = t.detach().cpu().contiguous().clone()
        self.calls[f"out.{name}"] = {
            "family": family,
            "contract": contract,
            "inputs": dict(inputs),
            "options": {
                k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
                for k, v in (options or {}).items()
            },
            "numerics": numerics,
            "fault": fault,
            "passed": passed,
            "digests": {key: digest(t) for key, t in tensors.items()},
            "strides": {key: list(t.stride()) for key, t in tensors.items()},
        }
        if self.judge is not None:
            with self.attempt(f"judge out.{name}"):
                verdict = self.judge(contract, inputs, options or {}, numerics, output)
                self.calls[f"out.{name}"]["verdict"] = verdict
                print(f"verdict out.{name}{' (fault ' + fault + ')' if fault else ''}: {verdict}", flush=True)

    def check(self, name: str, value: object) -> None:
        """Record a fact (true, false, a number) that a reader of the summary will look for."""
        self.checks[name] = value
        print(f"check  {name}: {value}", flush=True)

    def write(self) -> list[Path]:
        """Write one safetensors file per family and ``summary.json``; returns the paths."""
        paths = []
        for family, tensors in self.families.items():
            calls = {k: v for k, v in self.calls.items() if v["family"] == family}
            metadata = {k: str(v) for k, v in self.environment.items()} | {"calls": json.dumps(calls)}
            path = self.out / f"{family}.safetensors"
            save_file(tensors, path, metadata=metadata)
            paths.append(path)
        summary = self.out / "summary.json"
        summary.write_text(
            json.dumps(
                {
                    "schema": "fp8-kernels.hardware/1",
                    "environment": self.environment,
                    "routines": self.routines,
                    "checks": self.checks,
                    "timings": self.timings,
                    "calls": self.calls,
                },
                indent=1,
            )
        )
        total = sum(p.stat().st_size for p in [*paths, summary])
        if total > LIMIT:
            raise RuntimeError(f"{total} bytes in {len(paths) + 1} files; the limit is {LIMIT}: choose fewer shapes")
        return [*paths, summary]

    @property
    def failures(self) -> list[str]:
        """Names of the routines that failed."""
        return [name for name, entry in self.routines.items() if entry["status"] != "ok"]


def environment(command: str) -> dict[str, object]:
    """Device, driver, library versions, and the command that was run."""
    found: dict[str, object] = {
        "command": command,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name} (sm{properties.major}{properties.minor})"
        found["driver"] = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        found["nvcc"] = _first_line(["nvcc", "--version"], last=True)
    else:
        found["device"] = "cpu"
    return found


def _first_line(command: list[str], *, last: bool = False) -> str:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return lines[-1 if last else 0]
