"""Encoder-decoder models on ranks: both sequences are sharded, and loss and gradients equal those of eager attention on one process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from tests.integrations.families import RANKS, on_ranks, results, with_random_weights
from tests.integrations.tiny_models import recompute

import longspan as ls
import longspan.integrations.transformers as lst
from longspan.integrations import memory
from longspan.integrations._cross_plans import CrossPlans
from longspan.integrations._relative_bias import RelativeBias, _farthest
from longspan.testing import virtual_world

ROWS, ENCODED, DECODED, VOCAB = 2, 23, 17, 61
T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "pad_token_id": 0,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11,
}  # fmt: skip
BART = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 6, "max_source_positions": ENCODED,
    "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SETTINGS = {"T5": T5, "UMT5": T5, "Bart": BART, "Whisper": WHISPER}


def model_of(name: str, implementation: str = "longspan", **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SETTINGS[name], **settings})
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(0)
    return with_random_weights(kind._from_config(config, attn_implementation=implementation).eval())


def batch_of(name: str = "T5") -> dict[str, Tensor]:
    """Both sequences padded; labels of padding do not count."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(3, VOCAB, (ROWS, DECODED), generator=generator)
    if name == "Whisper":
        return {"input_features": torch.randn(ROWS, 6, 2 * ENCODED, generator=generator), "labels": labels}
    ids = torch.randint(3, VOCAB, (ROWS, ENCODED), generator=generator)
    encoder_pads, decoder_pads = (torch.tensor(pads)[:, None] for pads in ([6, 0], [3, 5]))
    real = torch.arange(DECODED) < DECODED - decoder_pads
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ENCODED) >= encoder_pads).long(),
        "decoder_attention_mask": real.long(),
        "labels": labels.masked_fill(~real, -100),
    }


def compare(model: Any, batch: dict[str, Tensor], want: tuple[Tensor, list[Tensor]], **options: Any) -> None:
    got = on_ranks(model, batch, **options)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    largest = max(float(w.abs().max()) for w in want[1])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ["T5", "Bart", "Whisper"])
def test_ranks_equal_eager_attention_with_padding_on_both_sides(name: str) -> None:
    batch = batch_of(name)
    compare(model_of(name), batch, results(model_of(name, "eager"), batch))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ring", "layout": "contiguous"},
        {"strategy": "allgather", "layout": "head_tail"},
        {"strategy": "exchange", "layout": "round_robin", "stages": 2},
    ],
    ids=lambda options: options["strategy"],
)
def test_strategies_and_layouts_apply_to_cross_attention(options: dict[str, Any]) -> None:
    model, batch = model_of("T5"), batch_of()
    compare(model, batch, results(model, batch), **options)
    plans: Any = lst.prepare_batch(batch, ls.Mesh.abstract(RANKS), config=model, **options)["longspan_plan"]
    cross = plans.cross(4, 4)
    assert cross.strategy == plans["full"].strategy
    assert (cross.layout, cross.kv_layout) == (plans.layout, plans.encoder.layout)


def test_checkpointed_layers_find_the_plan_of_their_stack() -> None:
    model, batch = model_of("T5"), batch_of()
    want = results(model, batch)
    recompute(model)
    compare(model.train(), batch, want)


def test_plans_of_two_stacks_pickle() -> None:
    plans = lst.prepare_batch(batch_of(), ls.Mesh.abstract(RANKS), config=model_of("T5"))["longspan_plan"]
    copy = pickle.loads(pickle.dumps(plans))
    assert isinstance(copy, CrossPlans) and copy.whole_inputs
    assert copy.encoder.layout == plans.encoder.layout and copy.cross(4, 4).kv_local_len == plans.cross(4, 4).kv_local_len
    moved = plans.on(ls.Mesh.abstract(RANKS))
    assert moved.cross(4, 4).layout == plans.layout


