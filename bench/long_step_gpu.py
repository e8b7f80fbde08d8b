"""Long training steps on one GPU: one rank's share of a million-token step of Qwen3-8B, and whole steps of a Llama-3.2-1B shape.

    PYTHONPATH=src:. python bench/long_step_gpu.py share [--tokens 1048576] [--ranks 8] [--masks causal …] [--calls 2]
    PYTHONPATH=src:. python bench/long_step_gpu.py whole [--tokens 524288] [--only compare | long] [--seconds 200]

share: one decoder layer with the sizes of Qwen3-8B runs forward and backward as one rank of N, by `memory.checkpoint`: attention once, the
rest again in the backward pass. KV of other ranks arrive in memory that already holds random numbers (bench/link.py): transfers over a real
link take no SM and are listed in bytes. The step is 36 layers, the embedding, the tiled loss and the optimizer's share, each measured
at its full size; the first call, which compiles or loads kernels, is printed and not counted. Masks: causal, packed documents, and four
layers with a window of 4,096 tokens to one without. `--calls 0` only compiles.

whole: forward, backward and AdamW of a model with the sizes of Llama-3.2-1B and random bfloat16 weights, by `memory.long_context`; where
transformers is not installed, of the same layers in plain torch by `memory.checkpoint`. `compare`: loss and gradients of a shorter sequence
against the plain path (SDPA, all logits, no recomputation). `long`: the step. After `--seconds` it stops at the end of a layer's
backward pass and extrapolates the time of the other layers. Memory peaks in the first layer of the backward pass, which always runs.

`--tiny` runs both on a CPU, to test this file.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from bench.link import EchoMesh, Link
from bench.long_step_layer import (
    DEVICE,
    DTYPE,
    LLAMA_1B,
    QWEN3_8B,
    START,
    TINY,
    Layer,
    Shape,
    peak_gib,
    reset_peak,
    rotary_of,
    say,
    synchronize,
    timed,
)
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import ops
from longspan.integrations import memory
from longspan.integrations.loss import linear_token_loss, shift_labels

PARTS = ("attention, forward", "attention, backward", "rest, forward", "rest, recomputed and backward")


class CountAttention(TorchDispatchMode):
    """Counts calls of attention's forward operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is ops.attend._opoverload
        return func(*args, **(kwargs or {}))


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


