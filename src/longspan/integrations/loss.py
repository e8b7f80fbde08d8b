"""The exact loss of a sequence that spans ranks: each rank's sum over the whole batch's count.

A mean of per-rank means is wrong as soon as ranks hold different numbers of tokens that count: masked prompts, padding, documents.

Legend: B batch, S tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def shift_labels(labels: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """labels [B, S] as each token's next one; the last has none. Of a whole sequence: a shard does not hold its tokens' successors."""
    return pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def token_count(labels: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """How many labels count: an int64 scalar."""
    return (labels != ignore_index).sum()


def token_loss(logits: Tensor, labels: Tensor, *, count: Tensor | float, averaged: int = 1, ignore_index: int = IGNORED) -> Tensor:
    """This rank's share of the mean cross entropy: logits [..., V], labels [...] (shifted before they were sharded), a scalar.

    count:    labels that count in the whole batch, over all ranks.
    averaged: ranks over which gradients will be averaged (DDP, FSDP2: data × context ranks). The share is multiplied by it, so that the
              average of the gradients is the gradient. With 1, the sum over ranks is.
    Sums are in float32 (float64 for float64). The sum over ranks of what this returns, divided by `averaged`, is the whole batch's loss.
    """
    total = cross_entropy(_wide(logits).flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")
    return total * averaged / _at_least_one(count, total)


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    count: Tensor | float,
    averaged: int = 1,
    ignore_index: int = IGNORED,
    chunk: int = 4096,
) -> Tensor:
    """`token_loss` of linear(hidden [B, S, D], weight [V, D]), with logits of `chunk` tokens at a time: never S × V of them."""
    rows, targets = hidden.flatten(0, -2), labels.flatten()

    def part(h: Tensor, t: Tensor) -> Tensor:
        return cross_entropy(_wide(linear(h, weight)), t, ignore_index=ignore_index, reduction="sum")

    total = _wide(rows.new_zeros(()))
    for start in range(0, rows.shape[0], chunk):
        piece = rows[start : start + chunk], targets[start : start + chunk]
        total = total + checkpoint(part, *piece, use_reentrant=False, preserve_rng_state=False)
    return total * averaged / _at_least_one(count, total)


def _wide(x: Tensor) -> Tensor:
    """In float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def _at_least_one(count: Tensor | float, like: Tensor) -> Tensor:
    """A batch in which nothing counts has loss 0."""
    return torch.as_tensor(count, device=like.device, dtype=like.dtype).clamp(min=1)
