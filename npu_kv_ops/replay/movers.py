"""Two ways to move blocks between the pools, behind one interface.

Both run what the engine asks for in three lanes (computing, loads, stores) which overlap, except
where two jobs touch the same block of either pool: those run in the order of the calls.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .ordering import Lane, LaneOrder
from .pools import Move

if TYPE_CHECKING:
    import torch

    from npu_kv_ops import CopyBackendStats, TransferEvent

Backend = Literal["eager", "scheduler"]

_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Traffic:
    """What was moved so far.

    Attributes:
        calls: of the operator, or jobs launched.
        h2d_bytes: bytes loaded; `d2h_bytes` stored.
        copies_before: blocks times tensors; `copies_after` merging neighbours.
        call_us: how long each call kept the caller, in microseconds.
        lanes: what the copy backend counted; None without it.
    """

    calls: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    copies_before: int = 0
    copies_after: int = 0
    call_us: list[float] = field(default_factory=list)
    lanes: CopyBackendStats | None = None


def npu() -> Any:
    """`torch.npu`, which only torch_npu knows."""
    import torch_npu

    return torch_npu.npu


class Mover(ABC):
    """Loads and stores blocks, and keeps them in order with computing. Not thread-safe."""

    def __init__(
        self, device_tensors: Sequence[torch.Tensor], host_tensors: Sequence[torch.Tensor]
    ) -> None:
        self._device_tensors = list(device_tensors)
        self._host_tensors = list(host_tensors)
        self._device = device_tensors[0].device
        self._order = LaneOrder(len(device_tensors[0]), len(host_tensors[0]))
        self._call_us: list[float] = []
        if self._device.type == "npu":
            # What has made the pools is on a stream for which the movers' do not wait.
            npu().synchronize(self._device)

    def load(self, moves: Sequence[Move]) -> None:
        """Copies from the host pool to the device pool, with one call; `moves` may be empty."""
        self._move(Lane.LOAD, moves)

    def store(self, moves: Sequence[Move]) -> None:
        """Copies from the device pool to the host pool, with one call; `moves` may be empty."""
        self._move(Lane.STORE, moves)

    @abstractmethod
    def compute(self, device_blocks: Sequence[int]) -> AbstractContextManager[Any]:
        """Makes the stream current on which `device_blocks` may be read and written.

        Behind all earlier moves of these blocks, and before all later ones. Gives the event that is
        recorded at the end of the `with` block, None on the host, where nothing is asynchronous.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything is done.

        Raises:
            TransferError: a move failed.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """What was moved so far, complete after `synchronize` or `close`."""

    @abstractmethod
    def close(self) -> None:
        """Ends what runs in the background; nothing may be moved afterwards."""

    @abstractmethod
    def _launch(
        self, lane: Lane, device_blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> None: ...

    def _move(self, lane: Lane, moves: Sequence[Move]) -> None:
        if moves:
            self._launch(
                lane, [move.device_block for move in moves], [move.host_block for move in moves]
            )

    def _call(self, call: Callable[..., object], *arguments: object) -> None:
        start = time.perf_counter_ns()
        call(*arguments)
        self._call_us.append((time.perf_counter_ns() - start) / 1000)


class EagerMover(Mover):
    """`torch.ops.npu_kv.swap_blocks_batch`, called on a stream for each lane.

    On the host there are no streams: copies are done when the call returns.
    """

    def __init__(
        self, device_tensors: Sequence[torch.Tensor], host_tensors: Sequence[torch.Tensor]
    ) -> None:
        import torch

        from npu_kv_ops import ops

        super().__init__(device_tensors, host_tensors)
        self._swap = torch.ops.npu_kv.swap_blocks_batch
        self._ids = torch.tensor
        self._stats = ops.stats
        self._bytes = dict.fromkeys(Lane, 0)
        self._copies_before = self._copies_after = 0
        self._streams: list[Any] = []
        if self._device.type == "npu":
            self._streams = [npu().Stream(self._device) for _ in Lane]

    def compute(self, device_blocks: Sequence[int]) -> AbstractContextManager[Any]:
        """See `Mover`; the stream waits for the events of the other two."""
        return self._on(Lane.COMPUTE, device_blocks, ())

    def _launch(self, lane: Lane, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        device = (self._device_tensors, self._ids(device_blocks))
        host = (self._host_tensors, self._ids(host_blocks))
        (src, src_ids), (dst, dst_ids) = (host, device) if lane is Lane.LOAD else (device, host)
        before = self._stats()
        with self._on(lane, device_blocks, host_blocks):
            self._call(self._swap, src, dst, src_ids, dst_ids)
        after = self._stats()
        self._bytes[lane] += after.bytes - before.bytes
        self._copies_before += after.copies_before - before.copies_before
        self._copies_after += after.copies_after - before.copies_after

    @contextlib.contextmanager
    def _on(
        self, lane: Lane, device_blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> Iterator[Any]:
        if not self._streams:
            yield None
            return
        stream = self._streams[lane]
        for earlier in self._order.begin(lane, device_blocks, host_blocks).values():
            stream.wait_event(earlier)
        event = npu().Event()
        with npu().stream(stream):
            yield event
        event.record(stream)
        self._order.end(lane, event)

    def synchronize(self) -> None:
        """See `Mover`; all three streams."""
        for stream in self._streams:
            stream.synchronize()

    def traffic(self) -> Traffic:
        """See `Mover`; taken from the counters of the operator."""
        return Traffic(
            len(self._call_us),
            self._bytes[Lane.LOAD],
            self._bytes[Lane.STORE],
            self._copies_before,
            self._copies_after,
            self._call_us,
        )

    def close(self) -> None:
        """Does nothing: copies are in the hands of the streams."""


class SchedulerMover(Mover):
    """`NPUDmaCopyBackend`: a job for each call, launched by the backend's thread.

    The backend keeps loads and stores in order with each other. Order with computing is made here:
    a job runs behind the event of the last computing on its blocks, and computing waits for the
    transfer events of its blocks. On the host computing is done at once and needs no event.
    """

    def __init__(
        self, device_tensors: Sequence[torch.Tensor], host_tensors: Sequence[torch.Tensor]
    ) -> None:
        from npu_kv_ops import NPUDmaCopyBackend

        super().__init__(device_tensors, host_tensors)
        self._backend = NPUDmaCopyBackend()
        self._backend.init(self._device_tensors, self._host_tensors)
        self._stream = npu().Stream(self._device) if self._device.type == "npu" else None
        self._under_way: list[tuple[int, TransferEvent]] = []

    @contextlib.contextmanager
    def compute(self, device_blocks: Sequence[int]) -> Iterator[Any]:
        """See `Mover`; the stream waits for the transfer events of the blocks."""
        for transfer in self._order.begin(Lane.COMPUTE, device_blocks, ()).values():
            transfer.wait(self._stream)
        event = None
        if self._stream is None:
            yield event
        else:
            event = npu().Event()
            with npu().stream(self._stream):
                yield event
            event.record(self._stream)
        self._order.end(Lane.COMPUTE, event)

    def _launch(self, lane: Lane, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        # Raises the error of a job that has failed in the meantime.
        self._under_way = [entry for entry in self._under_way if not entry[1].query()]
        computed = self._order.begin(lane, device_blocks, host_blocks).get(Lane.COMPUTE)
        is_store = lane is Lane.STORE
        src, dst = (device_blocks, host_blocks) if is_store else (host_blocks, device_blocks)
        number = len(self._call_us)
        self._call(self._backend.launch_copy, src, dst, is_store, number, self._under_way, computed)
        self._order.end(lane, self._under_way[-1][1])

    def synchronize(self) -> None:
        """See `Mover`; also every transfer that is under way."""
        if self._stream is not None:
            self._stream.synchronize()
        for _, transfer in self._under_way:
            transfer.synchronize()
        self._under_way = []

    def traffic(self) -> Traffic:
        """See `Mover`; taken from the counters of the backend."""
        stats = self._backend.stats()
        loads, stores = stats.loads, stats.stores
        return Traffic(
            len(self._call_us),
            loads.bytes,
            stores.bytes,
            loads.copies_before + stores.copies_before,
            loads.copies_after + stores.copies_after,
            self._call_us,
            stats,
        )

    def close(self) -> None:
        """Shuts the backend down; gives up on transfers that do not end."""
        # Only after a failure is there anything left to wait for, and then that is the news.
        with contextlib.suppress(TimeoutError):
            self._backend.shutdown(_CLOSE_SECONDS)


MOVERS: dict[Backend, type[EagerMover] | type[SchedulerMover]] = {
    "eager": EagerMover,
    "scheduler": SchedulerMover,
}
