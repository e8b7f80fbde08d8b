"""What vision-language classes of transformers need beside the sizes of `families`, from Granite 4 Vision on: a part of `family_cases`."""

from __future__ import annotations

from typing import Any

from tests.integrations.family_cases import Case

_MROPE: dict[str, Any] = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}}

_MUSE = {"out_hidden_size": 128, "projector_hidden_size": 24}

IMAGE_CASES: dict[str, Case] = {
    "Granite4VisionForConditionalGeneration": Case(
        settings={
            "vision_config": {"hidden_size": 64, "image_size": 16, "patch_size": 4},  # heads of 64 in the Q-Former
            "deepstack_layer_map": [[0, 0]],
            "spatial_target_layers": [0, 0, 1, 1],
            "downsample_rate": "1/2",
        }
    ),
    "HunYuanVLForConditionalGeneration": Case(settings=_MROPE),
    "InklingForConditionalGeneration": Case(
        settings={
            "text_config": {
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 8,
                "layer_types": ["hybrid_sliding", "hybrid"],
            }
        }
    ),
    "JanusForConditionalGeneration": Case(
        settings={
            "vision_config": {"image_size": 16, "patch_size": 4, "projection_dim": 32},
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "latent_channels": 16,
                "num_embeddings": 16,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
        }
    ),
    "Molmo2ForConditionalGeneration": Case(settings={"adapter_config": {"vision_feature_layer": [0, 1]}}),
    "MuseGlimmerForConditionalGeneration": Case(settings=_MUSE),
    "MuseSparkForConditionalGeneration": Case(
        settings={
            **_MUSE,
            "audio_config": {"patch_sizes": [4, 3], "hidden_sizes": [8, 16], "depths": [1, 1], "out_hidden_size": 32},
            "text_config": {"moe_hidden_size": 16},
        }
    ),
    "NemotronH_Omni_Reasoning_V3": Case(
        settings={"vision_config": {"video_temporal_patch_size": 2}, "vision_hidden_size": 32, "projector_hidden_size": 24}
    ),
    "PaddleOCRVLForConditionalGeneration": Case(settings=_MROPE),
    "Qwen2_5OmniThinkerForConditionalGeneration": Case(settings={**_MROPE, "vision_start_token_id": 58}),
    "Qwen2_5_VLForConditionalGeneration": Case(settings=_MROPE),
    "Qwen2VLForConditionalGeneration": Case(settings={**_MROPE, "vision_config": {"embed_dim": 16, "depth": 2}}),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Case(settings={**_MROPE, "vision_start_token_id": 58}),
    "UnlimitedOcrForConditionalGeneration": Case(settings={"text_config": {"num_key_value_heads": 4}}),  # its eager attention has no GQA
}
