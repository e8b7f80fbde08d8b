"""`torch.export` of modules that call attention with mods over their parameters, buffers and inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import longspan as ls

HEADS, TOKENS, DIM = 4, 40, 16


class Layer(nn.Module):
    """Attention with a score_mod over the tensor of this name: "parameter", "buffer" or "given"."""

    buffer: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.parameter = nn.Parameter(torch.linspace(0.5, 2.0, HEADS))
        self.register_buffer("buffer", torch.linspace(2.0, 0.5, HEADS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, given: Tensor) -> Tensor:
        table = given if self.name == "given" else getattr(self, self.name)
        return ls.attention(q, k, v, mask=ls.causal(), score_mod=lambda s, b, h, qi, kv: s * table[h])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["parameter", "buffer", "given"])
def test_an_exported_layer_gives_the_results_of_the_layer(name: str, strict: bool) -> None:
    layer = Layer(name)
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, DIM)
    exported = torch.export.export(layer, (q, k, v, torch.ones(HEADS)), strict=strict).module()
    given = torch.linspace(1.0, 3.0, HEADS, requires_grad=True)
    expected, got = layer(q, k, v, given), exported(q, k, v, given)
    torch.testing.assert_close(got, expected)
    if name == "buffer":
        return
    leaves = (given, given) if name == "given" else (layer.parameter, exported.get_parameter("parameter"))
    grads = [torch.autograd.grad(out.square().sum(), leaf)[0] for out, leaf in zip((expected, got), leaves, strict=True)]
    torch.testing.assert_close(grads[1], grads[0])
