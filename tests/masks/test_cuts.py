"""Tiles that begin anywhere, and tables of some tiles in any order: what shards of a sequence are made of."""

import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan._masks.block_table import EMPTY, FULL, PARTIAL
from longspan._masks.classify import classify

MASKS = [
    ls.causal(),
    ls.causal() & ls.sliding_window(37),
    ls.causal() & ls.documents(lengths=[100, 3, 57, 140]),
    ls.causal() | ls.prefix(50),
    ls.mask_mod(lambda b, h, q, kv: (q * (h + 2) + kv + b) % 11 < 4),
]


@st.composite
def edges(draw, length, block):
    """Cuts of a sequence into tiles no wider than a block, many of them as wide as it."""
    found = [0]
    while found[-1] < length:
        found.append(min(length, found[-1] + draw(st.sampled_from([block, block, block, 1, block // 2, block - 1]))))
    return torch.tensor(found)


@settings(max_examples=120)
@given(st.data())
def test_tiles_that_begin_anywhere_equal_brute_force(data):
    mask = data.draw(st.sampled_from(MASKS))
    q_edges, kv_edges = data.draw(edges(300, 16)), data.draw(edges(300, 24))
    traced = mask.traced
    args = {"block": (16, 24), "batch": 2, "heads": 3, "edges": (q_edges, kv_edges)}
    table = classify(traced.program, traced.captured(), 300, 300, levels=(4, 1), **args)
    b, h = torch.arange(table.batch).view(-1, 1, 1, 1), torch.arange(table.heads).view(1, -1, 1, 1)
    dense = mask(b, h, torch.arange(300).view(-1, 1), torch.arange(300)).expand(table.batch, table.heads, 300, 300)
    kinds = table.to_dense()
    for i in range(table.q_tiles):
        for j in range(table.kv_tiles):
            q0, q1, k0, k1 = int(q_edges[i]), int(q_edges[i + 1]), int(kv_edges[j]), int(kv_edges[j + 1])
            tile = dense[:, :, q0:q1, k0:k1].reshape(table.batch, table.heads, -1)
            whole = q1 - q0 == 16 and k1 - k0 == 24
            want = torch.where(tile.all(-1) & whole, FULL, torch.where(tile.any(-1), PARTIAL, EMPTY))
            assert torch.equal(kinds[:, :, i, j].long(), want), (i, j)


@settings(max_examples=80)
@given(st.data())
def test_a_selection_equals_indexing_the_dense_table(data):
    mask = data.draw(st.sampled_from(MASKS))
    table = mask.block_table(300, block=(16, 12), batch=2, heads=3)
    q = torch.tensor(data.draw(st.lists(st.integers(0, table.q_tiles - 1), unique=True)), dtype=torch.int64)
    kv = data.draw(st.lists(st.integers(0, table.kv_tiles - 1), unique=True))
    kv = torch.tensor(sorted(kv) if data.draw(st.booleans()) else kv, dtype=torch.int64)
    heads = range(1, 3)
    part = table.select(q, kv, heads=heads)
    dense = table.to_dense()
    assert torch.equal(part.to_dense(), (dense[:, 1:3] if table.heads > 1 else dense)[:, :, q][..., kv])
    assert (part.q_tiles, part.kv_tiles) == (len(q), len(kv))
    assert torch.equal(part.transposed.to_dense(), part.to_dense().transpose(-1, -2))
    pairs = [
        (f, e, k)
        for r in range(part.rows)
        for f, e, k in zip(*(t[part.ptr[r] : part.ptr[r + 1]].tolist() for t in (part.first, part.last, part.kind)))
    ]
    assert all(f <= e for f, e, _ in pairs)


def test_programs_pickle_without_their_callables():
    table = torch.tensor([3, 1, 2])
    for mask in (*MASKS, ls.mask_mod(lambda b, h, q, kv: (table[q % 3] > 1) & (q >= kv))):
        program = mask.traced.program
        again = pickle.loads(pickle.dumps(program))
        assert again.key == program.key
        i = torch.arange(40)
        index = (torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64), i[:, None], i[None])
        captured = mask.traced.captured()
        assert torch.equal(again(*index, *captured), program(*index, *captured))
        assert (again.uses_batch, again.uses_head, again.pointwise) == (program.uses_batch, program.uses_head, program.pointwise)
