"""A trace of the copy backend's jobs, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is the Trace Event Format: a JSON object with ``traceEvents``, times in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from npu_kv_ops import simulator

__all__ = ["MOST_JOBS", "write_trace"]

# Jobs beyond these are not kept: a trace is looked at, and its memory is bounded.
MOST_JOBS = 200_000

_HOST, _DEVICE = 1, 2
_LANES = {False: "loads", True: "stores"}


def write_trace(
    path: str | os.PathLike[str],
    jobs: Sequence[dict[str, Any]],
    device_tasks: Iterable[simulator.TaskRecord],
    lane_streams: tuple[int, int],
) -> None:
    """Write what ``CopyBackend.stop_trace`` returned, and the simulator's tasks of its streams.

    Each lane has rows for jobs that are queued, being issued and being copied, on the host's clock;
    an arrow leads from a job to the one of the other lane that was held behind it. On the simulated
    runtime the lanes' streams have a row each on its virtual clock, which has nothing to do with
    the host's.
    """
    events = _host_events(jobs)
    events += _device_events(device_tasks, lane_streams)
    Path(path).write_text(
        json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, indent=None) + "\n",
        encoding="utf-8",
    )


def _name(kind: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _rows(is_store: bool) -> dict[str, int]:
    first = 10 if is_store else 1
    return {"queued": first, "issue": first + 1, "copy": first + 2}


def _host_events(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    events = [_name("process_name", _HOST, "copy backend (host clock)")]
    for is_store, lane in _LANES.items():
        for row, tid in _rows(is_store).items():
            events.append(_name("thread_name", _HOST, f"{lane}: {row}", tid))
    zero = min((job["submitted_ns"] for job in jobs), default=0)
    started = {job["number"]: job for job in jobs}

    def us(ns: int) -> float:
        return (ns - zero) / 1000.0

    for job in jobs:
        rows = _rows(job["is_store"])
        title = f"{'store' if job['is_store'] else 'load'} {job['label']}"
        args = {key: job[key] for key in ("number", "pairs", "bytes", "behind", "gated", "failed")}
        spans = (
            ("queued", job["submitted_ns"], job["started_ns"]),
            ("issue", job["started_ns"], job["launched_ns"]),
            ("copy", job["launched_ns"], job["finished_ns"]),
        )
        for row, start, end in spans:
            # Jobs of a row overlap, which slices of a thread may not: asynchronous ones may.
            common = {
                "name": title,
                "cat": row,
                "pid": _HOST,
                "tid": rows[row],
                "id": job["number"],
            }
            events.append({"ph": "b", "ts": us(start), "args": args, **common})
            events.append({"ph": "e", "ts": us(end), **common})
        if job["gated"] and job["gate_opened_ns"]:
            events.append(
                {
                    "ph": "n",
                    "name": f"{title}: wait_event issued",
                    "cat": "queued",
                    "pid": _HOST,
                    "tid": rows["queued"],
                    "id": job["number"],
                    "ts": us(job["gate_opened_ns"]),
                }
            )
        before = started.get(job["behind"])
        if before is not None:
            arrow = {"name": "common block", "cat": "hazard", "pid": _HOST, "id": job["number"]}
            from_row = _rows(before["is_store"])["issue"]
            events.append({"ph": "s", "tid": from_row, "ts": us(before["launched_ns"]), **arrow})
            events.append(
                {"ph": "f", "bp": "e", "tid": rows["issue"], "ts": us(job["started_ns"]), **arrow}
            )
    return events


def _device_events(
    tasks: Iterable[simulator.TaskRecord], lane_streams: tuple[int, int]
) -> list[dict[str, Any]]:
    rows = {stream: tid for tid, stream in enumerate(lane_streams, start=1)}
    events: list[dict[str, Any]] = []
    for task in tasks:
        if task.handle in rows:
            events.append(
                {
                    "ph": "X",
                    "name": task.kind,
                    "cat": "device",
                    "pid": _DEVICE,
                    "tid": rows[task.handle],
                    "ts": task.start_ns / 1000.0,
                    "dur": (task.end_ns - task.start_ns) / 1000.0,
                    "args": {"bytes": task.bytes},
                }
            )
    if events:
        events.append(_name("process_name", _DEVICE, "simulated NPU (virtual clock)"))
        for tid, lane in enumerate(_LANES.values(), start=1):
            events.append(_name("thread_name", _DEVICE, f"stream of {lane}", tid))
    return events
