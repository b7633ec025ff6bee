"""The copy backend on the simulated NPU: streams, events, order, hazards, graphs, failures."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from backend_pools import WAIT_S, Events, Pools, backend_on, load, store
from conftest import eventually

from npu_kv_ops import NPUDmaCopyBackend, TransferError, copy_backend

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.npu


@pytest.fixture(autouse=True)
def _on_the_simulator(sim: ModuleType, npu: torch.device) -> Iterator[None]:
    yield
    sim.clear_faults()
    torch.npu.synchronize()


def recorded(stream: Any = None) -> Any:
    event = torch.npu.Event()
    event.record(stream or torch.npu.current_stream())
    return event


# Streams and devices


def test_both_directions_with_a_block_stride_larger_than_the_payload() -> None:
    pools = Pools(gap=5)
    with backend_on(pools) as backend:
        for is_store, src, dst in ((True, [1, 2, 3, -1], [7, 8, 2, 0]), (False, [8, 0], [5, 6])):
            (store if is_store else load)(backend, src, dst)
            pools.apply(src, dst, is_store)
        backend.synchronize(WAIT_S)
        pools.check()


def test_streams_that_are_given_are_used_and_others_are_made_and_destroyed(
    sim: ModuleType,
) -> None:
    pools = Pools()
    mine = torch.npu.Stream()
    mine.synchronize()
    live = sim.stats().live["streams"]
    with backend_on(pools, load_stream=mine) as backend:
        assert sim.stats().live["streams"] == live + 3  # stores, and a relay for each lane
        with sim.timeline() as tasks:
            load(backend, [1], [2])
            store(backend, [3], [4])
            backend.synchronize(WAIT_S)
        handles = {task.handle for task in tasks if task.kind == "batch"}
        assert len(handles) == 2
        assert mine.npu_stream in handles
    assert sim.stats().live["streams"] == live


def test_a_stream_of_another_device_is_refused() -> None:
    pools = Pools()
    for name in ("load_stream", "store_stream"):
        with pytest.raises(ValueError, match=f"{name}.*npu:0"):
            NPUDmaCopyBackend().init(pools.npu, pools.cpu, **{name: torch.npu.Stream("npu:1")})


@pytest.mark.parametrize("asked", [None, 1, "npu:1", "npu", torch.device("npu:1")])
def test_the_second_device_works_while_the_first_is_current(asked: Any) -> None:
    pools = Pools("npu:1")
    backend = NPUDmaCopyBackend()
    backend.init(pools.npu, pools.cpu, asked)
    try:
        with torch.npu.device(1):
            event = recorded()
        store(backend, [1, 2], [3, 4], event)
        pools.apply([1, 2], [3, 4], True)
        load(backend, [3], [9]).synchronize(WAIT_S)
        pools.apply([3], [9], False)
        pools.check()
        assert torch.npu.current_device() == 0
    finally:
        backend.shutdown(WAIT_S)


def test_a_device_that_is_not_that_of_the_pools_is_refused() -> None:
    pools = Pools()
    with pytest.raises(ValueError, match="device is npu:1, but npu_caches are on npu:0"):
        NPUDmaCopyBackend().init(pools.npu, pools.cpu, 1)


def test_page_able_host_pools_work_with_a_warning_and_cannot_be_captured() -> None:
    pools = Pools(pin=False)
    backend = NPUDmaCopyBackend()
    with pytest.warns(UserWarning, match=r"cpu_caches\[0\] is in page-able memory") as warned:
        backend.init(pools.npu, pools.cpu)
    assert warned[0].filename == __file__
    try:
        store(backend, [1], [2]).synchronize(WAIT_S)
        pools.apply([1], [2], True)
        pools.check()
        with pytest.raises(ValueError, match=r"cpu_caches\[0\] is in page-able memory"):
            backend.capture([1], [2], True)
    finally:
        backend.shutdown(WAIT_S)


# Order against the compute stream


def test_a_store_sees_what_was_written_before_the_event_and_a_load_waits_for_readers(
    sim: ModuleType,
) -> None:
    pools = Pools()
    compute = torch.npu.Stream()
    with backend_on(pools) as backend, torch.npu.stream(compute):
        for is_store in (True, False):
            with sim.stall(compute.npu_stream):
                source = torch.full_like(pools.npu[0][1], 7.0 + is_store)
                pools.npu[0][1].copy_(source)
                copy = pools.npu[0][2].clone()  # a reader of the block that the load writes
                event = recorded(compute)
                job = (
                    store(backend, [1], [5], event) if is_store else load(backend, [5], [2], event)
                )
                with pytest.raises(TimeoutError):
                    job.synchronize(0.02)
                assert not job.query()
            job.synchronize(WAIT_S)
            compute.synchronize()
            assert torch.equal(copy.cpu(), pools.npu_model[0][2])
            pools.npu_model[0][1] = 7.0 + is_store
            pools.apply([1] if is_store else [5], [5] if is_store else [2], is_store)
        pools.check()


def test_an_event_that_the_task_queue_has_not_issued_yet_1000_rounds(sim: ModuleType) -> None:
    """The event is used again each round, and recorded behind a stalled stream in every tenth."""
    pools = Pools(tensors=1)
    compute = torch.npu.Stream()
    event = torch.npu.Event()
    block, other = pools.npu[0][1], pools.npu[0][3]
    with backend_on(pools) as backend, torch.npu.stream(compute):
        for round_ in range(1000):
            stall = sim.stall(compute.npu_stream) if round_ % 10 == 0 else None
            block.fill_(float(round_))
            event.record(compute)
            # A store that runs too early sees what the round before left.
            job = store(backend, [1], [round_ % 20], event)
            other.fill_(round_ + 0.5)
            event.record(compute)
            late = store(backend, [3], [(round_ + 1) % 20], event)
            guard = load(backend, [round_ % 20], [2], event)
            if stall is not None:
                assert not job.query()
                stall.release()
            guard.wait(compute)
            seen = pools.npu[0][2].cpu()
            job.synchronize(WAIT_S)
            late.synchronize(WAIT_S)
            stored = pools.cpu[0][round_ % 20]
            assert stored.eq(float(round_)).all()
            assert pools.cpu[0][(round_ + 1) % 20].eq(round_ + 0.5).all()
            assert torch.equal(seen, stored)


@pytest.mark.races
def test_without_the_event_a_store_sees_what_was_there_before(sim: ModuleType) -> None:
    """The control of the test above."""
    pools = Pools(tensors=1)
    compute = torch.npu.Stream()
    with backend_on(pools) as backend, torch.npu.stream(compute):
        with sim.stall(compute.npu_stream):
            pools.npu[0][1].fill_(7.0)
            store(backend, [1], [2]).synchronize(WAIT_S)
        assert torch.equal(pools.cpu[0][2], pools.npu_model[0][1])


def test_the_store_waits_for_its_own_record_and_not_for_a_later_one(sim: ModuleType) -> None:
    pools = Pools()
    compute, later = torch.npu.Stream(), torch.npu.Stream()
    event = recorded(compute)
    with backend_on(pools) as backend, sim.stall(later.npu_stream):
        job = store(backend, [1], [2], event)
        event.record(later)
        job.synchronize(WAIT_S)


def test_an_event_that_was_never_recorded_orders_nothing() -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        store(backend, [1], [2], torch.npu.Event()).synchronize(WAIT_S)
        pools.apply([1], [2], True)
        pools.check()


@pytest.mark.parametrize("event", [object(), torch.Event("cpu"), "external"])
def test_other_events_are_refused(event: Any) -> None:
    pools = Pools()
    if event == "external":
        event = torch.npu.ExternalEvent()
    events: Events = []
    with backend_on(pools) as backend:
        with pytest.raises(TypeError, match=r"wait_event is a .*allowed is torch\.npu\.Event"):
            backend.launch_copy([1], [2], True, 0, events, event)
        assert not events
        backend.synchronize(WAIT_S)
        assert backend.stats().stores.jobs == 0


def test_a_stream_waits_for_a_transfer(sim: ModuleType) -> None:
    pools = Pools()
    compute, reader = torch.npu.Stream(), torch.npu.Stream()
    with backend_on(pools) as backend:
        with sim.stall(compute.npu_stream):
            job = load(backend, [3], [4], recorded(compute))
            job.wait(reader)
            with torch.npu.stream(reader):
                seen = pools.npu[0][4].clone()
            assert not job.query()
            assert not reader.query()
        reader.synchronize()
        assert torch.equal(seen.cpu(), pools.cpu_model[0][3])


def test_a_capturing_stream_cannot_wait_for_a_transfer(run_script: RunScript) -> None:
    done = run_script(
        """
        import torch, npu_kv_ops as kv
        npu, cpu = torch.zeros(4, 8, device="npu"), kv.empty_pinned((4, 8), dtype=torch.float32)
        torch.npu.synchronize()  # a job without an event does not wait for what fills its pool
        with kv.NPUDmaCopyBackend() as backend:
            backend.init([npu], [cpu])
            events = []
            backend.launch_copy([1], [1], True, 0, events)
            graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
            with torch.npu.stream(stream):
                graph.capture_begin()
                try:
                    events[0][1].wait(stream)
                except RuntimeError as error:
                    print(error)
                graph.capture_end()
            events[0][1].synchronize(60)
        """
    )
    assert "TransferEvent.wait: the stream captures a graph" in done.stdout


# Order between the lanes


def in_flight(backend: NPUDmaCopyBackend) -> tuple[int, int]:
    stats = backend.stats()
    return stats.loads.in_flight, stats.stores.in_flight


@pytest.mark.parametrize(
    ("first", "second", "ordered"),
    [
        ((True, [7], [1]), (False, [2], [7]), True),  # a load into 7 after a store from 7
        ((True, [7], [1]), (False, [1], [3]), True),  # a load from host 1 after a store into it
        ((False, [1], [7]), (True, [7], [2]), True),  # a store from 7 after a load into it
        ((False, [3], [7]), (True, [5], [3]), True),  # a store into host 3 after a load from it
        ((True, [7], [1]), (False, [2], [6]), False),
        ((False, [7], [1]), (True, [2], [6]), False),
    ],
)
@pytest.mark.parametrize("as_graph", [False, True])
def test_jobs_of_both_lanes_are_ordered_by_common_blocks_alone(
    sim: ModuleType, first: Any, second: Any, ordered: bool, as_graph: bool
) -> None:
    sim.configure(h2d_bytes_per_second=10_000, d2h_bytes_per_second=10_000)
    pools = Pools()
    compute = torch.npu.Stream()
    with backend_on(pools) as backend:
        jobs: Events = []
        graphs = [backend.capture(src, dst, kind) for kind, src, dst in (first, second)]
        with sim.timeline() as tasks:
            # Both are on their streams before either runs.
            with sim.stall(compute.npu_stream):
                for graph, (is_store, src, dst) in zip(graphs, (first, second)):
                    event = recorded(compute)
                    if as_graph:
                        backend.launch_graph(graph, 0, jobs, event)
                    else:
                        backend.launch_copy(src, dst, is_store, 0, jobs, event)
                    pools.apply(src, dst, is_store)
                assert eventually(lambda: in_flight(backend) == (1, 1))
            backend.synchronize(WAIT_S)
        streams = {t.handle for t in tasks if t.bytes > 0}
        assert len(streams) == 2
        by_stream = [
            [(t.start_ns, t.end_ns) for t in tasks if t.bytes > 0 and t.handle == s]
            for s in streams
        ]
        (a, b), (c, d) = ((rows[0][0], rows[-1][1]) for rows in by_stream)
        assert (b <= c or d <= a) == ordered
        stats = backend.stats()
        assert stats.loads.hazards + stats.stores.hazards == int(ordered)
        pools.check()


# Graphs


def test_a_graph_is_one_call_of_the_runtime(sim: ModuleType) -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        graph = backend.capture([1, 3, 5], [2, 4, 6], True)
        sim.reset_stats()
        events: Events = []
        for index in range(4):
            backend.launch_graph(graph, index, events)
        backend.synchronize(WAIT_S)
        stats = sim.stats()
        assert stats.calls["aclmdlRIExecuteAsync"] == 4
        assert stats.calls.get("aclrtMemcpyBatchAsync", 0) == 0
        assert stats.copies["d2h"] == 4 * 9
        pools.apply([1, 3, 5], [2, 4, 6], True)
        pools.check()
        live = sim.stats().live["graphs"]
        del graph
        assert eventually(lambda: sim.stats().live["graphs"] == live - 1)


def test_a_graph_reads_its_blocks_at_every_launch() -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        graph = backend.capture([1], [2], True)
        events: Events = []
        for value in range(5):
            pools.npu[0][1].fill_(value)
            pools.npu_model[0][1] = value
            backend.launch_graph(graph, value, events, recorded())
            pools.apply([1], [2], True)
            events[-1][1].synchronize(WAIT_S)
            pools.check()


def test_a_transfer_too_large_for_a_graph_says_so_and_leaves_the_backend_usable(
    sim: ModuleType,
) -> None:
    sim.configure(graph_copies=8)
    pools = Pools()
    with backend_on(pools) as backend:
        with pytest.raises(TransferError, match=r"captured.*this transfer has 9; launch_copy has"):
            backend.capture([1, 3, 5], [2, 4, 6], True)
        store(backend, [1, 3, 5], [2, 4, 6]).synchronize(WAIT_S)
        pools.apply([1, 3, 5], [2, 4, 6], True)
        pools.check()
        assert len(backend.capture([1], [2], True)) == 1


def test_a_graph_of_nothing() -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        events: Events = []
        backend.launch_graph(backend.capture([-1], [3], False), 0, events)
        events[0][1].synchronize(WAIT_S)


@pytest.mark.parametrize(
    "function", ["aclmdlRICaptureBegin", "aclmdlRICaptureEnd", "aclrtMemcpyBatchAsync"]
)
def test_a_capture_that_fails_leaves_nothing_behind(sim: ModuleType, function: str) -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        backend.capture([3], [4], True)  # makes the stream for captures
        live = sim.stats().live
        sim.fail_call(function, code=507899)
        with pytest.raises(TransferError, match=rf"captured: .*{function}.*507899"):
            backend.capture([1], [2], True)
        assert sim.stats().live == live
        backend.launch_graph(backend.capture([1], [2], True), 0, [])
        pools.apply([1], [2], True)
        backend.synchronize(WAIT_S)
        pools.check()


def test_a_graph_that_fails_to_launch_fails_its_job(sim: ModuleType) -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        graph = backend.capture([1], [2], True)
        sim.fail_call("aclmdlRIExecuteAsync", code=507011)
        events: Events = []
        backend.launch_graph(graph, 5, events)
        backend.launch_graph(graph, 6, events)
        with pytest.raises(TransferError, match=r"store 5 .*aclmdlRIExecuteAsync.*507011"):
            events[0][1].synchronize(WAIT_S)
        events[1][1].synchronize(WAIT_S)


# Failures

CALLS = [
    "aclrtCreateEventExWithFlag",
    "aclrtRecordEvent",
    "aclrtStreamWaitEvent",
    "aclrtMemcpyBatchAsync",
    "aclrtQueryEventStatus",
    "aclrtSynchronizeEvent",
]


@pytest.mark.parametrize("function", CALLS)
def test_a_failing_call_fails_its_job_by_name_and_no_later_one(
    sim: ModuleType, function: str
) -> None:
    pools = Pools()
    event = recorded()
    torch.npu.synchronize()
    with backend_on(pools) as backend:
        events: Events = []
        # torch_npu's own threads query events as well, and may take a single fault.
        sim.fail_call(function, code=507899, times=100 if "Query" in function else 1)
        backend.launch_copy([1, 4], [2, 7], True, 17, events, event)
        job = r"store 17 \(device to host, 2 pairs, the first pair 1 -> 2 of tensor 0\) failed"
        with pytest.raises(TransferError, match=f"{job}: .*{function}.*507899"):
            events[0][1].synchronize(WAIT_S)
        sim.clear_faults()
        with pytest.raises(TransferError, match="store 17"):
            events[0][1].query()
        with pytest.raises(TransferError, match="store 17"):
            events[0][1].wait()
        pools.cpu_model = [t.clone() for t in pools.cpu]  # what a failed store leaves is undefined
        for is_store in (True, False):
            backend.launch_copy([3], [5], is_store, 18, events, event)
            events[-1][1].synchronize(WAIT_S)
            pools.apply([3], [5], is_store)
        pools.check()
        stats = backend.stats()
        assert (stats.stores.failures, stats.loads.failures) == (1, 0)
        assert (stats.stores.jobs, stats.loads.jobs) == (1, 1)


@pytest.mark.parametrize("function", ["aclrtSetDevice", "aclrtCreateStreamWithConfig"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_backend_that_cannot_start_says_why_and_leaves_nothing(
    sim: ModuleType, function: str, nth: int
) -> None:
    if function == "aclrtSetDevice" and nth > 1:
        nth = 1
    pools = Pools()
    live = sim.stats().live
    sim.fail_call(function, nth=nth, code=207008)
    backend = NPUDmaCopyBackend()
    with pytest.raises(TransferError, match=rf"cannot start.*{function}.*207008"):
        backend.init(pools.npu, pools.cpu)
    assert sim.stats().live["streams"] == live["streams"]
    backend.init(pools.npu, pools.cpu)
    backend.shutdown(WAIT_S)


def test_events_run_out(sim: ModuleType) -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        sim.configure(max_events=sim.stats().live["events"])
        job = store(backend, [1], [2])
        with pytest.raises(TransferError, match="aclrtCreateEventExWithFlag"):
            job.synchronize(WAIT_S)
        sim.configure(max_events=65_536)
        store(backend, [1], [2]).synchronize(WAIT_S)


def test_a_refused_batch_is_named_by_its_first_pair(sim: ModuleType) -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        sim.fail_call("aclrtMemcpyBatchAsync", code=507899)
        job = load(backend, [-1, 4, 6], [0, 1, 9])
        with pytest.raises(TransferError, match=r"begins with pair 4 -> 1 of tensor 0: .*507899"):
            job.synchronize(WAIT_S)


FAIL_ON_DEVICE = """
    import torch, npu_kv_ops as kv
    from npu_kv_ops import simulator
    npu = torch.arange(64, dtype=torch.float32).view(8, 8).npu()
    cpu = kv.empty_pinned((8, 8), dtype=torch.float32)
    torch.npu.synchronize()
    backend = kv.NPUDmaCopyBackend()
    backend.init([npu], [cpu])
    events = []
    simulator.fail_copy(code=507013)
    backend.launch_copy([1], [2], True, 1, events)
    for index in range(2, 5):
        try:
            events[-1][1].synchronize(60)
        except kv.TransferError as error:
            print("failed:", error)
        backend.launch_copy([index], [index], index % 2 == 0, index, events)
    for _, event in events[1:]:
        try:
            event.synchronize(60)
            print("done")
        except kv.TransferError as error:
            print("failed:", error)
    backend.shutdown(60)
    print("shut down")
