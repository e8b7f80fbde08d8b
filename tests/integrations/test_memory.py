"""Long training steps: attention computed once, tensors on the host, tiled MLPs and loss."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.swa_utils import AveragedModel

import longspan as ls
from longspan._engine import ops
from longspan.integrations import memory
from longspan.integrations.loss import linear_token_loss
from longspan.testing import virtual_world

transformers = pytest.importorskip("transformers")
lst = pytest.importorskip("longspan.integrations.transformers")


@pytest.fixture
def forward_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each forward pass of attention."""
    calls: list[int] = []
    run = ops.run_forward

    def counted(*args: Any) -> Any:
        calls.append(1)
        return run(*args)

    monkeypatch.setattr(ops, "run_forward", counted)
    return calls


def qkv(tokens: int = 70) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, tokens, 16), (2, 2, tokens, 16), (2, 2, tokens, 24)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two attention calls between operations that are recomputed."""
    first = ls.attention(q.sin(), k.cos(), v.exp(), mask=ls.causal())
    second, lse = ls.attention(q, k, v.sin(), mask=ls.sliding_window(9), return_lse=True)
    return first.tanh() * second + lse[..., None].sin()


@pytest.mark.parametrize("place", ["device", "host"])
def test_checkpoint_computes_attention_once(forward_calls: list[int], place: memory.Place) -> None:
    tensors = qkv()
    expected = torch.autograd.grad(layer(*tensors).square().sum(), tensors)
    forward_calls.clear()
    out = memory.checkpoint(layer, *tensors, keep=place, inputs=place)
    torch.testing.assert_close(out, layer(*tensors), rtol=0, atol=0)
    forward_calls.clear()
    grads = torch.autograd.grad(out.square().sum(), tensors, retain_graph=True)
    again = torch.autograd.grad(out.square().sum(), tensors)
    assert not forward_calls
    for got, second, want in zip(grads, again, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(second, want, rtol=0, atol=0)


def test_checkpoint_of_a_planned_call_communicates_once() -> None:
    tensors, world = qkv(), virtual_world(3)

    def run(mesh: Any, checkpointed: bool) -> list[Tensor]:
        plan = ls.plan(ls.causal(), 70, mesh, layout="head_tail")
        leaves = [plan.shard(t.detach(), 2).requires_grad_() for t in tensors]

        def planned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ls.attention(q.sin(), k, v, plan=plan).cos()

        out = memory.checkpoint(planned, *leaves) if checkpointed else planned(*leaves)
        return list(torch.autograd.grad(out.sum(), leaves))

    plain, sent = world.run(lambda mesh: run(mesh, False)), world.bytes_sent
    again = world.run(lambda mesh: run(mesh, True))
    assert world.bytes_sent == 2 * sent
    for rank, other in zip(plain, again, strict=True):
        for got, want in zip(other, rank, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("place", ["device", "host"])
def test_results_of_attention_that_were_modified_raise(place: memory.Place) -> None:
    def modifies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ls.attention(q, k, v)
        with torch.no_grad():
            out.mul_(2)
        return out.sin()

    q, k, v = qkv()
    out = memory.checkpoint(modifies, q, k, v, keep=place)
    with pytest.raises(RuntimeError, match=r"modified in place|modified by an inplace"):
        out.sum().backward()


@pytest.mark.parametrize("place", ["device", "host"])
def test_arguments_that_were_modified_raise(place: memory.Place) -> None:
    x = torch.randn(5, requires_grad=True)
    h = x.exp()
    out = memory.checkpoint(lambda t: t.sin() * t, h, inputs=place)
    with torch.no_grad():
        h.mul_(3)
    with pytest.raises(RuntimeError, match=r"modified in place|modified by an inplace"):
        out.sum().backward()


def test_more_attention_calls_in_the_recomputation_raise() -> None:
    calls: list[int] = []

    def changes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        out = ls.attention(q, k, v)
        return out.sin() if len(calls) == 1 else ls.attention(out, k, v).sin()

    q, k, v = qkv()
    out = memory.checkpoint(changes, q, k, v[..., :16])
    with pytest.raises(RuntimeError, match="expected 1 attention calls"):
        out.sum().backward()


@pytest.mark.parametrize("argument", ["keep", "inputs"])
def test_unknown_places_raise(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}='device' or 'host', got 'disk'"):
        memory.checkpoint(layer, *qkv(), **{argument: "disk"})


def test_checkpoint_compiles(forward_calls: list[int]) -> None:
    q, k, v = qkv(20)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ls.attention(q.sin(), k, v).cos()

    compiled = torch.compile(lambda *x: memory.checkpoint(block, *x), backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    for got, want in zip(grads, torch.autograd.grad(block(q, k, v).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 10), (10, 10), (23, 10), (5, 1)])
def test_tiled_equals_whole(tokens: int, chunk: int) -> None:
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 6)).double()
    x = torch.randn(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    expected = mlp(x)
    got = memory.tiled(mlp, x, chunk=chunk)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(got, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True):
        torch.testing.assert_close(a, b)


def tiny(kind: str, **more: Any) -> Any:
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, **more,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(3)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="longspan").double()


def batch_of(tokens: int = 50) -> dict[str, Tensor]:
    torch.manual_seed(4)
    ids = torch.randint(61, (2, tokens))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)}


def gradients(model: Any) -> list[Tensor]:
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return grads


def test_long_context_takes_batches_from_prepare_batch_at_its_first_call() -> None:
    batch, plain = batch_of(), tiny("Llama").train()
    expected = plain(**batch).loss.detach()

    def rank(mesh: Any) -> Tensor:
        model = tiny("Llama").train()
        model.load_state_dict(plain.state_dict())  # threads share a random generator
        memory.long_context(model, loss_chunk=9)
        return model(**lst.prepare_batch(batch, mesh, config=model, gradients="sum")).loss.detach()

    torch.testing.assert_close(torch.stack(virtual_world(2).run(rank)).sum(), expected.double(), rtol=1e-6, atol=0)


def test_mlps_of_two_arguments_are_not_tiled() -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    assert memory.tile_mlps(transformers.BloomForCausalLM(config), 8) == []


def test_mlps_are_tiled_but_not_experts() -> None:
    assert memory.tile_mlps(tiny("Llama"), 8) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    pair = type("TinyMLP", (nn.Sequential,), {})(nn.Linear(3, 5), nn.Linear(5, 3))
    one = type("OneMLP", (nn.Sequential,), {})(nn.Linear(3, 3))
    assert memory.tile_mlps(nn.ModuleDict({"pair": pair, "one": one}), 8) == ["pair"]
    mixture = tiny("Mixtral", num_local_experts=2)
    assert not any("experts" in name or name.endswith("block_sparse_moe") for name in memory.tile_mlps(mixture, 8))


@pytest.mark.parametrize("place", ["device", "host"])
def test_long_context_gives_the_plain_loss_and_gradients(forward_calls: list[int], place: memory.Place) -> None:
    model, batch = tiny("Llama"), batch_of()
    model.train()
    expected = model(**batch).loss
    expected.backward()
    want = gradients(model)
    forward_calls.clear()
    lst.long_context(model, keep=place, inputs=place, mlp_chunk=16, loss_chunk=7)
    output = model(**batch)
    output.loss.backward()
    assert len(forward_calls) == 6  # two layers, and twice two in the trial of the head
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.detach().double(), rtol=1e-6, atol=0)
    for a, b in zip(gradients(model), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    model.eval()
    assert model(**batch).logits.shape == (2, 50, 61)


def test_long_context_over_ranks_takes_whole_batches() -> None:
    batch = batch_of()
    plain = tiny("Qwen3")
    plain.train()
    expected = plain(**batch).loss
    expected.backward()
    want = gradients(plain)

    def rank(mesh: Any) -> tuple[Tensor, list[Tensor]]:
        model = tiny("Qwen3").train()
        model.load_state_dict(plain.state_dict())
        memory.long_context(model, mesh, mlp_chunk=8, loss_chunk=9, gradients="sum")
        loss = model(batch["input_ids"], labels=batch["labels"]).loss  # arguments by position are split, too
        loss.backward()
        return loss.detach(), gradients(model)

    world = virtual_world(3)
    ranks = world.run(rank)
    assert world.bytes_sent > 0
    torch.testing.assert_close(torch.stack([loss for loss, _ in ranks]).sum(), expected.detach().double(), rtol=1e-6, atol=0)
    for i, b in enumerate(want):
        torch.testing.assert_close(torch.stack([grads[i] for _, grads in ranks]).sum(0), b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("copied", [deepcopy, lambda model: AveragedModel(model).module])
@pytest.mark.parametrize("loss_chunk", [9, None])
def test_a_deep_copy_of_a_long_context_model_runs_its_own_weights(copied: Any, loss_chunk: int | None) -> None:
    model, batch, meshes = tiny("Llama").train(), batch_of(), virtual_world(2).run(lambda mesh: mesh)
    signature = inspect.signature(model.forward)
    memory.long_context(model, keep="host", inputs="host", mlp_chunk=16, loss_chunk=loss_chunk)
    want = model(**batch).loss.detach()
    copy = copied(model)
    assert inspect.signature(copy.forward) == signature
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    loss = copy(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(61.0).log().to(loss.dtype))
    assert not gradients(model)
    assert gradients(copy)
    torch.testing.assert_close(model(**batch).loss.detach(), want)
    stores = {id(m._gradient_checkpointing_func.keywords["keep"]) for m in (*model.model.layers, *copy.model.layers)}
    assert len(stores) == 2  # one for each model
    over_ranks = deepcopy(memory.long_context(tiny("Llama"), meshes[0]))
    assert over_ranks.forward.args[2].mesh is meshes[0]


def test_models_that_change_their_logits_compute_their_own_loss_without_a_loss_chunk() -> None:
    model, batch = tiny("Gemma2", final_logit_softcapping=5.0).train(), batch_of()
    expected = model(**batch).loss.detach()
    lst.long_context(model, mlp_chunk=16, loss_chunk=None)
    torch.testing.assert_close(model(**batch).loss.detach(), expected)


def test_models_whose_loss_is_not_that_of_a_linear_layer_raise() -> None:
    for model in (tiny("Gemma2", final_logit_softcapping=5.0), tiny("Granite", logits_scaling=3.0)):
        with pytest.raises(ValueError, match="changes its hidden states or logits"):
            memory.causal_lm_loss(model, batch_of())
        assert model.training == tiny("Llama").training
    mixture = tiny("Mixtral", num_local_experts=2, num_experts_per_tok=1).float()
    memory.causal_lm_loss(mixture, batch_of())
    for change in (lambda: {"output_router_logits": True}, lambda: setattr(mixture.config, "output_router_logits", True) or {}):
        with pytest.raises(ValueError, match="the load-balancing loss is not computed"):
            memory.causal_lm_loss(mixture, {**batch_of(), **change()})
    with pytest.raises(ValueError, match="expected labels"):
        memory.causal_lm_loss(tiny("Llama"), {"input_ids": torch.ones(1, 3, dtype=torch.long)})


@pytest.mark.parametrize("set_before", [True, False])
def test_a_loss_function_of_the_models_own_raises_or_is_honoured_without_a_loss_chunk(set_before: bool) -> None:
    def own_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return logits.square().mean()

    for loss_chunk in (7, None):
        model, batch = tiny("Llama").train(), batch_of()
        if set_before:
            model.loss_function = own_loss
        memory.long_context(model, loss_chunk=loss_chunk)
        if not set_before:
            model(**batch)  # also after a call
            model.loss_function = own_loss
        if loss_chunk is None:
            torch.testing.assert_close(model(**batch).loss, model.eval()(**batch).logits.square().mean())
            continue
        with pytest.raises(ValueError, match=r"expected the loss_function ForCausalLMLoss .*got .*own_loss.* loss_chunk=None"):
            model(**batch)
    model = memory.long_context(tiny("Llama").train())
    model.loss_type = "ForMaskedLM"
    with pytest.raises(ValueError, match="got <function ForMaskedLMLoss"):
        model(**batch_of())


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_the_trial_of_the_output_layer_leaves_modes_of_modules_as_they_are() -> None:
    model = tiny("Llama").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    memory.causal_lm_loss(model, batch_of())
    assert [module.training for module in model.modules()] == modes


def test_a_loss_makes_no_kv_cache() -> None:
    model = tiny("Llama").train()
    made: list[object] = []
    model.model.register_forward_hook(lambda module, args, output: made.append(output.past_key_values))
    memory.causal_lm_loss(model, batch_of())
    assert made[-1] is None
    memory.causal_lm_loss(model, {**batch_of(), "use_cache": True})
    assert made[-1] is not None


@pytest.mark.parametrize("after_a_call", [False, True])
@pytest.mark.parametrize("change", ["subclass", "forward", "hook", "pre_hook", "backward hook"])
def test_an_output_layer_that_is_more_than_linear_raises(change: str, after_a_call: bool) -> None:
    model, batch = memory.long_context(tiny("Llama").train(), loss_chunk=7), batch_of()
    if after_a_call:
        model(**batch)
    head = model.lm_head
    if change == "subclass":
        model.lm_head = DoubledLinear(32, 61, bias=False, dtype=torch.float64)
    elif change == "forward":
        head.forward = lambda x: 2 * nn.functional.linear(x, head.weight)
    elif change == "hook":
        head.register_forward_hook(lambda _, __, logits: 2 * logits)
    elif change == "pre_hook":
        head.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    else:
        head.register_full_backward_hook(lambda _, grads, __: (2 * grads[0],))
    with pytest.raises(ValueError, match="has hooks or a forward of its own, which would not run"):
        model(**batch)


def test_long_context_returns_a_tuple_without_return_dict() -> None:
    model, batch = memory.long_context(tiny("Llama").train(), loss_chunk=7), batch_of()
    output = model(**batch, return_dict=False)
    assert isinstance(output, tuple)
    for loss in (model(**batch, return_dict=True).loss, memory.causal_lm_loss(model, {**batch, "return_dict": False})):
        torch.testing.assert_close(output, (loss,))


@pytest.mark.parametrize(
    ("name", "by_config"), [("output_hidden_states", False), ("output_hidden_states", True), ("output_attentions", False)]
)
def test_outputs_that_long_context_does_not_return_raise(name: str, by_config: bool) -> None:
    model, batch = memory.long_context(tiny("Llama").train(), loss_chunk=7), batch_of()
    model(**batch, **{name: False})
    if by_config:
        setattr(model.config, name, True)
    with pytest.raises(ValueError, match=f"expected {name}=False in a training step"):
        model(**batch) if by_config else model(**batch, **{name: True})
    own = memory.long_context(tiny("Llama").train(), loss_chunk=None)
    assert len(own(**batch, output_hidden_states=True).hidden_states) == 3


def test_recomputed_queries_are_free_after_the_backward_pass_of_attention() -> None:
    alive: list[bool] = []
    stored: list[StorageWeakRef] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            alive.extend(not storage.expired() for storage in stored)
            return grad

    def layer_of(x: Tensor) -> Tensor:
        q = Look.apply(x) * 2
        stored.append(StorageWeakRef(q.untyped_storage()))
        return ls.attention(q, x, x, mask=ls.causal()).cos()

    memory.checkpoint(layer_of, torch.randn(1, 2, 50, 16, requires_grad=True)).sum().backward()
    assert alive == [False, False]


class GatedRMSNorm(nn.Module):
    """x / rms(x), times weight, and a gate if there is one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return y if gate is None else y * gate


