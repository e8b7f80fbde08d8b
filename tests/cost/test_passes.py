"""Simulated passes, by hand: one token per second over a link, one tile per second of a kernel, or one byte per second of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan._cost.estimate import _full_and_partial
from longspan._cost.pass_simulation import PassSimulation
from longspan._cost.predict import timeline
from longspan._cost.rates import Cluster, KernelRates, Link, Rates, Shape
from longspan._cost.timeline import Conditions, PassTimes
from longspan._cost.workload import BackwardMoves, Placement, Workload

TILE = 4 * 128**3 * 1e-12  # TFLOP/s at which a full tile of head dim 128 takes a second


def made_cluster(*, rate: float = TILE, hbm: float = 1e30, contention: float = 0.0) -> Cluster:
    """512 bytes per second inside a node, 256 between nodes."""
    rates = Rates(keys=(128.0, 1024.0), full=(rate, rate), causal=(rate, rate))
    kernel = KernelRates(name="k", source="", forward=rates, backward=rates, launch=0.0, slots=1)
    return Cluster(
        name="made", about="", gpus_per_node=8, memory=1e9, hbm=hbm, kernel=kernel, contention=contention,
        inside=Link(bandwidth=512.0, latency=0.25), between=Link(bandwidth=256.0, latency=0.5),
    )  # fmt: skip


def numbers(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def made_work(**fields: Any) -> Workload:
    """Two ranks, three steps; 512 bytes of a token's K and V."""
    usual: dict[str, Any] = {
        "ranks": 2,
        "degree": 1,
        "rank": torch.arange(2),
        "query_tiles": numbers(1, 1),
        "full": numbers([3, 5, 2], [4, 1, 6]),
        "partial": torch.zeros(2, 3, dtype=torch.float64),
        "received": numbers([[0, 2, 0], [0, 7, 0]], [[0, 0, 1], [0, 0, 0]]),
        "sent": numbers([[0, 7, 0], [0, 2, 0]], [[0, 0, 0], [0, 0, 1]]),
        "exchanges": numbers(0, 1, 2),
        "local": numbers(10, 20),
        "cross_node_share": 0.0,
        "shape": Shape(),
    }
    return Workload(**{**usual, **fields})


def spans(one: PassTimes) -> list[list[float]]:
    return (one.compute[1] - one.compute[0]).tolist()


def test_a_pass_by_hand_with_a_slow_link_and_contention() -> None:
    """Rank 1 sends at a third of the speed; all-to-alls start when both ranks are ready; a tenth of hidden time is lost."""
    work = made_work(merge_bytes=torch.zeros(2, 3, dtype=torch.float64))
    predicted = timeline(work, made_cluster(contention=0.1), Conditions(slow_links={1: 3.0}))
    forward, backward = predicted.forward, predicted.backward
    near = lambda rows: [pytest.approx(row, rel=1e-9) for row in rows]
    assert forward.transfer[0].tolist() == near([[0, 0, 21.25], [0, 0, 21.25]])
    assert forward.transfer[1].tolist() == near([[0, 7.25, 24.25], [0, 21.25, 28.25]])
    assert forward.compute[0].tolist() == near([[0, 7.25, 24.25], [0, 21.25, 28.25]])
    assert forward.compute[1].tolist() == near([[3.3, 12.55, 26.25], [4.4, 22.35, 34.25]])
    assert forward.total.tolist() == pytest.approx([26.25, 34.25]) and forward.after.tolist() == [0, 0] and forward.grad_return is None
    assert backward.transfer[1].tolist() == near([[0, 7.25, 24.25], [0, 21.25, 28.25]])
    assert backward.compute[0].tolist() == near([[0, 8.225, 24.25], [0, 21.25, 28.25]])
    assert backward.compute[1].tolist() == near([[8.225, 21.025, 29.75], [11, 24, 44.75]])
    assert backward.grad_return is not None
    assert backward.grad_return[0].tolist() == near([[0, 28.25, 70.5], [0, 28.25, 70.5]])
    assert backward.grad_return[1].tolist() == near([[0, 42.5, 75.5], [0, 70.5, 83.5]])
    assert backward.total.tolist() == pytest.approx([75.5, 83.5]) and backward.after.tolist() == pytest.approx([45.75, 38.75])
    assert predicted.seconds == pytest.approx(34.25 + 83.5)
    assert backward.exposed.tolist() == pytest.approx([75.5 - 26.525, 83.5 - 30.25])
    # K and V twice, and gradients of what was sent, in 4 bytes: inside the node and between nodes.
    assert predicted.bytes.tolist() == [[512 * (2 * 2 + 2 * 7), 512 * (2 * 7 + 2 * 2)], [512 * 2, 512 * 2]]
    chosen = predicted.select(torch.tensor([1, 1, 0]))
    assert chosen.forward.total.tolist() == pytest.approx([34.25, 34.25, 26.25]) and chosen.bytes[0].tolist() == [9216, 9216, 9216]
    assert chosen.backward.grad_return is not None and chosen.backward.grad_return[1][2].tolist() == pytest.approx([0, 42.5, 75.5])
    assert chosen.backward.after.tolist() == pytest.approx([38.75, 38.75, 45.75])