def test_generation_with_a_relative_bias_equals_eager() -> None:
    ids = batch_of()["input_ids"]
    texts = [model_of("T5", kind).generate(ids, max_new_tokens=9, do_sample=False) for kind in ("longspan", "eager")]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_buckets_of_all_distances_or_a_sentence(name: str) -> None:
    """17 decoder tokens. With 16 buckets, 8 distances have buckets of their own in the decoder, 4 in the encoder."""
    batch, settings = batch_of(), {"relative_attention_num_buckets": 16}
    want = results(model_of(name, "eager", **settings, relative_attention_max_distance=9), batch)
    got = results(model_of(name, **settings, relative_attention_max_distance=9), batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(float(w.abs().max()) for w in want[1]))
    for distance in (8, 7):
        model = model_of(name, **settings, relative_attention_max_distance=distance)
        with pytest.raises(ValueError, match=f"expected relative_attention_max_distance above 8, .* got {distance}"):
            model(**batch)


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "Bart", "Whisper"])
def test_hidden_states_of_both_stacks_are_those_of_this_ranks_tokens(name: str) -> None:
    model, batch = model_of(name), batch_of(name)
    expected = model_of(name, "eager")(**batch, output_hidden_states=True)

    def rank(mesh: Any) -> Any:
        prepared: Any = lst.prepare_batch(batch, mesh, config=model)
        with torch.no_grad():
            plans, out = prepared["longspan_plan"], model(**prepared, output_hidden_states=True)
        stacks = (plans, out.decoder_hidden_states), (plans.encoder, out.encoder_hidden_states)
        return [[own.unshard(x, 1) for x in states] for own, states in stacks]

    for whole in virtual_world(RANKS).run(rank):
        for got, want in zip(whole, (expected.decoder_hidden_states, expected.encoder_hidden_states), strict=True):
            assert len(got) == len(want) == 3
            torch.testing.assert_close(got, list(want), rtol=1e-4, atol=1e-5 * float(want[-1].abs().max()))


def test_labels_of_left_padding_do_not_count() -> None:
    """Eager attention counts them: a token that sees nothing predicts by the mean of all values."""
    model, batch = model_of("T5"), batch_of()
    real = torch.arange(DECODED) >= torch.tensor([[3], [0]])
    generator = torch.Generator().manual_seed(5)
    batch["decoder_input_ids"], batch["labels"] = torch.randint(3, VOCAB, (2, ROWS, DECODED), generator=generator)
    batch["decoder_attention_mask"] = real.long()
    counted = {**batch, "labels": batch["labels"].masked_fill(~real, -100)}
    compare(model, batch, results(model_of("T5", "eager"), counted))


def test_no_cache_is_made_beside_a_plan() -> None:
    def rank(mesh: Any) -> Any:
        model = model_of("T5")
        given: Any = lst.prepare_batch(batch_of(), mesh, config=model)
        assert given.pop("use_cache") is False
        return model(**given).past_key_values

    assert virtual_world(RANKS).run(rank) == [None] * RANKS


def test_no_tensor_of_query_key_pairs_is_made_for_the_bias() -> None:
    model, sizes = model_of("T5"), []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor))
            return out

    ids = torch.ones(1, 600, dtype=torch.long)
    with torch.no_grad(), Sizes():
        model(input_ids=ids, labels=ids[:, :500])
    assert max(sizes) < 500 * 600


def changed(**entries: Any) -> Any:
    """A forward pass with some of the inputs from `prepare_batch` replaced."""

    def run(mesh: Any) -> None:
        model = model_of("T5")
        prepared: Any = lst.prepare_batch(batch_of(), mesh, config=model)
        model(**{**prepared, **entries})

    return run


