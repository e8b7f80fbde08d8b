"""The passes of one call as launches of the Hopper kernels: as many programs as the device has multiprocessors, which share the items."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.launch_call import Cut, LaunchCall, Pass
from longspan._kernels.gpu.prepared_launch import PreparedLaunch
from longspan._kernels.gpu.uniform_lookup import flat_functions
from longspan._kernels.hopper.backward_dkv import dkv_kernel
from longspan._kernels.hopper.backward_dq import dq_kernel, row_terms_kernel
from longspan._kernels.hopper.config import Step, dq_part, forward_step, keys_step, queries_step
from longspan._kernels.hopper.dq_order import turns
from longspan._kernels.hopper.epilogue import MAX_SPLIT_DIM
from longspan._kernels.hopper.forward import forward_kernel
from longspan._kernels.hopper.item_order import Order, best_order, last_rounds
from longspan._kernels.hopper.makespan import walks
from longspan._kernels.hopper.split_kv import Pieces, pieces
from longspan._kernels.hopper.workspace import counter, counter_and_locks, counter_and_states
from longspan._kernels.protocol import AttentionInputs, State, Work

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_L2_BYTES = 32 * 2**20  # of keys and values that the heads at work should not exceed


class HopperCall(LaunchCall):
    """The tensors of one call, each as the copy engine can read it. Its methods launch."""

    def __init__(self, inputs: AttentionInputs, work: Work) -> None:
        q, k, v = map(streamable, (inputs.q, inputs.k, inputs.v))
        super().__init__(replace(inputs, q=q, k=k, v=v), work)
        self.own: tuple[Tensor | None, Tensor | None] = (None, None)
        self.own_rows = 0
        if inputs.local_kv is not None:
            local_k, local_v = inputs.local_kv
            self.own, self.own_rows = (streamable(local_k), streamable(local_v)), local_k.shape[2]

    def forward(self, result: State, old: State | None, *, busy_only: bool, done: Tensor | None = None) -> None:
        """Fill the rows of `result` that see something, folding `old` in; they may be the same. Given `done`, rows that are complete
        (`Work.complete_q_tiles`) go there instead of to `result.out`.
        """
        old_out, old_lse, old_max_scores = (None, None, None) if old is None else (old.out, old.lse, old.max_scores)
        out_by_tma, complete_by_tma, old_by_tma = self._moved_by_tma(result, old, done)
        tensors = {
            "q_desc": self.q, "k_desc": self.k, "v_desc": self.v, "out_ptr": result.out, "lse_ptr": result.lse,
            "max_scores_ptr": result.max_scores, "old_out_ptr": old_out, "old_lse_ptr": old_lse, "old_max_scores_ptr": old_max_scores,
            "complete_out_ptr": done, "q_ptr": self.q,
            "out_desc": out_by_tma, "complete_out_desc": complete_by_tma, "old_out_desc": old_by_tma,
            "local_k_desc": self.own[0], "local_v_desc": self.own[1],
        }  # fmt: skip
        assert done is None or self.work.complete_q_tiles is not None
        # Part of the key of the prepared launch, which holds the flags on the device.
        completed = None if done is None or self.work.complete_q_tiles is None else bytes(self.work.complete_q_tiles.tolist())
        settings = {"SCALE_IN_EXP": self.work.score is None and self.work.scale > 0, "completed": completed}
        self.launch(Pass(name="forward", kernel=forward_kernel, tensors=tensors, settings=settings, busy_only=busy_only))

    def _moved_by_tma(self, result: State, old: State | None, done: Tensor | None) -> tuple[Tensor | None, ...]:
        """(out, out of complete tiles, old out) for the state warp; Nones if there is no running state or TMA cannot move it."""
        tensors = [t for t in (result.out, done, None if old is None else old.out) if t is not None]
        has_state = old is not None or result.out.dtype == torch.float32
        float32_state = old is None or old.out.dtype == torch.float32
        fits = width(self.v.shape[-1]) <= MAX_SPLIT_DIM.value
        if not has_state or not float32_state or not fits or result.max_scores is not None or not all(map(launch.describable, tensors)):
            return None, None, None
        return result.out, done, None if old is None else old.out

    def rows(self, out: Tensor | None, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None, norm: Tensor, delta: Tensor) -> None:
        """Fill norm and, if out is not None, delta [B, H, Q]: the row terms of both backward kernels."""
        B, H, Q, E = grad_out.shape
        m = 64
        with torch.cuda.device(self.q.device):
            row_terms_kernel[(B * H * -(-Q // m),)](
                out, grad_out, lse, grad_lse, norm, delta, (grad_out if out is None else out).stride(), grad_out.stride(), H, Q,
                M=m, E=E, EP=launch.padded(E), num_warps=4,
            )  # fmt: skip

    def dq(
        self, grad_out: Tensor, norm: Tensor, delta: Tensor, dq: Tensor, captured: Sequence[Tensor | None], *, add: bool
    ) -> None:  # fmt: skip
        """Fill dq, or add to it; add to gradients of captured tensors that are not None."""
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "do_ptr": grad_out, "norm_ptr": norm, "delta_ptr": delta, "dq_ptr": dq,
            "local_k_ptr": self.own[0], "local_v_ptr": self.own[1],
        }  # fmt: skip
        grads = tuple(g for g in captured if g is not None) or (norm,)
        needs = tuple(g is not None for g in captured)
        settings = {"ADD": add, "SCATTER": any(needs)}
        self.launch(Pass(name="dq", kernel=dq_kernel, tensors=tensors, settings=settings, needs=needs, grads=grads, busy_only=add))

    def dkdv(
        self, grad_out: Tensor, norm: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, dq: Tensor | None, *, ordered: bool = False
    ) -> None:  # fmt: skip
        """Fill dk and dv; add to dq, float32, where it is given; if `ordered`, in an order that is always the same."""
        head_parts = walks_of(self.q, self.v, self.work)
        to_dk, to_dv = dk, dv
        if head_parts > 1:  # each part of a KV head's query heads fills its own dK and dV, summed below
            to_dk, to_dv = (
                torch.empty((t.shape[0], t.shape[1] * head_parts, *t.shape[2:]), dtype=torch.float32, device=t.device) for t in (dk, dv)
            )
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "do_ptr": grad_out, "norm_ptr": norm, "delta_ptr": delta, "dk_ptr": to_dk,
            "dv_ptr": to_dv, "dq_ptr": dq, "local_k_ptr": self.own[0], "local_v_ptr": self.own[1],
        }  # fmt: skip
        settings, needs = {"ordered": ordered, "head_parts": head_parts}, (False,) * len(self.work.score_captured)
        self.launch(Pass(name="dkdv", kernel=dkv_kernel, tensors=tensors, settings=settings, needs=needs))
        if head_parts > 1:
            for total, parts in ((dk, to_dk), (dv, to_dv)):
                total.copy_(parts.unflatten(1, (-1, head_parts)).sum(2))

    def prepare(self, one: Pass) -> PreparedLaunch:
        q, v, which, tensors, known = self.q, self.v, one.name, one.tensors, dict(one.settings)
        d, e = width(q.shape[-1]), width(v.shape[-1])
        tiles: dict[str, Callable[[Tensor], TensorDescriptor]]
        added = 0  # bytes of a query's dQ to which other programs add too
        suffix = "desc" if which == "forward" else "ptr"
        k_name, v_name, local_k_name, local_v_name = (f"{name}_{suffix}" for name in ("k", "v", "local_k", "local_v"))
        if which == "forward":
            step = forward_step(d, e)
            tiles = {"q_desc": _tiles(step.m // 2), k_name: _tiles(step.n), v_name: _tiles(step.n)}
            tiles |= {name: _tiles(step.m // 2) for name in ("out_desc", "complete_out_desc", "old_out_desc") if tensors[name] is not None}
        elif which == "dq":
            step = queries_step(d, e, scored=self.work.score is not None)
            tiles = {"q_ptr": _tiles(step.m // 2), k_name: _tiles(step.n), v_name: _tiles(step.n), "do_ptr": _tiles(step.m // 2)}
        else:
            dq = tensors["dq_ptr"]
            step = keys_step(d, with_dq=dq is not None)
            tiles = {"q_ptr": _tiles(step.m), k_name: _tiles(step.n), v_name: _tiles(step.n), "do_ptr": _tiles(step.m)}
            if dq is not None:
                queries, dims = dq_part(d, step.m)
                tiles["dq_ptr"] = partial(described, rows=queries, columns=dims)
                added = dq.element_size() * q.shape[-1]
            rows = q.shape[0] * q.shape[1] * q.shape[2]
            begins = all(t is not None and t.data_ptr() % 16 == 0 for t in (tensors["norm_ptr"], tensors["delta_ptr"]))
            aligned = begins and launch.facts(self.work.q_tiles).aligned and q.shape[2] % 4 == 0 and rows < 2**31
            if aligned:
                tiles["norm_ptr"] = tiles["delta_ptr"] = partial(line, size=step.m)
            known["ALIGNED"] = aligned
        if tensors[local_k_name] is not None:
            tiles |= {local_k_name: tiles[k_name], local_v_name: tiles[v_name]}
        programs = programs_at_once(q.device)
        cut = Cut(
            m=_items_of(step, which), n=step.n, l2_bytes=_L2_BYTES, ctas_in_flight=programs, added_bytes=added,
            head_parts=known.get("head_parts", 1),
        )  # fmt: skip
        items, shared = self.work_arguments(one, cut)
        corners, flat = flat_functions(self.work.score, launch.options(self.work, q.dtype)) if which == "forward" else (None, None)
        more: dict[str, Any] = {"CORNERS": corners, "FLAT": flat, "STAGES": step.stages, "REGISTERS": step.registers, "BM": step.m, "DS": 2}
        more["local_tokens"] = self.own_rows
        made: Callable[[], tuple[Tensor | None, ...]] = partial(counter, q.device)
        if which == "dkdv":
            more |= {"dq_order_ptr": None, "dq_order_before": None, "semaphores_per_head": 0}
            if known["ordered"]:
                found = turns(self.work.table.transposed, shared["shared"], q.device)
                shared["order"] = found.order
                more |= {"dq_order_ptr": found.ptr, "dq_order_before": found.before}
                more["semaphores_per_head"] = self.work.table.q_tiles * (self.work.q_tiles.block // step.m)
            made = partial(counter_and_locks, q.device, q.shape[0] * q.shape[1] * more["semaphores_per_head"])
        if which == "forward":
            # Pieces leave no peaks: where those are asked for, nothing is cut.
            cuttable = tensors["max_scores_ptr"] is None and e <= MAX_SPLIT_DIM.value
            order, pieces_cut = self._planned(items, shared, programs, cuttable=cuttable)
            more |= {"heavy_rows": order.heavy, "light_group": order.late, "heavy_items": items // max(1, shared["rows"]) * order.heavy}
            shared["group"], items = order.group, pieces_cut.items
            more |= {"unsplit": pieces_cut.uncut, "split_items": pieces_cut.cut, "parts": pieces_cut.parts, "wide_part": pieces_cut.wide}
            made = partial(counter_and_states, q.device, pieces_cut, step.m, e)
            complete = self.work.complete_q_tiles
            more["complete_flags"] = None if tensors["complete_out_ptr"] is None or complete is None else launch.flags(complete, q.device)
        return PreparedLaunch(
            kernel=one.kernel,
            options={"num_warps": 4, "maxnreg": step.start_registers},
            ctas=min(items, programs),
            device=q.device,
            descriptors=tiles,
            constants={**known, **shared, **more, "items": items, "D": q.shape[-1], "DP": d, "EP": e},
            workspace=made,
        )

    def _planned(self, items: int, shared: dict[str, Any], programs: int, *, cuttable: bool) -> tuple[Order, Pieces]:
        """(in which order a forward launch takes its items, which of them are cut)."""
        table, subs = self.work.table, shared["M_SUBS"]
        work = (table.tiles_per_row[table.heavy_first[: shared["rows"]].long()] * shared["N_SUBS"]).tolist()
        heads, same = (1, 1) if shared["PER_HEAD"] else (shared["heads"], shared["shared"])
        batches = items // max(1, len(work) * subs * heads)
        keys = table.batch * self.kv_len * (self.q.shape[-1] + self.v.shape[-1]) * self.q.element_size()
        order = best_order(
            work, heads=heads, batches=batches, subs=subs, shared=same, fit=same * (_L2_BYTES // max(1, keys)), programs=programs,
            ending=lambda lengths: pieces(lengths, items, programs=programs, cuttable=cuttable)[1],
        )  # fmt: skip
        lengths = order.lengths(work, heads=heads * batches, subs=subs, count=last_rounds(items, programs))
        return order, pieces(lengths, items, programs=programs, cuttable=cuttable)[0]


def _items_of(step: Step, which: str) -> int:
    """Queries of an item. Over keys, an item is a tile of keys, and steps of queries are the kernel's own affair."""
    return 128 if which == "dkdv" else step.m


