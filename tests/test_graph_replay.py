"""Ids on the NPU, in eager code and in captured graphs: read when the stream gets there."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from block_reference import content, expected_content, make_pool
from conftest import eventually

from npu_kv_ops import NPUDmaCopyBackend, TransferError, ops

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("npu", "no_errors_left")]

swap = torch.ops.npu_kv.swap_blocks_batch
BLOCKS = 16
DIRECTIONS = ["h2d", "d2h", "d2d", "h2h"]


@pytest.fixture
def no_errors_left() -> Iterator[None]:
    yield
    torch.npu.synchronize()
    ops.raise_pending_errors()


def ids(*values: int, device: str = "npu", dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


def pools(
    direction: str, count: int = 2, device: str = "npu"
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def side(letter: str, seed: int) -> list[torch.Tensor]:
        where = {"h": "cpu", "d": device}[letter]
        return [
            make_pool(BLOCKS, seed=seed + i, device=where, pin=where == "cpu") for i in range(count)
        ]

    return side(direction[0], 1), side(direction[2], 100)


def assert_same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"tensor {index}"


@contextmanager
def capture(graph: torch.npu.NPUGraph, stream: torch.npu.Stream | None = None) -> Iterator[None]:
    """As torch.npu.graph, without the garbage collection that takes most of its time."""
    torch.npu.synchronize()
    with torch.npu.stream(stream or torch.npu.Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


def numbers(count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pools to compute with: random bytes may be NaN, which equals nothing."""
    host = [torch.randn(BLOCKS, 8).pin_memory() for _ in range(count)]
    return host, [torch.randn(BLOCKS, 8).npu() for _ in range(count)]


