"""One rank, step by step: order, flush, failure, the order of vLLM's calls, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
from worker_pools import Layout, Memory, Part, Rank, config_of, eventually, rank_on, typed

from npu_kv_ops import pinned_memory
from npu_kv_ops.integrations.offload import worker as worker_module
from npu_kv_ops.integrations.offload.metrics import OffloadStats
from npu_kv_ops.integrations.vllm import NpuKVOffloadWorker

N = 8
HOST = 10
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16)
BLOCK_BYTES = SPEC.page_size_bytes
DEVICES = pytest.mark.parametrize("device", ["cpu", "npu:0"])


def one_layer(device: str, groups: int = 1) -> Layout:
    """K and V of one layer; with two groups that take turns in using the blocks."""
    memory = Memory(device)
    half = BLOCK_BYTES // 2
    pair = tuple(typed(memory.allocate(N * half), 0, (N, 16, 2, 8), torch.float16) for _ in "kv")
    names = [f"l{group}" for group in range(groups)]
    config = config_of(N, [([name], SPEC) for name in names], N * BLOCK_BYTES)
    return Layout(
        memory, dict.fromkeys(names, pair), config, [Part(t) for t in pair], 2, BLOCK_BYTES
    )


class Pool:
    """A rank, and its pools as bytes."""

    def __init__(self, device: str, groups: int = 1) -> None:
        self.layout = one_layer(device, groups)
        self.rank: Rank = rank_on(self.layout, host_blocks=HOST)
        self.worker = self.rank.worker
        self.memory = self.layout.memory
        for pool in self.worker.cpu_kv_caches.values():
            pool.zero_()

    def fill_device(self, seed: int) -> list[torch.Tensor]:
        return [content.view(N, -1) for content in self.memory.fill(seed)]

    def device(self) -> list[torch.Tensor]:
        return [content.view(N, -1) for content in self.memory.read()]

    def host(self) -> list[torch.Tensor]:
        return [pool.clone() for pool in self.worker.cpu_kv_caches.values()]

    def lanes(self) -> tuple[int, int]:
        return self.worker._backend._core.stream_handles()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(getattr(request, "param", "npu:0"))
    yield made
    made.worker.shutdown()


ON_BOTH = pytest.mark.parametrize("pool", ["cpu", "npu:0"], indirect=True)


def rows_equal(a: list[torch.Tensor], rows_a: list[int], b: list[torch.Tensor], rows_b: list[int]):
    return all(torch.equal(x[rows_a], y[rows_b]) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------- order


def test_a_store_reads_what_the_step_has_computed(pool: Pool, sim: ModuleType) -> None:
    old = pool.fill_device(1)
    new = [torch.full_like(content, 7) for content in old]
    source = [content.npu() for content in new]
    compute = torch.npu.Stream()
    torch.npu.synchronize()
    with sim.check_races():
        with torch.npu.stream(compute), sim.stall(compute.npu_stream):
            for buffer, values in zip(pool.memory.buffers, source):
                buffer.copy_(values.flatten(), non_blocking=True)  # the step, which takes its time
            pool.rank.step(store=([2, 5], [1, 9]))
            assert not pool.rank.completed
        pool.rank.drain()
        torch.npu.synchronize()
    assert rows_equal(pool.host(), [1, 9], new, [2, 5])


def test_a_load_does_not_overwrite_what_the_step_still_reads(pool: Pool, sim: ModuleType) -> None:
    saved = pool.fill_device(1)
    pool.rank.store([3], [4])
    old = pool.fill_device(2)
    seen = [torch.empty_like(buffer) for buffer in pool.memory.buffers]
    compute = torch.npu.Stream()
    torch.npu.synchronize()
    with sim.check_races():
        with torch.npu.stream(compute), sim.stall(compute.npu_stream):
            for copy, buffer in zip(seen, pool.memory.buffers):
                copy.copy_(buffer, non_blocking=True)  # an earlier step, which reads the block
            pool.rank.step(load=([6], [4]))
            assert not pool.rank.received
        pool.rank.drain()
        torch.npu.synchronize()
    assert rows_equal([s.cpu().view(N, -1) for s in seen], list(range(N)), old, list(range(N)))
    assert rows_equal(pool.device(), [6], saved, [3])


def test_a_load_is_not_held_up_by_a_store(pool: Pool, sim: ModuleType) -> None:
    saved = pool.fill_device(1)
    pool.rank.store([3], [4])
    _, stores = pool.lanes()
    with sim.stall(stores):
        pool.rank.step(store=([1, 2], [7, 8]), load=([6], [4]))
        assert eventually(lambda: bool(pool.rank.step() or pool.rank.received))
        assert pool.rank.completed == {0}
        assert rows_equal(pool.device(), [6], saved, [3])
    pool.rank.drain()


@ON_BOTH
def test_transfers_are_reported_in_order_and_once(pool: Pool) -> None:
    pool.fill_device(1)
    for turn in range(40):
        pool.rank.step(
            store=([turn % 7 + 1], [turn % 9 + 1]),
            load=([(turn + 3) % 7 + 1], [(turn + 4) % 9 + 1]),
            requests=[f"r{turn}", f"s{turn}"],
        )
    pool.rank.drain()  # Rank asserts that nothing is reported twice
    assert pool.rank.completed == set(range(40))
    assert pool.rank.received == {f"{kind}{turn}" for kind in "rs" for turn in range(40)}


# ---------------------------------------------------------------------------------------- flush


def test_a_preemption_waits_for_everything_launched(pool: Pool, sim: ModuleType) -> None:
    pool.fill_device(1)
    order: list[str] = []
    waiting = threading.Event()
    backend = pool.worker._backend
    synchronize = backend.synchronize

    def watched(timeout: float | None = None) -> None:
        waiting.set()
        synchronize(timeout)

    backend.synchronize = watched  # type: ignore[method-assign]

    def flush() -> None:
        pool.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
        order.append("flushed")

    with ExitStack() as stalls:
        for handle in pool.lanes():
            stalls.enter_context(sim.stall(handle))
        for turn in range(3):  # the later ones are still queued in the backend
            pool.rank.step(store=([turn + 1], [turn + 1]), load=([turn + 4], [turn + 6]))
        thread = threading.Thread(target=flush)
        thread.start()
        assert waiting.wait(60)
        order.append("released")
    thread.join(60)
    assert order == ["released", "flushed"]
    pool.rank.poll_all_at_once()
    assert pool.rank.completed == {0, 1, 2}


def test_a_flush_goes_on_waiting_and_says_so(
    pool: Pool, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_FLUSH_WARNING_S", 0.01)
    pool.fill_device(1)
    stall = sim.stall(pool.lanes()[1])
    warnings: list[str] = []

    def warned(text: str, *values: Any) -> None:
        warnings.append(text % values)
        stall.release()

    monkeypatch.setattr(worker_module.logger, "warning", warned)
    pool.rank.step(store=([1], [1]))
    pool.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))
    assert len(warnings) >= 1
    assert "still waiting" in warnings[0]
    pool.rank.poll_all_at_once()
    assert pool.rank.completed == {0}


def test_a_step_without_preemption_does_not_wait(pool: Pool, sim: ModuleType) -> None:
    with sim.stall(pool.lanes()[1]):
        pool.rank.step(store=([1], [1]))
        pool.worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=False))
        pool.rank.step()
        assert not pool.rank.completed
    pool.rank.drain()


def test_a_preemption_before_anything_is_registered() -> None:
    worker = NpuKVOffloadWorker(None, one_layer("cpu").config, BLOCK_BYTES)
    worker.handle_preemptions(SimpleCPUOffloadMetadata(need_flush=True))


# ----------------------------------------------------------------------------------------- counts


def test_the_queue_of_one_rank_does_not_hide_behind_the_end_of_another(sim: ModuleType) -> None:
    """Ranks are asked in the same step, and the last payload sets the gauge."""
    depth = "vllm:npu_kv_offload_queue_depth"
    one, two = Pool("npu:0"), Pool("npu:0")

    def step(**transfers: Any) -> dict[str, Any]:
        total = OffloadStats()
        for pool in (one, two):
            pool.rank.step(**transfers)
            if (counts := pool.worker.take_counts()) is not None:
                total.aggregate(OffloadStats.of_worker(counts))
        return total.reduce()

    with sim.stall(one.lanes()[1]):
        step(store=([1], [1]))
        two.rank.drain()
        # The second rank reports its end, the first that nothing has changed.
        assert step()[depth] == 1
        assert step()[depth] == 1
    one.rank.drain()
    assert step()[depth] == 0
    assert depth not in step()
    for pool in (one, two):
        pool.worker.shutdown()


# -------------------------------------------------------------------------------------- failure


@ON_BOTH
@pytest.mark.parametrize("wrong", [([1, N], [1, 2]), ([1, 2], [1, HOST])], ids=["device", "host"])
def test_ids_beyond_a_pool_fail_the_transfer_before_anything_is_copied(
    pool: Pool, wrong: tuple[list[int], list[int]]
) -> None:
    device, host = pool.fill_device(1), pool.host()
    pool.rank.step(store=wrong, load=wrong, requests=["wrong"])
    pool.rank.drain()
    assert rows_equal(pool.device(), list(range(N)), device, list(range(N)))
    assert rows_equal(pool.host(), list(range(HOST)), host, list(range(HOST)))
    assert pool.rank.failed_stores == {0}
    assert pool.rank.received == {"wrong"}
    assert pool.rank.load_errors == set(wrong[0])
    assert pool.rank.failed_host_blocks == set(wrong[1])
    pool.rank.store([3], [4])  # the next ones are not affected
    assert pool.rank.failed_stores == {0}
    assert rows_equal(pool.host(), [4], device, [3])


def test_a_failed_load_names_its_blocks(pool: Pool, sim: ModuleType) -> None:
    pool.fill_device(1)
    sim.fail_call("aclrtMemcpyBatchAsync", nth=1, code=507899)
    pool.rank.step(load=([6, 2], [4, 5]), requests=["a", "b"])
    pool.rank.drain()
    assert pool.rank.received == {"a", "b"}, "a failed load has to be received as well"
    assert pool.rank.load_errors == {6, 2}
    assert pool.rank.failed_host_blocks == {4, 5}
    assert not pool.rank.failed_requests
    assert pool.worker.take_load_errors() == set(), "errors are reported once"


def test_a_failed_load_with_two_groups_names_its_requests(sim: ModuleType) -> None:
    """vLLM refuses block ids then, as they are only unique within a group."""
    pool = Pool("npu:0", groups=2)
    sim.fail_call("aclrtMemcpyBatchAsync", nth=1, code=507899)
    pool.rank.step(load=([6, 2], [4, 5]), requests=["a", "b"])
    pool.rank.drain()
    assert pool.rank.received == pool.rank.failed_requests == {"a", "b"}
    assert not pool.rank.load_errors
    assert pool.rank.failed_host_blocks == {4, 5}
    pool.worker.shutdown()


def test_a_copy_that_fails_on_the_device(pool: Pool, sim: ModuleType) -> None:
    pool.fill_device(1)
    sim.fail_copy(nth=1)
    pool.rank.step(store=([1], [1]))
    pool.rank.drain()
    assert pool.rank.failed_stores == {0}
    sim.clear_faults()


def test_a_backend_that_takes_nothing_more_fails_transfers(pool: Pool) -> None:
    pool.worker._backend.shutdown()
    pool.rank.step(load=([6], [4]), store=([1], [1]), requests=["a"])
    pool.rank.drain()
    assert pool.rank.received == {"a"}
    assert pool.rank.load_errors == {6}
    assert pool.rank.failed_stores == {0}


# -------------------------------------------------------------------------- vLLM's order of calls


def steps_of(pool: Pool) -> Any:
    meta = SimpleCPUOffloadMetadata(
        load_event=0,
        load_gpu_blocks=[6],
        load_cpu_blocks=[4],
        load_event_to_reqs={0: ["a"]},
        store_event=0,
        store_gpu_blocks=[1],
        store_cpu_blocks=[1],
    )
    pool.worker.bind_connector_metadata(meta)
    return meta


def launched(pool: Pool) -> tuple[int, int]:
    """Loads and stores that the backend was given."""
    stats = pool.worker._backend.stats()
    return tuple(
        lane.jobs + lane.failures + lane.queued + lane.in_flight
        for lane in (stats.loads, stats.stores)
    )


@ON_BOTH
def test_a_step_launches_its_transfers_once(pool: Pool) -> None:
    steps_of(pool)
    pool.worker.start_load_kv()
    assert launched(pool) == (1, 0)
    pool.worker.wait_for_save()
    pool.worker.start_load_kv()
    pool.worker.wait_for_save()
    pool.worker.get_finished(set())
    assert launched(pool) == (1, 1)


@ON_BOTH
def test_stores_wait_for_the_drafter(pool: Pool) -> None:
    """With speculative decoding vLLM asks for results before it lets stores be launched."""
    steps_of(pool)
    pool.worker.start_load_kv()
    pool.worker.get_finished(set())
    assert launched(pool) == (1, 0)
    pool.worker.wait_for_save()
    pool.worker.clear_connector_metadata()
    assert launched(pool) == (1, 1)


@ON_BOTH
def test_a_connector_that_only_asks_for_results(pool: Pool) -> None:
    """As vLLM's did before 0.32."""
    meta = steps_of(pool)
    pool.worker.get_finished(set())
    assert launched(pool) == (1, 1)
    pool.worker.clear_connector_metadata()
    pool.worker.bind_connector_metadata(meta)  # offered again
    pool.worker.get_finished(set())
    assert launched(pool) == (1, 1)


