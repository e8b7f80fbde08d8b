"""Buffers: tensors that hold a whole sequence outside of a context and this rank's shard inside.

A buffer keeps its identity and gets other memory: the shard's inside, its own again afterwards. Its own memory is never written to. So
views of one tensor may both be buffers, and a restored buffer has the bits that it had before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from longspan._plan.layout import Layout
from longspan._plan.sharding import check_dims, shard

_IS_SHARD = "_longspan_shard"  # attribute of a tensor that holds a shard now, in any thread


def version_of(tensor: Tensor) -> int | None:
    """Number of in-place writes to a tensor that autograd counted; None for an inference tensor, which has no version counter."""
    return None if tensor.is_inference() else tensor._version


def mark_written(tensor: Tensor) -> None:
    """Count a write, so that backward refuses a tensor that was saved before. An inference tensor cannot be saved for backward."""
    if not tensor.is_inference():
        increment_version(tensor)


class Buffer:
    """One tensor and its sequence dim.

    restore: whether the tensor holds the whole sequence again after the context.
    """

    def __init__(self, tensor: Tensor, dim: int, *, restore: bool) -> None:
        self.tensor, self.dim, self.restore = tensor, dim, restore
        self._whole: Tensor | None = None  # the tensor's own memory, while it holds the shard
        self._shard: Tensor | None = None
        self.alias: Tensor | None = None  # the shard's memory in another tensor object

    @property
    def length(self) -> int:
        """Tokens along the sequence dim, as the tensor is now."""
        return self.tensor.shape[self.dim]

    def shard(self, layout: Layout, rank: int) -> None:
        """Give the tensor this rank's shard. The first time after `drop_shard` copies the shard out of the whole."""
        if getattr(self.tensor, _IS_SHARD, False):
            raise RuntimeError(
                f"buffers: expected a tensor that holds its whole sequence, got one of shape {tuple(self.tensor.shape)} that another open "
                "context, in this thread or another, has sharded already; list a tensor in one context only, and give each virtual rank "
                "its own"
            )
        # The shard is an inference tensor exactly if the whole is: torch refuses to mix their memory and their version counters.
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            whole = self.tensor.data
            local = shard(whole, self.dim, layout, rank) if self._shard is None else self._shard
            self.tensor.data = local
            self.alias = self.tensor.data
        if self.restore:
            self._whole, self._shard = whole, local
        setattr(self.tensor, _IS_SHARD, True)

    def unshard(self) -> None:
        """Give the tensor its own memory back."""
        self.alias = None
        if hasattr(self.tensor, _IS_SHARD):
            delattr(self.tensor, _IS_SHARD)
        if self._whole is None:
            return
        with torch.no_grad():
            self.tensor.data, self._whole = self._whole, None
        # An autograd graph that saved the tensor object would read the whole sequence in backward. A new version makes backward raise.
        mark_written(self.tensor)

    def readable(self) -> Tensor:
        """The tensor for an operation to read: an alias that still holds the shard after the context, if backward needs it then.

        The tensor itself if it requires grad or was given other memory meanwhile.
        """
        t, alias = self.tensor, self.alias
        if alias is None or t.requires_grad or t.data_ptr() != alias.data_ptr() or t.shape != alias.shape or t.stride() != alias.stride():
            return t
        return alias

    def drop_shard(self) -> None:
        """Make the next `shard` copy out of the whole again, which may have been written to."""
        self._shard = None


def make_buffers(tensors: Sequence[Any], dims: Sequence[int], not_restored: Iterable[Any]) -> list[Buffer]:
    """Buffers of tensors and their sequence dims, checked; one per tensor."""
    if len(tensors) != len(dims):
        raise ValueError(f"buffer_seq_dims: expected one dim for each of {len(tensors)} buffers, got {len(dims)}")
    not_restored_ids = {id(t) for t in not_restored}
    if not not_restored_ids <= {id(t) for t in tensors}:
        raise ValueError("no_restore_buffers: expected tensors that are in buffers, got others; list them in buffers too")
    buffers: dict[int, Buffer] = {}
    for i, (tensor, dim) in enumerate(zip(tensors, dims)):
        if type(tensor) is not Tensor:
            hint = "; DDP, FSDP or tensor parallelism shard parameters and DTensors" if isinstance(tensor, Tensor) else ""
            raise TypeError(f"buffers[{i}]: expected a plain tensor, got {type(tensor).__name__}{hint}")
        check_dims(f"buffer_seq_dims[{i}]", dim)
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"buffer_seq_dims[{i}]: expected a dim of buffers[{i}], whose shape is {tuple(tensor.shape)}, got {dim}")
        if tensor.requires_grad:
            raise ValueError(
                f"buffers[{i}]: expected a tensor that does not require grad, got one that requires grad: its gradient would have the "
                "shard's shape. Shard it differentiably instead, with the context's cp.shard(x, dim)"
            )
        dim = dim % tensor.ndim
        buffer = buffers.setdefault(id(tensor), Buffer(tensor, dim, restore=id(tensor) not in not_restored_ids))
        if buffer.dim != dim:
            raise ValueError(f"buffers[{i}]: expected one sequence dim per tensor, got {buffer.dim} and {dim} for a tensor listed twice")
    return list(buffers.values())
