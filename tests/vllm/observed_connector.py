"""The connector under test, with a copy backend that is watched and can be made to misbehave.

Tests name this module in ``kv_connector_module_path``. What happened goes, a JSON line each, to the
file that NPU_KV_TEST_REPORT names: every process of an engine can write there, also one that is
killed. NPU_KV_TEST_FAULT, a JSON object, asks for trouble; its keys are the fields of `Fault`.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from npu_kv_ops.copy_backend import NPUDmaCopyBackend
from npu_kv_ops.errors import TransferError
from npu_kv_ops.integrations.offload import worker
from npu_kv_ops.integrations.vllm import NpuKVOffloadConnector

if TYPE_CHECKING:
    from npu_kv_ops.copy_backend import TransferEvent

REPORT = "NPU_KV_TEST_REPORT"
FAULT = "NPU_KV_TEST_FAULT"
host_pools: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
"""The tensors of the host pools that have not been freed."""

GARBAGE = 0x55  # as float32 1.5e13: whoever computes with it gets other tokens


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        zero_loads: blocks are zero when their load is reported as done.
        zero_while: likewise while the file of this name exists.
        delay_ms: each job starts so much later, on another thread, one after the other.
        hold: no job starts while the file of this name does not exist, until the shutdown.
        fail_loads: so many of the first loads fail and leave garbage in their blocks.
        fail_stores: likewise for stores.
        dead_after: the copy thread is gone after so many jobs.
    """

    zero_loads: bool = False
    zero_while: str | None = None
    delay_ms: float = 0
    hold: str | None = None
    fail_loads: int = 0
    fail_stores: int = 0
    dead_after: int | None = None

    @property
    def zeroing(self) -> bool:
        return self.zero_loads or (self.zero_while is not None and Path(self.zero_while).exists())

    @property
    def late(self) -> bool:
        return self.delay_ms > 0 or self.hold is not None


def _report(**what: Any) -> None:
    if path := os.environ.get(REPORT):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")


class _Event:
    """A job of the real backend, perhaps one that it has yet to be given."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._launched = threading.Event()
        self._real: TransferEvent | None = None
        self._error: Exception | None = None
        self._check = check
        self._seen = False

    def launched(self, real: TransferEvent | None, error: Exception | None = None) -> None:
        self._real, self._error = real, error
        self._launched.set()

    def query(self) -> bool:
        if not self._launched.is_set():
            return False
        if self._error is not None:
            raise self._error
        if self._real is None or not self._real.query():
            return False
        if not self._seen:
            self._seen = True
            self._check()
        return True

    def synchronize(self, timeout: float | None = None) -> None:
        self._launched.wait(timeout)
        if self._error is not None:
            raise self._error
        if self._real is not None:
            self._real.synchronize(timeout)


class ObservedBackend(NPUDmaCopyBackend):
    """Compares the blocks of every job, byte by byte, at the moment at which it is seen to be done.

    Both sides still belong to the job then: the scheduler has not heard of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fault = Fault(**json.loads(os.environ.get(FAULT) or "{}"))
        self._jobs = 0
        self._failed = {True: 0, False: 0}
        self._late: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending = 0
        self._idle = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def init(self, npu_caches: Any, cpu_caches: Any, *rest: Any, **named: Any) -> None:
        super().init(npu_caches, cpu_caches, *rest, **named)
        self._device_pools = list(npu_caches.values())
        self._host_pools = list(cpu_caches.values())
        for pool in self._host_pools:
            host_pools.add(pool)
        if self._fault.late:
            self._thread = threading.Thread(target=self._run_late, daemon=True)
            self._thread.start()

    def launch_copy(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        self._jobs += 1
        if self._fault.dead_after is not None and self._jobs > self._fault.dead_after:
            super().shutdown()
        device, host = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        failing = self._fault.fail_stores if is_store else self._fault.fail_loads
        event = _Event(lambda: self._ended(list(device), list(host), is_store, event_idx))

        def launch() -> None:
            if self._failed[is_store] < failing:
                self._failed[is_store] += 1
                self._fail(event, list(dst_blocks), is_store, event_idx)
                return
            real: list[tuple[int, TransferEvent]] = []
            try:
                NPUDmaCopyBackend.launch_copy(
                    self, src_blocks, dst_blocks, is_store, event_idx, real, wait_event
                )
            except RuntimeError:
                kind = "refused_store" if is_store else "refused_load"
                _report(kind=kind, event=event_idx, blocks=len(device))
                raise
            event.launched(real[0][1])

        if self._fault.late:
            with self._idle:
                self._pending += 1
            if self._held():
                _report(kind="held", event=event_idx, blocks=len(device))
            self._late.put(launch)
        else:
            launch()
        events_list.append((event_idx, event))

    def synchronize(self, timeout: float | None = None) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: self._pending == 0, timeout):
                raise TimeoutError(f"{self._pending} jobs are not launched after {timeout} s")
        super().synchronize(timeout)

    def shutdown(self, *arguments: Any, **named: Any) -> None:
        in_flight = self._pending
        self._stopping.set()
        if self._thread is not None:
            self._late.put(None)
            self._thread.join(30)
        super().shutdown(*arguments, **named)
        self._device_pools = self._host_pools = []
        _report(kind="shutdown", in_flight=in_flight)

    def _held(self) -> bool:
        return self._fault.hold is not None and not Path(self._fault.hold).exists()

    def _run_late(self) -> None:
        while (launch := self._late.get()) is not None:
            while self._held() and not self._stopping.wait(0.005):
                pass
            time.sleep(self._fault.delay_ms / 1000)
            launch()
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def _ended(self, device: list[int], host: list[int], is_store: bool, event_idx: int) -> None:
        if not is_store and self._fault.zeroing:
            for pool in self._device_pools:
                pool[device] = 0
        equal = all(
            torch.equal(device_pool[device].cpu(), host_pool[host])
            for device_pool, host_pool in zip(self._device_pools, self._host_pools, strict=True)
        )
        _report(
            kind="store" if is_store else "load", event=event_idx, blocks=len(device), equal=equal
        )

    def _fail(self, event: _Event, targets: list[int], is_store: bool, event_idx: int) -> None:
        for pool in self._host_pools if is_store else self._device_pools:
            pool[targets] = GARBAGE
        kind = "store" if is_store else "load"
        _report(kind=f"failed_{kind}", event=event_idx, blocks=len(targets))
        event.launched(None, TransferError(f"{kind} {event_idx} was made to fail by a test"))


class ObservedConnector(NpuKVOffloadConnector):
    """`NpuKVOffloadConnector` on an `ObservedBackend`."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        worker.NPUDmaCopyBackend = ObservedBackend  # type: ignore[misc]
        try:
            super().register_kv_caches(kv_caches)
        finally:
            worker.NPUDmaCopyBackend = NPUDmaCopyBackend  # type: ignore[misc]

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if kv_connector_metadata.need_flush:
            _report(kind="preemption")
        super().handle_preemptions(kv_connector_metadata)
