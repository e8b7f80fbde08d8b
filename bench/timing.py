"""Times of GPU calls that alternate in random order: device time, time of an eager call, host time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Calls = Mapping[str, Callable[[], Any]]
# Cycles of the pause before a call: longer than the host needs to enqueue the call.
PAUSE_CYCLES = 4_000_000


def device_ms(calls: Calls, *, repeat: int = 20, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds of each call on the device; launches are enqueued behind a pause, so host time is excluded."""
    return _alternating(calls, repeat=repeat, warmup=warmup, pause=True)


def as_called_ms(calls: Calls, *, repeat: int = 20, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds of one eager call on an idle device; host time is included."""
    return _alternating(calls, repeat=repeat, warmup=warmup, pause=False)


def host_us(call: Callable[[], Any], *, repeat: int = 100) -> float:
    """Median microseconds of host time of a call; the device is paused, so the host does not wait for it."""
    samples = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        torch.cuda._sleep(PAUSE_CYCLES)
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(samples)


def deterministic(call: Callable[[], Any]) -> Any:
    """The result of a call under torch.use_deterministic_algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def _alternating(calls: Calls, *, repeat: int, warmup: int, pause: bool) -> dict[str, float]:
    """Median milliseconds by call. The order is random in each round: a kernel after one with a high power draw runs at a lower clock."""
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
