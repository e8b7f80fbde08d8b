"""Tokens and CPU time of `generate` with transformers' own caches: `python -m tests.integrations.caches_grid` prints a table.

Greedy tokens of two left-padded prompts by "longspan" and by eager attention, with a dynamic, a static and a quantized (fp8) cache. In
families with sliding layers, which the table marks, the dynamic and the static cache hold windows, and transformers has no quantized cache.
CPU seconds of 100 tokens of one prompt
with a dynamic cache: first and third call of a process, and eager's third call. Each family has a process of its own,
forked after all imports.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch
from tests.integrations.families import VOCAB, tiny_model
from torch import Tensor

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "phi3", "olmo2", "mixtral", "gpt2", "bloom"
)  # fmt: skip
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
}
NEW = 40
LEFT_PADDED = ((0, 31), (9, 31))  # tokens of padding, tokens


def prompts() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (len(LEFT_PADDED), LEFT_PADDED[0][1]), generator=torch.Generator().manual_seed(5))
    real = torch.stack([torch.arange(length) >= padding for padding, length in LEFT_PADDED])
    return {"input_ids": ids.where(real, 0), "attention_mask": real.long()}


def tokens_of(model: Any, cache: str) -> list[list[int]]:
    """The new tokens of each prompt."""
    batch = prompts()
    out = model.generate(**batch, max_new_tokens=NEW, do_sample=False, eos_token_id=None, use_cache=True, **CACHES[cache])
    tokens: list[list[int]] = out[:, batch["input_ids"].shape[1] :].tolist()
    return tokens


def has_windows(model: Any) -> bool:
    """Whether a dynamic cache of the model holds windows."""
    from transformers import DynamicCache

    return any(DynamicCache(config=model.config).is_sliding)


def is_supported(model: Any, cache: str) -> bool:
    """transformers' quantized cache has no windows."""
    return cache != "quantized" or not has_windows(model)


def cpu_seconds(model: Any, calls: int) -> list[float]:
    """CPU seconds of calls that each generate 100 tokens."""
    ids, seconds = prompts()["input_ids"][:1], []
    for _ in range(calls):
        start = time.process_time()
        model.generate(input_ids=ids, max_new_tokens=100, do_sample=False, eos_token_id=None, use_cache=True)
        seconds.append(time.process_time() - start)
    return seconds


def measured(family: str) -> str:
    """A row of the table."""
    model, eager = (tiny_model(family, name) for name in ("longspan", "eager"))
    ours, theirs = cpu_seconds(model, 3), cpu_seconds(eager, 3)
    windows = "yes" if has_windows(model) else "no"
    cells = "".join(f"{_verdict(model, eager, cache):>11}" for cache in CACHES)
    return f"{family:14}{windows:>8}{cells}{ours[0]:12.2f}{min(ours[1:]):9.2f}{min(theirs[1:]):9.2f}{min(ours[1:]) / min(theirs[1:]):8.2f}"


def _verdict(model: Any, eager: Any, cache: str) -> str:
    if not is_supported(model, cache):
        return "-"
    return "equal" if tokens_of(model, cache) == tokens_of(eager, cache) else "DIFFERENT"


def main() -> None:
    tiny_model("llama", "eager")  # imports
    names = [f"{cache:>11}" for cache in CACHES]
    print(f"{'family':14}{'windows':>8}{''.join(names)}{'first, s':>12}{'later':>9}{'eager':>9}{'ratio':>8}", flush=True)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for line in pool.imap(measured, FAMILIES, chunksize=1):
            print(line, flush=True)


if __name__ == "__main__":
    main()
