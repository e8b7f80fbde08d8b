"""Vision-language classes: the cases of `family_cases` for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.integrations.family_cases import COMPASS_ROPE, FIRST, IMAGE, Batch, Case, fixed_randn, image_tokens, merged, pixels

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


def _grids(*patch: int, grid: str = "image_grid_thw", types: bool = False, count: int = 6) -> Callable[[Batch], Batch]:
    """Two images of 4 × 6 patches of a shape, `count` tokens each, and their grids; with the type of each token if `types`."""

    def inputs(batch: Batch) -> Batch:
        tokens = image_tokens(batch, count)
        sizes = torch.tensor([[1, 4, 6]] * 2)[:, 1 if grid == "image_grid_hw" else 0 :]
        kinds = {"mm_token_type_ids": (tokens["input_ids"] == IMAGE).int()} if types else {}
        return {**tokens, "pixel_values": fixed_randn(48, *patch), grid: sizes, **kinds}

    return inputs


def _masked_grids(batch: Batch) -> Batch:
    """Two images and an attention_mask, without which the class takes the places of image tokens for those of packed documents."""
    return {"attention_mask": torch.ones_like(batch["input_ids"]), **batch, **_grids(48, types=True)(batch)}


def _images(*shape: int, count: int) -> Callable[[Batch], Batch]:
    """An image of a shape in each row, `count` tokens each."""
    return lambda batch: {**image_tokens(batch, count), **pixels(*shape)(batch)}


def _pooled(batch: Batch) -> Batch:
    """Two images of 4 × 4 patches, in low and in high resolution, and the patches that make each of their 8 tokens."""
    tokens = image_tokens(batch, 8)
    squares = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    squares = torch.cat([squares, squares.flip(0)])
    pooling = {"image_token_pooling": torch.cat([squares, squares + 16]), "image_grids": torch.full((2, 4), 2)}
    types = (tokens["input_ids"] == IMAGE).int()
    return {
        **tokens,
        **pooling,
        "pixel_values": fixed_randn(2, 16, 48),
        "image_num_crops": torch.ones(2).long(),
        "mm_token_type_ids": types,
    }


def _image_before_prompt(batch: Batch) -> Batch:
    """An image of four tokens in each row. Token types: 0 up to the end of a prompt, whose tokens see each other, then 1."""
    types = (torch.arange(batch["input_ids"].shape[1]) > 25).long().expand_as(batch["input_ids"])
    return {**_images(3, 8, 8, count=4)(batch), "token_type_ids": types}


def _image_seen_by_tokens(batch: Batch) -> Batch:
    """One image per row, which is not among the tokens: every token sees it."""
    return {"pixel_values": fixed_randn(2, 1, 3, 8, 8), "image_attention_mask": torch.ones(*batch["input_ids"].shape, 1, dtype=torch.long)}


def _image_at_places(batch: Batch) -> Batch:
    """An image of five tokens in each row, and a mask of their places."""
    tokens = image_tokens(batch, 5)
    return {**tokens, **pixels(3, 8, 8)(batch), "image_embeds_position_mask": tokens["input_ids"] == IMAGE}


def _instructed(*shape: int, count: int) -> Callable[[Batch], Batch]:
    """Images or videos of a shape, `count` tokens each, and an instruction of seven tokens for the Q-Former."""
    return lambda batch: {**image_tokens(batch, count), **pixels(*shape)(batch), "qformer_input_ids": batch["input_ids"][:, -7:]}


def _row_of_patches(*grid: int, count: int) -> Callable[[Batch], Batch]:
    """Two images of a grid of patches of 4 × 4 pixels, `count` tokens each, all patches side by side."""
    sizes = torch.tensor([grid] * 2)
    return lambda batch: {**image_tokens(batch, count), "pixel_values": fixed_randn(1, 3, 4, 8 * grid[0] * grid[1]), "target_sizes": sizes}


def _image_and_slice(batch: Batch) -> Batch:
    """An image of two tokens and a slice of it of three tokens in each row, between their marks, and the type of each token."""
    images, places = _row_of_patches(4, 8, count=2)(batch), torch.arange(FIRST - 1, FIRST + 8)
    marked = torch.tensor([50, IMAGE, IMAGE, 51, 52, IMAGE, IMAGE, IMAGE, 53]).expand(2, 9)
    ids, labels = images["input_ids"].index_copy(1, places, marked), images["labels"].index_fill(1, places, -100)
    grids = {"target_sizes": torch.tensor([[4, 8], [4, 12]] * 2), "pixel_values": fixed_randn(1, 3, 4, 4 * 160)}
    return {"input_ids": ids, "labels": labels, **grids, "mm_token_type_ids": (ids == IMAGE).int()}


def _image_and_crops(batch: Batch) -> Batch:
    """An image of four tokens and a crop of it of one token in each row."""
    crops = {"pixel_values_local": fixed_randn(2, 3, 16, 16), "num_local_patches": torch.tensor([1, 1])}
    return {**_images(3, 32, 32, count=5)(batch), **crops}


def _cross_attended_image(batch: Batch) -> Batch:
    """Two tiles of an image in each row, which are not among the tokens: those behind the first places see them."""
    places = torch.arange(batch["input_ids"].shape[1])
    seen = torch.stack([places > 14, places > 20], 1).expand(2, 1, -1, 2).transpose(1, 2)
    ratio = {"aspect_ratio_ids": torch.full((2, 1), 2), "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long)}
    return {"pixel_values": fixed_randn(2, 1, 2, 3, 8, 8), **ratio, "cross_attention_mask": seen.long()}


def _actions(batch: Batch) -> Batch:
    """The state and the actions of a robot, in place of labels, an image of four tokens, and the noise of a diffusion step."""
    images = {"pixel_values": fixed_randn(2, 1, 3, 8, 8), "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool)}
    step = {"noise": fixed_randn(2, 6, 5).flip(0), "timestep": torch.tensor([0.3, 0.8])}
    tokens = {"input_ids": image_tokens(batch, 4)["input_ids"], "labels": None}
    return {**tokens, **images, **step, "state": fixed_randn(2, 5), "actions": fixed_randn(2, 6, 5)}


def _patches(batch: Batch) -> Batch:
    """Patches of 24 numbers after their row and column, in place of an encoder's tokens; the second image has fewer."""
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(5.0)).expand(2, 15, 2)
    real = torch.arange(15) < torch.tensor([[15], [11]])
    return {"flattened_patches": torch.cat([places, fixed_randn(2, 15, 24)], 2), "input_ids": None, "attention_mask": real.long()}


