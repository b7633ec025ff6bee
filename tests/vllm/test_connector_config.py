"""Options, prefix caching off, and a vLLM that does not fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from played_engine import BLOCK, BLOCK_BYTES, cache_config, vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)

from npu_kv_ops import pinned_memory
from npu_kv_ops.integrations.offload import interface
from npu_kv_ops.integrations.offload.config import DEFAULT_CPU_BYTES, OPTIONS, OffloadConfig
from npu_kv_ops.integrations.offload.scheduler import OffloadScheduler
from npu_kv_ops.integrations.vllm import NpuKVOffloadConnector

WORKER, SCHEDULER = KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER
# Of a step's metadata, without those that say whose a load is and whether to flush.
FIELDS = ["load_event", "load_gpu_blocks", "load_cpu_blocks"]
FIELDS += ["store_event", "store_gpu_blocks", "store_cpu_blocks"]
ROLES = pytest.mark.parametrize("role", [WORKER, SCHEDULER])


# -------------------------------------------------------------------------------------- options


def test_defaults_are_those_of_vllm() -> None:
    assert OffloadConfig.parse({}, world_size=2) == OffloadConfig(DEFAULT_CPU_BYTES // 2, False)


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({"cpu_bytes_to_use": 10_001}, OffloadConfig(2500, False)),
        ({"cpu_bytes_to_use": 1e9}, OffloadConfig(250_000_000, False)),
        ({"cpu_bytes_to_use_per_rank": 77}, OffloadConfig(77, False)),
        ({"cpu_bytes_to_use": 8, "cpu_bytes_to_use_per_rank": 77}, OffloadConfig(77, False)),
        ({"lazy_offload": True, "kv_offload_backend": "cpu", "cpu_bytes_to_use": 40},
         OffloadConfig(10, True)),
    ],
)  # fmt: skip
def test_options(extra: dict[str, Any], wanted: OffloadConfig) -> None:
    assert OffloadConfig.parse(extra, world_size=4) == wanted


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"cpu_bytes_to_us": 1, "disk_path": "/x"}, "'cpu_bytes_to_us', 'disk_path'; valid are"),
        ({"cpu_bytes_to_use": "8GiB"}, "cpu_bytes_to_use is '8GiB', allowed is a whole number"),
        ({"cpu_bytes_to_use": 1.5}, "cpu_bytes_to_use is 1.5"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use is True"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use is 0, allowed are bytes from 1"),
        ({"cpu_bytes_to_use": 3}, "cpu_bytes_to_use is 3, less than a byte for each of 4 ranks"),
        ({"cpu_bytes_to_use_per_rank": -1}, "cpu_bytes_to_use_per_rank is -1"),
        ({"lazy_offload": "false"}, "lazy_offload is 'false', allowed are true and false"),
        ({"kv_offload_backend": "disk"}, "kv_offload_backend is 'disk', allowed is \"cpu\""),
    ],
)
def test_wrong_options(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        OffloadConfig.parse(extra, world_size=4)
    assert message in str(raised.value)


@ROLES
def test_a_wrong_option_is_an_error_of_both_halves(tmp_path: Path, role: KVConnectorRole) -> None:
    config = vllm_config(tmp_path, extra={"cpu_bytes": 1})
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        NpuKVOffloadConnector(config, role, cache_config(8))
    assert all(option in str(raised.value) for option in OPTIONS)


def test_too_much_memory_is_an_error_before_the_caches_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_memory, "_free_bytes", lambda: 3 * BLOCK_BYTES)
    with pytest.raises(MemoryError, match=f"set cpu_bytes_to_use_per_rank to {3 * BLOCK_BYTES}"):
        NpuKVOffloadConnector(vllm_config(tmp_path, host_blocks=4), WORKER, cache_config(8))


@pytest.mark.parametrize(("nodes", "ranks_here"), [(1, 4), (2, 2)])
def test_the_memory_has_to_do_for_all_ranks_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, ranks_here: int
) -> None:
    monkeypatch.setattr(pinned_memory, "_free_bytes", lambda: 8 * BLOCK_BYTES - 1)
    most = (8 * BLOCK_BYTES - 1) // ranks_here

    def make(per_rank: int) -> NpuKVOffloadConnector:
        config = vllm_config(tmp_path, extra={"cpu_bytes_to_use_per_rank": per_rank})
        config.parallel_config.world_size = 4
        config.parallel_config.nnodes = nodes
        return NpuKVOffloadConnector(config, WORKER, cache_config(8))

    with pytest.raises(MemoryError) as raised:
        make(most + 1)
    text = str(raised.value)
    assert f"{(most + 1) * ranks_here} with the {ranks_here} rank(s)" in text
    assert text.endswith(f"set cpu_bytes_to_use_per_rank to {most} or less")
    make(most).shutdown()


def test_every_rank_looks_before_any_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(pinned_memory, "_free_bytes", lambda: order.append("look") or 0)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    for kind in ("tp", "pp"):
        group = SimpleNamespace(barrier=lambda kind=kind: order.append(kind))
        monkeypatch.setattr(parallel_state, f"get_{kind}_group", lambda group=group: group)
    config = vllm_config(tmp_path)
    config.parallel_config.world_size = 2
    with pytest.raises(MemoryError):  # after the barriers: no rank waits for one that has raised
        NpuKVOffloadConnector(config, WORKER, cache_config(8))
    assert order == ["look", "tp", "pp"]


# ------------------------------------------------------------------------- how vLLM meets the class


def test_vllm_finds_and_takes_it(tmp_path: Path) -> None:
    config = vllm_config(tmp_path)
    connector = KVConnectorFactory.create_connector(config, SCHEDULER, cache_config(8))
    assert type(connector) is NpuKVOffloadConnector
    assert supports_hma(connector)
    assert not connector.requires_kv_delivery
    assert connector.scheduler_manager.num_cpu_blocks == 64
    connector.shutdown()


@ROLES
def test_without_prefix_caching_nothing_happens(
    tmp_path: Path, role: KVConnectorRole, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config(tmp_path, prefix_caching=False)
    connector = NpuKVOffloadConnector(config, role, cache_config(8))
    assert connector.scheduler_manager is None
    assert connector.worker_handler is None
    assert "prefix caching disabled" in caplog.text
    connector.register_kv_caches({})
    connector.handle_preemptions(None)
    connector.start_load_kv(None)
    connector.wait_for_save()
    results = connector.get_transfer_results(set())
    assert not results.finished_recving
    assert not results.failed_recving
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.get_kv_connector_stats() is None
    assert connector.get_handshake_metadata() is None
    connector.set_xfer_handshake_metadata_pp_aware({})
    connector.shutdown()
    assert sim.stats().live["pinned_bytes"] == 0


# ---------------------------------------------------------------------- a vLLM that does not fit


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.simple_kv_offload import metadata, worker

    class Renamed:
        def __init__(self, vllm_config: Any, cache_config: Any, cpu_capacity_bytes: int) -> None:
            pass

    monkeypatch.delattr(BlockPool, "evict_blocks")
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    monkeypatch.setattr(worker, "SimpleCPUOffloadWorker", Renamed)
    monkeypatch.setattr(metadata, "SimpleCPUOffloadMetadata", make_dataclass("Older", FIELDS))
    monkeypatch.setattr(base, "KVConnectorRole", Enum("Role", ["SCHEDULER"]))
    with pytest.raises(ImportError) as raised:
        interface.check_connector()
    text = str(raised.value)
    assert "does not fit vLLM 0.32.0" in text
    listed = [line.strip() for line in text.splitlines()[1:]]
    assert listed == [
        "vllm.v1.simple_kv_offload.worker.SimpleCPUOffloadWorker(kv_cache_config=...)",
        "vllm.v1.simple_kv_offload.metadata.SimpleCPUOffloadMetadata(load_event_to_reqs=...)",
        "vllm.v1.simple_kv_offload.metadata.SimpleCPUOffloadMetadata(need_flush=...)",
        "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorRole.WORKER",
        "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults",
        "vllm.v1.core.block_pool.BlockPool.evict_blocks",
    ]
    with pytest.raises(ImportError, match=r"the worker does not fit(.*\n)*.*need_flush=...\)$"):
        interface.check_worker()


def test_results_without_failures_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    older = make_dataclass("Older", ["finished_sending", "finished_recving"])
    monkeypatch.setattr(base, "KVConnectorTransferResults", older)
    with pytest.raises(ImportError, match=r"KVConnectorTransferResults\(failed_recving=...\)$"):
        interface.check_connector()


def test_attributes_that_a_scheduler_lacks_are_named_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    made = SimpleCPUOffloadScheduler.__init__

    def without(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        del self.block_size, self._store_event_to_reqs

    config, caches = vllm_config(tmp_path), cache_config(8)
    NpuKVOffloadConnector(config, SCHEDULER, caches).shutdown()  # whole, it is taken
    monkeypatch.setattr(SimpleCPUOffloadScheduler, "__init__", without)
    for make in (
        lambda: NpuKVOffloadConnector(config, SCHEDULER, caches),
        lambda: OffloadScheduler(
            config, caches, BLOCK_BYTES, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        ),
    ):
        with pytest.raises(ImportError) as raised:
            make()
        listed = [line.split("().")[1] for line in str(raised.value).splitlines()[1:]]
        assert listed == ["block_size", "_store_event_to_reqs"]


def test_attributes_that_a_connector_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleCPUOffloadConnector.__init__

    def without(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        del self.worker_handler

    monkeypatch.setattr(SimpleCPUOffloadConnector, "__init__", without)
    with pytest.raises(ImportError, match=r"NpuKVOffloadConnector\(\)\.worker_handler$"):
        NpuKVOffloadConnector(vllm_config(tmp_path), SCHEDULER, cache_config(8))


def test_a_module_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.simple_kv_offload.manager", None)
    with pytest.raises(ImportError, match=r"manager\.SimpleCPUOffloadScheduler \(import of"):
        interface.check_connector()


@pytest.mark.parametrize("module", ["vllm", "vllm_ascend"])
def test_without_vllm_there_is_one_clear_error(module: str, run_script: Any) -> None:
    script = f"""
    import sys
    sys.modules["vllm"] = None
    import npu_kv_ops.integrations
    try:
        import npu_kv_ops.integrations.{module}
    except ImportError as error:
        assert "vLLM cannot be imported" in str(error), error
    else:
        raise SystemExit("no error")
    """
    run_script(script)


def test_the_package_does_not_import_vllm() -> None:
    code = "import npu_kv_ops, npu_kv_ops.integrations, sys; sys.exit('vllm' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
