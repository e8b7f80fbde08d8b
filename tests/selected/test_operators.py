"""The operators of selected keys as compiled code calls them: results, gradients, and the shapes that a compiler is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan._engine.ops import specs
from longspan._engine.selected_mesh_ops import attend_selected_shards, attend_selected_shards_backward
from longspan._engine.selected_ops import attend_selected, attend_selected_backward
from longspan._masks.tracing import trace
from longspan.testing import oracle, virtual_world

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, V_DIM = 2, 6, 3, 70, 45, 16, 8
BLOCK, ROW = 16, 32  # keys per entry, queries per row


def leaves(dtype: torch.dtype = torch.float64, kv_len: int = KV_LEN) -> list[Tensor]:
    """q, k, v, sink and a bias per head."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((BATCH, HEADS, Q_LEN, DIM), (BATCH, KV_HEADS, kv_len, DIM), (BATCH, KV_HEADS, kv_len, V_DIM), (HEADS,), (HEADS,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def choice(batch: int, choices: int) -> Tensor:
    indices = torch.randint(-1, -(-KV_LEN // BLOCK), (batch, choices, -(-Q_LEN // ROW), 2), generator=torch.Generator().manual_seed(batch))
    return indices.int()


def with_bias(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: s + bias[h] * (q - kv) * 0.01


def results(outputs: tuple[Tensor, Tensor], inputs: list[Tensor], used: str) -> list[Tensor]:
    out, lse = outputs
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    losses = {"out": out.sin().sum().double(), "lse": lse.cos().sum().double()}
    grads = torch.autograd.grad(sum(losses[name] for name in used.split()), inputs, allow_unused=True)
    return [out, lse, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))]


@pytest.mark.parametrize(
    ("kernel", "batch", "choices", "used", "score", "sink"),
    [
        ("cpu", 1, 1, "out lse", True, True),
        ("cpu", 2, 1, "out", False, True),
        ("cpu", 1, KV_HEADS, "lse", True, False),
        ("cpu", 2, HEADS, "out lse", False, False),
        ("triton", 1, KV_HEADS, "lse", True, True),
    ],
)
def test_results_and_gradients_are_those_of_dense_attention(
    kernel: str, batch: int, choices: int, used: str, score: bool, sink: bool
) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
    dtype = torch.float32 if kernel == "triton" else torch.float64
    *inputs, bias = leaves(dtype)
    q, k, v, sinks = inputs
    keep = torch.arange(KV_LEN) % 5 != 0
    rest = ls.mask_mod(lambda b, h, q, kv: keep[kv] & (q + 3 * h >= kv))
    mod = trace(with_bias(bias), "score", score_dtype=dtype) if score else None
    spec = specs.of(rest.traced.program, None if mod is None else mod.program, kernel)
    captured = [] if mod is None else list(mod.sources)
    indices = choice(batch, choices)
    given = sinks if sink else None
    outputs = attend_selected(q, k, v, given, indices, list(rest.traced.sources), captured, spec.handle, 0.3, BLOCK, ROW, HEADS // choices)
    want = oracle(
        q, k, v, mask=ls.selected(indices, BLOCK, ROW) & rest, score_mod=with_bias(bias) if score else None, scale=0.3, sink=given,
        return_lse=True,
    )  # fmt: skip
    differentiable = [q, k, v, *([sinks] if sink else []), *([bias] if score else [])]
    close = 1e-10 if dtype == torch.float64 else 1e-4
    for got, right in zip(results(outputs, differentiable, used), results(want, differentiable, used), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), right.double(), atol=close, rtol=close)


def forms(tensors: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


@pytest.mark.parametrize("sink", [False, True])
def test_a_compiler_is_told_the_shapes_of_results_and_gradients(sink: bool) -> None:
    q, k, v, sinks, bias = (t.detach().bfloat16() for t in leaves())
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    mod = trace(with_bias(bias), "score")
    spec = specs.of(None, mod.program, "cpu")
    numbers = (spec.handle, 0.3, BLOCK, ROW, HEADS)
    tensors = (q, k, v, sinks if sink else None, choice(1, 1))
    made = attend_selected(*tensors, [], [bias], *numbers)
    backward = (torch.ones_like(made[0]), torch.ones_like(made[1]), *tensors[:4], *made, tensors[4], [], [bias])
    grads = attend_selected_backward(*backward, [True], *numbers)
    assert len(grads) == 4 + sink
    with FakeTensorMode() as mode:
        fake = lambda x: x if x is None else [mode.from_tensor(t) for t in x] if isinstance(x, list) else mode.from_tensor(x)
        assert forms(attend_selected(*map(fake, tensors), [], fake([bias]), *numbers)) == forms(made)
        assert forms(attend_selected_backward(*map(fake, backward), [True], *numbers)) == forms(grads)
        assert len(attend_selected_backward(*map(fake, backward), [False], *numbers)) == 3 + sink


@pytest.mark.parametrize("sink", [False, True])
def test_a_compiler_is_told_the_shapes_over_a_mesh(sink: bool) -> None:
    q, k, v, sinks, bias = (t.detach().bfloat16() for t in leaves(kv_len=Q_LEN))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    virtual_world(1).run(lambda mesh: compare_over_mesh(mesh, [q, k, v, sinks if sink else None], bias))


def compare_over_mesh(mesh: ls.Mesh, inputs: list[Tensor | None], bias: Tensor) -> None:
    plan = ls.plan(ls.causal(), Q_LEN, mesh)
    token, indices = plan.token, choice(1, 1)
    mod = trace(with_bias(bias), "score")
    spec = specs.of(None, mod.program, "cpu")
    tensors = (*inputs, indices)
    options = (spec.handle, 0.3, BLOCK, ROW)
    out, lse, numbers = attend_selected_shards(*tensors, [bias], token, *options)
    backward = (torch.ones_like(out), torch.ones_like(lse), *tensors[:4], out, lse, numbers, indices, [bias])
    grads = attend_selected_shards_backward(*backward, [True], token, *options)
    assert len(grads) == len(backward[2:6]) + 1 - (inputs[3] is None)
    with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()) as mode:
        fake = lambda x: x if x is None else [mode.from_tensor(t) for t in x] if isinstance(x, list) else mode.from_tensor(x)
        *told, told_numbers = attend_selected_shards(*map(fake, tensors), fake([bias]), fake(token), *options)
        assert forms(told) == forms((out, lse)) and told_numbers.ndim == 1
        assert (told_numbers.dtype, told_numbers.device) == (numbers.dtype, numbers.device)
        assert forms(attend_selected_shards_backward(*map(fake, backward), [True], fake(token), *options)) == forms(grads)
