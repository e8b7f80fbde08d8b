"""Block tables from kinds of tiles that are on the device: of a torch BlockMask on a GPU. Nothing is read on the host.

Legend as in `gpu.selected_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from longspan._kernels.gpu.launch import DeviceTable
from longspan._kernels.gpu.selected_tables import SelectedTables, columns_kernel, launch_kernel, query_order, stand_in
from longspan._kernels.protocol import Selection, Work
from longspan._masks.block_table import PARTIAL

BLOCKS = (64, 128)  # queries and keys of a tile
MAX_BYTES = 2**30  # of the tables of a call; above, tile lists are made on the host, of the listed tiles only
# kinds and their transpose (a byte each); indices, lists by query tile and lists by KV tile (int32)
_BYTES_PER_TILE = 2 * 1 + 3 * 4


@dataclass(kw_only=True, eq=False)
class ListedTables(SelectedTables):
    """The device tables of kinds [batch, heads, q_tiles, kv_tiles] int8: each tile that is not 0 is listed."""

    kinds: Tensor

    def _by_query(self) -> DeviceTable:
        groups = self.batch * self.heads
        made = self._list(self.kinds, dummy=self.dummy)
        return made._replace(order=query_order((groups, 1, self.table.q_tiles), 1, self.kinds.device))

    def _by_key(self) -> DeviceTable:
        return self._list(self.kinds.mT, dummy=False)

    @property
    def _listed_heads(self) -> int:
        return self.heads

    def _list(self, kinds: Tensor, *, dummy: bool) -> DeviceTable:
        """The table whose rows are rows of `kinds`."""
        batch, heads, tiles, columns = kinds.shape
        rows = batch * heads * tiles
        tensors, made = self._empty(rows, rows * columns + (rows if dummy else 0))
        used = torch.zeros(4, dtype=torch.int32, device=kinds.device)
        launch_kernel(columns_kernel, rows, {"bits": None, "used": used, "kinds": kinds.contiguous(), **tensors}, {
            "sizes": (tiles, columns, heads, 1), "choice_sizes": (1, 1, 1), "kind_sizes": (batch, heads), "WORDS": 0,
            "W": triton.next_power_of_2(-(-columns // 32)), "COPIES": 1, "DUMMY": dummy,
        })  # fmt: skip
        return made


def listed_work(work: Work, kinds: Tensor, *, dummy: bool) -> Work | None:
    """`work` over the tiles of `kinds` [batch, heads, q_tiles, kv_tiles] that are not 0; None if its tables exceed `MAX_BYTES`.

    Lists have room for all tiles, since the number of listed ones is not read. dummy: of `SelectedTables`.
    """
    if kinds.numel() * _BYTES_PER_TILE > MAX_BYTES:
        return None
    table = work.table
    (q_block, kv_block), (batch, heads, _, kv_tiles) = table.block, kinds.shape
    kinds = kinds.clone()  # tiles that reach past the last query or key are partial, as in every block table
    kinds[:, :, table.q_len // q_block :].clamp_(max=PARTIAL)
    kinds[:, :, :, table.kv_len // kv_block :].clamp_(max=PARTIAL)
    # Each tile as a choice, for checks of lookups.
    indices = torch.where(kinds > 0, torch.arange(kv_tiles, dtype=torch.int32, device=kinds.device), -1)
    selection = Selection(indices=indices, granularity=kv_block, q_granularity=q_block, heads_per_choice=1)
    tables = ListedTables(selection=selection, table=table, batch=batch, heads=heads, dummy=dummy, kinds=kinds)
    return replace(work, table=stand_in((table.q_len, table.kv_len), table.block, batch, heads, max(1, kv_tiles)), device_tables=tables)
