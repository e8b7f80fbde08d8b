"""`prepare_batch`: from a whole batch to one rank's, with its plans.

Documents and labels depend on a token's neighbours, so they are derived here from the whole sequence. A shard may hold the head and the
tail of a sequence: alone, its positions jump in the middle.

Legend: B batch, S tokens of the whole sequence, L tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from longspan._comm.mesh import MeshLike
from longspan._masks.algebra import Mask
from longspan._masks.constructors import causal, documents, full
from longspan.integrations._batch_parts import (
    PlanOptions,
    PreparedBatch,
    RealKeys,
    check_every_rank_has_tokens,
    label_keywords,
    own_labels,
    real_tokens,
    split_settings,
)
from longspan.integrations._configs import (
    check_config,
    check_encoder,
    check_implementation,
    chunks_by_position,
    default_positions,
    head_counts,
    is_masked_lm,
    position_rule,
    spans_of,
)
from longspan.integrations._cross_batch import prepare_two_sequences
from longspan.integrations._cross_plans import is_encoder_decoder
from longspan.integrations._decoders import only_decoder_takes_positions
from longspan.integrations._meshes import device_of, mesh_roles
from longspan.integrations._plans import model_plans
from longspan.integrations.loss import IGNORED, shift_labels

_PER_TOKEN = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask", "document_ids", "seq_idx")
_FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def prepare_batch(
    batch: Mapping[str, Any],
    mesh: MeshLike,
    *,
    config: Any = None,
    count: Tensor | float | None = None,
    gradients: Literal["mean", "sum"] = "mean",
    device: torch.device | str | None = None,
    **options: Unpack[PlanOptions],
) -> PreparedBatch:
    """The keywords of a model's forward on this rank, from a whole batch: `model(**prepare_batch(batch, mesh, config=model))`.

    The batch is whole, and equal on all ranks that share a sequence. Over all ranks together the loss is the mean over the whole batch.

    Args:
        batch: `input_ids` [B, S] or `inputs_embeds` [B, S, D], and any of: `labels` [B, S], not shifted; `position_ids` [B, S] or [1, S],
            which start again at each packed document; `document_ids` (or `seq_idx`) [B, S], negative for padding; `cu_seq_lens_q`
            [documents + 1], where documents begin, counted over all rows; `attention_mask` [B, S], 0 for padding. With other entries
            (images, audio, video, token types) or `position_ids` by axis ([3, B, S], or [4, B, S] after those of text) the model gets the
            whole batch, and its text decoder takes this rank's tokens. `num_items_in_batch` is taken as `count`. `return_dict` and
            `output_hidden_states` are passed on; `use_cache=True`, `logits_to_keep` and, in attention, `output_attentions=True` raise.
        mesh: The ranks that share the sequence, as `longspan.plan` takes them. Or a DeviceMesh with an axis "cp" beside any of "dp",
            "dp_replicate", "dp_shard" and "tp": labels are then counted over the data axes too, in one small collective call.
        config: The model or its config. A `ForMaskedLM` model itself (not its config) gets plans of bidirectional attention, and its
            labels are not shifted. An encoder-decoder model itself gets plans of its encoder, its decoder and the cross-attention
            between them: the batch then has `input_ids` and `attention_mask` of the encoder, `labels` or `decoder_input_ids` and
            `decoder_attention_mask` of the decoder, and labels are not shifted. The model must run attn_implementation="longspan". Its
            windows get plans of their own over the common layout. Its head counts help to choose a strategy.
        count: The number of labels that count in the optimizer's step, if that is more than this batch (gradient accumulation).
        gradients: "mean" if gradients will be averaged over context and data ranks, as by DDP and FSDP2; "sum" if they will be summed.
        device: The device of the returned tensors; by default the mesh's.
        **options: Keywords of `longspan.plan`: layout, strategy, heads, …

    Returns:
        `input_ids` [B, L] (or `inputs_embeds`), `position_ids` [B, L], `longspan_plan`, `use_cache` False; with images and the like, all
        inputs whole in place of the first two. With labels also `labels` and
        `shift_labels` [B, L], both shifted, and `num_items_in_batch`, by which a transformers model divides its sum.

    Raises:
        ValueError: If entries of the batch do not fit together, or the model computes something from its shard only.

    Note:
        Packed documents are detected as transformers does: a document starts where `position_ids` do not increase by one. No token sees
        padding. A token that has only padding before it sees nothing, and its label does not count.
    """
    if gradients not in ("mean", "sum"):
        raise ValueError(f"prepare_batch: expected gradients='mean' (DDP, FSDP) or 'sum', got {gradients!r}")
    batch, flags, count = split_settings(batch, count)
    if is_encoder_decoder(config):
        prepared = prepare_two_sequences(batch, mesh, config, count=count, gradients=gradients, device=device, options=options)
        return {**prepared, **flags}
    if getattr(getattr(config, "config", config), "is_encoder_decoder", False):
        raise ValueError(
            f"prepare_batch: expected config= to be an encoder-decoder model with a language modelling head, got {type(config).__name__}; "
            + ("this model is not supported on several ranks" if hasattr(config, "config") else "give the model itself")
        )
    token_types = batch.get("token_type_ids") if is_masked_lm(config) else None
    if token_types is not None:
        batch = {name: value for name, value in batch.items() if name != "token_type_ids"}
    others, positions_by_axis = _other_inputs(batch), _by_axis(batch.get("position_ids"))
    whole_inputs = bool(others) or positions_by_axis is not None or only_decoder_takes_positions(config)
    if positions_by_axis is not None:
        batch = {**batch, "position_ids": positions_by_axis[0] if len(positions_by_axis) == 4 else None}
    tokens, batch_size, length = _tokens(batch)
    bidirectional = is_masked_lm(config)
    config = getattr(config, "config", config)
    plan_options: dict[str, Any] = {"batch": batch_size, **options}
    roles = mesh_roles(mesh)
    if config is not None:
        check_implementation(config)
        check_config(config)
        if bidirectional:
            check_encoder(config)
        plan_options = {**head_counts(config, roles.heads_size), **plan_options}
    positions = _positions(batch, tokens, config)
    mask, blind = _mask(batch, positions, bidirectional=bidirectional)
    real = real_tokens(batch)
    real = None if real is None or bool(real.all()) else real
    spans = [] if config is None else spans_of(config)
    plans = model_plans(
        mask,
        length,
        roles.context,
        spans=spans,
        real_tokens=real,
        bidirectional=bidirectional,
        options=plan_options,
        chunk_origins=_chunk_origins(batch, positions),
    )
    check_every_rank_has_tokens(plans, roles.context_size, length)
    plans.documents_from_positions = _documents_from_positions(batch, positions)
    plans.states_documents = any(batch.get(name) is not None for name in ("document_ids", "seq_idx", "cu_seq_lens_q"))
    plans.whole_inputs = whole_inputs
    if batch.get("position_ids") is None and not whole_inputs:
        plans.position_rule = "by place" if config is None else position_rule(config)

    device = device_of(mesh) if device is None else device

    def local(x: Tensor) -> Tensor:
        return plans.shard(x, 1).to(device if device is not None else x.device)

    def whole(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) and device is not None else x

    prepared = {"longspan_plan": plans, **flags}
    if not bidirectional:
        prepared["use_cache"] = False
    if token_types is not None:
        prepared["token_type_ids"] = local(token_types.expand(batch_size, length))
    own: Any = {name: batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None}
    if whole_inputs:
        stated = {"position_ids": positions_by_axis if positions_by_axis is not None else batch.get("position_ids")}
        own = {**own, **others, **stated, "attention_mask": batch.get("attention_mask")}
        prepared.update({name: whole(value) for name, value in own.items() if value is not None})  # type: ignore[typeddict-item]
    else:
        own = {**own, "position_ids": positions}
        prepared.update({name: local(value) for name, value in own.items()})  # type: ignore[typeddict-item]
    labels = own_labels(batch, blind, "a ForMaskedLM model") if bidirectional else _shifted_labels(batch, blind)
    if labels is not None:
        prepared.update(label_keywords(labels, local, roles, count=count, gradients=gradients))
        if not bidirectional:
            prepared["shift_labels"] = prepared["labels"]
    return prepared


def document_starts(positions: Tensor) -> Tensor:
    """True for the first token of each document, bool [B, S]: where positions [B, S] do not increase by one."""
    jumps = positions[:, 1:] != positions[:, :-1] + 1
    return torch.cat([torch.ones_like(positions[:, :1], dtype=torch.bool), jumps], 1)


def _tokens(batch: Mapping[str, Any]) -> tuple[Tensor, int, int]:
    """(tokens or embeddings, B, S) of a batch whose entries were checked."""
    tokens = batch.get("input_ids")
    if tokens is None:
        tokens = batch.get("inputs_embeds")
    elif batch.get("inputs_embeds") is not None:
        raise ValueError("prepare_batch: expected input_ids or inputs_embeds, got both")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        got = type(tokens).__name__ if not isinstance(tokens, Tensor) else f"shape {tuple(tokens.shape)}"
        raise ValueError(f"prepare_batch: expected input_ids [B, S], got {got}")
    batch_size, length = tokens.shape[:2]
    for name in _PER_TOKEN[2:]:
        value = batch.get(name)
        if value is None:
            continue
        fits = isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == length and value.shape[0] in (1, batch_size)
        if not fits or (value.shape[0] != batch_size and name != "position_ids"):
            hint = "; a mask of query-key pairs belongs in a plan: longspan.plan(mask, …)" if name == "attention_mask" else ""
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"prepare_batch: expected {name} of shape [{batch_size}, {length}] like input_ids, got {got}{hint}")
    return tokens, batch_size, length


def _other_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Images, audio, video and token types: everything that is not split by token."""
    known = (*_PER_TOKEN, *_FLASH_ARGUMENTS)
    return {name: value for name, value in batch.items() if name not in known and value is not None}