def layer_seconds(layer: Layer, plan: Any, calls: int) -> Iterator[dict[str, float]]:
    """Seconds of the parts of a layer's step on this rank's tokens, of the first and of `calls` further calls.

    The layer runs with q in place of attention's result, then as it trains: the difference is attention's.
    """
    x = torch.randn(1, plan.local_len, layer.shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    grad = torch.randn_like(x)
    rotary = rotary_of(plan.positions, layer.shape)

    def both(attend: Callable[..., Tensor]) -> tuple[float, float]:
        forward, y = timed(lambda: memory.checkpoint(layer, x, rotary, attend))
        backward, _ = timed(lambda: y.backward(grad))
        layer.zero_grad(set_to_none=True)
        x.grad = None
        return forward, backward

    both(lambda q, k, v: q + k.mean() + v.mean())
    for _ in range(1 + calls):
        rest = both(lambda q, k, v: q + k.mean() + v.mean())
        with CountAttention() as count:
            whole_layer = both(lambda q, k, v: ls.attention(q, k, v, plan=plan))
        assert count.calls == 1, f"expected one forward of attention, got {count.calls}"
        yield dict(zip(PARTS, (whole_layer[0] - rest[0], whole_layer[1] - rest[1], *rest)))


def loss_seconds(shape: Shape, tokens: int) -> float:
    """Seconds of the tiled loss of a rank's tokens, forward and backward."""
    hidden = torch.randn(1, tokens, shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(shape.vocab, shape.width, device=DEVICE, dtype=DTYPE).mul_(0.02).requires_grad_()
    labels = torch.randint(shape.vocab, (1, tokens), device=DEVICE)
    return timed(lambda: linear_token_loss(hidden, weight, labels, count=tokens, chunk=shape.chunk).backward())[0]


def embedding_seconds(shape: Shape, tokens: int) -> float:
    """Seconds of the embedding of a rank's tokens and of the last norm, forward and backward."""
    weight = torch.randn(shape.vocab, shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    scale = torch.ones(shape.width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    ids = torch.randint(shape.vocab, (1, tokens), device=DEVICE)
    return timed(
        lambda: rms_norm(embedding(ids, weight), (shape.width,), scale, 1e-6).backward(
            torch.ones((), device=DEVICE, dtype=DTYPE).expand(1, tokens, shape.width)
        )
    )[0]


def optimizer_seconds(parameters: int) -> float:
    """Seconds of AdamW on this many float32 parameters, the second step."""
    weight = torch.zeros(parameters, device=DEVICE, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=DEVICE == "cuda")
    optimizer.step()
    return timed(optimizer.step)[0]


def share(shape: Shape, tokens: int, ranks: int, window: int, args: argparse.Namespace) -> None:
    EchoMesh.use(Link("none") if DEVICE == "cuda" else HostLink())
    with torch.device(DEVICE):
        layer = Layer(shape).to(DTYPE)
    causal = ls.causal()
    masks = {
        "causal": causal,
        "documents": causal & ls.documents(lengths=document_lengths(tokens)),
        "window": causal & ls.sliding_window(window),
    }
    results = {name: measured_layer(layer, name, masks[name], tokens, ranks, args.calls) for name in args.masks}
    parameters = sum(p.numel() for p in layer.parameters()) * shape.layers + 2 * shape.vocab * shape.width
    del layer
    reset_peak()
    local = tokens // ranks
    for what in (loss_seconds, embedding_seconds):
        what(shape, min(local, 2 * shape.chunk))
    if not args.calls:
        say("compiled")
        return
    ends = {
        "embedding and last norm": embedding_seconds(shape, local),
        "loss": loss_seconds(shape, local),
        "optimizer": optimizer_seconds(parameters // ranks),
    }
    gathered = parameters * DTYPE.itemsize * (ranks - 1) / ranks / 1e9
    say(
        f"not measured: links. A step of FSDP with {parameters / 1e9:.2f} G parameters receives {2 * gathered:.1f} GB of weights and "
        f"{gathered:.1f} GB of gradients per rank; KV above"
    )
    window_layers = round(shape.layers * 4 / 5)
    layers = {
        "causal": {"causal": shape.layers},
        "documents": {"documents": shape.layers},
        f"4 layers with window {window} : 1": {"window": window_layers, "causal": shape.layers - window_layers},
    }
    for name, counts in layers.items():
        if counts.keys() <= results.keys():
            parts = {part: sum(n * results[mask][part] for mask, n in counts.items()) for part in PARTS} | ends
            listed = " + ".join(f"{part} {value:.2f}" for part, value in parts.items())
            say(f"STEP {name}: {sum(parts.values()):.1f} s = {listed}, {shape.layers} × one measured layer ({counts})")


def measured_layer(layer: Layer, name: str, mask: Any, tokens: int, ranks: int, calls: int) -> dict[str, float]:
    """Seconds of the parts of a layer: medians of all calls but the first."""
    shape = layer.shape
    planning, plan = timed(lambda: plan_of(mask, tokens, ranks, shape))
    report, rank = plan.report(), plan.mesh.rank
    moved = [float(x[..., rank].sum()) / 1e9 for x in (report.bytes_received, report.bytes_received_backward)]
    say(
        f"{name}: rank {rank} of {ranks}, {plan.local_len} tokens, {plan.strategy}, layout {plan.data.layout}, balance "
        f"{report.balance:.3f}, planned in {planning:.2f} s; received {moved[0]:.2f} GB forward, {moved[1]:.2f} backward"
    )
    reset_peak()
    results = []
    for result in layer_seconds(layer, plan, calls):
        results.append(result)
        parts = ", ".join(f"{part} {1e3 * value:.0f} ms" for part, value in result.items())
        say(f"  call {len(results)} of a layer: {parts}")
    EchoMesh.link.buffers.clear()
    flops = 4 * int(report.pairs[rank]) * shape.head_dim / 1e12  # pairs of all heads
    medians = {part: median(r[part] for r in results[1:] or results) for part in PARTS}
    forward, backward = (medians[f"attention, {what}"] for what in ("forward", "backward"))
    say(f"  attention {flops / forward:.0f} and {2.5 * flops / backward:.0f} TFLOP/s; peak {peak_gib():.1f} GiB")
    return medians


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


def whole(shape: Shape, tokens: int, compared: int, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    try:
        trained, way = transformers_model(shape), "transformers LlamaForCausalLM"
        trained.plain_loss(torch.randint(shape.vocab, (1, 256), device=DEVICE))
    except Exception as error:
        say(f"no transformers model here ({type(error).__name__}: {str(error)[:200]}): the same layers in plain torch")
        trained, way = plain_model(shape), "plain torch"
    parameters = [p for p in trained.model.parameters() if p.requires_grad]
    say(f"{way}: {sum(p.numel() for p in parameters) / 1e9:.2f} G parameters, {DTYPE}")
    ids = torch.randint(shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    head = ids[:, :compared]
    if args.only == "long":
        wanted, loss_of = None, trained.make_long()
    else:
        wanted, loss_of = compare(trained, parameters, head)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=DEVICE == "cuda")

    def step(batch: Tensor, watch: Watch | None = None) -> float:
        if watch is not None:
            watch.follow(trained.layers)
        loss = loss_of(batch)
        if watch is not None:
            watch.forward_ends(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    reset_peak()
    took, loss = timed(lambda: step(head))
    short_peak = peak_gib()
    told = "" if wanted is None else f", {abs(loss - wanted) / wanted:.1e} from the plain path"
    say(f"STEP {compared} tokens: {took:.2f} s (first), peak {short_peak:.2f} GiB, loss {loss:.6f}{told}")
    if args.only == "compare":
        return
    say(f"STEP {compared} tokens: {timed(lambda: step(head))[0]:.2f} s (second)")
    reset_peak()
    watch = Watch(args.seconds)
    try:
        took, told = timed(lambda: step(ids, watch))[0], ""
    except TimeoutError:
        took = watch.extrapolated()
        told = f" (extrapolated: {watch.done} of {len(trained.layers)} layers of the backward pass were measured, no optimizer step)"
    slope = (peak_gib() - short_peak) * 2**30 / (tokens - compared)
    kept = shape.layers * (2 * shape.width * DTYPE.itemsize + 4 * shape.heads)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(
        f"STEP {tokens} tokens: {took:.1f} s{told}, {tokens / took:,.0f} tokens/s, peak GPU {peak_gib():.2f} GiB, peak host "
        f"{host:.1f} GiB, {slope / 1024:.1f} KiB per further token (kept: {kept / 1024:.1f} KiB)"
    )


def compare(trained: Trained, parameters: list[nn.Parameter], ids: Tensor) -> tuple[float, Callable[[Tensor], Tensor]]:
    """Compare the gradients of a quarter of `ids` with the plain path's. Returns the plain path's loss of `ids`, and the long path."""
    with torch.no_grad():
        wanted = float(trained.plain_loss(ids))
    say(f"plain path, {ids.shape[1]} tokens: loss {wanted:.6f}, peak {peak_gib():.1f} GiB")
    few = ids[:, : ids.shape[1] // 4]
    wanted_grads = torch.autograd.grad(trained.plain_loss(few), parameters)
    loss_of = trained.make_long()
    grads = torch.autograd.grad(loss_of(few), parameters)
    difference = [float((g.float() - w.float()).norm() / w.float().norm()) for g, w in zip(grads, wanted_grads)]
    say(f"{few.shape[1]} tokens: gradients differ by {max(difference):.1e} at most, {sum(difference) / len(difference):.1e} in the mean")
    return wanted, loss_of


class Watch:
    """Times after layers of one step. Raises TimeoutError behind a layer of the backward pass that ends later than `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start, self.forward, self.loss = seconds, 0.0, 0.0, 0.0
        self.backward: list[float] = []  # seconds since the end of the forward pass, after each layer

    @property
    def done(self) -> int:
        return len(self.backward)

    def follow(self, layers: nn.ModuleList) -> None:
        self.layers = len(layers)
        handles: dict[int, Any] = {}

        def before(index: int) -> Callable[..., None]:
            def hook(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                handles[index].remove()  # the recomputation calls the layer again
                if inputs[0].requires_grad:
                    inputs[0].register_hook(lambda _grad: self.layer_ends(index))
                if index in (1, self.layers // 2):
                    synchronize()
                    say(f"  forward, {index} layers: {time.perf_counter() - self.start:.1f} s")

            return hook

        def behind(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            last.remove()
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda _grad: self.loss_ends())

        handles |= {i: layer.register_forward_pre_hook(before(i)) for i, layer in enumerate(layers)}
        last = layers[-1].register_forward_hook(behind)
        self.start = time.perf_counter()

    def forward_ends(self, loss: float) -> None:
        synchronize()
        self.forward = time.perf_counter() - self.start
        say(f"  forward: {self.forward:.1f} s, loss {loss:.6f}, {peak_gib():.2f} GiB")

    def loss_ends(self) -> None:
        synchronize()
        self.loss = time.perf_counter() - self.start - self.forward
        say(f"  backward of the loss: {self.loss:.1f} s")

    def layer_ends(self, index: int) -> None:
        synchronize()
        self.backward.append(time.perf_counter() - self.start - self.forward)
        say(f"  backward, {self.done} layers: {self.backward[-1]:.1f} s, peak {peak_gib():.2f} GiB")
        if time.perf_counter() - START > self.seconds and index:
            raise TimeoutError

    def extrapolated(self) -> float:
        """Seconds of the step: the layers that were not reached take what the last one took."""
        before = self.backward[-2] if self.done > 1 else self.loss
        return self.forward + self.backward[-1] + (self.layers - self.done) * (self.backward[-1] - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("share", "whole"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--masks", nargs="+", choices=("causal", "documents", "window"), default=["causal", "documents", "window"])
    parser.add_argument("--calls", type=int, default=2, help="measured calls of a layer in `share`; 0: only compile")
    parser.add_argument("--only", choices=("compare", "long"), help="one half of `whole`")
    parser.add_argument("--seconds", type=float, default=200, help="when `whole` stops its step")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this file on a CPU")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"# bench long_step_gpu {args.part}, {name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    if args.part == "share":
        tokens = args.tokens or (2048 if args.tiny else 1 << 20)
        share(TINY if args.tiny else QWEN3_8B, tokens, args.ranks, 128 if args.tiny else 4096, args)
    else:
        tokens = args.tokens or (1024 if args.tiny else 1 << 19)
        whole(TINY if args.tiny else LLAMA_1B, tokens, 256 if args.tiny else 1 << 15, args)


if __name__ == "__main__":
    main()