@ON_BOTH
def test_results_are_kept_while_no_step_is_bound(pool: Pool) -> None:
    steps_of(pool)
    pool.worker.start_load_kv()
    pool.worker.wait_for_save()
    pool.worker.clear_connector_metadata()
    pool.worker._backend.synchronize(60)
    assert pool.worker.get_finished(set()) == (None, None), "nobody says whose load it is"
    assert pool.worker.build_connector_worker_meta().completed_store_events == {0: 1}
    pool.worker.bind_connector_metadata(SimpleCPUOffloadMetadata(load_event_to_reqs={0: ["a"]}))
    assert pool.worker.get_finished(set()) == (None, {"a"})


@ON_BOTH
def test_a_load_without_blocks_is_received(pool: Pool) -> None:
    pool.rank.step(load=([], []), requests=["a"])
    pool.rank.drain()
    assert pool.rank.received == {"a"}
    assert not pool.rank.load_errors


def test_a_rank_without_caches_reports_all_the_same() -> None:
    """A pipeline stage without attention: the scheduler waits for a report of every rank."""
    worker = NpuKVOffloadWorker(None, config_of(N, [([], SPEC)], N * BLOCK_BYTES), BLOCK_BYTES)
    worker.register_kv_caches({})
    rank = Rank(worker)
    rank.step(load=([6], [4]), store=([1], [1]), requests=["a"], flush=True)
    assert rank.received == {"a"}
    assert rank.completed == {0}
    assert not rank.failed_stores
    worker.shutdown()


