"""Which layers of a model used a plan, and which mix tokens without attention: by small modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.small_parts import module
from torch import Tensor, nn

import longspan as ls
from longspan.integrations import _head_mixers, _mixers, _plan_use, prepare_batch
from longspan.integrations._forward import PLAN_KEYWORD, Forward, PlanKeepingCheckpoint, current_forward, in_forward
from longspan.integrations._mixers import _check_others, _check_plans, _MixerCall, check_not_compiled, is_compiled, mixers_of, mixes_tokens
from longspan.integrations._plan_use import (
    _check_loss,
    _fails_on_a_shard,
    _is_causal_attention,
    _is_idle_model,
    _keep_plan_in_checkpoints,
    _layers_without_plan,
    _listed,
    _uses_relative_positions,
    _with_loss,
    guarded_forward,
    recording_loss,
    run_checked,
)

ROWS, LENGTH, DIM = 3, 9, 4


def plans_of(rank: int = 0, ranks: int = 1, rows: int = ROWS, **batch: Any) -> Any:
    batch = {"input_ids": torch.zeros(rows, LENGTH, dtype=torch.int64), **batch}
    return prepare_batch(batch, ls.Mesh.abstract(ranks, rank), layout="contiguous")["longspan_plan"]


# --------------------------------------------------------------------------------------------------------- layers without attention


def test_modules_that_mix_tokens() -> None:
    mixing = [
        nn.Conv1d(2, 2, 3), nn.LSTM(2, 2), nn.GRU(2, 2),
        *(module(**{name: nn.Parameter(torch.zeros(1))}) for name in _mixers._STATE_TENSORS), module({"igate_preact": nn.Linear(2, 2)}),
    ]  # fmt: skip
    buffered = nn.Module()
    buffered.register_buffer("slope_rate", torch.zeros(1))
    assert all(map(mixes_tokens, [*mixing, buffered]))
    assert not any(map(mixes_tokens, [nn.Conv1d(2, 2, 1), nn.Linear(2, 2), module(A_log=3), nn.Conv2d(2, 2, 3)]))


class PreTrained(nn.Module):
    base_model_prefix = "model"


def test_mixers_are_the_outermost_layers_that_mix_tokens() -> None:
    conv = nn.Conv1d(DIM, DIM, 3)
    short, state = module({"conv": conv, "proj": nn.Linear(2, 2)}), module({"inner": module({"conv": nn.Conv1d(2, 2, 3)})})
    state.A_log = nn.Parameter(torch.zeros(1))
    attention = module({"conv": nn.Conv1d(2, 2, 3)}, num_key_value_groups=2)
    layers = nn.ModuleList([module({"mixer": short, "mlp": nn.Linear(2, 2)}), module({"mixer": state}), module({"attention": attention})])
    model = module({"layers": layers}, PreTrained)
    assert mixers_of(model) == [short, state]
    listed = module({"convs": nn.ModuleList([nn.Conv1d(2, 2, 3)])})
    assert mixers_of(listed) == [] and mixers_of(module({"a": listed, "b": short})) == [short]
    inner = module({"conv": nn.Conv1d(2, 2, 3)}, PreTrained)
    assert mixers_of(inner) == []
    assert _mixers.install(model) == _mixers.install(model) == [short, state]
    assert len(short._forward_pre_hooks) == len(short._forward_hooks) == len(state._forward_hooks) == 1
    state.inner.recurrent_states = None
    with pytest.raises(ValueError, match="PreTrained keeps a state between forwards in"):
        _mixers.install(model)


@pytest.mark.parametrize(
    ("rows", "ranks", "rank", "expected"),
    [(5, 2, 0, (0, 2)), (5, 2, 1, (2, 5)), (2, 2, 1, (1, 2)), (1, 2, 1, (0, 1)), (2, 3, 2, (0, 2)), (3, 3, 1, (1, 2))],
)
def test_rows_of_a_batch_are_divided_if_there_are_enough(rows: int, ranks: int, rank: int, expected: tuple[int, int]) -> None:
    call = _MixerCall(module=nn.Linear(2, 2), plan=plans_of(rank, ranks, rows).of(None), batch=rows, real_tokens=None)
    assert (call.rows.start, call.rows.stop) == expected and (call.move is None) == (rows < ranks) and not call.by_heads
    if call.move is not None:
        assert (call.move.after.length, call.move.after.ranks, call.move.after.batch, call.move.dim) == (LENGTH, ranks, rows, 1)


class Convolution(nn.Module):
    """Returns the convolution over tokens of its input, its arguments, and a tensor that is not by token."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, hidden: Tensor, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
        seen.append({"attention_mask": attention_mask, "position_ids": position_ids, **rest})
        return self.conv(hidden.transpose(1, 2)).transpose(1, 2), torch.zeros(2), hidden[:, :2]


