"""Compute operators of the simulated runtime: values, order, capture, and what cannot be done."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import TYPE_CHECKING

import acl_operator
import pytest
import torch

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.npu

NOT_FOUND = 100024


NUMBERS = {
    torch.bool: [True, False],
    torch.uint8: [0, 1, 200],
    torch.int8: [-7, 100],
    torch.int16: [-300, 300],
    torch.int32: [-70000, 70000],
    torch.int64: [-(2**53) - 1, 2**62 + 1],
    torch.float16: [1.5, -0.1, 6.0e-8, 65504.0, float("inf")],
    torch.bfloat16: [1.5, -0.1, 1e38, 1e-40],
    torch.float32: [0.1, -1e30, float("nan")],
    torch.float64: [0.1, 1e300],
    torch.complex64: [1.5 - 2.25j],
}


@pytest.fixture(autouse=True)
def _idle_simulator(sim: ModuleType, npu: torch.device) -> None:
    """Every test here needs both."""


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit, with NaNs and the sign of zero."""
    left, right = left.cpu(), right.cpu()
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_filling_gives_the_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    for shape in [(), (1,), (3, 5), (0, 4), (257,)]:
        assert same(torch.zeros(shape, dtype=dtype, device="npu"), torch.zeros(shape, dtype=dtype))
        assert same(torch.ones(shape, dtype=dtype, device="npu"), torch.ones(shape, dtype=dtype))
        for value in NUMBERS[dtype]:
            expected = torch.full(shape, value, dtype=dtype)
            assert same(torch.full(shape, value, dtype=dtype, device="npu"), expected)
            target = torch.empty(shape, dtype=dtype, device="npu")
            assert same(target.fill_(value), expected)
            assert same(target.zero_(), torch.zeros(shape, dtype=dtype))


def test_a_part_of_a_tensor_is_filled_and_no_more() -> None:
    whole = torch.ones(6, 8, device="npu")
    whole[2:4].zero_()
    whole[5].fill_(3)
    expected = torch.ones(6, 8)
    expected[2:4].zero_()
    expected[5].fill_(3)
    assert same(whole, expected)


def test_filling_with_a_value_that_is_on_the_device() -> None:
    value = torch.full((), 2.5, device="npu")
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        target = torch.empty(4, dtype=dtype, device="npu")
        stream = torch.npu.current_stream().npu_stream
        shape = torch.tensor([4], dtype=torch.int32)
        assert acl_operator.execute("Fill", [shape, value], [target], stream=stream) == 0
        assert same(target, torch.full((4,), 2.5).to(dtype))


def test_operators_are_counted_when_they_run(sim: ModuleType) -> None:
    stream = torch.npu.current_stream()
    with sim.stall(stream.npu_stream):
        x = torch.zeros(4, device="npu")
        x.fill_(2)
        torch.ones(4, device="npu")
        _ = stream.npu_stream  # drains torch_npu's queue
        assert sim.stats().operators == {}
    stream.synchronize()
    assert sim.stats().operators == {"ZerosLike": 1, "Fill": 1, "OnesLike": 1}
    sim.reset_stats()
    assert sim.stats().operators == {}


