"""Support for Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor


@cache
def interpreted() -> bool:
    """Whether Triton runs in its interpreter: on CPU tensors, without inline assembly. Decided when kernels are imported."""
    return bool(triton.knobs.runtime.interpret)


def computable(tensor: Tensor) -> Tensor:
    """The tensor, in the interpreter with bfloat16 converted to float32: NumPy has no bfloat16."""
    return tensor.float() if interpreted() and tensor.dtype == torch.bfloat16 else tensor


def quiet() -> AbstractContextManager[Any]:
    """A context without NumPy's floating-point warnings: masked elements may overflow."""
    import numpy

    return numpy.errstate(all="ignore")
