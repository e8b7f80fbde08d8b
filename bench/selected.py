"""`longspan.selected` on one GPU: keys chosen at run time, beside compiled FlexAttention with a fresh BlockMask.

    PYTHONPATH=src:. python bench/selected.py [--tokens N …] [--rows NAME …] [--kernel NAME] [--peer] [--check] [--json]

B 1, H 64 over 8 KV heads (single tokens: 64 or 128 heads over 1, or 64 over 8), D 128, bfloat16, one choice per KV head, causal. Every
call has a new mask, as in a model: its time includes the making of tables. TFLOP/s count visible (query, key) pairs: 4·D each forward, 2.5
times as much backward. "tables" is the device time from indices to the lists of both passes. "host" is the host time of a forward call.
--check compares with a dense computation of 2,048 tokens instead of measuring.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from bench.timing import device_ms, host_us
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import longspan as ls

DIM, BLOCK = 128, 128


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kind of choice: `keys` per query in blocks of `granularity`, chosen by rows of `q_granularity` queries for each KV head."""

    name: str
    granularity: int
    q_granularity: int
    keys: int
    kv_heads: int = 8
    heads: int = 64


ROWS = (
    Row(name="block128", granularity=128, q_granularity=128, keys=4096),
    Row(name="block64", granularity=64, q_granularity=64, keys=2048),
    Row(name="nsa", granularity=64, q_granularity=1, keys=1024),
    Row(name="micro16", granularity=16, q_granularity=1, keys=2048),
    Row(name="token", granularity=1, q_granularity=1, keys=2048, kv_heads=1),
    Row(name="token128", granularity=1, q_granularity=1, keys=2048, kv_heads=1, heads=128),
    Row(name="token_gqa", granularity=1, q_granularity=1, keys=2048),
)


