"""SpanningTrainer over processes, and the code for transformers in the README and the docs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations.tiny_models import batch_of, model_of, relative

from longspan.testing import virtual_world

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.processes
@pytest.mark.parametrize("packed", [True, False])
def test_twenty_steps_of_the_trainer_on_four_processes_give_the_weights_of_one_process(packed: bool, pytestconfig: pytest.Config) -> None:
    if not packed and not pytestconfig.getoption("--whole-grid"):
        pytest.skip("starts four processes: run with --whole-grid")
    from examples.transformers_trainer import differences

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off, moved = differences(packed)
    assert off < 1e-6 and moved > 1e-2


@pytest.mark.processes
def test_twenty_steps_of_trl_on_four_processes_give_the_losses_of_one_process(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--whole-grid"):
        pytest.skip("trains four times: run with --whole-grid")
    pytest.importorskip("trl")
    from examples.trl_sft import differences

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_packing = differences()
    assert max(by_packing.values()) < 1e-5


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"loss_type": "dft"}, {}, "expected loss_type 'nll', got 'dft'"),
        ({"neftune_noise_alpha": 5.0}, {}, r"expected neftune_noise_alpha=None, got 5\.0"),
        ({"include_num_input_tokens_seen": "all"}, {}, "expected include_num_input_tokens_seen='no', got 'all'"),
        ({}, {"compute_metrics": lambda prediction: {}}, "compute_metrics, preprocess_logits_for_metrics: expected None"),
    ],
)
def test_the_mixin_rejects_what_it_would_compute_from_shards(
    settings: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from examples.transformers_trainer import arguments, llama

    import longspan as ls
    from longspan.integrations.trainer import SpanningTrainer

    args = arguments(str(tmp_path))
    for name, value in settings.items():
        setattr(args, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=message):
            SpanningTrainer(model=llama("longspan"), args=args, mesh=ls.Mesh.abstract(1), **options)


def test_the_trainer_raises_for_another_attention_implementation_and_for_a_mesh_of_other_ranks(tmp_path: Path) -> None:
    from examples.transformers_trainer import arguments, llama

    import longspan as ls
    from longspan.integrations.trainer import SpanningTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="attn_implementation='longspan'"):
            SpanningTrainer(model=llama("eager"), args=arguments(str(tmp_path)), mesh=ls.Mesh.abstract(1))
        with pytest.raises(ValueError, match="expected one of all 1 processes, got 3"):
            SpanningTrainer(model=llama("longspan"), args=arguments(str(tmp_path)), mesh=ls.Mesh.abstract(3))


def test_a_model_of_whole_sequences_gathers_its_results_by_token_and_no_others() -> None:
    from examples.transformers_trainer import llama

    from longspan.integrations._meshes import mesh_roles
    from longspan.integrations.trainer import _WholeSequences

    ids = torch.arange(2 * 11).view(2, 11)

    def rank(mesh: Any) -> dict[str, Any]:
        model = llama("longspan")

        def outputs(input_ids: torch.Tensor, **given: Any) -> dict[str, Any]:
            assert given["fused_lm_head"] is True and "shift_labels" in given and not given.keys() & {"labels", "num_items_in_batch"}
            by_token = {"log_probs": input_ids.float() / 4, "correct": input_ids % 3 == 0}
            return {**by_token, "aux_loss": torch.tensor(2.5), "states": input_ids[..., None].float(), "name": "tiny", "loss": 1.0}

        trainer = SimpleNamespace(
            roles=mesh_roles(mesh),
            plan_options={"layout": "head_tail"},
            _config=model.config,
            model=model,
            args=SimpleNamespace(device="cpu"),
        )
        whole = _WholeSequences(outputs, cast(Any, trainer))
        for wrong in ({"labels": ids}, {"fused_lm_head": True}):
            with pytest.raises(ValueError, match="expected a call with labels and fused_lm_head=True"):
                whole(input_ids=ids, **wrong)
        return whole(input_ids=ids, labels=ids, fused_lm_head=True)

    for got in virtual_world(3).run(rank):
        assert torch.equal(got["log_probs"], ids[:, :-1].float() / 4) and torch.equal(got["correct"], ids[:, :-1] % 3 == 0)
        assert got["aux_loss"].shape == () and got["states"].ndim == 3 and got["states"].shape[1] < 11
        assert (got["name"], got["loss"]) == ("tiny", None)


def shown() -> list[Any]:
    blocks = []
    for name in ("README.md", "docs/how-to/transformers.md"):
        text = (ROOT / name).read_text()
        blocks += [pytest.param(b, id=name) for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "from_pretrained" in b]
    return blocks


@pytest.mark.parametrize("lines", shown())
def test_the_three_lines_for_transformers_give_the_loss_of_one_process(lines: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert len(lines.strip().splitlines()) <= 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_of("qwen3").save_pretrained(tmp_path)
    batch = batch_of("packed")

    def rank(mesh: Any) -> Any:
        names = {"AutoModelForCausalLM": AutoModelForCausalLM, "name": str(tmp_path), "batch": batch, "mesh": mesh}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(lines, names)
        return names["loss"].detach()

    loss = torch.stack(virtual_world(2).run(rank)).mean()
    assert relative(loss, model_of("qwen3")(**batch, use_cache=False).loss) < 2e-6
