"""Tile shapes, pipeline stages and registers of the Hopper kernels. Measured on an H200 (bench/results)."""

from __future__ import annotations

from dataclasses import dataclass

from longspan._kernels.hopper.makespan import REFERENCE_CTAS

HOPPER = (9, 0)  # compute capability
MAX_DIM = 256  # largest head dim of the backward kernels
MIN_GATHERED_ROWS = 8  # query heads of a KV head, times queries, with one list; fewer were not measured
SHARED_BYTES = 227 * 1024  # shared memory of a CTA


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """m queries by n keys at a time, `stages` tiles in flight; of a second operand, `second_stages`.

    `start_registers`: registers per thread at launch. `registers`: registers per thread of the warp groups that compute.
    """

    m: int
    n: int
    stages: int
    second_stages: int = 0
    start_registers: int = 168
    registers: int = 240


def forward_config(d: int, e: int, *, with_state: bool) -> TileConfig:
    """For padded head dims d of keys and e of values. The queries, the KV stages and the output tile, or with `with_state` the float32
    state, fit into 227 KB of shared memory.
    """
    if max(d, e) <= 64:
        return TileConfig(m=128, n=128, stages=4)
    output = 128 * e * 4 if with_state else 64 * e * 2
    fits = 2 * 128 * d + 2 * 2 * 128 * (d + e) + output + 2048 <= SHARED_BYTES
    return TileConfig(m=128, n=128 if e <= 128 and fits else 64, stages=2)


def forward_three_config() -> TileConfig:
    """For `hopper.forward_three`. Its 16 warps start with 128 registers per thread."""
    return TileConfig(m=192, n=128, stages=4, start_registers=128, registers=160)


