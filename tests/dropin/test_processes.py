"""Processes over Gloo: DeviceMeshes, DTensors, the module style, and a rank that raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.dropin.helpers import BATCH, DIM, HEADS, assert_close, qkv, random
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from longspan._dropin.context import context_parallel
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
LENGTH = 45


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


class Attention(nn.Module):
    """SDPA as a module."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **kwargs)


class Flex(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return flex_attention(query, key, value, **kwargs)


class Block(nn.Module):
    """Projections around attention: [B, S, E] to [B, S, E]."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(4, HEADS * DIM, HEADS * DIM, generator=generator, dtype=torch.float64) / 7
        self.weights = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for w in self.weights[:3])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ self.weights[3]


def _styles() -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from longspan._dropin.parallel_style import ContextParallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    q, k, v = qkv(LENGTH)
    outputs: dict[str, Any] = {}

    # DTensors sharded on the sequence, in and out, with gradients.
    module = parallelize_module(Attention(), mesh, ContextParallel())
    parts = [distribute_tensor(t.clone().requires_grad_(), mesh, [Shard(2)]) for t in (q, k, v)]
    out = module(*parts, is_causal=True)
    assert isinstance(out, DTensor) and out.placements == (Shard(2),) and out.shape == q.shape
    grads = torch.autograd.grad(out, parts, grad_outputs=distribute_tensor(random(*q.shape, seed=9), mesh, [Shard(2)]))
    outputs["sdpa"] = [t.full_tensor() for t in (out, *grads)]

    # A whole block of a model, [B, S, E] sharded on dim 1, uneven.
    x = random(BATCH, LENGTH, HEADS * DIM)
    block = parallelize_module(Block(), mesh, ContextParallel())
    outputs["block"] = block(distribute_tensor(x, mesh, [Shard(1)])).full_tensor().detach()

    # Plain shards, head-tail, of a known length; FlexAttention with a score mod.
    flex = parallelize_module(Flex(), mesh, ContextParallel(seq_len=LENGTH, layout="head_tail"))
    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    with context_parallel(mesh, seq_len=LENGTH) as cp:
        shards = [cp.shard(t, 2) for t in (q, k, v)]
    out = flex(*shards, block_mask=block_mask, score_mod=lambda s, b, h, i, j: s + (j - i) * 0.125)
    outputs["flex"] = cp.unshard(out, 2)

    # DTensors in a context.
    with context_parallel(mesh, seq_len=LENGTH, layout=lambda n, ranks: _chunks(n, ranks)):
        out = F.scaled_dot_product_attention(*(distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v)), is_causal=True)
        outputs["context"] = out.full_tensor()
        try:
            F.scaled_dot_product_attention(*(distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k, v)))
        except ValueError as error:
            outputs["wrong placement"] = str(error)
    return outputs


def _chunks(length: int, ranks: int) -> Any:
    from longspan._dropin.global_layout import chunked

    return chunked(length, ranks)


def test_modules_with_the_style_give_the_result_of_one_device() -> None:
    q, k, v = qkv(LENGTH)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, is_causal=True)
    grads = torch.autograd.grad((out * random(*q.shape, seed=9)).sum(), whole)
    position = torch.arange(LENGTH)
    alibi = (position[None, :] - position[:, None]).double() * 0.125
    alibi.masked_fill_(position[None, :] > position[:, None], -torch.inf)
    for outputs in run_processes(_styles, 2):
        assert_close(outputs["sdpa"], [out.detach(), *grads])
        assert_close([outputs["block"]], [Block()(random(BATCH, LENGTH, HEADS * DIM)).detach()])
        assert_close([outputs["flex"]], [F.scaled_dot_product_attention(q, k, v, attn_mask=alibi)])
        assert_close([outputs["context"]], [out.detach()])
        assert "expected a DTensor placed Shard(2)" in outputs["wrong placement"]


def _failing() -> tuple[str, bool, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = flex_attention.__code__
    buffers = qkv(LENGTH)
    message = ""
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            F.scaled_dot_product_attention(*buffers)
            if dist.get_rank() == 1:
                raise KeyError("the data ran out")
            F.scaled_dot_product_attention(*buffers)
    except (KeyError, RuntimeError) as error:
        message = str(error)
    whole = all(torch.equal(a, b) for a, b in zip(buffers, qkv(LENGTH), strict=True))
    return message, whole, flex_attention.__code__ is before


def test_a_rank_that_raises_gives_the_others_an_error_within_the_timeout() -> None:
    outputs = run_processes(_failing, 2, group_timeout=5.0)
    assert "the data ran out" in outputs[1][0]
    assert "the exchange failed on rank 0" in outputs[0][0]
    assert all(whole and clean for _, whole, clean in outputs)


@pytest.mark.gpu
def test_a_context_on_a_gpu_gives_the_result_of_one_device() -> None:
    from longspan.testing import virtual_world

    q, k, v = (t.to("cuda", torch.bfloat16) for t in qkv(LENGTH))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rank(mesh: Any) -> Tensor:
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            return cp.unshard(F.scaled_dot_product_attention(*(cp.shard(t, 2) for t in (q, k, v)), is_causal=True), 2)

    for out in virtual_world(3, device="cuda").run(rank):
        assert float((out - want).abs().max()) < 3e-2
