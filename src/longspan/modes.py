"""Where plans are made: on the CPU, for any later use, whatever the caller has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def settled() -> Iterator[None]:
    """As if nothing had been set: tensors are made on the CPU, and not as inference tensors, which autograd would refuse later."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
