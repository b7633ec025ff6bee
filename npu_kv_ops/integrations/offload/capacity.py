"""How much host memory a rank takes, and whether it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.distributed import parallel_state
from vllm.logger import init_logger

from npu_kv_ops.kv_cache import host_mirror
from npu_kv_ops.pinned_memory import free_host_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["host_pool", "require_free_memory"]

logger = init_logger("vllm.npu_kv_ops")


def require_free_memory(capacity_bytes: int, ranks: int) -> None:
    """Check that the host has ``capacity_bytes`` free for each of its ``ranks`` of this engine.

    Called before the engine allocates its KV caches, so that a mistake costs no time.

    Raises:
        MemoryError: it has not; says how much would fit.
    """
    free = free_host_bytes()
    if ranks > 1 and parallel_state.model_parallel_is_initialized():
        # Or a rank that comes late would take the pools of the others for memory that is not free.
        # All of a stage have looked, then all stages have.
        parallel_state.get_tp_group().barrier()
        parallel_state.get_pp_group().barrier()
    if free is not None and capacity_bytes * ranks > free:
        raise MemoryError(
            f"cpu_bytes_to_use: the host pool of a rank is to have {capacity_bytes} bytes, "
            f"{capacity_bytes * ranks} with the {ranks} rank(s) of this host, but the host has "
            f"{free} bytes free; set cpu_bytes_to_use_per_rank to {free // ranks} or less"
        )


def host_pool(views: Mapping[str, torch.Tensor], capacity_bytes: int) -> dict[str, torch.Tensor]:
    """Allocate as many whole blocks as fit into ``capacity_bytes``, and not a byte more.

    Raises:
        ValueError: not even one block fits.
        MemoryError: the memory is not there, or cannot be page-locked.
    """
    block_bytes = sum(view.shape[1] for view in views.values())
    blocks = capacity_bytes // block_bytes
    if blocks < 1:
        raise ValueError(
            f"cpu_bytes_to_use: {capacity_bytes} bytes for this rank, but a block has "
            f"{block_bytes}; block 0 is never used, so {2 * block_bytes} bytes are the least that "
            "can hold anything"
        )
    if blocks == 1:
        logger.warning(
            "KV offload: %d bytes hold one block, and block 0 is never used: nothing is offloaded",
            capacity_bytes,
        )
    try:
        return host_mirror(views, blocks)
    except MemoryError as error:
        raise MemoryError(
            f"cpu_bytes_to_use: {capacity_bytes} bytes for this rank: {error}. Lower "
            "cpu_bytes_to_use or cpu_bytes_to_use_per_rank"
        ) from error
