"""Norms and MLPs that `memory.tiled` runs in chunks of tokens, and the errors for unsupported modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.small_parts import module
from torch import Tensor, nn

from longspan.integrations import memory
from longspan.integrations._forward import PlanKeepingCheckpoint


class OwnRMSNorm(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        calls.append(tuple(x.shape))
        return x * self.weight


class OwnLayerNorm(OwnRMSNorm): ...


class Other(OwnRMSNorm): ...


class TwoRMSNorm(OwnRMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return x


class TinyMLP(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            setattr(self, f"part{i}", part)

    def forward(self, x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return x * 2


class TinyBlock(TinyMLP): ...


class TwoMLP(TinyMLP):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return x


calls: list[tuple[int, ...]] = []


def test_norms_that_are_tiled() -> None:
    first, with_part = OwnRMSNorm(), OwnRMSNorm()
    first.data_format, with_part.part = "channels_first", nn.Linear(2, 2)  # type: ignore[assignment]
    model = nn.Sequential(
        OwnRMSNorm(), OwnLayerNorm(), Other(), TwoRMSNorm(), nn.LayerNorm(4), nn.RMSNorm(4), first, with_part, OwnRMSNorm(3)
    )
    assert memory.tile_norms(model, 2) == ["0", "1", "8"]
    norm, x = model[0], torch.randn(2, 5, 3, 4)
    for args, kwargs, training, want in (
        ((x,), {}, True, [(2, 2, 3, 4), (2, 2, 3, 4), (2, 1, 3, 4)]),
        ((x[:, :, 0],), {}, True, [(2, 2, 4), (2, 2, 4), (2, 1, 4)]),
        ((x[:, 0, 0],), {}, True, [(2, 4)]),
        ((x,), {}, False, [(2, 5, 3, 4)]),
        ((x, x), {}, True, [(2, 5, 3, 4)]),
        ((x,), {"gate": x}, True, [(2, 5, 3, 4)]),
    ):
        calls.clear()
        norm.train(training)
        torch.testing.assert_close(norm(*args, **kwargs), args[0])
        assert calls == want
    calls.clear()
    model[8](torch.randn(2, 5, 1))
    assert calls == [(2, 5, 1)]  # a weight of another size


def test_mlps_that_are_tiled() -> None:
    linear = lambda: nn.Linear(4, 4)
    weighted = TinyMLP(linear(), linear())
    weighted.scale = nn.Parameter(torch.ones(1))
    model = nn.Sequential(
        TinyMLP(linear(), nn.ReLU(), linear()), TinyMLP(linear()), TinyMLP(linear(), nn.LayerNorm(4)), TinyBlock(linear(), linear()),
        TwoMLP(linear(), linear()), weighted, TinyMLP(linear(), linear()),
    )  # fmt: skip
    assert memory.tile_mlps(model, 2) == ["0", "6"]
    x = torch.randn(3, 5, 4)
    for training, want in ((True, [(3, 2, 4), (3, 2, 4), (3, 1, 4)]), (False, [(3, 5, 4)])):
        calls.clear()
        torch.testing.assert_close(model[0].train(training)(x), 2 * x)
        assert calls == want


@pytest.mark.parametrize(("chunk", "dim", "tokens"), [(3, 1, [3, 2]), (5, -2, [5]), (4, 0, [2]), (1, 1, [1] * 5), (2, -1, [2, 2])])
def test_chunks_of_tokens(chunk: int, dim: int, tokens: list[int]) -> None:
    x, sizes = torch.randn(2, 5, 4), []

    def double(part: Tensor) -> Tensor:
        sizes.append(part.shape[dim])
        return 2 * part

    torch.testing.assert_close(memory.tiled(double, x, chunk=chunk, dim=dim), 2 * x)
    assert sizes == tokens


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(2, 3), {"chunk": 0}, "chunk"),
        (torch.zeros(2, 3), {"chunk": 1, "dim": 2}, r"expected a tensor x with a dim 2, got shape \(2, 3\)"),
        (torch.zeros(2, 3), {"chunk": 1, "dim": -3}, "with a dim -3"),
        (3, {"chunk": 1}, "with a dim -2, got int"),
    ],
)
def test_arguments_of_tiled_that_raise(x: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory.tiled(torch.sin, x, **options)
    assert memory.tiled(torch.neg, torch.ones(2), chunk=1, dim=-1).tolist() == [-1, -1]


def test_only_the_checkpoint_function_of_long_context_is_taken() -> None:
    import functools

    own = functools.partial(memory._checkpoint, keep=None, inputs=None)
    layer: Any = module(gradient_checkpointing=True, _gradient_checkpointing_func=own)
    memory._check_checkpointing(layer)
    layer._gradient_checkpointing_func = PlanKeepingCheckpoint(own)
    memory._check_checkpointing(layer)
    for other in (max, PlanKeepingCheckpoint(max), functools.partial(max, 3)):
        layer._gradient_checkpointing_func, layer.gradient_checkpointing = other, True
        with pytest.raises(ValueError, match="was called after long_context"):
            memory._check_checkpointing(layer)
        layer.gradient_checkpointing = False
        memory._check_checkpointing(layer)
    memory._check_checkpointing(module(gradient_checkpointing=True))


def test_only_plain_linear_heads_have_a_tiled_loss() -> None:
    def model(head: Any) -> Any:
        return SimpleNamespace(get_output_embeddings=lambda: head, _longspan_linear_head=True)

    memory._check_head(model(nn.Linear(3, 5, bias=False)))
    hooked, patched = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    own = type("OwnLinear", (nn.Linear,), {"forward": lambda self, x: x})(3, 5, bias=False)
    for head in (None, nn.Linear(3, 5), nn.Identity()):
        with pytest.raises(ValueError, match=r"expected an output layer nn\.Linear without bias"):
            memory._check_head(model(head))
    for head in (hooked, patched, own):
        with pytest.raises(ValueError, match="has hooks or a forward of its own"):
            memory._check_head(model(head))
