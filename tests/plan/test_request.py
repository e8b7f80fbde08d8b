"""Arguments of `longspan.plan`, one by one: what is legal, and the message for what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.timeline import Conditions
from longspan._planner import request
from longspan._planner.request import CallSizes, PlanRequest, RequestedOptions

MESH = ls.Mesh.abstract(4)
ROWS = ls.causal() & ls.documents(lengths=[[6, 4], [3, 7]])


def made(masks: Any = None, seq_len: Any = 10, sizes: CallSizes | None = None, **options: Any) -> PlanRequest:
    return PlanRequest.of(masks or [ls.causal()], seq_len, MESH, sizes or CallSizes(), RequestedOptions(**options))


def layout(length: int, ranks: int = 4, rows: int = 1) -> ls.Layout:
    one = ((((0, length - ranks + 1),)), *(((length - ranks + i, 1),) for i in range(1, ranks)))
    return ls.Layout(length=length, rows=(one,) * rows)


def test_a_request_has_defaults() -> None:
    got = made()
    assert (got.q_len, got.kv_len, got.layout, got.strategy, got.stages, got.overlap) == (10, 10, "auto", "auto", None, None)
    assert got.grad_reduce_dtype is got.cluster is None and got.conditions == Conditions() and got.profile.name == "h200"
    assert made(cluster="h100").profile is made(cluster="h100").cluster is cluster("h100") and got.mesh is MESH and not got.per_row


@pytest.mark.parametrize(("given", "lengths"), [(1, (1, 1)), (7, (7, 7)), ((3, 5), (3, 5)), ([5, 3], (5, 3)), ((1, 1), (1, 1))])
def test_lengths_are_one_number_or_a_pair(given: Any, lengths: tuple[int, int]) -> None:
    assert request._checked_lengths(given) == lengths


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "5", None, (3,), (3, 4, 5), (3, 0), (0, 3), (3, True), ()])
def test_other_lengths_raise(given: Any) -> None:
    with pytest.raises(ValueError, match=r"plan: seq_len must be an int of 1 or more, or \(q_len, kv_len\), got "):
        request._checked_lengths(given)


@pytest.mark.parametrize("name", ["batch", "heads", "kv_heads", "head_dim"])
@pytest.mark.parametrize("size", [0, -3, True, 1.0, "2"])
def test_sizes_that_are_not_counts_raise(name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=rf"plan: {name} must be an int of 1 or more, got {size!r}"):
        CallSizes(**{name: size})
    assert getattr(CallSizes(**{name: 1}), name) == 1


def test_query_heads_are_a_multiple_of_kv_heads() -> None:
    assert CallSizes(heads=6, kv_heads=3) and CallSizes(kv_heads=4) and CallSizes(heads=4)
    for heads, kv_heads in ((6, 4), (2, 4)):
        with pytest.raises(ValueError, match=f"plan: heads must be a multiple of kv_heads, got {heads} and {kv_heads}"):
            CallSizes(heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 1, 1, 128)),
        ({"batch": 3, "heads": 6}, (3, 6, 6, 128)),
        ({"batch": 3, "heads": 6, "kv_heads": 2, "head_dim": 64}, (3, 6, 2, 64)),
        ({"kv_heads": 2}, (1, 1, 2, 128)),
    ],
)
def test_unknown_sizes_count_as_1_and_the_head_dim_as_128(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    got = CallSizes(**sizes).shape
    assert (got.batch, got.heads, got.kv_heads, got.head_dim, got.element, got.grad_element) == (*shape, 2, 4)


def test_sizes_are_completed_by_masks_that_know_them() -> None:
    assert CallSizes().completed_by(ROWS) == CallSizes(batch=2)
    assert CallSizes(batch=5, head_dim=8).completed_by(ls.causal()) == CallSizes(batch=5, head_dim=8)
    assert made([ls.causal(), ROWS], sizes=CallSizes(heads=3)).sizes == CallSizes(batch=2, heads=3)


def test_batch_rows_get_layouts_where_there_are_several_and_a_mask_depends_on_the_row() -> None:
    by_row = ls.mask_mod(lambda b, h, q, kv: q + b >= kv)
    assert made([ls.causal(), by_row], sizes=CallSizes(batch=2)).per_row and made([ROWS]).per_row
    assert not made([by_row], sizes=CallSizes(batch=1)).per_row and not made([ls.causal()], sizes=CallSizes(batch=2)).per_row
    with pytest.raises(ValueError, match="depends on the batch: say batch=… when planning"):
        made([by_row])
    with pytest.raises(ValueError, match="depends on the head: say heads=… when planning"):
        made([ls.mask_mod(lambda b, h, q, kv: q + h >= kv)], sizes=CallSizes(batch=2))


def test_masks_are_copied_to_the_host_without_gradients() -> None:
    ids = torch.arange(10.0, requires_grad=True)
    planned = request.planned_mask(ls.mask_mod(lambda b, h, q, kv: ids[q] >= ids[kv]), 10, 10, CallSizes())
    (captured,) = planned.captured
    assert torch.equal(captured, ids.detach()) and not captured.requires_grad and captured.data_ptr() != ids.data_ptr()
    full = request.planned_mask(ls.full(), 10, 10, CallSizes())
    assert full.program is None and full.captured == () and full.text == "full()"


def test_layouts_are_names_or_one_or_two_layouts() -> None:
    one, other = layout(10), layout(7)
    assert made(layout="head_tail").layout == "head_tail" and made(layout=one).layout == (one, one)
    assert made([ls.full()], (10, 7), layout=(one, other)).layout == (one, other)
    three = layout(10, rows=3)
    assert made(sizes=CallSizes(batch=3), layout=three).layout == (three, three)
    assert made(sizes=CallSizes(batch=3), layout=one).layout == (one, one) and made(layout=layout(10, rows=1))


@pytest.mark.parametrize(
    ("given", "lengths", "sizes", "error", "message"),
    [
        ("spiral", 10, {}, ValueError, "layout: expected one of 'contiguous', .* or a Layout, got 'spiral'"),
        (5, 10, {}, TypeError, r"expected a name, a Layout or a pair of Layouts \(queries, keys\), got int"),
        ((layout(10),), 10, {}, TypeError, "got tuple"),
        ([layout(10), layout(10)], 10, {}, TypeError, "got list"),
        ((layout(10), "auto"), 10, {}, TypeError, "got tuple"),
        (layout(9), 10, {}, ValueError, "layout of queries: expected 10 tokens over 4 ranks, got 9 over 4"),
        (layout(10, 3), 10, {}, ValueError, "layout of queries: expected 10 tokens over 4 ranks, got 10 over 3"),
        ((layout(10), layout(8)), (10, 7), {}, ValueError, "layout of keys: expected 7 tokens over 4 ranks, got 8 over 4"),
        (layout(10, rows=2), 10, {"batch": 3}, ValueError, "layout of queries: expected 1 batch row or batch=3 of them, got 2"),
        (layout(10, rows=2), 10, {}, ValueError, "layout of queries: expected 1 batch row or batch=None of them, got 2"),
    ],
)
def test_layouts_that_do_not_fit_raise(given: Any, lengths: Any, sizes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made([ls.full()], lengths, CallSizes(**sizes), layout=given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": 3}, TypeError, "strategy: expected a name or a Schedule, got int"),
        ({"stages": 0}, ValueError, "plan: stages must be 1 or more, or None, got 0"),
        ({"stages": True}, ValueError, "plan: stages must be 1 or more, or None, got True"),
        ({"overlap": 1}, TypeError, "plan: overlap must be True, False or None, got 1"),
        ({"grad_reduce_dtype": "half"}, TypeError, "grad_reduce_dtype must be a torch.dtype such as torch.bfloat16, got 'half'"),
        ({"grad_reduce_dtype": torch.int8}, ValueError, "grad_reduce_dtype must be a floating-point dtype, got torch.int8"),
        ({"conditions": {3: 2.0}}, TypeError, "conditions must be Conditions or None, got {3: 2.0}"),
        ({"conditions": Conditions(stragglers={4: 2.0})}, ValueError, "plan: conditions: expected ranks below 4, got 4"),
        ({"conditions": Conditions(stragglers={1: 2.0}, slow_links={9: 2.0})}, ValueError, "expected ranks below 4, got 9"),
    ],
)
def test_other_options_that_are_not_legal_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**options)


def test_legal_options_are_kept() -> None:
    slow = Conditions(stragglers={3: 2.0}, slow_links={0: 3.0})
    got = made(strategy="ring", stages=1, overlap=False, grad_reduce_dtype=torch.bfloat16, conditions=slow)
    assert (got.strategy, got.stages, got.overlap, got.grad_reduce_dtype) == ("ring", 1, False, torch.bfloat16)
    assert got.conditions is slow and made(overlap=True).overlap is True
