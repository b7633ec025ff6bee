"""The copy backend between host pools: its rules, without an NPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from backend_pools import WAIT_S, Events, Pools, backend_on, load, store

from npu_kv_ops import NPUDmaCopyBackend, TransferEvent


@pytest.fixture
def pools() -> Pools:
    return Pools("cpu")


@pytest.mark.parametrize(
    "ids",
    [
        list,
        tuple,
        torch.tensor,
        lambda x: torch.tensor(x, dtype=torch.int32),
        np.array,
        lambda x: np.array(x, dtype=np.int32),
        lambda x: torch.tensor([[i, 0] for i in x])[:, 0],  # not contiguous
    ],
)
def test_every_kind_of_ids(pools: Pools, ids: Any) -> None:
    with backend_on(pools) as backend:
        src, dst = [3, 4, -1, 7], [5, 6, 1, 0]
        store(backend, ids(src), ids(dst))
        pools.apply(src, dst, True)
        backend.synchronize(WAIT_S)
        pools.check()


def test_the_event_is_listed_before_the_call_returns_and_flushing_the_list_is_enough(
    pools: Pools,
) -> None:
    events: Events = []
    with backend_on(pools) as backend:
        for index in range(50):
            src, dst = [index % 12], [(index * 3) % 20]
            backend.launch_copy(src, dst, True, index, events)
            assert [i for i, _ in events] == list(range(index + 1))
            assert isinstance(events[-1][1], TransferEvent)
            pools.apply(src, dst, True)
        for _, event in events:
            event.synchronize(WAIT_S)
            assert event.query()
        pools.check()


def test_stats_count_what_was_done(pools: Pools) -> None:
    with backend_on(pools) as backend:
        store(backend, [1, 2, 3, 7], [4, 5, 6, 1])
        load(backend, [4], [0])
        load(backend, [], [])
        backend.synchronize(WAIT_S)
        stats = backend.stats()
        block = pools.npu[0][0].numel() * pools.npu[0].element_size()
        assert (stats.stores.jobs, stats.loads.jobs) == (1, 2)
        assert (stats.stores.copies_before, stats.stores.copies_after) == (12, 6)
        assert (stats.stores.bytes, stats.loads.bytes) == (12 * block, 3 * block)
        assert stats.queue_depth == stats.failures == 0
        assert stats.stores.launch_us_p50 > 0
        assert stats.stores.completion_us_p99 >= stats.stores.completion_us_p50 > 0
    assert backend.stats() == stats  # readable after shutdown


def test_a_graph_is_a_job_like_any_other(pools: Pools) -> None:
    with backend_on(pools) as backend:
        graph = backend.capture([1, 5], [2, 3], True)
        assert (len(graph), graph.is_store) == (2, True)
        events: Events = []
        for index in range(3):
            load(backend, [index], [1])
            pools.apply([index], [1], False)
            backend.launch_graph(graph, index, events)
            pools.apply([1, 5], [2, 3], True)
        assert [index for index, _ in events] == [0, 1, 2]
        backend.synchronize(WAIT_S)
        pools.check()
        other = NPUDmaCopyBackend()
        with pytest.raises(RuntimeError, match="init was not called"):
            other.launch_graph(graph, 0, events)
    with backend_on(pools) as other, pytest.raises(ValueError, match="another backend"):
        other.launch_graph(graph, 0, events)


def test_threads_may_launch_at_once() -> None:
    pools = Pools("cpu", device_blocks=64, host_blocks=64)
    errors: list[BaseException] = []
    with backend_on(pools) as backend:

        def work(first: int) -> None:
            try:
                events: Events = []
                for i in range(100):
                    block = first + i // 2 % 16  # a store and a load of each
                    backend.launch_copy([block], [block], i % 2 == 0, i, events)
                for _, event in events:
                    event.synchronize(WAIT_S)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(16 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not errors
        stats = backend.stats()
        assert stats.loads.jobs + stats.stores.jobs == 400
        for block in range(64):
            pools.apply([block], [block], True)
        pools.check()


def test_200_000_pairs_in_one_job() -> None:
    pools = Pools("cpu", device_blocks=200_000, host_blocks=200_000, tensors=1)
    generator = torch.Generator().manual_seed(1)
    src, dst = (torch.randperm(200_000, generator=generator) for _ in range(2))
    with backend_on(pools) as backend:
        store(backend, src, dst).synchronize(WAIT_S)
        pools.cpu_model[0][dst] = pools.npu_model[0][src]
        pools.check()


BAD_IDS = [
    (([0, 12], [0, 1]), IndexError, r"src_blocks\[1\].*12.*12"),
    (([0, 1], [0, 20]), IndexError, r"dst_blocks\[1\].*20.*20"),
    (([0, 1], [3, 3]), ValueError, "3"),
    (([0, 1], [0]), ValueError, "src_blocks has 2 ids, dst_blocks 1"),
    (([0.5], [0]), TypeError, r"src_blocks\[0\] is 0.5"),
    (([2**64], [0]), (TypeError, IndexError), r"src_blocks\[0\]"),
    ((["1"], [0]), TypeError, r"src_blocks\[0\] is '1'"),
    ((7, [0]), TypeError, "src_blocks is a int"),
    ((torch.zeros(2, 2, dtype=torch.int64), [0]), TypeError, "1-D"),
    ((torch.zeros(1), [0]), TypeError, "int32 or int64"),
]


@pytest.mark.parametrize(("lists", "kind", "message"), BAD_IDS)
@pytest.mark.parametrize("use", ["launch_copy", "capture"])
def test_bad_ids_are_refused_and_nothing_is_queued(
    pools: Pools, lists: tuple[Any, Any], kind: Any, message: str, use: str
) -> None:
    events: Events = []
    with backend_on(pools) as backend:
        with pytest.raises(kind, match=message):
            if use == "capture":
                backend.capture(*lists, True)
            else:
                backend.launch_copy(*lists, True, 0, events)
        assert not events
        backend.synchronize(WAIT_S)
        assert backend.stats().stores.jobs == 0
        pools.check()


def test_ids_whose_conversion_changes_their_list(pools: Pools) -> None:
    class Id:
        def __index__(self) -> int:
            ids.clear()
            return 3

    ids: list[Any] = [Id(), object(), object()]
    with backend_on(pools) as backend:
        store(backend, ids, [5]).synchronize(WAIT_S)
        pools.apply([3], [5], True)
        pools.check()


def test_a_list_that_cannot_be_appended_to_leaves_nothing_queued(pools: Pools) -> None:
    with backend_on(pools) as backend:
        with pytest.raises(AttributeError):
            backend.launch_copy([1], [1], True, 0, ())  # type: ignore[arg-type]
        backend.synchronize(WAIT_S)
        assert backend.stats().stores.jobs == 0


T = torch.zeros
BAD_POOLS: list[tuple[Any, Any, type[Exception], str]] = [
    ([], [], ValueError, "npu_caches is empty"),
    ({"a": T(2, 2)}, {"b": T(2, 2)}, ValueError, "same keys"),
    ([T(2, 2)], [T(2, 3)], ValueError, "8 bytes in npu_caches, 12 in cpu_caches"),
    ([T(2, 2)], [T(2, 2, dtype=torch.float64)], TypeError, "float32.*float64"),
    ([T(2, 2).t()], [T(2, 2)], ValueError, "blocks overlap|not contiguous"),
    ([T(2, 2).expand(2, 2, 2)], [T(2, 2, 2)], ValueError, "blocks overlap: stride"),
    ([T(())], [T(())], ValueError, "no dimension"),
    ([None], [T(2)], TypeError, "NoneType"),
    (T(2, 2), [T(2, 2)], TypeError, "npu_caches is a Tensor"),
    ([T(2, 2)], [T(2, 2, device="meta")], ValueError, "meta"),
    ([T(2, 2, device="meta")], [T(2, 2)], ValueError, "meta"),
]


@pytest.mark.parametrize(("npu", "cpu", "kind", "message"), BAD_POOLS)
def test_bad_pools_are_refused_before_anything_starts(
    npu: Any, cpu: Any, kind: type[Exception], message: str
) -> None:
    threads = threading.active_count()
    backend = NPUDmaCopyBackend()
    with pytest.raises(kind, match=message):
        backend.init(npu, cpu)
    assert threading.active_count() == threads
    backend.init([T(2, 2)], [T(3, 2)])  # a refused call leaves the backend as it was
    backend.shutdown(WAIT_S)


def test_tensors_that_share_memory_are_refused() -> None:
    both = torch.zeros(4, 2)
    for npu, cpu, name in (
        ([both, both], [torch.zeros(4, 2), torch.zeros(4, 2)], "npu_caches"),
        ([both[:2]], [both[1:]], "npu_caches"),
    ):
        with pytest.raises(ValueError, match=name):
            NPUDmaCopyBackend().init(npu, cpu)


def test_streams_are_refused_between_host_pools(pools: Pools) -> None:
    with pytest.raises(ValueError, match=r"load_stream.*None"):
        NPUDmaCopyBackend().init(pools.npu, pools.cpu, load_stream=object())  # type: ignore[arg-type]


def test_use_before_init_and_after_shutdown(pools: Pools) -> None:
    backend = NPUDmaCopyBackend()
    events: Events = []
    backend.shutdown()
    for use in (
        lambda: backend.launch_copy([1], [1], True, 0, events),
        lambda: backend.capture([1], [1], True),
        lambda: backend.synchronize(),
        lambda: backend.stats(),
        lambda: backend.trace("never.json"),
    ):
        with pytest.raises(RuntimeError, match="init was not called"):
            use()
    backend.init(pools.npu, pools.cpu)
    with pytest.raises(RuntimeError, match="called before"):
        backend.init(pools.npu, pools.cpu)
    graph = backend.capture([1], [1], True)
    event = store(backend, [1], [1])
    backend.shutdown(WAIT_S)
    backend.shutdown(WAIT_S)
    assert event.query()  # shutdown has drained
    for use in (
        lambda: backend.launch_copy([1], [1], True, 0, events),
        lambda: backend.launch_graph(graph, 0, events),
        lambda: backend.capture([1], [1], True),
    ):
        with pytest.raises(RuntimeError, match="shut down") as told:
            use()
        assert told.type is RuntimeError
    assert not events
    backend.synchronize(WAIT_S)
    with pytest.raises(RuntimeError, match="called before"):
        backend.init(pools.npu, pools.cpu)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused(pools: Pools, timeout: float) -> None:
    with backend_on(pools) as backend:
        event = store(backend, [1], [1])
        for wait in (event.synchronize, backend.synchronize, backend.shutdown):
            with pytest.raises(ValueError, match="timeout is"):
                wait(timeout)


def test_the_wait_of_a_stream_is_a_wait_of_the_host(pools: Pools) -> None:
    with backend_on(pools) as backend:
        event = store(backend, [1], [1])
        event.wait()
        assert event.query()
        second = store(backend, [2], [2])
        second.synchronize(WAIT_S)
        assert event.elapsed_time(second) >= 0
