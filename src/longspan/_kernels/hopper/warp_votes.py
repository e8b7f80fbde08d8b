"""Votes of a warp group in shared memory: one byte per thread, the same for all threads of a warp.

A reduction over a warp group takes five shuffles, two barriers and shared memory. Here, threads vote within their warp, and a reader sees
the votes of four warps as one int32: one store, one barrier and one load.
"""

# Device code: its arguments are tiles and pointers, which Python types do not describe.
# mypy: allow-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longspan._kernels.hopper.gluon_names import reinterpret
from longspan._kernels.hopper.pipeline import load_int

_THREADS = gl.constexpr(128)  # of a warp group
_WARPS = gl.constexpr(4)


@gluon.jit
def ballots(COUNT: gl.constexpr):
    """Shared memory for the votes of COUNT warp groups, int8 [COUNT, 128]."""
    return gl.allocate_shared_memory(gl.int8, [COUNT, _THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def in_warp(x):
    """int32 [128]: whether x, int32 [128] with one element per thread, is not 0 in any thread of the warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred any; setp.ne.s32 any, $1, 0; vote.sync.any.pred any, any, -1; selp.s32 $0, 1, 0, any; }",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def vote(votes, i, x):
    """Store whether x, int32 [128] with one element per thread, is not 0 in any thread of a warp, for all warps of the i-th warp group."""
    by_lane = gl.permute(gl.reshape(in_warp(x), [_WARPS, _THREADS // _WARPS]), (1, 0))  # a lane's bytes of all warps are adjacent
    votes.index(i).store(gl.reshape(by_lane, [_THREADS]).to(gl.int8))


@gluon.jit
def vote_alike(votes, i, x):
    """`vote` where one warp speaks for all: the first warp's votes are read. x [128]: `in_warp` of something.

    Addresses are thread numbers, which kernels have in a register; those of `vote` would take another one.
    """
    votes.index(i).store(gl.reshape(x, [_THREADS]).to(gl.int8))


@gluon.jit
def any_vote(votes, i):
    """1 if any thread of the i-th warp group voted, or after `vote_alike` one of its first warp; otherwise 0."""
    LANES: gl.constexpr = _THREADS // _WARPS
    words = reinterpret(votes, gl.int32, [votes.shape[0] * LANES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return gl.where(load_int(words, i * LANES) == 0, 0, 1)
