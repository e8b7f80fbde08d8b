"""`memory.tiled`: gradients, random numbers and memory of its chunks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.integrations import _tiles, memory
from longspan.integrations._tiles import RandomStates


def grads_of(y: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), tensors, **options)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 3)).double()


def nodes_of(y: Tensor) -> int:
    seen, nodes = set(), [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return len(seen)


def test_a_tiled_module_is_one_node_whatever_the_number_of_chunks() -> None:
    x = torch.randn(2, 50, 5, dtype=torch.float64, requires_grad=True)
    assert nodes_of(memory.tiled(mlp(), x, chunk=25)) == nodes_of(memory.tiled(mlp(), x, chunk=3)) < 9


@pytest.mark.parametrize("dim", [1, -2])
def test_gradients_of_x_and_parameters_equal_those_of_one_call(dim: int) -> None:
    module, x = mlp(), torch.randn(2, 11, 5, dtype=torch.float64, requires_grad=True)
    want = grads_of(module(x), x, *module.parameters())
    y = memory.tiled(module, x, chunk=4, dim=dim)
    got = grads_of(y, x, *module.parameters(), retain_graph=True)
    copies = [g.clone() for g in got]
    again = grads_of(2 * y, x, *module.parameters())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(again, tuple(4 * w for w in want))
    assert all(map(torch.equal, got, copies))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="needs a torch with Tensor.grad_dtype")
def test_gradients_of_parameters_have_the_parameters_dtype() -> None:
    x, weight = torch.randn(1, 20, 6).bfloat16().requires_grad_(), nn.Parameter(torch.randn(6, 6).bfloat16())
    weight.grad_dtype = None  # type: ignore[attr-defined]  # any dtype: autograd does not cast
    memory.tiled(lambda t: nn.functional.linear(t, weight), x, chunk=6, dim=1).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_gradients_of_gradients_pass_through_a_tiled_module() -> None:
    module, x = mlp(), torch.randn(1, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: memory.tiled(module, x, chunk=2), x)
    assert torch.autograd.gradcheck(lambda x: memory.tiled(module, x, chunk=2), x, check_batched_grad=True)


def test_frozen_parameters_get_no_gradient_and_others_do() -> None:
    module, x = mlp(), torch.randn(1, 9, 5, dtype=torch.float64, requires_grad=True)
    module[0].requires_grad_(False)  # type: ignore[index]
    memory.tiled(module, x, chunk=2).square().sum().backward()
    got = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x.detach()).square().sum().backward()
    assert got[0] is None and got[1] is None
    torch.testing.assert_close(got[2:], [p.grad for p in list(module.parameters())[2:]])


def test_captured_tensors_and_parameters_of_custom_functions_get_gradients() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum((0, 1))

    x, leaf = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 9, 5), (5,)))
    parameter = nn.Parameter(torch.randn(5, dtype=torch.float64))
    inner = leaf.exp()
    for fn in (lambda x: x * leaf, lambda x: x * inner, lambda x: Scaled.apply(x, parameter).sin() * leaf):
        tensors = x, leaf, parameter
        want = grads_of(fn(x), *tensors, retain_graph=True, allow_unused=True)
        torch.testing.assert_close(grads_of(memory.tiled(fn, x, chunk=4), *tensors, retain_graph=True, allow_unused=True), want)


class Experts(nn.Module):
    """Each token goes to one of three experts, by its first element; experts without tokens are not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = x[..., 0].detach().long(), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (chosen == i).any():
                y = y.index_put((chosen == i,), expert(x[chosen == i]))
        return y


def test_parameters_that_only_later_chunks_use_get_gradients() -> None:
    module, x = Experts(), torch.randn(2, 13, 5, dtype=torch.float64)
    x[:, :, 0] = torch.tensor([0.0] * 4 + [1.0] * 3 + [0.0, 2.0] * 3)
    x.requires_grad_()
    want = grads_of(module(x), x, *module.parameters())
    got = grads_of(memory.tiled(module, x, chunk=4), x, *module.parameters())
    torch.testing.assert_close(got, want)


