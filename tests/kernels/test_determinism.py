"""Where torch asks for the same bits in every run, the kernels give them or say that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import longspan as ls
from longspan._kernels.gpu.determinism import check_order, written_once
from longspan._masks.joint import joint_of
from longspan._masks.tracing import trace

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


BIAS, BY_HEAD, BY_BATCH, WHOLE, NUMBER = (
    torch.randn(size, requires_grad=True) for size in ((9, 9), (4, 9, 9), (3, 9, 9), (3, 4, 9, 9), ())
)
# The pairs of (batch rows, heads) for which each element of the table has one pair of query and key.
ONCE: dict[str, tuple[Mod, set[tuple[int, int]]]] = {
    "query and key": (lambda s, b, h, q, kv: s + BIAS[q, kv], {(1, 1)}),
    "key and query": (lambda s, b, h, q, kv: s * BIAS[kv, q], {(1, 1)}),
    "head": (lambda s, b, h, q, kv: s + BY_HEAD[h, q, kv], {(1, 1), (1, 2)}),
    "batch row": (lambda s, b, h, q, kv: s + BY_BATCH[b, q, kv], {(1, 1), (2, 1)}),
    "all": (lambda s, b, h, q, kv: s + WHOLE[b, h, q, kv], {(1, 1), (1, 2), (2, 1), (2, 2)}),
    "computed": (lambda s, b, h, q, kv: s + BIAS[q, kv + 0 * q], set()),
    "query": (lambda s, b, h, q, kv: s + BIAS[q, q], set()),
    "twice": (lambda s, b, h, q, kv: s * BIAS[q, kv] + BIAS[q, kv].square(), set()),
    "at two places": (lambda s, b, h, q, kv: s + BIAS[q, kv] * BIAS[kv, q], set()),
    "number": (lambda s, b, h, q, kv: s * NUMBER, set()),
}


@pytest.mark.parametrize("name", ONCE)
def test_tables_of_which_each_element_belongs_to_one_pair(name: str) -> None:
    score, once = ONCE[name]
    program = trace(score, "score").program
    joint = joint_of(program)
    sizes = [(batch, heads) for batch in (1, 2) for heads in (1, 2)]
    assert {(batch, heads) for batch, heads in sizes if written_once(program, joint, 0, batch=batch, heads=heads)} == once


@pytest.mark.parametrize(
    ("needs", "raises"), [((True, True), True), ((True, False), False), ((False, True), True), ((False, False), False)]
)
def test_only_tables_that_need_a_gradient_matter(needs: tuple[bool, ...], raises: bool) -> None:
    """The first table has an element for each pair, the second one does not."""
    program = trace(lambda s, b, h, q, kv: s + WHOLE[b, h, q, kv] + BIAS[q - kv, 0], "score").program
    work: Any = SimpleNamespace(score=program, joint=joint_of(program))
    q = torch.zeros(2, 3, 9, 16)
    with pytest.raises(RuntimeError, match="atomic additions") if raises else nullcontext():
        check_order(work, needs, q)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="atomic additions") if raises else nullcontext() as warned:
        check_order(work, needs, q)
    assert not raises or warned[0].filename == __file__  # type: ignore[index]
    torch.use_deterministic_algorithms(False)
    check_order(work, needs, q)
    torch.use_deterministic_algorithms(True)
    for missing in ({"score": None, "joint": work.joint}, {"score": program, "joint": None}):
        check_order(SimpleNamespace(**missing), needs, q)  # type: ignore[arg-type]


def test_captured_tensors_without_gradients_are_no_matter() -> None:
    table = torch.randn(70, device=DEVICE)
    q = torch.randn(1, 2, 70, 16, device=DEVICE, requires_grad=True)
    ls.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[(i - j).abs()], kernel="triton").sum().backward()
    assert q.grad is not None
