"""Draws what happens at one replay of a captured call: docs/graph-replay.png.

python examples/graph_sequence.py docs/graph-replay.png    (needs matplotlib)
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Rectangle

LANES = ("the caller's stream", "host callback thread", "scheduler thread", "its copy stream")
STREAM, CALLBACK, SCHEDULER, COPIES = 0.0, 1.35, 2.7, 4.05
PLACES = (STREAM, CALLBACK, SCHEDULER, COPIES)
WIDTH = 0.98
DEVICE, HOST, WAITING, OTHER = "#4a7ebb", "#e08f3c", "#d9d9d9", "#5a9a5a"

# lane, start, end, colour, text
BOXES = (
    (STREAM, 0.2, 0.8, OTHER, "the op before"),
    (STREAM, 0.9, 1.9, DEVICE, "copy src_blocks and\ndst_blocks to the slot's\npage-locked memory"),
    (STREAM, 2.0, 2.8, WAITING, "host callback"),
    (CALLBACK, 2.1, 2.7, HOST, "hand the call over"),
    (STREAM, 2.9, 5.9, WAITING, "wait for the signal"),
    (SCHEDULER, 2.5, 3.2, HOST, "check the ids"),
    (SCHEDULER, 3.25, 3.85, HOST, "merge neighbours"),
    (SCHEDULER, 3.9, 4.55, HOST, "issue the copies"),
    (COPIES, 4.25, 5.05, DEVICE, "copies, in batches"),
    (SCHEDULER, 4.6, 5.35, HOST, "issue the signal"),
    (COPIES, 5.1, 5.9, DEVICE, "set the signal"),
    (STREAM, 6.0, 6.5, DEVICE, "reset the signal"),
    (STREAM, 6.6, 7.2, OTHER, "the next op"),
)
# from lane, to lane, height
ARROWS = (
    (STREAM, CALLBACK, 2.25),
    (CALLBACK, STREAM, 2.6),
    (CALLBACK, SCHEDULER, 2.6),
    (SCHEDULER, COPIES, 4.4),
    (SCHEDULER, COPIES, 5.22),
    (COPIES, STREAM, 5.8),
)


def draw(path: str) -> None:
    figure, axis = pyplot.subplots(figsize=(10.5, 6.6), layout="constrained")
    for place, name in zip(PLACES, LANES):
        kind = "device" if place in (STREAM, COPIES) else "host"
        axis.text(place, -0.28, name, ha="center", va="bottom", fontsize=11, weight="bold")
        axis.text(place, -0.05, kind, ha="center", va="bottom", fontsize=9, color="#666666")
        axis.plot([place, place], [0, 7.4], color="#999999", linewidth=1, linestyle=":", zorder=0)
    for place, start, end, colour, text in BOXES:
        hatch = "///" if text == "wait for the signal" else None
        axis.add_patch(
            Rectangle(
                (place - WIDTH / 2, start),
                WIDTH,
                end - start,
                facecolor=colour,
                edgecolor="white" if hatch is None else "#bbbbbb",
                hatch=hatch,
                zorder=2,
            )
        )
        dark = colour == WAITING
        axis.text(
            place,
            (start + end) / 2,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color="#222222" if dark else "white",
            bbox={"facecolor": WAITING, "edgecolor": "none", "pad": 2} if hatch else None,
            zorder=4,
        )
    for begin, end, height in ARROWS:
        side = WIDTH / 2 if end > begin else -WIDTH / 2
        axis.annotate(
            "",
            xy=(end - side, height),
            xytext=(begin + side, height),
            arrowprops={"arrowstyle": "-|>", "color": "#222222", "shrinkA": 0, "shrinkB": 0},
            zorder=3,
        )
    axis.text(
        SCHEDULER - WIDTH / 2,
        6.1,
        "A wrong id: nothing is copied. A refused copy: no further one is issued.\n"
        "The signal is set all the same, and the error is raised by the next call.",
        va="top",
        fontsize=9,
        style="italic",
        color="#444444",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 3},
    )
    axis.set_xlim(-0.6, 4.65)
    axis.set_ylim(7.45, -0.6)
    axis.axis("off")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(sys.argv[1])
    print(f"wrote {sys.argv[1]}")
