"""The exact loss, Liger's limits and the choice of tokens, by small cases."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.other_device import OTHER, OtherDevice
from torch import Tensor, nn

from longspan.integrations import _liger, loss, memory
from longspan.integrations.loss import linear_token_loss, shift_labels, token_count, token_loss

HIDDEN = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([[1, 2, -100, 3, 4, 0, -100], [0, 0, 1, -7, 2, 3, 4]])


def losses(ignored: int) -> Tensor:
    """The sum of −log p of the labels that count, in float64."""
    log_probs = (HIDDEN.double() @ WEIGHT.double().T).log_softmax(-1)
    return -sum(log_probs[b, s, LABELS[b, s]] for b in range(2) for s in range(7) if LABELS[b, s] not in (ignored, -7, -100))  # type: ignore[return-value]


def test_labels_are_shifted_and_counted() -> None:
    assert shift_labels(LABELS).tolist() == [[2, -100, 3, 4, 0, -100, -100], [0, 1, -7, 2, 3, 4, -100]]
    assert shift_labels(LABELS[0], ignore_index=-7).tolist() == [2, -100, 3, 4, 0, -100, -7] and shift_labels(LABELS).is_contiguous()
    assert (int(token_count(LABELS)), int(token_count(LABELS, ignore_index=0)), loss.IGNORED) == (12, 11, -100)


@pytest.mark.parametrize("averaged", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 4, 2.5, torch.tensor(6)])
def test_a_share_is_the_sum_over_the_count(averaged: int, count: Any) -> None:
    labels = LABELS.masked_fill(LABELS == -7, -100)
    want = float(losses(-100)) * averaged / max(1.0, float(count))
    logits = HIDDEN @ WEIGHT.T
    assert float(token_loss(logits, labels, count=count, averaged=averaged)) == pytest.approx(want, rel=1e-5)
    for chunk in (1, 4, 14, 99):
        got = linear_token_loss(HIDDEN, WEIGHT, labels, count=count, averaged=averaged, chunk=chunk)
        assert float(got) == pytest.approx(want, rel=1e-5)


def test_another_label_may_be_ignored() -> None:
    labels, logits = LABELS.clamp(min=0), HIDDEN @ WEIGHT.T
    log_probs = (HIDDEN.double() @ WEIGHT.double().T).log_softmax(-1)
    want = -float(sum(log_probs[b, s, labels[b, s]] for b in range(2) for s in range(7) if labels[b, s] != 2))
    assert float(token_loss(logits, labels, count=1, ignore_index=2)) == pytest.approx(want, rel=1e-5)
    assert float(linear_token_loss(HIDDEN, WEIGHT, labels, count=1, ignore_index=2, chunk=3)) == pytest.approx(want, rel=1e-5)


def test_the_tiled_loss_has_few_logits_in_memory_and_random_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    linear = loss.linear
    monkeypatch.setattr(loss, "linear", lambda h, w: sizes.append(len(h)) or linear(h, w))
    hidden = HIDDEN.clone().requires_grad_()
    got = linear_token_loss(hidden, WEIGHT, LABELS.clamp(min=0), count=1, chunk=4)
    assert sizes == [4, 4, 4, 2]
    got.backward()
    assert sizes == [4, 4, 4, 2, 2, 4, 4, 4]
    want = torch.autograd.grad(token_loss(hidden @ WEIGHT.T, LABELS.clamp(min=0), count=1), hidden)[0]
    torch.testing.assert_close(hidden.grad, want)


def test_wrong_kernels_and_labels_raise() -> None:
    with pytest.raises(ValueError, match="expected kernel 'auto', 'liger' or 'tiled', got 'fast'"):
        linear_token_loss(HIDDEN, WEIGHT, LABELS, count=1, kernel="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a label for each of 14 tokens, got 7 labels"):
        linear_token_loss(HIDDEN, WEIGHT, LABELS[0], count=1)


@pytest.mark.parametrize(
    ("kernel", "reason", "faster", "by_liger"),
    [
        ("tiled", "", True, False),
        ("auto", "", True, True),
        ("auto", "", False, False),
        ("auto", "no", True, False),
        ("liger", "", False, True),
        ("liger", "no", True, None),
    ],
)
def test_the_kernel_of_a_call(kernel: Any, reason: str, faster: bool, by_liger: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake = lambda name: lambda tokens, weight, targets, **options: calls.append(name) or tokens.sum()
    monkeypatch.setattr(_liger, "unsupported", lambda tokens, weight, chunk: reason)
    monkeypatch.setattr(_liger, "is_faster", lambda liger, tiled, tokens, weight: faster)
    monkeypatch.setattr(_liger, "liger_sum", fake("liger"))
    monkeypatch.setattr(loss, "_tiled_sum", fake("tiled"))
    if by_liger is None:
        with pytest.raises(ValueError, match=r"Liger's kernel cannot compute this call: no. Give kernel='tiled'"):
            linear_token_loss(HIDDEN, WEIGHT, LABELS, count=1, kernel=kernel)
        return
    linear_token_loss(HIDDEN, WEIGHT, LABELS, count=1, kernel=kernel)
    assert calls == ["liger" if by_liger else "tiled"]


# ---------------------------------------------------------------------------------------------------------------------------- Liger


class OwnTensor(Tensor): ...


def test_calls_that_liger_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    h, w = torch.zeros(64, 8), nn.Parameter(torch.zeros(32, 8))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _liger.unsupported(h, w, 99) == "liger_kernel is not installed: pip install liger-kernel"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    assert "expected tensors on cuda, got cpu" in _liger.unsupported(h, w, 99)
    monkeypatch.setattr(_liger, "DEVICES", ("cpu",))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert _liger.unsupported(h.to(dtype), w.detach().to(dtype), 16) == ""
    assert _liger.liger_chunk(64, 8, 32) == 16 and "its logits of 16 tokens at a time exceed chunk=15" in _liger.unsupported(h, w, 15)
    for hidden, weight, reason in (
        (h.double(), w.double(), "one dtype up to float32"),
        (h, w.bfloat16(), "got torch.float32 and torch.bfloat16"),
        (h.as_subclass(OwnTensor), w, "expected plain tensors, got OwnTensor and Parameter"),
        (h, w.detach().as_subclass(OwnTensor), "got Tensor and OwnTensor"),
    ):
        assert reason in _liger.unsupported(hidden, weight, 99)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "no autocast" in _liger.unsupported(h, w, 99)
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic algorithms" in _liger.unsupported(h, w, 99)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("tokens", "dim", "vocabulary", "chunk"),
    [(64, 8, 32, 16), (64, 8, 33, 16), (65, 8, 32, 32), (5, 8, 8, 5), (1, 8, 64, 1), (100, 8, 64, 16), (128, 8, 64, 16), (129, 8, 64, 32)],
)
def test_tokens_of_ligers_chunks(tokens: int, dim: int, vocabulary: int, chunk: int) -> None:
    """The next power of two of tokens / ceil(V / D), at most all tokens."""
    assert _liger.liger_chunk(tokens, dim, vocabulary) == chunk


def test_samples_are_powers_of_two_and_short_calls_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [_liger.sample_tokens(n) for n in (1, 2, 3, 1023, 1024, 32767, 32768, 70000)] == [1, 2, 2, 512, 1024, 16384, 32768, 32768]
    keys: list[Any] = []
    monkeypatch.setattr(_liger, "_measured", lambda key, calls: keys.append((key, calls.liger, calls.tiled)) or True)
    assert not _liger.is_faster(max, min, torch.zeros(1023, 3), torch.zeros(5, 3)) and keys == []  # type: ignore[arg-type]
    assert _liger.is_faster(max, min, torch.zeros(1025, 3), torch.zeros(5, 3))  # type: ignore[arg-type]
    assert keys == [((torch.device("cpu"), 1024, 3, 5, torch.float32), max, min)]
    assert _liger._Calls(max, min) == _liger._Calls(min, max) and _liger._Calls(max, min) != 3 and _liger.ROUNDS == 2  # type: ignore[arg-type]
    assert hash(_liger._Calls(max, min)) == hash(_liger._Calls(min, max))  # type: ignore[arg-type]


def test_the_time_of_a_loss_is_the_least_after_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 10.0, 15.0, 20.0, 23.0])
    monkeypatch.setattr(_liger.time, "perf_counter", lambda: next(now))
    hidden, weight = torch.ones(2, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    assert _liger.seconds(lambda h, w, t: (h @ w.T).sum(), hidden, weight, torch.zeros(2)) == 3.0


# ----------------------------------------------------------------------------------------------------------------------- generation


def test_options_of_generation() -> None:
    pytest.importorskip("transformers")
    from longspan.integrations.generation import GenerateOptions, GenerateRates

    made = GenerateOptions()
    assert (made.new_tokens, made.chunk, made.temperature, made.seed, made.page_size, made.stop) == (64, 4096, 0.0, 0, 64, frozenset())
    GenerateOptions(new_tokens=1, chunk=1, page_size=1, temperature=0.5)
    for name in ("new_tokens", "chunk", "page_size"):
        with pytest.raises(ValueError, match=f"expected {name} of 1 or more, got 0"):
            GenerateOptions(**{name: 0})
    for temperature in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="expected a temperature of 0 or more"):
            GenerateOptions(temperature=temperature)
    assert str(GenerateRates(30, 2.0, 5, 0.4)) == "prefill 30 tokens in 2.00 s (15 tokens/s), decode 5 tokens in 0.40 s (12.5 tokens/s)"


@pytest.mark.parametrize(("chunk", "prefilled"), [(4, [4, 8, 11]), (11, [11]), (99, [11])])
def test_generated_tokens_are_those_of_whole_forwards(chunk: int, prefilled: list[int]) -> None:
    pytest.importorskip("transformers")
    from longspan.integrations.generation import GenerateOptions, generate, tiny_model

    model, prompt = tiny_model(torch.device("cpu"), seed=3), torch.arange(11)[None] + 40
    assert (len(model.model.layers), model.config.num_key_value_heads) == (2, 2)
    assert not model.training and {p.device.type for p in tiny_model(torch.device("meta")).parameters()} == {"meta"}
    ids, want = prompt, []
    for _ in range(5):
        with torch.no_grad():
            want.append(int(model(ids, use_cache=False).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([want[-1:]])], 1)
    done, tokens = [], []
    options = GenerateOptions(new_tokens=5, chunk=chunk, page_size=4)
    rates = generate(model, prompt, options, prefilled=done.append, decoded=tokens.append)
    assert (tokens, done, rates.prefill_tokens, rates.decoded_tokens) == (want, prefilled, 11, 4)
    assert rates.prefill_seconds > 0 and rates.decode_seconds > 0
    stopped: list[int] = []
    stop = GenerateOptions(new_tokens=5, stop=frozenset(want[1:2]))
    assert generate(model, prompt, stop, decoded=stopped.append).decoded_tokens == len(stopped) - 1
    assert stopped == want[: want.index(want[1]) + 1]
    for wrong in (prompt[0], prompt.expand(2, -1), prompt[:, :0]):
        with pytest.raises(ValueError, match=r"expected a prompt \[1, S\] of 1 or more tokens"):
            generate(model, wrong, options)


def test_choice_of_a_token() -> None:
    pytest.importorskip("transformers")
    from longspan.integrations.generation import ByteTokenizer, _chosen, stop_tokens

    logits = torch.tensor([0.0, 3.0, 1.0, 2.9])
    assert _chosen(logits, 0.0, torch.Generator(), None) == 1
    drawn = [_chosen(logits, 2.0, torch.Generator().manual_seed(seed), None) for seed in range(40)]
    want = [int(torch.multinomial((logits.double() / 2).softmax(-1), 1, generator=torch.Generator().manual_seed(s))) for s in range(40)]
    assert drawn == want and len(set(drawn)) > 2
    small = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float16)
    assert _chosen(small, 1e-5, torch.Generator(), None) == 2  # 1 / 1e-5 is infinite in float16
    text = ByteTokenizer()
    assert text.encode("aé") == [97, 195, 169] and text.decode([31, 32, 97, 126, 127, 195]) == "· a~··"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[3, 4]))
    assert stop_tokens(model, SimpleNamespace(eos_token_id=5)) == {3, 4, 5} and stop_tokens(object(), text) == frozenset()


def test_ranks_take_the_token_that_rank_0_chose_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from longspan.integrations import generation

    devices: list[torch.device] = []
    monkeypatch.setattr(
        generation, "all_gather_rows", lambda mesh, x, counts, what: devices.append(x.device) or torch.arange(7, 7 + sum(counts))
    )
    mesh: Any = SimpleNamespace(size=3)
    with OtherDevice():
        logits = torch.tensor([0.0, 3.0, 1.0]).to(OTHER)
        assert generation._chosen(logits, 0.0, torch.Generator(), None) == 1
        assert generation._chosen(logits, 0.0, torch.Generator(), mesh) == 7 and devices == [OTHER]


def test_a_checkpoint_is_loaded_from_its_folder_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from longspan.integrations import generation

    loads: list[Any] = []
    tokenizer = object()
    monkeypatch.setattr(
        generation.AutoModelForCausalLM, "from_pretrained", lambda *args, **options: loads.append((args, options)) or nn.Linear(2, 3)
    )
    monkeypatch.setattr(generation.AutoTokenizer, "from_pretrained", lambda *args, **options: loads.append((args, options)) or tokenizer)
    model, text = generation.load_checkpoint(Path("folder"), torch.device("meta"))
    assert text is tokenizer and not model.training and model.weight.device.type == "meta"
    local = {"local_files_only": True, "trust_remote_code": False}
    assert loads == [((Path("folder"),), {"attn_implementation": "longspan", "dtype": "auto", **local}), ((Path("folder"),), local)]


def test_tokens_whose_logits_are_in_memory_are_as_many_in_all_losses() -> None:
    functions: Any = ((linear_token_loss, "chunk"), (memory.causal_lm_loss, "chunk"), (memory.long_context, "loss_chunk"))
    assert {inspect.signature(function).parameters[name].default for function, name in functions} == {4096}


def test_tokens_are_along_the_dim_before_the_last_one_by_default() -> None:
    seen: list[Any] = []
    memory.tiled(lambda part: seen.append(tuple(part.shape)) or part * 2, torch.ones(7, 5, 3, requires_grad=True), chunk=2)
    assert set(seen) == {(7, 2, 3), (7, 1, 3)}
