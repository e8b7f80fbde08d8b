"""The backward kernels. `dq_kernel` runs first: it leaves the two terms of each query row that `dkdv_kernel` reads.

    dq_kernel     one CTA per tile of M queries of one head      dkdv_kernel    one CTA per tile of N keys of one KV head
    ─────────     ────────────────────────────────────────      ───────────    ────────────────────────────────────────────────
    load once     q, dO, out, lse → norm, delta (stored)         load once      k, v
    per KV tile   S = QKᵀ, dP = dO Vᵀ, dS, dQ += dS K            per head of the group, per query tile:
                  captured gradients: atomic additions                          Sᵀ = KQᵀ, dPᵀ = V dOᵀ − delta, dV += Pᵀ dO, dK += dSᵀ Q
    epilogue      a NaN in dQ → once more, SAFE; store or add    epilogue       a NaN in dK or dV → once more, SAFE; store
    order         full runs, then partial runs of the block table, both through the software pipeline of `num_stages` tiles;
                  with LEAD the first partial runs precede the full runs (`launch.ascending_runs`)

For a score s = scale · q·k, t = program(s), p = exp(t − lse):  dt = p · (dO·v − delta),  ds = dt · ∂t/∂s,  dq = scale · Σ ds k.
Each gradient of q, k and v has one writer that adds in a fixed order.

Isolation: the mask selects s, dp, p and ds of each pair, but the products dS·K, Pᵀ·dO and dSᵀ·Q add 0 · x for masked pairs, which is NaN
if x is not finite. If an accumulator has a NaN, the CTA repeats its loop with non-finite x set to 0 and adds the non-finite terms of
visible pairs (`gpu.nonfinite_counts`). A visible non-finite q or k makes its score non-finite: ds is 0 or NaN, the gradient NaN.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.nonfinite_counts import add_nonfinite, any_nan, count_nonfinite, finite_or_zero
from longspan._kernels.gpu.row_terms import base_two, row_state
from longspan._kernels.gpu.tile_access import (
    add_rows,
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

_DYNAMIC = ["rows", "tiles", "heads", "kv_heads", "shared", "group", "q_len", "kv_len", "first_b", "first_h"]


@triton.jit
def visible_pairs(
    valid, whole, b, h, q_pos, kv_pos, mask_captured, mask_sizes, MASK: tl.constexpr, PARTIAL: tl.constexpr, SAFE: tl.constexpr
):  # fmt: skip
    """Pairs of a tile that exist (`valid`) and that the mask allows. SAFE: also all of a `whole` tile."""
    if PARTIAL and MASK is not None:
        allowed = MASK(b, h, q_pos, kv_pos, mask_captured, mask_sizes)
        valid = valid & ((allowed | whole) if SAFE else allowed)
    return valid


@triton.jit
def score_gradient(
    s, dp, norm, valid, b, h, q_pos, kv_pos, scale, score_captured, score_sizes, grads,
    SCORE: tl.constexpr, JOINT: tl.constexpr, PARTIAL: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """(p, ds) of one tile, given q·k and dO·v − delta. norm: lse as `base_two` gives it. Either orientation: norm, positions broadcast.

    SAFE: gradients of captured tensors were added before and are not added again.
    """
    if SCORE is None:
        t = s * (scale * LOG2_E)
    else:
        s = s * scale
        t = SCORE(s, b, h, q_pos, kv_pos, score_captured, score_sizes) * LOG2_E
    p = tl.exp2(t - norm)
    ds = p * dp
    if SCORE is not None:
        counted = tl.zeros_like(valid) if SAFE else valid
        ds = JOINT(ds, s, b, h, q_pos, kv_pos, counted, score_captured, score_sizes, grads)
    if PARTIAL:
        p = tl.where(valid, p, 0.0)
        ds = tl.where(valid, ds, 0.0)
    return p, ds


@triton.jit
def dkdv_step(
    dk, dv, k, v, kv_pos, b, h, at_b, at_h, first, last, whole, q_head, do_head, norm_base, delta_base, q_stride, do_stride, q_len, q_side,
    scale, mask_captured, mask_sizes, score_captured, score_sizes,
    MASK: tl.constexpr, SCORE: tl.constexpr, JOINT: tl.constexpr, PARTIAL: tl.constexpr, SAFE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Accumulate one run of query tiles into dk [N, DP] and dv [N, EP]. Tiles are keys × queries. SAFE: non-finite queries and output
    gradients count as 0 in the sums.
    """
    row_from, pos_from, left_from = run_place(first, last, q_len, q_side, SUBS, M)
    # norm and delta are prefetched by one step: a load here would delay the products. −delta is the initial value of dp's accumulator,
    # which takes fewer registers than subtracting it.
    begin, end = first * SUBS, (last + 1) * SUBS
    next_norm = row_state(norm_base, row_from + begin * M, left_from - begin * M, M, PARTIAL)
    next_delta = row_state(delta_base, row_from + begin * M, left_from - begin * M, M, PARTIAL)
    for n in tl.range(begin, end, num_stages=1 if SAFE else None):
        row, pos, left = row_from + n * M, pos_from + n * M, left_from - n * M
        q = load_tile(q_head, b, h, row, left, q_stride, M, D, DP, PARTIAL, TMA)
        norm, delta = next_norm, next_delta
        s = tl.dot(k, q.T, input_precision=PRECISION)
        do = load_tile(do_head, b, h, row, left, do_stride, M, E, EP, PARTIAL, TMA)
        dp = tl.dot(v, do.T, tl.zeros([N, M], tl.float32) - delta[None, :], input_precision=PRECISION)
        q_pos = (pos + tl.arange(0, M))[None, :]
        # Rows of this tile past the keys' end are garbage that is never stored; queries past the end must not count.
        valid = tl.arange(0, M)[None, :] < left
        valid = visible_pairs(valid, whole, at_b, at_h, q_pos, kv_pos, mask_captured, mask_sizes, MASK, PARTIAL, SAFE)
        p, ds = score_gradient(
            s, dp, norm[None, :], valid, at_b, at_h, q_pos, kv_pos, scale, score_captured, score_sizes, (), SCORE, JOINT, PARTIAL, SAFE
        )  # fmt: skip
        if SAFE:
            q, do = finite_or_zero(q), finite_or_zero(do)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        ahead = tl.minimum(n + 1, end - 1) * M
        next_norm = row_state(norm_base, row_from + ahead, left_from - ahead, M, PARTIAL)
        next_delta = row_state(delta_base, row_from + ahead, left_from - ahead, M, PARTIAL)
    return dk, dv


