"""Own masks are traced without torch's tracer, into the same programs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import longspan as ls
from longspan._masks import tracing

MASKS = {
    "full": ls.full(),
    "causal": ls.causal(),
    "window": ls.sliding_window(5, 2),
    "causal documents": ls.causal() & ls.documents([3, 7, 6]),
    "documents": ls.documents([3, 7, 6]),
    "scattered documents of two rows": ls.documents(ids=[[0, 1, 0, -1], [1, 1, 2, 0]]),
    "prefixes": ls.causal() | ls.prefix([3, 4]),
    "complement": ~(ls.prefix(3) | ls.sliding_window(2)),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_program_is_that_of_torchs_tracer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS[name]
    with monkeypatch.context() as context:
        context.setattr(tracing, "fake_trace", lambda *_, **__: pytest.fail("torch's tracer was used"))
        ours = tracing.trace(mask, "mask")
    monkeypatch.setattr(tracing, "scalar_trace", lambda *_: None)
    theirs = tracing.trace(mask, "mask")
    assert ours.program.key == theirs.program.key
    assert ours.preamble is None and theirs.preamble is None
    assert len(ours.sources) == len(theirs.sources) and all(a is b for a, b in zip(ours.sources, theirs.sources, strict=True))
    values = [(n.op, n.meta["val"].dtype, n.meta["val"].shape) for n in ours.program.graph.nodes if "val" in n.meta]
    assert values == [(n.op, n.meta["val"].dtype, n.meta["val"].shape) for n in theirs.program.graph.nodes if "val" in n.meta]


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, kv: q >= int(kv),
        lambda b, h, q, kv: q >= torch.arange(3)[kv],
        lambda b, h, q, kv: q.add_(1) >= kv,
        lambda b, h, q, kv: torch.rand(()) >= 0.5,
        lambda b, h, q, kv: (torch.arange(3) >= q).any(),
        lambda b, h, q, kv: True,
    ],
)
def test_other_mods_are_left_to_torchs_tracer(mod: object) -> None:
    assert tracing.scalar_trace(mod, [torch.zeros((), dtype=torch.int64) for _ in range(4)]) is None  # type: ignore[arg-type]


def test_a_first_call_with_an_own_mask_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys, torch, longspan as ls; q = torch.randn(1, 2, 30, 16, requires_grad=True); mask = ls.causal() & ls.documents([10, 20]);"
        "ls.attention(q, q, q, mask=mask).sum().backward(); print({'sympy', 'torch._dynamo', 'torch._inductor'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