"""


def test_a_copy_that_fails_on_the_device_stops_it_and_every_job_tells_the_cause(
    run_script: RunScript,
) -> None:
    """torch_npu's streams stop at the first failure: nothing runs any more, and nothing hangs."""
    done = run_script(FAIL_ON_DEVICE, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("failed:")]
    assert len(lines) >= 4
    assert "store 1 (device to host, 1 pair, the first pair 1 -> 2 of tensor 0)" in lines[0]
    assert all("507013" in line for line in lines)
    assert "done" not in done.stdout
    assert "shut down" in done.stdout


# Lifetimes


def test_time_runs_out_without_harm(sim: ModuleType) -> None:
    pools = Pools()
    compute = torch.npu.Stream()
    backend = NPUDmaCopyBackend()
    backend.init(pools.npu, pools.cpu)
    with sim.stall(compute.npu_stream):
        job = store(backend, [1], [2], recorded(compute))
        for wait in (job.synchronize, backend.synchronize, backend.shutdown):
            with pytest.raises(TimeoutError, match=r"0\.02 s"):
                wait(0.02)
        with pytest.raises(RuntimeError, match="shut down"):
            store(backend, [1], [2])
    backend.shutdown(WAIT_S)
    assert job.query()
    pools.apply([1], [2], True)
    pools.check()


