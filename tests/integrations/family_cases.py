"""What single classes of transformers need beside the sizes of `families`: settings, inputs, train mode. By class name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
IMAGE = 60  # the token of images and audio, the last of the vocabulary
FIRST = 14  # the place of the first image token: behind the padding of all batches


def no_inputs(batch: Batch) -> Batch:
    """No entries beside tokens and labels."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One class.

    settings: fields of its config, those of nested configs in nested dicts.
    inputs: entries of a batch that the class requires, from the batch of tokens and labels; they replace entries of the same name.
    images: entries of a batch with an image or audio in each row, for a class that runs without too; None for no such batches.
    train: the class has gradients in train mode only.
    dtype: of the model; float64 where rounding in float32 changes the sign of an input of ReLU, and so its gradient.
    package: a package that the class requires and the tests do not install.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Batch], Batch] = no_inputs
    images: Callable[[Batch], Batch] | None = None
    train: bool = False
    dtype: torch.dtype = torch.float32
    package: str | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the package that the class requires is installed."""
        return self.package is None or find_spec(self.package) is not None

    def batch(self, batch: Batch, *, with_images: bool = False) -> Batch:
        """The batch with the inputs that the class requires, or with those of `images`."""
        inputs = self.images if with_images and self.images is not None else self.inputs
        return {name: value for name, value in {**batch, **inputs(batch)}.items() if value is not None}


def merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Settings and further ones, which take precedence; nested dicts are merged too."""
    made = dict(settings)
    for name, value in more.items():
        made[name] = merged(made[name], value) if isinstance(value, dict) and isinstance(made.get(name), dict) else value
    return made


def fixed_randn(*shape: int) -> Tensor:
    """Random numbers, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def image_tokens(batch: Batch, count: int | Tensor, token: int = IMAGE) -> Batch:
    """Tokens and labels with an image, or audio, of `count` tokens in each row; counts by row are a tensor [B, 1]."""
    places = torch.arange(batch["input_ids"].shape[1])
    inside = (places >= FIRST) & (places < FIRST + count)
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == token, token - 1).masked_fill(inside, token)
    return {"input_ids": ids, "labels": batch["labels"].masked_fill(inside, -100)}


def case_of(name: str) -> Case:
    """The case of a class by its name."""
    from tests.integrations.image_cases import IMAGE_CASES

    return CASES.get(name) or IMAGE_CASES.get(name) or Case()


def pixels(*shape: int) -> Callable[[Batch], Batch]:
    """`pixel_values` of one image of a shape for each row."""
    return lambda batch: {"pixel_values": fixed_randn(len(batch["labels"]), *shape)}


def _codebooks(batch: Batch) -> Batch:
    """Two codebooks of audio codes: tokens [B · codebooks, S], labels [B, S, codebooks]."""
    other = batch["input_ids"].flip(1)
    labels = torch.stack([batch["labels"], other.masked_fill(batch["labels"] < 0, -100)], 2)
    return {"input_ids": torch.stack([batch["input_ids"], other], 1).flatten(0, 1), "labels": labels}


def _shared_kv(batch: Batch) -> Batch:
    """Embeddings of a larger model and the KV of its last layers, 2 KV heads of head dim 8 and 16."""
    rows, tokens = batch["input_ids"].shape
    kv = {
        kind: (fixed_randn(rows, 2, tokens, dim), fixed_randn(rows, 2, tokens, dim))
        for kind, dim in (("sliding_attention", 8), ("full_attention", 16))
    }
    return {"input_ids": None, "inputs_embeds": fixed_randn(rows, tokens, 2 * 20), "shared_kv_states": kv}


_VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {**_ROPE, "mrope_section": [1, 1, 2]}  # of head dim 8
COMPASS_ROPE = {"sliding_attention": _MROPE, "full_attention": None}
_WAVE = {"hidden_size": 16, "num_filters": 2, "downsampling_ratios": [2, 4], "depths": [1, 1, 1], "kernel_size": 3}
_ASSISTANT = Case(
    settings={
        "text_config": {
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2, "global_head_dim": 16,
            "num_global_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"],
        },
        "backbone_hidden_size": 20,
    },
    inputs=_shared_kv,
)  # fmt: skip
_REFORMER = Case(settings={"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}, train=True)

CASES: dict[str, Case] = {
    # causal LMs
    "BltForCausalLM": Case(
        settings={
            "encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4], "patching_mode": "entropy",
            "encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32},
        }
    ),
    "CTRLLMHeadModel": Case(dtype=torch.float64),
    "CohereCompassForCausalLM": Case(settings={"rope_parameters": COMPASS_ROPE}),
    "Gemma3nForConditionalGeneration": Case(settings={"vision_config": {"architecture": "test_vit"}}, package="timm"),
    "Gemma4AssistantForCausalLM": _ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": _ASSISTANT,
    "GitForCausalLM": Case(settings={"vision_config": _VIT}, inputs=pixels(3, 8, 8)),
    "MusicgenForCausalLM": Case(settings={"decoder": {"num_codebooks": 2}}, inputs=_codebooks),
    "MusicgenMelodyForCausalLM": Case(settings={"decoder": {"num_codebooks": 2}}, inputs=_codebooks),
    "ReformerModelWithLMHead": _REFORMER,
    # encoders
    "EsmcForMaskedLM": Case(settings={"num_key_value_heads": 4}),
    "LukeForMaskedLM": Case(settings={"entity_vocab_size": 13, "entity_emb_size": 16}),
    "NeoMMEForMaskedLM": Case(
        settings={
            "embedding_rank": 16, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {**_ROPE, "partial_rotary_factor": 0.5}, "sliding_attention": _ROPE},
        }
    ),
    "PerceiverForMaskedLM": Case(
        settings={
            "d_latents": 24, "num_latents": 11, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4, "qk_channels": 16, "v_channels": 24, "max_position_embeddings": 45,
        }
    ),
    "ReformerForMaskedLM": _REFORMER,
    # encoder-decoders
    "EncoderDecoderModel": Case(
        settings={
            "encoder": {"is_decoder": False}, "decoder": {"add_cross_attention": True}, "decoder_start_token_id": 1, "pad_token_id": 0,
        }
    ),
    "Nemotron3_5TranscribeForConditionalGeneration": Case(
        settings={
            "audio_config": {
                "asr_config": {"num_key_value_heads": 4},
                "diarization_config": {"head_config": {"audio_hidden_size": 32}, "audio_config": {"num_key_value_heads": 4}},
            },
            "word_timestamp_config": {"blank_token_id": 60}, "audio_token_id": IMAGE,
        },
        images=lambda batch: {
            **image_tokens(batch, 3), "input_features": fixed_randn(2, 24, 128), "input_features_mask": torch.ones(2, 24, dtype=torch.long),
        },
    ),
    "ProphetNetForConditionalGeneration": Case(settings={"add_cross_attention": True, "is_decoder": False}),
    "VibeVoiceAsrForConditionalGeneration": Case(
        settings={"acoustic_tokenizer_encoder_config": _WAVE, "semantic_tokenizer_encoder_config": _WAVE, "audio_token_id": IMAGE}
    ),
    "VoxtralRealtimeForConditionalGeneration": Case(
        settings={"audio_config": {"num_mel_bins": 6}, "downsample_factor": 2},
        inputs=lambda batch: {"input_features": fixed_randn(len(batch["labels"]), 6, 4 * batch["input_ids"].shape[1])},
    ),
}  # fmt: skip
