"""Parts of the drop-in by themselves: forms of masks, known sequences, DTensor results, hooks of modules, caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

import longspan as ls
from longspan._comm.mesh import as_mesh
from longspan._dropin import dispatcher, dtensor, mask_keys, negotiate
from longspan._dropin.attn_mask import CallShape, MaskPart, agreed_form, as_mask_mod, check_fits
from longspan._dropin.context import _only_reads
from longspan._dropin.dispatcher import AttentionDispatcher
from longspan._dropin.global_layout import SequenceLayouts, chunked, in_rank_order, layout_rule
from longspan._dropin.intercept import AttentionMode, intercepting
from longspan._dropin.negotiate import LocalCall, _check_mask_size, _is_surely_whole
from longspan.testing import virtual_world

RANKS, RANK = 3, 1


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


def call_shape(q: list[int], kv: list[int]) -> CallShape:
    """Sequences of which rank r holds q[r] queries and kv[r] keys."""
    return CallShape(mesh=ls.Mesh.abstract(len(q)), q=in_rank_order(q), kv=in_rank_order(kv), batch=2, heads=5)


# ---------------------------------------------------------------------------------------------------------------- forms of masks


def test_sizes_of_a_mask_say_which_forms_it_may_have() -> None:
    shape = call_shape([4, 3], [6, 5])  # 7 queries, 11 keys
    want = {
        (7, 11): {"whole"}, (1, 11): {"whole"}, (7, 1): {"whole"}, (1, 1): {"whole"}, (4, 11): {"query_rows"}, (4, 1): {"query_rows"},
        (1, 6): {"kv_flags"}, (4, 6): set(), (7, 6): set(), (3, 11): set(), (1, 5): set(),
    }  # fmt: skip
    assert {size: shape.forms(0, *size) for size in want} == want
    assert shape.forms(1, 3, 11) == {"query_rows"} and shape.forms(1, 1, 5) == {"kv_flags"}
    one = call_shape([1, 6], [1, 10])
    assert one.forms(0, 1, 1) == {"whole", "query_rows", "kv_flags"} and one.forms(0, 1, 11) == {"whole", "query_rows"}
    check_fits(torch.zeros(2, 5, 4, 11), shape)
    with pytest.raises(ValueError, match=r"\(2, 5, 7, 11\).*\(2, 5, 4, 11\).*\(2, 5, 1, 6\).*got \(1, 1, 4, 6\)"):
        check_fits(torch.zeros(1, 1, 4, 6), shape)


def test_only_sizes_of_one_form_on_every_rank_are_surely_whole() -> None:
    shape = call_shape([4, 3], [6, 5])
    assert _is_surely_whole(shape, (7, 11)) and _is_surely_whole(shape, (1, 1)) and not _is_surely_whole(shape, (4, 11))
    for q, kv in (([6, 1], [6, 5]), ([7, 0], [6, 5]), ([4, 3], [10, 1]), ([4, 3], [0, 11])):
        assert not _is_surely_whole(call_shape(q, kv), (7, 11))


def test_ranks_agree_on_one_form_or_all_raise() -> None:
    shape, one_each = call_shape([4, 3], [6, 5]), call_shape([1, 1], [2, 3])
    assert agreed_form([MaskPart(7, 11, (1,)), MaskPart(7, 11, (2,))], shape) == "whole"
    assert agreed_form([MaskPart(4, 11, (1,)), MaskPart(3, 11, (2,))], shape) == "query_rows"
    assert agreed_form([MaskPart(1, 6, (1,)), MaskPart(1, 5, (2,))], shape) == "kv_flags"
    assert agreed_form([MaskPart(1, 5, (1,)), MaskPart(1, 5, (1,))], one_each) == "whole"
    assert agreed_form([MaskPart(1, 5, (1,)), MaskPart(1, 5, (2,))], one_each) == "query_rows"
    with pytest.raises(ValueError, match="rank 0 4 × 11, rank 1 7 × 11, which differ in form"):
        agreed_form([MaskPart(4, 11, (1,)), MaskPart(7, 11, (1,))], shape)
    single = call_shape([1, 1], [1, 1])
    with pytest.raises(ValueError, match="which may be rows of queries or flags of keys"):
        agreed_form([MaskPart(1, 1, (1,)), MaskPart(1, 1, (2,))], single)


def test_a_call_in_numbers_has_lengths_mask_size_and_digest() -> None:
    q, k = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 6, 5)
    digest = "01" + "00" * 7 + "ff" * 8 + "00" * 7 + "01" + "02" + "00" * 7
    numbers = LocalCall(q=q, k=k, v=k, mask_size=(7, 8), digest=digest).as_numbers()
    assert numbers == [4, 6, 7, 8, 1, -1, 2**56, 2]
    assert LocalCall(q=q, k=k, v=k).as_numbers() == [4, 6, -1, -1, 0, 0, 0, 0]


def test_a_block_mask_of_another_size_raises_and_names_the_rank() -> None:
    shape, q = call_shape([4, 3], [6, 5]), torch.zeros(2, 5, 4, 8)
    local = LocalCall(q=q, k=q, v=q)
    _check_mask_size(shape, local, {0: (7, 11), 1: negotiate.NO_SIZE})
    for size in ((4, 11), (7, 6)):
        with pytest.raises(ValueError, match=f"7 queries by 11 keys, got {size[0]} by {size[1]} on rank 1"):
            _check_mask_size(shape, local, {0: (7, 11), 1: size})


@pytest.mark.parametrize("visible", [True, False])
def test_a_mask_of_one_element_is_for_all_pairs(visible: bool) -> None:
    table = as_mask_mod(torch.full((1, 1, 1, 1), visible)).block_table(6, 9)
    assert int(table.ptr[-1]) == int(visible)


# -------------------------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize(("length", "ranks"), [(10, 3), (2, 4), (9, 3), (5, 4)])
def test_chunked_is_the_layout_of_torch_chunk(length: int, ranks: int) -> None:
    parts = [part.tolist() for part in torch.arange(length).chunk(ranks)]
    parts += [[]] * (ranks - len(parts))
    assert [chunked(length, ranks).positions(rank).tolist() for rank in range(ranks)] == parts


def test_rules_for_layouts() -> None:
    assert layout_rule("contiguous")(8, 2).positions(0).tolist() == [0, 1, 2, 3]
    fixed = in_rank_order([2, 5])
    assert layout_rule(fixed)(7, 2) is fixed and layout_rule(chunked) is chunked
    for length, ranks in ((8, 2), (7, 3)):
        with pytest.raises(ValueError, match="expected a sequence of 7 tokens over 2 ranks"):
            layout_rule(fixed)(length, ranks)
    with pytest.raises(ValueError, match="expected 'contiguous', 'head_tail' or a Layout, got 'by_work'"):
        layout_rule("by_work")
    with pytest.raises(TypeError, match="got int"):
        layout_rule(3)  # type: ignore[arg-type]


def test_sequences_are_recognised_by_local_lengths_or_counts() -> None:
    known = SequenceLayouts(ls.Mesh.abstract(2), chunked, [7, 12])
    assert known.distinguishable and known.of_local_length("query", 4).length == 7 and known.of_local_length("query", 6).length == 12
    assert known.of_counts("key", [4, 3]).length == 7
    for counts in ([3, 4], [5, 5]):
        with pytest.raises(
            ValueError, match=rf"key: expected .* rank 0 holds 4 of 7, 6 of 12 tokens, got \[{counts[0]}, {counts[1]}\] tokens"
        ):
            known.of_counts("key", counts)
    with pytest.raises(ValueError, match="got 12 tokens, the length of a whole sequence: shard the tensor"):
        known.of_local_length("query", 12)
    with pytest.raises(ValueError, match=r"got 5 tokens\. List"):
        known.of_local_length("query", 5)
    assert not SequenceLayouts(ls.Mesh.abstract(2), chunked, [7, 8]).distinguishable  # rank 0 holds 4 of both
    empty = SequenceLayouts(ls.Mesh.abstract(2), "head_tail", [])
    assert not empty.distinguishable and empty.of_counts("key", [3, 0]).positions(0).tolist() == [0, 1, 2]
    fixed = in_rank_order([2, 5])
    assert SequenceLayouts(ls.Mesh.abstract(2), fixed, []).by_length == {7: fixed}
    assert known.add(in_rank_order([1, 6])) == chunked(7, 2)


# ------------------------------------------------------------------------------------------------------------------- dispatchers


def test_auto_is_the_exchange_of_the_mesh() -> None:
    one, two = ls.Mesh.abstract(4), ls.Mesh.abstract((2, 2), axis_names=("ring", "ulysses"))
    made = [
        AttentionDispatcher(m, layout="contiguous", strategy=s)
        for m in (one, two)
        for s in ("auto", "ulysses_ring" if m is two else "ring")
    ]  # type: ignore[arg-type]
    assert [d.strategy for d in made] == ["exchange", "ring", "ulysses_exchange", "ulysses_ring"]
    assert [d._queries_stay for d in made] == [True, True, False, False]
    assert not AttentionDispatcher(one, layout="contiguous", strategy="ulysses")._queries_stay


def test_the_last_plans_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_PLANS", 2)

    def run(mesh: Any) -> None:
        attend = AttentionDispatcher(mesh, layout="contiguous")
        for length in (3, 4, 5):
            q = torch.randn(1, 1, length, 2)
            torch.testing.assert_close(attend.sdpa(q, q, q), F.scaled_dot_product_attention(q, q, q))
        assert len(attend._plans) == 2 and [p.layout.length for p in attend._plans.values()] == [4, 5]

    virtual_world(1).run(run)


def test_shards_of_tensors_that_have_no_such_dim_or_rows_raise() -> None:
    layout = ls.plan(ls.full(), 6, ls.Mesh.abstract(2)).layout
    made = AttentionDispatcher(ls.Mesh.abstract(2), layout=layout)
    for x, dim in ((torch.zeros(6), 1), (torch.zeros(6), -2), ([6], 0)):
        with pytest.raises(ValueError, match="shard: expected a tensor and one of its dims"):
            made.shard(x, dim)  # type: ignore[arg-type]
    assert made.shard(torch.arange(6), -1).tolist() == made.positions(6).tolist() == layout.positions(0).tolist()
    rows = type(layout)(length=2, rows=(*in_rank_order([1, 1]).rows, *in_rank_order([1, 1]).rows))
    made = AttentionDispatcher(ls.Mesh.abstract(2), layout=rows)
    for x, dim in ((torch.zeros(2, 2), 0), (torch.zeros(2, 2), -2), (torch.zeros(3, 2), 1)):
        with pytest.raises(ValueError, match="expected dim 0 to be the batch of 2 rows"):
            made.shard(x, dim)
    assert made.shard(torch.zeros(2, 2), 1).shape == (2, 1)


def test_results_that_flex_attention_returns_are_those_asked_for() -> None:
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64)

    def run(mesh: Any) -> None:
        attend = AttentionDispatcher(mesh, layout="contiguous").flex
        want, lse = flex_attention(q, q, q, return_lse=True)
        assert isinstance(attend(q, q, q), Tensor)
        torch.testing.assert_close(attend(q, q, q, return_lse=True), (want, lse))
        for asked in ((True, False), (False, True), (True, True), (False, False)):
            out, aux = attend(q, q, q, return_aux=AuxRequest(*asked))
            torch.testing.assert_close(out, want)
            assert isinstance(aux, AuxOutput) and (aux.lse is not None, aux.max_scores is not None) == asked
        with pytest.raises(ValueError, match="return_lse or return_aux, got both"):
            attend(q, q, q, return_lse=True, return_aux=AuxRequest())
        with pytest.raises(ValueError, match="expected 4 dims"):
            attend(q, q[0], q[0])
        with pytest.raises(ValueError, match="key: expected 2 heads as in query, got 1"):
            attend(q, q[:, :1], q[:, :1])

    virtual_world(1).run(run)


def test_functions_that_write_or_set_attributes_do_not_only_read() -> None:
    assert _only_reads(torch.add, {}) and _only_reads(torch.Tensor.__add__, {}) and _only_reads(torch.Tensor.__getitem__, {})
    assert not _only_reads(torch.add, {"out": None}) and not _only_reads(torch.Tensor.add_, {}) and not _only_reads(object(), {})
    for func in (torch.Tensor.__iadd__, torch.Tensor.__setitem__, torch.Tensor.data.__get__, torch.Tensor.backward):
        assert not _only_reads(func, {}), func


def test_old_digests_are_dropped_and_unchanged_tensors_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_keys, "MAX_TENSORS", 2)
    keys, tensors = mask_keys.MaskKeys(), [torch.arange(n) for n in (2, 3, 4)]
    digests = [keys.digest(t) for t in tensors]
    assert len(set(digests)) == 3 and list(keys._digests) == [id(t) for t in tensors[1:]]
    monkeypatch.setattr(mask_keys, "digest_of", lambda tensors: "read again")
    assert keys.digest(tensors[2]) == digests[2] and keys.digest(tensors[0]) == "read again"
    tensors[2].add_(1)
    assert keys.digest(tensors[2]) == "read again"
    floats = torch.zeros(3)
    assert keys.digest(floats) == "read again" and id(floats) not in keys._digests


def test_multi_head_attention_that_needs_weights_raises_and_otherwise_calls_sdpa() -> None:
    calls: list[Any] = []

    def sdpa(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return F.scaled_dot_product_attention(*args, **kwargs)

    attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 5, 4)
    want = attention(x, x, x, need_weights=False)[0]
    with intercepting(AttentionMode(sdpa=sdpa)):
        torch.testing.assert_close(attention(x, x, x, need_weights=False)[0], want)
        assert len(calls) == 1
        with pytest.raises(ValueError, match="expected need_weights=False, got True"):
            attention(x, x, x)


# ---------------------------------------------------------------------------------------------------------------------- DTensors


def test_results_are_placed_like_the_query(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.zeros(2, 4, 6, 3), mesh, [Shard(2)], run_check=False)
    out, (lse, none) = dtensor.placed_like((torch.zeros(2, 4, 6, 5), (torch.zeros(2, 4, 6), None)), x)
    assert (out.shape, out.stride(), out.placements) == ((2, 4, 18, 5), (360, 90, 5, 1), (Shard(2),)) and none is None
    assert (lse.shape, lse.stride()) == ((2, 4, 18), (72, 18, 1))
    aux = dtensor.placed_like(AuxOutput(lse=torch.zeros(2, 4, 6)), x)
    assert aux.lse.shape == (2, 4, 18) and aux.max_scores is None


def test_only_dtensors_along_the_sequence_of_the_mesh_are_taken(mesh: DeviceMesh) -> None:
    attention_mesh, local = as_mesh(mesh), torch.zeros(2, 4, 6, 3)
    x, heads = (DTensor.from_local(local, mesh, [Shard(dim)], run_check=False) for dim in (2, 1))
    assert dtensor.mesh_dim_of(attention_mesh, x) == 0

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, *, flag: bool) -> Tensor:
        assert type(q) is type(k) is type(v) is type(mask) is Tensor and scale == 0.5 and flag
        return q + 1

    whole = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
    made = dtensor.call_on_local(attention_mesh, fn, (x, x, x), (whole, 0.5), {"flag": True})
    assert made is not None and made.result.shape == (2, 4, 18, 3) and bool((made.result.to_local() == 1).all())
    assert dtensor.call_on_local(attention_mesh, fn, (local, local, local), (), {}) is None
    with pytest.raises(TypeError, match="got a mixture"):
        dtensor.call_on_local(attention_mesh, fn, (x, local, x), (), {})
    for bad in (heads, DTensor.from_local(local, mesh, [Replicate()], run_check=False)):
        with pytest.raises(ValueError, match=r"key: expected a DTensor placed Shard\(2\)"):
            dtensor.call_on_local(attention_mesh, fn, (x, bad, x), (), {})
    with pytest.raises(ValueError, match="one of whose mesh dims is the attention's one-axis mesh"):
        dtensor.mesh_dim_of(ls.Mesh.abstract((1, 3), axis_names=("ring", "ulysses")), x)


def test_a_module_with_the_style_gets_local_tensors_and_returns_dtensors(mesh: DeviceMesh) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor, *, rows: int = 0, fails: bool = False) -> Any:
            assert type(x) is Tensor
            seen.append(torch.overrides._len_torch_function_stack())
            if fails:
                raise KeyError("in forward")
            return {"same": x, "longer": torch.zeros(2, 5, 7), "vector": torch.zeros(3), "number": rows}

    seen: list[int] = []
    module, before = ls.ContextParallel()._apply(Module(), mesh), torch.overrides._len_torch_function_stack()
    x = DTensor.from_local(torch.zeros(2, 2, 3), mesh, [Shard(1)], run_check=False, shape=torch.Size((2, 5, 3)), stride=(15, 3, 1))
    out = module(x, rows=4)
    assert out["same"].shape == (2, 5, 3) and out["longer"].shape == (2, 15, 7) and out["number"] == 4
    assert out["same"].placements == out["longer"].placements == (Shard(1),)
    assert type(module(x.to_local())["same"]) is Tensor
    with pytest.raises(KeyError, match="in forward"):
        module(x, fails=True)
    assert torch.overrides._len_torch_function_stack() == before < min(seen)
    with pytest.raises(ValueError, match="expected DTensors sharded on axis 'cp'"):
        module(DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False))
    assert torch.overrides._len_torch_function_stack() == before
