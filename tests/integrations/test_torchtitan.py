"""torchtitan's extension, against stand-ins for the interface that torchtitan 0.3.0 documents.

`examples/torchtitan_cp.py` trains with torchtitan itself, where it is installed (`test_trainer_examples.py`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan as ls
from longspan.testing import virtual_world

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
NAME = "longspan.integrations.torchtitan"


class Module(torch.nn.Module):
    @dataclass(kw_only=True)
    class Config:
        sharding_config: Any = None


class FlexAttention(Module):
    @dataclass(kw_only=True)
    class Config(Module.Config):
        block_size: int = 128

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None) -> Tensor:
        raise AssertionError("SpanningAttention replaces it")


class Decoder(Module):
    def get_attention_masks(self, positions: Tensor) -> Any:
        raise AssertionError("the plan replaces the mask")


@dataclass(kw_only=True)
class ShardingConfig:
    in_src_shardings: dict[str, str]
    in_dst_shardings: dict[str, str]
    local_map: Any = None


@dataclass
class ModelSpec:
    model: Any
    parallelize_fn: Any = None


class Trainer:
    @dataclass(kw_only=True)
    class Config:
        model_spec: Any = None
        parallelism: Any = field(
            default_factory=lambda: SimpleNamespace(spmd_backend="partial_dtensor", pipeline_parallel_degree=1, tensor_parallel_degree=1)
        )
        training: Any = field(default_factory=lambda: SimpleNamespace(disable_cuda_graphs=True))
        validator: Any = field(default_factory=lambda: SimpleNamespace(enable=False))

    def __init__(self, config: Any) -> None:
        self.config, self.ntokens_seen = config, 0
        model = config.model_spec.parallelize_fn(config.model_spec.model, parallel_dims=Dims(), parallelism=config.parallelism)
        self.model_parts = [model]
        self.model_config = SimpleNamespace(first_attention=SimpleNamespace(n_heads=HEADS, n_kv_heads=KV_HEADS))

    def post_dataloading_process(self, input_dict: dict[str, Tensor], labels: Tensor) -> Any:
        raise AssertionError("SpanningTrainer replaces it")


class Dims:
    cp_enabled = True
    mesh = "mesh"


def derive(source: Any, target: Any, **deltas: Any) -> Any:
    return target(**deltas)


STAND_INS: dict[str, dict[str, Any]] = {
    "torchtitan": {},
    "torchtitan.config": {},
    "torchtitan.config.override": {"derive": derive, "override": lambda **options: lambda factory: factory},
    "torchtitan.distributed": {},
    "torchtitan.distributed.spmd_types": {"annotate_input_spmd_types": lambda dims, *rest: rest},
    "torchtitan.models": {},
    "torchtitan.models.common": {},
    "torchtitan.models.common.attention": {"FlexAttention": FlexAttention},
    "torchtitan.models.common.decoder": {"Decoder": Decoder},
    "torchtitan.protocols": {},
    "torchtitan.protocols.module": {"Module": Module},
    "torchtitan.protocols.sharding": {"LocalMapConfig": lambda in_grad_placements: in_grad_placements},
    "torchtitan.trainer": {"Trainer": Trainer},
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, contents in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)


@pytest.fixture
def titan(stand_ins: None) -> Iterator[Any]:
    """`longspan.integrations.torchtitan` over the stand-ins."""
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def decoder(inner: torch.nn.Module) -> Decoder:
    model = Decoder()
    model.inner_attention = inner
    return model


def trainer_of(titan: Any, mesh: Any, **settings: Any) -> Any:
    spec = ModelSpec(decoder(titan.SpanningAttention(None)), lambda model, **options: model)
    trainer = titan.SpanningTrainer(titan.SpanningTrainer.Config(model_spec=spec, **settings))
    trainer.parallel_dims = SimpleNamespace(get_optional_mesh=lambda name: mesh)
    return trainer


def test_a_batch_of_packed_documents_on_ranks_equals_one_device(titan: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, tokens, ranks = 3, 24, 2
    query, key, value = (torch.randn(rows, tokens, n, HEAD_DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    positions = torch.cat([torch.arange(7), torch.arange(17)]).expand(rows, tokens)
    ids = torch.randint(9, (rows, tokens), generator=generator)
    by_head = [x.transpose(1, 2) for x in (query, key, value)]
    want, lse = (x.transpose(1, 2) for x in ls.attention(*by_head, mask=ls.causal() & ls.documents(lengths=[7, 17]), return_lse=True))

    def rank(mesh: Any) -> tuple[Tensor, Tensor, Tensor]:
        trainer = trainer_of(titan, mesh)
        inputs, labels, extra = trainer.post_dataloading_process({"input": ids, "positions": positions}, ids + 1)
        plan = extra["attention_masks"]
        assert torch.equal(labels, inputs + 1) and torch.equal(extra["positions"], plan.shard(positions, 1))
        assert trainer.ntokens_seen == rows * tokens // ranks
        inner = trainer.model_parts[0].inner_attention
        out = inner(*(plan.shard(x, 1) for x in (query, key, value)), attention_masks=plan, scale=None, enable_gqa=True)
        # gpt-oss scales the output by a function of the log-sum-exp.
        scaled = inner(
            *(plan.shard(x, 1) for x in (query, key, value)), attention_masks=plan, out_transform=lambda o, lse: o * lse[..., None]
        )
        return plan.unshard(out, 1), plan.unshard(scaled, 1), plan.unshard(inputs, 1)

    for out, scaled, whole in virtual_world(ranks).run(rank):
        torch.testing.assert_close([out, scaled], [want, want * lse[..., None]])
        assert torch.equal(whole, ids)


def documents_of(*lengths: int) -> Tensor:
    """Positions [S] of packed documents."""
    return torch.cat([torch.arange(n) for n in lengths])


def test_the_plan_of_a_batch_has_its_documents_and_the_heads_of_this_rank(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    ids_of_documents: list[Tensor] = []
    monkeypatch.setattr(titan, "documents", lambda *, ids: ids_of_documents.append(ids) or ls.documents(ids=ids))
    monkeypatch.setattr(titan, "plan", lambda *args, **options: plans.append((args, options)) or ls.plan(*args, **options))
    ids = torch.zeros(3, 24, dtype=torch.long)
    one, equal = documents_of(24).expand(3, -1), documents_of(7, 17).expand(3, -1)
    others = torch.stack([documents_of(7, 17), documents_of(7, 11, 6), documents_of(24)])
    trainer = trainer_of(titan, ls.Mesh.abstract(2), layout="contiguous", strategy="ring")
    for positions in (None, one[:1], equal, others):
        _, _, extra = trainer.post_dataloading_process({"input": ids} if positions is None else {"input": ids, "positions": positions}, ids)
        assert extra["positions"].shape == (3, 12) and extra["attention_masks"].strategy == "ring"
    masks = [args[0] for args, _ in plans]
    assert str(masks[0]) == str(masks[1]) == str(ls.causal()), "one document"
    assert str(masks[2]) == str(masks[3]) == str(ls.causal() & ls.documents(lengths=[7, 17]))
    by_row = [equal[0].eq(0).cumsum(0), others.eq(0).cumsum(1)]  # equal rows have one mask
    assert len(ids_of_documents) == 2 and all(map(torch.equal, ids_of_documents, by_row))
    assert [args[1:] for args, _ in plans] == [(24, ls.Mesh.abstract(2))] * 4
    sizes = {"batch": 3, "heads": HEADS, "kv_heads": KV_HEADS, "layout": "contiguous", "strategy": "ring"}
    assert [options for _, options in plans] == [sizes] * 4

    trainer = trainer_of(titan, None)  # without an axis "cp"
    trainer.config.parallelism.tensor_parallel_degree = 2
    for kv_heads, local in ((KV_HEADS, KV_HEADS // 2), (None, HEADS // 2)):
        trainer.model_config.first_attention.n_kv_heads = kv_heads
        inputs, _, extra = trainer.post_dataloading_process({"input": ids}, ids)
        assert inputs.shape == ids.shape and extra["attention_masks"].mesh.size == 1
        assert plans[-1][1] == {**sizes, "heads": HEADS // 2, "kv_heads": local, "layout": "head_tail", "strategy": "auto"}


def test_rows_with_documents_of_their_own_equal_one_device(titan: Any) -> None:
    positions = torch.stack([documents_of(7, 17), documents_of(16, 8)])
    qkv = torch.randn(2, 24, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)).split([HEADS, *[KV_HEADS] * 2], 2)
    masks = [ls.causal() & ls.documents(lengths=lengths) for lengths in ([7, 17], [16, 8])]
    want = torch.cat([ls.attention(*(x[i : i + 1].transpose(1, 2) for x in qkv), mask=mask) for i, mask in enumerate(masks)])

    def rank(mesh: Any) -> Tensor:
        trainer = trainer_of(titan, mesh)
        ids = torch.zeros(2, 24, dtype=torch.long)
        _, _, extra = trainer.post_dataloading_process({"input": ids, "positions": positions}, ids)
        plan = extra["attention_masks"]
        return plan.unshard(trainer.model_parts[0].inner_attention(*(plan.shard(x, 1) for x in qkv), attention_masks=plan), 1)

    for out in virtual_world(3).run(rank):
        torch.testing.assert_close(out, want.transpose(1, 2))


def test_spmd_types_are_annotated_and_know_of_context_parallelism(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def annotate(*args: Any) -> tuple[str, ...]:
        calls.append(args)
        return "inputs", "labels", "extra"

    def parallelize(model: Any, *, parallel_dims: Any, **options: Any) -> Any:
        calls.append(parallel_dims.cp_enabled)
        return model

    monkeypatch.setattr(titan, "annotate_input_spmd_types", annotate)
    ids = torch.arange(24)[None]
    for backend in ("partial_dtensor", "spmd_types"):
        parallelism = SimpleNamespace(spmd_backend=backend, pipeline_parallel_degree=1, tensor_parallel_degree=1)
        spec = ModelSpec(decoder(titan.SpanningAttention(None)), parallelize)
        trainer = titan.SpanningTrainer(titan.SpanningTrainer.Config(model_spec=spec, parallelism=parallelism))
        trainer.parallel_dims = SimpleNamespace(get_optional_mesh=lambda name: ls.Mesh.abstract(2))
        made = trainer.post_dataloading_process({"input": ids}, ids + 1)
        assert calls.pop(0) == (backend == "spmd_types")
        if backend == "partial_dtensor":
            assert not calls and torch.equal(made[1], made[0] + 1)
    assert made == ("inputs", "labels", "extra")
    ((dims, inputs, labels, extra),) = calls
    assert dims is trainer.parallel_dims and torch.equal(labels, inputs + 1) and set(extra) == {"positions", "attention_masks"}


def test_the_override_keeps_kv_sharded(titan: Any) -> None:
    sharded = {"q_BLNH": "S(1)", "k_BLNH": "S(1)", "v_BLNH": "S(1)"}
    config = FlexAttention.Config(
        sharding_config=ShardingConfig(in_src_shardings=sharded, in_dst_shardings={**sharded, "k_BLNH": "R", "v_BLNH": "R"})
    )
    made = titan.spanning_attention(config)
    assert isinstance(made, titan.SpanningAttention.Config)
    assert made.sharding_config.in_dst_shardings == sharded and made.sharding_config.local_map == ("S(1)",) * 3


def test_torchtitan_does_not_gather_kv_itself(titan: Any) -> None:
    seen: list[Any] = []

    def parallelize(model: Any, *, parallel_dims: Any, **options: Any) -> Any:
        seen.append((parallel_dims.cp_enabled, parallel_dims.mesh))
        return model

    titan.SpanningTrainer(titan.SpanningTrainer.Config(model_spec=ModelSpec(decoder(titan.SpanningAttention(None)), parallelize)))
    assert seen == [(False, "mesh")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallelism": SimpleNamespace(spmd_backend="full_dtensor", pipeline_parallel_degree=1)}, "got 'full_dtensor'"),
        ({"parallelism": SimpleNamespace(spmd_backend="spmd_types", pipeline_parallel_degree=2)}, "expected pipeline_parallel_degree=1"),
        ({"training": SimpleNamespace(disable_cuda_graphs=False)}, "disable_cuda_graphs=True"),
        ({"validator": SimpleNamespace(enable=True)}, "validator.enable=False"),
    ],
)
def test_settings_that_are_not_supported_raise(titan: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(titan, None, **settings)


def test_models_and_batches_that_are_not_supported_raise(titan: Any) -> None:
    class OtherMasks(Decoder):
        def get_attention_masks(self, positions: Tensor) -> Any:
            return {}

    both = decoder(titan.SpanningAttention(None))
    both.other_attention = FlexAttention()
    without = "expected a model with SpanningAttention"
    for model, message in (
        (OtherMasks(), "got OtherMasks"),
        (decoder(FlexAttention()), without),
        (both, without),
        (decoder(torch.nn.Identity()), without),
        (torch.nn.Sequential(titan.SpanningAttention(None)), "got Sequential"),
    ):
        with pytest.raises(ValueError, match=message):
            titan.SpanningTrainer(titan.SpanningTrainer.Config(model_spec=ModelSpec(model, lambda model, **options: model)))
    trainer, ids = trainer_of(titan, ls.Mesh.abstract(2)), torch.ones(1, 24, dtype=torch.long)
    with pytest.raises(ValueError, match="got images"):
        trainer.post_dataloading_process({"input": ids, "images": ids}, ids)
    with pytest.raises(ValueError, match="expected equally many tokens"):
        trainer.post_dataloading_process({"input": ids[:, :23]}, ids[:, :23])
    x = torch.ones(1, 24, 2, 8)
    with pytest.raises(ValueError, match="expected a plan as attention_masks, got NoneType"):
        titan.SpanningAttention(None)(x, x, x)
    with pytest.raises(ValueError, match="got sinks"):
        titan.SpanningAttention(None)(x, x, x, attention_masks=ls.plan(ls.causal(), 24, ls.Mesh.abstract(1)), sinks=1)
    plan, settings = ls.plan(ls.causal(), x.shape[1], ls.Mesh.abstract(1)), {"sinks": None, "enable_gqa": True}
    out = titan.SpanningAttention(None)(x, x, x, attention_masks=plan, **settings)  # what is None is not given
    assert out.shape == x.shape


def test_without_torchtitan_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ImportError, match=r"needs torchtitan 0\.3\.0 .* pip install torchtitan==0\.3\.0"):
        importlib.import_module(NAME)


@pytest.mark.usefixtures("stand_ins")
def test_a_torchtitan_with_other_arguments_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, *, attention_masks: Any) -> Tensor:
        return q_TNH

    monkeypatch.setattr(FlexAttention, "forward", forward)
    with pytest.raises(
        ImportError, match=r"expected .*forward\(q_BLNH, k_BLNH, v_BLNH, .* torchtitan 0\.3\.0, got \(q_TNH, k_TNH, v_TNH, "
    ):
        importlib.import_module(NAME)
