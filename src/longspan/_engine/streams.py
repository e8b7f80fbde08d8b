"""Streams on which the steps of a backward pass run in turn.

The last programs of a kernel leave multiprocessors idle. Where the next step does not depend on this one, it is given to another stream
and fills them. A lane's tensors are made and sent on its own stream, so that its memory is used again in that stream's order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


class Lanes:
    """`two`: steps take turns on the current stream and on another one. Else all of them run where they are.

    As a context: the other lane begins when all that the current stream was given before is done. At its end, whatever happened in between,
    both lanes wait for each other, so that memory of either may be used again by either.
    """

    def __init__(self, device: torch.device, *, two: bool) -> None:
        self.streams = [torch.cuda.current_stream(device), _other(device)] if two else []

    def __enter__(self) -> None:
        for other in self.streams[1:]:
            other.wait_stream(self.streams[0])

    def __exit__(self, *error: object) -> None:
        self.join()
        if self.streams and not torch.cuda.is_current_stream_capturing():  # a graph's capture must end with the lanes joined
            self.__enter__()

    def join(self) -> None:
        """The first lane, which the caller goes on with, waits for the other."""
        for other in self.streams[1:]:
            self.streams[0].wait_stream(other)

    def of(self, step: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.streams[step % 2]) if self.streams else nullcontext()

    def done(self) -> torch.cuda.Event | None:
        """What was begun by now in the lane that is current."""
        return torch.cuda.current_stream(self.streams[0].device).record_event() if self.streams else None

    def after(self, event: torch.cuda.Event | None) -> None:
        """The lane that is current goes on when that has happened."""
        if event is not None:
            torch.cuda.current_stream(self.streams[0].device).wait_event(event)


@cache
def _other(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
