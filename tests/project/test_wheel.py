"""What `pip install` of the wheel brings: every command of the pages works away from the checkout, or says its need."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from oracle.cli import commands
from oracle.fixtures import packaged
from tests.support import release
from tests.support.commandline import CASE
from tests.support.served import judge_once, serve

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/index.md", "docs/tutorial.md", "docs/reference/commands.md")
MOST = 2_000_000  # bytes that the fixtures may add to a wheel
GOLDEN = "site/oracle/fixtures/stored/golden/fp8_gemm_nt-542568a2.safetensors"
CAPTURE = "captures/h200_kv_vllm_convert_fp8/out.vllm.convert_fp8-7ac5d3fc"
OWN = "no fixtures folder of your own found: run inside a checkout, set FP8_ORACLE_FIXTURES=DIR or pass --fixtures DIR"

KERNEL = """import torch


def gemm(a, a_scale, b, b_scale, *, out_dtype=torch.bfloat16):
    total = torch.zeros(a.shape[0], b.shape[0])
    for block in range(a_scale.shape[1]):
        k = slice(128 * block, 128 * (block + 1))
        columns = b_scale[:, block].repeat_interleave(128)[: b.shape[0]]
        total += (a[:, k].double() @ b[:, k].double().T).float() * a_scale[:, block, None] * columns
    return total.to(out_dtype)
"""
PRODUCT = (
    "import torch; q, one = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(()); "
    "torch._scaled_mm(q, q.t(), one, one, out_dtype=torch.bfloat16)"
)

# Every command: the words after `fp8-oracle`, the exit status, what it says. Status 2: this one line, what it needs.
RUNS = (
    ("--version", 0, "fp8-oracle "),
    ("doctor", 0, "stored: "),
    ("list captures", 0, CAPTURE),
    ("list --coverage", 0, "`align`|align"),
    ("plan --op fp8_gemm_nt --arch sm90 --m 31 --n 4096 --k 4096", 0, "deep_gemm"),
    ("completion bash", 0, "_shtab"),
    ("fixtures check", 0, "fp8_gemm_nt: 6 stored, 0 as digests, regenerated"),
    ("fixtures list", 0, "fp8_gemm_nt/"),
    ("fixtures export vendor --contract fp8_gemm_nt", 0, "fp8_gemm_nt-542568a2: "),
    ("fixtures judge vendor --outputs nowhere", 2, "nowhere: no such folder of answers"),
    *((f"fixtures {action}", 2, OWN) for action in ("generate", "seal", "import recorded", "adopt recorded")),
    (f"verify --case {CAPTURE} --record old.jsonl --quiet", 0, "OK  1 passed"),
    ("verify --contract ceil_div --record new.jsonl --html a.html --sarif a.sarif --annotations a.txt", 0, " passed;"),
    ("report new.jsonl --quiet --markdown a.md --junit a.xml --json a.json", 0, "OK  "),
    ("merge old.jsonl --record whole.jsonl", 0, "OK  1 passed"),
    ("compare old.jsonl whole.jsonl --markdown comment.md", 0, "OK  1 the same"),
    ("history add old.jsonl --db runs.sqlite", 0, "added as run 1"),
    ("history show --db runs.sqlite --html history.html", 0, "1 passed|fp8-oracle|│ 1 "),
    (f"validate my_kernels:gemm --contract fp8_gemm_nt --case {CASE} --json report.json", 0, "CONFORMS  1 case judged"),
    ("fingerprint my_kernels:none --contract fp8_gemm_nt", 2, "my_kernels:none cannot be loaded: "),
    (f"judge {GOLDEN} --contract fp8_gemm_nt --arch cpu", 0, "PASSED out: "),
    (f"explain {GOLDEN} --contract fp8_gemm_nt", 0, "PASSED"),
    (f"identify {GOLDEN} --contract fp8_gemm_nt --top 1", 0, "sm"),
    (f"predict {GOLDEN} --contract fp8_gemm_nt --numerics sm90.promote128 --write out.safetensors", 0, "bits of sm90"),
    ("mutate --contract ceil_to_ue8m0", 0, "100.0%"),
    (f"across --arches sm90,sm100 --case {CASE}", 0, "alignment bits"),
    (f"watch --to a/ -- {sys.executable} -c '{PRODUCT}'", 0, "1 call of 1 kernel in 1 layer, 1 judged"),
    ("watch --recorded nowhere", 2, "nowhere: no such folder"),
    ("bisect a/ a/", 0, "SAME"),
    ("firstlight --out first", 2, "there is no GPU that torch can see"),
    ("findings --folder nowhere", 2, "nowhere: has no script of a finding"),
    ("conformance --vectors nowhere", 2, "give the folder of the published collection"),
    ("lint nowhere", 2, "nowhere: no such folder"),
    ("cases from-checkpoint nowhere --to calls", 2, "nowhere: no such folder"),
    ("cases from-flashinfer nowhere --to calls", 2, "nowhere: "),
    ("cases to-suite nowhere --to suite", 2, "nowhere"),
    ("evaluate --definition nowhere.json --solution a.json --workload a.jsonl", 2, "nowhere.json: no such file"),
    ("gallery list", 0, "its bindings are of"),
    ("gallery run --folder nowhere --out DIR", 2, "nowhere"),
    ("gallery page nowhere.json", 2, "nowhere.json: no such file"),
    ("gallery compare nowhere.json other.json", 2, "nowhere.json: no such file"),
    ("gallery beside nowhere.json", 2, "nowhere.json: no such file"),
    ("gallery store nowhere.json", 2, "gallery.json: no such file"),
)


def leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[str]:
    """Every command of a parser that does something."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name
    for action in below:
        for word, child in action.choices.items():
            yield from leaves(child, f"{name} {word}".strip())


