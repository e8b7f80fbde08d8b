"""`LaunchCall`: the tensors of one attention call, and the kernel arguments that follow from its work. Base of the GPU kernels' calls.

method of a subclass          LaunchCall.launch              PreparedLaunch
forward / dq / dkdv    ──►    key of (pass, layouts,   ──►   compiled kernel
names the tensors             programs, tilings)             + tensors of this call
                                  │ first time
                                  └── prepare (subclass): tile sizes, `work_arguments`, constants
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.prepared_launch import PreparedLaunch, hold_for_graph, layouts, prepared_launch
from longspan._kernels.gpu.selected_tables import SelectedTables
from longspan._kernels.protocol import MASK_IN_GRAPH, AttentionInputs, Work

_GRAPH_AND_NEW_CALL = "cannot capture a CUDA graph: this call was never made before. Make the same call once before the capture"


def tf32_allowed() -> bool:
    """Whether torch allows tf32 in float32 products. Once the newer setting was used, torch raises where the older one is read."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a call: the kernel to launch and its tensors by argument name, in the order of the kernel's signature.

    `settings`: constants that the caller decides. `needs`: backward passes, whether each captured tensor needs a gradient. `grads`: the
    gradients of captured tensors to add to. `busy_only`: launch CTAs for table rows that have tiles only.
    """

    name: str
    kernel: Any
    tensors: Mapping[str, Tensor | None]
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[bool, ...] | None = None
    grads: tuple[Tensor, ...] = ()
    busy_only: bool = False

    @property
    def by_query(self) -> bool:
        """Whether CTAs own query tiles and walk KV tiles, or the other way round."""
        return self.name != "dkdv"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a pass is cut: sub-tiles of m queries and n keys, and what the order of CTAs depends on.

    `l2_bytes`: KV of concurrent CTAs should fit into so many bytes. `ctas_in_flight`: CTAs that run at once. `added_bytes`: bytes per
    walked row that CTAs add to. `head_parts`: dK and dV, number of CTAs among which the query heads of a KV head are divided.
    """

    m: int
    n: int
    l2_bytes: int
    ctas_in_flight: int
    added_bytes: int = 0
    head_parts: int = 1


