"""Triton's interpreter (`TRITON_INTERPRET=1`): whether it is on, and what it needs help with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor


@cache
def interpreted() -> bool:
    """Whether Triton runs in its interpreter: on CPU tensors, without assembly. Kernels were made for one or the other when imported."""
    return bool(triton.knobs.runtime.interpret)


def computable(tensor: Tensor) -> Tensor:
    """The interpreter neither multiplies bfloat16 nor rounds to it; there, such tensors are computed in float32."""
    return tensor.float() if interpreted() and tensor.dtype == torch.bfloat16 else tensor


def quiet() -> AbstractContextManager[Any]:
    """No warnings of what masked elements compute."""
    import numpy

    return numpy.errstate(all="ignore")
