"""The exact loss of a sequence that is split over ranks: each rank's sum divided by the count of the whole batch.

A mean of per-rank means is wrong if ranks hold different numbers of counted tokens, as with masked prompts, padding or documents.

Legend: B batch, S tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

from longspan.integrations import _liger
from longspan.integrations._wide_sums import aliases

__all__ = ["IGNORED", "linear_token_loss", "shift_labels", "token_count", "token_loss"]

LossKernel = Literal["auto", "liger", "tiled"]
IGNORED = -100  # the label of a token that does not count


def shift_labels(labels: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """The next token's label for each token: labels [B, S] shifted left by one.

    Call it on whole sequences, before they are sharded: a shard does not hold the successor of each of its tokens.

    Args:
        labels: Token ids [B, S], or [S].
        ignore_index: The label of the last token, which has no successor.

    Returns:
        A tensor of the same shape.
    """
    return pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def token_count(labels: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """The number of labels that count: an int64 scalar.

    Args:
        labels: Shifted labels of the whole batch, of any shape.
        ignore_index: The label that does not count.
    """
    return (labels != ignore_index).sum()


def token_loss(logits: Tensor, labels: Tensor, *, count: Tensor | float, averaged: int = 1, ignore_index: int = IGNORED) -> Tensor:
    """This rank's share of the whole batch's mean cross entropy: a scalar.

    The sum of all ranks' shares, divided by `averaged`, is the loss of the whole batch. Sums are in float32, or float64 for float64.

    Args:
        logits: [..., V], of this rank's tokens.
        labels: [...], of this rank's tokens, shifted before they were sharded.
        count: The number of labels that count in the whole batch, over all ranks (see `token_count`).
        averaged: The number of ranks over which gradients will be averaged: data × context ranks for DDP and FSDP2. The share is
            multiplied by it, so that the average of the gradients is the gradient. With 1, their sum is.
        ignore_index: The label that does not count.

    Returns:
        The share, in float32 or float64. 0 if no label counts.
    """
    total = cross_entropy(_widened(logits).flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")
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
    kernel: LossKernel = "auto",
) -> Tensor:
    """`token_loss` of linear(hidden, weight), with the logits of at most `chunk` tokens in memory at a time.

    The tiled loss computes the logits again in the backward pass, chunk by chunk; Liger's computes gradients in the forward pass. The
    gradient of the weight is summed over chunks in float32 and rounded once.

    Args:
        hidden: [..., D], the last hidden states of this rank's tokens.
        weight: [V, D], the output embedding.
        labels: [...], of this rank's tokens, shifted before they were sharded.
        count: The number of labels that count in the whole batch, over all ranks.
        averaged: The number of ranks over which gradients will be averaged, as in `token_loss`.
        ignore_index: The label that does not count.
        chunk: Tokens whose logits are in memory at once.
        kernel: "tiled"; "liger", Liger's kernel, or ValueError where it cannot compute the call; "auto", Liger's where it is installed,
            can compute the call and was faster in a measurement at the first call with these sizes, else the tiled one.

    Returns:
        This rank's share of the loss: a scalar, in float32 or float64.
    """
    if kernel not in ("auto", "liger", "tiled"):
        raise ValueError(f"linear_token_loss: expected kernel 'auto', 'liger' or 'tiled', got {kernel!r}")
    tokens, targets = hidden.flatten(0, -2), labels.flatten()
    if tokens.shape[0] != targets.shape[0]:
        raise ValueError(f"linear_token_loss: expected a label for each of {tokens.shape[0]} tokens, got {targets.shape[0]} labels")

    liger, tiled = (functools.partial(f, ignore_index=ignore_index) for f in (_liger.liger_sum, functools.partial(_tiled_sum, chunk=chunk)))
    reason = "" if kernel == "tiled" else _liger.unsupported(tokens, weight, chunk)
    if kernel == "liger" and reason:
        raise ValueError(f"linear_token_loss: Liger's kernel cannot compute this call: {reason}. Give kernel='tiled'")
    by_liger = kernel == "liger" or (kernel == "auto" and not reason and _liger.is_faster(liger, tiled, tokens, weight))
    total = (liger if by_liger else tiled)(tokens, weight, targets)
    return total * averaged / _at_least_one(count, total)


def _tiled_sum(tokens: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int, chunk: int) -> Tensor:
    """The sum of the losses of tokens [T, D], by chunks."""
    alias = aliases(weight)

    def chunk_sum(h: Tensor, t: Tensor) -> Tensor:
        return cross_entropy(_widened(linear(h, alias())), t, ignore_index=ignore_index, reduction="sum")

    total = _widened(tokens.new_zeros(()))
    # One split: the gradient of each slice alone would be as large as `tokens`.
    with autocast_without_cache(tokens.device.type):
        for part, part_targets in zip(tokens.split(chunk), targets.split(chunk)):
            total = total + checkpoint(chunk_sum, part, part_targets, use_reentrant=False, preserve_rng_state=False)
    return total


def _widened(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def _at_least_one(count: Tensor | float, like: Tensor) -> Tensor:
    """The count as a divisor: 1 for a batch in which no label counts, so that its loss is 0 instead of NaN."""
    return torch.as_tensor(count, device=like.device, dtype=like.dtype).clamp(min=1)


def autocast_without_cache(device: str) -> AbstractContextManager[Any]:
    """Under autocast, let every chunk cast weights for itself. Chunks that share a bfloat16 copy would sum its gradients in bfloat16."""
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
