"""Gradients of bfloat16 weights over chunks: summed in float32, rounded once, with all that autograd offers for parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longspan.integrations import memory
from longspan.integrations.loss import linear_token_loss
from longspan.testing import run_processes

CHUNKS, CHUNK, SIZE, INNER = 96, 2, 6, 7


class GatedMLP(nn.Module):
    """Linear layers, one of which is used transposed, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(SIZE, INNER), nn.Linear(SIZE, INNER, bias=False), nn.Linear(INNER, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)) + x @ self.gate.weight.T @ self.up.weight


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, CHUNKS * CHUNK, SIZE).bfloat16()
    return x.requires_grad_(), torch.randn(1, CHUNKS * CHUNK, SIZE).bfloat16()


def sums_of_chunks(fn: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    """Gradients of chunks, each on its own, summed in float32 and rounded once."""
    parts = zip(x.split(CHUNK, 1), grad.split(CHUNK, 1), strict=True)
    each = [torch.autograd.grad(fn(a), parameters, g) for a, g in parts]
    return [torch.stack([g.float() for g in grads]).sum(0).bfloat16() for grads in zip(*each, strict=True)]


def assert_rounded_once(got: Any, want: Any) -> None:
    torch.testing.assert_close(list(got), list(want), rtol=2**-7, atol=1e-6)  # the order of float32 sums may move the last bit


@pytest.mark.parametrize("kind", [GatedMLP, OwnRMSNorm])
def test_chunks_sum_gradients_of_bfloat16_weights_in_float32(kind: type[nn.Module]) -> None:
    x, grad = inputs()
    module = kind().bfloat16()
    want = sums_of_chunks(module, list(module.parameters()), x, grad)
    tile = memory.tile_mlps if kind is GatedMLP else memory.tile_norms
    assert tile(nn.Sequential(module), CHUNK) == ["0"]
    assert_rounded_once(torch.autograd.grad(module(x), list(module.parameters()), grad), want)


def test_the_tiled_loss_sums_gradients_of_a_bfloat16_weight_in_float32() -> None:
    x, _ = inputs()
    labels, leaf = torch.randint(0, 5, (1, CHUNKS * CHUNK)), torch.randn(5, SIZE).bfloat16().requires_grad_()
    for weight in (leaf, leaf * 3):  # not only leaves
        losses = [linear_token_loss(a, weight, t, count=8) for a, t in zip(x.split(CHUNK, 1), labels.split(CHUNK, 1), strict=True)]
        want = sum(torch.autograd.grad(loss, weight, retain_graph=True)[0].float() for loss in losses).bfloat16()
        got = torch.autograd.grad(linear_token_loss(x, weight, labels, count=8, chunk=CHUNK), weight)
        assert_rounded_once(got, [want])


def test_hooks_of_parameters_run_once_with_the_sum() -> None:
    x, grad = inputs()
    mlp = GatedMLP().bfloat16()
    want = sums_of_chunks(mlp, [mlp.up.weight, mlp.gate.weight], x, grad)
    calls: list[str] = []
    mlp.up.weight.register_hook(lambda g: calls.append("hook") or 2 * g)
    mlp.up.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    mlp.gate.register_forward_hook(lambda *_: calls.append("forward"))
    memory.tiled(mlp, x, chunk=CHUNK).backward(grad)
    assert [calls.count(name) for name in ("hook", "accumulated", "forward")] == [1, 1, 2 * CHUNKS]
    assert_rounded_once([mlp.up.weight.grad, mlp.gate.weight.grad], [2 * want[0], want[1]])


def test_frozen_and_shared_parameters_and_second_backward_passes() -> None:
    x, grad = inputs()
    mlp = GatedMLP().bfloat16()
    mlp.gate.weight = mlp.up.weight
    mlp.down.requires_grad_(False)
    parameters = [mlp.up.weight, mlp.up.bias]
    want = sums_of_chunks(mlp, parameters, x, grad)
    y = memory.tiled(mlp, x, chunk=CHUNK)
    for retain in (True, False):
        assert_rounded_once(torch.autograd.grad(y, parameters, grad, retain_graph=retain), want)
    memory.tiled(mlp, x, chunk=CHUNK).backward(grad)
    memory.tiled(mlp, x, chunk=CHUNK).backward(grad)
    assert mlp.down.weight.grad is None
    assert_rounded_once([p.grad for p in parameters], [2 * g for g in want])


def test_gradients_of_gradients_pass_through_chunks() -> None:
    x, grad = inputs()
    mlp = GatedMLP().bfloat16()

    def penalty(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y, [x, mlp.up.weight], grad, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), [mlp.gate.weight, x])

    for got, want in zip(penalty(memory.tiled(mlp, x, chunk=48)), penalty(mlp(x)), strict=True):
        assert (got - want).float().norm() < 0.03 * want.float().norm()


