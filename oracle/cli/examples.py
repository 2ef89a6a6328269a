"""The examples under the ``--help`` of every command; a test parses each of them."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping

from oracle.routines.products.contract import Fp8GemmNt

WIDTH = 100
GEMM = Fp8GemmNt.name
_CASE = f"'{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=7,n=512,k=2688/family=randn/seed=1'"

# command -> (what it does, the arguments)
EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "verify": (
        ("every routine and subject of this machine, with a page to look at", "verify --html report.html"),
        ("the same on all cases that differ", "verify --profile quick --html report.html"),
        ("one routine on one backend", f"verify --contract {GEMM} --subject eager"),
        ("what a failing row prints", f"verify --case {_CASE} --subject eager"),
        ("a long run that may be killed, and its continuation", "verify --profile full --record run.jsonl --resume"),
        ("a quarter of everything, on four cores", "verify --shard 1/4 --jobs 4 --record 1.jsonl"),
    ),
    "validate": (("your own kernel", f"validate mypackage.ops:my_gemm --contract {GEMM}"),),
    "gallery": (
        ("every kernel of the gallery of this checkout, on a GPU", "gallery run --out night"),
        ("one project, without a GPU", "gallery run --only torch --device cpu --out torch"),
        ("what another release broke or healed", "gallery compare old/gallery.json new/gallery.json"),
    ),
    "firstlight": (
        ("everything that is asked of a new GPU, as a page and files to send back", "firstlight --out first"),
    ),
    "findings": (
        ("which faults of released libraries are still there on this machine", "findings --out found"),
        ("one of them", "findings --only torchao_byte_0"),
    ),
    "judge": (
        ("recorded outputs", f"judge call.safetensors --contract {GEMM}"),
        ("under other names", f"judge call.safetensors --contract {GEMM} --input a=x --input b=w.T"),
        ("what oracle.sample recorded", "judge calls/ --junit calls.xml"),
    ),
    "watch": (
        ("the layers of a model, as a program runs it", "watch --html watch.html -- python generate.py"),
        ("one call in 100 of a server, kept", "watch --every 100 --to calls/ -- python serve.py --port 8000"),
        ("what was kept, judged again", "watch --recorded calls/ --explain full"),
    ),
    "bisect": (
        ("two releases of an engine, the same prompts", "bisect old/ new/"),
        ("two GPUs, where they part and no further", "bisect h100/ b200/ --only-first --json bisect.json"),
    ),
    "explain": (("which known fault it is", f"explain call.safetensors --contract {GEMM}"),),
    "mutate": (("which faults the cases of one routine notice", f"mutate --contract {GEMM}"),),
    "predict": (
        (
            "the bits of Hopper's promoted accumulation",
            f"predict call.safetensors --contract {GEMM} --numerics sm90.promote128 --write out.safetensors",
        ),
    ),
    "identify": (("which arithmetic made an output", f"identify call.safetensors --contract {GEMM} --top 3"),),
    "fingerprint": (
        ("how a black box accumulates", f"fingerprint mypackage.ops:my_gemm --contract {GEMM} --device cuda"),
        (
            "which reading of a Blackwell's NVFP4 instruction is right (Triton's tl.dot_scaled asks it)",
            "fingerprint oracle.tensorcore.triton_scaled:dot_scaled --block-scaled nvf4 --device cuda",
        ),
    ),
    "doctor": (("what is usable here, and why not", "doctor"),),
    "list": (
        ("routines with inputs and options", "list contracts"),
        ("what a kernel of one routine is called with", f"list contracts --contract {GEMM}"),
        ("the ids of a profile", "list cases --profile full"),
        ("which routines of libraries `validate` calls without a contract or an adapter", "list bindings"),
        ("what no default case of validate has", f"list --reach --contract {GEMM}"),
        ("which routines of an installed library nothing here describes", "list --missing --project flashinfer"),
        ("what can be wrong in a kernel of one routine, and where it was seen", f"list faults --contract {GEMM}"),
    ),
    "fixtures": (
        ("read every stored file", "fixtures check"),
        ("make the captures again", "fixtures import recorded/"),
    ),
    "conformance": (("the models against published hardware vectors", "conformance --vectors vectors/"),),
    "plan": (
        ("what runs a call, and why", f"plan --op {GEMM} --arch sm90 --m 31 --n 4096 --k 4096"),
        ("what a B300 runs for every routine", "plan --arch sm103"),
        (
            "the same of a machine with these releases, with every reason",
            "plan --machine machine.json --json plan.json",
        ),
    ),
    "report": (
        ("a page and a summary from a record", "report run.jsonl --html report.html --markdown summary.md"),
        ("what failed, in a few lines", "report run.jsonl --failures --quiet"),
    ),
    "merge": (
        ("the shards of a run, made by `verify --shard 1/4 --record 1.jsonl` and so on", "merge 1.jsonl 2.jsonl"),
    ),
    "compare": (
        ("before and after an upgrade", "compare before.jsonl after.jsonl"),
        ("two backends of one run", "compare run.jsonl run.jsonl --pair eager=deep_gemm"),
        ("the comment of a pull request", "compare main.jsonl pull.jsonl --markdown comment.md --title gemm"),
    ),
    "history": (
        ("keep a run", "history add run.jsonl --db runs.sqlite --label v1.2"),
        ("look at all of them", "history show --db runs.sqlite --html history.html"),
    ),
    "across": (
        ("what changes from an H100 to a B200", "across --arches sm90,sm100 --html across.html"),
        ("one routine on every pair of architectures", f"across --contract {GEMM} --verbose"),
    ),
    "lint": (
        ("scales, codes and names of a checkpoint", "lint DeepSeek-V3/"),
        ("what the quantisation lost", "lint quantised/ --against original/ --only 'model.layers.3.*'"),
    ),
    "cases": (
        ("calls of one layer of every kind", "cases from-checkpoint DeepSeek-V3/ --to calls/"),
        ("your kernel on them", f"validate mypackage.ops:my_gemm --contract {GEMM} --cases calls/"),
        ("the same as workloads of an evaluation suite", "cases to-suite calls/ --to suite/"),
        ("what FlashInfer dumped", "cases from-flashinfer flashinfer_dumps/ --to calls/"),
    ),
    "evaluate": (
        (
            "a solution that nobody trusts, on workloads of a suite",
            f"evaluate --definition D.json --workload W.jsonl --solution S.json --contract {GEMM} --untrusted",
        ),
    ),
    "completion": (
        ("for this bash", "completion bash > ~/.local/share/bash-completion/completions/fp8-oracle"),
        ("for zsh, in a folder of $fpath", "completion zsh > ~/.zfunc/_fp8-oracle"),
    ),
}


def install(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Append the examples to the help of every command; its description is wrapped here, no longer by argparse."""
    for name, command in commands.items():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        if command.description is not None:
            command.description = textwrap.fill(command.description, WIDTH)
        lines = [
            text for sentence, shown in EXAMPLES.get(name, ()) for text in (f"  # {sentence}", f"  fp8-oracle {shown}")
        ]
        command.epilog = "\n".join(["examples:", *lines]) if lines else None
