"""swap_blocks_start and swap_blocks_wait, in eager code and in captured graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import eventually

import npu_kv_ops as kv
from npu_kv_ops import ops

BLOCKS, PAYLOAD, TENSORS = 16, 64, 4
A, B = [1, 2, 5], [7, 3, 4]


class Pools:
    def __init__(self, device: str, tensors: int = TENSORS) -> None:
        self.host = [torch.randn(BLOCKS, PAYLOAD) for _ in range(tensors)]
        self.far = [torch.randn(BLOCKS, PAYLOAD).to(device) for _ in range(tensors)]
        if device == "npu":
            self.host = [tensor.pin_memory() for tensor in self.host]

    def sides(self, store: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return (self.far, self.host) if store else (self.host, self.far)


def copied(src: list[torch.Tensor], dst: list[torch.Tensor], a: Any, b: Any) -> bool:
    return all(torch.equal(y.cpu()[b], x.cpu()[a]) for x, y in zip(src, dst))


def ids_of(kind: str, ids: list[int]) -> Any:
    if kind == "list":
        return ids
    return torch.tensor(ids, device="npu" if kind == "npu" else "cpu")


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    yield
    gc.collect()
    ops.raise_pending_errors()


# On the host


@pytest.mark.parametrize("kind", ["list", "cpu"])
def test_on_the_host_the_start_copies(kind: str) -> None:
    pools = Pools("cpu")
    src, dst = pools.sides(store=False)
    ticket = kv.swap_blocks_start(src, dst, ids_of(kind, A), ids_of(kind, B), [3, 1])
    assert ticket.shape == ()
    assert ticket.dtype == torch.int64
    kv.swap_blocks_wait(ticket, src[3:], dst[3:], 1)
    kv.swap_blocks_wait(ticket, src[:3], dst[:3], 0)
    assert copied(src, dst, A, B)


@pytest.mark.parametrize("parts", [[1, 1], [4, 1], [0, 4], [-1, 5], []])
def test_parts_have_to_be_all_tensors(parts: list[int]) -> None:
    src, dst = Pools("cpu").sides(store=False)
    before = [tensor.clone() for tensor in dst]
    with pytest.raises(ValueError, match="parts"):
        kv.swap_blocks_start(src, dst, A, B, parts)
    assert all(torch.equal(x, y) for x, y in zip(before, dst))


def test_waits_that_do_not_fit() -> None:
    src, dst = Pools("cpu").sides(store=False)
    ticket = kv.swap_blocks_start(src, dst, A, B, [2, 2])
    with pytest.raises(ValueError, match="part is 2; the swap has 2 parts"):
        kv.swap_blocks_wait(ticket, src[:2], dst[:2], 2)
    with pytest.raises(ValueError, match="part is -1"):
        kv.swap_blocks_wait(ticket, src[:2], dst[:2], -1)
    with pytest.raises(ValueError, match="src has 1 and dst has 1 tensors; the part has 2"):
        kv.swap_blocks_wait(ticket, src[:1], dst[:1], 0)
    kv.swap_blocks_wait(ticket, src[:2], dst[:2], 0)
    with pytest.raises(ValueError, match="part 0 has been waited for already"):
        kv.swap_blocks_wait(ticket, src[:2], dst[:2], 0)
    kv.swap_blocks_wait(ticket, src[2:], dst[2:], 1)


@pytest.mark.parametrize(
    ("ticket", "error", "text"),
    [
        (torch.tensor(1 << 40), ValueError, "no npu_kv::swap_blocks_start has returned"),
        (torch.tensor(1.0), TypeError, "ticket is a Float tensor"),
        (torch.zeros(1, dtype=torch.int64), ValueError, r"ticket has shape \[1\]"),
    ],
)
def test_what_is_no_ticket(ticket: torch.Tensor, error: type[Exception], text: str) -> None:
    src, dst = Pools("cpu").sides(store=False)
    with pytest.raises(error, match=text):
        kv.swap_blocks_wait(ticket, src, dst)


def test_a_ticket_that_is_gone() -> None:
    src, dst = Pools("cpu").sides(store=False)
    ticket = kv.swap_blocks_start(src, dst, A, B)
    copy = ticket.clone()
    kv.swap_blocks_wait(copy, src, dst)  # a compiler may hand out a copy
    del ticket
    with pytest.raises(ValueError, match="or which is gone"):
        kv.swap_blocks_wait(copy, src, dst)


def test_a_start_without_a_wait_is_an_error() -> None:
    src, dst = Pools("cpu").sides(store=False)
    ticket = kv.swap_blocks_start(src, dst, A, B, [1, 3])
    kv.swap_blocks_wait(ticket, src[:1], dst[:1])
    del ticket
    with pytest.raises(kv.TransferError, match="1 of 2 parts were never waited for"):
        ops.raise_pending_errors()


def by_hand(
    src: list[torch.Tensor], dst: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    ticket = torch.ops.npu_kv.swap_blocks_start(src, dst, a, b, [1, 3])
    meanwhile = a + 1
    torch.ops.npu_kv.swap_blocks_wait(ticket, src[:1], dst[:1], 0)
    first = dst[0] * 2
    torch.ops.npu_kv.swap_blocks_wait(ticket, src[1:], dst[1:], 1)
    return first + dst[3] + meanwhile.sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compilers_keep_the_order(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(by_hand, backend=backend, fullgraph=True)
    for _ in range(3):
        pools, ids = Pools("cpu"), [torch.randperm(BLOCKS)[:3] for _ in range(2)]
        src, dst = pools.sides(store=False)
        other = [tensor.clone() for tensor in dst]
        expected = by_hand(src, other, *ids)
        with torch.no_grad():
            found = compiled(src, dst, *ids)
        assert torch.equal(found, expected)
        assert all(torch.equal(x, y) for x, y in zip(other, dst))


def test_the_registrations_are_right() -> None:
    src, dst = Pools("cpu").sides(store=False)
    start, wait = torch.ops.npu_kv.swap_blocks_start, torch.ops.npu_kv.swap_blocks_wait
    ids = torch.tensor(A), torch.tensor(B)
    # Each call makes a ticket, whose number no fake kernel can know.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(start.default, (src, dst, *ids), test_utils=checks)
    torch.library.opcheck(start.static, (src, dst, A, B, [2, 2]), test_utils=checks)
    gc.collect()
    with pytest.raises(kv.TransferError, match="never waited for"):
        ops.raise_pending_errors()
    ticket = start(src, dst, *ids)
    # Which runs it.
    torch.library.opcheck(wait.default, (ticket, src, dst), test_utils="test_faketensor")


# On the NPU


@pytest.mark.npu
@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("kind", ["list", "cpu", "npu"])
def test_parts_are_waited_for_one_by_one(
    sim: ModuleType, npu: torch.device, kind: str, store: bool
) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store)
    with sim.check_races():
        for tensor in pools.far:
            tensor.add_(1)  # what is stored is what was computed before
        ticket = kv.swap_blocks_start(src, dst, ids_of(kind, A), ids_of(kind, B), [1, 2, 1])
        for part, (first, last) in enumerate([(0, 1), (1, 3), (3, 4)]):
            kv.swap_blocks_wait(ticket, src[first:last], dst[first:last], part)
            for tensor in pools.far[first:last]:
                tensor.clone()
        torch.npu.synchronize()
    assert copied(src, dst, A, B)


@pytest.mark.npu
def test_the_stream_goes_on_until_it_waits(sim: ModuleType, npu: torch.device) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    with sim.overrides(h2d_bytes_per_second=10**6), sim.timeline() as tasks:  # 0.8 ms a tensor
        ticket = kv.swap_blocks_start(src, dst, A, B, [1, 3])
        x.add_(1)
        kv.swap_blocks_wait(ticket, src[:1], dst[:1], 0)
        x.mul_(2)
        kv.swap_blocks_wait(ticket, src[1:], dst[1:], 1)
        x.sub_(3)
        torch.npu.synchronize()
    add, mul, sub = (task for task in tasks if task.kind == "operator")
    first, last = sorted((task for task in tasks if task.kind == "batch"), key=lambda t: t.start_ns)
    assert add.end_ns < first.end_ns
    assert first.end_ns <= mul.start_ns < mul.end_ns < last.end_ns <= sub.start_ns


@pytest.mark.npu
def test_memory_that_nobody_waited_for_is_not_used_again(npu: torch.device) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)
    addresses = {tensor.data_ptr() for tensor in pools.far}
    ticket = kv.swap_blocks_start(src, dst, A, B)
    del ticket, pools, src, dst
    gc.collect()
    torch.npu.synchronize()
    again = [torch.zeros(BLOCKS, PAYLOAD, device="npu") for _ in range(TENSORS)]
    assert not addresses & {tensor.data_ptr() for tensor in again}
    with pytest.raises(kv.TransferError, match="1 of 1 parts were never waited for"):
        ops.raise_pending_errors()


@pytest.mark.npu
def test_other_tensors_than_those_of_the_start(npu: torch.device) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)
    ticket = kv.swap_blocks_start(src, dst, A, B)
    with pytest.raises(ValueError, match=r"dst\[3\] is not the tensor 3 .* a compiler has cloned"):
        kv.swap_blocks_wait(ticket, src, [*dst[:3], torch.empty_like(dst[3])])
    with pytest.raises(ValueError, match=r"src\[1\] is not the tensor 1"):
        kv.swap_blocks_wait(ticket, [src[0], src[0], *src[2:]], dst)
    kv.swap_blocks_wait(ticket, src, dst)


@pytest.mark.npu
@pytest.mark.parametrize("case", ["page-able", "on the NPU"])
def test_what_cannot_overlap_is_done_by_the_start(npu: torch.device, case: str) -> None:
    """So a compiler may hand clones of the destinations to the wait."""
    pools = Pools("npu")
    src = [tensor.clone() for tensor in (pools.host if case == "page-able" else pools.far)]
    ticket = kv.swap_blocks_start(src, pools.far, A, B)
    clones = [tensor.clone() for tensor in pools.far]
    kv.swap_blocks_wait(ticket, [tensor.clone() for tensor in src], clones)
    assert copied(src, clones, A, B)


@pytest.mark.npu
def test_wrong_ids_on_the_npu_let_the_stream_go_on(npu: torch.device) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)
    before = [tensor.cpu() for tensor in dst]
    ticket = kv.swap_blocks_start(src, dst, ids_of("npu", [1, 99]), ids_of("npu", [1, 2]), [2, 2])
    kv.swap_blocks_wait(ticket, src[:2], dst[:2], 0)
    kv.swap_blocks_wait(ticket, src[2:], dst[2:], 1)
    torch.npu.synchronize()
    assert all(torch.equal(x, y.cpu()) for x, y in zip(before, dst))
    with pytest.raises(kv.TransferError, match=r"swap_blocks_start, host to device .* is 99"):
        ops.raise_pending_errors()


@pytest.mark.npu
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_part_that_fails_lets_the_stream_go_on(
    sim: ModuleType, npu: torch.device, nth: int
) -> None:
    pools = Pools("npu", tensors=3)
    src, dst = pools.sides(store=False)
    torch.npu.synchronize()
    sim.fail_call("aclrtMemcpyBatchAsync", nth=nth, code=507000)
    ticket = kv.swap_blocks_start(src, dst, A, B, [1, 1, 1])
    for part in range(3):
        kv.swap_blocks_wait(ticket, src[part : part + 1], dst[part : part + 1], part)
    torch.npu.synchronize()
    assert [copied([x], [y], A, B) for x, y in zip(src, dst)] == [i + 1 < nth for i in range(3)]
    with pytest.raises(kv.TransferError, match="aclrtMemcpyBatchAsync"):
        ops.raise_pending_errors()


@pytest.mark.npu
def test_a_wait_that_the_runtime_refuses_keeps_the_memory(
    sim: ModuleType, npu: torch.device
) -> None:
    pools = Pools("npu", tensors=2)
    src, dst = pools.sides(store=False)
    addresses = {tensor.data_ptr() for tensor in pools.far}
    ticket = kv.swap_blocks_start(src, dst, A, B, [1, 1])
    torch.npu.synchronize()
    sim.fail_call("aclrtValueWait", code=507000)
    kv.swap_blocks_wait(ticket, src[:1], dst[:1], 0)
    kv.swap_blocks_wait(ticket, src[1:], dst[1:], 1)
    torch.npu.synchronize()
    with pytest.raises(kv.TransferError, match="swap_blocks_wait: aclrtValueWait failed"):
        ops.raise_pending_errors()
    # Nobody waits for the first part, whose copies may be under way for as long as there are any.
    del pools, src, dst, ticket
    gc.collect()
    again = [torch.zeros(BLOCKS, PAYLOAD, device="npu") for _ in range(2)]
    assert not addresses & {tensor.data_ptr() for tensor in again}


@pytest.mark.npu
def test_memory_and_signals_are_used_again(sim: ModuleType, npu: torch.device) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)
    ids = ids_of("npu", A), ids_of("npu", B)

    def two_under_way() -> None:
        one = kv.swap_blocks_start(src[:2], dst[:2], *ids)
        other = kv.swap_blocks_start(src[2:], dst[2:], *ids, [1, 1])
        kv.swap_blocks_wait(other, src[3:], dst[3:], 1)
        kv.swap_blocks_wait(one, src[:2], dst[:2])
        kv.swap_blocks_wait(other, src[2:3], dst[2:3], 0)

    def alive() -> tuple[int, int]:
        torch.npu.synchronize()
        stats = sim.stats()
        return stats.calls.get("aclrtMallocHost", 0), stats.calls.get("aclrtMalloc", 0)

    with sim.check_races():
        two_under_way()
        before = alive()
        for _ in range(50):
            two_under_way()
        assert alive() == before
    assert copied(src, dst, A, B)


@pytest.mark.npu
@pytest.mark.parametrize("waits", ["main", "side"])
def test_a_wait_on_another_stream(sim: ModuleType, npu: torch.device, waits: str) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)
    side = torch.npu.Stream()
    with sim.check_races():
        for _ in range(3):
            ticket = kv.swap_blocks_start(src, dst, A, B)
            stream = side if waits == "side" else torch.npu.current_stream()
            with torch.npu.stream(stream):
                kv.swap_blocks_wait(ticket, src, dst)
                for tensor in dst:
                    tensor.add_(1)
            torch.npu.current_stream().wait_stream(stream)
        torch.npu.synchronize()
    assert all(torch.equal(y.cpu()[B], x[A] + 1) for x, y in zip(src, dst))


# In captured graphs


def captured(function: Callable[[], object]) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    # Not torch.npu.graph, which logs what ends a capture, and so keeps its frames alive.
    with torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()
        try:
            function()
        finally:
            graph.capture_end()
    return graph


@pytest.mark.npu
@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
def test_replays_with_new_ids(sim: ModuleType, npu: torch.device, store: bool) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store)
    a, b = (torch.full((3,), -1, device="npu") for _ in range(2))

    def step() -> None:
        ticket = kv.swap_blocks_start(src, dst, a, b, [1, 3])
        kv.swap_blocks_wait(ticket, src[:1], dst[:1], 0)
        pools.far[0].add_(1)
        kv.swap_blocks_wait(ticket, src[1:], dst[1:], 1)
        pools.far[3].add_(1)

    graph = captured(step)
    expected = [[t.cpu().clone() for t in side] for side in (src, dst)]
    with sim.check_races():
        for round_ in range(20):
            ids = [torch.randperm(BLOCKS)[:3] for _ in range(2)]
            ids[0][: round_ % 3] = -1
            a.copy_(ids[0])
            b.copy_(ids[1])
            graph.replay()
            torch.npu.synchronize()
            real = ids[0] >= 0
            for x, y in zip(*expected):
                y[ids[1][real]] = x[ids[0][real]]
            for layer in (0, 3):
                expected[0 if store else 1][layer] += 1
            for found, wanted in zip((*src, *dst), (*expected[0], *expected[1])):
                assert torch.equal(found.cpu(), wanted)


@pytest.mark.npu
def test_constants_are_part_of_a_graph_and_take_no_room_in_it(
    sim: ModuleType, npu: torch.device
) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)

    def step() -> None:
        kv.swap_blocks_wait(kv.swap_blocks_start(src, dst, A, B), src, dst)

    with sim.overrides(graph_copies=1):
        graph = captured(step)
    for tensor in dst:
        tensor.zero_()
    graph.replay()
    torch.npu.synchronize()
    assert copied(src, dst, A, B)


@pytest.mark.npu
def test_cpu_ids_are_refused_in_a_capture(npu: torch.device) -> None:
    src, dst = Pools("npu").sides(store=False)
    with pytest.raises(RuntimeError, match="swap_blocks_start: the current stream captures"):
        captured(lambda: kv.swap_blocks_start(src, dst, torch.tensor(A), torch.tensor(B)))


@pytest.mark.npu
def test_start_and_wait_belong_to_one_capture(npu: torch.device) -> None:
    src, dst = Pools("npu").sides(store=False)
    tickets: list[torch.Tensor] = []
    outside = kv.swap_blocks_start(src, dst, A, B)
    with pytest.raises(kv.TransferError, match="started outside of it"):
        captured(lambda: kv.swap_blocks_wait(outside, src, dst))
    kv.swap_blocks_wait(outside, src, dst)  # where it belongs
    graphs = ops.live_graphs()
    graph = captured(lambda: tickets.append(kv.swap_blocks_start(src, dst, A, B)))
    with pytest.raises(RuntimeError, match="started in the capture of a graph"):
        kv.swap_blocks_wait(tickets[0], src, dst)
    del graph
    torch.npu.synchronize()
    assert eventually(lambda: ops.live_graphs() <= graphs)
    with pytest.raises(kv.TransferError, match="to which this wait does not belong"):
        captured(lambda: kv.swap_blocks_wait(tickets[0], src, dst))
    tickets.clear()
    gc.collect()
    with pytest.raises(kv.TransferError, match="never waited for"):
        ops.raise_pending_errors()


@pytest.mark.npu
@pytest.mark.races
def test_a_graph_that_does_not_wait_can_be_replayed_and_destroyed(
    sim: ModuleType, npu: torch.device
) -> None:
    pools = Pools("npu")
    src, dst = pools.sides(store=False)
    ids = ids_of("npu", A), ids_of("npu", B)
    graphs = ops.live_graphs()
    for _ in range(3):
        graph = captured(lambda: kv.swap_blocks_start(src, dst, *ids))
        for _ in range(20):
            graph.replay()
        del graph
    torch.npu.synchronize()
    assert eventually(lambda: ops.live_graphs() <= graphs)
    gc.collect()
    with pytest.raises(kv.TransferError, match="never waited for"):
        ops.raise_pending_errors()

    # What it has left set is not what later calls wait for.
    def step() -> None:
        for _ in range(4):
            kv.swap_blocks_batch(src, dst, *ids)
            for tensor in dst:
                tensor.add_(1)

    graph = captured(step)
    with sim.check_races():
        graph.replay()
        torch.npu.synchronize()


@pytest.mark.npu
@pytest.mark.races
@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
def test_without_its_wait_there_is_a_race(sim: ModuleType, npu: torch.device, store: bool) -> None:
    pools = Pools("npu", tensors=1)
    src, dst = pools.sides(store)

    def step() -> None:
        kv.swap_blocks_wait(kv.swap_blocks_start(src, dst, A, B), src, dst)
        for tensor in pools.far:
            tensor.add_(1)

    with sim.timeline() as tasks:
        step()
        torch.npu.synchronize()
    (lane,) = {task.handle for task in tasks if task.kind == "batch"}
    served = ops.deferred_call_stats(0).calls
    sim.drop_call("aclrtValueWait")
    with pytest.raises(sim.RaceError), sim.check_races():
        # Nobody can see that the copy is over, and it is launched before the host sees the reader.
        with sim.stall(lane):
            step()
            assert eventually(lambda: ops.deferred_call_stats(0).calls > served)
            torch.npu.current_stream().synchronize()
        torch.npu.synchronize()
