"""Kernels that were compiled before and are part of the package: the first call of a common kind compiles nothing.

`_kernels/prebuilt` has a file for each kernel, named by its key: a line of metadata and the binary, compressed together. The key is a
digest of everything that a compilation depends on but the compiler: the kernel's source with all that it calls (`source_digest`), types,
constants, alignment, options and target. So one binary serves every supported version of Triton, and one of another source is never taken.
`make kernels` builds the files; `tests/kernels/common_calls.py` lists their calls.

A kernel without a file compiles. So do all kernels if `LONGSPAN_PREBUILT=0`, or if Triton is told to compile differently
(`_compiles_anew`).

Private parts of Triton used here, 3.6 to 3.9. Without one of them, Triton compiles:

`ASTSource`                            `fn`, `signature`, `constants`, `attrs`: what a kernel is specialised for.
`CompiledKernel(source, files, hash)`  a kernel from its metadata and its binary, files of Triton's cache.
`get_cache_manager`                    Triton's cache on disk, where these files are written.
`get_cache_invalidating_env_vars`      environment variables that change the code that Triton generates.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager

from longspan._environment import switch
from longspan._kernels.gpu.source_digest import NoDigest, encoded, source_digest

FOLDER = Path(__file__).parent.parent / "prebuilt"
FORMAT = 1  # of files and keys
# Options of Triton that change the code of a kernel and that calls choose; debug options make `_compiles_anew` true.
_OPTIONS = (
    "num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "ptx_options", "launch_pdl", "launch_cooperative_grid",
)  # fmt: skip
# Metadata of a launch. The rest, such as paths, depends on the machine that compiled.
_METADATA = (
    "name", "shared", "num_warps", "num_ctas", "num_stages", "warp_size", "maxnreg", "target", "tensordesc_meta", "tmem_size",
    "global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align", "launch_cooperative_grid", "launch_pdl",
    "instrumentation_mode", "enable_fp_fusion", "triton_version",
)  # fmt: skip

_COMPILER_VARIABLES = (  # that no `knobs` has
    "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "MLIR_ENABLE_DUMP", "LLVM_IR_ENABLE_DUMP", "TRITON_REPRODUCER_PATH",
    "TRITON_ENABLE_LLVM_DEBUG", "TRITON_LLVM_DEBUG_ONLY",
)  # fmt: skip


# With another Triton, without the source of a function, or if Triton's cache cannot be written: the kernel compiles.
_FAILURES = (NoDigest, AttributeError, KeyError, TypeError, ValueError, OSError)


def prebuilt_kernel(source: Any, target: Any, options: dict[str, Any]) -> Any | None:
    """The kernel of the package for an `ASTSource`, a target and all of Triton's options; None if it has to be compiled."""
    if _is_turned_off():
        return None
    try:
        if _compiles_anew(options):
            return None
        key = kernel_key(source, target, options)
        return (_cached(source, key) or _unpacked(source, key)) if path_of(key).exists() else None
    except _FAILURES:
        return None


def kernel_key(source: Any, target: Any, options: dict[str, Any]) -> str:
    """The key of a kernel. It begins with `sources_key`. Raises `NoDigest` if a constant has no text."""
    constants = sorted(source.constants.items())
    parts = (
        FORMAT,
        [(name, str(kind)) for name, kind in source.signature.items()],
        [(place, encoded(value)) for place, value in constants],
        sorted((place, str(facts)) for place, facts in source.attrs.items() if facts),
        [(name, options[name]) for name in _OPTIONS],
        (target.backend, target.arch, target.warp_size),
    )
    sources = sources_key(source.fn, [value for _, value in constants])
    return f"{sources}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def sources_key(kernel: Any, arguments: Sequence[Any]) -> str:
    """A digest of a kernel's source and of the functions among its arguments, without its types and sizes."""
    digests = [source_digest(kernel), *(source_digest(a) for a in arguments if hasattr(a, "raw_src"))]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]


