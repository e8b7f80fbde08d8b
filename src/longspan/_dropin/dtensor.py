"""DTensors in, DTensors out: attention runs on their local shards.

DTensor is imported only where one is met: a process that holds one has it loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longspan._comm.mesh import Mesh


@dataclass(frozen=True)
class Done:
    """A call that was made on local tensors, its result wrapped again."""

    result: Any


def is_dtensor(x: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def axis_of(mesh: Mesh, x: Any) -> int:
    """Which dim of a DTensor's mesh is the (one-axis) mesh of an attention: the one over the same process group."""
    if len(mesh.axes) == 1:
        for i in range(x.device_mesh.ndim):
            if x.device_mesh.get_group(i).group_name == mesh.groups[0]:
                return i
    raise ValueError(
        f"a DTensor over {x.device_mesh} met attention over axes {[axis.name for axis in mesh.axes]}: one of the DTensor's mesh dims "
        "must be that (one-axis) mesh; call .to_local() for anything else"
    )


def check_sharded(mesh: Mesh, x: Any, dim: int, name: str) -> None:
    """On the attention's mesh a DTensor must be sharded along its sequence dim."""
    placement = x.placements[axis_of(mesh, x)]
    if not placement.is_shard(dim % x.ndim) or type(placement).__name__ != "Shard":
        raise ValueError(
            f"{name}: expected a DTensor placed Shard({dim % x.ndim}) on the mesh of this attention, got {x.placements}; redistribute it"
        )


def local_call(mesh: Mesh, fn: Callable[..., Any], qkv: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Done | None:
    """fn on the local shards of q, k and v, its results placed like q; None where they are plain tensors."""
    which = [is_dtensor(x) for x in qkv]
    if not any(which):
        return None
    if not all(which):
        raise TypeError(f"query, key, value: expected DTensors or plain tensors, got a mixture: {[type(x).__name__ for x in qkv]}")
    for name, x in zip(("query", "key", "value"), qkv, strict=True):
        check_sharded(mesh, x, -2, name)
    result = fn(*(x.to_local() for x in qkv), *(a.full_tensor() if is_dtensor(a) else a for a in args), **kwargs)
    return Done(like(result, qkv[0]))


def like(result: Any, x: Any) -> Any:
    """Local results (a tensor, or a tuple of them) as DTensors placed like x; sizes are those of x but for the last dim."""
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(like(r, x) for r in result))
    if isinstance(result, tuple):
        return tuple(like(r, x) for r in result)
    if result is None:
        return None
    if not hasattr(result, "shape"):
        return type(result)(**{name: like(value, x) for name, value in vars(result).items()})
    shape = (*x.shape[: result.ndim - 1], result.shape[-1]) if result.ndim == x.ndim else tuple(x.shape[: result.ndim])
    return placed(result, x, shape)


def placed(local: Any, x: Any, shape: Sequence[int]) -> Any:
    """A local tensor as a DTensor of this global shape, placed like x; contiguous."""
    import torch
    from torch.distributed.tensor import DTensor

    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return DTensor.from_local(
        local.contiguous(), x.device_mesh, x.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
