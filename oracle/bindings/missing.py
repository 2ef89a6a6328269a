"""Which low-precision routines of the libraries have neither a binding nor a contract: completeness, counted.

One rule selects a routine (:func:`kind_of`): its name has a word of :data:`KINDS`, and low precision is spoken of, in
its name or in the name of a tensor that it takes (:data:`LOW`). Routing, layers of experts and whatever takes a KV
cache, which may hold any format, count in every precision. A routine is

    bound       where a binding of :mod:`oracle.bindings.known` calls that name in that library
    contract    else, where a contract has its name, or the one that :data:`oracle.bindings.exemptions.ALIASES` gives
    exempt      else, where rows of :mod:`oracle.bindings.exemptions` name every place in which it is declared
    missing     else

A name counts once for a library. Not covered: whether a contract of that name describes every option of the routine;
routines of layouts and sizes whose declaration names no low precision, as ``shuffle_matrix_a(input, epilogue_tile_m)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from oracle.bindings import installed
from oracle.bindings.exemptions import ALIASES, ANY, EXEMPT
from oracle.bindings.installed import Routine
from oracle.bindings.known import bindings
from oracle.errors import OptionError, among
from oracle.routines import registered


@dataclass(frozen=True)
class Project:
    """A library: the packages that it installs, and how it is installed."""

    name: str
    packages: tuple[str, ...]
    install: str


PROJECTS = {
    one.name: one
    for one in (
        Project("flashinfer", ("flashinfer",), "pip install --no-deps flashinfer-python"),
        Project("deep_gemm", ("deep_gemm",), "pip install --no-deps sgl-deep-gemm"),
        Project("vllm", ("vllm",), "pip install --no-deps vllm"),
        Project("sglang", ("sglang",), "pip install --no-deps sglang"),
        Project("sglang-kernel", ("sgl_kernel",), "pip install --no-deps sglang-kernel"),
        Project("torch", ("torch",), "pip install torch"),
        Project("torchao", ("torchao",), "pip install --no-deps torchao"),
        Project("transformer_engine", ("transformer_engine",), "pip install --no-deps transformer-engine"),
    )
}

KINDS = {
    "expert": r"moe|experts?|topk|routers?|routing|routed|gating",
    "attention": r"attention|attn|[fm]?m[hlq]as?|gqa|fmha|prefill|decode|k?v?cache|kv|rope|logits|sdpa|paged",
    "product": r"\w*gemm\w*|[bg]?mm|matmul|linear|einsum|dot|mul|conv\w*",
    "layout": r"\w*layout|(un)?swizzled?|shuffled?|interleaved?|(un)?permuted?|transposed?|(un|re|pre)?pack(ed)?"
    r"|reorder|blocked|view|reshape|aligned|mn",
    "padding": r"(un)?pad(ded|ding)?|align(ment)?",
    "scaling": r"scales?|scaling|amax|e8m0|ue8m0|sf",
    "quantisation": r"\w*quant\w*|\w*cast|cast|convert|round\w*|to|from|norm|rmsnorm|layernorm|act|silu|[gs]elu|relu2?"
    r"|swiglu|geglu|activation|hadamard|reduce|allreduce|gather|dispatch|combine|copy|compress\w*|encode",
}
"""Words of a name, by what a routine is; the first kind that has one is its kind."""

LOW = re.compile(
    r"(?!un)\w*quant(?!ile)\w*|(nv|mx)?[fb]p[468]\w*|float[468]\w*|e4m3\w*|e5m2\w*|e2m1\w*|u?e8m0\w*|mx|mxint\w*|int[48]\w*|u?int4"
    r"|w\d+a\d+\w*|[48]bit|awq|gptq|marlin|machete|ggml|nf4|scaled|blockscaled?|blockwise|groupwise"
)
"""Words of a name that speak of low precision."""
LOW_TENSORS = re.compile(
    rf"{LOW.pattern}|\w*scales?(inv)?|(?!softmax|sm|attn)scale\w?|[de]?scales?|sf|sf[abkvq]|qweight|zeros|zps?|azp|qzeros|codes"
)
"""Words of the name of a tensor that speak of low precision."""
CACHE = re.compile(r"(?!cos_sin)\w*(k|v|kv|key|value|src|dst|ckv|kpe|paged)_?cache")
"""The name of a tensor that is a KV cache."""

SOFTMAX = re.compile(r"scaled_(?=dot_|(\w+_)?(softmax|masked))")
"""``scaled_dot_product_attention``: the scale of logits, not of codes."""


def words(name: str) -> list[str]:
    """The words of a name, in lower case: ``BatchMLAWrapper`` and ``fp8_gemm_nt`` alike."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word for word in SOFTMAX.sub("", split.lower()).split("_") if word]