def test_without_gradients_chunks_use_the_parameters_themselves() -> None:
    x, _ = inputs()
    mlp = GatedMLP().bfloat16()
    seen: list[bool] = []
    torch.testing.assert_close(memory.tiled(mlp, x, chunk=CHUNK), mlp(x))
    with torch.no_grad():
        memory.tiled(lambda t: seen.append(nn.functional.linear(t, mlp.up.weight).requires_grad) or t, x, chunk=48)
    assert seen == [False] * 4
    assert memory.tiled(mlp, x.detach(), chunk=CHUNK).requires_grad  # the parameters alone need gradients


def test_forward_mode_differentiates_the_tiled_loss_of_a_bfloat16_weight() -> None:
    x, _ = inputs()
    labels, weight = torch.randint(0, 5, (1, CHUNKS * CHUNK)), torch.randn(5, SIZE).bfloat16().requires_grad_()
    tangent = torch.randn(5, SIZE).bfloat16()

    def tangents(chunk: int, dtype: torch.dtype) -> float:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(weight.to(dtype), tangent.to(dtype))
            loss = linear_token_loss(x.detach().to(dtype), dual, labels, count=CHUNKS * CHUNK, chunk=chunk)
            return forward_ad.unpack_dual(loss).tangent.item()

    want = tangents(CHUNKS * CHUNK, torch.float64)
    assert abs(tangents(CHUNK, torch.bfloat16) - want) < 0.02 * abs(want)


def test_methods_of_leaves_reach_parameters_inside_of_chunks() -> None:
    x, grad = inputs()
    mlp, calls = GatedMLP().bfloat16(), []
    want = sums_of_chunks(mlp, [mlp.up.weight, mlp.down.weight], x, grad)

    def fn(part: Tensor) -> Tensor:
        if not calls:
            calls.append("registered")
            mlp.up.weight.register_hook(lambda g: calls.append("hook"))
            mlp.up.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
        mlp.gate.weight.requires_grad_(False)
        return mlp(part)

    memory.tiled(fn, x, chunk=CHUNK).backward(grad)
    assert mlp.gate.weight.grad is None and not mlp.gate.weight.requires_grad
    assert calls == ["registered", "hook", "accumulated"]
    assert_rounded_once([mlp.up.weight.grad, mlp.down.weight.grad], want)


def _sharded(rank_inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradients of an MLP whose weights FSDP2 shards and frees after the forward pass."""
    x, grad = rank_inputs
    torch.manual_seed(1)
    model = nn.Sequential(GatedMLP(), GatedMLP()).bfloat16()
    memory.tile_mlps(model, CHUNK)
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    model(x).backward(grad)
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.processes
def test_weights_that_fsdp2_shards() -> None:
    x, grad = inputs()
    torch.manual_seed(1)
    model = nn.Sequential(GatedMLP(), GatedMLP()).bfloat16()
    want = sums_of_chunks(model, list(model.parameters()), x, grad)
    for got in run_processes(_sharded, 2, (x.detach(), grad)):
        assert_rounded_once(got, want)
