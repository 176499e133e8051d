"""The stream of tasks: all of them once per epoch, in an order fixed by (seed, epoch), for ever; its position can be saved.

Built on torchdata's `StatefulDataLoader`, in this process (no workers). Its own shuffling is not used: after a resume the
next epoch would come in another order (measured with torchdata 0.11). The sampler here is keyed on (seed, epoch) instead and
holds the whole position. This is the one file of the room that imports torch, and only when a stream is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from segue.episode import Task


class EpochSampler:
    """Indices 0 … n − 1, each once per epoch. `position` of them have been taken in epoch `epoch`."""

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        self._n = n
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[int]:
        """The rest of the current epoch; the next call gives the next epoch."""
        order = self.order(self.epoch)
        while self.position < self._n:
            self.position += 1
            yield order[self.position - 1]
        self.epoch += 1
        self.position = 0

    def order(self, epoch: int) -> list[int]:
        """The order of an epoch."""
        if not self._shuffle:
            return list(range(self._n))
        return [int(i) for i in np.random.default_rng((self._seed, epoch)).permutation(self._n)]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]
        self.position = state["position"]


class TaskStream:
    """Endless tasks. `state` after any number of `take`s, given to `restore`, makes a new stream go on exactly there."""

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        assert tasks, "a stream needs a task"
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13
        sampler: Any = EpochSampler(len(tasks), seed, shuffle)
        self._loader: Any = StatefulDataLoader(list(tasks), batch_size=None, sampler=sampler, num_workers=0, collate_fn=_as_it_is)
        self._tasks: Iterator[Task] | None = None

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        taken: list[Task] = []
        while len(taken) < count:
            if self._tasks is None:
                self._tasks = iter(self._loader)
            task = next(self._tasks, None)
            if task is None:
                self._tasks = None
            else:
                taken.append(task)
        return taken

    def state(self) -> dict[str, Any]:
        """The position, JSON-like."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a position that `state` gave. Before the first `take`."""
        assert self._tasks is None, "only a new stream can be restored"
        self._loader.load_state_dict(state)


def _as_it_is(task: Task) -> Task:
    return task
