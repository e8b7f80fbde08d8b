"""A None for warps. Triton's `builtin` is not public, but nothing else makes a function that runs while a kernel is compiled."""

# Runs in Triton's compiler, on values that Python types do not describe.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@builtin
def given(x, _semantic=None):
    """x, or a None that can be handed to a warp: `warp_specialize` takes compile-time values, a bare None it does not."""
    return gl.constexpr(None) if x is None else x