def test_operators_take_virtual_time(sim: ModuleType) -> None:
    x = torch.empty(10**6, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    sim.configure(operator_ns=7000, operator_bytes_per_second=10**9)
    with sim.timeline() as tasks:
        x.fill_(1)
        torch.npu.synchronize()
    assert [(task.kind, task.bytes, task.end_ns - task.start_ns) for task in tasks] == [
        ("operator", 10**6, 7000 + 10**6)
    ]


def test_operators_keep_the_order_of_their_stream(sim: ModuleType) -> None:
    source = torch.full((64,), 5.0).pin_memory()
    results = [torch.zeros(64).pin_memory() for _ in range(3)]
    x = torch.empty(64, device="npu")
    stream = torch.npu.current_stream()
    with sim.stall(stream.npu_stream):
        x.fill_(1)
        results[0].copy_(x, non_blocking=True)
        x.copy_(source, non_blocking=True)
        results[1].copy_(x, non_blocking=True)
        x.zero_()
        results[2].copy_(x, non_blocking=True)
    stream.synchronize()
    assert [result.unique().tolist() for result in results] == [[1.0], [5.0], [0.0]]


def capture_begin(stream: torch.npu.Stream) -> None:
    runtime = acl_operator.simulator.library()
    assert runtime.aclmdlRICaptureBegin(ctypes.c_void_p(stream.npu_stream), 0) == 0


def capture_end(stream: torch.npu.Stream) -> ctypes.c_void_p:
    graph = ctypes.c_void_p()
    runtime = acl_operator.simulator.library()
    handle = ctypes.c_void_p(stream.npu_stream)
    assert runtime.aclmdlRICaptureEnd(handle, ctypes.byref(graph)) == 0
    return graph


def replay(graph: ctypes.c_void_p, stream: torch.npu.Stream) -> int:
    """Runs the graph once; returns the code of the synchronise."""
    runtime = acl_operator.simulator.library()
    handle = ctypes.c_void_p(stream.npu_stream)
    assert runtime.aclmdlRIExecuteAsync(graph, handle) == 0
    return int(runtime.aclrtSynchronizeStream(handle))


def test_a_captured_operator_runs_at_every_replay(sim: ModuleType) -> None:
    # torch_npu refuses these operators while a stream captures; the runtime does not.
    stream = torch.npu.Stream()
    x = torch.empty(4, device="npu")
    shape, value = torch.tensor([4]), torch.tensor(1.5)
    torch.npu.synchronize()
    capture_begin(stream)
    assert acl_operator.execute("Fill", [shape, value], [x], stream=stream.npu_stream) == 0
    graph = capture_end(stream)
    value.fill_(9)  # a host constant is read at the call
    assert sim.stats().operators == {}
    for count in (1, 2):
        x.zero_()
        torch.npu.synchronize()
        assert replay(graph, stream) == 0
        assert same(x, torch.full((4,), 1.5))
        assert sim.stats().operators["Fill"] == count
    assert acl_operator.simulator.library().aclmdlRIDestroy(graph) == 0


def test_torch_npu_itself_refuses_operators_during_capture(sim: ModuleType) -> None:
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    sim.configure(capture_operators=0)
    message = "Cannot run aclop operators during NPU graph capture"
    with pytest.raises(RuntimeError, match=message), torch.npu.graph(torch.npu.NPUGraph()):
        x.fill_(1)
    assert x.cpu().eq(0).all()


@pytest.mark.parametrize("wait", ["device", "stream", "cpu"])
def test_an_unknown_operator_is_an_error_at_the_next_synchronise(
    wait: str, capfd: pytest.CaptureFixture[str]
) -> None:
    acl_operator.simulator.library().aclrtGetLastError(0)  # or torch_npu shows an older one
    a = torch.ones(2, 3, device="npu")
    torch.npu.synchronize()
    result = torch.linalg.cross(a, a)
    waits = {
        "device": torch.npu.synchronize,
        "stream": torch.npu.current_stream().synchronize,
        "cpu": result.cpu,
    }
    with pytest.raises(RuntimeError, match=r"error code(:| is )100024") as caught:
        waits[wait]()
    # torch_npu leaves the text out of the error of a blocking copy.
    for message in [capfd.readouterr().err] + ([] if wait == "cpu" else [str(caught.value)]):
        assert "no operator Cross(float32[2,3], float32[2,3]) -> float32[2,3]" in message
        assert "Nothing was computed" in message
    # The device stays usable, and the error is reported once.
    torch.npu.synchronize()
    assert same(torch.ones(2, device="npu"), torch.ones(2))


def test_an_unknown_operator_names_the_call_when_the_queue_is_off(run_script: RunScript) -> None:
    run_script(
        """
        import torch

        x = torch.ones(3, device="npu")
        try:
            torch.linalg.cross(x, x)
        except RuntimeError as error:
            assert "no operator Cross(float32[3], float32[3])" in str(error), error
        else:
            raise SystemExit("the product was computed")
        assert x.cpu().eq(1).all()
        """,
        env={"ASCEND_LAUNCH_BLOCKING": "1"},
    )


def test_a_capture_with_an_unknown_operator_gives_no_graph() -> None:
    runtime = acl_operator.simulator.library()
    stream = torch.npu.Stream()
    x, y = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    torch.npu.synchronize()
    capture_begin(stream)
    assert acl_operator.execute("Cross", [x], [y], stream=stream.npu_stream) == 0
    graph = ctypes.c_void_p(1)
    handle = ctypes.c_void_p(stream.npu_stream)
    assert runtime.aclmdlRICaptureEnd(handle, ctypes.byref(graph)) == NOT_FOUND
    assert not graph
    assert "no operator Cross(float32[4]) -> float32[4]" in acl_operator.error_message()
    with torch.npu.stream(stream):
        assert x.fill_(3).cpu().eq(3).all()


def test_a_registered_kernel_sees_the_whole_call(sim: ModuleType) -> None:
    seen: dict[str, object] = {}

    def scale(call: acl_operator.OperatorCall) -> int:
        values, factors = call.input[0], call.input[1]
        seen["shape"] = values.shape[: values.dims]
        seen["bytes"] = values.bytes
        seen["constants"] = [call.input[i].host_constant for i in range(call.inputs)]
        attributes = {}
        for attribute in call.attribute[: call.attributes]:
            if attribute.strings:
                attributes[attribute.name] = attribute.strings[0]
            elif attribute.floats:
                attributes[attribute.name] = attribute.floats[0]
            else:
                attributes[attribute.name] = attribute.ints[: attribute.count]
            if attribute.name == b"rows":
                lengths = attribute.row_lengths[: attribute.count]
                attributes[b"rows"] = (lengths, attribute.ints[: sum(lengths)])
        seen["attributes"] = attributes
        source = ctypes.cast(values.data, ctypes.POINTER(ctypes.c_float))
        factor = ctypes.cast(factors.data, ctypes.POINTER(ctypes.c_float))[0]
        target = ctypes.cast(call.output[0].data, ctypes.POINTER(ctypes.c_float))
        for i in range(6):
            target[i] = source[i] * factor
        return 0

    acl_operator.register("TestScale", scale)
    x = torch.arange(6.0).reshape(2, 3).npu()
    y = torch.empty(2, 3, device="npu")
    attributes = {
        "axis": -1,
        "axes": [1, 0],
        "flag": True,
        "epsilon": 0.25,
        "mode": "fast",
        "rows": [[1, 2], [3]],
    }
    stream = torch.npu.current_stream().npu_stream
    constant = torch.tensor(2.0)
    assert acl_operator.execute("TestScale", [x, constant], [y], attributes, stream=stream) == 0
    constant.zero_()
    assert same(y, torch.arange(6.0).reshape(2, 3) * 2)
    assert seen == {
        "shape": [2, 3],
        "bytes": 24,
        "constants": [0, 1],
        "attributes": {
            b"axis": [-1],
            b"axes": [1, 0],
            b"flag": [1],
            b"epsilon": 0.25,
            b"mode": b"fast",
            b"rows": ([2, 1], [1, 2, 3]),
        },
    }
    assert sim.stats().operators["TestScale"] == 1


def test_a_kernel_can_refuse_a_call_before_it_is_queued() -> None:
    ran = []

    def check(call: acl_operator.OperatorCall) -> int:
        assert not call.input[0].data, "device data is not there yet"
        if call.input[0].dtype == acl_operator.BFLOAT16:
            return call.fail("bfloat16 is not implemented")
        return 0

    acl_operator.register("TestChecked", lambda call: ran.append(1) or 0, check)
    stream = torch.npu.current_stream()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(3, dtype=dtype, device="npu")
        assert acl_operator.execute("TestChecked", [x], [x], stream=stream.npu_stream) == 0
    with pytest.raises(RuntimeError, match=r"TestChecked\(bfloat16\[3\]\).*is not implemented"):
        stream.synchronize()
    assert ran == [1]


def test_a_kernel_that_fails_is_a_failure_of_its_stream(sim: ModuleType) -> None:
    x = torch.zeros(3, device="npu")
    acl_operator.register("TestFailing", lambda call: call.fail("out of registers"))
    stream = torch.npu.current_stream()
    assert acl_operator.execute("TestFailing", [x], [x], stream=stream.npu_stream) == 0
    message = r"TestFailing\(float32\[3\]\) -> float32\[3\]: out of registers"
    with pytest.raises(RuntimeError, match=message) as caught:
        stream.synchronize()
    assert "507015" in str(caught.value)
    sim.clear_faults()  # torch_npu's streams stop at a failure


def test_memory_freed_before_the_operator_runs_is_noticed(sim: ModuleType) -> None:
    runtime = acl_operator.simulator.library()
    stream = torch.npu.Stream()
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    address = ctypes.c_void_p()
    assert runtime.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(64), 0) == 0
    assert address.value is not None
    target = acl_operator.OnDevice(address.value)
    with sim.stall(stream.npu_stream):
        assert acl_operator.execute("ZerosLike", [x], [target], stream=stream.npu_stream) == 0
        assert runtime.aclrtFree(address) == 0
    with pytest.raises(RuntimeError, match=r"ZerosLike ran on .* that had been freed"):
        stream.synchronize()
    sim.clear_faults()
    assert acl_operator.execute("ZerosLike", [x], [target], stream=stream.npu_stream) == 107000
    runtime.aclrtGetLastError(0)  # torch_npu would take it for one of its own