class Swap:
    """A captured call, and the ids that its replays read."""

    def __init__(
        self,
        direction: str = "h2d",
        pairs: int = 4,
        *,
        stream: torch.npu.Stream | None = None,
        device: str = "npu",
    ) -> None:
        self.src, self.dst = pools(direction, device=device)
        self.src_ids = torch.full((pairs,), -1, device=device)
        self.dst_ids = torch.full((pairs,), -1, device=device)
        self.graph = torch.npu.NPUGraph()
        with capture(self.graph, stream):
            swap(self.src, self.dst, self.src_ids, self.dst_ids)

    def replay(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for place, values in ((self.src_ids, src), (self.dst_ids, dst)):
            padded = [*values, *[-1] * (len(place) - len(values))]
            place.copy_(torch.tensor(padded))
        self.graph.replay()

    def check_replay(self, src: Sequence[int], dst: Sequence[int]) -> None:
        wanted = expected_content(self.src, self.dst, src, dst)
        self.replay(src, dst)
        torch.npu.synchronize()
        assert_same(content(self.dst), wanted)


# Eager


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_eager_ids_are_read_by_the_stream(direction: str, dtype: torch.dtype) -> None:
    src, dst = pools(direction)
    a, b = ids(9, 3, 4, -1, 0, dtype=dtype), ids(1, 5, 6, 7, -1, dtype=dtype)
    wanted = expected_content(src, dst, [9, 3, 4], [1, 5, 6])
    assert swap(src, dst, a, b) is None
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


def test_eager_ids_may_be_computed_just_before_and_overwritten_just_behind() -> None:
    src, dst = pools("h2d")
    wanted = expected_content(src, dst, [3, 5], [2, 4])
    torch.npu.synchronize()
    a = ids(2, 4)
    b = a.clone()
    a.add_(1)
    swap(src, dst, a, b)
    a.fill_(99)
    b.fill_(98)
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


def test_eager_ids_need_not_be_contiguous() -> None:
    src, dst = pools("d2h")
    both = ids(3, 2, 5, 4).view(2, 2)
    wanted = expected_content(src, dst, [3, 5], [2, 4])
    swap(src, dst, both[:, 0], both[:, 1])
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


def test_eager_calls_of_any_length_follow_one_another() -> None:
    src, dst = pools("h2d", 1)
    back = [make_pool(BLOCKS, seed=7, pin=True)]
    model_dst, model_back = content(dst), content(back)
    for length in (1, 16, 0, 5, 16, 2):
        a, b = torch.randperm(BLOCKS)[:length], torch.randperm(BLOCKS)[:length]
        padded = [torch.cat((x, torch.full((700,), -1))) for x in (a, b)]  # more than fits at first
        swap(src, dst, *(x.npu() for x in padded))
        swap(dst, back, b.npu(), a.npu())
        size = src[0][0].nbytes
        for x, y in zip(a.tolist(), b.tolist()):
            model_dst[0].view(BLOCKS, size)[y] = content(src)[0].view(BLOCKS, size)[x]
        for x, y in zip(b.tolist(), a.tolist()):
            model_back[0].view(BLOCKS, size)[y] = model_dst[0].view(BLOCKS, size)[x]
    torch.npu.synchronize()
    assert_same(content(dst), model_dst)
    assert_same(content(back), model_back)


def test_a_thousand_eager_calls_leave_nothing_behind(sim: ModuleType) -> None:
    src, dst = pools("h2d", 1)
    a, b = ids(1, 2), ids(3, 4)
    swap(src, dst, a, b)
    torch.npu.synchronize()
    before = sim.stats().live
    for _ in range(1000):
        swap(src, dst, a, b)
    torch.npu.synchronize()
    for key in ("pinned_bytes", "threads", "streams"):
        assert sim.stats().live[key] == before[key]
    assert sim.stats().live["events"] <= before["events"] + 8


def test_page_able_memory_makes_an_eager_call_finish() -> None:
    src = [make_pool(BLOCKS, device="npu")]
    dst = [make_pool(BLOCKS, seed=3)]
    wanted = expected_content(src, dst, [3], [5])
    a, b = ids(3), ids(5)
    swap(src, dst, a, b)
    assert_same(content(dst), wanted)  # nobody has synchronised
    with pytest.raises(TransferError, match=r"src_blocks\[0\] is 16, out of range"):
        swap(src, dst, ids(16), b)
    assert_same(content(dst), wanted)


def test_wrong_eager_ids_are_told_by_the_next_call() -> None:
    src, dst = pools("h2d")
    before = content(dst)
    swap(src, dst, ids(1, 16), ids(2, 3))
    torch.npu.synchronize()
    assert_same(content(dst), before)
    with pytest.raises(TransferError, match=r"this call was not run.*src_blocks\[1\] is 16"):
        swap(src, dst, ids(1), ids(2))
    assert_same(content(dst), before)
    swap(src, dst, ids(1, 2), ids(5, 5))
    torch.npu.synchronize()
    with pytest.raises(
        TransferError, match=r"dst_blocks\[1\] is 5, which dst_blocks\[0\] named already"
    ):
        ops.raise_pending_errors()
    assert_same(content(dst), before)


def test_a_stream_that_is_subscribed_for_callbacks_of_the_other_kind() -> None:
    src, dst = pools("h2d")
    wanted = expected_content(src, dst, [3], [5])
    stream = torch.npu.Stream()
    torch.npu._subscribe_report(stream)
    try:
        with torch.npu.stream(stream):
            swap(src, dst, ids(3), ids(5))
        stream.synchronize()
    finally:
        torch.npu._unsubscribe_report(stream)
    assert_same(content(dst), wanted)


def test_arguments_that_do_not_fit() -> None:
    src, dst = pools("h2d")
    for a, b in ((ids(0), ids(0, device="cpu")), (ids(0, device="cpu"), ids(0))):
        with pytest.raises(ValueError, match="they must be on one device"):
            swap(src, dst, a, b)
    with pytest.raises(ValueError, match="they must be equally long"):
        swap(src, dst, ids(0), ids(0, 1))
    if torch.npu.device_count() > 1:
        other = ids(0, device="npu:1")
        with pytest.raises(ValueError, match="must be on that of the pools"):
            swap(src, dst, other, other)
    swap([], [], ids(0), ids(0))
    swap(src, dst, ids(), ids())


# Graphs


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_replay_copies_the_blocks_of_that_replay(direction: str) -> None:
    graph = Swap(direction)
    for src, dst in (([1], [2]), ([3, 4, 5, 6], [9, 8, 7, 6]), ([], []), ([0, 15], [15, 0])):
        graph.check_replay(src, dst)


def test_the_traffic_of_a_replay_is_its_blocks_and_the_ids(sim: ModuleType) -> None:
    graph = Swap("h2d", pairs=6)
    for src, dst in (([1, 2, 3], [4, 5, 6]), ([7], [8]), ([], [])):
        graph.replay(src, dst)
        torch.npu.synchronize()
        sim.reset_stats()
        graph.graph.replay()
        torch.npu.synchronize()
        stats = sim.stats()
        assert stats.bytes["h2d"] == len(src) * 2 * graph.src[0][0].nbytes
        assert stats.bytes["d2h"] == 2 * 6 * 8
        assert stats.bytes["d2d"] == stats.bytes["h2h"] == 0
        assert stats.copies["h2d"] == (2 if src else 0)  # neighbours are merged
        assert stats.calls["aclmdlRIExecuteAsync"] == 1


def test_a_thousand_replays_may_be_queued() -> None:
    graph = Swap("d2h")
    wanted = expected_content(graph.src, graph.dst, [1, 2], [3, 4])
    graph.replay([1, 2], [3, 4])
    for _ in range(1000):
        graph.graph.replay()
    torch.npu.synchronize()
    assert_same(content(graph.dst), wanted)


def test_ids_change_between_replays_without_a_synchronise() -> None:
    graph = Swap("h2d", pairs=1)
    graph.src[0][:] = torch.arange(BLOCKS)[:, None]
    seen = torch.zeros(200, device="npu")
    rounds = torch.randint(0, BLOCKS, (200,))
    on_device = rounds.npu()
    graph.dst_ids.fill_(0)
    for i in range(200):
        graph.src_ids.copy_(on_device[i : i + 1])
        graph.graph.replay()
        seen[i] = graph.dst[0][0, 0]
    assert seen.cpu().tolist() == rounds.tolist()


def test_a_load_is_complete_before_what_reads_it_and_a_store_before_what_overwrites_it() -> None:
    src, device = numbers(1)
    out = [torch.zeros(BLOCKS, 8).pin_memory()]
    a, b = ids(3), ids(5)
    graph = torch.npu.NPUGraph()
    with capture(graph):
        swap(src, device, a, b)
        doubled = device[0] * 2
        swap(device, out, b, a)
        device[0].zero_()
        swap(src, device, b, a)
        after = device[0].clone()
    for x, y in ((3, 5), (0, 1), (15, 2)):
        a.fill_(x)
        b.fill_(y)
        device[0].fill_(7)
        graph.replay()
        torch.npu.synchronize()
        wanted = torch.full_like(src[0], 7)
        wanted[y] = src[0][x]
        assert torch.equal(doubled.cpu(), wanted * 2)
        assert torch.equal(out[0][x], src[0][x])
        cleared = torch.zeros_like(src[0])
        cleared[x] = src[0][y]
        assert torch.equal(after.cpu(), cleared)


def test_jobs_of_a_backend_and_replays_share_pools() -> None:
    """Each job is submitted before the replay that shares its blocks; nothing else orders them."""
    host, device = numbers(1)
    backend = NPUDmaCopyBackend()
    backend.init({"layer": device[0]}, {"layer": host[0]}, torch.device("npu:0"), None, None)
    a, b = torch.full((4,), -1, device="npu"), torch.full((4,), -1, device="npu")
    graph = torch.npu.NPUGraph()
    with capture(graph):
        swap(host, device, a, b)
        total = device[0].sum(1)
    want_host, want_device = host[0].clone(), device[0].cpu()
    random = torch.Generator().manual_seed(3)
    for job in range(40):
        out_of, into = (torch.randperm(BLOCKS, generator=random)[:6].tolist() for _ in range(2))
        backend.launch_copy(out_of, into, True, job, [])
        want_host[into] = want_device[out_of]
        src, dst = (torch.randperm(BLOCKS, generator=random)[:4] for _ in range(2))
        a.copy_(src)
        b.copy_(dst)
        graph.replay()
        want_device[dst] = want_host[src]
        torch.npu.synchronize()  # or the next job could come before this replay
        assert torch.equal(device[0].cpu(), want_device)
        torch.testing.assert_close(total.cpu(), want_device.sum(1))
    backend.synchronize()
    assert torch.equal(device[0].cpu(), want_device)
    assert torch.equal(host[0], want_host)
    backend.shutdown()


def test_swaps_on_two_captured_streams() -> None:
    host, device = numbers(2)
    a, b = ids(1, 2), ids(3, 4)
    side = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with capture(graph):
        main = torch.npu.current_stream()
        swap(host[:1], device[:1], a, b)
        side.wait_stream(main)
        with torch.npu.stream(side):
            swap(host[1:], device[1:], b, a)
            second = device[1] * 2
        first = device[0] * 2
        main.wait_stream(side)
        total = first + second
    for x, y in (((1, 2), (3, 4)), ((9, 0), (0, 9)), ((5, -1), (6, -1))):
        a.copy_(torch.tensor(x))
        b.copy_(torch.tensor(y))
        real = [(p, q) for p, q in zip(x, y) if p >= 0]
        want0, want1 = device[0].cpu(), device[1].cpu()
        for p, q in real:
            want0[q] = host[0][p]
            want1[p] = host[1][q]
        graph.replay()
        torch.npu.synchronize()
        assert torch.equal(device[0].cpu(), want0)
        assert torch.equal(device[1].cpu(), want1)
        assert torch.equal(total.cpu(), want0 * 2 + want1 * 2)


def test_a_graph_may_be_captured_on_another_thread() -> None:
    made: list[Swap] = []
    thread = threading.Thread(target=lambda: made.append(Swap("h2d")))
    thread.start()
    thread.join()
    made[0].check_replay([1, 2], [3, 4])


@pytest.mark.skipif(torch.npu.device_count() < 2, reason="one NPU")
def test_each_device_has_its_own_graphs() -> None:
    with torch.npu.device(1):
        second = Swap("h2d", device="npu:1")
    first = Swap("h2d")
    for _ in range(3):
        first.check_replay([1, 2], [3, 4])
        with torch.npu.device(1):
            second.check_replay([5, 6], [7, 8])
            torch.npu.synchronize()
    second.src_ids.fill_(99)
    second.dst_ids.fill_(0)
    with torch.npu.device(1):
        second.graph.replay()
        torch.npu.synchronize()
    first.check_replay([2], [1])
    swap(first.src, first.dst, ids(0), ids(0))  # the error is not this device's
    with pytest.raises(TransferError, match=r"npu:1, call 1 of its graph"):
        ops.raise_pending_errors()


# Errors at a replay


def test_a_bad_id_in_one_replay_of_many() -> None:
    graph = Swap("h2d")
    for replay in range(1, 61):
        if replay != 57:
            graph.check_replay([replay % BLOCKS], [(replay + 3) % BLOCKS])
            continue
        before = content(graph.dst)
        graph.replay([3, 99], [4, 5])
        torch.npu.synchronize()
        assert_same(content(graph.dst), before)
        message = (
            r"host to device on npu:0, call 1 of its graph, replay 57: src_blocks\[1\] is 99.* 16 "
        )
        with pytest.raises(TransferError, match=message):
            swap(graph.src, graph.dst, ids(0, device="cpu"), ids(0, device="cpu"))


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_copy_that_fails_in_one_replay(sim: ModuleType, direction: str) -> None:
    graph = Swap(direction)
    graph.check_replay([1], [2])
    sim.fail_call("aclrtMemcpyBatchAsync", code=507013)
    graph.replay([3], [4])
    torch.npu.synchronize()
    with pytest.raises(TransferError, match=r"replay 2: aclrtMemcpyBatchAsync failed.*507013"):
        ops.raise_pending_errors()
    graph.check_replay([3], [4])


# What a capture refuses


def test_a_capture_refuses_what_would_be_frozen() -> None:
    src, dst = pools("h2d")
    address = ids(src[0].data_ptr(), device="cpu"), ids(dst[0].data_ptr(), device="cpu")
    size = ids(src[0][0].nbytes, device="cpu")
    pageable = [make_pool(BLOCKS)] * 2
    a, b = ids(4), ids(5)
    before = content(dst)
    graph = torch.npu.NPUGraph()
    with capture(graph):
        with pytest.raises(RuntimeError, match="as NPU tensors, which are read at every replay"):
            swap(src, dst, ids(0, device="cpu"), ids(0, device="cpu"))
        with pytest.raises(RuntimeError, match="pointers_in_graphs"):
            swap(*address, size, 0)
        with pytest.raises(RuntimeError, match=r"src\[0\] is in page-able host memory"):
            swap(pageable, dst, a, b)
        swap(src, dst, a, b)  # the capture has survived
    assert_same(content(dst), before)
    wanted = expected_content(src, dst, [4], [5])
    graph.replay()
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


def test_pointers_are_captured_where_that_is_asked_for() -> None:
    src, dst = pools("h2d", 1)
    size = src[0][0].nbytes
    address = ids(src[0][3].data_ptr(), device="cpu"), ids(dst[0][5].data_ptr(), device="cpu")
    wanted = expected_content(src, dst, [3], [5])
    graph = torch.npu.NPUGraph()
    with capture(graph), ops.pointers_in_graphs():
        swap(*address, ids(size, device="cpu"), 0)
    graph.replay()
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


def test_a_call_that_cannot_be_recorded_ends_the_capture(sim: ModuleType) -> None:
    src, dst = pools("h2d")
    a, b = ids(4), ids(5)
    stream = torch.npu.Stream()
    for function, code in (("aclrtLaunchHostFunc", 507000), ("aclrtMemcpyAsync", 507899)):
        torch.npu.synchronize()
        sim.fail_call(function, code=code)
        refused = pytest.raises(TransferError, match=rf"cannot be captured: {function} failed")
        with refused, capture(torch.npu.NPUGraph(), stream):
            swap(src, dst, a, b)
    graph = torch.npu.NPUGraph()
    with capture(graph, stream):  # the stream is usable
        swap(src, dst, a, b)
    wanted = expected_content(src, dst, [4], [5])
    graph.replay()
    torch.npu.synchronize()
    assert_same(content(dst), wanted)


def test_the_copies_that_a_graph_records_itself_are_limited(run_script: RunScript) -> None:
    done = run_script(
        """
        import torch, npu_kv_ops.ops
        from npu_kv_ops import simulator

        simulator.configure(graph_copies=8)
        src, dst = torch.ones(40, 8).pin_memory(), torch.zeros(40, 8, device="npu")
        swap = torch.ops.npu_kv.swap_blocks_batch
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            swap.static([src], [dst], [0, 2, 4, 6, 8, 10], [0, 2, 4, 6, 8, 10])
            try:
                swap.static([src], [dst], [20, 22, 24], [20, 22, 24])
            except RuntimeError as error:
                print(error)
            swap.static([src], [dst], [30, 32], [30, 32])
        graph.replay()
        torch.npu.synchronize()
        print([i for i, row in enumerate(dst.sum(1).tolist()) if row])
        """,
        env={"NPU_KV_MAX_GRAPH_COPIES": "8"},
    )
    assert "at most 8 copies host to device; 6 are captured and this call adds 3" in done.stdout
    assert "Pass the ids as NPU tensors" in done.stdout
    assert "[0, 2, 4, 6, 8, 10, 30, 32]" in done.stdout


# Lifetime


def test_captures_and_deletions_leave_nothing_behind(sim: ModuleType) -> None:
    stream = torch.npu.Stream()
    Swap("h2d", stream=stream).check_replay([1], [2])
    gc.collect()
    assert eventually(lambda: ops.live_graphs() == 0)
    torch.npu.synchronize()
    torch.npu.empty_cache()
    src, dst = pools("h2d")
    a, b = ids(1), ids(2)
    torch.npu.synchronize()

    def one() -> None:
        graph = torch.npu.NPUGraph()
        with capture(graph, stream):
            swap(src, dst, a, b)
            swap.static(src, dst, [3], [4])
        graph.replay()
        graph.reset()

    one()
    assert eventually(lambda: ops.live_graphs() == 0)
    torch.npu.synchronize()
    before = sim.stats().live
    for _ in range(1000):
        one()
    torch.npu.synchronize()

    def as_before() -> bool:
        live = sim.stats().live
        return all(live[key] <= before[key] for key in ("pinned_bytes", "threads", "graphs"))

    assert eventually(as_before), (before, sim.stats().live)
    assert sim.stats().live["events"] <= before["events"] + 4
    assert ops.live_graphs() == 0


def test_pools_may_be_deleted_while_their_graph_lives() -> None:
    gc.collect()
    graph = Swap("h2d")
    probe = torch.npu.NPUGraph()
    static_src, static_dst = pools("h2d", 1)
    with capture(probe):
        swap.static(static_src, static_dst, [1], [2])
    graph.check_replay([1], [2])
    wanted = expected_content(static_src, static_dst, [1], [2])
    address = static_dst[0].data_ptr()
    del static_src, static_dst, graph.src, graph.dst
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.host_empty_cache()
    fill = [make_pool(BLOCKS, seed=i, device="npu") for i in range(8)]
    kept = content(fill)
    graph.replay([3, 4], [5, 6])
    probe.replay()
    torch.npu.synchronize()
    assert_same(content(fill), kept)  # the graph has not written into what came after
    assert all(tensor.data_ptr() != address for tensor in fill)
    assert wanted
    graph.graph.reset()
    probe.reset()
    assert eventually(lambda: ops.live_graphs() == 0)


def test_slots_can_be_released_by_hand() -> None:
    graph = Swap("h2d")
    graph.check_replay([1], [2])
    assert ops.live_graphs() >= 1
    assert ops.release_graphs(0) >= 1
    assert eventually(lambda: ops.live_graphs() == 0)
    graph.graph.reset()


# Other runtimes and settings, in processes of their own

REPLAYS = """
import torch, npu_kv_ops
from npu_kv_ops import ops

swap = torch.ops.npu_kv.swap_blocks_batch
src = torch.arange(16.0)[:, None].repeat(1, 8).pin_memory()
dst = torch.zeros(16, 8, device="npu")

def run():
    a, b = torch.tensor([1], device="npu"), torch.tensor([2], device="npu")
    swap([src], [dst], a, b)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        swap([src], [dst], a, b)
    for i in range(20):
        a.fill_(i % 16)
        b.fill_(3 * i % 16)
        graph.replay()
        torch.npu.synchronize()
        assert dst[3 * i % 16, 0].item() == i % 16, i
    ops.raise_pending_errors()
    print("replayed")
"""


@pytest.mark.parametrize(
    "missing",
    [
        "aclrtLaunchHostFunc",
        "aclrtValueWait",
        "aclrtLaunchHostFunc,aclrtValueWrite",
        "aclmdlRIDestroyRegisterCallback",
    ],
)
def test_a_runtime_that_lacks_one_way_has_another(run_script: RunScript, missing: str) -> None:
    done = run_script(REPLAYS + "run()", env={"NPU_KV_SIM_WITHOUT": missing})
    assert "replayed" in done.stdout


def test_a_runtime_that_lacks_every_way_says_so(run_script: RunScript) -> None:
    done = run_script(
        REPLAYS
        + """
try:
    run()
except npu_kv_ops.TransferError as error:
    print(error)
swap([src], [dst], torch.tensor([1]), torch.tensor([2]))
torch.npu.synchronize()
print("CPU ids work")
""",
        env={"NPU_KV_SIM_WITHOUT": "aclrtLaunchHostFunc,aclrtLaunchCallback"},
    )
    assert "neither aclrtLaunchHostFunc nor aclrtLaunchCallback" in done.stdout
    assert "CPU ids work" in done.stdout


@pytest.mark.parametrize("level", ["0", "1"])
def test_task_queue_levels(run_script: RunScript, level: str) -> None:
    done = run_script(REPLAYS + "run()", env={"TASK_QUEUE_ENABLE": level})
    assert "replayed" in done.stdout


def test_task_queue_level_2_has_no_captures_but_eager_calls(run_script: RunScript) -> None:
    done = run_script(
        REPLAYS
        + """
try:
    run()
except RuntimeError as error:
    print("capture:", error)
a, b = torch.tensor([7], device="npu"), torch.tensor([9], device="npu")
swap([src], [dst], a, b)
torch.npu.synchronize()
print("eager:", dst[9, 0].item())
""",
        env={"TASK_QUEUE_ENABLE": "2"},
    )
    assert "capture:" in done.stdout
    assert "eager: 7.0" in done.stdout


def test_after_shutdown_nothing_hangs(run_script: RunScript) -> None:
    done = run_script(
        REPLAYS
        + """
a, b = torch.tensor([1], device="npu"), torch.tensor([2], device="npu")
swap([src], [dst], a, b)
torch.npu.synchronize()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    swap([src], [dst], a, b)
ops.shutdown()
a.fill_(5)
graph.replay()
torch.npu.synchronize()
print("row:", dst[2, 0].item())
for call in (ops.raise_pending_errors, lambda: swap([src], [dst], a, b)):
    try:
        call()
    except npu_kv_ops.TransferError as error:
        print(error)
""",
    )
    assert "row: 1.0" in done.stdout
    assert done.stdout.count("npu_kv_ops was shut down") == 2