def test_tiled_norms_equal_whole_ones() -> None:
    model = nn.Sequential(GatedRMSNorm(6), nn.LayerNorm(6), GatedRMSNorm(6))
    model[2].data_format = "channels_first"  # tokens may be along other dims
    x = torch.randn(2, 11, 5, 6, requires_grad=True)
    weight = model[0].weight
    want = [t for y in (model[0](x), model[0](x[:, 0], x[:, 1])) for t in (y, *torch.autograd.grad(y.sin().sum(), (x, weight)))]
    assert memory.tile_norms(model, 4) == ["0"]
    got = [t for y in (model[0](x), model[0](x[:, 0], gate=x[:, 1])) for t in (y, *torch.autograd.grad(y.sin().sum(), (x, weight)))]
    torch.testing.assert_close(got, want)


class TinyMLP(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_chunks_sum_gradients_of_float32_weights_in_float32_under_autocast() -> None:
    """Chunks that share autocast's bfloat16 copy of a weight would round the sum after every chunk."""
    x, grad, labels = torch.randn(1, 96, 6), torch.randn(1, 96, 6), torch.randint(0, 5, (1, 96))
    mlp, head = TinyMLP(nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 6)), torch.randn(5, 6, requires_grad=True)

    def of_mlp(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(mlp(x), list(mlp.parameters()), grad.bfloat16())

    def of_head(x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(linear_token_loss(x, head, labels, count=96, chunk=2), head)

    parts = [(x[:, i : i + 2], grad[:, i : i + 2], labels[:, i : i + 2]) for i in range(0, 96, 2)]
    want = [sum(each) for each in zip(*(of_mlp(a, g) for a, g, _ in parts), strict=True)]
    assert memory.tile_mlps(nn.Sequential(mlp), 2) == ["0"]
    torch.testing.assert_close(of_mlp(x, grad), tuple(want))
    torch.testing.assert_close(of_head(x, labels)[0], sum(of_head(a, t)[0] for a, _, t in parts))


@pytest.mark.parametrize(("keep", "inputs"), [("host", "device"), ("device", "host"), ("device", "device"), ("host", "host")])
def test_long_context_has_a_store_for_each_place_on_the_host(keep: memory.Place, inputs: memory.Place) -> None:
    model = memory.long_context(tiny("Llama"), keep=keep, inputs=inputs)
    functions = [vars(m)["_gradient_checkpointing_func"] for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
    stores = functions[0].keywords
    assert len(functions) > 1 and all(f.keywords == stores for f in functions), "layers share their stores"
    assert {name: store is not None for name, store in stores.items()} == {"keep": keep == "host", "inputs": inputs == "host"}


def test_norms_of_x_alone_are_tiled_in_training() -> None:
    seen: list[tuple[int, ...]] = []

    def run(norm: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(tuple(x.shape))
            return x * 2

        seen.clear()
        assert torch.equal(memory._tiled_norm(norm, forward, 4, x, *args, **kwargs), x * 2)
        return list(seen)

    x = torch.randn(2, 9, 5, requires_grad=True)
    norm = nn.LayerNorm(5)
    assert run(norm, x) == [(2, 4, 5), (2, 4, 5), (2, 1, 5)] == run(nn.LayerNorm(5, elementwise_affine=False), x)
    assert run(norm, x, x) == run(norm, x, gate=x) == run(nn.LayerNorm((9, 5)), x) == run(nn.LayerNorm(7), x) == [(2, 9, 5)]
    assert run(norm, x[0]) == [(9, 5)] and run(norm.eval(), x) == [(2, 9, 5)]
