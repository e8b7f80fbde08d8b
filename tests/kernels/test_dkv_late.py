"""dQ one step late at head dims up to 64, on a GPU: gradients equal the oracle's for every kind of block table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan._masks.algebra import Mask
from longspan.testing import oracle

pytestmark = pytest.mark.gpu


def padded_documents(tokens: int) -> Mask:
    """Causal documents of 150 tokens, every third of them padding, which sees nothing."""
    document = torch.arange(tokens, device="cuda") // 150
    return ls.causal() & ls.documents(ids=torch.where(document % 3 == 1, -1, document))


MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda tokens: ls.full(),
    "causal": lambda tokens: ls.causal(),
    "window": lambda tokens: ls.sliding_window(170, 30),
    "no query": lambda tokens: ls.mask_mod(lambda b, h, q, kv: (kv < 200) & (q >= kv)),
    "documents": padded_documents,
}


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Short items compute dQ one step late, too. The numbers of steps for which the kernel was chosen."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    passes = pytest.importorskip("longspan._kernels.hopper.passes")
    steps: list[float] = []

    def always(count: float) -> bool:
        steps.append(count)
        return True

    monkeypatch.setattr(passes, "takes_late_dq", always)
    return steps


def draw(heads: int, kv_heads: int, tokens: int, dim: int) -> list[Tensor]:
    """q, k and v of two batch rows."""
    return [torch.randn(2, h, tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(("heads", "kv_heads", "tokens", "dim"), [(3, 3, 1291, 64), (6, 2, 907, 64), (5, 1, 389, 40)])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_match_the_oracle(name: str, heads: int, kv_heads: int, tokens: int, dim: int, late: list[float]) -> None:
    torch.manual_seed(0)
    given, mask = draw(heads, kv_heads, tokens, dim), MASKS[name](tokens)
    grad = torch.randn(2, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    got = torch.autograd.grad(ls.attention(*given, mask=mask, kernel="hopper"), given, grad)
    exact = [t.detach().double().requires_grad_() for t in given]
    want = torch.autograd.grad(oracle(*exact, mask=mask), exact, grad.double())
    rounded = torch.autograd.grad(oracle(*given, mask=mask, dtype=torch.bfloat16), given, grad)
    assert late
    for what, a, b, c in zip(("dq", "dk", "dv"), got, want, rounded, strict=True):
        assert float((a.double() - b).norm()) <= 1.5 * float((c.double() - b).norm()) + 1e-6, what


def test_in_fixed_order_every_run_gives_the_same_bits(late: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = pytest.importorskip("longspan._kernels.hopper.kernel")
    monkeypatch.setattr(hopper, "ordered_dq_pays", lambda *_, **__: True)  # no separate pass for dQ
    given = draw(8, 2, 1103, 64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out = ls.attention(*given, mask=ls.causal(), kernel="hopper")
        runs = [torch.autograd.grad(out.sum(), given, retain_graph=True) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert late and all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_nan_in_a_key_reaches_only_rows_that_see_it(late: list[float]) -> None:
    given = draw(4, 2, 1217, 64)
    with torch.no_grad():
        given[1][0, 0, 700] = torch.nan
    out = ls.attention(*given, mask=ls.causal(), kernel="hopper")
    dq, _, _ = torch.autograd.grad(out.sum(), given)
    assert late and dq[0, :2, :700].isfinite().all() and dq[0, :2, 700:].isnan().all()
    assert dq[1].isfinite().all() and dq[0, 2:].isfinite().all()
