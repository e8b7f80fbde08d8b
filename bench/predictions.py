"""The cost model against figures that other libraries publish. No number of the model is tuned to them.

    python bench/predictions.py [--json]

Each case builds the workload of the peer's busiest rank from the peer's description of its scheme, and predicts its time with the profile
of the stated hardware. Two assumptions about schemes were made after the figures were known; docs/deep-dives/predictions.md shows their
effect. Sources: ring-flash-attention's README; MagiAttention's benchmark of context parallelism.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.predict import timeline
from longspan._cost.rates import Shape
from longspan._cost.workload import Workload

# Bytes read and written per element of out, when separate torch operators merge a half-precision partial result into a float32 one:
# convert 2 + 4, subtract 4 + 4 + 4, scale 4 + 4, subtract 4 + 4 + 4.
MERGE_BYTES = 38
COPY_BACK_BYTES = 8  # copying the merged half of the queries back: read and write, float32


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published figure and its prediction.

    Attributes:
        unit: "share" of ideal, or "TFLOP/s" per GPU.
        within: Allowed relative error of the prediction; None where only the order of the schemes is compared.
    """

    peer: str
    scheme: str
    hardware: str
    gpus: int
    published: float
    predicted: float
    unit: str
    within: float | None = 0.15

    @property
    def off(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """The K + 1 steps of one rank.

    Attributes:
        shape: Sizes of the call.
        local: Tokens of the rank.
        query_tiles, full, partial: Query tiles, full tiles and partial tiles times heads [K + 1].
        received: Tokens received inside the node and between nodes [2, K + 1].
        merge_bytes: Bytes read and written to merge partial results [K + 1].
        degree: Ulysses degree.
        cross_node_share: Share of the Ulysses transpose between nodes.
    """

    shape: Shape
    local: float
    query_tiles: Tensor
    full: Tensor
    partial: Tensor
    received: Tensor
    merge_bytes: Tensor
    degree: int = 1
    cross_node_share: float = 0.0

    def workload(self) -> Workload:
        """The steps as a workload of one rank."""
        moved = self.received[:, None, :]
        exchanges = torch.ones(len(self.query_tiles), dtype=torch.float64)
        exchanges[0] = 0
        return Workload(
            ranks=1,
            degree=self.degree,
            rank=torch.zeros(1, dtype=torch.int64),
            query_tiles=self.query_tiles[None],
            full=self.full[None],
            partial=self.partial[None],
            received=moved,
            sent=moved,
            exchanges=exchanges,
            local=torch.tensor([self.local], dtype=torch.float64),
            cross_node_share=self.cross_node_share,
            shape=self.shape,
            merge_bytes=self.merge_bytes[None],
        )


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- ring-flash-attention

LLAMA = Shape(heads=32, kv_heads=8, head_dim=128)


def ring_flash(hardware: str, scheme: str, *, ranks: int = 8, tokens: int = 8192) -> float:
    """Share of ideal of the busiest rank, forward. Ideal: the kernel alone on `ranks` causal sequences of `tokens` tokens.

    "ring": the last rank computes the causal block and ranks − 1 full blocks. "zigzag": in each step, all queries over half of the keys
    (last rank) or half of the queries over all keys (first rank); the slower one counts. Both merge with separate float32 operators.
    """
    profile, n, heads = cluster(hardware), tokens // 128, LLAMA.heads
    element = LLAMA.heads * LLAMA.head_dim * tokens
    local = (n * n - n) / 2 * heads

    def seconds(q: float, k: float, merge: float) -> float:
        steps = ranks - 1
        work = RankSteps(
            shape=LLAMA,
            query_tiles=_tensor(n * heads, *[n * q * heads] * steps),
            full=_tensor(local, *[n * q * n * k * heads] * steps),
            partial=_tensor(n * heads, *[0.0] * steps),
            received=torch.stack([_tensor(0, *[float(tokens)] * steps), torch.zeros(ranks, dtype=torch.float64)]),
            local=tokens,
            merge_bytes=_tensor(6 * element, *[merge * element] * steps),  # the first step only converts: 2 + 4
        )
        return timeline(work.workload(), profile).forward.seconds

    if scheme == "ring":
        whole = seconds(1, 1, MERGE_BYTES)
    else:
        whole = max(seconds(1, 0.5, MERGE_BYTES), seconds(0.5, 1, (MERGE_BYTES + COPY_BACK_BYTES) / 2))
    alone = profile.kernel.seconds(rows=_tensor(n * heads), full=_tensor(local), partial=_tensor(n * heads), head_dim=128, backward=False)
    return ranks * float(alone) / whole


# -------------------------------------------------------------------------------------------------------------- MagiAttention

MAGI = Shape(heads=64, kv_heads=8, head_dim=128)
PER_GPU = 8192


def _causal(rows: float, keys: float) -> tuple[float, float]:
    """(full, partial) tiles of `rows` query tiles that see `keys` KV tiles on average, the last one half."""
    return rows * (keys - 0.5), rows


def magi_causal(scheme: str, gpus: int) -> float:
    """Forward TFLOP/s per GPU on H100, causal, 8k tokens per GPU, with FlashAttention-3.

    "ulysses": over all GPUs. "allgather": one all-gather of KV, in which each byte enters a node once, then the kernel. "usp": Ulysses
    inside nodes, a zigzag ring between nodes, merged with separate operators.
    """
    profile = cluster("h100")
    tokens, n = PER_GPU * gpus, PER_GPU * gpus // 128
    nodes = max(1, gpus // 8)
    none = torch.zeros(2, 1, dtype=torch.float64)
    if scheme == "ulysses":
        full, partial = _causal(n * MAGI.heads / gpus, n / 2)
        steps = RankSteps(
            shape=MAGI, query_tiles=_tensor(n * MAGI.heads / gpus), full=_tensor(full), partial=_tensor(partial), received=none,
            local=PER_GPU, merge_bytes=_tensor(0.0), degree=gpus, cross_node_share=(gpus - 8) / (gpus - 1) if gpus > 8 else 0.0,
        )  # fmt: skip
    elif scheme == "allgather":
        rows = n / gpus * MAGI.heads
        full, partial = _causal(rows, n / 2)
        inside, between = float(tokens - PER_GPU), (tokens - 8 * PER_GPU) / 8
        steps = RankSteps(
            shape=MAGI, query_tiles=_tensor(rows, rows), full=_tensor(0.0, full), partial=_tensor(0.0, partial),
            received=torch.stack([_tensor(0.0, inside), _tensor(0.0, between)]), local=PER_GPU, merge_bytes=_tensor(0.0, 0.0),
        )  # fmt: skip
    else:
        degree = min(8, gpus)
        rows = n / nodes * MAGI.heads / degree  # query tiles of a ring rank, for its share of the heads
        element = rows * 128 * MAGI.head_dim
        tiles_per_step = rows * n / nodes / 2
        steps = RankSteps(
            shape=MAGI,
            query_tiles=torch.full((nodes,), rows, dtype=torch.float64),
            full=_tensor(tiles_per_step - rows / 2, *[tiles_per_step] * (nodes - 1)),
            partial=_tensor(rows, *[0.0] * (nodes - 1)),
            received=torch.stack([torch.zeros(nodes, dtype=torch.float64), _tensor(0.0, *[float(tokens / nodes)] * (nodes - 1))]),
            local=PER_GPU,
            merge_bytes=_tensor(0.0, *[MERGE_BYTES * element] * (nodes - 1)),
            degree=degree,
        )
    flops = MAGI.flops(tokens * (tokens + 1) / 2) / gpus
    return flops / timeline(steps.workload(), profile).forward.seconds / 1e12


# Histogram of document lengths in MagiAttention's benchmark: upper ends of the bins, and documents in each bin.
ENDS = (0, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 196608)
COUNTS = (30254, 391188, 699596, 1377757, 3794735, 3316785, 2106566, 988525, 410002, 173574, 115007, 18428, 22513, 18284)


def documents(tokens: int, seed: int = 0) -> list[int]:
    """Lengths drawn from the histogram, at most a quarter of all tokens each, as in the benchmark."""
    draw, lengths, left = random.Random(seed), [], tokens
    ranges = [range(a + 1, b + 1) for a, b in pairwise(ENDS)]
    while left:
        length = draw.choice(draw.choices(ranges, COUNTS)[0])
        lengths.append(min(left, length, tokens // 4))
        left -= lengths[-1]
    return lengths


PACKED = {"magi": ("round_robin", "exchange"), "ulysses": ("contiguous", "ulysses")}
SEEDS = 3


def magi_packed(scheme: str, gpus: int) -> float:
    """Forward TFLOP/s per GPU for packed causal documents, mean over draws, from plans that move and compute what the peer's scheme does.

    "magi": chunks assigned by work; only KV that is read moves, and enters a node once, as in its group collectives. "ulysses": over all
    GPUs. "ring": see `_zigzag_documents`.
    """
    rates = []
    for seed in range(SEEDS):
        lengths = documents(PER_GPU * gpus, seed)
        useful = MAGI.flops(sum(n * (n + 1) / 2 for n in lengths)) / gpus
        if scheme == "ring":
            rates.append(useful / timeline(_zigzag_documents(lengths, gpus), cluster("h100")).forward.seconds / 1e12)
            continue
        layout, strategy = PACKED[scheme]
        mask = ls.causal() & ls.documents(lengths=lengths)
        sizes = {"heads": 64, "kv_heads": 8, "head_dim": 128}
        plan = ls.plan(mask, PER_GPU * gpus, ls.Mesh.abstract(gpus), layout=layout, strategy=strategy, overlap=True, **sizes)
        report = plan.report("h100")
        seconds = report.timeline.forward.seconds
        if scheme == "magi" and gpus > 8:
            seconds = timeline(_once_per_node(plan, report.work), report.cluster).forward.seconds
        rates.append(useful / seconds / 1e12)
    return statistics.mean(rates)


def _zigzag_documents(lengths: list[int], gpus: int) -> Workload:
    """The last rank of a ring that splits every document zigzag over all ranks: N steps, each over half of the document's local tokens.

    Pieces of documents do not share tiles. All KV pass every rank.
    """
    tiles = [-(-n // (gpus * 128)) for n in lengths]
    half = [-(-n // (2 * gpus * 128)) for n in lengths]
    rows, steps = float(sum(tiles) * MAGI.heads), gpus - 1
    step = float(sum(a * b for a, b in zip(tiles, half, strict=True)) * MAGI.heads)
    moved = _tensor(0.0, *[float(PER_GPU)] * steps)
    idle = torch.zeros_like(moved)
    return RankSteps(
        shape=MAGI,
        query_tiles=_tensor(*[rows] * gpus),
        full=_tensor(max(0.0, step - rows / 2), *[step] * steps),
        partial=_tensor(rows, *[0.0] * steps),
        received=torch.stack([idle, moved] if gpus > 8 else [moved, idle]),
        local=PER_GPU,
        merge_bytes=_tensor(0.0, *[MERGE_BYTES * PER_GPU * MAGI.heads * MAGI.head_dim] * steps),
    ).workload()


def _once_per_node(plan: ls.Plan, work: Workload) -> Workload:
    """The workload if KV that several devices of a node read enters the node once; the devices share the transfer."""
    s, per_node, steps = plan.schedule, 8, work.steps
    tile, ranks = 128, work.ranks
    count = -(-s.length // tile)
    row = torch.arange(len(count)).repeat_interleave(count)
    at = s.start[row] // tile + torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    to, source, step = s.receiver[row] // per_node, s.source[row], s.stage[row] + 1
    away = to != source // per_node
    tiles = plan.data.q_len // tile + 1
    line = ((((step * (ranks // per_node) + to) * ranks + source) * tiles) + at)[away].unique() // tiles
    source, to, step = line % ranks, line // ranks % (ranks // per_node), line // ranks // (ranks // per_node)
    received = torch.zeros(ranks // per_node * steps, dtype=torch.float64)
    received = received.index_add_(0, to * steps + step, torch.full((len(line),), tile / per_node, dtype=torch.float64)).view(-1, steps)
    sent = torch.zeros(ranks * steps, dtype=torch.float64)
    sent = sent.index_add_(0, source * steps + step, torch.full((len(line),), float(tile), dtype=torch.float64)).view(-1, steps)
    inside = work.received.sum(0)
    return replace(
        work,
        received=torch.stack([inside, received.repeat_interleave(per_node, 0)]),
        sent=torch.stack([work.sent[0], sent]),
    )


RING_FLASH = (("h800", "zigzag", 0.852), ("a100", "zigzag", 0.817), ("h800", "ring", 0.521))
CAUSAL = (("ulysses", 602, 584), ("allgather", 601, 580), ("usp", 594, 586))
DOCUMENTS = (("magi", 459, 237), ("ulysses", 278, 163), ("ring", 89, 28))


def cases() -> list[Case]:
    """All published figures with their predictions."""
    compared = [
        Case(
            peer="ring-flash-attention", scheme=scheme, hardware=f"8 × {hw.upper()}", gpus=8, published=share,
            predicted=ring_flash(hw, scheme), unit="share",
        )
        for hw, scheme, share in RING_FLASH
    ]  # fmt: skip
    for which, rows, predict, within in (("causal", CAUSAL, magi_causal, 0.15), ("documents", DOCUMENTS, magi_packed, None)):
        for scheme, *figures in rows:
            for gpus, figure in zip((8, 64), figures, strict=True):
                compared.append(
                    Case(
                        peer=f"MagiAttention's benchmark, {which}", scheme=scheme, hardware=f"{gpus} × H100", gpus=gpus,
                        published=figure, predicted=predict(scheme, gpus), unit="TFLOP/s", within=within,
                    )
                )  # fmt: skip
    return compared


def table(compared: list[Case]) -> str:
    """The cases as a Markdown table."""
    lines = ["| published by | scheme | hardware | published | predicted | off | held |", "|---|---|---|---:|---:|---:|---|"]
    for c in compared:
        figures = (f"{100 * v:.1f} %" if c.unit == "share" else f"{v:.0f} TFLOP/s" for v in (c.published, c.predicted))
        held = "order only" if c.within is None else "within 15 %" if abs(c.off) <= c.within else "**missed**"
        lines.append(f"| {c.peer} | {c.scheme} | {c.hardware} | {' | '.join(figures)} | {100 * c.off:+.1f} % | {held} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    compared = cases()
    print(table(compared))
    if args.json:
        print(json.dumps([{**c.__dict__, "off": c.off} for c in compared]))


if __name__ == "__main__":
    main()
