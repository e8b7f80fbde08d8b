"""`ShardedBlockMask`: one rank's rows of a BlockMask over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from longspan._plan.layout import Layout

_LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks",
    "full_q_indices",
)  # fmt: skip


class ShardedBlockMask(BlockMask):
    """A BlockMask of this rank's queries over the keys of all ranks in the order of an all-gather: rank after rank.

    The engine reads `whole` and `layouts`. The block lists are made on first access, for torch's own `flex_attention` on gathered keys.
    """

    def __init__(
        self, whole: BlockMask, layouts: tuple[Layout, Layout], rank: int, block: int, sizes: tuple[int, int] | None = None
    ) -> None:
        # BlockMask.__init__ is not called: it takes the block lists.
        self.whole, self.layouts, self.rank = whole, layouts, rank
        self.seq_lengths = (layouts[0].local_len(rank), layouts[1].length)
        self.BLOCK_SIZE = (block, block)
        self.sizes = whole.kv_num_blocks.shape[:2] if sizes is None else sizes  # batch and heads of the block lists
        self.mask_mod = self._local_mask_mod(whole.mask_mod)

    def _local_mask_mod(self, mask_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
        device = self.whole.kv_num_blocks.device
        q = torch.atleast_2d(self.layouts[0].positions(self.rank)).to(device)
        ranks = range(self.layouts[1].ranks)
        kv = torch.cat([torch.atleast_2d(self.layouts[1].positions(r)) for r in ranks], 1).to(device)

        def global_position(table: Tensor, b: Tensor, i: Tensor) -> Tensor:
            return table[0][i] if len(table) == 1 else table[b, i]

        def local_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mask_mod(b, h, global_position(q, b, q_idx), global_position(kv, b, kv_idx))

        return local_mask_mod

    def __getattr__(self, name: str) -> Any:
        if name not in _LISTS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        batch, heads = self.sizes
        device = self.whole.kv_num_blocks.device
        made = create_block_mask(self.mask_mod, batch, heads, *self.seq_lengths, device=str(device), BLOCK_SIZE=self.BLOCK_SIZE)
        for list_name in _LISTS:
            setattr(self, list_name, getattr(made, list_name))
        return getattr(self, name)
