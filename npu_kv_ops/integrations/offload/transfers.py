"""The transfers of one direction, in the order in which they were launched."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_kv_ops.copy_backend import NPUDmaCopyBackend, TransferEvent
from npu_kv_ops.errors import TransferError

if TYPE_CHECKING:
    import torch

__all__ = ["Transfer", "TransferLane"]


@dataclass(slots=True)
class Transfer:
    """The blocks of one direction of one engine step.

    Attributes:
        event_idx: the scheduler's number of it, rising within a direction.
        device_blocks: ids in the device pool.
        host_blocks: ids in the host pool, as many.
        launched_at: on the clock of ``time.monotonic``.
        error: why it failed; None while it runs and when it went well.
        seconds: from the launch to the poll that saw its end.
        attempts: launches so far.
    """

    event_idx: int
    device_blocks: list[int]
    host_blocks: list[int]
    launched_at: float
    error: Exception | None = None
    seconds: float = 0.0
    attempts: int = 0


class TransferLane:
    """Launches the transfers of one direction and reports each of them once, in order.

    Attributes:
        running: transfers that have not been reported, with their events; only to look at.

    Not thread-safe: vLLM calls a connector on one thread.
    """

    def __init__(self, *, is_store: bool) -> None:
        self._is_store = is_store
        self._launched = -1  # the highest event_idx so far
        # What the backend appends to. A transfer that was refused has no event.
        self._events: list[tuple[int, TransferEvent]] = []
        self.running: deque[tuple[Transfer, TransferEvent | None]] = deque()

    def launch(
        self,
        backend: NPUDmaCopyBackend | None,
        event_idx: int,
        device_blocks: list[int],
        host_blocks: list[int],
        after: torch.Event | None,
    ) -> None:
        """Queue a transfer behind ``after``.

        Does nothing when ``event_idx`` was launched before: a step may offer its transfers twice.
        One without blocks, or without a backend, has ended at once.
        Ids are checked against both pools before anything is queued. A transfer with a wrong one,
        or that the backend refuses otherwise, copies nothing and fails like one that fails on the
        device: the engine goes on, without these blocks.
        """
        if event_idx <= self._launched:
            return
        self._launched = event_idx
        self._start(backend, Transfer(event_idx, device_blocks, host_blocks, 0.0), after)

    def launch_again(
        self, backend: NPUDmaCopyBackend, transfer: Transfer, after: torch.Event | None
    ) -> None:
        """Queue a transfer that was reported as failed once more, behind all that run."""
        transfer.error = None
        self._start(backend, transfer, after)

    def _start(
        self, backend: NPUDmaCopyBackend | None, transfer: Transfer, after: torch.Event | None
    ) -> None:
        transfer.attempts += 1
        transfer.launched_at = time.monotonic()
        event = None
        source, target = transfer.device_blocks, transfer.host_blocks
        if not self._is_store:
            source, target = target, source
        if backend is not None and (source or target):
            try:
                backend.launch_copy(
                    source, target, self._is_store, transfer.event_idx, self._events, after
                )
                event = self._events[-1][1]
            except (IndexError, ValueError, RuntimeError) as error:
                transfer.error = error
        self.running.append((transfer, event))

    def poll(self) -> list[Transfer]:
        """Return the transfers that have ended since the last call; never waits.

        A transfer is reported behind those launched before it.
        """
        ended: list[Transfer] = []
        while self.running:
            transfer, event = self.running[0]
            if event is not None:
                try:
                    if not event.query():
                        break
                except TransferError as error:
                    transfer.error = error
                del self._events[0]
            self.running.popleft()
            transfer.seconds = time.monotonic() - transfer.launched_at
            ended.append(transfer)
        return ended

    def clear(self) -> None:
        """Forget all transfers, and with their events the backend."""
        self._events.clear()
        self.running.clear()
