"""Masks that compute with small vectors for each pair of positions: counts of document starts, also as indices, maxima, tensors made like
others.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz import mods


def vector_mask(case: dict[str, Any], rng: Random, seed: int) -> mods.Spec:
    """A mask_mod over a captured vector of at most 7 entries. Kernels that take elementwise programs only do not support it."""
    n, longest = rng.choice((1, 2, 5, 7)), max(case["q_len"], case["kv_len"])
    starts = {"kind": rng.choice(("int", "int", "int32", "int16")), "seed": seed, "low": 0, "high": longest + 1, "shape": [n]}
    every = (
        "(t0 <= q).sum() == (t0 <= kv).sum()",
        "((t0 <= q).sum() == (t0 <= kv).sum()) & (q >= kv)",
        "((t0 <= q) & (t0 > kv)).any() | (q >= kv)",
        "((t0 <= q) | (t0 > kv)).all()",
        f"(t0 + q).amax() > kv * {rng.choice((1, 2))}",
        f"(t0 * (q - kv)).amin() < {rng.choice((0, 9, 500))}",
        "torch.ones_like(t0 + q).sum() + q >= kv",
        f"torch.zeros_like(t0 + kv).sum() + {rng.choice((3, case['tile']))} > kv - q",
        f"torch.full_like(t0 - q, 3).sum() > q - kv + {rng.choice((0, 8))}",
        f"q.new_full(({n},), {rng.choice((2, 5))}).sum() >= kv - q",
        f"torch.stack([q, kv, kv - {n}]).amax() == q",
        "(t0[:, None] + q <= t0 + kv).sum() > 7",
        "(t0.clamp(max=6) + q - kv).abs().amin() < 5",
        f"(t0 + kv).cumsum(0)[-1] % {rng.choice((2, 3))} == q % 2",
        "t0.flip(0)[kv % t0.shape[0]] <= q",
    )
    unit = rng.choice((1, case["tile"], case["tile"]))  # with whole tiles of one row, a table decides whole squares
    shape = rng.choice(([longest // unit + 1, 4], [4, longest // unit + 1]))
    position, counted = rng.choice(((f"q // {unit}", "kv"), (f"kv // {unit}", "q")))
    count = rng.choice((f"(t0 <= {counted}).sum().clamp(0, 3)", f"({counted} ^ -7) & 3", f"((t0 <= {counted}).sum() & 3)"))
    indices = f"{position}, {count}" if shape[1] == 4 else f"{count}, {position}"  # either, if both dims are 4
    table = {"kind": "int", "seed": seed + 1, "low": 0, "high": 9, "shape": shape}
    text = rng.choice((rng.choice(every), f"t1[{indices}] {rng.choice(('> 4', '<= q % 7', '!= 8'))}"))
    captures = [starts, table] if "t1" in text else [starts]
    return {"op": "mod", "name": "vectors", "text": text, "captures": captures, "vectors": True}
