"""The unmodified torch_npu on the simulated runtime: what works, and what is refused."""

from __future__ import annotations

import signal
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.npu

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _on_the_simulator(sim: ModuleType, npu: torch.device) -> None:
    """Every test here is about the simulator and starts on an idle device."""


def pinned(values: torch.Tensor) -> torch.Tensor:
    return values.pin_memory()


def test_the_simulated_devices_are_there() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 2
    assert torch.npu.get_device_name(0).startswith("Ascend910B")


def test_memory_goes_through_the_caching_allocator_and_back(sim: ModuleType) -> None:
    torch.npu.empty_cache()
    before = sim.stats().live["device_bytes"]
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    held = sim.stats().live["device_bytes"] - before
    assert held >= 64 * MIB
    del block
    assert sim.stats().live["device_bytes"] - before == held, "the allocator caches what is freed"
    torch.npu.empty_cache()
    assert sim.stats().live["device_bytes"] == before


def test_the_device_runs_out_of_memory_at_its_limit(sim: ModuleType) -> None:
    torch.npu.empty_cache()
    sim.configure(device_memory_bytes=sim.stats().live["device_bytes"] + 32 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    assert torch.empty(4 * MIB, dtype=torch.uint8, device="npu").numel() == 4 * MIB


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("pin", [False, True])
def test_copies_in_all_directions(pin: bool, non_blocking: bool) -> None:
    source = torch.arange(5000, dtype=torch.float32)
    target = torch.zeros(5000)
    if pin:
        source, target = pinned(source), pinned(target)
    first = torch.empty(5000, device="npu:0")
    second = torch.empty(5000, device="npu:0")
    other_device = torch.empty(5000, device="npu:1")
    first.copy_(source, non_blocking=non_blocking)
    second.copy_(first, non_blocking=non_blocking)
    torch.npu.synchronize("npu:0")
    other_device.copy_(second, non_blocking=non_blocking)
    torch.npu.synchronize("npu:0")
    torch.npu.synchronize("npu:1")
    target.copy_(other_device, non_blocking=non_blocking)
    torch.npu.synchronize("npu:1")
    assert torch.equal(target, source)


def test_new_memory_is_not_zero(sim: ModuleType) -> None:
    torch.npu.empty_cache()
    assert torch.empty(4 * MIB, dtype=torch.uint8, device="npu").cpu().ne(0).all()
    assert torch.empty(1 * MIB, dtype=torch.uint8, pin_memory=True).ne(0).any()


def test_a_stream_that_stalls_holds_back_only_itself_and_its_waiters(sim: ModuleType) -> None:
    source = pinned(torch.ones(1000))
    slow, waiter, free = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Stream()
    a, b, c = (torch.empty(1000, device="npu") for _ in range(3))
    out = pinned(torch.zeros(1000))
    torch.npu.synchronize()
    stall = sim.stall(slow.npu_stream)
    with torch.npu.stream(slow):
        a.copy_(source, non_blocking=True)
        event = torch.npu.Event()
        event.record()
    with torch.npu.stream(waiter):
        waiter.wait_event(event)
        b.copy_(a, non_blocking=True)
        out.copy_(b, non_blocking=True)
    with torch.npu.stream(free):
        c.copy_(source, non_blocking=True)
    free.synchronize()
    assert free.query()
    assert not slow.query()
    assert not waiter.query()
    assert not event.query()
    assert out.eq(0).all()
    stall.release()
    waiter.synchronize()
    assert event.query()
    assert out.eq(1).all()


def test_events_measure_virtual_time_exactly(sim: ModuleType) -> None:
    sim.configure(h2d_bytes_per_second=10**9, copy_ns=2000, call_ns=0)
    source = pinned(torch.zeros(10**6, dtype=torch.uint8))
    target = torch.empty(10**6, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.002)


def test_copies_on_two_streams_overlap_on_the_virtual_clock(sim: ModuleType) -> None:
    sim.configure(h2d_bytes_per_second=10**9, d2h_bytes_per_second=10**9, copy_ns=0, call_ns=0)
    source, target = (pinned(torch.zeros(10**6, dtype=torch.uint8)) for _ in range(2))
    a, b = (torch.empty(10**6, dtype=torch.uint8, device="npu") for _ in range(2))
    load, store = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with sim.timeline() as tasks:
        with torch.npu.stream(load):
            a.copy_(source, non_blocking=True)
        with torch.npu.stream(store):
            target.copy_(b, non_blocking=True)
        torch.npu.synchronize()
    copies = [task for task in tasks if task.kind == "copy"]
    assert [task.end_ns - task.start_ns for task in copies] == [10**6, 10**6]
    assert copies[0].start_ns == copies[1].start_ns
    assert copies[0].stream != copies[1].stream


def test_a_graph_reads_pinned_memory_anew_at_every_replay() -> None:
    source, result = pinned(torch.zeros(256)), pinned(torch.zeros(256))
    on_device = torch.empty(256, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        on_device.copy_(source, non_blocking=True)
        result.copy_(on_device, non_blocking=True)
    torch.npu.synchronize()
    assert result.eq(0).all(), "nothing runs while it is captured"
    for value in (1.0, 2.0):
        source.fill_(value)
        graph.replay()
        torch.npu.synchronize()
        assert result.eq(value).all()


def test_a_graph_across_two_streams_keeps_its_order(sim: ModuleType) -> None:
    source, result = pinned(torch.arange(64.0)), pinned(torch.zeros(64))
    a, b = (torch.empty(64, device="npu") for _ in range(2))
    side = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        a.copy_(source, non_blocking=True)
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            b.copy_(a, non_blocking=True)
        torch.npu.current_stream().wait_stream(side)
        result.copy_(b, non_blocking=True)
    for step in range(20):
        source.copy_(torch.arange(64.0) + step)
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(result, torch.arange(64.0) + step)


def test_a_stream_pulled_into_a_capture_has_to_come_back() -> None:
    side = torch.npu.Stream()
    source = pinned(torch.zeros(8))
    target = torch.empty(8, device="npu")
    torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="107025"), torch.npu.graph(torch.npu.NPUGraph()):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            target.copy_(source, non_blocking=True)
    target.copy_(source)
    assert target.cpu().eq(0).all(), "the streams are usable again"


@pytest.mark.parametrize(
    ("forbidden", "code"),
    [
        (lambda x: x.cpu(), "107030|107027"),
        (lambda x: torch.npu.current_stream().synchronize(), "107027"),
        (lambda x: torch.npu.synchronize(), "107027"),
    ],
    ids=["blocking copy", "stream synchronise", "device synchronise"],
)
def test_what_would_wait_is_refused_during_capture(forbidden, code: str) -> None:
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    with pytest.raises(RuntimeError, match=code), torch.npu.graph(torch.npu.NPUGraph()):
        forbidden(x)
    torch.npu.synchronize()
    assert x.cpu().eq(0).all()


def test_a_pageable_copy_is_refused_during_capture(run_script: RunScript) -> None:
    # The refusal comes on torch_npu's queue thread, which ends the use of the device.
    run_script(
        """
        import torch

        x = torch.zeros(8, device="npu")
        torch.npu.synchronize()
        try:
            with torch.npu.graph(torch.npu.NPUGraph()):
                x.copy_(torch.ones(8), non_blocking=True)
        except RuntimeError as error:
            assert "copy" in str(error).lower(), error
        else:
            raise SystemExit("the copy was captured")
        """
    )


def test_an_external_event_orders_a_replay_with_another_stream(sim: ModuleType) -> None:
    source, result = pinned(torch.ones(32)), pinned(torch.zeros(32))
    on_device = torch.zeros(32, device="npu")
    gate = torch.npu.ExternalEvent()
    other = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        gate.wait(torch.npu.current_stream())
        gate.reset(torch.npu.current_stream())
        result.copy_(on_device, non_blocking=True)
    for value in (1.0, 2.0, 3.0):
        source.fill_(value)
        graph.replay()
        assert not torch.npu.current_stream().query()
        with torch.npu.stream(other):
            on_device.copy_(source, non_blocking=True)
            gate.record(other)
        torch.npu.synchronize()
        assert result.eq(value).all()


def test_host_callbacks_run_in_stream_order_and_at_every_replay() -> None:
    seen: list[float] = []
    source = pinned(torch.zeros(4))
    landing = pinned(torch.zeros(4))
    on_device = torch.empty(4, device="npu")
    stream = torch.npu.Stream()
    torch.npu.synchronize()
    torch.npu._subscribe_report(stream)
    try:
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, stream=stream):
            on_device.copy_(source, non_blocking=True)
            landing.copy_(on_device, non_blocking=True)
            torch.npu._launch_host_func(stream, lambda _: seen.append(float(landing[0])), None)
        assert seen == []
        for value in (1.0, 2.0):
            source.fill_(value)
            with torch.npu.stream(stream):
                graph.replay()
            stream.synchronize()
        assert seen == [1.0, 2.0]
    finally:
        torch.npu._unsubscribe_report(stream)


