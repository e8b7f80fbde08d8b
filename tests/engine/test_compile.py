"""The operator under torch.compile, activation checkpointing and fake tensors; unsupported transforms raise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.autograd_functions import StraightThrough
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import longspan as ls
from longspan.testing import virtual_world


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


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, h: Tensor) -> Tensor:
        return self.weight[h].sin()


def of_tensor(slopes: Tensor) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    return score_mod


def of_module(table: Table) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + table(h) * table.weight[h]


def of_another_mod(inner: Callable[..., Tensor], cap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: cap * torch.tanh(inner(score, b, h, i, j) / cap)


def same_document(ids: Tensor) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ids[i] == ids[j]

    return mask_mod


SLOPES, PARAMETER, TABLE = torch.randn(4, requires_grad=True), nn.Parameter(torch.randn(4)), Table()
FACTORIES = {
    "tensor": (of_tensor(SLOPES), SLOPES),
    "parameter": (of_tensor(PARAMETER), PARAMETER),
    "module": (of_module(TABLE), TABLE.weight),
    "another mod": (of_another_mod(of_tensor(SLOPES), 3.0), SLOPES),
}
WAYS = {
    "attention": lambda mod: lambda q, k, v: ls.attention(q, k, v, score_mod=mod),
    "flex_attention": lambda mod: lambda q, k, v: ls.flex_attention(q, k, v, score_mod=mod, enable_gqa=True),
    "with a mask": lambda mod: lambda q, k, v: ls.attention(q, k, v, score_mod=mod, mask=same_document(torch.arange(16) // 5)),
    "with a plan": lambda mod: lambda q, k, v: ls.attention(q, k, v, score_mod=mod, plan=PLAN),
}
PLAN = ls.plan(ls.causal(), 16, ls.Mesh.abstract(1))


PAIRS = [(f, w) for (i, f), (j, w) in itertools.product(enumerate(FACTORIES), enumerate(WAYS)) if (i + j) % 2 == 0]


@pytest.mark.parametrize(("factory", "way"), PAIRS)
def test_a_score_mod_made_outside_by_a_factory_compiles_and_gives_its_tensor_a_gradient(factory: str, way: str) -> None:
    mod, captured = FACTORIES[factory]
    compare_with_compiled(WAYS[way](mod), [*qkv(16), captured], "aot_eager")


@pytest.mark.parametrize("way", ["flex_attention", "with a plan"])
def test_a_score_mod_made_outside_compiles_with_inductor(way: str) -> None:
    mod, captured = FACTORIES["parameter"]
    compare_with_compiled(WAYS[way](mod), [*qkv(16), captured], "inductor")


def test_the_operators_themselves_compile_with_mods_made_outside() -> None:
    mod, captured = FACTORIES["tensor"]
    mask = same_document(torch.arange(16) // 5)
    tensors = [*qkv(16, groups=4), captured]
    block_mask = torch.nn.attention.flex_attention.create_block_mask(mask, None, None, 16, 16, device="cpu")
    for fn, settings in (
        (ls.attention, {"score_mod": mod}),
        (ls.attention, {"mask": mask}),
        (ls.attention, {"mask": mask, "score_mod": mod}),
        (ls.attention, {"score_mod": mod, "plan": PLAN}),
        (ls.flex_attention, {"score_mod": mod}),
        (ls.flex_attention, {"score_mod": mod, "block_mask": block_mask}),
    ):
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        got, want = (f(*tensors[:3], **settings) for f in (compiled, fn))
        torch.testing.assert_close(got, want)
        leaves = tensors if "score_mod" in settings else tensors[:3]
        for a, b in zip(torch.autograd.grad(got.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves), strict=True):
            torch.testing.assert_close(a, b)


def test_a_mod_made_outside_compiles_on_a_rank_of_a_mesh() -> None:
    mod, captured = FACTORIES["parameter"]

    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal() & ls.documents(lengths=[7, 9]), 16, mesh)
        compare_with_compiled(lambda q, k, v: ls.attention(q, k, v, score_mod=mod, plan=plan), [*qkv(16), captured], "aot_eager")

    virtual_world(1).run(rank)


def compare_with_compiled(fn: Callable[..., Tensor], tensors: list[Tensor], backend: str) -> None:
    got, want = (f(*tensors[:3]) for f in (torch.compile(fn, fullgraph=True, backend=backend), fn))
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.sin().sum(), tensors), torch.autograd.grad(want.sin().sum(), tensors), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_of_one_projection_compile_and_are_not_copied(dynamic: bool) -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).view(2, x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return ls.attention(q, k, v, mask=ls.causal(), sink=weight[0, :4])

    x, weight = torch.randn(2, 9, 16), torch.randn(16, 96, requires_grad=True)
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    got = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic)(x, weight)
    want = model(x, weight)
    torch.testing.assert_close(got, want)
    a, b = (torch.autograd.grad(t.sin().sum(), weight)[0] for t in (got, want))
    torch.testing.assert_close(a, b)
    assert torch.ops.aten.clone.default not in [node.target for node in graphs[0].graph.nodes]


def test_sinks_max_scores_and_torchs_signatures_compile() -> None:
    q, k, v = qkv(16, 19, groups=4)
    sink = torch.randn(4, requires_grad=True)
    bias = causal_lower_right(16, 19)
    request = torch.nn.attention.flex_attention.AuxRequest(lse=True, max_scores=True)
    calls = [
        lambda: ls.attention(q, k, v, mask=ls.sliding_window(7, 2), sink=sink),
        lambda: ls.attention(q, k, v, mask=ls.causal(), sink=sink, kernel="dense"),
        lambda: ls.attention(q, k, v),
        lambda: ls.flex_attention(q, k, v, return_aux=request)[1].max_scores,
        lambda: ls.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64}),
        lambda: ls.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(16, 19).tril().bool()),
        lambda: ls.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        lambda: ls.scaled_dot_product_attention(q[:, None], k[:1, None], v[0]),
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
    from longspan._engine import ops
    from longspan._engine.spec import Spec
    from longspan._masks.tracing import trace

    bias = torch.randn(4, requires_grad=True)
    spec = Spec(mask=trace(ls.causal(), "mask").program, score=trace(lambda s, b, h, q, kv: s + bias[h], "score").program, kernel="cpu")
    ops.specs.pin(spec)
    assert spec.joint([bias]) is not None
    q, k, v = qkv(16, 19)
    args = (q, k, v, torch.randn(4, requires_grad=True), [], [bias], None, spec.handle, 0.3, True)
    torch.library.opcheck(
        ops.attend, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    )


def test_unsupported_transforms_raise() -> None:
    q, k, v = qkv(12)
    fn = lambda q: ls.attention(q, k, v, mask=ls.causal())
    dense = lambda q: ls.attention(q, k, v, mask=ls.causal(), kernel="dense")
    with pytest.raises(RuntimeError, match="supports one differentiation"):
        torch.autograd.grad(torch.autograd.grad(fn(q).sin().sum(), q, create_graph=True)[0].sum(), q)
    for transform in (
        lambda f: torch.func.grad(lambda q: f(q).sum())(q),
        lambda f: torch.vmap(f)(q[None]),
        lambda f: torch.func.jvp(f, (q,), (torch.ones_like(q),)),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.func.*kernel='dense'"):
            transform(fn)
        transform(dense)
    for refused in (
        lambda: torch.autograd.grad(fn(q), q, torch.randn(5, *q.shape), is_grads_batched=True),
        lambda: torch.autograd.grad(ls.attention(q, k, v, return_lse=True)[1], q, torch.randn(5, *q.shape[:3]), is_grads_batched=True),
        lambda: torch.autograd.functional.jacobian(fn, q, vectorize=True),
    ):
        with pytest.raises(
            RuntimeError, match=r"not support batched gradients.*is_grads_batched=True.*call torch\.autograd\.grad once per gradient"
        ):
            refused()
    several = torch.randn(5, *q.shape)
    (got,) = torch.autograd.grad(dense(q), q, several, is_grads_batched=True)
    torch.testing.assert_close(got, torch.stack([torch.autograd.grad(fn(q), q, one)[0] for one in several]))
    with pytest.raises(Exception) as compiled:  # torch 2.11, which tidies up after it, raises an error of its own
        torch.compile(lambda q: torch.vmap(fn)(q), fullgraph=True, backend="aot_eager")(q[None])
    assert any("not supported under torch.vmap" in str(error) for error in (compiled.value, compiled.value.__context__))
    assert torch.autograd.gradgradcheck(
        lambda x: ls.attention(x, x, x, mask=ls.causal(), kernel="dense"), torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    )


TABLE = torch.linspace(-1, 1, 128).view(2, 64)[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
HALF = TABLE[0].bfloat16()
DOUBLE = torch.where(torch.arange(64) % 2 == 0, 0.1 + 1e-10, 0.7 - 1e-10).double()
SMALL = (torch.arange(64) + 200).to(torch.uint8)
NUMBERS: dict[str, Any] = {  # a mod that reads a float c and an int n, which change from call to call
    "factor": lambda s, c, n, h, i, j: s * c,
    "soft cap": lambda s, c, n, h, i, j: c * torch.tanh(s / c),
    "compared": lambda s, c, n, h, i, j: torch.where(i - j < n, s, -1.0),
    "clamped": lambda s, c, n, h, i, j: s + TABLE[h, (i - j).clamp(0, n)],
    "clamped by less": lambda s, c, n, h, i, j: s + TABLE[h, (i - j).clamp(-5, n // 2).abs()],
    "as a float": lambda s, c, n, h, i, j: s * float(n) * 0.1,
    "logarithm": lambda s, c, n, h, i, j: s * math.log(n),
    "power": lambda s, c, n, h, i, j: s * n**-0.5,
    "smaller one": lambda s, c, n, h, i, j: s * min(n, 8),
    "rolled": lambda s, c, n, h, i, j: s + TABLE.roll(n)[h, j],
    "list": lambda s, c, n, h, i, j: s + TABLE[0, [1, n]].sum(),
    "literals": lambda s, c, n, h, i, j: s + TABLE[0, [1, 2]].sum(),
    "slope": lambda s, c, n, h, i, j: torch.nn.functional.leaky_relu(s, c),
    "half precision": lambda s, c, n, h, i, j: s + HALF[j] * c,
    "double precision": lambda s, c, n, h, i, j: torch.where(DOUBLE[j] < c, s, -1.0),
    "small integers": lambda s, c, n, h, i, j: s + (SMALL[j] + n) * 0.01,
    "both": lambda s, c, n, h, i, j: s + (i - j) * c / n,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every mod by a backend that calls the operator with values; a sixth of them (all with --whole-grid) in another dtype under
    AOTAutograd, which takes three times as long.
    """
    if "number_name" in metafunc.fixturenames:
        others = list(NUMBERS) if metafunc.config.getoption("--whole-grid") else list(NUMBERS)[::6]
        cases = [(name, torch.float64, "eager") for name in NUMBERS] + [(name, torch.float32, "aot_eager") for name in others]
        metafunc.parametrize(("number_name", "dtype", "backend"), cases, ids=str)


