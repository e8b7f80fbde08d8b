"""Entering and leaving a context: buffers, exceptions, nesting, threads, autograd graphs that outlive it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.dropin.helpers import BATCH, DIM, HEADS, assert_close, qkv, random
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from longspan._dropin.context import context_parallel
from longspan.testing import virtual_world

FLEX, CHECKPOINT = flex_attention.__code__, torch.utils.checkpoint.checkpoint.__wrapped__.__code__  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def torch_functions_are_restored() -> Any:
    yield
    assert flex_attention.__code__ is FLEX
    assert torch.utils.checkpoint.checkpoint.__wrapped__.__code__ is CHECKPOINT  # type: ignore[attr-defined]
    q = random(1, 1, 7, DIM)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("dim", [0, 1, -1, -3])
def test_buffers_hold_shards_inside_the_context_and_are_restored_after_it(dim: int) -> None:
    whole = random(13, 17, 19)

    def rank(mesh: Any) -> Tensor:
        buffer = whole.clone().transpose(0, 2).contiguous().transpose(0, 2)  # not contiguous
        strides, memory = buffer.stride(), buffer.data_ptr()
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[dim]) as cp:
            part = buffer.clone()
            assert torch.equal(part, cp.shard(whole, dim)) and buffer.shape[dim] < whole.shape[dim]
            buffer.zero_()
        assert torch.equal(buffer, whole) and (buffer.stride(), buffer.data_ptr()) == (strides, memory)
        return part

    parts = virtual_world(3).run(rank)
    assert sum(p.shape[dim] for p in parts) == whole.shape[dim]


@pytest.mark.parametrize("entered_in", [True, False], ids=["in inference mode", "outside of inference mode"])
def test_an_inference_tensor_may_be_a_buffer(entered_in: bool) -> None:
    whole = random(BATCH, HEADS, 41, DIM)
    want = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)

    def rank(mesh: Any) -> Tensor:
        with torch.inference_mode():
            buffer = whole.clone()
        with torch.inference_mode(entered_in), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]) as cp:
            assert buffer.shape == (BATCH, HEADS, cp.positions(41).numel(), DIM) and buffer.requires_grad is False
            out = cp.unshard(F.scaled_dot_product_attention(buffer, buffer, buffer, is_causal=True), 2)
            with torch.inference_mode():
                buffer.mul_(2)
                assert torch.equal(buffer, 2 * cp.shard(whole, 2))
        assert buffer.is_inference() and torch.equal(buffer, whole)
        return out

    for out in virtual_world(3).run(rank):
        assert_close([out], [want])


def test_a_plain_buffer_may_be_written_to_in_a_context_entered_in_inference_mode() -> None:
    def rank(mesh: Any) -> bool:
        buffer = torch.arange(40.0)
        with torch.inference_mode(), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]) as cp:
            buffer.mul_(2)
            assert torch.equal(buffer + 0, 2 * cp.shard(torch.arange(40.0), 0))
        return torch.equal(buffer, torch.arange(40.0)) and not buffer.is_inference()

    assert virtual_world(2).run(rank) == [True, True]


def test_overlapping_views_of_one_tensor_may_both_be_buffers() -> None:
    base = torch.arange(41)

    def rank(mesh: Any) -> tuple[Tensor, Tensor]:
        mine = base.clone()
        tokens, labels = mine[:-1], mine[1:]
        with context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[0, 0]) as cp:
            outputs = cp.unshard(tokens.clone(), 0), cp.unshard(labels.clone(), 0)
            assert torch.equal(labels, tokens + 1)
        assert torch.equal(mine, base) and tokens.data_ptr() == mine.data_ptr()
        return outputs

    for tokens, labels in virtual_world(3).run(rank):
        assert torch.equal(tokens, base[:-1]) and torch.equal(labels, base[1:])


def test_no_restore_buffers_keep_the_shard() -> None:
    def rank(mesh: Any) -> tuple[int, int]:
        restored, unrestored = torch.arange(40), torch.arange(40)
        with context_parallel(mesh, buffers=[restored, unrestored], buffer_seq_dims=[0, 0], no_restore_buffers={unrestored}):
            pass
        return len(restored), len(unrestored)

    assert virtual_world(2).run(rank) == [(40, 20), (40, 20)]


def test_an_exception_inside_restores_the_buffers() -> None:
    def rank(mesh: Any) -> bool:
        buffer = torch.arange(40)
        with pytest.raises(ZeroDivisionError), context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            raise ZeroDivisionError
        return torch.equal(buffer, torch.arange(40))

    assert virtual_world(2).run(rank) == [True, True]


def test_a_rank_that_raises_gives_the_others_an_error_and_all_ranks_whole_buffers() -> None:
    buffers = [qkv(40) for _ in range(3)]
    ended: dict[int, str] = {}

    def rank(mesh: Any) -> None:
        mine = buffers[mesh.rank]
        try:
            with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2, 2, 2]):
                F.scaled_dot_product_attention(*mine, is_causal=True)
                if mesh.rank == 1:
                    raise KeyError("the data ran out")
                F.scaled_dot_product_attention(*mine, is_causal=True)
        except Exception as error:
            ended[mesh.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises(KeyError, match="the data ran out"):
        virtual_world(3, timeout=20).run(rank)
    assert sorted(ended) == [0, 1, 2] and "the data ran out" in ended[0] and "the data ran out" in ended[2]
    for mine in buffers:
        assert_close(mine, qkv(40), within=0.0)


def test_contexts_nest_and_the_inner_one_shares_the_sequences_of_the_outer() -> None:
    q, k, v = qkv(53)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rank(mesh: Any) -> list[Tensor]:
        mine, labels = [t.clone() for t in (q, k, v)], torch.arange(53)
        with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 3) as cp:
            outputs = []
            with context_parallel(mesh):
                outputs.append(F.scaled_dot_product_attention(*mine, is_causal=True))
            with context_parallel(mesh, buffers=[labels], buffer_seq_dims=[0]):
                assert len(labels) == mine[0].shape[2]
                outputs.append(F.scaled_dot_product_attention(*mine, is_causal=True))
            outputs.append(F.scaled_dot_product_attention(*mine, is_causal=True))
            return [cp.unshard(t, 2) for t in outputs]

    for outputs in virtual_world(3).run(rank):
        assert_close(outputs, [want] * 3)


def test_wrong_nesting_raises_and_is_undone() -> None:
    def rank(mesh: Any) -> list[str]:
        buffer, messages = torch.arange(40), []
        outer = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])
        with outer:
            for again in (
                outer,
                context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
                context_parallel(mesh, seq_len=40, layout="contiguous"),
            ):
                with pytest.raises((RuntimeError, ValueError)) as error, again:
                    pass
                messages.append(str(error.value))
            assert len(buffer) == 20
        assert len(buffer) == 40
        return messages

    for messages in virtual_world(2).run(rank):
        assert "open already" in messages[0] and "has sharded already" in messages[1] and "same layout" in messages[2]


def test_a_context_entered_again_shards_the_present_contents_of_its_buffers() -> None:
    def rank(mesh: Any) -> bool:
        buffer = torch.arange(40)
        cp = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0])
        with cp:
            first = buffer.clone()
        buffer += 100
        with cp:
            second = buffer.clone()
        return torch.equal(second, first + 100) and torch.equal(buffer, torch.arange(40) + 100)

    assert virtual_world(2).run(rank) == [True, True]


def test_two_meshes_in_one_process_have_lengths_of_their_own() -> None:
    tensors = {2: qkv(41), 3: qkv(67)}
    worlds = {n: virtual_world(n) for n in tensors}
    outputs: dict[int, list[Tensor]] = {}

    def run(n: int) -> None:
        def rank(mesh: Any) -> Tensor:
            with context_parallel(mesh, seq_len=tensors[n][0].shape[2]) as cp:
                return cp.unshard(F.scaled_dot_product_attention(*(cp.shard(t, 2) for t in tensors[n]), is_causal=True), 2)

        outputs[n] = worlds[n].run(rank)

    threads = [threading.Thread(target=run, args=(n,)) for n in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in worlds:
        want = F.scaled_dot_product_attention(*tensors[n], is_causal=True)
        assert_close(outputs[n], [want] * n)


def test_a_context_does_not_change_attention_in_other_threads() -> None:
    q, k, v = qkv(40)
    outputs = []

    def rank(mesh: Any) -> None:
        with context_parallel(mesh, seq_len=40):
            thread = threading.Thread(target=lambda: outputs.append(F.scaled_dot_product_attention(q, k, v)))
            thread.start()
            thread.join()

    virtual_world(2).run(rank)
    assert_close(outputs, [F.scaled_dot_product_attention(q, k, v)] * 2)


class Model(torch.nn.Module):
    """Two blocks of attention, which may be checkpointed, on tokens and a table that are buffers."""

    def __init__(self, recompute: str | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(50, HEADS * DIM, generator=generator, dtype=torch.float64))
        self.weight = torch.nn.Parameter(torch.randn(3, HEADS * DIM, HEADS * DIM, generator=generator, dtype=torch.float64) / 7)
        self.recompute = recompute

    def block(self, x: Tensor, wave: Tensor) -> Tensor:
        x = x * wave[:, None]  # autograd saves the buffer
        q, k, v = ((x @ w).view(*x.shape[:2], HEADS, DIM).transpose(1, 2) for w in self.weight)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)

    def forward(self, tokens: Tensor, wave: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        for _ in range(2):
            if self.recompute is None:
                x = self.block(x, wave)
            else:
                # The buffer comes by closure: a recomputation must read the shard.
                x = checkpoint(lambda y: self.block(y, wave), x, use_reentrant=self.recompute == "reentrant")
        return (x**2).sum()


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("backward", ["inside", "after the context has closed"])
def test_backward_and_recomputation_read_the_shards_after_the_context_too(recompute: str | None, backward: str) -> None:
    tokens, wave = torch.arange(2 * 29).view(2, 29) % 50, random(29, seed=5)
    model_on_one_device = Model(None)
    model_on_one_device(tokens, wave).backward()

    def rank(mesh: Any) -> list[Tensor]:
        model, mine, own_wave = Model(recompute), tokens.clone(), wave.clone()
        with context_parallel(mesh, buffers=[mine, own_wave], buffer_seq_dims=[1, 0]):
            loss = model(mine, own_wave)
            if backward == "inside":
                loss.backward()
        if backward != "inside":
            loss.backward()
        assert torch.equal(mine, tokens) and torch.equal(own_wave, wave)
        return [p.grad for p in model.parameters() if p.grad is not None]

    outputs = virtual_world(3).run(rank)
    summed = [torch.stack(grads).sum(0) for grads in zip(*outputs, strict=True)]
    assert_close(summed, [p.grad for p in model_on_one_device.parameters() if p.grad is not None], within=1e-11)


def test_backward_raises_if_a_saved_buffer_was_written_to() -> None:
    def rank(mesh: Any) -> None:
        buffer, x = random(40), random(20, seed=2).requires_grad_()
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
            y = (x * buffer).sum()
            buffer.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()

    virtual_world(2).run(rank)


def test_flex_attention_in_a_checkpoint_is_recomputed_on_all_ranks() -> None:
    q, k, v = qkv(45)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 45, 45, device="cpu")
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*whole, is_causal=True).sum().backward()

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=45) as cp:
            parts = [cp.shard(t, 2).requires_grad_() for t in (q, k, v)]
            out = checkpoint(lambda *t: flex_attention(*t, block_mask=block_mask), *parts, use_reentrant=False)
        out.sum().backward()
        return [cp.unshard(t.grad, 2) for t in parts]

    for outputs in virtual_world(3).run(rank):
        assert_close(outputs, [t.grad for t in whole if t.grad is not None])


def test_compiled_code_is_recompiled_for_the_context_and_again_without_it() -> None:
    q, k, v = qkv(41)
    model = torch.compile(lambda *t: F.scaled_dot_product_attention(*(x * 2 for x in t), is_causal=True) + 1, backend="eager")
    flex = torch.compile(flex_attention, backend="eager")
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 41, 41, device="cpu")
    want = model(q, k, v)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=41) as cp:
            parts = [cp.shard(t, 2) for t in (q, k, v)]
            return [cp.unshard(t, 2) for t in (model(*parts), flex(*parts, block_mask=block_mask))]

    (outputs,) = virtual_world(1).run(rank)
    assert_close(outputs, [want, plain])
    assert_close([model(q, k, v)], [want])


def wrong_buffers() -> dict[str, tuple[Any, str]]:
    t = torch.zeros(BATCH, 40)
    return {
        "a parameter": ({"buffers": [torch.nn.Parameter(t)], "buffer_seq_dims": [1]}, "expected a plain tensor, got Parameter"),
        "one that requires grad": ({"buffers": [t.clone().requires_grad_()], "buffer_seq_dims": [1]}, "requires grad"),
        "too few dims": ({"buffers": [t, t.clone()], "buffer_seq_dims": [1]}, "expected one dim for each of 2 buffers, got 1"),
        "no such dim": ({"buffers": [t], "buffer_seq_dims": [2]}, "expected a dim of"),
        "two dims": ({"buffers": [t, t], "buffer_seq_dims": [0, 1]}, "listed twice"),
        "others kept": ({"buffers": [t], "buffer_seq_dims": [1], "no_restore_buffers": {torch.zeros(1)}}, "no_restore_buffers"),
        "a layout by work": ({"layout": "auto"}, "depend on the mask"),
    }


@pytest.mark.parametrize("name", wrong_buffers())
def test_wrong_arguments_raise_and_leave_everything_unchanged(name: str) -> None:
    arguments, message = wrong_buffers()[name]
    with pytest.raises((ValueError, TypeError), match=message):
        context_parallel(virtual_world(2).meshes[0], **arguments)


def test_dims_that_are_not_integers_raise() -> None:
    def rank(mesh: Any) -> None:
        tokens = torch.zeros(3, 10)
        with pytest.raises(TypeError, match=r"^buffer_seq_dims\[0\]: expected an integer dim, got 1.0, a float"):
            context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1.0]).__enter__()  # type: ignore[list-item]
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]) as cp:
            for call in (cp.shard, cp.unshard):
                with pytest.raises(TypeError, match=r"^(un)?shard: expected an integer dim, got '1', a str"):
                    call(torch.zeros(3, 10), "1")  # type: ignore[arg-type]

    virtual_world(2).run(rank)
