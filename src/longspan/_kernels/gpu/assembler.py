"""The assembler of longspan's kernels: not ptxas 12.8, which Triton 3.6 and 3.7 bring for Hopper and older GPUs.

ptxas 12.8.93 miscompiles loops in which two wgmma operands share one shared-memory address, one after the other, and their descriptors
differ in the upper half: it may read the lower half from a uniform register that it never wrote. The kernel then loads other shared memory,
so that its result is wrong or the launch fails. ptxas 12.9 and 13.0 to 13.4 assemble such loops correctly. Triton 3.6 and 3.7 have a later
ptxas for Blackwell, which supports other GPUs too. A driver of CUDA 12 may not load the code of ptxas 13; Triton kernels are then assembled
by ptxas 12.8 at --opt-level 1, which wrote the register in the kernel that was examined. Gluon kernels give every operand its own address.

Private parts of Triton used here, 3.6 to 3.9: `triton.backends.nvidia.compiler.get_ptxas`, `JITFunction.is_gluon`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from triton import knobs
from triton.backends.nvidia import compiler as nvidia_compiler

_FIRST_RIGHT = (12, 9)
_LESS_OPTIMIZED = "--opt-level 1"


@cache
def use_right_assembler(compiles_here: Callable[[], bool]) -> None:
    """Let Triton take the right assembler for kernels that are compiled while `compiles_here()` is true."""
    original = getattr(nvidia_compiler, "get_ptxas", None)
    if original is not None:
        nvidia_compiler.get_ptxas = lambda arch: _without_fault(original(arch)) if compiles_here() else original(arch)


def tool(target: Any) -> Any:
    """The assembler of kernels for this target, with `path` and `version`; None if Triton does not tell or it is not NVIDIA's."""
    own = _tritons_choice(target)
    return None if own is None else _without_fault(own)


def version(target: Any) -> str:
    """Version of the assembler of kernels for this target; "" without one."""
    taken = tool(target)
    return "" if taken is None else str(taken.version)


def options_for(source: Any, target: Any, options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Compile options of a kernel, with less optimization if its assembler has the fault."""
    own = _tritons_choice(target)
    if own is None or source.fn.is_gluon() or _is_right(_without_fault(own)):
        return options
    options = options or {}
    return {**options, "ptx_options": f"{options.get('ptx_options') or ''} {_LESS_OPTIMIZED}".strip()}


def _tritons_choice(target: Any) -> Any:
    """The assembler that Triton would take; None for other GPUs than NVIDIA's."""
    get = getattr(nvidia_compiler, "get_ptxas", None)
    return None if get is None or getattr(target, "backend", None) != "cuda" else get(target.arch)


def _without_fault(tool: Any) -> Any:
    """The tool, or one without the fault that this machine's driver loads code of. Not if the user has chosen one."""
    if _is_right(tool) or os.environ.get("TRITON_PTXAS_PATH"):
        return tool
    try:
        other = knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):  # Triton has no second assembler
        return tool
    major = _version(other)[0]
    return other if _is_right(other) and (major == 12 or major <= _driver_major()) else tool


def _is_right(tool: Any) -> bool:
    return _version(tool) >= _FIRST_RIGHT


def _version(tool: Any) -> tuple[int, int]:
    major, minor = tool.version.split(".")[:2]
    return int(major), int(minor)


@cache
def _driver_major() -> int:
    """CUDA version of the driver; 0 without one."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value // 1000
