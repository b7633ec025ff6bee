"""The scheduler's half: several ranks, their failures, and pools of different sizes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from played_engine import BLOCK, BLOCK_BYTES, SPEC, cache_config, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from npu_kv_ops.integrations.offload import connector as connector_module
from npu_kv_ops.integrations.offload.connector import OffloadHandshake
from npu_kv_ops.integrations.offload.metadata import OffloadWorkerMetadata
from npu_kv_ops.integrations.offload.scheduler import OffloadScheduler, capacity_for
from npu_kv_ops.integrations.vllm import NpuKVOffloadConnector

DEVICE_BLOCKS = 16


class Half:
    """A scheduler's half for two ranks, with a device pool, driven by hand."""

    def __init__(self, folder: Path, *, host_blocks: int = 10, world_size: int = 2) -> None:
        config = vllm_config(folder)
        config.parallel_config.world_size = world_size
        self.manager = OffloadScheduler(
            config,
            cache_config(DEVICE_BLOCKS),
            host_blocks * BLOCK_BYTES,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.pool = BlockPool(DEVICE_BLOCKS, True, BLOCK)
        self.manager.bind_gpu_block_pool(self.pool)

    def store(self, name: str, blocks: int) -> Any:
        """Computes a request, and returns the metadata of the step that stores its blocks."""
        tokens = [hash(name) % 1000 + i for i in range(blocks * BLOCK + 1)]
        request = self.request(name, tokens)
        taken = self.pool.get_new_blocks(blocks)
        self.pool.cache_full_blocks(request, taken, 0, blocks, BLOCK, 0)
        request.num_computed_tokens = blocks * BLOCK
        ids = KVCacheBlocks((taken,)).get_block_ids()
        self.manager.update_state_after_alloc(request, KVCacheBlocks((taken,)), 0)
        new = NewRequestData(name, None, [], None, None, ids, 0, None)
        meta = self.manager.build_connector_meta(self.step({name: blocks * BLOCK}, [new]))
        self.taken, self.tokens = taken, tokens
        return meta

    @staticmethod
    def request(name: str, tokens: list[int]) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )

    @staticmethod
    def step(scheduled: dict[str, int], new: list[NewRequestData]) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            preempted_req_ids=set(),
        )

    def report(
        self, meta: SimpleCPUOffloadWorkerMetadata, received: set[str] | None = None
    ) -> None:
        self.manager.update_connector_output(
            KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=meta)
        )

    def hit(self, tokens: list[int]) -> int:
        """Blocks of host memory that another request with these tokens would load."""
        request = self.request("probe", tokens)
        length, _ = self.manager.get_num_new_matched_tokens(request, 0)
        self.manager.request_finished(request, [])
        return length // BLOCK


@pytest.fixture
def half(tmp_path: Path) -> Half:
    return Half(tmp_path)


def test_a_store_that_went_well_on_all_ranks_is_cached(half: Half) -> None:
    meta = half.store("a", 3)
    one = OffloadWorkerMetadata({meta.store_event: 1})
    half.report(one)
    assert half.hit(half.tokens) == 0, "one rank is not through yet"
    half.report(one)
    assert half.hit(half.tokens) == 3


@pytest.mark.parametrize("failing", ["first", "last", "same step"])
def test_a_store_that_failed_on_one_rank_is_not_cached(half: Half, failing: str) -> None:
    free = half.manager.cpu_block_pool.get_num_free_blocks()
    meta = half.store("a", 3)
    bad = OffloadWorkerMetadata({meta.store_event: 1}, {meta.store_event})
    good = OffloadWorkerMetadata({meta.store_event: 1})
    if failing == "same step":
        half.report(good.aggregate(bad))
    else:
        first, last = (bad, good) if failing == "first" else (good, bad)
        half.report(first)
        assert half.manager.cpu_block_pool.get_num_free_blocks() == free - 3
        half.report(last)
    assert half.hit(half.tokens) == 0
    assert half.manager.cpu_block_pool.get_num_free_blocks() == free
    assert {block.ref_cnt for block in half.taken} == {1}, "the device blocks stay pinned"
    assert not half.manager.has_pending_stores()
    assert not half.manager._in_flight_store_gpu_blocks
    again = half.store("b", 2)  # the next one goes its way
    half.report(OffloadWorkerMetadata({again.store_event: 2}))
    assert half.hit(half.tokens) == 2


def test_a_failed_store_of_a_request_that_has_finished(half: Half) -> None:
    meta = half.store("a", 3)
    half.manager.request_finished(half.request("a", half.tokens), [])
    half.report(OffloadWorkerMetadata({meta.store_event: 2}, {meta.store_event}))
    assert not half.manager._reqs_to_store
    assert not half.manager._store_event_to_reqs


def test_a_failed_store_after_a_reset(half: Half) -> None:
    free = half.manager.cpu_block_pool.get_num_free_blocks()
    meta = half.store("a", 3)
    assert half.manager.reset() is False
    half.report(OffloadWorkerMetadata({meta.store_event: 2}, {meta.store_event}))
    assert half.manager.cpu_block_pool.get_num_free_blocks() == free
    assert half.manager.reset() is True
    assert not half.manager._failed_store_events


