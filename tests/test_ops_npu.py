"""The operator on the simulated NPU: directions, order, streams, memory, graphs, errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from block_reference import assert_same, content, expected_content, make_pool
from conftest import eventually

from npu_kv_ops import TransferError, empty_pinned, ops

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.npu

swap = torch.ops.npu_kv.swap_blocks_batch
DIRECTIONS = ["h2d", "d2h", "d2d"]
IDS = ([7, 1, 2, 3, -1, 0], [0, 4, 5, 6, 2, 9])  # one run of three, a skipped pair


@pytest.fixture(autouse=True)
def _on_the_simulator(sim: ModuleType, npu: torch.device) -> Iterator[None]:
    ops.reset_stats()
    limit = ops.max_batch()
    yield
    ops.set_max_batch(limit)
    torch.npu.synchronize()
    ops.raise_pending_errors()


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def pools(
    direction: str, *, tensors: int = 3, device: str = "npu:0", **kind: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def side(letter: str, seed: int) -> list[torch.Tensor]:
        where = {"device": device} if letter == "d" else {"pin": True}
        return [make_pool(10, seed=seed + t, **where, **kind) for t in range(tensors)]

    return side(direction[0], 0), side(direction[2], 100)


@pytest.fixture
def on_npu_1() -> Iterator[None]:
    torch.npu.set_device(1)
    yield
    torch.npu.set_device(0)


# Directions, streams and devices


@pytest.mark.parametrize("overload", ["default", "static"])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_direction(direction: str, gap: int, overload: str) -> None:
    src, dst = pools(direction, gap=gap)
    wanted = expected_content(src, dst, *IDS)
    if overload == "default":
        swap(src, dst, ids(*IDS[0]).int(), ids(*IDS[1]))
    else:
        swap.static(src, dst, *IDS)
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


@pytest.mark.usefixtures("on_npu_1")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_another_device_is_current(sim: ModuleType, direction: str) -> None:
    """The copy belongs to the current stream of the tensors' NPU, here npu:0."""
    src, dst = pools(direction)
    wanted, before = expected_content(src, dst, *IDS), content(dst)
    torch.npu.synchronize("npu:0")
    side = torch.npu.Stream("npu:0")
    with torch.npu.stream(side):
        handle = torch.npu.current_stream("npu:0").npu_stream
        torch.npu.set_device(1)
        with sim.stall(handle):
            swap(src, dst, ids(*IDS[0]), ids(*IDS[1]))
            assert torch.npu.current_device() == 1
            torch.npu.synchronize("npu:1")
            torch.npu.default_stream("npu:0").synchronize()
            assert_same(content(dst) if direction == "d2h" else before, before)
        torch.npu.set_device(0)
    side.synchronize()
    assert_same(content(dst), wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_runs_on_the_current_stream(sim: ModuleType, direction: str) -> None:
    src, dst = pools(direction)
    wanted = expected_content(src, dst, *IDS)
    side = torch.npu.Stream()
    handle = side.npu_stream
    torch.npu.synchronize()
    sim.reset_stats()
    with sim.timeline() as tasks:
        with torch.npu.stream(side):
            swap(src, dst, ids(*IDS[0]), ids(*IDS[1]))
        torch.npu.synchronize()
    assert {task.handle for task in tasks if task.kind in ("copy", "batch")} == {handle}
    assert_same(content(dst), wanted)


def test_in_order_with_the_operators_around_it(sim: ModuleType) -> None:
    """A queue full of earlier work: a copy that did not queue up behind it would overtake it."""
    host, device = make_pool(8, (1 << 10,), pin=True), make_pool(8, (1 << 10,), device="npu")
    filled = torch.full_like(device, 3.0)
    target = make_pool(8, (1 << 10,), pin=True, seed=3)
    for _ in range(300):
        device.copy_(filled, non_blocking=True)
    device.zero_()
    swap([host], [device], ids(1), ids(2))  # after zero_
    swap([device], [target], ids(2, 3), ids(5, 6))  # reads what the line above wrote
    device.copy_(filled)  # after the read
    torch.npu.synchronize()
    assert torch.equal(target[5].view(torch.int32), host[1].view(torch.int32))
    assert not target[6].any()
    assert (device.cpu() == 3).all()


def test_events_order_two_streams() -> None:
    src, device = make_pool(4, pin=True), make_pool(4, device="npu", seed=1)
    back = make_pool(4, pin=True, seed=2)
    load, store = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    for block in range(4):
        with torch.npu.stream(load):
            swap([src], [device], ids(block), ids(3 - block))
            loaded = load.record_event()
        with torch.npu.stream(store):
            store.wait_event(loaded)
            swap([device], [back], ids(3 - block), ids(block))
    torch.npu.synchronize()
    assert_same(content([back]), content([src]))


def test_the_unordered_items_of_a_batch_do_not_matter(sim: ModuleType) -> None:
    for seed in range(5):
        sim.configure(seed=seed)
        src, dst = pools("h2d", gap=1)
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
        wanted = expected_content(src, dst, order.tolist(), list(range(10)))
        swap(src, dst, order, torch.arange(10))
        torch.npu.synchronize()
        assert_same(content(dst), wanted)


# What reaches the runtime


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_runs_are_merged_and_counted_exactly(sim: ModuleType, direction: str) -> None:
    src, dst = pools(direction, tensors=2)
    padded = make_pool(10, gap=1, **({"device": "npu"} if direction[0] == "d" else {"pin": True}))
    src[1] = padded
    torch.npu.synchronize()
    sim.reset_stats()
    swap(src, dst, ids(*IDS[0]), ids(*IDS[1]))
    torch.npu.synchronize()
    # 5 pairs: 3 runs in the dense tensor, 5 blocks in the padded one.
    assert sim.stats().copies[direction] == 3 + 5
    assert sim.stats().bytes[direction] == 2 * 5 * 24
    assert ops.stats() == ops.OpStats(1, 2 * 5 * 24, 10, 8)


@pytest.mark.parametrize(("limit", "batches"), [(1, 15), (4, 4), (7, 3), (15, 1), (4096, 1)])
def test_batches_are_cut_at_the_limit(sim: ModuleType, limit: int, batches: int) -> None:
    src, dst = pools("h2d", gap=1)
    wanted = expected_content(src, dst, *IDS)
    ops.set_max_batch(limit)
    torch.npu.synchronize()
    sim.reset_stats()
    swap(src, dst, ids(*IDS[0]), ids(*IDS[1]))
    torch.npu.synchronize()
    stats = sim.stats()
    assert stats.calls["aclrtMemcpyBatchAsync"] == stats.batches == batches
    assert stats.calls["aclrtMemcpyAsync"] == 0
    assert stats.copies["h2d"] == 15
    assert_same(content(dst), wanted)


def test_within_a_device_copies_are_single(sim: ModuleType) -> None:
    src, dst = pools("d2d", gap=1)
    sim.reset_stats()
    swap(src, dst, ids(*IDS[0]), ids(*IDS[1]))
    torch.npu.synchronize()
    assert sim.stats().calls["aclrtMemcpyBatchAsync"] == 0
    assert sim.stats().calls["aclrtMemcpyAsync"] == 15


FALLBACK = """
from npu_kv_ops import simulator
simulator.activate({activate})
import torch
from npu_kv_ops import ops
{prepare}
src = [torch.arange(40.).reshape(10, 4).pin_memory() for _ in range(2)]
dst = [torch.zeros(10, 4, device="npu") for _ in range(2)]
back = [torch.zeros(10, 4).pin_memory() for _ in range(2)]
simulator.reset_stats()
for _ in range(2):
    ops.swap_blocks_batch(src, dst, torch.tensor([1, 2, 9]), torch.tensor([4, 5, 0]))
    ops.swap_blocks_batch(dst, back, torch.tensor([4, 5, 0]), torch.tensor([1, 2, 9]))
torch.npu.synchronize()
assert torch.equal(back[1][[1, 2, 9]], src[1][[1, 2, 9]]), back
ops.raise_pending_errors()
stats = simulator.stats()
print(stats.calls["aclrtMemcpyBatchAsync"], stats.calls["aclrtMemcpyAsync"], stats.copies["h2d"])
"""


@pytest.mark.parametrize(
    ("activate", "prepare", "batch_calls"),
    [
        ("without=['aclrtMemcpyBatchAsync']", "", 0),
        # Asked once; the answer is remembered, although later calls would work.
        ("", "simulator.fail_call('aclrtMemcpyBatchAsync', code=207000)", 1),
    ],
    ids=["missing", "not supported"],
)
def test_single_copies_where_there_is_no_batch(
    run_script: RunScript, activate: str, prepare: str, batch_calls: int
) -> None:
    ran = run_script(FALLBACK.format(activate=activate, prepare=prepare), runtime=None)
    assert ran.stdout.split()[-3:] == [str(batch_calls), "16", "8"]


# Host memory


PAGEABLE = """
import warnings
import torch
from npu_kv_ops import ops
host = torch.arange(64.).reshape(8, 8)
device = torch.zeros(8, 8, device="npu")
back = torch.full((8, 8), -1.)
torch.npu.synchronize()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    try:
        ops.swap_blocks_batch([host], [device], [0], [0])
    except UserWarning as warning:
        print("warned:", warning)
assert not device.cpu().any()  # a warning made an error stops the call
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        ops.swap_blocks_batch([host], [device], torch.arange(8), torch.arange(8).flip(0))
        host += 1  # the copy is done, or this would be seen
        ops.swap_blocks_batch([device], [back], torch.arange(8), torch.arange(8).flip(0))
        assert torch.equal(back + 1, host), back
print("warned again:", sum("page-able" in str(one.message) for one in seen))
"""


@pytest.mark.parametrize("queue", ["0", "1"])
def test_pageable_memory_is_synchronous_and_warns_once(run_script: RunScript, queue: str) -> None:
    ran = run_script(PAGEABLE, env={"TASK_QUEUE_ENABLE": queue})
    assert "warned: npu_kv::swap_blocks_batch: src[0] is in page-able host memory" in ran.stdout
    assert "warned again: 0" in ran.stdout


def test_one_pageable_tensor_makes_the_call_synchronous() -> None:
    src, dst = pools("d2h")
    dst[2] = make_pool(10, seed=5)
    wanted = expected_content(src, dst, *IDS)
    swap(src, dst, ids(*IDS[0]), ids(*IDS[1]))
    assert_same(content(dst), wanted)


def test_a_tensor_that_moves_to_pageable_memory_is_noticed() -> None:
    """The answer about a tensor's memory is remembered: for that memory, not for the tensor."""
    src, dst = pools("h2d", tensors=1)
    for _ in range(2):
        swap(src, dst, ids(0), ids(0))
    src[0].set_(make_pool(10, seed=77))
    wanted = expected_content(src, dst, [3], [3])
    swap(src, dst, ids(3), ids(3))
    src[0].zero_()
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_freed_pinned_memory_is_not_handed_out_before_the_copy(
    sim: ModuleType, direction: str
) -> None:
    src, dst = pools(direction, tensors=1)
    host = src if direction == "h2d" else dst
    nbytes = host[0].untyped_storage().nbytes()
    side = torch.npu.Stream()
    handle = side.npu_stream
    wanted = expected_content(src, dst, [1], [2])
    with torch.npu.stream(side), sim.stall(handle):
        swap(src, dst, ids(1), ids(2))
        address = host[0].data_ptr()
        del host[:]
        others = [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(4)]
        assert address not in [other.data_ptr() for other in others]
    torch.npu.synchronize()
    if direction == "h2d":
        assert_same(content(dst), wanted)


def test_freed_device_memory_is_not_handed_out_before_the_copy(sim: ModuleType) -> None:
    """Allocated on the default stream, used on another: the allocator has to hear of it."""
    src, dst = pools("d2h", tensors=1)
    wanted = expected_content(src, dst, [1], [2])
    side = torch.npu.Stream()
    handle = side.npu_stream
    torch.npu.synchronize()
    with sim.stall(handle):
        with torch.npu.stream(side):
            swap(src, dst, ids(1), ids(2))
        address, nbytes = src[0].data_ptr(), src[0].untyped_storage().nbytes()
        src.clear()
        others = [torch.zeros(nbytes, dtype=torch.uint8, device="npu") for _ in range(4)]
        assert address not in [other.data_ptr() for other in others]
        torch.npu.default_stream().synchronize()
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_memory_of_the_runtime_itself_lives_until_the_copy_is_done(
    sim: ModuleType, direction: str
) -> None:
    device = make_pool(10, device="npu")
    host = empty_pinned((10, 6), torch.float32)
    host.copy_(make_pool(10, seed=1))
    wanted = expected_content([host], [device], [1], [2])
    ops.raise_pending_errors()
    before = sim.stats().live["pinned_allocations"]
    side = torch.npu.Stream()
    handle = side.npu_stream
    torch.npu.synchronize()
    with sim.stall(handle):
        with torch.npu.stream(side):
            pair = ([host], [device]) if direction == "h2d" else ([device], [host])
            swap(*pair, ids(1), ids(2))
        del host, pair
        gc.collect()
        ops.raise_pending_errors()
        assert sim.stats().live["pinned_allocations"] == before
    torch.npu.synchronize()

    def released() -> bool:
        ops.raise_pending_errors()  # lets go of what is done
        return sim.stats().live["pinned_allocations"] == before - 1

    assert eventually(released)
    if direction == "h2d":
        assert_same(content([device]), wanted)


# Graphs


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_static_ids_in_a_graph(direction: str) -> None:
    src, dst = pools(direction)
    before = content(dst)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        swap.static(src, dst, *IDS)
    torch.npu.synchronize()
    assert_same(content(dst), before)  # recorded, not run
    for seed in range(2):
        for tensor in src:
            fresh = make_pool(10, seed=200 + seed, device=tensor.device, pin=True)
            tensor.copy_(fresh)
        wanted = expected_content(src, dst, *IDS)
        graph.replay()
        torch.npu.synchronize()
        assert_same(content(dst), wanted)


def test_a_graph_refuses_what_it_would_freeze_or_cannot_copy() -> None:
    src, dst = pools("h2d")
    pageable = [make_pool(10)] * 3
    address = ids(src[0].data_ptr()), ids(dst[0].data_ptr()), ids(8)
    before = content(dst)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        with pytest.raises(RuntimeError, match=r"lists of int to the \.static"):
            swap(src, dst, ids(0), ids(0))
        with pytest.raises(RuntimeError, match="captures a graph"):
            swap(*address, 0)
        with pytest.raises(
            RuntimeError, match=r"src\[0\] is in page-able host memory, which a gra"
        ):
            swap.static(pageable, dst, [0], [0])
        swap.static(src, dst, [4], [5])  # the capture has survived
    assert_same(content(dst), before)
    wanted = expected_content(src, dst, [4], [5])
    graph.replay()
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


# Addresses


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ptrs(sim: ModuleType, direction: str, dtype: torch.dtype) -> None:
    src, dst = pools(direction, gap=2)
    wanted = expected_content(src, dst, *IDS)
    torch.npu.synchronize()

    def addresses(tensors: list[torch.Tensor], blocks: list[int]) -> list[int]:
        return [t.data_ptr() + b * t.stride(0) * 4 for t in tensors for b in blocks]

    sizes = [24 if min(pair) >= 0 else 0 for pair in zip(*IDS, strict=True)] * 3
    arguments = [ids(*addresses(src, IDS[0])), ids(*addresses(dst, IDS[1])), ids(*sizes)]
    arguments = [argument.to(dtype) for argument in arguments]
    ops.set_max_batch(6)
    sim.reset_stats()
    swap(*arguments, DIRECTIONS.index(direction))
    for argument in arguments:
        argument.zero_()  # the arrays are the caller's again
    torch.npu.synchronize()
    assert_same(content(dst), wanted)
    assert sim.stats().copies[direction] == 15
    assert sim.stats().calls["aclrtMemcpyBatchAsync"] == (0 if direction == "d2d" else 3)
    assert ops.stats() == ops.OpStats(1, 15 * 24, 15, 15)
    swap(*(torch.empty(0, dtype=torch.int64) for _ in range(3)), 0)
    assert ops.stats().calls == 1


@pytest.mark.usefixtures("on_npu_1")
def test_ptrs_go_to_the_device_of_their_addresses() -> None:
    src, dst = pools("h2d", device="npu:0")
    wanted = expected_content(src, dst, [0], [0])
    swap(
        ids(*(t.data_ptr() for t in src)),
        ids(*(t.data_ptr() for t in dst)),
        ids(24, 24, 24),
        0,
    )
    torch.npu.current_stream("npu:0").synchronize()
    assert_same(content(dst), wanted)


def test_ptrs_with_pageable_memory_are_done_at_the_return() -> None:
    src, dst = make_pool(4, device="npu"), make_pool(4, seed=1)
    wanted = expected_content([src], [dst], [2], [0])
    swap(ids(src[2].data_ptr()), ids(dst.data_ptr()), ids(24), 1)
    assert_same(content([dst]), wanted)


def test_a_range_across_two_allocations_copies_nothing() -> None:
    """Both its ends lie in device memory, what is between them does not."""
    mib = 1 << 20
    pair = [torch.zeros(32 * mib, dtype=torch.uint8, device="npu") for _ in range(2)]
    first, second = sorted(pair, key=torch.Tensor.data_ptr)
    begin = first.data_ptr() + 32 * mib - 8
    size = second.data_ptr() + 8 - begin
    source = torch.ones(32 * mib + size, dtype=torch.uint8, device="npu").data_ptr()
    with pytest.raises(ValueError, match=r"dst_ptrs\[1\]: .* do not lie in device memory"):
        swap(ids(source, source), ids(first.data_ptr(), begin), ids(16, size), 2)
    torch.npu.synchronize()
    assert not first.cpu().any()
    assert not second.cpu().any()


def test_ptrs_survive_a_compiler() -> None:
    src, dst = pools("h2d", tensors=1)
    wanted = expected_content(src, dst, [0], [0])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        swap(a, b, c, 0)
        return a + 1

    step(ids(src[0].data_ptr()), ids(dst[0].data_ptr()), ids(24))
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


# Errors on the way


def refused_by_the_runtime(sim: ModuleType, src: Any, dst: Any) -> None:
    sim.fail_call("aclrtMemcpyBatchAsync", code=107003)
    swap(src, dst, ids(1), ids(1))
    torch.npu.synchronize()


def test_an_error_is_raised_by_the_next_call(sim: ModuleType) -> None:
    src, dst = pools("h2d")
    refused_by_the_runtime(sim, src, dst)
    with pytest.raises(
        TransferError,
        match=r"host to device on npu:0: aclrtMemcpyBatchAsync fail.*"
        "error 107003: .*injected",
    ):
        swap(src, dst, ids(2), ids(2))
    # That call copied nothing, and the device goes on.
    wanted = expected_content(src, dst, [2], [2])
    swap(src, dst, ids(2), ids(2))
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


def test_an_error_waits_for_its_own_device(sim: ModuleType) -> None:
    refused_by_the_runtime(sim, *pools("h2d", device="npu:0"))
    other = pools("h2d", device="npu:1")
    swap(*other, ids(0), ids(0))
    torch.npu.synchronize("npu:1")
    with pytest.raises(TransferError, match="on npu:0"):
        ops.raise_pending_errors()
    ops.raise_pending_errors()  # once


def test_an_error_of_ptrs_is_raised_too(sim: ModuleType) -> None:
    src, dst = pools("h2d", tensors=1)
    sim.fail_call("aclrtMemcpyBatchAsync", code=107003)
    addresses = ids(src[0].data_ptr()), ids(dst[0].data_ptr()), ids(24)
    swap(*addresses, 0)
    torch.npu.synchronize()
    with pytest.raises(TransferError, match="error 107003"):
        swap(*addresses, 0)


def test_a_synchronous_call_raises_its_own_error(sim: ModuleType) -> None:
    src, dst = [make_pool(10)], [make_pool(10, device="npu", seed=1)]
    torch.npu.synchronize()
    sim.fail_call("aclrtMemcpyBatchAsync", code=107003)
    with pytest.raises(TransferError, match="error 107003"):
        swap(src, dst, ids(1), ids(1))
    ops.raise_pending_errors()


def test_without_a_queue_the_call_raises_its_own_error(run_script: RunScript) -> None:
    ran = run_script(
        """
        import torch
        from npu_kv_ops import TransferError, ops, simulator
        src = [torch.ones(4, 4).pin_memory()]
        dst = [torch.zeros(4, 4, device="npu")]
        simulator.fail_call("aclrtMemcpyBatchAsync", code=107003)
        try:
            ops.swap_blocks_batch(src, dst, [0], [0])
        except TransferError as error:
            print("raised", "107003" in str(error))
        ops.raise_pending_errors()
        ops.swap_blocks_batch(src, dst, [0], [0])
        torch.npu.synchronize()
        print("copied", dst[0].cpu()[0].tolist())
        """,
        env={"TASK_QUEUE_ENABLE": "0"},
    )
    assert "raised True" in ran.stdout
    assert "copied [1.0, 1.0, 1.0, 1.0]" in ran.stdout


def test_a_copy_that_fails_on_the_device_surfaces(run_script: RunScript) -> None:
    """In a process of its own: the runtime stops the context for good."""
    ran = run_script(
        """
        import torch
        from npu_kv_ops import TransferError, ops, simulator
        src = [torch.ones(4, 4).pin_memory()]
        dst = [torch.zeros(4, 4, device="npu")]
        torch.npu.synchronize()
        simulator.fail_copy(code=507013)
        ops.swap_blocks_batch(src, dst, [0], [0])
        try:
            torch.npu.synchronize()
        except RuntimeError as error:
            print("synchronize raised", "507013" in str(error))
        kinds = []
        for call in (lambda: ops.swap_blocks_batch(src, dst, [0], [0]), ops.raise_pending_errors):
            try:
                call()
                torch.npu.current_stream().query()
            except (TransferError, RuntimeError) as error:
                kinds.append(type(error).__name__)
        print("then", kinds)
        """,
        check=False,
    )
    assert "synchronize raised True" in ran.stdout, ran.stderr


def test_tensors_may_be_freed_right_after_the_call() -> None:
    """Nobody but the queued call holds them."""
    dst = [make_pool(10, device="npu", seed=100 + t) for t in range(3)]
    for seed in range(50):
        src = [make_pool(10, seed=seed + t, pin=True) for t in range(3)]
        wanted = expected_content(src, dst, [1], [seed % 10])
        swap(src, dst, ids(1), ids(seed % 10))
        del src
        torch.npu.synchronize()
        assert_same(content(dst), wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("overload", ["default", "static"])
def test_opcheck_with_npu_tensors(direction: str, overload: str) -> None:
    src, dst = pools(direction, tensors=2)
    arguments: Any = ([1, -1, 3], [2, 4, 0])
    if overload == "default":
        arguments = tuple(torch.tensor(one) for one in arguments)
    torch.library.opcheck(getattr(swap, overload), (src, dst, *arguments))
