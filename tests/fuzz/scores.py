"""Score mods of random cases: formulas over captured tensors, and functions of the score."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz import mods

# Of the score s; {x}, {y}: drawn numbers. Optional arguments are given or left out: torch leaves defaults out of a trace.
_EXPRESSIONS = (
    "F.softplus(s, {x})", "F.softplus(s, threshold={y})", "F.softplus(s, {x}, {y})", "F.hardtanh(s, -{x}, {y})",
    "F.hardtanh(s, max_val={x})", "F.hardtanh(s * {x})", "F.leaky_relu(s)", "F.leaky_relu(s, 0.2)", "F.gelu(s)",
    "F.gelu(s, approximate='tanh')", "F.silu(s * {x})", "F.threshold(s, -{x}, -{x})", "s.clamp({y})", "s.clamp(max={x})",
    "s.clamp(-{x}, {y})", "torch.lerp(s, s * s, 0.3)", "torch.addcmul(s, s, s, value=0.1)", "torch.addcmul(s, s, s)",
    "torch.add(s, s, alpha={x})", "torch.rsub(s, {x}, alpha={y})", "torch.sub({x}, s)", "torch.div(s, {y})", "s ** 2",
    "s.sigmoid() * {x}", "torch.where(s > 0, s, {x} * s)", "F.relu(s) - {x}", "torch.logaddexp(s, s * {x})", "torch.log1p(s.abs())",
    "torch.maximum(s, 0.1 * s)", "torch.erf(s) * {y}", "torch.atan(s)", "torch.log(torch.erfc((s + {y}).clamp(max=8)))",
    "torch.asinh(1e-4 * s) * 1e4", "torch.hypot(s, s - {x})", "torch.lerp(s, 0.5 * s, {x})",
    "s.masked_fill(q < kv - 3, torch.tensor({x}))",
    "torch.logaddexp(torch.where(q >= kv, s, -torch.inf), torch.where(q >= kv, {x} * s, -torch.inf))",
)  # fmt: skip


def draw_score(case: dict[str, Any], rng: Random) -> None:
    """Draw the case's score mod; in half of the cases, none."""
    case["score"] = None
    if rng.random() < 0.5:
        return
    q_len, kv_len = case["q_len"], case["kv_len"]
    seed, c, grad = rng.randrange(mods.SEED_RANGE), rng.choice((5.0, 20.0)), rng.random() < 0.7

    def table(*shape: int | str, size: float = 0.5, number: int = 0) -> mods.Spec:
        return {"kind": "float", "shape": list(shape), "seed": seed + number, "grad": grad, "size": size}

    def made(name: str, text: str, *captures: mods.Spec) -> mods.Spec:
        return {"name": name, "text": text, "captures": list(captures)}

    integers = {"kind": "int", "seed": seed, "low": 0, "high": "heads", "shape": ["kv_len"]}

    def expression() -> str:
        text = rng.choice(_EXPRESSIONS).replace("F.", "torch.nn.functional.")
        return text.format(x=rng.choice((0.5, 1, 2.0)), y=rng.choice((1.5, 3)))

    case["score"] = rng.choice((
        lambda: made("softcap", f"{c} * torch.tanh(s / {c})"),
        lambda: made("alibi", "s - t0[h] * (q - kv).abs()", {**table("heads"), "grad": False}),
        lambda: made("learned alibi", "s + t0[h] * (kv - q)", table("heads", size=0.1)),
        lambda: made("relative", f"s + t0[q - kv + {kv_len}]", table(q_len + kv_len + 1)),
        lambda: made("relative per head", "s + t0[h, (q - kv).clamp(-8, 8) + 8]", table("heads", 17)),
        lambda: made("head scale", "s * torch.sigmoid(t0[h]) + t0[h]", table("heads")),
        lambda: made("row scale", "s * t0[b]", table("batch")),
        lambda: made("query scale", "s * t0[b, q]", table("batch", "q_len")),
        lambda: made("key bias", "s + t0[kv]", table("kv_len")),
        lambda: made("dense bias", "s + t0[q, kv]", table("q_len", "kv_len")),
        lambda: made("scalar", "s * t0 + t0", table()),
        lambda: made("two tables", "s + t0[h] * t1[kv]", table("heads"), table("kv_len", number=1)),
        lambda: made("lookup of lookup", "s + t0[t1[kv]]", table("heads"), integers),
        lambda: made("square", "s + 0.1 * s * s"),
        lambda: made("cut", "torch.where((q - kv) % 3 == 0, s, -float('inf'))"),
        lambda: made("softcap and bias", f"{c} * torch.tanh((s + t0[h, kv]) / {c})", table("heads", "kv_len")),
        lambda: made("distance", "s - torch.log1p((q - kv).abs().float())"),
        lambda: made("constant", "s * 0.0 + (kv % 5)"),
        lambda: made("no score", "t0[kv] + 0.0 * s", table("kv_len")),
        lambda: made("function", expression()),
    ))()  # fmt: skip
