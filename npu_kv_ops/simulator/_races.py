"""The race checker of the simulator: accesses to the same bytes that nothing orders."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from npu_kv_ops.simulator._activation import library, take_text

__all__ = ["Race", "RaceAccess", "RaceError", "check_races", "checks_races", "races"]


@dataclass(frozen=True)
class RaceAccess:
    """One side of a race: a task of a stream, or a call of the host that works at once.

    Attributes:
        call: the runtime function that asked for it, ``aclrtMemcpyAsync``; in a graph the one that
            was captured.
        kind: ``copy``, ``batch``, ``memset``, ``operator`` or ``free``.
        operator: type of the operator, ``Add``; empty for everything else.
        writes: whether it wrote, else it read.
        stream: number of the stream, in order of creation; None for the host. For a task in a graph
            the stream into which the graph was put.
        handle: the stream's handle, ``torch.npu.Stream.npu_stream``; None for the host.
        task: number of the task on its stream, from 1, or among those of its stream in the graph.
        thread: the thread that made the call, ``threading.get_native_id()``.
        replay: the function that put the graph into the stream; empty outside graphs.
        callers: the innermost native callers outside the simulator, innermost first.
    """

    call: str
    kind: str
    operator: str
    writes: bool
    stream: int | None
    handle: int | None
    task: int
    thread: int
    replay: str
    callers: str

    def __str__(self) -> str:
        what = f"{self.kind} {self.operator}".rstrip()
        text = f"{'write' if self.writes else 'read'} by {what}"
        if self.kind == "free":
            text = "free"
        if self.stream is None:
            text += " on the host"
        elif self.replay:
            text += f", task {self.task} of a graph that {self.replay} put into"
            text += f" stream {self.stream} ({self.handle:#x})"
        else:
            text += f", task {self.task} of stream {self.stream} ({self.handle:#x})"
        text += (
            f", asked for by {self.call or 'a call before checking began'}, thread {self.thread}"
        )
        return text + (f"\n      from {self.callers}" if self.callers else "")


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, at least one a write, without an order between them.

    Attributes:
        kind: ``access``; ``batch`` for two items of one batch, which have no order; ``freed`` for a
            use of memory that was freed meanwhile.
        place: ``device``, ``pinned`` or ``pageable``.
        address: first of the bytes that both use; there may be more in other places.
        bytes: how many there are in one piece.
        count: how many pairs of tasks, from the same two functions on the same streams, raced.
        first: the access that happened to come first.
        second: the other.
    """

    kind: str
    place: str
    address: int
    bytes: int
    count: int
    first: RaceAccess
    second: RaceAccess

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return (
            f"race over {self.bytes} bytes of {self.place} memory at {self.address:#x}{times}:\n"
            f"    {self.first}\n"
            f"    {self.second}"
        )


class RaceError(RuntimeError):
    """Races were found.

    Attributes:
        races: all of them.
    """

    def __init__(self, found: list[Race]) -> None:
        self.races = found
        super().__init__(
            f"{len(found)} {'race' if len(found) == 1 else 'races'} on the simulated NPU\n"
            + "\n".join(f"  {race}" for race in found)
        )


def races() -> list[Race]:
    """Return the races found since the last call, and forget them."""
    return _take(0)


@contextlib.contextmanager
def check_races() -> Iterator[None]:
    """Check every access of the work that is launched in the ``with`` block.

    Synchronise at the end of the block: work that has not run has not been checked. Blocks may be
    nested, on any threads; races are those of the process.

    Raises:
        RaceError: at the end of the block, if races were found since its begin. An exception that
            the block raises itself goes first; the races are then forgotten.
    """
    _switch(+1)
    before = _mark()
    found: list[Race] = []
    try:
        yield
    finally:
        found = _take(before)
        _switch(-1)
    if found:
        raise RaceError(found)


def checks_races() -> bool:
    """Whether accesses are being checked, by a :func:`check_races` or for the whole process."""
    return _users > 0


def check_from_now_on() -> None:
    """Check for the rest of the process, which ends with code 66 if races remain untaken."""
    _switch(+1)
    library().npu_sim_report_races_at_exit()


_lock = threading.Lock()
_users = 0


def _switch(step: int) -> None:
    global _users
    with _lock:
        _users += step
        library().npu_sim_check_races(int(_users > 0))


def _mark() -> int:
    mark = library().npu_sim_mark_races
    mark.restype = ctypes.c_int64
    return int(mark())


def _take(first: int) -> list[Race]:
    text = take_text(library().npu_sim_take_races, ctypes.c_int64(first))
    return [_race(found) for found in json.loads(text)]


def _race(found: dict[str, Any]) -> Race:
    return Race(**found | {side: _access(found[side]) for side in ("first", "second")})


def _access(found: dict[str, Any]) -> RaceAccess:
    on_host = found["stream"] < 0
    return RaceAccess(**found | ({"stream": None, "handle": None} if on_host else {}))