def test_host_blocks_of_a_failed_load_leave_the_cache(half: Half) -> None:
    meta = half.store("a", 3)
    half.report(OffloadWorkerMetadata({meta.store_event: 2}))
    assert half.hit(half.tokens) == 3
    half.report(OffloadWorkerMetadata({}, failed_host_blocks={meta.store_cpu_blocks[1]}))
    assert half.hit(half.tokens) == 1


def test_metadata_of_ranks_add_up_and_travel() -> None:
    one = OffloadWorkerMetadata({1: 1, 2: 1}, {2}, {5})
    two = OffloadWorkerMetadata({2: 1}, {3}, {6})
    total = pickle.loads(pickle.dumps(one.aggregate(two)))
    assert total == OffloadWorkerMetadata({1: 1, 2: 2}, {2, 3}, {5, 6})
    assert one == OffloadWorkerMetadata({1: 1, 2: 1}, {2}, {5})
    assert one.aggregate(SimpleCPUOffloadWorkerMetadata({1: 1})).completed_store_events[1] == 2


# ----------------------------------------------------------------------------- pools of other sizes


@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 65, 1000, 34435, 35341])
@pytest.mark.parametrize("device_blocks", [7, 16, 1021])
def test_capacity_for_gives_exactly_so_many_blocks(blocks: int, device_blocks: int) -> None:
    config = cache_config(device_blocks)
    derived = OffloadScheduler._derive_cpu_config(config, capacity_for(blocks, config))
    assert derived.num_blocks == blocks
    odd = replace(config)
    odd.kv_cache_tensors = [replace(config.kv_cache_tensors[0], size=device_blocks * 1337)]
    derived = OffloadScheduler._derive_cpu_config(odd, capacity_for(blocks, odd))
    assert derived.num_blocks == blocks


@pytest.mark.parametrize("ranks", [[64, 64], [40, 64], [80, 70]])
def test_the_scheduler_uses_no_block_that_a_rank_has_not(tmp_path: Path, ranks: list[int]) -> None:
    connector = NpuKVOffloadConnector(
        vllm_config(tmp_path, host_blocks=64),
        KVConnectorRole.SCHEDULER,
        cache_config(DEVICE_BLOCKS),
    )
    first = connector.scheduler_manager
    pool = BlockPool(DEVICE_BLOCKS, True, BLOCK)
    connector.bind_gpu_block_pool(pool)
    connector.set_xfer_handshake_metadata_pp_aware(
        {(stage, 0): OffloadHandshake(blocks) for stage, blocks in enumerate(ranks)}
    )
    manager = connector.scheduler_manager
    assert manager.num_cpu_blocks == len(manager.cpu_block_pool.blocks) == min(ranks)
    assert manager._gpu_block_pool is pool
    assert (manager is first) == (min(ranks) == 64)


def test_a_pool_that_vllm_makes_of_another_size_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = NpuKVOffloadConnector(
        vllm_config(tmp_path, host_blocks=64),
        KVConnectorRole.SCHEDULER,
        cache_config(DEVICE_BLOCKS),
    )
    monkeypatch.setattr(connector_module, "capacity_for", lambda blocks, _: 41 * BLOCK_BYTES)
    with pytest.raises(RuntimeError, match=r"vLLM counts 41 host blocks, .* the ranks has 40"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): OffloadHandshake(40)})


def test_a_rank_tells_the_size_of_its_pool(tmp_path: Path) -> None:
    import torch

    config = cache_config(DEVICE_BLOCKS)
    connector = NpuKVOffloadConnector(
        vllm_config(tmp_path, host_blocks=9), KVConnectorRole.WORKER, config
    )
    shape = (DEVICE_BLOCKS, BLOCK, 2, 8)
    pairs = {n: tuple(torch.zeros(shape, dtype=SPEC.dtype) for _ in "kv") for n in ("l0", "l1")}
    connector.register_kv_caches(pairs)
    handshake = pickle.loads(pickle.dumps(connector.get_handshake_metadata()))
    assert handshake == OffloadHandshake(9)
    connector.shutdown()


@pytest.mark.parametrize("placeholders", [0, 2])
def test_blocks_are_searched_for_when_one_is_complete(
    half: Half, monkeypatch: pytest.MonkeyPatch, placeholders: int
) -> None:
    searched: list[int] = []
    theirs = SimpleCPUOffloadScheduler._select_eager_blocks_to_store

    def counted(*arguments: Any) -> Any:
        searched.append(request.num_computed_tokens)
        return theirs(*arguments)

    monkeypatch.setattr(SimpleCPUOffloadScheduler, "_select_eager_blocks_to_store", counted)
    request = half.request("a", list(range(3 * BLOCK)))
    taken = half.pool.get_new_blocks(3)
    half.pool.cache_full_blocks(request, taken, 0, 3, BLOCK, 0)
    half.manager.update_state_after_alloc(request, KVCacheBlocks((taken,)), 0)
    state = half.manager._reqs_to_store["a"]
    ids = KVCacheBlocks((taken,)).get_block_ids()
    request.num_output_placeholders = placeholders
    stored: list[int] = []
    for request.num_computed_tokens in range(placeholders, 3 * BLOCK + placeholders + 1):
        ours = half.manager._select_eager_blocks_to_store(state, ids)
        assert ours == theirs(half.manager, state, ids)
        stored += ours[0]
        state.num_stored_blocks[0] += ours[1][0]
    assert stored == ids[0]
    assert searched == [blocks * BLOCK + placeholders for blocks in (1, 2, 3)]
