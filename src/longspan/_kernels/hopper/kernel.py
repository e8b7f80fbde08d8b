"""`HopperKernel`: the kernel protocol over the Hopper kernels. Shapes and names as in `longspan._kernels.protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longspan._kernels.gpu import launch, limits
from longspan._kernels.gpu.buffers import empty_grads, empty_out, empty_state, prefill, usable, zero_uncovered
from longspan._kernels.gpu.chosen_keys import adds_grads
from longspan._kernels.gpu.compile_options import triton_version
from longspan._kernels.gpu.determinism import check_order
from longspan._kernels.gpu.device import capability
from longspan._kernels.gpu.interpreter import interpreted
from longspan._kernels.gpu.listed_tables import listed_work
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.row_terms import delta as row_delta
from longspan._kernels.gpu.row_terms import empty_padded_rows, padded_rows
from longspan._kernels.gpu.selected_tables import computes_heads_alone, tile_of, tiled_work
from longspan._kernels.gpu.workspace import zeroed as int_zeros
from longspan._kernels.hopper.config import HOPPER, MAX_DIM, computes_dq_with_dkv, takes_wide_dkv
from longspan._kernels.hopper.dq_order import ordered_dq_pays
from longspan._kernels.hopper.gathered_call import GatheredCall, GatheredKeys, gathers_heads
from longspan._kernels.hopper.gqa_split import head_parts_of, order_sizes
from longspan._kernels.hopper.isolation import isolates, isolation_demanded
from longspan._kernels.hopper.one_group_call import OneGroupCall
from longspan._kernels.hopper.passes import (
    HopperCall,
    RowGrads,
    round_tensors,
    row_norm,
    row_terms_launch,
    streamable,
)
from longspan._kernels.hopper.prepared import HopperBackward, HopperForward
from longspan._kernels.hopper.prepared_steps import HopperBackwardStep, HopperForwardStep, HopperRowTerms, row_tensors
from longspan._kernels.hopper.state import HopperState
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Capabilities, Grads, Kernel, Selection, State, Work
from longspan._masks.block_table import BLOCK_SIZE, BlockTable
from longspan._masks.static_table import StaticTable

# Gluon is experimental: names and the barriers that it inserts change between versions. With all of these, the kernels compile and a
# barrier precedes every arrival (`tests/kernels/hopper_compile.py`). The GPU tests have passed with TESTED_TRITON;
# `docs/api/limits.md` names what has not run since.
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)  # of torch 2.11 and of torch 2.15
TESTED_TRITON = ((3, 6), (3, 7), (3, 9))  # of torch 2.11, of 2.12 and 2.13, and of 2.15

# Block of the table of the mask besides a selection of single keys, of which only the program is read. As for all blocks below 128,
# score mods are not supported.
_GATHERED = (64, 64)


def unsupported_triton() -> str | None:
    """The reason why these kernels do not support the installed Triton; else None."""
    if OLDEST_TRITON <= triton_version() <= NEWEST_TRITON:
        return None
    return f"Triton {_dotted(triton_version())}: expected {_dotted(OLDEST_TRITON)} to {_dotted(NEWEST_TRITON)}"


def untested_triton() -> str | None:
    """The reason why "auto" does not choose these kernels with the installed Triton; else None."""
    if triton_version() in TESTED_TRITON:
        return None
    tested = ", ".join(map(_dotted, TESTED_TRITON))
    return unsupported_triton() or f"Triton {_dotted(triton_version())}: GPU tests passed with {tested} only; kernel='hopper' uses it"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class HopperKernel:
    """Kernel for Hopper GPUs. Numerics as in `TritonKernel`: scores, sums and the running state in float32; P in the dtype of v for P·V.

    dQ is accumulated over KV tiles in arrival order: its last bits may differ from run to run. With
    `torch.use_deterministic_algorithms(True)`, CTAs add in a fixed order (`hopper.dq_order`). Where CTAs would wait for each other or leave
    L2 (short sequences without a causal mask, short documents), where captured tensors need gradients, and for wide head dims
    (`config.computes_dq_with_dkv`), a second kernel computes dQ. Forward results have the same bits in every run; which work items are
    split along KV depends on their number, and so do last bits.

    In `longspan.invariant()`, each row of dQ, dK and dV is a sum in an order that follows from positions, by one kernel or two.

    `fallback` computes what these kernels do not support: tilings that leave rows uncovered, empty KV, and results whose head dim is not
    contiguous.
    """

    name = "hopper"

    def __init__(self, *, fallback: Kernel) -> None:
        self._fallback = fallback

    def capabilities(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> Capabilities:
        reason = _unsupported_reason(inputs, work)
        if reason is None and work.invariant and work.score is not None:
            reason = "longspan.invariant() with a score_mod"  # it has a second form for tiles whose lookups are uniform
        if reason is not None:
            return Capabilities(unsupported=reason)
        # Deterministic: TMA reductions of two concurrent launches would add to dQ in arbitrary order.
        deterministic = torch.are_deterministic_algorithms_enabled()
        concurrent = not deterministic and not work.invariant and _supports_backward(inputs, work) and _one_pass(inputs, work, needs)
        return Capabilities(two_kv_buffers=True, concurrent_backward=concurrent, rounds_kv_grads_once=True)

    def block_size(self, inputs: AttentionInputs, table: BlockTable) -> tuple[int, int]:
        return table.block

    def check(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> None:
        q = inputs.q
        if not launch.capturing(q.device):  # a CUDA graph capture forbids reading captured tensors
            check_lookups(work, q.shape[0], q.shape[1])
        check_order(work, needs, q)

    def forward(self, inputs: AttentionInputs, work: Work, *, state: State | None, final: bool, max_scores: bool) -> State:
        if isinstance(work.device_tables, GatheredKeys):
            assert final and not max_scores
            return GatheredCall(inputs, work).forward(state)
        if computes_heads_alone(work):
            assert final and not max_scores
            return OneGroupCall(inputs, work).forward(state)
        inputs = _without_empty_buffer(inputs)
        if work.invariant and inputs.q.stride(3) != 1:  # strides must not choose the kernel
            inputs = replace(inputs, q=inputs.q.contiguous())
        q, v = inputs.q, inputs.v
        # TMA reads past a short tile's end: there must be rows of other tiles, not uninitialised memory.
        if not q.numel() or not inputs.k.numel() or not launch.facts(work.kv_tiles).covers:
            return self._forward_by_fallback(inputs, work, state, final=final, max_scores=max_scores)
        old = None if state is None else usable(state, max_scores=max_scores)
        completed, is_new = _completed_out(state), False
        if final and old is not None and completed is not None:  # it holds every row that sees no tile of this step
            result = State(out=completed, lse=old.lse, max_scores=old.max_scores)
        elif final or old is None:
            result, is_new = empty_state(q, v.shape[-1], q.dtype if final else torch.float32, max_scores=max_scores), True
        else:
            result = old
        if result.out.stride(3) != 1 or (old is not None and old.out.stride(3) != 1):
            return self._forward_by_fallback(inputs, work, state, final=final, max_scores=max_scores)
        for start, stop in launch.idle_spans(work.table, work.q_tiles) if is_new else ():
            prefill(result.rows(start, stop), None if old is None else old.rows(start, stop))
        if not final and not max_scores:
            completed = _allocate_completed(inputs, work, completed)
        call = HopperCall(inputs, work)
        call.forward(result, old, done=None if final or work.complete_q_tiles is None else completed)
        if final:
            return result
        return HopperState(out=result.out, lse=result.lse, max_scores=result.max_scores, completed_out=completed)

    def _forward_by_fallback(
        self, inputs: AttentionInputs, work: Work, state: State | None, *, final: bool, max_scores: bool
    ) -> State:  # fmt: skip
        inputs, completed = _in_one_buffer(inputs), _completed_out(state)
        result = self._fallback.forward(inputs, work, state=state, final=final, max_scores=max_scores)
        if final:
            if completed is not None:
                idle = (work.table.tiles_per_row.view(-1, work.table.q_tiles) == 0).all(0)
                rows = work.q_tiles.rows_of(idle).to(inputs.q.device)
                result.out[:, :, rows] = completed[:, :, rows]
            return result
        if not max_scores:
            completed = _allocate_completed(inputs, work, completed)
        if completed is not None and work.complete_q_tiles is not None:
            rows = work.q_tiles.rows_of(work.complete_q_tiles).to(inputs.q.device)
            completed[:, :, rows] = result.out[:, :, rows].to(completed.dtype)
        return HopperState(out=result.out, lse=result.lse, max_scores=result.max_scores, completed_out=completed)

    def backward(self, tensors: BackwardInputs, work: Work, *, wide: bool, into: Grads | None = None) -> Grads:
        if isinstance(work.device_tables, GatheredKeys):
            assert into is None and not wide
            delta = self.delta(tensors.out, tensors.grad_out, tensors.grad_lse) if tensors.delta is None else tensors.delta.contiguous()
            return GatheredCall(tensors.inputs, work).backward(tensors.grad_out, tensors.lse.contiguous(), delta)
        assert tensors.inputs.local_kv is None or into is not None
        inputs, needs = _without_empty_buffer(tensors.inputs), tensors.needs
        if not _supports_backward(inputs, work) or not inputs.k.numel():
            return self._fallback.backward(replace(tensors, inputs=_in_one_buffer(inputs)), work, wide=wide, into=into)
        q, deterministic = inputs.q, torch.are_deterministic_algorithms_enabled()
        check_order(work, needs, q)
        grads = empty_grads(inputs, work, needs, wide=wide) if into is None else into
        zero_uncovered(grads, work, into=into is not None)
        lse, grad_out, grad_lse = tensors.lse.contiguous(), streamable(tensors.grad_out), tensors.grad_lse
        call = HopperCall(inputs, work)
        norm, delta = (empty_padded_rows(lse) if t is None else padded_rows(t) for t in (tensors.norm, tensors.delta))
        one_pass = tensors.side == "all" and _one_pass(inputs, work, needs) and (into is None or launch.describable(into.q))
        # Sums that include the scale have other bits than those of the separate dQ kernel.
        one_pass = one_pass and not (work.invariant and (wide or into is not None))
        total = None if not one_pass else grads.q if into is not None else torch.empty(q.shape, dtype=torch.float32, device=q.device)
        isolated, scanned = isolates(work), isolates(work) and not one_pass
        flag = int_zeros(1, q.device) if isolated else None
        term_tensors = {
            "q_ptr": call.q if isolated else None, "out_ptr": tensors.out if tensors.delta is None else None, "do_ptr": grad_out,
            "lse_ptr": lse,
            "grad_lse_ptr": None if grad_lse is None else grad_lse.float().contiguous(), "norm_ptr": norm, "delta_ptr": delta,
            "dq_ptr": total if into is None else None,
            "counters_ptr": torch.empty(8, dtype=torch.int32, device=q.device) if into is None else None,  # for `HopperBackward`
            "k_ptr": call.k if scanned and into is None else None, "v_ptr": call.v if scanned and into is None else None,
            "flag_ptr": flag if into is None else None,
        }  # fmt: skip
        if into is None or tensors.norm is None or tensors.delta is None:
            call.row_terms(term_tensors)(term_tensors, {})
        if into is not None and flag is not None:
            for check, checked in call.unbounded(norm, delta, flag, scanned=scanned):
                check(checked, {})
        row_grads = RowGrads(grad_out, norm, delta, flag)
        if not one_pass and tensors.side != "kv" and computes_heads_alone(work):
            assert into is None and not wide
            OneGroupCall(inputs, work).dq(row_grads, grads.q)
        elif not one_pass and tensors.side != "kv":
            call.launch(call.dq_pass(row_grads, grads.q, grads.captured, add=into is not None))
        if tensors.side == "q":
            return grads
        parts, dk, dv = head_parts_of(call.q, call.v, work), grads.k, grads.v
        if parts > 1:  # each part of a KV head's query heads fills its own dK and dV, summed below
            dk, dv = (torch.empty((t.shape[0], t.shape[1] * parts, *t.shape[2:]), dtype=torch.float32, device=t.device) for t in (dk, dv))
        rounded = into is None and not wide
        ordered = one_pass and (deterministic or work.invariant)
        call.launch(call.dkdv_pass(row_grads, dk, dv, total, ordered=ordered, rounded=rounded))
        if not rounded:
            if parts > 1:
                for summed, by_part in ((grads.k, dk), (grads.v, dv)):
                    summed.copy_(by_part.unflatten(1, (-1, parts)).sum(2))
            grads.q = grads.q if total is None else total
        elif total is not None or parts > 1:
            to_round = round_tensors(total, grads, (dk, dv), parts)
            call.rounding(to_round, parts)(to_round, {"scale": call.rounding_scale})
        return grads

    def prepare_forward(self, inputs: AttentionInputs, work: Work) -> HopperForward | None:
        if not inputs.q.numel() or not inputs.k.numel() or not launch.facts(work.kv_tiles).covers:
            return None
        return HopperForward.of(inputs, work)

    def prepare_backward(self, tensors: BackwardInputs, work: Work) -> HopperBackward | None:
        inputs, needs = tensors.inputs, tensors.needs
        if not _supports_backward(inputs, work) or not inputs.k.numel():
            return None
        if any(needs) and torch.are_deterministic_algorithms_enabled():  # `check_order` may have to warn at every call
            return None
        one_pass = _one_pass(inputs, work, needs)
        ordered = one_pass and (work.invariant or torch.are_deterministic_algorithms_enabled())
        return HopperBackward.of(tensors, work, one_pass=one_pass, ordered=ordered)

    def prepare_forward_step(
        self, inputs: AttentionInputs, work: Work, *, state: State | None, result: State, final: bool
    ) -> HopperForwardStep | None:  # fmt: skip
        if work.invariant or not inputs.q.numel() or _has_empty_kv(inputs) or not launch.facts(work.kv_tiles).covers:
            return None
        return HopperForwardStep.of(inputs, work, state=state, result=result, final=final)

    def prepare_backward_step(self, tensors: BackwardInputs, work: Work, *, into: Grads) -> HopperBackwardStep | None:
        inputs, needs = tensors.inputs, tensors.needs
        deterministic = torch.are_deterministic_algorithms_enabled()
        if work.invariant or _has_empty_kv(inputs) or not _supports_backward(inputs, work):
            return None
        if any(needs) and deterministic:  # `check_order` may have to warn at every call
            return None
        one_pass = _one_pass(inputs, work, needs) and launch.describable(into.q)
        return HopperBackwardStep.of(tensors, work, into=into, one_pass=one_pass, ordered=one_pass and deterministic)

    def prepare_row_terms(self, tensors: BackwardInputs, zeroed: Tensor) -> HopperRowTerms | None:
        return HopperRowTerms.of(tensors, zeroed)

    def norm(self, lse: Tensor) -> Tensor:
        return row_norm(lse)

    def row_terms(self, tensors: BackwardInputs, zeroed: Tensor) -> tuple[Tensor, Tensor]:
        delta, norm = (empty_padded_rows(tensors.lse) for _ in range(2))
        launched = row_tensors(tensors, zeroed, norm, delta)
        row_terms_launch(zeroed.shape, launched)(launched, {})
        return delta, norm

    def selection_block(
        self, inputs: AttentionInputs, selection: Selection, *, captured_grads: bool, by_head: bool
    ) -> tuple[int, int] | None:  # fmt: skip
        block = tile_of(selection)
        if block is None and not captured_grads and not by_head and adds_grads(selection) and gathers_heads(inputs, selection):
            # Queries with one list load keys that one of them may not see.
            return _GATHERED if selection.q_granularity == 1 or not isolation_demanded() else None
        d, e = inputs.q.shape[-1], inputs.v.shape[-1]
        if block is None or max(d, e) > MAX_DIM or (block != (BLOCK_SIZE, BLOCK_SIZE) and (max(d, e) > 128 or isolation_demanded())):
            return None
        return block

    def select(self, inputs: AttentionInputs, work: Work, selection: Selection) -> Work:
        if tile_of(selection) is None:
            return replace(work, device_tables=GatheredKeys(selection=selection))
        q_block, kv_block = work.table.block
        # Of 64 queries, two heads are computed together if they see the same keys of the same KV head.
        together = (selection.heads_per_choice, inputs.q.shape[1] // inputs.k.shape[1])
        by_head = work.table.heads > 1 or (work.mask is not None and work.mask.uses_head)
        paired = q_block < BLOCK_SIZE and not by_head and all(heads % 2 == 0 for heads in together)
        alone = q_block < BLOCK_SIZE and not paired
        return tiled_work(inputs, work, selection, dummy=not alone, kv_pairs=kv_block < BLOCK_SIZE and not alone, head_pairs=paired)

    def list_tiles(self, inputs: AttentionInputs, work: Work, kinds: Tensor) -> Work | None:
        fits = work.table.block == (BLOCK_SIZE, BLOCK_SIZE) and max(inputs.q.shape[-1], inputs.v.shape[-1]) <= MAX_DIM
        return listed_work(work, kinds, dummy=True) if fits else None

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return row_delta(out, grad_out, grad_lse)


def _unsupported_reason(inputs: AttentionInputs, work: Work) -> str | None:
    q, v = inputs.q, inputs.v
    if interpreted():
        return "TRITON_INTERPRET=1 is set: the interpreter does not support Gluon"
    if (reason := unsupported_triton()) is not None:
        return reason
    if not q.is_cuda or torch.version.hip is not None:
        return f"tensors on {q.device}{' of a ROCm build of torch' if torch.version.hip else ''}: expected a Hopper GPU"
    if capability(q.device) != HOPPER:
        name, version = torch.cuda.get_device_name(q.device), ".".join(map(str, capability(q.device)))
        return f"{name} has compute capability {version}: expected 9.0 (Hopper)"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}: expected bfloat16 or float16"
    if q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"head dims {q.shape[-1]} and {v.shape[-1]}: expected multiples of 8, since TMA copies 16 bytes"
    if any(block % BLOCK_SIZE for block in work.table.block) and not (work.selects and work.score is None):
        return f"table block {work.table.block}: expected multiples of {BLOCK_SIZE}"
    return limits.unsupported(inputs, work)


def _supports_backward(inputs: AttentionInputs, work: Work) -> bool:
    """Whether the Hopper backward kernels support this work; else the fallback computes it."""
    q, v = inputs.q, inputs.v
    covered = launch.facts(work.q_tiles).covers and launch.facts(work.kv_tiles).covers
    tiles = max(q.shape[-1], v.shape[-1]) <= MAX_DIM and (work.table.block == (BLOCK_SIZE, BLOCK_SIZE) or work.selects)
    return covered and tiles and q.numel() > 0 and work.kv_tiles.length > 0 and (work.score is None or work.joint is not None)


def _one_pass(inputs: AttentionInputs, work: Work, needs: Sequence[bool]) -> bool:
    """Whether the dK/dV kernel computes dQ too."""
    q, v = inputs.q, inputs.v
    if work.kv_tiles.block < BLOCK_SIZE or any(needs):
        return False
    if not computes_dq_with_dkv(q.shape[-1], v.shape[-1], scored=work.score is not None):
        return False
    # Where `hopper.backward_dq` has the bits of this kernel.
    if work.invariant and takes_wide_dkv(q.shape[-1], v.shape[-1]):
        return False
    if not work.invariant and not torch.are_deterministic_algorithms_enabled():
        return True
    # The fixed order follows from a table on the host that does not change.
    if work.device_tables is not None or isinstance(work.table, StaticTable):
        return False
    return ordered_dq_pays(work.table, *order_sizes(q, v, work), scored=work.score is not None, invariant=work.invariant)


def _has_empty_kv(inputs: AttentionInputs) -> bool:
    """Whether a buffer of KV has no elements."""
    return not inputs.k.numel() or (inputs.local_kv is not None and not inputs.local_kv[0].numel())


def _without_empty_buffer(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with KV in one buffer, if one of the two is empty."""
    if inputs.local_kv is None or (inputs.k.numel() and inputs.local_kv[0].numel()):
        return inputs
    k, v = (inputs.k, inputs.v) if inputs.k.numel() else inputs.local_kv
    return AttentionInputs(q=inputs.q, k=k, v=v)


def _in_one_buffer(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with KV in one buffer: a copy, if they are in two."""
    if inputs.local_kv is None:
        return inputs
    local_k, local_v = inputs.local_kv
    return AttentionInputs(q=inputs.q, k=torch.cat([local_k, inputs.k], 2), v=torch.cat([local_v, inputs.v], 2))


def _completed_out(state: State | None) -> Tensor | None:
    return state.completed_out if isinstance(state, HopperState) else None


def _allocate_completed(inputs: AttentionInputs, work: Work, completed: Tensor | None) -> Tensor | None:
    """The final out for rows that are complete before the last step; None if they stay in the running state."""
    if completed is not None or work.complete_q_tiles is None or not launch.facts(work.q_tiles).covers:
        return completed
    out = empty_out(inputs.q, inputs.v.shape[-1], inputs.q.dtype)
    return out if out.stride(3) == 1 else None
