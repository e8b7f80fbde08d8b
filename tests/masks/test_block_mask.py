"""Conversions between block tables and torch's BlockMask."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention, noop_mask

import longspan as ls
from longspan._masks.block_mask import mask_mod_of_block_mask, table_of_block_mask
from longspan._masks.block_table import FULL, PARTIAL
from longspan._masks.classify import TableShape, classify
from longspan._masks.tracing import trace

Q_LEN, KV_LEN = 300, 260
torch.manual_seed(0)
IDS = torch.sort(torch.randint(0, 7, (Q_LEN,)))[0]
SHUFFLED = torch.randint(0, 9, (Q_LEN,))
BATCHED = torch.sort(torch.randint(0, 5, (3, Q_LEN)))[0]
LENGTHS = torch.tensor([100, 260, 7])
PADDED = torch.where(torch.arange(Q_LEN) % 40 == 39, -1, torch.arange(Q_LEN) // 40)
SLOPES = torch.tensor([0.5, 1.0])

MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "causal documents": lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv]),
    "window": lambda b, h, q, kv: (q - kv).abs() <= 50,
    "prefix": lambda b, h, q, kv: (kv < 70) | (q >= kv),
    "dilated": lambda b, h, q, kv: ((q - kv) % 3 == 0) & ((q - kv).abs() < 90),
    "neighbourhood": lambda b, h, q, kv: ((q // 20 - kv // 20).abs() <= 3) & ((q % 20 - kv % 20).abs() <= 3),
    "shuffled": lambda b, h, q, kv: SHUFFLED[q] == SHUFFLED[kv],
    "lengths": lambda b, h, q, kv: kv < LENGTHS[b],
    "batched documents": lambda b, h, q, kv: BATCHED[b, q] == BATCHED[b, kv],
    "padded": lambda b, h, q, kv: (q >= kv) & (PADDED[q] == PADDED[kv]) & (PADDED[q] >= 0),
    "per head": lambda b, h, q, kv: (q - kv).float() * SLOPES[h] < 40.5,
    "nothing": lambda b, h, q, kv: q < 0,
    "everything": lambda b, h, q, kv: q >= 0,
    "negated": lambda b, h, q, kv: ~((q < kv) | torch.logical_not(q - kv < 80)) | torch.where(q < 64, kv < 32, kv == q),
}


def listed_kinds(mask: BlockMask) -> torch.Tensor:
    """Tile kinds [B, H, rows, columns] from the lists of a BlockMask."""
    kinds = torch.zeros(mask.kv_indices.shape, dtype=torch.int8)
    for count, indices, kind in ((mask.kv_num_blocks, mask.kv_indices, PARTIAL), (mask.full_kv_num_blocks, mask.full_kv_indices, FULL)):
        for at in torch.cartesian_prod(*(torch.arange(n) for n in count.shape)).tolist():
            b, h, row = at
            kinds[b, h, row, indices[b, h, row, : count[b, h, row]].long()] = kind
    return kinds


@pytest.mark.parametrize("block", [(128, 128), (32, 64)])
@pytest.mark.parametrize("name", MASKS)
def test_a_table_equals_create_block_mask(name, block):
    mask = MASKS[name]
    want = create_block_mask(mask, 3, 2, Q_LEN, KV_LEN, device="cpu", BLOCK_SIZE=block)
    traced = trace(mask, "mask")
    table = classify(
        traced.program, traced.captured(), TableShape(q_len=Q_LEN, kv_len=KV_LEN, block=block, batch=3, heads=2), mask_mod=mask
    )
    tiles = (3, 2, table.q_tiles, table.kv_tiles)
    torch.testing.assert_close(table.to_dense().expand(tiles), listed_kinds(want), rtol=0, atol=0)
    ours = table.to_block_mask()
    assert ours.seq_lengths == want.seq_lengths and ours.BLOCK_SIZE == want.BLOCK_SIZE
    torch.testing.assert_close(listed_kinds(ours).expand(tiles), listed_kinds(want), rtol=0, atol=0)
    assert torch.equal(ours.to_dense().expand(tiles), want.to_dense())
    back = table_of_block_mask(ours)
    for mine, theirs in zip((table.ptr, table.first, table.last, table.kind), (back.ptr, back.first, back.last, back.kind), strict=True):
        assert torch.equal(mine, theirs)


def test_the_mod_of_a_block_mask_applies_its_mask_mod_in_partial_tiles_only():
    count = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 1], [0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
    full_count = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    full_indices = torch.tensor([[[[1, 0, 2], [2, 0, 1], [2, 0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        count, indices, full_count, full_indices, BLOCK_SIZE=(4, 8), mask_mod=lambda b, h, q, kv: (q + kv) % 2 == 0, seq_lengths=(11, 20)
    )
    kinds = torch.tensor([[1, 2, 1], [2, 0, 2], [0, 1, 2]])
    q, kv = torch.arange(11)[:, None], torch.arange(20)
    kind = kinds[q // 4, kv // 8]
    want = (kind == 2) | ((kind == 1) & ((q + kv) % 2 == 0))
    mod = mask_mod_of_block_mask(mask)
    assert torch.equal(create_mask(mod, 1, 1, 11, 20, device="cpu")[0, 0], want)
    table = table_of_block_mask(mask)
    assert table.to_dense()[0, 0].tolist() == [[1, 2, 1], [2, 0, 1], [0, 1, 1]]  # ragged tiles are partial
    traced = trace(mod, "mask")
    assert traced.program.pointwise
    assert not traced.program.uses_batch and not traced.program.uses_head


@pytest.mark.parametrize("mask_mod", [None, noop_mask])
def test_listed_tiles_of_a_block_mask_without_a_mod_are_visible(mask_mod):
    count = torch.tensor([[[1, 1]], [[2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [0, 1]]], [[[0, 1], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count, indices, BLOCK_SIZE=4, mask_mod=mask_mod)
    mod = mask_mod_of_block_mask(mask)
    seen = create_mask(mod, 2, 1, 8, 8, device="cpu")[:, 0]
    assert torch.equal(seen[:, ::4, ::4], torch.tensor([[[False, True], [True, False]], [[True, True], [False, False]]]))
    assert trace(mod, "mask").program.uses_batch
    assert table_of_block_mask(mask).to_dense()[:, 0].tolist() == [[[0, 1], [1, 0]], [[1, 1], [0, 0]]]


def test_a_block_mask_with_too_few_rows_raises():
    count, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count, indices, BLOCK_SIZE=4, mask_mod=noop_mask, seq_lengths=(100, 8))
    for convert in (table_of_block_mask, mask_mod_of_block_mask):
        with pytest.raises(ValueError, match="expected 25 rows of tiles"):
            convert(mask)


@pytest.mark.parametrize("kernel", ["cpu", "dense", "triton"])
def test_a_block_mask_that_does_not_cover_the_lengths_of_a_call_raises(kernel):
    whole = create_block_mask(ls.causal(), None, None, 150, 170, device="cpu", BLOCK_SIZE=64)
    rows = whole[:, :, :1]
    rows.mask_mod = whole.mask_mod
    q, k = torch.randn(1, 1, 150, 16), torch.randn(1, 1, 170, 16)
    with pytest.raises(ValueError, match=r"expected 3 rows of tiles \(150 queries, blocks of 64\), got 1"):
        ls.attention(q, k, k, mask=rows, kernel=kernel)
    longer = torch.randn(1, 1, 200, 16)
    for lengths in ((longer, k), (q, longer)):
        with pytest.raises(ValueError, match="200"):
            ls.attention(lengths[0], lengths[1], lengths[1], mask=whole, kernel=kernel)


COMPOSED_MASKS = {
    "causal": ls.causal(),
    "causal documents": ls.causal() & ls.documents(lengths=[100, 3, 57, 140]),
    "window or prefix": ls.sliding_window(50, 7) | ls.prefix(70),
    "negated": ~ls.sliding_window(200),
    "per batch row": ls.causal() & ls.prefix([100, 260, 7]),
    "per head": ls.mask_mod(lambda b, h, q, kv: (q - kv).abs() < 40 * (h + 1)),
    "full": ls.full(),
}


@pytest.mark.parametrize("name", COMPOSED_MASKS)
def test_the_block_mask_of_a_table_equals_create_block_mask(name):
    mask = COMPOSED_MASKS[name]
    ours = mask.block_table(Q_LEN, block=(32, 64), batch=3, heads=2).to_block_mask()
    want = create_block_mask(mask, 3, 2, Q_LEN, Q_LEN, device="cpu", BLOCK_SIZE=(32, 64))
    tiles = (3, 2, -(-Q_LEN // 32), -(-Q_LEN // 64))
    torch.testing.assert_close(listed_kinds(ours).expand(tiles), listed_kinds(want), rtol=0, atol=0)
    assert ours.seq_lengths == want.seq_lengths and ours.mask_mod is mask
    q, k, v = (torch.randn(3, 2, Q_LEN, 8) for _ in range(3))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=ours), flex_attention(q, k, v, block_mask=want))


def test_a_transposed_table_converts_to_a_transposed_block_mask():
    table = (ls.causal() & ls.documents(lengths=[100, 60, 140])).block_table(Q_LEN, block=32)
    assert torch.equal(table.transposed.to_block_mask().to_dense(), table.to_block_mask().to_dense().transpose(-1, -2))


def test_the_mod_of_a_block_mask_is_named_after_its_mask():
    block_mask = create_block_mask(ls.causal(), None, None, Q_LEN, Q_LEN, device="cpu")
    assert mask_mod_of_block_mask(block_mask).__name__ == "block_mask(Causal)"
    assert torch.equal(ls.mask_mod(block_mask).block_table(Q_LEN).to_dense(), ls.causal().block_table(Q_LEN).to_dense())


@pytest.mark.parametrize(("batch", "heads", "q_len", "kv_len"), [(1, 1, 11, 20), (2, 1, 12, 24), (1, 3, 9, 17), (2, 3, 4, 8), (3, 2, 1, 1)])
@pytest.mark.parametrize("with_full", [True, False])
def test_lists_of_tiles_count_as_far_as_they_are_used_and_inside_the_lengths(batch, heads, q_len, kv_len, with_full):
    """4 rows of lists with 5 columns, of which the lengths need fewer; tiles of 4 × 8; a tile in both lists is full."""
    generator = torch.Generator().manual_seed(batch + heads)

    def lists():
        order = torch.rand(batch, heads, 4, 5, generator=generator).argsort(-1).int()
        return torch.randint(0, 5, (batch, heads, 4), generator=generator).int(), order

    (count, indices), (full_count, full_indices) = lists(), lists()
    full = (full_count, full_indices) if with_full else (None, None)
    mask = BlockMask(
        (q_len, kv_len), count, indices, *full, None, None, None, None, (4, 8), lambda b, h, q, kv: (q * 3 + kv * 5 + b + h) % 4 == 0
    )
    mod, table = mask_mod_of_block_mask(mask), table_of_block_mask(mask)
    q_tiles, kv_tiles = -(-q_len // 4), -(-kv_len // 8)
    kinds = torch.zeros(batch, heads, q_tiles, kv_tiles, dtype=torch.int8)
    for kind, (counts, columns) in enumerate([(count, indices), (full_count, full_indices)][: 1 + with_full], 1):
        for b, h, i in itertools.product(range(batch), range(heads), range(q_tiles)):
            for j in columns[b, h, i, : counts[b, h, i]].tolist():
                if j < kv_tiles:
                    kinds[b, h, i, j] = kind
    assert torch.equal(mod.kinds, kinds) and mod.block == table.block == (4, 8)
    assert (table.q_len, table.kv_len, table.batch, table.heads) == (q_len, kv_len, batch, heads)
    expected = kinds.clone()
    expected[:, :, q_len // 4 :] = expected[:, :, q_len // 4 :].clamp(max=1)
    expected[..., kv_len // 8 :] = expected[..., kv_len // 8 :].clamp(max=1)
    assert torch.equal(table.to_dense(), expected)
    b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, q_len, kv_len)), indexing="ij")
    kind = kinds[b, h, q // 4, kv // 8]
    assert torch.equal(mod(b, h, q, kv), (kind == 2) | ((kind == 1) & ((q * 3 + kv * 5 + b + h) % 4 == 0)))
