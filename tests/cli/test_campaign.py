"""A campaign of hostile input against every reader and every public callable: one typed line, or a right answer.

Each kind of input is drawn from a seeded generator, so a number names an input for ever. ``FP8_ORACLE_CAMPAIGN`` is the
size of the campaign as a fraction of its full size, which is 1; CI runs three hundredths, any other run one. All of it:

    FP8_ORACLE_CAMPAIGN=1 python -m pytest tests/cli/test_campaign.py -q -s

``FP8_ORACLE_CAMPAIGN_PART=3/16`` tries every sixteenth input, from the fourth: sixteen such runs are the whole.
``FP8_ORACLE_CAMPAIGN_ONLY=12697,11019`` tries these inputs again.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import sqlite3
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from reports import every_status

from oracle.cli import main
from oracle.fixtures import files as fixtures
from oracle.report import record
from oracle.report.files import to_json

SIZE = float(os.environ.get("FP8_ORACLE_CAMPAIGN", "0.01"))
FULL = {"records": 1000, "files": 1000, "databases": 500, "layer": 85_000, "oracle": 15_000, "kernels": 200}
PART, PARTS = (int(text) for text in os.environ.get("FP8_ORACLE_CAMPAIGN_PART", "0/1").split("/"))
AGAIN = [int(text) for text in os.environ.get("FP8_ORACLE_CAMPAIGN_ONLY", "").split(",") if text]
SECONDS = 20.0  # that one input may take before it counts as a hang
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
GEMM = "fp8_gemm_nt"


def numbers(kind: str) -> Sequence[int]:
    """The inputs of a kind that this run tries."""
    return AGAIN or range(max(1, round(FULL[kind] * SIZE)))[PART::PARTS]


class Tally:
    """What became of the inputs of a kind; anything but a typed end is listed, and fails the test."""

    def __init__(self, kind: str) -> None:
        self.kind, self.ends, self.wrong = kind, Counter[str](), list[str]()

    def try_(self, what: str, action: Callable[[], str]) -> None:
        start = time.perf_counter()
        try:
            self.ends[action()] += 1
        except BaseException as error:
            if type(error) is KeyboardInterrupt:
                raise
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.wrong.append(f"{what}: {type(error).__name__}: {error!s:.200} ({at.filename}:{at.lineno})")
        if (took := time.perf_counter() - start) > SECONDS:
            self.wrong.append(f"{what}: took {took:.1f} s")

    def done(self) -> None:
        tried = sum(self.ends.values()) + len(self.wrong)
        print(f"\n{self.kind}: {tried} tried, {len(self.wrong)} wrong; {dict(self.ends)}")
        assert not self.wrong, "\n".join(self.wrong[:20])


def command(*arguments: object) -> tuple[int, str, str]:
    """A command in this process: status, output and errors; SystemExit, and any other error, goes through."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


def ended(*arguments: object) -> str:
    """How a command ended; an error where it is not one line, or where control characters reach the terminal."""
    status, out, err = command(*arguments)
    assert status in (0, 1, 2), f"status {status}"
    assert CONTROL.search(out + err) is None, "a control character is printed"
    assert status != 2 or (out == "" and err.count("\n") == 1 and err.startswith("fp8-oracle: error: ")), (out, err)
    return f"{arguments[0]} {status}"


# --- JSON ----------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**63,
    2**63 - 1,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "x",
    "PASSED",
    "CRASHED",
    "nan",
    "-inf",
    "\x1b[2J\x9b\r\x00",
    "\ud800",
    "é\u202e",
    "a\nb",
    "9" * 5000,
    [],
    {},
    [[]],
    [1, 2, 3],
    ["x"],
    {"x": 1},
    {"": None},
    [None] * 70,
    "<script>",
    "\\u0000",
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside ``value``."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from places(inner, (*at, name))


