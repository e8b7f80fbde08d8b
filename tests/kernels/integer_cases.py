"""Operations on integers of less than 64 bits: sums, products, shifts and conversions that wrap, and integers beyond the dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)
# Of x = table[q], y = table[kv] and the int64 indices q and kv.
Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
COMPARISONS: tuple[Operation, ...] = (
    lambda x, y, q, kv: x + y > 0,
    lambda x, y, q, kv: x - y < 1,
    lambda x, y, q, kv: x * y >= 5,
    lambda x, y, q, kv: -x < y,
    lambda x, y, q, kv: (x << 3) > y,
    lambda x, y, q, kv: (y >> 1) < x - 100,
    lambda x, y, q, kv: y > -3,
    lambda x, y, q, kv: (x - y) <= -2,
    lambda x, y, q, kv: (x.abs() - 2) > -(y + 2),
    lambda x, y, q, kv: ~x * 2 < y,
    lambda x, y, q, kv: (x + y).long() + q < kv + 40,
    lambda x, y, q, kv: q.to(x.dtype) * y < 5,
    lambda x, y, q, kv: (x + 3) // 2 > y % 7,
    lambda x, y, q, kv: x + kv > y + q,
    lambda x, y, q, kv: x * 2.5 > y - 1,
    lambda x, y, q, kv: torch.minimum(x + 5, y) < torch.maximum(x, y * 3),
    lambda x, y, q, kv: x * -1 > y,
    lambda x, y, q, kv: 0 - x <= y,
    lambda x, y, q, kv: (x.long() * -1).to(x.dtype) < y,
)


def table_of(dtype: torch.dtype, device: str, tokens: int) -> Tensor:
    """Random integers, most of them at the limits of the dtype."""
    info = torch.iinfo(dtype)
    edges = torch.tensor([info.max, info.min, 1, info.max - 1, 0, info.min + 1, 7, 2, info.max // 2, info.min // 2, 100, 3], dtype=dtype)
    choice = torch.randint(len(edges), (tokens,), generator=torch.Generator().manual_seed(0))
    return edges[choice].to(device)
