"""The copy backend: block copies launched by a scheduler thread, for engines that go on meanwhile.

Importing this module loads torch and the libraries of the package; see :mod:`npu_kv_ops.runtime`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from npu_kv_ops import runtime, simulator

runtime.load()

import torch  # noqa: E402

from npu_kv_ops import _C  # noqa: E402
from npu_kv_ops.copy_pools import (  # noqa: E402
    Caches,
    CopyPools,
    block_ids,
    npu,
    pools,
    stream_id,
    timeout_seconds,
)
from npu_kv_ops.copy_trace import MOST_JOBS, write_trace  # noqa: E402

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    BlockIds: TypeAlias = (
        list[int] | tuple[int, ...] | npt.NDArray[np.int32] | npt.NDArray[np.int64] | torch.Tensor
    )

__all__ = [
    "CopyBackendStats",
    "CopyTrace",
    "LaneStats",
    "NPUDmaCopyBackend",
    "TransferEvent",
    "TransferGraph",
]

# How long the end of the interpreter, or of an object that was not shut down, waits for copies.
_EXIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class LaneStats:
    """One direction of a backend since its start. Jobs, bytes and copies count when they are done.

    Attributes:
        jobs: jobs that are done.
        failures: jobs that failed.
        bytes: bytes of the jobs that are done.
        copies_before: blocks, counted for every tensor.
        copies_after: the copies that neighbouring blocks were merged into.
        hazards: jobs that were held behind one of the other direction because of a common block.
        queued: jobs that are not launched yet.
        in_flight: jobs that are launched and not done.
        peak_depth: the most jobs that were queued and in flight at once.
        launch_us_p50: microseconds from the begin of ``launch_copy`` to when the first copies are
            handed to the runtime. All quantiles are exact to a sixteenth.
        launch_us_p99: likewise.
        completion_us_p50: microseconds from there to when completion was seen.
        completion_us_p99: likewise.
    """

    jobs: int
    failures: int
    bytes: int
    copies_before: int
    copies_after: int
    hazards: int
    queued: int
    in_flight: int
    peak_depth: int
    launch_us_p50: float
    launch_us_p99: float
    completion_us_p50: float
    completion_us_p99: float


@dataclass(frozen=True)
class CopyBackendStats:
    """Both directions of a backend."""

    loads: LaneStats
    stores: LaneStats

    @property
    def queue_depth(self) -> int:
        """Jobs that are not done yet."""
        return sum(lane.queued + lane.in_flight for lane in (self.loads, self.stores))

    @property
    def failures(self) -> int:
        """Jobs that failed."""
        return self.loads.failures + self.stores.failures


class TransferEvent:
    """The completion of one job. Every method may be called from any thread.

    Made by :meth:`NPUDmaCopyBackend.launch_copy`. It exists from the moment of the call, so waiting
    for it also waits for a job that is still queued. Keeps the pools alive.
    """

    __slots__ = ("_backend", "_core", "_pid")

    def __init__(self, core: _C.CopyEvent, backend: NPUDmaCopyBackend) -> None:
        self._core = core
        self._backend = backend
        self._pid = backend._pid

    def query(self) -> bool:
        """Return whether the job is done, without waiting.

        Raises:
            TransferError: the job failed.
        """
        _check_process(self._pid)
        return self._core.query()

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the job is done.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TransferError: the job failed.
            TimeoutError: the job is not done yet.
        """
        _check_process(self._pid)
        if not self._core.synchronize(timeout_seconds(timeout)):
            raise TimeoutError(f"the transfer is not done after {timeout} s")

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make ``stream`` (None: the current one of the backend's device) wait for the job.

        Does not block the caller when torch_npu's task queue is on. Between host pools, where there
        are no streams, it waits for the job.

        Raises:
            TransferError: the job has failed already. A failure that comes later is not seen by the
                stream, which then goes on: call :meth:`query` or :meth:`synchronize` as well.
            RuntimeError: the stream captures a graph, which cannot wait for work outside of it.
            ValueError: a stream of another device.
        """
        _check_process(self._pid)
        device = self._backend.device
        if device.type == "cpu":
            stream_id("stream", stream, device)
            self._core.synchronize(None)
            return
        chosen = npu.current_stream(device) if stream is None else stream
        self._core.wait(stream_id("stream", chosen, device))

    def elapsed_time(self, other: TransferEvent) -> float:
        """Return the milliseconds from the completion of this job to that of ``other``.

        By the clock of the device (on the simulated runtime the virtual one); between host pools by
        the host's.

        Raises:
            RuntimeError: one of them is not done, or the runtime keeps no time.
        """
        _check_process(self._pid)
        if not isinstance(other, TransferEvent):
            raise TypeError(f"other is a {type(other).__name__}, allowed is TransferEvent")
        elapsed = self._core.elapsed_ms(other._core)
        if elapsed is None:
            raise RuntimeError(
                "elapsed_time: both transfers have to be done, on a runtime with a clock"
            )
        return elapsed


class TransferGraph:
    """A transfer that :meth:`NPUDmaCopyBackend.capture` recorded, to be launched many times.

    Immutable. Its runtime graph is destroyed with it, or when the last job of it has ended.
    """

    __slots__ = ("_backend", "_plan", "is_store")

    def __init__(self, plan: _C.CopyPlan, backend: NPUDmaCopyBackend, is_store: bool) -> None:
        self._plan = plan
        self._backend = backend
        self.is_store = is_store

    def __len__(self) -> int:
        """Return the number of pairs."""
        return self._plan.pairs


class CopyTrace:
    """A running :meth:`NPUDmaCopyBackend.trace`; :meth:`stop` or a ``with`` block ends it.

    Not thread-safe.
    """

    def __init__(self, core: _C.CopyBackend, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8"):
            pass  # one that cannot be written is found now
        self.path = path
        self._core = core
        self._pid = os.getpid()
        self._running = True
        self._timeline = contextlib.ExitStack()
        self._tasks: list[simulator.TaskRecord] = []
        if simulator.is_active():
            self._tasks = self._timeline.enter_context(simulator.timeline())
        core.start_trace(MOST_JOBS)

    def stop(self) -> None:
        """Write the file, without jobs that are not done yet. Does nothing the second time."""
        _check_process(self._pid)
        if not self._running:
            return
        self._running = False
        self._timeline.close()
        write_trace(self.path, self._core.stop_trace(), self._tasks, self._core.stream_handles())

    def __enter__(self) -> CopyTrace:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class NPUDmaCopyBackend:
    """Copies blocks between a device pool and a host pool on a scheduler thread of its own.

    The names and arguments are those of vLLM-Ascend's class of this name. Stores (device to host)
    and loads (host to device) run in order, each on a stream of its own; jobs of different
    directions that share a block, in either pool, run in the order in which they were launched.

    Every method may be called from any thread. A ``with`` block shuts the backend down at its end.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._core: _C.CopyBackend | None = None
        self._pools: CopyPools | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._trace: CopyTrace | None = None
        self._pid = os.getpid()

    def init(
        self,
        npu_caches: Caches,
        cpu_caches: Caches,
        device: torch.device | str | int | None = None,
        load_stream: torch.Stream | None = None,
        store_stream: torch.Stream | None = None,
    ) -> None:
        """Take over the pools and start the scheduler thread.

        Args:
            npu_caches: name -> tensor ``[num_blocks, ...]``, or a list of tensors; all on one NPU,
                or all on the CPU (then both pools are in host memory and there are no streams). A
                block's payload is contiguous, as in ``swap_blocks_batch``.
            cpu_caches: the same keys (or as many tensors) on the CPU, with the same payload bytes
                and dtypes, and any number of blocks. In page-locked memory, or copies are
                synchronous (a warning says so).
            device: that of ``npu_caches``; None takes it from them.
            load_stream: the stream for loads; None makes one, of the lowest priority.
            store_stream: likewise for stores.

        The pools are kept alive until :meth:`shutdown`, and by events and graphs that live longer.

        Raises:
            ValueError: pools that do not fit or share memory, a stream of another device.
            TypeError: something that is not a tensor, differing dtypes.
            RuntimeError: called twice.
            TransferError: the runtime has no stream or context for the thread.
        """
        _check_process(self._pid)
        if self._core is not None:
            raise RuntimeError("NPUDmaCopyBackend.init was called before; make another backend")
        checked = pools(npu_caches, cpu_caches, device)
        self.device = checked.device
        index = -1 if self.device.type == "cpu" else self.device.index
        streams = (
            stream_id("load_stream", load_stream, self.device),
            stream_id("store_stream", store_stream, self.device),
        )
        if index >= 0:
            checked.warn_of_pageable(stacklevel=2)
        core = _C.CopyBackend(index, *checked.layouts(), *streams)
        self._core = core
        self._pools = checked
        held = (checked, load_stream, store_stream)  # what the thread uses
        self._finalizer = weakref.finalize(self, _finish, core, os.getpid(), held)
        _running[core] = self._finalizer

    def launch_copy(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, TransferEvent]],
        wait_event: torch.Event | None = None,
    ) -> None:
        """Queue one job and return.

        Args:
            src_blocks: ids of the blocks to read; list or tuple of int, or a 1-D int32 or int64
                array or CPU tensor. A negative id in either list skips the pair.
            dst_blocks: ids of the blocks to write, as many.
            is_store: True copies from the device pool to the host pool, False the other way.
            event_idx: what the job is called in ``events_list`` and in messages.
            events_list: gets ``(event_idx, TransferEvent)`` before this returns.
            wait_event: an event of ``torch.npu`` behind whose latest record the copies run, or None
                when nothing the device is doing matters to them. It may be recorded again at once.
                Between host pools it is not looked at: what the CPU has computed is there.

        Raises:
            IndexError: an id beyond its pool.
            ValueError: lists of different length, a destination named twice.
            TypeError: ids or an event of another kind.
            RuntimeError: before ``init``, after ``shutdown``, in a forked child, or with a
                ``wait_event`` while the current stream captures a graph.

        When it raises, nothing was queued and ``events_list`` is as it was.
        """
        core = self._live()
        append = events_list.append
        _check_is_store(is_store)
        event = core.launch(
            block_ids("src_blocks", src_blocks),
            block_ids("dst_blocks", dst_blocks),
            is_store,
            event_idx,
            self._raw_event(wait_event),
        )
        append((event_idx, TransferEvent(event, self)))

    def capture(self, src_blocks: BlockIds, dst_blocks: BlockIds, is_store: bool) -> TransferGraph:
        """Record a transfer as a graph of the runtime, for :meth:`launch_graph`.

        Between host pools, which have no graphs, the ids are checked and merged once.

        Raises:
            What :meth:`launch_copy` raises.
            ValueError: a host tensor is not page-locked.
            TransferError: the runtime cannot capture, or a graph cannot hold so many copies.
        """
        core = self._running()
        _check_is_store(is_store)
        plan = core.plan(
            block_ids("src_blocks", src_blocks), block_ids("dst_blocks", dst_blocks), is_store
        )
        if self.device.type != "cpu" and self._pools is not None:
            pageable = self._pools.pageable()
            if pageable is not None:
                raise ValueError(
                    f"cpu_caches[{pageable}] is in page-able memory, which a graph cannot copy; "
                    "npu_kv_ops.host_mirror makes page-locked pools"
                )
        return TransferGraph(core.capture(plan), self, is_store)

    def launch_graph(
        self,
        graph: TransferGraph,
        event_idx: int,
        events_list: list[tuple[int, TransferEvent]],
        wait_event: torch.Event | None = None,
    ) -> None:
        """Queue the transfer of ``graph`` once more; otherwise as :meth:`launch_copy`.

        Raises:
            ValueError: the graph was recorded by another backend.
            TypeError, RuntimeError: as :meth:`launch_copy`.
        """
        core = self._live()
        if graph._backend is not self:
            raise ValueError("graph was recorded by another backend, whose pools it copies")
        append = events_list.append
        event = core.submit(graph._plan, event_idx, self._raw_event(wait_event))
        append((event_idx, TransferEvent(event, self)))

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until every job launched so far is done or has failed. Tells of no failure.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        if not self._live().drain(timeout_seconds(timeout)):
            raise TimeoutError(f"transfers are not done after {timeout} s")

    def stats(self) -> CopyBackendStats:
        """Return the counters. Works after :meth:`shutdown` as well."""
        core = self._live()
        return CopyBackendStats(
            loads=LaneStats(**core.stats(is_store=False)),
            stores=LaneStats(**core.stats(is_store=True)),
        )

    def trace(self, path: str | os.PathLike[str]) -> CopyTrace:
        """Record jobs until :meth:`CopyTrace.stop`, the end of its ``with`` block, or shutdown.

        The file at ``path`` is a Chrome trace; Perfetto and chrome://tracing show it. On the
        simulated runtime it also holds the tasks of both streams on the virtual clock, taken from
        ``simulator.timeline``, of which one can run at a time. At most 200,000 jobs are kept.

        Raises:
            RuntimeError: a trace of this backend is running, or the backend is not.
        """
        core = self._running()
        if self._trace is not None and self._trace._running:
            raise RuntimeError(f"a trace to {self._trace.path} is running; stop it first")
        self._trace = CopyTrace(core, path)
        return self._trace

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse new jobs, wait for those launched, end the thread, and let go of the pools.

        Idempotent. Does nothing before ``init``.

        Raises:
            TimeoutError: after ``timeout`` seconds; jobs go on, and it may be called again.
        """
        _check_process(self._pid)
        if self._core is None or self._finalizer is None:
            return
        if not self._core.shutdown(timeout_seconds(timeout)):
            raise TimeoutError(f"the copy backend has not finished its transfers after {timeout} s")
        self._pools = None
        self._finalizer.detach()
        _running.pop(self._core, None)
        if self._trace is not None:
            self._trace.stop()

    def __enter__(self) -> NPUDmaCopyBackend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.shutdown()
            return
        # The exception goes on; a transfer that does not end must not hide it.
        with contextlib.suppress(TimeoutError):
            self.shutdown(_EXIT_TIMEOUT_S)

    def _live(self) -> _C.CopyBackend:
        _check_process(self._pid)
        if self._core is None:
            raise RuntimeError("NPUDmaCopyBackend: init was not called")
        return self._core

    def _running(self) -> _C.CopyBackend:
        core = self._live()
        if self._finalizer is None or not self._finalizer.alive:
            raise RuntimeError("the copy backend was shut down")
        return core

    def _raw_event(self, event: torch.Event | None) -> int:
        if event is None or self.device.type == "cpu":
            return 0
        if not isinstance(event, npu.Event) or isinstance(event, npu.ExternalEvent):
            raise TypeError(f"wait_event is a {type(event).__name__}, allowed is torch.npu.Event")
        if event.device is not None and event.device != self.device:
            raise ValueError(f"wait_event is on {event.device}, allowed is {self.device}")
        if npu.is_current_stream_capturing():
            raise RuntimeError(
                "wait_event: the current stream captures a graph, which the transfer would become "
                "a part of; launch transfers before or after the capture"
            )
        # 0 until the first record: an event that was never recorded orders nothing.
        return int(event.npu_event)


def _check_is_store(is_store: object) -> None:
    # None or an event in its place would silently be a direction.
    if not isinstance(is_store, bool):
        raise TypeError(f"is_store is {is_store!r}, allowed are True and False")


_running: dict[_C.CopyBackend, weakref.finalize[Any, Any]] = {}
# Pools that the device may still copy to and from: never freed.
_given_up: list[tuple[object, ...]] = []


@atexit.register
def _finish_all() -> None:
    # Registered after torch_npu's clean-up and so before it, which weakref's own turn need not be.
    for finalizer in list(_running.values()):
        finalizer()


def _finish(core: _C.CopyBackend, pid: int, held: tuple[object, ...]) -> None:
    _running.pop(core, None)
    if os.getpid() == pid and not core.shutdown(_EXIT_TIMEOUT_S):
        core.abandon()
        _given_up.append(held)


def _check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError(
            "NPUDmaCopyBackend: its thread and its device belong to the process that called init, "
            "not to a forked child; make a backend in each process, and start processes with spawn"
        )
