"""Meshes: the ranks that share a sequence, as a value. Making a mesh, or a plan for it, takes no communication.

A mesh holds the names of groups, not the groups: it can be pickled, compared, and planned with where no process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch.distributed as dist

from longspan._comm.group import Alone, Group
from longspan._torch_private import process_group_by_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# The values that `as_mesh` accepts. None is the static type of `dist.group.WORLD` before init_process_group; it raises.
MeshLike: TypeAlias = "Mesh | DeviceMesh | ProcessGroup | None"

VIRTUAL = "virtual:"

# Names of axes as accelerate and torchtitan give them: ranks that share a sequence, that hold different batches, different heads.
CONTEXT_AXIS = "cp"
DATA_AXES = ("dp", "dp_replicate", "dp_shard")
HEADS_AXIS = "tp"


class World(Protocol):
    """A virtual world: looks up groups by name."""

    def group(self, name: str, rank: int) -> Group: ...


# Virtual worlds by the prefix of their groups' names, as torch has a table of process groups by name. Weak: a world lives while its user
# holds it.
virtual_worlds: WeakValueDictionary[str, World] = WeakValueDictionary()


class Axis(NamedTuple):
    """One axis of a mesh."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One or two axes of ranks, as the rank at `coordinate` sees them. `groups`: the group name of each axis, or () without groups."""

    axes: tuple[Axis, ...]
    coordinate: tuple[int, ...]
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes, names = [axis.size for axis in self.axes], {axis.name for axis in self.axes}
        if not 1 <= len(sizes) <= 2 or len(names) < len(sizes) or min(sizes) < 1:
            raise ValueError(f"mesh: expected one or two axes of different names and of size 1 or more, got {self.axes}")
        if len(self.coordinate) != len(sizes) or any(not 0 <= c < size for c, size in zip(self.coordinate, sizes)):
            raise ValueError(f"mesh: expected a coordinate in axes of sizes {sizes}, got {self.coordinate}")
        if len(self.groups) not in (0, len(sizes)):
            raise ValueError(f"mesh: expected a group for each of {len(sizes)} axes, or none, got {self.groups}")

    @staticmethod
    def abstract(shape: int | Sequence[int], rank: int = 0, axis_names: Sequence[str] | None = None) -> Mesh:
        """A mesh without groups, for planning. Communication over it raises, except along axes of one rank."""
        axes = mesh_axes(shape, axis_names)
        return Mesh(axes=axes, coordinate=coordinate_of(axes, rank))

    @cached_property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def rank(self) -> int:
        """The index of this rank in the mesh: its coordinate in row-major order."""
        index = 0
        for c, axis in zip(self.coordinate, self.axes):
            index = index * axis.size + c
        return index

    def axis_index(self, axis: int | str) -> int:
        names = [a.name for a in self.axes]
        if isinstance(axis, str) and axis in names:
            return names.index(axis)
        if isinstance(axis, int) and 0 <= axis < len(names):
            return axis
        raise ValueError(f"mesh: expected an axis of {names} or its index, got {axis!r}")

    def along(self, axis: int | str) -> Mesh:
        """The mesh of this rank's group along one axis."""
        i = self.axis_index(axis)
        return Mesh(axes=(self.axes[i],), coordinate=(self.coordinate[i],), groups=self.groups[i : i + 1])

    def group(self, axis: int | str) -> Group:
        """The group along one axis, looked up now. Only this needs process groups to exist."""
        i = self.axis_index(axis)
        if not self.groups:
            return self._no_group(i)
        return self._virtual_group(i) if self.groups[i].startswith(VIRTUAL) else self._process_group(i)

    def mark_broken(self, call: str, error: BaseException) -> None:
        """Make every later exchange of this process over the mesh's process groups raise: it left a call with an error."""
        from longspan._comm.process_group import mark_broken

        for name in self.groups:
            process_group = None if name.startswith(VIRTUAL) else process_group_by_name(name)
            if process_group is not None:
                mark_broken(process_group, call, error)

    def _no_group(self, i: int) -> Group:
        name, size = self.axes[i]
        if size == 1:
            return Alone(name=name)
        raise RuntimeError(
            f"this mesh is abstract: rank {self.rank} can plan with it, but not communicate with the {size} ranks of axis {name!r}; "
            "make the plan with the DeviceMesh or ProcessGroup that will run it"
        )

    def _virtual_group(self, i: int) -> Group:
        world = virtual_worlds.get(self.groups[i].split("/")[0])
        if world is None:
            raise RuntimeError(
                f"the virtual world of axis {self.axes[i].name!r} is in another process or was deleted: "
                "keep a reference to it while its meshes and plans are used"
            )
        return world.group(self.groups[i], self.coordinate[i])

    def _process_group(self, i: int) -> Group:
        from longspan._comm.process_group import C10dGroup

        name, size = self.axes[i]
        process_group = process_group_by_name(self.groups[i])
        if process_group is None:
            raise RuntimeError(
                f"axis {name!r} of the mesh ({size} ranks) communicates over the process group {self.groups[i]!r}, which this process "
                "does not have. Plans can be made anywhere (in a data-loader worker, for example), but run only in the process of their "
                "rank: call init_process_group there first, and make the mesh again if the groups were destroyed"
            )
        group = C10dGroup(name=name, group=process_group)
        if (group.rank, group.size) != (self.coordinate[i], size):
            raise RuntimeError(
                f"axis {name!r} of the mesh was made for rank {self.coordinate[i]} of {size}, but in the process group {self.groups[i]!r} "
                f"this process is rank {group.rank} of {group.size}; make the mesh and the plan on the rank that uses them, and again "
                "after groups were made again"
            )
        return group


