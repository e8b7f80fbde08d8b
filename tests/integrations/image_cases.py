"""What vision-language classes of transformers need beside the sizes of `families`, from Granite 4 Vision on: a part of `family_cases`."""

from __future__ import annotations

from typing import Any

from tests.integrations.family_cases import Case

_MROPE: dict[str, Any] = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}}

IMAGE_CASES: dict[str, Case] = {
    "PaddleOCRVLForConditionalGeneration": Case(settings=_MROPE),
    "Qwen2_5OmniThinkerForConditionalGeneration": Case(settings={**_MROPE, "vision_start_token_id": 58}),
    "Qwen2_5_VLForConditionalGeneration": Case(settings=_MROPE),
    "Qwen2VLForConditionalGeneration": Case(settings={**_MROPE, "vision_config": {"embed_dim": 16, "depth": 2}}),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Case(settings={**_MROPE, "vision_start_token_id": 58}),
}
