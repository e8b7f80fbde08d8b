"""The forward kernel: one CTA per tile of M queries of one head, online softmax over the runs of KV tiles that the block table lists.

    time ─►   state in      full runs                partial runs                    epilogue
              ────────      ─────────────────        ───────────────────────────     ─────────────────────────────
    load      q, old out    K₀ V₀  K₁ V₁  …          K V …   (mask, short tiles)
    compute                 S = QKᵀ, P, acc += PV    the same, masked S selected     acc / total → out, lse
                            (software pipeline of `num_stages` tiles, TMA or loads)  a NaN in acc → once more, SAFE

Scores are in base-2 logarithms: s · (scale · log₂e), so that each probability is one multiply-add and one exp2. State in and out is in
natural logarithms. m: running max (base 2); total: running sum of exp2(s − m); acc: running sum of probabilities times values.

Isolation: the mask selects each score, but P·V adds 0 · V[j] for masked keys j, which is NaN if V[j] is not finite. If the accumulator has
a NaN, the CTA repeats its loop with non-finite elements of V set to 0 and adds the non-finite terms of visible keys
(`gpu.nonfinite_counts`).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from longspan._kernels.gpu.device_library import LN_2, LOG2_E
from longspan._kernels.gpu.nonfinite_counts import add_nonfinite, any_nan, count_nonfinite, finite_or_zero
from longspan._kernels.gpu.tile_access import (
    head_of,
    lead_runs,
    load_rows,
    load_tile,
    locate,
    run_at,
    run_count,
    run_place,
    span,
    store_rows,
    table_row,
    wide,
)

_DYNAMIC = ["rows", "tiles", "heads", "group", "q_len", "kv_len", "shared", "first_b", "first_h"]


@triton.jit
def attend(
    acc, total, m, row_max, q, q_pos, b, g, at_b, at_h, first, last, whole, k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
    mask_captured, mask_sizes, score_captured, score_sizes,
    MASK: tl.constexpr, SCORE: tl.constexpr, PARTIAL: tl.constexpr, SAFE: tl.constexpr, FOLD: tl.constexpr, PEAK: tl.constexpr,
    N: tl.constexpr, SUBS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Accumulate one run of KV tiles. PARTIAL: the mask decides and tiles may be short; not so where `whole`. SAFE: non-finite values
    count as 0. at_b, at_h: batch row and head for programs.
    """
    row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, SUBS, N)
    for n in tl.range(first * SUBS, (last + 1) * SUBS, num_stages=1 if SAFE else None):
        row, pos, left = row_from + n * N, pos_from + n * N, left_from - n * N
        k = load_tile(k_head, b, g, row, left, k_stride, N, D, DP, PARTIAL, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        kv = (pos + tl.arange(0, N))[None, :]
        if not FOLD:
            s *= scale
        if SCORE is not None:
            s = SCORE(s, at_b, at_h, q_pos, kv, score_captured, score_sizes)
        if PARTIAL:
            valid = tl.arange(0, N)[None, :] < left
            if MASK is not None:
                allowed = MASK(at_b, at_h, q_pos, kv, mask_captured, mask_sizes)
                valid = valid & ((allowed | whole) if SAFE else allowed)
            s = tl.where(valid, s, float("-inf"))
        factor = scale * LOG2_E if FOLD else LOG2_E
        top = tl.max(s, 1) * factor
        m_new = tl.maximum(m, top)
        if PEAK:
            row_max = tl.maximum(row_max, top)
        base = m_new
        if PARTIAL or SCORE is not None:
            # Nothing seen yet: any finite base gives exp2(−inf) = 0 where −inf − −inf would give NaN.
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_head, b, g, row, left, v_stride, N, E, EP, PARTIAL, TMA)
        if SAFE:
            v = finite_or_zero(v)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    return acc, total, m, row_max


@triton.jit
def count_values(
    count, sign, q_pos, b, g, at_b, at_h, first, last, whole, v_head, v_stride, kv_len, kv_side, mask_captured, mask_sizes,
    MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """count [M, EP] plus the non-finite values (`count_nonfinite`) that each row sees in one run of KV tiles."""
    row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, SUBS, N)
    for n in tl.range(first * SUBS, (last + 1) * SUBS, num_stages=1):
        row, pos, left = row_from + n * N, pos_from + n * N, left_from - n * N
        visible = (tl.arange(0, N)[None, :] < left) & (tl.arange(0, M)[:, None] < M)
        if MASK is not None:
            visible = visible & (MASK(at_b, at_h, q_pos, (pos + tl.arange(0, N))[None, :], mask_captured, mask_sizes) | whole)
        v = load_tile(v_head, b, g, row, left, v_stride, N, E, EP, True, TMA)
        count = count_nonfinite(count, visible, v, sign, PRECISION)
    return count


