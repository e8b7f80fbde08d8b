"""Timing of GPU calls that take turns: device time behind a queued pause, and time as an eager caller sees it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

Calls = Mapping[str, Callable[[], Any]]
# Cycles of the pause in front of a call: longer than the host takes to enqueue it.
PAUSE_CYCLES = 4_000_000


def device_ms(calls: Calls, *, repeat: int = 20, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds of each call on the device; launches are enqueued behind a pause, so host time is excluded."""
    return _turns(calls, repeat=repeat, warmup=warmup, pause=True)


def as_called_ms(calls: Calls, *, repeat: int = 20, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds of one eager call on an idle device; host time is included."""
    return _turns(calls, repeat=repeat, warmup=warmup, pause=False)


def host_us(call: Callable[[], Any], *, repeat: int = 100) -> float:
    """Median microseconds of host time of a call whose device work is already enqueued elsewhere."""
    import time

    samples = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        torch.cuda._sleep(PAUSE_CYCLES)
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(samples)


def _turns(calls: Calls, *, repeat: int, warmup: int, pause: bool) -> dict[str, float]:
    """Calls run in a random order each round: a call that follows one with a high power draw runs at a lower clock."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in random.sample(list(calls.items()), len(calls)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            if pause:
                torch.cuda._sleep(PAUSE_CYCLES)
            start.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in samples.items()}
