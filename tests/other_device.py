"""A pretended second device on a CPU: its tensors compute on the CPU, and operators reject tensors of both devices, as with a GPU.

    with OtherDevice():
        x = torch.arange(6.0).to(OTHER)
        x[torch.tensor([1])]  # raises: the indices are on the CPU
        x.cpu()               # a plain tensor

torch calls the device "meta", which needs no driver. The methods that read values of a plain tensor (`tolist`) need `cpu()` before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

OTHER = torch.device("meta")
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class _OtherTensor(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _OtherTensor:
        sizes = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=OTHER, **sizes)  # type: ignore[attr-defined]
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """Makes `.to(OTHER)` and `device=OTHER` give tensors of the pretended device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    on_other = [isinstance(t, _OtherTensor) for t in tensors]
    if func not in _MOVES and any(on_other) and any(t.ndim and not other for t, other in zip(tensors, on_other, strict=True)):
        raise RuntimeError(f"{func}: expected all tensors on one device")
    device = kwargs.get("device")
    to_other = any(on_other) if device is None else torch.device(device) == OTHER
    kwargs = kwargs if device is None else {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda t: t.held if isinstance(t, _OtherTensor) else t, (args, kwargs))
    made = func(*args, **kwargs)
    return tree_map(lambda t: _OtherTensor(t) if isinstance(t, Tensor) else t, made) if to_other else made
