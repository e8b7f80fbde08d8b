"""Turns of two or three warp groups at the tensor cores: while one starts its wgmmas, the others compute exponentials. Also signals between
two warp groups that need each other's dS one step later.

Turns: warp group g waits at named barrier FIRST_BARRIER + g, where the warp group before it arrives. The SM has 16; Triton numbers its own
from 0.
"""

# Device code: its arguments are constants.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUPS = gl.constexpr(3)  # consumer warp groups of `forward_three`
FIRST_BARRIER = 13
FIRST_STEP_BARRIER = gl.constexpr(12)  # of signals, in kernels without turns


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


@gluon.constexpr_function
def _numbered(name):
    """The PTX of a named barrier of two warp groups, whose number is an operand."""
    return f"bar.{name} $1, 256; mov.u32 $0, $1;"


@gluon.jit
def _step_barrier(step, GROUP: gl.constexpr, INSTRUCTION: gl.constexpr):
    """Execute an instruction on the barrier of a step of GROUP. A group may be one step ahead: steps alternate between two barriers."""
    number = gl.full([128], FIRST_STEP_BARRIER + 2 * GROUP + (step & 1), gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal_step(step, GROUP: gl.constexpr):
    """Signal that GROUP, 0 or 1, is through with a part of `step`. It may be one signal ahead of the other group's waits."""
    _step_barrier(step, GROUP, _numbered("arrive"))


@gluon.jit
def await_step(step, GROUP: gl.constexpr):
    """Wait until the other group than GROUP has signalled `step`."""
    _step_barrier(step, 1 - GROUP, _numbered("sync"))