def test_an_all_to_all_waits_for_its_peers_only() -> None:
    peers = tuple((torch.tensor(a), torch.tensor(b)) for a, b in (([], []), ([0, 1], [3, 2]), ([2], [0])))
    work = made_work(
        ranks=4, rank=torch.arange(4), peers=peers, query_tiles=numbers(1, 1, 1, 1), full=torch.ones(4, 3, dtype=torch.float64),
        partial=torch.zeros(4, 3, dtype=torch.float64), received=torch.zeros(2, 4, 3), sent=torch.zeros(2, 4, 3),
    )  # fmt: skip
    simulation = PassSimulation(work, made_cluster(), Conditions())
    assert simulation._start(numbers(5, 2, 1, 9), 1).tolist() == [9, 2, 2, 9]
    assert simulation._start(numbers(5, 2, 1, 9), 2).tolist() == [5, 2, 5, 9]


def test_a_group_is_as_slow_as_its_slowest_member() -> None:
    work = made_work(degree=3)
    simulation = PassSimulation(work, made_cluster(), Conditions(stragglers={4: 5.0, 3: 7.0, 5: 2.0, 1: 0.5}, slow_links={2: 4.0}))
    assert simulation.compute_factor.tolist() == [1.0, 7.0] and simulation.link_factor.tolist() == [4.0, 1.0]
    with pytest.raises(ValueError, match="expected ranks below 6, got 6"):
        PassSimulation(work, made_cluster(), Conditions(stragglers={6: 2.0}))


SHAPE = Shape(batch=3, heads=5, kv_heads=5, head_dim=16)
KV, GRAD, ROWS = 320, 640, 2048  # bytes of a token's K and V in one batch row, of their gradients, elements of a query tile


def byte_work(**fields: Any) -> Workload:
    """Three ranks, of which one computes local KV alone; tokens are counted per batch row. The last step is empty in forward."""
    received, sent = torch.zeros(2, 2, 3, 4, dtype=torch.float64).unbind(0)
    received[0, :, 1:3], received[1, :, 1:3] = numbers([10, 20], [30, 40], [50, 60]), numbers([1, 2], [3, 4], [5, 6])
    sent[0, :, 1:3], sent[1, :, 1:3] = numbers([400, 11], [12, 13], [14, 15]), numbers([7, 8], [9, 10], [0, 1])
    usual: dict[str, Any] = {
        "ranks": 3,
        "rank": torch.arange(3),
        "shape": SHAPE,
        "query_tiles": numbers(13, 17, 6),
        "active_tiles": numbers([7, 5, 3, 0], [11, 0, 2, 0], [4, 0, 0, 0]),
        "full": numbers([1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0]),
        "partial": torch.zeros(3, 4, dtype=torch.float64),
        "received": received,
        "sent": sent,
        "gathered": numbers([0, 19, 23, 0], [0, 29, 31, 0], [0, 0, 0, 0]),
        "exchanges": numbers(0, 1, 1, 0),
        "local": numbers(90, 41, 8),
        "local_kv": numbers(100, 37, 5),
        "halves": numbers([[0.5, 0.5], [1, 0], [1, 0]], [[0, 0], [0, 0], [0, 0]], [[6, 4], [9, 0], [3, 0]]),
    }
    return made_work(**{**usual, **fields})


