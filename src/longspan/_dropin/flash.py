"""`flash_attn_func` and `flash_attn_varlen_func` with the signatures that transformers calls, over `longspan.attention`.

Legend: B batch, S queries, T keys, H query heads, G KV heads, D head dim; in packed tensors, S and T count the tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longspan._engine.attention import attention
from longspan._masks.algebra import Mask
from longspan._masks.constructors import causal as causal_mask
from longspan._masks.constructors import documents, full, mask_mod, sliding_window

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of q [B, S, H, D] to k and v [B, T, G, D]: [B, S, H, D].

    A causal mask and a window end at the last query and the last key, as in flash-attn: query i stands at key i + T - S.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        dropout_p: Must be 0.
        softmax_scale: 1/√D by default.
        causal: Whether a query sees no later keys.
        window_size: How many keys before and after its own place a query sees; -1 for all.
        softcap: Scores become softcap · tanh(score / softcap); 0 for none.
        deterministic: If True, torch.use_deterministic_algorithms(True) must be set, by which gradients have the same bits in every run.
        s_aux: [H], the logits of attention sinks.
    """
    _check(dropout_p, deterministic)
    left, right = _sides(window_size, causal)
    queries, keys = q.shape[1], k.shape[1]
    if queries == 1:  # decoding: the query stands at the last key, so that a window is a slice
        first = 0 if left is None else max(0, keys - 1 - left)
        k, v, mask = k[:, first:], v[:, first:], full()
    elif queries == keys or (left is None and right is None):
        mask = _aligned(left, right)
    else:
        # Captured as a tensor: with a number, the mask would be another program for each length, and so another kernel to compile.
        shift = torch.full((), keys - queries, device="cpu")
        mask = mask_mod(lambda b, h, i, j: _between(j - i - shift, left, right))
    return _attend(q, k, v, mask, softmax_scale, softcap, s_aux)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """As `flash_attn_func`, for sequences that are packed one after another: q [S, H, D], k and v [T, G, D].

    Args:
        q: Queries of all sequences.
        k: Keys of all sequences.
        v: Values of all sequences.
        cu_seqlens_q: [N + 1], where the queries of each sequence begin, and the end. Read on the host.
        cu_seqlens_k: [N + 1], likewise of keys.
        max_seqlen_q: Not used.
        max_seqlen_k: Not used.
        dropout_p: Must be 0.
        softmax_scale: 1/√D by default.
        causal: Whether a query sees no later keys of its sequence.
        window_size: How many keys before and after its own place a query sees; -1 for all.
        softcap: Scores become softcap · tanh(score / softcap); 0 for none.
        deterministic: If True, torch.use_deterministic_algorithms(True) must be set, by which gradients have the same bits in every run.
        s_aux: [H], the logits of attention sinks.

    Raises:
        ValueError: Bounds that do not ascend from 0 to the number of tokens, or numbers of sequences that differ.
    """
    _check(dropout_p, deterministic)
    bounds_q, bounds_k = _bounds(cu_seqlens_q, "cu_seqlens_q", q.shape[0]), _bounds(cu_seqlens_k, "cu_seqlens_k", k.shape[0])
    if len(bounds_q) != len(bounds_k):
        raise ValueError(
            "flash_attn_varlen_func: expected cu_seqlens_q and cu_seqlens_k of equally many sequences, got "
            f"{len(bounds_q) - 1} in cu_seqlens_q and {len(bounds_k) - 1} in cu_seqlens_k"
        )
    left, right = _sides(window_size, causal)
    if torch.equal(bounds_q, bounds_k):
        mask = _aligned(left, right) & documents(lengths=[n for n in bounds_q.diff().tolist() if n])
    else:
        mask = _packed(bounds_q, bounds_k, left, right, q.device)
    return _attend(q[None], k[None], v[None], mask, softmax_scale, softcap, s_aux)[0]


def _check(dropout_p: float, deterministic: bool) -> None:
    if dropout_p:
        raise ValueError(f"longspan: expected dropout_p=0.0, got {dropout_p}: attention dropout is not supported")
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("longspan: deterministic=True needs torch.use_deterministic_algorithms(True), which is not set")


def _bounds(cu_seqlens: Tensor, name: str, tokens: int) -> Tensor:
    """[N + 1] int64 on the CPU. Raises ValueError unless they ascend from 0 to the number of tokens."""
    bounds = cu_seqlens.cpu().long()
    if bounds.dim() != 1 or not len(bounds):
        raise ValueError(f"flash_attn_varlen_func: expected {name} of shape [sequences + 1], got {list(bounds.shape)}")
    first, last = int(bounds[0]), int(bounds[-1])
    if first != 0 or last != tokens:
        raise ValueError(f"flash_attn_varlen_func: expected {name} from 0 to {tokens}, got {first} to {last}")
    if bool((bounds.diff() < 0).any()):
        raise ValueError(f"flash_attn_varlen_func: expected {name} that ascend, got {bounds.tolist()}")
    return bounds


def _sides(window_size: Window, causal: bool) -> tuple[int | None, int | None]:
    """How many keys before and after its place a query sees; None for all."""
    left, right = (None if n < 0 else int(n) for n in window_size)
    return left, 0 if causal else right


def _aligned(left: int | None, right: int | None) -> Mask:
    """The mask of as many queries as keys."""
    mask = causal_mask() if right == 0 else full()
    if left is None and right in (None, 0):
        return mask
    if left is not None:
        return mask & sliding_window(left + 1, 0 if right == 0 else right if right is not None else _FAR)
    return mask_mod(lambda b, h, i, j: _between(j - i, left, right))


_FAR = 2**30  # more keys than any sequence has


def _between(distance: Tensor, left: int | None, right: int | None) -> Tensor:
    """Whether a key at this distance after the query's place is visible."""
    seen = distance >= (-_FAR if left is None else -left)
    return seen & (distance <= (_FAR if right is None else right))


def _packed(bounds_q: Tensor, bounds_k: Tensor, left: int | None, right: int | None, device: torch.device) -> Mask:
    """The mask of sequences with different numbers of queries and keys."""
    lengths_q, lengths_k = bounds_q.diff(), bounds_k.diff()
    numbers = torch.arange(len(lengths_q))
    sequence_q, sequence_k = (numbers.repeat_interleave(n).to(device) for n in (lengths_q, lengths_k))
    shift = (bounds_k[1:] - bounds_q[1:]).repeat_interleave(lengths_q).to(device)

    def packed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (sequence_q[i] == sequence_k[j]) & _between(j - i - shift[i], left, right)

    return mask_mod(packed)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, softcap: float, sink: Tensor | None) -> Tensor:
    score_mod: Callable[..., Tensor] | None = None
    if softcap:
        score_mod = lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)  # noqa: E731
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = attention(*by_head, mask=mask, score_mod=score_mod, scale=scale, sink=sink)
    return out.transpose(1, 2)
