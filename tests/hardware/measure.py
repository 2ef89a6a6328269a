"""Measure on a GPU what is no verdict: overhead, bandwidth, graph capture, engines, division tables, probes.

    python tests/hardware/measure.py --out DIRECTORY [--only FAMILY ...] [--device cpu] [--beside RECORD]

Verdicts and captures of every routine come from ``fp8-oracle verify --arch sm90 --keep``; this is the rest. Every
block has its own attempt: a failure is recorded with its text and the run goes on. On a CPU what needs a GPU is
recorded as failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402  # the paths above come first
from hardware import probes, timings  # noqa: E402
from hardware.notes import Notes  # noqa: E402

from oracle.harness import provenance, subjects  # noqa: E402

FAMILIES: dict[str, tuple[Callable[[Notes, str], None], ...]] = {
    "probes": (probes.division_tables, probes.instruction_probes, probes.own_quantisers),
    "layouts": (probes.masked_stores, probes.row_pitch),
    "threads": (probes.threads,),
    "overhead": (timings.overhead, timings.modules),
    "fast": (timings.fast_paths,),
    "linear": (timings.end_to_end,),
    "bandwidth": (timings.bandwidth,),
    "quantisers": (timings.quantisers, timings.small_quantisers),
    "graphs": (timings.graphs, timings.compiled),
    "engines": (timings.engines,),
}


def compared(now: Mapping[str, Mapping[str, float]], record: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Print the host times of both; those above the record's by more than 2% and 1 us.

    Where both have a bare call of a library beside ours, what is compared is ours less the bare one: the machines
    need not be alike.
    """
    worse = []
    for name in sorted(name for name in now if name.startswith("host_us.") and name in record):
        for side, us in now[name].items():
            if side not in record[name]:
                continue
            before, bare = record[name][side], next((s for s in now[name] if s.startswith("bare")), None)
            over = f"{us - now[name][bare]:8.2f} {before - record[name][bare]:8.2f}" if bare in record[name] else ""
            more = us > before * 1.02 and us > before + 1.0
            worse += [f"{name} {side}"] * more
            print(f"{name:28} {side:36} now {us:8.2f} record {before:8.2f} {'WORSE' if more else 'ok':5} {over}")
    return worse


def main(arguments: list[str] | None = None) -> int:
    """Run the families asked for; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="*", choices=list(FAMILIES), help="families to run; default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda when there is one")
    parser.add_argument("--beside", type=Path, help="a record of earlier measurements, whose host times to compare")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    notes = Notes(options.out, provenance.machine() | provenance.versions(subjects.providers()))
    for family in options.only or FAMILIES:
        for routine in FAMILIES[family]:
            with notes.attempt(f"{family}: {routine.__name__}"):
                routine(notes, device)
        notes.write()
    if options.beside is not None:
        compared(notes.timings, json.loads(options.beside.read_text())["timings"])
    failed = [name for name, entry in notes.attempts.items() if entry["status"] != "ok"]
    print(f"{len(notes.attempts) - len(failed)} of {len(notes.attempts)} attempts went through; {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
