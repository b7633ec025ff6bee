"""The scheduler side: vLLM's own, told of transfers that failed and of the pool that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

from npu_kv_ops.integrations.offload import interface
from npu_kv_ops.integrations.offload.metadata import OffloadWorkerMetadata
from npu_kv_ops.integrations.offload.metrics import OffloadStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

__all__ = ["OffloadScheduler", "capacity_for"]

# Device blocks to store, blocks looked at in each group, what events say of them (None: no events).
_Selection: TypeAlias = tuple[list[int], list[int], list[Any] | None]


def capacity_for(num_host_blocks: int, kv_cache_config: KVCacheConfig) -> int:
    """Return the least capacity, in bytes, of which vLLM makes ``num_host_blocks`` host blocks."""
    total: int = kv_cache_config.kv_cache_tensors[0].size
    num_blocks: int = kv_cache_config.num_blocks
    return -(-num_host_blocks * total // num_blocks)


class OffloadScheduler(SimpleCPUOffloadScheduler):
    """vLLM's block pool, LRU, hashes and modes. Failed transfers leave nothing in its cache.

    Arguments are those of ``SimpleCPUOffloadScheduler``.

    Raises:
        ImportError: vLLM's class lacks attributes that are used here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failed_store_events: set[int] = set()
        self._changed = True
        self._reported_free = -1
        interface.check_scheduler(self)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in what the workers report after a step."""
        meta = connector_output.kv_connector_worker_meta
        if meta is None and not connector_output.finished_recving:
            return  # as after most steps
        self._changed = True
        if isinstance(meta, OffloadWorkerMetadata):
            # Or the request that is scheduled again would hit the same blocks, for ever.
            self.cpu_block_pool.evict_blocks(meta.failed_host_blocks)
            # Some rank may not be through with a store yet; until then it is only remembered.
            self._failed_store_events |= meta.failed_store_events
        super().update_connector_output(connector_output)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SimpleCPUOffloadMetadata:
        """Decide what is stored and loaded in a step."""
        meta: SimpleCPUOffloadMetadata = super().build_connector_meta(scheduler_output)
        self._changed |= meta.store_event >= 0 or meta.load_event >= 0
        return meta

    def get_stats(self) -> OffloadStats | None:
        """Return vLLM's own numbers in our kind of statistics, which adds up with the workers'.

        None after a step in which nothing was stored, loaded or given up. vLLM asks in each step,
        and gathering the numbers takes as long as the rest of such a step here.
        """
        free = self.cpu_block_pool.get_num_free_blocks()
        if not self._changed and free == self._reported_free:
            return None
        self._changed, self._reported_free = False, free
        return OffloadStats(data=super().get_stats().data)

    def _select_eager_blocks_to_store(
        self, state: Any, block_ids_by_group: tuple[list[int], ...]
    ) -> _Selection:
        """Spare vLLM's search for a request that has not completed a block since the last one.

        vLLM searches for every request of every step, and a request that decodes completes a block
        once in ``block_size`` steps. What may be cached is never more than what is computed.
        """
        confirmed = state.request.num_computed_tokens - state.request.num_output_placeholders
        for group in self.prefix_cacheable_group_ids:
            if confirmed // self.group_block_sizes[group] > state.num_stored_blocks[group]:
                found: _Selection = super()._select_eager_blocks_to_store(state, block_ids_by_group)
                return found
        return [], [0] * len(state.num_stored_blocks), [] if self.enable_kv_cache_events else None

    def _process_store_event(self, event_idx: int) -> None:
        failed = event_idx in self._failed_store_events
        self._failed_store_events.discard(event_idx)
        transfer = self._store_event_to_blocks.pop(event_idx, None) if failed else None
        if transfer is None:
            super()._process_store_event(event_idx)  # went well, or was given up by a reset
            return
        self._in_flight_store_gpu_blocks.difference_update(transfer.gpu_block_ids)
        self._release_transfer_refs(transfer)
        for req_id in self._store_event_to_reqs.pop(event_idx, ()):
            state = self._reqs_to_store.get(req_id)
            if state is not None:
                state.store_events.discard(event_idx)
                if state.finished and not state.store_events:
                    self._cleanup_store_request(req_id)
