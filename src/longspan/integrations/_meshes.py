"""Which axis of a device mesh does what, by the names that accelerate and torchtitan give them.

`cp` shares a sequence, `dp`, `dp_replicate` and `dp_shard` hold different batches, `tp` holds different heads. A mesh without any of
these names shares one sequence over all of its ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan._comm.agreement import CallDescription, agree
from longspan._comm.mesh import as_mesh

CONTEXT = "cp"
DATA = ("dp", "dp_replicate", "dp_shard")
HEADS = "tp"


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The mesh that shares a sequence (what `longspan.plan` takes), the axes of different batches, and how many ranks share the heads."""

    context: Any
    context_size: int
    data: tuple[Any, ...] = ()
    data_size: int = 1
    data_rank: int = 0
    heads_size: int = 1

    @property
    def averaged(self) -> int:
        """Ranks over which DDP and FSDP average gradients."""
        return self.context_size * self.data_size


def roles(mesh: Any) -> Roles:
    """What each axis of a mesh is for."""
    from longspan._comm.mesh import as_mesh

    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    known = [name for name in names if name in (CONTEXT, HEADS, *DATA)]
    if not known:
        return Roles(context=mesh, context_size=as_mesh(mesh).size)
    other = [name for name in names if name not in known]
    if other or CONTEXT not in names:
        raise ValueError(
            f"mesh: expected an axis {CONTEXT!r} beside any of {', '.join(map(repr, (*DATA, HEADS)))}, got axes {names}; "
            "name the axis that shares a sequence 'cp', or pass the submesh of the axes that do"
        )
    data = tuple(mesh[name] for name in names if name in DATA)
    rank = 0
    for axis in data:
        rank = rank * axis.size() + axis.get_local_rank()
    return Roles(
        context=mesh[CONTEXT],
        context_size=mesh[CONTEXT].size(),
        data=data,
        data_size=math.prod(axis.size() for axis in data),
        data_rank=rank,
        heads_size=mesh[HEADS].size() if HEADS in names else 1,
    )


def summed_over_data(number: Tensor, found: Roles) -> Tensor:
    """A number summed over the ranks that hold different batches: a collective call where there are such."""
    for axis in found.data:
        if axis.size() > 1:
            number = number.to(axis.device_type) if axis.device_type != "cpu" else number
            agree(as_mesh(axis), CallDescription("sum over data ranks", {"dtype": str(number.dtype), "shape": str(list(number.shape))}))
            dist.all_reduce(number, group=axis.get_group())
    return number


def device_of(mesh: Any) -> torch.device | None:
    """Where tensors of a mesh's ranks live; None where the mesh does not say."""
    kind = getattr(mesh, "device_type", None)
    if kind is None:
        return None
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