def test_the_pools_live_until_the_shutdown_and_no_longer() -> None:
    pools = Pools()
    held = [weakref.ref(tensor) for tensor in (*pools.npu, *pools.cpu)]
    backend = NPUDmaCopyBackend()
    backend.init(pools.npu, pools.cpu)
    del pools
    gc.collect()
    assert all(tensor() is not None for tensor in held)
    store(backend, [1], [2]).synchronize(WAIT_S)
    backend.shutdown(WAIT_S)
    gc.collect()
    assert all(tensor() is None for tensor in held)


def test_a_backend_that_is_dropped_shuts_itself_down(sim: ModuleType) -> None:
    pools = Pools()
    live = sim.stats().live
    backend = NPUDmaCopyBackend()
    backend.init(pools.npu, pools.cpu)
    job = store(backend, [1], [2])
    del job, backend
    assert eventually(lambda: sim.stats().live["streams"] == live["streams"])
    pools.apply([1], [2], True)
    pools.check()


def test_100_000_jobs_leave_as_much_as_100(sim: ModuleType) -> None:
    sim.configure(move_payload=0)
    pools = Pools(tensors=1)
    with backend_on(pools) as backend:
        event = torch.npu.Event()

        def run(count: int) -> dict[str, int]:
            events: Events = []
            for index in range(count):
                gate = None
                if index % 50 == 0:
                    event.record()
                    gate = event
                ids = [index % 12], [index % 20]
                is_store = index % 3 != 0
                backend.launch_copy(
                    *(ids if is_store else ids[::-1]), is_store, index, events, gate
                )
                if len(events) == 100:
                    for _, each in events:
                        each.synchronize(WAIT_S)
                    events.clear()
            backend.synchronize(WAIT_S)
            torch.npu.synchronize()
            return dict(sim.stats().live)

        run(1000)
        few = run(100)
        threads = threading.active_count()
        many = run(100_000)
        assert threading.active_count() == threads
        assert many["events"] <= few["events"] + 100  # as many as were ever in flight at once
        assert {**many, "events": 0} == {**few, "events": 0}


