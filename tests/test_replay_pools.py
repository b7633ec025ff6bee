import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_kv_ops.replay.ordering import BlockOrder, Lane, LaneOrder
from npu_kv_ops.replay.pools import FreeIds, Policy, Step, TwoTierCache
from npu_kv_ops.replay.trace import BlockKey, BlockNeed


class Reference:
    """The same rules on plain lists of keys, oldest first: no ids, no moves."""

    def __init__(self, device: int, host: int, policy: Policy) -> None:
        self.sizes, self.policy = (device, host), policy
        self.device: list[BlockKey] = []
        self.host: list[BlockKey] = []

    def store(self, keys: Sequence[BlockKey], reading: set[BlockKey]) -> None:
        for key in keys:
            if len(self.host) == self.sizes[1]:
                del self.host[next(i for i, k in enumerate(self.host) if k not in reading)]
            self.host.append(key)

    def serve(self, need: BlockNeed) -> tuple[int, int, int, int]:
        """Device hits, host hits, misses, stores."""
        keys = list(need.keys)
        for pool in (self.device, self.host):
            for key in reversed(keys):
                if key in pool:
                    pool.remove(key)
                    pool.append(key)
        hits = [key for key in keys if key in self.device]
        loads = {key for key in keys if key not in hits and key in self.host}
        misses = [key for key in keys if key not in hits and key not in loads]
        room = self.sizes[1] - len(loads)

        evicted = []
        while len(self.device) + len(keys) - len(hits) + need.private > self.sizes[0]:
            key = next(key for key in self.device if key not in keys)
            self.device.remove(key)
            evicted.append(key)
        if self.policy == "lazy":
            leaving = [key for key in evicted if key not in self.host]
            stored = leaving[len(leaving) - min(room, len(leaving)) :]
        else:
            stored = misses[:room]
        self.store(stored, loads)
        self.device += [key for key in keys if key not in hits]
        for pool in (self.device, self.host):
            for key in reversed(keys):
                if key in pool:
                    pool.remove(key)
                    pool.append(key)
        return len(hits), len(loads), len(misses), len(stored)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, int, list[BlockNeed]]:
    """Pool sizes and requests that are walks down a tree, so that prefixes are shared."""
    device = draw(st.integers(4, 14))
    host = draw(st.integers(1, 30))
    needs = []
    for _ in range(draw(st.integers(1, 25))):
        private = draw(st.integers(0, 2))
        length = draw(st.integers(0, device - private))
        keys: list[BlockKey] = []
        name = 0
        for _ in range(length):
            name = name * 2 + draw(st.integers(1, 2))
            keys.append((name, 0))
        needs.append(BlockNeed(tuple(keys), private))
    return device, host, needs


@settings(max_examples=150, deadline=None)
@given(workloads(), st.sampled_from(["eager", "lazy"]))
def test_hits_and_evictions_are_those_of_the_reference(
    workload: tuple[int, int, list[BlockNeed]], policy: Policy
) -> None:
    device, host, needs = workload
    cache, reference = TwoTierCache(device, host, policy), Reference(device, host, policy)
    for need in needs:
        step = cache.admit(need)
        stored = len(step.stores) + len(step.evict_stores)
        counts = (step.device_hits, len(step.loads), len(step.computed), stored)
        cache.finish(step)
        assert counts == reference.serve(need)
        assert [key for key, _ in cache.device.items()] == reference.device
        assert [key for key, _ in cache.host.items()] == reference.host


