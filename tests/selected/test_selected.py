"""`longspan.selected`: keys chosen at run time."""

from __future__ import annotations

import pytest
import torch
from tests.selected.cases import check, draw

import longspan as ls
from longspan._engine import one_device
from longspan._engine.selected import SelectedCall
from longspan._engine.spec import Spec
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors
from longspan._kernels.cpu import CpuKernel
from longspan._kernels.protocol import Grads, State, Work
from longspan.testing import oracle


@pytest.mark.parametrize("seed", range(12))
def test_random_selections_match_the_oracle_on_cpu(seed: int) -> None:
    check(draw(seed), kernel="cpu")


def test_random_selections_match_the_oracle_by_the_dense_kernel() -> None:
    for seed in (100, 101, 102):
        check(draw(seed, longest=100), kernel="dense")


@pytest.mark.parametrize("seed", [4, 28, 104])  # chosen tiles; chosen keys with causal(), and for each query
def test_random_selections_match_the_oracle_by_the_triton_kernel(seed: int) -> None:
    pytest.importorskip("triton")
    check(draw(seed, longest=140 if seed < 100 else 40), kernel="triton")


@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_second_derivatives_raise(kernel: str) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
    q, k, v = (torch.randn(1, 1, 20, 16, requires_grad=True) for _ in range(3))
    mask = ls.selected(torch.tensor([[[[0, 1], [1, -1]]]]), 16) & ls.causal()
    out = ls.attention(q, k, v, mask=mask, kernel=kernel)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    for source in (q, k, v):
        with pytest.raises(RuntimeError, match="one differentiation, not two"):
            torch.autograd.grad((q * grad).sum(), source, retain_graph=True)


@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_first_gradients_may_be_modified_in_place_and_second_derivatives_still_raise(kernel: str) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
    inputs = [torch.randn(1, 20, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3)]  # their gradients have their strides
    mask = ls.selected(torch.tensor([[[[0, 1], [1, -1]]]]), 16) & ls.causal()
    out = ls.attention(*inputs, mask=mask, kernel=kernel)
    wanted = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    for grad, want in zip(grads, wanted, strict=True):
        assert torch.equal(grad.mul_(2), 2 * want)
    for grad in grads:
        with pytest.raises(RuntimeError, match="one differentiation, not two"):
            torch.autograd.grad(grad.sum(), inputs, retain_graph=True)


