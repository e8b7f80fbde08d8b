"""Context managers that turn off torch modes of the caller, so that they cannot change a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from types import TracebackType

import torch

from longspan._torch_private import function_modes_are_active


@contextmanager
def default_modes() -> Iterator[None]:
    """Inference mode off and the CPU as the default device. Autograd cannot use inference tensors later, and plans live on the CPU."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            # Leaving inference mode enables autograd, so it is disabled afterwards.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if _default_device_is_set():
            stack.enter_context(torch.device("cpu"))
        yield


def _default_device_is_set() -> bool:
    """Whether torch's default device is not the CPU. It is a function mode, and looking for modes is faster than asking for the device."""
    return function_modes_are_active() and torch.get_default_device().type != "cpu"


class without_user_defaults(ContextDecorator):  # named as a function: it is used as one
    """Autocast off on CPU and CUDA, and the CPU as the default device: operations keep the dtypes of their operands, float32 sums stay
    float32, and tables of the host stay on the host.

    A context manager and a decorator. A class, because a generator takes longer than some of the calls that it surrounds.
    """

    _stack: ExitStack | None = None

    def _recreate_cm(self) -> without_user_defaults:
        return without_user_defaults()

    def __enter__(self) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self._stack = self._stack or ExitStack()
                self._stack.enter_context(torch.autocast(device, enabled=False))
        if _default_device_is_set():
            self._stack = self._stack or ExitStack()
            self._stack.enter_context(torch.device("cpu"))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._stack is not None:
            self._stack.__exit__(kind, error, traceback)
