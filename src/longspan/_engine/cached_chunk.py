"""Many queries of one sequence over its gathered KV, by a kernel of training. Legend as in `longspan._kernels.paged`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longspan._cache.step import CacheStep
from longspan._engine.sink import sink_state
from longspan._kernels.paged import PagedWork
from longspan._kernels.protocol import AttentionInputs, Work
from longspan._kernels.registry import KernelCall, choose
from longspan._kernels.tiling import Tiling
from longspan._masks.block_table import BLOCK_SIZE
from longspan._masks.classify import TableShape, classify

BLOCK = (BLOCK_SIZE, BLOCK_SIZE)


class Chunk(NamedTuple):
    """Queries at start … stop − 1 of the step's sequence number `sequence`, over its keys at first … length − 1."""

    sequence: int
    start: int
    stop: int
    first: int
    length: int


def first_gathered(work: PagedWork, start: int) -> int:
    """The first token that a chunk of queries from `start` on gathers: tokens before its window are not read."""
    return work.first_key(start) // BLOCK_SIZE * BLOCK_SIZE


def attend_chunk(qkv: tuple[Tensor, Tensor, Tensor], chunk: Chunk, step: CacheStep, work: PagedWork, kernel: str) -> tuple[Tensor, Tensor]:
    """(out [H, m, E], lse [H, m]) of q [H, m, D] over k [G, t, D] and v [G, t, E]: the chunk's m queries and t keys.

    k and v: as pages hold them, or in the dtype of q.
    """
    q, k, v = (x[None].to(qkv[0].dtype) for x in qkv)
    inputs = AttentionInputs(q=q, k=k, v=v)
    state = sink_state(work.sink, q, v, max_scores=False)
    made = partial(_chunk_work, work, chunk, heads=q.shape[1])
    kernel_work = step.derived(_key(work, chunk, q.shape[1], BLOCK), partial(made, block=BLOCK))
    chosen = choose(kernel, [KernelCall(inputs, kernel_work)]).kernel
    block = chosen.block_size(inputs, kernel_work.table)
    if block != BLOCK:
        kernel_work = step.derived(_key(work, chunk, q.shape[1], block), partial(made, block=block))
    kernel_work = replace(
        kernel_work, scale=work.scale, score=work.score, score_captured=work.score_captured, mask_captured=work.mask_captured
    )  # fmt: skip
    result = chosen.forward(inputs, kernel_work, state=state, final=work.scales is None, max_scores=False)
    out = result.out[0] if work.scales is None else (result.out[0] * work.scales[1]).to(q.dtype)
    return out, result.lse[0]


def _key(work: PagedWork, chunk: Chunk, heads: int, block: tuple[int, int]) -> Hashable:
    """The key under which layers of a step share a chunk's tiles; None if the mask reads tensors, which may differ between layers."""
    return None if work.mask_captured else (None if work.mask is None else work.mask.key, chunk, heads, block)


def _chunk_work(work: PagedWork, chunk: Chunk, *, heads: int, block: tuple[int, int]) -> Work:
    """The work of a chunk in tiles of `block`."""
    index, start, stop, first, length = chunk
    q_edges, kv_edges = (
        torch.tensor([*range(low, high, size), high]) for low, high, size in ((start, stop, block[0]), (first, length, block[1]))
    )
    shape = TableShape(q_len=stop - start, kv_len=length - first, block=block, heads=heads, first_batch=index, edges=(q_edges, kv_edges))
    return Work(
        table=classify(work.mask, work.mask_captured, shape),
        q_tiles=_tiles_between(q_edges, block[0]),
        kv_tiles=Tiling(length=length, block=block[1]) if first == 0 else _tiles_between(kv_edges, block[1]),
        scale=work.scale,
        mask=work.mask,
        mask_captured=work.mask_captured,
        score=work.score,
        score_captured=work.score_captured,
        first_batch=index,
    )


def _tiles_between(edges: Tensor, block: int) -> Tiling:
    """The tiles of a tensor that holds the tokens edges[0] … edges[-1] − 1."""
    return Tiling(length=int(edges[-1] - edges[0]), block=block, row=edges[:-1] - edges[0], pos=edges[:-1], count=edges.diff())
