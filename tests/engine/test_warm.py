"""The call that `longspan.warm` makes on the device of a job: fake tensors take the place of tensors on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan._engine import warm

compilation = pytest.importorskip("longspan._kernels.gpu.compilation")
CAUSAL = ls.causal()


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 5.0 * torch.tanh(s / 5.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """The calls of `attention`, each of which needs three kernels."""
    made: list[tuple[list[Tensor], dict[str, Any]]] = []

    def note(*tensors: Tensor, **options: Any) -> None:
        assert torch.is_grad_enabled() == tensors[0].requires_grad
        made.append((list(tensors), options))
        jobs = compilation.collected_jobs()
        assert jobs is not None
        jobs.extend([lambda: None] * 3)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warm, "attention", note)
    return made


def test_a_call_has_the_sizes_of_the_job(calls: list[Any]) -> None:
    with FakeTensorMode():
        count = ls.warm(
            CAUSAL, (7, 9), heads=6, kv_heads=2, head_dim=16, value_dim=24, batch=5, dtype=torch.float16, score_mod=softcap, sink=True,
            backward=False, kernel="triton",
        )  # fmt: skip
    ((q, k, v), options), sink = calls[0], calls[0][1].pop("sink")
    assert count == 3 and [tuple(t.shape) for t in (q, k, v)] == [(5, 6, 7, 16), (5, 2, 9, 16), (5, 2, 9, 24)]
    assert all(t.device.type == "cuda" and t.dtype == torch.float16 and not t.requires_grad for t in (q, k, v))
    assert options == {"mask": CAUSAL, "score_mod": softcap, "kernel": "triton"}
    assert sink.shape == (6,) and sink.device.type == "cuda"


def test_a_call_has_no_mask_one_batch_row_and_gradients_by_default(calls: list[Any]) -> None:
    with FakeTensorMode():
        assert ls.warm(heads=6, head_dim=16) == 3
    tensors, options = calls[0]
    assert [tuple(t.shape) for t in tensors] == [(1, 6, 4096, 16)] * 3
    assert all(t.dtype == torch.bfloat16 and t.requires_grad for t in tensors)
    assert options == {"mask": None, "score_mod": None, "sink": None, "kernel": "auto"}


def test_an_error_of_a_compile_job_is_raised(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    def fail() -> None:
        raise ValueError("a kernel that does not compile")

    monkeypatch.setattr(warm, "attention", lambda *_, **__: compilation.collected_jobs().append(fail))
    with FakeTensorMode(), pytest.raises(ValueError, match="does not compile"):
        ls.warm(heads=6, head_dim=16)
