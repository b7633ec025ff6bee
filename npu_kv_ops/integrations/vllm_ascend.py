"""``SimpleCPUOffloadNPUWorker``: for vLLM-Ascend's own connector, in place of the class it imports.

Where vLLM itself can be told of a connector, use :mod:`npu_kv_ops.integrations.vllm` instead, whose
scheduler half also learns of transfers that failed. This module needs vLLM, not vLLM-Ascend.
"""

from __future__ import annotations

from collections.abc import Iterable

from npu_kv_ops.errors import TransferError
from npu_kv_ops.integrations.offload import interface

interface.check_worker()

from npu_kv_ops.integrations.offload.transfers import Transfer  # noqa: E402
from npu_kv_ops.integrations.offload.worker import NpuKVOffloadWorker, logger  # noqa: E402

__all__ = ["SimpleCPUOffloadNPUWorker"]

_STORE_ATTEMPTS = 4


class SimpleCPUOffloadNPUWorker(NpuKVOffloadWorker):
    """The worker, under a connector and a scheduler that cannot be told of failures.

    A load that fails ends the engine with its ``TransferError``, since nobody would compute the
    blocks again. A store that fails is launched again, three times, since its blocks stay pinned
    until it is reported, and to report it would put what was not copied into the prefix cache.
    Then it ends the engine too: one that waits for its report would never be idle.
    """

    def _load_failed(self, transfer: Transfer, error: Exception, requests: Iterable[str]) -> None:
        raise error

    def _store_failed(self, transfer: Transfer, error: Exception) -> None:
        if self._backend is None or transfer.attempts >= _STORE_ATTEMPTS:
            raise TransferError(
                f"store {transfer.event_idx} failed {transfer.attempts} times: {error}"
            ) from error
        logger.error(
            "KV offload: %s; its %d blocks are stored again", error, len(transfer.host_blocks)
        )
        self._stores.launch_again(self._backend, transfer, self._after_compute())
