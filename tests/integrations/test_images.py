"""Batches with images on ranks against eager attention on one process: M-RoPE, bidirectional image tokens, deep-stacked features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.integrations.families import on_ranks, results, tiny_settings, with_random_weights
from tests.integrations.other_families import labelled_batch, tiny_model
from tests.integrations.tiny_models import recompute
from torch import Tensor

import longspan as ls
from longspan.integrations._configs import chunks_by_position
from longspan.integrations._decoders import _check_features
from longspan.testing import virtual_world

transformers = pytest.importorskip("transformers")
lst = pytest.importorskip("longspan.integrations.transformers")

VOCAB, LENGTH, IMAGE, START = 97, 39, 90, 91
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def token_ids(image_tokens: int, starts: tuple[int, int]) -> Tensor:
    """Two rows of text with an image of `image_tokens` tokens each, which begin at `starts`."""
    ids = torch.randint(3, 80, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    for row, start in enumerate(starts):
        ids[row, start - 1] = START
        ids[row, start : start + image_tokens] = IMAGE
    return ids


def labelled(ids: Tensor) -> dict[str, Tensor]:
    labels = ids.masked_fill(ids >= IMAGE, -100)
    return {"input_ids": ids, "labels": labels}


def qwen2_vl() -> tuple[Any, Any, dict[str, Tensor]]:
    vision = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4, "hidden_size": 32, "spatial_merge_size": 2}
    text = {**TEXT, "rope_parameters": MROPE}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START, video_token_id=93
    )
    ids = token_ids(6, (5, 17))
    images = {"pixel_values": torch.randn(48, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 6], [1, 6, 4]])}
    return transformers.Qwen2VLForConditionalGeneration, config, {**labelled(ids), **images, "mm_token_type_ids": (ids == IMAGE).int()}


def qwen3_vl() -> tuple[Any, Any, dict[str, Tensor]]:
    vision = {
        "hidden_size": 16, "depth": 2, "num_heads": 2, "intermediate_size": 24, "patch_size": 4, "out_hidden_size": 32,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START,
        video_token_id=93, vision_end_token_id=94,
    )  # fmt: skip
    _, _, batch = qwen2_vl()
    return transformers.Qwen3VLForConditionalGeneration, config, batch


def qwen3_5() -> tuple[Any, Any, dict[str, Tensor]]:
    """A gated delta net and attention, with M-RoPE."""
    _, other, batch = qwen3_vl()
    vision = {k: v for k, v in other.vision_config.to_dict().items() if k not in ("model_type", "deepstack_visual_indexes")}
    text = {
        **TEXT, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START, video_token_id=93,
        vision_end_token_id=94,
    )  # fmt: skip
    return transformers.Qwen3_5ForConditionalGeneration, config, batch


def gemma3() -> tuple[Any, Any, dict[str, Tensor]]:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        "vision_use_head": False,
    }  # fmt: skip
    text = {**TEXT, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE)
    ids = token_ids(4, (5, 26))
    types = (ids == IMAGE).long()
    batch = {**labelled(ids), "pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": types}
    return transformers.Gemma3ForConditionalGeneration, config, batch


def llava() -> tuple[Any, Any, dict[str, Tensor]]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=transformers.CLIPVisionConfig(**vision), image_token_id=IMAGE
    )
    return transformers.LlavaForConditionalGeneration, config, {**labelled(token_ids(4, (5, 26))), "pixel_values": torch.randn(2, 3, 8, 8)}


def model_of(family: Callable[[], Any], implementation: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(3)
    kind, config, batch = family()
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()
    return with_random_weights(model), batch


def padded_left(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    real = torch.arange(LENGTH)[None] >= torch.tensor([[3], [7]])
    labels = batch["labels"].masked_fill(~real, -100)
    labels[0, 3] = labels[1, 7] = -100  # padding would have to predict it
    return {**batch, "attention_mask": real.long(), "labels": labels}


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    largest = max(float(g.abs().max()) for g in want[1])
    for g, w in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=2e-4 * max(float(w.abs().max()), 1e-3 * largest))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All families, plain and padded left; a sample of both without --whole-grid."""
    if {"family", "padded"} <= set(metafunc.fixturenames):
        cases = [(family, padded) for family in (qwen2_vl, qwen3_vl, qwen3_5, gemma3, llava) for padded in (False, True)]
        sample = [(qwen3_vl, False), (gemma3, True)]
        cases = cases if metafunc.config.getoption("--whole-grid") else sample
        ids = [f"{family.__name__}-{'left' if padded else 'plain'}" for family, padded in cases]
        metafunc.parametrize(("family", "padded"), cases, ids=ids)


