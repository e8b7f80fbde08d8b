"""Encoder-decoders on real processes that differ in their batch or model: every rank raises within seconds, and the next step is right."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers")

from tests.integrations.families import results
from tests.integrations.test_encoder_decoders import batch_of, model_of

import longspan.integrations.transformers as lst
from longspan.testing import run_processes

pytestmark = pytest.mark.processes
RANKS, ODD_RANK = 3, 1
Batch = dict[str, Tensor]


def _without(batch: Batch, name: str) -> Batch:
    return {key: value for key, value in batch.items() if key != name}


def _moved(batch: Batch, name: str) -> Batch:
    return {**batch, name: batch[name].flip(0)}


def _shorter(batch: Batch, *names: str) -> Batch:
    return {**batch, **{name: batch[name][:, :-1] for name in names}}


# What the odd rank gives to `prepare_batch` in place of the batch, and a part of everyone's message.
OTHER_BATCHES: dict[str, tuple[Any, str]] = {
    "target length": (lambda b: _shorter(b, "labels", "decoder_attention_mask"), "tokens: rank 1 has 16 × 16"),
    "encoder length": (lambda b: _shorter(b, "input_ids", "attention_mask"), "tokens: rank 1 has 22 × 22"),
    "no encoder mask": (lambda b: _without(b, "attention_mask"), "mask: rank 1 has"),
    "no decoder mask": (lambda b: _without(b, "decoder_attention_mask"), "mask: rank 1 has"),
    "other encoder padding": (lambda b: _moved(b, "attention_mask"), "plan: rank 1 has"),
    "other decoder padding": (lambda b: _moved(b, "decoder_attention_mask"), "plan: rank 1 has"),
    "fewer rows": (lambda b: {name: x[:1] for name, x in b.items()}, "batch: rank 1 has 1"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "head_tail"}, "layout: rank 1 has"),
    "strategy": ({"strategy": "allgather"}, "rank 1 has"),
}
EXPECTED = {
    **{name: message for name, (_, message) in OTHER_BATCHES.items()},
    **{name: message for name, (_, message) in OPTIONS.items()},
    "dtype": "dtype: rank 1 has torch.float64",
    "forward only": "rank 1 has attention, forward pass",
}


class Rank:
    """The steps of one rank."""

    def __init__(self, name: str) -> None:
        self.odd = dist.get_rank() == ODD_RANK
        self.model, self.batch = model_of(name), batch_of(name)
        self.doubled = model_of(name).double()

    def step(self, batch: Batch | None = None, model: Any = None, **options: Any) -> tuple[Tensor, list[Tensor]]:
        model = model or self.model
        given = {"layout": "contiguous", "strategy": "ring", **options}
        return results(model, dict(lst.prepare_batch(batch or self.batch, dist.group.WORLD, config=model, gradients="sum", **given)))

    def differ(self, name: str) -> None:
        if not self.odd:
            self.step()
        elif name in OTHER_BATCHES:
            self.step(OTHER_BATCHES[name][0](self.batch))
        elif name in OPTIONS:
            self.step(**OPTIONS[name][0])
        elif name == "dtype":
            self.step(model=self.doubled)
        else:  # a second forward pass while the others run backward
            prepared: Any = lst.prepare_batch(self.batch, dist.group.WORLD, config=self.model, layout="contiguous", strategy="ring")
            for _ in range(2):
                self.model(**prepared)


def _raised(call: Any, *args: Any) -> tuple[str, float]:
    started = time.monotonic()
    try:
        call(*args)
        message = "nothing was raised"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message, time.monotonic() - started


def _differing(name: str, cases: list[str]) -> list[tuple[str, float, Any]]:
    rank = Rank(name)
    rank.step()
    return [(*_raised(rank.differ, case), rank.step()) for case in cases]


def _check(name: str, cases: list[str]) -> None:
    want = results(model_of(name, "eager"), batch_of(name))
    largest = max(float(w.abs().max()) for w in want[1])
    ranks = run_processes(_differing, RANKS, name, cases, group_timeout=30.0)
    for case, *outcomes in zip(cases, *ranks, strict=True):
        messages = [message for message, _, _ in outcomes]
        assert all(EXPECTED[case] in message for message in messages), (case, messages)
        assert max(seconds for _, seconds, _ in outcomes) < 10, case
        shares = [after for _, _, after in outcomes]
        torch.testing.assert_close(sum(s[0] for s in shares), want[0], rtol=1e-5, atol=0, msg=case)
        grads = [torch.stack(parts).sum(0) for parts in zip(*(s[1] for s in shares))]
        torch.testing.assert_close(grads, want[1], rtol=1e-4, atol=1e-5 * largest, msg=case)


def test_ranks_with_another_batch_model_or_plan_all_raise() -> None:
    _check("T5", list(EXPECTED))


def test_ranks_of_a_model_with_learned_positions_all_raise() -> None:
    _check("Bart", ["target length", "no encoder mask", "dtype"])


def _refused() -> tuple[str, float]:
    """One rank's batch is refused before any exchange: it stops there, its peers wait for it."""
    rank = Rank("T5")
    rank.step()
    refused = {**rank.batch, "attention_mask": torch.zeros_like(rank.batch["attention_mask"])}
    return _raised(rank.step, refused if rank.odd else None)


def test_a_rank_whose_batch_is_refused_leaves_no_peer_waiting() -> None:
    outcomes = run_processes(_refused, RANKS, group_timeout=8.0)
    messages = [message for message, _ in outcomes]
    assert "got padding only in rows [0, 1]" in messages[ODD_RANK]
    assert all("nothing was raised" not in message for message in messages), messages
    assert max(seconds for _, seconds in outcomes) < 30