@settings(max_examples=200, deadline=None)
@given(workloads(), st.sampled_from(["eager", "lazy"]), st.integers(0, 3))
def test_following_the_steps_keeps_every_block_what_it_is(
    workload: tuple[int, int, list[BlockNeed]], policy: Policy, ahead: int
) -> None:
    """Loads and evictions of a request happen when it is admitted, the rest up to `ahead` later."""
    device_blocks, host_blocks, needs = workload
    cache = TwoTierCache(device_blocks, host_blocks, policy)
    device: list[object] = [None] * device_blocks
    host: list[object] = [None] * host_blocks
    at_hand: list[tuple[BlockNeed, Step]] = []

    def start(need: BlockNeed) -> None:
        step = cache.admit(need)
        for moves in (step.evict_stores, step.loads, step.stores):
            assert len({move.device_block for move in moves}) == len(moves)
            assert len({move.host_block for move in moves}) == len(moves)
        for move in step.evict_stores:
            assert device[move.device_block] == move.key
        for move in step.evict_stores:
            host[move.host_block] = move.key
        for move in step.loads:
            assert host[move.host_block] == move.key
            device[move.device_block] = move.key
        assert [key for key, _ in step.resident] == list(need.keys)
        assert len(step.private) == need.private
        at_hand.append((need, step))

    def serve() -> None:
        _, step = at_hand.pop(0)
        for key, block in step.computed:
            device[block] = key
        for block in step.private:
            device[block] = "private"
        for move in step.stores:
            assert device[move.device_block] == move.key
            host[move.host_block] = move.key
        assert all(device[block] == key for key, block in step.resident)
        assert all(device[block] == "private" for block in step.private)
        cache.finish(step)
        private = sum(other.private for other, _ in at_hand)
        assert len(cache.device) + len(cache.device.free) + private == device_blocks
        assert len(cache.host) + len(cache.host.free) == host_blocks

    for need in needs:
        while at_hand and (len(at_hand) > ahead or not cache.fits(need)):
            serve()
        start(need)
    while at_hand:
        serve()
    assert all(device[block] == key for key, block in cache.device.items())
    assert all(host[block] == key for key, block in cache.host.items())


@settings(max_examples=100, deadline=None)
@given(workloads(), st.sampled_from(["eager", "lazy"]))
def test_what_stays_on_the_device_of_a_prompt_is_a_prefix(
    workload: tuple[int, int, list[BlockNeed]], policy: Policy
) -> None:
    device, host, needs = workload
    cache = TwoTierCache(device, host, policy)
    for need in needs:
        cache.finish(cache.admit(need))
        present = {key for key, _ in cache.device.items()}
        for key, _ in cache.device.items():
            parent = (key[0] - 1) // 2
            assert parent == 0 or (parent, 0) in present


def test_a_request_larger_than_the_pool_is_refused() -> None:
    cache = TwoTierCache(4, 8, "eager")
    with pytest.raises(ValueError, match="needs 5 device blocks, the pool has 4"):
        cache.admit(BlockNeed(((0, 0), (0, 1), (0, 2)), 2))
    with pytest.raises(ValueError, match="policy is 'never'"):
        TwoTierCache(4, 8, "never")  # type: ignore[arg-type]


def test_requests_at_hand_keep_their_blocks() -> None:
    cache = TwoTierCache(8, 8, "eager")
    shared = ((0, 0), (0, 1))
    first = cache.admit(BlockNeed((*shared, (1, 0)), 1))
    second = cache.admit(BlockNeed(shared, 2))
    assert second.device_hits == 2
    third = BlockNeed(((2, 0), (2, 1)), 1)
    assert not cache.fits(third)
    with pytest.raises(ValueError, match="needs 3 device blocks, which the requests at hand"):
        cache.admit(third)
    assert cache.fits(BlockNeed(((2, 0), (2, 1)), 0))
    assert cache.fits(BlockNeed((*shared, (1, 0)), 2))  # its keys are there already
    cache.finish(first)
    cache.finish(cache.admit(BlockNeed(((2, 0), (2, 1)), 2)))
    # Only the block that nobody uses any more was evicted.
    assert {key for key, _ in cache.device.items()} == {*shared, (2, 0), (2, 1)}
    cache.finish(second)
    assert cache.fits(BlockNeed(tuple((3, i) for i in range(8)), 0))


def test_new_prompts_get_neighbours_in_both_pools() -> None:
    cache = TwoTierCache(32, 64, "eager")
    for prompt in range(6):
        need = BlockNeed(tuple((prompt, i) for i in range(10)), 2)
        step = cache.admit(need)
        cache.finish(step)
        for blocks in (
            [block for _, block in step.computed],
            [move.host_block for move in step.stores],
        ):
            assert sum(b - a != 1 for a, b in itertools.pairwise(blocks)) <= 1


