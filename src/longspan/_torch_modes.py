"""Stepping out of what a caller has set in torch, where that must have no part in the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def settled() -> Iterator[None]:
    """As if nothing had been set: tensors are made on the CPU, and not as inference tensors, which autograd would refuse later."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            # Leaving inference mode turns autograd on, so that comes first.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Operations in the dtypes of their operands: sums that are held in float32 stay so."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
