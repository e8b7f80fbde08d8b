"""transformers' `generate` from a paged KV cache, on one process or over several, compared with transformers' own cache.

    python examples/transformers_generate.py
    torchrun --nproc-per-node 2 examples/transformers_generate.py

A Llama with random weights and a left-padded batch. Under torchrun each process holds its share of the pages; all get the same tokens.
Exits with an error if tokens differ. For a trained model: `AutoModelForCausalLM.from_pretrained(…, attn_implementation="longspan")`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import longspan.integrations.transformers as lst

SIZES = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
PADDING = [0, 33, 71]


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0)
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation="longspan").eval().double()
    ids = torch.randint(1, 300, (len(PADDING), 150))
    real = torch.arange(150) >= torch.tensor(PADDING)[:, None]
    batch = {"input_ids": ids.where(real, 0), "attention_mask": real.long()}
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**batch, **options)

    mesh = dist.group.WORLD if dist.is_initialized() else None
    cache = lst.PagedCache(model, page_size=16, mesh=mesh)
    tokens = model.generate(**batch, **options, past_key_values=cache, prefill_chunk_size=100)
    if not torch.equal(tokens, expected):
        raise SystemExit(f"expected {expected[:, 150:].tolist()}, got {tokens[:, 150:].tolist()}")
    where = "one process" if mesh is None else f"rank {dist.get_rank()} of {dist.get_world_size()}"
    print(f"{where}: {len(PADDING)} × 24 tokens equal those of transformers' own cache; {cache.free_pages} pages of all ranks are free")


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