# ------------------------------------------------------------------------------ pools, and the end


@DEVICES
def test_the_host_pool_has_the_configured_bytes(device: str) -> None:
    layout = one_layer(device)
    worker = NpuKVOffloadWorker(None, layout.config, 5 * BLOCK_BYTES + BLOCK_BYTES - 1)
    worker.register_kv_caches(layout.caches)
    assert worker.num_cpu_blocks == 5
    assert sum(pool.untyped_storage().nbytes() for pool in worker.cpu_kv_caches.values()) == (
        5 * BLOCK_BYTES
    )
    with pytest.raises(RuntimeError, match="registered already"):
        worker.register_kv_caches(layout.caches)
    worker.shutdown()
    assert pinned_memory.pinned_bytes() == 0


def test_less_than_a_block_is_refused() -> None:
    layout = one_layer("npu:0")
    worker = NpuKVOffloadWorker(None, layout.config, BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match=r"1023 bytes for this rank.*has 1024.*2048 bytes"):
        worker.register_kv_caches(layout.caches)
    worker.shutdown()


def test_more_than_the_host_has_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = one_layer("npu:0")
    monkeypatch.setattr(pinned_memory, "_free_bytes", lambda: 5000)
    with pytest.raises(MemoryError, match=r"6000 bytes.*5000 bytes free.*to 5000 or less"):
        NpuKVOffloadWorker(None, layout.config, 6000)
    worker = NpuKVOffloadWorker(None, layout.config, 5000)
    monkeypatch.setattr(pinned_memory, "_free_bytes", lambda: 3000)  # taken in the meantime
    with pytest.raises(MemoryError, match=r"cpu_bytes_to_use: 5000 bytes.*enough for 2 blocks"):
        worker.register_kv_caches(layout.caches)
    assert pinned_memory.pinned_bytes() == 0
    worker.shutdown()