def test_addresses_are_checked_at_the_call() -> None:
    runtime = acl_operator.simulator.library()
    stream = torch.npu.current_stream().npu_stream
    x = torch.zeros(4, device="npu")
    other_device = torch.zeros(4, device="npu:1")
    torch.npu.synchronize()

    for wrong, code, message in [
        (acl_operator.OnDevice(torch.zeros(4).data_ptr()), 107000, "host memory"),
        (acl_operator.OnDevice(x.data_ptr() + 2**40), 107000, "output 0"),
        (acl_operator.OnDevice(0), 100000, "null"),
        (other_device, 107000, "memory of device 1"),
    ]:
        assert acl_operator.execute("ZerosLike", [x], [wrong], stream=stream) == code
        assert message in acl_operator.error_message()
    short = acl_operator.OnDevice(x.data_ptr(), nbytes=12)
    assert acl_operator.execute("ZerosLike", [short], [x], stream=stream) == 100000
    assert "needs 16 bytes, its buffer has 12" in acl_operator.error_message()
    # Of an output torch_npu gives a size that is not its own: only its memory counts.
    assert acl_operator.execute("ZerosLike", [x], [short], stream=stream) == 0
    past_the_end = acl_operator.OnDevice(x.data_ptr(), nbytes=16, shape=(2**26,))
    assert acl_operator.execute("ZerosLike", [x], [past_the_end], stream=stream) == 107000
    assert "runs over the end of the allocation" in acl_operator.error_message()
    runtime.aclrtGetLastError(0)  # torch_npu would take it for one of its own


