"""A kernel in place of Triton's decode kernel, for calls that it supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitKernel:
    """A kernel that computes partial results of splits, with arguments of the names that `triton.decode.decode_kernel` has.

    Attributes:
        kernel, options: The kernel, and how it is launched: num_warps and such.
        descriptors: For tensors that TMA reads, by name, the function that makes the descriptor.
        rows: Query rows of a CTA. Sequences in tiles of fewer rows run by triton's kernel.
        coarse: As in `decode_splits.split_tokens`.
        share: As in `decode_splits.split_tokens`, per KV head, for calls with so many query heads per KV head.

    The kernel keeps NaN and ±inf from rows that may not see them only where there is no mask. With one, it sets flags, and
    `triton.decode.decode_kernel` computes the splits of these flags again.
    """

    kernel: Any
    options: dict[str, Any]
    descriptors: dict[str, Callable[[Tensor], Any]]
    rows: int
    coarse: int
    share: Callable[[int], int]
