"""Which earlier work a copy must wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockOrder:
    """Remembers, for each block of a pool, the last job of each lane that touched it.

    A lane is a stream: jobs of one lane run in order, jobs of different lanes run whenever they
    like. A new job must wait for the last job of every *other* lane that touched one of its blocks.
    Job numbers count up from 1 within a lane; 0 means none. Not thread-safe.
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