def test_a_captured_tensor_that_only_a_later_chunk_uses_raises() -> None:
    captured, x = torch.randn(5, requires_grad=True), torch.randn(1, 9, 5).abs()
    x[0, :4] *= -1
    y = memory.tiled(lambda x: x * captured if x[0, 0, 0] > 0 else x.sin(), x.requires_grad_(), chunk=4)
    with pytest.raises(RuntimeError, match="chunk 1 needs a gradient of a tensor that is no parameter"):
        y.sum().backward()


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("fn", [lambda y: y.mean(1, keepdim=True), lambda y: y[:, ::2], lambda y: y.sum()], ids=["mean", "half", "sum"])
def test_another_number_of_tokens_raises(fn: Any, differentiable: bool) -> None:
    x = torch.randn(2, 7, 5, requires_grad=differentiable)
    with pytest.raises(ValueError, match="expected a tensor of 3 dims with 3 tokens in dim -2"):
        memory.tiled(fn, x, chunk=3)


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_result_without_the_dims_of_x_raises(differentiable: bool) -> None:
    x = torch.randn(2, 4, 5, requires_grad=differentiable)  # as many batch rows as tokens of a chunk
    for fn, got in ((lambda t: t.sum(-1), r"shape \(2, 2\)"), (lambda t: (t, t), "tuple")):
        with pytest.raises(ValueError, match=f"got {got}"):
            memory.tiled(fn, x, chunk=2)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(
    ("later", "got"),
    [
        (lambda y: y[..., :1], r"torch.float64 and \(2, 3, 1\)"),
        (lambda y: y[:1], r"torch.float64 and \(1, 3, 5\)"),
        (lambda y: y.float(), r"torch.float32 and \(2, 3, 5\)"),
    ],
    ids=["last dim", "batch", "dtype"],
)
def test_a_later_chunk_with_another_dtype_or_other_dims_raises(later: Any, got: str, differentiable: bool) -> None:
    x = torch.randn(2, 7, 5, dtype=torch.float64).abs()
    x[:, 3:] *= -1
    x.requires_grad_(differentiable)
    with pytest.raises(ValueError, match=rf"the first chunk's result for every chunk: torch.float64 and \(2, 3, 5\), got {got}"):
        memory.tiled(lambda t: later(t.sin()) if t[0, 0, 0] < 0 else t.sin(), x, chunk=3)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_tokens_may_lie_in_any_dim(dim: int) -> None:
    x = torch.randn(4, 7, 5, dtype=torch.float64, requires_grad=True)
    y = memory.tiled(torch.sin, x, chunk=3, dim=dim)
    torch.testing.assert_close((y, *grads_of(y, x)), (x.sin(), *grads_of(x.sin(), x)))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such dim": ({"dim": 3}, ValueError, r"expected a tensor x with a dim 3, got shape \(2, 4, 5\)"),
    "no such dim from the end": ({"dim": -4}, ValueError, r"expected a tensor x with a dim -4, got shape \(2, 4, 5\)"),
    "no tensor": ({"x": [1.0]}, ValueError, "expected a tensor x with a dim -2, got list"),
    "dim of a float": ({"dim": 1.0}, TypeError, "expected an integer dim, got 1.0, a float"),
    "chunk of a float": ({"chunk": 2.5}, TypeError, "chunk: expected an integer, got float"),
    "chunk of a bool": ({"chunk": True}, ValueError, "chunk: expected an integer >= 1, got True"),
    "no chunk": ({"chunk": 0}, ValueError, "chunk: expected an integer >= 1, got 0"),
}


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_chunks_and_dims_raise(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(2, 4, 5), "chunk": 2} | changed
    with pytest.raises(error, match=f"memory.tiled: {message}"):
        memory.tiled(torch.sin, **arguments)


def test_results_of_tiled_functions_may_be_modified_in_place() -> None:
    module, x = mlp(), torch.randn(2, 11, 5, dtype=torch.float64, requires_grad=True)
    want = grads_of(module(x) * 3, x)
    torch.testing.assert_close(grads_of(memory.tiled(module, x, chunk=4).mul_(3), x), want)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight"])
def test_a_parameter_that_was_modified_before_the_backward_pass_raises(name: str, create_graph: bool) -> None:
    module, x = mlp(), torch.randn(1, 9, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        module.get_parameter(name).mul_(2)  # before the forward pass
    y = memory.tiled(module, x, chunk=4)
    grads_of(y, x, retain_graph=True)
    with torch.no_grad():
        module.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match=r"a parameter of shape .* was modified in place between the forward and the backward"):
        grads_of(y, x, create_graph=create_graph)


def test_other_parameters_in_the_recomputation_raise() -> None:
    weights = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    use = [0]
    x = torch.randn(1, 9, 5, requires_grad=True)
    y = memory.tiled(lambda x: x * weights[use[0]], x, chunk=4)
    use[0] = 1
    with pytest.raises(RuntimeError, match="expected the parameters of the forward pass in the recomputation, got others"):
        y.sum().backward()


