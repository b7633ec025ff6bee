"""Statistics: from the worker through vLLM's channel to Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from played_engine import vllm_config
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.simple_kv_offload.metrics import SimpleCPUOffloadPromMetrics, SimpleCPUOffloadStats

from npu_kv_ops.integrations.offload.counts import LaneCounts, TransferCounts
from npu_kv_ops.integrations.offload.metrics import OffloadStats
from npu_kv_ops.integrations.vllm import NpuKVOffloadConnector

BYTES = "vllm:npu_kv_offload_bytes_total"
SECONDS = "vllm:npu_kv_offload_transfer_seconds"
DEPTH = "vllm:npu_kv_offload_queue_depth"
USED = "vllm:simple_kv_offload_used_blocks"

COUNTS = TransferCounts(
    loads=LaneCounts(transfers=1, failures=1, blocks=3, bytes=300, seconds=[0.002, 0.3]),
    stores=LaneCounts(transfers=2, blocks=5, bytes=500, seconds=[0.004, 0.006]),
    queue_depth=4,
)


def of_scheduler(used: int) -> OffloadStats:
    stats = OffloadStats()
    stats.set_gauge(USED, used)
    return stats


def test_ranks_and_steps_add_up() -> None:
    one = OffloadStats.of_worker(COUNTS)
    two = OffloadStats.of_worker(
        TransferCounts(
            loads=LaneCounts(transfers=1, blocks=1, bytes=100, seconds=[0.1]), queue_depth=2
        )
    )
    total = one.aggregate(two).aggregate(of_scheduler(7)).aggregate(of_scheduler(9)).reduce()
    assert total[f"{BYTES}:('load',)"] == 400
    assert total[f"{BYTES}:('store',)"] == 500
    assert total[DEPTH] == 4
    assert total[USED] == 9
    assert total[f"{SECONDS}:('load',):mean"] == pytest.approx(0.134)
    assert total[f"{SECONDS}:('load',):max"] == 0.3
    assert total[f"{SECONDS}:('store',):max"] == 0.006


def test_adding_does_not_change_what_is_added() -> None:
    one, two = OffloadStats.of_worker(COUNTS), OffloadStats.of_worker(COUNTS)
    OffloadStats().aggregate(one).aggregate(two)
    assert one.reduce() == two.reduce() == OffloadStats.of_worker(COUNTS).reduce()


def test_nothing_is_empty() -> None:
    assert OffloadStats().is_empty()
    assert OffloadStats().reduce() == {}
    assert isinstance(NpuKVOffloadConnector.build_kv_connector_stats(), OffloadStats)


def test_a_vllm_without_a_kind_of_metric_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleCPUOffloadPromMetrics.__init__

    def without(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        del self._histogram_cls

    monkeypatch.setattr(SimpleCPUOffloadPromMetrics, "__init__", without)
    with pytest.raises(ImportError, match=r"OffloadPromMetrics\(\)\._histogram_cls$"):
        Metrics(tmp_path)


class Metrics:
    """Our metrics for two engines, in a registry of their own."""

    def __init__(self, folder: Path) -> None:
        self.registry = CollectorRegistry()

        def of(kind: type) -> Any:
            return lambda **options: kind(
                **{k: v for k, v in options.items() if k != "multiprocess_mode"},
                registry=self.registry,
            )

        kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
        self.metrics = NpuKVOffloadConnector.build_prom_metrics(
            vllm_config(folder),
            {kind: of(kind) for kind in kinds},
            ["model_name", "engine"],
            {0: ["m", "0"], 1: ["m", "1"]},
        )

    def samples(self) -> dict[tuple[str, str, str], float]:
        """Value by name, engine and direction."""
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return {
            (s.name, s.labels.get("engine", ""), s.labels.get("direction", "")): s.value
            for family in families
            for s in family.samples
            if "le" not in s.labels and "capacity_blocks" not in s.labels
        }


def test_prometheus(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    before = metrics.samples()
    for name in (BYTES, f"{SECONDS}_count"):  # there, at zero, before anything is copied
        assert {before[name, e, d] for e in "01" for d in ("load", "store")} == {0.0}
    payload = OffloadStats.of_worker(COUNTS).aggregate(of_scheduler(7))
    # As it travels from the engine core to the server.
    sent = SchedulerStats(kv_connector_stats=payload.to_dict())
    received = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(sent))
    for _ in range(2):
        metrics.metrics.observe(received.kv_connector_stats, 1)
    after = metrics.samples()
    assert after[BYTES, "1", "load"] == 600
    assert after[BYTES, "1", "store"] == 1000
    assert after["vllm:npu_kv_offload_blocks_total", "1", "store"] == 10
    assert after["vllm:npu_kv_offload_transfers_total", "1", "store"] == 4
    assert after["vllm:npu_kv_offload_failed_transfers_total", "1", "load"] == 2
    assert after["vllm:npu_kv_offload_failed_transfers_total", "1", "store"] == 0
    assert after[f"{SECONDS}_count", "1", "load"] == 4
    assert after[f"{SECONDS}_sum", "1", "load"] == pytest.approx(0.604)
    assert after[DEPTH, "1", ""] == 4
    assert after[USED, "1", ""] == 7
    assert after[BYTES, "0", "load"] == 0, "the other engine"


def test_vllm_itself_still_understands_its_part() -> None:
    """A scheduler of ours beside vLLM's worker, or the other way round, must not break a server."""
    theirs = SimpleCPUOffloadStats()
    theirs.increase_counter("vllm:simple_kv_offload_load_blocks_total", 3)
    total = OffloadStats.of_worker(COUNTS).aggregate(theirs).reduce()
    assert total["vllm:simple_kv_offload_load_blocks_total"] == 3
