"""Image inputs of vision-language classes, in the form that each class takes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.integrations.family_cases import FIRST, IMAGE, Batch, fixed_randn, image_tokens, pixels


def grids(*patch: int, grid: str = "image_grid_thw", types: bool = False, count: int = 6) -> Callable[[Batch], Batch]:
    """Two images of 4 × 6 patches of a shape, `count` tokens each, and their grids; with the type of each token if `types`."""

    def inputs(batch: Batch) -> Batch:
        tokens = image_tokens(batch, count)
        sizes = torch.tensor([[1, 4, 6]] * 2)[:, 1 if grid == "image_grid_hw" else 0 :]
        kinds = {"mm_token_type_ids": (tokens["input_ids"] == IMAGE).int()} if types else {}
        return {**tokens, "pixel_values": fixed_randn(48, *patch), grid: sizes, **kinds}

    return inputs


def masked_grids(batch: Batch) -> Batch:
    """Two images and an attention_mask, without which the class takes the places of image tokens for those of packed documents."""
    return {"attention_mask": torch.ones_like(batch["input_ids"]), **batch, **grids(48, types=True)(batch)}


def images(*shape: int, count: int) -> Callable[[Batch], Batch]:
    """An image of a shape in each row, `count` tokens each."""
    return lambda batch: {**image_tokens(batch, count), **pixels(*shape)(batch)}


def pooled(batch: Batch) -> Batch:
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


def image_before_prompt(batch: Batch) -> Batch:
    """An image of four tokens in each row. Token types: 0 up to the end of a prompt, whose tokens see each other, then 1."""
    types = (torch.arange(batch["input_ids"].shape[1]) > 25).long().expand_as(batch["input_ids"])
    return {**images(3, 8, 8, count=4)(batch), "token_type_ids": types}


def image_seen_by_tokens(batch: Batch) -> Batch:
    """One image per row, which is not among the tokens: every token sees it."""
    return {"pixel_values": fixed_randn(2, 1, 3, 8, 8), "image_attention_mask": torch.ones(*batch["input_ids"].shape, 1, dtype=torch.long)}


def image_at_places(batch: Batch) -> Batch:
    """An image of five tokens in each row, and a mask of their places."""
    tokens = image_tokens(batch, 5)
    return {**tokens, **pixels(3, 8, 8)(batch), "image_embeds_position_mask": tokens["input_ids"] == IMAGE}


def instructed(*shape: int, count: int) -> Callable[[Batch], Batch]:
    """Images or videos of a shape, `count` tokens each, and an instruction of seven tokens for the Q-Former."""
    return lambda batch: {**image_tokens(batch, count), **pixels(*shape)(batch), "qformer_input_ids": batch["input_ids"][:, -7:]}


def row_of_patches(*grid: int, count: int) -> Callable[[Batch], Batch]:
    """Two images of a grid of patches of 4 × 4 pixels, `count` tokens each, all patches side by side."""
    sizes = torch.tensor([grid] * 2)
    return lambda batch: {**image_tokens(batch, count), "pixel_values": fixed_randn(1, 3, 4, 8 * grid[0] * grid[1]), "target_sizes": sizes}


def image_and_slice(batch: Batch) -> Batch:
    """An image of two tokens and a slice of it of three tokens in each row, between their marks, and the type of each token."""
    images, places = row_of_patches(4, 8, count=2)(batch), torch.arange(FIRST - 1, FIRST + 8)
    marked = torch.tensor([50, IMAGE, IMAGE, 51, 52, IMAGE, IMAGE, IMAGE, 53]).expand(2, 9)
    ids, labels = images["input_ids"].index_copy(1, places, marked), images["labels"].index_fill(1, places, -100)
    grids = {"target_sizes": torch.tensor([[4, 8], [4, 12]] * 2), "pixel_values": fixed_randn(1, 3, 4, 4 * 160)}
    return {"input_ids": ids, "labels": labels, **grids, "mm_token_type_ids": (ids == IMAGE).int()}


def image_and_crops(batch: Batch) -> Batch:
    """An image of four tokens and a crop of it of one token in each row."""
    crops = {"pixel_values_local": fixed_randn(2, 3, 16, 16), "num_local_patches": torch.tensor([1, 1])}
    return {**images(3, 32, 32, count=5)(batch), **crops}


def cross_attended_image(batch: Batch) -> Batch:
    """Two tiles of an image in each row, which are not among the tokens: those behind the first places see them."""
    places = torch.arange(batch["input_ids"].shape[1])
    seen = torch.stack([places > 14, places > 20], 1).expand(2, 1, -1, 2).transpose(1, 2)
    ratio = {"aspect_ratio_ids": torch.full((2, 1), 2), "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long)}
    return {"pixel_values": fixed_randn(2, 1, 2, 3, 8, 8), **ratio, "cross_attention_mask": seen.long()}


def actions(batch: Batch) -> Batch:
    """The state and the actions of a robot, in place of labels, an image of four tokens, and the noise of a diffusion step."""
    images = {"pixel_values": fixed_randn(2, 1, 3, 8, 8), "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool)}
    step = {"noise": fixed_randn(2, 6, 5).flip(0), "timestep": torch.tensor([0.3, 0.8])}
    tokens = {"input_ids": image_tokens(batch, 4)["input_ids"], "labels": None}
    return {**tokens, **images, **step, "state": fixed_randn(2, 5), "actions": fixed_randn(2, 6, 5)}


def patches(batch: Batch) -> Batch:
    """Patches of 24 numbers after their row and column, in place of an encoder's tokens; the second image has fewer."""
    places = torch.cartesian_prod(torch.arange(3.0), torch.arange(5.0)).expand(2, 15, 2)
    real = torch.arange(15) < torch.tensor([[15], [11]])
    return {"flattened_patches": torch.cat([places, fixed_randn(2, 15, 24)], 2), "input_ids": None, "attention_mask": real.long()}


