"""What all GPU kernels refuse: head dims, blocks, and operations of programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu import device, limits
from longspan._kernels.protocol import AttentionInputs, Work
from longspan._kernels.tiling import Tiling
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace


def reason(
    dim: int = 64, value_dim: int = 64, block: tuple[int, int] = (128, 128), mask: Any = None, score: Any = None, grad: bool = False
) -> str:
    q, v = torch.zeros(1, 2, 300, dim), torch.zeros(1, 2, 300, value_dim)
    masked, scored = (None if mod is None else trace(mod, kind) for mod, kind in ((mask, "mask"), (score, "score")))  # type: ignore[arg-type]
    work = Work(
        table=ls.full().block_table(300, 300, block=block), q_tiles=Tiling(length=300, block=block[0]),
        kv_tiles=Tiling(length=300, block=block[1]), scale=1.0, mask=masked and masked.program, score=scored and scored.program,
        mask_captured=masked.captured() if masked else [], score_captured=scored.captured() if scored else [],
        joint=joint_of(scored.program) if scored and grad else None,
    )  # fmt: skip
    return limits.unsupported(AttentionInputs(q=q, k=q, v=v), work) or ""


def test_head_dims_of_up_to_256_are_supported() -> None:
    assert not reason(256, 256)
    assert reason(257, 256).startswith("head dims 257 and 256: expected at most 256")
    assert reason(256, 257).startswith("head dims 256 and 257: expected at most 256")


@pytest.mark.parametrize(
    ("block", "supported"), [((16, 16), True), ((48, 80), True), ((8, 128), False), ((128, 24), False), ((640, 16), True)]
)
def test_blocks_are_multiples_of_16(block: tuple[int, int], supported: bool) -> None:
    assert reason(block=block) == ("" if supported else f"table block {block}: expected multiples of 16")


def test_programs_that_code_generation_supports() -> None:
    table = torch.randn(300, requires_grad=True)
    plain: Any = lambda s, b, h, q, kv: s + table[q]
    odd: Any = lambda s, b, h, q, kv: torch.atan2(s, s + 1)
    assert not reason(mask=ls.causal(), score=plain, grad=True)
    assert "uses atan2" in reason(score=odd)
    assert "mask" in reason(mask=lambda b, h, q, kv: torch.atan2(q * 1.0, kv + 1.0) > 0, score=plain)
    assert "not elementwise" in reason(mask=lambda b, h, q, kv: torch.arange(4).eq(q).any() & (kv > 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
def test_the_interpreter_stands_for_one_sm_of_an_ampere_gpu() -> None:
    assert device.capability(torch.device("cpu")) == (8, 0) and device.sm_count(torch.device("cpu")) == 1