def test_bytes_of_the_engine_by_hand() -> None:
    """At a byte per second of memory, and kernels and links that take no time."""
    cluster = made_cluster(rate=1e40, hbm=1.0)
    predicted = timeline(byte_work(), cluster)
    near = lambda rows: [pytest.approx(row, rel=1e-6, abs=1e-3) for row in rows]
    local = [3 * n for n in (100, 37, 5)]  # of three batch rows
    # Forward: packs local KV and gathered tokens; all query tiles in the first and the last step; no write of 4 bytes in the last.
    assert spans(predicted.forward) == near([
        [2 * local[0] * KV + 13 * ROWS * 2, 2 * 19 * KV + 5 * ROWS * (4 + 2), 2 * 23 * KV + 13 * ROWS * 4, 0],
        [2 * local[1] * KV + 17 * ROWS * 2, 2 * 29 * KV, 2 * 31 * KV + 17 * ROWS * 4, 0],
        [2 * local[2] * KV, 0, 0, 0],
    ])  # fmt: skip
    converted = [every * ROWS * (4 + 2) + tokens * KV * (1 + 2) for every, tokens in zip((13, 17, 6), local, strict=True)]
    moved = lambda arrived, computes, left, tokens: arrived * (KV * computes + GRAD) + (left + 2 * min(left, tokens)) * GRAD
    # Backward: dQ is read and written in 4 bytes in place of one write of 2; delta and zeros in the first step.
    assert spans(predicted.backward) == near([
        [
            2 * local[0] * KV + 6 * ROWS * 6 + 13 * ROWS * 8,
            2 * 19 * KV + 5 * ROWS * 6 + moved(11, 1, 407, local[0]),
            2 * 23 * KV + 3 * ROWS * 6 + moved(22, 1, 19, local[0]),
            4 * ROWS * 6 + converted[0],
        ],
        [
            2 * local[1] * KV + 9 * ROWS * 6 + 17 * ROWS * 8,
            2 * 29 * KV + moved(33, 0, 21, local[1]),
            2 * 31 * KV + 2 * ROWS * 6 + moved(44, 1, 23, local[1]),
            converted[1],
        ],
        [2 * local[2] * KV + 3 * ROWS * 6 + 6 * ROWS * 8, moved(55, 0, 14, local[2]), moved(66, 0, 16, local[2]), converted[2]],
    ])  # fmt: skip


def test_a_straggler_computes_and_copies_so_many_times_slower() -> None:
    cluster = made_cluster(rate=1e40, hbm=1.0)
    usual, slow = (timeline(byte_work(), cluster, Conditions(stragglers=s)) for s in ({}, {1: 3.0}))
    for a, b in ((usual.forward, slow.forward), (usual.backward, slow.backward)):
        assert b.busy.tolist() == pytest.approx([float(a.busy[0]), 3 * float(a.busy[1]), float(a.busy[2])])


def test_a_joined_pass_packs_before_its_all_to_all_starts() -> None:
    """Step 0 packs 30 tokens of 512 bytes, reading and writing them, at 1024 bytes per second."""
    work = made_work(full=numbers([3, 5], [4, 1]), partial=torch.zeros(2, 2, dtype=torch.float64), received=numbers([[0, 2], [0, 7]],
        [[0, 0], [0, 0]]), sent=numbers([[0, 7], [0, 2]], [[0, 0], [0, 0]]), exchanges=numbers(0, 1), local=numbers(30, 10))  # fmt: skip
    joined = work.join()
    assert joined.full.tolist() == [[0, 8], [0, 5]] and joined.joined and work.full.tolist() == [[3, 5], [4, 1]]
    forward = timeline(joined, made_cluster(hbm=1024.0, contention=0.1)).forward
    assert forward.compute[1][:, 0].tolist() == pytest.approx([30, 10])
    assert forward.transfer[0][:, 1].tolist() == pytest.approx([30, 30]) and forward.transfer[1][:, 1].tolist() == pytest.approx(
        [37.25] * 2
    )
    assert forward.compute[1][:, 1].tolist() == pytest.approx([37.25 + 8, 37.25 + 5])


