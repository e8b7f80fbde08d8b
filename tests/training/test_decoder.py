"""The decoder against the same network written out in float64, its loss, its FLOPs and its limits."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import longspan as ls
from longspan._training import decoder
from longspan._training.decoder import Decoder, DecoderConfig, flops_per_token

SMALL = DecoderConfig(vocab=11, width=12, layers=2, heads=6, kv_heads=3, head_dim=4, hidden=14, rope_base=100.0)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor, position: int, base: float) -> Tensor:
    """x [..., D] as D/2 complex numbers, whose parts are the halves, turned by position · base^(−2i / D)."""
    half = x.shape[-1] // 2
    turn = torch.tensor([position * base ** (-i / half) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half, dtype=torch.float64), turn)
    return torch.cat([turned.real, turned.imag], -1)


def logits_of(model: Decoder, tokens: list[int], positions: list[int]) -> Tensor:
    """[L, V] for causal attention, head by head and row by row."""
    c = model.config
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    x = w["tokens.weight"][tokens]
    for layer in range(c.layers):
        b = {name.removeprefix(f"blocks.{layer}."): p for name, p in w.items()}
        h = norm(x, b["before_attention.weight"])
        q, k, v = ((h @ b[f"{n}.weight"].T).unflatten(-1, (-1, c.head_dim)) for n in "qkv")  # [L, heads, D]
        q, k = (torch.stack([rotated(row, p, c.rope_base) for row, p in zip(t, positions)]) for t in (q, k))
        rows = []
        for i in range(len(tokens)):
            heads = []
            for head in range(c.heads):
                kv = head // (c.heads // c.kv_heads)
                weights = (k[: i + 1, kv] @ q[i, head] / math.sqrt(c.head_dim)).softmax(0)
                heads.append(weights @ v[: i + 1, kv])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ b["o.weight"].T
        h = norm(x, b["before_mlp.weight"])
        gate = h @ b["gate.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ b["up.weight"].T)) @ b["down.weight"].T
    return norm(x, w["last.weight"]) @ w["head.weight"].T


def model_and_inputs() -> tuple[Decoder, Tensor, Tensor]:
    model = Decoder(SMALL).initialise(5)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.linspace(8, 12, p.numel()).view(p.shape) if p.ndim > 1 else torch.linspace(0.5, 1.5, p.numel()))
    return model, torch.tensor([[3, 10, 0, 7, 7, 1, 5]]), torch.tensor([[0, 1, 2, 3, 9, 10, 31]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_equal_the_network_written_out(dtype: torch.dtype) -> None:
    model, tokens, positions = model_and_inputs()
    plan = ls.plan(ls.causal(), 7, ls.Mesh.abstract(1))
    want = logits_of(model, tokens[0].tolist(), positions[0].tolist())
    got = model.to(dtype)(tokens, positions, plan=plan)
    assert got.dtype == dtype and got.shape == (1, 7, 11)
    torch.testing.assert_close(got[0].double(), want, rtol=0, atol=2e-5)  # angles are in float32


def test_the_norm_adds_its_epsilon_and_keeps_the_dtype() -> None:
    x = torch.tensor([[0.001, -0.002, 0.003]])
    norm, y = decoder.Norm(64), torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    torch.nn.init.normal_(norm.weight)
    assert torch.equal(norm(y), torch.nn.functional.rms_norm(y, (64,), norm.weight.bfloat16(), 1e-5))
    torch.testing.assert_close(decoder.Norm(3)(x)[0], x[0] / math.sqrt(14e-6 / 3 + 1e-5))


@pytest.mark.parametrize(("recompute", "training", "times"), [(True, True, 2), (True, False, 0), (False, True, 0)])
def test_blocks_are_recomputed_in_training_only(recompute: bool, training: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def checkpoint(fn: Any, *args: Any, use_reentrant: bool) -> Any:
        calls.append(use_reentrant)
        return fn(*args)

    monkeypatch.setattr(decoder, "checkpoint", checkpoint)
    _, tokens, positions = model_and_inputs()
    config = DecoderConfig(**{**vars(SMALL), "recompute": recompute})
    plan = ls.plan(ls.causal(), 7, ls.Mesh.abstract(1))
    got = Decoder(config).initialise(1).train(training)(tokens, positions, plan=plan)
    assert calls == [False] * times
    torch.testing.assert_close(got, Decoder(SMALL).initialise(1)(tokens, positions, plan=plan))


def test_a_given_attention_replaces_longspans_and_sees_heads_and_rotated_positions() -> None:
    model, tokens, positions = model_and_inputs()
    seen: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q.shape, k.shape, v.shape))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    got = model(tokens, positions, attend=attend)
    assert seen == [((1, 6, 7, 4), (1, 3, 7, 4), (1, 3, 7, 4))] * 2
    torch.testing.assert_close(got, model(tokens, positions, plan=ls.plan(ls.causal(), 7, ls.Mesh.abstract(1))), rtol=0, atol=1e-5)


def test_with_labels_the_decoder_returns_its_share_of_the_loss() -> None:
    model, tokens, positions = model_and_inputs()
    plan = ls.plan(ls.causal(), 7, ls.Mesh.abstract(1))
    labels = torch.tensor([[1, 2, -100, 4, 10, -100, 0]])
    total = cross_entropy(model(tokens, positions, plan=plan)[0], labels[0], ignore_index=-100, reduction="sum")
    for options, factor in (({}, 1.0), ({"count": 5}, 0.2), ({"count": torch.tensor(10), "averaged": 3}, 0.3)):
        torch.testing.assert_close(model(tokens, positions, plan=plan, labels=labels, **options), total * factor)


def test_weights_are_drawn_from_the_seed_and_norms_are_ones() -> None:
    one, two, other = (Decoder(SMALL).initialise(seed) for seed in (5, 5, 6))
    for a, b, c in zip(one.parameters(), two.parameters(), other.parameters()):
        assert torch.equal(a, b) and torch.equal(a, c) == (a.ndim == 1)
        assert a.ndim == 1 or 0.01 < float(a.detach().std()) < 0.03
    first = torch.randn((11, 12), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(one.tokens.weight.detach(), first * 0.02)
    assert all(torch.equal(p, torch.ones(12)) for p in one.parameters() if p.ndim == 1)


def test_flops_are_6_per_weight_and_12_per_head_dim_and_pair() -> None:
    weights = sum(p.numel() for name, p in Decoder(SMALL).named_parameters() if p.ndim > 1 and not name.startswith("tokens"))
    assert flops_per_token(SMALL, 0) == 6 * weights == 6 * (2 * 12 * (48 + 24 + 42) + 132)
    assert flops_per_token(SMALL, 2.5) - flops_per_token(SMALL, 0) == 12 * 2 * 6 * 4 * 2.5


def test_angles_are_computed_in_float32_and_rounded_once() -> None:
    cos, sin = decoder.rotary_angles(torch.tensor([[0, 30000], [7, 8]], dtype=torch.int32), SMALL, torch.bfloat16)
    assert cos.shape == sin.shape == (2, 1, 2, 2) and cos.dtype == sin.dtype == torch.bfloat16
    want = torch.tensor([[[0, 0], [30000, 3000]], [[7, 0.7], [8, 0.8]]], dtype=torch.float64)[:, None]
    for got, right in ((cos, want.cos()), (sin, want.sin())):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=4e-3)
    y = torch.randn(1, 2, 3, 6, generator=torch.Generator().manual_seed(1))  # a third of the head dim is not its half
    got = decoder.apply_rotary(y, decoder.rotary_angles(torch.tensor([[0, 5, 2]]), DecoderConfig(head_dim=6), torch.float32))
    for i, position in enumerate((0, 5, 2)):
        torch.testing.assert_close(got[0, :, i].double(), rotated(y[0, :, i].double(), position, 10000.0), rtol=0, atol=1e-5)
    x = torch.randn(2, 3, 2, 4)
    assert decoder.apply_rotary(x.bfloat16(), decoder.rotary_angles(torch.zeros(2, 2), SMALL, torch.float32)).dtype == torch.bfloat16


def test_a_decoder_has_sizes_of_1_or_more_that_divide() -> None:
    assert astuple(DecoderConfig()) == (257, 128, 2, 4, 2, 32, 352, 10000.0, False)
    assert DecoderConfig(heads=3, kv_heads=1, head_dim=2).heads == 3
    for options, message in (
        ({"heads": 4, "kv_heads": 3}, "decoder: heads must be a multiple of kv_heads, got 4 and 3"),
        ({"heads": 2, "kv_heads": 4}, "decoder: heads must be a multiple of kv_heads, got 2 and 4"),
        ({"head_dim": 3}, "decoder: head_dim must be even for rotary positions, got 3"),
        ({"rope_base": 0.5}, "decoder: rope_base must be 1 or more, got 0.5"),
        ({"vocab": 0}, "decoder: vocab must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            DecoderConfig(**options)


def test_a_share_of_the_loss_is_the_sum_without_a_count() -> None:
    model, tokens, positions = model_and_inputs()
    plan, labels = ls.plan(ls.causal(), 7, ls.Mesh.abstract(1)), torch.tensor([[1, 2, -100, 3, 4, 0, -100]])
    logits = model(tokens, positions, plan=plan)
    want = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    torch.testing.assert_close(model(tokens, positions, plan=plan, labels=labels), want)
