"""Peak memory of a training step by sequence length on the CPU, against what must be kept: layer inputs, out and lse.

    PYTHONPATH=src:. python bench/memory_cpu.py [--tokens N …] [--dtype float32] [--ways long_context …] [--json]

A Llama of 16 layers (hidden size 128, MLP 512, one KV head for four query heads, vocabulary 512), forward and backward. MLPs, norms and the
loss run 512 tokens at a time, so that the peak is in the backward pass of a layer, not in the loss. Each length and each way runs in a
process of its own; the peak is its largest resident memory. "bytes per token" is the slope between the shortest and the longest length.

    plain          model(**batch).loss
    checkpointed   transformers' gradient checkpointing, which computes attention again
    long_context   longspan.integrations.memory.long_context: attention once, tiled MLPs, tiled loss
    kept           inputs of layers, out and lse, by their sizes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys

LAYERS, HIDDEN, MLP, VOCAB, HEADS = 16, 128, 512, 512, 4
TOKENS = (2048, 4096, 6144, 8192)
WAYS = ("plain", "checkpointed", "long_context")
CHUNK = 512
ITEM_SIZES = {"float32": 4, "bfloat16": 2}


def kept_bytes(dtype: str) -> int:
    """Bytes per token: inputs and out [hidden] of each layer, lse [heads] in float32."""
    return LAYERS * (2 * ITEM_SIZES[dtype] * HIDDEN + 4 * HEADS)


def measure(way: str, tokens: int, dtype: str) -> dict[str, float]:
    """One process: MiB above the model before the step, and the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import longspan.integrations.transformers  # noqa: F401
    from longspan.integrations import memory

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 4, max_position_embeddings=1 << 20,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="longspan", dtype=getattr(torch, dtype)).train()
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    if way == "long_context":
        memory.long_context(model, mlp_chunk=CHUNK, loss_chunk=CHUNK)
    ids = torch.randint(VOCAB, (1, tokens))
    warm = ids[:, :256]
    model(input_ids=warm, labels=warm).loss.backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, "loss": float(loss.detach())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--dtype", choices=list(ITEM_SIZES), default="float32")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options.dtype)))
        return
    import torch

    print(f"bench memory_cpu, torch {torch.__version__}, date {datetime.date.today()}, {options.dtype}")
    kept = kept_bytes(options.dtype)
    print("MiB above the model   " + "".join(f"{n:>9d}" for n in options.tokens) + "   bytes per token   ÷ kept")
    rows = []
    for way in options.ways:
        results = []
        for n in options.tokens:
            # freed memory returns to the system at once, so that the peak is that of the step
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--one", way, str(n), "--dtype", options.dtype]
            text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
            results.append(json.loads(text.strip().splitlines()[-1]))
        slope = (results[-1]["mib"] - results[0]["mib"]) * 2**20 / (options.tokens[-1] - options.tokens[0])
        rows.append({"way": way, "mib": [r["mib"] for r in results], "loss": [r["loss"] for r in results], "bytes_per_token": slope})
        print(f"{way:22}" + "".join(f"{r['mib']:9.0f}" for r in results) + f"   {slope:15.0f}   {slope / kept:6.2f}", flush=True)
    print(f"{'kept':22}" + "".join(f"{kept * n / 2**20:9.0f}" for n in options.tokens) + f"   {kept:15d}     1.00")
    if options.json:
        print(json.dumps({"tokens": options.tokens, "kept_bytes_per_token": kept, "rows": rows}))


if __name__ == "__main__":
    main()
