"""What the copy backend costs its caller, against a backend with a Python thread.

Runs on the simulated NPU, set to count copies and not to move bytes, so that what is left is the
cost on the host. Four questions, each put to both contestants in turns:

launch   how long does launch_copy keep its caller? Block ids as lists of int and as int64 arrays.
         Right behind small launches, with code and ids in the caches and both backends' threads
         asleep; and "cold", after milliseconds of other work.
loop     how much slower is a loop of pure Python on the caller's thread while jobs without end are
         issued? Every other thread is kept off the caller's core, so that no lack of cores is
         measured. "busy process" is a loop of another process on those cores: what the machine
         itself does to the caller.
start    how long from launch_copy to the job's first call of the runtime, while other processes
         keep all cores but one busy? One job at a time. Once the caller sleeps until the job is
         issued, once it computes.
behind   how much of a store of 65,536 copies is issued before a load that was launched behind it?
         Counted on the simulator's clock, on which every call has a time of its own. "held": the
         load is launched while the store's first runtime call is under way, which is held up until
         then, so the count is the same on every machine. "free": as the threads happen to run.

backend         npu_kv_ops.NPUDmaCopyBackend
Python thread   what the simple KV offload of vLLM-Ascend does, written anew: a queue.SimpleQueue
                and one thread, which computes the address of every block of every tensor with
                numpy, hands all of them to the runtime in one call on the stream of the direction,
                records a torch.npu.Event and appends it to events_list

The runtime call of the Python thread is made through ctypes, which lets go of the GIL meanwhile, as
the operator of vLLM-Ascend does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from harness import Report, Target, Times, argument_parser, finish, measure, medians, positive
from host_cost import Pools, build_bare_runtime, check, microseconds

from npu_kv_ops import simulator

simulator.activate()

import torch  # noqa: E402

from npu_kv_ops import NPUDmaCopyBackend  # noqa: E402

if TYPE_CHECKING:
    import ctypes

    from npu_kv_ops.copy_backend import BlockIds

BACKEND, THREAD = "backend", "Python thread"
LIST, ARRAY = "list", "array"
IDLE, PROCESS = "idle", "busy process"
SLEEPS, COMPUTES = "sleeps", "computes"
HELD, FREE = "held", "free"
LAUNCH, LOOP, START, BEHIND = "launch", "loop", "start", "behind"

TENSORS = 64
STORE_COPIES = 65_536  # of the store that a load is launched behind
WARM_LAUNCHES = 3  # of one block, before a launch that is not cold
WARM_S = 200e-6  # of Python before what is timed: an engine calls launch_copy out of running code
LOOP_BLOCKS = 1024  # of each job during the loop
START_BLOCKS = LOAD_BLOCKS = 16
START_LOOK_S = 1e-3  # from the launch until the caller looks for the first time
LOOK_AGAIN_S = 1e-4

# Targets.
LAUNCH_US, LAUNCH_US_PER_BLOCK = 20.0, 0.02
LOOP_SLOWDOWN = 1.03
START_RATIO = 1.0  # p99 of the backend to p50 of the Python thread
BEHIND_SHARE = 0.1

MOST_JOBS = 1_000_000  # of a trace
# So fast that a task starts when it was submitted, in the order of submission.
INSTANT = {"copy_ns": 0, "d2h_bytes_per_second": 10**15, "h2d_bytes_per_second": 10**15}


class CopyBackend(Protocol):
    """What both contestants can do."""

    def launch_copy(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None: ...

    def synchronize(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class Streams:
    load: Any
    store: Any


class PythonThreadBackend:
    """Copies on a Python thread. Only what is measured: no checks, no failures."""

    def __init__(
        self,
        npu: Sequence[torch.Tensor],
        cpu: Sequence[torch.Tensor],
        streams: Streams,
        bare: ctypes.CDLL,
    ) -> None:
        self._streams = streams
        self._bare = bare
        self._npu_bases = np.array([tensor.data_ptr() for tensor in npu], dtype=np.int64)
        self._cpu_bases = np.array([tensor.data_ptr() for tensor in cpu], dtype=np.int64)
        self._block_bytes = np.array([tensor[0].nbytes for tensor in npu], dtype=np.int64)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # (event_idx, perf_counter_ns before the runtime call, likewise behind the event's record)
        self.calls: list[tuple[int, int, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch_copy(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        self._queue.put((src_blocks, dst_blocks, is_store, event_idx, events_list, wait_event))

    def queued(self) -> int:
        return self._queue.qsize()

    def synchronize(self) -> None:
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        self._streams.load.synchronize()
        self._streams.store.synchronize()

    def shutdown(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.npu.set_device(0)
        while (job := self._queue.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            else:
                self._copy(*job)

    def _copy(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any,
    ) -> None:
        src_bases, dst_bases = self._npu_bases, self._cpu_bases
        stream = self._streams.store
        if not is_store:
            src_bases, dst_bases = dst_bases, src_bases
            stream = self._streams.load
        src_ids = np.asarray(src_blocks, dtype=np.int64)
        dst_ids = np.asarray(dst_blocks, dtype=np.int64)
        strides = self._block_bytes[:, None]
        src = (src_bases[:, None] + strides * src_ids[None, :]).reshape(-1)
        dst = (dst_bases[:, None] + strides * dst_ids[None, :]).reshape(-1)
        sizes = np.repeat(self._block_bytes, len(src_ids))
        with torch.npu.stream(stream):
            if wait_event is not None:
                stream.wait_event(wait_event)
            raw = stream.npu_stream  # drains torch_npu's task queue
            begin = time.perf_counter_ns()
            check(
                self._bare.bare_batch_copy(
                    *(dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(sizes)),
                    *(int(not is_store), 0, raw),
                )
            )
            event = torch.npu.Event()
            event.record(stream)
        events_list.append((event_idx, event))
        self.calls.append((event_idx, begin, time.perf_counter_ns()))


@contextlib.contextmanager
def backends(
    npu: Sequence[torch.Tensor],
    cpu: Sequence[torch.Tensor],
    streams: Streams,
    bare: ctypes.CDLL,
) -> Iterator[tuple[NPUDmaCopyBackend, PythonThreadBackend]]:
    """Both contestants on the same pools and streams."""
    ours = NPUDmaCopyBackend()
    ours.init(npu, cpu, load_stream=streams.load, store_stream=streams.store)
    theirs = PythonThreadBackend(npu, cpu, streams, bare)
    try:
        yield ours, theirs
    finally:
        ours.shutdown()
        theirs.shutdown()


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def require_copies(what: str, direction: str, wanted: int) -> None:
    """Raise unless so many copies ran since the counters were reset."""
    ran = simulator.stats().copies[direction]
    if ran != wanted:
        raise RuntimeError(f"{what}: {ran} copies {direction} instead of {wanted}")


def scattered(blocks: int, pool_blocks: int, seed: int) -> list[int]:
    """Return so many blocks in random order, no two of them neighbours: nothing is merged."""
    order = np.random.default_rng(seed).permutation(pool_blocks // 2)[:blocks]
    return [2 * int(block) for block in order]


# --- launch


def launch_part(
    report: Report, pair: tuple[NPUDmaCopyBackend, PythonThreadBackend], options: Any
) -> None:
    both: dict[str, CopyBackend] = {BACKEND: pair[0], THREAD: pair[1]}
    pool_blocks = options.pool_blocks

    def settle() -> None:
        for backend in both.values():
            backend.synchronize()
        spin(WARM_S)

    for blocks in options.blocks:
        src, dst = scattered(blocks, pool_blocks, 0), scattered(blocks, pool_blocks, 1)
        ids: dict[str, tuple[Any, Any]] = {
            LIST: (src, dst),
            ARRAY: (np.array(src), np.array(dst)),
        }
        copies = 0

        def contestant(backend: CopyBackend, pair_of_ids: tuple[Any, Any]) -> Callable[[], Times]:
            src, dst = pair_of_ids
            first = src[:1], dst[:1]

            def timed_launch() -> float:
                events: list[tuple[int, Any]] = []
                begin = time.perf_counter()
                backend.launch_copy(src, dst, True, 0, events)
                return time.perf_counter() - begin

            def run() -> Times:
                nonlocal copies
                copies += TENSORS * (2 * len(src) + WARM_LAUNCHES)
                cold = timed_launch()
                backend.synchronize()
                for _ in range(WARM_LAUNCHES):
                    backend.launch_copy(*first, True, 0, [])
                    backend.synchronize()
                sum(src), sum(dst)  # an engine has just made its lists
                return {"call": timed_launch(), "cold": cold}

            return run

        runs = {
            f"{name}, {kind}": contestant(backend, pair_of_ids)
            for name, backend in both.items()
            for kind, pair_of_ids in ids.items()
        }
        settle()
        simulator.reset_stats()
        times = medians(measure(runs, rounds=options.rounds, settle=settle))
        settle()
        require_copies("launch", "d2h", copies)
        wanted = LAUNCH_US + LAUNCH_US_PER_BLOCK * blocks
        for kind in ids:
            seconds = {name: times[f"{name}, {kind}"] for name in both}
            for what, suffix in (("call", ""), ("cold", ", cold")):
                ours, theirs = seconds[BACKEND][what], seconds[THREAD][what]
                report.line(
                    *("launch_copy, us", f"{TENSORS}x{blocks}, {kind}{suffix}"),
                    *(microseconds(ours), microseconds(theirs), f"{theirs / ours:.2f}"),
                )
            report.rows.append(
                {
                    "part": LAUNCH,
                    "tensors": TENSORS,
                    "blocks": blocks,
                    "ids": kind,
                    "seconds": seconds,
                }
            )
            name = f"launch_copy, {TENSORS}x{blocks}, {kind}, us"
            measured = seconds[BACKEND]["call"] * 1e6
            report.targets.append(Target(name, measured, "<=", round(wanted, 2)))


# --- loop


@contextlib.contextmanager
def busy_process(cores: set[int]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes for ever on some cores, stopped; SIGCONT sets it going."""
    code = "import os\nos.write(1, b'.')\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.read(1) != b".":
                raise RuntimeError("the busy process did not start")
            process.send_signal(signal.SIGSTOP)
            os.sched_setaffinity(process.pid, cores)
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def caller_alone(cores: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Let the caller's thread have the first core and all others the rest, if there is a rest.

    Yields what puts threads where they belong that were started since.
    """
    caller = threading.get_native_id()

    def place(*, apart: bool) -> None:
        for task in map(int, os.listdir("/proc/self/task")):
            where = set(cores)
            if apart and len(cores) > 1:
                where = {cores[0]} if task == caller else set(cores[1:])
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(task, where)

    place(apart=True)
    try:
        yield lambda: place(apart=True)
    finally:
        place(apart=False)


def count_up(steps: int) -> int:
    total = 0
    for step in range(steps):
        total += step & 7
    return total


def steps_for(seconds: float) -> int:
    """How many steps of count_up take about so long."""
    steps = 1000
    while True:
        begin = time.perf_counter()
        count_up(steps)
        took = time.perf_counter() - begin
        if took > seconds / 8:
            return max(1, int(steps * seconds / took))
        steps *= 2


def waited_for_core() -> float:
    """Return the seconds that this thread could have run and had no core; 0 if not counted."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def timed_loop(steps: int) -> Times:
    """Time the loop; ``waiting`` is the share in which the thread slept: for the GIL or a lock."""
    begin_wait = waited_for_core()
    begin, begin_cpu = time.perf_counter(), time.thread_time()
    count_up(steps)
    ran, wall = time.thread_time() - begin_cpu, time.perf_counter() - begin
    ran += waited_for_core() - begin_wait
    return {"wall": wall, "waiting": max(0.0, 1 - ran / wall)}


class EndlessJobs:
    """Queues so many jobs before a loop that they outlast it."""

    def __init__(
        self, backend: CopyBackend, queued: Callable[[], int], ids: tuple[list[int], list[int]]
    ) -> None:
        self._backend = backend
        self._queued = queued
        self._ids = ids
        self.jobs = 8
        self.launched = 0

    def run(self, loop: Callable[[], Times]) -> Times:
        while True:
            events: list[tuple[int, Any]] = []
            for number in range(self.jobs):
                self._backend.launch_copy(*self._ids, True, number, events)
            self.launched += self.jobs
            before = self._queued()
            times = loop()
            left = self._queued()
            self._backend.synchronize()
            if left > 0:
                return {**times, "jobs": float(before - left)}
            self.jobs *= 2  # they came to an end: this turn is void


def loop_part(
    report: Report, pair: tuple[NPUDmaCopyBackend, PythonThreadBackend], options: Any
) -> None:
    ours, theirs = pair
    cores = sorted(os.sched_getaffinity(0))
    pool_blocks = options.pool_blocks
    ids = scattered(LOOP_BLOCKS, pool_blocks, 0), scattered(LOOP_BLOCKS, pool_blocks, 1)
    jobs = {
        BACKEND: EndlessJobs(ours, lambda: ours.stats().stores.queued, ids),
        THREAD: EndlessJobs(theirs, theirs.queued, ids),
    }
    simulator.reset_stats()
    with caller_alone(cores) as place_threads, busy_process(set(cores[1:] or cores)) as process:
        steps = steps_for(options.loop_ms / 1e3)

        def loop() -> Times:
            return timed_loop(steps)

        def run_busy() -> Times:
            process.send_signal(signal.SIGCONT)
            try:
                spin(WARM_S)
                return loop()
            finally:
                process.send_signal(signal.SIGSTOP)

        def settle() -> None:
            ours.synchronize()
            theirs.synchronize()
            place_threads()
            spin(WARM_S)

        runs = {
            IDLE: loop,
            PROCESS: run_busy,
            BACKEND: lambda: jobs[BACKEND].run(loop),
            THREAD: lambda: jobs[THREAD].run(loop),
        }
        times = medians(measure(runs, rounds=options.loop_rounds, settle=settle))
    launched = sum(each.launched for each in jobs.values())
    require_copies("loop", "d2h", launched * TENSORS * LOOP_BLOCKS)
    slower = {
        name: times[name]["wall"] / times[IDLE]["wall"] for name in (BACKEND, THREAD, PROCESS)
    }

    def percent(ratio: float) -> str:
        return f"{(ratio - 1) * 100:+.1f}"

    report.line(
        *("loop slower by, %", "jobs without end"),
        *(percent(slower[name]) for name in (BACKEND, THREAD)),
        f"{slower[THREAD] / slower[BACKEND]:.2f}",
    )
    report.line("loop slower by, %", PROCESS, percent(slower[PROCESS]), "", "")
    report.line(
        *("caller sleeps for GIL or lock, % of loop", "jobs without end"),
        *(f"{100 * times[name]['waiting']:.1f}" for name in (BACKEND, THREAD)),
        "",
    )
    report.line(
        *("jobs issued during a loop", f"{TENSORS}x{LOOP_BLOCKS}"),
        *(f"{times[name]['jobs']:.0f}" for name in (BACKEND, THREAD)),
        "",
    )
    report.rows.append(
        {
            "part": LOOP,
            "tensors": TENSORS,
            "blocks": LOOP_BLOCKS,
            "steps": steps,
            "pinned": len(cores) > 1,
            "seconds": {name: times[name]["wall"] for name in times},
            "waiting": {name: times[name]["waiting"] for name in times},
            "jobs": {name: times[name]["jobs"] for name in jobs},
            "slower": slower,
        }
    )
    report.targets.append(
        Target("loop beside the backend, times idle", slower[BACKEND], "<=", LOOP_SLOWDOWN)
    )


# --- start


def start_part(
    report: Report, pair: tuple[NPUDmaCopyBackend, PythonThreadBackend], options: Any
) -> None:
    ours, theirs = pair
    both: dict[str, CopyBackend] = {BACKEND: ours, THREAD: theirs}
    after: dict[str, Callable[[float], None]] = {SLEEPS: time.sleep, COMPUTES: spin}
    src = scattered(START_BLOCKS, options.pool_blocks, 0)
    dst = scattered(START_BLOCKS, options.pool_blocks, 1)
    called: dict[tuple[str, str], list[float]] = {}
    issued: dict[tuple[str, str], list[float]] = {}

    def turn(name: str, then: str) -> Times:
        backend, pause = both[name], after[then]
        events: list[tuple[int, Any]] = []
        launched: list[int] = []
        theirs.calls.clear()

        def issued_all() -> bool:
            if name == THREAD:
                return len(theirs.calls) == len(launched)
            return bool(events[-1][1].query())

        ours._core.start_trace(MOST_JOBS)  # type: ignore[union-attr]
        for number in range(options.launches):
            launched.append(time.perf_counter_ns())
            backend.launch_copy(src, dst, True, number, events)
            pause(START_LOOK_S)
            while not issued_all():
                pause(LOOK_AGAIN_S)
        backend.synchronize()
        # The scheduler's clock is the one of perf_counter: CLOCK_MONOTONIC.
        calls = [
            (row["label"], row["started_ns"], row["launched_ns"])
            for row in ours._core.stop_trace()  # type: ignore[union-attr]
        ]
        if name == THREAD:
            calls = list(theirs.calls)
        if len(calls) != options.launches:
            raise RuntimeError(f"start: {name} made {len(calls)} of {options.launches} calls")
        of_turn = [(begin - launched[number]) / 1e9 for number, begin, _ in calls]
        called.setdefault((name, then), []).extend(of_turn)
        issued.setdefault((name, then), []).extend(
            (end - launched[number]) / 1e9 for number, _, end in calls
        )
        return {"median": float(np.median(of_turn))}

    cores = sorted(os.sched_getaffinity(0))
    busy_cores = cores[1:] or cores
    simulator.reset_stats()
    with contextlib.ExitStack() as stack:
        for core in busy_cores:
            stack.enter_context(busy_process({core})).send_signal(signal.SIGCONT)
        runs = {
            f"{name}, {then}": lambda name=name, then=then: turn(name, then)
            for name in both
            for then in after
        }
        measure(runs, rounds=options.start_rounds, warmup=0)
    turns = options.start_rounds * len(runs)
    require_copies("start", "d2h", turns * options.launches * TENSORS * START_BLOCKS)
    for then in after:
        seconds = {
            name: {
                f"{what}_p{quantile}": float(np.quantile(samples[name, then], quantile / 100))
                for what, samples in (("called", called), ("issued", issued))
                for quantile in (50, 99)
            }
            for name in both
        }
        for quantile in (50, 99):
            ours_s, theirs_s = (seconds[name][f"called_p{quantile}"] for name in both)
            report.line(
                *("launch_copy to runtime call, us", f"caller {then}, p{quantile}"),
                *(microseconds(ours_s), microseconds(theirs_s), f"{theirs_s / ours_s:.2f}"),
            )
        ratio = seconds[BACKEND]["called_p99"] / seconds[THREAD]["called_p50"]
        report.rows.append(
            {
                "part": START,
                "tensors": TENSORS,
                "blocks": START_BLOCKS,
                "caller": then,
                "launches": len(called[BACKEND, then]),
                "seconds": seconds,
                "backend_p99_to_thread_p50": ratio,
            }
        )
        report.targets.append(
            Target(
                f"launch_copy to runtime call, caller {then}, p99 to the Python thread's p50",
                *(ratio, "<=", START_RATIO),
            )
        )


# --- behind


def share_before_load(
    tasks: Sequence[simulator.TaskRecord], streams: Streams, block_bytes: int
) -> float:
    """Return the share of the store's copies that were issued before the load's first."""

    def batches(stream: Any) -> list[simulator.TaskRecord]:
        return [
            task
            for task in tasks
            if task.handle == stream.npu_stream and task.kind in ("batch", "copy")
        ]

    load_at = min(task.start_ns for task in batches(streams.load))
    stores = batches(streams.store)
    total = sum(task.bytes for task in stores)
    if total != STORE_COPIES * block_bytes:
        raise RuntimeError(f"the store has {total} bytes instead of {STORE_COPIES * block_bytes}")
    return sum(task.bytes for task in stores if task.start_ns < load_at) / total


def store_and_load(
    backend: CopyBackend, streams: Streams, block_bytes: int, *, held: bool
) -> float:
    """Launch a store and a load behind it; return the share of the store issued before the load."""
    # No two even blocks are neighbours, so nothing is merged; the load has odd ones to itself.
    store = list(range(0, 2 * (STORE_COPIES // TENSORS), 2))
    load = list(range(1, 2 * LOAD_BLOCKS, 2))
    events: list[tuple[int, Any]] = []
    backend.synchronize()
    simulator.reset_stats()
    with simulator.timeline() as tasks:
        with contextlib.ExitStack() as hold:
            if held:
                hold.enter_context(simulator.stall(streams.store.npu_stream))
            backend.launch_copy(store, store, True, 0, events)
            while held and not simulator.stats().calls["aclrtMemcpyBatchAsync"]:
                time.sleep(1e-4)
            backend.launch_copy(load, load, False, 1, events)
        backend.synchronize()
    require_copies(BEHIND, "d2h", STORE_COPIES)
    require_copies(BEHIND, "h2d", TENSORS * LOAD_BLOCKS)
    return share_before_load(tasks, streams, block_bytes)


def behind_part(
    report: Report, pools: Pools, streams: Streams, bare: ctypes.CDLL, options: Any
) -> None:
    # One page-able tensor makes the runtime call with its copies synchronous: it can be held up.
    pageable = torch.empty_like(pools.host[0])
    host = {HELD: [pageable, *pools.host[1:]], FREE: pools.host}
    for how, cpu in host.items():
        with simulator.overrides(**INSTANT), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*page-able memory", category=UserWarning)
            with backends(pools.device, cpu, streams, bare) as (ours, theirs):
                both: dict[str, CopyBackend] = {BACKEND: ours, THREAD: theirs}

                def contestant(backend: CopyBackend, held: bool) -> Callable[[], Times]:
                    return lambda: {
                        "share": store_and_load(backend, streams, pools.block_bytes, held=held)
                    }

                runs = {name: contestant(backend, how == HELD) for name, backend in both.items()}
                samples = measure(runs, rounds=options.rounds, warmup=1)
        shares = {name: times["share"] for name, times in medians(samples).items()}
        highest = {name: max(samples[name]["share"]) for name in samples}
        report.line(
            *("store issued before the load, %", f"{STORE_COPIES:,} copies, {how}"),
            *(f"{100 * shares[name]:.1f}" for name in both),
            "" if shares[BACKEND] == 0 else f"{shares[THREAD] / shares[BACKEND]:.1f}",
        )
        report.rows.append(
            {
                "part": BEHIND,
                "how": how,
                "store_copies": STORE_COPIES,
                "load_copies": TENSORS * LOAD_BLOCKS,
                "share": shares,
                "highest_share": highest,
            }
        )
        report.targets.append(
            Target(
                f"share of the store issued before the load, {how}",
                *(shares[BACKEND], "<=", BEHIND_SHARE),
            )
        )


def run(options: Any) -> Report:
    options.pool_blocks = 2 * max(*options.blocks, LOOP_BLOCKS, STORE_COPIES // TENSORS)
    bare = build_bare_runtime()
    pools = Pools(TENSORS, options.pool_blocks, options.block_bytes)
    streams = Streams(load=torch.npu.Stream(), store=torch.npu.Stream())
    load_average = os.getloadavg()[0]
    report = Report(
        benchmark="backend_cost",
        title="The copy backend and its caller",
        columns=["what", "case", BACKEND, THREAD, f"{THREAD} / {BACKEND}"],
        settings={
            "rounds": options.rounds,
            "loop_rounds": options.loop_rounds,
            "start_launches": options.start_rounds * options.launches,
            "block_bytes": options.block_bytes,
            "task_queue": os.environ.get("TASK_QUEUE_ENABLE", "1"),
            "load_average": load_average,
            "runtime": "sim",
        },
        notes=[
            "On the simulated NPU, which counts copies and moves nothing: no NPU took part, and "
            "the runtime's share of every time is the simulator's, whose threads also need a core.",
            f"Medians of {options.rounds} rounds; loop: of {options.loop_rounds}; launch_copy to "
            f"runtime call: {options.start_rounds * options.launches} launches each. {TENSORS} "
            f"tensors, scattered blocks. Load average at the start: {load_average:.2f}.",
        ],
    )
    parts: Mapping[str, Callable[..., None]] = {
        LAUNCH: launch_part,
        LOOP: loop_part,
        START: start_part,
    }
    with backends(pools.device, pools.host, streams, bare) as pair:
        for name, part in parts.items():
            if name in options.parts:
                part(report, pair, options)
    if BEHIND in options.parts:
        behind_part(report, pools, streams, bare, options)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    everything = (LAUNCH, LOOP, START, BEHIND)
    parser = argument_parser((__doc__ or "").splitlines()[0], rounds=40)
    parser.add_argument("--parts", nargs="+", default=everything, choices=everything)
    parser.add_argument(
        "--blocks", nargs="+", type=positive, default=(16, 64, 256, 1024), help="of a launch_copy"
    )
    parser.add_argument("--loop-ms", type=positive, default=15, help="length of the Python loop")
    parser.add_argument("--loop-rounds", type=positive, default=120, help="rounds of loop")
    parser.add_argument("--launches", type=positive, default=50, help="in a turn of start")
    parser.add_argument("--start-rounds", type=positive, default=20, help="rounds of start")
    parser.add_argument(
        "--block-bytes", type=positive, default=32 * 1024, help="payload of a block"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round of everything, to see that it runs"
    )
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.quick:
        options.rounds = options.loop_rounds = options.start_rounds = 1
        options.loop_ms, options.launches = 1, 5
        options.blocks = (16,)
        options.block_bytes = 512
    # New memory stays untouched, so that pools of any size fit.
    with simulator.overrides(poison=0, move_payload=0, shuffle=0):
        return finish(run(options), options)


if __name__ == "__main__":
    sys.exit(main())
