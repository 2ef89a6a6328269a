"""The count of what libraries offer and nothing here describes, on a small library that is written for it."""

from __future__ import annotations

import struct
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from oracle.bindings import exemptions, installed, missing
from oracle.bindings.installed import Routine
from oracle.bindings.known import bindings
from oracle.bindings.missing import PROJECTS, Survey, kind_of, survey
from oracle.errors import OptionError
from oracle.routines import registered
from tests.support.commandline import Cli

SOURCES = {
    "__init__.py": """
from small import _C
num_sms = _C.num_sms
fp8_gemm_from_binary = _C.fp8_gemm_from_binary
""",
    "gemm.py": """
import torch
try:
    def fp8_gemm_nt(a, a_scale, d, fast=True): pass
    fp8_gemm_same = fp8_gemm_nt
except ImportError:
    pass
def mm_fp8(a: torch.Tensor, alpha: torch.Tensor | None = None): pass
def mm(a: torch.Tensor): pass
def choose_fp8_backend(name: str): pass
def _private_fp8(a: torch.Tensor): pass
@triton.jit
def fp8_kernel(a: torch.Tensor): pass
@torch.library.custom_op("small::quantise_rows_fp8", mutates_args=())
def _rows(x: torch.Tensor) -> torch.Tensor: pass
lib.define("pack_mxfp4(Tensor x, Tensor(a!) out) -> ()")
""",
    "attention.py": """
class BatchMLAFp8Wrapper:
    def run(self, q: Tensor, k_scale: Tensor): pass
class Layer:
    def forward(self, q: Tensor, k_scale: Tensor): pass
def scaled_dot_product_attention(q: Tensor): pass
def append(kv_cache: Tensor): pass
def append_rows(kv_cache: Tensor): pass
def decode_rows(kv_cache: Tensor): pass
def topk_experts(logits: Tensor): pass
""",
    "tests/test_gemm.py": "def fp8_of_a_test(a: Tensor): pass\n",
    "later.py": "def f(: this is no Python\n",
}
COUNTED = {
    "fp8_gemm_from_binary": "product",
    "fp8_gemm_nt": "product",
    "fp8_gemm_same": "product",
    "mm_fp8": "product",
    "quantise_rows_fp8": "quantisation",
    "pack_mxfp4": "layout",
    "BatchMLAFp8Wrapper": "attention",
    "decode_rows": "attention",
    "topk_experts": "expert",
    "compiled_quant_fp8": "quantisation",
}


def elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file of these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    contents = [b"", *sections.values(), names]
    header, places, at = 64, [], 64
    for content in contents:
        places.append(at)
        at += len(content)
    table = b""
    for name, place, content in zip(("", *sections, ".shstrtab"), places, contents, strict=True):
        table += struct.pack(
            "<IIQQQQIIQQ", names.index(name.encode() + b"\0"), 1, 0, 0, place, len(content), 0, 0, 1, 0
        )
    start = b"\x7fELF\x02\x01\x01" + bytes(33) + struct.pack("<Q", at) + bytes(4)
    start += struct.pack("<HHHHHH", header, 0, 0, 64, len(contents), len(contents) - 1)
    return start.ljust(header, b"\0") + b"".join(contents) + table


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked wheel of the library ``small``."""
    for name, text in SOURCES.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    schema = b"\0compiled_quant_fp8(Tensor! out, Tensor x, int n=1) -> ()\0helper(int n) -> int\0"
    data = {".text": b"code_fp8(Tensor a) -> ()\0", ".rodata": schema}
    (tmp_path / "small" / "_C.so").write_bytes(elf(data))
    (tmp_path / "small" / "empty.so").write_bytes(b"")
    monkeypatch.setitem(missing.PROJECTS, "small", missing.Project("small", ("small",), "pip install small"))
    monkeypatch.setattr(missing, "EXEMPT", {"small": {"small.gemm:mm_*": "a reason", "*:gone": "none"}, "*": {}})
    return tmp_path


def counted(wheel: Path) -> Survey:
    found = survey(PROJECTS["small"], wheel)
    assert found is not None
    return found


class TestSurvey:
    """What is read off the files, and what is made of it."""

    def test_what_counts(self, wheel: Path) -> None:
        found = counted(wheel)
        assert found.kinds == COUNTED
        assert found.contract == ("fp8_gemm_nt",), "a contract has this name"
        assert found.exempt == {"mm_fp8": "a reason"} and found.unused == ("*:gone",)
        assert found.unread == ("small/later.py",)
        assert {*found.missing, *found.contract, *found.exempt, *found.bound} == {*found.kinds}

    def test_a_routine_that_is_added_is_missing(self, wheel: Path) -> None:
        """The negative test: in Python, and as a schema in a compiled library."""
        before = counted(wheel).missing
        (wheel / "small" / "more.py").write_text("def nvfp4_cast(x: Tensor): pass\n")
        (wheel / "small" / "more.so").write_bytes(elf({".rodata": b"\0lib::mxfp8_pad.out(Tensor x) -> Tensor\0"}))
        found = counted(wheel)
        assert {*found.missing} - {*before} == {"nvfp4_cast", "mxfp8_pad"}
        assert (found.kinds["nvfp4_cast"], found.kinds["mxfp8_pad"]) == ("quantisation", "padding")

    def test_a_binding_counts_for_its_library_alone(self, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        one = next(one for one in bindings() if one.contract == "fp8_gemm_nt")
        for target, due in (("other:decode_rows", False), ("small.attention:decode_rows", True)):
            monkeypatch.setattr(missing, "bindings", lambda of=target: (replace(one, target=of),))
            assert ("decode_rows" in counted(wheel).bound) is due

    def test_an_exemption_of_one_place_leaves_the_other(self, wheel: Path) -> None:
        (wheel / "small" / "again.py").write_text("def mm_fp8(a: Tensor): pass\n")
        assert "mm_fp8" in counted(wheel).missing

    def test_an_alias_is_described(self, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By its contract; a name that no contract has describes nothing."""
        for contract, due in (("mha_fwd", True), ("mha_nothing", False)):
            monkeypatch.setattr(missing, "ALIASES", {"small": {"decode_rows": contract}})
            assert ("decode_rows" in counted(wheel).contract) is due

    def test_absent(self, tmp_path: Path) -> None:
        assert survey(PROJECTS["vllm"], tmp_path) is None