def documented(text: str) -> list[str]:
    """The command lines of a page: after ``$``, indented, in a fence or in backticks, without what a shell does."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = re.findall(r"(?:^\$ |^ {4}|^[ -]*(?:run|command): |^|[`/])fp8-oracle ([^`\n|;>]+)", joined, re.MULTILINE)
    lines = [re.sub(r"  .*| [12]$", "", line).strip() for line in found]
    return [line for line in lines if not line.startswith("COMMAND")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both source distributions, and the wheels that were built out of them alone."""
    folder = tmp_path_factory.mktemp("built")
    release.build(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(release.wheels(built)[0])


@pytest.fixture(scope="module")
def layer(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(release.wheels(built)[1])


def load(site: Path) -> None:
    """In the server: the package from a wheel, and nothing of the checkout."""
    if (loaded := sys.modules.get("kernels.operators")) is not None:
        loaded._library._destroy()  # an operator cannot be registered twice
    for name in [name for name in sys.modules if name.partition(".")[0] in ("oracle", "kernels", "tests")]:
        if not name.startswith("tests.support.") or name.endswith("forked_worker"):
            del sys.modules[name]
    ours = [place for place in sys.path if not place or Path(place).resolve() == ROOT]
    sys.path[:] = [str(site), *(place for place in sys.path if place not in ours), str(ROOT)]  # ROOT for tests.support
    os.chdir(site.parent)
    os.environ.pop("FP8_ORACLE_FIXTURES", None)
    importlib.invalidate_caches()
    for name in ("oracle", "fp8_oracle_kernels.subjects", "kernels"):
        assert Path(str(importlib.import_module(name).__file__)).is_relative_to(site)
    judge_once()
    golden = importlib.import_module("oracle.fixtures.golden")
    check, few = golden.check_case, iter(range(1000))
    golden.check_case = lambda *given: None if next(few) else check(*given)  # all are made again in other tests


@pytest.mark.turns(4)
def test_every_command(wheel: zipfile.ZipFile, layer: zipfile.ZipFile, tmp_path: Path) -> None:
    """In one folder, one after the other; each as `RUNS` says. Another package has the name ``kernels``."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("")
    wheel.extractall(site)
    layer.extractall(site)
    for kept in ROOT.glob("[ok]*/**/__pycache__/*"):  # what was compiled is known by name and time of a source
        source = kept.parents[1] / f"{kept.name.partition('.')[0]}.py"
        place = site / str(source.relative_to(ROOT)).replace("kernels/", "fp8_oracle_kernels/", 1)
        if place.is_file() and place.read_bytes() == source.read_bytes():
            place.parent.joinpath("__pycache__").mkdir(exist_ok=True)
            shutil.copy(kept, place.parent / "__pycache__")
            os.utime(place, (source.stat().st_atime, source.stat().st_mtime))
    (tmp_path / "my_kernels.py").write_text(KERNEL)
    wrong = []

    def main(words: list[str]) -> int:
        return int(importlib.import_module("oracle.cli").main(words))

    with serve(tmp_path, {"fp8-oracle": main}, prepare=lambda: load(site)) as path:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("FP8_ORACLE")}
        environment |= {"PATH": path, "COLUMNS": "200"}
        for line, status, said in RUNS:
            done = subprocess.run(
                ["bash", "-c", f"fp8-oracle {line}"],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            printed = done.stdout + done.stderr
            told = any(word in printed for word in said.split("|")) and "Traceback" not in printed
            alone = status != 2 or (done.stderr.count("\n") == 1 and done.stderr.startswith("fp8-oracle: error: "))
            if done.returncode != status or not told or not alone:
                wrong.append(f"{line}: {done.returncode}, {printed[-600:]}")
    assert not wrong, "\n\n".join(wrong)


def test_no_command_is_left_out() -> None:
    every = set(leaves(commands.parser()))
    assert {" ".join(words[:n]) for line, _, _ in RUNS for words in [line.split()] for n in (1, 2)} >= every
    assert "history show" in every and "no such" not in every


def test_every_documented_line_is_a_command() -> None:
    """The pages write no command or flag that is not there."""
    pages = [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
    lines = {line: page.name for page in pages for line in documented(page.read_text())}
    assert len(lines) > 40
    assert not [f"{page}: {line}" for line, page in lines.items() if mistaken(line)]


def mistaken(line: str) -> bool:
    """Whether a line has a word that no command knows; pages also mention a command or flag without its values.

    ``${{ x }}`` and ``$X`` of a workflow or shell are values.
    """
    words = shlex.split(re.sub(r"\$\{\{.*?\}\}|\$\w+", "1", line), comments=True)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        commands.parser(*words[:1]).parse_args(words)
    return "unrecognized arguments" in said.getvalue() or "invalid" in said.getvalue()


@pytest.mark.parametrize("line", ["verify --no-such-flag", "merry --quiet", "verify --profile slow", "compare a b c"])
def test_a_mistake_is_found(line: str) -> None:
    """The negative test."""
    assert documented(f"$ fp8-oracle {line} | head\n") == [line] and mistaken(line)


@pytest.mark.turns(2)
class TestFiles:
    """The part of the fixtures is small, whole, and in the source distribution too."""

    def test_size(self, wheel: zipfile.ZipFile) -> None:
        stored = [about for about in wheel.infolist() if about.filename.startswith(packaged.STORED)]
        assert 100_000 < sum(about.compress_size for about in stored) < MOST

    def test_what_is_declared(self, wheel: zipfile.ZipFile, layer: zipfile.ZipFile) -> None:
        """Each has one package, neither of them the name that Hugging Face's `kernels` has; both say their formats."""
        for archive, name, package, points in (
            (wheel, "fp8-oracle", "oracle", "fp8-oracle = oracle.cli:main"),
            (layer, "fp8-oracle-kernels", "fp8_oracle_kernels", "production = fp8_oracle_kernels.subjects:subjects"),
        ):
            folders = {name.partition("/")[0] for name in archive.namelist()}
            (place,) = {name for name in folders if name.endswith(".dist-info")}
            assert folders == {place, package}
            declared = archive.read(f"{place}/entry_points.txt").decode()
            assert points in declared and "= kernels" not in declared
            about = Parser().parsestr(archive.read(f"{place}/METADATA").decode())
            assert (about["Name"], about["Version"]) == (name, release.version())
            assert all(word in about["Summary"] for word in ("FP8", "MX", "NVFP4"))
            assert {"fp8", "nvfp4", "mxfp4"} <= set(about["Keywords"].split(","))

    def test_every_module_is_in_a_wheel(self, wheel: zipfile.ZipFile, layer: zipfile.ZipFile) -> None:
        for archive, folder, package in ((wheel, "oracle", "oracle"), (layer, "kernels", "fp8_oracle_kernels")):
            modules = {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}
            assert {name.partition("/")[2] for name in archive.namelist() if name.endswith(".py")} == modules
            assert f"{package}/py.typed" in archive.namelist()

    def test_a_wheel_from_the_source_distribution_has_the_whole_part(self, wheel: zipfile.ZipFile) -> None:
        """The source distribution has every file that the part is chosen from."""
        stored = {name.removeprefix(f"{packaged.STORED}/") for name in wheel.namelist() if packaged.STORED in name}
        assert set(packaged.chosen(ROOT / "fixtures")) | {"SHA256SUMS"} == stored

    def test_one_licence(self) -> None:
        assert (ROOT / "kernels" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")


def without_local_sources() -> dict[str, str]:
    """The environment without anything that names a package index or a folder of wheels."""
    local = ("PIP_", "UV_")
    kept = ("PIP_CERT", "UV_CACHE_DIR")
    environment = {name: text for name, text in os.environ.items() if name in kept or not name.startswith(local)}
    return environment | {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def resolved(*words: str, constraints: Path = ROOT / "constraints.txt") -> subprocess.CompletedProcess[str]:
    """`uv pip install --dry-run` into an empty folder, by a package index alone."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--dry-run",
        "--target",
        "build/empty",
        "-c",
        str(constraints),
    ]
    return subprocess.run(
        [*command, *words], cwd=ROOT, env=without_local_sources(), capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def index() -> None:
    """A package index answers; else the test is skipped, with what uv said."""
    asked = resolved("--refresh-package", "packaging", "packaging")
    if asked.returncode:
        pytest.skip(f"no package index answers: {asked.stderr.strip()[-200:]}")


@pytest.mark.repeats("test_every_command")
@pytest.mark.usefixtures("index")
def test_beside_kernels_and_transformers(built: Path) -> None:
    """In a bare environment: installed, imported, judged and uninstalled. The release does it on three Pythons."""
    release.check(built, sys.executable)


@pytest.mark.turns(4)
@pytest.mark.usefixtures("index")
class TestStrangers:
    """The pins resolve where nothing but a package index is: every Python, both platforms, torch as it is published."""

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("platform", PLATFORMS)
    @pytest.mark.parametrize("python", PYTHONS)
    def test_pins_resolve(self, python: str, platform: str) -> None:
        """What the two commands install, from wheels alone; Triton is the one that its torch wants."""
        where = ("--python-version", python, "--python-platform", platform, "--only-binary", ":all:")
        done = resolved(*where, "--no-binary", "fp8-oracle", ".[dev,docs]")
        assert done.returncode == 0, done.stderr
        assert "+ torch==2.13.0\n" in done.stderr and "+ triton==3.7.1\n" in done.stderr

    def test_a_pin_that_the_published_torch_refuses_is_seen(self, tmp_path: Path) -> None:
        """The negative test: Triton of another release, as the pins once had it."""
        pins = re.sub("^triton==.*", "triton==3.6.0", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
        (tmp_path / "pins.txt").write_text(pins)
        done = resolved("--python-version", "3.13", ".", constraints=tmp_path / "pins.txt")
        assert done.returncode == 1 and "triton" in done.stderr and "unsatisfiable" in done.stderr

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("python", PYTHONS)
    @pytest.mark.parametrize("suffix", [".whl", ".tar.gz"])
    def test_what_is_built_resolves(self, built: Path, suffix: str, python: str) -> None:
        """The wheel and the source distribution, with no pins: what somebody gets who follows no page."""
        (archive,) = built.glob(f"fp8_oracle-[0-9]*{suffix}")
        done = resolved("--python-version", python, str(archive), constraints=Path(os.devnull))
        assert done.returncode == 0 and "+ torch==" in done.stderr, done.stderr

    @pytest.mark.repeats("TestStrangers::test_pins_resolve")
    @pytest.mark.parametrize("python", PYTHONS)
    def test_pip_resolves(self, python: str, tmp_path: Path) -> None:
        """pip itself, with each Python of this machine: the plain commands of the README."""
        find = [sys.executable, "-m", "uv", "python", "find", "--no-python-downloads", python]
        asked = subprocess.run(find, capture_output=True, text=True, check=False)
        if asked.returncode:
            pytest.skip(asked.stderr.strip())
        command = [asked.stdout.strip(), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["-c", "constraints.txt", "--report", str(tmp_path / "report.json"), "-e", "."]
        done = subprocess.run(
            command, cwd=ROOT, env=without_local_sources(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        chosen = json.loads((tmp_path / "report.json").read_text())["install"]
        versions = {about["metadata"]["name"]: about["metadata"]["version"] for about in chosen}
        assert versions["torch"] == "2.13.0" and versions["triton"] == "3.7.1"
