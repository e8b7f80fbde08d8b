"""SDPA and FlexAttention in a context give the results and gradients of one device, however they were imported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.dropin.helpers import BATCH, DIM, HEADS, assert_close, on_one_device, on_ranks, qkv, random
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported_before

import longspan as ls
from longspan._dropin.context import context_parallel
from longspan.testing import virtual_world


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def eager_flex(*args: Any, **kwargs: Any) -> Any:
    return ls.flex_attention(*args, **kwargs)  # torch's own needs torch.compile on the CPU; longspan's is tested against the oracle


@pytest.mark.parametrize("length", [96, 203, 5])
@pytest.mark.parametrize("is_causal", [True, False])
def test_sdpa_imported_before_the_context_runs_on_all_ranks(length: int, is_causal: bool) -> None:
    tensors = qkv(length)
    assert_close(
        on_ranks(3, lambda *t: imported_before(*t, is_causal=is_causal), tensors),
        on_one_device(lambda *t: F.scaled_dot_product_attention(*t, is_causal=is_causal), tensors),
    )


@pytest.mark.parametrize("strategy", ["ring", "allgather", "exchange"])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_every_layout_and_strategy_gives_the_result_of_one_device(layout: str, strategy: str) -> None:
    tensors = qkv(149, kv_heads=2)
    attend = lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True)
    context = lambda mesh: context_parallel(mesh, seq_len=149, layout=layout, strategy=strategy)
    assert_close(on_ranks(4, attend, tensors, context=context), on_one_device(attend, tensors))


@pytest.mark.parametrize("slices", [(0, 1, 1), (0, 0, 1), (0, 2, 2), (2, 0, 0), (0, 3, 2)])
def test_batch_and_heads_broadcast_as_in_torch(slices: tuple[int, int, int]) -> None:
    parts = [slice(None), (slice(None), slice(1)), slice(1), (slice(1), slice(1))]  # all, one head, one batch row, one of each
    tensors = [t[parts[i]] for t, i in zip(qkv(67), slices)]
    attend = lambda *t: F.scaled_dot_product_attention(*t, is_causal=True)
    assert_close(on_ranks(3, attend, tensors), on_one_device(attend, tensors))


def test_cross_attention_between_two_sequences_of_the_context() -> None:
    tensors = qkv(71, 203)
    for is_causal in (False, True):
        attend = lambda *t: F.scaled_dot_product_attention(*t, is_causal=is_causal)  # noqa: B023
        assert_close(on_ranks(3, attend, tensors), on_one_device(attend, tensors))


def test_sequences_of_equal_local_length_are_distinguished_by_exchanging_lengths() -> None:
    tensors = qkv(9, 10)
    attend = lambda *t: F.scaled_dot_product_attention(*t)
    context = lambda mesh: context_parallel(mesh, seq_len=[9, 10], layout="contiguous")
    assert_close(on_ranks(2, attend, tensors, context=context), on_one_device(attend, tensors))


@pytest.mark.parametrize("block", [128, 64, 32])
def test_flex_attention_takes_a_block_mask_of_any_block_size_over_the_whole_sequence(block: int) -> None:
    tensors, length = qkv(203), 203
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([80, 3, 100, 20]))
    mask = lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])
    block_mask = create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=block)
    assert_close(
        on_ranks(3, lambda *t: flex_attention(*t, block_mask=block_mask), tensors),
        on_one_device(lambda *t: eager_flex(*t, block_mask=mask), tensors),
    )


def test_flex_attention_shares_kv_of_batch_size_one() -> None:
    q, k, v = qkv(131)
    tensors = [q, k[:1], v[:1]]
    block_mask = create_block_mask(causal, None, None, 131, 131, device="cpu")
    want = on_one_device(lambda *t: eager_flex(*t, block_mask=causal), tensors)
    assert_close(on_ranks(3, lambda *t: flex_attention(*t, block_mask=block_mask), tensors), want)


def test_a_score_mod_gets_global_positions_and_its_captured_tensor_a_gradient() -> None:
    tensors, length = qkv(131), 131
    table = random(HEADS, 2 * length - 1, seed=5).requires_grad_()
    score = lambda s, b, h, q, kv: s + table[h, q - kv + length - 1]
    block_mask = create_block_mask(causal, None, None, length, length, device="cpu")
    got = on_ranks(3, lambda *t: flex_attention(*t, score_mod=score, block_mask=block_mask), tensors, [table])
    assert_close(got, on_one_device(lambda *t: eager_flex(*t, score_mod=score, block_mask=causal), tensors, [table]))


def test_queries_that_see_no_key_give_zeros_and_no_nan() -> None:
    tensors, length = qkv(150), 150
    mask = lambda b, h, q, kv: (q >= kv) & (q >= 60) & (kv > 20)
    block_mask = create_block_mask(mask, None, None, length, length, device="cpu")
    got = on_ranks(4, lambda *t: flex_attention(*t, block_mask=block_mask), tensors)
    assert_close(got, on_one_device(lambda *t: eager_flex(*t, block_mask=mask), tensors))
    assert not got[0][:, :, :60].any()


def test_flex_attention_returns_lse_and_max_scores() -> None:
    q, k, v = qkv(75)
    block_mask = create_block_mask(causal, None, None, 75, 75, device="cpu")
    want_out, want = ls.flex_attention(q, k, v, block_mask=causal, return_aux=AuxRequest(lse=True, max_scores=True))

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=75) as cp:
            parts = [cp.shard(t, 2) for t in (q, k, v)]
            out, aux = flex_attention(*parts, block_mask=block_mask, return_aux=AuxRequest(lse=True, max_scores=True))
            pair = flex_attention(*parts, block_mask=block_mask, return_lse=True)
            return [cp.unshard(t, 2) for t in (out, aux.lse, aux.max_scores, *pair)]

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, [want_out, want.lse, want.max_scores, want_out, want.lse])


def attn_masks(length: int) -> dict[str, Tensor]:
    seen = random(BATCH, HEADS, length, length, seed=7) > 0
    seen[:, :, length // 5] = False
    return {
        "bool": seen,
        "bool for all heads": seen[:, :1],
        "bool for all": seen[0, 0],
        "keys": seen[:, :1, 40:41],
        "float": random(BATCH, 1, length, length, seed=8),
        "float for all": random(length, length, seed=8),
    }


@pytest.mark.parametrize("name", attn_masks(3))
@pytest.mark.parametrize("rows", ["whole", "this rank's"])
def test_attn_mask_may_be_whole_or_the_rows_of_local_queries(name: str, rows: str) -> None:
    tensors, length = qkv(53), 53
    mask = attn_masks(length)[name]
    attend = lambda *t: F.scaled_dot_product_attention(*t, attn_mask=mask)
    right = on_one_device(
        lambda *t: ls.scaled_dot_product_attention(*t, attn_mask=mask), tensors
    )  # torch's own gives NaN where nothing is seen

    def sharded(*t: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*t, attn_mask=local.cut(mask, t[0].shape[2]))

    class Local:
        """This rank's rows of a mask, or its keys for a mask of one row: sharded by the context of the calling thread."""

        def __init__(self) -> None:
            self.by_thread: dict[int, Any] = {}

        def context(self, mesh: Any) -> Any:
            import threading

            made = context_parallel(mesh, seq_len=length)
            self.by_thread[threading.get_ident()] = made
            return made

        def cut(self, mask: Tensor, _: int) -> Tensor:
            import threading

            cp = self.by_thread[threading.get_ident()]
            return cp.shard(mask, -1 if mask.shape[-2] == 1 else -2)

    local = Local()
    if rows == "whole":
        assert_close(on_ranks(3, attend, tensors), right)
    else:
        assert_close(on_ranks(3, sharded, tensors, context=local.context), right)


