"""A mesh of which this process plays one rank; no data is exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, RANK = 3, 1


@contextmanager
def fake_mesh(**axes: int) -> Iterator[DeviceMesh]:
    """A mesh with these axes, whose product is RANKS; by default one, "cp"."""
    axes = axes or {"cp": RANKS}
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
