"""CUDA streams of a backward pass: steps alternate between two streams.

The last CTAs of a kernel leave SMs idle. If the next step does not depend on this one, it runs on another stream and fills them. A
step's tensors are allocated and sent on the step's own stream, so that the caching allocator reuses their memory in that stream's order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


def is_captured(q: Tensor) -> bool:
    """Whether a call with this tensor becomes part of a CUDA graph, which needs launches that hold their tables."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def current_stream(like: Tensor) -> torch.cuda.Stream:
    """The current stream of a CUDA tensor's device, looked up by number: by `torch.device` it takes several times as long."""
    return torch.cuda.current_stream(like.get_device())


class StepStreams:
    """The streams of a backward pass's steps: the current one and a second one, or the current one only.

    As a context manager: the second stream begins after all work that the current stream has now. At exit, also after an error, each stream
    waits for the other, so that either may reuse the other's memory.
    """

    def __init__(self, q: Tensor, *, two: bool) -> None:
        self.streams = [current_stream(q), _second_stream(q.get_device())] if two else []
        self._current = self.streams[:1]  # a stack: the last is current
        self._device = torch.cuda.device(q.get_device()) if two else nullcontext()

    def __enter__(self) -> None:
        self._device.__enter__()
        self._fork()

    def __exit__(self, *error: object) -> None:
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

    def of(self, step: int) -> AbstractContextManager[object]:
        """A context in which the stream of a step is current."""
        if not self.streams or self._current[-1] is self.streams[step % 2]:
            return _UNCHANGED
        return _CurrentStream(self._current, self.streams[step % 2])

    def record(self) -> torch.cuda.Event | None:
        """An event after the work that the current stream has now; None where there is one stream only."""
        return self._current[-1].record_event() if self.streams else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for an event of `record`."""
        if event is not None:
            self._current[-1].wait_event(event)


_UNCHANGED = nullcontext()


class _CurrentStream:
    """A context in which a stream of the current device is current. `torch.cuda.stream` looks up the device and the stream before it."""

    def __init__(self, stack: list[torch.cuda.Stream], stream: torch.cuda.Stream) -> None:
        self._stack, self._stream = stack, stream

    def __enter__(self) -> None:
        self._stack.append(self._stream)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        self._stack.pop()
        torch.cuda.set_stream(self._stack[-1])


@cache
def _second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def issue_stream(device: int) -> torch.cuda.Stream:
    """The stream on which exchanges are issued that must not wait for a kernel launched before them."""
    return torch.cuda.Stream(device)
