"""What stands between the engine and a model: batches, the loss, transformers, a small decoder to train."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`transformers` and what else needs other packages: imported when asked for."""
    if name in ("batch", "loss", "trainer", "training", "transformers"):
        return import_module(f"longspan.integrations.{name}")
    raise AttributeError(f"module 'longspan.integrations' has no attribute {name!r}")
