"""Tensors that hold a whole sequence outside of a context and this rank's shard inside.

A buffer keeps its identity and gets other memory: the shard's inside, its own again afterwards. Its own memory is never written to, so
that views of one tensor may both be buffers, and what comes back is what was there, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from longspan._plan.layout import Layout
from longspan._plan.sharding import shard

_MARK = "_longspan_shard"  # on a tensor that holds a shard just now, in whatever thread


def version_of(tensor: Tensor) -> int | None:
    """Number of in-place writes to a tensor that autograd counted; None for an inference tensor, which has no version counter."""
    return None if tensor.is_inference() else tensor._version


def mark_written(tensor: Tensor) -> None:
    """Count a write, so that backward refuses a tensor that was saved before. An inference tensor cannot be saved for backward."""
    if not tensor.is_inference():
        increment_version(tensor)


class Buffer:
    """One tensor and its sequence dim."""

    def __init__(self, tensor: Tensor, dim: int, *, restore: bool) -> None:
        self.tensor, self.dim, self.restore = tensor, dim, restore
        self.whole: Tensor | None = None
        self.part: Tensor | None = None
        self.alias: Tensor | None = None

    @property
    def length(self) -> int:
        return self.tensor.shape[self.dim]

    def shard(self, layout: Layout, rank: int) -> None:
        """Give the tensor this rank's part of it. The first time the part is copied out of the whole."""
        if getattr(self.tensor, _MARK, False):
            raise RuntimeError(
                f"a buffer of shape {tuple(self.tensor.shape)} is one of another context that is open, in this thread or another: "
                "it holds a shard already. List it once; virtual ranks each need tensors of their own"
            )
        # The shard is an inference tensor exactly if the whole is: torch refuses to mix their memory and their version counters.
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            whole = self.tensor.data
            part = shard(whole, self.dim, layout, rank) if self.part is None else self.part
            self.tensor.data = part
            self.alias = self.tensor.data
        if self.restore:
            self.whole, self.part = whole, part
        setattr(self.tensor, _MARK, True)

    def unshard(self) -> None:
        """Give the tensor its own memory back."""
        self.alias = None
        if hasattr(self.tensor, _MARK):
            delattr(self.tensor, _MARK)
        if self.whole is None:
            return
        with torch.no_grad():
            self.tensor.data, self.whole = self.whole, None
        # A graph that holds the tensor itself would meet the whole of it in backward: torch refuses that by its version.
        mark_written(self.tensor)

    def current(self) -> Tensor:
        """The tensor as an operation should read it: the same memory under a name that stays with the shard when the context closes.

        Saved for backward, the tensor itself would have the whole's memory by then. Not where it was given a gradient or other memory.
        """
        t, alias = self.tensor, self.alias
        if alias is None or t.requires_grad or t.data_ptr() != alias.data_ptr() or t.shape != alias.shape or t.stride() != alias.stride():
            return t
        return alias

    def forget(self) -> None:
        """The next `shard` copies out of the whole again: it may have been written to."""
        self.part = None


def buffers_of(tensors: Sequence[Any], dims: Sequence[int], kept: Iterable[Any]) -> list[Buffer]:
    """Checked, each tensor once."""
    if len(tensors) != len(dims):
        raise ValueError(f"buffer_seq_dims: expected one dim for each of {len(tensors)} buffers, got {len(dims)}")
    found: list[Buffer] = []
    not_restored = {id(t) for t in kept}
    if not not_restored <= {id(t) for t in tensors}:
        raise ValueError("no_restore_buffers: expected tensors that are in buffers, got others; list them there too")
    for i, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        if type(tensor) is not Tensor:
            hint = "; parameters and DTensors are sharded by other means" if isinstance(tensor, Tensor) else ""
            raise TypeError(f"buffers[{i}]: expected a plain tensor, got {type(tensor).__name__}{hint}")
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"buffer_seq_dims[{i}]: {dim} is not a dim of buffers[{i}], whose shape is {tuple(tensor.shape)}")
        if tensor.requires_grad:
            raise ValueError(
                f"buffers[{i}] requires grad: its gradient would have the shard's shape. Shard it differentiably instead, with the "
                "context's own cp.shard(x, dim)"
            )
        dim = dim % tensor.ndim
        same = [b for b in found if b.tensor is tensor]
        if same and same[0].dim != dim:
            raise ValueError(f"buffers[{i}] is listed twice, with sequence dims {same[0].dim} and {dim}: a tensor has one")
        if not same:
            found.append(Buffer(tensor, dim, restore=id(tensor) not in not_restored))
    return found