seen: list[dict[str, Any]] = []


def test_a_mixer_of_one_rank_gets_its_arguments_and_padding() -> None:
    layer, real = Convolution(), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    real[1, :2] = 0
    _mixers.install(module({"layer": layer}, PreTrained))
    hidden, positions = torch.randn(ROWS, LENGTH, DIM), torch.arange(LENGTH)[None]
    want = layer(hidden)[0]
    for plans, mask in ((plans_of(), None), (plans_of(attention_mask=real), real)):
        forward = Forward(plans)
        seen.clear()
        with in_forward(forward):
            out = layer(hidden, position_ids=positions, longspan_plan=plans, labels=torch.zeros(3), num_items_in_batch=torch.ones(3))
        torch.testing.assert_close(out[0], want)
        assert out[1].shape == (2,) and out[2].shape == (ROWS, 2, DIM) and forward.module_ids == {id(layer)} and forward.mixer is None
        assert set(seen[0]) == {"attention_mask", "position_ids"} and torch.equal(seen[0]["position_ids"], positions.expand(ROWS, -1))
        assert (seen[0]["attention_mask"] is None) if mask is None else (seen[0]["attention_mask"].tolist() == mask.tolist())
        with in_forward(forward):
            for wrong, got in ((hidden[:, 1:], r"shape \(3, 8, 4\)"), (hidden[0], r"shape \(9, 4\)"), (3, "int")):
                with pytest.raises(ValueError, match=f"expected this rank's 9 tokens as the first argument .*, got {got}"):
                    layer(wrong)


def test_plans_and_arguments_that_mixers_do_not_take() -> None:
    layer, plans = Convolution(), plans_of()
    _check_plans(layer, plans)
    with pytest.raises(ValueError, match=r"expected a plan from prepare_batch for .*Convolution, .* got Plan"):
        _check_plans(layer, plans["full"])
    for field in ("states_documents", "documents_from_positions"):
        packed = plans_of()
        setattr(packed, field, True)
        with pytest.raises(ValueError, match="expected one document per row"):
            _check_plans(layer, packed)
    _check_others(layer, {"hidden": torch.zeros(2), "a": 3, "b": torch.tensor(1), "state": None, "c": object()}, ("hidden",))
    for name, value in (("other", torch.zeros(2)), ("cache_params", 3), ("past_key_values", ()), ("state", False)):
        with pytest.raises(ValueError, match=f"got '{name}' for"):
            _check_others(layer, {"hidden": torch.zeros(2), name: value}, ("hidden",))


def test_compiled_mixers_raise() -> None:
    plain, compiled = Convolution(), Convolution()
    compiled.compile()
    wrapped = module(_orig_mod=3)
    assert not is_compiled(plain) and is_compiled(compiled) and is_compiled(wrapped)
    around = module({"layer": plain})
    model = module({"around": around, "other": compiled}, PreTrained)
    check_not_compiled(model, [plain])
    check_not_compiled(model, [])
    inner = Convolution()
    inner.conv.compile()
    around.compile()
    for parts, mixers, name in (
        (model, [plain], "around"), (module({"a": compiled}), [compiled], "a"), (module({"a": inner}), [inner], r"a\.conv")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"longspan: {name} has layers that mix tokens"):
            check_not_compiled(parts, mixers)
    with pytest.raises(ValueError, match="Convolution has layers that mix tokens"):
        _mixers.reject_compiled(plain)
    _mixers.reject_compiled(nn.Linear(2, 2))


