"""Statistics in vLLM's own channel: the payload of a step, and the Prometheus metrics of it."""

from __future__ import annotations

from typing import Any

from vllm.v1.simple_kv_offload.metrics import SimpleCPUOffloadPromMetrics, SimpleCPUOffloadStats

from npu_kv_ops.integrations.offload import interface
from npu_kv_ops.integrations.offload.counts import DIRECTIONS, TransferCounts

__all__ = ["BYTES", "OffloadPromMetrics", "OffloadStats"]

BYTES = "vllm:npu_kv_offload_bytes_total"
BLOCKS = "vllm:npu_kv_offload_blocks_total"
TRANSFERS = "vllm:npu_kv_offload_transfers_total"
FAILURES = "vllm:npu_kv_offload_failed_transfers_total"
SECONDS = "vllm:npu_kv_offload_transfer_seconds"
QUEUE_DEPTH = "vllm:npu_kv_offload_queue_depth"

_COUNTERS = {
    BYTES: "Bytes of KV blocks copied, of all ranks, by direction (load: host to device).",
    BLOCKS: "KV blocks copied, of all ranks, by direction.",
    TRANSFERS: "Transfers that went well, of all ranks, by direction; at most one a step.",
    FAILURES: "Transfers that failed, of all ranks, by direction.",
}
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Kinds of values in the payload. The first two are vLLM's.
_COUNTER = "counter"
_GAUGE = "gauge"
_PEAK = "peak"  # of several ranks or steps the highest
_OBSERVATIONS = "observations"  # of a histogram


class OffloadStats(SimpleCPUOffloadStats):
    """vLLM's payload, which travels between processes, with histograms and peaks beside counters.

    ``data["types"]`` maps a metric to the kind of its values, ``data["data"]`` a metric to a value
    by label values.
    """

    @classmethod
    def of_worker(cls, counts: TransferCounts) -> OffloadStats:
        """Return what a worker has counted."""
        stats = cls()
        for direction, lane in counts.lanes():
            label = (direction,)
            numbers = (lane.bytes, lane.blocks, lane.transfers, lane.failures)
            for name, number in zip(_COUNTERS, numbers, strict=True):
                if number:
                    stats._set(name, _COUNTER, label, number)
            if lane.seconds:
                stats._set(SECONDS, _OBSERVATIONS, label, lane.seconds)
        stats._set(QUEUE_DEPTH, _PEAK, (), counts.queue_depth)
        return stats

    def aggregate(self, other: SimpleCPUOffloadStats) -> OffloadStats:
        """Add the statistics of another rank or step to these, and return these."""
        for name, values in other._values.items():
            kind = other._types[name]
            for label, value in values.items():
                old = self._values.get(name, {}).get(label)
                if old is not None and kind in (_COUNTER, _OBSERVATIONS):
                    value = old + value
                elif old is not None and kind == _PEAK:
                    value = max(old, value)
                self._set(name, kind, label, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one number a metric, for vLLM's log line of an interval."""
        plain = SimpleCPUOffloadStats()
        numbers: dict[str, int | float] = {}
        for name, values in self._values.items():
            if self._types[name] == _OBSERVATIONS:
                for label, seconds in values.items():
                    prefix = f"{name}:{label}"
                    numbers[f"{prefix}:mean"] = round(sum(seconds) / len(seconds), 6)
                    numbers[f"{prefix}:max"] = round(max(seconds), 6)
            else:
                kind = self._types[name]
                plain._types[name] = _GAUGE if kind == _PEAK else kind
                plain._values[name] = values
        return {**plain.reduce(), **numbers}

    def _set(self, name: str, kind: str, label: tuple[str, ...], value: Any) -> None:
        self._types[name] = kind
        self._values.setdefault(name, {})[label] = value


class OffloadPromMetrics(SimpleCPUOffloadPromMetrics):
    """vLLM's metrics of the simple offload, and those of our transfers."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        interface.check_attributes(self, ("_counter_cls", "_gauge_cls", "_histogram_cls"))
        labels = [*labelnames, "direction"]
        families = {
            name: self._counter_cls(name=name, documentation=text, labelnames=labels)
            for name, text in _COUNTERS.items()
        }
        families[SECONDS] = self._histogram_cls(
            name=SECONDS,
            documentation="Seconds from the launch of a transfer to the engine step that saw its "
            "end, by direction.",
            buckets=_BUCKETS,
            labelnames=labels,
        )
        families[QUEUE_DEPTH] = self._gauge_cls(
            name=QUEUE_DEPTH,
            documentation="Transfers that are launched and have not ended, of the rank with most.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        # Made at once, so that a server that has copied nothing shows zeros.
        self._children: dict[tuple[int, str, tuple[str, ...]], Any] = {
            (engine, name, label): family.labels(*values, *label)
            for engine, values in per_engine_labelvalues.items()
            for name, family in families.items()
            for label in ([()] if name == QUEUE_DEPTH else [(d,) for d in DIRECTIONS])
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the payload of a step."""
        types, rest = transfer_stats_data.get("types", {}), {}
        for name, values in transfer_stats_data.get("data", {}).items():
            kind = types.get(name)
            if (engine_idx, name, next(iter(values), ())) not in self._children:
                rest[name] = values
                continue
            for label, value in values.items():
                child = self._children[engine_idx, name, tuple(label)]
                if kind == _COUNTER:
                    child.inc(value)
                elif kind == _OBSERVATIONS:
                    for seconds in value:
                        child.observe(seconds)
                else:
                    child.set(value)
        if rest:
            super().observe({"types": types, "data": rest}, engine_idx)
