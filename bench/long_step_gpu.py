"""Long training steps on one GPU: one rank's share of a million-token step of Qwen3-8B, and whole steps of a Llama-3.2-1B shape.

    PYTHONPATH=src:. python bench/long_step_gpu.py share [--tokens 1048576] [--ranks 8]
    PYTHONPATH=src:. python bench/long_step_gpu.py whole [--tokens 524288] [--seconds 200]

share: one decoder layer with the sizes of Qwen3-8B runs forward and backward as one rank of N, by `memory.checkpoint`: attention once, the
rest again in the backward pass. KV of other ranks arrive in memory that already holds random numbers (bench/link.py): transfers over a real
link take no SM and are listed in bytes. The step is 36 layers, the tiled loss and the optimizer's share, each measured. Masks: causal,
packed documents, and four layers with a window of 4,096 tokens to one without.

whole: forward, backward and AdamW of a model with the sizes of Llama-3.2-1B and random bfloat16 weights, by `memory.long_context`; where
transformers is not installed, of the same layers in plain torch by `memory.checkpoint`. Before it, the loss of 32,768 tokens against the
plain path: SDPA, all logits, no recomputation.

With `--turns FOLDER`, both parts may be started together: they import and compile side by side, then `share` measures, then `whole`.
`--tiny` runs both on a CPU, to test this file.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.link import EchoMesh, Link
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import ops
from longspan.integrations import memory
from longspan.integrations.loss import linear_token_loss, shift_labels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
START = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    rope_base: float
    qk_norm: bool = False
    chunk: int = 8192  # tokens at a time in MLPs and the loss


QWEN3_8B = Shape(
    layers=36, width=4096, heads=32, kv_heads=8, head_dim=128, hidden=12288, vocab=151936, rope_base=1e6, qk_norm=True
)  # fmt: skip
LLAMA_1B = Shape(layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, hidden=8192, vocab=128256, rope_base=5e5)
TINY = Shape(layers=3, width=64, heads=4, kv_heads=2, head_dim=16, hidden=96, vocab=211, rope_base=1e4, qk_norm=True, chunk=64)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of a call, nothing else running."""
    synchronize()
    start = time.perf_counter()
    result = fn()
    synchronize()
    return time.perf_counter() - start, result


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0


def reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Turns:
    """Files by which the two parts of this benchmark take turns; without a folder, nobody waits."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def tell(self, what: str) -> None:
        if self.folder is not None:
            (self.folder / what).touch()

    def wait(self, what: str, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while self.folder is not None and not (self.folder / what).exists() and time.perf_counter() < end:
            time.sleep(0.1)


class CountAttention(TorchDispatchMode):
    """Counts calls of attention's forward operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is ops.attend._opoverload
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """A decoder layer: x [1, L, C] → [1, L, C]. RMSNorm, rotary positions, GQA, SwiGLU by `memory.tiled`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        c, d = shape.width, shape.head_dim
        self.shape = shape
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in (c, c, d, d)])
        sizes = [(c, shape.heads * d), (c, shape.kv_heads * d), (c, shape.kv_heads * d), (shape.heads * d, c)]
        self.q, self.k, self.v, self.o = (nn.Linear(*size, bias=False) for size in sizes)
        self.gate, self.up = (nn.Linear(c, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, c, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, H, L, D], k and v [1, G, L, D]."""
        d = self.shape.head_dim
        x = rms_norm(x, x.shape[-1:], self.norms[0], 1e-6)
        q, k, v = (w(x).unflatten(-1, (-1, d)) for w in (self.q, self.k, self.v))
        if self.shape.qk_norm:
            q, k = rms_norm(q, (d,), self.norms[2], 1e-6), rms_norm(k, (d,), self.norms[3], 1e-6)
        return rotated(q.transpose(1, 2), rotary), rotated(k.transpose(1, 2), rotary), v.transpose(1, 2)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        x = x + self.o(attend(*self.project(x, rotary)).transpose(1, 2).flatten(2))
        return x + memory.tiled(self.mlp, rms_norm(x, x.shape[-1:], self.norms[1], 1e-6), chunk=self.shape.chunk)


