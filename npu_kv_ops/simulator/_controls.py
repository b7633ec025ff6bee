"""Settings, counters, faults and the virtual clock of the active simulator."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from npu_kv_ops.simulator._activation import (
    last_error,
    library,
    set_setting,
    setting_names,
    take_text,
)

__all__ = [
    "Stall",
    "Stats",
    "TaskRecord",
    "clear_faults",
    "clear_operator_costs",
    "configure",
    "drop_call",
    "fail_call",
    "fail_copy",
    "now_ns",
    "operator_cost",
    "operators",
    "overrides",
    "reset_stats",
    "settings",
    "stall",
    "stats",
    "timeline",
]


@dataclass(frozen=True)
class Stats:
    """Counters since the start or the last :func:`reset_stats`; ``live`` is what exists now.

    Attributes:
        calls: runtime calls by function name; 0 for a function that was not called.
        copies: copies that ran, by direction: ``h2d``, ``d2h``, ``d2d``, ``h2h``. An item of a
            batch is one copy; a captured copy counts at every replay.
        bytes: their bytes, by direction.
        operators: compute operators that ran, by type; a captured one counts at every replay.
        operator_bytes: what they read and wrote, by type.
        batches: calls of the batch copy functions that were accepted.
        calls_in_callback: runtime calls made from inside a host callback, which an NPU may answer
            with a deadlock.
        live: ``device_allocations``, ``device_bytes``, ``pinned_allocations``, ``pinned_bytes``,
            ``registered_ranges``, ``streams``, ``events``, ``graphs``, ``threads``.
    """

    calls: Counter[str]
    copies: dict[str, int]
    bytes: dict[str, int]
    operators: Counter[str]
    operator_bytes: Counter[str]
    batches: int
    calls_in_callback: int
    live: dict[str, int]


@dataclass(frozen=True)
class TaskRecord:
    """One task as the virtual clock saw it.

    Attributes:
        stream: number of the stream, in order of creation.
        handle: the stream's handle, ``torch.npu.Stream.npu_stream``.
        kind: what it was: ``copy``, ``batch``, ``record``, ``wait``, ``operator``, ...
        bytes: bytes it moved or touched.
        start_ns: when it started, in ns of the virtual clock.
        end_ns: when it ended.
    """

    stream: int
    handle: int
    kind: str
    bytes: int
    start_ns: int
    end_ns: int


def configure(**values: float) -> None:
    """Change settings; see docs/simulator.md for what each does.

    Raises:
        ValueError: no such setting (the message lists all), not a whole number, or too small.
            Settings named before the wrong one have been changed.
        RuntimeError: the simulator is not active.
    """
    runtime = library()
    for name, value in values.items():
        set_setting(runtime, name, value)


def settings() -> dict[str, int]:
    """Return all settings by name."""
    runtime = library()
    values = {}
    for name in setting_names(runtime):
        value = ctypes.c_int64()
        _check(runtime.npu_sim_get(name.encode(), ctypes.byref(value)))
        values[name] = value.value
    return values


@contextlib.contextmanager
def overrides(**values: float) -> Iterator[None]:
    """Change settings for the length of a ``with`` block."""
    before = settings()
    try:
        configure(**values)
        yield
    finally:
        configure(**{name: before[name] for name in values if name in before})


def stats() -> Stats:
    """Return the counters. Calls and copies still under way may not be in them."""
    found = json.loads(take_text(library().npu_sim_stats))
    return Stats(
        calls=Counter(found["calls"]),
        copies=found["copies"],
        bytes=found["bytes"],
        operators=Counter(found["operators"]),
        operator_bytes=Counter(found["operator_bytes"]),
        batches=found["batches"],
        calls_in_callback=found["calls_in_callback"],
        live=found["live"],
    )


def reset_stats() -> None:
    """Set the counters to zero."""
    library().npu_sim_reset_stats()


def operators() -> list[str]:
    """Return the types of the compute operators that the simulated NPU has.

    All of them once torch has been imported; before that the few that need no torch.
    """
    return take_text(library().npu_sim_operator_types).split(", ")


def operator_cost(
    operator_type: str, *, fixed_ns: int | None = None, bytes_per_second: int | None = None
) -> None:
    """Set the device time of an operator type on the virtual clock: a fixed part and one by bytes.

    Args:
        operator_type: as in ``stats().operators``; also of an operator that does not exist yet.
        fixed_ns: None for the setting ``operator_ns``.
        bytes_per_second: None for the setting ``operator_bytes_per_second``.

    Raises:
        ValueError: the type is empty, ``fixed_ns`` negative or ``bytes_per_second`` below 1.
    """
    if fixed_ns is not None and fixed_ns < 0:
        raise ValueError(f"fixed_ns={fixed_ns}: a time is 0 or more")
    if bytes_per_second is not None and bytes_per_second < 1:
        raise ValueError(f"bytes_per_second={bytes_per_second}: a rate is 1 or more")
    _check(
        library().npu_sim_set_operator_cost(
            operator_type.encode(),
            ctypes.c_int64(-1 if fixed_ns is None else fixed_ns),
            ctypes.c_int64(-1 if bytes_per_second is None else bytes_per_second),
        )
    )


def clear_operator_costs() -> None:
    """Let every operator type cost what the settings say."""
    library().npu_sim_clear_operator_costs()


def fail_call(name: str, *, nth: int = 1, code: int, times: int = 1) -> None:
    """Let calls ``nth`` to ``nth + times - 1`` of a runtime function, from now on, return ``code``.

    They do nothing else. torch_npu takes 207000 for success; most other codes raise.

    Raises:
        ValueError: the simulated runtime has no function ``name``, ``nth`` or ``times`` is below 1,
            or ``code`` is 0.
    """
    runtime = library()
    if not name.startswith(("acl", "rt")) or not hasattr(runtime, name):
        raise ValueError(f"the simulated runtime has no function {name!r}")
    _clear_at_exit()
    _check(
        runtime.npu_sim_fail_call(name.encode(), ctypes.c_int64(nth), code, ctypes.c_int64(times))
    )


def drop_call(name: str, *, nth: int = 1, times: int = 1) -> None:
    """Let calls ``nth`` to ``nth + times - 1`` of a runtime function, from now on, do nothing.

    They return success: the order that they would have made is missing. With :func:`check_races`
    this shows whether a wait or a record is needed.

    Args:
        name: a function that gives nothing back: ``aclrtRecordEvent``, ``aclrtStreamWaitEvent``,
            ``aclrtResetEvent``, ``aclrtValueWrite``, ``aclrtValueWait``, or one of those that
            synchronise.
        nth: the first call that does nothing, from 1.
        times: how many there are.

    Raises:
        ValueError: calls of ``name`` cannot be dropped, or ``nth`` or ``times`` is below 1.
    """
    _clear_at_exit()
    _check(library().npu_sim_drop_call(name.encode(), ctypes.c_int64(nth), ctypes.c_int64(times)))


def fail_copy(*, nth: int = 1, code: int = 507013) -> None:
    """Let the ``nth`` copy that runs from now on fail on the device, as an error of its stream.

    An item of a batch counts as one copy. The stream reports ``code`` at its next synchronise; the
    default is the code of a DMA error.

    Raises:
        ValueError: ``nth`` is below 1, or ``code`` is 0.
    """
    _clear_at_exit()
    _check(library().npu_sim_fail_copy(ctypes.c_int64(nth), code))


class Stall:
    """A stream that starts no task until :meth:`release`, or the end of the ``with`` block."""

    def __init__(self, stream_handle: int) -> None:
        self._handle = ctypes.c_void_p(stream_handle)
        _clear_at_exit()
        with _stalls_lock:
            _check(library().npu_sim_stall(self._handle))
            _stalls.add(self)

    def release(self) -> None:
        """Let the stream go on; does nothing the second time or after :func:`clear_faults`."""
        with _stalls_lock:
            if self in _stalls:
                _stalls.remove(self)
                library().npu_sim_release(self._handle)

    def __enter__(self) -> Stall:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def stall(stream_handle: int) -> Stall:
    """Stop a stream after its current task, until the returned handle is released.

    Args:
        stream_handle: ``torch.npu.Stream.npu_stream``.

    Raises:
        ValueError: no stream has this handle.
    """
    return Stall(stream_handle)


def clear_faults() -> None:
    """Forget injected faults, release stalled streams, heal streams and devices that failed.

    What torch_npu keeps about a failure stays: a device whose task queue stopped remains unusable.
    """
    with _stalls_lock:
        library().npu_sim_clear_faults()
        _stalls.clear()


def now_ns() -> int:
    """Return the virtual host time in ns since activation."""
    clock = library().npu_sim_now_ns
    clock.restype = ctypes.c_int64
    return int(clock())


@contextlib.contextmanager
def timeline() -> Iterator[list[TaskRecord]]:
    """Record every task that runs; the list is filled when the ``with`` block ends.

    One recording at a time: a second one takes over, and the first list misses what came after.
    """
    runtime = library()
    records: list[TaskRecord] = []
    runtime.npu_sim_timeline_start()
    try:
        yield records
    finally:
        records += [
            TaskRecord(**record) for record in json.loads(take_text(runtime.npu_sim_timeline_stop))
        ]


# Those that are held: a stall that clear_faults has ended must not release a later one.
_stalls_lock = threading.Lock()
_stalls: set[Stall] = set()

_exit_lock = threading.Lock()
_exit_registered = False


def _clear_at_exit() -> None:
    # Registered with the first fault and not at activation: exit functions run last in, first out,
    # and torch_npu's, which synchronises every device, must find no stalled stream.
    global _exit_registered
    with _exit_lock:
        if not _exit_registered:
            atexit.register(clear_faults)
            _exit_registered = True


def _check(code: int) -> None:
    if code != 0:
        raise ValueError(last_error(library()))
