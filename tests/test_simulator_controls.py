"""Settings, counters, faults on demand and the virtual clock of the simulator."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.npu

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _idle_simulator(sim: ModuleType, npu: torch.device) -> None:
    """Every test here needs both."""


def test_settings_can_be_read_changed_and_put_back(sim: ModuleType) -> None:
    before = sim.settings()
    with sim.overrides(copy_ns=17, h2d_bytes_per_second=2.5e9):
        assert sim.settings() == before | {"copy_ns": 17, "h2d_bytes_per_second": 2_500_000_000}
    assert sim.settings() == before


def test_overrides_are_put_back_after_an_error(sim: ModuleType) -> None:
    before = sim.settings()
    with pytest.raises(ZeroDivisionError), sim.overrides(copy_ns=1):
        _ = 1 / 0
    with pytest.raises(ValueError, match="no setting"), sim.overrides(copy_ns=1, copy_sn=2):
        pass
    assert sim.settings() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": 2}, r"no setting 'device'; the settings are devices, .*seed"),
        ({"copy_ns": 0.5}, "copy_ns=0.5: settings are whole numbers"),
        ({"copy_ns": -1}, "copy_ns is -1, the smallest allowed value is 0"),
        ({"h2d_bytes_per_second": 0}, "h2d_bytes_per_second is 0, the smallest allowed value is 1"),
        ({"copy_ns": 2**63}, "does not fit in 64 bits"),
    ],
)
def test_wrong_settings_are_errors(sim: ModuleType, values: dict[str, Any], message: str) -> None:
    before = sim.settings()
    with pytest.raises(ValueError, match=message):
        sim.configure(**values)
    assert sim.settings() == before


def test_copies_are_counted_by_direction(sim: ModuleType) -> None:
    host = torch.zeros(1000, dtype=torch.uint8).pin_memory()
    a, b = (torch.empty(1000, dtype=torch.uint8, device="npu") for _ in range(2))
    sim.reset_stats()
    a.copy_(host, non_blocking=True)
    b.copy_(a)
    host[:300].copy_(b[:300], non_blocking=True)
    torch.npu.synchronize()
    stats = sim.stats()
    assert stats.copies == {"h2d": 1, "d2h": 1, "d2d": 1, "h2h": 0}
    assert stats.bytes == {"h2d": 1000, "d2h": 300, "d2d": 1000, "h2h": 0}
    assert stats.calls["aclrtMemcpyAsync"] == 3
    assert stats.calls["aclrtFlyToTheMoon"] == 0
    sim.reset_stats()
    assert sum(sim.stats().copies.values()) == sum(sim.stats().bytes.values()) == 0
    assert not sim.stats().calls


def test_live_objects_are_counted(sim: ModuleType) -> None:
    runtime = sim.library()
    before = sim.stats().live
    device, pinned, stream, event = (ctypes.c_void_p() for _ in range(4))
    assert runtime.aclrtMalloc(ctypes.byref(device), ctypes.c_size_t(4096), 0) == 0
    assert runtime.aclrtMallocHost(ctypes.byref(pinned), ctypes.c_size_t(8192)) == 0
    assert runtime.aclrtCreateStream(ctypes.byref(stream)) == 0
    assert runtime.aclrtCreateEventExWithFlag(ctypes.byref(event), 1) == 0
    added = {key: now - before[key] for key, now in sim.stats().live.items() if now != before[key]}
    # aclrtMalloc adds 32 bytes, as its documentation says.
    assert added.pop("device_bytes") in (4096, 4128)
    assert added == {
        "device_allocations": 1,
        "pinned_allocations": 1,
        "pinned_bytes": 8192,
        "streams": 1,
        "events": 1,
    }
    assert runtime.aclrtDestroyEvent(event) == 0
    assert runtime.aclrtDestroyStream(stream) == 0
    assert runtime.aclrtFreeHost(pinned) == 0
    assert runtime.aclrtFree(device) == 0
    assert sim.stats().live == before


def test_calls_fail_on_demand(sim: ModuleType) -> None:
    runtime = sim.library()
    device = ctypes.c_int32()

    def codes(count: int) -> list[int]:
        return [runtime.aclrtGetDevice(ctypes.byref(device)) for _ in range(count)]

    sim.fail_call("aclrtGetDevice", nth=2, code=507000, times=2)
    assert codes(5) == [0, 507000, 507000, 0, 0]
    assert sim.stats().calls["aclrtGetDevice"] >= 5
    runtime.aclrtGetLastError(0)
    sim.fail_call("aclrtGetDevice", code=107000, times=100)
    sim.clear_faults()
    assert codes(2) == [0, 0]


def test_a_failing_call_reaches_torch_npu(sim: ModuleType) -> None:
    torch.npu.empty_cache()
    sim.fail_call("aclrtMallocAlign32", code=207001, times=1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    sim.clear_faults()
    sim.library().aclrtGetLastError(0)
    assert torch.empty(64 * MIB, dtype=torch.uint8, device="npu").numel() == 64 * MIB


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "aclrtFlyToTheMoon", "code": 1},
        {"name": "malloc", "code": 1},
        {"name": "aclrtFree", "code": 0},
        {"name": "aclrtFree", "code": 1, "nth": 0},
        {"name": "aclrtFree", "code": 1, "times": 0},
    ],
)
def test_faults_that_make_no_sense_are_refused(sim: ModuleType, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no function|start at 1"):
        sim.fail_call(**arguments)
    with pytest.raises(ValueError, match="starts at 1"):
        sim.fail_copy(nth=0)


def test_the_nth_copy_fails_on_the_device(sim: ModuleType) -> None:
    host = torch.ones(64).pin_memory()
    x = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    sim.fail_copy(nth=2)
    x.copy_(host, non_blocking=True)
    torch.npu.synchronize()
    host.fill_(2)
    x.copy_(host, non_blocking=True)
    with pytest.raises(RuntimeError, match="507013"):
        torch.npu.synchronize()
    sim.clear_faults()
    torch.npu.synchronize()
    assert x.cpu().eq(1).all(), "the failed copy moved nothing"


def test_a_stalled_stream_waits_for_its_release(sim: ModuleType) -> None:
    host = torch.ones(64).pin_memory()
    x = torch.zeros(64, device="npu")
    stream = torch.npu.Stream()
    torch.npu.synchronize()
    stall = sim.stall(stream.npu_stream)
    with torch.npu.stream(stream):
        x.copy_(host, non_blocking=True)
    assert not stream.query()
    waiter = threading.Thread(target=stream.synchronize)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    stall.release()
    waiter.join(60)
    assert not waiter.is_alive()
    stall.release()  # does nothing
    assert x.cpu().eq(1).all()


def test_stalls_nest_and_end_with_clear_faults(sim: ModuleType) -> None:
    stream = torch.npu.Stream()

    def record() -> torch.npu.Event:
        event = torch.npu.Event()
        event.record(stream)
        _ = stream.npu_stream  # issues what is in torch_npu's queue
        return event

    with sim.stall(stream.npu_stream):
        with sim.stall(stream.npu_stream):
            first = record()
        assert not first.query(), "one of the two was released"
        sim.clear_faults()
        first.synchronize()
        later = sim.stall(stream.npu_stream)
        second = record()
    # The first stall ended with clear_faults; the end of its block is not that of the later one.
    torch.npu.current_stream().synchronize()
    assert not second.query()
    later.release()
    second.synchronize()
    with pytest.raises(ValueError, match="not live"):
        sim.stall(12345)


def test_the_clock_counts_calls_and_waits(sim: ModuleType) -> None:
    host = torch.zeros(10**6, dtype=torch.uint8).pin_memory()
    x = torch.empty(10**6, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    sim.configure(call_ns=100, copy_ns=5000, h2d_bytes_per_second=10**9, d2h_bytes_per_second=10**8)
    begin = sim.now_ns()
    with sim.timeline() as tasks:
        x.copy_(host, non_blocking=True)
        host.copy_(x, non_blocking=True)
        torch.npu.synchronize()
        assert tasks == []
    load, store = tasks
    assert (load.kind, load.bytes, load.end_ns - load.start_ns) == ("copy", 10**6, 1_005_000)
    assert (store.bytes, store.end_ns - store.start_ns) == (10**6, 10_005_000)
    assert begin < load.start_ns
    assert load.end_ns == store.start_ns
    assert load.stream == store.stream
    assert load.handle == store.handle == torch.npu.current_stream().npu_stream
    assert sim.now_ns() >= store.end_ns
    with sim.timeline() as tasks:
        pass
    assert tasks == []


def test_payload_can_stay_where_it_is(sim: ModuleType) -> None:
    host = torch.ones(64).pin_memory()
    x = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    sim.reset_stats()
    with sim.overrides(move_payload=0):
        x.copy_(host, non_blocking=True)
        torch.npu.synchronize()
    assert sim.stats().bytes["h2d"] == 256
    assert x.cpu().eq(0).all()


def test_limits_of_pinned_memory(sim: ModuleType) -> None:
    runtime = sim.library()
    pointer = ctypes.c_void_p()

    def allocate(size: int) -> int:
        return int(runtime.aclrtMallocHost(ctypes.byref(pointer), ctypes.c_size_t(size)))

    with sim.overrides(pinned_bytes_per_call=MIB):
        assert allocate(MIB + 1) == 207001
        assert allocate(MIB) == 0
    with sim.overrides(pinned_memory_bytes=sim.stats().live["pinned_bytes"] + 1000):
        kept = pointer.value
        assert allocate(1001) == 207001
        assert allocate(1000) == 0
        assert runtime.aclrtFreeHost(pointer) == 0
    assert runtime.aclrtFreeHost(ctypes.c_void_p(kept)) == 0
    runtime.aclrtGetLastError(0)


def test_a_process_with_faults_and_stalls_ends(run_script: RunScript) -> None:
    """torch_npu synchronises every device while the interpreter exits."""
    run_script(
        """
        import torch
        from npu_kv_ops import simulator

        x, host = torch.zeros(64, device="npu"), torch.zeros(64).pin_memory()
        torch.npu.synchronize()
        simulator.stall(torch.npu.current_stream().npu_stream)
        simulator.fail_call("aclrtSynchronizeDeviceWithTimeout", code=507000, times=1000)
        x.copy_(host, non_blocking=True)
        """,
        timeout=60,
    )


def test_the_documentation_lists_every_setting(sim: ModuleType) -> None:
    text = (ROOT / "docs" / "simulator.md").read_text()
    section = text[text.index("### Settings") : text.index("### The clock")]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(sim.settings())
