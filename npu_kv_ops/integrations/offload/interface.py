"""Whether the installed vLLM has the interface that this integration was made for.

Everything the other modules take from vLLM is listed here, so that a vLLM that does not fit gives
one error at start, and not an AttributeError in the middle of serving.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

__all__ = ["TRIED", "check_attributes", "check_connector", "check_scheduler", "check_worker"]

# Versions with which the tests of the real engine have passed.
TRIED = ("0.32.0",)


@dataclass(frozen=True)
class _Need:
    """A class of vLLM, the members that are used, and the arguments its constructor has to take."""

    module: str
    name: str
    members: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"

_WORKER = (
    _Need(
        "vllm.v1.simple_kv_offload.worker",
        "SimpleCPUOffloadWorker",
        arguments=("vllm_config", "kv_cache_config", "cpu_capacity_bytes"),
    ),
    _Need(
        "vllm.v1.simple_kv_offload.metadata",
        "SimpleCPUOffloadMetadata",
        arguments=(
            "load_event",
            "load_gpu_blocks",
            "load_cpu_blocks",
            "load_event_to_reqs",
            "store_event",
            "store_gpu_blocks",
            "store_cpu_blocks",
            "need_flush",
        ),
    ),
    _Need(
        "vllm.v1.simple_kv_offload.metadata",
        "SimpleCPUOffloadWorkerMetadata",
        ("aggregate",),
        ("completed_store_events",),
    ),
    _Need("vllm.config", "ParallelConfig", ("local_world_size",)),
    _Need("vllm.distributed.parallel_state", "get_tp_group"),
    _Need("vllm.distributed.parallel_state", "get_pp_group"),
    _Need("vllm.distributed.parallel_state", "model_parallel_is_initialized"),
    _Need("vllm.logger", "init_logger"),
)

# What there is of an instance, which a class does not show.
_OF_SCHEDULER = (
    "vllm_config",
    "block_size",
    "hash_block_size",
    "num_cpu_blocks",
    "cpu_block_pool",
    "prefix_cacheable_group_ids",
    "group_block_sizes",
    "enable_kv_cache_events",
    "_gpu_block_pool",
    "_in_flight_store_gpu_blocks",
    "_reqs_to_store",
    "_store_event_to_blocks",
    "_store_event_to_reqs",
)

_CONNECTOR = (
    _Need(
        f"{_CONNECTORS}.simple_cpu_offload_connector",
        "SimpleCPUOffloadConnector",
        (
            "register_kv_caches",
            "bind_connector_metadata",
            "clear_connector_metadata",
            "handle_preemptions",
            "start_load_kv",
            "wait_for_save",
            "get_finished",
            "build_connector_worker_meta",
            "bind_gpu_block_pool",
            "build_connector_meta",
            "update_connector_output",
            "get_kv_connector_stats",
            "build_kv_connector_stats",
            "build_prom_metrics",
        ),
        ("vllm_config", "role", "kv_cache_config"),
    ),
    _Need(
        f"{_CONNECTORS}.base",
        "KVConnectorBase_V1",
        (
            "get_transfer_results",
            "get_block_ids_with_load_errors",
            "get_kv_connector_stats",
            "get_handshake_metadata",
            "set_xfer_handshake_metadata_pp_aware",
            "shutdown",
        ),
    ),
    _Need(f"{_CONNECTORS}.base", "KVConnectorRole", ("SCHEDULER", "WORKER")),
    _Need(f"{_CONNECTORS}.base", "KVConnectorHandshakeMetadata"),
    _Need(
        f"{_CONNECTORS}.base",
        "KVConnectorTransferResults",
        arguments=("finished_recving", "failed_recving"),
    ),
    _Need(f"{_CONNECTORS}.metrics", "KVConnectorStats", ("aggregate", "reduce", "is_empty")),
    _Need(
        "vllm.v1.simple_kv_offload.manager",
        "SimpleCPUOffloadScheduler",
        (
            "build_connector_meta",
            "update_connector_output",
            "get_stats",
            "bind_gpu_block_pool",
            "_process_store_event",
            "_select_eager_blocks_to_store",
            "_release_transfer_refs",
            "_cleanup_store_request",
        ),
        (
            "vllm_config",
            "kv_cache_config",
            "cpu_capacity_bytes",
            "scheduler_block_size",
            "hash_block_size",
            "lazy_offload",
        ),
    ),
    _Need(
        "vllm.v1.simple_kv_offload.manager",
        "StoreRequestState",
        arguments=("request", "num_stored_blocks", "store_events", "finished"),
    ),
    _Need("vllm.v1.simple_kv_offload.metrics", "SimpleCPUOffloadStats", ("aggregate", "reduce")),
    _Need("vllm.v1.simple_kv_offload.metrics", "SimpleCPUOffloadPromMetrics", ("observe",)),
    _Need("vllm.v1.core.block_pool", "BlockPool", ("evict_blocks", "get_num_free_blocks")),
)


def check_worker() -> None:
    """Check what the worker alone needs; raises as :func:`check_connector`."""
    _check("the worker", _WORKER)


def check_connector() -> None:
    """Check what the connector and its worker need.

    Raises:
        ImportError: vLLM is not installed, or lacks something; names all that is missing.
    """
    _check("the connector", _WORKER + _CONNECTOR)


def check_scheduler(scheduler: object) -> None:
    """Check the attributes of a scheduler half; raises as :func:`check_connector`."""
    check_attributes(scheduler, _OF_SCHEDULER)


def check_attributes(instance: object, names: tuple[str, ...]) -> None:
    """Check that an instance of a class of vLLM, or of ours on top of one, has these attributes.

    Raises:
        ImportError: it lacks some; names all of them.
    """
    kind = type(instance).__name__
    missing = [f"{kind}().{name}" for name in names if not hasattr(instance, name)]
    _refuse(kind, missing)


def _check(what: str, needs: tuple[_Need, ...]) -> None:
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise ImportError(f"npu_kv_ops.integrations: vLLM cannot be imported: {error}") from error
    _refuse(what, [text for need in needs for text in _missing(need)])


def _refuse(what: str, missing: list[str]) -> None:
    if missing:
        version = importlib.import_module("vllm").__version__
        lines = "".join(f"\n  {text}" for text in missing)
        raise ImportError(
            f"npu_kv_ops.integrations: {what} does not fit vLLM {version} (tried with "
            f"{', '.join(TRIED)}); missing:{lines}"
        )


def _missing(need: _Need) -> list[str]:
    path = f"{need.module}.{need.name}"
    try:
        found = getattr(importlib.import_module(need.module), need.name, None)
    except ImportError as error:
        return [f"{path} ({error})"]
    if found is None:
        return [path]
    lacking = [f"{path}.{member}" for member in need.members if not hasattr(found, member)]
    if need.arguments:
        takes = inspect.signature(found).parameters
        lacking += [f"{path}({name}=...)" for name in need.arguments if name not in takes]
    return lacking
