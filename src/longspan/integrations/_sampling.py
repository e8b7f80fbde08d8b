"""The samples that a rank reads.

Ranks that share a sequence read the same samples. Groups of such ranks, "data ranks", read different ones. All data ranks make equally many
steps: a step contains collective calls of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler


class TrainBatches(BatchSampler):
    """Batches of `batch_size` samples for one of `data_ranks` data ranks, in a new order each epoch if `shuffle` is True.

    If `data_ranks` does not divide the number of samples, some are read twice in an epoch. The order depends on seed and epoch only.
    """

    def __init__(self, data: Any, batch_size: int, *, data_ranks: int, data_rank: int, shuffle: bool, seed: int, drop_last: bool) -> None:
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            data, num_replicas=data_ranks, rank=data_rank, shuffle=shuffle, seed=seed
        )
        super().__init__(self._sampler, batch_size, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self._sampler.set_epoch(epoch)


class EvalBatches(Sampler[list[int]]):
    """The batches that one process would read, dealt to `data_ranks` data ranks in turn.

    weights: the number of samples of each batch of this data rank. A data rank that would have fewer batches than others reads the first
    batch again, with weight 0.
    """

    def __init__(self, samples: int, batch_size: int, *, data_ranks: int, data_rank: int, drop_last: bool) -> None:
        batches = [list(range(first, min(first + batch_size, samples))) for first in range(0, samples, batch_size)]
        batches = [batch for batch in batches if len(batch) == batch_size or not drop_last]
        steps = -(-len(batches) // data_ranks)
        local = [batches[i] if i < len(batches) else [] for i in range(data_rank, steps * data_ranks, data_ranks)]
        self.weights = [len(batch) for batch in local]
        self._batches = [batch or batches[0] for batch in local]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class EpochLoader(DataLoader[Any]):
    """A DataLoader with the `set_epoch` that trainers call, which it passes to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch to the batch sampler, if it has an order per epoch."""
        set_epoch = getattr(self.batch_sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