def test_a_shutdown_before_anything_is_registered() -> None:
    worker = NpuKVOffloadWorker(None, one_layer("cpu").config, BLOCK_BYTES)
    worker.register_kv_caches({})
    worker.shutdown()
    worker.shutdown()


def alive(sim: ModuleType) -> tuple[int, int]:
    with open("/proc/self/status", encoding="ascii") as status:
        threads = next(int(line.split()[1]) for line in status if line.startswith("Threads"))
    return threads, sim.stats().live["pinned_bytes"]


def test_a_shutdown_ends_the_thread_and_frees_the_pool(sim: ModuleType) -> None:
    warm = Pool("npu:0")  # torch_npu's own threads and streams
    warm.rank.store([1], [1])
    warm.worker.shutdown()
    del warm
    torch.npu.synchronize()
    before = alive(sim)
    pool = Pool("npu:0")
    pool.rank.store([1], [1])
    pool.rank.step(store=([2], [2]), load=([3], [1]))  # in flight, and never reported
    assert alive(sim) != before
    pool.worker.shutdown()
    pool.worker.shutdown()
    assert eventually(lambda: alive(sim) == before), f"{alive(sim)} after {before}"
    with pytest.raises(RuntimeError, match="shut down"):
        pool.rank.step(store=([2], [2]))