EXIT_CASES = {
    "idle": "",
    "running": "backend.launch_copy([1], [1], True, 0, events)",
    "exception": "backend.launch_copy([1], [1], True, 0, events); raise SystemExit(3)",
    "stalled": (
        "stream = torch.npu.Stream(); stall = simulator.stall(stream.npu_stream)\n"
        "event = torch.npu.Event(); event.record(stream)\n"
        "backend.launch_copy([1], [1], True, 0, events, event)\n"
        "kv.copy_backend._EXIT_TIMEOUT_S = 0.2"
    ),
    "torch first": "del npu, cpu; backend.launch_copy([1], [1], True, 0, events)",
    "shut down twice": "backend.shutdown(60); backend.shutdown(60)",
    "in a thread": (
        "t = threading.Thread(target=backend.launch_copy, args=([1], [1], True, 0, events))\n"
        "t.start(); t.join()"
    ),
    "other device": "torch.npu.set_device(1); backend.launch_copy([1], [1], True, 0, events)",
}


@pytest.mark.parametrize("case", EXIT_CASES)
def test_the_interpreter_ends_whatever_the_backend_does(run_script: RunScript, case: str) -> None:
    script = (
        "import threading, torch, npu_kv_ops as kv\n"
        "from npu_kv_ops import simulator\n"
        "npu = torch.zeros(4, 8, device='npu:0'); torch.npu.synchronize()\n"
        "cpu = kv.empty_pinned((4, 8), dtype=torch.float32)\n"
        "backend = kv.NPUDmaCopyBackend()\n"
        "backend.init([npu], [cpu])\n"
        "events = []\n"
        f"{EXIT_CASES[case]}\n"
        "print('end')\n"
    )
    done = run_script(script, check=False, env={"NPU_KV_SIM_DEVICES": "2"})
    assert done.returncode == (3 if case == "exception" else 0), done.stderr
    assert "Traceback" not in done.stderr


