"""Compile options that all kernels share, and Triton's version, on which some depend."""

from __future__ import annotations

from functools import cache

import triton
from triton import knobs

# Scores, exponents and sums are written for fused multiply-adds. Triton 3.9 warns if the option is not given; from 3.10 on, it is off by
# default.
FUSED = {"enable_fp_fusion": True}

# From Triton 3.7 on, ptxas is told to allocate registers at level 2, against a fault of ptxas 13.1 on Blackwell. With ptxas 13, backward
# kernels on Hopper then spill 100 to 300 bytes more: with a soft cap they take a third more time. Level 4 is what ptxas does unless told;
# ptxas 12, which is taken where Triton has it (`assembler`), gives the same code at both levels. Options of the environment come last and
# win.
REGISTERS = {"ptx_options": f"--regAllocOptLevel=4 {knobs.nvidia.ptxas_options or ''}".strip()}


@cache
def triton_version() -> tuple[int, ...]:
    """The installed Triton's major and minor version."""
    return tuple(int(n) for n in triton.__version__.split(".")[:2])
