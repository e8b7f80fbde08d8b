"""Exchanges of KV chosen at run time: requests, then the requested blocks; in the backward pass, their gradients to the owner ranks.

    choice of this rank's queries ──► bits of the blocks that they need, to each owner        sizes follow from the plan
    bits of all readers ──► which blocks to send, how many rows come from each rank           no further message
    blocks ──► receive buffer [B, G, T, D]                                                    nothing that no rank chose moves

A rank sends its requests only to ranks whose keys it may see under the plan's mask. With a causal mask and a contiguous layout, it sends
them to earlier ranks and receives those of later ranks.

Legend: B batch rows, G KV heads, S local tokens, T buffer tokens, u tokens per unit (`SelectionGrid.unit`). Rows of messages are units of
one batch row and KV head: [u · (D + E)], K and V side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan._comm.group import Group, Pending
from longspan._engine.selected_grid import SelectionGrid
from longspan._masks.block_table import expand_ranges
from longspan._masks.selected_shard import chosen_blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class KVMoves:
    """The units of KV that one rank sends and receives for one choice. Tensors are int64, on the host.

    Attributes:
        unit: Tokens per unit, u.
        sent: Units of the local K and V [B, G, S / u], flattened, ordered by receiver.
        placed: Units of the receive buffer [B, G, T / u], flattened, in the order of `sent` of each source.
        send_counts, recv_counts: Units per rank.
        tiles: Coarse tiles of the receive buffer, ascending.
        tokens: T.
    """

    unit: int
    sent: Tensor
    placed: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    tiles: Tensor
    tokens: int

    def numbers(self) -> Tensor:
        """All fields in one tensor [n], int64."""
        sizes = (self.unit, self.tokens, len(self.send_counts), len(self.sent), len(self.placed), len(self.tiles))
        return torch.cat([torch.tensor([*sizes, *self.send_counts, *self.recv_counts]), self.sent, self.placed, self.tiles])

    @classmethod
    def of_numbers(cls, numbers: Tensor) -> KVMoves:
        """The inverse of `numbers`."""
        unit, tokens, ranks, *lengths = numbers[:6].tolist()
        send_counts, recv_counts, sent, placed, tiles = numbers[6:].split([ranks, ranks, *lengths])
        return cls(
            unit=unit, sent=sent, placed=placed, send_counts=tuple(send_counts.tolist()), recv_counts=tuple(recv_counts.tolist()),
            tiles=tiles, tokens=tokens,
        )  # fmt: skip


def needed_blocks(indices: Tensor, blocks: int, kv_heads: int) -> Tensor:
    """indices [B, C, R, k] → the blocks that any query needs of each KV head: bool [B, 1 or G, blocks]."""
    batch, choices = indices.shape[:2]
    needed = chosen_blocks(indices.reshape(batch, choices, 1, -1), blocks)[:, :, 0]
    return needed if choices == 1 else needed.view(batch, kv_heads, choices // kv_heads, blocks).any(2)


def exchange_requests(group: Group, grid: SelectionGrid, needed: Tensor) -> list[Tensor]:
    """The requests that this rank receives: for each rank r, bool [B, 1 or G, len(grid.serves[r])], on the host.

    needed: `needed_blocks` of this rank, on the host. All ranks have agreed on its first two dims. Bits are sent packed into bytes.
    """
    control, device = group.control()
    dims = needed.shape[:2]
    packed = [_packed(needed[..., grid.block_of[tiles]]) for tiles in grid.requests]
    counts = [dims.numel() * len(tiles) for tiles in grid.serves]
    recv_bytes = [-(-count // 8) for count in counts]
    received = torch.empty(sum(recv_bytes), dtype=torch.uint8, device=device)
    what = "selected keys, requests"
    control.all_to_all(received, torch.cat(packed).to(device), recv_bytes, [len(p) for p in packed], what=what).wait()
    parts = received.cpu().split(recv_bytes)
    return [_unpacked(part, count).view(*dims, len(tiles)) for part, count, tiles in zip(parts, counts, grid.serves, strict=True)]


def _packed(bits: Tensor) -> Tensor:
    """Bits of any shape as bytes, eight per byte."""
    bits = bits.flatten()
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    return ((packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten()[:count]


def kv_moves(grid: SelectionGrid, needed: Tensor, requests: Sequence[Tensor], sizes: tuple[int, int]) -> KVMoves:
    """The moves of one choice. needed: of this rank, on the host; requests: of the other ranks (`exchange_requests`); sizes: (B, G)."""
    unit = grid.unit
    wanted = [needed[..., grid.block_of[tiles]] for tiles in grid.requests]
    received = torch.zeros(grid.tiles.kv.tiles, dtype=torch.bool)
    for tiles, bits in zip(grid.requests, wanted, strict=True):
        received[grid.coarse_of[tiles[bits.flatten(0, 1).any(0)]]] = True
    buffer_tiles = received.nonzero()[:, 0]
    tile_count = grid.tiles.kv.count
    tokens = int(tile_count[buffer_tiles].sum())
    start = torch.zeros_like(tile_count)
    start[buffer_tiles] = tile_count[buffer_tiles].cumsum(0) - tile_count[buffer_tiles]
    in_buffer = start[grid.coarse_of] + grid.fine.edges[:-1] - grid.tiles.kv.edges[grid.coarse_of]

    def units(tiles: Tensor, bits: Tensor, row: Tensor, stride: int) -> Tensor:
        b, g, t = bits.expand(*sizes, -1).nonzero(as_tuple=True)
        first = (b * sizes[1] + g) * stride + row[tiles[t]]
        return first // unit if unit > 1 else expand_ranges(first, grid.fine.count[tiles[t]])

    local_tokens = grid.fine.layout.local_len(grid.rank)
    sent = [units(tiles, bits, grid.fine.row, local_tokens) for tiles, bits in zip(grid.serves, requests, strict=True)]
    placed = [units(tiles, bits, in_buffer, tokens) for tiles, bits in zip(grid.requests, wanted, strict=True)]
    return KVMoves(
        unit=unit,
        sent=torch.cat(sent),
        placed=torch.cat(placed),
        send_counts=tuple(map(len, sent)),
        recv_counts=tuple(map(len, placed)),
        tiles=buffer_tiles,
        tokens=tokens,
    )


@dataclass(eq=False)
class ReceivedKV:
    """Chosen KV in flight to this rank."""

    moves: KVMoves
    rows: Tensor
    pending: Pending
    k: Tensor
    v: Tensor

    def wait(self) -> tuple[Tensor, Tensor]:
        """k [B, G, T, D] and v [B, G, T, E] of the receive buffer; 0 where a block was not requested for a KV head."""
        self.pending.wait()
        unit, dim = self.moves.unit, self.k.shape[3]
        buffers = []
        for t, rows in ((self.k, self.rows[:, : unit * dim]), (self.v, self.rows[:, unit * dim :])):
            buffer = t.new_zeros(*t.shape[:2], self.moves.tokens, t.shape[3])
            _units(buffer, unit).index_copy_(0, self.moves.placed.to(t.device), rows)
            buffers.append(buffer)
        return buffers[0], buffers[1]


def send_kv(group: Group, moves: KVMoves, k: Tensor, v: Tensor, *, what: str) -> ReceivedKV:
    """Start the all-to-all of the requested blocks of k [B, G, S, D] and v [B, G, S, E]."""
    sent = torch.cat([_units(t.contiguous(), moves.unit).index_select(0, moves.sent.to(t.device)) for t in (k, v)], 1)
    rows = sent.new_empty(sum(moves.recv_counts), sent.shape[1])
    pending = group.all_to_all(rows, sent, moves.recv_counts, moves.send_counts, what=f"selected keys and values, {what}")
    return ReceivedKV(moves, rows, pending, k, v)


def return_grads(group: Group, moves: KVMoves, grads: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Pending]:
    """Start the all-to-all that returns gradients of the receive buffer [B, G, T, ·] to their owner ranks.

    Returns (received rows, in the order of `moves.sent`; the exchange in flight).
    """
    sent = torch.cat([_units(t, moves.unit).index_select(0, moves.placed.to(t.device)) for t in grads], 1).to(dtype)
    rows = sent.new_empty(sum(moves.send_counts), sent.shape[1])
    what = "gradients of selected keys and values"
    return rows, group.all_to_all(rows, sent, moves.send_counts, moves.recv_counts, what=what)


def add_returned_(grads: tuple[Tensor, Tensor], rows: Tensor, moves: KVMoves) -> None:
    """Add returned gradients to those of the local k and v [B, G, S, ·], contiguous, in the order of ranks. No unit repeats in one part."""
    start, width = 0, moves.unit * grads[0].shape[3]
    for count in moves.send_counts:
        part, index = rows[start : start + count], moves.sent[start : start + count].to(rows.device)
        for total, columns in ((grads[0], part[:, :width]), (grads[1], part[:, width:])):
            _units(total, moves.unit).index_add_(0, index, columns.to(total.dtype))
        start += count


def _units(x: Tensor, unit: int) -> Tensor:
    """x [B, G, n, W], contiguous, as rows of units [B · G · n / unit, unit · W]."""
    return x.view(x.shape[0] * x.shape[1] * (x.shape[2] // unit), unit * x.shape[3])
