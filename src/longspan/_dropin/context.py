"""`context_parallel`: inside it, torch's attention functions span a mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from longspan._comm.mesh import Mesh
from longspan._dropin.buffers import Buffer, buffers_of, mark_written, version_of
from longspan._dropin.dispatcher import Spanning
from longspan._dropin.intercept import AttentionMode, intercepting
from longspan._plan.layout import Layout


def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    seq_len: int | Sequence[int] | None = None,
    layout: str | Layout | None = None,
    strategy: Any = "auto",
) -> Context:
    """A context in which `F.scaled_dot_product_attention` and `flex_attention`, however imported, span the ranks of `mesh`.

    Inside, q, k and v are this rank's shards [..., S_local, D]; positions, masks and mods are those of the whole sequence. All ranks make
    the same calls. Gradients flow, also when backward, or an activation checkpoint's recomputation, runs after the context has closed.

    mesh:       what `longspan.plan` takes.
    buffers:    plain tensors that hold whole sequences (tokens, positions, labels), the same on every rank: sharded in place along
                `buffer_seq_dims` (negative ones count from the end) on entering, and as before on leaving, on an exception too, but for
                those in `no_restore_buffers`, which stay shards. What is written to a buffer inside is gone afterwards.
    seq_len:    lengths of sequences that are sharded by other means, such as `cp.shard`. With neither buffers nor seq_len, tokens lie in
                the order of ranks, however many each holds, and ranks exchange those counts at each call.
    layout:     "head_tail" (the default), "contiguous", or a Layout. Lengths need not divide by anything.
    strategy:   how keys move, as for `longspan.plan`; by default, those that somebody reads.

    `with context_parallel(…) as cp` gives `cp.shard(x, dim)`, `cp.unshard(x, dim)` and `cp.positions(length)` for other tensors. A context
    may be entered again after it was left; its plans are kept. Contexts nest: the innermost decides, and one on the same mesh shares the
    outer one's sequences. It holds for the thread that entered it.

    Masks may change between calls: each is taken as it is at the call. On a GPU it must be written to in ways that torch counts
    (`tensor._version`), which `.data` and collectives in place are not.

    Refused: dropout, a block_mask or attn_mask of local size, sequences that the context does not know.
    """
    lengths = [] if seq_len is None else [seq_len] if isinstance(seq_len, int) else list(seq_len)
    found = buffers_of(list(buffers or []), list(buffer_seq_dims or []), list(no_restore_buffers or []))
    return Context(mesh, found, lengths, layout, strategy)


_open = threading.local()  # contexts that this thread is in: an inner one shares the sequences of an outer one on the same mesh


class Context:
    """What `context_parallel` returns."""

    def __init__(self, mesh: Any, buffers: list[Buffer], lengths: list[int], layout: Any, strategy: Any) -> None:
        self.buffers, self.layout = buffers, layout
        self.span = Spanning(mesh, layout=layout or "head_tail", strategy=strategy, lengths=lengths)
        self.mode = AttentionMode(sdpa=self.span.sdpa, flex=self.span.flex, again=self.again, other=self._other)
        self._buffer_of = {id(b.tensor): b for b in buffers}
        self._exit: ExitStack | None = None

    @property
    def mesh(self) -> Mesh:
        return self.span.mesh

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor along `dim`, differentiably; its length is known to the context from now on."""
        return self.span.shard(x, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's part along `dim`, differentiably: a collective call."""
        return self.span.unshard(x, dim)

    def positions(self, length: int) -> Tensor:
        """Where this rank's tokens of a sequence of `length` stand in it."""
        return self.span.positions(length)

    # ------------------------------------------------------------------------------------------------------------ in and out

    def __enter__(self) -> Context:
        if self._exit is not None:
            raise RuntimeError("this context is open already: leave it before it is entered again, or make another one")
        with ExitStack() as stack:
            for buffer in self.buffers:
                buffer.forget()
            self._shard_buffers(self.buffers, stack)
            self._share_sequences()
            stack.enter_context(intercepting(self.mode))
            outer = _open.__dict__.setdefault("contexts", [])
            outer.append(self)
            stack.callback(outer.remove, self)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        stack, self._exit = self._exit, None
        if stack is not None:
            stack.__exit__(*error)

    def held(self) -> AbstractContextManager[None]:
        """The same for one call, of a context without buffers; any number at once."""
        return intercepting(self.mode)

    def _shard_buffers(self, buffers: list[Buffer], stack: ExitStack) -> None:
        layouts = [self.span.lengths.layout(b.length) for b in buffers]
        for buffer, layout in zip(buffers, layouts, strict=True):
            if len(layout.rows) > 1 and (buffer.dim == 0 or buffer.tensor.shape[0] != len(layout.rows)):
                raise ValueError(
                    f"buffers: batch rows are laid out differently: dim 0 must be the batch of {len(layout.rows)}, got "
                    f"{tuple(buffer.tensor.shape)} with sequence dim {buffer.dim}"
                )
        for buffer, layout in zip(buffers, layouts, strict=True):
            buffer.shard(layout, self.mesh.rank)
            stack.callback(buffer.unshard)

    def _share_sequences(self) -> None:
        lengths = self.span.lengths
        for outer in _open.__dict__.get("contexts", []):
            if outer.mesh != self.mesh:
                continue
            for length, layout in outer.span.lengths.known.items():
                if lengths.add(layout) != layout:
                    raise ValueError(
                        f"sequences of {length} tokens are laid out otherwise by a context around this one, on the same mesh: "
                        "give both the same layout"
                    )

    # ------------------------------------------------------------------------------------------------------- what torch calls

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn, run in this context whenever it is run: now, and when a checkpoint recomputes it, after the context has closed too."""

        @wraps(fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._resumed():
                return fn(*args, **kwargs)

        return run

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._exit is None:
                self._shard_buffers([b for b in self.buffers if b.restore], stack)
            stack.enter_context(intercepting(self.mode))
            yield

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls that read a buffer get it under a name that lasts; what is written to the buffer itself, torch learns of."""
        if not self._buffer_of:
            return func(*args, **kwargs)
        if _only_reads(func, kwargs):
            return func(*(self._current(a) for a in args), **{name: self._current(a) for name, a in kwargs.items()})
        met = [(b, version_of(b.tensor)) for a in (*args, *kwargs.values()) if (b := self._buffer_of.get(id(a))) is not None]
        result = func(*args, **kwargs)
        for buffer, version in met:
            if buffer.alias is not None and version_of(buffer.tensor) != version:
                mark_written(buffer.alias)
        return result

    def _current(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            buffer = self._buffer_of.get(id(value))
            return value if buffer is None else buffer.current()
        if type(value) in (list, tuple) and any(id(v) in self._buffer_of for v in value):
            return type(value)(self._current(v) for v in value)
        return value


def _only_reads(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function neither writes to its arguments nor reads or sets attributes of them."""
    name = getattr(func, "__name__", "_")
    if name.startswith("__"):
        return not name.startswith(("__get__", "__set", "__del", "__i"))
    return not name.endswith("_") and "out" not in kwargs and func is not torch.Tensor.backward