def test_a_learned_attn_mask_gets_its_gradient() -> None:
    tensors, bias = qkv(47), random(HEADS, 47, 47, seed=4).requires_grad_()
    attend = lambda *t: F.scaled_dot_product_attention(*t, attn_mask=bias)
    assert_close(on_ranks(3, attend, tensors, [bias]), on_one_device(attend, tensors, [bias]))


def test_tensors_of_three_dims_are_read_as_by_torch() -> None:
    tensors = [t[:, 0].transpose(0, 1).transpose(0, 1).reshape(BATCH, 1, 61, DIM) for t in qkv(61)]
    assert_close(
        on_ranks(3, lambda *t: F.scaled_dot_product_attention(*(x[:, 0] for x in t), is_causal=True)[:, None], tensors),
        on_one_device(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), tensors),
    )


def test_twelve_lengths_in_one_process_give_the_result_of_one_device() -> None:
    for length in range(128, 128 + 12 * 17, 17):
        tensors = qkv(length)
        block_mask = create_block_mask(causal, None, None, length, length, device="cpu")
        got = on_ranks(2, lambda *t: flex_attention(*t, block_mask=block_mask), tensors)  # noqa: B023
        assert_close(got, on_one_device(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), tensors))


def test_without_buffers_tokens_lie_in_rank_order_with_any_number_per_rank() -> None:
    counts = [30, 0, 41, 2]
    q, k, v = qkv(sum(counts))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rank(mesh: Any) -> Tensor:
        parts = [t.split(counts, 2)[mesh.rank] for t in (q, k, v)]
        with context_parallel(mesh):
            return F.scaled_dot_product_attention(*parts, is_causal=True)

    assert_close([torch.cat(virtual_world(4).run(rank), 2)], [want])