def rotary_of(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """(cos, sin) [1, 1, L, D / 2]."""
    half = shape.head_dim // 2
    frequency = shape.rope_base ** (-torch.arange(half, device=DEVICE, dtype=torch.float32) / half)
    angle = positions.to(DEVICE).float()[None, None, :, None] * frequency
    return angle.cos().to(DTYPE), angle.sin().to(DTYPE)


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# -------------------------------------------------------------------------------------------------------------- one rank's share


class HostLink(Link):
    """A link for tests on a CPU."""

    def __init__(self) -> None:
        self.kind, self.buffers = "copy", {}


def document_lengths(tokens: int) -> list[int]:
    """Log-normal lengths with sum `tokens`: median 8,000 tokens, some over 100,000."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        draw = int(torch.empty(()).log_normal_(9.0, 1.4, generator=generator))
        lengths.append(max(16, min(draw, tokens - sum(lengths))))
    lengths[-1] -= sum(lengths) - tokens
    return [n for n in lengths if n > 0]


def plan_of(mask: Any, tokens: int, ranks: int, shape: Shape) -> Any:
    """The plan of the rank with the most (query, key) pairs."""
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    plan = ls.plan(mask, tokens, EchoMesh(axes=ls.Mesh.abstract(ranks).axes, coordinate=(0,)), **heads)
    busiest = int(plan.report().pairs.argmax())
    return plan.on(EchoMesh(axes=ls.Mesh.abstract(ranks).axes, coordinate=(busiest,)))


def layer_seconds(layer: Layer, plan: Any) -> dict[str, float]:
    """Seconds of the parts of a layer's step on this rank's tokens: the layer with q in place of attention's result, then as it trains."""
    x = torch.randn(1, plan.local_len, layer.shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    rotary = rotary_of(plan.positions, layer.shape)
    count = CountAttention()

    def both(attend: Callable[..., Tensor]) -> tuple[float, float]:
        forward, y = timed(lambda: memory.checkpoint(layer, x, rotary, attend))
        grad = torch.randn_like(y)
        backward, _ = timed(lambda: y.backward(grad))
        layer.zero_grad(set_to_none=True)
        return forward, backward

    both(lambda q, k, v: q + k.mean() + v.mean())
    rest = both(lambda q, k, v: q + k.mean() + v.mean())
    reset_peak()
    with count:
        whole_layer = both(lambda q, k, v: ls.attention(q, k, v, plan=plan))
    assert count.calls == 1, f"expected one forward of attention, got {count.calls}"
    names = ("attention, forward", "attention, backward", "rest, forward", "rest, recomputed and backward")
    return dict(zip(names, (whole_layer[0] - rest[0], whole_layer[1] - rest[1], *rest)))


def loss_seconds(shape: Shape, tokens: int) -> float:
    """Seconds of the tiled loss of a rank's tokens, forward and backward."""
    hidden = torch.randn(1, tokens, shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(shape.vocab, shape.width, device=DEVICE, dtype=DTYPE).mul_(0.02).requires_grad_()
    labels = torch.randint(shape.vocab, (1, tokens), device=DEVICE)
    return timed(lambda: linear_token_loss(hidden, weight, labels, count=tokens, chunk=shape.chunk).backward())[0]


def optimizer_seconds(parameters: int) -> float:
    """Seconds of AdamW on this many float32 parameters, the second step."""
    weight = torch.zeros(parameters, device=DEVICE, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=DEVICE == "cuda")
    optimizer.step()
    return timed(optimizer.step)[0]


def share(shape: Shape, tokens: int, ranks: int, window: int, turns: Turns) -> None:
    EchoMesh.use(Link("none") if DEVICE == "cuda" else HostLink())
    with torch.device(DEVICE):
        layer = Layer(shape).to(DTYPE)
    causal = ls.causal()
    masks = {
        "causal": causal,
        "documents": causal & ls.documents(lengths=document_lengths(tokens)),
        f"window {window}": causal & ls.sliding_window(window),
    }
    small = max(tokens // 16, ranks * 16)
    warm_ups = [causal, causal & ls.documents(lengths=document_lengths(small)), causal & ls.sliding_window(window)]
    for name, mask in zip(masks, warm_ups):
        layer_seconds(layer, plan_of(mask, small, ranks, shape))
        say(f"warm-up of {name} on {small} tokens done")
    results = {}
    turns.wait("whole is warm", 30)
    say("measuring")
    for name, mask in masks.items():
        planning, plan = timed(lambda mask=mask: plan_of(mask, tokens, ranks, shape))
        reset_peak()
        first = layer_seconds(layer, plan)  # compiles what the warm-up did not need
        results[name] = layer_seconds(layer, plan)
        parts = ", ".join(f"{part} {1e3 * value:.0f} ms (first call {1e3 * first[part]:.0f})" for part, value in results[name].items())
        report = plan.report()
        received = float(report.received[:, plan.mesh.rank].sum()) * 2 * shape.kv_heads * shape.head_dim * DTYPE.itemsize
        say(
            f"{name}: rank {plan.mesh.rank} of {ranks}, {plan.local_len} tokens, {plan.strategy}, layout {plan.data.layout}, balance "
            f"{report.balance:.3f}, planned in {planning:.2f} s; a layer: {parts}; KV received "
            f"{received / 1e9:.2f} GB; peak {peak_gib():.1f} GiB"
        )
        EchoMesh.link.buffers.clear()
    parameters = sum(p.numel() for p in layer.parameters()) * shape.layers + 2 * shape.vocab * shape.width
    del layer
    reset_peak()
    local = tokens // ranks
    loss_seconds(shape, min(local, 2 * shape.chunk))
    loss, optimizer = loss_seconds(shape, local), optimizer_seconds(parameters // ranks)
    say(f"loss {loss:.2f} s, AdamW of {parameters / ranks / 1e9:.2f} G parameters {optimizer:.3f} s")
    turns.tell("share is done")
    window_layers = round(shape.layers * 4 / 5)
    layers = {
        "causal": {"causal": shape.layers},
        "documents": {"documents": shape.layers},
        f"4 layers with window {window} : 1": {f"window {window}": window_layers, "causal": shape.layers - window_layers},
    }
    for name, counts in layers.items():
        parts = {part: sum(n * results[mask][part] for mask, n in counts.items()) for part in results["causal"]}
        total = sum(parts.values()) + loss + optimizer
        listed = " + ".join(f"{part} {value:.1f}" for part, value in parts.items())
        say(f"STEP {name}: {total:.1f} s = {listed} + loss {loss:.1f} + optimizer {optimizer:.2f}, {shape.layers} layers ({counts})")


# ------------------------------------------------------------------------------------------------------------------- whole steps


class PlainModel(nn.Module):
    """The decoder in plain torch, for machines without transformers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.last = nn.Parameter(torch.ones(shape.width))

    def loss(self, ids: Tensor, *, plain: bool) -> Tensor:
        """The loss by SDPA and all logits (plain), or by `memory.checkpoint` and a tiled loss."""
        x = self.tokens(ids)
        rotary = rotary_of(torch.arange(ids.shape[1]), self.shape)
        for layer in self.layers:
            if plain:
                x = layer(x, rotary, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
            else:
                x = memory.checkpoint(layer, x, rotary, lambda q, k, v: ls.attention(q, k, v, mask=ls.causal()))
        x = rms_norm(x, x.shape[-1:], self.last, 1e-6)
        labels = shift_labels(ids)
        chunk = ids.shape[1] if plain else self.shape.chunk
        return linear_token_loss(x, self.tokens.weight, labels, count=ids.shape[1] - 1, chunk=chunk)


@dataclass(kw_only=True)
class Trained:
    """A model with its two ways to compute a loss of ids [1, S]."""

    model: nn.Module
    layers: nn.ModuleList
    plain_loss: Callable[[Tensor], Tensor]
    make_long: Callable[[], Callable[[Tensor], Tensor]]


def transformers_model(shape: Shape) -> Trained:
    from transformers import LlamaConfig, LlamaForCausalLM

    import longspan.integrations.transformers  # noqa: F401

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=True,
        max_position_embeddings=1 << 20, rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
    )  # fmt: skip
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=DTYPE).train()

    def make_long() -> Callable[[Tensor], Tensor]:
        memory.long_context(model, mlp_chunk=shape.chunk, loss_chunk=shape.chunk)
        return lambda ids: model(input_ids=ids, labels=ids).loss

    return Trained(
        model=model,
        layers=model.model.layers,
        plain_loss=lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
        make_long=make_long,
    )


def plain_model(shape: Shape) -> Trained:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = PlainModel(shape).to(DTYPE)
    nn.init.normal_(model.tokens.weight, std=0.02)
    return Trained(
        model=model,
        layers=model.layers,
        plain_loss=lambda ids: model.loss(ids, plain=True),
        make_long=lambda: lambda ids: model.loss(ids, plain=False),
    )


def whole(shape: Shape, tokens: int, compared: int, seconds: float, turns: Turns) -> None:
    torch.manual_seed(0)
    try:
        trained, way = transformers_model(shape), "transformers LlamaForCausalLM"
        short = torch.randint(shape.vocab, (1, 256), device=DEVICE)
        trained.plain_loss(short)
    except Exception as error:
        say(f"no transformers model here ({type(error).__name__}: {str(error)[:200]}): the same layers in plain torch")
        trained, way = plain_model(shape), "plain torch"
    parameters = [p for p in trained.model.parameters() if p.requires_grad]
    say(f"{way}: {sum(p.numel() for p in parameters) / 1e9:.2f} G parameters, {DTYPE}")
    ids = torch.randint(shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    head = ids[:, :compared]
    with torch.no_grad():
        wanted = float(trained.plain_loss(head))
    say(f"plain path, {compared} tokens: loss {wanted:.6f}, peak {peak_gib():.1f} GiB")
    few = ids[:, : compared // 4]
    wanted_grads = torch.autograd.grad(trained.plain_loss(few), parameters)
    loss_of = trained.make_long()
    grads = torch.autograd.grad(loss_of(few), parameters)
    difference = [float((g.float() - w.float()).norm() / w.float().norm()) for g, w in zip(grads, wanted_grads)]
    say(f"{few.shape[1]} tokens: gradients differ by {max(difference):.1e} at most, {sum(difference) / len(difference):.1e} in the mean")
    del grads, wanted_grads
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=DEVICE == "cuda")

    def step(batch: Tensor, *, report: bool) -> float:
        parts: list[tuple[str, float]] = [("start", time.perf_counter())]
        if report:
            say_after(trained.layers, parts)
        loss = loss_of(batch)
        synchronize()
        parts.append(("forward", time.perf_counter()))
        if report:
            say(f"  forward of {batch.shape[1]} tokens: {parts[-1][1] - parts[0][1]:.1f} s, loss {float(loss.detach()):.6f}")
        loss.backward()
        synchronize()
        if report:
            say(f"  backward: {time.perf_counter() - parts[-1][1]:.1f} s")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        return float(loss.detach())

    peaks = {}
    reset_peak()
    took, loss = timed(lambda: step(head, report=False))
    peaks[compared] = peak_gib()
    error = abs(loss - wanted) / wanted
    say(f"STEP {compared} tokens: {took:.2f} s (first), peak {peaks[compared]:.2f} GiB, loss {loss:.6f}, {error:.1e} from the plain path")
    reset_peak()
    turns.tell("whole is warm")
    turns.wait("share is done", 100)
    left = seconds - (time.perf_counter() - START)
    say(f"{tokens} tokens, {left:.0f} s left")
    took, loss = timed(lambda: step(ids, report=True))
    peaks[tokens] = peak_gib()
    slope = (peaks[tokens] - peaks[compared]) * 2**30 / (tokens - compared)
    kept = shape.layers * (2 * shape.width * DTYPE.itemsize + 4 * shape.heads)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(
        f"STEP {tokens} tokens: {took:.1f} s, {tokens / took:,.0f} tokens/s, loss {loss:.6f}, peak GPU {peaks[tokens]:.2f} GiB, peak host "
        f"{host:.1f} GiB, {slope / 1024:.1f} KiB per further token (kept: {kept / 1024:.1f} KiB)"
    )


def say_after(layers: nn.ModuleList, parts: list[tuple[str, float]]) -> None:
    """Print the time after the first and some later layers of the next forward pass, in case that the run is stopped."""
    wanted = {0, len(layers) // 2, len(layers) - 1}

    def after(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            handles[index].remove()
            synchronize()
            say(f"  forward, layer {index}: {time.perf_counter() - parts[0][1]:.1f} s")

        return hook

    handles = {i: layers[i].register_forward_hook(after(i)) for i in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("share", "whole"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=200, help="time for `whole`, printed only")
    parser.add_argument("--turns", type=Path, help="a folder by which both parts, started together, take turns")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this file on a CPU")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"# bench long_step_gpu {args.part}, {name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    turns = Turns(args.turns)
    if args.part == "share":
        tokens = args.tokens or (2048 if args.tiny else 1 << 20)
        share(TINY if args.tiny else QWEN3_8B, tokens, args.ranks, 128 if args.tiny else 4096, turns)
    else:
        tokens = args.tokens or (1024 if args.tiny else 1 << 19)
        whole(TINY if args.tiny else LLAMA_1B, tokens, 256 if args.tiny else 1 << 15, args.seconds, turns)


if __name__ == "__main__":
    main()