@pytest.fixture
def whole_grid(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("repeats another test with other settings: runs with --whole-grid")


def test_images_on_ranks_equal_eager(family: Callable[[], Any], padded: bool) -> None:
    eager, batch = model_of(family, "eager")
    batch = padded_left(batch) if padded else batch
    want = results(eager, {**batch, "use_cache": False})
    without = results(eager, {**batch, "use_cache": False, "pixel_values": batch["pixel_values"] + 1})
    assert float((without[0] - want[0]).abs()) > 1e-4  # the image matters
    model, _ = model_of(family, "longspan")
    assert_same(results(model, {**batch, "use_cache": False}), want)
    assert_same(on_ranks(model, batch), want)


@pytest.mark.usefixtures("whole_grid")
def test_bidirectional_image_tokens_matter() -> None:
    model, batch = model_of(gemma3, "longspan")
    changed = {**batch, "token_type_ids": torch.zeros_like(batch["token_type_ids"])}
    assert float((on_ranks(model, batch)[0] - on_ranks(model, changed)[0]).abs()) > 1e-5


def test_positions_by_axis_and_packed_documents_equal_eager() -> None:
    eager, batch = model_of(qwen2_vl, "eager")
    ids = batch["input_ids"].clamp(max=79)
    text = torch.cat([torch.arange(14), torch.arange(LENGTH - 14)]).expand(2, LENGTH)
    axes = torch.stack([text, text // 2, text % 5, text % 3])
    model, _ = model_of(qwen2_vl, "longspan")
    for positions in (axes, axes[1:]):  # with and without positions of text, which separate documents
        given = {"input_ids": ids, "labels": ids, "position_ids": positions}
        assert_same(on_ranks(model, given), results(eager, {**given, "use_cache": False}))


@pytest.mark.usefixtures("whole_grid")
@pytest.mark.parametrize("family", [qwen3_vl, gemma3])
def test_images_with_checkpointed_layers_equal_eager(family: Callable[[], Any]) -> None:
    eager, batch = model_of(family, "eager")
    want = results(eager, {**batch, "use_cache": False})
    model, _ = model_of(family, "longspan")
    recompute(model.train())
    assert_same(on_ranks(model, batch), want)
    lst.long_context(model, loss_chunk=None)
    assert_same(on_ranks(model, batch), want)


@pytest.mark.usefixtures("whole_grid")
@pytest.mark.parametrize("family", [qwen3_vl, llava])
def test_long_context_takes_whole_batches_with_images(family: Callable[[], Any]) -> None:
    eager, batch = model_of(family, "eager")
    want = results(eager, {**batch, "use_cache": False})
    models = [model_of(family, "longspan")[0].train() for _ in range(3)]  # not in threads: they would share one random generator

    def rank(mesh: Any) -> Any:
        return results(lst.long_context(models[mesh.rank], mesh, gradients="sum", loss_chunk=16, mlp_chunk=16), batch)

    shares = virtual_world(3).run(rank)
    assert_same((sum(s[0] for s in shares), [sum(parts) for parts in zip(*(s[1] for s in shares), strict=True)]), want)


def test_packed_documents_raise_beside_bidirectional_image_tokens() -> None:
    model, batch = model_of(gemma3, "longspan")
    documents = (torch.arange(LENGTH) > 20).long().expand(2, LENGTH)
    with pytest.raises(ValueError, match="expected one document per row"):
        on_ranks(model, {**batch, "document_ids": documents})


def test_images_whose_positions_look_like_packed_documents_raise_without_an_attention_mask() -> None:
    model = tiny_model(("vision-language", "cosmos3_edge"), "longspan")
    batch = labelled_batch("images", model)
    on_ranks(model, batch)
    del batch["attention_mask"]
    if chunks_by_position():  # since transformers 5.23, the model looks for documents in positions of text alone
        assert_same(on_ranks(model, batch), results(model, batch))
        return
    with pytest.raises(ValueError, match="takes positions of images for the beginnings of packed documents"):
        on_ranks(model, batch)


def test_features_without_a_mask_of_image_tokens_raise() -> None:
    model = tiny_model(("vision-language", "kosmos-2.5"), "longspan")
    batch = labelled_batch("images", model)
    del batch["image_embeds_position_mask"]
    with pytest.raises(ValueError, match=r"expected inputs_embeds .* for Kosmos2_5TextForCausalLM"):
        on_ranks(model, batch)


def test_features_of_more_tokens_than_the_mask_of_image_tokens_has_raise() -> None:
    model = tiny_model(("vision-language", "kosmos-2.5"), "longspan")
    batch = labelled_batch("images", model)
    is_image = batch["image_embeds_position_mask"] = batch["image_embeds_position_mask"].clone()
    features = int(is_image.sum())
    is_image[0, is_image[0].nonzero()[-1]] = 0
    with pytest.raises(ValueError, match=f"features of images in 'image_embeds' as image tokens .* got {features} and {features - 1}"):
        on_ranks(model, batch)


@pytest.mark.parametrize("features", [[torch.ones(5, 3), torch.ones(4, 3)], {2: torch.ones(4, 3)}, torch.ones(2, 2, 3)])
def test_features_of_every_layer_are_counted(features: Any) -> None:
    with pytest.raises(ValueError, match="got 4 and 5"):
        _check_features("deepstack_features", features, 5)


def test_a_vision_tower_that_computes_with_its_mask_raises_and_runs_with_sdpa() -> None:
    settings = tiny_settings(transformers.Lfm2VlConfig, "Lfm2VlForConditionalGeneration")
    settings["vision_config"]["vision_use_head"] = True  # attention of one query, by a mask tensor

    def model(implementation: Any) -> Any:
        torch.manual_seed(3)
        config = transformers.Lfm2VlConfig(**settings)
        kind = transformers.Lfm2VlForConditionalGeneration
        return with_random_weights(kind._from_config(config, attn_implementation=implementation, dtype=torch.float32).eval())

    eager, mixed = model("eager"), model({"text_config": "longspan", "vision_config": "sdpa"})
    batch = labelled_batch("images", eager)
    assert_same(on_ranks(mixed, batch), results(eager, {**batch, "use_cache": False}))
    with pytest.raises(ValueError, match=r"computes with its mask .* vision tower alone: attn_implementation=.*'vision_config': 'sdpa'"):
        on_ranks(model("longspan"), batch)


def test_the_axis_of_positions_that_a_model_reads_is_the_same_on_ranks_with_text_only() -> None:
    from longspan.integrations._decoders import _axes_of

    whole = torch.arange(11).expand(3, 2, 11).clone()
    whole[1:, :, 7:] = torch.tensor([5, 9])[:, None, None]  # an image
    for sharded in (whole[..., :4].clone(), whole[..., 6:].clone()):  # text only; with the image
        assert _axes_of(sharded[1], whole, sharded)[0].data_ptr() == whole[1].data_ptr()
    assert len(_axes_of(sharded[1].clone(), whole, sharded)) == 1  # by value
    assert len(_axes_of(sharded[1] + 2, whole, sharded)) == 3  # an offset: any axis


def test_inputs_that_a_decoder_cannot_split_raise() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, is_decoder=True,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertLMHeadModel._from_config(config, attn_implementation="longspan")
    ids = token_ids(4, (5, 26))
    with pytest.raises(ValueError, match="images, audio, video or token types"):
        on_ranks(model, {"input_ids": ids, "labels": ids, "token_type_ids": torch.zeros_like(ids)})
    model = tiny_model(("vision-language", "chameleon"), "longspan")
    with pytest.raises(ValueError, match=r"expected inputs_embeds .* for ChameleonModel"):
        on_ranks(model, labelled_batch("images", model))


def test_cross_attention_to_all_images_equals_eager_without_a_mask() -> None:
    eager, model = (tiny_model(("vision-language", "mllama"), implementation) for implementation in ("eager", "longspan"))
    batch = labelled_batch("images", model)
    del batch["cross_attention_mask"]
    want = results(eager, {**batch, "use_cache": False})
    assert_same(results(model, {**batch, "use_cache": False}), want)
    assert_same(on_ranks(model, batch), want)


@pytest.mark.parametrize("length", [10, 11])  # 10: as many tokens as features, which are no padding where tokens are
def test_cross_attention_to_images_beside_padding_on_the_left_equals_eager(length: int) -> None:
    eager, model = (tiny_model(("vision-language", "mllama"), implementation) for implementation in ("eager", "longspan"))
    whole = labelled_batch("images", model)
    batch = {name: x[:, -length:] if x.shape[1:2] == whole["input_ids"].shape[1:] else x for name, x in whole.items()}
    real = torch.arange(length)[None] >= torch.tensor([[3], [0]])
    batch |= {"attention_mask": real.long(), "cross_attention_mask": torch.ones_like(batch["cross_attention_mask"])}
    batch["labels"] = batch["labels"].masked_fill(~real, -100)
    batch["labels"][0, 3] = -100  # padding would have to predict it
    want = results(eager, {**batch, "use_cache": False})
    assert_same(results(model, {**batch, "use_cache": False}), want)
    assert_same(on_ranks(model, batch), want)


@pytest.mark.parametrize("length", [10, 13])  # 10: as many tokens as features, which look like tokens of the sequence by their size
def test_cross_attention_to_images_raises_in_compiled_layers(length: int) -> None:
    eager, model = (tiny_model(("vision-language", "mllama"), implementation) for implementation in ("eager", "longspan"))
    whole = labelled_batch("images", model)
    tokens = whole["input_ids"].shape[1]
    batch = {name: x[:, :length] if x.shape[1:2] == (tokens,) else x for name, x in whole.items() if name != "cross_attention_mask"}
    prepared = dict(lst.prepare_batch(batch, ls.Mesh.abstract(1), config=model))  # threads would share the state of the compiler
    layers = model.get_decoder().layers
    seeing = [layer for layer in layers if "CrossAttention" in type(layer).__name__]
    for layer in set(layers) - set(seeing):
        layer.compile(backend="eager")
    assert_same(results(model, prepared), results(eager, {**batch, "use_cache": False}))
    for layer in seeing:
        layer.compile(backend="eager")
    with pytest.raises(ValueError, match=r"MllamaTextCrossAttention of layer \d.*compile the decoder's other layers only"):
        model(**prepared)


@pytest.mark.usefixtures("whole_grid")
def test_cross_attention_to_images_with_checkpointed_layers_equals_eager() -> None:
    eager, model = (tiny_model(("vision-language", "mllama"), implementation) for implementation in ("eager", "longspan"))
    batch = labelled_batch("images left", model)
    want = results(eager, {**batch, "use_cache": False})
    recompute(model.train())
    assert_same(on_ranks(model, batch), want)
    lst.long_context(model, loss_chunk=None)
    assert_same(on_ranks(model, batch), want)


def test_images_for_a_class_that_takes_none_raise() -> None:
    model = tiny_model(("vision-language", "mistral4"), "longspan")  # a text decoder, which is registered as a vision-language class
    batch = {**labelled_batch("plain", model), "pixel_values": torch.randn(2, 3, 8, 8)}
    with pytest.raises(ValueError, match="unknown keyword 'pixel_values'"):
        results(model, {**batch, "use_cache": False})
    with pytest.raises(ValueError, match=r"expected inputs_embeds .* for Mistral4Model"):
        on_ranks(model, batch)