def _page(batch: Batch) -> Batch:
    """The patches of `_patches` beside tokens, five of which are of the image, and a mask of their places."""
    tokens, patches = image_tokens(batch, 5), _patches(batch)["flattened_patches"]
    sizes = {"width": torch.tensor([20, 20]), "height": torch.tensor([12, 12])}
    return {**tokens, **sizes, "flattened_patches": patches, "image_embeds_position_mask": (tokens["input_ids"] == IMAGE).long()}


def _padded_images(mask: str, *shape: int, count: int) -> Callable[[Batch], Batch]:
    """An image of a shape [..., 3, H, W] in each row, `count` tokens each, and a mask of real pixels: fewer in the second row."""
    real = torch.ones(2, *shape[:-3], *shape[-2:], dtype=torch.long)
    real[1, ..., -4:] = 0
    return lambda batch: {**_images(*shape, count=count)(batch), mask: real}


def _patches_by_shape(batch: Batch) -> Batch:
    """Images of 4 × 6 and 4 × 4 patches of 48 numbers, the second padded: 6 and 4 tokens."""
    shapes = torch.tensor([[4, 6], [4, 4]])
    real = torch.arange(24) < shapes.prod(1)[:, None]
    images = {"pixel_values": fixed_randn(2, 24, 48), "spatial_shapes": shapes, "pixel_attention_mask": real.long()}
    return {**image_tokens(batch, torch.tensor([[6], [4]])), **images}


