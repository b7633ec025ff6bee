"""Which earlier work a copy must wait for."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_KEPT_EVENTS = 64


class Lane(enum.IntEnum):
    """What runs in order among its own kind: a stream, or a lane of the copy backend."""

    COMPUTE = 0
    LOAD = 1
    STORE = 2


class BlockOrder:
    """Remembers, for each block of a pool, the last job of each lane that touched it.

    Jobs of one lane run in order, jobs of different lanes run whenever they like. A new job must
    wait for the last job of every *other* lane that touched one of its blocks. Job numbers count up
    from 1 within a lane; 0 means none. Not thread-safe.
    """

    def __init__(self, lanes: int, blocks: int) -> None:
        self._last: npt.NDArray[np.int64] = np.zeros((lanes, blocks), dtype=np.int64)

    def add(self, lane: int, job: int, blocks: Sequence[int]) -> list[int]:
        """Enters `job` of `lane`, which touches `blocks`.

        Returns:
            for each lane the job to wait for, 0 for none and for `lane` itself.
        """
        ids = np.asarray(blocks, dtype=np.int64)
        if ids.size == 0:
            return [0] * len(self._last)
        waits = self._last[:, ids].max(axis=1)
        waits[lane] = 0
        self._last[lane, ids] = job
        return [int(job_number) for job_number in waits]


class LaneOrder:
    """The order of jobs that touch the same block of either pool, as events to wait for.

    Not thread-safe.
    """

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        lanes = len(Lane)
        self._orders = (BlockOrder(lanes, device_blocks), BlockOrder(lanes, host_blocks))
        self._jobs = [0] * lanes
        self._events: list[deque[tuple[int, Any]]] = [deque(maxlen=_KEPT_EVENTS) for _ in Lane]
        self._waited = [[0] * lanes for _ in Lane]

    def begin(
        self, lane: Lane, device_blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> dict[Lane, Any]:
        """Enters the next job of `lane`; `end` must follow before that of another one.

        Returns:
            by lane the event that the job has to wait for, and that no job of `lane` before it has
            waited for.
        """
        self._jobs[lane] += 1
        needed = [0] * len(Lane)
        for order, blocks in zip(self._orders, (device_blocks, host_blocks)):
            needed = list(map(max, needed, order.add(lane, self._jobs[lane], blocks)))
        events: dict[Lane, Any] = {}
        for other, job in zip(Lane, needed):
            if job > self._waited[lane][other]:
                # A later job of that lane will do where the event is no longer kept.
                kept, event = next(e for e in self._events[other] if e[0] >= job)
                self._waited[lane][other] = kept
                events[other] = event
        return events

    def end(self, lane: Lane, event: Any) -> None:
        """Keeps the event behind the job of `lane` that `begin` entered last."""
        self._events[lane].append((self._jobs[lane], event))
