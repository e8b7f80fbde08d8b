"""Whole training steps of a decoder on one GPU: a long step part by part, its loss and its gradients beside the plain path's.

Legend: S tokens, H query heads, D head dim.
"""

from __future__ import annotations

import argparse
import copy
import functools
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from bench.long_step_layer import (
    DEVICE,
    DTYPE,
    START,
    Layer,
    Shape,
    peak_gib,
    reset_peak,
    rotary_of,
    say,
    synchronize,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine import ops
from longspan.integrations import memory
from longspan.integrations.loss import linear_token_loss, shift_labels

WARM_UP = 512  # tokens
REFERENCE_DTYPE = torch.float32 if DEVICE == "cuda" else torch.float64


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
        rotary = rotary_of(torch.arange(ids.shape[1]), self.shape, x.dtype)
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
    """A model with its two ways to compute a loss of ids [1, S]. `make_long` changes the model: call `plain_loss` before."""

    way: str
    model: Any
    layers: nn.ModuleList
    plain_loss: Callable[[Any, Tensor], Tensor]  # of a model, which may be a copy
    make_long: Callable[[], Callable[[Tensor], Tensor]]
    widened: Callable[[], Any]  # a copy in REFERENCE_DTYPE, for `plain_loss`

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def transformers_model(shape: Shape, dtype: torch.dtype) -> Trained:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    import longspan.integrations.transformers  # noqa: F401

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=True,
        max_position_embeddings=1 << 20, rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
    )  # fmt: skip
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).train()

    def widened() -> Any:
        AttentionInterface.register("repeated_kv", repeated_kv_attention)
        wide = copy.deepcopy(model).to(REFERENCE_DTYPE)
        wide.set_attn_implementation("repeated_kv")
        wide.gradient_checkpointing_enable()
        return wide

    def make_long() -> Callable[[Tensor], Tensor]:
        memory.long_context(model, mlp_chunk=shape.chunk, loss_chunk=shape.chunk)
        return lambda ids: model(input_ids=ids, labels=ids).loss

    return Trained(
        way="transformers LlamaForCausalLM",
        model=model,
        layers=model.model.layers,
        plain_loss=lambda model, ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
        make_long=make_long,
        widened=widened,
    )


def repeated_kv_attention(_module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, scaling: float, **__: Any) -> tuple[Tensor, None]:
    """Causal attention by SDPA with a KV head for each query head: in float32, torch has no GQA without the matrix of scores."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling).transpose(1, 2), None


def plain_model(shape: Shape, dtype: torch.dtype) -> Trained:
    with torch.device(DEVICE):
        model = PlainModel(shape).to(dtype)
    nn.init.normal_(model.tokens.weight, std=0.02)
    return Trained(
        way="plain torch",
        model=model,
        layers=model.layers,
        plain_loss=lambda model, ids: model.loss(ids, plain=True),
        make_long=lambda: lambda ids: model.loss(ids, plain=False),
        widened=lambda: copy.deepcopy(model).to(REFERENCE_DTYPE),
    )


def make_model(shape: Shape, dtype: torch.dtype) -> Trained:
    torch.manual_seed(0)
    try:
        trained = transformers_model(shape, dtype)
    except Exception as error:
        say(f"no transformers model here ({type(error).__name__}: {str(error)[:200]}): the same layers in plain torch")
        trained = plain_model(shape, dtype)
    say(f"{trained.way}: {sum(p.numel() for p in trained.parameters.values()) / 1e9:.2f} G parameters, {dtype}")
    return trained


def token_ids(shape: Shape, tokens: int) -> Tensor:
    return torch.randint(shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)


# ---------------------------------------------------------------------------------------------------------------------- gradients


def gradients(shape: Shape, tokens: int) -> dict[str, Any]:
    """Errors of the bfloat16 gradients of both paths against the plain path in float32 (float64 on a CPU), with the same weights."""
    trained = make_model(shape, torch.bfloat16)
    ids = token_ids(shape, tokens)
    losses, grads, by_token = {}, {}, {}

    def keep(path: str, loss_of: Callable[[Tensor], Tensor], model: nn.Module) -> None:
        hidden: list[Tensor] = []
        handles = [m.register_forward_hook(lambda *call: hidden.append(call[2].detach())) for m in last_norms(model)]
        loss = loss_of(ids)
        for handle in handles:
            handle.remove()
        grads[path] = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        losses[path] = float(loss.detach())
        if hidden:
            by_token[path] = token_losses(hidden[-1], output_weight(model), ids)
        say(f"{path}, {tokens} tokens: loss {losses[path]:.6f}, peak {peak_gib():.1f} GiB")

    wide = trained.widened()
    keep("reference", functools.partial(trained.plain_loss, wide), wide)
    del wide
    keep("plain", functools.partial(trained.plain_loss, trained.model), trained.model)
    keep("long", trained.make_long(), trained.model)
    spread = {path: loss_difference(by_token[path] - by_token["reference"]) for path in by_token if path != "reference"}
    for path, (mean, error, size) in spread.items():
        own = losses[path] - float(by_token[path].mean())
        print(
            f"loss of the {path} path - reference, from the last hidden states in {REFERENCE_DTYPE}: {mean:+.1e} ± {error:.1e} (standard "
            f"error), {size:.1e} for one token; rounding of logits and of sums: {own:+.1e}"
        )
    rows = []
    for i, name in enumerate(trained.parameters):
        reference, plain, long = (grads[path][i].to(REFERENCE_DTYPE) for path in ("reference", "plain", "long"))
        size = reference.norm()
        errors = {"plain": plain - reference, "long": long - reference, "both": long - plain}
        rows.append({"parameter": name, **{key: float(error.norm() / size) for key, error in errors.items()}})
    print(f"\nrelative error of bfloat16 gradients against {REFERENCE_DTYPE}, mean of layers (largest), {tokens} tokens", flush=True)
    print(f"{'parameter':38} {'plain path':>18} {'long path':>18} {'long / plain':>13} {'long - plain':>18}")
    for kind, members in {**_by_kind(rows), "all": rows}.items():
        means = {key: sum(r[key] for r in members) / len(members) for key in ("plain", "long", "both")}
        shown = {key: f"{100 * means[key]:.2f} % ({100 * max(r[key] for r in members):.2f})" for key in means}
        print(f"{kind:38} {shown['plain']:>18} {shown['long']:>18} {means['long'] / means['plain']:>13.3f} {shown['both']:>18}", flush=True)
    return {"tokens": tokens, "losses": losses, "reference": str(REFERENCE_DTYPE), "loss_differences": spread, "rows": rows}


def last_norms(model: nn.Module) -> list[nn.Module]:
    """The module of transformers' models whose output the output layer takes."""
    return [module for name, module in model.named_modules() if name == "model.norm"]


