"""Masks that models ask for, and what attention layers do with them, by tables of small cases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_overlay

import longspan as ls
import longspan.integrations.transformers as lst
from longspan.integrations import _forward
from longspan.integrations._batch_parts import RealKeys
from longspan.integrations._forward import Forward, current_forward, in_forward
from longspan.integrations._model_mask import (
    CompiledMask,
    ModelMask,
    foreign_part,
    is_bidirectional,
    keeping_masks,
    mask_parts,
    span_of,
    visible_keys,
    with_offsets,
)
from longspan.integrations._pair_masks import _check_padding, attend_pairs

ZERO = torch.zeros((), dtype=torch.int64)


def pairs(mask: Any, queries: int, keys: int, batch: int = 1) -> list[Any]:
    """Which pairs a mask_mod lets see each other, bool [batch, queries, keys], as 0 and 1."""
    b, q, kv = torch.arange(batch)[:, None, None], torch.arange(queries)[:, None], torch.arange(keys)
    return (mask(b, ZERO, q, kv) & torch.ones(batch, queries, keys, dtype=torch.bool)).int().tolist()


def bidirectional_mask_function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= 0


def packed_sequence_mask_function(ids: Tensor) -> Any:
    def inner_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ids[b, q] == ids[b, kv]

    return inner_mask


def own_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q != kv


# ------------------------------------------------------------------------------------------------------------------ masks of models


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_window_within_the_mask_of_one_query(with_mask: bool) -> None:
    """Keys 2 to 7, of which 5 is hidden; the query at 6 has a window of three tokens: 4, 5 and 6."""
    row = torch.tensor([[1, 1, 1, 0, 1, 1]]).bool() if with_mask else None
    kv_offset = 2 if with_mask else 4
    made = ModelMask(mask=None, row=row, q_offset=6, kv_offset=kv_offset).within(3)
    assert made.window == 3 and made.mask is None and made.row is not None
    assert made.row.int().tolist() == ([[0, 0, 1, 0, 1, 1]] if with_mask else [[1, 1, 1]])
    alone = ModelMask(mask=None, q_offset=6).within(3)
    assert alone.row is not None and alone.row.int().tolist() == [[0, 0, 0, 0, 1, 1, 1]]


def test_a_window_within_the_mask_of_several_queries() -> None:
    """Query i stands at 3 + i, key j at 1 + j: the window of two tokens holds its own key and the one before."""
    made = ModelMask(mask=ls.full(), q_offset=3, kv_offset=1).within(2)
    assert made.window == 2 and made.row is None
    assert pairs(made.mask, 3, 5) == [[[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]]


def test_padding_is_a_token_that_is_not_real() -> None:
    real = torch.ones(2, 3, dtype=torch.bool)
    assert not ModelMask(mask=None).padding and not ModelMask(mask=None, padding_mask=real).padding
    real[1, 0] = False
    assert ModelMask(mask=None, padding_mask=real).padding


def test_a_mask_is_moved_but_not_computed_with() -> None:
    mask = ModelMask(mask=None, family="TinyConfig")
    assert (mask.bidirectional, mask.packed, mask.whole, mask.q_offset, mask.kv_offset) == (False, False, False, 0, 0)
    assert mask.ndim == 4 and mask.to("cpu") is mask.contiguous() is mask
    for use, message in (
        (lambda: mask.shape, r"TinyConfig reads mask\.shape"),
        (lambda: mask[0], "TinyConfig indexes the mask"),
        (lambda: torch.cat([mask, mask]), "TinyConfig gives the mask to cat"),
        (lambda: torch.where(condition=mask, input=ZERO, other=ZERO), "TinyConfig gives the mask to where"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    for name in ("nothing", "_grad", "__nothing__"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(mask, name)


def test_a_mask_is_kept_and_others_are_preprocessed() -> None:
    embeds, mask = torch.zeros(2, 3), ModelMask(mask=None)
    seen: list[Any] = []

    def preprocess(config: Any, inputs: Any, given: Any, extra: int = 0) -> tuple[Any, ...]:
        seen.append(given)
        return False, given, extra

    assert keeping_masks(preprocess)(None, embeds, mask, extra=5) == (False, mask, 5)
    assert tuple(seen[0].shape) == (1, 1, 1, 1)
    assert keeping_masks(preprocess)(None, embeds, None, 7) == (False, None, 7)


def test_the_parts_of_mask_functions() -> None:
    window, packed = sliding_window_overlay(4), packed_sequence_mask_function(torch.zeros(1, 9))
    joined = and_masks(window, or_masks(causal_mask_function, own_mask), packed)
    assert mask_parts(joined) == ["sliding_window_overlay", "causal_mask_function", "own_mask", "packed_sequence_mask_function"]
    assert mask_parts(None) == [] and mask_parts(nn.Identity()) == ["Identity"]
    assert foreign_part(joined) == "own_mask" and foreign_part(and_masks(window, causal_mask_function, packed)) == foreign_part(None) == ""
    sizes = (3, 4)
    assert mask_parts(lambda b, h, q, kv: q < sizes[0]) == ["test_the_parts_of_mask_functions"]
    assert is_bidirectional(bidirectional_mask_function) and not is_bidirectional(causal_mask_function) and not is_bidirectional(None)
    assert foreign_part(bidirectional_mask_function) == "" == foreign_part(and_masks(bidirectional_mask_function))
    assert foreign_part(and_masks(bidirectional_mask_function, causal_mask_function)) == "causal_mask_function"


def remap_positions_for_packed_sequence(mask_function: Any, position_ids: torch.Tensor) -> Any:
    """Of the name of transformers' function since 5.23."""

    def inner_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask_function(b, h, position_ids[b, q], position_ids[b, kv])

    return inner_mask


