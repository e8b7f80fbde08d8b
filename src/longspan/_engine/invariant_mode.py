"""`invariant`: the context in which attention has the same bits whatever the batch, the packing, the chunks and the ranks."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

import torch

_active: ContextVar[bool] = ContextVar("longspan_invariant", default=False)


class invariant:
    """Context in which each row of an attention has the same bits wherever it is computed.

    In the context, `attention` and the functions built on it give each query's out, lse and dq, and each key's dk and dv, bits that depend
    on the row's own sequence only: not on the batch, on the offset of its document in a packed sequence, on the number of queries in the
    call, on the number of ranks, the layout or the strategy. Backward passes follow the mode of their forward pass. The mode belongs to the
    thread or task that entered it, like `torch.no_grad`.

    Kernels: 'cpu' and 'triton'; other named kernels raise. Over a mesh, every strategy gathers the KV of all ranks, and the backward pass
    also q and the gradient of out: memory per rank grows with the whole sequence. See the how-to page "Same bits everywhere".

    Example:
        >>> with longspan.invariant():
        ...     out = longspan.attention(q, k, v, mask=longspan.causal())
    """

    def __init__(self) -> None:
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> invariant:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "longspan.invariant(): enter the context outside of the compiled function; compiled attention is not supported"
            )
        self._tokens.append(_active.set(True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _active.reset(self._tokens.pop())


def is_invariant() -> bool:
    """Whether the calling thread is in the context."""
    return _active.get()
