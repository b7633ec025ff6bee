"""Batched KV-cache block copies between Ascend NPUs and host memory, as a PyTorch operator.

Importing this package imports neither torch nor any library; what needs them is loaded at the first
use of a name below. ``npu_kv_ops.simulator`` can therefore be activated before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from npu_kv_ops._version import __version__

if TYPE_CHECKING:
    from npu_kv_ops import copy_backend, errors, kv_cache, mem_ops, ops, runtime, simulator
    from npu_kv_ops.copy_backend import NPUDmaCopyBackend, TransferEvent, TransferGraph
    from npu_kv_ops.errors import TransferError
    from npu_kv_ops.kv_cache import block_views, empty_pinned, host_mirror
    from npu_kv_ops.ops import raise_pending_errors, swap_blocks_batch
    from npu_kv_ops.split_ops import swap_blocks_start, swap_blocks_wait

__all__ = [
    "NPUDmaCopyBackend",
    "TransferError",
    "TransferEvent",
    "TransferGraph",
    "__version__",
    "block_views",
    "copy_backend",
    "empty_pinned",
    "errors",
    "graph_passes",
    "host_mirror",
    "kv_cache",
    "mem_ops",
    "ops",
    "raise_pending_errors",
    "runtime",
    "simulator",
    "swap_blocks_batch",
    "swap_blocks_start",
    "swap_blocks_wait",
]

_HOME = {
    "NPUDmaCopyBackend": "copy_backend",
    "TransferError": "errors",
    "TransferEvent": "copy_backend",
    "TransferGraph": "copy_backend",
    "block_views": "kv_cache",
    "empty_pinned": "kv_cache",
    "host_mirror": "kv_cache",
    "raise_pending_errors": "ops",
    "swap_blocks_batch": "ops",
    "swap_blocks_start": "split_ops",
    "swap_blocks_wait": "split_ops",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
