"""torch's load balancers: permutations of a sequence, which is then cut into one contiguous range per rank.

Legend: S tokens, N ranks. Indices are int64 [1, S], or [B, S] if batch rows differ: entry i is the token at place i of the permuted
sequence. For lengths that torch refuses, longspan's own layout of the same kind is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from longspan._dropin.global_layout import chunked
from longspan._masks.algebra import as_mask
from longspan._plan.layout import Layout, Segments
from longspan._plan.named_layouts import from_owner, head_tail, per_document, round_robin_owner, stack, unit_for
from longspan.torch_compat._options import _cp_options


class _LoadBalancer(ABC):
    """Base class: a permutation of a sequence, cut into equal ranges per rank as by `torch.chunk`."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """The permutation, or its inverse with `restore`; None for the identity."""

    def _layout(self, length: int, ranks: int) -> Layout:
        indices = self._generate_indices(restore=False)
        if indices is None:
            return chunked(length, ranks)
        if indices.ndim != 2 or indices.shape[1] != length:
            raise ValueError(f"{type(self).__name__}: expected indices of shape (1, {length}) or (B, {length}), got {tuple(indices.shape)}")
        counts = [chunked(length, ranks).local_len(rank) for rank in range(ranks)]
        return Layout(length=length, rows=tuple(_row(row, counts) for row in indices.cpu()))


class _FromLayout(_LoadBalancer):
    """A load balancer defined by a layout. The indices follow from it."""

    device: str | torch.device = "cpu"

    def _fixed_layout(self) -> Layout:
        raise NotImplementedError

    def _layout(self, length: int, ranks: int) -> Layout:
        made = self._fixed_layout()
        if (made.length, made.ranks) != (length, ranks):
            raise ValueError(
                f"{type(self).__name__}: expected {made.length} tokens over {made.ranks} ranks, for which it was made, got {length} over "
                f"{ranks}; make another"
            )
        return made

    def _generate_indices(self, restore: bool = False) -> Tensor:
        made = self._fixed_layout()
        rows = torch.cat([torch.atleast_2d(made.positions(rank)) for rank in range(made.ranks)], 1)
        return (rows.argsort(1) if restore else rows).to(self.device)


class _HeadTailLoadBalancer(_FromLayout):
    """Head-tail: of 2N equal chunks, rank i owns chunks i and 2N − 1 − i."""

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        self.seq_length, self.world_size, self.device = seq_length, world_size, device

    def _fixed_layout(self) -> Layout:
        return _head_tail(self.seq_length, self.world_size)


class _PerDocumentHeadTailLoadBalancer(_FromLayout):
    """Head-tail within each document. `seq_length_per_doc`: the documents' lengths, one list for all batch rows or one per row."""

    def __init__(self, seq_length_per_doc: Sequence[Sequence[int]], world_size: int, device: str | torch.device) -> None:
        self.seq_length_per_doc, self.world_size, self.device = seq_length_per_doc, world_size, device

    def _fixed_layout(self) -> Layout:
        rows = [list(row) for row in self.seq_length_per_doc]
        even = all(n % (2 * self.world_size) == 0 for row in rows for n in row)
        cut = _per_document if even else per_document
        return stack([cut(row, self.world_size) for row in rows])


class _PTRRLoadBalancer(_FromLayout):
    """Round robin by work: blocks of queries, sorted by the number of key blocks that they see, dealt to ranks back and forth.

    `block_mask`: over the whole sequence, one for all heads.
    """

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        self.block_mask, self.world_size = block_mask, world_size
        self.device = block_mask.kv_num_blocks.device

    @staticmethod
    def ptrr_scheduling(process_time: Tensor, group_size: int) -> Tensor:
        """Indices of tasks with these times [n], dealt to groups: [group_size, n / group_size], ascending within a group."""
        if process_time.ndim != 1:
            raise ValueError(f"process_time: expected one dim, got shape {tuple(process_time.shape)}")
        if len(process_time) % group_size:
            raise NotImplementedError(f"num_tasks {len(process_time)} must be divisible by group_size {group_size}")
        rounds = process_time.argsort(descending=True, stable=True).view(-1, group_size)
        backwards = torch.arange(len(rounds), device=rounds.device)[:, None] % 2 == 1
        return torch.where(backwards, rounds.flip(1), rounds).T.sort(1).values

    def _fixed_layout(self) -> Layout:
        mask, ranks = self.block_mask, self.world_size
        length, (block, kv_block) = mask.seq_lengths[0], mask.BLOCK_SIZE
        if block != kv_block or mask.kv_num_blocks.shape[1] != 1:
            raise ValueError(
                f"_PTRRLoadBalancer: expected square blocks and one mask for all heads, got blocks of {mask.BLOCK_SIZE} and "
                f"{mask.kv_num_blocks.shape[1]} heads"
            )
        read = mask.kv_num_blocks[:, 0] + (0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks[:, 0])
        if length % block == 0 and (length // block) % ranks == 0:
            owners = [_owner(self.ptrr_scheduling(row, ranks)) for row in read.cpu()]
        else:
            block = unit_for(length, ranks)
            table = as_mask(mask).block_table(length, length, block=block)
            work = table.tiles_per_row.view(table.batch, table.heads, -1).sum(1)
            owners = [round_robin_owner(row, ranks, short_last=length % block != 0) for row in work]
        return stack([from_owner(owner, length=length, unit=block, ranks=ranks) for owner in owners])


def _create_default_load_balancer(seq_length: int, world_size: int, device: str | torch.device) -> _LoadBalancer | None:
    """torch's default: head-tail if enabled and 2N divides the length, else None."""
    balanced = _cp_options.enable_load_balance and seq_length % (2 * world_size) == 0
    return _HeadTailLoadBalancer(seq_length, world_size, device) if balanced else None


def layout_of(balancer: _LoadBalancer | None, length: int, ranks: int) -> Layout:
    """The layout of a balancer; without one, contiguous ranges as by `torch.chunk`."""
    return chunked(length, ranks) if balancer is None else balancer._layout(length, ranks)


def _head_tail(length: int, ranks: int) -> Layout:
    return head_tail(length, ranks) if length % (2 * ranks) else _per_document([length], ranks)


def _per_document(lengths: Sequence[int], ranks: int) -> Layout:
    segments: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    start = 0
    for n in lengths:
        chunk = n // (2 * ranks)
        for rank in range(ranks if chunk else 0):
            segments[rank] += [(start + rank * chunk, chunk), (start + n - (rank + 1) * chunk, chunk)]
        start += n
    return Layout(length=start, rows=(tuple(map(tuple, segments)),))


def _owner(groups: Tensor) -> Tensor:
    """The rank of each task [n] from the tasks of each rank [ranks, n / ranks]."""
    owner = torch.empty(groups.numel(), dtype=torch.int64)
    owner[groups.flatten()] = torch.arange(len(groups)).repeat_interleave(groups.shape[1])
    return owner


def _row(indices: Tensor, counts: Sequence[int]) -> tuple[Segments, ...]:
    """Each rank's range of a permuted sequence, as segments of consecutive tokens."""
    rows = []
    for part in indices.split(list(counts)):
        begins = torch.cat([torch.ones(min(1, len(part)), dtype=torch.bool), part.diff() != 1]).nonzero()[:, 0]
        ends = torch.cat([begins[1:], torch.tensor([len(part)])]) if len(begins) else begins
        rows.append(tuple(zip(part[begins].tolist(), (ends - begins).tolist())))
    return tuple(rows)
