"""Limits that all GPU kernels have: head dims, table blocks and the operations that mask and score programs may use."""

from __future__ import annotations

from functools import lru_cache

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.codegen import ByKey, JointByKey
from longspan._kernels.protocol import AttentionInputs, Work

MAX_HEAD_DIM = 256
_MIN_BLOCK = 16  # a tile side of the smallest matrix product


def unsupported(inputs: AttentionInputs, work: Work) -> str | None:
    """The reason why no GPU kernel computes this work, or None."""
    q, v = inputs.q, inputs.v
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"head dims {q.shape[-1]} and {v.shape[-1]}: expected at most {MAX_HEAD_DIM} each"
    for block in work.table.block:
        if launch.sub_tile(block, 128) < _MIN_BLOCK:
            return f"table block {work.table.block}: expected multiples of {_MIN_BLOCK}"
    if work.mask is None and work.score is None:
        return None
    options = launch.options(work, q.dtype)
    mask = None if work.mask is None else ByKey(work.mask)
    score = None if work.score is None else JointByKey(work.score, work.joint)
    return _unsupported_programs(mask, score, work.joint is None, options)


@lru_cache(maxsize=1024)
def _unsupported_programs(mask: ByKey | None, score: JointByKey | None, forward_only: bool, options: codegen.Options) -> str | None:
    """`forward_only` is part of the cache's key: a score program without its joint compares equal to one with it."""
    reason = None if mask is None else codegen.unsupported(mask.program, None, options)
    return reason or (None if score is None else codegen.unsupported(score.program, score.joint, options))
