"""What a worker tells the scheduler beyond vLLM's own metadata."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

__all__ = ["OffloadWorkerMetadata"]


@dataclass
class OffloadWorkerMetadata(SimpleCPUOffloadWorkerMetadata):
    """Completed stores, and which transfers failed on any rank.

    Attributes:
        failed_store_events: stores whose host blocks must not be cached.
        failed_host_blocks: host blocks of failed loads, which must leave the prefix cache.
    """

    failed_store_events: set[int] = field(default_factory=set)
    failed_host_blocks: set[int] = field(default_factory=set)

    def aggregate(self, other: SimpleCPUOffloadWorkerMetadata) -> OffloadWorkerMetadata:
        """Return the metadata of two ranks, or groups of ranks, as one."""
        events = super().aggregate(other).completed_store_events
        failed_stores, failed_blocks = set(self.failed_store_events), set(self.failed_host_blocks)
        if isinstance(other, OffloadWorkerMetadata):
            failed_stores |= other.failed_store_events
            failed_blocks |= other.failed_host_blocks
        return OffloadWorkerMetadata(events, failed_stores, failed_blocks)