@triton.jit
def count_queries(
    count, sign, kv_pos, b, h, at_b, at_h, first, last, whole, x_head, x_stride, q_len, q_side, mask_captured, mask_sizes,
    MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """count [N, PADDED] plus the non-finite elements (`count_nonfinite`) of queries, or of their output gradients, that see each key."""
    row_from, pos_from, left_from = run_place(first, last, q_len, q_side, SUBS, M)
    for n in tl.range(first * SUBS, (last + 1) * SUBS, num_stages=1):
        row, pos, left = row_from + n * M, pos_from + n * M, left_from - n * M
        valid = (tl.arange(0, M)[None, :] < left) & (tl.arange(0, N)[:, None] < N)
        q_pos = (pos + tl.arange(0, M))[None, :]
        valid = visible_pairs(valid, whole, at_b, at_h, q_pos, kv_pos, mask_captured, mask_sizes, MASK, True, True)
        x = load_tile(x_head, b, h, row, left, x_stride, M, DIM, PADDED, True, TMA)
        count = count_nonfinite(count, valid, x, sign, PRECISION)
    return count


@triton.jit
def add_nonfinite_queries(
    target, target_stride, row, left, kv_pos, tile, b, g, x_ptr, x_stride, sign, full, partial, tiles, heads, shared, first_b, first_h,
    q_len, q_side, mask_captured, mask_sizes,
    MASK: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr, LEAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SUBS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add what non-finite elements of x (queries or output gradients) of visible pairs contribute to a stored dK or dV."""
    count = tl.zeros([N, PADDED], tl.float32)
    for j in tl.range(0, shared, num_stages=1):
        h = g * shared + j
        table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
        x_head = head_of(x_ptr, b, h, x_stride, TMA)
        for r in tl.range(0, run_count(full, partial, table), num_stages=1):
            first, last, whole = run_at(full, partial, table, r, LEAD)
            count = count_queries(
                count, sign, kv_pos, b, h, b + first_b, h + first_h, first, last, whole, x_head, x_stride, q_len, q_side,
                mask_captured, mask_sizes, MASK, M, N, SUBS, DIM, PADDED, PRECISION, TMA,
            )  # fmt: skip
    add_nonfinite(target, count, sign, row, left, target_stride, N, DIM, PADDED)


@triton.jit(do_not_specialize=_DYNAMIC)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, norm_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_stride, k_stride, v_stride, do_stride, dk_stride, dv_stride,
    order, full, partial, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes,
    rows, tiles, heads, kv_heads, shared, group, q_len, kv_len, scale, first_b, first_h,
    MASK: tl.constexpr, SCORE: tl.constexpr, JOINT: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr,
    LEAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, M_SUBS: tl.constexpr, N_SUBS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over the query heads of its KV head and the query tiles that see it.

    norm and delta [B, H, Q]: as `dq_kernel` stored them.
    """
    tile, sub, b, g = locate(order, rows, tiles, kv_heads, group, N_SUBS, PER_BATCH, PER_HEAD)
    b64, g64 = wide(b), wide(g)
    row, pos, left = span(tile * N_SUBS + sub, kv_len, kv_side, N_SUBS, N)
    k = load_rows(k_ptr + b64 * k_stride[0] + g64 * k_stride[1], row, left, k_stride[2], k_stride[3], N, D, DP, True)
    v = load_rows(v_ptr + b64 * v_stride[0] + g64 * v_stride[1], row, left, v_stride[2], v_stride[3], N, E, EP, True)
    kv_pos = (pos + tl.arange(0, N))[:, None]
    inside = tl.arange(0, N) < left
    dk = tl.zeros([N, DP], tl.float32)
    dv = tl.zeros([N, EP], tl.float32)
    for j in tl.range(0, shared, num_stages=1):
        h = g * shared + j
        table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
        q_head, do_head = head_of(q_ptr, b, h, q_stride, TMA), head_of(do_ptr, b, h, do_stride, TMA)
        state = (b64 * heads + wide(h)) * q_len
        tail = tl.load(partial[0] + 2 * table) + lead_runs(partial, table, LEAD)
        if LEAD:
            for r in tl.range(tl.load(partial[0] + 2 * table), tail, num_stages=1):
                dk, dv = dkdv_step(
                    dk, dv, k, v, kv_pos, b, h, b + first_b, h + first_h, tl.load(partial[1] + r), tl.load(partial[2] + r), False,
                    q_head, do_head, norm_ptr + state, delta_ptr + state, q_stride, do_stride, q_len, q_side, scale,
                    mask_captured, mask_sizes, score_captured, score_sizes,
                    MASK, SCORE, JOINT, True, False, M, N, M_SUBS, D, DP, E, EP, PRECISION, TMA,
                )  # fmt: skip
        for r in tl.range(tl.load(full[0] + 2 * table), tl.load(full[0] + 2 * table + 1), num_stages=1):
            dk, dv = dkdv_step(
                dk, dv, k, v, kv_pos, b, h, b + first_b, h + first_h, tl.load(full[1] + r), tl.load(full[2] + r), True,
                q_head, do_head, norm_ptr + state, delta_ptr + state, q_stride, do_stride, q_len, q_side, scale,
                mask_captured, mask_sizes, score_captured, score_sizes,
                MASK, SCORE, JOINT, False, False, M, N, M_SUBS, D, DP, E, EP, PRECISION, TMA,
            )  # fmt: skip
        for r in tl.range(tail, tl.load(partial[0] + 2 * table + 1), num_stages=1):
            dk, dv = dkdv_step(
                dk, dv, k, v, kv_pos, b, h, b + first_b, h + first_h, tl.load(partial[1] + r), tl.load(partial[2] + r), False,
                q_head, do_head, norm_ptr + state, delta_ptr + state, q_stride, do_stride, q_len, q_side, scale,
                mask_captured, mask_sizes, score_captured, score_sizes,
                MASK, SCORE, JOINT, True, False, M, N, M_SUBS, D, DP, E, EP, PRECISION, TMA,
            )  # fmt: skip
    again = any_nan(dk, inside) | any_nan(dv, inside)
    if again:
        dk = tl.zeros([N, DP], tl.float32)
        dv = tl.zeros([N, EP], tl.float32)
        for j in tl.range(0, shared, num_stages=1):
            h = g * shared + j
            table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
            q_head, do_head = head_of(q_ptr, b, h, q_stride, TMA), head_of(do_ptr, b, h, do_stride, TMA)
            state = (b64 * heads + wide(h)) * q_len
            for r in tl.range(0, run_count(full, partial, table), num_stages=1):
                first, last, whole = run_at(full, partial, table, r, LEAD)
                dk, dv = dkdv_step(
                    dk, dv, k, v, kv_pos, b, h, b + first_b, h + first_h, first, last, whole,
                    q_head, do_head, norm_ptr + state, delta_ptr + state, q_stride, do_stride, q_len, q_side, scale,
                    mask_captured, mask_sizes, score_captured, score_sizes,
                    MASK, SCORE, JOINT, True, True, M, N, M_SUBS, D, DP, E, EP, PRECISION, TMA,
                )  # fmt: skip
    dk_head = dk_ptr + b64 * dk_stride[0] + g64 * dk_stride[1]
    dv_head = dv_ptr + b64 * dv_stride[0] + g64 * dv_stride[1]
    store_rows(dk_head, dk * scale, row, left, dk_stride[2], dk_stride[3], N, D, DP)
    store_rows(dv_head, dv, row, left, dv_stride[2], dv_stride[3], N, E, EP)
    if again:
        add_nonfinite_queries(
            dk_head, dk_stride, row, left, kv_pos, tile, b, g, q_ptr, q_stride, 0, full, partial, tiles, heads, shared, first_b, first_h,
            q_len, q_side, mask_captured, mask_sizes, MASK, PER_BATCH, PER_HEAD, LEAD, M, N, M_SUBS, D, DP, PRECISION, TMA,
        )  # fmt: skip
        for sign in tl.range(-1, 2, 2, num_stages=1):
            add_nonfinite_queries(
                dv_head, dv_stride, row, left, kv_pos, tile, b, g, do_ptr, do_stride, sign, full, partial, tiles, heads, shared, first_b,
                first_h, q_len, q_side, mask_captured, mask_sizes,
                MASK, PER_BATCH, PER_HEAD, LEAD, M, N, M_SUBS, E, EP, PRECISION, TMA,
            )  # fmt: skip


@triton.jit
def dq_step(
    dq, q, do, norm, delta, q_pos, q_left, b, g, at_b, at_h, first, last, whole, k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
    mask_captured, mask_sizes, score_captured, score_sizes, grads,
    MASK: tl.constexpr, SCORE: tl.constexpr, JOINT: tl.constexpr, PARTIAL: tl.constexpr, SAFE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Accumulate one run of KV tiles into dq [M, DP]. SAFE: non-finite keys count as 0 in the sum."""
    row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, SUBS, N)
    for n in tl.range(first * SUBS, (last + 1) * SUBS, num_stages=1 if SAFE else None):
        row, pos, left = row_from + n * N, pos_from + n * N, left_from - n * N
        k = load_tile(k_head, b, g, row, left, k_stride, N, D, DP, PARTIAL, TMA)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        v = load_tile(v_head, b, g, row, left, v_stride, N, E, EP, PARTIAL, TMA)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        kv_pos = (pos + tl.arange(0, N))[None, :]
        valid = (tl.arange(0, N)[None, :] < left) & (tl.arange(0, M)[:, None] < q_left)
        valid = visible_pairs(valid, whole, at_b, at_h, q_pos, kv_pos, mask_captured, mask_sizes, MASK, PARTIAL, SAFE)
        _, ds = score_gradient(
            s, dp - delta[:, None], norm[:, None], valid, at_b, at_h, q_pos, kv_pos, scale, score_captured, score_sizes, grads,
            SCORE, JOINT, PARTIAL, SAFE,
        )  # fmt: skip
        if SAFE:
            k = finite_or_zero(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def count_keys(
    count, q_pos, q_left, b, g, at_b, at_h, first, last, whole, k_head, k_stride, kv_len, kv_side, mask_captured, mask_sizes,
    MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """count [M, DP] plus the non-finite elements of keys that each row sees in one run of KV tiles."""
    row_from, pos_from, left_from = run_place(first, last, kv_len, kv_side, SUBS, N)
    for n in tl.range(first * SUBS, (last + 1) * SUBS, num_stages=1):
        row, pos, left = row_from + n * N, pos_from + n * N, left_from - n * N
        valid = (tl.arange(0, N)[None, :] < left) & (tl.arange(0, M)[:, None] < q_left)
        kv_pos = (pos + tl.arange(0, N))[None, :]
        valid = visible_pairs(valid, whole, at_b, at_h, q_pos, kv_pos, mask_captured, mask_sizes, MASK, True, True)
        k = load_tile(k_head, b, g, row, left, k_stride, N, D, DP, True, TMA)
        count = count_nonfinite(count, valid, k, 0, PRECISION)
    return count


@triton.jit(do_not_specialize=_DYNAMIC)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, norm_ptr, delta_ptr, dq_ptr, out_ptr, grad_lse_ptr,
    q_stride, k_stride, v_stride, do_stride, dq_stride, out_stride,
    order, full, partial, q_side, kv_side, mask_captured, mask_sizes, score_captured, score_sizes, grads,
    rows, tiles, heads, shared, group, q_len, kv_len, scale, first_b, first_h,
    MASK: tl.constexpr, SCORE: tl.constexpr, JOINT: tl.constexpr, ADD: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr,
    LEAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, M_SUBS: tl.constexpr, N_SUBS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, stored or, with ADD, added to dq_ptr. JOINT adds the gradients of captured tensors to `grads`.

    Given out_ptr, delta is computed here, where out and dO are loaded anyway, and stored. norm is always stored.
    """
    tile, sub, b, h = locate(order, rows, tiles, heads, group, M_SUBS, PER_BATCH, PER_HEAD)
    table = table_row(tile, b, h, tiles, heads, PER_BATCH, PER_HEAD)
    g, b64, h64 = h // shared, wide(b), wide(h)
    row, pos, left = span(tile * M_SUBS + sub, q_len, q_side, M_SUBS, M)
    q = load_rows(q_ptr + b64 * q_stride[0] + h64 * q_stride[1], row, left, q_stride[2], q_stride[3], M, D, DP, True)
    do = load_rows(do_ptr + b64 * do_stride[0] + h64 * do_stride[1], row, left, do_stride[2], do_stride[3], M, E, EP, True)
    state = (b64 * heads + h64) * q_len
    i = tl.arange(0, M)
    norm = base_two(row_state(lse_ptr + state, row, left, M, True))
    tl.store(norm_ptr + state + row + i, norm, mask=i < left)
    if out_ptr is None:
        delta = row_state(delta_ptr + state, row, left, M, True)
    else:
        out = load_rows(out_ptr + b64 * out_stride[0] + h64 * out_stride[1], row, left, out_stride[2], out_stride[3], M, E, EP, True)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        if grad_lse_ptr is not None:
            delta -= row_state(grad_lse_ptr + state, row, left, M, True)
        tl.store(delta_ptr + state + row + i, delta, mask=i < left)
    k_head, v_head = head_of(k_ptr, b, g, k_stride, TMA), head_of(v_ptr, b, g, v_stride, TMA)
    q_pos = (pos + tl.arange(0, M))[:, None]
    dq = tl.zeros([M, DP], tl.float32)
    tail = tl.load(partial[0] + 2 * table) + lead_runs(partial, table, LEAD)
    if LEAD:
        for r in tl.range(tl.load(partial[0] + 2 * table), tail, num_stages=1):
            dq = dq_step(
                dq, q, do, norm, delta, q_pos, left, b, g, b + first_b, h + first_h,
                tl.load(partial[1] + r), tl.load(partial[2] + r), False,
                k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
                mask_captured, mask_sizes, score_captured, score_sizes, grads,
                MASK, SCORE, JOINT, True, False, M, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
            )  # fmt: skip
    for r in tl.range(tl.load(full[0] + 2 * table), tl.load(full[0] + 2 * table + 1), num_stages=1):
        dq = dq_step(
            dq, q, do, norm, delta, q_pos, left, b, g, b + first_b, h + first_h, tl.load(full[1] + r), tl.load(full[2] + r), True,
            k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
            mask_captured, mask_sizes, score_captured, score_sizes, grads,
            MASK, SCORE, JOINT, False, False, M, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
        )  # fmt: skip
    for r in tl.range(tail, tl.load(partial[0] + 2 * table + 1), num_stages=1):
        dq = dq_step(
            dq, q, do, norm, delta, q_pos, left, b, g, b + first_b, h + first_h, tl.load(partial[1] + r), tl.load(partial[2] + r), False,
            k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
            mask_captured, mask_sizes, score_captured, score_sizes, grads,
            MASK, SCORE, JOINT, True, False, M, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
        )  # fmt: skip
    again = any_nan(dq, i < left)
    if again:
        dq = tl.zeros([M, DP], tl.float32)
        for r in tl.range(0, run_count(full, partial, table), num_stages=1):
            first, last, whole = run_at(full, partial, table, r, LEAD)
            dq = dq_step(
                dq, q, do, norm, delta, q_pos, left, b, g, b + first_b, h + first_h, first, last, whole,
                k_head, v_head, k_stride, v_stride, kv_len, kv_side, scale,
                mask_captured, mask_sizes, score_captured, score_sizes, grads,
                MASK, SCORE, JOINT, True, True, M, N, N_SUBS, D, DP, E, EP, PRECISION, TMA,
            )  # fmt: skip
    dq_head = dq_ptr + b64 * dq_stride[0] + h64 * dq_stride[1]
    if ADD:
        add_rows(dq_head, dq * scale, row, left, dq_stride[2], dq_stride[3], M, D, DP)
    else:
        store_rows(dq_head, dq * scale, row, left, dq_stride[2], dq_stride[3], M, D, DP)
    if again:
        count = tl.zeros([M, DP], tl.float32)
        for r in tl.range(0, run_count(full, partial, table), num_stages=1):
            first, last, whole = run_at(full, partial, table, r, LEAD)
            count = count_keys(
                count, q_pos, left, b, g, b + first_b, h + first_h, first, last, whole, k_head, k_stride, kv_len, kv_side,
                mask_captured, mask_sizes, MASK, M, N, N_SUBS, D, DP, PRECISION, TMA,
            )  # fmt: skip
        add_nonfinite(dq_head, count, 0, row, left, dq_stride, M, D, DP)