def spoilt(value: Any, rng: random.Random) -> Any:
    """A copy with one to three values replaced, removed, added, repeated or moved."""
    whole = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.choice(list(places(whole))[1:])
        parent: Any = whole
        for name in at[:-1]:
            parent = parent[name]
        how = rng.choice(("replace", "replace", "replace", "remove", "add", "repeat", "move"))
        if how == "replace":
            parent[at[-1]] = copy.deepcopy(rng.choice(VALUES))
        elif how == "remove" and len(at) > 1:
            del parent[at[-1]]
        elif how == "add" and isinstance(parent, dict):
            parent[rng.choice(("more", "", "\x1b", "kind", "schema"))] = copy.deepcopy(rng.choice(VALUES))
        elif how == "repeat" and isinstance(parent, list) and len(at) > 1:
            parent.append(copy.deepcopy(parent[at[-1]]))
        elif how == "move":
            source: Any = whole
            for name in rng.choice(list(places(whole))[1:]):
                source = source[name]
            parent[at[-1]] = copy.deepcopy(source)
    return whole[0]


def bent(content: bytes, rng: random.Random) -> bytes:
    """Bytes with some cut off, repeated, flipped or put in."""
    how, at = rng.randrange(4), rng.randrange(len(content) + 1)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + content[rng.randrange(len(content)) :]
    if how == 2:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 3, 30))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    return content[:at] + rng.randbytes(rng.choice((1, 8, 1000))) + content[at:]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No descriptor stays open; commands run in a folder without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def lines_of_a_record(path: Path) -> list[Any]:
    report = every_status()
    recorder = record.start(path, record.Run("2026", {}, {"a": "1"}, {}, 30), resume=False)
    for i, found in enumerate(report.outcomes):
        recorder.append(f"{i:032x}", found)
    recorder.end(report.complaints, report.seconds, report.unfinished)
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.turns(4)
def test_records(tmp_path: Path) -> None:
    """``report`` in all its forms, ``compare`` and ``history``; a history that took one can still be shown."""
    good, bad, base = tmp_path / "good.jsonl", tmp_path / "bad.json", tmp_path / "history.db"
    lines, report = lines_of_a_record(good), json.loads(to_json(every_status()))
    command("history", "add", good, "--db", base)
    forms = [word for name in ("html", "markdown", "junit", "json") for word in (f"--{name}", tmp_path / "made")]
    tally = Tally("records")
    for number in numbers("records"):
        rng = random.Random(number)
        if number % 2:
            content = json.dumps(spoilt(report, rng)).encode()
        else:
            content = b"".join(json.dumps(line).encode() + b"\n" for line in spoilt(lines, rng) or [0])
        bad.write_bytes(bent(content, rng) if number % 5 == 0 else content)
        for asked in (
            ("report", bad, *forms),
            ("compare", bad, good),
            ("compare", good, bad, "-v", "--json", "made"),
            ("history", "add", bad, "--db", base),
        ):
            tally.try_(f"record {number} {asked[0]}", lambda asked=asked: ended(*asked))
        tally.try_(f"history after record {number}", lambda: ended("history", "show", "--db", base, "--html", "made"))
        assert tally.wrong or command("history", "show", "--db", base)[0] == 0, f"record {number} poisons a history"
    left = {path.name for path in tmp_path.iterdir()} - {"good.jsonl", "bad.json", "history.db", "made"}
    assert not left
    tally.done()


def test_databases(tmp_path: Path) -> None:
    """``history show`` and ``add`` on files that are no history, or hold what SQLite lets them hold."""
    good, base, bad = tmp_path / "good.jsonl", tmp_path / "history.db", tmp_path / "bad.db"
    lines_of_a_record(good)
    command("history", "add", good, "--db", base)
    content, tally = base.read_bytes(), Tally("databases")
    values = [
        None,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        1e308,
        -1e308,
        float("inf"),
        "",
        "x",
        "\x1b[2J",
        b"\xff",
        "PASSED",
        "[]",
        "{",
        '{"fp8-oracle": 3}',
        '{"fp8-oracle": "\\ud800"}',
        "1",
        "null",
    ]
    changes = [
        "DROP TABLE outcomes",
        "DROP INDEX outcomes_of_run",
        "ALTER TABLE runs ADD COLUMN more",
        "CREATE VIEW v AS SELECT 1",
        "PRAGMA user_version = 2",
        "PRAGMA user_version = -1",
        "DELETE FROM runs",
        "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM outcomes; END",
        "INSERT INTO outcomes SELECT * FROM outcomes",
        "ALTER TABLE runs RENAME COLUMN ok TO fine",
    ]
    for number in numbers("databases"):
        rng = random.Random(number)
        bad.write_bytes(bent(content, rng) if number % 2 else content)
        if number % 2 == 0:
            changed = sqlite3.connect(bad)
            for _ in range(rng.choice((1, 1, 2))):
                table = rng.choice(("runs", "outcomes"))
                column = rng.choice([row[1] for row in changed.execute(f"PRAGMA table_info({table})")] or ["id"])
                try:
                    if rng.random() < 0.8:
                        changed.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (rng.choice(values),))
                    else:
                        changed.execute(rng.choice(changes))
                except sqlite3.Error:  # this change is refused by the database itself; the other ones are made
                    continue
            changed.commit()
            changed.close()
        for asked in (("show", "--html", "made"), ("show", "--contract", "c"), ("add", good)):
            tally.try_(f"database {number} {asked[0]}", lambda asked=asked: ended("history", *asked, "--db", bad))
        for name in ("bad.db-journal", "bad.db-wal", "bad.db-shm"):
            assert not (tmp_path / name).exists()
    tally.done()