def test_numbers_that_a_mod_reads_may_change_between_calls(number_name: str, dtype: torch.dtype, backend: str) -> None:
    fn = NUMBERS[number_name]

    def attend(q: Tensor, k: Tensor, v: Tensor, c: float, n: int) -> Tensor:
        return ls.attention(q, k, v, mask=ls.causal(), score_mod=lambda s, b, h, i, j: fn(s, c, n, h, i, j).to(s.dtype))

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for c, n in ((0.7, 12), (0.1, 9), (0.1, 15)):  # n is a constant, becomes a symbol, and changes again; torch recompiles for each c
        q, k, v = (torch.randn(1, 2, 17, 4, dtype=dtype, requires_grad=True) for _ in range(3))
        got, right = compiled(q, k, v, c, n), attend(q, k, v, c, n)
        torch.testing.assert_close(got, right)
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, right)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_a_mask_may_read_a_float_that_changes() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, width: float) -> Tensor:
        return ls.attention(q, k, v, mask=lambda b, h, i, j: (i - j).abs() * 0.5 < width)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for width in (0.6, 1.6, 2.6):
        q, k, v = qkv(16, 16)
        torch.testing.assert_close(compiled(q, k, v, width), attend(q, k, v, width))


def _doubled_in_place(score: Tensor) -> Tensor:
    copy = score * 1
    copy.mul_(2)  # Dynamo's graph returns `copy`, which does not depend on the node of this call
    return copy


