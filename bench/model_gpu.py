"""A training step of a 126M-parameter decoder on 131,072 tokens on one GPU: longspan, compiled FlexAttention, SDPA.

    PYTHONPATH=src:. python bench/model_gpu.py [--tokens 131072] [--steps 5] [--mask causal documents]

Model, loss, optimizer and compiled blocks are the same; only attention differs. bfloat16 autocast, float32 weights, AdamW, activation
checkpointing of every block. SDPA runs once per packed document. MFU: 6 FLOPs per weight and token and 12 per head dim and visible
(query, key) pair, over the GPU's dense bfloat16 peak. Exits with an error if losses differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import longspan as ls
from longspan._training.decoder import Decoder, DecoderConfig, flops_per_token
from longspan._training.job import peak_flops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def document_lengths(mask: str, tokens: int) -> list[int]:
    """One document for "causal"; log-normal lengths with sum `tokens` otherwise."""
    if mask == "causal":
        return [tokens]
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        draw = int(torch.empty(()).log_normal_(8.0, 1.2, generator=generator))
        lengths.append(max(16, min(draw, tokens - sum(lengths))))
    lengths[-1] -= sum(lengths) - tokens
    return [n for n in lengths if n > 0]


def longspan_options(lengths: list[int]) -> dict[str, Any]:
    """Arguments of the decoder for attention over packed documents by longspan."""
    mask = ls.causal() if len(lengths) == 1 else ls.causal() & ls.documents(lengths=lengths)
    return {"plan": ls.plan(mask, sum(lengths), ls.Mesh.abstract(1))}


def flex_options(lengths: list[int]) -> dict[str, Any]:
    """The same for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (document[q] == document[kv]) if len(lengths) > 1 else q >= kv

    block_mask = torch.compile(create_block_mask)(mask_mod, None, None, tokens, tokens, device=DEVICE)
    return {"attend": lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)}


def sdpa_options(lengths: list[int]) -> dict[str, Any]:
    """The same for SDPA, one call per document."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts], 2)

    return {"attend": attend if len(lengths) == 1 else torch.compiler.disable(attend)}


ATTENTION: dict[str, Callable[[list[int]], dict[str, Any]]] = {"longspan": longspan_options, "flex": flex_options, "sdpa": sdpa_options}


def measure(attention: str, lengths: list[int], config: DecoderConfig, steps: int) -> tuple[float, float, float, float]:
    """(last loss, median seconds of a step, peak GiB, model FLOPs per token)."""
    torch._dynamo.reset()
    tokens = sum(lengths)
    model = Decoder(config).initialise(0).to(DEVICE).train()
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    options = ATTENTION[attention](lengths)
    losses, seconds = [], []
    for step in range(steps + 2):
        if step == 2 and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _synchronize()
        start = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(ids, positions, labels=ids.roll(-1, 1), count=tokens, **options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    pairs = sum(n * (n + 1) / 2 for n in lengths) / tokens
    return losses[-1], statistics.median(seconds[2:] or seconds), peak, flops_per_token(config, pairs)


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two warm-up steps; 0: warm-up only")
    parser.add_argument("--mask", nargs="*", default=["causal", "documents"])
    parser.add_argument("--attention", nargs="*", default=list(ATTENTION))
    parser.add_argument("--tiny", action="store_true", help="a small model, to test this file on a CPU")
    args = parser.parse_args()
    config = DecoderConfig(vocab=32768, width=768, layers=12, heads=12, kv_heads=4, head_dim=64, hidden=2048, recompute=True)
    if args.tiny:
        config = DecoderConfig(vocab=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=96, recompute=True)
    device_name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    gpu_peak = peak_flops(torch.device(DEVICE))
    size = sum(p.numel() for p in Decoder(config).parameters())
    print(
        f"# {device_name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; {size / 1e6:.0f}M parameters, "
        f"{args.tokens} tokens, bfloat16"
    )
    print(f"{'mask':12}{'attention':12}{'tokens/s':>12}{'seconds':>10}{'MFU':>8}{'peak GiB':>10}{'× flex':>8}{'loss':>10}")
    for mask in args.mask:
        lengths = document_lengths(mask, args.tokens)
        results = {name: measure(name, lengths, config, args.steps) for name in args.attention}
        for name, (loss, seconds, peak, flops) in results.items():
            mfu = f"{100 * flops * args.tokens / seconds / gpu_peak:.1f} %" if gpu_peak else "-"
            ratio = f"{results['flex'][1] / seconds:.2f}" if "flex" in results else "-"
            print(f"{mask:12}{name:12}{args.tokens / seconds:12,.0f}{seconds:10.3f}{mfu:>8}{peak:10.1f}{ratio:>8}{loss:10.4f}", flush=True)
        losses = [result[0] for result in results.values()]
        if max(losses) - min(losses) > 0.02:
            raise SystemExit(f"expected equal losses within 0.02, got {losses}")


if __name__ == "__main__":
    main()
