"""Measurements for a cluster profile: kernel rates on squares and triangles of several lengths, copies, collectives.

GPU times come from events around queued calls, CPU times from the clock. Under torchrun an all-to-all is measured too, inside the node and
between nodes. Values that cannot be measured here are those of the h200 profile, and the file says so.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import longspan as ls
from longspan._cost.clusters import cluster
from longspan._cost.rates import BACKWARD, Cluster, KernelRates, Link, Rates
from longspan._kernels.registry import first_candidate

KEYS = {"cuda": (128, 256, 512, 1024, 2048, 4096, 16384, 65536), "cpu": (128, 256, 512, 1024)}
LONG = 0.05  # seconds; longer calls are repeated twice only
SETTLING = 40  # warm-up calls before the first measurement
QUICK = {"cuda": (256, 1024, 4096, 16384), "cpu": (64, 128, 256)}


def measured(*, name: str | None, kernel: str, heads: int, kv_heads: int, head_dim: int, quick: bool) -> tuple[Cluster | None, list[str]]:
    """(profile, lines that describe the measurements) on rank 0; (None, []) on other ranks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    clock = Clock(device, 3 if quick else 7, kernel)
    keys = (QUICK if quick else KEYS)[device.type]
    launch = _launch(clock, device, kernel, head_dim)
    rates = _kernel_rates(clock, device, keys, kernel, heads, kv_heads, head_dim, launch)
    lines = [f"{'keys':>8}{'forward full':>14}{'causal':>12}{'backward full':>15}{'causal':>12}   TFLOP/s"]
    for i, k in enumerate(keys):
        lines.append(f"{k:8d}" + "".join(f"{rates[n][i]:{w}.4g}" for n, w in zip(_NAMES, (14, 12, 15, 12), strict=True)))
    hbm = _copy_bandwidth(clock, device)
    lines.append(f"copies: {hbm / 1e9:.4g} GB/s, read and written")
    base = cluster("h200")
    # Profiles hold rates at head dim 128 and a factor per head dim: divide, so that the profile gives the measured rate at this head dim.
    share = head_dim / 128 / base.kernel.dim_factor(head_dim)
    rates = {name: tuple(rate / share for rate in of_keys) for name, of_keys in rates.items()}
    inside, between, about = _links(clock, device, base, lines)
    title = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    if dist.is_initialized() and dist.get_rank() != 0:
        return None, []
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    measured_cluster = Cluster(
        name=name or title.lower().replace(" ", "-"),
        about=about,
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", base.gpus_per_node)),
        memory=float(properties.total_memory) if properties else 16 * 2.0**30,
        hbm=hbm,
        inside=inside,
        between=between,
        contention=base.contention,
        kernel=KernelRates(
            name=kernel,
            source=f"longspan calibrate: {title}, torch {torch.__version__}, {heads}/{kv_heads} heads of dim {head_dim}",
            forward=Rates(keys=tuple(map(float, keys)), full=rates["forward_full"], causal=rates["forward_causal"]),
            backward=Rates(keys=tuple(map(float, keys)), full=rates["backward_full"], causal=rates["backward_causal"]),
            launch=launch,
            slots=_slots(device, kernel),
        ),
    )
    return replace(measured_cluster, kernel=replace(measured_cluster.kernel, dims=base.kernel.dims)), lines


_NAMES = ("forward_full", "forward_causal", "backward_full", "backward_causal")