def _by_axis(positions: Any) -> Tensor | None:
    """position_ids by axis of M-RoPE, [3, B, S], or [4, B, S] after those of text; None for others."""
    return positions if isinstance(positions, Tensor) and positions.ndim == 3 else None


def _positions(batch: Mapping[str, Any], tokens: Tensor, config: Any) -> Tensor:
    """Token positions [B, S]: of the batch, or numbered as the model numbers a whole batch."""
    positions: Tensor | None = batch.get("position_ids")
    if positions is None:
        return default_positions(config, tokens, real_tokens(batch))
    return positions.expand(tokens.shape[:2])


def _documents_from_positions(batch: Mapping[str, Any], positions: Tensor) -> bool:
    """Whether several documents were derived from position_ids."""
    stated = any(batch.get(name) is not None for name in ("document_ids", "seq_idx", "attention_mask"))
    return not stated and batch.get("position_ids") is not None and bool(document_starts(positions)[:, 1:].any())


def _chunk_origins(batch: Mapping[str, Any], positions: Tensor) -> Tensor | None:
    """The place from which the chunks of each token are counted, int64 [B, S] on the CPU; None: from its row's first real token.

    transformers 5.23 and later count them by the positions of packed documents, earlier versions by places in the row. Documents
    given by ids or lengths alone count from their first token.
    """
    stated = any(batch.get(name) is not None for name in ("document_ids", "seq_idx", "cu_seq_lens_q"))
    if (batch.get("attention_mask") is not None and not stated) or not chunks_by_position():
        return None
    places = torch.arange(positions.shape[1])
    if batch.get("position_ids") is not None:
        return places - positions.cpu() if bool(document_starts(positions)[:, 1:].any()) else None
    ids = _document_ids(batch, positions)
    if ids is None or not bool(ids.diff(dim=1).any()):
        return None
    begins = ids.diff(dim=1, prepend=ids[:, :1]) != 0  # the first document begins at 0
    return torch.where(begins, places, 0).cummax(1).values


