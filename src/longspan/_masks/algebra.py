"""Mask values and their operators `&`, `|` and `~`; each mask is also a FlexAttention `mask_mod` callable.

`mask(b, h, q_idx, kv_idx)` returns a bool tensor. The index tensors are scalars, as in torch's `create_block_mask` and in our tracer,
or broadcast against each other. Masks are immutable: later writes to the tensors they were made from do not change them, except for
tensors that a `mask_mod` captures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from longspan._masks.block_mask import ListedMask, mask_mod_of_block_mask, table_of_block_mask
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.classify import TableShape, classify
from longspan._masks.documents import integer
from longspan._masks.extent import AttentionSizes, Extent
from longspan._masks.trace_cache import traces
from longspan._masks.tracing import Traced, mod_name
from longspan._torch_private import dynamo_is_at_work


class Mask:
    """Set of visible (query, key) pairs: an immutable value, combined with `&`, `|` and `~`.

    Build masks with `full`, `causal`, `sliding_window`, `documents`, `prefix` or `mask_mod`. A mask is a FlexAttention `mask_mod`:
    calling it with index tensors b, h, q_idx, kv_idx returns a bool tensor of their broadcast shape.

    Attributes:
        is_causal: Known from the mask's form that no query sees a key after its own position. False if not known.
        is_static: Its contents change in place (`StaticMask`), so it is not part of other masks.
        trace_reads: Names of the attributes that `__call__` reads. Traces are cached by their values.
        has_selection: Whether a part of the mask is `selected`, whose form depends on the sizes of a call.

    Example:
        >>> mask = longspan.causal() & longspan.documents([700, 324])
        >>> print(mask.block_table(1024))
    """

    is_causal: bool = False
    has_selection: bool = False
    is_static: ClassVar[bool] = False
    trace_reads: ClassVar[tuple[str, ...]]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def extent(self) -> Extent:
        """Sizes that the mask is valid for."""
        return Extent()

    @property
    def value_key(self) -> Hashable:
        """Equal for masks that are equal for every size; None if the mask reads tensors or Python functions."""
        return None

    @property
    def reads_copies(self) -> bool:
        """Whether all tensors that the mask reads are its own copies, which never change."""
        return self.value_key is not None

    def for_sizes(self, sizes: AttentionSizes, *, as_table: bool = True) -> Mask:
        """Mask in the form for a call of these sizes: another one only for masks with `has_selection`. Raises for sizes that do not fit.

        as_table: Selections become lookup tables of chosen blocks, which kernels evaluate pair by pair.
        """
        return self

    @property
    def left_reach(self) -> int | None:
        """A bound known from the mask's form: every visible pair has q − kv < left_reach. None if not known."""
        return None

    def simplified_under_causal(self) -> Mask:
        """Mask that equals this one wherever kv <= q, and is cheaper to evaluate if such a form is known."""
        return self

    def __and__(self, other: Any) -> Mask:
        return And(_operand(self), _operand(other)) if is_mask_like(other) else NotImplemented

    def __or__(self, other: Any) -> Mask:
        return Or(_operand(self), _operand(other)) if is_mask_like(other) else NotImplemented

    def __rand__(self, other: Any) -> Mask:
        return And(_operand(other), _operand(self)) if is_mask_like(other) else NotImplemented

    def __ror__(self, other: Any) -> Mask:
        return Or(_operand(other), _operand(self)) if is_mask_like(other) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(_operand(self))

    def __bool__(self) -> bool:
        """Raise TypeError, because `a and b`, `a or b` and `not a` would silently drop a mask.

        In Python `causal() and documents(…)` is `documents(…)`: every token would see the future. `mask or default` calls the same
        method and raises too, as for numpy arrays and torch tensors.
        Dynamo of torch 2.11 evaluates the truth of every object that compiled code calls, so it gets True.
        """
        if dynamo_is_at_work():
            return True
        raise TypeError(
            f"mask {self}: expected &, | or ~ to combine masks, got `and`, `or`, `not` or `if`, which would silently drop a mask; "
            "to test for a missing mask, write `mask is None`"
        )

    @cached_property
    def traced(self) -> Traced:
        """Program of the mask and its captured tensors. Traced once, because a mask is immutable."""
        return traces.trace(self, "mask", score_dtype=torch.float32, name=str(self))

    def __getstate__(self) -> dict[str, Any]:
        """State without the trace, which copies and unpickled masks recompute."""
        return {name: value for name, value in self.__dict__.items() if name != "traced"}

    def block_table(
        self,
        q_len: int,
        kv_len: int | None = None,
        block: int | tuple[int, int] = BLOCK_SIZE,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> BlockTable:
        """Kind of each tile (empty, partial or full) of a q_len × kv_len attention, without evaluating every element.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys; `q_len` by default.
            block: Tokens per tile, for both sides or as (queries, keys).
            batch: Batch size. It matters only if the mask depends on b; by default the size that the mask was made for, else 1.
            heads: Number of query heads. It matters only if the mask depends on h; the default is chosen as for `batch`.

        Returns:
            A block table, with size 1 for the batch and head dims that the mask does not depend on.

        Raises:
            TypeError: A length or a block size is not an integer.
            ValueError: A negative length, a block size below 1, or a size other than the one that the mask was made for.
            ProgramError: The mask contains a `mask_mod` that cannot be traced.

        Example:
            >>> longspan.causal().block_table(256).counts()
            Counts(empty=1, partial=2, full=1)
        """
        q_len = integer(q_len, "block_table: q_len")
        kv_len = q_len if kv_len is None else integer(kv_len, "block_table: kv_len")
        q_block, kv_block = block if isinstance(block, tuple | list) else (block, block)
        block_size = integer(q_block, "block_table: block"), integer(kv_block, "block_table: block")
        if q_len < 0 or kv_len < 0 or min(block_size) < 1:
            raise ValueError(f"block_table: lengths must be >= 0 and blocks >= 1, got q_len={q_len}, kv_len={kv_len}, block={block}")
        extent = self.extent
        batch = (extent.batch or 1) if batch is None else batch
        heads = (extent.heads or 1) if heads is None else heads
        extent.check(f"mask {self}", q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)
        mask = self.for_sizes(AttentionSizes(q_len=q_len, kv_len=kv_len, batch=batch, heads=heads))
        return mask._table(q_len, kv_len, block_size, batch, heads)

    def _table(self, q_len: int, kv_len: int, block: tuple[int, int], batch: int, heads: int) -> BlockTable:
        with torch.no_grad():
            captured = self.traced.captured()
        table = classify(self.traced.program, captured, TableShape(q_len=q_len, kv_len=kv_len, block=block, batch=batch, heads=heads))
        object.__setattr__(table, "mask_mod", self)
        return table


def _on_device_of(table: Tensor, index: Tensor) -> Tensor:
    """`table` on the device of `index`. Masks made from lists hold CPU tensors, and serve every device."""
    return table.to(index.device) if index.is_cuda and not table.is_cuda else table


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key."""

    trace_reads = ()

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= 0) & (kv_idx >= 0)

    @property
    def value_key(self) -> Hashable:
        return ("full",)

    def __str__(self) -> str:
        return "full()"


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """kv <= q."""

    trace_reads = ()
    is_causal = True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    @property
    def value_key(self) -> Hashable:
        return ("causal",)

    def __str__(self) -> str:
        return "causal()"


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    """q − kv < left and kv − q <= right."""

    trace_reads = ("left", "right")
    left: int
    right: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx < self.left) & (kv_idx - q_idx <= self.right)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_causal", self.right == 0)

    @property
    def left_reach(self) -> int | None:
        return self.left

    @property
    def value_key(self) -> Hashable:
        return "window", self.left, self.right

    def __str__(self) -> str:
        return f"sliding_window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """A query sees the keys of its own document.

    If every document is contiguous, `__call__` looks up `first` and `end` of the query's document instead of comparing ids. Kernels
    hold fewer queries than keys, so one lookup per query is cheaper than one per key.

    Attributes:
        ids: Document id of each token, [S] or [B, S].
        valid: False for padding tokens, same shape; None without padding.
        first: First token of each token's document, same shape; None if some document is not contiguous.
        end: One past its last token, same shape; None if not contiguous, or combined with a causal mask, which hides later keys anyway.
    """

    trace_reads = ("ids", "valid", "first", "end")
    ids: Tensor
    valid: Tensor | None
    first: Tensor | None = None
    end: Tensor | None = None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.first is not None:
            from_first = kv_idx >= self._at(self.first, b, q_idx)
            return from_first if self.end is None else from_first & (kv_idx < self._at(self.end, b, q_idx))
        same_document = self._at(self.ids, b, q_idx) == self._at(self.ids, b, kv_idx)
        if self.valid is None:
            return same_document
        return same_document & self._at(self.valid, b, q_idx) & self._at(self.valid, b, kv_idx)

    @staticmethod
    def _at(table: Tensor, b: Tensor, i: Tensor) -> Tensor:
        """table[i] for a table [S], table[b, i] for a table [B, S]."""
        table = _on_device_of(table, i)
        return table[i] if table.ndim == 1 else table[b, i]

    def simplified_under_causal(self) -> Mask:
        return replace(self, end=None)

    @property
    def reads_copies(self) -> bool:
        return True

    @property
    def extent(self) -> Extent:
        length = self.ids.shape[-1]
        return Extent(q_len=length, kv_len=length, batch=self.ids.shape[0] if self.ids.ndim == 2 else None)

    def __str__(self) -> str:
        return f"documents({self.ids.shape[-1]} tokens)"


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """kv < length; `length` is an int, or [B] with one length per batch row."""

    trace_reads = ("length",)
    length: int | Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        length = _on_device_of(self.length, b)[b] if isinstance(self.length, Tensor) else self.length
        return (kv_idx < length) & (q_idx >= 0)

    @property
    def value_key(self) -> Hashable:
        return ("prefix", self.length) if isinstance(self.length, int) else None

    @property
    def reads_copies(self) -> bool:
        return True

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.length.shape[0]) if isinstance(self.length, Tensor) else Extent()

    def __str__(self) -> str:
        return f"prefix({self.length if isinstance(self.length, int) else '…'})"


@dataclass(frozen=True, eq=False)
class Custom(Mask):
    """A FlexAttention `mask_mod` callable."""

    trace_reads = ("fn",)
    fn: Callable[..., Tensor]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.fn(b, h, q_idx, kv_idx)

    def __str__(self) -> str:
        return f"mask_mod({mod_name(self.fn)})"


@dataclass(frozen=True, eq=False)
class FromBlockMask(Mask):
    """A torch BlockMask: a pair is visible in a full tile, or in a partial tile if the BlockMask's mask_mod allows it."""

    trace_reads = ("listed",)
    block_mask: BlockMask
    listed: ListedMask

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.listed(b, h, q_idx, kv_idx)

    @property
    def extent(self) -> Extent:
        batch, heads = self.block_mask.shape[:2]
        q_len, kv_len = self.block_mask.seq_lengths
        return Extent(q_len=q_len, kv_len=kv_len, batch=batch if batch > 1 else None, heads=heads if heads > 1 else None)

    def _table(self, q_len: int, kv_len: int, block: tuple[int, int], batch: int, heads: int) -> BlockTable:
        if tuple(self.block_mask.BLOCK_SIZE) == block:
            return table_of_block_mask(self.block_mask)
        return super()._table(q_len, kv_len, block, batch, heads)

    def __str__(self) -> str:
        return f"BlockMask{tuple(self.block_mask.shape)}"


@dataclass(frozen=True, eq=False)
class _Pair(Mask):
    """Two masks combined by an operator; `sign` is its symbol."""

    a: Mask
    b: Mask
    sign: ClassVar[str]

    @property
    def extent(self) -> Extent:
        return self.a.extent.joined(self.b.extent, str(self))

    @property
    def value_key(self) -> Hashable:
        a, b = self.a.value_key, self.b.value_key
        return None if a is None or b is None else (self.sign, a, b)

    @property
    def reads_copies(self) -> bool:
        return self.a.reads_copies and self.b.reads_copies

    @property
    def has_selection(self) -> bool:  # type: ignore[override]
        return self.a.has_selection or self.b.has_selection

    def for_sizes(self, sizes: AttentionSizes, *, as_table: bool = True) -> Mask:
        if not self.has_selection:
            return self
        return type(self)(self.a.for_sizes(sizes, as_table=as_table), self.b.for_sizes(sizes, as_table=as_table))

    def __str__(self) -> str:
        return f"({self.a} {self.sign} {self.b})"


@dataclass(frozen=True, eq=False)
class And(_Pair):
    """Intersection of two masks.

    `operands` are the masks that `__call__` evaluates: if one of a and b is causal, the other is simplified.
    """

    sign = "&"
    trace_reads = ("operands",)
    operands: tuple[Mask, Mask] = field(init=False, repr=False)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.operands[0](b, h, q_idx, kv_idx) & self.operands[1](b, h, q_idx, kv_idx)

    def __post_init__(self) -> None:
        operands = tuple(x.simplified_under_causal() if y.is_causal else x for x, y in ((self.a, self.b), (self.b, self.a)))
        object.__setattr__(self, "operands", operands)
        object.__setattr__(self, "is_causal", self.a.is_causal or self.b.is_causal)

    @property
    def left_reach(self) -> int | None:
        known = [x for x in (self.a.left_reach, self.b.left_reach) if x is not None]
        return min(known, default=None)

    def simplified_under_causal(self) -> Mask:
        return self if self.is_causal else And(self.a.simplified_under_causal(), self.b.simplified_under_causal())


class Or(_Pair):
    """Union of two masks."""

    sign = "|"
    trace_reads = ("a", "b")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.a(b, h, q_idx, kv_idx) | self.b(b, h, q_idx, kv_idx)

    @property
    def left_reach(self) -> int | None:
        a, b = self.a.left_reach, self.b.left_reach
        return None if a is None or b is None else max(a, b)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """Complement of a mask."""

    trace_reads = ("a",)
    a: Mask

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.a(b, h, q_idx, kv_idx)

    @property
    def value_key(self) -> Hashable:
        a = self.a.value_key
        return None if a is None else ("~", a)

    @property
    def reads_copies(self) -> bool:
        return self.a.reads_copies

    @property
    def has_selection(self) -> bool:  # type: ignore[override]
        return self.a.has_selection

    def for_sizes(self, sizes: AttentionSizes, *, as_table: bool = True) -> Mask:
        return Not(self.a.for_sizes(sizes, as_table=as_table)) if self.has_selection else self

    @property
    def extent(self) -> Extent:
        return self.a.extent

    def __str__(self) -> str:
        return f"~{self.a}"


MaskLike: TypeAlias = Mask | BlockMask | Callable[..., Tensor]  # accepted by `as_mask`


CONSTRUCTORS: list[Any] = []  # functions that return masks and are no mask_mods (`constructors`)


def is_mask_like(value: Any) -> bool:
    """Whether `as_mask` accepts the value: a mask, a BlockMask or a callable that is not a class."""
    return isinstance(value, Mask | BlockMask) or (callable(value) and not isinstance(value, type))


def _operand(value: Any) -> Mask:
    """`as_mask`; raises TypeError for a static mask."""
    mask = as_mask(value)
    if mask.is_static:
        raise TypeError(f"mask {mask}: expected a mask that is not static as an operand; combine first: StaticMask(a & b)")
    return mask


def as_mask(value: Any) -> Mask:
    """Convert a mask, a torch BlockMask or a mask_mod callable to a mask; raises TypeError for other types."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, BlockMask):
        return FromBlockMask(value, mask_mod_of_block_mask(value))
    if any(value is constructor for constructor in CONSTRUCTORS):
        raise TypeError(f"mask: expected a mask, got the function longspan.{value.__name__}; call it: longspan.{value.__name__}(…)")
    if is_mask_like(value):
        return Custom(value)
    hint = "; for a dense mask use longspan.scaled_dot_product_attention(attn_mask=…)" if isinstance(value, Tensor) else ""
    raise TypeError(f"mask: expected a longspan mask, a torch BlockMask or a mask_mod callable, got {type(value).__name__}{hint}")
