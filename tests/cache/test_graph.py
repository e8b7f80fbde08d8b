"""Decode steps in CUDA graphs: replays equal eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls

LENGTHS, STEPS, LAYERS = [700, 1300, 250], 6, 2


def decode(*, graphed: bool) -> list[Tensor]:
    """Results of all layers and steps: the first step eager, the others eager or by replays of one graph."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    cache = ls.KVCache(pages=200, page_size=16, layers=LAYERS, kv_heads=2, head_dim=64, **options)
    ids = cache.allocate(len(LENGTHS))
    prefix = cache.step(ids, LENGTHS)
    for layer in range(LAYERS):
        ls.attention(*(torch.randn(1, heads, sum(LENGTHS), 64, **options) for heads in (8, 2, 2)), cache=prefix, layer=layer)
    inputs = [[torch.randn(len(ids), heads, 1, 64, **options) for heads in (8, 2, 2)] for _ in range(STEPS)]
    q, k, v = (torch.empty_like(x) for x in inputs[0])

    def fill(i: int) -> None:
        for x, new in zip((q, k, v), inputs[i]):
            x.copy_(new)

    def layers(step: Any) -> list[Tensor]:
        return [ls.attention(q + layer, k, v, cache=step, layer=layer, mask=ls.causal()) for layer in range(LAYERS)]

    fill(0)
    outs = [x.clone() for x in layers(cache.step(ids, 1, longest=2000))]
    if graphed:
        step, graph = cache.step(ids, 1, longest=2000), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = layers(step)
    for i in range(1, STEPS):
        fill(i)
        if graphed:
            if i > 1:
                step.advance()
            graph.replay()
        outs += [x.clone() for x in (held if graphed else layers(cache.step(ids, 1)))]
    return outs


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_equal_eager_steps() -> None:
    for replayed, eager in zip(decode(graphed=True), decode(graphed=False), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.gpu
@torch.inference_mode()
def test_capturing_a_step_without_longest_raises() -> None:
    cache = ls.KVCache(pages=4, layers=1, kv_heads=1, head_dim=64, dtype=torch.bfloat16, device="cuda")
    step, x = cache.step(cache.allocate(1), 1), torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="longest"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ls.attention(x, x, x, cache=step, layer=0)
