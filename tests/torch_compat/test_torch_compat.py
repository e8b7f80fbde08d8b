"""`torch_compat` gives the results of one device, also for calls that torch's own context parallelism computes wrongly or refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.dropin.helpers import BATCH, assert_close, qkv, random
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls
import longspan.torch_compat as tc
from longspan.testing import run_processes, virtual_world
from longspan.torch_compat import _cp_custom_ops, _dispatcher
from longspan.torch_compat._attention import _ForwardHooks
from longspan.torch_compat._dispatcher import DispatcherCache, default_layout
from longspan.torch_compat._load_balancer import _LoadBalancer, layout_of

LENGTH = 64
DOCUMENTS = [[24, 8, 32], [16, 40, 8]]


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **kwargs)


class Flex(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return flex_attention(query, key, value, **kwargs)


def document_mask() -> Any:
    ids = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in DOCUMENTS])
    return lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv])


def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s + (kv - q) * 0.25 * (h + 1)


def _style(module: nn.Module, mesh: Any, kind: str) -> nn.Module:
    style = tc._ContextParallel(seq_dim=2, attention_type=tc._ContextParallel.AttentionType[kind])
    return parallelize_module(module, mesh, style)


def _balancer(name: str, block_mask: Any, ranks: int, length: int = LENGTH) -> Any:
    made = {
        "none": lambda: None,
        "head tail": lambda: tc._HeadTailLoadBalancer(length, ranks, "cpu"),
        "per document": lambda: tc._PerDocumentHeadTailLoadBalancer(DOCUMENTS, ranks, "cpu"),
        "round robin": lambda: tc._PTRRLoadBalancer(block_mask, ranks),
    }
    return made[name]()


NAMES = ("none", "head tail", "per document", "round robin")


def _ranks() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    q, k, v = qkv(LENGTH)
    block_mask = create_block_mask(document_mask(), BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    outputs: dict[str, Any] = {}
    for name in NAMES:
        balancer = _balancer(name, block_mask, mesh.size())
        flex = _style(Flex(), mesh, "FLEX")
        whole = [t.clone().requires_grad_() for t in (q, k, v)]
        arguments = dict(zip("qkvm", [*whole, block_mask], strict=True))
        parts = tc._context_parallel_shard(mesh, arguments, dict.fromkeys("qkvm", 2), balancer)
        out = flex(parts["q"], parts["k"], parts["v"], score_mod=score, block_mask=parts["m"])
        (back,) = tc.context_parallel_unshard(mesh, [out], [2], balancer)
        # Every rank computes the whole loss, so each shard gets its gradient once per rank.
        grads = torch.autograd.grad((back * random(*back.shape, seed=9)).sum() / mesh.size(), whole)
        for grad in grads:
            dist.all_reduce(grad)
        outputs["flex", name] = [back.detach(), *grads]
        # The sharded mask is a BlockMask over gathered keys, for torch's own operator.
        outputs["lists", name] = parts["m"].kv_num_blocks.shape == (BATCH, 1, 2)
        for rotation in ("alltoall", "allgather"):
            tc.set_rotate_method(rotation)
            sdpa = parallelize_module(
                Attention(), mesh, tc._ContextParallel(seq_dim=2, attention_type=tc._ContextParallel.AttentionType.SDPA)
            )
            out = sdpa(*tc._context_parallel_shard(mesh, [q, k, v], [2, 2, 2], balancer), is_causal=True)
            outputs["ring", name, rotation] = tc.context_parallel_unshard(mesh, [out], [2], balancer)[0]
    outputs |= _contexts(mesh)
    return outputs


def _contexts(mesh: Any) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for length in (LENGTH, 45, 3):  # 2N divides the first only
        for balanced in (True, False):
            tc._cp_options.enable_load_balance = balanced
            mine = qkv(length)
            with tc.context_parallel(mesh, buffers=mine, buffer_seq_dims=[2, -2, 2]):
                inside = tc._cp_options.enable_load_balance
                out = F.scaled_dot_product_attention(*mine)
                outputs["not causal", length, balanced] = tc.context_parallel_unshard(mesh, [out], [2])[0]
                out = F.scaled_dot_product_attention(*mine, is_causal=True)
                outputs["context", length, balanced] = tc.context_parallel_unshard(mesh, [out], [2])[0]
            assert inside == (balanced and length % (2 * mesh.size()) == 0) and tc._cp_options.enable_load_balance == balanced
            assert_close(mine, qkv(length), within=0.0)
    tc._cp_options.enable_load_balance = True
    with tc.context_parallel(mesh):  # no buffers: tokens in the order of ranks
        out = F.scaled_dot_product_attention(*(t.chunk(mesh.size(), 2)[mesh.get_local_rank()] for t in qkv(45)), is_causal=True)
    tc._cp_options.enable_load_balance = False
    outputs["no buffers"] = tc.context_parallel_unshard(mesh, [out], [2])[0]
    # A length that 2N does not divide, by every balancer that takes one.
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 45, 45, device="cpu")
    for name in ("none", "head tail", "round robin"):
        balancer = _balancer(name, block_mask, mesh.size(), 45)
        flex = _style(Flex(), mesh, "FLEX")
        *parts, mask = tc._context_parallel_shard(mesh, [*qkv(45), block_mask], [2] * 4, balancer)
        outputs["uneven", name] = tc.context_parallel_unshard(mesh, [flex(*parts, block_mask=mask)], [2], balancer)[0]
    return outputs


@pytest.mark.processes
def test_calls_that_torch_computes_wrongly_or_rejects_equal_one_device() -> None:
    q, k, v = qkv(LENGTH)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    out = ls.attention(*whole, mask=ls.mask_mod(document_mask()), score_mod=score)
    flex = [out.detach(), *torch.autograd.grad((out * random(*out.shape, seed=9)).sum(), whole)]
    ring = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for outputs in run_processes(_ranks, 2, timeout=240.0):
        for name in NAMES:
            assert_close(outputs["flex", name], flex)
            assert outputs["lists", name]
            assert_close([outputs["ring", name, r] for r in ("alltoall", "allgather")], [ring, ring])
        for length in (LENGTH, 45, 3):
            for balanced in (True, False):
                assert_close([outputs["context", length, balanced]], [F.scaled_dot_product_attention(*qkv(length), is_causal=True)])
                assert_close([outputs["not causal", length, balanced]], [F.scaled_dot_product_attention(*qkv(length))])
        uneven = F.scaled_dot_product_attention(*qkv(45), is_causal=True)
        assert_close([outputs["no buffers"], *(outputs["uneven", n] for n in ("none", "head tail", "round robin"))], [uneven] * 4)


def test_balancers_give_torchs_indices_and_their_inverse() -> None:
    assert tc._HeadTailLoadBalancer(8, 2, "cpu")._generate_indices().tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    per_document = tc._PerDocumentHeadTailLoadBalancer([[4, 8, 4]], 2, "cpu")
    assert per_document._generate_indices().tolist() == [[0, 3, 4, 5, 10, 11, 12, 15, 1, 2, 6, 7, 8, 9, 13, 14]]
    times = torch.tensor([9, 14, 2, 20, 10, 15, 8, 14, 16, 19, 15, 3, 12, 1, 12, 10])
    groups = tc._PTRRLoadBalancer.ptrr_scheduling(times, 4)
    assert times[groups].sum(1).tolist() == [45, 45, 43, 47]
    for balancer in (tc._HeadTailLoadBalancer(24, 3, "cpu"), tc._HeadTailLoadBalancer(25, 3, "cpu"), per_document):
        order, back = balancer._generate_indices(), balancer._generate_indices(restore=True)
        assert torch.equal(order.gather(1, back), torch.arange(order.shape[1])[None])


def test_a_custom_balancer_defines_the_layout_by_its_indices() -> None:
    class Backwards(tc._LoadBalancer):
        def _generate_indices(self, restore: bool = False) -> Tensor:
            return torch.arange(7).flip(0)[None]

    assert [layout_of(Backwards(), 7, 2).positions(r).tolist() for r in range(2)] == [[6, 5, 4, 3], [2, 1, 0]]


def test_unknown_settings_raise() -> None:
    with pytest.raises(NotImplementedError, match="'allgather', 'alltoall', got 'broadcast'"):
        tc.set_rotate_method("broadcast")
    with pytest.raises(ValueError, match="attention_type"):
        tc._ContextParallel(seq_dim=2, attention_type="FLEX")._apply(nn.Identity(), None)  # type: ignore[arg-type]


def test_torchs_own_tests_pass() -> None:
    path = os.environ.get("TORCH_TEST_ATTENTION")
    if not path:
        pytest.skip("set TORCH_TEST_ATTENTION to a copy of torch's test/distributed/tensor/test_attention.py")
    from tests.torch_compat.run_upstream import run

    outputs = run(Path(path), against="longspan")
    assert not {name: outcome for name, outcome in outputs.items() if outcome.startswith("failed")}
    assert sum(outcome == "passed" for outcome in outputs.values()) >= 20


def test_each_rotate_method_has_a_dispatcher_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatchers, mesh = DispatcherCache(), ls.Mesh.abstract(2)
    layouts = {8: default_layout(8, 2)}
    monkeypatch.setattr(tc._cp_options, "rotate_method", tc._cp_options.rotate_method)  # restored at the end
    made = []
    for rotation in ("alltoall", "allgather", "alltoall"):
        tc.set_rotate_method(rotation)
        made.append(dispatchers.of(mesh, layouts))
    assert [d.strategy for d in made] == ["ring", "allgather", "ring"] and made[0] is made[2]


def test_meshes_of_other_groups_have_dispatchers_of_their_own_and_old_ones_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatcher, "MAX_DISPATCHERS", 3)
    dispatchers, layouts = DispatcherCache(), {8: default_layout(8, 2)}
    meshes = [replace(ls.Mesh.abstract(2), groups=(name,)) for name in "abcd"]
    made = [dispatchers.of(mesh, layouts) for mesh in meshes[:3]]
    assert [d.mesh.groups for d in made] == [("a",), ("b",), ("c",)]
    assert [dispatchers.of(mesh, layouts) for mesh in meshes[:3]] == made
    dispatchers.of(meshes[3], layouts)  # drops the first
    assert dispatchers.of(meshes[1], layouts) is made[1] and dispatchers.of(meshes[0], layouts) is not made[0]


def test_the_layouts_of_the_last_groups_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatcher, "MAX_GROUPS", 2)
    monkeypatch.setattr(_dispatcher, "declared_layouts", {})
    by_length = [{n: default_layout(n, 2)} for n in (4, 6, 8)]
    for name, layouts in zip("abac", (*by_length, by_length[0])):
        _dispatcher.declare_layouts(name, layouts)
    assert _dispatcher.declared_layouts == {"a": by_length[2], "c": by_length[0]}


@pytest.mark.parametrize("positional", [3, 4, 5])
def test_a_score_mod_with_a_block_mask_of_the_whole_sequence_raises_however_it_is_passed(positional: int) -> None:
    hooks = _ForwardHooks(tc._ContextParallel(seq_dim=2, attention_type=tc._ContextParallel.AttentionType.FLEX), None)  # type: ignore[arg-type]
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu")
    given = {"query": None, "key": None, "value": None, "score_mod": lambda s, b, h, q, kv: s, "block_mask": block_mask}
    args, kwargs = tuple(given.values())[:positional], dict(list(given.items())[positional:])
    with pytest.raises(ValueError, match="score_mod needs the global positions"):
        hooks.before(nn.Identity(), args, kwargs)


def test_flex_cp_allgather_concatenates_kv_and_sums_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes: dict[str, Any] = {}
    monkeypatch.setattr(_cp_custom_ops, "_mesh", meshes.__getitem__)
    monkeypatch.setattr(_cp_custom_ops, "_size", lambda name: 3)
    k, v, grads = torch.randn(2, 3, 12, 4), torch.randn(2, 3, 12, 5), [torch.randn(3, 2, 3, 12, size) for size in (4, 5)]

    def rank(mesh: Any) -> tuple[Any, Any]:
        name = f"rank {mesh.rank}"
        meshes[name] = mesh
        own = [t[:, :, 4 * mesh.rank : 4 * mesh.rank + 4].clone().requires_grad_() for t in (k, v)]
        full = _cp_custom_ops.flex_cp_allgather(*own, 2, name)
        parts = _cp_custom_ops.flex_cp_allgather_backward(*(g[mesh.rank] for g in grads), 2, name)
        assert all(t.is_contiguous() for t in (*full, *parts)), "as the compiler expects by the operators' fake results"
        return [t.detach() for t in full], torch.autograd.grad(full, own, [g[mesh.rank] for g in grads])

    results = virtual_world(3).run(rank)
    for i, whole in enumerate((k, v)):
        assert all(torch.equal(full[i], whole) for full, _ in results)
        torch.testing.assert_close(torch.cat([own[i] for _, own in results], 2), grads[i].sum(0))
    fake = [t[:, :, :4].to("meta") for t in (k, v)]
    full = torch.ops.longspan.flex_cp_allgather(*fake, 2, "rank 0")
    assert [t.shape for t in full] == [k.shape, v.shape]
    assert [t.shape for t in torch.ops.longspan.flex_cp_allgather_backward(*full, 2, "rank 0")] == [t.shape for t in fake]


class Identity(_LoadBalancer):
    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        return None


def test_a_balancer_without_indices_cuts_the_sequence_as_torch_does() -> None:
    layout = Identity()._layout(10, 3)
    assert [layout.local_len(rank) for rank in range(3)] == [len(part) for part in torch.arange(10).chunk(3)]


def test_shards_and_gathers_beside_an_axis_of_batches_are_along_cp() -> None:
    def run(mesh: ls.Mesh) -> list[torch.Tensor]:
        whole = torch.arange(12.0)[None, :, None] + 100 * mesh.coordinate[0]
        buffer = whole.clone()
        with tc.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            assert buffer.shape == (1, 4, 1)
            return [whole, *tc.context_parallel_unshard(mesh, [buffer.clone()], [1])]

    for whole, gathered in virtual_world((2, 3), axis_names=("dp", "cp")).run(run):
        assert torch.equal(whole, gathered)
