"""Masks: symbolic, composable, and each a FlexAttention `mask_mod` callable.

A mask answers `mask(b, h, q_idx, kv_idx)` with a bool tensor, for scalar index tensors (as torch's `create_block_mask` and our
tracer call it) and for index tensors that broadcast. Masks are immutable values, whatever happens later to the tensors they were made
from (but see `mask_mod`); `&`, `|` and `~` combine them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from longspan._masks.block_mask import ListedMask, mask_mod_of_block_mask, table_of_block_mask
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.classify import classify
from longspan._masks.documents import bounds, document_ids, integer, integers, is_scalar, renumbered
from longspan._masks.trace_cache import traces
from longspan._masks.tracing import Traced, mod_name
from longspan._torch_private import dynamo_is_at_work


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The sizes a mask was made for; None where any will do."""

    q_len: int | None = None
    kv_len: int | None = None
    batch: int | None = None
    heads: int | None = None

    def check(self, what: str, **got: int) -> None:
        """Raise ValueError where a size in use is not the one the mask was made for."""
        for name, value in got.items():
            want = getattr(self, name)
            if want is not None and want != value:
                raise ValueError(f"{what} was made for {name}={want}, got {name}={value}: make a mask for these sizes")

    def joined(self, other: Extent, what: str) -> Extent:
        sizes: dict[str, int | None] = {}
        for name in ("q_len", "kv_len", "batch", "heads"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None and a != b:
                raise ValueError(f"{what}: the parts were made for different sizes, {name}={a} and {name}={b}")
            sizes[name] = b if a is None else a
        return Extent(**sizes)


class Mask:
    """Which (query, key) pairs exist. Build one with `full`, `causal`, `sliding_window`, `documents`, `prefix` or `mask_mod`.

    `looks_back`: no query sees a key after it, as far as the mask's form tells.
    """

    looks_back = False
    trace_reads: ClassVar[tuple[str, ...]]  # attributes that `__call__` reads: the key of a trace is made of them

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def extent(self) -> Extent:
        return Extent()

    def beside_causal(self) -> Mask:
        """A mask that agrees with this one on keys that are not after their query, and is cheaper to ask."""
        return self

    def __and__(self, other: Any) -> Mask:
        return And(self, as_mask(other)) if _is_mask_like(other) else NotImplemented

    def __or__(self, other: Any) -> Mask:
        return Or(self, as_mask(other)) if _is_mask_like(other) else NotImplemented

    def __rand__(self, other: Any) -> Mask:
        return And(as_mask(other), self) if _is_mask_like(other) else NotImplemented

    def __ror__(self, other: Any) -> Mask:
        return Or(as_mask(other), self) if _is_mask_like(other) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        """Raises TypeError: `a and b`, `a or b` and `not a` would silently keep one of two masks, or none.

        `causal() and documents(…)` is `documents(…)` in Python: every token would see the future. `mask or default` is harmless where
        `mask` may be None, but Python asks both the same question, so both raise, as numpy arrays, torch tensors and pandas columns do.
        Dynamo of torch 2.11 takes the truth of every object that compiled code calls, to see whether there is one: it gets True.
        """
        if dynamo_is_at_work():
            return True
        raise TypeError(
            f"mask {self}: expected &, | or ~ to combine masks, got `and`, `or`, `not` or `if`, which would silently drop a mask; "
            "to ask whether there is a mask, write `mask is None`"
        )

    @cached_property
    def traced(self) -> Traced:
        """The mask's program and the tensors it captures, traced once: a mask is a value, what its mod read then it keeps."""
        return traces.trace(self, "mask", score_dtype=torch.float32, name=str(self))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the mask, not its trace."""
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
        """Empty, partial or full for each tile of a q_len × kv_len attention (kv_len: q_len unless given).

        `batch` and `heads` matter only where the mask depends on them; where it was made for a number of them, that is the default.
        """
        q_len = integer(q_len, "block_table: q_len")
        kv_len = q_len if kv_len is None else integer(kv_len, "block_table: kv_len")
        q_block, kv_block = block if isinstance(block, tuple | list) else (block, block)
        size = integer(q_block, "block_table: block"), integer(kv_block, "block_table: block")
        if q_len < 0 or kv_len < 0 or min(size) < 1:
            raise ValueError(f"block_table: lengths must be >= 0 and blocks >= 1, got q_len={q_len}, kv_len={kv_len}, block={block}")
        extent = self.extent
        batch = (extent.batch or 1) if batch is None else batch
        heads = (extent.heads or 1) if heads is None else heads
        extent.check(f"mask {self}", q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)
        return self._table(q_len, kv_len, size, batch, heads)

    def _table(self, q_len: int, kv_len: int, block: tuple[int, int], batch: int, heads: int) -> BlockTable:
        with torch.no_grad():
            captured = self.traced.captured()
        table = classify(self.traced.program, captured, q_len, kv_len, block=block, batch=batch, heads=heads)
        object.__setattr__(table, "mask_mod", self)
        return table


def _near(table: Tensor, index: Tensor) -> Tensor:
    """A mask's own table where its index is: masks made from lists live on the CPU and serve every device."""
    return table.to(index.device) if index.is_cuda and not table.is_cuda else table


@dataclass(frozen=True, eq=False)
class Full(Mask):
    trace_reads = ()

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= 0) & (kv_idx >= 0)

    def __str__(self) -> str:
        return "full()"


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    trace_reads = ()
    looks_back = True

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    def __str__(self) -> str:
        return "causal()"


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    trace_reads = ("left", "right")
    left: int
    right: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx < self.left) & (kv_idx - q_idx <= self.right)

    def __post_init__(self) -> None:
        object.__setattr__(self, "looks_back", self.right == 0)

    def __str__(self) -> str:
        return f"sliding_window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """`ids` [S] or [B, S]; `real`, if there is padding, is False where a token attends to and is seen by nothing.

    Where documents are stretches of tokens, `first` and `end` of each query's are looked up: kernels hold fewer queries than keys, and
    need not look keys up at all. Beside a causal mask `end` is None: no query sees what comes after its document.
    """

    trace_reads = ("ids", "real", "first", "end")
    ids: Tensor
    real: Tensor | None
    first: Tensor | None = None
    end: Tensor | None = None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.first is not None:
            begun = kv_idx >= self._at(self.first, b, q_idx)
            return begun if self.end is None else begun & (kv_idx < self._at(self.end, b, q_idx))
        same = self._at(self.ids, b, q_idx) == self._at(self.ids, b, kv_idx)
        if self.real is None:
            return same
        return same & self._at(self.real, b, q_idx) & self._at(self.real, b, kv_idx)

    @staticmethod
    def _at(table: Tensor, b: Tensor, i: Tensor) -> Tensor:
        table = _near(table, i)
        return table[i] if table.ndim == 1 else table[b, i]

    def beside_causal(self) -> Mask:
        return replace(self, end=None)

    @property
    def extent(self) -> Extent:
        length = self.ids.shape[-1]
        return Extent(q_len=length, kv_len=length, batch=self.ids.shape[0] if self.ids.ndim == 2 else None)

    def __str__(self) -> str:
        return f"documents({self.ids.shape[-1]} tokens)"


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """`length` is an int, or [B] for one length per batch row."""

    trace_reads = ("length",)
    length: int | Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        length = _near(self.length, b)[b] if isinstance(self.length, Tensor) else self.length
        return (kv_idx < length) & (q_idx >= 0)

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.length.shape[0]) if isinstance(self.length, Tensor) else Extent()

    def __str__(self) -> str:
        return f"prefix({self.length if isinstance(self.length, int) else '…'})"


@dataclass(frozen=True, eq=False)
class Custom(Mask):
    trace_reads = ("fn",)
    fn: Callable[..., Tensor]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.fn(b, h, q_idx, kv_idx)

    def __str__(self) -> str:
        return f"mask_mod({mod_name(self.fn)})"


@dataclass(frozen=True, eq=False)
class FromBlockMask(Mask):
    """A torch BlockMask: what its block lists and its mask_mod together let through."""

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
    a: Mask
    b: Mask
    sign: ClassVar[str]

    @property
    def extent(self) -> Extent:
        return self.a.extent.joined(self.b.extent, str(self))

    def __str__(self) -> str:
        return f"({self.a} {self.sign} {self.b})"


@dataclass(frozen=True, eq=False)
class And(_Pair):
    """`asked`: both masks, each as cheap as the other one allows."""

    sign = "&"
    trace_reads = ("asked",)
    asked: tuple[Mask, Mask] = field(init=False, repr=False)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.asked[0](b, h, q_idx, kv_idx) & self.asked[1](b, h, q_idx, kv_idx)

    def __post_init__(self) -> None:
        asked = tuple(x.beside_causal() if y.looks_back else x for x, y in ((self.a, self.b), (self.b, self.a)))
        object.__setattr__(self, "asked", asked)
        object.__setattr__(self, "looks_back", self.a.looks_back or self.b.looks_back)

    def beside_causal(self) -> Mask:
        return self if self.looks_back else And(self.a.beside_causal(), self.b.beside_causal())


class Or(_Pair):
    sign = "|"
    trace_reads = ("a", "b")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.a(b, h, q_idx, kv_idx) | self.b(b, h, q_idx, kv_idx)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    trace_reads = ("a",)
    a: Mask

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.a(b, h, q_idx, kv_idx)

    @property
    def extent(self) -> Extent:
        return self.a.extent

    def __str__(self) -> str:
        return f"~{self.a}"


MaskLike: TypeAlias = Mask | BlockMask | Callable[..., Tensor]  # the values that `as_mask` accepts


def full() -> Mask:
    """Every query sees every key."""
    return Full()


def causal() -> Mask:
    """A query sees the keys at and before its own position."""
    return Causal()


def sliding_window(left: int, right: int = 0) -> Mask:
    """A query sees itself, the `left` − 1 keys before it and the `right` keys after it: q − kv < left and kv − q <= right.

    With `left` 0 it sees only what comes after it, and the last one nothing.
    """
    left, right = integer(left, "sliding_window: left"), integer(right, "sliding_window: right")
    if right < 0:
        raise ValueError(f"sliding_window: right must be >= 0, got {right}")
    if left < (0 if right else 1):
        hint = "" if right else " where right is 0: no query would see anything"
        raise ValueError(f"sliding_window: left must be >= {0 if right else 1}, got {left}{hint}")
    return SlidingWindow(left, right)


def documents(
    lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    ids: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Mask:
    """A query sees the keys of its own document, before and after it (combine with `causal()` for packed language models).

    `lengths`: the documents' lengths in order, or one such list per batch row; a shorter row is filled with padding that sees nothing.
    `ids`: a document id per token, [S] or [B, S], in any order; tokens with a negative id see nothing and are seen by nothing.
    """
    if (lengths is None) == (ids is None):
        raise TypeError("documents: give either lengths or ids")
    if ids is None:
        assert lengths is not None
        return _documents(document_ids(lengths))
    tensor = integers(ids, "documents: ids", "integers of shape [S] or [B, S]", (1, 2))
    if tensor.numel() == 0:
        raise ValueError(f"documents: ids must be integers of shape [S] or [B, S], got none (shape {tuple(tensor.shape)})")
    return _documents(tensor)


def _documents(ids: Tensor) -> Documents:
    ids, real = renumbered(ids)
    return Documents(ids, real, *(bounds(ids, real) or (None, None)))


def prefix(length: int | Tensor | Sequence[int]) -> Mask:
    """Every query sees the first `length` keys: one number, or one per batch row."""
    if is_scalar(length):
        one = integer(length, "prefix: length")
        if one < 0:
            raise ValueError(f"prefix: length must be >= 0, got {one}")
        return Prefix(one)
    return Prefix(integers(length, "prefix: length", "an int or integers of shape [B]", (1,)))


def mask_mod(fn: Callable[..., Tensor] | BlockMask) -> Mask:
    """Any FlexAttention `mask_mod`: fn(b, h, q_idx, kv_idx) → bool, captured tensors allowed. A torch BlockMask becomes a mask too.

    Captured tensors are not copied: each call sees what they hold then. Tensors on a GPU must be written to in ways that torch counts
    (`tensor._version`), which `.data` and collectives in place are not.
    """
    if not _is_mask_like(fn):
        raise TypeError(f"mask_mod: expected a callable (b, h, q_idx, kv_idx) -> bool, got {type(fn).__name__}")
    return as_mask(fn)


def _is_mask_like(value: Any) -> bool:
    return isinstance(value, Mask | BlockMask) or (callable(value) and not isinstance(value, type))


def as_mask(value: Any) -> Mask:
    """A mask from what users pass for one: a mask, a torch BlockMask or a mask_mod callable."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, BlockMask):
        return FromBlockMask(value, mask_mod_of_block_mask(value))
    if _is_mask_like(value):
        return Custom(value)
    hint = "; for a dense mask use longspan.scaled_dot_product_attention(attn_mask=…)" if isinstance(value, Tensor) else ""
    raise TypeError(f"mask: expected a longspan mask, a torch BlockMask or a mask_mod callable, got {type(value).__name__}{hint}")
