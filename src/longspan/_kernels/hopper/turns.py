"""Turns of two or three warp groups at the tensor cores: while one starts its wgmmas, the others compute exponentials.

Warp group g waits at named barrier FIRST_BARRIER + g, where the warp group before it arrives. The SM has 16; Triton numbers its own from 0.
"""

# Device code: its arguments are constants.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUPS = gl.constexpr(3)  # consumer warp groups of `forward_three`
FIRST_BARRIER = 13


@gluon.constexpr_function
def _instruction(name, group):
    """The PTX of a named barrier of two warp groups, of which one waits and the other arrives."""
    return f"bar.{name} {FIRST_BARRIER + group}, 256; mov.u32 $0, $1;"


@gluon.jit
def _execute(INSTRUCTION: gl.constexpr):
    """Execute an instruction in every thread of the warp group."""
    lane = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_turn(GROUP: gl.constexpr):
    """Wait until the warp group before GROUP gives its turn."""
    _execute(_instruction("sync", GROUP))


@gluon.jit
def give_turn(GROUP: gl.constexpr):
    """Let the warp group after GROUP start. With three, before the first turn, the last warp group gives one to the first."""
    _execute(_instruction("arrive", (GROUP + 1) % GROUPS))