# -------------------------------------------------------------------------------------------------------------------- use of a plan


class TinyAttention(nn.Module):
    layer_idx = 0


class TinyCrossAttention(nn.Module):
    layer_idx = 0


def test_layers_that_did_not_use_the_plan_are_named() -> None:
    def layer(**attributes: Any) -> Any:
        return module({"attention": module(kind=TinyAttention, **attributes), "mlp": nn.Linear(2, 2)})

    layers = nn.ModuleList([layer(), layer(), layer(is_causal=False), layer(layer_idx=None), module({"mlp": nn.Linear(2, 2)})])
    tower = module({"layers": nn.ModuleList([layer()])}, PreTrained)
    cross, conv = module(kind=TinyCrossAttention), Convolution()
    model = module({"layers": layers, "tower": tower, "cross": cross, "conv": conv}, PreTrained)
    model.config = SimpleNamespace()
    forward = Forward(None)
    forward.model_ids = {id(model)}
    assert _layers_without_plan(model, forward) == [
        "layers.0.attention",
        "layers.1.attention",
        "layers.2",
        "layers.3",
        "layers.4",
        "conv.conv",
    ]
    forward.module_ids = {id(layers[0].attention)}
    assert _layers_without_plan(model, forward) == ["layers.1.attention", "layers.2", "layers.3", "layers.4", "conv.conv"]
    model.config.layer_types = ["full_attention"] * 4 + ["mlp"]
    assert _layers_without_plan(model, forward) == ["layers.1.attention", "layers.2", "layers.3", "conv.conv"]
    forward.model_ids.add(id(tower))
    forward.ran_ids.add(id(cross))
    assert _layers_without_plan(model, forward) == [
        "layers.1.attention",
        "layers.2",
        "layers.3",
        "tower.layers.0.attention",
        "cross",
        "conv.conv",
    ]
    conv._longspan_mixer = True
    layers[1].attention._longspan_compiled_use = True
    forward.module_ids |= {id(conv), id(layers[2].attention)}
    layers[3].compile()
    assert _layers_without_plan(model, forward) == ["tower.layers.0.attention", "cross"]
    without = module({"layers": nn.ModuleList([module({"a": nn.Linear(2, 2)})])})
    assert _layers_without_plan(without, forward) == []
    assert _is_idle_model(module(kind=PreTrained), forward) and not _is_idle_model(model, forward) and not _is_idle_model(layers, forward)
    assert _is_causal_attention(layers[0].attention) and not _is_causal_attention(layers[2].attention)
    assert not _is_causal_attention(layers[3].attention) and not _is_causal_attention(module(layer_idx=1))


def test_long_lists_of_layers_are_cut() -> None:
    assert _listed(["a"] * 8) == ", ".join("a" * 8) and _listed(list("abcdefghijk")) == "a, b, c, d, e, f, g, h and 3 more"


def test_positions_of_models_without_embeddings_of_positions() -> None:
    tokens = nn.Embedding(5, 4)
    state = module({"conv": nn.Conv1d(2, 2, 3), "table": nn.Embedding(3, 2)})
    plain = module({"tokens": tokens, "mixer": state})
    assert _uses_relative_positions(plain, [state]) and not _uses_relative_positions(plain, [])
    assert not _uses_relative_positions(module({"tokens": tokens, "places": nn.Embedding(7, 4), "mixer": state}), [state])
    assert not _uses_relative_positions(module({"tokens": tokens, "mixer": state, "attention": TinyAttention()}), [state])
    relative = type("Relative", (nn.Module,), {"_longspan_relative_positions": True})
    assert _uses_relative_positions(relative(), [])


def test_losses_of_a_models_own_code_raise() -> None:
    model = nn.Linear(2, 2)

    def check(output: Any, counted: bool = False, **kwargs: Any) -> None:
        forward = Forward(None)
        forward.counted_loss = counted
        _check_loss(model, forward, kwargs, output)

    with_loss, without = SimpleNamespace(loss=3), SimpleNamespace(loss=None)
    check(with_loss)
    check(without, labels=1)
    check(SimpleNamespace(), shift_labels=1)
    check(with_loss, counted=True, labels=1)
    check(with_loss, labels=1, fused_lm_head=True)
    for output, kwargs in ((with_loss, {"labels": 1}), (with_loss, {"shift_labels": 1}), ((1, 2), {"labels": 1})):
        with pytest.raises(ValueError, match="Linear computes its loss by code of its own"):
            check(output, **kwargs)
    compiled = nn.Linear(2, 2)
    compiled.compile()
    _check_loss(compiled, Forward(None), {"labels": 1}, with_loss)


