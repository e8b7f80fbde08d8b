"""`StaticMask`: a mask whose tensors and block tables stay in place, so that a CUDA graph replays with new contents."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from longspan._masks.algebra import Mask, MaskLike, as_mask
from longspan._masks.classify import TableShape, classify
from longspan._masks.extent import Extent
from longspan._masks.static_table import StaticTable, with_every_row_busy
from longspan._masks.tracing import Traced
from longspan._torch_modes import default_modes


class _TableSizes(NamedTuple):
    """Sizes of a block table, hashable."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int
    heads: int

    @property
    def shape(self) -> TableShape:
        return TableShape(q_len=self.q_len, kv_len=self.kv_len, block=self.block, batch=self.batch, heads=self.heads)


class StaticMask(Mask):
    """A mask that reads tensors, with device memory of its own for these tensors and for its block tables; `update` replaces them in place.

    Calls with this mask may be captured in a CUDA graph. A replay uses the contents of the last `update` before it. Captured or not, out
    has the same bits. Supported by the kernels `hopper` and `triton` on one device, not by `invariant` and `torch.compile`. A plan copies
    the contents when it is made.

    Args:
        mask: The first contents: a mask that reads tensors, such as `documents`, alone or combined.
        device: The device of the queries.
        runs_per_row: Room of the block tables: runs of partial tiles and of full tiles per row of tiles, on average. Causal documents have
            at most two and one.

    Example:
        >>> mask = longspan.StaticMask(longspan.causal() & longspan.documents([700, 324]))
        >>> mask.update(longspan.causal() & longspan.documents([100, 900, 24]))  # before graph.replay()
    """

    trace_reads = ("mask",)
    is_static = True

    def __init__(self, mask: MaskLike, *, device: torch.device | str = "cuda", runs_per_row: int = 4) -> None:
        mask = as_mask(mask)
        if isinstance(mask, StaticMask):
            raise TypeError("StaticMask: expected a mask that is not static")
        if mask.has_selection:
            raise ValueError(f"StaticMask: expected a mask without selected(…), got {mask}")
        if runs_per_row < 1:
            raise ValueError(f"StaticMask: runs_per_row must be >= 1, got {runs_per_row}")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"StaticMask: expected a CUDA device, got device={str(device)!r} and none available; use the mask itself")
        traced = mask.traced
        captured = traced.captured()
        if not captured:
            raise ValueError(f"StaticMask: expected a mask that reads tensors, got {mask}, which a CUDA graph may capture as it is")
        self.mask, self._program, self._runs_per_row = mask, traced.program, runs_per_row
        with torch.inference_mode(False):  # `update` writes to these tensors, in inference mode or not
            self._captured = tuple(t.detach().to(device, copy=True).contiguous() for t in captured)
        self._tables: dict[_TableSizes, StaticTable] = {}
        for tensor in self._captured:
            _owners[tensor] = weakref.ref(self)

    @default_modes()
    def update(self, mask: MaskLike) -> None:
        """Replace the contents, on the current stream: not during a capture, nor between a forward pass and its backward pass.

        Args:
            mask: A mask of the same form and sizes: the same constructors and operators, documents contiguous in both or in neither.

        Raises:
            ValueError: The mask has another form or other sizes, or its block table has no room; the contents are then unchanged.
        """
        if self._captured[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("StaticMask.update: expected a call outside of a CUDA graph capture; update before each replay")
        mask = as_mask(mask)
        traced, extent = mask.traced, mask.extent
        captured = [t.detach() for t in traced.captured()]
        if traced.program.key != self._program.key or extent != self.extent:
            raise ValueError(f"StaticMask.update: expected a mask of the form of {self.mask}, got {mask}")
        for old, new in zip(self._captured, captured, strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise ValueError(f"StaticMask.update: expected a tensor {old.dtype} {list(old.shape)}, got {new.dtype} {list(new.shape)}")
        tables = [with_every_row_busy(classify(self._program, captured, sizes.shape)) for sizes in self._tables]
        for static, table in zip(self._tables.values(), tables, strict=True):
            static.check_room(table)
        self.mask = mask
        with torch.no_grad():
            for old, new in zip(self._captured, captured, strict=True):
                old.copy_(new.pin_memory() if old.is_cuda and not new.is_cuda else new, non_blocking=True)
            for static, table in zip(self._tables.values(), tables, strict=True):
                static.replace_contents(table)

    @default_modes()
    def static_table(self, q_len: int, kv_len: int, block: tuple[int, int], *, batch: int, heads: int) -> StaticTable:
        """The table of a size, which later updates keep current."""
        sizes = _TableSizes(q_len, kv_len, block, batch if self._program.uses_batch else 1, heads if self._program.uses_head else 1)
        if sizes not in self._tables:
            contents = classify(self._program, self._captured, sizes.shape)
            self._tables[sizes] = StaticTable.of(contents, runs_per_row=self._runs_per_row)
        return self._tables[sizes]

    @property
    def traced(self) -> Traced:  # type: ignore[override]
        """The program of the mask, which reads the tensors in place."""
        return Traced(program=self._program, sources=self._captured, preamble=None)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask(b, h, q_idx, kv_idx)

    @property
    def extent(self) -> Extent:
        return self.mask.extent

    @property
    def reads_copies(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        raise TypeError("StaticMask: expected to stay in its process, got a pickle or a copy; send the mask that it was made from")

    def __str__(self) -> str:
        return f"StaticMask({self.mask})"


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weak references to the static mask of each of its tensors


def static_mask_of(captured: Sequence[Tensor]) -> StaticMask | None:
    """The static mask whose tensors these are; None if there is none."""
    owner = _owners.get(captured[0]) if captured and len(_owners) else None
    return None if owner is None else owner()  # type: ignore[no-any-return]
