"""Liger's fused loss: used where it is installed and faster, refused where it cannot compute a call. A stub stands in for Liger."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from longspan.integrations import _liger, memory
from longspan.integrations.loss import linear_token_loss

TOKENS, DIM, VOCAB = 40, 8, 13


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of a stub of Liger, on CPUs, for any number of tokens."""
    made: list[dict[str, Any]] = []

    def fused(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        made.append(options)
        return cross_entropy(hidden @ weight.T, targets, ignore_index=options["ignore_index"], reduction=options["reduction"])

    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["liger_kernel.transformers.functional"].liger_fused_linear_cross_entropy = fused  # type: ignore[attr-defined]
    monkeypatch.setattr(_liger, "DEVICES", ("cpu",))
    monkeypatch.setattr(_liger, "MIN_TOKENS", 1)
    _liger._measured.cache_clear()
    return made


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((2, TOKENS // 2, DIM), (VOCAB, DIM)))
    labels = torch.randint(VOCAB, (2, TOKENS // 2), generator=generator)
    labels[0, :5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def set_times(monkeypatch: pytest.MonkeyPatch, *, liger: float, tiled: float) -> list[str]:
    measured: list[str] = []

    def seconds(loss: Any, *tensors: Tensor) -> float:
        measured.append("liger" if loss.func is _liger.liger_sum else "tiled")
        return liger if measured[-1] == "liger" else tiled

    monkeypatch.setattr(_liger, "seconds", seconds)
    return measured


@pytest.mark.parametrize(("liger", "tiled", "used"), [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, False)])
def test_the_faster_one_computes_the_loss(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, liger: float, tiled: float, used: bool
) -> None:
    measured = set_times(monkeypatch, liger=liger, tiled=tiled)
    hidden, weight, labels = inputs()
    want = torch.autograd.grad(linear_token_loss(hidden, weight, labels, count=70, averaged=2, kernel="tiled"), (hidden, weight))
    assert not calls
    for _ in range(3):
        loss = linear_token_loss(hidden, weight, labels, count=70, averaged=2)
        torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), want)
    assert measured == ["liger", "tiled"]  # once for these sizes
    assert len(calls) == (3 if used else 0)
    if used:
        assert calls[0] == {"ignore_index": -100, "reduction": "sum", "accum_dtype": torch.float32}
    linear_token_loss(hidden[..., :4], weight[:, :4], labels, count=70)
    assert len(measured) == 4  # other sizes
    linear_token_loss(hidden[0], weight, labels[0], count=70)
    assert len(measured) == 6  # fewer tokens


def test_a_measurement_runs_both(calls: list[Any]) -> None:
    hidden, weight, labels = inputs()
    before = torch.get_rng_state()
    linear_token_loss(hidden, weight, labels, count=70)
    assert len(calls) >= _liger.ROUNDS + 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_backward_pass_raises(calls: list[Any]) -> None:
    hidden, weight, labels = inputs()
    loss = linear_token_loss(hidden, weight, labels, count=70, kernel="liger")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="supports one backward pass"):
        loss.backward()


def test_calls_that_liger_cannot_compute_are_tiled_or_raise(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, liger=1.0, tiled=2.0)

    def refused(message: str, *tensors: Tensor, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            linear_token_loss(*tensors, count=70, kernel="liger", **options)
        linear_token_loss(*tensors, count=70, **options)
        assert not calls

    refused("of one dtype up to float32", *inputs(torch.float64))
    refused("exceed chunk=7", *inputs(), chunk=7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused("no autocast", *inputs())
    torch.use_deterministic_algorithms(True)
    try:
        refused("nor deterministic algorithms", *inputs())
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(_liger, "DEVICES", ("cuda",))
    refused("expected tensors on cuda, got cpu", *inputs())
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(_liger.importlib.util, "find_spec", lambda name: None)
    refused("pip install liger-kernel", *inputs())
    with pytest.raises(ValueError, match="expected kernel 'auto', 'liger' or 'tiled', got 'fast'"):
        linear_token_loss(*inputs(), count=70, kernel="fast")  # type: ignore[arg-type]


def test_long_context_names_its_kernel(calls: list[Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    ids = torch.randint(61, (1, 30))
    losses = []
    for kernel in ("tiled", "liger"):
        torch.manual_seed(0)
        model = memory.long_context(transformers.LlamaForCausalLM(config).train(), loss_chunk=64, loss_kernel=kernel)
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    assert len(calls) == 1


@pytest.mark.parametrize(("tokens", "sample"), [(1024, 1024), (2047, 1024), (8192, 8192), (100000, 32768)])
def test_measurements_have_about_as_many_tokens_as_calls(tokens: int, sample: int) -> None:
    assert _liger.sample_tokens(tokens) == sample


@pytest.mark.parametrize(
    ("tokens", "dim", "vocabulary", "chunk"), [(16384, 4096, 32000, 2048), (5, 4096, 32000, 1), (9, 4, 64, 1), (100, 64, 32, 100)]
)
def test_the_chunk_of_liger_is_known(tokens: int, dim: int, vocabulary: int, chunk: int) -> None:
    assert _liger.liger_chunk(tokens, dim, vocabulary) == chunk


def test_the_chunk_of_a_call_is_of_its_tokens_and_dims(calls: list[Any]) -> None:
    hidden, weight = torch.empty(1000, 8), torch.empty(24, 8)
    assert _liger.unsupported(hidden, weight, 512) == ""
    assert _liger.unsupported(hidden, weight, 511) == "its logits of 512 tokens at a time exceed chunk=511"
    assert "of one dtype" in _liger.unsupported(hidden, weight.bfloat16(), 512)


def test_a_measurement_is_of_the_device_tokens_dims_and_dtype_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    monkeypatch.setattr(_liger, "_measured", lambda key, calls: keys.append(key) or True)
    least = _liger.MIN_TOKENS
    hidden, weight = torch.empty(least, 5, device="meta", dtype=torch.bfloat16), torch.empty(7, 5)
    assert _liger.is_faster(None, None, hidden, weight)  # type: ignore[arg-type]
    assert keys == [(torch.device("meta"), _liger.sample_tokens(least), 5, 7, torch.bfloat16)]
    fewer = torch.empty(least - 1, 2 * least, device="meta")
    assert not _liger.is_faster(None, None, fewer, weight) and len(keys) == 1  # type: ignore[arg-type]
    assert [_liger.sample_tokens(n) for n in (1024, 1025, 2047, 2048)] == [1024, 1024, 1024, 2048]
    assert _liger.sample_tokens(8 * _liger.LONGEST_SAMPLE) == _liger.LONGEST_SAMPLE
