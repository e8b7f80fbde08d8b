"""Keys chosen at run time over ranks: one plan, made before any choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.selected.mesh_cases import check_over_mesh, draw

import longspan as ls
from longspan.testing import oracle, virtual_world


@pytest.mark.parametrize("seed", range(4))
def test_shards_match_dense_attention(seed: int) -> None:
    check_over_mesh(draw(seed, ranks=(2, 3, 4, 8)[seed % 4]))


def causal_plan(mesh: ls.Mesh, tokens: int = 1024, **options: Any) -> ls.Plan:
    return ls.plan(ls.causal(), tokens, mesh, layout="contiguous", strategy="exchange", **options)


def shards(plan: ls.Plan, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [plan.shard(t, 2) for t in tensors]


def test_one_plan_serves_every_choice() -> None:
    q, k, v = torch.randn(3, 1, 2, 512, 8, dtype=torch.float64).unbind(0)
    choices = [torch.randint(-1, 8, (1, 2, 8, 3), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    world = virtual_world(4)

    def rank(mesh: ls.Mesh) -> list[torch.Tensor]:
        plan = causal_plan(mesh, 512)
        local, rows = shards(plan, q, k, v), plan.query_blocks(64)
        return [ls.attention(*local, plan=plan, mask=ls.selected(choice[:, :, rows], 64)) for choice in choices]

    for i, choice in enumerate(choices):
        out = torch.cat([parts[i] for parts in world.run(rank)], 2)
        torch.testing.assert_close(out, oracle(q, k, v, mask=ls.selected(choice, 64) & ls.causal()), atol=1e-12, rtol=0)


def test_bytes_are_those_of_the_chosen_blocks() -> None:
    tokens, dim, block = 2048, 64, 64
    k = torch.randn(1, 2, tokens, dim)
    past = torch.ones(tokens // block, tokens // block).tril()
    indices = torch.multinomial(past, 4, replacement=True, generator=torch.Generator().manual_seed(0)).view(1, 1, -1, 4).int()
    world = virtual_world(4)

    def rank(mesh: ls.Mesh) -> None:
        plan = causal_plan(mesh, tokens)
        local = [t.requires_grad_() for t in shards(plan, k, k, k)]
        ls.attention(*local, plan=plan, mask=ls.selected(indices[:, :, plan.query_blocks(block)], block)).sum().backward()

    world.run(rank)
    chosen = 0
    for r in range(4):
        rows = indices[0, 0, 8 * r : 8 * (r + 1)].unique()
        chosen += int(((rows < 8 * r) & (rows >= 0)).sum())
    block_bytes = 2 * 2 * block * dim * 4  # K and V of two KV heads in float32
    assert 0 < chosen < 3 * 8 + 2 * 8 + 8
    assert chosen * block_bytes * 3 <= world.bytes_sent <= 1.1 * chosen * block_bytes * 3  # KV twice, gradients once


def test_a_choice_is_sent_only_to_ranks_whose_keys_it_may_contain() -> None:
    world = virtual_world(4)

    def rank(mesh: ls.Mesh) -> None:
        plan = causal_plan(mesh)
        q = torch.ones(1, 1, plan.local_len, 8)
        ls.attention(q, q, q, plan=plan, mask=ls.selected(torch.zeros(1, 1, 2, 1, dtype=torch.int32)))

    world.run(rank)
    (requests,) = [e.bytes for e in world.exchanges if e.what == "selected keys, requests"]
    assert torch.equal(requests > 0, torch.ones(4, 4).tril(-1) > 0)


def test_tokens_that_nobody_sees_do_not_change_a_bit() -> None:
    k = torch.randn(1, 1, 512, 8)
    indices = torch.tensor([0, 0, 0, 2]).view(1, 1, 4, 1)
    outs = []
    for poison in (0.0, torch.nan, torch.inf):
        other = k.clone()
        other[:, :, 128:256] = poison  # the second block, which no query chose
        world = virtual_world(2)

        def rank(mesh: ls.Mesh, other: torch.Tensor = other) -> torch.Tensor:
            plan = causal_plan(mesh, 512)
            return ls.attention(
                plan.shard(k, 2), *shards(plan, other, other), plan=plan, mask=ls.selected(indices[:, :, plan.query_blocks(128)])
            )

        outs.append(torch.cat(world.run(rank), 2))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]) and outs[0].isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"mask": ls.selected(torch.zeros(1, 1, 4, 1, dtype=torch.int32)) & ls.causal()}, "selected.* alone with plan"),
        ({"mask": ls.selected(torch.zeros(1, 1, 8, 1, dtype=torch.int32))}, "expected 4 rows, one for each of plan.query_blocks"),
        ({"mask": ls.selected(torch.full((1, 1, 4, 1), 9))}, "expected indices from -1 to 7"),
        ({"mask": ls.selected(torch.zeros(1, 1, 4, 1, dtype=torch.int32)), "kernel": "dense"}, "expected 'auto', 'cpu'"),
        ({"mask": ls.causal()}, "expected mask=None, or mask=longspan.selected"),
    ],
)
def test_calls_that_are_not_supported_raise_on_every_rank(call: dict[str, Any], message: str) -> None:
    world = virtual_world(2)

    def rank(mesh: ls.Mesh) -> None:
        plan = causal_plan(mesh)
        q = torch.ones(1, 1, plan.local_len, 8)
        with pytest.raises(ValueError, match=message):
            ls.attention(q, q, q, plan=plan, **call)

    world.run(rank)


def test_two_axes_and_batch_rows_of_their_own_raise() -> None:
    q = torch.ones(2, 1, 512, 8)
    mask = ls.selected(torch.zeros(1, 1, 4, 1, dtype=torch.int32))
    plan = ls.plan(ls.causal(), 512, ls.Mesh.abstract((1, 1)))
    with pytest.raises(ValueError, match="mesh of one axis"):
        ls.attention(q, q, q, plan=plan, mask=mask)
    ids = torch.tensor([[0] * 512, [0] * 100 + [1] * 412])
    rows = ls.plan(ls.causal() & ls.documents(ids=ids), 512, ls.Mesh.abstract(1), batch=2, layout="per_document")
    with pytest.raises(ValueError, match="lays out all batch rows alike"):
        ls.attention(q, q, q, plan=rows, mask=mask)


def test_no_table_of_all_rows_and_blocks_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._masks import selected_shard

    tokens, sizes, plain = 2048, [], selected_shard.chosen_blocks

    def noted(indices: torch.Tensor, blocks: int) -> torch.Tensor:
        sizes.append(indices.shape[:3].numel() * blocks)
        return plain(indices, blocks)

    monkeypatch.setattr(selected_shard, "_CHOSEN_AT_ONCE", 1 << 12)
    monkeypatch.setattr(selected_shard, "chosen_blocks", noted)
    q = torch.randn(1, 1, tokens, 8, dtype=torch.float64)
    indices = torch.randint(0, tokens, (1, 1, tokens, 4), generator=torch.Generator().manual_seed(0))

    def rank(mesh: ls.Mesh) -> torch.Tensor:
        plan = causal_plan(mesh, tokens)
        local = plan.shard(q, 2)
        return ls.attention(local, local, local, plan=plan, mask=ls.selected(indices[:, :, plan.query_blocks(1)], 1))

    out = torch.cat(virtual_world(2).run(rank), 2)
    torch.testing.assert_close(out, oracle(q, q, q, mask=ls.selected(indices, 1) & ls.causal()), atol=1e-12, rtol=0)
    assert max(sizes) <= 128 * tokens  # one tile of queries


def test_a_choice_of_too_many_bits_raises_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan._engine import selected_mesh

    monkeypatch.setattr(selected_mesh, "MAX_BITS_BYTES", 1 << 10)
    world = virtual_world(2)

    def rank(mesh: ls.Mesh) -> None:
        plan = causal_plan(mesh)
        q = torch.ones(1, 1, plan.local_len, 8)
        with pytest.raises(ValueError, match="use larger blocks, larger rows of queries or more ranks"):
            ls.attention(q, q, q, plan=plan, mask=ls.selected(torch.zeros(1, 1, plan.local_len, 1, dtype=torch.int32), 1))

    world.run(rank)


def test_a_checkpointed_call_communicates_once() -> None:
    from longspan.integrations import memory

    q = torch.randn(3, 1, 2, 512, 8, dtype=torch.float64)
    indices = torch.randint(-1, 8, (1, 1, 8, 3), generator=torch.Generator().manual_seed(0))
    grads, exchanges = [], []
    for checkpoint in (lambda fn, *args: fn(*args), memory.checkpoint):
        world = virtual_world(2)

        def rank(mesh: ls.Mesh, checkpoint: Any = checkpoint) -> torch.Tensor:
            plan = causal_plan(mesh, 512)
            local = [t.requires_grad_() for t in shards(plan, *q.unbind(0))]
            mask = ls.selected(indices[:, :, plan.query_blocks(64)], 64)
            checkpoint(lambda *args: ls.attention(*args, plan=plan, mask=mask), *local).square().sum().backward()
            return torch.stack([t.grad for t in local])

        grads.append(world.run(rank))
        exchanges.append([e.what for e in world.exchanges if not e.what.startswith("agreement")])
    assert exchanges[0] == exchanges[1] and len(exchanges[1]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_indices_modified_on_one_rank_raise_on_every_rank() -> None:
    world = virtual_world(2)

    def rank(mesh: ls.Mesh) -> str:
        plan = causal_plan(mesh)
        q = torch.ones(1, 1, plan.local_len, 8, requires_grad=True)
        indices = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
        out = ls.attention(q, q, q, plan=plan, mask=ls.selected(indices))
        if mesh.rank == 0:
            indices.fill_(1)
        with pytest.raises(RuntimeError) as caught:
            out.sum().backward()
        return str(caught.value)

    first, second = world.run(rank)
    assert "modified by an inplace operation" in first and "rank 0 raised in this call" in second


def test_lookups_of_the_plans_mask_are_checked_once_and_choices_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from longspan._kernels.gpu import lookup_bounds

    read: list[str] = []
    on_host = lookup_bounds._on_host
    monkeypatch.setattr(lookup_bounds, "_on_host", lambda program, captured: (read.append(program.name), on_host(program, captured))[1])
    kinds, of_kind = torch.arange(160) // 40, torch.tensor([3, 1, 0, 2])
    rest = ls.causal() & ls.mask_mod(lambda b, h, q, kv: of_kind[kinds[kv]] <= of_kind[kinds[q]])
    q, k, v = torch.randn(3, 1, 1, 160, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    choices = [torch.randint(-1, 3, (1, 1, 160, 2), generator=torch.Generator().manual_seed(i)).int() for i in range(2)]

    def rank(mesh: ls.Mesh) -> list[torch.Tensor]:
        plan = ls.plan(rest, 160, mesh)
        masks = [ls.selected(choice, 64, q_granularity=1) for choice in choices]
        return [ls.attention(q, k, v, plan=plan, mask=mask, kernel="triton") for mask in masks]

    for out, choice in zip(virtual_world(1).run(rank)[0], choices, strict=True):
        right = oracle(q, k, v, mask=ls.selected(choice, 64, q_granularity=1) & rest)
        torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=0)
    assert len(read) == 1 and "selected" not in read[0]