@pytest.mark.parametrize(
    ("fn", "message"), [(StraightThrough.apply, "autograd.Function"), (_doubled_in_place, r"mutates a tensor \(mul_\)")]
)
def test_score_mods_with_custom_gradients_or_mutations_are_rejected(fn: Callable[[Tensor], Tensor], message: str) -> None:
    q = torch.randn(1, 1, 5, 4, requires_grad=True)
    compiled = torch.compile(lambda q: ls.attention(q, q, q, score_mod=lambda s, b, h, i, j: fn(s)), fullgraph=True, backend="eager")
    with pytest.raises(ls.ProgramError, match=message):
        compiled(q)


def test_no_grad_in_a_score_mod_stops_the_gradient() -> None:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with torch.no_grad():
            factor = score.exp()
        return score * factor

    q, weights = torch.randn(1, 1, 5, 4, requires_grad=True), torch.randn(4)
    fn = lambda q: (ls.attention(q, q, q, score_mod=score_mod) * weights).sum()
    (want,) = torch.autograd.grad(fn(q), q)
    (got,) = torch.autograd.grad(torch.compile(fn, fullgraph=True, backend="aot_eager")(q), q)
    torch.testing.assert_close(got, want)


def test_a_mod_that_reads_a_captured_number_raises_in_a_compiled_call() -> None:
    window, q = torch.tensor(3), torch.randn(1, 1, 9, 16)
    compiled = torch.compile(lambda x: ls.attention(x, x, x, mask=lambda b, h, i, j: i - j < int(window)), backend="aot_eager")
    with pytest.raises(RuntimeError, match="a graph break in a mod"):
        compiled(q)


