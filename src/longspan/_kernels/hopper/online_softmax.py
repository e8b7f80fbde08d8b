"""Online softmax of one KV block's scores, with score mods and masks, in the registers of a consumer warp group of the forward kernels.

Scores are in base-2 logarithms. m: running max; total: running sum of exp2(s − m).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longspan._kernels.gpu.device_library import LOG2_E, bits_below
from longspan._kernels.hopper.forward_producer import GROUP_ROWS
from longspan._kernels.hopper.half_blocks import HALF, of_halves
from longspan._kernels.hopper.masked_scores import masked_scores
from longspan._kernels.hopper.running_max import NEVER_SEEN, by_lane, checked, followed, per_lane, summed


@gluon.jit
def start_rows(CHECKED: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """(m, total, max_scores) [GROUP_ROWS, 8] of rows that have seen nothing; `layout`: of scores [GROUP_ROWS, N]."""
    m: gl.constexpr = NEVER_SEEN if CHECKED else -float("inf")
    max_scores: gl.constexpr = -float("inf")
    return per_lane(GROUP_ROWS, N, m, layout), per_lane(GROUP_ROWS, N, 0.0, layout), per_lane(GROUP_ROWS, N, max_scores, layout)


@gluon.jit
def end_rows(m, total, max_scores, layout: gl.constexpr):
    """m, total and max_scores of an item as [GROUP_ROWS], in the layout of the rows of scores."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    m, max_scores = gl.convert_layout(gl.max(m, 1), rows), gl.convert_layout(gl.max(max_scores, 1), rows)
    return m, gl.convert_layout(gl.sum(total, 1), rows), max_scores


@gluon.jit
def softmax_block(
    s, m, total, max_scores, q_first, kv_first, left, masked, global_b, global_h, scale, captured,
    MASK: gl.constexpr, VISIBLE: gl.constexpr, SCORE: gl.constexpr, FLAT: gl.constexpr, CORNERS: gl.constexpr, PARTIAL: gl.constexpr,
    SCALE_IN_EXP: gl.constexpr, MAX_SCORES: gl.constexpr, FIRST: gl.constexpr, CHECKED: gl.constexpr, N: gl.constexpr, DTYPE: gl.constexpr,
    layout: gl.constexpr, kv_second=0, left_second=0, KV_PAIRS: gl.constexpr = False,
):  # fmt: skip
    """Online softmax of one block's scores [64, N]: (p in DTYPE, m, total, max_scores, factor that rescales earlier sums).

    m, total, max_scores and the factor are [64, 8] (`running_max.by_lane`).
    masked: if PARTIAL, whether the block is masked: positions of a full block need not be consecutive.
    kv_second, left_second: with KV_PAIRS, `kv_first` and `left` of the second half of the block (`hopper.half_blocks`).
    FIRST: whether it is the item's first block. CHECKED: whether the running max is `checked` or `followed` (`hopper.running_max`).
    """
    q_pos = gl.expand_dims(q_first + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout)), 1)
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    kv = gl.expand_dims(of_halves(columns, kv_first, kv_second - HALF, KV_PAIRS) + columns, 0)
    if not SCALE_IN_EXP:
        s *= scale
    if SCORE is not None:
        if FLAT is None:
            s = SCORE(s, global_b, global_h, q_pos, kv, captured.score, captured.score_sizes)
        else:
            q_last, kv_last = q_first + (GROUP_ROWS - 1), kv_first + (N - 1)
            low, high = CORNERS(global_b, global_h, q_first, q_last, kv_first, kv_last, captured.score, captured.score_sizes)
            if low == high:
                s = FLAT(s, global_b, global_h, q_pos, kv, low, captured.score, captured.score_sizes)
            else:
                s = SCORE(s, global_b, global_h, q_pos, kv, captured.score, captured.score_sizes)
    if PARTIAL:  # noqa: SIM102 (a compile-time condition)
        if masked:
            if VISIBLE is not None:
                of_row = gl.expand_dims(columns, 0)
                visible = VISIBLE(captured.mask, kv_first, of_row) & bits_below(left, of_row)
                if KV_PAIRS:  # of a word, the lower half has the bits of the first 64 columns
                    second = VISIBLE(captured.mask, kv_second, of_row) & bits_below(left_second, of_row)
                    visible = (visible & 0xFFFF) | (second << 16)
                s = masked_scores(s, visible, of_row)
            else:
                if MASK is not None:
                    s = gl.where(MASK(global_b, global_h, q_pos, kv, captured.mask, captured.mask_sizes), s, float("-inf"))
                if KV_PAIRS:
                    s = gl.where(gl.expand_dims(columns < of_halves(columns, left, left_second + HALF, KV_PAIRS), 0), s, float("-inf"))
                elif left < N:
                    s = gl.where(gl.expand_dims(columns, 0) < left, s, float("-inf"))
    factor = scale * LOG2_E if SCALE_IN_EXP else LOG2_E
    s = by_lane(s)
    if FIRST or MAX_SCORES or not CHECKED:
        top = gl.max(s, 1)
    if MAX_SCORES:
        max_scores = gl.maximum(max_scores, top * factor)
    base, rescale = m, total
    if not CHECKED:
        m, rescale = followed(m, top, factor)
        base = m
        if PARTIAL or SCORE is not None:
            # A row that has seen nothing: exp2(−inf − 0) is 0, exp2(−inf − −inf) would be NaN.
            base = gl.where(m == float("-inf"), 0.0, m)
    elif FIRST:
        m = gl.maximum(m, gl.expand_dims(gl.max(top, 1) * factor, 1))
        base = m
    p = gl.exp2(s * factor - gl.expand_dims(base, 1))
    sums, p = summed(p), p.to(DTYPE)
    if CHECKED and FIRST:
        total = sums
    else:
        if CHECKED:
            p, sums, m, rescale = checked(p, sums, m, s, factor)
        total = total * rescale + sums
    return gl.convert_layout(gl.reshape(p, [GROUP_ROWS, N]), layout), m, total, max_scores, rescale