def test_a_recomputed_layer_computes_its_last_tiled_function_once_more_only() -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return x.sin()

    x = torch.randn(1, 12, 5, requires_grad=True)
    y = memory.checkpoint(lambda x: x + memory.tiled(fn, x.cos(), chunk=4), x)
    y.sum().backward()
    assert len(calls) == 2 * 3
    torch.testing.assert_close(x.grad, 1 - x.detach().cos().cos() * x.detach().sin())


@pytest.mark.parametrize("probability", [0.0, 0.4])
@pytest.mark.parametrize("again", [False, True])
def test_recomputed_chunks_draw_the_numbers_of_their_forward_pass(probability: float, again: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, probability).sin()

    x = torch.randn(1, 50, 3, requires_grad=True)
    torch.manual_seed(3)
    want = torch.autograd.grad(torch.cat([fn(p) for p in x.split(16, 1)], 1).square().sum(), x)[0]
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    y = memory.tiled(fn, x, chunk=16)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    got = [torch.autograd.grad(y.square().sum(), x, retain_graph=again)[0] for _ in range(1 + again)]
    assert all(torch.equal(g, want) for g in got)
    assert torch.equal(torch.get_rng_state(), before)


def test_chunks_that_draw_no_numbers_share_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RandomStates] = []

    class Noted(RandomStates):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(_tiles, "RandomStates", Noted)
    x = torch.randn(1, 50, 3, requires_grad=True)
    memory.tiled(torch.sin, x, chunk=16)
    memory.tiled(lambda x: nn.functional.dropout(x, 0.5), x, chunk=16)
    assert [len(m.states) for m in made] == [1, 5]


def test_nothing_of_a_tiled_function_lives_longer_than_its_result() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def fn(x: Tensor) -> Tensor:
        y = x.exp()  # its node saves its result
        seen.extend((weakref.ref(x), weakref.ref(y)))
        return y.rsqrt()

    x = torch.randn(1, 12, 5, requires_grad=True)
    y = memory.tiled(fn, x, chunk=4)
    assert not any(ref() is not None for ref in seen)
    y.sum().backward()
    assert len(seen) == 12 and not any(ref() is not None for ref in seen)


@pytest.mark.parametrize("chunk", [16, 50])
@pytest.mark.parametrize("how", ["one node", "one node, differentiable", "checkpoints"])
def test_any_recomputation_draws_the_numbers_of_the_forward_pass(how: str, chunk: int) -> None:
    captured = torch.full((3,), 2.0, requires_grad=how == "checkpoints")  # a tensor that is no parameter

    def fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(x * captured, 0.4).sin()

    x = torch.randn(1, 50, 3, requires_grad=True)
    torch.manual_seed(3)
    want = grads_of(torch.cat([fn(p) for p in x.split(chunk, 1)], 1), x)[0]
    torch.manual_seed(3)
    y = memory.tiled(fn, x, chunk=chunk)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert torch.equal(grads_of(y, x, create_graph="differentiable" in how)[0], want)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_result_without_a_graph_needs_no_gradient() -> None:
    x = torch.randn(1, 9, 5, requires_grad=True)
    y = memory.tiled(lambda x: x.detach().sin(), x, chunk=4)
    assert not y.requires_grad and torch.equal(y, x.detach().sin())


@pytest.mark.parametrize("create_graph", [False, True])
def test_parameters_whose_gradients_are_cut_off_get_none(create_graph: bool) -> None:
    x, weight = torch.randn(1, 9, 5, dtype=torch.float64, requires_grad=True), nn.Parameter(torch.randn(5, dtype=torch.float64))
    y = memory.tiled(lambda x: x.sin() * weight.detach(), x, chunk=4)
    dx, none = grads_of(y, x, weight, allow_unused=True, create_graph=create_graph)
    torch.testing.assert_close(dx, *grads_of(x.sin() * weight.detach(), x))
    assert none is None


def test_checkpoints_of_chunks_leave_random_states_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state for every chunk would be 5 kB each."""
    options: list[Any] = []
    checkpoint = _tiles.checkpoint
    monkeypatch.setattr(_tiles, "checkpoint", lambda *args, **given: options.append(given) or checkpoint(*args, **given))
    captured, x = torch.randn(5, requires_grad=True), torch.randn(1, 9, 5, requires_grad=True)
    memory.tiled(lambda x: x * captured, x, chunk=4).sum().backward()
    assert len(options) == 3 and all((o["preserve_rng_state"], o["use_reentrant"]) == (False, False) for o in options)
