"""Handles of specs, by which custom operators know the programs of a call."""

from __future__ import annotations

from dataclasses import replace

import torch

import longspan as ls
from longspan._engine.spec import Spec, SpecRegistry
from longspan._masks.tracing import trace


def test_handles_differ_in_every_part_and_have_56_bits() -> None:
    """Operators take them as int64; 64 bits of a digest would not fit."""
    spec = Spec(mask=trace(ls.causal(), "mask").program, score=None, kernel="cpu")
    score = trace(lambda s, b, h, q, kv: s * 2, "score").program
    parts = [replace(spec, lse=False), replace(spec, invariant=True), replace(spec, mask=None), replace(spec, score=score)]
    specs = [spec, *parts, *(replace(spec, kernel=f"kernel {i}") for i in range(20))]
    handles = [one.handle for one in specs]
    assert len(set(handles)) == len(specs) and min(handles) >= 0 and 2**48 < max(handles) < 2**56
    assert replace(spec, lse=True).handle == spec.handle


def test_calls_return_lse_and_are_not_invariant_by_default() -> None:
    registry = SpecRegistry()
    spec = registry.of(None, None, "cpu")
    assert (spec.lse, spec.invariant) == (True, False)
    assert registry.of(None, None, "cpu", lse=True, invariant=False) is spec
    assert len({id(registry.of(None, None, "cpu", lse=lse, invariant=i)) for lse in (True, False) for i in (True, False)}) == 4


def test_gradient_programs_of_64_sizes_of_captured_tensors_are_kept() -> None:
    table = torch.ones(3)
    score = trace(lambda s, b, h, q, kv: s + (table * q).sum(), "score").program
    spec = Spec(mask=None, score=score, kernel="cpu")
    first = spec.joint([torch.ones(1)])
    for n in range(2, 65):
        spec.joint([torch.ones(n)])
    assert spec.joint([torch.ones(1)]) is first
    spec.joint([torch.ones(65)])
    assert spec.joint([torch.ones(1)]) is not first