class Clock:
    """Median seconds of a call. Long calls vary little and are repeated less often.

    A GPU lowers its clock under load: after a pause, kernels run up to a quarter faster than in steady state. Therefore the device is kept
    busy with other attention calls, at first until its clock settles, then before every timed call while the host queues it.
    """

    def __init__(self, device: torch.device, repeat: int, kernel: str) -> None:
        self.device, self.repeat, self.kernel = device, repeat, kernel
        self.other = torch.randn(1, 32, 16384, 128, device=device, dtype=torch.bfloat16) if device.type == "cuda" else None
        self.keep_busy(SETTLING)

    def keep_busy(self, times: int = 3) -> None:
        """Queue about 10 ms of work per call on a GPU; nothing on a CPU."""
        if self.other is not None:
            with torch.no_grad():
                for _ in range(times):
                    ls.attention(self.other, self.other, self.other, kernel=self.kernel)

    def __call__(self, fn: Callable[[], Any]) -> float:
        fn()
        first = self._once(fn)
        return statistics.median(self._once(fn) for _ in range(self.repeat if first < LONG else 2))

    def _once(self, fn: Callable[[], Any]) -> float:
        if self.other is None:
            start = time.perf_counter()
            fn()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.keep_busy()
        begin.record()
        fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _kernel_rates(
    clock: Clock, device: torch.device, keys: tuple[int, ...], kernel: str, heads: int, kv_heads: int, head_dim: int, launch: float
) -> dict[str, tuple[float, ...]]:
    """TFLOP/s of useful work by number of keys per query, for full squares and causal triangles, batched to fill the device.

    Squares, because a backward pass is parallel over keys: few keys under many queries would leave most SMs idle.
    """
    rates: dict[str, list[float]] = {name: [] for name in _NAMES}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        heads, kv_heads = min(heads, 4), min(kv_heads, 4) if min(heads, 4) % min(kv_heads, 4) == 0 else min(heads, 4)
    many = 16384 if device.type == "cuda" else 128
    for k in keys:
        for kind in ("full", "causal"):
            q_len, kv_len = (min(many, k), k) if kind == "full" else (2 * k, 2 * k)
            batch = max(1, many // q_len)  # enough queries to fill the device
            mask = None if kind == "full" else ls.causal()
            pairs = batch * (q_len * kv_len if kind == "full" else q_len * (q_len + 1) / 2)
            q, key, v = (
                torch.randn(batch, h, n, head_dim, device=device, dtype=dtype).requires_grad_()
                for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
            )

            def call(q: Any = q, key: Any = key, v: Any = v, mask: Any = mask) -> Any:
                return ls.attention(q, key, v, mask=mask, kernel=kernel)

            with torch.no_grad():
                forward = clock(call)
            out = call()
            grad = torch.randn_like(out)
            backward = clock(partial(torch.autograd.grad, out, (q, key, v), grad, retain_graph=True))
            work = 4.0 * heads * head_dim * pairs / 1e12
            # The cost model adds a launch to every call.
            rates[f"forward_{kind}"].append(work / max(forward - launch, forward / 2))
            rates[f"backward_{kind}"].append(BACKWARD * work / max(backward - launch, backward / 2))
            del q, key, v, out, grad
    return {name: tuple(values) for name, values in rates.items()}


def _slots(device: torch.device, kernel: str) -> int:
    """Number of concurrent CTAs: one per SM for the Hopper kernels, about two for the others."""
    if device.type == "cpu":
        return torch.get_num_threads()
    if (first_candidate(device) if kernel == "auto" else kernel) == "hopper":
        from longspan._kernels.hopper.passes import persistent_ctas

        return persistent_ctas(device)
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _launch(clock: Clock, device: torch.device, kernel: str, head_dim: int) -> float:
    """Seconds of a minimal call."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, 1, 128, head_dim, device=device, dtype=dtype)
    with torch.no_grad():
        return clock(lambda: ls.attention(x, x, x, kernel=kernel))


def _copy_bandwidth(clock: Clock, device: torch.device) -> float:
    size = 2**30 if device.type == "cuda" else 2**25
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * size / clock(lambda: y.copy_(x))


def _links(clock: Clock, device: torch.device, base: Cluster, lines: list[str]) -> tuple[Link, Link, str]:
    """(link inside a node, link between nodes, description), measured with an all-to-all."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        lines.append("links: not measured with one process, taken from the h200 profile; run under torchrun to measure them")
        return base.inside, base.between, "measured kernels and copies; links of the h200 profile"
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    nodes = dist.get_world_size() // here
    groups = [dist.new_group(list(range(n * here, (n + 1) * here))) for n in range(nodes)]
    inside = _link(clock, device, groups[dist.get_rank() // here], lines, "inside a node") if here > 1 else base.inside
    between = base.between
    if nodes > 1:
        across = [dist.new_group(list(range(i, dist.get_world_size(), here))) for i in range(here)]
        between = _link(clock, device, across[dist.get_rank() % here], lines, "between nodes")
    return inside, between, "measured kernels, copies and links" + ("" if nodes > 1 else "; links between nodes of the h200 profile")


def _link(clock: Clock, device: torch.device, group: Any, lines: list[str], where: str) -> Link:
    size = dist.get_world_size(group)

    def seconds(each: int) -> float:
        sent = torch.zeros(size * each, dtype=torch.uint8, device=device)
        out = torch.empty_like(sent)
        return clock(lambda: dist.all_to_all_single(out, sent, group=group))

    each = 2**24 if device.type == "cuda" else 2**20
    small, large = seconds(1024), seconds(each)
    bandwidth = (size - 1) * each / max(large - small, 1e-9)
    lines.append(f"links {where}: {bandwidth / 1e9:.4g} GB/s each way, {1e6 * small:.3g} µs latency, over {size} ranks")
    return Link(bandwidth=bandwidth, latency=small)
