"""Merges of partial results of decoding: splits into groups, groups into rows, then the sink.

    merge_kernel     one CTA per (sequence, query, head, part of the head dim): merges the partial results of a row, then the sink

The merge is a launch of its own where CTAs are many: in the same launch, by the last CTA of a tile, every CTA waits until its stores are
visible to the others, which takes 5 to 10 % of the bandwidth (H200). Its CTAs start while the last CTAs of decode_kernel run (programmatic
dependent launch) and wait for their results. A launch of one wave merges its tiles itself (`merge_tile`).
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs, disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from longspan._kernels.gpu.decode_splits import group_tokens, lowest_key, query_count, sequence_range, split_tokens
from longspan._kernels.gpu.device_library import LN_2, LOG2_E
from longspan._kernels.gpu.tile_access import wide

_DYNAMIC = [
    "sequences", "kv_heads", "splits", "min_queries", "max_queries", "q_len", "kv_len", "first_key", "smallest", "coarse", "share", "group",
]  # fmt: skip


@triton.jit
def normalised(acc, total, m):
    """(out [X, E], base-2 log-sum-exp [X]) of sums acc [X, E], total [X] at max scores m [X]. A row that saw nothing: 0, −inf."""
    nothing = total == 0.0  # not where total is NaN: a row that sees a NaN has lse NaN
    divisor = tl.where(nothing, 1.0, total)
    return acc / divisor[:, None], tl.where(nothing, float("-inf"), m + tl.log2(divisor))


@triton.jit
def add_split(acc, total, m, out, lse):
    """(acc, total, m) after merging another split's out [X, E] and lse [X]: the same bits in all kernels, so no product may be fused but
    these.
    """
    m_new = tl.maximum(m, lse)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight, shrink = tl.exp2(lse - base), tl.exp2(m - base)
    out = tl.where(weight[:, None] == 0.0, 0.0, out * weight[:, None])  # 0 · inf would be NaN
    acc = tl.where(shrink[:, None] == 0.0, 0.0, acc)
    return tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), out), tl.fma(total, shrink, weight), m_new


@triton.jit
def add_sink(acc, total, m, sink_ptr, h):
    """(acc, total, m) of rows of heads h [X] after the sink, if there is one."""
    if sink_ptr is None:
        return acc, total, m
    else:
        logit = tl.load(sink_ptr + h).to(tl.float32) * LOG2_E
        m_new = tl.maximum(m, logit)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        shrink = tl.exp2(m - base)
        return acc * shrink[:, None], tl.fma(total, shrink, tl.exp2(logit - base)), m_new


@triton.jit
def final(acc, total, m):
    """As `normalised`, with a natural log-sum-exp."""
    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    return acc / divisor[:, None], tl.where(nothing, float("-inf"), tl.fma(m, tl.full(m.shape, LN_2, tl.float32), tl.log(divisor)))


@triton.jit
def load_groups(part_out_ptr, part_lse_ptr, at, groups, begin, end, joined, e, SPLITS: tl.constexpr, E: tl.constexpr, EARLY: tl.constexpr):
    """(out [S, PART], lse [S]) of groups [S] of `joined` ≤ SPLITS partial results each, of which begin … end − 1 exist."""
    outs, sums = (), ()
    for j in tl.static_range(SPLITS):
        s = groups * joined + j
        there = (s >= begin) & (s < end) & (j < joined)
        lse = tl.load(part_lse_ptr + at + s, mask=there, other=float("-inf"))
        x = tl.load(part_out_ptr + (at + s)[:, None] * E + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)
        outs, sums = outs + (x,), sums + (lse,)  # noqa: RUF005 (Triton does not unpack tuples)
    if SPLITS == 1:
        return outs[0], sums[0]
    else:
        if EARLY:  # else the assembler would load a split after it has merged the one before it
            tl.inline_asm_elementwise("fence.acq_rel.cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        acc, total = tl.zeros(outs[0].shape, tl.float32), tl.zeros(groups.shape, tl.float32)
        m = tl.full(groups.shape, float("-inf"), tl.float32)
        for j in tl.static_range(SPLITS):
            acc, total, m = add_split(acc, total, m, outs[j], sums[j])
        return normalised(acc, total, m)


@triton.jit
def merge_row(
    part_out_ptr, part_lse_ptr, sink_ptr, out_row, lse_at, out_step, at, begin, end, joined, h, part,
    S: tl.constexpr, SPLITS: tl.constexpr, E: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the partial results begin … end − 1 of a row, S groups of `joined` at a time, then the sink; store PART elements.

    `at`: index of the row's first partial result.
    """
    e = part * PART + tl.arange(0, PART)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, PART], tl.float32)
    for from_group in tl.range(begin // joined // S * S, tl.cdiv(end, joined), S):
        x, lse = load_groups(part_out_ptr, part_lse_ptr, at, from_group + tl.arange(0, S), begin, end, joined, e, SPLITS, E, EARLY)
        m_new = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight, shrink = tl.exp2(lse - base), tl.exp2(m - base)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(tl.where(weight[:, None] == 0.0, 0.0, x * weight[:, None]), 0)[None, :]  # 0 · inf would be NaN
        m = m_new
    acc, total, m = add_sink(acc, total, m, sink_ptr, h + tl.arange(0, 1))
    out, lse = final(acc, total, m)
    tl.store(out_row + e[None, :] * out_step, out.to(out_row.dtype.element_ty), mask=(e < E)[None, :])
    if part == 0:
        tl.store(lse_at + tl.arange(0, 1), lse)


@triton.jit
def merge_tile(
    part_out_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, at, out_row, lse_at, out_step, begin, end, joined, h, inside,
    SPLITS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the partial results begin … end − 1 of rows [X] with at most two groups of `joined`, then their sinks; store out and lse.

    The same bits as `merge_row`. at, out_row, lse_at [X]: indices of the rows' first partial results, and of their results.
    """
    e = tl.arange(0, EP)
    begins = tl.where(inside, begin, end)  # other rows have no partial results
    first, first_lse = load_groups(part_out_ptr, part_lse_ptr, at, at * 0, begins, end, joined, e, SPLITS, E, EARLY)
    second, second_lse = load_groups(part_out_ptr, part_lse_ptr, at, at * 0 + 1, begins, end, joined, e, SPLITS, E, EARLY)
    m = tl.maximum(first_lse, second_lse)
    base = tl.where(m == float("-inf"), 0.0, m)
    weight, second_weight = tl.exp2(first_lse - base), tl.exp2(second_lse - base)
    first = tl.where(weight[:, None] == 0.0, 0.0, first * weight[:, None])  # 0 · inf would be NaN
    second = tl.where(second_weight[:, None] == 0.0, 0.0, second * second_weight[:, None])
    acc, total, m = add_sink(first + second, weight + second_weight, m, sink_ptr, h)
    out, lse = final(acc, total, m)
    to = out_ptr + out_row[:, None] + e[None, :] * out_step
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (e < E)[None, :])
    tl.store(lse_ptr + lse_at, lse, mask=inside)


@triton.jit(do_not_specialize=_DYNAMIC)
def merge_kernel(
    part_out_ptr, part_lse_ptr, ranges_ptr, sink_ptr, out_ptr, lse_ptr, out_stride, lse_stride,
    sequences, kv_heads, splits, min_queries, max_queries, q_len, kv_len, first_key, smallest, coarse, share, group,
    WINDOW: tl.constexpr, RAGGED: tl.constexpr, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
    FEW: tl.constexpr, FEW_PART: tl.constexpr, MEDIUM: tl.constexpr, MEDIUM_GROUPS: tl.constexpr, MANY: tl.constexpr,
    MANY_PART: tl.constexpr, EARLY: tl.constexpr, GROUPED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A part of out, and lse, of one query of one head. PARTS: CTAs of a row.

    A row of at most FEW groups of splits is merged at once, FEW_PART elements per CTA. A row of at most MEDIUM_GROUPS ≥ FEW is merged
    MEDIUM groups at a time, FEW_PART elements per CTA; a row of more, MANY groups at a time, MANY_PART elements per CTA. MEDIUM and MANY
    are 0 if no sequence has so many groups. GROUPED: each partial result is of a group; else of a split, at most SPLITS per group, and the
    splits of a group are merged in turn, as `attend_keys` merges them.

    EARLY: launched while decode_kernel runs, whose results it waits for; decode_kernel does not write the ranges.
    """
    pid = tl.program_id(0)
    part = pid % PARTS
    rest = pid // PARTS
    h = rest % (kv_heads * R)
    rest = rest // (kv_heads * R)
    i = rest % max_queries
    n = rest // max_queries
    _, start, length, first = sequence_range(ranges_ptr, n, sequences, q_len, kv_len)
    count = query_count(ranges_ptr, start, length, q_len)
    if (i < count) & (count >= min_queries) & (count <= max_queries):
        tokens = split_tokens(length, smallest, coarse, share)
        # The window of the first query of this row's tile. Splits before it have no partial result.
        low = lowest_key(first_key, start, (i * R + h % R) // M * M // R, WINDOW, N)
        grouped = group_tokens(tokens, group)
        joined = 1 if GROUPED else grouped // tokens
        taken = grouped // joined
        begin, end = low // taken, tl.cdiv(length, taken)
        at = ((wide(n) * kv_heads * R + h) * max_queries + i) * splits
        n64 = wide(0) if RAGGED else wide(n)
        token = wide(first + i) if RAGGED else wide(i)
        out_row = out_ptr + n64 * out_stride[0] + wide(h) * out_stride[1] + token * out_stride[2]
        lse_at = lse_ptr + n64 * lse_stride[0] + h * lse_stride[1] + token * lse_stride[2]
        if EARLY:
            gdc_wait()
        groups = tl.cdiv(length, grouped)  # of the whole sequence: the order of a sum depends on nothing else
        if (groups <= FEW) & (part * FEW_PART < E):
            merge_row(
                part_out_ptr, part_lse_ptr, sink_ptr, out_row, lse_at, out_stride[3], at, begin, end, joined, h, part, FEW, SPLITS, E,
                FEW_PART, EARLY,
            )  # fmt: skip
        if MEDIUM:  # noqa: SIM102 (a compile-time condition)
            if (groups > FEW) & (groups <= MEDIUM_GROUPS) & (part * FEW_PART < E):
                merge_row(
                    part_out_ptr, part_lse_ptr, sink_ptr, out_row, lse_at, out_stride[3], at, begin, end, joined, h, part, MEDIUM,
                    SPLITS, E, FEW_PART, EARLY,
                )  # fmt: skip
        if MANY:  # noqa: SIM102 (a compile-time condition)
            if groups > MEDIUM_GROUPS:
                merge_row(
                    part_out_ptr, part_lse_ptr, sink_ptr, out_row, lse_at, out_stride[3], at, begin, end, joined, h, part, MANY, SPLITS,
                    E, MANY_PART, EARLY,
                )  # fmt: skip