def one_group_config(d: int, e: int, *, with_q: bool) -> TileConfig:
    """For `hopper.forward_one`, `hopper.backward_one` and padded head dims d and e: two CTAs share the 227 KB of an SM.

    `stages` of K, `second_stages` of V. with_q: whether the queries are in shared memory.
    """
    k_stages = 3 if with_q or e > d else 4
    v_stages = (SHARED_BYTES // 2 - 1024 - (k_stages + with_q) * 2 * 64 * d) // (2 * 64 * e)
    return TileConfig(m=64, n=64, stages=k_stages, second_stages=min(4, v_stages), start_registers=128)


def takes_three_groups(*, heads: int, items: int, walked: int, visible: int) -> bool:
    """Whether `hopper.forward_three` is faster than `hopper.forward`: for many items, whose KV it does not split, of many KV tiles.

    heads: of all batch rows. items: of one head. walked: KV tiles that these items walk. visible: KV tiles of the block table's rows, of
    which two of an item should see the same. H200, D64, 16 heads, time over that of `hopper.forward`: causal 32k 0.90, causal 8k (33 KV
    tiles per item) 0.95, documents of 2,048 tokens 1.14, window of 1,024 1.19.
    """
    return heads * items >= 4 * REFERENCE_CTAS and walked >= 32 * items and 3 * walked <= 1.1 * 2 * visible


def takes_turns(*, masked: bool, blocks: float) -> bool:
    """Whether the warp groups of `hopper.forward_three` start their wgmmas in turns. blocks: mean number of KV tiles of an item.

    A warp group in a masked block or in its epilogue keeps the others waiting. H200, D64, causal 32k (130 tiles): 0.94 of the time without.
    """
    return not masked or blocks >= 100


def takes_one_loop(d: int, e: int, blocks: float) -> bool:
    """Whether `hopper.forward` has one main loop for partial and full blocks instead of one for each.

    d, e: padded head dims. blocks: mean number of KV blocks of an item. H200, D128, time over that with two loops: documents of ~512 tokens
    (5.1 blocks) 0.97 if items begin with the diagonal, otherwise 0.95; window of 1,024 (8.9 blocks) 1.00 and 1.02. Where items do not begin
    with the diagonal, the max of every block is followed (`hopper.running_max`): 0.98 of the time with a checked max.
    """
    return d == e == 128 and blocks <= 6


def head_dim_parts(dim: int) -> tuple[int, int]:
    """The columns of both parts of a padded head dim (`hopper.head_dim_parts`); 0 for no second part."""
    return (128, 64) if 128 < dim <= 192 else (max(64, 1 << (dim - 1).bit_length()), 0)


def computes_dq_with_dkv(d: int, e: int, *, scored: bool) -> bool:
    """Whether `hopper.backward_dkv` supports these head dims, with dQ: dK and dV of 64 keys must fit into the registers of a warp group.
    Otherwise `hopper.backward_wide` computes dK and dV, and `hopper.backward_dq` dQ. scored: with a score mod.
    """
    d, e = sum(head_dim_parts(d)), sum(head_dim_parts(e))
    return d == e <= 128 or (d == 192 and e <= 128 and not scored)


def takes_wide_dkv(d: int, e: int) -> bool:
    """Whether `hopper.backward_wide` computes dK and dV of these head dims, where dQ is computed apart."""
    return not sum(head_dim_parts(d)) == sum(head_dim_parts(e)) <= 128


def dkv_config(d: int, *, with_dq: bool, plain: bool) -> TileConfig:
    """For `hopper.backward_dkv` and keys of padded head dim d: items of n keys, steps of m queries. A wide dQ takes the shared memory of
    two stages.

    plain: without a score mod. Only plain passes have steps of 128 queries (`hopper.dkv_halves`): a score mod needs the registers of the
    second half.
    """
    if with_dq and d <= 64 and plain:
        return TileConfig(m=128, n=128, stages=2)
    return TileConfig(m=64, n=128, stages=2 if with_dq and d > 64 else 4)


def takes_late_dq(steps: float) -> bool:
    """Whether `hopper.dkv_late` is faster than `hopper.dkv_halves`. steps: mean number of steps of an item.

    H200, D64, bfloat16, time over that of `hopper.dkv_halves`: causal 4k (16.5 steps) 0.975, causal 2k (8.5) 1.00; a variant that starts
    items otherwise: full 16k (128) 0.92. Nothing between 8.5 and 16.5 steps was timed.
    """
    return steps >= 12


def wide_dkv_config(d: int, e: int) -> TileConfig:
    """For `hopper.backward_wide` and padded head dims d and e: items of n keys, steps of m queries. `stages` of q, `second_stages` of dO.

    q is read last by the group that computes dK, one step after the group that computes S: it gets the more stages.
    """
    rest = SHARED_BYTES - 2 * 64 * (d + e) - 2 * 2 * 64 * 64 - 4096
    q_bytes, do_bytes = 2 * 64 * d, 2 * 64 * e
    stages = next((q, do) for q, do in ((4, 4), (4, 3), (4, 2), (3, 2), (2, 2)) if q * q_bytes + do * do_bytes <= rest)
    return TileConfig(m=64, n=64, stages=stages[0], second_stages=stages[1])


def half_dkv_config(d: int, e: int, *, queries: int) -> TileConfig:
    """For `hopper.backward_wide` and block tables of 64 keys, head dims up to 128. queries: 128 of one head, or 64 of each of two heads, or
    64 of one head.
    """
    stages = 2 if max(d, e) > 64 and queries == 128 else 4
    return TileConfig(m=queries, n=64, stages=stages, second_stages=stages)


def dq_tile(d: int, m: int) -> tuple[int, int]:
    """(queries, dims) of a tile of a step's dQ. Each of two warp groups computes one tile; of 192 dims, the first group computes two."""
    return (m, 64) if d > 64 else (m // 2, 64)


def dq_config(d: int, e: int, *, scored: bool) -> TileConfig:
    """For the kernel by query tiles. A score mod needs registers of its own and gets blocks of 64 keys, for which `backward_dq` holds the
    queries in registers. So do wide head dims. Small blocks leave shared memory for twice as many stages. K is read last by the group
    that computes dQ: it has `stages`, V `second_stages`.
    """
    if max(d, e) <= 128:
        n = 64 if scored else 128
        stages = 4 if n * max(d, e) <= 8192 else 2
        return TileConfig(m=128, n=n, stages=stages, second_stages=stages)
    rest = SHARED_BYTES - 2 * 128 * (d + e) - 2048
    k_bytes, v_bytes = 2 * 64 * d, 2 * 64 * e
    k, v = next((k, v) for k, v in ((4, 4), (4, 2), (3, 3), (3, 2), (2, 2), (2, 1)) if k * k_bytes + v * v_bytes <= rest)
    return TileConfig(m=128, n=64, stages=k, second_stages=v)


@dataclass(frozen=True, kw_only=True)
class GatheredConfig:
    """For kernels over single chosen keys: items of `queries` queries by `heads` query heads, 64 rows per warp group, blocks of n keys.

    `stages`, `v_stages`: blocks of K and of V in shared memory. `start_registers`, `registers`: as in `TileConfig`.
    `load_registers`: of the warp group that gathers.
    """

    heads: int
    queries: int
    groups: int
    n: int
    stages: int
    v_stages: int
    start_registers: int
    registers: int
    load_registers: int
    ctas_per_sm: int


def _packed(heads: int, queries: int) -> tuple[int, int, int]:
    """(heads, queries, warp groups) of an item: 128 rows for two warp groups, or at most 64 rows for one."""
    groups = 2 if heads * queries >= 128 and (heads <= 64 or heads % 128 == 0) else 1
    if heads > 64 * groups:
        return 64 * groups, 1, groups
    return heads, min(queries, 1 << (64 * groups // heads).bit_length() - 1), groups


def gathered_forward_config(heads: int, queries: int) -> GatheredConfig | None:
    """For `heads` query heads of one KV head and `queries` queries with one list; None if the heads do not make whole warp groups.

    Up to 64 rows, two CTAs share an SM: one computes softmax while the other one runs wgmma.
    """
    if heads > 64 and heads % 64:
        return None
    heads, queries, groups = _packed(heads, queries)
    if groups == 2:
        return GatheredConfig(
            heads=heads, queries=queries, groups=2, n=64, stages=7, v_stages=6, start_registers=168, registers=216, load_registers=72,
            ctas_per_sm=1,
        )  # fmt: skip
    return GatheredConfig(
        heads=heads, queries=queries, groups=1, n=64, stages=4, v_stages=3, start_registers=128, registers=200, load_registers=56,
        ctas_per_sm=2,
    )  # fmt: skip


def gathered_backward_config(heads: int, queries: int) -> GatheredConfig:
    """As `gathered_forward_config`. dQ, dK and dV of 64 rows and 64 keys take most registers of a warp group."""
    heads, queries, groups = _packed(heads, queries)
    if groups == 2:
        return GatheredConfig(
            heads=heads, queries=queries, groups=2, n=64, stages=3, v_stages=3, start_registers=168, registers=216, load_registers=72,
            ctas_per_sm=1,
        )  # fmt: skip
    return GatheredConfig(
        heads=heads, queries=queries, groups=1, n=64, stages=2, v_stages=2, start_registers=128, registers=216, load_registers=40,
        ctas_per_sm=2,
    )  # fmt: skip
