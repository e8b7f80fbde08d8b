"""Peak memory of a training step by sequence length on the CPU, against what must be kept: layer inputs, out and lse.

    PYTHONPATH=src:. python bench/memory_cpu.py [--tokens N …] [--json]

A Llama of 16 layers (hidden size 128, MLP 512, vocabulary 4,096) in float32, forward and backward. Each length and each way runs in a
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

LAYERS, HIDDEN, MLP, VOCAB, HEADS = 16, 128, 512, 4096, 4
TOKENS = (2048, 4096, 6144, 8192)
WAYS = ("plain", "checkpointed", "long_context")
CHUNK = 1024
KEPT = LAYERS * (2 * 4 * HIDDEN + 4 * HEADS)  # bytes per token: inputs and out [hidden], lse [heads], float32


def measure(way: str, tokens: int) -> dict[str, float]:
    """One process: MiB above the model before the step, and the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import longspan.integrations.transformers  # noqa: F401
    from longspan.integrations import memory

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=1 << 20,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="longspan").train()
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
    return {"mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, "loss": float(loss)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    import torch

    print(f"bench memory_cpu, torch {torch.__version__}, date {datetime.date.today()}")
    print("MiB above the model   " + "".join(f"{n:>9d}" for n in options.tokens) + "   bytes per token   ÷ kept")
    rows = []
    for way in WAYS:
        results = []
        for n in options.tokens:
            # freed memory returns to the system at once, so that the peak is that of the step
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
            text = subprocess.run(
                [sys.executable, __file__, "--one", way, str(n)], capture_output=True, text=True, check=True, env=environment
            ).stdout
            results.append(json.loads(text.strip().splitlines()[-1]))
        slope = (results[-1]["mib"] - results[0]["mib"]) * 2**20 / (options.tokens[-1] - options.tokens[0])
        rows.append({"way": way, "mib": [r["mib"] for r in results], "loss": [r["loss"] for r in results], "bytes_per_token": slope})
        print(f"{way:22}" + "".join(f"{r['mib']:9.0f}" for r in results) + f"   {slope:15.0f}   {slope / KEPT:6.2f}", flush=True)
    print(f"{'kept':22}" + "".join(f"{KEPT * n / 2**20:9.0f}" for n in options.tokens) + f"   {KEPT:15d}     1.00")
    if options.json:
        print(json.dumps({"tokens": options.tokens, "kept_bytes_per_token": KEPT, "rows": rows}))


if __name__ == "__main__":
    main()
