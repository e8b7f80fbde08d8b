"""Text generation over a `PagedCache`: prefill in chunks, then one token at a time. `longspan generate` runs it.

Legend: S prompt tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from longspan._comm.gather import all_gather_rows
from longspan._comm.mesh import Mesh, context_mesh
from longspan.integrations.transformers import NAME, PagedCache

__all__ = ["BYTES", "ByteTokenizer", "GenerateOptions", "GenerateRates", "generate", "load_checkpoint", "stop_tokens", "tiny_model"]

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How tokens are generated.

    Attributes:
        new_tokens: The most tokens that are generated.
        chunk: Prompt tokens per forward pass.
        temperature: 0 for the most likely token.
        seed: Of sampling.
        page_size: Tokens per page of the cache.
        kv_dtype: Of the cache; None for the model's.
        stop: Tokens that end the text.
    """

    new_tokens: int = 64
    chunk: int = 4096
    temperature: float = 0.0
    seed: int = 0
    page_size: int = 64
    kv_dtype: torch.dtype | None = None
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("new_tokens", "chunk", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"GenerateOptions: expected {name} of 1 or more, got {getattr(self, name)}")
        if not self.temperature >= 0:
            raise ValueError(f"GenerateOptions: expected a temperature of 0 or more, got {self.temperature}")


class GenerateRates(NamedTuple):
    """Tokens and seconds of the prefill and of decoding."""

    prefill_tokens: int
    prefill_seconds: float
    decoded_tokens: int
    decode_seconds: float

    def __str__(self) -> str:
        prefill, decode = self.prefill_tokens / max(self.prefill_seconds, 1e-9), self.decoded_tokens / max(self.decode_seconds, 1e-9)
        return (
            f"prefill {self.prefill_tokens} tokens in {self.prefill_seconds:.2f} s ({prefill:.0f} tokens/s), decode {self.decoded_tokens} "
            f"tokens in {self.decode_seconds:.2f} s ({decode:.1f} tokens/s)"
        )


@torch.inference_mode()
def generate(
    model: Any, prompt: Tensor, options: GenerateOptions, *, mesh: Any = None,
    prefilled: Callable[[int], None] = lambda tokens: None, decoded: Callable[[int], None] = lambda token: None,
) -> GenerateRates:  # fmt: skip
    """Generate tokens after a prompt [1, S], S ≥ 1. All ranks of a mesh make the same call and get the same tokens.

    Args:
        model: A causal LM with attn_implementation="longspan".
        prefilled: Called after each chunk with the number of prompt tokens computed so far.
        decoded: Called with each new token.
    """
    if prompt.ndim != 2 or prompt.shape[0] != 1 or not prompt.shape[1]:
        raise ValueError(f"generate: expected a prompt [1, S] of 1 or more tokens, got {tuple(prompt.shape)}")
    mesh = None if mesh is None else context_mesh(mesh)
    cache = PagedCache(model, page_size=options.page_size, mesh=mesh, dtype=options.kv_dtype)
    chooser = torch.Generator().manual_seed(options.seed)
    begin, done = time.perf_counter(), 0
    for chunk in prompt.split(options.chunk, dim=1):
        logits = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        done += chunk.shape[1]
        prefilled(done)
    token = _chosen(logits[0, -1], options.temperature, chooser, mesh)
    middle, count = time.perf_counter(), 1
    decoded(token)
    while count < options.new_tokens and token not in options.stop:
        ids = torch.tensor([[token]], device=prompt.device)
        token = _chosen(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1], options.temperature, chooser, mesh)
        decoded(token)
        count += 1
    return GenerateRates(done, middle - begin, count - 1, time.perf_counter() - middle)


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator, mesh: Mesh | None) -> int:
    """The next token, chosen on the host; on every rank the one that rank 0 chose."""
    values = logits.to("cpu", torch.float64)
    token = values.argmax() if temperature == 0.0 else torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)[0]
    if mesh is None:
        return int(token)
    return int(all_gather_rows(mesh, token[None].to(logits.device), [1] * mesh.size, what="choice of a token")[0])


class ByteTokenizer:
    """Text as bytes, for the random model."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(t) if 32 <= t < 127 else "·" for t in tokens)


def tiny_model(device: torch.device, seed: int = 0) -> Any:
    """A random Llama of 2 layers over bytes, in float32, the same for the same seed."""
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1 << 20,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(config, attn_implementation=NAME)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().to(device)


def load_checkpoint(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """(model with longspan's attention, tokenizer) of a local checkpoint, in the checkpoint's dtype. Nothing is downloaded or executed."""
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype="auto", **local)
    return model.eval().to(device), AutoTokenizer.from_pretrained(folder, **local)


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text, by the model's generation config and the tokenizer."""
    named = [tokenizer.eos_token_id, getattr(getattr(model, "generation_config", None), "eos_token_id", None)]
    return frozenset(t for value in named for t in (value if isinstance(value, list | tuple) else [value]) if t is not None)
