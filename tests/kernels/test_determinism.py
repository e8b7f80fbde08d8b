"""Where torch asks for the same bits in every run, the kernels give them or say that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import longspan as ls

Mod = Callable[..., Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradient(score: Mod, table: Tensor, kernel: str = "triton", *, batch: int = 1) -> Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, h, 70, 16, device=DEVICE) for h in (4, 2, 2))
    out = ls.attention(q, k, v, mask=ls.causal(), score_mod=score, kernel=kernel)
    return torch.autograd.grad(out.square().sum(), table)[0]


def test_atomic_sums_raise_as_torch_does() -> None:
    table = torch.randn(70, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"atomic additions.*use_deterministic_algorithms\(True\).*kernel='cpu'"):
        gradient(lambda s, b, h, q, kv: s + table[q - kv], table)


def test_atomic_sums_warn_where_torch_only_warns() -> None:
    table = torch.randn(70, device=DEVICE, requires_grad=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="atomic additions"):
        gradient(lambda s, b, h, q, kv: s + table[q - kv], table)


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_the_kernels_that_the_message_names_compute_it(kernel: str) -> None:
    table = torch.randn(70, device=DEVICE, requires_grad=True)
    assert gradient(lambda s, b, h, q, kv: s + table[q - kv], table, kernel).shape == (70,)


def test_tables_of_which_each_pair_reads_its_own_element_are_summed_in_a_fixed_order() -> None:
    table = torch.randn(4, 70, 70, device=DEVICE, requires_grad=True)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + table[h, q, kv]

    torch.testing.assert_close(gradient(score, table), gradient(score, table, "dense"))
    with pytest.raises(RuntimeError, match="atomic additions"):
        gradient(score, table, batch=2)
    with pytest.raises(RuntimeError, match="atomic additions"):
        gradient(lambda s, b, h, q, kv: s + table[h, q, kv] * table[h, kv, q], table)


def test_captured_tensors_without_gradients_are_no_matter() -> None:
    table = torch.randn(70, device=DEVICE)
    q = torch.randn(1, 2, 70, 16, device=DEVICE, requires_grad=True)
    ls.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[(i - j).abs()], kernel="triton").sum().backward()
    assert q.grad is not None