@pytest.mark.parametrize("call", [ls.attention, ls.flex_attention, ls.scaled_dot_product_attention])
def test_a_scale_that_changes_between_compiled_calls_is_traced_as_a_symbol(call: Any) -> None:
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    compiled = torch.compile(lambda scale: call(q, k, v, scale=scale), fullgraph=True, backend="eager")
    for scale in (0.3, 0.5, 0.7):
        torch.testing.assert_close(compiled(scale), call(q, k, v, scale=scale))
    for scale in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="scale: expected a finite number"):
            call(q, k, v, scale=scale)


def test_a_mask_that_sums_over_a_captured_tensor() -> None:
    """Such masks are evaluated by torch.vmap, also where compiled code calls the operator."""
    starts = torch.tensor([0, 9, 14, 22, 30, 35, 40], dtype=torch.int32)
    mask = ls.mask_mod(lambda b, h, q, kv: (starts[:, None] + q <= starts + kv).sum() > 6)
    q, k, v = (torch.randn(1, heads, 40, 8) for heads in (4, 2, 2))
    out = torch.compile(lambda q, k, v: ls.attention(q, k, v, mask=mask), fullgraph=True)(q, k, v)
    torch.testing.assert_close(out, ls.attention(q, k, v, mask=mask))


@pytest.mark.parametrize("mod", ["reduction", "nan_to_num"])
def test_score_mods_that_need_vmap_have_the_gradients_of_eager_calls(mod: str) -> None:
    table = torch.randn(40, 3)
    mods: dict[str, Any] = {
        "reduction": lambda s, b, h, q, kv: s * table[q].sum(),
        "nan_to_num": lambda s, b, h, q, kv: torch.nan_to_num(s),
    }
    q, k, v = (torch.randn(1, heads, 40, 8, requires_grad=True) for heads in (4, 2, 2))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ls.attention(q, k, v, score_mod=mods[mod]).square().sum()

    got, want = (torch.autograd.grad(f(q, k, v), [q, k, v]) for f in (torch.compile(loss, fullgraph=True), loss))
    torch.testing.assert_close(got, want)