def may_be_prebuilt(kernel: Any, arguments: Sequence[Any]) -> bool:
    """Whether the package has some kernel of this source and of the functions among the arguments. Needs no driver."""
    if _is_turned_off():
        return False
    try:
        return sources_key(kernel, arguments) in _prebuilt_sources()
    except _FAILURES:
        return False


@cache
def _prebuilt_sources() -> frozenset[str]:
    return frozenset(path.name.split("-")[0] for path in FOLDER.glob("*.xz"))


def pack(metadata: dict[str, Any], binary: bytes, *, assembler: str) -> bytes:
    """The file of a compiled kernel. metadata: all that Triton has of it."""
    kept = {name: metadata[name] for name in _METADATA if name in metadata}
    kept |= {"hash": hashlib.sha256(binary).hexdigest(), "assembler": assembler}
    header = json.dumps(kept, default=vars, sort_keys=True).encode()
    return lzma.compress(header + b"\n" + binary, preset=9 | lzma.PRESET_EXTREME)


def unpack(path: Path) -> tuple[dict[str, Any], bytes]:
    """(metadata, binary) of a file. Raises ValueError if it is damaged."""
    try:
        header, binary = lzma.decompress(path.read_bytes()).split(b"\n", 1)
        metadata = json.loads(header)
    except (lzma.LZMAError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if hashlib.sha256(binary).hexdigest() != metadata["hash"]:
        raise ValueError(f"{path}: the binary does not have the digest of its metadata")
    return metadata, binary


def path_of(key: str) -> Path:
    return FOLDER / f"{key}.xz"


def _cached(source: Any, key: str) -> Any | None:
    """The kernel from Triton's cache on disk, where an earlier process put it."""
    names = _file_names(source)
    files = _cache_of(key).get_group(names[1])
    if not files or set(files) != set(names):
        return None
    kernel = CompiledKernel(source, files, key)
    return kernel if hashlib.sha256(kernel.kernel).hexdigest() == kernel.metadata.hash else None


def _unpacked(source: Any, key: str) -> Any | None:
    """The kernel from its file, put into Triton's cache on disk."""
    try:
        metadata, binary = unpack(path_of(key))
    except ValueError as error:
        warnings.warn(f"damaged kernel, compiled instead: {error}; install longspan again", stacklevel=2)
        return None
    cache, (binary_name, metadata_name) = _cache_of(key), _file_names(source)
    files = {
        binary_name: cache.put(binary, binary_name),
        metadata_name: cache.put(json.dumps(metadata), metadata_name, binary=False),
    }
    cache.put_group(metadata_name, files)
    return CompiledKernel(source, files, key)


def _cache_of(key: str) -> Any:
    """The folder of a kernel in Triton's cache on disk, which takes hexadecimal keys."""
    return get_cache_manager(key.replace("-", ""))


def _file_names(source: Any) -> tuple[str, str]:
    """Names of the binary and of the metadata in Triton's cache."""
    return f"{source.name}.cubin", f"{source.name}.json"


def _is_turned_off() -> bool:
    return not switch("LONGSPAN_PREBUILT", default=True)


def _compiles_anew(options: dict[str, Any]) -> bool:
    """Whether the user, or a variable of Triton, asks for a compilation: to debug, to dump or override code, by another assembler."""
    compilation, nvidia = knobs.compilation, knobs.nvidia
    asked = (
        compilation.always_compile, compilation.override, compilation.dump_ir, compilation.use_ir_loc, compilation.instrumentation_mode,
        compilation.enable_asan, compilation.front_end_debugging, nvidia.dump_nvptx, nvidia.disable_ptxas_opt, nvidia.ptxas_options,
        nvidia.mock_ptx_version, nvidia.dump_ptxas_log, nvidia.libdevice_path, knobs.runtime.debug,
        knobs.runtime.add_stages_inspection_hook, knobs.runtime.override_arch,
        options["debug"], options["sanitize_overflow"], options["ir_override"],
        *(os.environ.get(name) for name in _COMPILER_VARIABLES),
    )  # fmt: skip
    return any(asked) or bool(get_cache_invalidating_env_vars())
