"""Tiny random models of five families, batches of several kinds, and comparison with one process."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

import longspan.integrations.transformers as lst
from longspan.integrations._batch import document_starts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": 23, "layer_types": LAYERS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 11},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 23, "layer_types": LAYERS, "final_logit_softcapping": 5.0}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "sliding_window": 19, "layer_types": LAYERS, "num_local_experts": 3, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}  # fmt: skip


@cache
def _weights(family: str) -> Any:
    kind, config, extra = FAMILIES[family]
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(config(**COMMON, **extra))
    for name, p in model.named_parameters():
        if p.ndim == 1 or "sinks" in name:
            torch.nn.init.normal_(p, mean=0.3, std=0.5)
        else:
            torch.nn.init.normal_(p, std=0.15)
    return model.eval()


DEEPSEEK = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 6, "n_shared_experts": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_nope_head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def decoding_model(family: str, implementation: str) -> Any:
    """A float64 model of a family, "deepseek_v3" (MLA) included: rounding does not decide between two tokens."""
    if family != "deepseek_v3":
        return model_of(family, implementation).double()
    model = _deepseek(implementation)
    generator = torch.Generator().manual_seed(5)  # of its own: ranks may be threads
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(mean=0.3 if p.ndim == 1 else 0.0, std=0.5 if p.ndim == 1 else 0.15, generator=generator)
    return model


def _deepseek(implementation: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = DeepseekV3Config(**DEEPSEEK, attn_implementation=implementation, experts_implementation="eager")
        return DeepseekV3ForCausalLM(config).eval().double()


def model_of(family: str, implementation: str = "eager") -> Any:
    """A new float32 model of a family, with the same weights each time."""
    model = _weights(family)
    kind, config, extra = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = kind(config(**COMMON, **extra, attn_implementation=implementation, experts_implementation="eager")).eval()
    made.load_state_dict(model.state_dict())
    return made


def batch_of(kind: str, length: int = 157, rows: int = 2) -> dict[str, Tensor]:
    """A batch with masked prompts: "plain", "packed" (documents, different in each row), padded "left" or "right"."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :31] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        cuts = [[0, 60, 77, 140], [0, 9, 101]]
        starts = torch.zeros(rows, length, dtype=torch.long)
        for row in range(rows):
            starts[row, cuts[row % 2]] = torch.tensor(cuts[row % 2])
        batch["position_ids"] = torch.arange(length) - starts.cummax(1).values
    if kind in ("left", "right"):
        pads = torch.tensor([13, 41])[:rows, None]
        place = torch.arange(length)[None]
        real = place >= pads if kind == "left" else place < length - pads
        batch["attention_mask"] = real.long()
        labels[~real] = -100
        if kind == "left":
            labels.scatter_(1, pads, -100)  # padding would have to predict it
    return batch


def results(model: Any, batch: dict[str, Any], params: list[Tensor] | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(loss, logits, the gradient of every parameter)."""
    out = model(**batch)
    params = list(model.parameters()) if params is None else params
    grads = torch.autograd.grad(out.loss, params, allow_unused=True)
    return out.loss.detach(), out.logits.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads)]


def on_rank(model: Any, batch: dict[str, Tensor], mesh: Any, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(this rank's share of the loss, the logits of all ranks, this rank's share of the gradients); shares add up over ranks."""
    if "position_ids" in batch and model.config.model_type == "gpt_oss":  # which does not look for documents in position_ids
        batch = {**batch, "document_ids": document_starts(batch["position_ids"]).cumsum(1)}
    prepared = lst.prepare_batch(batch, mesh, config=model.config, gradients="sum", **options)
    loss, logits, grads = results(model, prepared)
    return loss, prepared["longspan_plan"].unshard(logits, 1), grads


def recompute(model: Any) -> None:
    """Enable transformers' activation checkpointing, by its name before or since 5.23."""
    _checkpointing(model, "enable")()


def keep_activations(model: Any) -> None:
    """Disable it."""
    _checkpointing(model, "disable")()


def _checkpointing(model: Any, action: str) -> Any:
    return getattr(model, f"activation_checkpointing_{action}", None) or getattr(model, f"gradient_checkpointing_{action}")


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def _pair_masks(positions: Tensor, window: int) -> dict[str, Tensor]:
    """S × S masks of packed documents for gpt-oss, which does not detect documents by position_ids."""
    place = torch.arange(positions.shape[1])
    document = (place - positions)[:, None]
    seen = (document == document.mT) & (place[:, None] >= place)
    in_window = seen & (place[:, None] - place < window)
    lowest = torch.finfo(torch.float32).min
    return {name: torch.where(m, 0.0, lowest)[:, None] for name, m in (("full_attention", seen), ("sliding_attention", in_window))}


def assert_equals_one_process(family: str, kind: str, outputs: list[tuple[Tensor, Tensor, list[Tensor]]], **sizes: int) -> None:
    """Compare the results of all ranks with transformers' eager attention in one process."""
    batch = batch_of(kind, **sizes)
    # With a cache, transformers does not detect documents by position_ids.
    arguments = {**batch, "use_cache": False}
    if family == "gpt_oss" and kind == "packed":
        arguments["attention_mask"] = _pair_masks(batch["position_ids"], FAMILIES[family][2]["sliding_window"])
    loss, logits, grads = results(model_of(family), arguments)
    rows = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
    error = relative(torch.stack([f[0] for f in outputs]).sum(), loss)
    assert error < 2e-6, f"{family} {kind}: loss: {error:.1e}"
    for _, whole, _ in outputs:
        assert relative(whole[rows], logits[rows]) < 2e-5, f"{family} {kind}: logits"
    names = [name for name, _ in _weights(family).named_parameters()]
    for i, name in enumerate(names):
        total = torch.stack([f[2][i] for f in outputs]).sum(0)
        assert relative(total, grads[i]) < 5e-5, f"{family} {kind}: gradient of {name}: {relative(total, grads[i]):.1e}"
