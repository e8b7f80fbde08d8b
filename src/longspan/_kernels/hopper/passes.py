"""Launches of the Hopper kernels for the passes of one call. All kernels are persistent, with one CTA per SM."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longspan._kernels.gpu import launch
from longspan._kernels.gpu.codegen import Options
from longspan._kernels.gpu.compile_options import FUSED, REGISTERS
from longspan._kernels.gpu.hoisted_lookups import hoisted_options, uniform_function
from longspan._kernels.gpu.launch_call import Cut, LaunchCall, Pass
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, Tensors, layout_launch
from longspan._kernels.gpu.row_bounds import bounds_functions
from longspan._kernels.gpu.row_terms import empty_padded_rows, padded_length, rows_by_tile
from longspan._kernels.gpu.selected_tables import computes_heads_alone, pairs_of
from longspan._kernels.gpu.uniform_lookup import flat_functions
from longspan._kernels.gpu.workspace import Workspace
from longspan._kernels.hopper.backward_dkv import dkv_kernel
from longspan._kernels.hopper.backward_dq import dq_kernel, row_terms_kernel
from longspan._kernels.hopper.config import (
    TileConfig,
    dkv_config,
    dq_config,
    dq_tile,
    forward_config,
    forward_three_config,
    half_dkv_config,
    head_dim_parts,
    takes_late_dq,
    takes_one_loop,
    takes_three_groups,
    takes_turns,
    takes_wide_dkv,
    wide_dkv_config,
)
from longspan._kernels.hopper.descriptors import part_descriptors, row_descriptor, tile_descriptor, width
from longspan._kernels.hopper.dq_order import choose_order, dq_order, heads_of_tables
from longspan._kernels.hopper.epilogue import MAX_SPLIT_DIM
from longspan._kernels.hopper.first_items import first_records
from longspan._kernels.hopper.forward import forward_kernel
from longspan._kernels.hopper.forward_producer import GROUPS
from longspan._kernels.hopper.gqa_split import head_parts_of, order_sizes
from longspan._kernels.hopper.half_blocks import HALF
from longspan._kernels.hopper.half_tiles import half_tile_items
from longspan._kernels.hopper.isolation import CHECKED_ROWS, CHECKED_TERMS, isolates, unbounded_kernel
from longspan._kernels.hopper.item_order import ItemOrder, best_order, diagonal_first, outlier_rows, simulated_items
from longspan._kernels.hopper.round_grads import BLOCK, round_kernel
from longspan._kernels.hopper.split_kv import KvSplit, best_split
from longspan._kernels.protocol import AttentionInputs, Grads, State, Work
from longspan._masks.static_table import StaticTable

L2_BYTES = 32 * 2**20  # KV of the heads in use at once should fit into so much of L2
_FORWARD_THREE = "forward by three groups"  # name of a pass


class RowGrads(NamedTuple):
    """Per query row: the gradient of out, and `norm` and `delta` of `row_terms`, in the layout of `padded_rows`.

    unbounded: the result of `HopperCall.unbounded`.
    """

    grad_out: Tensor
    norm: Tensor
    delta: Tensor
    unbounded: Tensor | None = None


class HopperCall(LaunchCall):
    """The tensors of one call, copied if TMA cannot read them. Its methods launch the kernels."""

    def __init__(self, inputs: AttentionInputs, work: Work) -> None:
        q, k, v = streamable(inputs.q), streamable(inputs.k), streamable(inputs.v)
        super().__init__(inputs if q is inputs.q and k is inputs.k and v is inputs.v else replace(inputs, q=q, k=k, v=v), work)
        self._local_kv: tuple[Tensor | None, Tensor | None] = (None, None)
        self._local_tokens = 0
        if inputs.local_kv is not None:
            local_k, local_v = inputs.local_kv
            self._local_kv, self._local_tokens = (streamable(local_k), streamable(local_v)), local_k.shape[2]

    def invariant_order(self, one: Pass) -> launch.RunOrder:
        if one.name == "forward":
            return "descending"  # it walks partial runs first
        return "ascending" if one.name == "dq" else "by kind"  # the kernel of dK and dV merges runs itself (MERGED)

    def forward(self, result: State, old: State | None, *, done: Tensor | None = None) -> None:
        """Fill the rows of `result` that see a key, merged with `old`, which may be the same state.

        If `done` is not None, outputs of complete query tiles (`Work.complete_q_tiles`) go there instead of to `result.out`.
        """
        self.launch(self.forward_pass(result, old, done=done))

    def forward_pass(self, result: State, old: State | None, *, done: Tensor | None = None) -> Pass:
        """The pass that `forward` launches."""
        if old is None and done is None and self._takes_three_groups(result):
            from longspan._kernels.hopper.forward_three import forward_three_kernel  # here: the import takes 10 ms of the first call

            tensors: dict[str, Tensor | None] = {
                "q_desc": self.q, "k_desc": self.k, "v_desc": self.v, "out_ptr": result.out, "lse_ptr": result.lse, "q_ptr": self.q,
            }  # fmt: skip
            settings: dict[str, Any] = {"SCALE_IN_EXP": self.work.scale > 0, "ISOLATE": isolates(self.work)}
            return Pass(name=_FORWARD_THREE, kernel=forward_three_kernel, tensors=tensors, settings=settings, busy_only=True)
        old_out, old_lse, old_max_scores = (None, None, None) if old is None else (old.out, old.lse, old.max_scores)
        out_by_tma, complete_by_tma, old_by_tma = self._moved_by_tma(result, old, done)
        tensors = {
            "q_desc": self.q, "k_desc": self.k, "v_desc": self.v, "out_ptr": result.out, "lse_ptr": result.lse,
            "max_scores_ptr": result.max_scores, "old_out_ptr": old_out, "old_lse_ptr": old_lse, "old_max_scores_ptr": old_max_scores,
            "complete_out_ptr": done, "q_ptr": self.q,
            "out_desc": out_by_tma, "complete_out_desc": complete_by_tma, "old_out_desc": old_by_tma,
            "local_k_desc": self._local_kv[0], "local_v_desc": self._local_kv[1],
        }  # fmt: skip
        tails = self._tails(None)
        tensors |= {f"{name}_tail_desc": tails[f"{name}_tail_ptr"] for name in ("q", "k", "local_k")}
        assert done is None or self.work.complete_q_tiles is not None
        # Part of the key of the prepared launch, which holds the flags on the device.
        completed = None if done is None or self.work.complete_q_tiles is None else bytes(self.work.complete_q_tiles.tolist())
        scale_in_exp = self.work.score is None and self.work.scale > 0
        settings = {"SCALE_IN_EXP": scale_in_exp, "completed": completed, "ISOLATE": isolates(self.work)}
        return Pass(name="forward", kernel=forward_kernel, tensors=tensors, settings=settings, busy_only=True)

    def _takes_three_groups(self, result: State) -> bool:
        """Whether `hopper.forward_three` computes a forward pass without an old state: it supports the call and is faster."""
        q, v, work, table = self.q, self.v, self.work, self.work.table
        if max(width(q.shape[-1]), width(v.shape[-1])) > 64 or result.max_scores is not None or result.out.dtype != q.dtype:
            return False
        if work.score is not None or work.device_tables is not None or work.invariant or self._local_kv[0] is not None:
            return False
        if work.q_tiles.row is not None or work.kv_tiles.row is not None or isinstance(table, StaticTable) or table.tiles is not None:
            return False
        if (table.batch, table.heads, work.q_tiles.block, work.kv_tiles.block) != (1, 1, 128, 128):
            return False
        items = half_tile_items(table, work.kv_tiles)
        visible, walked = int(table.tiles_per_row.sum()), int(items.kv_tiles.sum())
        return takes_three_groups(heads=q.shape[0] * q.shape[1], items=len(items.items), walked=walked, visible=visible)

    def _moved_by_tma(self, result: State, old: State | None, done: Tensor | None) -> tuple[Tensor | None, ...]:
        """(out, out of complete tiles, old out) for the state warp; Nones if there is no running state or TMA cannot move it.

        The state warp moves 128 rows of one head: items of two heads load and store their states themselves.
        """
        tensors = [t for t in (result.out, done, None if old is None else old.out) if t is not None]
        has_state = old is not None or result.out.dtype == torch.float32
        float32_state = old is None or old.out.dtype == torch.float32
        fits = width(self.v.shape[-1]) <= MAX_SPLIT_DIM.value
        if (
            not has_state
            or not float32_state
            or not fits
            or pairs_of(self.work)[1]
            or result.max_scores is not None
            or not all(map(launch.describable, tensors))
        ):
            return None, None, None
        return result.out, done, None if old is None else old.out

    @property
    def program_options(self) -> Options:
        return hoisted_options(self.work.score, self.work.joint, super().program_options)

    def unbounded(self, norm: Tensor, delta: Tensor, flag: Tensor, *, scanned: bool) -> list[tuple[PreparedLaunch, Tensors]]:
        """Launches, with their tensors, that set an int32 `flag` if a backward step has to be isolated (`hopper.isolation`).

        scanned: check K and V too, in one launch for each buffer of KV. Kernels with dQ check the keys of their items themselves.
        """
        terms, d, e = norm.shape[0] * norm.shape[1] * padded_length(norm.shape[2]), self.q.shape[-1], self.v.shape[-1]
        buffers = [(k, v) for k, v in ((self.k, self.v), self._local_kv) if k is not None and v is not None] if scanned else [(None, None)]
        launches: list[tuple[PreparedLaunch, Tensors]] = []
        for k, v in buffers:
            tensors = {"k_ptr": k, "v_ptr": v, "norm_ptr": norm, "delta_ptr": delta, "flag_ptr": flag}
            (batch, heads, length), ctas = (0, 0, 0) if k is None else k.shape[:3], -(-terms // CHECKED_TERMS)
            if k is not None:
                ctas = batch * heads * -(-length // CHECKED_ROWS)
            constants = {
                "k_stride": (1,) * 4 if k is None else k.stride(), "v_stride": (1,) * 4 if v is None else v.stride(),
                "heads": heads, "length": length, "terms": terms, "M": CHECKED_ROWS, "TERMS": CHECKED_TERMS,
                "D": d, "DP": launch.padded(d), "E": e, "EP": launch.padded(e),
            }  # fmt: skip
            launches.append((layout_launch(unbounded_kernel, tensors, constants, ctas), tensors))
        return launches

    def row_terms(self, tensors: Tensors) -> PreparedLaunch:
        """The launch of `row_terms_kernel`, which fills norm and, if out is not None, delta [B, H, Q], and sets a float32 dQ to 0.

        tensors: q_ptr, out_ptr, do_ptr, lse_ptr, grad_lse_ptr, norm_ptr, delta_ptr, dq_ptr, counters_ptr, k_ptr, v_ptr, flag_ptr.
        """
        return row_terms_launch(self.q.shape, tensors)

    @property
    def rounds_with_scale(self) -> bool:
        """Whether `rounding` multiplies dQ by the scale, and the dK/dV kernel before it does not.

        On an H200, that takes up to 2 % less time without a score mod, and about 4 % more with ALiBi (comparing two runs).
        """
        return self.work.score is None

    @property
    def rounding_scale(self) -> float:
        """The factor of `rounding` for dQ."""
        return float(self.work.scale) if self.rounds_with_scale else 1.0

    def rounding(self, tensors: Tensors, parts: int) -> PreparedLaunch:
        """The launch of `round_kernel`, which takes `rounding_scale`. parts: into how many parts the query heads of a KV head are divided.

        tensors: total_ptr, dq_ptr, dk_parts_ptr, dk_ptr, dv_parts_ptr, dv_ptr.
        """
        sizes = [0 if t is None else t.numel() for t in (tensors["dq_ptr"], tensors["dk_ptr"], tensors["dv_ptr"])]
        heads = self.v.shape[0] * self.v.shape[1]
        constants = {
            "dq_size": sizes[0], "dk_size": sizes[1], "dv_size": sizes[2], "dk_head": sizes[1] // heads, "dv_head": sizes[2] // heads,
            "PARTS": parts, "SIZE": BLOCK,
        }  # fmt: skip
        return layout_launch(round_kernel, tensors, constants, sum(-(-n // BLOCK) for n in sizes))

    def dq_pass(self, row_grads: RowGrads, dq: Tensor, captured: Sequence[Tensor | None], *, add: bool) -> Pass:
        """Fill dq, or add to it, and add to the gradients in `captured` that are not None."""
        grad_out, norm, delta, unbounded = row_grads
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "do_ptr": grad_out, "norm_ptr": norm, "delta_ptr": delta, "dq_ptr": dq,
            "local_k_ptr": self._local_kv[0], "local_v_ptr": self._local_kv[1], "unbounded_ptr": unbounded, **self._tails(grad_out),
        }  # fmt: skip
        grads = tuple(g for g in captured if g is not None) or (norm,)
        needs, q_dim, v_dim = tuple(g is not None for g in captured), self.q.shape[-1], self.v.shape[-1]
        settings = {"ADD": add, "SCATTER": any(needs), "BY_BLOCK": self.work.invariant and not takes_wide_dkv(q_dim, v_dim)}
        return Pass(name="dq", kernel=dq_kernel, tensors=tensors, settings=settings, needs=needs, grads=grads, busy_only=add)

    def dkdv_pass(self, row_grads: RowGrads, dk: Tensor, dv: Tensor, dq: Tensor | None, *, ordered: bool, rounded: bool) -> Pass:
        """Fill dk and dv, each KV head `head_parts_of` times, and add to dq (float32) if it is not None; if `ordered`, in a fixed order.

        rounded: `rounding` follows.
        """
        grad_out, norm, delta, unbounded = row_grads
        by_tile = not launch.facts(self.work.q_tiles).aligned
        norm_tiles, delta_tiles = (rows_by_tile(t, self.work.q_tiles) if by_tile else t for t in (norm, delta))
        tensors = {
            "q_ptr": self.q, "k_ptr": self.k, "v_ptr": self.v, "do_ptr": grad_out, "norm_ptr": norm_tiles, "delta_ptr": delta_tiles,
            "dk_ptr": dk, "dv_ptr": dv, "dq_ptr": dq, "local_k_ptr": self._local_kv[0], "local_v_ptr": self._local_kv[1],
            "norm_rows_ptr": None if unbounded is None else norm, "delta_rows_ptr": None if unbounded is None else delta,
            "unbounded_ptr": unbounded, **self._tails(grad_out),
        }  # fmt: skip
        kernel = dkv_kernel
        if dq is None and (takes_wide_dkv(self.q.shape[-1], self.v.shape[-1]) or self.work.kv_tiles.block < 128):
            from longspan._kernels.hopper.backward_wide import wide_dkv_kernel  # here: the import takes 20 ms of the first call

            del tensors["dq_ptr"]
            kernel = wide_dkv_kernel
        scales = not (rounded and self.rounds_with_scale)
        settings = {"SCALE_DQ": scales, "ordered": ordered, "head_parts": head_parts_of(self.q, self.v, self.work), "BY_TILE": by_tile}
        needs = (False,) * len(self.work.score_captured)
        return Pass(name="dkdv", kernel=kernel, tensors=tensors, settings=settings, needs=needs)

    def _tails(self, grad_out: Tensor | None) -> dict[str, Tensor | None]:
        """The tensors of which kernels read the last columns by descriptors of their own (`head_dim_parts`); Nones if they do not."""
        d_tail, e_tail = head_dim_parts(self.q.shape[-1])[1], head_dim_parts(self.v.shape[-1])[1]
        local_k, local_v = self._local_kv
        return {
            "q_tail_ptr": self.q if d_tail else None, "k_tail_ptr": self.k if d_tail else None, "v_tail_ptr": self.v if e_tail else None,
            "do_tail_ptr": grad_out if e_tail else None, "local_k_tail_ptr": local_k if d_tail else None,
            "local_v_tail_ptr": local_v if e_tail else None,
        }  # fmt: skip

    def _prepare_three_groups(self, one: Pass) -> PreparedLaunch:
        """The launch of `forward_three.forward_three_kernel`."""
        q, config, ctas = self.q, forward_three_config(), persistent_ctas(self.q.device)
        _, shared = self.work_arguments(one, Cut(m=128, n=config.n, l2_bytes=L2_BYTES, ctas_in_flight=ctas))
        items, *runs = half_tiles = half_tile_items(self.work.table, self.work.kv_tiles)
        rows, heads = len(items), q.shape[0] * q.shape[1]
        order = self._order(items[:, 5].tolist(), rows * heads, shared, ctas, subs=1, batches=q.shape[0], splittable=False)
        numbers, item_table, first, last, full = launch.to_device([torch.arange(rows, dtype=torch.int32), items.flatten(), *runs], q.device)
        shared |= {
            "order": numbers, "item_table": item_table, "runs": (full, first, last), "rows": rows, "items": rows * heads, "D": q.shape[-1],
            "EP": width(self.v.shape[-1]), "STAGES": config.stages, "REGISTERS": config.registers, "group": order.heavy_group,
            "heavy_rows": order.heavy_rows, "light_group": order.light_group, "heavy_items": heads * order.heavy_rows,
            "TURNS": takes_turns(masked=self.work.mask is not None, blocks=float(half_tiles.kv_tiles.double().mean())),
        }  # fmt: skip
        kv = partial(tile_descriptor, rows=config.n)
        return PreparedLaunch(
            kernel=one.kernel,
            options={"num_warps": 4, "maxnreg": config.start_registers, **FUSED, **REGISTERS},
            ctas=min(rows * heads, ctas),
            device=q.device,
            descriptors={"q_desc": partial(tile_descriptor, rows=config.m // 3), "k_desc": kv, "v_desc": kv},
            constants={**one.settings, **shared},
            workspace=Workspace(device=q.device, zeros=(1,)),
        )

    def prepare(self, one: Pass) -> PreparedLaunch:
        if one.name == _FORWARD_THREE:
            return self._prepare_three_groups(one)
        q, v, tensors, known = self.q, self.v, one.tensors, dict(one.settings)
        (d, d_tail), (e, e_tail) = head_dim_parts(q.shape[-1]), head_dim_parts(v.shape[-1])
        if one.name == "forward":  # its values and outputs are in one part
            e, e_tail = width(v.shape[-1]), 0
        config, tiles = self._tiles(one)
        kv_pairs, head_pairs = pairs_of(self.work) if one.by_query else (False, False)
        ctas = persistent_ctas(q.device)
        dq = tensors.get("dq_ptr") if one.name == "dkdv" else None
        item_queries = 128 if one.name == "dkdv" else config.m  # an item of the dK/dV kernel has keys, not queries
        cut = Cut(
            m=min(item_queries, self.work.q_tiles.block), n=config.n // 2 if kv_pairs else config.n, l2_bytes=L2_BYTES,
            ctas_in_flight=ctas,
            added_bytes=0 if dq is None else dq.element_size() * q.shape[-1], head_parts=known.get("head_parts", 1),
        )  # fmt: skip
        items, shared = self.work_arguments(one, cut)
        if head_pairs:
            items, shared["rows"] = items // 2, shared["rows"] // 2
        shared["N"] = config.n
        more: dict[str, Any] = {"STAGES": config.stages, "REGISTERS": config.registers, "local_tokens": self._local_tokens}
        more["UNIFORM"] = uniform_function(self.work.score, self.program_options)
        more |= {"V_STAGES": config.second_stages, "D_TAIL": d_tail, "E_TAIL": e_tail, "KV_PAIRS": kv_pairs, "HEAD_PAIRS": head_pairs}
        workspace = Workspace(device=q.device, zeros=(1,))  # the item counter
        if one.name == "dkdv":
            more |= {"BM": config.m, "DS": 4 if d <= 64 and config.m == 64 else 2, "DO_STAGES": config.second_stages}
            more |= {"Q_TILE": min(128, self.work.q_tiles.block), "KV_TILE": min(128, self.work.kv_tiles.block)}
            tables = self.work.table.nominal.transposed
            more["heavy_rows"] = 0 if known["ordered"] else outlier_rows(tables)
            item_steps = float(tables.tiles_per_row.double().mean()) * shared["shared"]
            more["LATE"] = config.m == 128 and dq is not None and not self.work.invariant and takes_late_dq(item_steps)
            more |= dict.fromkeys(("dq_order_ptr", "dq_order_legs", "dq_order_before")) | {"semaphores_per_head": 0}
            by_keys = self.work.table.transposed if known["ordered"] or self.work.invariant else None
            more |= {"MERGED": by_keys is not None, "together": 1 if by_keys is None else heads_of_tables(by_keys, shared["shared"])}
            if by_keys is not None and known["ordered"]:
                choice = choose_order(by_keys, *order_sizes(q, v, self.work), invariant=self.work.invariant)
                fixed = dq_order(
                    by_keys, self.work.q_tiles, choice, shared["shared"], q.device, positions=self.work.score is not None
                )  # fmt: skip
                shared["order"], more["together"] = fixed.order, shared["shared"]
                if choice.all_heads and not shared["PER_HEAD"]:
                    shared["group"] = shared["kv_heads"]
                steps = self.work.table.q_tiles * (self.work.q_tiles.block // config.m)
                more |= {"dq_order_ptr": fixed.ptr, "dq_order_legs": fixed.legs, "dq_order_before": fixed.before}
                more["semaphores_per_head"] = steps
            if one.kernel is dkv_kernel:
                workspace = Workspace(device=q.device, zeros=(1, q.shape[0] * q.shape[1] * more["semaphores_per_head"]))
        if one.name == "forward":
            more["BOUNDS"], more["VISIBLE"] = bounds_functions(self.work.mask, launch.options(self.work, q.dtype))
            more["CORNERS"], more["FLAT"] = flat_functions(self.work.score, self.program_options)
            # Split items do not combine max scores. The number of KV blocks of a device table is not known, and that of a static table may
            # change: a part could be empty.
            known_blocks = not self.work.invariant and self.work.device_tables is None and not isinstance(self.work.table, StaticTable)
            splittable = tensors["max_scores_ptr"] is None and e <= MAX_SPLIT_DIM.value and known_blocks
            order, split = self._plan_items(items, shared, ctas, splittable=splittable)
            heavy_items = items // max(1, shared["rows"]) * order.heavy_rows
            more |= {"heavy_rows": order.heavy_rows, "light_group": order.light_group, "heavy_items": heavy_items, **split._asdict()}
            shared["group"], items = order.heavy_group, split.items
            more["early_items"] = max(0, items - ctas)
            records = None
            if known_blocks and tensors["complete_out_ptr"] is None:
                sizes = {**shared, "heavy_items": heavy_items}
                records = first_records(self.work, order, sizes, q_len=q.shape[2], items=items, unsplit=split.unsplit, ctas=ctas)
            more["first_items"] = 0 if records is None else min(items, ctas)
            more["first_records"] = None if records is None else launch.to_device([records], q.device)[0]
            plain = self.work.q_tiles.row is None and self.work.kv_tiles.row is None
            more["lead"] = 1 if known_blocks and plain and d == e == 128 and diagonal_first(self.work.table) else None
            blocks = float(self.work.table.nominal.tiles_per_row.double().mean()) * shared["N_SUBS"]
            more["ONE_LOOP"] = takes_one_loop(d, e, blocks) and known_blocks and self.work.score is None and tensors["out_desc"] is None
            more["FOLLOWED"] = more["ONE_LOOP"] and not more["lead"]
            part_rows = split.split_items * split.parts * config.m
            # The item counter, the split items' arrival counters; out and lse of all parts.
            counters = 1 + GROUPS.value * split.split_items
            workspace = Workspace(device=q.device, zeros=(counters,), floats=(part_rows * e, part_rows))
            complete = self.work.complete_q_tiles
            more["complete_flags"] = None if tensors["complete_out_ptr"] is None or complete is None else launch.flags(complete, q.device)
        return PreparedLaunch(
            kernel=one.kernel,
            options={"num_warps": 4, "maxnreg": config.start_registers, **FUSED, **REGISTERS},
            ctas=min(items, ctas),
            device=q.device,
            descriptors=tiles,
            constants={**known, **shared, **more, "items": items, "D": q.shape[-1], "DP": d, "EP": e},
            workspace=workspace,
            tables_vary=self.work.device_tables is not None,
        )

    def _tiles(self, one: Pass) -> tuple[TileConfig, dict[str, Callable[[Tensor], TensorDescriptor]]]:
        """(tile shapes, TMA descriptors by kernel argument)."""
        q, tensors = self.q, one.tensors
        d, e = sum(head_dim_parts(q.shape[-1])), sum(head_dim_parts(self.v.shape[-1]))
        tiles: dict[str, Callable[[Tensor], TensorDescriptor]]
        if one.name == "forward":
            config = forward_config(d, width(self.v.shape[-1]), with_state=tensors["out_desc"] is not None)
            tiles = part_descriptors(("q",), tensors, rows=config.m // 2, suffix="desc")
            by_group = partial(tile_descriptor, rows=config.m // 2)
            tiles |= {name: by_group for name in ("out_desc", "complete_out_desc", "old_out_desc") if tensors[name] is not None}
        elif one.name == "dq":
            config = dq_config(d, e, scored=self.work.score is not None)
            tiles = part_descriptors(("q", "do"), tensors, rows=config.m // 2)
        else:
            dq = tensors.get("dq_ptr")
            config = wide_dkv_config(d, e)
            if self.work.kv_tiles.block < 128:
                config = half_dkv_config(d, e, queries=64 if computes_heads_alone(self.work) else 128)
            if one.kernel is dkv_kernel:
                plain = self.work.score is None and self.work.q_tiles.block >= 128
                config = dkv_config(d, with_dq=dq is not None, plain=plain)
            tiles = part_descriptors(("q", "do"), tensors, rows=config.m)
            if dq is not None:
                queries, dims = dq_tile(d, config.m)
                tiles["dq_ptr"] = partial(tile_descriptor, rows=queries, columns=dims)
            queries = min(config.m, self.work.q_tiles.block)
            if queries < config.m:  # a step has the same queries of two heads
                tiles |= dict.fromkeys(("q_ptr", "do_ptr"), partial(tile_descriptor, rows=HALF.value, columns=HALF.value))
            tiles |= dict.fromkeys(("norm_ptr", "delta_ptr"), partial(row_descriptor, size=queries))
        if one.name == "forward":
            tiles |= part_descriptors(("k", "local_k"), tensors, rows=config.n, suffix="desc")
            tiles |= {n: partial(tile_descriptor, rows=config.n) for n in ("v_desc", "local_v_desc") if tensors[n] is not None}
        else:
            tiles |= part_descriptors(("k", "v", "local_k", "local_v"), tensors, rows=config.n)
        if one.by_query and pairs_of(self.work)[0]:
            halves = partial(tile_descriptor, rows=HALF.value, columns=HALF.value)
            tiles |= dict.fromkeys(("k_desc", "v_desc") if one.name == "forward" else ("k_ptr", "v_ptr"), halves)
        return config, tiles

    def _plan_items(self, items: int, shared: dict[str, Any], ctas: int, *, splittable: bool) -> tuple[ItemOrder, KvSplit]:
        """(the order of a forward launch's items, the split-KV of its last ones)."""
        table, subs = self.work.table.nominal, shared["M_SUBS"]
        row_blocks = (table.tiles_per_row[table.heavy_first[: shared["rows"]].long()] * shared["N_SUBS"]).tolist()
        heads = 1 if shared["PER_HEAD"] else shared["heads"]
        batches = items // max(1, len(row_blocks) * subs * heads)
        order = self._order(row_blocks, items, shared, ctas, subs=subs, batches=batches, splittable=splittable)
        lengths = order.lengths(row_blocks, heads=heads * batches, subs=subs, count=simulated_items(items, ctas))
        return order, best_split(lengths, items, ctas=ctas, splittable=splittable)[0]

    def _order(
        self, row_blocks: Sequence[int], items: int, shared: dict[str, Any], ctas: int, *, subs: int, batches: int, splittable: bool
    ) -> ItemOrder:  # fmt: skip
        """`best_order` of a forward launch."""
        heads, heads_per_kv = (1, 1) if shared["PER_HEAD"] else (shared["heads"], shared["shared"])
        kv_bytes = self.work.table.nominal.batch * self.kv_len * (self.q.shape[-1] + self.v.shape[-1]) * self.q.element_size()
        return best_order(
            row_blocks, heads=heads, batches=batches, subs=subs, shared=heads_per_kv,
            heads_in_l2=heads_per_kv * (L2_BYTES // max(1, kv_bytes)), ctas=ctas,
            end_time=lambda lengths: best_split(lengths, items, ctas=ctas, splittable=splittable)[1],
        )  # fmt: skip


def row_terms_launch(shape: Sequence[int], tensors: Tensors) -> PreparedLaunch:
    """`HopperCall.row_terms` for queries of a shape [B, H, Q, D]."""
    (B, H, Q, D), m, grad_out, out, q = shape, 64, tensors["do_ptr"], tensors["out_ptr"], tensors["q_ptr"]
    assert grad_out is not None
    E, k, v, row_ctas = grad_out.shape[-1], tensors["k_ptr"], tensors["v_ptr"], B * H * -(-Q // m)
    constants = {
        "q_stride": (1,) * 4 if q is None else q.stride(), "out_stride": (grad_out if out is None else out).stride(),
        "do_stride": grad_out.stride(),
        "k_stride": (1,) * 4 if k is None else k.stride(), "v_stride": (1,) * 4 if v is None else v.stride(),
        "heads": H, "q_len": Q, "row_ctas": row_ctas, "kv_heads": 0 if k is None else k.shape[1], "kv_len": 0 if k is None else k.shape[2],
        "M": m, "D": D, "DP": launch.padded(D), "E": E, "EP": launch.padded(E),
    }  # fmt: skip
    kv_ctas = 0 if k is None else k.shape[0] * k.shape[1] * -(-k.shape[2] // m)
    return layout_launch(row_terms_kernel, tensors, constants, row_ctas + kv_ctas)


def row_norm(lse: Tensor) -> Tensor:
    """The norm of `row_terms_kernel` [B, H, Q], alone."""
    (B, H, Q), m, lse = lse.shape, 64, lse.contiguous()
    norm = empty_padded_rows(lse)
    names = row_terms_kernel.arg_names[: row_terms_kernel.arg_names.index("q_stride")]
    tensors: dict[str, Tensor | None] = {**dict.fromkeys(names), "lse_ptr": lse, "norm_ptr": norm}
    constants: dict[str, Any] = dict.fromkeys(("q_stride", "out_stride", "do_stride", "k_stride", "v_stride"), (1,))
    constants |= {"heads": H, "q_len": Q, "row_ctas": 0, "kv_heads": 0, "kv_len": 0, "M": m, "D": 16, "DP": 16, "E": 16, "EP": 16}
    if norm.numel():
        layout_launch(row_terms_kernel, tensors, constants, B * H * -(-Q // m))(tensors, {})
    return norm


def round_tensors(total: Tensor | None, grads: Grads, kv_parts: tuple[Tensor, Tensor], parts: int) -> dict[str, Tensor | None]:
    """The tensors of `HopperCall.rounding`. total: dQ in float32, or None if it is complete. kv_parts: dK and dV in `parts` parts."""
    dk_parts, dk, dv_parts, dv = (kv_parts[0], grads.k, kv_parts[1], grads.v) if parts > 1 else (None, None, None, None)
    return {
        "total_ptr": total, "dq_ptr": None if total is None else grads.q, "dk_parts_ptr": dk_parts, "dk_ptr": dk, "dv_parts_ptr": dv_parts,
        "dv_ptr": dv,
    }  # fmt: skip


def streamable(tensor: Tensor) -> Tensor:
    """A tensor that TMA can read: itself, or a contiguous copy."""
    return tensor if launch.describable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@cache
def persistent_ctas(device: torch.device) -> int:
    """CTAs of a persistent kernel: one per SM, minus the SMs that LONGSPAN_SM_MARGIN leaves to other kernels.

    A persistent CTA occupies its SM until the launch ends. A collective's kernel that becomes ready meanwhile would wait for all of it.
    """
    sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    margin = os.environ.get("LONGSPAN_SM_MARGIN", "0")
    if not margin.isdecimal() or int(margin) >= sms:
        raise ValueError(f"LONGSPAN_SM_MARGIN: expected a number of SMs from 0 to {sms - 1}, got {margin!r}")
    return sms - int(margin)
