"""Parts of a step of the dK/dV kernel that its compute warp groups share. `hopper.backward_dkv` begins with a picture of the whole."""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.tile_access import wide
from longspan._kernels.hopper.dkv_producer import FULL, GROUP_KEYS, HEAD, POSITION, ROWS_LEFT, SHORT
from longspan._kernels.hopper.pipeline import load_int, ring_slot
from longspan._kernels.hopper.tile_io import store_tile


@gluon.jit
def sync_groups():
    """Wait until both compute warp groups are here. Triton numbers the barriers of warp groups from 0 on and leaves the last one unused."""
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("bar.sync 15, 256; mov.u32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stage_dq(dq, step, dq_s, dq_bars):
    """Store a group's part of a step's dQ to shared memory for its dQ warp."""
    mbarrier.wait(dq_bars.empty, (step & 1) ^ 1)
    dq_s.permute((1, 0)).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_bars.full, count=1)


@gluon.jit
def stage_no_dq(use, dq_bars):
    """Pass buffer use `use` on to the dQ warp, which adds nothing: the record is END or STOP."""
    mbarrier.wait(dq_bars.empty, (use & 1) ^ 1)
    mbarrier.arrive(dq_bars.full, count=1)


@gluon.jit
def release_step_before(it, start, bars, STAGES: gl.constexpr):
    """Signal that the stage of step it − 1 is empty, unless step `it` is the item's first, `start`."""
    if it > start:
        mbarrier.arrive(bars.q_empty.index(ring_slot(it - 1, STAGES)), count=1)


@gluon.jit
def store_kv_grad(ptr, strides, b, head, grad, row, left, it, DIM: gl.constexpr, PADDED: gl.constexpr):
    """Store an item's dK or dV of 64 keys from row `row` on, of which `left` exist."""
    # + 0, but unknown to the compiler, which would otherwise compute addresses before the item's steps and spill them. A multiple of 16,
    # so that the alignment of rows stays known.
    store_tile(ptr + wide(b) * strides[0] + wide(head) * strides[1], grad, row, left, strides[2] + (it >> 30) * 16, DIM, PADDED)


@gluon.jit
def step_probabilities(
    s, norm, kind, steps, record, at_b, first_h, kv_pos, kv_left, scale, captured,
    FIRST: gl.constexpr, GROUP: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, BM: gl.constexpr,
    dtype: gl.constexpr, layout: gl.constexpr, QUERIES: gl.constexpr = 0,
):  # fmt: skip
    """`probabilities` of BM queries of a step from its query FIRST on. record: the step's, in `steps`."""
    h, pos = load_int(steps, record + HEAD) + first_h, load_int(steps, record + POSITION) + FIRST
    if kind == FULL:
        p, slope = probabilities(
            s, norm, kind, at_b, h, pos, BM, kv_pos, kv_left, scale, captured, GROUP, MASK, SCORE, JOINT, False, BM, dtype, layout, QUERIES
        )  # fmt: skip
    else:
        left = load_int(steps, record + ROWS_LEFT) - FIRST
        p, slope = probabilities(
            s, norm, kind, at_b, h, pos, left, kv_pos, kv_left, scale, captured, GROUP, MASK, SCORE, JOINT, True, BM, dtype, layout, QUERIES
        )  # fmt: skip
    return p, slope


@gluon.jit
def probabilities(
    s, norm, kind, at_b, h, pos, left, kv_pos, kv_left, scale, captured,
    GROUP: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr, JOINT: gl.constexpr, MASKED: gl.constexpr, BM: gl.constexpr,
    dtype: gl.constexpr, layout: gl.constexpr, QUERIES: gl.constexpr = 0,
):  # fmt: skip
    """(p in `dtype`, p · ∂t/∂s) of one step's scores s [keys, queries]; t: the score mod's result.

    JOINT is linear in its gradient: applied to p, it gives the product. QUERIES: not 0 if columns are the same queries of several heads.
    """
    cols = gl.expand_dims(gl.arange(0, BM, layout=gl.SliceLayout(0, layout)), 0)
    if QUERIES > 0:
        cols = cols & (QUERIES - 1)
    keys = GROUP * GROUP_KEYS + gl.expand_dims(gl.arange(0, GROUP_KEYS, layout=gl.SliceLayout(1, layout)), 1)
    if SCORE is None:
        p = gl.exp2(s * (scale * LOG2_E) - norm)
    else:
        s = s * scale
        p = gl.exp2(SCORE(s, at_b, h, pos + cols, kv_pos + keys, captured.score, captured.score_sizes) * LOG2_E - norm)
    if MASKED:
        # Keys past the tile's end must not count in dQ, nor queries past the end in dK and dV.
        valid = (cols < left) & (keys < kv_left)
        if MASK is not None:
            # Positions within full runs need not be consecutive: for them, the mask is evaluated at valid positions and ignored.
            known = gl.where(kind == SHORT, 0, pos)
            valid = valid & (MASK(at_b, h, known + cols, kv_pos + keys, captured.mask, captured.mask_sizes) | (kind == SHORT))
        p = gl.where(valid, p, 0.0)
    slope = p
    if SCORE is not None:
        slope = JOINT(p, s, at_b, h, pos + cols, kv_pos + keys, cols < BM, captured.score, captured.score_sizes, ())
        if MASKED:
            slope = gl.where(p == 0.0, 0.0, slope)
    return p.to(dtype), slope
