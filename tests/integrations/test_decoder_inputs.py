"""What a hook takes of the arguments of a text decoder, and of the layers of an encoder-decoder, without a model of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan as ls
from longspan.integrations import _cross_plans, prepare_batch
from longspan.integrations._cross_plans import CrossPlans, cross_plan, crosses, is_encoder_decoder
from longspan.integrations._decoders import (
    _axes_of,
    _check_features,
    _check_mask,
    _check_others,
    _local_features,
    _local_image_tokens,
    _shard_arguments,
    _whole_inputs,
    check_no_documents,
    decoder_of,
    has_whole_inputs,
    install,
    is_cross_attention,
    only_decoder_takes_positions,
    reject_cross_attention,
    sees_features,
    sees_images,
)
from longspan.integrations._forward import Forward, in_forward
from longspan.integrations._model_mask import ModelMask

LENGTH, ROWS, DIM = 9, 2, 3
OWN = slice(4, 9)  # the tokens of rank 1 of 2 in a contiguous layout


def plans_of(rank: int = 1, **batch: Any) -> Any:
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    images = {"pixels": torch.zeros(1)}
    return prepare_batch({"input_ids": tokens, **images, **batch}, ls.Mesh.abstract(2, rank), layout="contiguous")["longspan_plan"]


class TextConfig(SimpleNamespace):
    pass


class OuterConfig(SimpleNamespace):
    def get_text_config(self) -> Any:
        return self.text


class Decoder(nn.Module):
    """A text decoder, whose forward returns its arguments."""

    base_model_prefix = "model"

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = TextConfig(model_type="llama") if config is None else config

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> Any:
        own = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        return {**own, **kwargs}


class Model(nn.Module):
    """A model with images, which takes no position_ids."""

    base_model_prefix = ""

    def __init__(self, decoder: Any = None) -> None:
        super().__init__()
        self.decoder = Decoder() if decoder is None else decoder
        self.config = OuterConfig(text=TextConfig())

    def get_decoder(self) -> Any:
        return self.decoder

    def forward(self, input_ids: Any = None) -> None: ...


class ModelWithPositions(Model):
    def forward(self, input_ids: Any = None, position_ids: Any = None) -> None: ...


class WithBoth(Decoder):
    def forward(self, inputs_embeds: Any, position_ids: Any) -> None: ...  # type: ignore[override]


class WithoutPositions(Decoder):
    def forward(self, inputs_embeds: Any = None) -> None: ...  # type: ignore[override]


# ------------------------------------------------------------------------------------------------------------------ text decoders


def test_the_text_decoder_is_an_inner_model_of_the_text_config_that_takes_embeddings() -> None:
    model = Model()
    assert decoder_of(model) is model.decoder and isinstance(decoder_of(Model(WithBoth())), WithBoth)
    inner = nn.Linear(2, 2), WithoutPositions(), Decoder(SimpleNamespace()), 3
    for wrong in (*map(Model, inner), Decoder(), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=rf"with an inner text decoder .*, got {type(wrong).__name__}"):
            decoder_of(wrong)
    assert only_decoder_takes_positions(model) and not only_decoder_takes_positions(ModelWithPositions())
    assert not only_decoder_takes_positions(Model(WithoutPositions())) and not only_decoder_takes_positions(model.config)
    assert not only_decoder_takes_positions(nn.Linear(2, 2))
    model.config = TextConfig(get_text_config=lambda: TextConfig())  # type: ignore[assignment]
    assert not only_decoder_takes_positions(model)


def test_plans_of_whole_inputs() -> None:
    plans = plans_of()
    assert has_whole_inputs(plans) and not has_whole_inputs(None) and not has_whole_inputs(SimpleNamespace(whole_inputs=True))
    plans.whole_inputs = False
    assert not has_whole_inputs(plans)


def run(plans: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Forward]:
    """The arguments that a decoder gets in a forward with these plans."""
    decoder, forward = Decoder(), Forward(plans)
    with in_forward(forward):
        given = _shard_arguments(decoder, args, kwargs)
    assert given is not None and given[0] == ()
    return given[1], forward


EMBEDS = torch.randn(ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(0))


def test_a_decoder_gets_this_ranks_tokens_and_positions() -> None:
    got, forward = run(plans_of(), None, None, None, EMBEDS, cache_position=None)
    assert torch.equal(got["inputs_embeds"], EMBEDS[:, OWN]) and got["position_ids"].tolist() == [[4, 5, 6, 7, 8]] * 2
    assert got["attention_mask"] is got["input_ids"] is got["cache_position"] is None
    assert forward.in_decoder and forward.made_positions is None and forward.seen_features is None
    positions = torch.arange(3 * LENGTH).view(3, 1, LENGTH)
    got, forward = run(plans_of(), inputs_embeds=EMBEDS, position_ids=positions, labels=torch.zeros(2, 5))
    assert torch.equal(got["position_ids"], positions[:, :, OWN].expand(3, ROWS, -1)) and got["labels"].shape == (2, 5)
    assert forward.made_positions[0] is positions and forward.made_positions[1] is got["position_ids"]
    mask = torch.ones(ROWS, LENGTH)
    got, forward = run(plans_of(), inputs_embeds=EMBEDS, position_ids=positions, attention_mask=mask)
    assert got["attention_mask"] is None and forward.made_positions is None
    own = ModelMask(mask=None)
    got, forward = run(plans_of(), inputs_embeds=EMBEDS, position_ids=positions[0], attention_mask=own)
    assert got["attention_mask"] is own and got["position_ids"].tolist() == [[4, 5, 6, 7, 8]] * 2


def test_tensors_by_token_and_by_query_are_sharded() -> None:
    kinds, queries = torch.arange(LENGTH)[None], torch.arange(LENGTH).view(1, 1, LENGTH, 1)
    got, forward = run(
        plans_of(), inputs_embeds=EMBEDS, token_type_ids=kinds, cross_attention_mask=queries, cross_attention_states=EMBEDS[:, :4],
        vision_mask=None,
    )  # fmt: skip
    assert got["token_type_ids"].tolist() == [[4, 5, 6, 7, 8]] * 2 and got["vision_mask"] is None
    assert got["cross_attention_mask"].shape == (ROWS, 1, 5, 1) and got["cross_attention_mask"].flatten().tolist() == [4, 5, 6, 7, 8] * 2
    assert forward.seen_features is got["cross_attention_states"] and forward.seen_features.shape == (ROWS, 4, DIM)


def test_features_of_image_tokens_are_those_of_this_ranks_tokens() -> None:
    """Image tokens are 3, 5, 8 of the first row and 0, 4 of the second: this rank holds numbers 1, 2 and 4."""
    is_image = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    is_image[0, [3, 5, 8]], is_image[1, [0, 4]] = True, True
    features = torch.arange(5 * DIM).view(5, DIM)
    plan = plans_of().of(None)
    assert _local_image_tokens(is_image, plan).tolist() == [1, 2, 4]
    chosen = torch.tensor([1, 2, 4])
    got, _ = run(plans_of(), inputs_embeds=EMBEDS, deepstack_visual_embeds=[features, 2 * features], visual_pos_masks=is_image[..., None])
    assert [x.tolist() for x in got["deepstack_visual_embeds"]] == [features[chosen].tolist(), (2 * features)[chosen].tolist()]
    assert torch.equal(got["visual_pos_masks"], is_image[:, OWN, None])
    assert _local_features({7: features}, chosen, in_place=False)[7].tolist() == features[chosen].tolist()
    in_place = _local_features(features.view(1, 5, DIM), chosen, in_place=True)
    assert in_place.tolist() == features[chosen].tolist()
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    got, _ = run(plans_of(), tokens, image_embeds=features.view(1, 5, DIM), image_embeds_position_mask=is_image.long())
    assert got["image_embeds"].tolist() == features[chosen].tolist() and torch.equal(got["input_ids"], tokens[:, OWN])
    for held in (features, [features], (features,), {3: features}):
        _check_features("deep", held, 5)
        with pytest.raises(ValueError, match="in 'deep' as image tokens in the batch, got 5 and 6"):
            _check_features("deep", held, 6)


def test_nothing_is_sharded_without_whole_inputs() -> None:
    decoder, plans = Decoder(), plans_of()
    assert _shard_arguments(decoder, (), {"inputs_embeds": EMBEDS}) is None
    forward = Forward(plans)
    forward.in_decoder = True
    split = plans_of()
    split.whole_inputs = False
    for other in (forward, Forward(None), Forward(split)):
        with in_forward(other):
            assert _shard_arguments(decoder, (), {"inputs_embeds": EMBEDS}) is None


def test_a_decoder_is_hooked_once() -> None:
    model = Model()
    assert install(model) is install(model) is model.decoder
    assert len(model.decoder._forward_pre_hooks) == len(model.decoder._forward_hooks) == 1
    forward = Forward(plans_of())
    with in_forward(forward):
        got = model.decoder(inputs_embeds=EMBEDS)
        assert torch.equal(got["inputs_embeds"], EMBEDS[:, OWN]) and not forward.in_decoder
    assert torch.equal(model.decoder(inputs_embeds=EMBEDS)["inputs_embeds"], EMBEDS)


def test_whole_inputs_are_embeddings_or_tokens_beside_features() -> None:
    decoder, tokens, features = Decoder(), torch.zeros(ROWS, LENGTH), torch.zeros(1)
    assert _whole_inputs(decoder, {"inputs_embeds": EMBEDS}, LENGTH) is EMBEDS
    for name in ("image_embeds_position_mask", "cross_attention_states"):
        assert _whole_inputs(decoder, {"input_ids": tokens, name: features}, LENGTH) is tokens
        assert _whole_inputs(decoder, {"input_ids": tokens, "inputs_embeds": EMBEDS, name: features}, LENGTH) is EMBEDS
    for wrong, got in (
        ({"input_ids": tokens}, "NoneType"),
        ({"input_ids": tokens[:, 1:], "cross_attention_states": features}, "NoneType"),
        ({"inputs_embeds": EMBEDS[:, 1:]}, r"shape \(2, 8, 3\)"),
        ({"inputs_embeds": EMBEDS[0]}, r"shape \(9, 3\)"),
        ({"inputs_embeds": [1]}, "list"),
    ):
        with pytest.raises(ValueError, match=rf"expected inputs_embeds \[B, 9, D\] of the whole batch .*, got {got}\."):
            _whole_inputs(decoder, wrong, LENGTH)


def test_other_tensors_of_a_decoder_raise() -> None:
    decoder = Decoder()
    allowed = {
        "a": None, "b": 3, "c": torch.tensor(5), "d": torch.zeros(1, 4), "e": (torch.zeros(1, 1, 4), 3), "f": {"x": torch.zeros(1, 4)},
        "g": torch.zeros(1), "position_ids": torch.zeros(9), "attention_mask": torch.zeros(9), "labels": torch.zeros(9),
        "input_ids": EMBEDS,
    }  # fmt: skip
    _check_others(decoder, allowed, LENGTH)
    image = {"visual_pos_masks": EMBEDS, "deepstack_visual_embeds": EMBEDS}
    _check_others(decoder, image, LENGTH)
    for wrong in (
        torch.zeros(2, 4), torch.zeros(1, 9), torch.zeros(1, 4).long(), torch.zeros(1, 2, 4), torch.zeros(4), [torch.zeros(1, 4), EMBEDS],
        {"x": EMBEDS}, (EMBEDS,),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="Decoder was given 'other', which cannot be split"):
            _check_others(decoder, {"other": wrong}, LENGTH)
    with pytest.raises(ValueError, match="'deepstack_visual_embeds'"):
        _check_others(decoder, {"deepstack_visual_embeds": EMBEDS, "visual_pos_masks": None}, LENGTH)


def test_masks_by_token_are_those_of_the_plan() -> None:
    decoder, real = Decoder(), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    padded = real.clone()
    padded[1, 0] = 0
    plain, with_padding = plans_of(), plans_of(attention_mask=padded)
    for plans, mask in ((plain, None), (plain, "x"), (plain, real), (with_padding, padded.float()), (with_padding, padded.bool())):
        _check_mask(decoder, mask, plans)
    for plans, mask in ((plain, padded), (with_padding, real), (plain, torch.ones(ROWS, 1, LENGTH))):
        with pytest.raises(ValueError, match=r"that prepare_batch was given for .*Decoder"):
            _check_mask(decoder, mask, plans)


def test_documents_in_positions_of_images_raise() -> None:
    """The second axis starts again at token 5; a model that reads the first finds nothing."""
    whole = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) % 5, 2 * torch.arange(LENGTH)])[:, None]
    local = whole[:, :, OWN].contiguous()
    search = lambda axis: "documents" if bool((axis.diff() < 0).any()) else None

    def check(x: Tensor, made: Any = (whole, local), **facts: bool) -> None:
        plans = SimpleNamespace(**{"documents_from_positions": False, "states_documents": False, **facts})
        check_no_documents(SimpleNamespace(made_positions=made, plan=plans), x, search)

    check(local[0])
    check(local[1], None)
    check(local[1], states_documents=True)
    check(local[1], documents_from_positions=True)
    for x in (local[1], local[1].clone(), torch.zeros(1, 5), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match="takes positions of images for the beginnings of packed documents"):
            check(x)
    flat = whole[1], local[1]
    with pytest.raises(ValueError, match="takes positions of images"):
        check(local[0], flat)
    assert [x.data_ptr() for x in _axes_of(local[2], whole, local)] == [whole[2].data_ptr()]
    assert [x.data_ptr() for x in _axes_of(local[2].clone(), whole, local)] == [whole[2].data_ptr()]
    assert len(_axes_of(torch.zeros(1, 5), whole, local)) == 3
    same = torch.stack([local[0], local[0].clone()])
    assert [x.data_ptr() for x in _axes_of(same[1], whole[:2], same)] == [whole[1].data_ptr()]


class TinyCrossAttention(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class TinyAttention(TinyCrossAttention):
    pass


TinyAttention.__name__ = "TinyAttention"


def test_cross_attention_layers_of_a_decoder() -> None:
    config, without = SimpleNamespace(cross_attention_layers=[1, 3]), SimpleNamespace(cross_attention_layers=None)
    crossing, marked = TinyCrossAttention(layer_idx=3, config=config), TinyAttention(layer_idx=1, is_cross_attention=True, config=config)
    others = TinyCrossAttention(), TinyCrossAttention(layer_idx=None), TinyAttention(layer_idx=1), TinyAttention(is_cross_attention=False)
    assert is_cross_attention(crossing) and is_cross_attention(marked) and not any(map(is_cross_attention, others))
    assert is_cross_attention(TinyCrossAttention(layer_idx=0))
    assert sees_images(crossing) and sees_images(marked) and not sees_images(TinyCrossAttention(layer_idx=2, config=config))
    assert not sees_images(TinyCrossAttention(layer_idx=3, config=without)) and not sees_images(TinyAttention(layer_idx=1, config=config))
    assert not sees_images(TinyCrossAttention(layer_idx=3, config=SimpleNamespace()))
    reject_cross_attention(TinyAttention(layer_idx=1))
    for module in (crossing, marked, TinyCrossAttention()):
        with pytest.raises(ValueError, match="of the same tokens with a plan, got cross-attention"):
            reject_cross_attention(module)
    forward, key = Forward(None), torch.zeros(2, 5, 6, 4)
    assert not sees_features(crossing, key)
    with in_forward(forward):
        assert not sees_features(crossing, key)
        for shape, same in (((2, 6, 7), True), ((12, 7), True), ((2, 5, 7), False), ((2, 30, 7), False)):
            forward.seen_features = torch.zeros(shape)
            assert sees_features(crossing, key) is same
        forward.seen_features = torch.zeros(12, 7)
        assert not sees_features(TinyAttention(layer_idx=1), key)


# --------------------------------------------------------------------------------------------------------------- encoder-decoders


class Layer(nn.Module):
    def forward(self, hidden: Tensor, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        seen.append({"hidden": hidden, "attention_mask": attention_mask, "position_ids": position_ids, **rest})
        return hidden


seen: list[dict[str, Any]] = []


class Stack(nn.Module):
    def __init__(self, name: str = "layers") -> None:
        super().__init__()
        setattr(self, name, nn.ModuleList([Layer(), Layer()]))


class TinyForConditionalGeneration(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(), Stack("block")
        self.config = SimpleNamespace(is_encoder_decoder=True, model_type="t5", num_attention_heads=4, num_key_value_heads=4)

    def get_encoder(self) -> nn.Module:
        return self.encoder

    def get_decoder(self) -> nn.Module:
        return self.decoder


def cross_plans(model: Any, rank: int = 1, **batch: Any) -> CrossPlans:
    tokens = {"input_ids": torch.ones(ROWS, LENGTH), "decoder_input_ids": torch.ones(ROWS, 7)}
    mesh = ls.Mesh.abstract(2, rank)
    return prepare_batch({**tokens, **batch}, mesh, config=model, layout="contiguous")["longspan_plan"]  # type: ignore[return-value]


def test_layers_of_both_stacks_get_this_ranks_tokens() -> None:
    model = TinyForConditionalGeneration()
    plans = cross_plans(model)
    for _ in range(2):
        _cross_plans.install(model, plans, {})
    layers = [*model.encoder.layers, *model.decoder.block]
    assert [layer._longspan_place for layer in layers] == [("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder", 1)]
    assert all(len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 1 for layer in layers)
    forward, positions = Forward(plans), torch.arange(LENGTH)[None]
    own, own_target = plans.encoder.positions, plans.positions
    tokens, target_tokens = len(own), len(own_target)
    assert 0 < tokens < LENGTH and 0 < target_tokens < 7
    seen.clear()
    with in_forward(forward):
        hidden = layers[0](EMBEDS, position_ids=positions, position_embeddings=(EMBEDS[:1], None), other=EMBEDS)
        assert not forward.in_decoder and not forward.in_encoder
        layers[1](hidden, None, positions)
        layers[2](EMBEDS[:, :7])
    assert torch.equal(seen[0]["hidden"], EMBEDS[:, own]) and torch.equal(seen[1]["hidden"], EMBEDS[:, own])
    assert seen[0]["position_ids"].tolist() == seen[1]["position_ids"].tolist() == [own.tolist()] * 2
    assert torch.equal(seen[0]["position_embeddings"][0], EMBEDS[:1, own].expand(2, -1, 3)) and seen[0]["position_embeddings"][1] is None
    assert seen[0]["other"] is EMBEDS and torch.equal(seen[2]["hidden"], EMBEDS[:, own_target])
    layers[0](EMBEDS)
    assert seen[-1]["hidden"] is EMBEDS
    with in_forward(forward):
        for layer, wrong, message in (
            (layers[0], EMBEDS[:, own], rf"\[B, 9, D\] for layer 0 of the encoder, got shape \(2, {tokens}, 3\)"),
            (layers[1], EMBEDS, rf"\[B, {tokens}, D\] for layer 1 of the encoder, got shape \(2, 9, 3\)"),
            (layers[2], EMBEDS, r"\[B, 7, D\] for layer 0 of the decoder"),
            (layers[3], EMBEDS[0], rf"\[B, {target_tokens}, D\] for layer 1 of the decoder, got shape \(9, 3\)"),
            (layers[3], 3, "got int"),
        ):
            with pytest.raises(ValueError, match=message):
                layer(wrong)


def test_padding_that_the_plan_does_not_know_raises() -> None:
    model = TinyForConditionalGeneration()
    real = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    real[0, 7:] = 0
    plain, padded = cross_plans(model), cross_plans(model, attention_mask=real)
    _cross_plans.install(model, plain, {})

    def check(plans: CrossPlans, mask: Any, layer: Any = None, hidden: Tensor = EMBEDS) -> None:
        with in_forward(Forward(plans)):
            (model.encoder.layers[0] if layer is None else layer)(hidden, mask)

    def mask(real: Tensor | None, bidirectional: bool = True) -> ModelMask:
        return ModelMask(mask=None, padding_mask=None if real is None else real.bool(), bidirectional=bidirectional)

    for plans, allowed in ((plain, None), (plain, mask(None)), (plain, mask(torch.ones_like(real))), (padded, mask(real))):
        check(plans, allowed)
    check(plain, mask(real, bidirectional=False))  # not of the encoder's own tokens
    for plans, wrong in ((plain, real), (padded, torch.ones_like(real))):
        with pytest.raises(ValueError, match=r"another in the encoder, .* give attention_mask to"):
            check(plans, mask(wrong))
    with pytest.raises(ValueError, match=r"another in the decoder, .* give decoder_attention_mask to"):
        check(plain, mask(real[:, 2:], bidirectional=False), model.decoder.block[0], EMBEDS[:, :7])


@pytest.mark.parametrize(
    ("change", "inputs", "message"),
    [
        (lambda m: setattr(m.encoder, "layerdrop", 0.1), {}, r"expected config\.encoder_layerdrop=0\.0, got 0\.1"),
        (lambda m: setattr(m.decoder, "layerdrop", 0.2), {}, r"expected config\.decoder_layerdrop=0\.0, got 0\.2"),
        (lambda m: None, {"use_cache": True}, "expected use_cache=False and no past_key_values"),
        (lambda m: None, {"past_key_values": ()}, "expected use_cache=False and no past_key_values"),
        (lambda m: None, {"attention_mask": torch.zeros(ROWS, LENGTH)}, "expected the attention_mask that prepare_batch was given"),
        (lambda m: None, {"decoder_attention_mask": torch.zeros(ROWS, 7)}, "expected the decoder_attention_mask that"),
        (lambda m: setattr(m.config, "is_encoder_decoder", False), {}, "got one for an encoder-decoder model"),
        (lambda m: m.encoder.layers[1].compile(), {}, r"encoder\.layers\.1 is compiled"),
    ],
)
def test_settings_and_inputs_of_two_stacks_that_raise(change: Any, inputs: dict[str, Any], message: str) -> None:
    model = TinyForConditionalGeneration()
    plans = cross_plans(model)
    _cross_plans.install(
        model, plans, {"use_cache": False, "attention_mask": torch.ones(ROWS, LENGTH), "decoder_attention_mask": torch.ones(ROWS, 7)}
    )
    change(model)
    with pytest.raises(ValueError, match=message):
        _cross_plans.install(model.train(), plans, inputs)
    if "layerdrop" in message:
        _cross_plans.install(model.eval(), plans, inputs)


def test_padding_given_to_prepare_batch_is_given_to_the_model_too() -> None:
    model, real = TinyForConditionalGeneration(), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    real[0, 7:] = 0
    plans = cross_plans(model, attention_mask=real)
    _cross_plans.install(model, plans, {"attention_mask": real})
    for wrong in (None, torch.ones_like(real)):
        with pytest.raises(ValueError, match="expected the attention_mask that prepare_batch was given, got another"):
            _cross_plans.install(model, plans, {"attention_mask": wrong})


def test_plans_of_cross_attention() -> None:
    model = TinyForConditionalGeneration()
    plans = cross_plans(model)
    made = plans.cross(4, 2)
    assert made is plans.cross(4, 2) is not plans.cross(4, 4)
    assert (made.data.q_len, made.data.kv_len, made.data.heads, made.data.kv_heads) == (7, LENGTH, 4, 2)
    moved = plans.on(ls.Mesh.abstract(2, 0))
    assert moved.local_len + plans.local_len == 7 and moved.encoder.local_len + plans.encoder.local_len == LENGTH
    assert moved.positions.tolist() + plans.positions.tolist() == list(range(7))
    assert moved.cross_mask is plans.cross_mask and moved.whole_inputs and moved.cross_strategy == "auto"
    module = nn.Module()
    assert cross_plan(plans, module, None, 4, 2) is made
    with pytest.raises(ValueError, match="got a window of 5 tokens in"):
        cross_plan(plans, module, ("sliding", 5), 4, 2)
    assert crosses(plans, True) and not crosses(plans, False) and not crosses(plans.encoder, True)
    assert is_encoder_decoder(model) and not is_encoder_decoder(model.config) and not is_encoder_decoder(None)
    model.config.is_encoder_decoder = False
    assert not is_encoder_decoder(model) and not is_encoder_decoder(SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_layers_of_both_stacks_without_the_plan_are_named() -> None:
    model = TinyForConditionalGeneration()
    _cross_plans.install(model, cross_plans(model), {})
    for layer in (model.encoder.layers[0], model.encoder.layers[1], model.decoder.block[0]):
        layer.attention = SelfAttention()
    model.decoder.block[0].cross = SelfAttention()
    forward = Forward(None)
    forward.module_ids = {id(model.encoder.layers[0].attention), id(model.decoder.block[0].cross.inner)}
    assert _cross_plans.layers_without_plan(model, forward) == ["encoder.1.attention", "decoder.0.attention", "decoder.1"]
