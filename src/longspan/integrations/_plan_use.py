"""The plan of a model's forward: every layer that mixes tokens must use it.

A layer without the plan mixes the tokens of this rank's shard only: the loss is wrong, and nothing else shows it. Known causes: the model
runs another attention implementation, a layer does not pass keyword arguments on, or a layer mixes tokens without attention. Attention
layers that get no plan by keyword find it in the context of the forward.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from longspan.integrations import _cross_plans, _decoders, _mixers
from longspan.integrations._configs import check_implementation, check_positions, is_masked_lm, layers_without_mixing
from longspan.integrations._forward import PLAN_KEYWORD, Forward, PlanKeepingCheckpoint, current_forward, described, in_forward, record_loss
from longspan.integrations.loss import token_loss


def record_use(module: nn.Module) -> None:
    """Record that an attention module used the plan of the current forward. Compiled code sets an attribute of the module instead.

    Raises:
        ValueError: If documents were derived from position_ids, in which this model does not look for documents; if attention is part of
            a layer that mixes tokens otherwise too.
    """
    if torch.compiler.is_compiling():
        module._longspan_compiled_use = True  # type: ignore[assignment]  # at each run of the compiled code, not only now
        return
    forward = current_forward.get()
    if forward is None:
        return
    if forward.mixer is not None:
        raise ValueError(
            f"longspan: {described(forward.mixer.module)} mixes tokens both by attention and otherwise. This model is not supported on "
            "several ranks; call it without a plan on one device"
        )
    if forward.active_plan is None:
        return  # a vision or audio tower
    forward.module_ids.add(id(module))
    if getattr(forward.plan, "documents_from_positions", False) and not forward.searched_documents:
        advice = "Give one document per row" if forward.has_mixers else "Give document_ids [B, S] to prepare_batch to separate them"
        raise ValueError(
            f"longspan: expected document_ids, got position_ids that start again, in which the model of {described(module)} does not "
            f"look for documents: on one process it would not separate them. {advice}, or leave position_ids out"
        )


def searching(search: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' search for packed documents in position_ids. With a plan it finds none: the plan separates documents."""

    @functools.wraps(search)
    def search_or_note(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return search(*args, **kwargs)
        forward = current_forward.get()
        if forward is None or forward.plan is None:
            return search(*args, **kwargs)
        forward.searched_documents = True
        if forward.in_decoder and _decoders.has_whole_inputs(forward.plan):
            _decoders.check_no_documents(forward, args[0] if args else kwargs["position_ids"], search)
        return None

    return search_or_note


def checked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `__call__` that raises ValueError if the model was given a plan and a layer that mixes tokens did not use it."""

    @functools.wraps(call)
    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plan = kwargs.get(PLAN_KEYWORD)
        if plan is not None:
            check_implementation(self.config)
        if torch.compiler.is_compiling():
            if plan is not None:
                _mixers.reject_compiled(self)
                if _decoders.has_whole_inputs(plan):
                    raise ValueError(
                        f"longspan: {type(self).__name__} is compiled as a whole: not supported with a batch of images, audio, video or "
                        "token types on several ranks, where decoder layers without cross-attention can be compiled, nor for "
                        "encoder-decoders"
                    )
            return call(self, *args, **kwargs)  # a layer without a plan raises while it is traced
        outer = current_forward.get()
        if outer is not None and outer.plan is not None:
            outer.model_ids.add(id(self))
            return call(self, *args, **kwargs)  # an inner model: the outer one is checked as a whole
        return run_checked(self, functools.partial(call, self), args, kwargs)

    return checked


def run_checked(model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """call(*args, **kwargs) as a forward of a model: with a plan among the keywords, every layer that mixes tokens must use it."""
    plan = kwargs.get(PLAN_KEYWORD)
    forward = Forward(plan)
    forward.tokens = kwargs.get("input_ids", args[0] if args else None)
    two_stacks = isinstance(plan, _cross_plans.CrossPlans)
    if isinstance(plan, _cross_plans.CrossPlans):
        _cross_plans.install(model, plan, kwargs)
        _keep_plan_in_checkpoints(model)
    elif plan is not None:
        forward.has_mixers = bool(_check_before(model, plan, kwargs.get("attention_mask")))
    outer = current_forward.get()
    if outer is not None:
        forward.model_mask = outer.model_mask
    if forward.tokens is None and outer is not None:
        forward.tokens = outer.tokens  # a text model that gets embeddings from the model around it
    labels, count = None, kwargs.get("num_items_in_batch")
    if getattr(plan, "bidirectional", False) and not is_masked_lm(model):
        raise ValueError(
            f"longspan: expected a plan for {type(model).__name__}, got one for a ForMaskedLM model; give the model to prepare_batch"
        )
    if getattr(plan, "bidirectional", False) or two_stacks:
        # Encoders and encoder-decoders average the loss of their own labels.
        labels, kwargs = kwargs.get("labels"), {n: v for n, v in kwargs.items() if n not in ("labels", "num_items_in_batch")}
    if two_stacks:
        kwargs.pop(PLAN_KEYWORD)  # layers find the plan of their stack in the forward
        kwargs["use_cache"] = False  # config.use_cache would fill a cache with this rank's shard
    with in_forward(forward):
        try:
            output = call(*args, **kwargs)
            if labels is not None:
                output = _with_loss(output, labels, count)
        except BaseException as error:
            forward.undo_caches()
            if plan is not None and _fails_on_a_shard(model, forward, error):
                raise ValueError(_failed_on_a_shard(model)) from error
            raise
    if outer is not None:
        outer.cache_columns = {**forward.cache_columns, **outer.cache_columns}
    if plan is not None:
        _check_all_used(model, forward)
        _check_loss(model, forward, kwargs, output)
    return output


def guarded_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `forward` that raises ValueError if it is given a plan and was not called through the model, which checks the plan."""

    @functools.wraps(forward)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(PLAN_KEYWORD) is not None and not torch.compiler.is_compiling():
            current = current_forward.get()
            if current is None or current.plan is None:
                raise ValueError(
                    f"longspan: expected a call of the model, {type(self).__name__}(**batch), got a call of its forward method, in which "
                    "layers that get no plan by keyword would not find it; call the model"
                )
        return forward(self, *args, **kwargs)

    guarded._longspan_guarded = True  # type: ignore[attr-defined]
    return guarded


def _check_before(model: nn.Module, plan: Any, mask: Any) -> list[nn.Module]:
    """The layers that mix tokens without attention, hooked. Prepares checkpoint functions.

    Raises:
        ValueError: For a mask beside a plan, and a model that would not place its shard's tokens.
    """
    outer, whole = model, _decoders.has_whole_inputs(plan)
    if whole:
        model = _decoders.install(model)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not whole:
        raise ValueError(
            "longspan: expected no attention_mask beside a plan, got one; give attention_mask to prepare_batch, so that the plan covers "
            "the padding of all ranks"
        )
    mixers = _mixers.install(model)
    _mixers.check_not_compiled(model, mixers)
    if "position_ids" not in inspect.signature(type(model).forward).parameters and not _uses_relative_positions(model, mixers):
        raise ValueError(
            f"longspan: expected a model that takes position_ids, got {type(model).__name__}, which would number the tokens of each rank's "
            "shard from 0. "
            + (
                "Its text decoder takes them: give the model to prepare_batch, prepare_batch(batch, mesh, config=model)"
                if _decoders.only_decoder_takes_positions(model)
                else "This model is not supported on several ranks; call it without a plan on one device"
            )
        )
    check_positions(model.config, plan)
    for module in outer.modules():
        module.__dict__.pop("_longspan_compiled_use", None)
        if _decoders.is_cross_attention(module) and not hasattr(module, "_longspan_recorded"):
            module._longspan_recorded = True  # type: ignore[assignment]
            module.register_forward_pre_hook(_record_run)
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "_longspan_plan_positions", False):
            raise ValueError(
                f"longspan: {described(module)} scales queries by their places in the shard; give attn_implementation='longspan' when the "
                "model is made, or set config.attn_temperature_tuning=False"
            )
    _keep_plan_in_checkpoints(outer)
    return mixers


