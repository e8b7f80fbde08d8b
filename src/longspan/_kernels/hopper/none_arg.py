"""None as an argument of `gl.warp_specialize`.

`builtin` is not public in Triton, but no public decorator makes a function that runs while a kernel is compiled.
"""

# Runs in Triton's compiler, on values that Python types do not describe.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@builtin
def optional(x, _semantic=None):
    """x, or None wrapped as a constexpr: `warp_specialize` takes constexpr arguments but no bare None."""
    return gl.constexpr(None) if x is None else x


@builtin
def first_given(x, y, _semantic=None):
    """x, or y if x is None; None is wrapped as a constexpr."""
    x = y if getattr(x, "value", x) is None else x
    return gl.constexpr(None) if x is None else x
