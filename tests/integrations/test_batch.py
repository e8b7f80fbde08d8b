"""`prepare_batch` and the exact loss."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan as ls
from longspan.integrations import prepare_batch
from longspan.integrations._batch import _mask
from longspan.integrations._configs import check_config, head_counts, layers_without_mixing, spans_of
from longspan.integrations._decoders import _local_positions
from longspan.integrations._meshes import mesh_roles, sum_over_data_ranks
from longspan.integrations._plans import CHUNKED, within
from longspan.integrations.loss import linear_token_loss, shift_labels, token_count, token_loss
from longspan.testing import virtual_world

LENGTH, ROWS, VOCAB = 211, 2, 17


def whole(**extra: Any) -> dict[str, Any]:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    return {"input_ids": ids, "labels": ids, **extra}


def on(ranks: int, batch: dict[str, Tensor], **options: Any) -> list[dict[str, Any]]:
    return [prepare_batch(batch, ls.Mesh.abstract(ranks, rank), **options) for rank in range(ranks)]


@pytest.mark.parametrize("layout", ["auto", "head_tail", "contiguous"])
def test_each_rank_gets_its_tokens_with_their_positions_and_next_tokens(layout: str) -> None:
    outputs = on(3, whole(), layout=layout)
    for prepared in outputs:
        ids, positions, labels = (prepared[n] for n in ("input_ids", "position_ids", "labels"))
        assert torch.equal(positions, ids % LENGTH)
        last = positions == LENGTH - 1
        assert torch.equal(labels[~last], ids[~last] + 1) and (labels[last] == -100).all()
        assert prepared["use_cache"] is False and prepared["shift_labels"] is labels
        assert float(prepared["num_items_in_batch"]) == pytest.approx(ROWS * (LENGTH - 1) / 3)
    assert torch.cat([g["input_ids"].flatten() for g in outputs]).sort().values.equal(whole()["input_ids"].flatten())


def test_documents_are_detected_in_the_whole_sequence() -> None:
    starts = [0, 50, 51, 160]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, [*starts[1:], LENGTH])])[None]
    by_positions = prepare_batch(whole(position_ids=positions), ls.Mesh.abstract(2), layout="head_tail")["longspan_plan"]["full"]
    ids = torch.bucketize(torch.arange(LENGTH), torch.tensor(starts[1:]), right=True).expand(ROWS, LENGTH)
    by_ids = prepare_batch(whole(document_ids=ids), ls.Mesh.abstract(2), layout="head_tail")["longspan_plan"]["full"]
    edges = torch.tensor([*starts, *(LENGTH + start for start in starts), ROWS * LENGTH])  # over all rows
    flash = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    by_edges = prepare_batch(whole(**flash), ls.Mesh.abstract(2), layout="head_tail")["longspan_plan"]["full"]
    assert by_positions.digest == by_ids.digest == by_edges.digest
    assert by_positions.digest != prepare_batch(whole(), ls.Mesh.abstract(2), layout="head_tail")["longspan_plan"]["full"].digest
    prepare_batch(whole(position_ids=positions, **flash), ls.Mesh.abstract(2))


def test_cu_seq_lens_of_rows_with_different_documents() -> None:
    """The first row is one document, the second has two."""
    edges = torch.tensor([0, LENGTH, LENGTH + 40, ROWS * LENGTH])
    ids = torch.stack([torch.zeros(LENGTH, dtype=torch.long), (torch.arange(LENGTH) >= 40).long()])
    by_edges, by_ids = (
        prepare_batch(whole(**batch), ls.Mesh.abstract(2), layout="head_tail")["longspan_plan"]["full"]
        for batch in ({"cu_seq_lens_q": edges}, {"document_ids": ids})
    )
    assert by_edges.digest == by_ids.digest


def test_windows_share_one_layout_and_may_be_planned_later() -> None:
    class Config:
        sliding_window, layer_types, num_attention_heads, num_key_value_heads = 9, ["full_attention", "sliding_attention"], 6, 2

    plans = prepare_batch(whole(), ls.Mesh.abstract(3, 1), config=Config())["longspan_plan"]
    assert plans.of(("sliding", 9)) is plans["sliding"] and plans.of(None) is plans["full"]
    later = plans.of(("sliding", 31))
    assert later is plans["sliding 31"] is plans.of(("sliding", 31)) and later.layout == plans.layout and "31" in later.data.mask.text
    again = pickle.loads(pickle.dumps(plans))
    assert again.of(("sliding", 9)).digest == plans.of(("sliding", 9)).digest and again.on(ls.Mesh.abstract(3, 2)).positions.equal(
        plans.on(ls.Mesh.abstract(3, 2)).positions
    )


def test_labels_that_only_padding_could_predict_do_not_count() -> None:
    real = torch.ones(ROWS, LENGTH, dtype=torch.long)
    real[0, :5] = 0
    labels = torch.where(real > 0, 3, -100)
    outputs = on(2, {"input_ids": whole()["input_ids"], "labels": labels, "attention_mask": real}, gradients="sum")
    assert float(outputs[0]["num_items_in_batch"]) == (LENGTH - 1) + (LENGTH - 1 - 5)
    assert sum(int(token_count(g["labels"])) for g in outputs) == (LENGTH - 1) + (LENGTH - 1 - 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}, "mask of query-key pairs"),
        ({"attention_mask": torch.full((2, LENGTH), 2)}, "give document_ids"),
        ({"labels": torch.zeros(2, 5)}, r"expected labels of shape \[2, 211\]"),
        ({"position_ids": torch.arange(LENGTH)[None] % 70, "attention_mask": torch.ones(2, LENGTH)}, "leave out attention_mask"),
        ({"input_ids": torch.zeros(2, 2), "labels": None}, "got 2 tokens for 4 ranks"),
        ({"cu_seq_lens_q": torch.tensor([0, 100, LENGTH])}, "from 0 to 422, the tokens of all rows, got 0 to 211"),
        ({"cu_seq_lens_q": torch.tensor([0, 2 * LENGTH]), "cu_seq_lens_k": torch.tensor([0, 9, 2 * LENGTH])}, "equal cu_seq_lens_q and"),
        ({"cu_seq_lens_q": torch.tensor([0, 100, 2 * LENGTH]), "position_ids": torch.arange(LENGTH)[None]}, "leave one of them out"),
        ({"document_ids": torch.zeros(2, LENGTH), "seq_idx": torch.ones(2, LENGTH)}, "got both, and they differ"),
    ],
)
def test_a_batch_that_cannot_be_split_raises(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_batch({**whole(), **change}, ls.Mesh.abstract(4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention", "indexed_attention"]}, "indexed_attention"),
        ({"rope_scaling": {"type": "dynamic"}}, "longest position"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}}, "longrope"),
        ({"output_router_logits": True}, "load-balancing"),
    ],
)
def test_a_config_that_computes_from_a_shard_only_raises(settings: dict[str, Any], message: str) -> None:
    config = type("Config", (), settings)()
    with pytest.raises(ValueError, match=message):
        check_config(config)
    assert spans_of(config) == [] and head_counts(config, 1) == {}


def test_shares_of_the_loss_add_up_if_ranks_count_different_numbers_of_labels() -> None:
    torch.manual_seed(3)
    head = nn.Linear(7, VOCAB, bias=False).double()
    hidden, labels = torch.randn(ROWS, LENGTH, 7, dtype=torch.float64), torch.randint(0, VOCAB, (ROWS, LENGTH))
    labels[0, :150] = -100
    shifted = shift_labels(labels)
    want = nn.functional.cross_entropy(head(hidden).flatten(0, 1), shifted.flatten(), ignore_index=-100)
    want_grad = torch.autograd.grad(want, head.weight)[0]

    def rank(mesh: Any) -> tuple[Tensor, Tensor, Tensor]:
        plan = ls.plan(ls.causal(), LENGTH, mesh, layout="contiguous")
        mine, targets = plan.shard(hidden, 1), plan.shard(shifted, 1)
        loss = token_loss(head(mine), targets, count=token_count(shifted), averaged=5)
        chunked = linear_token_loss(mine, head.weight, targets, count=token_count(shifted), averaged=5, chunk=13)
        return loss.detach(), torch.autograd.grad(loss, head.weight)[0], torch.autograd.grad(chunked, head.weight)[0]

    losses, grads, chunked = (torch.stack(list(x)) for x in zip(*virtual_world(3).run(rank)))
    torch.testing.assert_close(losses.sum() / 5, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads.sum(0) / 5, want_grad, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(chunked.sum(0) / 5, want_grad, rtol=1e-10, atol=1e-14)


def test_a_batch_without_counted_labels_has_loss_zero() -> None:
    logits = torch.randn(1, 5, VOCAB, requires_grad=True)
    loss = token_loss(logits, torch.full((1, 5), -100), count=0)
    loss.backward()
    assert float(loss.detach()) == 0 and not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_summed_in_float32_or_wider(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(1, 3000, 7, dtype=dtype), torch.randn(VOCAB, 7, dtype=dtype)
    labels = torch.randint(0, VOCAB, (1, 3000))
    logits = nn.functional.linear(hidden, weight)
    want = nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    for got in (token_loss(logits, labels, count=3000), linear_token_loss(hidden, weight, labels, count=3000, chunk=7)):
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert abs(float(got) - float(want)) < 1e-5 * float(want)


@pytest.mark.parametrize("labels", [4, 12])
def test_a_tiled_loss_rejects_another_number_of_labels(labels: int) -> None:
    hidden, weight, targets = torch.randn(8, 7), torch.randn(VOCAB, 7), torch.zeros(labels, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"expected a label for each of 8 tokens, got {labels} labels"):
        linear_token_loss(hidden, weight, targets, count=8, chunk=4)


def test_an_explicit_count_replaces_the_count_of_the_batch() -> None:
    for gradients, share in (("mean", 3), ("sum", 1)):
        for prepared in on(3, whole(), count=700, gradients=gradients):
            assert float(prepared["num_items_in_batch"]) == pytest.approx(700 / share)
    assert float(on(1, {**whole(), "labels": torch.full((ROWS, LENGTH), -100)})[0]["num_items_in_batch"]) == 1


def config(**settings: Any) -> Any:
    return type("Config", (), settings)()


def test_a_window_counts_only_where_a_layer_uses_it() -> None:
    assert spans_of(config(sliding_window=9)) == [("sliding", 9)]
    assert spans_of(config(sliding_window=9, layer_types=["sliding_attention", "full_attention"])) == [("sliding", 9)]
    assert spans_of(config(sliding_window=9, layer_types=["full_attention"])) == []
    assert spans_of(config(sliding_window=9, use_sliding_window=False)) == []
    assert spans_of(config(sliding_window=None)) == []


def test_a_rank_holds_its_share_of_query_and_kv_heads() -> None:
    grouped = config(num_attention_heads=12, num_key_value_heads=4)
    assert head_counts(grouped, 1) == {"heads": 12, "kv_heads": 4}
    assert head_counts(grouped, 4) == {"heads": 3, "kv_heads": 1}
    assert head_counts(grouped, 6) == {}  # four KV heads are not shared by six ranks
    assert head_counts(config(num_attention_heads=12), 3) == {"heads": 4, "kv_heads": 4}


def test_layers_of_one_config_may_differ() -> None:
    layers = [config(sliding_window=w, num_attention_heads=12, num_key_value_heads=g) for w, g in ((9, 4), (None, 4), (31, 4), (9, 4))]
    assert spans_of(config(is_heterogeneous=True, per_layer_config=layers)) == [("sliding", 9), ("sliding", 31)]
    assert head_counts(config(is_heterogeneous=True, per_layer_config=layers), 2) == {"heads": 6, "kv_heads": 2}
    layers[1].num_key_value_heads = 6
    assert head_counts(config(is_heterogeneous=True, per_layer_config=layers), 2) == {}


class AxisStub:
    """One axis of a DeviceMesh, or all of them."""

    def __init__(self, sizes: dict[str, int], place: dict[str, int]) -> None:
        self.sizes, self.place, self.mesh_dim_names = sizes, place, tuple(sizes)

    def __getitem__(self, name: str) -> AxisStub:
        return AxisStub({name: self.sizes[name]}, {name: self.place[name]})

    def size(self) -> int:
        return math.prod(self.sizes.values())

    def get_local_rank(self) -> int:
        return next(iter(self.place.values()))


def test_the_names_of_mesh_axes_give_their_roles() -> None:
    place = {"dp_replicate": 1, "dp_shard": 2, "cp": 3, "tp": 4}
    outputs = mesh_roles(AxisStub({"dp_replicate": 2, "dp_shard": 3, "cp": 5, "tp": 7}, place))
    assert (outputs.context_size, outputs.data_size, outputs.data_rank, outputs.heads_size) == (5, 6, 1 * 3 + 2, 7)
    assert outputs.averaged == 5 * 6 and outputs.context.mesh_dim_names == ("cp",)
    without_heads = mesh_roles(AxisStub({"dp": 2, "cp": 5}, {"dp": 1, "cp": 3}))
    assert (without_heads.context_size, without_heads.data_size, without_heads.data_rank, without_heads.heads_size) == (5, 2, 1, 1)
    with pytest.raises(ValueError, match="expected an axis 'cp'"):
        mesh_roles(AxisStub({"dp": 2, "ring": 3}, {"dp": 0, "ring": 0}))


def test_the_axes_of_a_virtual_mesh_have_the_same_roles() -> None:
    """Two ranks of different batches, each with a copy on three ranks of one sequence: labels are counted over both."""

    def run(mesh: ls.Mesh) -> tuple[int, int, int, float]:
        batch = prepare_batch(whole(), mesh, layout="contiguous")
        roles = mesh_roles(mesh)
        labels = float(sum_over_data_ranks(torch.tensor(2.0), roles))
        return batch["longspan_plan"]["full"].mesh.size, roles.data_rank, roles.context_size, labels

    outputs = virtual_world((2, 3), axis_names=("dp", "cp")).run(run)
    assert outputs == [(3, data_rank, 3, 4.0) for data_rank in (0, 0, 0, 1, 1, 1)]


def test_a_window_planned_later_gets_the_same_plan() -> None:
    shape: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2}
    later, first = (
        prepare_batch(whole(), ls.Mesh.abstract(3, 1), config=config(sliding_window=window, **shape), layout="head_tail")["longspan_plan"]
        for window in (9, 31)
    )
    assert later.of(("sliding", 31)).digest == first.of(("sliding", 31)).digest != later.of(("sliding", 9)).digest
    for strategy in ("ulysses", "ring"):
        plans = prepare_batch(
            whole(), ls.Mesh.abstract(2, 1), config=config(sliding_window=9, **shape), layout="contiguous", strategy=strategy
        )["longspan_plan"]
        assert (plans.of(("sliding", 31)).data.head_axis is None) == (plans.of(None).data.head_axis is None) == (strategy == "ring")


def test_chunks_begin_at_the_first_real_token_of_each_row() -> None:
    real_tokens = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])  # of two rows, one is padded
    zero, tokens = torch.zeros((), dtype=torch.int64), torch.arange(7)
    for padded, firsts in ((real_tokens, (0, 2)), (None, (0, 0))):
        mask = within(ls.full(), (CHUNKED, 3), padded)
        for b, first in enumerate(firsts):
            seen = mask(zero + b, zero, tokens[first:, None], tokens[None, first:])
            chunk = (tokens[first:] - first) // 3
            assert torch.equal(seen, chunk[:, None] == chunk[None])


def test_one_row_of_positions_serves_all_batch_rows_of_a_layout_by_row() -> None:
    """Of M-RoPE's axes, too."""
    mask = ls.causal() & ls.documents(ids=torch.tensor([[0] * 20 + [1] * 30, [0] * 41 + [1] * 9]))
    made = ls.plan(mask, 50, ls.Mesh.abstract(2), layout="per_document", strategy="exchange", batch=2)
    whole = torch.arange(50)[None]

    def rank(mesh: Any) -> None:
        plan = made.on(mesh)
        assert torch.equal(_local_positions(whole, plan, 2), plan.positions)
        assert torch.equal(_local_positions(torch.stack([whole, 2 * whole]), plan, 2), torch.stack([plan.positions, 2 * plan.positions]))

    virtual_world(2).run(rank)


