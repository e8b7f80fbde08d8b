"""SDPA calls on DTensors that are sharded along the sequence, sent to the engine while this is enabled in a thread."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from longspan._comm.mesh import Mesh, as_mesh
from longspan._dropin.dispatcher import Spanning
from longspan._dropin.dtensor import is_dtensor
from longspan._dropin.intercept import SDPA, AttentionMode, intercepting
from longspan._plan.layout import Layout
from longspan.torch_compat._load_balancer import _create_default_load_balancer, layout_of
from longspan.torch_compat._options import strategy

# What `_context_parallel_shard` last laid out over a mesh: lengths and layouts, by the name of the mesh's group. Tensors computed from
# its shards carry no sign of how they lie.
declared: dict[str, dict[int, Layout]] = {}


def default_layout(length: int, ranks: int) -> Layout:
    """torch's rule: head-tail where enabled and the length allows it, else in the order of ranks."""
    return layout_of(_create_default_load_balancer(length, ranks, "cpu"), length, ranks)


class Spans:
    """Spannings by mesh, rotation and what was declared: calls of one kind share their plans."""

    def __init__(self) -> None:
        self.made: dict[Any, Spanning] = {}

    def of(self, mesh: Mesh, lengths: dict[int, Layout]) -> Spanning:
        key = (mesh.groups, strategy(), tuple((n, layout.digest) for n, layout in lengths.items()))
        if key not in self.made:
            self.made[key] = Spanning(mesh, layout=lambda n, ranks: lengths[n] if n in lengths else default_layout(n, ranks),
                                      strategy=strategy(), lengths=list(lengths))  # fmt: skip
        return self.made[key]

    def sdpa(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        found = _sequence_axis(query)
        if found is None:
            return SDPA(query, key, value, *args, **kwargs)
        mesh = found
        lengths = declared.get(mesh.groups[0])
        if not lengths:
            lengths = {n: default_layout(n, mesh.size) for n in dict.fromkeys((query.shape[-2], key.shape[-2]))}
        return self.of(mesh, lengths).sdpa(query, key, value, *args, **kwargs)


def _sequence_axis(query: Any) -> Mesh | None:
    """The mesh axis along which a DTensor's sequence is sharded; None where it is not, or where its shards are not plain tensors."""
    if not is_dtensor(query) or type(_local(query)) is not Tensor:
        return None
    mesh = query.device_mesh
    for i, placement in enumerate(query.placements):
        if isinstance(placement, Shard) and placement.dim == query.ndim - 2 and mesh.size(i) > 1:
            return as_mesh(mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[i]])
    return None


def _local(x: DTensor) -> Tensor:
    return x.to_local()


_enabled = threading.local()


def mode() -> AttentionMode:
    return AttentionMode(sdpa=Spans().sdpa)


def enable() -> None:
    """On, in this thread, until `disable`. Once is enough."""
    if getattr(_enabled, "stack", None) is None:
        with ExitStack() as stack:
            stack.enter_context(intercepting(mode()))
            _enabled.stack = stack.pop_all()


def disable() -> None:
    stack, _enabled.stack = getattr(_enabled, "stack", None), None
    if stack is not None:
        stack.close()
