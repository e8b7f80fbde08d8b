"""`invariant`: the context in which attention has the same bits whatever the batch, the packing, the chunks and the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, _DummyThread, current_thread

import torch

_active: ContextVar[bool] = ContextVar("longspan_invariant", default=False)
_entered = 0  # contexts that are active, in all threads
_lock = Lock()


@contextmanager
def invariant() -> Iterator[None]:
    """Context in which each row of an attention has the same bits wherever it is computed.

    In the context, `attention` and the functions built on it give each query's out, lse and dq, and each key's dk and dv, bits that depend
    on the row's own sequence only: not on the batch, the offset of its document in a packed sequence, the number of queries in the call,
    the number of ranks, the layout or the strategy. Backward passes follow the mode of their forward pass. The mode belongs to the thread
    or task that entered it, as that of `torch.no_grad`; as that, it may decorate a function.

    Kernels: 'cpu', 'triton' and 'hopper'; others raise, and so does torch.compile. Over a mesh, every strategy gathers the KV of all
    ranks, and the backward pass also q and the gradient of out: memory per rank grows with the whole sequence. The
    how-to page "Same bits everywhere" says what the results may depend on.

    Example:
        >>> with longspan.invariant():
        ...     out = longspan.attention(q, k, v, mask=longspan.causal())
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("longspan.invariant(): enter the context outside of the compiled function, and call the attention uncompiled")
    token = _active.set(True)
    _count(1)
    try:
        yield
    finally:
        _active.reset(token)
        _count(-1)


def _count(change: int) -> None:
    global _entered
    with _lock:
        _entered += change


def is_invariant() -> bool:
    """Whether the calling thread is in the context.

    Autograd's threads, in which activation checkpointing recomputes forward passes on CUDA, have no context of their own: there it is
    active if any thread is in it. Python did not start these threads.
    """
    return bool(_entered) and (_active.get() or isinstance(current_thread(), _DummyThread))
