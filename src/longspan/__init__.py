"""longspan: attention over sequences too long for one device."""

from longspan.engine.attention import attention
from longspan.engine.signatures import flex_attention, scaled_dot_product_attention
from longspan.masks.algebra import Mask, causal, documents, full, mask_mod, prefix, sliding_window
from longspan.masks.table import BlockTable
from longspan.masks.tracing import ProgramError

__version__ = "0.1.0"

__all__ = [
    "BlockTable",
    "Mask",
    "ProgramError",
    "attention",
    "causal",
    "documents",
    "flex_attention",
    "full",
    "mask_mod",
    "prefix",
    "scaled_dot_product_attention",
    "sliding_window",
]
