"""Order between CUDA streams: block tables are uploaded on one stream, cached, and read by launches on any stream.

An upload returns before its copy has run. A launch on another stream must wait for the copy. When a table is deleted, its memory must not
be reused before launches on other streams have read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from longspan._torch_private import current_raw_stream


class Uploads:
    """Uploads by device index: the last of each stream, and the uploaded tensors that are alive.

    `ordered`: by device, streams that are ordered after all uploads and that these are recorded for. An upload leaves its own stream only.
    """

    def __init__(
        self,
        current_stream: Callable[[int], Any] = torch.cuda.current_stream,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._current_stream, self._is_capturing = current_stream, is_capturing
        self._lock, self._numbers = Lock(), count(1)
        self._events: dict[int, dict[int, Any]] = {}  # by device and stream, after its last upload
        self._alive: dict[int, dict[int, weakref.ref[Tensor]]] = {}  # by device, numbered in the order of uploads
        self._recorded: dict[int, dict[int, int]] = {}  # by device and stream, number of the last tensor recorded for it
        self.ordered: dict[int, frozenset[int]] = {}

    def add(self, tensors: Sequence[Tensor], device: int, stream: int) -> None:
        """Record an upload that was issued on the current stream. tensors: all that refer to the memory written to."""
        if self._is_capturing():  # a graph orders its own nodes
            return
        with self._lock:
            alive, events = self._alive.setdefault(device, {}), self._events.setdefault(device, {})
            for tensor in tensors:
                number = next(self._numbers)
                alive[number] = weakref.ref(tensor, lambda _, number=number: alive.pop(number, None))  # type: ignore[misc]
            events[stream] = self._current_stream(device).record_event(events.get(stream))
            self.ordered[device] = self.ordered.get(device, frozenset()) & {stream}

    def order(self, device: int, stream: int) -> None:
        """Make the current stream wait for uploads of other streams. Needed if the stream is not in `ordered[device]`."""
        if self._is_capturing():  # capture began with a synchronisation, and may not wait for events outside of the graph
            return
        with self._lock:
            current, recorded = self._current_stream(device), self._recorded.setdefault(device, {})
            for other, event in self._events.get(device, {}).items():
                if other != stream:
                    current.wait_event(event)  # not `query`, which would break a capture in another thread
            alive, last = self._alive.get(device, {}), recorded.get(stream, 0)
            for number in list(alive):  # not `items`: before Python 3.12, making tuples may collect garbage, which removes entries
                reference = alive.get(number) if number > last else None
                tensor = None if reference is None else reference()
                if tensor is not None:
                    tensor.record_stream(current)  # no-op for memory of the same stream
            recorded[stream] = next(self._numbers)
            self.ordered[device] = self.ordered.get(device, frozenset()) | {stream}


uploads = Uploads()


def note_upload(*tensors: Tensor) -> None:
    """Record that a copy or kernel that writes to tensors of one memory was issued on the current stream of their device."""
    device = tensors[0].device
    if device.type == "cuda":
        with torch.cuda.device(device):
            uploads.add(tensors, device.index, current_raw_stream(device.index))


def ordered_stream(device: int) -> int:
    """The current stream of the current device, ordered after uploads of other streams."""
    stream = current_raw_stream(device)
    if stream not in uploads.ordered.get(device, ()):
        uploads.order(device, stream)
    return stream