class LaunchCall:
    """The tensors of one call. A subclass has a method per pass, which calls `launch`, and implements `prepare`.

    `variant`: a hashable value that distinguishes launches of different configurations.
    """

    def __init__(self, inputs: AttentionInputs, work: Work, *, variant: Hashable = None) -> None:
        self.q, self.k, self.v, self.work = inputs.q, inputs.k, inputs.v, work
        q = self.q
        self.kv_len = self.k.shape[2] + (0 if inputs.local_kv is None else inputs.local_kv[0].shape[2])
        self.precision = "ieee" if q.dtype == torch.float32 and not tf32_allowed() else "tf32"
        self._variant = variant
        self._mask_captured = launch.pack_captured(work.mask_captured, q)
        self._score_captured = launch.pack_captured(work.score_captured, q)

    def invariant_order(self, one: Pass) -> launch.RunOrder:
        """The order of a row's runs if `Work.invariant`."""
        return "ascending"

    def prepare(self, one: Pass) -> PreparedLaunch:
        """The launch of a pass. May depend only on what the key in `launch` covers."""
        raise NotImplementedError

    def launch(self, one: Pass) -> None:
        work = self.work
        per_call = {
            "mask_captured": self._mask_captured,
            "score_captured": self._score_captured,
            "grads": one.grads,
            "scale": float(work.scale),
            "first_b": work.first_batch,
            "first_h": work.first_head,
        }
        prepared = self.prepared(one)
        if isinstance(work.device_tables, SelectedTables):
            per_call |= work.device_tables.of_pass(by_query=one.by_query, shared=prepared.constants["shared"])._asdict()
        prepared(one.tensors, per_call)

    def prepared(self, one: Pass) -> PreparedLaunch:
        """The launch of a pass for tensors of these layouts, cached."""
        work = self.work
        key: Hashable = (
            type(self),
            one.name,
            self.q.device,
            self._variant,
            work.q_tiles.name,
            work.kv_tiles.name,
            None if work.mask is None else work.mask.key,
            None if work.score is None else work.score.key,
            self.precision,
            one.needs,
            one.busy_only,
            work.invariant,
            None if work.device_tables is None else work.device_tables.signature,
            *one.settings.values(),
            layouts(one.tensors.values()),
            layouts(self._mask_captured),
            layouts(self._score_captured),
            layouts(one.grads),
        )
        capturing = launch.capturing(self.q.device)
        if capturing and work.mask_captured and not work.mask_is_fixed:
            raise RuntimeError(MASK_IN_GRAPH)
        prepared = prepared_launch(work.table, key, _raise_in_capture if capturing else partial(self.prepare, one))
        if capturing:
            hold_for_graph(prepared, work.mask_captured)
        return prepared

    def work_arguments(self, one: Pass, cut: Cut) -> tuple[int, dict[str, Any]]:
        """(number of items, constants by argument name). An item is a sub-tile of queries, or of keys, of one head."""
        q, work = self.q, self.work
        if not launch.capturing(q.device):  # the check may read captured tensors, which a capture forbids
            check_lookups(work, q.shape[0], q.shape[1])
        by_query, d, e = one.by_query, q.shape[-1], self.v.shape[-1]
        table = work.table if by_query else work.table.transposed
        columns = work.kv_tiles if by_query else work.q_tiles
        batch, heads, kv_heads = q.shape[0], q.shape[1], self.k.shape[1] * cut.head_parts
        shared = heads // kv_heads
        item_heads = heads if by_query else kv_heads
        m_subs, n_subs = work.q_tiles.block // cut.m, work.kv_tiles.block // cut.n
        per_batch, per_head = table.batch > 1, table.heads > 1
        table_rows = table.q_tiles * table.batch * (item_heads if per_head else 1)
        if one.busy_only:
            table_rows = launch.busy_rows(table)
        walked = self.kv_len if by_query else q.shape[2] * shared
        head_bytes = table.batch * walked * ((d + e) * q.element_size() + cut.added_bytes)
        items = table_rows * (m_subs if by_query else n_subs)
        group = 1
        if not per_head:
            together = shared if by_query else 1
            group = launch.head_group(item_heads, together, head_bytes, cut.l2_bytes, programs=items, in_flight=cut.ctas_in_flight)
        lead, tables = False, {}
        if work.device_tables is None:
            on_device = launch.device_table(
                table, columns, q.device, shared=1 if by_query else shared, positions=work.score is not None,
                run_order=self.invariant_order(one) if work.invariant else "by kind",
            )  # fmt: skip
            lead, tables = len(on_device.partial) > 3, on_device._asdict()
        options = self.program_options
        joint = None
        if work.score is not None and work.joint is not None and one.needs is not None:
            joint = codegen.joint_function(work.score, work.joint, one.needs, options)
        return items * (1 if per_batch else batch) * (1 if per_head else item_heads), {
            **self._strides(one), **tables,
            "q_side": launch.side(work.q_tiles, q.device), "kv_side": launch.side(work.kv_tiles, q.device),
            "mask_sizes": launch.pack_sizes(work.mask_captured), "score_sizes": launch.pack_sizes(work.score_captured),
            "rows": table_rows, "tiles": table.q_tiles, "heads": heads, "kv_heads": kv_heads, "shared": shared, "group": group,
            "q_len": q.shape[2], "kv_len": self.kv_len,
            "MASK": launch.function(work.mask, launch.options(work, q.dtype)), "SCORE": launch.function(work.score, options),
            "JOINT": joint,
            "PER_BATCH": per_batch, "PER_HEAD": per_head, "LEAD": lead,
            "N": cut.n, "M_SUBS": m_subs, "N_SUBS": n_subs, "DP": launch.padded(d), "E": e, "EP": launch.padded(e),
        }  # fmt: skip

    @property
    def program_options(self) -> codegen.Options:
        """Compile options of the score mod and its gradient."""
        return launch.options(self.work, self.q.dtype)

    def _strides(self, one: Pass) -> dict[str, tuple[int, ...]]:
        """x_stride of every x_ptr. A tensor that is None has the query's strides, which nothing reads."""
        names = [name for name in one.kernel.arg_names if name.endswith("_stride")]
        tensors = {name: one.tensors[f"{name.removesuffix('_stride')}_ptr"] for name in names}
        return {name: (self.q if t is None else t).stride() for name, t in tensors.items()}


def _raise_in_capture() -> PreparedLaunch:
    raise RuntimeError(_GRAPH_AND_NEW_CALL)
