"""Vision-language classes: the cases of `family_cases` for them."""

from __future__ import annotations

from typing import Any

import torch
from tests.integrations.family_cases import COMPASS_ROPE, IMAGE, Case, merged, pixels
from tests.integrations.image_inputs import (
    actions,
    boxes,
    canvas,
    cross_attended_image,
    formula,
    grids,
    image_and_crops,
    image_and_slice,
    image_at_places,
    image_before_prompt,
    image_seen_by_tokens,
    images,
    images_by_size,
    instructed,
    masked_grids,
    padded_images,
    page,
    patches,
    patches_by_shape,
    pooled,
    row_of_patches,
    tiles_by_size,
)

_MROPE: dict[str, Any] = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "image_token_id": IMAGE,
}
_GRID_TOWER = {"depth": 2, "patch_size": 4, "out_hidden_size": 32}
_WINDOW_TOWER = {**_GRID_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
_MUSE = {"vision_config": {"patch_size": 4}, "out_hidden_size": 128, "projector_hidden_size": 24, "image_token_id": IMAGE}
_IMAGE_SIZES = {"image_size": 8, "patch_size": 4}
_Q_FORMER = {"vision_config": _IMAGE_SIZES, "num_query_tokens": 3}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "embed_dim": 8, "latent_channels": 8, "num_embeddings": 16, "num_res_blocks": 1}
_NO_TOKENS = {"input_ids": None, "attention_mask": None}  # of an encoder that takes images only

