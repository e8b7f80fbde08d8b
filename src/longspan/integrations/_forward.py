"""The forward of a model that this thread is in, and its plan.

Layers that get no plan by keyword, and layers that are recomputed in the backward pass, find it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

PLAN_KEYWORD = "longspan_plan"


class Forward:
    """One forward of a model: its plan, or None; the modules that used the plan and the inner models that ran, by id.

    searched_documents: whether the model looked for packed documents in position_ids.
    counted_loss: whether a loss was computed from shifted labels and the count of the whole batch.
    mixer: the call of a layer without attention that is running.
    has_mixers: whether some layer mixes tokens without attention.
    in_decoder: whether the text decoder runs, of a model whose inputs are whole (`_decoders`), or a layer of an encoder-decoder.
    in_encoder: whether that layer is the encoder's (`_cross_plans`).
    made_positions: positions that a model with whole inputs made for its text decoder without an attention_mask, whole and of this rank's
        tokens; or None.
    tokens: the model's input_ids, or None.
    model_mask: the last mask of tokens that a model asked for, or None.
    seen_features: features of images that cross-attention layers of the text decoder see, whole on every rank, or None.
    ran_ids: the cross-attention layers that ran, by id.
    cache_update: the update of a `PagedCache` by a layer whose attention has not run yet.
    cache_columns: each `PagedCache` and its columns before this forward, by id of the cache.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.module_ids: set[int] = set()
        self.model_ids: set[int] = set()
        self.searched_documents = False
        self.counted_loss = False
        self.mixer: Any = None
        self.has_mixers = False
        self.in_decoder = False
        self.in_encoder = False
        self.made_positions: Any = None
        self.tokens: Any = None
        self.model_mask: Any = None
        self.seen_features: Any = None
        self.ran_ids: set[int] = set()
        self.cache_update: Any = None
        self.cache_columns: dict[int, tuple[Any, int]] = {}

    @property
    def place(self) -> tuple[Any, bool, bool]:
        """Which part of the model runs: (mixer, in_decoder, in_encoder)."""
        return self.mixer, self.in_decoder, self.in_encoder

    @place.setter
    def place(self, place: tuple[Any, bool, bool]) -> None:
        self.mixer, self.in_decoder, self.in_encoder = place

    @property
    def active_plan(self) -> Any:
        """The plan; None before the text decoder of a model whose inputs are whole; the encoder's plan in the layers of an encoder."""
        if getattr(self.plan, "whole_inputs", False) and not self.in_decoder:
            return None
        return self.plan.encoder if self.in_encoder else self.plan

    def undo_caches(self) -> None:
        """Drop the tokens of this forward, which failed, from caches."""
        for cache, columns in self.cache_columns.values():
            cache.undo_forward(columns)


# The forward that this thread is in; None outside of a model.
current_forward: ContextVar[Forward | None] = ContextVar("longspan_forward", default=None)


def plan_in_context(module: nn.Module) -> Any:
    """The plan of the current forward, for a module that was given none by keyword; None without one.

    Raises:
        ValueError: If a layer runs outside of a forward, and its last plan came from the context: a checkpoint function that is not
            transformers' recomputes it.
    """
    if torch.compiler.is_compiling():
        return None
    forward = current_forward.get()
    if forward is None:
        if getattr(module, "_longspan_plan_in_context", False):
            raise ValueError(
                f"longspan: {described(module)} is recomputed outside of its model's forward, and the layer around it does not pass "
                f"{PLAN_KEYWORD} on. Use model.activation_checkpointing_enable() (before transformers 5.23 "
                "gradient_checkpointing_enable()) instead of another checkpoint function"
            )
        return None
    if forward.active_plan is not None:
        module._longspan_plan_in_context = True  # type: ignore[assignment]
    return forward.active_plan


def record_loss() -> None:
    """Record that the current forward computed its loss from shifted labels and the count of the whole batch."""
    forward = None if torch.compiler.is_compiling() else current_forward.get()
    if forward is not None:
        forward.counted_loss = True


@contextmanager
def outside_of_forwards() -> Iterator[None]:
    """Run a model as if no forward with a plan were active, even if the model is called in one."""
    with in_forward(Forward(plan=None)):
        yield


@contextmanager
def in_forward(forward: Forward) -> Iterator[None]:
    """Make a forward the current one."""
    token = current_forward.set(forward)
    try:
        yield
    finally:
        current_forward.reset(token)


class PlanKeepingCheckpoint:
    """A checkpoint function by which a recomputed layer finds the plan of its forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = current_forward.get()
        if forward is None:
            return self.function(run, *args, **kwargs)

        place = forward.place  # Hooks of the layer set it. A recomputation runs them again before transformers 5.23, not since.

        def run_within(*run_args: Any, **run_kwargs: Any) -> Any:
            before, forward.place = forward.place, place
            try:
                with in_forward(forward):
                    return run(*run_args, **run_kwargs)
            finally:
                forward.place = before  # a recomputation may end early, inside of a mixer

        return self.function(run_within, *args, **kwargs)


def described(module: nn.Module) -> str:
    """A module in words: its class and its layer."""
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")
