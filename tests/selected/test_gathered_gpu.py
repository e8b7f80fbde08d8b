"""Attention over single chosen keys by the Hopper kernels, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.selected.cases import Case, check

pytest.importorskip("triton")

import longspan as ls
from longspan._engine import selected as engine
from longspan._kernels.hopper.config import HOPPER
from longspan._kernels.hopper.gathered_call import GatheredKeys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="needs a Hopper GPU"),
]


def record_works(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The work of every call over chosen keys from now on; None for calls that take the general path."""
    works: list[Any] = []
    of = engine.SelectedCall.of

    def recorded(*args: Any, **options: Any) -> Any:
        call = of(*args, **options)
        works.append(None if call is None else call.work)
        return call

    monkeypatch.setattr(engine.SelectedCall, "of", recorded)
    return works


@pytest.fixture(autouse=True)
def gathers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every call of a test gathers keys by the Hopper kernels."""
    works = record_works(monkeypatch)
    yield
    assert works and all(work is not None and isinstance(work.device_tables, GatheredKeys) for work in works)


def choose(shape: tuple[int, ...], kv_len: int, seed: int) -> torch.Tensor:
    """Random indices with repeats, −1, empty rows, and rows of no, one and all keys."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, kv_len, shape, generator=generator, dtype=torch.int32)
    indices[torch.rand(shape, generator=generator) < 0.1] = -1
    indices[torch.rand(shape[:3], generator=generator) < 0.1] = -1
    indices[:, :, 1] = 5
    indices[:, :, 2] = torch.arange(shape[3]) % kv_len
    indices[:, :, 3, 1:] = -1
    return indices.cuda()


def case_of(
    heads: tuple[int, int], lengths: tuple[int, int], dims: tuple[int, int], mask: Any, *,
    batch: int = 1, sink: bool = False, by_token: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> Case:  # fmt: skip
    """by_token: tensors whose tokens are outside of heads in memory."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (heads[0], lengths[0], dims[0]), "k": (heads[1], lengths[1], dims[0]), "v": (heads[1], lengths[1], dims[1])}
    tensors = {}
    for name, (h, s, d) in shapes.items():
        x = torch.randn(batch, s, h, d, generator=generator).to("cuda", dtype).transpose(1, 2)
        tensors[name] = (x if by_token else x.contiguous()).requires_grad_()
    if sink:
        tensors["sink"] = torch.randn(heads[0], generator=generator).to("cuda", dtype).requires_grad_()
    grad_out = torch.randn(batch, heads[0], lengths[0], dims[1], generator=generator).to("cuda", dtype)
    return Case(text=str(mask), tensors=tensors, mask=mask, score_mod=None, grad_out=grad_out)


def test_64_heads() -> None:
    documents = ls.documents([100, 233])
    for entries, rest in ((197, ls.causal()), (64, ls.causal() & documents)):
        mask = ls.selected(choose((1, 1, 333, entries), 333, entries), 1) & rest
        check(case_of((64, 1), (333, 333), (128, 128), mask), kernel="hopper")


def test_64_heads_of_other_lengths_without_another_mask() -> None:
    mask = ls.selected(choose((2, 1, 150, 130), 517, 0), 1, 2)
    check(case_of((64, 1), (299, 517), (128, 128), mask, batch=2, sink=True, by_token=True), kernel="hopper")


def test_128_heads() -> None:
    mask = ls.selected(choose((1, 1, 201, 161), 201, 0), 1) & ls.causal()
    check(case_of((128, 1), (201, 201), (128, 128), mask, batch=2), kernel="hopper")
    check(case_of((128, 1), (201, 201), (128, 128), mask, sink=True), kernel="hopper")


def test_32_heads_of_two_kv_heads_with_narrow_values() -> None:
    mask = ls.selected(choose((1, 2, 130, 70), 130, 0), 1) & ls.causal()
    check(case_of((64, 2), (130, 130), (128, 64), mask, dtype=torch.float16), kernel="hopper")


@pytest.mark.parametrize("queries", [1, 2])
def test_8_heads_and_a_negative_scale(queries: int) -> None:
    """With lists of two queries, the kernel masks scores."""
    mask = ls.selected(choose((1, 2, 90 // queries, 140), 90, 0), 1, queries) & ls.causal()
    case = case_of((16, 2), (90, 90), (128, 128), mask)
    check(case, kernel="hopper")
    q, k, v = (case.tensors[n].detach() for n in "qkv")
    opposite = ls.attention(-q, k, v, mask=mask, scale=-(128**-0.5), kernel="hopper")
    torch.testing.assert_close(opposite, ls.attention(q, k, v, mask=mask, kernel="hopper"), rtol=0, atol=0.02)


def test_keys_and_values_of_rows_with_gaps() -> None:
    """Their strides are multiples of 16 bytes, but not of 16 elements."""
    mask = ls.selected(choose((1, 1, 111, 67), 111, 0), 1) & ls.causal()
    case = case_of((64, 1), (111, 111), (128, 128), mask)
    for name in "kv":
        wide = torch.zeros(1, 1, 111, 136, device="cuda", dtype=torch.bfloat16)
        wide[..., :128] = case.tensors[name].detach()
        case.tensors[name] = wide[..., :128].requires_grad_()
    check(case, kernel="hopper")


def test_192_heads_of_three_kv_heads_of_64_dims() -> None:
    mask = ls.selected(choose((1, 1, 77, 65), 77, 0), 1) & ls.causal()
    check(case_of((192, 3), (77, 77), (64, 64), mask), kernel="hopper")


def test_rows_of_16_queries_of_8_heads() -> None:
    mask = ls.selected(choose((1, 2, 19, 110), 299, 0), 1, 16) & ls.causal() & ls.documents([90, 209])
    check(case_of((16, 2), (299, 299), (128, 128), mask, batch=2), kernel="hopper")


def test_non_finite_keys_that_no_query_sees_change_no_bit() -> None:
    mask = ls.selected(choose((1, 1, 100, 64), 100, 3).clamp(max=98), 1) & ls.causal()
    case = case_of((64, 1), (100, 100), (128, 128), mask)
    q, k, v = (case.tensors[n] for n in "qkv")

    def results() -> list[torch.Tensor]:
        out = ls.attention(q, k, v, mask=mask, kernel="hopper")
        return [out.detach(), torch.autograd.grad(out, q, case.grad_out)[0]]

    before = results()
    with torch.no_grad():
        k[:, :, 99], v[:, :, 99] = torch.nan, torch.inf
    assert all(torch.equal(a, b) for a, b in zip(before, results(), strict=True))


def test_a_graph_sees_new_indices() -> None:
    indices = choose((1, 1, 333, 64), 333, 0)
    case = case_of((64, 1), (333, 333), (128, 128), None)
    q, k, v = (case.tensors[n].detach() for n in "qkv")

    def call() -> torch.Tensor:
        return ls.attention(q, k, v, mask=ls.selected(indices, 1) & ls.causal(), kernel="hopper")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in (1, 2):
        indices.copy_(choose((1, 1, 333, 64), 333, seed))
        graph.replay()
        assert torch.equal(out, call())
