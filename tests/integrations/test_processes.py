"""Models over Gloo processes with other kinds of parallelism. Each spawn takes seconds, so few spawns run many checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.testing import run_processes

pytest.importorskip("transformers")

from tests.integrations import parallel_decoder
from tests.integrations.decoding_grid import decode, least_bytes, on_process
from tests.integrations.tiny_models import FAMILIES, assert_equals_one_process, batch_of, model_of, on_rank, recompute, relative, results

pytestmark = pytest.mark.processes
DECODED = 9  # tokens; 64 of all families by `python -m tests.integrations.decoding_grid`
KINDS = {"llama": "left", "qwen3": "right", "gemma2": "packed", "gemma3": "packed", "gpt_oss": "packed"}


def _families(families: list[str]) -> list[Any]:
    return [on_rank(model_of(family, "longspan"), batch_of(KINDS[family]), dist.group.WORLD) for family in families]


def _two() -> dict[str, Any]:
    return {
        "families": _families(list(FAMILIES)),
        "autocast": _autocast(),
        "ddp": _ddp(),
        "recomputed": _transformers_recomputed(),
        "decoded": on_process(["deepseek_v3"], DECODED),
        "accumulated": parallel_decoder.accumulated(),
        "all recomputed": parallel_decoder.recomputed("full"),
        "some recomputed": parallel_decoder.recomputed("selective"),
        "compiled": parallel_decoder.compiled(),
    }


def _four(folder: str, families: list[str]) -> dict[str, Any]:
    return {
        "families": _families(families),
        "decoded": on_process(["gpt_oss"], DECODED),
        "data × context": parallel_decoder.data_and_context(folder),
        "heads × context": parallel_decoder.heads_and_context(),
    }


def _autocast() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return on_rank(model_of("llama", "longspan"), batch_of("packed"), dist.group.WORLD)


def _ddp() -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients under DDP, which averages gradients."""
    import longspan.integrations.transformers as lst

    model = torch.nn.parallel.DistributedDataParallel(model_of("llama", "longspan"))
    loss = model(**lst.prepare_batch(batch_of("packed"), dist.group.WORLD)).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def _transformers_recomputed() -> Any:
    model = model_of("gemma2", "longspan").train()
    recompute(model)
    return on_rank(model, batch_of("plain"), dist.group.WORLD)


def _check_families(outputs: list[dict[str, Any]], families: list[str]) -> None:
    for i, family in enumerate(families):
        assert_equals_one_process(family, KINDS[family], [f["families"][i] for f in outputs])


def test_models_on_two_processes_with_ddp_autocast_and_recomputation() -> None:
    outputs = run_processes(_two, 2, timeout=240.0)
    _check_families(outputs, list(FAMILIES))
    assert_equals_one_process("gemma2", "plain", [f["recomputed"] for f in outputs])

    _check_decoded(outputs, "deepseek_v3")

    batch = {**batch_of("packed"), "use_cache": False}
    loss, logits, grads = results(model_of("llama"), batch)
    assert relative(sum(f["ddp"][0] for f in outputs) / 2, loss) < 2e-6
    for f in outputs:
        assert all(relative(g, w) < 5e-5 for g, w in zip(f["ddp"][1], grads))

    with torch.autocast("cpu", torch.bfloat16):
        _, half, half_grads = results(model_of("llama"), batch)
    got = [torch.stack([f["autocast"][2][i] for f in outputs]).sum(0) for i in range(len(grads))]
    assert _error(outputs[0]["autocast"][1], logits) <= 2 * _error(half, logits)
    for g, h, w in zip(got, half_grads, grads):
        assert _error(g, w) <= 2 * _error(h, w) + 1e-3

    for name, batches in (("accumulated", [0, 1]), ("all recomputed", [0]), ("some recomputed", [0]), ("compiled", [0])):
        _check_decoder(outputs, name, batches)


def _check_decoded(outputs: list[dict[str, Any]], family: str) -> None:
    """The tokens of one process, and no more bytes than 1.1 of the least possible."""
    results = [f["decoded"][0] for f in outputs]
    assert [r.tokens for r in results] == [decode(None, family, DECODED).tokens] * len(outputs)
    assert sum(r.data for r in results) <= 1.1 * least_bytes(family, len(outputs))


def _check_decoder(outputs: list[dict[str, Any]], name: str, batches: list[int]) -> None:
    loss, grads = parallel_decoder.expected(batches)
    for f in outputs:
        assert relative(f[name]["loss"], loss) < 1e-12, name
        assert grads.keys() == f[name]["gradients"].keys()
        for p, want in grads.items():
            assert relative(f[name]["gradients"][p], want) < 1e-10, f"{name}: {p}"


def _error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_models_on_four_processes_with_other_parallelism(tmp_path: Any, pytestconfig: pytest.Config) -> None:
    families = list(FAMILIES) if pytestconfig.getoption("--whole-grid") else ["gemma2", "gpt_oss"]
    outputs = run_processes(_four, 4, str(tmp_path / "checkpoint"), families, timeout=280.0)
    _check_families(outputs, families)
    _check_decoded(outputs, "gpt_oss")
    for name, batches in (("data × context", [0, 1]), ("heads × context", [0])):
        _check_decoder(outputs, name, batches)
    _check_checkpoint(str(tmp_path / "checkpoint"))


def _check_checkpoint(folder: str) -> None:
    """The checkpoint that 2 × 2 ranks saved, loaded by one process."""
    import torch.distributed.checkpoint as dcp

    import longspan as ls

    model = parallel_decoder.decoder()
    want = parallel_decoder.shares(model, ls.Mesh.abstract(1), [0])
    model.initialise(99)
    assert parallel_decoder.shares(model, ls.Mesh.abstract(1), [0]) != want
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    assert parallel_decoder.shares(model, ls.Mesh.abstract(1), [0]) == want