@triton.jit
def load_state(
    old_out_ptr, old_lse_ptr, old_max_scores_ptr, old_out_stride, b64, h64, state_row, row, left, inside,
    M: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """(acc, total, m, row_max) of the state before these KV tiles."""
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    if old_lse_ptr is not None:
        m = tl.load(old_lse_ptr + state_row, mask=inside, other=float("-inf")) * LOG2_E
        total = tl.where(m == float("-inf"), 0.0, 1.0)
        old = old_out_ptr + b64 * old_out_stride[0] + h64 * old_out_stride[1]
        acc = load_rows(old, row, left, old_out_stride[2], old_out_stride[3], M, E, EP, True).to(tl.float32)
    if old_max_scores_ptr is not None:
        row_max = tl.load(old_max_scores_ptr + state_row, mask=inside, other=float("-inf")) * LOG2_E
    return acc, total, m, row_max


@triton.jit(do_not_specialize=_DYNAMIC)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, max_scores_ptr, old_out_ptr, old_lse_ptr, old_max_scores_ptr,
    q_stride, k_stride, v_stride, out_stride, old_out_stride,
    order, full, partial, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes,
    rows, tiles, heads, shared, group, q_len, kv_len, scale, first_b, first_h,
    MASK: tl.constexpr, SCORE: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr, LEAD: tl.constexpr,
    FOLD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, M_SUBS: tl.constexpr, N_SUBS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries, merged into a previous state where there is one."""
    tile, sub, b, h = locate(order, rows, tiles, heads, group, M_SUBS, PER_BATCH, PER_HEAD)
    table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
    g, b64, h64 = h // shared, wide(b), wide(h)
    row, pos, left = span(tile * M_SUBS + sub, q_len, q_side, M_SUBS, M)
    q = load_rows(q_ptr + b64 * q_stride[0] + h64 * q_stride[1], row, left, q_stride[2], q_stride[3], M, D, DP, True)
    k_head, v_head = head_of(k_ptr, b, g, k_stride, TMA), head_of(v_ptr, b, g, v_stride, TMA)
    i = tl.arange(0, M)
    q_pos = (pos + i)[:, None]
    state_row = (b64 * heads + h) * q_len + row + i
    inside = i < left
    PEAK: tl.constexpr = max_scores_ptr is not None

    acc, total, m, row_max = load_state(
        old_out_ptr, old_lse_ptr, old_max_scores_ptr, old_out_stride, b64, h64, state_row, row, left, inside, M, E, EP
    )  # fmt: skip
    tail = tl.load(partial[0] + 2 * table) + lead_runs(partial, table, LEAD)
    if LEAD:
        for r in tl.range(tl.load(partial[0] + 2 * table), tail, num_stages=1):
            acc, total, m, row_max = attend(
                acc, total, m, row_max, q, q_pos, b, g, b + first_b, h + first_h, tl.load(partial[1] + r), tl.load(partial[2] + r), False,
                k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
                mask_captured, mask_sizes, score_captured, score_sizes,
                MASK, SCORE, True, False, FOLD, PEAK, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
            )  # fmt: skip
    for r in tl.range(tl.load(full[0] + 2 * table), tl.load(full[0] + 2 * table + 1), num_stages=1):
        acc, total, m, row_max = attend(
            acc, total, m, row_max, q, q_pos, b, g, b + first_b, h + first_h, tl.load(full[1] + r), tl.load(full[2] + r), True,
            k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
            mask_captured, mask_sizes, score_captured, score_sizes,
            MASK, SCORE, False, False, FOLD, PEAK, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
        )  # fmt: skip
    for r in tl.range(tail, tl.load(partial[0] + 2 * table + 1), num_stages=1):
        acc, total, m, row_max = attend(
            acc, total, m, row_max, q, q_pos, b, g, b + first_b, h + first_h, tl.load(partial[1] + r), tl.load(partial[2] + r), False,
            k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
            mask_captured, mask_sizes, score_captured, score_sizes,
            MASK, SCORE, True, False, FOLD, PEAK, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
        )  # fmt: skip
    again = any_nan(acc, inside)
    if again:
        acc, total, m, row_max = load_state(
            old_out_ptr, old_lse_ptr, old_max_scores_ptr, old_out_stride, b64, h64, state_row, row, left, inside, M, E, EP
        )  # fmt: skip
        for r in tl.range(0, run_count(full, partial, table), num_stages=1):
            first, last, whole = run_at(full, partial, table, r, LEAD)
            acc, total, m, row_max = attend(
                acc, total, m, row_max, q, q_pos, b, g, b + first_b, h + first_h, first, last, whole,
                k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
                mask_captured, mask_sizes, score_captured, score_sizes,
                MASK, SCORE, True, True, FOLD, PEAK, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
            )  # fmt: skip

    seen = total != 0.0  # also where total is NaN: a row that sees a NaN has lse NaN
    divisor = tl.where(seen, total, 1.0)
    acc = acc / divisor[:, None]
    tl.store(lse_ptr + state_row, tl.where(seen, m * LN_2 + tl.log(divisor), float("-inf")), mask=inside)
    if PEAK:
        tl.store(max_scores_ptr + state_row, row_max * LN_2, mask=inside)
    out_head = out_ptr + b64 * out_stride[0] + h64 * out_stride[1]
    store_rows(out_head, acc, row, left, out_stride[2], out_stride[3], M, E, EP)
    if again:  # after the store: acc and a count together would take more registers than the loops do
        for sign in tl.range(-1, 2, 2, num_stages=1):
            count = tl.zeros([M, EP], tl.float32)
            for r in tl.range(0, run_count(full, partial, table), num_stages=1):
                first, last, whole = run_at(full, partial, table, r, LEAD)
                count = count_values(
                    count, sign, q_pos, b, g, b + first_b, h + first_h, first, last, whole, v_head, v_stride, kv_len, kv_side,
                    mask_captured, mask_sizes, MASK, M, N, N_SUBS, E, EP, PRECISION, TMA,
                )  # fmt: skip
            add_nonfinite(out_head, count, sign, row, left, out_stride, M, E, EP)
