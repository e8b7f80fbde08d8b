"""The README's uses of longspan as a typed script: mypy checks it with the flags of --strict, and a test runs it."""

from __future__ import annotations

from typing import assert_type

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, create_block_mask

import longspan as ls
from longspan.integrations import PreparedBatch, prepare_batch
from longspan.integrations.loss import linear_token_loss, shift_labels, token_count, token_loss
from longspan.testing import oracle, virtual_world


def one_device() -> None:
    q = torch.randn(1, 4, 100, 16, requires_grad=True)
    k, v = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16)
    bias = torch.randn(4, 64, requires_grad=True)
    mask = ls.causal() & ls.documents(lengths=[60, 25, 15]) | ~ls.full()

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[h, (q_idx - kv_idx).clamp(0, 63)]

    out = ls.attention(q, k, v, mask=mask, score_mod=add_bias, sink=torch.zeros(4))
    assert_type(out, Tensor)
    out, lse = ls.attention(q, k, v, mask=mask, score_mod=add_bias, return_lse=True, kernel="cpu")
    assert_type(lse, Tensor)
    out.sum().backward()  # type: ignore[no-untyped-call]  # torch's own signature
    table = mask.block_table(100)
    assert_type(table, ls.BlockTable)
    assert 0 < table.density <= 1 and lse.shape == (1, 4, 100) and q.grad is not None
    assert torch.allclose(out, oracle(q, k, v, mask=mask, score_mod=add_bias).float(), atol=1e-5)


def torch_signatures() -> None:
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    blocks = create_block_mask(ls.causal(), 1, 1, 256, 256, device="cpu")
    assert_type(ls.flex_attention(q, k, v, block_mask=blocks), Tensor)
    assert_type(ls.flex_attention(q, k, v, None, ls.causal(), return_lse=True), tuple[Tensor, Tensor])
    out, aux = ls.flex_attention(q, k, v, block_mask=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, return_aux=AuxRequest(lse=True))
    assert_type(aux, AuxOutput)
    assert_type(ls.scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5)


def many_devices() -> None:
    tokens = torch.randn(1, 300, 64)

    def rank(mesh: ls.Mesh) -> Tensor:
        plan = ls.plan(ls.causal(), 300, mesh, layout="head_tail", strategy="ring", heads=4)
        assert_type(plan, ls.Plan)
        x = plan.shard(tokens, 1)
        assert_type(x, Tensor)
        q = x.view(1, plan.local_len, 4, 16).transpose(1, 2)
        return plan.unshard(ls.attention(q, q, q, plan=plan), 2)

    outs = virtual_world(2).run(rank)
    assert_type(outs, list[Tensor])
    assert torch.equal(outs[0], outs[1])


def planning() -> None:
    mesh = ls.Mesh.abstract((2, 2), axis_names=("ulysses", "ring"))
    plans = ls.plan({"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(64)}, 512, mesh, heads=4)
    assert_type(plans, ls.PlanSet)
    plan = plans["sliding"]
    assert_type(plan.positions, Tensor)
    assert_type(plan.layout, ls.Layout)
    assert_type(plan.schedule, ls.Schedule)
    assert plan.report().balance >= 1


def drop_in() -> None:
    def rank(mesh: ls.Mesh) -> Tensor:
        x = torch.ones(1, 2, 64, 8)
        with ls.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], layout="contiguous", strategy="ring") as cp:
            assert_type(cp.positions(64), Tensor)
            assert_type(cp.unshard(cp.shard(torch.ones(64), 0), 0), Tensor)
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert all(torch.allclose(out, torch.ones(1, 2, 32, 8)) for out in virtual_world(2).run(rank))


def module_style() -> None:
    assert_type(ls.ContextParallel(seq_len=[64, 32], layout="head_tail"), ls.ContextParallel)


def batches() -> None:
    tokens = torch.arange(64)[None]

    def rank(mesh: ls.Mesh) -> Tensor:
        prepared = prepare_batch({"input_ids": tokens, "labels": tokens}, mesh, gradients="sum", layout="head_tail")
        assert_type(prepared, PreparedBatch)
        assert_type(prepared["longspan_plan"]["full"], ls.Plan)
        hidden = F.one_hot(prepared["input_ids"], 64).float()
        loss = linear_token_loss(hidden, torch.eye(64), prepared["labels"], count=prepared["num_items_in_batch"])
        assert_type(loss, Tensor)
        return loss

    logits, labels = F.one_hot(tokens, 64).float(), shift_labels(tokens)
    whole = token_loss(logits, labels, count=token_count(labels))
    assert_type(whole, Tensor)
    assert torch.allclose(torch.stack(virtual_world(2).run(rank)).sum(), whole)


def main() -> None:
    one_device()
    torch_signatures()
    many_devices()
    planning()
    drop_in()
    module_style()
    batches()


if __name__ == "__main__":
    main()
