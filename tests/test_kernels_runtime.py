"""Compute operators as work of the simulated runtime: errors, honesty, counters, clock, devices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import acl_operator
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.npu


@pytest.fixture(autouse=True)
def _default_costs(sim: ModuleType, npu: torch.device) -> Iterator[None]:
    yield
    sim.clear_operator_costs()


def synchronise_fails(message: str) -> str:
    with pytest.raises(RuntimeError, match=message) as caught:
        torch.npu.synchronize()
    return str(caught.value)


# ------------------------------------------------------------------------------------- errors


def test_an_unknown_type_is_named_with_what_it_was_called_with() -> None:
    x = torch.ones(2, 3, dtype=torch.float16, device="npu")
    torch.histc(x.float(), 10, 0, 1)
    text = synchronise_fails(r"no operator Histogram\(float32\[2,3\]\) -> float32\[10\]")
    assert "Nothing was computed" in text
    assert "csrc/simulator/kernels" in text, "where to add it"
    assert x.add(1).cpu().eq(2).all(), "the stream is usable"


def test_an_unsupported_use_of_a_known_type_is_refused_the_same_way() -> None:
    x = torch.ones(1, 2, 3, device="npu")
    y = F.pad(x, (1, 1), mode="replicate")
    text = synchronise_fails(r"cannot compute PadV3\(float32")
    assert "padding mode edge" in text
    assert x.add(1).cpu().eq(2).all()
    assert y.shape == (1, 2, 5)


def test_what_follows_an_unknown_operator_is_not_run(sim: ModuleType) -> None:
    table = torch.arange(4.0).npu()
    torch.npu.synchronize()
    sim.reset_stats()
    with sim.stall(torch.npu.current_stream().npu_stream):
        # Indices that were never computed would be far outside the table, which is a fault.
        wild = torch.histc(table, 4, 0, 1).long()
        table[wild]
        table.add_(1)
    synchronise_fails("no operator Histogram")
    assert sim.stats().operators == {}
    assert torch.equal(table.cpu(), torch.arange(4.0))
    assert torch.equal(table.add(1).cpu(), torch.arange(4.0) + 1)


def test_an_index_outside_its_tensor_fails_on_the_device(sim: ModuleType) -> None:
    x = torch.arange(4.0).npu()
    cases = [
        lambda wild: x.index_select(0, wild),
        lambda wild: x[wild],
        lambda wild: x.index_put_((wild,), torch.zeros(2, device="npu")),
        lambda wild: x.scatter_(0, wild, torch.zeros(2, device="npu")),
        lambda wild: x.gather(0, wild),
    ]
    for case in cases:
        case(torch.tensor([0, 9]).npu())
        text = synchronise_fails(r"index 9 is outside \[-?\d, 4\)")
        assert "507015" in text
        sim.clear_faults()  # a failure stops torch_npu's streams
        assert torch.equal(x.cpu(), torch.arange(4.0)), "nothing was half written"


def test_attention_says_what_is_missing() -> None:
    for dtype in (torch.float32, torch.float16):
        x = torch.ones(1, 2, 4, 16, dtype=dtype, device="npu")
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, pytest.raises(RuntimeError, match="scaled_dot_product_attention") as caught:
                F.scaled_dot_product_attention(x, x, x)
            text = str(caught.value)
            assert f"{'Float' if dtype == torch.float32 else 'Half'}[1, 2, 4, 16]" in text
            assert "aclnnFlashAttentionScore" in text
            assert "csrc/simulator/kernels/attention.cpp" in text
    torch.npu.synchronize()


def test_attention_that_torch_npu_composes_works() -> None:
    x = torch.randn(2, 4, 16)
    found = F.scaled_dot_product_attention(x.npu(), x.npu(), x.npu())
    torch.testing.assert_close(found.cpu(), F.scaled_dot_product_attention(x, x, x))


def test_a_runtime_without_torch_has_the_operators_that_need_none(run_script: RunScript) -> None:
    run_script(
        """
        from npu_kv_ops import simulator

        simulator.activate()
        assert simulator.operators() == ["Fill", "OnesLike", "ZerosLike"]
        """,
        runtime=None,
    )


def test_kernels_that_do_not_load_are_explained(run_script: RunScript) -> None:
    result = run_script(
        """
        from npu_kv_ops import simulator

        simulator.activate()
        simulator.library().npu_sim_set_operator_library(b"/nowhere/kernels.so")
        import torch

        x = torch.zeros(3, device="npu")
        x.add_(1)
        try:
            torch.npu.synchronize()
        except RuntimeError as error:
            print(error)
        """,
        runtime=None,
    )
    assert "no operator Add(float32[3], float32[] host constant)" in result.stdout
    assert "no more than Fill, OnesLike, ZerosLike" in result.stdout
    assert "/nowhere/kernels.so" in result.stdout


# ------------------------------------------------------------------------------------ honesty


@pytest.fixture
def sixteen_floats() -> Iterator[int]:
    """The address of an allocation of exactly 64 bytes, all zero."""
    runtime = acl_operator.simulator.library()
    address = ctypes.c_void_p()
    assert runtime.aclrtMallocAlign32(ctypes.byref(address), ctypes.c_size_t(64), 0) == 0
    assert address.value is not None
    assert runtime.aclrtMemset(address, ctypes.c_size_t(64), 0, ctypes.c_size_t(64)) == 0
    yield address.value
    torch.npu.synchronize()
    assert runtime.aclrtFree(address) == 0


# Where a view of the 16 floats starts, in bytes, and how it goes on; then whether it stays inside.
VIEWS = [
    (0, [16], [1], 0, True),
    (0, [17], [1], 0, False),
    (0, [4], [5], 0, True),
    (0, [4], [5], 1, False),
    (0, [2, 2], [1, 14], 0, True),
    (0, [2, 2], [1, 15], 0, False),
    (0, [1], [1], 16, False),
    (40, [6], [1], 0, True),
    (40, [6], [1], 1, False),
    (40, [2], [10**6], 0, False),
]


@pytest.mark.parametrize("described", [1, 16, 1000])
@pytest.mark.parametrize(("start", "sizes", "strides", "offset", "inside"), VIEWS)
@pytest.mark.parametrize("use", ["AsStrided", "ViewCopy from", "ViewCopy to"])
def test_a_view_ends_with_its_allocation(
    sim: ModuleType,
    sixteen_floats: int,
    use: str,
    start: int,
    sizes: list[int],
    strides: list[int],
    offset: int,
    inside: bool,
    described: int,
) -> None:
    # The number of elements in its description is of no account: it counts other elements.
    memory = acl_operator.OnDevice(sixteen_floats + start, 4 * described, (described,))
    view = [memory, torch.tensor(sizes), torch.tensor(strides), torch.tensor(offset)]
    ones = torch.ones(sizes, device="npu")
    other = [ones, torch.tensor(sizes), torch.tensor(ones.stride()), torch.tensor(0)]
    torch.npu.synchronize()
    inputs, output = {
        "AsStrided": (view, ones),
        "ViewCopy from": (other + view, ones),
        "ViewCopy to": (view + other, memory),
    }[use]
    stream = torch.npu.current_stream().npu_stream
    name = use.split()[0]
    assert acl_operator.execute(name, inputs, [output], stream=stream) == 0
    if inside:
        torch.npu.synchronize()
        assert ones.cpu().eq(1 if use == "ViewCopy to" else 0).all()
    else:
        assert "507015" in synchronise_fails(f"leaves its memory of {64 - start} bytes")
        sim.clear_faults()
        assert ones.cpu().eq(1).all()
    copied = torch.empty(16)
    size = ctypes.c_size_t(64)
    destination, source = ctypes.c_void_p(copied.data_ptr()), ctypes.c_void_p(sixteen_floats)
    assert acl_operator.simulator.library().aclrtMemcpy(destination, size, source, size, 2) == 0
    written = ones.numel() if inside and use == "ViewCopy to" else 0
    assert copied.sum() == written


def test_operators_run_in_the_order_of_their_stream(sim: ModuleType) -> None:
    x = torch.ones(64, device="npu")
    result = torch.zeros(64).pin_memory()
    stream = torch.npu.current_stream()
    with sim.stall(stream.npu_stream):
        x.mul_(3)
        result.copy_(x, non_blocking=True)
        x.add_(1)
        assert result.eq(0).all()
    stream.synchronize()
    assert result.eq(3).all()
    assert x.cpu().eq(4).all()


def test_operators_leave_torch_threads_alone(run_script: RunScript) -> None:
    run_script(
        """
        import threading
        import torch

        torch.set_num_threads(3)
        x = torch.ones(100, 100, device="npu")
        (x @ x).sum().item()
        seen = [torch.get_num_threads()]
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [3, 3], seen
        """
    )


# ----------------------------------------------------------------------------------- counters


def test_calls_and_bytes_are_counted_by_type(sim: ModuleType) -> None:
    x, y = torch.ones(100, device="npu"), torch.ones(100, device="npu")
    torch.npu.synchronize()
    sim.reset_stats()
    for _ in range(3):
        x.add(y)
    (x > 1).cpu()
    stats = sim.stats()
    assert stats.operators == {"Add": 3, "Greater": 1}
    assert stats.operator_bytes == {"Add": 3 * 1200, "Greater": 500}


def test_an_operator_counts_what_it_touches_and_not_what_it_could(sim: ModuleType) -> None:
    cache = torch.zeros(1000, 8, device="npu")
    rows = torch.arange(5).npu()
    values = torch.ones(5, 8, device="npu")
    torch.npu.synchronize()
    sim.reset_stats()
    cache[rows]
    cache.index_put_((rows,), values)
    cache.index_put_((rows,), torch.zeros((), device="npu"))  # broadcast
    cache.index_select(0, rows)
    cache[2:4, 1:3].fill_(2)
    torch.npu.synchronize()
    moved, ids = 5 * 8 * 4, 5 * 8
    found = sim.stats().operator_bytes
    assert found["Index"] == 2 * moved + ids
    assert found["IndexPutV2"] == 2 * (2 * moved + ids)
    assert found["GatherV2"] == 2 * moved + ids
    assert found["ViewCopy"] == 2 * 4 * 4


# -------------------------------------------------------------------------------------- clock


def durations(sim: ModuleType, work: object) -> list[int]:
    with sim.timeline() as tasks:
        work()  # type: ignore[operator]
        torch.npu.synchronize()
    return [task.end_ns - task.start_ns for task in tasks if task.kind == "operator"]


def test_the_time_of_an_operator_is_fixed_plus_bytes(sim: ModuleType) -> None:
    x = torch.ones(1000, device="npu")
    torch.npu.synchronize()
    sim.configure(operator_ns=700, operator_bytes_per_second=10**9)
    assert durations(sim, lambda: x.add_(x)) == [700 + 12000]
    sim.operator_cost("Add", fixed_ns=50, bytes_per_second=2 * 10**9)
    assert durations(sim, lambda: x.add_(x).mul_(x)) == [50 + 6000, 700 + 12000]
    sim.operator_cost("Add", fixed_ns=50)
    assert durations(sim, lambda: x.add_(x)) == [50 + 12000]
    sim.operator_cost("Add", bytes_per_second=10**10)
    assert durations(sim, lambda: x.add_(x)) == [700 + 1200]
    sim.clear_operator_costs()
    assert durations(sim, lambda: x.add_(x)) == [700 + 12000]


def test_a_replay_costs_what_its_operators_cost(sim: ModuleType) -> None:
    x = torch.ones(1000, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(x)
        x.mul_(x)
    sim.configure(operator_ns=0, operator_bytes_per_second=10**9)
    sim.operator_cost("Mul", fixed_ns=5)
    assert durations(sim, graph.replay) == [12000, 12005]


def test_compute_and_copies_overlap_on_the_clock(sim: ModuleType) -> None:
    sim.configure(h2d_bytes_per_second=10**9, copy_ns=0, call_ns=0)
    sim.operator_cost("MatMul", fixed_ns=1_000_000)
    x, host = torch.ones(8, 8, device="npu"), torch.zeros(10**6, dtype=torch.uint8).pin_memory()
    target = torch.empty(10**6, dtype=torch.uint8, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with sim.timeline() as tasks:
        x @ x
        with torch.npu.stream(side):
            target.copy_(host, non_blocking=True)
        torch.npu.synchronize()
    multiply, copy = sorted(tasks, key=lambda task: task.kind == "copy")
    assert multiply.start_ns == copy.start_ns
    assert copy.end_ns - copy.start_ns == 10**6
    assert multiply.end_ns - multiply.start_ns > 10**6


@pytest.mark.parametrize(
    "cost", [{"fixed_ns": -1}, {"bytes_per_second": 0}, {"bytes_per_second": -5}]
)
def test_impossible_costs_are_refused(sim: ModuleType, cost: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(cost))):
        sim.operator_cost("Add", **cost)


# ------------------------------------------------------------------------------------ devices


def test_two_devices_compute_on_their_own(sim: ModuleType) -> None:
    results = {}
    first = torch.npu.current_stream(0).npu_stream
    with sim.stall(first):
        for device in (0, 1):
            with torch.npu.device(device):
                x = torch.full((4, 4), float(device + 1), device=f"npu:{device}")
                results[device] = (x @ x).softmax(-1) * x
        torch.npu.synchronize(1)
        assert results[1].cpu().eq(0.5).all(), "the second device does not wait for the first"
    torch.npu.synchronize(0)
    assert results[0].cpu().eq(0.25).all()
    moved = results[0].to("npu:1") + results[1]
    assert moved.device.index == 1
    assert moved.cpu().eq(0.75).all()


def test_an_operator_on_memory_of_the_other_device_is_refused() -> None:
    x, y = torch.ones(4, device="npu:0"), torch.ones(4, device="npu:1")
    torch.npu.synchronize(1)
    stream = torch.npu.current_stream(0).npu_stream
    assert acl_operator.execute("Add", [x, y], [x], stream=stream) == 107000
    assert "memory of device 1" in acl_operator.error_message()