class TestRule:
    """One rule selects routines, by words."""

    @pytest.mark.parametrize(
        ("name", "tensors", "kind"),
        [
            ("cutlass_scaled_mm", ("a",), "product"),
            ("nvfp4_kv_quantize", ("x",), "attention"),
            ("quantile", ("x",), None),
            ("cpu_unquantized_gemm", ("x",), None),
            ("scaled_masked_softmax", ("x",), None),
            ("gemm", ("a", "a_scale"), "product"),
            ("gemm", ("a", "softmax"), None),
            ("copy", ("src_cache",), "quantisation"),
            ("rope", ("cos_sin_cache",), None),
            ("moe_sum", ("x",), "expert"),
        ],
    )
    @pytest.mark.whole("a look-up of words")
    def test_words(self, name: str, tensors: tuple[str, ...], kind: str | None) -> None:
        assert kind_of(Routine(name, "lib", tensors)) == kind

    def test_what_is_bound_is_counted(self) -> None:
        """Of bindings of this suite the rule misses helpers of sizes, the difference measure, merged states of any
        precision, integers, layouts and orders of rows that name no precision, a tensor of codes, and ``fwd`` alone."""
        those = [Routine(missing.leaf(one.target), "", tuple(one.parameters.parameters)) for one in bindings()]
        assert {one.name for one in those if kind_of(one) is None} == {
            "NVFP4Tensor", "ceil_div", "align", "calc_diff", "merge_state", "merge_state_v2", "marlin_zero_points",
            "to_blocked", "fwd", "from_blocked", "reorder_rows_for_gated_act_gemm", "scale_activations_per_block",
            "shuffle_matrix_a", "silu_and_mul", "torch_pad_token_groups", "torch_unpad_token_groups",
            "triton_mx_block_rearrange", "triton_mx_block_rearrange_2d_K_groups",
            "triton_mx_block_rearrange_2d_M_groups",
        }  # fmt: skip  # the names, one row

    def test_every_exemption_is_of_a_project(self) -> None:
        assert {*exemptions.EXEMPT} <= {*PROJECTS, exemptions.ANY}
        assert all(":" in row for rows in exemptions.EXEMPT.values() for row in rows)

    def test_an_alias_names_a_contract(self) -> None:
        """And none where a contract or a binding has the name itself."""
        called = {missing.leaf(one.target) for one in bindings() if one.target.startswith("torch:ops")}
        for project, rows in exemptions.ALIASES.items():
            assert project in PROJECTS and {*rows.values()} <= {*registered()}
            assert not {*rows} & {*registered(), *called}

    def test_no_exemption_hides_a_binding(self) -> None:
        """A row that names what a binding calls would be wrong about it."""
        for one in bindings():
            for rows in exemptions.EXEMPT.values():
                assert not any(fnmatchcase(one.target, row) for row in rows if not row.startswith("*")), one.target


class TestInstalled:
    def test_torch_is_read(self) -> None:
        """The schemas of the installed PyTorch."""
        package = installed.folder("torch")
        assert package is not None
        found = {one.name: one for one in installed.compiled(package / "lib" / "libtorch_cpu.so", "torch")}
        assert found["_scaled_mm"].tensors[:4] == ("self", "mat2", "scale_a", "scale_b")


def test_the_command(cli: Cli, wheel: Path) -> None:
    ran = cli("list", "--missing", "--project", "small", "--from", str(wheel))
    assert ran.status == 1
    assert "small: product: small:fp8_gemm_from_binary(...)" in ran.out
    assert "small: 1 exempt, a reason: mm_fp8" in ran.out
    assert "small: exemption or alias names nothing: *:gone" in ran.out
    assert "small: file is not read by this Python: small/later.py" in ran.out
    absent = cli("list", "--missing", "--project", "vllm", "--from", str(wheel))
    assert absent.status == 1 and "vllm: UNSUPPORTED: not in" in absent.out and "pip install" in absent.out
    assert cli("list", "--missing", "--project", "nothing").status == 2
    assert cli("list", "--missing", "--from", str(wheel / "none")).status == 2
    assert cli("list", "--project", "small").status == cli("list", "--missing", "--reach").status == 2


def test_no_such_project() -> None:
    with pytest.raises(OptionError, match="did you mean 'vllm'"):
        missing.project("vlm")
