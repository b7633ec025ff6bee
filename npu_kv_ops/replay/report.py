"""The results of a replay as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .engine import Totals

if TYPE_CHECKING:
    from npu_kv_ops import CopyBackendStats

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count: float) -> str:
    """`count` bytes with a binary unit: 1536 is `1.50 KiB`."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"


def _percentile(values: list[float], percent: int) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None


def as_json(totals: Totals, runtime: str) -> dict[str, Any]:
    """The object that `--json` writes. Percentiles are None if no call was made.

    `scheduler` holds the counters of both lanes of the copy backend, None where it was not used.
    """
    traffic = totals.traffic
    return {
        "requests": totals.requests,
        "device_hits": totals.device_hits,
        "host_hits": totals.host_hits,
        "misses": totals.misses,
        "stores": totals.stores,
        "loads": totals.loads,
        "h2d_bytes": traffic.h2d_bytes,
        "d2h_bytes": traffic.d2h_bytes,
        "copies_before": traffic.copies_before,
        "copies_after": traffic.copies_after,
        "call_us_p50": _percentile(traffic.call_us, 50),
        "call_us_p99": _percentile(traffic.call_us, 99),
        "mismatches": totals.mismatches,
        "runtime": runtime,
        "seconds": round(totals.seconds, 3),
        "scheduler": None if traffic.lanes is None else dataclasses.asdict(traffic.lanes),
    }


def write_json(path: Path, totals: Totals, runtime: str) -> None:
    """Writes `as_json` to `path`."""
    path.write_text(json.dumps(as_json(totals, runtime), indent=2) + "\n", encoding="utf-8")


def _scheduler_rows(lanes: CopyBackendStats) -> list[tuple[str, str]]:
    rows = [
        (
            "queue depth at most",
            f"{lanes.loads.peak_depth:,} loads, {lanes.stores.peak_depth:,} stores",
        )
    ]
    for name, lane in (("loads", lanes.loads), ("stores", lanes.stores)):
        for what, p50, p99 in (
            ("launch to start", lane.launch_us_p50, lane.launch_us_p99),
            ("start to done", lane.completion_us_p50, lane.completion_us_p99),
        ):
            rows.append((f"{name}: {what}", _quantiles(p50, p99) if lane.jobs else "-"))
    held = f"{lanes.loads.hazards:,} loads, {lanes.stores.hazards:,} stores"
    return [*rows, ("held for hazards", held), ("failures", f"{lanes.failures:,}")]


def _quantiles(p50: float, p99: float) -> str:
    return f"p50 {p50:,.1f} us, p99 {p99:,.1f} us"


def table_rows(totals: Totals, total_requests: int, verify: str) -> list[tuple[str, str]]:
    """Name and value of each row of the table at the end."""
    blocks = totals.device_hits + totals.host_hits + totals.misses

    def share(count: int) -> str:
        return f"{count:,} ({count / blocks:.1%})" if blocks else f"{count:,}"

    served = f"{totals.requests:,}"
    if totals.requests != total_requests:
        served += f" of {total_requests:,}"
    traffic = totals.traffic
    p50, p99 = _percentile(traffic.call_us, 50), _percentile(traffic.call_us, 99)
    moved = traffic.h2d_bytes + traffic.d2h_bytes
    fewer = f" ({traffic.copies_before / traffic.copies_after:.1f}x fewer)" if moved else ""
    rows = [
        ("requests", served),
        ("device hits", share(totals.device_hits)),
        ("host hits", share(totals.host_hits)),
        ("misses", share(totals.misses)),
        ("own blocks (output, unfilled)", f"{totals.private_blocks:,}"),
        ("stores", f"{totals.stores:,} blocks, {human_bytes(traffic.d2h_bytes)} to host"),
        ("loads", f"{totals.loads:,} blocks, {human_bytes(traffic.h2d_bytes)} to device"),
        ("calls", f"{traffic.calls:,}"),
        ("copies before coalescing", f"{traffic.copies_before:,}"),
        ("copies after coalescing", f"{traffic.copies_after:,}{fewer}"),
        ("host time per call", "-" if p50 is None or p99 is None else _quantiles(p50, p99)),
        *([] if traffic.lanes is None else _scheduler_rows(traffic.lanes)),
        ("seconds", f"{totals.seconds:,.2f}"),
        (
            "bytes per second",
            f"{human_bytes(moved / totals.seconds)}/s" if totals.seconds else "-",
        ),
        ("blocks checked", f"{totals.checked:,}" if verify != "off" else "none (--verify off)"),
        ("mismatches", f"{totals.mismatches:,}"),
    ]
    if totals.unstored:
        rows.insert(7, ("not stored: host pool in use", f"{totals.unstored:,} blocks"))
    return rows