def _images_by_size(batch: Batch) -> Batch:
    """Images of 16 × 24 and 16 × 16 pixels, padded to one shape: 6 and 4 tokens."""
    images = {"pixel_values": fixed_randn(2, 3, 16, 24), "image_sizes": torch.tensor([[16, 24], [16, 16]])}
    return {**image_tokens(batch, torch.tensor([[6], [4]])), **images}


def _tiles_by_size(batch: Batch) -> Batch:
    """Images of 8 × 16 and 16 × 8 pixels in tiles of 8 × 8 after a small copy: 14 and 16 tokens, one behind each line of patches."""
    images = {"pixel_values": fixed_randn(2, 3, 3, 8, 8), "image_sizes": torch.tensor([[8, 16], [16, 8]])}
    return {**image_tokens(batch, torch.tensor([[14], [16]])), **images}


def _formula(batch: Batch) -> Batch:
    """An image per row; the class makes the inputs of its decoder of `input_ids`."""
    return {**pixels(3, 32, 32)(batch), "input_ids": batch["labels"], "attention_mask": None}


def _boxes(batch: Batch) -> Batch:
    """The box of each token on a page, as shares of its width and height."""
    return {"bbox": fixed_randn(2, batch["input_ids"].shape[1], 2, 2).sigmoid().sort(2).values.flatten(2)}


def _canvas(batch: Batch) -> Batch:
    """Eight tokens of a diffusion step, which see all real tokens, and labels for them."""
    mask = batch.get("attention_mask")
    seen = {} if mask is None else {"decoder_attention_mask": torch.cat([mask, torch.ones_like(mask[:, :8])], 1)}
    return {"decoder_input_ids": batch["input_ids"][:, -8:].contiguous(), "labels": batch["input_ids"][:, :8].contiguous(), **seen}


