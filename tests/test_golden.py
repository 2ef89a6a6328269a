"""Golden fixtures: the same bits on every machine, whatever is spoiled is named, and a vendor in C can take part."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import cases, fixtures, golden, golden_export, seal
from oracle.contracts import get, registered
from oracle.errors import FixtureError
from oracle.formats import codes_of, decode

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "fixtures" / golden.FOLDER
ENTRIES: list[dict[str, Any]] = golden.load(GOLDEN)["cases"]
STORED = [entry for entry in ENTRIES if entry["file"]]
SOME = "align/i64/-/r=500/family=integers/seed=1"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of all fixtures that a test may spoil."""
    return shutil.copytree(ROOT / "fixtures", tmp_path / "fixtures")


def respell(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and write it in its own spelling."""
    path = folder / golden.FOLDER / golden.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_bytes(golden.dumped(manifest))
    seal.write(folder)


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


class TestStored:
    """At least one stored golden for every contract, all of it small, regenerated bit for bit."""

    def test_check(self, cli: Cli) -> None:
        ran = cli("fixtures", "check")
        assert ran.status == 0, ran.err
        assert "regenerated" in ran.out and "as sealed" in ran.out

    def test_every_contract(self) -> None:
        assert {entry["contract"] for entry in STORED} == set(registered())

    @pytest.mark.parametrize(("folder", "mebibytes"), [(".", 15), ("captures", 8)])
    def test_size(self, folder: str, mebibytes: int) -> None:
        files = [p for p in (ROOT / "fixtures" / folder).rglob("*") if p.is_file()]
        assert 0 < sum(p.stat().st_size for p in files) < mebibytes * 2**20

    def test_some_are_digests(self) -> None:
        assert any(entry["file"] is None for entry in ENTRIES)

    def test_list(self, cli: Cli) -> None:
        ran = cli("fixtures", "list")
        assert ran.status == 0
        assert len(ran.out.splitlines()) == len(ENTRIES)
        assert f"{SOME}\tbits\t" in ran.out

    def test_generating_again_adds_what_was_asked_for_and_nothing_else(self, copy: Path, cli: Cli) -> None:
        added = SOME.replace("seed=1", "seed=3")
        ran = cli("fixtures", "generate", "--fixtures", copy, "--add", added)
        assert ran.status == 0, ran.err
        assert [line.partition(":")[0] for line in ran.out.splitlines()] == [
            f"{golden.slug(added)}.safetensors",
            golden.MANIFEST,
        ]
        golden.check_files(copy / golden.FOLDER)
        seal.check(copy)

    def test_a_stored_file_is_judged_as_it_is(self, cli: Cli) -> None:
        """Inputs under the contract's names, the expected bits as `out`: the truth passes its own judgement."""
        entry = next(e for e in STORED if e["contract"] == "fp8_gemm_nt")
        ran = cli("judge", GOLDEN / entry["file"], "--contract", "fp8_gemm_nt", "--arch", "cpu")
        assert ran.status == 0, ran.out + ran.err


class TestIntervals:
    """Both edges are admissible and the next value beyond either is not: the table and the judge agree."""

    @pytest.mark.parametrize("contract", [
        "fp8_gemm_nt", "cutlass_scaled_mm", "torch_channelwise_w8a8_scaled_mm", "fp8_m_grouped_gemm_nt_masked",
        "fp8_mqa_logits", "fp8_paged_mqa_logits", "Fp8LinearOp", "moe_fp8", "per_tensor_dequantize", "calc_diff",
        "make_fp8_moe_alpha_scales_for_fi", "m_grouped_fp8_gemm_nt_contiguous", "scaled_grouped_mm", "silu_and_mul",
        "apply_fi_trtllm_fp8_per_tensor_moe",
    ])  # fmt: skip
    def test_edges(self, contract: str) -> None:
        entry = next(e for e in STORED if e["contract"] == contract and "low" in str(e["tensors"]))
        made = golden.make(entry["id"]).tensors
        case = cases.parse(entry["id"])
        inputs, call = case.inputs(), case.call_options()
        outputs = {n.removeprefix("out.") if n != "out" else n: t for n, t in made.items() if n.split(".")[0] == "out"}
        for arch in entry["numerics"]:
            for name in outputs:
                low, high, free = (made[f"{role}.{arch}.{name}"] for role in ("low", "high", "free"))

                def judged(out: torch.Tensor, name: str = name, arch: str = arch) -> bool:
                    given = out if list(outputs) == ["out"] else {**outputs, name: out}
                    verdict = get(contract).judge(inputs, given, arch="cpu" if arch == "bits" else arch,
                                                  numerics=None, **call)  # fmt: skip
                    return not verdict.status.is_failure

                assert judged(low) and judged(high), f"{arch} {name}: an edge is refused"
                for edge, up in ((low, False), (high, True)):
                    beyond = stepped(edge, free, up=up)
                    assert beyond is not None, "no constrained element"
                    assert not judged(beyond), f"{arch} {name}: beyond the {'high' if up else 'low'} edge passes"


def stepped(edge: torch.Tensor, free: torch.Tensor, *, up: bool) -> torch.Tensor | None:
    """A copy whose first constrained, finite, nonzero element is one step further out."""
    value = edge if edge.dtype == torch.float64 else decode(edge)
    at = torch.nonzero((free == 0) & torch.isfinite(value) & (value != 0))
    if not at.shape[0]:
        return None
    index = tuple(at[0].tolist())
    bits = edge.clone().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[edge.itemsize])
    away = (float(value[index]) > 0) == up
    bits[index] += 1 if away else -1
    moved = bits.view(edge.dtype)
    assert bool((moved.double()[index] > value[index]) == up)
    return moved


