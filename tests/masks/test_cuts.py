"""Tables with custom tile edges and tables of selected tiles, as used for shards of a sequence."""

import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan._masks.block_table import EMPTY, FULL, PARTIAL
from longspan._masks.classify import TableShape, classify

MASKS = [
    ls.causal(),
    ls.causal() & ls.sliding_window(37),
    ls.causal() & ls.documents(lengths=[100, 3, 57, 140]),
    ls.causal() | ls.prefix(50),
    ls.mask_mod(lambda b, h, q, kv: (q * (h + 2) + kv + b) % 11 < 4),
]


@st.composite
def edges(draw, length, block):
    """Strategy for tile edges of a sequence: no tile is wider than `block`, and many have full width."""
    cuts = [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + draw(st.sampled_from([block, block, block, 1, block // 2, block - 1]))))
    return torch.tensor(cuts)


@settings(max_examples=120)
@given(st.data())
def test_tables_with_custom_tile_edges_equal_brute_force(data):
    mask = data.draw(st.sampled_from(MASKS))
    q_edges, kv_edges = data.draw(edges(300, 16)), data.draw(edges(300, 24))
    traced = mask.traced
    shape = TableShape(q_len=300, kv_len=300, block=(16, 24), batch=2, heads=3, edges=(q_edges, kv_edges))
    table = classify(traced.program, traced.captured(), shape, levels=(4, 1))
    b, h = torch.arange(table.batch).view(-1, 1, 1, 1), torch.arange(table.heads).view(1, -1, 1, 1)
    dense = mask(b, h, torch.arange(300).view(-1, 1), torch.arange(300)).expand(table.batch, table.heads, 300, 300)
    kinds = table.to_dense()
    for i in range(table.q_tiles):
        for j in range(table.kv_tiles):
            q0, q1, k0, k1 = int(q_edges[i]), int(q_edges[i + 1]), int(kv_edges[j]), int(kv_edges[j + 1])
            tile = dense[:, :, q0:q1, k0:k1].reshape(table.batch, table.heads, -1)
            full_size = q1 - q0 == 16 and k1 - k0 == 24
            expected = torch.where(tile.all(-1) & full_size, FULL, torch.where(tile.any(-1), PARTIAL, EMPTY))
            assert torch.equal(kinds[:, :, i, j].long(), expected), (i, j)


@settings(max_examples=80)
@given(st.data())
def test_selecting_tiles_equals_indexing_the_dense_table(data):
    mask = data.draw(st.sampled_from(MASKS))
    table = mask.block_table(300, block=(16, 12), batch=2, heads=3)
    q = torch.tensor(data.draw(st.lists(st.integers(0, table.q_tiles - 1), unique=True)), dtype=torch.int64)
    kv = data.draw(st.lists(st.integers(0, table.kv_tiles - 1), unique=True))
    kv = torch.tensor(sorted(kv) if data.draw(st.booleans()) else kv, dtype=torch.int64)
    heads = range(1, 3)
    selection = table.select(q, kv, heads=heads)
    dense = table.to_dense()
    assert torch.equal(selection.to_dense(), (dense[:, 1:3] if table.heads > 1 else dense)[:, :, q][..., kv])
    assert (selection.q_tiles, selection.kv_tiles) == (len(q), len(kv))
    assert torch.equal(selection.transposed.to_dense(), selection.to_dense().transpose(-1, -2))
    runs = [
        (f, e, k)
        for r in range(selection.rows)
        for f, e, k in zip(
            *(t[selection.ptr[r] : selection.ptr[r + 1]].tolist() for t in (selection.first, selection.last, selection.kind))
        )
    ]
    assert all(f <= e for f, e, _ in runs)


def test_a_pickled_program_keeps_its_key_and_values():
    table = torch.tensor([3, 1, 2])
    for mask in (*MASKS, ls.mask_mod(lambda b, h, q, kv: (table[q % 3] > 1) & (q >= kv))):
        program = mask.traced.program
        unpickled = pickle.loads(pickle.dumps(program))
        assert unpickled.key == program.key
        i = torch.arange(40)
        index = (torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64), i[:, None], i[None])
        captured = mask.traced.captured()
        assert torch.equal(unpickled(*index, *captured), program(*index, *captured))
        assert (unpickled.uses_batch, unpickled.uses_head, unpickled.pointwise) == (
            program.uses_batch,
            program.uses_head,
            program.pointwise,
        )