def test_a_shutdown_waits_for_transfers(pool: Pool, sim: ModuleType) -> None:
    content = pool.fill_device(1)
    host = list(pool.worker.cpu_kv_caches.values())
    stall = sim.stall(pool.lanes()[1])
    pool.rank.step(store=([2, 5], [1, 9]))
    order: list[str] = []
    waiting = threading.Event()
    backend_shutdown = pool.worker._backend.shutdown

    def watched(timeout: float | None = None) -> None:
        waiting.set()
        backend_shutdown(timeout)
        order.append("ended")

    pool.worker._backend.shutdown = watched  # type: ignore[method-assign]
    thread = threading.Thread(target=pool.worker.shutdown)
    thread.start()
    assert waiting.wait(60)
    order.append("released")
    stall.release()
    thread.join(60)
    assert order == ["released", "ended"]
    assert rows_equal(host, [1, 9], content, [2, 5])


def test_a_shutdown_leaves_the_pool_to_a_device_that_does_not_answer(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_SHUTDOWN_TIMEOUT_S", 0.01)
    pool = Pool("npu:0")
    with sim.stall(pool.lanes()[1]):
        pool.rank.step(store=([2], [1]))
        pool.worker.shutdown()
        assert pool.worker.cpu_kv_caches is not None
    monkeypatch.undo()
    pool.worker.shutdown()
    assert pool.worker.cpu_kv_caches is None
    assert pinned_memory.pinned_bytes() == 0
