"""Published hardware vectors: a loader, and the mismatches of the instruction models against them.

Layout of the collection (Khattak and Mikaitis, ``model_validation/<GPU>/<FORMAT>/``)::

    a_<GPU>_<FORMAT>.txt, b_<GPU>_<FORMAT>.txt   one vector a line: K operands as float32 bits, hexadecimal
    c_<GPU>_fp32.txt                             one addend a line: 32 bits, binary
    d_<GPU>_fp32.txt, d_<GPU>_fp16.txt           one result a line: 32 bits, binary (float16 widened to
    float32)

``d = a.b + c`` for one instruction. Where the output is float16, ``c`` was rounded to float16 (nearest even) first.

Which instruction made a file follows from GPU, format and output (:func:`model_of`). Two rows differ from what the
GPU's name suggests: FP8 with float32 output on sm90 was run by wgmma **from c = 0** (the authors' validation script
says so, and the data do), and mma.sync FP8 on sm90 and sm100 is emulated with float16 instructions.

Source: github.com/north-numerical-computing/MATLAB-tensor-core (BSD-2-Clause); programs and scripts in
``model_validation/``. Not covered: files of other shapes than one result per line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oracle.errors import FixtureError, NumericsError
from oracle.numbers.formats import by_name, decode
from oracle.tensorcore.instructions import INSTRUCTIONS, Instruction, instruction
from oracle.tensorcore.predict import mma

GPUS: tuple[tuple[str, str], ...] = (
    (r"V100S?|TITANV|GV100", "sm70"),
    (r"T4G?|TITANRTX|(QUADRO|GEFORCE)?RTX(20[5-8]0(TI|SUPER)?|[345678]000)|TURING", "sm75"),
    (r"A100X?|A30X?|A800", "sm80"),
    (r"A2|A10[GM]?|A16|A40|(GEFORCE)?RTX30[5-9]0(TI|SUPER)?|RTXA[2456][05]?00", "sm86"),
    (r"ADA.*|.*ADA|L4|L40[SG]?|L20|L2|(GEFORCE)?RTX40[5-9]0(TI|D|SUPER|TISUPER)?|RTX1000|RTX4000.*", "sm89"),
    (r"G?H100.*|G?H200.*|H20|H800", "sm90"),
    (r"G?B[12]00.*", "sm100"),
    (r"G?B300.*", "sm103"),
    (r"(GEFORCE)?RTX50[5-9]0(TI|D|SUPER)?|RTXPRO[0-9]+.*", "sm120"),
    (r"MI100", "gfx908"),
    (r"MI2[15]0X?", "gfx90a"),
    (r"MI30[08][AX]?|MI325X?", "gfx942"),
)
"""GPU names (upper case, without separators) and their architectures."""

FORMATS: tuple[tuple[str, str, str], ...] = (
    (r"FP16|HALF|BINARY16|FLOAT16|F16", "float16", "f16"),
    (r"BF16|BFLOAT16|BRAINFLOAT16", "bfloat16", "bf16"),
    (r"TF32|TENSORFLOAT32|XF32", "tfloat32", "tf32"),
    (r"(FP8|FLOAT8)?E4M3(FN)?", "float8_e4m3fn", "fp8"),
    (r"(FP8|FLOAT8)?E5M2", "float8_e5m2", "fp8"),
)
"""Format names of files, formats of operands, families of instructions."""

OUTPUTS = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Row:
    """Agreement of one file of results with a model.

    Attributes
    ----------
    gpu, format, output : str, as the files are named; ``output`` is ``"float32"`` or ``"float16"``.
    instruction : str, name of the model.
    first : str, the first mismatch in words, or "".
    note : str, what the reader must know about these files, or "".
    """

    gpu: str
    format: str
    output: str
    instruction: str
    vectors: int
    mismatches: int
    first: str = ""
    note: str = ""


@dataclass(frozen=True)
class Vectors:
    """One published set: operands ``[n, K]``, addends ``[n]`` and results by output, all float32."""

    gpu: str
    a_format: str
    b_format: str
    a: Tensor
    b: Tensor
    c: Tensor
    d: dict[str, Tensor]

    @property
    def format(self) -> str:
        """Format as the files are named; both when the operands differ."""
        return self.a_format if self.a_format == self.b_format else f"{self.a_format}x{self.b_format}"


@dataclass(frozen=True)
class Model:
    """The instruction behind a file, and whether its addend was used."""

    instruction: Instruction
    uses_c: bool = True
    note: str = ""


def arch_of(gpu: str) -> str:
    """Architecture of a GPU named as in the collection; an architecture's own name is taken too.

    Raises NumericsError: unknown GPU; the message lists the names known.
    """
    plain = re.sub(r"[\s_\-]", "", gpu).upper()
    for pattern, arch in GPUS:
        if re.fullmatch(f"(NVIDIA|AMD|INSTINCT|AMDINSTINCT)?({pattern})", plain):
            return arch
    if gpu in {i.arch for i in INSTRUCTIONS.values()}:
        return gpu
    patterns = "; ".join(f"{arch}: {pattern}" for pattern, arch in GPUS)
    raise NumericsError(f"no model for GPU {gpu!r}; names known (patterns): {patterns}")


def format_of(name: str) -> tuple[str, str]:
    """Operand format and instruction family of a format named as in the collection."""
    plain = re.sub(r"[\s_\-]", "", name).upper()
    for pattern, fmt, family in FORMATS:
        if re.fullmatch(pattern, plain):
            return fmt, family
    raise NumericsError(f"no format {name!r}; known (patterns): {', '.join(p for p, _, _ in FORMATS)}")


def model_of(gpu: str, a_format: str, b_format: str, output: torch.dtype) -> Model:
    """The model of the instruction that made a file of this collection.

    Raises NumericsError: no model for this GPU, format or output; the message lists what the architecture has.
    """
    arch = arch_of(gpu)
    (_, family), (_, other) = format_of(a_format), format_of(b_format)
    if family != other:
        raise NumericsError(f"no instruction mixes {a_format} and {b_format}")
    if arch == "sm90" and family == "fp8" and output == torch.float32:
        return Model(instruction("sm90.wgmma.fp8"), False, "made by wgmma from zero: the c file was not used")
    units = ("mma", "wgmma", "tcgen05", "mfma")
    families = ("f8f6f4",) if (arch, family) == ("sm120", "fp8") else (family,)
    if (arch, family) == ("gfx942", "tf32"):
        families = ("xf32",)
    for unit in units:
        instruction_of_unit = INSTRUCTIONS.get(f"{arch}.{unit}.{families[0]}")
        if instruction_of_unit is not None and (output == torch.float32 or instruction_of_unit.float16_out):
            return Model(instruction_of_unit)
    has = ", ".join(i.name for i in INSTRUCTIONS.values() if i.arch == arch)
    raise NumericsError(f"no {arch} instruction takes {a_format} with {output} output; {arch} has {has}")


def sets(root: Path | str) -> list[Path]:
    """Folders below ``root`` that hold a set (an ``a_*.txt``), sorted.

    Raises FixtureError: there is none.
    """
    folders = sorted({path.parent for path in Path(root).rglob("a_*.txt")})
    if not folders:
        raise FixtureError(f"no a_<GPU>_<FORMAT>.txt below {root}; give the folder of the published collection")
    return folders


def load(folder: Path | str) -> Vectors:
    """Read one set.

    Raises FixtureError: a file is missing, a line does not parse, or lines differ in their number of columns.
    """
    folder = Path(folder)
    a_path, b_path = _only(folder, "a_*.txt"), _only(folder, "b_*.txt")
    gpu, a_format = _name(a_path)
    _, b_format = _name(b_path)
    c_path = _only(folder, "c_*.txt", prefer="fp32")
    d = {_name(path)[1]: _binary(path) for path in sorted(folder.glob("d_*.txt"))}
    unknown = set(d) - set(OUTPUTS)
    if unknown:
        raise FixtureError(f"{folder}: outputs {sorted(unknown)} are unknown; known: {', '.join(OUTPUTS)}")
    a, b = _hexadecimal(a_path, a_format), _hexadecimal(b_path, b_format)
    if a.shape[1] != b.shape[1]:
        raise FixtureError(f"{folder}: a has {a.shape[1]} columns, b has {b.shape[1]}")
    return Vectors(gpu, a_format, b_format, a, b, _binary(c_path), d)


def check(vectors: Vectors, output: str, *, model: Model | None = None) -> Row:
    """Compare one file of results with its model (or with another, to see it fail).

    Parameters
    ----------
    output : str, ``"fp32"`` or ``"fp16"``, a key of ``vectors.d``.
    model : Model or None, None takes :func:`model_of`.
    """
    dtype = OUTPUTS[output]
    if model is None:
        model = model_of(vectors.gpu, vectors.a_format, vectors.b_format, dtype)
    d = vectors.d[output]
    n = min(len(vectors.a), len(vectors.b), len(vectors.c), len(d))
    c = vectors.c[:n] if model.uses_c else torch.zeros(n, dtype=torch.float32, device="cpu")
    names = [_operand_format(f, model.instruction) for f in (vectors.a_format, vectors.b_format)]
    got = mma(model.instruction, vectors.a[:n], vectors.b[:n], c, out=dtype, a_format=names[0], b_format=names[1])
    wide = decode(got).to(torch.float32)
    wrong = (wide.view(torch.int32) != d[:n].view(torch.int32)) & ~(torch.isnan(wide) & torch.isnan(d[:n]))
    first = ""
    if wrong.any():
        i = int(wrong.nonzero()[0, 0])
        first = f"line {i + 1}: hardware {d[i].item()!r}, model {wide[i].item()!r}"
    notes = [model.note] if model.note else []
    lengths = {len(vectors.a), len(vectors.b), len(vectors.c), len(d)}
    if len(lengths) > 1:
        notes.append(f"files of {sorted(lengths)} lines; the first {n} compared")
    return Row(
        vectors.gpu,
        vectors.format,
        str(dtype).removeprefix("torch."),
        model.instruction.name,
        n,
        int(wrong.sum()),
        first,
        "; ".join(notes),
    )


def conformance(root: Path | str) -> list[Row]:
    """Mismatches of every result file below ``root`` against the model of its instruction.

    Returns list of Row: one per GPU, format and output; sets without a ``d`` file give none.
    Raises FixtureError: no set below ``root``, or an unreadable file; NumericsError: a GPU, format or output without a
    model.
    """
    rows = []
    for folder in sets(root):
        vectors = load(folder)
        rows += [check(vectors, output) for output in OUTPUTS if output in vectors.d]
    return rows


def _operand_format(name: str, inst: Instruction) -> str:
    fmt, _ = format_of(name)
    if fmt not in inst.operands:  # AMD's FP8 has no infinities and another bias
        fmt = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e5m2": "float8_e5m2fnuz"}.get(fmt, fmt)
    return fmt


def _only(folder: Path, pattern: str, *, prefer: str = "") -> Path:
    paths = sorted(folder.glob(pattern))
    paths = [p for p in paths if prefer and p.stem.endswith(prefer)] or paths
    if len(paths) != 1:
        raise FixtureError(f"{folder} holds {len(paths)} files {pattern}; a set has exactly one")
    return paths[0]


def _name(path: Path) -> tuple[str, str]:
    """GPU and format of ``x_<GPU>_<FORMAT>.txt``."""
    match = re.fullmatch(r"[abcd]_(.+)_([^_]+)", path.stem)
    if match is None:
        raise FixtureError(f"{path.name} is not named <abcd>_<GPU>_<FORMAT>.txt")
    return match[1], match[2]


def _binary(path: Path) -> Tensor:
    """One value a line, 32 bits of float32 or 16 of float16, as float32 ``[n]``."""
    words = path.read_text(encoding="ascii").split()
    widths = {len(w) for w in words}
    if len(widths) != 1 or not widths <= {16, 32}:
        raise FixtureError(f"{path}: lines must hold 32 bits (or 16), found widths {sorted(widths)}")
    try:
        codes = torch.tensor([int(w, 2) for w in words], dtype=torch.int64, device="cpu")
    except ValueError as bad:
        raise FixtureError(f"{path}: {bad}") from bad
    return _floats(codes) if widths == {32} else decode(codes, by_name("float16")).to(torch.float32)


def _hexadecimal(path: Path, format: str) -> Tensor:
    """K operands a line as float32 ``[n, K]``; words of 8 digits are float32 bits, shorter ones codes."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line.strip()]
    columns, widths = {len(line) for line in lines}, {len(w) for line in lines for w in line}
    if len(columns) != 1 or len(widths) != 1:
        raise FixtureError(
            f"{path}: lines must agree in columns and digits; found {sorted(columns)} columns "
            f"and words of {sorted(widths)} digits"
        )
    try:
        codes = torch.tensor([[int(w, 16) for w in line] for line in lines], dtype=torch.int64, device="cpu")
    except ValueError as bad:
        raise FixtureError(f"{path}: {bad}") from bad
    return _floats(codes) if widths == {8} else decode(codes, by_name(format_of(format)[0])).to(torch.float32)


def _floats(codes: Tensor) -> Tensor:
    """Float32 values of 32-bit patterns held in int64."""
    return torch.where(codes >= 2**31, codes - 2**32, codes).to(torch.int32).view(torch.float32)