def test_the_parts_of_mask_functions_by_positions_of_documents() -> None:
    inner = and_masks(sliding_window_overlay(4), causal_mask_function)
    joined = and_masks(packed_sequence_mask_function(torch.zeros(1, 9)), remap_positions_for_packed_sequence(inner, torch.zeros(1, 9)))
    assert mask_parts(joined) == ["packed_sequence_mask_function", "sliding_window_overlay", "causal_mask_function"]
    assert foreign_part(joined) == "" and foreign_part(remap_positions_for_packed_sequence(own_mask, torch.zeros(1))) == "own_mask"


def test_functions_with_offsets_and_the_keys_of_one_query() -> None:
    assert with_offsets(own_mask, 0, ZERO) is own_mask
    assert pairs(with_offsets(own_mask, 3, 0), 2, 5) == [[[1, 1, 1, 0, 1], [1, 1, 1, 1, 0]]]
    assert pairs(with_offsets(own_mask, 0, torch.tensor(1)), 2, 3) == [[[1, 1, 1], [0, 1, 1]]]
    assert pairs(with_offsets(causal_mask_function, 3, 2), 2, 4) == [[[1, 1, 0, 0], [1, 1, 1, 0]]]
    assert visible_keys(own_mask, 3, 4, 6, 4, "cpu").int().tolist() == [[1, 1, 0, 1]]
    by_row = visible_keys(lambda b, h, q, kv: (kv + h) % 3 != b, 3, 4, 6, 4, "cpu")
    assert by_row.int().tolist() == [[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 1]]
    by_head = lambda b, h, q, kv: (kv - q + 2 * b - h) % 3 == 0
    assert pairs(lambda b, h, q, kv: with_offsets(by_head, 1, 0)(b, h + 1, q, kv), 1, 4, 2) == [[[0, 0, 1, 0]], [[1, 0, 0, 1]]]
    none = visible_keys(lambda b, h, q, kv: q < 6, 3, 4, 6, 4, "cpu")
    assert none.tolist() == [[False] * 4]


@pytest.mark.parametrize(
    ("size", "config", "span"),
    [
        (None, {"layer_types": ["chunked_attention"], "attention_chunk_size": 4}, (None, None)),
        (4, None, (4, None)),
        (4, {"layer_types": ["chunked_attention"], "attention_chunk_size": 4}, (None, 4)),
        (5, {"layer_types": ["chunked_attention"], "attention_chunk_size": 4}, (5, None)),
        (4, {"layer_types": ["chunked_attention"], "attention_chunk_size": 4, "sliding_window": 4}, (4, None)),
        (4, {"layer_types": ["chunked_attention"], "attention_chunk_size": 4, "sliding_window": 9}, (None, 4)),
        (4, {"layer_types": ["sliding_attention"], "attention_chunk_size": 4}, (4, None)),
    ],
)
def test_a_local_size_is_a_window_or_a_chunk(size: int | None, config: dict[str, Any] | None, span: tuple[Any, Any]) -> None:
    made = span_of(size, None if config is None else SimpleNamespace(**config))
    assert (made["window"], made["chunk"]) == span


# ------------------------------------------------------------------------------------------------------- transformers' mask interface


