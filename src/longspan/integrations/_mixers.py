"""Layers that mix tokens without attention: convolutions, linear attention, state space models, recurrences.

Such a layer needs whole sequences. Hooks around it gather its input over ranks and take this rank's tokens of its output, both under
autograd. A batch with at least as many rows as ranks is divided by rows: each rank computes its share. With fewer rows, gated delta nets
are divided by heads (`_head_mixers`); of other layers, every rank computes all rows, and the gradients of its tokens.

Legend: B batch rows, S tokens of the whole sequence, L tokens of this rank.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspan._engine.plan_cache import plan_cache
from longspan._plan.relayout import Relayout, RowsLayout, relayout
from longspan._planner.plan import Plan
from longspan.integrations._forward import PLAN_KEYWORD, current_forward, described, plan_in_context
from longspan.integrations._head_mixers import run_by_heads, splits_by_heads
from longspan.integrations._plans import ModelPlans

# Direct parameters and buffers of state space models, linear attention with decay, and recurrences.
_STATE_TENSORS = ("A_log", "dt_bias", "time_decay", "time_mix_key", "recurrent_param", "slope_rate")
_STATE_CHILDREN = ("igate_preact",)  # the input gate of an LSTM
# Keywords of a layer by token, which are gathered as its input is; keywords of a forward that layers do not read.
_GATHERED = ("position_ids", "position_embeddings")
_NOT_READ = (PLAN_KEYWORD, "labels", "shift_labels", "num_items_in_batch")

_install_lock = threading.Lock()


def mixes_tokens(module: nn.Module) -> bool:
    """Whether a module is a convolution over tokens, a recurrence or a state space model."""
    if isinstance(module, nn.Conv1d):
        return module.kernel_size != (1,)
    if isinstance(module, nn.RNNBase) or any(name in module._modules for name in _STATE_CHILDREN):
        return True
    return any(name in module._parameters or name in module._buffers for name in _STATE_TENSORS)


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that mix tokens without attention: outermost modules with a state, or with a convolution or recurrence."""
    mixers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        is_layer = not hasattr(type(module), "base_model_prefix") and not isinstance(module, nn.ModuleList) and not _is_leaf(module)
        if is_layer and (mixes_tokens(module) or any(mixes_tokens(c) and _is_leaf(c) for c in module.children())):
            if not hasattr(module, "num_key_value_groups"):  # a convolution inside of attention: nothing hooks it, and it raises
                mixers.append(module)
            return
        for child in module.children():
            visit(child)

    visit(model)
    return mixers


def _is_leaf(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.RNNBase))


def install(model: nn.Module) -> list[nn.Module]:
    """Hook every mixer of a model, once. The hooks do nothing in a forward without a plan.

    Returns:
        The mixers.

    Raises:
        ValueError: If a mixer keeps a state between forwards.
    """
    mixers = mixers_of(model)
    for mixer in mixers:
        if any(hasattr(part, "recurrent_states") for part in mixer.modules()):
            raise ValueError(
                f"longspan: {type(model).__name__} keeps a state between forwards in {described(mixer)}. This model is not supported on "
                "several ranks; call it without a plan on one device"
            )
    with _install_lock:  # ranks of a virtual world share a model
        for module in mixers:
            if not hasattr(module, "_longspan_mixer"):
                module._longspan_mixer = True  # type: ignore[assignment]
                module.register_forward_pre_hook(_gather_inputs, with_kwargs=True)
                module.register_forward_hook(_shard_outputs)
                if splits_by_heads(module, 1) and not hasattr(type(module).forward, "_longspan_by_heads"):
                    type(module).forward = _by_heads_or_whole(type(module).forward)  # type: ignore[method-assign]
    return mixers


@dataclass(frozen=True, kw_only=True)
class _MixerCall:
    """A mixer's call in a forward with a plan, on a batch of `batch` rows."""

    module: nn.Module
    plan: Plan
    batch: int
    real_tokens: Tensor | None

    @functools.cached_property
    def by_heads(self) -> bool:
        """Whether ranks divide the heads of the layer, not the rows of the batch."""
        return self.batch < self.plan.mesh.size and splits_by_heads(self.module, self.plan.mesh.size)

    @functools.cached_property
    def move(self) -> Relayout | None:
        """The move to whole rows; None if every rank computes all rows."""
        ranks = self.plan.mesh.size
        if self.batch < ranks:
            return None
        after = RowsLayout(length=self.plan.layout.length, ranks=ranks, batch=self.batch)
        return Relayout(mesh=self.plan.mesh, before=self.plan.layout, after=after, dim=1)

    @property
    def rows(self) -> slice:
        """The batch rows that this rank computes."""
        if self.move is None:
            return slice(0, self.batch)
        assert isinstance(self.move.after, RowsLayout)
        rows = self.move.after.local_rows(self.plan.mesh.rank)
        return slice(rows.start, rows.stop)

    def gather(self, x: Tensor) -> Tensor:
        """x [B or 1, L, ...] → [rows, S, ...]."""
        x = x.expand(self.batch, *x.shape[1:])
        return self.plan.unshard(x, 1) if self.move is None else self._moved(x, self.move)

    def shard(self, x: Tensor) -> Tensor:
        """x [rows, S, ...] → [B, L, ...]."""
        if self.move is None:
            return self.plan.shard(x, 1)
        back = Relayout(mesh=self.move.mesh, before=self.move.after, after=self.move.before, dim=1)
        return self._moved(x, back)

    def _moved(self, x: Tensor, move: Relayout) -> Tensor:
        device = x.device
        return relayout(x, move, lambda back: plan_cache.moves(self.plan.data, move, device, back=back))


