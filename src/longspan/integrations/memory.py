"""Memory of long training steps: checkpointing that computes attention once, inputs of layers on the host, tiled MLPs, a tiled loss.

    from longspan.integrations import memory
    x = memory.checkpoint(layer, x)                               # any function of tensors
    loss = memory.causal_lm_loss(model, batch)                    # a transformers model, without logits [S, V]
    model = memory.long_context(model, mesh, mlp_chunk=8192)      # a transformers model, all of it

Legend: S tokens of this rank, V vocabulary, D hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from longspan._cache.arguments import integer
from longspan._plan.sharding import check_dims
from longspan.integrations._configs import is_masked_lm
from longspan.integrations._forward import PlanKeepingCheckpoint, outside_of_forwards, record_loss
from longspan.integrations._host_store import HostStore, HostTensor
from longspan.integrations._kept_attention import ATTENTION, Unmodified, record_and_replay
from longspan.integrations._plan_use import run_checked
from longspan.integrations._tiles import run_tiled
from longspan.integrations.loss import LossKernel, linear_token_loss, shift_labels, token_count

__all__ = ["Place", "causal_lm_loss", "checkpoint", "long_context", "tile_mlps", "tile_norms", "tiled"]

Place = Literal["device", "host"]
_MIN_BYTES = 1 << 20  # smaller inputs stay on the device
_OWN_LOSS = "Use model(**batch).loss, after long_context with loss_chunk=None"
_CHECK_TOKENS, _LARGE = 4, 1000.0  # tokens of a trial, and a factor of their logits that a soft cap would show


def checkpoint(fn: Callable[..., Any], *args: Any, keep: Place = "device", inputs: Place = "device", **kwargs: Any) -> Any:
    """fn(*args, **kwargs), whose backward pass computes its activations again, except the results of attention.

    Attention runs once. Kept from the forward pass: the arguments, and out and lse of every `longspan.attention` in `fn`. With a plan, the
    recomputation of attention communicates nothing. Layers that mix tokens without attention gather their inputs again.

    Args:
        fn: A layer, or any function of tensors. It must do the same each time.
        keep: Where out and lse wait: on their device or in pinned host memory, from where they return ahead of the backward pass.
        inputs: Where tensors among the arguments wait.

    Returns:
        What `fn` returns.
    """
    kept_on, inputs_on = (HostStore() if place == "host" else None for place in (_checked("keep", keep), _checked("inputs", inputs)))
    if torch.compiler.is_compiling():
        if (keep, inputs) != ("device", "device"):
            raise ValueError("memory.checkpoint: host memory is not supported under torch.compile: expected keep='device', inputs='device'")
        contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, list(ATTENTION))
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    return _checkpoint(fn, *args, keep=kept_on, inputs=inputs_on, **kwargs)


def _checked(argument: str, place: str) -> str:
    if place not in ("device", "host"):
        raise ValueError(f"longspan.integrations.memory: expected {argument}='device' or 'host', got {place!r}")
    return place


def _checkpoint(fn: Callable[..., Any], *args: Any, keep: HostStore | None, inputs: HostStore | None, **kwargs: Any) -> Any:
    """`checkpoint` with stores that several layers share: the next tensor returns while a layer computes."""
    call = functools.partial(
        torch_checkpoint.checkpoint, fn, *args, use_reentrant=False, context_fn=functools.partial(record_and_replay, keep), **kwargs
    )
    if inputs is None:
        return call()
    store = inputs

    def pack(t: Tensor) -> Unmodified | HostTensor:
        large = t.numel() * t.element_size() >= _MIN_BYTES and not isinstance(t, nn.Parameter)
        return store.put(t) if large and t.is_cuda else Unmodified(t.detach())

    def unpack(saved: Unmodified | HostTensor) -> Tensor:
        return saved.read()

    # Inside of `fn`, the hooks of torch's checkpoint take over: these see its arguments only.
    with saved_tensors_hooks(pack, unpack):
        return call()


def tiled(fn: Callable[[Tensor], Tensor], x: Tensor, *, chunk: int, dim: int = -2) -> Tensor:
    """fn(x) for a function of single tokens, with the activations of `chunk` tokens in memory at a time.

    Backward computes them again, chunk by chunk. Gradients of parameters are summed over chunks in float32 and rounded once, also those of
    16-bit parameters. Not those of 16-bit parameters that `fn` gives to a custom `torch.autograd.Function`, that are DTensors or views, or
    under `torch.compile`: autograd sums them in 16 bits, with an error that grows with the number of chunks.

    Args:
        fn: A function that treats every token alike, such as an MLP.
        x: Tokens along `dim`.
        chunk: Tokens at a time.
        dim: The dim of tokens, in x and in the result.

    Raises:
        TypeError: `chunk` or `dim` is not an integer.
        ValueError: `chunk` is less than 1, or x has no such dim. `fn` returns another number of dims or of tokens than a chunk has, or
            results of different dtypes or other dims for different chunks.
        RuntimeError: In the backward pass, if a tensor that is no parameter needs a gradient in a later chunk and not in the first, or a
            parameter was modified in place since the forward pass.
    """
    chunk = integer(chunk, "memory.tiled: chunk", least=1)
    check_dims("memory.tiled", dim)
    if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"memory.tiled: expected a tensor x with a dim {dim}, got {got}")
    if x.shape[dim] <= chunk:
        return fn(x)
    return run_tiled(fn, x, chunk, dim)


def tile_mlps(model: nn.Module, chunk: int) -> list[str]:
    """Compute the MLPs of a model by `tiled` in training mode, in place.

    An MLP is a module of one argument whose class name ends in "MLP" and that consists of linear layers and modules without parameters, so
    that it treats every token alike. Mixtures of experts stay as they are.

    Args:
        model: Any module.
        chunk: Tokens at a time.

    Returns:
        The names of these modules.
    """
    names = [name for name, module in model.named_modules() if _is_mlp(module)]
    for name in names:
        module = model.get_submodule(name)
        module.forward = functools.partial(_tiled_in_training, module, module.forward, chunk)
    return names


def _tiled_in_training(module: nn.Module, forward: Callable[[Tensor], Tensor], chunk: int, x: Tensor) -> Tensor:
    return tiled(forward, x, chunk=chunk) if module.training else forward(x)


def tile_norms(model: nn.Module, chunk: int) -> list[str]:
    """Compute the norms of a model by `tiled` in training mode, in place.

    A model's own RMSNorm computes in float32 and keeps several copies of its input for the backward pass. Tiled, it keeps the input. Norms
    of torch keep no copies and stay as they are.

    Args:
        model: Any module.
        chunk: Tokens at a time.

    Returns:
        The names of these modules: of one argument, without parts, with a class name that ends in "RMSNorm" or "LayerNorm".
    """
    names = [name for name, module in model.named_modules() if _is_norm(module)]
    for name in names:
        module = model.get_submodule(name)
        module.forward = functools.partial(_tiled_norm, module, module.forward, chunk)
    return names


def _tiled_norm(module: nn.Module, forward: Callable[..., Tensor], chunk: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A norm over the last dim of x [B, S, ...], by chunks of dim 1. With further arguments, such as a gate, as it is."""
    if not module.training or args or kwargs or x.ndim < 3 or any(p.shape != x.shape[-1:] for p in module.parameters()):
        return forward(x, *args, **kwargs)
    return tiled(forward, x, chunk=chunk, dim=1)