def test_transposes_by_hand() -> None:
    """Groups of 4 devices share 8 heads and 2 KV heads: each KV head goes to two of them. Three quarters of the bytes leave a device."""
    shape = Shape(batch=3, heads=8, kv_heads=2, head_dim=16)
    q, kv = 3 * 8 * 16 * 2, 2 * 3 * 2 * 16 * 2 * 2
    cluster = made_cluster(hbm=4096.0)
    for share in (0.0, 0.25, 1.0):
        work = made_work(degree=4, shape=shape, local_kv=numbers(7, 9), cross_node_share=share)
        simulation = PassSimulation(work, cluster, Conditions(slow_links={0: 2.0}))

        def seconds(per_query: int, per_key: int, share: float = share) -> list[float]:
            out = []
            for tokens, keys, factor in ((10, 7, 2), (20, 9, 1)):
                sent = (tokens * per_query + keys * per_key) * 3 / 4 * factor
                inside = sent * (1 - share) / 512 + (0.25 if share < 1 else 0)
                between = sent * share / 256 + (0.5 if share else 0)
                out.append(max(inside, between) + 4 * sent / 4096)
            return out

        (before, after), (before_backward, after_backward) = simulation._transposes(False), simulation._transposes(True)
        assert before.tolist() == pytest.approx(seconds(q, kv)) and after.tolist() == pytest.approx(seconds(q, 0))
        assert before_backward.tolist() == pytest.approx(seconds(3 * q, kv)) and after_backward.tolist() == pytest.approx(seconds(q, kv))
        # Six tensors of queries and two log-sum-exps; K and V twice, and gradients in 4 bytes, since ranks share KV heads.
        moved = [(tokens * (6 * q + 2 * 4 * 3 * 8) + keys * 4 * kv) * 3 / 4 for tokens, keys in ((10, 7), (20, 9))]
        assert simulation.transpose_bytes().tolist() == [pytest.approx([n * part for n in moved]) for part in (1 - share, share)]
    # A kind of link that carries nothing has no latency.
    slow = replace(cluster, inside=Link(bandwidth=512.0, latency=1e6), between=Link(bandwidth=256.0, latency=1e6))
    for share in (0.0, 1.0):
        work, used = made_work(degree=4, shape=shape, local_kv=numbers(7, 9), cross_node_share=share), "between" if share else "inside"
        one, both = (PassSimulation(work, replace(slow, **{used: getattr(c, used)}), Conditions()) for c in (cluster, slow))
        assert float(one._transposes(False)[0].max()) < 1e4 < 1e6 < float(both._transposes(False)[0].min())
    alone = PassSimulation(made_work(), cluster, Conditions())
    assert not alone.transpose_bytes().any() and alone.transpose_bytes().shape == (2, 2) and not alone._transposes(True)[0].any()


def test_local_kv_is_split_by_the_bytes_of_the_first_and_the_last_move() -> None:
    """Rank 0 moves 7 tokens of 2 bytes first and 1 of 4 bytes last; rank 1 computes no received KV."""
    work = made_work(full=numbers([8, 5, 2], [4, 0, 0]), partial=numbers([2, 1, 0], [6, 0, 0]), query_tiles=numbers(3, 9))
    share = 4 / (14 + 4)
    assert work.late_fraction.tolist() == [pytest.approx(share), 0.0]
    split = work.split()
    assert split.steps == 4 and split.full[1].tolist() == [4, 0, 0, 0] and split.partial[1].tolist() == [6, 0, 0, 0]
    assert split.full[0].tolist() == pytest.approx([8 * (1 - share), 5, 2, 8 * share])
    assert split.partial[0].tolist() == pytest.approx([2 * (1 - share), 1, 0, 2 * share])
    assert split.active_tiles is not None and split.active_tiles.tolist() == [[3, 3, 3, 3], [9, 9, 9, 0]]
    assert split.exchanges.tolist() == [0, 1, 2, 0] and split.received.shape == (2, 2, 4)