_FULL_MROPE = merged(_MROPE, {"text_config": {"rope_parameters": {"partial_rotary_factor": 1.0}}})
_GLM = Case(settings={**_FULL_MROPE, "vision_config": _GRID_TOWER}, images=_grids(96, types=True))
_SMALL = {"image_size": 16, "patch_size": 4}
_SQUARE = {"vision_config": _SMALL, "image_token_id": IMAGE}
_MINICPM: dict[str, Any] = {"vision_config": _SMALL, "insert_layer_id": 0, "image_token_id": IMAGE}
_INTERN = Case(
    settings={"vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}, "image_token_id": IMAGE}, images=_images(3, 16, 16, count=4)
)
_LLAVA_NEXT = Case(
    settings={"vision_config": _IMAGE_SIZES, "image_token_index": IMAGE, "image_grid_pinpoints": [[8, 16], [16, 8]]}, images=_tiles_by_size
)
_WINDOWS = Case(settings={"vision_config": _WINDOW_TOWER, "image_token_id": IMAGE}, images=_grids(96))
_QWEN3_5 = Case(
    settings={"vision_config": {**_GRID_TOWER, "num_position_embeddings": 64}, "image_token_id": IMAGE}, images=_grids(96, types=True)
)
_QWEN3_VL = Case(
    settings={
        "vision_config": {**_GRID_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        "image_token_id": IMAGE,
    },
    images=_grids(96, types=True),
)

IMAGE_CASES: dict[str, Case] = {
    "BlipForConditionalGeneration": Case(
        settings={"vision_config": _IMAGE_SIZES, "text_config": {"encoder_hidden_size": 32}}, inputs=pixels(3, 8, 8)
    ),
    "Blip2ForConditionalGeneration": Case(
        settings={
            "vision_config": _IMAGE_SIZES, "qformer_config": {"encoder_hidden_size": 32}, "num_query_tokens": 3, "image_token_index": IMAGE,
        },
        inputs=_images(3, 8, 8, count=3),
    ),
    "ChameleonForConditionalGeneration": Case(
        settings={
            "vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z": IMAGE + 1 + i for i in range(16)}},
            "vocab_size": IMAGE + 17, "vq_config": _VQ,  # tokens of images are never predicted
        },
        images=_images(3, 8, 8, count=16),
    ),
    "CohereCompassForConditionalGeneration": Case(
        settings={
            "text_config": {"rope_parameters": COMPASS_ROPE}, "vision_config": {**_GRID_TOWER, "deepstack_visual_indexes": [0, 1]},
            "image_token_id": IMAGE,
        },
        images=_grids(96, types=True),
    ),
    "Cosmos3EdgeForConditionalGeneration": Case(
        settings={**_MROPE, "projector_hidden_size": 24, "vision_config": {"patch_size": 4}}, images=_masked_grids
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
        inputs=_canvas,
    ),
    "Emu3ForConditionalGeneration": Case(
        settings={
            "vocabulary_map": {
                "<image>": IMAGE, "<|extra_200|>": 2, **{f"<|visual token {i:06}|>": i + 3 for i in range(16)},
            },
            "vq_config": {**_VQ, "codebook_size": 16},
        },
        images=lambda batch: {**_images(3, 6, 6, count=12)(batch), "image_sizes": torch.full((2, 2), 6)},
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Case(
        settings=merged(_MROPE, {"text_config": {"moe_intermediate_size": [24, 16]}, "vision_config": {"depth": 2, "patch_size": 4}}),
        images=_grids(48, types=True),
    ),
    "FastVlmForConditionalGeneration": Case(
        settings={"vision_config": {"architecture": "test_resnet", "model_args": None, "hidden_size": 96}, "image_token_index": IMAGE},
        images=_images(3, 64, 64, count=4),
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
        images=lambda batch: {**_images(2, 3, 16, 16, count=10)(batch), "image_sizes": torch.full((2, 2), 16)},
    ),
    "HunYuanVLForConditionalGeneration": Case(
        settings={**_MROPE, "vision_config": {"patch_size": 4, "max_image_size": 32, "out_hidden_size": 32}},
        images=_grids(48, types=True, count=10),
    ),
    "IdeficsForVisionText2Text": Case(
        settings={
            "vision_config": {**_IMAGE_SIZES, "embed_dim": 16}, "alpha_initializer": "ones",
            "freeze_text_layers": False, "freeze_vision_layers": False,
        },
        inputs=_image_seen_by_tokens,
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
        settings={**_Q_FORMER, "image_token_index": IMAGE}, inputs=_instructed(3, 8, 8, count=3)
    ),
    "InstructBlipVideoForConditionalGeneration": Case(
        settings={**_Q_FORMER, "video_token_index": IMAGE}, inputs=_instructed(2, 3, 8, 8, count=6)
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
        images=_images(3, 16, 16, count=16),
    ),
    "Kosmos2ForConditionalGeneration": Case(
        settings={
            "text_config": {"embed_dim": 32, "layers": 2, "attention_heads": 4, "dropout": 0.0},
            "vision_config": _IMAGE_SIZES, "latent_query_num": 5,
        },
        inputs=_image_at_places,
    ),
    "Molmo2ForConditionalGeneration": Case(
        settings={
            "adapter_config": {"vision_feature_layer": [0, 1], "text_hidden_size": 32}, "image_patch_id": IMAGE,
            "vision_config": {"image_size": [16, 16], "patch_size": 4},
        },
        images=_pooled,
    ),
    "MuseGlimmerForConditionalGeneration": Case(settings=_MUSE, images=_grids(96)),
    "MuseSparkForConditionalGeneration": Case(
        settings={
            **_MUSE,
            "audio_config": {"patch_sizes": [4, 3], "hidden_sizes": [8, 16], "depths": [1, 1], "out_hidden_size": 32},
            "text_config": {"moe_hidden_size": 16},
        },
        images=_grids(96),
    ),
    "NemotronH_Omni_Reasoning_V3": Case(
        settings={
            "vision_config": {"video_temporal_patch_size": 2}, "vision_hidden_size": 32, "projector_hidden_size": 24,
            "image_token_id": IMAGE,
        },
        images=_grids(768, grid="image_grid_hw"),
    ),
    "PI0ForConditionalGeneration": Case(
        settings={
            "vlm_config": {"vision_config": _IMAGE_SIZES, "projection_dim": 32, "image_token_id": IMAGE},
            "chunk_size": 6, "max_state_dim": 5, "max_action_dim": 5,
        },
        inputs=_actions,
    ),
    "PPFormulaNetForConditionalGeneration": Case(
        settings={
            "vision_config": {
                "image_size": 32, "patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 24, "output_channels": 8,
                "post_conv_in_channels": 8, "post_conv_mid_channels": 12, "post_conv_out_channels": 16, "decoder_hidden_size": 32,
            }
        },
        inputs=_formula,
    ),
    "PaddleOCRVLForConditionalGeneration": Case(
        settings={**_MROPE, "vision_config": {"patch_size": 4, "image_size": 16}}, images=_grids(3, 4, 4, types=True)
    ),
    "PaliGemmaForConditionalGeneration": Case(
        settings={"vision_config": {**_IMAGE_SIZES, "vision_use_head": False}, "projection_dim": 32, "image_token_id": IMAGE},
        inputs=_image_before_prompt,
    ),
    "PerceptionLMForConditionalGeneration": Case(
        settings={"vision_config": {"architecture": "test_vit", "model_args": {"embed_dim": 32}}, "image_token_id": IMAGE},
        images=_images(1, 3, 64, 64, count=16),
        package="timm",
    ),
    "Pix2StructForConditionalGeneration": Case(
        settings={"text_config": {"d_kv": 8}, "vision_config": {"d_kv": 8, "patch_embed_hidden_size": 24, "seq_len": 16}}, inputs=_patches
    ),
    "Qwen2VLForConditionalGeneration": Case(
        settings={**_MROPE, "vision_config": {"embed_dim": 16, "depth": 2, "patch_size": 4, "mlp_ratio": 2}}, images=_grids(96, types=True)
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": Case(
        settings={**_MROPE, "vision_start_token_id": 58, "vision_config": _WINDOW_TOWER}, images=_grids(96)
    ),
    "Qwen2_5_VLForConditionalGeneration": Case(settings={**_MROPE, "vision_config": _WINDOW_TOWER}, images=_grids(96, types=True)),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Case(
        settings={
            **_MROPE, "vision_start_token_id": 58,
            "vision_config": {**_GRID_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        },
        images=_grids(96),
    ),
    "UdopForConditionalGeneration": Case(settings={"decoder_start_token_id": 1, "d_kv": 8}, inputs=_boxes),
    "UnlimitedOcrForConditionalGeneration": Case(settings={"text_config": {"num_key_value_heads": 4}}),  # its eager attention has no GQA
    "VisionEncoderDecoderModel": Case(
        settings={"encoder": _IMAGE_SIZES, "decoder": {"add_cross_attention": True}, "decoder_start_token_id": 1, "pad_token_id": 0},
        inputs=lambda batch: {**pixels(3, 8, 8)(batch), **_NO_TOKENS},
    ),
    # classes that run with the sizes of `families`, with images too
    "AriaForConditionalGeneration": Case(
        settings={"vision_config": _SMALL, "projector_patch_to_query_dict": {16: 5}, "image_token_index": IMAGE},
        images=_padded_images("pixel_mask", 3, 16, 16, count=5),
    ),
    "AyaVisionForConditionalGeneration": Case(
        settings={"vision_config": _SMALL, "image_token_index": IMAGE}, images=_images(3, 16, 16, count=4)
    ),
    "Cohere2VisionForConditionalGeneration": Case(
        settings={**_SQUARE, "alignment_intermediate_size": 48}, images=_images(3, 16, 16, count=4)
    ),
    "Cosmos3OmniForConditionalGeneration": _QWEN3_VL,
    "DeepseekVLForConditionalGeneration": Case(settings=_SQUARE, images=_images(3, 16, 16, count=16)),
    "Exaone4_5_ForConditionalGeneration": _WINDOWS,
    "HyperCLOVAXVisionV2ForConditionalGeneration": _WINDOWS,
    "Idefics2ForConditionalGeneration": Case(
        settings={
            **_SQUARE,
            "perceiver_config": {"resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8},
        },
        images=_padded_images("pixel_attention_mask", 1, 3, 12, 16, count=5),
    ),
    "Idefics3ForConditionalGeneration": Case(settings=_SQUARE, images=_images(1, 3, 16, 16, count=4)),
    "InternVLForConditionalGeneration": _INTERN,
    "Kimi_K25ForConditionalGeneration": Case(
        settings={
            "vision_config": {"patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8}, "projection_hidden_size": 32,
            "image_token_id": IMAGE,
        },
        images=_grids(3, 4, 4),
    ),
    "Kosmos2_5ForConditionalGeneration": Case(
        settings={"vision_config": {"patch_embed_hidden_size": 24, "max_num_patches": 16}, "latent_query_num": 5}, images=_page
    ),
    "Lfm2VlForConditionalGeneration": Case(
        settings={
            "vision_config": {"patch_size": 4, "num_patches": 16, "vision_use_head": False},  # whose output the class does not use
            "projector_hidden_size": 24, "image_token_id": IMAGE,
        },
        images=_patches_by_shape,
    ),
    "LightOnOcrForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 24, "patch_size": 4}, "image_token_id": IMAGE}, images=_images_by_size
    ),
    "Llama4ForConditionalGeneration": Case(
        settings={
            "vision_config": {
                **_SMALL, "intermediate_size": 128, "projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24,
            },
            "image_token_index": IMAGE,
        },
        images=_images(3, 16, 16, count=4),
    ),
    "LlavaForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 12, "patch_size": 4}, "image_token_index": IMAGE}, images=_images(3, 12, 12, count=9)
    ),
    "LlavaNextForConditionalGeneration": _LLAVA_NEXT,
    "LlavaNextVideoForConditionalGeneration": _LLAVA_NEXT,
    "LlavaOnevisionForConditionalGeneration": _LLAVA_NEXT,
    "MiniCPMOcrForConditionalGeneration": Case(settings=_MINICPM, images=_row_of_patches(4, 6, count=6)),
    "MiniCPMV4_6ForConditionalGeneration": Case(settings=_MINICPM, images=_row_of_patches(4, 12, count=3)),
    "MiniCPMV4_7ForConditionalGeneration": Case(
        settings={
            **_MINICPM, "text_config": _FULL_MROPE["text_config"],
            "image_start_id": 50, "image_end_id": 51, "slice_start_id": 52, "slice_end_id": 53, "newline_id": 54,
        },
        images=_image_and_slice,
    ),
    "MiniMaxM3SparseForConditionalGeneration": Case(settings={"vision_config": _SMALL, "image_token_index": IMAGE}, images=_grids(96)),
    "Mistral3ForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 24, "patch_size": 4}, "image_token_index": IMAGE},
        images=_images_by_size,
    ),
    "MllamaForConditionalGeneration": Case(
        settings={
            "text_config": {"cross_attention_layers": [1]},
            "vision_config": {
                **_IMAGE_SIZES, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64, "intermediate_layers_indices": [0],
                "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
        },
        images=_cross_attended_image,
    ),
    "Ovis2ForConditionalGeneration": Case(settings=_SQUARE, images=_images(3, 16, 16, count=16)),
    "QianfanOCRForConditionalGeneration": _INTERN,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "SmolVLMForConditionalGeneration": Case(settings=_SQUARE, images=_images(1, 3, 16, 16, count=4)),
    "Step3p7ForConditionalGeneration": Case(
        settings={"vision_config": {"image_size": 32, "patch_size": 4}, "image_token_id": IMAGE}, images=_image_and_crops
    ),
    "VideoLlama3ForConditionalGeneration": Case(
        settings={"vision_config": {"patch_size": 4}, "image_token_id": IMAGE},
        images=lambda batch: {**_grids(48)(batch), "image_merge_sizes": torch.tensor([2, 2])},
    ),
    "VideoLlavaForConditionalGeneration": Case(
        settings={"vision_config": _SMALL, "image_token_index": IMAGE}, images=_images(3, 16, 16, count=16)
    ),
    "VipLlavaForConditionalGeneration": Case(
        settings={"vision_config": _IMAGE_SIZES, "vision_feature_layers": [-1, 1], "image_token_index": IMAGE},
        images=_images(3, 8, 8, count=4),
    ),
}  # fmt: skip