def _gather_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a mixer for whole sequences. In a forward without a plan, the arguments as they are."""
    if torch.compiler.is_compiling():
        if kwargs.get(PLAN_KEYWORD) is not None:
            raise ValueError(_COMPILED.format(described(module)))
        return None
    plans = plan_in_context(module)
    if plans is None:
        return None
    _check_plans(module, plans)
    forward = current_forward.get()
    assert forward is not None
    names = list(inspect.signature(module.forward).parameters)
    arguments = {**dict(zip(names, args)), **kwargs}
    hidden = arguments[names[0]]
    plan = plans.of(None)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[1] != plan.local_len:
        got = f"shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(
            f"longspan: expected this rank's {plan.local_len} tokens as the first argument of {described(module)}, [B, L, D], got {got}. "
            "This model is not supported on several ranks; call it without a plan on one device"
        )
    call = _MixerCall(module=module, plan=plan, batch=hidden.shape[0], real_tokens=plans.real_tokens)
    arguments = {name: value for name, value in arguments.items() if name not in _NOT_READ}
    if call.by_heads:
        _check_others(module, arguments, (names[0], *_GATHERED))
        forward.mixer = call
        return (hidden,), {}
    for name in (names[0], *_GATHERED):
        if arguments.get(name) is not None:
            value = arguments[name]
            arguments[name] = tuple(call.gather(x) for x in value) if isinstance(value, tuple) else call.gather(value)
    _check_others(module, arguments, (names[0], *_GATHERED))
    if "attention_mask" in names and plans.real_tokens is not None and not isinstance(arguments.get("attention_mask"), Tensor):
        arguments["attention_mask"] = plans.real_tokens[call.rows].to(hidden.device, torch.long)
    forward.mixer = call
    return (), arguments


def _by_heads_or_whole(own: Callable[..., Any]) -> Callable[..., Any]:
    """The forward method of a class of mixers that computes this rank's heads where ranks divide them."""

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = None if torch.compiler.is_compiling() else current_forward.get()
        call = None if current is None else current.mixer
        if call is None or call.module is not self or not call.by_heads:
            return own(self, *args, **kwargs)
        return run_by_heads(self, args[0], call.plan, call.real_tokens)

    forward._longspan_by_heads = True  # type: ignore[attr-defined]
    return forward


def _check_plans(module: nn.Module, plans: Any) -> None:
    if not isinstance(plans, ModelPlans):
        raise ValueError(
            f"longspan: expected a plan from prepare_batch for {described(module)}, which mixes tokens without attention, got "
            f"{type(plans).__name__}, which does not say which tokens are padding"
        )
    if plans.states_documents or plans.documents_from_positions:
        raise ValueError(
            f"longspan: expected one document per row for {described(module)}, got packed documents (document_ids, seq_idx, cu_seq_lens or "
            "position_ids that start again): it mixes tokens without attention and would not separate them. Give one document per row"
        )


def _check_others(module: nn.Module, arguments: dict[str, Any], gathered: tuple[str, ...]) -> None:
    """Raise ValueError for a cache, and for other tensors, which may be this rank's shard of something."""
    for name, value in arguments.items():
        is_tensor = isinstance(value, Tensor) and value.ndim > 0
        if name not in gathered and (is_tensor or (name in ("cache_params", "past_key_values", "state") and value is not None)):
            raise ValueError(
                f"longspan: got {name!r} for {described(module)}, which mixes tokens without attention, in a forward with a plan: not "
                "supported. Give use_cache=False and no cache; to generate, call the model without a plan"
            )


def _shard_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """This rank's tokens of a mixer's output: of a tensor, or of the tensors by token of a tuple."""
    forward = None if torch.compiler.is_compiling() else current_forward.get()
    if forward is None or forward.mixer is None or forward.mixer.module is not module:
        return None
    call, forward.mixer = forward.mixer, None
    forward.module_ids.add(id(module))
    if call.by_heads:
        return None
    if isinstance(output, Tensor):
        return call.shard(output)
    tokens = call.plan.layout.length
    return tuple(call.shard(x) if isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] == tokens else x for x in output)


_COMPILED = (
    "longspan: {} has layers that mix tokens without attention: not supported with a plan under torch.compile; do not compile this model, "
    "or compile its attention layers and MLPs only"
)


def check_not_compiled(model: nn.Module, mixers: list[nn.Module]) -> None:
    """Raise ValueError if a mixer, a module around it or a part of it is compiled: compiled code may not run the hooks."""
    mixer_ids = {id(mixer) for mixer in mixers}
    part_ids = {id(part) for mixer in mixers for part in mixer.modules()}
    for name, module in model.named_modules() if mixers else ():
        if is_compiled(module) and (id(module) in part_ids or any(id(part) in mixer_ids for part in module.modules())):
            raise ValueError(_COMPILED.format(name or type(model).__name__))


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of a module runs compiled code."""
    by_module = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return by_module or hasattr(module.forward, "_torchdynamo_orig_callable")


def reject_compiled(model: nn.Module) -> None:
    """Raise ValueError if a model that is compiled as a whole mixes tokens without attention: its hooks may be missing."""
    for module in model.modules():
        if mixes_tokens(module):
            raise ValueError(_COMPILED.format(type(model).__name__))
