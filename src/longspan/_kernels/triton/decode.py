"""The decode kernels: few queries over many keys, contiguous or in pages. Forward only.

    decode_kernel    one CTA per (sequence, KV head, tile of M query rows, split of the keys)
    ─────────────    writes the new tokens of its split into their pages, if they are given
                     q: the query heads of a KV head are rows of one tile, so that KV is read once: row r is query r // R, head r % R
                     S = QKᵀ, mask, P, acc += PV over tiles of N keys, through the software pipeline of `num_stages` tiles
                     stores a partial out and its base-2 log-sum-exp
                     latent KV (MLA): a tile of keys in shared memory holds its values; M = 16, or 64 by wgmma; TMA loads tiles in one page
    merge_kernel     of `triton.decode_merge`: merges the partial results of a row; a launch of one wave does so itself, by the last CTA of
                     each tile

If there are enough sequences, a CTA computes a group of up to eight splits, which it merges in registers as merge_kernel does, to the same
bits; a CTA that has all keys of a sequence stores results (`split_rule`).

Splits are ranges of positions [i · C, (i + 1) · C) of a sequence, where C depends on the sequence's length and the number of KV heads
(`split_tokens`), and M on the sequence's number of queries. So a row's bits depend neither on the batch nor on pages.
Shapes as in `longspan._kernels.paged`; R = H / G. Numerics and isolation as in `triton.forward`.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longspan._kernels.gpu.decode_splits import group_tokens, lowest_key, split_of_cta
from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.nonfinite_counts import any_nan, count_nonfinite, finite_or_zero
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.triton.decode_merge import add_sink, add_split, final, merge_tile, normalised
from longspan._kernels.triton.fp8 import from_pages, in_pages, values_from_pages, values_sum

_DYNAMIC = [
    "sequences",
    "kv_heads",
    "row_tiles",
    "splits",
    "min_queries",
    "max_queries",
    "width",
    "q_len",
    "kv_len",
    "first_key",
    "smallest",
    "coarse",
    "share",
    "group",
    "new_len",
]
SCALAR_PAGES = tl.constexpr(4)  # pages of a tile whose numbers are loaded as scalars
WRITTEN = tl.constexpr(16)  # new tokens that a CTA writes at once


@triton.jit
def load_page(table_ptr, table_row, at, kv, end, PAGE: tl.constexpr, N: tl.constexpr):
    """The page of each key kv [N] from `at` on, 0 without pages: one number if the tile is in one page, else [N]. `end`: of `attend_keys`.

    A tile in few pages loads their numbers as scalars: one load of a page's number instead of one per key.
    """
    if PAGE == 0:
        return wide(0)
    elif PAGE % N == 0:
        return wide(tl.load(table_ptr + table_row + at // PAGE))
    elif N % PAGE == 0 and N <= SCALAR_PAGES * PAGE:
        index = tl.arange(0, N) // PAGE
        page = tl.load(table_ptr + table_row + at // PAGE)
        for j in tl.static_range(1, N // PAGE):
            page = tl.where(index == j, tl.load(table_ptr + table_row + tl.minimum(at + j * PAGE, end - 1) // PAGE), page)
        return wide(page)
    else:
        return wide(tl.load(table_ptr + table_row + kv // PAGE, mask=kv < end, other=0))


@triton.jit
def key_rows(base, page, kv, stride, PAGE: tl.constexpr):
    """Pointers [N] to the rows of keys kv [N] of one KV head."""
    if PAGE == 0:
        return base + wide(kv) * stride[2]
    else:
        return base + page * stride[0] + wide(kv % PAGE) * stride[2]


@triton.jit
def visible_keys(n, h, q_pos, kv, end, length, mask_captured, mask_sizes, MASK: tl.constexpr):
    """Which keys kv [N] before `end` each row sees, [M, N] or [1, N]."""
    seen = (kv < end)[None, :]
    if MASK is not None:
        seen = seen & MASK(n, h, q_pos, tl.minimum(kv, length - 1)[None, :], mask_captured, mask_sizes)
    return seen


@triton.jit
def look_up(n, h, q_pos, kv, length, captured, sizes, LOOKUPS: tl.constexpr):
    """The captured tensors, or the elements for keys kv [N] that LOOKUPS reads of them (`gpu.hoisted_lookups`)."""
    if LOOKUPS is None:
        return captured
    else:
        return LOOKUPS(n, h, q_pos, tl.minimum(kv, length - 1)[None, :], captured, sizes)


@triton.jit
def load_described(desc, page, n, g, at, column, PAGE: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr):
    """Elements column … column + DIM − 1 of the N keys from `at` on, by TMA: [N, DIM]. The keys are in one page, or PAGE is 0.

    Past the last key of a sequence come other rows of its page; past the last row of the tensor, zeros.
    """
    if PAGE == 0:
        return desc.load([n, g, at, column]).reshape(N, DIM)
    else:
        return desc.load([page.to(tl.int32), g, at % PAGE, column]).reshape(N, DIM)


@triton.jit
def write_new(
    new_ptr, new_stride, base, stride, g, first, start, begin, end, new_len, table_row, table_ptr,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIMP: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Write the new tokens at positions begin … end − 1 of one KV head into their pages: DIM elements each. `first`: index of the token at
    `start` among all new tokens. `new_len`: tokens of one batch row of the new tokens.
    """
    d = tl.arange(0, DIMP)
    for at in tl.range(begin, end, WRITTEN, num_stages=1):
        kv = at + tl.arange(0, WRITTEN)
        valid = kv < end
        inside = valid[:, None] & (d < DIM)[None, :]
        t = first + kv - start
        from_rows = new_ptr + wide(t // new_len) * new_stride[0] + wide(g) * new_stride[1] + wide(t % new_len) * new_stride[2]
        x = tl.load(from_rows[:, None] + d[None, :] * new_stride[3], mask=inside)
        page = wide(tl.load(table_ptr + table_row + kv // PAGE, mask=valid, other=0))
        tl.store(key_rows(base, page, kv, stride, PAGE)[:, None] + d[None, :], in_pages(x, SCALE), mask=inside)


@triton.jit
def publish_stores(TMA: tl.constexpr):
    """Make global stores of all threads of this CTA visible to its later loads. TMA: to loads by TMA too."""
    if TMA:
        tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def attend_keys(
    q, q_rest, n, g, h, q_pos, begin, end, length, k_desc, rest_desc, k_base, v_base, k_stride, v_stride, value_dim, table_row, table_ptr,
    scale, mask_captured, mask_sizes, score_captured, score_sizes, tokens,
    MASK: tl.constexpr, SCORE: tl.constexpr, PAGE: tl.constexpr, FOLD: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, REST: tl.constexpr, RESTP: tl.constexpr,
    SHARED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, GROUPED: tl.constexpr, SCORE_LOOKUPS: tl.constexpr,
    MASK_LOOKUPS: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    """(acc, total, m) of q [M, DP] over the keys begin … end − 1, as in `triton.forward`. SAFE: non-finite values count as 0. GROUPED: the
    keys are splits of `tokens` keys, whose results are merged one after the other.

    REST: keys have REST elements more than D, whose queries are q_rest [M, RESTP]. SHARED: values are the first D elements of keys, and a
    tile in shared memory is both. TMA: keys come from the descriptors `k_desc` and `rest_desc`. SCORE_LOOKUPS, MASK_LOOKUPS: of
    `decode_kernel`; those of a tile are made one step before, so that the rest of that step and the wait for keys hide their latency.
    V_SCALE: of FP8 values, or None; `scale` includes that of keys.
    """
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    if GROUPED:
        group_m, group_total, group_acc = m, total, acc
    d, e = tl.arange(0, DP), tl.arange(0, EP)
    kv = begin + tl.arange(0, N)
    score_read = look_up(n, h, q_pos, kv, length, score_captured, score_sizes, SCORE_LOOKUPS)
    mask_read = look_up(n, h, q_pos, kv, length, mask_captured, mask_sizes, MASK_LOOKUPS)
    for at in tl.range(begin, end, N, num_stages=1 if SAFE else None):
        kv = at + tl.arange(0, N)
        valid = kv < end
        page = load_page(table_ptr, table_row, at, kv, end, PAGE, N)
        k_rows, v_rows = key_rows(k_base, page, kv, k_stride, PAGE), key_rows(v_base, page, kv, v_stride, PAGE)
        if TMA:
            k = load_described(k_desc, page, n, g, at, 0, PAGE, N, DP)
        else:
            k = tl.load(k_rows[:, None] + d[None, :] * k_stride[3], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        s = tl.dot(q, from_pages(k, V_SCALE, q.dtype).T, input_precision=PRECISION)
        if REST:
            if TMA:
                k_rest = load_described(rest_desc, page, n, g, at, D, PAGE, N, RESTP)
            else:
                dr = tl.arange(0, RESTP)
                k_rest = tl.load(k_rows[:, None] + (D + dr)[None, :] * k_stride[3], mask=valid[:, None] & (dr < REST)[None, :], other=0.0)
            s = tl.dot(q_rest, k_rest.T, s, input_precision=PRECISION)
        if not FOLD:
            s *= scale
        if SCORE is not None:
            s = SCORE(s, n, h, q_pos, tl.minimum(kv, length - 1)[None, :], score_read, score_sizes)
            if SCORE_LOOKUPS is not None:
                score_read = look_up(n, h, q_pos, kv + N, length, score_captured, score_sizes, SCORE_LOOKUPS)
        s = tl.where(visible_keys(n, h, q_pos, kv, end, length, mask_read, mask_sizes, MASK), s, float("-inf"))
        if MASK_LOOKUPS is not None:
            mask_read = look_up(n, h, q_pos, kv + N, length, mask_captured, mask_sizes, MASK_LOOKUPS)
        factor = scale * LOG2_E if FOLD else LOG2_E
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: −inf − −inf would be NaN
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(p, 1)
        if SHARED and not SAFE:
            v = k
        else:
            v = tl.load(v_rows[:, None] + e[None, :] * v_stride[3], mask=valid[:, None] & (e < value_dim)[None, :], other=0.0)
        v = values_from_pages(v, V_SCALE, q.dtype)
        if SAFE:
            v = finite_or_zero(v)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new
        if GROUPED:  # noqa: SIM102 (a compile-time condition)
            if ((at + N) & (tokens - 1) == 0) | (at + N >= end):  # tokens: a power of two
                out, lse = normalised(values_sum(acc, V_SCALE), total, m)
                group_acc, group_total, group_m = add_split(group_acc, group_total, group_m, out, lse)
                m = tl.full([M], float("-inf"), tl.float32)
                total = tl.zeros([M], tl.float32)
                acc = tl.zeros([M, EP], tl.float32)
    if GROUPED:
        return group_acc, group_total, group_m
    else:
        return values_sum(acc, V_SCALE), total, m


@triton.jit
def count_values(
    sign, n, h, q_pos, begin, end, length, v_base, v_stride, value_dim, table_row, table_ptr, mask_captured, mask_sizes,
    MASK: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr,
    MASK_LOOKUPS: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    """Number of visible values [M, EP] that are sign · inf or NaN (`count_nonfinite`)."""
    count = tl.zeros([M, EP], tl.float32)
    e = tl.arange(0, EP)
    for at in tl.range(begin, end, N, num_stages=1):
        kv = at + tl.arange(0, N)
        valid = kv < end
        v_rows = key_rows(v_base, load_page(table_ptr, table_row, at, kv, end, PAGE, N), kv, v_stride, PAGE)
        v = tl.load(v_rows[:, None] + e[None, :] * v_stride[3], mask=valid[:, None] & (e < value_dim)[None, :], other=0.0)
        v = from_pages(v, V_SCALE, tl.bfloat16)
        mask_read = look_up(n, h, q_pos, kv, length, mask_captured, mask_sizes, MASK_LOOKUPS)
        seen = visible_keys(n, h, q_pos, kv, end, length, mask_read, mask_sizes, MASK) & (tl.arange(0, M)[:, None] < M)
        count = count_nonfinite(count, seen, v, sign, PRECISION)
    return count


@triton.jit
def store_result(
    out_ptr, lse_ptr, sink_ptr, acc, total, m, out_row, lse_at, out_step, h, column, inside,
    E: tl.constexpr, EP: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Store columns column … column + EP − 1 of rows: partial results, or with DIRECT, the rows' only ones with their sinks, the results.

    out_row, lse_at [M]: elements of out and lse. `out_step`: from one column to the next.
    """
    out, lse = normalised(acc, total, m)
    e = column + tl.arange(0, EP)
    if DIRECT:
        base = tl.where(lse == float("-inf"), 0.0, lse)
        total = tl.exp2(lse - base)
        out, total, m = add_sink(out, total, lse, sink_ptr, h)
        out, lse = final(out, total, m)
    tl.store(lse_ptr + lse_at, lse, mask=inside)
    at = out_ptr + out_row[:, None] + e[None, :] * out_step
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (e < E)[None, :])


@triton.jit
def result_rows(n, first, i, head, out_stride, lse_stride, RAGGED: tl.constexpr):
    """The indices of elements of out and lse of query i and head `head` [M] of sequence n."""
    n64 = wide(0) if RAGGED else wide(n)
    token = wide(first + i) if RAGGED else wide(i)
    out_row = n64 * out_stride[0] + wide(head) * out_stride[1] + token * out_stride[2]
    return out_row, n64 * lse_stride[0] + wide(head) * lse_stride[1] + token * lse_stride[2]


@triton.jit
def is_last(counter_ptr, partial_results):
    """Whether this CTA is the last one of a tile to store its partial result. The partial results of the others are then visible, and the
    counter is 0 again.
    """
    tl.debug_barrier()  # the stores of all threads precede the addition
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == partial_results - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit(do_not_specialize=_DYNAMIC)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, rest_desc, table_ptr, ranges_ptr, k_new_ptr, v_new_ptr, part_out_ptr, part_lse_ptr, flags_ptr,
    sink_ptr, out_ptr, lse_ptr, counters_ptr, q_stride, k_stride, v_stride, k_new_stride, v_new_stride, out_stride, lse_stride,
    mask_captured, mask_sizes, score_captured, score_sizes,
    sequences, kv_heads, row_tiles, splits, min_queries, max_queries, width, q_len, kv_len, first_key, smallest, coarse, share, group,
    new_len, scale,
    MASK: tl.constexpr, SCORE: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, REST: tl.constexpr, RESTP: tl.constexpr,
    SAFE_DIM: tl.constexpr, SHARED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    GROUPED: tl.constexpr, DIRECT: tl.constexpr, SCORE_LOOKUPS: tl.constexpr, MASK_LOOKUPS: tl.constexpr, SPLITS: tl.constexpr,
    MERGED_ROWS: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    """A partial out [M, E] and log-sum-exp [M] of one split, or of a group of splits if GROUPED. DIRECT: sequences have one each, and
    part_out_ptr and part_lse_ptr are those of the results, with sinks.

    MERGED_ROWS: not 0 if the last CTA of a tile merges its partial results, of at most two groups of SPLITS splits, into out_ptr and
    lse_ptr; the number of rows of the largest tile, rounded up to a power of two. counters_ptr: a zero for each tile, before and after.
    Otherwise out_ptr, lse_ptr and counters_ptr are None, and so is sink_ptr unless DIRECT.

    WINDOW: keys before q − WINDOW + 1 are hidden; None: no window. k_new_ptr, v_new_ptr: new tokens, which every CTA writes that reads
    them; None: they were written before. EARLY: merge_kernel starts while this kernel runs. flags_ptr: int32 [CTAs, 2]; splits with a flag
    that is not 0 are computed (`gpu.split_kernel`); None: all are. SCORE_LOOKUPS, MASK_LOOKUPS: the functions that make what SCORE and
    MASK read of captured tensors (`gpu.hoisted_lookups`), or None: these read the tensors. K_SCALE, V_SCALE: of keys and values that pages
    hold in FP8, or None for both; `scale` includes K_SCALE.
    """
    if EARLY and not MERGED_ROWS:
        gdc_launch_dependents()
    g, tile, split, n, row, start, length, first, count, begin, end, tokens = split_of_cta(
        ranges_ptr, sequences, kv_heads, row_tiles, splits, min_queries, max_queries, q_len, kv_len, first_key, smallest, coarse, share,
        group if GROUPED else 0, WINDOW, R, M, N,
    )  # fmt: skip
    if flags_ptr is not None:
        if EARLY:
            gdc_wait()
        flags = flags_ptr + 2 * tl.program_id(0)
        end = tl.where((tl.load(flags) | tl.load(flags + 1)) != 0, end, begin)
    if begin < end:
        r = tile * M + tl.arange(0, M)
        i = r // R
        inside = i < count
        head = g * R + r % R
        h, q_pos = head[:, None], (start + i)[:, None]
        d = tl.arange(0, DP)
        q_base = q_ptr + (wide(first) * q_stride[2] if RAGGED else wide(n) * q_stride[0])
        q_at = q_base + wide(h) * q_stride[1] + wide(i)[:, None] * q_stride[2] + d[None, :] * q_stride[3]
        q = tl.load(q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        q_rest = q
        if REST:
            d_rest = tl.arange(0, RESTP)
            rest_at = q_base + wide(h) * q_stride[1] + wide(i)[:, None] * q_stride[2] + (D + d_rest)[None, :] * q_stride[3]
            q_rest = tl.load(rest_at, mask=inside[:, None] & (d_rest < REST)[None, :], other=0.0)
        k_base = k_ptr + wide(g) * k_stride[1] + (0 if PAGE else wide(n) * k_stride[0])
        v_base = v_ptr + wide(g) * v_stride[1] + (0 if PAGE else wide(n) * v_stride[0])
        table_row = wide(row) * width
        if k_new_ptr is not None:  # noqa: SIM102 (a compile-time condition)
            if end > start:
                new = tl.maximum(begin, start)
                write_new(
                    k_new_ptr, k_new_stride, k_base, k_stride, g, first, start, new, end, new_len, table_row, table_ptr, PAGE, D, DP,
                    K_SCALE,
                )  # fmt: skip
                if REST:
                    write_new(
                        k_new_ptr + D * k_new_stride[3], k_new_stride, k_base + D, k_stride, g, first, start, new, end, new_len,
                        table_row, table_ptr, PAGE, REST, RESTP, K_SCALE,
                    )  # fmt: skip
                if not SHARED:
                    write_new(
                        v_new_ptr, v_new_stride, v_base, v_stride, g, first, start, new, end, new_len, table_row, table_ptr, PAGE, E, EP,
                        V_SCALE,
                    )  # fmt: skip
                publish_stores(TMA)
        acc, total, m = attend_keys(
            q, q_rest, n, g, h, q_pos, begin, end, length, k_desc, rest_desc, k_base, v_base, k_stride, v_stride, E, table_row,
            table_ptr, scale, mask_captured, mask_sizes, score_captured, score_sizes, tokens,
            MASK, SCORE, PAGE, FOLD, False, M, N, D, DP, EP, REST, RESTP, SHARED, TMA, PRECISION, GROUPED,
            SCORE_LOOKUPS, MASK_LOOKUPS, V_SCALE,
        )  # fmt: skip
        if DIRECT:
            out_row, lse_at = result_rows(n, first, i, head, out_stride, lse_stride, RAGGED)
        else:
            lse_at = ((wide(n) * kv_heads * R + head) * max_queries + i) * splits + split
            out_row = lse_at * E
        out_step = out_stride[3] if DIRECT else 1
        store_result(part_out_ptr, part_lse_ptr, sink_ptr, acc, total, m, out_row, lse_at, out_step, head, 0, inside, E, EP, DIRECT)
        if any_nan(acc, inside):  # possibly from hidden values: 0 · NaN
            tl.debug_barrier()  # before elements that other threads of the CTA stored are stored again
            # SAFE_DIM values at a time: this path must not need more registers than the loop above.
            for column in tl.range(0, E, SAFE_DIM, num_stages=1):
                v_part = v_base + column * v_stride[3]
                group_m, group_total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
                group_acc = tl.zeros([M, SAFE_DIM], tl.float32)
                for first_split in tl.range(begin // tokens, tl.cdiv(end, tokens), num_stages=1):
                    lo, hi = tl.maximum(begin, first_split * tokens), tl.minimum(end, (first_split + 1) * tokens)
                    part, part_total, part_m = attend_keys(
                        q, q_rest, n, g, h, q_pos, lo, hi, length, None, None, k_base, v_part, k_stride, v_stride, E - column,
                        table_row, table_ptr, scale, mask_captured, mask_sizes, score_captured, score_sizes, tokens,
                        MASK, SCORE, PAGE, FOLD, True, M, N, D, DP, SAFE_DIM, REST, RESTP, SHARED, False, PRECISION, False,
                        SCORE_LOOKUPS, MASK_LOOKUPS, V_SCALE,
                    )  # fmt: skip
                    for sign in tl.range(-1, 2, 2, num_stages=1):
                        nonfinite = count_values(
                            sign, n, h, q_pos, lo, hi, length, v_part, v_stride, E - column, table_row, table_ptr,
                            mask_captured, mask_sizes, MASK, PAGE, M, N, SAFE_DIM, PRECISION, MASK_LOOKUPS, V_SCALE,
                        )  # fmt: skip
                        part = tl.where(nonfinite > 0.0, part + sign * float("inf"), part)
                    if GROUPED:
                        part, part_m = normalised(part, part_total, part_m)
                        group_acc, group_total, group_m = add_split(group_acc, group_total, group_m, part, part_m)
                    else:
                        group_acc, group_total, group_m = part, part_total, part_m
                store_result(
                    part_out_ptr, part_lse_ptr, sink_ptr, group_acc, group_total, group_m, out_row, lse_at, out_step, head, column, inside,
                    E, SAFE_DIM, DIRECT,
                )  # fmt: skip
        if MERGED_ROWS:
            taken = group_tokens(tokens, group) if GROUPED else tokens
            joined = group_tokens(tokens, group) // taken
            first_part = lowest_key(first_key, start, (tile * M) // R, WINDOW, N) // taken
            end_part = tl.cdiv(length, taken)
            if is_last(counters_ptr + (wide(n) * row_tiles + tile) * kv_heads + g, end_part - first_part):
                rows = tile * M + tl.arange(0, MERGED_ROWS)
                query, of_head = rows // R, g * R + rows % R
                at = ((wide(n) * kv_heads * R + of_head) * max_queries + query) * splits
                out_rows, lse_rows = result_rows(n, first, query, of_head, out_stride, lse_stride, RAGGED)
                merge_tile(
                    part_out_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, at, out_rows, lse_rows, out_stride[3], first_part, end_part,
                    joined, of_head, query < count, SPLITS, E, EP, EARLY,
                )  # fmt: skip


@triton.jit(do_not_specialize=["kv_heads", "width", "tokens"])
def write_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, table_ptr, positions_ptr, rows_ptr, k_stride, v_stride, k_pages_stride, v_pages_stride,
    kv_heads, width, tokens, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    SHARED: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    """Write the key and the value of one token and KV head into its page. `tokens`: of one batch row of k and v. SHARED: the key only."""
    pid = tl.program_id(0)
    g, t = wide(pid % kv_heads), pid // kv_heads  # g · stride of a head may exceed 32 bits in a long prefill
    position = tl.load(positions_ptr + t)
    page = wide(tl.load(table_ptr + tl.load(rows_ptr + t) * width + position // PAGE))
    slot = position % PAGE
    b, i = wide(t // tokens), wide(t % tokens)
    d, e = tl.arange(0, DP), tl.arange(0, EP)
    k = tl.load(k_ptr + b * k_stride[0] + g * k_stride[1] + i * k_stride[2] + d * k_stride[3], mask=d < D)
    tl.store(
        k_pages_ptr + page * k_pages_stride[0] + g * k_pages_stride[1] + slot * k_pages_stride[2] + d, in_pages(k, K_SCALE), mask=d < D
    )
    if not SHARED:
        v = tl.load(v_ptr + b * v_stride[0] + g * v_stride[1] + i * v_stride[2] + e * v_stride[3], mask=e < E)
        tl.store(
            v_pages_ptr + page * v_pages_stride[0] + g * v_pages_stride[1] + slot * v_pages_stride[2] + e, in_pages(v, V_SCALE), mask=e < E
        )
