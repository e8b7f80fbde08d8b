"""DTensors in, DTensors out: attention runs on their local shards.

DTensor is imported lazily: a process that holds a DTensor has imported the class already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longspan._comm.mesh import Mesh


@dataclass(frozen=True)
class WrappedResult:
    """The result of a call on local tensors, as DTensors. A class of its own, because the result may be None."""

    result: Any


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor. False in a process that never imported DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def mesh_dim_of(mesh: Mesh, x: Any) -> int:
    """The dim of a DTensor's mesh that is the one-axis mesh of an attention: the dim over the same process group."""
    if len(mesh.axes) == 1:
        for i in range(x.device_mesh.ndim):
            if x.device_mesh.get_group(i).group_name == mesh.groups[0]:
                return i
    raise ValueError(
        f"expected a DTensor one of whose mesh dims is the attention's one-axis mesh, got one over {x.device_mesh} for attention over axes "
        f"{[axis.name for axis in mesh.axes]}; call .to_local() for anything else"
    )


def check_sharded(mesh: Mesh, x: Any, dim: int, name: str) -> None:
    """Raise ValueError if a DTensor is not sharded along its sequence dim on the attention's mesh."""
    placement = x.placements[mesh_dim_of(mesh, x)]
    if not placement.is_shard(dim % x.ndim) or type(placement).__name__ != "Shard":
        raise ValueError(
            f"{name}: expected a DTensor placed Shard({dim % x.ndim}) on the mesh of this attention, got {x.placements}; redistribute it"
        )


def call_on_local(
    mesh: Mesh, fn: Callable[..., Any], qkv: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> WrappedResult | None:
    """fn on the local shards of q, k and v, with results placed like q; None if q, k and v are plain tensors."""
    are_dtensors = [is_dtensor(x) for x in qkv]
    if not any(are_dtensors):
        return None
    if not all(are_dtensors):
        raise TypeError(f"query, key, value: expected DTensors or plain tensors, got a mixture: {[type(x).__name__ for x in qkv]}")
    for name, x in zip(("query", "key", "value"), qkv):
        check_sharded(mesh, x, -2, name)
    result = fn(*(x.to_local() for x in qkv), *(a.full_tensor() if is_dtensor(a) else a for a in args), **kwargs)
    return WrappedResult(placed_like(result, qkv[0]))


def placed_like(result: Any, x: Any) -> Any:
    """Local results (a tensor, a tuple or an AuxOutput of tensors) as DTensors placed like x, with x's sizes except in the last dim."""
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(placed_like(r, x) for r in result))
    if isinstance(result, tuple):
        return tuple(placed_like(r, x) for r in result)
    if result is None:
        return None
    shape = (*x.shape[: result.ndim - 1], result.shape[-1]) if result.ndim == x.ndim else tuple(x.shape[: result.ndim])
    return as_dtensor(result, x, shape)


def as_dtensor(local: Any, x: Any, shape: Sequence[int]) -> Any:
    """A local tensor as a contiguous DTensor of this global shape, placed like x."""
    import torch
    from torch.distributed.tensor import DTensor

    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return DTensor.from_local(local.contiguous(), x.device_mesh, x.placements, shape=torch.Size(shape), stride=tuple(stride))