def _is_norm(module: nn.Module) -> bool:
    name, own = type(module).__name__, not type(module).__module__.startswith("torch.")
    channels_last = getattr(module, "data_format", "channels_last") == "channels_last"  # norms of images may be over dim 1
    return own and channels_last and name.endswith(("RMSNorm", "LayerNorm")) and not list(module.children()) and _takes_one_argument(module)


def _takes_one_argument(module: nn.Module) -> bool:
    arguments = inspect.signature(module.forward).parameters.values()
    return len([a for a in arguments if a.default is inspect.Parameter.empty]) == 1


def _is_mlp(module: nn.Module) -> bool:
    if not _takes_one_argument(module):
        return False
    leaves = [m for m in module.modules() if not list(m.children())]
    plain = all(isinstance(m, nn.Linear) or not list(m.parameters()) for m in leaves)
    return type(module).__name__.endswith("MLP") and plain and not list(module.parameters(recurse=False)) and len(leaves) > 1


def causal_lm_loss(model: Any, batch: Mapping[str, Any], *, chunk: int = 4096, kernel: LossKernel = "auto") -> Tensor:
    """The loss of a transformers causal LM on a batch, with the logits of `chunk` tokens in memory at a time.

    The same value as `model(**batch).loss`: of a whole batch with `labels`, or this rank's share of a batch from `prepare_batch`.
    Without any label it is 0, where the model's mean is NaN.

    Args:
        model: A `PreTrainedModel` whose logits are a linear layer of the last hidden states.
        batch: Keyword arguments of the model's forward, with `labels`.
        chunk: Tokens whose logits are in memory at once.
        kernel: "auto", "liger" or "tiled", as for `longspan.integrations.loss.linear_token_loss`.

    Raises:
        ValueError: The batch has no labels, the model's loss_function is not transformers' ForCausalLMLoss, or its logits are something
            else than a linear layer without hooks.
    """
    keywords = dict(batch)
    labels, shifted, count = (keywords.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
    keywords.pop("return_dict", None)  # the result is a tensor
    if labels is None and shifted is None:
        raise ValueError("memory.causal_lm_loss: expected labels in the batch")
    if is_masked_lm(model) or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"memory.causal_lm_loss: expected a causal LM, got {type(model).__name__}, whose labels are not shifted")
    if getattr(model.config, "output_router_logits", False) or keywords.get("output_router_logits"):
        raise ValueError("memory.causal_lm_loss: expected output_router_logits=False: the load-balancing loss is not computed")
    _check_loss_function(model)
    _check_head(model)
    hidden = model.base_model(**{"use_cache": False, **keywords}).last_hidden_state
    targets = shift_labels(labels) if shifted is None else shifted
    weight = model.get_output_embeddings().weight
    targets = targets.to(hidden.device)
    record_loss()
    total = token_count(targets) if count is None else count
    return linear_token_loss(hidden, weight, targets, count=total, chunk=chunk, kernel=kernel)