def test_descriptors_keep_the_shape_of_the_tensor_and_of_its_storage() -> None:
    runtime = acl_operator.simulator.library()
    runtime.aclGetTensorDescNumDims.restype = ctypes.c_size_t
    runtime.aclGetTensorDescSize.restype = ctypes.c_size_t
    description = acl_operator.make_description(acl_operator.FLOAT, [2, 3], storage=[16, 16])
    try:
        assert runtime.aclGetTensorDescType(description) == acl_operator.FLOAT
        assert runtime.aclGetTensorDescNumDims(description) == 2
        assert runtime.aclGetTensorDescSize(description) == 24
        extent = ctypes.c_int64()
        byref = ctypes.byref(extent)
        assert runtime.aclGetTensorDescDimV2(description, ctypes.c_size_t(1), byref) == 0
        assert extent.value == 3
        assert runtime.aclGetTensorDescDimV2(description, ctypes.c_size_t(2), byref) == 100000
    finally:
        runtime.aclDestroyTensorDesc(description)


def test_half_precision_conversions_match_torch() -> None:
    runtime = acl_operator.simulator.library()
    runtime.aclFloat16ToFloat.restype = ctypes.c_float
    runtime.aclFloatToFloat16.restype = ctypes.c_uint16
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    floats = every.view(torch.float16).float()
    for bits in range(0, 2**16, 7):
        ours = runtime.aclFloat16ToFloat(ctypes.c_uint16(bits))
        assert ours == floats[bits].item() or (ours != ours and floats[bits].isnan())
    edges = torch.tensor([0.0, -0.0, 65519.9, 65520.0, 2.98e-8, 2.99e-8, 5.96e-8, 1.0009766, 1e9])
    steps = torch.cat([edges, torch.linspace(-3, 3, 997), torch.logspace(-9, 5, 499)])
    for number in steps.float():
        bits = runtime.aclFloatToFloat16(ctypes.c_float(number.item()))
        assert bits == number.half().view(torch.uint16).item()
