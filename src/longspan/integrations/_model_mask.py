"""The mask that a transformers model asks for, without an S × S tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from longspan._masks.algebra import Mask
from longspan._masks.constructors import mask_mod
from longspan.integrations._configs import chunk_size

PACKED = "packed_sequence_mask_function"
_REMAPPED = "remap_positions_for_packed_sequence"  # since transformers 5.23: calls another mask function with positions in packed documents
# transformers' mask functions that a plan takes over, by the name of the function that makes them.
_PLANNED_MASKS = ("causal_mask_function", "sliding_window_overlay", PACKED, "chunked_overlay")
_BIDIRECTIONAL_MASKS = ("bidirectional_mask_function", "sliding_window_bidirectional_overlay")


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelMask:
    """The mask that a model asks for.

    mask:          for attention on one device; None if every key is visible.
    padding_mask:  bool [B, S], False for padding; None if the model gave no `attention_mask`.
    row:           bool [B or 1, keys] of a single query, in place of `mask`; None for more queries.
    window:        the number of keys that a query sees before itself, itself included; None for all.
    chunk:         the number of tokens of a chunk, outside of which a query sees nothing; None for no chunks.
    foreign:       the name of a part that no plan takes over; "" for none.
    bidirectional: whether tokens see later tokens too, as in encoders.
    packed:        whether the mask separates packed documents.
    q_offset, kv_offset:  the positions of the first query and the first key.
    whole:         whether the mask is of the whole batch, in a forward with a plan (`_decoders`).
    family:        the model's config class, for error messages.

    transformers may move the mask between devices. Models that compute with their mask as with a tensor raise.
    """

    mask: Mask | None
    padding_mask: Tensor | None = None
    row: Tensor | None = None
    window: int | None = None
    chunk: int | None = None
    foreign: str = ""
    bidirectional: bool = False
    packed: bool = False
    q_offset: int = 0
    kv_offset: int = 0
    whole: bool = False
    family: str = "this config"

    @property
    def ndim(self) -> int:
        """4, as of a mask of query-key pairs: by it transformers tells such a mask from one by token."""
        return 4

    @property
    def padding(self) -> bool:
        """Whether some token is padding. Some models make a mask of ones where the user gave none."""
        return self.padding_mask is not None and not bool(self.padding_mask.all())

    def within(self, window: int) -> ModelMask:
        """The mask, and a window of keys: for layers of which transformers' mask does not know that they have one."""
        if self.row is not None or self.mask is None:  # one query
            end = self.q_offset + 1 if self.row is None else self.kv_offset + self.row.shape[1]
            keys = torch.arange(self.kv_offset, end, device=None if self.row is None else self.row.device)
            recent = (self.q_offset - keys < window)[None]
            return replace(self, row=recent if self.row is None else self.row & recent, window=window)
        in_window = mask_mod(lambda b, h, q, kv: q + self.q_offset - kv - self.kv_offset < window)
        return replace(self, mask=self.mask & in_window, window=window)

    def to(self, *_: Any, **__: Any) -> ModelMask:
        """Itself."""
        return self

    def contiguous(self, *_: Any, **__: Any) -> ModelMask:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name):
            self._raise(f"reads mask.{name}")
        raise AttributeError(f"'ModelMask' object has no attribute {name!r}")

    def __getitem__(self, index: Any) -> Any:
        self._raise("indexes the mask")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        values += [v for value in values if isinstance(value, (list, tuple)) for v in value]  # torch.cat and others take sequences
        mask = next(value for value in values if isinstance(value, ModelMask))
        mask._raise(f"gives the mask to {getattr(func, '__name__', func)}")

    def _raise(self, what: str) -> NoReturn:
        raise ValueError(
            f"longspan: the model of {self.family} {what}: it computes with its mask as with a tensor, and longspan has no S × S mask. "
            "This model is not supported; use attn_implementation='sdpa' or 'eager', for the attention of a vision tower alone: "
            "attn_implementation={'text_config': 'longspan', 'vision_config': 'sdpa'}"
        )


def keeping_masks(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' first step of making a mask, which leaves a `ModelMask` as it is, as it does a mask of query-key pairs.

    Some models make the mask of their text decoder, which makes one of its own otherwise.
    """

    @functools.wraps(preprocess)
    def preprocess_or_keep(config: Any, inputs_embeds: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, ModelMask):
            return preprocess(config, inputs_embeds, attention_mask, *args, **kwargs)
        pairs = inputs_embeds.new_empty(1, 1, 1, 1)  # stands for the mask
        return tuple(attention_mask if x is pairs else x for x in preprocess(config, inputs_embeds, pairs, *args, **kwargs))

    return preprocess_or_keep


@dataclass
class CompiledMask:
    """What torch.compile's tracing learns of a mask: its window or chunk size. Only a plan can hold the rest."""

    window: int | None = None
    chunk: int | None = None


def visible_keys(mask_function: Callable[..., Any], batch_size: int, kv_length: int, q_offset: Any, kv_offset: int, device: Any) -> Tensor:
    """bool [B or 1, keys]: the keys that the single query at `q_offset` sees, by a mask function of transformers."""
    b = torch.arange(batch_size, device=device)[:, None]
    q = torch.as_tensor(q_offset, device=device)
    kv = torch.arange(kv_offset, kv_offset + kv_length, device=device)[None]
    seen: Tensor = mask_function(b, torch.zeros_like(b), q, kv)
    return seen.expand(seen.shape[0] if seen.ndim == 2 else 1, kv_length)


def with_offsets(mask_function: Callable[..., Any], q_offset: Any, kv_offset: Any) -> Callable[..., Any]:
    """A mask function for queries and keys that begin after 0, behind a cache."""
    q_first, kv_first = int(q_offset), int(kv_offset)
    if not q_first and not kv_first:
        return mask_function
    return lambda b, h, q, kv: mask_function(b, h, q + q_first, kv + kv_first)


def span_of(size: int | None, config: Any) -> dict[str, int | None]:
    """`window` and `chunk` of a mask with transformers' `local_size`."""
    chunked = size is not None and config is not None and chunk_size(config) == size and getattr(config, "sliding_window", None) != size
    return {"window": None, "chunk": size} if chunked else {"window": size, "chunk": None}


def foreign_part(mask_function: Callable[..., Any] | None) -> str:
    """The name of the first part of a mask function that no plan takes over; "" for none."""
    planned = _BIDIRECTIONAL_MASKS if is_bidirectional(mask_function) else _PLANNED_MASKS
    return next((name for name in mask_parts(mask_function) if name not in planned), "")


def is_bidirectional(mask_function: Callable[..., Any] | None) -> bool:
    """Whether a mask function is an encoder's."""
    return bool(set(mask_parts(mask_function)) & set(_BIDIRECTIONAL_MASKS))


def mask_parts(mask_function: Callable[..., Any] | None) -> list[str]:
    """The names of the functions that make the parts of a mask function.

    transformers joins mask functions in a closure over a tuple of them.
    """
    if mask_function is None:
        return []
    cells = [c.cell_contents for c in getattr(mask_function, "__closure__", None) or ()]
    parts = [cell for cell in cells if isinstance(cell, tuple)]
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__).split(".")[0]
    if name in ("and_masks", "or_masks") and len(parts) == 1:
        return [inner for part in parts[0] for inner in mask_parts(part)]
    if name == _REMAPPED:
        return [inner for part in cells if callable(part) for inner in mask_parts(part)]
    return [name]
