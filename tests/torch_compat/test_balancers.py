"""Load balancers: layouts from indices, layouts of blocks dealt by work, and arguments that raise."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import longspan.torch_compat as tc
from longspan.torch_compat._load_balancer import _create_default_load_balancer, layout_of


class Given(tc._LoadBalancer):
    """Indices as given; with `restore`, others."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices

    def _generate_indices(self, restore: bool = False) -> Tensor:
        return self.indices.flip(-1) if restore else self.indices


def positions(balancer: Any, length: int, ranks: int) -> list[Any]:
    layout = layout_of(balancer, length, ranks)
    return [layout.positions(rank).tolist() for rank in range(ranks)]


@pytest.mark.parametrize(("length", "ranks"), [(11, 3), (2, 3), (1, 1), (7, 6)])
def test_each_rank_owns_its_chunk_of_the_permuted_sequence(length: int, ranks: int) -> None:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    chunks = [part.tolist() for part in order.chunk(ranks)]
    assert positions(Given(order[None]), length, ranks) == chunks + [[]] * (ranks - len(chunks))


def test_consecutive_tokens_are_one_segment_and_rows_may_differ() -> None:
    order = torch.tensor([[4, 5, 6, 7, 0, 1, 3, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    layout = layout_of(Given(order), 8, 2)
    assert layout.rows == ((((4, 4),), ((0, 2), (3, 1), (2, 1))), (((0, 4),), ((4, 4),)))


@pytest.mark.parametrize("indices", [torch.arange(8), torch.arange(8)[None, :7], torch.arange(8)[None, None]])
def test_indices_of_another_shape_raise(indices: Tensor) -> None:
    with pytest.raises(ValueError, match=r"Given: expected indices of shape \(1, 8\) or \(B, 8\)"):
        layout_of(Given(indices), 8, 2)


def test_a_balancer_for_another_length_or_other_ranks_raises() -> None:
    for length, ranks in ((12, 2), (8, 4)):
        with pytest.raises(ValueError, match="expected 8 tokens over 2 ranks, for which it was made, got"):
            layout_of(tc._HeadTailLoadBalancer(8, 2, "cpu"), length, ranks)


def test_the_default_is_head_tail_if_enabled_and_two_chunks_per_rank_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _create_default_load_balancer(12, 3, "cpu")
    assert isinstance(made, tc._HeadTailLoadBalancer) and (made.seq_length, made.world_size, made.device) == (12, 3, "cpu")
    assert _create_default_load_balancer(9, 3, "cpu") is None
    monkeypatch.setattr(tc._cp_options, "enable_load_balance", False)
    assert _create_default_load_balancer(12, 3, "cpu") is None


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (20, 2), (28, 2), (36, 3), (40, 4)])
def test_head_tail_indices_equal_torchs(length: int, ranks: int) -> None:
    ours, torchs = (library._HeadTailLoadBalancer(length, ranks, "cpu") for library in (tc, theirs))
    for restore in (False, True):
        assert torch.equal(ours._generate_indices(restore), torchs._generate_indices(restore))


def test_head_tail_of_other_lengths_has_every_token_once() -> None:
    parts = positions(tc._HeadTailLoadBalancer(25, 3, "cpu"), 25, 3)
    assert sorted(chain(*parts)) == list(range(25)) and sorted(map(len, parts)) == [8, 8, 9]


def test_documents_that_do_not_divide_are_shared_by_all_ranks() -> None:
    assert positions(tc._PerDocumentHeadTailLoadBalancer([[4, 8]], 2, "cpu"), 12, 2) == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    parts = positions(tc._PerDocumentHeadTailLoadBalancer([[4, 7, 0, 9]], 2, "cpu"), 20, 2)
    assert sorted(chain(*parts)) == list(range(20)) and [len(part) for part in parts] == [10, 10]
    made = tc._PerDocumentHeadTailLoadBalancer([[4, 8], [8, 4]], 2, "cpu")
    assert made._generate_indices().shape == (2, 12) and positions(made, 12, 2)[0][1] == [0, 1, 6, 7, 8, 11]


def test_documents_without_tokens_have_no_segments() -> None:
    made = [tc._PerDocumentHeadTailLoadBalancer([lengths], 2, "cpu") for lengths in ([4, 0, 8], [4, 8])]
    with_empty, without = (layout_of(balancer, 12, 2).rows for balancer in made)
    assert with_empty == without and all(n for rank in with_empty[0] for _, n in rank)


# ------------------------------------------------------------------------------------------------------------------ blocks by work


def by_blocks(length: int, *, block: Any = 4, batch: int | None = None, heads: int | None = None) -> Any:
    """A BlockMask in which block rows of queries see different numbers of full and of partial blocks."""

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) | ((b == 1) & (q < 8)) | (h > 5)

    return create_block_mask(mask, batch, heads, length, length, device="cpu", BLOCK_SIZE=block)