# --- tensors in files ----------------------------------------------------------------------------------------


def call_in_a_file() -> tuple[dict[str, Any], bytes]:
    """The header and the data of a small right call of ``fp8_gemm_nt``, as ``validate --save`` writes one."""
    from oracle.fixtures import call_file
    from oracle.routines import cases, get

    case = cases.parse(f"{GEMM}/e4m3xe4m3-bf16/1x128:128x128/m=2,n=16,k=128/family=randn/seed=7")
    inputs, call = case.inputs(), case.call_options()
    out = get(GEMM).reference(inputs, **call)
    assert isinstance(out, torch.Tensor)
    call_file.write("call", call_file.CallFile(GEMM, inputs, out, call, "sm90", None))
    content = Path("call").read_bytes()
    Path("call").unlink()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


DTYPES = list(fixtures.DTYPE_BYTES)
EXTENTS = [0, 1, 2, 3, 16, 128, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -1, True, 1.5, "2", None]


def bent_header(header: dict[str, Any], data: bytes, rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """Half of the time a sound file of other tensors, else one that lies of itself."""
    header = copy.deepcopy(header)
    names = [name for name in header if name != "__metadata__"]
    if rng.random() < 0.5:
        parts, end = [], 0
        for name in names:
            entry = header[name]
            begin, stop = entry["data_offsets"]
            raw = data[begin:stop]
            if rng.random() < 0.35:
                entry["dtype"] = rng.choice(DTYPES)
                width = fixtures.DTYPE_BYTES[entry["dtype"]]
                entry["shape"] = rng.choice(([], [0], [1], [2], [1, 1], [2, 16], [2, 128], [0, 128], [16, 128], [3, 0]))
                size = width
                for n in entry["shape"]:
                    size *= n
                raw = rng.randbytes(size)
            elif rng.random() < 0.3:
                raw = rng.choice((b"\xff", b"\x7f", b"\x00", b"\x80")) * len(raw)
            entry["data_offsets"] = [end, end + len(raw)]
            end += len(raw)
            parts.append(raw)
        data = b"".join(parts)
        if rng.random() < 0.2:
            header[rng.choice(("\x1b[2J", "out.x", "", "memory.a"))] = header.pop(rng.choice(names))
    elif rng.random() < 0.5:
        entry = header[rng.choice(names)]
        key = rng.choice(list(entry))
        entry[key] = rng.choice(
            (
                rng.choice(VALUES),
                [rng.choice(EXTENTS) for _ in range(rng.randrange(4))],
                rng.choice(DTYPES),
                [0, 2**63],
            )
        )
    else:
        header = spoilt(header, rng)
    if isinstance(header, dict) and isinstance(found := header.get("__metadata__"), dict) and rng.random() < 0.5:
        key = rng.choice(("schema", "contract", "options", "arch", "numerics", "strides", "kernel", "\x1b"))
        found[key] = rng.choice(
            (
                "",
                "{}",
                "[]",
                "x\x1b[2J",
                '{"a": [1, 1]}',
                '{"a": [0, 0]}',
                '{"a": [9223372036854775807, 1]}',
                "sm89",
                '{"b": [1, 16]}',
                '{"a": [1e3]}',
                '{"out": [1, 2]}',
                '{"out_dtype": "float64"}',
                '{"out_dtype": NaN}',
                "scaled_fp8_quant",
                "cutlass_scaled_mm",
                "sm90.chain",
                "ieee32.any",
                "sm90.promote128",
                '{"out_dtype": []}',
            )
        )
    return header, data


def test_files(tmp_path: Path) -> None:
    """``judge`` and ``explain`` on safetensors files that lie, and on sound ones of the wrong tensors."""
    (header, data), tally, path = call_in_a_file(), Tally("files"), tmp_path / "x.safetensors"
    for number in numbers("files"):
        rng = random.Random(number)
        text, content = bent_header(header, data, rng)
        head = json.dumps(text).encode()
        whole = len(head).to_bytes(8, "little") + head + content
        path.write_bytes(bent(whole, rng) if number % 5 == 0 else whole)
        asked = rng.choice(
            (
                ("explain", path),
                ("judge", path, "--contract", GEMM),
                ("explain", path, "--contract", GEMM),
                (
                    "judge",
                    path,
                    "--contract",
                    "cutlass_scaled_mm",
                    "--input",
                    "scale_a=a_scale",
                    "--input",
                    "scale_b=b_scale",
                ),
                ("judge", path, "--contract", "per_token_cast_to_fp8", "--input", "x=a"),
                ("identify", path, "--contract", GEMM),
            )
        )
        tally.try_(f"file {number} {asked[0]}", lambda asked=asked: ended(*asked))
    tally.done()


# --- arguments -----------------------------------------------------------------------------------------------


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 3, 128, 2**40, 2**63, 10**30, 1.5, float("nan"), float("inf"), -0.0, "8", "", "x",
    b"x", [1.0], [], (), (1, 2), (128, 128), {}, {"a": 1}, torch.float32, torch.int8, torch.device("cpu"),
    torch.Size([1]), object(), int, len, ..., 1j, range(3), "cuda", "meta:0", torch.float8_e4m3fn, "sm90", "cpu",
    "sm90.promote128", "ieee32.any", ".any", "sm42",
]  # fmt: skip  # a table, one row a line
WIDE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
)


