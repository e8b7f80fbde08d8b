"""Every *after* block of the migration page runs and gives the result of one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.dropin.helpers import BATCH, HEADS, qkv
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import longspan as ls
from longspan.testing import run_processes

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migration.md"
LENGTH = 48
LENGTHS = torch.tensor([0, 20, 25, 48])


def blocks() -> list[str]:
    return re.findall(r'```python title="after"\n(.*?)```', PAGE.read_text(), re.S)


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **kwargs)


class Model(nn.Module):
    """A model whose output depends on tokens, positions and the whole past."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = (torch.stack([tokens.double(), positions.expand_as(tokens).double()], -1) / 10)[:, None].expand(-1, HEADS, -1, -1)
        return F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True).transpose(1, 2).flatten(2)


def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 11)


def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + (kv - q) * 0.1


def names() -> dict[str, Any]:
    q, k, v = qkv(LENGTH)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 23
    return {
        "ls": ls, "q": q, "k": k, "v": v, "model": Model(), "tokens": tokens, "labels": tokens.clone(), "positions": torch.arange(LENGTH),
        "mask_mod": mask_mod, "score_mod": score_mod, "Attention": Attention, "cu_seqlens": LENGTHS,
    }  # fmt: skip


def expected_results() -> list[Tensor]:
    n = names()
    q, k, v = n["q"], n["k"], n["v"]
    documents = ls.documents(lengths=LENGTHS.diff())
    model = n["model"](n["tokens"], n["positions"])
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [
        model,
        model,
        ls.attention(q, k, v, mask=ls.mask_mod(mask_mod), score_mod=score_mod),
        causal,
        ls.attention(q, k, v, mask=ls.causal() & documents),
        ls.attention(q, k, v, mask=documents & (ls.causal() | ls.prefix(5))),
        causal,
    ]


def _run() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))

    def gathered(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    outputs = []
    for block in blocks():
        scope = names() | {"mesh": mesh, "gathered": gathered}
        exec(block, scope)
        outputs.append(scope["result"])
    return outputs


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [3])
def test_the_pages_code_gives_the_result_of_one_device(ranks: int) -> None:
    assert len(blocks()) == len(expected_results())
    for outputs in run_processes(_run, ranks):
        for i, (got, want) in enumerate(zip(outputs, expected_results(), strict=True)):
            assert float((got - want).abs().max()) < 1e-10, blocks()[i]