def _record_run(module: nn.Module, args: Any) -> None:
    forward = None if torch.compiler.is_compiling() else current_forward.get()
    if forward is not None:
        forward.ran_ids.add(id(module))


def _keep_plan_in_checkpoints(model: nn.Module) -> None:
    for module in model.modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, PlanKeepingCheckpoint):
            module._gradient_checkpointing_func = PlanKeepingCheckpoint(function)  # type: ignore[assignment]


def _uses_relative_positions(model: nn.Module, mixers: list[nn.Module]) -> bool:
    """Whether positions enter through longspan's score_mod (ALiBi), or through recurrences only."""
    if getattr(type(model), "_longspan_relative_positions", False):
        return True
    inside = {id(part) for mixer in mixers for part in mixer.modules()}
    others = [m for m in model.modules() if id(m) not in inside]
    embeddings = [m for m in others if isinstance(m, nn.Embedding)]
    return bool(mixers) and len(embeddings) == 1 and not any("Attention" in type(m).__name__ for m in others)


def _check_all_used(model: nn.Module, forward: Forward) -> None:
    if isinstance(forward.plan, _cross_plans.CrossPlans):
        unused = _cross_plans.layers_without_plan(model, forward)
    else:
        unused = _layers_without_plan(_decoders.decoder_of(model) if _decoders.has_whole_inputs(forward.plan) else model, forward)
    if not unused and (forward.module_ids or _any_compiled(model) or any(hasattr(m, "_longspan_compiled_use") for m in model.modules())):
        return
    raise ValueError(_unused_plan(model, unused))


def _unused_plan(model: nn.Module, unused: list[str]) -> str:
    who = f"{_listed(unused)} did not use it" if unused else "no attention layer used it"
    return (
        f"longspan: {type(model).__name__} was given {PLAN_KEYWORD}, but {who}: tokens were mixed within this rank's shard only, and the "
        "loss is wrong. This model is not supported on several ranks; call it without a plan on one device"
    )


