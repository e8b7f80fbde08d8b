"""Which samples a rank reads. Ranks that share a sequence read the same; groups of such ranks, "data ranks", different ones.

All data ranks make the same number of steps: a step holds collectives of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler


class TrainBatches(BatchSampler):
    """Batches of `rows` samples for one of `groups` data ranks, in another order in each epoch where `shuffle` is True.

    Where samples do not divide by data ranks, some are read twice in an epoch. The order depends on seed and epoch alone.
    """

    def __init__(self, data: Any, rows: int, *, groups: int, group: int, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.places: DistributedSampler[Any] = DistributedSampler(data, num_replicas=groups, rank=group, shuffle=shuffle, seed=seed)
        super().__init__(self.places, rows, drop_last)

    def set_epoch(self, epoch: int) -> None:
        self.places.set_epoch(epoch)


class EvalBatches(Sampler[list[int]]):
    """The batches that one process would read, each by one of `groups` data ranks in turn.

    weights: samples of each batch of this data rank. Where batches run out, the first one is read again, with weight 0.
    """

    def __init__(self, length: int, rows: int, *, groups: int, group: int, drop_last: bool) -> None:
        whole = [list(range(first, min(first + rows, length))) for first in range(0, length, rows)]
        whole = [batch for batch in whole if len(batch) == rows or not drop_last]
        mine = [whole[i] if i < len(whole) else [] for i in range(group, -(-len(whole) // groups) * groups, groups)]
        self.weights = [len(batch) for batch in mine]
        self._batches = [batch or whole[0] for batch in mine]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class EpochLoader(DataLoader[Any]):
    """A DataLoader that tells its batch sampler of a new epoch, as trainers expect it of their loaders."""

    def set_epoch(self, epoch: int) -> None:
        tell = getattr(self.batch_sampler, "set_epoch", None)
        if tell is not None:
            tell(epoch)