def output_weight(model: Any) -> Tensor:
    weight: Tensor = model.get_output_embeddings().weight
    return weight.detach().to(REFERENCE_DTYPE)


def token_losses(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The loss of each token but the last, by logits in REFERENCE_DTYPE."""
    pairs = zip(hidden[0, :-1].split(1024), ids[0, 1:].split(1024))
    return torch.cat([cross_entropy(linear(h.to(weight.dtype), weight), t, reduction="none") for h, t in pairs])


def loss_difference(difference: Tensor) -> tuple[float, float, float]:
    """Mean, its standard error, and root mean square of differences by token."""
    return float(difference.mean()), float(difference.std()) / len(difference) ** 0.5, float(difference.square().mean().sqrt())


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of parameters whose names differ in the layer's number only."""
    kinds = defaultdict(list)
    for row in rows:
        kinds[".".join(part for part in row["parameter"].split(".") if not part.isdigit()).removesuffix(".weight")].append(row)
    return kinds


# ------------------------------------------------------------------------------------------------------------------- whole steps


class AttentionTimes(TorchDispatchMode):
    """Seconds of attention's two operators on the device, by events around each call."""

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[str, list[tuple[Any, Any]]] = {"forward": [], "backward": []}
        self._names = {ops.attend._opoverload: "forward", ops.attend_backward._opoverload: "backward"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._names.get(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        before = _mark()
        result = func(*args, **(kwargs or {}))
        self._events[name].append((before, _mark()))
        return result

    def seconds(self, name: str) -> float:
        synchronize()
        return sum(b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in self._events[name])

    def calls(self, name: str) -> int:
        return len(self._events[name])


def _mark() -> Any:
    if DEVICE != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def attention_flops(shape: Shape, tokens: int) -> float:
    """Of the forward pass of all layers, causal: 4 · D for each of S² / 2 pairs and each head. The backward pass has 2.5 times as many."""
    return 4.0 * shape.head_dim * tokens**2 / 2 * shape.heads * shape.layers


@dataclass
class Step:
    """What one step took."""

    shape: Shape
    tokens: int
    loss: float = 0.0
    seconds: float = 0.0
    peak: float = 0.0  # GiB
    parts: dict[str, float] = field(default_factory=dict)  # seconds
    layers_done: int = 0  # of the backward pass
    attention_calls: int = 0  # forward
    is_complete: bool = True

    @property
    def rates(self) -> dict[str, float]:
        """FLOP/s of attention."""
        whole = attention_flops(self.shape, self.tokens)
        share = self.layers_done / self.shape.layers
        return {
            "forward": whole / max(1e-9, self.parts["attention, forward"]),
            "backward": 2.5 * whole * share / max(1e-9, self.parts["attention, backward"]),
        }

    def estimate(self, tokens: int) -> dict[str, float]:
        """Seconds of the passes of a step with more tokens: attention at this step's rate, other parts by tokens."""
        longer = tokens / self.tokens
        return {
            name: self.parts[f"attention, {name}"] * longer**2 + (self.parts[name] - self.parts[f"attention, {name}"]) * longer
            for name in ("forward", "backward")
        }


class Trainer:
    """Steps of a model by the long path: forward, loss, backward, AdamW."""

    def __init__(self, trained: Trained, shape: Shape) -> None:
        self.shape, self.layers, self.loss_of = shape, trained.layers, trained.make_long()
        self.optimizer = torch.optim.AdamW(trained.parameters.values(), lr=1e-5, fused=DEVICE == "cuda")
        self.loss_of(torch.arange(WARM_UP, device=DEVICE)[None] % shape.vocab).backward()  # loads kernels; tries the output layer
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, ids: Tensor, *, seconds: float | None = None) -> Step:
        """One step. seconds: print each part, and stop behind a layer of the backward pass if the next would end later than that."""
        step = Step(self.shape, ids.shape[1])
        watch = Watch(step, seconds)
        reset_peak()
        with AttentionTimes() as attention:
            synchronize()
            watch.start = time.perf_counter()
            handles = watch.follow(self.layers)
            loss = self.loss_of(ids)
            step.loss = float(loss.detach())
            watch.note("forward")
            try:
                loss.backward()
                watch.note("backward")
                self.optimizer.step()
                watch.note("optimizer")
            except TimeoutError:
                step.is_complete = False
            finally:
                for handle in handles:
                    handle.remove()
        self.optimizer.zero_grad(set_to_none=True)
        step.parts |= {f"attention, {name}": attention.seconds(name) for name in ("forward", "backward")}
        step.attention_calls = attention.calls("forward")
        step.peak = peak_gib()
        step.seconds = time.perf_counter() - watch.start if step.is_complete else watch.extrapolated()
        return step


class Watch:
    """Times of the parts of one step. Raises TimeoutError behind a layer of the backward pass if the next would end after `limit`."""

    def __init__(self, step: Step, limit: float | None) -> None:
        self.recorded, self.limit, self.start = step, limit, 0.0
        self.ends: list[float] = []  # seconds since the start, after each layer of the backward pass

    @property
    def now(self) -> float:
        synchronize()
        return time.perf_counter() - self.start

    def note(self, part: str) -> None:
        """The end of a pass."""
        parts = self.recorded.parts
        parts[part] = self.now - sum(parts.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
        if self.limit is not None:
            say(f"  {part}: {parts[part]:.1f} s, loss {self.recorded.loss:.6f}, peak {peak_gib():.2f} GiB")

    def follow(self, layers: nn.ModuleList) -> list[Any]:
        """Hooks of the layers. A layer is called again in the recomputation; its first call counts."""
        seen: set[int] = set()

        def before(index: int) -> Callable[..., None]:
            def hook(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                if index in seen:
                    return
                seen.add(index)
                if inputs[0].requires_grad:
                    inputs[0].register_hook(lambda _grad: self.layer_ends(index))
                if self.limit is not None:
                    say(f"  forward, {index} layers: {self.now:.1f} s")

            return hook

        def behind(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            if len(layers) in seen:
                return
            seen.add(len(layers))
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda _grad: self.loss_ends())
            self.recorded.parts["layers, forward"] = self.now

        handles = [layer.register_forward_pre_hook(before(i)) for i, layer in enumerate(layers)]
        return [*handles, layers[-1].register_forward_hook(behind)]

    def loss_ends(self) -> None:
        self.recorded.parts["loss, backward"] = self.now - self.recorded.parts["forward"]
        if self.limit is not None:
            say(f"  backward of the loss: {self.recorded.parts['loss, backward']:.1f} s")

    def layer_ends(self, index: int) -> None:
        self.ends.append(self.now)
        self.recorded.layers_done = len(self.ends)
        if self.limit is None:
            return
        took = self._last_layer
        say(f"  backward, {len(self.ends)} layers: {self.ends[-1]:.1f} s, the last {took:.2f} s, peak {peak_gib():.2f} GiB")
        if index and time.perf_counter() - START + took > self.limit:
            raise TimeoutError

    @property
    def _last_layer(self) -> float:
        parts = self.recorded.parts
        return self.ends[-1] - (self.ends[-2] if len(self.ends) > 1 else parts["forward"] + parts["loss, backward"])

    def extrapolated(self) -> float:
        """Seconds of the step: each layer that was not reached takes what the last one took. Without the optimizer."""
        return self.ends[-1] + (self.recorded.shape.layers - len(self.ends)) * self._last_layer


def whole(shape: Shape, tokens: int, compared: int, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of `compared` and of `tokens` tokens; before, the loss of `compared` tokens by the plain path."""
    trained = make_model(shape, DTYPE)
    ids = token_ids(shape, tokens)
    head, results = ids[:, :compared], {"way": trained.way}
    if args.only != "long":
        reset_peak()
        with torch.no_grad():
            results["plain_loss"] = float(trained.plain_loss(trained.model, head))
        results["plain_peak_gib"] = peak_gib()
        say(f"plain path, {compared} tokens, no gradients: loss {results['plain_loss']:.6f}, peak {peak_gib():.1f} GiB")
    trainer = Trainer(trained, shape)
    steps = [trainer.step(head)]
    if "plain_loss" in results:
        results["loss_difference"] = abs(steps[0].loss - results["plain_loss"]) / results["plain_loss"]
        say(f"long path, {compared} tokens: loss {steps[0].loss:.6f}, {results['loss_difference']:.1e} from the plain path")
    if args.only != "compare":
        told = ", ".join(f"{name} {value:.0f} s" for name, value in steps[0].estimate(tokens).items())
        say(f"{compared} tokens: {steps[0].seconds:.2f} s, the first step; estimate for {tokens} by it: {told}")
        steps.append(trainer.step(ids, seconds=args.seconds))
        results["bytes_per_token"] = (steps[1].peak - steps[0].peak) * 2**30 / (tokens - compared)
    results["kept_bytes_per_token"] = shape.layers * (2 * shape.width * DTYPE.itemsize + 4 * shape.heads)
    results["host_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results["rows"] = [_row(step) for step in steps]
    _print_table(results)
    for step in steps:
        if step.attention_calls != shape.layers:
            raise AssertionError(f"expected one forward of attention per layer, got {step.attention_calls} for {shape.layers} layers")
    return results


def _row(step: Step) -> dict[str, Any]:
    parts = step.parts
    listed = {
        "attention, forward": parts["attention, forward"],
        "layers without attention, forward": parts["layers, forward"] - parts["attention, forward"],
        "loss, forward": parts["forward"] - parts["layers, forward"],
        "loss, backward": parts["loss, backward"],
        "attention, backward": parts["attention, backward"],
    }
    if step.is_complete:
        rest = parts["backward"] - parts["loss, backward"] - parts["attention, backward"]
        listed |= {"layers without attention, recomputed and backward": rest, "optimizer": parts["optimizer"]}
    return {
        "tokens": step.tokens, "seconds": step.seconds, "is_complete": step.is_complete, "loss": step.loss, "peak_gib": step.peak,
        "parts": listed, "layers_done": step.layers_done, "attention_tflops": {k: v / 1e12 for k, v in step.rates.items()},
    }  # fmt: skip


def _print_table(results: dict[str, Any]) -> None:
    rows = results["rows"]
    print(f"\n{'tokens':52}" + "".join(f"{row['tokens']:>12}" for row in rows))
    for part in rows[0]["parts"]:
        print(f"{part + ', s':52}" + "".join(f"{row['parts'].get(part, float('nan')):12.2f}" for row in rows))
    print(f"{'step, s':52}" + "".join(f"{row['seconds']:12.2f}" + ("" if row["is_complete"] else "*") for row in rows))
    for name in ("forward", "backward"):
        print(f"{f'attention {name}, TFLOP/s':52}" + "".join(f"{row['attention_tflops'][name]:12.0f}" for row in rows))
    print(f"{'tokens / s':52}" + "".join(f"{row['tokens'] / row['seconds']:12,.0f}" for row in rows))
    print(f"{'peak GPU memory, GiB':52}" + "".join(f"{row['peak_gib']:12.2f}" for row in rows))
    print(f"{'loss':52}" + "".join(f"{row['loss']:12.6f}" for row in rows))
    for row in rows:
        if not row["is_complete"]:
            print(f"* extrapolated: {row['layers_done']} layers of the backward pass were measured, no optimizer step")
    further = f"{results['bytes_per_token'] / 1024:.1f} KiB per further token, " if "bytes_per_token" in results else ""
    kept = results["kept_bytes_per_token"] / 1024
    print(f"{further}{kept:.1f} KiB are inputs of layers, out and lse; peak host memory {results['host_gib']:.1f} GiB", flush=True)
