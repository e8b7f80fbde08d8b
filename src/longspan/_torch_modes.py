"""Context managers that turn off torch modes of the caller, so that they cannot change a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def default_modes() -> Iterator[None]:
    """Inference mode off and the CPU as the default device. Autograd cannot use inference tensors later, and plans live on the CPU."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            # Leaving inference mode enables autograd, so it is disabled afterwards.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast off on CPU and CUDA: operations keep the dtypes of their operands, and float32 sums stay float32."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
