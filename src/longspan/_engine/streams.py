"""CUDA streams of a backward pass: steps alternate between two streams.

The last CTAs of a kernel leave SMs idle. If the next step does not depend on this one, it runs on another stream and fills them. A
step's tensors are allocated and sent on the step's own stream, so that the caching allocator reuses their memory in that stream's order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from longspan._torch_private import current_cuda_device

Result = TypeVar("Result")


def is_captured(q: Tensor) -> bool:
    """Whether a call with this tensor becomes part of a CUDA graph, which needs launches that hold their tables."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def current_stream(like: Tensor) -> torch.cuda.Stream:
    """The current stream of a CUDA tensor's device, looked up by number: by `torch.device` it takes several times as long."""
    return torch.cuda.current_stream(like.get_device())


class StepStreams:
    """The streams of a backward pass's steps: the current one and a second one, or the current one only.

    As a context manager: the second stream begins after all work that the current stream has now. At exit, also after an error, the first
    stream is current again, and each stream waits for the other, so that either may reuse the other's memory.
    """

    def __init__(self, q: Tensor, *, two: bool) -> None:
        self.streams = [current_stream(q), _second_stream(q.get_device())] if two else []
        self._current = 0
        self._device = torch.cuda.device(q.get_device()) if two else nullcontext()

    def __enter__(self) -> None:
        self._device.__enter__()
        self._fork()

    def __exit__(self, *error: object) -> None:
        self.use(0)
        self.join()
        if self.streams and not torch.cuda.is_current_stream_capturing():  # a graph capture must end with its streams joined
            self._fork()
        self._device.__exit__(None, None, None)

    def _fork(self) -> None:
        for second in self.streams[1:]:
            second.wait_stream(self.streams[0])

    def join(self) -> None:
        """Make the first stream, on which the caller continues, wait for the second."""
        for second in self.streams[1:]:
            self.streams[0].wait_stream(second)

    def use(self, step: int) -> int:
        """Make the stream of a step current. Returns a step of the stream that was."""
        before, now = self._current, step % 2
        if self.streams and before != now:
            self._current = now
            torch.cuda.set_stream(self.streams[now])
        return before

    def record(self) -> torch.cuda.Event | None:
        """An event after the work that the current stream has now; None where there is one stream only."""
        return self.streams[self._current].record_event() if self.streams else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for an event of `record`."""
        if event is not None:
            self.streams[self._current].wait_event(event)


def run_on(stream: torch.cuda.Stream, fn: Callable[[], Result]) -> Result:
    """fn(), with this stream current: `torch.cuda.stream`, in less time if the stream's device is current."""
    if current_cuda_device() != stream.device_index:
        with torch.cuda.stream(stream):
            return fn()
    before = torch.cuda.current_stream(stream.device_index)
    torch.cuda.set_stream(stream)
    try:
        return fn()
    finally:
        torch.cuda.set_stream(before)


@cache
def _second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def issue_stream(device: int) -> torch.cuda.Stream:
    """The stream on which exchanges are issued that must not wait for a kernel launched before them."""
    return torch.cuda.Stream(device)
