"""Tensors in pinned host memory while the device does not need them.

A tensor is copied to the host on a stream of its own, behind the computation. Backward passes read tensors in the reverse order of forward
passes: when one is read, the one that was stored before it starts to return.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class HostTensor:
    """One tensor of a `HostStore`. A tensor that is on the host already stays where it is.

    Modifications in place after `put` are found by the tensor's version, as long as somebody holds its memory: a copy may have been made
    before or after them.
    """

    def __init__(self, tensor: Tensor, before: HostTensor | None, stream: torch.cuda.Stream | None) -> None:
        self._device, self._before, self._stream = tensor.device, None if before is None else weakref.ref(before), stream
        self._original, self._version = weakref.ref(tensor), tensor._version
        self._returning: Tensor | None = None
        self._held = tensor.detach()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                self._held = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
                self._held.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(stream)

    def start_return(self) -> None:
        """Start the copy to the device, unless it has started."""
        if self._stream is not None and self._returning is None:
            with torch.cuda.stream(self._stream):
                self._returning = self._held.to(self._device, non_blocking=True)

    def read(self) -> Tensor:
        """The tensor on its device, ordered before later work of the current stream.

        Raises:
            RuntimeError: It was modified in place since it was stored.
        """
        self.check()
        if self._stream is None:
            return self._held
        self.start_return()
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        tensor, self._returning = self._returning, None
        assert tensor is not None
        tensor.record_stream(current)
        before = None if self._before is None else self._before()
        if before is not None:
            before.start_return()
        return tensor

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place since it was stored."""
        original = self._original()
        if original is not None and original._version != self._version:
            raise RuntimeError(
                "longspan.integrations.memory: a tensor that waits in host memory was modified in place: expected an operation with a new "
                "result"
            )


class HostStore:
    """Tensors that one forward pass stores and its backward pass reads."""

    def __init__(self) -> None:
        self._last: weakref.ref[HostTensor] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> HostStore:
        return HostStore()  # of the copy's own forward passes

    def put(self, tensor: Tensor) -> HostTensor:
        """Start to copy a tensor to the host. Its memory on the device is free when the copy is done and nobody else holds it."""
        stream = None
        if tensor.is_cuda:
            stream = self._streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stored = HostTensor(tensor, None if self._last is None else self._last(), stream)
        self._last = weakref.ref(stored)
        return stored