def test_the_backend_ends_before_what_torch_npu_has_registered(run_script: RunScript) -> None:
    """Also where weakref's exit function is older than torch_npu's."""
    done = run_script(
        """
        import atexit, weakref
        class Any: pass
        older = Any()
        weakref.finalize(older, print, "weakref")
        import torch, npu_kv_ops as kv
        npu, cpu = torch.zeros(4, 8, device="npu"), kv.empty_pinned((4, 8), dtype=torch.float32)
        torch.npu.synchronize()  # a job without an event does not wait for what fills its pool
        atexit.register(print, "torch_npu")
        from npu_kv_ops import copy_backend
        finish = copy_backend._finish
        copy_backend._finish = lambda *args: (print("backend"), finish(*args))
        backend = kv.NPUDmaCopyBackend()
        backend.init([npu], [cpu])
        backend.launch_copy([1], [1], True, 0, [])
        """
    )
    assert done.stdout.split() == ["backend", "torch_npu", "weakref"]


def test_an_exception_leaves_the_with_block_although_a_transfer_does_not_end(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_backend, "_EXIT_TIMEOUT_S", 0.1)
    pools = Pools()
    lane = torch.npu.Stream()
    with sim.stall(lane.npu_stream), NPUDmaCopyBackend() as backend:
        backend.init(pools.npu, pools.cpu, store_stream=lane)
        with pytest.raises(TimeoutError, match=r"0\.01 s"), backend:
            store(backend, [1], [2]).synchronize(0.01)
        # The outer block ends well, when the stall has ended.
        sim.clear_faults()