def test_blocks_are_dealt_back_and_forth_by_the_keys_that_they_read() -> None:
    assert positions(tc._PTRRLoadBalancer(by_blocks(24), 3), 24, 3) == [
        [0, 1, 2, 3, 20, 21, 22, 23],
        [4, 5, 6, 7, 16, 17, 18, 19],
        [8, 9, 10, 11, 12, 13, 14, 15],
    ]
    balancer = tc._PTRRLoadBalancer(by_blocks(24, batch=2), 3)
    read = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 6, 3, 4, 5, 6]])  # full and partial blocks
    layout = layout_of(balancer, 24, 3)
    for row in range(2):
        groups = tc._PTRRLoadBalancer.ptrr_scheduling(read[row], 3)
        want = (groups[..., None] * 4 + torch.arange(4)).flatten(1)
        assert [layout.positions(rank)[row].tolist() for rank in range(3)] == want.tolist()


def test_masks_without_lists_of_full_blocks_are_dealt_by_their_partial_ones() -> None:
    counts = torch.tensor([1, 2, 1, 3])[None, None].int()
    indices = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 1, 3], [1, 2, 3, 0]])[None, None].int()
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4, mask_mod=lambda b, h, q, kv: q >= kv, seq_lengths=(16, 16))
    assert mask.full_kv_num_blocks is None
    assert positions(tc._PTRRLoadBalancer(mask, 2), 16, 2) == [[8, 9, 10, 11, 12, 13, 14, 15], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_equal_tasks_are_dealt_in_their_order() -> None:
    assert tc._PTRRLoadBalancer.ptrr_scheduling(torch.ones(6), 2).tolist() == [[0, 3, 4], [1, 2, 5]]
    with pytest.raises(ValueError, match=r"process_time: expected one dim, got shape \(2, 3\)"):
        tc._PTRRLoadBalancer.ptrr_scheduling(torch.ones(2, 3), 2)
    with pytest.raises(NotImplementedError, match="num_tasks 5 must be divisible by group_size 2"):
        tc._PTRRLoadBalancer.ptrr_scheduling(torch.ones(5), 2)


@pytest.mark.parametrize("length", [20, 22, 45])
def test_blocks_that_ranks_cannot_share_equally_are_dealt_in_other_sizes(length: int) -> None:
    parts = positions(tc._PTRRLoadBalancer(by_blocks(length), 3), length, 3)
    assert sorted(chain(*parts)) == list(range(length)) and max(map(len, parts)) - min(map(len, parts)) <= 8


@pytest.mark.parametrize(("length", "ranks", "shares"), [(61, 2, [32, 29]), (47, 3, [16, 16, 15]), (95, 3, [32, 32, 31])])
@pytest.mark.parametrize("window", [5, 100])
def test_the_last_rank_has_the_short_last_block(length: int, ranks: int, shares: list[int], window: int) -> None:
    mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < window), None, None, length, length, device="cpu", BLOCK_SIZE=4)
    parts = positions(tc._PTRRLoadBalancer(mask, ranks), length, ranks)
    assert [len(part) for part in parts] == shares and parts[-1][-1] == length - 1


def test_batch_rows_deal_blocks_by_their_own_work() -> None:
    parts = positions(tc._PTRRLoadBalancer(by_blocks(22, batch=2), 3), 22, 3)
    assert all(sorted(chain(*(part[row] for part in parts))) == list(range(22)) for row in range(2))
    alone = [positions(Rows(by_blocks(22, batch=2), row), 22, 3) for row in range(2)]
    assert [[part[row] for part in parts] for row in range(2)] == alone and alone[0] != alone[1]


class Rows(tc._PTRRLoadBalancer):
    """Round robin by the work of one batch row."""

    def __init__(self, block_mask: BlockMask, row: int) -> None:
        mask_mod = block_mask.mask_mod
        length = block_mask.seq_lengths[0]
        alone = create_block_mask(lambda b, h, q, kv: mask_mod(b + row, h, q, kv), 1, None, length, length, device="cpu", BLOCK_SIZE=4)
        super().__init__(alone, 3)


def test_the_queries_are_dealt_where_kv_are_shorter() -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 24, 12, device="cpu", BLOCK_SIZE=4)
    assert positions(tc._PTRRLoadBalancer(mask, 3), 24, 3) == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7, 12, 13, 14, 15],
        [16, 17, 18, 19, 20, 21, 22, 23],
    ]


def test_blocks_of_one_size_are_dealt_by_work_alone() -> None:
    """10 blocks of 2 tokens, of which the last one has the most work: 5 turns, the first one from rank 0 on."""
    parts = positions(tc._PTRRLoadBalancer(by_blocks(20), 2), 20, 2)
    assert [part[-2:] for part in parts] == [[18, 19], [16, 17]] and [len(part) for part in parts] == [10, 10]


@pytest.mark.parametrize("given", [{"block": (4, 8)}, {"heads": 7}])
def test_oblong_blocks_and_masks_per_head_raise(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected square blocks and one mask for all heads"):
        layout_of(tc._PTRRLoadBalancer(by_blocks(24, **given), 3), 24, 3)