def test_a_mask_that_was_written_to_gets_a_new_plan() -> None:
    q, k, v = qkv(40)
    first, second = random(40, 40, seed=1) > 0, random(40, 40, seed=2) > 0
    want = [ls.scaled_dot_product_attention(q, k, v, attn_mask=m) for m in (first, second)]

    def rank(mesh: Any) -> list[Tensor]:
        mask = first.clone()
        with context_parallel(mesh, seq_len=40) as cp:
            parts = [cp.shard(t, 2) for t in (q, k, v)]
            out = [F.scaled_dot_product_attention(*parts, attn_mask=mask)]
            mask.copy_(second)
            out.append(F.scaled_dot_product_attention(*parts, attn_mask=mask))
            return [cp.unshard(t, 2) for t in out]

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, want)


def test_autocast_casts_as_for_torchs_own_sdpa() -> None:
    tensors = qkv(64, dtype=torch.float32)

    def rank(mesh: Any) -> torch.dtype:
        with context_parallel(mesh, seq_len=64) as cp, torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(*(cp.shard(t, 2) for t in tensors)).dtype

    assert virtual_world(2).run(rank) == [torch.bfloat16] * 2


def test_torchs_transformer_encoder_runs_on_all_ranks() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True).double()
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    x = random(BATCH, 37, 12)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(37, dtype=torch.float64)
    want = model(x, mask=mask, is_causal=True)

    def rank(mesh: Any) -> Tensor:
        with context_parallel(mesh, seq_len=37) as cp, torch.no_grad():
            return cp.unshard(model(cp.shard(x, 1), mask=mask, is_causal=True), 1)

    for outputs in virtual_world(3).run(rank):
        assert_close([outputs], [want.detach()])


def unsupported_calls() -> dict[str, tuple[Any, str]]:
    q = torch.zeros(1, 1, 20, DIM)
    local = create_block_mask(causal, None, None, 20, 20, device="cpu")
    seen = torch.ones(20, 20).bool()
    attention = torch.nn.MultiheadAttention(DIM, 1, batch_first=True)
    return {
        "dropout": (lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1), "dropout_p: expected 0"),
        "kernel options": (lambda: flex_attention(q, q, q, kernel_options={"BLOCK_Q": 64}), "kernel_options"),
        "a local block mask": (lambda: flex_attention(q, q, q, block_mask=local), "expected one over the whole sequence, 40 queries by 40"),
        "a local attn_mask": (
            lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=seen),
            "attn_mask: expected a shape",
        ),
        "an unsharded tensor": (
            lambda: F.scaled_dot_product_attention(*[torch.zeros(1, 1, 40, DIM)] * 3),
            "the length of a whole sequence: shard the tensor",
        ),
        "an unknown sequence": (lambda: F.scaled_dot_product_attention(*[torch.zeros(1, 1, 7, DIM)] * 3), "holds 20 of 40 tokens, got 7"),
        "weights": (lambda: attention(q[0], q[0], q[0]), "need_weights=False"),
        "both masks": (lambda: F.scaled_dot_product_attention(q, q, q, torch.ones(40, 40).bool(), is_causal=True), "got both"),
        "grouped heads without enable_gqa": (
            lambda: F.scaled_dot_product_attention(torch.zeros(1, 4, 20, DIM), *[torch.zeros(1, 2, 20, DIM)] * 2),
            "enable_gqa=True",
        ),
    }


@pytest.mark.parametrize("name", unsupported_calls())
def test_an_unsupported_call_raises_on_every_rank(name: str) -> None:
    def rank(mesh: Any) -> str:
        call, _ = unsupported_calls()[name]
        with context_parallel(mesh, seq_len=40), pytest.raises((ValueError, TypeError)) as error:
            call()
        return str(error.value)

    for message in virtual_world(2).run(rank):
        assert unsupported_calls()[name][1] in message


def test_a_buffer_in_a_list_beside_other_tensors_can_be_differentiated_after_the_context() -> None:
    x = torch.arange(24.0, dtype=torch.float64).view(8, 3)
    weight = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    with ls.context_parallel(ls.Mesh.abstract(2), buffers=[x], buffer_seq_dims=[0], layout="contiguous"):
        shard, product = x.clone(), torch.linalg.multi_dot([weight, x])
    (grad,) = torch.autograd.grad(product.sum(), weight)
    assert x.shape == (8, 3) and torch.equal(grad, shard.sum(1).expand(2, 4))
