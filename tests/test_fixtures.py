"""Fixtures: whatever is wrong with a file is named, and a killed writer leaves no half-written one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli
from hypothesis import given
from hypothesis import strategies as st

from oracle import captures, fixtures
from oracle.errors import FixtureError

TENSORS = {
    "a": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128),
    "scale": torch.tensor([1.5, float("nan")]),
    "out": torch.zeros(2, 3, dtype=torch.bfloat16),
}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "stored.safetensors"
    fixtures.write_tensors(path, TENSORS)
    return path


def header_of(content: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: object, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


class TestRoundTrip:
    """What is written is what is read, bit for bit, and equal tensors give equal bytes."""

    def test_bits(self, stored: Path) -> None:
        read = fixtures.read_tensors(stored)
        assert set(read) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))

    def test_digest(self, stored: Path, tmp_path: Path) -> None:
        again = fixtures.write_tensors(tmp_path / "again.safetensors", dict(reversed(TENSORS.items())))
        assert (tmp_path / "again.safetensors").read_bytes() == stored.read_bytes()
        assert fixtures.read_tensors(stored, sha256=again).keys() == TENSORS.keys()

    def test_json(self, tmp_path: Path) -> None:
        fixtures.write_json(tmp_path / "x.json", {"schema": "s/1", "n": 1})
        assert fixtures.read_json(tmp_path / "x.json", schema="s/1")["n"] == 1


class TestRefusedFiles:
    """One FixtureError that names the file and the way out."""

    def refused(self, path: Path, *said: str) -> None:
        with pytest.raises(FixtureError) as caught:
            fixtures.read_tensors(path)
        for word in (str(path), *said):
            assert word in str(caught.value)

    def test_missing(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "none.safetensors", "no such file")

    def test_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "is a folder")

    @pytest.mark.parametrize("zipped", [True, False])
    def test_torch_save(self, tmp_path: Path, zipped: bool) -> None:
        """Whatever the file calls itself: a pickle runs code when it is loaded."""
        path = tmp_path / "model.safetensors"
        torch.save(TENSORS, path, _use_new_zipfile_serialization=zipped)
        self.refused(path, "zip archive" if zipped else "a pickle", "safetensors.torch.save_file")

    def test_numpy(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.zeros(3))
        self.refused(tmp_path / "x.npy", "numpy array")

    def test_suffix(self, tmp_path: Path) -> None:
        (tmp_path / "weights.pt").write_bytes(b"anything at all")
        self.refused(tmp_path / "weights.pt", ".pt files are not read")

    def test_text(self, tmp_path: Path) -> None:
        (tmp_path / "x.safetensors").write_bytes(b"hello, this is not a tensor file")
        self.refused(tmp_path / "x.safetensors", "not a safetensors file")

    @given(st.data())
    def test_every_truncation(self, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject) -> None:
        path = tmp_path_factory.mktemp("cut") / "stored.safetensors"
        fixtures.write_tensors(path, TENSORS)
        content = path.read_bytes()
        path.write_bytes(content[: draw.draw(st.integers(0, len(content) - 1))])
        self.refused(path)

    def test_trailing_bytes(self, stored: Path) -> None:
        stored.write_bytes(stored.read_bytes() + b"\0")
        self.refused(stored, "trailing bytes")

    @given(st.data())
    def test_every_flipped_bit_breaks_the_digest(
        self, tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
    ) -> None:
        path = tmp_path_factory.mktemp("flip") / "stored.safetensors"
        recorded = fixtures.write_tensors(path, TENSORS)
        content = bytearray(path.read_bytes())
        content[draw.draw(st.integers(0, len(content) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
        path.write_bytes(content)
        with pytest.raises(FixtureError, match="sha256"):
            fixtures.read_tensors(path, sha256=recorded)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda h: h["a"].update(data_offsets=[0, 255]), "spans 255 bytes"),
            (lambda h: h["a"].update(data_offsets=[256, 0]), "spans -256 bytes"),
            (lambda h: h["a"].update(shape=[2, 129]), "spans 256 bytes"),
            (lambda h: h["a"].update(shape=[-2, -128]), "shape [-2, -128]"),
            (lambda h: h["a"].update(shape="2x128"), "shape '2x128'"),
            (lambda h: h["a"].update(dtype="F8_MAGIC"), "unknown dtype 'F8_MAGIC'"),
            (lambda h: h["a"].pop("dtype"), "does not have exactly"),
            (lambda h: h["a"].update(data_offsets=h["scale"]["data_offsets"], shape=[8]), "begins at byte"),
            (lambda h: h.pop("scale"), "begins at byte"),
            (lambda h: h.pop("a"), "trailing bytes"),
            (lambda h: h.update(__metadata__=[]), "__metadata__"),
        ],
    )
    def test_a_header_that_lies(
        self, stored: Path, change: Callable[[dict[str, dict[str, object]]], object], said: str
    ) -> None:
        header, rest = header_of(stored.read_bytes())
        change(header)
        stored.write_bytes(with_header(header, rest))
        self.refused(stored, said)

    @pytest.mark.parametrize("header", [[], "x", 3, None])
    def test_a_header_that_is_no_object(self, stored: Path, header: object) -> None:
        stored.write_bytes(with_header(header, b""))
        self.refused(stored)

    def test_an_honest_header_is_accepted(self, stored: Path) -> None:
        """The twin of the lies: taking the header apart and putting it together changes nothing."""
        stored.write_bytes(with_header(*header_of(stored.read_bytes())))
        assert fixtures.read_tensors(stored).keys() == TENSORS.keys()

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "s/2"}', "\udcff"])
    def test_json(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "x.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(FixtureError, match="x.json"):
            fixtures.read_json(tmp_path / "x.json", schema="s/1")

    def test_writing_into_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FixtureError, match="does not exist"):
            fixtures.write_bytes(tmp_path / "none" / "x.json", b"")


KILLED = """
import os, sys, time
from pathlib import Path
from oracle import fixtures
path = Path(sys.argv[1])
def stop(*_):
    print("in the middle", flush=True)
    time.sleep(60)
