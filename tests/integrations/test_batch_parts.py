"""The parts of `prepare_batch` by themselves: settings, documents, labels, counts, inputs of encoder-decoders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.small_parts import SOURCE, ids, pairs, two
from torch import Tensor

import longspan as ls
from longspan.integrations import _batch, _plans, prepare_batch
from longspan.integrations._batch import _document_ids, _documents_from_positions, _ids_from_lengths, _mask, _stated_ids, document_starts
from longspan.integrations._batch_parts import (
    RealKeys,
    check_every_rank_has_tokens,
    label_keywords,
    own_labels,
    real_tokens,
    split_settings,
)
from longspan.integrations._meshes import MeshRoles, device_of
from longspan.integrations._plans import CHUNKED, SLIDING, Chunks, span_name, within


def rows(*values: list[int]) -> Tensor:
    return torch.tensor(values)


# ------------------------------------------------------------------------------------------------------------------------ settings


def test_settings_are_taken_out_of_a_batch() -> None:
    batch = {"input_ids": 1, "num_items_in_batch": 5, "use_cache": False, "logits_to_keep": 0, "return_dict": False, "pixels": None}
    inputs, flags, count = split_settings(batch, None)
    assert (inputs, flags, count) == ({"input_ids": 1, "pixels": None}, {"return_dict": False}, 5)
    assert split_settings({"output_hidden_states": True, "output_attentions": None}, 7) == ({}, {"output_hidden_states": True}, 7)
    assert split_settings({"num_items_in_batch": torch.tensor(5)}, 5.0)[2].item() == 5
    for wrong, given, message in (
        ({"num_items_in_batch": 5}, 6, "to be equal, got 6 and 5"),
        ({"use_cache": True}, None, "expected no use_cache in the batch, got True: a forward with a plan has no cache"),
        ({"logits_to_keep": 2}, None, "got 2: a rank has logits of its own tokens only"),
        ({"logits_to_keep": torch.tensor(0)}, None, "expected no logits_to_keep in the batch"),
    ):
        with pytest.raises(ValueError, match=message):
            split_settings(wrong, given)


def test_padding_is_0_and_tokens_are_1() -> None:
    assert real_tokens({}) is None and real_tokens({"attention_mask": None}) is None
    mask = rows([1, 0, 1])
    assert real_tokens({"attention_mask": mask}).tolist() == [[True, False, True]]  # type: ignore[union-attr]
    assert real_tokens({"decoder_attention_mask": mask.bool()}, "decoder_attention_mask").tolist() == [[True, False, True]]  # type: ignore[union-attr]
    for wrong in (rows([1, 2, 0]), rows([-1, 0, 1])):
        with pytest.raises(ValueError, match=r"expected attention_mask of 0 \(padding\) and 1"):
            real_tokens({"attention_mask": wrong})


def test_real_keys_are_seen_by_every_query() -> None:
    one, several = RealKeys(torch.tensor([True, False, True])), RealKeys(rows([1, 0, 1], [0, 1, 1]).bool())
    assert pairs(one, 3) == [[[1, 0, 1]] * 3] and pairs(several, 3, 2) == [[[1, 0, 1]] * 3, [[0, 1, 1]] * 3]
    assert (one.extent.kv_len, one.extent.batch, several.extent.kv_len, several.extent.batch) == (3, None, 3, 2)


def test_labels_that_are_not_shifted() -> None:
    labels, blind = rows([4, 5, 6]), rows([1, 0, 0]).bool()
    assert own_labels({}, blind, "x") is None and own_labels({"labels": labels}, None, "x") is labels
    assert own_labels({"labels": labels}, blind, "x").tolist() == [[-100, 5, 6]]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="expected labels for a model, whose labels are not shifted"):
        own_labels({"shift_labels": labels}, None, "a model")


@pytest.mark.parametrize(
    ("labels", "count", "gradients", "divisor"),
    [
        ([3, -100, 5, 6], None, "sum", 3.0),
        ([3, -100, 5, 6], None, "mean", 3 / 10),
        ([-100] * 4, None, "mean", 1 / 10),
        ([3, -100, 5, 6], 7, "mean", 7 / 10),
        ([3, -100, 5, 6], torch.tensor(7), "sum", 7.0),
        ([3, -100, 5, 6], 0, "sum", 1.0),
    ],
)
def test_the_divisor_of_the_loss(labels: list[int], count: Any, gradients: Any, divisor: float) -> None:
    roles = MeshRoles(context=None, context_size=5, data_size=2, heads_size=3)
    made = label_keywords(rows(labels), lambda x: x[:, 1:3], roles, count=count, gradients=gradients)
    assert float(made["num_items_in_batch"]) == pytest.approx(divisor) and made["labels"].tolist() == [labels[1:3]]


def test_every_rank_needs_a_token() -> None:
    plans: Any = SimpleNamespace(layout=SimpleNamespace(local_len=[2, 1, 0].__getitem__))
    check_every_rank_has_tokens(plans, 2, 3)
    with pytest.raises(ValueError, match="got 3 tokens for 3 ranks"):
        check_every_rank_has_tokens(plans, 3, 3)


def test_the_device_of_a_mesh() -> None:
    assert device_of(object()) is None and device_of(SimpleNamespace(device_type="meta")) == torch.device("meta")
    assert MeshRoles(context=None, context_size=5, data_size=2, heads_size=3).averaged == 10
    alone = MeshRoles(context=None, context_size=5)
    assert (alone.data, alone.data_size, alone.data_rank, alone.heads_size) == ((), 1, 0, 1)


# ----------------------------------------------------------------------------------------------------------------------- documents

POSITIONS = rows([0, 1, 2, 0, 1], [0, 1, 2, 3, 4])


def test_documents_begin_where_positions_do_not_increase_by_one() -> None:
    assert document_starts(rows([5, 6, 7, 9, 10, 10])).int().tolist() == [[1, 0, 0, 1, 0, 1]]
    assert document_starts(POSITIONS).int().tolist() == [[1, 0, 0, 1, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("batch", "derived"),
    [
        ({"position_ids": POSITIONS}, True),
        ({}, False),
        ({"position_ids": POSITIONS, "document_ids": POSITIONS}, False),
        ({"position_ids": POSITIONS, "seq_idx": POSITIONS}, False),
        ({"position_ids": POSITIONS, "attention_mask": POSITIONS}, False),
        ({"position_ids": POSITIONS, "cu_seq_lens_q": POSITIONS}, True),
    ],
)
def test_documents_may_come_from_positions(batch: dict[str, Tensor], derived: bool) -> None:
    assert _documents_from_positions(batch, POSITIONS) is derived
    assert not _documents_from_positions(batch, POSITIONS[1:])
    assert _documents_from_positions(batch, rows([0, 0, 1, 2, 3])) is derived


def test_documents_by_bounds() -> None:
    bounds = torch.tensor([0, 3, 5, 7, 10])
    assert _ids_from_lengths({}, POSITIONS) is None
    want = [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]
    for batch in ({"cu_seq_lens_q": bounds}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone()}):
        assert _ids_from_lengths(batch, POSITIONS).tolist() == want  # type: ignore[union-attr]
    across = torch.tensor([0, 3, 10])
    assert _ids_from_lengths({"cu_seq_lens_q": across}, POSITIONS).tolist() == [[0, 0, 0, 1, 1], [0] * 5]  # type: ignore[union-attr]
    for batch, message in (
        ({"cu_seq_lens_k": bounds}, "equal cu_seq_lens_q and cu_seq_lens_k"),
        ({"cu_seq_lens_q": bounds, "cu_seq_lens_k": across}, "equal cu_seq_lens_q and cu_seq_lens_k"),
        ({"cu_seq_lens_q": bounds[:-1]}, "from 0 to 10, the tokens of all rows, got 0 to 7"),
        ({"cu_seq_lens_q": bounds[1:]}, "from 0 to 10, the tokens of all rows, got 3 to 10"),
    ):
        with pytest.raises(ValueError, match=message):
            _ids_from_lengths(batch, POSITIONS)


def test_the_document_of_each_token() -> None:
    ids, real = rows([7, 7, 7, 2, 2], [1, 1, 1, 1, -1]), rows([1, 1, 1, 0, 1], [1, 1, 1, 1, 1])
    assert _stated_ids({}) is None and _document_ids({}, POSITIONS) is None
    for batch in ({"document_ids": ids}, {"seq_idx": ids}, {"document_ids": ids, "seq_idx": ids.clone()}):
        assert _stated_ids(batch) is not None and _document_ids({**batch, "position_ids": POSITIONS}, POSITIONS).tolist() == ids.tolist()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="got both, and they differ"):
        _stated_ids({"document_ids": ids, "seq_idx": ids + 1})
    by_positions = _document_ids({"position_ids": POSITIONS}, POSITIONS)
    assert by_positions is not None and by_positions.tolist() == [[1, 1, 1, 2, 2], [1] * 5]
    same, other = torch.tensor([0, 3, 5, 10]), torch.tensor([0, 2, 5, 10])
    assert _document_ids({"position_ids": POSITIONS, "cu_seq_lens_q": same}, POSITIONS).tolist() == by_positions.tolist()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="start again where cu_seq_lens_q says"):
        _document_ids({"position_ids": POSITIONS, "cu_seq_lens_q": other}, POSITIONS)
    assert _document_ids({"cu_seq_lens_q": other}, POSITIONS).tolist() == [[0, 0, 1, 1, 1], [0] * 5]  # type: ignore[union-attr]
    behind_padding = {"position_ids": POSITIONS, "attention_mask": real}
    assert _document_ids(behind_padding, POSITIONS) is None  # the jump is at padding
    for hidden in (4, 2):
        mask = torch.ones_like(real)
        mask[0, hidden] = 0
        if hidden == 2:  # the token before the jump is padding
            assert _document_ids({"position_ids": POSITIONS, "attention_mask": mask}, POSITIONS) is None
            continue
        with pytest.raises(ValueError, match="expected position_ids that increase by one, because there is an attention_mask"):
            _document_ids({"position_ids": POSITIONS, "attention_mask": mask}, POSITIONS)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_masks_of_documents_and_padding(bidirectional: bool) -> None:
    """Of rows with equal and different contents."""
    ids, real = rows([0, 0, 1], [0, 1, 1]), rows([1, 1, 0], [0, 1, 1])
    positions = torch.arange(3).expand(2, 3)
    order = (torch.arange(3)[:, None] >= torch.arange(3)) | bidirectional

    def seen(**batch: Tensor) -> Any:
        return pairs(_mask(batch, positions, bidirectional=bidirectional)[0], 3, 2)

    def want(allowed: Tensor) -> Any:
        return (allowed & order).int().expand(2, 3, 3).tolist()

    assert seen() == want(torch.ones(1, 3, 3).bool())
    for given in (ids, ids[:1].expand(2, 3)):
        assert seen(document_ids=given) == want(given[:, :, None] == given[:, None])
    for given in (real, real[:1].expand(2, 3)):
        assert seen(attention_mask=given) == want(given[:, None].bool())
        assert seen(attention_mask=given, document_ids=ids) == want(given[:, None].bool() & (ids[:, :, None] == ids[:, None]))
    padded = torch.where(real > 0, ids, -1)
    assert seen(document_ids=padded) == want((padded[:, :, None] == padded[:, None]) & (padded >= 0)[:, None])


@pytest.mark.parametrize(
    ("span", "bidirectional", "real", "allowed"),
    [
        (None, False, None, lambda q, kv, row: q >= 0),
        ((SLIDING, 2), False, None, lambda q, kv, row: (q - kv < 2) & (q >= kv)),
        ((SLIDING, 2), True, None, lambda q, kv, row: (q - kv).abs() <= 2),
        ((CHUNKED, 3), False, None, lambda q, kv, row: q // 3 == kv // 3),
        ((CHUNKED, 3), False, [[1] * 7, [1] * 7], lambda q, kv, row: q // 3 == kv // 3),
        ((CHUNKED, 3), False, [[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]], lambda q, kv, row: (q - 2 + row) // 3 == (kv - 2 + row) // 3),
    ],
)
def test_masks_of_windows_and_chunks(span: Any, bidirectional: bool, real: Any, allowed: Any) -> None:
    made = within(ls.full(), span, None if real is None else torch.tensor(real).bool(), bidirectional=bidirectional)
    q, kv = torch.arange(7)[:, None], torch.arange(7)
    assert pairs(made, 7, 2) == [(allowed(q, kv, row) & (kv >= 0)).int().tolist() for row in (0, 1)]


def test_names_and_extents_of_spans() -> None:
    assert span_name((SLIDING, 5), {}) == span_name((SLIDING, 5), {(CHUNKED, 4): "chunked"}) == "sliding"
    assert span_name((SLIDING, 5), {(CHUNKED, 4): "chunked", (SLIDING, 9): "sliding"}) == "sliding 5"
    assert Chunks(3).extent.batch is None and Chunks(3, torch.tensor([0, 1])).extent.batch == 2


def test_one_document_per_row_is_no_mask_of_documents() -> None:
    positions = torch.arange(3).expand(2, 3)
    for given in (rows([0, 0, 0], [0, 0, 0]), rows([4, 4, 4], [2, 2, 2])):
        mask, blind = _mask({"document_ids": given}, positions, bidirectional=False)
        assert type(mask) is type(ls.causal()) and blind is None
    assert type(_mask({"document_ids": rows([0, 0, 1])}, positions[:1], bidirectional=False)[0]) is not type(ls.causal())
    mask, blind = _mask({"document_ids": rows([-1, -1, -1])}, positions[:1], bidirectional=False)
    for given in (rows([0, 1, 1]), rows([0, 1, 1], [0, 1, 1]), rows([0, 1, 1], [0, 0, 1])):
        different = given.tolist()[0] != given.tolist()[-1]
        assert _mask({"document_ids": given}, positions[: len(given)], bidirectional=False)[0].extent.batch == (2 if different else None)
        assert _mask({"attention_mask": given}, positions[: len(given)], bidirectional=False)[0].extent.batch == (2 if different else None)
    assert pairs(mask, 3) == [[[0] * 3] * 3] and blind is not None and blind.tolist() == [[True] * 3]


def test_chunks_of_rows_of_which_some_have_padding() -> None:
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    q, kv = torch.arange(5)[:, None], torch.arange(5)
    want = [((q - first) // 2 == (kv - first) // 2).int().tolist() for first in (0, 1)]
    assert pairs(within(ls.full(), (CHUNKED, 2), real), 5, 2) == want
    assert pairs(within(ls.full(), (SLIDING, 2), None), 5) == [((q - kv < 2) & (q >= kv)).int().tolist()]


def test_chunks_from_the_origins_of_tokens() -> None:
    positions = rows([0, 1, 2, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11])
    origins = torch.arange(7) - positions
    made = within(ls.full(), (CHUNKED, 2), torch.ones(2, 7).bool(), origins=origins)
    chunks = positions // 2
    assert pairs(made, 7, 2) == (chunks[:, :, None] == chunks[:, None]).int().tolist()
    assert Chunks(2, origins).extent.batch == 2


def test_origins_of_chunks_are_of_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts, on = rows([0, 1, 0, 1, 2], [0, 1, 2, 3, 4]), rows([3, 4, 5, 6, 7])
    ids, real = rows([0, 0, 1, 1, 1], [0, 0, 0, 0, 0]), torch.ones(2, 5)
    want = [[0, 0, 2, 2, 2], [0, 0, 0, 0, 0]]
    monkeypatch.setattr(_batch, "chunks_by_position", lambda: True)
    for batch in ({}, {"document_ids": ids, "attention_mask": real}, {"seq_idx": ids, "attention_mask": real}):
        origins = _batch._chunk_origins({"position_ids": restarts, **batch}, restarts)
        assert origins is not None and origins.tolist() == want
    assert _batch._chunk_origins({"position_ids": restarts, "attention_mask": real}, restarts) is None
    for batch in ({"document_ids": ids}, {"cu_seq_lens_q": torch.tensor([0, 2, 5, 10])}, {"seq_idx": ids, "attention_mask": real}):
        origins = _batch._chunk_origins(batch, on.expand(2, 5))
        assert origins is not None and origins.tolist() == want
    assert _batch._chunk_origins({"document_ids": torch.zeros_like(ids)}, on.expand(2, 5)) is None
    assert _batch._chunk_origins({}, on) is None
    assert _batch._chunk_origins({"position_ids": on}, on) is None
    monkeypatch.setattr(_batch, "chunks_by_position", lambda: False)
    assert _batch._chunk_origins({"position_ids": restarts}, restarts) is None


# ------------------------------------------------------------------------------------------------------------------------- batches


def prepared(batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    return dict(prepare_batch(batch, ls.Mesh.abstract(2, 1), layout="contiguous", **options))


def test_what_a_plan_says_of_its_batch() -> None:
    tokens, positions = ids(), torch.arange(9).expand(2, 9)
    real = torch.ones(2, 9, dtype=torch.int64)
    padded = real.clone()
    padded[0, 0] = 0

    def facts(batch: dict[str, Any], **options: Any) -> tuple[Any, ...]:
        plans = prepared({"input_ids": tokens, **batch}, **options)["longspan_plan"]
        real = None if plans.real_tokens is None else plans.real_tokens.int().tolist()
        return plans.position_rule, plans.states_documents, plans.documents_from_positions, plans.whole_inputs, plans.bidirectional, real

    opt = SimpleNamespace(model_type="opt", num_attention_heads=4, num_key_value_heads=2)
    assert facts({}) == ("by place", False, False, False, False, None) and facts({}, config=opt)[0] == "by mask"
    assert facts({"position_ids": positions}) == (None, False, False, False, False, None)
    assert facts({"position_ids": positions % 5}) == (None, False, True, False, False, None)
    assert facts({"attention_mask": real})[-1] is None and facts({"attention_mask": padded})[-1] == padded.tolist()
    for name in ("document_ids", "seq_idx"):
        assert facts({name: positions // 4})[:3] == ("by place", True, False)
    assert facts({"cu_seq_lens_q": torch.tensor([0, 5, 18])})[:3] == ("by place", True, False)
    assert facts({"pixels": torch.zeros(3)})[:4] == (None, False, False, True)
    assert facts({"position_ids": positions.expand(3, 2, 9)})[3]


def test_the_entries_of_a_prepared_batch() -> None:
    tokens, embeds = ids(), torch.randn(2, 9, 3)
    plain = prepared({"input_ids": tokens, "inputs_embeds": None, "labels": tokens})
    assert set(plain) == {"longspan_plan", "use_cache", "input_ids", "position_ids", "labels", "shift_labels", "num_items_in_batch"}
    assert torch.equal(plain["input_ids"], tokens[:, 4:]) and plain["position_ids"].tolist() == [[4, 5, 6, 7, 8]] * 2
    assert torch.equal(plain["labels"][:, :-1], tokens[:, 5:]) and plain["labels"][:, -1].tolist() == [-100, -100]
    assert plain["use_cache"] is False and plain["longspan_plan"].local_len == 5 and plain["longspan_plan"]["full"].data.batch in (None, 2)
    embedded = prepared({"inputs_embeds": embeds, "shift_labels": tokens})
    assert torch.equal(embedded["inputs_embeds"], embeds[:, 4:]) and torch.equal(embedded["labels"], tokens[:, 4:])
    positions = torch.arange(9).expand(4, 2, 9)
    ones = torch.ones(2, 9)
    images = prepared({"input_ids": tokens, "pixels": embeds, "position_ids": positions, "attention_mask": ones}, device="cpu")
    assert torch.equal(images["input_ids"], tokens) and torch.equal(images["pixels"], embeds) and images["position_ids"] is positions
    assert torch.equal(images["attention_mask"], ones)
    opt = SimpleNamespace(model_type="opt", num_attention_heads=4, num_key_value_heads=2)
    real = torch.ones(2, 9, dtype=torch.int64)
    real[0, :6] = 0
    padded = prepared({"input_ids": tokens, "attention_mask": real, "labels": tokens}, config=opt)
    assert padded["position_ids"].tolist() == [[-1, -1, 0, 1, 2], [4, 5, 6, 7, 8]] and "attention_mask" not in padded
    assert padded["labels"].tolist() == [[-100, -100, *tokens[0, 7:].tolist(), -100], [*tokens[1, 5:].tolist(), -100]]
    data = padded["longspan_plan"]["full"].data
    assert (data.heads, data.kv_heads) == (4, 2)
    overridden = prepared({"input_ids": tokens}, config=opt, heads=8, kv_heads=8)["longspan_plan"]["full"].data
    assert (overridden.heads, overridden.kv_heads) == (8, 8)


def test_positions_of_one_row_serve_all_rows_and_embeddings() -> None:
    for batch in ({"input_ids": ids(3)}, {"inputs_embeds": torch.zeros(3, 9, 5)}):
        assert prepared({**batch, "position_ids": torch.arange(9)[None] + 2})["position_ids"].tolist() == [[6, 7, 8, 9, 10]] * 3


def test_of_four_axes_of_positions_the_first_is_the_texts() -> None:
    again, ascending = torch.arange(9) % 5, torch.arange(9)
    for axes, derived in (
        ([again, ascending, ascending, ascending], True), ([ascending, again, again, again], False), ([again, again, again], False)
    ):  # fmt: skip
        plans = prepared({"input_ids": ids(), "position_ids": torch.stack(axes)[:, None].expand(-1, 2, -1)})["longspan_plan"]
        assert plans.documents_from_positions is derived


def test_tensors_are_moved_to_the_device() -> None:
    batch = {"input_ids": ids(), "labels": ids()}
    for made in (prepared(batch, device="meta"), prepared({**batch, "pixels": torch.zeros(2), "names": ["a"]}, device="meta")):
        assert {x.device.type for x in made.values() if isinstance(x, Tensor)} == {"meta"} and made.get("names") in (None, ["a"])
    assert prepared({**batch, "pixels": torch.zeros(2), "names": ["a"]})["names"] == ["a"]
    made = two({**SOURCE, "labels": ids(2, 7)}, device="meta")
    assert {x.device.type for x in made.values() if isinstance(x, Tensor)} == {"meta"}
    assert made["num_items_in_batch"].device.type == "meta"


def test_plans_by_masks_of_a_model_are_of_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "_MODEL_MASKS", 2)
    plans, masks = prepared({"input_ids": ids()})["longspan_plan"], [ls.full(), ls.causal(), ls.full()]
    first, second = plans.by_mask(masks[0]), plans.by_mask(masks[1])
    assert plans.by_mask(masks[0]) is first is not second and len(plans._by_mask) == 2
    third = plans.by_mask(masks[2])
    assert list(plans._by_mask) == [id(masks[2])] and third.data.mask.text == first.data.mask.text != second.data.mask.text
    assert third.layout == plans.layout and third.data.q_len == 9


def test_plans_of_other_heads_and_later_windows_keep_the_layout() -> None:
    plans = prepared({"input_ids": ids()}, heads=4, kv_heads=2)["longspan_plan"]
    full = plans.of(None)
    assert plans.of(None, 4, 2) is full is plans.of(None, None, 3) and plans.of(None, 4, 4) is not full is not plans.of(None, 8, 2)
    other = plans.of(None, 8, 2)
    assert (other.data.heads, other.data.kv_heads) == (8, 2) and other is plans.of(None, 8, 2) is plans["full, 8 heads, 2 KV heads"]
    window = plans.of((SLIDING, 3), 4, 2)
    assert window is plans["sliding"] and plans.of((SLIDING, 5)) is plans["sliding 5"] and window.layout == full.layout
    assert plans.of((SLIDING, 3), 4, 4) is plans["sliding, 4 heads, 4 KV heads"] and plans.of((CHUNKED, 4)) is plans["chunked"]
    unknown = prepared({"input_ids": ids()})["longspan_plan"]
    assert unknown.of(None, 8, 2) is unknown.of(None)
    bare = _plans.ModelPlans(dict(plans._plans), mask=ls.causal(), spans={}, options={})
    assert set(bare._facts().values()) == {False, None} and bare._facts()["bidirectional"] is bare._facts()["whole_inputs"] is False
    assert set(plans._options) == {"batch", "heads", "kv_heads"}


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"inputs_embeds": torch.zeros(2, 9, 3)}, {}, "expected input_ids or inputs_embeds, got both"),
        ({"input_ids": None}, {}, r"expected input_ids \[B, S\], got NoneType"),
        ({"input_ids": torch.zeros(9)}, {}, r"got shape \(9,\)"),
        ({"labels": [1]}, {}, r"expected labels of shape \[2, 9\] like input_ids, got list"),
        ({"labels": torch.zeros(1, 9)}, {}, r"expected labels of shape \[2, 9\] like input_ids, got shape \(1, 9\)$"),
        ({"labels": torch.zeros(2, 8)}, {}, r"got shape \(2, 8\)"),
        ({"position_ids": torch.zeros(3, 9)}, {}, r"expected position_ids of shape \[2, 9\] like input_ids, got shape \(3, 9\)"),
        ({"document_ids": torch.zeros(9)}, {}, r"expected document_ids of shape \[2, 9\] like input_ids, got shape \(9,\)"),
        ({}, {"gradients": "max"}, r"expected gradients='mean' \(DDP, FSDP\) or 'sum', got 'max'"),
        ({}, {"config": SimpleNamespace(is_encoder_decoder=True)}, "got SimpleNamespace; give the model itself"),
        ({}, {"config": SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))}, "this model is not supported"),
    ],
)
def test_entries_that_do_not_fit_raise(batch: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared({"input_ids": ids(), **batch}, **options)


def test_other_inputs_are_everything_that_is_not_by_token() -> None:
    known = dict.fromkeys((*_batch._PER_TOKEN, *_batch._FLASH_ARGUMENTS), 1)
    assert _batch._other_inputs({**known, "pixels": 2, "audio": None}) == {"pixels": 2}
    assert (
        _batch._by_axis(torch.zeros(3, 2, 9)) is not None and _batch._by_axis(torch.zeros(2, 9)) is None and _batch._by_axis(None) is None
    )


class TinyForMaskedLM:
    """A model for masked language modelling."""

    config = SimpleNamespace(model_type="bert", num_attention_heads=4, num_key_value_heads=4)


def test_an_encoder_gets_its_own_labels_and_token_types() -> None:
    tokens, real = ids(), torch.ones(2, 9, dtype=torch.int64)
    real[1] = 0
    batch = {"input_ids": tokens, "labels": tokens, "token_type_ids": torch.arange(9)[None], "attention_mask": real}
    made = prepared(batch, config=TinyForMaskedLM(), gradients="sum")
    assert set(made) == {"longspan_plan", "input_ids", "position_ids", "labels", "num_items_in_batch", "token_type_ids"}
    assert made["labels"].tolist() == [tokens[0, 4:].tolist(), [-100] * 5] and float(made["num_items_in_batch"]) == 9
    assert made["token_type_ids"].tolist() == [[4, 5, 6, 7, 8]] * 2 and made["longspan_plan"].bidirectional
    assert not made["longspan_plan"].whole_inputs and "bidirectional" not in made
