"""Bad input: an error that says expected, got and what to do, before any kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import longspan as ls
from longspan._engine.checks import is_plain
from longspan._kernels import registry
from longspan.testing import virtual_world


@pytest.fixture(autouse=True)
def _no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*args: Any) -> Any:
        raise AssertionError("bad input reached a kernel")

    monkeypatch.setattr(registry, "kernel_named", reached)


def tensors(**changes: Any) -> dict[str, Any]:
    made = {"q": torch.randn(2, 6, 11, 8), "k": torch.randn(2, 3, 13, 8), "v": torch.randn(2, 3, 13, 5)}
    return {**made, **changes}


BAD_TENSORS = [
    ({"q": [1.0]}, TypeError, "q: expected a tensor, got list"),
    ({"q": torch.randn(6, 11, 8)}, ValueError, r"q: expected 4 dims .* got shape \(6, 11, 8\)"),
    ({"k": torch.randn(2, 3, 13, 7)}, ValueError, "k: expected the head dim of q, 8, got 7"),
    ({"k": torch.randn(2, 4, 13, 8), "v": torch.randn(2, 4, 13, 5)}, ValueError, "KV heads that divides the 6 query heads, got 4"),
    ({"k": torch.randn(1, 3, 13, 8)}, ValueError, "k: expected the batch of q, 2, got 1"),
    ({"v": torch.randn(2, 3, 12, 5)}, ValueError, r"v: expected the heads and tokens of k, \(3, 13\), got \(3, 12\)"),
    ({"v": torch.randn(2, 3, 13, 5, dtype=torch.float64)}, TypeError, "v: expected the dtype of q, torch.float32, got torch.float64"),
    ({"q": torch.ones(2, 6, 11, 8, dtype=torch.int64)}, TypeError, "q: expected one of .* got torch.int64"),
    ({"k": torch.empty(2, 3, 13, 8, device="meta")}, ValueError, "k: expected the device of q, cpu, got meta"),
    ({"q": torch.randn(2, 6, 11, 0), "k": torch.randn(2, 3, 13, 0)}, ValueError, "expected batch, heads and head dims >= 1"),
]


@pytest.mark.parametrize(("changes", "error", "match"), BAD_TENSORS, ids=[m for _, _, m in BAD_TENSORS])
def test_tensors_that_do_not_fit_raise(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ls.attention(**tensors(**changes))


BAD_SETTINGS = [
    ({"kernel": "tritonn"}, ValueError, "kernel: expected one of 'auto', 'dense', 'cpu', 'triton'.*got 'tritonn'"),
    ({"scale": "big"}, TypeError, "scale: expected a number"),
    ({"scale": torch.tensor(2.0)}, TypeError, "a learned scale belongs in a score_mod"),
    ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
    ({"sink": torch.randn(3)}, ValueError, r"sink: expected one logit per query head, shape \[6\], got \(3,\)"),
    ({"sink": 1.0}, TypeError, "sink: expected a floating-point tensor"),
    ({"mask": torch.ones(11, 13, dtype=torch.bool)}, TypeError, "mask: expected a longspan mask.*got Tensor.*attn_mask"),
    ({"mask": "causal"}, TypeError, "mask: expected a longspan mask.*got str"),
    ({"mask": ls.documents(lengths=[5, 7])}, ValueError, "was made for q_len=12, got q_len=11"),
    ({"mask": ls.prefix([1, 2, 3])}, ValueError, "was made for batch=3, got batch=2"),
    ({"mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")}, ValueError, "made for q_len=256"),
    ({"score_mod": 3}, TypeError, "score_mod: expected a callable"),
    ({"score_mod": lambda s, b, h, q, kv: s > 0}, ValueError, "floating-point tensor, got dtype torch.bool"),
    ({"mask": lambda b, h, q, kv: q - kv}, ValueError, "bool tensor, got dtype torch.int64"),
]


@pytest.mark.parametrize(("settings", "error", "match"), BAD_SETTINGS, ids=[m for _, _, m in BAD_SETTINGS])
def test_settings_that_do_not_fit_raise(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ls.attention(**tensors(), **settings)


def test_unsupported_arguments_of_torchs_signatures_raise() -> None:
    q, k, v = (torch.randn(2, 4, 7, 8) for _ in range(3))
    few = k[:, :2], v[:, :2]
    refusals = [
        (lambda: ls.scaled_dot_product_attention(q, k, v, dropout_p=0.1), "dropout_p: expected 0, got 0.1"),
        (lambda: ls.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(7, 7).bool(), is_causal=True), "got both"),
        (
            lambda: ls.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(6, 7).bool()),
            r"broadcasts to \(2, 4, 7, 7\), got \(6, 7\)",
        ),
        (lambda: ls.scaled_dot_product_attention(q, *few), "enable_gqa=True"),
        (lambda: ls.flex_attention(q, *few), "enable_gqa=True"),
        (lambda: ls.scaled_dot_product_attention(q, k[:1].expand(3, -1, -1, -1), v), r"that broadcast, got shapes \(2, 4, 7, 8\), \(3, 4"),
        (
            lambda: ls.scaled_dot_product_attention(q, k[:, :3], v, enable_gqa=True),
            "heads that divides the 4 of query, got 3",
        ),
        (
            lambda: ls.scaled_dot_product_attention(q[0, 0], k, v, enable_gqa=True),
            r"query: expected \[..., heads, tokens.*got shape \(7, 8\)",
        ),
        (lambda: ls.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(7, 9)), "for 7 × 7 tokens, got 7 × 9"),
        (lambda: ls.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(7, 7), is_causal=True), "got both"),
        (lambda: ls.flex_attention(q, k, v, kernel_options={"BLOCK_Q": 64}), "kernel_options: expected a name of .*got 'BLOCK_Q'"),
        (lambda: ls.flex_attention(q, k, v, kernel_options={"BACKEND": "CUDNN"}), "BACKEND to be one of AUTO.*got 'CUDNN'"),
        (lambda: ls.flex_attention(q, k, v, return_lse=True, return_aux=torch.nn.attention.flex_attention.AuxRequest()), "got both"),
    ]
    for call, match in refusals:
        with pytest.raises(ValueError, match=match):
            call()


MAPPED = [
    ("q, k and v", lambda x, **kw: ls.attention(x, x, x, **kw)),
    ("with a score_mod", lambda x, **kw: ls.attention(x, x, x, score_mod=lambda s, b, h, i, j: s * 2, **kw)),
    ("a captured tensor", lambda x, **kw: ls.attention(*PLAIN, score_mod=lambda s, b, h, i, j: s * x[0, 0, i, 0], **kw)),
    ("a mask's tensor", lambda x, **kw: ls.attention(*PLAIN, mask=lambda b, h, i, j: x[0, 0, i, 0] > 0, **kw)),
    ("a sink", lambda x, **kw: ls.attention(*PLAIN, sink=x[0, :, 0, 0], **kw)),
]
PLAIN = tuple(torch.randn(1, 2, 5, 8) for _ in range(3))


@pytest.mark.parametrize("kernel", ["auto", "cpu", "triton", "aten"])
@pytest.mark.parametrize("call", [call for _, call in MAPPED], ids=[name for name, _ in MAPPED])
def test_vmap_is_supported_by_the_dense_kernel_only(call: Any, kernel: str) -> None:
    x = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(RuntimeError, match=r"not supported under torch\.vmap.*kernel='dense'.*flatten the mapped dim into the batch"):
        torch.vmap(lambda x: call(x, kernel=kernel))(x)


CAPTURED = r"a mod captures a tensor that is mapped or differentiated\. Only q, k, v and sink may be; loop over"


@pytest.mark.parametrize(("what", "call"), MAPPED, ids=[name for name, _ in MAPPED])
def test_the_dense_kernel_supports_vmap_unless_a_mod_captures_a_mapped_tensor(what: str, call: Any) -> None:
    x = torch.randn(3, 1, 2, 5, 8)
    for _ in range(2):  # a new trace, then the cached one
        if what in ("a captured tensor", "a mask's tensor"):
            with pytest.raises(RuntimeError, match=CAPTURED):
                torch.vmap(lambda x: call(x, kernel="dense"))(x)
            call(x[0], kernel="dense")
        else:
            got = torch.vmap(lambda x: call(x, kernel="dense"))(x)
            torch.testing.assert_close(got, torch.stack([call(row, kernel="dense") for row in x]))


def test_torch_func_gradients_of_captured_tensors_raise() -> None:
    x, bias = torch.randn(1, 2, 5, 8), torch.randn(2)
    loss = lambda bias: ls.attention(x, x, x, score_mod=lambda s, b, h, i, j: s * bias[h], kernel="dense").sin().sum()
    for _ in range(2):
        for transform in (torch.func.grad(loss), lambda t: torch.func.jvp(loss, (t,), (t,))):
            with pytest.raises(RuntimeError, match=CAPTURED):
                transform(bias)
        loss(bias)


def test_the_dense_kernel_under_transforms_supports_mods_with_plain_captured_tensors() -> None:
    bias, x = torch.randn(2), torch.randn(3, 1, 2, 5, 8)
    mask = lambda b, h, i, j: i + bias[h] >= j
    call = lambda x, n: ls.attention(x, x, x, kernel="dense", mask=mask, score_mod=lambda s, b, h, i, j: s * bias.exp()[h] * n)
    torch.testing.assert_close(torch.vmap(lambda x: call(x, 2))(x), torch.stack([call(row, 2) for row in x]))
    leaf = x[0].clone().requires_grad_()
    got = torch.func.grad(lambda x: call(x, 3).sin().sum())(x[0])
    torch.testing.assert_close(got, torch.autograd.grad(call(leaf, 3).sin().sum(), leaf)[0])


@pytest.mark.parametrize("kernel", ["auto", "dense"])
def test_vmap_over_a_mesh_raises(kernel: str) -> None:
    def rank(mesh: Any) -> None:
        plan = ls.plan(ls.causal(), 10, mesh)
        with pytest.raises(RuntimeError, match=r"not supported under torch\.vmap.*with a plan no kernel"):
            torch.vmap(lambda x: ls.attention(x, x, x, plan=plan, kernel=kernel))(torch.randn(3, 1, 2, 5, 8))

    virtual_world(2).run(rank)


class Subclass(torch.Tensor):
    pass


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_plain_tensors_are_of_no_subclass_and_nothing_intercepts_their_operations() -> None:
    t, leftover = torch.zeros(3), []
    torch.vmap(lambda x: (leftover.append(x), x.clone())[1])(torch.zeros(2, 3))
    assert is_plain([]) and is_plain([t, torch.nn.Parameter(t)])
    assert not is_plain([t, t.as_subclass(Subclass)]) and not is_plain([*leftover, t]) and not is_plain([t, *leftover])
    with Seen():
        assert not is_plain([t]) and not is_plain([])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_torchs_signature_of_flex_attention_names_what_is_no_tensor_of_four_dims(name: str) -> None:
    given = dict(zip(("query", "key", "value"), tensors().values(), strict=True))
    with pytest.raises(TypeError, match=f"{name[0]}: expected a tensor, got list"):
        ls.flex_attention(**given | {name: [1.0]}, enable_gqa=True)
    with pytest.raises(ValueError, match=f"{name[0]}: expected 4 dims"):
        ls.flex_attention(**given | {name: given[name][0]}, enable_gqa=True)
