"""`longspan.invariant()` on the hopper kernel. Needs a Hopper GPU."""

from __future__ import annotations

import random

import pytest
import torch
from tests import invariant_cases as cases

from longspan._kernels import registry

if not torch.cuda.is_available() or registry.first_candidate(torch.device("cuda", 0)) != "hopper":
    pytest.skip("needs a Hopper GPU: run `make test-gpu` on a machine that has one", allow_module_level=True)


@pytest.mark.parametrize(("seed", "dim"), [*((seed, 128) for seed in range(6)), (6, 64), (7, 256)])
def test_a_document_has_the_same_bits_wherever_hopper_computes_it(seed: int, dim: int) -> None:
    one, choose = cases.problem(seed, kernel="hopper", device="cuda", longest=1500, plain_dim=dim), random.Random(seed)
    want = cases.alone(one)
    assert cases.errors_against_oracle(one, want) == []
    chunk, at = cases.chunked(one, choose)
    ranked, where = cases.over_ranks(one, choose)
    everything = slice(None)
    for name, got, rows in (
        ("batched", cases.batched(one, choose), everything), ("packed", cases.packed(one, choose), everything), ("chunked", chunk, at),
        (where, ranked, everything),
    ):  # fmt: skip
        assert cases.differences(got, want, rows) == [], name
