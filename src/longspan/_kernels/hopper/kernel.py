"""`HopperKernel`: the kernel protocol over the Hopper kernels. Shapes and names as in `longspan._kernels.protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
import triton
from torch import Tensor

from longspan._kernels.gpu import launch, limits
from longspan._kernels.gpu.buffers import empty_grads, empty_out, empty_state, prefill, usable, zero_uncovered
from longspan._kernels.gpu.determinism import check_order
from longspan._kernels.gpu.device import capability
from longspan._kernels.gpu.interpreter import interpreted
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.row_terms import delta as row_delta
from longspan._kernels.hopper.config import HOPPER, has_backward
from longspan._kernels.hopper.dq_order import worthwhile
from longspan._kernels.hopper.passes import HopperCall, streamable, walks_of, width
from longspan._kernels.protocol import Grads, Kernel, State, Work
from longspan._masks.block_table import BLOCK_SIZE, BlockTable

# Gluon is experimental: what its barriers promise, and private names that are needed, may change from version to version.
TESTED = ((3, 6),)


@cache
def triton_version() -> tuple[int, ...]:
    return tuple(int(n) for n in triton.__version__.split(".")[:2])


def untested() -> str | None:
    """Why these kernels were not tested with the Triton at hand, if they were not."""
    if triton_version() in TESTED:
        return None
    of, known = ".".join(map(str, triton_version())), ", ".join(".".join(map(str, v)) for v in TESTED)
    return f"Triton {of}: it was tested with {known} only"


class HopperKernel:
    """Numerics as the `triton` kernel's: scores, sums and the running state in float32, probabilities in the values' dtype where they
    meet the values.

    The gradient of q is summed over tiles of keys in the order in which they come, so that its last bits may differ from run to run. Where
    `torch.are_deterministic_algorithms_enabled()`, they add to it in turns (`hopper.dq_order`), or, where the mask leaves few
    tiles or there are few to share among programs, a pass of its own computes it in a fixed order; so it does where captured tensors need
    gradients.
    Forward, the same call gives the same bits; but where the last items of a launch are cut along their keys depends on how many there
    are, and so do last bits.

    `fallback` computes what these kernels do not support: a backward pass of head dims over 128 or that differ, rows that no tile holds,
    empty keys, and results whose head dim is not contiguous.
    """

    name = "hopper"
    rounds_once = True

    def __init__(self, *, fallback: Kernel) -> None:
        self._fallback = fallback

    def check(self, work: Work, q: Tensor, needs: Sequence[bool] = ()) -> None:
        if not launch.capturing(q.device):  # a CUDA graph capture forbids reading captured tensors
            check_lookups(work, q.shape[0], q.shape[1])
        check_order(work, needs, q)

    def refuses(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> str | None:
        if interpreted():
            return "TRITON_INTERPRET=1 is set: the interpreter has no Gluon"
        if (reason := untested()) is not None:
            return reason
        if not q.is_cuda:
            return f"tensors on {q.device}: it needs a Hopper GPU"
        if torch.version.hip is not None:
            return "this torch is built for ROCm: it needs a Hopper GPU"
        if capability(q.device) != HOPPER:
            found = ".".join(map(str, capability(q.device)))
            return f"{torch.cuda.get_device_name(q.device)} has compute capability {found}: it needs 9.0 (Hopper)"
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {q.dtype}: it computes bfloat16 and float16"
        if q.shape[-1] % 8 or v.shape[-1] % 8:
            return f"head dims {q.shape[-1]} and {v.shape[-1]}: both must be multiples of 8, the copy engine's 16 bytes"
        if any(block % BLOCK_SIZE for block in work.table.block):
            return f"table block {work.table.block}: both sizes must be multiples of {BLOCK_SIZE}"
        return limits.unsupported(q, v, work)

    def block(self, q: Tensor, v: Tensor, table: BlockTable) -> tuple[int, int]:
        return table.block

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, state: State | None, final: bool, peak: bool) -> State:
        k, v, work = _without_nothing(k, v, work)
        # Past a tile's end the copy engine reads on: what lies there must be rows of other tiles, not memory that nobody wrote.
        if not q.numel() or not k.numel() or not launch.facts(work.kv_tiles).covers:
            return self._forward_by_fallback(q, k, v, work, state, final=final, peak=peak)
        old, done = (None, None) if state is None else (usable(state, peak=peak), state.done)
        fresh = False
        if final and old is not None and done is not None:  # it holds all rows that see nothing more
            result = State(out=done, lse=old.lse, peak=old.peak)
        elif final or old is None:
            result, fresh = empty_state(q, v.shape[-1], q.dtype if final else torch.float32, peak=peak), True
        else:
            result = old
        if result.out.stride(3) != 1 or (old is not None and old.out.stride(3) != 1):  # as that of a query whose head dim is not innermost
            return self._forward_by_fallback(q, k, v, work, state, final=final, peak=peak)
        for start, stop in launch.idle_spans(work.table, work.q_tiles) if fresh else ():
            prefill(result.rows(start, stop), None if old is None else old.rows(start, stop))
        done = _done_rows(q, v, work, done, final=final, peak=peak)
        call = HopperCall(q, k, v, work)
        call.forward(result, old, busy_only=True, done=None if final or work.complete is None else done)
        result.done = None if final else done
        return result

    def _forward_by_fallback(self, q: Tensor, k: Tensor, v: Tensor, work: Work, state: State | None, *, final: bool, peak: bool) -> State:
        k, v, work = _in_one(k, v, work)
        result = self._fallback.forward(q, k, v, work, state=state, final=final, peak=peak)
        done = _done_rows(q, v, work, None if state is None else state.done, final=final, peak=peak)
        if done is not None and final:
            idle = (work.table.tiles_per_row.view(-1, work.table.q_tiles) == 0).all(0)
            rows = work.q_tiles.rows_of(idle).to(q.device)
            result.out[:, :, rows] = done[:, :, rows]
        elif done is not None and work.complete is not None:
            rows = work.q_tiles.rows_of(work.complete).to(q.device)
            done[:, :, rows] = result.out[:, :, rows].to(done.dtype)
        result.done = None if final else done
        return result

    def joins(self, q: Tensor, v: Tensor, work: Work, *, backward: bool) -> bool:
        return not backward or self._cut(q, v, work)

    def apart(self, q: Tensor, v: Tensor, work: Work, needs: Sequence[bool]) -> bool:
        # The copy engine adds to the gradient of q, tile by tile, and those of two launches may come in any order.
        return self._cut(q, v, work) and self._one_pass(q, v, work, needs) and not torch.are_deterministic_algorithms_enabled()

    def _cut(self, q: Tensor, v: Tensor, work: Work) -> bool:
        """Whether the backward kernels take this work."""
        covered = launch.facts(work.q_tiles).covers and launch.facts(work.kv_tiles).covers
        cut = has_backward(width(q.shape[-1]), width(v.shape[-1])) and work.table.block == (BLOCK_SIZE, BLOCK_SIZE)
        return covered and cut and q.numel() > 0 and work.kv_tiles.length > 0 and (work.score is None or work.joint is not None)

    def _one_pass(self, q: Tensor, v: Tensor, work: Work, needs: Sequence[bool]) -> bool:
        """Whether the pass over keys computes the gradient of q too."""
        if any(needs):
            return False
        return not torch.are_deterministic_algorithms_enabled() or worthwhile(work.table, v.shape[0] * v.shape[1] * walks_of(q, v, work))

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        work: Work,
        *,
        needs: Sequence[bool],
        wide: bool,
        delta: Tensor | None = None,
        into: Grads | None = None,
    ) -> Grads:
        assert work.own is None or into is not None
        k, v, work = _without_nothing(k, v, work)
        if not self._cut(q, v, work) or not k.numel():
            k, v, work = _in_one(k, v, work)
            return self._fallback.backward(
                q, k, v, out, lse, grad_out, grad_lse, work, needs=needs, wide=wide, delta=delta, into=into
            )  # fmt: skip
        check_order(work, needs, q)
        grads = empty_grads(q, k, v, work, needs, wide=wide) if into is None else into
        zero_uncovered(grads, work, into=into is not None)
        lse, grad_out = lse.contiguous(), streamable(grad_out)
        call = HopperCall(q, k, v, work)
        norm, known = torch.empty_like(lse), delta is not None
        delta = torch.empty_like(lse) if delta is None else delta.contiguous()
        call.rows(None if known else out, grad_out, lse, None if grad_lse is None else grad_lse.float().contiguous(), norm, delta)
        if not self._one_pass(q, v, work, needs) or (into is not None and not launch.describable(into.q)):
            call.dq(grad_out, norm, delta, grads.q, grads.captured, add=into is not None)
            call.dkdv(grad_out, norm, delta, grads.k, grads.v, None)
            return grads
        total = grads.q if into is not None else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        call.dkdv(grad_out, norm, delta, grads.k, grads.v, total, ordered=torch.are_deterministic_algorithms_enabled())
        grads.q = total if wide else total.to(q.dtype)
        return grads

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return row_delta(out, grad_out, grad_lse)


def _without_nothing(k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor, Work]:
    """The same keys from one place, where the other has none."""
    if work.own is None or (k.numel() and work.own[0].numel()):
        return k, v, work
    k, v = (k, v) if k.numel() else work.own
    return k, v, replace(work, own=None)


def _in_one(k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor, Work]:
    """The same keys from one place: a copy."""
    if work.own is None:
        return k, v, work
    own_k, own_v = work.own
    return torch.cat([own_k, k], 2), torch.cat([own_v, v], 2), replace(work, own=None)


def _done_rows(q: Tensor, v: Tensor, work: Work, done: Tensor | None, *, final: bool, peak: bool) -> Tensor | None:
    """Where rows go that are complete: where earlier ones went, a new tensor, or nowhere (None), where they stay in the state."""
    if done is not None or final or peak or work.complete is None or not launch.facts(work.q_tiles).covers:
        return done
    made = empty_out(q, v.shape[-1], q.dtype)
    return made if made.stride(3) == 1 else None
