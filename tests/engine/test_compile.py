"""The operator under torch.compile, activation checkpointing, fake tensors, and the transforms it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import longspan as ls


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


class Model(nn.Module):
    """Captures parameters, a buffer computed from a parameter, an argument and a Python number; masks made inside and outside."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(heads))
        self.table = nn.Parameter(torch.randn(64))
        self.cap = 5.0
        self.window = ls.sliding_window(9)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        half = q.shape[2] // 2

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            capped = self.cap * torch.tanh(score / self.cap)
            return capped + self.bias[h] + torch.where(i < half, 0.0, 1.0) + self.table.exp()[(i - j).abs()]

        mask = ls.causal() & ls.documents(ids=ids) & self.window
        return ls.attention(q, k, v, mask=mask, score_mod=score_mod, return_lse=True)


def qkv(q_len: int, kv_len: int | None = None, heads: int = 4, groups: int = 2, dim: int = 8) -> list[Tensor]:
    n = q_len if kv_len is None else kv_len
    return [torch.randn(3, h, s, dim, requires_grad=True) for h, s in ((heads, q_len), (groups, n), (groups, n))]


def grads(fn: Callable[..., Any], tensors: list[Tensor], *args: Any) -> list[Tensor]:
    out, lse = fn(*tensors[:3], *args)
    return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), tensors)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_equals_the_eager_one_over_several_lengths(backend: str) -> None:
    model = Model(heads=4)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (16, 23, 31):
        ids = (torch.arange(length) // 5).expand(3, -1).contiguous()
        tensors = [*qkv(length), model.bias, model.table]
        for want, got in zip(grads(model, tensors, ids), grads(compiled, tensors, ids), strict=True):
            torch.testing.assert_close(got, want)


def test_new_lengths_and_new_documents_compile_at_most_twice() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(
        lambda q, k, v, ids: ls.attention(q, k, v, mask=ls.causal() & ls.documents(ids=ids)), fullgraph=True, backend=counter
    )
    for length in range(20, 32):
        ids = torch.randint(0, 3, (length,)).sort().values
        q, k, v = qkv(length)
        torch.testing.assert_close(fn(q, k, v, ids), ls.attention(q, k, v, mask=ls.causal() & ls.documents(ids=ids)))
    assert counter.frame_count <= 2


def test_one_tensor_as_query_key_and_value_compiles() -> None:
    x = torch.randn(2, 4, 16, 8, requires_grad=True)
    fn = lambda x: ls.attention(x, x, x, mask=ls.causal(), score_mod=lambda s, b, h, q, kv: s + x[0, 0, q, 0])
    torch.testing.assert_close(torch.compile(fn, fullgraph=True, backend="aot_eager")(x), fn(x))


def test_sinks_peaks_and_torchs_signatures_compile() -> None:
    q, k, v = qkv(16, 19, groups=4)
    sink = torch.randn(4, requires_grad=True)
    request = torch.nn.attention.flex_attention.AuxRequest(lse=True, max_scores=True)
    calls = [
        lambda: ls.attention(q, k, v, mask=ls.sliding_window(7, 2), sink=sink),
        lambda: ls.attention(q, k, v, mask=ls.causal(), sink=sink, kernel="dense"),
        lambda: ls.attention(q, k, v),
        lambda: ls.flex_attention(q, k, v, return_aux=request)[1].max_scores,
        lambda: ls.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(16, 19).tril().bool()),
    ]
    for call in calls:
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(), call())


def test_full_and_selective_checkpointing_give_the_same_gradients() -> None:
    model = Model(heads=4)
    ids = (torch.arange(16) // 5).expand(3, -1).contiguous()
    tensors = [*qkv(16), model.bias, model.table]
    want = grads(model, tensors, ids)
    counts = []
    for policy in (None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        calls = 0

        def decide(ctx: Any, op: Any, *args: Any, policy: Any = policy, **kwargs: Any) -> Any:
            nonlocal calls
            calls += op is torch.ops.longspan.attend.default
            return policy if op is torch.ops.longspan.attend.default else CheckpointPolicy.PREFER_RECOMPUTE

        extra = {} if policy is None else {"context_fn": lambda decide=decide: create_selective_checkpoint_contexts(decide)}
        fn = lambda *a, extra=extra: checkpoint(model, *a, use_reentrant=False, **extra)
        for a, b in zip(grads(fn, tensors, ids), want, strict=True):
            torch.testing.assert_close(a, b)
        counts.append(calls)
    assert counts[1] > 0, "the operator is visible to selective checkpointing policies"


def test_fake_tensors_get_the_shapes_strides_and_dtypes_of_real_ones() -> None:
    real = [t.transpose(1, 2) for t in (torch.randn(2, 16, 4, 8), torch.randn(2, 19, 2, 8), torch.randn(2, 19, 2, 5))]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in real]
        got = ls.attention(*fake, mask=ls.causal(), return_lse=True)
    for a, b in zip(got, ls.attention(*real, mask=ls.causal(), return_lse=True), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_the_operators_pass_torchs_own_opcheck() -> None:
    from longspan.engine import ops
    from longspan.engine.spec import Spec
    from longspan.masks.tracing import trace

    bias = torch.randn(4, requires_grad=True)
    spec = Spec(mask=trace(ls.causal(), "mask").program, score=trace(lambda s, b, h, q, kv: s + bias[h], "score").program, kernel="cpu")
    ops.specs.pin(spec)
    assert spec.joint is not None
    q, k, v = qkv(16, 19)
    args = (q, k, v, torch.randn(4, requires_grad=True), [], [bias], None, spec.handle, 0.3, True)
    torch.library.opcheck(
        ops.attend, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    )


def test_what_cannot_be_right_is_refused() -> None:
    q, k, v = qkv(12)
    fn = lambda q: ls.attention(q, k, v, mask=ls.causal())
    dense = lambda q: ls.attention(q, k, v, mask=ls.causal(), kernel="dense")
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(torch.autograd.grad(fn(q).sin().sum(), q, create_graph=True)[0].sum(), q)
    for transform in (
        lambda f: torch.func.grad(lambda q: f(q).sum())(q),
        lambda f: torch.vmap(f)(q[None]),
        lambda f: torch.func.jvp(f, (q,), (torch.ones_like(q),)),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.func.*kernel='dense'"):
            transform(fn)
        transform(dense)
    assert torch.autograd.gradgradcheck(
        lambda x: ls.attention(x, x, x, mask=ls.causal(), kernel="dense"), torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    )
