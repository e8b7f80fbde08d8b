"""transformers models over virtual ranks: logits and all gradients equal those of one process with eager attention."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.integrations.tiny_models import FAMILIES, assert_equals_one_process, batch_of, model_of, on_rank

from longspan.testing import virtual_world

KINDS = ("plain", "packed", "left", "right")
GRID = [(family, kind, 2 if (i + j // 2) % 2 else 4) for i, family in enumerate(FAMILIES) for j, kind in enumerate(KINDS)]
# Two kinds of batches per family; each kind on 2 and on 4 ranks.
SAMPLE = [case for i, case in enumerate(GRID) if (i + i // len(KINDS)) % 2]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("family", "kind", "ranks"), GRID if metafunc.config.getoption("--whole-grid") else SAMPLE)


def test_a_model_on_several_ranks_equals_one_process(family: str, kind: str, ranks: int) -> None:
    model = model_of(family, "longspan")

    def rank(mesh: Any) -> Any:
        return on_rank(model, batch_of(kind), mesh)

    assert_equals_one_process(family, kind, virtual_world(ranks).run(rank))
