"""Masks as values and as mask_mods."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import longspan as ls
from longspan._masks.block_table import BlockTable
from longspan._masks.extent import AttentionSizes, Extent


def dense(mask: Any, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    return create_mask(mask, batch, heads, q_len, kv_len, device="cpu").expand(batch, heads, q_len, kv_len)


Q, KV = torch.arange(11)[:, None], torch.arange(13)[None, :]
IDS = torch.tensor([4, 4, 2, 2, 2, -1, 7, 7, -1, -1, 4])
EXPECTED = [
    (ls.full(), torch.ones(11, 13).bool()),
    (ls.causal(), Q >= KV),
    (ls.sliding_window(3), (Q - KV < 3) & (KV <= Q)),
    (ls.sliding_window(2, 4), (Q - KV < 2) & (KV - Q <= 4)),
    (ls.sliding_window(0, 5), (Q < KV) & (KV - Q <= 5)),
    (ls.prefix(5), (KV < 5).expand(11, 13)),
    (~ls.causal(), Q < KV),
    (ls.causal() | ls.prefix(2), (Q >= KV) | (KV < 2)),
    (ls.causal() & (lambda b, h, q, kv: q % 2 == kv % 2), (Q >= KV) & (Q % 2 == KV % 2)),
    (ls.mask_mod(lambda b, h, q, kv: q == kv) | ~ls.sliding_window(4), (Q == KV) | ~((Q - KV < 4) & (KV <= Q))),
]


@pytest.mark.parametrize(("mask", "want"), EXPECTED, ids=[str(m) for m, _ in EXPECTED])
def test_masks_equal_their_definitions_in_torchs_create_mask(mask: Any, want: Tensor) -> None:
    assert torch.equal(dense(mask, 2, 3, 11, 13), want.expand(2, 3, 11, 13))
    assert torch.equal(mask(torch.tensor(0), torch.tensor(0), Q, KV).expand(11, 13), want), "index tensors broadcast too"


@pytest.mark.parametrize("name", ["full", "causal", "sliding_window", "documents", "prefix", "mask_mod", "selected"])
def test_functions_that_return_masks_are_no_masks(name: str) -> None:
    function, q = getattr(ls, name), torch.randn(1, 2, 5, 16)
    message = rf"expected a mask, got the function longspan\.{name}; call it: longspan\.{name}\("
    with pytest.raises(TypeError, match=message):
        ls.attention(q, q, q, mask=function)
    with pytest.raises(TypeError, match=message):
        ls.causal() & function
    with pytest.raises(TypeError, match=message):
        ls.plan(function, 50, ls.Mesh.abstract(2))


def test_documents_by_ids_in_any_order_with_padding() -> None:
    want = (IDS[:, None] == IDS[None, :]) & (IDS[:, None] >= 0)
    assert torch.equal(dense(ls.documents(ids=IDS), 1, 1, 11, 11)[0, 0], want)
    two = torch.stack([IDS, torch.arange(11) // 4])
    got = dense(ls.documents(ids=two), 2, 1, 11, 11)[:, 0]
    assert torch.equal(got, (two[:, :, None] == two[:, None, :]) & (two[:, :, None] >= 0))


@pytest.mark.parametrize(
    "ids",
    [[4, 4, 4, 0, 0, 9, 9, 9, 9, 2, 2], [-1, 4, 4, 0, 0, -1, -1, 9, 9, 9, -1], [0, 0, -1, -1, 0, 1, 1, 1, 2, -1, -3], [-1] * 11],
    ids=["contiguous", "padding between", "padding within a document", "only padding"],
)
@pytest.mark.parametrize("other", [ls.full(), ls.causal(), ls.sliding_window(4), ls.sliding_window(2, 3)], ids=str)
def test_documents_by_contiguous_ids_compose_with_other_masks(ids: list[int], other: ls.Mask) -> None:
    token = torch.tensor(ids)
    same = (token[:, None] == token[None, :]) & (token >= 0)[:, None]
    for mask in (other & ls.documents(ids=token), (ls.documents(ids=token) & ls.full()) & other):
        assert torch.equal(dense(mask, 1, 1, 11, 11)[0, 0], same & dense(other, 1, 1, 11, 11)[0, 0])
        assert torch.equal(dense(~mask, 1, 1, 11, 11)[0, 0], ~(same & dense(other, 1, 1, 11, 11)[0, 0]))


def test_deep_conjunctions_stay_small() -> None:
    mask = ls.causal() & ls.documents(lengths=[3, 5, 3])
    for n in range(40):
        mask = mask & ls.sliding_window(4 + n)
    assert len(pickle.dumps(mask)) < 100_000
    assert torch.equal(dense(mask, 1, 1, 11, 11), dense(ls.documents(lengths=[3, 5, 3]) & ls.sliding_window(4), 1, 1, 11, 11))


def test_documents_by_lengths_flat_and_per_batch_row() -> None:
    ids = torch.tensor([0, 0, 0, 1, 2, 2])
    for lengths in ([3, 1, 2], torch.tensor([3, 1, 2]), [3, 0, 1, 2]):
        assert torch.equal(dense(ls.documents(lengths), 1, 1, 6, 6)[0, 0], ids[:, None] == ids[None, :])
    rows = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 0, 1, 1, -1, -1]])
    want = (rows[:, :, None] == rows[:, None, :]) & (rows[:, :, None] >= 0)
    assert torch.equal(dense(ls.documents(lengths=[[3, 1, 2], [2, 2]]), 2, 1, 6, 6)[:, 0], want)


def test_prefix_per_batch_row() -> None:
    got = dense(ls.prefix([1, 4]), 2, 1, 3, 5)[:, 0]
    assert torch.equal(got, (torch.arange(5) < torch.tensor([[1], [4]]))[:, None].expand(2, 3, 5))


def test_masks_work_in_torchs_create_block_mask() -> None:
    mask = ls.causal() & ls.documents(lengths=[100, 200, 84])
    block_mask = create_block_mask(mask, None, None, 384, 384, device="cpu")
    table = mask.block_table(384)
    assert table.counts().partial == int(block_mask.kv_num_blocks.sum())
    assert table.counts().full == int(block_mask.full_kv_num_blocks.sum())


def test_a_block_mask_is_a_mask() -> None:
    block_mask = create_block_mask(lambda b, h, q, kv: q + 40 * b >= kv, 2, None, 150, 200, device="cpu")
    both = ls.sliding_window(60) & block_mask
    want = create_mask(lambda b, h, q, kv: (q + 40 * b >= kv) & (q - kv < 60) & (kv <= q), 2, 1, 150, 200, device="cpu")
    assert torch.equal(dense(both, 2, 1, 150, 200), want)
    q, k, v = torch.randn(2, 3, 150, 8), torch.randn(2, 3, 200, 8), torch.randn(2, 3, 200, 8)
    got = ls.attention(q, k, v, mask=block_mask)
    torch.testing.assert_close(got, ls.attention(q, k, v, mask=lambda b, h, q, kv: q + 40 * b >= kv))
    torch.testing.assert_close(ls.attention(q, k, v, mask=both), ls.attention(q, k, v, mask=both, kernel="dense"))


def test_a_block_mask_converts_to_a_mask_and_to_a_table() -> None:
    block_mask = create_block_mask(lambda b, h, q, kv: q + 40 * b >= kv, 2, None, 150, 200, device="cpu", BLOCK_SIZE=64)
    mask = ls.mask_mod(block_mask)
    assert torch.equal(dense(mask, 2, 1, 150, 200), create_mask(lambda b, h, q, kv: q + 40 * b >= kv, 2, 1, 150, 200, device="cpu"))
    table = BlockTable.from_block_mask(block_mask)
    assert (table.q_len, table.kv_len, table.block, table.batch) == (150, 200, (64, 64), 2)
    assert torch.equal(table.to_dense(), mask.block_table(150, 200, 64).to_dense())
    assert torch.equal(
        mask.block_table(150, 200, 32).to_dense(),
        ls.mask_mod(lambda b, h, q, kv: q + 40 * b >= kv).block_table(150, 200, 32, batch=2).to_dense(),
    )


def test_and_or_not_and_bool_of_masks_raise() -> None:
    for expression in (
        lambda: ls.causal() and ls.sliding_window(4),
        lambda: ls.causal() or ls.sliding_window(4),
        lambda: not ls.causal(),
        lambda: bool(ls.full()),
    ):
        with pytest.raises(TypeError, match=r"expected &, \| or ~ to combine masks"):
            expression()


def test_a_mask_has_a_truth_value_while_dynamo_traces() -> None:
    """Dynamo of torch 2.11 evaluates `bool(mask)`. Compiled user code still raises."""
    with tracing(TracingContext(None)):
        assert bool(ls.causal() & ls.full())
    index = torch.arange(5)
    called = torch.compile(lambda i, mask: mask(i, i, i[:, None], i), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(called(index, ls.causal()), torch.ones(5, 5).tril().bool())
    with pytest.raises(TypeError, match=r"expected &, \| or ~ to combine masks"):
        torch.compile(lambda i: (ls.causal() and ls.full())(i, i, i, i), backend="aot_eager")(index)


def test_numpy_integers_and_scalar_tensors_are_accepted_as_integers() -> None:
    pairs = [
        (ls.sliding_window(np.int64(4), np.int32(1)), ls.sliding_window(4, 1)),
        (ls.sliding_window(torch.tensor(4)), ls.sliding_window(4)),
        (ls.prefix(np.uint8(3)), ls.prefix(3)),
        (ls.prefix(torch.tensor(3)), ls.prefix(3)),
        (ls.documents(np.array([4, 7])), ls.documents([4, 7])),
        (ls.documents(np.array([4, 7], dtype=np.uint32)), ls.documents([4, 7])),
        (ls.documents([np.int64(4), np.int64(7)]), ls.documents([4, 7])),
        (ls.documents(ids=IDS.numpy()), ls.documents(ids=IDS)),
    ]
    for mask, want in pairs:
        assert str(mask) == str(want)
        assert torch.equal(dense(mask, 1, 1, 11, 11), dense(want, 1, 1, 11, 11))
        assert mask.traced.program.key == want.traced.program.key
    for mask, want in [
        (ls.prefix(np.array([3, 5])), ls.prefix([3, 5])),
        (ls.documents(np.array([[4, 7], [6, 5]])), ls.documents([[4, 7], [6, 5]])),
        (ls.documents([np.array([4, 7]), np.array([6])]), ls.documents([[4, 7], [6]])),
    ]:
        assert torch.equal(dense(mask, 2, 1, 11, 11), dense(want, 2, 1, 11, 11))
    table = ls.causal().block_table(np.int64(300), torch.tensor(200), np.int32(64))
    assert torch.equal(table.to_dense(), ls.causal().block_table(300, 200, 64).to_dense())


def test_a_mask_copies_a_numpy_array_of_lengths() -> None:
    lengths = np.array([3, 5])
    mask = ls.prefix(lengths)
    lengths[:] = 0
    assert torch.equal(dense(mask, 2, 1, 4, 6), dense(ls.prefix([3, 5]), 2, 1, 4, 6))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_mask_copies_its_tensors(dtype: torch.dtype) -> None:
    lengths, ids = torch.tensor([2, 5], dtype=dtype), torch.tensor([0, 0, 1, 1, 1, 2], dtype=dtype)
    made = [ls.prefix(lengths), ls.documents(lengths=lengths), ls.documents(ids=ids)]
    sizes = [(6, 2), (7, 1), (6, 1)]
    before = [m.block_table(n, block=1, batch=b).to_dense() for m, (n, b) in zip(made, sizes, strict=True)]
    lengths.fill_(3)
    ids.fill_(1)
    for mask, want, (n, b) in zip(made, before, sizes, strict=True):
        assert torch.equal(mask.block_table(n, block=1, batch=b).to_dense(), want)


def test_masks_made_from_lists_are_on_the_cpu_for_any_default_device() -> None:
    with torch.device("meta"):
        made = [ls.prefix([2, 5]), ls.documents(lengths=[2, 4]), ls.documents(ids=[[0, 0, 1], [0, 1, 1]])]
    for mask in made:
        assert all(t.device.type == "cpu" for t in vars(mask).values() if isinstance(t, Tensor))


def test_a_window_after_the_query_equals_the_dense_kernel() -> None:
    q, k, v = (torch.randn(2, 3, 150, 8) for _ in range(3))
    got, want = (ls.attention(q, k, v, mask=ls.sliding_window(0, 20), kernel=kernel) for kernel in ("cpu", "dense"))
    torch.testing.assert_close(got, want)
    assert torch.equal(got[:, :, -1], torch.zeros(2, 3, 8))


def test_masks_can_be_copied_and_pickled() -> None:
    mask = (ls.causal() | ls.prefix([2, 3])) & ~ls.sliding_window(4) & ls.documents(lengths=[[5, 6], [11]])
    want = dense(mask, 2, 1, 11, 11)
    assert mask.traced.program.pointwise
    for copied in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert torch.equal(dense(copied, 2, 1, 11, 11), want)


BAD = [
    (lambda: ls.sliding_window(0), ValueError, "left must be >= 1, got 0 where right is 0"),
    (lambda: ls.sliding_window(-1, 5), ValueError, "left must be >= 0, got -1"),
    (lambda: ls.sliding_window(True), TypeError, "left must be an int, got bool"),
    (lambda: ls.sliding_window(torch.tensor([4])), TypeError, "left must be an int, got Tensor"),
    (lambda: ls.sliding_window(torch.tensor(True)), TypeError, "left must be an int, got Tensor"),
    (lambda: ls.prefix(2.5), TypeError, "length must be an int, got float"),
    (lambda: ls.prefix(np.array([1.5])), ValueError, r"integers of shape \[B\], got torch.float64"),
    (lambda: ls.documents(np.ones((2, 3, 4), dtype=int)), ValueError, r"\[B, documents\], got \(2, 3, 4\)"),
    (lambda: ls.documents(ids=[]), ValueError, "ids must be integers"),
    (lambda: ls.sliding_window(3, -1), ValueError, "right must be >= 0, got -1"),
    (lambda: ls.sliding_window(2.5), TypeError, "left must be an int, got float"),
    (lambda: ls.prefix(-3), ValueError, "length must be >= 0, got -3"),
    (lambda: ls.prefix([[1, 2]]), ValueError, r"shape \[B\]"),
    (lambda: ls.documents(), TypeError, "either lengths or ids"),
    (lambda: ls.documents([3], ids=IDS), TypeError, "either lengths or ids"),
    (lambda: ls.documents([3, -1]), ValueError, "must be >= 0"),
    (lambda: ls.documents([]), ValueError, "list of integers"),
    (lambda: ls.documents(ids=torch.zeros(3)), ValueError, "ids must be integers"),
    (lambda: ls.mask_mod(3), TypeError, "expected a callable"),
    (lambda: ls.causal() & 3, TypeError, "unsupported operand"),
    (lambda: (ls.documents([3]) & ls.documents([4])).block_table(3), ValueError, "different sizes, q_len=3 and q_len=4"),
    (lambda: ls.documents([3]).block_table(4), ValueError, "made for q_len=3, got q_len=4"),
    (lambda: ls.causal().block_table(-1), ValueError, "lengths must be >= 0"),
]


@pytest.mark.parametrize(("make", "error", "match"), BAD, ids=[m for _, _, m in BAD])
def test_bad_masks_raise(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


PACKED = ls.documents([3, 1])
ROWS = ls.documents([[3, 1], [2, 2]])
WINDOW, AHEAD, CAUSAL = ls.sliding_window(3), ls.sliding_window(5, 2), ls.causal()
CUSTOM = ls.mask_mod(operator.gt)  # never called
# (mask, value_key, reads_copies, left_reach, is_causal, extent, text)
PROPERTIES = [
    (ls.full(), ("full",), True, None, False, {}, "full()"),
    (CAUSAL, ("causal",), True, None, True, {}, "causal()"),
    (WINDOW, ("window", 3, 0), True, 3, True, {}, "sliding_window(3, 0)"),
    (AHEAD, ("window", 5, 2), True, 5, False, {}, "sliding_window(5, 2)"),
    (ls.prefix(2), ("prefix", 2), True, None, False, {}, "prefix(2)"),
    (ls.prefix([2, 3]), None, True, None, False, {"batch": 2}, "prefix(…)"),
    (PACKED, None, True, None, False, {"q_len": 4, "kv_len": 4}, "documents(4 tokens)"),
    (ROWS, None, True, None, False, {"q_len": 4, "kv_len": 4, "batch": 2}, "documents(4 tokens)"),
    (CUSTOM, None, False, None, False, {}, "mask_mod(gt)"),
    (~WINDOW, ("~", ("window", 3, 0)), True, None, False, {}, "~sliding_window(3, 0)"),
    (~CUSTOM, None, False, None, False, {}, "~mask_mod(gt)"),
    (~ROWS, None, True, None, False, {"q_len": 4, "kv_len": 4, "batch": 2}, "~documents(4 tokens)"),
    (WINDOW & AHEAD, ("&", ("window", 3, 0), ("window", 5, 2)), True, 3, True, {}, "(sliding_window(3, 0) & sliding_window(5, 2))"),
    (AHEAD & ls.full(), ("&", ("window", 5, 2), ("full",)), True, 5, False, {}, "(sliding_window(5, 2) & full())"),
    (CAUSAL & ls.full(), ("&", ("causal",), ("full",)), True, None, True, {}, "(causal() & full())"),
    (WINDOW | AHEAD, ("|", ("window", 3, 0), ("window", 5, 2)), True, 5, False, {}, "(sliding_window(3, 0) | sliding_window(5, 2))"),
    (WINDOW | CAUSAL, ("|", ("window", 3, 0), ("causal",)), True, None, False, {}, "(sliding_window(3, 0) | causal())"),
    (CAUSAL | WINDOW, ("|", ("causal",), ("window", 3, 0)), True, None, False, {}, "(causal() | sliding_window(3, 0))"),
    (CAUSAL & PACKED, None, True, None, True, {"q_len": 4, "kv_len": 4}, "(causal() & documents(4 tokens))"),
    (PACKED | CUSTOM, None, False, None, False, {"q_len": 4, "kv_len": 4}, "(documents(4 tokens) | mask_mod(gt))"),
    (CUSTOM & WINDOW, None, False, 3, True, {}, "(mask_mod(gt) & sliding_window(3, 0))"),
    (ls.prefix([1, 2]) & ROWS, None, True, None, False, {"q_len": 4, "kv_len": 4, "batch": 2}, "(prefix(…) & documents(4 tokens))"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "value_key", "reads_copies", "left_reach", "is_causal", "extent", "text"), PROPERTIES)
def test_properties_of_masks_and_combinations(
    mask: Any, value_key: Any, reads_copies: bool, left_reach: int | None, is_causal: bool, extent: dict[str, int], text: str
) -> None:
    assert (mask.value_key, mask.reads_copies, mask.left_reach, str(mask)) == (value_key, reads_copies, left_reach, text)
    assert mask.is_causal == is_causal and mask.extent == Extent(**extent) and not mask.has_selection and not mask.is_static


def test_documents_under_a_causal_mask_look_up_their_first_token_only() -> None:
    for packed in (PACKED & CAUSAL, CAUSAL & PACKED, (PACKED & ls.full()) & WINDOW):
        assert len(packed.traced.captured()) == 1
    for whole in (PACKED, PACKED & AHEAD, PACKED | CAUSAL, ~PACKED & CAUSAL):
        assert len(whole.traced.captured()) == 2


def test_combinations_with_a_selection_take_the_form_of_a_call() -> None:
    chosen = ls.selected(torch.tensor([[[[0], [1]]]]), 4)
    sizes = AttentionSizes(q_len=8, kv_len=8, batch=1, heads=2)
    for mask, text in (
        (chosen & CAUSAL, "(selected(4 keys, 4 queries) & causal())"),
        (WINDOW | chosen, "(sliding_window(3, 0) | selected(4 keys, 4 queries))"),
        (~chosen, "~selected(4 keys, 4 queries)"),
    ):
        assert mask.has_selection and str(mask.for_sizes(sizes)) == text
        listed = mask.for_sizes(sizes, as_table=False)
        assert listed.has_selection and str(listed) == str(mask)
    for mask in (CAUSAL & PACKED, ~PACKED, PACKED):
        assert mask.for_sizes(sizes) is mask


def test_tables_have_lengths_from_0_and_blocks_from_1() -> None:
    assert ls.prefix(0).block_table(4, block=4).counts() == (1, 0, 0) and ls.causal().block_table(0, 3).rows == 0
    assert ls.causal().block_table(3, 0).kv_tiles == 0
    assert ls.causal().block_table(3, 2, block=1).counts() == (1, 0, 5) and ls.full().block_table(4, 6, block=[2, 3]).block == (2, 3)
    for q_len, kv_len, block in ((-1, 3, 4), (3, -1, 4), (3, 3, 0), (3, 3, (4, 0)), (3, 3, (0, 4))):
        with pytest.raises(ValueError, match="lengths must be >= 0 and blocks >= 1"):
            ls.causal().block_table(q_len, kv_len, block)
    per_row, per_head = ls.prefix([2, 4]), ls.mask_mod(lambda b, h, q, kv: kv < h)
    assert (per_row.block_table(4, 8).batch, per_head.block_table(4, 8).heads, per_head.block_table(4, 8, heads=3).heads) == (2, 1, 3)
    assert (per_row & per_head).block_table(4, 8, heads=3, batch=2).to_dense().shape == (2, 3, 1, 1)


def test_functions_combine_with_masks_from_either_side_in_order() -> None:
    function: Any = operator.gt
    combined = [function & CAUSAL, CAUSAL & function, function | CAUSAL, CAUSAL | function]
    names = ["(mask_mod(gt) & causal())", "(causal() & mask_mod(gt))", "(mask_mod(gt) | causal())", "(causal() | mask_mod(gt))"]
    assert [str(mask) for mask in combined] == names
