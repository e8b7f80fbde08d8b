"""SDPA on DTensors that are sharded along the sequence: run by the engine while the dispatcher is enabled in a thread."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from longspan._comm.mesh import Mesh, as_mesh
from longspan._dropin.dispatcher import AttentionDispatcher
from longspan._dropin.dtensor import is_dtensor
from longspan._dropin.intercept import SDPA, AttentionMode, intercepting
from longspan._plan.layout import Layout
from longspan.torch_compat._load_balancer import _create_default_load_balancer, layout_of
from longspan.torch_compat._options import strategy

MAX_DISPATCHERS = 16
MAX_GROUPS = 64

# The layouts of the last `_context_parallel_shard` over each group, by group name and length: a tensor computed from its shards does not
# say how it was sharded. Bounded by MAX_GROUPS.
declared_layouts: dict[str, dict[int, Layout]] = {}


def declare_layouts(group_name: str, layouts: dict[int, Layout]) -> None:
    """Record the layouts by which sequences are sharded over a group from now on."""
    declared_layouts.pop(group_name, None)
    while len(declared_layouts) >= MAX_GROUPS:
        declared_layouts.pop(next(iter(declared_layouts)))
    declared_layouts[group_name] = layouts


def default_layout(length: int, ranks: int) -> Layout:
    """torch's default: head-tail if enabled and 2N divides the length, else contiguous."""
    return layout_of(_create_default_load_balancer(length, ranks, "cpu"), length, ranks)


class DispatcherCache:
    """Dispatchers by mesh, rotation and layouts, so that calls of one kind share plans. Holds the last MAX_DISPATCHERS."""

    def __init__(self) -> None:
        self._dispatchers: dict[Any, AttentionDispatcher] = {}

    def of(self, mesh: Mesh, layouts: dict[int, Layout]) -> AttentionDispatcher:
        """The dispatcher for sequences of these lengths and layouts; other lengths get the default layout."""
        key = (mesh.groups, strategy(), tuple((n, layout.digest) for n, layout in layouts.items()))
        if key not in self._dispatchers:
            while len(self._dispatchers) >= MAX_DISPATCHERS:
                self._dispatchers.pop(next(iter(self._dispatchers)))

            def rule(length: int, ranks: int) -> Layout:
                return layouts[length] if length in layouts else default_layout(length, ranks)

            self._dispatchers[key] = AttentionDispatcher(mesh, layout=rule, strategy=strategy(), lengths=list(layouts))
        return self._dispatchers[key]

    def sdpa(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """SDPA over the mesh along which the query's sequence is sharded; torch's own if it is not."""
        mesh = _sequence_mesh(query)
        if mesh is None:
            return SDPA(query, key, value, *args, **kwargs)
        layouts = declared_layouts.get(mesh.groups[0])
        if not layouts:
            layouts = {n: default_layout(n, mesh.size) for n in dict.fromkeys((query.shape[-2], key.shape[-2]))}
        return self.of(mesh, layouts).sdpa(query, key, value, *args, **kwargs)


def _sequence_mesh(query: Any) -> Mesh | None:
    """The mesh axis along which a DTensor's sequence is sharded; None if there is none or if its local shard is not a plain tensor."""
    if not is_dtensor(query) or type(_local(query)) is not Tensor:
        return None
    mesh = query.device_mesh
    for i, placement in enumerate(query.placements):
        if isinstance(placement, Shard) and placement.dim == query.ndim - 2 and mesh.size(i) > 1:
            return as_mesh(mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[i]])
    return None


def _local(x: DTensor) -> Tensor:
    return x.to_local()


_enabled = threading.local()  # .stack: the active mode of this thread


def enable() -> None:
    """Activate the dispatcher in this thread until `disable`. A second call changes nothing."""
    if getattr(_enabled, "stack", None) is None:
        with ExitStack() as stack:
            stack.enter_context(intercepting(AttentionMode(sdpa=DispatcherCache().sdpa)))
            _enabled.stack = stack.pop_all()


def disable() -> None:
    """Deactivate the dispatcher in this thread."""
    stack, _enabled.stack = getattr(_enabled, "stack", None), None
    if stack is not None:
        stack.close()