def page(batch: Batch) -> Batch:
    """The patches of `patches` beside tokens, five of which are of the image, and a mask of their places."""
    tokens = image_tokens(batch, 5)
    sizes = {"width": torch.tensor([20, 20]), "height": torch.tensor([12, 12])}
    return {
        **tokens,
        **sizes,
        "flattened_patches": patches(batch)["flattened_patches"],
        "image_embeds_position_mask": (tokens["input_ids"] == IMAGE).long(),
    }


def padded_images(mask: str, *shape: int, count: int) -> Callable[[Batch], Batch]:
    """An image of a shape [..., 3, H, W] in each row, `count` tokens each, and a mask of real pixels: fewer in the second row."""
    real = torch.ones(2, *shape[:-3], *shape[-2:], dtype=torch.long)
    real[1, ..., -4:] = 0
    return lambda batch: {**images(*shape, count=count)(batch), mask: real}


def patches_by_shape(batch: Batch) -> Batch:
    """Images of 4 × 6 and 4 × 4 patches of 48 numbers, the second padded: 6 and 4 tokens."""
    shapes = torch.tensor([[4, 6], [4, 4]])
    real = torch.arange(24) < shapes.prod(1)[:, None]
    images = {"pixel_values": fixed_randn(2, 24, 48), "spatial_shapes": shapes, "pixel_attention_mask": real.long()}
    return {**image_tokens(batch, torch.tensor([[6], [4]])), **images}


def images_by_size(batch: Batch) -> Batch:
    """Images of 16 × 24 and 16 × 16 pixels, padded to one shape: 6 and 4 tokens."""
    images = {"pixel_values": fixed_randn(2, 3, 16, 24), "image_sizes": torch.tensor([[16, 24], [16, 16]])}
    return {**image_tokens(batch, torch.tensor([[6], [4]])), **images}


def tiles_by_size(batch: Batch) -> Batch:
    """Images of 8 × 16 and 16 × 8 pixels in tiles of 8 × 8 after a small copy: 14 and 16 tokens, one behind each line of patches."""
    images = {"pixel_values": fixed_randn(2, 3, 3, 8, 8), "image_sizes": torch.tensor([[8, 16], [16, 8]])}
    return {**image_tokens(batch, torch.tensor([[14], [16]])), **images}


def formula(batch: Batch) -> Batch:
    """An image per row; the class makes the inputs of its decoder of `input_ids`."""
    return {**pixels(3, 32, 32)(batch), "input_ids": batch["labels"], "attention_mask": None}


def boxes(batch: Batch) -> Batch:
    """The box of each token on a page, as shares of its width and height."""
    return {"bbox": fixed_randn(2, batch["input_ids"].shape[1], 2, 2).sigmoid().sort(2).values.flatten(2)}


def canvas(batch: Batch) -> Batch:
    """Eight tokens of a diffusion step, which see all real tokens, and labels for them."""
    mask = batch.get("attention_mask")
    seen = {} if mask is None else {"decoder_attention_mask": torch.cat([mask, torch.ones_like(mask[:, :8])], 1)}
    return {"decoder_input_ids": batch["input_ids"][:, -8:].contiguous(), "labels": batch["input_ids"][:, :8].contiguous(), **seen}