def prepared(name: str = "T5", more: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    def run(mesh: Any) -> None:
        model = model_of(name, **settings).train()
        model(**lst.prepare_batch({**batch_of(name), **(more or {})}, mesh, config=model, **(options or {})))

    return run


def with_config(mesh: Any) -> None:
    lst.prepare_batch(batch_of(), mesh, config=model_of("T5").config)


def with_a_classifier(mesh: Any) -> None:
    model = transformers.BartForSequenceClassification._from_config(transformers.BartConfig(**BART), attn_implementation="longspan")
    lst.prepare_batch(batch_of(), mesh, config=model)


def compiled(mesh: Any) -> None:
    model = model_of("T5")
    model.decoder.block[0].compile(backend="eager")
    model(**lst.prepare_batch(batch_of(), mesh, config=model))


def test_the_loss_without_logits_raises() -> None:
    with pytest.raises(ValueError, match="expected a causal LM, got T5ForConditionalGeneration"):
        memory.causal_lm_loss(model_of("T5"), batch_of())


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (with_config, "give the model itself"),
        (with_a_classifier, "with a language modelling head, got BartForSequenceClassification"),
        (changed(attention_mask=None), "expected the attention_mask that prepare_batch was given"),
        (changed(use_cache=True), "expected use_cache=False and no past_key_values beside a plan"),
        (prepared(more={"attention_mask": torch.arange(ENCODED) < torch.tensor([[20], [0]])}), r"got padding only in rows \[1\]"),
        (changed(input_ids=torch.ones(ROWS, 9, dtype=torch.long)), "expected hidden states .* of the encoder|size of tensor|expanded size"),
        (prepared(dropout_rate=0.1), r"set config.dropout_rate=0.0"),
        (prepared("Bart", encoder_layerdrop=0.1), "expected config.encoder_layerdrop=0.0"),
        (prepared("Whisper", apply_spec_augment=True), "expected apply_spec_augment=False"),
        (prepared(more={"shift_labels": torch.ones(ROWS, DECODED)}), "whose labels are not shifted"),
        (prepared(more={"position_ids": torch.ones(ROWS, ENCODED)}), "got position_ids, which is not supported"),
        (prepared(more={"labels": torch.ones(ROWS, 5, dtype=torch.long)}), "expected decoder_attention_mask of shape"),
        (prepared(options={"layout": ls.plan(ls.causal(), 9, ls.Mesh.abstract(1)).layout}), "expected the name of a layout"),
        (compiled, "is compiled: not supported for encoder-decoders"),
    ],
)
def test_raises(run: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        virtual_world(1).run(run)


@pytest.mark.parametrize("past", [0, 3, 20])
def test_a_relative_bias_is_that_of_positions_behind_cached_tokens(past: int) -> None:
    """A table of every distance up to 8; queries stand behind the cached tokens, keys from 0 on."""
    layer = SimpleNamespace(
        has_relative_attention_bias=True, relative_attention_max_distance=8, relative_attention_num_buckets=8, is_decoder=True,
        relative_attention_bias=torch.nn.Embedding(17, 3), _relative_position_bucket=lambda distances, **_: distances + 8,
    )  # fmt: skip
    mod = RelativeBias(layer).score_mod(past)
    assert mod is not None
    q, kv = torch.arange(5)[:, None], torch.arange(past + 5)
    for h in range(3):
        got = mod(torch.ones(5, past + 5), torch.tensor(0), torch.tensor(h), q, kv)
        want = 1 + layer.relative_attention_bias.weight[(kv - (q + past)).clamp(-8, 8) + 8, h]
        assert torch.equal(got, want)
    layer.has_relative_attention_bias = False
    assert RelativeBias(layer).score_mod(past) is None


def test_a_relative_bias_needs_distances_beyond_its_exact_buckets() -> None:
    for is_decoder, exact in ((True, 16), (False, 8)):
        for farthest in (exact, exact + 1):
            layer = SimpleNamespace(relative_attention_max_distance=farthest, relative_attention_num_buckets=32, is_decoder=is_decoder)
            if farthest > exact:
                assert _farthest(layer) == farthest
            else:
                with pytest.raises(ValueError, match=f"expected relative_attention_max_distance above {exact}"):
                    _farthest(layer)
