"""Parts of `prepare_batch` for all kinds of models: types, padding, and this rank's share of the labels.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from longspan._cost.rates import Cluster
from longspan._masks.algebra import Mask
from longspan._masks.extent import Extent
from longspan._plan.layout import Layout
from longspan._plan.schedule import Schedule
from longspan.integrations._meshes import MeshRoles, sum_over_data_ranks
from longspan.integrations._plans import ModelPlans
from longspan.integrations.loss import IGNORED, token_count


class PlanOptions(TypedDict, total=False):
    """Keywords of `longspan.plan` that `prepare_batch` passes on."""

    layout: str | Layout
    strategy: str | Schedule
    heads: int
    kv_heads: int
    head_dim: int
    stages: int | None
    overlap: bool | None
    grad_reduce_dtype: torch.dtype | None
    cluster: Cluster | str | None


class ForwardFlags(TypedDict, total=False):
    """Settings of a forward that `prepare_batch` passes on. `output_attentions=True` raises in attention."""

    return_dict: bool
    output_hidden_states: bool
    output_attentions: bool


class PreparedBatch(ForwardFlags, total=False):
    """The keywords of a model's forward on one rank: see `prepare_batch`."""

    input_ids: Tensor
    inputs_embeds: Tensor
    position_ids: Tensor
    longspan_plan: ModelPlans
    use_cache: bool
    labels: Tensor
    shift_labels: Tensor
    num_items_in_batch: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor


_FLAGS = tuple(ForwardFlags.__annotations__)


def split_settings(batch: Mapping[str, Any], count: Tensor | float | None) -> tuple[dict[str, Any], ForwardFlags, Tensor | float | None]:
    """(the tensors of a batch, settings of the forward among its entries, the number of labels): entries that are no inputs of a model.

    Raises:
        ValueError: `num_items_in_batch` is not `count`, or a setting is not supported on ranks.
    """
    given = batch.get("num_items_in_batch")
    if given is not None and count is not None and float(given) != float(count):
        raise ValueError(
            f"prepare_batch: expected count= and num_items_in_batch of the batch to be equal, got {float(count):g} and {float(given):g}; "
            "leave one of them out"
        )
    for name in ("use_cache", "logits_to_keep"):
        value = batch.get(name)
        if isinstance(value, Tensor) or value:
            hint = "a forward with a plan has no cache" if name == "use_cache" else "a rank has logits of its own tokens only"
            raise ValueError(f"prepare_batch: expected no {name} in the batch, got {value}: {hint}")
    flags: Any = {name: batch[name] for name in _FLAGS if batch.get(name) is not None}
    settings = (*_FLAGS, "num_items_in_batch", "use_cache", "logits_to_keep")
    inputs = {name: value for name, value in batch.items() if name not in settings}
    return inputs, flags, count if given is None else given


def real_tokens(batch: Mapping[str, Any], name: str = "attention_mask") -> Tensor | None:
    """False for padding, bool [B, S] on the CPU; None without an attention_mask."""
    if batch.get(name) is None:
        return None
    attention_mask: Tensor = batch[name].cpu()
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError(f"prepare_batch: expected {name} of 0 (padding) and 1, got others; for packed documents give document_ids")
    return attention_mask != 0


@dataclass(frozen=True, eq=False)
class RealKeys(Mask):
    """The mask by which every query sees the keys that are not padding. `real`: bool [S] or [B, S], False for padding."""

    real: Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        real = self.real.to(kv_idx.device) if kv_idx.is_cuda else self.real
        return (real[kv_idx] if real.ndim == 1 else real[b, kv_idx]) & (q_idx >= 0)

    @property
    def extent(self) -> Extent:
        return Extent(kv_len=self.real.shape[-1], batch=self.real.shape[0] if self.real.ndim == 2 else None)

    def __str__(self) -> str:
        return f"real keys({self.real.shape[-1]} tokens)"


def own_labels(batch: Mapping[str, Any], blind: Tensor | None, kind: str) -> Tensor | None:
    """The label of each token [B, S], not shifted; None without labels. A token that sees nothing predicts nothing."""
    if batch.get("shift_labels") is not None:
        raise ValueError(f"prepare_batch: expected labels for {kind}, whose labels are not shifted, got shift_labels")
    labels: Tensor | None = batch.get("labels")
    return labels if labels is None or blind is None else labels.masked_fill(blind.to(labels.device), IGNORED)


def label_keywords(
    labels: Tensor,
    local: Callable[[Tensor], Tensor],
    roles: MeshRoles,
    *,
    count: Tensor | float | None,
    gradients: Literal["mean", "sum"],
) -> PreparedBatch:
    """`labels` [B, L] of this rank, and `num_items_in_batch`. labels: [B, S]; local: takes this rank's tokens."""
    total = sum_over_data_ranks(token_count(labels), roles) if count is None else torch.as_tensor(count)
    divisor = total.clamp(min=1) / (roles.averaged if gradients == "mean" else 1)
    local_labels = local(labels)
    return {"labels": local_labels, "num_items_in_batch": divisor.to(local_labels.device)}


def check_every_rank_has_tokens(plans: ModelPlans, ranks: int, length: int) -> None:
    if any(plans.layout.local_len(r) == 0 for r in range(ranks)):
        raise ValueError(f"prepare_batch: expected at least one token per rank, got {length} tokens for {ranks} ranks; use fewer ranks")
