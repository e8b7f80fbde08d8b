"""longspan: attention over sequences too long for one device."""

from importlib import import_module
from typing import Any

from longspan.comm.mesh import Mesh
from longspan.dropin.context import context_parallel
from longspan.engine.attention import attention
from longspan.engine.signatures import flex_attention, scaled_dot_product_attention
from longspan.masks.algebra import Mask, causal, documents, full, mask_mod, prefix, sliding_window
from longspan.masks.table import BlockTable
from longspan.masks.tracing import ProgramError
from longspan.plan.layout import Layout
from longspan.plan.make import plan
from longspan.plan.plan import Plan
from longspan.plan.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "BlockTable",
    "ContextParallel",
    "Layout",
    "Mask",
    "Mesh",
    "Plan",
    "ProgramError",
    "Schedule",
    "attention",
    "causal",
    "context_parallel",
    "documents",
    "flex_attention",
    "full",
    "mask_mod",
    "plan",
    "prefix",
    "scaled_dot_product_attention",
    "sliding_window",
]


# These bring more of torch with them (DTensor, multiprocessing) or need other packages: imported when asked for.
_LATER = ("dropin", "integrations", "testing", "torch_compat")


def __getattr__(name: str) -> Any:
    if name == "ContextParallel":
        from longspan.dropin.style import ContextParallel

        return ContextParallel
    if name in _LATER:
        return import_module(f"longspan.{name}")
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "ContextParallel", *_LATER})
