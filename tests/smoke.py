"""One call of every kind, compared with a dense float64 computation: `python tests/smoke.py`.

`.ci/torch_versions` runs it with the versions of torch that `make test` does not run with. It needs torch and numpy only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan as ls
from longspan.testing import oracle, virtual_world

LENGTH = 300
DOCUMENTS = [70, 1, 129, 100]
BIAS = torch.linspace(-1, 1, LENGTH, requires_grad=True)


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20) + BIAS[(q - kv).abs()]


def dense_table(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mod that torch's tracer traces: it computes with a whole tensor."""
    return score + BIAS.exp()[kv]


MASKS: dict[str, Any] = {
    "causal": ls.causal(),
    "documents": ls.causal() & ls.documents(DOCUMENTS),
    "window or prefix": (ls.causal() & ls.sliding_window(50)) | ls.prefix(7),
    "blocks": ls.mask_mod(lambda b, h, q, kv: (q >= kv) & ((q // 128 == kv // 128) | (kv // 64 % 3 == 0))),
}


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, LENGTH, 16, generator=generator, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


def results(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """out, then the gradients of q, k, v and the bias."""
    out = call(*tensors)
    leaves = [*tensors, BIAS]
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out).tril(), allow_unused=True, materialize_grads=True)]


def check(name: str, got: list[Tensor], expected: list[Tensor], tolerance: float = 2e-4) -> None:
    for what, g, e in zip(("out", "dq", "dk", "dv", "d_bias"), got, expected, strict=False):
        error, size = float((g.double() - e.double()).detach().abs().max()), float(e.detach().abs().max()) + 1
        if not error <= tolerance * size:
            raise SystemExit(f"{name}: {what} has an error of {error:.1e}, allowed {tolerance * size:.1e}")


def expected_results(mask: Any, score_mod: Any) -> list[Tensor]:
    return results(
        lambda q, k, v: oracle(q, k, v, mask=mask, score_mod=score_mod), [t.detach().double().requires_grad_() for t in inputs()]
    )


def kernels() -> None:
    for name, mask in MASKS.items():
        for score_mod in (None, relative, dense_table):
            expected = expected_results(mask, score_mod)
            for kernel in ("cpu", "dense", "auto", *(["aten"] if score_mod is None and name == "causal" else [])):
                call = lambda q, k, v: ls.attention(q, k, v, mask=mask, score_mod=score_mod, kernel=kernel)  # noqa: B023
                check(f"kernel {kernel}, {name}", results(call, inputs()), expected)


def engine() -> None:
    mask, expected = MASKS["documents"], expected_results(MASKS["documents"], relative)

    def rank(mesh: Any) -> list[Tensor]:
        plan = ls.plan(mask, LENGTH, mesh, strategy=strategy)
        local = [plan.shard(t.detach(), 2).requires_grad_() for t in inputs()]
        out = ls.attention(*local, plan=plan, score_mod=relative)
        grad_out = plan.shard(torch.ones_like(inputs()[0]).tril(), 2)
        *grads, grad_bias = torch.autograd.grad(out, [*local, BIAS], grad_out)
        return [*(plan.unshard(t.detach(), 2) for t in (out, *grads)), grad_bias]

    for strategy in ("ring", "allgather", "exchange"):
        by_rank = virtual_world(3).run(rank)
        check(f"engine, {strategy}", [*by_rank[0][:4], sum(r[4] for r in by_rank)], expected)  # type: ignore[list-item]


def drop_in() -> None:
    expected, expected_flex = expected_results(ls.causal(), None), expected_results(MASKS["documents"], relative)
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    block_mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, LENGTH, LENGTH, device="cpu")

    def rank(mesh: Any) -> list[list[Tensor]]:
        both = []
        with ls.context_parallel(mesh) as context:
            for flex in (False, True):
                local = [context.shard(t.detach(), 2).requires_grad_() for t in inputs()]
                if flex:
                    out = flex_attention(*local, score_mod=relative, block_mask=block_mask, enable_gqa=True)
                else:
                    out = F.scaled_dot_product_attention(*local, is_causal=True, enable_gqa=True)
                assert isinstance(out, Tensor)
                grads = torch.autograd.grad(out, local, context.shard(torch.ones_like(inputs()[0]).tril(), 2))
                both.append([context.unshard(t.detach(), 2) for t in (out, *grads)])
        return both

    for got, want in zip(virtual_world(3).run(rank)[0], (expected, expected_flex), strict=True):
        check("drop-in", got, want)


def compiled() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ls.attention(q, k, v, mask=MASKS["documents"], score_mod=relative)

    check("compiled", results(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs()), results(call, inputs()), 1e-6)


def cache() -> None:
    q, k, v = (t.detach() for t in inputs())
    kv_cache = ls.KVCache(pages=32, layers=1, kv_heads=2, head_dim=16, dtype=torch.float32)
    ids, outs, start = kv_cache.allocate(2), [], 0
    for count in (290, 1, 9):
        part = slice(start, start + count)
        step = kv_cache.step(ids, count)
        outs.append(ls.attention(q[:, :, part], k[:, :, part], v[:, :, part], cache=step, layer=0, mask=ls.causal()))
        start += count
    check("cache", [torch.cat(outs, 2)], expected_results(ls.causal(), None)[:1])


def main() -> int:
    begin = time.process_time()
    for part in (kernels, engine, drop_in, compiled, cache):
        part()
    seconds = time.process_time() - begin
    print(f"torch {torch.__version__}: masks, kernels, engine, drop-in, torch.compile and cache agree; {seconds:.0f} CPU s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
