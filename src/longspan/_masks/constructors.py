"""Public mask constructors: `full`, `causal`, `sliding_window`, `documents`, `prefix` and `mask_mod`.

Shapes: S tokens, B batch rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from longspan._masks.algebra import CONSTRUCTORS, Causal, Documents, Full, Mask, Prefix, SlidingWindow, as_mask, is_mask_like
from longspan._masks.documents import bounds, document_ids, integer, integers, is_scalar, renumbered


def full() -> Mask:
    """Mask in which every query sees every key.

    Returns:
        A mask for any sizes.

    Example:
        >>> longspan.full().block_table(256).counts()
        Counts(empty=0, partial=0, full=4)
    """
    return Full()


def causal() -> Mask:
    """Mask in which a query sees the keys at and before its own position: kv <= q.

    Returns:
        A mask for any sizes.

    Example:
        >>> longspan.causal().block_table(256).counts()
        Counts(empty=1, partial=2, full=1)
    """
    return Causal()


def sliding_window(left: int, right: int = 0) -> Mask:
    """Mask in which a query sees the keys near its own position: q − kv < left and kv − q <= right.

    Args:
        left: Number of visible keys up to and including the query's position; the query itself counts. 0 hides the query's own
            position and all before it, and requires `right` > 0.
        right: Number of visible keys after the query's position.

    Returns:
        A mask for any sizes.

    Raises:
        TypeError: `left` or `right` is not an integer.
        ValueError: `left` or `right` is negative, or both are 0.

    Example:
        >>> window = longspan.sliding_window(4096)  # the query and the 4095 keys before it
    """
    left, right = integer(left, "sliding_window: left"), integer(right, "sliding_window: right")
    if right < 0:
        raise ValueError(f"sliding_window: right must be >= 0, got {right}")
    if left < (0 if right else 1):
        hint = "" if right else " where right is 0: no query would see a key"
        raise ValueError(f"sliding_window: left must be >= {0 if right else 1}, got {left}{hint}")
    return SlidingWindow(left, right)


def documents(
    lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    ids: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Mask:
    """Mask in which a query sees the keys of its own document, before and after its position.

    Give either `lengths` or `ids`. Combine with `causal()` for packed language-model training.

    Args:
        lengths: Document lengths in order, or one such list per batch row. A row with fewer tokens than the longest is padded at its
            end; padding tokens see no key and are seen by no query.
        ids: Document id of each token, [S] or [B, S]. Documents need not be contiguous. Tokens with a negative id are padding.

    Returns:
        A mask for sequences of S tokens, and for B batch rows if one list per row was given.

    Raises:
        TypeError: Both or neither of `lengths` and `ids` were given.
        ValueError: Not integers, wrong number of dims, no tokens, or a negative length.

    Example:
        >>> packed = longspan.causal() & longspan.documents([700, 324])  # 1024 tokens
        >>> padded = longspan.documents(ids=[0, 0, 1, 1, -1])
    """
    if (lengths is None) == (ids is None):
        raise TypeError(f"documents: expected either lengths or ids, got {'neither' if ids is None else 'both'}")
    if ids is None:
        assert lengths is not None
        return _from_ids(document_ids(lengths))
    tensor = integers(ids, "documents: ids", "integers of shape [S] or [B, S]", (1, 2))
    if tensor.numel() == 0:
        raise ValueError(f"documents: ids must be integers of shape [S] or [B, S] with S >= 1, got shape {tuple(tensor.shape)}")
    return _from_ids(tensor)


def _from_ids(ids: Tensor) -> Documents:
    ids, valid = renumbered(ids)
    return Documents(ids, valid, *(bounds(ids, valid) or (None, None)))


def prefix(length: int | Tensor | Sequence[int]) -> Mask:
    """Mask in which every query sees the first `length` keys: kv < length.

    Args:
        length: Number of visible keys, or one number per batch row [B].

    Returns:
        A mask for any lengths, and for B batch rows if one number per row was given.

    Raises:
        TypeError: A single `length` is not an integer.
        ValueError: A single `length` is negative, or several are not integers of shape [B].

    Example:
        >>> prefix_lm = longspan.causal() | longspan.prefix([128, 96])  # one prefix per batch row
    """
    if is_scalar(length):
        tokens = integer(length, "prefix: length")
        if tokens < 0:
            raise ValueError(f"prefix: length must be >= 0, got {tokens}")
        return Prefix(tokens)
    return Prefix(integers(length, "prefix: length", "an int or integers of shape [B]", (1,)))


def mask_mod(fn: Callable[..., Tensor] | BlockMask) -> Mask:
    """Mask from a FlexAttention `mask_mod` or a torch `BlockMask`.

    Captured tensors are not copied: each attention call reads their current values. Tensors on a GPU must be written to in ways that
    increment `tensor._version`; writes through `.data` and in-place collectives do not, and go unnoticed.

    A mask is immutable: numbers and other Python values that `fn` reads, also from a tensor by `int(tensor)`, and which tensors it
    captures, are fixed when the mask is first used. After they change, make a new mask, or pass `fn` itself to `longspan.attention`,
    which notices changes.

    Args:
        fn: A callable (b, h, q_idx, kv_idx) → 0-dim bool tensor over 0-dim int tensors, which may capture tensors; or a `BlockMask`,
            whose full tiles are visible and whose partial tiles are visible where its own `mask_mod` allows it.

    Returns:
        A mask for any sizes, or for the sizes of the `BlockMask`.

    Raises:
        TypeError: `fn` is neither callable nor a `BlockMask`.

    Example:
        >>> dilated = longspan.mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2 == 0)
    """
    if not is_mask_like(fn):
        raise TypeError(f"mask_mod: expected a callable (b, h, q_idx, kv_idx) -> bool or a BlockMask, got {type(fn).__name__}")
    return as_mask(fn)


CONSTRUCTORS += [full, causal, sliding_window, documents, prefix, mask_mod]
