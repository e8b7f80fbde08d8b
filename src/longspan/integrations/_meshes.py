"""The roles of a device mesh's axes, by the names that accelerate and torchtitan give them.

Ranks along `cp` share a sequence. Ranks along `dp`, `dp_replicate` and `dp_shard` hold different batches. Ranks along `tp` hold different
heads. If no axis has one of these names, all ranks of the mesh share a sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import CONTEXT_AXIS, DATA_AXES, HEADS_AXIS, Mesh, as_mesh, axis_names, named_by_role


@dataclass(frozen=True, kw_only=True)
class MeshRoles:
    """The axes of a mesh by role.

    context:    the mesh whose ranks share a sequence, as `longspan.plan` takes it.
    data:       the axes whose ranks hold different batches.
    data_rank:  this rank's place among them.
    heads_size: ranks that share the heads of a token.
    """

    context: Any
    context_size: int
    data: tuple[Any, ...] = ()
    data_size: int = 1
    data_rank: int = 0
    heads_size: int = 1

    @property
    def averaged(self) -> int:
        """Number of ranks over which DDP and FSDP average gradients."""
        return self.context_size * self.data_size


def mesh_roles(mesh: Any) -> MeshRoles:
    """The roles of a mesh's axes. Raises ValueError for a mesh with some of the names but no axis "cp", or with other names beside."""
    names = axis_names(mesh)
    if not named_by_role(names):
        return MeshRoles(context=mesh, context_size=as_mesh(mesh).size)
    axes = {name: mesh.along(name) if isinstance(mesh, Mesh) else mesh[name] for name in names}
    data = tuple(axis for name, axis in axes.items() if name in DATA_AXES)
    rank = 0
    for axis in data:
        rank = rank * _size(axis) + (axis.rank if isinstance(axis, Mesh) else axis.get_local_rank())
    return MeshRoles(
        context=axes[CONTEXT_AXIS],
        context_size=_size(axes[CONTEXT_AXIS]),
        data=data,
        data_size=math.prod(_size(axis) for axis in data),
        data_rank=rank,
        heads_size=_size(axes[HEADS_AXIS]) if HEADS_AXIS in names else 1,
    )


def _size(axis: Any) -> int:
    return int(axis.size if isinstance(axis, Mesh) else axis.size())


def sum_over_data_ranks(number: Tensor, roles: MeshRoles) -> Tensor:
    """A number summed over the data axes. A collective call if they have more than one rank."""
    for axis in roles.data:
        if _size(axis) > 1:
            device = getattr(axis, "device_type", "cpu")
            number = number.to(device) if device != "cpu" else number
            number = all_gather_rows(as_mesh(axis), number[None], [1] * _size(axis), what="sum over data ranks").sum(0)
    return number


def device_of(mesh: Any) -> torch.device | None:
    """The device of this rank's tensors; None if the mesh does not say."""
    kind = getattr(mesh, "device_type", None)
    if kind is None:
        return None
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