class TestSpoiled:
    """Each fault is named in one line, exit 2."""

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda f: flip(f / "golden" / STORED[0]["file"]), STORED[0]["file"]),
            (lambda f: flip(f / "golden" / "layout" / "row_orders.json", 40), "row_orders.json"),
            (lambda f: flip(f / "captures" / "manifest.json", -2), "manifest.json"),
            (lambda f: (f / "golden" / STORED[-1]["file"]).unlink(), "no such file"),
            (lambda f: (f / "golden" / golden.MANIFEST).unlink(), "no such file"),
            (lambda f: (f / seal.FILE).unlink(), "no such file"),
            (lambda f: (f / "golden" / "stray.safetensors").write_bytes(b""), "not in manifest.json"),
            (lambda f: (f / "stray.txt").write_bytes(b""), "not in SHA256SUMS"),
            (lambda f: respell(f, lambda m: m.update(schema="fp8-oracle.golden/2")), "newer version"),
            (lambda f: respell(f, lambda m: m.update(schema="other/1")), "'other/1'"),
            (lambda f: respell(f, lambda m: m.update(generator="somebody")), "'somebody'"),
            (lambda f: respell(f, lambda m: m["cases"][0].pop("seed")), "a case holds"),
            (lambda f: respell(f, lambda m: m["cases"][0].update(seed=99)), "seed is 99"),
            (lambda f: respell(f, lambda m: m["cases"][0].update(id="nothing/at/all")), "cannot be made again"),
            (lambda f: respell(f, lambda m: m["cases"][0]["tensors"]["out"].__setitem__(3, "00")), "tensor out"),
            (lambda f: (f / "golden" / golden.MANIFEST).write_text("{"), "not valid JSON"),
        ],
    )  # fmt: skip
    def test_named(self, copy: Path, cli: Cli, spoil: Callable[[Path], object], said: str) -> None:
        spoil(copy)
        ran = cli("fixtures", "check", "--fixtures", copy)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert said in ran.err

    @settings(max_examples=40)
    @given(st.data())
    def test_every_flipped_bit(self, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject) -> None:
        """Any bit of any file, the list of digests included."""
        folder = tmp_path_factory.mktemp("sealed")
        names = sorted(str(p.relative_to(GOLDEN)) for p in GOLDEN.rglob("*") if p.is_file())[:6]
        for name in ["manifest.json", *names]:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(GOLDEN / name, folder / name)
        seal.write(folder)
        seal.check(folder)
        victim = draw.draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
        content = bytearray(victim.read_bytes())
        content[draw.draw(st.integers(0, len(content) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
        victim.write_bytes(content)
        with pytest.raises(FixtureError):
            seal.check(folder)

    def test_a_change_that_is_meant_can_be_sealed(self, copy: Path, cli: Cli) -> None:
        path = copy / "known_failures.json"
        path.write_text(path.read_text().rstrip("\n") + "\n\n")
        with pytest.raises(FixtureError, match="known_failures.json"):
            seal.check(copy)
        assert "written" in cli("fixtures", "seal", "--fixtures", copy).out
        assert "as it was" in cli("fixtures", "seal", "--fixtures", copy).out
        seal.check(copy)

    def test_other_bits_than_the_regenerated(self, copy: Path) -> None:
        """A file whose digests are all consistent, but whose content is not what its id gives."""
        folder = copy / golden.FOLDER
        entry = next(e for e in STORED if e["id"] == SOME)
        tensors = fixtures.read_tensors(folder / entry["file"])
        tensors["out"] = tensors["out"] + 1
        digest = fixtures.write_tensors(folder / entry["file"], tensors)

        def change(manifest: dict[str, Any]) -> None:
            own = next(e for e in manifest["cases"] if e["id"] == SOME)
            own["sha256"] = digest
            own["tensors"]["out"][3] = golden.described(tensors["out"])[3]

        respell(copy, change)
        with pytest.raises(FixtureError, match="tensor out is"):
            golden.check(folder)

    def test_a_header_that_begins_like_a_pickle(self, tmp_path: Path) -> None:
        """A safetensors header of 0x480 bytes has the first two bytes of a pickle; it is read all the same."""
        for length in range(900, 1200):
            tensors = {"x" * length: torch.zeros(1)}
            content = fixtures.tensor_bytes(tensors)
            if content[:2] == b"\x80\x04":
                (tmp_path / "x.safetensors").write_bytes(content)
                assert fixtures.read_tensors(tmp_path / "x.safetensors").keys() == tensors.keys()
                return
        pytest.fail("no header of that length was made")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "goldens"
    golden_export.export(GOLDEN, folder)
    return folder


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory, exported: Path) -> Path:
    """The C program, compiled against the exported header alone."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc in PATH")
    program = tmp_path_factory.mktemp("vendor") / "exchange"
    source = ROOT / "tests" / "exchange.c"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{exported}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program), "-lm"], check=True)
    return program


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a JSON schema made of the keywords that this one uses."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
    known = {"$schema", "title", "type", "required", "additionalProperties", "properties", "items", "const", "enum",
             "minimum", "multipleOf", "pattern"}  # fmt: skip
    assert set(schema) <= known
    named = schema.get("type", [])
    if named and not isinstance(value, tuple(kinds[k] for k in ([named] if isinstance(named, str) else named))):
        return False
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
    ok = value == schema.get("const", value) and value in schema.get("enum", [value])
    if isinstance(value, dict):
        ok &= set(schema.get("required", ())) <= set(value)
        ok &= rest is not False or set(value) <= set(properties)
        ok = ok and all(fits(v, properties.get(k, rest or {})) for k, v in value.items())
    elif isinstance(value, list):
        ok = ok and all(fits(v, schema.get("items", {})) for v in value)
    elif isinstance(value, int):
        ok &= value >= schema.get("minimum", value) and value % schema.get("multipleOf", 1) == 0
    elif isinstance(value, str):
        ok &= re.search(schema.get("pattern", ""), value) is not None
    return bool(ok)


class TestExport:
    """A folder that explains itself: plain-text index, C header, JSON that fits its schema, digests of all."""

    def test_manifest_fits_its_schema(self, exported: Path) -> None:
        manifest, schema = (json.loads((exported / name).read_text()) for name in ("manifest.json", "schema.json"))
        assert fits(manifest, schema)
        for spoiled in ({**manifest, "alignment": 32}, {**manifest, "more": 1}, {**manifest, "cases": [{}]}):
            assert not fits(spoiled, schema)

    def test_nothing_needs_this_package(self, exported: Path) -> None:
        """Index, offsets and bytes alone give every stored tensor."""
        by_slug = {golden.slug(e["id"]): e for e in STORED}
        seen = 0
        for line in (exported / "INDEX.txt").read_text().splitlines():
            if not line.startswith("#"):
                case, _, name, _, _, offset, size = line.split("\t")
                raw = (exported / "data" / f"{case}.bin").read_bytes()[int(offset) : int(offset) + int(size)]
                stored = fixtures.read_tensors(GOLDEN / by_slug[case]["file"])[name]
                assert raw == golden.raw_bytes(stored)
                seen += 1
        assert seen == sum(len(e["tensors"]) for e in STORED)

    def test_a_folder_that_is_not_empty_is_refused(self, exported: Path, cli: Cli) -> None:
        ran = cli("fixtures", "export", exported)
        assert (ran.status, "not an empty folder" in ran.err) == (2, True)

    def test_one_contract_with_its_large_cases(self, tmp_path: Path, cli: Cli) -> None:
        ran = cli("fixtures", "export", tmp_path / "x", "--contract", "fp8_gemm_nt", "--all")
        assert ran.status == 0, ran.err
        assert len(ran.out.splitlines()) == sum(e["contract"] == "fp8_gemm_nt" for e in ENTRIES)

    def test_several_contracts(self, tmp_path: Path, cli: Cli) -> None:
        two = {"align", "ceil_div"}
        flags = [word for name in two for word in ("--contract", name)]
        assert cli("fixtures", "export", tmp_path / "x", *flags).status == 0
        manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
        assert {case["contract"] for case in manifest["cases"]} == two
        ran = cli("fixtures", "export", tmp_path / "y", *flags, "--contract", "nothing")
        assert (ran.status, "no stored golden of nothing" in ran.err) == (2, True)


class TestExchange:
    """What a vendor sends back is judged; a C program that knows only the folder takes part."""

    def test_a_vendor_in_c(self, exported: Path, vendor: Path, tmp_path: Path, cli: Cli) -> None:
        """It computes every dense product itself and copies the rest: all admissible; a spoiled element is found."""
        ran = subprocess.run([vendor, exported, tmp_path], check=True, capture_output=True, text=True)
        assert f"{sum(e['contract'] == 'fp8_gemm_nt' for e in STORED)} products computed" in ran.stdout
        judged = cli("fixtures", "judge", exported, "--outputs", tmp_path, "--whole")
        assert judged.status == 0, judged.out
        assert f"{len(STORED)} of {len(STORED)} cases came back, 0 not admissible" in judged.out

    def test_a_spoiled_answer(self, exported: Path, vendor: Path, tmp_path: Path, cli: Cli) -> None:
        """The sabotaged twin: one bit of one element."""
        entry = next(e for e in STORED if "fp8_gemm_nt" in e["id"] and "family=randn" in e["id"])
        subprocess.run([vendor, exported, tmp_path, golden.slug(entry["id"])], check=True, capture_output=True)
        judged = cli("fixtures", "judge", exported, "--outputs", tmp_path, "--json", tmp_path.parent / "j.json")
        assert judged.status == 1
        assert f"FAILED {golden.slug(entry['id'])}" in judged.out
        record = json.loads((tmp_path.parent / "j.json").read_text())
        assert record["cases"][golden.slug(entry["id"])]["verdict"]["outside"] == 1

    def answer(self, folder: Path, case_id: str) -> Path:
        entry = next(e for e in STORED if e["id"] == case_id)
        stored = fixtures.read_tensors(GOLDEN / entry["file"])
        path = folder / f"{golden.slug(case_id)}.safetensors"
        fixtures.write_tensors(path, {n: t for n, t in stored.items() if entry["tensors"][n][0] == "expected"})
        return path

    @pytest.mark.parametrize(
        "contract", ["per_token_group_quant_fp8", "get_col_major_tma_aligned_tensor", "moe_routing"]
    )
    def test_safetensors(self, contract: str, exported: Path, tmp_path: Path, cli: Cli) -> None:
        case_id = next(e["id"] for e in STORED if e["contract"] == contract)
        self.answer(tmp_path, case_id)
        ran = cli("fixtures", "judge", exported, "--outputs", tmp_path)
        assert ran.status == 0, ran.out
        assert f"1 of {len(STORED)} cases came back" in ran.out
        assert cli("fixtures", "judge", exported, "--outputs", tmp_path, "--whole").status == 1

    def test_nothing_came(self, exported: Path, tmp_path: Path, cli: Cli) -> None:
        assert cli("fixtures", "judge", exported, "--outputs", tmp_path).status == 1

    def test_an_arch_without_a_model(self, exported: Path, tmp_path: Path, cli: Cli) -> None:
        self.answer(tmp_path, next(e["id"] for e in STORED if e["contract"] == "fp8_gemm_nt"))
        ran = cli("fixtures", "judge", exported, "--outputs", tmp_path, "--arch", "gfx942")
        assert "UNSUPPORTED" in ran.out and "gfx942" in ran.out
        assert (ran.status, "NOT JUDGED" in ran.out, "1 not judged" in ran.out) == (2, True, True)

    def test_the_sign_of_a_zero_code(self, exported: Path, tmp_path: Path, cli: Cli) -> None:
        """As the folder's own rules say: the sign counts in an output of codes, and nowhere else."""
        assert "except in an output of codes" in (exported / "README.md").read_text()
        for contract, name, status in (("per_token_group_quant_fp8", "out.q", 1), ("fp8_mqa_logits", "out", 0)):
            folder, zeros = tmp_path / contract, 0
            folder.mkdir()
            for entry in (e for e in STORED if e["contract"] == contract):
                path = self.answer(folder, entry["id"])
                answers = fixtures.read_tensors(path)
                out = answers[name]
                at = decode(out) == 0
                zeros += int(at.sum())
                bits, sign = codes_of(out), torch.tensor(1 << (8 * out.element_size() - 1)).to(codes_of(out).dtype)
                fixtures.write_tensors(path, {**answers, name: torch.where(at, bits ^ sign, bits).view(out.dtype)})
            ran = cli("fixtures", "judge", exported, "--outputs", folder)
            assert zeros and ran.status == status, ran.out

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda f, p: (f / "readme.txt").write_text("hello"), "answers no case"),
            (lambda f, p: (f / f"{p.stem}.out.bin").write_bytes(b"12"), "answers the same case"),
            (lambda f, p: (p.unlink(), (f / f"{p.stem}.out.bin").write_bytes(b"12")), "2 bytes"),
            (lambda f, p: p.write_bytes(b"hello, this is nothing"), "not a safetensors file"),
            (lambda f, p: fixtures.write_tensors(p, {"result": torch.zeros(1)}), "holds result"),
        ],
    )
    def test_refused(
        self, exported: Path, tmp_path: Path, cli: Cli, spoil: Callable[[Path, Path], object], said: str
    ) -> None:
        spoil(tmp_path, self.answer(tmp_path, SOME))
        ran = cli("fixtures", "judge", exported, "--outputs", tmp_path)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert said in ran.err

    def test_half_of_a_quantiser(self, exported: Path, tmp_path: Path, cli: Cli) -> None:
        slug = golden.slug(next(e["id"] for e in STORED if e["contract"] == "scaled_fp8_quant"))
        (tmp_path / f"{slug}.out.q.bin").write_bytes(b"")
        ran = cli("fixtures", "judge", exported, "--outputs", tmp_path)
        assert (ran.status, "send all outputs" in ran.err) == (2, True)

    def test_an_exported_folder_that_was_changed(self, exported: Path, tmp_path: Path, cli: Cli) -> None:
        folder = shutil.copytree(exported, tmp_path / "copy")
        flip(next((folder / "data").iterdir()))
        ran = cli("fixtures", "judge", folder, "--outputs", tmp_path)
        assert (ran.status, "sha256" in ran.err) == (2, True)
