"""Tokens and bytes of `generate` over ranks: `python -m tests.integrations.decoding_grid` prints a table of all families and ranks.

Prefill in two chunks, then 64 greedy tokens of two left-padded sequences, by threads of a virtual world and by Gloo processes. Bytes are
counted at every exchange, sent by all ranks to other ranks, from the first decoded token on. The least that ranks could send is an
all-reduce of partial results, (ranks − 1) · rows · (E + 1 elements of partial out and lse, then E of out), where a row is one query head of
one layer and one sequence. For latent KV (MLA), E is the latent dim: attention returns latent vectors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.integrations.tiny_models import VOCAB, decoding_model
from torch import Tensor

import longspan.integrations.transformers as lst
from longspan._comm.agreement import AGREEMENT
from longspan._comm.process_group import C10dGroup
from longspan.testing import run_processes, virtual_world

FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3")
NEW = 64
PADS = (0, 37, 5, 60)


def prompts(rows: int = 2, length: int = 90) -> dict[str, Tensor]:
    """Left-padded prompts of different lengths."""
    ids = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))
    real = torch.arange(length) >= torch.tensor(PADS)[:rows, None]
    return {"input_ids": ids.where(real, 0), "attention_mask": real.long()}


@dataclass
class Sent:
    """Bytes that a rank has sent to other ranks: of tensors, and of the control messages by which ranks compare their calls."""

    data: int = 0
    control: int = 0


@dataclass(frozen=True)
class Decoded:
    """What one rank decoded: the new tokens of each row, and bytes that it sent per decoded token of all rows."""

    tokens: list[list[int]]
    data: float = 0.0
    control: float = 0.0


def decode(mesh: Any, family: str, new: int = NEW, sent: Sent | None = None) -> Decoded:
    """Prefill in chunks, then one forward per token, over the ranks of a mesh."""
    model = decoding_model(family, "longspan")
    counts: list[tuple[int, int]] = []

    def count(ids: Tensor, scores: Tensor) -> Tensor:
        """Called after the forward that computed a token's scores."""
        counts.append((0, 0) if sent is None else (sent.data, sent.control))
        return scores

    batch = prompts()
    cache = lst.PagedCache(model, page_size=8, mesh=mesh)
    options = {"prefill_chunk_size": 70, "do_sample": False, "eos_token_id": None, "max_new_tokens": new}
    out = model.generate(**batch, past_key_values=cache, logits_processor=[count], **options)
    data, control = ((b - a) / max(1, new - 1) for a, b in zip(counts[0], counts[-1], strict=True))
    return Decoded(out[:, batch["input_ids"].shape[1] :].tolist(), data, control)


def least_bytes(family: str, ranks: int) -> float:
    """Bytes that all ranks together send for one token of two sequences, by an all-reduce of partial results."""
    model = decoding_model(family, "longspan")
    config = model.config
    dim = getattr(config, "kv_lora_rank", None) or config.head_dim
    rows = 2 * config.num_attention_heads * config.num_hidden_layers
    return (ranks - 1) * rows * ((dim + 1) + dim) * model.dtype.itemsize


@contextmanager
def counted_processes() -> Iterator[Sent]:
    """Count the bytes that this process sends over groups of c10d."""
    sent, exchange = Sent(), C10dGroup.all_to_all

    def counted(group: C10dGroup, out: Tensor, x: Tensor, out_splits: Sequence[int], splits: Sequence[int], *, what: str) -> Any:
        rows = sum(n for rank, n in enumerate(splits) if rank != group.rank)
        size = rows * x[:1].numel() * x.element_size()
        if what == AGREEMENT:
            sent.control += size
        else:
            sent.data += size
        return exchange(group, out, x, out_splits, splits, what=what)

    C10dGroup.all_to_all = counted  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        C10dGroup.all_to_all = exchange  # type: ignore[method-assign]


class _SentByThread(Sent):
    """Bytes that a rank of a virtual world has sent."""

    def __init__(self, world: Any, rank: int) -> None:
        self._world, self._rank = world, rank

    @property
    def data(self) -> int:  # type: ignore[override]
        return int(self._world.sent[self._rank])

    @property
    def control(self) -> int:  # type: ignore[override]
        return 0


def on_threads(family: str, ranks: int, new: int = NEW) -> list[Decoded]:
    world = virtual_world(ranks)
    return world.run(lambda mesh: decode(mesh, family, new, _SentByThread(world, mesh.rank)))


def on_process(families: Sequence[str], new: int = NEW) -> list[Decoded]:
    """One rank's results, by family."""
    outputs = []
    for family in families:
        with counted_processes() as sent:
            outputs.append(decode(dist.group.WORLD, family, new, sent))
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--new", type=int, default=NEW, help="decoded tokens")
    options = parser.parse_args()
    alone = {family: decode(None, family, options.new).tokens for family in FAMILIES}
    wrong = 0
    print(f"{'family':12} {'ranks':>5} {'world':8} {'tokens':>9} {'bytes':>8} {'least':>8} {'ratio':>6} {'control':>8}")
    for ranks in options.ranks:
        by_rank = run_processes(on_process, ranks, FAMILIES, options.new, timeout=600.0)
        for i, family in enumerate(FAMILIES):
            for world, results in (("threads", on_threads(family, ranks, options.new)), ("gloo", [r[i] for r in by_rank])):
                equal = all(r.tokens == alone[family] for r in results)
                data, least = sum(r.data for r in results), least_bytes(family, ranks)
                control = f"{sum(r.control for r in results):8.0f}" if world == "gloo" else f"{'':8}"
                wrong += not equal or data > 1.1 * least
                said = "equal" if equal else "DIFFERENT"
                print(f"{family:12} {ranks:5} {world:8} {said:>9} {data:8.0f} {least:8.0f} {data / least:6.3f} {control}", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} rows are wrong: other tokens than one process's, or more than 1.1 of the least bytes")


if __name__ == "__main__":
    main()
