"""Contexts with other settings of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def matmul_precision(setting: str) -> Iterator[None]:
    """`torch.backends.cuda.matmul.fp32_precision`. `monkeypatch` cannot undo it: the module resolves it by `__getattr__`."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = setting
    try:
        yield
    finally:
        matmul.fp32_precision = before
