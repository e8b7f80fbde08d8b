"""`longspan.selected` on one GPU: keys chosen at run time, beside the kernels of other packages for lists of blocks.

    PYTHONPATH=src:. python bench/selected.py [--tokens N …] [--rows NAME …] [--kernel NAME] [--peers NAME …] [--check] [--json]

B 1, H 64 over 8 KV heads (single tokens: 64 or 128 heads over 1, or 64 over 8), D 128, bfloat16, one choice per KV head, causal but for
the rows "whole". Every call of longspan has a new mask, as in a model: its time includes the making of tables. TFLOP/s count visible
(query, key) pairs: 4·D each forward, 2.5 times as much backward. "called": one call on an idle device, host time included. "again": time
of a call whose mask is another one than that of the call before, over that of a call with the same mask (device, called). "tables": device
time from indices to the lists of both passes. "host": host time of a forward call. Peers (`bench/selected_peers.py`): flex, fa4,
cudnn.bsa and cudnn.nsa, times on the device and as called, and the largest difference of their output relative to the largest value.
--check compares with a dense computation of 2,048 tokens instead of measuring.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from bench.peer_calls import Unsupported
from bench.selected_peers import PEERS, autograd_calls, first_out
from bench.selected_rows import DIM, ROWS, Row, choose, pairs, qkv
from bench.timing import as_called_ms, device_ms, host_us
from torch import Tensor

import longspan as ls

BLOCK = 128


def check(row: Row, kernel: str) -> dict[str, Any]:
    """Errors of out and gradients, relative to the largest value, for 2,048 tokens with few keys per row."""
    tokens, small = 2048, replace(row, keys=512)
    indices = choose(small, tokens)
    indices[:, :, 1] = -1
    indices[:, 0, 2, :2] = 0
    q, k, v = qkv(row, tokens)
    grad = torch.randn_like(q)
    out = ls.attention(q, k, v, mask=row.mask(indices), kernel=kernel)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    i = torch.arange(tokens, device="cuda")
    table = torch.zeros(*indices.shape[:3], tokens // row.granularity + 1, dtype=torch.bool, device="cuda")
    table.scatter_(-1, torch.where(indices < 0, tokens // row.granularity, indices).long(), True)
    visible = table[0][:, i // row.q_granularity][:, :, i // row.granularity] & ((i[:, None] >= i) | (not row.causal))
    worst = {}
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    parts = []
    for g in range(row.kv_heads):
        shared = slice(g * row.heads // row.kv_heads, (g + 1) * row.heads // row.kv_heads)
        scores = (wide[0][0, shared] @ wide[1][0, g].T) / DIM**0.5
        scores = scores.masked_fill(~visible[g], -torch.inf)
        parts.append(torch.nan_to_num(scores.softmax(-1), 0.0) @ wide[2][0, g])
    expected = torch.cat(parts)[None]
    right = torch.autograd.grad(expected, wide, grad.float())
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *right), strict=True):
        worst[name] = round(float((a.detach().float() - b.detach()).abs().max() / b.detach().abs().max()), 5)
    return {"check": row.name, "kernel": kernel, **worst}


def measure(row: Row, tokens: int, kernel: str, peers: list[str]) -> dict[str, Any]:
    inputs = qkv(row, tokens)
    grad = torch.randn_like(inputs[0])
    choices = [choose(row, tokens, seed=s) for s in range(2)]
    flops = 4 * DIM * row.heads * pairs(row, choices[0], tokens)
    turn, same = [0], row.mask(choices[0])

    def new_mask() -> ls.Mask:
        turn[0] += 1
        return row.mask(choices[turn[0] % 2])

    def ours(mask: Callable[[], ls.Mask]) -> Any:
        return autograd_calls(lambda: ls.attention(*inputs, mask=mask(), kernel=kernel), inputs, grad)

    new, again = ours(new_mask), ours(lambda: same)
    calls = dict(new) | {f"again {name}": call for name, call in again.items()}
    result: dict[str, Any] = {"row": row.name, "tokens": tokens, "kernel": kernel}
    expected = again["forward"]()[0].float()
    for name in peers:
        try:
            theirs = PEERS[name](row, tokens, choices[0], inputs, grad)
            difference = float((first_out(name, theirs).float() - expected).abs().max() / expected.abs().max())
            theirs.get("both", lambda: None)()
        except Unsupported:
            continue
        except Exception as error:  # a peer may raise anything
            result[f"{name} error"] = f"{type(error).__name__}: {error}"[:160]
            continue
        result[f"{name} difference"] = round(difference, 5)
        calls |= {f"{name} {pass_}": call for pass_, call in theirs.items()}
    del expected
    repeat = 5 if tokens > 65536 else 10
    device, called = (time(calls, repeat=repeat, warmup=2) for time in (device_ms, as_called_ms))
    for name in ("", *(f"{peer} " for peer in peers if f"{peer} forward" in calls)):
        for ms, suffix in ((device, ""), (called, " called")):
            forward_ms = ms[f"{name}forward"]
            result |= {f"{name}forward{suffix} ms": round(forward_ms, 3), f"{name}forward{suffix}": round(flops / forward_ms / 1e9)}
            if f"{name}both" in ms:
                backward_ms = ms[f"{name}both"] - forward_ms
                result |= {f"{name}backward{suffix} ms": round(backward_ms, 3)}
                result |= {f"{name}backward{suffix}": round(2.5 * flops / backward_ms / 1e9)}
    for name in ("forward", "both"):
        result[f"again {name}"] = [round(ms[name] / ms[f"again {name}"], 3) for ms in (device, called)]
    result["tables ms"] = round(_tables_ms(row, inputs[0], inputs[1], choices[0]), 4)
    result["host us"] = round(host_us(new["forward"], repeat=10))
    return result


def _tables_ms(row: Row, q: Tensor, k: Tensor, indices: Tensor) -> float:
    """Device time from indices to the tables of both passes, or to the lists of single keys; 0 where the kernel reads the indices."""
    from longspan._kernels.gpu.chosen_keys import ChosenKeysCall
    from longspan._kernels.gpu.selected_tables import SelectedTables, tile_of
    from longspan._kernels.protocol import AttentionInputs, Selection, SelectsKeys, Work
    from longspan._kernels.registry import kernel_named
    from longspan._kernels.tiling import Tiling
    from longspan._masks.tracing import trace

    shared = row.heads // row.kv_heads
    selection = Selection(indices=indices, granularity=row.granularity, q_granularity=row.q_granularity, heads_per_choice=shared)
    block, tokens = tile_of(selection), q.shape[2]
    if block is None and row.granularity > 1:
        return 0.0
    rest = ls.causal() if row.causal else ls.full()
    table = rest.block_table(tokens, block=block or BLOCK)
    tilings = (Tiling(length=tokens, block=b) for b in table.block)
    work = Work(table=table, q_tiles=next(tilings), kv_tiles=next(tilings), scale=1.0, mask=trace(rest, "mask").program)
    inputs, kernel = AttentionInputs(q=q, k=k, v=k), kernel_named("hopper")
    assert isinstance(kernel, SelectsKeys)

    def build() -> None:
        if block is None:
            ChosenKeysCall(inputs, work, selection).lists()
            return
        tables = kernel.select(inputs, work, selection).device_tables
        assert isinstance(tables, SelectedTables)
        tables.of_pass(by_query=True, shared=shared)
        tables.of_pass(by_query=False, shared=shared)

    return device_ms({"tables": build}, repeat=10)["tables"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--peers", nargs="*", default=[], choices=list(PEERS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "date": str(datetime.date.today())}
    print(json.dumps({"device": torch.cuda.get_device_name(), **versions}), flush=True)
    for row in (row for row in ROWS if row.name in options.rows):
        for tokens in options.tokens[: 1 if options.check else None]:
            try:
                result = check(row, options.kernel) if options.check else measure(row, tokens, options.kernel, options.peers)
            except torch.OutOfMemoryError as error:
                result = {"row": row.name, "tokens": tokens, "error": str(error)[:80]}
            print(json.dumps(result) if options.json else "  ".join(f"{k} {v}" for k, v in result.items()), flush=True)


if __name__ == "__main__":
    main()
