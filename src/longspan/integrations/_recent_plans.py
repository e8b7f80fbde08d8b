"""Plans of recent batches: a batch with the masks of a recent one gets its plans, so fixed lengths are not planned anew every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from ctypes import string_at
from dataclasses import fields, is_dataclass
from hashlib import sha256
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._masks.algebra import Mask
from longspan._planner.plan import Plan

_PLAIN = (bool, int, str, torch.dtype, type(None))


class RecentPlans:
    """Plans by name, the last `size` that were asked for. Thread-safe; threads that ask at the same time both make plans."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, Lock()
        self._plans: OrderedDict[tuple[Hashable, Mesh], dict[str, Plan]] = OrderedDict()

    def get(self, key: Hashable, mesh: Mesh, make: Callable[[], dict[str, Plan]]) -> dict[str, Plan]:
        """The plans under a key of `plans_key` on a mesh, made at the first call; made at every call if the key is None.

        Plans of another rank, or of another mesh with the same axes, are bound to this one.
        """
        if key is None:
            return make()
        with self._lock:
            plans = self._plans.get((key, mesh))
            if plans is not None:
                self._plans.move_to_end((key, mesh))
                return plans
            others = next((plans for (same, _), plans in self._plans.items() if same == key), None)
        plans = make() if others is None else {name: plan.on(mesh) for name, plan in others.items()}
        with self._lock:
            self._plans[key, mesh] = plans
            if len(self._plans) > self._size:
                self._plans.popitem(last=False)
        return plans


def plans_key(masks: Mapping[str, Mask], seq_len: int, mesh: Mesh, options: Mapping[str, Any]) -> Hashable:
    """Equal for calls of `longspan.plan` that give equal plans, up to the rank; None where that is not known."""
    contents = [mask_contents(mask) for mask in masks.values()]
    # A cluster may be a file, and a layout or schedule is as large as a plan.
    if None in contents or options.get("cluster") is not None or not all(isinstance(value, _PLAIN) for value in options.values()):
        return None
    return tuple(masks), tuple(contents), seq_len, mesh.axes, tuple(sorted(options.items(), key=lambda item: item[0]))


def mask_contents(mask: Mask) -> Hashable:
    """Equal for masks that allow the same pairs; None for masks of functions, or of tensors that may change or are not on the CPU."""
    if mask.value_key is not None:
        return mask.value_key
    if not mask.reads_copies or not is_dataclass(mask):
        return None
    contents = tuple(_contents(getattr(mask, field.name)) for field in fields(mask) if field.init)  # the others follow
    return None if None in contents else (type(mask), contents)


def _contents(value: Any) -> Hashable:
    if isinstance(value, Mask):
        return mask_contents(value)
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            return None
        data = value.contiguous()
        return value.dtype, value.shape, sha256(string_at(data.data_ptr(), data.nbytes)).digest()
    return (value,) if isinstance(value, _PLAIN) else None