def odd(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A tensor made of another: of another kind, memory, layout, dtype, shape or with other values."""
    from torch._subclasses import FakeTensorMode

    raw = t.to(torch.float32) if t.is_floating_point() else t
    axis = rng.randrange(t.dim()) if t.dim() else None
    how = rng.randrange(24)
    if how == 0:
        return torch.quantize_per_tensor(raw.to(torch.float32), 0.1, 0, torch.quint8)
    if how == 1:
        freed = t.clone()
        freed.untyped_storage().resize_(0)
        return freed
    if how == 2:
        return torch._neg_view(t.clone())
    if how == 3:
        return torch.complex(raw.to(torch.float32), raw.to(torch.float32)).conj()
    if how == 4:
        return torch.complex(raw.to(torch.float32), raw.to(torch.float32)).conj().imag
    if how == 5:
        return FakeTensorMode().from_tensor(t.clone())
    if how == 6:
        return t.clone().as_subclass(Plain)
    if how == 7:
        return torch.nn.Parameter(raw.to(torch.float32))
    if how == 8:
        return torch.tensor(rng.choice((1.0, 3, True)))
    if how == 9:
        return t.to("meta")
    if how == 10:
        return raw.to(torch.float32).to_sparse()
    if how == 11:
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    if how == 12 and 1 <= t.dim() <= 5:  # those that MKL-DNN takes
        return raw.to(torch.float32).to_mkldnn()
    if how == 13:
        with torch.inference_mode():
            return t.clone()
    if how in (14, 15):
        return raw.to(rng.choice(WIDE))
    if how == 16:
        return t.flatten()
    if how == 17:
        return t.unsqueeze(0)
    if how == 18 and axis is not None:
        return t.narrow(axis, 0, min(t.shape[axis], rng.randrange(2)))
    if how == 19 and t.numel():
        return t.flatten()[:1].expand(t.shape or (1,))
    if how == 20 and t.dim() > 1:
        return t.transpose(0, -1)
    if how == 21 and t.numel():
        cut = t.clone()
        cut.untyped_storage().resize_(t.element_size())
        return cut
    value = rng.choice((0, 1, -7, 1e9, float("nan"), float("inf")))
    return torch.full_like(raw, value, dtype=torch.float32).to(t.dtype)


def odd_value(value: Any, rng: random.Random) -> Any:
    """What stands in an argument's place: mostly an odd tensor for a tensor, and any value for any other."""
    if isinstance(value, torch.Tensor) and rng.random() < 0.7:
        return odd(value, rng)
    return rng.choice(SCALARS) if rng.random() < 0.9 else odd(torch.ones(4, 4), rng)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.turns(2)
def test_arguments_of_the_layer() -> None:
    """Every public callable of ``kernels``, one or two arguments of a right call replaced."""
    import inspect

    import kernels
    from kernels import moe_layer
    from kernels.errors import KernelError
    from tests.support.verb_calls import arguments, fresh

    table = [(function, fresh(given)) for function, given in arguments("cpu").values()]
    known = {function for function, _ in table}
    public = [getattr(kernels, name) for name in kernels.__all__ if callable(getattr(kernels, name))]
    public += [moe_layer.route_softmax, moe_layer.route_llama4, moe_layer.moe_block_scaled]
    layer = kernels.Fp8LinearOp(cutlass_supported=False)
    public += [kernels.Fp8LinearOp.apply, kernels.FlashInferFp8DeepGEMMDynamicBlockScaledKernel.apply_block_scaled_mm]
    for function in public:
        if function is kernels.FlashinferMoeBackend:
            # Enum prints what it does not know, and torch reads freed memory to print it: no tensors for this one
            table.append(
                (
                    lambda value, f=function: f(type(value) if isinstance(value, torch.Tensor) else value),
                    {"value": "CUTLASS"},
                )
            )
        elif function not in known:
            given = inspect.signature(function).parameters.values()
            guess = {p.name: 1 if p.default is p.empty else p.default for p in given if p.name != "self"}
            owner = {"self": layer} if "self" in inspect.signature(function).parameters else {}
            if not isinstance(function, type) and owner and "apply_block" in function.__name__:
                owner = {"self": kernels.FlashInferFp8DeepGEMMDynamicBlockScaledKernel()}
            table.append((lambda function=function, owner=owner, **more: function(**owner, **more), guess))
    tally = Tally("arguments of kernels")
    for number in numbers("layer"):
        rng = random.Random(number)
        function, right = rng.choice(table)
        given = dict(right)
        for name in rng.sample(sorted(right), min(len(right), rng.choice((1, 1, 2)))):
            given[name] = odd_value(right[name], rng)

        def call(function: Any = function, given: Any = given) -> str:
            try:
                function(**given)
            except KernelError as error:
                assert str(error)
                return type(error).__name__
            return "answered"

        tally.try_(f"arguments {number} of {function.__name__}", call)
    tally.done()


@pytest.mark.turns(4)
@pytest.mark.filterwarnings("ignore")
def test_arguments_of_the_oracle() -> None:
    """The public verbs of ``oracle``, on the smallest quick case of every contract, spoilt in one or two places."""
    import oracle
    from oracle.errors import OracleError
    from oracle.routines import profiles, registered

    names = [name for name in registered() if profiles.cases(name, "quick")]
    right: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {}

    def call_of(name: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
        if name not in right:
            case = min(profiles.cases(name, "quick")[:8], key=lambda case: prod(dict(case.extents).values()))
            inputs, options = case.inputs(), case.call_options()
            out = oracle.reference(name, inputs, **options)
            if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
                out = out.to(torch.bfloat16)
            right[name] = (inputs, options, out)
        return right[name]

    tally = Tally("arguments of oracle")
    for number in numbers("oracle"):
        rng = random.Random(number)
        name = rng.choice(names)
        inputs, options, out = (dict(part) if isinstance(part, dict) else part for part in call_of(name))
        verb = rng.choice(("reference", "judge", "judge", "predict", "identify"))
        asked: dict[str, Any] = {}
        contract: Any = name
        where = ("input", "input", "input", "option", "out", "contract", "inputs", "named", "extra")
        for place in rng.sample(where, rng.choice((1, 1, 2))):
            if place == "input" and isinstance(inputs, dict):
                victim = rng.choice(sorted(call_of(name)[0]))
                inputs[victim] = odd_value(call_of(name)[0][victim], rng)
            elif place == "option":
                known = [spec.name for spec in registered()[name].options] or ["speed"]
                options[rng.choice(known)] = odd_value(None, rng)
            elif place == "out":
                victim = rng.choice(sorted(out)) if isinstance(out, dict) else None
                if victim is None:
                    out = odd_value(out, rng)
                else:
                    out[victim] = odd_value(out[victim], rng)
            elif place == "contract":
                contract = rng.choice(SCALARS)
            elif place == "inputs":
                inputs = rng.choice(SCALARS)
            elif place == "named":
                asked[rng.choice(("arch", "numerics"))] = rng.choice(SCALARS)
            elif isinstance(inputs, dict):
                inputs[rng.choice(("", "x", 3, None))] = rng.choice(SCALARS)
        takes = {"reference": (), "predict": ("numerics",), "identify": ("arch",), "judge": ("arch", "numerics")}[verb]
        given = (contract, inputs, out) if verb in ("judge", "identify") else (contract, inputs)
        more = {**options, **{n: v for n, v in asked.items() if n in takes}}

        def call(verb: str = verb, given: Any = given, more: Any = more) -> str:
            try:
                getattr(oracle, verb)(*given, **more)
            except OracleError as error:
                assert str(error)
                return type(error).__name__
            return "answered"

        tally.try_(f"arguments {number} of {verb}({name!r})", call)
    tally.done()


# --- kernels -------------------------------------------------------------------------------------------------


def test_kernels() -> None:
    """``fingerprint`` on kernels that are right at first, and from some call on wrong in one of many ways."""
    from oracle.errors import OracleError
    from oracle.tensorcore.fingerprint import fingerprint
    from oracle.tensorcore.predict import predict_product
    from oracle.tensorcore.probes import Shape
    from oracle.truth.gemm import ScaledProduct

    def spoilt_output(out: torch.Tensor, how: str, value: float, at: tuple[int, int]) -> torch.Tensor:
        out = out.clone()
        if how == "element":
            out[at] = value
        elif how == "diagonal":
            out[at[0], at[0]] = value
        elif how == "row":
            out[at[0]] = value
        elif how == "all":
            out[:] = value
        elif how == "sum":
            out += value
        elif how == "product":
            out *= value
        else:
            out = out.roll(1, 0)
        return out

    ways = ("element", "diagonal", "row", "all", "sum", "product", "roll")
    values = (float("nan"), float("inf"), -float("inf"), 0.0, -1e30, 1e30, 1.0, -1.0, 0.5, 2.0**-20)
    tally = Tally("kernels")
    for number in numbers("kernels"):
        rng = random.Random(number)
        first, how, value, at = rng.randrange(1, 9), rng.choice(ways), rng.choice(values), (rng.randrange(128), 3)
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
        calls: list[int] = []

        def kernel(
            a: Any,
            b: Any,
            a_scale: Any,
            b_scale: Any,
            out_dtype: torch.dtype,
            plan: Any = (first, how, value, at),
            calls: list[int] = calls,
        ) -> torch.Tensor:
            calls.append(1)
            product = ScaledProduct(a, b, a_scale, b_scale, 128, 128)
            out = predict_product(product, "sm90.promote128", out_dtype=out_dtype)
            return spoilt_output(out, *plan[1:]) if len(calls) >= plan[0] else out

        def call(kernel: Any = kernel, dtype: torch.dtype = dtype, number: int = number) -> str:
            try:
                found = fingerprint(kernel, Shape(torch.float8_e4m3fn, 128, 128, 128), out_dtype=dtype, seed=number)
            except OracleError as error:
                return type(error).__name__
            return "answered" if all(isinstance(line, str) for line in found.lines()) else "nothing"

        tally.try_(f"kernel {number} ({how} {value})", call)
    tally.done()


def test_the_campaign_can_fail(tmp_path: Path) -> None:
    """Negative tests: an untyped error, a control character, two lines and a wait each count as wrong."""
    tally = Tally("twins")
    tally.try_("untyped", lambda: str(1 // 0))
    tally.try_("typed", lambda: ended("report", tmp_path / "none"))
    assert [line.partition(":")[0] for line in tally.wrong] == ["untyped"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oracle.cli.common.printable", lambda text: text)
        (tmp_path / "bad").write_text(json.dumps({"kind": "run", "schema": "\x1b[2J"}) + "\n")
        tally.try_("control", lambda: ended("report", tmp_path / "\x1b[2J"))
    assert len(tally.wrong) == 2
    with pytest.raises(AssertionError, match="untyped"):
        tally.done()
