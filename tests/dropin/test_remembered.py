"""What a context keeps of masks: never one that has changed since, and nothing that would let one rank talk while others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.dropin.attending import BATCH, HEADS, check, draw, qkv
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls
from longspan._dropin import dispatcher as spanning
from longspan._dropin.context import context_parallel
from longspan._dropin.global_layout import Lengths, chunked
from longspan._plan.layout import Layout
from longspan.testing import virtual_world

LENGTH = 43
Change = Callable[[Tensor], None]


def seen(seed: int, *shape: int) -> Tensor:
    return draw(*(shape or (LENGTH, LENGTH)), seed=seed) > 0


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
def test_an_attn_mask_that_was_written_to_without_autograd_knowing_is_planned_anew(how: str) -> None:
    whole, first, second = qkv(LENGTH), seen(1), seen(2)
    want = [ls.scaled_dot_product_attention(*whole, attn_mask=m) for m in (first, second)]

    def rank(mesh: Any) -> list[Tensor]:
        mask, write = WRITES[how](first)
        with torch.inference_mode(how == "inference mode"), context_parallel(mesh, seq_len=LENGTH) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            before = F.scaled_dot_product_attention(*parts, attn_mask=mask)
            write(second)
            return [cp.unshard(t, 2) for t in (before, F.scaled_dot_product_attention(*parts, attn_mask=mask))]

    for found in virtual_world(2).run(rank):
        check(found, want)


class Settings:
    """What a mask_mod may read beside tensors."""

    window = 5


@pytest.mark.parametrize("kind", ["mask_mod", "BlockMask"])
def test_a_mask_mod_that_reads_a_python_number_is_read_again(kind: str) -> None:
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

    for found in virtual_world(2).run(rank):
        check(found, want)


def test_a_captured_table_that_was_written_to_is_read_again() -> None:
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

    for found in virtual_world(2).run(rank):
        check(found, want)


def test_a_block_mask_whose_lists_were_emptied_lets_nothing_through() -> None:
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

    for found in virtual_world(2).run(rank):
        check(found, [want, torch.zeros_like(want)])


def test_one_tensor_may_be_the_whole_mask_of_one_sequence_and_flags_of_a_ranks_keys_in_another() -> None:
    flags = seen(3, 20)
    long, short = qkv(40), qkv(20)
    want = [ls.scaled_dot_product_attention(*short, attn_mask=flags), ls.scaled_dot_product_attention(*long, attn_mask=flags.repeat(2))]

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=[40, 20], layout="contiguous") as cp:
            out = [F.scaled_dot_product_attention(*(cp.shard(t, 2) for t in whole), attn_mask=flags) for whole in (short, long)]
            return [cp.unshard(t, 2) for t in out]

    for found in virtual_world(2).run(rank):
        check(found, want)


def test_equal_masks_in_other_tensors_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plan = spanning.plan
    monkeypatch.setattr(spanning, "plan", lambda *args, **kwargs: made.append(1) or plan(*args, **kwargs))
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


# --------------------------------------------------------------------------------------------------- what ranks tell each other


def test_a_part_of_attn_mask_that_is_another_tensor_on_one_rank_alone_is_no_reason_to_wait() -> None:
    whole, mask, other = qkv(LENGTH), seen(1), seen(4)
    keys = seen(5, LENGTH)
    wanted = (mask, mask, other, keys, ~keys)
    want = [ls.scaled_dot_product_attention(*whole, attn_mask=m) for m in wanted]

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

    for found in virtual_world(2, timeout=20).run(rank):
        check(found, want)


def test_what_one_rank_alone_writes_into_its_part_reaches_all() -> None:
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
        check([out], [ls.scaled_dot_product_attention(*whole, attn_mask=flags)])


def refused_by_one() -> dict[str, tuple[Callable[[Any, list[Tensor]], Any], str]]:
    """Calls that are wrong on rank 1."""

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
@pytest.mark.parametrize("name", refused_by_one())
def test_what_one_rank_refuses_in_the_first_call_all_learn(name: str, known: bool) -> None:
    call, message = refused_by_one()[name]
    whole = qkv(LENGTH)

    def rank(mesh: Any) -> str:
        with context_parallel(mesh, **({"seq_len": LENGTH} if known else {})) as cp:
            parts = [t.tensor_split(3, 2)[mesh.rank] for t in whole] if not known else [cp.shard(t, 2) for t in whole]
            with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
                call(cp, parts)
        return str(error.value)

    found = virtual_world(3, timeout=20).run(rank)
    assert message in found[1]
    assert all("waited" not in text and "same calls" not in text for text in found)
    assert all("rank 1" in text for text in (found[0], found[2]))


def test_where_each_rank_holds_one_query_rows_and_the_whole_mask_are_told_apart_by_what_they_hold() -> None:
    whole = qkv(3)
    bias, mask, keys = draw(HEADS, 3, 3, seed=4), seen(1, BATCH, 1, 3, 3), seen(2, 3)
    want = [ls.scaled_dot_product_attention(*whole, attn_mask=m) for m in (bias, bias, mask, mask, keys)]

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=3) as cp:
            parts = [cp.shard(t, 2) for t in whole]
            masks = (bias, cp.shard(bias, 1), mask, cp.shard(mask, 2), keys)
            out = [F.scaled_dot_product_attention(*parts, attn_mask=m) for m in masks]
            with pytest.raises(ValueError, match="may be either of the latter: pass the whole mask"):
                F.scaled_dot_product_attention(*parts, attn_mask=draw(1, 1, seed=mesh.rank))
            return [cp.unshard(t, 2) for t in out]

    for found in virtual_world(3).run(rank):
        check(found, want)


def test_rows_of_a_learned_attn_mask_are_this_ranks_own_where_heads_are_exchanged_too() -> None:
    whole, bias = qkv(LENGTH), draw(HEADS, LENGTH, LENGTH, seed=4).requires_grad_()
    out = F.scaled_dot_product_attention(*whole, attn_mask=bias)
    (grad,) = torch.autograd.grad((out * draw(*out.shape, seed=9)).sum(), bias)

    def rank(mesh: Any) -> list[Tensor]:
        with context_parallel(mesh, seq_len=LENGTH) as cp:
            rows = cp.shard(bias.detach(), 1).requires_grad_()
            part = F.scaled_dot_product_attention(*(cp.shard(t, 2) for t in whole), attn_mask=rows)
            (mine,) = torch.autograd.grad((part * cp.shard(draw(*out.shape, seed=9), 2)).sum(), rows)
            return [cp.unshard(part.detach(), 2), cp.unshard(mine, 1)]

    for found in virtual_world((2, 2)).run(rank):
        check(found, [out.detach(), grad])


def test_flex_attention_under_autocast_takes_mixed_dtypes_as_torchs_own_does() -> None:
    q, k, v = qkv(LENGTH, dtype=torch.float32)

    def rank(mesh: Any) -> tuple[torch.dtype, torch.dtype]:
        with context_parallel(mesh, seq_len=LENGTH) as cp, torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = flex_attention(*(cp.shard(t, 2) for t in (q, k, v.bfloat16())), return_lse=True)
            return out.dtype, lse.dtype

    assert virtual_world(2).run(rank) == [(torch.bfloat16, torch.float32)] * 2


# ----------------------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("lengths", [[64, 90, 131], [9, 10], [30, 31, 200], [7]])
def test_sequences_are_told_apart_as_they_become_known(lengths: list[int]) -> None:
    known = Lengths(ls.Mesh.abstract(5), chunked, [])
    assert not known.told_apart
    for i, length in enumerate(lengths, 1):
        known.layout(length)
        held = [[chunked(n, 5).local_len(rank) for n in lengths[:i]] for rank in range(5)]
        assert known.told_apart == all(len(set(counts)) == i for counts in held)


def test_a_call_looks_at_no_known_sequence_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Lengths(ls.Mesh.abstract(16), chunked, [16 * (10 + 3 * i) for i in range(100)])
    looked: list[int] = []
    monkeypatch.setattr(Layout, "local_len", lambda self, rank: looked.append(rank) or 0)
    found = known.of([("query", 19), ("key", 10)], torch.device("cpu"))
    assert [layout.length for layout in found] == [16 * 19, 160] and not looked


def test_a_context_inside_another_knows_its_sequences_apart_too() -> None:
    def rank(mesh: Any) -> tuple[bool, bool]:
        with context_parallel(mesh, seq_len=40, layout="contiguous"), context_parallel(mesh, seq_len=39, layout="contiguous") as inner:
            return inner.span.lengths.told_apart, sorted(inner.span.lengths.known) == [39, 40]

    assert virtual_world(2).run(rank) == [(False, True)] * 2
