"""From a whole batch to a rank's: plan, local tokens, positions, labels.

All that depends on a token's neighbours (documents, labels) is decided here, on the whole sequence. A shard may hold the head and the tail
of it: seen alone, its positions jump.

Legend: B batch, S tokens of the whole sequence, L those of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan._masks.algebra import Extent, Mask, causal, documents
from longspan.integrations._configs import check_config, check_implementation, head_counts, windows_of
from longspan.integrations._meshes import device_of, roles, summed_over_data
from longspan.integrations._plans import ModelPlans, model_plans
from longspan.integrations.loss import IGNORED, shift_labels, token_count

_KNOWN = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask", "document_ids", "seq_idx")
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def prepare_batch(
    batch: Mapping[str, Any],
    mesh: Any,
    *,
    config: Any = None,
    count: Tensor | float | None = None,
    gradients: str = "mean",
    device: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """What a model's forward takes on this rank, from a batch that is whole and the same on all ranks of the context axis.

    batch:     `input_ids` [B, S] (or `inputs_embeds`), and as they are there: `labels` [B, S], not shifted; `position_ids` [B, S] or
               [1, S], which say where packed documents begin; `document_ids` (or `seq_idx`) [B, S], which say it themselves, negative
               for padding; `attention_mask` [B, S], 0 for padding.
    mesh:      what `longspan.plan` takes: all ranks share the sequence. Or a DeviceMesh with an axis "cp", beside "dp", "dp_replicate",
               "dp_shard", "tp": then labels are counted over the data axes too, in one small collective.
    config:    the model or its config. It must run attn_implementation="longspan". Its windows get plans of their own over the common
               layout, its head counts help to choose a strategy.
    count:     labels that count in all that the optimizer's step will see, if that is more than this batch (gradient accumulation).
    gradients: "mean" if gradients will be averaged over context and data ranks, as DDP and FSDP2 do it; "sum" if they will be summed.
    device:    where the tensors go; the mesh's device unless given.
    options:   for `longspan.plan`: layout, strategy, heads, …

    Returns `input_ids` [B, L], `position_ids` [B, L], `longspan_plan`, `use_cache` False; and with labels, shifted: `labels` and
    `shift_labels` [B, L], and `num_items_in_batch`, by which a transformers model divides its sum. On all ranks together the loss is the
    mean over the whole batch.

    Documents are found as transformers finds them: where `position_ids` do not go up by one. Padding is not seen by any token. Tokens that
    have only padding before them see nothing, and what they would predict does not count.
    """
    if gradients not in ("mean", "sum"):
        raise ValueError(f"prepare_batch: gradients must be 'mean' (DDP, FSDP) or 'sum', got {gradients!r}")
    tokens, rows, length = _tokens(batch)
    config = getattr(config, "config", config)
    if config is not None:
        check_implementation(config)
        check_config(config)
    found = roles(mesh)
    positions = _positions(batch, rows, length)
    mask, blind = _mask(batch, positions, rows, length)
    if config is not None:
        options = {**head_counts(config, found.heads_size), **options}
    windows = [] if config is None else windows_of(config)
    plans = model_plans(mask, length, found.context, windows, {"batch": rows, **options})
    _check_shares(plans, found.context_size, length)

    device = device_of(mesh) if device is None else device

    def mine(x: Tensor) -> Tensor:
        return plans.shard(x, 1).to(device if device is not None else x.device)

    name = "input_ids" if "input_ids" in batch else "inputs_embeds"
    out: dict[str, Any] = {name: mine(tokens), "position_ids": mine(positions), "longspan_plan": plans, "use_cache": False}
    labels = _labels(batch, blind)
    if labels is not None:
        local = mine(labels)
        total = summed_over_data(token_count(labels), found) if count is None else torch.as_tensor(count)
        share = total.clamp(min=1) / (found.averaged if gradients == "mean" else 1)
        out |= {"labels": local, "shift_labels": local, "num_items_in_batch": share.to(local.device)}
    return out


def document_starts(positions: Tensor) -> Tensor:
    """positions [B, S] → True where a document begins: where positions do not go up by one."""
    jumps = positions[:, 1:] != positions[:, :-1] + 1
    return torch.cat([torch.ones_like(positions[:, :1], dtype=torch.bool), jumps], 1)


def _tokens(batch: Mapping[str, Any]) -> tuple[Tensor, int, int]:
    unknown = [name for name, value in batch.items() if name not in (*_KNOWN, *_FLASH) and value is not None]
    if unknown:
        raise ValueError(
            f"prepare_batch: cannot split {', '.join(map(repr, unknown))} over ranks; it knows {', '.join(map(repr, _KNOWN))}. "
            "Take the others out of the batch; what belongs to no token can be given to the model beside what this returns"
        )
    tokens = batch.get("input_ids")
    if tokens is None:
        tokens = batch.get("inputs_embeds")
    elif batch.get("inputs_embeds") is not None:
        raise ValueError("prepare_batch: expected input_ids or inputs_embeds, got both")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        got = type(tokens).__name__ if not isinstance(tokens, Tensor) else f"shape {tuple(tokens.shape)}"
        raise ValueError(f"prepare_batch: expected input_ids [B, S], got {got}")
    rows, length = tokens.shape[:2]
    for name in _KNOWN[2:]:
        value = batch.get(name)
        if value is None:
            continue
        alike = isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == length and value.shape[0] in (1, rows)
        if not alike or (value.shape[0] != rows and name != "position_ids"):
            hint = "; a mask of pairs belongs in a plan: longspan.plan(mask, …)" if name == "attention_mask" else ""
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"prepare_batch: {name} must be [{rows}, {length}] like input_ids, got {got}{hint}")
    return tokens, rows, length


def _positions(batch: Mapping[str, Any], rows: int, length: int) -> Tensor:
    given = batch.get("position_ids")
    if given is None:
        return torch.arange(length).expand(rows, length)
    return given.expand(rows, length)


def _mask(batch: Mapping[str, Any], positions: Tensor, rows: int, length: int) -> tuple[Mask, Tensor | None]:
    """The mask of layers without a window, and which tokens [B, S] see nothing at all; None for none."""
    ids = batch.get("document_ids") if batch.get("document_ids") is not None else batch.get("seq_idx")
    real = batch.get("attention_mask")
    if real is not None:
        real = _padding(real)
    if ids is None and batch.get("position_ids") is not None:
        starts = document_starts(positions).cpu()
        if real is None:
            ids = starts.cumsum(1)
        elif bool((starts[:, 1:] & real[:, 1:] & real[:, :-1]).any()):
            raise ValueError(
                "prepare_batch: position_ids begin anew within a row, and there is an attention_mask: with both, transformers would not "
                "keep the documents apart. Give document_ids, or leave out attention_mask"
            )
    if ids is None and batch.get("cu_seq_lens_q") is not None:
        ids = torch.bucketize(torch.arange(length), batch["cu_seq_lens_q"].cpu()[1:-1], right=True)[None].expand(rows, length)
    mask, blind = causal(), None
    if ids is not None and bool((ids != ids[:, :1]).any() | (ids < 0).any()):
        ids = ids.cpu()
        mask = mask & documents(ids=ids[0] if bool((ids == ids[:1]).all()) else ids)
        blind = ids < 0 if bool((ids < 0).any()) else None
    if real is not None and not bool(real.all()):
        mask = mask & RealKeys((real[0] if bool((real == real[:1]).all()) else real).contiguous())
        first = real.int().cumsum(1) == 0
        blind = first if blind is None else blind | first
    return mask, blind


def _padding(given: Tensor) -> Tensor:
    given = given.cpu()
    if bool(((given != 0) & (given != 1)).any()):
        raise ValueError("prepare_batch: attention_mask must hold 0 (padding) and 1; for packed documents give document_ids")
    return given != 0


@dataclass(frozen=True, eq=False)
class RealKeys(Mask):
    """Every query sees the keys that are no padding. `real` [S] or [B, S]."""

    real: Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        real = self.real.to(kv_idx.device) if kv_idx.is_cuda else self.real
        return (real[kv_idx] if real.ndim == 1 else real[b, kv_idx]) & (q_idx >= 0)

    @property
    def extent(self) -> Extent:
        return Extent(kv_len=self.real.shape[-1], batch=self.real.shape[0] if self.real.ndim == 2 else None)

    def __str__(self) -> str:
        return f"real keys({self.real.shape[-1]} tokens)"


def _labels(batch: Mapping[str, Any], blind: Tensor | None) -> Tensor | None:
    """Labels [B, S], each token's next one. A token that sees nothing, not even itself, predicts nothing."""
    shifted = batch.get("shift_labels")
    if shifted is None:
        if batch.get("labels") is None:
            return None
        shifted = shift_labels(batch["labels"])
    return shifted if blind is None else shifted.masked_fill(blind.to(shifted.device), IGNORED)


def _check_shares(plans: ModelPlans, ranks: int, length: int) -> None:
    if any(plans.layout.local_len(r) == 0 for r in range(ranks)):
        raise ValueError(f"prepare_batch: {length} tokens are too few for {ranks} ranks: models cannot run on none. Use fewer ranks")
