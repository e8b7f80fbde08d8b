"""Gradients of tensors that a score looks up: every shape of index and of mask, by tiles against autograd over the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._kernels import plain_tiles

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 23, 31, 6
Form = Callable[..., Tensor]
FORMS: dict[str, tuple[tuple[int, ...], Form]] = {
    "scalar": ((), lambda t, s, b, h, q, kv: s * t),
    "scalar alone": ((), lambda t, s, b, h, q, kv: t + 0 * kv),
    "head": ((HEADS,), lambda t, s, b, h, q, kv: s + t[h]),
    "head alone": ((HEADS,), lambda t, s, b, h, q, kv: t[h] * 2),
    "batch and head": ((BATCH, HEADS), lambda t, s, b, h, q, kv: s * t[b, h]),
    "query": ((QUERIES,), lambda t, s, b, h, q, kv: s + t[q] ** 2),
    "key": ((KEYS,), lambda t, s, b, h, q, kv: t[kv].sin()),
    "key by head": ((HEADS, KEYS), lambda t, s, b, h, q, kv: s + t[h, kv]),
    "distance": ((9,), lambda t, s, b, h, q, kv: s + t[(q - kv) % 9]),
    "row": ((HEADS, 5), lambda t, s, b, h, q, kv: s + t[h].sum(-1)),
    "row by key": ((KEYS, 3), lambda t, s, b, h, q, kv: s + (t[kv] * t[kv]).sum(-1)),
    "whole": ((7,), lambda t, s, b, h, q, kv: s * t.mean()),
}
MASKS: dict[str, Any] = {
    "none": ls.full(),
    "keys": ls.mask_mod(lambda b, h, q, kv: kv < 17),
    "rows": ls.mask_mod(lambda b, h, q, kv: q >= 5),
    "heads": ls.mask_mod(lambda b, h, q, kv: (h != 1) & (q + kv > 8)),
    "window": ls.mask_mod(lambda b, h, q, kv: (q - kv).abs() < 7),
}


# Each form with two masks in tiles, and with a third in `longspan.invariant()`.
CASES = [(form, list(MASKS)[(i + j) % len(MASKS)], j == 1) for i, form in enumerate(FORMS) for j in (0, 1, 3)]


@pytest.mark.parametrize(("form", "mask", "invariant"), CASES)
def test_gradients_of_looked_up_tensors_match(form: str, mask: str, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_tiles, "TILE_KEYS", 12)
    shape, fn = FORMS[form]
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(shape, generator=generator)
    sizes = ((HEADS, QUERIES), (2, KEYS), (2, KEYS), (HEADS, QUERIES))
    q, k, v, grad = (torch.randn(BATCH, *size, DIM, generator=generator) for size in sizes)
    results = []
    for kernel in ("dense", "cpu"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, table)]
        score = lambda s, b, h, i, j, t=leaves[3]: fn(t, s, b, h, i, j)
        if invariant and kernel == "cpu":
            with ls.invariant():
                out, lse = ls.attention(*leaves[:3], mask=MASKS[mask], score_mod=score, kernel=kernel, return_lse=True)
        else:
            out, lse = ls.attention(*leaves[:3], mask=MASKS[mask], score_mod=score, kernel=kernel, return_lse=True)
        loss = (out * grad).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
        results.append([out, *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
