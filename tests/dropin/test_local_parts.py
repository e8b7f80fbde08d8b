"""Parts of one call on one rank: DTensors and their local shards, plans by mask and batch, masks and numbers on another device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.dropin.helpers import qkv, random
from tests.other_device import OTHER, OtherDevice
from tests.torch_compat.fake_group import RANKS, fake_mesh
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

import longspan as ls
from longspan._comm.mesh import as_mesh
from longspan._dropin import dispatcher as module
from longspan._dropin.attn_mask import CallShape, as_score_mod
from longspan._dropin.context import context_parallel
from longspan._dropin.dispatcher import AttentionDispatcher
from longspan._dropin.dtensor import WrappedResult, as_dtensor, call_on_local, check_sharded
from longspan._dropin.global_layout import all_gather_ints
from longspan._dropin.mask_keys import MaskKeys, MaskRequest
from longspan._plan.layout import Layout
from longspan.testing import virtual_world

# ----------------------------------------------------------------------------------------------------------------------- DTensors


def test_results_of_local_shards_are_placed_and_sized_like_the_queries() -> None:
    with fake_mesh() as device_mesh:
        mesh = as_mesh(device_mesh)
        q, k, v = (DTensor.from_local(torch.ones(2, h, n, d), device_mesh, [Shard(2)]) for h, n, d in ((6, 4, 5), (3, 7, 5), (3, 7, 8)))
        extra = DTensor.from_local(torch.ones(9), device_mesh, [Replicate()])
        calls: list[Any] = []

        def attend(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            out = torch.ones(2, 4, 6, 8).transpose(1, 2)
            return out, AuxOutput(lse=out[..., 0], max_scores=None)

        result = call_on_local(mesh, attend, (q, k, v), (extra, None), {"scale": 0.5})
        assert result is not None
        ((args, kwargs),) = calls
        assert [tuple(a.shape) for a in args[:4]] == [(2, 6, 4, 5), (2, 3, 7, 5), (2, 3, 7, 8), (9,)] and args[4] is None
        assert all(type(a) is Tensor for a in args[:4]) and kwargs == {"scale": 0.5}
        out, aux = result.result
        assert (out.shape, aux.lse.shape, aux.max_scores) == ((2, 6, 4 * RANKS, 8), (2, 6, 4 * RANKS), None)
        for x in (out, aux.lse):
            assert x.placements == (Shard(2),) and x.is_contiguous() and x.to_local().is_contiguous()
        assert call_on_local(mesh, attend, [t.to_local() for t in (q, k, v)], (), {}) is None
        with pytest.raises(TypeError, match="expected DTensors or plain tensors, got a mixture"):
            call_on_local(mesh, attend, (q, k.to_local(), v), (), {})


def test_sequences_that_are_sharded_elsewhere_raise() -> None:
    with fake_mesh() as device_mesh:
        mesh = as_mesh(device_mesh)
        x = DTensor.from_local(torch.ones(2, 6, 4, 5), device_mesh, [Shard(2)])
        for dim in (2, -2):
            check_sharded(mesh, x, dim, "query")
        with pytest.raises(ValueError, match=r"query: expected a DTensor placed Shard\(1\)"):
            check_sharded(mesh, x, -3, "query")
        assert as_dtensor(torch.ones(5, 2, 3).movedim(0, 2), x, (2, 3, 5 * RANKS)).stride() == (15 * RANKS, 5 * RANKS, 1)


def test_calls_with_dtensors_run_on_local_shards_of_the_dispatchers_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "call_on_local", lambda *args: calls.append(args) or WrappedResult("result"))
    made = AttentionDispatcher(ls.Mesh.abstract(2), layout="contiguous")
    assert made.sdpa("q", "k", "v", "mask", scale=0.5) == "result"
    assert made.flex("q", "k", "v", "score_mod", "mask", return_aux="aux") == "result"
    sdpa, flex = calls
    assert sdpa == (made.mesh, made.sdpa, ("q", "k", "v"), ("mask", 0.0, False, 0.5, False), {})
    assert flex == (made.mesh, made.flex, ("q", "k", "v"), ("score_mod", "mask", None, False, False, None), {"return_aux": "aux"})


# -------------------------------------------------------------------------------------------------------------------------- plans


def agreed(q: Tensor, *layouts: Layout) -> Any:
    return SimpleNamespace(local=SimpleNamespace(q=q), shape=SimpleNamespace(q=layouts[0], kv=layouts[-1]))


ONE, TWO = Layout(length=8, rows=((((0, 4),), ((4, 4),)),)), Layout(length=8, rows=((((0, 4),), ((4, 4),)), (((4, 4),), ((0, 4),))))


def request(per_batch: bool = False, per_head: bool = False) -> MaskRequest:
    return MaskRequest(key="mask", per_batch=per_batch, per_head=per_head, make=ls.causal)


@pytest.mark.parametrize(("per_batch", "per_head", "layout", "batch", "heads"), [
    (False, False, ONE, None, None), (True, False, ONE, 2, None), (False, True, ONE, None, 3), (False, False, TWO, 2, None),
])  # fmt: skip
def test_plans_have_the_batch_and_heads_on_which_mask_and_layout_depend(
    monkeypatch: pytest.MonkeyPatch, per_batch: bool, per_head: bool, layout: Layout, batch: int | None, heads: int | None
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "plan", lambda mask, lengths, mesh, **options: made.append(options) or SimpleNamespace())
    dispatcher = AttentionDispatcher(ls.Mesh.abstract(2), layout="contiguous")
    mask, first = request(per_batch, per_head), agreed(torch.zeros(2, 3, 4, 5), layout)
    plan = dispatcher.plan(mask, first)
    assert [(o["batch"], o["heads"], o["layout"]) for o in made] == [(batch, heads, layout)]
    assert dispatcher.plan(mask, first) is plan
    assert (dispatcher.plan(mask, agreed(torch.zeros(4, 3, 4, 5), layout)) is plan) == (batch is None)
    assert (dispatcher.plan(mask, agreed(torch.zeros(2, 6, 4, 5), layout)) is plan) == (heads is None)


def test_layouts_of_which_one_has_rows_per_batch_get_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "plan", lambda mask, lengths, mesh, **options: made.append(options) or SimpleNamespace())
    dispatcher = AttentionDispatcher(ls.Mesh.abstract(2), layout="contiguous")
    for layouts in ((ONE, TWO), (TWO, ONE)):
        dispatcher.plan(request(), agreed(torch.zeros(2, 3, 4, 5), *layouts))
        assert made[-1]["batch"] == 2 and made[-1]["layout"] == layouts


def test_a_plan_that_cannot_be_made_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []

    def raises(mesh: Any, error: Exception) -> None:
        raised.append(mesh)
        raise error

    monkeypatch.setattr(module, "raise_on_all_ranks", raises)
    dispatcher = AttentionDispatcher(ls.Mesh.abstract(2), layout="contiguous", strategy="no strategy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no strategy"):
        dispatcher.plan(request(), agreed(torch.zeros(2, 3, 4, 5), ONE))
    assert raised == [dispatcher.mesh]


def test_the_last_64_plans_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "plan", lambda *args, **options: SimpleNamespace())
    dispatcher = AttentionDispatcher(ls.Mesh.abstract(2), layout="contiguous")
    calls = [agreed(torch.zeros(n, 3, 4, 5), ONE) for n in range(65)]
    made = [dispatcher.plan(request(per_batch=True), call) for call in calls]
    assert dispatcher.plan(request(per_batch=True), calls[1]) is made[1]
    assert dispatcher.plan(request(per_batch=True), calls[0]) is not made[0]


# -------------------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize("given", [{"return_lse": True}, {"return_aux": AuxRequest(lse=True)}])
def test_lse_has_a_gradient_however_it_is_asked_for(given: dict[str, Any]) -> None:
    q, k, v = qkv(12)

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, layout="contiguous") as cp:
            inputs = [cp.shard(t, 2).requires_grad_() for t in (q, k, v)]
            _, lse = flex_attention(*inputs, **given)
            lse = lse if isinstance(lse, Tensor) else lse.lse
            grads = torch.autograd.grad((lse * cp.shard(random(*q.shape[:3]), 2)).sum(), inputs[:2])
            return [cp.unshard(t, 2) for t in (lse.detach(), *grads)]

    whole = [t.clone().requires_grad_() for t in (q, k)]
    lse = (whole[0] @ whole[1].mT / q.shape[-1] ** 0.5).logsumexp(-1)
    want = [lse.detach(), *torch.autograd.grad((lse * random(*q.shape[:3])).sum(), whole)]
    for got in virtual_world(2).run(rank):
        torch.testing.assert_close(got, want)


def test_shards_along_the_first_of_negative_dims() -> None:
    def rank(mesh: Any) -> Tensor:
        with context_parallel(mesh, layout="contiguous") as cp:
            return cp.unshard(cp.shard(torch.arange(30.0).view(6, 5), -2), -2)

    assert all(torch.equal(t, torch.arange(30.0).view(6, 5)) for t in virtual_world(2).run(rank))


@pytest.mark.parametrize(("shape", "dim", "fits"), [
    ((2, 8, 5), 1, True), ((2, 5, 8), 2, True), ((2, 5, 8), -1, True), ((3, 8, 5), 1, False), ((8, 2), 0, False), ((5, 2, 8), 2, False),
])  # fmt: skip
def test_buffers_of_layouts_per_batch_row_have_a_batch(shape: tuple[int, ...], dim: int, fits: bool) -> None:
    def rank(mesh: Any) -> list[int]:
        buffer = torch.zeros(shape)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[dim], layout=TWO):
            return list(buffer.shape)

    if not fits:
        with pytest.raises(ValueError, match="expected dim 0 to be the batch of 2 rows"):
            virtual_world(2).run(rank)
        return
    want = [4 if i == dim % len(shape) else n for i, n in enumerate(shape)]
    assert virtual_world(2).run(rank) == [want, want]


def test_a_batch_of_as_many_rows_as_tokens_is_no_sequence() -> None:
    two_tokens = Layout(length=2, rows=((((0, 1),), ((1, 1),)), (((1, 1),), ((0, 1),))))

    def rank(mesh: Any) -> None:
        with context_parallel(mesh, buffers=[torch.zeros(2, 3)], buffer_seq_dims=[0], layout=two_tokens):
            pass

    with pytest.raises(ValueError, match="expected dim 0 to be the batch of 2 rows"):
        virtual_world(2).run(rank)


def test_writes_to_another_tensor_leave_a_saved_buffer_valid() -> None:
    def rank(mesh: Any) -> Tensor:
        buffer, out, w = torch.arange(8.0), torch.zeros(4), torch.ones(4, requires_grad=True)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], layout="contiguous"):
            product = buffer * w
            torch.add(buffer, 1, out=out)
            (grad,) = torch.autograd.grad(product.sum(), w)
        return grad

    assert torch.equal(torch.cat(virtual_world(2).run(rank)), torch.arange(8.0))


# ----------------------------------------------------------------------------------------------------------------- another device


def test_rows_of_local_queries_are_indexed_on_their_device() -> None:
    with OtherDevice():
        mask, mesh = random(1, 1, 4, 8), ls.Mesh.abstract(2)
        shape = CallShape(mesh=mesh, q=ONE, kv=ONE, batch=2, heads=3)
        add = as_score_mod(mask.to(OTHER), "query_rows", shape, queries_stay=True)
        q, kv, score = torch.arange(4)[:, None].to(OTHER), torch.arange(8).to(OTHER), torch.zeros(4, 8).to(OTHER)
        assert torch.equal(add(score, q[0, 0], q[0, 0], q, kv).cpu(), mask[0, 0])


def test_masks_of_another_device_are_read_again_after_a_write() -> None:
    with OtherDevice():
        mask = torch.tensor([True, False, True]).to(OTHER)
        keys = MaskKeys()
        digests = [keys.digest(mask), keys.digest(mask)]
        mask.logical_not_()
        assert digests[0] == digests[1] != keys.digest(mask)


def test_numbers_of_ranks_are_gathered_on_the_cpu_unless_on_a_gpu() -> None:
    assert virtual_world(2).run(lambda mesh: all_gather_ints(mesh, [mesh.rank, 7], "meta", "numbers")) == [[[0, 7], [1, 7]]] * 2


def test_sdpa_of_shards_of_another_number_of_dims() -> None:
    """Queries of 2 dims, as `torch.nn.functional` takes them."""
    q, k, v = (random(12, 4, seed=i) for i in range(3))

    def rank(mesh: Any) -> Tensor:
        with context_parallel(mesh, layout="contiguous") as cp:
            return cp.unshard(F.scaled_dot_product_attention(*(cp.shard(t, 0) for t in (q, k, v)), is_causal=True), 0)

    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for got in virtual_world(2).run(rank):
        torch.testing.assert_close(got, want)
