"""Plans follow the contents of masks, and an error on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.dropin.helpers import BATCH, HEADS, assert_close, qkv, random
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls
from longspan._dropin import dispatcher
from longspan._dropin.context import context_parallel
from longspan._dropin.global_layout import SequenceLayouts, chunked
from longspan._plan.layout import Layout
from longspan.testing import virtual_world

LENGTH = 43
Change = Callable[[Tensor], None]


def seen(seed: int, *shape: int) -> Tensor:
    return random(*(shape or (LENGTH, LENGTH)), seed=seed) > 0


def of_numpy(values: Tensor) -> tuple[Tensor, Change]:
    memory = values.numpy().copy()

    def write(new: Tensor) -> None:
        np.copyto(memory, new.numpy())

    return torch.from_numpy(memory), write


def of_data(values: Tensor) -> tuple[Tensor, Change]:
    mine = values.clone()
    return mine, lambda new: mine.data.copy_(new)  # type: ignore[return-value]


def of_inference(values: Tensor) -> tuple[Tensor, Change]:
    with torch.inference_mode():
        mine = values.clone()
    return mine, lambda new: mine.copy_(new)  # type: ignore[return-value]


WRITES = {"numpy's memory": of_numpy, ".data": of_data, "inference mode": of_inference}


@pytest.mark.parametrize("how", WRITES)
def test_an_attn_mask_written_to_without_a_new_version_gets_a_new_plan(how: str) -> None:
    whole, first, second = qkv(LENGTH), seen(1), seen(2)
    want = [ls.scaled_dot_product_attention(*whole, attn_mask=m) for m in (first, second)]

    def rank(mesh: Any) -> list[Tensor]:
        mask, write = WRITES[how](first)
        with torch.inference_mode(how == "inference mode"), context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            before = F.scaled_dot_product_attention(*parts, attn_mask=mask)
            write(second)
            return [cp.unshard(t, 2) for t in (before, F.scaled_dot_product_attention(*parts, attn_mask=mask))]

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, want)


class Settings:
    """A Python value that a mask_mod reads."""

    window = 5


@pytest.mark.parametrize("kind", ["mask_mod", "BlockMask"])
def test_a_mask_mod_that_reads_a_python_number_is_traced_at_each_call(kind: str) -> None:
    whole = qkv(LENGTH)
    want = [ls.attention(*whole, mask=ls.causal() & ls.sliding_window(window)) for window in (5, 31)]

    def rank(mesh: Any) -> list[Tensor]:
        settings = Settings()
        block_mask: Any = lambda b, h, q, kv: (q >= kv) & (q - kv < settings.window)
        if kind == "BlockMask":
            block_mask = create_block_mask(block_mask, None, None, LENGTH, LENGTH, device="cpu")  # one tile, which stays partial
        out = []
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            for settings.window in (5, 31):
                out.append(cp.unshard(flex_attention(*(cp.shard(t, 2) for t in whole), block_mask=block_mask), 2))
        return out

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, want)


def test_a_captured_table_that_was_written_to_gets_a_new_plan() -> None:
    whole, first, second = qkv(LENGTH), torch.arange(LENGTH) // 10, torch.arange(LENGTH) // 17
    want = [ls.attention(*whole, mask=ls.documents(ids=ids)) for ids in (first, second)]

    def rank(mesh: Any) -> list[Tensor]:
        ids, write = of_numpy(first)
        same = lambda b, h, q, kv: ids[q] == ids[kv]
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            before = flex_attention(*parts, block_mask=same)
            write(second)
            return [cp.unshard(t, 2) for t in (before, flex_attention(*parts, block_mask=same))]

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, want)


@pytest.mark.parametrize("kind", ["mask_mod", "BlockMask"])
def test_a_captured_tensor_may_have_earlier_values_again(kind: str) -> None:
    whole, limits = qkv(LENGTH), (9, 30, 9, 30)
    want = [ls.attention(*whole, mask=ls.prefix(limit)) for limit in (*limits, 9)]

    def mask_of(limit: Tensor) -> Any:
        visible = lambda b, h, q, kv: kv < limit[0]
        return visible if kind == "mask_mod" else create_block_mask(visible, 1, None, LENGTH, LENGTH, device="cpu")

    def rank(mesh: Any) -> list[Tensor]:
        limit, other, out = torch.tensor([0]), torch.tensor([9]), []
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            for n in limits:
                limit.fill_(n)
                out.append(cp.unshard(flex_attention(*parts, block_mask=mask_of(limit)), 2))
            out.append(cp.unshard(flex_attention(*parts, block_mask=mask_of(other)), 2))
        return out

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, want)


def test_a_block_mask_whose_lists_were_emptied_masks_everything() -> None:
    whole = qkv(LENGTH)
    want = F.scaled_dot_product_attention(*whole, is_causal=True)

    def rank(mesh: Any) -> list[Tensor]:
        block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            before = flex_attention(*parts, block_mask=block_mask)
            block_mask.kv_num_blocks.zero_()
            block_mask.full_kv_num_blocks.zero_()
            return [cp.unshard(t, 2) for t in (before, flex_attention(*parts, block_mask=block_mask))]

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, [want, torch.zeros_like(want)])


def test_one_tensor_may_be_the_whole_mask_of_one_sequence_and_local_key_flags_of_another() -> None:
    flags = seen(3, 20)
    long, short = qkv(40), qkv(20)
    want = [ls.scaled_dot_product_attention(*short, attn_mask=flags), ls.scaled_dot_product_attention(*long, attn_mask=flags.repeat(2))]

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=[40, 20], layout="contiguous") as cp:
            out = [F.scaled_dot_product_attention(*(cp.shard(t, 2) for t in whole), attn_mask=flags) for whole in (short, long)]
            return [cp.unshard(t, 2) for t in out]

    for outputs in virtual_world(2).run(rank):
        assert_close(outputs, want)


def test_equal_masks_in_different_tensors_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plan = dispatcher.plan
    monkeypatch.setattr(dispatcher, "plan", lambda *args, **kwargs: made.append(1) or plan(*args, **kwargs))
    whole, mask, ids = qkv(LENGTH), seen(1), torch.arange(LENGTH) // 9

    def rank(mesh: Any) -> None:
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            for _ in range(3):
                table = ids.clone()
                F.scaled_dot_product_attention(*parts, attn_mask=mask.clone())
                flex_attention(*parts, block_mask=lambda b, h, q, kv: table[q] == table[kv])  # noqa: B023

    virtual_world(2).run(rank)
    assert len(made) == 2 * 2


# --------------------------------------------------------------------------------------------------- masks in parts, calls that raise


def test_rows_of_attn_mask_in_a_new_tensor_on_one_rank_only_do_not_deadlock() -> None:
    whole, mask, other = qkv(LENGTH), seen(1), seen(4)
    keys = seen(5, LENGTH)
    expected = (mask, mask, other, keys, ~keys)
    want = [ls.scaled_dot_product_attention(*whole, attn_mask=m) for m in expected]

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            rows, flags = cp.shard(mask, 0), cp.shard(keys, 0)
            out = [F.scaled_dot_product_attention(*parts, attn_mask=rows)]
            rows = rows.clone() if mesh.rank == 1 else rows
            out.append(F.scaled_dot_product_attention(*parts, attn_mask=rows))
            rows = rows.copy_(cp.shard(other, 0)) if mesh.rank == 1 else cp.shard(other, 0)
            out.append(F.scaled_dot_product_attention(*parts, attn_mask=rows))
            out.append(F.scaled_dot_product_attention(*parts, attn_mask=flags))
            flags.logical_not_()
            out.append(F.scaled_dot_product_attention(*parts, attn_mask=flags))
            return [cp.unshard(t, 2) for t in out]

    for outputs in virtual_world(2, timeout=20).run(rank):
        assert_close(outputs, want)


def test_a_write_of_one_rank_to_its_flags_reaches_all_ranks() -> None:
    whole, keys = qkv(LENGTH), torch.ones(LENGTH, dtype=torch.bool)

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            parts, flags = [cp.shard(t, 2) for t in whole], cp.shard(keys, 0)
            F.scaled_dot_product_attention(*parts, attn_mask=flags)
            if mesh.rank == 1:
                flags[:7] = False
            return [cp.unshard(F.scaled_dot_product_attention(*parts, attn_mask=flags), 2), cp.unshard(flags, 0)]

    for out, flags in virtual_world(3).run(rank):
        assert int(flags.sum()) == LENGTH - 7
        assert_close([out], [ls.scaled_dot_product_attention(*whole, attn_mask=flags)])


def wrong_on_rank_1() -> dict[str, tuple[Callable[[Any, list[Tensor]], Any], str]]:
    """Calls with wrong arguments on rank 1 only, and its error message."""

    def table(cp: Any, parts: list[Tensor]) -> Any:
        return F.scaled_dot_product_attention(*parts, attn_mask=seen(1, LENGTH, LENGTH - 3 * (cp.mesh.rank == 1)))

    def rows(cp: Any, parts: list[Tensor]) -> Any:
        mine = parts[0].shape[2] + (cp.mesh.rank == 1)
        return F.scaled_dot_product_attention(*parts, attn_mask=seen(1, mine, LENGTH))

    def dtype(cp: Any, parts: list[Tensor]) -> Any:
        mask = seen(1, parts[0].shape[2], LENGTH)
        return F.scaled_dot_product_attention(*parts, attn_mask=mask.int() if cp.mesh.rank == 1 else mask)

    def listed(cp: Any, parts: list[Tensor]) -> Any:
        length = LENGTH if cp.mesh.rank != 1 else LENGTH - 1
        return flex_attention(*parts, block_mask=create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device="cpu"))

    def traced(cp: Any, parts: list[Tensor]) -> Any:
        branching = lambda b, h, q, kv: q >= kv if q > 3 else q < kv
        return flex_attention(*parts, block_mask=branching if cp.mesh.rank == 1 else ls.causal())

    def planned(cp: Any, parts: list[Tensor]) -> Any:
        return flex_attention(*parts, block_mask=ls.documents([LENGTH - cp.mesh.rank % 2]))

    return {
        "a mask of another size": (table, "attn_mask: expected"),
        "rows of another size": (rows, "attn_mask: expected"),
        "a mask of integers": (dtype, "got torch.int32"),
        "a local block mask": (listed, "block_mask: expected one over the whole sequence"),
        "a mask_mod with a branch": (traced, "cannot be traced"),
        "a mask for another length": (planned, f"q_len={LENGTH - 1}"),
    }


@pytest.mark.parametrize("known", [True, False], ids=["of a known length", "of unknown lengths"])
@pytest.mark.parametrize("name", wrong_on_rank_1())
def test_an_error_on_one_rank_is_raised_on_all_ranks(name: str, known: bool) -> None:
    call, message = wrong_on_rank_1()[name]
    whole = qkv(LENGTH)

    def rank(mesh: Any) -> str:
        with context_parallel(mesh, **({"seq_len": LENGTH} if known else {})) as cp:
            parts = [t.tensor_split(3, 2)[mesh.rank] for t in whole] if not known else [cp.shard(t, 2) for t in whole]
            with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
                call(cp, parts)
        return str(error.value)

    outputs = virtual_world(3, timeout=20).run(rank)
    assert message in outputs[1]
    assert all("waited" not in text and "same calls" not in text for text in outputs)
    assert all("rank 1" in text for text in (outputs[0], outputs[2]))


def test_with_one_query_per_rank_the_contents_distinguish_rows_from_the_whole_mask() -> None:
    whole = qkv(3)
    bias, mask, keys = random(HEADS, 3, 3, seed=4), seen(1, BATCH, 1, 3, 3), seen(2, 3)
    want = [ls.scaled_dot_product_attention(*whole, attn_mask=m) for m in (bias, bias, mask, mask, keys)]

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=3) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            masks = (bias, cp.shard(bias, 1), mask, cp.shard(mask, 2), keys)
            out = [F.scaled_dot_product_attention(*parts, attn_mask=m) for m in masks]
            with pytest.raises(ValueError, match="may be rows of queries or flags of keys: pass the whole mask"):
                F.scaled_dot_product_attention(*parts, attn_mask=random(1, 1, seed=mesh.rank))
            return [cp.unshard(t, 2) for t in out]

    for outputs in virtual_world(3).run(rank):
        assert_close(outputs, want)


@pytest.mark.parametrize(("shape", "strategy"), [((2, 2), "auto"), (2, "ulysses")])
def test_rows_of_a_learned_attn_mask_get_their_gradient_under_ulysses_too(shape: Any, strategy: Any) -> None:
    whole, bias = qkv(LENGTH), random(HEADS, LENGTH, LENGTH, seed=4).requires_grad_()
    out = F.scaled_dot_product_attention(*whole, attn_mask=bias)
    (grad,) = torch.autograd.grad((out * random(*out.shape, seed=9)).sum(), bias)

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=LENGTH, strategy=strategy) as cp:
            rows = cp.shard(bias.detach(), 1).requires_grad_()
            part = F.scaled_dot_product_attention(*(cp.shard(t, 2) for t in whole), attn_mask=rows)
            (mine,) = torch.autograd.grad((part * cp.shard(random(*out.shape, seed=9), 2)).sum(), rows)
            return [cp.unshard(part.detach(), 2), cp.unshard(mine, 1)]

    for outputs in virtual_world(shape).run(rank):
        assert_close(outputs, [out.detach(), grad])


def test_flex_attention_under_autocast_takes_mixed_dtypes_as_torchs_own() -> None:
    q, k, v = qkv(LENGTH, dtype=torch.float32)

    def rank(mesh: Any) -> tuple[torch.dtype, torch.dtype]:
        with context_parallel(mesh, seq_len=LENGTH) as cp, torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = flex_attention(*(cp.shard(t, 2) for t in (q, k, v.bfloat16())), return_lse=True)
            return out.dtype, lse.dtype

    assert virtual_world(2).run(rank) == [(torch.bfloat16, torch.float32)] * 2


# ----------------------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("lengths", [[64, 90, 131], [9, 10], [30, 31, 200], [7]])
def test_sequences_are_distinguishable_if_all_local_lengths_differ(lengths: list[int]) -> None:
    known = SequenceLayouts(ls.Mesh.abstract(5), chunked, [])
    assert not known.distinguishable
    for i, length in enumerate(lengths, 1):
        known.layout(length)
        local_lengths = [[chunked(n, 5).local_len(rank) for n in lengths[:i]] for rank in range(5)]
        assert known.distinguishable == all(len(set(counts)) == i for counts in local_lengths)


def test_looking_up_a_sequence_takes_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SequenceLayouts(ls.Mesh.abstract(16), chunked, [16 * (10 + 3 * i) for i in range(100)])
    looked: list[int] = []
    monkeypatch.setattr(Layout, "local_len", lambda self, rank: looked.append(rank) or 0)
    outputs = [known.lookup(name, count, torch.device("cpu")) for name, count in (("query", 19), ("key", 10))]
    assert [layout.length for layout in outputs] == [16 * 19, 160] and not looked


def test_an_inner_context_checks_its_sequences_against_those_of_the_outer() -> None:
    def rank(mesh: Any) -> tuple[bool, bool]:
        with context_parallel(mesh, seq_len=40, layout="contiguous"), context_parallel(mesh, seq_len=39, layout="contiguous") as inner:
            return inner.dispatcher.sequences.distinguishable, sorted(inner.dispatcher.sequences.by_length) == [39, 40]

    assert virtual_world(2).run(rank) == [(False, True)] * 2
