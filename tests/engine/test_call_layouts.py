"""Keys of passes and of calls over a mesh: whatever a prepared step or a cached check depends on is part of its key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan._engine import call_agreement, prepared_call
from longspan._engine.call_agreement import _cache_key
from longspan._engine.prepared_call import _backward_key
from longspan._engine.spec import Spec
from longspan._engine.step_calls import backward_layouts, forward_layouts
from longspan._engine.values import BackwardTensors, CallOptions, CallTensors

Q, K, V, OUT = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 16), torch.zeros(2, 4, 6, 16)
LSE, BIAS, SINK = torch.zeros(2, 4, 6), torch.zeros(4, 3), torch.zeros(4)
INPUTS = CallTensors(q=Q, k=K, v=V, score_captured=[BIAS])


def strided(x: Tensor) -> Tensor:
    return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., : x.shape[-1]]


def misaligned(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def wider(x: Tensor) -> Tensor:
    return torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype)


def distinct(keys: dict[str, Any], make: Callable[[], dict[str, Any]]) -> None:
    """Every key differs from all others, and is the same when it is made again."""
    by_key: dict[Any, str] = {}
    for name, key in keys.items():
        assert by_key.setdefault(key, name) == name, f"{name} has the key of {by_key[key]}"
    assert make() == keys


CAPTURED = {
    "strides of a captured tensor": strided(BIAS), "alignment of a captured tensor": misaligned(BIAS),
    "dtype of a captured tensor": BIAS.double(), "shape of a captured tensor": wider(BIAS),
}  # fmt: skip


def test_layouts_of_a_forward_pass() -> None:
    def made() -> dict[str, Any]:
        keys = {"plain": forward_layouts(INPUTS, [BIAS], 0.5), "scale": forward_layouts(INPUTS, [BIAS], 0.25)}
        for name in "qkv":
            for change in (strided, misaligned):
                keys[f"{change.__name__} {name}"] = forward_layouts(replace(INPUTS, **{name: CHANGED[change.__name__, name]}), [BIAS], 0.5)
        keys["sink"] = forward_layouts(replace(INPUTS, sink=SINK), [BIAS], 0.5)
        keys |= {name: forward_layouts(INPUTS, [x], 0.5) for name, x in CAPTURED.items()}
        return keys | {"two": forward_layouts(INPUTS, [BIAS, BIAS], 0.5), "none": forward_layouts(INPUTS, [], 0.5)}

    distinct(made(), made)


CHANGED = {
    (change.__name__, name): change(x)
    for change in (strided, misaligned) for name, x in (("q", Q), ("k", K), ("v", V), ("out", OUT), ("lse", LSE), ("grad_out", OUT))
}  # fmt: skip
TENSORS = BackwardTensors(inputs=INPUTS, out=OUT, lse=LSE, grad_out=OUT, grad_lse=None, needs=(True,))


def test_layouts_of_a_backward_pass() -> None:
    def key(tensors: BackwardTensors = TENSORS, captured: list[Tensor] | None = None, scale: float = 0.5, may_overlap: bool = False) -> Any:
        return backward_layouts(tensors, [BIAS] if captured is None else captured, scale, may_overlap=may_overlap)

    def made() -> dict[str, Any]:
        keys = {f"{c} {n}": key(replace(TENSORS, **{n: x})) for (c, n), x in CHANGED.items() if n in ("out", "lse", "grad_out")}
        keys |= {"plain": key(), "scale": key(scale=0.25), "overlap": key(may_overlap=True), "captured": key(captured=[])}
        keys |= {"dtype": key(replace(TENSORS, grad_out=OUT.double())), "lse": key(replace(TENSORS, grad_lse=LSE))}
        return keys | {
            "needs": key(replace(TENSORS, needs=(False,))),
            "q": key(replace(TENSORS, inputs=replace(INPUTS, q=CHANGED["strided", "q"]))),
        }

    distinct(made(), made)


def test_keys_of_a_prepared_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"q": Q, "k": K, "v": V, "out": OUT, "lse": LSE, "grad_out": OUT, "score_captured": [BIAS], "needs": (True,)}

    def key(**changes: Any) -> Any:
        return _backward_key(**(base | changes))

    def made() -> dict[str, Any]:
        keys = {f"{c} {n}": key(**{n: x}) for (c, n), x in CHANGED.items() if c == "strided"} | {"plain": key()}
        keys |= {name: key(score_captured=[x]) for name, x in CAPTURED.items() if "stride" in name or "alignment" in name}
        keys |= {"misaligned": key(q=CHANGED["misaligned", "q"]), "dtype": key(grad_out=OUT.double()), "needs": key(needs=(False,))}
        keys["none"] = key(score_captured=[])
        monkeypatch.setattr(prepared_call, "_deterministic", lambda: (True, False))
        keys["deterministic"] = key()
        monkeypatch.undo()
        return keys

    distinct(made(), made)
    for name in ("q", "k", "v", "out", "lse", "grad_out"):
        assert key()[0] == 0 and key(**{name: CHANGED["misaligned", name]})[0] == 4


def test_deterministic_settings_are_two() -> None:
    for settings in ((False, False), (True, False), (True, True)):
        torch.use_deterministic_algorithms(settings[0], warn_only=settings[1])
        try:
            assert prepared_call._deterministic() == settings
        finally:
            torch.use_deterministic_algorithms(False)


def test_keys_of_checked_calls_over_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    options = CallOptions(spec=Spec(mask=None, score=None, kernel="auto"), scale=0.5)

    def made() -> dict[str, Any]:
        keys = {f"shape of {n}": _cache_key(options, replace(INPUTS, **{n: wider(x)}), None) for n, x in (("q", Q), ("k", K), ("v", V))}
        changes = {
            "plain": {}, "dtype": {"q": Q.double()}, "device": {"q": Q.to("meta")}, "sink": {"sink": SINK},
            "wide sink": {"sink": SINK.double()}, "long sink": {"sink": torch.zeros(8)}, "none": {"score_captured": []},
            **{name: {"score_captured": [x]} for name, x in CAPTURED.items() if "dtype" in name or "shape" in name},
        }  # fmt: skip
        keys |= {name: _cache_key(options, replace(INPUTS, **change), None) for name, change in changes.items()}
        keys |= {f"needs {n}": _cache_key(options, INPUTS, n) for n in ((), (True,), (False,))}
        others = {"scale": {"scale": 0.25}, "spec": {"spec": Spec(mask=None, score=None, kernel="cpu")}, "max_scores": {"max_scores": True}}
        keys |= {name: _cache_key(replace(options, **change), INPUTS, None) for name, change in others.items()}
        monkeypatch.setattr(call_agreement, "torch_settings", lambda: "other settings")
        keys["settings"] = _cache_key(options, INPUTS, None)
        monkeypatch.undo()
        return keys

    distinct(made(), made)
    assert _cache_key(options, INPUTS, [True]) == _cache_key(options, INPUTS, (True,))