def test_mlp_and_moe_layers_mix_no_tokens() -> None:
    config = SimpleNamespace(layer_types=["full_attention", "mlp", "moe", "sliding_attention"])
    assert layers_without_mixing(config) == {1, 2}


def test_settings_in_a_batch_are_honoured_or_raise() -> None:
    flags = {"return_dict": True, "output_hidden_states": False, "use_cache": False, "logits_to_keep": 0}
    for prepared in on(3, whole(num_items_in_batch=torch.tensor(500), **flags), gradients="sum"):
        assert prepared["num_items_in_batch"] == 500
        assert prepared["input_ids"].shape[1] < LENGTH  # split: none of them is taken for an image
        assert (prepared["return_dict"], prepared["output_hidden_states"], prepared["use_cache"]) == (True, False, False)
        assert "logits_to_keep" not in prepared
    for entries, options, message in (
        ({"num_items_in_batch": 500}, {"count": 400}, "to be equal, got 400 and 500"),
        ({"use_cache": True}, {}, "expected no use_cache in the batch, got True: a forward with a plan has no cache"),
        ({"logits_to_keep": 3}, {}, "expected no logits_to_keep in the batch, got 3: a rank has logits of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_batch({**whole(), **entries}, ls.Mesh.abstract(3), **options)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_tokens_that_see_nothing_are_padding_by_ids_and_before_the_first_real_token(bidirectional: bool) -> None:
    ids = torch.tensor([[0, 0, 1, 1, -1], [0, 2, 2, 2, 2]])
    positions = torch.arange(5).expand(2, 5)

    def blind(**batch: Tensor) -> Any:
        result = _mask(batch, positions, bidirectional=bidirectional)[1]
        return None if result is None else result.tolist()

    assert blind() is None and blind(document_ids=ids.clamp(min=0)) is None
    assert blind(document_ids=ids) == (ids < 0).tolist()
    real = torch.tensor([[0, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
    unseen = [[False] * 5 if bidirectional else [True, True, False, False, False], [True] * 5]
    assert blind(attention_mask=real) == unseen and blind(attention_mask=torch.ones_like(real)) is None
    assert blind(document_ids=ids, attention_mask=real) == (torch.tensor(unseen) | (ids < 0)).tolist()