def test_lazily_evicted_neighbours_stay_neighbours() -> None:
    cache = TwoTierCache(16, 64, "lazy")
    for prompt in range(2):
        step = cache.admit(BlockNeed(tuple((prompt, i) for i in range(12)), 0))
        cache.finish(step)
    moves = step.evict_stores
    assert len(moves) == 8
    assert [move.device_block for move in moves] == list(range(4, 12))
    assert [move.host_block for move in moves] == list(range(8))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_free_ids_are_taken_in_as_few_runs_as_possible(
    used: list[bool], data: st.DataObject
) -> None:
    free = FreeIds(len(used))
    free.take(len(used))
    free.give_back([i for i, busy in enumerate(used) if not busy])
    count = data.draw(st.integers(0, len(free)))
    runs = sorted(
        (len(run) for run in "".join("x" if b else " " for b in used).split("x") if run),
        reverse=True,
    )
    fewest = next((n for n in range(len(runs) + 1) if sum(runs[:n]) >= count), 0)
    taken = free.take(count)
    assert len(set(taken)) == count
    assert not any(used[i] for i in taken)
    assert sum(b - a != 1 for a, b in itertools.pairwise(taken)) + (count > 0) == fewest


def test_a_run_is_not_broken_when_a_smaller_one_fits() -> None:
    free = FreeIds(10)
    free.take(10)
    free.give_back([0, 1, 2, 3, 4, 7, 8])
    assert free.take(2) == [7, 8]


def test_free_ids_refuse_what_makes_no_sense() -> None:
    free = FreeIds(3)
    with pytest.raises(ValueError, match="count is 4, only 3 ids are free"):
        free.take(4)
    with pytest.raises(ValueError, match="free already"):
        free.give_back([0])
    free.take(1)
    with pytest.raises(ValueError, match="free already"):
        free.give_back([0, 0])


def test_block_order_waits_for_the_last_job_of_each_other_lane() -> None:
    order = BlockOrder(lanes=3, blocks=8)
    assert order.add(0, 1, [0, 1, 2]) == [0, 0, 0]
    assert order.add(0, 2, [2, 3]) == [0, 0, 0]  # its own lane needs no wait
    assert order.add(1, 1, [4]) == [0, 0, 0]
    assert order.add(2, 1, [1]) == [1, 0, 0]
    assert order.add(2, 2, [0, 2, 4]) == [2, 1, 0]
    assert order.add(1, 2, [1]) == [1, 0, 1]
    assert order.add(0, 3, np.array([1, 4]).tolist()) == [0, 2, 2]
    assert order.add(1, 3, []) == [0, 0, 0]


def test_lane_order_names_the_events_that_were_not_waited_for() -> None:
    order = LaneOrder(device_blocks=8, host_blocks=4)
    compute, load, store = Lane

    def job(lane: Lane, event: str | None, device: list[int], host: list[int]) -> dict[Lane, str]:
        events = order.begin(lane, device, host)
        order.end(lane, event)
        return events

    assert job(compute, "c1", [0, 1], []) == {}
    assert job(compute, "c2", [2, 3], []) == {}
    assert job(store, "s1", [0], [0]) == {compute: "c1"}
    assert job(store, "s2", [1], [1]) == {}  # its lane has waited for c1
    assert job(load, "l1", [2], [1]) == {compute: "c2", store: "s2"}
    assert job(store, "s3", [3], [0]) == {compute: "c2"}
    assert job(compute, "c3", [0, 2], []) == {load: "l1", store: "s1"}
    assert job(load, "l2", [4], [0]) == {store: "s3"}


def test_lane_order_takes_a_later_event_where_one_is_no_longer_kept() -> None:
    order = LaneOrder(device_blocks=1000, host_blocks=4)
    for number in range(500):
        order.begin(Lane.COMPUTE, [number], [])
        order.end(Lane.COMPUTE, number)
    first = order.begin(Lane.LOAD, [3], [])[Lane.COMPUTE]
    assert 3 <= first < 500
    order.end(Lane.LOAD, None)
    assert order.begin(Lane.LOAD, [0], []) == {}
    assert order.begin(Lane.STORE, [499], []) == {Lane.COMPUTE: 499}
