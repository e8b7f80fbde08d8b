"""`context_parallel`: a context in which torch's attention functions run over a mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh, MeshLike
from longspan._dropin.buffers import Buffer, make_buffers, mark_written, version_of
from longspan._dropin.dispatcher import AttentionDispatcher
from longspan._dropin.global_layout import LayoutRule
from longspan._dropin.intercept import AttentionMode, intercepting
from longspan._plan.layout import Layout
from longspan._plan.schedule import Schedule
from longspan._plan.strategies import StrategyName


def context_parallel(
    mesh: MeshLike,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    seq_len: int | Sequence[int] | None = None,
    layout: str | Layout | LayoutRule | None = None,
    strategy: StrategyName | Schedule = "auto",
) -> Context:
    """A context in which torch's attention functions compute over a sequence that is split over `mesh`.

    **While the context is active, it replaces torch's functions**: `F.scaled_dot_product_attention`, `flex_attention` and
    `torch.utils.checkpoint.checkpoint`, in the thread that entered it, however they were imported. A torch function mode catches SDPA.
    The code objects of the other two functions are exchanged for ones that run torch's own code in all other threads. Leaving the
    context restores all three.

    Inside, q, k and v are this rank's shards [B, H, S_local, D]. SDPA also takes two or three dims, and broadcasts batch and heads as
    torch does. Masks and mods get positions in the whole sequence. All ranks make the
    same calls. Results and gradients equal those of one device. Backward, and the recomputation of an activation checkpoint,
    may run after the context.

    Args:
        mesh: The ranks that share the sequence, as `longspan.plan` takes them.
        buffers: Plain tensors that hold whole sequences (tokens, positions, labels), equal on every rank. They are sharded in place on
            entering and restored on leaving, after an exception too. Writes to a buffer inside are lost.
        buffer_seq_dims: The sequence dim of each buffer; negative dims count from the end.
        no_restore_buffers: Buffers that keep the shard on leaving.
        seq_len: Lengths of sequences that are sharded by other means, such as `cp.shard`. With neither buffers nor seq_len, tokens lie
            in the order of ranks, any number on each, and ranks exchange the counts at each call.
        layout: "head_tail" (the default), "contiguous", a Layout, or a function (length, ranks) -> Layout. Any length works.
        strategy: How KV moves, as for `longspan.plan`. By default each rank receives the KV that its queries see.

    Returns:
        A context manager. `with context_parallel(…) as cp` gives `cp.shard(x, dim)`, `cp.unshard(x, dim)` and `cp.positions(length)` for
        other tensors. It may be entered again after it was left, and keeps its plans. Contexts nest: the innermost one is used, and
        shares the sequences of outer ones on the same mesh.

    Raises:
        ValueError: For attention dropout, a BlockMask over local tokens, or a tensor of a sequence that the context does not know. Every
            rank raises.

    Note:
        A rank waits for the others for at most LONGSPAN_TIMEOUT seconds (600), or the process group's timeout if that is shorter. Then it
        raises, and names the rank that is late.

        A mask is read at each call and may be written to between calls. On a GPU, write to it in ways that `tensor._version` counts:
        `.data` and in-place collectives are not counted.
    """
    lengths = [] if seq_len is None else [seq_len] if isinstance(seq_len, int) else list(seq_len)
    made = make_buffers(list(buffers or []), list(buffer_seq_dims or []), list(no_restore_buffers or []))
    return Context(AttentionDispatcher(mesh, layout=layout or "head_tail", strategy=strategy, lengths=lengths), made)


_open = threading.local()  # .contexts: the contexts that this thread is in, outermost first


class Context:
    """The context manager that `context_parallel` returns."""

    def __init__(self, dispatcher: AttentionDispatcher, buffers: Sequence[Buffer] = ()) -> None:
        self.dispatcher, self.buffers = dispatcher, list(buffers)
        self._mode = AttentionMode(sdpa=dispatcher.sdpa, flex=dispatcher.flex, rerun=self._rerunnable, other=self._call_on_shards)
        self._buffer_of = {id(b.tensor): b for b in self.buffers}
        self._exit: ExitStack | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh over which attention runs."""
        return self.dispatcher.mesh

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's shard of a whole tensor along `dim`. Differentiable. Makes the tensor's length known to the context."""
        return self.dispatcher.shard(x, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's shard along `dim`. A collective call. Differentiable."""
        return self.dispatcher.unshard(x, dim)

    def positions(self, length: int) -> Tensor:
        """Global positions of this rank's tokens of a sequence of `length`: int64 [S_local], or [B, S_local] if batch rows differ."""
        return self.dispatcher.positions(length)

    # ------------------------------------------------------------------------------------------------------------ in and out

    def __enter__(self) -> Context:
        if self._exit is not None:
            raise RuntimeError("context_parallel: expected a context that is not active, got one that is open already; make another one")
        with ExitStack() as stack:
            for buffer in self.buffers:
                buffer.drop_shard()
            self._shard_buffers(self.buffers, stack)
            self._share_sequences()
            stack.enter_context(intercepting(self._mode))
            contexts = _open.__dict__.setdefault("contexts", [])
            contexts.append(self)
            stack.callback(contexts.remove, self)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stack, self._exit = self._exit, None
        if stack is not None:
            stack.__exit__(kind, error, trace)

    def active(self) -> AbstractContextManager[None]:
        """A context for one forward, of a context without buffers. May be entered any number of times at once."""
        return intercepting(self._mode)

    def _shard_buffers(self, buffers: list[Buffer], stack: ExitStack) -> None:
        layouts = [self.dispatcher.sequences.layout(b.length) for b in buffers]
        for buffer, layout in zip(buffers, layouts):
            if len(layout.rows) > 1 and (buffer.dim == 0 or buffer.tensor.shape[0] != len(layout.rows)):
                raise ValueError(
                    f"buffers: expected dim 0 to be the batch of {len(layout.rows)} rows, for which the layout was made, got "
                    f"{tuple(buffer.tensor.shape)} with sequence dim {buffer.dim}"
                )
        for buffer, layout in zip(buffers, layouts):
            buffer.shard(layout, self.mesh.rank)
            stack.callback(buffer.unshard)

    def _share_sequences(self) -> None:
        """Learn the sequences of the contexts around this one on the same mesh."""
        for outer in _open.__dict__.get("contexts", []):
            if outer.mesh != self.mesh:
                continue
            for length, layout in outer.dispatcher.sequences.by_length.items():
                if self.dispatcher.sequences.add(layout) != layout:
                    raise ValueError(
                        f"layout: expected the layout of the context around this one, on the same mesh, for sequences of {length} tokens, "
                        "got another; give both contexts the same layout"
                    )

    # ------------------------------------------------------------------------------------------------------- calls from torch

    def _rerunnable(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn, run in this context: now, and when an activation checkpoint recomputes it, perhaps after the context."""

        @wraps(fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._resumed():
                return fn(*args, **kwargs)

        return run

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        """This context for a recomputation: with the shards of the first run in the buffers."""
        with ExitStack() as stack:
            if self._exit is None:
                self._shard_buffers([b for b in self.buffers if b.restore], stack)
            stack.enter_context(intercepting(self._mode))
            yield

    def _call_on_shards(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """func, with a buffer that it only reads replaced by its alias, which may be saved for backward.

        A write to a buffer itself is counted on the alias, so that backward notices it.
        """
        if not self._buffer_of:
            return func(*args, **kwargs)
        if _only_reads(func, kwargs):
            return func(*(self._readable(a) for a in args), **{name: self._readable(a) for name, a in kwargs.items()})
        versions = [(b, version_of(b.tensor)) for a in (*args, *kwargs.values()) if (b := self._buffer_of.get(id(a))) is not None]
        result = func(*args, **kwargs)
        for buffer, version in versions:
            if buffer.alias is not None and version_of(buffer.tensor) != version:
                mark_written(buffer.alias)
        return result

    def _readable(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            buffer = self._buffer_of.get(id(value))
            return value if buffer is None else buffer.readable()
        if type(value) in (list, tuple) and any(id(v) in self._buffer_of for v in value):
            return type(value)(self._readable(v) for v in value)
        return value


def _only_reads(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function neither writes to its arguments nor reads or sets an attribute of them."""
    name = getattr(func, "__name__", "_")
    if name.startswith("__"):
        return not name.startswith(("__get__", "__set", "__del", "__i"))
    return not name.endswith("_") and "out" not in kwargs and func is not torch.Tensor.backward