def test_the_task_queue_may_be_off(run_script: RunScript) -> None:
    run_script(
        """
        import torch
        from npu_kv_ops import simulator

        source, result = torch.arange(64.0).pin_memory(), torch.zeros(64).pin_memory()
        x = torch.empty(64, device="npu")
        with simulator.stall(torch.npu.current_stream().npu_stream):
            x.copy_(source, non_blocking=True)
            # Without the queue the call is made by the caller, before copy_ returns.
            assert simulator.stats().calls["aclrtMemcpyAsync"] == 1
            result.copy_(x, non_blocking=True)
        torch.npu.synchronize()
        assert torch.equal(result, source)
        """,
        env={"TASK_QUEUE_ENABLE": "0"},
    )


COPY_MODEL = """
    import torch
    from npu_kv_ops import simulator

    class Copies(torch.nn.Module):
        def forward(self, x, y):
            z = x.clone()
            y.copy_(z)
            return z

    def check(compiled):
        x, y = torch.empty(64, device="npu"), torch.empty(64, device="npu")
        for value in (1.0, 2.0, 3.0):
            x.copy_(torch.full((64,), value))
            z = compiled(x, y)
            assert torch.equal(z.cpu(), torch.full((64,), value))
            assert torch.equal(y.cpu(), torch.full((64,), value))
        assert simulator.stats().calls["aclmdlRIExecuteAsync"] == 3
"""