def test_a_step_at_the_end_is_added_and_removed_in_every_field() -> None:
    moves = BackwardMoves(numbers([0, 1, 2], [0, 1, 2])[None], numbers([0, 3, 4], [0, 3, 5])[None], None, numbers(0, 1, 1), ())
    pair = lambda n: (torch.tensor([n]), torch.tensor([n]))
    work = made_work(
        query_tiles=numbers([1, 2, 3], [4, 5, 6]), backward=moves, peers=(pair(0), pair(1), pair(2)), gathered=numbers([7, 8, 9], [1, 2, 3])
    )
    more = work.with_halves(torch.zeros(3, 2, 2, dtype=torch.float64))
    assert more.query_tiles.tolist() == [[1, 2, 3, 1], [4, 5, 6, 4]] and more.full.tolist() == [[3, 5, 2, 0], [4, 1, 6, 0]]
    assert more.backward is not None and more.backward.received[0, 0].tolist() == [0, 1, 2, 0] and more.backward.gathered is None
    assert more.backward.peers == () and len(more.peers) == 4 and more.peers[3][0].tolist() == [0]
    assert more.gathered is not None and more.gathered[0].tolist() == [7, 8, 9, 0]
    back = more.with_backward_moves()
    assert back.backward is None and back.sent[0, 1].tolist() == [0, 3, 5, 0] and back.exchanges.tolist() == [0, 1, 1, 0]
    joined = more.join()
    assert joined.steps == 3 and joined.query_tiles.tolist() == [[1, 2, 3], [4, 5, 6]] and joined.halves is None
    assert (
        joined.gathered is not None
        and joined.gathered.tolist() == [[7, 8, 9], [1, 2, 3]]
        and joined.full.tolist() == [[0, 8, 2], [0, 5, 6]]
    )


def test_query_tiles_of_a_joined_step_see_either_kv() -> None:
    joined = made_work(active_tiles=numbers([4, 3, 1], [2, 6, 5])).join()
    assert joined.active_tiles is not None and joined.active_tiles.tolist() == [[0, 4, 1], [0, 6, 5]]


def test_places_of_ranks_and_the_share_of_a_transpose_that_crosses_nodes() -> None:
    place = Placement(per_node=4, stride=3, degree=3, member_stride=2)
    assert place.node(torch.arange(5)).tolist() == [0, 0, 1, 2, 3] and place.cross_node_share == 0.5  # devices 0, 2 and 4
    assert Placement(per_node=4).cross_node_share == 0.0 and Placement(per_node=1, degree=4).cross_node_share == 1.0


def test_edges_of_a_mask_are_local_first_and_leave_no_full_tiles_where_all_are_crossed() -> None:
    area, useful = torch.tensor([[1.0, 2.0, 0.0], [4.0, 2.0, 6.0]]), torch.tensor([1.5, 7.0])
    full, partial = _full_and_partial(area, useful, torch.ones(2))
    assert full.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.5, 1.5]]  # 1.5 and 5 unused: 0.5 and 2 of them local, the others by area
    assert partial.tolist() == [[1.0, 2.0, 0.0], [4.0, 1.5, 4.5]]
    full, partial = _full_and_partial(area[1:], useful[1:], torch.tensor([4.0]))  # an edge crosses 4 of the 16 tiles of a unit
    assert partial.tolist() == [[1.0, 0.375, 1.125]] and full.tolist() == [[1.5, 1.0625, 3.1875]]


def test_local_kv_has_as_many_bytes_whether_tokens_count_one_batch_row_or_all() -> None:
    cluster = made_cluster(rate=1e40, hbm=1.0)
    one, every = (timeline(byte_work(scale=scale), cluster) for scale in (1, 3))
    assert spans(every.forward)[2] == pytest.approx(spans(one.forward)[2])
    assert every.backward.compute[1][:, 0].tolist() == pytest.approx(one.backward.compute[1][:, 0].tolist())
