"""``NpuKVOffloadConnector``: vLLM's simple CPU offload on the copy backend of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.logger import init_logger

from npu_kv_ops.integrations.offload import interface
from npu_kv_ops.integrations.offload.config import OffloadConfig
from npu_kv_ops.integrations.offload.metrics import OffloadPromMetrics, OffloadStats
from npu_kv_ops.integrations.offload.scheduler import OffloadScheduler, capacity_for
from npu_kv_ops.integrations.offload.worker import NpuKVOffloadWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["NpuKVOffloadConnector", "OffloadHandshake"]

logger = init_logger("vllm.npu_kv_ops")


@dataclass(frozen=True)
class OffloadHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once, when its pools are there."""

    num_host_blocks: int


class NpuKVOffloadConnector(SimpleCPUOffloadConnector):
    """Offloads KV blocks to host memory and brings them back.

    vLLM makes one with the role SCHEDULER in the engine core and one with the role WORKER in each
    rank; with one rank both may be in one process. The scheduler's half is vLLM's own (block pool,
    LRU, hashes, eager and lazy mode), the worker's half is
    :class:`~npu_kv_ops.integrations.offload.worker.NpuKVOffloadWorker`. With prefix caching off
    there is neither, and nothing happens.

    Args:
        vllm_config: of the engine; options are in ``kv_transfer_config.kv_connector_extra_config``.
        role: which half this is.
        kv_cache_config: of this rank (scheduler: of the first).

    Raises:
        ValueError: options that do not exist or have a wrong value.
        MemoryError: more host memory than is free.
        ImportError: attributes of vLLM's objects are missing; names them.
    """

    scheduler_manager: OffloadScheduler | None
    worker_handler: NpuKVOffloadWorker | None

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        self._config = OffloadConfig.parse(extra, vllm_config.parallel_config.world_size)
        # Makes halves of vLLM's, which hold nothing yet, or none where prefix caching is off.
        super().__init__(vllm_config, role, kv_cache_config)
        interface.check_attributes(self, ("scheduler_manager", "worker_handler"))
        self._kv_caches = kv_cache_config
        if self.worker_handler is not None:
            self.worker_handler = NpuKVOffloadWorker(
                vllm_config, kv_cache_config, self._config.cpu_bytes_per_rank
            )
        if self.scheduler_manager is not None:
            self.scheduler_manager = self._scheduler(self._config.cpu_bytes_per_rank)

    def _scheduler(self, capacity_bytes: int) -> OffloadScheduler:
        """Return a new scheduler half with the block sizes of the present one."""
        present: Any = self.scheduler_manager
        interface.check_scheduler(present)
        return OffloadScheduler(
            present.vllm_config,
            self._kv_caches,
            capacity_bytes,
            scheduler_block_size=present.block_size,
            hash_block_size=present.hash_block_size,
            lazy_offload=self._config.lazy_offload,
        )

    # The worker's half

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and which of them failed."""
        results = KVConnectorTransferResults()
        worker = self.worker_handler
        if worker is not None:
            _, received = worker.get_finished(finished_req_ids)
            if received is not None:
                results.finished_recving = received
            results.failed_recving = worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the device blocks whose loads failed in this step."""
        return set() if self.worker_handler is None else self.worker_handler.take_load_errors()

    def get_handshake_metadata(self) -> OffloadHandshake | None:
        """Return the size of this rank's host pool, None where there is none."""
        worker = self.worker_handler
        if worker is None or not worker.num_cpu_blocks:
            return None
        return OffloadHandshake(worker.num_cpu_blocks)

    # The scheduler's half

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Make the scheduler's pool as large as the smallest of the ranks.

        vLLM derives its size from the KV caches of the first rank. With uneven pipeline stages, or
        a draft model on the last, other ranks have room for fewer blocks.

        Raises:
            RuntimeError: vLLM made a pool of another size, with blocks that a rank may lack.
        """
        sizes = [m.num_host_blocks for m in metadata.values() if isinstance(m, OffloadHandshake)]
        present = self.scheduler_manager
        if present is None or not sizes or min(sizes) == present.num_cpu_blocks:
            return
        logger.info(
            "KV offload: the scheduler counted %d host blocks, the ranks have %s; using %d",
            present.num_cpu_blocks,
            sizes,
            min(sizes),
        )
        # Before the first request, so the present one holds nothing.
        self.scheduler_manager = self._scheduler(capacity_for(min(sizes), self._kv_caches))
        if self.scheduler_manager.num_cpu_blocks != min(sizes):
            raise RuntimeError(
                f"KV offload: vLLM counts {self.scheduler_manager.num_cpu_blocks} host blocks, the "
                f"smallest pool of the ranks has {min(sizes)}"
            )
        if present._gpu_block_pool is not None:
            self.scheduler_manager.bind_gpu_block_pool(present._gpu_block_pool)

    # Both

    def get_kv_connector_stats(self) -> OffloadStats | None:
        """Return the statistics of this step."""
        if self.worker_handler is not None:
            counts = self.worker_handler.take_counts()
            return None if counts is None else OffloadStats.of_worker(counts)
        return None if self.scheduler_manager is None else self.scheduler_manager.get_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        """Return statistics that have come from another process."""
        return OffloadStats() if data is None else OffloadStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        """Register the Prometheus metrics."""
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the copy thread and free the host pool of a worker. Idempotent."""
        if self.worker_handler is not None:
            self.worker_handler.shutdown()
