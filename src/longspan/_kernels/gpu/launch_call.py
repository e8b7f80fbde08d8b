"""`LaunchCall`: the tensors of one attention call and the arguments that follow from its work, shared by the GPU kernels."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan._kernels.gpu import codegen, launch
from longspan._kernels.gpu.lookup_bounds import check_lookups
from longspan._kernels.gpu.prepared_launch import Prepared, keep_for_good, layout, prepared
from longspan._kernels.protocol import Work

_Tensors = tuple[Tensor | None, ...]
_CAPTURED_MASK = (
    "a CUDA graph is being captured, and the mask reads tensors: which tiles exist follows from what they hold now, and a replay would not "
    "see a change. Call outside the graph, use a mask that reads no tensor, or a plan, which keeps what its mask reads"
)


def _refused() -> Prepared:
    raise RuntimeError(
        "a CUDA graph is being captured, and a call like this was never made before: make it once outside of the graph first"
    )


def _tf32() -> bool:
    """Whether float32 products may be rounded to tf32. Once the newer setting was used, torch raises where the older one is read."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


class LaunchCall:
    """The tensors of one call. Subclasses have a method per pass, which calls `_launch`, and prepare launches in `_prepare`.

    `variant`: a hashable value that tells launches of different settings apart.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: Work, *, variant: Hashable = None) -> None:
        self.q, self.k, self.v, self.work = q, k, v, work
        self.kv_len = k.shape[2]
        self._variant = variant
        self.precision = "ieee" if q.dtype == torch.float32 and not _tf32() else "tf32"
        self._changing: dict[str, Any] = {
            "mask_captured": launch.pack_captured(work.mask_captured, q),
            "score_captured": launch.pack_captured(work.score_captured, q),
            "scale": float(work.scale),
            "first_b": work.first_batch,
            "first_h": work.first_head,
        }

    def _launch(
        self,
        which: str,
        tensors: _Tensors,
        strided: tuple[Tensor, ...],
        known: dict[str, Any],
        *,
        needs: tuple[bool, ...] | None = None,
        busy_only: bool = False,
    ) -> None:
        work = self.work
        key: Hashable = (
            type(self),
            which,
            self.q.device,
            self._variant,
            work.q_tiles.name,
            work.kv_tiles.name,
            None if work.mask is None else work.mask.key,
            None if work.score is None else work.score.key,
            self.precision,
            needs,
            busy_only,
            *known.values(),
            *map(layout, tensors),
            *map(layout, self._changing["mask_captured"]),
            None,
            *map(layout, self._changing["score_captured"]),
            None,
            *map(layout, self._changing.get("grads", ())),
        )
        make = partial(self._prepare, which, tensors, strided, known, needs, busy_only)
        capturing = launch.capturing(self.q.device)
        if capturing and work.mask_captured and not work.mask_is_fixed:
            raise RuntimeError(_CAPTURED_MASK)
        found = prepared(work.table, key, _refused if capturing else make)
        if capturing:
            keep_for_good(found)
        found(tensors, self._changing)

    def _prepare(
        self,
        which: str,
        tensors: _Tensors,
        strided: tuple[Tensor, ...],
        known: dict[str, Any],
        needs: tuple[bool, ...] | None,
        busy_only: bool,
    ) -> Prepared:
        raise NotImplementedError

    def _arguments(
        self,
        which: str,
        kernel: Any,
        strided: tuple[Tensor, ...],
        *,
        m: int,
        n: int,
        l2_bytes: int,
        in_flight: int,
        needs: tuple[bool, ...] | None,
        busy_only: bool,
        added: int = 0,
        parts: int = 1,
    ) -> tuple[int, dict[str, Any]]:
        """How many items there are, sub-tiles of m queries or of n keys in every head; and the arguments that follow from the work.
        `added`: bytes of each row walked that programs add to. `parts`: of the query heads of a key head, over which programs walk.
        """
        q, k, work = self.q, self.k, self.work
        if not launch.capturing(q.device):  # it may read captured tensors, which a CUDA graph that is being captured forbids
            check_lookups(work, q.shape[0], q.shape[1])
        d, e = q.shape[-1], self.v.shape[-1]
        by_query = which != "dkdv"
        table = work.table if by_query else work.table.transposed
        columns = work.kv_tiles if by_query else work.q_tiles
        B, H, G = q.shape[0], q.shape[1], k.shape[1] * parts
        shared = H // G
        heads = H if by_query else G
        m_subs, n_subs = work.q_tiles.block // m, work.kv_tiles.block // n
        per_batch, per_head = table.batch > 1, table.heads > 1
        rows = table.q_tiles * table.batch * (heads if per_head else 1)
        if busy_only:
            rows = launch.busy_rows(table)
        walked = self.kv_len if by_query else q.shape[2] * shared
        head_bytes = table.batch * walked * ((d + e) * q.element_size() + added)
        programs = rows * (m_subs if by_query else n_subs)
        together = shared if by_query else 1
        group = 1 if per_head else launch.head_group(heads, together, head_bytes, l2_bytes, programs=programs, in_flight=in_flight)
        on_device = launch.device_table(table, columns, q.device, shared=1 if by_query else shared, positions=work.score is not None)
        options = launch.options(work, q.dtype)
        joint = None
        if work.score is not None and work.joint is not None and needs is not None:
            joint = codegen.joint_function(work.score, work.joint, needs, options)
        strides = [name for name in kernel.arg_names if name.endswith("_stride")]
        return programs * (1 if per_batch else B) * (1 if per_head else heads), {
            **{name: t.stride() for name, t in zip(strides, strided, strict=True)}, **on_device._asdict(),
            "q_side": launch.side(work.q_tiles, q.device), "kv_side": launch.side(work.kv_tiles, q.device),
            "mask_sizes": launch.pack_sizes(work.mask_captured), "score_sizes": launch.pack_sizes(work.score_captured),
            "rows": rows, "tiles": table.q_tiles, "heads": H, "kv_heads": G, "shared": shared, "group": group,
            "q_len": q.shape[2], "kv_len": self.kv_len,
            "MASK": launch.function(work.mask, options), "SCORE": launch.function(work.score, options), "JOINT": joint,
            "PER_BATCH": per_batch, "PER_HEAD": per_head, "N": n, "M_SUBS": m_subs, "N_SUBS": n_subs,
            "DP": launch.padded(d), "E": e, "EP": launch.padded(e),
        }  # fmt: skip
