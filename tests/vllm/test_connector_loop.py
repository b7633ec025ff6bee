"""The connector under vLLM's own scheduler: evict, load, preempt, fail; every byte compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from played_engine import BLOCK, BLOCK_BYTES, SPEC, PlayedEngine, completion, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.request import RequestStatus

from npu_kv_ops import TransferError, pinned_memory
from npu_kv_ops.integrations.vllm import NpuKVOffloadConnector
from npu_kv_ops.integrations.vllm_ascend import SimpleCPUOffloadNPUWorker

BYTES = "vllm:npu_kv_offload_bytes_total"
BLOCKS = "vllm:npu_kv_offload_blocks_total"
FAILURES = "vllm:npu_kv_offload_failed_transfers_total"
LOADED = "vllm:simple_kv_offload_load_blocks_total"
DEVICE_BLOCKS = 24

DEVICES = pytest.mark.parametrize("device", ["cpu", "npu:0"])
MODES = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


def prompts(count: int, seed: int) -> list[list[int]]:
    """Of mixed lengths, some with a common beginning."""
    chooser = random.Random(seed)
    common = [chooser.randrange(500) for _ in range(2 * BLOCK)]
    made = []
    for index in range(count):
        own = [chooser.randrange(500) for _ in range(chooser.randrange(BLOCK, 5 * BLOCK))]
        made.append(common + own if index % 3 == 0 else own)
    return made


@pytest.fixture
def engines(tmp_path: Path, sim: ModuleType) -> Iterator[Any]:
    """Makes engines. What they do on an NPU has to be in order, also where no byte shows it."""
    made: list[PlayedEngine] = []

    def make(device: str, num_blocks: int = DEVICE_BLOCKS, **options: Any) -> PlayedEngine:
        connector = options.pop("connector", NpuKVOffloadConnector)
        hybrid = options.pop("hybrid", False)
        config = vllm_config(tmp_path, **options)
        made.append(PlayedEngine(config, device, num_blocks, connector, hybrid))
        return made[-1]

    with sim.check_races():
        yield make
        for engine in made:
            engine.shutdown()
        torch.npu.synchronize()
    assert pinned_memory.pinned_bytes() == 0


def play(engine: PlayedEngine, rounds: int, requests: list[list[int]], max_tokens: int) -> None:
    """The same prompts in every round, all at once; checks each answer and each read."""
    for turn in range(rounds):
        for index, prompt in enumerate(requests):
            engine.add(f"{turn}.{index}", prompt, max_tokens)
        engine.run()
        engine.check()
        for index, prompt in enumerate(requests):
            name = f"{turn}.{index}"
            if name not in engine.errors:
                assert engine.outputs[name] == completion(prompt, max_tokens), name


@DEVICES
@MODES
def test_rounds_with_a_working_set_larger_than_the_device(
    engines: Any, device: str, lazy: bool
) -> None:
    engine = engines(device, host_blocks=128, extra={"lazy_offload": lazy})
    play(engine, rounds=3, requests=prompts(14, seed=1), max_tokens=6)
    loaded = engine.total(LOADED)
    assert loaded >= 20
    assert engine.total(BLOCKS, "load") == loaded
    assert engine.total(BYTES, "load") == loaded * BLOCK_BYTES
    assert engine.total(BLOCKS, "store") > DEVICE_BLOCKS
    assert engine.total(FAILURES, "load") == engine.total(FAILURES, "store") == 0


@DEVICES
@MODES
def test_preemption(engines: Any, device: str, lazy: bool) -> None:
    """Long answers outgrow the device: requests lose their blocks and come back."""
    engine = engines(device, 16, host_blocks=96, extra={"lazy_offload": lazy})
    play(engine, rounds=2, requests=prompts(6, seed=2), max_tokens=60)
    assert engine.preemptions > 0
    assert engine.total(LOADED) > 0


@DEVICES
def test_a_host_pool_smaller_than_the_working_set(engines: Any, device: str) -> None:
    engine = engines(device, host_blocks=12)
    play(engine, rounds=3, requests=prompts(12, seed=3), max_tokens=4)
    assert engine.total(BLOCKS, "store") > 12  # host blocks are used again


def failing(sim: ModuleType, times: int) -> None:
    # Refused by the runtime, so that the streams live on.
    sim.fail_call("aclrtMemcpyBatchAsync", nth=1, code=507899, times=times)


def stored(engine: PlayedEngine, requests: list[list[int]]) -> None:
    """One round, after which the device no longer has the blocks of the first requests."""
    play(engine, rounds=1, requests=requests, max_tokens=2)


def test_failed_loads_are_computed_again(engines: Any, sim: ModuleType) -> None:
    engine = engines("npu:0", host_blocks=128)
    requests = prompts(14, seed=4)
    stored(engine, requests)
    loaded = engine.total(BLOCKS, "load")
    engine.add("again", requests[1], 6)
    failing(sim, 1)
    engine.run()
    engine.check()
    assert engine.outputs["again"] == completion(requests[1], 6)
    assert engine.total(FAILURES, "load") == 1
    assert engine.total(BLOCKS, "load") == loaded, "blocks of the failed load were still cached"


def test_failed_loads_fail_their_requests(engines: Any, sim: ModuleType) -> None:
    engine = engines("npu:0", host_blocks=128, policy="fail")
    requests = prompts(14, seed=5)
    stored(engine, requests)
    engine.add("fails", requests[1], 6)
    failing(sim, 1)
    engine.run()
    assert engine.errors == {"fails"}
    assert engine.outputs["fails"] == []
    engine.add("later", requests[1], 6)  # its blocks have left the prefix cache
    engine.run()
    engine.check()
    assert engine.outputs["later"] == completion(requests[1], 6)
    assert engine.total(FAILURES, "load") == 1


def test_failed_stores_leave_nothing_in_the_cache(engines: Any, sim: ModuleType) -> None:
    engine = engines("npu:0", host_blocks=128)
    requests = prompts(10, seed=6)
    failing(sim, 10_000)
    stored(engine, requests)
    sim.clear_faults()
    assert engine.total(FAILURES, "store") > 0
    assert engine.total(BLOCKS, "store") == 0
    pool = engine.connector.scheduler_manager.cpu_block_pool
    assert pool.get_num_free_blocks() == 127, "blocks of failed stores were not released"
    play(engine, rounds=1, requests=requests, max_tokens=2)
    assert engine.total(LOADED) == 0
    assert engine.total(BLOCKS, "store") > 0


@MODES
def test_every_third_transfer_fails(engines: Any, sim: ModuleType, lazy: bool) -> None:
    engine = engines("npu:0", 16, host_blocks=96, extra={"lazy_offload": lazy})
    requests = prompts(8, seed=7)
    for nth in range(1, 600, 3):
        sim.fail_call("aclrtMemcpyBatchAsync", nth=nth, code=507899)
    play(engine, rounds=4, requests=requests, max_tokens=30)
    assert engine.total(FAILURES, "load") > 0
    assert engine.total(FAILURES, "store") > 0
    assert engine.total(LOADED) > 0
    assert engine.preemptions > 0


@DEVICES
@MODES
def test_a_hybrid_model(engines: Any, device: str, lazy: bool) -> None:
    """Full attention and a sliding window take turns in using the blocks of one buffer."""
    options = {"host_blocks": 96, "extra": {"lazy_offload": lazy}, "hybrid": True}
    engine = engines(device, 40, **options)
    play(engine, rounds=3, requests=prompts(14, seed=13), max_tokens=20)
    assert engine.total(LOADED) > 0
    assert engine.total(BYTES, "load") == engine.total(BLOCKS, "load") * SPEC.page_size_bytes


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_loads_of_a_hybrid_model(engines: Any, sim: ModuleType, policy: str) -> None:
    engine = engines("npu:0", 40, host_blocks=128, policy=policy, hybrid=True)
    requests = prompts(14, seed=14)
    stored(engine, requests)
    loaded = engine.total(BLOCKS, "load")
    engine.add("first", requests[1], 6)
    failing(sim, 1)
    engine.run()
    engine.add("later", requests[1], 6)
    engine.run()
    engine.check()
    failed = policy == "fail"
    assert engine.errors == ({"first"} if failed else set())
    assert engine.outputs["first"] == ([] if failed else completion(requests[1], 6))
    assert engine.outputs["later"] == completion(requests[1], 6)
    assert engine.total(FAILURES, "load") == 1
    assert engine.total(BLOCKS, "load") == loaded, "blocks of the failed load were still cached"


@contextmanager
def held(engine: PlayedEngine, sim: ModuleType) -> Iterator[None]:
    """No copy of the rank begins inside."""
    with ExitStack() as stalls:
        for handle in engine.rank.worker_handler._backend._core.stream_handles():
            stalls.enter_context(sim.stall(handle))
        yield


def test_reset_of_the_cache_with_transfers_in_flight(engines: Any, sim: ModuleType) -> None:
    engine = engines("npu:0", host_blocks=128)
    requests = prompts(14, seed=8)
    stored(engine, requests)
    manager = engine.connector.scheduler_manager
    fresh = prompts(1, seed=80)[0]
    with held(engine, sim):
        engine.add("load", requests[1], 4)
        engine.add("store", fresh, 4)
        engine.run(until=lambda: bool(manager._store_event_to_blocks and manager._reqs_to_load))
        assert engine.connector.reset_cache() is False
        assert not manager.cpu_block_pool.reset_prefix_cache(), "blocks in use were let go"
    engine.run()
    engine.check()
    assert engine.outputs["load"] == completion(requests[1], 4)
    assert engine.outputs["store"] == completion(fresh, 4)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert manager.cpu_block_pool.get_num_free_blocks() == 127
    before = engine.total(LOADED)
    play(engine, rounds=1, requests=requests[:3], max_tokens=2)
    assert engine.total(LOADED) == before


def test_requests_that_are_aborted_while_they_load(engines: Any, sim: ModuleType) -> None:
    engine = engines("npu:0", host_blocks=128)
    requests = prompts(14, seed=9)
    stored(engine, requests)
    manager = engine.connector.scheduler_manager
    with held(engine, sim):
        for index in range(4):
            engine.add(f"a.{index}", requests[index], 4)
        engine.run(until=lambda: len(manager._reqs_to_load) >= 3)
        loading = list(manager._reqs_to_load)
        engine.scheduler.finish_requests(loading[:2], RequestStatus.FINISHED_ABORTED)
        engine.step()
    engine.run()
    engine.check()
    for index in range(4):
        wanted = [] if f"a.{index}" in loading[:2] else completion(requests[index], 4)
        assert engine.outputs[f"a.{index}"] == wanted
    assert manager.cpu_block_pool.get_num_free_blocks() == 127
    assert not engine.scheduler.requests


class ConnectorOfAscend(SimpleCPUOffloadConnector):
    """vLLM's connector, with the worker put in its place as vLLM-Ascend does it."""

    def __init__(self, config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(config, role, kv_cache_config)
        if self.worker_handler is not None:
            capacity = self.worker_handler.cpu_capacity_bytes
            self.worker_handler = SimpleCPUOffloadNPUWorker(config, kv_cache_config, capacity)

    def shutdown(self) -> None:  # vLLM-Ascend's has none
        if self.worker_handler is not None:
            self.worker_handler.shutdown()


class ConnectorOfAugust(ConnectorOfAscend):
    """As before vLLM 0.32, when transfers were launched in get_finished."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


@DEVICES
@MODES
@pytest.mark.parametrize("connector", [ConnectorOfAscend, ConnectorOfAugust])
def test_under_the_connector_of_vllm_ascend(
    engines: Any, device: str, lazy: bool, connector: type
) -> None:
    engine = engines(device, 16, host_blocks=96, extra={"lazy_offload": lazy}, connector=connector)
    play(engine, rounds=2, requests=prompts(8, seed=10), max_tokens=30)
    assert engine.preemptions > 0
    assert engine.total(LOADED) > 0


def test_a_failed_load_ends_the_engine_of_vllm_ascend(engines: Any, sim: ModuleType) -> None:
    engine = engines("npu:0", host_blocks=128, connector=ConnectorOfAscend)
    requests = prompts(14, seed=11)
    stored(engine, requests)
    engine.add("again", requests[1], 6)
    failing(sim, 1)
    with pytest.raises(TransferError, match="507899"):
        engine.run()


def one_failing_store(engines: Any, sim: ModuleType, times: int) -> PlayedEngine:
    """An engine whose first store, which is its only one, fails so many times."""
    engine = engines("npu:0", host_blocks=128, connector=ConnectorOfAscend)
    failing(sim, times)
    engine.add("first", prompts(2, seed=12)[1][:BLOCK], 4)
    return engine


def test_a_failed_store_is_launched_again_under_vllm_ascend(engines: Any, sim: ModuleType) -> None:
    engine = one_failing_store(engines, sim, times=3)
    engine.run()
    counts = engine.rank.worker_handler.take_counts()
    assert (counts.stores.failures, counts.stores.transfers) == (3, 1)
    assert engine.scheduler.reset_prefix_cache()  # of the device: what comes back is the host's
    again = [*engine.requests["first"].prompt_token_ids, 1]
    engine.add("again", again, 4)
    engine.run()
    engine.check()
    assert engine.outputs["again"] == completion(again, 4)
    assert engine.total(LOADED) == 1
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)


def test_a_store_that_keeps_failing_ends_the_engine_of_vllm_ascend(
    engines: Any, sim: ModuleType
) -> None:
    engine = one_failing_store(engines, sim, times=4)
    with pytest.raises(TransferError, match=r"store 0 failed 4 times: .*507899"):
        engine.run()
    manager = engine.connector.scheduler_manager
    assert list(manager._store_event_to_blocks) == [0], "it was reported as complete"
