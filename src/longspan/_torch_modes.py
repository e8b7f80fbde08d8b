"""Context managers that turn off torch modes of the caller, so that they cannot change a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from types import TracebackType

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


class without_autocast(ContextDecorator):  # named as a function: it is used as one
    """Autocast off on CPU and CUDA: operations keep the dtypes of their operands, and float32 sums stay float32.

    A context manager and a decorator. A class, because a generator takes longer than some of the calls that it surrounds.
    """

    _stack: ExitStack | None = None

    def _recreate_cm(self) -> without_autocast:
        return without_autocast()

    def __enter__(self) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._stack = self._stack or ExitStack()
                self._stack.enter_context(torch.autocast(device, enabled=False))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._stack is not None:
            self._stack.__exit__(kind, error, traceback)
