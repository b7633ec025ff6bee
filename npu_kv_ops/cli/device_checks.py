"""What `npu-kv doctor` really tries, in a process of its own: `python -m` this module.

Each check is announced before it starts and reported when it ends, as a JSON line. A check that
crashes or hangs takes this process with it; the doctor then starts another for the rest.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from npu_kv_ops.replay.report import human_bytes
from npu_kv_ops.replay.sizing import available_host_memory

from . import runtime_choice
from .checks import Result

_BLOCK_BYTES = 4096
_BLOCKS = 8
_CALLBACK_SECONDS = 10.0
_TRANSFER_SECONDS = 30.0
_SETTLE_SECONDS = 0.1
_ACL_EVENT_EXTERNAL = 0x20
_ACL_LOCATION_HOST, _ACL_LOCATION_DEVICE = 0, 1
_ACL_NOT_SUPPORTED = 207000


class CheckFailedError(Exception):
    """A check that did not work: what happened and what to do."""

    def __init__(self, detail: str, advice: str, status: str = "failed") -> None:
        super().__init__(detail)
        self.advice = advice
        self.status = status


class _Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class _BatchAttributes(ctypes.Structure):
    _fields_ = (("dst", _Location), ("src", _Location), ("rsv", ctypes.c_uint8 * 16))


class _PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("location", _Location),
        ("page_size", ctypes.c_uint32),
        ("rsv", ctypes.c_uint32 * 4),
    )


def _acl() -> ctypes.CDLL:
    """The runtime that torch_npu uses: it is loaded already, so its name finds it."""
    return ctypes.CDLL("libascendcl.so")


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    function: Any = getattr(library, name, None)
    if function is None:
        raise CheckFailedError(
            f"the runtime has no {name}", "install a newer CANN; see its release notes"
        )
    code = function(*arguments)
    if code:
        raise CheckFailedError(
            f"{name} answered {code}",
            "look the number up in the list of aclError codes, and see the logs in ~/ascend/log",
        )


def _npu() -> Any:
    """`torch.npu`, which only torch_npu knows."""
    import torch_npu

    return torch_npu.npu


def _pattern(start: int) -> Any:
    import torch

    values = torch.arange(_BLOCKS * _BLOCK_BYTES, dtype=torch.int64) * 31 + start
    return (values % 251).to(torch.uint8).reshape(_BLOCKS, _BLOCK_BYTES)


def _pinned(start: int) -> Any:
    import torch

    from npu_kv_ops import kv_cache

    memory = kv_cache.empty_pinned((_BLOCKS, _BLOCK_BYTES), torch.uint8)
    return memory.copy_(_pattern(start))


def _require_equal(actual: Any, expected: Any, what: str) -> None:
    import torch

    if not torch.equal(actual, expected):
        wrong = int((actual != expected).sum())
        raise CheckFailedError(
            f"{what}: {wrong} of {expected.numel()} bytes are wrong",
            "do not trust copies on this machine; please report this with the output of "
            "`npu-kv doctor --json`",
        )


def check_host_copies() -> str:
    """Host to host, three blocks that are no neighbours."""
    import torch

    source, target, expected = _pattern(0), _pattern(100), _pattern(100)
    read, write = [0, 3, 5], [6, 1, 2]
    torch.ops.npu_kv.swap_blocks_batch([source], [target], torch.tensor(read), torch.tensor(write))
    expected[write] = source[read]
    _require_equal(target, expected, "a copy of 3 blocks from host to host")
    return f"3 blocks copied and compared; {human_bytes(available_host_memory())} of memory free"


def check_devices() -> str:
    """Devices and memory through torch.npu."""
    npu = _npu()
    if not npu.is_available() or npu.device_count() == 0:
        raise CheckFailedError(
            "torch.npu finds no device",
            "see `npu-smi info`; look at ASCEND_RT_VISIBLE_DEVICES and the rights on /dev/davinci*",
        )
    parts = []
    for index in range(npu.device_count()):
        free, total = npu.mem_get_info(index)
        name = npu.get_device_name(index)
        parts.append(f"{index}: {name}, {human_bytes(free)} of {human_bytes(total)} free")
    return "; ".join(parts)


def check_pinned_memory() -> str:
    """Page-locked memory, asked of the runtime itself."""
    import torch

    from npu_kv_ops import kv_cache

    size = 64 << 20
    memory = kv_cache.empty_pinned((size,), torch.uint8)
    attributes = _PointerAttributes()
    _call(
        _acl(),
        "aclrtPointerGetAttributes",
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.byref(attributes),
    )
    if attributes.location.type != _ACL_LOCATION_HOST:
        raise CheckFailedError(
            "the runtime does not see page-locked memory as such: every copy would be synchronous",
            "see `ulimit -l` and the driver's release notes",
        )
    return f"{human_bytes(size)} pinned at once"


def check_copies() -> str:
    """Both directions through the operator, three descriptors each."""
    import torch

    source, back = _pinned(7), _pinned(50)
    device = torch.zeros((_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8, device="npu")
    expected = _pattern(50)
    torch.ops.npu_kv.swap_blocks_batch(
        [source], [device], torch.tensor([0, 3, 5]), torch.tensor([6, 1, 2])
    )
    torch.ops.npu_kv.swap_blocks_batch(
        [device], [back], torch.tensor([1, 6, 2]), torch.tensor([7, 0, 4])
    )
    _npu().synchronize()
    expected[[7, 0, 4]] = _pattern(7)[[3, 0, 5]]
    _require_equal(back, expected, "3 blocks to the device and back")
    return "3 scattered blocks each way, compared"


def check_batch_copies() -> str:
    """One call of the runtime's batch function with two descriptors."""
    import torch

    library = _acl()
    function: Any = getattr(library, "aclrtMemcpyBatchAsync", None)
    slower = "nothing to do: single copies are used instead, which costs more time a call"
    if function is None:
        raise CheckFailedError("the runtime has no aclrtMemcpyBatchAsync", slower, "warning")
    source = _pinned(9)
    device = torch.zeros((_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8, device="npu")
    npu = _npu()
    npu.synchronize()
    reads, writes = (1, 4), (5, 2)
    pointers, sizes = ctypes.c_void_p * 2, ctypes.c_size_t * 2
    attributes = _BatchAttributes(
        dst=_Location(npu.current_device(), _ACL_LOCATION_DEVICE),
        src=_Location(0, _ACL_LOCATION_HOST),
    )
    fail_index = ctypes.c_size_t()
    code = function(
        pointers(*(device.data_ptr() + block * _BLOCK_BYTES for block in writes)),
        sizes(_BLOCK_BYTES, _BLOCK_BYTES),
        pointers(*(source.data_ptr() + block * _BLOCK_BYTES for block in reads)),
        sizes(_BLOCK_BYTES, _BLOCK_BYTES),
        ctypes.c_size_t(2),
        ctypes.byref(attributes),
        ctypes.byref(ctypes.c_size_t(0)),
        ctypes.c_size_t(1),
        ctypes.byref(fail_index),
        ctypes.c_void_p(npu.current_stream().npu_stream),
    )
    if code == _ACL_NOT_SUPPORTED:
        raise CheckFailedError(
            "the runtime answers that it does not support batch copies", slower, "warning"
        )
    if code:
        raise CheckFailedError(
            f"aclrtMemcpyBatchAsync answered {code}, at descriptor {fail_index.value}",
            "look the number up in the list of aclError codes, and see the logs in ~/ascend/log",
        )
    npu.synchronize()
    expected = torch.zeros_like(source)
    expected[list(writes)] = source[list(reads)]
    _require_equal(device.cpu(), expected, "a batch of 2 copies")
    return "one call with 2 descriptors, compared"


def check_host_callbacks() -> str:
    """A function that the stream calls on the host."""
    called = threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _argument: called.set())
    npu = _npu()
    stream = npu.Stream()
    _call(_acl(), "aclrtLaunchHostFunc", ctypes.c_void_p(stream.npu_stream), callback, None)
    if not called.wait(_CALLBACK_SECONDS):
        # The callback may still come, so neither it nor its stream may be freed.
        raise CheckFailedError(
            f"the callback was not called within {_CALLBACK_SECONDS:.0f} s",
            "graphs that read block ids from the NPU will hang; install a newer CANN",
        )
    stream.synchronize()
    return "aclrtLaunchHostFunc called back"


