"""Peers of bench/selected.py: attention over lists of KV blocks by other packages.

An adapter `prepare(row, tokens, indices, inputs, grad)` returns the calls that are timed: "forward", and "both" where the peer has a
backward pass. It raises Unsupported if the peer cannot compute the row. Lists of a peer that are not the indices themselves are made
before the calls, so that its times do not include them, unlike longspan's; those of FlexAttention (a BlockMask) are made in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch._functorch.config
from bench.peer_calls import Unsupported
from bench.selected_rows import Row
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Calls = dict[str, Callable[[], Any]]


def packed(indices: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """(indices in ascending order, −1 left out; their number [1, heads, rows]), int32. Entries past the number are valid blocks."""
    ordered = torch.where(indices < 0, blocks, indices).sort(-1).values
    return ordered.clamp(max=blocks - 1).int().contiguous(), (ordered < blocks).sum(-1).int().contiguous()


def per_head(row: Row, t: Tensor) -> Tensor:
    """A list per query head."""
    return t.repeat_interleave(row.heads // row.kv_heads, 1)


def flex_mask(row: Row, tokens: int, indices: Tensor) -> BlockMask:
    """The BlockMask of a choice of blocks: with causal, the query's own block is partial, the others are full."""
    blocks = tokens // row.granularity
    ordered, count = (per_head(row, t) for t in packed(indices, blocks))
    full = torch.zeros(1, row.heads, blocks, blocks, dtype=torch.int32, device="cuda")
    partial = full.clone()
    full[..., : ordered.shape[-1]] = ordered
    if row.causal:
        partial[..., :1] = torch.arange(blocks, device="cuda", dtype=torch.int32)[None, None, :, None]
    return BlockMask.from_kv_blocks(
        torch.full_like(count, int(row.causal)), partial, count - int(row.causal), full, BLOCK_SIZE=row.granularity,
        mask_mod=(lambda b, h, i, j: i >= j) if row.causal else None, seq_lengths=(tokens, tokens),
    )  # fmt: skip


def flex_calls(row: Row, tokens: int, indices: Tensor, inputs: list[Tensor], grad: Tensor) -> Calls:
    if row.granularity != 128 or row.q_granularity != 128 or tokens > 65536:
        raise Unsupported("blocks of 128, up to 65,536 tokens")
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # backward runs many times on one graph
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        out: Tensor = compiled(*inputs, block_mask=flex_mask(row, tokens, indices), enable_gqa=row.heads != row.kv_heads)
        return out

    return autograd_calls(run, inputs, grad)


def fa4_calls(row: Row, tokens: int, indices: Tensor, inputs: list[Tensor], grad: Tensor) -> Calls:
    if row.causal or row.granularity != 128 or row.q_granularity != 128:
        raise Unsupported("whole blocks of 128")
    interface, sparsity = import_module("flash_attn.cute.interface"), import_module("flash_attn.cute.block_sparsity")
    blocks = tokens // row.granularity
    ordered, count = (per_head(row, t).contiguous() for t in packed(indices, blocks))
    chosen = torch.zeros(1, row.heads, blocks, blocks + 1, dtype=torch.bool, device="cuda")
    chosen.scatter_(-1, per_head(row, torch.where(indices < 0, blocks, indices)).long(), True)
    by_key = chosen[..., :blocks].transpose(-1, -2)
    q_lists = by_key.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()

    def tables(lists: Tensor, counts: Tensor) -> Any:
        return sparsity.BlockSparseTensorsTorch(
            mask_block_cnt=torch.zeros_like(counts), mask_block_idx=torch.zeros_like(lists), full_block_cnt=counts, full_block_idx=lists,
            block_size=(128, 128),
        )  # fmt: skip

    forward_tables, backward_tables = tables(ordered, count), tables(q_lists, by_key.sum(-1).int())
    tokens_first = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in inputs]

    def run() -> Tensor:
        out = interface.flash_attn_func(*tokens_first, block_sparse_tensors=forward_tables, block_sparse_tensors_bwd=backward_tables)
        return out[0] if isinstance(out, tuple) else out

    return autograd_calls(run, tokens_first, grad.transpose(1, 2).contiguous())


def cudnn_calls(row: Row, tokens: int, indices: Tensor, inputs: list[Tensor], grad: Tensor) -> Calls:
    if row.causal or row.q_granularity not in (64, 128) or row.granularity != row.q_granularity:
        raise Unsupported("whole blocks of 64 or 128")
    module = import_module("cudnn.block_sparse_attention")
    lists, counts = (per_head(row, t).contiguous() for t in packed(indices, tokens // row.granularity))
    q, k, v = (t.detach() for t in inputs)
    options = {"q2k_block_nums": counts, "sparse_block_size": row.granularity}

    def forward() -> Any:
        return module.block_sparse_attention_forward(q, k, v, lists, **options)

    def both() -> Any:
        result = forward()
        return module.block_sparse_attention_backward(grad, q, k, v, result["o_tensor"], result["lse_tensor"], lists, **options)

    calls: Calls = {"forward": forward}
    return calls | {"both": both} if row.heads == row.kv_heads else calls


def nsa_calls(row: Row, tokens: int, indices: Tensor, inputs: list[Tensor], grad: Tensor) -> Calls:
    if row.q_granularity != 1 or row.granularity < 16 or row.heads // row.kv_heads > 16:
        raise Unsupported("rows of one query, blocks of 16 to 128, up to 16 query heads per KV head")
    select = import_module("cudnn.native_sparse_attention").selection_attention_wrapper
    q, k, v = (t.detach()[0].transpose(0, 1).contiguous() for t in inputs)
    lists, counts = packed(indices, tokens // row.granularity)
    lists, counts = lists[0].transpose(0, 1).contiguous(), counts[0].transpose(0, 1).contiguous()
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")

    def forward() -> Any:
        return select(
            q, k, v, lists, counts, ends, ends, block_size=row.granularity, max_s_q=tokens, max_s_k=tokens, is_causal=row.causal
        )  # fmt: skip

    return {"forward": forward}


def autograd_calls(run: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> Calls:
    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return {"forward": forward, "both": lambda: torch.autograd.grad(run(), inputs, grad)}


def first_out(name: str, calls: Calls) -> Tensor:
    """Out of the forward call of a peer, [heads, tokens, D]."""
    out = calls["forward"]()
    if name == "fa4":
        return out[0].transpose(0, 1)
    if name == "cudnn.nsa":
        return out["o_tensor"].transpose(0, 1)
    return out["o_tensor"][0] if name == "cudnn.bsa" else out[0]


PEERS: dict[str, Callable[[Row, int, Tensor, list[Tensor], Tensor], Calls]] = {
    "flex": flex_calls, "fa4": fa4_calls, "cudnn.bsa": cudnn_calls, "cudnn.nsa": nsa_calls,
}  # fmt: skip
