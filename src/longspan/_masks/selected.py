"""`selected`: a mask made from a tensor of chosen key blocks, which a model computes on the device at run time.

Shapes: B batch rows, H query heads, G choices per batch row (1, KV heads or H), R rows of queries, k entries per row.
indices [B, G, R, k] int32: entry i of row r lets the queries [r · q_granularity, (r + 1) · q_granularity) see the keys
[i · granularity, (i + 1) · granularity). −1 is no choice; an entry that repeats counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan._masks.algebra import CONSTRUCTORS, And, Mask
from longspan._masks.documents import integer
from longspan._masks.extent import AttentionSizes, Extent
from longspan._masks.selected_shard import chosen_blocks
from longspan._torch_private import assert_on_device

GRANULARITIES = (128, 64, 16, 4, 1)
_OUTSIDE = "longspan.selected: an index is outside of the keys: expected −1 or the number of a block of keys"


def selected(indices: Tensor, granularity: int = 128, q_granularity: int | None = None, counts: Tensor | None = None) -> Mask:
    """Mask in which each row of queries sees the blocks of keys that a tensor lists; made anew for every choice, without host work.

    Gradients do not flow through the choice. The tensor is not copied: do not write to it before the backward pass.

    Args:
        indices: Chosen blocks of keys, integers [B, G, rows, k]. Entry i stands for the keys [i · granularity, (i + 1) · granularity),
            −1 for no choice; repeated entries count once. B may be 1 for one choice in all batch rows. G is 1, the number of KV heads
            (one choice for the query heads that share a KV head) or the number of query heads.
        granularity: Keys per entry: 128, 64, 16, 4 or 1.
        q_granularity: Queries per row, a power of two; `granularity` by default. rows = ceil(queries / q_granularity).
        counts: Number of entries in use per row, [B, G, rows]; later entries are ignored. By default all but −1.

    Returns:
        A mask for the sizes that the indices have. Called by itself as a mask_mod, it takes G > 1 as one choice per query head.

    Raises:
        TypeError: `indices` or `counts` is not an integer tensor.
        ValueError: Wrong number of dims, granularity or sizes. An index outside of the keys raises at the attention call: a ValueError
            on CPU, a device-side assertion on CUDA, where reading the indices would stall the device.

    Example:
        >>> blocks = torch.tensor([[[[0, -1], [0, 1], [0, 2], [1, 3]]]])  # one choice for all heads, 4 rows of 128 queries
        >>> mask = longspan.selected(blocks) & longspan.causal()
    """
    granularity = integer(granularity, "selected: granularity")
    if granularity not in GRANULARITIES:
        raise ValueError(f"selected: granularity must be one of {', '.join(map(str, GRANULARITIES))}, got {granularity}")
    q_granularity = granularity if q_granularity is None else integer(q_granularity, "selected: q_granularity")
    if q_granularity < 1 or q_granularity & (q_granularity - 1):
        raise ValueError(f"selected: q_granularity must be a power of two, got {q_granularity}")
    indices = _integers(indices, "indices", "[batch, choices, rows, k]", 4)
    if 0 in indices.shape[:2]:
        raise ValueError(f"selected: expected batch and choices >= 1, got indices of shape {tuple(indices.shape)}")
    if counts is not None:
        counts = _integers(counts, "counts", "[batch, choices, rows]", 3)
        if counts.shape != indices.shape[:3] or counts.device != indices.device:
            got = f"{tuple(counts.shape)} on {counts.device}"
            raise ValueError(f"selected: expected counts of shape {tuple(indices.shape[:3])} on {indices.device}, got {got}")
        used = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
        indices = torch.where(used, indices, -1)
    return Selected(indices.detach(), granularity, q_granularity)


CONSTRUCTORS.append(selected)


def _integers(value: Any, name: str, shape: str, ndim: int) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"selected: expected {name} to be an integer tensor {shape}, got {type(value).__name__}")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"selected: expected {name} of dtype int32 or int64, got {value.dtype}")
    if value.ndim != ndim:
        raise ValueError(f"selected: expected {name} {shape}, got shape {tuple(value.shape)}")
    # 2³² would wrap to 0: numbers beyond 32 bits stay out of range, so that the range check of the call finds them.
    return value if value.dtype == torch.int32 else value.clamp(-2, 2**31 - 1).int()


@dataclass(frozen=True, eq=False)
class Selected(Mask):
    """The mask of `selected`. `heads_per_choice`: query heads that share a choice; None if the number of heads is not known."""

    trace_reads = ("indices", "granularity", "q_granularity", "heads_per_choice")
    has_selection = True
    indices: Tensor
    granularity: int
    q_granularity: int
    heads_per_choice: int | None = None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        chosen = _rows_at(self.indices, b, h, q_idx // self.q_granularity, self.heads_per_choice)
        return (chosen == (kv_idx // self.granularity).unsqueeze(-1)).any(-1)

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.indices.shape[0] if self.indices.shape[0] > 1 else None)

    def for_sizes(self, sizes: AttentionSizes, *, as_table: bool = True) -> Mask:
        mask = self.checked(sizes)
        return mask._as_table(sizes) if as_table else mask

    def checked(self, sizes: AttentionSizes) -> Selected:
        """The mask with the number of heads, after all checks against the sizes of a call."""
        _, choices, rows, _ = self.indices.shape
        self._check_choices(sizes.heads, sizes.kv_heads)
        if rows != -(-sizes.q_len // self.q_granularity):
            expected = -(-sizes.q_len // self.q_granularity)
            raise ValueError(
                f"mask {self}: expected {expected} rows for {sizes.q_len} queries, {self.q_granularity} per row, got {rows}; "
                "choose blocks for every row, or set q_granularity"
            )
        self._check_range(-(-sizes.kv_len // self.granularity))
        return replace(self, heads_per_choice=sizes.heads // choices)

    def checked_shard(self, shard: AttentionSizes, *, rows: int, rank: int) -> Selected:
        """The mask of one rank's queries, with the number of heads, after all checks.

        shard: Sizes of the rank's tensors, with the `kv_len` of the whole sequence. rows: Rows of queries of which the rank owns tokens.
        """
        self.extent.check(f"mask {self}", batch=shard.batch)
        self._check_choices(shard.heads, shard.kv_heads)
        if self.indices.shape[2] != rows:
            raise ValueError(
                f"mask {self}: expected {rows} rows, one for each of plan.query_blocks({self.q_granularity}) of rank {rank}, "
                f"got {self.indices.shape[2]}; with a plan, each rank passes the choice of its own queries"
            )
        # Read on the host, on CUDA too: a device-side assertion on one rank would leave the other ranks waiting.
        self._check_range_on_host(-(-shard.kv_len // self.granularity))
        return replace(self, heads_per_choice=shard.heads // self.indices.shape[1])

    def _check_choices(self, heads: int, kv_heads: int | None) -> None:
        choices = self.indices.shape[1]
        legal = {1, heads, *([] if kv_heads is None else [kv_heads])}
        if choices not in legal and (kv_heads is not None or heads % choices):
            raise ValueError(f"mask {self}: expected 1, KV heads or query heads as its second dim ({sorted(legal)}), got {choices}")

    def _check_range(self, blocks: int) -> None:
        """Raise for an index outside of [−1, blocks). On CUDA the device asserts, because reading the indices would synchronise."""
        if torch.compiler.is_compiling() or self.indices.is_cuda:
            if self.indices.numel():
                low, high = self.indices.aminmax()  # reads the indices once and stores nothing of their size
                assert_on_device((low >= -1) & (high < blocks), _OUTSIDE)
        else:
            self._check_range_on_host(blocks)

    def _check_range_on_host(self, blocks: int) -> None:
        if self.indices.numel():
            low, high = (int(edge) for edge in self.indices.aminmax())
            if low < -1 or high >= blocks:
                expected = f"expected indices from -1 to {blocks - 1}, blocks of {self.granularity} keys"
                raise ValueError(f"mask {self}: {expected}, got {low if low < -1 else high}")

    def _as_table(self, sizes: AttentionSizes) -> Mask:
        table = chosen_blocks(self.indices, -(-sizes.kv_len // self.granularity))
        assert self.heads_per_choice is not None
        return SelectedTable(table, self.granularity, self.q_granularity, self.heads_per_choice)

    def __str__(self) -> str:
        return f"selected({', '.join(map(str, self.indices.shape))}; {self.granularity} keys, {self.q_granularity} queries)"


@dataclass(frozen=True, eq=False)
class SelectedTable(Mask):
    """`Selected` as a lookup table [B, G, rows, blocks] of bools, for kernels that evaluate masks pair by pair."""

    trace_reads = ("table", "granularity", "q_granularity", "heads_per_choice")
    table: Tensor
    granularity: int
    q_granularity: int
    heads_per_choice: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return _rows_at(self.table, b, h, q_idx // self.q_granularity, self.heads_per_choice, kv_idx // self.granularity)

    @property
    def reads_copies(self) -> bool:
        return True

    @property
    def extent(self) -> Extent:
        batch, choices, _, _ = self.table.shape
        return Extent(batch=batch if batch > 1 else None, heads=choices * self.heads_per_choice if choices > 1 else None)

    def __str__(self) -> str:
        return f"selected({self.granularity} keys, {self.q_granularity} queries)"


def _rows_at(table: Tensor, b: Tensor, h: Tensor, row: Tensor, heads_per_choice: int | None, *block: Tensor) -> Tensor:
    """table[b, choice of h, row, *block]. Dims of size 1 are not indexed, so that a traced program does not depend on b or h."""
    batch, choices = table.shape[:2]
    table = table if choices > 1 else table[:, 0]
    table = table if batch > 1 else table[0]
    choice = h if heads_per_choice in (None, 1) else h // heads_per_choice
    return table[(*((b,) if batch > 1 else ()), *((choice,) if choices > 1 else ()), row, *block)]


@dataclass(frozen=True, eq=False)
class Conjunction:
    """A mask that is `selection & rest`; `rest` is None where the selection is the whole mask."""

    selection: Selected
    rest: Mask | None


def split_selection(mask: Mask) -> Conjunction | None:
    """The mask as a conjunction of one `selected` and a mask without any; None if it has another form."""
    if isinstance(mask, Selected):
        return Conjunction(mask, None)
    if not isinstance(mask, And) or mask.a.has_selection == mask.b.has_selection:
        return None
    part, other = (mask.a, mask.b) if mask.a.has_selection else (mask.b, mask.a)
    split = split_selection(part)
    if split is None:
        return None
    return Conjunction(split.selection, other if split.rest is None else split.rest & other)
