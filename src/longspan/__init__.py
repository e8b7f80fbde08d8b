"""longspan: attention over sequences too long for one device."""

from importlib import import_module
from typing import Any

from longspan._comm.mesh import Mesh
from longspan._dropin.context import context_parallel
from longspan._engine.attention import attention
from longspan._engine.signatures import flex_attention, scaled_dot_product_attention
from longspan._masks.algebra import Mask, causal, documents, full, mask_mod, prefix, sliding_window
from longspan._masks.block_table import BlockTable
from longspan._masks.tracing import ProgramError
from longspan._plan.layout import Layout
from longspan._plan.plan_data import Plan
from longspan._plan.schedule import Schedule
from longspan._planner.build import plan

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
_LATER = ("integrations", "testing", "torch_compat")


def __getattr__(name: str) -> Any:
    if name == "ContextParallel":
        from longspan._dropin.parallel_style import ContextParallel

        return ContextParallel
    if name in _LATER:
        return import_module(f"longspan.{name}")
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "ContextParallel", *_LATER})