def mesh_axes(shape: int | Sequence[int], names: Sequence[str] | None) -> tuple[Axis, ...]:
    """Axes of a shape, named axis0 and axis1 by default."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    axis_names = tuple(f"axis{i}" for i in range(len(sizes))) if names is None else tuple(names)
    if len(axis_names) != len(sizes):
        raise ValueError(f"mesh: expected a name for each of {len(sizes)} axes, got {axis_names}")
    return tuple(Axis(name, size) for name, size in zip(axis_names, sizes))


def coordinate_of(axes: Sequence[Axis], rank: int) -> tuple[int, ...]:
    """The coordinate of a rank of the mesh."""
    size = math.prod(axis.size for axis in axes)
    if not 0 <= rank < size:
        raise ValueError(f"mesh: expected a rank of 0 to {size - 1} in a mesh of {[axis.size for axis in axes]}, got {rank}")
    coordinate: list[int] = []
    for axis in reversed(axes):
        rank, c = divmod(rank, axis.size)
        coordinate.insert(0, c)
    return tuple(coordinate)


def as_mesh(value: Any) -> Mesh:
    """The mesh of a user's value: a Mesh, a DeviceMesh of one or two dims, or a ProcessGroup that this process belongs to."""
    if isinstance(value, Mesh):
        return value
    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(value, DeviceMesh):
            return _from_device_mesh(value)
        if isinstance(value, dist.ProcessGroup):
            rank = dist.get_rank(value)
            place = _member(rank if rank >= 0 else None, value)
            return Mesh(axes=mesh_axes(value.size(), None), coordinate=(place,), groups=(value.group_name,))
        if value is dist.GroupMember.NON_GROUP_MEMBER:
            _member(None, "the group that new_group was called for")
    why = "" if value is not None else "; torch.distributed.group.WORLD is None until init_process_group was called"
    raise TypeError(
        f"mesh: expected a DeviceMesh of one or two dims, a ProcessGroup, or a mesh of longspan.testing.virtual_world, got {value!r}{why}. "
        "To plan without groups, pass longspan.Mesh.abstract(ranks)"
    )


def context_mesh(value: Any) -> Mesh:
    """`as_mesh` of the ranks that share a sequence: those along "cp" if axes have the names of roles, otherwise all ranks.

    Raises:
        ValueError: Several axes, of which some but not all have the names of roles, or none is called "cp".
    """
    names = axis_names(value)
    if len(names) < 2 or not named_by_role(names):
        return as_mesh(value)
    return value.along(CONTEXT_AXIS) if isinstance(value, Mesh) else as_mesh(value[CONTEXT_AXIS])


def axis_names(value: Any) -> tuple[str, ...]:
    """The names of a mesh's axes; () if they have none."""
    return tuple(axis.name for axis in value.axes) if isinstance(value, Mesh) else tuple(getattr(value, "mesh_dim_names", None) or ())


def named_by_role(names: Sequence[str]) -> bool:
    """Whether axes are named "cp", "dp", "tp" and so on. Raises ValueError if only some are, or none is "cp"."""
    known = [name for name in names if name in (CONTEXT_AXIS, HEADS_AXIS, *DATA_AXES)]
    if known and (len(known) < len(names) or CONTEXT_AXIS not in names):
        raise ValueError(
            f"mesh: expected an axis {CONTEXT_AXIS!r} beside any of {', '.join(map(repr, (*DATA_AXES, HEADS_AXIS)))}, "
            f"got axes {tuple(names)}; name the axis whose ranks share a sequence 'cp', or pass the submesh of such axes"
        )
    return bool(known)


def _from_device_mesh(mesh: Any) -> Mesh:
    names = mesh.mesh_dim_names
    if not 1 <= mesh.ndim <= 2:
        example = "a DeviceMesh with mesh_dim_names, indexed by one or two of them"
        if names:
            example = f"mesh[{CONTEXT_AXIS!r}]" if CONTEXT_AXIS in names else f"mesh[one or two of {', '.join(map(repr, names))}]"
        raise ValueError(
            f"mesh: expected a DeviceMesh of one or two dims, got {mesh.ndim} ({mesh}); pass the submesh that shares a sequence: {example}"
        )
    coordinate = _member(mesh.get_coordinate(), mesh)
    if any(bool((mesh.mesh.diff(dim=i) <= 0).any()) for i in range(mesh.ndim)):
        raise ValueError(
            f"mesh: expected a DeviceMesh whose ranks ascend along every dim, as torch orders the ranks of a group; got {mesh}"
        )
    groups = tuple(mesh.get_group(i).group_name for i in range(mesh.ndim))
    return Mesh(axes=mesh_axes(tuple(mesh.shape), names), coordinate=tuple(coordinate), groups=groups)


def _member(place: Any, of: Any) -> Any:
    if place is None:
        raise ValueError(
            f"mesh: this process (global rank {dist.get_rank()}) is not a rank of {of}; only its ranks may plan and call with it"
        )
    return place