def test_loss_functions_record_calls_with_a_count() -> None:
    get = recording_loss(lambda self: lambda *args, **kwargs: (args, kwargs))
    for kwargs, counted in (
        ({"shift_labels": 1, "num_items_in_batch": 2}, True),
        ({"shift_labels": 1}, False),
        ({"num_items_in_batch": 2}, False),
        ({"shift_labels": None, "num_items_in_batch": 2}, False),
    ):
        forward = Forward(object())
        with in_forward(forward):
            assert get(None)(5, **kwargs) == ((5,), kwargs) and forward.counted_loss is counted
        without = Forward(None)
        with in_forward(without):
            get(None)(5, **kwargs)
        assert not without.counted_loss


class Output(dict):
    """An output as transformers': a mapping with attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__.update(values)


def test_the_loss_of_labels_that_are_not_shifted_is_a_share() -> None:
    logits, labels, forward = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5)), Forward(None)
    labels[0, 0] = -100
    with in_forward(forward):
        out = _with_loss(Output(logits=logits), labels, 4)
    want = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / 4
    torch.testing.assert_close(out["loss"], want)
    assert list(out) == ["loss", "logits"] and forward.counted_loss
    for output, count in (((logits,), 4), (Output(logits=logits), None)):
        with pytest.raises(ValueError, match="expected num_items_in_batch from prepare_batch and return_dict=True"):
            _with_loss(output, labels, count)


def error_of(fn: Any) -> BaseException:
    try:
        fn()
    except BaseException as error:
        return error
    raise AssertionError


def test_errors_that_come_of_a_shard() -> None:
    def fails(kind: type[BaseException] = RuntimeError) -> Any:
        raise kind("shapes")

    model, forward = Output, Forward(None)
    model = type("Model", (nn.Module,), {"__module__": "no_such_module"})()
    assert _fails_on_a_shard(model, forward, error_of(fails))
    assert not _fails_on_a_shard(model, forward, error_of(lambda: fails(torch.OutOfMemoryError)))
    assert not _fails_on_a_shard(model, forward, error_of(lambda: fails(KeyboardInterrupt)))
    assert not _fails_on_a_shard(model, forward, error_of(lambda: _listed(3)))  # type: ignore[arg-type]  # in longspan's code
    for name, value in (("module_ids", {1}), ("has_mixers", True)):
        other = Forward(None)
        setattr(other, name, value)
        assert not _fails_on_a_shard(model, other, error_of(fails))


@pytest.mark.parametrize("name", ["ALL_ATTENTION_FUNCTIONS", "_longspan_adapted"])
def test_errors_of_models_with_transformers_interface_are_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(lambda: {}["x"])
    model = module({"part": TinyAttention()})
    assert _fails_on_a_shard(model, Forward(None), error)
    monkeypatch.setitem(globals(), name, 1)
    assert not _fails_on_a_shard(model, Forward(None), error)


def test_a_forward_method_with_a_plan_is_called_through_the_model() -> None:
    def forward(self: Any, x: int, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        return x, kwargs

    call, model = guarded_forward(forward), nn.Linear(2, 2)
    assert call(model, 3) == (3, {}) and call(model, 3, longspan_plan=None) == (3, {"longspan_plan": None})
    for current in (None, Forward(None)):
        token = current_forward.set(current)
        try:
            with pytest.raises(ValueError, match=r"expected a call of the model, Linear\(\*\*batch\)"):
                call(model, 3, longspan_plan=1)
        finally:
            current_forward.reset(token)
    with in_forward(Forward(1)):
        assert call(model, 3, longspan_plan=1) == (3, {"longspan_plan": 1})


def test_forwards_without_a_plan_know_the_tokens_of_the_outer_one() -> None:
    model, found = nn.Linear(2, 2), []

    def call(*args: Any, **kwargs: Any) -> str:
        forward = current_forward.get()
        assert forward is not None
        found.append((forward.tokens, forward.model_mask))
        if kwargs.get("fails"):
            raise KeyError
        forward.cache_columns["inner"] = 1  # type: ignore[index]
        return "out"

    outer = Forward(None)
    outer.tokens, outer.model_mask = "outer tokens", "outer mask"
    assert run_checked(model, call, ("first",), {}) == run_checked(model, call, ("first",), {"input_ids": "named"}) == "out"
    with in_forward(outer):
        run_checked(model, call, (), {})
        run_checked(model, call, ("own",), {})
    assert found == [("first", None), ("named", None), ("outer tokens", "outer mask"), ("own", "outer mask")]
    assert outer.cache_columns == {"inner": 1} and current_forward.get() is None
    with pytest.raises(KeyError):
        run_checked(model, call, (), {"fails": True})
    plans = plans_of()
    plans.bidirectional = True
    encoder = module({}, type("Encoder", (PreTrained,), {"forward": lambda self, position_ids: 1}), config=None)
    with pytest.raises(ValueError, match="got one for a ForMaskedLM model"):
        run_checked(encoder, call, (), {PLAN_KEYWORD: plans})


def test_checkpoint_functions_are_wrapped_once() -> None:
    inner, model = nn.Linear(2, 2), module()
    model.inner = inner
    inner._gradient_checkpointing_func = max  # type: ignore[assignment]
    for _ in range(2):
        _keep_plan_in_checkpoints(model)
    function: Any = inner._gradient_checkpointing_func
    assert isinstance(function, PlanKeepingCheckpoint) and function.function is max
    assert "_gradient_checkpointing_func" not in vars(model)


# -------------------------------------------------------------------------------------------------------------- gated delta nets


def delta_net(parts: Any = _head_mixers._GROUPED, *, groups: int = 12, norm: int = 3, **attributes: Any) -> Any:
    """A layer with 4 key heads, 6 value heads of 3 dims and 12 channels of its convolution."""
    made = module(num_k_heads=4, num_v_heads=6, head_v_dim=3, key_dim=8, value_dim=18, conv_dim=12, **attributes)
    for name in parts:
        setattr(made, name, nn.Linear(2, 2))
    made.conv1d, made.norm = nn.Conv1d(12, 12, 3, groups=groups), nn.LayerNorm(norm)
    made.A_log, made.dt_bias = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
    return made


def test_gated_delta_nets_are_divided_by_their_key_heads() -> None:
    for parts in (_head_mixers._GROUPED, _head_mixers._SEPARATE):
        assert [_head_mixers.splits_by_heads(delta_net(parts), ranks) for ranks in (1, 2, 3, 4, 8)] == [True, True, False, True, False]
    extra, without, other_conv = delta_net(), delta_net(), delta_net()
    extra.more, other_conv.conv1d = nn.Linear(2, 2), nn.Linear(12, 12)
    del without.key_dim
    weighted = delta_net()
    weighted.scale = nn.Parameter(torch.zeros(1))
    others = delta_net(_head_mixers._COMMON), delta_net(groups=6), delta_net(norm=4), delta_net(conv=nn.Linear(2, 2))
    for layer in (extra, without, other_conv, weighted, *others):
        assert not _head_mixers.splits_by_heads(layer, 1)
    channels = delta_net()
    channels.conv_dim = 13
    assert not _head_mixers.splits_by_heads(channels, 1)


def test_mixers_and_plans_of_other_modules_are_not_touched() -> None:
    compiled = nn.Linear(2, 2)
    compiled.compile()
    assert not _plan_use._any_compiled(nn.Linear(2, 2)) and _plan_use._any_compiled(nn.Sequential(nn.Linear(2, 2), compiled))
    hidden = torch.randn(ROWS, LENGTH, DIM)
    layer = Convolution()
    _mixers.install(module({"layer": layer}, PreTrained))
    assert layer(hidden)[2].shape == (ROWS, 2, DIM)