def made(*args: Any, **kwargs: Any) -> ModelMask:
    mask = lst.attention_mask(*args, **kwargs)
    assert isinstance(mask, ModelMask)
    return mask


def test_the_mask_of_several_queries_is_causal_behind_offsets_with_padding() -> None:
    plain = made(2, 3, 3)
    assert pairs(plain.mask, 3, 3) == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    assert (plain.padding_mask, plain.row, plain.window, plain.chunk, plain.foreign, plain.family) == (
        None,
        None,
        None,
        None,
        "",
        "this config",
    )
    assert not (plain.bidirectional or plain.packed or plain.whole)
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    behind = made(2, 2, 4, 3, 1, causal_mask_function, real, config=SimpleNamespace())
    assert (behind.q_offset, behind.kv_offset, behind.family) == (3, 1, "SimpleNamespace")
    assert behind.padding_mask is not None and behind.padding_mask.int().tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert pairs(behind.mask, 2, 4, 2) == [[[0, 1, 1, 0], [0, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    one_row = made(1, 2, 4, 3, 1, causal_mask_function, real[:1])
    assert pairs(one_row.mask, 2, 4) == [[[0, 1, 1, 0], [0, 1, 1, 1]]]
    assert made(1, 1, 1, attention_mask=behind) is behind


def test_the_mask_of_one_query_is_a_row_of_keys() -> None:
    def row(*args: Any, **kwargs: Any) -> Any:
        mask = made(*args, **kwargs)
        assert mask.mask is None
        return None if mask.row is None else mask.row.int().tolist()

    ones, real = torch.ones(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    assert row(2, 1, 6, 5, 0, causal_mask_function) is None and row(2, 1, 4, 5, 2, causal_mask_function) is None
    assert row(2, 1, 6, 4, 0, causal_mask_function) == [[1, 1, 1, 1, 1, 0]]  # the last key is of a static cache
    assert row(2, 1, 6, 5, 0, causal_mask_function, ones) is None
    assert row(2, 1, 6, 5, 0, causal_mask_function, real) == real.tolist()
    assert row(2, 1, 6, 5, 0, own_mask, real) == [[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0]]
    assert row(2, 1, 6, 5, 0, own_mask, ones) == row(2, 1, 6, 5, 0, own_mask) == [[1, 1, 1, 1, 1, 0]]
    assert row(2, 1, 8, 5, 0, causal_mask_function, real) == [[0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0]]
    full = made(2, 1, 6, 5, 0, own_mask, use_vmap=True)
    assert full.row is None and pairs(full.mask, 1, 6) == [[[1, 1, 1, 1, 1, 0]]]
    assert made(2, 1, 6, 5).mask is not None


def test_what_a_mask_says_of_itself() -> None:
    ids = torch.tensor([[0, 0, 1]])
    mask = made(1, 3, 3, mask_function=and_masks(causal_mask_function, packed_sequence_mask_function(ids)), local_size=7)
    assert mask.packed and mask.window == 7 and mask.foreign == "" and not mask.bidirectional
    assert (
        made(1, 3, 3, mask_function=bidirectional_mask_function).bidirectional
        and made(1, 3, 3, mask_function=own_mask).foreign == "own_mask"
    )
    forward = Forward(SimpleNamespace(whole_inputs=True))
    with in_forward(forward):
        mask = made(1, 3, 3)
        assert forward.model_mask is mask and not mask.whole  # no ModelPlans
    assert current_forward.get() is None


# ------------------------------------------------------------------------------------------------------------- layers without a plan


def mask_of(query: int, key: int, mask: Any = None, window: int | None = None, module: Any = None, **rest: Any) -> Any:
    q, k = torch.zeros(2, 1, query, 4), torch.zeros(2, 1, key, 4)
    return lst._mask_on_one_device(nn.Module() if module is None else module, q, k, mask, window, rest)


def test_masks_of_layers_on_one_device() -> None:
    assert pairs(mask_of(3, 3), 3, 3) == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    assert pairs(mask_of(3, 3, window=2), 3, 3) == [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
    assert mask_of(1, 5) is None and pairs(mask_of(1, 5, window=2), 1, 5) == [[[0, 0, 0, 1, 1]]]
    assert mask_of(3, 5, is_causal=False) is None and mask_of(3, 3, window=2, is_causal=False) is None
    causal_layer, other_layer = nn.Module(), nn.Module()
    causal_layer.is_causal, other_layer.is_causal = True, False  # type: ignore[assignment]
    assert mask_of(3, 5, module=other_layer) is None and mask_of(3, 3, module=other_layer, is_causal=True) is not None
    assert mask_of(3, 3, module=causal_layer) is not None and mask_of(3, 3, module=causal_layer, is_causal=None) is not None
    with pytest.raises(ValueError, match="expected a mask for 3 queries over 5 keys, got none"):
        mask_of(3, 5)
    given, tensor = ModelMask(mask=ls.causal()), torch.zeros(1)
    assert mask_of(3, 3, given) is given.mask and mask_of(3, 3, tensor) is tensor
    for row in ([[1, 0, 1]], [[1, 0, 1], [0, 1, 1]]):
        by_row = mask_of(1, 3, ModelMask(mask=None, row=torch.tensor(row).bool()))
        assert isinstance(by_row, RealKeys) and by_row.real.ndim == len(row) and pairs(by_row, 1, 3, len(row)) == [[r] for r in row]
    with pytest.raises(ValueError, match=r"under torch\.compile a model needs longspan_plan"):
        mask_of(3, 3, CompiledMask())


def test_pairs_that_show_padding_on_the_left_raise() -> None:
    """The first row has one token of padding on the left, and one in the middle, which is not on the left."""
    real = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]]).bool()
    lowest = torch.finfo(torch.float32).min
    hidden = torch.tensor([[lowest, 0.0, 0.0, 0.0]])[None, None].expand(2, 1, 3, 4)
    tokens = ModelMask(mask=None, padding_mask=real)
    for mask in (hidden, hidden == 0):
        _check_padding(tokens, mask)
    _check_padding(tokens, torch.full((2, 1, 3, 4), lowest / 2))
    for wrong in (torch.zeros(2, 1, 3, 4), torch.ones(2, 1, 3, 4).bool(), torch.full((2, 1, 3, 4), lowest * 0.4)):
        with pytest.raises(ValueError, match=r"of shape \(2, 1, 3, 4\), shows tokens of padding on the left"):
            _check_padding(tokens, wrong)
        for other in (None, ModelMask(mask=None), ModelMask(mask=None, padding_mask=real, bidirectional=True)):
            _check_padding(other, wrong)
        _check_padding(tokens, wrong[..., :3])


def test_attention_by_a_mask_of_pairs() -> None:
    """Six query heads over two KV heads, and a mask that hides another key from each query; without a mask, all pairs and a sink."""
    generator = torch.Generator().manual_seed(1)
    sizes = (6, 5, 4), (2, 7, 4), (2, 7, 3)
    q, k, v = (torch.randn(2, *size, generator=generator, dtype=torch.float64) for size in sizes)
    seen = torch.arange(7) != torch.arange(5)[:, None]
    options: dict[str, Any] = {"to_tokens": True, "scale": 0.7, "sink": None, "score_mod": None}
    scores = 0.7 * q @ k.repeat_interleave(3, 1).transpose(2, 3)
    want = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)).transpose(1, 2)
    for mask in (seen[None, None], torch.zeros(1, 1, 5, 7, dtype=torch.float64).masked_fill(~seen, -torch.inf)):
        got = attend_pairs(q, k, v, mask, **options)
        torch.testing.assert_close(got, want)
        assert got.is_contiguous()
    same_heads = attend_pairs(q[:, :2], k, v, seen[None, None], **options)
    torch.testing.assert_close(same_heads, ls.scaled_dot_product_attention(q[:, :2], k, v, attn_mask=seen, scale=0.7).transpose(1, 2))
    sink = torch.linspace(-1, 1, 6, dtype=torch.float64)
    columns = torch.cat([scores, sink[:, None, None].expand(2, 6, 5, 1)], -1).softmax(-1)[..., :-1]
    got = attend_pairs(q, k, v, None, **{**options, "sink": sink})
    torch.testing.assert_close(got, (columns @ v.repeat_interleave(3, 1)).transpose(1, 2))
    assert got.is_contiguous()
    for change in ({"sink": sink}, {"score_mod": lambda score, b, h, q, kv: score}):
        with pytest.raises(ValueError, match=r"got attention_mask of shape \(1, 1, 5, 7\)"):
            attend_pairs(q, k, v, seen[None, None], **{**options, **change})
    forward = Forward(None)
    forward.model_mask = ModelMask(mask=None, padding_mask=torch.arange(7).expand(2, 7) > 0)
    with in_forward(forward):
        attend_pairs(q, k, v, seen[None, None], **{**options, "to_tokens": False})
        with pytest.raises(ValueError, match="padding on the left"):
            attend_pairs(q, k, v, seen[None, None], **options)


