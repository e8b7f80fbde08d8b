"""Drawings of the concept pages, made by longspan itself: `python docs/figures.py` rewrites docs/figures/*.svg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch

import longspan as ls

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "longspan", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
from matplotlib import pyplot  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch  # noqa: E402

FOLDER = Path(__file__).parent / "figures"
RANKS, TOKENS, BLOCK = 4, 4096, 128
LENGTHS = [1900, 300, 1200, 696]
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
MASK = ls.causal() & ls.documents(lengths=LENGTHS)


def save(figure: Any, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def tile_kinds(mask: ls.Mask) -> torch.Tensor:
    """0 empty, 1 partial, 2 full, per tile of BLOCK × BLOCK tokens, by evaluating every pair."""
    i = torch.arange(TOKENS)
    seen = torch.broadcast_to(mask(torch.tensor(0), torch.tensor(0), i[:, None], i[None]), (TOKENS, TOKENS))
    share = seen.view(TOKENS // BLOCK, BLOCK, TOKENS // BLOCK, BLOCK).float().mean((1, 3))
    return (share > 0).int() + (share == 1).int()


def block_table() -> None:
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.2))
    masks = {"causal()": ls.causal(), "causal() & documents(…)": MASK, "sliding_window(700)": ls.sliding_window(700)}
    for axis, (name, mask) in zip(axes, masks.items(), strict=True):
        axis.imshow(tile_kinds(mask), cmap=ListedColormap(["#f2f2f2", "#f0b36b", "#4c72b0"]), vmin=0, vmax=2, interpolation="nearest")
        axis.set_title(name)
        axis.set_xlabel("KV tile")
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel("query tile")
    handles = [Patch(color=c, label=n) for c, n in (("#f2f2f2", "empty"), ("#f0b36b", "partial"), ("#4c72b0", "full"))]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, bbox_to_anchor=(0.5, -0.06))
    save(figure, "block-table")


def layouts() -> None:
    names = ("contiguous", "head_tail", "auto")
    figure, axes = pyplot.subplots(len(names), 2, figsize=(9, 3.6), width_ratios=(3, 1), layout="constrained")
    for (bar, work), name in zip(axes, names, strict=True):
        plan = ls.plan(MASK, TOKENS, ls.Mesh.abstract(RANKS), layout=name, strategy="exchange")
        for rank in range(RANKS):
            for start, length in plan.layout.segments(rank):
                bar.barh(0, length, left=start, color=COLORS[rank], edgecolor="white", height=0.8)
        for end in torch.tensor(LENGTHS).cumsum(0).tolist()[:-1]:
            bar.axvline(end, color="black", linewidth=1, linestyle=":")
        bar.set(xlim=(0, TOKENS), yticks=[], ylabel=name)
        pairs = plan.report().pairs
        work.bar(range(RANKS), pairs / pairs.mean(), color=COLORS)
        work.axhline(1, color="black", linewidth=0.8, linestyle="--")
        work.set(xticks=[], ylim=(0, 2))
    axes[0, 0].set_title("owner of each token (dotted: document boundaries)")
    axes[0, 1].set_title("work per rank, mean 1")
    axes[-1, 0].set_xlabel("position")
    save(figure, "layouts")


def schedules() -> None:
    names = ("ring", "allgather", "exchange")
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 2.8), layout="constrained", sharey=True)
    for axis, name in zip(axes, names, strict=True):
        plan = ls.plan(MASK, TOKENS, ls.Mesh.abstract(RANKS), layout="head_tail", strategy=name)
        received = plan.schedule.received(RANKS)
        bottom = torch.zeros(RANKS)
        for stage, tokens in enumerate(received):
            axis.bar(
                range(RANKS), tokens, bottom=bottom, color=pyplot.cm.Blues(0.35 + 0.2 * stage), edgecolor="white", label=f"stage {stage}"
            )
            bottom = bottom + tokens
        axis.set(title=name, xlabel="rank", xticks=range(RANKS))
        axis.legend(fontsize=7, frameon=False, ncols=3, loc="upper center")
        axis.set_ylim(0, 3900)
    axes[0].set_ylabel("KV tokens received")
    save(figure, "schedules")


def overview() -> None:
    figure, axis = pyplot.subplots(figsize=(9, 2.9))
    axis.set(xlim=(0, 9.2), ylim=(0, 3))
    axis.axis("off")
    boxes = {
        "mask, score_mod": (0.05, 1.9, 1.5), "mesh, lengths": (0.05, 0.5, 1.5), "program": (2.0, 1.9, 1.2), "block table": (3.6, 1.9, 1.3),
        "plan =\nlayout × schedule": (5.3, 1.2, 1.5), "engine": (7.2, 1.2, 0.8), "exchange": (8.2, 2.1, 0.8), "kernel": (8.2, 0.3, 0.8),
    }  # fmt: skip
    for text, (x, y, width) in boxes.items():
        axis.add_patch(FancyBboxPatch((x, y), width, 0.6, boxstyle="round,pad=0.04", facecolor="#e8edf6", edgecolor="#4c72b0"))
        axis.text(x + width / 2, y + 0.3, text, ha="center", va="center")
    arrows = [((1.6, 2.2), (1.95, 2.2)), ((3.25, 2.2), (3.55, 2.2)), ((4.95, 2.2), (5.35, 1.85)), ((1.6, 0.8), (5.25, 1.4)),
              ((6.85, 1.5), (7.15, 1.5)), ((8.05, 1.65), (8.3, 2.05)), ((8.05, 1.35), (8.3, 0.95))]  # fmt: skip
    for start, end in arrows:
        axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="#555555"))
    save(figure, "overview")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    block_table()
    layouts()
    schedules()
    overview()
