"""Run every GPU routine over a compact set of cases and keep what came out.

    python tests/hardware/run_h200.py --out DIRECTORY [--only FAMILY ...] [--judge]

Writes one safetensors file per family and ``summary.json`` (together at most 8 MiB, at most 8 files). Inputs are
made again from seeds (:mod:`hardware.seeded_inputs`); outputs are stored with device, driver, library versions, seeds
and the command. Every routine has its own attempt: a failure is recorded with its text and the run goes on; the exit
status is 0 when something was recorded. Without a GPU the CPU paths run and the rest is recorded as failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402  # the paths above come first
from hardware import routines_gemm, routines_quant, timings  # noqa: E402
from hardware.recorder import Recorder  # noqa: E402

FAMILIES: dict[str, tuple[Callable[[Recorder, str], None], ...]] = {
    "dense": (routines_gemm.deep_gemm_dense,),
    "flashinfer": (routines_gemm.flashinfer_dense,),
    "torch": (routines_gemm.torch_dense, routines_gemm.probes),
    "cutlass": (routines_gemm.cutlass_dense,),
    "grouped": (routines_gemm.grouped_products,),
    "logits": (routines_quant.mqa,),
    "quantise": (routines_quant.own_quantisers, routines_quant.vllm_quantisers, routines_quant.flashinfer_quantiser),
    "tables": (routines_quant.division_tables, routines_quant.layouts, routines_quant.flashinfer_helpers),
    "timings": (timings.overhead, timings.end_to_end, timings.bandwidth, timings.graphs_and_compile),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the families asked for; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="*", choices=list(FAMILIES), help="families to run; default all")
    parser.add_argument("--judge", action="store_true", help="judge every output as it is made")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda when there is one")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    words = arguments if arguments is not None else sys.argv[1:]
    shown = ["DIRECTORY" if word == str(options.out) else word for word in words]
    command = " ".join(["python", "tests/hardware/run_h200.py", *shown])
    recorder = Recorder(options.out, command)
    if options.judge:
        from hardware import live_judge

        recorder.judge = live_judge.judge
    for family in options.only or FAMILIES:
        for routine in FAMILIES[family]:
            with recorder.attempt(f"family {family}: {routine.__name__}"):
                routine(recorder, device)
        recorder.write()
    paths = recorder.write()
    size = sum(p.stat().st_size for p in paths)
    done = len(recorder.routines) - len(recorder.failures)
    print(
        f"{done} of {len(recorder.routines)} attempts went through; "
        f"{len(paths)} files, {size / 2**20:.2f} MiB in {options.out}"
    )
    return 0 if recorder.calls or recorder.checks else 1


if __name__ == "__main__":
    raise SystemExit(main())