def _failed_on_a_shard(model: nn.Module) -> str:
    return (
        f"longspan: {type(model).__name__} was given {PLAN_KEYWORD}, no attention layer used it, and its forward failed on this rank's "
        "shard. Its attention code is its own: unless the error above has another cause, this model is not supported on several ranks; "
        "call it without a plan on one device"
    )


def _fails_on_a_shard(model: nn.Module, forward: Forward, error: BaseException) -> bool:
    """Whether an error comes of attention code of the model's own: no module names transformers' interface or was adapted to longspan."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_own = frame.f_globals.get("__name__", "").startswith("longspan.")  # longspan's error says more
    if is_own or forward.module_ids or forward.has_mixers or isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
        return False
    sources = {sys.modules.get(type(module).__module__) for module in model.modules()}  # None: of a module that was removed
    return not any(hasattr(source, "ALL_ATTENTION_FUNCTIONS") or hasattr(source, "_longspan_adapted") for source in sources)


def _with_loss(output: Any, labels: torch.Tensor, count: Any) -> Any:
    """A model's output with this rank's share of the loss of labels that are not shifted."""
    if isinstance(output, tuple) or count is None:
        raise ValueError("longspan: expected num_items_in_batch from prepare_batch and return_dict=True for labels that are not shifted")
    record_loss()
    return type(output)(**{"loss": token_loss(output.logits, labels, count=count), **output})


def _check_loss(model: nn.Module, forward: Forward, kwargs: dict[str, Any], output: Any) -> None:
    """Raise ValueError if a model computed its loss by code of its own, which shifts labels again and divides by this rank's count."""
    has_labels = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    has_loss = isinstance(output, tuple) or getattr(output, "loss", None) is not None
    # Traced code does not record its loss function.
    if has_labels and has_loss and not forward.counted_loss and not kwargs.get("fused_lm_head") and not _any_compiled(model):
        raise ValueError(
            f"longspan: {type(model).__name__} computes its loss by code of its own, from the labels of this rank's shard only. Call it "
            "without labels and shift_labels, and compute the loss from its logits: longspan.integrations.loss.token_loss(logits, "
            "shift_labels, count=num_items_in_batch)"
        )


def recording_loss(get: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """The getter of `PreTrainedModel.loss_function`, with a record of calls with shifted labels and a count."""

    @functools.wraps(get)
    def loss_function(self: Any) -> Callable[..., Any]:
        function = get(self)
        forward = None if torch.compiler.is_compiling() else current_forward.get()
        if forward is None or forward.plan is None:
            return function

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("shift_labels") is not None and kwargs.get("num_items_in_batch") is not None:
                record_loss()
            return function(*args, **kwargs)

        return recorded

    return loss_function


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _layers_without_plan(model: nn.Module, forward: Forward) -> list[str]:
    """Names of the layers that mix tokens and did not use the plan.

    Skips compiled modules, which run no Python, idle inner models, and cross-attention that did not run.
    """
    names = []

    def visit(module: nn.Module, name: str) -> bool:
        """Whether the module or one of its children used the plan, or cannot say."""
        if _mixers.is_compiled(module):
            return True
        if id(module) in forward.module_ids and hasattr(module, "_longspan_mixer"):
            return True  # with all its parts
        if _mixers.mixes_tokens(module):
            names.append(name)
            return True  # named already
        if _decoders.is_cross_attention(module) and id(module) not in forward.ran_ids:
            return True  # as without images
        children = [(f"{name}.{child_name}" if name else child_name, child) for child_name, child in module.named_children()]
        children = [(child_name, child) for child_name, child in children if not _is_idle_model(child, forward)]
        uses = [visit(child, child_name) for child_name, child in children]
        used = id(module) in forward.module_ids or hasattr(module, "_longspan_compiled_use") or any(uses)
        if not used and _is_causal_attention(module):
            names.append(name)
            return True
        if isinstance(module, nn.ModuleList) and any(uses):
            # Layers of one list take the same place. One without attention mixes tokens otherwise, whatever its class is called.
            unmixed = layers_without_mixing(model.config)
            names.extend(n for i, ((n, _), child_used) in enumerate(zip(children, uses)) if not child_used and i not in unmixed)
        return used

    visit(model, "")
    return names


def _is_causal_attention(module: nn.Module) -> bool:
    """Whether a module is a causal self-attention layer, by transformers' conventions."""
    return "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) is not None and getattr(module, "is_causal", True)


def _is_idle_model(module: nn.Module, forward: Forward) -> bool:
    """Whether a module is an inner model that did not run, such as a vision tower in a forward without images."""
    return hasattr(type(module), "base_model_prefix") and id(module) not in forward.model_ids


def _any_compiled(model: nn.Module) -> bool:
    return any(_mixers.is_compiled(module) for module in model.modules())