def _check_loss_function(model: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    # In an eager forward with a plan, the attribute is a function that records its calls.
    with nullcontext() if torch.compiler.is_compiling() else outside_of_forwards():
        function = model.loss_function
    if function is not ForCausalLMLoss:
        raise ValueError(
            f"memory.causal_lm_loss: expected the loss_function ForCausalLMLoss of transformers, got {function} in {type(model).__name__}. "
            f"{_OWN_LOSS}"
        )


def _check_head(model: Any) -> None:
    """Raise ValueError unless the model's logits are linear(last hidden states, output embedding), tried once with a few tokens."""
    head, name = model.get_output_embeddings(), type(model).__name__
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"memory.causal_lm_loss: expected an output layer nn.Linear without bias, got {head} in {name}")
    hooks = (head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks)
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head) or any(hooks):
        raise ValueError(
            f"memory.causal_lm_loss: the output layer {type(head).__name__} of {name} has hooks or a forward of its own, which would not "
            f"run: expected nn.Linear. {_OWN_LOSS}"
        )
    if getattr(model, "_longspan_linear_head", False):
        return
    ids = torch.arange(_CHECK_TOKENS, device=model.get_input_embeddings().weight.device)[None]
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def enlarge(_head: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        seen.append((args[0], nn.functional.linear(args[0], head.weight), _LARGE * output))
        return seen[-1][-1]

    in_training, hook = [module for module in model.modules() if module.training], head.register_forward_hook(enlarge)
    model.eval()
    try:
        with torch.no_grad(), outside_of_forwards():
            logits = model(input_ids=ids, use_cache=False).logits
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        hook.remove()
        for module in in_training:  # some parts may be in evaluation mode
            module.training = True
    if len(seen) != 1 or not _all_close((seen[0][0], hidden), (_LARGE * seen[0][1], seen[0][2]), (logits, seen[0][2])):
        raise ValueError(
            f"memory.causal_lm_loss: {name} changes its hidden states or logits around the output layer (a soft cap or a factor): expected "
            f"logits that are linear in the last hidden states. {_OWN_LOSS}"
        )
    model._longspan_linear_head = True


def _all_close(*pairs: tuple[Tensor, Tensor]) -> bool:
    return all(torch.allclose(a.to(b.dtype), b) for a, b in pairs)


def long_context(
    model: Any, mesh: Any = None, *, keep: Place = "device", inputs: Place = "device", mlp_chunk: int | None = None,
    loss_chunk: int | None = 4096, loss_kernel: LossKernel = "auto", gradients: Literal["mean", "sum"] = "mean", **options: Any,
) -> Any:  # fmt: skip
    """Prepare a transformers causal LM for long training steps, in place: one call for everything in this module.

    In training mode, every decoder layer runs by `checkpoint`, MLPs and norms run by `tiled`, and `model(**batch)` with labels computes the
    loss by `causal_lm_loss`, without logits. In evaluation mode the model is as before, apart from the attention implementation.

    Args:
        model: A `PreTrainedModel` that supports gradient checkpointing. Its attention implementation becomes "longspan".
        mesh: The ranks that share a sequence, as `prepare_batch` takes them. The model then takes whole batches. None: one device, or
            batches from `prepare_batch`.
        keep: Where attention's results wait for the backward pass.
        inputs: Where the inputs of layers wait.
        mlp_chunk: Tokens at a time in MLPs and norms; None leaves them whole.
        loss_chunk: Tokens whose logits are in memory at once; None: the model computes its own loss, with all logits.
        loss_kernel: "auto", "liger" or "tiled", as for `longspan.integrations.loss.linear_token_loss`.
        gradients: As in `prepare_batch`.
        **options: Keywords of `longspan.plan` for `prepare_batch`.

    Returns:
        The model.
    """
    from longspan.integrations.transformers import NAME

    model.set_attn_implementation(NAME)
    kept_on, inputs_on = (HostStore() if place == "host" else None for place in (_checked("keep", keep), _checked("inputs", inputs)))
    # gradient_checkpointing_enable is the name before transformers 5.23, deprecated since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    for module in model.modules():
        # transformers has no public way to set the function itself, only keywords of torch's.
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = functools.partial(_checkpoint, keep=kept_on, inputs=inputs_on)
    if mlp_chunk is not None:
        tile_mlps(model, mlp_chunk)
        tile_norms(model, mlp_chunk)
    names = tuple(inspect.signature(model.forward).parameters)
    steps = _Steps(names, mesh, gradients, options, loss_chunk, loss_kernel)
    # A partial, not a closure: deepcopy gives the copy a forward with the copy's own weights.
    forward = functools.partial(_long_forward, model, model.forward, steps)
    model.forward = functools.update_wrapper(forward, model.forward, assigned=("__name__", "__doc__"), updated=())
    return model


@dataclass(frozen=True, eq=False)
class _Steps:
    """Settings of `long_context`, and the names of the arguments of the model's forward. Copies of a model share them, with the mesh."""

    names: tuple[str, ...]
    mesh: Any
    gradients: Literal["mean", "sum"]
    options: dict[str, Any]
    loss_chunk: int | None
    loss_kernel: LossKernel

    def __deepcopy__(self, memo: dict[int, Any]) -> _Steps:
        return self


def _long_forward(model: Any, plain_forward: Callable[..., Any], steps: _Steps, /, *args: Any, **batch: Any) -> Any:
    """The forward of a model after `long_context`."""
    from longspan.integrations.transformers import prepare_batch

    positional = dict(zip(steps.names, args))
    if not model.training or positional.keys() & batch.keys():  # the latter raises TypeError
        return plain_forward(*args, **batch)
    _check_checkpointing(model)
    batch |= positional
    if batch.get("labels") is None:
        return plain_forward(**batch)
    if steps.mesh is not None and batch.get("longspan_plan") is None:
        batch = dict(prepare_batch(batch, steps.mesh, config=model, gradients=steps.gradients, **steps.options))
        if steps.loss_chunk is None:
            return run_checked(model, plain_forward, (), batch)  # the call of the model had no plan yet
    if steps.loss_chunk is None:
        return plain_forward(**batch)
    return _loss_output(model, batch, steps.loss_chunk, steps.loss_kernel)


def _loss_output(model: Any, batch: dict[str, Any], chunk: int, kernel: LossKernel) -> Any:
    """The model's output with its loss alone, a tuple if `return_dict` is False."""
    from transformers.modeling_outputs import CausalLMOutput

    for name in ("output_hidden_states", "output_attentions"):
        given = batch.get(name)
        if getattr(model.config, name, False) if given is None else given:
            raise ValueError(
                f"memory.long_context: expected {name}=False in a training step, got True: only the loss is returned. Use loss_chunk=None "
                "or evaluation mode"
            )
    output = CausalLMOutput(loss=causal_lm_loss(model, batch, chunk=chunk, kernel=kernel))  # type: ignore[arg-type]
    return output.to_tuple() if batch.get("return_dict") is False else output


def _check_checkpointing(model: nn.Module) -> None:
    """Raise ValueError if another checkpoint function replaced that of `long_context`."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        function = function.function if isinstance(function, PlanKeepingCheckpoint) else function
        if function is None or not getattr(module, "gradient_checkpointing", False):
            continue
        if getattr(function, "func", None) is not _checkpoint:
            raise ValueError(
                "memory.long_context: activation_checkpointing_enable() or gradient_checkpointing_enable() was called after long_context: "
                "attention would be computed twice, and keep= and inputs= would be lost. Leave activation_checkpointing "
                "(gradient_checkpointing) off in TrainingArguments, or call long_context last"
            )
