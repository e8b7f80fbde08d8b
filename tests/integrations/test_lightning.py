"""Lightning's strategy, against a stand-in for DDPStrategy. `examples/lightning_cp.py` trains with Lightning, where it is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

NAME = "longspan.integrations.lightning"


class DDPStrategy:
    root_device = torch.device("cpu")

    def __init__(self, **options: Any) -> None:
        self.options, self.ready = options, False

    def setup_environment(self) -> None:
        self.ready = True


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`longspan.integrations.lightning` over the stand-in."""
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.strategies"):
        module = ModuleType(name)
        module.DDPStrategy = DDPStrategy  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def test_consecutive_ranks_share_sequences_and_samples(lightning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meshes: list[Any] = []
    monkeypatch.setattr(lightning, "init_device_mesh", lambda *args, **names: meshes.append((args, names)) or "mesh")
    strategy = lightning.SpanningStrategy(context_size=3, timeout=5)
    strategy.world_size = 12
    assert strategy.options == {"timeout": 5}
    with pytest.raises(ValueError, match="got one before processes were set up"):
        _ = strategy.mesh
    strategy.setup_environment()
    assert strategy.ready and strategy.mesh == "mesh" and meshes == [(("cpu", (4, 3)), {"mesh_dim_names": ("dp", "cp")})]
    samplers = []
    for strategy.global_rank in (0, 2, 3, 11):
        samplers.append(strategy.distributed_sampler_kwargs)
    assert samplers == [{"num_replicas": 4, "rank": rank} for rank in (0, 0, 1, 3)]


def test_a_context_that_does_not_divide_the_processes_raises(lightning: Any) -> None:
    strategy = lightning.SpanningStrategy(context_size=5)
    strategy.world_size = 12
    with pytest.raises(ValueError, match="expected a context_size that divides 12 processes, got 5"):
        strategy.setup_environment()


def test_without_lightning_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ImportError, match="pip install"):
        importlib.import_module(NAME)