if sys.argv[2] == "ours":
    os.fsync = stop
    fixtures.write_bytes(path, b"new" * 1000)
else:
    with open(path, "wb") as stream:
        stream.write(b"new" * 500)
        stream.flush()
        stop()
"""


class TestKilledWriter:
    """A killed run leaves the old file or the new one."""

    def killed_while_writing(self, path: Path, how: str) -> None:
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(path), how], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "in the middle\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()

    def test_the_old_file_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "kept.json"
        path.write_bytes(b"old")
        self.killed_while_writing(path, "ours")
        assert path.read_bytes() == b"old"

    def test_a_plain_write_would_have_lost_it(self, tmp_path: Path) -> None:
        """The sabotaged twin: the same kill does destroy a file that is written in place."""
        path = tmp_path / "kept.json"
        path.write_bytes(b"old")
        self.killed_while_writing(path, "in place")
        assert path.read_bytes() not in (b"old", b"new" * 1000)

    def test_the_left_over_is_ignored(self, tmp_path: Path, fixtures_folder: Path) -> None:
        folder = tmp_path / "captures"
        shutil.copytree(fixtures_folder / "captures", folder)
        (folder / ".manifest.json.abc.partial").write_bytes(b"half")
        assert captures.load(folder)

    def test_an_error_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", broken)
        with pytest.raises(FixtureError, match="No space left on device"):
            fixtures.write_bytes(tmp_path / "x", b"x")
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def copy(tmp_path: Path, fixtures_folder: Path) -> Path:
    """A copy of the captures that a test may spoil."""
    folder = tmp_path / "fixtures"
    shutil.copytree(fixtures_folder, folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, dict[str, dict[str, object]]]], object]) -> None:
    path = folder / "captures" / captures.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


DENSE = "h200_dense_m16_n128_k512.safetensors"


class TestCaptures:
    """Every recorded output is accounted for, with its provenance; whatever is spoiled is named, exit 2."""

    def test_as_stored(self, cli: Cli) -> None:
        ran = cli("fixtures", "check")
        assert ran.status == 0, ran.err
        assert "as recorded" in ran.out

    def test_provenance(self, fixtures_folder: Path) -> None:
        for capture in captures.load(fixtures_folder / "captures"):
            said = set(capture.recording.provenance)
            assert {"driver", "cuda"} <= said and said & {"device", "gpu"}, capture.id

    def test_size(self, fixtures_folder: Path) -> None:
        assert sum(p.stat().st_size for p in fixtures_folder.rglob("*") if p.is_file()) < 15 * 2**20

    def test_rebuilding_gives_the_same_files(self, copy: Path, tmp_path: Path) -> None:
        recorded = tmp_path / "recorded"
        recorded.mkdir()
        manifest = json.loads((copy / "captures" / captures.MANIFEST).read_text())
        imported = {name: entry for name, entry in manifest["files"].items() if "source" in entry}
        assert imported and len(imported) < len(manifest["files"])
        for name, entry in imported.items():
            back = {new: old for old, new in entry["source"].get("rename", {}).items()}
            added = entry["source"].get("ones", {})
            tensors = fixtures.read_tensors(copy / "captures" / name)
            raw = {back.get(key, key): value for key, value in tensors.items() if key not in added}
            fixtures.write_tensors(recorded / entry["source"]["file"], raw)
        captures.rebuild(copy / "captures", recorded)
        assert json.loads((copy / "captures" / captures.MANIFEST).read_text()) == manifest

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda f: (f / "captures" / DENSE).unlink(), "no such file"),
            (lambda f: (f / "captures" / "stray.safetensors").write_bytes(b""), "not in manifest.json"),
            (lambda f: (f / "captures" / captures.MANIFEST).unlink(), "no such file"),
            (lambda f: edit(f, lambda m: m.update(schema="fp8-oracle.captures/2")), "captures/2"),
            (lambda f: edit(f, lambda m: m["files"][DENSE].pop("arch")), "'arch'"),
            (lambda f: edit(f, lambda m: m["files"][DENSE].update(sha256="00")), "sha256"),
            (
                lambda f: edit(f, lambda m: m["files"][DENSE]["outputs"].pop("out.deep_gemm.fp8_gemm_nt")),
                "'out.deep_gemm.fp8_gemm_nt' is not in manifest.json",
            ),
            (lambda f: (f / "known_failures.json").write_text("[]"), "not an object"),
        ],
    )
    def test_spoiled(self, copy: Path, cli: Cli, spoil: Callable[[Path], object], said: str) -> None:
        spoil(copy)
        ran = cli("fixtures", "check", "--fixtures", copy)
        assert (ran.status, ran.err.count("\n")) == (2, 1)
        assert said in ran.err

    def test_one_flipped_bit(self, copy: Path, cli: Cli) -> None:
        path = copy / "captures" / DENSE
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        for command in (("fixtures", "check"), ("verify", "--case", f"captures/{path.stem}/out.deep_gemm.fp8_gemm_nt")):
            ran = cli(*command, "--fixtures", copy)
            assert ran.status == 2
            assert DENSE in ran.err

    def test_a_manifest_that_names_another_tensor(self, copy: Path, cli: Cli) -> None:
        outputs = "out.deep_gemm.fp8_gemm_nt"
        edit(copy, lambda m: m["files"][DENSE]["outputs"][outputs]["inputs"].update(a="nothing"))  # type: ignore[index,attr-defined]
        ran = cli("verify", "--case", f"captures/{Path(DENSE).stem}/{outputs}", "--fixtures", copy)
        assert ran.status == 2
        assert "no tensor 'nothing'" in ran.err


class TestFolder:
    """Where the fixtures live, and what an installation without them says."""

    def test_environment(self, fixtures_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FP8_ORACLE_FIXTURES", str(fixtures_folder))
        assert fixtures.folder() == fixtures_folder

    def test_parents_of_the_current_folder(self, fixtures_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FP8_ORACLE_FIXTURES", raising=False)
        monkeypatch.chdir(fixtures_folder / "captures")
        assert fixtures.folder() == fixtures_folder

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FixtureError, match="no such fixtures folder"):
            fixtures.folder(tmp_path / "none")

    def test_nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FP8_ORACLE_FIXTURES", raising=False)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(fixtures, "__file__", str(tmp_path / "site-packages" / "oracle" / "fixtures.py"))
        with pytest.raises(FixtureError, match="--fixtures"):
            fixtures.folder()
