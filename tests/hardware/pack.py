"""Wheels cut down to what the gallery needs, as one archive, for a machine without network.

    python tests/hardware/pack.py WHEELS OUT.tar.xz [--only NAME ...] [--without GLOB ...] [--arch 90] [--limit MIB]

``WHEELS`` is a folder. Of each wheel come the files of ``KEPT`` (of one that it does not list, its Python files) and
the METADATA that says its version. With ``--arch``, device code that such a GPU never loads is replaced by zeros, which
compress to nothing; the host code and the code that runs are untouched. On the machine: ``tar -xf OUT.tar.xz`` and
``source gallery_site/env.sh``, which sets PYTHONPATH and names the compiled libraries. Ends with 1 where the archive is
larger than the limit; it is kept.
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
    "sglang": ("sglang/kernels/*.py",),
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
    ),
    "transformer_engine": ("transformer_engine/pytorch/*.py",),
    "flashinfer_python": ("*",),
    "sgl_deep_gemm": ("*",),
    "apache_tvm_ffi": ("*",),
}
DROPPED = ("*/cutlass/examples/*", "*/cutlass/test/*", "*/cutlass/docs/*", "*/cutlass/media/*", "*.dist-info/[!M]*")
FAT = bytes.fromhex("50ed55ba")
GENERATED = ("*/cake_*", "*/alphamoe*")
EMPTY = {"vllm": ("vllm/__init__.py", "vllm/third_party/__init__.py", "vllm/vllm_flash_attn/__init__.py")}
"""Files that a package's own would import an engine with."""
LIBRARIES = {
    "FP8_KERNELS_VLLM_C": "vllm/_C.abi3.so",
    "FP8_KERNELS_VLLM_STABLE": "vllm/_C_stable_libtorch.abi3.so",
    "FP8_KERNELS_VLLM_FA3": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "FP8_KERNELS_SGL_OPS": "sgl_kernel/sm90/common_ops.abi3.so",
}


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
    """What a shell sources: PYTHONPATH, and the compiled libraries that were unpacked, of this archive or another."""
    lines = ['here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)']
    lines += ['export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"']
    for name, path in LIBRARIES.items():
        lines += [f'if [ -e "$here/{path}" ]; then export {name}="$here/{path}"; fi']
    return "\n".join(lines) + "\n"


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
            for path in EMPTY.get(name, ()):
                add(path, b"")
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
