"""Wheels cut down to what the gallery needs, as one archive, for a machine without network.

    python tests/hardware/pack.py WHEELS OUT.tar.xz [--only NAME ...] [--without GLOB ...] [--arch 90] [--limit MIB]

``WHEELS`` is a folder. Of each wheel come the files of ``KEPT`` (of one that it does not list, its Python files) and
the METADATA that says its version. With ``--arch``, device code that such a GPU never loads is replaced by zeros, which
compress to nothing; the host code and the code that runs are untouched. On the machine: ``tar -xf OUT.tar.xz`` and
``source gallery_site/env.sh``, which sets PYTHONPATH. Ends with 1 where the archive is larger than the limit; it is
kept.

Packages of ``BARE`` come without their ``__init__`` files, which import whole engines; what their kernels import of the
engine is in ``BESIDE``, modules of a few lines with the names that are read: a logger, the GPU's name, a decorator.
Not covered: packages that the machine must have (torch, triton, numpy) and what a package compiles at first use.
"""

from __future__ import annotations

import argparse
import io
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

TOP = "gallery_site"
LIMIT = 64
"""MiB that one upload may have."""
LARGE = 300_000
"""Bytes of a generated source that is left out."""
KEPT = {
    "sglang": ("sglang/kernels/*.py", "sglang/srt/layers/attention/triton_ops/*_attention.py"),
    "lmdeploy": ("lmdeploy/pytorch/kernels/*.py",),
    "flag_gems": ("flag_gems/*.py", "flag_gems/*.yaml", "flag_gems/*.json"),
    "fbgemm_gpu_genai": ("fbgemm_gpu/experimental/gemm/*.py",),
    "unsloth": ("unsloth/kernels/*.py",),
    "fp8_coat": ("coat/activation/real_quantization/*.py",),
    "sglang_kernel": ("sgl_kernel/sm90/common_ops.abi3.so",),
    "vllm": (
        "vllm/_C.abi3.so",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C.abi3.so",
        "vllm/_flashmla_C.abi3.so",
        "vllm/_flashmla_extension_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "vllm/third_party/deep_gemm/*",
        *(f"vllm/v1/attention/ops/triton_{name}.py" for name in ("unified_attention", "attention_helpers")),
        "vllm/model_executor/layers/quantization/compressed_tensors/triton_scaled_mm.py",
        "vllm/model_executor/layers/quantization/utils/marlin_utils*.py",
    ),
    "transformer_engine": ("transformer_engine/pytorch/*.py",),
    "flashinfer_python": ("*",),
    "sgl_deep_gemm": ("*",),
    "apache_tvm_ffi": ("*",),
}
DROPPED = ("*/cutlass/examples/*", "*/cutlass/test/*", "*/cutlass/docs/*", "*/cutlass/media/*", "*.dist-info/[!M]*")
FAT = bytes.fromhex("50ed55ba")
GENERATED = ("*/cake_*", "*/alphamoe*")
BARE = ("sglang", "lmdeploy", "flag_gems", "fbgemm_gpu_genai", "unsloth", "transformer_engine", "fp8_coat")
NO = "lambda *_, **__: False"
QUIET = f"type('Quiet', (), {{'__getattr__': lambda self, _: self, '__call__': {NO}}})()"
AS_IT_IS = "lambda *_, **__: lambda function: function"
EMPTY_CLASS = "type('Empty', (), {'__init__': lambda self, **_: None})"
BESIDE: dict[str, dict[str, str]] = {
    "vllm": {
        "vllm/__init__.py": "",
        "vllm/third_party/__init__.py": "",
        "vllm/vllm_flash_attn/__init__.py": "",
        "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\n",
        "vllm/logger.py": "import logging\n\ninit_logger = logging.getLogger\n",
        "vllm/platforms.py": "import torch\n\n\nclass current_platform:\n    fp8_dtype = lambda: torch.float8_e4m3fn\n",
        "vllm/triton_utils.py": "import triton\nimport triton.language as tl\n",
        "vllm/v1/kv_cache_interface.py": "from enum import IntEnum\n\nKVQuantMode = IntEnum('KVQuantMode', "
        "'NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD NVFP4', start=0)\n",
    },
    "sglang": {
        "sglang/srt/layers/__init__.py": "deep_gemm_wrapper = None\n",
        "sglang/srt/runtime_context.py": "import torch\nfrom types import SimpleNamespace\n\n"
        "hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)\n"
        f"get_platform = lambda: SimpleNamespace(is_sm90=hopper)\nget_parallel = {NO}\n",
        "sglang/srt/environ.py": f"envs = {QUIET}\n",
        "sglang/srt/utils/__init__.py": f"is_cuda = is_hip = is_musa = is_xpu = is_gfx1250_supported = {NO}\n"
        f"log_info_on_rank0 = {NO}\n"
        "import torch\n\nceil_div = lambda x, y: -(-x // y)\n"
        "ceil_align = lambda x, y: -(-x // y) * y\nget_device_name = lambda *_: 'unknown'\n"
        "get_device_core_count = lambda *_: torch.cuda.get_device_properties(0).multi_processor_count\n",
        "sglang/srt/utils/custom_op.py": f"register_custom_op = {AS_IT_IS}\n",
        "sglang/srt/utils/patch_torch.py": f"register_fake_if_exists = {AS_IT_IS}\n",
        "sglang/kernels/jit/utils.py": f"is_arch_support_pdl = load_jit = make_cpp_args = is_hip_runtime = {NO}\n"
        f"is_musa_runtime = get_activation_cuda_cflags = {NO}\ncache_once = lambda function: function\n"
        "import torch\nfrom types import SimpleNamespace\n\n"
        "get_jit_cuda_arch = lambda: SimpleNamespace(**dict(zip(('major', 'minor'), "
        "torch.cuda.get_device_capability())))\n",
    },
    "lmdeploy": {"lmdeploy/utils.py": f"get_logger = lambda *_: {QUIET}\n"},
    "flag_gems": {
        "flag_gems/__init__.py": "device = 'cuda'\n",
        "flag_gems/runtime/__init__.py": "import torch\n\ntorch_device_fn = torch.cuda\n",
        "flag_gems/utils/__init__.py": f"libentry = libtuner = {AS_IT_IS}\n",
        "flag_gems/utils/device_info.py": "import torch\n\nget_device_capability = torch.cuda.get_device_capability\n",
    },
    "unsloth": {
        "unsloth_zoo/utils.py": "Version = str\n",
        "unsloth_zoo/log.py": f"logger = {QUIET}\n",
        "unsloth_zoo/temporary_patches/common.py": "torch_compile = lambda function: function\n",
    },
    "transformer_engine": {
        "transformer_engine/pytorch/quantized_tensor.py": f"QuantizedTensorStorage = Quantizer = {EMPTY_CLASS}\n",
        "transformer_engine/pytorch/tensor/utils.py": f"is_custom = {EMPTY_CLASS}\n",
    },
}
"""By distribution, files that take the place of an engine's."""


def distribution(wheel: Path) -> str:
    return wheel.name.partition("-")[0].lower()


def needed(name: str, files: Iterable[zipfile.ZipInfo], without: tuple[str, ...] = ()) -> Iterator[zipfile.ZipInfo]:
    """The files of a wheel that the gallery needs."""
    for one in files:
        path = one.filename
        if one.is_dir() or any(fnmatch(path, glob) for glob in (*DROPPED, *without)):
            continue
        if any(fnmatch(path, glob) for glob in GENERATED) and one.file_size > LARGE:
            continue
        if path in BESIDE.get(name, {}) or (name in BARE and path.endswith("__init__.py")):
            continue
        if fnmatch(path, "*.dist-info/METADATA") or any(fnmatch(path, glob) for glob in KEPT.get(name, ("*.py",))):
            yield one


def one_architecture(library: bytes, arch: int) -> bytes:
    """A shared library whose embedded device code for other architectures is zeros.

    Each "fat binary" in it has a header of 16 bytes (magic 0xBA55ED50, version 1, size) and entries: a kind (1: PTX, 2:
    machine code), the bytes of their own header, of their payload, and at byte 28 the architecture. The driver loads
    machine code of its own architecture where a binary has some, else it translates PTX: that much is kept.
    """
    kept, at = bytearray(library), 0
    while (at := library.find(FAT, at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", library, at)
        if (version, header) != (1, len(FAT) + 12) or at + header + size > len(library):
            at += len(FAT)
            continue
        entries, place, at = [], at + header, at + header + size
        while place < at:
            kind, _, own, payload = struct.unpack_from("<HHIQ", library, place)
            entries.append((kind, struct.unpack_from("<I", library, place + 28)[0], place + own, payload))
            place += own + payload
        runs = [entry for entry in entries if entry[:2] == (2, arch)] or [entry for entry in entries if entry[0] == 1]
        for entry in entries:
            if entry not in runs:
                kept[entry[2] : entry[2] + entry[3]] = bytes(entry[3])
    return bytes(kept)


def environment() -> str:
    """What a shell sources: PYTHONPATH with the folder itself, of this archive or another."""
    return 'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nexport PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"\n'


def pack(
    folder: Path, out: Path, only: Iterable[str] = (), without: tuple[str, ...] = (), arch: int | None = None
) -> dict[str, int]:
    """Write the archive; the bytes of each distribution before compression."""
    chosen = {name.lower().replace("-", "_") for name in only}
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if not chosen or distribution(wheel) in chosen]
    if missing := chosen - {distribution(wheel) for wheel in wheels}:
        raise FileNotFoundError(f"{folder} has no wheel of {', '.join(sorted(missing))}; download it there")
    sizes: dict[str, int] = {}
    with tarfile.open(out, "w:xz", preset=9) as archive:

        def add(path: str, data: bytes) -> None:
            member = tarfile.TarInfo(f"{TOP}/{path}")
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))

        for wheel in wheels:
            name = distribution(wheel)
            with zipfile.ZipFile(wheel) as files:
                for one in needed(name, files.infolist(), without):
                    data = files.read(one)
                    whole = arch is None or not one.filename.endswith(".so")
                    add(one.filename, data if whole else one_architecture(data, arch))
                    sizes[name] = sizes.get(name, 0) + one.file_size
            for path, text in BESIDE.get(name, {}).items():
                add(path, text.encode())
        add("env.sh", environment().encode())
    return sizes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", type=Path, help="a folder of wheels")
    parser.add_argument("out", type=Path, help="the archive, .tar.xz")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these distributions alone")
    parser.add_argument("--without", nargs="+", default=(), metavar="GLOB", help="leave these files out")
    parser.add_argument("--arch", type=int, metavar="90", help="device code of this architecture alone (default: all)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="MIB", help=f"default {LIMIT}")
    options = parser.parse_args(arguments)
    sizes = pack(options.wheels, options.out, options.only, tuple(options.without), options.arch)
    for name, size in sizes.items():
        print(f"{size / 2**20:8.1f} MiB  {name}")
    packed = options.out.stat().st_size / 2**20
    print(f"{packed:8.1f} MiB  {options.out} ({options.limit:g} at most)")
    return 0 if packed <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
