"""Splits and query tiles of decoding, shared by all decode kernels: which keys of which sequence a CTA reads."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_tokens(length, smallest, coarse, share):
    """Tokens per split of a sequence: `smallest`, doubled until it is at least `share` · number of splits.

    One sequence of 1k to 1M tokens then has enough splits to fill a device, and few enough that merging them costs little. More than four
    splits have at least `coarse` tokens each: partial results of MLA are as large as the keys of a few hundred tokens.
    """
    tokens = smallest
    while (tokens < share * (length // tokens)) | ((tokens < coarse) & (4 * tokens < length)):
        tokens *= 2
    return tokens


@triton.jit
def group_tokens(tokens, group):
    """Tokens per group of splits of `tokens`: up to eight splits, at most `group` tokens; one split if it has more."""
    return tl.maximum(tokens, tl.minimum(8 * tokens, group))


@triton.jit
def sequence_range(ranges_ptr, n, sequences, q_len, kv_len):
    """(row of the page table, position of the first query, length, index of the first query) of sequence n."""
    if ranges_ptr is None:
        return n, 0, kv_len, 0
    else:
        row = tl.load(ranges_ptr + n)
        start = tl.load(ranges_ptr + sequences + n)
        length = tl.load(ranges_ptr + 2 * sequences + n)
        return row, start, length, tl.load(ranges_ptr + 3 * sequences + n)


@triton.jit
def query_count(ranges_ptr, start, length, q_len):
    """Number of queries of a sequence."""
    if ranges_ptr is None:
        return q_len
    else:
        return length - start


@triton.jit
def lowest_key(first_key, start, query, WINDOW: tl.constexpr, N: tl.constexpr):
    """The first key that a tile of queries from `query` on reads, at a multiple of N."""
    low = first_key
    if WINDOW is not None:
        low = tl.maximum(low, start + query - WINDOW + 1)
    return low // N * N


@triton.jit
def split_of_cta(
    ranges_ptr, sequences, kv_heads, row_tiles, splits, min_queries, max_queries, q_len, kv_len, first_key, smallest, coarse, share, group,
    WINDOW: tl.constexpr, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(KV head, tile of M query rows, index, sequence, its `sequence_range`, its number of queries, first key, key after the last one,
    tokens per split). index: of a split if `group` is 0, else of a group of splits.

    A CTA that has nothing to compute gets no keys: sequences with fewer than `min_queries` or more than `max_queries` queries are left out.
    """
    pid = tl.program_id(0)
    g = pid % kv_heads
    rest = pid // kv_heads
    tile = rest % row_tiles
    rest = rest // row_tiles
    split = splits - 1 - rest % splits  # the last split first: it has the new tokens, and may be short
    n = rest // splits
    row, start, length, first = sequence_range(ranges_ptr, n, sequences, q_len, kv_len)
    count = query_count(ranges_ptr, start, length, q_len)
    tokens = split_tokens(length, smallest, coarse, share)
    taken = group_tokens(tokens, group)
    low = lowest_key(first_key, start, (tile * M) // R, WINDOW, N)
    chosen = (count >= min_queries) & (count <= max_queries) & (tile * M < count * R)
    begin, end = tl.maximum(split * taken, low), tl.minimum((split + 1) * taken, length)
    return g, tile, split, n, row, start, length, first, count, begin, tl.where(chosen, tl.maximum(begin, end), begin), tokens