def _has(pattern: str | re.Pattern[str], of: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, word) for word in of)


def kind_of(routine: Routine) -> str | None:
    """What a routine is, by the rule of the module; None where it is not counted."""
    name = words(routine.name)
    kind = next((kind for kind, pattern in KINDS.items() if _has(pattern, name)), None)
    if kind == "expert":
        return kind
    low = _has(LOW, name) or _has(LOW_TENSORS, (word for tensor in routine.tensors for word in words(tensor)))
    return kind if low or _has(CACHE, routine.tensors) else None


@dataclass(frozen=True)
class Survey:
    """The counted routines of a library by name, with where each is declared; ``kinds`` says what each is.

    ``unused``: exemptions and aliases of the library that name nothing. ``unread``: files that this Python cannot read.
    """

    project: Project
    seen: int
    kinds: dict[str, str]
    places: dict[str, tuple[Routine, ...]]
    bound: tuple[str, ...]
    contract: tuple[str, ...]
    exempt: dict[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    unread: tuple[str, ...]


def project(name: str) -> Project:
    """Raises OptionError: there is no such library."""
    if name not in PROJECTS:
        raise OptionError(f"{name} is no project here; {among(name, PROJECTS)}")
    return PROJECTS[name]


def survey(of: Project, root: Path | None = None) -> Survey | None:
    """What a library offers and what is missing; None where it is not installed, or not below ``root``."""
    folders = [path for package in of.packages if (path := installed.folder(package, root)) is not None]
    if not folders:
        return None
    declared: dict[str, dict[str, Routine]] = {}
    unread: list[str] = []
    for result, refused in map(installed.routines, folders):
        unread += refused
        for routine in result:
            declared.setdefault(routine.name.lstrip("_"), {}).setdefault(routine.where, routine)
    kinds = {}
    for name, by_place in declared.items():
        if text := [kind for routine in by_place.values() if (kind := kind_of(routine))]:
            kinds[name] = text[0]
    places = {name: tuple(declared[name].values()) for name in kinds}
    packages = (*of.packages, f"torch:ops of {of.name}")
    called = {leaf(one.target) for one in bindings() if library(one.target, one.release) in packages}
    own, aliases = EXEMPT.get(of.name, {}), ALIASES.get(of.name, {})
    described = {name for name in kinds if aliases.get(name, name) in registered()}
    rows = {**own, **EXEMPT[ANY]}
    exempt: dict[str, str] = {}
    used: set[str] = set()
    for name, those in places.items():
        if name in called or name in described:
            continue
        matching = [next((row for row in rows if fnmatchcase(one.target, row)), None) for one in those]
        if all(matching):
            used |= {row for row in matching if row}
            exempt[name] = rows[str(matching[0])]
    bound = tuple(name for name in kinds if name in called)
    contract = tuple(name for name in kinds if name not in called and name in described)
    missing = tuple(sorted(name for name in kinds if name not in {*bound, *contract, *exempt}))
    unused = (*(row for row in own if row not in used), *(name for name in aliases if name not in kinds))
    return Survey(of, len(declared), kinds, places, bound, contract, exempt, missing, unused, tuple(unread))


def leaf(target: str) -> str:
    """The name of a binding's routine, as a survey has it."""
    return target.rpartition(":")[2].rpartition(".")[2].lstrip("_")


def library(target: str, release: str) -> str:
    """The package that a binding calls; of an operator of torch ``torch:ops of PROJECT`` by its release."""
    if target.startswith("torch:ops."):
        return f"torch:ops of {release.partition(' ')[0].replace('flashinfer-python', 'flashinfer')}"
    return target.partition(":")[0].partition(".")[0]
