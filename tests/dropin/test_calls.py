"""Calls on a mesh of one rank against torch's own functions, and parts of calls by tables: forms of masks, buffers, flash-attn's rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import longspan as ls
from longspan._dropin import attn_mask, buffers, dispatcher, flash, intercept
from longspan._dropin.attn_mask import CallShape, as_mask_mod, as_score_mod, gather_mask, with_four_dims
from longspan._dropin.buffers import Buffer, make_buffers, mark_written, version_of
from longspan._dropin.context import Context, context_parallel
from longspan._dropin.dispatcher import AttentionDispatcher
from longspan._dropin.flash import flash_attn_func, flash_attn_varlen_func
from longspan._dropin.global_layout import chunked, in_rank_order
from longspan._dropin.intercept import AttentionMode, intercepting
from longspan._dropin.mask_keys import MaskKeys
from longspan._dropin.parallel_style import _ContextHooks
from longspan._plan.layout import Layout
from longspan.testing import virtual_world

BATCH, HEADS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 6, 5, 7, 4, 3
ZERO = torch.zeros((), dtype=torch.int64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = random(BATCH, HEADS, QUERIES, DIM), random(BATCH, HEADS, KEYS, DIM, seed=1), random(BATCH, HEADS, KEYS, VALUE_DIM, seed=2)
SEEN = torch.arange(KEYS) != torch.arange(QUERIES)[:, None]


@pytest.fixture
def attend() -> AttentionDispatcher:
    return AttentionDispatcher(ls.Mesh.abstract(1), layout="contiguous")


# ----------------------------------------------------------------------------------------------------------------- torch's functions


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ((Q, K, V), {}),
        ((Q, Q, Q), {"is_causal": True}),
        ((Q, K, V), {"scale": 0.3}),
        ((Q, K, V), {"attn_mask": SEEN, "scale": 0.7}),
        ((Q, K, V), {"attn_mask": random(BATCH, 1, QUERIES, KEYS, seed=3)}),
        ((Q, K, V), {"attn_mask": random(HEADS, QUERIES, KEYS, seed=3)}),
        ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True, "attn_mask": SEEN}),
        ((Q[0], K[0], V[0]), {"attn_mask": random(HEADS, QUERIES, KEYS, seed=4) > 0}),
        ((Q[0], K[0], V[0]), {"attn_mask": random(HEADS, QUERIES, KEYS, seed=4)}),
        ((Q[0, 0], K[0, 0], V[0, 0]), {"attn_mask": SEEN}),
        ((Q[:, :1], K, V[:1]), {}),
        ((Q, K, V), {"attn_mask": random(BATCH, HEADS, QUERIES, KEYS, seed=5) > -1}),
    ],
)
def test_sdpa_of_one_rank_equals_torchs(attend: AttentionDispatcher, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    want = F.scaled_dot_product_attention(*tensors, **options)
    for _ in range(2):
        torch.testing.assert_close(attend.sdpa(*tensors, **options), want)
    assert len(attend._plans) == 1


def test_arguments_by_place_are_those_of_torch(attend: AttentionDispatcher) -> None:
    mask = random(QUERIES, KEYS, seed=6)
    got = attend.sdpa(Q, K[:, :3], V[:, :3], mask, 0.0, False, 0.4, True)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(Q, K[:, :3], V[:, :3], mask, 0.0, False, scale=0.4, enable_gqa=True))
    block = create_block_mask(lambda b, h, q, kv: q != kv, None, None, QUERIES, KEYS, device="cpu")
    score_mod = lambda score, b, h, q, kv: score + kv * 0.1
    arguments = (score_mod, block, 0.4, True, True, None)
    for got, want in zip(attend.flex(Q, K[:, :3], V[:, :3], *arguments), flex_attention(Q, K[:, :3], V[:, :3], *arguments), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((Q, K, V), {"dropout_p": 0.1}, "dropout_p: expected 0, got 0.1"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, 5).bool(), "is_causal": True}, "expected attn_mask or is_causal=True, got both"),
        ((Q, K[0], V[0]), {}, "expected the same 2 to 4 dims"),
        ((Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]), {}, "expected the same 2 to 4 dims"),
        ((Q[None], Q[None], Q[None]), {}, "expected the same 2 to 4 dims"),
        ((Q, K, V), {"attn_mask": torch.ones(4, 7).bool()}, r"got \(1, 1, 4, 7\)"),
        ((Q, K[:, :2], V[:, :2]), {}, "heads"),
    ],
)
def test_calls_of_sdpa_that_raise(attend: AttentionDispatcher, tensors: tuple[Tensor, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        attend.sdpa(*tensors, **options)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((Q, K, V), {"return_lse": True, "return_aux": AuxRequest()}, "expected return_lse or return_aux, got both"),
        ((Q, K, V[0]), {}, "expected 4 dims"),
        ((Q, K[0], V), {}, "expected 4 dims"),
        ((Q[0], K, V), {}, "expected 4 dims"),
        ((Q, K.repeat(2, 1, 1, 1), V.repeat(2, 1, 1, 1)), {}, "batch"),
        ((Q, K[:, :2], V[:, :2]), {}, "key: expected 6 heads as in query, got 2; pass enable_gqa=True"),
        ((Q, K, V), {"block_mask": create_block_mask(lambda b, h, q, kv: q != kv, None, None, 4, 7, device="cpu")}, "got 4 by 7 on rank 0"),
        ((Q, K, V), {"kernel_options": {"NO_SUCH_OPTION": 1}}, "NO_SUCH_OPTION"),
    ],
)
def test_calls_of_flex_that_raise(attend: AttentionDispatcher, tensors: tuple[Tensor, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        attend.flex(*tensors, **options)


def test_kv_of_one_batch_row_serve_all_rows_of_flex_attention(attend: AttentionDispatcher) -> None:
    want = flex_attention(Q, K[:1].expand(2, -1, -1, -1), V[:1].expand(2, -1, -1, -1))
    torch.testing.assert_close(attend.flex(Q, K[:1], V[:1]), want)
    torch.testing.assert_close(attend.flex(Q[:1], K[:1], V[:1]), want[:1])
    torch.testing.assert_close(attend.flex(Q[:, :1], K[:1, :1], V[:1, :1]), want[:, :1])


def test_plans_are_made_with_the_batch_and_heads_that_their_mask_depends_on(attend: AttentionDispatcher) -> None:
    by_row, by_head = torch.tensor([3, 5]), torch.arange(HEADS) + 1
    masks: list[Callable[..., Tensor]] = [
        lambda b, h, q, kv: kv < by_row[b], lambda b, h, q, kv: kv < by_head[h], lambda b, h, q, kv: (kv < by_row[b]) & (kv < by_head[h]),
        lambda b, h, q, kv: kv < 4,
    ]  # fmt: skip
    for mask in masks:
        attend.flex(Q, K, V, block_mask=mask)
        attend.flex(Q, K, V, block_mask=ls.mask_mod(mask))
    assert [(plan.data.batch, plan.data.heads) for plan in attend._plans.values()] == [(2, None), (None, 6), (2, 6), (None, None)]
    attend._plans.clear()
    for shape in ((1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)):
        attend.sdpa(Q, K, V, attn_mask=random(*shape, QUERIES, KEYS) > 0)
    assert [(plan.data.batch, plan.data.heads) for plan in attend._plans.values()] == [(None, None), (2, None), (None, 6), (2, 6)]
    for batch in (1, 2):
        attend.sdpa(Q[:batch], K[:batch], V[:batch])
        attend.sdpa(Q[:batch, :batch], K[:batch, :batch], V[:batch, :batch])
    assert len(attend._plans) == 5
    assert dispatcher.MAX_PLANS == 64


def test_digests_are_taken_only_of_masks_whose_contents_matter(attend: AttentionDispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[tuple[int, ...]] = []
    digest = MaskKeys.digest
    monkeypatch.setattr(MaskKeys, "digest", lambda self, t: digested.append(tuple(t.shape)) or digest(self, t))
    one = slice(0, 1)
    for q, k, mask, matters in (
        (Q, K, SEEN, True),
        (Q, K, random(QUERIES, KEYS), False),
        (Q, K, random(1, KEYS), False),
        (Q, K, random(QUERIES, 1), False),
        (Q[:, :, one], K, random(1, KEYS), True),
        (Q, K[:, :, one], random(QUERIES, 1), True),
    ):
        digested.clear()
        attend.sdpa(q, k, k, attn_mask=mask)
        assert digested == [tuple(mask.shape)] * matters


def test_digests_end_with_their_tensors() -> None:
    keys, tensor = MaskKeys(), torch.arange(3)
    keys.digest(tensor)
    assert len(keys._digests) == 1
    del tensor
    assert keys._digests == {}


# -------------------------------------------------------------------------------------------------------------------- forms of masks


def call_shape(q: Any, kv: list[int], rank: int = 0) -> CallShape:
    layout = q if isinstance(q, Layout) else in_rank_order(q)
    return CallShape(mesh=ls.Mesh.abstract(2, rank), q=layout, kv=in_rank_order(kv), batch=BATCH, heads=HEADS)


@pytest.mark.parametrize("sizes", [(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)], ids=str)
@pytest.mark.parametrize("table", [(QUERIES, KEYS), (1, KEYS), (QUERIES, 1), (1, 1)], ids=str)
def test_whole_masks_are_read_at_global_positions(sizes: tuple[int, int], table: tuple[int, int]) -> None:
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    q, kv = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
    values = random(*sizes, *table)
    whole = values.expand(BATCH, HEADS, QUERIES, KEYS)
    seen = as_mask_mod(values > 0)(b, h, q, kv)
    assert torch.equal(seen.expand(whole.shape), whole > 0)
    added = as_score_mod(values, "whole", call_shape([2, 3], [3, 4]), queries_stay=True)(torch.ones(whole.shape).double(), b, h, q, kv)
    torch.testing.assert_close(added, whole + 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_local_queries_are_read_at_local_positions(rank: int) -> None:
    """Rank 0 has queries 0, 1 and 6 of 7, rank 1 the others; ranks capture tables of the same shape."""
    layout = Layout(length=7, rows=((((0, 2), (6, 1)), ((2, 4),)),))
    shape, positions = call_shape(layout, [3, 4], rank), layout.positions(rank)
    rows = random(1, HEADS, len(positions), KEYS)
    mod = as_score_mod(rows, "query_rows", shape, queries_stay=True)
    h, local = torch.arange(HEADS)[:, None, None], torch.arange(len(positions))
    got = mod(torch.ones(1).double(), ZERO, h, positions[local][:, None], torch.arange(KEYS))
    torch.testing.assert_close(got, rows[0] + 1)
    captured = inspect.getclosurevars(mod).nonlocals["table"]
    assert captured.shape == (HEADS, 4, KEYS)
    by_row = Layout(length=7, rows=(layout.rows[0], (((0, 3),), ((3, 4),))))
    with pytest.raises(ValueError, match="expected the whole mask, because the layout differs between batch rows"):
        as_score_mod(rows, "query_rows", call_shape(by_row, [3, 4], rank), queries_stay=True)
    constant = as_score_mod(torch.full((1, 1, 1, 1), 2.0), "whole", shape, queries_stay=True)
    assert float(constant(torch.tensor(3.0), ZERO, ZERO, ZERO, ZERO)) == 5.0


@pytest.mark.parametrize("queries_stay", [True, False])
def test_masks_in_parts_are_gathered(queries_stay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    whole_rows, whole_flags = random(1, 1, 7, KEYS), random(1, 1, 1, KEYS)

    def unshard(x: Tensor, dim: int, layout: Layout, mesh: Any) -> Tensor:
        calls.append((dim, layout.length))
        return whole_rows if dim == 2 else whole_flags

    monkeypatch.setattr(attn_mask, "unshard", unshard)
    shape = call_shape([4, 3], [3, 4])
    assert gather_mask(whole_rows, "whole", shape) is whole_rows and calls == []
    assert gather_mask(whole_rows[:, :, :4], "query_rows", shape) is whole_rows
    assert gather_mask(whole_flags[..., :3], "kv_flags", shape) is whole_flags and calls == [(2, 7), (3, KEYS)]
    for form, part, want in (("query_rows", whole_rows[:, :, :4], whole_rows), ("kv_flags", whole_flags[..., :3], whole_flags)):
        calls.clear()
        mod = as_score_mod(part, form, shape, queries_stay=queries_stay)  # type: ignore[arg-type]
        assert bool(calls) is (form == "kv_flags" or not queries_stay)
        got = mod(torch.zeros(1).double(), ZERO, ZERO, torch.arange(4)[:, None], torch.arange(KEYS))
        torch.testing.assert_close(got.expand(4, KEYS), want[0, 0, :4].expand(4, KEYS))


def test_masks_of_less_than_four_dims_broadcast_from_the_right() -> None:
    mask = random(3, 5)
    assert torch.equal(with_four_dims(mask, 2, 6), mask[None, None]) and with_four_dims(mask[0], 2, 6).shape == (1, 1, 1, 5)


# ---------------------------------------------------------------------------------------------------------------------------- buffers

LAYOUT = in_rank_order([2, 3])


def test_a_buffer_has_the_shard_between_shard_and_unshard() -> None:
    tensor = torch.arange(10).view(2, 5)
    whole, memory = tensor.clone(), tensor.data_ptr()
    buffer = Buffer(tensor, 1, restore=True)
    assert buffer.length == 5 and buffer.readable() is tensor
    buffer.shard(LAYOUT, 1)
    assert torch.equal(tensor, whole[:, 2:]) and buffer.length == 3
    alias = buffer.readable()
    assert alias is not tensor and alias.data_ptr() == tensor.data_ptr() and torch.equal(alias, tensor)
    with pytest.raises(RuntimeError, match=r"got one of shape \(2, 3\) that another open context"):
        Buffer(tensor, 1, restore=True).shard(LAYOUT, 1)
    tensor.add_(100)
    before = tensor._version
    buffer.unshard()
    assert torch.equal(tensor, whole) and tensor.data_ptr() == memory and tensor._version > before and buffer.readable() is tensor
    assert torch.equal(alias, whole[:, 2:] + 100)
    buffer.shard(LAYOUT, 1)  # the shard of before, with its writes
    assert torch.equal(tensor, whole[:, 2:] + 100)
    buffer.unshard()
    buffer.drop_shard()
    buffer.shard(LAYOUT, 1)
    assert torch.equal(tensor, whole[:, 2:])
    buffer.unshard()
    kept = Buffer(tensor, 1, restore=False)
    kept.shard(LAYOUT, 0)
    kept.unshard()
    assert torch.equal(tensor, whole[:, :2]) and not hasattr(tensor, buffers._IS_SHARD)


@pytest.mark.parametrize("change", ["memory", "shape", "stride", "grad"])
def test_a_buffer_with_other_memory_is_read_itself(change: str) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    buffer = Buffer(tensor, 0, restore=True)
    buffer.shard(in_rank_order([3, 0]), 0)
    assert buffer.readable() is not tensor
    if change == "grad":
        tensor.requires_grad_()
    else:
        new = {"memory": tensor.detach().clone(), "shape": tensor.detach()[:2], "stride": tensor.detach().as_strided((3, 4), (1, 3))}
        tensor.data = new[change]
    assert buffer.readable() is tensor


def test_versions_count_writes() -> None:
    plain = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
    before = version_of(plain)
    mark_written(plain)
    mark_written(inference)
    assert before == 0 and version_of(plain) == 1 and version_of(inference) is None


def test_buffers_are_made_of_tensors_and_dims() -> None:
    x, y = torch.zeros(2, 3, 4), torch.zeros(5)
    made = make_buffers([x, y, x], [-1, 0, 2], [y])
    assert [(b.tensor is x, b.dim, b.restore) for b in made] == [(True, 2, True), (False, 0, False)]
    assert make_buffers([], [], []) == []
    assert [make_buffers([x], [dim], [])[0].dim for dim in (-3, 2)] == [0, 2]
    for tensors, dims, not_restored, message in (
        ([x], [], [], "expected one dim for each of 1 buffers, got 0"),
        ([x], [0], [y], "no_restore_buffers: expected tensors that are in buffers"),
        ([x], [3], [], r"buffer_seq_dims\[0\]: expected a dim of buffers\[0\], whose shape is \(2, 3, 4\), got 3"),
        ([y, x], [0, -4], [], r"buffer_seq_dims\[1\]: .*, got -4"),
        ([x, x], [0, 1], [], r"buffers\[1\]: expected one sequence dim per tensor, got 0 and 1"),
        ([torch.nn.Parameter(x)], [0], [], "got Parameter; DDP"),
        ([3], [0], [], r"buffers\[0\]: expected a plain tensor, got int$"),
        ([x.clone().requires_grad_()], [0], [], "does not require grad"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make_buffers(tensors, dims, not_restored)


def test_buffers_of_a_layout_by_row_need_its_batch() -> None:
    rows = Layout(length=5, rows=((((0, 2),), ((2, 3),)), (((3, 2),), ((0, 3),))))
    mesh = ls.Mesh.abstract(2, 1)
    for tensor, dim in ((torch.zeros(5, 2), 0), (torch.zeros(3, 5), 1)):
        with pytest.raises(ValueError, match="expected dim 0 to be the batch of 2 rows"), context_parallel(
            mesh, buffers=[tensor], buffer_seq_dims=[dim], layout=rows
        ):  # fmt: skip
            pass
        assert 5 in tensor.shape
    fits = torch.arange(10).view(2, 5)
    with context_parallel(mesh, buffers=[fits], buffer_seq_dims=[1], layout=lambda length, ranks: in_rank_order([1, 4])):
        assert fits.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_functions_read_the_alias_of_a_buffer_and_writes_are_counted_on_it() -> None:
    mesh, x = ls.Mesh.abstract(2, 1), torch.arange(5.0)
    other = torch.ones(3)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0], layout="contiguous") as cp:
        alias = cp.buffers[0].alias
        assert alias is not None and cp._readable(x) is alias and cp._readable(other) is other and cp._readable(3) == 3
        assert cp._readable([x, other])[0] is alias and type(cp._readable((other, x))) is tuple
        pair = [other, other]
        assert cp._readable(pair) is pair
        seen: list[Any] = []

        def read(*args: Any, **kwargs: Any) -> None:
            seen.extend([*args, *kwargs.values()])

        cp._call_on_shards(read, (x, other), {"z": x})
        assert seen[0] is alias and seen[1] is other and seen[2] is alias
        before = alias._version
        x.add_(1)
        assert alias._version > before
        before = alias._version
        torch.add(other[: x.shape[0]], 1, out=x)
        assert alias._version > before
        before = alias._version
        other.add_(x.sum())
        x.size()
        assert alias._version == before
    assert isinstance(cp, Context) and x.tolist() == [0, 1, 2, 3, 4]


# -------------------------------------------------------------------------------------------------------------------------- contexts


def test_checkpoints_run_the_function_that_the_mode_wraps() -> None:
    """Arguments keep their places."""
    ran: list[Any] = []

    def rerun(fn: Any) -> Any:
        return lambda *args: ran.append(args) or fn(*args)

    x = random(3).requires_grad_()
    with intercepting(AttentionMode(rerun=rerun)):
        assert intercept._code_swap._active_modes == 1
        out = torch.utils.checkpoint.checkpoint(lambda a, b: a * b, x, 3, use_reentrant=False)
    assert intercept._code_swap._active_modes == 0 and torch.equal(out, 3 * x) and ran[0][0] is x and ran[0][1] == 3
    with intercepting(AttentionMode()):
        assert torch.equal(torch.utils.checkpoint.checkpoint(lambda a: a * 2, x, use_reentrant=False), 2 * x)
    assert torch.equal(torch.utils.checkpoint.checkpoint(lambda a: a * 2, x, use_reentrant=False), 2 * x)


def test_flex_attention_of_a_thread_without_a_mode_is_torchs_own() -> None:
    want = flex_attention(Q, Q, Q)
    with intercepting(AttentionMode(flex=lambda *args, **kwargs: (args, kwargs))):
        args, kwargs = flex_attention(Q, K, V, scale=0.5)
        assert args[0] is Q and args[1] is K and args[2] is V and kwargs == {"scale": 0.5}
        with torch._C.DisableTorchFunction():
            torch.testing.assert_close(flex_attention(Q, Q, Q), want)
    torch.testing.assert_close(flex_attention(Q, Q, Q), want)


def test_contexts_of_other_meshes_share_no_sequences() -> None:
    one, two = ls.Mesh.abstract(2, 1), ls.Mesh.abstract(3, 1)
    with context_parallel(one, seq_len=12) as outer, context_parallel(two) as other, context_parallel(one) as inner:
        assert outer.mesh == one and set(inner.dispatcher.sequences.by_length) == {12} and other.dispatcher.sequences.by_length == {}
    with context_parallel(one, seq_len=[6, 9]) as several:
        assert set(several.dispatcher.sequences.by_length) == {6, 9}
        assert several.positions(6).tolist() == [2, 3] or len(several.positions(6)) == 3


def test_lengths_may_be_exchanged_at_each_call() -> None:
    """A causal mask over keys in the order of ranks."""
    want = F.scaled_dot_product_attention(Q, Q, Q, is_causal=True)

    def rank(mesh: Any) -> Tensor:
        part = Q[:, :, :2] if mesh.rank == 0 else Q[:, :, 2:]
        attend = AttentionDispatcher(mesh, layout="contiguous")
        out = attend.sdpa(part, part, part, is_causal=True)
        return attend.unshard(out, 2)

    for out in virtual_world(2).run(rank):
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    ("options", "lengths", "positions"),
    [
        ({}, set(), [3, 4, 5]),
        ({"seq_len": 7}, {7}, [3, 4, 5]),
        ({"seq_len": [7, 10], "layout": chunked}, {7, 10}, [3, 4, 5]),
        ({"layout": lambda length, ranks: in_rank_order([1, 4, 2])}, set(), [1, 2, 3, 4]),
    ],
)
def test_the_layout_of_a_module_style_is_that_of_dtensors(options: dict[str, Any], lengths: set[int], positions: list[int]) -> None:
    hooks = _ContextHooks(ls.Mesh.abstract(3, 1), ls.ContextParallel(**options))
    for context in (hooks._for_plain_inputs, hooks._for_dtensors):
        assert set(context.dispatcher.sequences.by_length) == lengths and context.positions(7).tolist() == positions


# ---------------------------------------------------------------------------------------------------------------------- flash-attn


@pytest.mark.parametrize(
    ("window", "causal", "allowed"),
    [
        ((-1, -1), False, lambda d: d == d),
        ((-1, -1), True, lambda d: d <= 0),
        ((2, 1), False, lambda d: (d >= -2) & (d <= 1)),
        ((2, 1), True, lambda d: (d >= -2) & (d <= 0)),
        ((0, 0), False, lambda d: d == 0),
        ((-1, 0), False, lambda d: d <= 0),
        ((-1, 2), False, lambda d: d <= 2),
        ((2, -1), False, lambda d: d >= -2),
        ((2, 0), False, lambda d: (d >= -2) & (d <= 0)),
    ],
)
def test_masks_of_windows(window: tuple[int, int], causal: bool, allowed: Any) -> None:
    left, right = flash._sides(window, causal)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    whole = torch.ones(6, 6, dtype=torch.bool)
    assert torch.equal(flash._aligned(left, right)(ZERO, ZERO, i, j) & whole, allowed(j - i) & whole)
    assert torch.equal(flash._between(j - i, left, right), allowed(j - i) & whole)
    bounds_q, bounds_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 8])
    packed = flash._packed(bounds_q, bounds_k, left, right, torch.device("cpu"))(ZERO, ZERO, torch.arange(5)[:, None], torch.arange(8))
    want = torch.zeros(5, 8, dtype=torch.bool)
    for queries, keys in (((0, 2), (0, 3)), ((2, 5), (4, 8))):
        for query in range(*queries):
            place = keys[1] - (queries[1] - query)
            for key in range(*keys):
                want[query, key] = bool(allowed(torch.tensor(key - place)))
    assert torch.equal(packed, want)


def test_defaults_and_sequences_without_tokens() -> None:
    q, k, v = random(1, 5, 4, 8), random(1, 7, 2, 8, seed=1), random(1, 7, 2, 8, seed=2)
    sdpa = lambda q, k, v, **options: F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options
    ).transpose(1, 2)
    torch.testing.assert_close(flash_attn_func(q, k, v), sdpa(q, k, v))
    torch.testing.assert_close(flash_attn_func(q[:, :1], k, v, softmax_scale=0.3), sdpa(q[:, :1], k, v, scale=0.3))
    torch.testing.assert_close(flash_attn_func(q[:, :1], k, v, window_size=(2, 0)), sdpa(q[:, :1], k[:, 4:], v[:, 4:]))
    torch.testing.assert_close(flash_attn_func(q[:, :1], k, v, window_size=(9, 0)), sdpa(q[:, :1], k, v))
    same = torch.tensor([0, 2, 2, 5])
    parts = [sdpa(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in ((0, 2), (2, 5))]
    torch.testing.assert_close(flash_attn_varlen_func(q[0], k[0, :5], v[0, :5], same, same), torch.cat(parts, 1)[0])
    other = torch.tensor([0, 3, 4, 7])
    parts = [sdpa(q[:, a:b], k[:, c:d], v[:, c:d]) for (a, b), (c, d) in (((0, 2), (0, 3)), ((2, 5), (4, 7)))]
    torch.testing.assert_close(flash_attn_varlen_func(q[0], k[0], v[0], same, other), torch.cat(parts, 1)[0])
