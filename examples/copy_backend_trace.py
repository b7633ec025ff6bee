"""A large store, and loads that overtake it unless they share a block: a trace to look at.

Run with ``NPU_KV_RUNTIME=sim python examples/copy_backend_trace.py trace.json``, then open the file
in https://ui.perfetto.dev. ``--plot picture.png`` draws the same without a browser.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import npu_kv_ops

LAYERS, BLOCKS, BLOCK = 32, 1024, (16, 8, 64)
COLOURS = {"queued": "#c9c9c9", "issue": "#e08f3c", "copy": "#4a7ebb", "device": "#5a9a5a"}


def run(path: Path) -> None:
    on_npu = [torch.empty(BLOCKS, *BLOCK, dtype=torch.float16, device="npu") for _ in range(LAYERS)]
    pools = {str(i): tensor for i, tensor in enumerate(on_npu)}
    host = npu_kv_ops.host_mirror(pools, num_blocks=BLOCKS)
    with npu_kv_ops.NPUDmaCopyBackend() as backend:
        backend.init(pools, host)
        events: list[tuple[int, npu_kv_ops.TransferEvent]] = []
        written = torch.npu.Event()
        backend.launch_copy([0], [0], True, 0, events)  # the first use of everything
        backend.synchronize(60)
        with backend.trace(path):
            written.record()
            scattered = list(range(1, 513, 2))
            backend.launch_copy(scattered, scattered, True, 1, events, written)
            for index in range(2, 5):
                blocks = list(range(600 + 8 * index, 608 + 8 * index))
                backend.launch_copy(blocks, blocks, False, index, events, written)
            backend.launch_copy(
                [511], [700], False, 5, events, written
            )  # block 511 is being stored
            backend.synchronize(60)


def plot(path: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    events = json.loads(path.read_text())["traceEvents"]
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    starts = {(e["pid"], e["tid"], e["id"]): e for e in events if e["ph"] == "b"}
    bars = [(e, e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    for end in (e for e in events if e["ph"] == "e"):
        begin = starts[end["pid"], end["tid"], end["id"]]
        bars.append((begin, begin["ts"], end["ts"] - begin["ts"]))
    figure, axes = pyplot.subplots(
        len(processes), 1, figsize=(11, 2.2 * len(processes)), layout="constrained", squeeze=False
    )
    for axis, (pid, title) in zip(axes[:, 0], processes.items()):
        lanes = sorted(tid for process, tid in rows if process == pid)
        mine = [bar for bar in bars if bar[0]["pid"] == pid]
        zero = min(start for _, start, _ in mine)
        last = max(start + length for _, start, length in mine)
        for event, start, length in mine:
            y = lanes.index(event["tid"])
            kind = "queued" if event["name"] == "wait" else event["cat"]
            axis.barh(y, length, left=start - zero, color=COLOURS[kind], alpha=0.75)
            if event["cat"] == "copy" and length > 0.1 * (last - zero):
                axis.text(start - zero, y, f" {event['name']}", va="center", fontsize=7)
        axis.set_yticks(range(len(lanes)), [rows[pid, tid] for tid in lanes])
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlabel("microseconds")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the trace to write")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw it (needs matplotlib)")
    arguments = parser.parse_args()
    npu_kv_ops.runtime.load()
    run(arguments.path)
    print(f"wrote {arguments.path}")
    if arguments.plot:
        plot(arguments.path, arguments.plot)
        print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()