def test_pools_of_a_backend_that_was_given_up_are_not_freed(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may still write to them."""
    monkeypatch.setattr(copy_backend, "_EXIT_TIMEOUT_S", 0.05)
    pools = Pools()
    held = [weakref.ref(tensor) for tensor in (*pools.npu, *pools.cpu)]
    lane = torch.npu.Stream()
    with sim.stall(lane.npu_stream):
        backend = NPUDmaCopyBackend()
        backend.init(pools.npu, pools.cpu, load_stream=lane)
        load(backend, [1], [2])
        del backend, pools
        gc.collect()
        assert all(tensor() is not None for tensor in held)
    copy_backend._given_up.clear()


def test_a_wait_ends_at_a_signal(run_script: RunScript) -> None:
    done = run_script(
        """
        import os, signal, threading, torch, npu_kv_ops as kv
        from npu_kv_ops import simulator
        npu, cpu = torch.zeros(4, 8, device="npu"), kv.empty_pinned((4, 8), dtype=torch.float32)
        torch.npu.synchronize()  # a job without an event does not wait for what fills its pool
        lane = torch.npu.Stream()
        backend = kv.NPUDmaCopyBackend()
        backend.init([npu], [cpu], store_stream=lane)
        stall, events = simulator.stall(lane.npu_stream), []
        backend.launch_copy([1], [1], True, 0, events)
        for wait in (events[0][1].synchronize, backend.synchronize, backend.shutdown):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                wait()
            except KeyboardInterrupt:
                print("interrupted")
        stall.release()
        backend.shutdown(60)
        """
    )
    assert done.stdout.split() == ["interrupted"] * 3


def test_a_slow_store_holds_up_nobody_where_the_runtime_cannot_stop_waiting(
    run_script: RunScript,
) -> None:
    done = run_script(
        """
        from npu_kv_ops import simulator
        simulator.activate(without=["aclrtSynchronizeStreamWithTimeout"])
        import time, torch, npu_kv_ops as kv
        npu, cpu = torch.zeros(4, 8, device="npu"), kv.empty_pinned((4, 8), dtype=torch.float32)
        torch.npu.synchronize()  # a job without an event does not wait for what fills its pool
        lane = torch.npu.Stream()
        with kv.NPUDmaCopyBackend() as backend:
            backend.init([npu], [cpu], store_stream=lane)
            stall, events = simulator.stall(lane.npu_stream), []
            backend.launch_copy([1], [1], True, 0, events)
            time.sleep(0.3)  # until the stream is asked what it is doing
            backend.launch_copy([2], [2], False, 1, events)
            events[1][1].synchronize(30)
            print("store done:", events[0][1].query())
            stall.release()
        """,
        runtime=None,
    )
    assert "store done: False" in done.stdout


def test_launching_with_an_event_during_a_capture_is_refused(run_script: RunScript) -> None:
    done = run_script(
        """
        import torch, npu_kv_ops as kv
        npu, cpu = torch.zeros(4, 8, device="npu"), kv.empty_pinned((4, 8), dtype=torch.float32)
        torch.npu.synchronize()  # a job without an event does not wait for what fills its pool
        with kv.NPUDmaCopyBackend() as backend:
            backend.init([npu], [cpu])
            graph, events, event = torch.npu.NPUGraph(), [], torch.npu.Event()
            with torch.npu.graph(graph):
                event.record()
                try:
                    backend.launch_copy([1], [1], True, 0, events, event)
                except RuntimeError as error:
                    print(error)
                backend.launch_copy([1], [2], True, 1, events)
            events[0][1].synchronize(60)
            graph.replay()
            torch.npu.synchronize()
            print("usable", len(events))
        """
    )
    assert "wait_event: the current stream captures a graph" in done.stdout
    assert "usable 1" in done.stdout


def test_what_is_no_direction_is_refused() -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        for use in (
            lambda: backend.launch_copy([1], [2], None, 0, []),  # type: ignore[arg-type]
            lambda: backend.capture([1], [2], 1),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match="is_store is"):
                use()


def test_an_event_of_another_device_is_refused() -> None:
    pools = Pools()
    with torch.npu.device(1):
        event = recorded()
    with backend_on(pools) as backend, pytest.raises(ValueError, match="wait_event is on npu:1"):
        store(backend, [1], [2], event)


def test_a_stream_waits_from_a_thread_with_another_device() -> None:
    pools = Pools("npu:1")
    with backend_on(pools) as backend:
        job = store(backend, [1], [2])
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                job.wait()
            except BaseException as error:
                errors.append(error)

        job.wait()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(WAIT_S)
        assert not errors
        job.synchronize(WAIT_S)


def test_a_trace_that_cannot_be_written_is_refused_at_its_begin(tmp_path: Path) -> None:
    pools = Pools()
    with backend_on(pools) as backend:
        with pytest.raises(FileNotFoundError):
            backend.trace(tmp_path / "none" / "trace.json")
        backend.trace(tmp_path / "trace.json").stop()
    with pytest.raises(RuntimeError, match="shut down"):
        backend.trace(tmp_path / "trace.json")


def test_two_devices_at_once() -> None:
    both = [Pools(f"npu:{index}", seed=index) for index in range(2)]
    with backend_on(both[0]) as first, backend_on(both[1]) as second:
        for round_ in range(30):
            for pools, backend in zip(both, (first, second)):
                src, dst = [round_ % 11, 11], [(7 * round_) % 11, 11]
                for is_store, launch in ((True, store), (False, load)):
                    launch(backend, src, dst)
                    pools.apply(src, dst, is_store)
        for pools, backend in zip(both, (first, second)):
            backend.synchronize(WAIT_S)
            pools.check()


def test_a_forked_child_is_told(run_script: RunScript) -> None:
    done = run_script(
        """
        import os, torch, npu_kv_ops as kv
        npu, cpu = torch.zeros(4, 8, device="npu"), kv.empty_pinned((4, 8), dtype=torch.float32)
        torch.npu.synchronize()  # a job without an event does not wait for what fills its pool
        backend = kv.NPUDmaCopyBackend()
        backend.init([npu], [cpu])
        events = []
        backend.launch_copy([1], [1], True, 0, events)
        event = events[0][1]
        child = os.fork()
        if child == 0:
            uses = [
                lambda: backend.launch_copy([1], [1], True, 0, []), backend.stats,
                backend.shutdown, backend.synchronize, event.query, event.synchronize, event.wait,
            ]
            told = 0
            for use in uses:
                try:
                    use()
                except RuntimeError as error:
                    told += "forked child" in str(error)
            os._exit(0 if told == len(uses) else 1)
        print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        event.synchronize(60)
        backend.shutdown(60)
        print("parent done")
        """
    )
    assert "child: 0" in done.stdout
    assert "parent done" in done.stdout


# The trace


def test_a_trace_holds_jobs_hazards_and_the_streams_of_the_device(
    sim: ModuleType, tmp_path: Path
) -> None:
    pools = Pools()
    path = tmp_path / "trace.json"
    with backend_on(pools) as backend:
        with backend.trace(path):
            with sim.stall(torch.npu.current_stream().npu_stream):
                store(backend, [1, 5], [2, 3], recorded())
                load(backend, [2], [7])
            backend.synchronize(WAIT_S)
            with pytest.raises(RuntimeError, match="is running"):
                backend.trace(path)
        store(backend, [1], [2])
        later = backend.trace(tmp_path / "second.json")
    assert (tmp_path / "second.json").exists()  # shutdown ends it
    later.stop()
    events = json.loads(path.read_text())["traceEvents"]
    begins = [e for e in events if e["ph"] == "b"]
    assert {e["name"] for e in begins} == {"store 0", "load 0"}
    assert {e["cat"] for e in begins} == {"queued", "issue", "copy"}
    assert [e["args"]["behind"] for e in begins if e["name"] == "load 0"] == [1, 1, 1]
    ends = {(e["id"], e["cat"]): e["ts"] for e in events if e["ph"] == "e"}
    assert all(ends[e["id"], e["cat"]] >= e["ts"] for e in begins)
    arrows = [e for e in events if e["ph"] in "sf"]
    assert [e["ph"] for e in arrows] == ["s", "f"]
    assert any(e["ph"] == "n" and "wait_event" in e["name"] for e in events)
    device = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in device} == {1, 2}
    block = pools.npu[0][0].numel() * pools.npu[0].element_size()
    assert sum(e["args"]["bytes"] for e in device) == 3 * (2 + 1) * block