def _mask(batch: Mapping[str, Any], positions: Tensor, *, bidirectional: bool) -> tuple[Mask, Tensor | None]:
    """The mask of layers without a window, and the tokens that see nothing, bool [B, S] or None."""
    ids = _document_ids(batch, positions)
    mask: Mask = full() if bidirectional else causal()
    blind = None
    if ids is not None and bool((ids != ids[:, :1]).any() | (ids < 0).any()):
        mask = mask & documents(ids=ids[0] if bool((ids == ids[:1]).all()) else ids)
        blind = ids < 0 if bool((ids < 0).any()) else None
    real = real_tokens(batch)
    if real is not None and not bool(real.all()):
        mask = mask & RealKeys(real[0] if bool((real == real[:1]).all()) else real)
        only_padding_before = (~real.any(1, keepdim=True)).expand_as(real) if bidirectional else real.cumsum(1) == 0
        blind = only_padding_before if blind is None else blind | only_padding_before
    return mask, blind


def _document_ids(batch: Mapping[str, Any], positions: Tensor) -> Tensor | None:
    """The document of each token [B, S] on the CPU, negative for padding; None if the batch does not say."""
    stated, by_lengths = _stated_ids(batch), _ids_from_lengths(batch, positions)
    if stated is not None:
        return stated
    if batch.get("position_ids") is not None:
        starts, real = document_starts(positions).cpu(), real_tokens(batch)
        if real is None:
            ids = starts.cumsum(1)
            if by_lengths is not None and bool((starts[:, 1:] != (by_lengths.diff(dim=1) != 0)).any()):
                raise ValueError(
                    "prepare_batch: expected position_ids that start again where cu_seq_lens_q says that a document begins, got others; "
                    "leave one of them out"
                )
            return ids
        if bool((starts[:, 1:] & real[:, 1:] & real[:, :-1]).any()):
            raise ValueError(
                "prepare_batch: expected position_ids that increase by one, because there is an attention_mask, got some that start again "
                "within a row: transformers would not separate those documents. Give document_ids, or leave out attention_mask"
            )
    return by_lengths


