"""Streams of a backward pass: steps alternate between two, and each waits for the other at the ends."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from longspan._engine.streams import StepStreams


class Stream:
    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, "waits for", event))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: made.append(("current", stream.name)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def two(log: list[Any]) -> StepStreams:
    streams = StepStreams.__new__(StepStreams)
    streams.streams, streams._current, streams._device = [Stream("first", log), Stream("second", log)], 0, nullcontext()  # type: ignore[list-item, assignment]
    return streams


def test_steps_alternate_between_two_streams(log: list[Any]) -> None:
    streams = two(log)
    with streams:
        assert log == [("second", "waits for", "first")]
        assert [streams.use(step) for step in (0, 1, 3, 2, 4, 5)] == [0, 0, 1, 1, 0, 0]
        assert log[1:] == [("current", "second"), ("current", "first"), ("current", "second")]
        event = streams.record()
        assert event == "event of second"
        streams.use(0)
        streams.wait(event)
        assert log[-1] == ("first", "waits for", "event of second")
        streams.wait(None)
        streams.use(1)
        del log[:]
    assert log == [("current", "first"), ("first", "waits for", "second"), ("second", "waits for", "first")]


def test_a_graph_capture_ends_with_its_streams_joined(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with two(log):
        del log[:]
    assert log == [("first", "waits for", "second")]


def test_one_stream_records_nothing(log: list[Any]) -> None:
    with StepStreams(torch.zeros(1), two=False) as entered:
        assert entered is None
    streams = StepStreams(torch.zeros(1), two=False)
    with streams:
        assert [streams.use(step) for step in (0, 1, 2)] == [0, 0, 0] and streams.record() is None
        streams.wait(None)
    assert log == []