# ---------------------------------------------------------------------------------------------------------------- layers with a plan


def planned(module: Any = None, lengths: Any = (3, 3), mask: Any = None) -> None:
    lst._check_planned(nn.Module() if module is None else module, lengths, mask)


class TinyCrossAttention(nn.Module):
    pass


def test_what_a_plan_takes_beside_it() -> None:
    padded = torch.tensor([[0, 1]]).bool()
    for mask in (None, CompiledMask(), ModelMask(mask=None), ModelMask(mask=None, padding_mask=~padded | padded)):
        planned(mask=mask)
    planned(mask=ModelMask(mask=None, padding_mask=padded, whole=True))
    planned(mask=ModelMask(mask=None, foreign="own", whole=True))
    planned(module=TinyCrossAttention(), lengths=None)
    for arguments, message in (
        ({"lengths": (3, 4)}, "same tokens with a plan, got 3 and 4: a cache"),
        ({"mask": torch.zeros(1)}, "got attention_mask of type Tensor"),
        ({"mask": ModelMask(mask=None, padding_mask=padded)}, "give attention_mask to prepare_batch"),
        ({"mask": ModelMask(mask=None, foreign="own")}, "got the part 'own'"),
        ({"mask": ModelMask(mask=None, foreign="own", whole=True), "lengths": None}, "got the part 'own'"),
        ({"module": TinyCrossAttention()}, "got cross-attention"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(**arguments)
    layer = nn.Module()
    layer.config = SimpleNamespace(output_router_logits=True)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="output_router_logits"):
        planned(layer)


@pytest.mark.parametrize(
    ("mask", "window", "span"),
    [
        (None, None, None),
        (None, 7, ("sliding", 7)),
        (ModelMask(mask=None), 7, None),
        (ModelMask(mask=None, window=5), 7, ("sliding", 5)),
        (ModelMask(mask=None, window=5, chunk=9), None, ("chunked", 9)),
        (CompiledMask(window=5), None, ("sliding", 5)),
        (CompiledMask(chunk=4), 7, ("chunked", 4)),
    ],
)
def test_the_mask_decides_over_the_window_of_a_layer(mask: Any, window: int | None, span: Any) -> None:
    assert lst._span(mask, window) == span


def test_plans_for_windows_and_chunks() -> None:
    one = ls.plan(ls.causal(), 9, ls.Mesh.abstract(1))
    several = ls.plan({"full": ls.causal(), "sliding": ls.causal() & ls.sliding_window(3)}, 9, ls.Mesh.abstract(1))
    assert lst._plan_for(one, None, 4, 2) is one and lst._plan_for(several, None, 4, 2) is several["full"]
    assert lst._plan_for(several, ("sliding", 3), 4, 2) is several["sliding"]
    with pytest.raises(ValueError, match=r"window of 3 tokens.*\{'full': mask, 'sliding': mask & sliding_window\(3\)\}"):
        lst._plan_for(one, ("sliding", 3), 4, 2)
    with pytest.raises(ValueError, match=r"chunks of 5 tokens.*\{'full': mask, 'chunked': mask & …, for chunks of 5 tokens\}"):
        lst._plan_for(one, ("chunked", 5), 4, 2)
    calls: list[Any] = []
    plans = lst.prepare_batch({"input_ids": torch.zeros(2, 9, dtype=torch.int64)}, ls.Mesh.abstract(1))["longspan_plan"]
    plans.of = lambda *args: calls.append(args)  # type: ignore[method-assign]
    lst._plan_for(plans, ("sliding", 3), 4, 2)
    assert calls == [(("sliding", 3), 4, 2)]


def test_layers_of_another_direction_than_the_plan_raise() -> None:
    plans = lst.prepare_batch({"input_ids": torch.zeros(2, 9, dtype=torch.int64)}, ls.Mesh.abstract(1))["longspan_plan"]
    causal, both = ModelMask(mask=None), ModelMask(mask=None, bidirectional=True)
    layer, encoder_layer = nn.Module(), nn.Module()
    encoder_layer.is_causal = False  # type: ignore[assignment]
    one = plans["full"]

    def check(module: Any, mask: Any, plan: Any, **rest: Any) -> None:
        lst._check_direction(module, mask, rest, plan)

    for plan in (plans, one):
        check(layer, None, plan)
        check(layer, causal, plan)
        check(encoder_layer, None, plan, is_causal=True)
        check(layer, ModelMask(mask=None, bidirectional=True, whole=True), plan)
        for module, mask, rest in (
            (layer, both, {}),
            (encoder_layer, None, {}),
            (encoder_layer, causal, {}),
            (layer, None, {"is_causal": False}),
        ):
            with pytest.raises(ValueError, match=r"expected a causal layer, .* got not a causal layer"):
                check(module, mask, plan, **rest)
    plans.bidirectional = True
    check(encoder_layer, None, plans)
    check(layer, both, plans)
    for module, mask in ((layer, None), (layer, causal), (layer, ModelMask(mask=None, whole=True))):
        with pytest.raises(ValueError, match=r"expected not a causal layer, .* got a causal layer"):
            check(module, mask, plans)


def test_masks_of_a_models_own_need_one_document_per_row() -> None:
    def plans() -> Any:
        return lst.prepare_batch({"input_ids": torch.zeros(2, 9, dtype=torch.int64)}, ls.Mesh.abstract(1))["longspan_plan"]

    mask = ModelMask(mask=ls.full(), foreign="own", whole=True)
    made = lst._plan_of_model_mask(plans(), mask)
    assert made.data.mask.text == ls.plan(ls.full(), 9, ls.Mesh.abstract(1)).data.mask.text
    for field in ("states_documents", "documents_from_positions"):
        packed = plans()
        setattr(packed, field, True)
        with pytest.raises(ValueError, match="one document per row beside a mask with the part 'own'"):
            lst._plan_of_model_mask(packed, mask)
    for wrong, given in ((plans()["full"], mask), (plans(), ModelMask(mask=None, foreign="own"))):
        with pytest.raises(ValueError, match="one document per row"):
            lst._plan_of_model_mask(wrong, given)


def test_keywords_that_attention_would_ignore_raise() -> None:
    layer = nn.Module()
    lst._check_supported(layer, 0.0, dict.fromkeys(lst._IGNORED_KEYWORDS, 3))
    lst._check_supported(layer, 0.0, {"other": None, "another": False, "output_attentions": False})
    layer.config = SimpleNamespace(attn_pdrop=0.25)  # type: ignore[assignment]
    for dropout, rest, message in (
        (0.25, {}, r"got dropout=0\.25; set config\.attn_pdrop=0\.0"),
        (0.0, {"output_attentions": True}, "expected output_attentions=False, got True"),
        (0.0, {"b": 1, "use_cache": True, "a": 0}, "got the unknown keyword 'b', 'a' for attention"),
    ):
        with pytest.raises(ValueError, match=message):
            lst._check_supported(layer, dropout, rest)


def test_documents_by_bounds_need_a_mask_of_documents() -> None:
    packed, plain = ModelMask(mask=None, packed=True), ModelMask(mask=None)
    for mask, bounds in ((None, None), (plain, torch.tensor([0, 9])), (packed, torch.tensor([0, 4, 9])), (None, [0, 4, 9])):
        lst._check_documents(mask, {"cu_seq_lens_q": bounds})
    for mask in (None, plain, torch.zeros(1)):
        with pytest.raises(ValueError, match="beside cu_seq_lens_q"):
            lst._check_documents(mask, {"cu_seq_lens_q": torch.tensor([0, 4, 9])})


# ----------------------------------------------------------------------------------------------------------------------- forwards


def test_layers_find_the_plan_of_their_forward() -> None:
    encoder, whole = object(), SimpleNamespace(whole_inputs=True)
    module, plain = nn.Module(), SimpleNamespace(encoder=encoder)
    assert _forward.plan_in_context(module) is None
    with in_forward(Forward(None)):
        assert _forward.plan_in_context(module) is None
    assert _forward.plan_in_context(module) is None
    forward = Forward(whole)
    with in_forward(forward):
        assert _forward.plan_in_context(module) is None
        forward.in_decoder = True
        assert _forward.plan_in_context(nn.Module()) is whole
    forward = Forward(plain)
    forward.in_encoder = True
    assert forward.active_plan is encoder
    forward.in_encoder = False
    with in_forward(forward):
        assert _forward.plan_in_context(module) is plain
        _forward.record_loss()
        with _forward.outside_of_forwards():
            assert _forward.plan_in_context(nn.Module()) is None
    assert forward.counted_loss
    _forward.record_loss()
    with pytest.raises(ValueError, match="is recomputed outside of its model's forward"):
        _forward.plan_in_context(module)
