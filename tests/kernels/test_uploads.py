"""Launches on a CUDA stream wait for block tables that another stream uploads."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls

pytest.importorskip("triton")
from longspan._kernels.gpu import uploads as uploading
from longspan._kernels.gpu.uploads import Uploads


class _Event:
    pass


class _Stream:
    def __init__(self) -> None:
        self.recorded: list[_Event] = []
        self.waited: list[_Event] = []

    def record_event(self, event: _Event | None = None) -> _Event:
        self.recorded.append(event or _Event())
        return self.recorded[-1]

    def wait_event(self, event: _Event) -> None:
        self.waited.append(event)


class _Tensor:
    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


class _Device:
    """A device with three streams, of which one is current."""

    def __init__(self) -> None:
        self.streams, self.current, self.capturing = [_Stream() for _ in range(3)], 0, False
        self.uploads = Uploads(lambda _: self.streams[self.current], lambda: self.capturing)

    def upload(self, stream: int) -> Any:
        self.current = stream
        tensor: Any = _Tensor()
        self.uploads.add([tensor], 0, stream)
        return tensor

    def launch(self, stream: int) -> bool:
        """Whether the launch had to be ordered after uploads."""
        self.current = stream
        if stream in self.uploads.ordered.get(0, ()):
            return False
        self.uploads.order(0, stream)
        return True


def test_another_stream_waits_for_uploads() -> None:
    device = _Device()
    device.upload(0)
    assert device.launch(0) and not device.launch(0)
    assert not device.streams[0].waited
    assert device.launch(1) and not device.launch(1) and not device.launch(0)
    assert device.streams[1].waited == device.streams[0].recorded
    device.upload(0)  # between two launches of stream 1
    assert not device.launch(0) and device.launch(1)
    assert device.streams[1].waited[-1] is device.streams[0].recorded[-1]


def test_the_current_stream_is_ordered_once_after_each_upload_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    monkeypatch.setattr(uploading, "uploads", device.uploads)
    monkeypatch.setattr(uploading, "current_raw_stream", lambda index: device.current)
    table = device.upload(1)
    device.current = 2
    for _ in range(2):
        assert uploading.ordered_stream(0) == 2
        assert device.uploads.ordered == {0: {2}} and device.streams[2].waited == device.streams[1].recorded
        assert table.streams == [device.streams[2]]
    device.upload(0)
    device.current = 2
    assert uploading.ordered_stream(0) == 2 and len(device.streams[2].waited) == 3


def test_a_stream_that_uploads_still_waits_for_earlier_uploads_of_others() -> None:
    device = _Device()
    device.upload(0)
    device.upload(1)
    assert device.launch(1)
    assert device.streams[1].waited == device.streams[0].recorded


def test_tables_are_recorded_for_each_stream_that_launches_after_their_upload() -> None:
    device = _Device()
    first, deleted = device.upload(0), device.upload(0)
    device.launch(0)
    del deleted
    gc.collect()
    device.launch(1)
    second = device.upload(2)
    assert device.streams[1] in first.streams and not second.streams
    device.launch(1)
    assert first.streams.count(device.streams[1]) == 1  # not once for every later upload
    assert second.streams == [device.streams[1]]
    device.launch(2)
    assert device.streams[2] in first.streams
    assert len(device.uploads._alive[0]) == 2


def test_a_captured_stream_waits_for_no_event_outside_of_its_graph() -> None:
    device = _Device()
    device.upload(0)
    device.capturing = True
    device.launch(1)
    device.upload(1)
    assert not device.streams[1].waited and not device.streams[1].recorded
    device.capturing = False
    assert device.launch(1) and device.streams[1].waited


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "dim"), [("triton", 64), ("hopper", 64), ("hopper", 128)])
def test_a_first_call_on_two_streams_gives_the_same_results(kernel: str, dim: int) -> None:
    if kernel == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    was_busy = [race_on_two_streams(kernel, dim, window) for window in (100, 300)]
    assert any(was_busy), "stream 1 had ended before the launch on stream 2"


def race_on_two_streams(kernel: str, dim: int, window: int) -> bool:
    """A first call while stream 1, which uploads its tables, is busy; then the same call on stream 2. Whether stream 1 was still busy."""
    mask = ls.causal() & ls.sliding_window(window)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()

    def call(q: Tensor) -> list[Tensor]:
        leaf = q.detach().requires_grad_()
        out = ls.attention(leaf, leaf, leaf, mask=mask, kernel=kernel)
        return [out.detach(), *torch.autograd.grad(out, leaf, torch.ones_like(out))]

    torch.manual_seed(window)
    q = torch.randn(1, 4, 2048, dim, device="cuda", dtype=torch.bfloat16)
    for stream in (one, two):  # compile, and fill the allocator's pools
        with torch.cuda.stream(stream):
            call(q[:, :, :1024])
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(1_000_000_000)  # half a second before the tables of 2,048 tokens arrive
        first = call(q)
    with torch.cuda.stream(two):
        second = call(q)
    was_busy = not one.query()
    torch.cuda.synchronize()
    for a, b, c in zip(first, second, call(q), strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)
    return was_busy