def _stated_ids(batch: Mapping[str, Any]) -> Tensor | None:
    """`document_ids` or `seq_idx` [B, S] on the CPU; None without either."""
    both = [batch[name].cpu() for name in ("document_ids", "seq_idx") if batch.get(name) is not None]
    if len(both) == 2 and not torch.equal(*both):
        raise ValueError("prepare_batch: expected document_ids or seq_idx, got both, and they differ; leave one of them out")
    return both[0] if both else None


def _ids_from_lengths(batch: Mapping[str, Any], positions: Tensor) -> Tensor | None:
    """The document of each token [B, S] by `cu_seq_lens_q` [documents + 1], which counts the tokens of all rows; None without it."""
    bounds, keys = batch.get("cu_seq_lens_q"), batch.get("cu_seq_lens_k")
    if bounds is None and keys is None:
        return None
    if bounds is None or (keys is not None and not torch.equal(bounds.cpu(), keys.cpu())):
        raise ValueError("prepare_batch: expected equal cu_seq_lens_q and cu_seq_lens_k, as of self-attention, got others")
    bounds = bounds.cpu()
    if int(bounds[0]) != 0 or int(bounds[-1]) != positions.numel():
        raise ValueError(
            f"prepare_batch: expected cu_seq_lens_q from 0 to {positions.numel()}, the tokens of all rows, got {int(bounds[0])} to "
            f"{int(bounds[-1])}"
        )
    ids = torch.bucketize(torch.arange(positions.numel()), bounds[1:], right=True).view(positions.shape)
    return ids - ids[:, :1]  # the same for rows with the same documents


def _shifted_labels(batch: Mapping[str, Any], blind: Tensor | None) -> Tensor | None:
    """The next token's label for each token [B, S]; None without labels. A token that sees nothing predicts nothing."""
    shifted: Tensor | None = batch.get("shift_labels")
    if shifted is None:
        if batch.get("labels") is None:
            return None
        shifted = shift_labels(batch["labels"])
    return shifted if blind is None else shifted.masked_fill(blind.to(shifted.device), IGNORED)
