"""Attention over single chosen keys: one CTA per query and KV head, the query heads of a choice as the rows of its tile.

    forward     per N chosen keys: indices → K rows (gathered) → S = QKᵀ → P → V rows (gathered) → acc += PV
    backward    the same loop once: S, dP = dO Vᵀ, dS;  dQ += dS K;  dK[keys] += dSᵀ Q and dV[keys] += Pᵀ dO by atomic additions

Blocks smaller than a tile take this path: tiles of keys that neighbours in a sequence did not choose would be mostly masked. A
non-finite number in a token that no row sees reaches none: values are not loaded, nor keys in the backward pass, and forward scores are
masked. dK and dV are summed in float32 in arrival order: calls with deterministic algorithms take the path of general masks.

Legend: M rows, of which the first `rows` are query heads of one KV head; N keys per step; indices [B or 1, choices, rows, K].
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from longspan._kernels.gpu.device_library import LN_2, LOG2_E
from longspan._kernels.gpu.tile_access import wide

_DYNAMIC = ["heads", "shared", "q_len", "kv_len", "entries", "first_b", "first_h"]


@triton.jit(do_not_specialize=["rows", "words", "ctas"])
def unique_rows_kernel(indices_ptr, result_ptr, bits_ptr, rows, words, ctas, K: tl.constexpr, KP: tl.constexpr):
    """Copy rows of K indices with −1 in place of entries that repeat. bits_ptr: zeros, `words` words per CTA.

    Each entry sets its bit; an entry that finds its bit set repeats. Which of two equal entries comes second depends on timing, so a row
    with repeats is sorted: results have the same bits in every run.
    """
    pid = tl.program_id(0)
    bits = bits_ptr + wide(pid) * words
    j = tl.arange(0, KP)
    for row in tl.range(pid, rows, ctas, num_stages=1):
        at = wide(row) * K + j
        entry = tl.load(indices_ptr + at, mask=j < K, other=-1)
        chosen = (entry >= 0) & (entry < words * 32)
        bit = 1 << (entry & 31)
        old = tl.atomic_or(bits + entry // 32, bit, mask=chosen, sem="relaxed")
        repeats = tl.max((chosen & ((old & bit) != 0)).to(tl.int32), 0) > 0
        tl.debug_barrier()
        tl.store(bits + entry // 32, 0, mask=chosen)
        tl.store(result_ptr + at, entry, mask=j < K)
        if repeats:
            tl.debug_barrier()
            ordered = tl.sort(entry)
            tl.store(result_ptr + wide(row) * K + j - (KP - K), ordered, mask=j >= KP - K)
            tl.debug_barrier()
            before = tl.load(result_ptr + at - 1, mask=(j > 0) & (j < K), other=-1)
            again = tl.load(result_ptr + at, mask=j < K, other=-1)
            tl.debug_barrier()
            tl.store(result_ptr + at, tl.where(before == again, -1, again), mask=j < K)
        tl.debug_barrier()


@triton.jit
def place_query(indices, sizes, heads, shared, q_len, M: tl.constexpr, ROWS: tl.constexpr):
    """(batch row, KV head, query, heads [M], whether each row is a head, the query's row of indices) of this CTA.

    sizes: (batch, choices, rows, entries, queries per row, heads per choice) of the indices.
    """
    batch_rows, choices, rows, entries, per_row, per_choice = sizes
    pid = tl.program_id(0)
    q = pid % q_len
    first_head = (pid // q_len) % (heads // ROWS) * ROWS
    b = pid // (q_len * (heads // ROWS))
    i = tl.arange(0, M)
    choice = (first_head // per_choice) % choices
    row = ((b % batch_rows) * choices + choice) * rows + q // per_row
    return b, first_head // shared, q, first_head + i, i < ROWS, indices + wide(row) * entries


@triton.jit
def load_heads(ptr, stride, b, q, head, is_head, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[M, PADDED] rows of one query, one per head."""
    d = tl.arange(0, PADDED)
    at = ptr + wide(b) * stride[0] + wide(q) * stride[2] + wide(head)[:, None] * stride[1] + d[None, :] * stride[3]
    return tl.load(at, mask=is_head[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def store_heads(ptr, value, stride, b, q, head, is_head, DIM: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    at = ptr + wide(b) * stride[0] + wide(q) * stride[2] + wide(head)[:, None] * stride[1] + d[None, :] * stride[3]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=is_head[:, None] & (d < DIM)[None, :])


@triton.jit
def visible_keys(
    chosen, n, entries, b, head, q, kv_len, mask_captured, mask_sizes, MASK: tl.constexpr, GRANULARITY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(position of the first of N chosen keys, positions [N], whether they exist [N], whether each row sees each key [M, N]).

    The position of a key that does not exist is 0. first: of keys of one block, which are neighbours; otherwise 0.
    """
    if GRANULARITY % N == 0:
        entry = tl.load(chosen + n // GRANULARITY)
        first = tl.maximum(entry, 0) * GRANULARITY + n % GRANULARITY
        kv = first + tl.arange(0, N)
    else:
        first, j = 0, n + tl.arange(0, N)
        entry = tl.load(chosen + j // GRANULARITY, mask=j < entries * GRANULARITY, other=-1)
        kv = entry * GRANULARITY + j % GRANULARITY
    inside = (entry >= 0) & (kv < kv_len)
    kv = tl.where(inside, kv, 0)  # programs index captured tensors by kv: no negative or padded positions
    visible = inside[None, :] & (tl.arange(0, M)[:, None] < M)
    if MASK is not None:
        visible = visible & MASK(b, head[:, None], tl.zeros([1, 1], tl.int32) + q, kv[None, :], mask_captured, mask_sizes)
    return first, kv, inside, visible


@triton.jit
def rows_at(head, stride, first, kv, DIM: tl.constexpr, PADDED: tl.constexpr, GRANULARITY: tl.constexpr, N: tl.constexpr):
    """(pointers [N, PADDED] to rows at positions kv, whether each column exists [1, PADDED]). first: of `visible_keys`.

    Rows of one block have one base address, and offsets that no step changes.
    """
    d = tl.arange(0, PADDED)
    if GRANULARITY % N == 0:
        return (head + wide(first) * stride[2]) + (tl.arange(0, N)[:, None] * stride[2] + d[None, :] * stride[3]), (d < DIM)[None, :]
    else:
        return head + wide(kv)[:, None] * stride[2] + d[None, :] * stride[3], (d < DIM)[None, :]


@triton.jit(do_not_specialize=_DYNAMIC)
def gathered_forward_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, out_ptr, lse_ptr, old_out_ptr, old_lse_ptr,
    q_stride, k_stride, v_stride, out_stride, old_out_stride, mask_captured, mask_sizes, score_captured, score_sizes,
    selection, heads, shared, q_len, kv_len, scale, first_b, first_h,
    MASK: tl.constexpr, SCORE: tl.constexpr, GRANULARITY: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of one query in ROWS heads, merged into a previous state where there is one."""
    b, g, q_idx, head, is_head, chosen = place_query(indices_ptr, selection, heads, shared, q_len, M, ROWS)
    entries = selection[3]
    q = load_heads(q_ptr, q_stride, b, q_idx, head, is_head, D, DP)
    k_head = k_ptr + wide(b) * k_stride[0] + wide(g) * k_stride[1]
    v_head = v_ptr + wide(b) * v_stride[0] + wide(g) * v_stride[1]
    state_row = (wide(b) * heads + head) * q_len + q_idx
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    if old_lse_ptr is not None:
        m = tl.load(old_lse_ptr + state_row, mask=is_head, other=float("-inf")) * LOG2_E
        total = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = load_heads(old_out_ptr, old_out_stride, b, q_idx, head, is_head, E, EP).to(tl.float32)
    for n in tl.range(0, entries * GRANULARITY, N):
        first, kv, inside, visible = visible_keys(
            chosen, n, entries, b + first_b, head + first_h, q_idx, kv_len, mask_captured, mask_sizes, MASK, GRANULARITY, M, N
        )  # fmt: skip
        at, columns = rows_at(k_head, k_stride, first, kv, D, DP, GRANULARITY, N)
        k = tl.load(at, mask=inside[:, None] & columns, other=0.0)  # a NaN in a row that the query does not see is masked below
        s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        if SCORE is not None:
            at_q = tl.zeros([1, 1], tl.int32) + q_idx
            s = SCORE(s, b + first_b, (head + first_h)[:, None], at_q, kv[None, :], score_captured, score_sizes)
        s = tl.where(visible, s * LOG2_E, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, 1)
        seen = inside
        if MASK is not None:
            seen = tl.max(visible.to(tl.int32), 0) > 0
        at, columns = rows_at(v_head, v_stride, first, kv, E, EP, GRANULARITY, N)
        v = tl.load(at, mask=seen[:, None] & columns, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new
    sees = total != 0.0
    divisor = tl.where(sees, total, 1.0)
    tl.store(lse_ptr + state_row, tl.where(sees, m * LN_2 + tl.log(divisor), float("-inf")), mask=is_head)
    store_heads(out_ptr, acc / divisor[:, None], out_stride, b, q_idx, head, is_head, E, EP)


@triton.jit(do_not_specialize=_DYNAMIC)
def gathered_backward_kernel(
    q_ptr, k_ptr, v_ptr, indices_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_stride, k_stride, v_stride, do_stride, dq_stride, dk_stride, dv_stride,
    mask_captured, mask_sizes, score_captured, score_sizes,
    selection, heads, shared, q_len, kv_len, scale, first_b, first_h,
    MASK: tl.constexpr, SCORE: tl.constexpr, JOINT: tl.constexpr, GRANULARITY: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one query in ROWS heads; adds its part of dK and dV [float32]."""
    b, g, q_idx, head, is_head, chosen = place_query(indices_ptr, selection, heads, shared, q_len, M, ROWS)
    entries = selection[3]
    q = load_heads(q_ptr, q_stride, b, q_idx, head, is_head, D, DP)
    do = load_heads(do_ptr, do_stride, b, q_idx, head, is_head, E, EP)
    k_head = k_ptr + wide(b) * k_stride[0] + wide(g) * k_stride[1]
    v_head = v_ptr + wide(b) * v_stride[0] + wide(g) * v_stride[1]
    dk_head = dk_ptr + wide(b) * dk_stride[0] + wide(g) * dk_stride[1]
    dv_head = dv_ptr + wide(b) * dv_stride[0] + wide(g) * dv_stride[1]
    state_row = (wide(b) * heads + head) * q_len + q_idx
    lse = tl.load(lse_ptr + state_row, mask=is_head, other=float("-inf"))
    norm = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    delta = tl.load(delta_ptr + state_row, mask=is_head, other=0.0)
    dq = tl.zeros([M, DP], tl.float32)
    for n in tl.range(0, entries * GRANULARITY, N):
        first, kv, inside, visible = visible_keys(
            chosen, n, entries, b + first_b, head + first_h, q_idx, kv_len, mask_captured, mask_sizes, MASK, GRANULARITY, M, N
        )  # fmt: skip
        seen = inside
        if MASK is not None:
            seen = tl.max(visible.to(tl.int32), 0) > 0
        at, columns = rows_at(k_head, k_stride, first, kv, D, DP, GRANULARITY, N)
        k = tl.load(at, mask=seen[:, None] & columns, other=0.0)
        at, columns = rows_at(v_head, v_stride, first, kv, E, EP, GRANULARITY, N)
        v = tl.load(at, mask=seen[:, None] & columns, other=0.0)
        visible = visible & is_head[:, None]
        s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        dp = tl.dot(do, v.T, input_precision=PRECISION) - delta[:, None]
        if SCORE is None:
            p = tl.exp2(s * LOG2_E - norm[:, None])
            ds = p * dp
        else:
            at_h, at_q, at_kv = (head + first_h)[:, None], tl.zeros([1, 1], tl.int32) + q_idx, kv[None, :]
            p = tl.exp2(SCORE(s, b + first_b, at_h, at_q, at_kv, score_captured, score_sizes) * LOG2_E - norm[:, None])
            ds = JOINT(p * dp, s, b + first_b, at_h, at_q, at_kv, visible, score_captured, score_sizes, ())
        p = tl.where(visible, p, 0.0)
        ds = tl.where(visible, ds, 0.0).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        dk = tl.dot(ds.T, q, input_precision=PRECISION) * scale
        dv = tl.dot(p.to(do.dtype).T, do, input_precision=PRECISION)
        at, columns = rows_at(dk_head, dk_stride, first, kv, D, DP, GRANULARITY, N)
        tl.atomic_add(at, dk, mask=seen[:, None] & columns, sem="relaxed")
        at, columns = rows_at(dv_head, dv_stride, first, kv, E, EP, GRANULARITY, N)
        tl.atomic_add(at, dv, mask=seen[:, None] & columns, sem="relaxed")
    store_heads(dq_ptr, dq * scale, dq_stride, b, q_idx, head, is_head, D, DP)
