"""The oracle of the fuzzer: dense attention in float64, and in lower dtypes for error budgets. Imports nothing of longspan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from tests.fuzz import mods
from torch import Tensor


@dataclass(kw_only=True)
class Problem:
    """Whole tensors of a case: q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E], gradients of out and lse, the sink [H], mask and mods.

    `clean_*`: the tensors without poison.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    sink: Tensor | None
    scale: float | None
    visible: Tensor
    score: mods.Spec | None
    through: tuple[bool, bool]
    poisoned: dict[str, Tensor] = field(default_factory=dict)  # by name: q, k, v or grad_out with NaN, inf or huge numbers
    tainted_rows: Tensor | None = None  # [B, H, Q]: rows whose result or gradient may change
    tainted_keys: Tensor | None = None  # [B, G, K]: keys whose gradient may change

    def given(self, name: str) -> Tensor:
        """The tensor that longspan gets."""
        return self.poisoned.get(name, getattr(self, name))


def solve(p: Problem, dtype: torch.dtype, capture_dtype: torch.dtype) -> dict[str, Tensor]:
    """out, lse, max_scores and all gradients, by name, of dense attention in `dtype`."""
    device = str(p.q.device)
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (p.q, p.k, p.v))
    sink = None if p.sink is None else p.sink.detach().to(dtype).requires_grad_()
    (batch, heads, q_len, dim), kv_len, ratio = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    raw = (q @ keys.mT) * (1 / math.sqrt(dim) if p.scale is None else p.scale)
    scores, captures = raw, []
    if p.score is not None:
        captures = [t.detach().to(dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
                    for t in mods.captured(p.score, dtype=capture_dtype, device=device)]  # fmt: skip
        at = mods.indices((batch, heads, q_len, kv_len), device)
        scores = mods.score_mod(p.score, captures)(raw, *at).to(dtype).expand(batch, heads, q_len, kv_len)
    scores = torch.where(p.visible, scores, -torch.inf)
    max_scores = scores.detach().amax(-1) if kv_len else scores.new_full(scores.shape[:3], -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(batch, heads, q_len, 1)], -1)
    empty = (scores == -torch.inf).all(-1)
    safe = torch.where(empty[..., None], torch.zeros_like(scores), scores)
    total = torch.logsumexp(safe, -1) if safe.shape[-1] else safe.sum(-1)
    weights = torch.where(empty[..., None], 0.0, torch.exp(safe - total[..., None]))[..., :kv_len]
    out, lse = weights @ values, torch.where(empty, -torch.inf, total)
    leaves = {"dq": q, "dk": k, "dv": v} | ({} if sink is None else {"dsink": sink})
    leaves |= {f"captured {i}": t for i, t in enumerate(captures) if t.requires_grad}
    outputs = [(t, g) for t, g, used in ((out, p.grad_out, p.through[0]), (lse, p.grad_lse, p.through[1])) if used]
    results = {"out": out.detach(), "lse": lse.detach(), "max_scores": max_scores}
    if outputs:
        grads = torch.autograd.grad(
            [t for t, _ in outputs], list(leaves.values()), [g.to(dtype) for _, g in outputs], allow_unused=True
        )  # fmt: skip
        results |= {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), grads)}
    return results


def budgets(p: Problem, right: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Allowed absolute error by name: four times the error of dense attention in `dtype`, plus roundings of sums of that size.

    Dense attention in float64 is the reference, so that for float64 inputs only the roundings count. Scores and sums are float32
    for inputs in half precision; results and gradients of q, k, v are rounded to the dtype of the inputs.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    low = right if dtype == torch.float64 else solve(p, dtype, wide)
    if dtype in (torch.bfloat16, torch.float16):
        wider = solve(p, wide, wide)
    narrow_eps, wide_eps = torch.finfo(dtype).eps, torch.finfo(wide).eps
    ratio = p.q.shape[1] // p.k.shape[1]
    grad, values = p.grad_out.double().abs(), p.v.double().abs().repeat_interleave(ratio, 1)
    scale = 1 / math.sqrt(p.q.shape[-1]) if p.scale is None else abs(p.scale)
    products = _largest(grad @ values.mT) + _largest(p.grad_lse)
    steep = (
        1.0 + scale * _largest(p.q.double().abs() @ p.k.double().abs().repeat_interleave(ratio, 1).mT) + _finite_size(right["max_scores"])
    )
    rows = p.visible.double().sum(2).amax().item() if p.visible.numel() else 0.0
    terms = {
        "out": steep * _largest(p.v),
        "lse": steep,
        "max_scores": steep,
        "dq": steep * products * scale * _largest(p.k),
        "dk": steep * products * scale * _largest(p.q) * (1 + rows * ratio) ** 0.5,
        "dv": steep * _largest(p.grad_out) * (1 + rows * ratio) ** 0.5,
    }
    pairs = float(p.visible.sum()) ** 0.5 + 1
    allowed = {}
    for name, want in right.items():
        dense_error = _largest(low[name].double() - want)
        if dtype in (torch.bfloat16, torch.float16):
            dense_error = max(dense_error, _largest(wider[name].double() - want))
        size, term = _finite_size(want), terms.get(name, steep * products * pairs)
        rounding = 16 * wide_eps * max(term, size) + (0.0 if name in ("lse", "max_scores") else 2 * narrow_eps * size)
        allowed[name] = 4 * dense_error + rounding
    return allowed


def rounding_of_out(p: Problem, right: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Error of each gradient if delta = Σ out · grad_out uses out rounded to `dtype`, as kernels do, which save out in that dtype.

    With d more in delta, dS = P · (dP − delta) has −P · d more, the gradient of −d · lse. Dense attention does not have this error, which
    is large if a row sees few keys: with one key and a low sink, dP and delta cancel.
    """
    if not p.through[0]:
        return {}
    out = right["out"].double()
    more = ((out.to(dtype).double() - out) * p.grad_out.double()).sum(-1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    moved = solve(replace(p, grad_lse=more, through=(False, True)), torch.float64, wide)
    return {name: _largest(t) for name, t in moved.items() if name not in ("out", "lse", "max_scores", "dv")}


def _largest(t: Tensor) -> float:
    t = t.detach().double()
    t = t[torch.isfinite(t)]
    return float(t.abs().max()) if t.numel() else 0.0


_finite_size = _largest
