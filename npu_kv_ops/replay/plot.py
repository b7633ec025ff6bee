"""Hits, pool use and traffic over the trace, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Sample
from .sizing import Sizes

_BINS = 200


def _sums(values: Sequence[int], edges: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Sums of `values` between neighbouring `edges`."""
    total = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
    return np.asarray(total[edges[1:]] - total[edges[:-1]], dtype=np.float64)


def save_plot(path: Path, samples: Sequence[Sample], sizes: Sizes, title: str) -> None:
    """Writes the picture to `path`; the format follows the suffix.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes: Any = figure.subplots(3, 1, sharex=True)
    step = max(1, -(-len(samples) // _BINS))
    edges = np.append(np.arange(0, len(samples), step), len(samples))
    left, width = edges[:-1], np.diff(edges)
    each = "per request" if step == 1 else f"per {step:,} requests"

    def binned(name: str) -> npt.NDArray[np.float64]:
        return _sums([getattr(sample, name) for sample in samples], edges)

    base = np.zeros(len(left))
    for name, label, color in (
        ("device_hits", "device hits", "tab:green"),
        ("host_hits", "host hits", "tab:blue"),
        ("misses", "misses", "tab:gray"),
    ):
        values = binned(name)
        axes[0].bar(left, values, width, bottom=base, align="edge", label=label, color=color)
        base = base + values
    axes[0].set_ylabel(f"blocks {each}")

    x = np.arange(1, len(samples) + 1)
    for name, label, size in (
        ("device_used", "device pool", sizes.device_blocks),
        ("host_used", "host pool", sizes.host_blocks),
    ):
        used = np.asarray([getattr(sample, name) for sample in samples], dtype=np.float64)
        axes[1].plot(x, 100 * used / size, label=f"{label} ({size:,} blocks)")
    axes[1].set_ylabel("used, %")
    axes[1].set_ylim(0, 105)

    mib = float(1 << 20)
    axes[2].step(left, binned("h2d_bytes") / mib, where="post", label="loads, to device")
    axes[2].step(left, binned("d2h_bytes") / mib, where="post", label="stores, to host")
    axes[2].set_ylabel(f"MiB {each}")
    axes[2].set_xlabel("request")
    for axis in axes:
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
