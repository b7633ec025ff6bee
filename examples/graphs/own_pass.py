"""A pass of one's own among those of the package; prints the graph before and after it.

`drop-empty-swaps` removes swaps whose constant ids name no pair, because the lists are empty or
padding throughout. On CPU tensors: the inner backend `eager` captures nothing and needs no NPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from npu_kv_ops.cli.runtime_choice import choose

if TYPE_CHECKING:
    from torch.fx import Graph

HOST_BLOCKS, BLOCKS = 64, 32


class DropEmptySwaps:
    """Runs behind `reinplace`, where a swap is a node that nothing uses: it can just be erased."""

    name = "drop-empty-swaps"

    def __call__(self, graph: Graph) -> int:
        dropped = 0
        for node in graph.nodes:
            if str(node.target) != "npu_kv.swap_blocks_batch.static":
                continue
            src_blocks, dst_blocks = node.args[2:4]
            if all(src < 0 or dst < 0 for src, dst in zip(src_blocks, dst_blocks)):
                graph.erase_node(node)
                dropped += 1
        return dropped


def main() -> int:
    choose("host")
    import torch

    from npu_kv_ops.graph_passes import Merge, Overlap, Reinplace

    host, device = torch.randn(HOST_BLOCKS, 16, 8), torch.zeros(BLOCKS, 16, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.ops.npu_kv.swap_blocks_batch([host], [device], [7, 9], [0, 1])
        x = x + device.sum(0)
        torch.ops.npu_kv.swap_blocks_batch([device], [host], [-1, 4], [5, -1])
        return x * 2

    with tempfile.TemporaryDirectory() as folder:
        passes = [Reinplace(), DropEmptySwaps(), Merge(), Overlap()]
        options = {"inner": "eager", "passes": passes, "dump_to": folder}
        compiled = torch.compile(step, backend="npu_kv", options=options, fullgraph=True)
        result = compiled(torch.ones(16, 8))
        for when in ("before", "after"):
            print(f"--- {when}")
            print(Path(folder, f"0001_2_drop-empty-swaps_{when}.txt").read_text())
        print((Path(folder, "0001_report.txt")).read_text())

    wanted = (torch.ones(16, 8) + device.sum(0)) * 2
    good = torch.equal(device[:2], host[[7, 9]]) and torch.equal(result, wanted)
    print("ok  " if good else "FAIL", "own_pass: one swap is gone, the values are right")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
