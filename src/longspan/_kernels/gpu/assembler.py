"""The assembler of longspan's kernels: not ptxas 12.8, and on Hopper not 13.3 and later, where Triton has another one.

Triton 3.6 and 3.7 take ptxas 12.8.93 for Hopper and older GPUs. It miscompiles loops in which two wgmma operands share one shared-memory
address, one after the other, and their descriptors differ in the upper half: it may read the lower half from a uniform register that it
never wrote. The kernel then loads other shared memory, so that its result is wrong or the launch fails. ptxas 12.9 and 13.0 to 13.4
assemble such loops correctly. Triton 3.6 and 3.7 have a later ptxas for Blackwell, which supports other GPUs too. A driver of CUDA 12 may
not load the code of ptxas 13; Triton kernels are then assembled by ptxas 12.8 at --opt-level 1, which wrote the register in the kernel that
was examined. Gluon kernels give every operand its own address.

Triton 3.9 takes ptxas 13.4 for Hopper, where some kernels then spill more registers than with 12.9: the backward pass at head dim 64 takes
13 % more time (`bench/results/tritons.txt`). Triton 3.9 has ptxas 12.9 for older GPUs, which supports Hopper too.

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
_FIRST_SPILLING = (13, 3)  # 13.1 has the spills of 12.9; 13.4 was measured
_HOPPER = 90
_LESS_OPTIMIZED = "--opt-level 1"


@cache
def use_right_assembler(compiles_here: Callable[[], bool]) -> None:
    """Let Triton take the right assembler for kernels that are compiled while `compiles_here()` is true."""
    original = getattr(nvidia_compiler, "get_ptxas", None)
    if original is not None:
        nvidia_compiler.get_ptxas = lambda arch: _taken(original(arch), arch) if compiles_here() else original(arch)


def tool(target: Any) -> Any:
    """The assembler of kernels for this target, with `path` and `version`; None if Triton does not tell or it is not NVIDIA's."""
    own = _tritons_choice(target)
    return None if own is None else _taken(own, target.arch)


def version(target: Any) -> str:
    """Version of the assembler of kernels for this target; "" without one."""
    taken = tool(target)
    return "" if taken is None else str(taken.version)


def options_for(source: Any, target: Any, options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Compile options of a kernel, with less optimization if its assembler has the fault."""
    own = _tritons_choice(target)
    if own is None or source.fn.is_gluon() or _is_right(_taken(own, target.arch)):
        return options
    options = options or {}
    return {**options, "ptx_options": f"{options.get('ptx_options') or ''} {_LESS_OPTIMIZED}".strip()}


def _tritons_choice(target: Any) -> Any:
    """The assembler that Triton would take; None for other GPUs than NVIDIA's."""
    get = getattr(nvidia_compiler, "get_ptxas", None)
    return None if get is None or getattr(target, "backend", None) != "cuda" else get(target.arch)


def _taken(own: Any, arch: Any) -> Any:
    """Triton's choice for the architecture, or its other assembler where that is better. Not if the user has chosen one."""
    if not _is_right(own) and not os.environ.get("TRITON_PTXAS_PATH"):
        other = _other("ptxas_blackwell")  # it supports other GPUs too
        return other if other and _is_right(other) and _version(other)[0] <= max(12, _driver_major()) else own
    if arch == _HOPPER and _version(own) >= _FIRST_SPILLING and not os.environ.get("TRITON_PTXAS_BLACKWELL_PATH"):
        other = _other("ptxas")
        return other if other and _FIRST_RIGHT <= _version(other) < _FIRST_SPILLING else own
    return own


def _other(name: str) -> Any:
    """Triton's assembler of this name; None without one."""
    try:
        return getattr(knobs.nvidia, name)
    except (AttributeError, RuntimeError):
        return None


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
