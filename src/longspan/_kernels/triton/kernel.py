"""`TritonKernel`: the kernel protocol over the Triton kernels. Shapes and names as in `longspan._kernels.protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longspan._kernels.few_queries import is_decoding
from longspan._kernels.gpu import launch, limits
from longspan._kernels.gpu.buffers import empty_grads, empty_state, prefill, usable, zero_uncovered
from longspan._kernels.gpu.chosen_keys import adds_grads
from longspan._kernels.gpu.determinism import check_order
from longspan._kernels.gpu.device import capability
from longspan._kernels.gpu.device_library import LOG2_E
from longspan._kernels.gpu.interpreter import computable, interpreted
from longspan._kernels.gpu.listed_tables import BLOCKS, listed_work
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.row_terms import delta as row_delta
from longspan._kernels.gpu.selected_tables import tile_of, tiled_work
from longspan._kernels.paged import PagedWork
from longspan._kernels.protocol import AttentionInputs, BackwardInputs, Capabilities, Grads, Selection, State, Work
from longspan._kernels.triton.config import FINE, Config, prefers_fine_tables
from longspan._kernels.triton.decode_call import attend_contiguous
from longspan._kernels.triton.decode_prepared import DecodeForward
from longspan._kernels.triton.gathered_call import GatheredCall, GatheredKeys, gathered_work
from longspan._kernels.triton.passes import RowTerms, TritonCall
from longspan._masks.block_table import BLOCK_SIZE, BlockTable

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonKernel:
    """The portable GPU kernel. Scores, sums and the running state are float32; probabilities are rounded to the values' dtype for P·V.

    `config` replaces the built-in choice of tile sizes. Gradients of captured tensors are summed by atomic additions, in an order that may
    differ from run to run; everything else is deterministic. With `torch.use_deterministic_algorithms(True)` such gradients raise (or warn,
    with `warn_only`), except for tensors of which every pair reads a different element.

    Rows are isolated: non-finite values in tokens that a row may not see do not change its bits.
    """

    name = "triton"

    def __init__(self, *, config: Config | None = None) -> None:
        self.config = config

    def capabilities(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> Capabilities:
        # The interpreter truncates where the hardware rounds.
        return Capabilities(unsupported=_unsupported_reason(inputs, work), rounds_kv_grads_once=not interpreted())

    def block_size(self, inputs: AttentionInputs, table: BlockTable) -> tuple[int, int]:
        """Finer tiles where many tiles are partial."""
        q, counts = inputs.q, table.counts()
        share = counts.partial / max(1, counts.partial + counts.full)
        dims = {"d": launch.padded(q.shape[-1]), "e": launch.padded(inputs.v.shape[-1])}
        fine = prefers_fine_tables(capability=capability(q.device), dtype=q.dtype, partial_share=share, **dims)
        return FINE if fine else table.block

    def check(self, inputs: AttentionInputs, work: Work, *, needs: Sequence[bool] = ()) -> None:
        q = inputs.q
        if not launch.capturing(q.device):  # the check may read captured tensors, which a capture forbids
            check_lookups(work, q.shape[0], q.shape[1])
        check_order(work, needs, q)

    def forward(self, inputs: AttentionInputs, work: Work, *, state: State | None, final: bool, max_scores: bool) -> State:
        if final and state is None and not max_scores and is_decoding(inputs, work):
            self.check(inputs, work)
            out, lse = attend_contiguous(inputs.q, inputs.k, inputs.v, _decode_work(work))
            return State(out=out, lse=lse)
        dtype, inputs = inputs.q.dtype, _computable(inputs)
        q, v = inputs.q, inputs.v
        if isinstance(work.device_tables, GatheredKeys):
            assert final and not max_scores
            gathered = GatheredCall(inputs, work).forward(state)
            gathered.out = gathered.out.to(dtype)
            return gathered
        old = None if state is None else usable(state, max_scores=max_scores)
        # In place, rows that see none of these tiles keep their state and need no CTA.
        in_place = old is not None and not final
        result = old if in_place else empty_state(q, v.shape[-1], q.dtype if final else torch.float32, max_scores=max_scores)
        assert result is not None
        if result.out.numel():
            if not in_place and not launch.facts(work.q_tiles).covers:
                prefill(result, old)
            TritonCall(inputs, work, capability=capability(q.device), config=self.config).forward(result, old, busy_only=in_place)
        if final and result.out.dtype != dtype:
            result.out = result.out.to(dtype)
        return result

    def prepare_forward(self, inputs: AttentionInputs, work: Work) -> DecodeForward | None:
        """Only for few queries over many keys."""
        if interpreted() or not is_decoding(inputs, work):
            return None
        return DecodeForward(inputs.q, inputs.k, inputs.v, _decode_work(work))

    def prepare_backward(self, tensors: BackwardInputs, work: Work) -> None:
        return None

    def backward(self, tensors: BackwardInputs, work: Work, *, wide: bool, into: Grads | None = None) -> Grads:
        if work.score is not None and work.joint is None:
            raise ValueError(
                f"score_mod {work.score.name!r}: expected work.joint for a backward pass, got None; make it with joint_of(program)"
            )
        check_order(work, tensors.needs, tensors.inputs.q)
        dtype = torch.float32 if wide else tensors.inputs.q.dtype
        inputs, grad_out = _computable(tensors.inputs), computable(tensors.grad_out)
        if isinstance(work.device_tables, GatheredKeys):
            assert into is None and not wide
            delta = self.delta(tensors.out, grad_out, tensors.grad_lse) if tensors.delta is None else tensors.delta.contiguous()
            grads = GatheredCall(inputs, work).backward(grad_out, tensors.lse.contiguous(), delta)
            grads.q, grads.k, grads.v = (g.to(dtype) for g in (grads.q, grads.k, grads.v))
            return grads
        grads = empty_grads(inputs, work, tensors.needs, wide=wide) if into is None else into
        zero_uncovered(grads, work, into=into is not None)
        call = TritonCall(inputs, work, capability=capability(inputs.q.device), config=self.config)
        terms = self._row_terms(tensors, grad_out, work, accumulates=into is not None)
        if grads.q.numel() and tensors.side != "kv":
            call.dq(grad_out, terms, grads.q, grads.captured, add=into is not None)
        if grads.k.numel() and tensors.side != "q":
            call.dkdv(grad_out, terms, grads.k, grads.v)
        if into is None and grads.q.dtype != dtype:
            grads.q, grads.k, grads.v = (g.to(dtype) for g in (grads.q, grads.k, grads.v))
        return grads

    def _row_terms(self, tensors: BackwardInputs, grad_out: Tensor, work: Work, *, accumulates: bool) -> RowTerms:
        """The terms per query row. dQ's kernel computes delta if nobody did, out and grad_out are complete and every row has a CTA."""
        lse, grad_lse, delta = tensors.lse.contiguous(), tensors.grad_lse, tensors.delta
        # dQ's kernel writes the norm; without that pass it is made here, with the same bits.
        norm = torch.empty_like(lse) if tensors.side != "kv" else torch.where(lse == -torch.inf, torch.inf, lse * LOG2_E.value)
        if delta is None and not accumulates and launch.facts(work.q_tiles).covers:
            grad_lse = None if grad_lse is None else grad_lse.contiguous()
            return RowTerms(lse=lse, norm=norm, delta=torch.empty_like(lse), out=computable(tensors.out), grad_lse=grad_lse)
        delta = self.delta(tensors.out, grad_out, grad_lse) if delta is None else delta
        return RowTerms(lse=lse, norm=norm, delta=delta.contiguous())

    def selection_block(
        self, inputs: AttentionInputs, selection: Selection, *, captured_grads: bool, by_head: bool
    ) -> tuple[int, int] | None:  # fmt: skip
        # Heads of a group are rows of one tile of gathered keys: a key that one of them does not see must not be in it.
        gathered = not captured_grads and not by_head and adds_grads(selection)
        return tile_of(selection) or ((BLOCK_SIZE, BLOCK_SIZE) if gathered else None)

    def select(self, inputs: AttentionInputs, work: Work, selection: Selection) -> Work:
        if tile_of(selection) is None:
            return gathered_work(work, selection)
        return tiled_work(inputs, work, selection, dummy=False)

    def list_tiles(self, inputs: AttentionInputs, work: Work, kinds: Tensor) -> Work | None:
        return listed_work(work, kinds, dummy=False) if all(block in BLOCKS for block in work.table.block) else None

    def delta(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        return row_delta(out, grad_out, grad_lse)


def _decode_work(work: Work) -> PagedWork:
    return PagedWork(
        scale=work.scale, mask=work.mask, mask_captured=work.mask_captured, score=work.score, score_captured=work.score_captured
    )  # fmt: skip


def _computable(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs in dtypes that the kernels compute in: others only in the interpreter, which has no bfloat16."""
    q, k, v = map(computable, (inputs.q, inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v)


def _unsupported_reason(inputs: AttentionInputs, work: Work) -> str | None:
    q = inputs.q
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype}: expected bfloat16, float16 or float32"
    if interpreted():
        if q.is_cuda:
            return "TRITON_INTERPRET=1 is set: the interpreter supports CPU tensors only"
    elif not q.is_cuda:
        return f"tensors on {q.device}: expected a CUDA device"
    elif capability(q.device) < (8, 0):
        return f"{torch.cuda.get_device_name(q.device)}: expected compute capability 8.0 (Ampere) or later"
    return limits.unsupported(inputs, work)
