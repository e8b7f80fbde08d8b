"""Inputs of encoder-decoders, prepared: plans of both stacks, labels, audio features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.integrations import small_parts
from tests.integrations.small_parts import SOURCE, ZERO, encoder_decoder, ids, pairs, two

import longspan as ls
from longspan.integrations import _batch_parts, _cross_batch


def test_both_stacks_get_plans_and_the_labels_of_the_decoder_are_split() -> None:
    source, target = ids(2, 12), ids(2, 7)
    real, decoder_real = torch.ones(2, 12, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)
    real[0, 9:], decoder_real[1, :5] = 0, 0
    batch = {"input_ids": source, "decoder_input_ids": target, "labels": target}
    batch |= {"attention_mask": real, "decoder_attention_mask": decoder_real}
    made = two({**batch, "return_dict": True}, gradients="sum")
    assert set(made) == {*batch, "longspan_plan", "use_cache", "num_items_in_batch", "return_dict"} and made["use_cache"] is False
    assert all(made[name] is batch[name] for name in batch if name != "labels")
    assert made["labels"].tolist() == [[4, 5, 6, 7], [-100, -100, 13, 14]] and float(made["num_items_in_batch"]) == 7 + 2
    plans = made["longspan_plan"]
    assert (plans.layout.length, plans.encoder.layout.length, plans.bidirectional, plans.encoder.bidirectional) == (7, 12, False, True)
    assert plans.real_tokens.int().tolist() == decoder_real.tolist() and plans.encoder.real_tokens.int().tolist() == real.tolist()
    tokens = torch.arange(12)
    cross = plans.cross_mask(torch.arange(2)[:, None], ZERO, ZERO, tokens)
    assert cross.int().tolist() == real.tolist() and plans.whole_inputs
    order = torch.ones(7, 7, dtype=torch.bool).tril()
    assert pairs(plans._mask, 7, 2) == (decoder_real[:, None].bool() & order).int().tolist()
    assert pairs(plans.encoder._mask, 12, 2) == real[:, None].expand(2, 12, 12).tolist()
    one = two({"input_ids": source[:1], "decoder_input_ids": target[:1], "attention_mask": real[:1]})["longspan_plan"]
    assert one.cross_mask(ZERO, ZERO, ZERO, tokens).int().tolist() == real[0].tolist()
    shared = two({**batch, "attention_mask": real[:1].expand(2, 12), "decoder_attention_mask": torch.ones(2, 7)})["longspan_plan"]
    assert shared.cross_mask.real.ndim == 1 and plans.cross_mask.real.ndim == 2
    assert two(batch, strategy="ring")["longspan_plan"].cross_strategy == "ring"
    assert shared.cross_mask(ZERO, ZERO, ZERO, tokens).int().tolist() == real[0].tolist() and shared.real_tokens is None
    plain = two({"input_ids": source, "decoder_inputs_embeds": torch.zeros(2, 7, 3)})
    assert "labels" not in plain and plain["longspan_plan"].encoder.real_tokens is None
    data = plain["longspan_plan"]["full"].data
    assert (data.heads, data.kv_heads) == (4, 4)


def test_the_decoder_gets_shifted_labels_if_it_gets_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    source, labels = ids(2, 12), ids(2, 7)
    by_model = encoder_decoder(prepare_decoder_input_ids_from_labels=lambda self, labels: labels + 100)
    made = two({"input_ids": source, "labels": labels}, by_model)
    assert torch.equal(made["decoder_input_ids"], labels + 100)
    with pytest.raises(ValueError, match="expected decoder_input_ids for TinyForConditionalGeneration, got labels only"):
        two({"input_ids": source, "labels": labels})
    monkeypatch.setattr(small_parts, "shift_tokens_right", lambda x, pad, start: x * 100 + 10 * pad + start, raising=False)
    assert torch.equal(two({"input_ids": source, "labels": labels})["decoder_input_ids"], labels * 100 + 3)
    with pytest.raises(ValueError, match="expected labels or decoder_input_ids for an encoder-decoder model, got neither"):
        two({"input_ids": source})


def test_audio_features_have_the_length_that_the_config_says() -> None:
    made = two({"input_features": torch.zeros(2, 5, 30), "decoder_input_ids": ids(2, 7)}, encoder_decoder("whisper"))
    assert made["longspan_plan"].encoder.layout.length == 15
    embedded = two({"inputs_embeds": torch.zeros(2, 12, 5), "decoder_input_ids": ids(2, 7)})
    assert embedded["longspan_plan"].encoder.layout.length == 12


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({**SOURCE, "inputs_embeds": torch.zeros(2, 12, 5)}, {}, "expected one of .*, got input_ids, inputs_embeds"),
        ({"decoder_input_ids": ids(2, 7)}, {}, "expected one of .*, got none"),
        ({**SOURCE, "pixels": 1, "audio": 2}, {}, "got pixels, audio, which is not supported"),
        ({**SOURCE, "attention_mask": torch.ones(2, 7)}, {}, r"expected attention_mask of shape \[2, 12\], got shape \(2, 7\)"),
        ({**SOURCE, "decoder_attention_mask": torch.ones(2, 12)}, {}, r"expected decoder_attention_mask of shape \[2, 7\], got"),
        ({**SOURCE, "labels": ids(1, 7)}, {}, r"expected labels of shape \[2, 7\], got shape \(1, 7\)"),
        ({**SOURCE, "shift_labels": ids(2, 7)}, {}, "an encoder-decoder model, whose labels are not shifted"),
        ({**SOURCE, "attention_mask": (torch.arange(12) < torch.tensor([[0], [5]])).long()}, {}, r"padding only in rows \[0\]"),
        ({**SOURCE}, {"layout": ls.plan(ls.full(), 7, ls.Mesh.abstract(2)).layout}, "the name of a layout .*, got Layout"),
        ({**SOURCE}, {"strategy": 3}, "the name of a strategy .*, got int"),
        ({**SOURCE, "input_ids": ids(2, 1)}, {}, "got 1 tokens for 2 ranks"),
        ({"input_ids": ids(2, 12), "decoder_input_ids": ids(2, 1)}, {}, "got 1 tokens for 2 ranks"),
        (
            {"input_features": torch.zeros(2, 5, 30), "decoder_input_ids": ids(2, 7), "attention_mask": torch.ones(2, 15)},
            {},
            "expected no attention_mask beside input_features",
        ),
    ],
)
def test_inputs_of_two_stacks_that_do_not_fit_raise(batch: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two(batch, **options)


def test_models_of_two_stacks_that_were_not_compared_raise() -> None:
    with pytest.raises(ValueError, match="got an encoder-decoder of type 'led'"):
        two(SOURCE, encoder_decoder("led"))
    model = encoder_decoder()
    model.config.apply_spec_augment = True
    with pytest.raises(ValueError, match="expected apply_spec_augment=False, got True"):
        two(SOURCE, model)
    assert _cross_batch._KNOWN[-2:] == ("labels", "shift_labels") and _batch_parts._FLAGS[0] == "return_dict"
