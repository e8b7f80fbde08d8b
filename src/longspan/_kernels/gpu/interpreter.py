"""Support for Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock

import torch
import triton
from torch import Tensor


@cache
def interpreted() -> bool:
    """Whether Triton runs in its interpreter: on CPU tensors, without inline assembly. Decided when kernels are imported."""
    return bool(triton.knobs.runtime.interpret)


def computable(tensor: Tensor) -> Tensor:
    """The tensor, in the interpreter with bfloat16 and FP8 converted to float32: NumPy has neither."""
    return tensor.float() if interpreted() and tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor


@contextmanager
def quiet() -> Iterator[None]:
    """A context for one launch: without NumPy's floating-point warnings, since masked elements may overflow, and one thread at a time,
    since the interpreter replaces functions of `triton.language` while it runs.
    """
    import numpy

    with _running, numpy.errstate(all="ignore"):
        yield


_running = RLock()