def choose(row: Row, tokens: int, *, seed: int = 0) -> Tensor:
    """Random indices [1, KV heads, rows, k] int32 without repeats: past blocks, the query's own block included, −1 where there are few."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, blocks, k = tokens // row.q_granularity, tokens // row.granularity, row.keys // row.granularity
    own = (torch.arange(rows, device="cuda") + 1) * row.q_granularity - 1
    last = (own // row.granularity)[:, None]
    # One block of each of k − 1 parts of the past, and the own block: nearly all distinct, without a sort.
    jitter = torch.rand(1, row.kv_heads, rows, k, generator=generator, device="cuda")
    step = torch.arange(k, device="cuda")
    picked = torch.where(last < k, step, ((step + jitter) * (last / max(1, k - 1))).floor().long())
    picked = torch.where((last >= k) & (step == k - 1), last, picked)
    picked = torch.where(picked <= last, picked, -1).int()
    repeats = torch.zeros_like(picked, dtype=torch.bool)
    repeats[..., 1:] = picked[..., 1:] == picked[..., :-1]
    assert int(picked.max()) < blocks
    return torch.where(repeats, -1, picked).contiguous()


def pairs(row: Row, indices: Tensor, tokens: int) -> int:
    """Visible (query, key) pairs of one choice, averaged over KV heads."""
    start = torch.arange(tokens // row.q_granularity, device="cuda")[:, None] * row.q_granularity
    total = 0.0
    for i in range(row.q_granularity):  # queries of a row
        seen = (start + i - indices * row.granularity + 1).clamp(0, row.granularity)
        total += float(torch.where(indices >= 0, seen, 0).sum(dtype=torch.float64))
        if row.q_granularity > 8 and i == 0:  # linear in i up to the query's own block
            last = (start + row.q_granularity - 1 - indices * row.granularity + 1).clamp(0, row.granularity)
            return int((total + float(torch.where(indices >= 0, last, 0).sum(dtype=torch.float64))) * row.q_granularity / 2 / row.kv_heads)
    return int(total / row.kv_heads)


def qkv(row: Row, tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, row.heads, tokens, DIM), (1, row.kv_heads, tokens, DIM), (1, row.kv_heads, tokens, DIM))
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]


def check(row: Row, kernel: str) -> dict[str, Any]:
    """Errors of out and gradients, relative to the largest value, for 2,048 tokens with few keys per row."""
    tokens, small = 2048, replace(row, keys=512)
    indices = choose(small, tokens)
    indices[:, :, 1] = -1
    indices[:, 0, 2, :2] = 0
    q, k, v = qkv(row, tokens)
    grad = torch.randn_like(q)
    mask = ls.selected(indices, row.granularity, row.q_granularity) & ls.causal()
    out = ls.attention(q, k, v, mask=mask, kernel=kernel)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    i = torch.arange(tokens, device="cuda")
    table = torch.zeros(*indices.shape[:3], tokens // row.granularity + 1, dtype=torch.bool, device="cuda")
    table.scatter_(-1, torch.where(indices < 0, tokens // row.granularity, indices).long(), True)
    visible = table[0][:, i // row.q_granularity][:, :, i // row.granularity] & (i[:, None] >= i)
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


def flex_mask(indices: Tensor, heads: int) -> BlockMask:
    """The BlockMask of a choice of blocks of 128: the query's own block is partial, the others are full."""
    rows = indices.shape[2]
    ordered = torch.where(indices < 0, rows, indices).sort(-1).values.repeat_interleave(heads // indices.shape[1], 1)
    count = (ordered < rows).sum(-1).int()
    own = torch.arange(rows, device="cuda", dtype=torch.int32)[None, None, :, None].expand(1, heads, rows, 1)
    wide = torch.zeros(1, heads, rows, rows, dtype=torch.int32, device="cuda")
    full = wide.clone()
    full[..., : ordered.shape[-1]] = ordered.clamp(max=rows - 1)
    wide[..., :1] = own
    return BlockMask.from_kv_blocks(
        torch.ones_like(count), wide, count - 1, full, BLOCK_SIZE=BLOCK, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(rows * BLOCK,) * 2
    )  # fmt: skip


def measure(row: Row, tokens: int, kernel: str, *, peer: bool) -> dict[str, Any]:
    q, k, v = qkv(row, tokens)
    grad = torch.randn_like(q)
    choices = [choose(row, tokens, seed=s) for s in range(2)]
    flops = 4 * DIM * row.heads * pairs(row, choices[0], tokens)
    turn = [0]

    def mask() -> ls.Mask:
        turn[0] += 1
        return ls.selected(choices[turn[0] % 2], row.granularity, row.q_granularity) & ls.causal()

    def forward() -> Tensor:
        with torch.no_grad():
            return ls.attention(q, k, v, mask=mask(), kernel=kernel)

    def both() -> None:
        torch.autograd.grad(ls.attention(q, k, v, mask=mask(), kernel=kernel), (q, k, v), grad)

    calls: dict[str, Any] = {"forward": forward, "both": both}
    if peer and row.name == "block128":
        compiled = torch.compile(flex_attention)

        def flex() -> Any:
            return compiled(q, k, v, block_mask=flex_mask(choices[0], row.heads), enable_gqa=True)

        def flex_forward() -> None:
            with torch.no_grad():
                flex()

        calls |= {"flex forward": flex_forward, "flex both": lambda: torch.autograd.grad(flex(), (q, k, v), grad)}
    repeat = 5 if tokens > 65536 else 10
    ms = device_ms(calls, repeat=repeat, warmup=2)
    result: dict[str, Any] = {"row": row.name, "tokens": tokens, "kernel": kernel}
    for name in ("", "flex ") if len(calls) > 2 else ("",):
        forward_ms, backward_ms = ms[f"{name}forward"], ms[f"{name}both"] - ms[f"{name}forward"]
        result |= {f"{name}forward ms": round(forward_ms, 3), f"{name}backward ms": round(backward_ms, 3)}
        result |= {f"{name}forward": round(flops / forward_ms / 1e9), f"{name}backward": round(2.5 * flops / backward_ms / 1e9)}
    result["tables ms"] = round(_tables_ms(row, q, k, choices[0]), 4)
    result["host us"] = round(host_us(forward, repeat=10))
    return result


def _tables_ms(row: Row, q: Tensor, k: Tensor, indices: Tensor) -> float:
    """Device time from indices to the tables of both passes, or to the lists of single keys; 0 where the kernel reads the indices."""
    from longspan._kernels.gpu.chosen_keys import ChosenKeysCall
    from longspan._kernels.gpu.selected_tables import tile_of, tiled_work
    from longspan._kernels.protocol import AttentionInputs, Selection, Work
    from longspan._kernels.tiling import Tiling
    from longspan._masks.tracing import trace

    shared = row.heads // row.kv_heads
    selection = Selection(indices=indices, granularity=row.granularity, q_granularity=row.q_granularity, heads_per_choice=shared)
    block, tokens = tile_of(selection), q.shape[2]
    if block is None and row.granularity > 1:
        return 0.0
    table = ls.causal().block_table(tokens, block=block or BLOCK)
    tilings = (Tiling(length=tokens, block=b) for b in table.block)
    work = Work(table=table, q_tiles=next(tilings), kv_tiles=next(tilings), scale=1.0)
    inputs = AttentionInputs(q=q, k=k, v=k)

    def build() -> None:
        if block is None:
            ChosenKeysCall(inputs, replace(work, mask=trace(ls.causal(), "mask").program), selection).lists()
            return
        tables: Any = tiled_work(inputs, work, selection, dummy=True).device_tables
        tables.of_pass(by_query=True, shared=shared)
        tables.of_pass(by_query=False, shared=shared)

    return device_ms({"tables": build}, repeat=10)["tables"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "date": str(datetime.date.today())}
    print(json.dumps({"device": torch.cuda.get_device_name(), **versions}), flush=True)
    for row in (row for row in ROWS if row.name in options.rows):
        for tokens in options.tokens[: 1 if options.check else None]:
            try:
                result = check(row, options.kernel) if options.check else measure(row, tokens, options.kernel, peer=options.peer)
            except torch.OutOfMemoryError as error:
                result = {"row": row.name, "tokens": tokens, "error": str(error)[:80]}
            print(json.dumps(result) if options.json else "  ".join(f"{k} {v}" for k, v in result.items()), flush=True)


if __name__ == "__main__":
    main()