def _tiles(rows: int) -> Callable[[Tensor], TensorDescriptor]:
    return partial(described, rows=rows)


def described(tensor: Tensor, *, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The copy engine's view of a tensor that is `launch.describable`, in tiles laid out in shared memory as the matrix units read them."""
    block = [1, 1, rows, columns or width(tensor.shape[3])]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, *launch.extents(tensor), block, layout)


def line(tensor: Tensor, *, size: int) -> TensorDescriptor:
    """The copy engine's view of a contiguous float32 tensor, as one line in pieces of `size`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(tensor, [tensor.numel()], [1], [size], layout)


def width(dim: int) -> int:
    """A head dim as these kernels hold it."""
    return max(64, launch.padded(dim))


def walks_of(q: Tensor, v: Tensor, work: Work) -> int:
    """Into how many parts the query heads of a key head are split, backward, lest programs idle."""
    if work.concurrent:
        return 1
    return walks(work.table.transposed, v.shape[0] * v.shape[1], q.shape[1] // v.shape[1], q.shape[-1] + v.shape[-1])


def streamable(tensor: Tensor) -> Tensor:
    """A tensor as the copy engine can read it: itself, or a copy."""
    return tensor if launch.describable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@cache
def programs_at_once(device: torch.device) -> int:
    """One per multiprocessor, but for those that LONGSPAN_SM_MARGIN leaves to others.

    Programs stay until the last item is done, and fill a multiprocessor. A communication library's kernel that becomes ready meanwhile
    would wait for all of it.
    """
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    margin = os.environ.get("LONGSPAN_SM_MARGIN", "0")
    if not margin.isdecimal() or int(margin) >= count:
        raise ValueError(f"LONGSPAN_SM_MARGIN: expected a number of multiprocessors from 0 to {count - 1}, got {margin!r}")
    return count - int(margin)
