"""A training job: the small decoder on packed documents, weights sharded over all ranks (FSDP2), sequences over the "cp" axis.

Losses are the same for any number of ranks, up to rounding: every rank knows the whole batch of a step, computes its sequences of the "dp"
axis, and divides by the token count of the whole batch.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from longspan._training.checkpoints import Checkpoint, CheckpointError, load, pick, save
from longspan._training.corpus import Corpus, corpus
from longspan._training.decoder import Decoder, DecoderConfig, flops_per_token
from longspan._training.launch import INTERRUPTED, Interrupts
from longspan.integrations import PlanOptions, prepare_batch
from longspan.integrations.loss import IGNORED

# Dense bfloat16 FLOP/s of NVIDIA's data sheets by a part of the device's name, of which the first one counts.
_PEAK_FLOPS = {
    "GB200": 2500e12, "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of a job: `batch` sequences of `length` tokens per step, each split over `context` ranks; `half`: bfloat16 weights.

    `from_step`: the checkpoint to resume from; by default the newest.
    """

    out: str
    model: DecoderConfig
    data: str | None = None
    steps: int = 200
    length: int = 2048
    batch: int = 2
    context: int = 1
    rate: float = 3e-3
    warmup: int = 10
    save_every: int = 50
    seed: int = 0
    half: bool = False
    strategy: str = "auto"
    resume: bool = False
    from_step: int | None = None

    def identity(self, text: Corpus) -> dict[str, Any]:
        """Settings that must be equal in a job and in the checkpoint it resumes from."""
        sizes = {k: v for k, v in asdict(self.model).items() if k != "recompute"}
        return {**sizes, "length": self.length, "batch": self.batch, "seed": self.seed, "data": text.digest}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Loss and speed of one optimizer step.

    memory_bytes: the most that this process has held, of GPU memory if it has a GPU.
    flops:        FLOP/s of a rank: the model's FLOPs, without recomputation, over seconds and ranks.
    mfu:          `flops` over the dense peak of the GPU; None if the peak is unknown, as of CPUs.
    """

    step: int
    loss: float
    tokens_per_second: float
    seconds: float
    memory_bytes: int
    flops: float
    mfu: float | None


def check_ranks(job: Job, ranks: int) -> None:
    """Raise ValueError if the job cannot run on this many ranks."""
    if ranks % job.context:
        raise ValueError(
            f"--cp: {ranks} processes cannot be divided into groups of {job.context} that share a sequence; use a divisor of {ranks}"
        )
    groups = ranks // job.context
    if job.batch % groups:
        raise ValueError(
            f"--batch: {job.batch} sequences cannot be divided among {groups} groups of processes ({ranks} processes, --cp {job.context}); "
            f"use a multiple of {groups}"
        )


def check_resume(job: Job, text: Corpus) -> Checkpoint | None:
    """The verified checkpoint to resume from, or None. Raises ValueError if there is none, or if it belongs to another job."""
    if not job.resume:
        return None
    try:
        checkpoint = pick(job.out, job.from_step)
    except CheckpointError as error:
        raise ValueError(f"--resume: {error}") from None
    saved, identity = checkpoint.identity, job.identity(text)
    other = [f"{name} {saved.get(name)!r} (here {value!r})" for name, value in identity.items() if saved.get(name) != value]
    if other:
        raise ValueError(f"--resume: the checkpoint {checkpoint.folder} belongs to another model or job: {', '.join(other)}")
    if checkpoint.step > job.steps:
        advice = "give a larger --steps, or another --out"
        raise ValueError(f"--resume: {checkpoint.step} steps are done, --steps asks for {job.steps}; {advice}")
    return checkpoint


def train(device: torch.device, job: Job, on_step: Callable[[StepResult], None] | None = None) -> int:
    """Train on this rank of the default process group. Returns 0, or INTERRUPTED after an interruption and a checkpoint."""
    text = corpus(job.data, length=job.length, seed=job.seed)
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // job.context, job.context), mesh_dim_names=("dp", "cp"))
    model = _sharded(Decoder(job.model).initialise(job.seed), device, job.half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate, betas=(0.9, 0.95), weight_decay=0.1)
    checkpoint = check_resume(job, text)
    first = 0 if checkpoint is None else load(checkpoint, model, optimizer)
    per_group = job.batch // mesh["dp"].size()
    sequences = range(mesh.get_local_rank("dp") * per_group, (mesh.get_local_rank("dp") + 1) * per_group)
    with Interrupts() as interrupts:
        for step in range(first, job.steps):
            start = time.perf_counter()
            loss = _step(job, model, optimizer, text, mesh, step, sequences)
            # One small collective for the loss and the request to stop of any rank.
            both = torch.tensor([loss, float(interrupts.stop)], dtype=torch.float64)
            dist.all_reduce(both)
            seconds = time.perf_counter() - start
            if on_step is not None:
                on_step(_result(job, text, device, step, loss=both[0].item(), seconds=seconds))
            stop = both[1].item() > 0
            if stop or (step + 1) % job.save_every == 0 or step + 1 == job.steps:
                save(job.out, step + 1, job.identity(text), model, optimizer)
            if stop:
                return INTERRUPTED
    return 0


def _result(job: Job, text: Corpus, device: torch.device, step: int, *, loss: float, seconds: float) -> StepResult:
    """What a step came to."""
    # A token sees itself and the tokens before it in its document.
    pairs = sum(int((b["position_ids"] + 1).sum()) for b in _batch(job, text, step)) / (job.batch * job.length)
    flops = job.batch * job.length * flops_per_token(job.model, pairs) / seconds / dist.get_world_size()
    peak = peak_flops(device) if job.half else None
    return StepResult(
        step=step, loss=loss, tokens_per_second=job.batch * job.length / seconds, seconds=seconds, memory_bytes=_peak_memory(device),
        flops=flops, mfu=None if peak is None else flops / peak,
    )  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU; None for devices that are not listed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for card, flops in _PEAK_FLOPS.items() if card in name), None)


def _batch(job: Job, text: Corpus, step: int) -> list[dict[str, torch.Tensor]]:
    """All sequences of a step."""
    return [text.sequence(step * job.batch + row, job.length) for row in range(job.batch)]


def _peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of GPU memory, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _step(job: Job, model: Any, optimizer: Any, text: Corpus, mesh: Any, step: int, sequences: range) -> float:
    """One optimizer step on this rank's `sequences`: this rank's share of the loss."""
    for group in optimizer.param_groups:
        group["lr"] = job.rate * _schedule(step, job)
    optimizer.zero_grad()
    batch = _batch(job, text, step)
    count = sum(int((b["shift_labels"] != IGNORED).sum()) for b in batch)
    options: PlanOptions = {
        "strategy": job.strategy, "heads": job.model.heads, "kv_heads": job.model.kv_heads, "head_dim": job.model.head_dim,
    }  # fmt: skip
    total = 0.0
    for row in sequences:
        prepared = prepare_batch(batch[row], mesh, gradients="sum", count=count, **options)
        plan = prepared["longspan_plan"]["full"]
        loss = model(
            prepared["input_ids"], prepared["position_ids"], plan=plan, labels=prepared["labels"], count=prepared["num_items_in_batch"]
        )
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def _schedule(step: int, job: Job) -> float:
    """Learning rate factor: linear warm-up, then cosine decay to 0.1."""
    if step < job.warmup:
        return (step + 1) / job.warmup
    done = min(1.0, (step - job.warmup) / max(1, job.steps - job.warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _sharded(model: Decoder, device: torch.device, half: bool) -> Any:
    model = model.to(device).train()
    world = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("all",))
    options: dict[str, Any] = {"mesh": world}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, **options)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # losses are shares of the global mean: gradients are summed, not averaged
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return model
