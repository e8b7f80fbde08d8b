"""Steps of samples of very different lengths: all ranks share every forward, and gradients equal those of the samples one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import longspan as ls
import longspan.integrations.transformers
from longspan.integrations.samples import packed, planned_step, step_batches
from longspan.testing import virtual_world

LENGTHS, RANKS, VOCAB = [211, 17, 5, 40, 9, 31, 88, 3], 4, 61


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = [{"input_ids": torch.randint(3, VOCAB, (n,), generator=generator)} for n in LENGTHS]
    for sample in made[::2]:  # prompts do not count
        sample["labels"] = sample["input_ids"].masked_fill(torch.arange(len(sample["input_ids"])) < 2, -100)
    return made


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation="longspan",
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(("tokens_per_rank", "forwards"), [(128, 1), (60, 2)])
def test_gradients_of_a_step_equal_those_of_single_samples(tokens_per_rank: int, forwards: int, pytestconfig: pytest.Config) -> None:
    net = model()
    parameters = list(net.parameters())
    total, count = torch.zeros(()), sum(int((s.get("labels", s["input_ids"])[1:] != -100).sum()) for s in samples())
    for sample in samples():
        ids = sample["input_ids"][None]
        labels = sample.get("labels", sample["input_ids"])[None]
        total = total + net(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(count), use_cache=False).loss
    want = torch.autograd.grad(total, parameters)

    # Each rank plans every candidate of the step: the second case has one strategy, unless the whole grid is asked for.
    options: dict[str, Any] = {} if forwards == 1 or pytestconfig.getoption("--whole-grid") else {"strategy": "allgather"}

    def rank(mesh: Any) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        losses, grads, made = torch.zeros(()), [torch.zeros_like(p) for p in parameters], 0
        for batch in step_batches(samples(), mesh, tokens_per_rank=tokens_per_rank, config=net, gradients="sum", **options):
            loss = net(**batch).loss
            grads = [a + b for a, b in zip(grads, torch.autograd.grad(loss, parameters))]
            losses, made = losses + loss.detach(), made + 1
            assert batch["input_ids"].shape[1] <= tokens_per_rank
        return losses, grads, made

    results = virtual_world(RANKS).run(rank)
    assert {made for _, _, made in results} == {forwards}
    torch.testing.assert_close(sum(loss for loss, _, _ in results), total.detach(), rtol=1e-5, atol=0)
    for got, expected in zip(zip(*(grads for _, grads, _ in results)), want):
        torch.testing.assert_close(torch.stack(got).sum(0), expected, rtol=1e-4, atol=1e-6)


def test_labels_do_not_cross_samples() -> None:
    batch = packed([{"input_ids": torch.tensor([5, 6, 7])}, {"input_ids": torch.tensor([8, 9])}])
    assert batch["shift_labels"].tolist() == [[6, 7, -100, 9, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]] and batch["document_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_what_does_not_fit_raises() -> None:
    mesh = ls.Mesh.abstract(2)
    with pytest.raises(ValueError, match=r"without padding, got .*attention_mask"):
        packed([{"input_ids": torch.arange(3), "attention_mask": torch.ones(3)}])
    with pytest.raises(ValueError, match="a sample of 211 tokens exceeds 2 ranks"):
        list(step_batches(samples(), mesh, tokens_per_rank=100))


@pytest.mark.parametrize("names", [("dp", "cp"), ("tp", "cp")])
def test_a_mesh_with_an_axis_of_data_or_heads_raises(names: tuple[str, str]) -> None:
    class Axis:
        def __init__(self, size: int) -> None:
            self.size, self.get_local_rank = lambda: size, lambda: 0

    class TwoAxes(dict):  # type: ignore[type-arg]
        mesh_dim_names = names

    with pytest.raises(ValueError, match=r"step_batches: expected a mesh of one axis.*mesh\['dp', 'cp'\]._flatten"):
        planned_step([30, 40], TwoAxes({names[0]: Axis(2), "cp": Axis(3)}), tokens_per_rank=50)