def check_external_events() -> str:
    """A stream that waits for an event before it is recorded."""
    import torch

    npu = _npu()
    library = _acl()
    source = _pinned(11)
    device = torch.zeros((_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8, device="npu")
    npu.synchronize()
    waiting, other = npu.Stream(), npu.Stream()
    event = ctypes.c_void_p()
    _call(
        library,
        "aclrtCreateEventWithFlag",
        ctypes.byref(event),
        ctypes.c_uint32(_ACL_EVENT_EXTERNAL),
    )
    raw = ctypes.c_void_p(waiting.npu_stream)
    _call(library, "aclrtStreamWaitEvent", raw, event)
    every = list(range(_BLOCKS))
    with npu.stream(waiting):
        # Not copy_(): torch_npu may take our page-locked memory for page-able and wait for ever.
        torch.ops.npu_kv.swap_blocks_batch.static([source], [device], every, every)
    time.sleep(_SETTLE_SECONDS)
    waited = not waiting.query()
    _call(library, "aclrtRecordEvent", event, ctypes.c_void_p(other.npu_stream))
    waiting.synchronize()
    _call(library, "aclrtResetEvent", event, raw)
    waiting.synchronize()
    _call(library, "aclrtDestroyEvent", event)
    if not waited:
        raise CheckFailedError(
            "a stream did not wait for an event that was recorded later",
            "graphs that read block ids from the NPU would copy too early: install a newer CANN",
        )
    _require_equal(device.cpu(), source, "a copy behind an external event")
    return "a stream waited for an event that was recorded afterwards"


def check_capture() -> str:
    """A copy captured in a torch.npu.NPUGraph and replayed with other bytes."""
    import torch

    npu = _npu()
    source = _pinned(1)
    device = torch.zeros((_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8, device="npu")
    npu.synchronize()
    reads, writes = [1, 4], [5, 2]
    graph = npu.NPUGraph()
    with npu.graph(graph):
        torch.ops.npu_kv.swap_blocks_batch.static([source], [device], reads, writes)
    for start in (20, 30):
        source.copy_(_pattern(start))
        graph.replay()
        npu.synchronize()
        expected = torch.zeros_like(source)
        expected[writes] = source[reads]
        _require_equal(device.cpu(), expected, "a captured copy")
    return "2 blocks captured in an NPUGraph, replayed twice, compared"


def check_npu_ids() -> str:
    """Block ids on the NPU, in an eager call and in a graph that is replayed with other ids."""
    import torch

    from npu_kv_ops import _C, ops

    support = _C.signal_support()
    if support is None:
        raise CheckFailedError(
            "the library with the NPU kernels is not loaded",
            "see the check of torch_npu above; CPU ids and lists work without it",
        )
    callbacks, signals, missing = support
    if missing:
        found = "; it has " + (callbacks or signals) if callbacks or signals else ""
        raise CheckFailedError(
            f"{missing}{found}",
            "block ids on the NPU need both callbacks and signals: install a newer CANN; until "
            "then pass ids on the CPU, and lists of constant ids in graphs",
        )
    npu = _npu()
    source = _pinned(13)
    device = torch.zeros((_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8, device="npu")
    expected = torch.zeros_like(source)
    reads, writes = (torch.zeros(2, dtype=torch.int64, device="npu") for _ in range(2))

    def choose(read: list[int], write: list[int]) -> None:
        reads.copy_(torch.tensor(read))
        writes.copy_(torch.tensor(write))
        expected[write] = source[read]

    def require_copied(what: str) -> None:
        npu.synchronize()
        ops.raise_pending_errors()
        _require_equal(device.cpu(), expected, what)

    choose([0, 3], [6, 1])
    torch.ops.npu_kv.swap_blocks_batch([source], [device], reads, writes)
    require_copied("an eager copy with ids on the NPU")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        torch.ops.npu_kv.swap_blocks_batch([source], [device], reads, writes)
    for read, write in (([5, 2], [0, 4]), ([7, 1], [3, 7])):
        choose(read, write)
        graph.replay()
        require_copied("a captured copy with ids on the NPU")
    return (
        f"eager, and captured and replayed with other ids twice, compared; callbacks: {callbacks}; "
        f"signals: {signals}"
    )


def check_copy_backend() -> str:
    """A store behind an event and a load behind the store, as jobs and as graphs."""
    from npu_kv_ops import copy_backend

    host = _pinned(3)
    device = _pattern(60).to("npu")
    expected = _pattern(60)
    written = _npu().Event()
    written.record()
    events: list[tuple[int, copy_backend.TransferEvent]] = []
    with copy_backend.NPUDmaCopyBackend() as backend:
        backend.init([device], [host])
        backend.launch_copy([0, 3, 5], [6, 1, 2], True, 0, events, written)
        backend.launch_copy([6, 2], [1, 7], False, 1, events)
        backend.launch_graph(backend.capture([7], [4], True), 2, events)
        backend.launch_graph(backend.capture([4], [2], False), 3, events)
        for _, event in events:
            event.synchronize(_TRANSFER_SECONDS)
    expected[[1, 7, 2]] = _pattern(60)[[0, 5, 5]]
    _require_equal(device.cpu(), expected, "4 transfers of the copy backend")
    return "2 stores and 2 loads of common blocks in order, half of them graphs, compared"


Check = Callable[[], str]

HOST_CHECKS: dict[str, tuple[Check, bool]] = {"host copies": (check_host_copies, True)}
DEVICE_CHECKS: dict[str, tuple[Check, bool]] = {
    "devices": (check_devices, True),
    "pinned memory": (check_pinned_memory, True),
    "copies": (check_copies, True),
    "batch copies": (check_batch_copies, False),
    "host callbacks": (check_host_callbacks, False),
    "external events": (check_external_events, False),
    "capture": (check_capture, False),
    "ids on the NPU": (check_npu_ids, False),
    "copy backend": (check_copy_backend, False),
}
"""Name of each check, the check, and whether it is essential (on the device: if there is one)."""

LOAD = "libraries"


def _run_check(name: str, check: Check, essential: bool) -> Result:
    try:
        return Result(name, "ok", essential, check())
    except CheckFailedError as failure:
        status: Any = failure.status
        return Result(name, status, essential, str(failure), failure.advice)
    except Exception as error:  # whatever it is, the other checks must still run
        detail = f"{type(error).__name__}: {error}"
        advice = "see the logs in ~/ascend/log, and ASCEND_GLOBAL_LOG_LEVEL=1 for more"
        return Result(name, "failed", essential, detail, advice)


def _load(option: runtime_choice.RuntimeOption) -> Result:
    try:
        runtime_choice.choose(option)
        import npu_kv_ops.ops  # noqa: F401
    except Exception as error:  # reported with its text, like every other finding
        return Result(
            LOAD, "failed", True, f"{error}", "npu_kv_ops cannot be used until this is solved"
        )
    return Result(LOAD, "ok", True, "npu_kv_ops and torch are loaded")


def main() -> None:
    """Runs the checks named on the command line; results go to the file descriptor given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()

    def send(record: dict[str, object]) -> None:
        os.write(arguments.fd, json.dumps(record).encode() + b"\n")

    send({"begin": LOAD})
    loaded = _load(arguments.runtime)
    send(asdict(loaded))
    if loaded.status == "ok":
        for name in arguments.names:
            check, essential = (HOST_CHECKS | DEVICE_CHECKS)[name]
            send({"begin": name})
            send(asdict(_run_check(name, check, essential)))


if __name__ == "__main__":
    main()
