"""The worker side: one for each rank, in its process, called by vLLM's model runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from npu_kv_ops.copy_backend import NPUDmaCopyBackend
from npu_kv_ops.copy_pools import npu
from npu_kv_ops.integrations.offload.capacity import host_pool, require_free_memory
from npu_kv_ops.integrations.offload.counts import LaneCounts, TransferCounts
from npu_kv_ops.integrations.offload.layouts import device_views
from npu_kv_ops.integrations.offload.metadata import OffloadWorkerMetadata
from npu_kv_ops.integrations.offload.transfers import Transfer, TransferLane
from npu_kv_ops.kv_cache import KVCache

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata

__all__ = ["NpuKVOffloadWorker"]

logger = init_logger("vllm.npu_kv_ops")  # vLLM shows what its own loggers say

_SHUTDOWN_TIMEOUT_S = 30.0
_FLUSH_WARNING_S = 10.0


class NpuKVOffloadWorker(SimpleCPUOffloadWorker):
    """Copies blocks between the KV caches of a rank and its pool in host memory.

    Takes the place of vLLM's ``SimpleCPUOffloadWorker``, for KV caches on an NPU or on the CPU. Of
    that class only the type is used: all of its state is replaced.

    Each engine step vLLM binds the step's metadata, calls ``start_load_kv``, ``wait_for_save`` and
    ``get_finished``, and clears the metadata. Transfers are launched in the first two; where a
    connector does not pass these on (vLLM before 0.32), in ``get_finished``. Both
    directions run behind what the compute stream holds at that moment: a store reads what the step
    has written, and a load does not overwrite what an earlier step still reads.

    Args:
        vllm_config: of the engine; says how many ranks share the host. None for one.
        kv_cache_config: of this rank.
        cpu_capacity_bytes: of the host pool of this rank.

    Not thread-safe: vLLM calls it on one thread.
    """

    def __init__(
        self,
        vllm_config: VllmConfig | None,
        kv_cache_config: KVCacheConfig | None,
        cpu_capacity_bytes: int,
    ) -> None:
        ranks = 1 if vllm_config is None else vllm_config.parallel_config.local_world_size
        require_free_memory(cpu_capacity_bytes, ranks)
        super().__init__(vllm_config, kv_cache_config, cpu_capacity_bytes)
        self.kv_cache_config = kv_cache_config
        self.cpu_capacity_bytes = cpu_capacity_bytes
        self.num_cpu_blocks = 0
        self.device: torch.device | None = None
        self._backend: NPUDmaCopyBackend | None = None
        self._has_no_caches = False
        self.gpu_kv_caches: dict[str, torch.Tensor] | None = None
        self.cpu_kv_caches: dict[str, torch.Tensor] | None = None
        self._block_bytes = 0
        self._loads = TransferLane(is_store=False)
        self._stores = TransferLane(is_store=True)
        self._connector_metadata: SimpleCPUOffloadMetadata | None = None
        self._launch_hooks_called = False
        self._compute_done: Any = None
        self._failed_device_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = OffloadWorkerMetadata({})
        self._counts = TransferCounts()
        self._reported_depth = 0

    def register_kv_caches(self, kv_caches: Mapping[str, KVCache]) -> None:
        """Take over the KV caches of this rank, allocate its host pool and start the copy thread.

        Raises:
            ValueError: caches that cannot be viewed block by block (see :func:`device_views`), or
                a capacity of less than a block.
            MemoryError: the host pool does not fit.
            RuntimeError: called twice.
        """
        if not kv_caches:
            logger.warning("KV offload: this rank has no KV caches, it copies nothing")
            self._has_no_caches = True
            return
        if self._backend is not None:
            raise RuntimeError("KV caches are registered already; their host pool is in use")
        if self.kv_cache_config is None:
            raise ValueError("kv_cache_config is None; it says how many blocks there are")
        views = device_views(kv_caches, self.kv_cache_config)
        pool = host_pool(views, self.cpu_capacity_bytes)
        backend = NPUDmaCopyBackend()
        backend.init(views, pool)
        self._backend = backend
        self.device = backend.device
        self.gpu_kv_caches, self.cpu_kv_caches = views, pool
        self.num_cpu_blocks = len(next(iter(pool.values())))
        self._block_bytes = sum(view.shape[1] for view in views.values())
        logger.info(
            "KV offload: %d blocks of %d bytes on %s, %d in host memory (%.2f GiB), %d copies each",
            self.kv_cache_config.num_blocks,
            self._block_bytes,
            self.device,
            self.num_cpu_blocks,
            self.num_cpu_blocks * self._block_bytes / (1 << 30),
            len(views),
        )

    def bind_connector_metadata(self, metadata: SimpleCPUOffloadMetadata) -> None:
        """Begin a step."""
        self._connector_metadata = metadata
        self._launch_hooks_called = False

    def clear_connector_metadata(self) -> None:
        """End a step."""
        self._connector_metadata = None

    def handle_preemptions(self, kv_connector_metadata: SimpleCPUOffloadMetadata) -> None:
        """Wait for everything launched, if this step preempts: its blocks are used again."""
        if not kv_connector_metadata.need_flush or self._backend is None:
            return
        while True:
            try:
                self._backend.synchronize(_FLUSH_WARNING_S)
            except TimeoutError:
                logger.warning("KV offload: still waiting for transfers: %s", self._backend.stats())
            else:
                return

    def start_load_kv(self) -> None:
        """Launch the loads of this step."""
        self._launch_hooks_called = True
        metadata = self._connector_metadata
        if metadata is not None and metadata.load_event >= 0:
            self._launch(
                self._loads, metadata.load_event, metadata.load_gpu_blocks, metadata.load_cpu_blocks
            )

    def wait_for_save(self) -> None:
        """Launch the stores of this step."""
        self._launch_hooks_called = True
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_event >= 0:
            self._launch(
                self._stores,
                metadata.store_event,
                metadata.store_gpu_blocks,
                metadata.store_cpu_blocks,
            )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Collect the transfers that have ended, well or not; never waits. Loads only in a step.

        Returns:
            None, and the requests whose loads have ended, or None. Stores are reported by
            :meth:`build_connector_worker_meta`, failures by the methods below.
        """
        metadata = self._connector_metadata
        received: set[str] = set()
        if metadata is not None:  # which says whose loads they are
            if not self._launch_hooks_called:
                self.start_load_kv()
                self.wait_for_save()
            for transfer in self._loads.poll():
                self._count(self._counts.loads, transfer)
                requests = metadata.load_event_to_reqs.get(transfer.event_idx, ())
                received.update(requests)
                if transfer.error is not None:
                    self._load_failed(transfer, transfer.error, requests)
        for transfer in self._stores.poll():
            self._count(self._counts.stores, transfer)
            if transfer.error is not None:
                self._store_failed(transfer, transfer.error)
            else:
                self._report.completed_store_events[transfer.event_idx] = 1
        return None, received or None

    def take_load_errors(self) -> set[int]:
        """Return the device blocks of failed loads since the last call.

        Only for models with one KV-cache group; for others the blocks of the groups cannot be told
        apart, and :meth:`take_failed_requests` says which requests failed.
        """
        failed, self._failed_device_blocks = self._failed_device_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests of failed loads since the last call, with several groups."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_counts(self) -> TransferCounts | None:
        """Return what was counted since the last call.

        None if nothing has ended and nothing is, or was at the last call, under way.
        """
        counts = self._counts
        depth = len(self._loads.running) + len(self._stores.running)
        # While transfers are under way, the peak over the ranks needs the number of every rank.
        busy = depth or self._reported_depth
        if not (busy or counts.loads.seconds or counts.stores.seconds):
            return None
        counts.queue_depth = self._reported_depth = depth
        self._counts = TransferCounts()
        return counts

    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        """Return what the scheduler has to know since the last call, None if nothing."""
        report = self._report
        if not report.completed_store_events and not report.failed_host_blocks:
            return None
        self._report = OffloadWorkerMetadata({})
        return report

    def shutdown(self) -> None:
        """End the copy thread, free the host pool and let go of the KV caches. Idempotent.

        Waits half a minute for transfers. Where they have not ended then, everything stays as it
        is, since the device may still copy; it may be called again, and the end of the process
        gives the memory back.
        """
        if self._backend is not None:
            try:
                self._backend.shutdown(_SHUTDOWN_TIMEOUT_S)
            except TimeoutError as error:
                logger.error("KV offload: %s; its host memory stays allocated", str(error))
                return
        self._backend = None
        self._loads.clear()
        self._stores.clear()
        self.gpu_kv_caches = self.cpu_kv_caches = None
        self._connector_metadata = None

    def _launch(
        self, lane: TransferLane, event_idx: int, device_blocks: list[int], host_blocks: list[int]
    ) -> None:
        if self._has_no_caches:
            device_blocks, host_blocks = [], []  # still reported, as the scheduler counts ranks
        elif self._backend is None:
            raise RuntimeError("KV offload: no KV caches are registered, or it was shut down")
        lane.launch(self._backend, event_idx, device_blocks, host_blocks, self._after_compute())

    def _after_compute(self) -> Any:
        """The event behind which transfers run; None on the CPU, which has computed already."""
        if self.device is None or self.device.type != "npu":
            return None
        if self._compute_done is None:
            self._compute_done = npu.Event()
        # The backend takes the dependency at the launch, so one event serves every step.
        self._compute_done.record(npu.current_stream(self.device))
        return self._compute_done

    def _load_failed(self, transfer: Transfer, error: Exception, requests: Iterable[str]) -> None:
        logger.error("KV offload: %s; its requests are rescheduled or fail", error)
        self._report.failed_host_blocks.update(transfer.host_blocks)
        if self.kv_cache_config is not None and len(self.kv_cache_config.kv_cache_groups) == 1:
            self._failed_device_blocks.update(transfer.device_blocks)
        else:
            self._failed_requests.update(requests)

    def _store_failed(self, transfer: Transfer, error: Exception) -> None:
        logger.error("KV offload: %s; its blocks are not cached", error)
        # Completed too: the scheduler counts the ranks that are through before it frees blocks.
        self._report.completed_store_events[transfer.event_idx] = 1
        self._report.failed_store_events.add(transfer.event_idx)

    def _count(self, counts: LaneCounts, transfer: Transfer) -> None:
        counts.seconds.append(transfer.seconds)
        if transfer.error is not None:
            counts.failures += 1
            return
        counts.transfers += 1
        counts.blocks += len(transfer.device_blocks)
        counts.bytes += len(transfer.device_blocks) * self._block_bytes
