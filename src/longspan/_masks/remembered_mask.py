"""The mask of a mask_mod function or of a BlockMask, remembered as an attribute of it, so that repeated calls find the same mask.

A remembered mask is used while it is current. Of a function: its trace, whose guards notice changed closures and globals, is the same
preamble and program over the same tensors. Of a BlockMask: its lists are the same tensors, unmodified, and so is the trace. The mask does
not refer to its object, and no cache holds it: a closure is dropped together with the tensors that it captures.
"""

from __future__ import annotations

import copy
import types
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask

from longspan._masks.algebra import FromBlockMask, Mask, as_mask
from longspan._masks.program import canonical_text
from longspan._masks.trace_cache import traces
from longspan._masks.trace_guard import REMEMBERED_MASK
from longspan._masks.tracing import Traced

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class TracedFunction(Mask):
    """A mask_mod function as it was traced: its program, and weak references to the tensors that it captured."""

    trace_reads = ()

    def __init__(self, traced: Traced) -> None:
        self._traced = Traced(program=traced.program, sources=(), preamble=traced.preamble)
        self._sources = [weakref.ref(t) for t in traced.sources]

    def __reduce__(self) -> Any:
        """None: a function that is sent to another process with its attributes (by cloudpickle) is traced again there."""
        return type(None), ()

    @property
    def traced(self) -> Traced:  # type: ignore[override]
        """The trace, bound to the tensors that are still alive."""
        alive = [source() for source in self._sources]
        return Traced(program=self._traced.program, sources=tuple(t for t in alive if t is not None), preamble=self._traced.preamble)


def remembered_mask(value: Any) -> Mask | None:
    """The remembered mask of a function, or of a BlockMask on a GPU; None for other values, whose modifications go unnoticed.

    Raises what tracing a function raises.
    """
    if type(value) is types.FunctionType:
        return _of_function(value)
    return _of_block_mask(value) if type(value) is BlockMask and value.kv_num_blocks.is_cuda else None


def _of_function(fn: types.FunctionType) -> Mask:
    traced = traces.trace(fn, "mask", score_dtype=torch.float32)
    mask = fn.__dict__.get(REMEMBERED_MASK)
    if not isinstance(mask, TracedFunction) or not _same(mask.traced, traced):
        mask = fn.__dict__[REMEMBERED_MASK] = TracedFunction(traced)
    return mask


def _of_block_mask(block_mask: BlockMask) -> Mask:
    lists: list[Tensor | None] = [getattr(block_mask, name) for name in _LISTS]
    state = [None if t is None else (id(t), t.data_ptr(), None if t.is_inference() else t._version) for t in lists]
    remembered = block_mask.__dict__.get(REMEMBERED_MASK)
    if remembered is not None:
        mask, mask_mod, old_state = remembered
        if mask_mod is block_mask.mask_mod and old_state == state and _same(mask.traced, _trace(mask)):
            return mask  # type: ignore[no-any-return]
    block_mask.__dict__.pop(REMEMBERED_MASK, None)
    mask = as_mask(copy.copy(block_mask))
    if all(t is None or not t.is_inference() for t in lists):  # torch does not count modifications of inference tensors
        block_mask.__dict__[REMEMBERED_MASK] = mask, block_mask.mask_mod, state
    return mask


def _trace(mask: FromBlockMask) -> Traced:
    """A trace of the mask's present meaning: the mask_mod of the BlockMask may read other values than before."""
    return traces.trace(mask, "mask", score_dtype=torch.float32, name=str(mask))


def _same(old: Traced, new: Traced) -> bool:
    """Whether two traces are the same preamble and program over the same tensors."""
    same_tensors = len(old.sources) == len(new.sources) and all(a is b for a, b in zip(old.sources, new.sources, strict=True))
    return same_tensors and old.program.key == new.program.key and _same_preamble(old.preamble, new.preamble)


def _same_preamble(old: GraphModule | None, new: GraphModule | None) -> bool:
    """Whether two preambles compute the same values. Their graphs hold the Python numbers that the mod used."""
    if old is None or new is None or old is new:
        return old is new
    return canonical_text(old.graph) == canonical_text(new.graph)