def test_npugraph_ex_compiles_a_graph_of_copies(run_script: RunScript) -> None:
    run_script(
        COPY_MODEL
        + """
    check(torch.compile(Copies(), backend="npugraph_ex", fullgraph=True, dynamic=False))
    """
    )


def test_torchair_compiles_a_graph_of_copies(run_script: RunScript) -> None:
    run_script(
        COPY_MODEL
        + """
    import torchair

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    backend = torchair.get_npu_backend(compiler_config=config)
    check(torch.compile(Copies(), backend=backend, fullgraph=True, dynamic=False))
    """
    )


def test_the_cpu_cannot_touch_device_memory(run_script: RunScript) -> None:
    result = run_script(
        """
        import ctypes, torch

        x = torch.zeros(8, device="npu")
        torch.npu.synchronize()
        print("before", flush=True)
        ctypes.string_at(x.data_ptr(), 1)
        """,
        check=False,
    )
    assert result.stdout == "before\n"
    assert result.returncode == -signal.SIGSEGV


def test_a_failure_on_the_device_surfaces_at_the_next_synchronise(run_script: RunScript) -> None:
    run_script(
        """
        import torch
        from npu_kv_ops import simulator

        source, target = torch.zeros(8).pin_memory(), torch.empty(8, device="npu")
        torch.npu.synchronize()
        simulator.fail_copy(nth=2, code=507013)
        target.copy_(source, non_blocking=True)
        torch.npu.synchronize()
        target.copy_(source, non_blocking=True)
        try:
            torch.npu.synchronize()
        except RuntimeError as error:
            assert "507013" in str(error), error
            assert "injected fault" in str(error), error
        else:
            raise SystemExit("the failure of the second copy did not surface")
        """
    )


@pytest.mark.races
def test_a_process_ends_cleanly_with_work_in_flight(run_script: RunScript) -> None:
    run_script(
        """
        import torch
        from npu_kv_ops import simulator

        source = torch.zeros(1 << 20).pin_memory()
        target = torch.empty(1 << 20, device="npu")
        side = torch.npu.Stream()
        torch.npu.synchronize()
        simulator.stall(side.npu_stream)
        for _ in range(50):
            target.copy_(source, non_blocking=True)
            with torch.npu.stream(side):
                target.copy_(source, non_blocking=True)
        """,
        timeout=60,
    )


def test_a_quiet_run_prints_one_line(run_script: RunScript) -> None:
    result = run_script(
        """
        import torch

        x = torch.zeros(8, device="npu")
        torch.npu.Stream().synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x.clone()
        graph.replay()
        print(y.cpu().sum().item())
        """
    )
    assert result.stdout == "0.0\n"
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert "simulated" in lines[0]