_FULL_MROPE = merged(_MROPE, {"text_config": {"rope_parameters": {"partial_rotary_factor": 1.0}}})
_GLM = Case(settings={**_FULL_MROPE, "vision_config": _GRID_TOWER}, images=grids(96, types=True))
_SMALL = {"image_size": 16, "patch_size": 4}
_SQUARE = {"vision_config": _SMALL, "image_token_id": IMAGE}
_MINICPM: dict[str, Any] = {"vision_config": _SMALL, "insert_layer_id": 0, "image_token_id": IMAGE}
_INTERN = Case(
    settings={"vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}, "image_token_id": IMAGE}, images=images(3, 16, 16, count=4)
)
_LLAVA_NEXT = Case(
    settings={"vision_config": _IMAGE_SIZES, "image_token_index": IMAGE, "image_grid_pinpoints": [[8, 16], [16, 8]]}, images=tiles_by_size
)
_WINDOWS = Case(settings={"vision_config": _WINDOW_TOWER, "image_token_id": IMAGE}, images=grids(96))
_QWEN3_5 = Case(
    settings={"vision_config": {**_GRID_TOWER, "num_position_embeddings": 64}, "image_token_id": IMAGE}, images=grids(96, types=True)
)
_QWEN3_VL = Case(
    settings={
        "vision_config": {**_GRID_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        "image_token_id": IMAGE,
    },
    images=grids(96, types=True),
)

IMAGE_CASES: dict[str, Case] = {
    "BlipForConditionalGeneration": Case(
        settings={"vision_config": _IMAGE_SIZES, "text_config": {"encoder_hidden_size": 32}}, inputs=pixels(3, 8, 8)
    ),
    "Blip2ForConditionalGeneration": Case(
        settings={
            "vision_config": _IMAGE_SIZES, "qformer_config": {"encoder_hidden_size": 32}, "num_query_tokens": 3, "image_token_index": IMAGE,
        },
        inputs=images(3, 8, 8, count=3),
    ),
    "ChameleonForConditionalGeneration": Case(
        settings={
            "vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z": IMAGE + 1 + i for i in range(16)}},
            "vocab_size": IMAGE + 17, "vq_config": _VQ,  # tokens of images are never predicted
        },
        images=images(3, 8, 8, count=16),
    ),
    "CohereCompassForConditionalGeneration": Case(
        settings={
            "text_config": {"rope_parameters": COMPASS_ROPE}, "vision_config": {**_GRID_TOWER, "deepstack_visual_indexes": [0, 1]},
            "image_token_id": IMAGE,
        },
        images=grids(96, types=True),
    ),
    "Cosmos3EdgeForConditionalGeneration": Case(
        settings={**_MROPE, "projector_hidden_size": 24, "vision_config": {"patch_size": 4}}, images=masked_grids
    ),
    "DeepseekOcr2ForConditionalGeneration": Case(
        settings={
            "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
            "vision_config": {
                "sam_config": {"mlp_dim": 24, "output_channels": 8, "downsample_channels": [8, 32], "global_attn_indexes": [1]}
            },
        }
    ),
    "DiffusionGemmaForBlockDiffusion": Case(
        settings={"text_config": {"top_k_experts": 2, "layer_types": ["sliding_attention", "full_attention"]}, "canvas_length": 8},
        inputs=canvas,
    ),
    "Emu3ForConditionalGeneration": Case(
        settings={
            "vocabulary_map": {
                "<image>": IMAGE, "<|extra_200|>": 2, **{f"<|visual token {i:06}|>": i + 3 for i in range(16)},
            },
            "vq_config": {**_VQ, "codebook_size": 16},
        },
        images=lambda batch: {**images(3, 6, 6, count=12)(batch), "image_sizes": torch.full((2, 2), 6)},
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Case(
        settings=merged(_MROPE, {"text_config": {"moe_intermediate_size": [24, 16]}, "vision_config": {"depth": 2, "patch_size": 4}}),
        images=grids(48, types=True),
    ),
    "FastVlmForConditionalGeneration": Case(
        settings={"vision_config": {"architecture": "test_resnet", "model_args": None, "hidden_size": 96}, "image_token_index": IMAGE},
        images=images(3, 64, 64, count=4),
        package="timm",
    ),
    "Florence2ForConditionalGeneration": Case(
        settings={
            "vision_config": {
                "depths": [1, 1], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "patch_prenorm": [False, True],
                "embed_dim": [8, 16], "num_heads": [2, 4], "num_groups": [2, 4], "window_size": 2, "projection_dim": 32,
            }
        }
    ),
    "Glm46VForConditionalGeneration": _GLM,
    "Glm4vForConditionalGeneration": _GLM,
    "Glm4vMoeForConditionalGeneration": _GLM,
    "Glm5NextForConditionalGeneration": Case(
        settings={
            "text_config": {"qk_rope_head_dim": 0, "qk_head_dim": 8, "layer_types": ["linear_attention", "indexed_attention"]},
            "vision_config": {**_GRID_TOWER, "projection_intermediate_size": 24},
        }
    ),
    "GlmOcrForConditionalGeneration": _GLM,
    "Granite4VisionForConditionalGeneration": Case(
        settings={
            "vision_config": {"hidden_size": 64, "image_size": 16, "patch_size": 4},  # heads of 64 in the Q-Former
            "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0, 0, 1, 1], "downsample_rate": "1/2",
            "image_token_index": IMAGE, "image_grid_pinpoints": [[16, 16]],
        },
        images=lambda batch: {**images(2, 3, 16, 16, count=10)(batch), "image_sizes": torch.full((2, 2), 16)},
    ),
    "HunYuanVLForConditionalGeneration": Case(
        settings={**_MROPE, "vision_config": {"patch_size": 4, "max_image_size": 32, "out_hidden_size": 32}},
        images=grids(48, types=True, count=10),
    ),
    "IdeficsForVisionText2Text": Case(
        settings={
            "vision_config": {**_IMAGE_SIZES, "embed_dim": 16}, "alpha_initializer": "ones",
            "freeze_text_layers": False, "freeze_vision_layers": False,
        },
        inputs=image_seen_by_tokens,
    ),
    "InklingForConditionalGeneration": Case(
        settings={
            "text_config": {
                "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "layer_types": ["hybrid_sliding", "hybrid"],
            }
        },
        package="scipy",
    ),
    "InstructBlipForConditionalGeneration": Case(
        settings={**_Q_FORMER, "image_token_index": IMAGE}, inputs=instructed(3, 8, 8, count=3)
    ),
    "InstructBlipVideoForConditionalGeneration": Case(
        settings={**_Q_FORMER, "video_token_index": IMAGE}, inputs=instructed(2, 3, 8, 8, count=6)
    ),
    "JanusForConditionalGeneration": Case(
        settings={
            "vision_config": {"image_size": 16, "patch_size": 4, "projection_dim": 32},
            "vq_config": {
                "base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 16, "num_embeddings": 16, "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
            "image_token_id": IMAGE,
        },
        images=images(3, 16, 16, count=16),
    ),
    "Kosmos2ForConditionalGeneration": Case(
        settings={
            "text_config": {"embed_dim": 32, "layers": 2, "attention_heads": 4, "dropout": 0.0},
            "vision_config": _IMAGE_SIZES, "latent_query_num": 5,
        },
        inputs=image_at_places,
    ),
    "Molmo2ForConditionalGeneration": Case(
        settings={
            "adapter_config": {"vision_feature_layer": [0, 1], "text_hidden_size": 32}, "image_patch_id": IMAGE,
            "vision_config": {"image_size": [16, 16], "patch_size": 4},
        },
        images=pooled,
    ),
    "MuseGlimmerForConditionalGeneration": Case(settings=_MUSE, images=grids(96)),
    "MuseSparkForConditionalGeneration": Case(
        settings={
            **_MUSE,
            "audio_config": {"patch_sizes": [4, 3], "hidden_sizes": [8, 16], "depths": [1, 1], "out_hidden_size": 32},
            "text_config": {"moe_hidden_size": 16},
        },
        images=grids(96),
    ),
    "NemotronH_Omni_Reasoning_V3": Case(
        settings={
            "vision_config": {"video_temporal_patch_size": 2}, "vision_hidden_size": 32, "projector_hidden_size": 24,
            "image_token_id": IMAGE,
        },
        images=grids(768, grid="image_grid_hw"),
    ),
    "PI0ForConditionalGeneration": Case(
        settings={
            "vlm_config": {"vision_config": _IMAGE_SIZES, "projection_dim": 32, "image_token_id": IMAGE},
            "chunk_size": 6, "max_state_dim": 5, "max_action_dim": 5,
        },
        inputs=actions,
    ),
    "PPFormulaNetForConditionalGeneration": Case(
        settings={
            "vision_config": {
                "image_size": 32, "patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 24, "output_channels": 8,
                "post_conv_in_channels": 8, "post_conv_mid_channels": 12, "post_conv_out_channels": 16, "decoder_hidden_size": 32,
            }
        },
        inputs=formula,
    ),
    "PaddleOCRVLForConditionalGeneration": Case(
        settings={**_MROPE, "vision_config": {"patch_size": 4, "image_size": 16}}, images=grids(3, 4, 4, types=True)
    ),
    "PaliGemmaForConditionalGeneration": Case(
        settings={"vision_config": {**_IMAGE_SIZES, "vision_use_head": False}, "projection_dim": 32, "image_token_id": IMAGE},
        inputs=image_before_prompt,
    ),
    "PerceptionLMForConditionalGeneration": Case(
        settings={"vision_config": {"architecture": "test_vit", "model_args": {"embed_dim": 32}}, "image_token_id": IMAGE},
        images=images(1, 3, 64, 64, count=16),
        package="timm",
    ),
    "Pix2StructForConditionalGeneration": Case(
        settings={"text_config": {"d_kv": 8}, "vision_config": {"d_kv": 8, "patch_embed_hidden_size": 24, "seq_len": 16}}, inputs=patches
    ),
    "Qwen2VLForConditionalGeneration": Case(
        settings={**_MROPE, "vision_config": {"embed_dim": 16, "depth": 2, "patch_size": 4, "mlp_ratio": 2}}, images=grids(96, types=True)
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": Case(
        settings={**_MROPE, "vision_start_token_id": 58, "vision_config": _WINDOW_TOWER}, images=grids(96)
    ),
    "Qwen2_5_VLForConditionalGeneration": Case(settings={**_MROPE, "vision_config": _WINDOW_TOWER}, images=grids(96, types=True)),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Case(
        settings={
            **_MROPE, "vision_start_token_id": 58,
            "vision_config": {**_GRID_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        },
        images=grids(96),
    ),
    "UdopForConditionalGeneration": Case(settings={"decoder_start_token_id": 1, "d_kv": 8}, inputs=boxes),
    "UnlimitedOcrForConditionalGeneration": Case(settings={"text_config": {"num_key_value_heads": 4}}),  # its eager attention has no GQA
    "VisionEncoderDecoderModel": Case(
        settings={"encoder": _IMAGE_SIZES, "decoder": {"add_cross_attention": True}, "decoder_start_token_id": 1, "pad_token_id": 0},
        inputs=lambda batch: {**pixels(3, 8, 8)(batch), **_NO_TOKENS},
    ),
    # classes that run with the sizes of `families`, with images too
    "AriaForConditionalGeneration": Case(
        settings={"vision_config": _SMALL, "projector_patch_to_query_dict": {16: 5}, "image_token_index": IMAGE},
        images=padded_images("pixel_mask", 3, 16, 16, count=5),
    ),
    "AyaVisionForConditionalGeneration": Case(
        settings={"vision_config": _SMALL, "image_token_index": IMAGE}, images=images(3, 16, 16, count=4)
    ),
    "Cohere2VisionForConditionalGeneration": Case(
        settings={**_SQUARE, "alignment_intermediate_size": 48}, images=images(3, 16, 16, count=4)
    ),
    "Cosmos3OmniForConditionalGeneration": _QWEN3_VL,
    "DeepseekVLForConditionalGeneration": Case(settings=_SQUARE, images=images(3, 16, 16, count=16)),
    "Exaone4_5_ForConditionalGeneration": _WINDOWS,
    "HyperCLOVAXVisionV2ForConditionalGeneration": _WINDOWS,
    "Idefics2ForConditionalGeneration": Case(
        settings={
            **_SQUARE,
            "perceiver_config": {"resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8},
        },
        images=padded_images("pixel_attention_mask", 1, 3, 12, 16, count=5),
    ),
    "Idefics3ForConditionalGeneration": Case(settings=_SQUARE, images=images(1, 3, 16, 16, count=4)),
    "InternVLForConditionalGeneration": _INTERN,
    "Kimi_K25ForConditionalGeneration": Case(
        settings={
            "vision_config": {"patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8}, "projection_hidden_size": 32,
            "image_token_id": IMAGE,
        },
        images=grids(3, 4, 4),
    ),
    "Kosmos2_5ForConditionalGeneration": Case(
        settings={"vision_config": {"patch_embed_hidden_size": 24, "max_num_patches": 16}, "latent_query_num": 5}, images=page
    ),
    "Lfm2VlForConditionalGeneration": Case(
        settings={
            "vision_config": {"patch_size": 4, "num_patches": 16, "vision_use_head": False},  # whose output the class does not use
            "projector_hidden_size": 24, "image_token_id": IMAGE,
        },
        images=patches_by_shape,
    ),
    "LightOnOcrForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 24, "patch_size": 4}, "image_token_id": IMAGE}, images=images_by_size
    ),
    "Llama4ForConditionalGeneration": Case(
        settings={
            "vision_config": {
                **_SMALL, "intermediate_size": 128, "projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24,
            },
            "image_token_index": IMAGE,
        },
        images=images(3, 16, 16, count=4),
    ),
    "LlavaForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 12, "patch_size": 4}, "image_token_index": IMAGE}, images=images(3, 12, 12, count=9)
    ),
    "LlavaNextForConditionalGeneration": _LLAVA_NEXT,
    "LlavaNextVideoForConditionalGeneration": _LLAVA_NEXT,
    "LlavaOnevisionForConditionalGeneration": _LLAVA_NEXT,
    "MiniCPMOcrForConditionalGeneration": Case(settings=_MINICPM, images=row_of_patches(4, 6, count=6)),
    "MiniCPMV4_6ForConditionalGeneration": Case(settings=_MINICPM, images=row_of_patches(4, 12, count=3)),
    "MiniCPMV4_7ForConditionalGeneration": Case(
        settings={
            **_MINICPM, "text_config": _FULL_MROPE["text_config"],
            "image_start_id": 50, "image_end_id": 51, "slice_start_id": 52, "slice_end_id": 53, "newline_id": 54,
        },
        images=image_and_slice,
    ),
    "MiniMaxM3SparseForConditionalGeneration": Case(settings={"vision_config": _SMALL, "image_token_index": IMAGE}, images=grids(96)),
    "Mistral3ForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 24, "patch_size": 4}, "image_token_index": IMAGE},
        images=images_by_size,
    ),
    "MllamaForConditionalGeneration": Case(
        settings={
            "text_config": {"cross_attention_layers": [1]},
            "vision_config": {
                **_IMAGE_SIZES, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64, "intermediate_layers_indices": [0],
                "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
        },
        images=cross_attended_image,
    ),
    "Ovis2ForConditionalGeneration": Case(settings=_SQUARE, images=images(3, 16, 16, count=16)),
    "QianfanOCRForConditionalGeneration": _INTERN,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "SmolVLMForConditionalGeneration": Case(settings=_SQUARE, images=images(1, 3, 16, 16, count=4)),
    "Step3p7ForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 32, "patch_size": 4}, "image_token_id": IMAGE}, images=image_and_crops
    ),
    "VideoLlama3ForConditionalGeneration": Case(
        settings={"vision_config": {"patch_size": 4}, "image_token_id": IMAGE},
        images=lambda batch: {**grids(48)(batch), "image_merge_sizes": torch.tensor([2, 2])},
    ),
    "VideoLlavaForConditionalGeneration": Case(
        settings={"vision_config": _SMALL, "image_token_index": IMAGE}, images=images(3, 16, 16, count=16)
    ),
    "VipLlavaForConditionalGeneration": Case(
        settings={"vision_config": _IMAGE_SIZES, "vision_feature_layers": [-1, 1], "image_token_index": IMAGE},
        images=images(3, 8, 8, count=4),
    ),
}  # fmt: skip