def test_thousands_of_random_selections(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--whole-grid"):
        pytest.skip("with --whole-grid only")
    for seed in range(2000):
        check(draw(seed), kernel="cpu")


def test_a_selection_is_a_mask_mod_for_torch() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    indices = torch.tensor([[[[0, -1], [1, 0], [2, 2]]]], dtype=torch.int32)
    block_mask = create_block_mask(ls.selected(indices, 64), None, None, 192, 192, device="cpu", BLOCK_SIZE=64)
    assert block_mask.to_dense().bool()[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_the_block_table_of_a_selection_is_exact() -> None:
    indices = torch.tensor([[[[0], [1]]], [[[-1], [0]]]])
    table = ls.selected(indices).block_table(256)
    assert table.to_dense()[:, 0].tolist() == [[[2, 0], [0, 2]], [[0, 0], [2, 0]]]


def tensors(q_len: int = 256, kv_len: int = 256) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(1, 4, q_len, 16), torch.randn(1, 2, kv_len, 16), torch.randn(1, 2, kv_len, 16)


@pytest.mark.parametrize("wrong", [2, -2, 2**32, -(2**32)])
def test_indices_outside_of_the_keys_raise(wrong: int) -> None:
    indices = torch.tensor([[[[0, 1], [0, wrong]]]])
    got = max(-2, min(wrong, 2**31 - 1))
    with pytest.raises(ValueError, match=f"expected indices from -1 to 1, blocks of 128 keys, got {got}"):
        ls.attention(*tensors(), mask=ls.selected(indices))


@pytest.mark.parametrize("wrong", [2, -2])
def test_indices_outside_of_the_keys_raise_in_compiled_calls(wrong: int) -> None:
    q, k, v = tensors()
    attend = torch.compile(lambda i: ls.attention(q, k, v, mask=ls.selected(i)), fullgraph=True, backend="eager")
    attend(torch.tensor([[[[0, 1], [-1, 1]]]]))
    with pytest.raises(RuntimeError, match="selected"):
        attend(torch.tensor([[[[0, 1], [0, wrong]]]]))


@pytest.mark.parametrize(
    ("indices", "options", "error", "message"),
    [
        ([[0]], {}, TypeError, "indices to be an integer tensor"),
        (torch.zeros(1, 1, 2, 1), {}, TypeError, "dtype int32 or int64, got torch.float32"),
        (torch.zeros(1, 2, 1, dtype=torch.int32), {}, ValueError, r"\[batch, choices, rows, k\], got shape"),
        (torch.zeros(1, 1, 2, 1, dtype=torch.int32), {"granularity": 32}, ValueError, "one of 128, 64, 16, 4, 1, got 32"),
        (torch.zeros(1, 1, 2, 1, dtype=torch.int32), {"q_granularity": 3}, ValueError, "a power of two, got 3"),
        (torch.zeros(1, 1, 2, 1, dtype=torch.int32), {"counts": torch.zeros(2, dtype=torch.int32)}, ValueError, "counts"),
    ],
)
def test_unusable_arguments_raise(indices: object, options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ls.selected(indices, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 3, 2, 1), "expected 1, KV heads or query heads"), ((1, 1, 3, 1), "expected 2 rows for 256 queries"), ((2, 1, 2, 1), "batch=2")],
)
def test_selections_for_other_sizes_raise(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.attention(*tensors(), mask=ls.selected(torch.zeros(shape, dtype=torch.int32)))


def test_counts_hide_later_entries() -> None:
    q, k, v = tensors()
    indices, counts = torch.tensor([[[[0, 1], [0, 1]]]]), torch.tensor([[[1, 2]]])
    expected = ls.attention(q, k, v, mask=ls.selected(torch.tensor([[[[0, -1], [0, 1]]]])))
    assert torch.equal(ls.attention(q, k, v, mask=ls.selected(indices, counts=counts)), expected)


def test_a_new_choice_in_the_same_tensor_is_seen() -> None:
    q, k, v = tensors()
    indices = torch.tensor([[[[0], [0]]]], dtype=torch.int32)
    for choice in (0, 1, 0):
        indices.fill_(choice)
        mask = ls.selected(indices)
        assert torch.allclose(ls.attention(q, k, v, mask=mask), oracle(q, k, v, mask=mask).float(), atol=1e-5)


def test_a_plan_for_a_selection_matches_one_device() -> None:
    from longspan.testing import virtual_world

    q, k, v = tensors()
    mask = ls.selected(torch.tensor([[[[0, -1], [0, 1]], [[0, -1], [-1, 1]]]])) & ls.causal()
    world = virtual_world(2)

    def rank(mesh: ls.Mesh) -> torch.Tensor:
        plan = ls.plan(mask, 256, mesh, heads=4, kv_heads=2)
        return plan.unshard(ls.attention(*(plan.shard(t, 2) for t in (q, k, v)), plan=plan), 2)

    for out in world.run(rank):
        assert torch.allclose(out, ls.attention(q, k, v, mask=mask), atol=1e-5)


def test_a_plan_for_a_selection_by_heads_asks_for_the_heads() -> None:
    with pytest.raises(ValueError, match="heads"):
        ls.plan(ls.selected(torch.zeros(1, 2, 2, 1, dtype=torch.int32)), 256, ls.Mesh.abstract(2))


def test_selections_compile() -> None:
    q, k, v = tensors()

    def model(q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return ls.attention(q, k, v, mask=ls.selected(indices) & ls.causal())

    indices = torch.tensor([[[[0, -1], [0, 1]]]], dtype=torch.int32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for choice in (indices, indices.flip(2)):
        assert torch.allclose(compiled(q, choice), model(q, choice), atol=1e-6)


@pytest.mark.parametrize(("kernel", "granularity"), [("auto", 64), ("triton", 64), ("triton", 1)])
def test_compiled_selections_have_the_gradients_of_eager_ones(kernel: str, granularity: int) -> None:
    tokens = 128 if granularity == 64 else 12
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, tokens, 16, generator=generator, requires_grad=True) for h in (4, 2, 2))
    bias, sink = (torch.randn(4, generator=generator, requires_grad=True) for _ in range(2))
    rows = tokens // granularity

    def model(indices: torch.Tensor) -> torch.Tensor:
        mask = ls.selected(indices, granularity) & ls.causal()
        return ls.attention(q, k, v, mask=mask, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j) * 0.01, sink=sink, kernel=kernel)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        indices = torch.randint(-1, rows, (1, 2, rows, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        out, right = compiled(indices), model(indices)
        torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)
        grads, right_grads = (torch.autograd.grad(x.square().sum(), (q, k, v, bias, sink)) for x in (out, right))
        torch.testing.assert_close(grads, right_grads, atol=1e-4, rtol=1e-4)


def test_a_cache_rejects_selections() -> None:
    cache = ls.KVCache(pages=4, page_size=64, layers=1, kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    step = cache.step(cache.allocate(1), 128)
    with pytest.raises(ValueError, match="selected is not supported with cache="):
        ls.attention(*tensors(128, 128), cache=step, layer=0, mask=ls.selected(torch.zeros(1, 1, 1, 1, dtype=torch.int32)))


def test_numbers_that_a_score_mod_captures_are_moved_to_the_device_of_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    q = torch.empty(1, 1, 4, 4, device="meta")
    inputs = CallTensors(q=q, k=q, v=q, sink=None, score_captured=[torch.tensor(0.5)])
    table = ls.full().block_table(4)
    tiling = one_device.plain_tiling(4, 128)
    options = CallOptions(spec=Spec(mask=None, score=None, kernel="triton"), scale=1.0)
    call = SelectedCall(CpuKernel(), Work(table=table, q_tiles=tiling, kv_tiles=tiling, scale=1.0), options, q)

    def note(kernel: object, work: Work, *rest: object) -> tuple[Grads, None] | State:
        devices.extend(t.device.type for t in work.score_captured)
        return State(out=q, lse=q[..., 0]) if isinstance(rest[0], CallTensors) else (Grads(q=q, k=q, v=q, captured=[]), None)

    monkeypatch.setattr(one_device, "forward_by", note)
    monkeypatch.setattr(one_device, "backward_by", note)
    call.forward(inputs)
    call.backward(BackwardTensors(inputs=inputs, out=q, lse=q, grad_out=q, grad_lse=None, needs=[False]))
    assert devices == ["meta", "meta"]


def test_indices_of_compiled_calls_are_checked_as_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(least: int, largest: int) -> None:
        ls.selected(torch.tensor([least, 2, largest], dtype=torch.int32).view(1, 1, 1, 3))._check_range(5)

    for compiling, error in ((False, ValueError), (True, RuntimeError)):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        check(-1, 4)
        for wrong in ((-2, 4), (-1, 5)):
            with pytest.raises(error, match=r"-1|−1"):
                check(*wrong)
